"""FAULTS.md as far as monitored sessions and hooks have them: F04, F15, F17, F20, F21, F23."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import tensorflow as tf

from asupervisor import Supervisor, checkpoints, train_loop
from asupervisor.errors import CheckpointNotRestored, RecoveryExhausted, StopGraceExceeded, StopRequested
from asupervisor.hooks import AsyncSessionRunHook, StopAtStepHook
from asupervisor.monitored import ChiefSessionCreator, MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy
from asupervisor.runtime.device import DeviceExecutor

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


def stuck_queue() -> Any:
    """A graph with a queue runner whose enqueue blocks at once, and the step that takes from the queue."""
    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(1, tf.float32, shapes=[()])
        tf1.train.add_queue_runner(tf1.train.QueueRunner(queue, [queue.enqueue(1.0)]))
        take = queue.dequeue()
    return graph, take


# ------------------------------------------------------------------ F04: TensorFlow's hook saves, nobody restores


@pytest.mark.parametrize("how", ["not restored", "restored by init_fn", "restored", "elsewhere"])
async def test_f04_a_hook_of_tensorflow_does_not_overwrite_what_was_not_restored(
    counter: Make, recorder: Make, tmp_path: Path, how: str
) -> None:
    """In TensorFlow's MonitoredSession it begins at 0, and its first save replaces the state file and the old ones."""
    made = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph) as sess:
        for _ in range(7):
            await sess.run(made.train)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("[cm]*")}
    assert {"checkpoint", "model.ckpt-7.index"} <= before.keys()
    again = counter()
    with again.graph.as_default():
        saver = tf1.train.Saver()
        restore = (
            (lambda _, raw: saver.restore(raw, f"{tmp_path}/model.ckpt-7")) if how == "restored by init_fn" else None
        )
        scaffold = tf1.train.Scaffold(saver=saver, init_fn=restore)
    place = tmp_path / "other" if how == "elsewhere" else tmp_path
    last = recorder()
    hooks = [tf1.train.CheckpointSaverHook(str(place), save_steps=100, scaffold=scaffold), last]
    creator = ChiefSessionCreator(scaffold, checkpoint_dir=tmp_path if how == "restored" else None, graph=again.graph)
    session = MonitoredSession(creator, hooks=hooks)
    if how == "not restored":
        with pytest.raises(
            CheckpointNotRestored, match=r"CheckpointSaverHook would save to .*model\.ckpt-7.* at step 0"
        ):
            await session.open()
        assert {path.name: path.read_bytes() for path in tmp_path.glob("[cm]*")} == before
        assert last.calls == ["hook.begin", "hook.finish"]
        return
    async with session:
        await session.run(again.train)
    assert tf.train.load_variable(str(place), "global_step") == (1 if how == "elsewhere" else 8)


# ------------------------------------------------------------------ F15: one last call, everything released


METHODS = ("begin", "after_create_session", "is_done", "before_run", "after_run", "end", "finish")


def failing_in(method: str, error: BaseException, asynchronous: bool) -> Any:
    def fail(self: Any, *args: Any) -> None:
        raise error

    async def afail(self: Any, *args: Any) -> None:
        raise error

    return type("Failing", (AsyncSessionRunHook,), {method: afail if asynchronous and method != "is_done" else fail})()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("method", METHODS)
async def test_f15_one_last_call_whatever_fails(recorder: Make, method: str, asynchronous: bool) -> None:
    graph, take = stuck_queue()
    error = ValueError(f"in {method}")
    calls: list[str] = []
    first, last = recorder("first", calls), recorder("last", calls)
    hooks = [first, failing_in(method, error, asynchronous), last]
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=method) as raised:
        async with MonitoredSession(hooks=hooks, graph=graph, stop_grace_period_secs=20) as sess:
            await sess.run(take)
    assert raised.value is error, "bare: the same object"
    began = [hook for hook in (first, last) if f"{hook.name}.begin" in calls]
    assert began == ([first] if method == "begin" else [first, last])
    for hook in began:
        assert calls.count(f"{hook.name}.finish") == 1
        (outcome,) = hook.outcomes
        clean_until_then = method == "finish"
        assert outcome.reason == ("finished" if clean_until_then else "error")
        if not clean_until_then:
            assert outcome.error is error
    assert calls.count("first.end") == calls.count("last.end") == (1 if method in ("end", "finish") else 0)
    assert not [t for t in set(threading.enumerate()) - before if t.is_alive() and "asupervisor" in t.name]


