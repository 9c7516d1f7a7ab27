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
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import anyio
from anyio.abc import TaskGroup

from asupervisor.errors import StopGraceExceeded, StopRequested, WrongEventLoop
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.joining import cancel_again, keep
from asupervisor.runtime.service import Service

T = TypeVar("T")

KILL_GRACE_SECS = 1.0
"""What is left to something that was cancelled, or that is not waited for politely."""

ONE_EVENT_SECS = 0.1
"""Cancellations that follow one another so closely are one event: a loop that is torn down cancels all of its tasks."""


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
            coroutine is destroyed outside of its loop.
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
        self.services: list[Service] = []
        self.on_body_overdue: Callable[[], None] | None = None
        self.body_task: asyncio.Task[Any] | None = None
        self._startup = startup
        self._settle = settle
        self._release = release
        self._close_now = close_now
        self._busy_threads = stragglers
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.state: Literal["starting", "running", "stopping", "stopped"] = "starting"
        self._group: TaskGroup | None = None
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
        self._services_cancelled = False
        self._interrupts = 0
        self._interrupted_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._late_timers = 0
        self._bell = self.loop.create_future()  # rung when a wait of the closer must look again
        self._unstarted: dict[Service, Coroutine[Any, Any, None]] = {}
        self._exempt: set[Service] = set()  # who waits in `stop` or `join`, and is not waited for
        self._closing: set[Service] = set()  # those of them who wait in `join`
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
            except BaseException:
                self.hurry()
                self.close()
                await self.join()
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
        interrupt: BaseException | None = None
        try:
            self._group = anyio.create_task_group()
            async with self._group:
                try:
                    await self._start_up()
                    if self._startup_error is None:
                        await asyncio.wait([self._stopping])
                except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C was pressed while this task had its turn
                    interrupt = error
                    self.hurry()
        except CancelledError:
            # From outside: `asyncio.run` cancels every task at its end. The services got the same; stop in order.
            self.coordinator.request_stop()
        except BaseExceptionGroup:
            pass  # KeyboardInterrupt or SystemExit of a service: it has already left the loop by itself
        finally:
            self._main_has_ended()
        if interrupt is not None:
            raise interrupt

    def _main_has_ended(self) -> None:
        for guard in self._unstarted.values():
            guard.close()  # it was cancelled before its first step
        self._unstarted.clear()
        for service in self.services:
            _set(service.ended)  # those that did not get there by themselves
        _set(self._main_ended)
        _set(self._started)

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
        _set(self._started)

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
        if _running_loop() is not self.loop:
            raise WrongEventLoop(
                f"{self.name} was asked from another thread or event loop to start {name!r}",
                "Call it on the loop of the session, for example by loop.call_soon_threadsafe.",
            )
        if self._group is None or self._main_ended.done() or self._services_cancelled:
            raise RuntimeError(
                f"{self.name} cannot start {name!r}: its services have ended or were never started. "
                "Enter managed_session() first."
            )
        service = Service(name, critical)
        self.services.append(service)
        cancel = service.cancel if on_stop == "cancel" else None
        if cancel is not None:
            self.coordinator.add_stop_callback(cancel)
        self._unstarted[service] = self._guard(service, async_fn, args, cancel)
        self._group.start_soon(self._unstarted.__getitem__, service, name=f"{self.name}:{name}")
        return service

    async def _guard(
        self,
        service: Service,
        async_fn: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        on_stop: Callable[[], None] | None,
    ) -> None:
        """Run a service; what it raises is recorded here and never reaches the task group."""
        try:
            del self._unstarted[service]
            service.running_in = asyncio.current_task()
            service.state = "running"
            with service.scope:
                await async_fn(*args)
        except CancelledError as error:
            if self._services_cancelled or (self._main_task is not None and self._main_task.cancelling()):
                return  # by us, or by a loop that cancels all its tasks at its end; this task ends here anyway
            outside = RuntimeError(f"service {service.name!r} was cancelled from outside")
            outside.__cause__ = error
            self._failed(service, outside)
        except (KeyboardInterrupt, SystemExit):
            # asyncio lets these out of the loop at once. Not recorded: they would be raised a second time.
            self.coordinator.request_stop()
            raise
        except GeneratorExit:  # the coroutine is destroyed: the loop was closed under it
            raise
        except BaseException as error:  # also those that are no Exception: those of pytest, for one
            self._failed(service, error)
        finally:
            if service.state == "running":
                service.state = "done"
            if on_stop is not None:
                self.coordinator.remove_stop_callback(on_stop)
            # The record stays in the status; the task and what it referred to need not.
            service.scope = anyio.CancelScope()
            _set(service.ended)
            # The traceback of its error leads to this frame: no cycle, and nothing that keeps the host alive.
            del self, service, async_fn, args, on_stop

    def _failed(self, service: Service, error: BaseException) -> None:
        clean = isinstance(error, self.coordinator.clean_stop_exception_types)
        service.state = "done" if clean else "failed"
        service.last_error = error
        if service.critical and not self._finished.done():
            self.coordinator.record(error, service.name)
        else:  # or it outlived everything: nobody but the log will see it
            self.emit(
                "service.failed",
                f"{service.name} failed: {error!r}",
                level="error",
                service=service.name,
                error=repr(error),
            )

    def _running_services(self) -> list[Service]:
        return [service for service in self.services if not service.done() and service not in self._exempt]

    # ------------------------------------------------------------------ the stop

    def _on_stop(self) -> None:
        """The stop was requested; a loop callback, once."""
        if self._stopping.done():
            return
        self.state = "stopping"
        if not self._started.done() or self._startup_error is not None:
            # This aborts the startup: there is nobody to be given grace, and no body to wait for.
            self._cancel_services()
            _set(self._grace_over)
            _set(self._body_done)
            _set(self._settle_wanted)
            _set(self._close_wanted)
        elif not self._services_cancelled:
            self._arm(self.stop_grace_secs)
        _set(self._stopping)

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
        self._cancel_services()
        if not self._body_done.done() and not self._body_knows and self.on_body_overdue is not None:
            self.on_body_overdue()
        _set(self._grace_over)

    def _cancel_services(self) -> None:
        self._services_cancelled = True
        if self._group is not None:
            self._group.cancel_scope.cancel()

    def hurry(self) -> None:
        """Whoever waits for the end was cancelled: no more grace for the services; twice: none for the last words."""
        now = self.loop.time()
        if not self._interrupts or now - self._interrupted_at > ONE_EVENT_SECS:
            self._interrupts += 1
        self._interrupted_at = now
        self.coordinator.request_stop()
        self._on_stop()
        self._ring()
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_services()
        _set(self._grace_over)

    def body_ended(self) -> None:
        """The body of the block has ended: settle and release need not wait for it any more."""
        _set(self._body_done)
        self.close()

    def close(self) -> None:
        """Ask for the end: stop, settle, release. `join` waits for it."""
        self.coordinator.request_stop()
        self.coordinator.drain()
        self._on_stop()  # where an interrupt has hit the drain that should have called it
        _set(self._body_done)
        _set(self._settle_wanted)
        _set(self._close_wanted)

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
        self._interrupts = 2  # no last words: what could be closed has been closed
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
        if self._timer is not None:
            self._timer.cancel()
        self.coordinator.remove_stop_callback(self._on_stop)
        _set(self._settled)
        _set(self._finished)
        if self._abandoned:
            self.coordinator.forget_errors()
            self.coordinator.unbind()
            self._let_go()

    async def _bring_down_in_order(self) -> None:
        await self._outwait([self._stopping], None)
        await self._services_end()
        await self._outwait([self._settle_wanted, self._grace_over], None, any_of=True)
        # At the end of the grace the body was told: let it get out of the block.
        await self._outwait([self._settle_wanted], self.kill_grace_secs)
        await self._last_words()
        _set(self._settled)
        await self._outwait([self._close_wanted], None)
        self._exempt &= self._closing  # who has called `stop()` has had no more than the others until now
        await self._services_end()
        await self._last_words()
        if self._release is not None:
            await self._bounded(self._release, 4 * self.kill_grace_secs, "release")
        running = {service for service in self.services if not service.done()}
        self._late = sorted(service.name for service in running - self._closing)
        for label, stack in self._busy_threads() if self._busy_threads is not None else ():
            self._late.append(label)
            self._late_stack = self._late_stack or stack
        self._finished.set_result(None)

    async def _services_end(self) -> None:
        while running := self._running_services():
            # The bell: the exempt set has grown, by a service that calls stop().
            await self._outwait([*(s.ended for s in running), self._grace_over, self._bell], None, any_of=True)
            if self._grace_over.done():
                break
        deadline = self.loop.time() + self.kill_grace_secs
        while (running := self._running_services()) and (left := deadline - self.loop.time()) > 0:
            await self._outwait([s.ended for s in running], left)
        if not self._exempt and not self._running_services():
            left = max(0.0, deadline - self.loop.time())
            await self._outwait([self._main_ended], left)

    async def _last_words(self) -> None:
        if self._settle is None or not self._ran or self._startup_error is not None or self._interrupts > 1:
            return
        if not self._out_of_words:
            self._out_of_words = not await self._bounded(self._settle, self.grace_left, "final save")

    async def _bounded(self, step: Callable[[], Coroutine[Any, Any, None]], secs: float, name: str) -> bool:
        """Run a step in a task of its own, so that neither a cancellation nor a hang of it takes us along.

        Returns:
            Whether it ended by itself, well or not.
        """
        interrupts = self._interrupts
        task = keep(self.loop.create_task(step(), name=f"{self.name}-{name.replace(' ', '-')}"))
        deadline = self.loop.time() + secs
        while not task.done() and (left := deadline - self.loop.time()) > 0:
            await self._outwait([task, self._bell], left, any_of=True)
            if self._interrupts > max(1, interrupts):  # the bell: a second interrupt, nobody wants to wait
                deadline = min(deadline, self.loop.time() + self.kill_grace_secs)
                interrupts = self._interrupts
                task.cancel()
        in_time = task.done()
        if not in_time:
            task.cancel()
            await self._outwait([task], self.kill_grace_secs)
            self.emit("stop.overrun", f"{name} did not end within {secs:g} s", level="error", step=name)
        if not task.done():
            return False
        if task.cancelled():
            self.emit("stop.skipped", f"{name} was skipped", level="warning", step=name)
            return False
        error = task.exception()
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            self.coordinator.record(error, name)
        return in_time

    def _ring(self) -> None:
        bell, self._bell = self._bell, self.loop.create_future()
        _set(bell)

    async def _outwait(self, futures: list[asyncio.Future[Any]], timeout: float | None, any_of: bool = False) -> None:
        """Wait; a cancellation of this task is remembered as an interrupt and the wait goes on."""
        mode = asyncio.FIRST_COMPLETED if any_of else asyncio.ALL_COMPLETED
        deadline = None if timeout is None else self.loop.time() + timeout
        while True:
            pending = [future for future in futures if not future.done()]
            if not pending or (any_of and len(pending) < len(futures)):
                return
            left = None if deadline is None else deadline - self.loop.time()
            if left is not None and left <= 0:
                return
            try:
                await asyncio.wait(pending, timeout=left, return_when=mode)
            except CancelledError:
                self.hurry()
                self.close()

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
        callers = self._services_of(me)
        self._exempt |= callers
        self._body_knows |= me is self.body_task if self.body_task is not None else not callers
        self._ring()
        self.coordinator.request_stop()
        self.coordinator.drain()
        self._on_stop()
        _set(self._settle_wanted)
        try:
            await asyncio.wait([self._settled])
            self.coordinator.mark_joined()
            self.coordinator.raise_requested_exception()
            late = sorted(service.name for service in self._running_services())
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
        self._closing |= (callers := self._services_of(asyncio.current_task()))
        self._exempt |= callers
        self._ring()
        cancellations: list[CancelledError] = []
        while not self._finished.done():
            try:
                # The first wait is open to an anyio scope of the caller. Later ones are not: a cancelled scope
                # would cancel again in each cycle of the loop.
                with anyio.CancelScope(shield=bool(cancellations)):
                    await asyncio.wait([self._finished])
            except CancelledError as error:
                cancellations.append(error)
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

    def _services_of(self, task: asyncio.Task[Any] | None) -> set[Service]:
        return {service for service in self.services if task is not None and service.running_in is task}

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
        self.on_body_overdue = None
        self.body_task = None
        self._group = None

    @property
    def grace_left(self) -> float:
        """What the stop has left of the grace, in seconds; never less than the kill grace."""
        asked = self.coordinator.stop_requested_at
        used = 0.0 if asked is None else time.monotonic() - asked
        return max(self.kill_grace_secs, self.stop_grace_secs - used)

    @property
    def interrupted(self) -> bool:
        """Whether somebody who waits for the end was cancelled."""
        return self._interrupts > 0

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


def _retrieve_interrupt(task: asyncio.Task[Any]) -> None:
    """KeyboardInterrupt has left the loop by itself: asyncio need not tell that nobody retrieved it from the task."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        task.get_loop().call_exception_handler({"message": "asupervisor failed", "exception": error, "task": task})


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
