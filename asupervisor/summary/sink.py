"""A bounded queue that one daemon thread drains: how summaries reach a disk without ever stalling a step.

Whoever adds a record only appends to a queue. The thread hands whole batches to a `Backend`, which does the
blocking work. When the disk fails, the batch is kept and tried again with growing pauses; meanwhile the queue
fills up, and what no longer fits is dropped, counted and reported. Closing tries once more and then gives up, so
it never hangs, and says what was lost.
"""

from __future__ import annotations

import asyncio
import collections
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from asupervisor.events import EventSink, log_only

R = TypeVar("R", contravariant=True)
T = TypeVar("T")

#: Where `Session.run` puts what happened, below the place that made the op and above the node.
_NODE_ERROR = re.compile(r"\n([^\n]+)\n?\s*\[\[\{\{node")

BATCH_RECORDS = 256
"""Most records that are written, and written again after a failure, in one go."""


def describe(error: BaseException) -> str:
    """An error in one line: `repr` of TensorFlow's errors is empty, and their text may hold whole stacks."""
    text = str(error)
    found = _NODE_ERROR.search(text) if text.startswith("Graph execution error") else None
    lines = (found[1] if found else text).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Backend(Protocol[R]):
    """The blocking side of a `Sink`; every method runs on the sink's thread."""

    def write(self, batch: Sequence[R]) -> int:
        """Write a batch durably, or raise: then the same batch comes again later.

        Returns:
            How many of its records had to be given up.
        """

    def close(self) -> None:
        """Release everything; called once, also after a failed write."""


@dataclass(frozen=True, slots=True)
class SinkStatistics:
    """How a sink stands.

    Attributes:
        pending_records: Accepted and not yet written.
        written_records: Written.
        dropped_records: Refused because the queue was full, or the sink was closed.
        lost_records: Accepted, and given up because they could not be written.
        last_error: The last error of the backend, in words, or None.
    """

    pending_records: int = 0
    written_records: int = 0
    dropped_records: int = 0
    lost_records: int = 0
    last_error: str | None = None


