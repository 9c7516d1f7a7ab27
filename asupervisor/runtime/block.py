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

import anyio

from asupervisor.errors import StopGraceExceeded, WrongEventLoop
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host
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
        """Enter the block; see `Host.start` for what it raises."""
        self._host = host = self._make_host()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._attached = attached
        self._cancel_sent = False
        host.on_body_overdue = self._on_body_overdue
        return await host.start(clear_stop)

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
                host.coordinator.report(exc, "the body")
            else:
                host.hurry()
        first_error = host.coordinator.error
        host.body_ended()
        cancellations = await host.join()
        try:
            return self._outcome(host, None if ours else exc, first_error, cancellations, stopped_before or ours)
        finally:
            host.coordinator.forget_errors()
            host.coordinator.unbind()
            self._task = None
            del exc, first_error, cancellations

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
        interrupted = exc is not None and not isinstance(exc, Exception)
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
                    _cancel_again(asyncio.current_task())
                    coordinator.raise_requested_exception()
                if error is not None and error is not exc:
                    host.emit(
                        "stop.error_not_raised",
                        f"not raised, because of {type(exc or cancellations[-1]).__name__}: {error!r}",
                        level="error",
                        error=repr(error),
                    )
                if exc is not None:
                    if cancellations and not interrupted:
                        _cancel_again(asyncio.current_task())
                    return False
                raise cancellations[-1]
            if error is not None:
                if error is exc:
                    return False
                if exc is not None and exc is not coordinator.clean_reason and not _is_echo(coordinator, exc):
                    _attach(error, exc)
                coordinator.raise_requested_exception()
            if host.late and stopped_before:
                raise StopGraceExceeded(host.late, host.stop_grace_secs, host.late_stack)
            return True
        finally:
            del exc, error, first_error, cancellations


class CoordinatorBlock(Block[Coordinator]):
    """`async with Coordinator()`: the block waits for its tasks, and only an error or a request stops them."""

    _running: Host[Coordinator] | None = None

    def __init__(self, coordinator: Coordinator, *, stop_grace_secs: float = 120) -> None:
        async def startup(host: Host[Coordinator]) -> Coordinator:
            return coordinator

        def make_host() -> Host[Coordinator]:
            self._running = host = Host("Coordinator", coordinator, startup=startup, stop_grace_secs=stop_grace_secs)
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
                while not host.coordinator.should_stop() and (
                    waiting := [service for service in host.services if not service.done()]
                ):
                    ends = [asyncio.ensure_future(_wait_for(service)) for service in waiting]
                    stop = asyncio.ensure_future(host.coordinator.wait_for_stop())
                    try:
                        await asyncio.wait({*ends, stop}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for waiter in (*ends, stop):
                            waiter.cancel()
            except CancelledError as error:
                await super().exit(error)
                raise
        return await super().exit(exc)


async def _wait_for(service: Service) -> None:
    await service


def _is_echo(coordinator: Coordinator, exc: BaseException) -> bool:
    return isinstance(exc, coordinator.consequence_types)


def _attach(error: BaseException, exc: BaseException) -> None:
    note = f"asupervisor: the body failed, too: {exc!r}"
    if note not in getattr(error, "__notes__", ()) and error is not exc:
        error.add_note(note)


def _cancel_again(task: asyncio.Task[Any] | None) -> None:
    """Have a cancellation that we took delivered again at the next await.

    Not before CPython 3.13, where it can leave a stray CancelledError behind after `asyncio.timeout`; and not
    inside a cancelled anyio scope, which delivers again by itself.
    """
    if (
        sys.version_info >= (3, 13)
        and task is not None
        and task.cancelling()
        and anyio.current_effective_deadline() != -float("inf")
    ):
        task.uncancel()
        task.cancel()


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
