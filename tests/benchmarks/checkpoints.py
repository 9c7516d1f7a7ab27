"""What a save costs the training: how long a step is held up, and how much memory it takes, beside `saver.save`."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from asupervisor.checkpoint.retention import LatestN
from asupervisor.checkpoint.store import CheckpointStore
from tests.benchmarks.measure import Goal, Report

tf1 = tf.compat.v1
PARTS = 8
MEGABYTE = 1 << 20
HELD_UP = "held up by a snapshot"
SYNCHRONOUS = "saver.save between two steps"
SIZES_MB = {256: 1.0, 1024: 0.3}
"""Size of the variables, and what share of the repeats it gets."""


class Wide:
    """A model of a few large variables, all of which each step changes: one pass over memory."""

    def __init__(self, megabytes: int, kind: str) -> None:
        (tf1.enable_resource_variables if kind == "resource" else tf1.disable_resource_variables)()
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.step = tf1.train.get_or_create_global_step()
            shape = [megabytes * MEGABYTE // 4 // PARTS]
            last = None
            for index in range(PARTS):
                variable = tf1.get_variable(f"v{index}", shape, initializer=tf1.zeros_initializer())
                with tf1.control_dependencies([] if last is None else [last]):
                    last = variable.assign_add(tf.ones(shape)).op
            with tf1.control_dependencies([last]):
                self.train = tf1.assign_add(self.step, 1).op
            self.saver = tf1.train.Saver(max_to_keep=1)
            self.init = tf1.global_variables_initializer()
        tf1.enable_resource_variables()


async def stalls(report: Report, repeats: int, scale: float) -> None:
    """Each size and kind of variables: a plain step, a synchronous save, and the step that a snapshot holds up."""
    for megabytes, share in SIZES_MB.items():
        size = max(16, int(megabytes * scale))
        for kind in ("resource", "ref"):
            await asyncio.to_thread(_measure, report, size, kind, max(3, int(repeats * share)))


def _measure(report: Report, megabytes: int, kind: str, repeats: int) -> None:
    title = f"saves of {megabytes} MB, {kind} variables"
    model = Wide(megabytes, kind)
    samples: dict[str, list[float]] = {
        "a step": [],
        "a step during a reservation": [],
        "a step during a write": [],
        SYNCHRONOUS: [],
        HELD_UP: [],
        "the snapshot alone": [],
    }
    with tempfile.TemporaryDirectory() as directory, tf1.Session(graph=model.graph) as raw:
        store = CheckpointStore(
            Path(directory) / "ours", model.graph, model.saver, global_step=model.step, retention=LatestN(1)
        )
        model.graph.finalize()
        raw.run(model.init)
        store.claim(None)
        _steps(raw, model, 3)
        cold = _save(raw, model, store, {name: [] for name in samples})
        for repeat in range(repeats + 1):
            into = samples if repeat else {name: [] for name in samples}  # the first one warms up
            into["a step"] += _steps(raw, model, 5)
            began = time.perf_counter()
            with model.graph.as_default():
                model.saver.save(raw, f"{directory}/theirs/model.ckpt", global_step=model.step, write_meta_graph=False)
            into[SYNCHRONOUS].append(_since(began))
            _steps(raw, model, 2)
            _save(raw, model, store, into)
            _steps(raw, model, 2)
        report.add(
            title,
            samples,
            [Goal("held up by a save, of a synchronous one", HELD_UP, SYNCHRONOUS, _limit(samples))],
        )
        memory = _memory(raw, model, store)
    report.add_figures(title, {"cold first save holds a step up for, ms": cold / 1e3, **memory})
    report.add_check(title, "extra memory of a save, in copies of the model", memory["extra memory, copies"], 1.15)


def _limit(samples: dict[str, list[float]]) -> float:
    """A tenth of a synchronous save, or one and a half of the model's own steps where that is more."""
    sync = statistics.median(samples[SYNCHRONOUS])
    return max(0.10, 1.5 * statistics.median(samples["a step"]) / sync)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e6


def _steps(raw: Any, model: Wide, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        raw.run(model.train)
        times.append(_since(began))
    return times


def _save(raw: Any, model: Wide, store: CheckpointStore, into: dict[str, list[float]]) -> float:
    """One save as the service makes it; how long it held the training up, in microseconds."""
    plain = statistics.median(_steps(raw, model, 3))
    reserving = threading.Thread(target=store.reserve, args=[raw])  # as the service does, before it takes a snapshot
    reserving.start()
    while reserving.is_alive():
        into["a step during a reservation"] += _steps(raw, model, 1)
    reserving.join()
    began = time.perf_counter()
    snapshot = store.snapshot(raw)
    into["the snapshot alone"].append(_since(began))
    writer = threading.Thread(target=store.publish, args=[snapshot])
    writer.start()
    raw.run(model.train)  # it pays for the copies of what it writes
    held_up = max(_since(began) - plain, 1.0)
    while writer.is_alive():
        into["a step during a write"] += _steps(raw, model, 1)
    writer.join()
    into[HELD_UP].append(held_up)
    return held_up


def _memory(raw: Any, model: Wide, store: CheckpointStore) -> dict[str, float]:
    gc.collect()
    size = sum(int(v.shape.num_elements()) * 4 for v in model.graph.get_collection("variables")[1:])
    with _peak() as peak:
        before = peak[0]
        store.reserve(raw)
        snapshot = store.snapshot(raw)
        writer = threading.Thread(target=store.publish, args=[snapshot])
        writer.start()
        while writer.is_alive():
            raw.run(model.train)
        writer.join()
    raw.run(model.train)
    after = psutil.Process().memory_info().rss
    return {"extra memory, copies": (peak[0] - before) / size, "not given back, copies": (after - before) / size}


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The highest resident size while the block runs, in bytes; at first the present one."""
    process = psutil.Process()
    peak, ended = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
