"""The standing service that writes the summaries of a graph.

It rides on training steps. When its timer is due it boards the session; the next training run that provides all
that the summaries need (feeds, queues, iterators) fetches their inputs along, from the same batch. Right after that
run, still between two steps, the protos are computed in a second run from these inputs, and the step is read: the
recorded step is the one after the run, and what depends on variables alone is their state after it.

::

    timer ── board ── training run: fetches_for(plan) ── run ── delivered(values) ── second run ── writer
                       no: "feeds no 'x:0'" ── the next training run is asked

A summary that needs nothing of a step runs by itself between two of them. See `summary_parts` for how a summary op
is taken apart.

Everything but `run` happens on the device thread, one after the other: that is why there is no lock here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import SessionClosed
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.looper import LooperTask
from asupervisor.services.summary_parts import SummaryParts, Taint, step_writers
from asupervisor.services.ticks import unless_stopped
from asupervisor.session.analysis import variable_name
from asupervisor.session.elements import step_value
from asupervisor.session.plan import RunPlan
from asupervisor.session.session import AsyncSession
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.sink import describe

#: After so many intervals without a training run that could carry them, the summaries are reported as missing.
PATIENCE_TICKS = 3

_LOST_SESSION = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)


class SummaryService:
    """Writes the summaries of a graph, at once and then at fixed times or every so many training runs; a service.

    Differences from the original, which runs the summary op by itself: no batch is eaten, no placeholder is
    missing, the values are those of a real step, and a summary that fails (a histogram of NaN) loses neither the
    step nor the other summaries: it is reported and counted.

    Source: `SVSummaryThread` of `tf.compat.v1.train.Supervisor`.

    Args:
        session: The session whose training runs carry the summaries.
        writer: Where they go.
        summary_op: A summary tensor, or a nested structure of summary tensors and ops.
        global_step: The variable or tensor that counts the steps, or None.
        save_summaries_secs: Interval in seconds, or None or 0 for none.
        save_summaries_steps: Interval in training runs, beside or instead of seconds, or None or 0 for none.
        coordinator: Its stop ends the service.
        clock: Where the time comes from.
        emit: Where trouble is reported.
        fatal: Whether a summary that fails ends the training, with its error.

    Attributes:
        failures: How often summaries could not be computed.
        recorded: How often they were written.
        last_step: The step of the last ones, or None.
    """

    name = "summaries"

    def __init__(
        self,
        session: AsyncSession,
        writer: SummaryWriter,
        summary_op: Any,
        *,
        global_step: Any = None,
        save_summaries_secs: float | None = 120,
        save_summaries_steps: int | None = None,
        coordinator: Coordinator,
        clock: Clock | None = None,
        emit: EventSink = log_only,
        fatal: bool = False,
    ) -> None:
        self.failures = 0
        self.recorded = 0
        self.last_step: int | None = None
        self._session = session
        self._writer = writer
        self._summary_op = summary_op
        self._global_step = global_step
        self._secs = save_summaries_secs or None
        self._steps = save_summaries_steps or None
        self._coordinator = coordinator
        self._clock = clock or SystemClock()
        self._emit = emit
        self._fatal = fatal
        self._fatal_error: BaseException | None = None
        self._parts: SummaryParts | None = None
        self._refusals: weakref.WeakKeyDictionary[RunPlan, str] = weakref.WeakKeyDictionary()
        self._aboard = False
        self._riding = False
        self._alarm_set = False
        self._reported = False
        self._ticks_aboard = 0
        self._runs_when_boarded = 0
        self._refusal = ""

    async def run(self) -> None:
        """Write summaries until the stop; cancellation ends it at once.

        Raises:
            Exception: The error of a summary, where that is fatal.
        """
        try:
            if self._secs is not None:
                await LooperTask(self._coordinator, self._secs, self._tick, name=self.name, clock=self._clock).run()
            elif not self._coordinator.should_stop():
                await self._tick()
                await self._coordinator.wait_for_stop()
        finally:
            self._session.disembark(self)
        if self._fatal_error is not None:
            raise self._fatal_error

    async def _tick(self) -> None:
        try:
            await unless_stopped(self._coordinator, self._session.control(self._due))
        except SessionClosed:
            pass

    # ------------------------------------------------------------------------ on the device thread

    def _due(self, raw: Any) -> None:
        """It is time; between two steps."""
        parts = self._parts or self._take_apart()
        if not parts.taint:
            self._record(raw, None)
            return
        if not self._aboard:
            self._board()
            return
        # The last time's summaries have not been carried yet.
        if self._session.paused:
            return
        if parts.taint == Taint.CHANCE:
            # Nobody trains. Drawing random numbers cannot disturb anybody now.
            self._leave()
            self._record(raw, None)
            return
        self._ticks_aboard += 1
        if self._ticks_aboard >= PATIENCE_TICKS:
            self._report_no_carrier(f"{PATIENCE_TICKS * (self._secs or 0):g} s")

    def _take_apart(self) -> SummaryParts:
        self._parts = parts = SummaryParts(self._session.graph, self._summary_op)
        if parts.whole:
            self._emit(
                "summary.not_separable",
                "computed within the training step, which fails if one of them does, because they cannot be cut off "
                f"from it: {', '.join(parts.whole)}",
                level="debug",
                summaries=list(parts.whole),
            )
        return parts

    def _board(self) -> None:
        self._aboard = True
        self._reported = False
        self._ticks_aboard = 0
        self._runs_when_boarded = self._session.training_runs
        self._refusal = ""
        self._session.board(self)

    def _leave(self) -> None:
        self._aboard = False
        self._session.disembark(self)

    def _report_no_carrier(self, since: str) -> None:
        if self._reported:
            return
        self._reported = True
        refusal = self._refusal or "there was none"
        self._emit(
            "summary.no_carrier",
            f"no training run could carry the summaries for {since}: {refusal}",
            level="warning",
            reason=refusal,
        )

    def fetches_for(self, plan: RunPlan) -> Sequence[Any] | None:
        """See `Rider.fetches_for`."""
        if self._riding:
            # The run that we rode on has failed, maybe because of us: let the next ones be without us for a while.
            self._riding = False
            self._leave()
            self._set_alarm()
            self._emit(
                "summary.carrier_failed",
                "a training run failed that carried the summaries; they wait for the next time",
                level="warning",
            )
            return None
        refusal = self._refusals.get(plan)
        if refusal is None:
            refusal = self._refusals[plan] = self._refuse(plan)
        if refusal:
            self._refusal = refusal
            missed_runs = self._session.training_runs - self._runs_when_boarded
            if self._steps is not None and missed_runs >= PATIENCE_TICKS * self._steps:
                self._report_no_carrier(f"{missed_runs} training runs")
            return None
        self._riding = True
        assert self._parts is not None
        return self._parts.inputs

    def _refuse(self, plan: RunPlan) -> str:
        """Why this training run cannot carry the summaries; empty if it can."""
        assert self._parts is not None
        extra = plan.touches_with(self._parts.inputs)
        # A control dependency on a placeholder is no need of it where it is fed.
        if missing := extra.placeholders - extra.feeds:
            return (
                f"the training runs do not feed {_names(missing)}; feed it there, or leave its summaries out of "
                "summary_op"
            )
        if sources := extra.sources - plan.touches.sources:
            return f"the training runs do not take from {_names(sources)}, so the summaries would take a batch away"
        effects = (extra.enqueues - plan.touches.enqueues) | (extra.closes - plan.touches.closes)
        if effects:
            return f"the summaries would put something into {_names(effects)} or close it"
        step = variable_name(self._global_step)
        if step is not None and extra.trains(step) and step_writers(self._session.graph, step) > 1:
            return "the summaries depend on a train op, maybe another one than that of the training runs"
        return ""

    def delivered(self, values: Sequence[Any], raw: Any) -> None:
        """See `Rider.delivered`. The values may lie in the memory of variables: used before the next step."""
        self._riding = self._aboard = False
        self._record(raw, values)

    def _set_alarm(self) -> None:
        """Come again after so many training runs; a run that is being delivered is not counted yet."""
        if self._steps is not None and not self._alarm_set:
            self._alarm_set = True
            self._session.set_alarm(self._session.training_runs + self._steps, self._due_by_steps)

    def _due_by_steps(self) -> None:
        self._alarm_set = False
        if self._coordinator.should_stop():
            return
        assert self._parts is not None
        if not self._parts.taint:
            self._record(self._session.raw, None)
        elif not self._aboard:
            self._board()

    # ------------------------------------------------------------------------ computing

    def _record(self, raw: Any, values: Sequence[Any] | None) -> None:
        """Compute the summaries and hand them to the writer.

        Args:
            raw: The TensorFlow session.
            values: Of the inputs, from the step that has just run; None to compute everything now.
        """
        self._set_alarm()
        try:
            with self._session.graph.as_default():
                step, data = self._compute(raw, values)
            if data:
                self._writer.add_summary(data, step)
        except Exception as error:
            self._failed([], error, None)
            return
        if data:
            self.recorded += 1
            self.last_step = step
            self._emit("summary.recorded", f"summaries recorded at step {step}", level="debug", step=step)

    def _compute(self, raw: Any, values: Sequence[Any] | None) -> tuple[int | None, bytes]:
        """The step and the serialized summaries."""
        parts = self._parts
        assert parts is not None
        feeds = parts.feeds(values) if values is not None else {}
        known = dict(zip(map(id, parts.inputs), values, strict=True)) if values is not None else {}
        roots = [root for root in parts.roots if id(root) not in known]
        has_step = self._global_step is not None
        steps = [self._global_step] if has_step else []
        try:
            results, steps = raw.run([roots, steps], feeds) if roots or steps else ([], [])
            step = step_value(steps[0]) if has_step else None
            results += [known[id(root)] for root in parts.roots if id(root) in known]
        except tf.errors.OpError as error:
            if isinstance(error, _LOST_SESSION):
                raise
            step = step_value(raw.run(self._global_step)) if has_step else None
            results = self._piece_by_piece(raw, feeds, known, error, step)
        # Serialized protos, one after the other, are the serialized merged proto.
        return step, b"".join(result for result in results if isinstance(result, bytes))

    def _piece_by_piece(
        self, raw: Any, feeds: dict[Any, Any], known: dict[int, Any], error: Exception, step: int | None
    ) -> list[Any]:
        """One of the summaries fails: which one? The others are not lost."""
        assert self._parts is not None
        results: list[Any] = []
        failed: list[str] = []
        for part in self._parts.parts:
            try:
                results.append(known[id(part)] if id(part) in known else raw.run(part, feeds))
            except tf.errors.OpError as part_error:
                failed.append(part.name)
                error = error if len(failed) > 1 else part_error
        self._failed(failed, error, step)
        return results

    def _failed(self, summaries: list[str], error: Exception, step: int | None) -> None:
        self.failures += 1
        stopping = self._coordinator.should_stop()
        self._emit(
            "summary.failed",
            f"{', '.join(summaries) or 'summaries'} could not be computed at step {step}: {describe(error)}",
            level="debug" if stopping else "warning",
            summaries=summaries,
            step=step,
            failures=self.failures,
            error=describe(error),
        )
        if self._fatal and not stopping:
            self._fatal_error = error
            self._coordinator.report(error, self.name)


def _names(names: frozenset[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
