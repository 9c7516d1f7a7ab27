"""One writer for one directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from asupervisor.checkpoint.lock import LogdirLock
from asupervisor.errors import LogdirInUse, LogdirNotWritable

CHILD = """
import sys
from asupervisor.checkpoint.lock import LogdirLock
from asupervisor.errors import LogdirInUse
lock = LogdirLock(sys.argv[1], timeout_secs=float(sys.argv[2]))
try:
    lock.acquire()
except LogdirInUse as error:
    print("in use", error.host, error.pid, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


def start(logdir: Path, environ: dict[str, str], timeout_secs: float = 0.0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(logdir), str(timeout_secs)]
    return subprocess.Popen(arguments, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_f26_two_processes(tmp_path: Path, fresh_environ: dict[str, str]) -> None:
    """F26. TensorFlow: both write, and delete each other's files. Here the second one writes nothing."""
    first = start(tmp_path / "logdir", fresh_environ)
    assert said(first) == "held"
    listing = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "logdir").iterdir()}
    second = start(tmp_path / "logdir", fresh_environ, 0.3)
    host, pid = said(second).removeprefix("in use ").split()
    assert host == os.uname().nodename and int(pid) == first.pid
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "logdir").iterdir()} == listing
    second.communicate(timeout=20)
    first.communicate("\n", timeout=20)
    third = start(tmp_path / "logdir", fresh_environ)
    assert said(third) == "held"
    third.communicate("\n", timeout=20)


def test_f26_left_by_a_killed_process(tmp_path: Path, fresh_environ: dict[str, str]) -> None:
    first = start(tmp_path, fresh_environ)
    assert said(first) == "held"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=20)
    second = start(tmp_path, fresh_environ)
    assert said(second) == "held"
    second.communicate("\n", timeout=20)


def test_f26_the_second_waits(tmp_path: Path, fresh_environ: dict[str, str]) -> None:
    """A reload: the old process is still ending while the new one begins."""
    first = start(tmp_path, fresh_environ)
    assert said(first) == "held"
    second = start(tmp_path, fresh_environ, 30.0)
    first.communicate("\n", timeout=20)
    assert said(second) == "held"
    second.communicate("\n", timeout=20)


def test_f26_in_one_process(tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path)
    lock.acquire()
    assert lock.held
    with pytest.raises(LogdirInUse) as caught:
        LogdirLock(tmp_path, timeout_secs=0.1).acquire()
    assert caught.value.pid == os.getpid()
    lock.release()
    lock.release()
    assert not lock.held
    lock.acquire()
    lock.release()


def test_taken_and_given_back_on_different_threads(tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path)
    for action in (lock.acquire, lock.release, lock.acquire, lock.release):
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()
    other = LogdirLock(tmp_path, timeout_secs=0)
    other.acquire()
    other.release()


def test_the_wait_can_be_cancelled(tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path)
    lock.acquire()
    with pytest.raises(LogdirInUse):
        LogdirLock(tmp_path, timeout_secs=1000).acquire(cancelled=lambda: True)
    lock.release()


@pytest.mark.allow_leak  # the child of the fork has no say in what it inherits
def test_a_forked_child_does_not_hold_it(tmp_path: Path, fresh_environ: dict[str, str]) -> None:
    """A process pool that was forked lives on after its parent was killed, or has released the lock."""
    script = (
        "import os, sys, time\n"
        "from asupervisor.checkpoint.lock import LogdirLock\n"
        "lock = LogdirLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "print('forked', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=fresh_environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert said(parent) == "forked"
    parent.wait(20)
    lock = LogdirLock(tmp_path, timeout_secs=20)
    lock.acquire()
    lock.release()
    parent.communicate("\n", timeout=20)


def test_directory_replaced(tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path / "logdir")
    lock.acquire()
    lock.ensure()
    (tmp_path / "logdir").rename(tmp_path / "old")
    (tmp_path / "logdir").mkdir()
    other = LogdirLock(tmp_path / "logdir")
    other.acquire()
    for _ in range(2):  # what was refused once stays refused
        with pytest.raises(LogdirInUse):
            lock.ensure()
    other.release()
    assert lock.ensure()
    assert lock.held
    assert not lock.ensure()
    lock.release()
    assert not lock.ensure() and not lock.held  # given back is given back


def test_directory_replaced_and_taken_again(tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path / "logdir")
    lock.acquire()
    (tmp_path / "logdir").rename(tmp_path / "old")
    (tmp_path / "logdir").mkdir()
    lock.ensure()
    assert lock.held
    with pytest.raises(LogdirInUse):
        LogdirLock(tmp_path / "logdir", timeout_secs=0).acquire()
    lock.release()


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b'{"host": 1, "pid": "x"}'])
def test_a_bad_note_of_the_holder_does_no_harm(content: bytes, tmp_path: Path) -> None:
    lock = LogdirLock(tmp_path)
    lock.acquire()
    (tmp_path / ".asupervisor.holder").write_bytes(content)
    with pytest.raises(LogdirInUse) as caught:
        LogdirLock(tmp_path, timeout_secs=0).acquire()
    assert caught.value.pid is None
    lock.release()


def test_a_file_in_the_way(tmp_path: Path, mounted: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogdirNotWritable):
        LogdirLock(tmp_path / "file").acquire()
    place = mounted()
    mounted.read_only(place)
    with pytest.raises(LogdirNotWritable, match="Read-only"):
        LogdirLock(place).acquire()
