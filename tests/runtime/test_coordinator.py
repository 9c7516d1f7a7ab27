"""The stop state: TensorFlow's own rules for it, from tasks, real threads and signal handlers, and our mends.

The names in capitals and brackets are those of TensorFlow's own tests, whose rules these are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import tensorflow as tf

from asupervisor.errors import StopGraceExceeded, StopRequested, WrongEventLoop
from asupervisor.runtime import reports as module
from asupervisor.runtime.coordinator import Coordinator

Report = Callable[[Callable[[], object]], Awaitable[None]]


def end_of_input() -> BaseException:
    return tf.errors.OutOfRangeError(None, None, "the end")


@pytest.fixture(params=["task", "thread", "signal handler"])
def elsewhere(request: pytest.FixtureRequest) -> Report:
    """Calls a function from another task, from a real thread, or from a signal handler."""

    async def in_task(fn: Callable[[], object]) -> None:
        async def call() -> None:
            fn()

        await asyncio.create_task(call())

    async def in_thread(fn: Callable[[], object]) -> None:
        await asyncio.to_thread(fn)

    async def in_handler(fn: Callable[[], object]) -> None:
        called = asyncio.Event()
        loop = asyncio.get_running_loop()

        def handler(number: int, frame: object) -> None:
            try:
                fn()
            finally:
                loop.call_soon_threadsafe(called.set)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await called.wait()
        finally:
            signal.signal(signal.SIGUSR1, before)

    ways: dict[str, Report] = {"task": in_task, "thread": in_thread, "signal handler": in_handler}
    return ways[request.param]


@pytest.fixture
def worker() -> Iterator[Callable[..., threading.Thread]]:
    """Starts real threads, and sees to it that all have ended."""
    started: list[threading.Thread] = []

    def start(fn: Callable[..., object], *args: object) -> threading.Thread:
        thread = threading.Thread(target=fn, args=args, name=f"worker-{len(started)}", daemon=True)
        started.append(thread)
        thread.start()
        return thread

    yield start
    for thread in started:
        thread.join(20)
        assert not thread.is_alive(), f"{thread.name} is stuck"


# ------------------------------------------------------------------------------------------------- the stop flag


async def test_stop_api() -> None:
    """[testStopAPI]"""
    coord = Coordinator()
    assert not coord.should_stop()
    assert await coord.wait_for_stop(0.01) is False
    coord.request_stop()
    assert coord.should_stop()
    assert await coord.wait_for_stop(0.01) is True
    assert await coord.wait_for_stop() is True


async def test_stop_async(elsewhere: Report) -> None:
    """[testStopAsync] A wait that is under way ends with the stop, whoever asks for it."""
    coord = Coordinator()
    waiting = asyncio.create_task(coord.wait_for_stop())
    bounded = asyncio.create_task(coord.wait_for_stop(60))
    await asyncio.sleep(0)
    assert not coord.should_stop()
    assert not waiting.done()
    await elsewhere(coord.request_stop)
    assert coord.should_stop()
    assert await waiting is True
    assert await bounded is True


async def test_wait_for_stop_without_time() -> None:
    coord = Coordinator()
    assert await coord.wait_for_stop(0) is False
    assert await coord.wait_for_stop(-1) is False
    coord.request_stop()
    assert await coord.wait_for_stop(0) is True


async def test_wait_for_stop_is_cancellable_and_leaves_nothing() -> None:
    coord = Coordinator()
    task = asyncio.create_task(coord.wait_for_stop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not coord._waiters
    coord.request_stop()


async def test_request_stop_is_safe_where_locks_are_held() -> None:
    """A signal handler may run while this very thread is inside the coordinator, or logs."""
    coord = Coordinator(emit=lambda *args, **data: None)
    with coord._drain_lock:
        done = threading.Event()
        thread = threading.Thread(target=lambda: (coord.request_stop(OSError("x")), done.set()))
        thread.start()
        assert done.wait(20), "request_stop waited for a lock"
        thread.join()
    assert isinstance(coord.error, OSError)


async def test_requests_ring_once() -> None:
    """A storm of requests must not fill the loop's queue."""
    coord = Coordinator()
    loop = coord.bind()
    rings = 0
    original = loop.call_soon_threadsafe

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal rings
        rings += 1
        return original(*args, **kwargs)

    loop.call_soon_threadsafe = count  # type: ignore[method-assign]
    try:
        for _ in range(100):
            coord.request_stop()
        assert rings == 1
        await asyncio.sleep(0)
        coord.request_stop(OSError("later"))
        assert rings == 2
        await asyncio.sleep(0)
    finally:
        loop.call_soon_threadsafe = original  # type: ignore[method-assign]
    assert isinstance(coord.error, OSError)


