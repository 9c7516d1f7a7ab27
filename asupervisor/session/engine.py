"""How one plan runs: a compiled callable on TensorFlow's threads or in the caller's, or `Session.run`.

A tiny graph takes half the time, or a tenth, if its ops run one after the other in the thread that calls. Which is
better is measured where it may be tried: the closure waits for nothing outside of itself, calls no functions (their
bodies may run on other threads), is small, and quick to compile. Every run of the trial is one of the caller's own
runs, by one way or the other; nothing is run twice.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import denormals
from asupervisor.session.feeds import Args, RawFeed

#: A closure with more ops than this is never tried in the caller's thread.
LARGEST_TRIAL_OPS = 2000
#: Nor one whose compilation took longer, in seconds: it would have to be compiled again.
LONGEST_COMPILATION_SECS = 0.25
#: Nor a run that takes longer, in nanoseconds: handing ops to threads is a small part of it.
LONGEST_RUN_NS = 1_000_000
#: Runs before the trial, the last half of them timed; runs by each way in the trial.
WARM_UP_RUNS = 32
TRIAL_RUNS = 24
#: The caller's thread must save at least this part of the time.
WORTH_WHILE = 0.95
#: How often a run in the caller's thread is timed again, and how much longer it may take before a new trial.
CHECK_EVERY = 256
CHECK_FACTOR = 4
MOST_TRIALS = 16


class Way(enum.Enum):
    """How the next run goes."""

    NEW = "not compiled yet"
    SESSION_RUN = "by Session.run"
    POOL = "on TensorFlow's threads"
    INLINE = "in the caller's thread"
    WARM_UP = "on TensorFlow's threads, before a trial"
    TRIAL = "by turns"
    DROPPED = "its callables were released"


class Engine:
    """Runs one set of fetches with one set of feeds. Any thread, several at a time.

    Args:
        raw: The session.
        feeds: The tensors that are fed, in the order of the arguments.
        elements: The tensors and operations that are fetched.
        compiled: Whether compiled callables may be used at all.
        inline: True runs in the caller's thread where that is possible, False never, None finds out what is best.
        flushes: Whether floats are computed, so that denormals must be flushed in the caller's thread.
    """

    __slots__ = (
        "_count",
        "_elements",
        "_flushes",
        "_inline",
        "_inline_compiled",
        "_inline_median",
        "_lock",
        "_pool_compiled",
        "_raw",
        "_times",
        "_trials",
        "compiles",
        "fast",
        "feeds",
        "flushing",
        "left",
        "session",
        "way",
    )

    def __init__(
        self,
        raw: tf.compat.v1.Session,
        feeds: Sequence[tf.Tensor],
        elements: Sequence[Any],
        *,
        compiled: bool,
        inline: bool | None,
        flushes: Callable[[], bool],
    ) -> None:
        self._raw = raw
        self.feeds = tuple(feeds)
        self._elements = tuple(elements)
        self.compiles = compiled
        self._inline = inline
        self._flushes: Callable[[], bool] | bool = flushes
        self._lock = threading.Lock()
        self._pool_compiled: _tf.Compiled | None = None
        self._inline_compiled: _tf.Compiled | None = None
        self._count = 0
        self._trials = 0
        self._times: tuple[list[int], list[int]] = ([], [])
        self._inline_median = 0
        self.session: Any = None
        #: The handle of the callable that was settled on, or None: then `values` knows what to do.
        self.fast: int | None = None
        #: Whether denormals must be flushed around its call, and how many such calls remain until one is timed.
        self.flushing = False
        self.left = 0
        self.way = Way.NEW if compiled else Way.SESSION_RUN

    def drop(self) -> None:
        """Releases the callables; later runs go by `Session.run`."""
        with self._lock:
            self.way = Way.DROPPED
            self.fast = None
            self._pool_compiled = self._inline_compiled = None

    def was_released(self, error: tf.errors.OpError) -> bool:
        """Whether a run failed for no other reason than that `drop` came first; nothing was run then."""
        return self.way is Way.DROPPED and _tf.was_released(error)

    def session_run(self, feed_dict: Any) -> list[Any]:
        """All elements by `Session.run`, operations as None among them."""
        with self._raw.graph.as_default():  # variables can be keys only there
            values: list[Any] = self._raw.run(list(self._elements), feed_dict)
        return values

    def feed_dict(self, args: Args) -> Any:
        """What to feed `Session.run` for these arguments."""
        if isinstance(args, RawFeed):
            return args.feed_dict
        return dict(zip(self.feeds, args, strict=True))

    def values(self, args: Args) -> list[Any] | None:
        """Runs by whatever way is due; None if that is `Session.run`, which is the caller's to call."""
        if isinstance(args, RawFeed):
            return None
        if self.way is Way.NEW:
            self._compile()
        way, pool, inline = self.way, self._pool_compiled, self._inline_compiled
        if way is Way.INLINE and inline is not None:
            return self._check(inline, args)
        if way is Way.TRIAL and pool is not None and inline is not None:
            return self._try(pool, inline, args)
        if way is Way.WARM_UP and pool is not None:
            return self._warm_up(pool, args)
        if way is Way.POOL and pool is not None:
            return _run(pool, args)
        return None

    # ---------------------------------------------------------------------------------------- compilation

    def _compile(self) -> None:
        with self._lock:
            if self.way is not Way.NEW:
                return
            began = time.perf_counter()
            inline = bool(self._inline) and self._may_inline()
            compiled = self._compiled(inline)
            took = time.perf_counter() - began
            if compiled is None:
                self.way = Way.SESSION_RUN
                return
            self.session = compiled.session
            if inline:
                self._inline_compiled = compiled
                self._settle(Way.INLINE)
                return
            self._pool_compiled = compiled
            if self._inline is None and took < LONGEST_COMPILATION_SECS and self._may_inline():
                self.way = Way.WARM_UP
            else:
                self._settle(Way.POOL)

    def _may_inline(self) -> bool:
        if callable(self._flushes):
            self._flushes = self._flushes()
        return denormals.SUPPORTED or not self._flushes

    def _compiled(self, in_callers_thread: bool) -> _tf.Compiled | None:
        operations = [element for element in self._elements if isinstance(element, tf.Operation)]
        tensors = [element for element in self._elements if not isinstance(element, tf.Operation)]
        try:
            return _tf.compile_callable(self._raw, self.feeds, tensors, operations, in_callers_thread=in_callers_thread)
        except Exception:
            return None  # Session.run raises it, with all that it says about it

    def _settle(self, way: Way) -> None:
        self.way = way
        self.flushing = way is Way.INLINE and bool(self._flushes)
        self.left = CHECK_EVERY
        settled = self._inline_compiled if way is Way.INLINE else self._pool_compiled
        self.fast = settled.handle if settled is not None else None

    # ---------------------------------------------------------------------------------------------- trial

    def _check(self, inline: _tf.Compiled, args: tuple[Any, ...]) -> list[Any]:
        """A run in the caller's thread, timed: what is fed may have grown since the trial."""
        self.left = CHECK_EVERY
        began = time.perf_counter_ns()
        values = self._flushed(inline, args)
        took = time.perf_counter_ns() - began
        if self._inline is None and took > CHECK_FACTOR * self._inline_median and self._trials < MOST_TRIALS:
            with self._lock:
                if self.way is Way.INLINE and self._pool_compiled is not None:
                    self._count = 0
                    self._times = ([], [])
                    self.fast = None
                    self.way = Way.WARM_UP
        return values

    def _flushed(self, compiled: _tf.Compiled, args: tuple[Any, ...]) -> list[Any]:
        if not self._flushes:
            return _run(compiled, args)
        denormals.set_mode(denormals.FLUSHING)
        try:
            return _run(compiled, args)
        finally:
            denormals.set_mode(denormals.USUAL)

    def _warm_up(self, pool: _tf.Compiled, args: tuple[Any, ...]) -> list[Any]:
        began = time.perf_counter_ns()
        values = _run(pool, args)
        took = time.perf_counter_ns() - began
        count = self._count = self._count + 1
        if count > WARM_UP_RUNS // 2:
            self._times[0].append(took)
        if count >= WARM_UP_RUNS:
            self._begin_trial()
        return values

    def _begin_trial(self) -> None:
        with self._lock:
            if self.way is not Way.WARM_UP:
                return
            slow = _median(self._times[0]) > LONGEST_RUN_NS
            if not slow and self._inline_compiled is None:
                self._inline_compiled = self._compiled(True)
            if slow or self._inline_compiled is None:
                self._settle(Way.POOL)
                return
            self._trials += 1
            self._count = 0
            self._times = ([], [])
            self.way = Way.TRIAL

    def _try(self, pool: _tf.Compiled, inline: _tf.Compiled, args: tuple[Any, ...]) -> list[Any]:
        count = self._count = self._count + 1
        # Pairs, and the order within a pair turns round: what slows the machine down slows both.
        by_inline = (count % 4) in (1, 2)
        began = time.perf_counter_ns()
        values = self._flushed(inline, args) if by_inline else _run(pool, args)
        self._times[by_inline].append(time.perf_counter_ns() - began)
        if count >= 2 * TRIAL_RUNS:
            with self._lock:
                if self.way is Way.TRIAL:
                    by_pool, self._inline_median = (_median(times) for times in self._times)
                    better = self._inline_median < WORTH_WHILE * by_pool
                    self._times = ([], [])
                    self._settle(Way.INLINE if better else Way.POOL)
        return values


def _run(compiled: _tf.Compiled, args: tuple[Any, ...]) -> list[Any]:
    assert _tf.run_compiled is not None
    return _tf.run_compiled(compiled.session, compiled.handle, args, None)


def _median(times: Sequence[int]) -> int:
    return sorted(times)[len(times) // 2] if times else 0
