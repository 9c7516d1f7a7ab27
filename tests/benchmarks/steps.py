"""Steps per second: a supervised session and its stream against everything else that can run a step."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio.to_thread
import numpy as np
import tensorflow as tf

from asupervisor import Supervisor
from tests.benchmarks.measure import Goal, Report, Work, interleave
from tests.benchmarks.models import BATCH, COUNTER, SMALL, WORKLOADS, Model, compiled, session

tf1 = tf.compat.v1

RUN, STREAM, BLOCKING = "await sess.run", "stream", "Session.run, blocking"
TF_SUPERVISOR, MTS, MTS_DIR = "tf Supervisor", "tf MonitoredTrainingSession", "tf MonitoredTrainingSession, directory"
EXECUTOR, ANYIO = "loop.run_in_executor(session.run)", "anyio.to_thread.run_sync(session.run)"
FLOOR, INLINE_FLOOR = "floor: compiled callable", "floor: the same in the caller's thread"

GOALS: dict[str, list[Goal]] = {
    COUNTER: [
        Goal("await sess.run / MonitoredTrainingSession, directory", RUN, MTS_DIR, 0.75),
        Goal("await sess.run / Session.run", RUN, BLOCKING, 1.3),
        Goal("stream / Session.run", STREAM, BLOCKING, 0.5),
    ],
    SMALL: [
        Goal("await sess.run / Session.run", RUN, BLOCKING, 0.7),
        Goal("stream / Session.run", STREAM, BLOCKING, 0.33),
        Goal("run_in_executor / await sess.run", EXECUTOR, RUN, 1.5, "at least"),
    ],
    BATCH: [
        Goal("await sess.run / Session.run", RUN, BLOCKING, 1.0),
        Goal("stream / Session.run", STREAM, BLOCKING, 0.95),
    ],
}
STREAM_FLOOR = Goal("stream / floor", STREAM, FLOOR, 1.25)


async def peers(stack: contextlib.AsyncExitStack, build: Callable[[], Model]) -> dict[str, Work]:
    """Everybody who can run this workload; each has a model of its own."""
    found: dict[str, Work] = {}

    def repeat(run: Callable[[], Any]) -> Work:
        def work(count: int) -> None:
            for _ in range(count):
                run()

        return work

    model = build()
    raw = stack.enter_context(session(model))
    found[BLOCKING] = repeat(lambda: raw.run(model.fetches, model.feed))
    loop = asyncio.get_running_loop()

    async def in_executor(count: int) -> None:
        for _ in range(count):
            await loop.run_in_executor(None, raw.run, model.fetches, model.feed)

    async def in_anyio(count: int) -> None:
        for _ in range(count):
            await anyio.to_thread.run_sync(raw.run, model.fetches, model.feed)

    found[EXECUTOR], found[ANYIO] = in_executor, in_anyio
    found[FLOOR] = repeat(compiled(raw, model, inline=False))
    found[INLINE_FLOOR] = repeat(compiled(raw, model, inline=True))

    theirs = build()
    with theirs.graph.as_default():
        supervisor = tf1.train.Supervisor(graph=theirs.graph)
    their_session = stack.enter_context(supervisor.managed_session())
    found[TF_SUPERVISOR] = repeat(lambda: their_session.run(theirs.fetches, theirs.feed))

    for name, directory in ((MTS, None), (MTS_DIR, stack.enter_context(tempfile.TemporaryDirectory()))):
        found[name] = repeat(_monitored(stack, build(), directory))

    ours = build()
    sess = await stack.enter_async_context(Supervisor(graph=ours.graph).managed_session())

    async def run(count: int) -> None:
        for _ in range(count):
            await sess.run(ours.fetches, ours.feed)

    async def stream(count: int) -> None:
        async for _ in sess.steps(ours.fetches, ours.feed, max_steps=count):
            pass

    found[RUN], found[STREAM] = run, stream
    return found


def _monitored(stack: contextlib.AsyncExitStack, model: Model, directory: str | None) -> Callable[[], Any]:
    with model.graph.as_default():
        monitored = stack.enter_context(tf1.train.MonitoredTrainingSession(checkpoint_dir=directory))
    return lambda: monitored.run(model.fetches, model.feed)


async def throughput(report: Report, repeats: int, scale: float) -> None:
    """Each workload, every peer."""
    for title, build in WORKLOADS.items():
        async with contextlib.AsyncExitStack() as stack:
            samples = await interleave(await peers(stack, build), repeats, scale=scale)
        report.add(title, samples, [*GOALS.get(title, ()), STREAM_FLOOR])


# ------------------------------------------------------------------------------------------ feeds that cost something


async def feeds(report: Report, repeats: int, scale: float) -> None:
    """A feed that costs as much time as the step: the stream makes it while the step before runs."""
    for kind in ("Python", "numpy"):
        model, other = WORKLOADS[BATCH](), WORKLOADS[BATCH]()
        async with contextlib.AsyncExitStack() as stack:
            raw = stack.enter_context(session(other))
            sess = await stack.enter_async_context(Supervisor(graph=model.graph).managed_session())
            step_secs = _best(lambda raw=raw, other=other: raw.run(other.fetches, other.feed))
            work = _calibrated(kind, step_secs)

            def generate(model: Model, count: int, work: Callable[[], Any]) -> Iterator[dict[Any, Any]]:
                assert model.feed is not None
                for _ in range(count):
                    work()
                    yield dict(model.feed)

            def blocking(count: int, raw: Any = raw, other: Model = other, work: Any = work) -> None:
                for feed in generate(other, count, work):
                    raw.run(other.fetches, feed)

            async def stream(count: int, sess: Any = sess, model: Model = model, work: Any = work) -> None:
                async for _ in sess.steps(model.fetches, generate(model, count, work)):
                    pass

            title = f"batch 64, a feed that costs as much {kind} time as the step"
            samples = await interleave({BLOCKING: blocking, STREAM: stream}, repeats, scale=scale * 2)
        report.add(title, samples, [Goal("stream / blocking loop", STREAM, BLOCKING, 0.65)])


def _calibrated(kind: str, secs: float) -> Callable[[], Any]:
    """Work that takes about so long."""
    if kind == "Python":

        def spin(count: int) -> int:
            total = 0
            for number in range(count):
                total += number * number % 7
            return total

        rounds = max(1, int(1000 * secs / _best(lambda: spin(1000))))
        return lambda: spin(rounds)
    source = np.random.default_rng(1)
    size = max(64, int(65536 * secs / _best(lambda: source.standard_normal(65536))))
    return lambda: source.standard_normal(size)


def _best(work: Callable[[], Any], times: int = 60) -> float:
    secs = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        secs.append(time.perf_counter() - began)
    return sorted(secs)[times // 4]
