"""Streams of a monitored session: hooks at full speed, no feed lost over a recovery, the same ends as without hooks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed
from asupervisor.hooks import AsyncSessionRunHook, StopAtStepHook
from asupervisor.monitored import MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
quickly = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)


class Async(AsyncSessionRunHook):
    """Makes every run go step by step from the event loop."""

    async def before_run(self, run_context: Any) -> None:
        await asyncio.sleep(0)


class Aborts(AsyncSessionRunHook):
    def __init__(self, *at: int, after: bool = False) -> None:
        self.at = set(at)
        self.runs = 0
        self.after = after

    def _fail(self) -> None:
        if self.runs in self.at:
            self.at.discard(self.runs)
            raise tf.errors.AbortedError(None, None, "lost")

    def before_run(self, run_context: Any) -> None:
        self.runs += 1
        if not self.after:
            self._fail()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.after:
            self._fail()


both = pytest.mark.parametrize("with_hooks", [[], [Async]], ids=["device", "loop"])


def hooks_of(kinds: list[Any], *others: Any) -> list[Any]:
    return [*(kind() for kind in kinds), *others]


def fed_model(variables: str) -> Any:
    """A sum of what was fed, which tells whether each feed was used once."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [], name="x")
        step = tf1.train.get_or_create_global_step()
        total = tf1.get_variable("total", initializer=0.0)
        with tf.control_dependencies([tf1.assign_add(step, 1), tf1.assign_add(total, x)]):
            used = tf.identity(x)
    return graph, x, total, used, step


def feeds_as(kind: str, x: Any, values: list[float]) -> Any:
    """The same feeds, of every kind that a stream takes."""
    buffer = np.zeros([], np.float32)
    if kind == "reused buffer":

        def reuse() -> Iterator[Any]:
            for value in values:
                buffer[...] = value
                yield {x: buffer}

        return reuse()
    if kind == "iterable":
        return [{x: value} for value in values]
    if kind == "async iterable":

        async def generate() -> AsyncIterator[Any]:
            for value in values:
                await asyncio.sleep(0)
                yield {x: np.float32(value)}

        return generate()
    rest = iter(values)
    if kind == "callable":

        def following() -> Any:
            value = next(rest, None)
            return None if value is None else {x: value}

        return following

    async def afollowing() -> Any:
        value = next(rest, None)
        return None if value is None else {x: [value][0]}

    return afollowing


KINDS = ["iterable", "reused buffer", "callable", "async iterable", "coroutine function"]


@pytest.mark.thin
@both
@pytest.mark.parametrize("kind", KINDS)
async def test_feeds_of_every_kind(variables: str, kind: str, with_hooks: Any, recorder: Make) -> None:
    graph, x, total, used, _ = fed_model(variables)
    values = [float(n) for n in range(1, 8)]
    hook = recorder()
    async with MonitoredSession(hooks=hooks_of(with_hooks, hook), graph=graph) as sess:
        stream = sess.steps(used, feeds_as(kind, x, values))
        assert [result async for result in stream] == values
        assert stream.ended_by == "feed"
        assert stream.steps_run == stream.results_taken == 7
        assert await sess.plain.run(total) == sum(values)
    assert hook.calls.count("hook.after_run") == 7


@pytest.mark.thin
@both
@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after it"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_feed_is_lost_over_a_recovery(
    variables: str, tmp_path: Path, kind: str, with_hooks: Any, after: bool
) -> None:
    """The step that failed is run again with its feed, and what was taken ahead comes after it, in order."""
    graph, x, _, used, step = fed_model(variables)
    values = [float(n) for n in range(1, 21)]
    hooks = hooks_of(with_hooks, Aborts(8, 9, 15, after=after))
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=hooks, graph=graph, recovery=quickly, save_checkpoint_secs=3600
    ) as sess:
        stream = sess.steps(used, feeds_as(kind, x, values))
        assert [result async for result in stream] == values
        assert stream.steps_run == 20
        assert sess.recoveries == 3
        # Restored from the first save each time, as nothing was saved on the way.
        assert await sess.plain.run(step) < 20


