"""Opt-in signal handling that asks for a stop and then lets the host program's own handler act.

Nothing happens at import. A handler that somebody installed before is called after ours, never replaced for good: a
server such as uvicorn keeps its own shutdown. One set of handlers serves all sessions of the process; it is installed
by the first that asks and taken away by the last.

Where the previous handler was the default one (SIGTERM ends the process, SIGINT raises `KeyboardInterrupt`), the first
signal is held back, so that the end can be orderly, and sent again when the last session has ended: the process ends
with the status that its parent expects. A second signal acts at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from asupervisor.errors import WrongEventLoop

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

OnSignal = Callable[[int], None]

_subscribers: tuple[OnSignal, ...] = ()  # replaced, never changed: a handler may run between any two instructions
_previous: dict[int, Any] = {}
_held_back: int | None = None
_received = 0


def subscribe(on_signal: OnSignal) -> None:
    """Have `on_signal(number)` called for SIGINT and SIGTERM until `unsubscribe`.

    Args:
        on_signal: Called in the main thread, inside the signal handler; it must take no lock and must not log.

    Raises:
        WrongEventLoop: Called outside the main thread, where Python allows no signal handlers.
    """
    global _subscribers, _received
    if threading.current_thread() is not threading.main_thread():
        raise WrongEventLoop(
            "handle_signals=True was used outside the main thread", "Enter the session there, or leave signals alone."
        )
    if not _subscribers:
        _received = 0
        for number in STOP_SIGNALS:
            _previous[number] = signal.getsignal(number)
            signal.signal(number, _handle)
    _subscribers = (*_subscribers, on_signal)


def unsubscribe(on_signal: OnSignal) -> None:
    """Undo `subscribe`; the last one restores the previous handlers and sends what was held back."""
    global _subscribers, _held_back
    if on_signal not in _subscribers:
        return
    _subscribers = tuple(other for other in _subscribers if other != on_signal)
    if _subscribers:
        return
    for number in STOP_SIGNALS:
        # Not where somebody has chained to ours meanwhile: it passes on what comes.
        if signal.getsignal(number) is _handle and _previous[number] is not None:
            with contextlib.suppress(ValueError):  # not in the main thread any more
                signal.signal(number, _previous[number])
    held_back, _held_back = _held_back, None
    if held_back is not None:
        signal.raise_signal(held_back)


def _handle(number: int, frame: FrameType | None) -> None:
    global _held_back, _received
    _received += 1
    for on_signal in _subscribers:
        on_signal(number)
    previous = _previous.get(number)
    is_default = previous in (signal.SIG_DFL, signal.default_int_handler)
    if is_default and _subscribers and _received == 1:
        _held_back = number
    elif callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
