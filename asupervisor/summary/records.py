"""What goes into an event file: the records, and how they become TensorFlow's `Event` protos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

Kind = Literal["summary", "session_log", "graph", "meta_graph", "event", "run_metadata"]

FILE_VERSION = "brain.Event:2"

_SCALARS_PLUGIN = "scalars"


@dataclass(slots=True)
class Record:
    """One thing to write.

    Attributes:
        kind: What `payload` is.
        payload: A proto; for ``"graph"`` also a `tf.Graph`, for ``"meta_graph"`` also a function that makes one.
            Both are work for the writing thread.
        step: Global step, or None.
        wall_time_secs: When it was added, seconds since the epoch.
        tag: Tag of a ``"run_metadata"``.
        broken: It could not be turned into bytes, and is skipped.
    """

    kind: Kind
    payload: Any
    step: int | None
    wall_time_secs: float
    tag: str = ""
    broken: bool = False


def as_summary(summary: Any) -> Any:
    """A `tf.compat.v1.Summary` of its own from a proto or its serialized bytes.

    Args:
        summary: The proto, or what a summary op evaluates to.

    Raises:
        TypeError: It is neither.
        ValueError: The bytes are not a serialized `Summary`.
    """
    own = tf.compat.v1.Summary()
    if isinstance(summary, tf.compat.v1.Summary):
        own.CopyFrom(summary)  # the caller may go on changing theirs
        return own
    data = getattr(summary, "item", lambda: summary)() if getattr(summary, "ndim", None) == 0 else summary
    if not isinstance(data, bytes):
        raise TypeError(
            f"a summary is a tf.compat.v1.Summary or its serialized bytes, not {type(summary).__name__}: "
            "pass what sess.run(summary_op) returned"
        )
    try:
        own.ParseFromString(data)
    except Exception as error:
        raise ValueError(f"these {len(data)} bytes are not a serialized Summary: {error}") from error
    return own


def as_meta_graph(meta_graph: Any) -> Any:
    """A `MetaGraphDef` from a proto, its serialized bytes, or a function that gives either.

    Raises:
        TypeError: It is neither.
    """
    if callable(meta_graph):
        meta_graph = meta_graph()
    if isinstance(meta_graph, bytes):
        proto = tf.compat.v1.MetaGraphDef()
        proto.ParseFromString(meta_graph)
        return proto
    if not isinstance(meta_graph, tf.compat.v1.MetaGraphDef):
        raise TypeError(f"meta_graph_def must be a MetaGraphDef or its bytes, not {type(meta_graph).__name__}")
    return meta_graph


def as_session_log(kind: Any, checkpoint_path: str | None = None, msg: str | None = None) -> Any:
    """A `SessionLog` proto.

    Args:
        kind: ``"START"``, ``"CHECKPOINT"``, ``"STOP"``, the enum value, or a whole `SessionLog`.
        checkpoint_path: For ``"CHECKPOINT"``.
        msg: A remark.

    Raises:
        ValueError: There is no such kind.
    """
    if isinstance(kind, tf.compat.v1.SessionLog):
        log = tf.compat.v1.SessionLog()
        log.CopyFrom(kind)
        return log
    status = tf.compat.v1.SessionLog.SessionStatus.Value(kind) if isinstance(kind, str) else int(kind)
    return tf.compat.v1.SessionLog(status=status, checkpoint_path=checkpoint_path, msg=msg)


def scalars(summary: Any) -> Iterator[tuple[str, float]]:
    """The scalars of a `Summary` proto, by tag: TF1's simple values and TF2's scalar tensors."""
    for value in summary.value:
        which = value.WhichOneof("value")
        if which == "simple_value":
            yield value.tag, float(value.simple_value)
        elif which == "tensor" and value.metadata.plugin_data.plugin_name == _SCALARS_PLUGIN:
            array = tf.make_ndarray(value.tensor)
            if array.size == 1:
                yield value.tag, float(array.reshape(())[()])


def file_version_event(wall_time_secs: float) -> Any:
    """The first record of every event file."""
    return tf.compat.v1.Event(wall_time=wall_time_secs, file_version=FILE_VERSION)


def as_graph_def(graph: Any) -> Any:
    """The `GraphDef` of a graph with the shapes of its tensors; slow for a large graph."""
    return graph.as_graph_def(add_shapes=True) if isinstance(graph, tf.Graph) else graph


def meta_graph_of(record: Record) -> Any:
    """The `MetaGraphDef` of a ``"meta_graph"``, made at the first call; slow for a large graph."""
    if callable(record.payload):
        record.payload = as_meta_graph(record.payload)
    return record.payload


def as_event(record: Record, seen_tags: set[str]) -> Any:
    """The `Event` proto of a record.

    Args:
        record: The record; stays as it is.
        seen_tags: Tags whose metadata this file holds already: metadata is written once per file and tag.
            New ones are added.
    """
    if record.kind == "event":
        return record.payload
    event = tf.compat.v1.Event(wall_time=record.wall_time_secs)
    if record.step is not None:
        event.step = record.step
    if record.kind == "summary":
        event.summary.CopyFrom(record.payload)
        for value in event.summary.value:
            if not value.HasField("metadata"):
                continue
            if value.tag in seen_tags:
                value.ClearField("metadata")
            else:
                seen_tags.add(value.tag)
    elif record.kind == "session_log":
        event.session_log.CopyFrom(record.payload)
    elif record.kind == "graph":
        event.graph_def = as_graph_def(record.payload).SerializeToString()
    elif record.kind == "meta_graph":
        event.meta_graph_def = meta_graph_of(record).SerializeToString()
    else:
        event.tagged_run_metadata.tag = record.tag
        event.tagged_run_metadata.run_metadata = record.payload.SerializeToString()
    return event
