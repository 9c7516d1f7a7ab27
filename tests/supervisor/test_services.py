"""The user's own work, status, events, journal, and everything that can be passed in, on real sessions."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import DeviceExecutor, SessionManager, StopGraceExceeded, Supervisor
from asupervisor.testing import ManualClock

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def journal(logdir: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(logdir) / "journal.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ start_soon


async def test_start_soon_runs_a_supervised_task(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    seen: list[Any] = []

    async def worker(what: str) -> None:
        seen.append(what)
        seen.append(int(await sess.run(made.train)))
        await sv.wait_for_stop()
        seen.append("stopped")

    async with sv.managed_session() as sess:
        service = sv.start_soon(worker, "begun")
        named = sv.start_soon(worker, "again", name="other")
        assert (service.name, named.name) == ("worker", "other")
        while len(seen) < 4:
            await asyncio.sleep(0)
        assert service.state == "running"
    assert seen.count("stopped") == 2
    assert service.state == named.state == "done"
    assert service.done()


@pytest.mark.parametrize("wrap", ["partial", "lambda", "decorated", "object"])
async def test_start_soon_takes_what_returns_an_awaitable(wrap: str, counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    seen: list[int] = []

    async def worker(value: int) -> None:
        await asyncio.sleep(0)
        seen.append(value)

    class Callable_:
        async def __call__(self) -> None:
            await worker(1)

    async def plain() -> None:
        await worker(1)

    @functools.wraps(plain)
    def decorated() -> Any:
        return plain()

    fn = {"partial": functools.partial(worker, 1), "lambda": lambda: worker(1), "decorated": decorated}.get(
        wrap, Callable_()
    )
    async with sv.managed_session():
        await sv.start_soon(fn)
    assert seen == [1]


async def test_an_error_of_a_task_stops_everything_and_leaves_bare(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = ZeroDivisionError("worker")

    async def worker() -> None:
        await sess.run(made.train)
        raise error

    async def other() -> None:
        await sv.wait_for_stop()

    with pytest.raises(ZeroDivisionError) as raised:
        async with sv.managed_session() as sess:
            service = sv.start_soon(worker)
            other_service = sv.start_soon(other)
            while not sv.should_stop():
                await sess.run(made.train)
    assert raised.value is error
    assert service.state == "failed"
    assert service.last_error is error
    assert other_service.state == "done"


async def test_awaiting_a_service_waits_for_its_end(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    go = asyncio.Event()

    async def worker() -> None:
        await go.wait()

    async with sv.managed_session():
        service = sv.start_soon(worker)
        waiting = asyncio.ensure_future(_outcome(service))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        await waiting
        assert service.done()
        assert not sv.should_stop(), "a task that just ends is no reason to stop"


async def _outcome(service: Any) -> None:
    await service


async def test_a_task_may_cancel_another_one(counter: Callable[..., Any]) -> None:
    sv = Supervisor(graph=counter().graph)

    async def worker() -> None:
        await asyncio.Event().wait()

    async with sv.managed_session():
        service = sv.start_soon(worker)
        await asyncio.sleep(0)
        service.cancel()
        await service
        assert not sv.should_stop()
    assert sv.status().error is None


# ------------------------------------------------------------------ loop


@pytest.mark.parametrize("colour", ["sync", "async", "awaitable"])
async def test_loop_at_once_and_at_fixed_times(colour: str, counter: Callable[..., Any], clock: ManualClock) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, clock=clock)
    calls: list[tuple[float, Any, Any]] = []
    threads: set[threading.Thread] = set()

    def sync(a: int, *, b: int) -> None:
        threads.add(threading.current_thread())
        calls.append((clock.monotonic(), a, b))

    async def asynchronous(a: int, *, b: int) -> None:
        await asyncio.sleep(0)
        sync(a, b=b)

    def awaitable(a: int, *, b: int) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return asynchronous(a, b=b)

    async with sv.managed_session():
        begun = clock.monotonic()
        looper = sv.loop(60, {"sync": sync, "async": asynchronous, "awaitable": awaitable}[colour], (1,), {"b": 2})
        await clock.sleepers(1)
        for _ in range(3):
            await clock.advance(60)
            await clock.sleepers(1)
    assert calls == [(begun + 60 * turn, 1, 2) for turn in range(4)]
    assert looper.calls == 4
    assert (threading.main_thread() in threads) == (colour != "sync")


async def test_loop_with_none_runs_back_to_back(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    seen: list[int] = []

    async def target() -> None:
        seen.append(int(await sess.run(made.train)))
        if len(seen) == 50:
            sv.request_stop()

    async with sv.managed_session() as sess:
        sv.loop(None, target)
        await sv.wait_for_stop()
    assert seen == list(range(1, 51))


async def test_loop_on_a_thread_uses_the_blocking_view(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    losses: list[float] = []

    def print_loss(sess: Any) -> None:
        losses.append(float(sess.run(made.loss, made.feed)))
        if len(losses) == 5:
            sv.request_stop()

    async with sv.managed_session() as sess:
        sv.loop(0, print_loss, (sess.blocking,))
        while not sv.should_stop():
            await sess.run(made.train, made.feed)
    assert losses == sorted(losses, reverse=True)


async def test_loop_on_a_thread_has_the_graph(counter: Callable[..., Any]) -> None:
    """A new thread executes eagerly, where half of the v1 API fails: so did TensorFlow's own services (item 26)."""
    made = counter(5)
    sv = Supervisor(graph=made.graph)
    seen: list[Any] = []

    def target(sess: Any) -> None:
        seen.append((tf.executing_eagerly(), tf1.get_default_graph() is made.graph))
        seen.append(tf1.train.global_step(sess.raw, made.step))
        sv.request_stop()

    async with sv.managed_session() as sess:
        sv.loop(60, target, (sess.blocking,))
        await sv.wait_for_stop()
    assert seen == [(False, True), 5]


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_an_error_of_a_loop_leaves_the_block(colour: str, counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = ArithmeticError("loop")

    def sync() -> None:
        raise error

    async def asynchronous() -> None:
        raise error

    with pytest.raises(ArithmeticError) as raised:
        async with sv.managed_session():
            sv.loop(60, sync if colour == "sync" else asynchronous)
            await sv.wait_for_stop()
    assert raised.value is error


async def test_a_loop_of_a_generator_function_is_refused(counter: Callable[..., Any]) -> None:
    """Calling one runs nothing of it: it would do nothing, silently, every minute."""
    sv = Supervisor(graph=counter().graph)

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    async with sv.managed_session():
        for target in (generator, async_generator):
            with pytest.raises(TypeError, match="generator"):
                sv.loop(60, target)
            with pytest.raises(TypeError, match=r"generator|awaited"):
                sv.start_soon(target)
        assert sv.status().services == ()


async def test_many_loops_do_not_wait_for_one_another(counter: Callable[..., Any]) -> None:
    """More threads than any default limit: all of them stand in their target at the same time."""
    sv = Supervisor(graph=counter().graph)
    barrier = threading.Barrier(61)

    async with sv.managed_session():
        for _ in range(60):
            sv.loop(3600, barrier.wait, (30,))
        await asyncio.to_thread(barrier.wait, 30)


# ------------------------------------------------------------------ threads of the user's own


async def test_registered_threads_and_tasks_are_joined(counter: Callable[..., Any]) -> None:
    """What registers with the coordinator is waited for, while the session can still be used."""
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=60)
    seen: list[str] = []

    def thread_body() -> None:
        while not sv.should_stop():
            sess.blocking.run(made.train)
        sess.blocking.run(made.train)
        seen.append("thread")

    async def task_body() -> None:
        await sv.wait_for_stop()
        await sess.run(made.train)
        seen.append("task")

    async with sv.managed_session() as sess:
        thread = threading.Thread(target=thread_body)
        sv.coord.register_thread(thread)
        thread.start()
        task = asyncio.ensure_future(task_body())
        sv.coord.register_thread(task)
        sv.coord.register_thread(asyncio.current_task())  # who waits is not waited for
        await sess.run(made.train)
    assert sorted(seen) == ["task", "thread"]
    assert not thread.is_alive()
    assert task.done()
    async with sv.managed_session():
        pass  # they are forgotten


