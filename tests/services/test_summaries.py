"""Summaries: computed from the very step, never at its cost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.summaries import SummaryService
from asupervisor.session.session import AsyncSession
from asupervisor.testing.clock import ManualClock

pytestmark = pytest.mark.modes
tf1 = tf.compat.v1


class Writer:
    """Takes the place of the event file: what was added, parsed."""

    def __init__(self) -> None:
        self.added: list[tuple[int | None, dict[str, Any]]] = []

    def add_summary(self, summary: bytes, step: int | None) -> bool:
        proto = tf1.Summary.FromString(summary)
        values = {value.tag: getattr(value, value.WhichOneof("value")) for value in proto.value}
        assert len(values) == len(proto.value)
        self.added.append((step, values))
        return True

    @property
    def last(self) -> dict[str, Any]:
        return self.added[-1][1]

    @property
    def steps(self) -> list[int | None]:
        return [step for step, _ in self.added]


class Rig:
    """A session with a summary service, without a supervisor."""

    def __init__(self, graph: tf.Graph, clock: ManualClock) -> None:
        self.graph = graph
        self.clock = clock
        self.writer = Writer()
        self.events: list[SimpleNamespace] = []
        self.coordinator = Coordinator()
        self.step = None
        with graph.as_default():
            self.step = tf1.train.get_global_step()
        self.raw = tf1.Session(graph=graph)
        self.executor = DeviceExecutor()
        self.session = AsyncSession(
            self.raw, self.executor, coordinator=self.coordinator, global_step=self.step, emit=self.emit
        )
        self.run = self.session.run

    def emit(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append(SimpleNamespace(kind=kind, message=message, level=level, data=data))

    def of(self, kind: str) -> list[SimpleNamespace]:
        return [event for event in self.events if event.kind == kind]

    @contextlib.asynccontextmanager
    async def serving(self, summary_op: Any, secs: float | None = 10, **kwargs: Any) -> AsyncIterator[SummaryService]:
        service = SummaryService(
            self.session,
            self.writer,  # type: ignore[arg-type]
            summary_op,
            global_step=self.step,
            save_summaries_secs=secs,
            coordinator=self.coordinator,
            clock=self.clock,
            emit=self.emit,
            **kwargs,
        )
        task = asyncio.create_task(service.run())
        try:
            if secs:
                await self.clock.sleepers(1)  # the first tick is over
            else:
                await asyncio.sleep(0)
                await self.idle()
            yield service
        finally:
            self.coordinator.request_stop()
            await asyncio.wait_for(task, 20)

    async def tick(self, secs: float = 10) -> None:
        await self.clock.advance(secs)
        await self.clock.sleepers(1)

    async def idle(self) -> None:
        await self.session.call(lambda raw: None)


@pytest.fixture
async def make_rig(clock: ManualClock) -> AsyncIterator[Callable[[tf.Graph], Any]]:
    rigs: list[Rig] = []
    init: list[Any] = []

    async def make(graph: tf.Graph) -> Rig:
        if not graph.finalized:
            with graph.as_default():
                init[:] = [tf1.global_variables_initializer(), tf1.local_variables_initializer()]
            graph.finalize()  # whatever the service does must work on a finalised graph
        rig = Rig(graph, clock)
        rigs.append(rig)
        await rig.run(init)
        return rig

    yield make
    for rig in rigs:
        await rig.session.close()
        assert await rig.executor.aclose(20)


def fed_model(graph: tf.Graph) -> SimpleNamespace:
    """Trained on fed numbers x: each step adds a half to w."""
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [None], name="inputs")
        w = tf1.get_variable("weight", initializer=1.0)
        step = tf1.train.get_or_create_global_step()
        loss = tf.reduce_mean(x * w, name="mean_loss")
        train = tf.group(tf1.assign_add(w, 0.5), tf1.assign_add(step, 1), name="train")
        prediction = tf.identity(x * w)
    return SimpleNamespace(x=x, w=w, step=step, loss=loss, train=train, prediction=prediction)


# ------------------------------------------------------------------------------------- riding


async def test_f12_the_summary_is_of_the_step_that_carries_it(graph: tf.Graph, make_rig: Any, variables: str) -> None:
    """TensorFlow's Supervisor fails here with "You must feed a value for placeholder tensor 'x'"."""
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.merge([tf1.summary.scalar("loss", model.loss), tf1.summary.scalar("w", model.w)])
    rig = await make_rig(graph)
    async with rig.serving(summary) as service:
        assert rig.writer.added == []  # nothing to ride on yet
        results = [await rig.run([model.train, model.loss], {model.x: [float(n)]}) for n in range(3, 6)]
        assert rig.writer.steps == [1]  # the first step carried it, and the number is the one after it
        assert rig.writer.last["loss"] in (3.0, 4.5)  # of that batch, before or after the concurrent update of w
        assert rig.writer.last["loss"] == results[0][1]  # the very value that the step computed
        assert rig.writer.last["w"] == 1.5  # the state after the step
        await rig.tick()
        await rig.run(model.train, {model.x: [7.0]})
        await rig.run(model.train, {model.x: [8.0]})
        assert rig.writer.steps == [1, 4]
        assert service.recorded == 2 and service.last_step == 4 and service.failures == 0


