"""Issue 2, "Bad input": an error at the earliest moment that names the object and the remedy; nothing leaks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import (
    LogdirInUse,
    LogdirNotWritable,
    SessionActive,
    SessionClosed,
    Supervisor,
    UnknownMaster,
    WrongEventLoop,
)
from asupervisor.checkpoint import lock

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


async def works(sv: Supervisor, sess: Any, made: Any) -> None:
    """Everything else is still running."""
    assert not sv.should_stop()
    await sess.run(made.train, made.feed)
    assert sv.status().error is None


# ------------------------------------------------------------------ fetches and feeds


@pytest.mark.parametrize(
    ("fetch", "error", "match"),
    [
        (None, TypeError, "NoneType"),
        (3.5, TypeError, "3.5"),
        ("missing:0", ValueError, "missing:0"),
        (["loss:0", None], TypeError, "NoneType"),
        ({"a": object()}, TypeError, "object"),
        (lambda: 1, TypeError, "function"),
    ],
)
async def test_a_wrong_fetch(fetch: Any, error: type[Exception], match: str, model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        with pytest.raises(error, match=match):
            await sess.run(fetch, made.feed)
        await works(sv, sess, made)


@pytest.mark.parametrize(
    "feed",
    [
        {"x:0": [[1.0, 2.0, 3.0]]},
        {"x:0": "text"},
        {"x:0": None},
        {"nothing:0": 1.0},
        {3: 1.0},
        [1.0],
        {"x:0": tf.sparse.SparseTensor([[0, 0]], [1.0], [1, 2])},
    ],
    ids=["shape", "dtype", "None", "name", "key", "no dict", "sparse"],
)
async def test_a_wrong_feed(feed: Any, model: Callable[..., Any]) -> None:
    """The same error as TensorFlow's own `run`, and no step."""
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        with pytest.raises(Exception) as theirs:
            await sess.call(lambda raw: raw.run(made.train, feed))
        with pytest.raises(type(theirs.value)) as ours:
            await sess.run(made.train, feed)
        assert str(ours.value) == str(theirs.value)
        assert await sess.run(made.step) == 0
        await works(sv, sess, made)


async def test_a_feed_that_is_missing_names_the_placeholder(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        with pytest.raises(tf.errors.InvalidArgumentError, match="placeholder tensor 'x'"):
            await sess.run(made.train)
        await works(sv, sess, made)


async def test_a_tensor_of_another_graph(model: Callable[..., Any]) -> None:
    made, other = model(), model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        with pytest.raises(ValueError, match="not an element of this graph"):
            await sess.run(other.loss, made.feed)
        with pytest.raises(TypeError, match="not an element of this graph"):
            await sess.run(made.loss, {other.x: [[1.0, 1.0]]})
        with pytest.raises(ValueError, match="graph is different from the session's graph"):
            other.loss.eval(session=sess)
        await works(sv, sess, made)


async def test_an_eager_tensor_as_fetch_and_as_feed(model: Callable[..., Any], tf_mode: str) -> None:
    if tf_mode == "v1":
        pytest.skip("there are none with v2 behaviour off")
    made = model()
    sv = Supervisor(graph=made.graph)
    eager = tf.constant([[1.0, 1.0]])
    async with sv.managed_session() as sess:
        for fetches, feeds in ((eager, None), (made.train, {made.x: eager})):
            with pytest.raises(Exception) as theirs:
                await sess.call(lambda raw, what=(fetches, feeds): raw.run(*what))
            with pytest.raises(type(theirs.value)) as ours:
                await sess.run(fetches, feeds)
            assert str(ours.value) == str(theirs.value)
        await works(sv, sess, made)


@pytest.mark.parametrize("name", ["ready_op", "init_op", "local_init_op", "summary_op", "global_step"])
def test_an_op_of_another_graph_in_the_constructor(name: str, model: Callable[..., Any]) -> None:
    made, other = model(), model()
    with pytest.raises(ValueError, match=f"'{name}'.*another graph"):
        Supervisor(graph=made.graph, **{name: other.loss})
    assert not made.graph.finalized, "nothing was done to the graph"
    assert not made.graph.get_collection(tf1.GraphKeys.INIT_OP)


@pytest.mark.parametrize("name", ["ready_op", "init_op", "summary_op", "global_step"])
def test_an_eager_tensor_in_the_constructor(name: str, model: Callable[..., Any], tf_mode: str) -> None:
    if tf_mode == "v1":
        pytest.skip("there are none with v2 behaviour off")
    made = model()
    with pytest.raises(ValueError, match=f"'{name}'.*eager"):
        Supervisor(graph=made.graph, **{name: tf.constant(1)})


def test_eager_mode_without_a_graph(tf_mode: str) -> None:
    """TensorFlow's own error; with v2 behaviour off there is a default graph."""
    if tf_mode == "v1":
        with tf.Graph().as_default() as graph:
            assert Supervisor().graph is graph
    else:
        with pytest.raises(RuntimeError, match=r"incompatible with eager execution.*graph=graph"):
            Supervisor()


def test_the_default_graph_is_the_callers() -> None:
    with tf.Graph().as_default() as graph:
        assert Supervisor().graph is graph


def test_a_graph_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"'graph' must be a tf\.Graph"):
        Supervisor(graph="digits")  # type: ignore[arg-type]


