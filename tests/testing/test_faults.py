"""Fault points see each operation on a file and strike before it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from asupervisor.testing import FaultPoints

WORK = """
import os, sys
from asupervisor.testing import FaultPoints

directory, at = sys.argv[1], int(sys.argv[2])
points = FaultPoints(directory, at=at or None).arm()
os.mkdir(directory + "/new")
with open(directory + "/new/file.tmp", "w") as file:
    file.write("text")
open(directory + "/new/file.tmp").close()                  # to read: not an operation
open(os.path.dirname(directory) + "/elsewhere", "w").close()
os.replace(directory + "/new/file.tmp", directory + "/new/file")
os.remove(directory + "/new/file")
points.disarm()
os.rmdir(directory + "/new")
print(points.operations)
"""

OPERATIONS = ["os.mkdir new", "open new/file.tmp", "os.rename new/file.tmp new/file", "os.remove new/file"]
LEFT = [[], ["new"], ["new", "new/file.tmp"], ["new", "new/file"]]


@pytest.fixture
def work(tmp_path: Path, python: str, fresh_environ: dict[str, str]):
    directory = tmp_path / "files"
    directory.mkdir()

    def run(at: int) -> tuple[int, str, list[str]]:
        command = [python, "-c", WORK, str(directory), str(at)]
        done = subprocess.run(command, env=fresh_environ, capture_output=True, text=True, timeout=60)
        left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
        return done.returncode, done.stdout.strip(), left

    return run


def test_each_operation_is_seen(work) -> None:
    assert work(0) == (0, str(OPERATIONS), [])


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_the_process_ends_before_the_operation(work, at: int) -> None:
    assert work(at) == (-signal.SIGKILL, "", LEFT[at - 1])


def test_an_operation_fails(tmp_path: Path) -> None:
    def disk_full() -> None:
        raise OSError(28, "No space left on device")

    points = FaultPoints(tmp_path, at=2, strike=disk_full).arm()
    try:
        (tmp_path / "first").write_text("")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "second").write_text("")
        (tmp_path / "third").write_text("")
    finally:
        points.disarm()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "third"]
