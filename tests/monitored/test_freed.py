"""What a monitored session was goes when it is dropped: without the garbage collector, after every kind of end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import tensorflow as tf

from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import ChiefSessionCreator, MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import RecoveryPolicy

tf1 = tf.compat.v1
Make = Callable[..., Any]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Async(AsyncSessionRunHook):
    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await asyncio.sleep(0)


async def runs(sess: Any, made: Any) -> None:
    for _ in range(3):
        await sess.run(made.train)


async def streams(sess: Any, made: Any) -> None:
    async for _ in sess.steps(made.train, ({} for _ in range(5))):
        pass


async def breaks(sess: Any, made: Any) -> None:
    async for _ in sess.steps(made.train):
        break


async def fails(sess: Any, made: Any) -> None:
    await sess.run(made.train)
    raise ValueError("body")


async def fails_in_a_run(sess: Any, made: Any) -> None:
    await sess.run(made.bad)


async def left_of(gone: list[Any]) -> list[Any]:
    """What is still there. The stall watch looks at frames of the loop, and holds them for that moment."""
    with anyio.move_on_after(5):
        while any(ref() is not None for ref in gone):
            await asyncio.sleep(0.001)
    return [ref() for ref in gone if ref() is not None]


async def recovers(sess: Any, made: Any) -> None:
    await sess.run(made.train)
    made.abort.append(True)
    await sess.run(made.train)


async def recovers_in_a_stream(sess: Any, made: Any) -> None:
    made.abort.append(True)
    async for _ in sess.steps(made.train, max_steps=5):
        pass


async def cannot_recover(sess: Any, made: Any) -> None:
    made.abort += [True] * 1000
    await sess.run(made.train)


async def is_cancelled(sess: Any, made: Any) -> None:
    await sess.run(made.train)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.sleep(10)


async def runs_aside(sess: Any, made: Any) -> None:
    await sess.plain.run(made.train)
    await sess.save()
    await asyncio.to_thread(sess.plain.blocking.run, made.step)


@pytest.mark.parametrize("hooks", ["none", "plain", "async"])
@pytest.mark.parametrize(
    "body",
    [
        runs,
        streams,
        breaks,
        fails,
        fails_in_a_run,
        recovers,
        recovers_in_a_stream,
        cannot_recover,
        is_cancelled,
        runs_aside,
    ],
)
async def test_freed_without_the_collector(
    counter: Make, recorder: Make, tmp_path: Path, no_collector: None, body: Any, hooks: str
) -> None:
    if hooks == "none" and "recover" in body.__name__:
        pytest.skip("it is a hook that fails")
    made = counter()
    made.abort = []
    with made.graph.as_default():
        made.bad = tf1.check_numerics(tf.constant(1.0) / tf.constant(0.0), "inf")

    class Abort(recorder):  # type: ignore[misc]
        def before_run(self, run_context: Any) -> None:
            if made.abort:
                made.abort.pop()
                raise tf.errors.AbortedError(None, None, "lost")

    chosen = {"none": [], "plain": [Abort()], "async": [Abort(), Async()]}[hooks]
    policy = (
        RecoveryPolicy.like_tensorflow()
        if body is not cannot_recover
        else RecoveryPolicy(
            max_restarts=2, origins=frozenset(("hook",)), backoff=RecoveryPolicy.like_tensorflow().backoff
        )
    )

    async def use() -> list[Any]:
        sess = MonitoredTrainingSession(
            checkpoint_dir=tmp_path,
            hooks=chosen,
            graph=made.graph,
            recovery=policy,
            save_summaries_steps=2,
            log_step_count_steps=2,
            save_checkpoint_steps=2,
        )
        gone = [weakref.ref(sess)]
        try:
            async with sess:
                gone += [weakref.ref(sess.plain), weakref.ref(sess.plain.raw)]
                await body(sess, made)
        except (ValueError, tf.errors.OpError, asyncio.CancelledError, Exception) as error:
            assert not isinstance(error, AssertionError)
        return gone

    gone = await asyncio.create_task(use())
    for hook in chosen:
        for kept in ("sessions", "coords", "contexts", "values", "outcomes"):
            getattr(hook, kept, []).clear()
    assert await left_of(gone) == []


async def test_freed_after_a_failed_start(counter: Make, recorder: Make, no_collector: None) -> None:
    """Two hooks began, the initialisation fails: nothing stays, the graph is as before."""
    made = counter()
    hook = recorder()

    def init_fn(scaffold: Any, session: Any) -> None:
        raise ValueError("init")

    with made.graph.as_default():
        scaffold = tf1.train.Scaffold(init_fn=init_fn)

    async def use() -> Any:
        sess = MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph), hooks=[hook])
        with pytest.raises(ValueError, match="init"):
            async with sess:
                pass
        return weakref.ref(sess)

    gone = await asyncio.create_task(use())
    assert [outcome.reason for outcome in hook.outcomes] == ["error"]
    hook.outcomes.clear()
    assert await left_of([gone]) == []
    assert hook.calls == ["hook.begin", "hook.finish"]
    assert not made.graph.finalized
