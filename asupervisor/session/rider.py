"""Training runs: their count, their riders, their alarms, and the switch that makes them wait.

A *rider* goes along with a training run: it has its tensors fetched in the very same run, from the same feed and the
same batch. That is how summaries are taken without a run of their own, which would eat a batch or miss a feed.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asupervisor.errors import describe
from asupervisor.events import EventSink

if TYPE_CHECKING:
    from asupervisor.session.plan import RunPlan


class Rider(Protocol):
    """What goes along with one training run."""

    def fetches_for(self, plan: RunPlan) -> Sequence[Any] | None:
        """The tensors to fetch along with this run, or None to wait for another one.

        Called on the device thread, before a training run.
        """

    def delivered(self, values: Sequence[Any], raw: Any) -> None:
        """The run succeeded; `values` are the tensors' values, `raw` is the TensorFlow session.

        Called on the device thread, right after the run. An exception is reported, and never fails the step.
        """


class TrainingRuns:
    """The training runs of one session. Methods run on the device thread unless they say otherwise.

    Args:
        raw: The TensorFlow session, for riders.
        emit: Told of riders and alarms that failed.
    """

    def __init__(self, raw: Any, emit: EventSink) -> None:
        self.raw = raw
        self.count = 0
        self.paused = False
        self.failure: BaseException | None = None
        self._emit = emit
        self._guard = threading.Lock()
        self._riders: list[Rider] = []
        self._alarms: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._next_alarm = sys.maxsize

    # ------------------------------------------------------------------------------------------- any thread

    def board(self, rider: Rider) -> None:
        """Let it ride on the next training run that suits it; any thread."""
        with self._guard:
            if rider not in self._riders:
                self._riders.append(rider)

    def disembark(self, rider: Rider) -> None:
        """It no longer wants to ride; any thread. A run that it rides on at this moment still delivers."""
        with self._guard:
            if rider in self._riders:
                self._riders.remove(rider)

    def set_alarm(self, at: int, fn: Callable[[], None]) -> None:
        """Call `fn` once, right after the training run that makes the count at least `at`; any thread."""
        with self._guard:
            heapq.heappush(self._alarms, (at, next(self._serial), fn))
            self._next_alarm = self._alarms[0][0]

    def let_go(self) -> None:
        """The session is closed: whoever would have gone along, or wanted to be told, leads back to it; any thread."""
        with self._guard:
            self._riders.clear()
            self._alarms.clear()
            self._next_alarm = sys.maxsize
        self.failure = None  # its traceback does, too

    # ------------------------------------------------------------------------------------ on the device thread

    def run(self, plan: RunPlan, args: Any) -> Any:
        """One training run with converted feeds, whoever rides along, and what is due after it."""
        try:
            result = self._run_with_riders(plan, args) if self._riders else plan.execute(args)
        except (TypeError, ValueError):  # of TensorFlow, about fetches and feeds: nothing has run
            raise
        except BaseException as error:
            self.failure = error
            raise
        self.count += 1
        if self.count >= self._next_alarm:
            self._ring_alarms()
        return result

    def _run_with_riders(self, plan: RunPlan, args: Any) -> Any:
        aboard: list[tuple[Rider, int]] = []
        extra: list[Any] = []
        for rider in tuple(self._riders):
            try:
                fetches = rider.fetches_for(plan)
            except Exception as error:
                self._rider_failed(rider, error)
                continue
            if fetches is not None:
                aboard.append((rider, len(fetches)))
                extra.extend(fetches)
        if not aboard:
            return plan.execute(args)
        result, values = plan.execute_with(args, extra)
        begin = 0
        for rider, count in aboard:
            self.disembark(rider)
            try:
                rider.delivered(values[begin : begin + count], self.raw)
            except Exception as error:
                self._rider_failed(rider, error)
            begin += count
        return result

    def _rider_failed(self, rider: Rider, error: Exception) -> None:
        self.disembark(rider)
        self._emit(
            "rider.failed",
            f"{type(rider).__name__} failed on a training run, which goes on: {describe(error)}",
            level="error",
            rider=type(rider).__name__,
            error=describe(error),
        )

    def _ring_alarms(self) -> None:
        due: list[Callable[[], None]] = []
        with self._guard:
            while self._alarms and self._alarms[0][0] <= self.count:
                due.append(heapq.heappop(self._alarms)[2])
            self._next_alarm = self._alarms[0][0] if self._alarms else sys.maxsize
        for fn in due:
            try:
                fn()
            except Exception as error:
                self._emit(
                    "alarm.failed",
                    f"what was due after training run {self.count} failed: {describe(error)}",
                    level="error",
                    training_runs=self.count,
                    error=describe(error),
                )
