"""Every event in every host, and what the matrix does not hold; see `lifecycle_matrix.py`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.forks import Forks

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    """A module beside this one: test modules are not a package."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


matrix = load("lifecycle_matrix")
scenarios = load("lifecycle_scenarios")

CASES = matrix.cases("block")
HOSTS = sorted({host for host, _ in CASES})

#: On the real thing: hosts that differ in who enters, who leaves and whose loop it is.
SESSION_HOSTS = [
    "plain",
    "uvloop",
    "anyio_child",
    "stack_elsewhere",
    "stack_manager",
    "fastapi_dependency",
    "fastapi_lifespan",
    "portal",
    "unittest",
    "wait_for",
    "abandoned_generator",
    "pytest_asyncio_session",
    "pytest_anyio_module",
]

Program = Callable[..., list[dict[str, Any]]]


def run(
    environ: dict[str, str], name: str, *options: str, limit_secs: float = 110, forks: Forks | None = None
) -> list[dict[str, Any]]:
    """Run one of the programs beside this file, where it needs TensorFlow in a fork; what it found."""
    command = [str(HERE / f"{name}.py"), "--verbose", *options]
    if forks is not None:
        done = forks.run(*command, timeout=limit_secs)
    else:
        done = subprocess.run(
            [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=limit_secs
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = [line for line in lines if "event" in line]
    assert lines and lines[-1].get("cases") == len(results) > 0, done.stdout[-2000:] + done.stderr[-2000:]
    return results


def check(results: list[dict[str, Any]]) -> None:
    assert results
    wrong = [result for result in results if result["problems"]]
    assert not wrong, "\n".join(
        f"{result['host']}, {result['event']}:\n  " + "\n  ".join(result["problems"]) for result in wrong
    )


@pytest.fixture
def program(forks: Forks, environ: dict[str, str]) -> Program:
    """Runs one of the programs beside this file; its cases, all of them well."""

    def run_and_check(name: str, *options: str, limit_secs: float = 110) -> list[dict[str, Any]]:
        with_tensorflow = forks if name == "lifecycle_supervisor" else None
        results = run(environ, name, *options, limit_secs=limit_secs, forks=with_tensorflow)
        check(results)
        return results

    return run_and_check


def wanted(request: pytest.FixtureRequest, test: Callable[..., Any], parameter: str) -> str:
    """For which parameters a test of this module is to run: one program runs all of them, side by side."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test]
    return ",".join(item.callspec.params[parameter] for item in items)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def results_of_hosts(request: pytest.FixtureRequest, environ: dict[str, str]) -> list[dict[str, Any]]:
    hosts = wanted(request, test_f25_every_host, "host")
    options = ["--hosts", hosts, "--few", "6", "--at-once", "8"]
    return run(environ, "lifecycle_matrix", *options, limit_secs=280)


@pytest.fixture(scope="module")
def results_of_scenarios(request: pytest.FixtureRequest, environ: dict[str, str]) -> list[dict[str, Any]]:
    events = wanted(request, test_scenario, "name")
    return run(environ, "lifecycle_scenarios", "--events", events)


@pytest.mark.timeout(300)  # the first one waits for all
@pytest.mark.parametrize("host", HOSTS)
def test_f25_every_host(results_of_hosts: list[dict[str, Any]], host: str) -> None:
    """All events in a plain coroutine, and a seeded few in each of the other hosts."""
    check([result for result in results_of_hosts if result["host"] == host])


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("host", HOSTS)
def test_f25_every_event_in_every_host(program: Program, host: str) -> None:
    program("lifecycle_matrix", "--hosts", host, limit_secs=1400)


@pytest.mark.timeout(300)
def test_f25_managed_session_in_hosts(program: Program) -> None:
    """A seeded few of the cases on real TensorFlow sessions."""
    hosts = ",".join(SESSION_HOSTS)
    results = program("lifecycle_supervisor", "--hosts", hosts, "--count", "32", "--seed", "20", limit_secs=280)
    assert {result["host"] for result in results} == set(SESSION_HOSTS)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("host", HOSTS)
def test_f25_managed_session_in_every_host(program: Program, host: str) -> None:
    program("lifecycle_supervisor", "--hosts", host, limit_secs=2900)


@pytest.mark.parametrize("name", sorted(scenarios.SCENARIOS))
def test_scenario(results_of_scenarios: list[dict[str, Any]], name: str) -> None:
    check([result for result in results_of_scenarios if result["event"] == name])


def test_the_matrix_covers_what_it_should() -> None:
    """A case that silently falls out of the matrix would be missed by nobody."""
    hosts = set(HOSTS)
    if sys.version_info < (3, 12):
        assert "eager" not in hosts
    assert len(CASES) > 2500, len(CASES)
    for host in hosts:
        events = {event for other, event in CASES if other == host}
        assert {"clean", "body_error", "service_error_body_elsewhere", "stop_by_thread", "stop_by_signal"} <= events
    for name in matrix.EVENTS:
        assert any(event == name for _, event in CASES), name
