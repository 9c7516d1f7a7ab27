"""Small models, stores on them, and what happened: shared by the tests of this room."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint.store import CheckpointStore

tf1 = tf.compat.v1


@dataclass
class Model:
    """A model whose step changes its variables one after another; each one holds the step."""

    graph: tf.Graph
    step: Any
    train: Any
    init: Any
    saver: Any
    variables: list[Any]

    def session(self) -> tf1.Session:
        return tf1.Session(graph=self.graph)


@dataclass
class Events:
    """An event sink that remembers."""

    seen: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.seen.append((kind, message, level, data))

    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.seen]

    def messages(self, kind: str) -> list[str]:
        return [message for seen, message, *_ in self.seen if seen == kind]

    def data(self, kind: str) -> list[dict[str, Any]]:
        return [data for seen, _, _, data in self.seen if seen == kind]


def build(
    parts: int = 3,
    size: int = 1000,
    *,
    dtype: Any = tf.float32,
    prefix: str = "v",
    with_step: bool = True,
    **saver_arguments: Any,
) -> Model:
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step() if with_step else None
        variables, last = [], None
        for index in range(parts):
            variable = tf1.get_variable(f"{prefix}{index}", [size], dtype, initializer=tf1.zeros_initializer())
            with tf1.control_dependencies([] if last is None else [last]):
                last = variable.assign_add(tf.ones([size], dtype)).op
            variables.append(variable)
        with tf1.control_dependencies([last]):
            train = tf1.assign_add(step, 1).op if step is not None else tf.no_op()
        saver = tf1.train.Saver(**saver_arguments)
        init = tf1.global_variables_initializer()
    return Model(graph, step, train, init, saver, variables)


@pytest.fixture
def make_model(variables: str) -> Callable[..., Model]:
    """Makes models with the kind of variables under test."""
    return build


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def make_store(tmp_path: Path, events: Events) -> Callable[..., CheckpointStore]:
    """Makes stores in one directory of the test."""

    def make(model: Model, logdir: Path | None = None, **arguments: Any) -> CheckpointStore:
        arguments.setdefault("global_step", model.step)
        arguments.setdefault("emit", events)
        return CheckpointStore(logdir or tmp_path / "logdir", model.graph, model.saver, **arguments)

    return make


@pytest.fixture
def read() -> Callable[[str], dict[str, Any]]:
    """What a checkpoint holds, by TensorFlow's own reader."""

    def read_checkpoint(prefix: str) -> dict[str, Any]:
        reader = tf.train.load_checkpoint(prefix)
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}

    return read_checkpoint


@pytest.fixture
def values_in(read: Callable[[str], dict[str, Any]]) -> Callable[[str], set[float]]:
    """All different values in a checkpoint of a `Model`: exactly one where it holds one step."""

    def values(prefix: str) -> set[float]:
        found: set[float] = set()
        for value in read(prefix).values():
            found |= set(np.unique(np.asarray(value, np.float64)).tolist())
        return found

    return values


@pytest.fixture
def trained(
    make_model: Callable[..., Model], make_store: Callable[..., CheckpointStore]
) -> Iterator[Callable[..., tuple[Model, CheckpointStore]]]:
    """Makes a directory with checkpoints of the given steps, written by a store of its own."""

    def train(*steps: int, logdir: Path | None = None, **arguments: Any) -> tuple[Model, CheckpointStore]:
        model = make_model()
        store = make_store(model, logdir, **arguments)
        with model.session() as raw:
            if not store.restorer(raw, model.saver, store.logdir, None):
                raw.run(model.init)
            for step in steps:
                while int(raw.run(model.step)) < step:
                    raw.run(model.train)
                store.publish(store.snapshot(raw))
        return model, store

    yield train


@pytest.fixture
def restored_step(
    make_model: Callable[..., Model], make_store: Callable[..., CheckpointStore]
) -> Callable[..., int | None]:
    """The step at which a new run begins in the directory, or None where nothing was restored."""

    def restore(logdir: Path | None = None, **arguments: Any) -> int | None:
        model = make_model()
        store = make_store(model, logdir, **arguments)
        with model.session() as raw:
            if not store.restorer(raw, model.saver, store.logdir, None):
                return None
            values = {float(value) for v in model.variables for value in np.unique(raw.run(v))}
            step = int(raw.run(model.step))
            assert values == {float(step)}
            return step

    return restore


@pytest.fixture
def mounted(tmp_path: Path) -> Any:
    """Makes small file systems in memory, where this process may mount some."""

    class Mounted:
        def __init__(self) -> None:
            self.places: list[Path] = []

        def __call__(self, size: str = "16m") -> Path:
            place = tmp_path / f"mount{len(self.places)}"
            place.mkdir()
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
            if done.returncode:
                pytest.skip("may not mount a file system here")
            self.places.append(place)
            return place

        def read_only(self, place: Path) -> None:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True, capture_output=True)

    mounts = Mounted()
    yield mounts
    for place in mounts.places:
        subprocess.run(["umount", "-l", place], check=True, capture_output=True)
