"""Queue feeders: what keeps the queues of a graph filled while a session trains.

A `tf.compat.v1.train.QueueRunner` says which enqueue ops to run; here each of them becomes a service with a side
thread of its own, because an enqueue on a full queue blocks on purpose and must never hold the device thread.

How a queue ends, and who does it::

    the input ends          the last feeder that sees it runs the close op: consumers get what is left, then
                            OutOfRangeError
    a stop is requested     the closer runs the cancel op at once: feeders blocked in a full queue are free
    a feeder fails          it reports its error first, from its own thread, and only then counts as gone. So
                            whatever the closed queues make of it downstream (a consumer's "is closed and has
                            insufficient elements") comes second, and the producer's error is the one that is raised

Source: `tf.compat.v1.train.QueueRunner` and `start_queue_runners`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import tensorflow as tf

from asupervisor._timeouts import without_timeout
from asupervisor.errors import SessionClosed, describe, telling_line
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.session.session import AsyncSession

QueueRunner = tf.compat.v1.train.QueueRunner

#: What the closing of a queue or of a session does to who is inside of it.
_ECHOES = (tf.errors.CancelledError, tf.errors.OutOfRangeError)
_ECHOES_OF_CLOSE = (*_ECHOES, tf.errors.AbortedError, tf.errors.UnavailableError, SessionClosed, RuntimeError)

# How many feeders of each runner have not ended, for each session. Weak in the session; what it maps to holds the
# graph at most, which the session holds anyway.
_lock = threading.Lock()
_outstanding: weakref.WeakKeyDictionary[tf.compat.v1.Session, dict[Any, int]] = weakref.WeakKeyDictionary()


def make_feeders(
    sess: Any,
    queue_runners: Iterable[Any] | None = None,
    *,
    coordinator: Coordinator | None = None,
    emit: EventSink = log_only,
) -> list[QueueFeeder | QueueCloser]:
    """The services that feed the queues of a session's graph; none of them runs yet.

    Runners whose feeders are still outstanding in this session are passed over, also if those were never started.

    Args:
        sess: The session. A monitored session runs its own feeders, so it gets none here.
        queue_runners: The `QueueRunner`s; None for those that the graph's collection holds.
        coordinator: Ends the feeders, and is told of their errors. Without one, a feeder's error is collected in
            `exceptions_raised` of its group, and leaves its `run`.
        emit: Where events go; from any thread.

    Returns:
        One service for each enqueue op and, with a coordinator, one for each queue that cancels it at the stop.

    Raises:
        TypeError: `sess` is not a session, or something among `queue_runners` is not a QueueRunner.
        ValueError: A runner belongs to another graph.
    """
    if not isinstance(sess, AsyncSession):
        if type(sess).__name__ in ("MonitoredSession", "SingularMonitoredSession"):
            return []
        raise TypeError(
            f"sess must be the AsyncSession of a supervisor (here the counterpart of a `tf.Session`), not {sess!r} "
            f"of {type(sess)}"
        )
    if queue_runners is None:
        queue_runners = sess.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS)
    runners = list(queue_runners)
    for runner in runners:
        _check_runner(runner, sess.graph)
    services: list[QueueFeeder | QueueCloser] = []
    for runner in runners:
        services.extend(QueueFeeders(runner, sess, coordinator=coordinator, emit=emit).create())
    return services


def producers(sess: AsyncSession) -> Mapping[str, int]:
    """How many feeders live for each queue that has a QueueRunner, by the queue's name; any thread.

    A queue at 0 gets nothing from this session's feeders any more, or never did: whoever waits there for an
    element waits in vain.
    """
    counts = {runner.name: 0 for runner in sess.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS)}
    with _lock:
        for runner, count in _outstanding.get(sess.raw, {}).items():
            counts[runner.name] = counts.get(runner.name, 0) + count
    return counts


def report_starved(sess: AsyncSession, sources: Iterable[str], emit: EventSink = log_only) -> tuple[str, ...]:
    """Tell which queues stay empty because nothing feeds them.

    For whoever notices that a step waits for its input. An event ``queue.no_producer`` names each such queue.

    Args:
        sess: The session.
        sources: Names of what the step takes from: ops that dequeue, as `Touches.sources` has them, or queues.
        emit: Where the events go.

    Returns:
        Names of the queues that have a QueueRunner, but no feeder of it is alive. A queue without a QueueRunner is
        fed by the program itself, and is not among them.
    """
    counts = producers(sess)
    queues = dict.fromkeys(_queue_of(sess.graph, source) for source in sources)
    unfed = tuple(queue for queue in queues if counts.get(queue) == 0)
    for queue in unfed:
        _no_producer(emit, queue, "its feeders were never started, or have all ended")
    return unfed


def queue_name(runner: Any) -> str:
    """The full name of a runner's queue; `runner.name` may lack the scope."""
    queue = getattr(runner.queue, "queue_ref", runner.queue)
    return str(getattr(queue, "op", queue).name)


