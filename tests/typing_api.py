"""Never run, only type-checked by `mypy --strict`: what the types of the public names promise to a caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, assert_type

import asupervisor
from asupervisor import (
    AsyncSession,
    AsyncSessionRunHook,
    BlockingSession,
    Coordinator,
    DeviceExecutor,
    Event,
    LooperTask,
    MonitoredSession,
    MonitoredTrainingSession,
    RecoveryPolicy,
    SessionClosed,
    SessionManager,
    Status,
    Supervisor,
    SupervisorError,
)
from asupervisor.clock import Clock
from asupervisor.testing import ManualClock


async def a_whole_session(graph: Any, train_op: Any) -> None:
    supervisor = Supervisor(graph=graph, logdir="runs/digits", save_model_secs=60, clock=ManualClock())
    async with supervisor.managed_session("local") as session:
        assert_type(session, AsyncSession)
        assert_type(supervisor.should_stop(), bool)
        await session.run(train_op, feed_dict={"x:0": 1.0})
        async for _ in session.steps(train_op, max_steps=10):
            pass
        step = session.make_callable(train_op)
        await step()
        assert_type(session.blocking, BlockingSession)
        assert_type(supervisor.loop(60, print, ("tick",)), LooperTask)
        supervisor.start_soon(on_the_side, session, name="side")
        await supervisor.summary_computed(session, b"")
        supervisor.request_stop()
        supervisor.RequestStop(ValueError("no"))


async def on_the_side(session: AsyncSession) -> None:
    await session.call(lambda raw: raw.run("op"))


async def a_monitored_session(graph: Any, train_op: Any) -> None:
    hooks = [AsyncSessionRunHook()]
    policy = RecoveryPolicy(max_restarts=3)
    async with MonitoredTrainingSession(graph=graph, checkpoint_dir="runs", hooks=hooks, recovery=policy) as session:
        assert_type(session, MonitoredSession)
        while not session.should_stop():
            await session.run(train_op)


async def watch(supervisor: Supervisor) -> None:
    assert_type(supervisor.status(), Status)
    events: AsyncIterator[Event] = supervisor.events()
    async for event in events:
        assert_type(event.kind, str)
    waiting: Awaitable[Any] = supervisor.wait_for_stop()
    await waiting


async def parts(graph: Any, raw: Any) -> None:
    clock: Clock = ManualClock()
    assert_type(clock.monotonic(), float)
    executor = DeviceExecutor("/cpu:0")
    assert_type(await executor.call(len, "four"), int)
    coordinator = Coordinator()
    with coordinator.stop_on_exception():
        coordinator.request_stop()
    manager = SessionManager(graph=graph)
    session = await manager.prepare_session("", init_op=None)
    assert_type(session, AsyncSession)
    try:
        await session.close()
    except SessionClosed as error:
        assert_type(error.session, str)
    except SupervisorError:
        raise


assert_type(asupervisor.__version__, str)
