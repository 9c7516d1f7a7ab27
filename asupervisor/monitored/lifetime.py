"""The lifetime of a monitored session: how it is opened, and how it ends.

::

    open:   surroundings ── `begin` of the hooks ── the creator completes the graph ── first session, with its services
    leave:  stop ── what streams have under way ── last calls of the hooks ── final save, feeders, session
            ── surroundings

What is run in between is `session.py`; when a session is replaced by another one, `recovering.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import tensorflow as tf

from asupervisor import _tf
from asupervisor.clock import Clock
from asupervisor.errors import (
    SessionActive,
    SessionClosed,
    StopGraceExceeded,
    StopRequested,
    describe,
    errors_in,
    is_only,
    telling_line,
)
from asupervisor.events import EventHub, Status
from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.protocol import HookOutcome
from asupervisor.monitored.creators import Prepared, SavingSettings, SessionCreator, prepares
from asupervisor.monitored.feeds import StreamPart, end_parts
from asupervisor.monitored.incarnation import Blueprint, Incarnation
from asupervisor.monitored.recovering import Incarnations
from asupervisor.recovery import RecoveryPolicy
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.services.surroundings import Surroundings
from asupervisor.summary.base import SummaryWriter

CLEAN_ENDS = (tf.errors.OutOfRangeError, StopRequested)
"""What leaves the body and means a clean end; an exception group of nothing else does, too."""

ECHOES = (*CLEAN_ENDS, tf.errors.CancelledError)
"""What a group may hold after a stop: what queues that were closed tell their producers and consumers."""


class Lifetime:
    """From the first call of a hook to the last one: the block, its stop state, and what stands around it.

    It is entered once. It refers to no `MonitoredSession`, which goes when its user drops it.

    Args:
        name: Name in events, threads and tasks.
        creator: Where sessions come from.
        graph: The graph.
        hooks: The hooks, in order.
        chief_hooks: How many of them, the first ones, belong to the chief.
        saving: What to save and summarise; None for a session without services of its own.
        writer: Makes the summary writer; or None.
        stop_grace_secs: See `MonitoredSession`.
        recovery: See `MonitoredSession`.
        recovery_wait_secs: See `MonitoredSession`.
        clock: Where the time comes from.
        executor: See `MonitoredSession`.
    """

    def __init__(
        self,
        name: str,
        creator: SessionCreator,
        graph: tf.Graph,
        hooks: tuple[Any, ...],
        *,
        chief_hooks: int,
        saving: SavingSettings | None,
        writer: Callable[[EventHub], SummaryWriter | None] | None,
        stop_grace_secs: float,
        recovery: RecoveryPolicy | None,
        recovery_wait_secs: float,
        clock: Clock,
        executor: DeviceExecutor | None,
    ) -> None:
        self.name = name
        self.graph = graph
        self.hub = EventHub(name, clock)
        self.emit = self.hub.emit
        self.chain = HookChain(hooks, self.emit)
        # No error that a thread or a service reports is a clean end; what the body raises is looked at in `leave`.
        self.coord = Coordinator((StopRequested,), consequence_types=(tf.errors.CancelledError,), emit=self.emit)
        peers = getattr(creator, "peers", None)
        if recovery is None:
            recovery = RecoveryPolicy() if peers is None else RecoveryPolicy.for_cluster()
        if peers is not None:
            peers.allow_reinit = recovery.allow_reinit
        self.incarnations = Incarnations(name, recovery, self.coord, clock, self.emit)
        self.stream_parts: set[StreamPart] = set()
        """What streams have under way on the event loop."""
        self.closed = False
        """Whether nothing may be run any more."""
        self.outcome: str | None = None
        """See `MonitoredSession.outcome`."""
        self._creator = creator
        self._clock = clock
        self._recovery_wait_secs = recovery_wait_secs
        self._saving = saving
        self._stop_grace_secs = stop_grace_secs
        self._chief_hooks = chief_hooks
        self._executor = executor
        self._writer = None if writer is None else writer(self.hub)
        self._around: Surroundings | None = None
        self._block: Block[None] | None = None
        self._host: Host[None] | None = None
        self._ending: HookOutcome | None = None
        self._was_finalized = False
        self._released = self._started = self._took_over = False
        self._last_status: Status | None = None

    # ------------------------------------------------------------------ the start

    async def open(self) -> None:
        """Enter without a block; see `Host.start` for what it raises."""
        try:
            await self._new_block().enter(attached=False)
        except BaseException:
            self._not_entered()
            raise
        self.incarnations.told_to_stop()

    async def __aenter__(self) -> None:
        """The same for a block. Only frames of this name may lie between it and ours: see `_body_runs_here`."""
        try:
            await self._new_block().__aenter__()
        except BaseException:
            self._not_entered()
            raise
        self.incarnations.told_to_stop()

    def _not_entered(self) -> None:
        """One try only: the hooks have had their last call. What has failed has a traceback that leads here."""
        if self._host is None or self._host.finished:
            self.closed = True
            self._block = self._host = self._ending = None

    def _new_block(self) -> Block[None]:
        if self._block is not None:
            raise SessionActive(self.name, f"{self.name} is entered already. Leave it first, or make another one.")
        if self.closed:
            raise SessionClosed(self.name, "It is entered once: make another one.")
        self._block = Block(self._new_host)
        return self._block

    def _new_host(self) -> Host[None]:
        saving = self._saving
        logdir = None if saving is None else getattr(self._creator, "checkpoint_dir", None)
        self._around = around = Surroundings(
            self.name, self.coord, self.hub, executor=self._executor, writer=self._writer, logdir=logdir
        )
        self._host = host = Host(
            self.name,
            self.coord,
            startup=self._start,
            settle=self._settle,
            release=self._release,
            close_now=around.close_now,
            stragglers=around.stragglers,
            # The session's own host gives the grace to its services; this one waits for that.
            stop_grace_secs=self._stop_grace_secs,
            emit=self.emit,
        )
        return host

    async def _start(self, host: Host[None]) -> None:
        around = self._around
        assert around is not None
        try:
            await around.open()
            self._was_finalized = self.graph.finalized
            await self.chain.begin(self._on_thread)
            prepared = await self._on_thread(self._prepare) if prepares(self._creator) else None
            blueprint = Blueprint(
                around=around,
                creator=self._creator,
                prepared=prepared,
                graph=self.graph,
                chain=self.chain,
                chief_hooks=self._chief_hooks,
                services=self._saving is not None,
                stop_grace_secs=self._stop_grace_secs,
                hurried=lambda: host.interrupted,
            )
            await self.incarnations.begin(blueprint, host)
            self._started = True
        except StopRequested as error:
            self._ending = HookOutcome("stopped", told_by=error)
            raise
        except Exception as error:
            self._ending = HookOutcome("error", error)
            raise
        except BaseException as error:
            # A requested stop aborts the start by a cancellation, too.
            stopped = self.coord.should_stop() and not host.interrupted
            self._ending = HookOutcome("stopped") if stopped else HookOutcome("cancelled", error)
            raise

    def _prepare(self) -> Prepared:
        creator: Any = self._creator
        prepared: Prepared = creator.prepare(
            name=self.name,
            saving=self._saving,
            stop_grace_secs=self._stop_grace_secs,
            recovery_wait_secs=self._recovery_wait_secs,
            clock=self._clock,
            emit=self.emit,
        )
        if self._released and not self._was_finalized:  # nobody waits for it any more
            _tf.unfinalize(self.graph)
        return prepared

    async def _on_thread(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on the device thread with the graph entered, with or without a session."""
        current = self.incarnations.current
        if current is not None and current.usable:
            return await current.on_device(fn, *args)
        assert self._around is not None
        graph = self.graph

        def call() -> Any:
            with graph.as_default():
                return fn(*args)

        return await self._around.executor.call(call, label=getattr(fn, "__qualname__", "hook"))

    # ------------------------------------------------------------------ in between

    @property
    def entered(self) -> bool:
        """Whether it has been entered and not left."""
        return self._block is not None

    def should_stop(self) -> bool:
        """See `MonitoredSession.should_stop`; any thread."""
        return self.closed or self._stop_asked()

    def _stop_asked(self) -> bool:
        """Whether a hook or anybody else has requested a stop, the end of the block aside; any thread."""
        return self.chain.stop_requested or self.coord.should_stop() or self.incarnations.should_stop()

    async def usable(self) -> Incarnation:
        """The session to run on, after a recovery where one is necessary; see `Incarnations.get` for what it raises."""
        if self.closed or self._host is None:
            raise SessionClosed(self.name)
        return await self.incarnations.get()

    def status(self) -> Status:
        """How it stands; any thread, never blocks."""
        current, host = self.incarnations.current, self._host
        status = None if current is None else current.status()
        if status is None:
            status = self._last_status or Status(self.name, "idle", getattr(self._creator, "is_chief", True), None)
        state: Any = "stopped" if self.closed and host is None else host.state if host is not None else "idle"
        error = self.coord.error
        return replace(
            status,
            name=self.name,
            state=state,
            restarts=self.incarnations.history.total,
            outcome=self.outcome,
            error=status.error if error is None else describe(error),
        )

    # ------------------------------------------------------------------ the end

    async def leave(self, exc: BaseException | None) -> bool:
        """End it, whether a block is left or not; idempotent.

        Args:
            exc: What left the body, or None.

        Returns:
            Whether `exc` has been dealt with and must not leave the block.
        """
        block, self._block = self._block, None
        if block is None:
            return False
        self.closed = True
        echoes = isinstance(exc, BaseExceptionGroup) and self.coord.should_stop()
        clean = is_only(exc, ECHOES if echoes else CLEAN_ENDS)
        overdue = block.sent_cancel and isinstance(exc, asyncio.CancelledError)  # it is ours, because of a stop
        if exc is None or clean or overdue:
            stopped = self._stop_asked() or is_only(exc, StopRequested)
            self._ending = HookOutcome("stopped" if stopped else "finished", told_by=exc if clean else None)
            if not self.coord.should_stop():
                self.incarnations.leave()
            if clean and exc is not None:
                self._tell_of_clean_end(exc)
        elif not isinstance(exc, Exception):
            self._ending = HookOutcome("cancelled", exc)
        try:
            return await block.exit(None if clean else exc) or clean
        finally:
            self._ending = self._host = None
            del exc, block, self

    def _tell_of_clean_end(self, error: BaseException) -> None:
        error = errors_in(error)[0]
        op = getattr(getattr(error, "op", None), "name", None)
        self.emit(
            "stop.clean",
            f"clean end, told by {op or 'the body'}: {type(error).__name__}: {telling_line(error)}",
            where="the body",
            op=op,
            error=describe(error),
        )

    async def _settle(self) -> None:
        """What streams have under way, then the hooks, the final save, the feeders and the session."""
        # The rest is for the final save.
        for_hooks = None if self._host is None else self._host.grace_left / 2
        await end_parts(self.stream_parts, KILL_GRACE_SECS, self.emit)
        outcome = self._how_it_ends()
        current = self.incarnations.current
        session = None if current is None or not current.usable else current.plain
        for error in await self.chain.end(session, outcome, self._on_thread, for_hooks):
            self.coord.record(error, "a hook's last call", always=True)
            outcome = HookOutcome("error", error)
        self._note_outcome(outcome)
        hurry = self._host is not None and self._host.interrupted
        await self.incarnations.end(outcome, hurry=hurry)
        if current is not None and current.loss is None:
            self._take_over_error(current)

    def _take_over_error(self, current: Incarnation) -> None:
        if not self._took_over and current.coordinator.error is not self.coord.error:
            current.coordinator.pass_error_on(self.coord, "a service")
        self._took_over = True

    def _saves_at_the_end(self, current: Incarnation | None) -> bool:
        """Whether a final save is due that has not been made."""
        if not self._started or self._saving is None or current is None or current.run is None:
            return False
        return current.loss is None and not current.settled

    def _how_it_ends(self) -> HookOutcome:
        error = self.coord.error
        if self._ending is not None and not self._ending.clean:
            return self._ending
        if error is not None:
            return HookOutcome("error", error)
        if self._ending is not None:
            return self._ending
        host = self._host
        return HookOutcome("cancelled" if host is not None and host.interrupted else "stopped")

    def _note_outcome(self, outcome: HookOutcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome.reason
        told_by = outcome.error or outcome.told_by
        self.emit(
            "session.outcome",
            f"outcome: {outcome.reason}" + ("" if told_by is None else f", {told_by!r}"),
            reason=outcome.reason,
            error=None if outcome.error is None else repr(outcome.error),
            told_by=None if outcome.told_by is None else repr(outcome.told_by),
            op=getattr(getattr(told_by, "op", None), "name", None),
            restarts=self.incarnations.history.total,
        )

    async def _release(self) -> None:
        assert self._around is not None
        # A startup that failed, or last words that were cut short: what began gets its last call.
        current = self.incarnations.current
        saving = self._saves_at_the_end(current) and not (self._host is not None and self._host.interrupted)
        if self.chain.under_way is not None:
            self.coord.record(StopGraceExceeded.of_a_hook(self.chain.under_way, self._stop_grace_secs), "a hook")
        if saving and current is not None and not current.ending:
            self.coord.record(StopGraceExceeded.of_final_save(self._stop_grace_secs), "the final save")
            saving = False
        outcome, lost = self._how_it_ends(), current is not None and current.loss is not None
        try:
            await end_parts(self.stream_parts, KILL_GRACE_SECS, self.emit)
            with anyio.move_on_after(KILL_GRACE_SECS):  # the device thread may be stuck
                await self.chain.end(None, outcome, self._on_thread)
            self.chain.tell_of_missing_calls()
            self._note_outcome(outcome)
            await self.incarnations.end(outcome, lost=True)
            if current is not None and not lost:
                self._take_over_error(current)
                if saving and not current.settled and not isinstance(current.coordinator.error, StopGraceExceeded):
                    self.coord.record(StopGraceExceeded.of_final_save(self._stop_grace_secs), "the final save")
        finally:
            self._last_status = self.status()
            self.incarnations.forget()
            await self._around.close()
            self._around = None
            self._released = True
            if not self._was_finalized:
                _tf.unfinalize(self.graph)
