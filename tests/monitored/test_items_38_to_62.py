"""BEHAVIOURS.md, section 10, items 38 to 62, and their gaps in section 12: as in TensorFlow, or the difference shown.

Where a row is checked elsewhere: 45 to 47 `test_behaviours_sessions.py`, 49 `test_recovering.py`, 57 and 58
`test_side_by_side.py`, 61 and 62 the tests of checkpoints.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed, StopRequested
from asupervisor.monitored import ChiefSessionCreator, MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
like_tf = RecoveryPolicy.like_tensorflow()


async def test_s10_38_order_at_the_start(recorder: Make, raiser: Make, aborted: Make, variables: str) -> None:
    """begin of all hooks, scaffold, session, init, queue runners, after_create_session; on recovery only the last."""
    calls: list[str] = []
    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(2, tf.int64, shapes=[()])
        enqueued = tf1.py_func(lambda: [calls.append("queue runner") or 1], [], tf.int64)
        tf1.train.add_queue_runner(tf1.train.QueueRunner(queue, [queue.enqueue(tf.reshape(enqueued, []))]))
        tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", initializer=1.0)

    class First(recorder):  # type: ignore[misc]
        def begin(self) -> None:
            assert not graph.finalized
            super().begin()

        def after_create_session(self, session: Any, coord: Any) -> None:
            assert graph.finalized
            assert session.run(w) == 1.0
            super().after_create_session(session, coord)

    class Scaffold(tf1.train.Scaffold):
        def finalize(self) -> Any:
            calls.append("finalize")
            return super().finalize()

    hooks = [First("a", calls), First("b", calls), raiser("before_run", aborted())]
    with graph.as_default():
        scaffold = Scaffold(init_fn=lambda scaffold, session: calls.append("init"))
    creator = ChiefSessionCreator(scaffold, graph=graph)
    async with MonitoredSession(creator, hooks=hooks, recovery=like_tf) as sess:
        entered = [call for call in calls if call != "queue runner"]
        assert entered == ["a.begin", "b.begin", "finalize", "init", "a.after_create_session", "b.after_create_session"]
        async with asyncio.timeout(20):
            while "queue runner" not in calls:
                await asyncio.sleep(0.001)
        assert calls.index("queue runner") > calls.index("init")
        del calls[:]
        await sess.run(w)
        again = [call for call in calls if call not in ("queue runner", "finalize")]
        assert again[:5] == ["a.before_run", "b.before_run", "init", "a.after_create_session", "b.after_create_session"]


async def test_s10_39_order_of_the_chiefs_hooks(counter: Make, recorder: Make, tmp_path: Path) -> None:
    """The chief's own first, then what saves and summarises, then the others; so a checkpoint holds what the chief's
    hooks have changed, and is there for the others."""
    calls: list[str] = []
    made = counter()

    class Chief(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            super().after_create_session(session, coord)
            assert not list(tmp_path.glob("*.index"))
            session.run(made.train)

    class User(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            super().after_create_session(session, coord)
            assert [path.name for path in tmp_path.glob("*.index")] == ["model.ckpt-1.index"]

    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[User("user", calls)], chief_only_hooks=[Chief("chief", calls)], graph=made.graph
    ) as sess:
        await sess.run(made.train)
    assert calls == [
        f"{who}.{what}"
        for what in ("begin", "after_create_session", "before_run", "after_run", "end", "finish")
        for who in ("chief", "user")
    ]


async def test_s10_40_a_directory_without_a_global_step(tmp_path: Path, variables: str) -> None:
    """TensorFlow's StepCounterHook makes this an error. Here there is no step counter, and everything else works."""
    graph = tf.Graph()
    with graph.as_default():
        w = tf1.get_variable("w", initializer=1.0)
        change = tf1.assign_add(w, 1.0)
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=graph, save_checkpoint_steps=2) as sess:
        for _ in range(3):
            await sess.run(change)
    graph = tf.Graph()
    with graph.as_default():
        w = tf1.get_variable("w", initializer=1.0)
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=graph) as sess:
        assert await sess.run(w) == 4.0


