"""Where the feeds of a step stream come from, and how the next one is made while a step runs.

An iterable or a callable is pulled on a side thread, an async iterable or a coroutine function by a task on the
loop. In both cases the feed is converted, checked and copied before the next one is asked for, since generators
reuse their buffers; what is ready lies in `Feed.items`, and the stream takes it there.

How many lie ready is a matter of the interpreter lock. A producer that computes in Python holds it, and would keep the
stream's thread from its next step until it sleeps: it makes one feed per step, at most `FEW` ahead. A producer of
cheap feeds costs more in wake-ups than in work: it fills `MANY` at a time and sleeps until half of them are used.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asupervisor.errors import SessionClosed, StopRequested
from asupervisor.runtime.calls import Waiter, boxed, label_of
from asupervisor.runtime.mailbox import Mailbox
from asupervisor.runtime.wakeup import Doorbell

if TYPE_CHECKING:
    from asupervisor.runtime.device import DeviceExecutor
    from asupervisor.session.plan import RunPlan

END: Final = object()
"""After the last feed."""

FEW: Final = 2
MANY: Final = 16
MANY_BYTES: Final = 1 << 20
"""No more than `FEW` lie ready if `MANY` would be larger than this."""
CHEAP_SECS: Final = 50e-6
"""A feed that takes longer to make is not cheap, in seconds."""
COPY_ON_LOOP_BYTES: Final = 1 << 16
"""Arrays up to this size are copied on the loop; it takes microseconds."""


class Failure:
    """The feed ended with an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Unconverted:
    """A feed whose arrays are already copies, to be converted on the stream's thread."""

    __slots__ = ("feed_dict",)

    def __init__(self, feed_dict: Mapping[Any, Any]) -> None:
        self.feed_dict = feed_dict


Prepare = Callable[[Any], "tuple[RunPlan, Any]"]


class Feed:
    """Feeds on their way to a stream.

    Args:
        prepare: Makes a plan and converted feeds of a feed dictionary; on a thread without a loop.
        ready: Called after something was put into `items` while the stream was hungry; any thread.
    """

    def __init__(self, prepare: Prepare, ready: Callable[[], None]) -> None:
        self.items: deque[Any] = deque()
        self.taken = 0
        self.hungry = True
        self.closed = False
        self._prepare = prepare
        self._ready = ready

    def put(self, item: Any) -> None:
        """Add what comes next; on the producer's thread."""
        if self.closed:
            return
        self.items.append(item)
        # The stream says that it is hungry and then looks once more: one of us sees the other one.
        if self.hungry:
            self._ready()

    def used(self) -> None:
        """An item was taken, or the stream is hungry: see to the next ones; on the stream's thread."""

    def start(self) -> None:
        """Begin to produce; on the loop."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing more is needed; any thread."""
        self.closed = True
        self._ready, self._prepare = _nothing, _refuse  # they lead back to the stream: no cycle is left behind

    async def wait_closed(self) -> None:
        """Wait for the producer where it is a task of ours; on the loop."""


class FixedFeed(Feed):
    """The same feed for every step, or none; converted and copied once. Its one item is never taken."""

    def __init__(self, prepare: Prepare, ready: Callable[[], None], executor: DeviceExecutor, feed_dict: Any) -> None:
        super().__init__(prepare, ready)
        self._executor = executor
        self._feed_dict = feed_dict

    def start(self) -> None:
        """See `Feed.start`."""
        _submit(self._executor, self._make, "feed")

    def _make(self) -> None:
        try:
            item: Any = self._prepare(self._feed_dict)
        except BaseException as error:
            item = Failure(error)
        self.put(item)