class _Waiter:
    """A coroutine that waits for the thread to get as far as the record `target`."""

    def __init__(self, target: float) -> None:
        self.target = target
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[BaseException | None] = self._loop.create_future()

    def resolve(self, error: BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, error)
        except RuntimeError:  # that loop is closed: nobody waits any more
            pass

    def _set(self, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result(error)


class Sink(Generic[T]):
    """One opening of something to write to; see the module's text.

    Args:
        name: Name of the thread, and of the sink in events.
        backend: What does the writing; used by the thread alone, and closed by it.
        emit: Where trouble is reported; any thread.
        max_records: Most records that wait.
        max_bytes: Most bytes that wait, by the sizes told to `put`.
        retry_secs: Shortest and longest pause after a failed write, in seconds.
    """

    def __init__(
        self,
        name: str,
        backend: Backend[T],
        *,
        emit: EventSink = log_only,
        max_records: int = 10_000,
        max_bytes: int = 64 << 20,
        retry_secs: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self.name = name
        self._backend = backend
        self._emit = emit
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._retry_secs = retry_secs
        # Held for a few assignments only, never while anything blocks: the event loop takes it, too.
        self._changed = threading.Condition(threading.Lock())
        self._queue: collections.deque[tuple[T, int]] = collections.deque()
        self._bytes = 0
        self._accepted = 0
        self._settled = 0
        self._overflow = 0
        self._waiters: list[_Waiter] = []
        self._closing = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._statistics = SinkStatistics()

    @property
    def closed(self) -> bool:
        """Whether records are refused."""
        return self._closing

    @property
    def thread(self) -> threading.Thread | None:
        """The writing thread, once there was something to write."""
        return self._thread

    def statistics(self) -> SinkStatistics:
        """A snapshot; any thread."""
        with self._changed:
            return replace(self._statistics, pending_records=self._accepted - self._settled)

    def put(self, record: T, size_bytes: int = 0, *, droppable: bool = True) -> bool:
        """Hand over one record; any thread, never blocks.

        Args:
            record: What the backend understands.
            size_bytes: What it counts for.
            droppable: False for the few records that must get in even when the queue is full.

        Returns:
            False if it was dropped, because the queue is full or the sink is closed.
        """
        first_drop = False
        with self._changed:
            full = len(self._queue) >= self._max_records or self._bytes + size_bytes > self._max_bytes
            if self._closing or (droppable and full and self._queue):
                self._statistics = replace(self._statistics, dropped_records=self._statistics.dropped_records + 1)
                if not self._closing:
                    first_drop = not self._overflow
                    self._overflow += 1
                accepted = False
            else:
                self._queue.append((record, size_bytes))
                self._bytes += size_bytes
                self._accepted += 1
                self._start()
                self._changed.notify()
                accepted = True
        if first_drop:
            self._emit(
                "summary.dropped",
                f"{self.name}: the queue is full, new summaries are dropped until the disk keeps up",
                level="warning",
                sink=self.name,
                dropped=1,
            )
        return accepted

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()

    async def flush(self, timeout_secs: float | None = None) -> None:
        """Wait until everything added so far is written; in an outage, try again at once.

        A cancelled flush leaves the writing alone.

        Args:
            timeout_secs: Longest wait, in seconds.

        Raises:
            TimeoutError: It took longer.
            Exception: What the backend raised: the records stay queued for another try.
        """
        with self._changed:
            if self._ended or self._settled == self._accepted:
                return
            waiter = _Waiter(self._accepted)
            self._waiters.append(waiter)
            self._changed.notify()
        async with asyncio.timeout(timeout_secs):
            error = await waiter.future
        if error is not None:
            raise error

    def close_soon(self) -> None:
        """Refuse further records and let the thread write what is queued, close and end; any thread, no wait."""
        with self._changed:
            if not self._closing:
                self._closing = True
                if self._thread is None:
                    self._ended = True
                self._changed.notify()

    async def aclose(self, timeout_secs: float) -> bool:
        """Write what is queued, close the backend and end the thread; idempotent, never raises an I/O error.

        A thread that is stuck is left behind as a daemon and reported. The same happens, without a report, when
        the caller is cancelled: the thread finishes on its own.

        Args:
            timeout_secs: Longest wait, in seconds.

        Returns:
            Whether everything that was accepted has been written.
        """
        self.close_soon()
        with self._changed:
            waiter = None if self._ended else _Waiter(float("inf"))
            if waiter is not None:
                self._waiters.append(waiter)
        if waiter is not None:
            try:
                async with asyncio.timeout(timeout_secs):
                    await waiter.future
            except TimeoutError:
                pending = self.statistics().pending_records
                self._emit(
                    "summary.close_timeout",
                    f"{self.name}: closing took longer than {timeout_secs:g} s, {pending} records are not written",
                    level="error",
                    sink=self.name,
                    pending=pending,
                    timeout_secs=timeout_secs,
                )
                return False
        if self._thread is not None:
            self._thread.join()  # it has said its last word: this takes microseconds
        return self.statistics().lost_records == 0

    # ---------------------------------------------------------------------------- the thread's side

    def _work(self) -> None:
        batch: list[tuple[T, int]] = []
        retry_at = 0.0
        pause_secs = 0.0
        while True:
            with self._changed:
                self._wait_for_work(batch, retry_at)
                while self._queue and len(batch) < BATCH_RECORDS and not retry_at:
                    batch.append(self._queue.popleft())
                closing = self._closing
                # Flushes asked for from now on want an attempt that begins after them.
                waiters = tuple(self._waiters)
            if not batch:
                break  # closing, and nothing is left
            try:
                given_up = self._backend.write([record for record, _ in batch])
            except Exception as error:
                pause_secs = min(max(2 * pause_secs, self._retry_secs[0]), self._retry_secs[1])
                self._failed(error, first=not retry_at, retry_secs=None if closing else pause_secs)
                retry_at = time.monotonic() + pause_secs
                self._resolve(waiters, error)
                if closing:
                    break
            else:
                recovered = bool(retry_at)
                retry_at = pause_secs = 0.0
                self._written(batch, given_up, recovered)
                batch = []
        self._end(batch)

    def _wait_for_work(self, batch: Sequence[object], retry_at: float) -> None:
        while not self._closing:
            if not batch:
                if self._queue:
                    return
                self._changed.wait()
                continue
            remaining_secs = retry_at - time.monotonic()
            if remaining_secs <= 0 or self._waiters:
                return
            self._changed.wait(remaining_secs)

    def _written(self, batch: Sequence[tuple[T, int]], given_up: int, recovered: bool) -> None:
        with self._changed:
            self._settled += len(batch)
            self._bytes -= sum(size for _, size in batch)
            was = self._statistics
            self._statistics = replace(
                was,
                written_records=was.written_records + len(batch) - given_up,
                lost_records=was.lost_records + given_up,
            )
            overflow = 0
            if not self._queue:
                overflow, self._overflow = self._overflow, 0
            done = [waiter for waiter in self._waiters if waiter.target <= self._settled]
        self._resolve(done, None)
        if recovered:
            self._emit("summary.write_resumed", f"{self.name}: writing works again", sink=self.name)
        if overflow:
            self._emit(
                "summary.dropped",
                f"{self.name}: {overflow} summaries were dropped while the queue was full",
                level="warning",
                sink=self.name,
                dropped=overflow,
            )

    def _resolve(self, waiters: Sequence[_Waiter], error: BaseException | None) -> None:
        with self._changed:
            # A close waits for the thread's end, whatever happens before.
            ready = [waiter for waiter in waiters if waiter in self._waiters and waiter.target != float("inf")]
            for waiter in ready:
                self._waiters.remove(waiter)
        for waiter in ready:
            waiter.resolve(error)

    def _failed(self, error: Exception, *, first: bool, retry_secs: float | None) -> None:
        with self._changed:
            self._error = error
            self._statistics = replace(self._statistics, last_error=describe(error))
        if first:  # one report per outage: the log must not grow while the disk is full
            hope = "given up" if retry_secs is None else f"the next try is in {retry_secs:g} s"
            self._emit(
                "summary.write_failed",
                f"{self.name}: cannot write, training goes on, {hope}: {error}",
                level="error",
                sink=self.name,
                error=describe(error),
                retry_secs=retry_secs,
            )

    def _end(self, batch: Sequence[tuple[T, int]]) -> None:
        try:
            self._backend.close()
        except Exception as error:
            self._failed(error, first=True, retry_secs=None)
        with self._changed:
            lost = len(batch) + len(self._queue)
            self._queue.clear()
            self._bytes = 0
            self._settled = self._accepted
            overflow, self._overflow = self._overflow, 0
            self._statistics = replace(self._statistics, lost_records=self._statistics.lost_records + lost)
            self._ended = True
            waiters, self._waiters = self._waiters, []
        if lost or overflow:
            self._emit(
                "summary.lost",
                f"{self.name}: closed with {lost} records that could not be written and {overflow} dropped",
                level="error",
                sink=self.name,
                lost=lost,
                dropped=overflow,
            )
        for waiter in waiters:  # a flush that came late learns that it was in vain
            waiter.resolve(self._error if lost else None)
