"""BEHAVIOURS.md, section 4 (summaries, services, roles) and items 18 to 20, 22, 24 and 25, on real sessions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import LatestN, Supervisor
from asupervisor.testing import ManualClock

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def three_scalars() -> tuple[tf.Graph, Any]:
    graph = tf.Graph()
    with graph.as_default():
        tf1.summary.scalar("c1", 1.0)
        tf1.summary.scalar("c2", 2.0)
        tf1.summary.scalar("c3", 3.0)
        merged = tf1.summary.merge_all()
    return graph, merged


# ------------------------------------------------------------------ section 4, the writer


async def test_s4_managed_session_does_not_keep_the_summary_writer(
    tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    """Two blocks, two files, each complete; also within one second, where TensorFlow's names are the same."""
    graph, merged = three_scalars()
    sv = Supervisor(graph=graph, logdir=str(tmp_path), summary_op=None)
    for _ in range(2):
        async with sv.managed_session("", close_summary_writer=True, start_standard_services=False) as sess:
            await sv.summary_computed(sess, await sess.run(merged))
    files = events_of(tmp_path)
    assert len(files) == 2
    for events in files:
        assert kinds_of(events) == ["version", "graph", "meta", "summary:c1+c2+c3:0", "STOP"]
        assert events[0].file_version == "brain.Event:2"


async def test_s4_managed_session_keeps_the_summary_writer(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    graph, merged = three_scalars()
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    for _ in range(2):
        async with sv.managed_session("", close_summary_writer=False, start_standard_services=False) as sess:
            await sv.summary_computed(sess, await sess.run(merged))
    await sv.summary_writer.aclose()
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "summary:c1+c2+c3:0", "summary:c1+c2+c3:0"]


async def test_s4_stop_closes_a_kept_writer_with_a_stop_record(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    graph, _ = three_scalars()
    sv = Supervisor(graph=graph, logdir=str(tmp_path), summary_op=None)
    async with sv.managed_session("", close_summary_writer=False):
        pass
    await sv.stop()
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "STOP"]


@pytest.mark.parametrize("order", ["stop, close", "close, stop", "close"])
async def test_s4_without_a_block_the_writer_is_closed_once(
    order: str, tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    """TensorFlow's session does not know the writer, so closing it leaves the file open there."""
    graph, _ = three_scalars()
    sv = Supervisor(graph=graph, logdir=str(tmp_path), summary_op=None)
    sess = await sv.prepare_or_wait_for_session()
    for step in order.split(", "):
        await (sv.stop() if step == "stop" else sess.close())
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "STOP"]


async def test_s4_stop_may_leave_the_writer_open(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    graph, merged = three_scalars()
    sv = Supervisor(graph=graph, logdir=str(tmp_path), summary_op=None)
    sess = await sv.prepare_or_wait_for_session()
    summary = await sess.run(merged)
    await sv.stop(close_summary_writer=False)
    await sess.close()
    sv.summary_writer.add_summary(summary, 7)
    await sv.stop()
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "summary:c1+c2+c3:7", "STOP"]


async def test_s4_chief_can_write_events(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    graph, merged = three_scalars()
    with graph.as_default():
        shaped = tf.zeros([3, 5], name="shaped")
    sv = Supervisor(graph=graph, is_chief=True, logdir=str(tmp_path), summary_op=None)
    assert sv.summary_op is None
    sess = await sv.prepare_or_wait_for_session("")
    await sv.summary_computed(sess, await sess.run(merged))
    await sess.close()
    await sv.stop()
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "summary:c1+c2+c3:0", "STOP"], "no START without a step"
    graph_def = tf1.GraphDef.FromString(events[1].graph_def)
    (node,) = [node for node in graph_def.node if node.name == shaped.op.name]
    assert [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim] == [3, 5]
    meta = tf1.MetaGraphDef.FromString(events[2].meta_graph_def)
    assert {node.name for node in meta.graph_def.node} >= {"shaped", "c1", "c2", "c3"}
    values = {value.tag: value.simple_value for value in events[3].summary.value}
    assert values == {"c1": 1.0, "c2": 2.0, "c3": 3.0}