@pytest.mark.parametrize("how", ["finished", "stopped by a hook", "stopped", "end of input", "error", "cancelled"])
async def test_f15_the_outcome(counter: Make, recorder: Make, how: str) -> None:
    made = counter()
    with made.graph.as_default():
        empty = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(0)).get_next()
    plain, hook = recorder("plain"), recorder("async")

    class Async(AsyncSessionRunHook):
        seen: Any = None

        async def finish(self, session: Any, outcome: Any) -> None:
            self.seen = (session, outcome)

    asynchronous = Async()
    entered = asyncio.Event()

    async def body() -> None:
        async with MonitoredSession(hooks=[plain, asynchronous, hook], graph=made.graph) as sess:
            await sess.run(made.train)
            if how == "stopped by a hook":
                plain.stops = True
                await sess.run(made.train)
            elif how == "stopped":
                sess.request_stop()
            elif how == "end of input":
                await sess.run(empty)
            elif how == "error":
                raise KeyError("body")
            elif how == "cancelled":
                entered.set()
                await asyncio.sleep(60)

    task = asyncio.create_task(body())
    if how == "cancelled":
        await entered.wait()
        task.cancel()
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    (outcome,) = plain.outcomes
    session, same = asynchronous.seen
    assert same == outcome == hook.outcomes[0]
    expected = {"stopped by a hook": "stopped", "end of input": "finished"}.get(how, how)
    assert outcome.reason == expected
    assert type(outcome.error) is {"error": KeyError, "cancelled": asyncio.CancelledError}.get(how, type(None))
    assert type(outcome.told_by) is (tf.errors.OutOfRangeError if how == "end of input" else type(None))
    assert session is not None
    assert session.closed, "and was open then"
    assert ("plain.end" in plain.calls) is outcome.clean
    assert type(result) is {"error": KeyError, "cancelled": asyncio.CancelledError}.get(how, type(None))


async def test_f15_the_session_is_open_at_the_last_call(counter: Make) -> None:
    made = counter()
    read: list[Any] = []

    class Last(AsyncSessionRunHook):
        def end(self, session: Any) -> None:
            read.append(session.run(made.step))

        async def finish(self, session: Any, outcome: Any) -> None:
            read.append(await session.run(made.step))

    async with MonitoredSession(hooks=[Last()], graph=made.graph) as sess:
        await sess.run(made.train)
    assert read == [1, 1]


@pytest.mark.parametrize("method", ["end", "finish"])
async def test_f15_a_last_call_that_awaits_what_it_cancelled(
    counter: Make, recorder: Make, tmp_path: Path, method: str
) -> None:
    """Its CancelledError is an error of this hook: it neither skips the others nor the last save."""
    made, other = counter(), recorder("other")

    async def last(self: Any, *args: Any) -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    hook = type("Awaits", (AsyncSessionRunHook,), {method: last})()
    sess = MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, hooks=[hook, other])
    with pytest.raises(RuntimeError, match="raised CancelledError") as raised:
        async with sess:
            for _ in range(3):
                await sess.run(made.train)
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    assert other.calls[-2:] == ["other.end", "other.finish"]
    assert sess.outcome == "error"
    assert [info.step for info in checkpoints(tmp_path)] == [0, 3]


async def test_f15_several_failures_are_all_told(counter: Make) -> None:
    made = counter()
    errors = [ValueError("end"), KeyError("finish"), OSError("second finish")]
    hooks = [
        failing_in("end", errors[0], False),
        failing_in("finish", errors[1], True),
        failing_in("finish", errors[2], False),
    ]
    with pytest.raises(ValueError, match="end") as raised:
        async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
            await sess.run(made.train)
    assert raised.value is errors[0]
    assert len(raised.value.__notes__) == 2


