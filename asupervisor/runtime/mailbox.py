"""How results come back: to an event loop, or to a blocked thread.

There is one attached mailbox per loop in the whole process, whatever number of device threads work for that loop: a
hundred supervisors that finish at the same time wake the loop once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from time import monotonic
from typing import Any

from asupervisor.runtime.statistics import window
from asupervisor.runtime.wakeup import LoopBell


class Mailbox:
    """Results on their way to one loop: many are delivered with one wake-up, whichever threads they come from.

    Args:
        loop: The loop.
        attached: Whether the loop watches an own descriptor for this mailbox, which makes a wake-up cheap; then
            `close` must be called. Otherwise it costs nothing to have, and more to use.
    """

    __slots__ = ("_bell", "box", "lags", "loop", "rung", "rung_at", "users")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, attached: bool = False) -> None:
        self.loop = loop
        self.box: deque[Any] = deque()
        self.rung = False
        self.rung_at = 0.0
        self.lags = window()
        self.users = 0
        self._bell = LoopBell(loop, self._drain, attached=attached)

    def post(self, item: Any) -> None:
        """Put in a finished call, or anything else with `deliver` and `drop`, without waking the loop; any thread."""
        self.box.append(item)

    def ring(self) -> None:
        """See to it that what was posted is delivered; any thread.

        `_drain` takes the flag down before it counts what there is, so an item that was posted before a ring that
        found the flag up is always counted.
        """
        if self.rung:
            return
        self.rung = True
        self.rung_at = monotonic()
        if not self._bell.ring():
            self.rung = False
            self._drop_all()

    def _drain(self) -> None:
        lag = monotonic() - self.rung_at
        self.rung = False
        box = self.box
        count = len(box)  # what comes while we deliver rings again: the loop's other work has its turn before
        if count:
            self.lags.append(lag)
        try:
            while count:
                count -= 1
                box.popleft().deliver()
        finally:
            if count:  # a task raised KeyboardInterrupt or SystemExit through us; the others must not wait for ever
                self.ring()

    def _drop_all(self) -> None:
        while self.box:
            self.box.popleft().drop()

    def close(self) -> None:
        """Stop watching the descriptor; on the loop. What is still posted is delivered all the same."""
        self._bell.close()
        if self.box and not self.loop.is_closed():
            self.rung = False
            self.ring()


class Rendezvous:
    """Where a blocked thread waits for one call."""

    __slots__ = ("_gate", "loop")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def post(self, item: Any) -> None:
        """Release the waiting thread; any thread."""
        self._gate.release()

    def ring(self) -> None:
        """Nothing to do: `post` has done it."""

    def wait(self) -> None:
        """Block this thread until something was posted; an interrupt is raised."""
        self._gate.acquire()


_attached: dict[asyncio.AbstractEventLoop, Mailbox] = {}


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The loop's attached mailbox, or a new one that nobody needs to close; on the loop."""
    return _attached.get(loop) or Mailbox(loop)


def attach(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Have the loop watch a descriptor until `detach`, any number of times; on the loop."""
    forget_closed_loops()
    mailbox = _attached.get(loop)
    if mailbox is None:
        mailbox = _attached[loop] = Mailbox(loop, attached=True)
    mailbox.users += 1
    return mailbox


def detach(mailbox: Mailbox) -> None:
    """Undo one `attach`; any thread."""
    loop = mailbox.loop
    if not loop.is_closed() and asyncio._get_running_loop() is not loop:
        try:
            loop.call_soon_threadsafe(detach, mailbox)  # its readers are not ours to touch
            return
        except RuntimeError:  # closed in this moment
            pass
    mailbox.users -= 1
    if mailbox.users <= 0 and _attached.get(loop) is mailbox:
        del _attached[loop]
        mailbox.close()


def forget_closed_loops() -> None:
    """Give back the descriptors of loops that were closed without `detach`: their programs were cut off."""
    for loop in [loop for loop in tuple(_attached) if loop.is_closed()]:
        mailbox = _attached.pop(loop, None)
        if mailbox is not None:
            mailbox.close()


def is_attached(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop watches a descriptor of ours."""
    return loop in _attached


def forget_all() -> None:
    """In the child of a fork: the loops are the parent's."""
    _attached.clear()
