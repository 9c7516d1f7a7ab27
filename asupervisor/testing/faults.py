"""Fault points: what a process does to the files of a directory, and an accident at any one of these moments.

Python announces each operation on a file before it is carried out (`sys.addaudithook`), so no seam in the program
is needed: run it once to count its operations, then once for each of them with a crash just before it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PATHS = {
    "open": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "shutil.rmtree": 1,
}


def kill() -> None:
    """End this process as a power cut would: nothing more is run or written."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultPoints:
    """Watches the operations on the files under a directory and strikes before one of them.

    An audit hook cannot be taken off: a process that needs it only for a while calls `disarm`. TensorFlow's own
    file operations, which are made in C++, are not seen.

    Args:
        directory: Where the files lie.
        at: Number of the operation before which to strike, from 1; None counts only.
        strike: What happens there, on the thread that does the operation: `kill`, or a function that raises what
            the operation is to fail with.
        writes_only: Whether opening a file to read it counts as an operation.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        at: int | None = None,
        strike: Callable[[], None] = kill,
        *,
        writes_only: bool = True,
    ) -> None:
        self.operations: list[str] = []
        self._directory = os.path.realpath(directory)
        self._at = at
        self._strike = strike
        self._writes_only = writes_only
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> FaultPoints:
        """Begin to watch."""
        self._armed = True
        sys.addaudithook(self._hook)
        return self

    def disarm(self) -> None:
        """Watch no more."""
        self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        count = _PATHS.get(event)
        if count is None or not self._armed:
            return
        if event == "open" and self._writes_only and not _writes(arguments[2]):
            return
        names = [name for name in map(self._inside, arguments[:count]) if name is not None]
        if not names:
            return
        with self._lock:
            self.operations.append(" ".join([event, *names]))
            struck = len(self.operations) == self._at
        if struck:
            self._strike()

    def _inside(self, path: object) -> str | None:
        """The path relative to the directory, or None if it lies elsewhere."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (links are not to be followed)
        try:
            return str(Path(full).relative_to(self._directory))
        except ValueError:
            return None


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
