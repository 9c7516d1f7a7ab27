"""The awaited session: lanes, cancellation, riders, pause, other threads, the end; on real TensorFlow sessions."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed, WrongEventLoop
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.runtime.mailbox import is_attached
from asupervisor.session.session import AsyncSession

pytestmark = pytest.mark.modes
WAIT = 20


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.001)


def value_of(sess: AsyncSession, tensor: Any) -> Any:
    """A variable's value, without the session's lanes."""
    return sess.raw.run(tensor)


# ------------------------------------------------------------------------------------------------------- runs


async def test_results_are_those_of_session_run(sess: AsyncSession, model: SimpleNamespace) -> None:
    feed = {model.x: [1.0, 2.0]}
    assert (await sess.run(model.double, feed)).tolist() == [2.0, 4.0]
    structure = {"a": [model.double, model.weight.op], "b": ("x:0", {"c": model.x})}
    for _ in range(3):
        awaited = await sess.run(structure, feed)
        plain = sess.raw.run(structure, feed)
        assert awaited["a"][1] is None is plain["a"][1]
        assert awaited["a"][0].tolist() == plain["a"][0].tolist()
        assert type(awaited["b"]) is tuple
        assert awaited["b"][0].tolist() == plain["b"][0].tolist() == [1.0, 2.0]
    assert await sess.run(model.train, feed) == 1
    assert await sess.run(model.weight) == 3.0


async def test_options_and_run_metadata_go_along(sess: AsyncSession, model: SimpleNamespace) -> None:
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    await sess.run(model.count, options=options, run_metadata=metadata)
    assert metadata.step_stats.dev_stats
    with pytest.raises(tf.errors.DeadlineExceededError):
        await sess.run(model.dequeue, options=tf.compat.v1.RunOptions(timeout_in_ms=20))


async def test_eval_and_op_run_give_awaitables(sess: AsyncSession, model: SimpleNamespace) -> None:
    with model.graph.as_default():
        constant = tf.constant(7)
    assert await constant.eval(session=sess) == 7
    assert await model.double.eval(feed_dict={model.x: [3.0]}, session=sess) == [6.0]
    with tf.Graph().as_default():
        stranger = tf.constant(1)
    with pytest.raises(ValueError, match="graph"):
        stranger.eval(session=sess)
    with pytest.raises(ValueError, match="is not an element of this graph"):
        await sess.run(stranger)


async def test_op_run_does_not_go_unnoticed(sess: AsyncSession, model: SimpleNamespace) -> None:
    """TensorFlow's `Operation.run` throws the awaitable away."""
    with pytest.warns(RuntimeWarning, match="never awaited"):
        model.count.op.run(session=sess)
        gc.collect()
    assert await sess.run(model.step) == 0


async def test_wrong_fetches_and_feeds_raise_tensorflows_errors_and_harm_nothing(
    sess: AsyncSession, model: SimpleNamespace
) -> None:
    with pytest.raises(TypeError, match="None"):
        await sess.run(None)
    with pytest.raises(ValueError, match="Cannot feed value of shape"):
        await sess.run(model.double, {model.x: [[1.0]]})
    with pytest.raises(tf.errors.InvalidArgumentError, match="must feed a value"):
        await sess.run(model.double)
    with pytest.raises(ValueError, match=r"lane must be 'device' or 'side', not 'gpu'"):
        sess.run(model.count, lane="gpu")  # type: ignore[arg-type]
    assert await sess.run(model.count) == 1


async def test_an_error_of_a_run_is_tensorflows_with_its_op(sess: AsyncSession, model: SimpleNamespace) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        await sess.run(model.failing_train, {model.x: [1.0]})
    assert caught.value.op is not None
    assert "failing" in caught.value.op.name
    assert sess.training_runs == 0


