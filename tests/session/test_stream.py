"""Step streams: feeds of every kind, run-ahead, turns between steps, and clean ends; on real TensorFlow sessions."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.device_thread import INTERACTIVE_PER_STEP
from asupervisor.session.session import AsyncSession
from asupervisor.session.stream import StepStream

pytestmark = pytest.mark.modes
WAIT = 20

try:
    import uvloop
except ImportError:
    pass
else:
    uvloop.run(asyncio.sleep(0))  # it opens one pipe for the whole process, which is no test's leak


async def collect(stream: StepStream) -> list[Any]:
    return [result async for result in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.001)


def streams(sess: AsyncSession) -> int:
    return sess.statistics().streams


# ------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("ahead", [0, 1, 2, 64])
async def test_one_result_per_step_in_order(sess: AsyncSession, model: SimpleNamespace, ahead: int) -> None:
    stream = sess.steps(model.count, max_steps=200, ahead=ahead)
    assert await collect(stream) == list(range(1, 201))
    assert (stream.steps_run, stream.results_taken, stream.ended_by) == (200, 200, "max_steps")
    assert sess.training_runs == 200
    assert streams(sess) == 0
    statistics = sess.statistics()
    assert (statistics.runs, statistics.step_time.count) == (200, 200)


async def test_results_are_what_run_returns(sess: AsyncSession, model: SimpleNamespace) -> None:
    structure = {"step": model.count, "rest": [model.double, (model.weight.op,)]}
    (first, second) = await collect(sess.steps(structure, {model.x: [2.0]}, max_steps=2))
    assert set(first) == {"step", "rest"}
    assert (first["step"], second["step"]) == (1, 2)
    assert first["rest"][0].tolist() == [4.0]
    assert first["rest"][1] == (None,)


async def test_nothing_to_do(sess: AsyncSession, model: SimpleNamespace) -> None:
    for stream in (sess.steps(model.count, max_steps=0), sess.steps(model.train, [])):
        assert await collect(stream) == []
        assert stream.steps_run == 0
    assert await sess.run(model.step) == 0


async def test_bad_arguments_are_refused_at_once(sess: AsyncSession, model: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="ahead=-1"):
        sess.steps(model.count, ahead=-1)
    with pytest.raises(ValueError, match="max_steps=-2"):
        sess.steps(model.count, max_steps=-2)
    with pytest.raises(TypeError, match="not int"):
        sess.steps(model.count, 5)
    with pytest.raises(TypeError, match="not str"):
        sess.steps(model.count, "feeds")


# --------------------------------------------------------------------------------------------------------- feeds


def batches(model: SimpleNamespace, count: int) -> list[dict[Any, Any]]:
    return [{model.x: np.array([number], np.float32)} for number in range(count)]


@pytest.mark.parametrize("ahead", [0, 64])
@pytest.mark.parametrize(
    "kind", ["list", "generator", "callable", "callable_stop", "async_generator", "coroutine_function", "mixed_keys"]
)
async def test_feeds_of_every_kind(sess: AsyncSession, model: SimpleNamespace, kind: str, ahead: int) -> None:
    items = batches(model, 40)
    source = iter(items)

    async def asynchronous() -> AsyncIterator[Any]:
        for item in items:
            await asyncio.sleep(0)
            yield item

    def stop() -> Any:
        return next(source)  # StopIteration is its end

    async def coroutine() -> Any:
        return next(source, None)

    feeds: Any = {
        "list": items,
        "generator": (item for item in items),
        "callable": lambda: next(source, None),
        "callable_stop": stop,
        "async_generator": asynchronous(),
        "coroutine_function": coroutine,
        "mixed_keys": [item if number % 3 else {**item, model.number: number} for number, item in enumerate(items)],
    }[kind]
    stream = sess.steps([model.train, model.double], feeds, ahead=ahead)
    results = await asyncio.wait_for(collect(stream), WAIT)
    assert [step for step, _ in results] == list(range(1, 41))
    assert [double.tolist() for _, double in results] == [[2.0 * number] for number in range(40)]
    assert (stream.ended_by, stream.steps_run, stream.feeds_taken) == ("feed", 40, 40)


async def test_feeds_that_only_session_run_can_take(sess: AsyncSession, model: SimpleNamespace) -> None:
    with model.graph.as_default():
        sparse = tf.compat.v1.sparse_placeholder(tf.float32)
        total = tf.sparse.reduce_sum(sparse)
    value = tf.compat.v1.SparseTensorValue([[0, 0]], [2.0], [1, 1])
    feeds = [{sparse: value}] * 5
    results = await collect(sess.steps([total, model.count], feeds))
    assert [(float(result), int(step)) for result, step in results] == [(2.0, step) for step in range(1, 6)]
    assert [float(total) for total in await collect(sess.steps(total, {sparse: value}, max_steps=2))] == [2.0, 2.0]


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("kind", ["generator", "async_generator"])
async def test_a_feed_may_reuse_its_buffer(sess: AsyncSession, model: SimpleNamespace, kind: str, size: int) -> None:
    buffer = np.zeros([size], np.float32)

    def generate() -> Iterator[Any]:
        for number in range(20):
            buffer.fill(number)
            yield {model.x: buffer}

    async def generate_async() -> AsyncIterator[Any]:
        for number in range(20):
            buffer.fill(number)
            yield {model.x: buffer}

    feeds = generate() if kind == "generator" else generate_async()
    results = await collect(sess.steps([model.double, model.count], feeds))
    assert [set(np.unique(double)) for double, _ in results] == [{2.0 * number} for number in range(20)]


async def test_a_feed_dictionary_is_taken_as_it_was(sess: AsyncSession, model: SimpleNamespace) -> None:
    buffer = np.ones([4], np.float32)
    stream = sess.steps([model.double, model.count], {model.x: buffer}, max_steps=5, ahead=1)
    results = [await anext(stream)]
    buffer.fill(7)
    results += await collect(stream)
    assert [double.tolist() for double, _ in results] == [[2.0] * 4] * 5


async def test_the_next_feed_is_made_while_a_step_runs(sess: AsyncSession, model: SimpleNamespace) -> None:
    asked: list[int] = []

    def generate() -> Iterator[Any]:
        for number in range(6):
            asked.append(threading.get_ident())
            yield {model.x: [float(number)]}

    model.gate.arm()
    stream = sess.steps([model.held_count, model.double], generate())
    first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await model.gate.wait_entered()
    await until(lambda: len(asked) >= 2)  # the first step is still in the gate
    device = sess.executor.device.ident
    assert device not in asked
    assert threading.get_ident() not in asked
    model.gate.release.set()
    assert (await first)[0] == 1
    assert len(await collect(stream)) == 5


@pytest.mark.parametrize("kind", ["generator", "callable", "async_generator"])
async def test_in_lock_step_a_feed_may_depend_on_the_last_result(
    sess: AsyncSession, model: SimpleNamespace, kind: str
) -> None:
    last = 1.0
    seen: list[float] = []

    def feed() -> Any:
        seen.append(last)
        return {model.x: np.array([last], np.float32)}

    async def asynchronous() -> AsyncIterator[Any]:
        while True:
            yield feed()

    def generate() -> Iterator[Any]:
        while True:
            yield feed()

    feeds = {"generator": generate(), "callable": feed, "async_generator": asynchronous()}[kind]
    stream = sess.steps([model.double, model.count], feeds, ahead=0, max_steps=8)
    async for double, _ in stream:
        last = float(double[0])
        assert stream.steps_run == stream.results_taken == stream.feeds_taken
    assert seen == [2.0**power for power in range(8)]
    await stream.aclose()
    if isinstance(feeds, AsyncIterator):
        await feeds.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["generator", "callable", "async_generator"])
async def test_an_error_of_the_feed_is_raised_as_itself_after_the_steps_before_it(
    sess: AsyncSession, model: SimpleNamespace, kind: str
) -> None:
    error = LookupError("no more disk")
    items = iter(batches(model, 3))

    def feed() -> Any:
        item = next(items, None)
        if item is None:
            raise error
        return item

    async def asynchronous() -> AsyncIterator[Any]:
        while True:
            yield feed()

    def generate() -> Iterator[Any]:
        while True:
            yield feed()

    feeds = {"generator": generate(), "callable": feed, "async_generator": asynchronous()}[kind]
    stream = sess.steps(model.train, feeds)
    results = []
    with pytest.raises(LookupError) as caught:
        async for result in stream:
            results.append(result)
    assert caught.value is error
    assert results == [1, 2, 3]
    assert (stream.ended_by, stream.steps_run) == ("error", 3)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_wrong_feed_raises_what_run_raises(
    sess: AsyncSession, model: SimpleNamespace, asynchronous: bool
) -> None:
    async def generate(items: list[Any]) -> AsyncIterator[Any]:
        for item in items:
            yield item

    good = batches(model, 2)
    for wrong in ({model.x: [[1.0]]}, {model.x: None}, {"nobody:0": 1}, 7):
        with pytest.raises((ValueError, TypeError)) as plain:
            sess.raw.run(model.train, wrong)
        items = [*good, wrong]
        stream = sess.steps(model.train, generate(items) if asynchronous else items)
        with pytest.raises(type(plain.value)) as caught:
            await collect(stream)
        assert str(caught.value) == str(plain.value)
        assert stream.steps_run == 2


# ------------------------------------------------------------------------------------------------------ run-ahead


@pytest.mark.parametrize("ahead", [1, 5, 64])
async def test_it_runs_ahead_so_far_and_no_further(sess: AsyncSession, model: SimpleNamespace, ahead: int) -> None:
    stream = sess.steps(model.count, ahead=ahead)
    for taken in range(1, 4):
        assert await anext(stream) == taken
        await until(lambda: stream._steps.parked)
        assert 0 <= stream.steps_run - stream.results_taken <= ahead
    assert stream.steps_run - stream.results_taken > ahead // 2 - 1
    await stream.aclose()


async def test_in_lock_step_no_step_is_run_before_it_is_asked_for(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps(model.count, ahead=0)
    for taken in range(1, 6):
        assert await anext(stream) == taken
        assert await sess.run(model.step) == taken
    await stream.aclose()
    assert stream.steps_run == 5


async def test_quick_steps_are_delivered_in_chunks(sess: AsyncSession, model: SimpleNamespace) -> None:
    before = sess.statistics().loop_lag.count
    assert len(await collect(sess.steps(model.count, max_steps=1500))) == 1500
    assert sess.statistics().loop_lag.count - before < 750


async def test_a_slow_step_is_delivered_at_once(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps(model.held_count)
    assert await anext(stream) == 1
    model.gate.arm()
    await model.gate.wait_entered()
    model.gate.release.set()
    taken = 1
    while taken < model.gate.passed - 1:
        taken = await asyncio.wait_for(anext(stream), WAIT)
    await stream.aclose()


async def test_a_consumer_that_never_waits_does_not_stop_the_loop(sess: AsyncSession, model: SimpleNamespace) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    stream = sess.steps(model.count, max_steps=2000)
    async for _ in stream:
        sum(range(4000))  # slower than a step, so that there is always something to take
    ticker.cancel()
    assert ticks > 20


# ------------------------------------------------------------------------------------------- turns between steps


async def test_interactive_runs_wait_for_one_step_and_do_not_starve_the_stream(
    sess: AsyncSession, model: SimpleNamespace, settle: Callable[[], Any]
) -> None:
    order: list[str] = []

    def step() -> np.int32:
        order.append("step")
        return np.int32(model.gate())

    with model.graph.as_default():
        noted = tf.compat.v1.py_func(step, [], tf.int32)
        predict = tf.compat.v1.py_func(lambda: order.append("predict"), [], [])
    await sess.run(predict)
    order.clear()
    model.gate.arm()
    stream = sess.steps(noted, ahead=1000, max_steps=200)
    consumer = asyncio.create_task(collect(stream))
    await model.gate.wait_entered()
    predictions = [asyncio.create_task(sess.run(predict)) for _ in range(21)]  # type: ignore[arg-type]
    await settle()
    model.gate.release.set()
    await asyncio.gather(*predictions)
    await consumer
    assert order[0] == "step"  # the one in flight
    text = "".join("s" if entry == "step" else "p" for entry in order)
    rounds = [len(entry) for entry in text.strip("s").split("s")]
    assert rounds == [INTERACTIVE_PER_STEP] * 5 + [1]
    assert text.count("s") == 200


async def test_a_snapshot_is_taken_between_two_steps_not_at_the_end(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps([model.train, model.count], {model.x: [1.0]}, ahead=4)
    consumer = asyncio.create_task(collect(stream))
    seen = []
    for _ in range(20):
        seen.append(await asyncio.wait_for(sess.control(lambda raw: raw.run([model.step, model.weight])), WAIT))
    await stream.aclose()
    await consumer
    assert all(step == 2 * weight for step, weight in seen)  # never within a step
    assert seen[-1][0] > seen[0][0]  # and the stream went on


async def test_two_streams_take_turns(make_session: Any, model: SimpleNamespace) -> None:
    executor = DeviceExecutor()
    first, second = make_session(executor), make_session(executor)
    done: list[int] = []

    async def train(sess: AsyncSession) -> None:
        async for step in sess.steps(model.count, max_steps=300, ahead=4):
            done.append(int(step))

    await asyncio.gather(train(first), train(second))
    middle = done[150:450]
    assert min(middle) > 30  # neither ran away from the other
    assert await first.close_raw(WAIT)
    assert await second.close_raw(WAIT)
    assert await executor.aclose(WAIT)


class Rider:
    """Rides once; remembers what it got."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.got: list[Any] = []

    def fetches_for(self, plan: Any) -> list[Any]:
        return [self.tensor]

    def delivered(self, values: Any, raw: Any) -> None:
        self.got.append(np.asarray(values[0]).tolist())


