"""What the supervisor writes summaries to: the part that its own writer and the user's have in common."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from asupervisor.clock import Clock, SystemClock
from asupervisor.events import EventSink, log_only
from asupervisor.summary import records
from asupervisor.summary.records import Record
from asupervisor.summary.sink import Backend, Sink, SinkStatistics


class SummaryWriter:
    """What the supervisor writes summaries to; the common part of the two kinds.

    Every ``add_`` method may be called from any thread and never blocks: it returns False if the record was
    dropped, because the queue is full or the writer is closed. Both are counted and reported as events, as are
    errors of the disk; none of them disturbs the training.

    Args:
        emit: Where trouble is reported.
        clock: Where the wall-clock times of the records come from.
        max_records: Most records that wait for the disk.
        max_bytes: Most bytes that wait for the disk.
        retry_secs: Shortest and longest pause after a failed write, in seconds.
    """

    def __init__(
        self,
        *,
        emit: EventSink = log_only,
        clock: Clock | None = None,
        max_records: int = 10_000,
        max_bytes: int = 64 << 20,
        retry_secs: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self._emit = emit
        self._clock = clock or SystemClock()
        self._limits: dict[str, Any] = {
            "max_records": max_records,
            "max_bytes": max_bytes,
            "retry_secs": retry_secs,
        }
        self._lock = threading.Lock()  # few assignments long, as the sink's
        self._scalars: Mapping[str, float] = MappingProxyType({})
        self._sink: Sink[Record] | None = None
        self._has_graph = self._has_meta_graph = False
        self._told_closed = False
        self.open()

    def _backend(self) -> Backend[Record]:
        raise NotImplementedError

    def _name(self) -> str:
        raise NotImplementedError

    @property
    def path(self) -> str | None:
        """The event file, or the directory where only that is known; None before the first record is written."""
        raise NotImplementedError

    def get_logdir(self) -> str:
        """The directory of the event file."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- opening, closing

    @property
    def closed(self) -> bool:
        """Whether records are refused."""
        return self._sink is None or self._sink.closed

    def open(self) -> bool:
        """Accept records, into a new file if the writer was closed; any thread.

        The file itself appears with the first record.

        Returns:
            Whether this began a new opening: graph and meta graph are wanted again.
        """
        with self._lock:
            if not self.closed:
                return False
            self._sink = Sink(self._name(), self._backend(), emit=self._emit, **self._limits)
            self._has_graph = self._has_meta_graph = False
            self._told_closed = False
            return True

    def reopen(self) -> bool:
        """The same as `open`, by the original's name."""
        return self.open()

    async def flush(self, timeout_secs: float | None = None) -> None:
        """Wait until everything added so far is in the file; cancelling leaves the writing alone.

        Args:
            timeout_secs: Longest wait, in seconds.

        Raises:
            TimeoutError: It took longer.
            Exception: The disk's error. The records stay queued and are tried again.
        """
        if self._sink is not None:
            await self._sink.flush(timeout_secs)

    def close_soon(self) -> None:
        """Close without waiting: the writing thread finishes on its own; any thread."""
        if self._sink is not None:
            self._sink.close_soon()

    async def aclose(self, timeout_secs: float = 10.0) -> bool:
        """Write what is queued, close the file and end the thread; idempotent.

        Never raises an error of the disk and never waits longer than told: what could not be written is
        reported as an event and counted. Cancelled, it lets the thread finish on its own. It writes no STOP
        record: that is the owner's decision.

        Args:
            timeout_secs: Longest wait, in seconds.

        Returns:
            Whether everything that was accepted has been written.
        """
        return True if self._sink is None else await self._sink.aclose(timeout_secs)

    def statistics(self) -> SinkStatistics:
        """Counters of this opening, and the last error; any thread."""
        return SinkStatistics() if self._sink is None else self._sink.statistics()

    @property
    def thread(self) -> threading.Thread | None:
        """The writing thread of this opening, once it runs."""
        return None if self._sink is None else self._sink.thread

    # -------------------------------------------------------------------------------- adding

    @property
    def scalars(self) -> Mapping[str, float]:
        """The latest value of every scalar that was added, by tag; read-only, any thread."""
        return self._scalars

    def add_summary(self, summary: Any, global_step: Any = None) -> bool:
        """Add a `Summary`.

        Args:
            summary: A `tf.compat.v1.Summary`, or the bytes that a summary op evaluates to.
            global_step: The step that it belongs to.

        Raises:
            TypeError: It is neither.
            ValueError: The bytes are no `Summary`.
        """
        own = records.as_summary(summary)
        latest = dict(records.scalars(own))
        if latest:
            with self._lock:
                self._scalars = MappingProxyType({**self._scalars, **latest})
        return self._put("summary", own, global_step, size_bytes=own.ByteSize())

    def add_session_log(
        self, kind: Any, step: Any = None, checkpoint_path: str | None = None, msg: str | None = None
    ) -> bool:
        """Add a record of the session's life; never dropped while the writer is open.

        Args:
            kind: ``"START"``, ``"CHECKPOINT"``, ``"STOP"``, or a whole `SessionLog`.
            step: Global step; TensorBoard purges by the one of START.
            checkpoint_path: For CHECKPOINT.
            msg: A remark.

        Raises:
            ValueError: There is no such kind.
        """
        log = records.as_session_log(kind, checkpoint_path, msg)
        return self._put("session_log", log, step, droppable=False)

    def add_graph(self, graph: Any, global_step: Any = None) -> bool:
        """Add a graph with its shapes, once per opening; later calls do nothing.

        The graph is serialised by the writing thread, so it should be finalised.

        Args:
            graph: A `tf.Graph` or a `GraphDef`.
            global_step: Step to note.

        Raises:
            TypeError: It is neither.
        """
        if not isinstance(graph, tf.Graph | tf.compat.v1.GraphDef):
            raise TypeError(f"the graph must be a tf.Graph or a GraphDef, not {type(graph).__name__}")
        with self._lock:
            repeated, self._has_graph = self._has_graph, True
        return repeated or self._put("graph", graph, global_step, droppable=False)

    def add_meta_graph(self, meta_graph_def: Any, global_step: Any = None) -> bool:
        """Add a meta graph, once per opening; later calls do nothing.

        Args:
            meta_graph_def: A `MetaGraphDef`, its serialized bytes, or a function that makes one of them; the
                function is called by the writing thread.
            global_step: Step to note.

        Raises:
            TypeError: It is neither.
        """
        proto = meta_graph_def if callable(meta_graph_def) else records.as_meta_graph(meta_graph_def)
        with self._lock:
            repeated, self._has_meta_graph = self._has_meta_graph, True
        return repeated or self._put("meta_graph", proto, global_step, droppable=False)

    def add_event(self, event: Any) -> bool:
        """Add a whole `tf.compat.v1.Event`."""
        own = tf.compat.v1.Event()
        own.CopyFrom(event)
        return self._put("event", own, None, size_bytes=own.ByteSize())

    def add_run_metadata(self, run_metadata: Any, tag: str, global_step: Any = None) -> bool:
        """Add the `RunMetadata` of one `run` under a tag, for TensorBoard's profile of the graph."""
        return self._put("run_metadata", run_metadata, global_step, run_metadata.ByteSize(), tag=tag)

    def _put(
        self,
        kind: records.Kind,
        payload: Any,
        step: Any,
        size_bytes: int = 0,
        *,
        droppable: bool = True,
        tag: str = "",
    ) -> bool:
        record = Record(kind, payload, None if step is None else int(step), self._clock.time(), tag)
        sink = self._sink
        if sink is not None and sink.put(record, size_bytes, droppable=droppable):
            return True
        if self.closed:
            with self._lock:
                told, self._told_closed = self._told_closed, True
            if not told:
                self._emit(
                    "summary.closed",
                    f"{self._name()}: a {kind} was added to a closed writer and dropped; reopen() accepts more",
                    level="warning",
                    path=self.path,
                )
        return False
