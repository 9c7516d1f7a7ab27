"""What a supervisor needs from a graph: found in its collections, or added before the graph is finalised.

Source: the `_init_*` methods of `tf.compat.v1.train.Supervisor`, with the same collections and the same defaults,
so that a second supervisor, or TensorFlow's own, finds what the first one made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

USE_DEFAULT = 0
"""Stands for "make the usual one"; the value is TensorFlow's own."""


@dataclass(frozen=True, slots=True)
class GraphElements:
    """The ops and helpers of one supervised graph; None where there is none or none is wanted.

    Attributes:
        graph: The graph; finalised.
        ready_op: 1-D string tensor of what is not initialised, or an op that raises.
        ready_for_local_init_op: The same, asked before `local_init_op`.
        init_op: Initialises the model.
        local_init_op: Initialises what is local to this process.
        saver: The saver.
        summary_op: Scalar string tensor, a serialised summary.
        global_step: Integer tensor with one element, or the variable.
        queue_runners: What the graph has collected of `tf.compat.v1.train.QueueRunner`s. Noted here, since to ask the
            graph later means to wait where another thread exports it.
    """

    graph: tf.Graph
    ready_op: Any
    ready_for_local_init_op: Any
    init_op: Any
    local_init_op: Any
    saver: Any
    summary_op: Any
    global_step: Any
    queue_runners: tuple[Any, ...] = ()


def resolve_graph(graph: tf.Graph | None) -> tf.Graph:
    """The graph that was handed over, or the caller's default graph.

    Raises:
        RuntimeError: Neither: TensorFlow executes eagerly here, as it does by default.
        TypeError: `graph` is not a graph.
    """
    if graph is None:
        if tf.executing_eagerly():
            raise RuntimeError(
                "Supervisors are incompatible with eager execution. Build the model inside "
                "`with graph.as_default():` and pass graph=graph."
            )
        return tf1.get_default_graph()
    if not isinstance(graph, tf.Graph):
        raise TypeError(f"'graph' must be a tf.Graph, not {graph!r}")
    return graph


def find_or_add_elements(
    graph: tf.Graph,
    *,
    ready_op: Any = USE_DEFAULT,
    ready_for_local_init_op: Any = USE_DEFAULT,
    init_op: Any = USE_DEFAULT,
    local_init_op: Any = USE_DEFAULT,
    saver: Any = USE_DEFAULT,
    summary_op: Any = USE_DEFAULT,
    global_step: Any = USE_DEFAULT,
) -> GraphElements:
    """Complete a graph: what is not given is taken from its collections, or made and put there.

    A finalised graph works where everything is given or was collected before, by an earlier supervisor on it.

    Args:
        graph: The graph.
        ready_op: See `GraphElements`; None for no check.
        ready_for_local_init_op: See `GraphElements`; the default is what the graph's collection holds, if anything.
        init_op: See `GraphElements`; an operation, a tensor or a list of them.
        local_init_op: Likewise.
        saver: A `tf.compat.v1.train.Saver` or an object like it.
        summary_op: See `GraphElements`.
        global_step: See `GraphElements`.

    Raises:
        ValueError: An op that was given belongs to another graph, or to none: an eager tensor.
        RuntimeError: The graph is finalised and lacks something that would have to be added.
    """
    given = {
        "ready_op": ready_op,
        "ready_for_local_init_op": ready_for_local_init_op,
        "init_op": init_op,
        "local_init_op": local_init_op,
        "summary_op": summary_op,
        "global_step": global_step,
    }
    for name, value in given.items():
        check_in_graph(graph, name, value)
    keys = tf1.GraphKeys
    with graph.as_default():
        ready_op = _default(graph, "ready_op", ready_op, keys.READY_OP, tf1.report_uninitialized_variables)
        ready_for_local_init_op = _default(
            graph, "ready_for_local_init_op", ready_for_local_init_op, keys.READY_FOR_LOCAL_INIT_OP, None
        )
        init_op = _default(graph, "init_op", init_op, keys.INIT_OP, tf1.global_variables_initializer)
        local_init_op = _default(graph, "local_init_op", local_init_op, keys.LOCAL_INIT_OP, _local_init)
        saver = _default(graph, "saver", saver, keys.SAVERS, tf1.train.Saver if tf1.global_variables() else None)
        summaries = tf1.get_collection(keys.SUMMARIES)
        summary_op = _default(
            graph, "summary_op", summary_op, keys.SUMMARY_OP, tf1.summary.merge_all if summaries else None
        )
        global_step = _default(graph, "global_step", global_step, keys.GLOBAL_STEP, None)
        if global_step is None and given["global_step"] is USE_DEFAULT:
            global_step = _global_step_by_name(graph)
            if global_step is not None and not graph.finalized:
                graph.add_to_collection(keys.GLOBAL_STEP, global_step)
    return GraphElements(
        graph,
        ready_op,
        ready_for_local_init_op,
        init_op,
        local_init_op,
        saver,
        summary_op,
        global_step,
        tuple(graph.get_collection(keys.QUEUE_RUNNERS)),
    )


