"""Snapshots: one step inside, every saveable covered, nothing of the user's touched."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.checkpoint import snapshot as sn
from asupervisor.checkpoint.store import CheckpointStore

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def save_beside_steps(model: Any, store: CheckpointStore, count: int, check: Callable[[str, int], None]) -> None:
    """Take `count` snapshots between steps; write each one while steps go on, as a training does."""
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for number in range(count):
            if number % 3:
                store.reserve(raw)
            snapshot = store.snapshot(raw)
            written: list[Any] = []
            writer = threading.Thread(target=lambda s=snapshot, w=written: w.append(store.publish(s)))
            writer.start()
            ran = 0
            while writer.is_alive() or not ran:
                raw.run(model.train)
                ran += 1
            writer.join()
            assert written, f"save {number} failed"
            check(written[0].prefix, written[0].step)


def one_step_inside(values_in: Callable[[str], set[float]]) -> Callable[[str, int], None]:
    def check(prefix: str, step: int) -> None:
        assert prefix.endswith(f"-{step}")
        assert values_in(prefix) == {float(step)}

    return check


@pytest.mark.thin
@pytest.mark.parametrize("size", [20_000, 100_000], ids=["fetched", "holders"])
def test_f09_every_checkpoint_holds_one_step_and_its_name(
    size: int, make_model: Any, make_store: Any, values_in: Any
) -> None:
    """F09. TensorFlow's Supervisor saves in a thread beside the steps: see the next test for what it makes of it."""
    model = make_model(parts=8, size=size)
    save_beside_steps(model, make_store(model), 25, one_step_inside(values_in))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_f09_thousand_checkpoints(make_model: Any, make_store: Any, values_in: Any) -> None:
    model = make_model(parts=8, size=100_000)
    save_beside_steps(model, make_store(model), 1000, one_step_inside(values_in))


def test_f09_the_original_tears(make_model: Any, tmp_path: Path, values_in: Any, tf_mode: str) -> None:
    """What TensorFlow's Supervisor makes of the same model: some of its checkpoints hold several steps."""
    model = make_model(parts=8, size=100_000, max_to_keep=1000)
    if tf_mode == "v1":
        with model.graph.as_default():
            supervisor = tf1.train.Supervisor(
                graph=model.graph, logdir=str(tmp_path), saver=model.saver, save_model_secs=0.01, save_summaries_secs=0
            )
            with supervisor.managed_session() as raw:
                while len(list(tmp_path.glob("model.ckpt-*.index"))) < 30:
                    raw.run(model.train)
    else:  # its checkpoint thread does not work in TensorFlow's default mode; what it does is this
        with model.session() as raw:
            raw.run(model.init)

            def save() -> None:
                with model.graph.as_default():
                    model.saver.save(raw, str(tmp_path / "model.ckpt"), global_step=model.step)

            for _ in range(30):
                thread = threading.Thread(target=save)
                thread.start()
                while thread.is_alive():
                    raw.run(model.train)
                thread.join()
    saved = [str(path.with_suffix("")) for path in tmp_path.glob("model.ckpt-*.index")]
    torn = sum(values_in(prefix) != {float(prefix.rsplit("-", 1)[1])} for prefix in saved)
    print(f"{torn} of {len(saved)} checkpoints are torn")
    assert torn > 0


def test_memory_is_given_back(make_model: Any, make_store: Any) -> None:
    """The holders are empty after the write, and after a snapshot that was not wanted."""
    model = make_model(size=100_000)
    store = make_store(model)
    ops = store.snapshots.ops
    holders = [model.graph.get_operation_by_name(ops.write).inputs[index] for index in range(3, 7)]
    holders = [holder for holder in holders if holder.op.type == "VariableV2"]
    assert len(holders) == 3
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for discard in (False, True):
            snapshot = store.snapshot(raw)
            assert [value.size for value in raw.run(holders)] == [100_000] * 3
            if discard:
                snapshot.discard()
                snapshot.discard()
            else:
                store.publish(snapshot)
            assert [value.size for value in raw.run(holders)] == [0] * 3
            assert snapshot.held.values == []


