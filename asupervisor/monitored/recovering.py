"""The incarnations of one monitored session, one after another: when one is replaced, and what its callers get.

A recovery is a service of the monitored session's host: whoever waits for it may be cancelled, and the others get their
session all the same. All calls that fail with one session share one recovery. Everything runs on the event loop.

::

    a run fails ── is it to be recovered from? ── is there a model to find again? ── old session closed ── pause
                   no: the error leaves           no: the error leaves, and         ── new session ── hooks told
                                                  the session lives on              ── the call is run again
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.clock import Clock
from asupervisor.errors import RecoveryExhausted, SessionClosed, StepOutcomeUnknown, StopRequested, describe
from asupervisor.events import EventSink
from asupervisor.hooks.chain import raised_by_a_hook
from asupervisor.hooks.protocol import HookOutcome
from asupervisor.monitored.incarnation import Blueprint, Incarnation
from asupervisor.recovery import Decision, Origin, RecoveryHistory, RecoveryPolicy, recovered_message
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host

GIVEN_UP = RuntimeError("the session was replaced by another one")
"""Stands for why a session was given up, once that is no matter any more: it has no traceback, and is never raised."""


class _Recovery:
    """One replacement of one incarnation, and how it went."""

    def __init__(self, failed: Incarnation) -> None:
        self.failed = failed
        self.done = asyncio.get_running_loop().create_future()
        self.error: BaseException | None = None


class Incarnations:
    """Makes the first session, and the next one whenever one is lost.

    Args:
        name: The monitored session, for messages.
        policy: When to recover.
        coordinator: The stop state of the monitored session.
        clock: Where the time comes from.
        emit: Told of every recovery.
    """

    def __init__(
        self, name: str, policy: RecoveryPolicy, coordinator: Coordinator, clock: Clock, emit: EventSink
    ) -> None:
        self.policy = policy
        self.history = RecoveryHistory()
        self.current: Incarnation | None = None
        self.paused = False
        self._name = name
        self._coord = coordinator
        self._clock = clock
        self._emit = emit
        self._blueprint: Blueprint | None = None
        self._host: Host[Any] | None = None
        self._recovery: _Recovery | None = None
        self._leaving = False

    # ------------------------------------------------------------------ start and end

    async def begin(self, blueprint: Blueprint, host: Host[Any]) -> None:
        """Make the first session.

        Args:
            blueprint: What each of them is made of.
            host: Whose services recoveries are.
        """
        self._blueprint, self._host = blueprint, host
        self._coord.add_stop_callback(self._pass_stop_on)
        await self._create(0)

    def leave(self) -> None:
        """The body has ended by itself: what it has left in queues is the hooks' until their last call."""
        self._leaving = True

    def _pass_stop_on(self) -> None:
        """The stop of the monitored session; a loop callback."""
        if self._leaving and self._recovery is None:
            return
        if self.current is not None:
            self.current.coordinator.request_stop()

    async def end(self, outcome: HookOutcome | None, *, lost: bool = False, hurry: bool = False) -> None:
        """End the session that there is; see `Incarnation.end`."""
        if self.current is not None:
            await self.current.end(outcome=outcome, lost=lost, hurry=hurry)

    def forget(self) -> None:
        """Everything has ended: refer to nothing any more."""
        if self.current is not None and self.current.loss is not None:
            self.current.loss = GIVEN_UP
        self.current = self._blueprint = self._host = self._recovery = None

    # ------------------------------------------------------------------ the session to use

    def should_stop(self) -> bool:
        """Whether the session asks for a stop that is no reason to recover; any thread."""
        current = self.current
        if current is None or current.ending or not current.coordinator.should_stop():
            return False
        error = current.coordinator.error
        return error is None or not self._may_recover(error)

    def _may_recover(self, error: BaseException) -> bool:
        """Whether an error that the session's coordinator holds may be recovered from, as far as is known at once."""
        loses = self._blueprint is not None and self._blueprint.on_restart == "initialises"
        return self.policy.recovers(error, "coordinator") and (not loses or self.policy.allow_reinit)

    async def get(self) -> Incarnation:
        """The session to use; another one, where that has become necessary since.

        Raises:
            SessionClosed: There is none any more.
            StopRequested: It was lost, and a stop was requested.
            BaseException: Why it cannot be recovered.
        """
        if self._recovery is not None:
            await self._wait_for(self._recovery)
        current = self.current
        if current is None or self._host is None:
            raise SessionClosed(self._name)
        error = current.loss or current.coordinator.error
        recovers = error is not None and (current.loss is not None or self._may_recover(error))
        if error is not None and recovers and not self._coord.should_stop():
            await self._replace(current, error, "coordinator", error)
            assert self.current is not None
            current = self.current
        if not current.usable:
            if current.loss is not None and self._coord.should_stop():
                raise StopRequested("a run on a lost session")  # there is none, and will be none
            raise SessionClosed(self._name)
        return current

    async def recover(
        self,
        failed: Incarnation,
        error: Exception,
        origin: Origin = "run",
        *,
        harmless: Callable[[Incarnation], Awaitable[bool]] | None = None,
    ) -> None:
        """Replace a session after an error of a call, or raise the error.

        Args:
            failed: The session of the call.
            error: What the call raised.
            origin: Where it came from, unless a hook or TensorFlow's session turns out to have raised it.
            harmless: Whether the call can be run a second time, whatever became of the first.

        Raises:
            Exception: `error`, where it is not to be recovered from; or why the recovery failed.
            RecoveryExhausted: The budget is used up.
            StepOutcomeUnknown: The call may have been applied to the state that was found.
            StopRequested: A stop was requested during the recovery.
        """
        try:
            if failed.loss is not None and self._echoes(error):
                reason: BaseException | None = failed.loss  # it was taken away from under the call
            else:
                cause = failed.coordinator.error
                if raised_by_a_hook(error):
                    origin = "hook"
                elif _tf.raised_by_session(error):
                    origin = "run"
                if cause is not None and self.policy.recovers(cause, "coordinator"):
                    reason, origin = cause, "coordinator"  # the call failed because of it
                else:
                    reason = error
                    if self.policy.original and cause is not None and self.policy.recovers(error, origin):
                        raise cause
                if self._host is None or self._coord.should_stop() or not self.policy.recovers(reason, origin):
                    raise error
            before = failed.last_step
            assert reason is not None
            await self._replace(failed, reason, origin, error)
            current, blueprint = self.current, self._blueprint
            if current is None or blueprint is None:
                raise error
            adopted = current.adopted and not self.policy.original
            if adopted and (harmless is None or not await harmless(current)):
                raise StepOutcomeUnknown(before, await current.read_step()) from error
        finally:
            # What leaves has a traceback that leads here.
            reason = cause = None
            del error, harmless, failed, self

    def _echoes(self, error: BaseException) -> bool:
        kinds = (SessionClosed, tf.errors.CancelledError, *self.policy.errors)
        return isinstance(error, kinds) or _tf.tells_of_a_lost_peer(error)

    # ------------------------------------------------------------------ a recovery

    async def _replace(self, failed: Incarnation, reason: BaseException, origin: Origin, error: BaseException) -> None:
        """See to it that `failed` is replaced, and wait for that."""
        recovery = self._recovery
        if recovery is None:
            if self.current is not failed:
                return  # it has been replaced since
            if self._host is None:
                raise SessionClosed(self._name)
            recovery = self._recovery = _Recovery(failed)
            try:
                self._host.spawn("recovery", self._recover, recovery, reason, origin, error, critical=False)
            except RuntimeError:  # the end has begun
                self._recovery = None
                raise error from None
        try:
            await self._wait_for(recovery)
        finally:
            del recovery, reason, error, self

    async def _wait_for(self, recovery: _Recovery) -> None:
        await asyncio.wait([recovery.done])
        if recovery.error is not None:
            try:
                raise recovery.error
            finally:
                del recovery, self

    async def _recover(self, recovery: _Recovery, reason: BaseException, origin: Origin, error: BaseException) -> None:
        """The service."""
        failed = recovery.failed
        owed, begun = failed.owed, self._clock.monotonic()
        try:
            decision = await self._decide(failed, reason, origin, error, again=failed.loss is not None)
            failed.loss = reason
            await failed.end(lost=True)
            await self._pause(decision, reason, origin)
            current = await self._create(failed.number + 1)
            current.take_over(failed, owed, reason)
            failed.loss = GIVEN_UP
        except Exception as problem:
            recovery.error = problem
            if failed.awaited:  # also if nobody who has asked is left; and a stop beside it is no clean end
                self._coord.record(reason if isinstance(problem, StopRequested) else problem, "a service")
        except BaseException:
            recovery.error = StopRequested("the recovery of a session")
            if failed.awaited:
                self._coord.record(reason, "a service")
            raise
        else:
            self._emit(
                "session.recovered",
                recovered_message(current.found, current.last_step, failed.past),
                level="warning",
                restored=current.restored,
                step=current.last_step,
                seen_step=failed.last_step,
                secs=self._clock.monotonic() - begun,
                restarts=self.history.total,
            )
        finally:
            self._recovery = None
            recovery.done.set_result(None)
            del recovery, failed, reason, error, owed

    async def _decide(
        self,
        failed: Incarnation,
        reason: BaseException,
        origin: Origin,
        error: BaseException,
        *,
        again: bool = False,
    ) -> Decision:
        """The policy's decision.

        Args:
            failed: The session that failed.
            reason: Why it failed.
            origin: Where that came from.
            error: What to raise.
            again: An earlier attempt to replace it has failed, and somebody asks for another one.

        Raises:
            BaseException: `error`: it is not recovered from.
            RecoveryExhausted: The budget is used up.
        """
        decision = self.policy.decide(
            reason,
            origin,
            self.history,
            now_secs=self._clock.monotonic(),
            step=failed.last_step,
            restorable=await self._finds_the_model_again(failed),
        )
        if again and decision.reason == "not an error to recover from":
            decision = Decision(True, "restart", self.policy.backoff.delay_secs(1, 0.0), self.history)
        self.history = decision.history
        if decision.restart:
            return decision
        try:
            if decision.reason == "budget used up":
                raise RecoveryExhausted(self.history.total, reason) from reason
            if decision.reason == "would reinitialise the model":
                _note(
                    error,
                    "asupervisor: not recovered from, since there is no checkpoint to restore: that would initialise "
                    "the model again. RecoveryPolicy(allow_reinit=True) allows it",
                )
            raise error
        finally:
            del failed, reason, error, self

    async def _finds_the_model_again(self, failed: Incarnation) -> bool:
        """Whether a restart finds what was trained: a checkpoint, or the live model."""
        blueprint = self._blueprint
        assert blueprint is not None
        if failed.number == 0 and failed.loss is not None:  # the very first start: there is nothing to lose
            return True
        if blueprint.on_restart == "restores" and blueprint.prepared is not None:
            return await blueprint.around.executor.side(blueprint.prepared.can_restore, label="look for a checkpoint")
        return blueprint.on_restart != "initialises"

    async def _pause(self, decision: Decision, reason: BaseException, origin: Origin) -> None:
        self._emit(
            "session.recovering",
            f"recovery {self.history.total} in {decision.delay_secs:.2f} s, because of {describe(reason)}",
            level="warning",
            error=describe(reason),
            origin=origin,
            restarts=self.history.total,
            delay_secs=decision.delay_secs,
        )
        sleep = asyncio.ensure_future(self._clock.sleep(decision.delay_secs))
        stopped = self._coord.stop_waiter()
        try:
            await asyncio.wait([sleep, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._coord.discard_waiter(stopped)
            sleep.cancel()
            await asyncio.wait([sleep])
        if self._coord.should_stop():
            raise StopRequested("the recovery of a session") from reason

    async def _create(self, number: int) -> Incarnation:
        """Make a session; what fails on the way may be recovered from, too."""
        blueprint = self._blueprint
        assert blueprint is not None
        while True:
            if self._coord.should_stop():
                raise StopRequested("the recovery of a session" if number else "the start of a session")
            incarnation = self.current = Incarnation(number, blueprint)
            try:
                await incarnation.start()
                self._check_not_reset(incarnation)
            except StopRequested:
                incarnation.loss = incarnation.loss or StopRequested("the start of a session")
                raise
            except Exception as error:
                incarnation.loss = error
                await incarnation.end(lost=True)
                # What a run of TensorFlow's session raises in a hook is a loss like any other.
                of_a_hook = raised_by_a_hook(error) and not _tf.raised_by_session(error)
                origin: Origin = "hook" if of_a_hook else "startup"
                decision = await self._decide(incarnation, error, origin, error)
                await self._pause(decision, error, origin)
                number += bool(number)
            else:
                incarnation.coordinator.add_stop_callback(self._on_session_stop)
                if incarnation.awaited and self._host is not None:
                    self._host.spawn(
                        "recovery for others", self._recover_for_others, incarnation, critical=False, on_stop="cancel"
                    )
                if self.paused:
                    incarnation.plain.pause()
                return incarnation

    def _check_not_reset(self, incarnation: Incarnation) -> None:
        """Raise where a checkpoint that was there a moment ago was not restored.

        Raises:
            RuntimeError: The model was initialised, and that was not allowed.
        """
        blueprint = self._blueprint
        assert blueprint is not None
        must_restore = incarnation.number > 0 and blueprint.on_restart == "restores" and not self.policy.allow_reinit
        if must_restore and blueprint.prepared is not None and not incarnation.restored:
            raise RuntimeError(
                f"the recovery of {self._name} found no checkpoint to restore: the model would begin anew. "
                "RecoveryPolicy(allow_reinit=True) allows it"
            )

    def _on_session_stop(self) -> None:
        """The session's own coordinator stopped; a loop callback. What is no reason to recover stops everything."""
        current = self.current
        if current is None or current.ending or self._coord.should_stop():
            return
        error = current.coordinator.error
        if error is None:
            if self._host is not None and self._host.state != "starting":  # see `told_to_stop`
                self._coord.request_stop()
        elif not self._may_recover(error):
            self._coord.record(error, "a service")

    async def _recover_for_others(self, incarnation: Incarnation) -> None:
        """Replace a session that is lost, even if nobody runs anything in it: others wait for that; a service."""
        try:
            await incarnation.coordinator.wait_for_stop()
            error = incarnation.coordinator.error
            if error is not None and not incarnation.ending and self._may_recover(error):
                with contextlib.suppress(Exception):  # told by the recovery
                    await self._replace(incarnation, error, "coordinator", error)
        finally:
            error = None
            del incarnation

    def told_to_stop(self) -> None:
        """The start has ended: pass a stop on that a hook has asked for meanwhile, which must not abort the start."""
        if self.should_stop():
            self._coord.request_stop()


def _note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        try:
            error.add_note(note)
        except Exception:  # an exception that is frozen
            pass
