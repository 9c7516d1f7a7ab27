"""Who is waited for when a session ends, and who is not because it waits for that end itself."""

from __future__ import annotations

import asyncio
from typing import Any

from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.joining import Worker, still_running
from asupervisor.runtime.service import Service, ServiceGroup


class Awaited:
    """The services of a session, and the threads and tasks that registered with its coordinator. Loop thread only.

    Args:
        services: The services.
        coordinator: With whom the others have registered.
    """

    def __init__(self, services: ServiceGroup, coordinator: Coordinator) -> None:
        self._services = services
        self._coordinator = coordinator
        self.body_task: asyncio.Task[Any] | None = None
        self.body_asks = False  # it waits in `stop`
        self._exempt: set[Service] = set()  # who waits in `stop` or `join`, and is not waited for
        self._closing: set[Service] = set()  # those of them who wait in `join`
        self._stoppers: set[Service] = set()  # who has called `stop`
        self._askers: set[asyncio.Task[Any]] = set()  # tasks that wait in `stop` or `join`

    def stop_asked(self) -> None:
        """The current task waits in `stop`."""
        me = asyncio.current_task()
        callers = self._services.of_task(me)
        self._exempt |= callers
        self._stoppers |= callers
        if me is not None:
            self._askers.add(me)
        self.body_asks |= me is self.body_task if self.body_task is not None else not callers

    def join_asked(self) -> bool:
        """The current task waits in `join`; whether it is a service."""
        me = asyncio.current_task()
        callers = self._services.of_task(me)
        self._closing |= callers
        if me is not None:
            self._askers.add(me)
        self._exempt |= callers
        return bool(callers)

    def stops_are_over(self) -> None:
        """Who waits in `stop` has had no more than the others until now: it is waited for again."""
        self._exempt &= self._closing

    @property
    def closed_by_service(self) -> bool:
        """Whether a service waits in `join`."""
        return bool(self._closing)

    @property
    def all_services_ended(self) -> bool:
        """Whether no service runs, not even one that waits itself."""
        return not self._exempt and not self.services()

    def services(self) -> list[Service]:
        """The services that run and are waited for."""
        return [service for service in self._services.running() if service not in self._exempt]

    def workers(self) -> list[Worker]:
        """Those that registered, but for whoever waits for them here."""
        waiting = {self.body_task, *self._askers} - {None}
        return [
            worker
            for worker in self._coordinator.registered
            if worker not in waiting and getattr(worker, "running_in", None) not in waiting
        ]

    def late_for_stop(self) -> list[str]:
        """Who has outlived the grace, but for who asks: a block that ends meanwhile has them counted again."""
        late = sorted({service.name for service in self.services() if service not in self._stoppers})
        return late + still_running(self.workers())

    def late_for_close(self) -> list[str]:
        """Who runs although all is over."""
        late = sorted(service.name for service in set(self._services.running()) - self._closing)
        return late + still_running(self.workers())

    def forget_workers(self) -> None:
        """Nobody else waits for those that registered."""
        self._coordinator.forget_registered()

    def let_go(self) -> None:
        """Drop the references to tasks."""
        self.body_task = None
        self._askers = set()
