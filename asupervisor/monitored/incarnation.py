"""One TensorFlow session of a monitored session, with its services: from a creation or recovery to the next.

Each incarnation is hosted by itself and has a stop state of its own: what fails in it may be recovered from, in which
case the monitored session, its hooks and the body never stop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from asupervisor.events import ServiceStatus, Status
from asupervisor.hooks.chain import HookChain, HookedPlans
from asupervisor.monitored.creators import Prepared, SessionCreator
from asupervisor.runtime.blocking_view import BlockingCoordinator
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.services.feeders import make_feeders
from asupervisor.services.run import SupervisedRun
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.session import AsyncSession


class Incarnation:
    """A session, its coordinator, its services, and the plans with hooks.

    Args:
        number: 0 for the first one.
        around: What stands around the monitored session.
        creator: Makes the session.
        prepared: What a creator of ours has prepared, or None for one of the user's own.
        graph: The graph.
        chain: The hooks.
        services: Whether to start the services of a training session.
        stop_grace_secs: See `MonitoredSession`.
    """

    def __init__(
        self,
        number: int,
        around: Surroundings,
        creator: SessionCreator,
        prepared: Prepared | None,
        graph: tf.Graph,
        chain: HookChain,
        services: bool,
        stop_grace_secs: float,
    ) -> None:
        self.number = number
        self.coordinator = Coordinator((), consequence_types=(tf.errors.CancelledError,), emit=around.emit)
        self.run: SupervisedRun | None = None
        self._around = around
        self._creator = creator
        self._prepared = prepared
        self._graph = graph
        self._chain = chain
        self._services = services
        self._plain: AsyncSession | None = None
        self._hooked: AsyncSession | None = None
        self._blocking = BlockingCoordinator(self.coordinator)
        self._lost = False
        self._host: Host[AsyncSession] = Host(
            "MonitoredSession" if number == 0 else f"MonitoredSession, recovery {number}",
            self.coordinator,
            startup=self._start,
            settle=self._settle,
            release=self._release,
            stop_grace_secs=stop_grace_secs,
            emit=around.emit,
        )

    # ------------------------------------------------------------------ start

    async def start(self) -> None:
        """Create the session, start its services, and tell the hooks."""
        await self._host.start()

    async def _start(self, host: Host[AsyncSession]) -> AsyncSession:
        self._plain = session = await self._create(host)
        if not self._chain.runs_from_loop:
            self._hooked = session.sibling(lambda plans: HookedPlans(self._chain, plans, session.raw))
        await self._chain.after_create_session(session, self.coordinator, self._blocking, self.on_device)
        return session

    async def _create(self, host: Host[AsyncSession]) -> AsyncSession:
        prepared = self._prepared
        if prepared is None:
            return await self._create_by_user(host)
        self.run = run = SupervisedRun(
            prepared.settings,
            self._around,
            store=prepared.store,
            session_manager=prepared.manager,
            coordinator=self.coordinator,
        )
        creator: Any = self._creator
        session = await run.start(
            host,
            master=creator.master,
            config=creator.config,
            wait_for_checkpoint=False,
            max_wait_secs=prepared.max_wait_secs,
            start_standard_services=False,
        )
        self._plain = session
        if self._services:
            run.start_standard_services(host, session)
            await run.first_save()
        run.start_queue_runners(host, session, None)
        return session

    async def _create_by_user(self, host: Host[AsyncSession]) -> AsyncSession:
        create = self._creator.create_session

        def call() -> Any:
            with self._graph.as_default():
                return create()

        if inspect.iscoroutinefunction(create):
            made = await create()
        else:
            made = await self._around.executor.side(call, label="create_session")
            if inspect.isawaitable(made):
                made = await made
        if not isinstance(made, AsyncSession):
            made = AsyncSession(
                made,
                self._around.executor,
                coordinator=self.coordinator,
                global_step=tf.compat.v1.train.get_global_step(made.graph),
                emit=self._around.emit,
                name="MonitoredSession",
            )
        self._plain = made
        for feeder in make_feeders(made, None, coordinator=self.coordinator, emit=self._around.emit):
            host.spawn(feeder.name, feeder.run)
        return made

    async def on_device(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on the device thread with the graph entered."""

        def call() -> Any:
            with self._graph.as_default():
                return fn(*args)

        return await self._around.executor.call(call, label=getattr(fn, "__qualname__", "hook"))

    async def on_side(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on a side thread."""
        return await self._around.executor.side(fn, *args)

    # ------------------------------------------------------------------ use

    @property
    def plain(self) -> AsyncSession:
        """The session without hooks."""
        assert self._plain is not None
        return self._plain

    @property
    def hooked(self) -> AsyncSession | None:
        """The session whose runs have the hooks, where none of them needs the event loop."""
        return self._hooked

    @property
    def usable(self) -> bool:
        """Whether it can be run."""
        return self._plain is not None and not self._plain.closed and not self._lost

    # ------------------------------------------------------------------ the end

    async def end(self, *, lost: bool = False) -> None:
        """Settle and close; wait for it.

        Args:
            lost: The session is given up: its state is not worth a save.
        """
        self._lost = self._lost or lost
        self._host.close()
        cancellations = await self._host.join()
        if cancellations:
            raise cancellations[-1]

    async def _settle(self) -> None:
        if self.run is not None and not self._lost:
            await self.run.settle()

    async def _release(self) -> None:
        if self.run is not None:
            await self.run.release()
        elif self._plain is not None:
            await self._plain.close_raw(KILL_GRACE_SECS)
        # Threads that a hook has started with the coordinator: the closed session has freed them.
        for thread in self._blocking.threads:
            if thread.is_alive():
                await self._around.executor.side(thread.join, KILL_GRACE_SECS, label=f"join {thread.name}")

    def status(self) -> Status | None:
        """How its session stands, where a creator of ours made it."""
        return None if self.run is None else self.run.status(self._host)

    def services(self) -> tuple[ServiceStatus, ...]:
        """How its services stand."""
        return tuple(service.status() for service in self._host.services)