async def test_riders_and_alarms_work_in_streams(sess: AsyncSession, model: SimpleNamespace) -> None:
    rung: list[tuple[int, int]] = []

    def alarm() -> None:
        rung.append((sess.training_runs, int(sess.raw.run(model.step))))
        if sess.training_runs < 40:
            sess.board(rider)
            sess.set_alarm(sess.training_runs + 10, alarm)

    rider = Rider(model.double)
    sess.set_alarm(10, alarm)
    feeds = batches(model, 50)
    assert await collect(sess.steps(model.train, feeds)) == list(range(1, 51))
    assert rung == [(10, 10), (20, 20), (30, 30), (40, 40)]
    assert rider.got == [[20.0], [40.0], [60.0]]  # of the step after each alarm, with its own feed


async def test_pause_holds_a_stream_at_a_step_boundary(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps(model.count, ahead=2)
    consumer = asyncio.create_task(collect(stream))
    await until(lambda: stream.steps_run > 3)
    sess.pause()
    await until(lambda: stream._steps.parked and sess.executor.busy() is None)
    held_at = stream.steps_run
    assert await sess.run(model.step) == held_at
    await asyncio.sleep(0.02)  # it must lose
    assert await sess.run(model.step) == held_at
    sess.resume()
    await until(lambda: stream.steps_run > held_at + 3)
    await stream.aclose()
    await consumer


async def test_a_paused_stream_ends_with_the_stop(make_session: Any, model: SimpleNamespace) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    stream = sess.steps(model.count, ahead=2)
    consumer = asyncio.create_task(collect(stream))
    await until(lambda: stream.steps_run > 3)
    sess.pause()
    await until(lambda: stream._steps.parked)
    coordinator.request_stop()
    results = await asyncio.wait_for(consumer, WAIT)
    assert len(results) == stream.steps_run == await sess.run(model.step)
    assert stream.ended_by == "stop"


# ----------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("feeds", ["none", "generator", "stuck_generator", "async_generator"])
async def test_a_stop_ends_it_and_every_step_that_ran_is_yielded(
    make_session: Any, model: SimpleNamespace, feeds: str
) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    release = threading.Event()

    def generate(stuck: bool) -> Iterator[Any]:
        for number in range(10**9):
            if stuck and number == 10:
                assert release.wait(WAIT)
            yield {model.x: [1.0]}

    async def generate_async() -> AsyncIterator[Any]:
        while True:
            await asyncio.sleep(0)
            yield {model.x: [1.0]}

    source: Any = {
        "none": {model.x: [1.0]},
        "generator": generate(False),
        "stuck_generator": generate(True),
        "async_generator": generate_async(),
    }[feeds]
    stream = sess.steps(model.train, source)
    results = []
    async for step in stream:
        results.append(step)
        if step == 10:
            coordinator.request_stop()
    assert results == list(range(1, stream.steps_run + 1))
    assert stream.steps_run == await sess.run(model.step)
    assert 10 <= stream.steps_run <= 10 + 65
    assert stream.ended_by == "stop"
    assert streams(sess) == 0
    release.set()
    again = sess.steps(model.train, {model.x: [1.0]})
    assert await collect(again) == []  # the stop is looked at before the first step
    assert again.ended_by == "stop"


async def test_a_stop_while_the_feed_is_stuck_does_not_wait_for_it(make_session: Any, model: SimpleNamespace) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    release = threading.Event()

    def generate() -> Iterator[Any]:
        for number in range(100):
            if number == 3:
                assert release.wait(WAIT)
            yield {model.x: [1.0]}

    stream = sess.steps(model.train, generate())
    results = []
    for _ in range(3):
        results.append(await anext(stream))
    waiting = asyncio.create_task(collect(stream))
    await until(lambda: stream._steps.feed.hungry)
    label = sess.executor.statistics().side_threads
    assert label == ("feed " + generate.__qualname__,)
    coordinator.request_stop()
    assert await asyncio.wait_for(waiting, WAIT) == []
    assert (stream.steps_run, stream.ended_by) == (3, "stop")
    release.set()


async def test_a_stop_from_another_thread_ends_a_stream_whose_consumer_waits(
    make_session: Any, model: SimpleNamespace
) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    model.gate.arm()
    stream = sess.steps(model.held_count)
    consumer = asyncio.create_task(collect(stream))
    await model.gate.wait_entered()
    threading.Thread(target=coordinator.request_stop).start()
    await until(coordinator.should_stop)
    assert not consumer.done()  # the step is in flight
    model.gate.release.set()
    assert await asyncio.wait_for(consumer, WAIT) == [1]
    assert stream.steps_run == 1


async def test_stop_when_ends_with_the_result_for_which_it_is_true(sess: AsyncSession, model: SimpleNamespace) -> None:
    on_device: set[bool] = set()

    def reached(step: Any) -> bool:
        on_device.add(sess.executor.on_device_thread())
        return bool(step >= 7)

    stream = sess.steps(model.count, stop_when=reached)
    assert await collect(stream) == list(range(1, 8))
    assert (stream.steps_run, stream.ended_by, on_device) == (7, "stop_when", {True})
    assert await sess.run(model.step) == 7


async def test_an_error_of_stop_when_is_raised_as_itself(sess: AsyncSession, model: SimpleNamespace) -> None:
    error = KeyError("loss")

    def fail(step: Any) -> bool:
        if step == 3:
            raise error
        return False

    results = []
    with pytest.raises(KeyError) as caught:
        async for step in sess.steps(model.count, stop_when=fail):
            results.append(step)
    assert caught.value is error
    assert results == [1, 2, 3]


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration(), asyncio.CancelledError()])
async def test_an_exception_that_would_pass_for_an_end_does_not(
    sess: AsyncSession, model: SimpleNamespace, error: BaseException
) -> None:
    def fail(step: Any) -> bool:
        raise error

    with pytest.raises(RuntimeError) as caught:
        await asyncio.wait_for(collect(sess.steps(model.count, stop_when=fail)), WAIT)
    assert caught.value.__cause__ is error


