"""The two waits for the end of a job: a parameter server's and the chief's."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import TYPE_CHECKING, Literal

import tensorflow as tf

from asupervisor.clock import Clock
from asupervisor.cluster.membership import Membership
from asupervisor.cluster.probing import silent_ones
from asupervisor.cluster.register import Reading, Register, TaskState, hang_up
from asupervisor.events import EventSink
from asupervisor.runtime import signals
from asupervisor.runtime.device import DeviceExecutor

if TYPE_CHECKING:
    from asupervisor.cluster.task import Task

POLL_SECS = 0.2
#: What the others have to hang up, before the first parameter server goes, in seconds.
LINGER_SECS = 0.5
#: How long it waits for the other ones to have seen the end, and to be gone, in seconds.
OTHERS_SECS = 10.0


async def wait_for_end_of_job(task: Task, clock: Clock, emit: EventSink) -> Literal["done", "signal"]:
    """Serve as a parameter server until everybody is done, or a signal comes; see `Task.join`."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()

    def on_signal(number: int) -> None:
        loop.call_soon_threadsafe(signalled.set)

    handles_signals = threading.current_thread() is threading.main_thread()
    if handles_signals:
        signals.subscribe(on_signal)
    executor = DeviceExecutor(task.name, emit=emit)
    try:
        await executor.side(task.start_server, label="start of the server")
        emit("cluster.serving", f"{task.name} serves", task=task.name)
        serving = asyncio.ensure_future(_until_done(task, executor, clock))
        told = asyncio.ensure_future(signalled.wait())
        try:
            await asyncio.wait([serving, told], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                emit("cluster.done", f"{task.name}: the job is done", task=task.name)
                return "done"
            return "signal"
        finally:
            for waiter in (serving, told):
                waiter.cancel()
            await asyncio.wait([serving, told])
    finally:
        await executor.aclose(1.0)
        if handles_signals:
            signals.unsubscribe(on_signal)


async def _until_done(task: Task, executor: DeviceExecutor, clock: Clock) -> None:
    register = Register(task.layout, task.target, task.configured())
    chief_ended_at = math.inf
    try:
        while True:
            reading: Reading | None = None
            try:
                reading = await executor.side(register.read, label="read the register")
            except tf.errors.OpError:  # the first parameter server is not there, or not any more
                await hang_up(register)
            if reading is not None and reading.states[0].ended:
                chief_ended_at = min(chief_ended_at, clock.monotonic())
                at_work = any(state is TaskState.WORKING for state in reading.states)
                overdue = clock.monotonic() >= chief_ended_at + task.chief_grace_secs
                if overdue or (reading.states[0] is TaskState.DONE and not at_work):
                    if task.index == 0:
                        await _until_others_are_gone(task, clock)
                    return
            elif reading is not None:
                chief_ended_at = math.inf
            await clock.sleep(POLL_SECS)
    finally:
        await hang_up(register)


async def _until_others_are_gone(task: Task, clock: Clock) -> None:
    """The first parameter server keeps the register: whoever has not read of the end yet would serve for ever."""
    await clock.sleep(LINGER_SECS)
    others = task.layout.servers[1:]
    deadline = clock.monotonic() + OTHERS_SECS
    while len(await silent_ones(others)) < len(others) and clock.monotonic() < deadline:
        await clock.sleep(POLL_SECS / 4)


async def wait_for_workers(membership: Membership) -> None:
    """Wait until no worker is at work any more; see `Task.join`."""
    if not membership.is_in:
        raise RuntimeError("the chief waits for its workers inside of its session: enter that first")
    await membership.wait_for_workers()