class SideFeed(Feed):
    """Feeds of an iterable or a callable, pulled on a side thread.

    Args:
        prepare: See `Feed`.
        ready: See `Feed`.
        executor: Whose side threads to use.
        source: The iterable, or a callable that returns the next feed and ends with None or StopIteration.
        lock_step: Pull a feed only when the stream waits for it.
    """

    def __init__(
        self,
        prepare: Prepare,
        ready: Callable[[], None],
        executor: DeviceExecutor,
        source: Iterable[Any] | Callable[[], Any],
        lock_step: bool,
    ) -> None:
        super().__init__(prepare, ready)
        self._executor = executor
        self._source: Any = source
        self._lock_step = lock_step
        self._depth, self._low = FEW, FEW - 1
        self._cost_secs = CHEAP_SECS * 2
        self._filling = True
        self._sleeping = False
        self._bell: Doorbell | None = None

    def start(self) -> None:
        """See `Feed.start`."""
        context = contextvars.copy_context()
        bell = self._bell = Doorbell()
        try:
            _submit(self._executor, lambda: context.run(self._produce, bell), f"feed {label_of(self._source)}")
        except BaseException:
            bell.close()
            raise

    def used(self) -> None:
        """See `Feed.used`."""
        if self._sleeping and self._room():
            self._wake()

    def close(self) -> None:
        """See `Feed.close`."""
        super().close()
        self._wake()

    def _wake(self) -> None:
        self._sleeping = False
        if self._bell is not None:
            self._bell.ring()

    def _room(self) -> bool:
        if self._lock_step:
            return self.hungry and not self.items
        return len(self.items) < (self._depth if self._filling else self._low + 1)

    # ------------------------------------------------------------------------------------ on the side thread

    def _produce(self, bell: Doorbell) -> None:
        try:
            pull = self._puller()
            while self._wait_for_room(bell):
                begun = monotonic()
                feed_dict = pull()
                if feed_dict is END:
                    self.put(END)
                    break
                self.taken += 1
                item = self._prepare(feed_dict)
                self._adapt(monotonic() - begun, item[1])
                self.put(item)
        except BaseException as error:
            self.put(Failure(boxed(error, lambda: "the feed")))
        finally:
            # The source may be a generator that is used here only: its clean-up code belongs on this thread.
            self._source = pull = None  # type: ignore[assignment]
            bell.close()

    def _puller(self) -> Callable[[], Any]:
        source = self._source
        if isinstance(source, Iterable):
            iterator = iter(source)
            return lambda: next(iterator, END)

        def call() -> Any:
            try:
                feed_dict = source()
            except StopIteration:
                return END
            return END if feed_dict is None else feed_dict

        return call

    def _wait_for_room(self, bell: Doorbell) -> bool:
        while not self.closed:
            if self._room():
                self._filling = True
                return True
            self._filling = False
            self._sleeping = True
            if not self.closed and not self._room():
                bell.wait()
            self._sleeping = False
        return False

    def _adapt(self, secs: float, args: Any) -> None:
        self._cost_secs += (secs - self._cost_secs) * 0.1
        many = self._cost_secs < CHEAP_SECS and _bytes(args) * MANY <= MANY_BYTES
        self._depth = MANY if many else FEW
        self._low = MANY // 2 if many else FEW - 1


