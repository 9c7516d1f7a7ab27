"""How fast the global step advances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.step_counter import StepCounter, step_name
from asupervisor.session.session import AsyncSession
from asupervisor.testing.clock import ManualClock

pytestmark = pytest.mark.modes
tf1 = tf.compat.v1


class Rig:
    """A session that counts, and what the counter wrote."""

    def __init__(self, graph: tf.Graph, clock: ManualClock, step: Any, advance: Any) -> None:
        self.clock = clock
        self.step = step
        self.advance = advance
        self.added: list[tuple[str, float, int]] = []
        self.events: list[SimpleNamespace] = []
        self.coordinator = Coordinator()
        self.executor = DeviceExecutor()
        with graph.as_default():
            init = tf1.global_variables_initializer()
        graph.finalize()
        self.session = AsyncSession(
            tf1.Session(graph=graph), self.executor, coordinator=self.coordinator, global_step=step, emit=self.emit
        )
        self.init = init
        self.counter = StepCounter(
            self.session,
            self,  # type: ignore[arg-type]
            global_step=step,
            every_secs=10,
            coordinator=self.coordinator,
            clock=clock,
            emit=self.emit,
        )

    def emit(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append(SimpleNamespace(kind=kind, message=message, level=level, data=data))

    def add_summary(self, summary: Any, step: int) -> None:
        (value,) = summary.value
        self.added.append((value.tag, value.simple_value, step))

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self.session.run(self.advance)

    @contextlib.asynccontextmanager
    async def counting(self) -> AsyncIterator[StepCounter]:
        await self.session.run(self.init)
        task = asyncio.create_task(self.counter.run())
        try:
            await self.clock.sleepers(1)
            yield self.counter
        finally:
            self.coordinator.request_stop()
            await asyncio.wait_for(task, 20)
            await self.session.close()
            assert await self.executor.aclose(20)


@pytest.fixture
def rig(graph: tf.Graph, clock: ManualClock, variables: str) -> Rig:
    with graph.as_default():
        step = tf1.train.create_global_step()
        advance = tf1.assign_add(step, 1)
    return Rig(graph, clock, step, advance)


async def test_the_first_value_is_zero_then_the_rate(rig: Rig) -> None:
    async with rig.counting() as counter:
        assert rig.added == [("global_step/sec", 0.0, 0)]  # at once: nothing counted yet
        assert counter.last_step == 0
        await rig.train(25)
        await rig.clock.advance(10)
        await rig.clock.sleepers(1)
        await rig.clock.advance(10)
        await rig.clock.sleepers(1)
        assert rig.added[1:] == [("global_step/sec", 2.5, 25), ("global_step/sec", 0.0, 25)]
        assert counter.last_step == 25


async def test_missed_ticks_are_one_longer_interval(rig: Rig) -> None:
    async with rig.counting():
        await rig.train(7)
        rig.clock.jump(35)
        await asyncio.sleep(0)
        assert await rig.clock.sleepers(1) == (5.0,)
        assert rig.added[1] == ("global_step/sec", pytest.approx(0.2), 7)
        assert len(rig.added) == 2


async def test_the_status_has_a_speed_before_the_first_interval_is_over(rig: Rig) -> None:
    assert rig.counter.steps_per_sec is None
    async with rig.counting() as counter:
        assert counter.steps_per_sec is None
        await rig.train(6)
        assert counter.steps_per_sec is None  # no time has passed: not infinite
        await rig.clock.advance(3)
        assert counter.steps_per_sec == 2.0
        await rig.clock.advance(7)
        await rig.clock.sleepers(1)
        assert counter.steps_per_sec == pytest.approx(0.6)


async def test_no_time_passed_is_no_infinite_speed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig.counting() as counter:
        await rig.train(3)
        await rig.session.control(counter._count)
        assert all(np.isfinite(value) for _, value, _ in rig.added)
        assert counter.last_step == 3


async def test_a_step_that_went_back_is_a_new_base(rig: Rig) -> None:
    async with rig.counting():
        await rig.train(20)
        await rig.clock.advance(10)
        await rig.clock.sleepers(1)
        await rig.session.run(rig.init)  # restored, or adopted from somebody else
        await rig.clock.advance(10)
        await rig.clock.sleepers(1)
        await rig.train(5)
        await rig.clock.advance(10)
        await rig.clock.sleepers(1)
        assert [(value, step) for _, value, step in rig.added] == [(0.0, 0), (2.0, 20), (0.5, 5)]


async def test_a_read_that_fails_is_an_event(graph: tf.Graph, clock: ManualClock, variables: str) -> None:
    with graph.as_default():
        step = tf1.get_variable("my_step", initializer=0, trainable=False)
        advance = tf1.assign_add(step, 1)
    rig = Rig(graph, clock, step, advance)
    rig.init = []  # nothing is initialised
    async with rig.counting() as counter:
        assert counter.tag == "my_step/sec"
        assert rig.added == []
        (event,) = [event for event in rig.events if event.kind == "step_counter.failed"]
        assert event.level == "warning" and "my_step" in event.message
        assert not rig.coordinator.should_stop()


async def test_a_step_of_shape_one(graph: tf.Graph, clock: ManualClock, variables: str) -> None:
    with graph.as_default():
        step = tf1.get_variable("global_step", initializer=[123], trainable=False)
        advance = tf1.assign_add(step, [1])
    rig = Rig(graph, clock, step, advance)
    async with rig.counting():
        assert rig.added == [("global_step/sec", 0.0, 123)]


def test_names(graph: tf.Graph, variables: str) -> None:
    with graph.as_default(), tf1.variable_scope("scope"):
        step = tf1.get_variable("step", initializer=np.int64(0), dtype=tf.int64, trainable=False)
        assert step_name(step) == "scope/step"
        assert step_name(step.value()) == "scope/step"
        assert step_name(tf.identity(step)) == "scope/step"
        assert step_name(tf.constant(3, name="three")) == "scope/three"
        assert step_name(tf.add(step, 1, name="more")) == "scope/more"


async def test_the_stop_does_not_wait_for_a_blocked_step(graph: tf.Graph, clock: ManualClock) -> None:
    with graph.as_default():
        step = tf1.train.create_global_step()
        queue = tf1.FIFOQueue(1, [tf.int64], shapes=[()])
        advance = tf1.assign_add(step, queue.dequeue())
        close = queue.close()
    rig = Rig(graph, clock, step, advance)
    async with rig.counting():
        blocked = asyncio.ensure_future(rig.session.run(advance))
        await asyncio.sleep(0)
        await clock.advance(10)  # the tick waits behind the step
        rig.coordinator.request_stop()
        async with asyncio.timeout(20):
            while clock.remaining():
                await asyncio.sleep(0)
        assert not blocked.done()
        await rig.session.run(close)
        with pytest.raises(tf.errors.OutOfRangeError):
            await blocked
