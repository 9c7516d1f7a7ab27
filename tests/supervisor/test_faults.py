"""FAULTS.md on the real Supervisor: each fault of the original family, and what happens here instead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import StopGraceExceeded, Supervisor
from asupervisor.session.in_flight import in_flight
from asupervisor.testing import ManualClock

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def numbers(count: int, capacity: int = 4) -> tuple[tf.Graph, Any, Any]:
    """A queue that a QueueRunner fills with 1, 2, 3 ... and closes after `count`; a step, and what it takes."""
    graph = tf.Graph()
    with graph.as_default():
        produced = tf1.get_variable("produced", initializer=0.0, trainable=False, use_resource=True)
        queue = tf1.FIFOQueue(capacity, tf.float32, shapes=[()], name="numbers")
        below = tf1.assert_less(produced.read_value(), float(count), message="the data is over")
        with tf.control_dependencies([below]):
            next_one = tf1.assign_add(produced, 1.0)
        tf1.train.add_queue_runner(
            tf1.train.QueueRunner(
                queue, [queue.enqueue(next_one)], queue_closed_exception_types=(tf.errors.InvalidArgumentError,)
            )
        )
        element = queue.dequeue(name="element")
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf1.assign_add(step, 1)]):
            train = tf.identity(element)
    return graph, train, element


# ------------------------------------------------------------------ F06


async def test_f06_a_clean_end_is_saved(model: Callable[..., Any], variables: str, tmp_path: Path) -> None:
    made = model()
    async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session() as sess:
        for _ in range(7):
            await sess.run(made.train, made.feed)
        w = np.array(await sess.run(made.w))
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-7")
    np.testing.assert_array_equal(tf.train.load_variable(str(tmp_path), "w"), w)


@pytest.mark.parametrize("handle_signals", [False, True])
def test_f06_ctrl_c_saves_the_step_and_the_next_run_goes_on(child: Any, tmp_path: Path, handle_signals: bool) -> None:
    first = child("train", logdir=str(tmp_path), handle_signals=handle_signals)
    first.wait_for("step 10\n")
    first.signal(signal.SIGINT)
    assert first.wait() == -signal.SIGINT, first.output
    assert first.secs < 25, "within seconds, not after a grace"
    last = int(first.output.split("step ")[-1].split()[0])
    saved = int(tf.train.load_variable(str(tmp_path), "global_step"))
    assert last <= saved <= last + 1, "what was told, or the step in flight"
    second = child("train", logdir=str(tmp_path), steps=1)
    assert second.wait() == 0, second.output
    assert f"begun {saved}\nstep {saved + 1}\n" in second.output


def test_f06_an_error_is_saved(model: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    """TensorFlow's MonitoredTrainingSession saves nothing on an error, its Supervisor never."""
    made = model()

    async def main() -> None:
        async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session() as sess:
            await sess.run(made.train, made.feed)
            raise KeyError("in the body")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert saved(tmp_path)[-1] == "model.ckpt-1"


@pytest.mark.parametrize("wrong", ["fetch", "feed key", "feed shape"])
async def test_f06_a_run_that_asked_for_nonsense_is_no_failed_step(
    wrong: str, model: Callable[..., Any], tmp_path: Path, saved: Any
) -> None:
    """TensorFlow refuses it before anything runs: the state is that of the last step, and the next run begins there."""
    made = model()
    with pytest.raises((TypeError, ValueError)):
        async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session() as sess:
            for _ in range(3):
                await sess.run(made.train, made.feed)
            if wrong == "fetch":
                await sess.run([made.train, "none:0"], made.feed)
            else:
                key = next(iter(made.feed)) if wrong == "feed shape" else "none:0"
                await sess.run(made.train, {key: np.zeros([5, 5, 5])})
    assert saved(tmp_path)[-1] == "model.ckpt-3"
    assert not list(tmp_path.glob("*emergency*"))


# ------------------------------------------------------------------ F10, F11


