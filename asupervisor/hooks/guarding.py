"""The hook that looks for NaN and infinity."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor import _tf
from asupervisor.hooks.protocol import AsyncSessionRunHook
from asupervisor.session.elements import step_value

tf1 = tf.compat.v1
_logger = logging.getLogger("asupervisor")


class NonFiniteHook(AsyncSessionRunHook):
    """Ends the training when a value is NaN or infinite.

    Unlike the original it also finds infinite values, and looks into tensors of any shape, sparse ones included. It
    looks before anything can be saved: the step that it belongs to and a save never come between.

    Source: `tf.compat.v1.train.NanTensorHook`.

    Args:
        tensors: What to look at: a tensor or its name, several of them, or a dict from names for messages to tensors.
        fail: Whether it raises; otherwise it requests a stop, and logs why.

    Raises:
        ValueError: There is nothing to look at.
    """

    def __init__(self, tensors: Any, fail: bool = True) -> None:
        if isinstance(tensors, Mapping):
            self._tensors = dict(tensors)
        else:
            several = isinstance(tensors, Iterable) and not isinstance(tensors, str | tf.Tensor | tf.Variable)
            items = list(tensors) if several and not _is_composite(tensors) else [tensors]
            self._tensors = {getattr(item, "name", None) or str(item): item for item in items}
        if not self._tensors:
            raise ValueError("there is no tensor to look at")
        self._fail = fail
        self._fetches: dict[str, Any] = {}

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        graph = tf1.get_default_graph()
        self._fetches = {name: _element(graph, item) for name, item in self._tensors.items()}
        step = tf1.train.get_global_step(graph)
        if step is not None:
            self._fetches["global_step of the hook"] = step

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        return tf1.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`.

        Raises:
            NonFiniteError: A value is not finite; also a `tf.compat.v1.train.NanLossDuringTrainingError`.
        """
        results = run_values.results
        for name in self._tensors:
            bad = _nonfinite(results[name])
            if bad:
                step = results.get("global_step of the hook")
                error = _tf.NonFiniteError(name, bad, None if step is None else step_value(step))
                if self._fail:
                    raise error
                _logger.warning("%s Training stops.", error)
                run_context.request_stop()
                return


def _is_composite(value: Any) -> bool:
    return isinstance(value, tf.SparseTensor | tf.IndexedSlices | tf.RaggedTensor)


def _element(graph: tf.Graph, item: Any) -> Any:
    return item if _is_composite(item) else graph.as_graph_element(item, allow_operation=False)


def _nonfinite(value: Any) -> int:
    """How many numbers in a fetched value are not finite."""
    values = getattr(value, "flat_values", getattr(value, "values", value))  # a sparse or ragged one
    array = np.asarray(values)
    try:
        finite = np.isfinite(array)
    except TypeError:  # texts and the like
        return 0
    return int(array.size - np.count_nonzero(finite))