async def test_make_callable(sess: AsyncSession, model: SimpleNamespace) -> None:
    train = sess.make_callable(model.train, [model.x])
    assert [await train([1.0]), await train([2.0])] == [1, 2]
    assert await sess.make_callable(model.weight)() == 3.0
    metadata = tf.compat.v1.RunMetadata()
    traced = sess.make_callable(model.count, accept_options=True)
    await traced(options=tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE), run_metadata=metadata)
    assert metadata.step_stats.dev_stats
    with pytest.raises(TypeError, match="feed_list"):
        sess.make_callable(model.train, model.x)
    with pytest.raises(TypeError, match="feeds 1 tensors"):
        train()
    with pytest.raises(TypeError, match="accept_options"):
        train([1.0], options=None)


async def test_runs_at_once_never_interleave(sess: AsyncSession, model: SimpleNamespace) -> None:
    results = await asyncio.gather(*(sess.run(model.train, {model.x: [1.0]}) for _ in range(100)))
    assert results == list(range(1, 101))
    assert sess.training_runs == 100
    statistics = sess.statistics()
    assert (statistics.runs, statistics.training_runs, statistics.step_time.count) == (100, 100, 100)
    assert statistics.device.queue_wait.count >= 100
    assert statistics.device.queue_wait.p99_secs > 0
    assert statistics.loop_lag.count > 0


async def test_while_a_step_of_500_ms_runs_the_loop_ticks(sess: AsyncSession, model: SimpleNamespace) -> None:
    """TensorFlow's own session in a coroutine: not one tick. What stalls the loop here, the suite's guard reports."""
    with model.graph.as_default():
        slow = tf.compat.v1.py_func(lambda: time.sleep(0.5), [], [], name="slow")  # the side that must lose
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticker = asyncio.create_task(tick())
    await sess.run(slow)
    ticker.cancel()
    assert ticks > 20  # a hundred on a quiet machine


# ------------------------------------------------------------------------------------------------------- lanes


@pytest.mark.parametrize("first_time", [True, False])
@pytest.mark.parametrize("form", ["op", "list", "group"])
async def test_an_enqueue_does_not_wait_behind_the_dequeue_that_waits_for_it(
    sess: AsyncSession, model: SimpleNamespace, first_time: bool, form: str
) -> None:
    with model.graph.as_default():
        fetches = {"op": model.enqueue, "list": [[model.enqueue]], "group": tf.group(model.enqueue)}[form]
    feed = {model.number: 7}
    if not first_time:  # the plan is known
        await sess.run(fetches, feed)
        await sess.run(model.dequeue)
    waiting = asyncio.create_task(sess.run(model.dequeue))  # type: ignore[arg-type]
    await until(lambda: sess.executor.busy() is not None)
    await asyncio.wait_for(sess.run(fetches, feed), WAIT)
    assert await asyncio.wait_for(waiting, WAIT) == 7


async def test_many_unknown_runs_behind_a_busy_thread_do_not_take_a_thread_each(
    sess: AsyncSession, model: SimpleNamespace, settle: Callable[[], Any]
) -> None:
    with model.graph.as_default():
        constants = [tf.constant(number) for number in range(60)]
    waiting = asyncio.create_task(sess.run(model.dequeue))  # type: ignore[arg-type]
    await until(lambda: sess.executor.busy() is not None)
    runs = [asyncio.create_task(sess.run(constant)) for constant in constants]  # type: ignore[arg-type]
    await settle()
    assert sum(thread.name.startswith("asupervisor side") for thread in threading.enumerate()) < 20
    await sess.run(model.enqueue, {model.number: 4})
    assert await waiting == 4
    assert await asyncio.gather(*runs) == list(range(60))


async def test_a_producer_task_on_a_full_queue_does_not_stop_the_steps(
    sess: AsyncSession, model: SimpleNamespace
) -> None:
    async def produce() -> None:
        for number in range(50):
            await sess.run(model.enqueue, {model.number: number})
        await sess.run(model.close_queue)

    producer = asyncio.create_task(produce())
    taken = []
    with pytest.raises(tf.errors.OutOfRangeError):
        while True:
            taken.append(await asyncio.wait_for(sess.run(model.dequeue), WAIT))
            await sess.run(model.count)
    assert taken == list(range(50))
    await producer


