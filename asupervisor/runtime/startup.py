"""The making of what is hosted, and what became of it."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asupervisor.errors import SessionClosed, StopGraceExceeded, StopRequested, describe
from asupervisor.events import EventSink
from asupervisor.runtime.coordinator import Coordinator

T = TypeVar("T")


class Startup(Generic[T]):
    """One startup. Loop thread only.

    Args:
        name: What is started, for messages.
        coordinator: Its stop aborts the startup; what fails in the startup requests it.
        emit: Where events go.
    """

    def __init__(self, name: str, coordinator: Coordinator, emit: EventSink) -> None:
        self._name = name
        self._coordinator = coordinator
        self._emit = emit
        self.value: T | None = None
        self.error: BaseException | None = None
        self.ran = False

    @property
    def succeeded(self) -> bool:
        """Whether there is a value."""
        return self.ran and self.error is None

    async def run(self, make: Callable[[], Awaitable[T]]) -> None:
        """Make the value. Raises a cancellation that no stop has caused."""
        try:
            self.value = await make()
        except CancelledError as error:
            if not self._coordinator.should_stop():
                self.error = error
                self._coordinator.request_stop()
                raise
            self.error = self._aborted()
        except BaseException as error:
            # Reported nowhere: an error of the startup leaves `start` as it is, and is never a clean end. But what
            # was reported before it came first, and the echo of an abortion is no error.
            first = self._coordinator.error
            if first is not None and first is not error:
                self._coordinator.record(error, f"start of {self._name}")
                self.error = first
            elif self._coordinator.should_stop() and isinstance(error, self._coordinator.consequence_types):
                self.error = self._aborted()
            else:
                self.error = error
            self._coordinator.request_stop()
        else:
            self.ran = True
            if self._coordinator.should_stop():
                self.error = self._aborted()

    def never_began(self) -> None:
        """Its task was cancelled before its first step."""
        self.error = CancelledError(f"{self._name} was cancelled before it began")
        self._coordinator.request_stop()

    def _aborted(self) -> BaseException:
        return self._coordinator.error or StopRequested(f"start of {self._name}")

    def take_error(self, kill_grace_secs: float) -> BaseException:
        """Why there is no value: it failed, was aborted, or has not even ended when its kill grace was over."""
        error = self.error or self._coordinator.error
        self.error = None
        return error or StopGraceExceeded([f"start of {self._name}"], kill_grace_secs)

    def tell_of_failed_abort(self, interrupt: BaseException) -> None:
        """What it raised because it was cancelled does not leave, since the cancellation does. It is told."""
        error, self.error = self.error, None
        if isinstance(error, StopRequested | SessionClosed) or not isinstance(error, Exception):
            return
        if error is not self._coordinator.error:  # that one has been told
            self._emit(
                "session.start_failed",
                f"the start of {self._name} was cancelled, and has failed at that: {describe(error)}",
                level="error",
                error=describe(error),
            )
        interrupt.add_note(f"asupervisor: the start failed while it was cancelled: {describe(error)}")
