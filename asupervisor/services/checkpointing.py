"""Checkpoints as a standing service: by time, by steps, by hand, and a last one at the end.

One save is in flight at a time. Whatever asks for another one meanwhile shares one more, which begins when the first
is done: a request is always answered by a state that is not older than the request. The device thread is needed for
the snapshot only; the rest happens on a side thread, beside the steps.

A save that is under way belongs to no caller and to no scope: cancelling whoever asked for it, the service included,
does not interrupt it. `drain` or `final_save` waits for it, before the session is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from asupervisor.checkpoint.records import CheckpointInfo, Kind, Outcome, SnapshotInfo
from asupervisor.checkpoint.store import CheckpointStore, Snapshot
from asupervisor.clock import Clock, SystemClock, next_boundary
from asupervisor.errors import CheckpointNotRestored, LogdirInUse, SessionClosed, describe
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.racing import first_of
from asupervisor.services.last_snapshot import PATIENCE_SECS, SnapshotTaker
from asupervisor.services.ticks import unless_stopped

if TYPE_CHECKING:
    from asupervisor.runtime.coordinator import Coordinator
    from asupervisor.session.session import AsyncSession

_T = TypeVar("_T")
_FIRST_BACKOFF_SECS = 1.0
_LONGEST_BACKOFF_SECS = 60.0
_POSTPONED_SECS = 1.0
# After the stop, while others train on: until the first save, and between two of them where the timer goes by steps.
_FIRST_MEANWHILE_SECS = 1.0
_MEANWHILE_BY_STEPS_SECS = 60.0
# Nothing gets better by trying again.
_HOPELESS = (CheckpointNotRestored, LogdirInUse)


class CheckpointService:
    """Saves a session's model; all methods belong to its event loop.

    `run` saves at once, then at fixed boundaries of `save_model_secs` and after every `save_model_steps` steps. A
    failed save is an event, is tried again with a growing pause, and leaves training and older checkpoints alone.

    Args:
        session: The session.
        store: Its checkpoints.
        coordinator: Its stop ends `run`.
        save_model_secs: Seconds between two saves; None or 0 for none by time.
        save_model_steps: Steps between two saves; None or 0 for none by steps. Where the model has no global step,
            training runs are counted.
        clock: Where time comes from.
        emit: Where events go.
        on_saved: Called on the loop with each regular checkpoint that was published.
        fatal: Whether a failed save ends the service, and so the training, at once.
    """

    name = "checkpoints"

    def __init__(
        self,
        session: AsyncSession,
        store: CheckpointStore,
        coordinator: Coordinator,
        save_model_secs: float | None = None,
        save_model_steps: int | None = None,
        clock: Clock | None = None,
        emit: EventSink = log_only,
        *,
        on_saved: Callable[[CheckpointInfo], None] | None = None,
        fatal: bool = False,
    ) -> None:
        self.last_error: Exception | None = None
        """The error of the last save, None when it succeeded."""
        self.last_step: int | None = None
        """The global step of the newest snapshot, whatever became of it."""
        self.cost_secs: float | None = None
        """How long the last save took, in seconds."""
        self.skipped = False
        """Whether there was no time for the final save."""
        self._session = session
        self._store = store
        self._coordinator = coordinator
        self._save_model_secs = save_model_secs or None
        self._save_model_steps = save_model_steps or None
        self._clock = clock or SystemClock()
        self._emit = emit
        self._on_saved = on_saved
        self._fatal = fatal
        # Guarded by the loop: changed in its callbacks and tasks only, never across an await.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._flight: asyncio.Task[CheckpointInfo] | None = None
        self._waiting: asyncio.Task[CheckpointInfo] | None = None
        self._kick = asyncio.Event()
        self._saved: SnapshotInfo | None = None
        self._runs_saved = 0
        self._failures = 0
        self._warned_stuck = False
        self._ended = False
        # Written on the loop, read on the device thread; a stale value costs a save at the next chance.
        self._emergency = False
        self._taker = SnapshotTaker(session)
        self._seen_failure: BaseException | None = None
        self._armed_for: int | None = None
        self._reserved_for: int | None = None
        self._saved_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    # -------------------------------------------------------------------------------------- the service

    async def run(self) -> None:
        """Save until the stop is requested; the body of the supervised task.

        Cancelling it ends the timer; a save that is under way is finished all the same.

        Raises:
            CheckpointNotRestored: The directory holds checkpoints that this run did not restore.
            LogdirInUse: Somebody else writes there now.
            Exception: The error of a failed save, where `fatal`.
        """
        self._loop = asyncio.get_running_loop()
        if not self._store.can_save:
            self._emit("checkpoint.nothing_to_save", "the saver has no variables: there is nothing to save")
            await self._coordinator.wait_for_stop()
            return
        started = self._clock.monotonic()
        try:
            while not self._coordinator.should_stop():
                self._kick.clear()
                pause_secs = await self._save_in_turn()
                if pause_secs is None and self._save_model_secs is not None:
                    now = self._clock.monotonic()
                    pause_secs = next_boundary(started, self._save_model_secs, now) - now
                self._arm()
                await self._until_due(pause_secs)
        finally:
            self._armed_for = None

    async def _save_in_turn(self) -> float | None:
        """One save of the timer; a pause in seconds if the next one is due at another time than usual."""
        failure = self._session.failed_training_run
        if failure is not None and failure is not self._seen_failure:
            # The step that failed may have been applied in part. Either its error is on its way to stop us, and then
            # the final save decides what this state is worth; or somebody has dealt with it, and training goes on.
            self._seen_failure = failure
            return _POSTPONED_SECS
        try:
            # At a stop it is not waited for: the final save covers it, and its turn may never come.
            if not await unless_stopped(self._coordinator, asyncio.shield(self._request())):
                return None
        except SessionClosed:
            return None
        except _HOPELESS:
            raise
        except Exception:
            if self._fatal:
                raise
            return min(_FIRST_BACKOFF_SECS * 2.0 ** (self._failures - 1), _LONGEST_BACKOFF_SECS)
        return None

    async def _until_due(self, secs: float | None) -> None:
        waits: list[Coroutine[Any, Any, Any]] = [self._kick.wait(), self._coordinator.wait_for_stop()]
        if secs is not None:
            waits.append(self._clock.sleep(secs))
        await first_of(*waits)

    # -------------------------------------------------------------------------------------- by hand, at the end

    async def save(self) -> CheckpointInfo:
        """Save now: the state at this moment or later.

        Cancelling it releases the caller; the save goes on.

        Returns:
            What was published; a `kind` other than regular tells that it was refused as not finite.

        Raises:
            RuntimeError: The saver has no variables.
            SessionClosed: The session is closed.
            Exception: Why it failed.
        """
        if not self._store.can_save:
            raise RuntimeError("there is nothing to save: the saver has no variables")
        return await asyncio.shield(self._request())

    async def save_meanwhile(self, grace_secs: float) -> None:
        """Save while others train on after the stop, as the timer did before, but leave its time to the last save.

        Cancelling it ends it; a save that is under way is finished all the same.

        Args:
            grace_secs: What remains until the last save has to be done, in seconds.
        """
        deadline, pause_secs = self._clock.monotonic() + grace_secs, _FIRST_MEANWHILE_SECS
        while True:
            await self._clock.sleep(pause_secs)
            # The others may end just after its beginning, and the last save begins after its end.
            if self._clock.monotonic() + 2.5 * (self.cost_secs or 0.0) >= deadline:
                return
            with contextlib.suppress(Exception):  # told as an event
                await self.save()
            pause_secs = self._save_model_secs or _MEANWHILE_BY_STEPS_SECS

    async def final_save(self, outcome: Outcome, timeout_secs: float | None = None) -> CheckpointInfo | None:
        """The last save of a session; the timers are off from here on.

        Nothing is written where nothing has changed since the last save. After an error of a training run, and beside
        one that waits for its input and does not end, the state goes to an emergency checkpoint, which is never
        restored by itself.

        Cancelling it releases the caller; the save goes on until the session is closed.

        Args:
            outcome: How the session ended.
            timeout_secs: What remains for it, in seconds. If saves have taken longer than that, none is begun.

        Returns:
            What was published, or None.

        Raises:
            TimeoutError: It was not done in time.
            Exception: Why it failed.
        """
        deadline = None if timeout_secs is None else self._clock.monotonic() + timeout_secs
        self._ended = True
        self._armed_for = None
        self._emergency = outcome is Outcome.STEP_ERROR
        # A run that failed, or only asked for what there is not, does not tell of a step that never moves.
        self._warned_stuck |= outcome in (Outcome.ERROR, Outcome.STEP_ERROR)
        self._taker.ending(PATIENCE_SECS if timeout_secs is None else min(PATIENCE_SECS, timeout_secs / 2))
        if not self._store.can_save or self._session.closed:
            return None
        if not await self._wait_for(self._flight, deadline):
            raise TimeoutError(f"the save in flight was not done within {timeout_secs:g} s")
        # A step that failed may have been applied in part: that is a change, too.
        if self._waiting is None and not self._emergency and not self._changed():
            return None
        remaining = None if deadline is None else deadline - self._clock.monotonic()
        self.skipped = remaining is not None and self.cost_secs is not None and remaining < self.cost_secs
        if self.skipped:
            self._emit(
                "checkpoint.skipped",
                f"no final save: saves take {self.cost_secs:.1f} s and {remaining:.1f} s remain; the newest "
                f"checkpoint is {self._store.last_prefix}",
                level="warning",
                needed_secs=self.cost_secs,
                remaining_secs=remaining,
            )
            return None
        task = self._request()
        if not await self._wait_for(task, deadline):
            raise TimeoutError(f"the final save was not done within {timeout_secs:g} s")
        return task.result()

    async def drain(self, timeout_secs: float | None = None) -> bool:
        """Wait for the saves under way; before the session is closed.

        Args:
            timeout_secs: How long to wait, in seconds; None waits without limit.

        Returns:
            Whether none is left.
        """
        self._ended = True
        deadline = None if timeout_secs is None else self._clock.monotonic() + timeout_secs
        for task in tuple(self._tasks):
            if not await self._wait_for(task, deadline):
                return False
        return True

    async def _wait_for(self, task: asyncio.Task[Any] | None, deadline: float | None) -> bool:
        """Whether a task is done by a time of the injected clock."""
        if task is None or task.done():
            return True
        if deadline is None:
            await asyncio.wait({task})
            return True
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, deadline - self._clock.monotonic())))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return task.done()

    @property
    def unsaved_runs(self) -> int:
        """How many training runs the session has made since the last checkpoint."""
        return self._session.training_runs - ((self._saved and self._saved.training_runs) or 0)

    def _changed(self) -> bool:
        saved = self._saved
        if saved is None or saved.training_runs != self._session.training_runs:
            return True
        if self._session.raw.sess_str:  # on a server: others may have trained
            return True
        # A train op that does not advance the global step makes no training runs. Its work is saved all the same.
        return self._session.training_runs == 0 and self._session.statistics().writing_runs != self._runs_saved

    # -------------------------------------------------------------------------------------- one save

    def _request(self) -> asyncio.Task[CheckpointInfo]:
        """The save whose snapshot is taken next: the one that waits, or a new one."""
        if self._waiting is None:
            self._waiting = self._start(self._after(self._flight))
        return self._waiting

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work, name="checkpoint-save")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone: it has been told as an event

    async def _after(self, earlier: asyncio.Task[CheckpointInfo] | None) -> CheckpointInfo:
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        # From here on a new request gets a snapshot of its own.
        self._flight, self._waiting = asyncio.current_task(), None
        return await self._in_flight(None)

    async def _in_flight(self, snapshot: Snapshot | None) -> CheckpointInfo:
        try:
            runs = self._session.statistics().writing_runs
            if snapshot is None:
                if not self._ended:  # in the end nobody is held up any more
                    await self._session.side(self._store.reserve)
                snapshot = await self._taker.take(self._take)
            taken: Snapshot = snapshot
            self.last_step = taken.info.step
            info: CheckpointInfo = await self._session.side(lambda raw: self._store.publish(taken))
        except SessionClosed:
            raise
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self._flight = None
        self._succeeded(info, taken.info, runs)
        return info

    def _take(self, raw: Any, torn: bool = False) -> Snapshot:
        """On the device thread, between two steps; or, in the end, beside one that may be applied in part."""
        self._saved_at = monotonic()  # real time, whatever the clock: it is about how fast this machine trains
        kind = Kind.EMERGENCY if self._emergency or torn else Kind.REGULAR
        return self._store.snapshot(raw, kind=kind, training_runs=self._session.training_runs)

    def _succeeded(self, info: CheckpointInfo, taken: SnapshotInfo, runs: int) -> None:
        self._failures = 0
        self.last_error = None
        earlier, runs_earlier = self._saved, self._runs_saved
        self._saved, self._runs_saved = taken, runs
        self.cost_secs = info.stall_secs + info.write_secs
        if (
            earlier is not None
            and taken.step is not None
            and taken.step == earlier.step
            and taken.training_runs == 0
            and runs != runs_earlier
            and not self._warned_stuck
        ):
            self._warned_stuck = True
            self._emit(
                "checkpoint.step_stuck",
                f"the global step has stood at {taken.step} during {runs - runs_earlier} runs: does the train op "
                "advance it? The model is saved all the same, each time under the same name.",
                level="warning",
                step=taken.step,
                runs=runs - runs_earlier,
            )
        self._emit(
            "checkpoint.saved",
            f"saved {info.prefix} ({info.bytes} bytes, training stood still for {info.stall_secs * 1e3:.1f} ms)",
            prefix=info.prefix,
            step=info.step,
            bytes=info.bytes,
            stall_secs=info.stall_secs,
            write_secs=info.write_secs,
            checkpoint_kind=info.kind.name.lower(),
        )
        if info.kind is Kind.EMERGENCY:
            why = f"{self._taker.beside} did not end" if self._taker.beside else "a training run failed"
            self._emit(
                "checkpoint.emergency",
                f"{why}; the state as it left it was written to {info.prefix}, which is never restored by itself",
                level="warning",
                prefix=info.prefix,
                step=info.step,
            )
        if self._on_saved is not None and info.kind is Kind.REGULAR:
            self._on_saved(info)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.last_error = error
        self._emit(
            "checkpoint.failed",
            f"{'the final save failed' if self._ended else 'a save failed, training goes on'}: {describe(error)}; the "
            f"newest checkpoint is {self._store.last_prefix}",
            level="error",
            error=describe(error),
            failures=self._failures,
        )

    # -------------------------------------------------------------------------------------- by steps

    def _arm(self) -> None:
        """Have the device thread look at the step when it may be time."""
        if self._save_model_steps is None or self._ended or self._saved is None:
            return
        if self._failures:
            # It is due already, and would fail again after each step: `run` tries it, with pauses.
            return
        saved = self._saved
        runs = saved.training_runs or 0
        base = runs if saved.step is None else saved.step
        self._armed_for = base + self._save_model_steps
        # As long as nobody knows how many steps a run makes, and how long it takes: after the next one.
        self._session.set_alarm(runs + 1, self._ring)

    def _ring(self) -> None:
        """On the device thread, right after a training run: the step has one definite value here."""
        due, loop, saved = self._armed_for, self._loop, self._saved
        if due is None or saved is None or self._ended or loop is None or self._session.closed:
            return
        runs = self._session.training_runs
        step = self._store.read_step(self._session.raw)
        reached = runs if step is None else step
        made = runs - (saved.training_runs or 0)
        if reached < due:
            steps = made if step is None or saved.step is None else step - saved.step
            # Steps of a run rounded up: rather look too early than miss the step.
            left = max(1, (due - reached) // max(1, -(-steps // max(1, made))))
            self._session.set_alarm(runs + self._runs_to_look(due, left, made), self._ring)
            return
        self._armed_for = None
        if self._flight is not None or self._waiting is not None:
            # Under way by another's order; when that is done, the service looks whether more is due.
            _call_soon(loop, self._kick.set)
            return
        snapshot = self._taker.take_here(self._session.raw, self._take)
        if snapshot is not None:
            _call_soon(loop, self._hand_over, snapshot)

    def _runs_to_look(self, due: int, left: int, made: int) -> int:
        """On the device thread: after how many of the `left` runs to look again, with the memory ready in time."""
        if self._reserved_for == due or not self._store.snapshots.wants_memory:
            return left
        secs_per_run = (monotonic() - self._saved_at) / max(1, made)
        lead = 1 + int(1.5 * self._store.snapshots.reserve_secs / max(secs_per_run, 1e-6))
        if left > lead:
            return left - lead
        self._reserved_for = due
        if self._loop is not None:
            _call_soon(self._loop, self._reserve_soon)
        return left

    def _reserve_soon(self) -> None:
        if not self._ended and self._flight is None:
            self._start(self._aside(self._store.reserve))

    async def _aside(self, fn: Callable[[Any], None]) -> None:
        with contextlib.suppress(SessionClosed):
            await self._session.side(fn)

    def _hand_over(self, snapshot: Snapshot) -> None:
        """On the loop: publish what the device thread took, then let the service go on from there."""
        if self._flight is not None or self._waiting is not None or self._ended:
            # Somebody asked in the meantime, and gets a newer state. An older one is not published after it.
            self._start(self._aside(lambda raw: snapshot.discard()))
            self._kick.set()
            return
        self._flight = self._start(self._publish_taken(snapshot))

    async def _publish_taken(self, snapshot: Snapshot) -> CheckpointInfo:
        try:
            return await self._in_flight(snapshot)
        except Exception:
            self._kick.set()  # `run` takes over: it knows which errors are hopeless, and when to try again
            raise
        finally:
            self._arm()


def _call_soon(loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:  # the loop is closed
        pass
