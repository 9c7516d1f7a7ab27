"""The supervisor's own event file."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.summary.writer import EventFileWriter

tf1 = tf.compat.v1


def scalar(tag: str, value: float) -> Any:
    return tf1.Summary(value=[tf1.Summary.Value(tag=tag, simple_value=value)])


def export(graph: tf.Graph) -> Any:
    with graph.as_default():
        return tf1.train.export_meta_graph()


@pytest.fixture
def small_graph(graph: tf.Graph) -> tf.Graph:
    with graph.as_default():
        tf1.placeholder(tf.float32, [None, 3], name="x")
        tf1.train.create_global_step()
    graph.finalize()
    return graph


async def test_order_and_contents(tmp_path: Path, small_graph: tf.Graph, read_events: Any, kinds: Any) -> None:
    writer = EventFileWriter(tmp_path)
    meta = export(small_graph)
    writer.add_graph(small_graph)
    writer.add_meta_graph(meta)
    writer.add_session_log("START", 5)
    writer.add_summary(scalar("loss", 0.5), 6)
    writer.add_summary(scalar("loss", 0.25).SerializeToString(), global_step=7)
    writer.add_session_log("CHECKPOINT", 8, "dir/model.ckpt-8")
    writer.add_session_log("STOP")
    assert await writer.aclose()
    assert writer.path is not None
    events = read_events(writer.path)
    log, both = "session_log", ["summary", "summary"]
    assert kinds(events) == ["file_version", "graph_def", "meta_graph_def", log, *both, log, log]
    assert events[0].file_version == "brain.Event:2"
    graph_def = tf1.GraphDef.FromString(events[1].graph_def)
    x = next(node for node in graph_def.node if node.name == "x")
    assert [dim.size for dim in x.attr["_output_shapes"].list.shape[0].dim] == [-1, 3]
    assert tf1.MetaGraphDef.FromString(events[2].meta_graph_def) == meta
    logs = [(e.session_log.status, e.session_log.checkpoint_path, e.step) for e in events if e.HasField("session_log")]
    log = tf1.SessionLog
    assert logs == [(log.START, "", 5), (log.CHECKPOINT, "dir/model.ckpt-8", 8), (log.STOP, "", 0)]
    assert [(e.step, e.summary.value[0].simple_value) for e in events[4:6]] == [(6, 0.5), (7, 0.25)]
    assert all(abs(event.wall_time - time.time()) < 60 for event in events)


async def test_file_name_is_what_tensorboard_recognises(tmp_path: Path) -> None:
    writer = EventFileWriter(tmp_path, filename_suffix=".train")
    writer.add_session_log("START", 0)
    await writer.aclose()
    assert writer.path is not None
    name = Path(writer.path).name
    assert "tfevents" in name  # TensorBoard's own test for an event file
    match = re.fullmatch(r"events\.out\.tfevents\.(\d{10,})\.(.+)\.(\d+)\.(\d+)\.train", name)
    assert match is not None
    assert abs(int(match[1]) - time.time()) < 60
    assert match[2] == socket.gethostname()
    assert int(match[3]) == os.getpid()


async def test_nothing_exists_before_the_first_record(tmp_path: Path) -> None:
    writer = EventFileWriter(tmp_path / "later")
    assert writer.path is None
    assert await writer.aclose()
    assert not (tmp_path / "later").exists()
    assert writer.thread is None


async def test_f10_writers_within_a_second_never_share_a_file(
    tmp_path: Path, clock: Any, event_files: Any, read_events: Any
) -> None:
    writers = [EventFileWriter(tmp_path, clock=clock) for _ in range(5)]  # the clock stands still: the same second
    for number, writer in enumerate(writers):
        writer.add_summary(scalar("n", number), number)
    for writer in writers:
        await writer.flush(20)
        assert await writer.aclose()
        writer.open()
        writer.add_summary(scalar("again", 1), 9)
        assert await writer.aclose()
    files = event_files(tmp_path)
    assert len(files) == 10
    steps = sorted(event.step for file in files for event in read_events(file) if event.HasField("summary"))
    assert steps == [0, 1, 2, 3, 4, 9, 9, 9, 9, 9]


async def test_f10_an_existing_file_of_the_same_name_is_not_truncated(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers with one directory have the same host name, process number, second and counter."""
    from asupervisor.summary import writer as module

    name = f"events.out.tfevents.{int(clock.time()):010d}.{socket.gethostname()}.{os.getpid()}."
    monkeypatch.setattr(module, "_numbers", iter([7, 8]))
    other = tmp_path / (name + "7")
    other.write_bytes(b"another run")
    writer = EventFileWriter(tmp_path, clock=clock)
    writer.add_session_log("START", 1)
    assert await writer.aclose()
    assert other.read_bytes() == b"another run"
    assert writer.path == str(tmp_path / (name + "8"))


