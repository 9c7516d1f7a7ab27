"""Time as an argument: clocks that can be handed in, and pure timers.

Only loopers and waits sleep; everything else is told what time it is. `asupervisor.testing.ManualClock` is the
other implementation.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import anyio


class Clock(Protocol):
    """What the rooms ask of time."""

    def monotonic(self) -> float:
        """Seconds that never go back; any thread."""

    def time(self) -> float:
        """Wall-clock seconds since the epoch; any thread."""

    async def sleep(self, secs: float) -> None:
        """Wait; cancellable; on the event loop."""


class SystemClock:
    """The real time."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def time(self) -> float:
        """See `Clock.time`."""
        return time.time()

    async def sleep(self, secs: float) -> None:
        """See `Clock.sleep`."""
        await anyio.sleep(secs)


def next_boundary(start: float, interval_secs: float, now: float) -> float:
    """The first fixed boundary `start + k * interval_secs` later than `now`: ticks that were missed are skipped.

    Args:
        start: Monotonic time of the first tick, in seconds.
        interval_secs: Distance of the ticks, in seconds, greater than zero.
        now: Monotonic time, in seconds.

    Returns:
        Monotonic time of the next tick, in seconds.
    """
    ticks = math.floor((now - start) / interval_secs) + 1
    boundary = start + ticks * interval_secs
    return boundary if boundary > now else boundary + interval_secs


class Every:
    """Due at once, then every `every_secs` seconds or every `every_steps` steps; pure.

    Args:
        every_secs: Interval in seconds, or None or 0 for no limit by time.
        every_steps: Interval in steps, or None or 0 for no limit by steps.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        self.every_secs = every_secs or None
        self.every_steps = every_steps or None
        self._started: float | None = None
        self._next_secs = -math.inf
        self._last_step: int | None = None

    def due(self, step: int | None, now: float) -> bool:
        """Whether it is time; the same step is never due twice.

        Args:
            step: The global step, or None where there is none.
            now: Monotonic time, in seconds.
        """
        if self._started is None:
            return True
        if step is not None and step == self._last_step:
            return False
        if self.every_secs is not None and now >= self._next_secs:
            return True
        if self.every_steps is None or step is None or self._last_step is None:
            return False
        return step >= self._last_step + self.every_steps

    def done(self, step: int | None, now: float) -> None:
        """Tell that what was due has been done."""
        if self._started is None:
            self._started = now
        self._last_step = step
        if self.every_secs is not None:
            self._next_secs = next_boundary(self._started, self.every_secs, now)
