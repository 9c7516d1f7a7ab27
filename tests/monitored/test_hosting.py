"""A monitored session works wherever its block is written: enter and exit in one task or in two, errors always bare."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import unittest
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import tensorflow as tf

from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy

tf1 = tf.compat.v1

Make = Callable[..., Any]
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
quickly = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)


class Hook(AsyncSessionRunHook):
    """Aborts when told to, keeps the coordinator, counts its last calls."""

    def __init__(self) -> None:
        self.abort = False
        self.coord: Any = None
        self.finished: list[str] = []

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord

    def before_run(self, run_context: Any) -> None:
        if self.abort:
            self.abort = False
            raise tf.errors.AbortedError(None, None, "lost")

    def finish(self, session: Any, outcome: Any) -> None:
        self.finished.append(outcome.reason)


def build() -> SimpleNamespace:
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf1.assign_add(step, 1)]):
            after = tf.identity(step.read_value() if hasattr(step, "read_value") else step)
    return SimpleNamespace(graph=graph, step=step, after=after, hook=Hook())


def made_in(directory: Path) -> tuple[SimpleNamespace, MonitoredSession]:
    made = build()
    sess = MonitoredTrainingSession(
        checkpoint_dir=directory, hooks=[made.hook], graph=made.graph, recovery=quickly, stop_grace_period_secs=10
    )
    return made, sess


# ------------------------------------------------------------------ fixtures


@pytest.fixture
async def session_of_a_fixture(tmp_path: Path) -> AsyncIterator[Any]:
    made, sess = made_in(tmp_path)
    async with sess:
        yield made, sess
    assert made.hook.finished == ["finished"]


async def test_fixture(session_of_a_fixture: Any) -> None:
    made, sess = session_of_a_fixture
    assert await sess.run(made.after) == 1
    await sess.save()
    made.hook.abort = True
    assert await sess.run(made.after) == 2
    assert sess.recoveries == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    made, sess = made_in(tmp_path_factory.mktemp("module"))
    async with sess:
        await sess.run(made.after)
        await sess.save()
        yield made, sess
    assert made.hook.finished == ["finished"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [2, 3])
async def test_fixture_of_the_module(session_of_the_module: Any, number: int) -> None:
    made, sess = session_of_the_module
    assert await sess.run(made.after) == number
    made.hook.abort = number == 2
    await sess.save()
    assert [r async for r in sess.steps(made.step, max_steps=2)] == [number, number]


async def test_an_error_of_a_fixture_that_is_left_elsewhere_is_bare(tmp_path: Path) -> None:
    """Entered in one task, left in another: as pytest-asyncio's fixtures do it."""
    error = ValueError("worker")

    async def fixture() -> AsyncIterator[Any]:
        async with sess:
            yield sess

    made, sess = made_in(tmp_path)
    generator = fixture()
    entered = await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
    assert await entered.run(made.after) == 1
    made.hook.coord.request_stop(error)

    async def leave() -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(generator)

    with pytest.raises(ValueError, match="worker") as raised:
        await asyncio.create_task(leave())
    assert raised.value is error
    assert made.hook.finished == ["error"]


# ------------------------------------------------------------------ exit stacks, unittest, wait_for


async def test_exit_stack_closed_in_another_task(tmp_path: Path) -> None:
    made, sess = made_in(tmp_path)
    stack = contextlib.AsyncExitStack()
    entered = await asyncio.create_task(stack.enter_async_context(sess))
    assert await entered.run(made.after) == 1
    await sess.save()
    made.hook.abort = True
    assert await asyncio.create_task(_run(entered, made)) == 2
    await asyncio.create_task(stack.aclose())
    assert made.hook.finished == ["finished"]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-2")


async def _run(sess: Any, made: Any) -> Any:
    return await sess.run(made.after)


