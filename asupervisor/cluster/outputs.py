"""What several processes print, as one readable stream: whole lines, each with the name of its task before it.

The loop reads the pipes and never writes; one thread writes and may block, on a terminal that is held by Ctrl-S or on
a slow disk. Nothing is dropped for that: when too much waits to be written the pipes are not read any more, so the
processes wait in their own `write`, as they would on a terminal.

Bytes stay as they are, invalid UTF-8 included. What ends in a carriage return is one state of a progress bar, and is
overwritten by the next one on a terminal; here it becomes a line of its own, at most once a second, and the last state
always. Lines that do not end are cut after 64 KiB. Log files get every byte, without the names.
"""

from __future__ import annotations

import asyncio
import collections
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

LONGEST_LINE_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
#: A line with its end. A carriage return that comes last waits: it may be half of an end.
_LINE = re.compile(rb"[^\r\n]*+(?:\r*\n|\r+(?=[^\r\n]))")


class LineSplitter:
    """Cuts a stream into whole lines, ends included: put together again they are the stream."""

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self._longest = longest_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now; a part of a line that is too long counts as one."""
        whole, at = self._rest + data, 0
        lines: list[bytes] = []
        while found := _LINE.match(whole, at):
            lines += self._cut(found[0])
            at = found.end()
        *parts, self._rest = self._cut(whole[at:])
        return lines + parts

    def flush(self) -> list[bytes]:
        """What is left: a line without an end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _cut(self, line: bytes) -> Iterator[bytes]:
        while len(line.rstrip(b"\r\n")) > self._longest:
            # Not inside a character: before its first byte, where it has one.
            near = range(self._longest, max(self._longest - 4, 0), -1)
            at = next((at for at in near if line[at] & 0xC0 != 0x80), self._longest)
            yield line[:at]
            line = line[at:]
        yield line


class Prefixer:
    """Turns the lines of one stream into what is shown of them.

    Args:
        prefix: Stands before each line.
        progress_secs: How often a new state of a progress bar is shown at most, in seconds.
        now: A monotonic time, in seconds.
    """

    def __init__(self, prefix: bytes, progress_secs: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._progress_secs = progress_secs
        self._now = now
        self._progress = b""  # the state that was not shown yet
        self._next_secs = float("-inf")

    def show(self, line: bytes) -> bytes:
        """What to show now that this line, its end included, has come."""
        text = line.rstrip(b"\r\n")
        if not line.endswith(b"\r"):
            text = text or self._progress  # a newline alone ends the line that the bar is on
            self._progress = b""
            return self._prefix + text + b"\n"
        self._progress = text or self._progress
        if not self._progress or self._now() < self._next_secs:
            return b""
        self._next_secs = self._now() + self._progress_secs
        return self.finish()

    def finish(self) -> bytes:
        """What to show when nothing more comes."""
        text, self._progress = self._progress, b""
        return self._prefix + text + b"\n" if text else b""


class Target(Protocol):
    """Where bytes go; used by the writing thread only."""

    name: str

    def write(self, data: bytes) -> None:
        """Write all of it; may block."""

    def close(self) -> None:
        """Nothing more comes."""


class Descriptor:
    """An open file descriptor of somebody else's, blocking or not."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name

    def write(self, data: bytes) -> None:
        """See `Target`."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.number, view) :]
            except BlockingIOError:
                select.select([], [self.number], [])

    def close(self) -> None:
        """Leave it open: it is not ours."""


class LogFile:
    """A file that is appended to, without a buffer: what was written survives this process."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._number: int | None = None

    def write(self, data: bytes) -> None:
        """See `Target`."""
        if self._number is None:
            self._number = os.open(self.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        view = memoryview(data)
        while view:
            view = view[os.write(self._number, view) :]

    def close(self) -> None:
        """See `Target`."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


class Writer:
    """The thread that writes.

    A target that fails, because the reader of a pipe is gone or the disk is full, is told once; what comes for it
    later is dropped, and everything else goes on.

    Args:
        on_room: Called on the loop when `full` has become False.
        on_failure: Called on the loop with a target that failed, and why.
        most_bytes: `full` from here on.

    Attributes:
        ended: Done when everything is written after `finish`.
    """

    def __init__(
        self,
        on_room: Callable[[], None],
        on_failure: Callable[[Target, OSError], None],
        most_bytes: int = 1 << 20,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_room = on_room
        self._on_failure = on_failure
        self._most = most_bytes
        self._queue: collections.deque[tuple[Target, bytes]] = collections.deque()
        self._pending = 0
        self._told_full = False
        self._finishing = False
        self._targets: set[Target] = set()
        self._changed = threading.Condition()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="asupervisor launch output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that nothing more should be read; the loop's thread."""
        with self._changed:
            # Until there is room again: what was told must be followed by `on_room`.
            self._told_full = self._told_full or self._pending >= self._most
            return self._told_full

    def write(self, target: Target, data: bytes) -> None:
        """Have it written, after everything that came before; never blocks. Any thread."""
        if data:
            with self._changed:
                self._queue.append((target, data))
                self._pending += len(data)
                self._changed.notify()

    def finish(self) -> None:
        """Nothing more comes: `ended` tells when all is written and closed."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def _run(self) -> None:
        failed: set[Target] = set()
        while batch := self._take():
            for target, data in _joined(batch):
                self._targets.add(target)
                if target not in failed:
                    try:
                        target.write(data)
                    except OSError as error:
                        failed.add(target)
                        self._call(self._on_failure, target, error)
                with self._changed:
                    self._pending -= len(data)
                    room = self._told_full and self._pending <= self._most // 2
                    self._told_full = self._told_full and not room
                if room:
                    self._call(self._on_room)
        for target in self._targets:
            target.close()
        self._call(self._end)

    def _take(self) -> list[tuple[Target, bytes]]:
        with self._changed:
            while not self._queue and not self._finishing:
                self._changed.wait()
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waited for the last lines
            pass

    def _end(self) -> None:
        self._thread.join()  # in its last instruction
        if not self.ended.done():
            self.ended.set_result(None)


def _joined(batch: list[tuple[Target, bytes]]) -> Iterator[tuple[Target, bytes]]:
    """Neighbours for the same target as one piece, of bounded size."""
    held: list[bytes] = []
    size = 0
    for position, (target, data) in enumerate(batch):
        held.append(data)
        size += len(data)
        if size >= _CHUNK_BYTES or position + 1 == len(batch) or batch[position + 1][0] is not target:
            yield target, b"".join(held)
            held, size = [], 0