async def test_stop_callbacks() -> None:
    coord = Coordinator()
    called: list[str] = []
    here = threading.get_ident()

    def fails() -> None:
        raise OSError("a callback")

    coord.add_stop_callback(lambda: called.append(f"first {threading.get_ident() == here}"))
    coord.add_stop_callback(fails)
    unwanted = lambda: called.append("unwanted")  # noqa: E731
    coord.add_stop_callback(unwanted)
    coord.add_stop_callback(lambda: called.append("last"))
    coord.remove_stop_callback(unwanted)
    coord.remove_stop_callback(unwanted)
    await asyncio.to_thread(coord.request_stop)
    await coord.wait_for_stop()
    await asyncio.sleep(0)
    assert called == ["first True", "last"]
    coord.request_stop()
    await asyncio.sleep(0)
    assert called == ["first True", "last"]
    coord.add_stop_callback(lambda: called.append("late"))
    await asyncio.sleep(0)
    assert called[-1] == "late"


# ---------------------------------------------------------------------------------------------------------- join


async def test_join() -> None:
    """[testJoin] It waits for tasks and threads, without a stop, and asks for none."""
    coord = Coordinator()
    go = threading.Event()
    ended: list[str] = []

    async def task() -> None:
        await asyncio.sleep(0.01)
        ended.append("task")
        go.set()

    def thread() -> None:
        go.wait()
        ended.append("thread")

    workers = [asyncio.create_task(task()), threading.Thread(target=thread), asyncio.create_task(asyncio.sleep(0))]
    workers[1].start()  # type: ignore[union-attr]
    await coord.join(workers)
    assert sorted(ended) == ["task", "thread"]
    assert not coord.should_stop()
    assert coord.joined


async def test_join_does_not_poll() -> None:
    """TensorFlow looks once a second: a join whose workers end returns up to a second late."""
    coord = Coordinator()
    began = time.perf_counter()
    for _ in range(5):
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        await coord.join([thread])
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("kind", ["tasks", "threads"])
async def test_join_all_registered(kind: str) -> None:
    """[testJoinAllRegistered] Each worker registers itself."""
    coord = Coordinator()
    go, registered, ended = threading.Event(), threading.Semaphore(0), []

    async def task() -> None:
        coord.register_thread(asyncio.current_task())  # type: ignore[arg-type]
        registered.release()
        while not go.is_set():
            await asyncio.sleep(0.001)
        ended.append(1)

    def thread() -> None:
        coord.register_thread(threading.current_thread())
        registered.release()
        go.wait()
        ended.append(1)

    workers: list[Any] = [
        asyncio.create_task(task()) if kind == "tasks" else threading.Thread(target=thread) for _ in range(3)
    ]
    for worker in workers:
        if kind == "threads":
            worker.start()
    for _ in range(3):
        await asyncio.to_thread(registered.acquire)
    joining = asyncio.create_task(coord.join())
    await asyncio.sleep(0.01)
    assert not joining.done()
    go.set()
    await joining
    assert len(ended) == 3


async def test_join_some_registered() -> None:
    """[testJoinSomeRegistered] It waits for the union; afterwards nobody is registered any more."""
    coord = Coordinator()
    events = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(event.wait()) for event in events]
    coord.register_thread(tasks[0])
    coord.register_thread(tasks[1])
    coord.register_thread(tasks[1])
    joining = asyncio.create_task(coord.join([tasks[2]]))
    for event in events:
        await asyncio.sleep(0.002)
        assert not joining.done()
        event.set()
    await joining

    never = asyncio.get_running_loop().create_future()
    again = asyncio.create_task(coord.join())  # does not wait for the old ones, which a new task below would show
    await again
    never.cancel()
    assert coord._registered == []