async def test_registered_stragglers_are_named(counter: Callable[..., Any], caplog: Any) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=0.05)
    release = threading.Event()
    cancelled: list[bool] = []

    async def task_body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def start() -> threading.Thread:
        thread = threading.Thread(target=release.wait, args=(60,), name="deaf thread")
        thread.start()
        sv.coord.register_thread(thread)
        sv.coord.register_thread(asyncio.ensure_future(task_body()))
        return thread

    try:
        with pytest.raises(StopGraceExceeded, match="deaf thread"):
            async with sv.managed_session():
                threads = [start()]
                await asyncio.sleep(0)
                sv.request_stop()
        assert cancelled == [True], "a task is cancelled after the grace, a thread cannot be"
        async with sv.managed_session():
            threads.append(start())
        assert "still running after the stop: deaf thread" in caplog.text, "after a success it is a warning"
        sess = await sv.prepare_or_wait_for_session()
        threads.append(start())
        with pytest.raises(StopGraceExceeded, match="deaf thread"):
            await sv.stop()
        await sess.close()
    finally:
        release.set()
    for thread in threads:
        thread.join()


async def test_stop_waits_for_the_threads_that_it_is_given(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, stop_grace_secs=0.1)
    release = threading.Event()
    obedient = threading.Thread(target=lambda: [None for _ in iter(sv.should_stop, True)])
    deaf = threading.Thread(target=release.wait, args=(60,), name="deaf thread")
    async with sv.managed_session():
        obedient.start()
        await sv.stop([obedient])
        assert not obedient.is_alive()
        deaf.start()
        try:
            with pytest.raises(StopGraceExceeded, match="deaf thread"):
                await sv.stop([deaf])
            await sv.stop([deaf], ignore_live_threads=True)
        finally:
            release.set()
            await asyncio.to_thread(deaf.join)
        await sv.stop([deaf])
    assert not deaf.is_alive()


