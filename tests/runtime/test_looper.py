"""Loopers: fixed boundaries, no bursts, no call after the stop, targets of every kind."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import tensorflow as tf

from asupervisor.errors import StopGraceExceeded
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.looper import LooperTask
from asupervisor.testing.clock import ManualClock


class Ticker:
    """A target that notes when it was called."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.began = clock.monotonic()
        self.times: list[float] = []
        self.work: Callable[[], None] = lambda: None

    async def __call__(self) -> None:
        self.times.append(round(self.clock.monotonic() - self.began, 6))
        self.work()


async def pass_time(clock: ManualClock, secs: float) -> tuple[float, ...]:
    """Move the clock, let the looper make its call, and wait until it sleeps again; for how long."""
    clock.jump(secs)
    return await clock.sleepers(1)


@pytest.fixture
async def coord() -> AsyncIterator[Coordinator]:
    coord = Coordinator()
    yield coord
    coord.request_stop()
    await asyncio.sleep(0)


@pytest.fixture
def ticker(clock: ManualClock) -> Ticker:
    return Ticker(clock)


# --------------------------------------------------------------------------------------------- TensorFlow's own rules


@pytest.mark.parametrize("way", ["args", "kwargs", "both"])
async def test_target_args(coord: Coordinator, way: str) -> None:
    """[testTargetArgs, testTargetKwargs, testTargetMixedArgs] Interval 0: four calls back to back, then the stop."""
    left = [3]

    def count_down(coord: Coordinator, left: list[int]) -> None:
        if not left[0]:
            coord.request_stop()
        else:
            left[0] -= 1

    given: dict[str, Any] = {
        "args": {"args": (coord, left)},
        "kwargs": {"kwargs": {"coord": coord, "left": left}},
        "both": {"args": (coord,), "kwargs": {"left": left}},
    }[way]
    looper = LooperTask.loop(coord, 0, count_down, **given)
    await coord.join([looper])
    assert left == [0]
    assert looper.calls == 4


async def test_args_need_a_target(coord: Coordinator) -> None:
    with pytest.raises(ValueError, match="target"):
        LooperTask(coord, 1, args=(1,))
    with pytest.raises(ValueError, match="target"):
        LooperTask(coord, 1, kwargs={"a": 1})


@pytest.mark.parametrize("foreign", [None, object(), tf.compat.v1.train.Coordinator()])
def test_coord_must_be_a_coordinator(foreign: object) -> None:
    with pytest.raises(ValueError, match="coord"):
        LooperTask(foreign, 1, print)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- boundaries


