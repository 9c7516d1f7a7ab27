"""The hook that feeds a value by a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from asupervisor.hooks.protocol import AsyncSessionRunHook
from asupervisor.hooks.stopping import global_step_of
from asupervisor.session.elements import step_value

tf1 = tf.compat.v1


class FeedScheduleHook(AsyncSessionRunHook):
    """Feeds a placeholder with a function of the global step: a learning rate, a weight that grows.

    The step is that before the run, and is exact: it is read between two steps, so it goes on right after a restore.
    A run that feeds the placeholder itself keeps its own value.

    Source: `tf.compat.v1.train.FeedFnHook`, which knows no step.

    Args:
        placeholder: The tensor that is fed, or its name.
        schedule: The value for a step; called on the device thread.
        every_n_runs: Runs after which the step is read and the function is called again.

    Attributes:
        value: The value that was fed last, or None.

    Raises:
        ValueError: `every_n_runs` is not positive.
    """

    def __init__(self, placeholder: Any, schedule: Callable[[int], Any], every_n_runs: int = 1) -> None:
        if every_n_runs <= 0:
            raise ValueError(f"every_n_runs must be positive, not {every_n_runs}")
        self.value: Any = None
        self._placeholder = placeholder
        self._schedule = schedule
        self._every_n_runs = every_n_runs
        self._tensor: Any = None
        self._step: Any = None
        self._args: Any = None
        self._runs_left = 0

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        graph = tf1.get_default_graph()
        self._tensor = graph.as_graph_element(self._placeholder, allow_operation=False)
        self._step = global_step_of(graph, self)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `AsyncSessionRunHook.after_create_session`."""
        self._runs_left = 0

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        fed = run_context.original_args.feed_dict
        if fed and any(key is self._tensor or (type(key) is str and key == self._tensor.name) for key in fed):
            return None
        if self._runs_left <= 0:
            self._runs_left = self._every_n_runs
            self.value = self._schedule(step_value(run_context.session.run(self._step)))
            self._args = tf1.train.SessionRunArgs(None, {self._tensor: self.value})
        self._runs_left -= 1
        return self._args