@pytest.mark.parametrize("grace", [1e-10, 0.002, 0.3, -1.0])
async def test_join_grace_expires(grace: float) -> None:
    """[testJoinGraceExpires] A tiny grace neither hangs nor passes, a negative one is none."""
    coord = Coordinator()
    entered = asyncio.Event()

    async def straggler() -> None:
        entered.set()
        await asyncio.sleep(60)

    late = asyncio.create_task(straggler(), name="straggler")
    await entered.wait()
    coord.request_stop()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="threads still running") as caught:
        await coord.join([late, asyncio.create_task(asyncio.sleep(0))], stop_grace_period_secs=grace)
    assert time.monotonic() - began >= max(0.0, grace) * 0.9
    error = caught.value
    assert isinstance(error, StopGraceExceeded)
    assert error.services == ("straggler",)
    assert late.cancelled(), "stragglers are cancelled after the grace, and named"


async def test_grace_begins_when_the_stop_is_seen() -> None:
    """Without a stop, join waits for all, without limit, however short the grace is."""
    coord = Coordinator()
    go = asyncio.Event()
    task = asyncio.create_task(go.wait())
    joining = asyncio.create_task(coord.join([task], stop_grace_period_secs=1e-10))
    await asyncio.sleep(0.05)
    assert not joining.done()
    go.set()
    await joining


async def test_join_names_threads_and_leaves_them(worker: Callable[..., threading.Thread]) -> None:
    coord = Coordinator()
    go = threading.Event()
    threads = [worker(go.wait) for _ in range(2)]
    coord.request_stop()
    with pytest.raises(StopGraceExceeded, match="worker-0 worker-1"):
        await coord.join(threads, stop_grace_period_secs=0.01)
    assert all(thread.is_alive() for thread in threads)
    go.set()


async def test_join_without_grace_error(worker: Callable[..., threading.Thread]) -> None:
    """[testJoinWithoutGraceExpires] ignore_live_threads: told, not raised."""
    told: list[tuple[str, str]] = []
    coord = Coordinator(emit=lambda kind, message, **data: told.append((kind, message)))
    go = threading.Event()
    thread = worker(go.wait)
    coord.request_stop()
    await coord.join([thread], stop_grace_period_secs=0.01, ignore_live_threads=True)
    assert any(kind == "stop.left_running" and thread.name in message for kind, message in told)
    go.set()


async def test_join_does_not_wait_for_who_calls_it() -> None:
    coord = Coordinator()
    coord.register_thread(asyncio.current_task())  # type: ignore[arg-type]
    coord.register_thread(threading.current_thread())
    async with asyncio.timeout(20):
        await coord.join()


async def test_cancelling_join_leaves_the_workers() -> None:
    coord = Coordinator()
    go = asyncio.Event()
    task = asyncio.create_task(go.wait())
    joining = asyncio.create_task(coord.join([task]))
    await asyncio.sleep(0)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert not task.done()
    assert not coord.joined
    go.set()
    await coord.join([task])


# --------------------------------------------------------------------------------------------------------- errors


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException:
        return error


@pytest.mark.parametrize("form", ["exc_info", "exception", "fresh exception"])
async def test_join_raises_the_first_report(elsewhere: Report, form: str) -> None:
    """[testJoinRaiseReportExcInfo, testJoinRaiseReportException] The first report wins, the same object.

    Given a fresh exception, that was never raised, TensorFlow fails with a TypeError and does not even stop.
    """
    coord = Coordinator()
    first, late = RuntimeError("First"), RuntimeError("Too late")

    def report(error: BaseException) -> None:
        if form == "fresh exception":
            coord.request_stop(error)
            return
        try:
            raise error
        except RuntimeError as caught:
            coord.request_stop(sys.exc_info() if form == "exc_info" else caught)  # type: ignore[arg-type]

    await elsewhere(lambda: report(first))
    assert coord.should_stop()
    await elsewhere(lambda: report(late))
    with pytest.raises(RuntimeError, match="First") as caught:
        await coord.join([])
    assert caught.value is first
    assert any("Too late" in note for note in first.__notes__), "later errors are attached as notes"
    assert coord.error is first


