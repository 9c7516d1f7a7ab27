"""Streams of a monitored session: steps with hooks that go on after a recovery.

A stream of `AsyncSession` ends with its session. Here it is made anew on the next one, and no feed is lost: each feed
is kept until the result of its step has come, and what was taken without one is taken first by the next stream
(`KeptFeeds`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from asupervisor.errors import SessionClosed, StopRequested
from asupervisor.monitored.feeds import KeptFeeds, Share
from asupervisor.monitored.lock_step import LockStep

if TYPE_CHECKING:
    from asupervisor.monitored.incarnation import Incarnation
    from asupervisor.monitored.session import MonitoredSession


class _Failure:
    """A stream that has ended with its session, or by an error of which nobody knows yet whether it is one."""

    def __init__(self, stream: Any, incarnation: Incarnation, error: Exception) -> None:
        self.stream = stream
        self.incarnation = incarnation
        self.error = error
        # Its session's own stop ended it: there is no step of which nobody knows what became of it.
        told = incarnation.loss is None and incarnation.coordinator.error is not None
        self.between_steps = told and isinstance(error, SessionClosed)


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
        self._lifetime = session._lifetime
        self._fetches = fetches
        self._feeds = KeptFeeds(feeds, copy_feeds, self._lifetime.stream_parts)
        self._max_steps = max_steps
        self._ahead = ahead
        self._stop_when = stop_when
        self._copy_feeds = copy_feeds
        self._stream: Any = None
        self._share: Share | None = None
        self._incarnation: Incarnation | None = None
        self._failure: _Failure | None = None
        self._results_of_stream = 0
        self._results_before = 0
        self._waiting = False
        self._ended_by: str | None = None

    @property
    def steps_run(self) -> int:
        """Steps that have run, in all sessions, but for those whose results were lost with their session."""
        return self._results_before + (0 if self._stream is None else self._stream.steps_run)

    @property
    def results_taken(self) -> int:
        """Results that the consumer has got."""
        return self._results_before + self._results_of_stream

    @property
    def ended_by(self) -> str | None:
        """Why no more steps are run, or None while there are; see `StepStream.ended_by`."""
        return self._ended_by

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The result of the next step; see `StepStream`.

        Cancelled, nothing is lost: the result is there for the next call, and so is the outcome of a recovery.

        Raises:
            StopAsyncIteration: The stream has ended; `ended_by` says why.
            RuntimeError: Another task waits for the next result.
            Exception: As for `MonitoredSession.run`.
        """
        if self._waiting:
            raise RuntimeError("two tasks wait for the next result of one stream")
        self._waiting = True
        try:
            while True:
                if self._ended_by is not None:
                    raise StopAsyncIteration
                if self._failure is not None:
                    await self._recover()
                if self._stream is None and not await self._open():
                    continue
                try:
                    result = await self._stream.__anext__()
                except StopAsyncIteration:
                    self._ended()
                except StopRequested:
                    await self._end("stop")
                    raise
                except Exception as error:
                    self._failed(error)
                else:
                    self._results_of_stream += 1
                    return result
        finally:
            self._waiting = False
            del self  # what leaves has a traceback that leads here

    async def _open(self) -> bool:
        """Make a stream on the present session; False where there is nothing to run any more."""
        lifetime, left = self._lifetime, self._left()
        if lifetime.should_stop() and not lifetime.closed:
            await self._end("stop")
            return False
        if left == 0:
            await self._end("max_steps")
            return False
        self._incarnation = incarnation = await lifetime.usable()
        chain, stop_when, kept = lifetime.chain, self._stop_when, self._feeds
        lock_step = incarnation.hooked is None or self._ahead == 0
        self._share = share = kept.share(incarnation.plain.executor, lock_step)

        # Refers to no stream: one that is broken out of and forgotten must end.
        def stops(result: Any) -> bool:
            share.run += 1
            return chain.stop_requested or (stop_when is not None and share.open and stop_when(result))

        feeds, self._results_of_stream = kept.of(share), 0
        if incarnation.hooked is None:
            self._stream = LockStep(lifetime, incarnation, self._fetches, feeds, left, stops)
        else:
            self._stream = incarnation.hooked.steps(
                self._fetches,
                feeds,
                max_steps=left,
                ahead=self._ahead,
                stop_when=stops,
                copy_feeds=self._copy_feeds and kept.fixed,  # others have been copied when they were taken
            )
        return True

    def _left(self) -> int | None:
        return None if self._max_steps is None else max(0, self._max_steps - self._results_before)

    # ------------------------------------------------------------------ from one session to the next

    def _ended(self) -> None:
        """The stream has ended: for good, or with its session only."""
        incarnation, why = self._incarnation, self._stream.ended_by
        assert incarnation is not None
        lost = incarnation.coordinator.error is not None or incarnation.loss is not None
        if self._feeds.closed:  # by the end of the session
            why = "stop"
        elif why in ("stop", "closed") and lost and not self._lifetime.should_stop():
            self._failed(SessionClosed("the session of a stream"))
            return
        self._ended_by = why or "stop"
        self._feeds.close()

    def _failed(self, error: Exception) -> None:
        """All results that will ever come have come: take back what the stream has not used, then see.

        Without a wait in between, so that whoever is cancelled while it waits for the recovery finds things in order.
        """
        assert self._incarnation is not None
        assert self._share is not None
        self._failure = _Failure(self._stream, self._incarnation, error)
        self._feeds.rewind(self._share, self._results_of_stream)
        self._results_before += self._results_of_stream
        self._results_of_stream = 0
        self._stream = self._share = None

    async def _recover(self) -> None:
        """Have the session recovered, or raise the error; then a new stream goes on."""
        failure, fetches = self._failure, self._fetches
        assert failure is not None
        incarnation, error = failure.incarnation, failure.error
        try:
            await failure.stream.aclose()
            if failure.between_steps:
                await self._lifetime.usable()  # which recovers
            else:
                await self._lifetime.incarnations.recover(
                    incarnation, error, harmless=lambda current: current.changes_nothing(fetches, None)
                )
            self._failure = None
        except StopRequested:
            self._failure = None
            raise
        except Exception:
            self._failure, self._ended_by = None, "error"
            self._feeds.close()
            raise
        finally:
            del error, failure, self

    # ------------------------------------------------------------------ the end

    async def _end(self, why: str) -> None:
        self._ended_by = self._ended_by or why
        self._feeds.close()
        stream = self._stream if self._failure is None else self._failure.stream
        if stream is not None:
            await stream.aclose()
        await self._feeds.wait_closed()

    async def aclose(self) -> None:
        """End the stream at a step boundary and wait for that; idempotent. Cancelled, it ends all the same."""
        await self._end("closed")

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
            self._ended_by = self._ended_by or "closed"
            self._feeds.close()
            if isinstance(self._stream, LockStep):
                self._stream.abandon()
            elif self._stream is not None:
                await self._stream.__aexit__(exc_type, exc, traceback)
        else:
            await self.aclose()

    def __del__(self) -> None:
        feeds = getattr(self, "_feeds", None)
        if feeds is not None:
            feeds.abandon()
        if isinstance(getattr(self, "_stream", None), LockStep):
            self._stream.abandon()