class LoopFeed(Feed):
    """Feeds of an async iterable or a coroutine function, pulled by a task on the loop.

    Args:
        prepare: See `Feed`.
        ready: See `Feed`.
        executor: Whose side threads convert what is large.
        mailbox: How the stream's thread wakes the task.
        source: The async iterable, or a coroutine function that returns the next feed and ends with None
            or StopAsyncIteration.
        lock_step: Pull a feed only when the stream waits for it.
        copy: Whether what it yields must be copied before the next one is pulled.
    """

    def __init__(
        self,
        prepare: Prepare,
        ready: Callable[[], None],
        executor: DeviceExecutor,
        mailbox: Mailbox,
        source: AsyncIterable[Any] | Callable[[], Any],
        lock_step: bool,
        copy: bool,
    ) -> None:
        super().__init__(prepare, ready)
        self._executor = executor
        self._mailbox = mailbox
        self._source = source
        self._depth = 1 if lock_step else MANY // 2
        self._lock_step = lock_step
        self._copy = copy
        self._task: asyncio.Task[None] | None = None
        self._waiter: Waiter | None = None

    def start(self) -> None:
        """See `Feed.start`."""
        self._task = asyncio.get_running_loop().create_task(self._produce(), name="asupervisor feed")

    def used(self) -> None:
        """See `Feed.used`."""
        if self._waiter is not None and self._room(self._depth // 2):
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                self._mailbox.post(waiter)
                self._mailbox.ring()

    def close(self) -> None:
        """See `Feed.close`."""
        super().close()
        task = self._task
        if task is not None and not task.done():
            try:
                task.get_loop().call_soon_threadsafe(task.cancel)
            except RuntimeError:  # the loop is closed, and its tasks with it
                pass

    async def wait_closed(self) -> None:
        """See `Feed.wait_closed`."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait((self._task,))

    def _room(self, depth: int) -> bool:
        if self._lock_step:
            return self.hungry and not self.items
        return len(self.items) <= depth

    async def _produce(self) -> None:
        try:
            pull = self._puller()
            first = True
            while True:
                while not self._room(self._depth - 1):
                    await self._wait_for_room()
                feed_dict = await pull()
                if feed_dict is END:
                    self.put(END)
                    return
                self.taken += 1
                self.put(await self._prepared(feed_dict, first))
                first = False
        except asyncio.CancelledError as error:
            if not self.closed:  # somebody else cancelled it: the stream must not wait for ever
                self.put(Failure(boxed(error, lambda: "the feed")))
            raise
        except BaseException as error:
            self.put(Failure(boxed(error, lambda: "the feed")))
            if not isinstance(error, Exception):
                raise

    def _puller(self) -> Callable[[], Any]:
        source = self._source
        if isinstance(source, AsyncIterable):
            iterator: AsyncIterator[Any] = aiter(source)

            async def pull() -> Any:
                return await anext(iterator, END)
        else:

            async def pull() -> Any:
                try:
                    feed_dict = await source()
                except StopAsyncIteration:
                    return END
                return END if feed_dict is None else feed_dict

        return pull

    async def _wait_for_room(self) -> None:
        waiter = self._waiter = Waiter(self._mailbox.loop)
        if self._room(self._depth // 2):
            self._waiter = None
            return
        await waiter

    async def _prepared(self, feed_dict: Any, first: bool) -> Any:
        """Converted on a side thread, unless that would cost more than it is worth."""
        if not first and isinstance(feed_dict, Mapping) and _small_arrays(feed_dict):
            if self._copy:
                feed_dict = {key: np.array(value) for key, value in feed_dict.items()}
            return Unconverted(feed_dict)
        return await self._executor.side(self._prepare, feed_dict, label="conversion of a feed")


def make_feed(
    source: Any,
    prepare: Prepare,
    ready: Callable[[], None],
    executor: DeviceExecutor,
    mailbox: Mailbox,
    *,
    lock_step: bool,
    copy: bool,
) -> Feed:
    """The right kind of feed for what the user gave.

    Raises:
        TypeError: It is none of them.
    """
    if source is None or isinstance(source, Mapping):
        return FixedFeed(prepare, ready, executor, source)
    if isinstance(source, AsyncIterable) or inspect.iscoroutinefunction(source):
        return LoopFeed(prepare, ready, executor, mailbox, source, lock_step, copy)
    if (isinstance(source, Iterable) and not isinstance(source, str | bytes)) or callable(source):
        return SideFeed(prepare, ready, executor, source, lock_step)
    raise TypeError(
        "feeds must be None, a feed dictionary, an iterable or async iterable of them, or a callable that returns "
        f"the next one, not {type(source).__name__}"
    )


def _submit(executor: DeviceExecutor, work: Callable[[], None], label: str) -> None:
    try:
        executor.device.side.submit(work, label)
    except RuntimeError:
        if executor.closed:
            raise SessionClosed(f"the executor of {executor.name}") from None
        raise


def _nothing() -> None:
    pass


def _refuse(feed_dict: Any) -> tuple[RunPlan, Any]:
    raise StopRequested("the feed")


def _bytes(args: Any) -> int:
    values = getattr(args, "feed_dict", args)  # what only `Session.run` can take is still a dictionary
    return sum(getattr(value, "nbytes", 64) for value in (values.values() if isinstance(values, Mapping) else values))


def _small_arrays(feed_dict: Mapping[Any, Any]) -> bool:
    total = 0
    for value in feed_dict.values():
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return False
        total += value.nbytes
    return total <= COPY_ON_LOOP_BYTES