@pytest.mark.thin
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "int8",
        "uint16",
        "int32",
        "uint64",
    ],
)
@pytest.mark.parametrize("size", [300_000, 300_001])
def test_large_tensors_of_every_type(dtype: str, size: int, variables: str, tmp_path: Path) -> None:
    """Each has a holder, whose memory can be reserved, and comes out as it was at the snapshot."""
    graph = tf.Graph()
    kind = tf.as_dtype(dtype)
    first = np.arange(size) % 100 if dtype != "bool" else np.arange(size) % 3 == 0
    with graph.as_default():
        fed = tf1.placeholder(kind, [size])
        variable = tf1.get_variable("large", initializer=tf.zeros([size], kind), trainable=False)
        change = variable.assign(fed)
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path, graph, saver)
    store.claim(None)
    assert store.snapshots.wants_memory
    before = first.astype(kind.as_numpy_dtype)
    with tf1.Session(graph=graph) as raw:
        raw.run(init)
        for reserved in (False, True):
            raw.run(change.op, {fed: before})
            if reserved:
                store.reserve(raw)
                store.reserve(raw)
                assert store.snapshots.reserve_secs > 0
            snapshot = store.snapshot(raw)
            raw.run(change.op, {fed: np.zeros_like(before)})
            prefix = store.publish(snapshot).prefix
            np.testing.assert_array_equal(tf.train.load_variable(prefix, "large"), before)


def test_one_snapshot_is_alive_at_a_time(make_model: Any, make_store: Any, values_in: Any) -> None:
    model = make_model(size=100_000)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        first = store.snapshot(raw)
        raw.run(model.train)
        second = store.snapshot(raw)  # takes the place of the first
        raw.run(model.train)
        store.reserve(raw)  # does nothing now
        with pytest.raises(RuntimeError, match="a later one took its place"):
            store.publish(first)
        assert values_in(store.publish(second).prefix) == {1.0}


def test_no_snapshot_while_one_is_written(make_model: Any, make_store: Any, values_in: Any) -> None:
    taken: list[str] = []

    def interfere(point: str) -> None:
        if point == "before-write":
            with pytest.raises(RuntimeError, match="one at a time"):
                store.snapshot(raw)
            store.reserve(raw)
            taken.append(point)

    model = make_model(size=100_000)
    store = make_store(model, faults=interfere)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        snapshot = store.snapshot(raw)
        raw.run(model.train)
        assert values_in(store.publish(snapshot).prefix) == {0.0}
        assert taken


def test_a_snapshot_waits_for_a_reservation(make_model: Any, make_store: Any, values_in: Any) -> None:
    """It never meets holders that are being filled with something else."""
    model = make_model(size=100_000)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(20):
            raw.run(model.train)
            reserving = threading.Thread(target=store.reserve, args=[raw])
            reserving.start()
            info = store.publish(store.snapshot(raw))
            reserving.join()
            assert values_in(info.prefix) == {float(info.step)}


def test_the_session_is_not_kept_alive(make_model: Any, make_store: Any) -> None:
    model = make_model(size=100_000)
    store = make_store(model)
    raw = model.session()
    raw.run(model.init)
    store.claim(None)
    store.publish(store.snapshot(raw))
    store.snapshot(raw).discard()
    store.reserve(raw)
    raw.close()
    gone = weakref.ref(raw)
    del raw
    gc.collect()
    assert gone() is None