def test_a_finalised_graph_that_lacks_something(model: Callable[..., Any]) -> None:
    made = model()
    made.graph.finalize()
    with pytest.raises(RuntimeError, match=r"finalised and has no ready_op.*before the graph is finalised.*ready_op="):
        Supervisor(graph=made.graph)


# ------------------------------------------------------------------ numbers and options


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"save_model_secs": -1}, ValueError, "save_model_secs"),
        ({"save_summaries_secs": -0.5}, ValueError, "save_summaries_secs"),
        ({"save_model_steps": -1}, ValueError, "save_model_steps"),
        ({"save_summaries_steps": -1}, ValueError, "save_summaries_steps"),
        ({"stop_grace_secs": -1}, ValueError, "stop_grace_secs"),
        ({"stop_grace_secs": float("nan")}, ValueError, "stop_grace_secs"),
        ({"save_model_secs": True}, TypeError, "save_model_secs"),
        ({"save_model_steps": 1.5}, TypeError, "save_model_steps"),
        ({"recovery_wait_secs": -1}, ValueError, "recovery_wait_secs"),
        ({"save_model_secs": "often"}, TypeError, "save_model_secs"),
        ({"stop_grace_secs": None}, TypeError, "stop_grace_secs"),
        ({"nonfinite": "maybe"}, ValueError, "nonfinite"),
        ({"checkpoint_basename": "a/b"}, ValueError, "checkpoint_basename"),
        ({"checkpoint_basename": ""}, ValueError, "checkpoint_basename"),
        ({"checkpoint_basename": ".m"}, ValueError, "begin with a dot"),
        (
            {"checkpoint_basename": "m[0]"},
            ValueError,
            r"basename must not contain '\[0\]'.*never be restored",
        ),
        ({"saver": object()}, TypeError, "saver"),
        ({"summary_writer": object()}, TypeError, "summary_writer"),
        ({"session_manager": object()}, TypeError, "session_manager"),
        ({"logdir": 5}, TypeError, "logdir"),
        ({"logdir": "gs://bucket/run"}, ValueError, "remote address"),
        ({"init_fn": lambda: None}, TypeError, "init_fn"),
        ({"init_fn": 5}, TypeError, "init_fn"),
        ({"clean_stop_exception_types": [ValueError("instance")]}, TypeError, "clean_stop_exception_types"),
        ({"executor": object()}, TypeError, "executor"),
    ],
)
def test_options_that_cannot_work(
    options: dict[str, Any], error: type[Exception], match: str, model: Callable[..., Any], tmp_path: Path
) -> None:
    made = model()
    with pytest.raises(error, match=match):
        Supervisor(**{"graph": made.graph, "logdir": str(tmp_path / "log"), **options})
    assert not (tmp_path / "log").exists()
    assert not made.graph.finalized


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("summary_op", lambda: tf.constant(1.0), TypeError),
        ("summary_op", lambda: [tf.constant(1)], TypeError),
        ("global_step", lambda: tf.constant(1.5), TypeError),
        ("global_step", lambda: tf.constant([1, 2]), ValueError),
    ],
)
def test_ops_of_the_wrong_kind(name: str, make: Any, error: type[Exception], model: Callable[..., Any]) -> None:
    made = model()
    with made.graph.as_default():
        op = make()
    with pytest.raises(error, match=name):
        Supervisor(graph=made.graph, **{name: op})
    assert not made.graph.finalized


