"""What a user may do at the wrong time or place: it ends in order, and the supervisor can be used again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import tensorflow as tf

from asupervisor import SessionActive, SessionClosed, StopRequested, Supervisor

tf1 = tf.compat.v1


# ------------------------------------------------------------------ closing and stopping at odd places


@pytest.mark.parametrize("how", ["stop", "stop with an error", "cancel"])
async def test_an_init_fn_that_fails_when_it_is_ended(counter: Callable[..., Any], how: str, caplog: Any) -> None:
    """Its error leaves, as a service's does after a requested stop; a cancellation and earlier errors come first."""
    made, entered = counter(), asyncio.Event()
    error, first = ValueError("half done"), KeyError("reported")

    async def init_fn(sess: Any) -> None:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise error

    sv = Supervisor(graph=made.graph, init_fn=init_fn)

    notes: list[str] = []

    async def enter() -> None:
        try:
            async with sv.managed_session():
                raise AssertionError
        except asyncio.CancelledError as cancellation:
            notes.extend(cancellation.__notes__)
            raise

    task = asyncio.create_task(enter())
    await entered.wait()
    if how == "cancel":
        task.cancel()
    else:
        sv.request_stop(first if how == "stop with an error" else None)
    (left,) = await asyncio.gather(task, return_exceptions=True)
    if how == "cancel":
        assert isinstance(left, asyncio.CancelledError)
        assert any("half done" in note for note in notes)
        assert any(record.levelname == "ERROR" and "half done" in record.message for record in caplog.records)
    else:
        assert left is (first if how == "stop with an error" else error)