async def test_an_error_keeps_its_traceback_and_context() -> None:
    coord = Coordinator()

    def where_it_happened() -> None:
        try:
            raise KeyError("before")
        except KeyError:
            raise ValueError("the error")  # noqa: B904

    try:
        where_it_happened()
    except ValueError as error:
        coord.request_stop(error)
    try:
        raise OSError("something else, handled meanwhile")
    except OSError:
        with pytest.raises(ValueError, match="the error") as caught:
            await coord.join([])
    assert "where_it_happened" in [entry.name for entry in caught.traceback]
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize("not_an_error", ["text", 3, ValueError, (None, None, None), (1, 2)])
async def test_request_stop_refuses_what_is_no_exception(not_an_error: object) -> None:
    with pytest.raises(TypeError, match="exception"):
        Coordinator().request_stop(not_an_error)  # type: ignore[arg-type]


async def test_join_ignores_end_of_input(elsewhere: Report) -> None:
    """[testJoinIgnoresOutOfRange] There the exception never reached the coordinator."""
    coord = Coordinator()
    error = end_of_input()
    await elsewhere(lambda: coord.request_stop(error))
    await coord.join([])
    assert coord.should_stop()
    assert coord.error is None
    assert coord.clean_reason is error


async def test_subclasses_are_clean_and_own_types_replace_the_default(elsewhere: Report) -> None:
    """[testJoinIgnoresMyExceptionType]"""

    class Mine(ValueError):
        pass

    coord = Coordinator(clean_stop_exception_types=(ValueError,))
    await elsewhere(lambda: coord.request_stop(Mine("done")))
    await coord.join([])

    coord = Coordinator(clean_stop_exception_types=(ValueError,))
    coord.request_stop(end_of_input())
    with pytest.raises(tf.errors.OutOfRangeError):
        await coord.join([])


async def test_an_empty_list_is_no_default() -> None:
    """[] means that nothing is clean; no test of TensorFlow's notices when it falls back to the default."""
    assert Coordinator(clean_stop_exception_types=[]).clean_stop_exception_types == ()
    coord = Coordinator(clean_stop_exception_types=[])
    coord.request_stop(end_of_input())
    with pytest.raises(tf.errors.OutOfRangeError):
        await coord.join([])


async def test_our_own_clean_end() -> None:
    coord = Coordinator()
    coord.request_stop(StopRequested())
    await coord.join([])


async def test_stop_iteration_is_boxed() -> None:
    """It can never leave a coroutine as itself."""
    coord = Coordinator()
    coord.request_stop(StopIteration(3))
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await coord.join([])
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("style", ["with", "async with"])
@pytest.mark.parametrize("kind", ["task", "thread"])
async def test_stop_on_exception(kind: str, style: str) -> None:
    """[testJoinRaiseReportExceptionUsingHandler] It reports, swallows, and the code after it runs."""
    coord = Coordinator()
    after = threading.Event()
    error = RuntimeError("First")

    async def task() -> None:
        if style == "with":
            with coord.stop_on_exception():
                raise error
        else:
            async with coord.stop_on_exception():
                raise error
        after.set()

    if kind == "thread":
        workers: list[Any] = [threading.Thread(target=lambda: asyncio.run(task()))]
        workers[0].start()
    else:
        workers = [asyncio.create_task(task())]
    with pytest.raises(RuntimeError) as caught:
        await coord.join(workers)
    assert caught.value is error
    assert after.is_set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_f18_stop_on_exception_lets_interrupts_pass(error: type[BaseException]) -> None:
    coord = Coordinator()
    with pytest.raises(error), coord.stop_on_exception():
        raise error
    assert coord.should_stop()
    await coord.join([])


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
async def test_f18_stop_on_exception_lets_cancellation_pass(error: type[BaseException]) -> None:
    coord = Coordinator()
    with pytest.raises(error), coord.stop_on_exception():
        raise error
    assert not coord.should_stop()


async def test_f18_an_error_after_a_clean_stop_is_raised() -> None:
    """In TensorFlow, any request drops every later exception silently."""
    for first in (None, end_of_input()):
        coord = Coordinator()
        coord.request_stop(first)
        coord.request_stop(ValueError("after the stop"))
        with pytest.raises(ValueError, match="after the stop"):
            await coord.join([])


async def test_consequences_of_the_stop_are_no_errors() -> None:
    """What hid behind that rule: the echo of queues that the stop itself closed. Before a stop it is an error."""
    echo = tf.errors.CancelledError(None, None, "queue closed")
    coord = Coordinator(consequence_types=(tf.errors.CancelledError,))
    coord.request_stop()
    coord.request_stop(echo)
    await coord.join([])

    coord = Coordinator(consequence_types=(tf.errors.CancelledError,))
    coord.request_stop(echo)
    with pytest.raises(tf.errors.CancelledError):
        await coord.join([])