async def test_a_config_that_is_none(model: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"config must be a tf\.compat\.v1\.ConfigProto, not 5"):
        async with Supervisor(graph=model().graph).managed_session(config=5):
            pytest.fail("must not be entered")


# ------------------------------------------------------------------ the directory


@pytest.mark.parametrize("obstacle", ["a file in its place", "a file on the way"])
async def test_a_logdir_that_cannot_be_written(obstacle: str, model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    (tmp_path / "file").write_text("here")
    logdir = tmp_path / "file" if obstacle == "a file in its place" else tmp_path / "file" / "deeper"
    sv = Supervisor(graph=made.graph, logdir=str(logdir))
    for _ in range(2):  # and the supervisor can be used again
        with pytest.raises(LogdirNotWritable, match=r"cannot be written.*another logdir") as raised:
            async with sv.managed_session():
                pytest.fail("must not be entered")
        assert raised.value.path == str(logdir)
        assert isinstance(raised.value, OSError)
    (tmp_path / "file").unlink()
    async with sv.managed_session() as sess:
        await works(sv, sess, made)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_logdir_without_permission(model: Callable[..., Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LogdirNotWritable, match="cannot be written"):
        async with Supervisor(graph=model().graph, logdir=str(tmp_path / "log")).managed_session():
            pytest.fail("must not be entered")


async def test_a_logdir_that_another_chief_holds(
    model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WAIT_SECS", 0.2)  # nobody comes in time
    first, second = model(), model()
    sv, other = (Supervisor(graph=made.graph, logdir=str(tmp_path)) for made in (first, second))
    async with sv.managed_session(start_standard_services=False) as sess:
        await sv.summary_writer.flush()
        while not (tmp_path / "graph.pbtxt").exists() or not (tmp_path / "journal.jsonl").exists():
            await asyncio.sleep(0.01)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(LogdirInUse) as raised:
            async with other.managed_session():
                pytest.fail("must not be entered")
        assert raised.value.pid == os.getpid()
        assert sorted(os.listdir(tmp_path)) == before, "it has written nothing"
        await works(sv, sess, first)
        await sv.save()
    async with other.managed_session() as sess:
        assert await sess.run(second.step) == 1


@pytest.mark.parametrize("name", ["a[ab]", "[!a]", "[a]]", "[]a]", "a\\b", "\\", "[a-", "[[.a", "[x/y]"])
@pytest.mark.parametrize("argument", ["logdir", "init_from", "checkpoint_filename_with_path"])
def test_a_path_that_tensorflow_takes_for_a_pattern(
    argument: str, name: str, model: Callable[..., Any], tmp_path: Path
) -> None:
    """Its writers write there, its readers find nothing: told before there is anything to lose."""
    made = model()
    options = {"logdir": tmp_path / "log", argument: tmp_path / name / "below"}
    with pytest.raises(ValueError, match=rf"{argument} must not contain .*below.* never be restored.*Choose a path"):
        Supervisor(graph=made.graph, **options)
    assert not list(tmp_path.iterdir())
    assert not made.graph.finalized


def test_a_pattern_above_a_relative_path(
    model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "[ab]").mkdir()
    monkeypatch.chdir(tmp_path / "[ab]")
    with pytest.raises(ValueError, match=r"logdir must not contain '\[ab\]'"):
        Supervisor(graph=model().graph, logdir="run")


def test_a_pattern_half_in_the_name(model: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"logdir with checkpoint_basename must not contain '\[a/m\]'"):
        Supervisor(graph=model().graph, logdir=tmp_path / "[a", checkpoint_basename="m]")


async def test_a_path_without_checkpoints_may_be_any(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=tmp_path / "[ab]", saver=None)
    async with sv.managed_session() as sess:
        await works(sv, sess, made)


@pytest.mark.parametrize("name", ["[a", "a]", "{a,b}", "*", "?", "[]", "]a[", "[z-b", "[:a", " a ", "50% ü"])
async def test_a_path_that_looks_like_a_pattern_and_is_none(
    name: str, model: Callable[..., Any], tmp_path: Path
) -> None:
    for begun in (0, 1):
        made = model()
        sv = Supervisor(graph=made.graph, logdir=tmp_path / name, save_model_secs=0)
        async with sv.managed_session() as sess:
            assert await sess.run(made.step) == begun
            await works(sv, sess, made)
            await sv.save()


# ------------------------------------------------------------------ when and where


@pytest.mark.parametrize(
    "use",
    [
        lambda sv: sv.loop(60, print),
        lambda sv: sv.start_soon(asyncio.sleep, 0),
        lambda sv: sv.pause(),
        lambda sv: sv.resume(),
        lambda sv: sv.start_standard_services(None),
        lambda sv: sv.start_queue_runners(None),
    ],
    ids=["loop", "start_soon", "pause", "resume", "start_standard_services", "start_queue_runners"],
)
async def test_before_and_after_there_is_a_session(use: Any, model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs an active session of supervisor-.*managed_session\(\) first"):
        use(sv)
    async with sv.managed_session():
        pass
    with pytest.raises(RuntimeError, match=r"managed_session\(\)"):
        use(sv)


async def test_save_and_summary_before_there_is_a_session(model: Callable[..., Any], tmp_path: Path) -> None:
    sv = Supervisor(graph=model().graph, logdir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"save\(\) needs an active session"):
        await sv.save()
    with pytest.raises(RuntimeError, match=r"summary_computed\(\) needs an active session"):
        await sv.summary_computed(None, b"")


@pytest.mark.parametrize("lacks", ["chief", "logdir", "saver"])
async def test_save_where_nothing_can_be_saved(lacks: str, counter: Callable[..., Any], tmp_path: Path) -> None:
    with tf.device("/cpu:0"):
        made = counter()
    options: dict[str, Any] = {"logdir": None if lacks == "logdir" else str(tmp_path)}
    if lacks == "saver":
        options["saver"] = None
    if lacks == "chief":
        options |= {"is_chief": False, "ready_op": None}
        for op in made.graph.get_operations():
            if op.type == "VariableV2":
                op._set_device("/cpu:0")
    sv = Supervisor(graph=made.graph, **options)
    async with sv.managed_session():
        with pytest.raises(RuntimeError, match=r"cannot save: that needs a chief with a logdir and a saver"):
            await sv.save()


async def test_a_second_session_while_one_is_active(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        for _ in range(2):
            with pytest.raises(SessionActive, match=r"supervisor-\d+ already has an active session"):
                async with sv.managed_session():
                    pytest.fail("must not be entered")
        with pytest.raises(SessionActive):
            await sv.prepare_or_wait_for_session()
        await works(sv, sess, made)
    async with sv.managed_session() as sess:
        await works(sv, sess, made)


async def test_the_same_block_twice(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    block = sv.managed_session()
    async with block as sess:
        with pytest.raises(RuntimeError, match=r"entered already|active session"):
            async with block:
                pytest.fail("must not be entered")
        await works(sv, sess, made)


async def test_a_session_after_its_close(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        pass
    for use in (
        lambda: sess.run(made.loss, made.feed),
        lambda: sess.call(lambda raw: None),
        lambda: made.loss.eval(session=sess, feed_dict=made.feed),
    ):
        with pytest.raises(SessionClosed, match=r"closed.*managed_session\(\) again"):
            await use()
    with pytest.raises(SessionClosed):
        sess.run(made.loss)  # at once, without an await
    with pytest.raises(SessionClosed):
        sess.steps(made.loss)
    await sess.close()  # idempotent


async def test_a_session_of_another_supervisor(model: Callable[..., Any], tmp_path: Path) -> None:
    first, second = model(), model()
    sv, other = Supervisor(graph=first.graph, logdir=str(tmp_path)), Supervisor(graph=second.graph)
    async with sv.managed_session(start_standard_services=False) as sess, other.managed_session() as foreign:
        with pytest.raises(ValueError, match="another session"):
            sv.start_standard_services(foreign)
        with pytest.raises(ValueError, match="another session"):
            sv.start_queue_runners(foreign)
        with pytest.raises(ValueError, match="another session"):
            await sv.summary_computed(foreign, b"")
        with pytest.raises(TypeError, match="must be the AsyncSession"):
            sv.start_queue_runners("session")  # type: ignore[arg-type]
        await works(sv, sess, first)


async def test_run_off_the_loop(model: Callable[..., Any]) -> None:
    """At once, and it names what works there."""
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:

        def off_the_loop() -> Any:
            with pytest.raises(WrongEventLoop, match=r"sess.blocking"):
                sess.run(made.loss, made.feed)
            with pytest.raises(WrongEventLoop, match="off the event loop"):
                sv.loop(60, print)
            with pytest.raises(WrongEventLoop, match="off the event loop"):
                sv.start_soon(asyncio.sleep, 0)
            return sess.blocking.run(made.loss, made.feed)

        assert await asyncio.to_thread(off_the_loop) == pytest.approx(1.0)
        with pytest.raises(WrongEventLoop, match=r"Await sess.run"):
            sess.blocking.run(made.loss, made.feed)
        await works(sv, sess, made)


async def test_another_event_loop_while_active(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    seen: list[BaseException | None] = []

    async def elsewhere() -> None:
        async def attempt(use: Any) -> None:
            try:
                result = use()
                if asyncio.iscoroutine(result):
                    await result
                seen.append(None)
            except Exception as error:
                seen.append(error)

        await attempt(lambda: sv.prepare_or_wait_for_session())
        await attempt(lambda: sv.stop())
        await attempt(lambda: sv.save())
        await attempt(lambda: sess.run(made.loss, made.feed))
        await attempt(lambda: sess.close())
        await attempt(lambda: sv.wait_for_stop())

    async with sv.managed_session() as sess:
        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        thread.join()
        assert not sv.should_stop(), "a stop() that was refused has not stopped anything"
        await works(sv, sess, made)
    assert isinstance(seen[0], SessionActive)
    assert [type(error) for error in seen[1:]] == [WrongEventLoop] * 5


# ------------------------------------------------------------------ callbacks


def three(a: Any, b: Any, c: Any) -> None: ...


async def three_async(a: Any, b: Any, c: Any) -> None: ...


async def test_a_callback_with_the_wrong_arity(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        for target in (three, three_async):
            with pytest.raises(TypeError, match=r"three.*\(a.*cannot be called with args=\(1,\)"):
                sv.loop(60, target, (1,))
            with pytest.raises(TypeError, match="three"):
                sv.loop(60, target, (1, 2), {"d": 3})
        with pytest.raises(TypeError, match=r"three_async.*cannot be called"):
            sv.start_soon(three_async, 1)
        with pytest.raises(TypeError, match="callable"):
            sv.loop(60, "print")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timer_interval_secs"):
            sv.loop(-1, print)
        assert [service.name for service in sv.status().services] == []
        await works(sv, sess, made)


async def test_start_soon_needs_a_coroutine_function(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    called: list[int] = []
    async with sv.managed_session() as sess:
        with pytest.raises(TypeError, match=r"start_soon\(\) needs a coroutine function: append returned None.*loop\("):
            sv.start_soon(called.append, 1)  # type: ignore[arg-type]
        coroutine = three_async(1, 2, 3)
        with pytest.raises(TypeError, match="coroutine function"):
            sv.start_soon(coroutine)  # type: ignore[arg-type]
        coroutine.close()
        assert sv.status().services == ()
        await works(sv, sess, made)


async def test_request_stop_with_something_that_is_no_exception(model: Callable[..., Any]) -> None:
    made = model()
    sv = Supervisor(graph=made.graph)
    async with sv.managed_session() as sess:
        for wrong in ("now", 3, ValueError):
            with pytest.raises(TypeError, match="exception"):
                sv.request_stop(wrong)
        await works(sv, sess, made)


@pytest.mark.parametrize("summary", [3, "text that is no proto", object(), None])
async def test_a_summary_that_is_none(summary: Any, model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        with pytest.raises((TypeError, ValueError)):
            await sv.summary_computed(sess, summary, 1)
        await works(sv, sess, made)


# ------------------------------------------------------------------ summaries, masters, init


async def test_a_summary_op_that_needs_a_feed_that_nobody_gives(
    tmp_path: Path, clock: Any, heard: Any, counter: Callable[..., Any]
) -> None:
    """Named as soon as three intervals have gone by; training goes on. TensorFlow's training ends with it (F12)."""
    made = counter()
    with made.graph.as_default():
        unfed = tf1.placeholder(tf.float32, [], name="unfed")
        tf1.summary.scalar("unfed_summary", unfed)
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=10, save_model_secs=0, clock=clock)
    events = sv.events()
    async with sv.managed_session() as sess:
        await clock.sleepers(2)
        for _ in range(5):
            await sess.run(made.train)
            await clock.advance(10)
            await clock.sleepers(2)
        event = await heard(events, "summary.no_carrier")
        assert "unfed" in event.message
        await works(sv, sess, made)


@pytest.mark.parametrize("master", ["localhost:2222", "http://x:1", "remote", 5])
async def test_a_master_that_cannot_work(master: Any, model: Callable[..., Any], tmp_path: Path) -> None:
    sv = Supervisor(graph=model().graph, logdir=str(tmp_path))
    with pytest.raises(UnknownMaster, match=r"''.*'local'.*grpc://host:port") as raised:
        async with sv.managed_session(master):
            pytest.fail("must not be entered")
    assert raised.value.master == master


async def test_the_init_ops_do_not_make_it_ready(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0)
        tf1.get_variable("w", initializer=1.0)
    sv = Supervisor(graph=graph, init_op=v.initializer, logdir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)did not make model ready.*\bw\b"):
        async with sv.managed_session():
            pytest.fail("must not be entered")


async def test_no_way_to_initialise(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", initializer=1.0)
    sv = Supervisor(graph=graph, init_op=None, local_init_op=None)
    with pytest.raises(RuntimeError, match="no init_op or init_fn or local_init_op was given"):
        async with sv.managed_session():
            pytest.fail("must not be entered")


async def test_init_feeds_of_the_wrong_shape(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        p = tf1.placeholder(tf.float32, [3])
        tf1.get_variable("v", initializer=p)
    sv = Supervisor(graph=graph, init_feed_dict={p: np.zeros(2, np.float32)}, logdir=str(tmp_path))
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        async with sv.managed_session():
            pytest.fail("must not be entered")


def test_without_asyncio(model: Callable[..., Any]) -> None:
    """No loop at all: a clear error, not a hang."""
    sv = Supervisor(graph=model().graph)
    with pytest.raises(RuntimeError, match=r"asyncio|event loop"):
        sv.managed_session().__aenter__().send(None)
    with pytest.raises(RuntimeError, match=r"asyncio|event loop"):
        sv.prepare_or_wait_for_session().send(None)
    with pytest.raises(RuntimeError, match=r"event loop"):
        sv.events()