def check_in_graph(graph: tf.Graph, name: str, value: Any) -> None:
    """Raise ValueError where an op, or one of a list of them, is not an op of this graph.

    Args:
        graph: The graph.
        name: The argument's name, for the message.
        value: An operation, tensor, variable, list of them, or None or `USE_DEFAULT`.
    """
    if value is None or value is USE_DEFAULT:
        return
    if isinstance(value, list | tuple):
        for item in value:
            check_in_graph(graph, name, item)
        return
    try:
        of = value.graph
    except AttributeError:
        raise ValueError(
            f"'{name}' must be an op of the supervisor's graph, not {value!r}. An eager tensor has no graph: make it "
            "inside `with graph.as_default():`."
        ) from None
    if of is not graph:
        raise ValueError(f"'{name}' ({value!r}) belongs to another graph than the one the supervisor was given")


def check_devices(graph: tf.Graph) -> None:
    """Raise ValueError where a ref variable has no device: with replicas, each must have one.

    Source: `tf.compat.v1.train.Supervisor._verify_setup`.
    """
    for op in graph.get_operations():
        if op.type in ("Variable", "VariableV2") and not op.device:
            raise ValueError(
                f"When using replicas, all Variables must have their device set: {op.name!r} has none. Build the "
                "model under `tf.compat.v1.device(tf.compat.v1.train.replica_device_setter(...))`."
            )


def step_value(value: Any) -> int:
    """The number in a fetched global step, whose shape may be () or (1,)."""
    return int(np.asarray(value).reshape(-1)[0])


def _local_init() -> Any:
    return tf.group(tf1.local_variables_initializer(), tf1.tables_initializer())


def _global_step_by_name(graph: tf.Graph) -> Any:
    try:
        tensor = graph.get_tensor_by_name("global_step:0")
    except KeyError:
        return None
    if tensor.dtype.base_dtype in (tf.int32, tf.int64):
        return tensor
    if tensor.dtype == tf.resource:  # a resource variable that is in no collection: what reads it
        for name in ("global_step/Read/ReadVariableOp:0", "global_step/read:0"):
            try:
                read = graph.get_tensor_by_name(name)
            except KeyError:
                continue
            if read.dtype.base_dtype in (tf.int32, tf.int64):
                return read
    return None


def _default(graph: tf.Graph, name: str, value: Any, key: str, make: Callable[[], Any] | None) -> Any:
    """The value that was given, or the first one collected, or a new one, which is collected."""
    if value is not USE_DEFAULT:
        return value
    collected = graph.get_collection(key)
    if collected:
        return collected[0]
    if make is None:
        return None
    if graph.finalized:
        raise RuntimeError(
            f"the graph is finalised and has no {name}. Make the Supervisor before the graph is finalised, or pass "
            f"{name}= (None for none)."
        )
    made = make()
    if made is not None:
        # TensorFlow's reminder about ops that nobody runs is meant for users: a supervisor may well never get that far.
        getattr(made, "mark_used", bool)()
        graph.add_to_collection(key, made)
    return made
