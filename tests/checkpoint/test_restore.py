"""Restoring: the newest good checkpoint, all of it, or an error that tells everything; never step 0 by accident."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint import restore as rs
from asupervisor.checkpoint.records import Kind
from asupervisor.checkpoint.retention import LatestN
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotRestored
from tests.forks import Forks

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def listing(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def break_file(path: Path, how: str = "cut") -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    else:
        path.unlink()


# ------------------------------------------------------------------------------------------ F01, F02


@pytest.mark.parametrize("loss", ["deleted", "empty", "cut", "binary"])
def test_f01_state_file_lost(loss: str, trained: Any, restored_step: Any, events: Any) -> None:
    """F01. TensorFlow: deleted or cut (with a warning), it begins at step 0 and overwrites; empty: ValueError."""
    _, store = trained(3, 5)
    state = store.directory / "checkpoint"
    if loss == "deleted":
        state.unlink()
    else:
        state.write_bytes({"empty": b"", "cut": state.read_bytes()[:30], "binary": os.urandom(99)}[loss])
    assert restored_step() == 5
    assert tf.train.latest_checkpoint(store.logdir) == str(store.directory / "model.ckpt-5")
    assert "checkpoint.state_rebuilt" in events.kinds()


@pytest.mark.parametrize("state", ["empty", "binary", "names what is gone", "names what is elsewhere"])
def test_f01_nothing_left_but_the_state_file(state: str, trained: Any, restored_step: Any) -> None:
    """F01, 36. There were checkpoints once: not a reason to begin at step 0, but an error that names the file."""
    _, store = trained(3)
    for path in store.directory.glob("model.ckpt-3*"):
        path.unlink()
    if state == "names what is elsewhere":
        (store.directory / "checkpoint").write_text('model_checkpoint_path: "../other/model.ckpt-3"')
    elif state != "names what is gone":
        (store.directory / "checkpoint").write_bytes(b"" if state == "empty" else os.urandom(50))
    before = listing(store.directory)
    with pytest.raises(CheckpointNotRestored) as caught:
        restored_step()
    assert str(store.directory / "checkpoint") in str(caught.value)
    assert "fresh_start=True" in str(caught.value)
    assert listing(store.directory) == before
    assert restored_step(fresh_start=True) is None


@pytest.mark.parametrize("meta", [True, False])
def test_f01_a_file_of_the_older_format_without_its_state_file(
    meta: bool, make_model: Any, restored_step: Any, tmp_path: Path
) -> None:
    """F01. TensorFlow's V1 format is one file, which nothing but the state file tells from others."""
    logdir = tmp_path / "logdir"
    logdir.mkdir()
    model = make_model(write_version=tf1.train.SaverDef.V1)
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        for _ in range(5):
            raw.run(model.train)
        model.saver.save(raw, str(logdir / "model.ckpt"), global_step=5, write_meta_graph=meta)
    (logdir / "checkpoint").unlink()
    assert (logdir / "model.ckpt-5").is_file()
    assert restored_step() == 5


def test_f01_a_file_that_may_have_been_a_checkpoint(restored_step: Any, tmp_path: Path) -> None:
    (tmp_path / "logdir").mkdir()
    (tmp_path / "logdir" / "model.ckpt-5").write_bytes(os.urandom(50))
    with pytest.raises(CheckpointNotRestored, match=r"model\.ckpt-5"):
        restored_step()


def test_f01_vanished_checkpoint_falls_back(trained: Any, restored_step: Any) -> None:
    """36. TensorFlow's prepare_session raises ValueError here although older ones are there."""
    _, store = trained(3, 5)
    for path in store.directory.glob("model.ckpt-5*"):
        path.unlink()
    assert restored_step() == 3


def test_f02_a_moved_directory(trained: Any, restored_step: Any, tmp_path: Path, make_model: Any) -> None:
    """F02. TensorFlow writes absolute names: a moved directory does not restore."""
    directory = tmp_path / "logdir"
    directory.mkdir()
    model = make_model()
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        for _ in range(3):
            raw.run(model.train)
            model.saver.save(raw, str(directory / "model.ckpt"), global_step=model.step)
    assert str(directory) in (directory / "checkpoint").read_text()
    moved = tmp_path / "moved"
    directory.rename(moved)
    with pytest.raises(ValueError, match="not a valid checkpoint"), model.session() as raw:
        model.saver.restore(raw, tf.train.get_checkpoint_state(str(moved)).model_checkpoint_path)
    assert restored_step(moved) == 3
    assert str(directory) not in (moved / "checkpoint").read_text()
    assert tf.train.latest_checkpoint(str(moved)) == str(moved / "model.ckpt-3")


