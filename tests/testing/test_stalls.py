"""The stall watch charges whom it should: real TensorFlow calls on the loop, only code of the watched package."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import clock
from asupervisor.testing import StallWatch
from asupervisor.testing.stalls import blame_package

SECS = 0.2


def stalls_of(function: Callable[[], Any], **options: Any) -> list[str]:
    """Call the function on a loop and return what was charged."""

    async def main() -> None:
        await asyncio.sleep(0)
        function()
        await asyncio.sleep(0)

    watch = StallWatch(**options)
    with watch.watching():
        asyncio.run(main())
        return [str(stall) for stall in watch.take()]


def test_a_run_that_waits(graph: tf.Graph) -> None:
    """A dequeue from an empty queue: the thread sleeps inside TensorFlow."""
    with graph.as_default():
        queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]])
        dequeue = queue.dequeue()
        enqueue = queue.enqueue(1.0)
    with tf.compat.v1.Session(graph=graph) as session:
        threading.Timer(SECS, session.run, [enqueue]).start()
        (stall,) = stalls_of(lambda: session.run(dequeue))
    assert "session.run(dequeue)" in stall


@pytest.mark.modes
def test_a_run_that_computes(graph: tf.Graph) -> None:
    """TensorFlow's own threads do the work; the loop's thread waits for them."""
    with graph.as_default():
        product = a = tf.random.uniform([700, 700])
        for _ in range(60):
            product = tf.matmul(product, a) / 700.0
        total = tf.reduce_sum(product)
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(total)
        (stall,) = stalls_of(lambda: session.run(total))
    assert "session.run(total)" in stall


def test_a_read_that_waits() -> None:
    reader, writer = os.pipe()
    threading.Timer(SECS, os.write, [writer, b"x"]).start()
    try:
        (stall,) = stalls_of(lambda: os.read(reader, 1))
    finally:
        os.close(reader)
        os.close(writer)
    assert "os.read" in stall


def test_many_short_callbacks_are_no_stall() -> None:
    async def main() -> None:
        for _ in range(20):
            time.sleep(SECS / 10)
            await asyncio.sleep(0)

    watch = StallWatch()
    with watch.watching():
        asyncio.run(main())
        assert watch.take() == []


def test_the_watch_can_be_put_on_top_of_another_and_taken_off() -> None:
    before = asyncio.Handle._run
    with StallWatch().watching():
        assert asyncio.Handle._run is not before
    assert asyncio.Handle._run is before
    assert not any(t.name == "stall watch" and not t.is_alive() for t in threading.enumerate())


@pytest.fixture
def package(tmp_path: Path) -> ModuleType:
    """A package of its own directory with code that blocks."""
    path = tmp_path / "watched" / "code.py"
    path.parent.mkdir()
    path.write_text(
        "import time\n"
        "class Thing:\n"
        "    def __init__(self):\n"
        f"        time.sleep({SECS})\n"
        "    def work(self, function):\n"
        "        function()\n"
    )
    spec = importlib.util.spec_from_file_location("watched", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_packages_code_is_charged(package: ModuleType) -> None:
    assert package.__file__ is not None
    blame = blame_package(str(Path(package.__file__).parent))
    thing = object.__new__(package.Thing)
    assert stalls_of(lambda: time.sleep(SECS), blame=blame) == [], "the test's own doing"
    assert stalls_of(package.Thing, blame=blame) == [], "a constructor is synchronous by contract"
    (stall,) = stalls_of(lambda: thing.work(lambda: time.sleep(SECS)), blame=blame)
    assert "function()" in stall, "it called back, on the loop"


def test_this_suite_charges_asupervisor(pytestconfig: pytest.Config) -> None:
    """The guard of this very run is on, for every kind, and knows asupervisor's code."""
    guard = pytestconfig.pluginmanager.get_plugin("asupervisor-guards")
    assert guard is not None
    assert guard.kinds >= {"stalls", "threads", "tasks", "files", "exceptions", "environ", "signals"}
    assert guard._watch.limit_secs == 0.05

    class Boundary:
        """Stands for a time and looks at who asks for it."""

        def __rsub__(self, other: object) -> float:
            seen.append(guard._watch._blame(sys._getframe()))
            return 0.0

        def __add__(self, other: object) -> float:
            return 3.0

    seen: list[bool] = []
    1.0 - Boundary()
    clock.next_boundary(Boundary(), 1.0, 2.0)
    assert seen == [False, True]