async def test_an_error_outranks_stragglers_and_waits_for_the_grace(worker: Callable[..., threading.Thread]) -> None:
    coord = Coordinator()
    go = threading.Event()
    thread = worker(go.wait)
    coord.request_stop(ValueError("first"))
    began = time.monotonic()
    with pytest.raises(ValueError, match="first"):
        await coord.join([thread], stop_grace_period_secs=0.1)
    assert time.monotonic() - began >= 0.09
    go.set()


async def test_join_may_be_called_again() -> None:
    coord = Coordinator()
    error = ValueError("once more")
    coord.request_stop(error)
    for _ in range(3):
        with pytest.raises(ValueError, match="once more") as caught:
            await coord.join([])
        assert caught.value is error
    assert not hasattr(error, "__notes__")


async def test_clear_stop_clears_the_exception_too() -> None:
    """[testClearStopClearsExceptionToo]"""
    coord = Coordinator()
    coord.request_stop(RuntimeError("First"))
    with pytest.raises(RuntimeError, match="First"):
        await coord.join([])
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    assert coord.stop_requested_at is None
    assert await coord.wait_for_stop(0.01) is False
    coord.request_stop(RuntimeError("Second"))
    with pytest.raises(RuntimeError, match="Second"):
        await coord.join([])


@pytest.mark.parametrize("form", ["exception", "exc_info"])
async def test_request_stop_raises_once_joined(form: str) -> None:
    """[testRequestStopRaisesIfJoined, testRequestStopRaisesIfJoined_ExcInfo] Nobody else would see it."""
    coord = Coordinator()
    await coord.join([])
    error = raised(RuntimeError("Too late"))
    given: Any = error if form == "exception" else (type(error), error, error.__traceback__)
    with pytest.raises(RuntimeError, match="Too late") as caught:
        coord.request_stop(given)
    assert caught.value is error
    assert coord.should_stop()
    coord.request_stop(end_of_input())  # clean ones stay quiet
    coord.request_stop()
    coord.clear_stop()
    coord.request_stop(given)
    with pytest.raises(RuntimeError, match="Too late"):
        await coord.join([])


async def test_a_report_is_lost_neither_before_nor_after_the_join() -> None:
    """Threads that report while a join ends: each error is raised by the join, noted on it, or raised in the thread."""
    for _ in range(30):
        coord = Coordinator()
        got_back: list[BaseException] = []
        barrier = threading.Barrier(4)
        errors = [ValueError(str(n)) for n in range(3)]

        def report(
            error: BaseException,
            coord: Coordinator = coord,
            barrier: threading.Barrier = barrier,
            got_back: list[BaseException] = got_back,
        ) -> None:
            barrier.wait()
            try:
                coord.request_stop(error)
            except ValueError as back:
                got_back.append(back)

        threads = [threading.Thread(target=report, args=(error,)) for error in errors]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(barrier.wait)
        first: BaseException | None = None
        try:
            await coord.join([])
        except ValueError as error:
            first = error
        for thread in threads:
            thread.join()
        known = {id(error) for error in got_back} | ({id(first)} if first is not None else set())
        coord.drain()
        known |= {id(report.error) for report in coord._reports.secondary}
        if coord._reports.primary is not None:
            known.add(id(coord._reports.primary.error))
        assert known == {id(error) for error in errors}


async def test_a_flood_of_errors_is_bounded() -> None:
    told: list[str] = []
    coord = Coordinator(emit=lambda kind, message, **data: told.append(kind))
    first = ValueError("first")
    coord.request_stop(first)
    for n in range(3 * module.MOST_WAITING_REPORTS):
        coord.request_stop(ValueError(str(n)))
    with pytest.raises(ValueError, match="first") as caught:
        await coord.join([])
    assert caught.value is first
    assert len(told) == 1 + module.MOST_FURTHER_ERRORS
    assert first.__notes__[-1].endswith(f"{3 * module.MOST_WAITING_REPORTS - module.MOST_FURTHER_ERRORS} more")


async def test_frozen_exceptions_pass() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        text: str

    coord = Coordinator()
    error = Frozen("cold")
    coord.request_stop(error)
    coord.request_stop(ValueError("second"))
    with pytest.raises(Frozen) as caught:
        await coord.join([])
    assert caught.value is error


