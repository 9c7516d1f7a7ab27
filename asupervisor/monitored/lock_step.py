"""A stream that goes step by step from the event loop, for hooks that are coroutine functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import tensorflow as tf

from asupervisor.errors import describe
from asupervisor.runtime.calls import boxed
from asupervisor.session.calls import describe_fetches

if TYPE_CHECKING:
    from asupervisor.monitored.incarnation import Incarnation
    from asupervisor.monitored.lifetime import Lifetime

_NO_STEP: Final = object()


class _Failed:
    """What a step brought instead of a result."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class LockStep:
    """Looks like a `StepStream`; a step begins when its result is asked for.

    Each step is a task, so that a consumer who is cancelled loses nothing: feed, hooks and run go on to their end, and
    the result is there for the next call.

    Args:
        lifetime: The monitored session whose steps they are.
        incarnation: The session of these steps.
        fetches: See `AsyncSession.steps`.
        feeds: A feed dictionary, None, or a callable or coroutine function that returns the next one.
        max_steps: See `AsyncSession.steps`.
        stop_when: See `AsyncSession.steps`.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        incarnation: Incarnation,
        fetches: Any,
        feeds: Any,
        max_steps: int | None,
        stop_when: Callable[[Any], bool],
    ) -> None:
        self._lifetime = lifetime
        self._incarnation = incarnation
        self._fetches = fetches
        self._feeds = feeds
        self._max_steps = max_steps
        self._stop_when = stop_when
        self._task: asyncio.Task[Any] | None = None
        self._closing = False
        self.steps_run = 0
        self.ended_by: str | None = None

    async def __anext__(self) -> Any:
        task = self._task
        if task is None:
            if self.ended_by is None:
                self._look_for_the_end()
            if self.ended_by is not None:
                raise StopAsyncIteration
            task = self._task = asyncio.get_running_loop().create_task(self._step(), name="asupervisor step")
            self._lifetime.stream_parts.add(self)
            task.add_done_callback(self._stepped)
        await asyncio.wait([task])
        self._task = None
        if task.cancelled():
            if self._closing:
                raise StopAsyncIteration
            raise boxed(asyncio.CancelledError(), self._describe)
        outcome = task.result()
        if outcome is _NO_STEP:
            raise StopAsyncIteration
        if outcome.__class__ is _Failed:
            try:
                raise outcome.error
            finally:
                del outcome, task, self
        return outcome

    def _look_for_the_end(self) -> None:
        if self._max_steps is not None and self.steps_run >= self._max_steps:
            self.ended_by = "max_steps"
        elif self._lifetime.should_stop() or self._incarnation.coordinator.should_stop():
            self.ended_by = "stop"

    def _stepped(self, task: asyncio.Task[Any]) -> None:
        self._lifetime.stream_parts.discard(self)

    def _describe(self) -> str:
        return f"stream of {describe_fetches(self._fetches)}"

    # ------------------------------------------------------------------ the task of one step

    async def _step(self) -> Any:
        """A result, `_NO_STEP` at the end, or `_Failed`: nobody may be left who takes an error."""
        try:
            feed = await self._feed()
            if self._closing or self.ended_by is not None:
                return _NO_STEP
            return await self._run(feed)
        except Exception as error:
            if self._closing:
                self._tell_of(error)
            return _Failed(error)

    async def _feed(self) -> Any:
        feeds = self._feeds
        if feeds is None or isinstance(feeds, Mapping):
            return feeds
        feed = await (feeds() if inspect.iscoroutinefunction(feeds) else self._incarnation.on_side(feeds))
        if feed is None and self.ended_by is None:
            self.ended_by = "feed"
        return feed

    async def _run(self, feed: Any) -> Any:
        try:
            result = await self._incarnation.run_with_hooks(self._fetches, feed)
        except tf.errors.OutOfRangeError as error:
            op = getattr(getattr(error, "op", None), "name", None)
            self._lifetime.emit(
                "stream.end_of_input",
                f"{self._describe()} has come to the end of its input after {self.steps_run} steps, told by {op}",
                op=op,
                steps_run=self.steps_run,
            )
            self.ended_by = "out_of_range"
            return _NO_STEP
        self.steps_run += 1
        if self._stop_when(result) and self.ended_by is None:
            self.ended_by = "stop_when"
        return result

    def _tell_of(self, error: Exception) -> None:
        if isinstance(error, tf.errors.CancelledError | RuntimeError) and not self._incarnation.usable:
            return  # an echo of the close
        self._lifetime.emit(
            "stream.error_dropped",
            f"{self._describe()} was closed, and its last step has failed: {describe(error)}",
            level="warning",
            error=describe(error),
            steps_run=self.steps_run,
        )

    # ------------------------------------------------------------------ the end

    def abandon(self) -> None:
        """End at the next step boundary."""
        self._closing = True
        self.ended_by = self.ended_by or "closed"

    async def aclose(self) -> None:
        """End at a step boundary and wait for that. What the step brings is dropped."""
        self.abandon()
        await self.wait_closed()

    def close(self) -> None:
        """See `StreamPart.close`: the hooks have their last calls now."""
        self.abandon()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def wait_closed(self) -> None:
        """See `StreamPart.wait_closed`."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])
