"""Checkpoints as a Supervisor's user meets them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import (
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointMismatch,
    CheckpointNotRestored,
    LatestN,
    LogdirInUse,
    MonitoredTrainingSession,
    RecoveryPolicy,
    StopGraceExceeded,
    Supervisor,
    checkpoints,
    train_loop,
)
from asupervisor.checkpoint import lock
from asupervisor.recovery import NO_PAUSE

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


class Job:
    """A model and a Supervisor on it."""

    def __init__(self, logdir: Path, *, names: tuple[str, ...] = ("w",), **arguments: Any) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.step = tf1.train.get_or_create_global_step()
            self.weights = [tf1.get_variable(name, [100], initializer=tf1.zeros_initializer()) for name in names]
            changes = [weight.assign_add(tf.ones([100])) for weight in self.weights]
            self.train = tf.group(*changes, tf1.assign_add(self.step, 1))
            self.noise = tf1.placeholder(tf.float32, [], name="noise")
            self.spoil = self.weights[0].assign(tf.fill([100], self.noise))
            with tf1.control_dependencies(changes):
                self.half = tf1.assign_add(self.step, tf.cast(tf1.placeholder(tf.float32, [], "late"), tf.int64))
            arguments.setdefault("saver", tf1.train.Saver(max_to_keep=5))
        self.sv = Supervisor(graph=self.graph, logdir=logdir, **arguments)

    async def go(self, steps: int) -> int:
        async with self.sv.managed_session() as sess:
            begun = int(np.ravel(await sess.run(self.step))[0])
            for _ in range(steps):
                await sess.run(self.train)
            return begun


def steps_in(logdir: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in logdir.glob("model.ckpt-*.index"))


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    return tmp_path / "logdir"


async def test_restart_after_restart(variables: str, logdir: Path) -> None:
    for expected in (0, 3, 6):
        assert await Job(logdir).go(3) == expected
    assert {3, 6, 9} <= set(steps_in(logdir))  # and the first one, which is taken beside the first steps
    assert tf.train.latest_checkpoint(str(logdir)) == str(logdir / "model.ckpt-9")


async def test_save_by_hand(variables: str, logdir: Path) -> None:
    job = Job(logdir)
    async with job.sv.managed_session() as sess:
        await sess.run(job.train)
        info = await job.sv.save()
        assert isinstance(info, CheckpointInfo)
        assert (info.prefix, info.step) == (str(logdir / "model.ckpt-1"), 1)
        assert info.bytes > 0 and info.stall_secs > 0 and info.write_secs > 0
        assert job.sv.status().last_checkpoint == info.prefix


async def test_by_steps(variables: str, logdir: Path) -> None:
    job = Job(logdir, save_model_secs=0, save_model_steps=5)
    async with job.sv.managed_session() as sess:
        while len(steps_in(logdir)) < 4:
            await sess.run(job.train)
            await asyncio.sleep(0.005)
    by_steps = steps_in(logdir)[:-1]  # the last one is that of the end
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(by_steps))


async def test_f05_cut_checkpoint(variables: str, logdir: Path) -> None:
    """F05. Through the whole Supervisor: an older one is restored, and the cause is told."""
    await Job(logdir).go(3)
    data = logdir / "model.ckpt-3.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:40])
    job = Job(logdir)
    told = []

    async def listen() -> None:
        async for event in job.sv.events():
            told.append(event.kind)

    listener = asyncio.ensure_future(listen())
    await asyncio.sleep(0)
    assert await job.go(1) < 3  # the first save is taken beside the first steps
    await listener
    assert "checkpoint.quarantined" in told and "checkpoint.restored" in told
    assert (logdir / "quarantine" / "model.ckpt-3").is_dir()


async def test_f05_all_are_cut(variables: str, logdir: Path) -> None:
    """It leaves the block bare, and never passes for the end of the data."""
    await Job(logdir).go(3)
    for data in logdir.glob("*.data-*"):
        data.write_bytes(data.read_bytes()[:40])
    with pytest.raises(CheckpointNotRestored, match="damaged"):
        await Job(logdir).go(1)
    assert await Job(logdir, fresh_start=True).go(1) == 0


async def test_f03_a_saver_of_a_part(variables: str, logdir: Path) -> None:
    for expected in (0, 2):
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.train.get_or_create_global_step()
            tf1.get_variable("other", initializer=tf.constant(1.0))
            train = tf1.assign_add(step, 1)
            sv = Supervisor(graph=graph, logdir=logdir, saver=tf1.train.Saver([step]))
        async with sv.managed_session() as sess:
            assert int(np.ravel(await sess.run(step))[0]) == expected
            for _ in range(2):
                await sess.run(train)


async def test_another_model(variables: str, logdir: Path) -> None:
    await Job(logdir).go(1)
    before = sorted(path.name for path in logdir.glob("model.ckpt*"))
    with pytest.raises(CheckpointMismatch, match="not in the model: w float32"):
        await Job(logdir, names=("v",)).go(1)
    assert sorted(path.name for path in logdir.glob("model.ckpt*")) == before


async def test_f07_nan_is_not_the_next_beginning(variables: str, logdir: Path) -> None:
    job = Job(logdir)
    async with job.sv.managed_session() as sess:
        await sess.run(job.train)
        await job.sv.save()
        await sess.run(job.train)
        await sess.run(job.spoil, {job.noise: np.nan})
    assert (logdir / "model.ckpt-2-nonfinite.index").exists()
    assert job.sv.status().global_step == 2, "what was reached, whatever became of it"
    assert await Job(logdir).go(0) == 1


@pytest.mark.parametrize("grouped", [False, True])
async def test_an_error_of_a_training_run(variables: str, logdir: Path, grouped: bool) -> None:
    """Half a step was applied: its state is kept beside, the next run begins before it."""
    job = Job(logdir)
    late = job.graph.get_tensor_by_name("late:0")
    with pytest.raises(ExceptionGroup if grouped else tf.errors.InvalidArgumentError):
        async with job.sv.managed_session() as sess:
            await sess.run(job.train)
            await job.sv.save()
            if grouped:
                async with asyncio.TaskGroup() as group:
                    group.create_task(sess.run(job.half))
            await sess.run(job.half)
    assert late is not None
    assert (logdir / "model.ckpt-1-emergency.index").exists()
    assert tf.train.load_variable(str(logdir / "model.ckpt-1-emergency"), "w")[0] in (1.0, 2.0)
    assert await Job(logdir).go(0) == 1


async def test_f06_an_error_of_the_body(variables: str, logdir: Path) -> None:
    """F06. The state is whole: it is an ordinary checkpoint, and the error leaves unchanged."""
    job = Job(logdir)
    with pytest.raises(KeyError, match="mine"):
        async with job.sv.managed_session() as sess:
            for _ in range(3):
                await sess.run(job.train)
            raise KeyError("mine")
    assert await Job(logdir).go(0) == 3


class FailsInTheEnd(tf1.train.Saver):  # type: ignore[misc]
    """A saver whose last save fails, or does not end."""

    error: Exception | None = None
    waits_for: threading.Event | None = None

    def save(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        if self.waits_for is not None:
            self.waits_for.wait(20)
        return super().save(*args, **kwargs)


@pytest.fixture(params=["monitored", "managed", pytest.param("train_loop", marks=pytest.mark.full)])
def trained(request: pytest.FixtureRequest, logdir: Path) -> Callable[..., Any]:
    """Trains two steps, and calls something before the end."""

    async def train(
        before_end: Callable[[FailsInTheEnd], None],
        stop_grace_secs: float = 10.0,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        graph = tf.Graph()
        with graph.as_default():
            op = tf1.assign_add(tf1.train.get_or_create_global_step(), 1)
            saver = FailsInTheEnd()

        async def two_steps(sess: Any) -> None:
            await sess.run(op)
            before_end(saver)
            await sess.run(op)
            end()

        if request.param == "monitored":
            scaffold = tf1.train.Scaffold(saver=saver)
            async with MonitoredTrainingSession(
                checkpoint_dir=logdir, graph=graph, scaffold=scaffold, stop_grace_period_secs=stop_grace_secs
            ) as monitored:
                await two_steps(monitored)
            return
        sv = Supervisor(graph=graph, logdir=logdir, saver=saver, stop_grace_secs=stop_grace_secs)
        if request.param == "managed":
            async with sv.managed_session() as sess:
                await two_steps(sess)
            return

        async def step(sess: Any) -> None:
            await two_steps(sess)
            sv.request_stop()

        await train_loop(sv, step)

    return train


@pytest.mark.parametrize("kind", [tf.errors.CancelledError, tf.errors.OutOfRangeError])
async def test_a_last_save_that_fails_is_no_clean_end(trained: Callable[..., Any], kind: Any) -> None:
    """Elsewhere the one error is an echo of the stop, and the other one tells of the end of data."""
    with pytest.raises(kind, match="mine"):
        await trained(lambda saver: setattr(saver, "error", kind(None, None, "mine")))


async def test_sys_exit_tells_of_a_clean_end_and_hides_no_last_save_that_fails(trained: Callable[..., Any]) -> None:
    with pytest.raises(OSError, match="mine"):
        await trained(lambda saver: setattr(saver, "error", OSError("mine")), end=sys.exit)


async def test_sys_exit_after_a_clean_end_leaves_as_it_is(trained: Callable[..., Any], logdir: Path) -> None:
    with pytest.raises(SystemExit):
        await trained(lambda saver: None, end=sys.exit)
    assert checkpoints(logdir)[-1].step == 2


@pytest.mark.allow_leak("threads", "tasks")  # those of the save, until it ends
async def test_a_last_save_that_does_not_end_is_no_clean_end(trained: Callable[..., Any]) -> None:
    ends = threading.Event()
    try:
        with pytest.raises(StopGraceExceeded, match="there is no final save"):
            await trained(lambda saver: setattr(saver, "waits_for", ends), 0.3)
    finally:
        ends.set()


async def test_f06_cancelled(variables: str, logdir: Path) -> None:
    job = Job(logdir)
    stepped = asyncio.Event()

    async def body() -> None:
        async with job.sv.managed_session() as sess:
            await sess.run(job.train)
            stepped.set()
            await asyncio.sleep(1000)

    task = asyncio.ensure_future(body())
    await stepped.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await Job(logdir).go(0) == 1


async def test_fresh_start(variables: str, logdir: Path) -> None:
    await Job(logdir).go(3)
    assert await Job(logdir, fresh_start=True).go(1) == 0
    assert steps_in(logdir) in ([0, 1], [1])  # a first save that has not begun at the end is the last one
    assert len(list(logdir.glob("replaced-*/model.ckpt-3.index"))) == 1


async def test_retention(variables: str, logdir: Path) -> None:
    job = Job(logdir, retention=LatestN(2))
    async with job.sv.managed_session() as sess:
        for _ in range(4):
            await sess.run(job.train)
            await job.sv.save()
    assert steps_in(logdir)[-1] == 4 and 5 not in steps_in(logdir)


@pytest.mark.parametrize("options", [{"save_on_exit": False}, {"save_model_secs": 0}], ids=str)
async def test_a_save_that_has_begun_is_finished_where_there_is_no_last_one(
    variables: str, logdir: Path, options: dict[str, Any]
) -> None:
    job = Job(logdir, **options)
    events = job.sv.events()
    writing, go_on = threading.Event(), threading.Event()

    def point(name: str) -> None:
        if name == "before-write":
            writing.set()
            assert go_on.wait(20)

    assert job.sv._parts.store is not None
    job.sv._parts.store._faults = point
    async with job.sv.managed_session():
        saving = asyncio.ensure_future(job.sv.save())
        await asyncio.to_thread(writing.wait, 20)
        asyncio.get_running_loop().call_later(0.05, go_on.set)  # while the session ends
    assert (await saving).step == 0
    assert "checkpoint.failed" not in [event.kind async for event in events]
    assert steps_in(logdir) == [0]


async def test_the_directory_is_removed_while_it_runs(variables: str, logdir: Path, tmp_path: Path) -> None:
    """Training goes on, and so do the saves."""
    job = Job(logdir)
    async with job.sv.managed_session() as sess:
        await sess.run(job.train)
        await job.sv.save()
        # At once: what is still written there would be in the way of a removal file by file.
        shutil.rmtree(logdir.rename(tmp_path / "removed"))
        await sess.run(job.train)
        assert (await job.sv.save()).step == 2
    assert await Job(logdir).go(0) == 2


async def test_a_second_session_of_the_same_supervisor(variables: str, logdir: Path) -> None:
    """After a fresh start, too: the second session goes on from the first one."""
    await Job(logdir).go(5)
    job = Job(logdir, fresh_start=True)
    assert await job.go(2) == 0
    assert await job.go(2) == 2


# ------------------------------------------------------------------------------------------ where it begins


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("model.ckpt*")}


@pytest.mark.parametrize("names", ["directory", "checkpoint"])
async def test_init_from(variables: str, tmp_path: Path, logdir: Path, names: str) -> None:
    """As long as the logdir has no checkpoint; then it goes on from its own, and the other place is only read."""
    there = tmp_path / "there"
    await Job(there).go(3)
    before = contents_of(there)
    place = there if names == "directory" else there / "model.ckpt-3"
    for expected in (3, 5, 7):
        job = Job(logdir, init_from=place)
        async with job.sv.managed_session() as sess:
            step, weight = await sess.run([job.step, job.weights[0]])
            assert (int(np.ravel(step)[0]), weight[0]) == (expected, expected)
            for _ in range(2):
                await sess.run(job.train)
    assert contents_of(there) == before
    assert steps_in(logdir)[-1] == 9


async def test_init_from_a_place_without_checkpoints(variables: str, tmp_path: Path, logdir: Path) -> None:
    """An error, and not a beginning at step 0."""
    there = tmp_path / "there"
    with pytest.raises(CheckpointDamaged, match="there"):
        await Job(logdir, init_from=there).go(1)
    there.mkdir()
    with pytest.raises(CheckpointNotRestored, match="without checkpoints"):
        await Job(logdir, init_from=there).go(1)
    assert steps_in(logdir) == []


async def test_a_fresh_start_from_a_checkpoint_in_the_logdir(variables: str, logdir: Path) -> None:
    """It is restored before everything is set aside, itself included."""
    for beginning in ("init_from", "checkpoint_filename_with_path"):
        shutil.rmtree(logdir, ignore_errors=True)
        await Job(logdir).go(3)
        await Job(logdir).go(3)
        job = Job(logdir, fresh_start=True, **{beginning: logdir / "model.ckpt-3"})
        assert await job.go(1) == 3
        assert steps_in(logdir)[-1] == 4 and 6 not in steps_in(logdir)
        assert len(list(logdir.glob("replaced-*/model.ckpt-6.index"))) == 1
        assert await job.go(1) == 4  # the same supervisor once more: that was its fresh start
        assert await Job(logdir).go(0) == 5


async def test_a_fresh_start_from_a_damaged_checkpoint_changes_nothing(variables: str, logdir: Path) -> None:
    await Job(logdir).go(3)
    for beginning in ("init_from", "checkpoint_filename_with_path"):
        with pytest.raises(CheckpointDamaged):
            await Job(logdir, fresh_start=True, **{beginning: logdir / "model.ckpt-99"}).go(1)
    assert not list(logdir.glob("replaced-*"))
    assert await Job(logdir).go(0) == 3


async def test_partial_restore(variables: str, tmp_path: Path, logdir: Path) -> None:
    there = tmp_path / "there"
    await Job(there, names=("a", "b")).go(3)
    grown = Job(tmp_path / "grown", names=("a", "b", "c"), init_from=there)
    async with grown.sv.managed_session() as sess:
        assert [value[0] for value in await sess.run(grown.weights)] == [3, 3, 0]
    with pytest.raises(CheckpointMismatch, match="not in the checkpoint: c"):
        await Job(logdir, names=("a", "b", "c"), init_from=there, partial_restore=False).go(1)
    with pytest.raises(CheckpointMismatch, match="not in the model: b"):
        await Job(logdir, names=("a", "c"), init_from=there).go(1)
    assert steps_in(logdir) == []
    other = Job(logdir, names=("a", "c"), init_from=there, partial_restore=True)
    async with other.sv.managed_session() as sess:
        assert [value[0] for value in await sess.run(other.weights)] == [3, 0]
        await sess.run(other.train)
    assert await Job(logdir, names=("a", "c")).go(0) == 4


async def test_an_explicit_checkpoint_of_the_logdir(variables: str, logdir: Path) -> None:
    """It is that one at each start of the program, and where training goes on from; the supervisor goes on itself."""
    await Job(logdir).go(3)
    await Job(logdir).go(3)
    for _ in range(2):
        job = Job(logdir, checkpoint_filename_with_path=logdir / "model.ckpt-3")
        assert await job.go(2) == 3
        assert await job.go(1) == 5
    assert await Job(logdir).go(0) == 6


async def test_an_explicit_checkpoint_once_nothing_was_saved(variables: str, logdir: Path) -> None:
    """There is nothing else that this supervisor could go on from."""
    await Job(logdir).go(3)
    await Job(logdir).go(3)
    job = Job(logdir, checkpoint_filename_with_path=logdir / "model.ckpt-3", save_model_secs=0)
    for _ in range(2):
        assert await job.go(1) == 3
    assert await Job(logdir).go(0) == 6


async def test_an_explicit_checkpoint_is_that_one_or_an_error(variables: str, tmp_path: Path, logdir: Path) -> None:
    await Job(logdir).go(3)
    data = logdir / "model.ckpt-3.data-00000-of-00001"
    whole = data.read_bytes()
    data.write_bytes(whole[:40])
    before = contents_of(logdir)
    for name, why in [
        ("model.ckpt-3", "bytes instead of"),
        ("model.ckpt-4", "is not there"),
        (".", "it is a directory"),
    ]:
        with pytest.raises(CheckpointDamaged, match=why):
            await Job(logdir, checkpoint_filename_with_path=logdir / name).go(1)
        with pytest.raises(CheckpointDamaged, match=why):
            await Job(tmp_path / "new", checkpoint_filename_with_path=logdir / name).go(1)
    assert contents_of(logdir) == before
    assert steps_in(tmp_path / "new") == []
    data.write_bytes(whole)
    with pytest.raises(CheckpointMismatch):
        await Job(logdir, names=("v",), checkpoint_filename_with_path=logdir / "model.ckpt-3").go(1)


async def test_an_explicit_checkpoint_of_elsewhere(variables: str, tmp_path: Path, logdir: Path) -> None:
    """It does not write over a logdir that holds others, and that is told before training begins."""
    there = tmp_path / "there"
    await Job(there).go(3)
    explicit = {"checkpoint_filename_with_path": there / "model.ckpt-3"}
    job = Job(logdir, **explicit)
    assert await job.go(1) == 3
    assert await job.go(1) == 4
    reached = False
    with pytest.raises(CheckpointNotRestored, match=r"model\.ckpt-5"):
        async with Job(logdir, **explicit).sv.managed_session():
            reached = True
    assert not reached
    assert await Job(logdir, **explicit, save_model_secs=0).go(1) == 3  # who does not save does no harm
    assert await Job(logdir, **explicit, fresh_start=True).go(1) == 3
    assert steps_in(logdir)[-1] == 4 and 5 not in steps_in(logdir)
    link = tmp_path / "link"
    link.symlink_to(logdir)
    assert await Job(logdir, checkpoint_filename_with_path=link / "model.ckpt-4").go(1) == 4  # it is the same place


async def test_an_emergency_checkpoint_is_restored_by_name(variables: str, logdir: Path) -> None:
    job = Job(logdir)
    with pytest.raises(tf.errors.InvalidArgumentError):
        async with job.sv.managed_session() as sess:
            await sess.run(job.train)
            await sess.run(job.half)
    (index,) = logdir.glob("*emergency*.index")
    emergency = index.with_suffix("")
    left = tf.train.load_checkpoint(str(emergency)).get_tensor("w")[0]
    again = Job(logdir, checkpoint_filename_with_path=emergency)
    async with again.sv.managed_session() as sess:
        assert (await sess.run(again.weights[0]))[0] == left
        await sess.run(again.train)
    assert await Job(logdir).go(0) == 2


async def test_an_explicit_checkpoint_without_a_logdir(variables: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    await Job(there).go(3)
    before = sorted(path.name for path in there.iterdir())
    job = Job(None, checkpoint_filename_with_path=there / "model.ckpt-3")  # type: ignore[arg-type]
    async with job.sv.managed_session() as sess:
        assert (await sess.run(job.weights[0]))[0] == 3
        await sess.run(job.train)
        with pytest.raises(RuntimeError, match="cannot save"):
            await job.sv.save()
    assert await job.go(0) == 3
    assert sorted(path.name for path in there.iterdir()) == before


async def test_a_restart_does_not_go_back_to_the_explicit_checkpoint(variables: str, logdir: Path) -> None:
    """`train_loop` begins a new session after a lost one: at what was saved at the end of that."""
    await Job(logdir).go(3)
    await Job(logdir).go(3)
    job = Job(logdir, checkpoint_filename_with_path=logdir / "model.ckpt-3")
    seen: list[int] = []

    async def step(sess: Any) -> None:
        await sess.run(job.train)
        seen.append(int(np.ravel(await sess.run(job.step))[0]))
        if len(seen) == 2:
            raise tf.errors.AbortedError(None, None, "lost")
        if len(seen) == 4:
            job.sv.request_stop()

    policy = RecoveryPolicy(backoff=NO_PAUSE, origins=frozenset(("step_fn",)))
    await train_loop(job.sv, step, recovery=policy)
    assert seen == [4, 5, 6, 7]


def test_places_that_do_not_go_together(variables: str, tmp_path: Path) -> None:
    for error, words, arguments in [
        (ValueError, "two places", {"init_from": "a", "checkpoint_filename_with_path": "b"}),
        (ValueError, "no such directory|there is no", {"logdir": None, "init_from": "a"}),
        (ValueError, "saver=None", {"saver": None, "init_from": "a"}),
        (ValueError, "saver=None", {"saver": None, "checkpoint_filename_with_path": "a"}),
        (ValueError, "init_from must not be empty", {"init_from": ""}),
        (TypeError, "checkpoint_filename_with_path must be a path", {"checkpoint_filename_with_path": 3}),
        (TypeError, "init_from must be a path", {"init_from": True}),
        (TypeError, "partial_restore must be", {"partial_restore": "yes"}),
    ]:
        with pytest.raises(error, match=words):
            Job(**{"logdir": tmp_path, **arguments})  # type: ignore[arg-type]
    Job(tmp_path, init_from="a", is_chief=True)


# ------------------------------------------------------------------------------------------ processes

CHILD = """
import asyncio, sys
import numpy as np, tensorflow as tf
from asupervisor import LogdirInUse, Supervisor
from asupervisor.checkpoint import lock
lock.WAIT_SECS = float(sys.argv[2])
tf1 = tf.compat.v1
graph = tf.Graph()
with graph.as_default():
    step = tf1.train.get_or_create_global_step()
    weight = tf1.get_variable("w", [100], initializer=tf1.zeros_initializer())
    train = tf.group(weight.assign_add(tf.ones([100])), tf1.assign_add(step, 1))

