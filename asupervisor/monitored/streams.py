"""Streams of a monitored session: steps with hooks that go on after a recovery.

A stream of `AsyncSession` ends with its session. Here it is made anew on the next one, and no feed is lost: each feed
is kept until its step has run, and what was taken without a step is taken first by the next stream.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import tensorflow as tf

from asupervisor.errors import SessionClosed, StopRequested

if TYPE_CHECKING:
    from asupervisor.monitored.incarnation import Incarnation
    from asupervisor.monitored.session import MonitoredSession

_END = object()


class MonitoredSteps:
    """A stream of steps with hooks; made by `MonitoredSession.steps`.

    Args:
        session: Whose steps they are.
        fetches: See `AsyncSession.steps`.
        feeds: See `AsyncSession.steps`.
        max_steps: See `AsyncSession.steps`.
        ahead: See `AsyncSession.steps`.
        stop_when: See `AsyncSession.steps`.
        copy_feeds: See `AsyncSession.steps`.

    Raises:
        TypeError: `feeds` is nothing that feeds.
        ValueError: `max_steps` or `ahead` is negative.
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
        if ahead < 0 or (max_steps is not None and max_steps < 0):
            raise ValueError(f"ahead and max_steps must not be negative: ahead={ahead}, max_steps={max_steps}")
        self._session = session
        self._fetches = fetches
        self._source = _Source(feeds, copy_feeds)
        self._max_steps = max_steps
        self._ahead = ahead
        self._stop_when = stop_when
        self._stream: Any = None
        self._incarnation: Incarnation | None = None
        self._steps_before = 0
        self._results_taken = 0
        self._ended_by: str | None = None

    @property
    def steps_run(self) -> int:
        """Steps that have run, in all sessions."""
        return self._steps_before + (0 if self._stream is None else self._stream.steps_run)

    @property
    def results_taken(self) -> int:
        """Results that the consumer has got."""
        return self._results_taken

    @property
    def ended_by(self) -> str | None:
        """Why no more steps are run, or None while there are; see `StepStream.ended_by`."""
        return self._ended_by

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The result of the next step; see `StepStream`.

        Cancelled, nothing is lost: the result is there for the next call.

        Raises:
            StopAsyncIteration: The stream has ended; `ended_by` says why.
            Exception: As for `MonitoredSession.run`.
        """
        while True:
            if self._ended_by is not None:
                raise StopAsyncIteration
            if self._stream is None and not await self._open():
                continue
            try:
                result = await self._stream.__anext__()
            except StopAsyncIteration:
                if not await self._interrupted():
                    self._ended_by = self._stream.ended_by or "stop"
            except StopRequested:
                await self._give_up("stop")
                raise
            except Exception as error:
                await self._recover(error)
            else:
                self._results_taken += 1
                return result

    async def _open(self) -> bool:
        """Make a stream on the present session; False where there is nothing to run any more."""
        session, left = self._session, self._left()
        if session.should_stop() and not session._closed:
            self._ended_by = "stop"
            return False
        if left == 0:
            self._ended_by = "max_steps"
            return False
        self._incarnation = incarnation = await session._usable()
        chain, stop_when, source = session._chain, self._stop_when, self._source

        # Refers to no stream: one that is broken out of and forgotten must end.
        def stops(result: Any) -> bool:
            source.steps_run += 1
            return chain.stop_requested or (stop_when is not None and stop_when(result))

        feeds = source.feeds()
        if incarnation.hooked is None:
            self._stream = _LockStep(session, incarnation, self._fetches, feeds, left, stops)
        else:
            self._stream = incarnation.hooked.steps(
                self._fetches, feeds, max_steps=left, ahead=self._ahead, stop_when=stops, copy_feeds=source.copies_later
            )
        return True

    def _left(self) -> int | None:
        return None if self._max_steps is None else max(0, self._max_steps - self._steps_before)

    async def _interrupted(self) -> bool:
        """Whether the stream ended with its session only; the next one goes on."""
        incarnation, session = self._incarnation, self._session
        assert incarnation is not None
        if self._stream.ended_by not in ("stop", "closed") or session.should_stop():
            return False
        error = incarnation.coordinator.error or incarnation.loss
        if error is None:
            return False
        await self._recover(SessionClosed("the session of a stream"))
        return True

    async def _recover(self, error: Exception) -> None:
        """Have the session recovered, or raise the error; then a new stream goes on."""
        incarnation, stream, fetches = self._incarnation, self._stream, self._fetches
        assert incarnation is not None
        try:
            await stream.aclose()
            self._steps_before += stream.steps_run
            self._stream = None
            self._source.rewind()
            if isinstance(error, SessionClosed) and incarnation.loss is None and incarnation.coordinator.error:
                await self._session._usable()  # which recovers
                return
            try:
                await self._session._incarnations.recover(
                    incarnation, error, harmless=lambda current: current.changes_nothing(fetches, None)
                )
            except StopRequested:
                raise
            except Exception:
                self._ended_by = "error"
                raise
        finally:
            del error, stream, self

    async def _give_up(self, why: str) -> None:
        self._ended_by = why
        await self._stream.aclose()

    async def aclose(self) -> None:
        """End the stream at a step boundary."""
        if self._stream is not None:
            await self._stream.aclose()
        self._ended_by = self._ended_by or "closed"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class _Source:
    """The user's feeds, kept until their steps have run.

    One stream after another pulls from it. A pull of an older stream may still be under way when the next one begins
    (a generator that waits): `_pulling` lets them come one after the other, and what the old one brings is kept for the
    new one. `_lock` guards the lists only and is never held for long, since the event loop takes it, too.

    Args:
        feeds: See `AsyncSession.steps`.
        copy: Whether arrays are copied when they are taken.
    """

    def __init__(self, feeds: Any, copy: bool) -> None:
        self.steps_run = 0
        """Steps that have run in all streams together; written by the stepping thread."""
        self.copies_later = copy and (feeds is None or isinstance(feeds, Mapping))
        self._feeds = feeds
        self._fixed = feeds is None or isinstance(feeds, Mapping)
        self._copy = copy
        self._pulling = threading.Lock()
        self._lock = threading.Lock()
        self._taken: deque[Any] = deque()  # by the present stream, the oldest first; some of them have been run
        self._again: deque[Any] = deque()  # taken by an earlier stream, and not run
        self._forgotten = 0  # feeds that have been run and are in neither
        self._epoch = 0
        self._ended = False
        self._aiter: AsyncIterator[Any] | None = None
        self._iter: Any = None
        if self._fixed:
            return
        if isinstance(feeds, AsyncIterable):
            self._aiter = aiter(feeds)
        elif isinstance(feeds, Iterable) and not isinstance(feeds, str | bytes):
            self._iter = iter(feeds)
        elif not callable(feeds):
            raise TypeError(
                "feeds must be None, a feed dictionary, an iterable or async iterable of them, or a callable that "
                f"returns the next one, not {type(feeds).__name__}"
            )

    def feeds(self) -> Any:
        """What a new stream takes as its feeds."""
        if self._fixed:
            return self._feeds
        epoch = self._epoch
        if self._aiter is not None or inspect.iscoroutinefunction(self._feeds):

            async def pull_async() -> Any:
                return await self._pull_async(epoch)

            return pull_async
        return lambda: self._pull(epoch)

    def rewind(self) -> None:
        """A stream has ended: what it took and did not run comes first in the next one."""
        with self._lock:
            self._epoch += 1
            self._forget()
            self._again.extendleft(reversed(self._taken))
            self._taken.clear()

    def _forget(self) -> None:
        while self._taken and self._forgotten < self.steps_run:
            self._taken.popleft()
            self._forgotten += 1

    def _kept(self, feed: Any, epoch: int) -> Any:
        """A feed that came, as the stream that asked gets it."""
        if feed is _END:
            self._ended = True
            return None
        if self._copy:
            feed = _copied(feed)
        with self._lock:
            if epoch != self._epoch:  # that stream has ended meanwhile
                self._again.append(feed)
                return None
            self._taken.append(feed)
        return feed

    def _known(self, epoch: int) -> Any:
        """A feed that need not be asked for, None at the end, or `_END` where the user must be asked."""
        with self._lock:
            if epoch != self._epoch:
                return None
            self._forget()
            if self._again:
                feed = self._again.popleft()
                self._taken.append(feed)
                return feed
        return None if self._ended else _END

    def _pull(self, epoch: int) -> Any:
        """The next feed, or None; on a side thread."""
        with self._pulling:
            feed = self._known(epoch)
            if feed is not _END:
                return feed
            if self._iter is not None:
                feed = next(self._iter, _END)
                feed = {} if feed is None else feed
            else:
                try:
                    feed = self._feeds()
                except StopIteration:
                    feed = None
                feed = _END if feed is None else feed
            return self._kept(feed, epoch)

    async def _pull_async(self, epoch: int) -> Any:
        """The next feed, or None; on the loop. A stream's own task is cancelled with it: pulls do not overlap."""
        feed = self._known(epoch)
        if feed is not _END:
            return feed
        if self._aiter is not None:
            feed = await anext(self._aiter, _END)
            feed = {} if feed is None else feed
        else:
            try:
                feed = await self._feeds()
            except StopAsyncIteration:
                feed = None
            feed = _END if feed is None else feed
        return self._kept(feed, epoch)


