"""The snapshot of a save: between two steps; in the end also beside a step that never ends.

Two threads may then be at it, the device thread in its turn and a side thread beside the run, and only one of their
snapshots can live: each one empties the holders of the one before. A lock decides, held while one is taken::

    beside ── still the same run? ── yes: it is this one; the turn takes none any more
                                     no:  given up; the turn takes it
    turn   ── a snapshot beside has been taken for it? ── no: it is this one; beside none is taken any more
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from asupervisor.checkpoint.store import Snapshot
from asupervisor.errors import SessionClosed
from asupervisor.session.in_flight import InFlight, in_flight

if TYPE_CHECKING:
    from asupervisor.session.session import AsyncSession

Take = Callable[[Any, bool], Snapshot]

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
        self._lock = threading.Lock()
        self._cleaning: set[asyncio.Task[None]] = set()

    def ending(self, patience_secs: float) -> None:
        """From now on, no longer than this is waited for a run that waits itself."""
        if self._ending_since is None:
            self._ending_since = monotonic()
        self.patience_secs = patience_secs

    def take_here(self, raw: Any, take: Take) -> Snapshot | None:
        """One between two steps, without a turn; on the device thread. None in the end, which has one of its own."""
        with self._lock:
            return None if self._ending_since is not None else take(raw, False)

    async def take(self, take: Take) -> Snapshot:
        """The next snapshot; cancelling it withdraws it.

        Args:
            take: Takes it; called with the raw session and with whether the state may be that of half a step.

        Raises:
            SessionClosed: The session is closed.
            Exception: What TensorFlow raised.
        """
        attempt = _Attempt(self._session, self._lock, take)
        in_turn = asyncio.ensure_future(self._session.control(attempt.in_turn))
        try:
            while True:
                await asyncio.wait({in_turn}, timeout=_LOOK_SECS)
                if in_turn.done():
                    in_turn.result()  # raises what it has raised
                    return attempt.received()
                if self._ending_since is None:
                    continue
                run = in_flight(self._session)
                if run is None or not run.may_wait:
                    continue
                if (
                    not run.writes or monotonic() - self._ending_since >= self.patience_secs
                ) and await self._session.side(attempt.beside, run):
                    self.beside = run.what if run.writes else ""
                    return attempt.received()
        finally:
            if not in_turn.done():  # withdrawn; if it has begun in this very moment, it gives up what it takes
                in_turn.cancel()
                in_turn.add_done_callback(_seen)
            self._give_up(attempt)

    def _give_up(self, attempt: _Attempt) -> None:
        left = attempt.give_up()
        if left is not None:
            task = asyncio.ensure_future(self._discard(left))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)

    async def _discard(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(SessionClosed):  # its memory went with the session
            await self._session.side(lambda raw: snapshot.discard())


class _Attempt:
    """The two ways to one snapshot. `taken` is what there is, until somebody has received it."""

    def __init__(self, session: AsyncSession, lock: threading.Lock, take: Take) -> None:
        self._session = session
        self._lock = lock
        self._take = take
        self._decided = False
        self._given_up = False
        self._taken: Snapshot | None = None

    def in_turn(self, raw: Any) -> None:
        """On the device thread: whatever ran there beside which a snapshot was taken, has ended."""
        with self._lock:
            if not self._decided:
                self._decided = True
                self._keep(self._take(raw, False))

    def beside(self, raw: Any, run: InFlight) -> bool:
        """On a side thread, beside a run; whether the snapshot is valid, and is the one."""
        with self._lock:
            if self._decided:
                return False
            taken = self._take(raw, run.writes)
            if in_flight(self._session) != run:  # something else has run meanwhile
                taken.discard()
                return False
            self._decided = True
            self._keep(taken)
            return True

    def _keep(self, taken: Snapshot) -> None:
        self._taken = taken
        if self._given_up:  # looked at after the snapshot was put there: whoever gives up does it the other way round
            taken.discard()

    def received(self) -> Snapshot:
        """The snapshot, for whoever has waited; on the loop."""
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken

    def give_up(self) -> Snapshot | None:
        """Nobody waits any more; on the loop, without the lock. What there is now must be discarded."""
        self._given_up = True
        return self._taken


def _seen(task: asyncio.Future[None]) -> None:
    if not task.cancelled():
        task.exception()
