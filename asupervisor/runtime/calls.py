"""One piece of work on its way to a thread and back to whoever waits for it.

A `Call` is the work, the place in a lane, and the future of its result in one object, because a hop is paid for in
allocations and in turns of the event loop. An awaiting task is woken directly from the loop's wake-up callback: with
an ordinary future the loop would need one more turn (a poll of the selector) to get there.

Who owns what:

* a call that lies in a lane belongs to nobody. Taking it out of the lane (`popleft` by a worker, `remove` by who
  withdraws it) is atomic, and whoever succeeded owns it: there is no other state, hence no race between them.
* `done` and the waiter's callback are touched on the waiter's loop only. A worker that has finished posts the call
  into the mailbox; if `done` is set by then, the waiter was cancelled and the result is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, ClassVar, Final

from asupervisor.errors import WrongEventLoop, describe
from asupervisor.events import EventSink, Level
from asupervisor.runtime.mailbox import Mailbox, Rendezvous

HELD: Final = object()
"""What `Call.invoke` returns when the call was put aside: it has no result yet, and its time will come."""

Lane = deque[Any]


class Waiter:
    """The least that a task can await: one wait of one task, ended by `deliver` on the task's loop.

    Args:
        loop: The loop, or None for a wait of another kind.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_cancel_message",
        "_context",
        "_loop",
        "done",
        "was_cancelled",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.done = self.was_cancelled = False
        self._loop = loop
        self._callback: Callable[[Any], object] | None = None
        self._asyncio_future_blocking = False

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def result(self) -> Any:
        """The outcome; raises it if it is an error."""
        if self.was_cancelled:
            raise asyncio.CancelledError(*self._cancel_message)
        return None

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: contextvars.Context | None = None
    ) -> None:
        """How asyncio's tasks wait for it."""
        self._callback = callback
        self._context = context

    def cancel(self, msg: Any = None) -> bool:
        """How asyncio's tasks cancel their wait."""
        if self.done:
            return False
        self.done = self.was_cancelled = True
        self._cancel_message = () if msg is None else (msg,)
        loop = self._loop
        assert loop is not None
        # Not directly: we are inside of whatever cancels, possibly inside of the task itself.
        loop.call_soon(self._wake)
        return True

    def deliver(self) -> None:
        """It is over: wake the task, here and now."""
        if not self.done:
            self.done = True
            self._wake()

    def drop(self) -> None:
        """The loop is closed: nobody waits any more."""

    def _wake(self) -> None:
        callback, self._callback = self._callback, None
        if callback is None:
            return
        context = self._context
        try:
            if context is None:
                callback(self)
            else:
                context.run(callback, self)
        finally:
            # A traceback of the task refers to the frames above its own: no cycle through this one.
            del callback, context, self


