"""BEHAVIOURS.md, section 5: the layers of a monitored session (wrapped, coordinated, recoverable, hooked)."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed, StopRequested
from asupervisor.monitored import (
    ChiefSessionCreator,
    MonitoredSession,
    MonitoredTrainingSession,
    SessionCreator,
    WorkerSessionCreator,
)
from asupervisor.recovery import RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


def constant() -> tuple[tf.Graph, Any]:
    graph = tf.Graph()
    with graph.as_default():
        return graph, tf.constant(42, name="c")


class Plain(SessionCreator):
    """TensorFlow's session and nothing else."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph

    def create_session(self) -> Any:
        return tf1.Session(graph=self.graph)


# ------------------------------------------------------------------ WrappedSessionTest, CoordinatedSessionTest


async def test_s5_wrapped_properties_and_run() -> None:
    graph, c = constant()
    with graph.as_default():
        v = tf1.placeholder(tf.int32)
        w = v + c
    async with MonitoredSession(Plain(graph)) as sess:
        assert sess.graph is graph
        assert sess.plain.raw.sess_str == b""
        assert await sess.run(c) == 42
        assert await sess.run(w, {v: 1}) == 43


async def test_s5_wrapped_should_stop_on_close_and_close_twice() -> None:
    graph, _ = constant()
    sess = await MonitoredSession(Plain(graph)).open()
    assert not sess.should_stop()
    await sess.close()
    assert sess.should_stop()
    await sess.close()
    assert sess.should_stop()


async def test_s5_coordinated_should_stop_on_coord_stop() -> None:
    graph, c = constant()
    async with MonitoredSession(Plain(graph)) as sess:
        sess.coord.request_stop()
        assert sess.should_stop()
        assert await sess.run(c) == 42, "runs work until the session is closed"


async def test_s5_coordinated_no_stop_on_exception_in_main_thread() -> None:
    graph, c = constant()
    async with MonitoredSession(Plain(graph)) as sess:
        with pytest.raises(TypeError, match="None has invalid type"):
            await sess.run([None])
        assert not sess.should_stop()
        assert not sess.coord.should_stop()
        assert await sess.run(c) == 42


