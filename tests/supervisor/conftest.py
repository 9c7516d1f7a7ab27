"""Models, event files and child processes for the tests of the Supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.forks import Forked, Forks

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


class Child:
    """A program of `programs.py` in a process of its own."""

    def __init__(self, process: Forked, output: Path) -> None:
        self._process = process
        self._output = output
        self.secs = 0.0

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, *, times: int = 1, timeout_secs: float = 30.0) -> None:
        """Wait until it has written something, so many times."""
        deadline = time.monotonic() + timeout_secs
        while self.output.count(text) < times:
            if time.monotonic() > deadline:
                self._process.kill()
                raise AssertionError(f"{text!r} did not come:\n{self.output}")
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_secs: float = 30.0) -> int:
        """Wait for its end; the exit status as `subprocess` gives it: negative for a signal."""
        begun = time.monotonic()
        try:
            return self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_secs:g} s:\n{self.output}") from None
        finally:
            self.secs = time.monotonic() - begun

    def end(self) -> None:
        """Whatever became of the test: it is not left behind."""
        self._process.kill()
        self._process.wait(10)


@pytest.fixture
def child(forks: Forks, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a program of `programs.py`; the test waits for it."""
    started: list[Child] = []
    programs = Path(__file__).with_name("programs.py")

    def start(program: str, **arguments: Any) -> Child:
        path = tmp_path / f"{program}-{len(started)}.txt"
        with path.open("a") as output:
            process = forks.start(
                programs, program, json.dumps(arguments), stdout=output.fileno(), stderr=output.fileno()
            )
        started.append(Child(process, path))
        return started[-1]

    yield start
    for each in started:
        each.end()
