"""The record of one supervised task."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anyio

from asupervisor.events import ServiceStatus


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
            self.name, self.state, self.critical, None if self.last_error is None else repr(self.last_error)
        )
