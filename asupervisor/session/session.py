"""`AsyncSession`: a TensorFlow session whose runs are awaited.

The way of `await sess.run(...)`: look the plan up (on the loop, a dictionary access), put a call into the device
thread's inbox, convert feeds and run there, come back with one wake-up of the loop. Here is what happens on the loop;
`calls` is what happens on the threads, also to a call whose plan is not known yet, and to one that only fills a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import tensorflow as tf

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.calls import label_of, no_loop_here
from asupervisor.runtime.device import DeviceExecutor, Priority
from asupervisor.runtime.device_thread import fail_all
from asupervisor.runtime.mailbox import Mailbox, attach, detach
from asupervisor.runtime.statistics import Percentiles, window
from asupervisor.runtime.wakeup import Ending
from asupervisor.session.arguments import check_steps
from asupervisor.session.blocking import BlockingSession
from asupervisor.session.calls import Held, Plans, RunCall, Undecided
from asupervisor.session.closing import CLOSE_SECS, close_aside
from asupervisor.session.plan import PlanCache
from asupervisor.session.rider import Rider, TrainingRuns
from asupervisor.session.starvation import StarvationWatch
from asupervisor.session.statistics import SessionStatistics
from asupervisor.session.steps import Steps
from asupervisor.session.stream import StepStream

if TYPE_CHECKING:
    from asupervisor.runtime.coordinator import Coordinator

STARVED_AFTER_SECS: Final = 1.0
"""A run that may wait for input is reported when it takes longer, in seconds."""

_running_loop = asyncio._get_running_loop


class AsyncSession:
    """A TensorFlow session for one event loop; its runs are awaited, and never interleave on the device thread.

    That thread is its executor's: one for all sessions that share the executor. What waits on purpose (a run that only
    fills or closes a queue, `side`) goes to side threads, as many as are needed.

    It belongs to the loop that it was made on, or else to the first one that uses it.

    Args:
        raw: The TensorFlow session.
        executor: Whose device thread it uses; sessions may share one. It is not closed by the session.
        coordinator: Its stop ends streams and releases what `pause` holds.
        global_step: What a training run writes; None means that a run that writes any variable is one.
        emit: Told what happens.
        close: What `close` does, for the owner of the session; by default it closes the TensorFlow session.
        name: The session, for people.
    """

    def __init__(
        self,
        raw: tf.compat.v1.Session,
        executor: DeviceExecutor,
        *,
        coordinator: Coordinator | None = None,
        global_step: Any = None,
        emit: EventSink = log_only,
        close: Callable[[], Awaitable[None]] | None = None,
        name: str = "session",
        starved_after_secs: float = STARVED_AFTER_SECS,
    ) -> None:
        self.raw = raw
        self.name = name
        self.closed = False
        self.executor = executor
        self._device = executor.device
        self._coordinator = coordinator
        self._emit = emit
        self._close = close
        self._plans: Plans = PlanCache(raw, global_step=global_step)
        self._runs = TrainingRuns(raw, emit)
        self._siblings: list[AsyncSession] = []
        self._undecided = Undecided(self._device.side)
        self._held = Held(self._device)
        self._streams: set[Steps] = set()
        self._loop: Any = _running_loop() or _UNBOUND
        self._mailbox: Mailbox | None = None
        self._lags = window()  # of the loop, once there is one
        self._step_times, self._run_times = window(), window()
        self._run_count = 0
        self._write_count = 0
        self._raw_closed: Ending | None = None
        self._starved_after_secs = starved_after_secs
        self._watch: StarvationWatch | None = None

    # ------------------------------------------------------------------------------------------------- runs

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
        *,
        lane: Literal["device", "side"] = "device",
    ) -> Awaitable[Any]:
        """Like `tf.compat.v1.Session.run`, awaited; its turn comes between two steps of the device thread.

        Cancelled before it has started, it is withdrawn and never runs. Cancelled in flight, the caller is released
        at once; the run ends on the device thread, its result is dropped and the event ``run.dropped`` says how it
        ended. What frees a run that never ends is closing the session.

        Args:
            fetches: As in TensorFlow.
            feed_dict: As in TensorFlow; leave its arrays alone until the result is there.
            options: As in TensorFlow.
            run_metadata: As in TensorFlow.
            lane: ``"side"`` runs it on a side thread, beside the steps: for what blocks on purpose, such as an
                enqueue on a full queue. A run that does nothing but enqueue or close goes there by itself.

        Returns:
            What TensorFlow's `run` returns, when awaited.

        Raises:
            WrongEventLoop: At once, when called off the loop (use `blocking` there) or on another loop.
            SessionClosed: At once, when the session is closed.
        """
        if _running_loop() is not self._loop or self.closed or self._mailbox is None:
            self._bind("run")
        if lane != "device":
            if lane != "side":
                raise ValueError(f"lane must be 'device' or 'side', not {lane!r}")
            return self._run_aside(fetches, feed_dict, options, run_metadata)
        return self._run(fetches, feed_dict, options, run_metadata)

    async def _run(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        plan = self._plans.peek(fetches, feed_dict) if options is None and run_metadata is None else None
        assert self._mailbox is not None
        call = RunCall(self, self._mailbox, fetches, feed_dict, options, run_metadata, plan)
        device = self._device
        if plan is None:
            call.submit_unknown()
            self._watch_starvation()
        elif plan.side_lane:
            call.aside = True
            device.submit_side(call)
        else:
            device.submit(call, device.interactive)
            if plan.may_wait:
                self._watch_starvation()
        return await call

    async def _run_aside(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        assert self._mailbox is not None
        call = RunCall(self, self._mailbox, fetches, feed_dict, options, run_metadata, None)
        call.aside = True
        self._device.submit_side(call)
        return await call

    def make_callable(
        self, fetches: Any, feed_list: Any = None, accept_options: bool = False
    ) -> Callable[..., Awaitable[Any]]:
        """Like `tf.compat.v1.Session.make_callable`; the result is awaited like `run`.

        Args:
            fetches: As in TensorFlow.
            feed_list: As in TensorFlow: the tensors that the callable's positional arguments feed.
            accept_options: As in TensorFlow: whether the callable takes `options` and `run_metadata`.

        Raises:
            TypeError: `feed_list` is not a list or tuple.
        """
        if feed_list is not None and not isinstance(feed_list, list | tuple):
            raise TypeError(f"Argument `feed_list` must be a list or tuple. Received: feed_list={feed_list}")
        keys = tuple(feed_list or ())

        def run(*feeds: Any, **options: Any) -> Awaitable[Any]:
            if len(feeds) != len(keys):
                raise TypeError(f"the callable feeds {len(keys)} tensors, and was given {len(feeds)} values")
            if options and not accept_options:
                raise TypeError(f"made without accept_options=True, it takes no {', '.join(sorted(options))}")
            return self.run(fetches, dict(zip(keys, feeds, strict=True)) if keys else None, **options)

        return run

    def steps(
        self,
        fetches: Any,
        feeds: Any = None,
        *,
        max_steps: int | None = None,
        ahead: int = 64,
        stop_when: Callable[[Any], bool] | None = None,
        copy_feeds: bool = True,
    ) -> StepStream:
        """Run one step after another, ahead of whoever takes the results: ``async for loss in sess.steps(...)``.

        Between two steps, snapshots, saves and interactive runs have their turn. The stream ends at a step boundary
        when a stop is requested, when the feed ends, at `tf.errors.OutOfRangeError`, after `max_steps`, and when
        `stop_when` says so; the results of steps that ran are yielded all the same. An error of a step, of the feed or
        of `stop_when` leaves the loop as itself, after the results before it.

        Args:
            fetches: As for `run`.
            feeds: None; a feed dictionary, converted once; an iterable of them or a callable that returns the next one
                (None: no more), both on a side thread while the step before runs; an async iterable or a coroutine
                function, on the loop.
            max_steps: Most steps to run; None for no limit.
            ahead: How many results may wait to be taken before the steps wait, too. 0 is lock-step: a step is run and
                its feed is taken only when its result is asked for.
            stop_when: Called with each result on the device thread, right after the step; the stream ends with the
                result for which it is true, and no further step is run.
            copy_feeds: Whether each feed is copied when it is taken. Without, the producer must leave its arrays
                alone until their step has run.

        Raises:
            WrongEventLoop: Called off the loop, or on another one.
            SessionClosed: The session is closed.
            TypeError: `feeds` is none of these.
            ValueError: `max_steps` or `ahead` is negative.
            TypeError: `max_steps` or `ahead` is no integer, or `stop_when` is a coroutine function.
        """
        self._bind("steps")
        check_steps(max_steps, ahead, stop_when)
        assert self._mailbox is not None
        return StepStream(Steps(self, self._mailbox, fetches, feeds, max_steps, ahead, stop_when, copy_feeds))

    # ------------------------------------------------------------------------------------------------ calls

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(raw, *args)` on the device thread, between two steps, with the graph entered.

        Cancellation is that of `run`.

        Args:
            fn: Any blocking function; its first argument is the TensorFlow session.
            *args: The others.
        """
        self._bind("call")
        return await self.executor.call(self._entered, fn, args, label=label_of(fn))

    async def control(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Like `call`, before everything else that waits: for a snapshot or a save."""
        self._bind("control")
        return await self.executor.call(self._entered, fn, args, priority=Priority.CONTROL, label=label_of(fn))

    async def side(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(raw, *args)` on a side thread, beside the steps, with the graph entered."""
        self._bind("side")
        return await self.executor.side(self._entered, fn, args, label=label_of(fn))

    def _entered(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        # The default graph is a matter of the thread: it is entered here, for this call only.
        with self.graph.as_default():
            return fn(self.raw, *args)

    def sibling(self, wrap: Callable[[Any, Any], tuple[Plans, Any]]) -> AsyncSession:
        """The same TensorFlow session, counted and paused together with this one, whose runs are planned differently.

        Args:
            wrap: Makes its plans, and what runs its training runs, from this session's.
        """
        sibling = AsyncSession(
            self.raw,
            self.executor,
            coordinator=self._coordinator,
            emit=self._emit,
            close=self.close,
            name=self.name,
            starved_after_secs=self._starved_after_secs,
        )
        sibling._plans, sibling._runs = wrap(self._plans, self._runs)
        sibling._step_times, sibling._run_times = self._step_times, self._run_times
        self._siblings.append(sibling)
        return sibling

    # -------------------------------------------------------------------------------------------- properties

    @property
    def graph(self) -> tf.Graph:
        """The graph. `tensor.eval(session=sess)` gives an awaitable.

        TensorFlow's `op.run(session=sess)` throws away what `run` returns: write ``await sess.run(op)``.
        """
        return self.raw.graph

    @property
    def blocking(self) -> BlockingSession:
        """The same session for other threads; inline on the device thread."""
        return BlockingSession(self)

    @property
    def training_runs(self) -> int:
        """Training runs that have succeeded in this session; any thread."""
        return self._runs.count

    @property
    def failed_training_run(self) -> BaseException | None:
        """The error of the last training run that failed, until the session is closed; any thread."""
        return self._runs.failure

    @property
    def paused(self) -> bool:
        """Whether training runs and streams wait."""
        return self._runs.paused

    def statistics(self) -> SessionStatistics:
        """How it stands; any thread."""
        everybody = (self, *self._siblings)
        return SessionStatistics(
            name=self.name,
            runs=sum(session._run_count for session in everybody),
            writing_runs=sum(session._write_count for session in everybody),
            training_runs=self._runs.count,
            step_time=Percentiles.of(self._step_times),
            run_time=Percentiles.of(self._run_times),
            paused=self._runs.paused,
            held=sum(len(session._held.lane) for session in everybody),
            streams=sum(len(session._streams) for session in everybody),
            loop_lag=Percentiles.of(self._lags),
            device=self.executor.statistics(),
        )

    # ------------------------------------------------------------------------------------- pause, ride, alarm

    def pause(self) -> None:
        """From the next step boundary on, training runs and streams wait; everything else goes on. Any thread."""
        if not self._stopping():
            self._runs.paused = True

    def resume(self) -> None:
        """Undo `pause`; any thread. A requested stop does the same."""
        self._runs.paused = False
        for session in (self, *self._siblings):
            session._release()

    def fail_held(self) -> None:
        """Have the training runs that a pause holds fail with `SessionClosed`: it is given up. Any thread."""
        for session in (self, *self._siblings):
            fail_all(session._held.lane, lambda: SessionClosed(self.name))

    def _release(self) -> None:
        self._held.release()
        for stream in tuple(self._streams):
            stream.kick()

    def _stopping(self) -> bool:
        coordinator = self._coordinator
        return coordinator is not None and coordinator.should_stop()

    def _on_stop(self) -> None:
        """On the loop, soon after a stop was requested: what waits goes on, streams without a step in flight end.

        Training runs that a pause holds go on, too; but not after an error, which may mean that the model is lost.
        """
        if self._coordinator is not None and self._coordinator.error is not None:
            self.fail_held()
        for stream in tuple(self._streams):
            stream.end_between_steps("stop")
        self.resume()

    def board(self, rider: Rider) -> None:
        """Let a rider go along with the next training run that suits it; any thread."""
        self._runs.board(rider)

    def disembark(self, rider: Rider) -> None:
        """Undo `board`; any thread."""
        self._runs.disembark(rider)

    def set_alarm(self, at_training_runs: int, fn: Callable[[], None]) -> None:
        """Call `fn` once on the device thread, right after the training run of this number; any thread.

        Args:
            at_training_runs: When `training_runs` has reached this; after the next one if it has already.
            fn: What to call, between two steps. Its exceptions are reported, and fail nothing.
        """
        self._runs.set_alarm(at_training_runs, fn)

    # ------------------------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """Close the session; idempotent. Its owner saves first where a final save is due.

        Queued runs fail with `SessionClosed`, a run in flight with TensorFlow's CancelledError.
        """
        if self._close is not None:
            await self._close()
        else:
            await self.close_raw(CLOSE_SECS)

    async def close_raw(self, timeout_secs: float) -> bool:
        """Close the TensorFlow session itself; for the owner of the session, idempotent.

        Args:
            timeout_secs: How long to wait; TensorFlow's close can block on a running Python operation.

        Returns:
            Whether it is closed. If not, or if this is cancelled, a side thread goes on trying.
        """
        self._end_use()
        if self._device.forked:  # TensorFlow's threads are the parent's: its close would wait for them for ever
            return True
        if self._raw_closed is None:
            self._raw_closed = Ending()
            close_aside(
                self.raw,
                self.name,
                self._device.side,
                drop_plans=self._drop_plans,
                ending=self._raw_closed,
                emit=self._emit,
            )
        try:
            return await self._raw_closed.wait(timeout_secs)
        finally:
            for session in (self, *self._siblings):
                if session._mailbox is not None:
                    mailbox, session._mailbox = session._mailbox, None
                    detach(mailbox)
                if session is not self:
                    session._close = _closed_already  # was ours: no cycle is left behind

    def _drop_plans(self) -> None:
        for session in (*self._siblings, self):
            session._plans.drop()

    def _end_use(self) -> None:
        """No run starts any more, and what has not started fails."""
        for sibling in self._siblings:
            sibling._end_use()
        self.closed = True
        self._runs.let_go()
        if self._watch is not None:
            self._watch.disarm()
            self._watch = None

        def error() -> SessionClosed:
            return SessionClosed(self.name)

        if self._coordinator is not None:
            self._coordinator.remove_stop_callback(self._on_stop)
        fail_all(self._held.lane, error)
        fail_all(
            self._device.interactive,
            error,
            lambda call: isinstance(call, RunCall) and call.session is self,
        )
        for stream in tuple(self._streams):
            stream.abort(error())

    # ------------------------------------------------------------------------------------------------ guards

    def _bind(self, what: str) -> None:
        """Check loop and state, and attach to the loop at the first use."""
        loop = _running_loop()
        if loop is None:
            raise no_loop_here(f"sess.{what}(...)")
        if self.closed or self._device.closed:
            raise SessionClosed(self.name)
        if loop is not self._loop:
            if self._loop is not _UNBOUND:
                raise WrongEventLoop(
                    f"{self.name} belongs to another event loop than the one that runs here",
                    "Use it on its own loop, or from other threads through sess.blocking.",
                )
            self._loop = loop
        if self._mailbox is None:
            self._mailbox = attach(loop)
            self._lags = self._mailbox.lags
            if self._coordinator is not None:
                self._coordinator.add_stop_callback(self._on_stop)

    def _watch_starvation(self) -> None:
        if self._watch is None:
            self._watch = StarvationWatch(self._starved_after_secs, self._runs_now, self._runs_soon, self._emit)
        self._watch.arm()

    def _runs_now(self) -> RunCall | Steps | None:
        current = self._device.current
        return current if isinstance(current, RunCall | Steps) and current.session is self else None

    def _runs_soon(self) -> bool:
        return bool(self._device.interactive or self._streams)


async def _closed_already() -> None:
    pass


_UNBOUND: Final = object()
