"""Retention policies: facts in, reasons out."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from asupervisor.checkpoint.retention import (
    AnyOf,
    EveryNHours,
    Facts,
    KeepAll,
    LatestN,
    Retention,
    retention_of,
    to_delete,
)

HOUR = 3600.0


def facts(*hours: float) -> list[Facts]:
    return [Facts(f"c{index}", index, hour * HOUR) for index, hour in enumerate(hours)]


def gone(policy: Retention, *hours: float) -> list[str]:
    return [name for name, _ in to_delete(policy, facts(*hours), 0.0)]


def test_latest() -> None:
    assert gone(LatestN(2), 1, 2, 3, 4) == ["c0", "c1"]
    assert gone(LatestN(5), 1, 2) == []
    assert gone(LatestN(1), 1, 2, 3) == ["c0", "c1"]


def test_keep_all() -> None:
    assert gone(KeepAll(), *range(100)) == []


def test_every_n_hours_counts_from_the_beginning() -> None:
    """As the Saver does: the first one after each interval is spared, the others go."""
    policy = AnyOf((LatestN(1), EveryNHours(2)))
    assert gone(policy, 0, 1, 2, 3, 4, 4.5, 5) == ["c0", "c1", "c3", "c5"]


def test_every_n_hours_finds_the_same_ones_again() -> None:
    policy = AnyOf((LatestN(1), EveryNHours(2)))
    left = facts(*[n / 2 for n in range(20)])
    once = to_delete(policy, left, 0.0)
    left = [fact for fact in left if fact.name not in dict(once)]
    assert to_delete(policy, left, 0.0) == []


@given(st.lists(st.floats(0, 1000), max_size=30).map(sorted), st.integers(1, 10), st.floats(0.1, 100))
def test_rules_that_always_hold(hours: list[float], n: int, every: float) -> None:
    policy = AnyOf((LatestN(n), EveryNHours(every)))
    all_facts = facts(*hours)
    deleted = dict(to_delete(policy, all_facts, 0.0))
    assert not {fact.name for fact in all_facts[-n:]} & deleted.keys()
    # Step by step, as they are saved, comes to the same as all at once.
    kept: list[Facts] = []
    for fact in all_facts:
        kept.append(fact)
        doomed = dict(to_delete(policy, kept, 0.0))
        kept = [fact for fact in kept if fact.name not in doomed]
    assert [fact.name for fact in kept] == [fact.name for fact in all_facts if fact.name not in deleted]
    lower = AnyOf((LatestN(1), EveryNHours(every)))
    assert deleted.keys() <= dict(to_delete(lower, all_facts, 0.0)).keys()


def test_the_newest_stays_whatever_the_policy_says() -> None:
    class Nothing:
        def keep(self, facts: Any, began_at_secs: float) -> list[str | None]:
            return [None] * len(facts)

    assert gone(Nothing(), 1, 2, 3) == ["c0", "c1"]


def test_what_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="KeepAll"):
        LatestN(0)
    with pytest.raises(ValueError, match="greater than zero"):
        EveryNHours(0)


def test_what_a_saver_asks_for(variables: str) -> None:
    with tf.Graph().as_default():
        tf.compat.v1.get_variable("v", [1])
        saver = tf.compat.v1.train.Saver
        assert retention_of(saver(max_to_keep=3, keep_checkpoint_every_n_hours=2)) == AnyOf(
            (LatestN(3), EveryNHours(2.0))
        )
        assert retention_of(saver(max_to_keep=0)) == KeepAll()
        assert retention_of(saver(max_to_keep=None)) == KeepAll()
    assert retention_of(object()) == LatestN(5)
