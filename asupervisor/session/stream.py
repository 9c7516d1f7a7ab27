"""The step stream: `sess.steps(...)` keeps the device thread busy while the loop takes the results.

`StepStream` is the user's half, an async iterator; `steps.Steps` is the half that the device thread holds, and tells
who writes what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from asupervisor.errors import WrongEventLoop
from asupervisor.runtime.calls import Waiter
from asupervisor.session.steps import EndedBy, Steps

YIELD_SECS: Final = 0.001
"""A consumer that never has to wait gives the loop's other work a turn this often, in seconds."""


class StepStream(AsyncIterator[Any]):
    """The results of consecutive steps, in order, one for each step that ran; made by `AsyncSession.steps`.

    It starts when the first result is asked for. Breaking out of the loop and dropping the stream ends it at a step
    boundary; so does `aclose`, which also waits for that, and leaving an ``async with`` block (after a cancellation
    without waiting). Afterwards `steps_run` says how many steps were run: up to `ahead` more than results were taken.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._started = False
        self._taken = 0
        self._resumed = 0.0

    @property
    def steps_run(self) -> int:
        """Steps that have run; final when the stream has ended."""
        return self._steps.steps_run

    @property
    def results_taken(self) -> int:
        """Results that the consumer has got."""
        return self._taken

    @property
    def feeds_taken(self) -> int:
        """Feeds that were pulled from an iterable or a callable: a few more than steps, unless `ahead` is 0."""
        return self._steps.feed.taken

    @property
    def ended_by(self) -> EndedBy | None:
        """Why no more steps are run, or None while there are."""
        return self._steps.ended_by

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The result of the next step.

        Cancelled, nothing is lost: the result is there for the next call.

        Raises:
            StopAsyncIteration: The stream has ended; `ended_by` says why.
            SessionClosed: The session was closed under it.
            BaseException: The error of a step, of the feed or of `stop_when`, as itself.
        """
        steps = self._steps
        out = steps.out
        if not out:
            await self._wait()
        elif monotonic() - self._resumed > YIELD_SECS:
            # There is always something to take: without this, nothing else would ever run on the loop.
            await asyncio.sleep(0)
            self._resumed = monotonic()
        result = out.popleft()
        self._taken += 1
        if steps.parked and len(out) <= steps.low:
            steps.parked = False
            steps.kick()
        return result

    async def _wait(self) -> None:
        steps = self._steps
        out = steps.out
        if not self._started:
            self._start()
        if steps.waiter is not None:
            raise RuntimeError("two tasks wait for the next result of one stream")
        while not out:
            if steps.finished:
                if out:  # it came between the two looks
                    break
                self._raise_end()
            waiter = steps.waiter = Waiter(steps.mailbox.loop)
            if out or steps.finished:
                steps.waiter = None
                continue
            if steps.parked:
                steps.parked = False
                steps.kick()
            try:
                await waiter
            finally:
                if steps.waiter is waiter:  # cancelled: in lock-step, a step that has not begun is not wanted
                    steps.waiter = None
        self._resumed = monotonic()

    def _start(self) -> None:
        steps = self._steps
        if asyncio.get_running_loop() is not steps.mailbox.loop:
            raise WrongEventLoop(
                f"{steps.describe()} belongs to another event loop than the one that runs here",
                "Make a stream on the loop that uses it.",
            )
        self._started = True
        steps.start()

    def _raise_end(self) -> None:
        error, self._steps.error = self._steps.error, None
        if error is None:
            raise StopAsyncIteration
        try:
            raise error
        finally:
            del error, self

    async def aclose(self) -> None:
        """End the stream at a step boundary and wait for that; idempotent.

        Results that were not taken are dropped. Cancelled, it ends all the same.
        """
        steps = self._steps
        self._started = True
        steps.close()
        ended = Waiter(steps.mailbox.loop)
        if steps.when_finished(ended):
            await ended
        await steps.feed.wait_closed()
        steps.out.clear()
        error, steps.error = steps.error, None
        if error is not None and steps.ended_by == "error":
            steps.report_dropped(error)
        del error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, asyncio.CancelledError):
            # Whoever cancels must not wait for a step, which may itself wait for input that never comes.
            self._started = True
            self._steps.close()
        else:
            await self.aclose()

    def __del__(self) -> None:
        steps = getattr(self, "_steps", None)
        if steps is not None and self._started and not steps.finished:
            steps.abandon()
