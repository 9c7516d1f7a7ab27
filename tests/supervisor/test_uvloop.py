"""The Supervisor on uvloop: the same life, on another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import Supervisor

uvloop = pytest.importorskip("uvloop")
tf1 = tf.compat.v1


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@pytest.fixture(scope="module", autouse=True)
def pipe() -> None:
    """The first loop of a process opens a pipe for signals that libuv keeps."""
    run(asyncio.sleep(0))


def test_training_services_and_saves(model: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = model()
    seen: list[Any] = []

    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0.01)
        async with sv.managed_session() as sess:
            sv.loop(0.01, lambda: seen.append(sess.blocking.run(made.loss, made.feed)))
            sv.start_soon(sv.wait_for_stop)
            async for _ in sess.steps(made.train, made.feed, max_steps=50):
                pass
            while not seen or not sv.status().scalars.get("train_loss"):
                await sess.run(made.train, made.feed)
            await sv.save()
            assert await made.loss.eval(session=sess, feed_dict=made.feed) < 1

    run(main())
    assert int(saved(tmp_path)[-1].removeprefix("model.ckpt-")) >= 50


def test_errors_are_bare(model: Callable[..., Any]) -> None:
    made = model()
    error = OSError("service")

    async def main() -> None:
        sv = Supervisor(graph=made.graph)

        async def die() -> None:
            raise error

        async with sv.managed_session() as sess:
            sv.start_soon(die)
            while not sv.should_stop():
                await sess.run(made.train, made.feed)

    with pytest.raises(OSError, match="service") as raised:
        run(main())
    assert raised.value is error


def test_cancelled(model: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = model()

    async def main() -> None:
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), stop_grace_secs=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit, sv.managed_session() as sess:
                await sess.run(made.train, made.feed)
                limit.reschedule(asyncio.get_running_loop().time())
                await asyncio.Event().wait()

    run(main())
    assert saved(tmp_path)[-1] == "model.ckpt-1"


def test_a_queue_to_its_end(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        names = tf1.train.string_input_producer(["a", "b", "c"], num_epochs=2, shuffle=False)
        name = names.dequeue()
    seen: list[bytes] = []

    async def main() -> None:
        sv = Supervisor(graph=graph)
        async with sv.managed_session() as sess:
            while not sv.should_stop():
                seen.append(await sess.run(name))

    run(main())
    assert seen == [b"a", b"b", b"c"] * 2


def test_twenty_at_once(counter: Callable[..., Any]) -> None:
    made = [counter(start) for start in range(20)]

    async def train(one: Any) -> int:
        async with Supervisor(graph=one.graph).managed_session() as sess:
            return int(await sess.run(one.train))

    async def main() -> list[int]:
        return await asyncio.gather(*(train(one) for one in made))

    assert run(main()) == [start + 1 for start in range(20)]
