"""Monitored training sessions: a step with directory and default hooks, and what hooks of one's own cost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from asupervisor import AsyncSessionRunHook, MonitoredTrainingSession
from tests.benchmarks.measure import Goal, Report, interleave
from tests.benchmarks.models import COUNTER, SMALL, WORKLOADS

tf1 = tf.compat.v1

THEIRS, RUN, STEPS = "tf MonitoredTrainingSession", "await sess.run", "sess.steps"
GOALS = {COUNTER: (0.75, 0.5), SMALL: (0.8, 0.4)}


async def steps(report: Report, repeats: int, scale: float) -> None:
    """The same program under both, with a checkpoint directory and what either does by default."""
    for workload, (run_limit, steps_limit) in GOALS.items():
        samples = await _compare(workload, repeats, scale, [], [])
        report.add(
            f"monitored training, {workload}: directory and default hooks",
            samples,
            [Goal("run / tf", RUN, THEIRS, run_limit), Goal("steps / tf", STEPS, THEIRS, steps_limit)],
        )


async def hooks(report: Report, repeats: int, scale: float) -> None:
    """With hooks besides: TensorFlow's own three that everybody uses, and one that is a coroutine function."""
    for workload in GOALS:
        report.add(
            f"monitored training, {workload}: StopAtStep, NanTensor and LoggingTensor hooks besides",
            await _compare(workload, repeats, scale, _usual, _usual),
            [Goal("run / tf", RUN, THEIRS, 1.0), Goal("steps / tf", STEPS, THEIRS, 1.0)],
        )
    report.add(
        f"monitored training, {COUNTER}: an async hook besides",
        await _compare(COUNTER, repeats, scale, lambda model: [_Empty()], lambda model: [_EmptyAsync()]),
    )


class _Empty(tf1.train.SessionRunHook):  # type: ignore[misc]
    def before_run(self, run_context: Any) -> None:
        pass

    def after_run(self, run_context: Any, run_values: Any) -> None:
        pass


class _EmptyAsync(AsyncSessionRunHook):
    async def before_run(self, run_context: Any) -> None:
        pass

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        pass


def _usual(model: Any) -> list[Any]:
    with model.graph.as_default():
        watched = model.fetches[1] if isinstance(model.fetches, list) else tf.constant(0.0)
        return [
            tf1.train.StopAtStepHook(last_step=10**12),
            tf1.train.NanTensorHook(watched),
            tf1.train.LoggingTensorHook({"watched": watched}, every_n_iter=10**9),
        ]


async def _compare(workload: str, repeats: int, scale: float, theirs: Any, ours: Any) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        model, other, third = (WORKLOADS[workload]() for _ in range(3))
        original = {"hooks": theirs(model) if theirs else None}
        with model.graph.as_default():
            session = tf1.train.MonitoredTrainingSession(checkpoint_dir=str(Path(directory, "theirs")), **original)
        async with (
            MonitoredTrainingSession(
                checkpoint_dir=Path(directory, "run"), graph=other.graph, hooks=ours(other) if ours else None
            ) as running,
            MonitoredTrainingSession(
                checkpoint_dir=Path(directory, "steps"), graph=third.graph, hooks=ours(third) if ours else None
            ) as streaming,
        ):

            def run_theirs(count: int) -> None:
                with model.graph.as_default():
                    for _ in range(count):
                        session.run(model.fetches, model.feed)

            async def run(count: int) -> None:
                for _ in range(count):
                    await running.run(other.fetches, other.feed)

            async def stream(count: int) -> None:
                async for _ in streaming.steps(third.fetches, third.feed, max_steps=count):
                    pass

            samples = await interleave({THEIRS: run_theirs, RUN: run, STEPS: stream}, repeats, scale=scale)
        with model.graph.as_default():
            session.close()
        tf1.summary.FileWriterCache.clear()
        return samples