def test_memory_is_given_back_when_the_write_fails(make_model: Any, make_store: Any, monkeypatch: Any) -> None:
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        snapshot = store.snapshot(raw)
        monkeypatch.setattr(store, "_meta_graph", lambda: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            store.publish(snapshot)
        assert snapshot.held.released
        assert [path.name for path in store.directory.iterdir()] == []


# ------------------------------------------------------------------------------------------ coverage


def test_every_saveable(variables: str, make_store: Any, tmp_path: Path) -> None:
    """What TensorFlow's own Saver writes of the same state, bit for bit: values, names, shapes, slices."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        parted = tf1.get_variable(
            "parted",
            [10, 4],
            initializer=tf1.random_normal_initializer(seed=1),
            partitioner=tf1.fixed_size_partitioner(3),
        )
        embedding = tf1.get_variable("embedding", [7, 3], initializer=tf1.random_normal_initializer(seed=2))
        for dtype, value in [
            (tf.string, [b"a", b"", b"\x00\xff" * 50]),
            (tf.bool, [True, False]),
            (tf.bfloat16, [1.5]),
            (tf.float16, [2.5]),
            (tf.float64, [1e300]),
            (tf.complex64, [1j]),
            (tf.int8, [-3]),
            (tf.uint16, [65535]),
            (tf.int64, [-(2**60)]),
        ]:
            tf1.get_variable(f"of_{dtype.name}", initializer=tf.constant(value, dtype), trainable=False)
        tf1.get_variable("scalar", initializer=tf.constant(3.0))
        tf1.get_variable("empty", initializer=tf.zeros([0, 3]))
        hashed = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, empty_key=-1, deleted_key=-2)
        fill = [
            hashed.insert(tf.constant(["x", "y"]), tf.constant([1, 2], tf.int64)),
            dense.insert(tf.constant([5, 6], tf.int64), tf.constant([0.5, 0.6])),
        ]
        loss = tf.reduce_sum(
            parted.as_tensor() ** 2 if hasattr(parted, "as_tensor") else tf.convert_to_tensor(parted) ** 2
        )
        loss += tf.reduce_sum(tf.nn.embedding_lookup(embedding, [1, 3, 3]) ** 2)
        train = tf1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        more = [
            hashed.insert(tf.constant(["x"]), tf.constant([9], tf.int64)),
            dense.insert(tf.constant([5], tf.int64), tf.constant([0.9])),
        ]
        saver = tf1.train.Saver()
        init = tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path / "ours", graph, saver, global_step=step)
    store.claim(None)
    assert store.snapshots.ops is not None
    with tf1.Session(graph=graph) as raw:
        raw.run(init)
        raw.run(fill)
        for _ in range(3):
            raw.run(train)
        snapshot = store.snapshot(raw)
        with graph.as_default():
            theirs = saver.save(raw, str(tmp_path / "theirs"))
        for _ in range(3):
            raw.run([train, more])
        ours = store.publish(snapshot).prefix
    left, right = tf.train.load_checkpoint(ours), tf.train.load_checkpoint(theirs)
    assert left.get_variable_to_shape_map() == right.get_variable_to_shape_map()
    assert left.get_variable_to_dtype_map() == right.get_variable_to_dtype_map()
    for name in left.get_variable_to_shape_map():
        np.testing.assert_array_equal(left.get_tensor(name), right.get_tensor(name), err_msg=name)
    assert {"parted", "embedding/Adam", "embedding/Adam_1", "parted/Adam"} <= left.get_variable_to_shape_map().keys()
    # And back, into another partitioning and into a whole variable.
    other = tf.Graph()
    with other.as_default():
        whole = tf1.get_variable("parted", [10, 4])
        back = tf1.train.Saver()
        with tf1.Session(graph=other) as raw:
            back.restore(raw, ours)
            np.testing.assert_array_equal(raw.run(whole), left.get_tensor("parted"))


# ------------------------------------------------------------------------------------------ manners


def test_out_of_collections_and_of_the_meta_graph(make_model: Any, make_store: Any) -> None:
    model = make_model()
    with model.graph.as_default():
        before = tf1.train.export_meta_graph(saver_def=model.saver.as_saver_def())
        nodes = len(model.graph.as_graph_def().node)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        prefix = store.publish(store.snapshot(raw)).prefix
    after = tf1.MetaGraphDef.FromString(Path(f"{prefix}.meta").read_bytes())
    assert len(model.graph.as_graph_def().node) > nodes
    assert sorted(after.collection_def) == sorted(before.collection_def)
    for key in before.collection_def:
        assert after.collection_def[key] == before.collection_def[key]
    assert after.saver_def == before.saver_def
    assert {n.name: n for n in after.graph_def.node} == {n.name: n for n in before.graph_def.node}
    assert sn.user_graph_def(model.graph) == _without_ours(model.graph)
    again = tf.Graph()
    with again.as_default(), tf1.Session(graph=again) as raw:
        saver = tf1.train.import_meta_graph(f"{prefix}.meta")
        saver.restore(raw, prefix)
        assert int(raw.run(tf1.train.get_global_step())) == 0


def _without_ours(graph: tf.Graph) -> Any:
    definition = graph.as_graph_def()
    kept = [node for node in definition.node if not node.name.startswith("asupervisor_snapshot")]
    other = type(definition)()
    other.CopyFrom(definition)
    del other.node[:]
    other.node.extend(kept)
    return other


def test_device_scopes_and_dependencies_of_the_caller_do_not_leak_in(variables: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", [3])
        tf1.get_variable("large", [100_000])
        saver = tf1.train.Saver()
        with (
            tf1.name_scope("outer"),
            tf1.device("/job:nowhere/task:7"),
            tf1.control_dependencies([tf1.placeholder(tf.float32, name="unfed")]),
        ):
            ops = sn.add_snapshot_ops(graph, saver)
    assert ops is not None
    for node in graph.as_graph_def().node:
        if node.name.startswith(ops.scope):
            assert "nowhere" not in node.device
            assert "CPU:0" in node.device or node.op == "SaveV2"
            assert "unfed" not in str(node.input)


def test_variables_on_another_device(variables: str, tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        with tf.device("/cpu:1"):
            far = tf1.get_variable("far", [100_000], initializer=tf1.zeros_initializer())
        change = far.assign_add(tf.ones([100_000]))
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path, graph, saver)
    store.claim(None)
    with tf1.Session(graph=graph, config=tf1.ConfigProto(device_count={"CPU": 2})) as raw:
        raw.run(init)
        for expected in (0.0, 1.0):
            store.reserve(raw)
            snapshot = store.snapshot(raw)
            raw.run(change.op)
            prefix = store.publish(snapshot).prefix
            assert set(tf.train.load_variable(prefix, "far").tolist()) == {expected}


def test_a_second_store_uses_the_ops_of_the_first(make_model: Any, make_store: Any) -> None:
    model = make_model()
    first = make_store(model)
    model.graph.finalize()
    second = make_store(model)
    assert second.snapshots.ops is not None and second.snapshots.ops is first.snapshots.ops


def test_ops_do_not_keep_the_graph_alive(make_model: Any, make_store: Any) -> None:
    model = make_model()
    store = make_store(model)
    graph = weakref.ref(model.graph)
    del model, store
    gc.collect()
    assert graph() is None


def test_finalized_graph_falls_back_with_one_warning(
    make_model: Any, make_store: Any, events: Any, values_in: Any
) -> None:
    model = make_model()
    model.graph.finalize()
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(3):
            raw.run(model.train)
            info = store.publish(store.snapshot(raw))
            assert values_in(info.prefix) == {float(info.step)}
    assert len(events.messages("checkpoint.no_snapshots")) == 1
    assert tf.train.latest_checkpoint(store.logdir) == info.prefix


@pytest.mark.allow_leak  # a server of TensorFlow's cannot be stopped
def test_a_session_on_a_server_is_saved_by_the_saver(make_model: Any, make_store: Any, values_in: Any) -> None:
    """Handles work in sessions of this process only."""
    server = tf1.train.Server.create_local_server()
    model = make_model()
    store = make_store(model)
    with tf1.Session(server.target, graph=model.graph) as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(model.train)
        snapshot = store.snapshot(raw)
        assert snapshot.held is None
        raw.run(model.train)
        assert values_in(store.publish(snapshot).prefix) == {1.0}


class _Recording(tf1.train.Saver):
    """A saver of the user's own."""

    def save(self, sess: Any, save_path: Any, global_step: Any = None, **kwargs: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), (Path(save_path).name, global_step)]
        return super().save(sess, save_path, global_step=global_step, **kwargs)


