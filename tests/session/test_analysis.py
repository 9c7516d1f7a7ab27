"""What a run touches, read off real graphs; each answer is held against what running the fetches really does."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.session.analysis import analyse, computes_floats, variable_name

tf1 = tf.compat.v1

pytestmark = pytest.mark.modes


@pytest.fixture
def model(graph, variables):
    """x -> one weight -> loss -> train, with a global step and a dropout-like second placeholder."""

    class Model:
        pass

    m = Model()
    m.graph = graph
    with graph.as_default():
        m.step = tf1.train.get_or_create_global_step()
        m.x = tf1.placeholder(tf.float32, [None], name="x")
        m.keep = tf1.placeholder_with_default(1.0, [], name="keep")
        m.w = tf1.get_variable("w", initializer=2.0)
        m.read = m.w.value()
        m.hidden = tf.multiply(m.x, m.w, name="hidden")
        m.loss = tf.reduce_mean(tf.square(m.hidden * m.keep - 1.0), name="loss")
        m.train = tf1.train.MomentumOptimizer(0.1, 0.9).minimize(m.loss, global_step=m.step)
        m.init = tf1.global_variables_initializer()
        m.saver = tf1.train.Saver()
    m.step_name = variable_name(m.step)
    return m


def test_a_training_run(model):
    touches = analyse(model.graph, [model.train, model.loss], [model.x])
    assert touches.variables_written == {"w", "w/Momentum", "global_step"}
    assert {"w", "w/Momentum"} <= touches.variables_read
    assert touches.variables_changed == touches.variables_written
    assert touches.feeds == {"x:0"}
    assert touches.placeholders == frozenset()
    assert touches.trains(model.step_name)
    assert touches.trains(None)
    assert not touches.only_fills
    assert not touches.may_wait


def test_reading_is_no_training(model):
    for fetches in ([model.loss], [model.step.op], [model.read], [model.hidden]):
        touches = analyse(model.graph, fetches, [model.x])
        assert touches.variables_written == frozenset()
        assert not touches.trains(model.step_name)
        assert not touches.trains(None)
    assert analyse(model.graph, [model.loss], [model.x]).variables_read == {"w"}


def test_initialising_and_restoring_is_no_training(model):
    everything = {"w", "w/Momentum", "global_step"}
    for op in (model.init, model.graph.get_operation_by_name("save/restore_all"), model.w.initializer):
        touches = analyse(model.graph, [op])
        assert touches.variables_written == (everything if op is not model.w.initializer else {"w"})
        assert touches.variables_initialised == touches.variables_written
        assert not touches.trains(model.step_name)
        assert not touches.trains(None)


def test_an_assignment_by_hand_is_training(model):
    with model.graph.as_default():
        reset = tf1.assign(model.step, 0)
        both = tf.group(reset, model.step.initializer)
    assert analyse(model.graph, [reset.op]).trains(model.step_name)
    assert analyse(model.graph, [both]).trains(model.step_name)


def test_counting_the_global_step_is_training(graph, variables):
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        count = (
            step.count_up_to(3)
            if variables == "ref"
            else tf.raw_ops.ResourceCountUpTo(resource=step.handle, limit=3, T=tf.int64)
        )
    touches = analyse(graph, [count])
    assert touches.counters == touches.variables_written == {"global_step"}
    assert touches.trains("global_step")


def test_synchronised_replicas(graph, variables):
    """The worker's own run does not move the global step: the chief's queue runner does, for all of them."""
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", initializer=1.0)
        optimizer = tf1.train.SyncReplicasOptimizer(tf1.train.GradientDescentOptimizer(0.1), 1, 1)
        train = optimizer.minimize(tf.square(w), global_step=step)
        runner = optimizer.get_chief_queue_runner()
    touches = analyse(graph, [train])
    assert "global_step" not in touches.variables_written
    assert touches.gradients
    assert touches.trains("global_step")
    sync = analyse(graph, [runner.enqueue_ops[0]])
    assert {"global_step", "w"} <= sync.variables_written
    assert sync.trains("global_step")


def test_only_the_global_step_counts_where_there_is_one(model):
    with model.graph.as_default():
        metric = tf1.assign_add(model.w, 1.0).op
    touches = analyse(model.graph, [metric])
    assert not touches.trains(model.step_name)
    assert touches.trains(None)


def test_saving_reads(model):
    touches = analyse(model.graph, [model.graph.get_operation_by_name("save/control_dependency")])
    assert touches.variables_read == {"w", "w/Momentum", "global_step"}
    assert touches.variables_written == frozenset()
    assert touches.alters  # files


def test_feeds_cut_the_closure(model):
    assert analyse(model.graph, [model.loss]).placeholders == {"x:0"}
    touches = analyse(model.graph, [model.loss], [model.hidden])
    assert touches.placeholders == frozenset()
    assert touches.variables_read == frozenset()
    assert touches.feeds == {"hidden:0"}
    # The same op is reached by another way, which the feed does not cut.
    with model.graph.as_default(), tf.control_dependencies([model.hidden]):
        after = tf.constant(1.0)
    assert analyse(model.graph, [after], [model.hidden]).placeholders == {"x:0"}
    # A tensor that is fetched and fed runs nothing.
    assert analyse(model.graph, [model.hidden], [model.hidden]).size == 0


def test_control_inputs_are_followed(model):
    with model.graph.as_default(), tf.control_dependencies([model.train]):
        last = tf.no_op()
    touches = analyse(model.graph, [last], [model.x])
    assert touches.trains(model.step_name)


def test_optional_placeholders_are_not_needed(model):
    assert "keep:0" not in analyse(model.graph, [model.loss], [model.x]).placeholders


def test_variables_written_in_branches(graph, variables, tf_mode):
    if variables == "ref" and tf_mode == "v2":
        pytest.skip("TensorFlow does not assign variables of the old kind in branches of the new kind")
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0)
        u = tf1.get_variable("u", initializer=1.0)
        out = tf1.cond(
            tf1.placeholder_with_default(True, []),
            lambda: tf.identity(tf1.assign_add(v, 1.0)),
            lambda: tf.identity(u),
        )
    touches = analyse(graph, [out])
    assert touches.variables_written == {"v"}
    assert {"u", "v"} <= touches.variables_read


def test_variables_written_in_loops(graph):
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0, use_resource=True)
        u = tf1.get_variable("u", initializer=1.0, use_resource=True)

        def body(i):
            with tf.control_dependencies([v.assign_add(u)]):
                return i + 1

        out = tf1.while_loop(lambda i: i < 3, body, [0])
    touches = analyse(graph, [out])
    assert touches.variables_written == {"v"}
    assert "u" in touches.variables_read
    with tf1.Session(graph=graph) as sess:
        sess.run([v.initializer, u.initializer])
        sess.run(out)
        assert sess.run([v, u]) == [4.0, 1.0]


def test_variables_written_in_functions_in_functions(graph):
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0, 1.0], use_resource=True)
        u = tf1.get_variable("u", initializer=[1.0, 1.0], use_resource=True)
        never = tf1.get_variable("never", initializer=1.0, use_resource=True)

        @tf.function
        def inner(a):
            v.assign_add(a)
            return a

        @tf.function
        def outer(a):
            return inner(a * u) + inner(a) + tf.reduce_sum(never.read_value())

        out = outer(tf.constant([1.0, 2.0]))
    touches = analyse(graph, [out])
    assert touches.variables_written == {"v"}
    assert {"u", "never"} <= touches.variables_read
    assert touches.calls


def test_a_function_that_is_not_in_the_graph_may_do_anything(graph, monkeypatch):
    from asupervisor import _tf

    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0, use_resource=True)
        out = tf.function(lambda: v.read_value())()
    assert analyse(graph, [out]).variables_written == frozenset()
    with graph.as_default():  # another row: what was read stays read
        again = tf.function(lambda: v.read_value() + 1.0)()
    monkeypatch.setattr(_tf, "function_def", lambda graph, name: None)
    touches = analyse(graph, [again])
    assert touches.variables_written == {"v"}
    assert touches.may_wait


def test_scatter_and_sparse_updates_write(graph, variables):
    with graph.as_default():
        v = tf1.get_variable("v", initializer=[1.0, 1.0])
        update = tf1.scatter_add(v, [0], [1.0])
    assert analyse(graph, [update if isinstance(update, tf.Operation) else update.op]).variables_written == {"v"}


def test_two_handles_of_one_variable(graph):
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0, use_resource=True)
        other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v", name="elsewhere")
        write = tf.raw_ops.AssignAddVariableOp(resource=other, value=1.0)
    assert analyse(graph, [write]).variables_written == {"v"}
    assert variable_name(v) == "v"


def test_names_of_global_steps(graph, variables):
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        read = step.value()
    assert variable_name(None) is None
    assert variable_name(step) == "global_step"
    assert variable_name(read) == "global_step"


# --------------------------------------------------------------------------------- queues and other sources


@pytest.fixture
def queues(graph):
    class Queues:
        pass

    q = Queues()
    q.graph = graph
    with graph.as_default():
        q.queue = tf.queue.FIFOQueue(2, [tf.float32], shapes=[[]], name="batches")
        q.enqueue = q.queue.enqueue(1.0)
        q.enqueue_many = q.queue.enqueue_many([[1.0, 2.0]])
        q.dequeue = q.queue.dequeue()
        q.dequeue_many = q.queue.dequeue_many(2)
        q.close = q.queue.close(cancel_pending_enqueues=True)
        q.size = q.queue.size()
    return q


def test_filling_and_closing_goes_aside(queues):
    for op in (queues.enqueue, queues.enqueue_many):
        touches = analyse(queues.graph, [op])
        assert touches.only_fills
        assert touches.enqueues == {"batches"}
        assert touches.may_wait == {"batches"}
        assert touches.sources == frozenset()
    touches = analyse(queues.graph, [queues.close])
    assert touches.only_fills
    assert touches.closes == {"batches"}
    assert not touches.may_wait
    assert not analyse(queues.graph, [queues.size]).only_fills
    assert analyse(queues.graph, [queues.enqueue, queues.size]).only_fills


def test_dequeues_are_sources_of_their_own(queues):
    one = analyse(queues.graph, [queues.dequeue])
    many = analyse(queues.graph, [queues.dequeue_many])
    assert one.may_wait == many.may_wait == {"batches"}
    assert len(one.sources) == len(many.sources) == 1
    assert one.sources != many.sources  # the same queue, but another batch
    assert not one.only_fills
    with queues.graph.as_default():
        doubled = queues.dequeue * 2.0
    assert analyse(queues.graph, [doubled]).sources == one.sources


def test_a_step_that_also_enqueues_stays_on_the_device(queues, variables):
    with queues.graph.as_default():
        step = tf1.train.get_or_create_global_step()
        both = tf.group(tf1.assign_add(step, 1), queues.enqueue)
    touches = analyse(queues.graph, [both])
    assert not touches.only_fills
    assert touches.trains("global_step")


def test_a_feeder_with_files_and_epochs_goes_aside(graph, variables, tmp_path):
    with graph.as_default():
        names = tf1.train.string_input_producer(["a", "b"], num_epochs=2)
        reader = tf1.TextLineReader(name="lines")
        _, line = reader.read(names)
        batch = tf1.train.batch([line], 4)
        runners = graph.get_collection(tf1.GraphKeys.QUEUE_RUNNERS)
    assert len(runners) == 2
    for runner in runners:
        for op in runner.enqueue_ops:
            touches = analyse(graph, [op if isinstance(op, tf.Operation) else op.op])
            assert touches.only_fills, touches
            assert not touches.trains(None)
            assert touches.enqueues == {runner.queue.queue_ref.op.name}
        assert analyse(graph, [runner.cancel_op]).closes == {runner.queue.queue_ref.op.name}
    by_queue = {runner.queue.queue_ref.op.name: runner for runner in runners}
    epochs = analyse(graph, [by_queue[names.queue_ref.op.name].enqueue_ops[0]])
    (other,) = set(by_queue) - {names.queue_ref.op.name}
    lines = analyse(graph, [by_queue[other].enqueue_ops[0]])
    assert any("epochs" in name for name in epochs.counters)
    assert lines.sources
    assert lines.may_wait == {names.queue_ref.op.name, "lines", other}
    assert analyse(graph, [batch]).may_wait == {other}


def test_iterators(graph):
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1.0, use_resource=True)
        data = tf.data.Dataset.from_tensors(1.0).map(lambda a: a + v).repeat()
        iterator = tf1.data.make_initializable_iterator(data)
        batch = iterator.get_next()
        once = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
    touches = analyse(graph, [batch])
    assert touches.sources == {batch.op.name}
    assert touches.may_wait
    assert touches.variables_read == frozenset()
    start = analyse(graph, [iterator.initializer])
    assert start.alters
    assert start.variables_read == {"v"}
    assert not start.trains(None)
    assert analyse(graph, [once]).sources == {once.op.name}
    assert analyse(graph, [once]).sources != touches.sources


def test_python_functions_take_and_wait(graph):
    with graph.as_default():
        out = tf.numpy_function(lambda: np.float32(1.0), [], tf.float32)
        pure = tf.numpy_function(lambda: np.float32(1.0), [], tf.float32, stateful=False)
    touches = analyse(graph, [out])
    assert touches.sources == {out.op.name}
    assert touches.may_wait == {out.op.name}
    assert analyse(graph, [pure]).sources == frozenset()
    assert analyse(graph, [pure]).may_wait == {pure.op.name}


def test_tables(graph):
    with graph.as_default():
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, empty_key=0, deleted_key=-1)
        insert = table.insert([1], [2])
        find = table.lookup(tf.constant([1], tf.int64))
    assert analyse(graph, [insert]).alters
    assert not analyse(graph, [insert]).trains(None)
    assert not analyse(graph, [find]).alters


def test_staging_areas(graph):
    with graph.as_default():
        area = tf1.placeholder(tf.float32, [])
        put = tf.raw_ops.Stage(values=[area], shared_name="pipe")
        (take,) = tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name="pipe")
    assert analyse(graph, [put], [area]).enqueues == {"pipe"}
    assert analyse(graph, [take]).may_wait == {"pipe"}
    assert analyse(graph, [take]).sources == {take.op.name}


def test_accumulators(graph):
    with graph.as_default():
        accumulator = tf1.ConditionalAccumulator(tf.float32, shape=[], name="gradients")
        apply, take = accumulator.apply_grad(1.0), accumulator.take_grad(1)
    assert analyse(graph, [take]).may_wait == {"gradients"}
    assert analyse(graph, [apply]).alters == analyse(graph, [apply]).gradients == {"gradients"}


def test_sources_inside_functions(graph):
    with graph.as_default():
        queue = tf.queue.FIFOQueue(2, [tf.float32], shapes=[[]], name="inner")

        @tf.function
        def f():
            return queue.dequeue() + 1.0

        out = f()
    touches = analyse(graph, [out])
    assert touches.may_wait == {"inner"}
    assert len(touches.sources) == 1


# ---------------------------------------------------------------------------------------- size and lifetime


def test_deep_graphs_are_no_recursion(graph):
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [], name="x")
        y = x
        for _ in range(3000):
            y = tf.negative(y)
    touches = analyse(graph, [y], [x])
    assert touches.size == 3000
    assert computes_floats([y], [x])


@pytest.mark.full
def test_a_hundred_thousand_ops(graph):
    from time import perf_counter

    definition = tf1.GraphDef()
    names = ["x", *(f"n{number}" for number in range(100_000))]
    for before, name in zip(["", *names], names, strict=False):
        node = definition.node.add(name=name, op="Neg" if before else "Placeholder")
        node.attr["T" if before else "dtype"].type = tf.float32.as_datatype_enum
        node.input.extend([before] if before else [])
    with graph.as_default():
        tf.import_graph_def(definition, name="")
        x, y = graph.get_tensor_by_name("x:0"), graph.get_tensor_by_name(f"{names[-1]}:0")
        v = tf1.get_variable("v", initializer=1.0, use_resource=True)
        one, two = v.assign_add(y).op, v.assign_sub(y).op
    began = perf_counter()
    assert analyse(graph, [one], [x]).variables_written == {"v"}
    first = perf_counter() - began
    began = perf_counter()
    assert analyse(graph, [two], [x]).size > 100_000
    second = perf_counter() - began
    assert second < first / 2


def test_a_graph_that_grows(graph):
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [], name="x")
        y = x * 2.0
        assert analyse(graph, [y]).placeholders == {"x:0"}
        other = tf1.placeholder(tf.float32, [], name="other")
        z = y + other
        v = tf1.get_variable("v", initializer=1.0)
    assert analyse(graph, [z]).placeholders == {"x:0", "other:0"}
    assert not analyse(graph, [v.initializer]).trains(None)


def test_the_index_does_not_keep_the_graph():
    graph = tf.Graph()
    with graph.as_default():
        y = tf1.placeholder(tf.float32, []) * tf1.get_variable("v", initializer=1.0)
    analyse(graph, [y])
    ghost = weakref.ref(graph)
    del graph, y
    gc.collect()
    assert ghost() is None


def test_whether_floats_are_computed(graph):
    with graph.as_default():
        step = tf1.get_variable("step", initializer=0, use_resource=True)
        count = step.assign_add(1).op
        x = tf1.placeholder(tf.float32, [None])
        size, double = tf.shape(x), x * 2.0
    assert not computes_floats([count])
    assert computes_floats([size], [x])
    assert computes_floats([double], [x])