class _LockStep:
    """Step by step from the event loop, for hooks that are coroutine functions."""

    def __init__(
        self,
        session: MonitoredSession,
        incarnation: Incarnation,
        fetches: Any,
        feeds: Any,
        max_steps: int | None,
        stop_when: Callable[[Any], bool],
    ) -> None:
        self._session = session
        self._incarnation = incarnation
        self._fetches = fetches
        self._feeds = feeds
        self._max_steps = max_steps
        self._stop_when = stop_when
        self.steps_run = 0
        self.ended_by: str | None = None

    async def __anext__(self) -> Any:
        if self.ended_by is None:
            if self._max_steps is not None and self.steps_run >= self._max_steps:
                self.ended_by = "max_steps"
            elif self._session.should_stop() or self._incarnation.coordinator.should_stop():
                self.ended_by = "stop"
        feed = await self._feed() if self.ended_by is None else None
        if self.ended_by is not None:
            raise StopAsyncIteration
        try:
            result = await self._session._run_on(self._incarnation, self._fetches, feed, None, None)
        except tf.errors.OutOfRangeError as error:
            op = getattr(getattr(error, "op", None), "name", None)
            self._session._emit(
                "stream.end_of_input",
                f"a stream has come to the end of its input after {self.steps_run} steps, told by {op}",
                op=op,
                steps_run=self.steps_run,
            )
            self.ended_by = "out_of_range"
            raise StopAsyncIteration from None
        self.steps_run += 1
        if self._stop_when(result):
            self.ended_by = "stop_when"
        return result

    async def _feed(self) -> Any:
        feeds = self._feeds
        if feeds is None or isinstance(feeds, Mapping):
            return feeds
        feed = await (feeds() if inspect.iscoroutinefunction(feeds) else self._incarnation.on_side(feeds))
        if feed is None:
            self.ended_by = "feed"
        return feed

    async def aclose(self) -> None:
        """Nothing is under way between two steps."""
        self.ended_by = self.ended_by or "closed"


def _copied(feed: Any) -> Any:
    """A feed dictionary whose arrays nobody else writes to."""
    if not isinstance(feed, Mapping):
        return feed
    return {key: _copied_value(value) for key, value in feed.items()}


def _copied_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is list:
        return [_copied_value(part) for part in value]
    return value