async def test_the_end_of_a_queue_is_a_clean_end_and_names_its_op(
    sess: AsyncSession, model: SimpleNamespace, sink: Any
) -> None:
    async def produce() -> None:
        for number in range(5):
            await sess.run(model.enqueue, {model.number: number})
        await sess.run(model.close_queue)

    producer = asyncio.create_task(produce())
    stream = sess.steps([model.dequeue, model.consume])
    results = await asyncio.wait_for(collect(stream), WAIT)
    await producer
    assert [int(step) for _, step in results] == [1, 2, 3, 4, 5]
    assert (stream.ended_by, stream.steps_run) == ("out_of_range", 5)
    message, data = await sink.wait_for("stream.end_of_input")
    assert data == {"op": "take", "steps_run": 5}
    assert "take" in message


async def test_an_error_of_a_step_comes_after_the_results_before_it(sess: AsyncSession, model: SimpleNamespace) -> None:
    feeds = [{model.x: [-1.0]}] * 4 + [{model.x: [1.0]}] + [{model.x: [-1.0]}] * 4
    results = []
    stream = sess.steps(model.failing_train, feeds)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        async for step in stream:
            results.append(step)
    assert results == [1, 2, 3, 4]
    assert caught.value.op is not None
    assert "failing" in caught.value.op.name
    assert (stream.ended_by, stream.steps_run) == ("error", 4)
    assert await sess.run(model.step) == 4