async def test_f15_a_hook_that_hangs_at_the_end_is_left_behind(counter: Make, recorder: Make) -> None:
    """It has a share of the grace, the others have their last calls, and the block ends with an error."""
    made, other = counter(), recorder()

    class Hangs(AsyncSessionRunHook):
        async def end(self, session: Any) -> None:
            await asyncio.sleep(60)

    sess = MonitoredSession(hooks=[Hangs(), other], graph=made.graph, stop_grace_period_secs=2)
    with pytest.raises(StopGraceExceeded, match=r"Hangs.end did not end within 0.8 s.*raise stop_grace_period_secs"):
        async with sess:
            await sess.run(made.train)
    assert other.calls[-2:] == ["hook.end", "hook.finish"]
    assert sess.outcome == "error"


async def test_f15_a_hook_that_hangs_at_the_end_leaves_time_for_the_last_save(
    counter: Make, recorder: Make, tmp_path: Path
) -> None:
    made, other = counter(), recorder()

    class Hangs(AsyncSessionRunHook):
        async def end(self, session: Any) -> None:
            await asyncio.sleep(60)

        async def finish(self, session: Any, outcome: Any) -> None:
            await asyncio.sleep(60)

    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, hooks=[Hangs(), other], stop_grace_period_secs=4
    )
    with pytest.raises(StopGraceExceeded, match=r"Hangs.end did not end") as raised:
        async with sess:
            for _ in range(3):
                await sess.run(made.train)
    assert "Hangs.finish did not end" in "".join(raised.value.__notes__)
    assert other.calls[-2:] == ["hook.end", "hook.finish"]
    assert [info.step for info in checkpoints(tmp_path)] == [0, 3]


async def test_f15_a_plain_hook_that_occupies_the_thread_at_the_end(
    counter: Make, recorder: Make, tmp_path: Path
) -> None:
    """There is no other thread for the last save: the exit says so."""
    made, other = counter(), recorder()
    go_on = threading.Event()

    class Hangs(tf1.train.SessionRunHook):  # type: ignore[misc]
        def end(self, session: Any) -> None:
            go_on.wait(60)

    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, hooks=[Hangs(), other], stop_grace_period_secs=0.5
    )
    try:
        with pytest.raises(StopGraceExceeded, match=r"Hangs.end did not end") as raised:
            async with sess:
                for _ in range(3):
                    await sess.run(made.train)
    finally:
        go_on.set()
    assert "there is no final save" in "".join(raised.value.__notes__)
    assert "hook.end" not in other.calls
    assert sess.outcome == "error"


async def test_f15_a_hook_that_refuses_to_be_cancelled_at_the_end(counter: Make, tmp_path: Path) -> None:
    made = counter()
    go_on = asyncio.Event()

    class Refuses(AsyncSessionRunHook):
        async def end(self, session: Any) -> None:
            while not go_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await go_on.wait()

    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, hooks=[Refuses()], stop_grace_period_secs=0.5
    )
    try:
        with pytest.raises(StopGraceExceeded, match=r"Refuses.end did not end") as raised:
            async with sess:
                await sess.run(made.train)
    finally:
        go_on.set()
    assert "there is no final save" in "".join(raised.value.__notes__)
    assert sess.outcome == "error"


async def test_f15_a_hook_that_did_not_begin_has_no_last_call(counter: Make, recorder: Make) -> None:
    """The start is cancelled while its `begin` waits for the device thread."""
    made, hook = counter(), recorder()
    executor = DeviceExecutor()
    occupied, go_on = threading.Event(), threading.Event()

    def occupy() -> None:
        occupied.set()
        go_on.wait(10)

    blocker = asyncio.ensure_future(executor.call(occupy))
    await asyncio.to_thread(occupied.wait, 10)
    sess = MonitoredSession(hooks=[hook], graph=made.graph, executor=executor)
    entering = asyncio.create_task(sess.open())
    while not executor.statistics().waiting_interactive:
        await asyncio.sleep(0)
    entering.cancel()
    await asyncio.wait([entering])
    go_on.set()
    await blocker
    assert entering.cancelled()
    assert hook.calls == []
    assert await executor.aclose(10)


async def test_f15_a_cancelled_start_leaves_the_graph_as_it_was(counter: Make) -> None:
    """Even where the graph is being finalised at that moment."""
    made = counter()
    executor = DeviceExecutor()
    begun, go_on = threading.Event(), threading.Event()

    class Slow(tf1.train.Scaffold):  # type: ignore[misc]
        def finalize(self) -> Any:
            begun.set()
            go_on.wait(10)
            return super().finalize()

    with made.graph.as_default():
        creator = ChiefSessionCreator(Slow(), graph=made.graph)
    entering = asyncio.create_task(MonitoredSession(creator, executor=executor).open())
    await asyncio.to_thread(begun.wait, 10)
    entering.cancel()
    await asyncio.wait([entering])
    go_on.set()
    await executor.call(lambda: None)
    assert not made.graph.finalized
    assert await executor.aclose(10)