def test_f02_training_in_a_copy_leaves_the_original_alone(trained: Any, make_model: Any, tmp_path: Path) -> None:
    """F02. TensorFlow deletes the original's checkpoints, by the absolute names in the copied state file."""
    directory = tmp_path / "logdir"
    directory.mkdir()
    model = make_model(max_to_keep=2)
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        for _ in range(2):
            raw.run(model.train)
            model.saver.save(raw, str(directory / "model.ckpt"), global_step=model.step)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = listing(directory)
    _, store = trained(3, 4, 5, logdir=copy, retention=LatestN(2))
    assert [record.step for record in store.checkpoints()] == [4, 5]
    assert listing(directory) == before


def test_a_relative_logdir_survives_a_chdir(
    trained: Any, make_model: Any, tmp_path: Path, monkeypatch: Any, make_store: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model()
    store = make_store(model, Path("runs/digits"))
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        assert store.publish(store.snapshot(raw)).prefix == "runs/digits/model.ckpt-0"
        monkeypatch.chdir("/")
        raw.run(model.train)
        store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [0, 1]
    assert tf.train.latest_checkpoint(str(tmp_path / "runs/digits")) == str(tmp_path / "runs/digits/model.ckpt-1")


# ------------------------------------------------------------------------------------------ F03, F04


def test_f03_a_saver_of_a_part(variables: str, tmp_path: Path, events: Any) -> None:
    """F03. TensorFlow: the first run works, each restart dies with uninitialised variables."""

    def run() -> tuple[list[Any], CheckpointStore]:
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.train.get_or_create_global_step()
            saved = tf1.get_variable("saved", initializer=tf.constant(1.0))
            tf1.get_variable("other", initializer=tf.constant(5.0))
            with tf1.control_dependencies([saved]):
                late = tf1.get_variable("late", initializer=lambda: tf.constant(7.0))
            change = [saved.assign_add(1.0), late.assign(0.0), tf1.assign_add(step, 1)]
            saver = tf1.train.Saver([saved, step])
            init = tf1.global_variables_initializer()
            everything = tf1.global_variables()
        store = CheckpointStore(tmp_path, graph, saver, global_step=step, emit=events)
        graph.finalize()
        with tf1.Session(graph=graph) as raw:
            if not store.restorer(raw, saver, str(tmp_path), None):
                raw.run(init)
                raw.run(change)
                store.publish(store.snapshot(raw))
            return [float(raw.run(v)) for v in everything], store

    assert run()[0] == [1.0, 2.0, 5.0, 0.0]
    values, store = run()
    assert values == [1.0, 2.0, 5.0, 7.0]
    assert set(store.restored.initialized) == {"other", "late"}
    assert "other" in events.messages("checkpoint.restored")[0]


def test_f03_initial_values_that_read_one_another(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        first = tf1.get_variable("z_first", initializer=tf.constant(2.0))
        second = tf1.get_variable("b_second", initializer=first * 3.0)
        third = tf1.get_variable("a_third", initializer=second + 1.0)
        fed = tf1.placeholder(tf.float32, [])
        fourth = tf1.get_variable("fourth", initializer=fed)
        with tf1.Session(graph=graph) as raw:
            missing = rs.uninitialized(raw, tf1.global_variables())
            assert len(missing) == 4
            rs.initialize(raw, missing[::-1], {fed: 9.0})
            assert raw.run([first, second, third, fourth]) == [2.0, 6.0, 7.0, 9.0]
            assert rs.uninitialized(raw, tf1.global_variables()) == []


def test_f03_what_cannot_be_initialised_is_raised(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        pairs = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([1.0, 2.0]))
        table = tf.lookup.StaticHashTable(pairs, 0.0)  # nobody runs its initialiser
        needs = tf1.get_variable("needs", initializer=table.lookup(tf.constant(1)))
        with tf1.Session(graph=graph) as raw, pytest.raises(tf.errors.FailedPreconditionError):
            rs.initialize(raw, [needs])


def test_f03_many_variables(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        everything = [tf1.get_variable(f"v{n}", initializer=tf.constant(float(n))) for n in range(40)]
        with tf1.Session(graph=graph) as raw:
            raw.run([v.initializer for n, v in enumerate(everything) if n % 7])
            assert rs.uninitialized(raw, everything) == [v for n, v in enumerate(everything) if not n % 7]


def test_f04_not_restored_is_not_overwritten(trained: Any, make_model: Any, make_store: Any) -> None:
    """F04. TensorFlow: saving configured and restoring not, each restart begins at 0 and overwrites."""
    _, earlier = trained(3, 5)
    before = listing(earlier.directory)
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        with pytest.raises(CheckpointNotRestored, match=r"model\.ckpt-5"):
            store.publish(store.snapshot(raw))
    assert listing(earlier.directory) == before


def test_f04_a_restore_from_elsewhere_does_not_count(
    trained: Any, make_model: Any, make_store: Any, tmp_path: Path
) -> None:
    _, here = trained(3)
    _, there = trained(2, logdir=tmp_path / "there")
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        assert store.restorer(raw, model.saver, None, str(there.directory / "model.ckpt-2"))
        with pytest.raises(CheckpointNotRestored):
            store.publish(store.snapshot(raw))
    assert here.latest_good().step == 3


# ------------------------------------------------------------------------------------------ F05


@pytest.mark.parametrize("how", ["cut", "flip", "missing"])
@pytest.mark.parametrize("part", [".data-00000-of-00001", ".index"])
def test_f05_newest_is_damaged(how: str, part: str, trained: Any, restored_step: Any, events: Any) -> None:
    """F05. TensorFlow: no restart works although older ones are good; Supervisor: "generator didn't yield"."""
    _, store = trained(3, 5, 7)
    kept = (store.directory / "model.ckpt-7.manifest").read_bytes()
    break_file(store.directory / f"model.ckpt-7{part}", how)
    assert restored_step() == 5
    quarantine = store.directory / "quarantine" / "model.ckpt-7"
    assert (quarantine / "model.ckpt-7.manifest").read_bytes() == kept
    reason = events.data("checkpoint.quarantined")[0]["reason"]
    assert reason and reason in (quarantine / "reason.txt").read_text()
    assert not list(store.directory.glob("model.ckpt-7*"))
    assert tf.train.latest_checkpoint(store.logdir) == str(store.directory / "model.ckpt-5")
    assert restored_step() == 5  # and it stays so


def test_f05_the_cause_is_told_without_a_stack(trained: Any, restored_step: Any, events: Any) -> None:
    """TensorFlow wrote it, so that there are no checksums: the words are those of its RestoreV2."""
    _, store = trained(3, 5)
    for path in store.directory.glob("*.manifest"):
        path.unlink()
    break_file(store.directory / "model.ckpt-5.data-00000-of-00001")
    assert restored_step() == 3
    reason = events.data("checkpoint.quarantined")[0]["reason"]
    assert "Detected at" not in reason and "File " not in reason
    assert "RestoreV2" in reason and len(reason) < 320


def test_f05_several_are_damaged(trained: Any, restored_step: Any, events: Any) -> None:
    _, store = trained(1, 2, 3, 4)
    for step in (4, 3, 1):
        break_file(store.directory / f"model.ckpt-{step}.data-00000-of-00001")
    assert restored_step() == 2
    assert sorted(path.name for path in (store.directory / "quarantine").iterdir()) == ["model.ckpt-3", "model.ckpt-4"]
    assert len(events.data("checkpoint.restored")[-1]["damaged"]) == 2


def test_f05_damaged_again_after_training_on(trained: Any, restored_step: Any) -> None:
    """The same name comes into quarantine a second time."""
    for _ in range(2):
        _, store = trained(3, 5)
        break_file(store.directory / "model.ckpt-5.data-00000-of-00001")
        assert restored_step() == 3
    assert sorted(path.name for path in (store.directory / "quarantine").iterdir()) == [
        "model.ckpt-5",
        "model.ckpt-5.2",
    ]


def test_f05_all_are_damaged(trained: Any, restored_step: Any) -> None:
    """Nothing is moved, nothing begins at step 0: each attempt tells all causes."""
    _, store = trained(1, 2)
    for step in (1, 2):
        break_file(store.directory / f"model.ckpt-{step}.data-00000-of-00001")
    before = listing(store.directory)
    for _ in range(2):
        with pytest.raises(CheckpointNotRestored, match=r"model.ckpt-2: .*model.ckpt-1: "):
            restored_step()
    assert listing(store.directory) == before
    assert restored_step(fresh_start=True) is None


def test_f05_only_the_quarantine_is_left(trained: Any, restored_step: Any) -> None:
    _, store = trained(3, 5)
    break_file(store.directory / "model.ckpt-5.index")
    assert restored_step() == 3
    for path in [*store.directory.glob("model.ckpt-3*"), store.directory / "checkpoint"]:
        path.unlink()
    with pytest.raises(CheckpointNotRestored, match="quarantine"):
        restored_step()


def test_f05_the_graph_file_is_not_needed(trained: Any, restored_step: Any) -> None:
    _, store = trained(3, 5)
    (store.directory / "model.ckpt-5.meta").unlink()
    assert restored_step() == 5


def test_f05_a_read_only_directory_restores(trained: Any, restored_step: Any, tmp_path: Path, mounted: Any) -> None:
    """What is damaged cannot be moved away, and is passed over all the same."""
    place = mounted()
    _, store = trained(3, 5, logdir=place / "logdir")
    break_file(store.directory / "model.ckpt-5.data-00000-of-00001")
    mounted.read_only(place)
    assert restored_step(place / "logdir") == 3


# ------------------------------------------------------------------------------------------ what does not fit


def test_another_model_is_refused(trained: Any, make_model: Any, make_store: Any) -> None:
    _, earlier = trained(3)
    before = listing(earlier.directory)
    model = make_model(prefix="w")
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        with pytest.raises(CheckpointMismatch) as caught:
            store.restorer(raw, model.saver, store.logdir, None)
        assert float(raw.run(model.variables[0])[0]) == 0.0
    error = caught.value
    assert error.path == str(earlier.directory / "model.ckpt-3")
    assert error.missing == ("w0 float32 [1000]", "w1 float32 [1000]", "w2 float32 [1000]")
    assert error.unexpected == ("v0 float32 [1000]", "v1 float32 [1000]", "v2 float32 [1000]")
    assert listing(earlier.directory) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"size": 7}, "v0 is float32 [1000] in the checkpoint and float32 [7] in the model"),
        ({"dtype": tf.float64}, "v0 is float32 [1000] in the checkpoint and float64 [1000] in the model"),
    ],
)
def test_other_shapes_and_types_are_refused(
    change: dict[str, Any], told: str, trained: Any, make_model: Any, make_store: Any
) -> None:
    _, earlier = trained(3)
    before = listing(earlier.directory)
    model = make_model(**change)
    store = make_store(model)
    with model.session() as raw, pytest.raises(CheckpointMismatch) as caught:
        store.restorer(raw, model.saver, store.logdir, None)
    assert told in caught.value.different
    assert told in str(caught.value) and str(earlier.directory) in str(caught.value)
    assert listing(earlier.directory) == before


