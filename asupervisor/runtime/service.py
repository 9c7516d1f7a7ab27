"""Supervised tasks: the record of one, and the group of all of a session's."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup

from asupervisor.errors import WrongEventLoop, describe, is_only
from asupervisor.events import EventSink, ServiceStatus
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.waits import set_done

MOST_RECORDS = 200
"""How many records of services a session keeps; of more, the oldest that ended well are forgotten."""


class Service:
    """The record of one supervised task.

    Awaiting it waits for its end, without raising what it raised: that is the coordinator's. `cancel()` ends just
    this service, without an error.

    Args:
        name: Name of the service; unique names are not required.
        critical: Whether its failure stops everything.
    """

    def __init__(self, name: str, critical: bool = True) -> None:
        self.name = name
        self.critical = critical
        self.state: Literal["starting", "running", "done", "failed"] = "starting"
        self.last_error: BaseException | None = None
        self.cancelled = False
        self.running_in: asyncio.Task[Any] | None = None
        self.scope = anyio.CancelScope()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that it runs in.

        Raises:
            RuntimeError: It has not started yet.
        """
        if self.running_in is None:
            raise RuntimeError(f"service {self.name!r} has not started yet")
        return self.running_in

    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended.done()

    def cancel(self) -> None:
        """End this service by cancellation; not an error. Loop thread only."""
        self.cancelled = True
        self.scope.cancel()

    def __await__(self) -> Any:
        return asyncio.shield(self.ended).__await__()

    def status(self) -> ServiceStatus:
        """A frozen copy of how it stands."""
        return ServiceStatus(
            self.name, self.state, self.critical, None if self.last_error is None else describe(self.last_error)
        )


class ServiceGroup:
    """The supervised tasks of one session, in an anyio task group that never sees an exception of theirs.

    A guard around each one records its exception in the coordinator and returns, so that no ExceptionGroup forms.
    Loop thread only.

    Args:
        name: Whose they are; the first part of the names of tasks.
        coordinator: Where errors go.
        emit: Where events go.
    """

    def __init__(self, name: str, coordinator: Coordinator, emit: EventSink) -> None:
        self._name = name
        self._coordinator = coordinator
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._group: TaskGroup | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._unstarted: dict[Service, Coroutine[Any, Any, None]] = {}
        self.records: list[Service] = []
        self.cancelled = False
        self.closed = False  # the session has ended and has said how: who fails after that is only logged

    async def host(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main` and then wait for all services; in the task that owns the group.

        Cancelling it cancels all of them. Raises KeyboardInterrupt and SystemExit of `main`; those of a service do
        not come out here, since they leave the loop by themselves.
        """
        interrupt: BaseException | None = None
        self._owner = asyncio.current_task()
        self._group = anyio.create_task_group()
        if self.cancelled:
            self._group.cancel_scope.cancel()
        try:
            async with self._group:
                try:
                    await main()
                except (KeyboardInterrupt, SystemExit) as error:  # of `main`, where Ctrl-C was pressed in its turn
                    interrupt = error
                    self.cancel()
        except BaseExceptionGroup:
            pass
        finally:
            self.end()
        if interrupt is not None:
            raise interrupt

    def end(self) -> None:
        """The group has ended; also if it never began."""
        self._group = self._owner = None
        for guard in self._unstarted.values():
            guard.close()  # its task was cancelled before its first step
        self._unstarted.clear()
        for service in self.records:
            set_done(service.ended)

    def cancel(self) -> None:
        """Cancel all of them, and take no more."""
        self.cancelled = True
        if self._group is not None:
            self._group.cancel_scope.cancel()

    def running(self) -> list[Service]:
        """Those that have not ended."""
        return [service for service in self.records if not service.done()]

    def of_task(self, task: asyncio.Task[Any] | None) -> set[Service]:
        """The service that runs in this task, if one does."""
        return {service for service in self.records if task is not None and service.running_in is task}

    def spawn(
        self,
        name: str,
        async_fn: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        critical: bool,
        on_stop: Literal["grace", "cancel"],
    ) -> Service:
        """See `Host.spawn`."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise WrongEventLoop(
                f"{self._name} was asked from another thread or event loop to start {name!r}",
                "Call it on the loop of the session, for example by loop.call_soon_threadsafe.",
            )
        if self._group is None or self.cancelled:
            raise RuntimeError(
                f"{self._name} cannot start {name!r}: its services have ended or were never started. "
                "Enter managed_session() first."
            )
        service = Service(name, critical)
        self._remember(service)
        cancel = service.cancel if on_stop == "cancel" else None
        if cancel is not None:
            self._coordinator.add_stop_callback(cancel)
        self._unstarted[service] = self._guard(service, async_fn, args, cancel)
        self._group.start_soon(self._unstarted.__getitem__, service, name=f"{self._name}:{name}")
        return service

    def _remember(self, service: Service) -> None:
        if len(self.records) >= MOST_RECORDS:
            for old in self.records:
                if old.state == "done" and old.done():
                    self.records.remove(old)
                    break
        self.records.append(service)

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
            if self.cancelled or (self._owner is not None and self._owner.cancelling()):
                return  # by us, or by a loop that cancels all its tasks at its end; this task ends here anyway
            outside = RuntimeError(f"service {service.name!r} was cancelled from outside")
            outside.__cause__ = error
            self._failed(service, outside)
        except (KeyboardInterrupt, SystemExit):
            # asyncio lets these out of the loop at once. Not recorded: they would be raised a second time.
            self._coordinator.request_stop()
            raise
        except GeneratorExit:  # the coroutine is destroyed: the loop was closed under it
            raise
        except BaseException as error:  # also those that are no Exception: those of pytest, for one
            self._failed(service, error)
        finally:
            if service.state == "running":
                service.state = "done"
            if on_stop is not None:
                self._coordinator.remove_stop_callback(on_stop)
            # The record stays in the status; the task and what it referred to need not.
            service.scope = anyio.CancelScope()
            set_done(service.ended)
            # The traceback of its error leads to this frame: no cycle, and nothing that keeps the session alive.
            del self, service, async_fn, args, on_stop

    def _failed(self, service: Service, error: BaseException) -> None:
        clean = is_only(error, self._coordinator.clean_stop_exception_types)
        service.state = "done" if clean else "failed"
        service.last_error = error
        if service.critical and not self.closed:
            self._coordinator.record(error, service.name)
        else:  # or it outlived everything: nobody but the log will see it
            self._emit(
                "service.failed",
                f"{service.name} failed: {describe(error)}",
                level="error",
                service=service.name,
                error=describe(error),
            )
