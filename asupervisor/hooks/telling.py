"""Hooks that tell of the training: values in the log, and where the time of a step goes."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.clock import Every
from asupervisor.hooks.protocol import AsyncSessionRunHook
from asupervisor.hooks.stopping import global_step_of
from asupervisor.session.elements import step_value

tf1 = tf.compat.v1
_logger = logging.getLogger("asupervisor")


class LoggingTensorHook(AsyncSessionRunHook):
    """Logs values every so many runs or seconds, or at the end.

    Unlike the original it runs nothing at the end: what it logs there are the values of the last run, so that no input
    is taken for it and no placeholder is missing. Its time is monotonic. It logs by the logger ``asupervisor``.

    Source: `tf.compat.v1.train.LoggingTensorHook`.

    Args:
        tensors: A dict from tags to tensors or their names, or an iterable of tensors or names.
        every_n_iter: Runs between two logs.
        every_n_secs: Seconds between two logs.
        at_end: Whether the last values are logged at the end.
        formatter: Makes the message of a dict from tags to values.

    Raises:
        ValueError: `every_n_iter` is not positive; there are both intervals, or neither of them and no `at_end`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[Any, Any]], str] | None = None,
    ) -> None:
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not only_at_end and (every_n_iter is None) == (every_n_secs is None):
            raise ValueError("either at_end and/or exactly one of every_n_iter and every_n_secs must be provided.")
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}.")
        if isinstance(tensors, Mapping):
            self._tensors: dict[Any, Any] = {tag: tensors[tag] for tag in sorted(tensors)}
        else:
            self._tensors = {item if isinstance(item, str) else item.name: item for item in tensors}
        self._every_n_iter = every_n_iter
        self._every_n_secs = every_n_secs
        self._at_end = at_end
        self._only_at_end = only_at_end
        self._formatter = formatter
        self._fetches: dict[Any, Any] = {}
        self._timer = Every()
        self._logged_at: float | None = None
        self._due = False
        self._runs = 0
        self._last: dict[Any, Any] | None = None

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        graph = tf1.get_default_graph()
        self._fetches = {tag: _tensor(graph, item) for tag, item in self._tensors.items()}
        self._timer = Every(self._every_n_secs, self._every_n_iter)
        self._logged_at = self._last = None
        self._runs = 0

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        self._due = not self._only_at_end and self._timer.due(self._runs, time.monotonic())
        return tf1.train.SessionRunArgs(self._fetches) if self._due or self._at_end else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`."""
        self._last = run_values.results
        if self._due:
            self._log(self._last)
            self._timer.done(self._runs, time.monotonic())
        self._runs += 1

    def end(self, session: Any) -> None:
        """See `AsyncSessionRunHook.end`."""
        if self._at_end and self._last is not None:
            self._log(self._last)

    def _log(self, values: Any) -> None:
        now = time.monotonic()
        before, self._logged_at = self._logged_at, now
        if self._formatter is not None:
            _logger.info("%s", self._formatter(values))
            return
        told = ", ".join(f"{tag} = {values[tag]}" for tag in self._fetches)
        _logger.info("%s", told if before is None else f"{told} ({now - before:.3f} sec)")


class StepProfileHook(AsyncSessionRunHook):
    """Tells where the time of a step goes, every so many steps or seconds: per operation, and as a trace to look at.

    Every trace is a file ``timeline-<step>.json`` in Chrome's format, as the original's; never one of the first run,
    which is slower than the others. Unlike the original it makes its directory, opens no event file, and sums up.

    Source: `tf.compat.v1.train.ProfilerHook`.

    Args:
        save_steps: Steps between two profiles.
        save_secs: Seconds between two profiles, instead.
        output_dir: Where the traces go.
        top: How many kinds of operations are logged, the most expensive ones first.

    Attributes:
        step: The step of the last profile, or None.
        profile: Microseconds by kind of operation, the most expensive one first, of the last profile.

    Raises:
        ValueError: Not exactly one interval was given.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        *,
        top: int = 5,
    ) -> None:
        if (save_steps is None) == (save_secs is None):
            raise ValueError("exactly one of save_steps and save_secs must be provided.")
        self.step: int | None = None
        self.profile: dict[str, int] = {}
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._directory = Path(output_dir)
        self._top = top
        self._global_step: Any = None
        self._timer = Every()
        self._next_step: int | None = None
        self._due = False
        self._kinds: dict[str, str] = {}

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`."""
        graph = tf1.get_default_graph()
        self._global_step = global_step_of(graph, self)
        self._timer = Every(self._save_secs, self._save_steps)
        self._next_step = None

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        self._due = self._next_step is not None and self._timer.due(self._next_step, time.monotonic())
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE) if self._due else None
        return tf1.train.SessionRunArgs(self._global_step, options=options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`."""
        step = step_value(run_values.results) + 1
        if self._next_step is None:
            self._timer.done(step - 1, time.monotonic())  # not before a whole interval is over
        if self._due:
            step = step_value(run_context.session.run(self._global_step))
            self._timer.done(step, time.monotonic())
            self._save(step, run_values.run_metadata.step_stats, run_context.session.graph)
        self._next_step = step + 1

    def _save(self, step: int, step_stats: Any, graph: tf.Graph) -> None:
        micros: Counter[str] = Counter()
        for device in step_stats.dev_stats:
            for node in device.node_stats:
                micros[self._kind(graph, node.node_name)] += node.op_end_rel_micros - node.op_start_rel_micros
        self.step, self.profile = step, dict(micros.most_common())
        told = ", ".join(f"{kind} {took} us" for kind, took in micros.most_common(self._top))
        trace = _tf.chrome_trace(step_stats)
        where = ""
        if trace is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"timeline-{step}.json"
            path.write_text(trace)
            where = f"; trace in {path}"
        _logger.info("profile of step %d: %s%s", step, told, where)

    def _kind(self, graph: tf.Graph, node: str) -> str:
        kind = self._kinds.get(node)
        if kind is None:
            try:
                kind = str(graph.get_operation_by_name(node).type)
            except (KeyError, ValueError):  # of TensorFlow's rewritten graph
                kind = node.rpartition("/")[2]
            self._kinds[node] = kind
        return kind


def _tensor(graph: tf.Graph, item: Any) -> Any:
    """A tensor or the tensor of a name; an operation's name means its only output."""
    if isinstance(item, str) and ":" not in item:
        outputs = graph.get_operation_by_name(item).outputs
        if len(outputs) != 1:
            raise ValueError(f"Name {item} is ambiguous, as this operation has {len(outputs)} outputs.")
        return outputs[0]
    return graph.as_graph_element(item)
