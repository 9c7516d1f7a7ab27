"""Who blocked the event loop, and for how long: measured so that a busy machine is not blamed on the program.

A *lane* is a thread that runs an event loop. While one callback runs, a watchdog thread looks at it every few
milliseconds and divides what passed since its last look:

* processor time that the loop's thread used in the meantime was used by the program;
* of the rest, time in which the thread was ready but no processor was free (the kernel counts it, on Linux), in
  which another one of Python's threads was (it may hold the lock that the loop's thread waits for), and time by which
  the watchdog came late though a processor was free (another thread held the interpreter), is not charged;
* what then remains, the thread spent waiting inside a call: a file, a lock, a TensorFlow run.

The stack at that moment decides who is charged. Only callbacks of asyncio's own loops are seen; uvloop has its
handles in C.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from asupervisor.runtime.frames import frame_of

_clock = time.perf_counter
_THREAD_START = threading.Thread.start.__code__


@dataclass(frozen=True, slots=True)
class Stall:
    """One callback that kept the loop from turning.

    Attributes:
        secs: What is charged to the program, in seconds.
        wall_secs: How long the callback took by the clock, in seconds.
        stack: Formatted stack of the loop's thread, taken in the middle of it.
    """

    secs: float
    wall_secs: float
    stack: str

    def __str__(self) -> str:
        return (
            f"the event loop stood still for {self.secs * 1000:.0f} ms "
            f"({self.wall_secs * 1000:.0f} ms by the clock), here:\n{self.stack}"
        )


class _Lane:
    """One loop's thread. `began` is written by that thread only, the rest by the watchdog only."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.ident = threading.get_ident()
        self.native_id = threading.get_native_id()
        self.began: float | None = None
        self.seen: float | None = None  # `began` of the callback that the watchdog looks at
        self.used = 0.0
        self.waited = 0.0
        self.worst = 0.0
        self.stack: traceback.StackSummary | None = None
        self.looked = 0.0
        self.cpu = 0.0
        self.own_queued = 0.0
        self.queued: dict[int, float] = {}
        try:
            self.cpu_clock: int | None = time.pthread_getcpuclockid(self.ident)
        except (AttributeError, OSError):  # not on this platform
            self.cpu_clock = None

    def cpu_secs(self) -> float:
        if self.cpu_clock is None:
            return 0.0
        try:
            return time.clock_gettime(self.cpu_clock)
        except OSError:  # the thread has ended
            return self.cpu

    def own_wait_secs(self) -> float:
        """Seconds that the thread was ready to run without a processor, since the last call."""
        before, now = self.own_queued, _queued_secs(self.native_id)
        if now is None:
            return 0.0
        self.own_queued = now
        return now - before


def _queued_secs(native_id: int) -> float | None:
    """Seconds that a thread of this process was ready to run while no processor was free; None if unknown."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or the thread has ended
        return None


def _all_queued_secs() -> dict[int, float]:
    """The same of every thread that Python started; TensorFlow's own may be hundreds, and hold no lock of ours."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.native_id is not None]
    queued = {native_id: _queued_secs(native_id) for native_id in ids}
    return {native_id: secs for native_id, secs in queued.items() if secs is not None}