async def test_reopened_means_new_file_with_graph_again(
    tmp_path: Path, small_graph: tf.Graph, event_files: Any, read_events: Any, kinds: Any
) -> None:
    writer = EventFileWriter(tmp_path)
    for _ in range(2):
        for _ in range(2):  # the second time in one opening is not written
            assert writer.add_graph(small_graph)
            assert writer.add_meta_graph(export(small_graph).SerializeToString())
        writer.add_summary(scalar("a", 1), 1)
        assert not writer.open()  # open already: nothing new begins
        assert await writer.aclose()
        assert writer.reopen()
    await writer.aclose()
    files = event_files(tmp_path)
    assert len(files) == 2
    for file in files:
        assert kinds(read_events(file)) == ["file_version", "graph_def", "meta_graph_def", "summary"]


async def test_a_meta_graph_can_be_made_by_the_writing_thread(
    tmp_path: Path, small_graph: tf.Graph, recorder: Any, read_events: Any, kinds: Any
) -> None:
    meta = export(small_graph)
    threads = []

    def make() -> Any:
        threads.append(threading.current_thread())
        return meta

    writer = EventFileWriter(tmp_path, emit=recorder)
    assert writer.add_meta_graph(make)
    assert await writer.aclose()
    assert threads == [writer.thread]
    assert tf1.MetaGraphDef.FromString(read_events(writer.path)[1].meta_graph_def) == meta
    writer.open()
    writer.add_meta_graph(lambda: 3)
    writer.add_summary(scalar("a", 1), 1)
    assert not await writer.aclose()
    assert kinds(read_events(writer.path)) == ["file_version", "summary"]
    assert "not int" in recorder.of("summary.unwritable")[0].message


async def test_metadata_only_at_the_first_summary_of_a_tag(tmp_path: Path, read_events: Any) -> None:
    metadata = tf1.SummaryMetadata(display_name="shown")
    writer = EventFileWriter(tmp_path)
    mine = tf1.Summary(value=[tf1.Summary.Value(tag="a", simple_value=1, metadata=metadata)])
    for step in range(3):
        writer.add_summary(mine, step)
    assert await writer.aclose()
    assert mine.value[0].HasField("metadata")  # the caller's proto stays as it is
    writer.open()
    writer.add_summary(mine, 3)
    first = Path(next(iter(tmp_path.iterdir())))
    assert await writer.aclose()
    assert writer.path is not None
    has = [event.summary.value[0].HasField("metadata") for event in read_events(first)[1:]]
    assert has == [True, False, False]
    assert read_events(writer.path)[1].summary.value[0].HasField("metadata")  # a new file, a new first time


async def test_wrong_summaries_are_refused_at_once(tmp_path: Path, small_graph: tf.Graph) -> None:
    writer = EventFileWriter(tmp_path)
    with pytest.raises(TypeError, match=r"Summary or its serialized bytes, not float"):
        writer.add_summary(3.0)
    with pytest.raises(ValueError, match=r"7 bytes are not a serialized Summary"):
        writer.add_summary(b"garbage")
    with pytest.raises(TypeError, match=r"tf\.Graph or a GraphDef, not str"):
        writer.add_graph("graph")
    with pytest.raises(TypeError, match=r"MetaGraphDef or its bytes, not Graph"):
        writer.add_meta_graph(small_graph)
    with pytest.raises(ValueError, match="BEGIN"):
        writer.add_session_log("BEGIN")
    await writer.aclose()
    assert not list(tmp_path.iterdir())


