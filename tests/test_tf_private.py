"""Tells when a private part of TensorFlow that `asupervisor._tf` reaches for has disappeared."""

from __future__ import annotations

import gc
import mmap
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import feeds
from asupervisor.session.plan import PlanCache


def test_plugin_assets(tmp_path: Path, graph: tf.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.summary import plugin_asset

    assert callable(plugin_asset.get_all_plugin_assets)
    monkeypatch.setitem(sys.modules, "tensorflow.python.summary.plugin_asset", None)
    monkeypatch.delattr(sys.modules["tensorflow.python.summary"], "plugin_asset")
    _tf.write_plugin_assets(graph, str(tmp_path))  # without it: nothing is written
    assert not list(tmp_path.iterdir())


def test_settings_of_a_session_manager(graph: tf.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tf.compat.v1.train.SessionManager
    with graph.as_default():
        op = tf.no_op()
        settings = {
            "local_init_op": op,
            "ready_op": None,
            "ready_for_local_init_op": None,
            "graph": graph,
            "recovery_wait_secs": 3,
            "local_init_run_options": None,
            "local_init_feed_dict": {},
        }
        manager = original(**settings)
        assert _tf.session_manager_settings(manager) == settings
        assert _tf.session_manager_settings(type("Other", (original,), {})()) is None
    assert _tf.session_manager_settings(object()) is None
    del manager._recovery_wait_secs
    assert _tf.session_manager_settings(manager) is None  # it keeps them elsewhere: nothing is guessed


# ------------------------------------------------------------------------------- Session.run, taken apart


@pytest.fixture
def call(graph: tf.Graph) -> Iterator[tuple[tf.compat.v1.Session, Any, Any]]:
    """A session, and fetches and a feed that a compiled callable can take."""
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        fetches = {"a": [x * 2.0, tf.no_op()], "b": (tf.sparse.from_dense(x),)}
    with tf.compat.v1.Session(graph=graph) as raw:
        yield raw, fetches, {x: np.ones(2, np.float32)}


def test_the_parts_of_session_run(call: Any) -> None:
    from tensorflow.python.client import session

    raw, fetches, feed = call
    assert _tf.run_compiled is not None
    assert _tf.can_compile(raw)
    assert not _tf.is_closed(raw)
    assert not _tf.has_operation_timeout(raw)
    for name in ("_FetchHandler", "_REGISTERED_EXPANSIONS", "session_ops"):
        assert hasattr(session, name)
    structure = _tf.fetch_structure(raw.graph, fetches)
    assert structure is not None
    assert len(structure.elements) == 5
    assert isinstance(structure.root, _tf.Node)
    assert structure.root.keys == ("a", "b")
    plain = structure.root.parts[0].parts[0]
    assert plain == _tf.Leaf((0,), None)  # the registered way of a single tensor is recognised
    compiled = _tf.compile_callable(raw, tuple(feed), [structure.elements[0]], [structure.elements[1]])
    assert compiled is not None
    (value,) = _tf.run_compiled(compiled.session, compiled.handle, tuple(feed.values()), None)
    np.testing.assert_array_equal(value, [2.0, 2.0])
    inline = _tf.compile_callable(raw, tuple(feed), structure.elements[:1], [], in_callers_thread=True)
    assert inline is not None
    (value,) = _tf.run_compiled(inline.session, inline.handle, tuple(feed.values()), None)
    np.testing.assert_array_equal(value, [2.0, 2.0])


def test_a_callable_after_its_release(call: Any) -> None:
    raw, _, feed = call
    compiled = _tf.compile_callable(raw, tuple(feed), [], [raw.graph.get_operation_by_name("NoOp")])
    assert compiled is not None
    assert _tf.run_compiled is not None
    session, handle = compiled.session, compiled.handle
    del compiled
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        _tf.run_compiled(session, handle, tuple(feed.values()), None)
    assert _tf.was_released(caught.value)


def test_conversions_of_feeds() -> None:
    from tensorflow.python.util import numpy_compat

    samples: list[tuple[Any, Any]] = [
        (300, np.int8),
        (1 + 2j, np.int32),
        ([1, 2], np.float16),
        ("5", np.int32),
        (["a", b"b"], object),
        (np.ones(2, ">f4"), np.float32),
        ([True], bool),
        (2**53 + 1, np.float64),
        (-1, np.uint8),
        (1.5, tf.bfloat16.as_numpy_dtype),
    ]
    for value, dtype in samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = feeds.as_array(value, dtype), numpy_compat.np_asarray(value, dtype)
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("session", "_FetchHandler"),
        ("session", "_REGISTERED_EXPANSIONS"),
        ("session", "session_ops"),
        ("raw", "_make_callable_from_options"),
        ("raw", "_do_call"),
        ("raw", "_closed"),
        ("ours", "run_compiled"),
        ("ours", "_session"),
        ("ours", "_PLAIN_CODE"),
    ],
)
def test_plans_do_without(call: Any, monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    raw, fetches, feed = call
    expected = raw.run(fetches, feed)
    with raw.graph.as_default():
        bad = tf.debugging.check_numerics(tf.math.log(tf.constant(-1.0)), "bad")
    with pytest.raises(tf.errors.InvalidArgumentError) as theirs:
        raw.run(bad)
    if owner == "ours":
        monkeypatch.setattr(_tf, name, None)
    elif owner == "session":
        # Only what asupervisor sees of the module, since Session.run itself is made of these.
        module = types.SimpleNamespace(**vars(_tf._session))
        delattr(module, name)
        monkeypatch.setattr(_tf, "_session", module)
    else:
        monkeypatch.setattr(_tf, "can_compile", _without(_tf.can_compile, name))
    plans = PlanCache(raw)
    for _ in range(2):
        got = plans.plan(fetches, feed).run(feed)
        np.testing.assert_array_equal(got["a"][0], expected["a"][0])
        assert got["a"][1] is None
        assert type(got["b"][0]) is type(expected["b"][0])
        np.testing.assert_array_equal(got["b"][0].values, expected["b"][0].values)
    with pytest.raises(tf.errors.InvalidArgumentError) as ours:
        plans.plan(bad).run()
    assert str(ours.value) == str(theirs.value)
    plans.drop()


def _without(function: Any, name: str) -> Any:
    """The function, which does not find an attribute of a session."""

    class Blind:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def __getattr__(self, wanted: str) -> Any:
            if wanted == name:
                raise AttributeError(name)
            return getattr(self.raw, wanted)

    return lambda raw: function(Blind(raw))


def test_errors_without_their_formatting(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, _, _ = call
    error = tf.errors.InvalidArgumentError(None, None, "message")
    with pytest.raises(tf.errors.InvalidArgumentError, match="Graph execution error"):
        _tf.raise_as_session_run(raw, error)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        _tf.raise_as_session_run(object(), error)  # type: ignore[arg-type]
    assert caught.value is error


def test_a_graph_has_one_object_per_op_and_tensor(graph: tf.Graph) -> None:
    """The analysis and the keys of plans go by the ids of these objects."""
    with graph.as_default():
        tf.compat.v1.placeholder(tf.float32, [], name="x")
        tf.add(graph.get_tensor_by_name("x:0"), 1.0, name="y")
    x, y = (id(graph.get_operation_by_name(name)) for name in "xy")
    tensor = id(graph.get_tensor_by_name("x:0"))
    gc.collect()
    [object() for _ in range(1000)]  # would take the place of one that is gone
    assert (id(graph.get_operation_by_name("x")), id(graph.get_operation_by_name("y"))) == (x, y)
    assert id(graph.get_operation_by_name("y").inputs[0]) == id(graph.get_tensor_by_name("x:0")) == tensor
    assert id(graph.get_operation_by_name("y").inputs[0].op) == x
    with graph.as_default(), tf.control_dependencies(["x"]):
        after = tf.no_op()
    assert [id(op) for op in after.control_inputs] == [x]


def test_function_bodies(graph: tf.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    with graph.as_default():
        out = tf.function(lambda a: a + 1.0)(tf.constant(1.0))
    name = out.op.get_attr("f").name
    assert callable(graph._get_function)
    assert _tf.function_def(graph, name).signature.name == name
    assert _tf.function_def(graph, "nope") is None
    monkeypatch.setattr(type(graph), "_get_function", None)
    assert _tf.function_def(graph, name).signature.name == name
    assert _tf.function_def(graph, "nope") is None


def test_padded_step_numbers(graph: tf.Graph) -> None:
    with graph.as_default():
        tf.compat.v1.get_variable("v", [1])
        assert _tf.pads_step_number(tf.compat.v1.train.Saver(pad_step_number=True))
        assert not _tf.pads_step_number(tf.compat.v1.train.Saver())
    assert not _tf.pads_step_number(object())


# ------------------------------------------------------------------------------- monitored sessions and hooks


def test_last_step_of_a_hook(graph: tf.Graph) -> None:
    from tensorflow.python.training import basic_session_run_hooks

    hook = tf.compat.v1.train.StopAtStepHook(last_step=7)
    assert _tf.last_step_of(hook) == 7
    assert _tf.last_step_of(basic_session_run_hooks._MultiStepStopAtStepHook(last_step=8)) == 8
    by_number = tf.compat.v1.train.StopAtStepHook(num_steps=3)
    assert _tf.last_step_of(by_number) is None  # not known before the session is
    with graph.as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.train.get_or_create_global_step()
        session.run(step.initializer)
        by_number.begin()
        by_number.after_create_session(session, None)
    assert _tf.last_step_of(by_number) == 3
    assert _tf.last_step_of(tf.compat.v1.train.LoggingTensorHook([], every_n_iter=1)) is None
    del hook._last_step
    assert _tf.last_step_of(hook) is None  # then a finished job makes one step too many, as TensorFlow's


def test_where_a_hook_saves(tmp_path: Path) -> None:
    hook = tf.compat.v1.train.CheckpointSaverHook(str(tmp_path), save_steps=1, checkpoint_basename="name")
    assert _tf.save_path_of(hook) == str(tmp_path / "name")
    assert _tf.save_path_of(tf.compat.v1.train.StopAtStepHook(last_step=7)) is None
    del hook._save_path
    assert _tf.save_path_of(hook) is None  # then it may write over checkpoints that were not restored, as TensorFlow's


def test_whether_the_session_raised(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, *_ = call
    with session.graph.as_default():
        bad = tf.compat.v1.check_numerics(tf.constant(1.0) / tf.constant(0.0), "inf")
        value = tf.compat.v1.placeholder(tf.float32, [])
    for run in (lambda: session.run(bad), lambda: PlanCache(session).plan(bad).run()):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            run()
        assert _tf.raised_by_session(raised.value)
    with pytest.raises(tf.errors.AbortedError) as raised_here:
        raise tf.errors.AbortedError(None, None, "by hand")
    assert not _tf.raised_by_session(raised_here.value)
    assert not _tf.raised_by_session(ValueError("never raised"))
    monkeypatch.setattr(_tf, "_session", None)
    assert not _tf.raised_by_session(raised.value)  # then a user's error is believed to be the user's
    del value


@pytest.mark.full
def test_how_a_lost_peer_is_told() -> None:
    """One in some hundred thousand runs of a cluster whose servers are killed; so it is looked for in the library."""
    said = set()
    for kind, words in _tf.LOST_PEER.items():
        assert _tf.tells_of_a_lost_peer(kind(None, None, f"From /job:ps/replica:0/task:0:\n{words}."))
        assert not _tf.tells_of_a_lost_peer(kind(None, None, "Enqueue operation was cancelled"))
        assert not _tf.tells_of_a_lost_peer(tf.errors.AbortedError(None, None, words))
        for library in Path(tf.__file__).parent.rglob("*.so*"):
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                if text.find(words.encode()) >= 0:
                    said.add(kind)
    assert said == {*_tf.LOST_PEER}


def test_init_fn_of_a_scaffold(graph: tf.Graph) -> None:
    def init_fn(scaffold: Any, session: Any) -> None:
        raise AssertionError

    with graph.as_default():
        scaffold = tf.compat.v1.train.Scaffold(init_fn=init_fn)
        assert _tf.init_fn_of(scaffold) is init_fn
        assert _tf.init_fn_of(tf.compat.v1.train.Scaffold()) is None
    del scaffold._user_init_fn
    assert _tf.init_fn_of(scaffold) is None  # then a coroutine function is refused, with an error


def test_settings_of_session_creators(graph: tf.Graph) -> None:
    train = tf.compat.v1.train
    with graph.as_default():
        scaffold, config = train.Scaffold(), tf.compat.v1.ConfigProto()
        chief = train.ChiefSessionCreator(scaffold, "m", config, "d", "f")
        worker = train.WorkerSessionCreator(scaffold, "m", config, 7)
        own = type("Own", (train.ChiefSessionCreator,), {})()
    common = {"scaffold": scaffold, "master": "m", "config": config}
    assert _tf.session_creator_settings(chief) == common | {
        "checkpoint_dir": "d",
        "checkpoint_filename_with_path": "f",
        "is_chief": True,
    }
    assert _tf.session_creator_settings(worker) == common | {"max_wait_secs": 7, "is_chief": False}
    assert _tf.session_creator_settings(own) is None
    assert _tf.session_creator_settings(object()) is None
    del chief._master
    assert _tf.session_creator_settings(chief) is None  # then it makes its sessions itself


def test_a_trace_for_chrome(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    session, *_ = call
    with session.graph.as_default():
        op = tf.constant(1.0) + 1.0
    metadata = tf.compat.v1.RunMetadata()
    session.run(op, options=tf.compat.v1.RunOptions(trace_level=3), run_metadata=metadata)
    trace = _tf.chrome_trace(metadata.step_stats)
    assert trace is not None
    assert json.loads(trace)["traceEvents"]
    monkeypatch.setitem(sys.modules, "tensorflow.python.client.timeline", None)
    monkeypatch.delattr(sys.modules["tensorflow.python.client"], "timeline")
    assert _tf.chrome_trace(metadata.step_stats) is None  # then there is a summary only


def test_a_graph_can_be_unfinalized(graph: tf.Graph) -> None:
    graph.finalize()
    assert _tf.unfinalize(graph)
    assert not graph.finalized
    assert not _tf.unfinalize(types.SimpleNamespace())  # type: ignore[arg-type]


def test_a_nonfinite_error_is_what_tensorflows_hook_raises() -> None:
    error = _tf.NonFiniteError("loss", 2, 7)
    assert isinstance(error, tf.compat.v1.train.NanLossDuringTrainingError)
    assert "'loss' has 2 NaN or infinite values at about step 7" in str(error)
    assert (error.tensor, error.count, error.step) == ("loss", 2, 7)


def test_the_token_queue_of_synchronous_replicas(graph: tf.Graph) -> None:
    with graph.as_default():
        weight = tf.compat.v1.get_variable("w", [])
        step = tf.compat.v1.train.get_or_create_global_step()
        optimizer = tf.compat.v1.train.SyncReplicasOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=2
        )
        optimizer.minimize(weight * weight, global_step=step)
        queue = _tf.sync_token_queue_of(optimizer)
        assert queue.name.endswith("sync_token_q")
        assert queue.size().dtype == tf.int32
    assert _tf.sync_token_queue_of(object()) is None  # then a chief that comes back hands out tokens once more
