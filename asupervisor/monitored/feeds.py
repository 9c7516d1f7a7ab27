"""The feeds of a monitored stream: the user is asked for each of them once, whatever becomes of the sessions.

One `StepStream` after another takes from `KeptFeeds`, each through a `Share` of its own. What a share took and did not
use comes first in the next one, and what is under way when a session is lost stays under way: a generator that waits
is neither cancelled nor entered twice, and what it brings, a feed, an error or the end, is there for the next stream.

Who runs what:

* A plain iterable or callable is asked on the side thread of whichever stream needs the next feed. The asker of an
  earlier stream may still be at it; then the others wait for what it brings.
* An async iterable or coroutine function is asked by one task, the same one for the whole stream, so that timeouts and
  task groups inside of a generator work. Streams only tell it that they want something; to cancel one of them never
  cancels the pull. To go from one task to the other costs as much as a small step: it makes several cheap feeds at a
  time.
* `_turn` guards the lists. It is never held while the user is asked, since the event loop takes it, too.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Final, Protocol

import anyio
import numpy as np

from asupervisor.events import EventSink
from asupervisor.runtime.calls import boxed, label_of
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.supply import COPY_ON_LOOP_BYTES

STOCK: Final = 8
"""How many cheap feeds lie ready on the loop."""
STOCK_SECS: Final = 0.0005
"""No more are made in one go than take this long, in seconds: everything else on the loop waits."""

_END: Final = object()
_NOTHING: Final = object()


class StreamPart(Protocol):
    """What a stream leaves on the event loop: it ends with the monitored session at the latest."""

    def close(self) -> None:
        """End now; on the loop."""

    async def wait_closed(self) -> None:
        """Wait until it has ended."""


class Share:
    """What one stream has taken of the feeds.

    Attributes:
        open: Whether it may take more.
        run: Steps whose results have come; written by the stepping thread.
    """

    __slots__ = ("forgotten", "open", "run", "taken")

    def __init__(self) -> None:
        self.open = True
        self.run = 0
        self.taken: deque[Any] = deque()  # the oldest first
        self.forgotten = 0  # taken and used, and no longer in `taken`

    def forget(self) -> None:
        """Keep no feed whose result is sure to reach the consumer.

        A session that is closed ends its streams at once, while one step may still be under way; its result comes
        too late, and its feed has to be used again. So the last feed that was run is kept.
        """
        while self.taken and self.forgotten < self.run - 1:
            self.taken.popleft()
            self.forgotten += 1


class KeptFeeds:
    """The user's feeds, for one stream after another.

    Args:
        feeds: See `AsyncSession.steps`.
        copy: Whether arrays are copied when they are taken.
        parts: Where it is as long as it needs to be closed.

    Raises:
        TypeError: `feeds` is nothing that feeds.
    """

    def __init__(self, feeds: Any, copy: bool, parts: set[StreamPart]) -> None:
        self.fixed = feeds is None or isinstance(feeds, Mapping)
        self.closed = False
        self._feeds = feeds
        self._copy = copy and not self.fixed
        self._parts = parts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor: DeviceExecutor | None = None
        self._turn = threading.Condition(threading.Lock())
        self._again: deque[Any] = deque()  # no share has them: they have not been used, or have just come
        self._asking = False
        self._stock = 0
        self._ended = False
        self._error: BaseException | None = None
        self._ask: Callable[[], Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._came = asyncio.Event()
        iterable = isinstance(feeds, Iterable) and not isinstance(feeds, str | bytes)
        self._on_loop = isinstance(feeds, AsyncIterable) or inspect.iscoroutinefunction(feeds)
        if not (self.fixed or self._on_loop or iterable or callable(feeds)):
            raise TypeError(
                "feeds must be None, a feed dictionary, an iterable or async iterable of them, or a callable that "
                f"returns the next one, not {type(feeds).__name__}"
            )

    # ------------------------------------------------------------------ one stream and the next; on the loop

    def share(self, executor: DeviceExecutor, lock_step: bool) -> Share:
        """The share of a new stream.

        Args:
            executor: Whose side threads copy what is large.
            lock_step: Ask for a feed only when the stream wants one.
        """
        self._executor = executor
        self._stock = 0 if lock_step else STOCK
        if self._loop is None and not self.fixed:
            self._loop = asyncio.get_running_loop()
            self._parts.add(self)
        return Share()

    def of(self, share: Share) -> Any:
        """What the stream of this share takes as its feeds."""
        if self.fixed:
            return self._feeds

        def pull() -> Any:
            return self._pull(share)

        async def pull_on_loop() -> Any:
            return await self._pull_on_loop(share)

        chosen: Any = pull_on_loop if self._on_loop else pull
        chosen.__qualname__ = label_of(self._feeds)  # it names the thread
        return chosen

    def rewind(self, share: Share, used: int) -> None:
        """A stream has ended with its session: what its share has not used comes first in the next one.

        Args:
            share: The share.
            used: How many results the consumer has got. A step whose result came later does not count.
        """
        with self._turn:
            share.open = False
            while share.taken and share.forgotten < used:
                share.taken.popleft()
                share.forgotten += 1
            self._again.extendleft(reversed(share.taken))
            share.taken.clear()
            self._turn.notify_all()
        self._came.set()

    def close(self) -> None:
        """See `StreamPart.close`. A pull on a side thread ends by itself, and what it brings is dropped."""
        self.closed = True
        with self._turn:
            self._again.clear()
            self._error = None
            self._turn.notify_all()
        self._came.set()
        task = self._task
        if task is None or task.done():
            self._parts.discard(self)
        elif task is not asyncio.current_task():
            task.cancel()

    async def wait_closed(self) -> None:
        """See `StreamPart.wait_closed`."""
        task = self._task
        if task is not None and task is not asyncio.current_task():
            await asyncio.wait((task,))

    def abandon(self) -> None:
        """Nobody will ask for a step any more. The garbage collector calls it, in the middle of anything."""
        if self._loop is not None and not self.closed:
            try:
                self._loop.call_soon_threadsafe(self.close)
            except RuntimeError:  # the loop is closed, and its tasks with it
                pass

    # ------------------------------------------------------------------ what has come; under the lock

    def _next(self, share: Share) -> Any:
        """A feed, or None at the end, or `_NOTHING` where the user must be asked."""
        if self.closed or not share.open:
            return None
        share.forget()
        if self._again:
            feed = self._again.popleft()
            share.taken.append(feed)
            return feed
        if self._error is not None:
            raise self._error
        return None if self._ended else _NOTHING

    def _arrived(self, feed: Any, error: BaseException | None = None) -> None:
        with self._turn:
            self._asking = False
            if error is not None:
                self._error = None if self.closed else boxed(error, lambda: "the feed")
                self._ended = True
            elif feed is _END:
                self._ended = True
            elif not self.closed:
                self._again.append(feed)
            if self._ended:
                self._ask = self._feeds = None
            self._turn.notify_all()

    # ------------------------------------------------------------------ on a side thread

    def _pull(self, share: Share) -> Any:
        """The next feed, or None. The error of the feeds is raised to each stream that comes that far."""
        while True:
            with self._turn:
                while (feed := self._next(share)) is _NOTHING and self._asking:
                    self._turn.wait()
                if feed is not _NOTHING:
                    return feed
                self._asking = True
            try:
                feed = self._ask_user()
            except BaseException as error:
                self._arrived(None, error)
            else:
                self._arrived(feed)

    def _ask_user(self) -> Any:
        if self._ask is None:
            feeds = self._feeds
            self._ask = iter(feeds).__next__ if isinstance(feeds, Iterable) else _never_none(feeds)
        try:
            feed = self._ask()
        except StopIteration:
            return _END
        return self._copied(feed)

    def _copied(self, feed: Any) -> Any:
        feed = {} if feed is None else feed
        return _copied(feed) if self._copy and feed is not _END else feed

    # ------------------------------------------------------------------ on the loop

    async def _pull_on_loop(self, share: Share) -> Any:
        """The next feed, or None; see `_pull`. Cancelled, nothing happens: what it waited for is there later."""
        while True:
            with self._turn:
                feed = self._next(share)
                if feed is not _NOTHING:
                    return feed
                self._came.clear()
                if not self._asking:
                    self._asking = True
                    self._wanted.set()
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._ask_on_loop(), name="asupervisor feeds")
                self._task.add_done_callback(self._asked)
            await self._came.wait()

    async def _ask_on_loop(self) -> None:
        try:
            feeds = self._feeds
            ask = aiter(feeds).__anext__ if isinstance(feeds, AsyncIterable) else _never_none_async(feeds)
            del feeds
            while not self._ended:
                await self._wanted.wait()
                self._wanted.clear()
                begun = monotonic()
                while self._asking:
                    try:
                        feed = await ask()
                    except StopAsyncIteration:
                        feed = _END
                    large = _large(feed)
                    if large and self._copy and self._executor is not None:
                        feed = await self._executor.side(self._copied, feed, label="copy of a feed")
                    else:
                        feed = self._copied(feed)
                    self._arrived(feed)
                    self._came.set()
                    more = not (large or self._ended) and len(self._again) < self._stock
                    self._asking = more and monotonic() - begun < STOCK_SECS
        except asyncio.CancelledError as error:
            # If it was not `close`, somebody else did it, or the user's code raised it: no stream must wait for ever.
            self._arrived(None, error)
            raise
        except BaseException as error:  # what is no Exception is raised on the loop by whoever takes it
            self._arrived(None, error)
        finally:
            self._came.set()

    def _asked(self, task: asyncio.Task[None]) -> None:
        if not self._ended:  # cancelled before its first step
            self._arrived(None, asyncio.CancelledError())
            self._came.set()
        if self.closed:
            self._parts.discard(self)


async def end_parts(parts: set[StreamPart], grace_secs: float, emit: EventSink) -> None:
    """End what streams still have on the loop, and wait for that.

    Args:
        parts: What there is.
        grace_secs: How long to wait for user code that was cancelled, in seconds.
        emit: Told of what has not ended by then.
    """
    ending = list(parts)
    for part in ending:
        part.close()
    if not ending:
        return
    with anyio.move_on_after(grace_secs) as scope:
        for part in ending:
            await part.wait_closed()
    if scope.cancelled_caught:
        emit(
            "stop.feeds_left",
            f"feeds or steps of a stream were cancelled and have not ended after {grace_secs:g} s",
            level="warning",
            grace_secs=grace_secs,
        )


def _never_none(feeds: Callable[[], Any]) -> Callable[[], Any]:
    def ask() -> Any:
        feed = feeds()
        return _END if feed is None else feed

    return ask


def _never_none_async(feeds: Callable[[], Any]) -> Callable[[], Any]:
    async def ask() -> Any:
        feed = await feeds()
        return _END if feed is None else feed

    return ask


def _large(feed: Any) -> bool:
    if not isinstance(feed, Mapping):
        return False
    return sum(value.nbytes for value in feed.values() if isinstance(value, np.ndarray)) > COPY_ON_LOOP_BYTES


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
