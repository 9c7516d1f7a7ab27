"""Plans and their cache: keys, lifetimes, riders, the trial in the caller's thread. Equality has its own tests."""

from __future__ import annotations

import collections
import gc
import threading
import time
import weakref

import attr
import numpy as np
import pytest
import tensorflow as tf

from asupervisor.session import denormals, engine
from asupervisor.session.engine import Way
from asupervisor.session.feeds import RawFeed
from asupervisor.session.plan import PlanCache

tf1 = tf.compat.v1

pytestmark = pytest.mark.modes


class Model:
    """``y = x * w``, a step that adds to `w` and to the global step, and a few other things to fetch."""

    def __init__(self, graph):
        self.graph = graph
        with graph.as_default():
            self.step = tf1.train.get_or_create_global_step()
            self.x = tf1.placeholder(tf.float32, [None, 2], name="x")
            self.other = tf1.placeholder(tf.float32, [None, 2], name="other")
            self.w = tf1.get_variable("w", initializer=[1.0, 2.0])
            self.y = tf.multiply(self.x, self.w, name="y")
            self.sum = tf.reduce_sum(self.x - 2.0 * self.other, name="sum")
            self.count = tf1.assign_add(self.step, 1).op
            self.train = tf.group(self.count, tf1.assign_add(self.w, [1.0, 1.0]), name="train")
            self.words = tf.constant([b"a", b"bb"])
            self.init = tf1.global_variables_initializer()
            self.sparse = tf.sparse.from_dense(self.x)


@pytest.fixture
def model(graph, variables):
    return Model(graph)


@pytest.fixture
def raw(model):
    with tf1.Session(graph=model.graph) as sess:
        sess.run(model.init)
        yield sess


@pytest.fixture
def plans(raw, model):
    cache = PlanCache(raw, global_step=model.step)
    yield cache
    cache.drop()


ONES = np.ones((1, 2), np.float32)


# ------------------------------------------------------------------------------------------------ the cache


def test_the_same_objects_give_the_same_plan(plans, model):
    feed = {model.x: ONES}
    for fetches in (
        model.y,
        [model.y, model.train],
        (model.y, model.train),
        [[model.y], {"a": model.train}],
        {"a": model.y, "b": [model.train]},
        "y:0",
        ["y:0", "train"],
        model.w,
        model.sparse,
        collections.OrderedDict(a=model.y),
    ):
        assert plans.peek(fetches, feed) is None
        first = plans.plan(fetches, feed)
        assert plans.plan(fetches, dict(feed)) is first
        assert plans.peek(fetches, feed) is first
        copied = type(fetches)(fetches) if isinstance(fetches, (list, dict)) else fetches
        assert plans.plan(copied, {model.x: ONES * 2}) is first


def test_equal_strings_give_the_same_plan(plans, model):
    def text(*parts):
        return "".join(parts)  # another object each time

    first = plans.plan([text("y", ":0")], {text("x", ":0"): ONES})
    assert plans.plan([text("y", ":0")], {text("x", ":0"): ONES}) is first
    np.testing.assert_array_equal(first.run({text("x", ":0"): ONES})[0], [[1.0, 2.0]])


def test_what_differs_gives_another_plan(plans, model):
    structures = [
        model.y,
        [model.y],
        (model.y,),
        [[model.y]],
        [(model.y,)],
        {"a": model.y},
        {"b": model.y},
        collections.OrderedDict(a=model.y),
        {1: model.y},
        {True: model.y},
        {1.0: model.y},
        [model.y, model.y],
        [model.y, model.train],
        [model.train, model.y],
        model.y.name,
    ]
    feeds = [{model.x: ONES}, {model.other: ONES}, {model.x: ONES, model.other: ONES}]
    found = {id(plans.plan(fetches, feed)) for fetches in structures for feed in feeds}
    assert len(found) == len(structures) * len(feeds)


def test_keys_of_a_dict_of_fetches_are_told_apart(plans, model):
    for key in (1, True, 1.0):
        (got,) = plans.plan({key: model.w}).run()
        assert type(got) is type(key)


