"""What is asked of the user's feeds belongs to the stream, over all of its sessions: nothing of it is lost or ended.

Each test puts one event of a recovery, or of a consumer's cancellation, beside one state of the feeds.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import StepOutcomeUnknown
from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import MonitoredSession, MonitoredTrainingSession, SessionCreator
from asupervisor.monitored.feeds import end_parts
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy

tf1 = tf.compat.v1

Make = Callable[..., Any]
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
quickly = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=1000)
KINDS = ["iterable", "callable", "async iterable", "coroutine function"]

kinds = pytest.mark.parametrize("kind", KINDS)
async_kinds = pytest.mark.parametrize("kind", KINDS[2:])


class Async(AsyncSessionRunHook):
    """Makes every run go step by step from the event loop."""

    async def before_run(self, run_context: Any) -> None:
        await asyncio.sleep(0)


both = pytest.mark.parametrize("with_hooks", [[], [Async]], ids=["device", "loop"])


class Recoverable(AsyncSessionRunHook):
    """Knows the coordinator of each session, and can be told to fail at a run."""

    def __init__(self) -> None:
        self.coords: list[Any] = []
        self.runs = 0
        self.before: dict[int, Callable[[], None]] = {}
        self.after: dict[int, Callable[[], None]] = {}

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coords.append(coord)

    def before_run(self, run_context: Any) -> None:
        self.runs += 1
        self.before.pop(self.runs, int)()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.after.pop(self.runs, int)()


async def happened(event: threading.Event) -> None:
    async with asyncio.timeout(30):
        while not event.is_set():
            await asyncio.sleep(0.001)


def lost() -> Exception:
    error: Exception = tf.errors.AbortedError(None, None, "lost")
    return error


class Feeds:
    """Feeds of any kind, which wait before one of them until they are told to go on.

    Attributes:
        asked: The values that they have made.
        thrown: What was thrown into them while they waited.
    """

    def __init__(self, kind: str, x: Any, count: int, hold_at: int | None = None, then: Any = None) -> None:
        self.asked: list[float] = []
        self.thrown: list[BaseException] = []
        self._kind, self._x = kind, x
        self._values = [float(n) for n in range(1, count + 1)]
        self._hold_at, self._then = hold_at, then
        self._entered = threading.Event()
        self._go, self._ago = threading.Event(), asyncio.Event()

    def _next(self) -> Any:
        value = self._values[len(self.asked)]
        self.asked.append(value)
        return {self._x: np.float32(value)}

    def _holds(self) -> bool:
        return self._hold_at == len(self.asked) + 1 and not self._go.is_set()

    def _hold(self) -> bool:
        """Whether to end."""
        if not self._holds():
            return len(self.asked) == len(self._values)
        self._entered.set()
        self._go.wait(60)
        return self._released()

    async def _ahold(self) -> bool:
        if not self._holds():
            return len(self.asked) == len(self._values)
        self._entered.set()
        try:
            await self._ago.wait()
        except BaseException as error:
            self.thrown.append(error)
            raise
        return self._released()

    def _released(self) -> bool:
        if isinstance(self._then, Exception):
            raise self._then
        return self._then == "end"

    def make(self) -> Any:
        def generate() -> Iterator[Any]:
            while not self._hold():
                yield self._next()

        async def agenerate() -> AsyncIterator[Any]:
            while not await self._ahold():
                yield self._next()

        async def anext_one() -> Any:
            return None if await self._ahold() else self._next()

        if self._kind == "iterable":
            return generate()
        if self._kind == "callable":
            return lambda: None if self._hold() else self._next()
        return agenerate() if self._kind == "async iterable" else anext_one

    async def wait_until_held(self) -> None:
        await happened(self._entered)

    def wait_until_held_blocking(self) -> None:
        assert self._entered.wait(30)

    def release(self) -> None:
        self._go.set()
        self._ago.set()


@pytest.fixture
def model() -> SimpleNamespace:
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [], name="x")
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf1.assign_add(step, 1)]):
            used = tf.identity(x)
        return SimpleNamespace(graph=graph, x=x, step=step, used=used, init=tf1.global_variables_initializer())


class Creator(SessionCreator):
    """Sessions that say of themselves what they find; `go` holds all but the first one back."""

    def __init__(self, model: Any, on_restart: Any) -> None:
        self.on_restart = on_restart
        self.graph = model.graph
        self.waits, self.go = threading.Event(), threading.Event()
        self._init, self._made = model.init, 0

    def create_session(self) -> Any:
        self._made += 1
        if self._made > 1:
            self.waits.set()
            assert self.go.wait(60)
        session = tf1.Session(graph=self.graph)
        session.run(self._init)
        return session


@pytest.fixture
def session(model: SimpleNamespace) -> Callable[..., Any]:
    """Makes a session that recovers from anything."""

    def make(with_hooks: list[Any], hook: Any) -> Any:
        creator = Creator(model, "restores")
        creator.go.set()
        hooks = [*(kind() for kind in with_hooks), hook]
        return MonitoredSession(creator, hooks=hooks, graph=model.graph, recovery=quickly)

    return make


async def replaced(sess: Any, hook: Recoverable, fetch: Any) -> None:
    """The session is lost, and there is another one."""
    sessions = len(hook.coords)
    hook.coords[-1].request_stop(lost())
    async with asyncio.timeout(60):
        await sess.run(fetch)  # whoever comes next has it recovered
    assert len(hook.coords) == sessions + 1


def tasks_of_streams() -> list[str]:
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name in ("asupervisor feed", "asupervisor feeds", "asupervisor step")]


# ------------------------------------------------------------------ a session is replaced


@both
@kinds
async def test_what_is_asked_for_meanwhile_comes_to_the_next_session(
    model: Any, session: Make, kind: str, with_hooks: Any
) -> None:
    hook, feeds = Recoverable(), Feeds(kind, model.x, 5, hold_at=3)
    async with session(with_hooks, hook) as sess:
        stream = sess.steps(model.used, feeds.make())
        assert [await anext(stream), await anext(stream)] == [1, 2]
        following = asyncio.ensure_future(anext(stream))
        await feeds.wait_until_held()
        for _ in range(3):
            await replaced(sess, hook, model.step)
        assert not following.done()
        feeds.release()
        assert await following == 3
        assert [r async for r in stream] == [4, 5]
        assert stream.ended_by == "feed"
        assert stream.steps_run == stream.results_taken == 5
    assert feeds.asked == [1, 2, 3, 4, 5], "each of them once"
    assert not feeds.thrown


@both
@kinds
async def test_it_comes_in_the_very_moment_of_the_loss(model: Any, session: Make, kind: str, with_hooks: Any) -> None:
    """Feed and loss are told in the same turn of the loop, in either order."""
    for loss_first in (False, True):
        hook, feeds = Recoverable(), Feeds(kind, model.x, 5, hold_at=3)
        async with session(with_hooks, hook) as sess:
            stream = sess.steps(model.used, feeds.make())
            assert [await anext(stream), await anext(stream)] == [1, 2]
            following = asyncio.ensure_future(anext(stream))
            await feeds.wait_until_held()
            if loss_first:
                hook.coords[-1].request_stop(lost())
                feeds.release()
            else:
                feeds.release()
                hook.coords[-1].request_stop(lost())
            assert await following == 3
            assert [r async for r in stream] == [4, 5]
        assert feeds.asked == [1, 2, 3, 4, 5]


@pytest.mark.thin
@both
@kinds
@pytest.mark.parametrize("then", ["end", "error"])
async def test_what_the_feeds_end_with_meanwhile_is_told_after_the_recovery(
    model: Any, session: Make, kind: str, with_hooks: Any, then: str
) -> None:
    error = ValueError("feed")
    hook, feeds = Recoverable(), Feeds(kind, model.x, 5, hold_at=3, then=error if then == "error" else "end")
    async with session(with_hooks, hook) as sess:
        stream = sess.steps(model.used, feeds.make())
        assert [await anext(stream), await anext(stream)] == [1, 2]
        following = asyncio.ensure_future(anext(stream))
        await feeds.wait_until_held()
        await replaced(sess, hook, model.step)
        feeds.release()
        with pytest.raises(ValueError if then == "error" else StopAsyncIteration) as raised:
            await following
        if then == "error":
            assert raised.value is error
        assert stream.ended_by == ("error" if then == "error" else "feed")
        assert [r async for r in stream] == []
        assert not sess.should_stop()


@kinds
@pytest.mark.parametrize("then", [None, "error"])
async def test_a_feed_that_waits_for_a_result_is_no_dead_lock(
    model: Any, session: Make, kind: str, then: str | None
) -> None:
    """The feeds wait for the result of the step that fails: it is run again although they are still being asked."""
    hook = Recoverable()
    feeds = Feeds(kind, model.x, 5, hold_at=4, then=ValueError("feed") if then == "error" else None)

    def fails() -> None:
        feeds.wait_until_held_blocking()
        raise lost()

    hook.before[2] = fails
    try:
        async with session([], hook) as sess:
            stream = sess.steps(model.used, feeds.make())
            async with asyncio.timeout(20):
                assert [await anext(stream), await anext(stream), await anext(stream)] == [1, 2, 3]
            assert sess.recoveries == 1
            feeds.release()
            if then == "error":
                with pytest.raises(ValueError, match="feed"):
                    await anext(stream)
            else:
                assert [r async for r in stream] == [4, 5]
    finally:
        feeds.release()


@kinds
async def test_a_step_that_ends_after_its_session_does_not_count(model: Any, session: Make, kind: str) -> None:
    """Its result reaches nobody, so its feed is used again; and nothing is taken for used in its stead later."""
    hook, feeds = Recoverable(), Feeds(kind, model.x, 12)
    under_way, late = threading.Event(), threading.Event()

    def hangs() -> None:
        under_way.set()
        assert late.wait(30)

    def fails() -> None:
        raise lost()

    hook.after[2] = hangs
    async with session([], hook) as sess:
        stream = sess.steps(model.used, feeds.make(), max_steps=11)
        assert await anext(stream) == 1
        following = asyncio.ensure_future(anext(stream))
        await happened(under_way)
        async with asyncio.timeout(30):
            plain = sess.plain
            hook.coords[-1].request_stop(lost())
            recovery = asyncio.ensure_future(sess.run(model.step))
            while not plain.closed:
                await asyncio.sleep(0.001)
            for _ in range(20):  # the consumer hears of it
                await asyncio.sleep(0.001)
        hook.before[7] = fails  # once more, some steps later
        late.set()
        await recovery
        assert await following == 2
        assert [r async for r in stream] == list(range(3, 12))
        assert stream.ended_by == "max_steps"
        assert stream.steps_run == stream.results_taken == 11
        assert sess.recoveries == 2


async def test_an_async_generator_lives_in_one_task(model: Any, session: Make) -> None:
    """Its timeouts, task groups and context variables work over recoveries."""
    hook, number = Recoverable(), contextvars.ContextVar("number", default=0)
    tasks = set()

    async def generate() -> AsyncIterator[Any]:
        async with asyncio.timeout(60), asyncio.TaskGroup():
            for value in range(1, 7):
                assert number.get() == value - 1
                number.set(value)
                tasks.add(asyncio.current_task())
                await asyncio.sleep(0)
                yield {model.x: value}

    async with session([], hook) as sess:
        stream = sess.steps(model.used, generate(), ahead=0)
        for value in range(1, 7):
            assert await anext(stream) == value
            await replaced(sess, hook, model.step)
        assert [r async for r in stream] == []
    assert len(tasks) == 1


@kinds
async def test_large_arrays_are_copied_before_the_next_one_is_made(model: Any, session: Make, kind: str) -> None:
    """Off the loop, as generators use their buffers again."""
    hook, buffer = Recoverable(), np.zeros([40000], np.float32)
    with model.graph.as_default():
        large = tf1.placeholder(tf.float32, [None])
        first = large[0]

    class Reused(Feeds):
        def _next(self) -> Any:
            buffer[...] = super()._next()[model.x]
            return {large: buffer, "x:0": [0.0][0]}

    feeds = Reused(kind, model.x, 9)

    def fails() -> None:
        raise lost()

    hook.before[4] = fails
    async with session([], hook) as sess:
        assert [r async for r in sess.steps(first, feeds.make())] == list(range(1, 10))


# ------------------------------------------------------------------ a consumer is cancelled


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@both
@kinds
async def test_cancelled_while_the_feeds_are_asked(model: Any, session: Make, kind: str, with_hooks: Any) -> None:
    hook, feeds = Recoverable(), Feeds(kind, model.x, 5, hold_at=3)
    async with session(with_hooks, hook) as sess:
        stream = sess.steps(model.used, feeds.make())
        assert [await anext(stream), await anext(stream)] == [1, 2]
        for _ in range(3):
            following = asyncio.ensure_future(anext(stream))
            await feeds.wait_until_held()
            await asyncio.sleep(0)
            await cancelled(following)
        feeds.release()
        assert [r async for r in stream] == [3, 4, 5]
    assert feeds.asked == [1, 2, 3, 4, 5]
    assert not feeds.thrown


@pytest.mark.parametrize("where", ["before_run", "after_run"])
async def test_cancelled_while_a_hook_has_its_turn(model: Any, session: Make, where: str) -> None:
    """The step goes on to its end, with its hooks; its result is there for the next call."""
    reached, go, calls = asyncio.Event(), asyncio.Event(), []

    class Waits(AsyncSessionRunHook):
        async def _wait(self, which: str) -> None:
            calls.append(which)
            if which == where and calls.count(which) == 2:
                reached.set()
                await go.wait()

        async def before_run(self, run_context: Any) -> None:
            await self._wait("before_run")

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await self._wait("after_run")

    async with session([], Waits()) as sess:
        stream = sess.steps(model.used, [{model.x: n} for n in range(1, 5)])
        assert await anext(stream) == 1
        following = asyncio.ensure_future(anext(stream))
        await reached.wait()
        with pytest.raises(RuntimeError, match="two tasks wait"):
            await anext(stream)
        await cancelled(following)
        go.set()
        assert [r async for r in stream] == [2, 3, 4]
        assert await sess.plain.run(model.step) == 4
    assert calls == ["before_run", "after_run"] * 4


@both
async def test_cancelled_while_it_waits_for_a_recovery_it_is_told_the_outcome_later(
    model: Any, with_hooks: Any
) -> None:
    """Nobody knows whether the step was applied: it is not run a second time unasked."""
    hook, creator = Recoverable(), Creator(model, "adopts")

    def fails() -> None:
        raise lost()

    hook.after[2] = fails
    hooks = [*(kind() for kind in with_hooks), hook]
    async with MonitoredSession(creator, hooks=hooks, graph=model.graph, recovery=quickly) as sess:
        stream = sess.steps(model.used, [{model.x: n} for n in range(1, 5)], ahead=0)
        assert await anext(stream) == 1
        following = asyncio.ensure_future(anext(stream))
        await happened(creator.waits)
        await cancelled(following)
        creator.go.set()
        with pytest.raises(StepOutcomeUnknown):
            await anext(stream)
        assert stream.ended_by == "error"
        assert [r async for r in stream] == []


@both
async def test_cancelled_while_it_waits_for_a_recovery_between_two_steps(model: Any, with_hooks: Any) -> None:
    """There was no step whose outcome could be unknown: the stream goes on."""
    hook, creator = Recoverable(), Creator(model, "adopts")
    hooks = [*(kind() for kind in with_hooks), hook]
    async with MonitoredSession(creator, hooks=hooks, graph=model.graph, recovery=quickly) as sess:
        stream = sess.steps(model.used, [{model.x: n} for n in range(1, 5)], ahead=0)
        assert await anext(stream) == 1
        hook.coords[-1].request_stop(lost())
        following = asyncio.ensure_future(anext(stream))
        await happened(creator.waits)
        await cancelled(following)
        creator.go.set()
        assert [r async for r in stream] == [2, 3, 4]


# ------------------------------------------------------------------ the end


@pytest.mark.thin
@both
@async_kinds
@pytest.mark.parametrize("how", ["aclose", "forgotten", "block", "stop", "async with, cancelled"])
async def test_with_the_stream_ends_what_it_has_under_way(
    model: Any, session: Make, kind: str, with_hooks: Any, how: str
) -> None:
    hook, feeds = Recoverable(), Feeds(kind, model.x, 5, hold_at=3)
    async with session(with_hooks, hook) as sess:
        stream = sess.steps(model.used, feeds.make())
        assert [await anext(stream), await anext(stream)] == [1, 2]
        following = asyncio.ensure_future(anext(stream))
        await feeds.wait_until_held()
        await cancelled(following)
        del following
        if how == "aclose":
            await stream.aclose()
            assert not tasks_of_streams()
        elif how == "forgotten":
            del stream
            gc.collect()
            async with asyncio.timeout(20):
                while tasks_of_streams():
                    await asyncio.sleep(0.001)
        elif how == "stop":
            sess.request_stop()
        elif how == "async with, cancelled":

            async def body(stream: Any) -> None:
                async with stream:
                    raise asyncio.CancelledError

            await asyncio.wait([asyncio.ensure_future(body(stream))])
            assert stream.ended_by == "closed"
    assert not tasks_of_streams()
    assert [type(error) for error in feeds.thrown] == [asyncio.CancelledError]


async def test_steps_end_before_the_last_calls_of_the_hooks(model: Any, session: Make) -> None:
    calls, reached = [], asyncio.Event()

    class Waits(AsyncSessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                calls.append("before_run has ended")

        async def end(self, session: Any) -> None:
            calls.append("end")

    async with session([], Waits()) as sess:
        stream = sess.steps(model.used, {model.x: 1.0})
        following = asyncio.ensure_future(anext(stream))
        await reached.wait()
        await cancelled(following)
    assert calls == ["before_run has ended", "end"]
    assert [r async for r in stream] == []


async def test_an_error_that_nobody_waits_for_is_told(model: Any, session: Make, heard: Make) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    class Fails(AsyncSessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            reached.set()
            await go.wait()
            raise ValueError("nobody waits")

    async with session([], Fails()) as sess:
        events = sess.events()
        stream = sess.steps(model.used, {model.x: 1.0})
        following = asyncio.ensure_future(anext(stream))
        await reached.wait()
        await cancelled(following)
        del stream, following
        gc.collect()
        go.set()
        event = await heard(events, "stream.error_dropped")
        assert "nobody waits" in event.message


async def test_somebody_else_cancels_the_task(model: Any, session: Make) -> None:
    """The consumer is told, and does not wait for ever."""
    feeds = Feeds("async iterable", model.x, 5, hold_at=3)
    async with session([], Recoverable()) as sess:
        stream = sess.steps(model.used, feeds.make())
        assert [await anext(stream), await anext(stream)] == [1, 2]
        following = asyncio.ensure_future(anext(stream))
        await feeds.wait_until_held()
        next(task for task in asyncio.all_tasks() if task.get_name() == "asupervisor feeds").cancel()
        with pytest.raises(RuntimeError, match="feed raised CancelledError"):
            await following


async def test_what_refuses_to_end_is_told() -> None:
    told = []

    class Part:
        closed = False

        def close(self) -> None:
            self.closed = True

        async def wait_closed(self) -> None:
            await asyncio.Event().wait()

    part = Part()
    await end_parts({part}, 0.01, lambda kind, message, **data: told.append(kind))
    assert part.closed
    assert told == ["stop.feeds_left"]
    await end_parts(set(), 0.01, lambda kind, message, **data: told.append(kind))
    assert len(told) == 1


# ------------------------------------------------------------------ everything at once


async def anything_happens(model: Any, logdir: Path, kind: str, with_hooks: Any, seed: int) -> None:
    """Random losses, failures, cancellations and waits."""
    chance = random.Random(f"{kind} {len(with_hooks)} {seed}")
    hook, count = Recoverable(), 25
    values = [float(n) for n in range(1, count + 1)]
    rest = iter(values)

    def fails() -> None:
        raise lost()

    def sleepy() -> float:
        return chance.choice((0.0, 0.0, 0.0, 0.0005, 0.003))

    async def generate() -> AsyncIterator[Any]:
        for value in rest:
            await asyncio.sleep(sleepy())
            yield {model.x: value}

    async def following() -> Any:
        value = next(rest, None)
        await asyncio.sleep(sleepy())
        return None if value is None else {model.x: value}

    def plain() -> Any:
        value = next(rest, None)
        threading.Event().wait(sleepy())
        return None if value is None else {model.x: value}

    made = {
        "iterable": lambda: iter(plain, None),
        "callable": lambda: plain,
        "async iterable": generate,
        "coroutine function": lambda: following,
    }
    for at in chance.sample(range(2, count), 3):
        (hook.before if chance.random() < 0.5 else hook.after)[at] = fails
    got: list[float] = []
    hooks = [*(kind() for kind in with_hooks), hook]
    training = MonitoredTrainingSession(
        checkpoint_dir=logdir, hooks=hooks, graph=model.graph, recovery=quickly, save_checkpoint_secs=3600
    )
    async with training as sess, asyncio.timeout(100):
        stream = sess.steps(model.used, made[kind](), ahead=chance.choice((0, 1, 4, 64)))
        while stream.ended_by is None:
            waiting = asyncio.ensure_future(anext(stream, None))
            for _ in range(chance.choice((0, 1, 3, 10))):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                await asyncio.wait([waiting])
            if chance.random() < 0.1:
                hook.coords[-1].request_stop(lost())
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled() and (result := waiting.result()) is not None:
                got.append(float(result))
        assert stream.ended_by == "feed"
        assert stream.steps_run == stream.results_taken == count
        await sess.run(model.step)  # a loss of the last moment
    assert got == values


@pytest.mark.thin
@both
@kinds
async def test_anything_happens(model: Any, tmp_path: Path, kind: str, with_hooks: Any) -> None:
    await anything_happens(model, tmp_path, kind, with_hooks, 0)


@pytest.mark.full
@both
@kinds
@pytest.mark.parametrize("seed", range(1, 20))
async def test_anything_happens_whole(model: Any, tmp_path: Path, kind: str, with_hooks: Any, seed: int) -> None:
    await anything_happens(model, tmp_path, kind, with_hooks, seed)
