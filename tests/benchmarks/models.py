"""The workloads: each call builds one anew, in a graph of its own, with resource variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1


@dataclass
class Model:
    """One workload.

    Attributes:
        graph: Its graph.
        fetches: What a step runs.
        feed: What a step feeds, or None.
        predict: Fetches of a prediction, or None.
        predict_feed: What a prediction feeds.
        init: Initialises it.
    """

    graph: tf.Graph
    fetches: Any
    feed: dict[Any, Any] | None
    predict: Any
    predict_feed: dict[Any, Any] | None
    init: Any


def counter() -> Model:
    """A step that only counts; nothing is fed."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.create_global_step()
        add = tf1.assign_add(step, 1)
        return Model(graph, add, None, None, None, tf1.global_variables_initializer())


def mlp(hidden: int, batch: int) -> Model:
    """784-hidden-10 with gradient descent."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.create_global_step()
        x = tf1.placeholder(tf.float32, [None, 784], name="x")
        y = tf1.placeholder(tf.int64, [None], name="y")
        w1 = tf1.get_variable("w1", [784, hidden])
        b1 = tf1.get_variable("b1", [hidden])
        w2 = tf1.get_variable("w2", [hidden, 10])
        logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2)
        return _classifier(graph, step, x, y, logits, (784,), batch)


def convolutional(batch: int = 16) -> Model:
    """Two convolutions and a dense layer on 28 x 28 pixels."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.create_global_step()
        x = tf1.placeholder(tf.float32, [None, 28, 28, 1], name="x")
        y = tf1.placeholder(tf.int64, [None], name="y")
        k1 = tf1.get_variable("k1", [3, 3, 1, 16])
        k2 = tf1.get_variable("k2", [3, 3, 16, 32])
        dense = tf1.get_variable("dense", [7 * 7 * 32, 10])
        hidden = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, k1, 1, "SAME")), 2, 2, "SAME")
        hidden = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(hidden, k2, 1, "SAME")), 2, 2, "SAME")
        logits = tf.matmul(tf.reshape(hidden, [-1, 7 * 7 * 32]), dense)
        return _classifier(graph, step, x, y, logits, (28, 28, 1), batch)


def _classifier(graph: tf.Graph, step: Any, x: Any, y: Any, logits: Any, shape: tuple[int, ...], batch: int) -> Model:
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    train = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
    source = np.random.default_rng(1)
    images = source.random((batch, *shape), dtype=np.float32)
    labels = source.integers(0, 10, batch)
    predict = tf.argmax(logits, 1)
    return Model(
        graph, [train, loss], {x: images, y: labels}, predict, {x: images[:1]}, tf1.global_variables_initializer()
    )


WORKLOADS: dict[str, Callable[[], Model]] = {
    "counter": counter,
    "small MLP (784-4-10, batch 1)": lambda: mlp(4, 1),
    "batch 64 (784-128-10)": lambda: mlp(128, 64),
    "convolutional (batch 16)": convolutional,
}
COUNTER, SMALL, BATCH, CONVOLUTIONAL = WORKLOADS


def session(model: Model) -> Any:
    """An initialised TensorFlow session on it."""
    raw = tf1.Session(graph=model.graph)
    raw.run(model.init)
    return raw


def compiled(raw: Any, model: Model, *, inline: bool) -> Callable[[], Any]:
    """TensorFlow's compiled callable, with its feeds bound: as little Python as there can be around a step."""
    fetches = model.fetches if isinstance(model.fetches, list) else [model.fetches]
    options = tf1.CallableOptions() if hasattr(tf1, "CallableOptions") else _callable_options()
    for fetch in map(model.graph.as_graph_element, fetches):
        (options.target if isinstance(fetch, tf.Operation) else options.fetch).append(fetch.name)
    for key in model.feed or ():
        options.feed.append(key.name)
    if inline:
        options.run_options.inter_op_thread_pool = -1
    function = raw._make_callable_from_options(options)
    values = tuple(np.asarray(value, key.dtype.as_numpy_dtype) for key, value in (model.feed or {}).items())
    return lambda: function(*values)


def _callable_options() -> Any:
    from tensorflow.core.protobuf import config_pb2

    return config_pb2.CallableOptions()
