"""BEHAVIOURS.md, section 5: Scaffold as far as a session uses it, MonitoredSession, SingularMonitoredSession."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.errors import SessionClosed, StopRequested
from asupervisor.monitored import ChiefSessionCreator, MonitoredSession, SingularMonitoredSession
from asupervisor.recovery import RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
like_tf = RecoveryPolicy.like_tensorflow()


# ------------------------------------------------------------------ ScaffoldTest: TensorFlow's own, in our hands


async def test_s5_scaffold_nothing_before_defaults_after(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        scaffold = tf1.train.Scaffold()
        assert scaffold.init_op is scaffold.ready_op is scaffold.local_init_op is scaffold.saver is None
    async with MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph)) as sess:
        assert isinstance(scaffold.init_op, tf.Operation)
        assert isinstance(scaffold.saver, tf1.train.Saver)
        assert scaffold.init_fn is scaffold.init_feed_dict is None
        assert (await sess.run(scaffold.ready_op)).size == 0
        assert (await sess.run(scaffold.ready_for_local_init_op)).size == 0
        assert made.graph.finalized


async def test_s5_scaffold_without_variables() -> None:
    graph = tf.Graph()
    async with MonitoredSession(graph=graph) as sess:
        assert await sess.run([]) == []


async def test_s5_scaffold_two_savers(counter: Make, tmp_path: Path) -> None:
    made = counter()
    with made.graph.as_default():
        for _ in range(2):
            tf1.add_to_collection(tf1.GraphKeys.SAVERS, tf1.train.Saver())
    for place in ({}, {"checkpoint_dir": tmp_path}):
        with pytest.raises(RuntimeError, match=r"[Mm]ore than one item"):
            async with MonitoredSession(ChiefSessionCreator(graph=made.graph, **place)):
                pass


async def test_s5_scaffold_passed_values_are_used(counter: Make) -> None:
    made = counter()
    called: list[Any] = []
    with made.graph.as_default():
        feed = tf1.placeholder(tf.int64, [])
        local = tf1.get_variable("local", initializer=0, collections=[tf1.GraphKeys.LOCAL_VARIABLES], trainable=False)
        local_feed = tf1.placeholder(tf.int32, [])
        scaffold = tf1.train.Scaffold(
            init_op=tf1.assign(made.step, feed),
            init_feed_dict={feed: 5},
            init_fn=lambda scaffold, session: called.append((scaffold, session)),
            local_init_op=tf1.assign(local, local_feed),
            local_init_feed_dict={local_feed: 6},
        )
    async with MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph)) as sess:
        assert await sess.run([made.step, local]) == [5, 6]
        assert called == [(scaffold, sess.plain.raw)]


async def test_s5_scaffold_init_fn_may_be_a_coroutine_function(counter: Make) -> None:
    made = counter()

    async def init_fn(scaffold: Any, session: Any) -> None:
        await session.run(made.train)

    with made.graph.as_default():
        scaffold = tf1.train.Scaffold(init_fn=init_fn)
    async with MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph)) as sess:
        assert await sess.run(made.step) == 1


async def test_s5_scaffold_with_a_checkpoint_object_for_a_saver(variables: str, tmp_path: Path) -> None:
    """A tf.train.Checkpoint becomes a saver when the scaffold is finalised."""
    from asupervisor.monitored import MonitoredTrainingSession

    for expected in (1, 2):
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.train.get_or_create_global_step()
            train = tf1.assign_add(step, 1)
            scaffold = tf1.train.Scaffold(saver=tf.train.Checkpoint(step=step))
        async with MonitoredTrainingSession(checkpoint_dir=tmp_path, scaffold=scaffold, graph=graph) as sess:
            assert await sess.run(train) == expected


# ------------------------------------------------------------------ MonitoredSessionTest


async def test_s5_defaults() -> None:
    graph = tf.Graph()
    with graph.as_default():
        a_var = tf1.get_variable("a_var", initializer=0)
        async with MonitoredSession() as sess:
            assert await sess.run(a_var) == 0


async def test_s5_last_step(counter: Make, tmp_path: Path) -> None:
    made = counter()
    with made.graph.as_default():
        hook = tf1.train.StopAtStepHook(last_step=3)
        saver = tf1.train.Saver()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for step in (1, 2):
            assert await sess.run(made.after) == step
            assert not sess.should_stop()
        assert await sess.run(made.after) == 3
        assert sess.should_stop()
        save_path = await sess.plain.call(lambda raw: saver.save(raw, str(tmp_path / "step-3")))

    def load(scaffold: Any, session: Any) -> None:
        saver.restore(session, save_path)

    with made.graph.as_default():
        creator = ChiefSessionCreator(tf1.train.Scaffold(init_fn=load), graph=made.graph)
        hook = tf1.train.StopAtStepHook(last_step=5)
    async with MonitoredSession(creator, hooks=[hook]) as sess:
        assert await sess.run(made.step) == 3
        assert not sess.should_stop()
        assert await sess.run(made.after) == 4
        assert not sess.should_stop()
        assert await sess.run(made.after) == 5
        assert sess.should_stop()


async def test_s5_num_steps(counter: Make, tmp_path: Path) -> None:
    made = counter()
    with made.graph.as_default():
        hook = tf1.train.StopAtStepHook(num_steps=3)
        saver = tf1.train.Saver()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for stops in (False, False, True):
            assert not sess.should_stop()
            await sess.run(made.train)
            assert sess.should_stop() is stops
        save_path = await sess.plain.call(lambda raw: saver.save(raw, str(tmp_path / "step-3")))
    with made.graph.as_default():
        scaffold = tf1.train.Scaffold(init_fn=lambda scaffold, session: saver.restore(session, save_path))
        hook = tf1.train.StopAtStepHook(num_steps=4)
    async with MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph), hooks=[hook]) as sess:
        for step in (4, 5, 6, 7):
            assert not sess.should_stop()
            assert await sess.run(made.after) == step
        assert sess.should_stop()


async def test_s5_recovery_by_a_restart(counter: Make, tmp_path: Path) -> None:
    """TensorFlow's own saver hook saves; a creator restores, from the directory or from one checkpoint."""
    made = counter()

    def parts() -> Any:
        with made.graph.as_default():
            scaffold = tf1.train.Scaffold()
            hook = tf1.train.CheckpointSaverHook(str(tmp_path), save_steps=1, scaffold=scaffold)
            return scaffold, hook

    scaffold, hook = parts()
    creator = ChiefSessionCreator(scaffold, checkpoint_dir=tmp_path, graph=made.graph)
    async with MonitoredSession(creator, hooks=[hook]) as sess:
        for step in (1, 2):
            assert await sess.run(made.after) == step
    # The scaffold is used again after it was finalised, and so is the hook.
    async with MonitoredSession(creator, hooks=[hook]) as sess:
        assert await sess.run(made.step) == 2
    by_name = ChiefSessionCreator(
        scaffold, checkpoint_filename_with_path=tf.train.latest_checkpoint(str(tmp_path)), graph=made.graph
    )
    async with MonitoredSession(by_name) as sess:
        assert await sess.run(made.step) == 2


