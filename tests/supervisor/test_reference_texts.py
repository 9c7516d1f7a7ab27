"""The code of the reference texts, ported: what a user of TensorFlow's Supervisor has, and what becomes of it here.

The blocks about MonitoredTrainingSession are tried where that is.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import SessionManager, Supervisor

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def regression(device: str | None = None) -> tuple[Any, Any]:
    """`...add operations to the graph...`: into the default graph; the train op and a summary op."""
    with tf.device(device):
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", [3], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(w - 2.0), name="loss")
        train_op = tf1.train.GradientDescentOptimizer(0.3).minimize(loss, global_step=step)
    return train_op, tf1.summary.scalar("my_loss", loss)


async def step_of(sess: Any) -> int:
    return int(await sess.run(tf1.train.get_global_step(sess.graph)))


# ------------------------------------------------------------------ the Supervisor's reference


async def test_in_a_single_program(tmp_path: Path) -> None:
    """::

    with tf.Graph().as_default():
      ...add operations to the graph...
      sv = Supervisor(logdir='/tmp/mydir')
      with sv.managed_session(FLAGS.master) as sess:
        while not sv.should_stop():
          sess.run(<my_train_op>)
    """
    with tf.Graph().as_default() as graph:
        train_op, _ = regression()
        sv = Supervisor(logdir=str(tmp_path))
    assert sv.graph is graph
    async with sv.managed_session("") as sess:
        while not sv.should_stop():
            await sess.run(train_op)
            if await step_of(sess) == 50:
                sv.request_stop()
        assert await sess.run("loss:0") < 1e-6
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-50")


async def test_a_program_that_crashed_goes_on(tmp_path: Path) -> None:
    """ "If the program crashes and is restarted, the managed session automatically reinitialises variables from the
    most recent checkpoint."
    """
    for turn in range(3):
        with tf.Graph().as_default():
            train_op, _ = regression()
            sv = Supervisor(logdir=str(tmp_path))
        with pytest.raises(RuntimeError, match="crash"):
            async with sv.managed_session() as sess:
                assert await step_of(sess) == turn * 5
                for _ in range(5):
                    await sess.run(train_op)
                raise RuntimeError("crash")


async def test_an_exception_of_a_service_is_told_by_should_stop(tmp_path: Path) -> None:
    """ "The supervisor is notified of any exception raised by one of the services. After an exception is raised,
    should_stop() returns True." End of input does the same, and is not raised again.
    """
    with tf.Graph().as_default():
        train_op, _ = regression()
        sv = Supervisor()

    def fail() -> None:
        raise ConnectionError("the service")

    with pytest.raises(ConnectionError):
        async with sv.managed_session() as sess:
            sv.loop(60, fail)
            while not sv.should_stop():
                await sess.run(train_op)

    def end() -> None:
        raise tf.errors.OutOfRangeError(None, None, "no more input")

    async with sv.managed_session() as sess:
        sv.loop(60, end)
        while not sv.should_stop():
            await sess.run(train_op)


@pytest.mark.allow_leak("files")  # a TensorFlow server lives as long as its process
async def test_with_replicas(tmp_path: Path) -> None:
    """::

    is_chief = (server_def.task_index == 0)
    server = tf.distribute.Server(server_def)
    with tf.Graph().as_default():
      ...
      sv = Supervisor(logdir='/shared_directory/...', is_chief=is_chief)
      with sv.managed_session(server.target) as sess:
        while not sv.should_stop():
          sess.run(<my_train_op>)
    """
    server = tf.distribute.Server({"local": ["localhost:0"]}, job_name="local", task_index=0, start=True)
    ready = asyncio.Event()

    async def replica(task_index: int) -> tuple[int, int]:
        is_chief = task_index == 0
        with tf.Graph().as_default():
            train_op, _ = regression(device="/job:local/task:0")
            sv = Supervisor(logdir=str(tmp_path), is_chief=is_chief, recovery_wait_secs=0.1)
        steps = 0
        async with sv.managed_session(server.target) as sess:
            while not sv.should_stop():
                await sess.run(train_op)
                steps += 1
                if await step_of(sess) >= 60:
                    ready.set()
                    await asyncio.sleep(0)
                    sv.request_stop()
            last = await step_of(sess)
        return steps, last

    results = await asyncio.gather(*(replica(task_index) for task_index in (2, 1, 0)))
    assert ready.is_set()
    steps, last = zip(*results, strict=True)
    assert max(last) <= sum(steps), "all of them trained the one model"
    assert min(last) >= 60
    assert tf.train.load_variable(str(tmp_path), "global_step") >= 60, "and the chief saved it"


async def test_the_program_for_replicas_works_alone(tmp_path: Path) -> None:
    """ "Note: this modified program still works fine as a single program"."""
    with tf.Graph().as_default():
        train_op, _ = regression()
        sv = Supervisor(logdir=str(tmp_path), is_chief=True)
    async with sv.managed_session("") as sess:
        await sess.run(train_op)
    assert tf.train.load_variable(str(tmp_path), "global_step") == 1


@pytest.mark.allow_leak("files")  # as above
@pytest.mark.parametrize("master", ["", "local", "grpc"])
async def test_which_master_to_use(master: str) -> None:
    """`''`, `'local'` and `'grpc://hostname:port'`, or a server's target."""
    if master == "grpc":
        master = tf.distribute.Server.create_local_server().target
        assert master.startswith("grpc://")
    with tf.Graph().as_default():
        train_op, _ = regression(device="/cpu:0")
        sv = Supervisor()
    async with sv.managed_session(master) as sess:
        await sess.run(train_op)