@pytest.mark.parametrize("how", ["nothing", "out of range", "stop iteration", "error"])
async def test_s10_41_end_after_clean_ends_only(counter: Make, recorder: Make, raiser: Make, how: str) -> None:
    made, hook = counter(), recorder()
    error = {
        "out of range": tf.errors.OutOfRangeError(None, None, ""),
        "stop iteration": StopIteration(),
        "error": KeyError(),
    }.get(how)
    hooks = [hook] if error is None else [hook, raiser("after_run", error)]
    try:
        async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
            await sess.run(made.train)
    except KeyError:
        assert how == "error"
    assert hook.calls.count("hook.end") == (how != "error")


async def test_s10_41_a_raising_end_keeps_no_other_hook_from_its_own(
    counter: Make, recorder: Make, raiser: Make
) -> None:
    """TensorFlow's skips the others. The session is closed in both."""
    made, hook = counter(), recorder()
    with pytest.raises(ValueError, match="end"):
        async with MonitoredSession(hooks=[raiser("end", ValueError("end")), hook], graph=made.graph) as sess:
            raw = sess.plain.raw
            await sess.run(made.train)
    assert hook.calls[-2:] == ["hook.end", "hook.finish"]
    assert raw._closed


async def test_s10_42_a_failing_before_run(counter: Make, recorder: Make, raiser: Make) -> None:
    made, first = counter(), recorder()
    failing = raiser("before_run", ValueError("before"))
    async with MonitoredSession(hooks=[first, failing], graph=made.graph) as sess:
        with pytest.raises(ValueError, match="before"):
            await sess.run(made.train)
        assert first.calls[-1] == "hook.before_run", "no after_run"
        assert await sess.run(made.after) == 1, "the step was not run, and the session stays usable"
        assert not sess.should_stop()


async def test_s10_42_a_failing_after_run(counter: Make, recorder: Make, raiser: Make, tmp_path: Path) -> None:
    """The step was made: it is counted and saved, and is no emergency."""
    made, last = counter(), recorder()
    with pytest.raises(ValueError, match="after"):
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[raiser("after_run", ValueError("after"), at=3), last], graph=made.graph
        ) as sess:
            for _ in range(3):
                await sess.run(made.train)
    assert last.calls.count("hook.after_run") == 2
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-3")


async def test_s10_43_close_twice(counter: Make, recorder: Make) -> None:
    made, hook = counter(), recorder()
    sess = await MonitoredSession(hooks=[hook], graph=made.graph).open()
    await sess.run(made.train)
    await asyncio.gather(sess.close(), sess.close(), sess.close())
    await sess.close()
    assert hook.calls.count("hook.end") == hook.calls.count("hook.finish") == 1


async def test_s10_44_run_after_close(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph) as sess:
        pass
    with pytest.raises(SessionClosed):
        await sess.run(made.train)
    with pytest.raises(SessionClosed):
        await sess.run_step_fn(lambda step_context: None)
    with pytest.raises(SessionClosed):
        await sess.save()
    with pytest.raises(SessionClosed):
        async with sess:
            pass
    assert sess.should_stop()


async def test_s10_45_an_exception_in_run_stops_nothing(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        bad = tf1.check_numerics(1.0 / tf.cast(made.step * 0, tf.float32), "inf")
    async with MonitoredSession(graph=made.graph) as sess:
        for _ in range(3):
            with pytest.raises(tf.errors.InvalidArgumentError):
                await sess.run(bad)
        assert not sess.should_stop()
        assert await sess.run(made.after) == 1


async def test_s10_48_another_error_in_the_coordinator_during_a_recovery(counter: Make, recorder: Make) -> None:
    """TensorFlow's raises it from run(). Like TensorFlow, so do we; by default the run's own error leaves it, and the
    other one, which came first, the block."""
    for policy, expected in ((like_tf, tf.errors.UnknownError), (RecoveryPolicy(), tf.errors.AbortedError)):
        made = counter()
        other = tf.errors.UnknownError(None, None, "other")

        class Both(recorder):  # type: ignore[misc]
            def before_run(self, run_context: Any, other: Any = other) -> None:
                self.coords[-1].request_stop(other)
                raise tf.errors.AbortedError(None, None, "lost")

        with pytest.raises(tf.errors.UnknownError) as raised:
            async with MonitoredSession(hooks=[Both()], graph=made.graph, recovery=policy) as sess:
                with pytest.raises(expected):
                    await sess.run(made.train)
                assert sess.should_stop()
        assert raised.value is other


async def test_s10_50_stop_at_step_keeps_its_first_target(
    counter: Make, raiser: Make, aborted: Make, tmp_path: Path
) -> None:
    made = counter()
    with made.graph.as_default():
        hook = tf1.train.StopAtStepHook(num_steps=4)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook, raiser("before_run", aborted(), at=4)], graph=made.graph, recovery=like_tf
    ) as sess:
        await sess.run(made.train)
        await sess.run(made.train)
        await sess.save()
        while not sess.should_stop():
            await sess.run(made.train)
        assert sess.recoveries == 1
        assert await sess.plain.run(made.step) == 4


