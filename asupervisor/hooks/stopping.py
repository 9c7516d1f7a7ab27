"""Hooks that end the training: at a step, or when a scalar does not improve any more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from asupervisor.hooks.protocol import AsyncSessionRunHook
from asupervisor.session.elements import step_value

tf1 = tf.compat.v1


def global_step_of(graph: tf.Graph, hook: object) -> Any:
    """The global step of a graph.

    Raises:
        RuntimeError: There is none.
    """
    step = tf1.train.get_global_step(graph)
    if step is None:
        raise RuntimeError(f"Global step should be created to use {type(hook).__name__}.")
    return step


class StepWatch:
    """Tells exactly when the global step reaches a target, and reads it by itself only where that may be soon.

    What is fetched along with a run may be the step before it or after it, and nobody knows how many steps a run makes;
    the most that it has made so far is learnt on the way.

    Args:
        step: The global step.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self._seen = 0
        self._stride: int | None = None

    def start(self, session: Any) -> int:
        """The step now, in a new session."""
        self._stride = None
        self._seen = step_value(session.run(self.step))
        return self._seen

    def reached(self, target: int, fetched: Any, session: Any) -> int | None:
        """The step now if it has reached the target, else None.

        Args:
            target: The target.
            fetched: The step as it was fetched along with the run.
            session: TensorFlow's session.
        """
        seen = step_value(fetched)
        near = self._stride is None or seen + self._stride >= target
        now = step_value(session.run(self.step)) if near else seen
        self._stride = max(self._stride or 1, now - self._seen)
        self._seen = now
        return now if near and now >= target else None


class StopAtStepHook(AsyncSessionRunHook):
    """Requests a stop at a step.

    Unlike the original it is asked before the first step, so that a finished job does not train on; it can be used
    again, since `begin` resets it; and it stops at the step whatever number of steps a run makes, as soon as a run has
    reached it.

    Source: `tf.compat.v1.train.StopAtStepHook`.

    Args:
        num_steps: Steps to train, from the first step of the session on; recoveries do not count anew.
        last_step: The step at which to stop, instead.

    Raises:
        ValueError: Not exactly one of them was given.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is None and last_step is None:
            raise ValueError("One of num_steps or last_step must be specified.")
        if num_steps is not None and last_step is not None:
            raise ValueError("Only one of num_steps or last_step can be specified.")
        self.target: int | None = last_step
        """The step at which it stops; None before it is known."""
        self._num_steps = num_steps
        self._last_step = last_step
        self._watch: StepWatch | None = None

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        self._watch = StepWatch(global_step_of(tf1.get_default_graph(), self))
        self.target = self._last_step

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `AsyncSessionRunHook.after_create_session`."""
        assert self._watch is not None
        step = self._watch.start(session)
        if self.target is None:
            assert self._num_steps is not None
            self.target = step + self._num_steps

    def is_done(self, global_step: int | None) -> bool:
        """See `AsyncSessionRunHook.is_done`."""
        return self.target is not None and global_step is not None and global_step >= self.target

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        assert self._watch is not None
        return tf1.train.SessionRunArgs(self._watch.step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`."""
        assert self._watch is not None
        assert self.target is not None
        if self._watch.reached(self.target, run_values.results, run_context.session) is not None:
            run_context.request_stop()


class EarlyStoppingHook(AsyncSessionRunHook):
    """Requests a stop when a scalar has not improved for a while.

    Args:
        monitor: What is watched: a tensor, its name, or a function that returns the newest value or None where there
            is none yet; such as ``lambda: evaluation.latest``. A function is called after each run, and a value that
            is the same object as the last one is not counted again.
        patience: So many values without an improvement end the training.
        min_delta: What a value must be better by.
        mode: ``"min"`` where less is better, ``"max"`` where more is.

    Attributes:
        best: The best value so far, or None.
        best_step: The global step of it, where there is a global step.
        without_improvement: Values since then.

    Raises:
        ValueError: `patience` is not positive, `min_delta` is negative, or `mode` is neither.
    """

    def __init__(
        self,
        monitor: Any,
        patience: int,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if patience <= 0:
            raise ValueError(f"patience must be positive, not {patience}")
        if min_delta < 0:
            raise ValueError(f"min_delta must not be negative, not {min_delta}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
        self.best: float | None = None
        self.best_step: int | None = None
        self.without_improvement = 0
        self._monitor = monitor
        self._patience = patience
        self._min_delta = min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self._function: Callable[[], Any] | None = None
        self._fetches: dict[str, Any] = {}
        self._last: Any = None

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        self.best = self.best_step = self._last = None
        self.without_improvement = 0
        graph = tf1.get_default_graph()
        self._fetches = {}
        if callable(self._monitor) and not isinstance(self._monitor, tf.Variable):
            self._function = self._monitor
        else:
            self._fetches["value"] = graph.as_graph_element(self._monitor, allow_operation=False)
        step = tf1.train.get_global_step(graph)
        if step is not None:
            self._fetches["step"] = step

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        return tf1.train.SessionRunArgs(self._fetches) if self._fetches else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`."""
        results = run_values.results or {}
        if self._function is not None:
            value = self._function()
            if value is None or value is self._last:
                return
            self._last = value
        else:
            value = results["value"]
        number = float(np.asarray(value).reshape(()))
        better = self.best is None or self._sign * number < self._sign * self.best - self._min_delta
        if better and not math.isnan(number):
            self.best = number
            self.best_step = step_value(results["step"]) if "step" in results else None
            self.without_improvement = 0
            return
        self.without_improvement += 1
        if self.without_improvement >= self._patience:
            run_context.request_stop()
