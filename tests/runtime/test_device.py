"""The device thread: who runs when, what cancellation does, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.runtime import wakeup
from asupervisor.runtime.device import DeviceExecutor, Priority
from asupervisor.runtime.device_thread import INTERACTIVE_PER_STEP
from asupervisor.runtime.mailbox import attach, detach, is_attached, mailbox_of

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]
else:
    uvloop.run(asyncio.sleep(0))  # it opens one pipe for the whole process, which is no test's leak

WAIT = 20  # seconds that a test waits for what must happen; reached only when it fails


class Sink:
    """Remembers events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.levels: list[str] = []
        self.arrived = threading.Event()

    def __call__(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append((kind, message, data))
        self.levels.append(level)
        self.arrived.set()

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture(params=["eventfd", "portable"])
async def executor(
    request: pytest.FixtureRequest, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DeviceExecutor]:
    """An executor, with and without the wake-ups that only Linux has; attached as a session attaches it."""
    if request.param == "portable":
        monkeypatch.setattr(wakeup, "_HAS_EVENTFD", False)
    executor = DeviceExecutor("/cpu:0", emit=sink)
    mailbox = attach(asyncio.get_running_loop())
    yield executor
    detach(mailbox)
    assert await executor.aclose(WAIT)


class Gate:
    """Work that holds the device thread until it is told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, value: Any = None) -> Any:
        self.entered.set()
        assert self.release.wait(WAIT)
        return value


async def entered(gate: Gate) -> None:
    while not gate.entered.is_set():
        await asyncio.sleep(0)


async def settle() -> None:
    """Let every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------ one thread


async def test_one_daemon_thread_named_after_the_device(executor: DeviceExecutor) -> None:
    threads = {await executor.call(threading.current_thread) for _ in range(5)}
    (thread,) = threads
    assert thread.daemon
    assert "/cpu:0" in thread.name
    assert await executor.call(executor.on_device_thread)
    assert not executor.on_device_thread()


async def test_the_thread_starts_with_the_first_use_and_is_set_up_once() -> None:
    before = set(threading.enumerate())
    idents: list[int] = []
    executor = DeviceExecutor(thread_init=lambda: idents.append(threading.get_ident()))
    assert set(threading.enumerate()) == before
    assert await executor.call(threading.get_ident) == await executor.call(threading.get_ident)
    assert len(idents) == 1
    assert await executor.aclose(WAIT)
    assert set(threading.enumerate()) == before


async def test_a_set_up_that_fails_is_an_event_and_the_thread_works(sink: Sink) -> None:
    def fail() -> None:
        raise OSError("no such register")

    executor = DeviceExecutor(thread_init=fail, emit=sink)
    assert await executor.call(int, "7") == 7
    assert sink.kinds() == ["device.init_failed"]
    assert await executor.aclose(WAIT)


async def test_calls_never_interleave(executor: DeviceExecutor) -> None:
    running = 0

    def work(number: int) -> int:
        nonlocal running
        running += 1
        assert running == 1
        time.sleep(0)
        running -= 1
        return number

    results = await asyncio.gather(*(executor.call(work, number) for number in range(200)))
    assert results == list(range(200))


async def test_arguments_results_and_context_go_along(executor: DeviceExecutor) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")
    assert await executor.call(lambda a, b: (a, b, variable.get()), 1, 2) == (1, 2, "mine")
    await executor.call(variable.set, "theirs")
    assert variable.get() == "mine"


# ----------------------------------------------------------------------------------------------------- errors


async def test_an_error_arrives_as_the_same_object(executor: DeviceExecutor) -> None:
    error = ValueError("boom")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError) as caught:
        await executor.call(fail)
    assert caught.value is error
    assert any(entry.name == "fail" for entry in caught.traceback)