async def test_the_first_training_run_is_carried(graph: tf.Graph, make_rig: Any) -> None:
    """The first tick comes at once, and before whatever the body does next."""
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    for _ in range(20):
        rig = await make_rig(graph)
        task = asyncio.create_task(
            SummaryService(
                rig.session,
                rig.writer,
                summary,
                global_step=model.step,
                coordinator=rig.coordinator,
                clock=rig.clock,
                emit=rig.emit,
            ).run()
        )
        await asyncio.sleep(0)  # the service's first step, which the host grants before the body goes on
        await rig.run(model.train, {model.x: [1.0]})
        assert rig.writer.steps == [1]
        rig.coordinator.request_stop()
        await task


async def test_f12_only_training_runs_carry(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(model.prediction, {model.x: [1.0]})  # a prediction
        await rig.run(model.loss, {model.x: [1.0]})  # an evaluation
        await rig.run(model.step)
        assert rig.writer.added == []
        await rig.run(model.train, {model.x: [2.0]})
        assert rig.writer.steps == [1]


async def test_without_a_global_step_what_writes_a_variable_carries(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [])
        w = tf1.get_variable("weight", initializer=1.0)
        train = tf1.assign_add(w, x)
        product = x * w
        summary = tf1.summary.scalar("x", x)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(product, {x: 3.0})
        assert rig.writer.added == []
        await rig.run(train, {x: 4.0})
        assert rig.writer.added == [(None, {"x": 4.0})]


def queue_model(graph: tf.Graph) -> SimpleNamespace:
    with graph.as_default():
        queue = tf1.FIFOQueue(1000, [tf.int64], shapes=[()])
        element = tf1.placeholder(tf.int64, [], name="element")
        enqueue = queue.enqueue(element)
        batch = queue.dequeue(name="take")
        other_batch = queue.dequeue(name="take_elsewhere")
        step = tf1.train.get_or_create_global_step()
        total = tf1.get_variable("sum", initializer=np.int64(0), dtype=tf.int64)
        train = tf.group(tf1.assign_add(total, batch), tf1.assign_add(step, 1), name="train")
        other_train = tf.group(tf1.assign_add(total, other_batch), tf1.assign_add(step, 1), name="other_train")
    return SimpleNamespace(
        queue=queue, element=element, enqueue=enqueue, batch=batch, train=train, other_train=other_train, total=total
    )


async def test_f12_no_batch_is_eaten(graph: tf.Graph, make_rig: Any, variables: str) -> None:
    """TensorFlow's Supervisor takes 6 of 30 batches for its summaries."""
    model = queue_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("batch", tf.cast(model.batch, tf.float32))
    rig = await make_rig(graph)
    seen = []
    async with rig.serving(summary):
        for number in range(30):
            await rig.run(model.enqueue, {model.element: number})
        for _ in range(30):
            seen.append((await rig.run([model.train, model.batch]))[1])
            await rig.tick()
    assert seen == list(range(30))
    assert [(step, values["batch"]) for step, values in rig.writer.added] == [(n + 1, float(n)) for n in range(30)]


async def test_f12_a_run_that_takes_from_another_place_is_refused(graph: tf.Graph, make_rig: Any) -> None:
    """Both ops take from the same queue: riding on the other one would take an element of its own."""
    model = queue_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("batch", tf.cast(model.batch, tf.float32))
    rig = await make_rig(graph)
    async with rig.serving(summary):
        for number in range(5):
            await rig.run(model.enqueue, {model.element: number})
        for _ in range(2):
            await rig.run(model.other_train)
        assert rig.writer.added == []
        for _ in range(3):
            await rig.tick()
        (event,) = rig.of("summary.no_carrier")
        assert "'take'" in event.message and "batch away" in event.message
        await rig.run(model.train)
        assert rig.writer.added == [(3, {"batch": 2.0})]


async def test_f12_iterators(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        iterator = tf1.data.make_initializable_iterator(tf1.data.Dataset.range(10))
        batch = iterator.get_next()
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf.identity(batch)]):
            train = tf1.assign_add(step, 1)
        summary = tf1.summary.scalar("batch", tf.cast(batch, tf.float32))
    rig = await make_rig(graph)
    await rig.run(iterator.initializer)
    async with rig.serving(summary):
        seen = []
        for _ in range(5):
            seen.append((await rig.run([train, batch]))[1])
            await rig.tick()
    assert seen == [0, 1, 2, 3, 4]
    assert [values["batch"] for _, values in rig.writer.added] == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_f12_nobody_feeds_it(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        validation = tf1.placeholder(tf.float32, [], name="validation_loss")
        summary = tf1.summary.merge(
            [tf1.summary.scalar("loss", model.loss), tf1.summary.scalar("validation", validation)]
        )
    rig = await make_rig(graph)
    async with rig.serving(summary) as service:
        for _ in range(6):
            await rig.run(model.train, {model.x: [1.0]})
            await rig.tick()
        (event,) = rig.of("summary.no_carrier")  # once, not at every tick
        assert "'validation_loss:0'" in event.message
        assert event.level == "warning"
        assert service.failures == 0 and rig.writer.added == []
        await rig.run(model.train, {model.x: [1.0], validation: 5.0})
        assert rig.writer.added == [(7, {"loss": pytest.approx(rig.writer.last["loss"]), "validation": 5.0})]
        for _ in range(4):
            await rig.tick()
        assert len(rig.of("summary.no_carrier")) == 2  # a new drought is a new event
        assert "there was none" in rig.of("summary.no_carrier")[1].message


async def test_no_complaint_while_training_is_paused(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        rig.session.pause()
        for _ in range(6):
            await rig.tick()
        assert rig.of("summary.no_carrier") == []
        rig.session.resume()


async def test_a_fed_intermediate_tensor_counts_as_given(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(model.train, {model.loss: 42.0})
        assert rig.writer.added == [(1, {"loss": 42.0})]


async def test_the_fed_tensor_itself_is_summarised(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.histogram("x", model.x)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(model.train, {model.x: [1.0, 2.0, 4.0]})
        assert rig.writer.last["x"].sum == 7.0


async def test_a_default_of_a_placeholder_is_the_step_s(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        rate = tf1.placeholder_with_default(tf.constant(0.5), [], name="learning_rate")
        summary = tf1.summary.scalar("rate", rate)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        assert rig.writer.added == []  # not by itself: a step may feed it
        await rig.run(model.train, {model.x: [1.0], rate: 0.25})
        await rig.tick()
        await rig.run(model.train, {model.x: [1.0]})
        assert [values["rate"] for _, values in rig.writer.added] == [0.25, 0.5]


async def test_streams_carry_too(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        feeds = [{model.x: [float(n)]} for n in range(10)]
        losses = [loss async for _, loss in rig.session.steps([model.train, model.loss], feeds)]
    assert rig.writer.added == [(1, {"loss": losses[0]})]


# ------------------------------------------------------------------------------------- failures


@pytest.fixture
def nan_model(graph: tf.Graph) -> SimpleNamespace:
    model = fed_model(graph)
    with graph.as_default():
        weights = tf1.get_variable("weights", initializer=[float("nan"), 1.0])
        bad, worse = tf1.summary.histogram("bad", model.x), tf1.summary.histogram("worse", weights)
        model.bad = tf1.summary.merge([tf1.summary.merge([tf1.summary.scalar("loss", model.loss), bad]), worse])
    return model


async def test_f13_a_nan_histogram_loses_neither_the_step_nor_its_results(
    graph: tf.Graph, nan_model: SimpleNamespace, make_rig: Any
) -> None:
    """TensorFlow's Supervisor ends the training with InvalidArgumentError."""
    rig = await make_rig(graph)
    async with rig.serving(nan_model.bad) as service:
        _, loss, x = await rig.run([nan_model.train, nan_model.loss, nan_model.x], {nan_model.x: [1.0, np.nan]})
        assert np.isnan(loss) and x[0] == 1.0
        assert await rig.run(nan_model.step) == 1
        assert not rig.coordinator.should_stop()
        (event,) = rig.of("summary.failed")
        assert event.data["summaries"] == ["bad:0", "worse:0"]
        assert (event.data["step"], event.data["failures"], event.level) == (1, 1, "warning")
        assert "bad:0, worse:0" in event.message and "\n" not in event.message
        assert "Nan" in event.data["error"]
        # The others are not lost with it.
        assert rig.writer.steps == [1] and set(rig.writer.last) == {"loss"}
        await rig.tick()
        await rig.run(nan_model.train, {nan_model.x: [3.0]})
        assert service.failures == 2
        assert rig.of("summary.failed")[1].data["summaries"] == ["worse:0"]
        assert set(rig.writer.last) == {"loss", "bad"}


async def test_f13_a_failing_summary_can_be_made_fatal(
    graph: tf.Graph, nan_model: SimpleNamespace, make_rig: Any
) -> None:
    rig = await make_rig(graph)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Nan"):
        async with rig.serving(nan_model.bad, fatal=True):
            await rig.run(nan_model.train, {nan_model.x: [3.0]})
            assert rig.coordinator.should_stop()
            assert isinstance(rig.coordinator.error, tf.errors.InvalidArgumentError)
    assert await rig.run(nan_model.step) == 1


async def test_duplicate_tags_fail_only_when_merged(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        same = [tf.raw_ops.ScalarSummary(tags="same", values=model.loss) for _ in range(2)]
        merged = tf1.summary.merge([*same, tf1.summary.scalar("w", model.w)])
    rig = await make_rig(graph)
    rig.writer.add_summary = lambda summary, step: rig.writer.added.append((step, summary))  # type: ignore
    async with rig.serving(merged) as service:
        await rig.run(model.train, {model.x: [3.0]})
        assert service.failures == 1
        assert "Duplicate tag" in rig.of("summary.failed")[0].message
        assert [v.tag for v in tf1.Summary.FromString(rig.writer.added[0][1]).value] == ["same", "same", "w"]


async def test_a_failed_step_carries_nothing_and_is_not_spoilt_again(graph: tf.Graph, make_rig: Any) -> None:
    """What is fetched along can fail, and the step with it: then the next steps are without it for a while."""
    model = fed_model(graph)
    with graph.as_default():
        checked = tf.debugging.check_numerics(model.x, "summary input")
        summary = tf1.summary.scalar("checked", tf.reduce_mean(checked))
    rig = await make_rig(graph)
    async with rig.serving(summary):
        with pytest.raises(tf.errors.InvalidArgumentError):
            await rig.run(model.train, {model.x: [np.nan]})
        await rig.run(model.train, {model.x: [np.nan]})  # the same step, without the rider
        assert len(rig.of("summary.carrier_failed")) == 1
        await rig.tick()
        await rig.run(model.train, {model.x: [2.0]})
        assert rig.writer.last == {"checked": 2.0}


# ------------------------------------------------------------------------------------- by itself


async def test_what_needs_nothing_of_a_step_runs_by_itself(graph: tf.Graph, make_rig: Any, variables: str) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.merge([tf1.summary.scalar("w", model.w), tf1.summary.histogram("h", model.w * 2)])
    rig = await make_rig(graph)
    async with rig.serving(summary):
        assert rig.writer.added[0][1]["w"] == 1.0  # at once, without any step
        assert rig.writer.steps == [0]
        await rig.run(model.train, {model.x: [3.0]})
        assert rig.writer.steps == [0]
        await rig.tick()
        assert rig.writer.steps == [0, 1]
        assert rig.writer.last["w"] == 1.5


async def test_f12_what_trains_does_not_run_by_itself(graph: tf.Graph, make_rig: Any, variables: str) -> None:
    """The whole training set is a constant, so nothing is missing: run by itself, the summary would be a step."""
    with graph.as_default():
        w = tf1.get_variable("weight", initializer=1.0)
        step = tf1.train.get_or_create_global_step()
        train = tf.group(tf1.assign_add(w, 1.0), tf1.assign_add(step, 1))
        tag, constant = tf.constant("constant"), tf.constant(3.0)
        with tf.control_dependencies([train]):
            summary = tf1.summary.scalar("w", tf.identity(w))
            held_back = tf.raw_ops.ScalarSummary(tags=tag, values=constant, name="constant")
        merged = tf1.summary.merge([summary, held_back])
    rig = await make_rig(graph)
    async with rig.serving(merged):
        for _ in range(3):
            await rig.tick()
        assert await rig.run(step) == 0
        await rig.run(train)
        assert rig.writer.steps == [1]
        assert await rig.run(step) == 1  # and not twice
        assert rig.writer.last["constant"] == 3.0
        (event,) = rig.of("summary.not_separable")
        assert event.data["summaries"] == [held_back.name]


async def test_f12_another_train_op_is_not_run_along(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("weight", initializer=1.0)
        first = tf.group(tf1.assign_add(step, 1, name="first"), tf1.assign_add(w, 1.0))
        second = tf1.assign_add(step, 1, name="second")
        with tf.control_dependencies([second]):
            summary = tf1.summary.scalar("w", tf.identity(w))
    rig = await make_rig(graph)
    async with rig.serving(summary):
        for _ in range(4):
            await rig.run(first)
            await rig.tick()
        assert await rig.run(step) == 4
        assert "another one" in rig.of("summary.no_carrier")[0].message


async def test_random_numbers_are_those_of_the_step(graph: tf.Graph, make_rig: Any) -> None:
    """Drawn by itself, a summary would change which numbers the training gets: not the same run any more."""
    with graph.as_default():
        tf1.set_random_seed(1)
        noise = tf1.random_uniform([], seed=7)
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("weight", initializer=0.0)
        train = tf.group(tf1.assign_add(step, 1), tf1.assign(w, noise))
        summary = tf1.summary.scalar("noise", noise)
    rig = await make_rig(graph)
    drawn = []
    async with rig.serving(summary):
        for _ in range(5):
            drawn.append((await rig.run([train, noise]))[1])
            await rig.tick()
    assert [values["noise"] for _, values in rig.writer.added] == drawn
    plain = await make_rig(graph)
    assert [(await plain.run([train, noise]))[1] for _ in range(5)] == drawn


async def test_random_numbers_without_any_training(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        summary = tf1.summary.histogram("noise", tf1.random_normal([10]))
    rig = await make_rig(graph)
    async with rig.serving(summary):
        assert rig.writer.added == []
        await rig.tick()
        assert len(rig.writer.added) == 1
        assert rig.of("summary.no_carrier") == []


# ------------------------------------------------------------------------------------- all kinds


async def test_all_kinds_of_summaries(graph: tf.Graph, make_rig: Any, variables: str) -> None:
    model = fed_model(graph)
    with graph.as_default():
        words = tf.strings.as_string(tf.cast(model.x, tf.int32))
        inner = tf1.summary.merge(
            [
                tf1.summary.scalar("loss", model.loss),
                tf1.summary.histogram("x", model.x),
                tf1.summary.image("image", tf.reshape(model.x, [1, 2, 2, 1])),
                tf1.summary.audio("audio", tf.reshape(model.x, [1, 4]), 8000.0),
                tf1.summary.tensor_summary("tensor", model.x),
                tf1.summary.text("words", words),
            ]
        )
        merged = tf1.summary.merge(
            [
                tf1.summary.merge([inner, tf1.summary.scalar("w", model.w)]),
                tf1.summary.scalar("constant", 3.0),
                tf.identity(tf1.summary.scalar("flag", tf.cast(tf.reduce_any(model.x > 1), tf.float32))),
                tf1.summary.scalar("half", tf.cast(model.loss, tf.float16)),
                tf1.summary.scalar("int", tf.size(model.x)),
                tf1.summary.scalar("brain", tf.cast(model.loss, tf.bfloat16)),
                tf1.summary.histogram("empty", model.x[:0]),
            ]
        )
    rig = await make_rig(graph)
    async with rig.serving(merged) as service:
        x = [1.0, 2.0, 3.0, 4.0]
        expected = tf1.Summary.FromString(rig.raw.run(merged, {model.x: x}))
        wanted = {value.tag: value for value in expected.value}
        await rig.run(model.train, {model.x: x})
        assert service.failures == 0, rig.events
        assert rig.of("summary.not_separable") == []
        assert set(rig.writer.last) == set(wanted)
        for tag, value in rig.writer.last.items():
            if tag not in ("loss", "half", "brain", "w"):  # these follow w, which the step changes
                assert value == getattr(wanted[tag], wanted[tag].WhichOneof("value")), tag
        assert list(tf.make_ndarray(rig.writer.last["words"])) == [b"1", b"2", b"3", b"4"]


async def test_memory_of_a_ref_variable_is_that_of_the_step(graph: tf.Graph, make_rig: Any) -> None:
    """A fetched ref variable is the variable's memory, which the next step overwrites."""
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [1000])
        w = tf1.get_variable("weight", [1000], initializer=tf1.zeros_initializer(), use_resource=False)
        step = tf1.train.get_or_create_global_step()
        with tf.control_dependencies([tf1.assign(w, x)]):
            after = tf.identity(w)
        train = tf.group(after, tf1.assign_add(step, 1))
        summary = tf1.summary.histogram("after", after)
    rig = await make_rig(graph)
    async with rig.serving(summary, secs=None, save_summaries_steps=1):
        feeds = [{x: np.full(1000, n, np.float32)} for n in range(1, 30)]
        async for _ in rig.session.steps(train, feeds):
            pass
    assert rig.writer.steps == list(range(1, 30))
    assert [(v["after"].min, v["after"].max) for _, v in rig.writer.added] == [(n, n) for n in range(1, 30)]


def histogram(values: tf.Tensor) -> tf.Tensor:
    """With the bare tag, whatever the scope."""
    return tf.raw_ops.HistogramSummary(tag="h", values=values)


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("where", ["input", "inside", "nested"])
async def test_conditional_summaries(graph: tf.Graph, make_rig: Any, kind: str, where: str) -> None:
    """A summary behind or within `tf.cond`: it, too, fails after the step and not in it."""
    enabled = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if kind == "v2" else tf1.disable_control_flow_v2)()
    try:
        model = fed_model(graph)
        with graph.as_default():
            mean = tf.reduce_mean(model.x)
            positive = tf.reduce_sum(model.x) > 0
            if where == "input":
                summary = tf1.summary.histogram("h", tf1.cond(positive, lambda: mean * 2, lambda: mean))
            elif where == "inside":
                summary = tf1.cond(positive, lambda: histogram(mean * 2), lambda: tf.constant(b""))
            else:
                summary = tf1.cond(
                    positive,
                    lambda: tf1.cond(mean < 100, lambda: histogram(mean * 2), lambda: tf.constant(b"")),
                    lambda: tf.constant(b""),
                )
            merged = tf1.summary.merge([summary, tf1.summary.scalar("loss", model.loss)])
    finally:
        (tf1.enable_control_flow_v2 if enabled else tf1.disable_control_flow_v2)()
    rig = await make_rig(graph)
    async with rig.serving(merged) as service:
        await rig.run(model.train, {model.x: [1.0, 2.0]})
        assert rig.writer.last["h"].sum == 3.0
        await rig.tick()
        await rig.run(model.train, {model.x: [np.inf, 2.0]})  # an infinite histogram fails
        assert service.failures == (0 if where == "nested" else 1)
        assert await rig.run(model.step) == 2
        assert set(rig.writer.last) == {"loss"}
        await rig.tick()
        await rig.run(model.train, {model.x: [-5.0]})
        assert ("h" in rig.writer.last) == (where == "input")
        assert rig.writer.steps == [1, 2, 3]
        assert rig.of("summary.not_separable") == []


async def test_a_metric_s_update_op_is_carried(graph: tf.Graph, make_rig: Any) -> None:
    """It changes local variables of its own, which no training run does, and only when it is summarised."""
    model = fed_model(graph)
    with graph.as_default():
        _, update = tf1.metrics.mean(model.x)
        summary = tf1.summary.scalar("running", update)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(model.train, {model.x: [1.0]})
        await rig.run(model.train, {model.x: [100.0]})
        await rig.tick()
        await rig.run(model.train, {model.x: [3.0]})
        assert [values["running"] for _, values in rig.writer.added] == [1.0, 2.0]


async def test_new_style_summaries(graph: tf.Graph, make_rig: Any, tmp_path: Path) -> None:
    """`tf.summary` writes into a writer of the graph's own; the ops ride like any other."""
    model = fed_model(graph)
    with graph.as_default():
        writer = tf.summary.create_file_writer(str(tmp_path))
        open_writer, flush = writer.init(), writer.flush()
        with writer.as_default():
            written = tf.summary.write("x", model.x, step=tf1.train.get_global_step())
    rig = await make_rig(graph)
    await rig.run(open_writer)
    async with rig.serving(written) as service:
        await rig.run(model.train, {model.x: [5.0]})
        await rig.run(model.train, {model.x: [6.0]})
        await rig.tick()
        await rig.run(model.train, {model.x: [7.0]})
        assert service.failures == 0
    await rig.run(flush)
    (file,) = tmp_path.iterdir()
    events = [event for event in tf1.train.summary_iterator(str(file)) if event.HasField("summary")]
    assert [(e.step, list(tf.make_ndarray(e.summary.value[0].tensor))) for e in events] == [(1, [5.0]), (3, [7.0])]


async def test_a_list_of_summaries(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        several = {"a": tf1.summary.scalar("a", model.loss), "b": [tf1.summary.scalar("b", model.w)]}
    rig = await make_rig(graph)
    async with rig.serving(several):
        await rig.run(model.train, {model.x: [5.0]})
        assert set(rig.writer.last) == {"a", "b"}


async def test_what_cannot_be_fed_is_computed_within_the_step(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        hidden = tf.identity(model.loss)
        graph.prevent_feeding(hidden)
        merged = tf1.summary.merge([tf1.summary.scalar("hidden", hidden), tf1.summary.histogram("x", model.x)])
        graph.prevent_feeding(merged)
    rig = await make_rig(graph)
    async with rig.serving(merged) as service:
        await rig.run(model.train, {model.x: [5.0]})
        assert rig.writer.last["hidden"] in (5.0, 7.5)
        assert rig.of("summary.not_separable")[0].data["summaries"] == ["hidden:0"]
        await rig.tick()
        await rig.run(model.train, {model.x: [np.nan]})  # the histogram was cut off, and only it fails
        assert service.failures == 1
        assert set(rig.writer.last) == {"hidden"}


async def test_the_summary_op_itself_cannot_be_fed(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        with tf.control_dependencies([model.train]):
            summary = tf1.summary.scalar("w", tf.constant(1.0))
        graph.prevent_feeding(summary)
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.run(model.train, {model.x: [5.0]})
        assert rig.writer.added == [(1, {"w": 1.0})]


async def test_an_operation_that_cannot_be_cut_off_is_refused(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    rig = await make_rig(graph)
    with pytest.raises(ValueError, match="'train' cannot ride on a training step"):
        await SummaryService(
            rig.session, rig.writer, model.train, coordinator=rig.coordinator, clock=rig.clock, emit=rig.emit
        ).run()


# ------------------------------------------------------------------------------------- time


async def test_missed_ticks_are_skipped(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        summary = tf1.summary.scalar("c", tf.constant(1.0))
    rig = await make_rig(graph)
    async with rig.serving(summary, secs=10):
        assert len(rig.writer.added) == 1
        assert await rig.clock.sleepers(1) == (10.0,)
        rig.clock.jump(34)  # the machine was asleep
        await asyncio.sleep(0)
        assert await rig.clock.sleepers(1) == (6.0,)  # back on the old boundaries, without a burst
        assert len(rig.writer.added) == 2


async def test_by_steps(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("loss", model.loss)
    rig = await make_rig(graph)
    async with rig.serving(summary, secs=None, save_summaries_steps=3):
        for _ in range(10):
            await rig.run(model.train, {model.x: [1.0]})
            await rig.run(model.loss, {model.x: [1.0]})  # does not count
        assert rig.writer.steps == [1, 4, 7, 10]


async def test_by_steps_and_by_itself(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("w", model.w)
    rig = await make_rig(graph)
    async with rig.serving(summary, secs=None, save_summaries_steps=2):
        for _ in range(5):
            await rig.run(model.train, {model.x: [1.0]})
        assert rig.writer.steps == [0, 2, 4]


async def test_by_steps_without_a_carrier(graph: tf.Graph, make_rig: Any) -> None:
    model = fed_model(graph)
    with graph.as_default():
        missing = tf1.placeholder(tf.float32, [], name="absent")
        summary = tf1.summary.scalar("missing", missing)
    rig = await make_rig(graph)
    async with rig.serving(summary, secs=None, save_summaries_steps=2):
        for _ in range(6):
            await rig.run(model.train, {model.x: [1.0]})
        assert rig.of("summary.no_carrier") == []
        for _ in range(10):
            await rig.run(model.train, {model.x: [1.0]})
        (event,) = rig.of("summary.no_carrier")
        assert "6 training runs" in event.message and "'absent:0'" in event.message


async def test_nothing_happens_when_the_stop_came_first(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        summary = tf1.summary.scalar("c", tf.constant(1.0))
    for kwargs in ({}, {"save_summaries_secs": None, "save_summaries_steps": 1}):
        rig = await make_rig(graph)
        rig.coordinator.request_stop()
        await SummaryService(
            rig.session, rig.writer, summary, coordinator=rig.coordinator, clock=rig.clock, emit=rig.emit, **kwargs
        ).run()
        assert rig.writer.added == []


async def test_the_stop_does_not_wait_for_a_blocked_step(graph: tf.Graph, make_rig: Any) -> None:
    model = queue_model(graph)
    with graph.as_default():
        summary = tf1.summary.scalar("total", tf.cast(model.total, tf.float32))
        close = model.queue.close()
    rig = await make_rig(graph)
    started = threading.Event()
    async with rig.serving(summary):
        step = asyncio.ensure_future(rig.run(model.train))
        blocked = asyncio.ensure_future(rig.session.call(lambda raw: started.set()))
        await rig.clock.advance(10)  # the tick waits behind the step, which waits for ever
        rig.coordinator.request_stop()
    # `serving` has waited for the service: it ended although the step has not
    assert not step.done()
    await rig.run(close)
    with pytest.raises(tf.errors.OutOfRangeError):
        await step
    await blocked


async def test_a_closed_session_ends_the_ticks_quietly(graph: tf.Graph, make_rig: Any) -> None:
    with graph.as_default():
        summary = tf1.summary.scalar("c", tf.constant(1.0))
    rig = await make_rig(graph)
    async with rig.serving(summary):
        await rig.session.close()
        await rig.tick()
    assert len(rig.writer.added) == 1
