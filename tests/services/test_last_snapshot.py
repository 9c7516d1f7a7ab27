"""The last snapshot, taken beside a run that waits: whatever that run does meanwhile, one lives and is published.

Two threads take snapshots of one set of holders here. Events put them in each order that they can come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.checkpoint.records import Kind
from asupervisor.checkpoint.store import CheckpointStore, Snapshot
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services import last_snapshot
from asupervisor.services.last_snapshot import SnapshotTaker
from asupervisor.session.in_flight import in_flight
from asupervisor.session.session import AsyncSession

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

A_MOMENT_SECS = 0.3
"""For what must not happen: with a fault it does, at once."""


class Rig:
    """A session whose run waits for a queue, and snapshots that wait for events."""

    def __init__(self, directory: Path) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            step = tf1.train.get_or_create_global_step()
            weight = tf1.get_variable("weight", [100], initializer=tf1.zeros_initializer())
            self.train = tf.group(weight.assign_add(tf.ones([100])), tf1.assign_add(step, 1))
            queue = tf1.FIFOQueue(10, tf.float32, shapes=[()])
            self.fill, self.wait = queue.enqueue(1.0), queue.dequeue()
            self.wait_and_train = tf1.assign_add(step, tf.cast(queue.dequeue(), tf.int64))
            saver, self.init = tf1.train.Saver(), tf1.global_variables_initializer()
        self.store = CheckpointStore(directory, self.graph, saver, global_step=step)
        self.executor = DeviceExecutor()
        self.session = AsyncSession(tf1.Session(graph=self.graph), self.executor, global_step=step)
        self.taker = SnapshotTaker(self.session)
        self.before = {True: lambda: None, False: lambda: None}  # by whether it is taken beside
        self.after = {True: lambda: None, False: lambda: None}
        self.took: list[bool] = []

    def take(self, raw: Any, torn: bool) -> Snapshot:
        beside = not self.executor.on_device_thread()
        self.before[beside]()
        snapshot = self.store.snapshot(raw, kind=Kind.EMERGENCY if torn else Kind.REGULAR)
        self.took.append(beside)
        self.after[beside]()
        return snapshot

    def free(self) -> None:
        """Let the run that waits go on; any thread."""
        self.session.raw.run(self.fill)

    async def stuck(self, op: Any) -> asyncio.Future[Any]:
        """A run that waits, and the end that takes the last snapshot."""
        run = asyncio.ensure_future(self.session.run(op))
        while in_flight(self.session) is None:
            await asyncio.sleep(0.001)
        self.taker.ending(0.0)
        return run

    async def published(self, snapshot: Snapshot) -> Any:
        return await self.session.side(lambda raw: self.store.publish(snapshot))


@pytest.fixture
async def rig(variables: str, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "logdir")
    await made.session.call(lambda raw: made.store.restorer(raw, made.store.saver, made.store.logdir, None))
    await made.session.run(made.init)
    await made.session.run(made.train)
    yield made
    with contextlib.suppress(tf.errors.OpError):
        await asyncio.to_thread(made.free)
    await made.session.close()
    assert await made.executor.aclose(10)


@pytest.mark.parametrize("writes", [False, True])
async def test_beside_a_run_that_never_ends(rig: Rig, writes: bool) -> None:
    run = await rig.stuck(rig.wait_and_train if writes else rig.wait)
    info = await rig.published(await rig.taker.take(rig.take))
    assert (info.step, info.kind) == (1, Kind.EMERGENCY if writes else Kind.REGULAR)
    assert bool(rig.taker.beside) == writes
    assert rig.took == [True]
    await asyncio.to_thread(rig.free)
    await run
    await rig.session.control(lambda raw: None)
    assert rig.took == [True], "its turn was withdrawn"


async def test_the_run_ends_and_its_turn_comes_before_the_one_beside(rig: Rig) -> None:
    """Fault: the late one beside took the place of the one that was to be published."""
    run = await rig.stuck(rig.wait)
    taken_in_turn = threading.Event()
    rig.after[False] = taken_in_turn.set

    def let_the_turn_come() -> None:
        rig.free()
        taken_in_turn.wait(A_MOMENT_SECS)

    rig.before[True] = let_the_turn_come
    info = await rig.published(await rig.taker.take(rig.take))
    assert (info.step, info.kind) == (1, Kind.REGULAR)
    assert rig.took[-1] is False
    await run


async def test_the_run_ends_after_the_one_beside_was_found_valid(rig: Rig, monkeypatch: Any) -> None:
    """Fault: its turn came all the same, and gave up what was to be published."""
    run = await rig.stuck(rig.wait)
    taken_in_turn = threading.Event()
    rig.after[False] = taken_in_turn.set
    looks = 0

    def look(session: Any) -> Any:
        nonlocal looks
        looks += 1
        found = in_flight(session)
        if looks == 2:  # "is it still the same run?" It is, at this very moment.
            rig.free()
            while in_flight(session) == found:
                pass
            taken_in_turn.wait(A_MOMENT_SECS)
        return found

    monkeypatch.setattr(last_snapshot, "in_flight", look)
    snapshot = await rig.taker.take(rig.take)
    await run
    await rig.session.control(lambda raw: None)
    info = await rig.published(snapshot)
    assert (info.step, info.kind) == (1, Kind.REGULAR)
    assert rig.took == [True]


async def test_the_run_ends_while_one_is_taken_beside_it(rig: Rig) -> None:
    run = await rig.stuck(rig.wait)

    def another_run() -> None:
        rig.free()
        while in_flight(rig.session) is not None:
            pass

    rig.after[True] = another_run
    info = await rig.published(await rig.taker.take(rig.take))
    assert (info.step, info.kind) == (1, Kind.REGULAR)
    assert rig.took == [True, False]
    await run


@pytest.mark.parametrize("beside", [False, True])
async def test_whoever_waits_is_cancelled_while_it_is_taken(rig: Rig, beside: bool) -> None:
    """What was taken for nobody is given back: the next one is taken, and nothing of the old one is left."""
    if beside:
        run = await rig.stuck(rig.wait)
    begun, go_on = threading.Event(), threading.Event()
    given: list[Snapshot] = []

    def hold() -> None:
        begun.set()
        assert go_on.wait(10)

    def take(raw: Any, torn: bool) -> Snapshot:
        given.append(rig.take(raw, torn))
        return given[-1]

    rig.after[beside] = hold
    taking = asyncio.ensure_future(rig.taker.take(take))
    await asyncio.to_thread(begun.wait, 10)
    taking.cancel()
    await asyncio.wait([taking])
    assert taking.cancelled()
    go_on.set()
    rig.after[beside] = lambda: None
    if beside:
        await asyncio.to_thread(rig.free)
        await run
    async with asyncio.timeout(20):
        while not given or given[0].held is None or not given[0].held.released:
            await asyncio.sleep(0.001)
    info = await rig.published(await rig.taker.take(rig.take))
    assert info.step == 1


@pytest.mark.parametrize("end_first", [False, True])
async def test_one_by_steps_when_the_end_begins(rig: Rig, end_first: bool) -> None:
    """On the device thread, within a run: the end's own takes its place, or none is taken for it."""
    run = await rig.stuck(rig.wait)
    rig.taker._ending_since = None
    by_steps: list[Snapshot | None] = []
    other = threading.Thread(target=lambda: by_steps.append(rig.taker.take_here(rig.session.raw, rig.take)))
    if end_first:
        rig.taker.ending(0.0)
        rig.after[True] = other.start  # it waits until that one is taken
        snapshot = await rig.taker.take(rig.take)
    else:
        other.start()
        await asyncio.to_thread(other.join)
        rig.taker.ending(0.0)
        snapshot = await rig.taker.take(rig.take)
    await asyncio.to_thread(other.join)
    info = await rig.published(snapshot)
    assert (info.step, info.kind) == (1, Kind.REGULAR)
    assert (by_steps[0] is None) == end_first
    await asyncio.to_thread(rig.free)
    await run


async def test_a_session_begins_while_an_earlier_one_is_still_written(rig: Rig) -> None:
    """On a slow disk: its warm-up is left out, and does not fail the start."""
    writing, go_on = threading.Event(), threading.Event()

    def point(name: str) -> None:
        if name == "before-write":
            writing.set()
            assert go_on.wait(10)

    rig.store._faults = point
    publication = asyncio.ensure_future(rig.published(await rig.taker.take(rig.take)))
    await asyncio.to_thread(writing.wait, 10)
    await rig.session.control(rig.store.warm_up)
    go_on.set()
    assert (await publication).step == 1
