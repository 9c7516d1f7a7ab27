"""The Coordinator as threads see it: the same stop state, with waits that block.

TensorFlow's own code is handed this one: its QueueRunners and hooks run in threads and call `wait_for_stop` and
`join` there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from asupervisor.errors import StopGraceExceeded
from asupervisor.runtime.coordinator import Coordinator, StopOnException

_LOOK_SECS = 0.02
_MISSED_SECS = 0.5
"""A stop that nobody could tell of (the event loop is gone or stands still) is seen this late, in seconds."""


class BlockingCoordinator:
    """A view on a Coordinator for threads without an event loop.

    Source: `tf.compat.v1.train.Coordinator`.

    Args:
        coordinator: The coordinator.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def wake(self) -> None:
        """Wake who waits for the stop; a stop callback of the coordinator's."""
        self._stopped.set()

    def request_stop(self, ex: Any = None) -> None:
        """See `Coordinator.request_stop`."""
        self._coordinator.request_stop(ex)
        self._stopped.set()

    def should_stop(self) -> bool:
        """See `Coordinator.should_stop`."""
        return self._coordinator.should_stop()

    def clear_stop(self) -> None:
        """See `Coordinator.clear_stop`."""
        self._coordinator.clear_stop()
        self._stopped.clear()

    def stop_on_exception(self) -> StopOnException:
        """See `Coordinator.stop_on_exception`."""
        return self._coordinator.stop_on_exception()

    @property
    def joined(self) -> bool:
        """See `Coordinator.joined`."""
        return self._coordinator.joined

    def raise_requested_exception(self) -> None:
        """See `Coordinator.raise_requested_exception`."""
        self._coordinator.raise_requested_exception()

    def register_thread(self, thread: threading.Thread) -> None:
        """Have `join` wait for a thread as well."""
        self._threads.append(thread)

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads that registered here."""
        return tuple(self._threads)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Block until a stop is requested.

        Args:
            timeout: Longest time to wait, in seconds; None waits without limit.

        Returns:
            Whether a stop was requested.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._coordinator.should_stop():
            left = _MISSED_SECS if deadline is None else min(_MISSED_SECS, deadline - time.monotonic())
            if left <= 0:
                break
            if self._stopped.wait(left) and not self._coordinator.should_stop():
                self._stopped.clear()  # that stop was cleared meanwhile
        return self._coordinator.should_stop()

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Block until the given and the registered threads have ended; see `Coordinator.join`.

        Raises:
            BaseException: The first error that was reported.
            StopGraceExceeded: Threads outlived the grace.
        """
        waiting = list(dict.fromkeys([*self._threads, *(threads or ())]))
        deadline: float | None = None
        while waiting := [thread for thread in waiting if thread.is_alive()]:
            if deadline is None and self._coordinator.should_stop():
                deadline = time.monotonic() + stop_grace_period_secs
            if deadline is not None and time.monotonic() >= deadline:
                break
            waiting[0].join(_LOOK_SECS)
        self._coordinator.raise_requested_exception()
        if waiting and not ignore_live_threads:
            raise StopGraceExceeded(sorted(thread.name for thread in waiting), stop_grace_period_secs)
