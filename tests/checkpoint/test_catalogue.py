"""What is on disk, in which order, and what is wrong with it."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.checkpoint import catalogue as cat
from asupervisor.checkpoint import manifest as mf
from asupervisor.checkpoint.records import Kind
from asupervisor.checkpoint.verify import damage_of

tf1 = tf.compat.v1


def names(directory: Path, basename: str = "model.ckpt") -> list[str]:
    return [entry.name for entry in cat.scan(directory, basename).regular]


def plain(model: Any, directory: Path, *steps: int, basename: str = "model.ckpt", **arguments: Any) -> None:
    """Write checkpoints as TensorFlow alone does."""
    directory.mkdir(exist_ok=True)
    with model.session() as raw, model.graph.as_default():
        raw.run(model.init)
        for step in steps:
            while int(raw.run(model.step)) < step:
                raw.run(model.train)
            model.saver.save(raw, str(directory / basename), global_step=step, **arguments)


def test_empty_and_absent(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        catalogue = cat.scan(directory, "model.ckpt")
        assert catalogue.entries == () and catalogue.evidence() is None
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        cat.scan(tmp_path / "file", "model.ckpt")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.ckpt", (None, Kind.REGULAR)),
        ("model.ckpt-0", (0, Kind.REGULAR)),
        ("model.ckpt-00000012", (12, Kind.REGULAR)),
        ("model.ckpt-7-nonfinite", (7, Kind.NONFINITE)),
        ("model.ckpt-7-emergency", (7, Kind.EMERGENCY)),
        ("model.ckpt-emergency", (None, Kind.EMERGENCY)),
        ("model.ckpt-best", None),
        ("model.ckpt-7-8", None),
        ("model.ckpt-", None),
        ("model.ckpt-²", None),
        ("model.ckpt2-7", None),
        ("other-7", None),
    ],
)
def test_names(name: str, expected: Any) -> None:
    assert cat.parse_name(name, "model.ckpt") == expected


def test_order_by_the_state_file(make_model: Any, tmp_path: Path) -> None:
    """TensorFlow's directories: the list has the last word, not steps or times."""
    plain(make_model(), tmp_path, 5, 10, 20)
    os.utime(tmp_path / "model.ckpt-5.index", (2e9, 2e9))
    assert names(tmp_path) == ["model.ckpt-5", "model.ckpt-10", "model.ckpt-20"]
    mf.write_state_file(tmp_path / "checkpoint", ["model.ckpt-20", "model.ckpt-5"])
    assert names(tmp_path) == ["model.ckpt-10", "model.ckpt-20", "model.ckpt-5"]


@pytest.mark.parametrize("loss", ["deleted", "empty", "cut", "binary", "blank", "nameless"])
def test_order_without_a_state_file(loss: str, make_model: Any, tmp_path: Path) -> None:
    plain(make_model(), tmp_path, 5, 10, 20, 100)
    state = tmp_path / "checkpoint"
    if loss == "deleted":
        state.unlink()
    else:
        state.write_bytes(
            {
                "empty": b"",
                "cut": state.read_bytes()[:20],
                "binary": os.urandom(100),
                "blank": b"\n \n",
                "nameless": b'model_checkpoint_path: ""\n',
            }[loss]
        )
    for number, step in enumerate((100, 20, 10, 5)):  # a copy that lost the times, too
        os.utime(tmp_path / f"model.ckpt-{step}.index", (1e9 + number, 1e9 + number))
    assert names(tmp_path) == [f"model.ckpt-{step}" for step in (5, 10, 20, 100)]
    assert (cat.scan(tmp_path, "model.ckpt").state.problem is None) == (loss == "deleted")


def test_order_of_ours(trained: Any) -> None:
    _, store = trained(3, 5, 9)
    assert names(store.directory) == ["model.ckpt-3", "model.ckpt-5", "model.ckpt-9"]
    (store.directory / "checkpoint").unlink()
    assert names(store.directory) == ["model.ckpt-3", "model.ckpt-5", "model.ckpt-9"]


def test_published_just_before_a_crash(trained: Any) -> None:
    """The state file was not written any more: the manifest tells that it is the newest."""
    _, store = trained(3, 5, 9)
    mf.write_state_file(store.directory / "checkpoint", ["model.ckpt-3", "model.ckpt-5"])
    assert names(store.directory)[-1] == "model.ckpt-9"


def begun_at(model: Any, store: Any, name: str, *steps: int) -> None:
    """Train on from an older checkpoint of the store's directory, and publish these steps."""
    with model.session() as raw:
        assert store.restorer(raw, model.saver, None, str(store.directory / name))
        for step in steps:
            while int(raw.run(model.step)) < step:
                raw.run(model.train)
            store.publish(store.snapshot(raw))


