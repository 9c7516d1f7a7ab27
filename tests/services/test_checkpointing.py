"""The checkpoint service: by time, by steps, by hand, at the end; one save at a time; failures and their repair."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint.records import CheckpointInfo, Kind, Outcome
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.errors import CheckpointNotRestored, SessionClosed
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.checkpointing import CheckpointService
from asupervisor.session.session import AsyncSession

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


@dataclass
class Rig:
    """A session with a store and a service, and what they tell."""

    session: AsyncSession
    store: CheckpointStore
    service: CheckpointService
    coordinator: Coordinator
    step: Any
    train: Any
    weight: Any
    idle: Any
    events: list[tuple[str, str, str, dict[str, Any]]]
    saved: list[CheckpointInfo] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self.running = asyncio.ensure_future(self.service.run())

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def until_saved(self, count: int) -> list[int | None]:
        await self.until(lambda: len(self.saved) >= count)
        return self.steps

    @property
    def steps(self) -> list[int | None]:
        return [info.step for info in self.saved]

    def messages(self, kind: str) -> list[str]:
        return [message for seen, message, *_ in self.events if seen == kind]

    async def stop(self) -> None:
        self.coordinator.request_stop()
        if self.running is not None:
            await self.running


MakeRig = Callable[..., Any]


@pytest.fixture
async def rig(variables: str, tmp_path: Path, clock: Any) -> AsyncIterator[MakeRig]:
    """Makes rigs on a clock that stands still."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            *, with_step: bool = True, advance: int = 1, faults: Any = None, fatal: bool = False, **intervals: Any
        ) -> Rig:
            graph = tf.Graph()
            with graph.as_default():
                step = tf1.train.get_or_create_global_step() if with_step else None
                weight = tf1.get_variable("weight", [100], initializer=tf1.zeros_initializer())
                change = weight.assign_add(tf.ones([100]))
                train = tf.group(change, tf1.assign_add(step, advance)) if with_step else tf.group(change)
                idle = weight.assign_add(tf.ones([100])).op
                saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
            loop = asyncio.get_running_loop()
            events: list[tuple[str, str, str, dict[str, Any]]] = []

            def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
                events.append((kind, message, level, data))
                loop.call_soon_threadsafe(made.news.set)

            more = {} if faults is None else {"faults": faults}
            store = CheckpointStore(tmp_path / "logdir", graph, saver, global_step=step, clock=clock, emit=emit, **more)
            executor, coordinator = DeviceExecutor(), Coordinator()
            stack.push_async_callback(executor.aclose, 10.0)
            raw = tf1.Session(graph=graph)
            session = AsyncSession(raw, executor, coordinator=coordinator, global_step=step)
            stack.push_async_callback(session.close)
            saved: list[CheckpointInfo] = []

            def on_saved(info: CheckpointInfo) -> None:
                saved.append(info)
                made.news.set()

            service = CheckpointService(
                session, store, coordinator, clock=clock, emit=emit, on_saved=on_saved, fatal=fatal, **intervals
            )
            made = Rig(session, store, service, coordinator, step, train, weight, idle, events, saved)
            stack.push_async_callback(service.drain)
            stack.push_async_callback(made.stop)
            if not await session.control(lambda raw: store.restorer(raw, saver, store.logdir, None)):
                await session.run(init)
            return made

        yield make


async def steps(rig: Rig, count: int) -> None:
    for _ in range(count):
        await rig.session.run(rig.train)


# ------------------------------------------------------------------------------------------ by time


async def test_at_once_then_on_boundaries(rig: Any, clock: Any) -> None:
    """19. The first one at t=0; a slow tick is skipped, not made up."""
    made = await rig(save_model_secs=10)
    made.start()
    assert await made.until_saved(1) == [0]
    for expected in (1, 2):
        await steps(made, 1)
        assert await clock.sleepers(1) == (10.0,)
        await clock.advance(10)
        assert (await made.until_saved(expected + 1))[-1] == expected
    await clock.sleepers(1)
    clock.jump(35)  # three ticks at once
    await made.until_saved(4)
    assert await clock.sleepers(1) == (5.0,)
    assert len(made.saved) == 4


