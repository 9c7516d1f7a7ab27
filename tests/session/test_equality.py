"""Generated calls: a plan gives what `Session.run` gives, in value, type, structure, memory and error.

Two sessions of one graph take the same calls in the same order, one by `Session.run`, one by plans. After each call
all results so far are written to, or must not have changed: a result that shares memory with a variable, a constant
or a fed array shows in one of the next calls.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import attr
import hypothesis
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from asupervisor.session.plan import PlanCache

tf1 = tf.compat.v1

pytestmark = [pytest.mark.modes, pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")]


class Pair(NamedTuple):
    first: Any
    second: Any


@attr.s(eq=False)
class Record:
    left = attr.ib()
    right = attr.ib()


class World:
    """One graph with something of each kind, two sessions on it, and the plans of the second one."""

    def __init__(self, kind, inline):
        self.graph = graph = tf.Graph()
        with graph.as_default():
            place = self.placeholders = {
                "x": tf1.placeholder(tf.float32, [None, 2], "x"),
                "i8": tf1.placeholder(tf.int8, [], "i8"),
                "i32": tf1.placeholder(tf.int32, None, "i32"),
                "i64": tf1.placeholder(tf.int64, [], "i64"),
                "u64": tf1.placeholder(tf.uint64, [], "u64"),
                "text": tf1.placeholder(tf.string, None, "text"),
                "flag": tf1.placeholder(tf.bool, [], "flag"),
                "half": tf1.placeholder(tf.float16, [], "half"),
                "brain": tf1.placeholder(tf.bfloat16, None, "brain"),
                "c64": tf1.placeholder(tf.complex64, [2], "c64"),
                "maybe": tf1.placeholder_with_default([1.0, 2.0], [None], "maybe"),
            }
            x = place["x"]
            v = tf1.get_variable("v", initializer=[1.0, 2.0], use_resource=kind == "resource")
            n = tf1.get_variable("n", initializer=np.int32(0), use_resource=kind == "resource")
            m = tf1.get_variable("m", initializer=[[1.0, 0.5], [0.0, 1.0]], use_resource=kind == "resource")
            read = v.value() if kind == "resource" else v._ref()
            constant = tf.constant(np.arange(6, dtype=np.float32), name="constant")
            matrix = tf.matmul(x, m)
            double = x * 2.0
            sparse = tf.sparse.from_dense(x)
            self.sparse_in = tf1.sparse_placeholder(tf.float32, [None, 3], name="sparse_in")
            self.tensors = [
                *(tf.identity(tensor) for tensor in place.values()),
                v,
                n,
                read,
                tf.identity(read),
                tf.identity(v),
                v * 1.0,
                tf.reshape(v, [2, 1]),
                v[:1],
                constant,
                constant * 1.0,
                constant[2:4],
                tf.reshape(constant, [2, 3]),
                tf.constant(3.5),
                tf.constant(["a", "b\0c", "\xff"]),
                tf.constant(b"word"),
                tf.constant([], tf.string),
                tf.zeros([0, 3]),
                tf.constant(1 + 2j),
                tf.constant([True, False]),
                tf.constant([1, 2], tf.int8),
                tf.constant([1.5], tf.bfloat16),
                tf.cast(x, tf.float64),
                matrix,
                tf.nn.relu(matrix),
                tf.nn.softmax(matrix),
                double,
                tf.transpose(double),
                tf.square(x),
                x + x,
                tf.add_n([x]),
                tf.stack([x]),
                *tf.unstack(constant)[:2],
                *tf.split(constant, 2),
                tf.reduce_sum(x, axis=[]),
                tf.reduce_sum(x),
                tf.where(x > 0.0, x, -x),
                tf1.cond(place["flag"], lambda: tf.identity(x), lambda: x * 3.0),
                tf1.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 1.5), [0, x])[1],
                tf.function(lambda a: a + 1.0)(x),
                tf.numpy_function(lambda a: a, [x], tf.float32),
                tf.stop_gradient(x),
                tf.ensure_shape(x, [None, 2]),
                tf.shape(x),
                sparse,
                tf.IndexedSlices(x, tf.constant([0]), tf.constant([1, 2])),
                tf.IndexedSlices(constant, tf.range(6)),
                tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3]), [1, 2]),
                tf.RaggedTensor.from_row_splits(constant, [0, 1, 6]),
                tf.debugging.check_numerics(x, "not finite"),
                tf.sparse.to_dense(self.sparse_in),
                tf1.get_session_handle(constant),
            ]
            with tf.control_dependencies([tf1.Assert(tf.reduce_all(x >= 0.0), [x], name="assert")]):
                checked = tf.no_op("checked")
            self.operations = [tf.no_op("nothing"), checked, double.op, matrix.op]
            self.names = [double.name, "nothing", "constant:0", "x:0", "v", matrix.op.name]
            self.wrong = [
                None,
                5,
                "nope",
                "nope:0",
                "x:7",
                {1},
                np.array([1]),
                object,
                [],
                {},
                tf.Graph().create_op("NoOp", [], []),
            ]
            # Each of these runs alone: with others, it would be TensorFlow's to choose what comes first.
            self.updates = [
                tf1.assign_add(v, [1.0, 1.0]),
                tf1.assign(v, x[0]),
                tf1.assign(v, tf.identity(constant)[:2]),
                tf1.assign_add(n, 1),
                tf.group(tf1.assign_add(m, [[0.5, 0.0], [0.0, 0.5]])),
                tf1.scatter_add(v, [0], [2.0]),
                tf1.assign_sub(n, place["i32"] * 0 + 1),
            ]
            self.feedable = [double, constant, matrix, v, n, read, n.op.outputs[0]]
            init = tf1.global_variables_initializer()
        # What hypothesis draws may create ops in no test: all that is fetched exists by now.
        self.theirs, self.raw = tf1.Session(graph=graph), tf1.Session(graph=graph)
        for session in (self.theirs, self.raw):
            session.run(init)
        self.plans = PlanCache(self.raw, inline=inline)
        self.history = []

    def close(self):
        self.plans.drop()
        self.raw.close()
        self.theirs.close()

    def call(self, fetches, feed):
        """One call by both; compares."""
        feeds = [copy_feed(feed), copy_feed(feed)]
        expected = outcome(lambda: self.theirs.run(fetches, feeds[0]))
        got = outcome(lambda: self.plans.plan(fetches, feeds[1]).run(feeds[1]))
        if isinstance(expected, Failure) and isinstance(got, Failure) and got.op not in (None, expected.op):
            # Several ops fail in this run, and TensorFlow reports now one, now another: this one fails like that?
            operation = self.graph.get_operation_by_name(got.op)
            expected = outcome(lambda: self.theirs.run(operation, copy_feed(feed)))
        compare(got, expected, self.raw)
        assert_unchanged(feeds[1], feeds[0])
        self.history.append((expected, got, copy.copy(arrays(expected)), [a.copy() for a in arrays(got)]))
        self.check_history()

    def check_history(self):
        """What was delivered before has not changed."""
        for _, got, _, before in self.history:
            for now, then in zip(arrays(got), before, strict=True):
                equal(now, then)
        del self.history[:-6]

    def scribble(self):
        """Whoever was given an array may write to it."""
        for _, got, _, before in self.history:
            for array, then in zip(arrays(got), before, strict=True):
                if array.flags.writeable and array.dtype.kind in "fiuc":
                    array[...] = 77
                    then[...] = 77


class Failure:
    """An exception, as far as it must be the same."""

    def __init__(self, error):
        self.type = type(error)
        self.text = re.sub("0x[0-9a-f]+", "0x", str(error))
        self.op = getattr(getattr(error, "op", None), "name", None)
        self.node = getattr(error, "node_def", None)
        self.code = getattr(error, "error_code", None)

    def __eq__(self, other):
        return isinstance(other, Failure) and vars(self) == vars(other)

    __hash__ = None

    def __repr__(self):
        return f"{self.type.__name__}({self.text!r}, op={self.op})"


def outcome(run):
    try:
        return run()
    except Exception as error:
        return Failure(error)


def arrays(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Record):
        return arrays([value.left, value.right])
    if isinstance(value, Mapping):
        return arrays(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [array for part in value for array in arrays(part)]
    if isinstance(value, tf1.ragged.RaggedTensorValue):
        return arrays([value.values, value.row_splits])
    return []


def compare(got, expected, session):
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, Failure):
        assert got == expected
    elif isinstance(expected, np.ndarray):
        equal(got, expected)
        assert got.flags.writeable == expected.flags.writeable
        assert got.flags.owndata or not expected.flags.owndata, "Session.run saw that this memory is shared"
    elif isinstance(expected, np.generic):
        equal(np.asarray(got), np.asarray(expected))
    elif isinstance(expected, Mapping):
        assert [(type(key), key) for key in got] == [(type(key), key) for key in expected]
        assert getattr(got, "default_factory", None) is getattr(expected, "default_factory", None)
        for key in expected:
            compare(got[key], expected[key], session)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            compare(one, other, session)
        # What is one object there is one object here.
        same = [[a is b for b in expected] for a in expected if isinstance(a, np.ndarray)]
        assert [[a is b for b in got] for a in got if isinstance(a, np.ndarray)] == same
    elif isinstance(expected, Record):
        compare([got.left, got.right], [expected.left, expected.right], session)
    elif isinstance(expected, tf1.ragged.RaggedTensorValue):
        compare([got.values, got.row_splits], [expected.values, expected.row_splits], session)
    elif type(expected).__name__ == "TensorHandle":
        assert got._dtype == expected._dtype
        assert got._session is session
    else:
        assert got == expected


def equal(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.dtype.kind == "O":
        assert got.tolist() == expected.tolist()
    else:
        assert got.tobytes() == expected.tobytes(), (got, expected)


def copy_feed(feed):
    if not isinstance(feed, dict):
        return feed
    return type(feed)((key, copied(value)) for key, value in feed.items())


def copied(value):
    """A copy with the same memory layout, dtype and flags."""
    if type(value) is not np.ndarray or value.dtype.kind == "O":
        return value
    if value.base is not None or not value.flags.writeable:
        return value  # a layout that a copy would lose; nobody writes to these
    return value.copy(order="K")


def assert_unchanged(got, expected):
    for one, other in zip(arrays(got), arrays(expected), strict=True):
        equal(one, other)


# --------------------------------------------------------------------------------------------- what is drawn

GOOD = {
    "x": [
        np.ones((1, 2), np.float32),
        np.zeros((64, 2), np.float32),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2)),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.arange(6, dtype=np.float32).reshape(3, 2)[::-1],
        np.broadcast_to(np.float32(1), (2, 2)),
        np.frombuffer(b"\0" + np.ones((1, 2), "f").tobytes(), "f", offset=1, count=2).reshape(1, 2),
        np.ones((1, 2), ">f4"),
        np.ones((1, 2), np.float64),
        np.ones((1, 2), int),
        np.ones((1, 2), np.float16),
        np.ones((1, 2), ml_dtypes.bfloat16),
        np.ones((1, 2), complex),
        np.zeros((0, 2), np.float32),
        np.array([[np.nan, np.inf]], np.float32),
        np.array([[-1.0, 1e-40]], np.float32),
        np.ma.masked_array([[1.0, 2.0]], mask=[[0, 1]], dtype="f"),
        [[1, 2]],
        ((1.0, 2.0), (3.0, 4.0)),
        [[np.float32(1), 2.0]],
        [["1.5", "2"]],
    ],
    "i8": [5, np.int8(5), True, 1.5, np.int64(300), np.array(7, np.int8), np.array(7, np.int64), -128, "5", 0],
    "i32": [3, [1, 2], True, "5", np.arange(4, dtype=np.int32), np.arange(4), np.arange(4, dtype=">i4"), []],
    "i64": [float(2**53 + 1), 2**62, np.int32(4), np.uint64(2**63), -1],
    "u64": [2**63, 0, np.uint64(7), 1.0],
    "text": [
        "h\xe9",
        b"\xff\0x",
        ["a", b"b"],
        np.array(["a", "bb"]),
        np.array([b"a", b"bb\0"]),
        np.array(["a", b"b"], object),
        [],
        [["a"], ["b"]],
    ],
    "flag": [True, False, 1, 0, np.True_, 0.0, np.array(False)],
    "half": [1e6, 1.5, np.float16(2), np.float32(0.1), 3],
    "brain": [1.25, [1.5, 2.5], np.float32(1.0), np.ones(3, ml_dtypes.bfloat16), 2],
    "c64": [[1 + 2j, 0], np.ones(2, np.complex64), np.ones(2, np.complex128), [1.0, 2.0]],
    "maybe": [[], [5.0], np.ones(3, np.float32)],
}
BAD = {
    "x": [np.ones((1, 3), "f"), np.ones(2, "f"), 1.0, None, [[1], [1, 2]], [["a", "b"]], "a", object(), {}],
    "i8": [300, 2**40, None, [1], "x", 1 + 2j, -129],
    "i32": [2**40, None, "x", [[1], [1, 2]], 2**70],
    "i64": [2**63, 2**70, [1], None],
    "u64": [-1, 2**64, None],
    "text": [5, np.array([None], object), None, np.array([1, "a"], object)],
    "flag": [2, [True], None, "x"],
    "half": [[1.0], 2**40, None],
    "brain": ["x", 257],
    "c64": [[1.0], None, 1j],
    "maybe": [1.0, None],
}


def structures(leaves):
    """Fetches of any structure, mostly of good leaves."""
    keys = st.one_of(st.sampled_from("abc"), st.sampled_from([1, True, 1.0, (1, 2)]))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, inner, max_size=2).map(lambda d: collections.defaultdict(list, d)),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
        ),
        max_leaves=8,
    )


@st.composite
def calls(draw, world):
    """``(fetches, feed_dict, scribbles)``: usually all placeholders are fed well, sometimes not."""
    good = st.sampled_from(world.tensors + world.operations + world.names)
    update = draw(st.integers(0, 3)) == 0
    if update:
        fetches = draw(st.sampled_from(world.updates))
        fetches = draw(st.sampled_from([fetches, [fetches], {"update": fetches}]))
    elif draw(st.integers(0, 9)) == 0:
        fetches = draw(structures(st.one_of(good, st.sampled_from(world.wrong))))
    else:
        fetches = draw(structures(good))
    feed = {}
    names = draw(st.permutations(list(world.placeholders)))
    spoiled = draw(st.sets(st.sampled_from(names), max_size=2)) if draw(st.integers(0, 3)) == 0 else set()
    missing = draw(st.sets(st.sampled_from(names), max_size=2)) if draw(st.integers(0, 5)) == 0 else set()
    for name in names:
        if name in missing or (name == "maybe" and draw(st.booleans())):
            continue
        tensor = world.placeholders[name]
        key = draw(st.sampled_from([tensor, tensor, tensor, tensor.name]))
        feed[key] = draw(st.sampled_from(BAD[name] if name in spoiled else GOOD[name]))
    if draw(st.integers(0, 1)):
        ones = np.ones(2, np.float32)
        feed[world.sparse_in] = draw(
            st.sampled_from(
                [
                    tf1.SparseTensorValue(np.array([[0, 0], [1, 2]]), ones, np.array([2, 3])),
                    ([[0, 0]], [1.5], [1, 3]),
                    ([[0, 0]], [1.5]),
                    None,
                ]
            )
        )
    if draw(st.integers(0, 7)) == 0:
        tensor = draw(st.sampled_from(world.feedable))
        feed[tensor] = draw(st.sampled_from([np.ones((1, 2), "f"), [3.0, 4.0], np.arange(6, dtype="f"), 7]))
    if draw(st.integers(0, 19)) == 0:
        feed = draw(st.sampled_from([collections.OrderedDict(feed), None, {}, [1], 5, {"nope:0": 1.0, **feed}]))
    return fetches, feed, draw(st.booleans())


_worlds: dict[tuple[str, object], World] = {}


@pytest.fixture(scope="module", autouse=True)
def close_worlds():
    yield
    for world in _worlds.values():
        world.close()
    _worlds.clear()


def world_of(kind, inline):
    if (kind, inline) not in _worlds:
        _worlds[kind, inline] = World(kind, inline)
    return _worlds[kind, inline]


@pytest.fixture(params=["resource", "ref"])
def kind(request):
    return request.param


@pytest.fixture(params=["auto", True], ids=["auto", "inline"])
def inline(request):
    return request.param


def check_some_calls(kind, inline, data, most):
    world = world_of(kind, inline)
    with world.graph.as_default():  # variables can be keys of a feed only there
        for fetches, feed, scribbles in data.draw(st.lists(calls(world), min_size=1, max_size=most)):
            hypothesis.note(f"run({fetches!r}, {feed!r})")
            world.call(fetches, feed)
            if scribbles:
                world.scribble()


# The sessions go on from example to example: a shorter one would meet another state.
AS_FOUND = (hypothesis.Phase.explicit, hypothesis.Phase.generate)


@hypothesis.settings(max_examples=20, phases=AS_FOUND)
@hypothesis.given(data=st.data())
def test_generated_calls(kind, inline, data):
    check_some_calls(kind, inline, data, 3)


@pytest.mark.full
@pytest.mark.timeout(1800)
@hypothesis.settings(max_examples=1500, phases=AS_FOUND)
@hypothesis.given(data=st.data())
def test_very_many_generated_calls(kind, inline, data):
    check_some_calls(kind, inline, data, 6)


def test_each_tensor_by_itself(kind, inline):
    world = world_of(kind, inline)
    feed = {tensor: GOOD[name][0] for name, tensor in world.placeholders.items()}
    feed[world.sparse_in] = tf1.SparseTensorValue([[0, 0]], [1.5], [1, 3])
    for fetch in (*world.tensors, *world.operations, *world.names, *world.wrong):
        for _ in range(2):
            world.call(fetch, feed)
            world.scribble()


def test_each_feed_by_itself(kind, inline):
    world = world_of(kind, inline)
    for name, tensor in world.placeholders.items():
        same = world.tensors[list(world.placeholders).index(name)]
        for value in (*GOOD[name], *BAD[name]):
            for fetch in (same, [same, tensor], tensor):
                world.call(fetch, {tensor: value})
                world.scribble()


def test_each_update(kind, inline):
    world = world_of(kind, inline)
    feed = {world.placeholders["x"]: np.full((1, 2), 9, np.float32), world.placeholders["i32"]: 1}
    for update in world.updates:
        for fetch in (update, world.tensors[11], update, world.tensors[11:17]):
            world.call(fetch, feed)
            world.scribble()
