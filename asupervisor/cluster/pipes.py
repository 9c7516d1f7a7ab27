"""Reads the pipes of all tasks into one `Writer`; belongs to the event loop. See `outputs` for what is shown."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from asupervisor.cluster.outputs import Descriptor, LineSplitter, LogFile, Prefixer, Target, Writer

_CHUNK_BYTES = 1 << 16
_LAST_LINES = 15
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
#: How much a process that left its task's group, and still prints, may add after the end of the task.
_LATE_BYTES = 1 << 20


class Outputs:
    """Where all that the tasks print comes together.

    Args:
        names: The tasks, as they are shown.
        stdout: File descriptor that the standard output of all goes to; it stays open.
        stderr: The same for their error output, and for announcements.
        log_dir: A directory that exists, for one file per task; or None.
        environ: Tells whether colours are wanted.
    """

    def __init__(
        self, names: Sequence[str], *, stdout: int, stderr: int, log_dir: Path | None, environ: Mapping[str, str]
    ) -> None:
        self.writer = Writer(self._room, self._failed)
        self._stdout, self._stderr = Descriptor(stdout, "standard output"), Descriptor(stderr, "standard error")
        self._colour = {each: _wants_colour(each.number, environ) for each in (self._stdout, self._stderr)}
        self._names = tuple(names)
        self._logs = {name: LogFile(log_dir / f"{name.replace('/', '-')}.log") if log_dir else None for name in names}
        self._tails = {name: collections.deque[bytes](maxlen=_LAST_LINES) for name in names}
        self._readers: set[_Reader] = set()
        self._limited = True
        self._announcements = Prefixer(b"[launch] ")

    def tell(self, text: str) -> None:
        """Announce something, in as many lines as it has."""
        for line in text.splitlines():
            self.writer.write(self._stderr, self._announcements.show(line.encode(errors="replace") + b"\n"))

    def attach(self, name: str, stdout: int, stderr: int) -> Attached:
        """Read both pipes of a task that was just started.

        Args:
            name: One of the names.
            stdout: Read end of the pipe that is the task's standard output.
            stderr: The same for its error output.
        """
        self._tails[name].clear()
        return Attached([self._reader(name, stdout, self._stdout), self._reader(name, stderr, self._stderr)])

    def last_lines(self, name: str) -> tuple[str, ...]:
        """What a task has printed last."""
        return tuple(line.decode(errors="replace") for line in self._tails[name])

    def lift_limit(self) -> None:
        """From now on read whatever comes, even if nobody takes it: who is to end must not wait for a terminal."""
        self._limited = False
        self._room()

    def _reader(self, name: str, number: int, target: Descriptor) -> _Reader:
        prefix = f"[{name}] "
        if self._colour[target]:
            colour = _COLOURS[self._names.index(name) % len(_COLOURS)]
            prefix = f"\x1b[{colour}m[{name}]\x1b[0m "
        reader = _Reader(self, number, Prefixer(prefix.encode()), target, self._logs[name], self._tails[name])
        self._readers.add(reader)
        reader.resume()
        return reader

    def came(self, reader: _Reader, lines: Sequence[bytes]) -> None:
        """Lines for `reader`."""
        for line in lines:
            self.writer.write(reader.target, reader.prefixer.show(line))
            if reader.log is not None:
                self.writer.write(reader.log, line)
            if text := line.rstrip():
                reader.tail.append(text)
        if self._limited and self.writer.full:
            for each in self._readers:
                each.pause()

    def ended(self, reader: _Reader, rest: Sequence[bytes]) -> None:
        """Nothing more comes from `reader` than this."""
        self._readers.discard(reader)
        self.came(reader, rest)
        self.writer.write(reader.target, reader.prefixer.finish())

    def _room(self) -> None:
        for each in self._readers:
            each.resume()

    def _failed(self, target: Target, error: OSError) -> None:
        self.tell(f"cannot write to {target.name} any more: {error.strerror}; what comes for it is dropped")


class Attached:
    """The pipes of one process."""

    def __init__(self, readers: Sequence[_Reader]) -> None:
        self._readers = readers

    def close(self) -> None:
        """Take what the process, which has ended, left in its pipes, and close them; a second call does nothing.

        A process that left the task's group may hold them open, so their end is not waited for.
        """
        for reader in self._readers:
            reader.close()


class _Reader:
    """One pipe."""

    def __init__(
        self,
        outputs: Outputs,
        number: int,
        prefixer: Prefixer,
        target: Descriptor,
        log: LogFile | None,
        tail: collections.deque[bytes],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs = outputs
        self._number = number
        self._splitter = LineSplitter()
        self._reading = False
        self.prefixer = prefixer
        self.target = target
        self.log = log
        self.tail = tail
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(number, False)

    def resume(self) -> None:
        if not self._reading and not self.ended.done():
            self._reading = True
            self._loop.add_reader(self._number, self._readable)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._number)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._read()

    def _read(self) -> None:
        if data := os.read(self._number, _CHUNK_BYTES):
            self._outputs.came(self, self._splitter.feed(data))
        else:
            self._end()

    def close(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_LATE_BYTES // _CHUNK_BYTES):
                if self.ended.done():
                    return
                self._read()
        if not self.ended.done():
            self._end()

    def _end(self) -> None:
        self._loop.remove_reader(self._number)
        os.close(self._number)
        self.ended.set_result(None)
        self._outputs.ended(self, self._splitter.flush())


def _wants_colour(number: int, environ: Mapping[str, str]) -> bool:
    return os.isatty(number) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