async def test_time_does_not_depend_on_the_step(rig: Any, clock: Any) -> None:
    """F08. TensorFlow's hook saves nothing after the first one where the train op does not advance the step."""
    made = await rig(save_model_secs=10)
    made.start()
    await made.until_saved(1)
    for count in (2, 3):
        await made.session.run(made.idle)
        await clock.sleepers(1)
        await clock.advance(10)
        await made.until_saved(count)
        assert tf.train.load_variable(made.saved[-1].prefix, "weight")[0] == count - 1
    assert made.steps == [0, 0, 0]
    assert len(made.messages("checkpoint.step_stuck")) == 1
    await made.session.run(made.idle)
    await made.stop()
    info = await made.service.final_save(Outcome.CLEAN)
    assert tf.train.load_variable(info.prefix, "weight")[0] == 3
    assert await made.service.final_save(Outcome.CLEAN) is None


async def test_no_warning_when_nothing_ran(rig: Any, clock: Any) -> None:
    made = await rig(save_model_secs=10)
    made.start()
    await made.until_saved(1)
    await clock.sleepers(1)
    await clock.advance(10)
    await made.until_saved(2)
    assert made.messages("checkpoint.step_stuck") == []


# ------------------------------------------------------------------------------------------ by steps


async def test_by_steps(rig: Any) -> None:
    """Exactly at the step, however the loop keeps up."""
    made = await rig(save_model_steps=4)
    made.start()
    await made.until_saved(1)
    for expected in ([0, 4], [0, 4, 8], [0, 4, 8, 12]):
        await steps(made, 4)
        assert await made.until_saved(len(expected)) == expected


async def test_by_steps_of_a_run_that_makes_several(rig: Any) -> None:
    """Five steps a run, every ten."""
    made = await rig(save_model_steps=10, advance=5)
    made.start()
    await made.until_saved(1)
    for expected in ([0, 10], [0, 10, 20], [0, 10, 20, 30]):
        await steps(made, 2)
        assert await made.until_saved(len(expected)) == expected


async def test_by_runs_where_there_is_no_step(rig: Any, tmp_path: Path) -> None:
    made = await rig(save_model_steps=3, with_step=False)
    made.start()
    await made.until_saved(1)
    for count in (2, 3):
        await steps(made, 3)
        await made.until_saved(count)
        assert tf.train.load_variable(str(tmp_path / "logdir" / "model.ckpt"), "weight")[0] == 3.0 * (count - 1)
    assert made.messages("checkpoint.step_stuck") == []


async def test_by_steps_and_by_time(rig: Any, clock: Any) -> None:
    """A save by time begins the count of steps anew."""
    made = await rig(save_model_steps=5, save_model_secs=10)
    made.start()
    await made.until_saved(1)
    await steps(made, 3)
    await clock.sleepers(1)
    await clock.advance(10)
    assert await made.until_saved(2) == [0, 3]
    await clock.sleepers(1)
    await steps(made, 4)
    assert made.steps == [0, 3]
    await steps(made, 1)
    assert await made.until_saved(3) == [0, 3, 8]


# ------------------------------------------------------------------------------------------ one at a time


class Gate:
    """Holds publications at a point until it is opened."""

    def __init__(self, point: str = "before-write") -> None:
        self.point = point
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.count = 0

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.count += 1
            self.entered.release()
            assert self.open.wait(60)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, True, 60)


async def test_requests_share_the_next_save(rig: Any) -> None:
    """All that ask while one is written get one more, whose state is not older than their request."""
    gate = Gate()
    made = await rig(faults=gate)
    first = asyncio.ensure_future(made.service.save())
    await gate.reached()
    await steps(made, 2)
    others = [asyncio.ensure_future(made.service.save()) for _ in range(5)]
    await steps(made, 1)
    gate.open.set()
    assert (await first).step == 0
    infos = await asyncio.gather(*others)
    assert {info.step for info in infos} == {3} and len(set(infos)) == 1
    assert gate.count == 2


