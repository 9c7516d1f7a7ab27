"""The host of one supervised session: two tasks that belong to nobody else.

`managed_session()` must work wherever it is written: in fixtures, lifespans and exit stacks, where enter and exit
run in different tasks. A task group that is held in the caller's task would fail there, so the host owns it:

* the **main task** holds the anyio task group: it runs the startup, then the services;
* the **closer task** waits for the stop and brings everything down, step by step, each step bounded. It is
  a task of its own, since the main task may never return: a service can refuse to be cancelled.

::

    stop flag ── services and body have stop_grace_secs ── scope cancelled, body told once ── kill grace
              ── settle (final save), bounded ── close asked for ── release (session, threads), bounded ── finished

What wakes whom: `Coordinator.request_stop` (any thread) makes the loop call `_on_stop`, which is where the clock of
the grace starts. Everything here runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import anyio

from asupervisor.errors import SessionClosed, StopGraceExceeded, StopRequested, WrongEventLoop, describe
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.joining import Worker, cancel_again, keep, outlast, still_running
from asupervisor.runtime.service import Service, ServiceGroup
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
        self.stop_grace_secs = stop_grace_secs
        self.kill_grace_secs = kill_grace_secs
        self.emit = emit
        self.on_body_overdue: Callable[[], None] | None = None
        self.body_task: asyncio.Task[Any] | None = None
        self._startup = startup
        self._settle = settle
        self._release = release
        self._close_now = close_now
        self._busy_threads = stragglers
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.state: Literal["starting", "running", "stopping", "stopped"] = "starting"
        self._services = ServiceGroup(name, coordinator, emit)
        self._waits = Waits(
            name, kill_grace_secs, on_interrupt=self._on_interrupt, record=coordinator.record, emit=emit
        )
        self._main_task: asyncio.Task[Any] | None = None
        self._startup_error: BaseException | None = None
        self._value: T | None = None
        self._started = self.loop.create_future()
        self._stopping = self.loop.create_future()
        self._grace_over = self.loop.create_future()
        self._body_done = self.loop.create_future()
        self._body_knows = False
        self._settle_wanted = self.loop.create_future()
        self._settled = self.loop.create_future()
        self._close_wanted = self.loop.create_future()
        self._finished = self.loop.create_future()
        self._main_ended = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._late_timers = 0
        self._exempt: set[Service] = set()  # who waits in `stop` or `join`, and is not waited for
        self._closing: set[Service] = set()  # those of them who wait in `join`
        self._stoppers: set[Service] = set()  # who has called `stop`
        self._askers: set[asyncio.Task[Any]] = set()  # tasks that wait in `stop` or `join`
        self._ran = False
        self._out_of_words = False  # the last words took too long once: they would again
        self._abandoned = False
        self._late: list[str] = []
        self._late_stack = ""

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
                await asyncio.wait([self._started, self._finished], return_when=asyncio.FIRST_COMPLETED)
            except BaseException as interrupt:
                self.hurry()
                self.close()
                await self.join()
                self._tell_of_failed_abort(interrupt)
                raise
            if self._ran and self._startup_error is None:
                return self._value  # type: ignore[return-value]
            self.close()
            cancellations = await self.join()
            error = self._startup_error or self._stuck_startup()
            self._startup_error = None
            if cancellations:
                if isinstance(error, StopRequested):
                    raise cancellations[-1]
                cancel_again(asyncio.current_task())
            if error is self.coordinator.error:
                self.coordinator.raise_requested_exception()
            raise error
        except BaseException:
            if not self._finished.done():  # an interrupt while we were at it: the closer goes on alone
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

    def _tell_of_failed_abort(self, interrupt: BaseException) -> None:
        """What the startup raised because it was cancelled does not leave, since the cancellation does. It is told."""
        error, self._startup_error = self._startup_error, None
        if isinstance(error, StopRequested | SessionClosed) or not isinstance(error, Exception):
            return
        if error is not self.coordinator.error:  # that one has been told
            self.emit(
                "session.start_failed",
                f"the start of {self.name} was cancelled, and has failed at that: {describe(error)}",
                level="error",
                error=describe(error),
            )
        interrupt.add_note(f"asupervisor: the start failed while it was cancelled: {describe(error)}")

    def _start_closer(self) -> None:
        closer = keep(self.loop.create_task(self._bring_down(), name=f"{self.name}-closer"))
        closer.add_done_callback(self._on_closer_ended)

    def _on_main_ended(self, task: asyncio.Task[Any]) -> None:
        _retrieve_interrupt(task)
        if not self._started.done():  # cancelled before its first step
            self._startup_error = CancelledError(f"{self.name} was cancelled before it began")
            self.coordinator.request_stop()
            self._main_has_ended()

    def _on_closer_ended(self, task: asyncio.Task[Any]) -> None:
        _retrieve_interrupt(task)
        if self._finished.done():
            return
        # Cancelled before its first step.
        self.hurry()
        self.close()
        if self._main_task is None or self._main_task.cancelling() or self._main_task.done():
            self._end_at_once()  # and so was the other one: the loop is being torn down, and nothing has begun
        else:
            self._start_closer()

    def _stuck_startup(self) -> BaseException:
        return self.coordinator.error or StopGraceExceeded([f"start of {self.name}"], self.kill_grace_secs)

    async def _main(self) -> None:
        async def main() -> None:
            await self._start_up()
            if self._startup_error is None:
                await asyncio.wait([self._stopping])

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

    def _main_has_ended(self) -> None:
        self._services.end()
        set_done(self._main_ended)
        set_done(self._started)

    async def _start_up(self) -> None:
        try:
            self._value = await self._startup(self)
        except CancelledError as error:
            if not self.coordinator.should_stop():
                self._startup_error = error
                self.coordinator.request_stop()
                raise
            self._startup_error = self._aborted()
        except BaseException as error:
            # Reported nowhere: an error of the startup leaves `start` as it is, and is never a clean end. But what
            # was reported before it came first, and the echo of an abortion is no error.
            first = self.coordinator.error
            if first is not None and first is not error:
                self.coordinator.record(error, f"start of {self.name}")
                self._startup_error = first
            elif self.coordinator.should_stop() and isinstance(error, self.coordinator.consequence_types):
                self._startup_error = self._aborted()
            else:
                self._startup_error = error
            self.coordinator.request_stop()
        else:
            self._ran = True
            if self.coordinator.should_stop():
                self._startup_error = self._aborted()
            else:
                self.state = "running"
        set_done(self._started)

    def _aborted(self) -> BaseException:
        return self.coordinator.error or StopRequested(f"start of {self.name}")

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

    def _running_services(self) -> list[Service]:
        return [service for service in self._services.running() if service not in self._exempt]

    # ------------------------------------------------------------------ the stop

    def _on_stop(self) -> None:
        """The stop was requested; a loop callback, once."""
        if self._stopping.done():
            return
        self.state = "stopping"
        if not self._started.done() or self._startup_error is not None:
            # This aborts the startup: there is nobody to be given grace, and no body to wait for.
            self._services.cancel()
            set_done(self._grace_over)
            set_done(self._body_done)
            set_done(self._settle_wanted)
            set_done(self._close_wanted)
        elif not self._services.cancelled:
            self._arm(self.stop_grace_secs)
        set_done(self._stopping)

    def _arm(self, secs: float) -> None:
        due = self.loop.time() + secs
        self._timer = self.loop.call_later(secs, self._on_grace_over, due)

    def _on_grace_over(self, due: float) -> None:
        # A loop that stood still (a test runner between two tests) has given nobody any time: give it again.
        late = self.loop.time() - due
        if late > max(0.2, 0.2 * self.stop_grace_secs) and self._late_timers < 3:
            self._late_timers += 1
            self._arm(self.stop_grace_secs)
            return
        waiting = [service.name for service in self._running_services()]
        if waiting:
            self.emit(
                "stop.cancelling",
                f"cancelled after {self.stop_grace_secs:g} s of grace: {' '.join(waiting)}",
                level="warning",
                services=waiting,
            )
        self._services.cancel()
        if not self._body_done.done() and not self._body_knows and self.on_body_overdue is not None:
            self.on_body_overdue()
        set_done(self._grace_over)

    def hurry(self) -> None:
        """Whoever waits for the end was cancelled: no more grace for the services; twice: none for the last words."""
        self._waits.interrupt()
        self.coordinator.request_stop()
        self._on_stop()
        if self._timer is not None:
            self._timer.cancel()
        self._services.cancel()
        set_done(self._grace_over)

    def _on_interrupt(self) -> None:
        self.hurry()
        self.close()

    def body_ended(self) -> None:
        """The body of the block has ended: settle and release need not wait for it any more."""
        set_done(self._body_done)
        self.close()

    def close(self) -> None:
        """Ask for the end: stop, settle, release. `join` waits for it."""
        self.coordinator.request_stop()
        self.coordinator.drain()
        self._on_stop()  # where an interrupt has hit the drain that should have called it
        set_done(self._body_done)
        set_done(self._settle_wanted)
        set_done(self._close_wanted)

    def abandon(self) -> None:
        """End without the loop: everything that can be told to end is told, nothing is waited for.

        If the loop still lives, the rest follows when it runs.
        """
        self._abandoned = True
        self.coordinator.request_stop()
        close_now, self._close_now = self._close_now, None
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
            await self._bring_down_in_order()
        finally:
            self._end_at_once()

    def _end_at_once(self) -> None:
        """Whatever happens, those who wait are told. Ctrl-C raises in whatever task has its turn: in ours, too."""
        close_now, self._close_now = self._close_now, None
        if not self._finished.done() and close_now is not None:
            close_now()
        self.state = "stopped"
        self._services.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.coordinator.remove_stop_callback(self._on_stop)
        set_done(self._settled)
        set_done(self._finished)
        if self._abandoned:
            self.coordinator.forget_errors()
            self.coordinator.unbind()
            self._let_go()

    async def _bring_down_in_order(self) -> None:
        await self._waits.outwait([self._stopping], None)
        await self._services_end()
        await self._waits.outwait([self._settle_wanted, self._grace_over], None, any_of=True)
        # At the end of the grace the body was told: let it get out of the block.
        await self._waits.outwait([self._settle_wanted], self.kill_grace_secs)
        await self._last_words()
        set_done(self._settled)
        await self._waits.outwait([self._close_wanted], None)
        self._exempt &= self._closing  # who has called `stop()` has had no more than the others until now
        await self._services_end()
        await self._last_words()
        if self._release is not None:
            in_time = await self._waits.bounded(self._release, 4 * self.kill_grace_secs, "release")
            close_now, self._close_now = self._close_now, None
            if not in_time and close_now is not None:
                close_now()  # it hangs, or was cancelled with everything else: what can be closed now, is
        self._late = sorted(service.name for service in set(self._services.running()) - self._closing)
        self._late += still_running(self._registered_workers())
        for label, stack in self._busy_threads() if self._busy_threads is not None else ():
            self._late.append(label)
            self._late_stack = self._late_stack or stack
        self.coordinator.forget_registered()
        self._finished.set_result(None)

    async def _services_end(self) -> None:
        while running := self._running_services():
            # The bell: the exempt set has grown, by a service that calls stop().
            await self._waits.outwait(
                [*(s.ended for s in running), self._grace_over, self._waits.bell], None, any_of=True
            )
            if self._grace_over.done():
                break
        deadline = self.loop.time() + self.kill_grace_secs
        while (running := self._running_services()) and (left := deadline - self.loop.time()) > 0:
            await self._waits.outwait([s.ended for s in running], left)
        if not self._exempt and not self._running_services():
            left = max(0.0, deadline - self.loop.time())
            await self._waits.outwait([self._main_ended], left)
        await self._registered_end()

    async def _registered_end(self) -> None:
        """Threads and tasks that registered with the coordinator have the same grace as the services."""
        workers = self._registered_workers()
        if not still_running(workers):
            return
        ended = keep(self.loop.create_task(outlast(workers, self._stopping, self.grace_left)))
        await self._waits.outwait([ended, self._grace_over], None, any_of=True)
        if not ended.done():  # somebody is in a hurry: tasks can be told, threads cannot
            ended.cancel()
            for worker in workers:
                if not isinstance(worker, threading.Thread):
                    worker.cancel()

    def _registered_workers(self) -> list[Worker]:
        """Those that registered, but for whoever waits for them here."""
        waiting = {self.body_task, *self._askers} - {None}
        return [
            worker
            for worker in self.coordinator.registered
            if worker not in waiting and getattr(worker, "running_in", None) not in waiting
        ]

    async def _last_words(self) -> None:
        if self._settle is None or not self._ran or self._startup_error is not None or self._waits.interrupts > 1:
            return
        if not self._out_of_words:
            self._out_of_words = not await self._waits.bounded(
                self._settle, self.grace_left, "final save", can_be_skipped=True
            )

    # ------------------------------------------------------------------ waiting for the end

    async def stop(self, ignore_live_threads: bool = False) -> None:
        """End the services and settle, without waiting for the body; the value lives on until `close`.

        A service may call it; it is not waited for then.

        Raises:
            BaseException: The first error that was reported.
            StopGraceExceeded: Services outlived their grace.
        """
        self._check_loop("stop()")
        me = asyncio.current_task()
        callers = self._services.of_task(me)
        self._exempt |= callers
        self._stoppers |= callers
        if me is not None:
            self._askers.add(me)
        self._body_knows |= me is self.body_task if self.body_task is not None else not callers
        self._waits.ring()
        self.coordinator.request_stop()
        self.coordinator.drain()
        self._on_stop()
        set_done(self._settle_wanted)
        try:
            await asyncio.wait([self._settled])
            self.coordinator.mark_joined()
            self.coordinator.raise_requested_exception()
            # But for who asks: a block that ends meanwhile has the callers of `stop()` counted again.
            late = sorted({service.name for service in self._running_services() if service not in self._stoppers})
            late += still_running(self._registered_workers())
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
        self._closing |= (callers := self._services.of_task(asyncio.current_task()))
        if (me := asyncio.current_task()) is not None:
            self._askers.add(me)
        self._exempt |= callers
        self._waits.ring()
        cancellations: list[CancelledError] = []
        while not self._finished.done():
            try:
                # The first wait is open to an anyio scope of the caller. Later ones are not: a cancelled scope
                # would cancel again in each cycle of the loop.
                with anyio.CancelScope(shield=bool(cancellations)):
                    await asyncio.wait([self._finished])
            except CancelledError as error:
                # A cancelled anyio scope tells again what has brought us here: one event, however busy the loop is.
                told_again = not cancellations and anyio.current_effective_deadline() == -math.inf
                cancellations.append(error)
                if not (told_again and self.interrupted):
                    self.hurry()
        if self._closing and not callers:
            # A service has closed the session, and goes on only now, as we do: see it off.
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([self._main_ended], timeout=self.kill_grace_secs)
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
        self._value = None
        self._startup = _gone
        self._settle = self._release = self._close_now = self._busy_threads = None
        self._waits.on_interrupt = _nothing
        self.on_body_overdue = None
        self.body_task = None
        self._askers = set()

    @property
    def grace_left(self) -> float:
        """What the stop has left of the grace, in seconds; never less than the kill grace."""
        asked = self.coordinator.stop_requested_at
        used = 0.0 if asked is None else time.monotonic() - asked
        return max(self.kill_grace_secs, self.stop_grace_secs - used)

    @property
    def interrupted(self) -> bool:
        """Whether somebody who waits for the end was cancelled."""
        return self._waits.interrupts > 0

    @property
    def finished(self) -> bool:
        """Whether everything has ended."""
        return self._finished.done()

    @property
    def late(self) -> list[str]:
        """Names of what was still running at the end."""
        return self._late

    @property
    def late_stack(self) -> str:
        """Formatted stack of the thread that was still busy at the end."""
        return self._late_stack


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