async def test_closed_inside_the_block(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        await sess.run(made.train)
        await sess.close()
        await sess.close()
        with pytest.raises(SessionClosed):
            await sess.run(made.train)
    assert saved(tmp_path)[-1] == "model.ckpt-1"
    error = KeyError("after the close")
    with pytest.raises(KeyError) as raised:
        async with sv.managed_session() as sess:
            await sess.close()
            raise error
    assert raised.value is error


async def test_stopped_inside_the_block_again_and_again(
    counter: Callable[..., Any], tmp_path: Path, saved: Any
) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        await sess.run(made.train)
        await sv.stop()
        await sv.stop()
        await sess.run(made.train)
        await asyncio.gather(sv.stop(), sv.stop())
    await sv.stop()
    assert saved(tmp_path)[-1] == "model.ckpt-2"


@pytest.mark.parametrize("what", ["stop", "close"])
async def test_a_service_may_end_the_session(
    what: str, counter: Callable[..., Any], tmp_path: Path, saved: Any
) -> None:
    """It is not waited for while it waits, and goes on afterwards: after stop() it can even run."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), stop_grace_secs=30)
    log: list[Any] = []

    async def service() -> None:
        await sess.run(made.train)
        await (sv.stop() if what == "stop" else sess.close())
        log.append("ended it")
        if what == "stop":
            log.append(int(await sess.run(made.train)))

    async with sv.managed_session() as sess:
        sv.start_soon(service)
        await sv.wait_for_stop()
    assert log == (["ended it", 2] if what == "stop" else ["ended it"])
    assert saved(tmp_path)[-1] in ("model.ckpt-1", "model.ckpt-2")


async def test_two_services_stop_at_once(counter: Callable[..., Any]) -> None:
    """Neither is a straggler of the other."""
    sv = Supervisor(graph=counter().graph, stop_grace_secs=5)
    async with sv.managed_session():
        for _ in range(3):
            sv.start_soon(sv.stop)
        await sv.wait_for_stop()
    assert {service.state for service in sv.status().services} == {"done"}


@pytest.mark.parametrize("what", ["close", "stop", "cancel", "use"])
async def test_init_fn_does_what_it_should_not(what: str, counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    seen: list[str] = []

    async def init_fn(sess: Any) -> None:
        if what == "close":
            await sess.close()
        elif what == "stop":
            await sv.stop()
        elif what == "cancel":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        else:
            for use in (sv.pause, sv.save):
                with pytest.raises(RuntimeError, match="still being prepared"):
                    result = use()
                    if result is not None:
                        await result
            sv.start_soon(sv.wait_for_stop)
            seen.append("ok")

    sv = Supervisor(graph=made.graph, init_fn=init_fn, logdir=str(tmp_path), stop_grace_secs=5)
    if what == "use":
        async with sv.managed_session() as sess:
            await sess.run(made.train)
        assert seen == ["ok"]
        return
    with pytest.raises(asyncio.CancelledError if what == "cancel" else StopRequested):
        async with sv.managed_session():
            pytest.fail("must not be entered")
    assert sv.status().state == "stopped"


async def test_several_tasks_enter_at_once(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)

    async def one() -> int:
        async with sv.managed_session() as sess:
            return int(await sess.run(made.train))

    results = await asyncio.gather(one(), one(), one(), return_exceptions=True)
    assert results[0] == 1
    assert [type(result) for result in results[1:]] == [SessionActive, SessionActive]


async def test_stopped_while_it_is_entered(counter: Callable[..., Any]) -> None:
    """Whatever the moment: either the start is aborted, or the body finds the stop."""
    made = counter()
    outcomes = Counter()
    loop = asyncio.get_running_loop()
    for turn in range(8):
        sv = Supervisor(graph=made.graph)
        # Not before the block is being entered: an earlier stop is forgotten.
        loop.call_later(turn * 0.01, threading.Thread(target=sv.request_stop).start)
        try:
            async with sv.managed_session():
                await sv.wait_for_stop()
                outcomes["entered"] += 1
        except StopRequested:
            outcomes["aborted"] += 1
    assert sum(outcomes.values()) == 8


async def test_the_block_by_hand(counter: Callable[..., Any]) -> None:
    sv = Supervisor(graph=counter().graph)
    block = sv.managed_session()
    assert await block.__aexit__(None, None, None) is False, "never entered"
    await block.__aenter__()
    assert await block.__aexit__(None, None, None) is True
    assert await block.__aexit__(None, None, None) is False, "left already"


# ------------------------------------------------------------------ odd bodies, odd errors


class _NoWords(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __str__(self) -> str:
        raise RuntimeError("no str")


class _Frozen(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


@pytest.mark.parametrize("kind", [_NoWords, _Frozen, ExceptionGroup])
@pytest.mark.parametrize("where", ["body", "service"])
async def test_odd_exceptions(kind: Any, where: str, counter: Callable[..., Any], tmp_path: Path) -> None:
    """They leave as themselves, and everything is given back."""
    error = kind("group", [ValueError(1)]) if kind is ExceptionGroup else kind()
    sv = Supervisor(graph=counter().graph, logdir=str(tmp_path))

    async def fail() -> None:
        raise error

    caught: BaseException | None = None
    try:
        async with sv.managed_session():
            if where == "service":
                sv.start_soon(fail)
                await sv.wait_for_stop()
                raise KeyError("second")
            raise error
    except BaseException as same:
        caught = same
    assert caught is error
    assert kind.__name__ in sv.status().error
    async with sv.managed_session():
        pass


async def test_a_body_in_an_async_generator(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))

    async def steps() -> Any:
        async with sv.managed_session() as sess:
            while True:
                yield int(await sess.run(made.train))

    closed = steps()
    assert [await anext(closed) for _ in range(3)] == [1, 2, 3]
    await closed.aclose()
    assert saved(tmp_path)[-1] == "model.ckpt-3"
    forgotten = steps()
    assert await anext(forgotten) == 4
    del forgotten  # asyncio closes it, in a task of its own
    gc.collect()
    async with asyncio.timeout(20):
        while sv.status().state != "stopped":
            await asyncio.sleep(0.01)
    assert saved(tmp_path)[-1] == "model.ckpt-4"


async def test_streams_that_nobody_ends(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        async for _ in sess.steps(made.train):
            break
        stream = sess.steps(made.train, ahead=2)
        await anext(stream)
        sess.steps(made.train)
    assert tf.train.latest_checkpoint(str(tmp_path))


async def test_threads_and_tasks_that_run_on_at_the_exit(counter: Callable[..., Any]) -> None:
    """Each of them gets an answer: a result, or that the session is closed."""
    made = counter()
    sv = Supervisor(graph=made.graph)
    ends: list[str] = []

    def hammer(blocking: Any) -> None:
        try:
            while True:
                blocking.run(made.train)
        except Exception as error:
            ends.append(type(error).__name__)

    async with sv.managed_session() as sess:
        threads = [threading.Thread(target=hammer, args=(sess.blocking,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        runs = [asyncio.ensure_future(_run(sess, made.train)) for _ in range(200)]
        await asyncio.sleep(0.05)
    results = await asyncio.gather(*runs, return_exceptions=True)
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
    assert set(ends) <= {"SessionClosed", "CancelledError"}
    assert {type(result).__name__ for result in results} <= {"int64", "SessionClosed", "CancelledError"}


async def _run(sess: Any, fetches: Any) -> Any:
    return await sess.run(fetches)


async def test_paused_at_the_exit(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    """The stop releases what was held: the step counts."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        sv.pause()
        held = asyncio.ensure_future(_run(sess, made.train))
        while not sv.status().session.held:
            await asyncio.sleep(0.001)
    assert await held == 1
    assert saved(tmp_path)[-1] == "model.ckpt-1"


async def test_a_thousand_services(counter: Callable[..., Any]) -> None:
    sv = Supervisor(graph=counter().graph)
    async with sv.managed_session():
        for number in range(1000):
            sv.start_soon(sv.wait_for_stop, name=f"service-{number}")
            if number % 20 == 0:
                await asyncio.sleep(0)
    assert {service.state for service in sv.status().services} == {"done"}


# ------------------------------------------------------------------ the directory


async def test_a_relative_logdir_and_a_program_that_changes_its_directory(
    counter: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events_of: Any
) -> None:
    made = counter()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    sv = Supervisor(graph=made.graph, logdir="runs/a", save_summaries_secs=0)
    assert sv.save_path == "runs/a/model.ckpt", "as TensorFlow joins it"
    monkeypatch.chdir(elsewhere)
    async with sv.managed_session() as sess:
        await sess.run(made.train)
        monkeypatch.chdir("/")
        await sess.run(made.train)
    assert not list(elsewhere.iterdir())
    assert tf.train.load_variable(str(tmp_path / "runs" / "a"), "global_step") == 2
    assert len(events_of(tmp_path / "runs" / "a")) == 1


async def test_a_logdir_that_vanishes_again_and_again(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    logdir = tmp_path / "log"
    sv = Supervisor(graph=made.graph, logdir=str(logdir), save_model_secs=0.05, save_summaries_secs=0.05)
    async with sv.managed_session() as sess:
        for _ in range(4):
            await asyncio.to_thread(shutil.rmtree, logdir, ignore_errors=True)
            await sess.run(made.train)
            await asyncio.sleep(0.05)
        assert not sv.should_stop()
    assert saved(logdir)[-1] == "model.ckpt-4", "the last word is there"


async def test_a_disk_that_is_full_to_the_end(counter: Callable[..., Any], tmp_path: Path) -> None:
    """Training goes on; that the final save failed is raised, unless there is something worse to raise."""
    made = counter()
    with made.graph.as_default():

        class Full(tf1.train.Saver):
            def save(self, *args: Any, **kwargs: Any) -> Any:
                raise OSError(28, "No space left on device")

        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), saver=Full())
    with pytest.raises(OSError, match="No space left"):
        async with sv.managed_session() as sess:
            for _ in range(5):
                await sess.run(made.train)
    with pytest.raises(KeyError) as raised:
        async with sv.managed_session() as sess:
            await sess.run(made.train)
            raise KeyError("body")
    assert "No space left" in "".join(raised.value.__notes__)


