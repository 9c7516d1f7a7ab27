"""BEHAVIOURS.md, section 5: MonitoredTrainingSession, the default hooks' work as services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.monitored import MonitoredTrainingSession

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


async def test_s5_saving_restoring_checkpoint(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph) as sess:
        assert await sess.run(made.step) == 0
        assert await sess.run(made.after) == 1
        assert await sess.run(made.after) == 2
    again = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=again.graph) as sess:
        assert await sess.run(again.step) == 2, "the end has saved"


@pytest.mark.parametrize(
    ("intervals", "steps"), [({"save_checkpoint_steps": 100}, 100), ({"save_checkpoint_secs": 0.1}, 11)]
)
async def test_s5_save_checkpoint_by_steps_or_secs(
    counter: Make, tmp_path: Path, intervals: dict[str, Any], steps: int
) -> None:
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, log_step_count_steps=10, **intervals
    ) as sess:
        for _ in range(steps):
            await sess.run(made.train)
    again = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=again.graph) as sess:
        assert await sess.run(again.step) == steps, "steps after the last periodic save are not lost"


async def test_s5_save_checkpoint_steps_saves_on_the_way(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, save_checkpoint_steps=5) as sess:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("model.ckpt-*.index"))) < 3:
            assert time.monotonic() < deadline
            await sess.run(made.train)
            await asyncio.sleep(0.001)
    steps = sorted(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("model.ckpt-*.index"))
    assert steps[:2] == [0, 5]


async def test_s5_saved_model_initializers_run_before_the_restore(tmp_path: Path, variables: str) -> None:
    """What a SavedModel brings as its own initialisers must not overwrite what the checkpoint has."""

    def build() -> Any:
        graph = tf.Graph()
        with graph.as_default():
            tf1.train.get_or_create_global_step()
            v = tf1.get_variable("v", initializer=1.0)
            graph.add_to_collection("saved_model_initializers", tf1.assign(v, 3.0).op)
            return graph, v, tf1.assign(v, 7.0)

    graph, v, change = build()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=graph) as sess:
        await sess.run(change)
    graph, v, _ = build()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=graph) as sess:
        assert await sess.run(v) == 7.0


async def test_s5_summaries_steps(model: Make, tmp_path: Path, scalars_of: Make) -> None:
    made = model()
    async with MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, save_summaries_steps=100) as sess:
        for _ in range(101):
            await sess.run(made.train, made.feed)
    found = scalars_of(tmp_path)
    assert found["train_loss"] == [1, 101]
    assert found["global_step/sec"] == [100]


async def test_s5_summaries_secs(model: Make, tmp_path: Path, scalars_of: Make) -> None:
    made = model()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, save_summaries_secs=0.05, log_step_count_steps=20
    ) as sess:
        begun = time.monotonic()
        steps = 0
        while steps < 101 or time.monotonic() < begun + 0.3:
            await sess.run(made.train, made.feed)
            steps += 1
    found = scalars_of(tmp_path)
    assert len(found["train_loss"]) >= 2
    assert found["global_step/sec"][:2] == [20, 40]


async def test_s5_summaries_into_a_directory_of_their_own(model: Make, tmp_path: Path, scalars_of: Make) -> None:
    """A summary_dir alone makes summaries and the step counter, and no checkpoints."""
    made = model()
    async with MonitoredTrainingSession(
        summary_dir=tmp_path / "summaries", graph=made.graph, save_summaries_steps=2, log_step_count_steps=2
    ) as sess:
        for _ in range(5):
            await sess.run(made.train, made.feed)
        with pytest.raises(RuntimeError, match="save"):
            await sess.save()
    found = scalars_of(tmp_path / "summaries")
    assert found["train_loss"] == [1, 3, 5]
    assert found["global_step/sec"] == [2, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["summaries"]
    assert all(path.name.startswith("events.") for path in (tmp_path / "summaries").iterdir())


async def test_s5_summaries_beside_the_checkpoints(model: Make, tmp_path: Path, scalars_of: Make) -> None:
    made = model()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path / "ckpt", summary_dir=tmp_path / "events", graph=made.graph
    ) as sess:
        await sess.run(made.train, made.feed)
    assert scalars_of(tmp_path / "events")["train_loss"] == [1]
    assert not list((tmp_path / "ckpt").glob("events*"))
    assert (tmp_path / "ckpt" / "model.ckpt-1.index").exists()


async def test_s5_custom_saving(counter: Make, tmp_path: Path, recorder: Make) -> None:
    made, hook = counter(), recorder()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, chief_only_hooks=[hook], save_checkpoint_secs=0, graph=made.graph
    ) as sess:
        await sess.run(made.train)
    assert hook.calls.count("hook.begin") == 1
    assert not list(tmp_path.glob("model.ckpt*"))
    again = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, chief_only_hooks=[hook], save_checkpoint_secs=0, graph=again.graph
    ) as sess:
        assert await sess.run(again.step) == 0
    assert hook.calls.count("hook.begin") == 2


async def test_s5_save_graph_def(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, save_checkpoint_steps=1, save_graph_def=True
    ) as sess:
        assert sorted(path.name for path in tmp_path.glob("*.meta")) == ["model.ckpt-0.meta"]
        assert (tmp_path / "model.ckpt-0.index").exists(), "a checkpoint exists before the first step"
        await sess.run(made.train)
        await sess.save()
        assert (tmp_path / "graph.pbtxt").exists()
        assert len(list(tmp_path.glob("*.meta"))) == 2


async def test_s5_save_graph_def_false(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, graph=made.graph, save_checkpoint_steps=1, save_graph_def=False
    ) as sess:
        await sess.run(made.train)
        await sess.save()
    assert not (tmp_path / "graph.pbtxt").exists()
    assert not list(tmp_path.glob("*.meta"))


async def test_s5_a_worker_saves_and_summarises_nothing(
    counter: Make, tmp_path: Path, recorder: Make, server: Any
) -> None:
    made, chief_only, hook = counter(), recorder("chief"), recorder()
    async with (
        MonitoredTrainingSession(server.target, graph=made.graph) as chief,
        MonitoredTrainingSession(
            server.target,
            is_chief=False,
            checkpoint_dir=tmp_path,
            hooks=[hook],
            chief_only_hooks=[chief_only],
            save_checkpoint_steps=1,
            graph=counter().graph,
            recovery_wait_secs=0.1,
        ) as worker,
    ):
        await chief.run(made.train)
        assert await worker.run("after:0") == 2, "they share the variable"
        with pytest.raises(RuntimeError, match="does not save"):
            await worker.save()
    assert not chief_only.calls
    assert hook.calls[0] == "hook.begin"
    assert not list(tmp_path.iterdir())


def test_s5_both_kinds_of_interval(counter: Make, tmp_path: Path) -> None:
    made = counter()
    for kind in ("save_checkpoint", "save_summaries"):
        both = {f"{kind}_secs": 1, f"{kind}_steps": 1}
        with pytest.raises(ValueError, match="Can not provide both"):
            MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, **both)
        one = {f"{kind}_secs": 0, f"{kind}_steps": 1}
        MonitoredTrainingSession(checkpoint_dir=tmp_path, graph=made.graph, **one)
