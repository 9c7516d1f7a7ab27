"""What a monitored session says to arguments that cannot be right, and to being entered twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asupervisor.errors import SessionActive, SessionClosed
from asupervisor.monitored import MonitoredSession, MonitoredTrainingSession, SessionCreator

Make = Callable[..., Any]


@pytest.mark.parametrize("make", [MonitoredSession, MonitoredTrainingSession])
@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"recovery": 3}, TypeError, "recovery must be an asupervisor.RecoveryPolicy or None, not 3"),
        ({"stop_grace_period_secs": None}, TypeError, "stop_grace_period_secs must be a number of seconds"),
        ({"stop_grace_period_secs": -1}, ValueError, "stop_grace_period_secs must not be negative"),
        ({"recovery_wait_secs": "1"}, TypeError, "recovery_wait_secs must be a number of seconds"),
    ],
)
def test_arguments_are_checked_at_once(
    counter: Make, make: Callable[..., Any], given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make(graph=counter().graph, **given)


async def test_entered_twice(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph) as sess:
        with pytest.raises(SessionActive, match="is entered already"):
            await sess.open()
        with pytest.raises(SessionActive, match="is entered already"):
            await sess.__aenter__()
        await sess.run(made.train)
    with pytest.raises(SessionClosed, match=r"is closed. It is entered once: make another one"):
        await sess.open()


@pytest.mark.parametrize("made", [None, 5])
async def test_a_creator_that_makes_no_session(counter: Make, made: Any) -> None:
    class Makes(SessionCreator):
        def create_session(self) -> Any:
            return made

    with pytest.raises(TypeError, match=r"create_session of Makes must return an asupervisor.AsyncSession"):
        await MonitoredSession(Makes(), graph=counter().graph).open()