async def test_the_side_lane_on_request(sess: AsyncSession, model: SimpleNamespace) -> None:
    waiting = asyncio.create_task(sess.run(model.dequeue, lane="side"))  # type: ignore[arg-type]
    assert await asyncio.wait_for(sess.run(model.count), WAIT) == 1  # the device thread is free
    await sess.run(model.enqueue, {model.number: 3})
    assert await asyncio.wait_for(waiting, WAIT) == 3


async def test_a_run_that_trains_and_enqueues_stays_between_the_steps(
    sess: AsyncSession, model: SimpleNamespace
) -> None:
    with model.graph.as_default():
        both = tf.group(model.count, model.enqueue)
    await sess.run(both, {model.number: 1})
    assert sess.training_runs == 1


async def test_call_control_and_side(sess: AsyncSession, model: SimpleNamespace) -> None:
    def look(raw: tf.compat.v1.Session, extra: int) -> tuple[Any, ...]:
        return raw, tf.compat.v1.get_default_graph(), sess.executor.on_device_thread(), extra

    assert await sess.call(look, 1) == (sess.raw, model.graph, True, 1)
    assert await sess.control(look, 2) == (sess.raw, model.graph, True, 2)
    assert await sess.side(look, 3) == (sess.raw, model.graph, False, 3)


async def test_control_is_served_between_two_steps_before_what_waits(
    sess: AsyncSession, model: SimpleNamespace, settle: Callable[[], Any]
) -> None:
    order: list[str] = []

    async def note(name: str, awaitable: Any) -> None:
        await awaitable
        order.append(name)

    await sess.run(model.count)
    model.gate.arm()
    tasks = [asyncio.create_task(note("step", sess.run(model.held_count)))]
    await model.gate.wait_entered()
    tasks += [asyncio.create_task(note("run", sess.run(model.count)))]
    await settle()
    tasks += [asyncio.create_task(note("control", sess.control(lambda raw: raw.run(model.step))))]
    await settle()
    model.gate.release.set()
    await asyncio.gather(*tasks)
    assert order == ["step", "control", "run"]


# ---------------------------------------------------------------------------------------------------- cancelling


async def test_a_run_that_is_cancelled_before_it_started_is_not_applied(
    sess: AsyncSession, model: SimpleNamespace, settle: Callable[[], Any], sink: Any
) -> None:
    await sess.run(model.count)
    model.gate.arm()
    holding = asyncio.create_task(sess.run(model.held_count))  # type: ignore[arg-type]
    await model.gate.wait_entered()
    known = asyncio.create_task(sess.run(model.count))  # type: ignore[arg-type]
    unknown = asyncio.create_task(sess.run([model.count]))  # type: ignore[arg-type]
    await settle()
    for task in (known, unknown):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    model.gate.release.set()
    await holding
    assert await sess.run(model.step) == 2
    assert sink.of("run.dropped") == []


async def test_f16_a_run_that_is_cancelled_in_flight_releases_its_caller_and_is_reported(
    sess: AsyncSession, model: SimpleNamespace, sink: Any
) -> None:
    """A cancelled `asyncio.to_thread(session.run)` is applied later without a word, and holds up the loop's end."""
    model.gate.arm()
    task = asyncio.create_task(sess.run(model.held_count))  # type: ignore[arg-type]
    await model.gate.wait_entered()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # the step has not ended
    assert not model.gate.release.is_set()
    model.gate.release.set()
    message, data = await sink.wait_for("run.dropped")
    assert model.held_count.name.split(":")[0] in message
    assert data["error"] is None
    assert await sess.run(model.step) == 1  # it was applied, and it was said