@pytest.mark.parametrize("ahead", [0, 8])
async def test_aclose_leaves_no_step_half_done(sess: AsyncSession, model: SimpleNamespace, ahead: int) -> None:
    model.gate.arm()
    stream = sess.steps(model.held_count, ahead=ahead)
    consumer = asyncio.create_task(collect(stream))
    await model.gate.wait_entered()
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0.01)  # it must lose
    assert not closing.done()
    model.gate.release.set()
    await asyncio.wait_for(asyncio.gather(closing, consumer), WAIT)
    assert (stream.steps_run, stream.ended_by) == (1, "closed")
    assert await sess.run(model.step) == 1
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_cancelled_aclose_closes_all_the_same(sess: AsyncSession, model: SimpleNamespace) -> None:
    model.gate.arm()
    stream = sess.steps(model.held_count)
    consumer = asyncio.create_task(collect(stream))
    await model.gate.wait_entered()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.aclose()
    model.gate.release.set()
    await asyncio.wait_for(consumer, WAIT)
    assert stream.steps_run == 1


async def test_async_with_tells_how_many_steps_ran(sess: AsyncSession, model: SimpleNamespace) -> None:
    async with sess.steps(model.count, ahead=8) as stream:
        async for step in stream:
            if step == 5:
                break
    assert stream.ended_by == "closed"
    assert stream.results_taken == 5
    assert 5 <= stream.steps_run <= 13
    assert await sess.run(model.step) == stream.steps_run


