"""Opt-in signal handling that asks for a stop and then lets the host program's own handler act.

Nothing happens at import. A handler that somebody installed before is called after ours, never replaced for good: a
server such as uvicorn keeps its own shutdown. One set of handlers serves all sessions of the process; it is installed
by the first that asks and taken away by the last.

Where the previous handler was the default one (SIGTERM ends the process, SIGINT raises `KeyboardInterrupt`, or cancels
the main task under `asyncio.run`), the first signal is held back, so that the end can be orderly, and sent again when
the last session has ended: the process ends with the status that its parent expects. A second signal acts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from asupervisor.errors import WrongEventLoop

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

OnSignal = Callable[[int], None]

_subscribers: tuple[OnSignal, ...] = ()  # replaced, never changed: a handler may run between any two instructions
_previous: dict[int, list[Any]] = {number: [] for number in STOP_SIGNALS}  # more than one: see `unsubscribe`
_passing: dict[int, int] = dict.fromkeys(STOP_SIGNALS, 0)  # how deep in the chain of handlers we are
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
            before = signal.getsignal(number)
            if before is not _handle:
                _previous[number].append(before)
                signal.signal(number, _handle)
    _subscribers = (*_subscribers, on_signal)


def subscribed() -> int:
    """How many there are."""
    return len(_subscribers)


def received() -> bool:
    """Whether a signal has come to those who are subscribed."""
    return bool(_subscribers) and _received > 0


def unsubscribe(on_signal: OnSignal, *, resend: bool = True) -> None:
    """Undo `subscribe`; the last one restores the previous handlers and sends what was held back.

    Args:
        on_signal: What was subscribed.
        resend: Whether to send it. Otherwise the caller ends the process itself.
    """
    global _subscribers, _held_back
    if on_signal not in _subscribers:
        return
    _subscribers = tuple(other for other in _subscribers if other != on_signal)
    if _subscribers:
        return
    for number in STOP_SIGNALS:
        # Not where somebody has chained to ours meanwhile: ours stays below theirs and passes on what comes, and may
        # be installed a second time, above theirs.
        before = _previous[number][-1]
        if signal.getsignal(number) is _handle and before is not None:
            with contextlib.suppress(ValueError):  # not in the main thread any more
                signal.signal(number, before)
                _previous[number].pop()
    held_back, _held_back = _held_back, None
    if held_back is not None and resend:
        signal.raise_signal(held_back)


def _handle(number: int, frame: FrameType | None) -> None:
    global _held_back, _received
    depth = _passing[number]
    before = _previous[number]
    previous = before[-1 - depth] if depth < len(before) else None
    if depth == 0:
        _received += 1
        for on_signal in _subscribers:
            on_signal(number)
        if _subscribers and _received == 1 and _is_default(previous):
            _held_back = number
            return
    _passing[number] = depth + 1
    try:
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
    finally:
        _passing[number] = depth


def _is_default(handler: Any) -> bool:
    if isinstance(handler, functools.partial):  # what asyncio.run installs where the default one was
        function = getattr(handler.func, "__func__", None)
        return function is not None and function is getattr(asyncio.Runner, "_on_sigint", None)
    return handler in (signal.SIG_DFL, signal.default_int_handler)
