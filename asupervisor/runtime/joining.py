"""Waiting for tasks and threads to end, without polling them from the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import anyio


class Joinable(Protocol):
    """What a join asks of a service record."""

    name: str

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when it has ended."""

    @property
    def running_in(self) -> asyncio.Task[Any] | None:
        """The task that it runs in, once it has started."""

    def cancel(self) -> object:
        """End it by cancellation; on the loop thread."""


_LIVE_TASKS: set[asyncio.Task[Any]] = set()


def keep(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Refer to a task until it has ended, since asyncio itself refers to tasks only weakly."""
    task.add_done_callback(_LIVE_TASKS.discard)  # first: an interrupt in between leaves nothing behind
    _LIVE_TASKS.add(task)
    return task


def cancel_again(task: asyncio.Task[Any] | None) -> None:
    """Have a cancellation that we took delivered again at the next await.

    Not before CPython 3.13, where it can leave a stray CancelledError behind after `asyncio.timeout`; and not
    inside a cancelled anyio scope, which delivers again by itself.
    """
    if (
        sys.version_info >= (3, 13)
        and task is not None
        and task.cancelling()
        and anyio.current_effective_deadline() != -float("inf")
    ):
        task.uncancel()
        task.cancel()


Worker = threading.Thread | asyncio.Task[Any] | Joinable


def _name_of(worker: Worker) -> str:
    return worker.get_name() if isinstance(worker, asyncio.Task) else worker.name


def still_running(workers: Iterable[Worker]) -> list[str]:
    """The names of those that have not ended, sorted."""
    return sorted(_name_of(worker) for worker in workers if not _has_ended(worker))


def _has_ended(worker: Worker) -> bool:
    if isinstance(worker, threading.Thread):
        return not worker.is_alive()
    return worker.done() if isinstance(worker, asyncio.Task) else worker.ended.done()


async def outlast(workers: list[Worker], stopped: asyncio.Future[None], grace_secs: float) -> list[str]:
    """Wait for all workers, without limit until `stopped` is done and for the grace from then on.

    Tasks that outlive the grace are cancelled.

    Args:
        workers: Threads, tasks and service records.
        stopped: Done when a stop is requested.
        grace_secs: The grace, in seconds.

    Returns:
        The names of those that outlived it, sorted.
    """
    loop = asyncio.get_running_loop()
    me, here = asyncio.current_task(), threading.current_thread()
    ends: dict[asyncio.Task[Any] | Joinable, asyncio.Future[Any]] = {}
    threads: list[threading.Thread] = []
    for worker in workers:  # but for who is waiting here
        if isinstance(worker, threading.Thread):
            if worker.is_alive() and worker is not here:
                threads.append(worker)
        elif isinstance(worker, asyncio.Task):
            if worker is not me:
                ends[worker] = worker
        elif worker.running_in is not me or me is None:
            ends[worker] = worker.ended
    threads_gone = loop.create_future()
    if threads:
        watch = _ThreadWatch(threads, loop, threads_gone)
        watch.start()
    else:
        threads_gone.set_result(None)
    pending: set[asyncio.Future[Any]] = {end for end in ends.values() if not end.done()}
    if threads:
        pending.add(threads_gone)
    try:
        while pending and not stopped.done():
            await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            pending = {waited for waited in pending if not waited.done()}
        if pending:
            _, pending = await asyncio.wait(pending, timeout=grace_secs)
        stragglers = [worker for worker, end in ends.items() if not end.done()]
        late = [_name_of(worker) for worker in stragglers]
        late += [thread.name for thread in threads if thread.is_alive()]
        for worker in stragglers:
            worker.cancel()  # the record's own way where it has one: a service's end is then no error
        if stragglers:
            await asyncio.wait([ends[worker] for worker in stragglers], timeout=min(1.0, max(grace_secs, 0.1)))
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