async def test_training_goes_on_while_it_is_written(rig: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate)
    save = asyncio.ensure_future(made.service.save())
    await gate.reached()
    await steps(made, 10)
    assert int(np.ravel(await made.session.run(made.step))[0]) == 10
    gate.open.set()
    info = await save
    assert info.step == 0 and info.stall_secs > 0 and info.write_secs > info.stall_secs and info.bytes > 0


async def test_a_due_save_while_one_runs_is_coalesced(rig: Any, clock: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate, save_model_steps=2, save_model_secs=10)
    made.start()
    await gate.reached()
    await steps(made, 9)
    clock.jump(100)
    gate.open.set()
    await made.until_saved(1)
    assert made.steps == [0]
    while len(made.saved) < 2:
        await steps(made, 1)
    assert made.steps[1] >= 9 and gate.count <= 3


async def test_who_asked_may_be_cancelled(rig: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate)
    save = asyncio.ensure_future(made.service.save())
    await gate.reached()
    save.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    gate.open.set()
    assert await made.service.drain()
    assert made.steps == [0]


async def test_cancelled_service_finishes_what_it_began(rig: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate, save_model_secs=10)
    made.start()
    await gate.reached()
    made.running.cancel()
    await asyncio.wait([made.running])
    made.running = None
    assert not await made.service.drain(timeout_secs=0)
    gate.open.set()
    assert await made.service.drain()
    assert made.steps == [0]


async def test_paused_training_is_saved(rig: Any) -> None:
    made = await rig()
    made.session.pause()
    assert (await made.service.save()).step == 0
    made.session.resume()


# ------------------------------------------------------------------------------------------ failures


class Failing:
    """A disk that is full until told otherwise."""

    def __init__(self) -> None:
        self.broken = True

    def __call__(self, point: str) -> None:
        if self.broken and point == "before-write":
            raise OSError(28, "No space left on device")


async def test_a_failed_save_is_tried_again_with_growing_pauses(rig: Any, clock: Any) -> None:
    """10. Training goes on; an event for each attempt; and it recovers by itself."""
    disk = Failing()
    made = await rig(faults=disk, save_model_secs=600)
    made.start()
    for attempt, pause in enumerate((1.0, 2.0, 4.0, 8.0), 1):
        assert await clock.sleepers(1) == (pause,)
        assert len(made.messages("checkpoint.failed")) == attempt
        await steps(made, 1)
        if attempt == 4:
            disk.broken = False
        await clock.advance(pause)
    assert await made.until_saved(1) == [4]
    assert made.service.last_error is None
    assert await clock.sleepers(1) == (600.0 - 15.0,)
    assert not made.running.done()


async def test_the_longest_pause(rig: Any, clock: Any) -> None:
    made = await rig(faults=Failing(), save_model_secs=600)
    made.start()
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert await clock.sleepers(1) == (pause,)
        await clock.advance(pause)
    assert isinstance(made.service.last_error, OSError)


async def test_by_steps_a_failure_does_not_try_after_each_step(rig: Any, clock: Any) -> None:
    disk = Failing()
    disk.broken = False
    made = await rig(faults=disk, save_model_steps=2)
    made.start()
    await made.until_saved(1)
    disk.broken = True
    await steps(made, 2)
    await made.until(lambda: made.messages("checkpoint.failed"))
    await clock.sleepers(1)
    failures = len(made.messages("checkpoint.failed"))
    await steps(made, 10)
    assert len(made.messages("checkpoint.failed")) == failures <= 2
    disk.broken = False
    await clock.advance(2)
    assert (await made.until_saved(2))[-1] == 12
    await steps(made, 2)
    assert (await made.until_saved(3))[-1] == 14


async def test_a_failure_can_be_fatal(rig: Any) -> None:
    made = await rig(faults=Failing(), save_model_secs=600, fatal=True)
    with pytest.raises(OSError, match="No space"):
        await made.service.run()


