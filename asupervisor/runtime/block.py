"""Enter and exit of a hosted block: what happens in the caller's task.

The rules are few and each is delicate. Nothing of ours (no cancel scope, no context variable) is left open in the
caller's task between enter and exit, since they may be different tasks. The body may be cancelled by us once, by
`Task.cancel()`, and only where it provably runs in the entering task; the request is taken back with `uncancel()`.
Whatever leaves the block is the first thing that went wrong, bare: the same object with the same traceback.

`tests/runtime/test_lifecycle.py` runs every event in every host; reorder nothing here without it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from asyncio import CancelledError
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from asupervisor.errors import StopGraceExceeded, WrongEventLoop, describe
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host
from asupervisor.runtime.joining import cancel_again
from asupervisor.runtime.service import Service

T = TypeVar("T")

# Coroutines that enter a context for somebody else and return before its body runs.
_DELEGATES = frozenset({"enter_async_context", "_enter_async_context", "enterAsyncContext", "run_async_cm", "wait_for"})


class Block(Generic[T]):
    """An async context manager around a `Host`.

    A class and not a decorated generator: it may be entered in one task and left in another.

    Args:
        make_host: Makes the host, on the loop, when the block is entered.
        cancel_body: Whether a body that outlives the grace is cancelled: None decides by how the block is entered.
    """

    def __init__(self, make_host: Callable[[], Host[T]], *, cancel_body: bool | None = None) -> None:
        self._make_host = make_host
        self._cancel_body_option = cancel_body
        self._host: Host[T] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._attached = False
        self._cancel_sent = False

    async def __aenter__(self) -> T:
        attached = _body_runs_here() if self._cancel_body_option is None else self._cancel_body_option
        return await self.enter(attached=attached)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            return await self.exit(exc)
        finally:
            del exc, traceback  # a frame that raises refers to itself through its traceback

    async def enter(self, *, attached: bool = True, clear_stop: bool = True) -> T:
        """Enter the block; see `Host.start` for what it raises.

        Raises:
            WrongEventLoop: No asyncio event loop runs here.
            RuntimeError: The block is in use.
        """
        if self._host is not None:
            raise RuntimeError(f"the block of {self._host.name} has been entered already: make another one")
        task = _current_task()
        self._host = host = self._make_host()
        self._task = task
        self._cancelling = task.cancelling()
        self._attached = attached
        self._cancel_sent = False
        host.on_body_overdue = self._on_body_overdue
        host.awaited.body_task = self._task if attached else None
        try:
            return await host.start(clear_stop)
        except BaseException:
            self._host = self._task = None
            raise
        finally:
            del host

    @property
    def sent_cancel(self) -> bool:
        """Whether the body was cancelled because its grace was over."""
        return self._cancel_sent

    def _on_body_overdue(self) -> None:
        """The grace is over and the body still runs; a loop callback, never a step of the body itself."""
        host, task = self._host, self._task
        if host is None or task is None or self._cancel_sent:
            return
        if not self._attached or task.done():
            host.emit(
                "stop.body_runs_on",
                f"the body of {host.name} still runs after {host.stop_grace_secs:g} s of grace, and cannot be "
                "cancelled from here",
                level="warning",
            )
            return
        self._cancel_sent = True
        task.cancel(f"{host.name}: the stop grace of {host.stop_grace_secs:g} s is over")

    async def exit(self, exc: BaseException | None) -> bool:
        """Leave the block: stop, wait for the end, and decide what leaves.

        Returns:
            Whether `exc` has been dealt with and must not leave the block.
        """
        host, self._host = self._host, None
        if host is None:  # never entered, or left already
            return False
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not host.loop:
            host.abandon()
            if running is not None:
                raise WrongEventLoop(
                    f"{host.name} was entered on one event loop and left on another",
                    "Use a fixture or lifespan whose loop is the one of its users.",
                )
            return False  # the coroutine is being destroyed: there is no loop to wait on
        ours = self._take_back_cancel(exc)
        stopped_before = host.coordinator.should_stop()
        if exc is not None and not ours:
            if isinstance(exc, Exception):
                host.coordinator.record(exc, "the body")
            else:
                host.hurry()
        first_error = host.coordinator.error
        host.body_ended()
        cancellations = await host.join()
        host.coordinator.mark_joined()
        leaving = exc
        if self._cancel_sent and cancellations and isinstance(exc, CancelledError) and not ours:
            # Ours and somebody else's came as one, with our message. A cancelled anyio scope has told us again while
            # we waited: it knows its own by the message.
            leaving = cancellations[-1]
        try:
            dealt_with = self._outcome(
                host, None if ours else leaving, first_error, cancellations, stopped_before or ours
            )
            if not dealt_with and leaving is not exc and leaving is not None:
                raise leaving
            return dealt_with
        finally:
            host.coordinator.forget_errors()
            host.coordinator.unbind()
            self._task = None
            # What leaves has a traceback that leads here: no cycle, and nothing that keeps the host alive.
            del self, host, exc, leaving, first_error, cancellations

    def _take_back_cancel(self, exc: BaseException | None) -> bool:
        """Undo our own cancellation of the body; True when `exc` is just that, and nobody else's."""
        if not self._cancel_sent or self._task is None or self._task.done():
            return False
        left = self._task.uncancel()
        return isinstance(exc, CancelledError) and asyncio.current_task() is self._task and left <= self._cancelling

    def _outcome(
        self,
        host: Host[T],
        exc: BaseException | None,
        first_error: BaseException | None,
        cancellations: list[CancelledError],
        stopped_before: bool,
    ) -> bool:
        coordinator = host.coordinator
        error = coordinator.error
        coordinator.annotate()
        interrupted = exc is not None and not isinstance(exc, Exception)
        if isinstance(exc, SystemExit) and exc.code in (None, 0) and error is not None and not cancellations:
            interrupted = False  # `sys.exit()` tells of a clean end, which does not outrank an error
        try:
            if host.late:
                host.emit(
                    "stop.left_running",
                    f"still running after the stop: {' '.join(host.late)}",
                    level="error" if stopped_before else "warning",
                    services=host.late,
                )
            if interrupted or cancellations:
                cancelled = bool(cancellations) or isinstance(exc, CancelledError)
                if error is not None and error is first_error and error is not exc and cancelled:
                    # It came first, so it wins, as in the task groups of asyncio and anyio. The cancellation
                    # must not be lost for that.
                    cancel_again(asyncio.current_task())
                    coordinator.raise_requested_exception()
                if error is not None and error is not exc:
                    host.emit(
                        "stop.error_not_raised",
                        f"not raised, because of {type(exc or cancellations[-1]).__name__}: {describe(error)}",
                        level="error",
                        error=describe(error),
                    )
                if exc is None or (cancellations and exc is not error and not interrupted):
                    raise cancellations[-1]  # a clean end does not outrank it
                if cancellations and not interrupted:
                    cancel_again(asyncio.current_task())
                return False
            if error is not None:
                if error is exc or (isinstance(exc, StopIteration) and error.__cause__ is exc):
                    return False  # a StopIteration was boxed for the others; from here it can leave as it is
                coordinator.raise_requested_exception()
            if host.late and stopped_before:
                raise StopGraceExceeded(host.late, host.stop_grace_secs, host.late_stack)
            return True
        finally:
            del self, host, exc, error, first_error, cancellations


