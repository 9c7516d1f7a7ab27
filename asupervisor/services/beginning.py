"""The ways to a session whose model is ready: restored or initialised by a chief, awaited by others, or adopted."""

from __future__ import annotations

from typing import Any

from asupervisor.errors import ModelLost
from asupervisor.events import EventSink
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import KILL_GRACE_SECS
from asupervisor.services.peers import Around, Peers, Ways
from asupervisor.services.settings import RunSettings
from asupervisor.session.manager import SessionManager
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import Patience


class Beginning:
    """How one session is opened.

    Args:
        settings: What the supervisor was told.
        manager: What prepares the session.
        master: See `Supervisor.managed_session`.
        config: Likewise.
        wait_for_checkpoint: See `Supervisor.prepare_or_wait_for_session`.
        max_wait_secs: Likewise.
    """

    def __init__(
        self,
        settings: RunSettings,
        manager: SessionManager,
        master: str,
        config: Any,
        wait_for_checkpoint: bool,
        max_wait_secs: float,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._master = master
        self._config = config
        self._wait_for_checkpoint = wait_for_checkpoint
        self._max_wait_secs = max_wait_secs
        explicit = settings.checkpoint_filename_with_path
        self._places: dict[str, Any] = {
            "saver": settings.elements.saver,
            "checkpoint_dir": None if explicit else settings.logdir,
            "checkpoint_filename_with_path": explicit,
        }

    async def open(self) -> AsyncSession:
        """A session of one task alone, or of a cluster that nobody told us of."""
        if self._settings.is_chief:
            return await self._prepare()
        return await self._wait(self._max_wait_secs)

    async def open_among(
        self,
        peers: Peers,
        executor: DeviceExecutor,
        patience: Patience,
        emit: EventSink,
        coordinator: Coordinator,
    ) -> tuple[AsyncSession, bool]:
        """A session of a cluster, and whether its model is the live one that was there before.

        Args:
            peers: The other tasks.
            executor: Whose side threads to use.
            patience: The waits of the session.
            emit: Where events go.
            coordinator: Its stop without an error ends everything: no other session follows.
        """
        settings = self._settings
        self._master, self._config = self._master or peers.target, peers.configured(self._config)
        ways = Ways(
            adopt=self._adopt,
            prepare=self._prepare if peers.may_initialise else self._restore,
            wait=self._wait,
        )
        around = Around(
            executor=executor,
            patience=patience,
            emit=emit,
            logdir=settings.logdir,
            afresh=settings.fresh_start or settings.checkpoint_filename_with_path is not None,
            max_wait_secs=self._max_wait_secs,
            coordinator=coordinator,
        )
        session, how = await peers.open(ways, around)
        return session, how == "adopted"

    async def _wait(self, max_wait_secs: float) -> AsyncSession:
        return await self._manager.wait_for_session(self._master, config=self._config, max_wait_secs=max_wait_secs)

    async def _adopt(self) -> AsyncSession:
        # Without a deadline: a model that is slow to look at must not be taken for one that is not ready.
        return await self._manager.adopt_session(self._master, config=self._config)

    async def _prepare(self) -> AsyncSession:
        return await self._manager.prepare_session(
            self._master,
            init_op=self._settings.elements.init_op,
            wait_for_checkpoint=self._wait_for_checkpoint,
            max_wait_secs=self._max_wait_secs,
            config=self._config,
            init_feed_dict=self._settings.init_feed_dict,
            init_fn=self._settings.init_fn,
            **self._places,
        )

    async def _restore(self) -> AsyncSession:
        """A model that was lost is restored, or not at all.

        Raises:
            ModelLost: There is nothing to restore.
        """
        session, ready = await self._manager.recover_session(self._master, config=self._config, **self._places)
        if not ready:
            await session.close_raw(KILL_GRACE_SECS)
            raise ModelLost()
        return session
