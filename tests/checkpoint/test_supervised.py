"""Checkpoints as a Supervisor's user meets them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import (
    CheckpointInfo,
    CheckpointMismatch,
    CheckpointNotRestored,
    LatestN,
    LogdirInUse,
    Supervisor,
)

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
    assert steps_in(logdir) == [0, 3, 6, 9]
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
    assert await Job(logdir).go(0) == 1


async def test_an_error_of_a_training_run(variables: str, logdir: Path) -> None:
    """Half a step was applied: its state is kept beside, the next run begins before it."""
    job = Job(logdir)
    late = job.graph.get_tensor_by_name("late:0")
    with pytest.raises(tf.errors.InvalidArgumentError):
        async with job.sv.managed_session() as sess:
            await sess.run(job.train)
            await job.sv.save()
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
    assert steps_in(logdir) == [0, 1]
    assert len(list(logdir.glob("replaced-*/model.ckpt-3.index"))) == 1


async def test_retention(variables: str, logdir: Path) -> None:
    job = Job(logdir, retention=LatestN(2))
    async with job.sv.managed_session() as sess:
        for _ in range(4):
            await sess.run(job.train)
            await job.sv.save()
    assert steps_in(logdir) == [3, 4]


async def test_the_directory_is_removed_while_it_runs(variables: str, logdir: Path) -> None:
    """Training goes on, and so do the saves."""
    job = Job(logdir)
    async with job.sv.managed_session() as sess:
        await sess.run(job.train)
        await job.sv.save()
        shutil.rmtree(logdir)
        await sess.run(job.train)
        assert (await job.sv.save()).step == 2
    assert await Job(logdir).go(0) == 2


async def test_a_second_session_of_the_same_supervisor(variables: str, logdir: Path) -> None:
    """After a fresh start, too: the second session goes on from the first one."""
    await Job(logdir).go(5)
    job = Job(logdir, fresh_start=True)
    assert await job.go(2) == 0
    assert await job.go(2) == 2


# ------------------------------------------------------------------------------------------ processes

CHILD = """
import asyncio, sys
import numpy as np, tensorflow as tf
from asupervisor import LogdirInUse, Supervisor
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
async def start(logdir: Path, fresh_environ: dict[str, str]) -> AsyncIterator[Callable[[], Any]]:
    """Starts processes that train in the directory until they are told to stop."""
    children: list[asyncio.subprocess.Process] = []

    async def start_child() -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(logdir), env=fresh_environ, stdout=subprocess.PIPE
        )
        children.append(child)
        return child

    yield start_child
    for child in children:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def said(child: asyncio.subprocess.Process) -> tuple[str, int]:
    assert child.stdout is not None
    async with asyncio.timeout(90):
        words = (await child.stdout.readline()).decode().split()
    return " ".join(words[:-1]), int(words[-1])


@pytest.mark.timeout(240)
async def test_f26_two_chiefs(start: Any, logdir: Path) -> None:
    """F26. Two real processes on one directory: the second one is refused; after a SIGKILL the next one takes over."""
    first = await start()
    assert await said(first) == ("begun", 0)
    second = await start()
    assert await said(second) == ("in use", first.pid)
    with pytest.raises(LogdirInUse):
        await Job(logdir).go(1)
    first.send_signal(signal.SIGTERM)
    word, done = await said(first)
    assert word == "ended" and done > 0
    await first.wait()
    third = await start()
    assert await said(third) == ("begun", done)
    third.kill()
    await third.wait()
    fourth = await start()
    word, begun = await said(fourth)
    assert word == "begun" and begun >= done
    newest = max(steps_in(logdir))
    fourth.send_signal(signal.SIGINT)  # F06: what asyncio makes of it is a cancellation, and that saves
    await fourth.wait()
    assert await Job(logdir).go(0) > newest
