"""What can be done with the session that a supervisor has now, beside running it: services, pauses, saves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from asupervisor.checkpoint.records import CheckpointInfo
from asupervisor.runtime.looper import LooperTask
from asupervisor.runtime.service import Service
from asupervisor.services.hosted_run import HostedRun
from asupervisor.services.properties import SupervisorProperties
from asupervisor.services.run import SupervisedRun
from asupervisor.session.session import AsyncSession


class SupervisorControls(SupervisorProperties):
    """The methods of a `Supervisor` that need its active session.

    Source: these methods of `tf.compat.v1.train.Supervisor`.
    """

    name: str
    _hosted: HostedRun | None

    def _active(self, what: str, sess: Any = None) -> HostedRun:
        """The session that there is, for a method that needs one; see `HostedRun.check_caller` for what it raises.

        Raises:
            RuntimeError: There is none.
        """
        hosted = self._hosted
        if hosted is None or hosted.host.finished:
            raise RuntimeError(f"{what} needs an active session of {self.name}: enter managed_session() first")
        hosted.check_caller(what, sess)
        return hosted

    @property
    def signalled(self) -> bool:
        """Whether a signal has ended the session, or the last one; only with `handle_signals`."""
        return self._hosted is not None and self._hosted.around.signalled

    @property
    def last_run(self) -> SupervisedRun | None:
        """The parts of the session, or of the last one; for this library."""
        return None if self._hosted is None else self._hosted.run

    # ------------------------------------------------------------------ services

    def start_standard_services(self, sess: AsyncSession) -> list[Service] | None:
        """Start the summary, step counter and checkpoint services; `managed_session` does so by itself.

        Args:
            sess: The supervisor's session.

        Returns:
            The services that were started, none the second time; or None without a logdir, with a warning.

        Raises:
            RuntimeError: For a non-chief, or without an active session.
            ValueError: `sess` is another session.

        Source: `tf.compat.v1.train.Supervisor.start_standard_services`.
        """
        if not self.is_chief:
            raise RuntimeError(
                "Only chief supervisor can start standard services. Because only chief supervisors can write events."
            )
        hosted = self._active("start_standard_services()", sess)
        return hosted.run.services.start(hosted.host, sess, hosted.run.start_step)

    def start_queue_runners(self, sess: AsyncSession, queue_runners: Iterable[Any] | None = None) -> list[Service]:
        """Start feeders for the graph's QueueRunners, or for those given; `managed_session` does so by itself.

        Args:
            sess: The supervisor's session.
            queue_runners: `tf.compat.v1.train.QueueRunner`s; None for those that the graph has collected.

        Returns:
            One service for each enqueue op, and one that closes the queue at the stop.

        Raises:
            RuntimeError: Without an active session.
            TypeError: `sess` is not a session.
            ValueError: `sess` is another session, or a runner belongs to another graph.

        Source: `tf.compat.v1.train.Supervisor.start_queue_runners`.
        """
        hosted = self._active("start_queue_runners()", sess)
        return hosted.run.start_queue_runners(hosted.host, sess, queue_runners)

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> LooperTask:
        """Call a function at once and then every `timer_interval_secs`, until a stop is requested.

        A coroutine function runs on the event loop, a plain one on a worker thread; an awaitable that it returns is
        awaited. An exception stops the supervisor and leaves the block.

        Args:
            timer_interval_secs: Seconds between two calls; None calls back to back.
            target: What to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The looper; it has been started.

        Raises:
            RuntimeError: Without an active session.
            TypeError: `target` cannot be called with these arguments.

        Source: `tf.compat.v1.train.Supervisor.loop`.
        """
        return self._active("loop()").loop(timer_interval_secs, target, args, kwargs)

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], *args: Any, name: str | None = None) -> Service:
        """Start a task that the session supervises: an exception stops everything, and the stop awaits its end.

        After a stop it has `stop_grace_secs` to end by itself; then it is cancelled.

        Args:
            async_fn: Coroutine function; or a callable that returns an awaitable, which is called at once.
            *args: Its arguments.
            name: Name of the service.

        Returns:
            The record of the task; awaiting it waits for its end.

        Raises:
            RuntimeError: Without an active session.
            TypeError: `async_fn` cannot be called with these arguments, or is not async.
        """
        return self._active("start_soon()").start_soon(async_fn, args, name)

    def pause(self) -> None:
        """Hold training runs and streams between two steps; everything else proceeds. A stop releases them."""
        self._active("pause()").run.session.pause()

    def resume(self) -> None:
        """End a `pause`."""
        self._active("resume()").run.session.resume()

    async def save(self) -> CheckpointInfo:
        """Save the model now, between two steps; training goes on while it is written.

        Cancelling it releases the caller; the save goes on.

        Returns:
            What was written.

        Raises:
            RuntimeError: Not a chief, no logdir, no saver, or no active session.
            OSError: It could not be written.
        """
        run = self._active("save()").run
        return await run.services.save(run.session)

    async def summary_computed(self, sess: AsyncSession, summary: Any, global_step: int | None = None) -> None:
        """Write a summary that the caller has computed.

        Args:
            sess: The supervisor's session.
            summary: A `Summary` proto, or one as bytes.
            global_step: Step to record; None reads it from the session.

        Raises:
            TypeError: `summary` is neither.
            RuntimeError: There is no summary writer (no logdir, none wanted, or a non-chief), or no active session.
            ValueError: `sess` is another session.

        Source: `tf.compat.v1.train.Supervisor.summary_computed`.
        """
        if self._parts.writer is None:
            raise RuntimeError("Writing a summary requires a summary writer: pass logdir= or summary_writer=.")
        await self._active("summary_computed()", sess).run.summary_computed(summary, global_step)

    # The original's deprecated names.
    Loop = loop
    StartQueueRunners = start_queue_runners
    StartStandardServices = start_standard_services
    SummaryComputed = summary_computed
