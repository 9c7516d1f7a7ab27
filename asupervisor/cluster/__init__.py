"""Chief, workers and parameter servers that come and go, on TensorFlow's own distributed engine.

::

    task         `Task`: our part: server, target, configuration, the end of the job
    config       TF_CONFIG and cluster specifications: who there is, and who we are
    membership   how a chief or a worker comes in, stays and leaves
    register     what the tasks tell one another, on the first parameter server
    probing      whether somebody listens
    joining      waits for the end of a job
    sync         `SyncReplicasHook`
    running      `run`: a program's main coroutine, and its exit code
    launcher     local processes: `launched`, `processes`, `outputs`, `pipes`, and `ports` that keeps their ports

The names are loaded when they are first asked for: the launcher needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asupervisor.cluster.running import EXIT_LOST as EXIT_LOST
    from asupervisor.cluster.running import exit_code as exit_code
    from asupervisor.cluster.running import run as run
    from asupervisor.cluster.sync import SyncReplicasHook as SyncReplicasHook
    from asupervisor.cluster.task import Task as Task

_HOMES = {
    "EXIT_LOST": "running",
    "SyncReplicasHook": "sync",
    "Task": "task",
    "exit_code": "running",
    "run": "running",
}

__all__ = ["EXIT_LOST", "SyncReplicasHook", "Task", "exit_code", "run"]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