class CoordinatorBlock(Block[Coordinator]):
    """`async with Coordinator()`: the block waits for its tasks, and only an error or a request stops them."""

    _running: Host[Coordinator] | None = None

    def __init__(self, coordinator: Coordinator, *, stop_grace_secs: float = 120) -> None:
        async def startup(host: Host[Coordinator]) -> Coordinator:
            return coordinator

        def make_host() -> Host[Coordinator]:
            self._running = host = Host(
                "Coordinator",
                coordinator,
                startup=startup,
                stop_grace_secs=stop_grace_secs,
                emit=coordinator.emit,
            )
            return host

        super().__init__(make_host)

    def start_soon(self, async_fn: Callable[..., Any], *args: Any, name: str | None = None) -> Service:
        """Start a task in the block."""
        assert self._running is not None
        return self._running.spawn(name or str(getattr(async_fn, "__name__", "task")), async_fn, *args)

    async def exit(self, exc: BaseException | None) -> bool:
        """Wait for the tasks if the body ended well; then leave as any block does."""
        host = self._running
        self._running = None
        if exc is None and host is not None:
            try:
                stopped = host.coordinator.stop_waiter()
                try:
                    while not stopped.done() and (ends := [s.ended for s in host.services if not s.done()]):
                        await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    host.coordinator.discard_waiter(stopped)
            except CancelledError as error:
                if not await super().exit(error):
                    raise
                return True
        return await super().exit(exc)


def _current_task() -> asyncio.Task[Any]:
    """The task that enters.

    Raises:
        WrongEventLoop: There is none.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        raise WrongEventLoop(
            "a session was entered where no asyncio event loop runs", "asyncio only: trio and curio are not supported."
        )
    return task


def _body_runs_here() -> bool:
    """Whether the body of the `async with` provably runs in the task that enters; called by `__aenter__` only.

    It does where the statement stands directly in a coroutine function. An async generator (a fixture, a lifespan,
    a yield dependency) may be resumed by any task, and `AsyncExitStack` and its like return before the body begins.
    """
    frame: FrameType | None = sys._getframe(2)  # who awaits __aenter__
    while frame is not None and frame.f_code.co_name == "__aenter__" and _is_coroutine(frame):
        frame = frame.f_back  # a context manager that delegates to us: ask who awaits it
    return frame is not None and _is_coroutine(frame) and frame.f_code.co_name not in _DELEGATES


def _is_coroutine(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
