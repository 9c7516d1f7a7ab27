"""Supervisors as such: how long one takes to start and to stop, what many cost, and what an import costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from asupervisor import Supervisor
from tests.benchmarks.measure import Goal, Report
from tests.benchmarks.models import COUNTER, SMALL, WORKLOADS, Model

tf1 = tf.compat.v1


async def start_and_stop(report: Report, repeats: int, scale: float) -> None:
    """Enter and leave; and from `request_stop` to the end of the block while a stream runs."""
    samples: dict[str, list[float]] = {
        "start": [],
        "stop": [],
        "tf Supervisor: start": [],
        "tf Supervisor: stop": [],
        "request_stop to the end of the block": [],
        "one step": [],
    }
    for _ in range(repeats):
        model = WORKLOADS[SMALL]()
        sv = Supervisor(graph=model.graph)
        began = time.perf_counter()
        async with sv.managed_session() as sess:
            samples["start"].append(_since(began))
            await sess.run(model.fetches, model.feed)
            began = time.perf_counter()
        samples["stop"].append(_since(began))

        model = WORKLOADS[SMALL]()
        with model.graph.as_default():
            theirs = tf1.train.Supervisor(graph=model.graph)
        began = time.perf_counter()
        with theirs.managed_session() as session:
            samples["tf Supervisor: start"].append(_since(began))
            session.run(model.fetches, model.feed)
            began = time.perf_counter()
        samples["tf Supervisor: stop"].append(_since(began))

        await _stop_in_mid_stream(samples)
    report.add("start and stop, small MLP", samples, unit="us")
    late = [
        (stop - step) / 1000
        for stop, step in zip(samples["request_stop to the end of the block"], samples["one step"], strict=True)
    ]
    report.add_check(
        "start and stop, small MLP", "from request_stop to the end, beyond one step, ms", statistics.median(late), 10.0
    )


async def _stop_in_mid_stream(samples: dict[str, list[float]]) -> None:
    model = WORKLOADS[SMALL]()
    sv = Supervisor(graph=model.graph)
    began = 0.0
    async with sv.managed_session() as sess:
        count = 0
        async for _ in sess.steps(model.fetches, model.feed):
            count += 1
            if count == 300:
                began = time.perf_counter()
                sv.request_stop()
        samples["one step"].append(sess.statistics().step_time.p50_secs * 1e6)
    samples["request_stop to the end of the block"].append(_since(began))


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e6


async def many(report: Report, repeats: int, scale: float) -> None:
    """One, ten and a hundred supervisors at once, which share the steps; threads and memory of each."""
    counts = (1, 10, 100)
    title = "small MLP, many supervisors at once: a step of any of them"
    samples: dict[str, list[float]] = {f"{count} supervisors": [] for count in counts}
    figures: dict[str, float] = {}
    threads_each = 0.0
    async with contextlib.AsyncExitStack() as stack:
        sessions: list[tuple[Any, Model]] = []
        for count in counts:
            before, threads = _memory_mb(), threading.active_count()
            added = count - len(sessions)
            for _ in range(added):
                model = WORKLOADS[SMALL]()
                sess = await stack.enter_async_context(Supervisor(graph=model.graph).managed_session())
                sessions.append((sess, model))
            await _share(sessions, 40 * count)
            threads_each = (threading.active_count() - threads) / added
            figures[f"{count} supervisors: threads for each that was added"] = threads_each
            figures[f"{count} supervisors: megabytes for each that was added"] = (_memory_mb() - before) / added
        total = max(400, int(4000 * scale))
        for _ in range(repeats):
            for count in counts:
                began = time.perf_counter()
                await _share(sessions[:count], total)
                samples[f"{count} supervisors"].append(_since(began) / total)
    report.add(title, samples, [Goal("throughput of 100 / of 1", "1 supervisors", "100 supervisors", 0.9, "at least")])
    report.add_check(title, "threads of each of a hundred", threads_each, 2.0)
    report.add_figures("what a supervisor costs", figures)


async def _share(sessions: list[tuple[Any, Model]], total: int) -> None:
    async def train(sess: Any, model: Model) -> None:
        for _ in range(total // len(sessions)):
            await sess.run(model.fetches, model.feed)

    await asyncio.gather(*(train(sess, model) for sess, model in sessions))


def _memory_mb() -> float:
    try:
        import psutil
    except ImportError:
        return float("nan")
    return float(psutil.Process().memory_info().rss) / 2**20


async def imports(report: Report, repeats: int, scale: float) -> None:
    """What ``import asupervisor`` costs by itself, and its session over TensorFlow's own import."""
    programs = {
        "nothing": "pass",
        "asupervisor": "import asupervisor",
        "tensorflow": "import tensorflow",
        "tensorflow, asupervisor.Supervisor": "import tensorflow, asupervisor; asupervisor.Supervisor",
    }
    samples: dict[str, list[float]] = {name: [] for name in programs}
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for _ in range(max(2, min(repeats, 5))):
        for name, program in programs.items():
            began = time.perf_counter()
            await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", program], env=environ, check=True, stderr=subprocess.DEVNULL
            )
            samples[name].append(_since(began))
    report.add("a process that imports", samples)


__all__ = ["COUNTER", "imports", "many", "start_and_stop"]