PROGRAM_F16 = """
import asyncio, sys, threading, time
import tensorflow as tf
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.session import AsyncSession

graph = tf.Graph()
with graph.as_default():
    taken = tf.queue.FIFOQueue(1, [tf.int32], shapes=[[]]).dequeue()

async def main():
    sess = AsyncSession(tf.compat.v1.Session(graph=graph), DeviceExecutor())
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            if ticks == 10:
                print("waiting", flush=True)
            await asyncio.sleep(0.01)
    ticker = asyncio.create_task(tick())
    try:
        await sess.run(taken)
    finally:
        print("ticks", ticks > 9, flush=True)
        if "close" in sys.argv:
            ticker.cancel()
            await sess.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_f16_ctrl_c_in_a_blocked_run_ends_the_process(forks: Any, how: str) -> None:
    """TensorFlow's `Session.run` in a coroutine ignores Ctrl-C; in a worker thread `asyncio.run` hangs at its end."""
    process = forks.start("-c", PROGRAM_F16, how)
    try:
        assert process.stdout.readline() == "waiting\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT)
        assert time.monotonic() - began < WAIT / 2
    finally:
        process.kill()
        process.wait()
    assert out == "ticks True\n"
    assert "KeyboardInterrupt" in err
    assert process.returncode in (-signal.SIGINT, 1, 130)


# -------------------------------------------------------------------------------------------------- default graph


async def test_f24_the_default_graph_of_the_caller_is_of_no_account(make_session: Any, model: SimpleNamespace) -> None:
    """TensorFlow's default graph belongs to a thread: held over an await, it reaches into other tasks."""
    sess = make_session()
    seen: list[Any] = []

    async def train(times: int) -> None:
        for _ in range(times):
            await sess.run(model.count)
            seen.append(await sess.call(lambda raw: tf.compat.v1.get_default_graph()))

    with tf.Graph().as_default():  # somebody holds a strange graph over their awaits
        await asyncio.gather(train(5), train(5))
    assert set(seen) == {model.graph}
    assert await sess.run(model.step) == 10
    outside = await sess.executor.call(tf.compat.v1.get_default_graph)
    assert outside is not model.graph  # nothing stayed entered on the device thread


# -------------------------------------------------------------------------------------------------- other threads


async def test_the_blocking_view_in_another_thread(sess: AsyncSession, model: SimpleNamespace) -> None:
    def work() -> list[Any]:
        return [
            sess.blocking.run(model.train, {model.x: [2.0]}),
            sess.blocking.run(model.weight),
            sess.blocking.call(lambda raw: tf.compat.v1.get_default_graph() is raw.graph),
            model.double.eval({model.x: [1.0]}, session=sess.blocking).tolist(),
        ]

    assert await asyncio.to_thread(work) == [1, 2.0, True, [2.0]]
    assert sess.training_runs == 1


async def test_the_blocking_view_runs_inline_on_the_device_thread(sess: AsyncSession, model: SimpleNamespace) -> None:
    def hook(raw: tf.compat.v1.Session) -> Any:
        return sess.blocking.run(model.count), sess.blocking.call(lambda raw: sess.executor.on_device_thread())

    assert await asyncio.wait_for(sess.call(hook), WAIT) == (1, True)


async def test_a_blocking_enqueue_runs_in_its_own_thread(sess: AsyncSession, model: SimpleNamespace) -> None:
    waiting = asyncio.create_task(sess.run(model.dequeue))  # type: ignore[arg-type]
    await until(lambda: sess.executor.busy() is not None)
    await asyncio.wait_for(asyncio.to_thread(sess.blocking.run, model.enqueue, {model.number: 4}), WAIT)
    assert await waiting == 4


