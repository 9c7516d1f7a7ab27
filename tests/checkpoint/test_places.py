"""Places that go wrong: full, read-only, forbidden, gone. A save fails, everything else goes on, saves recover."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.checkpoint.lock import LOCK_NAME, LogdirLock
from asupervisor.errors import CheckpointNotRestored, LogdirInUse, LogdirNotWritable
from tests.forks import Forks


def session_with(model: Any, store: Any) -> Any:
    raw = model.session()
    raw.run(model.init)
    store.claim(None)
    return raw


def test_disk_full(make_model: Any, make_store: Any, mounted: Any, restored_step: Any) -> None:
    """10: nothing is written where it cannot fit, old checkpoints stay, and it works again when there is room."""
    place = mounted("4m")
    model = make_model(parts=3, size=50_000)
    store = make_store(model, place / "logdir")
    with session_with(model, store) as raw:
        raw.run(model.train)
        store.publish(store.snapshot(raw))
        (place / "filler").write_bytes(b"x" * (2 << 20))
        raw.run(model.train)
        snapshot = store.snapshot(raw)
        with pytest.raises(OSError, match="are free") as caught:
            store.publish(snapshot)
        assert caught.value.errno == errno.ENOSPC
        assert snapshot.held.released
        assert [path.name for path in store.directory.glob(".*")] == []
        assert store.latest_good().step == 1
        raw.run(model.train)
        (place / "filler").unlink()
        store.publish(store.snapshot(raw))
    assert store.latest_good().step == 3


def test_disk_full_in_the_middle_of_a_write(
    make_model: Any, make_store: Any, mounted: Any, monkeypatch: Any, values_in: Any
) -> None:
    """Somebody else takes the room after we looked: what was begun is removed."""
    place = mounted("4m")
    model = make_model(parts=3, size=50_000)
    store = make_store(model, place / "logdir")
    monkeypatch.setattr("asupervisor.checkpoint.files.check_space", lambda directory, needed: None)
    with session_with(model, store) as raw:
        store.publish(store.snapshot(raw))
        for left in range(0, 700_000, 100_000):
            filler = place / "filler"
            filler.write_bytes(b"")
            free = shutil.disk_usage(place).free
            filler.write_bytes(b"x" * (free - left))
            raw.run(model.train)
            with pytest.raises(OSError) as caught:
                store.publish(store.snapshot(raw))
            assert caught.value.errno == errno.ENOSPC
            assert [path.name for path in store.directory.glob(".*")] == []
            assert values_in(tf.train.latest_checkpoint(store.logdir)) == {0.0}
            filler.unlink()
        info = store.publish(store.snapshot(raw))
    assert values_in(info.prefix) == {float(info.step)}


@pytest.mark.parametrize("point", ["after-record", "before-rename.index", "before-manifest", "before-state"])
def test_read_only_from_one_moment_on(
    point: str, make_model: Any, make_store: Any, mounted: Any, values_in: Any, restored_step: Any
) -> None:
    """A disk that the system made read-only after an error: the old checkpoint is restored, or the new one, whole."""
    place = mounted()
    armed: list[str] = []

    def freeze(name: str) -> None:
        if name in armed:
            armed.clear()
            mounted.read_only(place)

    model = make_model()
    store = make_store(model, place / "logdir", faults=freeze)
    with session_with(model, store) as raw:
        raw.run(model.train)
        store.publish(store.snapshot(raw))
        armed.append(point)
        raw.run(model.train)
        with pytest.raises(OSError) as caught:
            store.publish(store.snapshot(raw))
        assert caught.value.errno == errno.EROFS
        assert not armed
        raw.run(model.train)
        with pytest.raises(OSError):
            store.publish(store.snapshot(raw))
        subprocess.run(["mount", "-o", "remount,rw", place], check=True)
        raw.run(model.train)
        info = store.publish(store.snapshot(raw))
    assert info.step == 4 and values_in(info.prefix) == {4.0}
    assert [path.name for path in store.directory.glob(".*")] == []
    assert restored_step(place / "logdir") == 4


def test_directory_removed_while_running(make_model: Any, make_store: Any, values_in: Any) -> None:
    model = make_model()
    store = make_store(model)
    lock = store.lock = LogdirLock(store.directory)
    lock.acquire()
    with session_with(model, store) as raw:
        store.publish(store.snapshot(raw))
        shutil.rmtree(store.directory)
        raw.run(model.train)
        info = store.publish(store.snapshot(raw))
        assert values_in(info.prefix) == {1.0}
    with pytest.raises(Exception, match="in use"):  # the lock was taken again in the new place
        LogdirLock(store.directory, timeout_secs=0).acquire()
    lock.release()


def test_another_runs_directory_in_its_place(
    make_model: Any, make_store: Any, trained: Any, tmp_path: Path, values_in: Any
) -> None:
    """A link that leads elsewhere now: what a finished run left there is not ours to rotate, and stays refused."""
    other, link = tmp_path / "other", tmp_path / "latest"
    trained(0, 3, 5, logdir=other)
    (tmp_path / "own").mkdir()
    link.symlink_to("own")
    model = make_model(max_to_keep=2)
    store = make_store(model, link)
    lock = store.lock = LogdirLock(store.directory)
    lock.acquire()
    with session_with(model, store) as raw:
        store.publish(store.snapshot(raw))
        link.unlink()
        link.symlink_to("other")
        before = sorted(path.name for path in other.glob("[!.]*"))
        for _ in range(3):
            raw.run(model.train)
            with pytest.raises(CheckpointNotRestored, match=r"another directory took its place.*model\.ckpt-5"):
                store.publish(store.snapshot(raw))
        assert sorted(path.name for path in other.glob("[!.]*")) == before
        link.unlink()
        link.symlink_to("own")
        info = store.publish(store.snapshot(raw))
    assert values_in(info.prefix) == {3.0}
    assert [record.step for record in store.checkpoints()] == [0, 3]
    lock.release()


@pytest.mark.parametrize("point", ["before-state", "after-state"])
def test_another_runs_directory_in_its_place_meanwhile(
    point: str, make_model: Any, make_store: Any, trained: Any, tmp_path: Path
) -> None:
    """The link is set anew while a save is published: what lies there now is neither listed anew nor deleted."""
    other, link = tmp_path / "other", tmp_path / "latest"
    trained(3, 5, logdir=other)
    before = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    (tmp_path / "own").mkdir()
    link.symlink_to("own")

    def swap(name: str) -> None:
        if name == point:
            link.unlink()
            link.symlink_to("other")

    model = make_model(max_to_keep=1)
    store = make_store(model, link, faults=swap)
    with session_with(model, store) as raw:
        if point == "before-state":
            with pytest.raises(FileNotFoundError, match="another directory took its place"):
                store.publish(store.snapshot(raw))
        else:
            store.publish(store.snapshot(raw))
    assert {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("lost", ["directory", "lock file"])
def test_another_run_trains_in_its_place(
    lost: str, make_model: Any, make_store: Any, trained: Any, tmp_path: Path
) -> None:
    """Each save is refused, not the first one only: the next would delete what the other one writes."""
    model = make_model(max_to_keep=1)
    store = make_store(model)
    lock = store.lock = LogdirLock(store.directory)
    lock.acquire()
    with session_with(model, store) as raw:
        store.publish(store.snapshot(raw))
        if lost == "directory":
            store.directory.rename(tmp_path / "old")
        else:
            (store.directory / LOCK_NAME).unlink()
        other = LogdirLock(store.directory)
        other.acquire()
        trained(3, 5)
        before = sorted(path.name for path in store.directory.glob("[!.]*"))
        for error in (LogdirInUse, LogdirInUse, CheckpointNotRestored, CheckpointNotRestored):
            if error is CheckpointNotRestored:
                other.release()  # it has ended, and its checkpoints are still none of ours
            raw.run(model.train)
            with pytest.raises(error):
                store.publish(store.snapshot(raw))
        assert sorted(path.name for path in store.directory.glob("[!.]*")) == before
    lock.release()


@pytest.mark.parametrize("saved", [False, True], ids=["restored only", "saved, too"])
def test_own_directory_on_another_disk(
    saved: bool, make_model: Any, make_store: Any, trained: Any, tmp_path: Path
) -> None:
    """Copied, and the link set anew: the checkpoints are those that this run found or wrote."""
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "latest"
    trained(1, 2, logdir=first)
    link.symlink_to("first")
    model = make_model()
    store = make_store(model, link)
    lock = store.lock = LogdirLock(store.directory)
    lock.acquire()
    with model.session() as raw:
        assert store.restorer(raw, model.saver, store.logdir, None)
        raw.run(model.train)
        if saved:
            store.publish(store.snapshot(raw))
        shutil.copytree(first, second)
        link.unlink()
        link.symlink_to("second")
        raw.run(model.train)
        store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == ([1, 2, 3, 4] if saved else [1, 2, 4])
    lock.release()


def test_place_gone_and_back(make_model: Any, make_store: Any, tmp_path: Path, values_in: Any) -> None:
    """The disk is away: saves fail, and recover when it is back. Nothing is made above the directory meanwhile."""
    disk = tmp_path / "disk"
    disk.mkdir()
    model = make_model()
    store = make_store(model, disk / "logdir")
    with session_with(model, store) as raw:
        store.publish(store.snapshot(raw))
        disk.rename(tmp_path / "away")
        raw.run(model.train)
        with pytest.raises(FileNotFoundError):
            store.publish(store.snapshot(raw))
        assert not disk.exists()
        (tmp_path / "away").rename(disk)
        info = store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [0, 1]
    assert values_in(info.prefix) == {1.0}


def test_directory_removed_in_the_middle_of_a_write(make_model: Any, make_store: Any, tmp_path: Path) -> None:
    model = make_model()
    armed = ["before-write"]

    def remove(name: str) -> None:
        if name in armed:
            armed.clear()
            shutil.rmtree(tmp_path / "logdir")

    store = make_store(model, faults=remove)
    with session_with(model, store) as raw:
        with pytest.raises((OSError, tf.errors.OpError)):
            store.publish(store.snapshot(raw))
        assert store.publish(store.snapshot(raw)).step == 0


CHILD = """
import os, sys
import numpy as np, tensorflow as tf
from asupervisor.checkpoint.store import CheckpointStore
tf1 = tf.compat.v1
graph = tf.Graph()
with graph.as_default():
    variable = tf1.get_variable("v", [1000])
    saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