def test_a_list_that_was_changed_is_another_one(plans, model):
    inner = [model.y]
    fetches = [inner]
    first = plans.plan(fetches, {model.x: ONES}).run({model.x: ONES})
    inner.append(model.words)
    second = plans.plan(fetches, {model.x: ONES}).run({model.x: ONES})
    inner[0] = model.train
    third = plans.plan(fetches, {model.x: ONES}).run({model.x: ONES})
    assert [len(first[0]), len(second[0])] == [1, 2]
    assert third[0][0] is None
    mapping = {"a": model.y}
    plan = plans.plan(mapping, {model.x: ONES})
    mapping["b"] = model.train
    assert set(plan.run({model.x: ONES})) == {"a"}
    assert set(plans.plan(mapping, {model.x: ONES}).run({model.x: ONES})) == {"a", "b"}


def test_an_attrs_object_that_was_changed_is_another_one(plans, model):
    @attr.s
    class Pair:
        a = attr.ib()
        b = attr.ib()

    pair = Pair(model.w, model.words)
    assert plans.plan(pair).run().b.tolist() == [b"a", b"bb"]
    first = plans.plan(pair)
    assert plans.plan(pair) is first
    pair.b = model.init
    assert plans.plan(pair).run().b is None


def test_ids_in_keys_belong_to_living_objects(plans, model):
    # Objects that are made for one call: if the cache did not keep them, the next one would get their address.
    class Name:
        pass

    seen = set()
    for number in range(50):
        key = Name()
        assert id(key) not in seen
        seen.add(id(key))
        (got,) = plans.plan({key: model.w}).run()
        assert got is key
        del key, got
        with model.graph.as_default():
            assert plans.plan(tf.constant(number)).run() == number

    def run(number):
        with model.graph.as_default():
            sparse = tf.SparseTensor([[0]], [number], [1])
        return weakref.ref(sparse), plans.plan(sparse).run().values[0]

    ghosts, got = zip(*(run(number) for number in range(20)), strict=True)
    assert got == tuple(range(20))
    assert all(ghost() is not None for ghost in ghosts)
    plans.drop()
    gc.collect()
    assert all(ghost() is None for ghost in ghosts)


def test_a_bounded_cache_keeps_what_is_used(raw, model):
    plans = PlanCache(raw, global_step=model.step, maxsize=4)
    hot = plans.plan([model.y, model.train], {model.x: ONES})
    ghosts = []
    with model.graph.as_default():
        tensors = [tf.constant(number) for number in range(40)]
    for number in range(40):
        plan = plans.plan([tensors[number]] if number % 2 else {f"key {number}": model.w})
        plan.run()
        ghosts.append(weakref.ref(plan))
        assert len(plans) <= 4
        assert plans.plan([model.y, model.train], {model.x: ONES}) is hot
    del plan
    assert sum(ghost() is not None for ghost in ghosts) <= 3
    assert len(plans._fast) <= 4
    plans.drop()


def test_an_evicted_plan_still_runs(raw, model):
    plans = PlanCache(raw, maxsize=1)
    first = plans.plan(model.w)
    plans.plan(model.words).run()
    np.testing.assert_array_equal(first.run(), [1.0, 2.0])
    assert plans.plan(model.w) is not first


def test_a_graph_that_grows(plans, raw, model):
    before = plans.plan(model.w)
    before.run()
    with model.graph.as_default():
        more = model.w * 10.0
    np.testing.assert_array_equal(plans.plan(more).run(), [10.0, 20.0])
    np.testing.assert_array_equal(before.run(), [1.0, 2.0])


def test_wrong_fetches_and_feeds_raise_when_they_run_and_are_not_kept(plans, raw, model):
    with tf.Graph().as_default():
        foreign = tf.constant(1.0)
    for fetches, feed in ((foreign, None), (None, None), ("nope", None), (5, None), (model.y, {foreign: 1.0})):
        plan = plans.plan(fetches, feed)
        with pytest.raises((TypeError, ValueError)) as ours:
            plan.run(feed)
        with pytest.raises((TypeError, ValueError)) as theirs:
            raw.run(fetches, feed)
        assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    # A name that is missing now may be there later.
    with pytest.raises(ValueError, match="later"):
        plans.plan("later:0").run()
    with model.graph.as_default():
        tf.constant(3, name="later")
    assert plans.plan("later:0").run() == 3


