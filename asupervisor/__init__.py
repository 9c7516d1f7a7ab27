"""Asyncio-native supervised sessions for TensorFlow graph training.

The rooms of the house, each may import those below it only (`lint-imports` holds us to it)::

    testing  cli                   pytest plugin, a clock moved by hand, fault points, guards; the command line
    ------------------------------------------------------------------------------------------------
    supervisor  monitored  loops   Supervisor, MonitoredTrainingSession and its family, train_loop: they wire everything
    cluster                        chief, workers and parameter servers; local processes
    ------------------------------------------------------------------------------------------------
    services  hooks  recovery      background work; code that takes part in each run; when to begin again
    ------------------------------------------------------------------------------------------------
    checkpoint  summary  session   the checkpoint directory; the event file; the only room that drives a Session
    ------------------------------------------------------------------------------------------------
    runtime  _tf                   tasks and threads, no TensorFlow; the one door to its less public parts
    ------------------------------------------------------------------------------------------------
    clock  events  errors          time; frozen records; the exception tree

Every public name can be imported from here, and is loaded when it is first asked for: ``import asupervisor`` is
quick and does not import TensorFlow. The names of `asupervisor.cluster` and `asupervisor.testing` stay there. A name is
public if no part of its dotted path begins with an underscore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asupervisor.checkpoint.catalogue import checkpoints as checkpoints
    from asupervisor.checkpoint.records import CheckpointInfo as CheckpointInfo
    from asupervisor.checkpoint.records import CheckpointRecord as CheckpointRecord
    from asupervisor.checkpoint.retention import AnyOf as AnyOf
    from asupervisor.checkpoint.retention import EveryNHours as EveryNHours
    from asupervisor.checkpoint.retention import KeepAll as KeepAll
    from asupervisor.checkpoint.retention import LatestN as LatestN
    from asupervisor.checkpoint.retention import Retention as Retention
    from asupervisor.clock import Clock as Clock
    from asupervisor.clock import SystemClock as SystemClock
    from asupervisor.errors import CheckpointDamaged as CheckpointDamaged
    from asupervisor.errors import CheckpointError as CheckpointError
    from asupervisor.errors import CheckpointMismatch as CheckpointMismatch
    from asupervisor.errors import CheckpointNotRestored as CheckpointNotRestored
    from asupervisor.errors import ClusterConfigError as ClusterConfigError
    from asupervisor.errors import LogdirInUse as LogdirInUse
    from asupervisor.errors import LogdirNotWritable as LogdirNotWritable
    from asupervisor.errors import ModelLost as ModelLost
    from asupervisor.errors import NonFiniteError as NonFiniteError
    from asupervisor.errors import PeersUnreachable as PeersUnreachable
    from asupervisor.errors import PortInUse as PortInUse
    from asupervisor.errors import RecoveryExhausted as RecoveryExhausted
    from asupervisor.errors import SessionActive as SessionActive
    from asupervisor.errors import SessionClosed as SessionClosed
    from asupervisor.errors import SessionNotReady as SessionNotReady
    from asupervisor.errors import StepOutcomeUnknown as StepOutcomeUnknown
    from asupervisor.errors import StopGraceExceeded as StopGraceExceeded
    from asupervisor.errors import StopRequested as StopRequested
    from asupervisor.errors import SupervisorError as SupervisorError
    from asupervisor.errors import UnknownMaster as UnknownMaster
    from asupervisor.errors import WrongEventLoop as WrongEventLoop
    from asupervisor.events import Event as Event
    from asupervisor.events import EventSink as EventSink
    from asupervisor.events import ServiceStatus as ServiceStatus
    from asupervisor.events import Status as Status
    from asupervisor.hooks.evaluating import EvaluationHook as EvaluationHook
    from asupervisor.hooks.feeding import FeedScheduleHook as FeedScheduleHook
    from asupervisor.hooks.guarding import NonFiniteHook as NonFiniteHook
    from asupervisor.hooks.protocol import AsyncSessionRunHook as AsyncSessionRunHook
    from asupervisor.hooks.protocol import HookOutcome as HookOutcome
    from asupervisor.hooks.stopping import EarlyStoppingHook as EarlyStoppingHook
    from asupervisor.hooks.stopping import StopAtStepHook as StopAtStepHook
    from asupervisor.hooks.telling import LoggingTensorHook as LoggingTensorHook
    from asupervisor.hooks.telling import StepProfileHook as StepProfileHook
    from asupervisor.loops import train_loop as train_loop
    from asupervisor.monitored.creators import ChiefSessionCreator as ChiefSessionCreator
    from asupervisor.monitored.creators import SessionCreator as SessionCreator
    from asupervisor.monitored.creators import WorkerSessionCreator as WorkerSessionCreator
    from asupervisor.monitored.session import MonitoredSession as MonitoredSession
    from asupervisor.monitored.session import SingularMonitoredSession as SingularMonitoredSession
    from asupervisor.monitored.stepping import StepContext as StepContext
    from asupervisor.monitored.streams import MonitoredSteps as MonitoredSteps
    from asupervisor.monitored.training import MonitoredTrainingSession as MonitoredTrainingSession
    from asupervisor.recovery import Backoff as Backoff
    from asupervisor.recovery import RecoveryPolicy as RecoveryPolicy
    from asupervisor.runtime.coordinator import Coordinator as Coordinator
    from asupervisor.runtime.device import DeviceExecutor as DeviceExecutor
    from asupervisor.runtime.device import DeviceStatistics as DeviceStatistics
    from asupervisor.runtime.device import Priority as Priority
    from asupervisor.runtime.looper import LooperTask as LooperTask
    from asupervisor.session.blocking import BlockingSession as BlockingSession
    from asupervisor.session.manager import SessionManager as SessionManager
    from asupervisor.session.session import AsyncSession as AsyncSession
    from asupervisor.session.statistics import SessionStatistics as SessionStatistics
    from asupervisor.session.stream import StepStream as StepStream
    from asupervisor.supervisor import Supervisor as Supervisor

__version__ = "0.1.0"

#: Where each public name lives. `tests/test_public_names.py` compares it with the imports above and with what the
#: modules hold.
_HOMES = {
    "AnyOf": "checkpoint.retention",
    "AsyncSession": "session.session",
    "AsyncSessionRunHook": "hooks.protocol",
    "Backoff": "recovery",
    "BlockingSession": "session.blocking",
    "CheckpointDamaged": "errors",
    "CheckpointError": "errors",
    "CheckpointInfo": "checkpoint.records",
    "CheckpointMismatch": "errors",
    "CheckpointNotRestored": "errors",
    "CheckpointRecord": "checkpoint.records",
    "ChiefSessionCreator": "monitored.creators",
    "Clock": "clock",
    "ClusterConfigError": "errors",
    "Coordinator": "runtime.coordinator",
    "DeviceExecutor": "runtime.device",
    "DeviceStatistics": "runtime.device",
    "EarlyStoppingHook": "hooks.stopping",
    "EvaluationHook": "hooks.evaluating",
    "Event": "events",
    "EventSink": "events",
    "EveryNHours": "checkpoint.retention",
    "FeedScheduleHook": "hooks.feeding",
    "HookOutcome": "hooks.protocol",
    "KeepAll": "checkpoint.retention",
    "LatestN": "checkpoint.retention",
    "LogdirInUse": "errors",
    "LogdirNotWritable": "errors",
    "LoggingTensorHook": "hooks.telling",
    "LooperTask": "runtime.looper",
    "ModelLost": "errors",
    "MonitoredSession": "monitored.session",
    "MonitoredSteps": "monitored.streams",
    "MonitoredTrainingSession": "monitored.training",
    "NonFiniteError": "errors",
    "NonFiniteHook": "hooks.guarding",
    "PeersUnreachable": "errors",
    "PortInUse": "errors",
    "Priority": "runtime.device",
    "RecoveryExhausted": "errors",
    "RecoveryPolicy": "recovery",
    "Retention": "checkpoint.retention",
    "ServiceStatus": "events",
    "SessionActive": "errors",
    "SessionClosed": "errors",
    "SessionCreator": "monitored.creators",
    "SessionManager": "session.manager",
    "SessionNotReady": "errors",
    "SessionStatistics": "session.statistics",
    "SingularMonitoredSession": "monitored.session",
    "Status": "events",
    "StepContext": "monitored.stepping",
    "StepOutcomeUnknown": "errors",
    "StepProfileHook": "hooks.telling",
    "StepStream": "session.stream",
    "StopAtStepHook": "hooks.stopping",
    "StopGraceExceeded": "errors",
    "StopRequested": "errors",
    "Supervisor": "supervisor",
    "SupervisorError": "errors",
    "SystemClock": "clock",
    "UnknownMaster": "errors",
    "WorkerSessionCreator": "monitored.creators",
    "WrongEventLoop": "errors",
    "checkpoints": "checkpoint.catalogue",
    "train_loop": "loops",
}

_ROOMS = ("cluster", "testing")

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name from its room (PEP 562)."""
    home = _HOMES.get(name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
