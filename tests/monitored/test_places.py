"""Where a monitored session restores from and saves to: how its arguments are read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import checkpoints
from asupervisor.checkpoint import lock
from asupervisor.errors import LogdirInUse
from asupervisor.monitored import ChiefSessionCreator, MonitoredTrainingSession, SingularMonitoredSession

Make = Callable[..., Any]


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, an empty one."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    return cwd


async def train(made: Any, steps: int = 3, **kwargs: Any) -> int:
    async with MonitoredTrainingSession(graph=made.graph, **kwargs) as sess:
        begun = int(await sess.run(made.step))
        for _ in range(steps):
            await sess.run(made.train)
        return begun


@pytest.mark.parametrize("kind", [str, Path, os.fsencode, "file://{}".format], ids=["str", "Path", "bytes", "file://"])
async def test_f26_every_way_to_name_a_directory_is_the_same_directory(
    counter: Make, cwd: Path, tmp_path: Path, kind: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WAIT_SECS", 0.0)
    place = tmp_path / "run"
    assert await train(counter(), checkpoint_dir=kind(str(place))) == 0
    async with MonitoredTrainingSession(graph=counter().graph, checkpoint_dir=kind(str(place))):
        with pytest.raises(LogdirInUse):
            await train(counter(), checkpoint_dir=place)
    assert await train(counter(), checkpoint_dir=place) == 3
    assert {".asupervisor.lock", "journal.jsonl"} <= set(os.listdir(place))
    assert os.listdir(cwd) == []


async def test_an_empty_directory_is_none(counter: Make, cwd: Path, tmp_path: Path) -> None:
    """It is the default of many a flag: nothing is written into the working directory."""
    assert await train(counter(), checkpoint_dir="", summary_dir=tmp_path / "events") == 0
    assert await train(counter(), checkpoint_dir="", summary_dir="") == 0
    assert ChiefSessionCreator(graph=counter().graph, checkpoint_dir=b"").checkpoint_dir is None
    assert os.listdir(cwd) == []
    assert any("tfevents" in name for name in os.listdir(tmp_path / "events"))


async def test_a_relative_directory_is_that_of_the_construction(
    counter: Make, cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(counter(), checkpoint_dir="run")
    sess = MonitoredTrainingSession(graph=(made := counter()).graph, checkpoint_dir="run", summary_dir="events")
    explicit = ChiefSessionCreator(graph=made.graph, checkpoint_filename_with_path="run/model.ckpt-3")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    async with sess:
        assert await sess.run(made.step) == 3
        await sess.run(made.train)
        await sess.save()
    assert [info.step for info in checkpoints(cwd / "run")][-1] == 4
    assert any("tfevents" in name for name in os.listdir(cwd / "events"))
    assert os.listdir(elsewhere) == []
    assert explicit.checkpoint_filename_with_path == str(cwd / "run" / "model.ckpt-3")


@pytest.mark.parametrize("make", [ChiefSessionCreator, MonitoredTrainingSession, SingularMonitoredSession])
def test_a_directory_that_cannot_be_one_is_refused_at_once(counter: Make, cwd: Path, make: Callable[..., Any]) -> None:
    graph = counter().graph
    with pytest.raises(ValueError, match="checkpoint_dir 'gs://bucket/x' is a remote address"):
        make(graph=graph, checkpoint_dir="gs://bucket/x")
    with pytest.raises(TypeError, match="checkpoint_dir must be a path, not 5"):
        make(graph=graph, checkpoint_dir=5)
    with pytest.raises(TypeError, match="checkpoint_filename_with_path must be a path, not 5"):
        make(graph=graph, checkpoint_filename_with_path=5)
    assert os.listdir(cwd) == []


def test_a_summary_dir_that_is_no_path_is_refused_at_once(counter: Make) -> None:
    with pytest.raises(TypeError, match="summary_dir must be a path, not 5"):
        MonitoredTrainingSession(graph=counter().graph, summary_dir=5)  # type: ignore[arg-type]


async def test_sessions_of_one_graph_that_start_together_share_what_they_add(
    counter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, both = counter(), threading.Barrier(2)
    init = tf.compat.v1.train.Saver.__init__

    def slow(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # it must be the only one here
            both.wait(0.5)
        init(*args, **kwargs)

    monkeypatch.setattr(tf.compat.v1.train.Saver, "__init__", slow)

    async def one(name: str) -> int:
        async with MonitoredTrainingSession(graph=made.graph, checkpoint_dir=tmp_path / name) as sess:
            await sess.run(made.train)
            return int(await sess.run(made.step))

    assert await asyncio.gather(*map(one, "abc")) == [1, 1, 1]
    assert len(made.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS)) == 1
    assert not made.graph.finalized
