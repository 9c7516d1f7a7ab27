"""``journal.jsonl``: one line of JSON per event, for whoever looks at a dead run.

Runs append to the same file. A batch of lines is written in one go at the end of the file, so a process that is
killed leaves at most one torn line, the last one; the next run cuts it off before it writes. The same mending
follows a failed write. While the disk refuses, lines wait; the oldest of too many are dropped, and a line of
kind ``journal.lost`` says how many.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import io
import json
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import aiofiles
import aiofiles.os
import anyio

from asupervisor.events import Event, EventSink, log_only
from asupervisor.runtime.threads import SideThreads
from asupervisor.summary.sink import describe

FILE_NAME = "journal.jsonl"

_LAST_WORDS_SECS = 1.0
_CHUNK_BYTES = 1 << 16


class Journal:
    """Writes every event of one supervisor into ``journal.jsonl``; a service.

    Errors of the disk are events, never exceptions: the training goes on. They are tried again with the next
    event, at the earliest after a pause that grows.

    Args:
        logdir: The directory; made if it does not exist.
        events: The events. `run` ends when they end.
        emit: Where trouble is reported.
        max_lines: Most lines that wait for the disk.
        retry_secs: Shortest and longest pause after a failed write, in seconds.
    """

    name = "journal"

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        events: AsyncIterator[Event],
        *,
        emit: EventSink = log_only,
        max_lines: int = 10_000,
        retry_secs: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self.path = Path(logdir) / FILE_NAME
        self.written_lines = 0
        self.lost_lines = 0
        self.last_error: str | None = None
        self._events = events
        self._emit = emit
        self._lines: collections.deque[bytes] = collections.deque()
        self._max_lines = max_lines
        self._unreported = 0
        self._retry_secs = retry_secs
        self._pause_secs = 0.0
        self._retry_at = 0.0
        self._sound = False  # whether the file is known to end with a complete line
        # Not the loop's default executor: a thread that hangs in a dead file system must not keep the process.
        self._threads = SideThreads(self.name)
        self._executor = _SideExecutor(self._threads)
        # Whoever drops a loop with everything on it leaves a file to the garbage collector that only `run` would close.
        self._finalizer = weakref.finalize(self, self._executor.close_now)
        self._finalizer.atexit = False

    def close_now(self) -> None:
        """End without the loop, which may be closed: close the file; any thread, waits for nothing."""
        self._executor.close_now()

    async def run(self) -> None:
        """Write until the events end; then everything that is left.

        Cancelled, it still writes what has happened so far, for at most a second. It raises nothing else.
        """
        writer: asyncio.Task[None] | None = None
        dropped = False
        try:
            async for event in self._events:
                self._add(event)
                if writer is None or writer.done():
                    # Beside the reading, so that a slow disk does not make the events pile up unread.
                    writer = asyncio.create_task(self._write_lines(), name=self.name)
            if writer is not None:
                await writer
            await self._write_lines(last=True)
        except asyncio.CancelledError:
            with anyio.move_on_after(_LAST_WORDS_SECS, shield=True):
                await self._last_words(writer)
            raise
        except GeneratorExit:  # dropped, together with its loop: there is nothing to await any more
            dropped = True
            self.close_now()
            raise
        finally:
            if not dropped:
                await self._end(writer)

    async def _end(self, writer: asyncio.Task[None] | None) -> None:
        if writer is not None and not writer.done():
            # Stuck in a thread. Released, it closes its file, for which it still needs the other threads.
            writer.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([writer], timeout=_LAST_WORDS_SECS)
        if self._lines:
            self.lost_lines += len(self._lines)
            self._emit(
                "journal.lost",
                f"{self.path}: {len(self._lines)} lines could not be written: {self.last_error}",
                level="error",
                path=str(self.path),
                lost=len(self._lines),
            )
            self._lines.clear()
        with anyio.CancelScope(shield=True):
            await self._threads.aclose(_LAST_WORDS_SECS)

    async def _last_words(self, writer: asyncio.Task[None] | None) -> None:
        while True:
            event = None
            # Takes what is there and does not wait: the deadline strikes at the first real wait.
            with anyio.move_on_after(0):
                event = await anext(self._events, None)
            if event is None:
                break
            self._add(event)
        if writer is not None:
            await asyncio.wait([writer])
        await self._write_lines(last=True)

    def _add(self, event: Event) -> None:
        if len(self._lines) >= self._max_lines:
            self._lines.popleft()
            self.lost_lines += 1
            self._unreported += 1
        self._lines.append(line_of(event))

    async def _write_lines(self, last: bool = False) -> None:
        while self._lines and (last or time.monotonic() >= self._retry_at):
            batch = list(self._lines)
            self._lines.clear()
            lost, self._unreported = self._unreported, 0
            try:
                await self._append(b"".join(([lost_line(lost)] if lost else []) + batch))
            except Exception as error:
                self._unreported += lost
                self._keep(batch)
                self._failed(error)
                return
            except BaseException:
                self._unreported += lost
                self._keep(batch)
                raise
            self.written_lines += len(batch)
            if self._pause_secs:
                self._pause_secs = self._retry_at = 0.0
                self._emit("journal.write_resumed", f"{self.path}: writing works again", path=str(self.path))

    def _keep(self, batch: list[bytes]) -> None:
        self._sound = False
        self._lines.extendleft(reversed(batch))

    def _failed(self, error: Exception) -> None:
        first = not self._pause_secs
        self.last_error = describe(error)
        self._pause_secs = min(max(2 * self._pause_secs, self._retry_secs[0]), self._retry_secs[1])
        self._retry_at = time.monotonic() + self._pause_secs
        if first:  # its own event lands in the journal as well: one per outage, or it would feed itself
            self._emit(
                "journal.write_failed",
                f"{self.path}: cannot write, training goes on: {error}",
                level="error",
                path=str(self.path),
                error=describe(error),
            )

    # -------------------------------------------------------------------------------- the file

    async def _append(self, data: bytes) -> None:
        if not self._sound:
            await aiofiles.os.makedirs(self.path.parent, exist_ok=True, executor=self._executor)
            await self._mend()
        # Opened for each batch: a file that somebody removes is made anew, and no descriptor stays open.
        for attempt in range(2):
            try:
                async with _Opened(self.path, "ab", self._executor) as file:
                    await file.write(data)
                break
            except FileNotFoundError:
                if attempt:
                    raise
                await aiofiles.os.makedirs(self.path.parent, exist_ok=True, executor=self._executor)
        self._sound = True

    async def _mend(self) -> None:
        """Make the file end with a complete line: cut a torn one off."""
        try:
            async with _Opened(self.path, "r+b", self._executor) as file:
                torn_bytes = await _cut_torn_line(file)
        except FileNotFoundError:
            return
        if not torn_bytes:
            return
        self._emit(
            "journal.mended",
            f"{self.path}: cut off a torn last line of {torn_bytes} bytes",
            path=str(self.path),
            torn_bytes=torn_bytes,
        )


class _Opened:
    """A file, open within a block; one that is dropped together with its loop is closed by the executor.

    The block of aiofiles' own closes it in the loop's default executor.
    """

    def __init__(self, path: Path, mode: Literal["ab", "r+b"], executor: _SideExecutor) -> None:
        self._opening = aiofiles.open(path, mode, executor=executor)

    async def __aenter__(self) -> Any:
        self._file: Any = await self._opening.__aenter__()
        return self._file

    async def __aexit__(self, exc_type: type[BaseException] | None, *more: object) -> None:
        if exc_type is not GeneratorExit:
            await self._file.close()


async def _cut_torn_line(file: Any) -> int:
    """Cut off what follows the last newline; a whole line that only lacks its newline gets it.

    Returns:
        How many bytes were cut off.
    """
    end = start = await file.seek(0, os.SEEK_END)
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _CHUNK_BYTES)
        await file.seek(start)
        tail = await file.read(end - start)
    tail = tail[tail.rfind(b"\n") + 1 :]
    if _is_json(tail):
        await file.seek(0, os.SEEK_END)
        await file.write(b"\n")
        return 0
    if tail:
        await file.truncate(end - len(tail))
    return len(tail)


class _SideExecutor(concurrent.futures.Executor):
    """What aiofiles submits its calls to."""

    def __init__(self, threads: SideThreads) -> None:
        self._threads = threads
        self._guard = threading.Lock()
        self._files: list[io.IOBase] = []
        self._closed = False

    def close_now(self) -> None:
        """Close what is open, and what is being opened, on a side thread: a disk may hold it up; any thread."""
        with self._guard:
            self._closed = True
            files, self._files = self._files, []
        if any(not file.closed for file in files):
            with contextlib.suppress(RuntimeError):  # `run` has closed the threads: it is at the end of its grace
                self._threads.submit(lambda: _close_all(files), "close")
        self._threads.shutdown()

    def _opened(self, file: io.IOBase) -> None:
        with self._guard:
            self._files = [file, *(other for other in self._files if not other.closed)]
            if not self._closed:
                return
        _close_all([file])

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    if isinstance(result, io.IOBase):
                        self._opened(result)
                    future.set_result(result)

        self._threads.submit(work, "file")
        return future


def _close_all(files: Iterable[io.IOBase]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.close()


def line_of(event: Event) -> bytes:
    """The line of one event, with its newline; strict JSON whatever the event's data are."""
    return _line(
        {
            "time_secs": event.time_secs,
            "kind": event.kind,
            "level": event.level,
            "source": event.source,
            "message": event.message,
            "data": event.data,
        }
    )


def lost_line(lost: int) -> bytes:
    """The line that stands for lines that were dropped."""
    message = f"{lost} events are missing here: the journal could not be written for too long"
    return _line(
        {
            "time_secs": time.time(),
            "kind": "journal.lost",
            "level": "warning",
            "source": Journal.name,
            "message": message,
            "data": {"lost": lost},
        }
    )


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(content), separators=(",", ":")).encode() + b"\n"


def _plain(value: Any, depth: int = 8) -> Any:
    """`value` out of what strict JSON knows; the rest becomes text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if depth and isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item(), depth - 1)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value) if isinstance(value, os.PathLike) else repr(value)


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