async def test_s10_51_a_step_function_gets_the_new_session(counter: Make, aborted: Make) -> None:
    """TensorFlow's hands it the closed one: "Attempted to use a closed Session."."""
    made = counter()
    seen: list[Any] = []

    def step_fn(step_context: Any) -> Any:
        seen.append(step_context.session)
        value = step_context.session.run(made.after)
        if len(seen) == 1:
            raise aborted()
        return value

    async with MonitoredSession(graph=made.graph, recovery=like_tf) as sess:
        assert await sess.run_step_fn(step_fn) == 1
    assert seen[0] is not seen[1]


@pytest.mark.parametrize("first", ["worker", "body"])
async def test_s10_53_the_first_error_leaves_and_the_other_is_a_note(
    counter: Make, recorder: Make, raiser: Make, first: str
) -> None:
    """TensorFlow's replaces the body's error by what its coordinator holds, whichever came first."""
    made, hook = counter(), recorder()
    errors = {"body": KeyError("body"), "worker": ValueError("worker"), "finish": OSError("finish")}
    hooks = [hook, raiser("finish", errors["finish"])]
    with pytest.raises((KeyError, ValueError)) as raised:
        async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
            await sess.run(made.train)
            if first == "worker":
                hook.coords[0].request_stop(errors["worker"])
                await asyncio.sleep(0.01)
            raise errors["body"]
    assert raised.value is errors[first]
    notes = "\n".join(raised.value.__notes__)
    assert ("body" in notes) is (first == "worker")
    assert "finish" in notes


async def test_s10_54_threads_that_do_not_end_are_no_error(
    counter: Make, recorder: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As TensorFlow's: they are ignored after the grace. Here they are named."""
    made = counter()
    release = threading.Event()

    class Starts(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            thread = threading.Thread(target=release.wait, args=(30,), name="deaf")
            coord.register_thread(thread)
            thread.start()

    async with MonitoredSession(hooks=[Starts()], graph=made.graph, stop_grace_period_secs=0.2) as sess:
        await sess.run(made.train)
    assert "deaf" in caplog.text
    release.set()


async def test_s10_55_creation_is_retried_without_limit_like_tensorflow_only(counter: Make, aborted: Make) -> None:
    from asupervisor.errors import RecoveryExhausted

    for policy, most in ((like_tf, 60), (RecoveryPolicy(backoff=like_tf.backoff, max_restarts=5), 5)):
        made, calls = counter(), 0

        def init_fn(scaffold: Any, session: Any) -> None:
            nonlocal calls
            calls += 1
            if calls <= 60:
                raise aborted()

        with made.graph.as_default():
            creator = ChiefSessionCreator(tf1.train.Scaffold(init_fn=init_fn), graph=made.graph)
        try:
            async with MonitoredSession(creator, recovery=policy) as sess:
                assert await sess.run(made.after) == 1
        except RecoveryExhausted as error:
            assert error.attempts == most == 5
        assert calls == most + 1


async def test_s10_56_a_checkpoint_after_each_creation(
    counter: Make, raiser: Make, aborted: Make, tmp_path: Path
) -> None:
    made = counter()
    seen: list[Any] = []
    sess = MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[raiser("before_run", aborted(), at=3)], graph=made.graph, recovery=like_tf
    )

    async def listen() -> None:
        async for event in sess.events():
            if event.kind == "checkpoint.saved":
                seen.append(event.data["step"])

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)
    async with sess:
        for _ in range(3):
            await sess.run(made.train)
    await listener
    assert seen == [0, 0, 1], "at the creation, after the recovery, at the end"


