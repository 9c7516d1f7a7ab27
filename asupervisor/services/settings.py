"""What a supervisor, or a monitored session, was told; as each of its sessions uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asupervisor.clock import Clock
from asupervisor.services.peers import Peers
from asupervisor.services.sync_replicas import SyncReplicas
from asupervisor.session.elements import GraphElements


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a supervisor was told, as its sessions use it; see `Supervisor` for the meaning of each.

    For a non-chief `logdir` and the intervals are None.

    Attributes:
        checkpoint_filename_with_path: Checkpoint to restore instead of the logdir's newest, until this process has
            saved one there itself.
        log_step_count_steps: Steps between two records of the training speed, instead of `save_summaries_secs`.
        services_without_logdir: Whether there are summaries and a step counter wherever there is a summary writer.
        write_graph: Whether ``graph.pbtxt`` is written into the logdir.
        fresh_start: Whether the model is made anew, whatever there is.
        peers: The other tasks of the cluster, or None.
        sync_replicas: What there is to do for synchronous replicas, or None.
    """

    name: str
    elements: GraphElements
    is_chief: bool
    logdir: str | None
    checkpoint_basename: str
    init_feed_dict: Mapping[Any, Any] | None
    init_fn: Callable[[Any], Any] | None
    save_summaries_secs: float | None
    save_summaries_steps: int | None
    save_model_secs: float | None
    save_model_steps: int | None
    save_on_exit: bool
    stop_grace_secs: float
    clock: Clock
    checkpoint_filename_with_path: str | None = None
    log_step_count_steps: int | None = None
    services_without_logdir: bool = False
    write_graph: bool = True
    fresh_start: bool = False
    peers: Peers | None = None
    sync_replicas: SyncReplicas | None = None

    @property
    def saves(self) -> bool:
        """Whether there is somewhere to save to and something to save with."""
        return self.logdir is not None and self.elements.saver is not None

    @property
    def saves_by_itself(self) -> bool:
        """Whether the checkpoint service and the final save exist."""
        return self.saves and bool(self.save_model_secs or self.save_model_steps)