async def test_launching_additional_services(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """::

    with sv.managed_session(FLAGS.master) as sess:
      sv.loop(60, print_loss, (sess, ))
      while not sv.should_stop():
        sess.run(my_train_op)

    A plain function runs on a thread and gets the blocking view; a coroutine function gets the session itself.
    """
    with tf.Graph().as_default():
        my_train_op, _ = regression()
        sv = Supervisor(logdir=str(tmp_path))

    def print_loss(sess: Any) -> None:
        print("plain", sess.run("loss:0"))

    async def print_loss_async(sess: Any) -> None:
        print("async", await sess.run("loss:0"))

    async with sv.managed_session("") as sess:
        loops = [sv.loop(60, print_loss, (sess.blocking,)), sv.loop(60, print_loss_async, (sess,))]
        while not sv.should_stop():
            await sess.run(my_train_op)
            if all(looper.calls for looper in loops):
                sv.request_stop()
    printed = capsys.readouterr().out
    assert printed.count("plain") == printed.count("async") == 1


async def test_launching_fewer_services(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    """::

    sv = Supervisor(logdir='/tmp/mydir', is_chief=is_chief, summary_op=None)
    with sv.managed_session(FLAGS.master) as sess:
      for step in range(1000000):
        if sv.should_stop():
          break
        if is_chief and step % 100 == 0:
          sv.summary_computed(sess, sess.run(my_summary_op))
        else:
          sess.run(my_train_op)
    """
    is_chief = True
    with tf.Graph().as_default():
        my_train_op, my_summary_op = regression()
        sv = Supervisor(logdir=str(tmp_path), is_chief=is_chief, summary_op=None)
    async with sv.managed_session("") as sess:
        for step in range(1000000):
            if sv.should_stop():
                break
            if is_chief and step % 100 == 0:
                await sv.summary_computed(sess, await sess.run(my_summary_op))
            else:
                await sess.run(my_train_op)
            if step == 300:
                sv.request_stop()
        assert "summaries" not in [service.name for service in sv.status().services]
    (events,) = events_of(tmp_path)
    summaries = [kind for kind in kinds_of(events) if kind.startswith("summary:my_loss")]
    assert summaries == [f"summary:my_loss:{step}" for step in (0, 99, 198, 297)]


async def test_custom_initialisation_by_local_init_op(tmp_path: Path) -> None:
    """ "If you have special initialisation needs, see how to specify a local_init_op." """
    with tf.Graph().as_default():
        regression()
        vocabulary = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), 0)
        seen = tf1.get_variable("seen", initializer=0, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        with tf.control_dependencies([seen.initializer, tf1.tables_initializer()]):
            local_init_op = tf1.assign(seen, 7)
        found = vocabulary.lookup(tf.constant(["b", "a", "z"]))
        sv = Supervisor(logdir=str(tmp_path), local_init_op=local_init_op)
    for _ in range(2):  # also where the rest is restored
        async with sv.managed_session() as sess:
            assert (await sess.run(found)).tolist() == [2, 1, 0]
            assert await sess.run(seen) == 7


async def test_custom_initialisation_by_the_session_manager(tmp_path: Path) -> None:
    """ "You can also use the SessionManager directly to create a session and check if it could be initialised
    automatically."
    """
    with tf.Graph().as_default() as graph:
        train_op, _ = regression()
        init = tf1.global_variables_initializer()
        saver = tf1.train.Saver()
        ready = tf1.report_uninitialized_variables()
        manager = SessionManager(ready_op=ready, graph=graph)
        async with Supervisor(logdir=str(tmp_path), graph=graph, saver=saver).managed_session() as sess:
            await sess.run(train_op)
    sess, restored = await manager.recover_session("", saver, checkpoint_dir=str(tmp_path))
    assert restored
    assert await step_of(sess) == 1
    await sess.close()
    sess, restored = await manager.recover_session("", saver, checkpoint_dir=str(tmp_path / "nothing"))
    assert not restored
    await sess.run(init)
    assert await step_of(sess) == 0
    await sess.close()


async def test_the_session_in_a_function(tmp_path: Path) -> None:
    """::

    def train():
      sv = tf.compat.v1.train.Supervisor(...)
      with sv.managed_session(<master>) as sess:
        for step in range(..):
          if sv.should_stop():
            break
          sess.run(<my training op>)
    """
    with tf.Graph().as_default() as graph:
        train_op, _ = regression()

    async def train() -> int:
        sv = Supervisor(graph=graph, logdir=str(tmp_path))
        async with sv.managed_session("") as sess:
            for _step in range(10):
                if sv.should_stop():
                    break
                await sess.run(train_op)
            return await step_of(sess)

    assert [await train(), await train()] == [10, 20]


async def test_the_retry_loop(tmp_path: Path) -> None:
    """::

    def main(...):
      while True
        try:
          train()
        except tf.errors.Aborted:
          pass

    Under its real name, AbortedError; what is preempted here is a session whose server has lost it.
    """
    with tf.Graph().as_default() as graph:
        train_op, _ = regression()
    starts: list[int] = []

    async def train() -> None:
        sv = Supervisor(graph=graph, logdir=str(tmp_path))
        async with sv.managed_session() as sess:
            starts.append(await step_of(sess))
            for _ in range(4):
                await sess.run(train_op)
            if len(starts) < 3:
                raise tf.errors.AbortedError(None, None, "preempted")

    async def main() -> None:
        while True:
            try:
                await train()
            except tf.errors.AbortedError:
                continue
            break

    await main()
    assert starts == [0, 4, 8]


async def test_out_of_range_is_not_raised_again() -> None:
    """ "As a special case, exceptions used for control flow, such as OutOfRangeError, are not raised again." """
    with tf.Graph().as_default() as graph:
        value = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    sv = Supervisor(graph=graph)
    seen: list[int] = []
    async with sv.managed_session() as sess:
        while True:
            seen.append(int(await sess.run(value)))
    assert seen == [0, 1, 2, 3, 4]
    assert sv.should_stop()


async def test_the_methods_by_their_old_names(tmp_path: Path, events_of: Any, kinds_of: Any) -> None:
    """PrepareSession, StartStandardServices, StartQueueRunners, Loop, SummaryComputed, StopOnException, RequestStop,
    ShouldStop, WaitForStop, Stop: a whole training with nothing else.
    """
    with tf.Graph().as_default():
        train_op, summary_op = regression()
        sv = Supervisor(logdir=str(tmp_path), summary_op=None)
    sess = await sv.PrepareSession("", start_standard_services=False)
    services = sv.StartStandardServices(sess)
    assert services is not None
    assert sv.StartQueueRunners(sess) == []
    calls: list[int] = []
    sv.Loop(None, calls.append, (1,))
    await sess.run(train_op)
    await sv.SummaryComputed(sess, await sess.run(summary_op))
    assert not sv.ShouldStop()
    with sv.StopOnException():
        raise tf.errors.OutOfRangeError(None, None, "clean")
    assert sv.ShouldStop()
    sv.RequestStop()
    await sv.WaitForStop()
    await sv.Stop()
    await sess.close()
    assert calls
    (events,) = events_of(tmp_path)
    assert "summary:my_loss:1" in kinds_of(events)
    assert kinds_of(events)[-1] == "STOP"


# ------------------------------------------------------------------ the question and answer: two graphs


async def test_two_graphs(counter: Callable[..., Any]) -> None:
    """::

    c1 = tf.constant(42)    # in g1
    c2 = tf.constant(3.14)  # in g2
    with g1.as_default():
      with tf.train.MonitoredTrainingSession() as sess:
        print(c1.eval(session=sess))
        try:
          print(c2.eval(session=sess))
        except ValueError as e:
          print(e)

    With a managed session; and the same once more with g2.
    """
    g1, g2 = tf.Graph(), tf.Graph()
    with g1.as_default():
        c1 = tf.constant(42)
        assert c1.graph is g1
    with g2.as_default():
        c2 = tf.constant(3.14)
        assert c2.graph is g2
    message = (
        "Cannot use the given session to evaluate tensor: the tensor's graph is different from the session's graph"
    )
    for graph, own, other, value in ((g1, c1, c2, 42), (g2, c2, c1, 3.14)):
        async with Supervisor(graph=graph).managed_session() as sess:
            assert await own.eval(session=sess) == pytest.approx(value)
            with pytest.raises(ValueError, match=message):
                other.eval(session=sess)
            with tf1.Session(graph=other.graph) as raw, pytest.raises(ValueError, match=message):
                own.eval(session=raw)


async def test_what_tensorflow_drops(counter: Callable[..., Any]) -> None:
    """`op.run(session=sess)` drops what `run` returns, so nothing can await it: Python tells, and nothing was run."""
    made = counter()
    async with Supervisor(graph=made.graph).managed_session() as sess:
        with pytest.warns(RuntimeWarning, match="never awaited"):
            made.train.op.run(session=sess)
            gc.collect()
        assert await sess.run(made.step) == 0
        await sess.run(made.train.op)
        assert await sess.run(made.step) == 1


async def test_what_the_raw_session_would_need(tmp_path: Path) -> None:
    """::

    init_op = tf.global_variables_initializer()
    with tf.Session() as sess:
        sess.run(init_op)
        sess.run(your_graph_ops,...)

    The answer's advantages of a managed session: variables, queues and writers are there without a word.
    """
    with tf.Graph().as_default() as graph:
        train_op, _ = regression()
        names = tf1.train.string_input_producer(["a"], num_epochs=1)
        name = names.dequeue()
    async with Supervisor(graph=graph, logdir=str(tmp_path)).managed_session() as sess:
        await sess.run(train_op)
        assert await sess.run(name) == b"a"
    assert list(tmp_path.glob("events.out*"))


@pytest.mark.allow_leak("files")  # as above
async def test_run_my_model_alone_or_distributed() -> None:
    """::

    def run_my_model(train_op, session_args):
        with tf.train.MonitoredTrainingSession(**session_args) as sess:
            sess.run(train_op)

    run_my_model(train_op, {})
    run_my_model(train_op, {"master": server.target, "is_chief": (FLAGS.task_index == 0)})
    """

    async def run_my_model(*, master: str = "", is_chief: bool = True) -> int:
        with tf.Graph().as_default():
            train_op, _ = regression(device="/cpu:0")
            sv = Supervisor(is_chief=is_chief)
        async with sv.managed_session(master) as sess:
            await sess.run(train_op)
            return await step_of(sess)

    assert await run_my_model() == 1
    server = tf.distribute.Server.create_local_server()
    assert await run_my_model(master=server.target, is_chief=True) == 1
    assert await run_my_model(master=server.target, is_chief=False) == 2, "the model lives on the server"
