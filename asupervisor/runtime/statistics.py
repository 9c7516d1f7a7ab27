"""Percentiles of the last few thousand measurements: frozen records for statuses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 2048


def window() -> deque[float]:
    """The last measurements; appending is all that a hot path pays."""
    return deque(maxlen=WINDOW)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How a duration is distributed over the last measurements; zeros where there are none.

    Attributes:
        count: How many measurements they are.
        p50_secs: The median, in seconds.
        p95_secs: Nineteen of twenty are no longer, in seconds.
        p99_secs: Ninety-nine of a hundred are no longer, in seconds.
        max_secs: The longest, in seconds.
    """

    count: int = 0
    p50_secs: float = 0.0
    p95_secs: float = 0.0
    p99_secs: float = 0.0
    max_secs: float = 0.0

    @classmethod
    def of(cls, measurements: deque[float]) -> Percentiles:
        """Compute them; any thread, also while another one appends."""
        ordered = sorted(measurements.copy())
        count = len(ordered)
        if not count:
            return cls()

        def at(share: float) -> float:
            return ordered[min(count - 1, int(count * share))]

        return cls(count, at(0.50), at(0.95), at(0.99), ordered[-1])