async def test_numpy_bytes_are_accepted(tmp_path: Path, graph: tf.Graph, read_events: Any) -> None:
    with graph.as_default():
        op = tf1.summary.scalar("s", tf.constant(2.0))
        with tf1.Session() as session:
            value = session.run(op)
    writer = EventFileWriter(tmp_path)
    writer.add_summary(value, 1)
    import numpy as np

    writer.add_summary(np.array(value, dtype=object), np.int64(2))
    assert await writer.aclose()
    assert [event.step for event in read_events(writer.path)] == [0, 1, 2]


async def test_scalars_are_kept(tmp_path: Path, graph: tf.Graph) -> None:
    with graph.as_default(), tf1.Session() as session:
        metadata = tf1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
        new_style = session.run(
            tf.raw_ops.TensorSummaryV2(
                tag="new", tensor=tf.constant(4.0), serialized_summary_metadata=metadata.SerializeToString()
            )
        )
    writer = EventFileWriter(tmp_path)
    writer.add_summary(scalar("a", 1))
    writer.add_summary(scalar("b", 2))
    writer.add_summary(scalar("a", 3))
    before = writer.scalars
    writer.add_summary(new_style)
    assert before == {"a": 3.0, "b": 2.0}  # what was handed out does not change
    assert writer.scalars == {"a": 3.0, "b": 2.0, "new": 4.0}
    with pytest.raises(TypeError):
        writer.scalars["a"] = 1.0  # type: ignore[index]
    await writer.aclose()


async def test_the_user_may_change_the_proto_afterwards(tmp_path: Path, read_events: Any) -> None:
    writer = EventFileWriter(tmp_path)
    proto = scalar("a", 0)
    for step in range(50):
        proto.value[0].simple_value = step
        writer.add_summary(proto, step)
    assert await writer.aclose()
    assert [e.summary.value[0].simple_value for e in read_events(writer.path)[1:]] == list(range(50))


async def test_adding_from_many_threads_loses_nothing(tmp_path: Path, read_events: Any) -> None:
    writer = EventFileWriter(tmp_path)

    def add(thread: int) -> None:
        for number in range(200):
            assert writer.add_summary(scalar(f"t{thread}", number), number)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert await writer.aclose()
    seen: dict[str, list[int]] = {}
    for event in read_events(writer.path)[1:]:
        seen.setdefault(event.summary.value[0].tag, []).append(event.step)
    assert seen == {f"t{number}": list(range(200)) for number in range(4)}
    assert writer.statistics().written_records == 800


async def test_after_closing_records_are_refused_and_reported_once(tmp_path: Path, recorder: Any) -> None:
    writer = EventFileWriter(tmp_path, emit=recorder)
    writer.add_summary(scalar("a", 1))
    await writer.aclose()
    assert await writer.aclose()  # again: nothing happens
    assert not writer.add_summary(scalar("a", 2))
    assert not writer.add_session_log("STOP")
    await writer.flush()  # nothing to wait for
    assert len(recorder.of("summary.closed")) == 1
    assert "reopen()" in recorder.of("summary.closed")[0].message
    assert writer.statistics().dropped_records == 2


async def test_f11_the_writer_is_released_at_close(tmp_path: Path) -> None:
    """31 sessions: no thread and no descriptor stays, each has its file. TensorFlow's cache keeps all of them."""
    descriptors = Path("/proc/self/fd")
    threads, files = threading.active_count(), len(list(descriptors.glob("*")))
    for number in range(31):
        writer = EventFileWriter(tmp_path / str(number % 3))
        writer.add_summary(scalar("a", number), number)
        assert await writer.aclose()
        assert writer.thread is not None and not writer.thread.is_alive()
    assert threading.active_count() == threads
    assert len(list(descriptors.glob("*"))) == files
    assert len(list(tmp_path.glob("*/events*"))) == 31