async def test_s4_non_chief_cannot_write_events(tmp_path: Path) -> None:
    graph, merged = three_scalars()
    sv = Supervisor(graph=graph, is_chief=False, logdir=str(tmp_path), summary_op=None)
    async with sv.managed_session() as sess:
        summary = await sess.run(merged)
        with pytest.raises(RuntimeError, match="requires a summary writer"):
            await sv.summary_computed(sess, summary)
        with pytest.raises(RuntimeError, match="Only chief supervisor can start standard services"):
            sv.start_standard_services(sess)


async def test_s4_no_logdir_but_want_summary() -> None:
    graph, merged = three_scalars()
    sv = Supervisor(graph=graph, logdir="", summary_op=None)
    async with sv.managed_session() as sess:
        with pytest.raises(RuntimeError, match="requires a summary writer"):
            await sv.summary_computed(sess, await sess.run(merged))


async def test_s4_logdir_but_explicitly_no_summary_writer(tmp_path: Path, variables: str, heard: Any) -> None:
    """A checkpoint appears all the same, without any step."""
    graph, merged = three_scalars()
    with graph.as_default():
        tf1.get_variable("v", initializer=[1.0])
    sv = Supervisor(graph=graph, logdir=str(tmp_path), summary_writer=None)
    assert sv.summary_writer is None
    events = sv.events()
    async with sv.managed_session() as sess:
        await heard(events, "checkpoint.saved")
        assert tf.train.latest_checkpoint(str(tmp_path)) == sv.save_path
        with pytest.raises(RuntimeError, match="requires a summary writer"):
            await sv.summary_computed(sess, await sess.run(merged))
    assert not list(tmp_path.glob("events.out*"))


async def test_s4_no_logdir_but_explicit_summary_writer(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    """The events go where the writer says; it is closed although the caller made it."""
    graph, merged = three_scalars()
    with graph.as_default():
        writer = tf1.summary.FileWriter(str(tmp_path))
        sv = Supervisor(graph=graph, logdir="", summary_op=None, summary_writer=writer)
    sess = await sv.prepare_or_wait_for_session()
    await sv.summary_computed(sess, await sess.run(merged))
    await sess.close()
    await sv.stop()
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "summary:c1+c2+c3:0", "STOP"]
    with pytest.warns(UserWarning, match="closed FileWriter"):
        writer.add_summary(tf1.Summary())


async def test_s4_no_logdir_succeeds(variables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0, 2.0])
    sv = Supervisor(graph=graph, logdir="")
    assert sv.save_path is None
    sess = await sv.prepare_or_wait_for_session()
    assert (await sess.run(v)).tolist() == [1.0, 2.0]
    await sess.close()
    await sv.stop()
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------ section 4, standing services


async def test_s4_standard_services_without_global_step(
    tmp_path: Path, variables: str, heard: Any, events_of: Any, kinds_of: Any
) -> None:
    """The first checkpoint and the first summary come at once, although the defaults are 600 and 120 seconds."""
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0])
        tf1.summary.scalar("value", v[0])
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    first, second = sv.events(), sv.events()
    async with sv.managed_session():
        await heard(first, "checkpoint.saved")
        await heard(second, "summary.recorded")
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt"), "no step in the name"
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "summary:value:0", "STOP"]
    assert events[3].summary.value[0].simple_value == 1.0
    with tf.Graph().as_default(), tf1.Session() as raw:
        v = tf1.get_variable("v", initializer=[10.0])
        tf1.train.Saver([v]).restore(raw, str(tmp_path / "model.ckpt"))
        assert raw.run(v) == [1.0]