async def test_by_hand_the_error_is_raised(rig: Any) -> None:
    made = await rig(faults=Failing())
    with pytest.raises(OSError, match="No space"):
        await made.service.save()
    assert len(made.messages("checkpoint.failed")) == 1


async def test_f04_not_restored_ends_the_service(rig: Any) -> None:
    """F04. There is no use in trying again: the error is the service's."""
    first = await rig()
    await first.service.save()
    second = await rig(save_model_secs=600)
    second.store._place.claimed, second.store.restored = False, None  # as if somebody else had restored, or nobody
    with pytest.raises(CheckpointNotRestored):
        await second.service.run()


async def test_closed_session(rig: Any) -> None:
    made = await rig(save_model_secs=600)
    made.start()
    await made.until_saved(1)
    await made.session.close()
    with pytest.raises(SessionClosed):
        await made.service.save()
    assert await made.service.final_save(Outcome.CLEAN) is None


async def test_nothing_to_save(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.constant(1.0)
        saver = tf1.train.Saver(allow_empty=True)
    executor, coordinator = DeviceExecutor(), Coordinator()
    session = AsyncSession(tf1.Session(graph=graph), executor, coordinator=coordinator)
    store = CheckpointStore(tmp_path, graph, saver)
    service = CheckpointService(session, store, coordinator, save_model_secs=1)
    running = asyncio.ensure_future(service.run())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="no variables"):
        await service.save()
    coordinator.request_stop()
    await running
    assert await service.final_save(Outcome.CLEAN) is None
    await session.close()
    await executor.aclose(10)


# ------------------------------------------------------------------------------------------ the end


async def test_final_save_only_of_what_changed(rig: Any) -> None:
    made = await rig(save_model_secs=600)
    made.start()
    await made.until_saved(1)
    await made.stop()
    assert await made.service.final_save(Outcome.CLEAN) is None
    await steps(made, 2)
    info = await made.service.final_save(Outcome.STOPPED)
    assert info.step == 2 and made.steps == [0, 2]
    assert await made.service.final_save(Outcome.STOPPED) is None


@pytest.mark.parametrize("outcome", [Outcome.CLEAN, Outcome.STOPPED, Outcome.ERROR, Outcome.CANCELLED])
async def test_f06_after_each_end(outcome: Outcome, rig: Any) -> None:
    """F06. TensorFlow's Supervisor saves at none of them."""
    made = await rig()
    await steps(made, 3)
    info = await made.service.final_save(outcome)
    assert (info.step, info.kind) == (3, Kind.REGULAR)
    assert tf.train.latest_checkpoint(made.store.logdir) == info.prefix


async def test_after_an_error_of_a_training_run(rig: Any) -> None:
    """What such a step left may be half a step: it is kept, and never restored by itself."""
    made = await rig()
    await made.service.save()
    await steps(made, 3)
    info = await made.service.final_save(Outcome.STEP_ERROR)
    assert info.kind is Kind.EMERGENCY and info.prefix.endswith("model.ckpt-3-emergency")
    assert info.prefix in made.messages("checkpoint.emergency")[0]
    assert tf.train.latest_checkpoint(made.store.logdir).endswith("model.ckpt-0")
    assert made.steps == [0]  # no CHECKPOINT record


async def test_an_error_says_nothing_about_the_step(rig: Any) -> None:
    """The only run failed: that is no step which does not move."""
    made = await rig()
    await made.service.save()
    with made.session.graph.as_default():
        bad = tf1.assign_add(made.step, tf1.placeholder(tf.int64, []))
    with pytest.raises(tf.errors.InvalidArgumentError):
        await made.session.run(bad)
    await made.service.final_save(Outcome.STEP_ERROR)
    assert made.messages("checkpoint.step_stuck") == []


