"""The two bells of a hop: one wakes a sleeping thread, the other one wakes an event loop.

Both use an eventfd where the system has one, which is about half the price of a lock or of
`call_soon_threadsafe`, and fall back to exactly these two where it has none.

A file descriptor may be handed out again the moment it is closed, and a late ring would then write into somebody
else's file. So each bell closes and writes under one lock, which nobody holds for longer than one system call.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

_HAS_EVENTFD = hasattr(os, "eventfd")


class Doorbell:
    """Wakes one thread that waits; any number of threads ring. Rings are not counted: a wait may return early."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC) if _HAS_EVENTFD else -1
        self._gate = threading.Lock()
        self._gate.acquire()

    def ring(self) -> None:
        """Let the waiting thread, or the next one to wait, go on; any thread."""
        with self._guard:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            elif self._gate.locked():
                self._gate.release()

    def wait(self) -> None:
        """Sleep until the bell has been rung since the last wait; only ever one thread at a time."""
        if self._fd >= 0:
            os.eventfd_read(self._fd)
        else:
            self._gate.acquire()

    def close(self) -> None:
        """Give the descriptor back; called by the waiting thread when it will wait no more."""
        with self._guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


class LoopBell:
    """Wakes one event loop, which then calls `on_ring` once for any number of rings before it.

    Args:
        loop: The loop to wake.
        on_ring: Called on that loop.
        attached: Whether the loop watches an own descriptor for this bell (cheap per ring; `close` must be
            called on the loop). Otherwise each ring is a `call_soon_threadsafe`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None], *, attached: bool) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._guard = threading.RLock()
        self._fd = -1
        if attached and _HAS_EVENTFD:
            fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                loop.add_reader(fd, self._on_readable)
            except NotImplementedError:  # a proactor loop watches no descriptors
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise
            else:
                self._fd = fd

    def ring(self) -> bool:
        """Wake the loop; any thread. False when the loop is closed, so that nobody will ever come."""
        with self._guard:
            if self._fd >= 0:
                if self._loop.is_closed():
                    return False
                os.eventfd_write(self._fd, 1)
                return True
        try:
            self._loop.call_soon_threadsafe(self._on_ring)
        except RuntimeError:
            return False
        return True

    def _on_readable(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        self._on_ring()

    def close(self) -> None:
        """Stop watching; on the loop, or anywhere once the loop is closed. Later rings find the slow way."""
        with self._guard:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)

    def __del__(self) -> None:
        # A loop that still watches it holds it: so that loop has gone, and left the descriptor open.
        if self._fd >= 0:
            os.close(self._fd)


class Ending:
    """An end that a thread signals once and that event loops may await with a time limit."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.reached = False

    def signal(self) -> None:
        """It has ended; any thread, any number of times."""
        with self._guard:
            self.reached = True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_set_if_not_done, future)
            except RuntimeError:  # that loop is closed: its waiter is gone
                pass

    async def wait(self, timeout_secs: float) -> bool:
        """Whether the end came within `timeout_secs`; cancellation leaves nothing behind."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (loop, future)
        with self._guard:
            if self.reached:
                return True
            self._waiters.append(entry)
        try:
            await asyncio.wait((future,), timeout=max(0.0, timeout_secs))
        finally:
            with self._guard:
                if entry in self._waiters:
                    self._waiters.remove(entry)
        return self.reached


def _set_if_not_done(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)