@pytest.mark.thin
@pytest.mark.parametrize("kind", ["subclass", "sharded", "old format", "instance"])
def test_savers_of_other_kinds_are_called(
    kind: str, make_model: Any, make_store: Any, values_in: Any, restored_step: Any, variables: str
) -> None:
    model = make_model()
    with model.graph.as_default():
        if kind == "subclass":
            model.saver = _Recording(max_to_keep=2)
        elif kind == "sharded":
            model.saver = tf1.train.Saver(sharded=True, max_to_keep=2)
        elif kind == "old format":
            model.saver = tf1.train.Saver(write_version=tf1.train.SaverDef.V1, max_to_keep=2)
        else:
            model.saver = tf1.train.Saver(max_to_keep=2)
            plain, calls = model.saver.save, []
            model.saver.save = lambda *args, **kwargs: (calls.append(args), plain(*args, **kwargs))[1]
    store = make_store(model)
    assert store.snapshots.ops is None
    model.graph.finalize()
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        for _ in range(4):
            raw.run(model.train)
            snapshot = store.snapshot(raw)
            raw.run(model.train)
            info = store.publish(snapshot)
            assert values_in(info.prefix) == {float(info.step)}
    assert [record.step for record in store.checkpoints()] == [5, 7]
    assert store.latest_good().prefix == info.prefix == tf.train.latest_checkpoint(store.logdir)
    assert restored_step() == 7
    if kind == "subclass":
        assert model.saver.calls == [("model.ckpt", step) for step in (1, 3, 5, 7)]
    elif kind == "instance":
        assert len(calls) == 4
    assert [path.name for path in store.directory.iterdir() if path.name.startswith(".")] == []