def test_what_does_not_compile_fails_as_in_session_run(graph):
    with graph.as_default(), tf.device("/device:GPU:7"):
        fetch = tf.raw_ops.Add(x=1.0, y=2.0)
    with tf1.Session(graph=graph, config=tf1.ConfigProto(allow_soft_placement=False)) as raw:
        plan = PlanCache(raw).plan(fetch)
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError) as ours:
                plan.run()
            with pytest.raises(tf.errors.InvalidArgumentError) as theirs:
                raw.run(fetch)
            assert str(ours.value) == str(theirs.value)
            assert ours.value.op is theirs.value.op


# ------------------------------------------------------------------------------------------ what a plan knows


def test_a_plan_knows_what_it_does(plans, model):
    feed = {model.x: ONES}
    assert plans.plan(model.train).is_training
    assert plans.plan([model.y, model.train], feed).is_training
    assert not plans.plan(model.y, feed).is_training
    assert not plans.plan(model.init).is_training
    assert not plans.plan(model.step).is_training
    assert plans.plan(model.y, feed).feed_tensors == (model.x,)
    assert plans.plan(model.y, feed).touches.feeds == {"x:0"}
    with model.graph.as_default():
        queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]], name="q")
        enqueue, dequeue = queue.enqueue(1.0), queue.dequeue()
    assert plans.plan(enqueue).side_lane
    assert not plans.plan(enqueue).is_training
    assert not plans.plan(dequeue).side_lane
    assert plans.plan(dequeue).may_wait == {"q"}


def test_without_a_global_step_any_variable_counts(raw, model):
    plans = PlanCache(raw)
    assert plans.plan(model.train).is_training
    assert not plans.plan(model.init).is_training


def test_options_and_metadata_go_to_session_run(plans, model):
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    metadata = tf1.RunMetadata()
    plan = plans.plan([model.y, model.train], {model.x: ONES}, options, metadata)
    assert plan.is_training
    assert plan.run({model.x: ONES})[1] is None
    assert metadata.step_stats.dev_stats
    assert plans.plan([model.y, model.train], {model.x: ONES}, options, metadata) is not plan


def test_what_a_callable_cannot_do_is_analysed_all_the_same(plans, model):
    feed = {model.sparse: (np.zeros((1, 2), np.int64), [3.0], [1, 2])}
    with model.graph.as_default():
        dense = tf.sparse.to_dense(model.sparse)
    plan = plans.plan([dense, model.train], feed)
    assert plan.is_training
    assert plan.touches.placeholders == frozenset()
    dense_value, none = plan.run(feed)
    assert none is None
    np.testing.assert_array_equal(dense_value, [[3.0, 0.0]])
    assert plans.plan([dense, model.train], feed) is plan


# ------------------------------------------------------------------------------------------------------ feeds


def test_feeds_go_by_their_keys_not_by_their_order(plans, model):
    plan = plans.plan(model.sum, {model.x: ONES, model.other: ONES})
    assert plan.run({model.x: ONES * 3, model.other: ONES}) == 2.0
    assert plan.run({model.other: ONES, model.x: ONES * 3}) == 2.0
    assert plan.run(collections.OrderedDict([(model.other, ONES), (model.x, ONES * 3)])) == 2.0
    # Keys that are not this plan's: Session.run decides.
    with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder"):
        plan.run({model.x: ONES})
    with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder"):
        plan.run()
    assert plan.run({"x:0": ONES * 3, "other:0": ONES}) == 2.0


def test_converting_runs_nothing(plans, raw, model):
    plan = plans.plan(model.train, {model.x: ONES})
    for feed in ({model.x: ONES}, {model.x: [[1, 2]]}, {model.x: np.ones((1, 2), ">f4")}):
        plan.convert(feed)
    for wrong in (np.ones((1, 3), "f"), None, model.y, "a"):
        with pytest.raises((TypeError, ValueError)):
            plan.convert({model.x: wrong})
    assert raw.run(model.step) == 0


def test_what_needs_no_conversion_is_not_copied(plans, model):
    plan = plans.plan(model.y, {model.x: ONES})
    batch = np.ones((3, 2), np.float32)
    (same,) = plan.convert({model.x: batch})
    assert same is batch
    (copy,) = plan.convert({model.x: batch}, copy=True)
    assert not np.shares_memory(copy, batch)
    view = batch[::2]
    assert not np.shares_memory(plan.convert({model.x: view}, copy=True)[0], batch)