@both
async def test_max_steps_counts_over_recoveries(counter: Make, tmp_path: Path, with_hooks: Any) -> None:
    made = counter()
    hooks = hooks_of(with_hooks, Aborts(3, 5))
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=hooks, graph=made.graph, recovery=quickly
    ) as sess:
        stream = sess.steps(made.train, max_steps=7)
        assert len([result async for result in stream]) == 7
        assert stream.steps_run == 7
        assert stream.ended_by == "max_steps"


@both
async def test_a_stream_goes_on_after_the_coordinator_told_of_a_loss(
    counter: Make, recorder: Make, tmp_path: Path, with_hooks: Any
) -> None:
    """The session's own stop ends its streams; this is no end of the training."""
    made, hook = counter(), recorder()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=hooks_of(with_hooks, hook), graph=made.graph, recovery=quickly
    ) as sess:
        taken = 0
        async for _ in sess.steps(made.train, max_steps=40, ahead=0):
            taken += 1
            if taken == 5:
                error = tf.errors.UnavailableError(None, None, "a feeder lost its peer")
                await asyncio.to_thread(hook.coords[-1].request_stop, error)
        assert taken == 40
        assert sess.recoveries == 1


@both
async def test_a_failed_service_ends_a_stream_and_leaves_the_block(
    counter: Make, recorder: Make, with_hooks: Any
) -> None:
    made, hook = counter(), recorder()
    error = ValueError("service")
    with pytest.raises(ValueError, match="service") as raised:
        async with MonitoredSession(hooks=hooks_of(with_hooks, hook), graph=made.graph) as sess:
            taken = 0
            async for _ in sess.steps(made.train):
                taken += 1
                if taken == 5:
                    threading.Thread(target=hook.coords[-1].request_stop, args=(error,)).start()
    assert raised.value is error


@both
async def test_stops(counter: Make, recorder: Make, with_hooks: Any) -> None:
    made, hook = counter(), recorder()
    async with MonitoredSession(hooks=hooks_of(with_hooks, hook), graph=made.graph) as sess:
        stream = sess.steps(made.after)
        async for value in stream:
            if value == 3:
                sess.request_stop()
        assert stream.ended_by == "stop"
        again = sess.steps(made.after)
        assert [r async for r in again] == []
        assert again.ended_by == "stop"


@both
async def test_a_hook_stops_at_its_step_however_far_the_stream_is_ahead(counter: Make, with_hooks: Any) -> None:
    made = counter()
    hooks = hooks_of(with_hooks, StopAtStepHook(last_step=10))
    async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
        stream = sess.steps(made.after, ahead=64)
        assert [int(r) async for r in stream] == list(range(1, 11))
        assert stream.ended_by == "stop_when"
        assert sess.should_stop()


@both
async def test_stop_when(counter: Make, with_hooks: Any) -> None:
    made = counter()
    async with MonitoredSession(hooks=hooks_of(with_hooks), graph=made.graph) as sess:
        assert [r async for r in sess.steps(made.after, stop_when=lambda result: result == 4)] == [1, 2, 3, 4]
        assert not sess.should_stop()
        assert await sess.run(made.after) == 5


@both
async def test_the_end_of_the_input_ends_a_stream(variables: str, with_hooks: Any) -> None:
    graph = tf.Graph()
    with graph.as_default():
        item = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    async with MonitoredSession(hooks=hooks_of(with_hooks), graph=graph) as sess:
        stream = sess.steps(item)
        assert [int(r) async for r in stream] == [0, 1, 2, 3, 4]
        assert stream.ended_by == "out_of_range"


@pytest.mark.thin
@both
@pytest.mark.parametrize("where", ["step", "feed", "before_run", "after_run", "stop_when"])
async def test_errors_leave_as_themselves(counter: Make, raiser: Make, with_hooks: Any, where: str) -> None:
    made, error = counter(), ValueError(where)

    def feeds() -> Iterator[Any]:
        for number in range(100):
            if where == "feed" and number == 3:
                raise error
            yield {}

    def stop_when(result: Any) -> bool:
        if where == "stop_when" and result == 3:
            raise error
        return False

    with made.graph.as_default():
        checked = tf1.check_numerics(1.0 / tf.cast(4 - made.after, tf.float32), "inf")
    hooks = hooks_of(with_hooks)
    if where in ("before_run", "after_run"):
        hooks.append(raiser(where, error, at=4))
    kind = tf.errors.InvalidArgumentError if where == "step" else ValueError
    async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
        fetches = [made.after, checked] if where == "step" else made.after
        stream = sess.steps(fetches, feeds(), stop_when=stop_when)
        with pytest.raises(kind) as raised:
            async for _ in stream:
                pass
        if where != "step":
            assert raised.value is error
        assert [r async for r in stream] == [], "it has ended"
        assert stream.ended_by == "error"
        assert not sess.should_stop()