def test_partitioned_shapes_are_compared_as_a_whole(variables: str, tmp_path: Path) -> None:
    def store_of(rows: int) -> tuple[CheckpointStore, Any]:
        graph = tf.Graph()
        with graph.as_default():
            tf1.get_variable("p", [rows, 2], partitioner=tf1.fixed_size_partitioner(2))
            saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
        return CheckpointStore(tmp_path, graph, saver), init

    store, init = store_of(6)
    with tf1.Session(graph=store.graph) as raw:
        raw.run(init)
        store.claim(None)
        store.publish(store.snapshot(raw))
    store, _ = store_of(6)
    with tf1.Session(graph=store.graph) as raw:
        assert store.restorer(raw, store.saver, str(tmp_path), None)
    store, _ = store_of(8)
    with tf1.Session(graph=store.graph) as raw, pytest.raises(CheckpointMismatch, match=r"\[6, 2\].*\[8, 2\]"):
        store.restorer(raw, store.saver, str(tmp_path), None)


def test_a_saver_that_reshapes_may(variables: str, tmp_path: Path) -> None:
    def run(shape: list[int], value: Any) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            variable = tf1.get_variable("v", shape, initializer=tf1.constant_initializer(value))
            saver, init = tf1.train.Saver(reshape=True), tf1.global_variables_initializer()
        store = CheckpointStore(tmp_path, graph, saver)
        with tf1.Session(graph=graph) as raw:
            if not store.restorer(raw, saver, str(tmp_path), None):
                raw.run(init)
                store.publish(store.snapshot(raw))
            return raw.run(variable)

    run([2, 3], 5.0)
    np.testing.assert_array_equal(run([6], 0.0), np.full([6], 5.0))
    with pytest.raises(CheckpointMismatch):
        run([7], 0.0)