async def test_s10_56_the_end_saves_only_what_has_changed(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph) as sess:
        await sess.run(made.train)
        info = await sess.save()
        stamp = (tmp_path / "model.ckpt-1.manifest").stat().st_mtime_ns
    assert info.step == 1
    assert (tmp_path / "model.ckpt-1.manifest").stat().st_mtime_ns == stamp


async def test_s10_59_no_division_by_zero(counter: Make, tmp_path: Path, clock: Any) -> None:
    """Steps that take no time at all: TensorFlow's StepCounterHook divides by it."""
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, clock=clock, log_step_count_steps=1
    ) as sess:
        for _ in range(5):
            await sess.run(made.train)
        assert sess.status().steps_per_sec is None
        await clock.advance(2.0)
        await sess.run(made.train)
        assert sess.status().steps_per_sec == 0.5


async def test_s10_60_a_listener_that_says_stop_at_the_start(counter: Make, tmp_path: Path) -> None:
    """TensorFlow's own saver hook ignores it there, and so do we: the hook is unchanged."""
    made = counter()

    class Listener(tf1.train.CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: Any) -> bool:
            return True

    with made.graph.as_default():
        saver = tf1.train.Saver()
        hook = tf1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver, listeners=[Listener()])
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        assert not sess.should_stop()
        runs = 0
        while not sess.should_stop():
            await sess.run(made.train)
            runs += 1
    assert runs in (1, 2)


# ------------------------------------------------------------------ section 12: what no upstream test checks


async def test_s12_interrupts_of_the_body_pass(counter: Make, recorder: Make) -> None:
    made, hook = counter(), recorder()

    class Interrupt(BaseException):
        pass

    error = Interrupt()
    with pytest.raises(Interrupt) as raised:
        async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
            await sess.run(made.train)
            raise error
    assert raised.value is error
    assert hook.outcomes[0].reason == "cancelled"
    assert "hook.end" not in hook.calls


@pytest.mark.parametrize("when", ["enter", "run", "exit", "save"])
async def test_s12_cancellation_anywhere(counter: Make, recorder: Make, tmp_path: Path, when: str) -> None:
    """Cancelled at its worst moments, the block ends in order: the cancellation leaves, the state is saved."""
    made = counter()
    here = asyncio.Event()
    loop = asyncio.get_running_loop()
    gate = threading.Event()

    class Slow(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            if when == "enter":
                self._wait()

        def end(self, session: Any) -> None:
            if when == "exit":
                self._wait()

        def _wait(self) -> None:
            loop.call_soon_threadsafe(here.set)
            gate.wait(20)

    hook = Slow()

    async def body() -> None:
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[hook], graph=made.graph, stop_grace_period_secs=20
        ) as sess:
            for _ in range(3):
                await sess.run(made.train)
            if when == "run":
                here.set()
                while True:
                    await sess.run(made.train)
            if when == "save":
                here.set()
                while True:
                    await sess.save()

    task = asyncio.create_task(body())
    await here.wait()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert hook.calls.count("hook.finish") == hook.calls.count("hook.begin") == 1
    latest = tf.train.latest_checkpoint(str(tmp_path))
    if when == "enter":
        assert latest is None or latest.endswith("-0")
    else:
        assert int(latest.rpartition("-")[2]) >= 3
    assert not made.graph.finalized


async def test_s12_a_stop_of_the_body_is_no_error_to_its_hooks(counter: Make, recorder: Make) -> None:
    made, hook = counter(), recorder()
    async with MonitoredSession(hooks=[hook], graph=made.graph):
        raise StopRequested("the body")
    assert hook.calls[-2:] == ["hook.end", "hook.finish"]
    assert hook.outcomes[0].reason == "stopped"
