"""The ready-made hooks: each does the original's job, and is right where the original is known to be wrong."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import asupervisor
from asupervisor import (
    EarlyStoppingHook,
    EvaluationHook,
    FeedScheduleHook,
    LoggingTensorHook,
    MonitoredSession,
    MonitoredTrainingSession,
    NonFiniteError,
    NonFiniteHook,
    StepProfileHook,
    StopAtStepHook,
)
from asupervisor.recovery import RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


async def train(sess: Any, op: Any, feed: Any = None, most: int = 1000) -> int:
    """Train until the stop; how many runs that took."""
    runs = 0
    while not sess.should_stop():
        await sess.run(op, feed)
        runs += 1
        assert runs <= most
    return runs


# ------------------------------------------------------------------ stop at step


def test_s6_stop_at_step_arguments() -> None:
    with pytest.raises(ValueError, match="One of num_steps or last_step"):
        StopAtStepHook()
    with pytest.raises(ValueError, match="Only one of num_steps or last_step"):
        StopAtStepHook(num_steps=1, last_step=2)


async def test_s6_stop_at_step_needs_a_global_step() -> None:
    with pytest.raises(RuntimeError, match="Global step should be created to use StopAtStepHook"):
        async with MonitoredSession(hooks=[StopAtStepHook(last_step=1)], graph=tf.Graph()):
            pass


@pytest.mark.parametrize(
    ("arguments", "start", "by", "runs"),
    [
        ({"last_step": 10}, 0, 1, 10),
        ({"last_step": 10}, 9, 1, 1),
        ({"last_step": 10}, 10, 1, 0),
        ({"last_step": 10}, 11, 1, 0),
        ({"num_steps": 10}, 5, 1, 10),
        ({"num_steps": 0}, 5, 1, 0),
        ({"last_step": 10}, 5, 10, 1),
        ({"last_step": 10}, 0, 4, 3),
        ({"num_steps": 10}, 5, 3, 4),
        ({"last_step": 3}, 0, 100, 1),
    ],
)
async def test_s6_stop_at_step(counter: Make, arguments: Any, start: int, by: int, runs: int) -> None:
    made = counter(start=start, by=by)
    hook = StopAtStepHook(**arguments)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        assert await train(sess, made.train) == runs
    again = counter(start=start, by=by)
    async with MonitoredSession(hooks=[hook], graph=again.graph) as sess:
        assert [r async for r in sess.steps(again.after)] == [start + by * n for n in range(1, runs + 1)], "used again"


async def test_stop_at_step_keeps_its_target_over_recoveries(
    counter: Make, raiser: Make, aborted: Make, tmp_path: Path
) -> None:
    made, hook = counter(), StopAtStepHook(num_steps=5)
    failing = raiser("before_run", aborted(), at=4)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook, failing], graph=made.graph, recovery=RecoveryPolicy.like_tensorflow()
    ) as sess:
        await sess.run(made.train)
        await sess.run(made.train)
        await sess.save()
        await train(sess, made.train)
        assert sess.recoveries == 1
        assert await sess.plain.run(made.step) == 5
    assert hook.target == 5


# ------------------------------------------------------------------ early stopping


def test_early_stopping_arguments() -> None:
    for wrong in ({"patience": 0}, {"patience": 1, "min_delta": -1.0}, {"patience": 1, "mode": "less"}):
        with pytest.raises(ValueError, match="must"):
            EarlyStoppingHook("loss:0", **wrong)  # type: ignore[arg-type]


def scripted() -> Any:
    """A graph that fetches what it is fed, and counts."""
    graph = tf.Graph()
    with graph.as_default():
        value = tf1.placeholder(tf.float32, [], name="value")
        scalar = tf.identity(value, name="scalar")
        step = tf1.train.get_or_create_global_step()
        train = tf1.assign_add(step, 1)
    return graph, value, scalar, train


@pytest.mark.parametrize(
    ("values", "arguments", "runs", "best", "best_step_at_most"),
    [
        ([3, 2, 1, 1, 1], {"patience": 2}, 5, 1, 3),
        ([3, 2, 2.5, 1, 4, 4], {"patience": 2}, 6, 1, 4),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5, 3, 3),
        ([3, 2.95, 2.91, 2.88], {"patience": 2, "min_delta": 0.1}, 3, 3, 1),
        ([math.nan, math.nan, 1], {"patience": 2}, 2, None, None),
        ([math.inf, 5, 6, 7], {"patience": 2}, 4, 5, 2),
    ],
)
async def test_early_stopping(
    variables: str, values: list[float], arguments: Any, runs: int, best: Any, best_step_at_most: Any
) -> None:
    graph, value, scalar, op = scripted()
    for monitor in (scalar, "scalar:0"):
        hook = EarlyStoppingHook(monitor, **arguments)
        async with MonitoredSession(hooks=[hook], graph=graph) as sess:
            feeds = iter(values)
            done = 0
            while not sess.should_stop():
                await sess.run(op, {value: next(feeds)})
                done += 1
        assert done == runs
        assert hook.best == best
        assert hook.best_step is best_step_at_most or hook.best_step <= best_step_at_most


# ------------------------------------------------------------------ non-finite


BAD = {
    "scalar nan": math.nan,
    "scalar inf": math.inf,
    "vector": [1.0, -math.inf],
    "matrix": [[1.0, 2.0], [math.nan, 4.0]],
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
async def test_f07_nonfinite_of_any_shape(name: str, dtype: Any) -> None:
    graph = tf.Graph()
    with graph.as_default():
        value = tf1.placeholder(dtype, None)
        watched = tf.identity(value, name="watched")
    hook = NonFiniteHook(watched)
    feed = np.asarray(BAD[name]).astype(dtype.as_numpy_dtype)
    with pytest.raises(NonFiniteError, match="watched") as raised:
        async with MonitoredSession(hooks=[hook], graph=graph) as sess:
            await sess.run([], {value: np.ones_like(feed)})
            await sess.run([], {value: feed})
    assert isinstance(raised.value, tf1.train.NanLossDuringTrainingError)
    assert raised.value.count == 1
    assert raised.value.tensor == "watched:0"


async def test_f07_nonfinite_in_sparse_values_and_none_elsewhere() -> None:
    graph = tf.Graph()
    with graph.as_default():
        value = tf1.placeholder(tf.float32, [1])
        sparse = tf.SparseTensor([[2]], value, [5])
        slices = tf.IndexedSlices(value, tf.constant([3], tf.int64))
        fine = {"text": tf.constant("inf"), "number": tf.constant(3), "truth": tf.constant(True)}
    async with MonitoredSession(hooks=[NonFiniteHook(fine)], graph=graph) as sess:
        await sess.run([])
    for watched in (sparse, slices):
        with pytest.raises(NonFiniteError):
            async with MonitoredSession(hooks=[NonFiniteHook({"loss": watched})], graph=graph) as sess:
                await sess.run([], {value: [1.0]})
                await sess.run([], {value: [math.inf]})
    with pytest.raises(ValueError, match="no tensor"):
        NonFiniteHook([])


async def test_f07_nonfinite_comes_before_a_save(model: Make, tmp_path: Path) -> None:
    """The step that made it non-finite is never in a checkpoint that restores, by whatever way it is asked to save."""
    made = model()
    hook = NonFiniteHook([made.loss, "w:0"])
    with pytest.raises(NonFiniteError):
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, save_checkpoint_steps=1, hooks=[hook], graph=made.graph
        ) as sess:
            await sess.run(made.train, made.feed)
            await sess.save()
            await sess.run(made.train, {made.x: [[math.inf, 1.0]]})
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path.endswith("model.ckpt-1")
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert np.all(np.isfinite(reader.get_tensor("w")))


async def test_nonfinite_may_just_stop(model: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    async with MonitoredSession(hooks=[NonFiniteHook(made.loss, fail=False)], graph=made.graph) as sess:
        await sess.run(made.train, {made.x: [[math.inf, 1.0]]})
        assert sess.should_stop()
    assert "'loss:0' has 1 NaN or infinite values" in caplog.text
    assert sess.outcome == "stopped"


# ------------------------------------------------------------------ logging


def test_s6_logging_arguments() -> None:
    for wrong in ({"every_n_iter": 0}, {"every_n_iter": -10}):
        with pytest.raises(ValueError, match="nvalid every_n_iter"):
            LoggingTensorHook(["t"], **wrong)
    for wrong in ({"every_n_iter": 5, "every_n_secs": 5.0}, {}):
        with pytest.raises(ValueError, match="xactly one of"):
            LoggingTensorHook(["t"], **wrong)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "asupervisor" and text in r.getMessage()]


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="asupervisor")
    return caplog


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ({"every_n_iter": 10}, [1, 11, 21]),
        ({"every_n_iter": 10, "at_end": True}, [1, 11, 21, 25]),
        ({"at_end": True}, [25]),
        ({"every_n_iter": 1}, list(range(1, 26))),
    ],
)
async def test_s6_logging_by_runs(counter: Make, info: Any, arguments: Any, runs: list[int]) -> None:
    made = counter()
    hook = LoggingTensorHook({"after": made.after}, **arguments)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for _ in range(25):
            await sess.run(made.train)
    told = logged(info, "after = ")
    assert [int(text.split(" = ")[1].split()[0]) for text in told] == runs
    assert "sec)" not in told[0]
    assert all("sec)" in text for text in told[1:])


async def test_s6_logging_first_of_each_session_and_by_time(counter: Make, info: Any) -> None:
    made = counter()
    hook = LoggingTensorHook(["after:0", made.step.name.split(":")[0]], every_n_secs=3600.0)
    for _ in range(2):
        async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
            for _ in range(3):
                await sess.run(made.train)
    told = logged(info, "after:0 = ")
    assert len(told) == 2
    assert "global_step" in told[0]


async def test_s6_logging_formatter(counter: Make, info: Any) -> None:
    made = counter()
    hook = LoggingTensorHook({"a": made.after}, every_n_iter=1, formatter=lambda values: f"qqq={values['a']}")
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train)
    assert logged(info, "qqq=1") == ["qqq=1"]


async def test_logging_at_end_takes_no_input(info: Any) -> None:
    """TensorFlow's runs the tensors once more at the end: a placeholder is missing, a batch is gone."""
    graph = tf.Graph()
    with graph.as_default():
        value = tf1.placeholder(tf.float32, [], name="value")
        seen = tf1.get_variable("seen", initializer=0.0)
        loss = tf1.assign_add(seen, value)
    hook = LoggingTensorHook({"loss": loss}, at_end=True)
    async with MonitoredSession(hooks=[hook], graph=graph) as sess:
        await sess.run([], {value: 2.0})
        await sess.run([], {value: 3.0})
        total = sess.plain
    assert logged(info, "loss = ") == ["loss = 5.0"]
    del total


