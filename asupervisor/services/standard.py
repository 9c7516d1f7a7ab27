"""The standard services of one session: summaries, the step counter and checkpoints, each where it has work to do."""

from __future__ import annotations

import contextlib
from typing import Any

from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.runtime.service import Service
from asupervisor.services.checkpointing import CheckpointService
from asupervisor.services.settings import RunSettings
from asupervisor.services.step_counter import StepCounter
from asupervisor.services.summaries import SummaryService
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.session import AsyncSession


class StandardServices:
    """Makes and keeps the services of one session; methods belong to its event loop.

    Args:
        settings: What the supervisor was told.
        around: What stands around the session.
        store: Its checkpoints, or None.
        coordinator: The stop state of the session.
    """

    def __init__(
        self, settings: RunSettings, around: Surroundings, store: CheckpointStore | None, coordinator: Coordinator
    ) -> None:
        self.checkpoints: CheckpointService | None = None
        self.summaries: SummaryService | None = None
        self.step_counter: StepCounter | None = None
        self._settings = settings
        self._emit = around.emit
        self._writer = around.writer
        self._store = store
        self._shared: dict[str, Any] = {"coordinator": coordinator, "clock": settings.clock, "emit": around.emit}
        self._seen_step: int | None = None
        self._started = False

    def start(self, host: Host[AsyncSession], session: AsyncSession, start_step: int | None) -> list[Service] | None:
        """See `Supervisor.start_standard_services`."""
        if self._settings.logdir is None and not (self._settings.services_without_logdir and self._writer is not None):
            self._emit("services.no_logdir", "standard services need a logdir; none started", level="warning")
            return None
        if self._started:  # a second set would fight with the first one for directory and device
            return []
        self._started = True
        if self._writer is not None and start_step is not None:
            self._writer.add_session_log("START", start_step)
        self._make(session)
        made = (self.summaries, self.step_counter, self.checkpoints if self._settings.saves_by_itself else None)
        return [host.spawn(service.name, service.run) for service in made if service is not None]

    def _make(self, session: AsyncSession) -> None:
        settings, elements = self._settings, self._settings.elements
        if self._writer is not None:
            if elements.summary_op is not None and (settings.save_summaries_secs or settings.save_summaries_steps):
                self.summaries = SummaryService(
                    session,
                    self._writer,
                    elements.summary_op,
                    global_step=elements.global_step,
                    save_summaries_secs=settings.save_summaries_secs,
                    save_summaries_steps=settings.save_summaries_steps,
                    **self._shared,
                )
            by_steps = settings.log_step_count_steps
            if elements.global_step is not None and (by_steps or settings.save_summaries_secs):
                self.step_counter = StepCounter(
                    session,
                    self._writer,
                    global_step=elements.global_step,
                    every_secs=None if by_steps else settings.save_summaries_secs,
                    every_steps=by_steps,
                    **self._shared,
                )
        if settings.saves_by_itself and self._store is not None:
            self.checkpoints = CheckpointService(
                session,
                self._store,
                save_model_secs=settings.save_model_secs,
                save_model_steps=settings.save_model_steps,
                on_saved=self._saved,
                **self._shared,
            )

    def _saved(self, info: CheckpointInfo) -> None:
        self._seen_step = info.step
        # The writer may be closed already: by `stop()`, before a session that went on was closed.
        if self._writer is not None and info.step is not None and not self._writer.closed:
            self._writer.add_session_log("CHECKPOINT", info.step, checkpoint_path=info.prefix)

    async def save(self, session: AsyncSession) -> CheckpointInfo:
        """See `Supervisor.save`."""
        if self._store is None or not self._settings.saves:
            raise RuntimeError(
                f"{self._settings.name} cannot save: that needs a chief with a logdir and a saver "
                f"(is_chief={self._settings.is_chief}, logdir={self._settings.logdir!r}, "
                f"saver={self._settings.elements.saver!r})"
            )
        if self.checkpoints is None:  # no interval, no service: saving is by hand only
            self.checkpoints = CheckpointService(session, self._store, on_saved=self._saved, **self._shared)
        return await self.checkpoints.save()

    async def first_save(self) -> None:
        """Wait for the save with which the checkpoint service begins; a failure of it is its business."""
        if self.checkpoints is not None and self._settings.saves_by_itself:
            with contextlib.suppress(Exception):
                await self.checkpoints.save()

    async def drain(self) -> None:
        """Wait, for a moment, for saves under way: what is published must not be younger than the next session."""
        if self.checkpoints is not None:
            await self.checkpoints.drain(KILL_GRACE_SECS)

    @property
    def last_saver(self) -> CheckpointService | None:
        """Who saves at the end, if anybody does."""
        saves = self._settings.saves_by_itself and self._settings.save_on_exit
        return self.checkpoints if saves else None

    @property
    def unsaved_runs(self) -> int:
        """How many training runs are in no checkpoint; 0 where nobody saves."""
        return 0 if self.checkpoints is None else self.checkpoints.unsaved_runs

    @property
    def last_step(self) -> int | None:
        """The global step as they have last seen it, or None; any thread."""
        counter, checkpoints = self.step_counter, self.checkpoints
        counted = None if counter is None else counter.last_step
        taken = None if checkpoints is None else checkpoints.last_step
        return max((step for step in (self._seen_step, counted, taken) if step is not None), default=None)

    @property
    def steps_per_sec(self) -> float | None:
        """The training speed as last counted, or None; any thread."""
        counter = self.step_counter
        return None if counter is None else counter.steps_per_sec

    @property
    def summary_failures(self) -> int:
        """How often summaries could not be computed; any thread."""
        summaries = self.summaries
        return 0 if summaries is None else summaries.failures

    def forget(self) -> None:
        """Let go of them, and of the session with them; what they have seen remains."""
        self._seen_step = self.last_step
        self.checkpoints = self.summaries = self.step_counter = None