def grown(tmp_path: Path, names: list[str], events: Any, **arguments: Any) -> tuple[dict[str, float], CheckpointStore]:
    """Run a model with these variables: restored, or initialised to 1, stepped once and saved."""
    graph = tf.Graph()
    with graph.as_default():
        everything = [tf1.get_variable(name, [3], initializer=tf1.ones_initializer()) for name in names]
        change = [v.assign_add(tf.ones([3])) for v in everything]
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path, graph, saver, emit=events, **arguments)
    graph.finalize()
    with tf1.Session(graph=graph) as raw:
        if not store.restorer(raw, saver, str(tmp_path), None):
            raw.run(init)
            raw.run(change)
            store.publish(store.snapshot(raw))
        return {name: float(raw.run(v)[0]) for name, v in zip(names, everything, strict=True)}, store


def test_a_model_that_grew(variables: str, tmp_path: Path, events: Any) -> None:
    """What the checkpoint did not supply is initialised, and named."""
    grown(tmp_path, ["a", "b"], events)
    values, store = grown(tmp_path, ["a", "b", "c"], events)
    assert values == {"a": 2.0, "b": 2.0, "c": 1.0}
    assert store.restored.initialized == ("c",)
    assert events.seen[-1][2] == "warning"
    with pytest.raises(CheckpointMismatch, match="not in the checkpoint: c"):
        grown(tmp_path, ["a", "b", "c"], events, partial=False)


