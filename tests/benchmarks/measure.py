"""Interleaved repeats, ratios with their spread, a table and JSON."""

from __future__ import annotations

import gc
import inspect
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Work = Callable[[int], "Awaitable[None] | None"]
"""Runs so many steps; plain or async."""

SAMPLE_SECS = 0.1
"""How long one sample should take."""


@dataclass(frozen=True)
class Goal:
    """What a ratio should be.

    Attributes:
        name: What is compared.
        above: The peer above the line.
        below: The peer below the line.
        limit: The limit of the median ratio.
        sense: Whether the ratio should be at most or at least that.
    """

    name: str
    above: str
    below: str
    limit: float
    sense: Literal["at most", "at least"] = "at most"


@dataclass(frozen=True)
class Ratio:
    """A ratio of two peers, repeat by repeat.

    Attributes:
        name: What is compared.
        median: Ratio of the two medians.
        low: The lowest ratio of one repeat.
        high: The highest ratio of one repeat.
        limit: The goal, if there is one.
        sense: Which way it is meant.
        met: Whether the median meets it.
    """

    name: str
    median: float
    low: float
    high: float
    limit: float | None = None
    sense: str = ""
    met: bool | None = None


@dataclass
class Report:
    """Everything that one command measured."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ratios: dict[str, list[Ratio]] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(
        self, title: str, samples: Mapping[str, Sequence[float]], goals: Sequence[Goal] = (), unit: str = "us"
    ) -> None:
        """Keep and print the samples of one table, and the ratios that have a goal."""
        self.samples[title] = {name: list(values) for name, values in samples.items()}
        say(f"\n## {title}")
        for name, values in samples.items():
            say(f"  {name:<46}{statistics.median(values):>11.1f} {unit}   [{min(values):.1f} .. {max(values):.1f}]")
        self.ratios[title] = []
        for goal in goals:
            if samples.get(goal.above) and samples.get(goal.below):
                self._add_ratio(title, ratio_of(goal, samples))

    def add_figures(self, title: str, figures: Mapping[str, float]) -> None:
        """Keep and print single figures."""
        self.figures[title] = dict(figures)
        say(f"\n## {title}")
        for name, value in figures.items():
            say(f"  {name:<58}{value:>14.4g}")

    def add_check(self, title: str, name: str, value: float, limit: float, sense: str = "at most") -> None:
        """Keep and print a figure that has a goal."""
        met = value <= limit if sense == "at most" else value >= limit
        self.ratios.setdefault(title, [])
        self._add_ratio(title, Ratio(name, value, value, value, limit, sense, met))

    def _add_ratio(self, title: str, ratio: Ratio) -> None:
        self.ratios[title].append(ratio)
        verdict = "" if ratio.met is None else ("   met" if ratio.met else "   NOT MET")
        say(
            f"    {ratio.name:<58}{ratio.median:>8.3f}   [{ratio.low:.3f} .. {ratio.high:.3f}]"
            f"   {ratio.sense} {ratio.limit:g}{verdict}"
        )

    def missed(self) -> list[str]:
        """The goals that were not met."""
        return [
            f"{title}: {ratio.name} is {ratio.median:.3f}, should be {ratio.sense} {ratio.limit:g}"
            for title, ratios in self.ratios.items()
            for ratio in ratios
            if ratio.met is False
        ]

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        import tensorflow as tf

        content = {
            "machine": {
                "python": sys.version.split()[0],
                "tensorflow": tf.__version__,
                "platform": platform.platform(),
                "processors": os.cpu_count(),
                "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
            },
            "samples_us": self.samples,
            "ratios": {title: [asdict(ratio) for ratio in ratios] for title, ratios in self.ratios.items()},
            "figures": self.figures,
        }
        path.write_text(json.dumps(content, indent=1))


def ratio_of(goal: Goal, samples: Mapping[str, Sequence[float]]) -> Ratio:
    """The ratio that a goal is about."""
    above, below = samples[goal.above], samples[goal.below]
    each = [first / second for first, second in zip(above, below, strict=False)]
    median = statistics.median(above) / statistics.median(below)
    met = median <= goal.limit if goal.sense == "at most" else median >= goal.limit
    return Ratio(goal.name, median, min(each), max(each), goal.limit, goal.sense, met)


async def interleave(peers: Mapping[str, Work], repeats: int, *, scale: float = 1.0) -> dict[str, list[float]]:
    """Microseconds a step of each peer, measured by turns in an order that changes.

    Args:
        peers: Who runs; each is warmed up first, and gets as many steps as fill one sample.
        repeats: Samples of each.
        scale: How long a sample is, relative to `SAMPLE_SECS`.
    """
    steps: dict[str, int] = {}
    for name, work in peers.items():
        await _run(work, 100)  # plans are made, trials are over
        count, secs = 10, 0.0
        while True:
            secs = await _timed(work, count)
            if secs > SAMPLE_SECS * scale / 4 or count >= 100_000:
                break
            count *= 4
        steps[name] = max(4, int(count * SAMPLE_SECS * scale / secs))
    samples: dict[str, list[float]] = {name: [] for name in peers}
    order = list(peers)
    shuffler = random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            shuffler.shuffle(order)
            for name in order:
                samples[name].append(await _timed(peers[name], steps[name]) / steps[name] * 1e6)
    finally:
        gc.enable()
    return samples


async def _timed(work: Work, count: int) -> float:
    began = time.perf_counter()
    await _run(work, count)
    return time.perf_counter() - began


async def _run(work: Work, count: int) -> None:
    result = work(count)
    if inspect.isawaitable(result):
        await result


def percentiles(values: Sequence[float], *, unit: float = 1.0) -> dict[str, float]:
    """p50, p99 and p99.9, multiplied by `unit`."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * unit

    return {"p50": at(0.5), "p99": at(0.99), "p99.9": at(0.999)}


def say(text: Any) -> None:
    """Print at once."""
    print(text, flush=True)