@pytest.mark.parametrize("how", ["stopped", "cancelled", "error"])
async def test_f15_the_outcome_of_a_start_that_was_ended(counter: Make, recorder: Make, how: str) -> None:
    made, hook = counter(), recorder()
    error = ValueError("reported")
    reached = asyncio.Event()

    class Waits(AsyncSessionRunHook):
        async def begin(self) -> None:
            reached.set()
            await asyncio.Event().wait()

    sess = MonitoredSession(hooks=[hook, Waits()], graph=made.graph)
    entering = asyncio.create_task(sess.open())
    await reached.wait()
    if how == "cancelled":
        entering.cancel()
    else:
        sess.request_stop(error if how == "error" else None)
    (result,) = await asyncio.gather(entering, return_exceptions=True)
    wanted = {"stopped": StopRequested, "cancelled": asyncio.CancelledError, "error": ValueError}
    assert isinstance(result, wanted[how])
    assert [outcome.reason for outcome in hook.outcomes] == [how]
    assert sess.outcome == how


# ------------------------------------------------------------------ F17: StopIteration and OutOfRange


async def test_f17_a_stray_stop_iteration_is_an_error(counter: Make) -> None:
    made = counter()

    async def body() -> None:
        async with MonitoredTrainingSession(graph=made.graph) as sess:
            await sess.run(made.train)
            next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await body()


async def test_f17_a_stray_stop_async_iteration_is_an_error(counter: Make) -> None:
    made = counter()

    async def nothing() -> Any:
        for item in ():
            yield item

    with pytest.raises(StopAsyncIteration):
        async with MonitoredTrainingSession(graph=made.graph) as sess:
            await sess.run(made.train)
            await anext(nothing())
    assert sess.outcome == "error"


async def test_f17_a_hooks_bug_is_no_stop(counter: Make) -> None:
    """A generator that ran dry inside a hook is a bug, and so is StopIteration in a coroutine function."""
    made = counter()

    class Generators(AsyncSessionRunHook):
        def before_run(self, run_context: Any) -> None:
            def generator() -> Any:
                yield next(iter([]))

            list(generator())

    class Coroutine(AsyncSessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            next(iter([]))

    for hook in (Generators(), Coroutine()):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            async with MonitoredTrainingSession(hooks=[hook], graph=made.graph) as sess:
                await sess.run(made.train)


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), StopRequested("hook")], ids=repr)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
async def test_f17_a_hook_or_step_function_may_stop(counter: Make, error: Exception, asynchronous: bool) -> None:
    if asynchronous == isinstance(error, StopIteration):
        error = StopAsyncIteration() if asynchronous else StopRequested("hook")
    if not asynchronous and isinstance(error, StopAsyncIteration):
        error = StopIteration()
    made = counter()
    async with MonitoredTrainingSession(hooks=[failing_in("after_run", error, asynchronous)], graph=made.graph) as sess:
        await sess.run(made.train)
        raise AssertionError
    assert sess.outcome == "stopped"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("method", "grouped"), [("end", False), ("finish", False), ("is_done", False), ("end", True), ("finish", True)]
)
async def test_f17_a_hook_may_ask_for_the_end_at_the_end(
    counter: Make, recorder: Make, method: str, grouped: bool, asynchronous: bool
) -> None:
    """What ends a block cleanly is no failure where it ends anyway, nor where a hook is asked whether it should."""
    made, other = counter(), recorder()
    error: Exception = StopAsyncIteration() if asynchronous and method != "is_done" else StopIteration()
    if grouped:
        error = ExceptionGroup("of tasks", [StopRequested("mine")])
    async with MonitoredTrainingSession(
        hooks=[failing_in(method, error, asynchronous), other], graph=made.graph
    ) as sess:
        assert sess.should_stop() == (method == "is_done")
    assert sess.outcome == ("stopped" if method == "is_done" else "finished")
    assert [outcome.clean for outcome in other.outcomes] == [True]
    assert "hook.end" in other.calls


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("method", ["end", "finish"])
async def test_f15_a_last_call_that_fails_is_no_echo_of_the_stop(
    counter: Make, method: str, asynchronous: bool
) -> None:
    """TensorFlow's CancelledError is one elsewhere; a hook which saves and whose peer is lost may raise it."""
    made = counter()
    error = tf.errors.CancelledError(None, None, "a peer is lost")
    with pytest.raises(tf.errors.CancelledError) as raised:
        async with MonitoredSession(hooks=[failing_in(method, error, asynchronous)], graph=made.graph) as sess:
            await sess.run(made.train)
    assert raised.value is error


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("method", ["begin", "after_create_session"])
async def test_f17_a_hook_may_end_the_start(counter: Make, recorder: Make, method: str, asynchronous: bool) -> None:
    made, other = counter(), recorder()
    error = StopAsyncIteration() if asynchronous else StopIteration()
    sess = MonitoredTrainingSession(hooks=[other, failing_in(method, error, asynchronous)], graph=made.graph)
    with pytest.raises(StopRequested) as raised:
        await sess.open()
    assert raised.value.__cause__ is error
    assert sess.outcome == "stopped"
    assert [outcome.reason for outcome in other.outcomes] == ["stopped"]