def test_a_model_that_shrank(variables: str, tmp_path: Path, events: Any) -> None:
    """As with TensorFlow: a checkpoint may hold more than is asked for."""
    grown(tmp_path, ["a", "b"], events)
    assert grown(tmp_path, ["a"], events)[0] == {"a": 2.0}


OBJECTS = """
import sys, tensorflow as tf
held = {f"v{n}": tf.Variable(tf.fill([1000], 9.0), name=f"v{n}") for n in range(3)}
held["step"] = tf.Variable(9, dtype=tf.int64, name="global_step")
tf.train.CheckpointManager(tf.train.Checkpoint(**held), sys.argv[1], 3).save(9)
"""


def test_a_checkpoint_of_objects(
    make_model: Any, make_store: Any, restored_step: Any, forks: Forks, tmp_path: Path
) -> None:
    """On a finalised graph no saver can restore it: the error tells, and what it says to do works."""
    logdir = tmp_path / "logdir"
    child = forks.start("-c", OBJECTS, logdir)
    child.communicate(timeout=60)
    assert child.returncode == 0
    model = make_model()
    store = make_store(model)
    model.graph.finalize()
    before = listing(logdir)
    with model.session() as raw, pytest.raises(CheckpointMismatch, match="Convert it once") as caught:
        store.restorer(raw, model.saver, store.logdir, None)
    assert listing(logdir) == before
    assert len(caught.value.missing) == 4 and "init_from" in str(caught.value)
    plain, converted = make_model(), tmp_path / "converted"
    converted.mkdir()
    with plain.graph.as_default(), plain.session() as raw:
        saver = tf1.train.Saver()
        saver.restore(raw, str(logdir / "ckpt-9"))
        saver.save(raw, str(converted / "model.ckpt"), global_step=9)
    assert restored_step(tmp_path / "new", init_from=converted) == 9


def test_partial_restore_of_another_model(variables: str, tmp_path: Path, events: Any) -> None:
    grown(tmp_path, ["a", "b"], events)
    with pytest.raises(CheckpointMismatch):
        grown(tmp_path, ["a", "c"], events)
    values, store = grown(tmp_path, ["a", "c"], events, partial=True)
    assert values == {"a": 2.0, "c": 1.0}
    assert store.restored.initialized == ("c",)
    with pytest.raises(CheckpointMismatch):
        grown(tmp_path, ["x", "y"], events, partial=True)