# ------------------------------------------------------------------ profile


def test_s6_profile_arguments() -> None:
    for wrong in ({"save_steps": 1, "save_secs": 1.0}, {}):
        with pytest.raises(ValueError, match="exactly one"):
            StepProfileHook(**wrong)


async def test_s6_profile_by_steps(model: Make, tmp_path: Path, info: Any) -> None:
    """As TensorFlow's: never in the first run, then every second one."""
    made = model()
    hook = StepProfileHook(save_steps=2, output_dir=tmp_path / "traces")
    counts = []
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for _ in range(5):
            await sess.run(made.train, made.feed)
            counts.append(len(list(tmp_path.glob("traces/timeline-*.json"))))
    assert counts == [0, 1, 1, 2, 2]
    assert hook.step == 4
    assert hook.profile
    assert list(hook.profile.values()) == sorted(hook.profile.values(), reverse=True)
    trace = json.loads((tmp_path / "traces" / "timeline-4.json").read_text())
    assert trace["traceEvents"]
    assert len(logged(info, "profile of step")) == 2


async def test_s6_profile_by_time_not_in_the_first_run(model: Make, tmp_path: Path) -> None:
    made = model()
    hook = StepProfileHook(save_secs=3600.0, output_dir=tmp_path)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for _ in range(3):
            await sess.run(made.train, made.feed)
    assert hook.profile == {}