async def test_f10_two_writers_within_a_second(
    counter: Callable[..., Any], tmp_path: Path, clock: ManualClock, events_of: Any, kinds_of: Any
) -> None:
    """By this clock both begin in the same instant; TensorFlow's second file truncates the first."""
    made = counter()
    for step in range(2):
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), clock=clock, save_summaries_secs=0)
        async with sv.managed_session() as sess:
            await sess.run(made.train)
        assert clock.monotonic() == 1000.0
        assert len(events_of(tmp_path)) == step + 1
    for number, events in enumerate(events_of(tmp_path)):
        kinds = kinds_of(events)
        assert kinds[:4] == ["version", "graph", "meta", f"START:{number}"]
        assert kinds[-2:] == [f"CHECKPOINT:{number + 1}", "STOP"]


async def test_f11_each_supervisor_owns_its_writer(
    counter: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    """A directory that is wiped between two sessions loses nothing, and twenty sessions leave nothing open."""
    before = {thread for thread in threading.enumerate() if "event" in thread.name}
    for turn in range(20):
        made = counter()
        for file in tmp_path.iterdir():
            file.unlink()
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0, save_model_secs=0)
        async with sv.managed_session() as sess:
            summary = tf1.Summary(value=[tf1.Summary.Value(tag="turn", simple_value=turn)])
            await sv.summary_computed(sess, summary, turn)
        (events,) = events_of(tmp_path)
        assert kinds_of(events)[4:] == [f"summary:turn:{turn}", "STOP"]
    assert {thread for thread in threading.enumerate() if "event" in thread.name} == before
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not [path for path in open_files if path.startswith(str(tmp_path))]


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


async def test_f11_a_directory_that_is_wiped_under_the_session(
    counter: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    made = counter()
    logdir = tmp_path / "log"
    sv = Supervisor(graph=made.graph, logdir=str(logdir), save_summaries_secs=0, save_model_secs=0)
    async with sv.managed_session() as sess:
        await sv.summary_writer.flush()
        while logdir.exists():  # the journal may come back while it is being removed
            await asyncio.to_thread(shutil.rmtree, logdir, ignore_errors=True)
        summary = tf1.Summary(value=[tf1.Summary.Value(tag="late", simple_value=1)])
        await sv.summary_computed(sess, summary, 1)
    (events,) = events_of(logdir)
    assert kinds_of(events)[-2:] == ["summary:late:1", "STOP"]


# ------------------------------------------------------------------ F12, F13


async def test_f12_summaries_of_fed_placeholders(
    tmp_path: Path, variables: str, events_of: Any, heard: Any, model: Callable[..., Any]
) -> None:
    """They are computed from the feed of a training step, and recorded with the step after it."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        x = tf1.placeholder(tf.float32, [], name="x")
        tf1.summary.scalar("fed", x)
        train = tf1.assign_add(step, 1)
        with tf.control_dependencies([train]):
            train = tf.identity(x)
    sv = Supervisor(graph=graph, logdir=str(tmp_path), save_summaries_secs=0.001, save_model_secs=0)
    events = sv.events()
    async with sv.managed_session() as sess:
        for value in range(1, 2000):
            await sess.run(train, {x: float(value)})  # in step n, x is n
            if sv.status().scalars.get("fed", 0) > 20:
                break
    failed = [event async for event in events if event.kind in ("summary.failed", "summary.no_carrier")]
    assert not failed
    (events,) = events_of(tmp_path)
    recorded = [(e.step, e.summary.value[0].simple_value) for e in events if e.summary.value[:1] and "fed" in str(e)]
    assert len(recorded) > 2
    assert all(step == value for step, value in recorded)


async def test_f12_summaries_steal_no_batch(tmp_path: Path, events_of: Any) -> None:
    """Every element goes to a training step, however often summaries are due. TensorFlow lost 6 of 30."""
    graph, train, element = numbers(200)
    with graph.as_default():
        tf1.summary.scalar("seen", element)
    sv = Supervisor(graph=graph, logdir=str(tmp_path), save_summaries_secs=0.001, save_model_secs=0)
    trained = []
    async with sv.managed_session() as sess:
        while not sv.should_stop():
            trained.append(float(await sess.run(train)))
    assert trained == [float(n) for n in range(1, 201)]
    (events,) = events_of(tmp_path)
    recorded = [(e.step, e.summary.value[0].simple_value) for e in events if e.summary.value[:1] and "seen" in str(e)]
    assert len(recorded) > 2
    assert all(step == value for step, value in recorded), "of the very batch of that step"


async def test_f13_a_nan_histogram_does_not_end_the_training(
    tmp_path: Path, heard: Any, model: Callable[..., Any], variables: str
) -> None:
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        x = tf1.placeholder(tf.float32, [2], name="x")
        tf1.summary.histogram("nan", x)
        tf1.summary.scalar("good", tf.constant(3.0))
        with tf.control_dependencies([tf1.assign_add(step, 1)]):
            train = tf.identity(x)
    sv = Supervisor(graph=graph, logdir=str(tmp_path), save_summaries_secs=0.001, save_model_secs=0)
    events = sv.events()
    async with sv.managed_session() as sess:
        steps = 0
        while sv.status().summary_failures < 3:
            assert np.isnan(await sess.run(train, {x: [np.nan, 1.0]})).any()
            steps += 1
        assert await sess.run(step) == steps, "no step was lost"
        assert sv.status().scalars["good"] == 3.0, "nor was the summary beside it"
        assert not sv.should_stop()
    failed = [event async for event in events if event.kind == "summary.failed"]
    assert "nan" in failed[0].message


@pytest.mark.parametrize("colour", ["task", "loop on a thread"])
async def test_f13_a_dead_service_stops_everything_at_once(colour: str, counter: Callable[..., Any]) -> None:
    """The stop is set, a stream ends, a waiting body wakes, and the service's error leaves the block."""
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=60)
    error = OSError("the service died")
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def die() -> None:
        raise error

    def die_on_a_thread() -> None:
        raise error

    with pytest.raises(OSError, match="the service died") as raised:
        async with sv.managed_session() as sess:
            stream = sess.steps(made.train)
            await anext(stream)
            if colour == "task":
                sv.start_soon(die)
            else:
                sv.loop(60, die_on_a_thread)
            async for _ in stream:
                pass
            await sv.wait_for_stop()
    assert raised.value is error
    assert loop.time() - begun < 20, "nobody waited for the grace"