def test_published_once_more_is_the_newest(trained: Any, make_model: Any, make_store: Any) -> None:
    """Training began again at an older one, and has come past names that are there already."""
    _, store = trained(1, 3, 5)
    model = make_model()
    begun_at(model, make_store(model), "model.ckpt-1", 2, 3)
    assert names(store.directory)[-2:] == ["model.ckpt-2", "model.ckpt-3"]
    latest = tf.train.latest_checkpoint(str(store.directory))
    assert latest == str(store.directory / "model.ckpt-3")
    assert mf.read_state_file(store.directory / "checkpoint").names == tuple(names(store.directory))


def test_published_once_more_just_before_a_crash(trained: Any, make_model: Any, make_store: Any) -> None:
    """The state file is older than the manifest of one that it lists in an earlier place."""
    _, store = trained(1, 3, 5)
    state = store.directory / "checkpoint"
    before = state.read_bytes(), state.stat()
    model = make_model()
    begun_at(model, make_store(model), "model.ckpt-1", 3)
    state.write_bytes(before[0])
    os.utime(state, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))
    assert names(store.directory)[-1] == "model.ckpt-3"
    assert store.latest_good().step == 3


def test_a_list_that_its_user_has_put_in_order_stays(trained: Any) -> None:
    """Who wants to go back may say so in the state file, as with TensorFlow."""
    _, store = trained(1, 3, 5)
    manifests = max(path.stat().st_mtime_ns for path in store.directory.glob("*.manifest"))
    tf1.train.update_checkpoint_state(
        str(store.directory), "model.ckpt-3", ["model.ckpt-1", "model.ckpt-5", "model.ckpt-3"]
    )
    os.utime(store.directory / "checkpoint", ns=(manifests + 10**9, manifests + 10**9))
    assert names(store.directory)[-1] == "model.ckpt-3"


def copied(directory: Path, target: Path, order: list[str]) -> Path:
    """A copy that does not keep the times: each file is younger than the one before."""
    target.mkdir()
    now = time.time()
    for number, name in enumerate(order, 1):
        shutil.copyfile(directory / name, target / name)
        os.utime(target / name, (now + number, now + number))
    return target


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_has_the_order_of_its_original(seed: int, trained: Any, tmp_path: Path) -> None:
    """`cp -r` copies in no order: of some the manifest is older than the index then, and does not count."""
    _, store = trained(0, 3, 5, 9)
    order = sorted(path.name for path in store.directory.iterdir())
    random.Random(seed).shuffle(order)
    assert names(copied(store.directory, tmp_path / "copy", order)) == names(store.directory)


def test_a_copy_where_tensorflow_went_on_after_us(trained: Any, make_model: Any, tmp_path: Path) -> None:
    _, store = trained(3, 5)
    plain(make_model(), store.directory, 8, 9)
    tf1.train.update_checkpoint_state(
        str(store.directory), "model.ckpt-9", [f"model.ckpt-{step}" for step in (3, 5, 8, 9)]
    )
    order = sorted(path.name for path in store.directory.iterdir())
    assert names(copied(store.directory, tmp_path / "copy", order))[-1] == "model.ckpt-9"


def test_spared_for_its_age_is_not_the_newest(trained: Any) -> None:
    _, store = trained(3, 5, 9)
    mf.write_state_file(store.directory / "checkpoint", ["model.ckpt-5", "model.ckpt-9"])
    assert names(store.directory)[0] == "model.ckpt-3"


def test_a_savers_own_best_does_not_push_ours_aside(trained: Any, make_model: Any) -> None:
    """Another saver in the same directory overwrites the state file with its own list."""
    _, store = trained(3, 5)
    plain(make_model(), store.directory, 2, basename="best")
    assert names(store.directory) == ["best-2", "model.ckpt-3", "model.ckpt-5"]


def test_tensorflow_goes_on_after_us(trained: Any, make_model: Any) -> None:
    """It restored our step 5 and saved it once more under its name: our manifest no longer tells anything about it."""
    _, store = trained(3, 5)
    model = make_model()
    plain(model, store.directory, 5, 8)
    for suffix in (".index", ".data-00000-of-00001"):
        os.utime(store.directory / f"model.ckpt-5{suffix}", (2e9, 2e9))
    catalogue = cat.scan(store.directory, "model.ckpt")
    by_name = {entry.name: entry for entry in catalogue.regular}
    assert [entry.name for entry in catalogue.regular] == ["model.ckpt-3", "model.ckpt-5", "model.ckpt-8"]
    assert by_name["model.ckpt-5"].manifest is None
    assert damage_of(by_name["model.ckpt-5"]) is None


