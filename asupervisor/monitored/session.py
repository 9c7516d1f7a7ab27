"""`MonitoredSession`: a session whose runs have hooks, and that is recovered when a part of the cluster fails.

::

    MonitoredSession ─ runs, streams and step functions
        └── Lifetime ─ Block, Host: the user's block, its stop state, what stands around it
                └── Incarnations ─ when a session is replaced
                        └── Incarnation ─ Host: one TensorFlow session with its services
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

import tensorflow as tf

from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import SessionClosed, StopRequested, WrongEventLoop
from asupervisor.events import Event, EventHub, Status
from asupervisor.hooks.protocol import checked, is_async
from asupervisor.monitored.creators import (
    ChiefSessionCreator,
    SavingSettings,
    SessionCreator,
    as_ours,
)
from asupervisor.monitored.incarnation import Incarnation
from asupervisor.monitored.lifetime import Lifetime
from asupervisor.monitored.stepping import StepContext, check_step_fn
from asupervisor.monitored.streams import MonitoredSteps
from asupervisor.recovery import RecoveryPolicy
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services import arguments
from asupervisor.session.elements import resolve_graph
from asupervisor.session.session import AsyncSession
from asupervisor.summary.base import SummaryWriter


class MonitoredSession:
    """A session that initialises or restores its model, runs hooks around each run, and recovers.

    ::

        async with MonitoredSession(ChiefSessionCreator(graph=graph), hooks=[hook]) as sess:
            while not sess.should_stop():
                await sess.run(train_op)

    Leaving the block ends the hooks, saves where it saves, ends the queue feeders and closes the session. An
    `OutOfRangeError`, a stop that a hook or a step function asked for, and an exception group of nothing else do not
    leave it; any other exception does, as the same object. The first one that went wrong leaves; later ones are its
    notes.

    Recovery: where a run fails with an error that the policy recovers from, or the session's coordinator holds one,
    the session is closed and made anew after a pause, and the call is run again, unless the state that it finds may
    already hold its effect: then `StepOutcomeUnknown` is raised. Each recovery is an event. A requested stop survives
    it. Where nothing could be restored, the model is not initialised again, and the error leaves; so does that of a
    cluster's chief which ends before it has recovered, or without having trained again what was lost unsaved.

    Differences from the original: the session begins with the block, not with the constructor; `close` is idempotent;
    a stop that a hook requested survives a recovery; every hook has its last call, whatever another one raised; without
    a global step there is no step counter, and no error. An error that some thread has reported to the session's
    coordinator is never taken for a clean end, whatever its class.

    Source: `tf.compat.v1.train.MonitoredSession`.

    Args:
        session_creator: Where sessions come from; None for a `ChiefSessionCreator` with defaults. TensorFlow's own
            creators work, too.
        hooks: The hooks, in order; TensorFlow's run unchanged, on the device thread. Entering raises
            `CheckpointNotRestored` where a `CheckpointSaverHook` would overwrite checkpoints that nobody restored.
        stop_grace_period_secs: What services have to end by themselves after a stop, in seconds. Last calls of hooks
            have half of it, so that a final save has the rest: a hook that takes longer is an error.
        graph: The graph; None for that of the creator, or the caller's default graph.
        recovery: When to recover; defaults to `RecoveryPolicy()`, in a cluster to `RecoveryPolicy.for_cluster()`.
        recovery_wait_secs: Longest wait between two looks at a model that is not ready, in seconds.
        clock: Where the time comes from.
        executor: The device thread to use; not closed.

    Raises:
        RuntimeError: No graph was given and TensorFlow executes eagerly.
        TypeError: `recovery` is no policy, or a number of seconds no number.
        ValueError: A number of seconds is negative.
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
        arguments.check_secs("stop_grace_period_secs", stop_grace_period_secs)
        arguments.check_secs("recovery_wait_secs", recovery_wait_secs)
        if recovery is not None and not isinstance(recovery, RecoveryPolicy):
            raise TypeError(f"recovery must be an asupervisor.RecoveryPolicy or None, not {recovery!r}")
        if session_creator is None:
            session_creator = ChiefSessionCreator(graph=graph)
        session_creator = as_ours(session_creator, graph)
        graph = graph or getattr(session_creator, "graph", None) or resolve_graph(None)
        self._lifetime = Lifetime(
            _name,
            session_creator,
            graph,
            tuple(hooks or ()),
            chief_hooks=_chief_hooks,
            saving=_saving,
            writer=_writer,
            stop_grace_secs=stop_grace_period_secs,
            recovery=recovery,
            recovery_wait_secs=recovery_wait_secs,
            clock=clock or SystemClock(),
            executor=executor,
        )
        self._incarnations = self._lifetime.incarnations

    # ------------------------------------------------------------------ enter and exit

    async def open(self) -> Self:
        """Enter without a block; end it by `await close()`.

        Cancelling it ends the start and gives back what was made, as for a block.
        """
        await self._lifetime.open()
        return self

    async def __aenter__(self) -> Self:
        await self._lifetime.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self._lifetime.entered and exc is None and self._incarnations.policy.original:
            raise RuntimeError("Session is already closed.")
        try:
            return await self._lifetime.leave(exc)
        finally:
            del exc, traceback

    async def close(self) -> None:
        """End the session; idempotent. See the class for what that does and what leaves.

        Cancelling it hurries the end, which is waited for all the same: services get no more grace.
        """
        await self._lifetime.leave(None)

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
            incarnation = await self._lifetime.usable()
            self._lifetime.chain.check_may_run()
            try:
                return await incarnation.run_with_hooks(fetches, feed_dict, options, run_metadata)
            except StopRequested:
                raise
            except Exception as error:
                await self._incarnations.recover(
                    incarnation, error, harmless=lambda current: current.changes_nothing(fetches, feed_dict)
                )

    async def run_step_fn(self, step_fn: Callable[..., Any]) -> Any:
        """Run a function that makes one step of several runs, with and without hooks.

        A coroutine function runs on the event loop, a plain one on the device thread with the graph entered. After a
        recovery the whole function is run again. Cancelling it cancels a coroutine function where it is; a plain one
        that has begun runs to its end, and its result is dropped.

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
            incarnation = await self._lifetime.usable()
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
            return await step_fn(StepContext(incarnation.plain, incarnation.run_with_hooks, True))
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
        return self._lifetime.should_stop()

    def request_stop(self, ex: Any = None) -> None:
        """Ask for a stop, with an error or without; any thread. See `Coordinator.request_stop`."""
        self._lifetime.coord.request_stop(ex)

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
        return self._lifetime.coord

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self._lifetime.graph

    @property
    def plain(self) -> AsyncSession:
        """The present session, for runs without hooks; another one after a recovery.

        Raises:
            SessionClosed: There is none.
        """
        current = self._incarnations.current
        if current is None or not current.usable:
            raise SessionClosed(self._lifetime.name)
        return current.plain

    async def save(self) -> CheckpointInfo:
        """Save now, between two steps; see `Supervisor.save`, also for what cancelling it does.

        Raises:
            RuntimeError: This session does not save: there is no checkpoint directory, or it is a worker's.
        """
        return await (await self._lifetime.usable()).save()

    def status(self) -> Status:
        """How it stands; any thread, never blocks."""
        return self._lifetime.status()

    @property
    def recoveries(self) -> int:
        """How often the session was made anew after an error."""
        return self._incarnations.history.total

    @property
    def outcome(self) -> str | None:
        """How it ended: ``finished``, ``stopped``, ``error`` or ``cancelled``, as `HookOutcome`; None before that."""
        return self._lifetime.outcome

    def events(self) -> AsyncIterator[Event]:
        """An iterator over the events from now on, which ends with the session; on the event loop.

        Before the start it waits for that; after the end it ends at once.
        """
        return self._lifetime.hub.subscribe(wait=False)


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