# ------------------------------------------------------------------ pause and resume


async def test_pause_holds_training_and_nothing_else(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        await sess.run(made.train, made.feed)
        sv.pause()
        held = asyncio.ensure_future(_run(sess, made))
        assert await sess.run(made.loss, made.feed) >= 0
        assert (await sv.save()).step == 1
        assert await sess.run(made.step) == 1
        assert not held.done()
        assert sv.status().session.paused
        sv.resume()
        await held
        assert await sess.run(made.step) == 2


async def test_a_stop_releases_what_is_paused(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        sv.pause()
        held = asyncio.ensure_future(_run(sess, made))
        await sess.run(made.loss, made.feed)
        assert not held.done()
        sv.request_stop()
        await held


async def _run(sess: Any, made: Any) -> Any:
    return await sess.run(made.train, made.feed)


# ------------------------------------------------------------------ status, events, journal


async def test_status_from_idle_to_stopped(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0.01, name="digits")
    status = sv.status()
    assert (status.name, status.state, status.is_chief, status.logdir) == ("digits", "idle", True, str(tmp_path))
    async with sv.managed_session() as sess:
        await sess.run(made.train, made.feed)
        while not sv.status().scalars.get("train_loss") or not sv.status().last_checkpoint:
            await sess.run(made.train, made.feed)
        status = sv.status()
        assert status.state == "running"
        assert status.start_step == 0
        assert status.uptime_secs > 0
        assert {service.name for service in status.services} == {
            "graph.pbtxt",
            "summaries",
            "step_counter",
            "checkpoints",
        }
        assert status.session.training_runs >= 2
        assert status.last_checkpoint.startswith(sv.save_path)
        with pytest.raises(AttributeError):
            status.state = "idle"
        sv.request_stop()
        await sv.wait_for_stop()
        assert sv.status().state == "stopping"
    status = sv.status()
    assert status.state == "stopped"
    assert all(service.state == "done" for service in status.services)
    assert status.error is None


async def test_status_names_the_error(counter: Callable[..., Any]) -> None:
    sv = Supervisor(graph=counter().graph)
    with pytest.raises(ValueError, match="why"):
        async with sv.managed_session():
            raise ValueError("why")
    status = sv.status()
    assert status.state == "stopped"
    assert status.error == "ValueError('why')", "the reason is known after the end, too"


async def test_status_from_another_thread(counter: Callable[..., Any], tmp_path: Path) -> None:
    sv = Supervisor(graph=counter().graph, logdir=str(tmp_path))
    async with sv.managed_session():
        assert (await asyncio.to_thread(sv.status)).state == "running"


async def test_events_begin_now_and_end_with_the_session(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), name="digits")
    events = sv.events()

    async def collect() -> list[Any]:
        return [event async for event in events]

    collecting = asyncio.ensure_future(collect())
    async with sv.managed_session() as sess:
        await sess.run(made.train)
    kinds = [event.kind for event in await collecting]
    assert kinds.index("session.initialised") < kinds.index("session.started") < kinds.index("checkpoint.saved")
    assert kinds[-1] == "session.ended"
    assert {event.source for event in await _collected(sv)} == set()


async def _collected(sv: Supervisor) -> list[Any]:
    events = sv.events()
    await events.aclose()
    return [event async for event in events]


async def test_events_of_what_has_ended_end_at_once(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    before = sv.events()
    async with sv.managed_session():
        within = sv.events()
    assert [event.kind async for event in before][-1] == "session.ended"
    assert [event.kind async for event in within][-1] == "session.ended"
    async with asyncio.timeout(20):
        assert [event async for event in sv.events()] == []
    # Used again, it has events again: for who is there in time, or has waited.
    waiting = sv.events(wait=True)
    async with sv.managed_session():
        within = sv.events()
    kinds = [event.kind async for event in waiting]
    assert "session.restored" in kinds and kinds[-1] == "session.ended"
    assert [event.kind async for event in within][-1] == "session.ended"
    with pytest.raises(ValueError, match="in the body"):
        async with sv.managed_session():
            raise ValueError("in the body")
    assert [event async for event in sv.events()] == []


async def test_the_journal_tells_the_whole_story(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    for _ in range(2):
        async with sv.managed_session() as sess:
            await sess.run(made.train)
    kinds = [line["kind"] for line in journal(tmp_path)]
    assert kinds.count("session.started") == kinds.count("session.ended") == 2
    assert "session.initialised" in kinds
    assert "session.restored" in kinds
    assert "checkpoint.saved" in kinds
    assert kinds.index("session.initialised") < kinds.index("session.restored")


async def test_the_journal_has_the_error(counter: Callable[..., Any], tmp_path: Path) -> None:
    sv = Supervisor(graph=counter().graph, logdir=str(tmp_path))
    with pytest.raises(ValueError, match="why"):
        async with sv.managed_session():
            raise ValueError("why")
    (line,) = [line for line in journal(tmp_path) if line["kind"] == "stop.error"]
    assert "ValueError('why')" in json.dumps(line)
    assert line["level"] == "error"


async def test_without_a_journal(counter: Callable[..., Any], tmp_path: Path) -> None:
    async with Supervisor(graph=counter().graph, logdir=str(tmp_path), journal=False).managed_session():
        pass
    assert not (tmp_path / "journal.jsonl").exists()


# ------------------------------------------------------------------ what is passed in


async def test_tensorflows_session_manager_is_taken_over(counter: Callable[..., Any]) -> None:
    """A thin adapter: the same settings in a SessionManager of ours, since theirs blocks."""
    made = counter(5)
    with made.graph.as_default():
        ready = tf1.report_uninitialized_variables()
        manager = tf1.train.SessionManager(ready_op=ready, graph=made.graph, recovery_wait_secs=1)
    sv = Supervisor(graph=made.graph, session_manager=manager, ready_op=None)
    assert isinstance(sv.session_manager, SessionManager)
    async with sv.managed_session() as sess:
        assert await sess.run(made.step) == 5
    sv = Supervisor(graph=made.graph, session_manager=manager, ready_op=None, init_op=None, init_fn=lambda sess: None)
    with pytest.raises(RuntimeError, match="global_step"):  # its ready_op holds, not the supervisor's
        async with sv.managed_session():
            pytest.fail("must not be entered")


def test_a_subclass_of_tensorflows_session_manager_is_refused(counter: Callable[..., Any]) -> None:
    made = counter()

    class Own(tf1.train.SessionManager):
        def prepare_session(self, *args: Any, **kwargs: Any) -> Any: ...

    with made.graph.as_default():
        manager = Own(graph=made.graph)
    with pytest.raises(TypeError, match=r"asupervisor.SessionManager, or exactly a tf.compat.v1.train.SessionManager"):
        Supervisor(graph=made.graph, session_manager=manager)


async def test_a_subclass_of_ours_is_used(counter: Callable[..., Any]) -> None:
    made = counter()
    asked: list[str] = []

    class Own(SessionManager):
        async def prepare_session(self, master: str, *args: Any, **kwargs: Any) -> Any:
            asked.append(master)
            return await super().prepare_session(master, *args, **kwargs)

    sv = Supervisor(graph=made.graph, session_manager=Own(graph=made.graph))
    async with sv.managed_session() as sess:
        await sess.run(made.train)
    assert asked == [""]


def test_a_session_manager_of_another_graph(counter: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="another graph"):
        Supervisor(graph=counter().graph, session_manager=SessionManager(graph=tf.Graph()))


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_init_fn(colour: str, variables: str) -> None:
    """After init_op: a plain function gets TensorFlow's session on the device thread, a coroutine function ours."""
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0)
        p = tf1.placeholder(tf.float32, [])
        load = tf1.assign(v, v + p)
    seen: list[Any] = []

    def sync(raw: Any) -> None:
        assert isinstance(raw, tf1.Session)
        assert tf1.get_default_graph() is graph
        assert threading.current_thread() is not threading.main_thread()
        seen.append(raw.run(load, {p: 10.0}))

    async def asynchronous(sess: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(await sess.run(load, {p: 10.0}))

    sv = Supervisor(graph=graph, init_fn=sync if colour == "sync" else asynchronous)
    async with sv.managed_session() as sess:
        assert await sess.run(v) == 11.0
    assert seen == [11.0]


async def test_init_fn_is_not_called_after_a_restore(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    calls: list[Any] = []
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), init_fn=calls.append)
    for _ in range(2):
        async with sv.managed_session() as sess:
            await sess.run(made.train)
    assert len(calls) == 1


async def test_local_init_op_runs_in_each_session(variables: str, tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0)
        local = tf1.get_variable("l", initializer=0.0, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        with tf.control_dependencies([local.initializer]):
            local_init = tf1.assign(local, 7.0)
    sv = Supervisor(graph=graph, logdir=str(tmp_path), local_init_op=local_init)
    assert sv.local_init_op is local_init
    for _ in range(2):
        async with sv.managed_session() as sess:
            assert await sess.run([v, local]) == [1.0, 7.0]


async def test_local_init_run_options(counter: Callable[..., Any]) -> None:
    """They reach the run of local_init_op: a time limit there ends it."""
    made = counter()
    with made.graph.as_default():
        never = tf1.FIFOQueue(1, tf.float32).dequeue()
    options = tf1.RunOptions(timeout_in_ms=50)
    sv = Supervisor(graph=made.graph, local_init_op=never, local_init_run_options=options)
    with pytest.raises(tf.errors.DeadlineExceededError):
        async with sv.managed_session():
            pytest.fail("must not be entered")


async def test_a_shared_executor_is_not_closed(counter: Callable[..., Any]) -> None:
    executor = DeviceExecutor("/cpu:0")
    first, second = counter(), counter(10)
    sv, other = (Supervisor(graph=made.graph, executor=executor) for made in (first, second))
    async with sv.managed_session() as sess, other.managed_session() as other_sess:
        assert await asyncio.gather(sess.run(first.train), other_sess.run(second.train)) == [1, 11]
        idents = {await s.call(lambda raw: threading.get_ident()) for s in (sess, other_sess)}
        assert len(idents) == 1, "one thread for both"
    assert not executor.closed
    async with sv.managed_session() as sess:
        assert await sess.run(first.train) == 1
    assert await executor.aclose(5)


async def test_a_closed_executor_is_told_at_the_start(counter: Callable[..., Any], tmp_path: Path) -> None:
    executor = DeviceExecutor("/cpu:0")
    await executor.aclose(5)
    sv = Supervisor(graph=counter().graph, executor=executor, logdir=str(tmp_path))
    with pytest.raises(RuntimeError, match="closed"):
        async with sv.managed_session():
            pytest.fail("must not be entered")


# ------------------------------------------------------------------ used again


async def test_a_second_supervisor_on_the_finalised_graph(
    model: Callable[..., Any], tmp_path: Path, variables: str, saved: Any
) -> None:
    """It finds what the first one added, the ops of snapshots too; both may even be active at once."""
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path / "a"))
    ops = len(made.graph.get_operations())
    other = Supervisor(graph=made.graph, logdir=str(tmp_path / "b"))
    assert len(made.graph.get_operations()) == ops
    events = other.events()
    async with sv.managed_session() as sess, other.managed_session() as other_sess:
        await sess.run(made.train, made.feed)
        for _ in range(2):
            await other_sess.run(made.train, made.feed)
    assert saved(tmp_path / "a")[-1] == "model.ckpt-1"
    assert saved(tmp_path / "b")[-1] == "model.ckpt-2"
    kinds = [event.kind async for event in events]
    assert not [kind for kind in kinds if "fallback" in kind]


def test_used_again_on_another_event_loop(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))

    async def train() -> int:
        async with sv.managed_session() as sess:
            sv.start_soon(sv.wait_for_stop)
            await sess.run(made.train, made.feed)
            return int(await sess.run(made.step))

    assert [asyncio.run(train()) for _ in range(3)] == [1, 2, 3]


