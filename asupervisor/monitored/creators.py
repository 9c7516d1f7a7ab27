"""Session creators: where a monitored session comes from.

A creator of ours is prepared once, after the hooks' `begin`: the scaffold is finalised and the ops of snapshots are
added. Then it makes a session each time one is needed: at the start, and after each recovery.

Without a service that saves there, a checkpoint directory is only read: it may belong to another run.
"""

from __future__ import annotations

import abc
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from asupervisor import _tf
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.clock import Clock, SystemClock
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services import arguments
from asupervisor.services.beginning import Beginning
from asupervisor.services.peers import ClusterTask, check_trains
from asupervisor.services.settings import RunSettings
from asupervisor.session.elements import GraphElements, resolve_graph
from asupervisor.session.manager import SessionManager
from asupervisor.session.opening import GIVE_UP_SECS
from asupervisor.session.session import AsyncSession

tf1 = tf.compat.v1

_guard = threading.Lock()
_locks: weakref.WeakKeyDictionary[tf.Graph, threading.Lock] = weakref.WeakKeyDictionary()

OnRestart = Literal["initialises", "restores", "adopts"]


class SessionCreator(abc.ABC):
    """Makes sessions; subclass it for a way of your own.

    Source: `tf.compat.v1.train.SessionCreator`.

    Attributes:
        on_restart: What a session finds that is made because another one was lost. ``"initialises"``: a new model, so
            that what was trained is gone. ``"restores"``: the model of a checkpoint. ``"adopts"``: the live model,
            which other processes keep.
    """

    on_restart: OnRestart = "initialises"

    @abc.abstractmethod
    def create_session(self) -> Any:
        """Make a session.

        A coroutine function runs on the event loop; a plain one on a side thread with the graph entered.

        Returns:
            An `AsyncSession`, or TensorFlow's own.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingSettings:
    """What a monitored training session saves and summarises by itself; nothing, by default."""

    save_checkpoint_secs: float | None = None
    save_checkpoint_steps: int | None = None
    save_summaries_secs: float | None = None
    save_summaries_steps: int | None = None
    log_step_count_steps: int | None = None
    save_graph_def: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A graph that is complete, and what its sessions are made with."""

    settings: RunSettings
    store: CheckpointStore | None
    manager: SessionManager
    master: str
    config: Any
    max_wait_secs: float
    on_restart: OnRestart

    def can_restore(self) -> bool:
        """Whether there is a checkpoint to restore now; blocking."""
        store = self.store
        if self.settings.checkpoint_filename_with_path is not None and (store is None or store.last is None):
            return True
        return store is not None and bool(store.writer.scan().regular)


