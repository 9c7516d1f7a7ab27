"""`MonitoredSession`: a session whose runs have hooks, and that is recovered when a part of the cluster fails.

::

    MonitoredSession ─ Block, Host: the user's block, its stop state, what stands around it
        └── Incarnation ─ Host: one TensorFlow session with its services; replaced at a recovery
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Self

import anyio
import tensorflow as tf

from asupervisor import _tf
from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import RecoveryExhausted, SessionClosed, StepOutcomeUnknown, StopRequested
from asupervisor.events import Event, EventHub, Status
from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.protocol import HookOutcome
from asupervisor.monitored.creators import ChiefSessionCreator, Prepared, SavingSettings, SessionCreator
from asupervisor.monitored.incarnation import Incarnation
from asupervisor.monitored.stepping import MonitoredSteps, StepContext, check_step_fn
from asupervisor.recovery import Origin, RecoveryHistory, RecoveryPolicy
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import Host
from asupervisor.services.surroundings import Surroundings
from asupervisor.session.elements import resolve_graph
from asupervisor.session.session import AsyncSession
from asupervisor.summary.base import SummaryWriter

tf1 = tf.compat.v1


class MonitoredSession:
    """A session that initialises or restores its model, runs hooks around each run, and recovers.

    ::

        async with MonitoredSession(ChiefSessionCreator(graph=graph), hooks=[hook]) as sess:
            while not sess.should_stop():
                await sess.run(train_op)

    Leaving the block ends the hooks, saves where it saves, ends the queue feeders and closes the session. An
    `OutOfRangeError`, and a stop that a hook or a step function asked for, do not leave it; any other exception does.

    Recovery: where a run fails with an error that the policy recovers from, or the session's coordinator holds one,
    the session is closed and made anew after a pause, and the call is run again, unless the state that it finds may
    already hold its effect: then `StepOutcomeUnknown` is raised. Each recovery is an event. A requested stop survives
    it.

    Source: `tf.compat.v1.train.MonitoredSession`.

    Args:
        session_creator: Where sessions come from; None for a `ChiefSessionCreator` with defaults.
        hooks: The hooks, in order; TensorFlow's run unchanged, on the device thread.
        stop_grace_period_secs: What services have to end by themselves after a stop, in seconds.
        graph: The graph; None for that of the creator, or the caller's default graph.
        recovery: When to recover; defaults to `RecoveryPolicy()`.
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
        _saving: SavingSettings | None = None,
        _writer: Callable[[EventHub], SummaryWriter | None] | None = None,
    ) -> None:
        if session_creator is None:
            session_creator = ChiefSessionCreator(graph=graph)
        self._graph = graph or getattr(session_creator, "graph", None) or resolve_graph(None)
        self._creator = session_creator
        self._name = _name
        self._clock = clock or SystemClock()
        self._hub = EventHub(self._name, self._clock)
        self._emit = self._hub.emit
        self._policy = recovery or RecoveryPolicy()
        self._recovery_wait_secs = recovery_wait_secs
        self._history = RecoveryHistory()
        self._saving = _saving
        self._stop_grace_secs = stop_grace_period_secs
        self._chain = HookChain(tuple(hooks or ()), self._emit)
        self._coord = Coordinator(consequence_types=(tf.errors.CancelledError,), emit=self._emit)
        self._executor = executor
        self._writer = None if _writer is None else _writer(self._hub)
        self._around: Surroundings | None = None
        self._prepared: Prepared | None = None
        self._incarnation: Incarnation | None = None
        self._recovering = anyio.Lock()
        self._block: Block[MonitoredSession] | None = None
        self._host: Host[MonitoredSession] | None = None
        self._body_error: BaseException | None = None
        self._closed = False
        self._was_finalized = False

    # ------------------------------------------------------------------ enter and exit

    async def open(self) -> Self:
        """Enter without a block; end it by `await close()`."""
        await self._new_block().enter(attached=False)
        return self

    async def __aenter__(self) -> Self:
        await self._new_block().__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return await self._leave(exc)

    async def close(self) -> None:
        """End the session; idempotent. See the class for what that does and what leaves."""
        await self._leave(None)

    async def _leave(self, exc: BaseException | None) -> bool:
        block, self._block = self._block, None
        if block is None:
            return False
        self._closed = True
        self._body_error = exc
        try:
            return await block.exit(exc)
        finally:
            self._body_error = None
            self._host = None
            del exc

    def _new_block(self) -> Block[MonitoredSession]:
        if self._block is not None or self._closed:
            raise SessionClosed(self._name)
        self._block = Block(self._new_host)
        return self._block

    def _new_host(self) -> Host[MonitoredSession]:
        creates_files = self._saving is not None
        logdir = getattr(self._creator, "checkpoint_dir", None) if creates_files else None
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
            # The incarnation gives the grace to its services; this host waits for that.
            stop_grace_secs=self._stop_grace_secs,
            emit=self._emit,
        )
        return host

    async def _start(self, host: Host[MonitoredSession]) -> MonitoredSession:
        around = self._around
        assert around is not None
        await around.open()
        self._was_finalized = self._graph.finalized
        await self._chain.begin(self._on_thread)
        prepare = getattr(self._creator, "prepare", None)
        if prepare is not None:
            self._prepared = await self._on_thread(self._prepare, prepare)
        self._coord.add_stop_callback(self._pass_stop_on)
        await self._begin_incarnation(0)
        return self

    def _prepare(self, prepare: Callable[..., Prepared]) -> Prepared:
        return prepare(
            name=self._name,
            saving=self._saving,
            stop_grace_secs=self._stop_grace_secs,
            clock=self._clock,
            emit=self._emit,
        )

    async def _on_thread(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` on the device thread with the graph entered, before there is a session."""
        assert self._around is not None

        def call() -> Any:
            with self._graph.as_default():
                return fn(*args)

        return await self._around.executor.call(call, label=getattr(fn, "__qualname__", "hook"))

    def _pass_stop_on(self) -> None:
        if self._incarnation is not None:
            self._incarnation.coordinator.request_stop()

    # ------------------------------------------------------------------ incarnations

    async def _begin_incarnation(self, number: int) -> None:
        """Make a session; what fails on the way may be recovered from."""
        assert self._around is not None
        while True:
            self._incarnation = incarnation = Incarnation(
                number,
                self._around,
                self._creator,
                self._prepared,
                self._graph,
                self._chain,
                self._saving is not None,
                self._stop_grace_secs,
            )
            try:
                await incarnation.start()
            except Exception as error:
                number += 1
                await self._pause_before_restart(error, "startup")
            else:
                incarnation.coordinator.add_stop_callback(self._on_incarnation_stop)
                return

    def _on_incarnation_stop(self) -> None:
        """The session's coordinator stopped; on the loop. What cannot be recovered from stops everything."""
        incarnation = self._incarnation
        error = None if incarnation is None else incarnation.coordinator.error
        if error is not None and not self._policy.recovers(error, "coordinator"):
            with suppress(BaseException):
                self._coord.report(error, "a service")

    async def _current(self) -> Incarnation:
        """The incarnation to use, recovered where that has become necessary since."""
        incarnation = self._incarnation
        if self._closed or self._host is None or incarnation is None:
            raise SessionClosed(self._name)
        error = incarnation.coordinator.error
        if error is not None and not self._coord.should_stop() and self._policy.recovers(error, "coordinator"):
            await self._recover(incarnation, error, "coordinator")
        return self._incarnation or incarnation

    async def _recover(
        self, failed: Incarnation, error: Exception | BaseException, origin: Origin | None = None
    ) -> None:
        """Replace a session after an error, or raise it.

        Raises:
            BaseException: `error`, where it is not to be recovered from.
            RecoveryExhausted: The budget is used up.
            StepOutcomeUnknown: The call that failed may have been applied to the state that was found.
        """
        cause = failed.coordinator.error
        if cause is not None and self._policy.recovers(cause, "coordinator"):
            reason, origin = cause, "coordinator"  # the run failed because of it
        else:
            reason = error
            origin = origin or ("hook" if error is self._chain.failure else "run")
        if self._closed or self._coord.should_stop() or not self._policy.recovers(reason, origin):
            raise error
        async with self._recovering:
            if self._incarnation is not failed:
                return  # somebody else has done it
            before = failed.run.last_step if failed.run is not None else None
            await failed.end(lost=True)
            await self._pause_before_restart(reason, origin, error)
            await self._begin_incarnation(failed.number + 1)
        current = self._incarnation
        adopted = not getattr(self._creator, "is_chief", True)
        if adopted and self._policy != RecoveryPolicy.like_tensorflow() and current is not None:
            raise StepOutcomeUnknown(before, await current.run.read_step() if current.run else None) from error

    async def _pause_before_restart(
        self, reason: BaseException, origin: Origin, error: BaseException | None = None
    ) -> None:
        run = None if self._incarnation is None else self._incarnation.run
        decision = self._policy.decide(
            reason,
            origin,
            self._history,
            now_secs=self._clock.monotonic(),
            step=None if run is None else run.last_step,
            restorable=self._prepared is not None and self._prepared.restorable,
        )
        self._history = decision.history
        if not decision.restart:
            if decision.reason == "budget used up":
                raise RecoveryExhausted(self._history.total, reason) from reason
            if decision.reason == "would reinitialise the model":
                reason.add_note(
                    "asupervisor: not recovered from, since without a checkpoint directory that would initialise the "
                    "model again; RecoveryPolicy(allow_reinit=True) allows it"
                )
            raise error or reason
        self._emit(
            "session.recovering",
            f"recovery {self._history.total} in {decision.delay_secs:.2f} s, because of {reason!r}",
            level="warning",
            error=repr(reason),
            origin=origin,
            restarts=self._history.total,
            delay_secs=decision.delay_secs,
        )
        with anyio.move_on_after(None) as scope:
            self._coord.add_stop_callback(scope.cancel)
            await self._clock.sleep(decision.delay_secs)
        self._coord.remove_stop_callback(scope.cancel)
        if self._coord.should_stop():
            raise error or reason

    # ------------------------------------------------------------------ the end

    async def _settle(self) -> None:
        """Hooks first, then the final save, the feeders and the session."""
        incarnation = self._incarnation
        outcome = self._outcome()
        session = None if incarnation is None or not incarnation.usable else incarnation.plain
        for error in await self._chain.end(session, outcome, self._on_thread):
            self._coord.report(error, "a hook's last call")
        if incarnation is not None:
            if not outcome.clean and incarnation.run is not None:
                incarnation.run.end_with(outcome.error, cancelled=outcome.reason == "cancelled")
            await incarnation.end()
            error_of_service = incarnation.coordinator.error
            if error_of_service is not None and not self._coord.error:
                self._coord.report(error_of_service, "a service")

    def _outcome(self) -> HookOutcome:
        error = self._coord.error
        if error is not None:
            return HookOutcome("error", error)
        if isinstance(self._body_error, BaseException) and not isinstance(self._body_error, Exception):
            return HookOutcome("cancelled", self._body_error)
        if self._chain.stop_requested or self._body_error is not None:
            return HookOutcome("stopped" if self._chain.stop_requested else "finished")
        return HookOutcome("finished")

    async def _release(self) -> None:
        assert self._around is not None
        # A startup that failed: hooks that began get their last call, and a session may be half made.
        await self._chain.end(None, HookOutcome("error", self._coord.error), self._on_thread)
        if self._incarnation is not None:
            await self._incarnation.end(lost=True)
        await self._around.close()
        if not self._was_finalized:
            _tf.unfinalize(self._graph)

    # ------------------------------------------------------------------ runs

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Awaitable[Any]:
        """Like `tf.compat.v1.Session.run`, awaited, with hooks.

        Cancellation is that of `AsyncSession.run`: the step in flight runs to its end, with its hooks.

        Raises:
            SessionClosed: The session is closed.
            RuntimeError: A hook has requested a stop.
        """
        return self._run(fetches, feed_dict, options, run_metadata)

    async def _run(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        while True:
            incarnation = await self._current()
            self._chain.check_may_run()
            try:
                return await self._run_on(incarnation, fetches, feed_dict, options, run_metadata)
            except Exception as error:
                await self._recover(incarnation, error)

    async def _run_on(
        self, incarnation: Incarnation, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        if incarnation.hooked is not None:
            return await incarnation.hooked.run(fetches, feed_dict, options, run_metadata)
        return await self._chain.run_from_loop(
            incarnation.plain, fetches, feed_dict, options, run_metadata, incarnation.on_device
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
        """
        check_step_fn(step_fn)
        while True:
            incarnation = await self._current()
            try:
                return await self._step(incarnation, step_fn)
            except StopRequested:
                raise
            except Exception as error:
                cause = error.__cause__ if isinstance(error, RuntimeError) else None
                if isinstance(cause, StopIteration):
                    raise StopRequested("the step") from error
                await self._recover(incarnation, error, None if error is self._chain.failure else "step_fn")

    async def _step(self, incarnation: Incarnation, step_fn: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(step_fn):

            async def with_hooks(
                fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
            ) -> Any:
                return await self._run_on(incarnation, fetches, feed_dict, options, run_metadata)

            return await step_fn(StepContext(incarnation.plain, with_hooks, True))
        hooked = incarnation.hooked
        if hooked is None:
            raise TypeError("with hooks that are coroutine functions, `step_fn` must be one, too")
        context = StepContext(incarnation.plain.raw, hooked.blocking.run, False)
        return await incarnation.on_device(step_fn, context)

    def steps(
        self,
        fetches: Any,
        feeds: Any = None,
        *,
        max_steps: int | None = None,
        ahead: int = 64,
        stop_when: Callable[[Any], bool] | None = None,
        copy_feeds: bool = True,
    ) -> AsyncIterator[Any]:
        """A stream of steps with hooks, at full speed; see `AsyncSession.steps`.

        It also ends when a hook requests a stop. With hooks that are coroutine functions it goes step by step.
        """
        return MonitoredSteps(self, fetches, feeds, max_steps, ahead, stop_when, copy_feeds)

    # ------------------------------------------------------------------ stop, state

    def should_stop(self) -> bool:
        """Whether the loop around the runs should end; any thread."""
        return self._closed or self._chain.stop_requested or self._coord.should_stop()

    def request_stop(self, ex: Any = None) -> None:
        """Ask for a stop, with an error or without; any thread. See `Coordinator.request_stop`."""
        self._coord.request_stop(ex)

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
        if self._incarnation is None or not self._incarnation.usable:
            raise SessionClosed(self._name)
        return self._incarnation.plain

    async def save(self) -> CheckpointInfo:
        """Save now, between two steps; see `Supervisor.save`.

        Raises:
            RuntimeError: This session does not save: there is no checkpoint directory, or it is a worker's.
        """
        run = (await self._current()).run
        if run is None or self._saving is None:
            raise RuntimeError("this session does not save: make it by MonitoredTrainingSession(checkpoint_dir=...)")
        return await run.save()

    def status(self) -> Status:
        """How it stands; any thread, never blocks."""
        incarnation = self._incarnation
        status = None if incarnation is None else incarnation.status()
        return status or Status(self._name, "stopped" if self._closed else "idle", True, None)

    @property
    def recoveries(self) -> int:
        """How often the session was recovered."""
        return self._history.total

    def events(self) -> AsyncIterator[Event]:
        """An iterator over the events from now on, which ends with the session; on the event loop."""
        return self._hub.subscribe()


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
            clock=clock,
            executor=executor,
        )

    def raw_session(self) -> Any:
        """TensorFlow's session, or None when this one is closed."""
        return self._incarnation.plain.raw if self._incarnation is not None and self._incarnation.usable else None