async def test_the_blocking_view_on_the_loop_is_refused(sess: AsyncSession, model: SimpleNamespace) -> None:
    with pytest.raises(WrongEventLoop, match=r"Await sess\.run"):
        sess.blocking.run(model.count)
    with pytest.raises(ValueError, match="lane"):
        sess.blocking.run(model.count, lane="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["run", "steps"])
async def test_off_the_loop_the_error_comes_at_once_and_names_blocking(
    sess: AsyncSession, model: SimpleNamespace, what: str
) -> None:
    def off_loop() -> None:
        with pytest.raises(WrongEventLoop, match=r"sess\.blocking\.run"):
            getattr(sess, what)(model.count)

    await asyncio.to_thread(off_loop)


async def test_another_loop_is_refused(sess: AsyncSession, model: SimpleNamespace) -> None:
    await sess.run(model.count)

    async def other() -> None:
        with pytest.raises(WrongEventLoop, match="another event loop"):
            sess.run(model.count)
        with pytest.raises(WrongEventLoop, match="another event loop"):
            sess.steps(model.count)
        with pytest.raises(WrongEventLoop, match="another event loop"):
            await sess.call(lambda raw: None)

    await asyncio.to_thread(asyncio.run, other())
    assert await sess.run(model.count) == 2


def test_made_off_the_loop_it_belongs_to_the_first_loop_that_uses_it(model: SimpleNamespace) -> None:
    executor = DeviceExecutor()
    sess = AsyncSession(tf.compat.v1.Session(graph=model.graph), executor)

    async def use() -> None:
        await sess.run(model.init)
        assert await sess.run(model.count) == 1

    async def end() -> None:
        with pytest.raises(WrongEventLoop):
            sess.run(model.count)
        await sess.close()
        assert await executor.aclose(WAIT)

    asyncio.run(use())
    asyncio.run(end())


# ---------------------------------------------------------------------------------------------------------- pause


async def test_pause_holds_training_runs_and_nothing_else(
    sess: AsyncSession, model: SimpleNamespace, settle: Callable[[], Any]
) -> None:
    await sess.run(model.count)
    sess.pause()
    assert sess.paused
    held = asyncio.create_task(sess.run(model.count))  # type: ignore[arg-type]
    blocking = asyncio.create_task(asyncio.to_thread(sess.blocking.run, model.count))
    while sess.statistics().held < 2:
        await asyncio.sleep(0.001)
    assert await sess.run(model.step) == 1
    assert await sess.call(lambda raw: 5) == 5
    assert not held.done()
    sess.resume()
    assert {await held, await blocking} == {2, 3}


async def test_a_held_run_can_be_withdrawn(sess: AsyncSession, model: SimpleNamespace) -> None:
    sess.pause()
    held = asyncio.create_task(sess.run(model.count))  # type: ignore[arg-type]
    while not sess.statistics().held:
        await asyncio.sleep(0.001)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert sess.statistics().held == 0
    sess.resume()
    assert await sess.run(model.step) == 0


async def test_a_stop_releases_what_is_held(make_session: Any, model: SimpleNamespace) -> None:
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    sess.pause()
    held = asyncio.create_task(sess.run(model.count))
    while not sess.statistics().held:
        await asyncio.sleep(0.001)
    coordinator.request_stop()
    assert await asyncio.wait_for(held, WAIT) == 1
    sess.pause()
    assert not sess.paused
    assert await sess.run(model.count) == 2  # runs work until the close


async def test_an_error_releases_nothing_that_is_held(make_session: Any, model: SimpleNamespace) -> None:
    """The model may be lost, or be somebody else's already."""
    coordinator = Coordinator()
    sess = make_session(coordinator=coordinator)
    sess.pause()
    held = asyncio.create_task(sess.run(model.count))

    async def stream() -> list[Any]:
        return [result async for result in sess.steps(model.count)]

    streamed = asyncio.create_task(stream())
    while not (sess.statistics().held and sess.statistics().streams):
        await asyncio.sleep(0.001)
    coordinator.request_stop(tf.errors.AbortedError(None, None, "lost"))
    with pytest.raises(SessionClosed):
        await asyncio.wait_for(held, WAIT)
    assert await asyncio.wait_for(streamed, WAIT) == []
    assert await sess.run(model.step) == 0


async def test_pausing_and_resuming_in_a_hurry_loses_no_run(sess: AsyncSession, model: SimpleNamespace) -> None:
    async def flip() -> None:
        while True:
            sess.pause()
            await asyncio.sleep(0)
            sess.resume()
            await asyncio.sleep(0)

    flipper = asyncio.create_task(flip())
    runs = (sess.run(model.count) for _ in range(300))
    results = await asyncio.wait_for(asyncio.gather(*runs), WAIT)
    flipper.cancel()
    sess.resume()
    assert sorted(results) == list(range(1, 301))


# --------------------------------------------------------------------------------------------------------- riders


class Rider:
    """Asks for a tensor on runs that feed `x`."""

    def __init__(self, tensor: Any, *, suits: Callable[[Any], bool] = lambda plan: True, fails: str = "") -> None:
        self.tensor = tensor
        self.suits = suits
        self.fails = fails
        self.asked = 0
        self.got: list[Any] = []

    def fetches_for(self, plan: Any) -> list[Any] | None:
        self.asked += 1
        if self.fails == "fetches_for":
            raise ValueError("no fetches")
        return [self.tensor] if self.suits(plan) else None

    def delivered(self, values: Any, raw: Any) -> None:
        self.got.append(([np.asarray(value).tolist() for value in values], raw))
        if self.fails == "delivered":
            raise ValueError("no delivery")


async def test_a_rider_rides_on_one_training_run_and_sees_its_batch(sess: AsyncSession, model: SimpleNamespace) -> None:
    rider = Rider(model.double)
    sess.board(rider)
    sess.board(rider)
    await sess.run(model.step)
    await sess.run(model.double, {model.x: [9.0]})
    assert rider.asked == 0  # neither an evaluation nor a prediction carries it
    assert await sess.run(model.train, {model.x: [1.0]}) == 1
    assert rider.got == [([[2.0]], sess.raw)]
    assert await sess.run(model.train, {model.x: [4.0]}) == 2
    assert len(rider.got) == 1
    assert value_of(sess, model.weight) == 5.0  # no run but those two


async def test_a_rider_waits_for_a_run_that_suits_it(sess: AsyncSession, model: SimpleNamespace) -> None:
    rider = Rider(model.double, suits=lambda plan: model.x in plan.feed_tensors)
    other = Rider(model.step)
    sess.board(rider)
    sess.board(other)
    await sess.run(model.count)
    assert (rider.asked, rider.got, len(other.got)) == (1, [], 1)
    sess.board(other)
    await sess.run(model.train, {model.x: [3.0]})
    assert rider.got == [([[6.0]], sess.raw)]
    assert len(other.got) == 2
    left = Rider(model.double)
    sess.board(left)
    sess.disembark(left)
    sess.disembark(left)
    await sess.run(model.train, {model.x: [3.0]})
    assert left.asked == 0


@pytest.mark.parametrize("fails", ["fetches_for", "delivered"])
async def test_a_rider_that_fails_costs_no_step(
    sess: AsyncSession, model: SimpleNamespace, sink: Any, fails: str
) -> None:
    rider = Rider(model.double, fails=fails)
    good = Rider(model.step)
    sess.board(rider)
    sess.board(good)
    assert await sess.run(model.train, {model.x: [1.0]}) == 1
    assert len(good.got) == 1
    message, data = await sink.wait_for("rider.failed")
    assert "Rider" in message
    assert "ValueError" in data["error"]
    await sess.run(model.train, {model.x: [1.0]})
    assert rider.asked == 1


async def test_alarms_ring_right_after_their_training_run(
    sess: AsyncSession, model: SimpleNamespace, sink: Any
) -> None:
    rung: list[tuple[str, int, bool]] = []

    def alarm(name: str) -> Callable[[], None]:
        return lambda: rung.append((name, int(sess.raw.run(model.step)), sess.executor.on_device_thread()))

    def fail() -> None:
        raise ValueError("no alarm")

    sess.set_alarm(3, alarm("c"))
    sess.set_alarm(2, alarm("b"))
    sess.set_alarm(2, fail)
    for _ in range(4):
        await sess.run(model.step)
        await sess.run(model.count)
    assert rung == [("b", 2, True), ("c", 3, True)]
    assert len(sink.of("alarm.failed")) == 1
    sess.set_alarm(1, alarm("late"))
    await sess.run(model.step)
    assert len(rung) == 2
    await sess.run(model.count)
    assert rung[2:] == [("late", 5, True)]


async def test_without_a_global_step_any_written_variable_makes_a_training_run(
    make_session: Any, model: SimpleNamespace
) -> None:
    sess = make_session(global_step=None)
    await sess.run(model.weight)
    assert sess.training_runs == 0
    await sess.run(model.train, {model.x: [1.0]})
    assert sess.training_runs == 1
    assert value_of(sess, model.weight) == 1.0


# -------------------------------------------------------------------------------------------------------- starving


async def test_a_starved_dequeue_is_an_event_that_names_the_queue(
    make_session: Any, model: SimpleNamespace, sink: Any
) -> None:
    sess = make_session(starved_after_secs=0.02)
    await sess.run(model.count)
    waiting = asyncio.create_task(sess.run(model.consume))
    message, data = await sink.wait_for("step.starved")
    assert "numbers" in message
    assert data["waited_secs"] >= 0.02
    await asyncio.sleep(0.1)  # it must lose: the event comes once
    assert len(sink.of("step.starved")) == 1
    await sess.run(model.enqueue, {model.number: 1})
    assert await waiting == 2


async def test_a_slow_step_that_waits_for_nothing_is_not_starved(
    make_session: Any, model: SimpleNamespace, sink: Any
) -> None:
    sess = make_session(starved_after_secs=0.01)
    with model.graph.as_default():
        product = tf.random.uniform([64, 64])
        for _ in range(300):
            product = tf.matmul(product, product) * 1e-3
        slow = tf.reduce_sum(product)
    for _ in range(5):
        await sess.run(slow)
    assert sink.of("step.starved") == []


# ---------------------------------------------------------------------------------------------------------- the end


async def test_close_fails_what_waits_and_ends_what_runs(
    make_session: Any, model: SimpleNamespace, settle: Callable[[], Any]
) -> None:
    sess = make_session()
    await sess.run(model.count)
    running = asyncio.create_task(sess.run(model.dequeue))
    await until(lambda: sess.executor.busy() is not None)
    queued = asyncio.create_task(sess.run(model.count))
    blocking = asyncio.create_task(asyncio.to_thread(sess.blocking.run, model.count))
    while sess.statistics().device.waiting_interactive < 2:
        await asyncio.sleep(0.001)
    await sess.close()
    await sess.close()
    assert sess.closed
    assert sess.blocking.closed
    for task in (queued, blocking):
        with pytest.raises(SessionClosed):
            await task
    with pytest.raises((tf.errors.CancelledError, SessionClosed)):  # as far as it had come
        await running


async def test_everything_raises_session_closed_after_the_close(make_session: Any, model: SimpleNamespace) -> None:
    sess = make_session(name="the digits session")
    function = sess.make_callable(model.count)
    await sess.close()
    for attempt in (lambda: sess.run(model.count), lambda: sess.steps(model.count), function):
        with pytest.raises(SessionClosed, match="the digits session is closed"):
            attempt()
    for attempt in (sess.call, sess.control, sess.side):
        with pytest.raises(SessionClosed):
            await attempt(lambda raw: None)
    with pytest.raises(SessionClosed):
        await asyncio.to_thread(sess.blocking.run, model.count)
    with pytest.raises(SessionClosed):
        await asyncio.to_thread(sess.blocking.call, print)


async def test_the_owner_decides_what_close_does(make_session: Any) -> None:
    closed: list[int] = []

    async def close() -> None:
        closed.append(1)

    sess = make_session(close=close)
    await sess.close()
    assert closed == [1]
    assert not sess.closed


async def test_closing_under_a_run_in_flight_is_safe(make_session: Any, model: SimpleNamespace) -> None:
    """TensorFlow crashes when a compiled callable is released while it runs."""
    with model.graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 784])
        hidden = tf.compat.v1.get_variable("hidden", [784, 128])
        loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(x, hidden))))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        model.init = tf.compat.v1.global_variables_initializer()
    feed = {x: np.ones([64, 784], np.float32)}
    executor = DeviceExecutor()
    for number in range(20):
        sess = make_session(executor)
        async for _ in sess.steps([train, loss], feed, max_steps=100):  # until it is known how to run it best
            pass
        task = asyncio.create_task(sess.run([train, loss], feed))
        while executor.busy() is None and not task.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0.0001 * (number % 8))
        task.cancel()
        await sess.close()
        await asyncio.wait((task,))
    assert await executor.aclose(WAIT)


