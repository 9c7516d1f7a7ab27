"""The stop state that tasks and threads share.

A `Coordinator` is passive: it is told that something asks for a stop, remembers the first error, wakes those who
wait, and joins whoever registered. The task group that ends when it says so is the host's (`host.py`).

The delicate part is `request_stop`: it is called from any thread, from signal handlers, and from inside code that
holds arbitrary locks. It therefore takes no lock, does not log and touches no asyncio object but
`loop.call_soon_threadsafe`; it appends a report to a deque, sets a flag and rings. `drain`, an ordinary callback
on the loop thread, does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, cast

import anyio

from asupervisor.errors import StopGraceExceeded, WrongEventLoop, describe, is_only
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.joining import Worker, outlast
from asupervisor.runtime.reports import ExcInfo, Report, Reports, StopOnException, exception_of, tell

__all__ = ["Coordinator", "StopOnException"]


class Coordinator:
    """Coordinates the end of a set of tasks and threads.

    Used passively, as TensorFlow's; or as a task group of its own::

        async with Coordinator() as coord:
            coord.start_soon(worker, coord)

    in which case the block ends when the tasks have ended or a stop was requested, and the first error leaves it
    bare, as the same object.

    Differences from the original, all of them mends: an error that is reported after a clean stop is kept and
    raised, not dropped; `request_stop` takes a fresh exception that was never raised; `stop_on_exception` lets
    `KeyboardInterrupt`, `SystemExit` and cancellation pass; `join` does not poll, and cancels tasks that outlive
    their grace.

    Source: `tf.compat.v1.train.Coordinator`.

    Args:
        clean_stop_exception_types: Exceptions that mean a clean end; a report of one, or of an exception group of
            nothing else, is a stop without an error. None stands for TensorFlow's `OutOfRangeError`, an empty list for
            nothing at all.
        consequence_types: Exceptions that are but an echo of the stop itself (a queue that the stop closed).
            They are dropped when they are reported after a stop; before one they are errors like any other.
        emit: Where second and later errors are told.
    """

    def __init__(
        self,
        clean_stop_exception_types: Iterable[type[BaseException]] | None = None,
        *,
        consequence_types: Iterable[type[BaseException]] = (),
        emit: EventSink = log_only,
    ) -> None:
        self.consequence_types = tuple(consequence_types)
        self.emit = emit
        self._stop = False
        self._joined = False
        self._rung = False  # a drain is on its way
        self.stops_asked = 0
        """How often a clean stop was asked for, by `request_stop`, also while everything stopped anyway."""
        self._reports = Reports(clean_stop_exception_types, self.consequence_types)
        self._drain_lock = threading.RLock()  # never taken by request_stop; a sink may look at us while we drain
        self._stop_seen_at: float | None = None
        self._registered: list[Worker] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._group: Any = None

    # ------------------------------------------------------------------ the stop flag

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Ask for a stop; with an error, report it.

        The first error that is reported is the one that `join` raises. Safe in any thread and in a signal handler:
        takes no lock, does not log. May be called any number of times.

        Args:
            ex: The reason, if it is an error: any exception instance, or an `exc_info` tuple.

        Raises:
            TypeError: `ex` is neither.
            BaseException: `ex` itself, where the coordinator was already joined, since nobody else would see it.
        """
        self.stops_asked += ex is None or is_only(exception_of(ex), self.clean_stop_exception_types)
        self.report(ex, "request_stop")

    def report(self, ex: BaseException | ExcInfo | None, where: str) -> None:
        """`request_stop`, naming who reports; for this library itself, whose stops nobody has asked for."""
        if ex is None:
            self._set_stop()
            return
        report = Report(exception_of(ex), where, self._stop)
        if not self._joined:
            self._reports.put(report)
            self._set_stop()
            if not self.joined:
                return
            # A join ended between the look and the append. Whoever takes the report out of the inbox has it: the
            # join's last drain, or we.
            if not self._reports.take_back(report):
                return
        self._stop = True
        if not is_only(report.error, self.clean_stop_exception_types):
            raise report.error

    def record(self, error: BaseException, where: str, *, always: bool = False) -> None:
        """`report` for whoever runs what is joined: never raises it, whether or not somebody has joined in between.

        Args:
            error: What went wrong.
            where: Who tells.
            always: Whether it is an error whatever its class. A last save that fails is no clean end, and no echo of
                the stop.
        """
        self._reports.put(Report(exception_of(error), where, self._stop, always))
        self._set_stop()

    def _set_stop(self) -> None:
        self._stop = True
        loop = self._loop
        if loop is not None and not self._rung:
            # One ring for any number of requests: a storm of them must not fill the loop's queue. The drain takes the
            # flag down before it looks into the inbox.
            self._rung = True
            try:
                loop.call_soon_threadsafe(self.drain)
            except RuntimeError:  # the loop is closed: whoever looks next drains
                self._rung = False

    def should_stop(self) -> bool:
        """Whether a stop was requested; any thread."""
        return self._stop

    def clear_stop(self) -> None:
        """Forget the stop, the errors and the join: the coordinator can be used again."""
        with self._drain_lock:
            self._reports.clear()
            self._stop_seen_at = None
            self._stop = self._joined = False

    def mark_joined(self) -> None:
        """From now on a reported error is raised in the caller: nobody will join any more."""
        self._joined = True

    @property
    def joined(self) -> bool:
        """Whether `join` has ended since the last `clear_stop`."""
        return self._joined

    @property
    def clean_stop_exception_types(self) -> tuple[type[BaseException], ...]:
        """The exceptions that mean a clean end."""
        return self._reports.clean_types

    # ------------------------------------------------------------------ reports

    def drain(self) -> None:
        """Sort the reports that came in and wake the waiters; on the loop thread, or from `join` and its kin."""
        loop = self._loop
        here = loop is not None and not loop.is_closed() and _running_loop() is loop
        if here:
            self._rung = False
        with self._drain_lock:
            news = self._reports.sort()
            if self._stop and self._stop_seen_at is None:
                self._stop_seen_at = time.monotonic()
        # Not under the lock: a log handler holds locks of its own, and may look at us on any thread.
        for kind, report in news:
            tell(kind, report, self.emit)
        if not (self._stop and here):
            return
        for waiter in tuple(self._waiters):
            if not waiter.done():
                waiter.set_result(None)
        while self._callbacks:
            # One by one: an interrupt (Ctrl-C raises in whatever runs) must not lose those that were not called yet.
            callback = self._callbacks.pop(0)
            try:
                callback()
            except Exception as error:
                self.emit("stop.callback_failed", f"a stop callback failed: {describe(error)}", level="error")

    @property
    def error(self) -> BaseException | None:
        """The first error that was reported, if any; it is what `join` raises."""
        self.drain()
        report = self._reports.primary
        return None if report is None else report.error

    def pass_error_on(self, other: Coordinator, where: str) -> None:
        """Record the first error, if there is one, with another coordinator, as what it is."""
        self.drain()
        report = self._reports.primary
        if report is not None:
            other.record(report.error, where, always=report.always)

    @property
    def clean_reason(self) -> BaseException | None:
        """The exception that was reported as a clean end, if any."""
        self.drain()
        report = self._reports.clean
        return None if report is None else report.error

    @property
    def stop_requested_at(self) -> float | None:
        """Monotonic time at which the stop was noticed, in seconds, or None."""
        self.drain()
        return self._stop_seen_at

    def raise_requested_exception(self) -> None:
        """Raise the first error that was reported, if any; the same object, with the traceback it had then.

        Later errors are attached to it as notes.
        """
        self.annotate()
        report = self._reports.primary
        if report is None:
            return
        error = report.error
        try:
            raise error.with_traceback(report.traceback)
        finally:
            # Raising it here, maybe while another exception is handled, must not rewrite its history.
            with contextlib.suppress(Exception):
                error.__context__ = report.context
            del self, report, error

    def annotate(self) -> None:
        """Attach the later errors to the first one, as notes."""
        self.drain()
        self._reports.annotate()

    def forget_errors(self) -> None:
        """Drop what was reported, so that the tracebacks keep nothing alive; the stop itself stays."""
        with self._drain_lock:
            self._reports.forget()

    def stop_on_exception(self) -> StopOnException:
        """A context manager, sync and async, that reports an exception of its block and swallows it.

        `KeyboardInterrupt` and `SystemExit` request a stop and pass; cancellation and `GeneratorExit` just pass.
        """
        return StopOnException(self)

    # ------------------------------------------------------------------ waiting

    def bind(self) -> asyncio.AbstractEventLoop:
        """Tie the coordinator to the running loop; the waits do so by themselves.

        Raises:
            WrongEventLoop: It is tied to another loop that is still open and somebody waits there; or no asyncio loop
                runs here.
        """
        loop = _running_loop()
        if loop is None:
            raise WrongEventLoop(
                "a Coordinator was awaited where no asyncio event loop runs",
                "asyncio only: trio and curio are not supported.",
            )
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and (self._waiters or self._callbacks):
                raise WrongEventLoop(
                    "this Coordinator is in use on another event loop",
                    "Use one Coordinator per loop, or stop it there first.",
                )
            self._loop = loop
            self._rung = False
            self._waiters = set()
            self._callbacks = []
        return loop

    def unbind(self) -> None:
        """Forget the loop; later stop requests only set the flag."""
        if self._stop:
            self.drain()  # nobody who waits is left behind
        self._loop = None
        self._waiters = set()
        self._callbacks = []

    def add_stop_callback(self, fn: Callable[[], None]) -> None:
        """Have `fn()` called once on the loop thread when a stop is requested, or soon if it already is."""
        loop = self.bind()
        self._callbacks.append(fn)
        if self._stop:
            loop.call_soon(self.drain)

    def remove_stop_callback(self, fn: Callable[[], None]) -> None:
        """Undo `add_stop_callback`; unknown callbacks are ignored."""
        if fn in self._callbacks:
            self._callbacks.remove(fn)

    async def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested; cancellable.

        Args:
            timeout: Longest time to wait, in seconds; None waits without limit.

        Returns:
            Whether a stop was requested; False after a time-out.
        """
        waiter = self.stop_waiter()
        try:
            if waiter.done() or (timeout is not None and timeout <= 0):
                await anyio.lowlevel.checkpoint()
            else:
                with anyio.move_on_after(timeout):
                    await waiter
        finally:
            self.discard_waiter(waiter)
        return self._stop

    def stop_waiter(self) -> asyncio.Future[None]:
        """A future of the running loop that is done once a stop is requested; for `discard_waiter` in the end."""
        waiter = self.bind().create_future()
        self._waiters.add(waiter)
        # Registered before the flag is read: a request in between has rung for `drain`, which sees the waiter.
        if self._stop:
            waiter.set_result(None)
        return waiter

    def discard_waiter(self, waiter: asyncio.Future[None]) -> None:
        """Forget a future of `stop_waiter`."""
        self._waiters.discard(waiter)

    # ------------------------------------------------------------------ joining

    def register_thread(self, thread: Worker) -> None:
        """Have `join` wait for a thread or a task as well."""
        self._registered.append(thread)

    @property
    def registered(self) -> tuple[Worker, ...]:
        """The threads and tasks that registered since the last `join`."""
        return tuple(self._registered)

    def forget_registered(self) -> None:
        """Forget them; for whoever has joined them."""
        self._registered = []

    async def join(
        self,
        threads: Iterable[Worker] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until the given and the registered threads and tasks have ended; then raise the first error.

        Does not ask for a stop. Once one is requested, everybody has `stop_grace_period_secs` to end; then tasks
        are cancelled, and what did not end by itself is named. Threads cannot be cancelled and are left. Cancelling
        `join` leaves all of them as they are.

        Args:
            threads: Threads, tasks and services; None for those that registered.
            stop_grace_period_secs: Grace after the stop, in seconds.
            ignore_live_threads: Report stragglers instead of raising.

        Raises:
            BaseException: The first error that was reported.
            StopGraceExceeded: Without an error, when something outlived the grace. It is a RuntimeError.
        """
        workers = list(dict.fromkeys([*self._registered, *(threads or ())]))
        stopped = self.stop_waiter()
        try:
            late = await outlast(workers, stopped, max(0.0, stop_grace_period_secs))
        finally:
            self.discard_waiter(stopped)
        self._registered = []
        self._joined = True
        try:
            self.raise_requested_exception()
            if late and not ignore_live_threads:
                raise StopGraceExceeded(late, stop_grace_period_secs)
            if late:
                self.emit(
                    "stop.left_running",
                    f"still running after {stop_grace_period_secs:g} s of grace: {' '.join(late)}",
                    services=late,
                )
        finally:
            # The traceback of what is raised leads here, and the coordinator keeps the error: no cycle.
            del self

    # ------------------------------------------------------------------ as a task group

    def start_soon(self, async_fn: Callable[..., Any], *args: Any, name: str | None = None) -> Any:
        """Start a task in the coordinator's own task group; inside `async with Coordinator()` only.

        Returns:
            The service record of the task.

        Raises:
            RuntimeError: Outside the block.
        """
        if self._group is None:
            raise RuntimeError("start_soon() works inside `async with Coordinator() as coord:` only")
        return self._group.start_soon(async_fn, *args, name=name)

    async def __aenter__(self) -> Self:
        from asupervisor.runtime.block import CoordinatorBlock

        self._group = CoordinatorBlock(self)
        try:
            await self._group.__aenter__()  # which sees by its awaiter's name that it must ask further up
        except BaseException:
            self._group = None
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        group, self._group = self._group, None
        return cast(bool, await group.exit(exc))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
