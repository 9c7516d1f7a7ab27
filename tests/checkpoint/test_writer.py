"""The commit protocol with an accident at each point, in one process; `test_crash.py` kills real ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint import manifest as mf
from asupervisor.checkpoint import writer
from asupervisor.checkpoint.retention import KeepAll, LatestN
from asupervisor.checkpoint.store import CheckpointStore
from tests.checkpoint.points import POINTS


class Accident(Exception):
    """What happens at a fault point."""


class FaultAt:
    """Raises at one point, once, after so many passes."""

    def __init__(self, point: str | None = None, passes: int = 0) -> None:
        self.point = point
        self.passes = passes
        self.seen: list[str] = []

    def __call__(self, point: str) -> None:
        self.seen.append(point)
        if point == self.point and self.seen.count(point) > self.passes:
            self.point = None
            raise Accident(point)


def litter(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_all_points_are_passed(trained: Any) -> None:
    faults = FaultAt()
    trained(1, 2, 3, retention=LatestN(2), faults=faults)
    assert list(dict.fromkeys(faults.seen)) == POINTS


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("with_step", [True, False], ids=["named", "overwritten"])
def test_the_next_save_and_the_next_run(
    point: str, with_step: bool, make_model: Any, make_store: Any, values_in: Any
) -> None:
    """After an accident the same process saves again; and a new run restores one of the two states, whole."""
    faults = FaultAt()
    model = make_model(with_step=with_step)
    store: CheckpointStore = make_store(model, faults=faults, retention=LatestN(2))
    train = model.train if with_step else _last_assign(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(3):
            raw.run(train)
            store.publish(store.snapshot(raw))
        faults.point = point
        raw.run(train)
        snapshot = store.snapshot(raw)
        try:
            store.publish(snapshot)
        except Accident:
            pass
        struck = faults.point is None
        assert struck or (point in POINTS[-4:] and not with_step)
        assert snapshot.held.released

        # A new run in the state that the accident left, on a copy of it.
        copy = store.directory.with_name("copy")
        shutil.copytree(store.directory, copy)
        other = make_model(with_step=with_step)
        other_store = make_store(other, copy, retention=LatestN(2))
        with other.session() as fresh:
            assert other_store.restorer(fresh, other.saver, other_store.logdir, None)
            found = {float(value) for v in other.variables for value in set(fresh.run(v).tolist())}
            assert found in ({3.0}, {4.0})
            if struck and POINTS.index(point) > POINTS.index("before-record"):
                assert found == {4.0}
        assert litter(copy) == []
        assert values_in(tf.train.latest_checkpoint(str(copy))) == found

        # And the same process goes on.
        raw.run(train)
        info = store.publish(store.snapshot(raw))
        assert values_in(info.prefix) == {5.0}
        assert tf.train.latest_checkpoint(store.logdir) == info.prefix
        assert store.latest_good().prefix == info.prefix
        store.writer.recover()
        assert litter(store.directory) == []


def _last_assign(model: Any) -> Any:
    """The last of the chain of changes: a train step of a model without a global step."""
    kinds = ("AssignAddVariableOp", "AssignAdd")
    return [op for op in model.graph.get_operations() if op.type in kinds][-1]


def test_nothing_is_deleted_before_the_new_one_is_published(trained: Any, make_model: Any, make_store: Any) -> None:
    """With room for one only: at each point one whole checkpoint is there."""
    directory: list[Path] = []
    whole: list[bool] = []

    def look(point: str) -> None:
        if directory and any(directory[0].glob("model.ckpt-*.manifest")):
            with_index = [mf.read_manifest(path) for path in directory[0].glob("model.ckpt-*.manifest")]
            whole.append(any(m and all((directory[0] / name).exists() for name in m.files) for m in with_index))

    model = make_model()
    store = make_store(model, retention=LatestN(1), faults=look)
    directory.append(store.directory)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(3):
            raw.run(model.train)
            store.publish(store.snapshot(raw))
    assert whole and all(whole)
    assert [record.step for record in store.checkpoints()] == [3]


def test_max_to_keep(make_model: Any, make_store: Any, events: Any) -> None:
    model = make_model(max_to_keep=2)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(4):
            raw.run(model.train)
            store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [3, 4]
    assert not list(store.directory.glob("model.ckpt-1*"))
    assert len(events.data("checkpoint.deleted")) == 2
    assert "LatestN(n=2)" in events.messages("checkpoint.deleted")[0]
    assert [Path(p).name for p in model.saver.last_checkpoints] == ["model.ckpt-3", "model.ckpt-4"]


def test_a_lower_limit_applies_at_once(trained: Any, events: Any) -> None:
    trained(1, 2, 3, 4, 5, retention=KeepAll())
    _, store = trained(6, retention=LatestN(2))
    assert [record.step for record in store.checkpoints()] == [5, 6]


def test_keep_all_lists_the_latest_only(trained: Any) -> None:
    _, store = trained(1, 2, 3, retention=KeepAll())
    state = tf.train.get_checkpoint_state(store.logdir)
    assert [Path(p).name for p in state.all_model_checkpoint_paths] == ["model.ckpt-3"]
    assert [record.step for record in store.checkpoints()] == [1, 2, 3]


def test_every_n_hours(make_model: Any, make_store: Any, clock: Any) -> None:
    """Spared for their age they stay on disk, out of the list, also over a restart."""
    hour = 3600.0
    for _ in range(2):
        model = make_model(max_to_keep=1, keep_checkpoint_every_n_hours=2)
        store = make_store(model, clock=clock)
        with model.session() as raw:
            if not store.restorer(raw, model.saver, store.logdir, None):
                raw.run(model.init)
            for _ in range(4):
                raw.run(model.train)
                store.publish(store.snapshot(raw))
                clock._now += hour
    # Steps 1 to 8 are an hour apart; the first is the origin.
    assert [record.step for record in store.checkpoints()] == [3, 5, 7, 8]
    state = tf.train.get_checkpoint_state(store.logdir)
    assert [Path(p).name for p in state.all_model_checkpoint_paths] == ["model.ckpt-8"]


def test_foreign_files_are_never_touched(trained: Any, make_model: Any, tmp_path: Path) -> None:
    """What this directory's runs did not write stays, whatever it is called, and so does everything outside."""
    _, store = trained(1, 2, retention=LatestN(1))
    outside = tmp_path / "model.ckpt-1.index"
    outside.write_text("outside")
    mine = [
        "model.ckpt-1.txt", "notes", "model.ckpt-77.index", "model.ckpt-77.data-00000-of-00001", "model.ckpt-5.meta",
        "best-1.index", ".hidden", ".model.ckpt.saving-me",
    ]  # fmt: skip
    for name in mine:
        (store.directory / name).write_text(f"mine {name}")
    (store.directory / "link-2.index").symlink_to(outside)
    _, store = trained(6, 7, 8, retention=LatestN(1))
    for name in mine:
        if name != "model.ckpt-77.index" and name != "model.ckpt-77.data-00000-of-00001":
            assert (store.directory / name).read_text() == f"mine {name}"
    assert outside.read_text() == "outside"
    assert [record.step for record in store.checkpoints() if record.managed] == [8]