def test_copies_of_other_feeds(plans, model):
    plan = plans.plan(model.y, {model.x: ONES})

    class Lazy:
        def __init__(self):
            self.array = np.ones((1, 2), np.float32)

        def __array__(self, dtype=None, copy=None):
            return self.array

    lazy = Lazy()
    (array,) = plan.convert({model.x: lazy}, copy=True)
    assert not np.shares_memory(array, lazy.array)
    values = np.array([3.0], np.float32)
    feed = {model.sparse: tf1.SparseTensorValue(np.zeros((1, 2), np.int64), values, [1, 2])}
    plan = plans.plan(model.train, feed)
    args = plan.convert(feed, copy=True)
    assert isinstance(args, RawFeed)
    (fed,) = args.feed_dict.values()
    assert isinstance(fed, tf1.SparseTensorValue)
    assert not np.shares_memory(fed.values, values)
    args = plans.plan(model.train, {model.x: ONES}).convert({model.other: values}, copy=True)
    assert not np.shares_memory(args.feed_dict[model.other], values)


def test_handles_of_tensors_that_the_session_keeps(plans, raw, model):
    with model.graph.as_default():
        handle = plans.plan(tf1.get_session_handle(tf.reshape(model.w, [1, 2]))).run()
        holder, kept = tf1.get_session_tensor(handle.handle, tf.float32)
        doubled = kept * 2.0
    assert type(handle).__name__ == "TensorHandle"
    feed = {holder: handle.handle}
    np.testing.assert_array_equal(plans.plan(doubled, feed).run(feed), [[2.0, 4.0]])
    plan = plans.plan(model.y, {model.x: ONES})
    assert isinstance(plan.convert({model.x: handle}), RawFeed)
    np.testing.assert_array_equal(plan.run({model.x: handle}), [[1.0, 4.0]])
    np.testing.assert_array_equal(plan.run({model.x: ONES}), [[1.0, 2.0]])
    handle.delete()


def test_types_that_were_registered_with_tensorflow(plans, model):
    from tensorflow.python.client import session

    class Pair:
        def __init__(self, one, two):
            self.one, self.two = one, two

    session.register_session_run_conversion_functions(
        Pair,
        lambda pair: ([pair.one, pair.two], lambda values: f"{values[0]} {values[1]}"),
        lambda pair, value: [(pair.one, value[0]), (pair.two, value[1])],
    )
    try:
        with model.graph.as_default():
            pair = Pair(tf.constant(1), tf.constant(2))
            total = pair.one + pair.two
        for _ in range(2):
            assert plans.plan({"a": pair, "b": model.train}).run() == {"a": "1 2", "b": None}
            assert plans.plan(total, {pair: (5, 6)}).run({pair: (5, 6)}) == 11
        pair.two = total
        assert plans.plan({"a": pair, "b": model.train}).run() == {"a": "1 3", "b": None}
    finally:
        session._REGISTERED_EXPANSIONS.pop(0)


def test_a_dict_of_feeds_may_be_filled_again(plans, model):
    feed = {model.sparse: (np.zeros((1, 2), np.int64), [3.0], [1, 2])}
    plan = plans.plan(model.train, feed)
    args = plan.convert(feed)
    feed.clear()
    assert plan.execute(args) is None


# --------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def stored(graph):
    """Results that are new arrays, and what keeps them: a variable, a queue."""
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [2, 2], name="x")
        u = tf1.get_variable("u", initializer=[[0.0, 0.0], [0.0, 0.0]], use_resource=True)
        queue = tf.queue.FIFOQueue(9, [tf.float32], shapes=[[2, 2]])
        nobody, keeper = tf.matmul(x, x), tf.matmul(x, x + x)
        queued = tf.nn.relu(nobody + keeper)
        return x, nobody, keeper, queued, u, u.assign(keeper).op, queue.enqueue(queued), queue.dequeue()