def _queue_of(graph: tf.Graph, source: str) -> str:
    try:
        op = graph.get_operation_by_name(source)
    except (KeyError, ValueError):  # inside of a function's body
        return source
    while op.type.startswith("QueueDequeue") or op.type == "Identity":
        op = op.inputs[0].op
    return str(op.name)


class QueueFeeders:
    """All feeders of one QueueRunner in one session.

    Args:
        runner: The QueueRunner.
        sess: The session.
        coordinator: See `make_feeders`.
        emit: See `make_feeders`.
    """

    def __init__(
        self,
        runner: Any,
        sess: AsyncSession,
        *,
        coordinator: Coordinator | None = None,
        emit: EventSink = log_only,
    ) -> None:
        self.runner = runner
        self.name: str = runner.name
        self.queue = queue_name(runner)
        self.session = sess
        self.coordinator = coordinator
        self.emit = emit
        self.exceptions_raised: list[BaseException] = []
        """Errors of the feeders since they were created, where there is no coordinator to take them."""

    def create(self) -> list[QueueFeeder | QueueCloser]:
        """The services: the feeders and, with a coordinator, the closer.

        Empty while feeders of this runner are outstanding in this session, whoever created them and whether or not
        they were started. They are not kept here: who runs them decides how long the session lives.
        """
        ops = self.runner.enqueue_ops
        with _lock:
            counts = _outstanding.setdefault(self.session.raw, {})
            if counts.get(self.runner, 0) > 0:
                return []
            counts[self.runner] = len(ops)
        self.exceptions_raised = []
        services: list[QueueFeeder | QueueCloser] = [QueueFeeder(self, op) for op in ops]
        if self.coordinator is not None:
            services.append(QueueCloser(self, self.coordinator))
        return services

    # ------------------------------------------------------------------ told by the feeders, on their threads

    def stopping(self) -> bool:
        """Whether feeders should end: a stop was requested, or the session is closed."""
        return self.session.closed or (self.coordinator is not None and self.coordinator.should_stop())

    def is_echo(self, error: BaseException) -> bool:
        """Whether an error only says that the stop or the close has reached the queue."""
        if self.session.closed:
            return isinstance(error, _ECHOES_OF_CLOSE)
        return self.stopping() and isinstance(error, _ECHOES)

    def failed(self, feeder: QueueFeeder, error: BaseException) -> None:
        """A feeder ends with an error. Comes before `gone`, so that nothing downstream can be faster."""
        if self.coordinator is None:
            self.exceptions_raised.append(error)
        else:
            self.coordinator.report(error, feeder.name)

    def gone(self, raw: tf.compat.v1.Session, error: BaseException | None, *, input_ended: bool) -> None:
        """A feeder has ended, for whatever reason; the last one closes the queue if its input has ended."""
        with _lock:
            counts = _outstanding.setdefault(raw, {})
            counts[self.runner] = left = counts.get(self.runner, 1) - 1
        if left > 0:
            return
        if input_ended:
            # Outside of the lock: feeders of other queues must not wait for this one's close op.
            try:
                raw.run(self.runner.close_op)
            except Exception as ignored:  # the queue may be closed, or the session
                self.emit("queue.close_failed", f"closing queue {self.queue}: {describe(ignored)}", level="debug")
            self.emit(
                "queue.closed",
                f"queue {self.queue} is closed: the input of its last feeder has ended ({_first_line(error)})",
                queue=self.queue,
            )
        elif not self.stopping() or (error is not None and not self.is_echo(error)):
            why = _first_line(error)
            _no_producer(self.emit, self.queue, f"its last feeder ended with {why}", self.stopping(), error=why)


