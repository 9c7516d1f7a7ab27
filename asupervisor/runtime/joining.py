"""Waiting for tasks and threads to end, without polling them from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class Joinable(Protocol):
    """What a join asks of a service record."""

    name: str

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that it runs in."""


Worker = threading.Thread | asyncio.Task[Any] | Joinable


def _name_of(worker: Worker) -> str:
    return worker.get_name() if isinstance(worker, asyncio.Task) else worker.name


def _task_of(worker: Worker) -> asyncio.Task[Any] | None:
    if isinstance(worker, threading.Thread):
        return None
    return worker if isinstance(worker, asyncio.Task) else worker.task


async def outlast(workers: list[Worker], wait_for_stop: Callable[[], Awaitable[Any]], grace_secs: float) -> list[str]:
    """Wait for all workers, without limit until `wait_for_stop` returns and for the grace from then on.

    Tasks that outlive the grace are cancelled.

    Args:
        workers: Threads, tasks and service records.
        wait_for_stop: Returns when a stop is requested.
        grace_secs: The grace, in seconds.

    Returns:
        The names of those that outlived it, sorted.
    """
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    tasks = {worker: task for worker in workers if (task := _task_of(worker)) is not None and task is not me}
    threads = [worker for worker in workers if isinstance(worker, threading.Thread) and worker.is_alive()]
    threads_gone = loop.create_future()
    if threads:
        watch = _ThreadWatch(threads, loop, threads_gone)
        watch.start()
    else:
        threads_gone.set_result(None)
    pending: set[asyncio.Future[Any]] = {task for task in tasks.values() if not task.done()}
    if threads:
        pending.add(threads_gone)
    try:
        if pending:
            stop = asyncio.ensure_future(wait_for_stop())
            try:
                while pending and not stop.done():
                    await asyncio.wait({*pending, stop}, return_when=asyncio.FIRST_COMPLETED)
                    pending = {waited for waited in pending if not waited.done()}
            finally:
                stop.cancel()
            if pending:
                _, pending = await asyncio.wait(pending, timeout=grace_secs)
        late = [_name_of(worker) for worker, task in tasks.items() if not task.done()]
        late += [thread.name for thread in threads if thread.is_alive()]
        stragglers = [task for task in tasks.values() if not task.done()]
        for task in stragglers:
            task.cancel()
        if stragglers:
            await asyncio.wait(stragglers, timeout=min(1.0, max(grace_secs, 0.1)))
        return sorted(late)
    finally:
        if threads:
            watch.give_up()


class _ThreadWatch(threading.Thread):
    """Joins threads so that the loop need not poll them."""

    def __init__(
        self, threads: list[threading.Thread], loop: asyncio.AbstractEventLoop, gone: asyncio.Future[None]
    ) -> None:
        super().__init__(name="asupervisor-join", daemon=True)
        self._threads = threads
        self._loop = loop
        self._gone = gone
        self._given_up = False

    def give_up(self) -> None:
        self._given_up = True

    def run(self) -> None:
        for thread in self._threads:
            while thread.is_alive() and not self._given_up:
                thread.join(0.05)
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # the loop is closed
            pass

    def _tell(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