@pytest.mark.parametrize("fails", [False, True])
async def test_s5_coordinated_stops_threads_on_close(recorder: Make, fails: bool) -> None:
    """Threads that a hook has registered poll the coordinator; closing ends them before the session."""
    graph, c = constant()
    threads: list[threading.Thread] = []
    last_runs: list[Any] = []

    class Workers(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            def work() -> None:
                while not coord.should_stop():
                    coord.wait_for_stop(0.01)
                last_runs.append(session.run(c))

            for _ in range(3):
                thread = threading.Thread(target=work)
                coord.register_thread(thread)
                thread.start()
                threads.append(thread)

    async with MonitoredSession(Plain(graph), hooks=[Workers()]) as sess:
        for _ in range(3):
            await sess.run(c)
            assert all(thread.is_alive() for thread in threads)
        if fails:
            with pytest.raises(TypeError):
                await sess.run([None])
        assert all(thread.is_alive() for thread in threads)
        assert not sess.should_stop()
    assert not any(thread.is_alive() for thread in threads)
    assert last_runs == [42, 42, 42], "the session was still open for their last run"
    assert sess.should_stop()
    assert sess.coord.should_stop()


async def test_s5_coordinated_propagates_the_exception_with_its_traceback() -> None:
    """The error of a run leaves as the same object, its innermost frame is in TensorFlow's session."""
    graph, _ = constant()
    with graph.as_default():
        bad = tf1.Print(1, [tf1.check_numerics(tf.constant([1.0]) / tf.constant([0.0]), "inf")])
    async with MonitoredSession(Plain(graph)) as sess:
        with pytest.raises(tf.errors.InvalidArgumentError, match="inf") as raised:
            await sess.run(bad)
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert frames[-1].filename.endswith("client/session.py")
        assert frames[0].filename == __file__


# ------------------------------------------------------------------ RecoverableSessionTest


async def test_s5_recoverable_properties_and_run() -> None:
    graph, c = constant()
    creator = Plain(graph)
    monitored = MonitoredSession(creator, recovery=RecoveryPolicy.like_tensorflow())
    with pytest.raises(SessionClosed):
        monitored.plain  # noqa: B018 (it begins with the block, not with the constructor)
    async with monitored as sess:
        assert sess.graph is graph
        assert await sess.run(c) == 42


async def test_s5_recovery(factory: Make, aborted: Make) -> None:
    """Each abort closes the session and makes the next one; the same call is run again; a failing factory leaves."""
    graph, c = constant()
    made = factory(graph, c, [2, 3, 4], aborted)
    with pytest.raises(IndexError, match="pop from empty list"):
        async with MonitoredSession(made, recovery=RecoveryPolicy.like_tensorflow()) as sess:
            assert made.made == 1
            assert await sess.run(c) == 42
            assert made.made == 1
            for expected in (2, 2, 3, 3, 3):
                assert await sess.run(c) == 42
                assert made.made == expected
            assert [session._closed for session in made.sessions] == [True, True, False]
            await sess.run(c)
    assert made.made == 4


async def test_s5_recovery_after_a_failed_recovery(factory: Make, aborted: Make) -> None:
    """The next run asks for a session once more, as TensorFlow's does."""
    graph, c = constant()
    made = factory(graph, c, [1], aborted)
    async with MonitoredSession(made, recovery=RecoveryPolicy.like_tensorflow()) as sess:
        with pytest.raises(IndexError):
            await sess.run(c)
        made._rest.append(None)
        assert await sess.run(c) == 42
        assert made.made == 3


class ReportsDuringRun(SessionCreator):
    """The second run of its first session tells the coordinator of an error from another thread, and maybe fails."""

    def __init__(self, graph: tf.Graph, watched: Any, report: Exception, raises: Exception | None = None) -> None:
        self.graph = graph
        self.made = 0
        self.coord: Any = None
        outer = self

        class Reporting(tf1.Session):
            runs = 0

            def run(self, fetches: Any, *args: Any, **kwargs: Any) -> Any:
                if any(part is watched for part in tf.nest.flatten(fetches)) and outer.made == 1:
                    self.runs += 1
                    if self.runs == 2:
                        thread = threading.Thread(target=outer.coord.request_stop, args=(report,))
                        thread.start()
                        thread.join()
                        if raises is not None:
                            raise raises
                return super().run(fetches, *args, **kwargs)

        self._kind = Reporting

    def create_session(self) -> Any:
        self.made += 1
        return self._kind(graph=self.graph)


def keeps_coord(recorder: Make, creator: Any) -> Any:
    """A hook that hands the session's coordinator to the creator."""

    class Keeper(recorder):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            creator.coord = coord

    return Keeper()


def by_run(sess: Any, c: Any) -> Any:
    return lambda: sess.run(c)


def by_step_fn(sess: Any, c: Any) -> Any:
    def step_fn(step_context: Any) -> Any:
        return step_context.run_with_hooks(fetches=c)

    return lambda: sess.run_step_fn(step_fn)


def by_raw_session(sess: Any, c: Any) -> Any:
    def step_fn(step_context: Any) -> Any:
        return step_context.session.run(c)

    return lambda: sess.run_step_fn(step_fn)


def by_async_step_fn(sess: Any, c: Any) -> Any:
    async def step_fn(step_context: Any) -> Any:
        return await step_context.run_with_hooks(c)

    return lambda: sess.run_step_fn(step_fn)


ways = pytest.mark.parametrize("way", [by_run, by_step_fn, by_raw_session, by_async_step_fn])


@ways
async def test_s5_recovery_from_coordinator_exception(recorder: Make, aborted: Make, way: Make) -> None:
    """The run during which it is reported succeeds; then should_stop() is False, and the next run recovers."""
    graph, c = constant()
    creator = ReportsDuringRun(graph, c, aborted())
    policy = RecoveryPolicy.like_tensorflow()
    async with MonitoredSession(creator, hooks=[keeps_coord(recorder, creator)], recovery=policy) as sess:
        run = way(sess, c)
        assert await run() == 42
        assert await run() == 42
        assert creator.made == 1
        assert not sess.should_stop()
        assert await run() == 42
        assert creator.made == 2
        assert not sess.should_stop()


@ways
async def test_s5_recovery_from_non_preemption_in_coordinator(recorder: Make, way: Make) -> None:
    graph, c = constant()
    error = tf.errors.UnknownError(None, None, "Some fatal")
    creator = ReportsDuringRun(graph, c, error)
    policy = RecoveryPolicy.like_tensorflow()
    with pytest.raises(tf.errors.UnknownError) as raised:
        async with MonitoredSession(creator, hooks=[keeps_coord(recorder, creator)], recovery=policy) as sess:
            run = way(sess, c)
            assert await run() == 42
            assert await run() == 42, "the run that succeeded is not failed by it"
            assert sess.should_stop()
            assert creator.made == 1
    assert raised.value is error


@ways
async def test_s5_recovery_from_session_getting_stuck(recorder: Make, aborted: Make, way: Make) -> None:
    """The run fails with a consequence; the cause is looked up in the coordinator and drives the recovery."""
    graph, c = constant()
    stuck = tf.errors.CancelledError(None, None, "Session got garbage-collected.")
    creator = ReportsDuringRun(graph, c, aborted(), raises=stuck)
    policy = RecoveryPolicy.like_tensorflow()
    async with MonitoredSession(creator, hooks=[keeps_coord(recorder, creator)], recovery=policy) as sess:
        run = way(sess, c)
        assert await run() == 42
        assert creator.made == 1
        assert await run() == 42
        assert creator.made == 2
        assert not sess.should_stop()


# ------------------------------------------------------------------ HookedSessionTest


async def test_s5_hooked_run_passes_all_arguments() -> None:
    seen: list[Any] = []

    class Watching(tf1.Session):
        def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
            seen.append((fetches, feed_dict, options, run_metadata))
            return super().run(fetches, feed_dict, options, run_metadata)

    class Creator(Plain):
        def create_session(self) -> Any:
            return Watching(graph=self.graph)

    graph, c = constant()
    options, metadata, feed = tf1.RunOptions(), tf1.RunMetadata(), {c: 7}
    hook = type("Hook", (tf1.train.SessionRunHook,), {})()
    async with MonitoredSession(Creator(graph), hooks=[hook]) as sess:
        assert await sess.run(c, feed_dict=feed, options=options, run_metadata=metadata) == 7
    assert seen[-1][1:] == (feed, options, metadata)
    assert seen[-1][2] is options
    assert seen[-1][3] is metadata


async def test_s5_hooked_calls_hooks(recorder: Make) -> None:
    graph, c = constant()
    calls: list[str] = []
    first, second = recorder("a", calls), recorder("b", calls)
    async with MonitoredSession(Plain(graph), hooks=[first, second]) as sess:
        del calls[:]
        assert await sess.run(c) == 42
        assert calls == ["a.before_run", "b.before_run", "a.after_run", "b.after_run"]
    for hook in (first, second):
        (values,), (context,) = hook.values, hook.contexts
        assert values == tf1.train.SessionRunValues(None, tf1.RunOptions(), tf1.RunMetadata())
        assert isinstance(context, tf1.train.SessionRunContext)
        assert context.original_args == tf1.train.SessionRunArgs(c)
        assert isinstance(context.session, tf1.Session)
        assert not context.stop_requested
    assert first.contexts[0] is second.contexts[0]


async def test_s5_hooked_should_stop(recorder: Make) -> None:
    graph, c = constant()
    hook = recorder()
    async with MonitoredSession(Plain(graph), hooks=[hook, recorder("other")]) as sess:
        await sess.run(c)
        assert not sess.should_stop()
        hook.stops = True
        assert await sess.run(c) == 42
        assert sess.should_stop()
        with pytest.raises(RuntimeError, match="Run called even after should_stop requested"):
            await sess.run(c)


async def test_s5_hooked_fetches_hook_requests(recorder: Make) -> None:
    graph, c = constant()
    with graph.as_default():
        another, third = tf.constant(5), tf.constant([10])
    first, second = recorder("a", fetches=[another]), recorder("b", fetches=[third])
    async with MonitoredSession(Plain(graph), hooks=[first, recorder("none"), second]) as sess:
        assert await sess.run(c) == 42
        assert await sess.run({"x": [c]}) == {"x": [42]}
    assert [values.results for values in first.values] == [[5], [5]]
    assert [values.results[0].tolist() for values in second.values] == [[10], [10]]


async def test_s5_hooked_feeds(recorder: Make) -> None:
    graph, _ = constant()
    with graph.as_default():
        a, b, user = (tf1.placeholder(tf.int32, name=name) for name in ("a", "b", "user"))
        total, sum_of_all = a + b, a + b + user
    first, second = recorder("a", feed={a: 5}), recorder("b", feed={b: 10})
    mine = {user: 100}
    async with MonitoredSession(Plain(graph), hooks=[first, second]) as sess:
        assert await sess.run(total) == 15, "only hooks have feeds"
        assert await sess.run(sum_of_all, mine) == 115
    assert mine == {user: 100}, "the user's dict is the user's"
    assert first.contexts[1].original_args.feed_dict is mine


async def test_s5_hooked_feeds_conflict(recorder: Make) -> None:
    graph, _ = constant()
    with graph.as_default():
        a = tf1.placeholder(tf.int32, name="a")
        twice = a + a
    for key in (a, "a:0"):
        hooks = [recorder("a", feed={a: 5}), recorder("b", feed={key: 5})]
        async with MonitoredSession(Plain(graph), hooks=hooks) as sess:
            with pytest.raises(RuntimeError, match="Same tensor is fed by two hooks"):
                await sess.run(twice)
        async with MonitoredSession(Plain(graph), hooks=[recorder("a", feed={key: 5})]) as sess:
            with pytest.raises(RuntimeError, match="Same tensor is fed by a SessionRunHook and user"):
                await sess.run(twice, {a: 10})
            assert not sess.should_stop()


# ------------------------------------------------------------------ ways of a creator


async def test_s5_creators_of_every_kind(counter: Make) -> None:
    """A creator's method may be plain or a coroutine function, and return TensorFlow's session or an AsyncSession."""
    from asupervisor import AsyncSession, SessionManager

    made = counter()

    class Own(SessionCreator):
        def __init__(self, graph: tf.Graph) -> None:
            self.graph = graph

        async def create_session(self) -> Any:
            with self.graph.as_default():
                init = tf1.global_variables_initializer()
            return await SessionManager(graph=self.graph).prepare_session("", init_op=init)

    async with MonitoredSession(Own(made.graph)) as sess:
        assert isinstance(sess.plain, AsyncSession)
        assert await sess.run(made.after) == 1

    class Subclass(ChiefSessionCreator):
        called = 0

        async def create_session(self) -> Any:
            self.called += 1
            return await super().create_session()

    creator = Subclass(graph=counter().graph)
    async with MonitoredSession(creator) as sess:
        assert await sess.run("after:0") == 1
    assert creator.called == 1, "a subclass has its own way"

    other = counter()
    with other.graph.as_default():
        original = tf1.train.ChiefSessionCreator()
    async with MonitoredSession(original, graph=other.graph) as sess:
        assert await sess.run(other.after) == 1


async def test_s5_a_creator_by_itself_begins_where_a_monitored_session_does(counter: Make, tmp_path: Path) -> None:
    """From the one checkpoint that is named, instead of the newest one of the directory."""
    made = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph) as sess:
        await sess.run(made.train)
    for named, step in ((None, 1), (tmp_path / "model.ckpt-0", 0)):
        made = counter()
        creator = ChiefSessionCreator(checkpoint_dir=tmp_path, checkpoint_filename_with_path=named, graph=made.graph)
        session = await creator.create_session()
        assert await session.run(made.step) == step
        await session.close()