async def test_first_call_at_once_then_fixed_boundaries(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    await clock.sleepers(1)
    assert ticker.times == [0]
    ticker.work = lambda: clock.jump(3)  # a call takes three seconds: the next one is not later for that
    assert await pass_time(clock, 10) == (7,)
    ticker.work = lambda: None
    assert ticker.times == [0, 10]
    assert await pass_time(clock, 7) == (10,)
    assert ticker.times == [0, 10, 20]
    await clock.advance(40)
    assert ticker.times == [0, 10, 20, 30, 40, 50, 60]
    coord.request_stop()
    await looper.ended


async def test_missed_ticks_are_skipped(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    """TensorFlow makes up for them in a burst."""
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    await clock.sleepers(1)
    ticker.work = lambda: clock.jump(35)
    assert await pass_time(clock, 10) == (5,), "the next boundary is at 50: those at 20, 30 and 40 are gone"
    ticker.work = lambda: None
    assert ticker.times == [0, 10]
    await pass_time(clock, 5)
    assert ticker.times == [0, 10, 50]
    await pass_time(clock, 100)  # a machine that was asleep
    assert ticker.times == [0, 10, 50, 150]
    coord.request_stop()
    await looper.ended


async def test_a_call_that_ends_on_a_boundary(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    await clock.sleepers(1)
    ticker.work = lambda: clock.jump(10)
    assert await pass_time(clock, 10) == (10,)
    coord.request_stop()
    await looper.ended


@pytest.mark.parametrize("interval", [None, 0])
async def test_back_to_back(coord: Coordinator, interval: float | None) -> None:
    calls = 0

    async def target() -> None:
        nonlocal calls
        calls += 1
        if calls == 50:
            coord.request_stop()

    others = 0

    async def other() -> None:
        nonlocal others
        while not coord.should_stop():
            others += 1
            await asyncio.sleep(0)

    await asyncio.gather(LooperTask(coord, interval, target).run(), other())
    assert calls == 50
    assert others > 20, "a looper without an interval must not keep the loop to itself"


@pytest.mark.parametrize("interval", [-1, -0.001])
def test_negative_intervals(interval: float) -> None:
    with pytest.raises(ValueError, match="timer_interval_secs"):
        LooperTask(Coordinator(), interval, print)


# -------------------------------------------------------------------------------------------------------------- stop


async def test_no_call_when_the_stop_was_requested(coord: Coordinator) -> None:
    called = []

    class Looper(LooperTask):
        def start_loop(self) -> None:
            called.append("start")

        def run_loop(self) -> None:
            called.append("run")

        def stop_loop(self) -> None:
            called.append("stop")

    coord.request_stop()
    await Looper(coord, 1).run()
    assert called == []


async def test_the_stop_ends_the_wait_at_once(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    looper = LooperTask(coord, 3600, ticker, clock=clock).start()
    await clock.sleepers(1)
    await asyncio.to_thread(coord.request_stop)
    async with asyncio.timeout(20):
        await looper.ended
    assert ticker.times == [0]
    assert clock.remaining() == ()


async def test_no_call_after_the_stop(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    """The stop and the tick fall into one moment: no call."""
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    await clock.sleepers(1)
    clock.jump(10)
    coord.request_stop()
    await looper.ended
    assert ticker.times == [0]


async def test_stop_while_a_call_runs(coord: Coordinator) -> None:
    entered, go = threading.Event(), threading.Event()

    def target() -> None:
        entered.set()
        go.wait()

    looper = LooperTask.loop(coord, 0, target)
    await asyncio.to_thread(entered.wait)
    coord.request_stop()
    await asyncio.sleep(0.01)
    assert not looper.ended.done(), "a call that has begun is not cut short"
    go.set()
    await coord.join([looper])
    assert looper.calls == 1


# ----------------------------------------------------------------------------------------------------------- targets


async def test_where_targets_run(coord: Coordinator) -> None:
    loop_thread = threading.get_ident()
    ran: dict[str, bool] = {}

    def note(name: str) -> None:
        ran[name] = threading.get_ident() == loop_thread

    async def coroutine_function() -> None:
        note("coroutine function")

    def plain() -> None:
        note("plain")

    class AsyncCallable:
        async def __call__(self) -> None:
            note("async callable")

        async def method(self) -> None:
            note("async method")

    def returns_an_awaitable() -> Any:
        note("returns an awaitable")
        return coroutine_function()

    targets = {
        "coroutine function": coroutine_function,
        "plain": plain,
        "async callable": AsyncCallable(),
        "async method": AsyncCallable().method,
        "partial": functools.partial(functools.partial(note), "partial"),
        "async partial": functools.partial(coroutine_function),
        "returns an awaitable": returns_an_awaitable,
    }
    loopers = [LooperTask.loop(coord, 3600, target) for target in targets.values()]
    while any(looper.calls == 0 for looper in loopers) or len(ran) < 6:
        await asyncio.sleep(0.001)
    coord.request_stop()
    await coord.join(loopers)
    assert ran == {
        "coroutine function": True,
        "plain": False,
        "async callable": True,
        "async method": True,
        "partial": False,
        "returns an awaitable": False,
    }


async def test_names(coord: Coordinator) -> None:
    def print_loss() -> None:
        pass

    assert LooperTask(coord, 1, print_loss).name == "loop-print_loss"
    assert LooperTask(coord, 1, print_loss, name="mine").name == "mine"
    assert LooperTask(coord, 1).name == "loop-LooperTask"


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (lambda a: None, None, None),
        (lambda: None, (1,), None),
        (lambda a, *, b: None, (1,), {"c": 2}),
        (lambda a: None, (1,), {"a": 2}),
        (functools.partial(lambda a, b: None, 1), None, None),
    ],
)
async def test_wrong_arity_is_told_at_once(coord: Coordinator, target: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="cannot be called with"):
        LooperTask(coord, 1, target, args, kwargs)


async def test_not_callable(coord: Coordinator) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        LooperTask(coord, 1, 3)  # type: ignore[arg-type]


async def test_builtins_that_do_not_tell(coord: Coordinator) -> None:
    LooperTask(coord, 1, dict.fromkeys, ((),))
    LooperTask(coord, 1, print, ("text",))


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_subclass_methods(coord: Coordinator, kind: str) -> None:
    order: list[str] = []

    class Async(LooperTask):
        async def start_loop(self) -> None:
            order.append("start")

        async def run_loop(self) -> None:
            order.append("run")
            if self.calls == 3:
                coord.request_stop()

        async def stop_loop(self) -> None:
            order.append("stop")

    class Plain(LooperTask):
        def start_loop(self) -> None:
            order.append("start")

        def run_loop(self) -> None:
            order.append("run")
            if self.calls == 3:
                coord.request_stop()

        def stop_loop(self) -> None:
            order.append("stop")

    looper = (Async if kind == "async" else Plain)(coord, 0)
    await looper.start().ended
    assert order == ["start", "run", "run", "run", "stop"]


async def test_a_subclass_may_call_up(coord: Coordinator) -> None:
    called = []

    class Looper(LooperTask):
        def run_loop(self) -> Any:
            result = super().run_loop()
            coord.request_stop()
            return result

    await Looper(coord, 0, called.append, ("x",)).run()
    assert called == ["x"]


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_an_error_goes_to_the_coordinator_and_skips_stop_loop(coord: Coordinator, kind: str) -> None:
    error = ValueError("target")
    stopped = []

    async def fails() -> None:
        raise error

    def fails_plainly() -> None:
        raise error

    class Looper(LooperTask):
        def stop_loop(self) -> None:
            stopped.append(1)

    looper = Looper(coord, 0, fails if kind == "async" else fails_plainly).start()
    with pytest.raises(ValueError, match="target") as caught:
        await coord.join([looper])
    assert caught.value is error
    assert stopped == []
    assert coord.should_stop()


async def test_a_clean_error_ends_cleanly(coord: Coordinator) -> None:
    def at_the_end() -> None:
        raise tf.errors.OutOfRangeError(None, None, "the end")

    await coord.join([LooperTask.loop(coord, 0, at_the_end)])
    assert coord.should_stop()


@pytest.mark.parametrize("error", [StopIteration(3), asyncio.CancelledError()])
async def test_errors_that_cannot_cross_are_boxed(coord: Coordinator, error: BaseException) -> None:
    """Out of a thread, a StopIteration makes `run_in_executor` hang for ever."""

    def raises() -> None:
        raise error

    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError) as caught:
            await coord.join([LooperTask.loop(coord, 0, raises)])
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_interrupts_of_a_plain_target(coord: Coordinator, error: type[BaseException]) -> None:
    def raises() -> None:
        raise error

    looper = LooperTask(coord, 0, raises)
    with pytest.raises(error):
        await looper._run_on_thread(raises)
    assert looper._threads is not None
    looper._threads.shutdown()


# --------------------------------------------------------------------------------------------------------- its life


async def test_cancel_is_no_error(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    await clock.sleepers(1)
    looper.cancel()
    await looper.ended
    assert not coord.should_stop()
    await coord.join([looper])


async def test_started_once(coord: Coordinator, clock: ManualClock, ticker: Ticker) -> None:
    looper = LooperTask(coord, 10, ticker, clock=clock).start()
    with pytest.raises(RuntimeError, match="started already"):
        looper.start()
    await clock.sleepers(1)
    looper.cancel()
    await looper.ended


def test_start_needs_a_loop() -> None:
    with pytest.raises(RuntimeError):
        LooperTask(Coordinator(), 1, print).start()


async def test_join_names_a_stuck_thread(coord: Coordinator) -> None:
    """A plain target that never returns: named, and not waited for by the end of the interpreter."""
    entered, go = threading.Event(), threading.Event()

    def stuck() -> None:
        entered.set()
        go.wait()

    looper = LooperTask.loop(coord, 1, stuck)
    await asyncio.to_thread(entered.wait)
    coord.request_stop()
    with pytest.raises(StopGraceExceeded, match="loop-stuck"):
        await coord.join([looper], stop_grace_period_secs=0.01)
    threads = [thread for thread in threading.enumerate() if "stuck" in thread.name]
    assert threads
    assert all(thread.daemon for thread in threads)
    assert not looper.ended.done(), "it is not given up silently"
    go.set()
    async with asyncio.timeout(20):
        await looper.ended


async def test_a_second_cancellation_lets_go_of_the_thread(coord: Coordinator) -> None:
    entered, go = threading.Event(), threading.Event()

    def stuck() -> None:
        entered.set()
        go.wait()

    looper = LooperTask(coord, 1, stuck)
    task = asyncio.create_task(looper.run())
    await asyncio.to_thread(entered.wait)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


async def test_an_error_after_a_cancellation_is_not_lost(coord: Coordinator) -> None:
    entered, go = threading.Event(), threading.Event()

    def fails_late() -> None:
        entered.set()
        go.wait()
        raise ValueError("late")

    looper = LooperTask.loop(coord, 1, fails_late)
    await asyncio.to_thread(entered.wait)
    looper.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(ValueError, match="late"):
        await coord.join([looper])


async def test_forty_plain_loops_at_once(coord: Coordinator) -> None:
    """They do not share anyio's default limit of forty threads, and do not use it up."""
    barrier = threading.Barrier(46)
    loopers = [LooperTask.loop(coord, 3600, barrier.wait) for _ in range(45)]
    async with asyncio.timeout(20):
        await anyio.to_thread.run_sync(barrier.wait)
    coord.request_stop()
    await coord.join(loopers)


async def test_run_sync_is_a_collaborator(coord: Coordinator) -> None:
    ran = []

    async def run_sync(function: Callable[[], Any]) -> Any:
        ran.append(function.__qualname__)
        return function()

    def target() -> None:
        coord.request_stop()

    await LooperTask(coord, 1, target, run_sync=run_sync).run()
    assert len(ran) == 1
    assert ran[0].endswith("target"), "threads are called by it"
