"""One TensorFlow session of a monitored session, with its services: from a creation or recovery to the next.

Each incarnation is hosted by itself and has a stop state of its own: what fails in it may be recovered from, in which
case the monitored session, its hooks and the body never stop.

::

    start:  session, initialised or restored ── queue feeders ── after_create_session of the chief's hooks
            ── services, the first save ── after_create_session of the other hooks ── "is there anything to do?"
    end:    services and threads of hooks end ── final save ── session closed
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.events import Status
from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.plans import HookedPlans, HookedRuns
from asupervisor.hooks.protocol import HookOutcome
from asupervisor.hooks.saving import check_overwrites
from asupervisor.monitored.creators import OnRestart, Prepared, SessionCreator
from asupervisor.runtime.blocking_view import BlockingCoordinator
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.services.feeders import make_feeders
from asupervisor.services.run import SupervisedRun
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.elements import step_value
from asupervisor.session.session import AsyncSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What every incarnation of one monitored session is made of.

    Attributes:
        around: What stands around the monitored session.
        creator: Makes sessions.
        prepared: What a creator of ours has prepared, or None for one of the user's own.
        graph: The graph.
        chain: The hooks.
        chief_hooks: How many of them, the first ones, belong to the chief.
        services: Whether to start the services of a training session.
        stop_grace_secs: See `MonitoredSession`.
        hurried: Whether somebody who waits for the end of the monitored session was cancelled.
    """

    around: Surroundings
    creator: SessionCreator
    prepared: Prepared | None
    graph: tf.Graph
    chain: HookChain
    chief_hooks: int
    services: bool
    stop_grace_secs: float
    hurried: Callable[[], bool]

    @property
    def on_restart(self) -> OnRestart:
        """See `SessionCreator.on_restart`."""
        of: Any = self.creator if self.prepared is None else self.prepared
        found: OnRestart = getattr(of, "on_restart", "initialises")
        return found