@pytest.mark.allow_leak("tasks")  # asyncio.run finds the session's tasks, and cancels them
def test_used_again_after_its_loop_was_closed_under_it(model: Callable[..., Any], tmp_path: Path) -> None:
    """A loop that is closed without leaving the block takes the session along; the supervisor is free again."""
    made = model()
    sv = Supervisor(graph=made.graph)

    async def enter() -> Any:
        block = sv.managed_session()
        await block.__aenter__()
        return block

    block = asyncio.run(enter())  # its end cancels the host: it stops in order
    del block
    gc.collect()

    async def train() -> int:
        async with sv.managed_session() as sess:
            return int(await sess.run(made.step))

    assert asyncio.run(train()) == 0


@pytest.mark.parametrize("count", [25, pytest.param(100, marks=pytest.mark.full)])
async def test_many_supervisors_at_once(counter: Callable[..., Any], count: int) -> None:
    made = [counter(start) for start in range(count)]

    async def train(one: Any, turns: int) -> int:
        async with Supervisor(graph=one.graph).managed_session() as sess:
            for _ in range(turns):
                value = await sess.run(one.train)
            return int(value)

    results = await asyncio.gather(*(train(one, 5) for one in made))
    assert results == [start + 5 for start in range(count)]


async def test_freed_without_the_garbage_collector(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    gc.collect()
    gc.disable()
    try:
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
        async with sv.managed_session() as sess:
            sv.start_soon(sv.wait_for_stop)
            sv.loop(60, print, ("",))
            await sess.run(made.train, made.feed)
        session = weakref.ref(sess)
        raw = weakref.ref(sess.raw)
        del sess
        await asyncio.sleep(0)
        assert session() is None
        assert raw() is None
        supervisor = weakref.ref(sv)
        del sv
        assert supervisor() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------ chief and others, masters


@pytest.mark.allow_leak("files")  # a TensorFlow server lives as long as its process
async def test_chief_and_two_others_share_the_model(tmp_path: Path, counter: Callable[..., Any]) -> None:
    server = tf.distribute.Server.create_local_server()

    def build() -> tuple[tf.Graph, Any, Any]:
        graph = tf.Graph()
        with graph.as_default(), tf.device("/cpu:0"):
            step = tf1.train.get_or_create_global_step()
            return graph, step, tf1.assign_add(step, 1)

    async def work(is_chief: bool) -> int:
        graph, step, train = build()
        sv = Supervisor(graph=graph, is_chief=is_chief, logdir=str(tmp_path), recovery_wait_secs=0.1)
        async with sv.managed_session(server.target) as sess:
            for _ in range(10):
                await sess.run(train)
            while await sess.run(step) < 30:
                await asyncio.sleep(0.01)
            return int(await sess.run(step))

    assert await asyncio.gather(work(False), work(True), work(False)) == [30, 30, 30]
    assert tf.train.load_variable(str(tmp_path), "global_step") == 30


@pytest.mark.allow_leak("files")  # as above
async def test_master_local(model: Callable[..., Any]) -> None:
    """TensorFlow's own session refuses it today."""
    made = model()
    with pytest.raises(tf.errors.NotFoundError), made.graph.as_default():
        tf1.Session("local")
    async with Supervisor(graph=made.graph).managed_session("local") as sess:
        await sess.run(made.train, made.feed)
        assert await sess.run(made.step) == 1
        assert (await sess.call(lambda raw: raw.sess_str)).startswith(b"grpc://")


# ------------------------------------------------------------------ the loop ticks


def sleeping_step(graph: tf.Graph) -> Any:
    import time

    with graph.as_default():
        return tf.numpy_function(lambda: (time.sleep(0.5), np.float32(1))[1], [], tf.float32)


def waiting_step(graph: tf.Graph) -> Any:
    """Native: waits in a queue without touching Python."""
    with graph.as_default():
        queue = tf1.FIFOQueue(1, tf.float32, shapes=[()], name="q")
        graph.enqueue = queue.enqueue(1.0)  # type: ignore[attr-defined]
        return queue.dequeue()


def computing_step(graph: tf.Graph) -> Any:
    """Native and busy."""
    with graph.as_default():
        matrix = tf.ones([400, 400]) / 400.0
        _, result = tf1.while_loop(
            lambda i, m: i < 400, lambda i, m: (i + 1, tf.matmul(m, matrix)), [tf.constant(0), matrix]
        )
        return tf.reduce_sum(result)


@pytest.mark.parametrize("make", [sleeping_step, waiting_step, computing_step])
async def test_the_loop_ticks_while_a_step_runs(make: Callable[[tf.Graph], Any], tmp_path: Path) -> None:
    """The guard of this suite fails it if asupervisor stands in the way for 50 ms; the ticks show that it runs."""
    graph = tf.Graph()
    step = make(graph)
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        await asyncio.sleep(0)
        running = asyncio.ensure_future(_fetch(sess, step))
        loop = asyncio.get_running_loop()
        begun, ticks = loop.time(), 0
        while not running.done():
            await asyncio.sleep(0.005)
            ticks += 1
            if make is waiting_step and loop.time() - begun > 0.5:
                await sess.run(graph.enqueue)  # type: ignore[attr-defined]
        await running
        took = loop.time() - begun
    assert ticks >= 0.2 * took / 0.005


async def _fetch(sess: Any, fetches: Any) -> Any:
    return await sess.run(fetches)
