"""One writer for one log directory: an exclusive lock that the operating system gives back when its holder dies.

The lock itself is `filelock`'s, on ``<logdir>/.asupervisor.lock``. Who holds it stands in a file beside it, for the
message of the one who comes second; it has no other meaning, so that a stale one does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

from asupervisor.checkpoint import files as fs
from asupervisor.errors import LogdirInUse, LogdirNotWritable
from asupervisor.events import EventSink, log_only

LOCK_NAME = ".asupervisor.lock"
HOLDER_NAME = ".asupervisor.holder"
_POLL_SECS = 0.05

WAIT_SECS = 5.0
"""How long to wait for another holder, unless told otherwise, in seconds."""


class LogdirLock:
    """The right to write into a log directory; blocking, any thread.

    Args:
        logdir: The directory; it is created where it does not exist.
        run_id: Who we are, for the one who comes second; random by default.
        timeout_secs: How long to wait for another holder, in seconds; None for `WAIT_SECS`.
        emit: Where events go.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        run_id: str | None = None,
        timeout_secs: float | None = None,
        *,
        emit: EventSink = log_only,
    ) -> None:
        self.logdir = Path(logdir).absolute()
        self.run_id = run_id or secrets.token_hex(8)
        self.timeout_secs = WAIT_SECS if timeout_secs is None else timeout_secs
        self._emit = emit
        self._lock: filelock.BaseFileLock | None = None
        self._file: os.stat_result | None = None  # the one that was locked last; None before, and once given back

    @property
    def held(self) -> bool:
        """Whether we hold it."""
        return self._lock is not None and self._lock.is_locked

    def acquire(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Take the lock; nothing else is written before it is ours.

        Args:
            cancelled: Asked every 50 ms while it is waited; True ends the wait as if its time were over.

        Raises:
            LogdirInUse: Somebody else holds it, and still did after `timeout_secs`.
            LogdirNotWritable: The directory cannot be created or written.
        """
        try:
            self.logdir.mkdir(parents=True, exist_ok=True)
            # Not thread-local: taken on one side thread, given back on another.
            lock = filelock.FileLock(self.logdir / LOCK_NAME, thread_local=False)
            deadline = time.monotonic() + self.timeout_secs
            while True:
                try:
                    lock.acquire(timeout=0)
                    break
                except filelock.Timeout:
                    if time.monotonic() >= deadline or (cancelled is not None and cancelled()):
                        raise self._in_use() from None
                time.sleep(_POLL_SECS)
            self._lock = lock
            self._file = (self.logdir / LOCK_NAME).stat()
            self._tell()
        except OSError as error:
            self._let_go()
            raise LogdirNotWritable(str(self.logdir), error.strerror or str(error)) from error

    def ensure(self) -> bool:
        """Make sure that the lock is still that of the directory's path, before something is written.

        Where the directory was removed while we ran, or another one was put in its place, our lock is on a file
        that nobody else finds; it is taken again in the new place. Where that failed, the next call tries it again.

        Returns:
            Whether it had to be taken again: what the path leads to now may be another run's.

        Raises:
            LogdirInUse: Somebody else was quicker there.
            OSError: The directory cannot be written.
        """
        if self._file is None or (self.held and self._same_file()):
            return False
        self._let_go()
        self.acquire(cancelled=lambda: True)
        return True

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held. Never raises."""
        self._let_go()
        self._file = None

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            holder = self._holder()
            if holder.get("pid") == os.getpid() and holder.get("run_id") == self.run_id:
                (self.logdir / HOLDER_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: in the child of a fork it is not ours
            lock.release(force=True)

    def _same_file(self) -> bool:
        try:
            there = (self.logdir / LOCK_NAME).stat()
        except OSError:
            return False
        return self._file is not None and os.path.samestat(self._file, there)

    def _tell(self) -> None:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "run_id": self.run_id}
        fs.write_atomically(self.logdir / HOLDER_NAME, json.dumps(holder))

    def _holder(self) -> dict[str, Any]:
        try:
            holder = json.loads((self.logdir / HOLDER_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _in_use(self) -> LogdirInUse:
        holder = self._holder()
        pid = holder.get("pid")
        return LogdirInUse(str(self.logdir), str(holder.get("host", "?")), pid if isinstance(pid, int) else None)
