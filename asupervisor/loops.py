"""The loop around a supervised training step, which begins again after a lost session."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.errors import RecoveryExhausted, StopRequested, describe, errors_in, is_only, not_trained_again
from asupervisor.recovery import Decision, Origin, RecoveryHistory, RecoveryPolicy, recovered_message
from asupervisor.runtime.looper import check_arguments

if TYPE_CHECKING:
    from asupervisor.runtime.block import Block
    from asupervisor.services.run import SupervisedRun
    from asupervisor.session.session import AsyncSession
    from asupervisor.supervisor import Supervisor

ANY_ORIGIN: frozenset[Origin] = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))


async def train_loop(
    sv: Supervisor,
    async_fn: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    master: str = "",
    *,
    recovery: RecoveryPolicy | None = None,
) -> None:
    """Call a training step in a managed session until the stop, and begin anew where a session was lost.

    ::

        async def step(sess, batches):
            await sess.run(train_op, feed_dict=next(batches))
            if await sess.run(global_step) >= 10_000:
                sv.request_stop()

        await train_loop(sv, step, args=(batches,))

    A restart is a new managed session: restored from what the last one has saved at its end, its services started
    again. It is a loud event with a counter, comes after a pause, and its number is bounded. Where nothing has been
    saved, a new session would begin with an untrained model: then the error leaves, unless the policy allows it.
    Where a stop had ended the training before, the new session only saves, after its chief has waited for its workers;
    but if steps are lost that were not saved any more, and nobody trains them again, the error leaves.

    A stop that is requested during the pause, or while the next session starts, ends the loop; a chief's with the
    error, since the others wait for it to come back. Cancelling it cancels what it is at.

    Source: `tf.compat.v1.train.basic_train_loop`, which recovers from AbortedError only, at once and without a limit.

    Args:
        sv: The supervisor.
        async_fn: One training step, or more; called again and again as ``async_fn(sess, *args, **kwargs)``. A coroutine
            function runs on the event loop; a plain function there as well, and what it returns is awaited if it can
            be.
        args: Further positional arguments.
        kwargs: Keyword arguments.
        master: See `Supervisor.managed_session`.
        recovery: When to begin again; by default `RecoveryPolicy`'s errors (in a cluster, those of
            `RecoveryPolicy.for_cluster`), whoever raised them, the step included. In a cluster the pause after an
            error of the step's own must be shorter than the task's `chief_grace_secs`.

    Raises:
        TypeError: `async_fn` cannot be called with these arguments.
        RecoveryExhausted: The recovery policy's budget is used up.
        BaseException: What left the managed session and is not to be recovered from.
    """
    arguments, keywords = tuple(args or ()), dict(kwargs or {})
    check_arguments(async_fn, (None, *arguments), keywords)
    policy = recovery or replace(
        RecoveryPolicy() if sv.peers is None else RecoveryPolicy.for_cluster(), origins=ANY_ORIGIN
    )
    if sv.peers is not None:
        sv.peers.allow_reinit = policy.allow_reinit
    history = RecoveryHistory()
    attempt: _Attempt | None = None
    while True:
        attempt = _Attempt(sv, attempt)
        try:
            await attempt.train(master, lambda sess: async_fn(sess, *arguments, **keywords))
            return
        except StopRequested:
            if attempt.origin != "startup" or not history.total:
                raise
            attempt.give_up()
            return
        except Exception as error:
            # An error that was first outranks a cancellation that came while the block was left; but nothing begins
            # anew for that.
            if attempt.stopped or sv.signalled or attempt.cancelled:
                raise
            if attempt.owed is not None and error is attempt.owed[1]:
                raise
            decision = attempt.decide(policy, history, error)
            if not decision.restart:
                _explain(decision, error)
            history, reason = decision.history, describe(error)
            attempt.lost_by(error)
        if not await _pause(sv, decision, reason):
            attempt.give_up()
            return


class _Attempt:
    """One managed session.

    Args:
        sv: The supervisor.
        after: The one before, whose session was lost, or None. A stop that was requested since then is heeded.
    """

    def __init__(self, sv: Supervisor, after: _Attempt | None) -> None:
        self.origin: Origin = "startup"
        """Where an error came from."""
        self.stopped = False
        """Whether somebody has requested a stop, without an error, beside the error that left the session."""
        self.ended: bool = after is not None and after.ended
        """Whether a clean stop has ended the training: what is left is to wait for others, and to save."""
        self.owed: tuple[int, Exception] | None = None if after is None else after.owed
        """The step at which the training had ended and was lost before it was saved, and by what."""
        self.run: SupervisedRun | None = None if after is None else after.run
        """The parts of the session, or of the last one that there was."""
        self._lost_by: Exception | None = None if after is None else after._lost_by  # until there is a session again
        self._sv = sv
        self._first = after is None
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()

    @property
    def cancelled(self) -> bool:
        """Whether our task was cancelled since it began."""
        return self._task.cancelling() > self._cancelling

    async def train(self, master: str, step: Callable[[Any], Any]) -> None:
        """Call `step` in a session of its own until the stop."""
        sv, coord = self._sv, self._sv.coord
        block = sv.managed_session(master)
        sess = await block.enter(clear_stop=self._first)
        self.origin, self._lost_by = "coordinator", None
        asked = coord.stops_asked
        try:
            await self._begin()
            while not self.ended and not sv.should_stop():
                result = step(sess)
                if inspect.isawaitable(result):
                    await result
                else:
                    await asyncio.sleep(0)
        except BaseException as error:
            self.origin = "run" if all(map(_tf.raised_by_session, errors_in(error))) else "step_fn"
            if isinstance(error, BaseExceptionGroup):  # older Pythons' task groups leave their own cancellation behind
                self._cancelling = self._task.cancelling()
            if coord.error is None and is_only(error, coord.clean_stop_exception_types):
                self.ended, asked = True, coord.stops_asked
            else:
                self.stopped = self.stopped or (sv.should_stop() and coord.error is None)
            if not await self._leave(block, error, asked):
                raise
        else:
            if coord.error is None:
                self.ended, asked = True, coord.stops_asked
            await self._leave(block, None, asked)

    async def _begin(self) -> None:
        """Tell what became of the model.

        Raises:
            Exception: What the session before was lost by, if nobody would train again what is lost with it.
        """
        before, self.run = self.run, self._sv.last_run
        assert self.run is not None
        if before is None:
            return
        step = self.run.start_step
        self._sv.coord.emit(
            "session.recovered",
            recovered_message(self.run.found, step, before.past),
            level="warning",
            restored=self.run.restored_from is not None,
            step=step,
            seen_step=before.last_step,
        )
        if self.owed is None or not self._sv.is_chief:
            return
        if not await self.run.goes_on():
            raise not_trained_again(self.owed[1])
        self.run.owed = self.owed

    async def _leave(self, block: Block[AsyncSession], error: BaseException | None, asked: int) -> bool:
        """Leave the session. Once there is an error, the coordinator tells of no stop beside it, but counts them."""
        try:
            return await block.exit(error)
        finally:
            self.stopped = self.stopped or self._sv.coord.stops_asked != asked
            del block, error

    def lost_by(self, error: Exception) -> None:
        """The session was lost, and is to be replaced."""
        self._lost_by = error
        if self.ended and self.origin != "startup":
            assert self.run is not None
            if not self.run.settled:
                step = max(self.run.trained_to, self.run.last_step or 0)
                self.owed = step if self.owed is None else max(step, self.owed[0]), error

    def give_up(self) -> None:
        """A stop has come before there was a session again.

        Raises:
            Exception: What the last one was lost by, if we are the chief: this is no end of the job.
        """
        error, self._lost_by = self._lost_by, None
        try:
            if error is not None and self._sv.peers is not None and self._sv.is_chief:
                raise error
        finally:
            del error

    def decide(self, policy: RecoveryPolicy, history: RecoveryHistory, error: Exception) -> Decision:
        """Whether to begin again after an error that left the session."""
        sv = self._sv
        status = sv.status()
        return policy.decide(
            error,
            self.origin,
            history,
            now_secs=asyncio.get_running_loop().time(),
            step=status.global_step,
            restorable=self.origin == "startup"
            or not sv.is_chief
            or sv.peers is not None
            or status.last_checkpoint is not None
            or not sv.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES),
        )


def _explain(decision: Decision, error: Exception) -> None:
    """Raise the error that is not recovered from, with the reason where it is not plain."""
    if decision.reason == "budget used up":
        raise RecoveryExhausted(decision.history.total, error) from error
    if decision.reason == "would reinitialise the model":
        error.add_note(
            "asupervisor: not recovered from, since nothing has been saved: a new session would begin with an untrained"
            " model. RecoveryPolicy(allow_reinit=True) allows it"
        )
    raise error


async def _pause(sv: Supervisor, decision: Decision, reason: str) -> bool:
    """Wait before the next session; False where a stop was requested meanwhile."""
    sv.coord.clear_stop()  # the stop of the session that has ended; from here on, it is a new one
    sv.coord.emit(
        "session.recovering",
        f"recovery {decision.history.total} in {decision.delay_secs:.2f} s, because of {reason}",
        level="warning",
        error=reason,
        restarts=decision.history.total,
        delay_secs=decision.delay_secs,
    )
    return not await sv.coord.wait_for_stop(decision.delay_secs)
