"""`SyncReplicasOptimizer` at work: its local state, its tokens, and the chief's aggregation of gradients.

The chief's feeder takes gradients from the accumulators, applies them, and hands out the tokens that let the replicas
begin their next step. It is a feeder like those of `feeders.py`, with three differences: it may wait for gradients for
as long as it takes, whatever the session's timeout; after a stop nobody waits for it, since no queue's end can free it
(the session's close does); and it ends the token queue only where the job is over, so that a chief that is lost, or
will be back, leaves its workers waiting instead of sending them home.

Source: `tf.compat.v1.train.SyncReplicasOptimizer` and the hook that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor._timeouts import without_timeout
from asupervisor.errors import SessionClosed
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.session.readiness import check_ready
from asupervisor.session.session import AsyncSession

#: How long the end of the token queue may take, in seconds.
END_SECS = 2.0


class SyncReplicas:
    """What one replica does for a `SyncReplicasOptimizer`; make it before the graph is finalised.

    Args:
        optimizer: The optimizer; its `minimize` or `apply_gradients` was called.
        graph: The graph.
        is_chief: Whether we aggregate.
        num_tokens: How many tokens there are at first; -1 for as many as gradients are aggregated.

    Raises:
        ValueError: `apply_gradients` was not called, or there are too few tokens.
    """

    def __init__(self, optimizer: Any, graph: tf.Graph, is_chief: bool, num_tokens: int = -1) -> None:
        self.name = "sync_replicas"
        runner = optimizer.get_chief_queue_runner()  # tells where `apply_gradients` is missing
        self._graph = graph
        self._ready_op = optimizer.ready_for_local_init_op
        self._local_init_op = optimizer.chief_init_op if is_chief else optimizer.local_step_init_op
        self._runner = runner if is_chief else None
        self._tokens_op: Any = None
        self._waiting_tokens: Any = None
        self._is_over: Any = None
        self._renew_op: Any = None
        if is_chief:
            with graph.as_default():
                self._tokens_op = optimizer.get_init_tokens_op(num_tokens)
                queue = _tf.sync_token_queue_of(optimizer)
                if queue is not None:
                    self._waiting_tokens = queue.size()
                    self._is_over = queue.is_closed()
                    with tf.device(queue.queue_ref.device):
                        self._renew_op = tf.raw_ops.DestroyResourceOp(resource=queue.queue_ref)

    def initialise(self, raw: tf.compat.v1.Session) -> None:
        """Set the local step, and hand out the first tokens where there are none; blocking, on the device thread.

        Raises:
            RuntimeError: The model is not initialised.
        """
        with self._graph.as_default():
            state = check_ready(raw, self._ready_op)
            if not state.ready:
                raise RuntimeError(
                    f"the model is not ready for the local state of SyncReplicasOptimizer: {state.message}"
                )
            raw.run(self._local_init_op)
            if self._is_over is not None and raw.run(self._is_over):
                # A chief that was lost while it waited for its workers at its end is back. A queue cannot be opened
                # again; whoever uses it next makes it anew.
                raw.run(self._renew_op)
            # A model that was adopted has tokens under way; each further one would let a replica run ahead.
            if self._tokens_op is not None and not (self._waiting_tokens is not None and raw.run(self._waiting_tokens)):
                raw.run(self._tokens_op)

    async def aggregate(self, session: AsyncSession, coordinator: Coordinator, over: Callable[[], bool]) -> None:
        """Aggregate until a stop; a service of the chief, and nothing for a worker.

        Cancelled, it returns at once; its thread leaves with the session.

        Args:
            session: The session.
            coordinator: Whose stop ends it, and who gets the aggregation's error.
            over: Asked at the stop: whether the job is over, so that waiting replicas shall end.
        """
        if self._runner is None:
            return
        runner = self._runner
        raw, closed = session.raw, runner.queue_closed_exception_types

        def feed() -> None:
            options = without_timeout(raw)
            with self._graph.as_default():
                enqueue = raw.make_callable(runner.enqueue_ops[0], accept_options=True)
                try:
                    while not coordinator.should_stop():
                        enqueue(options=options)
                except Exception as error:
                    ended = isinstance(error, (*closed, tf.errors.CancelledError))
                    if not (ended or coordinator.should_stop() or session.closed):
                        coordinator.report(error, self.name)

        with suppress(SessionClosed):
            session.executor.device.side.submit(feed, self.name)
            await coordinator.wait_for_stop()
            if over():
                await self.release_replicas(session)

    async def release_replicas(self, session: AsyncSession) -> None:
        """End the token queue: for replicas that wait for their next step, the job is over. Nothing for a worker.

        Args:
            session: The session.

        Raises:
            SessionClosed: It is closed.
        """
        if self._runner is None:
            return
        raw, cancel_op = session.raw, self._runner.cancel_op

        def end() -> None:
            with self._graph.as_default(), suppress(Exception):
                raw.run(cancel_op, options=tf.compat.v1.RunOptions(timeout_in_ms=int(END_SECS * 1000)))

        await session.executor.side(end, label=f"end of {self.name}")