def test_a_saver_that_is_no_saver(make_model: Any, make_store: Any, tmp_path: Path) -> None:
    """Any object with `save`: its files are published like others, whatever they are."""

    class Numpy:
        def save(self, sess: Any, path: str, global_step: Any = None) -> None:
            np.save(f"{path}-{global_step}.npy", sess.run(model.variables[0]))

    model = make_model()
    model.saver = Numpy()
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(model.train)
        info = store.publish(store.snapshot(raw))
    assert (store.directory / "model.ckpt-1.npy").exists()
    assert info.bytes > 0


def test_empty_saver(make_store: Any, events: Any) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.constant(1.0)
        saver = tf1.train.Saver(allow_empty=True)

    class Empty:
        step = None

    model = Empty()
    model.graph, model.saver = graph, saver
    assert not make_store(model).can_save


def test_padded_names(make_model: Any, make_store: Any) -> None:
    model = make_model(pad_step_number=True)
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        assert store.publish(store.snapshot(raw)).prefix.endswith("model.ckpt-00000000")


def test_step_of_shape_one(variables: str, make_store: Any) -> None:
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.get_variable("global_step", initializer=tf.constant([123], tf.int64), trainable=False)
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()

    class Model:
        pass

    model: Any = Model()
    model.graph, model.saver, model.step = graph, saver, step
    store = make_store(model)
    with tf1.Session(graph=graph) as raw:
        raw.run(init)
        store.claim(None)
        assert store.publish(store.snapshot(raw)).step == 123


def test_warm_up_before_and_after_the_init(make_model: Any, make_store: Any) -> None:
    model = make_model()
    store = make_store(model)
    with model.session() as raw:
        store.warm_up(raw)
        raw.run(model.init)
        store.warm_up(raw)


# ------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_f07_what_is_not_finite_is_written_aside(
    bad: float, make_model: Any, make_store: Any, events: Any, restored_step: Any
) -> None:
    """F07. TensorFlow makes it the newest checkpoint, and its NaN hook sees neither Inf nor vectors."""
    model = make_model()
    with model.graph.as_default():
        spoil = tf1.scatter_update(model.variables[1], [7], [bad])
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(model.train)
        good = store.publish(store.snapshot(raw))
        raw.run(model.train)
        raw.run(spoil)
        aside = store.publish(store.snapshot(raw))
    assert aside.prefix.endswith("model.ckpt-2-nonfinite")
    assert aside.nonfinite == ("v1",)
    assert "v1" in events.messages("checkpoint.nonfinite")[0]
    assert Path(f"{aside.prefix}.index").exists()
    assert tf.train.latest_checkpoint(store.logdir) == good.prefix
    assert restored_step() == 1


