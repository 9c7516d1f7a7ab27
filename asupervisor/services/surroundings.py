"""What stands around a session and outlives a restart of it: threads, directory, event file, journal, signals.

One `Surroundings` belongs to one entered block. `open` is the first thing that happens there, `close` the last; the
session and its services come and go in between (`services/run.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from asupervisor.checkpoint.lock import LogdirLock
from asupervisor.errors import SessionClosed, describe
from asupervisor.events import EventHub
from asupervisor.runtime import signals
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import KILL_GRACE_SECS
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.journal import Journal


class Surroundings:
    """The device thread, the right to write into the logdir, the event file, the journal and the signal handlers.

    Args:
        name: Whose they are.
        coordinator: What a signal stops.
        hub: Where events go; closed at the end.
        executor: The device thread to use, which is not closed; None for one of our own.
        writer: The summary writer, or None; opened here, closed at the end where that is wanted.
        logdir: The directory that this process alone may write to, or None.
        journal: Whether events are written into the logdir.
        handle_signals: Whether SIGINT and SIGTERM request a stop.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        hub: EventHub,
        *,
        executor: DeviceExecutor | None = None,
        writer: SummaryWriter | None = None,
        logdir: str | None = None,
        journal: bool = True,
        handle_signals: bool = False,
    ) -> None:
        self.coordinator = coordinator
        self.hub = hub
        self.emit = hub.emit
        self.writer = writer
        self.executor = executor or DeviceExecutor(f"{name}/cpu:0", emit=hub.emit)
        self.lock: LogdirLock | None = None
        self.signalled = False
        """Whether a signal has asked for the stop."""
        self._name = name
        self._owns_executor = executor is None
        self._logdir = logdir
        self._wants_journal = journal
        self._handle_signals = handle_signals
        self._writer_is_ours = False  # until the directory is: a second chief must not leave an event file there
        self._journal: asyncio.Task[None] | None = None
        self._journal_file: Journal | None = None

    async def open(self, run_id: str | None = None) -> None:
        """Take everything; cancelling it leaves nothing behind but what `close` gives back.

        Args:
            run_id: Who we are, for another process that wants the logdir.

        Raises:
            LogdirInUse: Another chief writes into the logdir.
            LogdirNotWritable: It cannot be written.
            WrongEventLoop: Signals are to be handled outside of the main thread.
        """
        if self._handle_signals:
            signals.subscribe(self._on_signal)
        if self._logdir is not None:
            await self._take_logdir(self._logdir, run_id)
            if self._wants_journal:
                self._journal_file = journal = Journal(self._logdir, self.hub.subscribe(), emit=self.emit)
                self._journal = asyncio.get_running_loop().create_task(journal.run(), name=f"{self._name}-journal")
        if self.writer is not None:
            self.writer.open()
            self._writer_is_ours = True

    def _on_signal(self, number: int) -> None:
        self.signalled = True
        self.coordinator.request_stop()

    async def _take_logdir(self, logdir: str, run_id: str | None) -> None:
        given_up = threading.Event()
        self.lock = lock = LogdirLock(logdir, run_id=run_id, emit=self.emit)

        def acquire() -> None:
            lock.acquire(cancelled=given_up.is_set)
            if given_up.is_set():  # whoever waited is gone
                lock.release()

        try:
            await self.executor.side(acquire, label=f"lock {logdir}")
        except BaseException:
            given_up.set()
            raise

    async def close(self, close_writer: bool = True) -> None:
        """Give everything back, in order, whatever fails.

        Args:
            close_writer: Whether the summary writer is closed, with a STOP record.
        """
        steps: list[Callable[[], Awaitable[object]]] = [self._end_journal, self._give_back_lock, self._end_threads]
        if close_writer:
            steps.insert(0, self.close_writer)
        for step in steps:
            try:
                await step()
            except Exception as error:
                self.emit(
                    "session.release_failed", f"while closing: {describe(error)}", level="error", error=describe(error)
                )
        # Not at once: a signal that was held back may end the process, and the host has its last steps to do.
        asyncio.get_running_loop().call_soon(signals.unsubscribe, self._on_signal)

    async def close_writer(self) -> None:
        """Write the STOP record and close the event file."""
        if self.writer is not None and self._writer_is_ours and not self.writer.closed:
            self.writer.add_session_log("STOP")
            await self.writer.aclose(KILL_GRACE_SECS)

    async def _end_journal(self) -> None:
        self.emit("session.ended", "session closed")
        self.hub.close()
        if self._journal is not None:
            await asyncio.wait([self._journal], timeout=KILL_GRACE_SECS)

    async def _give_back_lock(self) -> None:
        if self.lock is None:
            return
        try:
            await self.executor.side(self.lock.release, label="unlock logdir")
        except SessionClosed:  # the user's executor, and the user has closed it already
            self.lock.release()

    async def _end_threads(self) -> None:
        if self._owns_executor:
            await self.executor.aclose(KILL_GRACE_SECS)

    def close_now(self) -> None:
        """End what can be ended without waiting, and without a loop; see `Host.abandon`."""
        if self._owns_executor:
            self.executor.shutdown()
        if self.writer is not None:
            self.writer.close_soon()
        self.hub.close()
        if self._journal_file is not None and self._loop_is_closed():
            self._journal_file.close_now()
        if self.lock is not None:
            self.lock.release()
        signals.unsubscribe(self._on_signal)

    def _loop_is_closed(self) -> bool:
        return self._journal is not None and self._journal.get_loop().is_closed()

    def stragglers(self) -> list[tuple[str, str]]:
        """Threads of ours that are still busy, and where."""
        if not self._owns_executor:
            return []
        found = [(f"thread {name}", "") for name in self.executor.device.side.busy()]
        busy = self.executor.busy()
        if busy is not None:
            found.append((f"thread {self.executor.name} (in {busy.label})", busy.stack()))
        return found