async def test_several_in_one_stack(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pairs = []
        for name in "abc":
            made, sess = made_in(tmp_path / name)
            pairs.append((made, await stack.enter_async_context(sess)))
        assert [await sess.run(made.after) for made, sess in pairs] == [1, 1, 1]
    assert [made.hook.finished for made, _ in pairs] == [["finished"]] * 3


def test_unittest(tmp_path: Path) -> None:
    made, sess = made_in(tmp_path)
    results: list[Any] = []

    class Case(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self) -> None:
            self.sess = await self.enterAsyncContext(sess)

        async def test_it(self) -> None:
            results.append(await self.sess.run(made.after))

    outcome = unittest.TestResult()
    Case("test_it").run(outcome)
    assert outcome.wasSuccessful(), outcome.errors
    assert results == [1]
    assert made.hook.finished == ["finished"]


async def test_wait_for_around_the_enter(tmp_path: Path) -> None:
    made, sess = made_in(tmp_path)
    entered = await asyncio.wait_for(sess.__aenter__(), 20)
    assert await entered.run(made.after) == 1
    await sess.__aexit__(None, None, None)
    assert made.hook.finished == ["finished"]


async def test_a_timeout_around_the_enter(tmp_path: Path) -> None:
    made, sess = made_in(tmp_path)
    gate = threading.Event()
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

    def slow(session: Any, coord: Any) -> None:
        loop.call_soon_threadsafe(limit.reschedule, loop.time())
        loop.call_soon_threadsafe(loop.call_later, 0.3, gate.set)
        gate.wait(20)

    made.hook.after_create_session = slow
    with pytest.raises(TimeoutError):
        async with limit, sess:
            raise AssertionError
    assert made.hook.finished == ["cancelled"]


async def test_a_device_thread_that_is_stuck_holds_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that never returns, in the enter: the caller is released within seconds, and told what is missing."""
    made, sess = made_in(tmp_path)
    gate, left = threading.Event(), Hook()
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

    def stuck(session: Any, coord: Any) -> None:
        loop.call_soon_threadsafe(limit.reschedule, loop.time())  # no sooner: it would not be stuck yet
        gate.wait(60)

    made.hook.after_create_session = stuck
    sess = MonitoredSession(hooks=[left, made.hook], graph=made.graph)
    begun = loop.time()
    with pytest.raises(TimeoutError):
        async with limit, sess:
            raise AssertionError
    assert loop.time() - begun < 10
    assert "no last call" in caplog.text
    gate.set()


async def test_a_timeout_around_the_body(tmp_path: Path) -> None:
    made, sess = made_in(tmp_path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, sess:
            await sess.run(made.after)
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(60)
    assert made.hook.finished == ["cancelled"]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1"), "saved all the same"


async def test_task_groups(tmp_path: Path) -> None:
    """A sibling fails: the body is cancelled, the group raises the sibling's error, everything is released."""
    made, sess = made_in(tmp_path)
    running = asyncio.Event()

    async def train() -> None:
        async with sess:
            running.set()
            async for _ in sess.steps(made.after):
                pass

    async def fail() -> None:
        await running.wait()
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(train())
            group.create_task(fail())
    assert [type(error) for error in raised.value.exceptions] == [ValueError]
    assert made.hook.finished == ["cancelled"]


async def test_anyio_scopes(tmp_path: Path) -> None:
    import anyio

    made, sess = made_in(tmp_path)
    with anyio.CancelScope() as scope:
        async with sess:
            await sess.run(made.after)
            scope.deadline = anyio.current_time()
            await anyio.sleep(60)
    assert scope.cancelled_caught
    assert made.hook.finished == ["cancelled"]


async def test_a_body_that_outlives_the_grace(tmp_path: Path) -> None:
    """It is cancelled once, the cancellation does not leave, and the hooks have a clean end."""
    made, _ = made_in(tmp_path)
    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[made.hook], graph=made.graph, stop_grace_period_secs=0.2
    )
    async with sess:
        await sess.run(made.after)
        sess.request_stop()
        await asyncio.sleep(60)
    assert made.hook.finished == ["stopped"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1")


# ------------------------------------------------------------------ web


async def test_lifespan_of_an_app(tmp_path: Path) -> None:
    fastapi = pytest.importorskip("fastapi")
    lifespans = pytest.importorskip("asgi_lifespan")
    httpx = pytest.importorskip("httpx")
    made, sess = made_in(tmp_path)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with sess:
            await sess.run(made.after)
            await sess.save()
            yield {"sess": sess}

    app = fastapi.FastAPI(lifespan=lifespan)

    async def step(request: Any) -> dict[str, int]:
        return {"step": int(await request.state.sess.run(made.after))}

    step.__annotations__["request"] = fastapi.Request  # a name of this function only
    app.get("/step")(step)
    async with lifespans.LifespanManager(app) as manager:
        transport = httpx.ASGITransport(app=manager.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/step")).json() == {"step": 2}
            made.hook.abort = True
            assert (await client.get("/step")).json() == {"step": 2}, "recovered in a request, from the save of step 1"
    assert sess.recoveries == 1
    assert made.hook.finished == ["finished"]


# ------------------------------------------------------------------ the end of a loop


@pytest.mark.allow_leak("tasks")
def test_the_loop_ends_under_it(tmp_path: Path) -> None:
    """`asyncio.run` cancels every task at its end: the block ends in order, with its save."""
    made, sess = made_in(tmp_path)

    async def train(started: asyncio.Event) -> None:
        async with sess:
            await sess.run(made.after)
            started.set()
            await asyncio.sleep(60)

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(train(started))
        await started.wait()
        assert not task.done()

    asyncio.run(main())
    assert made.hook.finished == ["cancelled"]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1")


async def test_twenty_at_once(tmp_path: Path) -> None:
    async def one(number: int) -> list[int]:
        made, sess = made_in(tmp_path / str(number))
        async with sess:
            await sess.run(made.after)
            await sess.save()
            made.hook.abort = number % 2 == 0
            return [int(r) async for r in sess.steps(made.after, max_steps=3)]

    results = await asyncio.gather(*(one(number) for number in range(20)))
    assert results == [[2, 3, 4]] * 20


async def test_two_on_one_executor(tmp_path: Path) -> None:
    from asupervisor import DeviceExecutor

    executor = DeviceExecutor("/cpu:0")
    pairs = [(build(), None) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            (made, await stack.enter_async_context(MonitoredSession(graph=made.graph, executor=executor)))
            for made, _ in pairs
        ]
        for step in (1, 2):
            assert await asyncio.gather(*(sess.run(made.after) for made, sess in sessions)) == [step, step]
    assert not executor.closed
    assert await executor.aclose(20)