# ------------------------------------------------------------------ schedule


async def test_schedule_feeds_by_the_step(counter: Make) -> None:
    made = counter(by=2)
    with made.graph.as_default():
        rate = tf1.placeholder(tf.float32, [], name="rate")
        used = tf.identity(rate)
    for placeholder in (rate, "rate:0"):
        hook = FeedScheduleHook(placeholder, lambda step: 100.0 + step)
        async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
            seen = [(await sess.run([used, made.train]))[0] for _ in range(3)]
            assert seen == [100, 102, 104]
            assert await sess.run(used, {rate: 7.0}) == 7, "the caller's own value"
            assert await sess.run(used, {"rate:0": 8.0}) == 8
            assert [value async for value in sess.steps(used, max_steps=2)] == [106, 106]
            assert hook.value == 106


async def test_schedule_now_and_then(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        rate = tf1.placeholder(tf.float32, [])
        used = tf.identity(rate)
    calls: list[int] = []

    def schedule(step: int) -> float:
        calls.append(step)
        return float(step)

    hook = FeedScheduleHook(rate, schedule, every_n_runs=3)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        seen = [(await sess.run([used, made.train]))[0] for _ in range(7)]
    assert seen == [0, 0, 0, 3, 3, 3, 6]
    assert calls == [0, 3, 6]
    with pytest.raises(ValueError, match="positive"):
        FeedScheduleHook(rate, schedule, every_n_runs=0)


async def test_schedule_goes_on_after_a_restore(counter: Make, tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        made = counter()
        with made.graph.as_default():
            rate = tf1.placeholder(tf.float32, [])
            used = tf.identity(rate)
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[FeedScheduleHook(rate, float)], graph=made.graph
        ) as sess:
            seen += [(await sess.run([used, made.train]))[0] for _ in range(2)]
    assert seen == [0, 1, 2, 3]


# ------------------------------------------------------------------ evaluation


def regression(training: bool) -> Any:
    """The same model twice: what trains it, and what evaluates it on inputs of its own."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [None], name="x")
        w = tf1.get_variable("w", [], initializer=tf1.zeros_initializer())
        b = tf1.get_variable("b", [], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(x * w + b - 1.0))
        step = tf1.train.get_or_create_global_step() if training else None
        train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step) if training else None
    return graph, x, w, loss, train_op


async def test_evaluation_on_a_side_graph(variables: str) -> None:
    graph, x, w, _, train_op = regression(True)
    side, side_x, side_w, side_loss, _ = regression(False)
    told: list[Any] = []
    hook = EvaluationHook(
        side,
        {"loss": side_loss, "w": side_w},
        every_n_steps=3,
        feeds=lambda: ({side_x: [float(n)]} for n in range(3)),
        on_result=lambda step, result: told.append(step),
        at_end=True,
    )
    async with MonitoredSession(hooks=[hook], graph=graph) as sess:
        at = {}
        for step in range(1, 8):
            await sess.run(train_op, {x: [1.0, 2.0]})
            at[step] = await sess.plain.run(w)
        assert await sess.plain.run(tf1.train.get_global_step(graph)) == 7, "evaluations are no steps"
    assert [step for step, _ in hook.results] == told == [3, 6, 7]
    for step, result in hook.results:
        assert result["w"] == pytest.approx(at[step]), "the weights of exactly that step"
    losses = [result["loss"] for _, result in hook.results]
    assert losses == sorted(losses, reverse=True)
    assert hook.latest is hook.results[-1][1]


async def test_evaluation_until_its_input_ends(variables: str) -> None:
    graph, x, _, _, train_op = regression(True)
    side = tf.Graph()
    with side.as_default():
        iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.range(1, 5))
        value = tf.cast(iterator.get_next(), tf.float32)
        w2 = tf1.get_variable("other", [], initializer=tf1.ones_initializer())
        seen = tf1.get_variable("seen", [], initializer=tf1.zeros_initializer(), collections=["local_variables"])
        count = tf1.assign_add(seen, 1.0)
        product = value * w2
    hook = EvaluationHook(
        side, [product, count], 2, init_op=iterator.initializer, variables={"other": "w"}, combine=list
    )
    async with MonitoredSession(hooks=[hook], graph=graph) as sess:
        for _ in range(4):
            await sess.run(train_op, {x: [1.0]})
    for _, batches in hook.results:
        assert [count for _, count in batches] == [1, 2, 3, 4], "local variables begin anew each time"
    (first, second) = ([product for product, _ in batches] for _, batches in hook.results)
    assert first[0] < second[0]
    assert hook.results[0][0] == 2


async def test_evaluation_names_variables_without_a_counterpart(counter: Make) -> None:
    side, *_ = regression(False)
    hook = EvaluationHook(side, [], 1)
    with pytest.raises(ValueError, match="b, w"):
        async with MonitoredSession(hooks=[hook], graph=counter().graph):
            pass
    with pytest.raises(ValueError, match="positive"):
        EvaluationHook(side, [], 0)


async def test_evaluation_of_variables_that_begin_with_one_tensor(variables: str) -> None:
    def build() -> Any:
        graph = tf.Graph()
        with graph.as_default():
            begin = tf.constant(1.0)
            a, b = tf1.get_variable("a", initializer=begin), tf1.get_variable("b", initializer=begin)
            return graph, a, b

    graph, a, b = build()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        train_op = tf.group(tf1.assign(a, 2.0), tf1.assign(b, 3.0), tf1.assign_add(step, 1))
    side, side_a, side_b = build()
    hook = EvaluationHook(side, [side_a, side_b], 1)
    async with MonitoredSession(hooks=[hook], graph=graph) as sess:
        await sess.run(train_op)
    assert hook.results == [(1, [2.0, 3.0])]


async def test_early_stopping_on_an_evaluation(variables: str) -> None:
    graph, x, _, _, train_op = regression(True)
    side, side_x, _, side_loss, _ = regression(False)
    evaluation = EvaluationHook(side, side_loss, 2, feeds=lambda: [{side_x: [1.0]}])
    hooks = [evaluation, EarlyStoppingHook(lambda: evaluation.latest, patience=2, min_delta=1.0)]
    async with MonitoredSession(hooks=hooks, graph=graph) as sess:
        assert await train(sess, train_op, {x: [1.0]}) == 6
    assert hooks[1].best is not None


def test_all_are_at_the_front_door() -> None:
    for name in asupervisor.hooks.__dict__:
        if name.endswith("Hook"):
            assert getattr(asupervisor, name) is getattr(asupervisor.hooks, name)
