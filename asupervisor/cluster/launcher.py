"""A whole cluster on this machine: one process per task, on loopback, from one command.

This is what ``asupervisor launch --ps 1 --workers 2 program.py`` runs, and it can be used from Python::

    async with Launcher(["program.py"], ps=1, workers=2) as launcher:
        print(launcher.tasks["worker/0"].pid)
        status = await launcher.wait()

Each task gets ``TF_CONFIG`` as Kubernetes' TFJob operator sets it, and is treated as under its restart policy
ExitCode: a task that exits with 1 to 127 has failed for good and everything ends; one that exits with 128 or more, or
is killed by a signal, is started again, with the same address, within a budget.

The job is over when the chief and all workers have ended with 0. A stop ends in order: first the chief, who saves, and
the workers, then the parameter servers that they need until then.

Needs a POSIX system. TensorFlow is not imported here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asupervisor.cluster.launched import (
    RETRYABLE_STATUS,
    LaunchedTask,
    RestartBudget,
    all_ended,
    describe_end,
    exit_status,
    members,
)
from asupervisor.cluster.pipes import Outputs
from asupervisor.cluster.ports import PortReservation
from asupervisor.cluster.processes import Guard, Process
from asupervisor.events import EventSink, Level

#: How long the last lines may take to be written by a launcher that was told to kill, in seconds.
_LAST_LINES_SECS = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Starts the tasks of a cluster as processes on this machine, watches them, and ends them all.

    An async context manager: entering starts the tasks, leaving ends what still runs, in order, and waits for it.
    Cancelled in there, it kills at once. No process is left, not even when this process is killed; see `processes`.
    It can be entered once, on any event loop of a POSIX system.

    Args:
        program: What the Python interpreter runs: a file or ``-m`` and a module, then its arguments.
        ps: How many parameter servers.
        workers: How many workers, in addition to the chief.
        chief: Whether there is a task of that name; without it worker 0 is the chief.
        evaluator: Whether there is an evaluator, which belongs to no cluster.
        restarts: Most restarts of one task within `restart_window_secs`.
        restart_window_secs: Restarts longer ago do not count, in seconds.
        grace_secs: How long chief and workers may take to end after SIGTERM, in seconds; then they are killed.
        exit_secs: How long parameter servers and the evaluator may take to end by themselves after the job, in
            seconds, and parameter servers after SIGTERM.
        log_dir: Where each task gets a file of its own, such as ``worker-0.log``, that is appended to; or None.
        environ: The environment of all tasks but ``TF_CONFIG``; by default this process's own.
        stdout: File descriptor for what tasks print on their standard output, each line with the task's name before
            it. A thread writes there, so it may block; it stays open.
        stderr: The same for their error output, and for what the launcher itself has to tell.
        handle_signals: Whether SIGINT, SIGTERM and SIGHUP to this process end the cluster in order, and a second one
            kills. Only in the main thread; a signal that is ignored stays ignored.
        emit: Called on the loop with what happens: ``launch.started``, ``launch.restarting``, ``launch.ended``,
            ``launch.failed``, ``launch.over``, ``launch.stopping``, ``launch.killed``. The data of the first four names
            the `task`, that of the last two the `tasks`.

    Attributes:
        tasks: All tasks by name, in the order in which they are started.
        cluster: The addresses by role, as they stand in ``TF_CONFIG``.
        exit_status: What to exit with, once everything has ended: 0; the status of the task that failed for good;
            128 + n after signal n.

    Raises:
        ValueError: A number is negative, or there is neither a chief nor a worker.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        ps: int = 0,
        workers: int = 0,
        chief: bool = True,
        evaluator: bool = False,
        restarts: int = 3,
        restart_window_secs: float = 300.0,
        grace_secs: float = 30.0,
        exit_secs: float = 5.0,
        log_dir: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        stdout: int = 1,
        stderr: int = 2,
        handle_signals: bool = False,
        emit: EventSink | None = None,
    ) -> None:
        for name, number in (("ps", ps), ("workers", workers), ("restarts", restarts), ("grace_secs", grace_secs)):
            if number < 0:
                raise ValueError(f"{name} is {number}; it must be 0 or more")
        if not chief and workers == 0:
            raise ValueError("there is nobody to train: launch a chief, or at least one worker")
        if not program:
            raise ValueError("there is no program to run")
        self.program = tuple(program)
        self.grace_secs = grace_secs
        self.exit_secs = exit_secs
        self.log_dir = Path(log_dir) if log_dir is not None else None
        everybody = members(ps=ps, workers=workers, chief=chief, evaluator=evaluator)
        self.tasks: Mapping[str, LaunchedTask] = {task.name: task for task in everybody}
        self.cluster: dict[str, list[str]] = {}
        self.exit_status: int | None = None
        self._budgets = {name: RestartBudget(restarts, restart_window_secs) for name in self.tasks}
        self._environ = dict(os.environ if environ is None else environ)
        self._descriptors = (stdout, stderr)
        self._handle_signals = handle_signals
        self._emit = emit
        self._status: int | None = None  # what decides how this ends: the first failure, or the first signal
        self._ending = self._killing = self._signalled = False
        self._wake = asyncio.Event()
        self._host: asyncio.Task[int] | None = None
        self._outputs: Outputs
        self._guard: Guard

    # ------------------------------------------------------------------------------------------------ for users

    async def run(self) -> int:
        """Start everything, and return `exit_status` when everything has ended.

        Cancelling it ends everything in order first; a second time, at once.
        """
        async with self:
            return await self.wait()

    async def wait(self) -> int:
        """Wait until everything has ended; `exit_status`. Cancelling it changes nothing."""
        if self._host is None:
            raise RuntimeError("the launcher was not entered: use `async with`, or `run`")
        return await asyncio.shield(self._host)

    def request_stop(self, status: int = 0) -> None:
        """End everything in order; on the loop. A job that is ending already goes on ending.

        Args:
            status: What `exit_status` becomes.
        """
        if self._status is None:
            self._status = status
        if not self._ending:
            live = [task.name for task in self.tasks.values() if not task.ended]
            self._tell("launch.stopping", f"ending {', '.join(live)}", tasks=live)
        self._end()

    def kill(self) -> None:
        """End everything at once, by SIGKILL; on the loop."""
        if self._status is None:
            self._status = 128 + signal.SIGKILL
        live = [task.name for task in self.tasks.values() if not task.ended]
        if not self._killing and live:
            self._tell("launch.killed", f"killing {', '.join(live)}", level="warning", tasks=live)
        self._killing = True
        self._end()
        for task in self.tasks.values():
            if task.process is not None:
                task.process.kill()

    async def __aenter__(self) -> Self:
        if self._host is not None:
            raise RuntimeError("a launcher can be entered once: make another one")
        if self.log_dir is not None:
            await asyncio.to_thread(self.log_dir.mkdir, parents=True, exist_ok=True)
        self._host = asyncio.create_task(self._supervise(), name="launcher")
        self._host.add_done_callback(lambda _: self._wake.set())
        try:
            await self._until(lambda: self._started() or self._has_ended())
        except BaseException:
            await self._leave()
            raise
        if self._host.done():
            self._host.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        assert self._host is not None
        if not self._has_ended() and not self._ending:
            self.request_stop()
        cancelled: asyncio.CancelledError | None = None
        while not self._host.done():
            try:
                await asyncio.wait([self._host])
            except asyncio.CancelledError as error:
                cancelled = error
                self.kill()
        if cancelled is not None:
            raise cancelled
        self._host.result()

    def _started(self) -> bool:
        return all(task.starts or task.ended for task in self.tasks.values())

    def _has_ended(self) -> bool:
        return self._host is not None and self._host.done()

    # ------------------------------------------------------------------------------------------------ the run

    async def _supervise(self) -> int:
        signals = _Signals(self._signal) if self._handle_signals else None
        try:
            alone = len(self.tasks) == 1  # needs no cluster
            listening = [task for task in self.tasks.values() if task.role != "evaluator" and not alone]
            with PortReservation(len(listening)) as ports:
                for task, address in zip(listening, ports.addresses, strict=True):
                    task.address = address
                    self.cluster.setdefault(task.role, []).append(address)
                self._outputs = Outputs(
                    tuple(self.tasks),
                    stdout=self._descriptors[0],
                    stderr=self._descriptors[1],
                    log_dir=self.log_dir,
                    environ=self._environ,
                )
                try:
                    await self._run()
                finally:
                    await self._write_the_rest()
        finally:
            if signals is not None:
                signals.restore()
        self.exit_status = self._status or 0
        return self.exit_status

    async def _run(self) -> None:
        self._guard = Guard()
        try:
            async with asyncio.TaskGroup() as keepers:
                for task in self.tasks.values():
                    keepers.create_task(self._keep(task), name=f"launcher {task.name}")
                everybody = self.tasks.values()
                await self._until(lambda: self._ending or all_ended(task for task in everybody if task.trains))
                if not self._ending:
                    self._tell("launch.over", "the job is over")
                    self._end()
                    await self._until(lambda: self._status is not None or all_ended(everybody), self.exit_secs)
                await self._terminate([task for task in everybody if task.role != "ps"], self.grace_secs)
                await self._terminate([task for task in everybody if task.role == "ps"], self.exit_secs)
        except BaseExceptionGroup as group:  # of the launcher itself, which could not start a process for instance
            raise group.exceptions[0] from None
        except asyncio.CancelledError:  # the loop is being closed: nobody must wait for a terminal
            self._killing = True
            raise
        finally:
            await asyncio.to_thread(self._guard.close)

    async def _keep(self, task: LaunchedTask) -> None:
        """Run one task, again and again, until it has ended for good."""
        pause_secs: float | None = 0.0
        while pause_secs is not None and not self._ending:
            code = await self._run_once(task)
            pause_secs = self._after(task, code)
            if pause_secs is not None:
                await self._until(lambda: self._ending, pause_secs)
        task.ended = True
        self._wake.set()

    async def _run_once(self, task: LaunchedTask) -> int:
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        try:
            process = Process(
                [sys.executable, *self.program],
                self._guard,
                stdout=write_out,
                stderr=write_err,
                environ=task.environment(self._environ, self.cluster),
            )
        except BaseException:
            os.close(read_out)
            os.close(read_err)
            raise
        finally:
            os.close(write_out)
            os.close(write_err)
        pipes = self._outputs.attach(task.name, read_out, read_err)
        task.process, task.pid, task.returncode = process, process.pid, None
        task.starts += 1
        self._tell(
            "launch.started", f"{task.name} is process {task.pid}", task=task.name, pid=task.pid, starts=task.starts
        )
        self._wake.set()
        try:
            await process.wait()
        finally:
            process.kill()  # nothing, except where this was cancelled
            task.returncode = process.reap()
            task.process = None
            pipes.close()
        return task.returncode

    def _after(self, task: LaunchedTask, code: int) -> float | None:
        """Decide what follows the end of a task: the pause before its restart in seconds, or None for no restart."""
        how = describe_end(code)
        facts: dict[str, Any] = {"task": task.name, "pid": task.pid, "returncode": code}
        if code == 0 or self._ending:
            self._tell("launch.ended", f"{task.name} {how}", **facts)
            return None
        budget = self._budgets[task.name]
        pause_secs = None
        if 0 < code < RETRYABLE_STATUS:
            reason = "which is final"
        else:
            pause_secs = budget.spend(time.monotonic())
            reason = f"and {budget.spent} restarts within {budget.window_secs:g} s are used up"
        if pause_secs is None:
            self._fail(task, code, f"{task.name} {how}, {reason}: everything ends", facts)
            return None
        text = f"{task.name} {how}: restart {budget.spent} of {budget.restarts} in {pause_secs:g} s"
        self._tell("launch.restarting", text, level="warning", pause_secs=pause_secs, **facts)
        return pause_secs

    def _fail(self, task: LaunchedTask, code: int, text: str, facts: dict[str, Any]) -> None:
        last = self._outputs.last_lines(task.name)
        if last:
            text += "\n".join([f"; the last lines of {task.name}:", *(f"    {line}" for line in last)])
        self._tell("launch.failed", text, level="error", last_lines=last, **facts)
        self._status = exit_status(code)
        self._end()

    async def _terminate(self, tasks: Sequence[LaunchedTask], secs: float) -> None:
        """SIGTERM to these, and SIGKILL to those that still run after so many seconds."""
        for task in tasks:
            if task.process is not None:
                task.process.terminate()
        await self._until(lambda: self._killing or all_ended(tasks), secs)
        for task in tasks:
            if task.process is not None and task.process.returncode is None:
                if not self._killing:
                    text = f"{task.name} did not end within {secs:g} s after SIGTERM: killed"
                    self._tell("launch.killed", text, level="warning", tasks=[task.name])
                task.process.kill()
        await self._until(lambda: all_ended(tasks))

    def _end(self) -> None:
        self._ending = True
        self._outputs.lift_limit()
        self._wake.set()

    async def _write_the_rest(self) -> None:
        """Wait until everything is written that came: for ever after the job, bounded after a signal."""
        self._outputs.writer.finish()
        ended = self._outputs.writer.ended
        ended.add_done_callback(lambda _: self._wake.set())
        await self._until(lambda: ended.done() or self._killing, self.grace_secs if self._signalled else None)
        await self._until(ended.done, _LAST_LINES_SECS)

    async def _until(self, condition: Callable[[], bool], timeout_secs: float | None = None) -> bool:
        """Wait for a condition that changes together with `_wake`; whether it came true in time."""
        try:
            async with asyncio.timeout(timeout_secs):
                while not condition():
                    self._wake.clear()  # no await since the condition was looked at: no change is missed
                    await self._wake.wait()
        except TimeoutError:
            pass
        return condition()

    # ------------------------------------------------------------------------------------------------ telling

    def _signal(self, number: int) -> None:
        # A second one does not wait, nor one that comes when only the last lines wait for somebody to take them.
        if self._signalled or all_ended(self.tasks.values()):
            self._status = self._status or 128 + number
            self.kill()
        else:
            self._signalled = True
            self._outputs.tell(f"{signal.Signals(number).name}: everything ends in order; a second one kills")
            self.request_stop(128 + number)

    def _tell(self, kind: str, text: str, *, level: Level = "info", **data: Any) -> None:
        self._outputs.tell(text)
        if self._emit is not None:
            self._emit(kind, text, level=level, **data)


class _Signals:
    """Handlers on the running loop, and those that they replaced."""

    def __init__(self, handle: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._before: dict[int, Any] = {}
        for number in _STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup, or in the background of a script
                self._loop.add_signal_handler(number, handle, number)
                self._before[number] = before

    def restore(self) -> None:
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before or signal.SIG_DFL)