@pytest.mark.parametrize("kind", [tf.errors.AbortedError, tf.errors.UnavailableError])
@pytest.mark.parametrize("policy", [like_tf, RecoveryPolicy(backoff=like_tf.backoff)], ids=["like_tf", "default"])
async def test_s5_retry_initialization(counter: Make, aborted: Make, kind: Any, policy: RecoveryPolicy) -> None:
    made = counter()
    calls = 0

    def init_fn(scaffold: Any, session: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise aborted(kind)

    with made.graph.as_default():
        scaffold = tf1.train.Scaffold(init_fn=init_fn)
    async with MonitoredSession(ChiefSessionCreator(scaffold, graph=made.graph), recovery=policy) as sess:
        assert calls == 3
        assert await sess.run(made.after) == 1


@pytest.mark.parametrize("kind", [tf.errors.AbortedError, tf.errors.UnavailableError])
async def test_s5_retry_on_lost_session(counter: Make, raiser: Make, aborted: Make, kind: Any) -> None:
    """Without a checkpoint the original begins anew: 2 becomes 1."""
    made = counter()
    hook = raiser("before_run", aborted(kind), at=3)
    async with MonitoredSession(hooks=[hook], graph=made.graph, recovery=like_tf) as sess:
        assert await sess.run(made.after) == 1
        assert await sess.run(made.after) == 2
        assert await sess.run(made.after) == 1
        assert not sess.should_stop()
        assert sess.recoveries == 1


async def test_s5_recover_and_retry(counter: Make, raiser: Make, aborted: Make, tmp_path: Path) -> None:
    """With a saver after each step: 2 becomes 3."""
    made = counter()
    with made.graph.as_default():
        scaffold = tf1.train.Scaffold()
        saving = tf1.train.CheckpointSaverHook(str(tmp_path), save_steps=1, scaffold=scaffold)
    creator = ChiefSessionCreator(scaffold, checkpoint_dir=tmp_path, graph=made.graph)
    failing = raiser("before_run", aborted(), at=3)
    async with MonitoredSession(creator, hooks=[failing, saving], recovery=like_tf) as sess:
        for step in (1, 2, 3):
            assert await sess.run(made.after) == step
        assert sess.recoveries == 1


async def test_s5_exit_cleanly_on_out_of_range(counter: Make, raiser: Make) -> None:
    made = counter()
    reached = False
    hook = raiser("before_run", tf.errors.OutOfRangeError(None, None, "EOI"))
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train)
        reached = True
    assert not reached, "it is raised at the call"
    assert sess.should_stop()


