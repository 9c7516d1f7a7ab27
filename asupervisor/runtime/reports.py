"""What a coordinator is told: reports of errors, and the context manager that makes them."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from asupervisor.errors import describe

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class Report:
    """One error as it was reported: the traceback and context are kept as they were then."""

    __slots__ = ("after_stop", "context", "error", "traceback", "where")

    def __init__(self, error: BaseException, where: str, after_stop: bool) -> None:
        self.error = error
        self.after_stop = after_stop
        self.traceback = error.__traceback__
        self.context = error.__context__
        self.where = where


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