async def test_f17_a_clean_end_is_told_with_its_op(counter: Make, listening: Make, tmp_path: Path) -> None:
    made = counter()
    with made.graph.as_default():
        item = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()
        with tf.control_dependencies([item]):
            train = tf1.assign_add(made.step, 1)
    sess = MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph)
    async with listening(sess) as events, sess:
        while not sess.should_stop():
            await sess.run(train)
    (clean,) = [event for event in events if event.kind == "stop.clean"]
    assert clean.data["op"] == item.op.name
    (outcome,) = [event for event in events if event.kind == "session.outcome"]
    assert outcome.data["reason"] == "finished"
    assert outcome.data["op"] == item.op.name
    assert sess.status().outcome == "finished"
    journal = (tmp_path / "journal.jsonl").read_text()
    assert '"session.outcome"' in journal
    assert item.op.name in journal
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-2")


@pytest.mark.parametrize("family", ["monitored", "managed", "train_loop"])
@pytest.mark.parametrize("group", [asyncio.TaskGroup, anyio.create_task_group])
async def test_f17_the_end_of_data_in_a_task_group_is_a_clean_end(
    counter: Make, tmp_path: Path, family: str, group: Callable[[], Any]
) -> None:
    """What leaves the group is an exception group then; with anything else in it, it is an error."""
    made = counter()
    with made.graph.as_default():
        item = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(20)).get_next()
        with tf.control_dependencies([item]):
            train = tf1.assign_add(made.step, 1)

    async def consume(sess: Any) -> None:
        while True:
            await sess.run(train)

    async def body(sess: Any, error: Exception | None = None) -> None:
        async with group() as tasks:
            start = tasks.create_task if group is asyncio.TaskGroup else lambda task: tasks.start_soon(lambda: task)
            for _ in range(2):
                start(consume(sess))
            if error is not None:
                raise error

    async def train_with(body: Callable[[Any], Any]) -> None:
        if family == "monitored":
            async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph) as sess:
                await body(sess)
        elif family == "managed":
            async with Supervisor(graph=made.graph, logdir=tmp_path).managed_session() as sess:
                await body(sess)
        else:
            await train_loop(Supervisor(graph=made.graph, logdir=tmp_path), body)

    await train_with(body)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-20")
    with pytest.raises(ExceptionGroup) as raised:
        await train_with(functools.partial(body, error=KeyError("mine")))
    assert raised.group_contains(KeyError)


@pytest.mark.parametrize("family", ["monitored", "managed"])
async def test_f17_a_group_of_echoes_after_a_stop_is_a_clean_end(counter: Make, tmp_path: Path, family: str) -> None:
    """What a closed queue tells its producer and its consumer."""
    made = counter()

    async def body(stop: Callable[[], None], sess: Any) -> None:
        await sess.run(made.train)
        stop()
        raise ExceptionGroup(
            "of tasks",
            [tf.errors.OutOfRangeError(None, None, "closed"), tf.errors.CancelledError(None, None, "closed")],
        )

    if family == "monitored":
        sess = MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph)
        async with sess:
            await body(sess.request_stop, sess)
    else:
        sv = Supervisor(graph=made.graph, logdir=tmp_path)
        async with sv.managed_session() as plain:
            await body(sv.request_stop, plain)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-1")