def test_partial_restore_of_a_partitioned_variable(variables: str, tmp_path: Path) -> None:
    def run(extra: bool) -> tuple[Any, Any]:
        graph = tf.Graph()
        with graph.as_default():
            parted = tf1.get_variable(
                "p", [5, 2], partitioner=tf1.fixed_size_partitioner(2), initializer=tf1.random_normal_initializer()
            )
            if extra:
                tf1.get_variable("extra", [1])
            whole = tf.convert_to_tensor(parted)
            saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
        store = CheckpointStore(tmp_path, graph, saver)
        with tf1.Session(graph=graph) as raw:
            if not store.restorer(raw, saver, str(tmp_path), None):
                raw.run(init)
                store.publish(store.snapshot(raw))
            return raw.run(whole), store.restored

    first, _ = run(False)
    second, restored = run(True)
    np.testing.assert_array_equal(first, second)
    assert restored.initialized == ("extra",)


# ------------------------------------------------------------------------------------------ where from


def test_an_explicit_checkpoint(trained: Any, make_model: Any, make_store: Any, tmp_path: Path) -> None:
    _, there = trained(3, 5, logdir=tmp_path / "there")
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        assert store.restorer(raw, model.saver, None, str(there.directory / "model.ckpt-3"))
        assert int(raw.run(model.step)) == 3
        assert store.restorer.restored_from == str(there.directory / "model.ckpt-3")
    break_file(there.directory / "model.ckpt-5.data-00000-of-00001")
    before = listing(there.directory)
    with model.session() as raw:
        with pytest.raises(CheckpointDamaged, match=r"model\.ckpt-5"):
            store.restorer(raw, model.saver, None, str(there.directory / "model.ckpt-5"))
        with pytest.raises(CheckpointDamaged):
            store.restorer(raw, model.saver, None, str(there.directory / "model.ckpt-99"))
    assert listing(there.directory) == before


def test_an_older_one_of_the_own_directory(trained: Any, make_model: Any, make_store: Any, restored_step: Any) -> None:
    """Explicitly restored, it is where training goes on from: what is saved next is the newest."""
    trained(3, 5)
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        assert store.restorer(raw, model.saver, None, str(store.directory / "model.ckpt-3"))
        raw.run(model.train)
        store.publish(store.snapshot(raw))
    assert restored_step() == 4


def test_init_from_another_directory(trained: Any, make_model: Any, make_store: Any, tmp_path: Path) -> None:
    _, there = trained(3, 5, logdir=tmp_path / "there")
    break_file(there.directory / "model.ckpt-5.data-00000-of-00001")
    before = listing(there.directory)
    for _ in range(2):
        model = make_model()
        store = make_store(model, init_from=there.directory)
        with model.session() as raw:
            assert store.restorer(raw, model.saver, store.logdir, None)
            raw.run(model.train)
            last = store.publish(store.snapshot(raw))
    assert last.step == 5  # the second run went on from its own directory
    assert listing(there.directory) == before
    with pytest.raises(CheckpointNotRestored, match="init_from"), model.session() as raw:
        empty = make_store(make_model(), tmp_path / "new", init_from=tmp_path)
        empty.restorer(raw, model.saver, empty.logdir, None)


def test_init_from_one_checkpoint(trained: Any, make_model: Any, make_store: Any, tmp_path: Path) -> None:
    _, there = trained(3, 5, logdir=tmp_path / "there")
    model = make_model()
    store = make_store(model, init_from=there.directory / "model.ckpt-3")
    with model.session() as raw:
        assert store.restorer(raw, model.saver, store.logdir, None)
        assert int(raw.run(model.step)) == 3
        store.publish(store.snapshot(raw))


