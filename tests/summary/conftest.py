"""Helpers of the event file's tests."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf


class Recorder:
    """An event sink that remembers, and lets a test wait for an event."""

    def __init__(self) -> None:
        self.events: list[SimpleNamespace] = []
        self._changed = threading.Condition()

    def __call__(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        with self._changed:
            self.events.append(SimpleNamespace(kind=kind, message=message, level=level, data=data))
            self._changed.notify_all()

    def of(self, kind: str) -> list[SimpleNamespace]:
        return [event for event in self.events if event.kind == kind]

    def wait(self, kind: str, count: int = 1, timeout_secs: float = 20) -> list[SimpleNamespace]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout_secs), self.events
            return self.of(kind)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _files(logdir: Path) -> list[Path]:
    return sorted(logdir.glob("events.out.tfevents.*"), key=lambda path: int(path.name.split(".")[-1]))


@pytest.fixture
def event_files() -> Any:
    """The event files of a directory, in the order in which they were opened."""
    return _files


@pytest.fixture
def read_events() -> Any:
    """All events of one file, by TensorFlow's own reader."""
    return lambda path: list(tf.compat.v1.train.summary_iterator(str(path)))


def _kinds(events: list[Any]) -> list[str]:
    return [event.WhichOneof("what") for event in events]


@pytest.fixture
def kinds() -> Any:
    return _kinds


class FakeFile:
    """A record file that a test can make fail, block or slow."""

    def __init__(self, path: str) -> None:
        self.real = tf.io.TFRecordWriter(path)

    def write(self, record: bytes) -> None:
        self.real.write(record)

    def flush(self) -> None:
        self.real.flush()

    def close(self) -> None:
        self.real.close()


@pytest.fixture
def fake_file() -> type[FakeFile]:
    return FakeFile
