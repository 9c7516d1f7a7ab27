"""The time that services and body have after the stop, and its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asupervisor.runtime.coordinator import Coordinator


class Grace:
    """The grace of one session. Loop thread only.

    Args:
        secs: How long it is, in seconds.
        kill_secs: What is left to something that was cancelled, in seconds.
        coordinator: Knows when the stop was requested.
    """

    def __init__(self, secs: float, kill_secs: float, coordinator: Coordinator) -> None:
        self.secs = secs
        self.kill_secs = kill_secs
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._late_timers = 0

    def start(self, on_over: Callable[[], None]) -> None:
        """Start the clock: `on_over` is called when the grace is over."""
        due = self._loop.time() + self.secs
        self._timer = self._loop.call_later(self.secs, self._on_due, due, on_over)

    def _on_due(self, due: float, on_over: Callable[[], None]) -> None:
        # A loop that stood still (a test runner between two tests) has given nobody any time: give it again.
        late = self._loop.time() - due
        if late > max(0.2, 0.2 * self.secs) and self._late_timers < 3:
            self._late_timers += 1
            self.start(on_over)
            return
        on_over()

    def cancel(self) -> None:
        """Stop the clock; nobody is called."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def left(self) -> float:
        """What the stop has left of it, in seconds; never less than `kill_secs`."""
        asked = self._coordinator.stop_requested_at
        used = 0.0 if asked is None else time.monotonic() - asked
        return max(self.kill_secs, self.secs - used)
