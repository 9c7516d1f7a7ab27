"""Step functions and streams of a monitored session."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Self

from asupervisor.errors import StopRequested

if TYPE_CHECKING:
    from asupervisor.monitored.session import MonitoredSession

_END = object()


class StepContext:
    """What a step function gets: the session without hooks, a run with hooks, and a way to stop.

    In a coroutine function both are awaited; in a plain function, which runs on the device thread, both block.

    Source: `tf.compat.v1.train.MonitoredSession.StepContext`.

    Args:
        session: The session for runs without hooks.
        run_with_hooks: Runs with hooks.
        asynchronous: Whether the step function is a coroutine function.
    """

    def __init__(self, session: Any, run_with_hooks: Callable[..., Any], asynchronous: bool) -> None:
        self._session = session
        self._run_with_hooks = run_with_hooks
        self._asynchronous = asynchronous

    @property
    def session(self) -> Any:
        """The session for runs without hooks: an `AsyncSession`, or TensorFlow's own in a plain function."""
        return self._session

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Like `MonitoredSession.run`; an awaitable in a coroutine function."""
        return self._run_with_hooks(*args, **kwargs)

    def request_stop(self) -> None:
        """End the step and the loop around it.

        Raises:
            StopRequested: In a coroutine function.
            StopIteration: In a plain function.
        """
        if self._asynchronous:
            raise StopRequested("the step")
        raise StopIteration("step_fn has requested the iterations to stop.")


def check_step_fn(step_fn: Any) -> None:
    """Raise where a step function does not take exactly one argument named `step_context`, after `self` if any.

    Source: `run_step_fn` of `tf.compat.v1.train.MonitoredSession`.
    """
    if not callable(step_fn):
        raise TypeError(f"`step_fn` must be callable, not {step_fn!r}")
    names = tuple(inspect.signature(inspect.unwrap(step_fn)).parameters)
    if inspect.ismethod(step_fn):
        names = ("self", *names)
    if names not in (("step_context",), ("self", "step_context")):
        raise ValueError(
            "`step_fn` may either have one `step_context` argument, or `self` and `step_context` arguments if it is "
            f"an instance method. Got {names} instead."
        )


class MonitoredSteps:
    """A stream of steps with hooks; `MonitoredSession.steps`.

    After a recovery it goes on with the feeds that have not been taken yet: a feed that was taken ahead, or whose step
    failed, is not run again.
    """

    def __init__(
        self,
        session: MonitoredSession,
        fetches: Any,
        feeds: Any,
        max_steps: int | None,
        ahead: int,
        stop_when: Callable[[Any], bool] | None,
        copy_feeds: bool,
    ) -> None:
        self._session = session
        self._fetches = fetches
        self._feeds = _once(feeds)
        self._left = max_steps
        self._ahead = ahead
        self._stop_when = stop_when
        self._copy_feeds = copy_feeds
        self._stream: Any = None
        self._incarnation: Any = None
        self._steps_before = 0
        self._closed = False

    @property
    def steps_run(self) -> int:
        """Steps that have run."""
        return self._steps_before + (0 if self._stream is None else self._stream.steps_run)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._stream is None:
                await self._open()
            try:
                return await self._stream.__anext__()
            except StopAsyncIteration:
                self._closed = True
                raise
            except Exception as error:
                incarnation = self._incarnation
                self._steps_before += self._stream.steps_run
                await self._stream.aclose()
                self._stream = None
                await self._session._recover(incarnation, error)
                if self._left is not None:
                    self._left = max(0, self._left - (self._steps_before - self._counted))
                    self._counted = self._steps_before

    _counted = 0

    async def _open(self) -> None:
        self._session._chain.check_may_run()
        self._incarnation = incarnation = await self._session._current()
        chain, stop_when = self._session._chain, self._stop_when

        def stops(result: Any) -> bool:
            return chain.stop_requested or (stop_when is not None and stop_when(result))

        if incarnation.hooked is None:
            self._stream = _LockStep(self._session, incarnation, self._fetches, self._feeds, self._left, stops)
        else:
            self._stream = incarnation.hooked.steps(
                self._fetches,
                self._feeds,
                max_steps=self._left,
                ahead=self._ahead,
                stop_when=stops,
                copy_feeds=self._copy_feeds,
            )

    async def aclose(self) -> None:
        """End the stream at a step boundary."""
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class _LockStep:
    """Step by step from the event loop, for hooks that are coroutine functions."""

    def __init__(
        self,
        session: MonitoredSession,
        incarnation: Any,
        fetches: Any,
        feeds: Any,
        max_steps: int | None,
        stop_when: Callable[[Any], bool],
    ) -> None:
        self._session = session
        self._incarnation = incarnation
        self._fetches = fetches
        self._feeds = _each(feeds, incarnation.on_side)
        self._max_steps = max_steps
        self._stop_when = stop_when
        self._ended = False
        self.steps_run = 0

    async def __anext__(self) -> Any:
        enough = self._max_steps is not None and self.steps_run >= self._max_steps
        if self._ended or enough or self._session.should_stop():
            raise StopAsyncIteration
        feed = await anext(self._feeds)
        result = await self._session._run_on(self._incarnation, self._fetches, feed, None, None)
        self.steps_run += 1
        self._ended = self._stop_when(result)
        return result

    async def aclose(self) -> None:
        """Nothing is under way between two steps."""
        self._ended = True


def _once(feeds: Any) -> Any:
    """An iterable as an iterator, so that a second stream goes on where the first one ended."""
    if feeds is None or isinstance(feeds, dict) or callable(feeds):
        return feeds
    return aiter(feeds) if hasattr(feeds, "__aiter__") else iter(feeds)


async def _each(feeds: Any, on_side: Callable[..., Any]) -> AsyncIterator[Any]:
    """The feeds one by one, whatever they come as; what may block is asked on a side thread."""
    if feeds is None or isinstance(feeds, dict):
        while True:
            yield feeds
    elif hasattr(feeds, "__aiter__"):
        async for feed in feeds:
            yield feed
    elif hasattr(feeds, "__next__"):
        while (feed := await on_side(next, feeds, _END)) is not _END:
            yield feed
    elif inspect.iscoroutinefunction(feeds):
        while True:
            yield await feeds()
    else:
        while True:
            yield await on_side(feeds)
