"""What a coordinator is told: reports of errors, who sorts them, and the context manager that makes them."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from asupervisor.errors import StopRequested, describe, errors_in, is_only, telling_line
from asupervisor.events import EventSink

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

MOST_WAITING_REPORTS = 1000
"""How many reports wait for the loop; the others are only counted."""

MOST_FURTHER_ERRORS = 20
"""How many errors after the first one are kept and told; the others are only counted."""


class Report:
    """One error as it was reported: the traceback and context are kept as they were then."""

    __slots__ = ("after_stop", "always", "context", "error", "traceback", "where")

    def __init__(self, error: BaseException, where: str, after_stop: bool, always: bool = False) -> None:
        self.error = error
        self.after_stop = after_stop
        self.always = always  # an error, whatever its class
        self.traceback = error.__traceback__
        self.context = error.__context__
        self.where = where


class Reports:
    """The reports of one coordinator: those that have come, and what they were.

    `put` and `take_back` are for any thread, and take no lock; the rest is done under the coordinator's.

    Args:
        clean_types: See `Coordinator`.
        consequence_types: See `Coordinator`.
    """

    def __init__(
        self,
        clean_types: Iterable[type[BaseException]] | None,
        consequence_types: tuple[type[BaseException], ...],
    ) -> None:
        self._clean_types = None if clean_types is None else tuple(clean_types)
        self._consequence_types = consequence_types
        self._inbox: collections.deque[Report] = collections.deque()
        self.primary: Report | None = None
        self.secondary: list[Report] = []
        self.clean: Report | None = None
        self._more = 0

    def put(self, report: Report) -> None:
        """Add one to the inbox."""
        if len(self._inbox) < MOST_WAITING_REPORTS:  # the first ones count; nobody may fill the memory, or keep us busy
            self._inbox.append(report)
        else:
            self._more += 1

    def take_back(self, report: Report) -> bool:
        """Take one out of the inbox. False: it has been sorted."""
        try:
            self._inbox.remove(report)
        except ValueError:
            return False
        return True

    def sort(self) -> list[tuple[str, Report]]:
        """Put those that have come where they belong; each with the kind of event that it makes, or an empty string."""
        news: list[tuple[str, Report]] = []
        for _ in range(len(self._inbox)):  # what comes meanwhile has rung again
            report = self._inbox.popleft()
            news.append((self._sort(report), report))
        return news

    def _sort(self, report: Report) -> str:
        error = report.error
        if any(error is known.error for known in (self.primary, *self.secondary) if known is not None):
            return ""
        if not report.always:
            if is_only(error, self.clean_types):
                if self.clean is None:
                    self.clean = report
                return "stop.clean"
            if report.after_stop and is_only(error, (*self.clean_types, *self._consequence_types)):
                return "stop.echo"
        if self.primary is None:
            self.primary = report
            return "stop.error"
        if len(self.secondary) >= MOST_FURTHER_ERRORS:
            self._more += 1
            return ""
        self.secondary.append(report)
        return "stop.further_error"

    @property
    def clean_types(self) -> tuple[type[BaseException], ...]:
        """The exceptions that mean a clean end."""
        if self._clean_types is not None:
            return self._clean_types
        # Looked up late: nobody can report TensorFlow's error before TensorFlow is loaded, and this room must not
        # load it.
        errors = getattr(sys.modules.get("tensorflow"), "errors", None)
        end_of_input = getattr(errors, "OutOfRangeError", None)
        return (StopRequested,) if end_of_input is None else (StopRequested, end_of_input)

    def annotate(self) -> None:
        """Attach the later errors to the first one, as notes."""
        if self.primary is None:
            return
        error = self.primary.error
        notes = [f"asupervisor: {other.where} failed, too: {describe(other.error)}" for other in self.secondary]
        if self._more:
            notes.append(f"asupervisor: and {self._more} more")
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                with contextlib.suppress(Exception):  # an exception that is frozen
                    error.add_note(note)

    def forget(self) -> None:
        """Drop what was sorted, so that the tracebacks keep nothing alive."""
        self.primary = self.clean = None
        self.secondary = []

    def clear(self) -> None:
        """Begin again."""
        self._inbox.clear()
        self.forget()
        self._more = 0


def tell(kind: str, report: Report, emit: EventSink) -> None:
    """Tell of a report that was sorted; not under a lock, since a log handler holds locks of its own."""
    error, where = report.error, report.where
    first = errors_in(error)[0]
    short = f"{type(first).__name__}: {telling_line(first)}"
    if kind == "stop.clean":
        emit(kind, f"clean end, told by {where}: {short}", where=where)
    elif kind == "stop.echo":
        emit(
            kind,
            f"{where} ended with the stop: {short}",
            level="debug",
            where=where,
        )
    elif kind == "stop.error":
        emit(
            kind,
            f"{where} failed, a stop is requested: {describe(error)}",
            level="error",
            where=where,
            error=describe(error),
        )
    elif kind:
        emit(
            kind,
            f"{where} failed, too (not raised): {describe(error)}",
            level="warning",
            where=where,
            error=describe(error),
        )


class Reporter(Protocol):
    """What `StopOnException` asks of a coordinator."""

    def report(self, ex: BaseException | ExcInfo | None, where: str) -> None:
        """Report an error."""

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Ask for a stop."""


class StopOnException:
    """Reports an exception of its block to the coordinator and swallows it; see `Coordinator.stop_on_exception`."""

    def __init__(self, coordinator: Reporter) -> None:
        self._coordinator = coordinator

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(exc, Exception):
            self._coordinator.report(exc, "stop_on_exception")
            return True
        if isinstance(exc, KeyboardInterrupt | SystemExit):
            self._coordinator.request_stop()
        return False

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self.__exit__(exc_type, exc, traceback)


def exception_of(ex: BaseException | ExcInfo) -> BaseException:
    """The exception that was reported, as one that can be raised anywhere.

    Raises:
        TypeError: It is none.
    """
    error = ex[1] if isinstance(ex, tuple) and len(ex) == 3 else ex
    if not isinstance(error, BaseException):
        raise TypeError(f"request_stop takes an exception or an exc_info tuple, not {ex!r}")
    if isinstance(error, StopIteration):  # could never leave a coroutine
        boxed = RuntimeError(f"StopIteration was reported: {describe(error)}")
        boxed.__cause__ = error
        return boxed
    return error