async def test_the_timer_keeps_off_a_failed_step(rig: Any, clock: Any) -> None:
    """Between the failing step and the stop that it causes, the timer does not publish what it left."""
    made = await rig(save_model_secs=10)
    made.start()
    await made.until_saved(1)
    await clock.sleepers(1)
    with made.session.graph.as_default():
        bad = tf1.assign_add(made.step, tf1.placeholder(tf.int64, []))
    with pytest.raises(tf.errors.InvalidArgumentError):
        await made.session.run(bad)
    assert made.session.failed_training_run is not None
    await clock.advance(10)
    assert await clock.sleepers(1) == (1.0,)
    assert made.steps == [0]
    await steps(made, 1)  # somebody dealt with the error: training goes on, and so do the saves
    await clock.advance(1)
    assert (await made.until_saved(2))[-1] == 1


async def test_final_save_waits_for_the_one_in_flight(rig: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate)
    first = asyncio.ensure_future(made.service.save())
    await gate.reached()
    await steps(made, 1)
    final = asyncio.ensure_future(made.service.final_save(Outcome.STOPPED))
    gate.open.set()
    assert (await first).step == 0
    assert (await final).step == 1


async def test_final_save_in_flight_too_long(rig: Any, clock: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate)
    first = asyncio.ensure_future(made.service.save())
    await gate.reached()
    final = asyncio.ensure_future(made.service.final_save(Outcome.STOPPED, timeout_secs=5))
    assert await clock.sleepers(1) == (5.0,)
    await clock.advance(5)
    with pytest.raises(TimeoutError, match="in flight"):
        await final
    gate.open.set()
    await first


async def test_final_save_too_slow_itself(rig: Any, clock: Any) -> None:
    gate = Gate()
    made = await rig(faults=gate)
    final = asyncio.ensure_future(made.service.final_save(Outcome.STOPPED, timeout_secs=5))
    await gate.reached()
    await clock.advance(5)
    with pytest.raises(TimeoutError, match="final save"):
        await final
    gate.open.set()
    await made.service.drain()
    assert made.steps == [0]


async def test_too_little_grace_is_said(rig: Any) -> None:
    """A SIGTERM with less time than a save takes: rely on the last one, and say so."""
    made = await rig()
    await made.service.save()
    made.service.cost_secs = 30.0
    await steps(made, 1)
    assert await made.service.final_save(Outcome.STOPPED, timeout_secs=10) is None
    (message,) = made.messages("checkpoint.skipped")
    assert "30.0 s" in message and "model.ckpt-0" in message
    assert made.steps == [0]


async def test_while_others_train_on_it_saves_and_leaves_the_last_save_its_time(rig: Any, clock: Any) -> None:
    made = await rig(save_model_secs=10)
    saving = asyncio.ensure_future(made.service.save_meanwhile(60.0))
    assert await clock.sleepers(1) == (1.0,)
    await clock.advance(1)
    assert await clock.sleepers(1) == (10.0,)
    assert made.steps == [0]
    await steps(made, 1)
    made.service.cost_secs = 20.0  # 49 s are left for this one and the last one, which may be slower
    await clock.advance(10)
    await saving
    assert made.steps == [0]
    assert await made.service.final_save(Outcome.STOPPED, timeout_secs=49) is not None
    assert made.steps == [0, 1]


async def test_a_failure_of_the_final_save_is_raised(rig: Any) -> None:
    made = await rig(faults=Failing())
    await steps(made, 1)
    with pytest.raises(OSError, match="No space"):
        await made.service.final_save(Outcome.CLEAN)


async def test_nonfinite_is_no_checkpoint_record(rig: Any) -> None:
    made = await rig()
    with made.session.graph.as_default():
        spoil = made.weight.assign(tf.fill([100], np.nan))
    await made.session.run(spoil)
    info = await made.service.save()
    assert info.kind is Kind.NONFINITE and made.steps == []


async def test_alarm_after_the_end_does_nothing(rig: Any) -> None:
    made = await rig(save_model_steps=2)
    made.start()
    await made.until_saved(1)
    await made.stop()
    assert await made.service.final_save(Outcome.CLEAN) is None
    await steps(made, 6)
    await made.service.drain()
    assert made.steps == [0]