# ------------------------------------------------------------------ F14


async def test_f14_a_clean_end_is_quick(tmp_path: Path) -> None:
    """Feeders that are blocked in full queues are freed; TensorFlow waits for 120 s, then raises."""
    graph, train, _ = numbers(10**9)
    sv = Supervisor(graph=graph, logdir=str(tmp_path), stop_grace_secs=120)
    loop = asyncio.get_running_loop()
    async with sv.managed_session() as sess:
        for _ in range(10):
            await sess.run(train)
        sv.loop(3600, lambda: None)
        sv.start_soon(sv.wait_for_stop)
        ended = loop.time()
    assert loop.time() - ended < 10
    assert {service.state for service in sv.status().services} == {"done"}


async def test_f14_after_success_what_runs_on_is_a_warning(
    counter: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A service that does not heed the stop is cancelled after the grace, and is no error after a success."""
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=0.05)
    release = threading.Event()

    def deaf() -> None:
        release.wait(60)

    try:
        async with sv.managed_session() as sess:
            sv.loop(60, deaf)
            await sess.run(made.train)
    finally:
        release.set()
    (left,) = [record for record in caplog.records if "still running after the stop" in record.getMessage()]
    assert left.levelname == "WARNING"
    assert "deaf" in left.getMessage()


async def test_f14_after_a_requested_stop_it_is_named(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=0.05)
    release = threading.Event()

    def deaf() -> None:
        release.wait(60)

    try:
        with pytest.raises(StopGraceExceeded, match="deaf") as raised:
            async with sv.managed_session() as sess:
                sv.loop(60, deaf)
                await sess.run(made.train)
                sv.request_stop()
        assert isinstance(raised.value, RuntimeError)
    finally:
        release.set()


# ------------------------------------------------------------------ F16


@pytest.mark.parametrize("handle_signals", [False, True])
def test_f16_ctrl_c_in_a_blocked_run(child: Any, tmp_path: Path, handle_signals: bool) -> None:
    """The loop ticks, the signal is heard, the session is closed, which frees the run, and the process ends."""
    process = child("blocked", logdir=str(tmp_path), handle_signals=handle_signals)
    process.wait_for("blocked")
    process.signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT, process.output
    assert process.secs < 25, "not after a grace"
    assert tf.train.load_variable(str(tmp_path), "global_step") == 3, "what was trained before is saved"


@pytest.mark.parametrize("writes", [False, True])
async def test_f16_a_run_that_never_ends_does_not_cost_what_was_trained(
    writes: bool, counter: Callable[..., Any], tmp_path: Path, variables: str, saved: Any
) -> None:
    """The device thread is never free for the last save, so that is made beside the run that waits.

    If that run writes nothing, the state is that of the last step. Otherwise it may hold half a step, and is put
    aside as an emergency checkpoint.
    """
    made = counter()
    with made.graph.as_default():
        element = tf1.FIFOQueue(1, tf.int64, shapes=[()], name="never").dequeue()
        stuck = tf1.assign_add(made.step, element) if writes else element
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), stop_grace_secs=2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, sv.managed_session() as sess:
            for _ in range(3):
                await sess.run(made.train)
            await sv.save()
            await sess.run(made.train)
            run = asyncio.ensure_future(sess.run(stuck))
            while in_flight(sess) is None:
                await asyncio.sleep(0.001)
            limit.reschedule(asyncio.get_running_loop().time())
            await run
    assert saved(tmp_path)[-1] == ("model.ckpt-3" if writes else "model.ckpt-4")
    assert (tmp_path / "model.ckpt-4-emergency.index").exists() == writes
    async with sv.managed_session() as sess:
        assert await sess.run(made.step) == (3 if writes else 4)


async def test_f16_a_cancelled_step_is_told(counter: Callable[..., Any]) -> None:
    """Not started: it never runs. In flight: it ends by itself, and an event says that it did."""
    made = counter()
    with made.graph.as_default():
        gate = tf1.FIFOQueue(1, tf.float32, shapes=[()], name="gate")
        opening = gate.enqueue(1.0)
        with tf.control_dependencies([gate.dequeue()]):
            gated = tf1.assign_add(made.step, 10)
    sv = Supervisor(graph=made.graph)
    events = sv.events()
    async with sv.managed_session() as sess:
        in_flight = asyncio.ensure_future(_run(sess, gated))
        while sv.status().session.device.busy is None:
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(_run(sess, made.train))
        await asyncio.sleep(0)
        for task in (in_flight, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await sess.run(opening)
        assert await sess.run(made.step) == 10, "the one in flight was applied, the other one was not"
    dropped = [event async for event in events if event.kind == "run.dropped"]
    assert len(dropped) == 1
    assert "finished" in dropped[0].message
    assert dropped[0].level == "warning"


async def _run(sess: Any, fetches: Any) -> Any:
    return await sess.run(fetches)


# ------------------------------------------------------------------ F17, F18


async def test_f17_end_of_data_is_clean_and_named(tmp_path: Path) -> None:
    graph, train, _ = numbers(3)
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    events = sv.events()
    steps = 0
    async with sv.managed_session() as sess:
        while not sv.should_stop():
            await sess.run(train)
            steps += 1
    assert steps == 3
    kinds = [event async for event in events]
    clean = [event for event in kinds if event.kind == "stop.clean"]
    assert len(clean) == 1
    assert "OutOfRangeError" in clean[0].message
    assert "element" in clean[0].message or "numbers" in clean[0].message, "the op or the queue is named"
    assert "body" in clean[0].message, "and who told it"


async def test_f17_an_out_of_range_error_that_is_no_end_of_data(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, clean_stop_exception_types=[])
    with pytest.raises(tf.errors.OutOfRangeError):
        async with sv.managed_session():
            raise tf.errors.OutOfRangeError(None, None, "index out of range")


async def test_f17_own_clean_types(counter: Callable[..., Any]) -> None:
    class Enough(Exception): ...

    sv = Supervisor(graph=counter().graph, clean_stop_exception_types=[Enough])
    async with sv.managed_session():
        raise Enough
    with pytest.raises(tf.errors.OutOfRangeError):
        async with sv.managed_session():
            raise tf.errors.OutOfRangeError(None, None, "not clean here")


@pytest.mark.parametrize("where", ["task", "loop", "init_fn"])
async def test_f17_a_stray_stop_iteration_is_an_error(where: str, counter: Callable[..., Any]) -> None:
    made = counter()

    def stray(*args: Any) -> None:
        next(iter(()))

    async def stray_async() -> None:
        stray()

    sv = Supervisor(graph=made.graph, init_fn=stray if where == "init_fn" else None)
    with pytest.raises(RuntimeError, match="StopIteration"):
        async with sv.managed_session():
            if where == "task":
                sv.start_soon(stray_async)
            else:
                sv.loop(60, stray)
            await sv.wait_for_stop()


async def test_f18_the_users_exception_is_never_lost(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    for stop in (lambda: sv.request_stop(), lambda: sv.request_stop(tf.errors.OutOfRangeError(None, None, "over"))):
        error = KeyError("after the stop")
        with pytest.raises(KeyError) as raised:
            async with sv.managed_session():
                stop()
                raise error
        assert raised.value is error


async def test_f18_request_stop_with_a_fresh_exception(counter: Callable[..., Any]) -> None:
    """Outside of any except block; also from a thread, and as an exc_info tuple."""
    made = counter()
    sv = Supervisor(graph=made.graph)
    for report in (lambda error: error, lambda error: (type(error), error, None)):
        error = ValueError("fresh")
        with pytest.raises(ValueError, match="fresh") as raised:
            async with sv.managed_session():
                await asyncio.to_thread(sv.request_stop, report(error))
                assert sv.should_stop()
                await sv.wait_for_stop()
        assert raised.value is error


async def test_f18_stop_on_exception_lets_interrupts_pass(counter: Callable[..., Any]) -> None:
    sv = Supervisor(graph=counter().graph)
    for interrupt in (KeyboardInterrupt, SystemExit):
        caught = None
        try:
            async with sv.managed_session():
                with sv.stop_on_exception():
                    raise interrupt("now")
        except BaseException as error:
            caught = error
        assert type(caught) is interrupt
        assert sv.should_stop()
    with pytest.raises(ValueError, match="reported"):
        async with sv.managed_session():
            with sv.stop_on_exception():
                raise ValueError("reported")
            assert sv.should_stop(), "an ordinary one is reported and swallowed here, and leaves with the block"


# ------------------------------------------------------------------ F19


async def test_f19_the_producers_own_error_is_raised(tmp_path: Path) -> None:
    """Not "queue is closed", not a clean end, and no endless wait."""
    graph = tf.Graph()
    with graph.as_default():
        contents = tf1.read_file(str(tmp_path / "missing.txt"))
        queue = tf1.FIFOQueue(4, tf.string, shapes=[()], name="files")
        tf1.train.add_queue_runner(tf1.train.QueueRunner(queue, [queue.enqueue(contents)]))
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf1.assign_add(step, 1)]):
            train = tf.identity(queue.dequeue())
    sv = Supervisor(graph=graph, logdir=str(tmp_path / "log"), stop_grace_secs=10)
    events = sv.events()
    with pytest.raises(tf.errors.NotFoundError, match=r"missing\.txt"):
        async with sv.managed_session() as sess:
            while not sv.should_stop():
                await sess.run(train)
    no_producer = [event async for event in events if event.kind == "queue.no_producer"]
    assert "no producer alive for queue files" in no_producer[0].message


# ------------------------------------------------------------------ F24, F25


async def test_f24_no_graph_is_held_over_an_await(counter: Callable[..., Any], tmp_path: Path) -> None:
    """Tasks that build and train their own graphs at the same time never see another's."""
    default = tf1.get_default_graph()
    eager = tf.executing_eagerly()

    async def work(start: int) -> int:
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.train.get_or_create_global_step()
            bump = tf1.assign_add(step, start)
        sv = Supervisor(graph=graph, logdir=str(tmp_path / str(start)), save_model_secs=0)
        async with sv.managed_session() as sess:
            for _ in range(5):
                assert tf1.get_default_graph() is default
                assert tf.executing_eagerly() == eager
                await sess.run(bump)
                with tf.Graph().as_default() as own:
                    assert tf1.get_default_graph() is own
            assert await sess.call(lambda raw: tf1.get_default_graph()) is graph
            return int(await sess.run(step))

    assert await asyncio.gather(*(work(start) for start in range(1, 7))) == [5 * start for start in range(1, 7)]
    assert tf1.get_default_graph() is default


async def test_f24_a_service_thread_may_use_the_graph(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    seen: list[Any] = []

    async with sv.managed_session() as sess:
        sv.loop(60, lambda: seen.append(sess.blocking.run("loss:0", {"x:0": [[0.0, 0.0]]})))
        while not seen:
            await asyncio.sleep(0.001)
    assert seen == [1.0]


@contextlib.asynccontextmanager
async def plain(sv: Supervisor) -> AsyncIterator[Any]:
    async with sv.managed_session() as sess:
        yield sess


@contextlib.asynccontextmanager
async def other_tasks(sv: Supervisor) -> AsyncIterator[Any]:
    """Entered in one task, left in another, as a fixture of pytest-asyncio is."""

    async def fixture() -> AsyncIterator[Any]:
        async with sv.managed_session() as sess:
            yield sess

    generator = fixture()
    sess = await asyncio.create_task(_next(generator))
    try:
        yield sess
    finally:
        with contextlib.suppress(StopAsyncIteration):
            await asyncio.create_task(_next(generator))


async def _next(generator: Any) -> Any:
    return await anext(generator)


@contextlib.asynccontextmanager
async def exit_stack(sv: Supervisor) -> AsyncIterator[Any]:
    """An exit stack that is closed elsewhere."""
    stack = contextlib.AsyncExitStack()
    sess = await stack.enter_async_context(sv.managed_session())
    try:
        yield sess
    finally:
        await asyncio.create_task(stack.aclose())


@contextlib.asynccontextmanager
async def wait_for(sv: Supervisor) -> AsyncIterator[Any]:
    block = sv.managed_session()
    sess = await asyncio.wait_for(block.__aenter__(), 30)
    try:
        yield sess
    finally:
        await block.__aexit__(None, None, None)


HOSTS = [plain, other_tasks, exit_stack, wait_for]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
async def test_f25_a_clean_end_in_each_host(host: Any, counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    async with host(Supervisor(graph=made.graph, logdir=str(tmp_path))) as sess:
        assert await sess.run(made.train) == 1
    assert sess.closed
    assert saved(tmp_path)[-1] == "model.ckpt-1"


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
async def test_f25_an_error_of_a_service_leaves_each_host_bare(host: Any, counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = OSError("service")

    async def die() -> None:
        raise error

    with pytest.raises(OSError, match="service") as raised:
        async with host(sv):
            sv.start_soon(die)
            await sv.wait_for_stop()
    assert raised.value is error, "no group, no wrapper"


async def test_f25_in_a_task_group(counter: Callable[..., Any]) -> None:
    """The group wraps what leaves its tasks; what leaves the block into it is bare."""
    made = counter()
    error = OSError("body")

    async def train() -> None:
        async with Supervisor(graph=made.graph).managed_session() as sess:
            await sess.run(made.train)
            raise error

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(train())
    assert raised.value.exceptions == (error,)


async def test_f25_under_a_timeout(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), stop_grace_secs=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, sv.managed_session() as sess:
            await sess.run(made.train)
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
    assert sess.closed
    assert saved(tmp_path)[-1] == "model.ckpt-1", "saved on a cancellation, too"
