"""The code of the two texts about monitored sessions, ported block by block: what they promise, holds.

The French one answers how monitored sessions work and which graph they use; the Chinese one explains
MonitoredTrainingSession, MonitoredSession and the order of everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import asupervisor
from asupervisor import ChiefSessionCreator, DeviceExecutor, MonitoredSession, MonitoredTrainingSession

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


# ------------------------------------------------------------------ the French text


async def test_french_two_graphs() -> None:
    """`example()`: the session uses the default graph of where it is made; another graph's tensor is refused."""
    g1 = tf.Graph()
    with g1.as_default():
        c1 = tf.constant(42)
        assert c1.graph is g1
    g2 = tf.Graph()
    with g2.as_default():
        c2 = tf.constant(3.14)
        assert c2.graph is g2

    with g1.as_default():
        async with MonitoredTrainingSession() as sess:
            assert await c1.eval(session=sess) == 42
            with pytest.raises(ValueError, match="the tensor's graph is different from the session's graph"):
                c2.eval(session=sess)

    # The plain session of the same text.
    executor = DeviceExecutor()
    plain = asupervisor.AsyncSession(tf1.Session(graph=g2), executor)
    assert await c2.eval(session=plain) == pytest.approx(3.14)
    with pytest.raises(ValueError, match="the tensor's graph is different from the session's graph"):
        c1.eval(session=plain)
    await plain.close()
    await executor.aclose(20)


async def test_french_the_graph_can_be_given() -> None:
    """What the question misses: "je ne peux pas spécifier explicitement le graphe"."""
    graph = tf.Graph()
    with graph.as_default():
        c = tf.constant(42)
    for sess in (
        MonitoredTrainingSession(graph=graph),
        MonitoredSession(graph=graph),
        asupervisor.SingularMonitoredSession(graph=graph),
        MonitoredSession(ChiefSessionCreator(graph=graph)),
    ):
        async with sess:
            assert await sess.run(c) == 42
            assert sess.graph is graph


async def run_my_model(train_op: Any, session_args: dict[str, Any]) -> Any:
    async with MonitoredTrainingSession(**session_args) as sess:
        return await sess.run(train_op)


async def test_french_run_my_model_alone(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        assert await run_my_model(made.after, {}) == 1


async def test_french_run_my_model_distributed(counter: Make, server: Any) -> None:
    """As chief and as worker of a cluster: `master=server.target, is_chief=(task_index == 0)`."""
    chief, worker = counter(), counter()
    with chief.graph.as_default():
        chief_session = MonitoredTrainingSession(master=server.target, is_chief=True)
    async with chief_session as sess:
        assert await sess.run(chief.after) == 1
        with worker.graph.as_default():
            task_index = 1
            args = {"master": server.target, "is_chief": task_index == 0}
            assert await run_my_model(worker.after, args) == 2, "it found the chief's variable"
        assert await sess.run(chief.step) == 2


async def test_french_initialisation(variables: str) -> None:
    """The three chores: variables are initialised, queues are started, writers are set up."""
    graph = tf.Graph()
    with graph.as_default():
        w = tf1.get_variable("w", initializer=5.0)
        names = tf1.train.string_input_producer(["a", "b"], shuffle=False, num_epochs=1)
        taken = names.dequeue()
        async with MonitoredTrainingSession() as sess:
            assert await sess.run(w) == 5.0
            assert await sess.run(taken) == b"a"
            assert await sess.run(taken) == b"b"
            while not sess.should_stop():
                await sess.run(taken)


async def test_french_order_of_the_construction(counter: Make, recorder: Make, tmp_path: Path) -> None:
    """ "Il commence les crochets": hooks begin, the chief initialises and restores, run() is decorated by the hooks."""
    made, hook = counter(), recorder()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train)
    assert hook.calls == [
        f"hook.{call}" for call in ("begin", "after_create_session", "before_run", "after_run", "end", "finish")
    ]


# ------------------------------------------------------------------ the Chinese text


async def test_chinese_arguments(counter: Make, recorder: Make, tmp_path: Path, scalars_of: Make) -> None:
    """MonitoredTrainingSession with each of the arguments that the article explains."""
    made, hook, chief_only = counter(), recorder(), recorder("chief")
    with made.graph.as_default():
        tf1.summary.scalar("step_now", made.step)
        scaffold = tf1.train.Scaffold()
        stop = tf1.train.StopAtStepHook(last_step=7)
        nan = tf1.train.NanTensorHook(tf.cast(made.after, tf.float32))
    async with MonitoredTrainingSession(
        master="",
        is_chief=True,
        checkpoint_dir=str(tmp_path),
        scaffold=scaffold,
        hooks=[stop, nan, hook],
        chief_only_hooks=[chief_only],
        save_checkpoint_secs=600,
        save_summaries_steps=3,
        save_summaries_secs=None,
        config=tf1.ConfigProto(allow_soft_placement=True),
        stop_grace_period_secs=120,
        log_step_count_steps=3,
        graph=made.graph,
    ) as sess:
        while not sess.should_stop():
            await sess.run(made.train)
    assert scaffold.saver is not None
    assert hook.calls.count("hook.after_run") == chief_only.calls.count("chief.after_run") == 7
    found = scalars_of(tmp_path)
    assert found["step_now"] == [0, 3, 6]
    assert found["global_step/sec"] == [3, 6]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-7")


