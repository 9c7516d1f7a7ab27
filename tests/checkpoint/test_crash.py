"""The crash matrix: processes that train and save are killed at every point and at any moment. Nothing is lost.

After each kill a new process restores a whole checkpoint: the newest that was reported as saved, or a newer one that
was published but not yet reported; and it leaves nothing but whole checkpoints in the directory.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.points import POINTS
from tests.forks import Forks

ROLLED_FORWARD = POINTS[POINTS.index("after-record") :]

#: By default a few before the record, from the record on, and within a deletion; `test_writer.py` has an accident at
#: each one in one process.
FEW = (
    "temporary",
    "after-write",
    "before-record",
    "after-record",
    "before-rename.index",
    "before-state",
    "within-delete",
)


def few_of(points: list[str]) -> list[Any]:
    return [pytest.param(point, marks=() if point in FEW else pytest.mark.full) for point in points]


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def runner(forks: Forks) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """One process that forks a child for each case."""
    process = forks.start(Path(__file__).with_name("crash_runner.py"), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin and process.stdout
    to, from_it = process.stdin, process.stdout

    def run(case: dict[str, Any]) -> dict[str, Any]:
        to.write(json.dumps(case) + "\n")
        to.flush()
        answer = json.loads(from_it.readline())
        assert isinstance(answer, dict)
        return answer

    yield run
    process.communicate(timeout=30)


@pytest.fixture
def run(runner: Any, tmp_path: Path) -> Run:
    """Runs a case in a directory of the test; says what is wrong with what the next run found."""

    def run_case(**case: Any) -> dict[str, Any]:
        case = {
            "logdir": str(tmp_path / "logdir"),
            "acknowledged": str(tmp_path / "acknowledged"),
            "variables": "resource",
            "size": 20_000,
            "name": "step",
            "keep": 2,
            "saves": 4,
            **case,
        }
        answer: dict[str, Any] = runner(case)
        found = answer["found"]
        assert "error" not in answer["died"], answer
        assert "error" not in found, answer
        assert found["damaged"] == [] and found["stray"] == [], answer
        if found["acknowledged"] is not None:
            assert found["restored"] is not None, answer
            assert found["restored"] >= found["acknowledged"], answer
        if found["restored"] is not None:
            assert found["inside"] == [found["restored"]], answer  # TensorFlow's readers see the same one
        return answer

    return run_case


@pytest.mark.parametrize("point", few_of(POINTS))
def test_killed_at_a_point(point: str, run: Run) -> None:
    """The third save of its directory is struck, or the first deletion; the run after that goes to its end."""
    kill_at(run, point, name="step")
    answer = run()
    assert answer["died"]["began"] is not None
    assert answer["found"]["restored"] == answer["found"]["acknowledged"]


@pytest.mark.parametrize("point", few_of(POINTS[6:11]))
def test_killed_while_one_name_is_overwritten(point: str, run: Run) -> None:
    """Without a step in the name: from the record on, only forward is whole."""
    kill_at(run, point, name="none")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variables", ["resource", "ref"])
@pytest.mark.parametrize("saver", ["plain", "sharded"])
@pytest.mark.parametrize("name", ["step", "none"])
def test_killed_at_each_point_twice(name: str, saver: str, variables: str, run: Run, tmp_path: Path) -> None:
    """The whole matrix; the run that was restored after the first kill is struck again."""
    for point in POINTS[:-4] if name == "none" else POINTS:
        if saver == "sharded" and point in ("before-write", "after-write"):
            continue  # its saver writes between two steps
        case = {
            "logdir": str(tmp_path / f"logdir-{point}"),
            "acknowledged": str(tmp_path / f"acknowledged-{point}"),
            "saver": saver,
            "variables": variables,
            "name": name,
        }
        first = kill_at(run, point, **case)
        second = kill_at(run, point, **case, hit=2) if name == "step" else run(**case)
        assert second["found"]["restored"] > first["found"]["restored"] or name == "none"


def kill_at(run: Run, point: str, *, hit: int | None = None, **case: Any) -> dict[str, Any]:
    deleting = point in POINTS[-4:]
    answer = run(point=point, hit=(1 if deleting else 3) if hit is None else hit, **case)
    assert answer["died"] == {"signal": signal.SIGKILL}
    acknowledged, restored = answer["found"]["acknowledged"], answer["found"]["restored"]
    assert acknowledged > 0
    if point in ROLLED_FORWARD:
        assert restored > acknowledged
    else:
        assert restored == acknowledged
    return answer


@pytest.mark.parametrize("saver", ["plain", "sharded"])
def test_killed_in_the_first_save(saver: str, run: Run, tmp_path: Path) -> None:
    """Nothing was published yet: the next run begins at the beginning, in a clean directory."""
    for point in ("temporary", "before-fsync", "before-record"):
        answer = run(point=point, hit=1, saver=saver)
        assert answer["died"] == {"signal": signal.SIGKILL}
        assert answer["found"]["restored"] is None and answer["found"]["steps"] == []


@pytest.mark.parametrize("variables", ["resource", pytest.param("ref", marks=pytest.mark.full)])
def test_killed_at_random_moments(variables: str, run: Run) -> None:
    """Again and again in one directory, each run going on from the last; a seeded subset of the whole matrix."""
    kill_at_random_moments(run, variables, 5, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variables", ["resource", "ref"])
def test_killed_at_random_moments_whole(variables: str, run: Run) -> None:
    kill_at_random_moments(run, variables, 200, seed=2)


def kill_at_random_moments(run: Run, variables: str, count: int, seed: int) -> None:
    moments = random.Random(seed)
    furthest = 0
    for number in range(count):
        answer = run(after_secs=moments.uniform(0.0, 0.6), while_it_begins=number % 5 == 4, variables=variables)
        assert answer["died"] == {"signal": signal.SIGKILL}
        restored = answer["found"]["restored"] or 0
        assert restored >= furthest
        furthest = restored
    assert furthest > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variables", ["resource", "ref"])
@pytest.mark.parametrize("name", ["step", "none"])
@pytest.mark.parametrize("saver", ["plain", "sharded"])
def test_killed_before_each_file_operation(saver: str, name: str, variables: str, run: Run, tmp_path: Path) -> None:
    """Not the points that we thought of, but all that Python does to the files of the directory."""
    case = {"saver": saver, "name": name, "variables": variables, "saves": 3, "keep": 1}

    def within(number: int) -> dict[str, str]:
        return {"logdir": str(tmp_path / f"logdir{number}"), "acknowledged": str(tmp_path / f"acknowledged{number}")}

    operations = run(**case, **within(0))["died"]["operations"]
    assert len(operations) > 20
    for number in range(1, len(operations) + 1):
        answer = run(**case, **within(number), operation=number)
        assert answer["died"] == {"signal": signal.SIGKILL}, (number, operations[number - 1])


def test_killed_before_some_file_operations(run: Run, tmp_path: Path) -> None:
    """A seeded sample of the test before."""
    operations = run(saves=2, keep=1)["died"]["operations"]
    for number in sorted(random.Random(3).sample(range(1, len(operations) + 1), 5)):
        answer = run(
            saves=2,
            keep=1,
            operation=number,
            logdir=str(tmp_path / f"logdir{number}"),
            acknowledged=str(tmp_path / f"acknowledged{number}"),
        )
        assert answer["died"] == {"signal": signal.SIGKILL}
