"""When to restart a session, and after what pause: pure values and functions.

A policy is asked with facts and answers with a decision; it neither sleeps nor looks at a clock. Whoever restarts
keeps the `RecoveryHistory` that it returns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import tensorflow as tf

from asupervisor import _tf
from asupervisor.errors import SessionNotReady
from asupervisor.session.readiness import uninitialised_in

Reason = Literal["restart", "not an error to recover from", "budget used up", "would reinitialise the model"]
Origin = Literal["run", "coordinator", "hook", "step_fn", "startup"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow, with jitter so that many workers do not come back in step.

    Attributes:
        first_secs: Pause before the first restart, in seconds.
        factor: By how much each further pause is longer.
        longest_secs: Longest pause, in seconds.
        jitter: Part of the pause that is random, between 0 and 1.
    """

    first_secs: float = 0.5
    factor: float = 2.0
    longest_secs: float = 30.0
    jitter: float = 0.2

    def delay_secs(self, attempt: int, uniform: float) -> float:
        """The pause before a restart.

        Args:
            attempt: Number of the restart since the last progress, from 1.
            uniform: A random number in [0, 1).

        Returns:
            The pause, in seconds.
        """
        exponent = min(attempt - 1, 64)  # a float has no room for more, and nobody waits that long
        pause = min(self.longest_secs, self.first_secs * self.factor**exponent)
        return pause * (1.0 - self.jitter * uniform)


NO_PAUSE = Backoff(first_secs=0.0, longest_secs=0.0, jitter=0.0)


@dataclass(frozen=True, slots=True)
class RecoveryHistory:
    """What a policy remembers between two decisions.

    Attributes:
        restarts_secs: Monotonic times of the restarts that still count, in seconds.
        since_progress: Restarts since the global step last grew.
        total: Restarts ever.
        step: The global step at the last failure, or None.
    """

    restarts_secs: tuple[float, ...] = ()
    since_progress: int = 0
    total: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of a policy.

    Attributes:
        restart: Whether to restart.
        reason: Why, or why not.
        delay_secs: Pause before it, in seconds.
        history: What to ask with next time.
    """

    restart: bool
    reason: Reason
    delay_secs: float
    history: RecoveryHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """Which errors restart a session, how often, and after what pause.

    Attributes:
        max_restarts: Most restarts within the window; None for no limit.
        window_secs: Restarts longer ago do not count, in seconds; None counts all.
        backoff: The pauses.
        reset_on_progress: Whether a global step that has grown since the last restart makes the count start anew.
        errors: Errors to recover from.
        allow_reinit: Whether a session without a checkpoint directory may be restarted, which initialises the model
            again and loses what was trained.
        origins: Where such an error may come from. By default not from a user's hook or step function: those may
            raise anything, and mean it. What TensorFlow's session raises in there comes from the run.
        original: Whether those manners of the original are kept as well that are mended otherwise: a call that may
            have been applied already is run again, an error of another kind that the session's coordinator holds
            replaces the one that is recovered from, and leaving a block whose session was closed inside is an error.
    """

    max_restarts: int | None = 10
    window_secs: float | None = 3600.0
    backoff: Backoff = Backoff()
    reset_on_progress: bool = True
    errors: tuple[type[BaseException], ...] = (tf.errors.AbortedError, tf.errors.UnavailableError)
    allow_reinit: bool = False
    origins: frozenset[Origin] = frozenset(("run", "coordinator", "startup"))
    original: bool = False

    @classmethod
    def for_cluster(cls) -> RecoveryPolicy:
        """What a session of a cluster does by default: it also recovers from timeouts, and from an empty server.

        A run that takes too long has met a frozen peer; a variable that is not initialised any more was on a parameter
        server that has begun anew.
        """
        return cls(
            errors=(*cls().errors, tf.errors.DeadlineExceededError, tf.errors.FailedPreconditionError),
            backoff=Backoff(first_secs=0.1, longest_secs=5.0),
        )

    @classmethod
    def like_tensorflow(cls) -> RecoveryPolicy:
        """The original's behaviour: any origin, no limit, no pause, and the model is initialised again."""
        return cls(
            max_restarts=None,
            window_secs=None,
            backoff=NO_PAUSE,
            allow_reinit=True,
            origins=frozenset(("run", "coordinator", "hook", "step_fn", "startup")),
            original=True,
        )

    @classmethod
    def never(cls) -> RecoveryPolicy:
        """No recovery at all."""
        return cls(errors=())

    def recovers(self, error: BaseException, origin: Origin) -> bool:
        """Whether this is an error to recover from, budget aside.

        Of TensorFlow's FailedPreconditionErrors only those are that tell of a variable which is not initialised; a
        CancelledError or UnimplementedError that tells of a lost peer is one if an AbortedError is; of exception
        groups, those are in which every error is.
        """
        if isinstance(error, BaseExceptionGroup):
            return all(self.recovers(each, origin) for each in error.exceptions)
        if _tf.tells_of_a_lost_peer(error):
            return self.recovers(tf.errors.AbortedError(None, None, str(error)), origin)
        if origin not in self.origins or not isinstance(error, self.errors) or isinstance(error, SessionNotReady):
            return False
        return not isinstance(error, tf.errors.FailedPreconditionError) or bool(uninitialised_in(str(error)))

    def decide(
        self,
        error: BaseException,
        origin: Origin,
        history: RecoveryHistory,
        *,
        now_secs: float,
        step: int | None = None,
        restorable: bool = True,
        uniform: Callable[[], float] = random.random,
    ) -> Decision:
        """Whether to restart after an error.

        Args:
            error: The error.
            origin: Where it came from.
            history: What the last decision returned.
            now_secs: Monotonic time, in seconds.
            step: The global step as last seen, or None.
            restorable: Whether a restart finds the model again: there is a checkpoint directory, or it lives
                elsewhere.
            uniform: Gives random numbers in [0, 1).
        """
        if not self.recovers(error, origin):
            return Decision(False, "not an error to recover from", 0.0, history)
        if not restorable and not self.allow_reinit:
            return Decision(False, "would reinitialise the model", 0.0, history)
        counted = history.restarts_secs
        if self.window_secs is not None:
            counted = tuple(at for at in counted if now_secs - at < self.window_secs)
        since_progress = history.since_progress
        if self.reset_on_progress and _grew(history.step, step):
            counted, since_progress = (), 0
        if self.max_restarts is not None and len(counted) >= self.max_restarts:
            return Decision(False, "budget used up", 0.0, replace(history, restarts_secs=counted))
        attempt = since_progress + 1
        return Decision(
            True,
            "restart",
            self.backoff.delay_secs(attempt, uniform()),
            RecoveryHistory(
                (*counted, now_secs), attempt, history.total + 1, step if step is not None else history.step
            ),
        )


def _grew(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def recovered_message(found: str, step: int | None, past: str) -> str:
    """What is told of a recovery.

    Args:
        found: What became of the model.
        step: The global step now, if it is known.
        past: How far the model had come before, as far as that is known; or an empty string.
    """
    return f"recovered: {found}" + ("" if step is None else f", at step {step}") + (past and f" ({past})")
