"""The supervisor's side of a summary writer that the user made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from asupervisor.clock import Clock
from asupervisor.events import EventSink, log_only
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.records import Record, meta_graph_of
from asupervisor.summary.sink import describe


class FileWriterAdapter(SummaryWriter):
    """The supervisor's side of a writer that the user made, such as `tf.compat.v1.summary.FileWriter`.

    All calls to it are made by one thread of this adapter, because they may block. The supervisor closes it,
    although the caller made it.

    Args:
        writer: An object with FileWriter's methods.
        emit: As in `SummaryWriter`.
        clock: As in `SummaryWriter`.
        max_records: As in `SummaryWriter`.
        max_bytes: As in `SummaryWriter`.

    Raises:
        TypeError: The object lacks FileWriter's methods.
    """

    def __init__(
        self,
        writer: Any,
        *,
        emit: EventSink = log_only,
        clock: Clock | None = None,
        max_records: int = 10_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        wanted = ("add_summary", "add_session_log", "add_graph", "add_meta_graph", "close", "reopen")
        missing = [name for name in wanted if not callable(getattr(writer, name, None))]
        if missing:
            raise TypeError(
                f"summary_writer must offer the methods of tf.compat.v1.summary.FileWriter; "
                f"{type(writer).__name__} lacks {', '.join(missing)}"
            )
        self.writer = writer
        super().__init__(emit=emit, clock=clock, max_records=max_records, max_bytes=max_bytes)

    def _backend(self) -> _ForeignBackend:
        logdir = self.get_logdir()
        return _ForeignBackend(self.writer, self._emit, self._name(), "" if "://" in logdir else logdir)

    def _name(self) -> str:
        return f"{type(self.writer).__name__} of {self.get_logdir()}"

    @property
    def path(self) -> str | None:
        """The directory of the user's writer."""
        return self.get_logdir() or None

    def get_logdir(self) -> str:
        """See `SummaryWriter.get_logdir`."""
        get = getattr(self.writer, "get_logdir", None)
        return str(get()) if callable(get) else ""


class _ForeignBackend:
    """Backend of a `FileWriterAdapter`.

    A FileWriter does not tell which record failed, and it is closed after an error; so a record whose call
    raises is given up, and the next one finds the writer opened again, in a new file.
    """

    def __init__(self, writer: Any, emit: EventSink, name: str, logdir: str) -> None:
        self._writer = writer
        self._logdir = logdir
        self._emit = emit
        self._name = name
        self._reopen = True
        self._written = False  # an event file was seen in the directory
        self._failing = False
        self._preamble: list[Record] = []

    def write(self, batch: Sequence[Record]) -> int:
        """See `Backend.write`; never raises."""
        given_up = 0
        for record in batch:
            try:
                self._look_after()
                self._add(record)
            except Exception as error:
                given_up += 1
                self._failed(error)
            else:
                if record.kind in ("graph", "meta_graph"):
                    self._preamble.append(record)
        try:
            if callable(getattr(self._writer, "flush", None)) and not self._reopen:
                self._writer.flush()
                self._failing = False
                self._written = self._written or (bool(self._logdir) and _has_event_file(self._logdir))
        except Exception as error:
            given_up = len(batch)
            self._failed(error)
        return given_up

    def _look_after(self) -> None:
        """See that the writer is open and has a directory, and that its file begins with the graph."""
        if self._vanished():
            # TensorFlow's own would go on without a file, and tell only its log.
            self._emit(
                "summary.file_vanished",
                f"{self._logdir} was emptied while it was written: going on in a new event file",
                level="warning",
                path=self._logdir,
            )
            self._writer.close()
            Path(self._logdir).mkdir(parents=True, exist_ok=True)
            self._reopen, self._written = True, False
        if self._reopen:
            self._writer.reopen()  # does nothing where the writer is open
            self._reopen = False
            for earlier in self._preamble:
                self._add(earlier)

    def _vanished(self) -> bool:
        if not self._logdir:
            return False
        try:
            return not _has_event_file(self._logdir) and self._written
        except FileNotFoundError:
            return True

    def _failed(self, error: Exception) -> None:
        self._reopen = True
        if not self._failing:  # one report per outage
            self._failing = True
            self._emit(
                "summary.write_failed",
                f"{self._name}: cannot write, training goes on: {error}",
                level="error",
                sink=self._name,
                error=describe(error),
            )

    def _add(self, record: Record) -> None:
        writer, payload, step = self._writer, record.payload, record.step
        if record.kind == "summary":
            writer.add_summary(payload, step)
        elif record.kind == "session_log":
            writer.add_session_log(payload, step)
        elif record.kind == "graph":
            if isinstance(payload, tf.Graph):
                writer.add_graph(payload, step)
            else:
                writer.add_graph(None, step, graph_def=payload)
        elif record.kind == "meta_graph":
            writer.add_meta_graph(meta_graph_of(record), step)
        elif record.kind == "run_metadata":
            writer.add_run_metadata(payload, record.tag, step)
        else:
            writer.add_event(payload)

    def close(self) -> None:
        """See `Backend.close`."""
        self._writer.close()


def _has_event_file(logdir: str) -> bool:
    return any("tfevents" in path.name for path in Path(logdir).iterdir())


def adapt(writer: Any, *, emit: EventSink = log_only, clock: Clock | None = None) -> SummaryWriter:
    """A `SummaryWriter` for what a user passed as `summary_writer`.

    Args:
        writer: One of ours, or an object with FileWriter's methods.
        emit: Where trouble is reported.
        clock: Where the wall-clock times come from.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(writer, SummaryWriter):
        return writer
    return FileWriterAdapter(writer, emit=emit, clock=clock)
