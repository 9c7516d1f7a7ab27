"""Which checkpoints stay: small pure policies, computed from what is on disk.

A policy gets the facts of all regular checkpoints of a directory, oldest first, and gives for each one the reason
to keep it, or None. Nothing is remembered between two calls, so a changed policy applies at the next save, and a
restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HOUR_SECS = 3600.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy may judge by.

    Attributes:
        name: File name of the prefix.
        step: The global step, or None.
        time_secs: Wall-clock time of publication, seconds since the epoch.
    """

    name: str
    step: int | None
    time_secs: float


class Retention(Protocol):
    """What a retention policy is."""

    def keep(self, facts: Sequence[Facts], began_at_secs: float) -> Sequence[str | None]:
        """The reason to keep each checkpoint, or None where it may go.

        Args:
            facts: All checkpoints, oldest first.
            began_at_secs: When the first run in this directory published something, seconds since the epoch.
        """


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Nothing is ever deleted: TensorFlow's `max_to_keep` of None or 0."""

    def keep(self, facts: Sequence[Facts], began_at_secs: float) -> Sequence[str | None]:
        """See `Retention.keep`."""
        return ["everything is kept"] * len(facts)


@dataclass(frozen=True, slots=True)
class LatestN:
    """The newest ones stay: TensorFlow's `max_to_keep`.

    Args:
        n: How many, at least one.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"LatestN keeps at least one checkpoint, not {self.n}; KeepAll() keeps everything")

    def keep(self, facts: Sequence[Facts], began_at_secs: float) -> Sequence[str | None]:
        """See `Retention.keep`."""
        old = max(0, len(facts) - self.n)
        return [None] * old + [f"one of the latest {self.n}"] * (len(facts) - old)


@dataclass(frozen=True, slots=True)
class EveryNHours:
    """One checkpoint for each interval stays: TensorFlow's `keep_checkpoint_every_n_hours`.

    The first one that is at least `hours` younger than the last one that stayed, counted from the beginning of
    the directory. As those that stay remain on disk, each call finds the same ones again.

    Args:
        hours: The interval, in hours, greater than zero.
    """

    hours: float

    def __post_init__(self) -> None:
        if not self.hours > 0:
            raise ValueError(f"EveryNHours needs an interval greater than zero, not {self.hours}")

    def keep(self, facts: Sequence[Facts], began_at_secs: float) -> Sequence[str | None]:
        """See `Retention.keep`."""
        last_secs = began_at_secs
        reasons: list[str | None] = []
        for fact in facts:
            if fact.time_secs - last_secs >= self.hours * HOUR_SECS:
                reasons.append(f"one for every {self.hours:g} hours")
                last_secs = fact.time_secs
            else:
                reasons.append(None)
        return reasons


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What one of several policies keeps, stays.

    Args:
        policies: The policies; the first one with a reason names it.
    """

    policies: tuple[Retention, ...]

    def keep(self, facts: Sequence[Facts], began_at_secs: float) -> Sequence[str | None]:
        """See `Retention.keep`."""
        verdicts = [policy.keep(facts, began_at_secs) for policy in self.policies]
        return [next((reason for reason in reasons if reason), None) for reasons in zip(*verdicts, strict=True)]


def retention_of(saver: Any) -> Retention:
    """The policy that a `tf.compat.v1.train.Saver` asks for by its own arguments.

    Args:
        saver: Any saver object; one without a `saver_def` gets TensorFlow's default of five.
    """
    saver_def = getattr(saver, "saver_def", None)
    if saver_def is None:
        return LatestN(5)
    if saver_def.max_to_keep <= 0:
        return KeepAll()
    policies: list[Retention] = [LatestN(saver_def.max_to_keep)]
    if saver_def.keep_checkpoint_every_n_hours > 0:
        policies.append(EveryNHours(saver_def.keep_checkpoint_every_n_hours))
    return AnyOf(tuple(policies))


def to_delete(policy: Retention, facts: Sequence[Facts], began_at_secs: float) -> list[tuple[str, str]]:
    """Which checkpoints go, and why; the newest one never does.

    Args:
        policy: The policy.
        facts: All checkpoints, oldest first.
        began_at_secs: See `Retention.keep`.

    Returns:
        Names with reasons, oldest first.
    """
    reasons = policy.keep(facts, began_at_secs)
    return [
        (fact.name, f"not kept by {policy!r}")
        for fact, reason in zip(facts[:-1], reasons[:-1], strict=True)
        if reason is None
    ]
