"""What a session asks of whoever knows the other tasks of its cluster: the seam to `asupervisor.cluster`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import tensorflow as tf

from asupervisor import _tf
from asupervisor.errors import LogdirInUse, PeersUnreachable, PortInUse, RecoveryExhausted, SessionNotReady, errors_in
from asupervisor.events import EventSink
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.readiness import uninitialised_in
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import Patience

How = Literal["adopted", "prepared"]
"""Whether the model is the one that was there before, or was restored or initialised since."""


def is_loss(error: BaseException) -> bool:
    """Whether an error is what the loss of a peer, or a frozen one, looks like to a run or to the start of a session.

    That the model is not initialised is one, too: a parameter server that came back is empty.
    """
    if isinstance(error, SessionNotReady):  # our own deadline, which is a tf.errors.DeadlineExceededError as well
        return False
    if isinstance(error, tf.errors.FailedPreconditionError):
        return bool(uninitialised_in(str(error)))
    kinds = (tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.DeadlineExceededError)
    return isinstance(error, kinds) or _tf.tells_of_a_lost_peer(error)


def is_worth_another_start(error: BaseException) -> bool:
    """Whether a task that has ended with an error may do better when it is started again: others were in its way."""
    again = (PeersUnreachable, PortInUse, LogdirInUse, SessionNotReady)
    return all(
        is_worth_another_start(each.last)
        if isinstance(each, RecoveryExhausted)
        else is_loss(each) or isinstance(each, again)
        for each in errors_in(error)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways to a session that is ready; each opens one, or raises.

    Attributes:
        adopt: With the live model as it is, now or not at all: `SessionNotReady`.
        prepare: Restored or initialised.
        wait: Once somebody else has made the model ready; the argument is the longest wait, in seconds.
    """

    adopt: Callable[[], Awaitable[AsyncSession]]
    prepare: Callable[[], Awaitable[AsyncSession]]
    wait: Callable[[float], Awaitable[AsyncSession]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What the asking session lends.

    Attributes:
        executor: Whose side threads to use.
        patience: Its waits: a requested stop ends them.
        emit: Where events go.
        logdir: The chief's log directory, or None.
        afresh: Whether the first session begins with another model than the live one.
        max_wait_secs: The longest wait for the model at the first start, in seconds.
        coordinator: Its stop without an error ends everything: no other session follows this one.
    """

    executor: DeviceExecutor
    patience: Patience
    emit: EventSink
    logdir: str | None
    afresh: bool
    max_wait_secs: float
    coordinator: Coordinator


class ClusterTask(Protocol):
    """Our own part in a cluster; see `asupervisor.cluster.Task`."""

    @property
    def role(self) -> str:
        """``"ps"``, ``"chief"``, ``"worker"`` or ``"evaluator"``."""

    @property
    def is_chief(self) -> bool:
        """Whether we are the chief."""

    @property
    def peers(self) -> Peers | None:
        """The others; None for one task alone."""


def check_trains(task: ClusterTask) -> None:
    """Tell whether a task has a session to train in.

    Raises:
        ValueError: It has not.
    """
    if task.role == "ps":
        raise ValueError("a parameter server has no session: let it `await task.join()`")
    if task.role == "evaluator":
        raise ValueError(
            "an evaluator is not in the cluster: restore the chief's checkpoints in a session of its own, without task="
        )


class Peers(Protocol):
    """The other tasks of a cluster, for the chief or a worker."""

    @property
    def target(self) -> str:
        """The master for sessions."""

    allow_reinit: bool
    """Whether a model that was lost may be initialised again."""

    @property
    def num_replicas(self) -> int:
        """How many tasks train, we among them."""

    @property
    def may_initialise(self) -> bool:
        """Whether a model that nobody has may be initialised: at the first start, or where that is allowed."""

    def configured(self, config: Any = None) -> Any:
        """A `ConfigProto` with which a session of the cluster cannot be blocked by a missing peer."""

    async def open(self, ways: Ways, around: Around) -> tuple[AsyncSession, How]:
        """Open a session as soon as the parameter servers are there and the model is ready."""

    async def watch(self) -> None:
        """Look at the others now and then; a service of the session.

        Raises:
            tf.errors.AbortedError: The model is not the one any more that the session was opened with.
        """

    async def before_last_save(self, limit_secs: float, hurried: Callable[[], bool]) -> None:
        """Wait until nobody changes the model any more, or for as long as nobody is in a hurry.

        Raises:
            tf.errors.AbortedError: A parameter server is lost, and somebody is at work.
            tf.errors.DeadlineExceededError: One is silent, so that nobody knows.
        """

    async def others_at_work(self) -> bool:
        """Whether others train the model: they did when they were last seen, and are there; the chief's to know."""

    async def leave(self, how: Literal["done", "failed", "lost"], *, saved: bool, ended_at: float) -> None:
        """The session is closed.

        Args:
            how: What the others shall think of it.
            saved: Whether its end was as it should be, last save included.
            ended_at: When its close began, by the clock's `monotonic`.
        """
