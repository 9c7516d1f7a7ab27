"""Issue 5, item 2: TensorFlow's own hooks run unchanged: the same calls and values as under TensorFlow's own class.

Each hook is wrapped in a subclass that writes down what it is called with and what it answers. The same program then
runs three times on equal graphs: under `tf.compat.v1.train.MonitoredSession`, under ours by `run`, and by `steps`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.training import training_util

from asupervisor.monitored import ChiefSessionCreator, MonitoredSession

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
METHODS = ("begin", "after_create_session", "before_run", "after_run", "end")
STEPS = 6


def plain(value: Any) -> Any:
    """A value that can be compared, and is the same for equal graphs."""
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return ["array", str(value.dtype), repr(value.tolist())]  # as text, since NaN equals nothing
    if isinstance(value, bytes):
        return "bytes"
    if hasattr(value, "op") or isinstance(value, tf.Operation):
        return value.name
    return value


def recorded(kind: type, log: list[Any], graph: tf.Graph) -> type:
    """A subclass of a hook that writes into `log`."""

    def wrap(name: str) -> Any:
        original = getattr(kind, name)

        def method(self: Any, *args: Any) -> Any:
            entry: dict[str, Any] = {"call": name, "graph": tf1.get_default_graph() is graph}
            if name in ("after_create_session", "end"):
                entry["session"] = isinstance(args[0], tf1.Session) and args[0].graph is graph
            if name in ("before_run", "after_run"):
                context = args[0]
                entry["session"] = isinstance(context.session, tf1.Session)
                entry["fetches"] = plain(context.original_args.fetches)
                entry["fed"] = plain({key: np.asarray(v) for key, v in (context.original_args.feed_dict or {}).items()})
            if name == "after_run":
                entry["results"] = plain(args[1].results)
                entry["options"] = str(args[1].options)
                entry["metadata"] = type(args[1].run_metadata).__name__
                entry["traced"] = len(args[1].run_metadata.step_stats.dev_stats) > 0
            try:
                answer = original(self, *args)
            except BaseException as error:
                entry["raises"] = type(error).__name__
                log.append(entry)
                raise
            if name == "before_run" and answer is not None:
                entry["asks"] = plain([answer.fetches, {k: np.asarray(v) for k, v in (answer.feed_dict or {}).items()}])
                entry["asks_options"] = str(answer.options)
            if name == "after_run":
                entry["stops"] = args[0].stop_requested
            log.append(entry)
            return answer

        return method

    return type(f"Recorded{kind.__name__}", (kind,), {name: wrap(name) for name in METHODS})


class Program:
    """A model, and what happens to it."""

    def __init__(self, start: int = 0) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = tf1.placeholder(tf.float32, [None, 2], name="x")
            self.extra = tf1.placeholder_with_default(1.0, [], name="extra")
            w = tf1.get_variable("w", [2, 1], initializer=tf1.zeros_initializer())
            out = tf.matmul(self.x, w)
            self.loss = tf.multiply(tf.reduce_mean(tf.square(out - 1.0)), self.extra, name="loss")
            self.step = tf1.get_variable(
                "global_step",
                initializer=tf.constant(start, tf.int64),
                trainable=False,
                collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
            )
            # Hooks expect the step from before the increment. Elsewhere it is a matter of scheduling, here it is sure.
            with tf.control_dependencies([training_util._get_or_create_global_step_read()]):
                self.train = tf1.train.GradientDescentOptimizer(0.01).minimize(self.loss, global_step=self.step)
            self.summary = tf1.summary.scalar("train_loss", self.loss)
        self.fetches = [self.train, self.loss]
        self.feed = {self.x: np.ones([3, 2], np.float32)}


def run_original(program: Program, hooks: list[Any], outcome: list[Any]) -> None:
    with program.graph.as_default():
        try:
            with tf1.train.MonitoredSession(hooks=hooks) as sess:
                for _ in range(STEPS):
                    if sess.should_stop():
                        break
                    outcome.append(plain(sess.run(program.fetches, program.feed)))
        except Exception as error:
            outcome.append(type(error).__name__)


async def run_ours(program: Program, hooks: list[Any], outcome: list[Any]) -> None:
    try:
        async with MonitoredSession(ChiefSessionCreator(graph=program.graph), hooks=hooks) as sess:
            for _ in range(STEPS):
                if sess.should_stop():
                    break
                outcome.append(plain(await sess.run(program.fetches, program.feed)))
    except Exception as error:
        outcome.append(type(error).__name__)


async def stream_ours(program: Program, hooks: list[Any], outcome: list[Any]) -> None:
    try:
        async with MonitoredSession(ChiefSessionCreator(graph=program.graph), hooks=hooks) as sess:
            async for result in sess.steps(program.fetches, program.feed, max_steps=STEPS):
                outcome.append(plain(result))
    except Exception as error:
        outcome.append(type(error).__name__)


class Listener(tf1.train.CheckpointSaverListener):
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def begin(self) -> None:
        self.log.append("listener begin")

    def before_save(self, session: Any, global_step_value: Any) -> None:
        self.log.append(f"before save {global_step_value}")

    def after_save(self, session: Any, global_step_value: Any) -> Any:
        self.log.append(f"after save {global_step_value}")
        return global_step_value >= 5

    def end(self, session: Any, global_step_value: Any) -> None:
        self.log.append(f"listener end {global_step_value}")


class Users(tf1.train.SessionRunHook):
    """A hook as users write them: it adds ops, runs the session, fetches structures, feeds, and stops."""

    def begin(self) -> None:
        self.double = tf.multiply(tf1.get_default_graph().get_tensor_by_name("loss:0"), 2.0, name="double")
        self.runs = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.before = session.run(
            "w:0"
            if not tf1.resource_variables_enabled()
            else self.double.graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES)[0]
        )
        assert not coord.should_stop()

    def before_run(self, run_context: Any) -> Any:
        if self.runs % 2:
            return None
        return tf1.train.SessionRunArgs({"a": [self.double], "b": (self.double, "loss:0")}, {"extra:0": 3.0})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.runs += 1
        self.again = run_context.session.run(self.double, {"x:0": [[1.0, 1.0]]})
        if self.runs == 4:
            run_context.request_stop()

    def end(self, session: Any) -> None:
        self.last = session.run(self.double, {"x:0": [[1.0, 1.0]]})


def checkpoint_saver(program: Program, log: list[Any], directory: Path) -> list[Any]:
    kind = recorded(tf1.train.CheckpointSaverHook, log, program.graph)
    with program.graph.as_default():
        saver = tf1.train.Saver()
    return [kind(str(directory), save_steps=2, saver=saver, listeners=[Listener(log)])]


def summary_saver(program: Program, log: list[Any], directory: Path) -> list[Any]:
    kind = recorded(tf1.train.SummarySaverHook, log, program.graph)
    return [kind(save_steps=2, output_dir=str(directory), summary_op=program.summary)]


def step_counter(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(tf1.train.StepCounterHook, log, program.graph)(every_n_steps=2, output_dir=str(directory))]


def stop_at_last(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(tf1.train.StopAtStepHook, log, program.graph)(last_step=3)]


def stop_at_num(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(tf1.train.StopAtStepHook, log, program.graph)(num_steps=4)]


def nan_fails(program: Program, log: list[Any], directory: Path) -> list[Any]:
    program.feed = {program.x: np.array([[np.nan, 1.0]], np.float32)}
    return [recorded(tf1.train.NanTensorHook, log, program.graph)(program.loss)]


def nan_stops(program: Program, log: list[Any], directory: Path) -> list[Any]:
    program.feed = {program.x: np.array([[np.nan, 1.0]], np.float32)}
    return [recorded(tf1.train.NanTensorHook, log, program.graph)(program.loss, fail_on_nan_loss=False)]


def nan_is_content(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(tf1.train.NanTensorHook, log, program.graph)(program.loss)]


def logging_tensors(program: Program, log: list[Any], directory: Path) -> list[Any]:
    kind = recorded(tf1.train.LoggingTensorHook, log, program.graph)
    return [kind({"loss": program.loss, "extra": program.extra}, every_n_iter=2), kind(["extra:0"], at_end=True)]


def profiler(program: Program, log: list[Any], directory: Path) -> list[Any]:
    with program.graph.as_default():
        return [recorded(tf1.train.ProfilerHook, log, program.graph)(save_steps=2, output_dir=str(directory))]


def final_ops(program: Program, log: list[Any], directory: Path) -> list[Any]:
    kind = recorded(tf1.train.FinalOpsHook, log, program.graph)
    return [kind({"loss": program.loss, "step": program.step}, {program.x: [[2.0, 2.0]]}), kind(program.extra)]


def final_ops_at_the_end_of_the_input(program: Program, log: list[Any], directory: Path) -> list[Any]:
    with program.graph.as_default():
        value = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(0)).get_next()
    return [recorded(tf1.train.FinalOpsHook, log, program.graph)(value)]


def feed_fn(program: Program, log: list[Any], directory: Path) -> list[Any]:
    fed = iter(range(100))
    kind = recorded(tf1.train.FeedFnHook, log, program.graph)
    return [kind(lambda: {program.extra: float(next(fed))})]


def step_waiter(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(tf1.train.GlobalStepWaiterHook, log, program.graph)(wait_until_step=0)]


def users(program: Program, log: list[Any], directory: Path) -> list[Any]:
    return [recorded(Users, log, program.graph)()]


def all_together(program: Program, log: list[Any], directory: Path) -> list[Any]:
    parts = (
        checkpoint_saver,
        summary_saver,
        step_counter,
        nan_is_content,
        logging_tensors,
        profiler,
        feed_fn,
        stop_at_num,
    )
    return [hook for part in parts for hook in part(program, log, directory)]


def files(directory: Path) -> list[str]:
    names = (path.name for path in directory.iterdir()) if directory.exists() else ()
    return sorted({"events" if name.startswith("events.") else name for name in names})


def written(directory: Path) -> list[Any]:
    """What stands in the event files, times aside."""
    found: list[Any] = []
    for file in sorted(directory.glob("events.*")):
        for event in tf1.train.summary_iterator(str(file)):
            what = event.WhichOneof("what")
            tags = sorted(value.tag for value in event.summary.value)
            status = tf1.SessionLog.SessionStatus.Name(event.session_log.status) if what == "session_log" else ""
            values = [v.simple_value for v in event.summary.value if v.tag == "train_loss"]
            found.append([what, event.step, tags, values, status])
    return found


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What TensorFlow's own hooks write into the log."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = tf.get_logger(), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def without_times(lines: list[str], directory: Path) -> list[str]:
    kept = [
        re.sub(r"\(\d+\.\d+ sec\)|sec: [\d.e+]+|0x[0-9a-f]+", "T", line.replace(str(directory), "DIR"))
        for line in lines
    ]
    of_the_session = ("Graph was finalized", "local_init_op")  # what TensorFlow's SessionManager says
    return [line for line in kept if not any(text in line for text in of_the_session)]


@pytest.mark.parametrize(
    "make",
    [
        checkpoint_saver,
        summary_saver,
        step_counter,
        stop_at_last,
        stop_at_num,
        nan_fails,
        nan_stops,
        nan_is_content,
        logging_tensors,
        profiler,
        final_ops,
        final_ops_at_the_end_of_the_input,
        feed_fn,
        step_waiter,
        users,
        all_together,
    ],
)
async def test_the_same_calls_and_values(variables: str, make: Any, tmp_path: Path, told: list[str]) -> None:
    seen: dict[str, Any] = {}
    for way in (run_original, run_ours, stream_ours):
        program, log, outcome = Program(start=2), [], []
        directory = tmp_path / way.__name__
        del told[:]
        hooks = make(program, log, directory)
        if way is run_original:
            run_original(program, hooks, outcome)
        else:
            await way(program, hooks, outcome)
        tf1.summary.FileWriterCache.clear()
        seen[way.__name__] = {
            "told": without_times(told, directory),
            "log": log,
            "outcome": outcome,
            "files": files(directory),
            "events": written(directory),
            "finals": [plain(getattr(hook, "final_ops_values", None)) for hook in hooks],
        }
    original = seen.pop("run_original")
    assert original["log"], "something was recorded"
    assert all(entry["graph"] for entry in original["log"] if isinstance(entry, dict))
    for way, ours in seen.items():
        for part, expected in original.items():
            assert ours[part] == expected, (way, part)


# ------------------------------------------------------------------ hooks that need a real server


async def test_global_step_waiter_waits(counter: Make, server: Any) -> None:
    """A worker's hook waits on the device thread until somebody else has advanced the step."""
    made, other = counter(), counter()
    for one in (made, other):
        with one.graph.as_default():
            hook = tf1.train.GlobalStepWaiterHook(wait_until_step=3)
    async with MonitoredSession(ChiefSessionCreator(master=server.target, graph=other.graph)) as chief:
        creator = ChiefSessionCreator(tf1_scaffold(made.graph), master=server.target, graph=made.graph)
        async with MonitoredSession(creator, hooks=[hook]) as worker:
            waiting = asyncio.ensure_future(worker.run(made.after))
            for _ in range(3):
                await asyncio.sleep(0.02)
                assert not waiting.done()
                await chief.run(other.train)
            assert await waiting == 4