@pytest.mark.parametrize("inline", [False, True])
def test_results_that_somebody_keeps(graph, stored, inline):
    x, _, keeper, queued, u, assign, enqueue, dequeue = stored
    feed = {x: np.eye(2, dtype=np.float32)}
    with tf1.Session(graph=graph) as raw:
        raw.run(u.initializer)
        plans = PlanCache(raw, inline=inline)
        for _ in range(3):
            value, none = plans.plan([keeper, assign], feed).run(feed)
            assert none is None
            value[...] = 77.0
            np.testing.assert_array_equal(raw.run(u), 2.0 * np.eye(2))
            value = plans.plan([queued, enqueue], feed).run(feed)[0]
            value[...] = 77.0
            np.testing.assert_array_equal(raw.run(dequeue), 3.0 * np.eye(2))


def test_results_that_nobody_keeps_are_not_copied(graph, stored):
    x, nobody, *_ = stored
    with graph.as_default():
        alone = tf.matmul(x, x)
    feed = {x: np.eye(2, dtype=np.float32)}
    with tf1.Session(graph=graph) as raw:
        plans = PlanCache(raw)
        assert not plans.plan(alone, feed).run(feed).flags.owndata
        assert not raw.run(alone, feed).flags.owndata
        assert plans.plan(nobody, feed).run(feed).flags.writeable


# --------------------------------------------------------------------------------------------------- riders


def test_fetching_along_is_the_same_run(plans, raw, model):
    feed = {model.x: ONES * 3}
    plan = plans.plan([model.train, model.y], feed)
    for number in range(1, 4):
        (none, y), extra = plan.run_with(feed, [model.words, model.y, model.x, model.words])
        assert none is None
        assert raw.run(model.step) == number
        assert extra[0].tolist() == [b"a", b"bb"]
        np.testing.assert_array_equal(extra[1], y)
        np.testing.assert_array_equal(extra[2], ONES * 3)
        assert extra[3].tolist() == extra[0].tolist()
        for value in (extra[1], extra[2]):
            value[...] = -1.0  # nobody else's memory
        assert (y != -1.0).all()
        assert (feed[model.x] == 3.0).all()
    assert len(plan._extensions) == 1


def test_fetching_nothing_along(plans, model):
    assert plans.plan(model.train).run_with(None, []) == (None, [])


def test_fetching_along_what_a_callable_cannot_do(plans, raw, model):
    feed = {model.sparse: (np.zeros((1, 2), np.int64), [3.0], [1, 2])}
    result, extra = plans.plan({"a": model.train}, feed).run_with(feed, [model.w, model.sparse.values])
    assert result == {"a": None}
    assert extra[0].shape == (2,)
    np.testing.assert_array_equal(extra[1], [3.0])
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    plan = plans.plan([model.train], {model.x: ONES}, options, metadata)
    result, extra = plan.run_with({model.x: ONES}, [model.y, model.x])
    assert result == [None]
    assert extra[0].shape == (1, 2)
    assert metadata.step_stats.dev_stats
    assert raw.run(model.step) == 2
    # A fed tensor that is fetched, and one that is not.
    plan = plans.plan([model.x, model.train], {model.x: ONES})
    result, extra = plan.run_with({model.x: ONES}, [model.y, model.x])
    np.testing.assert_array_equal(result[0], ONES)
    np.testing.assert_array_equal(extra[1], ONES)


def test_fetching_along_raises_as_the_run_does(plans, raw, model):
    with model.graph.as_default():
        bad = tf.debugging.check_numerics(tf.math.log(model.w - 5.0), "no logarithm")
    plan = plans.plan(model.train)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Detected at node"):
        plan.run_with(None, [bad])


def test_what_may_be_carried(plans, model):
    plan = plans.plan(model.train, {model.x: ONES})
    assert plan.touches_with([model.y]).placeholders == frozenset()
    assert plan.touches_with([model.sum]).placeholders == {"other:0"}


def test_few_extensions_are_kept(plans, model):
    plan = plans.plan(model.train)
    with model.graph.as_default():
        tensors = [tf.constant(number) for number in range(20)]
    for number, tensor in enumerate(tensors):
        assert plan.run_with(None, [tensor])[1] == [number]
    assert len(plan._extensions) <= 8


# ------------------------------------------------------------------------------------------------- lifetimes


