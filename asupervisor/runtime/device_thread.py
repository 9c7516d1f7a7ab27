"""The device thread: the one lock around step, save and summary.

`Device` is what the thread itself holds: an inbox of three lanes and its main loop. In a round, the thread takes what
is in the control lane (stop, snapshot), then a bounded number of interactive calls, then one turn of one stream; a
stream ends its turn at the next step boundary when anybody else waits. So neither starves: an interactive call waits
for one step at most, a stream for `INTERACTIVE_PER_STEP` calls.

Which thread does what: lanes are appended to by any thread and emptied by the device thread or by who withdraws a call
(see `calls`). `sleeping` is written by the device thread and taken down by who rings. Everything else that is not
under `_guard` belongs to the device thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol

from asupervisor.errors import SessionClosed, describe
from asupervisor.events import EventSink
from asupervisor.runtime.calls import Call
from asupervisor.runtime.mailbox import Mailbox, Rendezvous, forget_all
from asupervisor.runtime.statistics import window
from asupervisor.runtime.threads import SideThreads
from asupervisor.runtime.wakeup import Doorbell, Ending

INTERACTIVE_PER_STEP: Final = 4
"""Most interactive calls between two stream steps."""

RESULTS_WAIT_SECS: Final = 0.0005
"""While more calls wait, a finished one may wait this long for company on its way to the loop, in seconds."""


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
        self.call_times, self.waits = window(), window()
        self.side = SideThreads(f"asupervisor side {name}")
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
                        f"the set-up of the thread of {self.name} failed: {describe(error)}",
                        level="error",
                        error=describe(error),
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
            del source  # this frame may sleep for long: it must not keep anybody alive
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
        try:
            more = source.turn()
        except BaseException as error:  # never the stream's own errors: the thread must outlive a fault of ours
            more = False
            source.abort(error)
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
    forget_all()
    for device in tuple(_devices):
        device.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