@pytest.mark.parametrize("feeds", ["none", "generator", "async_generator"])
async def test_breaking_out_of_the_loop_ends_it(sess: AsyncSession, model: SimpleNamespace, feeds: str) -> None:
    closed: list[int | None] = []

    def generate() -> Iterator[Any]:
        try:
            while True:
                yield {model.x: [1.0]}
        finally:
            closed.append(threading.get_ident())

    async def generate_async() -> AsyncIterator[Any]:
        while True:
            await asyncio.sleep(0)
            yield {model.x: [1.0]}

    source: Any = {"none": {model.x: [1.0]}, "generator": generate, "async_generator": generate_async}[feeds]
    async for step in sess.steps(model.train, source if feeds == "none" else source()):
        if step == 5:
            break
    await until(lambda: streams(sess) == 0)
    ended_at = await sess.run(model.step)
    assert await sess.run(model.step) == ended_at
    if feeds == "generator":
        del source
        await until(lambda: bool(closed))
        assert threading.get_ident() not in closed  # its clean-up code does not run on the loop
    await until(lambda: not sess.executor.statistics().side_threads)


async def test_a_stream_that_was_never_started_leaves_nothing(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps(model.train, batches(model, 3))
    await stream.aclose()
    assert (stream.steps_run, stream.ended_by) == (0, "closed")
    sess.steps(model.train, batches(model, 3))
    assert streams(sess) == 0


async def test_a_cancelled_wait_loses_no_result(sess: AsyncSession, model: SimpleNamespace) -> None:
    model.gate.arm()
    stream = sess.steps(model.held_count, max_steps=4)
    waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await model.gate.wait_entered()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    model.gate.release.set()
    assert await collect(stream) == [1, 2, 3, 4]


async def test_two_consumers_at_once_are_an_error(sess: AsyncSession, model: SimpleNamespace) -> None:
    model.gate.arm()
    stream = sess.steps(model.held_count, max_steps=1)
    waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await model.gate.wait_entered()
    with pytest.raises(RuntimeError, match="two tasks"):
        await anext(stream)
    model.gate.release.set()
    assert await waiting == 1


async def test_an_error_that_nobody_takes_is_an_event(sess: AsyncSession, model: SimpleNamespace, sink: Any) -> None:
    feeds = [{model.x: [-1.0]}, {model.x: [1.0]}]
    stream = sess.steps(model.failing_train, feeds)
    assert await anext(stream) == 1
    await until(lambda: stream.ended_by is not None)
    await stream.aclose()
    _, data = await sink.wait_for("stream.error_dropped")
    assert "InvalidArgumentError" in data["error"]
    assert data["steps_run"] == 1


async def test_an_error_of_the_last_step_of_a_closed_stream_is_an_event(
    sess: AsyncSession, model: SimpleNamespace, sink: Any
) -> None:
    with model.graph.as_default(), tf.control_dependencies([model.held]):
        fails = tf.debugging.check_numerics(tf.math.log(-tf.identity(model.x)), "late")
    model.gate.arm()
    stream = sess.steps(fails, {model.x: [1.0]})
    consumer = asyncio.create_task(collect(stream))
    await model.gate.wait_entered()
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    model.gate.release.set()
    await asyncio.wait_for(asyncio.gather(closing, consumer), WAIT)
    if stream.ended_by == "closed":
        await sink.wait_for("stream.error_dropped")


async def test_the_session_is_closed_under_a_stream(make_session: Any, model: SimpleNamespace) -> None:
    sess = make_session()
    stream = sess.steps(model.consume)
    consumer = asyncio.create_task(collect(stream))
    await until(lambda: sess.executor.busy() is not None)
    idle = sess.steps(model.count, ahead=1)
    waiting = asyncio.create_task(anext(idle))
    await asyncio.sleep(0)
    await sess.close()
    for task in (consumer, waiting):
        with pytest.raises(SessionClosed):
            await asyncio.wait_for(task, WAIT)
    with pytest.raises(SessionClosed):
        sess.steps(model.count)


async def test_after_a_stop_the_close_ends_a_starved_stream_cleanly(make_session: Any, model: SimpleNamespace) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    stream = sess.steps(model.consume)
    consumer = asyncio.create_task(collect(stream))
    await until(lambda: sess.executor.busy() is not None)
    coordinator.request_stop()
    await sess.close()
    assert await asyncio.wait_for(consumer, WAIT) == []
    assert stream.ended_by == "stop"


async def test_the_executor_is_closed_under_a_stream(make_session: Any, model: SimpleNamespace) -> None:
    executor = DeviceExecutor()
    sess = make_session(executor)
    stream = sess.steps(model.train, batches(model, 10**4), ahead=2)
    assert await anext(stream) == 1
    assert await executor.aclose(WAIT)
    with pytest.raises(SessionClosed):
        await collect(stream)
    with pytest.raises(SessionClosed):
        sess.steps(model.count)


async def test_cancelling_a_block_does_not_wait_for_its_step(sess: AsyncSession, model: SimpleNamespace) -> None:
    """The step waits for input that never comes: only the close of the session will end it."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), sess.steps(model.consume) as stream:
            await collect(stream)
    assert stream.ended_by is None
    await sess.run(model.enqueue, {model.number: 1})
    await until(lambda: stream.ended_by == "closed")
    assert stream.steps_run == 1


async def test_another_loop_is_refused(sess: AsyncSession, model: SimpleNamespace) -> None:
    stream = sess.steps(model.count)

    async def other() -> None:
        with pytest.raises(WrongEventLoop, match="another event loop"):
            await anext(stream)

    await asyncio.to_thread(asyncio.run, other())
    await stream.aclose()


async def test_a_stream_that_only_fills_a_queue_does_not_keep_the_device_thread(
    sess: AsyncSession, model: SimpleNamespace
) -> None:
    """On the device thread it would wait for ever: the queue holds one element."""
    taken = sess.steps([model.dequeue, model.consume], max_steps=30)
    consumer = asyncio.create_task(collect(taken))
    await until(lambda: sess.executor.busy() is not None)  # starved already, when the producer comes
    filled = sess.steps(model.enqueue, ({model.number: number} for number in range(30)), ahead=4)
    assert await asyncio.wait_for(collect(filled), WAIT) == [None] * 30
    results = await asyncio.wait_for(consumer, WAIT)
    assert [int(number) for number, _ in results] == list(range(30))
    assert filled.ended_by == "feed"


async def test_a_starved_stream_is_an_event_that_names_the_queue(
    make_session: Any, model: SimpleNamespace, sink: Any
) -> None:
    sess = make_session(starved_after_secs=0.02)
    stream = sess.steps(model.consume)
    consumer = asyncio.create_task(collect(stream))
    message, _ = await sink.wait_for("step.starved")
    assert "numbers" in message
    await sess.run(model.close_queue)
    assert await asyncio.wait_for(consumer, WAIT) == []


async def test_a_dropped_stream_is_freed_without_the_garbage_collector(
    sess: AsyncSession, model: SimpleNamespace
) -> None:
    gc.collect()
    gc.disable()
    try:
        stream = sess.steps(model.train, batches(model, 20))
        await collect(stream)
        steps = weakref.ref(stream._steps)
        del stream
        await until(lambda: steps() is None)
    finally:
        gc.enable()


def test_on_uvloop(model: SimpleNamespace) -> None:
    pytest.importorskip("uvloop")
    coordinator = Coordinator()

    async def generate() -> AsyncIterator[Any]:
        for number in range(100):
            if number % 9 == 0:
                await asyncio.sleep(0)
            yield {model.x: np.array([1.0], np.float32)}

    async def main() -> None:
        executor = DeviceExecutor()
        sess = AsyncSession(
            tf.compat.v1.Session(graph=model.graph), executor, coordinator=coordinator, global_step=model.step
        )
        await sess.run(model.init)
        for feeds in (generate(), [{model.x: [1.0]}] * 100, lambda: {model.x: [1.0]}):
            stream = sess.steps(model.train, feeds, max_steps=100)
            results = await asyncio.wait_for(collect(stream), WAIT)
            assert len(results) == stream.steps_run == 100
        assert await asyncio.gather(*(sess.run(model.count) for _ in range(50))) == list(range(301, 351))
        waiting = asyncio.create_task(sess.run(model.consume))  # type: ignore[arg-type]
        await until(lambda: executor.busy() is not None)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await sess.run(model.enqueue, {model.number: 1})
        async for step in sess.steps(model.count):
            if step == 400:
                coordinator.request_stop()
        assert await sess.run(model.step) >= 400
        await sess.close()
        assert await executor.aclose(WAIT)

    uvloop.run(main())


@pytest.mark.parametrize("feeds", ["none", "generator", "async_generator"])
@pytest.mark.parametrize("ahead", [0, 1, 3, 64])
async def test_beside_runs_pauses_and_controls_no_step_is_lost_or_doubled(
    sess: AsyncSession, model: SimpleNamespace, feeds: str, ahead: int
) -> None:
    """Everything at once: wake-ups, parking and hunger race with one another."""
    total = 150

    async def generate_async() -> AsyncIterator[Any]:
        for number in range(total):
            if number % 7 == 0:
                await asyncio.sleep(0)
            yield {model.x: [1.0]}

    source: Any = {
        "none": {model.x: [1.0]},
        "generator": ({model.x: [1.0]} for _ in range(total)),
        "async_generator": generate_async(),
    }[feeds]

    async def disturb() -> None:
        while True:
            sess.pause()
            await sess.run(model.step)
            sess.resume()
            await sess.control(lambda raw: None)
            await asyncio.sleep(0)

    disturber = asyncio.create_task(disturb())
    results = []
    async with asyncio.timeout(WAIT):
        async for step in sess.steps([model.train, model.weight.op], source, max_steps=total, ahead=ahead):
            results.append(int(step[0]))
            if step[0] % 11 == 0:
                await asyncio.sleep(0)
    disturber.cancel()
    sess.resume()
    assert results == list(range(1, total + 1))
