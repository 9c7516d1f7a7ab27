"""A supervised call at fixed times: what `Supervisor.loop` starts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import anyio

from asupervisor.clock import Clock, SystemClock, next_boundary
from asupervisor.errors import describe
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.joining import keep
from asupervisor.runtime.racing import first_of
from asupervisor.runtime.threads import SideThreads

RunSync = Callable[..., Awaitable[Any]]


class LooperTask:
    """Calls a function at once and then every `timer_interval_secs`, until a stop is requested.

    The times are fixed boundaries from the first call on; a call that takes longer than the interval makes the
    boundaries in between be skipped, never a burst. The stop ends the wait between two calls at once. A coroutine
    function runs on the event loop, a plain function on a worker thread of its own; an awaitable that a plain
    function returns is awaited. An exception ends the looper, `stop_loop` is not called then, and the coordinator
    gets it. Nothing is called at all if the stop was already requested.

    Subclasses override `start_loop`, `run_loop` and `stop_loop`, which may be coroutine functions or plain ones.

    `Supervisor.loop` makes one that the session supervises. Without a supervisor, `LooperTask.loop` starts one of
    its own, for `Coordinator.join`. Cancelling it interrupts an async target; a plain one cannot be interrupted: its
    thread is waited for, unless the task is cancelled a second time.

    Source: `tf.compat.v1.train.LooperThread`.

    Args:
        coord: The coordinator whose stop ends the looper.
        timer_interval_secs: Seconds between the starts of two calls; None or 0 calls back to back.
        target: What to call; None for a subclass that overrides `run_loop`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        name: Name of the task; defaults to the target's.
        clock: Where the time comes from.
        run_sync: Awaitable runner of plain functions on a thread.

    Raises:
        ValueError: `coord` is no Coordinator, or arguments without a target.
        TypeError: `target` cannot be called with these arguments.
    """

    def __init__(
        self,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        clock: Clock | None = None,
        run_sync: RunSync | None = None,
    ) -> None:
        if not isinstance(coord, Coordinator):
            raise ValueError(f"'coord' must be a Coordinator, not {coord!r}")
        if target is None and (args or kwargs):
            raise ValueError("'args' and 'kwargs' need a 'target' that takes them")
        if timer_interval_secs is not None and not timer_interval_secs >= 0:  # NaN is not either
            raise ValueError(f"'timer_interval_secs' must not be negative, not {timer_interval_secs}")
        if target is not None:
            check_arguments(target, args or (), kwargs or {})
        self._coord = coord
        self._interval_secs = timer_interval_secs or None
        self._target = target
        self._args = tuple(args or ())
        self._kwargs = dict(kwargs or {})
        self._clock = clock or SystemClock()
        self._run_sync = run_sync
        self._threads: SideThreads | None = None
        self._scope = anyio.CancelScope()
        self._ended: asyncio.Future[None] | None = None
        self.name = name or f"loop-{getattr(target, '__name__', type(self).__name__)}"
        self.calls = 0
        self.running_in: asyncio.Task[Any] | None = None

    @staticmethod
    def loop(
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> LooperTask:
        """Make a looper and start it; on the event loop. See the class for the arguments and `start`."""
        return LooperTask(coord, timer_interval_secs, target, args, kwargs).start()

    def start(self) -> Self:
        """Start it as a task of its own, whose exception goes to the coordinator; on the event loop.

        Raises:
            RuntimeError: It was started already, or no event loop runs here.
        """
        if self.running_in is not None:
            raise RuntimeError(f"{self.name} was started already")
        self.running_in = keep(asyncio.get_running_loop().create_task(self._run_reporting(), name=self.name))
        return self

    async def _run_reporting(self) -> None:
        try:
            await self.run()
        except Exception as error:
            self._coord.report(error, self.name)
        except (KeyboardInterrupt, SystemExit):
            self._coord.request_stop()
            raise

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when it has ended; on the event loop."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def cancel(self) -> None:
        """End it by cancellation, which is not an error; on the event loop."""
        self._scope.cancel()

    async def run(self) -> None:
        """Run until the stop; the body of the supervised task."""
        self.running_in = asyncio.current_task()
        ended = self.ended
        try:
            with self._scope:
                await self._loop()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            if not ended.done():
                ended.set_result(None)

    async def _loop(self) -> None:
        if self._coord.should_stop():
            return
        await self._call(self.start_loop)
        first = self._clock.monotonic()
        while not self._coord.should_stop():
            self.calls += 1
            await self._call(self.run_loop)
            if self._interval_secs is None:
                await anyio.lowlevel.checkpoint()
                continue
            now = self._clock.monotonic()
            if await self._stopped_within(next_boundary(first, self._interval_secs, now) - now):
                break
        await self._call(self.stop_loop)

    def start_loop(self) -> Any:
        """Called once before the first call."""

    def stop_loop(self) -> Any:
        """Called once after the last call, when the stop was requested."""

    def run_loop(self) -> Any:
        """Called at each tick; calls the target."""
        if self._target is not None:
            return self._target(*self._args, **self._kwargs)
        return None

    async def _call(self, method: Callable[[], Any]) -> None:
        """Run one of the three methods where it belongs: on the loop if it is async, else on a thread."""
        function = getattr(method, "__func__", method)
        if function in (LooperTask.start_loop, LooperTask.stop_loop):
            return
        if function is LooperTask.run_loop and self._target is not None:
            method = _named_call(self._target, self._args, self._kwargs)
            on_loop = _is_async(self._target)
        else:
            on_loop = _is_async(method)
        result = method() if on_loop else await (self._run_sync or self._run_on_thread)(method)
        if inspect.isawaitable(result):
            await result

    async def _run_on_thread(self, function: Callable[[], Any]) -> Any:
        """Run it on a thread of this looper's own, and never leave it behind unsaid."""
        if self._threads is None:
            self._threads = SideThreads(self.name)
        loop = asyncio.get_running_loop()
        came_back = loop.create_future()
        outcome: list[Any] = []

        def work() -> None:
            # Boxed: a StopIteration that is set on a future would be lost, and its waiter with it.
            try:
                outcome.extend((function(), None))
            except BaseException as error:
                outcome.extend((None, error))
            try:
                loop.call_soon_threadsafe(_set_if_not_done, came_back)
            except RuntimeError:  # the loop is closed
                pass

        self._threads.submit(work, getattr(function, "__qualname__", ""))
        cancelled: asyncio.CancelledError | None = None
        while not came_back.done():
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.wait([came_back])
            except asyncio.CancelledError as again:
                if cancelled is not None:  # not by a scope, which is shielded off: somebody insists
                    raise
                cancelled = again
        result, error = outcome
        outcome.clear()
        if isinstance(error, StopIteration | asyncio.CancelledError):
            raise RuntimeError(f"{getattr(function, '__qualname__', self.name)}() raised {describe(error)}") from error
        try:
            if error is not None:  # also after a cancellation: it must not be lost
                raise error
        finally:
            del error
        if cancelled is not None:
            raise cancelled
        return result

    async def _stopped_within(self, secs: float) -> bool:
        """Sleep by the clock; True as soon as the stop is requested."""
        await first_of(self._clock.sleep(secs), self._coord.wait_for_stop())
        return self._coord.should_stop()


def check_arguments(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError where `target(*args, **kwargs)` cannot work, before anything is started."""
    if not callable(target):
        raise TypeError(f"'target' must be callable, not {target!r}")
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise TypeError(
            f"{getattr(target, '__qualname__', target)!s} is a generator function: calling it would run nothing of it. "
            "Leave out the yield."
        )
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{getattr(target, '__qualname__', target)!s}{signature} cannot be called with "
            f"args={tuple(args)!r}, kwargs={dict(kwargs)!r}: {error}"
        ) from None


def _is_async(function: Any) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
    )


def _named_call(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The call, under the target's name: it is what a straggling thread is called by."""

    def call() -> Any:
        return target(*args, **kwargs)

    call.__qualname__ = str(getattr(target, "__qualname__", None) or repr(target))
    return call


def _set_if_not_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
