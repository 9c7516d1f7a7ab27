"""How a host brings everything down: in order, each step bounded.

::

    stop flag ── services and body have stop_grace_secs ── scope cancelled, body told once ── kill grace
              ── settle (final save), bounded ── close asked for ── release (session, threads), bounded ── finished
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asupervisor.runtime.awaited import Awaited
from asupervisor.runtime.grace import Grace
from asupervisor.runtime.joining import keep, outlast, still_running
from asupervisor.runtime.startup import Startup
from asupervisor.runtime.waits import Waits, set_done


class Milestones:
    """The moments of a host's life, each a future that is done once it has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.started: asyncio.Future[None] = loop.create_future()  # or the start has failed
        self.stopping: asyncio.Future[None] = loop.create_future()
        self.grace_over: asyncio.Future[None] = loop.create_future()  # or somebody is in a hurry
        self.body_done: asyncio.Future[None] = loop.create_future()
        self.settle_wanted: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.close_wanted: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.main_ended: asyncio.Future[None] = loop.create_future()  # of the main task; it may never come


class Closer:
    """The steps of the end. They run in the closer task, a cancellation of which only takes time away from them.

    Args:
        milestones: What it waits for, and what it reaches.
        waits: Its waits.
        awaited: Whom it waits for.
        startup: Without its success there is nothing to settle.
        grace: What they all have.
        settle: See `Host`.
        release: See `Host`.
        close_now: See `Host`.
        stragglers: See `Host`.
    """

    def __init__(
        self,
        milestones: Milestones,
        waits: Waits,
        awaited: Awaited,
        startup: Startup[Any],
        grace: Grace,
        *,
        settle: Callable[[], Coroutine[Any, Any, None]] | None,
        release: Callable[[], Coroutine[Any, Any, None]] | None,
        close_now: Callable[[], None] | None,
        stragglers: Callable[[], list[tuple[str, str]]] | None,
    ) -> None:
        self._at = milestones
        self._waits = waits
        self._awaited = awaited
        self._startup = startup
        self._grace = grace
        self._settle = settle
        self._release = release
        self._close_now = close_now
        self._busy_threads = stragglers
        self._loop = asyncio.get_running_loop()
        self._out_of_words = False  # the last words took too long once: they would again
        self.late: list[str] = []
        self.late_stack = ""

    async def bring_down(self) -> None:
        """Wait for the stop, and do it all."""
        at, waits = self._at, self._waits
        await waits.outwait([at.stopping], None)
        await self._services_end()
        await waits.outwait([at.settle_wanted, at.grace_over], None, any_of=True)
        # At the end of the grace the body was told: let it get out of the block.
        await waits.outwait([at.settle_wanted], self._grace.kill_secs)
        await self._last_words()
        set_done(at.settled)
        await waits.outwait([at.close_wanted], None)
        self._awaited.stops_are_over()
        await self._services_end()
        await self._last_words()
        if self._release is not None:
            in_time = await waits.bounded(self._release, 4 * self._grace.kill_secs, "release")
            close_now = self.take_close_now()
            if not in_time and close_now is not None:
                close_now()  # it hangs, or was cancelled with everything else: what can be closed now, is
        self.late = self._awaited.late_for_close()
        for label, stack in self._busy_threads() if self._busy_threads is not None else ():
            self.late.append(label)
            self.late_stack = self.late_stack or stack
        self._awaited.forget_workers()
        at.finished.set_result(None)

    async def _services_end(self) -> None:
        at, waits, awaited = self._at, self._waits, self._awaited
        while running := awaited.services():
            # The bell: somebody who is not waited for has come, a service that calls stop().
            await waits.outwait([*(s.ended for s in running), at.grace_over, waits.bell], None, any_of=True)
            if at.grace_over.done():
                break
        deadline = self._loop.time() + self._grace.kill_secs
        while (running := awaited.services()) and (left := deadline - self._loop.time()) > 0:
            await waits.outwait([s.ended for s in running], left)
        if awaited.all_services_ended:
            left = max(0.0, deadline - self._loop.time())
            await waits.outwait([at.main_ended], left)
        await self._registered_end()

    async def _registered_end(self) -> None:
        """Threads and tasks that registered with the coordinator have the same grace as the services."""
        workers = self._awaited.workers()
        if not still_running(workers):
            return
        ended = keep(self._loop.create_task(outlast(workers, self._at.stopping, self._grace.left)))
        await self._waits.outwait([ended, self._at.grace_over], None, any_of=True)
        if not ended.done():  # somebody is in a hurry: tasks can be told, threads cannot
            ended.cancel()
            for worker in workers:
                if not isinstance(worker, threading.Thread):
                    worker.cancel()

    async def _last_words(self) -> None:
        if self._settle is None or not self._startup.succeeded or self._waits.interrupts > 1:
            return
        if not self._out_of_words:
            self._out_of_words = not await self._waits.bounded(
                self._settle, self._grace.left, "final save", can_be_skipped=True
            )

    def take_close_now(self) -> Callable[[], None] | None:
        """`close_now`, for the one who calls it; None if somebody has taken it."""
        close_now, self._close_now = self._close_now, None
        return close_now

    def let_go(self) -> None:
        """Drop the references to what is hosted."""
        self._settle = self._release = self._close_now = self._busy_threads = None