async def main():
    sv = Supervisor(graph=graph, logdir=sys.argv[1], handle_signals=True, stop_grace_secs=20)
    async with sv.managed_session() as sess:
        print("begun", int(np.ravel(await sess.run(step))[0]), flush=True)
        await sess.run(train)
        print("trained", int(np.ravel(await sess.run(step))[0]), flush=True)
        while not sv.should_stop():
            await sess.run(train)
            await asyncio.sleep(0)
        print("ended", int(np.ravel(await sess.run(step))[0]), flush=True)

try:
    asyncio.run(main())
except LogdirInUse as error:
    print("in use", error.pid, flush=True)
"""


@pytest.fixture
def start(logdir: Path, forks: Any) -> Iterator[Callable[[float], Any]]:
    """Starts processes that train in the directory until they are told to stop."""
    children: list[Any] = []

    def start_child(wait_secs: float) -> Any:
        children.append(forks.start("-c", CHILD, logdir, wait_secs))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()
        child.communicate()


async def said(child: Any) -> tuple[str, int]:
    async with asyncio.timeout(90):
        words = (await asyncio.to_thread(child.stdout.readline)).split()
    return " ".join(words[:-1]), int(words[-1])


async def test_f26_two_chiefs(start: Any, logdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F26. Two real processes on one directory: the second one is refused; after a SIGKILL the next one takes over."""
    monkeypatch.setattr(lock, "WAIT_SECS", 0.2)  # for whoever is to be refused: nobody comes in time
    first = start(30)
    assert await said(first) == ("begun", 0)
    assert await said(first) == ("trained", 1)
    second = start(0.2)
    assert await said(second) == ("in use", first.pid)
    with pytest.raises(LogdirInUse):
        await Job(logdir).go(1)
    first.send_signal(signal.SIGTERM)
    word, done = await said(first)
    assert word == "ended" and done > 0
    await asyncio.to_thread(first.wait)
    third = start(30)
    assert await said(third) == ("begun", done)
    third.kill()
    await asyncio.to_thread(third.wait)
    fourth = start(30)
    word, begun = await said(fourth)
    assert word == "begun" and begun >= done
    assert await said(fourth) == ("trained", begun + 1)
    fourth.send_signal(signal.SIGINT)  # F06: what asyncio makes of it is a cancellation, and that saves
    await asyncio.to_thread(fourth.wait)
    assert await Job(logdir).go(0) > begun
