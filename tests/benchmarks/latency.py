"""What the rest of the program feels: the lag of the loop while training, and predictions beside it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asupervisor import Supervisor
from tests.benchmarks.measure import Report, percentiles
from tests.benchmarks.models import BATCH, WORKLOADS, session

TICK_SECS = 0.002


async def lag(report: Report, repeats: int, scale: float) -> None:
    """How late the loop is: idle, beside a plain thread that calls Session.run, and while streaming batch 64."""
    theirs, ours = WORKLOADS[BATCH](), WORKLOADS[BATCH]()
    async with contextlib.AsyncExitStack() as stack:
        raw = stack.enter_context(session(theirs))
        sess = await stack.enter_async_context(Supervisor(graph=ours.graph).managed_session())
        conditions: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[None]]] = {
            "idle": contextlib.nullcontext,
            "plain thread": lambda: _in_thread(lambda: raw.run(theirs.fetches, theirs.feed)),
            "stream": lambda: _streaming(sess, ours),
            "await sess.run": lambda: _running(sess, ours),
        }
        lags: dict[str, list[float]] = {name: [] for name in conditions}
        tails: dict[str, list[float]] = {name: [] for name in conditions}
        for _ in range(repeats):
            for name, condition in conditions.items():
                async with condition():
                    measured = await _ticks(max(0.3, 0.5 * scale))
                lags[name] += measured
                tails[name].append(percentiles(measured)["p99"])
    title = "lag of the event loop, batch 64"
    report.add_figures(
        title,
        {
            f"{name}: {share}, microseconds": value
            for name, values in lags.items()
            for share, value in percentiles(values, unit=1e6).items()
        },
    )
    each = [ours / theirs for ours, theirs in zip(tails["stream"], tails["plain thread"], strict=True)]
    report.add_check(
        title,
        "p99 while streaming / p99 beside a plain thread",
        statistics.median(tails["stream"]) / statistics.median(tails["plain thread"]),
        3.0,
    )
    report.add_figures(f"{title}: p99 ratios of the repeats", {"lowest": min(each), "highest": max(each)})


async def _ticks(secs: float) -> list[float]:
    loop = asyncio.get_running_loop()
    lags = []
    end = loop.time() + secs
    while loop.time() < end:
        due = loop.time() + TICK_SECS
        await asyncio.sleep(TICK_SECS)
        lags.append(max(0.0, loop.time() - due))
    return lags


@contextlib.asynccontextmanager
async def _in_thread(step: Callable[[], Any]) -> AsyncIterator[None]:
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)


@contextlib.asynccontextmanager
async def _beside(train: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(train())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def _streaming(sess: Any, model: Any) -> contextlib.AbstractAsyncContextManager[None]:
    async def train() -> None:
        async with sess.steps(model.fetches, model.feed) as stream:
            async for _ in stream:
                pass

    return _beside(train)


def _running(sess: Any, model: Any) -> contextlib.AbstractAsyncContextManager[None]:
    async def train() -> None:
        while True:
            await sess.run(model.fetches, model.feed)

    return _beside(train)


async def predictions(report: Report, repeats: int, scale: float) -> None:
    """How long a prediction takes alone, and beside a stream that trains flat out."""
    model = WORKLOADS[BATCH]()
    async with Supervisor(graph=model.graph).managed_session() as sess:
        times: dict[str, list[float]] = {"alone": [], "beside the stream": []}
        steps = 0.0
        secs = max(0.3, 0.5 * scale)
        for _ in range(repeats):
            times["alone"] += await _predict(sess, model, secs)
            async with sess.steps(model.fetches, model.feed) as stream:
                consumer = asyncio.ensure_future(_exhaust(stream))
                times["beside the stream"] += await _predict(sess, model, secs)
                await stream.aclose()
                await consumer
                steps += stream.steps_run
    report.add_figures(
        "a prediction every 5 ms, batch 64",
        {
            **{
                f"{name}: {share}, microseconds": value
                for name, values in times.items()
                for share, value in percentiles(values, unit=1e6).items()
            },
            "steps per second beside it": steps / (secs * repeats),
        },
    )


async def _exhaust(stream: Any) -> None:
    async for _ in stream:
        pass


async def _predict(sess: Any, model: Any, secs: float) -> list[float]:
    times = []
    end = time.perf_counter() + secs
    while time.perf_counter() < end:
        began = time.perf_counter()
        await sess.run(model.predict, model.predict_feed)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.005)
    return times
