"""The event file of one run: what TensorBoard reads.

One supervisor owns one `EventFileWriter` and closes it. Nothing is cached per process, no two writers ever share a
file, and nothing blocks the caller: see `asupervisor.summary.sink`.

A file is written in this order: file version, graph, meta graph, then records as they come. After a failed write
the file is cut back to its last complete record and left; writing goes on in a new file, which repeats version,
graph and meta graph. The same happens when somebody removes the directory under a running job.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from asupervisor import _tf
from asupervisor.clock import Clock
from asupervisor.events import EventSink, log_only
from asupervisor.summary import records
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.records import Record
from asupervisor.summary.sink import describe

_numbers = itertools.count()


class RecordFile(Protocol):
    """The part of `tf.io.TFRecordWriter` that is used."""

    def write(self, record: bytes) -> None:
        """Append one record."""

    def flush(self) -> None:
        """Hand everything to the operating system."""

    def close(self) -> None:
        """Flush and close."""


class EventFileWriter(SummaryWriter):
    """Writes an event file of its own into `logdir`.

    Source: `tf.compat.v1.summary.FileWriter`.

    The name is ``events.out.tfevents.<secs>.<host>.<pid>.<counter>`` and is created exclusively, so two writers
    never truncate each other's file, not within a second and not from two hosts. The directory is made when the
    first record is written.

    Args:
        logdir: The directory; TensorFlow's file systems work as well.
        filename_suffix: Appended to the file name.
        emit: As in `SummaryWriter`.
        clock: As in `SummaryWriter`.
        max_records: As in `SummaryWriter`.
        max_bytes: As in `SummaryWriter`.
        retry_secs: As in `SummaryWriter`.
        open_file: What opens a record file; `tf.io.TFRecordWriter` by default.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        filename_suffix: str = "",
        emit: EventSink = log_only,
        clock: Clock | None = None,
        max_records: int = 10_000,
        max_bytes: int = 64 << 20,
        retry_secs: tuple[float, float] = (1.0, 60.0),
        open_file: Callable[[str], RecordFile] | None = None,
    ) -> None:
        self._logdir = os.fspath(logdir)
        self._suffix = filename_suffix
        self._open_file = open_file or tf.io.TFRecordWriter
        self._file: _EventFile | None = None
        super().__init__(emit=emit, clock=clock, max_records=max_records, max_bytes=max_bytes, retry_secs=retry_secs)

    def _backend(self) -> _EventFile:
        self._file = _EventFile(self._logdir, self._suffix, self._open_file, self._clock, self._emit)
        return self._file

    def _name(self) -> str:
        return f"event file of {self._logdir}"

    @property
    def path(self) -> str | None:
        """See `SummaryWriter.path`."""
        return None if self._file is None else self._file.path

    def get_logdir(self) -> str:
        """See `SummaryWriter.get_logdir`."""
        return self._logdir


class _EventFile:
    """Backend of one opening of an `EventFileWriter`: lives on the writing thread, except for `path`."""

    def __init__(
        self,
        logdir: str,
        suffix: str,
        open_file: Callable[[str], RecordFile],
        clock: Clock,
        emit: EventSink,
    ) -> None:
        self.path: str | None = None
        self._logdir = logdir
        self._suffix = suffix
        self._open_file = open_file
        self._clock = clock
        self._emit = emit
        self._remote = "://" in logdir
        self._file: RecordFile | None = None
        self._good_bytes = 0
        self._seen_tags: set[str] = set()
        self._preamble: list[Record] = []

    def write(self, batch: Sequence[Record]) -> int:
        """See `Backend.write`."""
        for attempt in range(2):
            try:
                self._append(batch)
                break
            except (FileNotFoundError, tf.errors.NotFoundError) as error:
                # Writing into a file that somebody has removed succeeds silently; once more, into a new one.
                if attempt:
                    raise
                self._emit(
                    "summary.file_vanished",
                    f"{self.path} was removed while it was written: going on in a new event file",
                    level="warning",
                    path=self.path,
                    error=describe(error),
                )
        self._preamble += [record for record in batch if record.kind in ("graph", "meta_graph")]
        return sum(record.broken for record in batch)

    def _append(self, batch: Sequence[Record]) -> None:
        try:
            if self._file is None:
                batch = [*self._create(), *batch]
            assert self._file is not None and self.path is not None
            for record in batch:
                data = self._encode(record)
                if data is not None:
                    self._file.write(data)
            self._file.flush()
            if not self._remote:
                self._good_bytes = Path(self.path).stat().st_size
        except BaseException:
            self._leave()
            raise

    def _create(self) -> list[Record]:
        """Open a new file and write its version.

        Returns:
            What has to follow: the graph and meta graph of this opening, if an earlier file had them.
        """
        tf.io.gfile.makedirs(self._logdir)
        now = self._clock.time()
        while True:
            name = (
                f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}."
                f"{next(_numbers)}{self._suffix}"
            )
            path = os.path.join(self._logdir, name)  # noqa: PTH118 - gs:// is not a Path
            if self._remote:
                if not tf.io.gfile.exists(path):
                    break
            else:
                try:
                    with Path(path).open("xb"):
                        break
                except FileExistsError:  # containers share names and process numbers
                    continue
        self.path, self._good_bytes = path, 0
        self._seen_tags.clear()
        self._file = self._open_file(path)
        self._file.write(records.file_version_event(now).SerializeToString())
        return list(self._preamble)

    def _encode(self, record: Record) -> bytes | None:
        if record.broken:
            return None
        try:
            if record.kind == "graph" and isinstance(record.payload, tf.Graph):
                _tf.write_plugin_assets(record.payload, self._logdir)
            data: bytes = records.as_event(record, self._seen_tags).SerializeToString()
        except OSError:
            raise
        except Exception as error:
            # Not the disk's fault, and no better next time: a graph beyond 2 GB, for instance.
            record.broken = True
            self._emit(
                "summary.unwritable",
                f"a {record.kind} cannot be written to the event file and is left out: {error}",
                level="error",
                record=record.kind,
                error=describe(error),
            )
            return None
        return data

    def _leave(self) -> None:
        """Leave a file that failed, cut back to its last complete record; nothing may be raised here."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except Exception:
            pass  # the error that brought us here is the one that is told
        try:
            if self.path is not None and not self._remote:
                if self._good_bytes:
                    os.truncate(self.path, self._good_bytes)
                else:
                    Path(self.path).unlink()
        except OSError:
            pass

    def close(self) -> None:
        """See `Backend.close`."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
