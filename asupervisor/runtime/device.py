"""`DeviceExecutor`: everything that must not interleave on one device, and side threads for what blocks on purpose.

The thread itself, its lanes and their order are in `device_thread`.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic
from typing import Any, TypeVar

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.calls import Call, FunctionCall, label_of, no_loop_here, wait_blocking
from asupervisor.runtime.device_thread import Device
from asupervisor.runtime.frames import frame_of
from asupervisor.runtime.mailbox import Mailbox, Rendezvous, forget_closed_loops, mailbox_of
from asupervisor.runtime.statistics import Percentiles

T = TypeVar("T")


class Priority(IntEnum):
    """Who goes first on the device thread."""

    CONTROL = 0
    INTERACTIVE = 1
    STREAM = 2


@dataclass(frozen=True, slots=True)
class Busy:
    """What the device thread is doing.

    Attributes:
        label: The call or stream, for people.
        since: Monotonic time at which the call, or the current step of the stream, began, in seconds.
        thread_ident: `threading.get_ident` of the device thread.
    """

    label: str
    since: float
    thread_ident: int

    def stack(self) -> str:
        """The thread's Python stack at this moment, formatted; empty when the thread has ended."""
        frame = frame_of(self.thread_ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """How a device thread stands.

    Attributes:
        name: The device.
        calls: Calls that ran, of the control and interactive lanes.
        stream_turns: Turns that streams had.
        waiting_control: Calls that wait in the control lane.
        waiting_interactive: Calls that wait in the interactive lane.
        side_threads: Labels of what runs on side threads.
        call_time: How long a call took on the thread.
        queue_wait: How long a call waited for the thread.
        busy: What runs now, or None.
    """

    name: str
    calls: int
    stream_turns: int
    waiting_control: int
    waiting_interactive: int
    side_threads: tuple[str, ...]
    call_time: Percentiles
    queue_wait: Percentiles
    busy: Busy | None


class DeviceExecutor:
    """One dedicated daemon thread for everything that must not interleave on one device, and side threads.

    The thread starts at the first use. Sessions may share an executor, at the same time on one loop, or one after
    another on several loops. Whoever made it closes it with `aclose`. After a fork it is closed in the child.

    Args:
        name: The device; it names the thread.
        thread_init: Called once on the new thread, before any work.
        emit: Told of dropped results and of failures outside of any call.
    """

    def __init__(
        self,
        name: str = "/cpu:0",
        *,
        thread_init: Callable[[], None] | None = None,
        emit: EventSink = log_only,
    ) -> None:
        self.device = Device(name, thread_init, emit)
        # An executor that nobody closed and nobody holds any more takes its threads with it.
        self._finalizer = weakref.finalize(self, self.device.shutdown)
        self._finalizer.atexit = False

    @property
    def name(self) -> str:
        """The device's name."""
        return self.device.name

    @property
    def closed(self) -> bool:
        """Whether it accepts no more work."""
        return self.device.closed

    def call(
        self,
        fn: Callable[..., T],
        *args: Any,
        priority: Priority = Priority.INTERACTIVE,
        label: str | None = None,
    ) -> Awaitable[T]:
        """Run `fn(*args)` on the device thread, between two steps, in a copy of the caller's context.

        Cancelled before it started, it never runs. Cancelled in flight, the caller is released at once; `fn` runs to
        its end, its result is dropped and an event (``run.dropped``) says how it ended.

        Args:
            fn: What to run. StopIteration from it arrives as the cause of a RuntimeError.
            *args: Its arguments.
            priority: Its lane: `Priority.CONTROL` or `Priority.INTERACTIVE`.
            label: What it is, for people.

        Raises:
            WrongEventLoop: No event loop runs in this thread.
            SessionClosed: The executor is closed.
        """
        return self._call(self._mailbox(fn), self._lane(priority), fn, args, label)

    async def _call(
        self,
        mailbox: Mailbox,
        lane: deque[Call],
        fn: Callable[..., T],
        args: tuple[Any, ...],
        label: str | None,
    ) -> T:
        call = FunctionCall(mailbox, self.device.emit, fn, args, label)
        del fn, args
        self.device.submit(call, lane)
        result: T = await call
        return result

    def side(self, fn: Callable[..., T], *args: Any, label: str | None = None) -> Awaitable[T]:
        """Run `fn(*args)` on a side thread of its own, for what blocks on purpose. Otherwise like `call`."""
        return self._side(self._mailbox(fn), fn, args, label)

    async def _side(self, mailbox: Mailbox, fn: Callable[..., T], args: tuple[Any, ...], label: str | None) -> T:
        call = FunctionCall(mailbox, self.device.emit, fn, args, label)
        del fn, args
        self.device.submit_side(call)
        result: T = await call
        return result

    def call_blocking(
        self,
        fn: Callable[..., T],
        *args: Any,
        priority: Priority = Priority.INTERACTIVE,
        label: str | None = None,
    ) -> T:
        """Run `fn(*args)` on the device thread and wait for it; in any thread that runs no event loop.

        On the device thread itself it runs inline, at once.

        Raises:
            WrongEventLoop: An event loop runs in this thread, and would stand still.
            SessionClosed: The executor is closed.
        """
        if self.on_device_thread():
            return fn(*args)
        refuse_running_loop("call_blocking", "Await `call` instead.")
        self._check_open()
        rendezvous = Rendezvous()
        call = FunctionCall(rendezvous, self.device.emit, fn, args, label)
        self.device.submit(call, self._lane(priority))
        result: T = wait_blocking(call, rendezvous)
        return result

    def on_device_thread(self) -> bool:
        """Whether this is the device thread."""
        return self.device.ident == threading.get_ident()

    def busy(self) -> Busy | None:
        """What the device thread does now, or None; any thread."""
        current, ident = self.device.current, self.device.ident
        if current is None or ident is None:
            return None
        return Busy(current.describe(), current.started, ident)

    def statistics(self) -> DeviceStatistics:
        """How it stands; any thread."""
        device = self.device
        return DeviceStatistics(
            name=device.name,
            calls=device.calls,
            stream_turns=device.turns,
            waiting_control=len(device.control),
            waiting_interactive=len(device.interactive),
            side_threads=device.side.busy(),
            call_time=Percentiles.of(device.call_times),
            queue_wait=Percentiles.of(device.waits),
            busy=self.busy(),
        )

    def shutdown(self) -> None:
        """Like `aclose`, without waiting for the threads to end; any thread."""
        self.device.shutdown()

    async def aclose(self, timeout_secs: float) -> bool:
        """Fail queued work with `SessionClosed`, let the threads end and wait for that; idempotent.

        Args:
            timeout_secs: How long to wait, in seconds.

        Returns:
            False when a thread is stuck in its call (`busy`, `statistics` name it). It is a daemon: it ends with
            its call, and does not keep the interpreter alive. Cancelled, the threads end all the same.
        """
        device = self.device
        device.shutdown()
        forget_closed_loops()
        deadline = monotonic() + timeout_secs
        ended = await device.ending.wait(timeout_secs)
        if ended and device.thread is not None:
            device.thread.join()  # microseconds: its last statement was to say that it ends
        return await device.side.aclose(max(0.0, deadline - monotonic())) and ended

    # -------------------------------------------------------------------------------------------------- helpers

    def _mailbox(self, fn: Callable[..., object]) -> Mailbox:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise no_loop_here(label_of(fn)) from None
        self._check_open()
        return mailbox_of(loop)

    def _check_open(self) -> None:
        if self.device.closed:
            raise SessionClosed(f"the executor of {self.name}")

    def _lane(self, priority: Priority) -> deque[Call]:
        if priority is Priority.STREAM:
            raise ValueError("Priority.STREAM is for step streams; use CONTROL or INTERACTIVE for a call")
        return self.device.control if priority is Priority.CONTROL else self.device.interactive


def refuse_running_loop(what: str, remedy: str) -> None:
    """Raise where an event loop runs in this thread: a blocking call would stop it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WrongEventLoop(f"{what} would block the event loop that runs in this thread", remedy)