def test_f07_policies(make_model: Any, make_store: Any, tmp_path: Path, events: Any) -> None:
    for policy in ("mark", "allow"):
        model = make_model()
        with model.graph.as_default():
            spoil = tf1.scatter_update(model.variables[0], [0], [np.nan])
        store = make_store(model, tmp_path / policy, nonfinite=policy)
        with model.session() as raw:
            raw.run(model.init)
            store.claim(None)
            raw.run(spoil)
            info = store.publish(store.snapshot(raw))
        assert info.prefix.endswith("model.ckpt-0")
        assert info.nonfinite == (("v0",) if policy == "mark" else ())
        assert store.checkpoints()[0].nonfinite == info.nonfinite
    assert len(events.messages("checkpoint.nonfinite")) == 1
    with pytest.raises(ValueError, match="refuse"):
        make_store(make_model(), nonfinite="perhaps")


def test_f07_only_what_is_trained_counts(variables: str, tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("best_loss", initializer=tf.constant(np.inf), trainable=False)
        tf1.get_variable("weights_of_mine", initializer=tf.constant([np.nan]), trainable=False)
        weights = tf1.get_variable("weights", [3])
        parted = tf1.get_variable("parted", [4], partitioner=tf1.fixed_size_partitioner(2))
        loss = tf.reduce_sum(weights) + tf.reduce_sum(tf.convert_to_tensor(parted))
        optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
        optimizer.minimize(loss)
        slot = optimizer.get_slot(weights, "momentum")
        spoil = slot.assign(tf.fill([3], np.inf))
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path, graph, saver)
    store.claim(None)
    assert {name for name, _ in store.snapshots.ops.watched} == {
        name + slot for name in ("weights", "parted/part_0", "parted/part_1") for slot in ("", "/Momentum")
    }
    with tf1.Session(graph=graph) as raw:
        raw.run(init)
        assert store.publish(store.snapshot(raw)).nonfinite == ()
        raw.run(spoil)
        assert store.publish(store.snapshot(raw)).nonfinite == ("weights/Momentum",)


@pytest.mark.thin
@pytest.mark.parametrize("size", [1, 300_000], ids=["fetched", "holder"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
def test_f07_every_float(dtype: str, size: int, variables: str, tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        kind = tf.as_dtype(dtype)
        largest = 6e4 if dtype == "float16" else 3e38
        variable = tf1.get_variable("w", initializer=tf.fill([size], tf.cast(largest, kind)))
        bad = tf.constant(complex(0, np.nan) if kind.is_complex else np.nan, kind)
        spoil = variable.assign(tf.concat([tf.zeros([size - 1], kind), [bad]], 0))
        saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
    store = CheckpointStore(tmp_path, graph, saver)
    store.claim(None)
    with tf1.Session(graph=graph) as raw:
        raw.run(init)
        assert store.publish(store.snapshot(raw)).nonfinite == ()
        raw.run(spoil)
        assert store.publish(store.snapshot(raw)).nonfinite == ("w",)


def test_f07_by_a_custom_saver(make_model: Any, make_store: Any) -> None:
    model = make_model()
    with model.graph.as_default():
        model.saver = _Recording()
        spoil = tf1.scatter_update(model.variables[2], [0], [np.inf])
    store = make_store(model)
    with model.session() as raw:
        raw.run(model.init)
        store.claim(None)
        raw.run(spoil)
        info = store.publish(store.snapshot(raw))
    assert info.prefix.endswith("-nonfinite") and info.nonfinite == ("v2",)
    assert tf.train.load_checkpoint(info.prefix).get_tensor("v2")[0] == np.inf