@pytest.mark.parametrize("method", ["before_run", "after_run"])
async def test_s5_exit_cleanly_on_stop_iteration_of_a_hook(counter: Make, raiser: Make, method: str) -> None:
    made = counter()
    reached = False
    async with MonitoredSession(hooks=[raiser(method, StopIteration())], graph=made.graph) as sess:
        await sess.run(made.train)
        reached = True
    assert not reached
    assert sess.should_stop()
    assert sess.outcome == "stopped"


async def test_s5_regular_exception_passes_through_run(counter: Make, raiser: Make) -> None:
    made = counter()
    error = RuntimeError("regular exception")
    with pytest.raises(RuntimeError) as raised:
        async with MonitoredSession(hooks=[raiser("before_run", error)], graph=made.graph) as sess:
            await sess.run(made.train)
    assert raised.value is error
    assert sess.should_stop()


async def test_s5_exception_reported_to_coord_passes_through_run(counter: Make) -> None:
    """The next run works; the exception is raised when the block ends."""
    made = counter()
    error = RuntimeError("a thread wants to stop")
    with pytest.raises(RuntimeError) as raised:
        async with MonitoredSession(graph=made.graph) as sess:
            sess.coord.request_stop(error)
            assert await sess.run(made.after) == 1
            assert sess.should_stop()
    assert raised.value is error


async def test_s5_exception_reported_to_coord_passes_through_return(counter: Make) -> None:
    made = counter()
    error = RuntimeError("a thread wants to stop")
    with pytest.raises(RuntimeError) as raised:
        async with MonitoredSession(graph=made.graph) as sess:
            await sess.run(made.train)
            sess.coord.request_stop(error)
            assert sess.should_stop()
    assert raised.value is error


async def test_s5_stop_cleanly_when_no_exception_in_body(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph) as sess:
        assert await sess.run(made.after) == 1
        assert not sess.should_stop()
        raw = sess.plain.raw
    assert sess.should_stop()
    assert raw._closed
    with pytest.raises(SessionClosed):
        await sess.run(made.train)


async def test_s5_raises_regular_exceptions_in_body(counter: Make) -> None:
    made = counter()
    error = ValueError("regular exception")
    with pytest.raises(ValueError, match="regular") as raised:
        async with MonitoredSession(graph=made.graph) as sess:
            raw = sess.plain.raw
            raise error
    assert raised.value is error
    assert raw._closed
    assert sess.should_stop()


async def test_s5_graph(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph) as sess:
        assert sess.graph is made.graph


async def test_s5_graph_is_finalized_during_the_run_only(counter: Make) -> None:
    made = counter()
    async with MonitoredSession(graph=made.graph):
        assert made.graph.finalized
    assert not made.graph.finalized


