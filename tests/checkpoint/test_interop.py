"""Both ways: what TensorFlow alone wrote restores here, what we wrote restores there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint.store import CheckpointStore

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def digits_like(**saver_arguments: Any) -> Any:
    """A model as people have one: layers, Adam, a step."""

    class Model:
        pass

    model: Any = Model()
    model.graph = tf.Graph()
    with model.graph.as_default():
        model.step = tf1.train.get_or_create_global_step()
        inputs = tf.ones([8, 5])
        kernel = tf1.get_variable("dense/kernel", [5, 3], initializer=tf1.random_normal_initializer(seed=1))
        bias = tf1.get_variable("dense/bias", [3], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean((tf.matmul(inputs, kernel) + bias - 1.0) ** 2)
        model.train = tf1.train.AdamOptimizer(0.1).minimize(loss, global_step=model.step)
        model.variables = tf1.global_variables()
        model.saver = None
        model.make_saver = lambda: tf1.train.Saver(**saver_arguments)
        model.init = tf1.global_variables_initializer()
    return model


def ours(model: Any, logdir: Path) -> CheckpointStore:
    if model.saver is None:
        with model.graph.as_default():
            model.saver = model.make_saver()
    return CheckpointStore(logdir, model.graph, model.saver, global_step=model.step)


def by_tensorflow(kind: str, logdir: Path, steps: int) -> tuple[Any, dict[str, Any]]:
    """Train there with one of TensorFlow's own classes; the final values."""
    model = digits_like()
    if kind == "saver":
        logdir.mkdir(exist_ok=True)
        with model.graph.as_default(), tf1.Session(graph=model.graph) as raw:
            saver = tf1.train.Saver()
            latest = tf.train.latest_checkpoint(str(logdir))
            raw.run(model.init) if latest is None else saver.restore(raw, latest)
            for _ in range(steps):
                raw.run(model.train)
                saver.save(raw, str(logdir / "model.ckpt"), global_step=model.step)
            return model, values(model, raw)
    if kind == "monitored":
        with (
            model.graph.as_default(),
            tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(logdir), save_checkpoint_steps=2, save_checkpoint_secs=None, save_summaries_steps=0,
                log_step_count_steps=0,
            ) as session,
        ):  # fmt: skip
            for _ in range(steps):
                session.run(model.train)
            result = values(model, session)
        tf1.summary.FileWriterCache.clear()  # it keeps the writer, its thread and its file open
        return model, result
    # Its own checkpoint thread does not work in TensorFlow's default mode; what it does is this.
    with model.graph.as_default():
        supervisor = tf1.train.Supervisor(logdir=str(logdir), save_model_secs=0, save_summaries_secs=0)
        with supervisor.managed_session() as session:
            for _ in range(steps):
                session.run(model.train)
                supervisor.saver.save(session, supervisor.save_path, global_step=supervisor.global_step)
            return model, values(model, session)


def values(model: Any, raw: Any) -> dict[str, Any]:
    return {variable.op.name: raw.run(variable) for variable in model.variables}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.thin
@pytest.mark.parametrize("kind", ["saver", "monitored", "supervisor"])
def test_theirs_here(kind: str, variables: str, tmp_path: Path) -> None:
    """Restored with every value, gone on with, rotated: their old ones go as they would have gone there."""
    logdir = tmp_path / "logdir"
    _, there = by_tensorflow(kind, logdir, 4)
    model = digits_like()
    store = ours(model, logdir)
    model.graph.finalize()
    with tf1.Session(graph=model.graph) as raw:
        assert store.restorer(raw, model.saver, str(logdir), None)
        assert_same(values(model, raw), there)
        for _ in range(6):
            raw.run(model.train)
            store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [6, 7, 8, 9, 10]
    assert all(record.damage is None for record in store.checkpoints())
    assert len(list(logdir.glob("model.ckpt-*.index"))) == 5


@pytest.mark.thin
@pytest.mark.parametrize("kind", ["saver", "monitored", "supervisor"])
def test_ours_there(kind: str, variables: str, tmp_path: Path) -> None:
    logdir = tmp_path / "logdir"
    model = digits_like()
    store = ours(model, logdir)
    with tf1.Session(graph=model.graph) as raw:
        raw.run(model.init)
        for _ in range(7):
            raw.run(model.train)
            info = store.publish(store.snapshot(raw))
        here = values(model, raw)
    assert tf.train.latest_checkpoint(str(logdir)) == info.prefix == str(logdir / "model.ckpt-7")
    reader = tf.train.load_checkpoint(str(logdir))
    assert_same({name: reader.get_tensor(name) for name in here}, here)
    assert [name for name, _ in tf.train.list_variables(str(logdir))] == sorted(reader.get_variable_to_shape_map())
    _, there = by_tensorflow(kind, logdir, 2)
    assert there["global_step"] == 9
    # They went on from our state, not from the beginning, and we go on from theirs.
    again = digits_like()
    store = ours(again, logdir)
    with tf1.Session(graph=again.graph) as raw:
        assert store.restorer(raw, again.saver, str(logdir), None)
        assert_same(values(again, raw), there)
        raw.run(again.train)
        store.publish(store.snapshot(raw))
    assert store.checkpoints()[-1].step == 10
    assert all(record.damage is None for record in store.checkpoints())
    # Their Saver deletes its own kinds of files only; our notes about those go when we come back.
    orphans = {path.stem for path in logdir.glob("*.manifest")} - {path.stem for path in logdir.glob("*.index")}
    assert orphans == set()