async def test_f11_a_wiped_directory_gets_a_new_file_with_everything(
    tmp_path: Path, small_graph: tf.Graph, recorder: Any, event_files: Any, read_events: Any, kinds: Any
) -> None:
    logdir = tmp_path / "run"
    writer = EventFileWriter(logdir, emit=recorder)
    writer.add_graph(small_graph)
    metadata = tf1.SummaryMetadata(display_name="shown")
    value = tf1.Summary(value=[tf1.Summary.Value(tag="a", simple_value=1, metadata=metadata)])
    writer.add_summary(value, 1)
    await writer.flush(20)
    shutil.rmtree(logdir)
    writer.add_summary(value, 2)
    await writer.flush(20)
    (file,) = event_files(logdir)
    events = read_events(file)
    assert kinds(events) == ["file_version", "graph_def", "summary"]
    assert events[2].step == 2
    assert events[2].summary.value[0].HasField("metadata")
    assert len(recorder.of("summary.file_vanished")) == 1
    writer.add_summary(value, 3)
    assert await writer.aclose()
    assert [event.step for event in read_events(file)][2:] == [2, 3]


async def test_a_full_disk_is_an_event_and_writing_goes_on_later(
    tmp_path: Path, small_graph: tf.Graph, recorder: Any, fake_file: Any, event_files: Any, read_events: Any, kinds: Any
) -> None:
    full = threading.Event()

    class DiskFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            super().flush()  # part of it reaches the file all the same
            if full.is_set():
                raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    writer = EventFileWriter(tmp_path, emit=recorder, open_file=DiskFile, retry_secs=(60.0, 60.0))
    writer.add_graph(small_graph)
    writer.add_summary(scalar("a", 1), 1)
    await writer.flush(20)
    full.set()
    for step in range(2, 5):
        writer.add_summary(scalar("a", step), step)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="No space"):
            await writer.flush(20)
    failed = recorder.of("summary.write_failed")
    assert len(failed) == 1  # one for the whole outage
    assert failed[0].level == "error"
    assert failed[0].data["retry_secs"] == 60.0
    assert "No space left" in failed[0].message
    assert "No space left" in str(writer.statistics().last_error)
    assert writer.statistics().pending_records == 3
    full.clear()
    await writer.flush(20)  # does not wait for the minute to pass
    assert len(recorder.of("summary.write_resumed")) == 1
    assert await writer.aclose()
    first, second = event_files(tmp_path)
    assert [e.step for e in read_events(first)][2:] == [1]  # cut back to what was whole
    assert kinds(read_events(second)) == ["file_version", "graph_def", "summary", "summary", "summary"]
    assert [e.step for e in read_events(second)][2:] == [2, 3, 4]


async def test_retries_by_itself(tmp_path: Path, recorder: Any, fake_file: Any, read_events: Any) -> None:
    failures = iter([OSError("broken"), OSError("broken"), None])

    class DiskFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            error = next(failures)
            if error is not None:
                raise error
            super().flush()

    writer = EventFileWriter(tmp_path, emit=recorder, open_file=DiskFile, retry_secs=(0.01, 0.02))
    writer.add_summary(scalar("a", 1), 1)
    await asyncio.to_thread(recorder.wait, "summary.write_resumed")
    assert await writer.aclose()
    assert [e.step for e in read_events(writer.path)] == [0, 1]
    assert len(list(tmp_path.iterdir())) == 1  # attempts that wrote nothing leave no file


async def test_closing_on_a_full_disk_gives_up_and_says_what_is_lost(
    tmp_path: Path, recorder: Any, fake_file: Any
) -> None:
    class FullFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    writer = EventFileWriter(tmp_path, emit=recorder, open_file=FullFile, retry_secs=(60.0, 60.0))
    writer.add_summary(scalar("a", 1), 1)
    await asyncio.to_thread(recorder.wait, "summary.write_failed")
    writer.add_summary(scalar("a", 2), 2)
    assert not await writer.aclose(20)
    (lost,) = recorder.of("summary.lost")
    assert (lost.level, lost.data["lost"]) == ("error", 2)
    assert writer.statistics().lost_records == 2
    assert writer.thread is not None and not writer.thread.is_alive()


