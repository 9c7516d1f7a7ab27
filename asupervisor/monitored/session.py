"""`MonitoredSession`: a session whose runs have hooks, and that is recovered when a part of the cluster fails.

::

    MonitoredSession ─ Block, Host: the user's block, its stop state, what stands around it
        └── Incarnations ─ when a session is replaced
                └── Incarnation ─ Host: one TensorFlow session with its services
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self

import anyio
import tensorflow as tf

from asupervisor import _tf
from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import SessionClosed, StopRequested, WrongEventLoop
from asupervisor.events import Event, EventHub, Status
from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.protocol import HookOutcome, checked, is_async
from asupervisor.monitored.creators import (
    ChiefSessionCreator,
    Prepared,
    SavingSettings,
    SessionCreator,
    as_ours,
    prepares,
)
from asupervisor.monitored.feeds import StreamPart, end_parts
from asupervisor.monitored.incarnation import Blueprint, Incarnation
from asupervisor.monitored.recovering import Incarnations
from asupervisor.monitored.stepping import StepContext, check_step_fn
from asupervisor.monitored.streams import MonitoredSteps
from asupervisor.recovery import RecoveryPolicy
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import KILL_GRACE_SECS, Host
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.elements import resolve_graph
from asupervisor.session.session import AsyncSession
from asupervisor.summary.base import SummaryWriter

CLEAN_ENDS = (tf.errors.OutOfRangeError, StopRequested)
"""What leaves the body and means a clean end."""


class MonitoredSession:
    """A session that initialises or restores its model, runs hooks around each run, and recovers.

    ::

        async with MonitoredSession(ChiefSessionCreator(graph=graph), hooks=[hook]) as sess:
            while not sess.should_stop():
                await sess.run(train_op)

    Leaving the block ends the hooks, saves where it saves, ends the queue feeders and closes the session. An
    `OutOfRangeError`, and a stop that a hook or a step function asked for, do not leave it; any other exception does,
    as the same object. The first one that went wrong leaves; later ones are its notes.

    Recovery: where a run fails with an error that the policy recovers from, or the session's coordinator holds one,
    the session is closed and made anew after a pause, and the call is run again, unless the state that it finds may
    already hold its effect: then `StepOutcomeUnknown` is raised. Each recovery is an event. A requested stop survives
    it. Where nothing could be restored, the model is not initialised again, and the error leaves.

    Differences from the original: the session begins with the block, not with the constructor; `close` is idempotent;
    a stop that a hook requested survives a recovery; every hook has its last call, whatever another one raised; without
    a global step there is no step counter, and no error. An error that some thread has reported to the session's
    coordinator is never taken for a clean end, whatever its class.

    Source: `tf.compat.v1.train.MonitoredSession`.

    Args:
        session_creator: Where sessions come from; None for a `ChiefSessionCreator` with defaults. TensorFlow's own
            creators work, too.
        hooks: The hooks, in order; TensorFlow's run unchanged, on the device thread.
        stop_grace_period_secs: What services have to end by themselves after a stop, in seconds.
        graph: The graph; None for that of the creator, or the caller's default graph.
        recovery: When to recover; defaults to `RecoveryPolicy()`, in a cluster to `RecoveryPolicy.for_cluster()`.
        recovery_wait_secs: Longest wait between two looks at a model that is not ready, in seconds.
        clock: Where the time comes from.
        executor: The device thread to use; not closed.

    Raises:
        RuntimeError: No graph was given and TensorFlow executes eagerly.
    """

    StepContext: ClassVar[type[StepContext]] = StepContext

    def __init__(
        self,
        session_creator: SessionCreator | None = None,
        hooks: Iterable[Any] | None = None,
        stop_grace_period_secs: float = 120,
        *,
        graph: tf.Graph | None = None,
        recovery: RecoveryPolicy | None = None,
        recovery_wait_secs: float = 30,
        clock: Clock | None = None,
        executor: DeviceExecutor | None = None,
        _name: str = "MonitoredSession",
        _chief_hooks: int = 0,
        _saving: SavingSettings | None = None,
        _writer: Callable[[EventHub], SummaryWriter | None] | None = None,
    ) -> None:
        if session_creator is None:
            session_creator = ChiefSessionCreator(graph=graph)
        session_creator = as_ours(session_creator, graph)
        self._graph = graph or getattr(session_creator, "graph", None) or resolve_graph(None)
        self._creator = session_creator
        self._name = _name
        self._clock = clock or SystemClock()
        self._hub = EventHub(self._name, self._clock)
        self._emit = self._hub.emit
        self._recovery_wait_secs = recovery_wait_secs
        self._saving = _saving
        self._stop_grace_secs = stop_grace_period_secs
        self._chief_hooks = _chief_hooks
        self._chain = HookChain(tuple(hooks or ()), self._emit)
        # No error that a thread or a service reports is a clean end; what the body raises is looked at in `_leave`.
        self._coord = Coordinator((StopRequested,), consequence_types=(tf.errors.CancelledError,), emit=self._emit)
        peers = getattr(session_creator, "peers", None)
        if recovery is None:
            recovery = RecoveryPolicy() if peers is None else RecoveryPolicy.for_cluster()
        if peers is not None:
            peers.allow_reinit = recovery.allow_reinit
        self._incarnations = Incarnations(self._name, recovery, self._coord, self._clock, self._emit)
        self._executor = executor
        self._writer = None if _writer is None else _writer(self._hub)
        self._around: Surroundings | None = None
        self._block: Block[MonitoredSession] | None = None
        self._host: Host[MonitoredSession] | None = None
        self._ending: HookOutcome | None = None
        self._outcome: str | None = None
        self._closed = False
        self._was_finalized = False
        self._released = False
        self._last_status: Status | None = None
        self._stream_parts: set[StreamPart] = set()

    # ------------------------------------------------------------------ enter and exit

    async def open(self) -> Self:
        """Enter without a block; end it by `await close()`."""
        try:
            await self._new_block().enter(attached=False)
        except BaseException:
            self._not_entered()
            raise
        self._incarnations.told_to_stop()
        return self

    async def __aenter__(self) -> Self:
        try:
            # Directly: the block looks at the frames above to see whether its body runs in this task.
            await self._new_block().__aenter__()
        except BaseException:
            self._not_entered()
            raise
        self._incarnations.told_to_stop()
        return self

    def _not_entered(self) -> None:
        """One try only: the hooks have had their last call. What has failed has a traceback that leads here."""
        if self._host is None or self._host.finished:
            self._closed = True
            self._block = self._host = self._ending = None

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._block is None and exc is None and self._incarnations.policy.original:
            raise RuntimeError("Session is already closed.")
        try:
            return await self._leave(exc)
        finally:
            del exc, traceback

    async def close(self) -> None:
        """End the session; idempotent. See the class for what that does and what leaves."""
        await self._leave(None)

    async def _leave(self, exc: BaseException | None) -> bool:
        block, self._block = self._block, None
        if block is None:
            return False
        self._closed = True
        clean = isinstance(exc, CLEAN_ENDS)
        overdue = block.sent_cancel and isinstance(exc, asyncio.CancelledError)  # it is ours, because of a stop
        if exc is None or clean or overdue:
            stopped = self._stop_asked() or isinstance(exc, StopRequested)
            self._ending = HookOutcome("stopped" if stopped else "finished", told_by=exc if clean else None)
            if not self._coord.should_stop():
                self._incarnations.leave()
            if clean and exc is not None:
                self._tell_of_clean_end(exc)
        elif not isinstance(exc, Exception):
            self._ending = HookOutcome("cancelled", exc)
        try:
            return await block.exit(None if clean else exc) or clean
        finally:
            self._ending = self._host = None
            del exc, block, self

    def _stop_asked(self) -> bool:
        """Whether a hook or anybody else has requested a stop, the end of the block aside; any thread."""
        return self._chain.stop_requested or self._coord.should_stop() or self._incarnations.should_stop()

    def _tell_of_clean_end(self, error: BaseException) -> None:
        op = getattr(getattr(error, "op", None), "name", None)
        text = str(error).strip().partition("\n")[0]
        self._emit(
            "stop.clean",
            f"clean end, told by {op or 'the body'}: {type(error).__name__}: {text}",
            where="the body",
            op=op,
            error=repr(error),
        )

    def _new_block(self) -> Block[MonitoredSession]:
        if self._block is not None or self._closed:
            raise SessionClosed(self._name)
        self._block = Block(self._new_host)
        return self._block

    def _new_host(self) -> Host[MonitoredSession]:
        saving = self._saving
        logdir = None if saving is None else getattr(self._creator, "checkpoint_dir", None)
        self._around = around = Surroundings(
            self._name, self._coord, self._hub, executor=self._executor, writer=self._writer, logdir=logdir
        )
        self._host = host = Host(
            self._name,
            self._coord,
            startup=self._start,
            settle=self._settle,
            release=self._release,
            close_now=around.close_now,
            stragglers=around.stragglers,
            # The session's own host gives the grace to its services; this one waits for that.
            stop_grace_secs=self._stop_grace_secs,
            emit=self._emit,
        )
        return host

    async def _start(self, host: Host[MonitoredSession]) -> MonitoredSession:
        around = self._around
        assert around is not None
        try:
            await around.open()
            self._was_finalized = self._graph.finalized
            await self._chain.begin(self._on_thread)
            prepared = await self._on_thread(self._prepare) if prepares(self._creator) else None
            blueprint = Blueprint(
                around=around,
                creator=self._creator,
                prepared=prepared,
                graph=self._graph,
                chain=self._chain,
                chief_hooks=self._chief_hooks,
                services=self._saving is not None,
                stop_grace_secs=self._stop_grace_secs,
                hurried=lambda: host.interrupted,
            )
            await self._incarnations.begin(blueprint, host)
        except StopRequested as error:
            self._ending = HookOutcome("stopped", told_by=error)
            raise
        except Exception as error:
            self._ending = HookOutcome("error", error)
            raise
        except BaseException as error:
            # A requested stop aborts the start by a cancellation, too.
            stopped = self._coord.should_stop() and not host.interrupted
            self._ending = HookOutcome("stopped") if stopped else HookOutcome("cancelled", error)
            raise
        return self

    def _prepare(self) -> Prepared:
        creator: Any = self._creator
        prepared: Prepared = creator.prepare(
            name=self._name,
            saving=self._saving,
            stop_grace_secs=self._stop_grace_secs,
            recovery_wait_secs=self._recovery_wait_secs,
            clock=self._clock,
            emit=self._emit,
        )
        if self._released and not self._was_finalized:  # nobody waits for it any more
            _tf.unfinalize(self._graph)
        return prepared

    async def _on_thread(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on the device thread with the graph entered, with or without a session."""
        current = self._incarnations.current
        if current is not None and current.usable:
            return await current.on_device(fn, *args)
        assert self._around is not None
        graph = self._graph

        def call() -> Any:
            with graph.as_default():
                return fn(*args)

        return await self._around.executor.call(call, label=getattr(fn, "__qualname__", "hook"))

    # ------------------------------------------------------------------ the end

    async def _settle(self) -> None:
        """What streams have under way, then the hooks, the final save, the feeders and the session."""
        await end_parts(self._stream_parts, KILL_GRACE_SECS, self._emit)
        outcome = self._how_it_ends()
        current = self._incarnations.current
        session = None if current is None or not current.usable else current.plain
        for error in await self._chain.end(session, outcome, self._on_thread):
            self._coord.record(error, "a hook's last call")
            outcome = HookOutcome("error", error)
        self._note_outcome(outcome)
        hurry = self._host is not None and self._host.interrupted
        await self._incarnations.end(outcome, hurry=hurry)
        if current is None or current.loss is not None:
            return
        error_of_service = current.coordinator.error
        if error_of_service is not None and error_of_service is not self._coord.error:
            self._coord.record(error_of_service, "a service")

    def _how_it_ends(self) -> HookOutcome:
        error = self._coord.error
        if self._ending is not None and not self._ending.clean:
            return self._ending
        if error is not None:
            return HookOutcome("error", error)
        if self._ending is not None:
            return self._ending
        host = self._host
        return HookOutcome("cancelled" if host is not None and host.interrupted else "stopped")

    def _note_outcome(self, outcome: HookOutcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome.reason
        told_by = outcome.error or outcome.told_by
        self._emit(
            "session.outcome",
            f"outcome: {outcome.reason}" + ("" if told_by is None else f", {told_by!r}"),
            reason=outcome.reason,
            error=None if outcome.error is None else repr(outcome.error),
            told_by=None if outcome.told_by is None else repr(outcome.told_by),
            op=getattr(getattr(told_by, "op", None), "name", None),
            restarts=self._incarnations.history.total,
        )

    async def _release(self) -> None:
        assert self._around is not None
        # A startup that failed, or last words that were cut short: what began gets its last call.
        outcome = self._how_it_ends()
        try:
            await end_parts(self._stream_parts, KILL_GRACE_SECS, self._emit)
            with anyio.move_on_after(KILL_GRACE_SECS):  # the device thread may be stuck
                await self._chain.end(None, outcome, self._on_thread)
            self._chain.tell_of_missing_calls()
            self._note_outcome(outcome)
            await self._incarnations.end(outcome, lost=True)
        finally:
            self._last_status = self.status()
            self._incarnations.forget()
            await self._around.close()
            self._around = None
            self._released = True
            if not self._was_finalized:
                _tf.unfinalize(self._graph)

    # ------------------------------------------------------------------ runs

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Awaitable[Any]:
        """Like `tf.compat.v1.Session.run`, awaited, with hooks.

        Cancellation is that of `AsyncSession.run`: the step in flight runs to its end, with its plain hooks. While it
        waits for a recovery, the caller is released and the recovery goes on.

        Raises:
            WrongEventLoop: At once, when called off the loop; `sess.plain.blocking` serves other threads.
            SessionClosed: The session is closed.
            RuntimeError: A hook has requested a stop.
            StepOutcomeUnknown: See `MonitoredSession`.
            RecoveryExhausted: The recovery policy's budget is used up.
            StopRequested: A stop was requested during a recovery; the block swallows it.
        """
        if asyncio._get_running_loop() is None:
            raise WrongEventLoop(
                "sess.run(...) of a monitored session was called where no event loop is running",
                "Await it on the event loop, or use the session without hooks: sess.plain.blocking.run(...).",
            )
        return self._run(fetches, feed_dict, options, run_metadata)

    async def _run(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        while True:
            incarnation = await self._usable()
            self._chain.check_may_run()
            try:
                return await self._run_on(incarnation, fetches, feed_dict, options, run_metadata)
            except StopRequested:
                raise
            except Exception as error:
                await self._incarnations.recover(
                    incarnation, error, harmless=lambda current: current.changes_nothing(fetches, feed_dict)
                )

    async def _usable(self) -> Incarnation:
        if self._closed or self._host is None:
            raise SessionClosed(self._name)
        return await self._incarnations.get()

    async def _run_on(
        self, incarnation: Incarnation, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        if incarnation.hooked is not None:
            return await incarnation.hooked.run(fetches, feed_dict, options, run_metadata)
        fills_only = await incarnation.only_fills(fetches, feed_dict)
        on_thread = incarnation.on_side if fills_only else incarnation.on_device
        return await self._chain.run_from_loop(
            incarnation.plain, fetches, feed_dict, options, run_metadata, on_thread, fills_only=fills_only
        )

    async def run_step_fn(self, step_fn: Callable[..., Any]) -> Any:
        """Run a function that makes one step of several runs, with and without hooks.

        A coroutine function runs on the event loop, a plain one on the device thread with the graph entered. After a
        recovery the whole function is run again.

        Args:
            step_fn: Takes one argument named `step_context`; see `StepContext`.

        Returns:
            What it returns.

        Raises:
            StopRequested: It called `step_context.request_stop()`; the block swallows it.
            ValueError: Its arguments are named otherwise.
            TypeError: It is a plain function, and there are hooks that are coroutine functions.
        """
        check_step_fn(step_fn)
        while True:
            incarnation = await self._usable()
            try:
                return await self._step(incarnation, step_fn)
            except StopRequested:
                raise
            except StopAsyncIteration as error:
                raise StopRequested("the step") from error
            except Exception as error:
                await self._incarnations.recover(incarnation, error, "step_fn")

    async def _step(self, incarnation: Incarnation, step_fn: Callable[..., Any]) -> Any:
        if is_async(step_fn):

            async def with_hooks(
                fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
            ) -> Any:
                return await self._run_on(incarnation, fetches, feed_dict, options, run_metadata)

            return await step_fn(StepContext(incarnation.plain, with_hooks, True))
        hooked = incarnation.hooked
        if hooked is None:
            raise TypeError("with hooks that are coroutine functions, `step_fn` must be one, too")
        context = StepContext(incarnation.plain.raw, hooked.blocking.run, False)

        def step() -> Any:
            try:
                return checked(step_fn(context), step_fn)
            except StopIteration as error:  # it would be put into a box on its way to the loop
                raise StopRequested("the step") from error

        return await incarnation.on_device(step)

    def steps(
        self,
        fetches: Any,
        feeds: Any = None,
        *,
        max_steps: int | None = None,
        ahead: int = 64,
        stop_when: Callable[[Any], bool] | None = None,
        copy_feeds: bool = True,
    ) -> MonitoredSteps:
        """A stream of steps with hooks, at full speed; see `AsyncSession.steps`.

        It also ends when a hook requests a stop, and runs nothing where one has already. With hooks that are coroutine
        functions it goes step by step. After a recovery it goes on: the feed of the step that failed is run again,
        and so is what was taken ahead. What was being asked for is not asked for again: a generator that waits goes on
        waiting, an async one in the same task all the time, a plain one perhaps on another thread the next time.
        """
        return MonitoredSteps(self, fetches, feeds, max_steps, ahead, stop_when, copy_feeds)

    # ------------------------------------------------------------------ stop, state

    def should_stop(self) -> bool:
        """Whether the loop around the runs should end; any thread."""
        return self._closed or self._stop_asked()

    def request_stop(self, ex: Any = None) -> None:
        """Ask for a stop, with an error or without; any thread. See `Coordinator.request_stop`."""
        self._coord.request_stop(ex)

    def pause(self) -> None:
        """Hold training runs and streams between two steps, over recoveries, too. A stop releases them."""
        self.plain.pause()
        self._incarnations.paused = True

    def resume(self) -> None:
        """End a `pause`."""
        self._incarnations.paused = False
        self.plain.resume()

    @property
    def coord(self) -> Coordinator:
        """The stop state of the block."""
        return self._coord

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self._graph

    @property
    def plain(self) -> AsyncSession:
        """The present session, for runs without hooks; another one after a recovery.

        Raises:
            SessionClosed: There is none.
        """
        current = self._incarnations.current
        if current is None or not current.usable:
            raise SessionClosed(self._name)
        return current.plain

    async def save(self) -> CheckpointInfo:
        """Save now, between two steps; see `Supervisor.save`.

        Raises:
            RuntimeError: This session does not save: there is no checkpoint directory, or it is a worker's.
        """
        return await (await self._usable()).save()

    def status(self) -> Status:
        """How it stands; any thread, never blocks."""
        current, host = self._incarnations.current, self._host
        status = None if current is None else current.status()
        if status is None:
            status = self._last_status or Status(self._name, "idle", getattr(self._creator, "is_chief", True), None)
        state: Any = "stopped" if self._closed and host is None else host.state if host is not None else "idle"
        error = self._coord.error
        return replace(
            status,
            name=self._name,
            state=state,
            restarts=self._incarnations.history.total,
            outcome=self._outcome,
            error=status.error if error is None else repr(error),
        )

    @property
    def recoveries(self) -> int:
        """How often the session was made anew after an error."""
        return self._incarnations.history.total

    @property
    def outcome(self) -> str | None:
        """How it ended: ``finished``, ``stopped``, ``error`` or ``cancelled``, as `HookOutcome`; None before that."""
        return self._outcome

    def events(self) -> AsyncIterator[Event]:
        """An iterator over the events from now on, which ends with the session; on the event loop.

        Before the start it waits for that; after the end it ends at once.
        """
        return self._hub.subscribe(wait=False)


class SingularMonitoredSession(MonitoredSession):
    """A monitored session that does not recover, and lends its TensorFlow session.

    Source: `tf.compat.v1.train.SingularMonitoredSession`.

    Args:
        hooks: See `MonitoredSession`.
        scaffold: See `ChiefSessionCreator`.
        master: See `ChiefSessionCreator`.
        config: See `ChiefSessionCreator`.
        checkpoint_dir: See `ChiefSessionCreator`.
        stop_grace_period_secs: See `MonitoredSession`.
        checkpoint_filename_with_path: See `ChiefSessionCreator`.
        graph: See `MonitoredSession`.
        recovery_wait_secs: See `MonitoredSession`.
        clock: See `MonitoredSession`.
        executor: See `MonitoredSession`.
    """

    def __init__(
        self,
        hooks: Iterable[Any] | None = None,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        checkpoint_dir: str | None = None,
        stop_grace_period_secs: float = 120,
        checkpoint_filename_with_path: str | None = None,
        *,
        graph: tf.Graph | None = None,
        recovery_wait_secs: float = 30,
        clock: Clock | None = None,
        executor: DeviceExecutor | None = None,
    ) -> None:
        creator = ChiefSessionCreator(
            scaffold, master, config, checkpoint_dir, checkpoint_filename_with_path, graph=graph
        )
        super().__init__(
            creator,
            hooks,
            stop_grace_period_secs,
            recovery=RecoveryPolicy.never(),
            recovery_wait_secs=recovery_wait_secs,
            clock=clock,
            executor=executor,
            _name="SingularMonitoredSession",
        )

    def raw_session(self) -> Any:
        """TensorFlow's session, or None when this one is closed."""
        current = self._incarnations.current
        return None if current is None or not current.usable else current.plain.raw