def test_checkpoints_that_tensorflow_wrote_unlisted_are_not_deleted(
    trained: Any, make_model: Any, tmp_path: Path
) -> None:
    """Like those that a CheckpointManager does not know: they are somebody's own."""
    _, store = trained(1)
    model = make_model()
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        model.saver.save(raw, str(store.directory / "model.ckpt"), global_step=0, write_state=False)
    _, store = trained(2, 3, 4, retention=LatestN(1))
    assert [record.step for record in store.checkpoints()] == [0, 4]


def test_listed_ones_of_tensorflow_are_rotated_on(make_model: Any, trained: Any, tmp_path: Path) -> None:
    """Behaviour 37: rotation goes on over restarts, here as there."""
    model = make_model(max_to_keep=3)
    directory = tmp_path / "logdir"
    directory.mkdir()
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        for step in (1, 2, 3):
            raw.run(model.train)
            model.saver.save(raw, str(directory / "model.ckpt"), global_step=step)
    _, store = trained(4, 5, retention=LatestN(3))
    assert [record.step for record in store.checkpoints()] == [3, 4, 5]
    assert litter(store.directory) == []
    assert not list(store.directory.glob("model.ckpt-1*")) and not list(store.directory.glob("model.ckpt-2*"))


def test_manifests_that_tensorflow_left_behind(trained: Any, make_model: Any, restored_step: Any) -> None:
    """Its Saver deletes its own kinds of files only."""
    _, store = trained(1, 2)
    for suffix in (".index", ".data-00000-of-00001", ".meta"):
        (store.directory / f"model.ckpt-1{suffix}").unlink()
    assert restored_step() == 2
    assert not (store.directory / "model.ckpt-1.manifest").exists()


def test_without_a_step_one_name_is_overwritten(make_model: Any, make_store: Any, values_in: Any) -> None:
    model = make_model(with_step=False)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for expected in (1.0, 2.0):
            raw.run(_last_assign(model))
            info = store.publish(store.snapshot(raw))
            assert info.prefix == str(store.directory / "model.ckpt") and info.step is None
            assert values_in(info.prefix) == {expected}
    assert len(store.checkpoints()) == 1


def test_names_that_collide(make_model: Any, make_store: Any) -> None:
    with pytest.raises(ValueError, match="collides"):
        make_store(make_model(with_step=False), basename="checkpoint")
    make_store(make_model(), basename="checkpoint")
    with pytest.raises(ValueError, match="directory"):
        make_store(make_model(), latest_filename="a/b")
    with pytest.raises(ValueError, match="remote"):
        CheckpointStore("gs://bucket/dir", make_model().graph, make_model().saver)