async def test_real_device_without_space(tmp_path: Path, recorder: Any) -> None:
    """TensorFlow's own record file on a device that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = EventFileWriter(tmp_path, emit=recorder, open_file=lambda path: tf.io.TFRecordWriter("/dev/full"))
    writer.add_summary(scalar("a", 1), 1)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        await writer.flush(20)
    assert not await writer.aclose(20)


async def test_a_directory_that_cannot_be_made_is_an_event(tmp_path: Path, recorder: Any) -> None:
    (tmp_path / "file").write_text("")
    writer = EventFileWriter(tmp_path / "file" / "run", emit=recorder)
    assert writer.add_summary(scalar("a", 1), 1)
    assert not await writer.aclose(20)
    assert recorder.of("summary.write_failed")


async def test_a_full_queue_drops_summaries_and_keeps_the_session_log(
    tmp_path: Path, recorder: Any, fake_file: Any, read_events: Any
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class SlowFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            writing.set()
            assert go_on.wait(20)
            super().flush()

    writer = EventFileWriter(tmp_path, emit=recorder, open_file=SlowFile, max_records=3)
    assert writer.add_summary(scalar("a", 0), 0)
    await asyncio.to_thread(writing.wait, 20)
    started = time.monotonic()
    accepted = [writer.add_summary(scalar("a", step), step) for step in range(1, 7)]
    assert writer.add_session_log("CHECKPOINT", 6, "path")
    assert time.monotonic() - started < 1  # nobody waited for the disk
    assert accepted == [True] * 3 + [False] * 3
    assert [event.data["dropped"] for event in recorder.of("summary.dropped")] == [1]
    assert writer.statistics().dropped_records == 3
    go_on.set()
    assert await writer.aclose(20)
    assert [event.data["dropped"] for event in recorder.of("summary.dropped")] == [1, 3]
    assert [e.step for e in read_events(writer.path)][1:] == [0, 1, 2, 3, 6]


async def test_the_queue_is_bounded_in_bytes_too(tmp_path: Path, fake_file: Any) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class SlowFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            writing.set()
            assert go_on.wait(20)

    writer = EventFileWriter(tmp_path, open_file=SlowFile, max_bytes=1000)
    big = tf1.Summary(value=[tf1.Summary.Value(tag="t" * 600, simple_value=1)])
    assert writer.add_summary(big)
    await asyncio.to_thread(writing.wait, 20)
    assert writer.add_summary(big)  # an empty queue takes anything
    assert not writer.add_summary(big)
    go_on.set()
    assert await writer.aclose(20)


async def test_a_stuck_disk_stalls_neither_the_loop_nor_the_close(
    tmp_path: Path, recorder: Any, fake_file: Any
) -> None:
    go_on = threading.Event()

    class StuckFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            assert go_on.wait(30)

    writer = EventFileWriter(tmp_path, emit=recorder, open_file=StuckFile)
    writer.add_summary(scalar("a", 1), 1)
    with pytest.raises(TimeoutError):
        await writer.flush(0.01)
    assert not await writer.aclose(0.05)
    (event,) = recorder.of("summary.close_timeout")
    assert event.data["pending"] == 1
    go_on.set()
    thread = writer.thread
    assert thread is not None and thread.daemon
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


async def test_cancelled_close_lets_the_thread_finish(tmp_path: Path, fake_file: Any, read_events: Any) -> None:
    go_on = threading.Event()

    class SlowFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            assert go_on.wait(30)
            super().flush()

    writer = EventFileWriter(tmp_path, open_file=SlowFile)
    writer.add_summary(scalar("a", 1), 1)
    task = asyncio.create_task(writer.aclose(30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert writer.thread is not None
    await asyncio.to_thread(writer.thread.join, 20)
    assert [e.step for e in read_events(writer.path)] == [0, 1]


async def test_a_flush_during_a_failing_close_raises(tmp_path: Path, fake_file: Any) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class FullFile(fake_file):  # type: ignore[misc]
        def flush(self) -> None:
            writing.set()
            assert go_on.wait(30)
            raise OSError(28, "No space left on device")

    writer = EventFileWriter(tmp_path, open_file=FullFile)
    writer.add_summary(scalar("a", 1), 1)
    await asyncio.to_thread(writing.wait, 20)
    writer.close_soon()
    flush = asyncio.create_task(writer.flush(20))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(OSError, match="No space"):
        await flush
    assert not await writer.aclose(20)


async def test_a_blocked_file_of_tensorflow_does_not_hold_the_interpreter(tmp_path: Path) -> None:
    """Every other thread would stand still if TensorFlow kept the interpreter's lock while it writes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = EventFileWriter(tmp_path, open_file=lambda path: tf.io.TFRecordWriter(str(pipe)))
        writer.add_summary(scalar("t" * 1_000_000, 1), 1)  # more than a pipe takes
        assert not await writer.aclose(0.2)
        while writer.thread is not None and writer.thread.is_alive():
            try:
                os.read(reader, 1 << 20)
            except BlockingIOError:
                await asyncio.sleep(0.001)
    finally:
        os.close(reader)


