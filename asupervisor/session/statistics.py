"""How a session stands: the record that its status shows."""

from __future__ import annotations

from dataclasses import dataclass

from asupervisor.runtime.device import DeviceStatistics
from asupervisor.runtime.statistics import Percentiles


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """How a session stands.

    Attributes:
        name: The session.
        runs: Runs that have ended, of calls and of streams, all lanes.
        writing_runs: Those of them that wrote a variable, whichever.
        training_runs: Those of them that were training runs and succeeded.
        step_time: How long a training run took on the device thread.
        run_time: How long any other run took on the device thread.
        paused: Whether training runs wait.
        held: Training runs that wait because of it.
        streams: Streams that have not ended.
        loop_lag: From a finished result to its delivery on the event loop, for all sessions of the loop.
        device: The device thread and its lanes.
    """

    name: str
    runs: int
    writing_runs: int
    training_runs: int
    step_time: Percentiles
    run_time: Percentiles
    paused: bool
    held: int
    streams: int
    loop_lag: Percentiles
    device: DeviceStatistics