@pytest.mark.parametrize("part", [".index", ".meta", ".data-00000-of-00001", ".manifest"])
def test_one_file_of_a_checkpoint_is_not_its_prefix(
    part: str, trained: Any, make_model: Any, make_store: Any, tmp_path: Path
) -> None:
    _, there = trained(3, logdir=tmp_path / "there")
    model, prefix = make_model(), str(there.directory / "model.ckpt-3")
    store = make_store(model)
    with model.session() as raw, pytest.raises(CheckpointDamaged) as caught:
        store.restorer(raw, model.saver, None, prefix + part)
    assert str(caught.value).endswith(f"one file of a checkpoint: pass the prefix of all of them, {prefix!r}")


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "damaged ones"])
def test_init_from_a_place_with_nothing_to_restore(
    what: str, trained: Any, make_model: Any, make_store: Any, tmp_path: Path
) -> None:
    """The error speaks of that place, and gives no advice that is for the run's own directory."""
    place = tmp_path / "there"
    if what == "an empty directory":
        place.mkdir()
    elif what == "damaged ones":
        trained(3, logdir=place)
        break_file(place / "model.ckpt-3.index")
    model = make_model()
    store = make_store(model, init_from=place)
    with model.session() as raw, pytest.raises(CheckpointError) as caught:
        store.restorer(raw, model.saver, store.logdir, None)
    text = str(caught.value)
    assert {
        "nothing": f"checkpoint {str(place)!r} is not there",
        "an empty directory": f"init_from {str(place)!r} cannot be restored: it is a directory without checkpoints",
        "damaged ones": f"init_from {str(place)!r} cannot be restored: all 1 are damaged",
    }[what] in text
    assert "logdir" not in text and "fresh_start" not in text


def test_fresh_start_moves_everything_aside(
    trained: Any, make_model: Any, make_store: Any, restored_step: Any, events: Any
) -> None:
    _, earlier = trained(3, 5)
    before = listing(earlier.directory)
    model = make_model()
    store = make_store(model, fresh_start=True)
    with model.session() as raw:
        assert not store.restorer(raw, model.saver, store.logdir, None)
        raw.run(model.init)
        store.publish(store.snapshot(raw))
    (aside,) = store.directory.glob("replaced-*")
    assert listing(aside) == before
    assert [record.step for record in store.checkpoints()] == [0]
    assert "checkpoint.set_aside" in events.kinds()
    assert restored_step() == 0
    # The same store used once more, after a recovery for instance, goes on from its own checkpoints.
    with model.session() as raw:
        assert store.restorer(raw, model.saver, store.logdir, None)


def test_emergency_and_nonfinite_are_not_restored_by_themselves(
    make_model: Any, make_store: Any, restored_step: Any
) -> None:
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(model.train)
        info = store.publish(store.snapshot(raw, kind=Kind.EMERGENCY))
        assert info.prefix.endswith("model.ckpt-1-emergency")
        assert not (store.directory / "checkpoint").exists()
        with pytest.raises(CheckpointNotRestored, match="never restored by themselves"):
            restored_step()
    other = make_model()
    other_store = make_store(other)
    with other.session() as raw:
        assert other_store.restorer(raw, other.saver, None, info.prefix)
        assert int(raw.run(other.step)) == 1


def test_nothing_to_restore(make_model: Any, make_store: Any, restored_step: Any) -> None:
    assert restored_step() is None
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        assert not store.restorer(raw, None, store.logdir, None)
        assert not store.restorer(raw, model.saver, None, None)
    store.directory.mkdir()
    (store.directory / "events.out.tfevents.1").touch()
    assert restored_step() is None


def test_a_savedmodels_own_initialisers_come_first(trained: Any, make_model: Any, make_store: Any) -> None:
    trained(3)
    model = make_model()
    with model.graph.as_default():
        tf1.add_to_collection("saved_model_initializers", model.variables[0].assign(tf.fill([1000], 9.0)).op)
    store = make_store(model)
    with model.session() as raw:
        assert store.restorer(raw, model.saver, store.logdir, None)
        assert float(raw.run(model.variables[0])[0]) == 3.0


def test_saver_goes_on_with_its_list(trained: Any, make_model: Any, make_store: Any) -> None:
    """37. A user's own `saver.save` rotates on where we are."""
    trained(1, 2, 3)
    model = make_model(max_to_keep=3)
    store = make_store(model)
    with model.session() as raw, model.graph.as_default():
        store.restorer(raw, model.saver, store.logdir, None)
        raw.run(model.train)
        model.saver.save(raw, str(store.directory / "model.ckpt"), global_step=model.step)
        assert [record.step for record in store.checkpoints()] == [2, 3, 4]
        raw.run(model.train)
        store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [3, 4, 5]
