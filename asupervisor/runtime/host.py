"""The host of one supervised session: two tasks that belong to nobody else.

`managed_session()` must work wherever it is written: in fixtures, lifespans and exit stacks, where enter and exit
run in different tasks. A task group that is held in the caller's task would fail there, so the host owns it:

* the **main task** holds the anyio task group: it runs the startup, then the services;
* the **closer task** waits for the stop and brings everything down, step by step, each step bounded. It is
  a task of its own, since the main task may never return: a service can refuse to be cancelled.

What each of them does is in `startup` and `closer`; here is what begins, hurries and ends them, and who is told.

What wakes whom: `Coordinator.request_stop` (any thread) makes the loop call `_on_stop`, which is where the clock of
the grace starts. Everything here runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import functools
import math
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import anyio

from asupervisor.errors import StopGraceExceeded, StopRequested, WrongEventLoop
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.awaited import Awaited
from asupervisor.runtime.closer import Closer, Milestones
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.grace import Grace
from asupervisor.runtime.joining import cancel_again, keep
from asupervisor.runtime.service import Service, ServiceGroup
from asupervisor.runtime.startup import Startup
from asupervisor.runtime.waits import Waits, set_done

T = TypeVar("T")

KILL_GRACE_SECS = 1.0
"""What is left to something that was cancelled, or that is not waited for politely."""


class Host(Generic[T]):
    """Runs a startup, then services, and ends them in order when the coordinator says so.

    Args:
        name: Name of what is hosted, for messages.
        coordinator: The stop state; cleared at `start`.
        startup: Makes the value that is hosted; may call `spawn`.
        settle: The last words, after the services have ended: a final save. Awaited once when the body is done,
            when `stop()` is called or when the grace is over, and once more before the release. A cancellation of
            it means that it is out of time.
        release: Gives everything back; always called, also after a failed startup.
        close_now: The same in one synchronous call that neither waits nor needs a loop, for a session whose
            coroutine is destroyed outside of its loop, and for a release that was cancelled or took too long.
        stragglers: Names of threads that are still busy, each with a formatted stack, asked at the very end.
        stop_grace_secs: What the services and the body have after the stop, in seconds.
        kill_grace_secs: What is left to what was cancelled, in seconds.
        emit: Where events go.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        *,
        startup: Callable[[Host[T]], Awaitable[T]],
        settle: Callable[[], Coroutine[Any, Any, None]] | None = None,
        release: Callable[[], Coroutine[Any, Any, None]] | None = None,
        close_now: Callable[[], None] | None = None,
        stragglers: Callable[[], list[tuple[str, str]]] | None = None,
        stop_grace_secs: float = 120,
        kill_grace_secs: float = KILL_GRACE_SECS,
        emit: EventSink = log_only,
    ) -> None:
        self.name = name
        self.coordinator = coordinator
        self.kill_grace_secs = kill_grace_secs
        self.emit = emit
        self.on_body_overdue: Callable[[], None] | None = None
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.state: Literal["starting", "running", "stopping", "stopped"] = "starting"
        self._services = ServiceGroup(name, coordinator, emit)
        self._waits = Waits(
            name,
            kill_grace_secs,
            on_interrupt=self._on_interrupt,
            record=functools.partial(coordinator.record, always=True),
            emit=emit,
        )
        self.awaited = Awaited(self._services, coordinator)
        self._grace = Grace(stop_grace_secs, kill_grace_secs, coordinator)
        self._make = startup
        self._startup: Startup[T] = Startup(name, coordinator, emit)
        self._at = Milestones(self.loop)
        self._closer = Closer(
            self._at,
            self._waits,
            self.awaited,
            self._startup,
            self._grace,
            settle=settle,
            release=release,
            close_now=close_now,
            stragglers=stragglers,
        )
        self._main_task: asyncio.Task[Any] | None = None
        self._abandoned = False

    # ------------------------------------------------------------------ start

    async def start(self, clear_stop: bool = True) -> T:
        """Start the two tasks, wait for the startup and return what it made.

        Args:
            clear_stop: Whether a stop that was requested before is forgotten, as the original does.

        Cancelling it cancels the startup, which is given the kill grace to end.

        Raises:
            StopRequested: A stop without an error was requested meanwhile.
            BaseException: What the startup raised, or the error with which a stop was requested meanwhile.
        """
        if clear_stop:
            self.coordinator.clear_stop()
        self.coordinator.bind()
        error: BaseException | None = None
        try:
            self.coordinator.add_stop_callback(self._on_stop)
            self._start_closer()
            self._main_task = keep(self.loop.create_task(self._main(), name=f"{self.name}-host"))
            self._main_task.add_done_callback(self._on_main_ended)
            try:
                # The second one comes first where the startup does not let itself be aborted.
                await asyncio.wait([self._at.started, self._at.finished], return_when=asyncio.FIRST_COMPLETED)
            except BaseException as interrupt:
                self.hurry()
                self.close()
                await self.join()
                self._startup.tell_of_failed_abort(interrupt)
                raise
            if self._startup.succeeded:
                return self._startup.value  # type: ignore[return-value]
            self.close()
            cancellations = await self.join()
            error = self._startup.take_error(self.kill_grace_secs)
            if cancellations:
                if isinstance(error, StopRequested):
                    raise cancellations[-1]
                cancel_again(asyncio.current_task())
            if error is self.coordinator.error:
                self.coordinator.raise_requested_exception()
            raise error
        except BaseException:
            if not self._at.finished.done():  # an interrupt while we were at it: the closer goes on alone
                self.hurry()
                self.close()
            self.coordinator.mark_joined()
            self.coordinator.forget_errors()
            self.coordinator.unbind()
            raise
        finally:
            # A frame that raises is referred to by the traceback: no cycle, and nothing that keeps the host alive.
            error = None
            cancellations = []
            del self

    def _start_closer(self) -> None:
        closer = keep(self.loop.create_task(self._bring_down(), name=f"{self.name}-closer"))
        closer.add_done_callback(self._on_closer_ended)

    def _on_main_ended(self, task: asyncio.Task[Any]) -> None:
        _retrieve_interrupt(task)
        if not self._at.started.done():  # cancelled before its first step
            self._startup.never_began()
            self._main_has_ended()

    def _on_closer_ended(self, task: asyncio.Task[Any]) -> None:
        _retrieve_interrupt(task)
        if self._at.finished.done():
            return
        # Cancelled before its first step.
        self.hurry()
        self.close()
        if self._main_task is None or self._main_task.cancelling() or self._main_task.done():
            self._end_at_once()  # and so was the other one: the loop is being torn down, and nothing has begun
        else:
            self._start_closer()

    async def _main(self) -> None:
        async def main() -> None:
            await self._start_up()
            if self._startup.error is None:
                await asyncio.wait([self._at.stopping])

        try:
            await self._services.host(main)
        except CancelledError:
            # From outside: `asyncio.run` cancels every task at its end. The services got the same; stop in order.
            self.coordinator.request_stop()
        except (KeyboardInterrupt, SystemExit):
            self.hurry()
            raise
        finally:
            self._main_has_ended()

    async def _start_up(self) -> None:
        await self._startup.run(lambda: self._make(self))
        if self._startup.succeeded:
            self.state = "running"
        set_done(self._at.started)

    def _main_has_ended(self) -> None:
        self._services.end()
        set_done(self._at.main_ended)
        set_done(self._at.started)

    # ------------------------------------------------------------------ services

    def spawn(
        self,
        name: str,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        critical: bool = True,
        on_stop: Literal["grace", "cancel"] = "grace",
    ) -> Service:
        """Start a supervised task; on the loop thread.

        Args:
            name: Its name in events, status and errors.
            async_fn: Coroutine function that is its body.
            *args: Arguments of `async_fn`.
            critical: Whether its failure stops everything; otherwise it is an event.
            on_stop: ``"grace"`` lets it end by itself after a stop, for as long as the grace lasts; ``"cancel"``
                cancels it at once.

        Returns:
            Its record.

        Raises:
            WrongEventLoop: Called off the host's loop.
            RuntimeError: The host has ended, or has not started.
        """
        return self._services.spawn(name, async_fn, args, critical, on_stop)

    @property
    def services(self) -> list[Service]:
        """The records of the services, the oldest first."""
        return self._services.records

    # ------------------------------------------------------------------ the stop

    def _on_stop(self) -> None:
        """The stop was requested; a loop callback, once."""
        if self._at.stopping.done():
            return
        self.state = "stopping"
        if not self._at.started.done() or self._startup.error is not None:
            # This aborts the startup: there is nobody to be given grace, and no body to wait for.
            self._services.cancel()
            set_done(self._at.grace_over)
            set_done(self._at.body_done)
            set_done(self._at.settle_wanted)
            set_done(self._at.close_wanted)
        elif not self._services.cancelled:
            self._grace.start(self._on_grace_over)
        set_done(self._at.stopping)

    def _on_grace_over(self) -> None:
        waiting = [service.name for service in self.awaited.services()]
        if waiting:
            self.emit(
                "stop.cancelling",
                f"cancelled after {self.stop_grace_secs:g} s of grace: {' '.join(waiting)}",
                level="warning",
                services=waiting,
            )
        self._services.cancel()
        if not self._at.body_done.done() and not self.awaited.body_asks and self.on_body_overdue is not None:
            self.on_body_overdue()
        set_done(self._at.grace_over)

    def hurry(self) -> None:
        """Whoever waits for the end was cancelled: no more grace for the services; twice: none for the last words."""
        self._waits.interrupt()
        self.coordinator.report(None, "interrupt")
        self._on_stop()
        self._grace.cancel()
        self._services.cancel()
        set_done(self._at.grace_over)

    def _on_interrupt(self) -> None:
        self.hurry()
        self.close()

    def body_ended(self) -> None:
        """The body of the block has ended: settle and release need not wait for it any more."""
        set_done(self._at.body_done)
        self.close()

    def close(self) -> None:
        """Ask for the end: stop, settle, release. `join` waits for it."""
        self.coordinator.report(None, "close")
        self.coordinator.drain()
        self._on_stop()  # where an interrupt has hit the drain that should have called it
        set_done(self._at.body_done)
        set_done(self._at.settle_wanted)
        set_done(self._at.close_wanted)

    def abandon(self) -> None:
        """End without the loop: everything that can be told to end is told, nothing is waited for.

        If the loop still lives, the rest follows when it runs.
        """
        self._abandoned = True
        self.coordinator.request_stop()
        close_now = self._closer.take_close_now()
        try:
            self.loop.call_soon_threadsafe(self._end_abandoned)
        except RuntimeError:  # it is closed
            self.state = "stopped"
            self.coordinator.unbind()
            self._let_go()
        if close_now is not None:
            close_now()

    def _end_abandoned(self) -> None:
        self.hurry()
        self._waits.interrupts = 2  # no last words: what could be closed has been closed
        self.close()

    async def _bring_down(self) -> None:
        """The closer task: each step is bounded, and a cancellation of this task only takes time away from it."""
        try:
            await self._closer.bring_down()
        finally:
            self._end_at_once()

    def _end_at_once(self) -> None:
        """Whatever happens, those who wait are told. Ctrl-C raises in whatever task has its turn: in ours, too."""
        close_now = self._closer.take_close_now()
        if not self._at.finished.done() and close_now is not None:
            close_now()
        self.state = "stopped"
        self._services.closed = True
        self._grace.cancel()
        self.coordinator.remove_stop_callback(self._on_stop)
        set_done(self._at.settled)
        set_done(self._at.finished)
        if self._abandoned:
            self.coordinator.forget_errors()
            self.coordinator.unbind()
            self._let_go()

    # ------------------------------------------------------------------ waiting for the end

    async def stop(self, ignore_live_threads: bool = False) -> None:
        """End the services and settle, without waiting for the body; the value lives on until `close`.

        A service may call it; it is not waited for then.

        Raises:
            BaseException: The first error that was reported.
            StopGraceExceeded: Services outlived their grace.
        """
        self._check_loop("stop()")
        self.awaited.stop_asked()
        self._waits.ring()
        self.coordinator.request_stop()
        self.coordinator.drain()
        self._on_stop()
        set_done(self._at.settle_wanted)
        try:
            await asyncio.wait([self._at.settled])
            self.coordinator.mark_joined()
            self.coordinator.raise_requested_exception()
            late = self.awaited.late_for_stop()
            if late and not ignore_live_threads:
                raise StopGraceExceeded(late, self.stop_grace_secs)
        finally:
            del self

    async def join(self) -> list[CancelledError]:
        """Wait for the end of everything; bounded, since each step is.

        A cancellation takes the grace away from the services, and the wait goes on; a second one skips the last
        words. All of them are returned: whoever waits must not lose them. A service may call it; it is not waited for
        then.
        """
        self._check_loop("join()")
        is_service = self.awaited.join_asked()
        self._waits.ring()
        cancellations: list[CancelledError] = []
        while not self._at.finished.done():
            try:
                # The first wait is open to an anyio scope of the caller. Later ones are not: a cancelled scope
                # would cancel again in each cycle of the loop.
                with anyio.CancelScope(shield=bool(cancellations)):
                    await asyncio.wait([self._at.finished])
            except CancelledError as error:
                # A cancelled anyio scope tells again what has brought us here: one event, however busy the loop is.
                told_again = not cancellations and anyio.current_effective_deadline() == -math.inf
                cancellations.append(error)
                if not (told_again and self.interrupted):
                    self.hurry()
        if self.awaited.closed_by_service and not is_service:
            # A service has closed the session, and goes on only now, as we do: see it off.
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([self._at.main_ended], timeout=self.kill_grace_secs)
            except CancelledError as error:
                cancellations.append(error)
        self._let_go()
        try:
            return cancellations
        finally:
            # The tracebacks of the cancellations lead here.
            del cancellations, self

    def _check_loop(self, what: str) -> None:
        if _running_loop() is not self.loop:
            raise WrongEventLoop(
                f"{what} of {self.name} was called off the event loop of its session",
                "Call it on that loop, or call request_stop(), which is safe anywhere.",
            )

    def _let_go(self) -> None:
        """Drop the references that would keep the value alive until the garbage collector comes."""
        self._startup.value = None
        self._make = _gone
        self._closer.let_go()
        self.awaited.let_go()
        self._waits.on_interrupt = _nothing
        self.on_body_overdue = None

    @property
    def stop_grace_secs(self) -> float:
        """What the services and the body have after the stop, in seconds."""
        return self._grace.secs

    @stop_grace_secs.setter
    def stop_grace_secs(self, secs: float) -> None:
        self._grace.secs = secs

    @property
    def grace_left(self) -> float:
        """What the stop has left of the grace, in seconds; never less than the kill grace."""
        return self._grace.left

    @property
    def interrupted(self) -> bool:
        """Whether somebody who waits for the end was cancelled."""
        return self._waits.interrupts > 0

    @property
    def finished(self) -> bool:
        """Whether everything has ended."""
        return self._at.finished.done()

    @property
    def late(self) -> list[str]:
        """Names of what was still running at the end."""
        return self._closer.late

    @property
    def late_stack(self) -> str:
        """Formatted stack of the thread that was still busy at the end."""
        return self._closer.late_stack


async def _gone(host: Host[Any]) -> Any:
    raise StopRequested(f"starting {host.name}")


def _nothing() -> None:
    pass


def _retrieve_interrupt(task: asyncio.Task[Any]) -> None:
    """KeyboardInterrupt has left the loop by itself: asyncio need not tell that nobody retrieved it from the task."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        task.get_loop().call_exception_handler({"message": "asupervisor failed", "exception": error, "task": task})


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