@pytest.mark.parametrize("lane", ["call", "side"])
@pytest.mark.parametrize("error", [StopIteration(3), asyncio.CancelledError("mine")])
async def test_stop_iteration_and_cancelled_error_are_boxed(
    executor: DeviceExecutor, lane: str, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        await asyncio.wait_for(getattr(executor, lane)(fail), WAIT)
    assert caught.value.__cause__ is error


async def test_an_error_keeps_nothing_alive_once_it_is_gone(executor: DeviceExecutor) -> None:
    class Payload:
        pass

    def fail(payload: Payload) -> None:
        raise ValueError("boom")

    payload = Payload()
    alive = weakref.ref(payload)
    gc.disable()
    try:
        with pytest.raises(ValueError):
            await executor.call(fail, payload)
        del payload
        await asyncio.sleep(0)  # until its next turn, a task holds the error that woke it
        assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------ lanes


async def test_control_goes_before_interactive(executor: DeviceExecutor) -> None:
    gate, order = Gate(), []
    first = asyncio.create_task(executor.call(gate))  # type: ignore[arg-type]
    await entered(gate)
    calls = [asyncio.create_task(executor.call(order.append, f"i{n}")) for n in range(3)]  # type: ignore[arg-type]
    await settle()
    calls.append(
        asyncio.create_task(executor.call(order.append, "c", priority=Priority.CONTROL))  # type: ignore[arg-type]
    )
    await settle()
    statistics = executor.statistics()
    assert (statistics.waiting_control, statistics.waiting_interactive) == (1, 3)
    gate.release.set()
    await asyncio.gather(first, *calls)
    assert order == ["c", "i0", "i1", "i2"]


async def test_the_stream_lane_is_for_streams(executor: DeviceExecutor) -> None:
    with pytest.raises(ValueError, match="STREAM"):
        executor.call(int, priority=Priority.STREAM)


async def test_a_fault_in_a_stream_does_not_end_the_device_thread(executor: DeviceExecutor) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    source = Source(executor, 1, [], fail)
    executor.device.kick(source)
    assert await executor.call(int, "5") == 5
    assert [type(error) for error in source.aborted] == [ZeroDivisionError]


class Source:
    """A stream of steps as the device thread sees it."""

    def __init__(self, executor: DeviceExecutor, steps: int, order: list[Any], step: Callable[[], None]) -> None:
        self.queued = False
        self.started = 0.0
        self.device = executor.device
        self.left = steps
        self.order = order
        self.step = step
        self.ended = threading.Event()
        self.aborted: list[BaseException] = []

    def turn(self) -> bool:
        while self.left:
            self.left -= 1
            self.step()
            self.order.append("step")
            if self.left and self.device.others_wait():
                return True
        self.ended.set()
        return False

    def abort(self, error: BaseException) -> None:
        self.aborted.append(error)

    def describe(self) -> str:
        return "source"


async def test_interactive_calls_wait_for_one_step_and_do_not_starve_the_stream(executor: DeviceExecutor) -> None:
    order: list[Any] = []
    gate = Gate()
    source = Source(executor, 12, order, lambda: gate() if not order else None)
    executor.device.kick(source)
    await entered(gate)  # within the first step
    calls = [asyncio.create_task(executor.call(order.append, n)) for n in range(20)]  # type: ignore[arg-type]
    await settle()
    gate.release.set()
    await asyncio.gather(*calls)
    assert await asyncio.to_thread(source.ended.wait, WAIT)
    # After each step that is followed by waiting calls come at most so many of them, and at least one.
    assert order[0] == "step"
    rounds = "".join("s" if entry == "step" else "i" for entry in order).lstrip("s").split("s")
    waiting = [len(entry) for entry in rounds if entry]
    assert waiting == [INTERACTIVE_PER_STEP] * (20 // INTERACTIVE_PER_STEP)
    assert [entry for entry in order if entry != "step"] == list(range(20))


async def test_streams_take_turns(executor: DeviceExecutor) -> None:
    order: list[Any] = []
    gate = Gate()
    blocked = asyncio.create_task(executor.call(gate))  # type: ignore[arg-type]
    await entered(gate)
    sources = [Source(executor, 5, order, lambda n=n: order.append(n)) for n in range(2)]  # type: ignore[misc]
    for source in sources:
        executor.device.kick(source)
        executor.device.kick(source)  # a spurious one
    gate.release.set()
    await blocked
    for source in sources:
        assert await asyncio.to_thread(source.ended.wait, WAIT)
    assert [entry for entry in order if entry != "step"] == [0, 1] * 5


async def test_side_work_does_not_wait_for_the_device_thread(executor: DeviceExecutor) -> None:
    gate = Gate()
    blocked = asyncio.create_task(executor.call(gate))  # type: ignore[arg-type]
    await entered(gate)
    assert await executor.side(lambda: threading.current_thread().name, label="feeder") != executor.name
    others = [Gate() for _ in range(60)]  # far more than any limit of asyncio's or anyio's
    tasks = [asyncio.create_task(executor.side(other)) for other in others]  # type: ignore[arg-type]
    for other in others:
        await entered(other)
        other.release.set()
    await asyncio.gather(*tasks)
    gate.release.set()
    await blocked


# -------------------------------------------------------------------------------------------------- cancelling


async def test_cancelled_before_it_started_it_never_runs(executor: DeviceExecutor, sink: Sink) -> None:
    gate, ran = Gate(), []
    blocked = asyncio.create_task(executor.call(gate))  # type: ignore[arg-type]
    await entered(gate)
    waiting = asyncio.create_task(executor.call(ran.append, 1))  # type: ignore[arg-type]
    await settle()
    waiting.cancel("enough")
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    assert caught.value.args == ("enough",)
    assert executor.statistics().waiting_interactive == 0
    gate.release.set()
    await blocked
    await executor.call(int)
    assert ran == []
    assert sink.events == []


@pytest.mark.parametrize("lane", ["call", "side"])
@pytest.mark.parametrize("fails", [False, True])
async def test_f16_cancelled_in_flight_the_caller_is_released_at_once(
    executor: DeviceExecutor, sink: Sink, lane: str, fails: bool
) -> None:
    """TensorFlow has no such thing: a thread that waits in `Session.run` cannot be told to go."""
    gate = Gate()

    def work() -> str:
        gate()
        if fails:
            raise ValueError("late")
        return "late"

    task = asyncio.create_task(getattr(executor, lane)(work, label="slow"))
    await entered(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # the work is still in the gate
    assert sink.events == []
    gate.release.set()
    while not sink.events:
        await asyncio.sleep(0)
    ((kind, message, data),) = sink.events
    assert kind == "run.dropped"
    assert sink.levels == ["warning" if fails else "info"]
    assert "slow" in message
    assert data == {"call": "slow", "error": "ValueError('late')" if fails else None}


async def test_cancelling_races_with_the_result_and_nothing_is_lost_twice(executor: DeviceExecutor, sink: Sink) -> None:
    ran: list[int] = []
    delivered = cancelled = 0
    for number in range(500):
        task = asyncio.create_task(executor.call(ran.append, number))  # type: ignore[arg-type]
        for _ in range(number % 7):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            delivered += 1
        except asyncio.CancelledError:
            cancelled += 1
    await executor.call(int)
    await settle()
    assert delivered + cancelled == 500
    assert len(ran) == delivered + len(sink.events)  # what ran was delivered, or an event says that it was dropped
    assert ran == sorted(ran)


async def test_timeouts_and_shields_work_on_a_call(executor: DeviceExecutor) -> None:
    gate = Gate()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await executor.call(gate)
    gate.release.set()
    gate = Gate()
    inner = asyncio.ensure_future(executor.call(gate, 5))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(inner), 0.01)
    gate.release.set()
    assert await inner == 5


# ---------------------------------------------------------------------------------------------------- blocking


async def test_call_blocking_from_another_thread_and_inline(executor: DeviceExecutor) -> None:
    on_device = await asyncio.to_thread(executor.call_blocking, executor.on_device_thread)
    assert on_device

    def nested() -> tuple[int, int]:
        return executor.call_blocking(threading.get_ident), threading.get_ident()

    inner, outer = await executor.call(nested)
    assert inner == outer


async def test_call_blocking_raises_what_the_work_raises(executor: DeviceExecutor) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await asyncio.to_thread(executor.call_blocking, int, "x")


async def test_call_blocking_on_the_loop_is_refused(executor: DeviceExecutor) -> None:
    with pytest.raises(WrongEventLoop, match="would block the event loop"):
        executor.call_blocking(int)


async def test_call_off_the_loop_names_the_blocking_way(executor: DeviceExecutor) -> None:
    def off_loop() -> None:
        with pytest.raises(WrongEventLoop, match=r"sess\.blocking\.run"):
            executor.call(int)

    await asyncio.to_thread(off_loop)


# ------------------------------------------------------------------------------------------------- busy, figures


async def test_busy_names_the_call_and_shows_its_stack(executor: DeviceExecutor) -> None:
    assert executor.busy() is None
    gate = Gate()
    before = time.monotonic()
    task = asyncio.create_task(executor.call(gate, label="a long step"))  # type: ignore[arg-type]
    await entered(gate)
    busy = executor.busy()
    assert busy is not None
    assert busy.label == "a long step"
    assert before <= busy.since <= time.monotonic()
    assert "self.release.wait" in busy.stack()
    gate.release.set()
    await task
    assert executor.busy() is None


async def test_statistics_count_and_measure(executor: DeviceExecutor) -> None:
    for _ in range(20):
        await executor.call(time.sleep, 0.001)
    statistics = executor.statistics()
    assert statistics.calls == 20
    assert statistics.call_time.count == 20
    assert 0.001 <= statistics.call_time.p50_secs <= statistics.call_time.p99_secs
    assert statistics.queue_wait.count == 20
    assert statistics.busy is None


async def test_a_batch_of_results_wakes_the_loop_once(executor: DeviceExecutor) -> None:
    """Twenty calls that wait together do not make twenty wake-ups."""
    gate = Gate()
    blocked = asyncio.create_task(executor.call(gate))  # type: ignore[arg-type]
    await entered(gate)
    calls = [asyncio.create_task(executor.call(int)) for _ in range(20)]  # type: ignore[arg-type]
    await settle()
    lags = mailbox_of(asyncio.get_running_loop()).lags
    before = len(lags)
    gate.release.set()
    await asyncio.gather(blocked, *calls)
    assert len(lags) - before < 20


# ------------------------------------------------------------------------------------------------------- the end


async def test_close_fails_what_is_queued_and_refuses_what_comes(sink: Sink) -> None:
    executor = DeviceExecutor(emit=sink)
    gate = Gate()
    running = asyncio.create_task(executor.call(gate, "result"))  # type: ignore[arg-type]
    await entered(gate)
    queued = asyncio.create_task(executor.call(int))  # type: ignore[arg-type]
    blocking = asyncio.create_task(asyncio.to_thread(executor.call_blocking, int))
    while executor.statistics().waiting_interactive < 2:
        await asyncio.sleep(0)
    assert not await executor.aclose(0.01)  # stuck
    assert executor.closed
    busy = executor.busy()
    assert busy is not None
    for task in (queued, blocking):
        with pytest.raises(SessionClosed):
            await task
    for attempt in (executor.call, executor.side, executor.call_blocking):
        with pytest.raises((SessionClosed, WrongEventLoop)):
            attempt(int)
    gate.release.set()
    assert await running == "result"
    assert await executor.aclose(WAIT)
    assert await executor.aclose(WAIT)
    assert executor.busy() is None


async def test_close_aborts_streams() -> None:
    executor = DeviceExecutor()
    source = Source(executor, 1, [], lambda: None)
    executor.device.sources.add(source)
    assert await executor.aclose(WAIT)
    assert [type(error) for error in source.aborted] == [SessionClosed]


async def test_an_executor_that_was_never_used_closes() -> None:
    executor = DeviceExecutor()
    assert await executor.aclose(0)
    with pytest.raises(SessionClosed):
        executor.call(int)


def test_an_executor_serves_several_loops_one_after_another() -> None:
    executor = DeviceExecutor()
    attached: list[Any] = []

    async def use(attaches: bool) -> int:
        if attaches:  # and never detach: as a program does that was cut off
            attached.append(attach(asyncio.get_running_loop()))
        return await executor.call(threading.get_ident)

    idents = {asyncio.run(use(attaches)) for attaches in (True, False, True, True)}
    assert len(idents) == 1
    assert [is_attached(mailbox.loop) for mailbox in attached] == [False, False, True]  # forgotten with the next one

    async def end() -> bool:
        return await executor.aclose(WAIT)

    assert asyncio.run(end())


def test_a_result_for_a_loop_that_has_gone_is_reported(sink: Sink) -> None:
    executor = DeviceExecutor(emit=sink)
    gate = Gate()

    async def leave() -> None:
        task = asyncio.create_task(executor.call(gate, label="orphan"))  # type: ignore[arg-type]
        await entered(gate)
        task.cancel()

    asyncio.run(leave())
    gate.release.set()
    assert sink.arrived.wait(WAIT)
    assert sink.kinds() == ["run.dropped"]

    async def end() -> bool:
        return await executor.aclose(WAIT)

    assert asyncio.run(end())


def eventfds() -> int:
    """How many there are in this process; zero where the system does not tell."""
    links = Path("/proc/self/fd")
    found = 0
    for link in links.iterdir() if links.is_dir() else ():
        try:
            found += "eventfd" in str(link.readlink())
        except OSError:  # the listing's own
            pass
    return found


async def test_descriptors_and_readers_go_with_the_attachment() -> None:
    gc.collect()
    before = eventfds()
    loop = asyncio.get_running_loop()
    executor = DeviceExecutor()
    first = attach(loop)
    second = attach(loop)
    assert first is second
    await executor.call(int)
    detach(first)
    await executor.call(int)
    detach(second)
    assert await executor.call(int) == 0  # the slow way works all the same
    assert await executor.aclose(WAIT)
    assert eventfds() == before


async def test_a_result_that_comes_after_the_detachment_arrives(executor: DeviceExecutor) -> None:
    mailbox = mailbox_of(asyncio.get_running_loop())
    gate = Gate()
    task = asyncio.create_task(executor.call(gate, 3))  # type: ignore[arg-type]
    await entered(gate)
    mailbox.close()
    gate.release.set()
    assert await asyncio.wait_for(task, WAIT) == 3


async def test_an_executor_that_nobody_holds_takes_its_thread_along() -> None:
    executor = DeviceExecutor()
    thread = await executor.call(threading.current_thread)
    del executor
    await asyncio.to_thread(thread.join, WAIT)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_the_child_of_a_fork_it_is_closed(python: str, fresh_environ: dict[str, str]) -> None:
    import subprocess

    program = """
import asyncio, os, sys, threading
from asupervisor.errors import SessionClosed
from asupervisor.runtime.device import DeviceExecutor

executor = DeviceExecutor()
assert executor.call_blocking(int) == 0
pid = os.fork()
if pid == 0:
    try:
        executor.call_blocking(int)
    except SessionClosed:
        async def end():
            return await executor.aclose(5)
        os._exit(0 if asyncio.run(end()) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert executor.call_blocking(int) == 0  # the parent's is as before
"""
    subprocess.run([python, "-c", program], env=fresh_environ, check=True, timeout=60)


def test_a_stuck_device_thread_does_not_keep_the_interpreter_alive(python: str, fresh_environ: dict[str, str]) -> None:
    import subprocess

    program = """
import asyncio, threading
from asupervisor.runtime.device import DeviceExecutor

async def main():
    executor = DeviceExecutor()
    entered = threading.Event()
    task = asyncio.create_task(executor.call(lambda: (entered.set(), threading.Event().wait())))
    side = asyncio.create_task(executor.side(threading.Event().wait))
    while not entered.is_set():
        await asyncio.sleep(0)
    raise SystemExit(7)

asyncio.run(main())
"""
    done = subprocess.run([python, "-c", program], env=fresh_environ, timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_one_task_does_not_swallow_the_results_of_the_others(error: type[BaseException]) -> None:
    """Results are delivered in one go; a task that ends the loop in its step must not take the others along."""
    executor = DeviceExecutor()
    loop = asyncio.new_event_loop()
    gate, mailboxes = Gate(), []

    async def interrupt() -> None:
        await executor.call(gate)
        raise error

    async def begin() -> list[asyncio.Task[Any]]:
        mailboxes.append(attach(loop))
        tasks = [asyncio.create_task(interrupt())]
        await entered(gate)
        tasks += [asyncio.create_task(executor.call(int, number)) for number in range(3)]  # type: ignore[arg-type]
        await settle()
        return tasks

    first, *others = loop.run_until_complete(begin())
    gate.release.set()
    with pytest.raises(error):
        loop.run_until_complete(first)
    assert loop.run_until_complete(asyncio.wait_for(asyncio.gather(*others), WAIT)) == [0, 1, 2]
    assert loop.run_until_complete(executor.aclose(WAIT))
    loop.close()
    detach(mailboxes[0])


def run_on(loop_kind: str, main: Any) -> None:
    if loop_kind == "asyncio":
        asyncio.run(main)
    elif uvloop is not None:
        uvloop.run(main)
    else:
        main.close()
        pytest.skip("uvloop is not installed")


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("debug", [False, True])
def test_many_calls_on_both_kinds_of_loop(loop_kind: str, debug: bool) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_debug(debug)
        executor = DeviceExecutor()
        mailbox = attach(asyncio.get_running_loop())
        for _ in range(20):
            results = await asyncio.gather(*(executor.call(int, n) for n in range(50)))
            assert results == list(range(50))
        detach(mailbox)
        assert await executor.aclose(WAIT)

    run_on(loop_kind, main())


def test_two_loops_in_two_threads_share_an_executor() -> None:
    executor = DeviceExecutor()
    running: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        assert len(running) == 1
        running.remove(number)
        return number

    async def use() -> None:
        mailbox = attach(asyncio.get_running_loop())
        for _ in range(20):
            assert await asyncio.gather(*(executor.call(work, n) for n in range(20))) == list(range(20))
        detach(mailbox)

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert executor.statistics().calls == 800

    async def end() -> bool:
        return await executor.aclose(WAIT)

    assert asyncio.run(end())


async def test_detached_in_another_thread_the_loop_lets_go_by_itself() -> None:
    executor = DeviceExecutor()
    mailbox = attach(asyncio.get_running_loop())
    await asyncio.to_thread(detach, mailbox)
    await settle()
    assert await executor.aclose(WAIT)


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="no eager tasks in this Python")
def test_calls_in_eager_tasks() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        executor = DeviceExecutor()
        assert await asyncio.gather(*(executor.call(int, n) for n in range(50))) == list(range(50))
        assert await executor.aclose(WAIT)

    asyncio.run(main())


@pytest.fixture
def busy_python() -> Iterator[None]:
    """A thread that never lets go of the interpreter by itself."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    stop.set()
    thread.join()


async def test_wake_ups_are_never_lost_under_contention(executor: DeviceExecutor, busy_python: None) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        async def caller(count: int) -> None:
            for number in range(count):
                assert await executor.call(int, number) == number

        def blocking(count: int) -> None:
            for number in range(count):
                assert executor.call_blocking(int, number) == number

        await asyncio.wait_for(
            asyncio.gather(*(caller(150) for _ in range(4)), *(asyncio.to_thread(blocking, 150) for _ in range(3))),
            60,
        )
    finally:
        sys.setswitchinterval(before)
