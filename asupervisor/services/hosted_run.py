"""One session of a supervisor: its parts in a host, and what stands around it.

::

    HostedRun ─ Surroundings: the right to write into the logdir, event file, journal, signals, device thread
        └── Host: two tasks that start everything and bring it down
                └── SupervisedRun: the session and its services
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asupervisor.errors import WrongEventLoop
from asupervisor.runtime.host import Host
from asupervisor.runtime.looper import LooperTask, check_arguments
from asupervisor.runtime.service import Service
from asupervisor.services.parts import Parts
from asupervisor.services.run import SupervisedRun
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.arguments import is_async
from asupervisor.session.session import AsyncSession


class HostedRun:
    """Made on the event loop where a session is to live; the host then starts it and ends it.

    Args:
        parts: What the supervisor is made of.
        master: See `Supervisor.managed_session`.
        config: Likewise.
        start_standard_services: Likewise.
        close_summary_writer: Likewise.
        wait_for_checkpoint: See `Supervisor.prepare_or_wait_for_session`.
        max_wait_secs: Likewise.

    Attributes:
        around: What stands around the session.
        run: The session and its services.
        host: Where they run.
    """

    def __init__(
        self,
        parts: Parts,
        master: str,
        config: Any,
        *,
        start_standard_services: bool,
        close_summary_writer: bool = True,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float = 7200,
    ) -> None:
        settings, store = parts.settings, parts.store
        self._parts = parts
        self._closes_writer = close_summary_writer
        parts.hub.open()
        self.around = around = Surroundings(
            settings.name,
            parts.coordinator,
            parts.hub,
            executor=parts.executor,
            writer=parts.writer,
            logdir=settings.logdir,
            journal=parts.journal,
            handle_signals=parts.handle_signals,
        )
        self.run = run = SupervisedRun(settings, around, store=store, session_manager=parts.session_manager)

        async def startup(host: Host[AsyncSession]) -> AsyncSession:
            await around.open(None if store is None else store.run_id)
            return await run.start(
                host,
                master=master,
                config=config,
                wait_for_checkpoint=wait_for_checkpoint,
                max_wait_secs=max_wait_secs,
                start_standard_services=start_standard_services,
            )

        self.host = Host(
            settings.name,
            parts.coordinator,
            startup=startup,
            settle=run.settle,
            release=self._release,
            close_now=around.close_now,
            stragglers=around.stragglers,
            stop_grace_secs=settings.stop_grace_secs,
            emit=parts.hub.emit,
        )

    async def _release(self) -> None:
        try:
            await self.run.release()
        finally:
            await self.around.close(self._closes_writer)

    def check_caller(self, what: str, sess: Any) -> None:
        """Raise unless a method of the supervisor is called where the session lives, and for this session.

        Args:
            what: The method, for messages.
            sess: The session that it was given, or None.

        Raises:
            WrongEventLoop: It belongs to another event loop.
            ValueError: `sess` is the session of somebody else.
        """
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self.host.loop:
            raise WrongEventLoop(
                f"{what} of {self.host.name} was called off the event loop of its session",
                "Call it on that loop, or from a thread by loop.call_soon_threadsafe.",
            )
        if isinstance(sess, AsyncSession) and sess is not self.run.session:
            raise ValueError(f"{what} of {self.host.name} was given another session than its own")

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> LooperTask:
        """See `Supervisor.loop`."""
        coordinator, clock = self._parts.coordinator, self._parts.settings.clock
        looper = LooperTask(
            coordinator, timer_interval_secs, target, args, kwargs, clock=clock, run_sync=self.run.run_sync
        )
        self.host.spawn(looper.name, looper.run)
        return looper

    def start_soon(self, async_fn: Callable[..., Any], args: tuple[Any, ...], name: str | None) -> Service:
        """See `Supervisor.start_soon`."""
        if inspect.iscoroutine(async_fn):
            raise TypeError(
                "start_soon() takes a coroutine function and its arguments, not a coroutine: leave out the ()"
            )
        check_arguments(async_fn, args, {})
        name = name or str(getattr(async_fn, "__name__", "task"))
        if is_async(async_fn):
            return self.host.spawn(name, async_fn, *args)
        # Whether a plain callable is meant (a partial, a lambda, a decorated function), only its result can tell.
        awaitable = async_fn(*args)
        if not inspect.isawaitable(awaitable):
            raise TypeError(
                f"start_soon() needs a coroutine function: {name} returned {awaitable!r}, which cannot be awaited. "
                "For a plain function use loop(), or asyncio.to_thread."
            )

        async def run() -> None:
            await awaitable

        return self.host.spawn(name, run)

    async def stop(self, threads: Iterable[Any] | None, close_summary_writer: bool, ignore_live_threads: bool) -> None:
        """See `Supervisor.stop`; the session has not ended."""
        coordinator = self._parts.coordinator
        coordinator.request_stop()
        self._closes_writer = close_summary_writer
        try:
            await self.host.stop(ignore_live_threads)
            if threads is not None:
                await coordinator.join(threads, self.host.stop_grace_secs, ignore_live_threads)
        finally:
            if close_summary_writer:
                await self.around.close_writer()