async def test_s4_standard_services_with_global_step(
    tmp_path: Path, variables: str, heard: Any, events_of: Any, kinds_of: Any
) -> None:
    """The step may have the shape [1]."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("global_step", initializer=tf.constant([123], tf.int64))
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    events = sv.events()
    async with sv.managed_session():
        await heard(events, "checkpoint.saved")
        while sv.status().global_step is None:
            await asyncio.sleep(0.001)
    assert tf.train.latest_checkpoint(str(tmp_path)) == sv.save_path + "-123"
    (events,) = events_of(tmp_path)
    kinds = kinds_of(events)
    assert kinds[:4] == ["version", "graph", "meta", "START:123"]
    assert sorted(kinds[4:6]) == ["CHECKPOINT:123", "summary:global_step/sec:123"]
    assert kinds[6:] == ["STOP"]
    (rate,) = [event for event in events if event.WhichOneof("what") == "summary"]
    assert rate.summary.value[0].simple_value == 0.0
    (checkpoint,) = [e.session_log for e in events if e.session_log.status == tf1.SessionLog.CHECKPOINT]
    assert checkpoint.checkpoint_path == sv.save_path + "-123", "TensorFlow records the path without the step"


async def test_s4_no_queue_runners() -> None:
    sv = Supervisor(graph=tf.Graph())
    async with sv.managed_session() as sess:
        assert sv.start_queue_runners(sess) == []


async def test_s4_queue_runners_that_are_given(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        numbers = tf1.get_variable("n", initializer=0)
        queue = tf1.FIFOQueue(2, tf.int32, shapes=[()])
        runner = tf1.train.QueueRunner(queue, [queue.enqueue(tf1.assign_add(numbers, 1))])
        element = queue.dequeue()
    sv = Supervisor(graph=graph)
    async with sv.managed_session() as sess:
        services = sv.start_queue_runners(sess, [runner])
        assert [service.name for service in services] == [
            "QueueRunnerThread-fifo_queue-fifo_queue_enqueue",
            "QueueRunnerThread-fifo_queue-close_on_stop",
        ]
        assert sv.start_queue_runners(sess, [runner]) == [], "they run already"
        assert [await sess.run(element) for _ in range(3)] == [1, 2, 3]
    assert all(service.done() for service in services)


# ------------------------------------------------------------------ items 18 to 20, 22, 24, 25


async def test_18_the_end_is_saved(counter: Callable[..., Any], tmp_path: Path, saved: Any, variables: str) -> None:
    """TensorFlow's Supervisor saves nothing at its end (F06)."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        for _ in range(5):
            await sess.run(made.train)
    assert saved(tmp_path)[-1] == "model.ckpt-5"


async def test_18_stop_saves_and_close_saves_again_only_if_something_has_changed(
    counter: Callable[..., Any], tmp_path: Path, saved: Any
) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    sess = await sv.prepare_or_wait_for_session()
    await sess.run(made.train)
    await sv.stop()
    assert saved(tmp_path)[-1] == "model.ckpt-1"
    written = (tmp_path / "model.ckpt-1.index").stat().st_mtime_ns
    await sess.close()
    assert (tmp_path / "model.ckpt-1.index").stat().st_mtime_ns == written
    sess = await sv.prepare_or_wait_for_session()
    await sv.stop()
    await sess.run(made.train)
    await sess.close()
    assert saved(tmp_path)[-1] == "model.ckpt-2", "a step after stop() is not lost"


async def test_18_no_final_save_where_it_is_not_wanted(
    counter: Callable[..., Any], tmp_path: Path, saved: Any, clock: ManualClock
) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_on_exit=False, clock=clock)
    events = sv.events()
    async with sv.managed_session() as sess:
        async for event in events:
            if event.kind == "checkpoint.saved":
                break
        await sess.run(made.train)
    assert saved(tmp_path) == ["model.ckpt-0"]


