"""BEHAVIOURS.md, section 4 (initialisation, restoring, roles) and items 21, 26 and 28, on real sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import Supervisor

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def device() -> Any:
    return tf.device("/cpu:0")


# ------------------------------------------------------------------ initialisation


async def test_s4_init_op(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0, 2.0, 3.0])
    sv = Supervisor(graph=graph)
    assert sv.init_op is not None
    async with sv.managed_session() as sess:
        assert (await sess.run(v)).tolist() == [1.0, 2.0, 3.0]


async def test_s4_init_fn(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0, 2.0, 3.0])

    def init_fn(sess: Any) -> None:
        sess.run(v.initializer)

    sv = Supervisor(graph=graph, init_op=None, init_fn=init_fn)
    assert sv.init_op is None
    async with sv.managed_session() as sess:
        assert (await sess.run(v)).tolist() == [1.0, 2.0, 3.0]


async def test_s4_init_op_with_feed_dict(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        p = tf1.placeholder(tf.float32, [3])
        v = tf1.get_variable("v", initializer=p, validate_shape=True)
    feed = {p: [1.0, 2.0, 3.0]}
    sv = Supervisor(graph=graph, init_feed_dict=feed)
    assert sv.init_feed_dict is feed
    async with sv.managed_session() as sess:
        assert (await sess.run(v)).tolist() == [1.0, 2.0, 3.0]


def local_after_global() -> tuple[tf.Graph, Any, Any, Any]:
    """v = 1; the local w is computed from v, once v is ready."""
    graph = tf.Graph()
    with graph.as_default(), device():
        v = tf1.get_variable("v", initializer=1)
        w = tf1.get_variable("w", initializer=v, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        ready = tf1.report_uninitialized_variables([v])
        tf1.add_to_collection(tf1.GraphKeys.READY_FOR_LOCAL_INIT_OP, ready)
        step = tf1.assign_add(v, 1)
    return graph, v, w, step


@pytest.mark.allow_leak("files")  # a TensorFlow server lives as long as its process
async def test_s4_ready_for_local_init_op(variables: str, tmp_path: Path) -> None:
    """A chief and another one on the same server: the other waits for v, then makes its own w of it."""
    server = tf.distribute.Server.create_local_server()
    chief_graph, v, w, step = local_after_global()
    other_graph, other_v, other_w, other_step = local_after_global()
    chief = Supervisor(graph=chief_graph, logdir=str(tmp_path), save_model_secs=None)
    other = Supervisor(graph=other_graph, is_chief=False, recovery_wait_secs=1)
    assert chief.ready_for_local_init_op is not None

    waiting = asyncio.ensure_future(other.prepare_or_wait_for_session(server.target))
    async with chief.managed_session(server.target) as chief_sess:
        other_sess = await waiting
        assert await chief_sess.run([v, w]) == [1, 1]
        assert await other_sess.run([other_v, other_w]) == [1, 1]
        await other_sess.run(other_step)
        assert await chief_sess.run(v) == 2, "the variable is shared"
        await chief_sess.run(step)
        assert await other_sess.run(other_v) == 3
        await other.stop()
        await other_sess.close()


async def test_s4_ready_for_local_init_op_after_a_restore(variables: str, tmp_path: Path) -> None:
    """The local variable is computed from what was restored, not from the initial value."""
    graph, v, w, _ = local_after_global()
    with graph.as_default():
        to_ten = tf1.assign(v, 10)
    async with Supervisor(graph=graph, logdir=str(tmp_path)).managed_session() as sess:
        await sess.run(to_ten)
    assert list(tmp_path.glob("events.out*")), "an event file was written, too"
    graph, v, w, _ = local_after_global()
    async with Supervisor(graph=graph, logdir=str(tmp_path)).managed_session() as sess:
        assert await sess.run([v, w]) == [10, 10]


@pytest.mark.parametrize("is_chief", [True, False])
async def test_s4_local_init_op(is_chief: bool, variables: str) -> None:
    """Local variables and tables are initialised although there are no global ones, for a non-chief, too."""
    graph = tf.Graph()
    with graph.as_default(), device():
        v = tf1.get_variable("v", initializer=[1.0, 2.0], collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        w = tf1.get_variable("w", initializer=[4, 5], trainable=False, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1)
        found = table.lookup(tf.constant("a"))
    sv = Supervisor(graph=graph, init_op=None, is_chief=is_chief)
    async with sv.managed_session() as sess:
        assert (await sess.run(v)).tolist() == [1.0, 2.0]
        assert (await sess.run(w)).tolist() == [4, 5]
        assert await sess.run(found) == 7


async def test_s4_init_op_fails(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0])
        tf1.get_variable("w", initializer=[2.0])
    sv = Supervisor(graph=graph, init_op=v.initializer)
    with pytest.raises(RuntimeError, match=r"Variables not initialized: w\b"):
        await sv.prepare_or_wait_for_session()


async def test_s4_init_op_fails_for_a_local_variable(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0], collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        tf1.get_variable("w", initializer=[2.0], collections=[tf1.GraphKeys.LOCAL_VARIABLES])
    sv = Supervisor(graph=graph, local_init_op=v.initializer)
    with pytest.raises(RuntimeError, match=r"Variables not initialized: w\b"):
        await sv.prepare_or_wait_for_session()


def test_s4_setup_fails_for_a_variable_without_a_device(variables: str) -> None:
    """With replicas, each ref variable has its device; resource variables are not looked at, as in TensorFlow."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", initializer=[1.0])
    if variables == "ref":
        with pytest.raises(ValueError, match="must have their device set") as raised:
            Supervisor(graph=graph, is_chief=False)
        assert "'v'" in str(raised.value)
        assert not graph.finalized, "nothing was done to the graph"
    else:
        Supervisor(graph=graph, is_chief=False)
    graph = tf.Graph()
    with graph.as_default(), tf.device("/job:ps"):
        tf1.get_variable("v", initializer=[1.0])
    Supervisor(graph=graph, is_chief=False)


