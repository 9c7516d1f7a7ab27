"""Waits and steps of a task that brings things down: bounded, and not to be ended by a cancellation.

A cancellation of such a task is remembered as an interrupt: it takes time away from whoever is waited for, and the
wait goes on. Interrupts that follow one another closely are one event, since a loop that is torn down cancels all of
its tasks at once.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any

from asupervisor.events import EventSink
from asupervisor.runtime.joining import keep

ONE_EVENT_SECS = 0.2
"""Interrupts that follow one another so closely are one event."""


class Waits:
    """The waits of one closing task. Loop thread only.

    Args:
        name: Whose they are; the first part of the names of tasks.
        kill_grace_secs: What a step has left after it was cancelled, in seconds.
        on_interrupt: Called for each cancellation of the waiting task.
        record: Where the error of a step goes, and the name of the step.
        emit: Where events go.
    """

    def __init__(
        self,
        name: str,
        kill_grace_secs: float,
        *,
        on_interrupt: Callable[[], None],
        record: Callable[[BaseException, str], None],
        emit: EventSink,
    ) -> None:
        self._name = name
        self._kill_grace_secs = kill_grace_secs
        self.on_interrupt = on_interrupt
        self._record = record
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._interrupted_at = 0.0
        self.interrupts = 0
        self.bell = self._loop.create_future()

    def interrupt(self) -> None:
        """Count an interrupt, and have the waits look again."""
        now = self._loop.time()
        if not self.interrupts or now - self._interrupted_at > ONE_EVENT_SECS:
            self.interrupts += 1
        self._interrupted_at = now
        self.ring()

    def ring(self) -> None:
        """End every wait that has the bell among its futures."""
        bell, self.bell = self.bell, self._loop.create_future()
        set_done(bell)

    async def outwait(self, futures: list[asyncio.Future[Any]], secs: float | None, any_of: bool = False) -> None:
        """Wait for all, or any, of the futures, for at most `secs` seconds; a cancellation does not end it."""
        mode = asyncio.FIRST_COMPLETED if any_of else asyncio.ALL_COMPLETED
        deadline = None if secs is None else self._loop.time() + secs
        while True:
            pending = [future for future in futures if not future.done()]
            if not pending or (any_of and len(pending) < len(futures)):
                return
            left = None if deadline is None else deadline - self._loop.time()
            if left is not None and left <= 0:
                return
            try:
                await asyncio.wait(pending, timeout=left, return_when=mode)
            except CancelledError:
                self.on_interrupt()

    async def bounded(
        self, step: Callable[[], Coroutine[Any, Any, None]], secs: float, name: str, *, can_be_skipped: bool = False
    ) -> bool:
        """Run a step in a task of its own, so that neither a cancellation nor a hang of it takes us along.

        Args:
            step: Coroutine function.
            secs: What it has, in seconds.
            name: Its name in events, errors and its task's name.
            can_be_skipped: Whether a second interrupt cancels it.

        Returns:
            Whether it ended by itself, well or not.
        """
        interrupts = self.interrupts
        task = keep(self._loop.create_task(step(), name=f"{self._name}-{name.replace(' ', '-')}"))
        deadline = self._loop.time() + secs
        while not task.done() and (left := deadline - self._loop.time()) > 0:
            await self.outwait([task, self.bell], left, any_of=True)
            if can_be_skipped and self.interrupts > max(1, interrupts):  # nobody wants to wait any more
                deadline = min(deadline, self._loop.time() + self._kill_grace_secs)
                interrupts = self.interrupts
                task.cancel()
        in_time = task.done()
        if not in_time:
            task.cancel()
            await self.outwait([task], self._kill_grace_secs)
            self._emit("stop.overrun", f"{name} did not end within {secs:g} s", level="error", step=name)
        if not task.done():
            return False
        if task.cancelled():
            self._emit("stop.skipped", f"{name} was skipped", level="warning", step=name)
            return False
        error = task.exception()
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):  # those have left by themselves
            self._record(error, name)
        return in_time


def set_done(future: asyncio.Future[None]) -> None:
    """Set the result of a future that may have one."""
    if not future.done():
        future.set_result(None)