class StallWatch:
    """Watches every asyncio loop of the process; see the module.

    Args:
        limit_secs: What a callback may take, in seconds.
        blame: Whether the given stack (innermost frame) is to be charged; default: every stack.
        look_secs: Distance of two looks, in seconds.
    """

    def __init__(
        self,
        limit_secs: float = 0.05,
        blame: Callable[[FrameType], bool] | None = None,
        look_secs: float = 0.005,
    ) -> None:
        self.limit_secs = limit_secs
        self.stalls: list[Stall] = []
        self._blame = blame or (lambda _: True)
        self._look_secs = look_secs
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()  # held for one look, by the watchdog or by `take`
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._original: Callable[[asyncio.Handle], None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._original = original = asyncio.Handle._run
        # Thread identifiers are used again after a thread has ended, thread-local storage is not.
        local = threading.local()

        def run(handle: asyncio.Handle) -> None:
            try:
                lane: _Lane = local.lane
            except AttributeError:
                lane = local.lane = _Lane()
                self._lanes.append(lane)
            lane.began = _clock()
            try:
                original(handle)
            finally:
                lane.began = None

        asyncio.Handle._run = run  # type: ignore[method-assign, assignment]
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        if self._original is not None:
            asyncio.Handle._run = self._original  # type: ignore[method-assign, assignment]
            self._original = None
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self) -> Sequence[Stall]:
        """The stalls since the last call; between two callbacks of the loop in question."""
        with self._lock:
            self._look_at_all(_clock(), 0.0)
            taken, self.stalls = self.stalls, []
        return taken

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the length of a `with` block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _watch(self) -> None:
        last = _clock()
        while not self._ended.wait(self._look_secs):
            with self._lock:
                now = _clock()
                self._look_at_all(now, max(0.0, now - last - self._look_secs))
            last = _clock()  # what the look itself took is no lateness

    def _look_at_all(self, now: float, late: float) -> None:
        for lane in tuple(self._lanes):
            self._look(lane, now, late)
            if not lane.thread.is_alive():
                self._lanes.remove(lane)

    def _look(self, lane: _Lane, now: float, late: float) -> None:
        """Charge the time between two looks."""
        began = lane.began
        if began is None or began != lane.seen:
            self._conclude(lane, now)
        if began is None:
            return
        frame = frame_of(lane.ident)
        if began != lane.seen:
            # All of its time so far lies after the last look.
            lane.seen, lane.used, lane.waited, lane.worst, lane.stack = began, 0.0, 0.0, 0.0, None
            lane.looked, lane.cpu, lane.queued = now, lane.cpu_secs(), {}
            lane.own_wait_secs()
            return
        elapsed = now - lane.looked
        cpu, lane.cpu, lane.looked = lane.cpu, lane.cpu_secs(), now
        own_wait = lane.own_wait_secs()
        if frame is None or not self._blame(frame):
            lane.queued = {}
            return
        queued, lane.queued = lane.queued, _all_queued_secs()
        if lane.queued and not queued:
            return  # nothing to compare with: the next look will have it
        waits = {key: secs - queued[key] for key, secs in lane.queued.items() if key in queued}
        waits.pop(lane.native_id, None)
        # The watchdog came late because no processor was free for it, or because another thread held the interpreter.
        held = late - waits.pop(threading.get_native_id(), 0.0)
        used = min(lane.cpu - cpu, elapsed)
        # May be negative: the kernel counts a wait for a processor when it is over, so it belongs to earlier looks.
        waited = elapsed - own_wait - max(held, *waits.values(), 0.0)
        lane.used += used
        lane.waited += waited
        charge = max(used, waited)
        if charge >= lane.worst:
            lane.worst = charge
            # The lines are read from the sources only where they are printed.
            lane.stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)

    def _conclude(self, lane: _Lane, now: float) -> None:
        """The callback that was looked at is over."""
        if lane.seen is None:
            return
        began, lane.seen = lane.seen, None
        charged = max(lane.used, lane.waited)
        if charged > self.limit_secs and lane.stack is not None:
            charged = max(lane.used, lane.waited - lane.own_wait_secs())
            if charged > self.limit_secs:
                self.stalls.append(Stall(charged, now - began, _format(lane.stack)))


def _format(stack: traceback.StackSummary) -> str:
    """The frames inside the callback, the innermost one last."""
    inner = list(itertools.takewhile(lambda entry: entry.filename != __file__, stack))
    if inner:
        inner.pop()  # asyncio.Handle._run
    return "".join(traceback.StackSummary.from_list(inner[::-1]).format())


def blame_package(*directories: str) -> Callable[[FrameType], bool]:
    """A `blame` that charges stacks with code from these directories in them, constructors apart.

    This package's own frames, which are in every stack, do not count. Nor does the start of a thread: it takes
    microseconds, and where it takes longer, no processor was free for the new thread.

    Args:
        directories: Paths of packages. An object's constructor is synchronous by contract, and so is what it
            costs: a frame named ``__init__`` is the caller's business.
    """
    here = str(Path(__file__).resolve().parent) + "/"
    prefixes = tuple(str(Path(directory).resolve()) + "/" for directory in directories)
    known: dict[CodeType, bool] = {}

    def blamed(frame: FrameType | None) -> bool:
        found = False
        while frame is not None:
            code = frame.f_code
            if code is _THREAD_START:
                return False
            ours = known.get(code)
            if ours is None:
                file = code.co_filename
                ours = known[code] = file.startswith(prefixes) and not file.startswith(here)
            if ours:
                if code.co_name == "__init__":
                    return False
                found = True
            frame = frame.f_back
        return found

    return blamed