def test_back_and_forth(variables: str, tmp_path: Path) -> None:
    """Many times: nobody takes the other's checkpoints for damaged or old ones."""
    logdir = tmp_path / "logdir"
    expected = 0
    for turn in range(4):
        if turn % 2:
            by_tensorflow("monitored", logdir, 3)
        else:
            model = digits_like()
            store = ours(model, logdir)
            with tf1.Session(graph=model.graph) as raw:
                if not store.restorer(raw, model.saver, str(logdir), None):
                    raw.run(model.init)
                assert int(raw.run(model.step)) == expected
                for _ in range(3):
                    raw.run(model.train)
                    store.publish(store.snapshot(raw))
            assert store.restored is None or store.restored.damaged == ()
        expected += 3
        assert not (logdir / "quarantine").exists()
    assert len(list(logdir.glob("model.ckpt-*.index"))) <= 5


def test_import_meta_graph(variables: str, tmp_path: Path) -> None:
    """The .meta beside a checkpoint is enough to go on, with a saver from it."""
    model = digits_like()
    store = ours(model, tmp_path / "logdir")
    with tf1.Session(graph=model.graph) as raw:
        raw.run(model.init)
        raw.run(model.train)
        info = store.publish(store.snapshot(raw))
        here = values(model, raw)
    graph = tf.Graph()
    with graph.as_default():
        saver = tf1.train.import_meta_graph(f"{info.prefix}.meta")
        step = tf1.train.get_global_step()
        again = CheckpointStore(tmp_path / "logdir", graph, saver, global_step=step)
        assert again.snapshots.ops is not None
        with tf1.Session(graph=graph) as raw:
            assert again.restorer(raw, saver, again.logdir, None)
            assert_same({v.op.name: raw.run(v) for v in tf1.global_variables()}, here)
            assert again.publish(again.snapshot(raw)).prefix == info.prefix


def test_object_based_checkpoints(tmp_path: Path) -> None:
    """One of tf.train.Checkpoint, which needs resource variables, restores as far as a Saver restores it."""
    graph = tf.Graph()
    with graph.as_default(), tf1.Session(graph=graph) as raw:
        variable = tf1.get_variable("v", initializer=tf.constant([1.0, 2.0]), use_resource=True)
        checkpoint = tf1.train.Checkpoint(v=variable)
        raw.run(tf1.global_variables_initializer())
        path = checkpoint.save(str(tmp_path / "ck"), session=raw)
    graph = tf.Graph()
    with graph.as_default():
        variable = tf1.get_variable("v", initializer=tf.constant([0.0, 0.0]), use_resource=True)
        saver = tf1.train.Saver()
        store = CheckpointStore(tmp_path / "logdir", graph, saver)
        with tf1.Session(graph=graph) as raw:
            assert store.restorer(raw, saver, None, path)
            np.testing.assert_array_equal(raw.run(variable), [1.0, 2.0])


def test_file_address(variables: str, tmp_path: Path) -> None:
    model = digits_like()
    with model.graph.as_default():
        model.saver = tf1.train.Saver()
    store = CheckpointStore(f"file://{tmp_path}/logdir", model.graph, model.saver, global_step=model.step)
    with tf1.Session(graph=model.graph) as raw:
        raw.run(model.init)
        assert store.publish(store.snapshot(raw)).prefix == f"{tmp_path}/logdir/model.ckpt-0"


def test_a_reader_beside_us(make_model: Any, make_store: Any) -> None:
    """An evaluator that reads what the state file names, whenever it likes, never meets half a checkpoint."""
    model = make_model(parts=3, size=5_000, max_to_keep=50)
    store = make_store(model)
    stop = threading.Event()
    seen: list[int] = []
    failures: list[str] = []

    def evaluate() -> None:
        while not stop.is_set():
            prefix = tf.train.latest_checkpoint(store.logdir)
            if prefix is None:
                continue
            found = {float(x) for n in range(3) for x in np.unique(tf.train.load_variable(prefix, f"v{n}"))}
            step = int(prefix.rsplit("-", 1)[1])
            seen.append(step)
            if found != {float(step)}:
                failures.append(f"{prefix}: {found}")

    with model.session() as raw:
        raw.run(model.init)
        reader = threading.Thread(target=evaluate)
        reader.start()
        try:
            for _ in range(40):
                raw.run(model.train)
                store.publish(store.snapshot(raw))
        finally:
            stop.set()
            reader.join()
    assert failures == []
    assert seen == sorted(seen) and len(set(seen)) > 3
