"""The examples do what they say: trained to the end, resumed, interrupted, fed by queues, served over HTTP."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tensorflow as tf

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of another kind"),
]

FOR_EVER = "1000000000"


@pytest.fixture
def examples(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "examples"


@pytest.fixture
def train(examples: Path, forks: Any, tmp_path: Path) -> Callable[..., Any]:
    """Run train_digits.py to its end: its result, its output, its error output."""

    def run(*arguments: str) -> tuple[dict[str, Any], str, str]:
        done = forks.run(examples / "train_digits.py", "--logdir", tmp_path / "run", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr

    return run


@pytest.fixture
def start(examples: Path, forks: Any) -> Iterator[Callable[..., Any]]:
    """Start an example with its error output on a terminal: the process, and a function that reads that."""
    import pty
    import termios

    running: list[Any] = []
    ours: list[int] = []

    def begin(script: str, *arguments: str) -> tuple[Any, Callable[[str], re.Match[str]]]:
        screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, 150))
        process = forks.start(examples / script, *arguments, stderr=terminal)
        os.close(terminal)
        running.append(process)
        ours.append(screen)
        seen = ""

        def read_until(pattern: str, limit_secs: float = 60) -> re.Match[str]:
            """Read the terminal until it shows the pattern; what was read before is not looked at again."""
            nonlocal seen
            deadline = time.monotonic() + limit_secs
            while (found := re.search(pattern, seen)) is None:
                ready, _, _ = select.select([screen], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"no {pattern!r} in {seen[-2000:]!r}"
                try:
                    seen += os.read(screen, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    pytest.fail(f"ended without {pattern!r}: {seen[-2000:]!r}")
            seen = seen[found.end() :]
            return found

        return process, read_until

    yield begin
    for process in running:
        process.kill()
        process.communicate()
    for screen in ours:
        os.close(screen)


def saved_steps(logdir: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in logdir.glob("model.ckpt-*.index"))


def scalars(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the event files: tag, then (step, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(logdir.glob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.mark.parametrize(("source", "steps"), [("feed", 1000), ("queue", 500)])
def test_train_digits_learns_and_resumes(train, tmp_path: Path, source: str, steps: int) -> None:
    """97 % and more on held-out digits, in under a minute; a second run goes on where the first one ended."""
    began = time.monotonic()
    result, output, errors = train("--input", source, *([] if steps == 1000 else ["--steps", str(steps)]))
    took_secs = time.monotonic() - began
    assert result["test_accuracy"] >= (0.97 if steps == 1000 else 0.95)
    assert (result["start_step"], result["global_step"]) == (0, steps)
    assert took_secs < 60
    assert "Resuming" not in output
    assert "steps/s" not in errors, "the progress line is for terminals"
    assert saved_steps(tmp_path / "run")[-1] == steps

    result, output, _ = train("--input", source, "--steps", str(steps + 100))
    assert (result["start_step"], result["global_step"]) == (steps, steps + 100)
    assert f"Resuming at step {steps}" in output
    assert saved_steps(tmp_path / "run")[-1] == steps + 100

    curves = scalars(tmp_path / "run")
    assert {"loss", "accuracy"} <= curves.keys()
    assert all(0 < step <= steps + 100 for step, _ in curves["loss"])
    assert curves["accuracy"][-1][1] > 0.9


def test_train_digits_has_nothing_to_do(train) -> None:
    """The number of steps is absolute: a run that is already there trains no further."""
    train("--steps", "20")
    result, _, _ = train("--steps", "20")
    assert (result["start_step"], result["global_step"]) == (20, 20)


def test_train_digits_on_a_local_server(train) -> None:
    result, _, _ = train("--steps", "30", "--master", "local")
    assert result["global_step"] == 30


def test_train_digits_names_the_masters(examples: Path, forks: Any, tmp_path: Path) -> None:
    done = forks.run(examples / "train_digits.py", "--logdir", tmp_path, "--master", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert "grpc://host:port" in done.stderr
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "source"),
    [
        pytest.param(signal.SIGINT, "feed", id="ctrl-c-feed"),
        pytest.param(signal.SIGTERM, "queue", id="sigterm-queue"),
        pytest.param(signal.SIGINT, "queue", id="ctrl-c-queue", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "feed", id="sigterm-feed", marks=pytest.mark.full),
    ],
)
def test_f06_f16_train_digits_interrupted(start, train, tmp_path: Path, number: signal.Signals, source: str) -> None:
    """It ends within two seconds as a shell expects, with the step saved that it had reached, and can go on.

    On the same script TensorFlow's Supervisor saves nothing at the end: its last checkpoint is the timed one.
    """
    logdir = tmp_path / "run"
    process, read_until = start("train_digits.py", "--logdir", str(logdir), "--steps", FOR_EVER, "--input", source)
    read_until(r"loss=")
    shown = int(read_until(r"\| ([1-9]\d*)/1000000000 \[[^\]]*steps/s")[1])
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    took_secs = time.monotonic() - began
    assert process.returncode == -number
    assert took_secs < 2.0
    assert "global_step" not in output
    reached = saved_steps(logdir)[-1]
    assert reached >= shown

    result, output, _ = train("--steps", str(reached + 10), "--input", source)
    assert (result["start_step"], result["global_step"]) == (reached, reached + 10)
    assert f"Resuming at step {reached}" in output


def test_fastapi_app(start, tmp_path: Path) -> None:
    """It trains and answers at once; a server that ends saves the step."""
    logdir = tmp_path / "run"
    process, read_until = start("fastapi_app.py", "--logdir", str(logdir), "--steps", FOR_EVER, "--port", "0")
    address = read_until(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")[1]
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    steps: list[int] = []
    with httpx.Client(base_url=address, timeout=30, trust_env=False) as client:
        deadline = time.monotonic() + 60
        while not steps or steps[-1] < 300:
            assert time.monotonic() < deadline
            status = client.get("/status").raise_for_status().json()
            assert status["state"] == "running"
            steps.append(status["global_step"])
        assert steps == sorted(steps)

        right = 0
        for image, label in zip(digits.images[:50], digits.target[:50], strict=True):
            answer = client.post("/predict", json={"image": image.tolist()}).raise_for_status().json()
            assert 0 <= answer["probability"] <= 1
            assert answer["global_step"] >= steps[-1]
            right += answer["digit"] == label
        assert right >= 40
        assert client.post("/predict", json={"image": [[1]]}).status_code == 422
        last = client.get("/status").json()["global_step"]

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert saved_steps(logdir)[-1] >= last


@pytest.mark.parametrize("scope", ["function", "module", "session"])
def test_f25_the_session_as_a_fixture_of_any_scope(
    examples: Path,
    pytester: pytest.Pytester,
    forks: Any,
    plugin_arguments: list[str],
    scope: str,
) -> None:
    """Set-up, test and tear-down are different tasks, on loops of each scope; asyncio in strict mode, all guards on.

    An async context manager that keeps a task group open there fails at tear-down; the original cannot be awaited.
    """
    source = (examples / "test_training.py").read_text().replace("asyncio\n\n\n@", "asyncio(SCOPE)\n\n\n@")
    if scope != "function":
        source = source.replace("@pytest_asyncio.fixture\n", f"@pytest_asyncio.fixture(scope='{scope}', SCOPE)\n")
        wider = f"@pytest.fixture(scope='{scope}')\\ndef "
        source = re.sub(r"@pytest\.fixture(\(scope=\"module\"\))?\ndef ", wider, source)
        source = source.replace("tmp_path: Path", "tmp_path_factory: pytest.TempPathFactory")
        source = source.replace("tmp_path /", "tmp_path_factory.mktemp('run') /")
        # One session for all tests: what depends on a new one is left out.
        source = re.sub(r"async def test_(an_untrained|training_goes_on)", r"async def other_\1", source)
    source = source.replace("SCOPE", f"loop_scope='{scope}'")
    assert source.count(f"loop_scope='{scope}'") == (1 if scope == "function" else 2)
    (pytester.path / "digits.py").write_text((examples / "digits.py").read_text())
    pytester.makepyfile(test_training=source)
    pytester.makefile(
        ".ini",
        pytest="[pytest]\nasupervisor_guards = all\nasyncio_default_fixture_loop_scope = function\n",
    )
    # What has been imported cannot be rewritten, and need not be.
    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *plugin_arguments]
    done = forks.run("-m", "pytest", *options, cwd=pytester.path)
    outcomes = pytest.RunResult.parse_summary_nouns(done.stdout.splitlines())
    assert outcomes == {"passed": 4 if scope == "function" else 2}, done.stdout + done.stderr