@pytest.mark.parametrize("kind", [StopRequested, tf.errors.CancelledError])
async def test_f17_a_hook_may_report_a_stop(counter: Make, kind: Any) -> None:
    """To the coordinator that it has got, in the course of training or beside the stop."""
    made = counter()
    error = StopRequested("mine") if kind is StopRequested else kind(None, None, "mine")

    class Reports(AsyncSessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.coord = coord

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if kind is not StopRequested:
                run_context.request_stop()

        def end(self, session: Any) -> None:
            self.coord.request_stop(error)

    async with MonitoredTrainingSession(hooks=[Reports()], graph=made.graph) as sess:
        await sess.run(made.train)
    assert sess.outcome is not None


async def test_f17_out_of_range_of_a_thread_is_no_clean_end(counter: Make, recorder: Make) -> None:
    """Item 4: what a worker reports to the coordinator is an error, whatever its class."""
    made, hook = counter(), recorder()
    error = tf.errors.OutOfRangeError(None, None, "worker")
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
            hook.coords[0].request_stop(error)
            await sess.run(made.train)
    assert raised.value is error
    assert hook.outcomes[0].reason == "error"


# ------------------------------------------------------------------ F20: a finished job does not train on


@pytest.mark.thin
@pytest.mark.parametrize("kind", [tf1.train.StopAtStepHook, StopAtStepHook])
@pytest.mark.parametrize("way", ["run", "steps"])
async def test_f20_a_finished_job_does_not_train_on(counter: Make, tmp_path: Path, kind: Any, way: str) -> None:
    ends = []
    for _ in range(3):
        made = counter()
        with made.graph.as_default():
            hook = kind(last_step=5)
        async with MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[hook], graph=made.graph) as sess:
            if way == "run":
                while not sess.should_stop():
                    await sess.run(made.train)
            else:
                async for _ in sess.steps(made.train):
                    pass
            ends.append(int(await sess.plain.run(made.step)))
    assert ends == [5, 5, 5]


async def test_f20_who_does_not_look_is_told(counter: Make, tmp_path: Path) -> None:
    made = counter(start=5)
    async with MonitoredSession(hooks=[StopAtStepHook(last_step=5)], graph=made.graph) as sess:
        with pytest.raises(RuntimeError, match="after should_stop requested"):
            await sess.run(made.train)
        assert await sess.plain.run(made.step) == 5


async def test_f20_any_hook_can_say_that_it_is_done(counter: Make, recorder: Make) -> None:
    made = counter(start=7)
    asked: list[Any] = []

    class Done(recorder):  # type: ignore[misc]
        def is_done(self, global_step: Any) -> bool:
            asked.append(global_step)
            return True

    async with MonitoredSession(hooks=[Done()], graph=made.graph) as sess:
        assert sess.should_stop()
    assert asked == [7]
    async with MonitoredSession(hooks=[Done()], graph=tf.Graph()) as sess:
        assert sess.should_stop()
    assert asked == [7, None]