@both
async def test_breaking_out_and_forgetting(counter: Make, with_hooks: Any) -> None:
    made = counter()
    async with MonitoredSession(hooks=hooks_of(with_hooks), graph=made.graph) as sess:
        async for _ in sess.steps(made.train, ({} for _ in range(10**6))):
            break
        gc.collect()
        async with asyncio.timeout(20):
            while sess.plain.statistics().streams:
                await asyncio.sleep(0.001)
        async with sess.steps(made.train) as stream:
            async for _ in stream:
                break
        assert stream.ended_by == "closed"
        assert [r async for r in stream] == []
        assert not sess.plain.statistics().streams


async def test_a_generator_that_waits_while_the_session_is_replaced(
    variables: str, tmp_path: Path, recorder: Make
) -> None:
    """The old stream's pull is still under way: what it brings is not lost, and the generator is not entered twice."""
    graph, x, _, used, _ = fed_model(variables)
    hook = recorder()
    go = threading.Event()
    waits = threading.Event()

    def feeds() -> Iterator[Any]:
        yield {x: 1.0}
        waits.set()
        go.wait(20)
        yield {x: 2.0}
        yield {x: 3.0}

    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[hook], graph=graph, recovery=quickly) as sess:
        stream = sess.steps(used, feeds())
        assert await anext(stream) == 1
        while not waits.is_set():
            await asyncio.sleep(0.001)
        following = asyncio.ensure_future(anext(stream))
        hook.coords[-1].request_stop(tf.errors.AbortedError(None, None, "lost"))
        async with asyncio.timeout(20):
            while not sess.recoveries:
                await asyncio.sleep(0.001)
        go.set()
        assert await following == 2
        assert [r async for r in stream] == [3]


async def test_a_cancelled_consumer_loses_nothing(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph) as sess:
        stream = sess.steps(made.after, ahead=0)
        for expected in range(1, 5):
            sess.pause()
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.wait([waiting])
            sess.resume()
            assert await anext(stream) == expected


async def test_wrong_arguments(counter: Make) -> None:
    made = counter()
    sess = MonitoredSession(graph=made.graph)
    with pytest.raises(SessionClosed):
        async for _ in sess.steps(made.train):
            pass
    async with sess:
        for wrong in ({"max_steps": -1}, {"ahead": -1}):
            with pytest.raises(ValueError, match="negative"):
                sess.steps(made.train, **wrong)
        with pytest.raises(TypeError, match="feeds must be"):
            sess.steps(made.train, 7)
        assert [r async for r in sess.steps(made.train, max_steps=0)] == []
    with pytest.raises(SessionClosed):
        async for _ in sess.steps(made.train):
            pass


async def test_a_producer_does_not_block_the_step_that_needs_it(variables: str, recorder: Make) -> None:
    """`run(enqueue)` on a full queue, with hooks: they are called, and the dequeuing step has the device thread."""
    for extra in ([], [Async()]):
        graph = tf.Graph()
        with graph.as_default():
            queue = tf1.FIFOQueue(1, tf.float32, shapes=[()])
            value = tf1.placeholder(tf.float32, [])
            put, take = queue.enqueue(value), queue.dequeue()
        hook = recorder()
        async with MonitoredSession(hooks=[hook, *extra], graph=graph) as sess:

            async def produce(sess: Any = sess, put: Any = put, value: Any = value) -> None:
                for number in range(10):
                    await sess.run(put, {value: float(number)})

            producer = asyncio.create_task(produce())
            async with asyncio.timeout(60):
                assert [float(await sess.run(take)) for _ in range(10)] == list(range(10))
                await producer
        assert hook.calls.count("hook.before_run") == hook.calls.count("hook.after_run") == 20