async def test_s5_finalized_graph_stays_so(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        tf1.train.Scaffold().finalize()
    assert made.graph.finalized
    async with MonitoredSession(graph=made.graph) as sess:
        assert await sess.run(made.after) == 1
    assert made.graph.finalized


class Options(tf1.train.SessionRunHook):
    def __init__(self, options: Any) -> None:
        self.options = options
        self.seen: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        return tf1.train.SessionRunArgs(None, None, options=self.options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen.append(run_values)


def watch(node: str) -> Any:
    options = tf1.RunOptions()
    options.debug_options.debug_tensor_watch_opts.add(node_name=node, debug_ops=["DebugIdentity"])
    return options


async def test_s5_merge_run_options_from_hooks(counter: Make) -> None:
    made = counter()
    a, b = watch("a"), watch("b")
    a.trace_level = tf1.RunOptions.FULL_TRACE
    a.timeout_in_ms, b.timeout_in_ms = 60000, 30000
    b.report_tensor_allocations_upon_oom = True
    b.output_partition_graphs = True
    hooks = [Options(a), Options(b)]
    async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
        await sess.run(made.train)
    for hook in hooks:
        (values,) = hook.seen
        options = values.options
        assert options.trace_level == tf1.RunOptions.FULL_TRACE
        assert options.timeout_in_ms == 60000
        assert options.report_tensor_allocations_upon_oom
        assert [opts.node_name for opts in options.debug_options.debug_tensor_watch_opts] == ["a", "b"]
        assert len(values.run_metadata.partition_graphs) > 0
    assert [opts.node_name for opts in a.debug_options.debug_tensor_watch_opts] == ["a"], "theirs are not changed"


async def test_s5_merge_caller_and_hook_options(counter: Make) -> None:
    made = counter()
    mine, theirs = watch("mine"), watch("theirs")
    mine.trace_level = tf1.RunOptions.SOFTWARE_TRACE
    theirs.trace_level = tf1.RunOptions.FULL_TRACE
    theirs.inter_op_thread_pool = 0
    hook, metadata = Options(theirs), tf1.RunMetadata()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train, options=mine, run_metadata=metadata)
    (values,) = hook.seen
    assert values.run_metadata is metadata
    assert len(metadata.step_stats.dev_stats) > 0
    assert values.options.trace_level == tf1.RunOptions.FULL_TRACE
    assert [o.node_name for o in values.options.debug_options.debug_tensor_watch_opts] == ["mine", "theirs"]


async def test_s5_with_statement_and_close(counter: Make) -> None:
    """`close` is idempotent; like TensorFlow's, the block of a session that was closed inside complains."""
    async with MonitoredSession(graph=counter().graph) as sess:
        await sess.close()
        await sess.close()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        async with MonitoredSession(graph=counter().graph, recovery=like_tf) as sess:
            await sess.close()


# ------------------------------------------------------------------ step functions


def model_of_two() -> Any:
    graph = tf.Graph()
    with graph.as_default():
        c = tf1.placeholder(tf.float32)
        return graph, c, c + 4.0, c + 0.5


@pytest.mark.parametrize("kind", [MonitoredSession, SingularMonitoredSession])
async def test_s5_step_fn_example(kind: Any) -> None:
    graph, c, v, _ = model_of_two()

    def step_fn(step_context: Any) -> Any:
        return step_context.run_with_hooks(fetches=v, feed_dict={c: 3.2})

    async def async_step_fn(step_context: Any) -> Any:
        return await step_context.run_with_hooks(fetches=v, feed_dict={c: 3.2})

    async with kind(graph=graph) as sess:
        assert await sess.run_step_fn(step_fn) == pytest.approx(7.2)
        assert await sess.run_step_fn(async_step_fn) == pytest.approx(7.2)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_s5_step_function_stops(asynchronous: bool) -> None:
    graph, *_ = model_of_two()

    def step_fn(step_context: Any) -> None:
        step_context.request_stop()

    async def async_step_fn(step_context: Any) -> None:
        step_context.request_stop()

    reached = False
    async with MonitoredSession(graph=graph) as sess:
        await sess.run_step_fn(async_step_fn if asynchronous else step_fn)
        reached = True
    assert not reached
    assert sess.should_stop()
    assert sess.outcome == "stopped"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_s5_step_request_stop_caught_in_the_body(asynchronous: bool) -> None:
    graph, *_ = model_of_two()

    def step_fn(step_context: Any) -> None:
        step_context.request_stop()

    async def async_step_fn(step_context: Any) -> None:
        raise StopAsyncIteration

    sess = await MonitoredSession(graph=graph).open()
    with pytest.raises(StopRequested):
        await sess.run_step_fn(async_step_fn if asynchronous else step_fn)
    assert not sess.should_stop(), "it is the exception that ends the loop"
    await sess.close()


async def test_s5_step_request_stop_in_a_loop() -> None:
    graph, c, v, _ = model_of_two()
    seen: list[Any] = []

    def step_fn(step_context: Any) -> None:
        value = step_context.run_with_hooks(v, {c: float(len(seen))})
        seen.append(value)
        if value > 6:
            step_context.request_stop()

    async with MonitoredSession(graph=graph) as sess:
        while not sess.should_stop():
            await sess.run_step_fn(step_fn)
        raise AssertionError("an exception ends the loop")
    assert seen == [4, 5, 6, 7]


async def test_s5_step_fn_returns_any_type() -> None:
    graph, *_ = model_of_two()
    async with MonitoredSession(graph=graph) as sess:
        for value in (None, 7, "a", {"b": [1]}):

            def step_fn(step_context: Any) -> Any:
                return value  # noqa: B023

            assert await sess.run_step_fn(step_fn) == value


async def test_s5_step_fn_arguments_are_checked() -> None:
    graph, c, v, _ = model_of_two()

    class Methods:
        def good(self, step_context: Any) -> Any:
            return step_context.run_with_hooks(v, {c: 1.0})

        async def async_good(self, step_context: Any) -> Any:
            return await step_context.session.run(v, {c: 1.0})

        def bad(self, step_context: Any, extra: Any) -> None:
            raise AssertionError

        def other(self, context: Any) -> None:
            raise AssertionError

    methods = Methods()
    async with MonitoredSession(graph=graph) as sess:
        assert await sess.run_step_fn(methods.good) == 5
        assert await sess.run_step_fn(methods.async_good) == 5
        for bad in (methods.bad, methods.other, lambda step_context, extra: None, lambda: None):
            with pytest.raises(ValueError, match="`step_fn` may either have one `step_context` argument"):
                await sess.run_step_fn(bad)
        with pytest.raises(TypeError, match="callable"):
            await sess.run_step_fn(7)

        def returns_coroutine(step_context: Any) -> Any:
            return methods.async_good(step_context)

        with pytest.raises(TypeError, match="async def"):
            await sess.run_step_fn(returns_coroutine)


class Counting(tf1.train.SessionRunHook):
    """Fetches something along, feeds what it depends on, and reads a variable in `after_run`."""

    def __init__(self, graph: tf.Graph) -> None:
        with graph.as_default():
            self.var = tf1.get_variable("hook_var", initializer=0.0)
            self.feed = tf1.placeholder(tf.float32)
            self.add = tf1.assign_add(self.var, self.feed)
        self.before = self.after = 0
        self.results: list[Any] = []
        self.read: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        self.before += 1
        return tf1.train.SessionRunArgs(fetches=self.add, feed_dict={self.feed: 10.0})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.after += 1
        self.results.append(run_values.results)
        self.read.append(run_context.session.run(self.var))


@pytest.mark.parametrize("kind", [MonitoredSession, SingularMonitoredSession])
async def test_s5_step_fn_with_hooks(kind: Any, variables: str) -> None:
    graph, c, v, w = model_of_two()
    hook = Counting(graph)
    with graph.as_default():
        bump = tf1.assign_add(hook.var, 1.0)

    def step_fn(step_context: Any) -> Any:
        step_context.session.run(bump)
        assert hook.before == hook.after
        return step_context.run_with_hooks([v, w], {c: 1.0})

    async with kind(hooks=[hook], graph=graph) as sess:
        assert await sess.run_step_fn(step_fn) == [5.0, 1.5]
    assert (hook.before, hook.after) == (1, 1)
    assert hook.results == hook.read == [11.0]


async def test_s5_step_fn_request_stop_before_hooks(variables: str) -> None:
    graph, c, v, _ = model_of_two()
    hook = Counting(graph)

    def step_fn(step_context: Any) -> None:
        step_context.request_stop()
        step_context.run_with_hooks(v, {c: 1.0})

    async with MonitoredSession(hooks=[hook], graph=graph) as sess:
        await sess.run_step_fn(step_fn)
    assert (hook.before, hook.after) == (0, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after_hooks", [False, True])
async def test_s5_recovers_from_an_exception_in_step_fn(
    variables: str, aborted: Make, after_hooks: bool, asynchronous: bool
) -> None:
    """The whole function is run again, side effects and all."""
    graph, c, v, _ = model_of_two()
    hook = Counting(graph)
    raised = 0

    def fail_once(now: bool) -> None:
        nonlocal raised
        if now and not raised:
            raised += 1
            raise aborted()

    def step_fn(step_context: Any) -> Any:
        fail_once(not after_hooks)
        value = step_context.run_with_hooks(v, {c: 1.0})
        fail_once(after_hooks)
        return value

    async def async_step_fn(step_context: Any) -> Any:
        fail_once(not after_hooks)
        value = await step_context.run_with_hooks(v, {c: 1.0})
        fail_once(after_hooks)
        return value

    async with MonitoredSession(hooks=[hook], graph=graph, recovery=like_tf) as sess:
        assert await sess.run_step_fn(async_step_fn if asynchronous else step_fn) == 5.0
        assert not sess.should_stop()
        assert sess.recoveries == 1
    assert hook.before == hook.after == (2 if after_hooks else 1)


async def test_s5_step_fn_does_not_recover_when_it_was_not_asked_to(aborted: Make) -> None:
    graph, *_ = model_of_two()
    error = aborted()

    def step_fn(step_context: Any) -> None:
        raise error

    with pytest.raises(tf.errors.AbortedError) as raised:
        async with SingularMonitoredSession(graph=graph) as sess:
            await sess.run_step_fn(step_fn)
    assert raised.value is error


async def test_s5_step_fn_exception_from_before_run(raiser: Make, aborted: Make) -> None:
    graph, c, v, w = model_of_two()
    hook = raiser("before_run", aborted())
    calls: list[Any] = []

    def step_fn(step_context: Any) -> Any:
        calls.append(step_context.session.run(w, {c: 1.0}))
        return step_context.run_with_hooks(v, {c: 1.0})

    async with MonitoredSession(hooks=[hook], graph=graph, recovery=like_tf) as sess:
        assert await sess.run_step_fn(step_fn) == 5.0
    assert calls == [1.5, 1.5], "the session of the second try is the new one"


# ------------------------------------------------------------------ SingularMonitoredSessionTest


async def test_s5_singular_initialises(counter: Make) -> None:
    made = counter()
    async with SingularMonitoredSession(graph=made.graph) as sess:
        assert await sess.run(made.step) == 0
        assert sess.graph is made.graph


@pytest.mark.parametrize("method", ["before_run", "after_run"])
async def test_s5_singular_does_not_handle_aborted(counter: Make, raiser: Make, aborted: Make, method: str) -> None:
    made, error = counter(), aborted()
    with pytest.raises(tf.errors.AbortedError) as raised:
        async with SingularMonitoredSession(hooks=[raiser(method, error)], graph=made.graph) as sess:
            with pytest.raises(tf.errors.AbortedError):
                await sess.run(made.train)
            assert not sess.should_stop()
            raise error
    assert raised.value is error


async def test_s5_singular_exits_cleanly_on_out_of_range(counter: Make, raiser: Make) -> None:
    made = counter()
    error = tf.errors.OutOfRangeError(None, None, "EOI")
    async with SingularMonitoredSession(hooks=[raiser("before_run", error)], graph=made.graph) as sess:
        await sess.run(made.train)
        raise AssertionError
    assert sess.should_stop()


async def test_s5_singular_exception_reported_to_coord(counter: Make) -> None:
    made, error = counter(), RuntimeError("a thread wants to stop")
    with pytest.raises(RuntimeError) as raised:
        async with SingularMonitoredSession(graph=made.graph) as sess:
            assert await sess.run(made.step) == 0
            sess.coord.request_stop(error)
            assert await sess.run(made.step) == 0
    assert raised.value is error


async def test_s5_singular_raw_session(counter: Make) -> None:
    made = counter()
    async with SingularMonitoredSession(graph=made.graph) as sess:
        raw = sess.raw_session()
        assert isinstance(raw, tf1.Session)
        assert not sess.should_stop()
    assert sess.raw_session() is None
    assert sess.should_stop()
