"""The benchmark command runs, and its arithmetic is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import asupervisor
from tests.forks import Forks

ROOT = Path(asupervisor.__file__).parent.parent


@pytest.fixture
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_measure", Path(__file__).with_name("measure.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_the_repeats(measure: Any) -> None:
    samples = {"a": [10.0, 20.0, 30.0], "b": [20.0, 20.0, 20.0]}
    ratio = measure.ratio_of(measure.Goal("a / b", "a", "b", 1.0), samples)
    assert (ratio.median, ratio.low, ratio.high, ratio.met) == (1.0, 0.5, 1.5, True)
    assert measure.ratio_of(measure.Goal("a / b", "a", "b", 1.1, "at least"), samples).met is False


async def test_peers_are_measured_by_turns(measure: Any) -> None:
    order: list[str] = []

    def plain(count: int) -> None:
        order.append("plain")

    async def asynchronous(count: int) -> None:
        order.append("async")

    samples = await measure.interleave({"plain": plain, "async": asynchronous}, 5, scale=1e-7)
    assert {name: len(values) for name, values in samples.items()} == {"plain": 5, "async": 5}
    turns = order[-10:]
    assert all(set(turns[begin : begin + 2]) == {"plain", "async"} for begin in range(0, 10, 2))


def test_a_missed_goal_is_named(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = measure.Report()
    report.add("table", {"a": [2.0], "b": [1.0]}, [measure.Goal("a / b", "a", "b", 1.5)])
    report.add_check("table", "late", 3.0, 10.0)
    assert report.missed() == ["table: a / b is 2.000, should be at most 1.5"]
    assert "NOT MET" in capsys.readouterr().out


def test_the_command_runs_and_writes_json(forks: Forks, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    done = forks.run("-m", "tests.benchmarks", "--quick", "--only", "stop", "--json", target, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: a goal was missed, on a busy machine
    figures = json.loads(target.read_text())
    assert figures["samples_us"]["start and stop, small MLP"]["start"]
    assert figures["machine"]["tensorflow"]
