"""The hook of `SyncReplicasOptimizer` for monitored sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import tensorflow as tf

from asupervisor.hooks.protocol import AsyncSessionRunHook, HookOutcome
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.services.sync_replicas import SyncReplicas
from asupervisor.session.session import AsyncSession


class SyncReplicasHook(AsyncSessionRunHook):
    """Synchronous replicas in a monitored session: `Supervisor(sync_replicas=)` for the other family.

    TensorFlow's own hook, ``optimizer.make_session_run_hook(is_chief)``, works as well; but its aggregation ends with
    the session's timeout for runs, a chief that recovers sends its workers home, and one that is restarted hands out
    tokens once more.

    Source: `tf.compat.v1.train.SyncReplicasOptimizer.make_session_run_hook`.

    Args:
        optimizer: The `tf.compat.v1.train.SyncReplicasOptimizer`.
        is_chief: Whether we aggregate.
        num_tokens: How many tokens there are at first; -1 for as many as gradients are aggregated.
    """

    def __init__(self, optimizer: Any, is_chief: bool, num_tokens: int = -1) -> None:
        self._optimizer = optimizer
        self._is_chief = is_chief
        self._num_tokens = num_tokens
        self._sync: SyncReplicas | None = None
        self._service: asyncio.Task[None] | None = None
        self._over = False

    def begin(self) -> None:
        """Add the ops.

        Raises:
            ValueError: The optimizer's `apply_gradients` was not called.
        """
        self._over = False
        self._sync = SyncReplicas(self._optimizer, tf.compat.v1.get_default_graph(), self._is_chief, self._num_tokens)

    async def after_create_session(self, session: AsyncSession, coord: Coordinator) -> None:
        """Set the local state, and begin to aggregate."""
        assert self._sync is not None
        await session.control(self._sync.initialise)
        if self._is_chief:
            self._service = asyncio.create_task(
                self._sync.aggregate(session, coord, lambda: self._over), name=self._sync.name
            )

    async def end(self, session: AsyncSession) -> None:
        """The job is over: replicas that wait for a token end, too.

        Not left to the service: the stop that it waits for comes after this call, or came before it, when nobody knew
        yet how the job would end.
        """
        assert self._sync is not None
        self._over = True
        await self._sync.release_replicas(session)

    async def finish(self, session: AsyncSession | None, outcome: HookOutcome) -> None:
        """See the service off."""
        service, self._service = self._service, None
        if service is not None and not service.done():
            service.cancel()
            await asyncio.wait([service])
