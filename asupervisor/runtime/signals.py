"""Opt-in signal handling that asks for a stop and then lets the host program's own handler act.

Nothing happens at import. A handler that somebody installed before is called after ours, never replaced for good:
a server such as uvicorn keeps its own shutdown. The previous handlers come back when the session ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalHandlers:
    """Installs handlers that call `on_signal`, then the handler that was there before.

    Where the previous handler was the default one of SIGINT, which raises `KeyboardInterrupt`, it is not called for
    the first signal: the stop is orderly. A second signal goes to it. For SIGTERM's default, which kills, the same.

    Args:
        on_signal: Called in the main thread, inside the signal handler, with the signal's number; it must take no
            lock and must not log.
        signals: Which signals.
    """

    def __init__(self, on_signal: Callable[[int], None], signals: Iterable[int] = STOP_SIGNALS) -> None:
        self._on_signal = on_signal
        self._signals = tuple(signals)
        self._previous: dict[int, Any] = {}
        self._received = 0
        self._held_back: int | None = None

    def install(self) -> None:
        """Install the handlers.

        Raises:
            RuntimeError: Called outside the main thread, where Python allows no signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "handle_signals=True needs the main thread: enter the session there, or leave signals to the host"
            )
        for number in self._signals:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, and do nothing but pass signals on where somebody has chained to ours."""
        self._on_signal = _ignore
        for number, previous in self._previous.items():
            # A method's bound objects are equal, not identical.
            if signal.getsignal(number) == self._handle and previous is not None:
                with contextlib.suppress(ValueError):  # not in the main thread any more
                    signal.signal(number, previous)

    def raise_held_back(self) -> None:
        """Send the process the signal whose default action was held back for an orderly end; after `restore`.

        The process then ends with the status that its parent expects of that signal.
        """
        number, self._held_back = self._held_back, None
        if number is not None:
            signal.raise_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received += 1
        self._on_signal(number)
        previous = self._previous.get(number)
        is_default = previous in (signal.SIG_DFL, signal.default_int_handler)
        if is_default and self._received == 1 and self._on_signal is not _ignore:
            self._held_back = number
            return
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _ignore(number: int) -> None:
    """What a handler does whose session has ended."""