async def test_f20_a_stop_that_a_hook_asks_for_at_the_start(counter: Make, recorder: Make) -> None:
    """By the session's coordinator, in `after_create_session`: the block is entered, and its loop ends at once."""
    made = counter()

    class Stops(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            coord.request_stop()

    hook = Stops()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        assert sess.should_stop()
        assert await sess.run(made.after) == 1, "a run works all the same"
    assert hook.outcomes[0].reason == "stopped"


# ------------------------------------------------------------------ F21: runs without hooks


async def test_f21_runs_without_hooks(counter: Make, recorder: Make) -> None:
    made = counter()
    with made.graph.as_default():
        batch = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
    hook = recorder(fetches=batch)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for step in range(1, 4):
            await sess.run(made.train)
            assert await sess.plain.run(made.step) == step
            assert await sess.plain.run(made.step) == step
            assert await asyncio.to_thread(sess.plain.blocking.run, made.step) == step
    assert [values.results for values in hook.values] == [0, 1, 2], "three runs, three batches"


# ------------------------------------------------------------------ F23: bounded, loud, no silent reset


async def test_f23_recovery_is_bounded_and_waits(counter: Make, raiser: Make, tmp_path: Path, clock: Any) -> None:
    """Fifty lost sessions are not fifty retries: there is a pause that grows, and a budget."""
    made = counter()
    raised = 0

    class Always(AsyncSessionRunHook):
        def before_run(self, run_context: Any) -> None:
            nonlocal raised
            raised += 1
            raise tf.errors.AbortedError(None, None, "again")

    policy = RecoveryPolicy(max_restarts=5, origins=frozenset(("run", "hook")))
    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[Always()], graph=made.graph, recovery=policy, clock=clock
    )
    pauses: list[float] = []

    async def listen() -> None:
        async for event in sess.events():
            if event.kind == "session.recovering":
                pauses.append(event.data["delay_secs"])
                assert event.level == "warning"

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)

    async def move() -> None:
        while True:
            await asyncio.sleep(0.001)
            await clock.advance(0.5)

    mover = asyncio.create_task(move())
    try:
        with pytest.raises(RecoveryExhausted, match="gave up after 5 restarts") as exhausted:
            async with sess:
                await sess.run(made.train)
    finally:
        mover.cancel()
        await asyncio.wait([mover])
        await listener
    assert raised == 6
    assert isinstance(exhausted.value.last, tf.errors.AbortedError)
    assert len(pauses) == 5
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0] > 0
    assert sess.status().restarts == 5


async def test_f23_an_error_of_a_users_hook_is_not_recovered_from(
    counter: Make, raiser: Make, aborted: Make, tmp_path: Path
) -> None:
    made, error = counter(), aborted()
    with pytest.raises(tf.errors.AbortedError) as raised:
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[raiser("before_run", error, at=3)], graph=made.graph
        ) as sess:
            for _ in range(5):
                await sess.run(made.train)
    assert raised.value is error
    assert sess.recoveries == 0
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-2"), "and what was trained is saved"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("method", ["begin", "after_create_session"])
async def test_f23_an_error_of_a_users_hook_at_the_start_is_not_recovered_from(
    counter: Make, aborted: Make, tmp_path: Path, method: str, asynchronous: bool
) -> None:
    made, error = counter(), aborted()
    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[failing_in(method, error, asynchronous)], graph=made.graph
    )
    with pytest.raises(tf.errors.AbortedError) as raised:
        await sess.open()
    assert raised.value is error
    assert sess.recoveries == 0


async def test_f23_an_error_of_a_users_hook_in_a_new_session_is_not_recovered_from(
    counter: Make, aborted: Make, tmp_path: Path
) -> None:
    made, error = counter(), aborted()
    lost = abort_at(made.graph, 2)
    created = 0

    class Second(AsyncSessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            nonlocal created
            created += 1
            if created == 2:
                raise error

    policy = RecoveryPolicy(errors=(tf.errors.UnknownError, tf.errors.AbortedError), backoff=NO_PAUSE)
    with pytest.raises(tf.errors.AbortedError) as raised:
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[Second()], graph=made.graph, recovery=policy
        ) as sess:
            await sess.run([made.train, lost])
            await sess.run([made.train, lost])
    assert raised.value is error
    assert created == 2


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
async def test_f23_a_loss_in_a_run_of_a_hook_at_the_start_is_recovered_from(
    counter: Make, tmp_path: Path, asynchronous: bool
) -> None:
    made = counter()
    lost = abort_at(made.graph, 1)

    class Runs(AsyncSessionRunHook):
        if asynchronous:

            async def after_create_session(self, session: Any, coord: Any) -> None:
                await session.run(lost)
        else:

            def after_create_session(self, session: Any, coord: Any) -> None:
                session.run(lost)

    policy = RecoveryPolicy(errors=(tf.errors.UnknownError,), backoff=NO_PAUSE)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[Runs()], graph=made.graph, recovery=policy
    ) as sess:
        assert await sess.run(made.after) == 1
        assert sess.recoveries == 1


def abort_at(graph: tf.Graph, at: int) -> Any:
    """An op whose run number `at` fails as a lost worker's does."""
    runs = 0

    def count() -> Any:
        nonlocal runs
        runs += 1
        if runs == at:
            raise RuntimeError("lost")
        return 0

    with graph.as_default():
        return tf1.py_func(count, [], tf.int64)