store = CheckpointStore(sys.argv[1], graph, saver)
store.claim(None)
os.setgid(65534); os.setuid(65534)
with tf1.Session(graph=graph) as raw:
    raw.run(init)
    for _ in range(2):
        try:
            print("saved", store.publish(store.snapshot(raw)).prefix)
        except OSError as error:
            print("refused", type(error).__name__, error.errno)
        sys.stdout.flush()
        sys.stdin.readline()
"""


def test_permission_denied(tmp_path: Path, forks: Forks, request: pytest.FixtureRequest) -> None:
    """In a process that is not root, for whom permissions mean something."""
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    # Not below pytest's directory: that is nobody else's, and each pytest that starts makes it so again.
    place = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(place))
    place.chmod(0o755)
    logdir = place / "logdir"
    logdir.mkdir(mode=0o755)
    child = forks.start("-c", CHILD, logdir, stdin=subprocess.PIPE)
    request.addfinalizer(child.communicate)
    request.addfinalizer(child.kill)
    assert child.stdin and child.stdout
    assert child.stdout.readline() == "refused PermissionError 13\n"
    logdir.chmod(0o777)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline().startswith("saved")
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.wait(30) == 0
    with pytest.raises(LogdirNotWritable, match="Not a directory"):
        (tmp_path / "file").touch()
        LogdirLock(tmp_path / "file" / "logdir").acquire()


def test_a_full_disk_for_the_state_file_only(trained: Any, monkeypatch: Any, restored_step: Any) -> None:
    """The checkpoint is published by then: the error tells, and the next run finds it."""
    trained(1)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("asupervisor.checkpoint.manifest.write_state_file", fail)
        with pytest.raises(OSError, match="No space"):
            trained(2)
    assert restored_step() == 2
