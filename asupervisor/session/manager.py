"""Creates sessions, and makes sure that the model in them is ready: restored, initialised, or awaited.

Every call that may block happens on a thread: opening and closing a session on a side thread, because a missing
peer can hold it for ever; restoring, initialising and checking on the device thread. Whoever awaits may be
cancelled at any moment and is released at once; a session that nobody received is closed, at the latest by the
thread that was still opening it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar, cast

import tensorflow as tf

from asupervisor import _tf
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import StopRequested
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.arguments import check_config, check_init_fn, check_places, graph_or_default, is_async
from asupervisor.session.masters import check_master, resolve_master
from asupervisor.session.opening import Opening
from asupervisor.session.readiness import ModelOps, Readiness, maybe_name, run_init_op
from asupervisor.session.restorer import PlainRestorer, Restorer
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import Patience, Polls

T = TypeVar("T")


class SessionManager:
    """Opens sessions and brings their model into a usable state.

    ::

        manager = SessionManager(ready_op=tf.compat.v1.report_uninitialized_variables(), graph=graph)
        session = await manager.prepare_session("", init_op=init, saver=saver, checkpoint_dir=logdir)

    Differences from the original:

    * Waits look again after 0.05 to 1 s, never later than `recovery_wait_secs` and never beyond `max_wait_secs`;
      TensorFlow sleeps whole `recovery_wait_secs` for a checkpoint, and gives up on a model as soon as the next
      whole sleep would not fit. `wait_for_session` really waits `max_wait_secs`, then looks a last time. An opening
      or a look that has begun has two seconds, whatever is left.
    * `wait_for_session` keeps one session for all its looks, where TensorFlow opens a new one each time.
    * An opening, a restore or a check that hangs holds nobody: it can be cancelled, a requested stop ends it, and
      the deadline of `wait_for_session` covers it.
    * Wrong arguments (a master, two checkpoint places, an `init_fn` that cannot be called) are errors before a
      session is opened, and a session is closed again when its preparation fails.
    * TPU systems are not initialised.

    Errors of TensorFlow's leave as they are. An error of the startup is never a clean end of training, whatever
    its class.

    Source: `tf.compat.v1.train.SessionManager`.

    Args:
        local_init_op: Run in each new session, after the restore or the initialisation; an operation, a tensor or
            a list of them.
        ready_op: Tells whether the model is ready: returns the names of what is not, or raises
            FailedPreconditionError. None: there is no check.
        ready_for_local_init_op: The same for `local_init_op`, which only runs once this passes.
        graph: The graph; None for the default graph of the calling thread.
        recovery_wait_secs: Longest pause between two looks while waiting, in seconds.
        local_init_run_options: `RunOptions` for `local_init_op`.
        local_init_feed_dict: Feeds for `local_init_op`.
        executor: Whose threads do the work; it is not closed here. None: each session has an executor of its own,
            which ends when the session is closed.
        clock: Where the time of waits comes from.
        emit: Where events go; from any thread.
        restore: How a checkpoint gets into a session; None for TensorFlow's plain way.
        coordinator: A requested stop ends every wait here with `StopRequested`; sessions get it, too.
        global_step: Handed on to the sessions.
        close: Handed on to the sessions as what their `close()` does; None closes the session and nothing else.

    Raises:
        ValueError: There is a `ready_for_local_init_op` but no `local_init_op`.
        RuntimeError: In eager mode, when no graph is given and the default graph is empty.
    """

    def __init__(
        self,
        local_init_op: Any = None,
        ready_op: Any = None,
        ready_for_local_init_op: Any = None,
        graph: tf.Graph | None = None,
        recovery_wait_secs: float = 30,
        local_init_run_options: Any = None,
        local_init_feed_dict: Any = None,
        *,
        executor: DeviceExecutor | None = None,
        clock: Clock | None = None,
        emit: EventSink | None = None,
        restore: Restorer | None = None,
        coordinator: Coordinator | None = None,
        global_step: Any = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if ready_for_local_init_op is not None and local_init_op is None:
            raise ValueError(
                "If you pass a ready_for_local_init_op you must also pass a local_init_op, "
                f"ready_for_local_init_op [{ready_for_local_init_op}]"
            )
        self._graph = graph_or_default(graph)
        self._model = ModelOps(
            local_init_op, ready_op, ready_for_local_init_op, local_init_run_options, local_init_feed_dict
        )
        self._recovery_wait_secs = recovery_wait_secs
        self._executor = executor
        self._given_clock = clock
        self._given_emit = emit
        self._restore = restore
        self._coordinator = coordinator
        self._global_step = global_step
        self._close = close
        self.restored_from: str | None = None
        """Where the last session that was prepared or recovered was restored from; None if it was not."""

    @property
    def graph(self) -> tf.Graph:
        """The graph of the sessions."""
        return self._graph

    def bound(
        self,
        *,
        executor: DeviceExecutor | None = None,
        clock: Clock | None = None,
        emit: EventSink | None = None,
        restore: Restorer | None = None,
        coordinator: Coordinator | None = None,
        global_step: Any = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> Self:
        """A copy with the given collaborators wherever this manager was made without.

        This is how a supervisor makes its own, and a user's, manager work with its threads, clock and events.
        """
        bound = copy.copy(self)
        bound._executor = self._executor if self._executor is not None else executor
        bound._given_clock = self._given_clock if self._given_clock is not None else clock
        bound._given_emit = self._given_emit if self._given_emit is not None else emit
        bound._restore = self._restore if self._restore is not None else restore
        bound._coordinator = self._coordinator if self._coordinator is not None else coordinator
        bound._global_step = self._global_step if self._global_step is not None else global_step
        bound._close = self._close if self._close is not None else close
        return bound

    # ------------------------------------------------------------------ the three ways to a session

    async def prepare_session(
        self,
        master: str,
        init_op: Any = None,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = 7200,
        config: Any = None,
        init_feed_dict: Any = None,
        init_fn: Callable[[Any], Any] | None = None,
    ) -> AsyncSession:
        """Open a session and make its model ready: restore it, or else initialise it.

        After a restore neither `init_op` nor `init_fn` runs; `local_init_op` always does, once its own check passes.

        Cancelling it releases the caller at once. What runs on the device thread at that moment is finished there
        or freed by the closing of its session, and never seen.

        Source: `tf.compat.v1.train.SessionManager.prepare_session`.

        Args:
            master: The master to open the session on; see `masters`.
            init_op: Operation, tensor, or list of them, that initialises the model.
            saver: Restores the model; None: nothing is restored.
            checkpoint_dir: Directory whose newest checkpoint is restored.
            checkpoint_filename_with_path: The one checkpoint to restore, instead of a directory.
            wait_for_checkpoint: Wait until there is a checkpoint in `checkpoint_dir`.
            max_wait_secs: How long to wait for it, in seconds; None: without limit.
            config: `ConfigProto` of the session.
            init_feed_dict: Feeds for `init_op`.
            init_fn: Called after `init_op`. A plain function gets the raw `tf.compat.v1.Session` and runs on the
                device thread with the graph entered; a coroutine function gets the `AsyncSession` and runs on the
                event loop.

        Returns:
            A session whose model is ready.

        Raises:
            RuntimeError: The model could neither be restored nor initialised; what is not ready is named.
            ValueError: Both checkpoint places were given, or the master does not work.
            TypeError: `init_fn` cannot be called with one argument.
            StopRequested: The coordinator's stop came first.
        """
        check_places(checkpoint_dir, checkpoint_filename_with_path)
        check_init_fn(init_fn)
        can_init = init_op is not None or init_fn is not None or self._model.local_init_op is not None
        if not can_init and not _may_restore(saver, checkpoint_dir, checkpoint_filename_with_path):
            raise _nothing_to_init()
        opening = await self._open(master, config)
        try:
            session = cast(AsyncSession, opening.session)
            restored = await self._restored(
                opening, saver, checkpoint_dir, checkpoint_filename_with_path, wait_for_checkpoint, max_wait_secs
            )
            if not restored:
                if not can_init:
                    raise _nothing_to_init()
                if init_op is not None:
                    await self._on_device(opening, "init_op", run_init_op, init_op, init_feed_dict)
                if init_fn is not None:
                    await self._call_init_fn(opening, init_fn)
            local = await self._on_device(opening, "local_init_op", self._model.try_local_init)
            if not local.ready:
                raise RuntimeError(
                    "Init operations did not make model ready for local_init.  "
                    f"Init op: {maybe_name(init_op)}, init fn: {init_fn}, error: {local.message}"
                )
            model = await self._on_device(opening, "ready_op", self._model.check)
            if not model.ready:
                raise RuntimeError(
                    "Init operations did not make model ready.  "
                    f"Init op: {maybe_name(init_op)}, init fn: {init_fn}, local_init_op: {self._model.local_init_op}, "
                    f"error: {model.message}"
                )
        except BaseException as error:
            await opening.give_up(because=error)
            raise
        if not restored:
            self._emit("session.initialised", "the model was initialised")
        return session

    async def recover_session(
        self,
        master: str,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = 7200,
        config: Any = None,
    ) -> tuple[AsyncSession, bool]:
        """Open a session and restore its model if there is something to restore; never initialise it.

        `local_init_op` runs in either case, once its own check passes. Cancellation: as `prepare_session`.

        Source: `tf.compat.v1.train.SessionManager.recover_session`.

        Args:
            master: The master to open the session on; see `masters`.
            saver: Restores the model; None: nothing is restored.
            checkpoint_dir: Directory whose newest checkpoint is restored.
            checkpoint_filename_with_path: The one checkpoint to restore, instead of a directory.
            wait_for_checkpoint: Wait until there is a checkpoint in `checkpoint_dir`.
            max_wait_secs: How long to wait for it, in seconds; None: without limit.
            config: `ConfigProto` of the session.

        Returns:
            The session, and whether its model was restored and is ready. A restored model that is not ready is
            False, too; the log tells why.

        Raises:
            ValueError: Both checkpoint places were given, or the master does not work.
            StopRequested: The coordinator's stop came first.
        """
        check_places(checkpoint_dir, checkpoint_filename_with_path)
        opening = await self._open(master, config)
        try:
            session = cast(AsyncSession, opening.session)
            restored = await self._restored(
                opening, saver, checkpoint_dir, checkpoint_filename_with_path, wait_for_checkpoint, max_wait_secs
            )
            state = await self._on_device(opening, "local_init_op", self._model.try_local_init)
            if not restored:
                return session, False
            what = "ready for local init" if not state.ready else "ready"
            if state.ready:
                state = await self._on_device(opening, "ready_op", self._model.check)
        except BaseException as error:
            await opening.give_up(because=error)
            raise
        if not state.ready:
            self._emit(
                "session.not_ready",
                f"restoring from {self.restored_from} did not make the model {what}: {state.first_line()}",
                level="warning",
                path=self.restored_from,
                missing=list(state.missing),
            )
        return session, state.ready

    async def wait_for_session(
        self, master: str, config: Any = None, max_wait_secs: float | None = math.inf
    ) -> AsyncSession:
        """Open a session and wait until somebody else has made its model ready.

        `local_init_op` runs at each look, once its own check passes. Cancellation: as `prepare_session`.

        Source: `tf.compat.v1.train.SessionManager.wait_for_session`.

        Args:
            master: The master to open the session on; see `masters`.
            config: `ConfigProto` of the session.
            max_wait_secs: How long to wait, the opening included, in seconds; None or infinity: without limit.

        Returns:
            A session whose model is ready.

        Raises:
            SessionNotReady: The model did not become ready in time; also a `tf.errors.DeadlineExceededError` and a
                TimeoutError. It names what is missing.
            ValueError: The master does not work.
            StopRequested: The coordinator's stop came first.
        """
        limit = math.inf if max_wait_secs is None else max(0.0, max_wait_secs)
        deadline = self._clock.monotonic() + limit
        state = Readiness(False, "", (f"an answer of master {master!r}",))

        def too_late() -> BaseException:
            return _tf.SessionNotReady(state.names(), limit)

        opening = await self._open(master, config, deadline, too_late)
        try:
            polls, patience = Polls(self._recovery_wait_secs), self._patience()
            while True:
                state = await self._on_device(opening, "readiness", self._model.look, deadline=deadline, late=too_late)
                if state.ready:
                    return cast(AsyncSession, opening.session)
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0:
                    raise too_late()
                pause = min(polls.next(), remaining)
                if polls.tell(state.message, self._clock.monotonic()):
                    self._emit(
                        "session.waiting",
                        f"waiting for the model to be ready: {state.first_line()}",
                        missing=list(state.missing),
                    )
                await patience.pause(pause)
        except BaseException as error:
            await opening.give_up(because=error)
            raise

    async def adopt_session(self, master: str, config: Any = None) -> AsyncSession:
        """Open a session and look once whether its model is ready, however long the opening and the look take.

        `local_init_op` runs, once its own check passes. Cancellation: as `prepare_session`.

        Args:
            master: The master to open the session on; see `masters`.
            config: `ConfigProto` of the session.

        Returns:
            A session whose model is ready.

        Raises:
            SessionNotReady: It is not; what is missing is named.
            ValueError: The master does not work.
            StopRequested: The coordinator's stop came first.
        """
        begun = self._clock.monotonic()
        opening = await self._open(master, config)
        try:
            state = await self._on_device(opening, "readiness", self._model.look)
            if not state.ready:
                raise _tf.SessionNotReady(state.names(), round(self._clock.monotonic() - begun, 1))
        except BaseException as error:
            await opening.give_up(because=error)
            raise
        return cast(AsyncSession, opening.session)

    # ------------------------------------------------------------------ steps, on the loop

    async def _open(
        self,
        master: object,
        config: Any,
        deadline: float = math.inf,
        late: Callable[[], BaseException] | None = None,
    ) -> Opening:
        self.restored_from = None
        check_master(master)
        check_config(config)
        self._raise_if_stopped()
        patience = self._patience()
        opening = Opening("", self._graph, config, self._executor)
        try:
            opening.target = await patience.first(resolve_master(master, executor=opening.executor), deadline, late)
            await patience.first(patience.told_if_silent(opening.ask, master), deadline, late)
            opening.make_session(
                coordinator=self._coordinator,
                global_step=self._global_step,
                emit=self._emit,
                close=self._close,
            )
        except BaseException as error:
            await opening.give_up(because=error)
            raise
        return opening

    async def _restored(
        self,
        opening: Opening,
        saver: Any,
        checkpoint_dir: str | None,
        checkpoint_filename_with_path: str | None,
        wait_for_checkpoint: bool,
        max_wait_secs: float | None,
    ) -> bool:
        if not _may_restore(saver, checkpoint_dir, checkpoint_filename_with_path):
            return False
        restore = self._restore if self._restore is not None else PlainRestorer()
        places = (checkpoint_dir or None, checkpoint_filename_with_path or None)
        deadline = self._clock.monotonic() + (math.inf if max_wait_secs is None else max_wait_secs)
        polls, patience = Polls(self._recovery_wait_secs), self._patience()
        while not await self._on_device(opening, "restore", restore, saver, *places):
            now = self._clock.monotonic()
            if not wait_for_checkpoint or now >= deadline:
                return False
            if polls.tell("", now):
                self._emit("session.waiting", f"waiting for a checkpoint in {checkpoint_dir}", path=checkpoint_dir)
            await patience.pause(min(polls.next(), deadline - now))
        origin = getattr(restore, "restored_from", None) or checkpoint_filename_with_path or checkpoint_dir
        self.restored_from = str(origin)
        self._emit("session.restored", f"the model was restored from {origin}", path=self.restored_from)
        return True

    async def _call_init_fn(self, opening: Opening, init_fn: Callable[[Any], Any]) -> None:
        if is_async(init_fn):
            await self._patience().first(init_fn(opening.session))
            return
        result = await self._on_device(opening, "init_fn", init_fn)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"init_fn {init_fn!r} is a plain function, yet it returned an awaitable. Declare it with `async def`: "
                "it then runs on the event loop and receives the AsyncSession."
            )

    async def _on_device(
        self,
        opening: Opening,
        label: str,
        fn: Callable[..., T],
        *args: Any,
        deadline: float = math.inf,
        late: Callable[[], BaseException] | None = None,
    ) -> T:
        return await self._patience().first(opening.on_device(label, fn, *args), deadline, late)

    # ------------------------------------------------------------------ collaborators

    @property
    def _clock(self) -> Clock:
        if self._given_clock is None:
            self._given_clock = SystemClock()
        return self._given_clock

    @property
    def _emit(self) -> EventSink:
        return self._given_emit if self._given_emit is not None else log_only

    def _patience(self) -> Patience:
        return Patience(self._clock, self._emit, self._coordinator)

    def _raise_if_stopped(self) -> None:
        if self._coordinator is not None and self._coordinator.should_stop():
            raise StopRequested("the start of a session")


def _may_restore(saver: Any, checkpoint_dir: str | None, checkpoint_filename_with_path: str | None) -> bool:
    return bool(saver and (checkpoint_dir or checkpoint_filename_with_path))


def _nothing_to_init() -> RuntimeError:
    return RuntimeError(
        "Model is not initialized and no init_op or init_fn or local_init_op was given. "
        "Pass one of them, or a saver and a checkpoint to restore."
    )
