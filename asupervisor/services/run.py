"""One session and its services: how they are put together and taken apart.

::

    start:   session (restored, initialised or awaited) ── graph written ── START record ── standing services
             ── queue feeders
    settle:  final save
    release: session closed

`start` runs in the host's task group; `settle` and `release` in tasks of the host's closer, each bounded by it.
Everything here runs on the event loop; what blocks goes to the device thread or a side thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import tensorflow as tf

from asupervisor.checkpoint.records import CheckpointInfo, Kind, Outcome
from asupervisor.checkpoint.snapshot import export_meta_graph, user_graph_def
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.errors import SessionClosed, StopGraceExceeded, WrongEventLoop, describe, not_trained_again
from asupervisor.events import Level, Status
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.runtime.service import Service
from asupervisor.services.beginning import Beginning
from asupervisor.services.ending import SessionEnd
from asupervisor.services.feeders import make_feeders, report_starved
from asupervisor.services.peers import Peers
from asupervisor.services.settings import RunSettings
from asupervisor.services.standard import StandardServices
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.elements import step_value
from asupervisor.session.manager import SessionManager
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import Patience


class SupervisedRun:
    """The parts of one session and how they are put together and taken apart.

    Args:
        settings: What the supervisor was told.
        around: What stands around the session.
        store: Its checkpoints, or None; outlives the run.
        session_manager: What prepares the session.
        coordinator: The stop state of the session, where it is not that of the surroundings.
        first: Whether it is the first session within the surroundings; then the graph is written.
        hurried: Whether somebody who waits for the end was cancelled, beside those who wait for our host.
    """

    def __init__(
        self,
        settings: RunSettings,
        around: Surroundings,
        *,
        store: CheckpointStore | None,
        session_manager: SessionManager,
        coordinator: Coordinator | None = None,
        first: bool = True,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self.restored_from: str | None = None
        """The checkpoint that the model came from, or None."""
        self.adopted = False
        """Whether it is a live model, which somebody else keeps."""
        self.start_step: int | None = None
        """The global step at which it began, or None."""
        self.settled = False
        """Whether it has ended, and has saved whatever it was to save."""
        self.trained_to = 0
        """The step that the model had reached at the end of our training, as far as we know; in a cluster."""
        self.owed: tuple[int, Exception] | None = None
        """The step that somebody is to reach again, and what it was lost by; of no matter once we train ourselves."""
        self.unsaved_runs = 0
        """How many of our training runs were not saved, in the end."""
        self._first = first
        self._hurried = hurried
        self._settled_runs: int | None = None  # writing runs at the last words, in a cluster
        if store is not None and store.last is not None and settings.checkpoint_filename_with_path is not None:
            # It is where training began. A later session of this process goes on from what it has saved since.
            settings = replace(settings, checkpoint_filename_with_path=None)
        self._settings = settings
        self._around = around
        self._coordinator = coordinator or around.coordinator
        self._emit = around.emit
        self._writer = around.writer
        self._executor = around.executor
        self._manager = session_manager
        self._store = store
        self._session: AsyncSession | None = None
        self.services = StandardServices(settings, around, store, self._coordinator)
        """What saves, summarises and counts beside the training."""
        self.ending = SessionEnd(self._coordinator, around)
        """How it ends."""
        self._host: Host[AsyncSession] | None = None
        self._started_at = settings.clock.monotonic()
        self._start_error: str | None = None
        self._final: Status | None = None
        self._leaves_as: Literal["done", "failed", "lost"] = "lost"

    @property
    def among_peers(self) -> bool:
        """Whether there are other tasks."""
        return self._settings.peers is not None

    @property
    def found(self) -> str:
        """What became of the model at the start, for people."""
        if self.restored_from is not None:
            return "the model was restored"
        if self.adopted:
            return "the live model was adopted"
        if not self._settings.is_chief:
            return "the chief has made the model anew"
        return "the model was not restored and begins anew"

    @property
    def past(self) -> str:
        """How far the model had come, as far as we know, for people; empty if we do not."""
        if self.last_step is None:
            return ""
        if self.last_step == self.start_step:
            return f"the session before had begun at step {self.last_step}"
        return f"the last step that a service had seen was {self.last_step}"

    @property
    def awaited(self) -> bool:
        """Whether other tasks wait for what we do: we are their chief."""
        return self.among_peers and self._settings.is_chief

    # ------------------------------------------------------------------ start

    async def start(
        self,
        host: Host[AsyncSession],
        *,
        master: str,
        config: Any,
        wait_for_checkpoint: bool,
        max_wait_secs: float,
        start_standard_services: bool,
    ) -> AsyncSession:
        """Make the session and its services; see `Supervisor.prepare_or_wait_for_session`."""
        self._host = host
        try:
            return await self._start(host, master, config, wait_for_checkpoint, max_wait_secs, start_standard_services)
        except Exception as error:
            self._start_error = describe(error)
            raise

    async def _start(
        self,
        host: Host[AsyncSession],
        master: str,
        config: Any,
        wait_for_checkpoint: bool,
        max_wait_secs: float,
        start_standard_services: bool,
    ) -> AsyncSession:
        settings, elements = self._settings, self._settings.elements
        if self._store is not None:
            self._store.lock = self._around.lock
            if settings.checkpoint_filename_with_path is not None and settings.saves_by_itself:
                await self._executor.side(self._store.check_begins_from, settings.checkpoint_filename_with_path)
        manager = self._manager.bound(
            executor=self._executor,
            clock=settings.clock,
            emit=self._emit_of_session,
            restore=None if self._store is None else self._store.restorer,
            coordinator=self._coordinator,
            global_step=elements.global_step,
            close=self._close_session,
        )
        beginning = Beginning(settings, manager, master, config, wait_for_checkpoint, max_wait_secs)
        if settings.peers is None:
            session = await beginning.open()
        else:
            patience = Patience(settings.clock, self._emit, self._coordinator)
            session, self.adopted = await beginning.open_among(
                settings.peers, self._executor, patience, self._emit, self._around.coordinator
            )
            if self.adopted and self._store is not None:
                self._store.claim(None)  # what lies there is an earlier state of this very model
        self._session = session
        self.restored_from = manager.restored_from
        try:
            self.start_step = await self.read_step()
        except tf.errors.FailedPreconditionError:  # nobody was to initialise it, or to check that it is
            self.start_step = None
        if self._store is not None and settings.saves_by_itself and start_standard_services:
            await session.control(self._store.warm_up)
        if settings.sync_replicas is not None:
            await session.control(settings.sync_replicas.initialise)
        self._write_graph()
        self._emit(
            "session.started",
            f"{'restored from ' + manager.restored_from if manager.restored_from else 'ready'}"
            + ("" if self.start_step is None else f", at step {self.start_step}"),
            restored_from=manager.restored_from,
            start_step=self.start_step,
        )
        if start_standard_services:
            if settings.is_chief and settings.logdir is not None:
                self.services.start(host, session, self.start_step)
            self.start_queue_runners(host, session, None)
        if settings.sync_replicas is not None:
            host.spawn(
                settings.sync_replicas.name,
                settings.sync_replicas.aggregate,
                session,
                self._coordinator,
                lambda: self.ending.leaves_as(self._outcome()) == "done",
            )
        if settings.peers is not None:
            host.spawn("cluster", settings.peers.watch, on_stop="cancel")
        return session

    def _write_graph(self) -> None:
        """Graph and meta graph, once per opening of the event file; serialised off the loop."""
        if not self._settings.is_chief or not self._first:
            return
        graph, saver = self._settings.elements.graph, self._settings.elements.saver
        if self._writer is not None:
            self._writer.add_graph(graph)
            self._writer.add_meta_graph(lambda: export_meta_graph(graph, saver))
        if self._settings.logdir is not None and self._settings.write_graph:
            assert self._host is not None
            self._host.spawn("graph.pbtxt", self._write_graph_file, self._settings.logdir, critical=False)

    async def _write_graph_file(self, logdir: str) -> None:
        graph = self._settings.elements.graph

        def write() -> None:
            tf.io.write_graph(user_graph_def(graph, add_shapes=True), logdir, "graph.pbtxt")

        await self._executor.side(write, label="write graph.pbtxt")

    # ------------------------------------------------------------------ services

    def _emit_of_session(self, kind: str, message: str, *, level: Level = "info", **data: Any) -> None:
        self._emit(kind, message, level=level, **data)
        if kind == "step.starved" and self._session is not None:
            report_starved(self._session, data.get("sources", ()), self._emit)

    def start_queue_runners(
        self, host: Host[AsyncSession], session: AsyncSession, queue_runners: Iterable[Any] | None
    ) -> list[Service]:
        """See `Supervisor.start_queue_runners`."""
        if queue_runners is None:
            queue_runners = self._settings.elements.queue_runners
        feeders = make_feeders(session, queue_runners, coordinator=self._coordinator, emit=self._emit)
        return [host.spawn(feeder.name, feeder.run) for feeder in feeders]

    async def summary_computed(self, summary: Any, global_step: int | None) -> None:
        """See `Supervisor.summary_computed`."""
        assert self._writer is not None
        if global_step is None and self._settings.elements.global_step is not None:
            global_step = await self.read_step()
        self._writer.add_summary(summary, global_step)

    async def run_sync(self, function: Callable[[], Any]) -> Any:
        """Run a loop's plain function on a thread of its own, with the graph entered there."""

        def entered() -> Any:
            # In a thread that has not entered a graph, TensorFlow executes eagerly, and much of its v1 API fails.
            with self._settings.elements.graph.as_default():
                return function()

        return await self._executor.side(entered, label=getattr(function, "__qualname__", "loop"))

    @property
    def session(self) -> AsyncSession:
        """The session.

        Raises:
            SessionClosed: There is none any more.
            RuntimeError: There is none yet.
        """
        if self._session is None:
            if self._final is not None:
                raise SessionClosed(self._settings.name)
            raise RuntimeError(
                f"the session of {self._settings.name} is still being prepared: wait until it is entered"
            )
        return self._session

    @property
    def last_step(self) -> int | None:
        """The global step as last seen, or None; any thread."""
        return max((step for step in (self.start_step, self.services.last_step) if step is not None), default=None)

    async def goes_on(self) -> bool:
        """Whether the model is the one that was there before, or others look after it."""
        settings = self._settings
        if self.adopted:
            return True
        if settings.peers is None or settings.sync_replicas is not None:  # without their chief, replicas cannot train
            return False
        return await settings.peers.others_at_work()

    async def read_step(self) -> int | None:
        """The global step now, read between two steps; None where there is none."""
        step = self._settings.elements.global_step
        if step is None or self._session is None:
            return None
        return step_value(await self._session.control(lambda raw: raw.run(step)))

    # ------------------------------------------------------------------ the end

    async def settle(self) -> None:
        """The final save, where there is anything to save that is not saved yet; in a cluster, after the others."""
        peers = self._settings.peers
        await (self._settle_alone() if peers is None else self._settle_among(peers))

    async def _settle_alone(self) -> None:
        outcome, saver = self._outcome(), self.services.last_saver
        try:
            await self._save_at_last(outcome)
            if saver is not None and saver.skipped and outcome is Outcome.STOPPED and not self.ending.signalled:
                raise self._no_final_save()
            self.settled = True
        except asyncio.CancelledError:
            if self._host is None or not self._host.interrupted:  # the time for it is over
                self._coordinator.record(self._no_final_save(), "the final save")
            raise

    async def _settle_among(self, peers: Peers) -> None:
        runs = self.session.statistics().writing_runs
        if runs == self._settled_runs:
            return  # once more, since the session is closed now: this was its end, well or not
        outcome = self._outcome()
        self._leaves_as = self.ending.leaves_as(outcome)
        if self._leaves_as == "lost" and outcome in (Outcome.ERROR, Outcome.STEP_ERROR):
            return  # the model is with the others, or nowhere
        try:
            if self._leaves_as == "done" and self._host is not None:
                await self._wait_for_others(peers, self._host.grace_left)
                outcome = self._outcome()
                self._leaves_as = self.ending.leaves_as(outcome)
            saved = await self._save_at_last(outcome)
            await self._check_nothing_is_lost(saved, peers.num_replicas)
            self.settled = True
        except BaseException as error:  # also if the time for it is over
            if self._leaves_as == "done" or (outcome is Outcome.CANCELLED and self._leaves_as == "failed"):
                self._leaves_as = self.ending.cut_off_as(error)  # an error of before is told all the same
            if isinstance(error, asyncio.CancelledError) and self._leaves_as == "failed":
                self._coordinator.record(self._no_final_save(), "the final save")
            raise
        finally:
            self._settled_runs = runs

    async def _check_nothing_is_lost(self, saved: CheckpointInfo | None, num_replicas: int) -> None:
        saver = self.services.last_saver
        if saved is not None and saved.kind is Kind.EMERGENCY and self._leaves_as == "done":
            raise self._no_final_save(aside=saved.prefix)
        if saver is not None and saver.skipped and self._leaves_as == "done":
            reached = await self._reached()
            if reached is None or saver.last_step is None or reached > saver.last_step:
                raise self._no_final_save()
        if self.owed is None or saver is None or self.session.training_runs:
            return
        # Each of those who train may have had a step under way when the training ended.
        if ((saved.step if saved is not None else saver.last_step) or 0) < self.owed[0] - num_replicas:
            raise not_trained_again(self.owed[1])

    def _no_final_save(self, aside: str = "") -> StopGraceExceeded:
        return StopGraceExceeded.of_final_save(self._settings.stop_grace_secs, aside)

    async def _save_at_last(self, outcome: Outcome) -> CheckpointInfo | None:
        saver = self.services.last_saver
        return None if saver is None else await saver.final_save(outcome, self._host.grace_left if self._host else None)

    async def _wait_for_others(self, peers: Peers, grace_secs: float) -> None:
        """Wait until nobody trains any more, and save meanwhile.

        Raises:
            tf.errors.OpError: What ended the wait is a loss. Others go on, so that this is not the end: whoever can
                begins again.
        """
        reached = await self._reached()
        self.trained_to = (self.start_step or 0) + self.session.training_runs if reached is None else reached
        limit_secs, saver = 0.8 * grace_secs, self.services.last_saver
        if saver is not None:
            limit_secs = min(limit_secs, grace_secs - 1.5 * (saver.cost_secs or 0.0))
        saving = None if saver is None else asyncio.ensure_future(saver.save_meanwhile(grace_secs))
        try:
            await peers.before_last_save(max(0.0, limit_secs), self._is_hurried)
        except tf.errors.AbortedError:  # what is left of the model may be whole
            with contextlib.suppress(Exception):  # told as an event
                self.settled = saver is not None and await saver.final_save(Outcome.ERROR, grace_secs / 10) is not None
            raise
        finally:
            if saving is not None:
                saving.cancel()
                await asyncio.wait([saving])

    async def _reached(self) -> int | None:
        """The global step, where that is quick to know: unlike `read_step`, it does not wait for a frozen server."""
        options = tf.compat.v1.RunOptions(timeout_in_ms=1000)
        with contextlib.suppress(Exception):
            step = self._settings.elements.global_step
            return step_value(await self.session.side(lambda raw: raw.run(step, options=options)))
        return None

    def _is_hurried(self) -> bool:
        """Whether somebody does not want to wait for other tasks: a signal has come, or a cancellation."""
        host = self._host
        return self._hurried() or self._around.signalled or (host is not None and host.interrupted)

    def _outcome(self) -> Outcome:
        return self.ending.outcome(self.session, self._host is not None and self._host.interrupted)

    async def release(self) -> None:
        """Close the session and let go of it: what is left is how things stood."""
        session, host = self._session, self._host
        ended_at = self._settings.clock.monotonic()
        try:
            if self.services.last_saver is None:
                await self.services.drain()  # no last save has waited for those that were asked for
            if session is not None and not await session.close_raw(KILL_GRACE_SECS):
                if session.raw.sess_str:
                    self._emit("session.close_late", "the session's close waits for a peer, and is left to itself")
                else:
                    self._emit(
                        "session.close_blocked",
                        "the session's close is blocked by a run that never ends",
                        level="error",
                    )
            if self._settings.peers is not None:
                # A signal may have come during the last save: then we are expected back.
                how = "lost" if self._leaves_as == "done" and self.ending.signalled else self._leaves_as
                await self._settings.peers.leave(how, saved=self.settled, ended_at=ended_at)
        finally:
            self.unsaved_runs = self.services.unsaved_runs
            if host is not None:
                self._final = self.status(host)
            # The session refers to us through its `close`: without this, only the garbage collector could free it.
            self._session = self._host = self.owed = None
            self.services.forget()
            self.ending.forget()

    async def _close_session(self) -> None:
        """What `AsyncSession.close` does for a session of a supervisor: end everything, then raise the first error."""
        host = self._host
        if host is None:
            return
        if asyncio.get_running_loop() is not host.loop:
            raise WrongEventLoop(
                f"the session of {self._settings.name} was closed on another event loop than its own",
                "Close it there, or call request_stop(), which is safe anywhere.",
            )
        host.close()
        cancellations = await host.join()
        if cancellations:
            raise cancellations[-1]
        if not self._coordinator.joined:
            self._coordinator.mark_joined()
            self._coordinator.raise_requested_exception()

    # ------------------------------------------------------------------ how it stands

    def status(self, host: Host[AsyncSession]) -> Status:
        """See `Supervisor.status`."""
        services = tuple(service.status() for service in host.services)
        if self._final is not None:
            return replace(self._final, state=host.state, services=services)
        settings, session, standard = self._settings, self._session, self.services
        error = self._coordinator.error
        return Status(
            name=settings.name,
            state=host.state,
            is_chief=settings.is_chief,
            logdir=settings.logdir,
            uptime_secs=settings.clock.monotonic() - self._started_at,
            global_step=self.last_step,
            start_step=self.start_step,
            steps_per_sec=standard.steps_per_sec,
            scalars={} if self._writer is None else self._writer.scalars,
            services=services,
            last_checkpoint=None if self._store is None else self._store.last_prefix,
            summary_failures=standard.summary_failures,
            session=None if session is None else session.statistics(),
            error=self._start_error if error is None else describe(error),
        )
