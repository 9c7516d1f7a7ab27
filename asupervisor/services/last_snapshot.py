"""The snapshot of a save: between two steps; in the end also beside a step that never ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from asupervisor.checkpoint.store import Snapshot
from asupervisor.session.in_flight import InFlight, in_flight

if TYPE_CHECKING:
    from asupervisor.session.session import AsyncSession

_LOOK_SECS = 0.25
PATIENCE_SECS = 5.0
"""How long the end waits for a step that waits for its input, in seconds."""


class SnapshotTaker:
    """Takes snapshots of a session, each in its turn on the device thread.

    In the end, the session's close is the only thing that ends a run that waits for what never comes (an element of
    a queue that nobody feeds), and the turn of the last snapshot would never be there. So it is taken beside such a
    run. While that is in flight, nothing else runs on the device thread: if it writes no variables, the state is
    exactly that after the last step. Otherwise the step may have been applied in part, which is what emergency
    checkpoints are for.

    Args:
        session: The session.
    """

    def __init__(self, session: AsyncSession) -> None:
        self.patience_secs = PATIENCE_SECS
        self.beside: str = ""
        """The run beside which the last one was taken although it writes variables, or an empty string."""
        self._session = session
        self._ending_since: float | None = None

    def ending(self, patience_secs: float) -> None:
        """From now on, no longer than this is waited for a run that waits itself."""
        if self._ending_since is None:
            self._ending_since = monotonic()
        self.patience_secs = patience_secs

    async def take(self, take: Callable[[Any, bool], Snapshot]) -> Snapshot:
        """The next snapshot; cancelling it withdraws it.

        Args:
            take: Takes it; called with the raw session and with whether the state may be that of half a step.

        Raises:
            SessionClosed: The session is closed.
            Exception: What TensorFlow raised.
        """
        in_turn = asyncio.ensure_future(self._session.control(take, False))
        try:
            while True:
                await asyncio.wait({in_turn}, timeout=_LOOK_SECS)
                if in_turn.done():
                    taken: Snapshot = in_turn.result()
                    return taken
                if self._ending_since is None:
                    continue
                run = in_flight(self._session)
                if run is None or not run.may_wait:
                    continue
                if not run.writes or monotonic() - self._ending_since >= self.patience_secs:
                    snapshot = await self._take_beside(run, take)
                    if snapshot is not None:
                        return snapshot
        finally:
            if not in_turn.done():  # it is withdrawn; if it has begun in this very moment, it has a result
                in_turn.cancel()
                in_turn.add_done_callback(_discard)

    async def _take_beside(self, run: InFlight, take: Callable[[Any, bool], Snapshot]) -> Snapshot | None:
        taken: Snapshot = await self._session.side(take, run.writes)
        if in_flight(self._session) == run:
            self.beside = run.what if run.writes else ""
            return taken
        await self._session.side(lambda raw: taken.discard())  # something else has run meanwhile
        return None


def _discard(task: asyncio.Future[Snapshot]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().discard()
