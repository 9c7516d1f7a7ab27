"""RecoveryPolicy: pure, so no test here sleeps or runs TensorFlow's sessions."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tensorflow as tf

from asupervisor import recovery
from asupervisor.recovery import NO_PAUSE, Backoff, RecoveryHistory, RecoveryPolicy
from asupervisor.services.peers import is_loss

ABORTED = tf.errors.AbortedError(None, None, "lost")
OTHER = ValueError("no")
ORIGINS: tuple[recovery.Origin, ...] = ("run", "coordinator", "hook", "step_fn", "startup")


def decide(policy: RecoveryPolicy, history: RecoveryHistory | None = None, error: Any = ABORTED, **facts: Any) -> Any:
    origin = facts.pop("origin", "run")
    facts.setdefault("now_secs", 0.0)
    return policy.decide(error, origin, history or RecoveryHistory(), uniform=lambda: 0.5, **facts)


def test_it_neither_sleeps_nor_looks_at_a_clock() -> None:
    source = inspect.getsource(recovery)
    assert not any(f"import {name}" in source for name in ("time", "asyncio", "anyio", "datetime"))


@pytest.mark.parametrize("kind", [tf.errors.AbortedError, tf.errors.UnavailableError])
@pytest.mark.parametrize("origin", ["run", "coordinator", "startup"])
def test_lost_sessions_are_recovered_from(kind: Any, origin: Any) -> None:
    decision = decide(RecoveryPolicy(), error=kind(None, None, ""), origin=origin)
    assert decision.restart
    assert decision.reason == "restart"
    assert decision.history.total == 1


@pytest.mark.parametrize(
    "error", [OTHER, tf.errors.OutOfRangeError(None, None, ""), tf.errors.CancelledError(None, None, "")]
)
def test_other_errors_are_not(error: Exception) -> None:
    decision = decide(RecoveryPolicy(), error=error)
    assert not decision.restart
    assert decision.history == RecoveryHistory()


def test_a_group_is_recovered_from_where_each_of_its_errors_is() -> None:
    group = ExceptionGroup("of tasks", [ABORTED, ExceptionGroup("of others", [ABORTED])])
    assert decide(RecoveryPolicy(), error=group).restart
    assert not decide(RecoveryPolicy(), error=ExceptionGroup("of tasks", [ABORTED, OTHER])).restart


@pytest.mark.parametrize(
    ("kind", "words", "others"),
    [
        (tf.errors.CancelledError, "RecvFromRemoteAsync is cancelled.", "Enqueue operation was cancelled"),
        (tf.errors.UnimplementedError, "No message returned for unary request", "no such cast"),
    ],
)
def test_a_lost_peer_that_is_told_as_something_else(kind: Any, words: str, others: str) -> None:
    lost, other = kind(None, None, words), kind(None, None, others)
    assert decide(RecoveryPolicy.for_cluster(), error=lost).restart
    assert not decide(RecoveryPolicy.never(), error=lost).restart
    assert not decide(RecoveryPolicy.for_cluster(), error=other).restart
    assert is_loss(lost)
    assert not is_loss(other)


@pytest.mark.parametrize("origin", ["hook", "step_fn"])
def test_what_a_user_raises_is_meant(origin: Any) -> None:
    assert not decide(RecoveryPolicy(), origin=origin).restart
    assert decide(RecoveryPolicy.like_tensorflow(), origin=origin).restart


def test_errors_can_be_chosen() -> None:
    policy = RecoveryPolicy(errors=(ValueError,))
    assert decide(policy, error=OTHER).restart
    assert not decide(policy).restart
    assert not decide(RecoveryPolicy.never()).restart


def test_a_model_is_not_initialised_again_silently() -> None:
    refused = decide(RecoveryPolicy(), restorable=False)
    assert not refused.restart
    assert refused.reason == "would reinitialise the model"
    assert decide(RecoveryPolicy(allow_reinit=True), restorable=False).restart


def test_the_budget() -> None:
    policy, history = RecoveryPolicy(max_restarts=3, window_secs=None), RecoveryHistory()
    for number in range(3):
        decision = decide(policy, history, now_secs=float(number))
        assert decision.restart
        history = decision.history
    decision = decide(policy, history, now_secs=1e9)
    assert not decision.restart
    assert decision.reason == "budget used up"
    assert decision.history.total == 3


def test_no_restart_at_all() -> None:
    assert decide(RecoveryPolicy(max_restarts=0)).reason == "budget used up"


def test_the_window_forgets() -> None:
    policy, history = RecoveryPolicy(max_restarts=2, window_secs=100.0), RecoveryHistory()
    for now, restart in ((0.0, True), (50.0, True), (99.0, False), (100.0, True), (120.0, False), (150.0, True)):
        decision = decide(policy, history, now_secs=now)
        assert decision.restart is restart, now
        history = decision.history
    assert history.total == 4


def test_progress_resets_count_and_pause() -> None:
    policy = RecoveryPolicy(max_restarts=2, backoff=Backoff(1.0, 10.0, 1000.0, jitter=0.0))
    history, pauses = RecoveryHistory(), []
    for step in (5, 5, 9, 9, 9):
        decision = decide(policy, history, step=step)
        history = decision.history
        pauses.append(decision.delay_secs if decision.restart else None)
    assert pauses == [1.0, 10.0, 1.0, 10.0, None]


def test_without_reset_progress_counts_for_nothing() -> None:
    policy, history = RecoveryPolicy(max_restarts=2, reset_on_progress=False), RecoveryHistory()
    outcomes = []
    for step in (1, 2, 3):
        decision = decide(policy, history, step=step)
        history = decision.history
        outcomes.append(decision.restart)
    assert outcomes == [True, True, False]


def test_an_unknown_step_is_no_progress_and_is_remembered() -> None:
    policy, history = RecoveryPolicy(max_restarts=10), RecoveryHistory()
    for step, since in ((7, 1), (None, 2), (7, 3), (8, 1)):
        history = decide(policy, history, step=step).history
        assert history.since_progress == since
    assert history.step == 8


def test_backoff() -> None:
    backoff = Backoff(first_secs=1.0, factor=2.0, longest_secs=5.0, jitter=0.0)
    assert [backoff.delay_secs(attempt, 0.9) for attempt in (1, 2, 3, 4, 5, 10**6)] == [1, 2, 4, 5, 5, 5]
    jittered = Backoff(first_secs=1.0, factor=2.0, longest_secs=5.0, jitter=0.5)
    assert jittered.delay_secs(1, 0.0) == 1.0
    assert jittered.delay_secs(1, 1.0) == 0.5
    assert NO_PAUSE.delay_secs(7, 0.3) == 0.0


def test_like_tensorflow() -> None:
    policy, history = RecoveryPolicy.like_tensorflow(), RecoveryHistory()
    for number in range(200):
        decision = decide(policy, history, origin=ORIGINS[number % 5], restorable=False)
        assert decision.restart
        assert decision.delay_secs == 0.0
        history = decision.history
    assert history.total == 200


def test_values_are_frozen_and_comparable() -> None:
    assert RecoveryPolicy() == RecoveryPolicy()
    assert hash(RecoveryPolicy()) == hash(RecoveryPolicy())
    with pytest.raises(dataclasses.FrozenInstanceError):
        RecoveryPolicy().max_restarts = 3  # type: ignore[misc]


@hypothesis.given(
    st.lists(
        st.tuples(st.floats(0, 1000), st.one_of(st.none(), st.integers(0, 20)), st.sampled_from(ORIGINS)), max_size=40
    ),
    st.integers(0, 5),
    st.floats(1, 500),
    st.floats(0, 1, exclude_max=True),
)
def test_what_always_holds(
    failures: list[tuple[float, int | None, recovery.Origin]], most: int, window: float, uniform: float
) -> None:
    """Never more restarts within a window than allowed without progress; pauses within their bounds; history grows."""
    policy = RecoveryPolicy(max_restarts=most, window_secs=window, reset_on_progress=False)
    history, at, now = RecoveryHistory(), [], 0.0
    for pause, step, origin in failures:
        now += pause
        decision = policy.decide(ABORTED, origin, history, now_secs=now, step=step, uniform=lambda: uniform)
        assert decision.history.total - history.total == decision.restart
        if decision.restart:
            at.append(now)
            assert 0 <= decision.delay_secs <= policy.backoff.longest_secs
            assert sum(now - earlier < window for earlier in at) <= most
        history = decision.history