async def test_chinese_monitored_session_with_saver_and_summary_hooks(
    counter: Make, tmp_path: Path, scalars_of: Make
) -> None:
    """The example usage, TensorFlow's own hooks included."""
    made = counter()
    with made.graph.as_default():
        summary = tf1.summary.scalar("step_now", made.step)
        scaffold = tf1.train.Scaffold()
        saver_hook = tf1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, scaffold=scaffold)
        summary_hook = tf1.train.SummarySaverHook(save_steps=2, output_dir=str(tmp_path), summary_op=summary)
        stop_hook = tf1.train.StopAtStepHook(last_step=5)
        creator = ChiefSessionCreator(scaffold, checkpoint_dir=str(tmp_path))
        async with MonitoredSession(session_creator=creator, hooks=[saver_hook, summary_hook, stop_hook]) as sess:
            while not sess.should_stop():
                await sess.run(made.train)
    tf1.summary.FileWriterCache.clear()
    assert len(scalars_of(tmp_path)["step_now"]) >= 2
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-5")
    again = counter()
    async with MonitoredSession(ChiefSessionCreator(checkpoint_dir=str(tmp_path), graph=again.graph)) as sess:
        assert await sess.run(again.step) == 5


async def test_chinese_order_at_start_run_and_exit(recorder: Make, tmp_path: Path, variables: str) -> None:
    """The three lists of the article, each in its order."""
    calls: list[str] = []
    graph = tf.Graph()
    with graph.as_default():
        tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", initializer=1.0)
        x = tf1.placeholder_with_default(0.0, [], name="x")
        queue = tf1.FIFOQueue(1, tf.float32, shapes=[()])
        tf1.train.add_queue_runner(tf1.train.QueueRunner(queue, [queue.enqueue(1.0)]))
        size, take = queue.size(), queue.dequeue()
        merged = x + w

    class Hook(recorder):  # type: ignore[misc]
        def begin(self) -> None:
            super().begin()
            assert not graph.finalized

        def after_create_session(self, session: Any, coord: Any) -> None:
            super().after_create_session(session, coord)
            assert graph.finalized
            assert session.run(w) == 1.0

        def before_run(self, run_context: Any) -> Any:
            super().before_run(run_context)
            return tf1.train.SessionRunArgs(size, {x: 4.0})

        def end(self, session: Any) -> None:
            super().end(session)
            assert [session.run(take) for _ in range(5)] == [1.0] * 5, "the queue runners still run"

    class Scaffold(tf1.train.Scaffold):
        def finalize(self) -> Any:
            calls.append("finalize")
            return super().finalize()

    hook = Hook("hook", calls)
    with graph.as_default():
        scaffold = Scaffold(init_fn=lambda scaffold, session: calls.append("init"))
    async with MonitoredSession(
        ChiefSessionCreator(scaffold, checkpoint_dir=tmp_path, graph=graph), hooks=[hook]
    ) as sess:
        assert calls == ["hook.begin", "finalize", "init", "hook.after_create_session"]
        del calls[:]
        assert await sess.run(merged) == 5.0, "the hook's feed was merged"
        assert calls == ["hook.before_run", "hook.after_run"]
        raw = sess.plain.raw
        del calls[:]
    assert calls == ["hook.end", "hook.finish"]
    assert raw._closed


async def test_chinese_out_of_range_is_the_end(variables: str) -> None:
    """ "抑制由于处理完所有输入抛出的OutOfRange错误": the end of the input does not leave the block."""
    graph = tf.Graph()
    with graph.as_default():
        item = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
    seen = []
    async with MonitoredTrainingSession(graph=graph) as sess:
        while not sess.should_stop():
            seen.append(int(await sess.run(item)))
    assert seen == [0, 1, 2]


async def test_chinese_lost_sessions_are_made_anew(counter: Make, raiser: Make, tmp_path: Path) -> None:
    """ "如果发生了AbortedError或者UnavailableError": before the next run the session is recovered or initialised."""
    for kind in (tf.errors.AbortedError, tf.errors.UnavailableError):
        made = counter()
        hook = raiser("before_run", kind(None, None, "lost"), at=3)
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path / kind.__name__,
            hooks=[hook],
            graph=made.graph,
            recovery=asupervisor.RecoveryPolicy.like_tensorflow(),
        ) as sess:
            await sess.run(made.train)
            await sess.run(made.train)
            await sess.save()
            assert await sess.run(made.after) == 3