async def test_19_services_run_at_once_and_then_at_fixed_times(
    model: Callable[..., Any], tmp_path: Path, saved: Any, clock: ManualClock, events_of: Any, heard: Any
) -> None:
    made = model()
    sv = Supervisor(
        graph=made.graph,
        logdir=str(tmp_path),
        save_summaries_secs=10,
        save_model_secs=25,
        clock=clock,
        retention=LatestN(100),
    )
    checkpoints, summaries = sv.events(), sv.events()
    async with sv.managed_session() as sess:
        await heard(checkpoints, "checkpoint.saved")
        await clock.sleepers(3)  # all services wait for their next time
        await sess.run(made.train, made.feed)  # the summaries of the start ride on the first step
        assert (await heard(summaries, "summary.recorded")).data["step"] == 1
        for turn in range(1, 6):  # at 10, 20, 30, 40, 50
            await clock.advance(10)
            await clock.sleepers(3)
            await sess.run(made.train, made.feed)
            assert (await heard(summaries, "summary.recorded")).data["step"] == turn + 1
            if turn in (3, 5):
                await heard(checkpoints, "checkpoint.saved")
    assert saved(tmp_path) == ["model.ckpt-0", "model.ckpt-3", "model.ckpt-5", "model.ckpt-6"]
    (events,) = events_of(tmp_path)
    tags = [event.summary.value[0].tag for event in events if event.WhichOneof("what") == "summary"]
    assert tags.count("train_loss") == 6
    assert tags.count("global_step/sec") == 6


@pytest.mark.parametrize("nothing", [0, None])
async def test_19_none_and_zero_switch_a_service_off(
    nothing: Any, model: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=nothing, save_model_secs=nothing)
    assert sv.save_summaries_secs is nothing
    assert sv.save_model_secs is nothing
    async with sv.managed_session() as sess:
        for _ in range(5):
            await sess.run(made.train, made.feed)
        names = [service.name for service in sv.status().services]
    assert [name for name in names if name != "graph.pbtxt"] == []
    assert tf.train.latest_checkpoint(str(tmp_path)) is None, "no interval, no final save"
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "START:0", "STOP"]


async def test_19_saving_by_hand_needs_no_interval(counter: Callable[..., Any], tmp_path: Path, saved: Any) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_model_secs=0)
    async with sv.managed_session() as sess:
        await sess.run(made.train)
        info = await sv.save()
        assert info.step == 1
        assert info.prefix == sv.save_path + "-1"
        await sess.run(made.train)
    assert saved(tmp_path) == ["model.ckpt-1"]


@pytest.mark.parametrize("missing", ["interval", "writer", "step"])
async def test_19_the_step_counter_needs_an_interval_a_writer_and_a_step(
    missing: str, model: Callable[..., Any], tmp_path: Path
) -> None:
    made = model(step=missing != "step")
    options: dict[str, Any] = {}
    if missing == "interval":
        options["save_summaries_secs"] = 0
    if missing == "writer":
        options["summary_writer"] = None
    for options_now, there in ((options, False), ({}, missing != "step")):
        sv = Supervisor(graph=made.graph, logdir=str(tmp_path), **options_now)
        async with sv.managed_session():
            names = [service.name for service in sv.status().services]
        assert ("step_counter" in names) == there


async def test_20_start_standard_services_without_a_logdir(tmp_path: Path, heard: Any) -> None:
    """None and a warning, even where there is a writer."""
    graph, _ = three_scalars()
    with graph.as_default():
        writer = tf1.summary.FileWriter(str(tmp_path / "elsewhere"))
    sv = Supervisor(graph=graph, summary_writer=writer)
    async with sv.managed_session(start_standard_services=False) as sess:
        events = sv.events()
        assert sv.start_standard_services(sess) is None
        assert (await heard(events, "services.no_logdir")).level == "warning"


async def test_20_start_standard_services_by_hand(model: Callable[..., Any], tmp_path: Path) -> None:
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session(start_standard_services=False) as sess:
        services = sv.start_standard_services(sess)
        assert services is not None
        assert sorted(service.name for service in services) == ["checkpoints", "step_counter", "summaries"]
        await sess.run(made.train, made.feed)
    assert all(service.done() for service in services)
    assert tf.train.latest_checkpoint(str(tmp_path)) == sv.save_path + "-1", "with the final save"