def tf1_scaffold(graph: tf.Graph) -> Any:
    """A scaffold that initialises nothing: the chief has done it."""
    with graph.as_default():
        return tf1.train.Scaffold(init_op=tf.no_op())


def sync_replicas(container: str) -> Any:
    """One replica of one worker, with the token queue of its own."""
    graph = tf.Graph()
    with graph.as_default(), graph.container(container):
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", [], initializer=tf1.zeros_initializer())
        loss = tf.square(w - 1.0)
        optimizer = tf1.train.SyncReplicasOptimizer(
            tf1.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=1, total_num_replicas=1
        )
        train = optimizer.minimize(loss, global_step=step)
        hook = optimizer.make_session_run_hook(is_chief=True)
    return graph, step, w, train, hook


async def test_sync_replicas_on_a_real_server(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chief's queue runner is a thread that the hook starts; tokens and gradients go round as with the original."""
    values: dict[str, list[Any]] = {}
    graph, step, w, train, hook = sync_replicas("original")
    threads = set(threading.enumerate())
    # TensorFlow's session leaves the thread behind, which then fails with an error that nobody catches.
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with graph.as_default():
        creator = tf1.train.ChiefSessionCreator(master=server.target)
        # TensorFlow's waits the whole grace for that thread, at the end.
        with tf1.train.MonitoredSession(creator, hooks=[hook], stop_grace_period_secs=1) as sess:
            for _ in range(5):
                sess.run(train)
            values["original"] = [float(sess.run(w)), int(sess.run(step))]
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
    monkeypatch.undo()
    for way in ("run", "steps"):
        graph, step, w, train, hook = sync_replicas(way)
        creator = ChiefSessionCreator(master=server.target, graph=graph)
        async with MonitoredSession(creator, hooks=[hook], stop_grace_period_secs=1) as ours:
            if way == "run":
                for _ in range(5):
                    await ours.run(train)
            else:
                assert len([r async for r in ours.steps(train, max_steps=5)]) == 5
            values[way] = [float(await ours.run(w)), int(await ours.run(step))]
    assert values["run"] == values["steps"] == values["original"]


async def test_sync_replicas_used_before_minimize() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.train.get_or_create_global_step()
        optimizer = tf1.train.SyncReplicasOptimizer(
            tf1.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=1, total_num_replicas=1
        )
        hook = optimizer.make_session_run_hook(True)
    with pytest.raises(ValueError, match="apply_gradient"):
        async with MonitoredSession(hooks=[hook], graph=graph):
            pass


async def test_f20_a_finished_job_is_the_one_exception(variables: str) -> None:
    """It is asked before the first run, which TensorFlow's class does not do."""
    log: list[Any] = []
    program = Program(start=2)
    hooks = [recorded(tf1.train.StopAtStepHook, log, program.graph)(last_step=2)]
    outcome: list[Any] = []
    await run_ours(program, hooks, outcome)
    assert outcome == []
    assert [entry["call"] for entry in log] == ["begin", "after_create_session", "end"]