def test_dropped_plans_go_by_session_run(plans, raw, model):
    plan = plans.plan([model.train, model.y], {model.x: ONES})
    plan.run({model.x: ONES})
    args = plan.convert({model.x: ONES})
    plan.run_with({model.x: ONES}, [model.w])
    plans.drop()
    assert len(plans) == 0
    assert plan.execute(args)[0] is None
    plan.execute_with(args, [model.w])
    assert raw.run(model.step) == 4
    assert plans.plan(model.step).run() == 4
    assert len(plans) == 0


def test_a_handle_that_was_released_meanwhile(plans, raw, model):
    plan = plans.plan(model.train)
    while plan._engine.fast is None:
        plan.run()
    stale = plan._engine.fast
    steps = raw.run(model.step)
    plans.drop()
    plan._engine.fast = stale  # what a run sees that read it just before
    assert plan.run() is None
    assert raw.run(model.step) == steps + 1


def test_closed_sessions(model):
    raw = tf1.Session(graph=model.graph)
    raw.run(model.init)
    plans = PlanCache(raw)
    plan = plans.plan(model.y, {model.x: ONES})
    while plan._engine.fast is None:
        plan.run({model.x: ONES})
    fresh = plans.plan(model.train)
    raw.close()
    for run in (
        lambda: plan.run({model.x: ONES}),
        lambda: plan.run({model.x: "a"}),
        lambda: plan.run_with({model.x: ONES}, [model.w]),
        lambda: fresh.run(),
        lambda: plans.plan(model.w).run(),
        lambda: plans.plan("nope").run(),
    ):
        with pytest.raises(RuntimeError, match="closed Session"):
            run()


def test_closing_ends_a_run_that_waits(graph):
    with graph.as_default():
        queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]])
        dequeue = queue.dequeue()
        size = queue.size()
    raw = tf1.Session(graph=graph)
    plans = PlanCache(raw)
    plan = plans.plan(dequeue)
    assert plans.plan(size).run() == 0
    failed = []

    def run():
        try:
            plan.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while plan._engine.way is Way.NEW:
        time.sleep(0.001)
    time.sleep(0.05)  # on the side that must lose: the run waits by now, or gets the other error below
    plans.drop()
    raw.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(failed[0], (tf.errors.CancelledError, RuntimeError))


def test_the_session_is_freed_without_the_garbage_collector(model):
    raw = tf1.Session(graph=model.graph)
    raw.run(model.init)
    plans = PlanCache(raw, global_step=model.step)
    for _ in range(100):
        plans.plan([model.train, model.y], {model.x: ONES}).run({model.x: ONES})
    plans.plan(model.train).run_with(None, [model.w])
    plans.plan("nope")
    ghost = weakref.ref(raw)
    gc.collect()
    gc.disable()
    try:
        plans.drop()
        raw.close()
        del raw, plans
        assert ghost() is None
    finally:
        gc.enable()


def test_sessions_with_a_run_of_their_own(model):
    class Counting(tf1.Session):
        runs = 0

        def run(self, *args, **kwargs):
            self.runs += 1
            return super().run(*args, **kwargs)

    with Counting(graph=model.graph) as raw:
        raw.run(model.init)
        plan = PlanCache(raw).plan([model.train, model.y], {model.x: ONES})
        plan.run({model.x: ONES})
        assert plan._engine.way is Way.SESSION_RUN
        assert raw.runs == 2
        plan.run_with({model.x: [[1, 2]]}, [model.w])
        assert raw.runs == 3


def test_many_threads(plans, raw, model, variables):
    feed = {model.x: ONES}
    failed = []

    def work(number):
        try:
            for turn in range(60):
                (_, y) = plans.plan([model.train, model.y], dict(feed)).run(feed)
                assert y.shape == (1, 2)
                plans.plan({f"{number} {turn % 7}": model.words}).run()
                if turn % 20 == 0:
                    plans.plan([model.train, model.y], feed).run_with(feed, [model.words])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    # TensorFlow reads and writes a ref variable without a lock: of two updates at once, one may be lost.
    steps, most = raw.run(model.step), 6 * (60 + 3)
    assert steps == most if variables == "resource" else most // 2 < steps <= most


