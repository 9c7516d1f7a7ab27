"""Waits of the startup: each one can lose against a requested stop and against a deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import tensorflow as tf

from asupervisor.clock import Clock
from asupervisor.errors import SessionClosed, StopRequested, describe
from asupervisor.events import EventSink
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import KILL_GRACE_SECS

T = TypeVar("T")

#: The pauses between two looks at the same thing grow from the first to the last, in seconds.
FIRST_POLL_SECS = 0.05
LAST_POLL_SECS = 1.0

#: What has begun (the opening of a session, a look) may take so long, however little time is left, in seconds.
LOOK_SECS = 2.0

#: What was cancelled may take so long to end, in seconds. Whoever aborts a start waits a little longer.
LAST_WORDS_SECS = KILL_GRACE_SECS / 2

#: A master that has not answered for so long is an event, in seconds.
SILENT_SECS = 10.0


#: What a wait raises because it was ended, in its own words: not a failure of what was to be done.
ECHOES = (StopRequested, SessionClosed, tf.errors.CancelledError)


class Patience:
    """How the startup waits.

    Args:
        clock: Where the time comes from.
        emit: Where events go.
        coordinator: Its stop ends every wait; or None.
    """

    def __init__(self, clock: Clock, emit: EventSink, coordinator: Coordinator | None) -> None:
        self.clock = clock
        self.emit = emit
        self.coordinator = coordinator

    async def first(
        self,
        work: Awaitable[T],
        deadline: float = math.inf,
        late: Callable[[], BaseException] | None = None,
    ) -> T:
        """Await `work`, unless a requested stop or the deadline comes first; then it is cancelled.

        Args:
            work: What to wait for.
            deadline: Monotonic time, in seconds. It is never nearer than `LOOK_SECS`: without any time to wait, the
                question is still "is it ready now?".
            late: Makes the error to raise at the deadline.

        Raises:
            StopRequested: The stop came first.
            Exception: What `work` raised; also where it did so because it was cancelled. As with a plain ``await``,
                that takes the place of the reason for the cancellation.
        """
        task = _task_of(work)
        error: BaseException | None = None
        received = False
        rivals: list[asyncio.Task[Any]] = []
        if self.coordinator is not None:
            rivals.append(_task_of(self.coordinator.wait_for_stop()))
        if deadline < math.inf:
            left_secs = max(LOOK_SECS, deadline - self.clock.monotonic())
            rivals.append(_task_of(self.clock.sleep(left_secs)))
        try:
            await asyncio.wait({task, *rivals}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                received = True
                return task.result()
            for rival in rivals:
                if rival.done():
                    rival.result()  # a wait that failed has not come first
            if late is not None and deadline < math.inf and rivals[-1].done():
                raise late()
            raise StopRequested("the start of a session")
        finally:
            pending = [waiter for waiter in (task, *rivals) if not waiter.done()]
            for waiter in pending:
                waiter.cancel()
            try:
                if pending:
                    # A cancelled scope cancels again and again: what it has cancelled gets to its end all the same.
                    with anyio.move_on_after(LAST_WORDS_SECS, shield=True):
                        await asyncio.wait(pending)
                if task.done():
                    error = None if received else _failure_of(task)
                if error is not None:
                    raise error
            finally:
                if not task.done():
                    task.add_done_callback(self._tell_of_last_words)
                # An error of it has a traceback that leads here: no cycle, and nothing that keeps its frames alive.
                del task, rivals, pending, work, error

    def _tell_of_last_words(self, task: asyncio.Task[Any]) -> None:
        error = _failure_of(task)
        if error is not None:
            self.emit(
                "session.start_failed_late",
                f"what the start of a session had given up has failed since: {describe(error)}",
                level="error",
                error=describe(error),
            )

    async def pause(self, secs: float) -> None:
        """Sleep, unless a stop comes first.

        Raises:
            StopRequested: It did.
        """
        await self.first(self.clock.sleep(secs))

    async def told_if_silent(self, ask: Callable[[], Awaitable[T]], master: object) -> T:
        """Await the answer of a master, and tell now and then that there is none yet."""
        watch = asyncio.create_task(self._tell_of_silence(master))
        try:
            return await ask()
        finally:
            watch.cancel()

    async def _tell_of_silence(self, master: object) -> None:
        waited_secs = 0.0
        while True:
            await self.clock.sleep(SILENT_SECS)
            waited_secs += SILENT_SECS
            self.emit(
                "session.master_silent",
                f"master {master!r} has not opened a session for {waited_secs:g} s. Are all its tasks running? "
                "Without device_filters in the config, it waits for every one of them.",
                level="warning",
                master=str(master),
                waited_secs=waited_secs,
            )


class Polls:
    """The rhythm of a wait: how long until the next look, and when to speak of it; pure.

    Args:
        longest_secs: Longest pause that the user wants, in seconds; more than `LAST_POLL_SECS` is not used.
    """

    def __init__(self, longest_secs: float) -> None:
        self._longest_secs = max(FIRST_POLL_SECS / 5, min(LAST_POLL_SECS, longest_secs))
        self._next_secs = min(FIRST_POLL_SECS, self._longest_secs)
        self._told: str | None = None
        self._told_at = -math.inf

    def next(self) -> float:
        """How long to pause now, in seconds."""
        secs = self._next_secs
        self._next_secs = min(2 * secs, self._longest_secs)
        return secs

    def tell(self, message: str, now: float) -> bool:
        """Whether to tell why we wait: at first, when the reason changes, and now and then."""
        if message == self._told and now < self._told_at + SILENT_SECS:
            return False
        self._told, self._told_at = message, now
        return True


def _failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """What a task that is done has failed with by itself; None for an echo of its end."""
    if task.cancelled():
        return None
    error = task.exception()
    return None if isinstance(error, ECHOES) else error


def _task_of(work: Awaitable[T]) -> asyncio.Task[T]:
    # A coroutine becomes the task itself: cancelled before its first step, a wrapper would leave it unawaited.
    return asyncio.create_task(work if inspect.iscoroutine(work) else _await(work))


async def _await(work: Awaitable[T]) -> T:
    return await work
