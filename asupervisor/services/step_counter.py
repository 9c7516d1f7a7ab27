"""The standing service that measures how fast the global step advances."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import SessionClosed
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.looper import LooperTask
from asupervisor.services.ticks import unless_stopped
from asupervisor.session.analysis import variable_name
from asupervisor.session.elements import step_value
from asupervisor.session.session import AsyncSession
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.sink import describe

TOLD_EVERY_SECS = 1.0
"""By steps, the speed is told no more often than this, in seconds."""


class StepCounter:
    """Writes ``global_step/sec`` into the event file, at fixed times or every so many steps; a service.

    By time, it begins at once with 0, because nothing has been counted yet; by steps, after the first so many. The
    step is read between two training steps. It never disturbs the training: a read that fails is an event. Differences
    from the original: no infinite value where no time has passed, and a step that went back (after a restore) is a new
    base, not a negative speed.

    Source: `SVStepCounterThread` of `tf.compat.v1.train.Supervisor`, and `tf.compat.v1.train.StepCounterHook`.

    Args:
        session: The session.
        writer: Where the values go.
        global_step: The variable or tensor that counts the steps.
        every_secs: Interval in seconds; None where it is one in steps.
        every_steps: Interval in steps. Training runs are counted: how many steps one makes is learnt on the way.
        coordinator: Its stop ends the service.
        clock: Where the time comes from.
        emit: Where trouble is reported.
    """

    name = "step_counter"

    def __init__(
        self,
        session: AsyncSession,
        writer: SummaryWriter,
        *,
        global_step: Any,
        every_secs: float | None = None,
        every_steps: int | None = None,
        coordinator: Coordinator,
        clock: Clock | None = None,
        emit: EventSink = log_only,
    ) -> None:
        self.tag = f"{step_name(global_step)}/sec"
        self.last_step: int | None = None
        self._session = session
        self._writer = writer
        self._global_step = global_step
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._told_at = -math.inf
        self._coordinator = coordinator
        self._clock = clock or SystemClock()
        self._emit = emit
        self._measured: float | None = None
        self._base: tuple[float, int] | None = None  # time and training runs at the last tick

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second over the last interval; before its end, training runs per second since the start.

        None while nothing can be said. Any thread.
        """
        if self._measured is not None or self._base is None:
            return self._measured
        elapsed_secs = self._clock.monotonic() - self._base[0]
        runs = self._session.training_runs - self._base[1]
        return runs / elapsed_secs if runs and elapsed_secs > 0 else None

    async def run(self) -> None:
        """Measure until the stop; cancellation ends it at once."""
        if self._every_secs is None:
            await self._tick()
            await self._coordinator.wait_for_stop()
            return
        await LooperTask(self._coordinator, self._every_secs, self._tick, name=self.name, clock=self._clock).run()

    async def _tick(self) -> None:
        try:
            await unless_stopped(self._coordinator, self._session.control(self._count))
        except SessionClosed:
            pass
        except (tf.errors.OpError, RuntimeError) as error:
            self._emit(
                "step_counter.failed",
                f"the global step could not be read: {describe(error)}",
                level="debug" if self._coordinator.should_stop() else "warning",
                error=describe(error),
            )

    def _count(self, raw: Any) -> None:
        """On the device thread, between two steps: so the time belongs to the step."""
        step = step_value(raw.run(self._global_step))
        now = self._clock.monotonic()
        last_step, self.last_step = self.last_step, step
        runs = self._session.training_runs
        base, self._base = self._base, (now, runs)
        if self._every_secs is None:
            self._set_alarm(runs, step, base, last_step)
        if base is None or last_step is None:
            if self._every_secs is None:
                return
            steps_per_sec = 0.0
        elif now <= base[0] or step < last_step:
            return
        else:
            steps_per_sec = self._measured = (step - last_step) / (now - base[0])
        value = tf.compat.v1.Summary.Value(tag=self.tag, simple_value=steps_per_sec)
        self._writer.add_summary(tf.compat.v1.Summary(value=[value]), step)
        if self._every_secs is None and now - self._told_at >= TOLD_EVERY_SECS:
            self._told_at = now
            self._emit(
                "step_counter.measured",
                f"{self.tag}: {steps_per_sec:g} at step {step}",
                step=step,
                steps_per_sec=steps_per_sec,
            )

    def _set_alarm(self, runs: int, step: int, base: tuple[float, int] | None, last_step: int | None) -> None:
        """Come again after so many steps."""
        interval = self._every_steps or 1
        if base is not None and last_step is not None and runs > base[1] and step > last_step:
            interval = max(1, round(interval * (runs - base[1]) / (step - last_step)))
        self._session.set_alarm(runs + interval, self._due)

    def _due(self) -> None:
        """On the device thread, right after a training run."""
        if not self._coordinator.should_stop():
            with self._session.graph.as_default():
                self._count(self._session.raw)


def step_name(global_step: Any) -> str:
    """The name of a global step: that of its variable, if it is one or a read of one."""
    tensor = getattr(global_step, "handle", None)
    op = (global_step if tensor is None else tensor).op
    if tensor is not None or op.type in ("Identity", "ReadVariableOp", "Variable", "VariableV2", "VarHandleOp"):
        return variable_name(global_step) or str(op.name)
    return str(op.name)