async def test_errors_are_told_as_events() -> None:
    told: list[tuple[str, str]] = []
    coord = Coordinator(emit=lambda kind, message, level="info", **data: told.append((kind, level)))
    coord.request_stop(end_of_input())
    coord.request_stop(ValueError("first"))
    coord.request_stop(ValueError("second"))
    assert told == [], "request_stop itself tells nobody: it may stand in a signal handler"
    coord.drain()
    assert told == [("stop.clean", "info"), ("stop.error", "error"), ("stop.further_error", "warning")]


async def test_a_sink_may_look_at_the_coordinator() -> None:
    seen: list[BaseException | None] = []
    coord = Coordinator(emit=lambda *args, **data: seen.append(coord.error))
    error = ValueError("x")
    coord.request_stop(error)
    coord.drain()
    assert seen == [error]


# ----------------------------------------------------------------------------------------------------------- loops


async def test_another_loop_is_refused_while_somebody_waits() -> None:
    coord = Coordinator()
    task = asyncio.create_task(coord.wait_for_stop())
    await asyncio.sleep(0)

    def other() -> None:
        with pytest.raises(WrongEventLoop, match="another event loop"):
            asyncio.run(coord.wait_for_stop(0.01))

    await asyncio.to_thread(other)
    coord.request_stop()
    await task


def test_one_loop_after_the_other() -> None:
    coord = Coordinator()
    for _ in range(2):
        coord.clear_stop()

        async def use() -> bool:
            asyncio.get_running_loop().call_soon(coord.request_stop)
            return await coord.wait_for_stop()

        assert asyncio.run(use())
    coord.request_stop(ValueError("no loop any more"))
    assert isinstance(coord.error, ValueError)


def test_a_request_without_a_loop_is_not_lost() -> None:
    coord = Coordinator()
    coord.request_stop(ValueError("early"))

    async def join() -> None:
        assert await coord.wait_for_stop()
        await coord.join([])

    with pytest.raises(ValueError, match="early"):
        asyncio.run(join())


async def test_freed_without_the_collector() -> None:
    coord = Coordinator()
    coord.request_stop(ValueError("x"))
    with contextlib.suppress(ValueError):
        await coord.join([])
    reference = weakref.ref(coord)
    gc.disable()
    try:
        del coord
        await asyncio.sleep(0)
        assert reference() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------- as a group


async def test_group_waits_for_its_tasks() -> None:
    ended = []

    async def work(n: int) -> None:
        await asyncio.sleep(0.005 * n)
        ended.append(n)

    async with Coordinator() as coord:
        services = [coord.start_soon(work, n, name=f"work-{n}") for n in range(3)]
        assert services[1].name == "work-1"
        assert not coord.should_stop()
    assert sorted(ended) == [0, 1, 2]
    assert all(service.done() for service in services)


async def test_group_ends_with_a_request() -> None:
    async with Coordinator() as coord:
        coord.start_soon(coord.wait_for_stop)
        threading.Thread(target=coord.request_stop).start()
    assert coord.should_stop()
    assert coord.joined


async def test_group_raises_the_first_error_bare() -> None:
    error = ValueError("bare")

    async def fails() -> None:
        raise error

    with pytest.raises(ValueError, match="bare") as caught:
        async with Coordinator() as coord:
            coord.start_soon(coord.wait_for_stop)
            coord.start_soon(fails)
    assert caught.value is error


async def test_group_body_error_and_clean_end() -> None:
    with pytest.raises(KeyError):
        async with Coordinator() as coord:
            coord.start_soon(coord.wait_for_stop)
            raise KeyError("body")
    async with Coordinator() as coord:
        coord.start_soon(coord.wait_for_stop)
        raise end_of_input()


async def test_group_is_cancelled_while_it_waits() -> None:
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.set()

    async def use() -> None:
        async with Coordinator() as coord:
            coord.start_soon(work)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await use()
    assert cleaned.is_set()


async def test_start_soon_outside_of_the_block() -> None:
    coord = Coordinator()
    with pytest.raises(RuntimeError, match="async with"):
        coord.start_soon(asyncio.sleep, 0)
    async with coord:
        pass
    with pytest.raises(RuntimeError, match="async with"):
        coord.start_soon(asyncio.sleep, 0)