async def test_a_close_that_hangs_is_bounded(make_session: Any, model: SimpleNamespace) -> None:
    """TensorFlow's close waits for a running Python op."""
    sess = make_session()
    model.gate.arm()
    task = asyncio.create_task(sess.run(model.held_count))
    await model.gate.wait_entered()
    assert not await sess.close_raw(0.02)
    model.gate.release.set()
    assert await sess.close_raw(WAIT)
    await asyncio.wait((task,))
    task.exception()


async def test_a_failing_close_is_reported_not_raised(make_session: Any, sink: Any) -> None:
    sess = make_session()
    raw = sess.raw
    raw_close = raw.close

    def close() -> None:
        raw_close()
        raise OSError("no such session")

    raw.close = close
    assert await sess.close_raw(WAIT)
    message, _ = await sink.wait_for("session.close_failed")
    assert "no such session" in message


async def test_sessions_share_an_executor_and_end_one_by_one(make_session: Any, model: SimpleNamespace) -> None:
    executor = DeviceExecutor("/gpu:0")
    first, second = make_session(executor), make_session(executor)
    model.gate.arm()
    holding = asyncio.create_task(first.run(model.held_count))
    await model.gate.wait_entered()
    queued = asyncio.create_task(first.run(model.count))
    survives = asyncio.create_task(second.run(model.count))
    while executor.statistics().waiting_interactive < 2:
        await asyncio.sleep(0)
    closing = asyncio.create_task(first.close_raw(WAIT))
    with pytest.raises(SessionClosed):
        await queued
    assert not survives.done()
    model.gate.release.set()
    assert await closing
    assert await survives == 1
    await asyncio.wait((holding,))
    holding.exception()
    assert await second.run(model.count) == 2
    await second.close()
    assert not executor.closed
    assert await executor.aclose(WAIT)


