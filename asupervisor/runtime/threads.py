"""Side threads: own daemon threads for work that blocks on purpose.

Any number of pieces of work run at once, so none ever waits for another one. A thread that is done waits a while for
more, so that a feeder's or a writer's work does not pay for a new thread each time; then it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asupervisor.runtime.wakeup import Ending

Work = Callable[[], None]


class SideThreads:
    """A pool without a limit; idle threads are used again.

    Args:
        name: Threads are called by it and by the label of their work.
        idle_secs: How long a thread without work waits for more, in seconds.
    """

    def __init__(self, name: str = "side", *, idle_secs: float = 5.0) -> None:
        self.name = name
        self.closed = False
        self._idle_secs = idle_secs
        self._guard = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._gone: list[threading.Thread] = []  # they have left the pool, and end in this very moment
        self._ending = Ending()

    def submit(self, work: Work, label: str = "") -> None:
        """Start `work` now, on a thread of its own; any thread.

        Args:
            work: Called without arguments. It handles its own exceptions.
            label: Stands in the name of the thread while the work runs.

        Raises:
            RuntimeError: The pool is closed.
        """
        with self._guard:
            if self.closed:
                raise RuntimeError(f"side threads {self.name!r} are closed")
            worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _Worker(self)
                worker.give(work, label)
                worker.thread.start()
                self._workers.add(worker)
            else:
                worker.give(work, label)

    def busy(self) -> tuple[str, ...]:
        """Labels of the work that runs now, sorted; any thread."""
        with self._guard:
            return tuple(sorted(worker.label for worker in self._workers if worker.busy))

    def shutdown(self) -> None:
        """Accept nothing more and let each thread end after its work; waits for nothing; any thread."""
        with self._guard:
            self.closed = True
            idle, self._idle = self._idle, []
            if not self._workers:
                self._ending.signal()
        for worker in idle:
            worker.dismiss()

    def forget(self) -> None:
        """In the child of a fork there are no threads: forget them."""
        self.closed = True
        self._guard = threading.Lock()
        self._idle.clear()
        self._workers.clear()
        self._gone.clear()
        self._ending = Ending()
        self._ending.signal()

    async def aclose(self, timeout_secs: float) -> bool:
        """Let every thread end and wait for that.

        Args:
            timeout_secs: How long to wait, in seconds.

        Returns:
            Whether all have ended; `busy` names the others, which are daemons and end with their work.
        """
        self.shutdown()
        ended = await self._ending.wait(timeout_secs)
        with self._guard:
            gone, self._gone = self._gone, []
        for thread in gone:
            thread.join()  # microseconds: its last statement was to say that it is gone
        return ended

    # ------------------------------------------------------------------------------------- on a side thread

    def _rest(self, worker: _Worker) -> bool:
        """The worker's work is done: whether it may stay for more."""
        with self._guard:
            worker.busy = False
            if not self.closed:
                self._idle.append(worker)
            return not self.closed

    def _leave(self, worker: _Worker) -> bool:
        """The worker has waited long enough. False: work was given to it in this very moment, it must stay.

        A worker that is not among the idle ones has been taken out by `submit`, which gives it its work under the
        same lock, or by `shutdown`, which rings it; in both cases its wait is about to end.
        """
        with self._guard:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True

    def _ended(self, worker: _Worker) -> None:
        with self._guard:
            self._workers.discard(worker)
            self._gone = [thread for thread in self._gone if thread.is_alive()]
            self._gone.append(worker.thread)
            if self.closed and not self._workers:
                self._ending.signal()


async def on_a_thread_of_its_own(work: Work, label: str, timeout_secs: float) -> None:
    """Run `work` and wait for it; once the time is over, or cancelled, it goes on alone and holds nothing up.

    Args:
        work: Called without arguments. It handles its own exceptions.
        label: Stands in the name of the thread.
        timeout_secs: How long to wait, in seconds.
    """
    pool = SideThreads("asupervisor", idle_secs=0.0)
    pool.submit(work, label)
    await pool.aclose(timeout_secs)


class _Worker:
    """One thread. `gate` is a binary semaphore: released once for each piece of work, or to end."""

    def __init__(self, pool: SideThreads) -> None:
        self._pool = pool
        self._gate = threading.Lock()
        self._gate.acquire()
        self._work: Work | None = None
        self.label = ""
        self.busy = False
        self.thread = threading.Thread(target=self._main, name=pool.name, daemon=True)

    def give(self, work: Work, label: str) -> None:
        self.busy = True
        self.label = label
        self._work = work
        self.thread.name = f"{self._pool.name}: {label}" if label else self._pool.name
        self._gate.release()

    def dismiss(self) -> None:
        self._gate.release()

    def _main(self) -> None:
        try:
            while True:
                if not self._gate.acquire(timeout=self._pool._idle_secs):
                    if self._pool._leave(self):
                        return
                    self._gate.acquire()
                work, self._work = self._work, None
                if work is None:
                    return
                try:
                    work()
                except BaseException as error:
                    # Nobody awaits here: let the interpreter report it, and keep the thread usable.
                    threading.excepthook(
                        threading.ExceptHookArgs((type(error), error, error.__traceback__, self.thread))
                    )
                del work
                self.thread.name = self._pool.name
                if not self._pool._rest(self):
                    return
        finally:
            self._pool._ended(self)