@pytest.mark.parametrize("way", ["run", "steps", "step_fn", "hook"])
async def test_f23_the_model_is_never_reset_silently(
    counter: Make, recorder: Make, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Without a checkpoint directory a real AbortedError leaves, with a note; the step goes on from where it was."""
    made, hook = counter(), recorder()
    lost = abort_at(made.graph, 4)
    # What a remote worker reports as Aborted, a Python function in this process reports as Unknown.
    policy = RecoveryPolicy(errors=(tf.errors.UnknownError,), backoff=NO_PAUSE)
    fetches = [made.after, lost]
    if way == "hook":
        hook.fetches, fetches = lost, [made.after]

    async def one(sess: Any) -> Any:
        if way == "step_fn":

            def step_fn(step_context: Any) -> Any:
                return step_context.run_with_hooks(fetches)

            return await sess.run_step_fn(step_fn)
        if way == "steps":
            (result,) = [result async for result in sess.steps(fetches, max_steps=1)]
            return result
        return await sess.run(fetches)

    async with MonitoredSession(hooks=[hook], graph=made.graph, recovery=policy) as sess:
        for step in (1, 2, 3):
            assert (await one(sess))[0] == step
        with pytest.raises(tf.errors.UnknownError, match="lost") as raised:
            await one(sess)
        assert any("allow_reinit" in note for note in raised.value.__notes__)
        assert (await one(sess))[0] in (4, 5), "no reset: the session lives on"
        assert sess.recoveries == 0


@pytest.mark.parametrize("way", ["run", "steps", "step_fn"])
async def test_f23_with_a_checkpoint_it_is_restored(counter: Make, tmp_path: Path, way: str) -> None:
    made = counter()
    lost = abort_at(made.graph, 4)
    policy = RecoveryPolicy(errors=(tf.errors.UnknownError,), backoff=NO_PAUSE)
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, recovery=policy) as sess:
        for step in (1, 2, 3):
            assert (await sess.run([made.after, lost]))[0] == step
        await sess.save()
        if way == "run":
            assert (await sess.run([made.after, lost]))[0] == 4
        elif way == "steps":
            assert [r async for r, _ in sess.steps([made.after, lost], max_steps=3)] == [4, 5, 6]
        else:

            async def step_fn(step_context: Any) -> Any:
                return (await step_context.session.run([made.after, lost]))[0]

            assert await sess.run_step_fn(step_fn) == 4
        assert sess.recoveries == 1


async def test_f23_an_empty_directory_is_no_checkpoint(counter: Make, tmp_path: Path) -> None:
    """A directory alone does not allow a reset: what was never saved cannot be restored."""
    made = counter()
    lost = abort_at(made.graph, 3)
    policy = RecoveryPolicy(errors=(tf.errors.UnknownError,), backoff=NO_PAUSE)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, save_checkpoint_secs=None, graph=made.graph, recovery=policy
    ) as sess:
        await sess.run([made.train, lost])
        await sess.run([made.train, lost])
        with pytest.raises(tf.errors.UnknownError) as raised:
            await sess.run([made.train, lost])
        assert any("no checkpoint" in note for note in raised.value.__notes__)
        assert await sess.run(made.step) >= 2


async def test_f23_allowed_it_begins_anew_and_says_so(
    counter: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = counter()
    lost = abort_at(made.graph, 3)
    policy = RecoveryPolicy(errors=(tf.errors.UnknownError,), backoff=NO_PAUSE, allow_reinit=True)
    async with MonitoredSession(graph=made.graph, recovery=policy) as sess:
        seen = [(await sess.run([made.after, lost]))[0] for _ in range(4)]
    assert seen == [1, 2, 1, 2]
    assert "recovery 1 in 0.00 s" in caplog.text
    told = "recovered: the model was not restored and begins anew, at step 0"
    assert any(record.levelname == "WARNING" and told in record.getMessage() for record in caplog.records)


async def test_events_of_what_has_ended_end_at_once(counter: Make) -> None:
    made = counter()
    sess = MonitoredTrainingSession(graph=made.graph)
    before = sess.events()
    async with sess:
        within = sess.events()
    for events in (before, within):
        assert [event.kind async for event in events][-1] == "session.ended"
    async with asyncio.timeout(20):
        assert [event async for event in sess.events()] == []
