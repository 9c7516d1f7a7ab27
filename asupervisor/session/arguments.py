"""Checks of arguments that need no session: so those of the startup come before one is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine, as far as its declaration tells."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def check_init_fn(init_fn: Any) -> None:
    """Raise TypeError unless `init_fn` is None or can be called with one argument."""
    if init_fn is None:
        return
    if not callable(init_fn):
        raise TypeError(f"init_fn must be a function of one argument, the session, not {init_fn!r}")
    try:
        signature = inspect.signature(init_fn)
    except (TypeError, ValueError):  # some callables in C do not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(f"init_fn {init_fn!r} must take one argument, the session: {error}") from None


def check_config(config: Any) -> None:
    """Raise TypeError unless `config` is None or a ConfigProto."""
    if config is not None and not isinstance(config, tf.compat.v1.ConfigProto):
        raise TypeError(f"config must be a tf.compat.v1.ConfigProto, not {config!r}")


def check_places(checkpoint_dir: str | None, checkpoint_filename_with_path: str | None) -> None:
    """Raise ValueError if both places to restore from are given."""
    if checkpoint_dir and checkpoint_filename_with_path:
        raise ValueError(
            "Can not provide both checkpoint_dir and checkpoint_filename_with_path: "
            f"{checkpoint_dir!r} and {checkpoint_filename_with_path!r}."
        )


def graph_or_default(graph: tf.Graph | None) -> tf.Graph:
    """The graph, or the default graph of this thread.

    Raises:
        RuntimeError: In eager mode, where no graph is given and the default graph is empty.
    """
    if graph is not None:
        return graph
    default = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() and not default.get_operations():
        raise RuntimeError(
            "SessionManager needs a graph: eager mode is on and the default graph is empty. "
            "Pass graph=, or call it inside `with graph.as_default():`."
        )
    return default


def check_steps(max_steps: Any, ahead: Any, stop_when: Any) -> None:
    """Raise TypeError or ValueError unless a stream of steps can run with these; see `AsyncSession.steps`."""
    for name, count in (("ahead", ahead), ("max_steps", max_steps)):
        if count is not None and not isinstance(count, int | np.integer):
            raise TypeError(f"{name} must be a number of steps, not {count!r}")
    if stop_when is not None and is_async(stop_when):
        raise TypeError(
            f"stop_when is called on the device thread, so it must be a plain function, not {stop_when!r}; "
            "to await something, look at the results in the loop and leave it"
        )
    if ahead < 0 or (max_steps is not None and max_steps < 0):
        raise ValueError(f"ahead and max_steps must not be negative: ahead={ahead}, max_steps={max_steps}")
