"""The Supervisor: one graph, one session at a time, and everything that stands around it.

::

    Supervisor ─ Parts: what its constructor has made
        ├── SupervisorControls: what needs the active session; SupervisorProperties: what can be read at any time
        └── managed_session() ─ Block: the caller's task
                └── HostedRun ─ Host (two tasks of its own), SupervisedRun (one session's parts)

This module is the public face: arguments and methods. What a session consists of, from the lock on the logdir to the
STOP record, is `services/hosted_run.py` and `services/run.py`; how a block is entered and left is `runtime/block.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from asupervisor.checkpoint.records import NonFinitePolicy
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import SessionActive
from asupervisor.events import Event, EventHub, Status
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator, StopOnException
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.host import Host
from asupervisor.services import arguments
from asupervisor.services.controls import SupervisorControls
from asupervisor.services.hosted_run import HostedRun
from asupervisor.services.parts import Parts, make_store, make_writer
from asupervisor.services.peers import ClusterTask, check_trains
from asupervisor.services.settings import RunSettings
from asupervisor.services.sync_replicas import SyncReplicas
from asupervisor.session import elements
from asupervisor.session.arguments import check_init_fn
from asupervisor.session.manager import SessionManager
from asupervisor.session.session import AsyncSession

_numbers = itertools.count(1)


class Supervisor(SupervisorControls):
    """Initialises, restores, saves, summarises and watches over the training of one graph, inside an event loop.

    ::

        sv = Supervisor(graph=graph, logdir="runs/digits")
        async with sv.managed_session() as sess:
            while not sv.should_stop():
                await sess.run(train_op, feed_dict=next_batch())

    The constructor only adds ops and finalises the graph; directories, files and threads belong to the session. One
    session at a time; used again after it ended, also on another event loop, the supervisor starts afresh.

    What a chief leaves in the logdir: checkpoints (``model.ckpt-<step>`` with ``.index``, ``.data-*``, ``.meta`` and
    ``.manifest``) and TensorFlow's state file ``checkpoint``; an event file ``events.out.tfevents.*`` for each session;
    ``graph.pbtxt``; ``journal.jsonl``; the empty ``.asupervisor.lock``, beside which ``.asupervisor.holder`` tells who
    holds it. Where there was a reason: ``quarantine/`` with damaged checkpoints, ``replaced-*/`` with those that a
    fresh start has set aside.

    Deliberate differences from the original, beyond what async needs: the model is saved when a session ends; a
    summary rides on a training step instead of running one of its own; a slow timer skips ticks instead of catching
    up in a burst; an error after a clean stop is raised, not dropped; only one chief writes into a logdir.

    Source: `tf.compat.v1.train.Supervisor`.

    Args:
        graph: The graph. None for the caller's default graph. It may be finalised where an earlier supervisor has
            already completed it.
        ready_op: 1-D string tensor of what is not initialised, or an op that raises FailedPreconditionError. None
            for no check. Defaults to `report_uninitialized_variables()`.
        ready_for_local_init_op: The same, asked before `local_init_op` runs. Defaults to what the graph's collection
            holds, if anything.
        is_chief: Whether this supervisor initialises, restores, saves and summarises; others wait for their chief.
        init_op: Initialises the model when it cannot be restored. None for none.
        init_feed_dict: Fed to `init_op`.
        local_init_op: Run for each session: by default local variables and tables. None for none.
        logdir: Where checkpoints and events go; created when a session starts. None for neither. A relative path
            is taken from here and now: the program may change its directory later.
        summary_op: Scalar string tensor of summaries. Defaults to all of the graph's. None for none.
        saver: A `tf.compat.v1.train.Saver` or an object like it. None: nothing is saved, restored or checked.
        global_step: Integer tensor or variable with one element that counts steps. None for none.
        save_summaries_secs: Seconds between summaries; 0 or None for none.
        save_model_secs: Seconds between checkpoints; 0 or None for none.
        recovery_wait_secs: Longest wait between two looks at a model that is not ready, in seconds.
        stop_grace_secs: What services and the body have to end by themselves after a stop, in seconds.
        checkpoint_basename: First part of the names of checkpoints.
        session_manager: Prepares the sessions; its own settings then hold instead of this supervisor's. One of
            TensorFlow's own is replaced by an `asupervisor.SessionManager` with the same settings.
        summary_writer: A `tf.compat.v1.summary.FileWriter` or the like; None for no event file. By default the
            supervisor has its own.
        init_fn: Called after `init_op` with the session: a plain function on the device thread with TensorFlow's
            session and the graph entered, a coroutine function on the event loop with the `AsyncSession`.
        local_init_run_options: `RunOptions` for `local_init_op`.
        save_summaries_steps: Steps between summaries, beside or instead of seconds.
        save_model_steps: Steps between checkpoints, beside or instead of seconds.
        save_on_exit: Whether the model is saved when the session ends, cleanly or not.
        fresh_start: Begin with an initialised model even where the logdir holds checkpoints: they are moved into a
            directory in there. Combined with one of the next two, begin with that model.
        init_from: Checkpoint, or directory with checkpoints, to begin from as long as the logdir has none: its
            weights, its global step and all else. It is only read.
        checkpoint_filename_with_path: The one checkpoint to begin from, whatever the logdir holds, at each start of
            the program; an error if it is damaged or not there. What is trained then is the logdir's newest, so the
            checkpoint must lie there, or the logdir hold none, or `fresh_start` be given. Later sessions of this
            supervisor, after a lost one too, go on from what it has saved since. Needs no logdir.
        partial_restore: Whether a checkpoint that does not fit the whole model is restored as far as it does, and the
            rest is initialised and named. None: where the model has only grown. True: where they share any variable
            of the same shape and type. False: never.
        nonfinite: What to do with a model whose trainable variables hold NaN or infinity at a save: ``"refuse"``
            writes it aside and never restores it by itself, ``"mark"`` publishes it with a warning, ``"allow"`` does
            not look.
        clean_stop_exception_types: Exceptions that mean a clean end, as does an exception group of nothing else. None
            for TensorFlow's OutOfRangeError.
        executor: The device thread to use, shared with other supervisors; it is not closed. By default each session
            has its own.
        clock: Where the time comes from.
        retention: Which checkpoints to keep: a `LatestN`, `EveryNHours`, `KeepAll`, `AnyOf` of these, or any
            `Retention`; defaults to the saver's `max_to_keep` and `keep_checkpoint_every_n_hours`.
        journal: Whether events are written to `journal.jsonl` in the logdir.
        handle_signals: Whether SIGINT and SIGTERM request a stop while a session is active. The handlers that were
            there before are called, too.
        task: Our part in a cluster. It tells `is_chief`, which master sessions are opened on and how they are
            configured; see `asupervisor.cluster.Task`.
        sync_replicas: A `tf.compat.v1.train.SyncReplicasOptimizer` whose `minimize` made the training op: its local
            state, its tokens and the chief's aggregation are looked after.
        name: Name in events, threads and tasks.

    Raises:
        RuntimeError: No graph was given and TensorFlow executes eagerly; or the graph is finalised and incomplete.
        TypeError: `graph` is not a graph, or an argument is of a kind that cannot work.
        ValueError: An op belongs to another graph or is an eager tensor; a number is negative; or, for a non-chief, a
            ref variable has no device.
    """

    USE_DEFAULT: ClassVar[int] = elements.USE_DEFAULT

    def __init__(
        self,
        graph: tf.Graph | None = None,
        ready_op: Any = USE_DEFAULT,
        ready_for_local_init_op: Any = USE_DEFAULT,
        is_chief: bool = True,
        init_op: Any = USE_DEFAULT,
        init_feed_dict: Mapping[Any, Any] | None = None,
        local_init_op: Any = USE_DEFAULT,
        logdir: str | os.PathLike[str] | None = None,
        summary_op: Any = USE_DEFAULT,
        saver: Any = USE_DEFAULT,
        global_step: Any = USE_DEFAULT,
        save_summaries_secs: float | None = 120,
        save_model_secs: float | None = 600,
        recovery_wait_secs: float = 30,
        stop_grace_secs: float = 120,
        checkpoint_basename: str = "model.ckpt",
        session_manager: SessionManager | Any | None = None,
        summary_writer: Any = USE_DEFAULT,
        init_fn: Callable[[Any], Any] | None = None,
        local_init_run_options: Any = None,
        *,
        save_summaries_steps: int | None = None,
        save_model_steps: int | None = None,
        save_on_exit: bool = True,
        fresh_start: bool = False,
        init_from: str | os.PathLike[str] | None = None,
        checkpoint_filename_with_path: str | os.PathLike[str] | None = None,
        partial_restore: bool | None = None,
        nonfinite: NonFinitePolicy = "refuse",
        clean_stop_exception_types: Iterable[type[BaseException]] | None = None,
        executor: DeviceExecutor | None = None,
        clock: Clock | None = None,
        retention: Any = None,
        journal: bool = True,
        handle_signals: bool = False,
        task: ClusterTask | None = None,
        sync_replicas: Any = None,
        name: str | None = None,
    ) -> None:
        # What was told is checked before anything is added to the graph.
        graph = elements.resolve_graph(graph)
        if task is not None:
            check_trains(task)
            is_chief = task.is_chief
        if not is_chief:
            elements.check_devices(graph)
        given_dir = arguments.checked_logdir(logdir) if is_chief else None
        chief_dir = None if given_dir is None else arguments.resolved(given_dir)
        begin_from = arguments.checked_place("init_from", init_from)
        explicit = arguments.checked_place("checkpoint_filename_with_path", checkpoint_filename_with_path)
        if not is_chief:  # it waits for the chief, who restores
            begin_from = explicit = None
        arguments.check_beginnings(chief_dir, explicit, begin_from)
        arguments.check_partial_restore(partial_restore)
        check_init_fn(init_fn)
        arguments.check_interval("save_summaries_secs", save_summaries_secs)
        arguments.check_interval("save_model_secs", save_model_secs)
        arguments.check_steps("save_summaries_steps", save_summaries_steps)
        arguments.check_steps("save_model_steps", save_model_steps)
        arguments.check_secs("recovery_wait_secs", recovery_wait_secs)
        arguments.check_secs("stop_grace_secs", stop_grace_secs)
        arguments.check_basename(checkpoint_basename)
        if saver is not None:
            arguments.check_saves_to(chief_dir, checkpoint_basename)
        arguments.check_saver(None if saver is elements.USE_DEFAULT else saver)
        elements.check_in_graph(graph, "summary_op", summary_op)
        arguments.check_summary_op(None if summary_op is elements.USE_DEFAULT else summary_op)
        elements.check_in_graph(graph, "global_step", global_step)
        arguments.check_global_step(None if global_step is elements.USE_DEFAULT else global_step)
        arguments.check_executor(executor)
        clean_types = arguments.checked_clean_types(clean_stop_exception_types)
        manager = None if session_manager is None else arguments.adapted_session_manager(session_manager, graph)
        if not is_chief:  # its chief saves and summarises
            save_summaries_secs = save_summaries_steps = save_model_secs = save_model_steps = None

        # The graph is completed, all but the ops of the checkpoint store.
        found = elements.find_or_add_elements(
            graph,
            ready_op=ready_op,
            ready_for_local_init_op=ready_for_local_init_op,
            init_op=init_op,
            local_init_op=local_init_op,
            saver=saver,
            summary_op=summary_op,
            global_step=global_step,
        )
        sync = None if sync_replicas is None else SyncReplicas(sync_replicas, graph, is_chief)
        arguments.check_restores(found.saver, explicit or begin_from)

        # The parts; the checkpoint store adds the last ops.
        self.name = name or f"supervisor-{next(_numbers)}"
        clock = clock or SystemClock()
        hub = EventHub(self.name, clock)
        settings = RunSettings(
            name=self.name,
            elements=found,
            is_chief=is_chief,
            logdir=chief_dir,
            checkpoint_basename=checkpoint_basename,
            checkpoint_filename_with_path=explicit,
            init_feed_dict=init_feed_dict,
            init_fn=init_fn,
            save_summaries_secs=save_summaries_secs or None,
            save_summaries_steps=save_summaries_steps or None,
            save_model_secs=save_model_secs or None,
            save_model_steps=save_model_steps or None,
            save_on_exit=save_on_exit,
            stop_grace_secs=stop_grace_secs,
            clock=clock,
            fresh_start=fresh_start,
            peers=None if task is None else task.peers,
            sync_replicas=sync,
        )
        self._parts = Parts(
            settings=settings,
            session_manager=manager
            or SessionManager(
                local_init_op=found.local_init_op,
                ready_op=found.ready_op,
                ready_for_local_init_op=found.ready_for_local_init_op,
                graph=graph,
                recovery_wait_secs=recovery_wait_secs,
                local_init_run_options=local_init_run_options,
            ),
            coordinator=Coordinator(clean_types, consequence_types=(tf.errors.CancelledError,), emit=hub.emit),
            hub=hub,
            store=make_store(
                settings, hub, retention=retention, nonfinite=nonfinite, init_from=begin_from, partial=partial_restore
            ),
            writer=make_writer(settings, hub, summary_writer),
            executor=executor,
            journal=journal,
            handle_signals=handle_signals,
            given_dir=given_dir,
            save_summaries_secs=save_summaries_secs,
            save_model_secs=save_model_secs,
        )
        self._hosted: HostedRun | None = None  # the present session, or the last one
        graph.finalize()

    # ------------------------------------------------------------------ sessions

    def managed_session(
        self,
        master: str = "",
        config: Any = None,
        start_standard_services: bool = True,
        close_summary_writer: bool = True,
        *,
        cancel_body: bool | None = None,
    ) -> Block[AsyncSession]:
        """An async context manager whose value is the session: initialised, or restored from the newest good save.

        Leaving it stops and joins the services, saves the model, writes the STOP record, closes the session, and
        raises what went wrong first, as the same object: an error of the body or of a service. Exceptions that mean
        a clean end do not leave it. Enter and exit may run in different tasks of the same event loop.

        Cancellation: cancelling the entering task aborts the start. Cancelling the body ends the services at once;
        the model is still saved, within `stop_grace_secs`; a second cancellation skips that.

        Args:
            master: ``''`` for a session in this process, ``'local'`` for a server started in this process,
                ``grpc://host:port`` or a server's target.
            config: `ConfigProto` for the session.
            start_standard_services: Whether to start the services and the queue feeders.
            close_summary_writer: Whether the summary writer is closed, with a STOP record, at the end.
            cancel_body: Whether a body that runs on past the grace is cancelled. None: where the body provably runs
                in the task that entered.

        Returns:
            The context manager. Entering it raises what `prepare_or_wait_for_session` raises.

        Source: `tf.compat.v1.train.Supervisor.managed_session`.
        """

        def make_host() -> Host[AsyncSession]:
            return self._new_host(
                master,
                config,
                start_standard_services=start_standard_services,
                close_summary_writer=close_summary_writer,
            )

        return Block(make_host, cancel_body=cancel_body)

    async def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: Any = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float = 7200,
        start_standard_services: bool = True,
    ) -> AsyncSession:
        """A session whose model is ready, without a block: end it by `await sv.stop()` and `await sess.close()`.

        Closing it closes the summary writer, too, unless `stop` was told not to.

        A stop that was requested before is forgotten. Cancelling it aborts the start and gives everything back.

        Args:
            master: See `managed_session`.
            config: `ConfigProto` for the session.
            wait_for_checkpoint: Whether a chief waits for a checkpoint instead of initialising the model.
            max_wait_secs: Longest wait for the model, in seconds.
            start_standard_services: Whether to start the services and the queue feeders.

        Raises:
            SessionActive: The supervisor has a session already.
            LogdirInUse: Another chief writes into the logdir.
            LogdirNotWritable: It cannot be written.
            CheckpointError: What is there cannot be restored.
            SessionNotReady: The model was not ready in time.
            StopRequested: A stop was requested meanwhile.
            RuntimeError: The init ops did not make the model ready.

        Source: `tf.compat.v1.train.Supervisor.prepare_or_wait_for_session`.
        """
        host = self._new_host(
            master,
            config,
            start_standard_services=start_standard_services,
            wait_for_checkpoint=wait_for_checkpoint,
            max_wait_secs=max_wait_secs,
        )
        return await host.start()

    def _new_host(self, master: str, config: Any, **options: Any) -> Host[AsyncSession]:
        """For the next session; raise SessionActive where there is one already. See `HostedRun` for the arguments."""
        if self._hosted is not None and not self._hosted.host.finished:
            if not self._hosted.host.loop.is_closed():
                raise SessionActive(self.name)
            self._hosted.host.abandon()  # its loop was closed under it: give back what it holds
        self._hosted = HostedRun(self._parts, master, config, **options)
        return self._hosted.host

    # ------------------------------------------------------------------ the stop

    async def stop(
        self,
        threads: Iterable[Any] | None = None,
        close_summary_writer: bool = True,
        ignore_live_threads: bool = False,
    ) -> None:
        """Stop the services, after the final save; the session lives on until it is closed.

        Does not wait for the body of a block, nor for the service that calls it. Cancelling it leaves the stop under
        way.

        Args:
            threads: Further threads and tasks to wait for, within the same grace.
            close_summary_writer: Whether the summary writer is closed, with a STOP record.
            ignore_live_threads: Report what outlives its grace instead of raising.

        Raises:
            BaseException: The first error that was reported.
            StopGraceExceeded: Something outlived `stop_grace_secs`; a RuntimeError.

        Source: `tf.compat.v1.train.Supervisor.stop`.
        """
        hosted, coord = self._hosted, self.coord
        if hosted is not None and not hosted.host.finished:
            await self._active("stop()").stop(threads, close_summary_writer, ignore_live_threads)
            return
        coord.request_stop()
        if hosted is not None and close_summary_writer:
            await hosted.around.close_writer()
        await coord.join(threads, self._parts.settings.stop_grace_secs, ignore_live_threads)

    def request_stop(self, ex: Any = None) -> None:
        """Ask for a stop, with an error or without; any thread, signal handlers too.

        See `Coordinator.request_stop`.
        """
        self.coord.request_stop(ex)

    def should_stop(self) -> bool:
        """Whether a stop was requested; any thread."""
        return self.coord.should_stop()

    def stop_on_exception(self) -> StopOnException:
        """A context manager that reports an exception of its block; see `Coordinator.stop_on_exception`."""
        return self.coord.stop_on_exception()

    async def wait_for_stop(self) -> None:
        """Wait until a stop is requested; cancellable."""
        await self.coord.wait_for_stop()

    # ------------------------------------------------------------------ how things stand

    def status(self) -> Status:
        """How the supervisor stands; any thread, never blocks."""
        hosted = self._hosted
        if hosted is None:
            return Status(self.name, "idle", self.is_chief, self._parts.settings.logdir)
        return hosted.run.status(hosted.host)

    def events(self, *, wait: bool = False) -> AsyncIterator[Event]:
        """An iterator over the events from now on, which ends with the session; on the event loop.

        Before the first session it waits for that. Once a session has ended, and until the next one begins, there is
        nothing to wait for: it ends at once.

        A reader that does not keep up loses the oldest events and is told how many.

        Args:
            wait: Whether to wait for the next session all the same, for a supervisor that is used again.
        """
        return self._parts.hub.subscribe(wait=wait)

    # The original's deprecated names.
    PrepareSession = prepare_or_wait_for_session
    Stop = stop
    RequestStop = request_stop
    ShouldStop = should_stop
    StopOnException = stop_on_exception
    WaitForStop = wait_for_stop