class _ScaffoldedCreator(SessionCreator):
    """What the chief's and the workers' creators have in common."""

    is_chief = True

    def __init__(
        self,
        scaffold: Any,
        master: str,
        config: Any,
        graph: tf.Graph | None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_filename_with_path: str | os.PathLike[str] | None = None,
        max_wait_secs: float = 7200,
        task: ClusterTask | None = None,
        init_from: str | os.PathLike[str] | None = None,
        partial_restore: bool | None = None,
    ) -> None:
        if task is not None:
            check_trains(task)
        self.peers = None if task is None else task.peers
        if self.peers is not None:
            master, config = master or self.peers.target, self.peers.configured(config)
        self.graph = resolve_graph(graph)
        self.scaffold = scaffold
        self.master = master
        self.config = config
        self.checkpoint_dir = _checked_dir(checkpoint_dir)
        self.checkpoint_filename_with_path = arguments.checked_place(
            "checkpoint_filename_with_path", checkpoint_filename_with_path
        )
        self.max_wait_secs = max_wait_secs
        self.init_from = arguments.checked_place("init_from", init_from)
        arguments.check_beginnings(self.checkpoint_dir, self.checkpoint_filename_with_path, self.init_from)
        arguments.check_partial_restore(partial_restore)
        self.partial_restore = partial_restore

    def prepare(
        self,
        *,
        name: str = "MonitoredSession",
        saving: SavingSettings | None = None,
        stop_grace_secs: float = 120,
        recovery_wait_secs: float = 30,
        clock: Clock | None = None,
        emit: EventSink = log_only,
    ) -> Prepared:
        """Finalise the scaffold and the graph; blocking, on a thread that may enter the graph."""
        read_only = saving is None or self.checkpoint_dir is None
        saving = saving or SavingSettings()
        clock = clock or SystemClock()
        # What several sessions of one graph find there, one of them makes.
        with _completing(self.graph), self.graph.as_default():
            scaffold = self.scaffold = self.scaffold or tf1.train.Scaffold()
            restoring = self.is_chief and self.checkpoint_dir is not None
            store: CheckpointStore | None = None
            if restoring and not read_only and not self.graph.finalized:
                saver = scaffold.saver or self._default_saver()
                # A `tf.train.Checkpoint` becomes a saver in `finalize` only.
                if saver is not None and not isinstance(saver, tf.train.Checkpoint):
                    # Before `finalize`, which does not let the ops of snapshots in any more.
                    store = self._store(saver, clock, emit, read_only, saving.save_graph_def)
            scaffold.finalize()
            if restoring and store is None and scaffold.saver is not None:
                store = self._store(scaffold.saver, clock, emit, read_only, saving.save_graph_def)
            elements = GraphElements(
                self.graph,
                scaffold.ready_op,
                scaffold.ready_for_local_init_op,
                scaffold.init_op,
                scaffold.local_init_op,
                scaffold.saver,
                scaffold.summary_op,
                tf1.train.get_global_step(self.graph),
                tuple(self.graph.get_collection(tf1.GraphKeys.QUEUE_RUNNERS)),
            )
            manager = SessionManager(
                local_init_op=scaffold.local_init_op,
                local_init_feed_dict=scaffold.local_init_feed_dict,
                ready_op=scaffold.ready_op,
                ready_for_local_init_op=scaffold.ready_for_local_init_op,
                graph=self.graph,
                recovery_wait_secs=recovery_wait_secs,
            )
        settings = RunSettings(
            name=name,
            elements=elements,
            is_chief=self.is_chief,
            logdir=self.checkpoint_dir if self.is_chief else None,
            checkpoint_basename="model.ckpt",
            checkpoint_filename_with_path=self.checkpoint_filename_with_path if self.is_chief else None,
            init_feed_dict=scaffold.init_feed_dict,
            init_fn=_init_fn(scaffold),
            save_summaries_secs=saving.save_summaries_secs,
            save_summaries_steps=saving.save_summaries_steps,
            save_model_secs=saving.save_checkpoint_secs,
            save_model_steps=saving.save_checkpoint_steps,
            log_step_count_steps=saving.log_step_count_steps,
            services_without_logdir=True,
            write_graph=saving.save_graph_def,
            save_on_exit=True,
            stop_grace_secs=stop_grace_secs,
            clock=clock,
            peers=self.peers,
        )
        return Prepared(
            settings=settings,
            store=store,
            manager=manager,
            master=self.master,
            config=self.config,
            max_wait_secs=self.max_wait_secs,
            on_restart=self._on_restart(),
        )

    def _on_restart(self) -> OnRestart:
        if not self.is_chief or self.peers is not None:
            return "adopts"
        has_place = self.checkpoint_dir is not None or self.checkpoint_filename_with_path is not None
        return "restores" if has_place else "initialises"

    def _store(
        self, saver: Any, clock: Clock, emit: EventSink, read_only: bool, write_meta_graph: bool
    ) -> CheckpointStore:
        assert self.checkpoint_dir is not None
        return CheckpointStore(
            self.checkpoint_dir,
            self.graph,
            saver,
            global_step=tf1.train.get_global_step(self.graph),
            init_from=self.init_from,
            partial=self.partial_restore,
            read_only=read_only,
            write_meta_graph=write_meta_graph,
            clock=clock,
            emit=emit,
        )

    def _default_saver(self) -> Any:
        """The saver that `Scaffold.finalize` will find in the collection, made here if there is none."""
        collected = self.graph.get_collection(tf1.GraphKeys.SAVERS)
        if collected:
            return collected[0] if len(collected) == 1 else None  # more than one is an error of `finalize`
        # The parts of a sharded one are written by the tasks that hold them: where these are other machines, into
        # directories of theirs.
        saver = tf1.train.Saver(sharded=self.peers is None, allow_empty=True)
        self.graph.add_to_collection(tf1.GraphKeys.SAVERS, saver)
        return saver

    async def create_session(self) -> AsyncSession:
        """A session of its own, outside of a monitored session; close it by `await session.close()`.

        Cancelled, it gives everything back but the ops that the graph has got.
        """
        executor = DeviceExecutor()
        try:
            prepared = await executor.side(self.prepare, label="completing the graph")
        finally:
            await executor.aclose(GIVE_UP_SECS)
        manager = prepared.manager.bound(
            global_step=prepared.settings.elements.global_step,
            restore=None if prepared.store is None else prepared.store.restorer,
        )
        return await Beginning(
            prepared.settings,
            manager,
            self.master,
            self.config,
            wait_for_checkpoint=False,
            max_wait_secs=self.max_wait_secs,
        ).open()