class Incarnation:
    """A session, its coordinator, its services, and the plans with hooks.

    Args:
        number: 0 for the first one.
        of: What it is made of.
    """

    def __init__(self, number: int, of: Blueprint) -> None:
        self.number = number
        self.coordinator = Coordinator((), consequence_types=(tf.errors.CancelledError,), emit=of.around.emit)
        self.loss: BaseException | None = None
        """Why it was given up; None while it was not."""
        self.ending = False
        self.settled = False
        """Whether it has had its last words, well or not: the final save, where one was due."""
        self.run: SupervisedRun | None = None
        self._of = of
        self._plain: AsyncSession | None = None
        self._hooked: AsyncSession | None = None
        self._global_step: Any = None
        self._blocking = BlockingCoordinator(self.coordinator)
        self._host: Host[AsyncSession] = Host(
            "MonitoredSession" if number == 0 else f"MonitoredSession, recovery {number}",
            self.coordinator,
            startup=self._create,
            settle=self._settle,
            release=self._release,
            stop_grace_secs=of.stop_grace_secs,
            emit=of.around.emit,
        )

    # ------------------------------------------------------------------ start

    async def start(self) -> None:
        """Create the session, start its services, and tell the hooks; if that fails, nothing is left of it."""
        await self._host.start()
        try:
            await self._introduce()
            self.coordinator.raise_requested_exception()
        except BaseException:
            await self.end(lost=True)
            raise

    async def _create(self, host: Host[AsyncSession]) -> AsyncSession:
        of = self._of
        prepared = of.prepared
        if prepared is None:
            return await self._create_by_user(host)
        self.run = run = SupervisedRun(
            prepared.settings,
            of.around,
            store=prepared.store,
            session_manager=prepared.manager,
            coordinator=self.coordinator,
            first=self.number == 0,
            hurried=of.hurried,
        )
        self._global_step = prepared.settings.elements.global_step
        self._plain = session = await run.start(
            host,
            master=prepared.master,
            config=prepared.config,
            wait_for_checkpoint=False,
            max_wait_secs=prepared.max_wait_secs,
            start_standard_services=False,
        )
        run.start_queue_runners(host, session, None)
        return session

    async def _create_by_user(self, host: Host[AsyncSession]) -> AsyncSession:
        of = self._of
        create = of.creator.create_session

        def call() -> Any:
            with of.graph.as_default():
                return create()

        if inspect.iscoroutinefunction(create):
            made = await create()
        else:
            made = await of.around.executor.side(call, label="create_session")
            if inspect.isawaitable(made):
                made = await made
        if not isinstance(made, AsyncSession | tf.compat.v1.Session) and not hasattr(made, "graph"):
            raise TypeError(
                f"create_session of {type(of.creator).__name__} must return an asupervisor.AsyncSession or a "
                f"tf.compat.v1.Session, not {made!r}"
            )
        self._global_step = tf.compat.v1.train.get_global_step(made.graph)
        if not isinstance(made, AsyncSession):
            made = AsyncSession(
                made,
                of.around.executor,
                coordinator=self.coordinator,
                global_step=self._global_step,
                emit=of.around.emit,
                name="MonitoredSession",
            )
        self._plain = made
        for feeder in make_feeders(made, None, coordinator=self.coordinator, emit=of.around.emit):
            host.spawn(feeder.name, feeder.run)
        return made

    async def _introduce(self) -> None:
        """The session to the hooks, in the order in which TensorFlow does it."""
        of, chain, session = self._of, self._of.chain, self.plain
        if not chain.runs_from_loop:
            self._hooked = session if not chain.hooks else session.sibling(self._with_hooks)
        saves = of.prepared is None or of.prepared.settings.is_chief
        if saves and self.number == 0 and not self.restored:
            await check_overwrites(chain.hooks, self.on_side, lambda: self.on_device(self._step_now))
        if chain.hooks:
            self.coordinator.add_stop_callback(self._blocking.wake)
            self._host.spawn("threads of hooks", self._join_threads, critical=False)
        await chain.after_create_session(
            slice(0, of.chief_hooks), session, self.coordinator, self._blocking, self.on_device
        )
        if of.services and self.run is not None:
            self.run.services.start(self._host, session, self.run.start_step)
            await self.run.services.first_save()
        await chain.after_create_session(
            slice(of.chief_hooks, None), session, self.coordinator, self._blocking, self.on_device
        )
        if chain.asks_whether_done:
            await self.on_device(self._look_whether_done)

    def _step_now(self) -> int | None:
        try:
            return None if self._global_step is None else step_value(self.plain.raw.run(self._global_step))
        except tf.errors.FailedPreconditionError:  # nobody was to initialise it
            return None

    def _with_hooks(self, plans: Any, runs: Any) -> tuple[Any, Any]:
        session, chain = self.plain, self._of.chain
        hooked = HookedPlans(chain, plans, self._global_step, runs, session.raw)
        return hooked, HookedRuns(runs)

    def _look_whether_done(self) -> None:
        self._of.chain.look_whether_done(self._step_now())

    async def _join_threads(self) -> None:
        """Give the threads that hooks have registered the grace that services have; then tell of what is left."""
        await self.coordinator.wait_for_stop()
        for thread in self._blocking.threads:
            while thread.is_alive() and thread is not threading.current_thread():
                await self._of.around.executor.side(thread.join, 1.0, label=f"join {thread.name}")

    async def on_device(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on the device thread of the session, with the graph entered."""
        graph = self._of.graph

        def call() -> Any:
            with graph.as_default():
                return fn(*args)

        return await self.plain.executor.call(call, label=getattr(fn, "__qualname__", "hook"))

    async def on_side(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on a side thread, with the graph entered."""
        return await self.plain.side(lambda raw: fn(*args))

    # ------------------------------------------------------------------ use

    @property
    def plain(self) -> AsyncSession:
        """The session without hooks."""
        assert self._plain is not None
        return self._plain

    @property
    def hooked(self) -> AsyncSession | None:
        """The session whose runs have the hooks, where none of them needs the event loop."""
        return self._hooked

    @property
    def usable(self) -> bool:
        """Whether it can be run."""
        return self._plain is not None and not self._plain.closed and self.loss is None

    @property
    def awaited(self) -> bool:
        """Whether others wait for it to be replaced when it is lost: it is the chief's of a cluster."""
        return self.run is not None and self.run.awaited

    @property
    def restored(self) -> bool:
        """Whether its model came from a checkpoint."""
        return self.run is not None and self.run.restored_from is not None

    @property
    def adopted(self) -> bool:
        """Whether its model is the live one, which the session before it has changed."""
        if self.run is not None and self._of.on_restart == "adopts" and self.run.among_peers:
            return self.run.adopted
        return self._of.on_restart == "adopts"

    @property
    def found(self) -> str:
        """What became of the model, for people."""
        if self.run is None:
            return "there is a new session"
        return "the live model was adopted" if self.adopted and not self.restored else self.run.found

    @property
    def past(self) -> str:
        """See `SupervisedRun.past`."""
        return "" if self.run is None else self.run.past

    @property
    def owed(self) -> tuple[int, Exception] | None:
        """See `SupervisedRun.owed`."""
        trained = self._plain is not None and self._plain.training_runs > 0
        return None if self.run is None or trained else self.run.owed

    def take_over(self, failed: Incarnation, owed: tuple[int, Exception] | None, reason: BaseException) -> None:
        """What others wait for, and was lost before it was saved, is to be trained again in this session.

        Args:
            failed: The session before, which has ended.
            owed: What it owed itself.
            reason: What it was lost by.
        """
        run, before = self.run, failed.run
        if run is None or before is None or not self.awaited or self.adopted:
            return
        if before.unsaved_runs and isinstance(reason, Exception):
            owed = max(owed[0] if owed else 0, (run.start_step or 0) + before.unsaved_runs), reason
        run.owed = owed

    @property
    def last_step(self) -> int | None:
        """The global step as last seen, or None; any thread."""
        return None if self.run is None else self.run.last_step

    async def read_step(self) -> int | None:
        """The global step now; None where there is none, or it cannot be read."""
        step = self._global_step
        if step is None or not self.usable:
            return None
        try:
            return step_value(await self.plain.control(lambda raw: raw.run(step)))
        except (tf.errors.OpError, RuntimeError):
            return None

    async def run_with_hooks(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """See `MonitoredSession.run`; what fails is not recovered from here."""
        if self._hooked is not None:
            return await self._hooked.run(fetches, feed_dict, options, run_metadata)
        fills_only = await self._only_fills(fetches, feed_dict)
        on_thread = self.on_side if fills_only else self.on_device
        return await self._of.chain.run_from_loop(
            self.plain, fetches, feed_dict, options, run_metadata, on_thread, fills_only=fills_only
        )

    async def _only_fills(self, fetches: Any, feed_dict: Any) -> bool:
        """Whether all that a run does is to fill or close a queue."""
        plans: Any = self.plain._plans
        plan = plans.peek(fetches, feed_dict) or await self.on_side(plans.plan, fetches, feed_dict)
        return bool(plan.side_lane)

    async def changes_nothing(self, fetches: Any, feed_dict: Any) -> bool:
        """Whether a run may be done twice: it neither writes a variable nor takes or puts anything anywhere."""
        plans: Any = self.plain._plans
        touches = (await self.on_side(plans.plan, fetches, feed_dict)).touches
        return not (touches.variables_written or touches.sources or touches.enqueues or touches.closes)

    async def save(self) -> CheckpointInfo:
        """See `MonitoredSession.save`."""
        if self.run is None or not self._of.services:
            raise RuntimeError("this session does not save: make it by MonitoredTrainingSession(checkpoint_dir=...)")
        return await self.run.services.save(self.run.session)

    # ------------------------------------------------------------------ the end

    async def end(self, *, outcome: HookOutcome | None = None, lost: bool = False, hurry: bool = False) -> None:
        """Settle and close; wait for it.

        Args:
            outcome: How the monitored session ended.
            lost: The session is given up: its state is not worth a save.
            hurry: Somebody who waits was cancelled: services get no more grace.
        """
        if lost and self.loss is None:
            self.loss = _Lost()
        if lost and self._plain is not None:
            self._plain.fail_held()  # they are for the next one, which is paused as well
        if outcome is not None and not outcome.clean and self.run is not None and not self.ending:
            self.run.ending.tell(outcome.error, cancelled=outcome.reason == "cancelled")
        self.ending = True
        if hurry:
            self._host.hurry()
        self._host.close()
        cancellations = await self._host.join()
        if cancellations:
            raise cancellations[-1]

    async def _settle(self) -> None:
        if self.run is None:
            return
        try:
            if self.loss is None:
                await self.run.settle()
            else:
                await self.run.services.drain()
        except Exception:
            self.settled = True
            raise
        self.settled = True

    async def _release(self) -> None:
        left = [thread.name for thread in self._blocking.threads if thread.is_alive()]
        try:
            if self.run is not None:
                await self.run.release()
            elif self._plain is not None:
                await self._plain.close()
        finally:
            # Threads of hooks that were blocked in a run: the closed session has freed them.
            for thread in self._blocking.threads:
                if thread.is_alive():
                    await self._of.around.executor.side(thread.join, KILL_GRACE_SECS / 2, label=f"join {thread.name}")
            left = [thread.name for thread in self._blocking.threads if thread.name in left and thread.is_alive()]
            if left:
                self._of.around.emit(
                    "stop.threads_left",
                    f"threads that hooks have started still run: {' '.join(left)}",
                    level="warning",
                    threads=left,
                )

    def status(self) -> Status | None:
        """How its session stands, where a creator of ours made it; any thread."""
        return None if self.run is None else self.run.status(self._host)


class _Lost(Exception):
    """Stands for a loss without an error: the start of the session was not completed."""
