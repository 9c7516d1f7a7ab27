"""The standing service that measures how fast the global step advances."""

from __future__ import annotations

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


class StepCounter:
    """Writes ``global_step/sec`` into the event file, at once and then at fixed times; a service.

    The first value is 0, because nothing has been counted yet. The step is read between two training steps. It
    never disturbs the training: a read that fails is an event. Differences from the original: no infinite value
    where no time has passed, and a step that went back (after a restore) is a new base, not a negative speed.

    Source: `SVStepCounterThread` of `tf.compat.v1.train.Supervisor`.

    Args:
        session: The session.
        writer: Where the values go.
        global_step: The variable or tensor that counts the steps.
        every_secs: Interval, in seconds.
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
        every_secs: float,
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
        base, self._base = self._base, (now, self._session.training_runs)
        if base is None or last_step is None:
            steps_per_sec = 0.0
        elif now <= base[0] or step < last_step:
            return
        else:
            steps_per_sec = self._measured = (step - last_step) / (now - base[0])
        value = tf.compat.v1.Summary.Value(tag=self.tag, simple_value=steps_per_sec)
        self._writer.add_summary(tf.compat.v1.Summary(value=[value]), step)


def step_name(global_step: Any) -> str:
    """The name of a global step: that of its variable, if it is one or a read of one."""
    tensor = getattr(global_step, "handle", None)
    op = (global_step if tensor is None else tensor).op
    if tensor is not None or op.type in ("Identity", "ReadVariableOp", "Variable", "VariableV2", "VarHandleOp"):
        return variable_name(global_step) or str(op.name)
    return str(op.name)
