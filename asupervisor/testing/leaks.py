"""What a test left behind: threads, open files, environment variables, signal handlers, tasks, lost exceptions.

A `Snapshot` is taken before a test; `Snapshot.leaks` tells afterwards what came and did not go. What is on its way
out is given a moment.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Everything that can be guarded, besides ``stalls``.
LEAK_KINDS = ("sessions", "threads", "files", "environ", "signals", "tasks", "exceptions")

_IGNORED_FILES = ("/dev/", "/proc/", "/sys/", "/usr/", "/lib", "/memfd:", "anon_inode:inotify")
_IGNORED_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "COLUMNS", "LINES"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def own_thread(thread: threading.Thread) -> bool:
    """Whether asupervisor started this thread."""
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(module.split(".")[0] == "asupervisor" for module in modules)


def live_threads() -> set[threading.Thread]:
    """Threads that run Python code and were started by Python code.

    Native threads that merely called into Python (TensorFlow's own pools do) stay registered with the interpreter
    for ever; they are nobody's leak.
    """
    return {
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and not isinstance(thread, threading._DummyThread) and thread.name != "stall watch"
    }


def open_files() -> dict[int, str]:
    """Open descriptors and what they lead to; empty where the system does not tell."""
    found: dict[int, str] = {}
    try:
        links = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return found
    for link in links:
        try:
            target = str(link.readlink())
        except OSError:  # that was the listing's own
            continue
        if not target.startswith(_IGNORED_FILES) and not target.endswith((".so", ".py", ".pyc")):
            found[int(link.name)] = target
    return found


class Snapshot:
    """How things stood before a test.

    Args:
        kinds: What to look at, of `LEAK_KINDS`; ``tasks`` and ``exceptions`` are the `LossRecorder`'s.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self.kinds = frozenset(kinds)
        self._threads = live_threads()
        self._files = open_files() if "files" in self.kinds else {}
        self._environ = dict(os.environ) if "environ" in self.kinds else {}
        self._signals = self._handlers()

    @staticmethod
    def _handlers() -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in _SIGNALS}

    @contextmanager
    def permitting(self) -> Iterator[None]:
        """What comes in this block belongs to somebody who lives longer than the test."""
        threads, files = live_threads(), open_files() if "files" in self.kinds else {}
        try:
            yield
        finally:
            self._threads |= live_threads() - threads
            if "files" in self.kinds:
                self._files.update(set(open_files().items()) - set(files.items()))

    def leaks(self, patience_secs: float = 2.0) -> list[str]:
        """One line for each thing that is left.

        Args:
            patience_secs: How long to wait for threads and files that are about to end, in seconds.
        """
        found: list[str] = []
        deadline = time.monotonic() + patience_secs
        found += _patiently(self._thread_leaks, deadline)
        if "files" in self.kinds and not self._wider_session():
            found += _patiently(self._file_leaks, deadline)
        if "environ" in self.kinds:
            found += self._environ_leaks()
        if "signals" in self.kinds:
            now = self._handlers()
            found += [
                f"signal handler of {number.name}: {was!r} became {now[number]!r}"
                for number, was in self._signals.items()
                if now[number] != was
            ]
        return found

    def _wider_session(self) -> bool:
        """Whether a session lives on that a fixture of a wider scope holds: it may start threads at any time."""
        return any(thread.is_alive() and own_thread(thread) for thread in self._threads)

    def _thread_leaks(self) -> list[str]:
        if not self.kinds & {"threads", "sessions"}:
            return []
        left = live_threads() - self._threads
        if self._wider_session():
            left = {thread for thread in left if not own_thread(thread)}
        if "threads" not in self.kinds:
            left = {thread for thread in left if own_thread(thread)}
        return sorted(f"thread {t.name!r}{' (daemon)' if t.daemon else ''}" for t in left)

    def _file_leaks(self) -> list[str]:
        return [
            f"descriptor {number} on {target}"
            for number, target in sorted(open_files().items())
            if self._files.get(number) != target
        ]

    def _environ_leaks(self) -> list[str]:
        before, now = self._environ, dict(os.environ)
        return [
            f"environment variable {name}: {before.get(name)!r} became {now.get(name)!r}"
            for name in sorted(before.keys() | now.keys())
            if name not in _IGNORED_VARIABLES and before.get(name) != now.get(name)
        ]


def _patiently(look: Callable[[], list[str]], deadline: float) -> list[str]:
    found = look()
    while found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = look()
    return found


class LossRecorder(logging.Handler):
    """Records what asyncio lets go quietly.

    * Tasks that were still there when their loop was shut down: `asyncio.run`, its `Runner` (pytest-asyncio,
      anyio's plugin and `unittest` use it) cancel them without a word.
    * What asyncio only writes to its log: exceptions that nobody retrieved, callbacks that raised, tasks that
      were destroyed while pending.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.tasks: list[str] = []
        self.exceptions: list[str] = []
        self._original: Callable[[asyncio.AbstractEventLoop], None] | None = None

    def start(self) -> None:
        """Begin to record."""
        logging.getLogger("asyncio").addHandler(self)
        original = getattr(asyncio.runners, "_cancel_all_tasks", None)
        if original is None:  # nothing to hold on to in this Python: tasks go unrecorded
            return
        self._original = original

        def cancel_all_tasks(loop: asyncio.AbstractEventLoop) -> None:
            self.tasks += [f"task {_name(task)}" for task in asyncio.all_tasks(loop)]
            original(loop)

        asyncio.runners._cancel_all_tasks = cancel_all_tasks  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Record no more."""
        logging.getLogger("asyncio").removeHandler(self)
        if self._original is not None:
            asyncio.runners._cancel_all_tasks = self._original  # type: ignore[attr-defined]
            self._original = None

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        self.exceptions.append(self.format(record))

    def take(self) -> tuple[list[str], list[str]]:
        """The tasks and the exceptions since the last call."""
        tasks, exceptions = self.tasks, self.exceptions
        self.tasks, self.exceptions = [], []
        return tasks, exceptions


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    return f"{task.get_name()!r} of {getattr(coroutine, '__qualname__', coroutine)!s}{where}"
