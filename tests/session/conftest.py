"""Fixtures of the session tests: a small model, and sessions that are closed when the test ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.session import AsyncSession

WAIT = 20  # seconds that a test waits for what must happen; reached only when it fails


class Sink:
    """Remembers events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append((kind, message, data))

    def of(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Messages and data of the events of one kind."""
        return [(message, data) for known, message, data in self.events if known == kind]

    async def wait_for(self, kind: str) -> tuple[str, dict[str, Any]]:
        """The first event of this kind."""
        deadline = asyncio.get_running_loop().time() + WAIT
        while not self.of(kind):
            assert asyncio.get_running_loop().time() < deadline, f"no {kind} among {self.events}"
            await asyncio.sleep(0.001)
        return self.of(kind)[0]


class StepGate:
    """A Python op within a step: it holds the step until it is told to go on, once it was armed."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.release.set()
        self.passed = 0

    def __call__(self) -> np.int32:
        self.passed += 1
        if not self.release.is_set():
            self.entered.set()
            assert self.release.wait(WAIT)
        return np.int32(self.passed)

    def arm(self) -> None:
        """Hold the next step."""
        self.entered.clear()
        self.release.clear()

    async def wait_entered(self) -> None:
        """Until a step is held."""
        await asyncio.to_thread(self.entered.wait, WAIT)
        assert self.entered.is_set()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def model(graph: tf.Graph, variables: str) -> Iterator[SimpleNamespace]:
    """A counter as global step, a weight that is fed, a queue, and a step that a test can hold."""
    gate = StepGate()
    with graph.as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        weight = tf.compat.v1.get_variable("weight", [], initializer=tf.compat.v1.zeros_initializer())
        add = tf.compat.v1.assign_add(weight, tf.reduce_sum(x), name="add")
        with tf.control_dependencies([add]):
            train = tf.compat.v1.assign_add(step, 1, name="train")
        count = tf.compat.v1.assign_add(step, 1, name="count")
        held = tf.compat.v1.py_func(gate, [], tf.int32, name="held")
        with tf.control_dependencies([held]):
            held_count = tf.compat.v1.assign_add(step, 1, name="held_count")
        double = tf.multiply(x, 2.0, name="double")
        queue = tf.queue.FIFOQueue(1, [tf.int32], shapes=[[]], name="numbers")
        number = tf.compat.v1.placeholder(tf.int32, [], name="number")
        enqueue = queue.enqueue(number, name="put")
        dequeue = queue.dequeue(name="take")
        with tf.control_dependencies([dequeue]):
            consume = tf.compat.v1.assign_add(step, 1, name="consume")
        close_queue = queue.close()
        failing = tf.debugging.check_numerics(tf.math.log(-x), "bad", name="failing")
        with tf.control_dependencies([failing]):
            failing_train = tf.compat.v1.assign_add(step, 1, name="failing_train")
        init = tf.compat.v1.global_variables_initializer()
    yield SimpleNamespace(
        graph=graph,
        gate=gate,
        step=step,
        x=x,
        weight=weight,
        train=train,
        count=count,
        held=held,
        held_count=held_count,
        double=double,
        queue=queue,
        number=number,
        enqueue=enqueue,
        dequeue=dequeue,
        consume=consume,
        close_queue=close_queue,
        failing_train=failing_train,
        init=init,
    )
    gate.release.set()


MakeSession = Callable[..., AsyncSession]


@pytest.fixture
async def make_session(model: SimpleNamespace, sink: Sink) -> AsyncIterator[MakeSession]:
    """Makes initialised sessions on the model; each is closed, with its executor, when the test ends."""
    made: list[tuple[AsyncSession, DeviceExecutor | None]] = []

    def make(executor: DeviceExecutor | None = None, **options: Any) -> AsyncSession:
        own = None if executor is not None else DeviceExecutor()
        raw = tf.compat.v1.Session(graph=model.graph)
        raw.run(model.init)
        session = AsyncSession(
            raw,
            executor or own,
            **{"emit": sink, "global_step": model.step, **options},  # type: ignore[arg-type]
        )
        made.append((session, own))
        return session

    yield make
    model.gate.release.set()
    for session, _ in made:
        assert await session.close_raw(WAIT)
    for _, executor in made:
        if executor is not None:
            assert await executor.aclose(WAIT)


@pytest.fixture
def sess(make_session: MakeSession) -> AsyncSession:
    """One session on the model."""
    return make_session()


@pytest.fixture
def settle() -> Callable[[], Any]:
    """Lets every task that can run, run."""

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    return settle