# ------------------------------------------------------------------ logging


async def test_a_log_formatter_that_asks_for_the_status(counter: Callable[..., Any]) -> None:
    """It holds the handler's lock, on several threads, while errors come in: nobody waits for anybody."""
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=5)
    lines: list[str] = []

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            lines.append(sv.status().state)
            return super().format(record)

    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(Formatter())
    log = logging.getLogger("asupervisor")
    log.addHandler(handler)

    def chat() -> None:
        while not sv.should_stop():
            log.warning("still here")

    try:
        for turn in range(5):
            with pytest.raises(ValueError, match=f"error {turn}.0"):
                async with sv.managed_session() as sess:
                    for _ in range(3):
                        sv.loop(60, chat)
                    for _ in range(5):
                        await sess.run(made.train)
                    for number in range(5):
                        sv.request_stop(ValueError(f"error {turn}.{number}"))
                    await sv.wait_for_stop()
    finally:
        log.removeHandler(handler)
    assert "running" in lines


# ------------------------------------------------------------------ loops and processes


def test_a_loop_that_is_closed_under_it(counter: Callable[..., Any], tmp_path: Path) -> None:
    """Nobody could end the first session; the next one gives back what it held, the directory for one."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), journal=False)
    loop = asyncio.new_event_loop()
    block = sv.managed_session()
    loop.run_until_complete(block.__aenter__())
    loop.close()
    del block

    async def again() -> int:
        async with sv.managed_session() as sess:
            return int(await sess.run(made.train))

    assert asyncio.run(again()) == 1


async def test_a_fork_in_the_body(counter: Callable[..., Any], tmp_path: Path) -> None:
    """The child has no session any more; the parent's goes on."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        await sess.run(made.train)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sess.blocking.run(made.train)
            except SessionClosed:
                code = 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await sess.run(made.train) == 2


