"""Who has been waiting for input for too long: a step that is starved says so, and names the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from asupervisor.events import EventSink

if TYPE_CHECKING:
    from asupervisor.session.plan import RunPlan


class StarvationWatch:
    """Looks at the device thread from the loop, now and then, while something that may wait is about.

    Args:
        starved_after_secs: When a run that may wait is reported, in seconds.
        current: What the device thread runs for this session now, with `plan`, `started` and `describe`, or None.
        more_to_come: Whether to look again although nothing runs.
        emit: Told, once for each run.
    """

    def __init__(
        self,
        starved_after_secs: float,
        current: Callable[[], Any],
        more_to_come: Callable[[], bool],
        emit: EventSink,
    ) -> None:
        self.starved_after_secs = starved_after_secs
        self._current = current
        self._more_to_come = more_to_come
        self._emit = emit
        self._timer: asyncio.TimerHandle | None = None
        self._reported = 0.0

    def arm(self) -> None:
        """Look soon, and again as long as there is something to see; on the loop."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.starved_after_secs / 2, self._look)

    def disarm(self) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _look(self) -> None:
        self._timer = None
        current = self._current()
        if current is None:
            if self._more_to_come():
                self.arm()
            return
        self.arm()
        plan, started = current.plan, current.started
        waited_secs = monotonic() - started
        if plan is None or not plan.may_wait or waited_secs < self.starved_after_secs or started == self._reported:
            return
        self._reported = started
        self._report(plan, current.describe(), waited_secs)

    def _report(self, plan: RunPlan, what: str, waited_secs: float) -> None:
        sources = sorted(plan.may_wait)
        self._emit(
            "step.starved",
            f"{what} has been running for {waited_secs:.1f} s and may be waiting for {', '.join(sources)}. "
            "Is its producer alive, and fast enough?",
            level="warning",
            run=what,
            sources=sources,
            waited_secs=waited_secs,
        )