class ChiefSessionCreator(_ScaffoldedCreator):
    """Makes a chief's sessions: initialised, or restored from a checkpoint.

    It saves nothing itself. In a cluster, hooks have their last calls before the workers are waited for: where one of
    them saves then, such as TensorFlow's `CheckpointSaverHook`, let the body end with ``await task.join()``.

    Source: `tf.compat.v1.train.ChiefSessionCreator`.

    Args:
        scaffold: A `tf.compat.v1.train.Scaffold`; None for a default one.
        master: See `Supervisor.managed_session`.
        config: `ConfigProto` for the sessions.
        checkpoint_dir: Directory to restore from, the newest good checkpoint first; None or empty for none. A relative
            path is resolved at once.
        checkpoint_filename_with_path: Checkpoint to restore instead.
        graph: The graph; None for the caller's default graph.
        init_from: See `Supervisor`; the directory is `checkpoint_dir`.
        partial_restore: See `Supervisor`.
        max_wait_secs: Longest wait for the parameter servers of a cluster at the first start, in seconds.
        task: Our part in a cluster; see `asupervisor.cluster.Task`.

    Raises:
        RuntimeError: No graph was given and TensorFlow executes eagerly.
        ValueError: The task has no session: a parameter server's, an evaluator's. Or `checkpoint_dir` is a remote
            address.
    """

    def __init__(
        self,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_filename_with_path: str | os.PathLike[str] | None = None,
        *,
        graph: tf.Graph | None = None,
        init_from: str | os.PathLike[str] | None = None,
        partial_restore: bool | None = None,
        max_wait_secs: float = 7200,
        task: ClusterTask | None = None,
    ) -> None:
        super().__init__(
            scaffold,
            master,
            config,
            graph,
            checkpoint_dir,
            checkpoint_filename_with_path,
            max_wait_secs,
            task=task,
            init_from=init_from,
            partial_restore=partial_restore,
        )


class WorkerSessionCreator(_ScaffoldedCreator):
    """Makes a worker's sessions, which wait for the chief to make the model ready.

    Source: `tf.compat.v1.train.WorkerSessionCreator`.

    Args:
        scaffold: A `tf.compat.v1.train.Scaffold`; None for a default one.
        master: See `Supervisor.managed_session`.
        config: `ConfigProto` for the sessions.
        max_wait_secs: Longest wait for the chief, in seconds.
        graph: The graph; None for the caller's default graph.
        task: Our part in a cluster; see `asupervisor.cluster.Task`.

    Raises:
        RuntimeError: No graph was given and TensorFlow executes eagerly.
        ValueError: The task has no session: a parameter server's, an evaluator's.
    """

    is_chief = False

    def __init__(
        self,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        max_wait_secs: float = 30 * 60,
        *,
        graph: tf.Graph | None = None,
        task: ClusterTask | None = None,
    ) -> None:
        super().__init__(scaffold, master, config, graph, max_wait_secs=max_wait_secs, task=task)


def _completing(graph: tf.Graph) -> threading.Lock:
    """The lock of whoever completes this graph."""
    with _guard:
        return _locks.setdefault(graph, threading.Lock())


def _checked_dir(checkpoint_dir: Any) -> str | None:
    """The directory as an absolute path; None for none, which an empty string stands for, too.

    Raises:
        TypeError: It is no path.
        ValueError: It is a remote address.
    """
    if isinstance(checkpoint_dir, str | bytes) and not checkpoint_dir:
        return None
    checked = arguments.checked_place("checkpoint_dir", checkpoint_dir)
    if checked is not None and "://" in checked:
        raise ValueError(
            f"checkpoint_dir {checked!r} is a remote address: checkpoints need a local or mounted directory, where a "
            "file can be locked, flushed and renamed"
        )
    return checked


def _init_fn(scaffold: Any) -> Callable[[Any], Any] | None:
    """The scaffold's `init_fn`, as a coroutine function where the user's is one."""
    given = _tf.init_fn_of(scaffold)
    if not inspect.iscoroutinefunction(given):
        plain: Callable[[Any], Any] | None = scaffold.init_fn
        return plain

    async def init_fn(session: AsyncSession) -> None:
        await given(scaffold, session)

    return init_fn


def as_ours(creator: Any, graph: tf.Graph | None) -> Any:
    """One of our creators for one of TensorFlow's own; any other creator as it is."""
    settings = _tf.session_creator_settings(creator)
    if settings is None:
        return creator
    kind = ChiefSessionCreator if settings.pop("is_chief") else WorkerSessionCreator
    return kind(**settings, graph=graph)


def prepares(creator: Any) -> bool:
    """Whether a creator is one of ours, and makes its sessions in our way: a subclass may have its own."""
    return isinstance(creator, _ScaffoldedCreator) and (
        type(creator).create_session is _ScaffoldedCreator.create_session
    )