async def test_20_the_second_call_starts_nothing_twice(model: Callable[..., Any], tmp_path: Path) -> None:
    """TensorFlow starts a second set of threads; here two checkpoint services would fight for one directory."""
    made = model()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        assert sv.start_standard_services(sess) == []
        names = [service.name for service in sv.status().services]
        assert len(names) == len(set(names))


def test_22_the_constructor_touches_no_file(tmp_path: Path) -> None:
    """TensorFlow's constructor makes the directory. Here everything on disk belongs to the session."""
    logdir = tmp_path / "a" / "b"
    Supervisor(graph=tf.Graph(), logdir=str(logdir))
    assert not logdir.exists()


async def test_22_the_directory_comes_with_the_session_and_the_event_file_with_the_first_event(tmp_path: Path) -> None:
    logdir = tmp_path / "a" / "b"
    sv = Supervisor(graph=tf.Graph(), logdir=str(logdir))
    assert sv.summary_writer.path is None
    async with sv.managed_session():
        assert logdir.is_dir()
        await sv.summary_writer.flush()
        assert list(logdir.glob("events.out*"))


async def test_24_start_and_checkpoint_carry_the_step_and_stop_does_not(
    counter: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any, variables: str
) -> None:
    made = counter(4)
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0)
    async with sv.managed_session() as sess:
        await sess.run(made.train)
    (events,) = events_of(tmp_path)
    kinds = kinds_of(events)
    assert kinds[:4] == ["version", "graph", "meta", "START:4"]
    assert kinds[-2:] == ["CHECKPOINT:5", "STOP"]
    assert events[-1].step == 0


async def test_24_without_a_step_neither_start_nor_checkpoint(
    model: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    made = model(step=False, summary=False)
    async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session() as sess:
        await sess.run(made.train, made.feed)
    assert tf.train.latest_checkpoint(str(tmp_path)), "it was saved"
    (events,) = events_of(tmp_path)
    assert kinds_of(events) == ["version", "graph", "meta", "STOP"]


async def test_25_graph_and_meta_graph_once_per_opening(
    counter: Callable[..., Any], tmp_path: Path, events_of: Any, kinds_of: Any
) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), save_summaries_secs=0, save_model_secs=0)
    async with sv.managed_session(close_summary_writer=False):
        pass
    async with sv.managed_session():
        pass
    async with sv.managed_session():
        pass
    files = [kinds_of(events) for events in events_of(tmp_path)]
    assert files == [
        ["version", "graph", "meta", "START:0", "START:0", "STOP"],
        ["version", "graph", "meta", "START:0", "STOP"],
    ]


async def test_the_graph_is_written_as_text_too(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session():
        pass
    text = (tmp_path / "graph.pbtxt").read_text()
    assert 'name: "global_step"' in text
    assert "asupervisor" not in text, "the ops of snapshots are no part of the user's graph"
    imported = tf1.GraphDef()
    from google.protobuf import text_format

    text_format.Parse(text, imported)
    with tf.Graph().as_default():
        tf1.import_graph_def(imported)


async def test_restored_values_are_the_saved_ones(model: Callable[..., Any], tmp_path: Path, variables: str) -> None:
    made = model()
    async with Supervisor(graph=made.graph, logdir=str(tmp_path)).managed_session() as sess:
        for _ in range(3):
            await sess.run(made.train, made.feed)
        w = (await sess.run(made.w)).copy()
    again = model()
    sv = Supervisor(graph=again.graph, logdir=str(tmp_path))
    async with sv.managed_session() as sess:
        np.testing.assert_array_equal(await sess.run(again.w), w)
        assert await sess.run(again.step) == 3
        assert sv.status().start_step == 3
