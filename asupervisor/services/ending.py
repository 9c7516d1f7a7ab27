"""How a session ends: what its state is worth, and what the other tasks of its cluster are told."""

from __future__ import annotations

from typing import Literal

from asupervisor.checkpoint.records import Outcome
from asupervisor.errors import errors_in
from asupervisor.runtime import signals
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.services.peers import is_worth_another_start
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.session import AsyncSession


class SessionEnd:
    """The end of one session.

    Args:
        coordinator: The stop state of the session.
        around: What stands around it; knows of signals.
    """

    def __init__(self, coordinator: Coordinator, around: Surroundings) -> None:
        self._coordinator = coordinator
        self._around = around
        self._error: BaseException | None = None
        self._cancelled = False

    def tell(self, error: BaseException | None, *, cancelled: bool) -> None:
        """Tell how the session ends, where its own coordinator does not know."""
        self._error, self._cancelled = error, cancelled

    def forget(self) -> None:
        """Let go of the error: it has a traceback that leads to whoever made us."""
        self._error, self._cancelled = None, False

    @property
    def signalled(self) -> bool:
        """Whether a signal has come."""
        return self._around.signalled or signals.received()

    def outcome(self, session: AsyncSession, interrupted: bool) -> Outcome:
        """For the last save."""
        error = self._error or self._coordinator.error
        if self._cancelled and not isinstance(error, Exception):
            return Outcome.CANCELLED
        if error is not None:
            failed = session.failed_training_run
            return Outcome.STEP_ERROR if any(each is failed for each in errors_in(error)) else Outcome.ERROR
        return Outcome.CANCELLED if interrupted else Outcome.STOPPED

    def leaves_as(self, outcome: Outcome) -> Literal["done", "failed", "lost"]:
        """For the other tasks. Whom a signal has ended, or who has lost somebody, is expected back."""
        error = self._error or self._coordinator.error
        if isinstance(error, Exception):
            return _after(error)
        if self.signalled:
            return "lost"
        return "failed" if outcome is Outcome.CANCELLED else "done"

    def cut_off_as(self, error: BaseException) -> Literal["done", "failed", "lost"]:
        """Likewise, where the end itself has failed, or was cut off."""
        return _after(error) if isinstance(error, Exception) else self.leaves_as(Outcome.CANCELLED)


def _after(error: Exception) -> Literal["failed", "lost"]:
    return "lost" if is_worth_another_start(error) else "failed"