def test_s4_default_global_step(variables: str) -> None:
    """A variable that is named so is found, whatever collection it is in."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("global_step", initializer=tf.constant(287, tf.int64))
    sv = Supervisor(graph=graph)
    assert sv.global_step is not None
    with tf1.Session(graph=graph) as raw:
        raw.run(sv.init_op)
        assert raw.run(sv.global_step) == 287


def test_s4_a_global_step_that_is_no_integer_is_none(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("global_step", initializer=1.0)
    assert Supervisor(graph=graph).global_step is None


async def test_s4_restore_from_meta_graph(variables: str, tmp_path: Path) -> None:
    """The graph as it was exported beside a checkpoint is enough to restore it, and to save to the same place."""
    logdir = str(tmp_path)
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v0", initializer=1)
    sv = Supervisor(graph=graph, logdir=logdir)
    async with sv.managed_session():
        pass
    meta = tf.train.latest_checkpoint(logdir) + ".meta"
    graph = tf.Graph()
    with graph.as_default():
        saver = tf1.train.import_meta_graph(meta)
        (v0,) = tf1.global_variables()
        more = tf1.assign_add(v0, 1)
    sv = Supervisor(graph=graph, logdir=logdir, saver=saver)
    assert sv.saver is saver
    async with sv.managed_session() as sess:
        assert await sess.run(v0) == 1
        await sess.run(more)
        await sv.save()
    assert tf.train.load_variable(logdir, "v0") == 2


# ------------------------------------------------------------------ items 21, 26 and 28


async def test_21_a_non_chief_ignores_what_belongs_to_the_chief(counter: Callable[..., Any], tmp_path: Path) -> None:
    with tf.device("/cpu:0"):
        graph = tf.Graph()
    with graph.as_default():
        op = tf.constant(1)
    logdir = tmp_path / "log"
    sv = Supervisor(graph=graph, is_chief=False, logdir=str(logdir), summary_writer=object())
    assert sv.is_chief is False
    assert sv.save_path is None
    assert sv.summary_writer is None
    assert sv.save_model_secs is None
    assert sv.save_summaries_secs is None
    async with sv.managed_session() as sess:
        await sess.run(op)
    assert not logdir.exists(), "not even the directory"


async def test_21_a_chief_has_them(tmp_path: Path) -> None:
    logdir = tmp_path / "log"
    sv = Supervisor(graph=tf.Graph(), logdir=str(logdir))
    assert sv.is_chief is True
    assert sv.save_path == str(logdir / "model.ckpt")
    assert sv.summary_writer is not None
    assert sv.save_model_secs == 600
    assert sv.save_summaries_secs == 120
    assert Supervisor(graph=tf.Graph(), logdir=str(logdir), checkpoint_basename="m").save_path == str(logdir / "m")


async def test_26_checkpoints_and_summaries_work_with_v2_behaviour_on_and_off(
    model: Callable[..., Any], variables: str, tmp_path: Path, tf_mode: str, heard: Any
) -> None:
    """TensorFlow's own threads lack the caller's graph: with v2 behaviour on, its checkpoint thread fails."""
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0.01, save_model_secs=0.01)
    assert tf.executing_eagerly() == (tf_mode == "v2")
    events = sv.events()
    async with sv.managed_session() as sess:
        await heard(events, "checkpoint.saved")
        done = asyncio.ensure_future(heard(events, "summary.recorded"))
        while not done.done():
            await sess.run(made.train, made.feed)
        await done
        step, w = await sess.run([made.step, made.w])
    assert sv.status().error is None
    assert tf.train.load_variable(str(tmp_path), "global_step") == step
    np.testing.assert_array_equal(tf.train.load_variable(str(tmp_path), "w"), w)


def test_28_there_is_no_gate_before_the_local_init_by_default() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", initializer=1.0)
    assert Supervisor(graph=graph).ready_for_local_init_op is None


def test_28_the_graphs_collection_provides_one() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", initializer=1.0)
        ready = tf1.report_uninitialized_variables(tf1.global_variables())
        tf1.add_to_collection(tf1.GraphKeys.READY_FOR_LOCAL_INIT_OP, ready)
    assert Supervisor(graph=graph).ready_for_local_init_op is ready


def test_elements_are_shared_with_tensorflows_own_supervisor(tmp_path: Path) -> None:
    """Both put what they add into the same collections, so one finds what the other made."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.train.get_or_create_global_step()
        tf1.summary.scalar("one", 1.0)
    ours = Supervisor(graph=graph)
    with graph.as_default():
        theirs = tf1.train.Supervisor(graph=graph)
    for name in ("ready_op", "init_op", "saver", "summary_op", "global_step"):
        assert getattr(ours, name) is not None, name
        assert getattr(theirs, name) is getattr(ours, name), name
    assert graph.get_collection(tf1.GraphKeys.LOCAL_INIT_OP) == [ours.local_init_op]
