"""The hook that evaluates the model now and then, on a graph of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor.hooks.protocol import AsyncSessionRunHook, HookOutcome
from asupervisor.hooks.stopping import StepWatch, global_step_of
from asupervisor.session.elements import step_value

tf1 = tf.compat.v1
_logger = logging.getLogger("asupervisor")


class EvaluationHook(AsyncSessionRunHook):
    """Evaluates the model every so many steps on a side graph: with the weights of the moment, without a checkpoint.

    The side graph is built by the same model code, with what differs in an evaluation (no dropout, other inputs). It
    has a session of its own. When an evaluation is due, the values of its variables are taken from the training
    session between two steps, so they belong to one step; the training waits until the evaluation has ended.

    Nothing of it counts as a step or takes from the training's inputs.

    Args:
        graph: The side graph.
        fetches: What is evaluated: tensors in any structure.
        every_n_steps: Steps between two evaluations; the first one is after so many steps.
        feeds: Called for each evaluation, returns the feed dictionaries of its batches. None: one run without feeds,
            or as many as `max_batches` says, or until the input ends.
        init_op: Run before each evaluation, as an iterator's initialiser.
        max_batches: Most batches of one evaluation; None for no limit where there are `feeds`.
        combine: Makes one result of the list of those of all batches. By default each number's mean.
        variables: Names of variables of the side graph, and the training's variables, or their names, that give them
            their values. The others of the side graph's global variables have the names of their counterparts.
        on_result: Called with the step and the result, on the device thread.
        at_end: Whether the last state is evaluated as well, at a clean end.
        config: `ConfigProto` of the side session.

    Attributes:
        results: The step and the result of each evaluation.

    Raises:
        ValueError: `every_n_steps` is not positive.
    """

    def __init__(
        self,
        graph: tf.Graph,
        fetches: Any,
        every_n_steps: int,
        feeds: Callable[[], Iterable[Mapping[Any, Any]]] | None = None,
        *,
        init_op: Any = None,
        max_batches: int | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
        at_end: bool = False,
        config: Any = None,
    ) -> None:
        if every_n_steps <= 0:
            raise ValueError(f"every_n_steps must be positive, not {every_n_steps}")
        self.results: list[tuple[int, Any]] = []
        self._graph = graph
        self._fetches = fetches
        self._every_n_steps = every_n_steps
        self._feeds = feeds
        self._init_op = init_op
        self._max_batches = max_batches
        self._combine = combine or mean_of
        self._given = dict(variables or {})
        self._on_result = on_result
        self._at_end = at_end
        self._config = config
        self._watch: StepWatch | None = None
        self._next = 0
        self._pairs: list[tuple[Any, Any]] = []
        self._prepare: list[Any] = []
        self._session: tf.compat.v1.Session | None = None

    @property
    def latest(self) -> Any:
        """The newest result, or None."""
        return self.results[-1][1] if self.results else None

    def begin(self) -> None:
        """See `AsyncSessionRunHook.begin`.

        Raises:
            ValueError: A variable of the side graph has no counterpart.
        """
        graph = tf1.get_default_graph()
        self._watch = StepWatch(global_step_of(graph, self))
        self.results = []
        known = {variable.op.name: variable for variable in graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES)}
        self._pairs, missing = [], []
        for side in self._graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES):
            here = self._given.get(side.op.name, side.op.name)
            here = known.get(here) if isinstance(here, str) else here
            if here is None:
                missing.append(side.op.name)
            else:
                self._pairs.append((side, here))
        if missing:
            raise ValueError(
                f"variables of the evaluation's graph that the training has not: {', '.join(sorted(missing))}. "
                "Name their counterparts by variables="
            )
        if not self._graph.finalized:
            with self._graph.as_default():
                self._prepare = [tf1.local_variables_initializer(), tf1.tables_initializer()]

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `AsyncSessionRunHook.after_create_session`."""
        assert self._watch is not None
        step = self._watch.start(session)
        self._next = (step // self._every_n_steps + 1) * self._every_n_steps
        if self._session is None:
            self._session = tf1.Session(graph=self._graph, config=self._config)

    def before_run(self, run_context: Any) -> Any:
        """See `AsyncSessionRunHook.before_run`."""
        assert self._watch is not None
        return tf1.train.SessionRunArgs(self._watch.step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `AsyncSessionRunHook.after_run`."""
        assert self._watch is not None
        step = self._watch.reached(self._next, run_values.results, run_context.session)
        if step is not None:
            self._next = (step // self._every_n_steps + 1) * self._every_n_steps
            self._evaluate(run_context.session, step)

    def end(self, session: Any) -> None:
        """See `AsyncSessionRunHook.end`."""
        if self._at_end:
            assert self._watch is not None
            step = step_value(session.run(self._watch.step))
            if not self.results or self.results[-1][0] != step:
                self._evaluate(session, step)

    def finish(self, session: Any, outcome: HookOutcome) -> None:
        """See `AsyncSessionRunHook.finish`."""
        side, self._session = self._session, None
        if side is not None:
            side.close()

    def _evaluate(self, training: Any, step: int) -> None:
        side = self._session
        assert side is not None
        values = training.run([here for _, here in self._pairs])
        with self._graph.as_default():
            self._load(side, values)
            side.run(self._prepare)
            if self._init_op is not None:
                side.run(self._init_op)
            result = self._combine(self._batches(side))
        self.results.append((step, result))
        _logger.info("evaluation at step %d: %s", step, result)
        if self._on_result is not None:
            self._on_result(step, result)

    def _load(self, side: tf.compat.v1.Session, values: list[Any]) -> None:
        # A variable's initialiser takes any value for the one that it would compute: no op need be added for this.
        todo = [(variable.initializer, value) for (variable, _), value in zip(self._pairs, values, strict=True)]
        while todo:
            feeds: dict[str, Any] = {}
            ops, later = [], []
            for op, value in todo:
                name = op.inputs[1].name
                if name in feeds:  # two variables begin with one and the same tensor
                    later.append((op, value))
                else:
                    feeds[name] = value
                    ops.append(op)
            side.run(ops, feeds)
            todo = later

    def _batches(self, side: tf.compat.v1.Session) -> list[Any]:
        results: list[Any] = []
        once = self._feeds is None and self._init_op is None and self._max_batches is None
        feeds = iter(self._feeds()) if self._feeds is not None else None
        while not (once and results) and (self._max_batches is None or len(results) < self._max_batches):
            feed = next(feeds, None) if feeds is not None else {}
            if feed is None:
                break
            try:
                results.append(side.run(self._fetches, feed))
            except tf.errors.OutOfRangeError:
                if not results:
                    raise
                break
        if not results:
            raise ValueError("an evaluation had no batch")
        return results


def mean_of(results: Sequence[Any]) -> Any:
    """The mean of each number of several results of one structure; what is no number is that of the first."""
    return tf.nest.map_structure(_mean, *results)


def _mean(*parts: Any) -> Any:
    if not np.issubdtype(np.asarray(parts[0]).dtype, np.number):
        return parts[0]
    return np.mean(np.stack(parts), axis=0)