def test_dropping_under_running_threads(raw, model, variables):
    plans = PlanCache(raw, global_step=model.step)
    feed = {model.x: ONES}
    failed, counts = [], []
    go = threading.Event()

    def work():
        count = 0
        try:
            go.wait()
            for _ in range(100):
                plans.plan([model.train, model.y], feed).run(feed)
                count += 1
        except BaseException as error:
            failed.append(error)
        counts.append(count)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    while raw.run(model.step) < 40:
        pass
    plans.drop()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert sum(counts) == 300
    steps = raw.run(model.step)  # of ref variables an update may be lost, as above
    assert steps == 300 if variables == "resource" else 150 < steps <= 300


# ------------------------------------------------------------------------------- in the caller's thread, or not


def run_often(plan, feed=None, times=200):
    for _ in range(times):
        plan.run(feed)


def test_a_trial_settles_and_loses_no_run(plans, raw, model):
    plan = plans.plan(model.count)
    run_often(plan)
    assert plan._engine.way in (Way.INLINE, Way.POOL)
    assert plan._engine.fast is not None
    assert raw.run(model.step) == 200


def test_a_trial_takes_what_is_faster(plans, raw, model, monkeypatch):
    # Time as the trial sees it: the caller's thread is slower by ten seconds.
    turns = {"inline": 0}
    real = engine.Engine._flushed

    def slower(self, compiled, args):
        turns["inline"] += 1
        offset[0] += 10_000_000_000
        return real(self, compiled, args)

    offset = [0]
    monkeypatch.setattr(engine.Engine, "_flushed", slower)
    monkeypatch.setattr(engine, "LONGEST_RUN_NS", 10**12)
    monkeypatch.setattr(engine, "LONGEST_COMPILATION_SECS", 1e9)
    clock = time.perf_counter_ns
    monkeypatch.setattr(engine.time, "perf_counter_ns", lambda: clock() + offset[0])
    plan = plans.plan([model.count])
    run_often(plan)
    assert turns["inline"] == engine.TRIAL_RUNS
    assert plan._engine.way is Way.POOL


def test_feeds_that_grew_are_tried_again(plans, raw, model, monkeypatch):
    feed = {model.x: ONES}
    plan = plans.plan(model.y, feed)
    offset = [0]
    clock = time.perf_counter_ns
    real_run = engine._run

    def pool_is_slow(compiled, args):
        offset[0] += 10_000_000_000 if compiled is plan._engine._pool_compiled else big[0]
        return real_run(compiled, args)

    big = [0]
    monkeypatch.setattr(engine.time, "perf_counter_ns", lambda: clock() + offset[0])
    monkeypatch.setattr(engine, "_run", pool_is_slow)
    monkeypatch.setattr(engine, "LONGEST_RUN_NS", 10**12)
    monkeypatch.setattr(engine, "LONGEST_COMPILATION_SECS", 1e9)
    run_often(plan, feed)
    assert plan._engine.way is Way.INLINE
    big[0] = 10**13  # from now on a run in the caller's thread seems to take hours
    run_often(plan, feed, engine.CHECK_EVERY + 200)
    assert plan._engine.way is Way.POOL


def test_explicit_choices(raw, model):
    feed = {model.x: ONES}
    never = PlanCache(raw, inline=False).plan(model.y, feed)
    run_often(never, feed)
    assert never._engine.way is Way.POOL
    always = PlanCache(raw, inline=True).plan(model.y, feed)
    always.run(feed)
    assert always._engine.way is (Way.INLINE if denormals.SUPPORTED else Way.POOL)
    run_often(always, feed, 600)


def test_what_may_wait_never_runs_in_the_callers_thread(graph):
    with graph.as_default():
        queue = tf.queue.FIFOQueue(9999, [tf.float32], shapes=[[]])
        many = queue.enqueue_many([[1.0] * 999])
        dequeue = queue.dequeue()
        python = tf.numpy_function(lambda: np.float32(1.0), [], tf.float32)
        function = tf.function(lambda a: a + 1.0)(tf.constant(1.0))
    with tf1.Session(graph=graph) as raw:
        raw.run(many)
        for inline in ("auto", True):
            plans = PlanCache(raw, inline=inline)
            for fetch in (dequeue, python, function):
                plan = plans.plan(fetch)
                run_often(plan)
                assert plan._engine.way is Way.POOL
            plans.drop()


