"""Queue feeders: what TensorFlow's own tests check for QueueRunner, and what has to be better here."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.feeders import QueueCloser, QueueFeeders, make_feeders, producers, report_starved
from asupervisor.session.manager import SessionManager
from asupervisor.session.session import AsyncSession
from asupervisor.supervisor import Supervisor

tf1 = tf.compat.v1
QueueRunner = tf1.train.QueueRunner
pytestmark = pytest.mark.modes


class BogusOp(NamedTuple):
    """Stands for an op, has a name like one, and is in no graph."""

    name: str


class Events:
    """An event sink that remembers, and lets the loop wait for a kind of event."""

    def __init__(self):
        self.all = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __call__(self, kind, message, *, level="info", **data):
        self.all.append((kind, message, level, data))
        self._loop.call_soon_threadsafe(self._changed.set)

    def of(self, kind):
        return [(message, level, data) for k, message, level, data in self.all if k == kind]

    async def until(self, kind):
        while not self.of(kind):
            self._changed.clear()
            await self._changed.wait()
        return self.of(kind)[0]


@pytest.fixture
async def events():
    return Events()


@pytest.fixture
async def use():
    """`await use(graph, init)` is a session, closed after the test."""
    sessions = []

    async def use(graph, init_op=None, **kwargs):
        manager = SessionManager(graph=graph, **kwargs)
        session, _ = await manager.recover_session("")
        sessions.append(session)
        if init_op is not None:
            await session.run(init_op)
        return session

    yield use
    for session in sessions:
        await session.close()


class Counting:
    """Ops that count to a limit and then meet the end of their input, and a queue that nobody reads."""

    def __init__(self, *limits):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = [tf1.get_variable(f"count_{limit}", initializer=0, trainable=False) for limit in limits]
            self.ops = [
                tf1.count_up_to(variable, limit) for variable, limit in zip(self.variables, limits, strict=True)
            ]
            self.init = tf1.variables_initializer(self.variables)
            self.reads = [variable.read_value() for variable in self.variables]
            self.queue = tf1.FIFOQueue(10, tf.float32, name="queue")

    def runner(self, *more):
        with self.graph.as_default():
            return QueueRunner(self.queue, [*self.ops, *more])


class Filled:
    """A queue of the given capacity that an endless producer keeps full."""

    def __init__(self, capacity=2, name="queue", collect=False):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.queue = tf1.FIFOQueue(capacity, tf.float32, name=name)
            self.enqueue = self.queue.enqueue(10.0, name="put")
            self.dequeue = self.queue.dequeue(name="take")
            self.size = self.queue.size()
            self.runner = QueueRunner(self.queue, [self.enqueue])
            if collect:
                tf1.train.add_queue_runner(self.runner)


def run_all(services):
    return [asyncio.create_task(service.run(), name=service.name) for service in services]


def names(services):
    return sorted(service.name for service in services)


# ---------------------------------------------------------------------------------- QueueRunnerTest


async def test_basic(use, variables):
    model = Counting(3)
    session = await use(model.graph, model.init)
    group = QueueFeeders(model.runner(), session)
    services = group.create()
    assert names(services) == [f"QueueRunnerThread-queue-{model.ops[0].name}"]
    await asyncio.gather(*run_all(services))
    assert group.exceptions_raised == []
    assert await session.run(model.reads) == [3]


async def test_two_ops_each_to_its_own_limit_and_the_last_one_closes(use, variables, events):
    model = Counting(3, 30)
    with model.graph.as_default():
        closed = model.queue.is_closed()
    session = await use(model.graph, model.init)
    group = QueueFeeders(model.runner(), session, emit=events)
    services = group.create()
    assert names(services) == sorted(f"QueueRunnerThread-queue-{op.name}" for op in model.ops)
    first, second = services
    await first.run()
    assert not await session.run(closed)
    assert producers(session) == {"queue": 1}
    await second.run()
    assert group.exceptions_raised == []
    assert await session.run(model.reads) == [3, 30]
    assert await session.run(closed)
    message, _, data = await events.until("queue.closed")
    assert data["queue"] == "queue"
    assert "OutOfRangeError" in message


async def test_exceptions_are_captured_without_a_coordinator(use):
    model = Counting(3)
    with model.graph.as_default():
        runner = QueueRunner(model.queue, [BogusOp("i fail"), BogusOp("so fail")])
    session = await use(model.graph)
    group = QueueFeeders(runner, session)
    raised = await asyncio.gather(*run_all(group.create()), return_exceptions=True)
    assert len(group.exceptions_raised) == 2
    assert {id(error) for error in raised} == {id(error) for error in group.exceptions_raised}
    for error in group.exceptions_raised:
        assert "Operation not in the graph" in str(error)


async def test_real_dequeue_enqueue_closing_goes_downstream(use):
    graph = tf.Graph()
    with graph.as_default():
        q0 = tf1.FIFOQueue(3, tf.float32)
        put = q0.enqueue(10.0)
        close0 = q0.close()
        q1 = tf1.FIFOQueue(30, tf.float32)
        move = q1.enqueue(q0.dequeue())
        take = q1.dequeue()
        runner = QueueRunner(q1, [move])
    session = await use(graph)
    await session.run(put)
    await session.run(put)
    await session.run(close0)
    group = QueueFeeders(runner, session)
    await asyncio.gather(*run_all(group.create()))
    assert group.exceptions_raised == []
    assert await session.run(take) == 10.0
    assert await session.run(take) == 10.0
    with pytest.raises(tf.errors.OutOfRangeError, match="is closed"):
        await session.run(take)


async def test_a_stop_that_was_requested_before_is_respected(use, variables):
    model = Counting(3)
    session = await use(model.graph, model.init)
    coordinator = Coordinator()
    coordinator.request_stop()
    group = QueueFeeders(model.runner(), session, coordinator=coordinator)
    services = group.create()
    assert names(services) == sorted(
        [f"QueueRunnerThread-queue-{model.ops[0].name}", "QueueRunnerThread-queue-close_on_stop"]
    )
    await coordinator.join(run_all(services))
    assert group.exceptions_raised == []
    assert await session.run(model.reads) == [0]


async def test_an_error_requests_the_stop(use):
    model = Counting(3)
    with model.graph.as_default():
        runner = QueueRunner(model.queue, [BogusOp("not an op")])
    session = await use(model.graph)
    coordinator = Coordinator()
    group = QueueFeeders(runner, session, coordinator=coordinator)
    tasks = run_all(group.create())
    with pytest.raises(ValueError, match="Operation not in the graph") as caught:
        await coordinator.join(tasks)
    assert group.exceptions_raised == []
    assert (await asyncio.gather(*tasks, return_exceptions=True))[0] is caught.value


async def test_a_stop_frees_a_feeder_that_is_blocked_in_a_full_queue(use):
    # f14: it takes no grace at all.
    model = Filled(capacity=2)
    session = await use(model.graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [model.runner], coordinator=coordinator))
    assert await session.run(model.dequeue) == 10.0
    while await session.run(model.size) < 2:
        await asyncio.sleep(0.001)
    coordinator.request_stop()
    await coordinator.join(tasks, stop_grace_period_secs=60.0)
    assert coordinator.error is None
    assert [task.exception() for task in tasks] == [None, None]


async def test_multiple_sessions(use):
    model = Filled()
    one, other = await use(model.graph), await use(model.graph)
    coordinator = Coordinator()
    first = make_feeders(one, [model.runner], coordinator=coordinator)
    second = make_feeders(other, [model.runner], coordinator=coordinator)
    assert len(first) == len(second) == 2
    coordinator.request_stop()
    await coordinator.join(run_all([*first, *second]))


async def test_multi_starts_are_ignored_even_if_never_started(use):
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    group = QueueFeeders(model.runner, session, coordinator=coordinator)
    services = group.create()
    assert len(services) == 2
    assert group.create() == []
    assert make_feeders(session, [model.runner], coordinator=coordinator) == []
    coordinator.request_stop()
    await coordinator.join(run_all(services))


async def test_they_can_be_started_again_after_all_have_ended(use, variables):
    model = Counting(3)
    runner = model.runner(BogusOp("bad op"))
    session = await use(model.graph, model.init)
    group = QueueFeeders(runner, session)
    for _ in range(2):
        services = group.create()
        assert names(services) == sorted(
            [f"QueueRunnerThread-queue-{model.ops[0].name}", "QueueRunnerThread-queue-bad op"]
        )
        await asyncio.gather(*run_all(services), return_exceptions=True)
        assert len(group.exceptions_raised) == 1
        assert "Operation not in the graph" in str(group.exceptions_raised[0])


async def test_names_are_tensorflows(use):
    graph = tf.Graph()
    with graph.as_default():
        with tf1.name_scope("scope"):
            queue = tf1.FIFOQueue(10, tf.float32, name="queue")
        runner = QueueRunner(queue, [tf.no_op(name="nothing")])
        tf1.train.add_queue_runner(runner)
    session = await use(graph)
    group = QueueFeeders(runner, session)
    assert group.name == runner.name
    assert group.queue == "scope/queue"  # the installed TensorFlow calls the runner "queue"
    theirs = runner.create_threads(session.raw, coord=tf1.train.Coordinator())
    assert names(make_feeders(session, coordinator=Coordinator())) == names(theirs)


async def test_the_collected_runners_of_the_sessions_graph_are_started(use, variables):
    model = Counting(3)
    with model.graph.as_default():
        tf1.train.add_queue_runner(QueueRunner(model.queue, model.ops))
    session = await use(model.graph, model.init)
    services = make_feeders(session)  # outside of the graph: the session's counts, not the default one
    assert len(services) == 1
    await asyncio.gather(*run_all(services))
    assert await session.run(model.reads) == [3]


async def test_a_graph_without_runners_gets_no_feeders(use):
    assert make_feeders(await use(tf.Graph())) == []


@pytest.mark.parametrize("sess", ["NotASession", None, 5])
def test_something_that_is_no_session_is_a_type_error(sess):
    with pytest.raises(TypeError, match=r"tf\.Session") as caught:
        make_feeders(sess)
    assert repr(sess) in str(caught.value)


def test_a_raw_session_is_a_type_error_that_says_what_to_pass(graph):
    with tf1.Session(graph=graph) as raw, pytest.raises(TypeError, match="AsyncSession"):
        make_feeders(raw)


@pytest.mark.parametrize("name", ["MonitoredSession", "SingularMonitoredSession"])
def test_a_monitored_session_runs_its_own(name):
    assert make_feeders(type(name, (), {})()) == []


async def test_runners_from_protos_feed_as_well(use):
    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(10, tf.float32, name="queue")
        enqueue = queue.enqueue(10.0, name="put")
        close, cancel = queue.close(), queue.close(cancel_pending_enqueues=True)
        proto = QueueRunner(
            queue, [enqueue], close, cancel, (tf.errors.OutOfRangeError, tf.errors.CancelledError)
        ).to_proto()
        runner = QueueRunner.from_proto(proto)
        take = queue.dequeue()
    assert runner.queue_closed_exception_types == (tf.errors.OutOfRangeError, tf.errors.CancelledError)
    session = await use(graph)
    coordinator = Coordinator()
    services = make_feeders(session, [runner], coordinator=coordinator)
    assert names(services) == ["QueueRunnerThread-queue-close_on_stop", "QueueRunnerThread-queue-put"]
    tasks = run_all(services)
    assert await session.run(take) == 10.0
    coordinator.request_stop()
    await coordinator.join(tasks)


# ---------------------------------------------------------------------------------- how feeders end


@pytest.mark.parametrize("closed_types", [None, (tf.errors.CancelledError,)])
async def test_types_that_mean_closed_are_the_runners(use, closed_types):
    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(10, tf.float32, name="queue")
        enqueue = queue.enqueue(10.0)
        runner = QueueRunner(queue, [enqueue], queue_closed_exception_types=closed_types)
        close = queue.close(cancel_pending_enqueues=True)
    session = await use(graph)
    await session.run(close)
    group = QueueFeeders(runner, session)
    (feeder,) = group.create()
    if closed_types is None:
        with pytest.raises(tf.errors.CancelledError):
            await feeder.run()
        assert len(group.exceptions_raised) == 1
    else:
        await feeder.run()
        assert group.exceptions_raised == []


async def test_an_input_that_ends_does_not_stop_the_training(use, variables):
    model = Counting(3)
    session = await use(model.graph, model.init)
    coordinator = Coordinator()
    services = make_feeders(session, [model.runner()], coordinator=coordinator)
    feeder_task, closer_task = run_all(services)
    await feeder_task
    assert not coordinator.should_stop()
    assert not closer_task.done()
    coordinator.request_stop()
    await coordinator.join([closer_task])


async def test_feeding_happens_on_side_threads_named_as_tensorflow_names_them(use):
    seen = []
    graph = tf.Graph()

    def produce():
        seen.append(threading.current_thread().name)
        return np.float32(1)

    with graph.as_default():
        queue = tf1.FIFOQueue(2, tf.float32, shapes=[()], name="queue")
        produced = tf1.py_func(produce, [], tf.float32)
        produced.set_shape(())
        runner = QueueRunner(queue, [queue.enqueue(produced, name="put")])
        take = queue.dequeue()
    session = await use(graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [runner], coordinator=coordinator))
    assert await session.run(take) == 1
    inside = {thread.name for thread in threading.enumerate() if thread.name.startswith("QueueRunnerThread")}
    assert inside == {"QueueRunnerThread-queue-put"}
    assert session.executor.statistics().side_threads.count("QueueRunnerThread-queue-put") == 1
    coordinator.request_stop()
    await coordinator.join(tasks)
    assert threading.main_thread().name not in seen


async def test_closing_the_session_ends_feeders_without_an_error(use):
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [model.runner], coordinator=coordinator))
    while await session.run(model.size) < 2:
        await asyncio.sleep(0.001)
    await session.close()
    assert await tasks[0] is None
    assert not coordinator.should_stop()
    coordinator.request_stop()
    assert await tasks[1] is None
    assert coordinator.error is None


async def test_started_after_the_close_they_end_at_once(use):
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    services = make_feeders(session, [model.runner], coordinator=coordinator)
    await session.close()
    coordinator.request_stop()
    await asyncio.gather(*run_all(services))
    assert coordinator.error is None


async def test_an_executor_that_ended_is_an_error_unless_the_session_is_closed():
    model = Filled()
    executor = DeviceExecutor()
    raw = tf1.Session(graph=model.graph)
    session = AsyncSession(raw, executor)
    (feeder,) = make_feeders(session, [model.runner])
    await executor.aclose(5)
    with pytest.raises(SessionClosed):
        await feeder.run()
    await session.close_raw(5)


async def test_cancelled_before_it_began_a_feeder_is_accounted_for(use):
    model = Filled()
    session = await use(model.graph)
    group = QueueFeeders(model.runner, session)
    (feeder,) = group.create()
    task = asyncio.create_task(feeder.run())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The coroutine itself never ran, so nobody could account for it: TensorFlow's never started thread.
    assert group.create() == []
    task = asyncio.create_task(feeder.run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await session.close()
    while producers(session).get("queue"):
        await asyncio.sleep(0.001)


async def test_cancelling_the_services_frees_the_feeders_although_nobody_requested_a_stop(use):
    # What an outer cancellation does: no grace, everything is cancelled at once.
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [model.runner], coordinator=coordinator))
    while await session.run(model.size) < 2:
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    coordinator.request_stop()
    while session.executor.statistics().side_threads:
        await asyncio.sleep(0.001)


async def test_a_run_of_an_endless_feeder_never_holds_the_device_thread(use):
    model = Filled(capacity=1)
    session = await use(model.graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [model.runner], coordinator=coordinator))
    assert await asyncio.gather(*(session.run(model.dequeue) for _ in range(50))) == [10.0] * 50
    coordinator.request_stop()
    await coordinator.join(tasks)


async def test_feeders_are_freed_without_the_garbage_collector(use):
    # They hold the session, which is to be freed as soon as nobody uses it.
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    services = make_feeders(session, [model.runner], coordinator=coordinator)
    tasks = run_all(services)
    assert await session.run(model.dequeue) == 10.0
    coordinator.request_stop()
    await asyncio.gather(*tasks)
    gone = [weakref.ref(service) for service in (*services, services[0].group)]
    gc.collect()
    gc.disable()
    try:
        del services, tasks
        await asyncio.sleep(0)  # the loop's last handle refers to the last task
        while session.executor.statistics().side_threads:
            await asyncio.sleep(0.001)
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("runner", [5, "queue", None])
async def test_something_that_is_no_runner_is_named(use, runner):
    session = await use(tf.Graph())
    with pytest.raises(TypeError, match="QueueRunner objects") as caught:
        make_feeders(session, [runner])
    assert repr(runner) in str(caught.value)


async def test_a_runner_of_another_graph_is_named_before_anything_starts(use):
    mine, other = Filled(), Filled()
    session = await use(mine.graph)
    with pytest.raises(ValueError, match="put of the QueueRunner of queue belongs to another graph"):
        make_feeders(session, [mine.runner, other.runner])
    assert len(make_feeders(session, [mine.runner])) == 1, "nothing was created by the failed call"


# ---------------------------------------------------------------------------------- F19


def failing_producer(graph, after, error="no such record"):
    """A queue whose producer gives `after` elements and then fails; returns runner and dequeue op."""
    state = {"left": after}

    def produce():
        if state["left"] == 0:
            raise ValueError(error)
        state["left"] -= 1
        return np.float32(state["left"])

    with graph.as_default():
        queue = tf1.FIFOQueue(1, tf.float32, shapes=[()], name="records")
        produced = tf1.py_func(produce, [], tf.float32)
        produced.set_shape(())
        runner = QueueRunner(queue, [queue.enqueue(produced, name="put")])
        batches = tf1.FIFOQueue(1, tf.float32, shapes=[(2,)], name="batches")
        second = QueueRunner(batches, [batches.enqueue(queue.dequeue_many(2), name="put_batch")])
        take = batches.dequeue(name="take")
    return [runner, second], take


@pytest.mark.parametrize("after", [0, 1, 2, 5])
async def test_f19_the_producers_error_is_the_one_that_is_raised(use, events, after):
    graph = tf.Graph()
    runners, take = failing_producer(graph, after)
    session = await use(graph)
    coordinator = Coordinator(emit=events)
    tasks = run_all(make_feeders(session, runners, coordinator=coordinator, emit=events))
    consumed = 0
    with pytest.raises((tf.errors.OutOfRangeError, tf.errors.CancelledError)) as seen:
        while True:
            await session.run(take)
            consumed += 1
    assert consumed <= after // 2
    # By the time that the consumer sees the end of its queue, the error is known: no success path before it.
    error = coordinator.error
    assert error is not None
    assert "no such record" in str(error)
    coordinator.request_stop(seen.value)
    with pytest.raises(type(error)) as caught:
        await coordinator.join(tasks)
    assert caught.value is error
    assert tasks[0].exception() is error
    message, level, data = await events.until("queue.no_producer")
    assert "no producer alive for queue records" in message
    assert "The stop ends" in message
    assert level == "warning"
    assert data["queue"] == "records"
    assert "no such record" in data["error"]


async def test_f19_an_error_after_the_consumers_clean_end_is_still_raised(use):
    # The order that nothing can forbid: the consumer's OutOfRangeError is reported while the producer is failing.
    inside, fail = threading.Event(), threading.Event()

    def produce():
        inside.set()
        fail.wait(30)
        raise ValueError("no such record")

    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(1, tf.float32, name="records")
        runner = QueueRunner(queue, [queue.enqueue(tf1.py_func(produce, [], tf.float32))])
        closed = queue.is_closed()
    session = await use(graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [runner], coordinator=coordinator))
    await asyncio.to_thread(inside.wait, 30)
    coordinator.request_stop(tf.errors.OutOfRangeError(None, None, "is closed and has insufficient elements"))
    while not await session.run(closed):
        await asyncio.sleep(0.001)
    fail.set()
    with pytest.raises(tf.errors.OpError, match="no such record"):
        await coordinator.join(tasks)
    assert tasks[0].exception() is coordinator.error


@pytest.mark.parametrize("body", ["raises", "swallows", "waits"])
@pytest.mark.parametrize("after", [0, 3])
async def test_f19_in_a_managed_session_the_producers_error_leaves_the_block(body, after):
    graph = tf.Graph()
    runners, take = failing_producer(graph, after)
    with graph.as_default():
        for runner in runners:
            tf1.train.add_queue_runner(runner)
        unfed = tf1.FIFOQueue(1, tf.float32, name="unfed").dequeue()
    sv = Supervisor(graph=graph)
    reached = []
    with pytest.raises(tf.errors.OpError, match="no such record") as caught:
        async with sv.managed_session() as sess:
            try:
                while True:
                    await sess.run(take)
            except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
                reached.append(sv.coord.error)
                if body == "raises":
                    raise
                if body == "waits":
                    # A program that tries another queue, which nobody feeds: closing the session frees it.
                    run = asyncio.ensure_future(sess.run(unfed))
                    await sv.wait_for_stop()
                    run.cancel()
    assert reached == [caught.value], "the error was known before the body saw the end of its queue"
    assert sv.should_stop()


async def test_f14_a_managed_session_with_full_queues_ends_in_no_time():
    # TensorFlow's own may sit out the grace, 120 s by default, and then raise.
    model = Filled(capacity=2, collect=True)
    sv = Supervisor(graph=model.graph)
    loop = asyncio.get_running_loop()
    async with sv.managed_session() as sess:
        assert await sess.run(model.dequeue) == 10.0
        while await sess.run(model.size) < 2:
            await asyncio.sleep(0.001)
        names_inside = {service.name for service in sv.status().services}
        left_at = loop.time()
    assert loop.time() - left_at < 10.0
    assert {"QueueRunnerThread-queue-put", "QueueRunnerThread-queue-close_on_stop"} <= names_inside
    assert {service.state for service in sv.status().services} <= {"done"}


async def test_f19_without_a_coordinator_a_dead_producer_is_an_event(use, events):
    graph = tf.Graph()
    runners, _ = failing_producer(graph, 0)
    session = await use(graph)
    group = QueueFeeders(runners[0], session, emit=events)
    (feeder,) = group.create()
    with pytest.raises(tf.errors.OpError, match="no such record"):
        await feeder.run()
    assert len(group.exceptions_raised) == 1
    message, _, _ = await events.until("queue.no_producer")
    assert "no producer alive for queue records" in message
    assert "wait for ever" in message


async def test_f19_a_queue_that_nobody_feeds_can_be_named(use, events):
    model = Filled(collect=True)
    with model.graph.as_default():
        own = tf1.FIFOQueue(1, tf.float32, name="own")
        own_take = own.dequeue(name="own_take")
    session = await use(model.graph)
    sources = [model.dequeue.op.name, own_take.op.name, "inside/a/function"]
    assert producers(session) == {"queue": 0}
    assert report_starved(session, sources, events) == ("queue",)
    assert report_starved(session, ["queue"], events) == ("queue",)
    message, level, _ = events.of("queue.no_producer")[0]
    assert "no producer alive for queue queue: its feeders were never started" in message
    assert level == "warning"
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, coordinator=coordinator))
    assert producers(session) == {"queue": 1}
    assert report_starved(session, sources, events) == ()
    coordinator.request_stop()
    await coordinator.join(tasks)
    assert producers(session) == {"queue": 0}
    assert len(events.all) == 2


async def test_f19_an_ordinary_stop_speaks_of_no_dead_producer(use, events):
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    tasks = run_all(make_feeders(session, [model.runner], coordinator=coordinator, emit=events))
    while await session.run(model.size) < 2:
        await asyncio.sleep(0.001)
    coordinator.request_stop()
    await coordinator.join(tasks)
    assert events.of("queue.no_producer") == []
    assert events.of("queue.closed") == []


async def test_a_closer_that_is_cancelled_before_the_stop_still_cancels_the_queue(use):
    model = Filled()
    session = await use(model.graph)
    coordinator = Coordinator()
    feeder, closer = make_feeders(session, [model.runner], coordinator=coordinator)
    assert isinstance(closer, QueueCloser)
    feeding, closing = run_all([feeder, closer])
    while await session.run(model.size) < 2:
        await asyncio.sleep(0.001)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    # The feeder is out of its queue. Nobody has requested a stop, so for TensorFlow's runner, too, this is an error.
    with pytest.raises(tf.errors.CancelledError):
        await feeding
    assert isinstance(coordinator.error, tf.errors.CancelledError)