def test_another_state_file(trained: Any, restored_step: Any) -> None:
    _, store = trained(1, latest_filename="latest")
    assert tf.train.latest_checkpoint(store.logdir, "latest") == str(store.directory / "model.ckpt-1")
    assert not (store.directory / "checkpoint").exists()
    assert restored_step(latest_filename="latest") == 1


def test_aside_the_first_and_the_newest_stay(make_model: Any, make_store: Any) -> None:
    model = make_model()
    with model.graph.as_default():
        spoil = tf.compat.v1.scatter_update(model.variables[0], [0], [np.nan])
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(spoil)
        for _ in range(5):
            raw.run(model.train)
            store.publish(store.snapshot(raw))
    assert [record.step for record in store.checkpoints()] == [1, 5]


def test_a_deletion_that_was_interrupted_does_not_hit_a_new_one(trained: Any) -> None:
    """A crash within the deletion of step 1; TensorFlow alone trains here meanwhile and saves step 1 anew."""
    _, store = trained(1, 2)
    (store.directory / "model.ckpt-1.manifest").rename(store.directory / ".model.ckpt-1.deleting")
    index = store.directory / "model.ckpt-1.index"
    os.utime(index, (2e9, 2e9))
    store.writer.recover()
    assert index.exists() and litter(store.directory) == []


@pytest.mark.parametrize("by", ["a run of ours", "TensorFlow"])
def test_a_publication_that_was_interrupted_does_not_hit_a_new_one(
    by: str, trained: Any, make_model: Any, make_store: Any, values_in: Any
) -> None:
    """A crash within the save of step 2; then somebody begins at step 1 by name, and saves another step 2."""
    with pytest.raises(Accident):
        trained(1, 2, faults=FaultAt("after-record", passes=1))
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        prefix = str(store.directory / "model.ckpt-1")
        if by == "TensorFlow":
            model.saver.restore(raw, prefix)
        else:
            assert store.restorer(raw, model.saver, None, prefix)
        for variable in model.variables:
            variable.load(np.full(variable.shape, 9.0), raw)
        raw.run(model.step.assign(2))
        if by == "TensorFlow":
            saved = model.saver.save(raw, prefix.removesuffix("-1"), global_step=2)
            later = Path(saved + ".index").stat().st_mtime + 1  # whatever the clock of the file system
            os.utime(saved + ".index", (later, later))
        else:
            saved = store.publish(store.snapshot(raw)).prefix
    assert values_in(saved) == {9.0, 2.0}
    again = make_model()
    with again.session() as raw:
        assert make_store(again).restorer(raw, again.saver, store.logdir, None)
        assert set(raw.run(again.variables[0])) == {9.0}
    assert litter(store.directory) == []
    assert [record.step for record in store.checkpoints()] == [1, 2]


@pytest.mark.parametrize("record", ["tombstone", "publication"])
@pytest.mark.parametrize("named", ["../victim", "absolute", "files/../../victim"])
def test_records_do_not_reach_outside_of_the_directory(record: str, named: str, trained: Any, tmp_path: Path) -> None:
    """Somebody else's record, or an altered one: what it names elsewhere is neither deleted nor replaced."""
    _, store = trained(1, 2)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    told = json.loads((store.directory / "model.ckpt-1.manifest").read_text())
    told["files"] = {str(victim) if named == "absolute" else named: {"bytes": 8, told["algorithm"]: "0"}}
    (store.directory / "files").mkdir()
    if record == "tombstone":
        (store.directory / ".model.ckpt-9.deleting").write_text(json.dumps(told | {"name": "model.ckpt-9"}))
    else:
        saving = store.directory / ".model.ckpt.saving-0-0"
        (saving / "files").mkdir(parents=True)
        (store.directory / "victim").write_text("put in its place")
        (saving / "commit.manifest").write_text(json.dumps(told))
    store.writer.recover()
    assert victim.read_text() == "precious"
    assert litter(store.directory) == []
    assert [record.step for record in store.checkpoints()] == [1, 2]


def test_a_record_behind_a_link_is_not_ours(trained: Any, tmp_path: Path) -> None:
    """Files elsewhere are not moved here, whatever a link is called."""
    _, store = trained(1, 2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copyfile(store.directory / "model.ckpt-2.manifest", elsewhere / "commit.manifest")
    for name in mf.read_manifest(elsewhere / "commit.manifest").files:  # type: ignore[union-attr]
        shutil.copyfile(store.directory / name, elsewhere / name)
    before = sorted(path.name for path in elsewhere.iterdir())
    (store.directory / ".model.ckpt.saving-0-0").symlink_to(elsewhere)
    store.writer.recover()
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_points_in_sequence_are_documented() -> None:
    """Each point of the table is told at the top of the module."""
    assert writer.__doc__ is not None
    for step in range(1, 10):
        assert f"\n{step}     " in writer.__doc__
