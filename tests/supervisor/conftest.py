"""Models, event files and child processes for the tests of the Supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import asupervisor

tf1 = tf.compat.v1


@pytest.fixture
def model() -> Callable[..., SimpleNamespace]:
    """Makes a small regression in a graph of its own: one placeholder, one weight, a global step, one summary."""

    def make(*, step: bool = True, summary: bool = True, dim: int = 2, device: str | None = None) -> SimpleNamespace:
        graph = tf.Graph()
        with graph.as_default(), graph.device(device):
            x = tf1.placeholder(tf.float32, [None, dim], name="x")
            w = tf1.get_variable("w", [dim, 1], initializer=tf1.zeros_initializer())
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0), name="loss")
            global_step = tf1.train.get_or_create_global_step() if step else None
            train = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=global_step)
            if summary:
                tf1.summary.scalar("train_loss", loss)
        return SimpleNamespace(
            graph=graph, x=x, w=w, loss=loss, step=global_step, train=train, feed={x: [[1.0] * dim]}, name="model"
        )

    return make


@pytest.fixture
def counter() -> Callable[..., SimpleNamespace]:
    """Makes the smallest model: a global step and the op that advances it."""

    def make(start: int = 0) -> SimpleNamespace:
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.get_variable(
                "global_step",
                initializer=tf.constant(start, tf.int64),
                trainable=False,
                collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
            )
            train = tf1.assign_add(step, 1)
        return SimpleNamespace(graph=graph, step=step, train=train, feed=None)

    return make


@pytest.fixture
def events_of() -> Callable[[Any], list[list[Any]]]:
    """Reads the event files of a directory: for each file, in the order of their names, its events."""

    def read(logdir: Any) -> list[list[Any]]:
        files = sorted(Path(logdir).glob("events.out.tfevents*"))
        return [list(tf1.train.summary_iterator(str(file))) for file in files]

    return read


@pytest.fixture
def kinds_of() -> Callable[[list[Any]], list[str]]:
    """What the events of one file are: ``version graph meta START:3 summary:loss:4 CHECKPOINT:3 STOP``."""

    def name(event: Any) -> str:
        what = event.WhichOneof("what")
        if what == "file_version":
            return "version"
        if what == "graph_def":
            return "graph"
        if what == "meta_graph_def":
            return "meta"
        if what == "summary":
            return f"summary:{'+'.join(sorted(value.tag for value in event.summary.value))}:{event.step}"
        if what == "session_log":
            status = tf1.SessionLog.SessionStatus.Name(event.session_log.status)
            return status if status == "STOP" else f"{status}:{event.step}"
        return str(what)

    return lambda events: [name(event) for event in events]


@pytest.fixture
def saved() -> Callable[[Any], list[str]]:
    """Names of the checkpoints of a directory, as TensorFlow's state file lists them."""

    def read(logdir: Any) -> list[str]:
        state = tf.train.get_checkpoint_state(str(logdir))
        return [] if state is None else [os.path.basename(path) for path in state.all_model_checkpoint_paths]

    return read


@pytest.fixture
def heard() -> Callable[..., Awaitable[Any]]:
    """Waits for an event of one of the given kinds."""

    async def wait(events: AsyncIterator[Any], *kinds: str, timeout_secs: float = 30.0) -> Any:
        async with asyncio.timeout(timeout_secs):
            async for event in events:
                if event.kind in kinds:
                    return event
        raise AssertionError(f"the events ended without {' or '.join(kinds)}")

    return wait


class Child:
    """A program of `programs.py` in a process of its own."""

    def __init__(self, zygote: subprocess.Popen[str], pid: int, output: Path) -> None:
        self._zygote = zygote
        self._output = output
        self.pid = pid
        self.secs = 0.0
        self._ended = False

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def wait_for(self, text: str, timeout_secs: float = 30.0) -> None:
        """Wait until it has written something."""
        deadline = time.monotonic() + timeout_secs
        while text not in self.output:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"{text!r} did not come:\n{self.output}")
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_secs: float = 30.0) -> int:
        """Wait for its end; the exit status as `subprocess` gives it: negative for a signal."""
        assert self._zygote.stdout is not None
        begun = time.monotonic()
        ready, _, _ = select.select([self._zygote.stdout], [], [], timeout_secs)
        self.secs = time.monotonic() - begun
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        status = int(self._zygote.stdout.readline())
        self._ended = True
        assert ready, f"it did not end within {timeout_secs:g} s:\n{self.output}"
        return status

    def end(self) -> None:
        """Whatever became of the test: it is not left behind, and the zygote is free for the next one."""
        if not self._ended:
            with contextlib.suppress(AssertionError):
                self.wait(0.0)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything and forks for each child, which saves each of them seconds."""
    root = str(Path(asupervisor.__file__).parent.parent)
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    environ["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "programs.py")],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    assert process.stdin is not None
    # Not `communicate`: a child of a child may hold the other end of its output, for as long as it likes.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@pytest.fixture
def child(zygote: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a program of `programs.py`; one at a time, and the test waits for it."""
    started: list[Child] = []

    def start(program: str, **arguments: Any) -> Child:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        output = tmp_path / f"{program}-{time.monotonic_ns()}.txt"
        request = {"program": program, "output": str(output), "arguments": arguments}
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        started.append(Child(zygote, int(zygote.stdout.readline()), output))
        return started[-1]

    yield start
    for each in started:
        each.end()