def test_sessions_with_a_timeout_never_run_in_the_callers_thread(model):
    config = tf1.ConfigProto(operation_timeout_in_ms=10_000)
    with tf1.Session(graph=model.graph, config=config) as raw:
        raw.run(model.init)
        plan = PlanCache(raw, inline=True).plan(model.count)
        plan.run()
        assert plan._engine.way is Way.POOL


def test_sessions_with_several_devices_never_run_in_the_callers_thread(model):
    config = tf1.ConfigProto(device_count={"CPU": 2})
    with tf1.Session(graph=model.graph, config=config) as raw:
        raw.run(model.init)
        plan = PlanCache(raw, inline=True).plan(model.count)
        plan.run()
        assert plan._engine.way is Way.POOL


def test_large_graphs_are_not_compiled_twice(raw, model, monkeypatch):
    monkeypatch.setattr(engine, "LONGEST_COMPILATION_SECS", 0.0)
    plan = PlanCache(raw).plan(model.count)
    run_often(plan)
    assert plan._engine.way is Way.POOL
    assert plan._engine._inline_compiled is None


def test_long_runs_are_not_tried(raw, model, monkeypatch):
    monkeypatch.setattr(engine, "LONGEST_RUN_NS", 0)
    plan = PlanCache(raw).plan(model.count)
    run_often(plan)
    assert plan._engine.way is Way.POOL
    assert plan._engine._inline_compiled is None


@pytest.mark.skipif(not denormals.SUPPORTED, reason="the C library's floating-point environment is unknown here")
def test_denormals_are_flushed_as_on_tensorflows_threads(raw, model):
    tiny = np.full((1, 2), 1e-40, np.float32)
    feed = {model.x: tiny}
    expected = raw.run(model.y, feed)
    assert (expected == 0.0).all()
    plan = PlanCache(raw, inline=True).plan(model.y, feed)
    for _ in range(engine.CHECK_EVERY + 2):
        np.testing.assert_array_equal(plan.run(feed), expected)
    assert plan._engine.way is Way.INLINE
    # And nowhere else: neither in what this thread computes nor in what is fed.
    assert tiny[0, 0] * np.float32(0.5) != 0.0
    assert plan.convert({model.x: [[1e-40, 1e-40]]})[0][0, 0] != 0.0
    with model.graph.as_default():
        same = tf.identity(model.x)
    plan = PlanCache(raw, inline=True).plan(same, feed)
    np.testing.assert_array_equal(plan.run(feed), tiny)


@pytest.mark.skipif(not denormals.SUPPORTED, reason="the C library's floating-point environment is unknown here")
def test_denormals_come_back_after_an_error(raw, model):
    with model.graph.as_default():
        bad = tf.debugging.check_numerics(tf.math.log(model.w - 5.0), "no logarithm")
    plan = PlanCache(raw, inline=True).plan(bad)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            plan.run()
        assert np.float32(1e-40) * np.float32(0.5) != 0.0


def test_random_numbers_go_on_whatever_way_a_run_goes(graph):
    with graph.as_default():
        number = tf1.random_uniform([4], seed=7)
    with tf1.Session(graph=graph) as raw:
        expected = [raw.run(number) for _ in range(6)]
    with tf1.Session(graph=graph) as raw:
        pool, inline = (PlanCache(raw, inline=inline).plan(number) for inline in (False, True))
        got = [run() for run in (pool.run, inline.run, lambda: raw.run(number)) * 2]
    np.testing.assert_array_equal(got, expected)


def test_long_loops_in_the_callers_thread(graph):
    """TensorFlow runs the ops of a loop one after the other; were it recursive, this would overflow the stack."""
    before = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    try:
        with graph.as_default():
            a = tf1.placeholder(tf.float32, [2, 2])
            _, out = tf1.while_loop(
                lambda i, _: i < 20_000,
                lambda i, b: (i + 1, tf.matmul(b, a)),
                [0, a],
                shape_invariants=[tf.TensorShape([]), tf.TensorShape([2, 2])],
            )
    finally:
        if before:
            tf1.enable_control_flow_v2()
    with tf1.Session(graph=graph) as raw:
        feed = {a: np.eye(2, dtype=np.float32)}
        plan = PlanCache(raw, inline=True).plan(out, feed)
        np.testing.assert_array_equal(plan.run(feed), np.eye(2))
        assert plan._engine.way is (Way.INLINE if denormals.SUPPORTED else Way.POOL)
