"""`MonitoredTrainingSession`: a monitored session as training wants it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import tensorflow as tf

from asupervisor.clock import Clock
from asupervisor.events import EventHub
from asupervisor.monitored.creators import ChiefSessionCreator, SavingSettings, WorkerSessionCreator
from asupervisor.monitored.session import MonitoredSession
from asupervisor.recovery import RecoveryPolicy
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services import arguments
from asupervisor.services.peers import ClusterTask
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.writer import EventFileWriter

USE_DEFAULT: Final = object()


def MonitoredTrainingSession(
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    scaffold: Any = None,
    hooks: Iterable[Any] | None = None,
    chief_only_hooks: Iterable[Any] | None = None,
    save_checkpoint_secs: Any = USE_DEFAULT,
    save_summaries_steps: Any = USE_DEFAULT,
    save_summaries_secs: Any = USE_DEFAULT,
    config: Any = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = 7200,
    save_checkpoint_steps: Any = USE_DEFAULT,
    summary_dir: str | os.PathLike[str] | None = None,
    save_graph_def: bool = True,
    *,
    graph: tf.Graph | None = None,
    recovery: RecoveryPolicy | None = None,
    recovery_wait_secs: float = 30,
    clock: Clock | None = None,
    executor: DeviceExecutor | None = None,
    init_from: str | os.PathLike[str] | None = None,
    checkpoint_filename_with_path: str | os.PathLike[str] | None = None,
    partial_restore: bool | None = None,
    task: ClusterTask | None = None,
) -> MonitoredSession:
    """A monitored session that saves, summarises and measures by itself, where it has a checkpoint directory.

    ::

        async with MonitoredTrainingSession(checkpoint_dir="runs/digits", graph=graph) as sess:
            while not sess.should_stop():
                await sess.run(train_op)

    Checkpoints, summaries and the step counter are the Supervisor's services, not hooks: they cost a step nothing
    but its ride. A checkpoint exists before the first step, and one is written at the end.

    Source: `tf.compat.v1.train.MonitoredTrainingSession`.

    Args:
        master: See `Supervisor.managed_session`.
        is_chief: Whether this session initialises, saves and summarises; a worker waits for its chief.
        checkpoint_dir: Where to restore from and save to; None or empty for neither. A relative path is resolved at
            once, like that of `summary_dir`.
        scaffold: A `tf.compat.v1.train.Scaffold`.
        hooks: Hooks of every session.
        chief_only_hooks: Hooks of the chief, called before `hooks`.
        save_checkpoint_secs: Seconds between checkpoints; 600 unless steps are given. None or 0 for none by time.
        save_summaries_steps: Steps between summaries; 100 unless seconds are given. None or 0 for none by steps.
        save_summaries_secs: Seconds between summaries; None or 0 for none by time.
        config: `ConfigProto` for the session.
        stop_grace_period_secs: What services have to end by themselves after a stop, in seconds. Last calls of hooks
            have half of it, so that a final save has the rest: a hook that takes longer is an error.
        log_step_count_steps: Steps between two records of the training speed; None or 0 for none.
        max_wait_secs: Longest wait of a worker for its chief, and of both for a cluster's parameter servers, at the
            first start, in seconds.
        save_checkpoint_steps: Steps between checkpoints; None or 0 for none by steps.
        summary_dir: Where the event file goes; the checkpoint directory by default. It alone makes summaries, too.
        save_graph_def: Whether ``graph.pbtxt`` is written.
        graph: The graph; None for the caller's default graph.
        recovery: When to recover; see `MonitoredSession`.
        recovery_wait_secs: See `MonitoredSession`.
        clock: Where the time comes from.
        executor: The device thread to use; not closed.
        init_from: See `Supervisor`; the directory is `checkpoint_dir`.
        checkpoint_filename_with_path: The one checkpoint to begin from, at each start of the program; see
            `Supervisor`. A recovery goes on from what the session has saved since.
        partial_restore: See `Supervisor`.
        task: Our part in a cluster: it tells `is_chief`, which master sessions are opened on and how they are
            configured; see `asupervisor.cluster.Task`.

    Returns:
        The session, to be entered.

    Raises:
        ValueError: Both kinds of interval were given for checkpoints, or for summaries; or two places to begin from. Or
            `checkpoint_dir` is a remote address.
        RuntimeError: No graph was given and TensorFlow executes eagerly.
    """
    if task is not None:
        is_chief = task.is_chief
    summary_secs, summary_steps = _intervals(
        "save_summaries", save_summaries_secs, save_summaries_steps, default=(None, 100)
    )
    checkpoint_secs, checkpoint_steps = _intervals(
        "save_checkpoint", save_checkpoint_secs, save_checkpoint_steps, default=(600, None)
    )
    shared: dict[str, Any] = {
        "graph": graph,
        "recovery": recovery,
        "recovery_wait_secs": recovery_wait_secs,
        "clock": clock,
        "executor": executor,
        "_name": "MonitoredTrainingSession",
    }
    if not is_chief:
        worker = WorkerSessionCreator(scaffold, master, config, max_wait_secs, graph=graph, task=task)
        return MonitoredSession(worker, hooks, stop_grace_period_secs, **shared)
    creator = ChiefSessionCreator(
        scaffold,
        master,
        config,
        checkpoint_dir,
        checkpoint_filename_with_path,
        graph=graph,
        init_from=init_from,
        partial_restore=partial_restore,
        max_wait_secs=max_wait_secs,
        task=task,
    )
    first_hooks = list(chief_only_hooks or ())
    all_hooks = [*first_hooks, *(hooks or ())]
    summary_to = _checked_dir(summary_dir) or creator.checkpoint_dir
    if summary_to is None:
        return MonitoredSession(creator, all_hooks, stop_grace_period_secs, **shared)

    def writer(hub: EventHub) -> SummaryWriter:
        return EventFileWriter(summary_to, emit=hub.emit, clock=clock)

    saving = SavingSettings(
        save_checkpoint_secs=checkpoint_secs,
        save_checkpoint_steps=checkpoint_steps,
        save_summaries_secs=summary_secs,
        save_summaries_steps=summary_steps,
        log_step_count_steps=_positive(log_step_count_steps),
        save_graph_def=save_graph_def,
    )
    return MonitoredSession(
        creator,
        all_hooks,
        stop_grace_period_secs,
        **shared,
        _chief_hooks=len(first_hooks),
        _saving=saving,
        _writer=writer,
    )


def _checked_dir(summary_dir: Any) -> str | None:
    """The directory as an absolute path, a remote address as it is; None for none.

    Raises:
        TypeError: It is no path.
    """
    if summary_dir is None:
        return None
    try:
        path = os.fsdecode(summary_dir).removeprefix("file://")
    except TypeError:
        raise TypeError(f"summary_dir must be a path, not {summary_dir!r}") from None
    return arguments.resolved(path) if path else None


def _positive(value: Any) -> Any:
    return value if value and value > 0 else None


def _intervals(name: str, secs: Any, steps: Any, default: tuple[Any, Any]) -> tuple[Any, Any]:
    """The two intervals of one kind; a default counts where neither was given.

    Raises:
        ValueError: There are two.
    """
    if secs is USE_DEFAULT and steps is USE_DEFAULT:
        return default
    secs = None if secs is USE_DEFAULT else _positive(secs)
    steps = None if steps is USE_DEFAULT else _positive(steps)
    if secs and steps:
        raise ValueError(f"Can not provide both {name}_secs and {name}_steps: {secs} and {steps}.")
    return secs, steps