@pytest.mark.parametrize("part", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped"])
@pytest.mark.parametrize("writer", ["ours", "tensorflow"])
def test_damage_is_found(writer: str, how: str, part: str, trained: Any, make_model: Any, tmp_path: Path) -> None:
    directory = tmp_path / "logdir"
    if writer == "ours":
        trained(5)
    else:
        plain(make_model(), directory, 5)
    damage(directory / f"model.ckpt-5{part}", how)
    (entry,) = cat.scan(directory, "model.ckpt").entries
    reason = damage_of(entry)
    assert reason
    if how == "missing":
        assert f"model.ckpt-5{part} is missing" in reason


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    stat = path.stat()
    if how == "missing":
        path.unlink()
        return
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = 20 if path.suffix == ".index" else len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
    os.utime(path, (stat.st_atime, stat.st_mtime))


@pytest.mark.parametrize(
    "how", ["cut", "binary", "renamed", "later format", "not ours", "names", "infinite", "deep", "a pipe"]
)
def test_a_bad_manifest_is_no_manifest(how: str, trained: Any) -> None:
    _, store = trained(3, 5)
    path = store.directory / "model.ckpt-5.manifest"
    text = path.read_text()
    if how == "cut":
        path.write_text(text[:50])
    elif how == "binary":
        path.write_bytes(os.urandom(60))
    elif how == "renamed":
        shutil.copy(store.directory / "model.ckpt-3.manifest", path)
    elif how == "later format":
        path.write_text(json.dumps(json.loads(text) | {"format": 2}))
    elif how == "infinite":
        path.write_text(text.replace('"step": 5', '"step": 1e999'))
    elif how == "deep":
        path.write_text("[" * 100_000)
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "names":
        path.write_text(text.replace('"model.ckpt-5.index"', '"../model.ckpt-5.index"'))
    else:
        path.write_text("[1]")
    store.writer.recover()
    entry = cat.scan(store.directory, "model.ckpt").regular[-1]
    assert entry.name == "model.ckpt-5" and entry.manifest is None and entry.managed
    assert damage_of(entry) is None


def test_without_the_checksums_library(trained: Any, monkeypatch: Any) -> None:
    """A manifest whose checksum cannot be computed here: TensorFlow's own decide."""
    _, store = trained(5)
    monkeypatch.delitem(cat.fs.ALGORITHMS, cat.fs.PREFERRED_ALGORITHM)
    (entry,) = cat.scan(store.directory, "model.ckpt").entries
    assert not entry.checksummed
    assert damage_of(entry) is None
    damage(store.directory / "model.ckpt-5.data-00000-of-00001", "flipped")
    assert damage_of(entry)


def test_foreign_files_are_not_seen(trained: Any) -> None:
    _, store = trained(5)
    for name in (
        "notes.txt",
        "model.ckpt-5.txt",
        "events.out.tfevents.1",
        "graph.pbtxt",
        "other-3.index",
        "model.ckpt",
    ):
        (store.directory / name).write_text("mine")
    (store.directory / "model.ckpt-9.index").mkdir()
    assert [entry.name for entry in cat.scan(store.directory, "model.ckpt").entries] == ["model.ckpt-5"]


def test_public_list(trained: Any, tmp_path: Path) -> None:
    _, store = trained(3, 5)
    (store.directory / "model.ckpt-3.index").unlink()
    first, second = cat.checkpoints(store.directory)
    assert (first.step, first.damage) == (3, "model.ckpt-3.index is missing")
    assert (second.step, second.damage, second.kind, second.managed) == (5, None, Kind.REGULAR, True)
    assert second.run_id == store.run_id and second.bytes > 0
    assert second.prefix == str(store.directory / "model.ckpt-5")
    assert cat.checkpoints(tmp_path / "absent") == []


def test_state_file_entries(tmp_path: Path) -> None:
    state = tmp_path / "checkpoint"
    state.write_text(
        'model_checkpoint_path: "/elsewhere/model.ckpt-9"\n'
        'all_model_checkpoint_paths: "../outside/model.ckpt-1"\n'
        'all_model_checkpoint_paths: "runs/x/model.ckpt-2"\n'
        'all_model_checkpoint_paths: "./model.ckpt-3"\n'
    )
    read = mf.read_state_file(state)
    assert read.names == ("model.ckpt-2", "model.ckpt-3", "model.ckpt-9")
    assert read.relocated and read.problem is None


def test_a_state_file_of_another_directory_only(tmp_path: Path) -> None:
    state = tmp_path / "checkpoint"
    state.write_text(
        'model_checkpoint_path: "../other/model.ckpt-9"\nall_model_checkpoint_paths: "../other/model.ckpt-9"\n'
    )
    assert mf.read_state_file(state).problem == "names only checkpoints outside of its directory"
    evidence = cat.scan(tmp_path, "model.ckpt").evidence()
    assert evidence and str(state) in evidence and "outside of its directory" in evidence


def test_a_pipe_is_no_state_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint")
    assert mf.read_state_file(tmp_path / "checkpoint").problem == "is not a file"


def test_relative_names_are_written(trained: Any, tmp_path: Path) -> None:
    _, store = trained(3, 5)
    text = (store.directory / "checkpoint").read_text()
    assert str(tmp_path) not in text
    state = tf.train.get_checkpoint_state(store.logdir)
    assert state.model_checkpoint_path == str(store.directory / "model.ckpt-5")
    assert list(state.all_model_checkpoint_paths) == [str(store.directory / f"model.ckpt-{n}") for n in (3, 5)]