class Call(Waiter):
    """Work for a worker thread, and its result.

    Args:
        mailbox: Where the result goes.
        emit: Told when the result had to be dropped because the waiter was cancelled.
    """

    __slots__ = ("emit", "lane", "mailbox", "ok", "queued", "started", "value")

    dropped_level: ClassVar[Level] = "warning"
    """How loudly it is told that nobody waits for the result any more: the work was done all the same."""

    def __init__(self, mailbox: Mailbox | Rendezvous, emit: EventSink) -> None:
        super().__init__(mailbox.loop)
        self.mailbox = mailbox
        self.emit = emit
        self.ok = False
        self.value: Any = None
        self.lane: Lane | None = None
        self.queued = self.started = monotonic()

    def invoke(self) -> Any:
        """Do the work; on the worker thread."""
        raise NotImplementedError

    def describe(self) -> str:
        """What this is, for people; any thread."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Take it out of its lane, so that it never runs; any thread. False: a worker has it already."""
        lane = self.lane
        if lane is None:
            return False
        try:
            lane.remove(self)
        except ValueError:
            return False
        return True

    # ------------------------------------------------------------------------------------ on a worker thread

    def work(self) -> bool:
        """Do the work and keep its outcome; False when it was put aside, or cancelled as it was taken."""
        if self.was_cancelled:
            return False
        self.started = monotonic()
        try:
            value = self.invoke()
        except BaseException as error:
            self.fail(error)
        else:
            if value is HELD:
                return False
            self.value = value
            self.ok = True
        return True

    def fail(self, error: BaseException) -> None:
        """Keep an error as the outcome; any thread that owns the call."""
        self.ok = False
        self.value = boxed(error, self.describe)

    def finish(self) -> None:
        """Send the outcome to who waits; any thread that owns the call."""
        mailbox = self.mailbox
        mailbox.post(self)
        mailbox.ring()

    # ----------------------------------------------------------------------------------- on the waiter's loop

    def result(self) -> Any:
        """The outcome; raises it if it is an error."""
        if self.ok and not self.was_cancelled:
            return self.value
        super().result()
        error, self.value = self.value, None  # no cycle: error, traceback, frame, call, error
        try:
            if error is None:
                raise RuntimeError(f"the result of {self.describe()} has been taken already")
            raise error
        finally:
            del error, self

    def cancel(self, msg: Any = None) -> bool:
        """Withdrawn if it has not started; in flight, its result will be dropped."""
        if not super().cancel(msg):
            return False
        self.withdraw()
        return True

    def deliver(self) -> None:
        """It came back to its loop."""
        if self.done:
            self.drop()
        else:
            self.done = True
            self._wake()

    def drop(self) -> None:
        """Nobody waits any more: say how it ended, whatever thread this is."""
        value, self.value = self.value, None
        how = "it has finished and its result is dropped" if self.ok else f"it has failed: {describe(value)}"
        self.emit(
            "run.dropped",
            f"{self.describe()} was cancelled in flight; {how}",
            level=self.dropped_level if self.ok else "warning",
            call=self.describe(),
            error=None if self.ok else describe(value),
        )
        del value


def boxed(error: BaseException, describe: Callable[[], str], *others: type[BaseException]) -> BaseException:
    """An error that may be raised in a coroutine.

    Neither StopIteration nor asyncio's CancelledError may reach one as themselves: the first would end it silently
    or hang its future, the other would pass for a cancellation of the waiter. They, and `others`, become the cause of
    a RuntimeError.
    """
    if not isinstance(error, (StopIteration, asyncio.CancelledError, *others)):
        return error
    box = RuntimeError(f"{describe()} raised {type(error).__name__}")
    box.__cause__ = error
    return box


class FunctionCall(Call):
    """A call of a function, in the context of whoever asked for it."""

    __slots__ = ("_args", "_fn", "_label", "_work_context")

    dropped_level: ClassVar[Level] = "info"  # no step; most often a service's own look, at a stop

    def __init__(
        self,
        mailbox: Mailbox | Rendezvous,
        emit: EventSink,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        label: str | None,
    ) -> None:
        super().__init__(mailbox, emit)
        self._fn: Callable[..., Any] | None = fn
        self._args = args
        self._label = label
        self._work_context = contextvars.copy_context()

    def invoke(self) -> Any:
        """See `Call.invoke`."""
        fn, args, self._fn, self._args = self._fn, self._args, None, ()
        if self._label is None:
            self._label = label_of(fn)
        assert fn is not None
        return self._work_context.run(fn, *args)

    def describe(self) -> str:
        """See `Call.describe`."""
        return self._label or label_of(self._fn)


def label_of(fn: Any) -> str:
    """What a function is, for people."""
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__name__


def no_loop_here(what: str) -> WrongEventLoop:
    """The error for a call that needs a running loop and has none."""
    return WrongEventLoop(
        f"{what} was called in thread {threading.current_thread().name!r}, where no event loop is running",
        "Await it on the event loop, or use the blocking form in other threads: sess.blocking.run(...).",
    )


def wait_blocking(call: Call, rendezvous: Rendezvous) -> Any:
    """Block this thread until the call is done, and return its outcome; an interrupt withdraws it if it can."""
    try:
        rendezvous.wait()
    except BaseException:
        call.withdraw()
        raise
    return call.result()