class QueueFeeder:
    """A service that runs one enqueue op again and again.

    Args:
        group: The feeders of the same queue.
        op: The enqueue op.
    """

    def __init__(self, group: QueueFeeders, op: Any) -> None:
        self.group = group
        self.op = op
        self.name = f"QueueRunnerThread-{group.name}-{op.name}"
        self._claim = threading.Lock()
        self._begun = False

    async def run(self) -> None:
        """Feed until the input ends, a stop is requested or the session is closed.

        Cancelled, it returns at once; a thread that is blocked in a full queue leaves it when the queue is
        cancelled or the session is closed.

        Raises:
            Exception: The enqueue op's own error.
        """
        session = self.group.session
        try:
            await session.executor.side(self._feed, session.raw, label=self.name)
        except SessionClosed:
            if not session.closed:
                raise
        finally:
            # A thread that has not begun finds nothing to do: this feeder is gone all the same.
            if self._begin():
                self.group.gone(session.raw, None, input_ended=False)

    def _begin(self) -> bool:
        """Claim the one run of this feeder; of its thread and its task, the first one has it."""
        with self._claim:
            begun, self._begun = self._begun, True
        return not begun

    # ------------------------------------------------------------------ on the side thread

    def _feed(self, raw: tf.compat.v1.Session) -> None:
        if not self._begin():  # cancelled before this thread began
            return
        threading.current_thread().name = self.name
        group, closed_types = self.group, self.group.runner.queue_closed_exception_types
        error: BaseException | None = None
        input_ended = False
        try:
            with group.session.graph.as_default():
                # Compiled once: it is called for each element.
                enqueue = _enqueuer(raw, self.op)
                while not group.stopping():
                    try:
                        enqueue()
                    except closed_types as ended:
                        error, input_ended = ended, True
                        return
        except Exception as failure:
            error = failure
            if not group.is_echo(failure):
                group.failed(self, failure)
                raise
        finally:
            group.gone(raw, error, input_ended=input_ended)
            del error  # its traceback holds this frame


class QueueCloser:
    """A service that cancels a queue as soon as a stop is requested, which frees whoever is blocked in it.

    Args:
        group: The feeders of the queue.
        coordinator: Whose stop it waits for.
    """

    def __init__(self, group: QueueFeeders, coordinator: Coordinator) -> None:
        self.group = group
        self.coordinator = coordinator
        self.name = f"QueueRunnerThread-{group.name}-close_on_stop"

    async def run(self) -> None:
        """Wait for the stop, then cancel the queue.

        Cancelled, it has the queue cancelled all the same, without waiting for that: a feeder must not stay blocked
        because the services were not given any grace.
        """
        session = self.group.session
        try:
            await self.coordinator.wait_for_stop()
            await session.executor.side(self._cancel, session.raw, label=self.name)
        except asyncio.CancelledError:
            # No task of ours, and no await: the loop may be about to end.
            with suppress(RuntimeError):  # no side threads any more: closing the session frees whoever is blocked
                session.executor.device.side.submit(partial(self._cancel, session.raw), self.name)
            raise
        except SessionClosed:
            pass

    def _cancel(self, raw: tf.compat.v1.Session) -> None:
        """On a side thread: the device thread may be waiting for an element of this very queue."""
        with self.group.session.graph.as_default():
            try:
                raw.run(self.group.runner.cancel_op)
            except Exception as ignored:  # the queue may be closed, or the session
                self.group.emit(
                    "queue.cancel_failed", f"cancelling queue {self.group.queue}: {describe(ignored)}", level="debug"
                )


def _enqueuer(raw: tf.compat.v1.Session, op: Any) -> Callable[[], Any]:
    """What runs an enqueue op, for as long as the queue is full."""
    options = without_timeout(raw)
    if options is None:
        quick: Callable[[], Any] = raw.make_callable(op)
        return quick
    return partial(raw.make_callable(op, accept_options=True), options=options)


def _check_runner(runner: Any, graph: tf.Graph) -> None:
    if not isinstance(runner, QueueRunner):
        raise TypeError(f"queue_runners must hold tf.compat.v1.train.QueueRunner objects, not {runner!r}")
    for op in (*runner.enqueue_ops, runner.close_op, runner.cancel_op):
        if getattr(op, "graph", graph) is not graph:
            raise ValueError(
                f"{op.name} of the QueueRunner of {queue_name(runner)} belongs to another graph than the session. "
                "Pass the queue runners of the session's own graph."
            )


def _no_producer(emit: EventSink, queue: str, why: str, stopping: bool = False, **data: Any) -> None:
    consequence = "The stop ends those who dequeue from it." if stopping else "Who dequeues from it may wait for ever."
    emit(
        "queue.no_producer",
        f"no producer alive for queue {queue}: {why}. {consequence}",
        level="warning",
        queue=queue,
        **data,
    )


def _first_line(error: BaseException | None) -> str:
    return "a cancellation" if error is None else f"{type(error).__name__}: {telling_line(error)}"