# ------------------------------------------------------------------ cancelled at any moment


async def _cancelled(train: Callable[[], Awaitable[None]], way: str, delay: float, chance: random.Random) -> None:
    if way in ("once", "twice"):
        task = asyncio.ensure_future(train())
        await asyncio.sleep(delay)
        task.cancel()
        if way == "twice":
            await asyncio.sleep(chance.random() * 0.05)
            task.cancel()
        await task
    elif way == "timeout":
        async with asyncio.timeout(delay):
            await train()
    elif way == "wait_for":
        await asyncio.wait_for(train(), delay)
    elif way == "scope":
        with anyio.move_on_after(delay):
            await train()
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(train())
            await asyncio.sleep(delay)
            raise ZeroDivisionError


async def _sweep(rounds: int, seed: int, made: Any, logdir: Path) -> None:
    """One supervisor, cancelled again and again, in every way and at every moment of a session's life."""
    chance = random.Random(seed)
    sv = Supervisor(
        graph=made.graph, logdir=str(logdir), stop_grace_secs=5, save_model_secs=0.02, save_summaries_secs=0.02
    )
    me = asyncio.current_task()
    last = 0
    for turn in range(rounds):
        way = chance.choice(["once", "twice", "timeout", "wait_for", "scope", "group"])
        steps, end = chance.randrange(40), chance.random()

        async def train(steps: int = steps, end: float = end) -> None:
            async with sv.managed_session() as sess:
                sv.start_soon(sv.wait_for_stop)
                sv.loop(0.01, int)
                for _ in range(steps):
                    await sess.run(made.train)
                if end < 0.2:
                    await sv.stop()
                elif end < 0.4:
                    sv.request_stop()
                elif end < 0.5:
                    raise KeyError("body")

        with contextlib.suppress(asyncio.CancelledError, TimeoutError, KeyError, ExceptionGroup):
            await _cancelled(train, way, chance.random() ** 2 * 0.4, chance)
        assert not me.cancelling(), "a stray cancellation was left"
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > 1 or sv.status().state in ("running", "stopping"):
                await asyncio.sleep(0.001)
        if turn % 5 == 4:
            async with sv.managed_session() as sess:
                step = int(await sess.run(made.step))
            assert step >= last, "nothing that was saved is lost"
            last = step


async def test_cancelled_at_any_moment(counter: Callable[..., Any], tmp_path: Path) -> None:
    await _sweep(20, 1, counter(), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
async def test_cancelled_at_any_moment_for_long(seed: int, counter: Callable[..., Any], tmp_path: Path) -> None:
    await _sweep(150, seed, counter(), tmp_path)