async def test_close_soon_needs_no_loop(tmp_path: Path, read_events: Any) -> None:
    writer = EventFileWriter(tmp_path)
    writer.add_summary(scalar("a", 1), 1)
    thread = writer.thread
    assert thread is not None
    await asyncio.to_thread(lambda: (writer.close_soon(), thread.join(20)))
    assert [e.step for e in read_events(writer.path)] == [0, 1]


async def test_a_record_that_cannot_be_written_is_left_out(
    tmp_path: Path, recorder: Any, read_events: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph beyond protobuf's 2 GB, for instance: no retry would help, and the rest must not wait for it."""

    class Huge(tf.Graph):
        def as_graph_def(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("GraphDef cannot be larger than 2GB.")

    writer = EventFileWriter(tmp_path, emit=recorder)
    writer.add_graph(Huge())
    writer.add_summary(scalar("a", 1), 1)
    assert not await writer.aclose(20)
    (event,) = recorder.of("summary.unwritable")
    assert "2GB" in event.message
    assert kinds(read_events(writer.path)) == ["file_version", "summary"]
    assert writer.statistics().lost_records == 1


async def test_plugin_assets_are_written(tmp_path: Path, graph: tf.Graph) -> None:
    from tensorflow.python.summary import plugin_asset

    class Asset(plugin_asset.PluginAsset):  # type: ignore[misc]
        plugin_name = "mine"

        def assets(self) -> dict[str, str]:
            return {"notes.txt": "hello"}

    with graph.as_default():
        plugin_asset.get_plugin_asset(Asset, graph)
    writer = EventFileWriter(tmp_path)
    writer.add_graph(graph)
    assert await writer.aclose()
    assert (tmp_path / "plugins" / "mine" / "notes.txt").read_text() == "hello"


async def test_run_metadata_and_whole_events(tmp_path: Path, read_events: Any, kinds: Any) -> None:
    writer = EventFileWriter(tmp_path)
    writer.add_run_metadata(tf1.RunMetadata(), "step 3", 3)
    writer.add_event(tf1.Event(step=4, wall_time=1.0))
    writer.add_session_log(tf1.SessionLog(status=tf1.SessionLog.START, msg="hello"), 5)
    assert await writer.aclose()
    events = read_events(writer.path)
    assert events[1].tagged_run_metadata.tag == "step 3"
    assert (events[2].step, events[2].wall_time) == (4, 1.0)
    assert events[3].session_log.msg == "hello"


def test_a_killed_process_leaves_whole_records(tmp_path: Path, forks: Any, event_files: Any, read_events: Any) -> None:
    script = """
import asyncio, os, signal, sys
import tensorflow as tf
from asupervisor.summary.writer import EventFileWriter

async def main():
    writer = EventFileWriter(sys.argv[1])
    for step in range(1000):
        value = tf.compat.v1.Summary.Value(tag="a", simple_value=step)
        writer.add_summary(tf.compat.v1.Summary(value=[value]), step)
        if step == 500:
            await writer.flush()
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = forks.run("-c", script, tmp_path)
    assert done.returncode == -9
    (file,) = event_files(tmp_path)
    assert [event.step for event in read_events(file)][1:] == list(range(501))


async def test_tensorboard_reads_it(tmp_path: Path, small_graph: tf.Graph) -> None:
    loader_of = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader").EventFileLoader
    writer = EventFileWriter(tmp_path)
    writer.add_graph(small_graph)
    writer.add_summary(scalar("a", 1), 1)
    assert await writer.aclose()
    loader = loader_of(writer.path)
    assert [event.WhichOneof("what") for event in loader.Load()] == ["file_version", "graph_def", "summary"]