@pytest.mark.parametrize("kind", [ChiefSessionCreator, WorkerSessionCreator])
async def test_s5_a_creator_by_itself_completes_the_graph_beside_the_event_loop(counter: Make, kind: Any) -> None:
    completed_by = []

    class Told(tf1.train.Scaffold):  # type: ignore[misc]
        def finalize(self) -> Any:
            completed_by.append(threading.current_thread())
            return super().finalize()

    made = counter()
    with made.graph.as_default():
        nothing = tf.constant([], tf.string)  # is not ready: a worker has not to wait for a chief
        scaffold = Told(ready_op=nothing, ready_for_local_init_op=nothing)
    session = await kind(scaffold, graph=made.graph).create_session()
    assert len(completed_by) == 1
    assert completed_by[0] is not threading.current_thread()
    assert not completed_by[0].is_alive(), "the thread is given back"
    await session.close()


async def test_s5_a_creator_by_itself_that_cannot_complete_the_graph_leaves_nothing(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        scaffold = tf1.train.Scaffold(init_op=tf.no_op())
    made.graph.finalize()
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="Graph is finalized and cannot be modified"):
        await ChiefSessionCreator(scaffold, graph=made.graph).create_session()
    assert threading.active_count() == before


async def test_s5_a_creator_that_fails_leaves_the_enter(recorder: Make) -> None:
    class Failing(Plain):
        def create_session(self) -> Any:
            raise KeyError("no session")

    graph, _ = constant()
    hook = recorder()
    with pytest.raises(KeyError, match="no session"):
        async with MonitoredSession(Failing(graph), hooks=[hook]):
            pass
    assert hook.calls == ["hook.begin", "hook.finish"]
    assert hook.outcomes[0].reason == "error"
    assert isinstance(hook.outcomes[0].error, KeyError)


async def test_s5_stop_during_the_start() -> None:
    waiting = threading.Event()
    release = threading.Event()

    class Slow(Plain):
        def create_session(self) -> Any:
            waiting.set()
            release.wait(20)
            return super().create_session()

    graph, _ = constant()
    sess = MonitoredSession(Slow(graph))

    async def enter() -> None:
        async with sess:
            pass

    task = asyncio.create_task(enter())
    while not waiting.is_set():
        await asyncio.sleep(0.001)
    sess.request_stop()
    with pytest.raises(StopRequested):
        await task
    release.set()
