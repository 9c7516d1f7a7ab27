"""What the device thread is in the middle of, for who must decide whether to wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asupervisor.session.session import AsyncSession


@dataclass(frozen=True, slots=True)
class InFlight:
    """One run, or one step of a stream.

    Attributes:
        what: What it is, for people.
        started: Monotonic time at which it began, in seconds.
        may_wait: Whether it may have to wait for something that never comes: a queue, an iterator.
        writes: Whether it writes variables of the session that asked.
    """

    what: str
    started: float
    may_wait: bool
    writes: bool
    _call: Any = field(repr=False)


def in_flight(session: AsyncSession) -> InFlight | None:
    """The run that the device thread is in, be it of this session or of one that shares the device; any thread.

    None while it is idle, or in something that cannot be told: a function, or a run that is being prepared. Two
    answers are equal as long as nothing has ended in between.
    """
    current = session.executor.device.current
    plan = getattr(current, "plan", None)
    if current is None or plan is None:
        return None
    other = getattr(current, "session", session)
    return InFlight(
        current.describe(),
        current.started,
        bool(plan.may_wait),
        bool(other.raw is session.raw and plan.touches.variables_written),
        current,
    )
