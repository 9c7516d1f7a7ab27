"""Time that moves only when a test says so."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

#: Turns of the event loop that `ManualClock.advance` grants after each waking: enough for a woken task to do
#: its work on the loop and to go to sleep again.
_SETTLE_TURNS = 16


@dataclass(order=True, slots=True)
class _Sleeper:
    due: float
    order: int
    loop: asyncio.AbstractEventLoop = field(compare=False)
    woken: asyncio.Future[None] = field(compare=False)


class ManualClock:
    """A `asupervisor.clock.Clock` for tests: it stands still until it is told to move.

    Reading it is allowed on any thread. Sleepers wake in the order of their deadlines, and each one reads its own
    deadline as the time, however far the clock moves at once. Work that a woken task hands to a thread is not
    waited for: that is what `sleepers` is for.

    Args:
        start: What `monotonic` reads at first, in seconds.
        epoch: What `time` reads at first, in seconds since the epoch.
    """

    def __init__(self, start: float = 1000.0, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch - start
        self._order = 0
        self._lock = threading.Lock()  # held for a few list operations, never across a wait
        self._asleep: list[_Sleeper] = []
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._now

    def time(self) -> float:
        """See `Clock.time`."""
        return self._epoch + self._now

    async def sleep(self, secs: float) -> None:
        """See `Clock.sleep`; ends when the clock has been moved by `secs`."""
        if secs <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            self._order += 1
            sleeper = _Sleeper(self._now + secs, self._order, loop, loop.create_future())
            self._asleep.append(sleeper)
        self._tell_watchers()
        try:
            await sleeper.woken
        finally:
            with self._lock:
                if sleeper in self._asleep:  # cancelled
                    self._asleep.remove(sleeper)
            self._tell_watchers()

    async def advance(self, secs: float) -> None:
        """Move the time, stopping at each deadline on the way so that a woken task may sleep again.

        Args:
            secs: By how much, in seconds.

        Raises:
            ValueError: `secs` is negative.
        """
        if secs < 0:
            raise ValueError(f"time does not go back: {secs}")
        target = self._now + secs
        while True:
            await self._settle()
            with self._lock:
                due = min((s for s in self._asleep if s.due <= target), default=None)
                if due is None:
                    self._now = target
                    break
                self._asleep.remove(due)
                self._now = max(self._now, due.due)
            self._wake(due)
        await self._settle()

    def jump(self, secs: float) -> None:
        """Move the time at once and wake everybody who is due, without waiting; any thread.

        This is what a suspended machine looks like: ticks on the way are missed.

        Args:
            secs: By how much, in seconds.
        """
        with self._lock:
            self._now += secs
            due = sorted(s for s in self._asleep if s.due <= self._now)
            self._asleep = [s for s in self._asleep if s.due > self._now]
        for sleeper in due:
            self._wake(sleeper)

    async def sleepers(self, count: int, timeout_secs: float = 20.0) -> tuple[float, ...]:
        """Wait until at least `count` tasks sleep on this clock.

        Args:
            count: How many.
            timeout_secs: Real seconds after which to give up.

        Returns:
            What each of them has still to sleep, in seconds, the first to wake first.

        Raises:
            TimeoutError: They did not come to sleep.
        """
        changed = asyncio.Event()
        watcher = (asyncio.get_running_loop(), changed)
        with self._lock:
            self._watchers.append(watcher)
        try:
            async with asyncio.timeout(timeout_secs):
                while True:
                    changed.clear()
                    remaining = self.remaining()
                    if len(remaining) >= count:
                        return remaining
                    await changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{count} tasks should sleep on this clock, but after {timeout_secs:g} s there are "
                f"{len(self.remaining())}"
            ) from None
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def remaining(self) -> tuple[float, ...]:
        """What each sleeper has still to sleep, in seconds, the first to wake first; any thread."""
        with self._lock:
            return tuple(s.due - self._now for s in sorted(self._asleep))

    async def _settle(self) -> None:
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)

    def _wake(self, sleeper: _Sleeper) -> None:
        try:
            sleeper.loop.call_soon_threadsafe(_set_if_pending, sleeper.woken)
        except RuntimeError:  # its loop is closed: nobody sleeps there any more
            pass

    def _tell_watchers(self) -> None:
        with self._lock:
            watchers = tuple(self._watchers)
        for loop, changed in watchers:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # as above
                pass


def _set_if_pending(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