async def test_a_closed_session_is_freed_without_the_garbage_collector(model: SimpleNamespace) -> None:
    executor = DeviceExecutor()
    coordinator = Coordinator()
    sess = AsyncSession(tf.compat.v1.Session(graph=model.graph), executor, coordinator=coordinator)
    await sess.run(model.init)
    await sess.run(model.count)
    async for _ in sess.steps(model.count, max_steps=3):
        pass
    with pytest.raises(tf.errors.InvalidArgumentError):
        await sess.run(model.double)
    await sess.close()
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(sess)
        del sess
        await until(lambda: alive() is None)  # the side thread that closed it may not have left yet
    finally:
        gc.enable()
    assert await executor.aclose(WAIT)


async def test_nothing_is_left_behind(make_session: Any, model: SimpleNamespace) -> None:
    before, attached = set(threading.enumerate()), is_attached(asyncio.get_running_loop())
    executor = DeviceExecutor()
    sess = make_session(executor)
    await sess.run(model.count)
    await sess.run(model.enqueue, {model.number: 1})
    async for _ in sess.steps(model.train, [{model.x: [1.0]}] * 5):
        pass
    await sess.close()
    assert await executor.aclose(WAIT)
    assert set(threading.enumerate()) <= before
    assert is_attached(asyncio.get_running_loop()) == attached


PROGRAM_FORK = """
import asyncio, os
import tensorflow as tf
from asupervisor.errors import SessionClosed
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.session import AsyncSession

graph = tf.Graph()
with graph.as_default():
    one = tf.constant(1)
sess = AsyncSession(tf.compat.v1.Session(graph=graph), DeviceExecutor())

async def in_child():
    for attempt in (sess.run, sess.steps):
        try:
            attempt(one)
        except SessionClosed:
            continue
        return 1
    try:
        await sess.call(print)
    except SessionClosed:
        await sess.close()
        return 0
    return 2

async def in_parent():
    assert await sess.run(one) == 1
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            asyncio._set_running_loop(None)
            code = asyncio.run(in_child())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
    assert code == 0, code
    assert await sess.run(one) == 1
    await sess.close()
    await sess.executor.aclose(5)

asyncio.run(in_parent())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_the_child_of_a_fork_the_session_is_closed(forks: Any) -> None:
    done = forks.run("-c", PROGRAM_FORK)
    assert done.returncode == 0, done.stderr
