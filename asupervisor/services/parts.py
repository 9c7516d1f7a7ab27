"""What a supervisor is made of: what its constructor resolves its arguments into, once for all of its sessions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from asupervisor.checkpoint.records import NonFinitePolicy
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.events import EventHub
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.settings import RunSettings
from asupervisor.session.elements import USE_DEFAULT
from asupervisor.session.manager import SessionManager
from asupervisor.summary.adapter import adapt
from asupervisor.summary.base import SummaryWriter
from asupervisor.summary.writer import EventFileWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What each session of a supervisor is made with; see `Supervisor` for the meaning of each.

    Attributes:
        hub: Where events go.
        store: Checkpoints, or None.
        writer: The summary writer, or None.
        executor: The user's device thread; None where each session has its own.
        given_dir: The logdir as the program names it; None for a non-chief.
        save_summaries_secs: As it was told: the settings have None for 0. None for a non-chief.
        save_model_secs: Likewise.
    """

    settings: RunSettings
    session_manager: SessionManager
    coordinator: Coordinator
    hub: EventHub
    store: CheckpointStore | None
    writer: SummaryWriter | None
    executor: DeviceExecutor | None
    journal: bool
    handle_signals: bool
    given_dir: str | None
    save_summaries_secs: float | None
    save_model_secs: float | None


def make_store(
    settings: RunSettings,
    hub: EventHub,
    *,
    retention: Any,
    nonfinite: NonFinitePolicy,
    init_from: str | None,
    partial: bool | None,
) -> CheckpointStore | None:
    """Where there is something to save or to restore; it adds its ops to the graph."""
    place = settings.logdir if settings.saves else None
    if place is None and settings.checkpoint_filename_with_path is not None:
        place = os.path.dirname(settings.checkpoint_filename_with_path)  # noqa: PTH120 (it may be an address)
    if place is None or (not settings.saves and "://" in place):  # TensorFlow itself reads such
        return None
    return CheckpointStore(
        place,
        settings.elements.graph,
        settings.elements.saver,
        basename=settings.checkpoint_basename,
        global_step=settings.elements.global_step,
        retention=retention,
        nonfinite=nonfinite,
        fresh_start=settings.fresh_start,
        init_from=init_from,
        partial=partial,
        read_only=not settings.saves,
        init_feed_dict=settings.init_feed_dict,
        clock=settings.clock,
        emit=hub.emit,
    )


def make_writer(settings: RunSettings, hub: EventHub, summary_writer: Any) -> SummaryWriter | None:
    """The user's writer, adapted; our own where there is a logdir; or none. A non-chief has none."""
    if summary_writer is None or not settings.is_chief:
        return None
    if summary_writer is not USE_DEFAULT:
        return adapt(summary_writer, emit=hub.emit, clock=settings.clock)
    if settings.logdir is None:
        return None
    return EventFileWriter(settings.logdir, emit=hub.emit, clock=settings.clock)
