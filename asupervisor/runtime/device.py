"""The device thread: the one lock around step, save and summary.

`DeviceExecutor` owns one daemon thread per device name, with an inbox of three lanes, and side threads for work that
blocks on purpose. In a round, the thread takes what is in the control lane (stop, snapshot), then a bounded number of
interactive calls, then one turn of one stream; a stream ends its turn at the next step boundary when anybody else
waits. So neither starves: an interactive call waits for one step at most, a stream for `INTERACTIVE_PER_STEP` calls.

Which thread does what: lanes are appended to by any thread and emptied by the device thread or by who withdraws a call
(see `calls`). `sleeping` is written by the device thread and taken down by who rings. Everything else that is not
under `_guard` belongs to the device thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.calls import Call, FunctionCall, Mailbox, Rendezvous, no_loop_here
from asupervisor.runtime.statistics import Percentiles, window
from asupervisor.runtime.threads import SideThreads
from asupervisor.runtime.wakeup import Doorbell, Ending

T = TypeVar("T")

INTERACTIVE_PER_STEP: Final = 4
"""Most interactive calls between two stream steps."""

RESULTS_WAIT_SECS: Final = 0.0005
"""While more calls wait, a finished one may wait this long for company on its way to the loop, in seconds."""

logger = logging.getLogger("asupervisor")


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
        frame = sys._current_frames().get(self.thread_ident)
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
        loop_lag: From a finished result to its delivery on the event loop.
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
    loop_lag: Percentiles
    busy: Busy | None


class StepSource(Protocol):
    """A stream of steps, as the device thread sees it."""

    queued: bool
    """Whether it waits for a turn; belongs to the device thread."""
    started: float
    """Monotonic time at which its current step began, in seconds."""

    def turn(self) -> bool:
        """Run at least one step if possible, more while `Device.others_wait` says no; whether it has more to do."""

    def abort(self, error: BaseException) -> None:
        """The device is closed: end with `error`; any thread."""

    def describe(self) -> str:
        """What this is, for people; any thread."""


class Device:
    """What the thread itself holds: inbox, statistics, main loop. `DeviceExecutor` is its owner."""

    def __init__(self, name: str, thread_init: Callable[[], None] | None, emit: EventSink) -> None:
        self.name = name
        self.emit = emit
        self.closed = self.forked = False
        self.control: deque[Call] = deque()
        self.interactive: deque[Call] = deque()
        self.kicked: deque[StepSource] = deque()
        self.streams: deque[StepSource] = deque()
        self.sources: set[StepSource] = set()
        self.sleeping = False
        self.ident: int | None = None
        self.thread: threading.Thread | None = None
        self.ending = Ending()
        self.current: Call | StepSource | None = None
        self.calls = self.turns = 0
        self.call_times, self.waits, self.lags = window(), window(), window()
        self.side = SideThreads(f"asupervisor side {name}")
        self.mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._thread_init = thread_init
        self._guard = threading.Lock()
        self._bell = Doorbell()
        self._unrung: Mailbox | Rendezvous | None = None
        self._unrung_since = 0.0
        _devices.add(self)

    # -------------------------------------------------------------------------------------------- any thread

    def submit(self, call: Call, lane: deque[Call]) -> None:
        """Put a call into one of the two lanes."""
        call.lane = lane
        lane.append(call)
        if self.sleeping:
            self.sleeping = False
            self._bell.ring()
        elif self.thread is None:
            self._start()
        if self.closed and call.withdraw():  # closed meanwhile, and its sweep may have missed this one
            raise SessionClosed(f"the executor of {self.name}")

    def submit_side(self, call: Call) -> None:
        """Run a call on a side thread. Until a thread takes it, it lies in a lane of its own."""
        lane = call.lane = deque((call,))

        def work() -> None:
            try:
                lane.popleft()
            except IndexError:  # withdrawn
                return
            if call.work():
                call.finish()

        try:
            self.side.submit(work, call.describe())
        except RuntimeError:
            if self.closed:
                raise SessionClosed(f"the executor of {self.name}") from None
            raise

    def kick(self, source: StepSource) -> None:
        """Give a stream a turn soon; spurious ones are harmless."""
        self.kicked.append(source)
        if self.sleeping:
            self.sleeping = False
            self._bell.ring()
        elif self.thread is None:
            self._start()

    def idle(self) -> bool:
        """Whether a call that is submitted now runs at once."""
        return (self.sleeping or self.thread is None) and not (self.interactive or self.control)

    def others_wait(self) -> bool:
        """Whether a stream should end its turn; on the device thread."""
        return bool(self.control or self.interactive or self.streams or self.kicked)

    def _start(self) -> None:
        with self._guard:
            if self.thread is None and not self.closed:
                thread = threading.Thread(target=self._main, name=f"asupervisor {self.name}", daemon=True)
                thread.start()
                self.thread = thread

    def shutdown(self) -> None:
        """Fail what waits, tell the threads to end, wait for nothing; idempotent."""
        with self._guard:
            self.closed = True
            started = self.thread is not None
        self._sweep()
        self.side.shutdown()
        if started:
            self._bell.ring()
        else:
            self._bell.close()
            self.ending.signal()
        _devices.discard(self)

    def _sweep(self) -> None:
        def error() -> SessionClosed:
            return SessionClosed(f"the executor of {self.name}")

        for lane in (self.control, self.interactive):
            fail_all(lane, error)
        for source in tuple(self.sources):
            source.abort(error())

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The loop's attached mailbox, or a new one that nobody needs to close; on the loop."""
        return self.mailboxes.get(loop) or Mailbox(loop, self.lags)

    def attach(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """Watch a descriptor on this loop until `detach`; on the loop. A loop is attached any number of times."""
        for other in [other for other in self.mailboxes if other.is_closed()]:
            self.mailboxes.pop(other).close()
        mailbox = self.mailboxes.get(loop)
        if mailbox is None:
            mailbox = self.mailboxes[loop] = Mailbox(loop, self.lags, attached=True)
        mailbox.users += 1
        return mailbox

    def detach(self, mailbox: Mailbox) -> None:
        """Undo one `attach`; on its loop, or anywhere once that is closed."""
        mailbox.users -= 1
        if mailbox.users <= 0 and self.mailboxes.get(mailbox.loop) is mailbox:
            del self.mailboxes[mailbox.loop]
            mailbox.close()

    def forget(self) -> None:
        """In the child of a fork: there is no thread, and the descriptors are the parent's, too."""
        self.closed = self.forked = True
        self.thread = None
        self.ident = None
        self.current = None
        self._guard = threading.Lock()
        self.ending = Ending()
        self.ending.signal()
        self.side.forget()
        self.mailboxes.clear()

    # ------------------------------------------------------------------------------------ on the device thread

    def _main(self) -> None:
        self.ident = threading.get_ident()
        try:
            if self._thread_init is not None:
                try:
                    self._thread_init()
                except Exception as error:
                    self.emit(
                        "device.init_failed",
                        f"the set-up of the thread of {self.name} failed: {error!r}",
                        level="error",
                        error=repr(error),
                    )
            while not self.closed:
                self._round()
        finally:
            self._sweep()  # a call that was submitted while the thread ended
            self._flush()
            self._bell.close()
            self.ident = None
            self.ending.signal()

    def _round(self) -> None:
        control, interactive, streams = self.control, self.interactive, self.streams
        for _ in range(len(control)):  # those that come meanwhile have their turn in the next round
            if not self.closed:
                self._serve(control)
        taken = 0
        while interactive and not control and not self.closed:
            if taken == INTERACTIVE_PER_STEP and (streams or self.kicked):
                break
            taken += 1
            self._serve(interactive)
        if self._unrung is not None:
            self._flush()
        while self.kicked:
            source = self.kicked.popleft()
            if not source.queued:
                source.queued = True
                streams.append(source)
        if streams:
            if not self.closed:
                self._give_turn(streams.popleft())
        elif not interactive and not control:
            self.sleeping = True
            # Whoever appends, looks at `sleeping` afterwards; we look at the lanes after we have set it. So one of
            # us sees the other one.
            if not (control or interactive or self.kicked or self.closed):
                self._bell.wait()
            self.sleeping = False

    def _serve(self, lane: deque[Call]) -> None:
        try:
            call = lane.popleft()
        except IndexError:  # withdrawn between the look and the grasp
            return
        self.current = call
        finished = call.work()
        self.current = None
        if not finished:
            return
        now = monotonic()
        self.calls += 1
        self.waits.append(call.started - call.queued)
        self.call_times.append(now - call.started)
        mailbox = call.mailbox
        mailbox.post(call)
        del call
        if self._unrung is None:
            self._unrung, self._unrung_since = mailbox, now
        elif self._unrung is not mailbox:
            self._flush()
            self._unrung, self._unrung_since = mailbox, now
        if not self.interactive or now - self._unrung_since > RESULTS_WAIT_SECS:
            self._flush()

    def _flush(self) -> None:
        mailbox, self._unrung = self._unrung, None
        if mailbox is not None:
            mailbox.ring()

    def _give_turn(self, source: StepSource) -> None:
        source.queued = False
        source.started = monotonic()
        self.current = source
        self.turns += 1
        more = source.turn()
        self.current = None
        if more:
            source.queued = True
            self.streams.append(source)


def fail_all(lane: deque[Any], error: Callable[[], BaseException], chosen: Callable[[Any], bool] | None = None) -> None:
    """Take the chosen calls out of a lane and let each waiter have an error; any thread."""
    for call in lane.copy():
        if (chosen is None or chosen(call)) and call.withdraw():
            call.fail(error())
            call.finish()


_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for device in tuple(_devices):
        device.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


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
        result: T = rendezvous.wait(call)
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
            loop_lag=Percentiles.of(device.lags),
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
        deadline = monotonic() + timeout_secs
        ended = await device.ending.wait(timeout_secs)
        if ended and device.thread is not None:
            device.thread.join()  # microseconds: its last statement was to say that it ends
        ended = await device.side.aclose(max(0.0, deadline - monotonic())) and ended
        running = asyncio.get_running_loop()
        for loop in list(device.mailboxes):
            if loop is running or loop.is_closed():
                device.mailboxes.pop(loop).close()
        return ended

    # -------------------------------------------------------------------------------------------------- helpers

    def _mailbox(self, fn: Callable[..., object]) -> Mailbox:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise no_loop_here(f"{getattr(fn, '__qualname__', fn)!s}") from None
        self._check_open()
        return self.device.mailbox(loop)

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
