"""A writer that the user made."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.summary.adapter import FileWriterAdapter, adapt
from asupervisor.summary.writer import EventFileWriter

pytestmark = pytest.mark.modes
tf1 = tf.compat.v1


def scalar(tag: str, value: float) -> Any:
    return tf1.Summary(value=[tf1.Summary.Value(tag=tag, simple_value=value)])


def export(graph: tf.Graph) -> Any:
    with graph.as_default():
        return tf1.train.export_meta_graph()


def file_writer(logdir: Path) -> Any:
    with tf.Graph().as_default():
        return tf1.summary.FileWriter(str(logdir))


async def test_file_writer(tmp_path: Path, graph: tf.Graph, read_events: Any, kinds: Any) -> None:
    meta = export(graph)
    writer = adapt(file_writer(tmp_path))
    assert writer.get_logdir() == writer.path == str(tmp_path)
    writer.add_graph(graph)
    writer.add_meta_graph(meta.SerializeToString())
    writer.add_session_log("START", 2)
    writer.add_summary(scalar("a", 1), 3)
    writer.add_session_log("STOP")
    assert await writer.aclose()
    (file,) = tmp_path.iterdir()
    events = read_events(file)
    assert kinds(events) == ["file_version", "graph_def", "meta_graph_def", "session_log", "summary", "session_log"]
    assert [event.step for event in events] == [0, 0, 0, 2, 3, 0]
    assert writer.scalars == {"a": 1.0}


async def test_reopened(tmp_path: Path, graph: tf.Graph, read_events: Any, kinds: Any) -> None:
    theirs = file_writer(tmp_path / "x")
    writer = FileWriterAdapter(theirs)
    for step in (1, 2):
        writer.open()
        writer.add_graph(graph)
        writer.add_summary(scalar("a", step), step)
        assert await writer.aclose()
        for file in (tmp_path / "x").iterdir():
            assert kinds(read_events(file)) == ["file_version", "graph_def", "summary"]
            file.unlink()


async def test_what_is_not_a_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="object lacks add_summary, add_session_log"):
        adapt(object())


async def test_our_own_passes(tmp_path: Path) -> None:
    writer = EventFileWriter(tmp_path)
    assert adapt(writer) is writer


class Fake:
    """A writer whose calls can block and fail."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    def _call(self, *call: Any) -> None:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(30)
        if self.fail is not None:
            raise self.fail
        self.calls.append(call)

    def add_summary(self, summary: Any, step: Any) -> None:
        self._call("summary", step)

    def add_session_log(self, log: Any, step: Any) -> None:
        self._call("log", log.status, step)

    def add_graph(self, graph: Any, step: Any = None) -> None:
        self._call("graph")

    def add_meta_graph(self, meta: Any, step: Any = None) -> None:
        self._call("meta")

    def reopen(self) -> None:
        self._call("reopen")

    def close(self) -> None:
        self._call("close")


async def test_blocking_calls_are_made_off_the_loop_by_one_thread(recorder: Any) -> None:
    fake = Fake()
    fake.gate.clear()
    writer = FileWriterAdapter(fake, emit=recorder, max_records=2)
    accepted = [writer.add_summary(scalar("a", step), step) for step in range(300)]
    assert not all(accepted)  # bounded, and nobody waited
    assert not await writer.aclose(0.05)
    assert recorder.of("summary.close_timeout")
    fake.gate.set()
    assert writer.thread is not None
    await asyncio.to_thread(writer.thread.join, 20)
    assert fake.calls[0] == ("reopen",)
    assert fake.calls[-1] == ("close",)
    assert len(fake.threads) == 1 and threading.get_ident() not in fake.threads


async def test_errors_are_events_and_the_writer_is_opened_again(recorder: Any, graph: tf.Graph) -> None:
    fake = Fake()
    writer = FileWriterAdapter(fake, emit=recorder)
    writer.add_graph(graph)
    await writer.flush(20)
    fake.fail = OSError("no space")
    for step in (1, 2):
        writer.add_summary(scalar("a", step), step)
        await writer.flush(20)
    fake.fail = None
    writer.add_summary(scalar("a", 3), 3)
    assert not await writer.aclose(20)  # two are lost
    assert fake.calls == [("reopen",), ("graph",), ("reopen",), ("graph",), ("summary", 3), ("close",)]
    assert len(recorder.of("summary.write_failed")) == 1
    assert writer.statistics().lost_records == 2


async def test_f11_real_file_writer_whose_directory_is_removed(
    tmp_path: Path, recorder: Any, graph: tf.Graph, read_events: Any, kinds: Any
) -> None:
    """TensorFlow's own goes on without a file then, and raises nothing at any later call."""
    logdir = tmp_path / "run"
    writer = FileWriterAdapter(file_writer(logdir), emit=recorder)
    writer.add_graph(graph)
    writer.add_summary(scalar("a", 1), 1)
    await writer.flush(20)
    shutil.rmtree(logdir)
    writer.add_summary(scalar("a", 2), 2)
    assert await writer.aclose(20)
    assert len(recorder.of("summary.file_vanished")) == 1
    (file,) = logdir.iterdir()
    events = read_events(file)
    assert kinds(events) == ["file_version", "graph_def", "summary"]
    assert events[-1].step == 2
