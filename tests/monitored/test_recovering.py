"""Recovery of a monitored session: shared by its callers, cancellable, ended by a stop, honest about what it knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from asupervisor.errors import CheckpointMismatch, RecoveryExhausted, SessionClosed, StepOutcomeUnknown, StopRequested
from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import (
    ChiefSessionCreator,
    MonitoredSession,
    MonitoredTrainingSession,
    SessionCreator,
    WorkerSessionCreator,
)
from asupervisor.recovery import NO_PAUSE, Backoff, RecoveryPolicy

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
quickly = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)
slowly = RecoveryPolicy(backoff=Backoff(3600.0, longest_secs=3600.0, jitter=0.0), origins=ANY)


class Aborts(AsyncSessionRunHook):
    """Loses the session at the runs that `at` says, as TensorFlow's run would."""

    def __init__(self, *at: int, error: type[Exception] = tf.errors.AbortedError) -> None:
        self.at = set(at)
        self.runs = 0
        self.error = error

    def before_run(self, run_context: Any) -> None:
        self.runs += 1
        if self.runs in self.at:
            raise self.error(None, None, "lost")  # type: ignore[call-arg]


async def eventually(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def time_flies(clock: Any) -> AsyncIterator[None]:
    """The clock moves on by itself: half an hour each millisecond."""

    async def move() -> None:
        while True:
            await asyncio.sleep(0.001)
            await clock.advance(1800)

    mover = asyncio.create_task(move())
    yield
    mover.cancel()
    await asyncio.wait([mover])


# ------------------------------------------------------------------ many callers


async def test_concurrent_runs_share_one_recovery(counter: Make, recorder: Make, tmp_path: Path) -> None:
    made, hook, aborts = counter(), recorder(), Aborts(5)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook, aborts], graph=made.graph, recovery=quickly
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        results = await asyncio.gather(*(sess.run(made.after) for _ in range(20)))
        assert sess.recoveries == 1
        assert hook.calls.count("hook.after_create_session") == 2
        assert hook.calls.count("hook.begin") == 1
    assert len(results) == 20


async def test_a_caller_that_is_cancelled_leaves_the_recovery_to_the_others(
    counter: Make, tmp_path: Path, clock: Any
) -> None:
    made, aborts = counter(), Aborts(2)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[aborts], graph=made.graph, recovery=slowly, clock=clock
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        first = asyncio.ensure_future(sess.run(made.after))
        await eventually(lambda: sess.recoveries == 1)
        second = asyncio.ensure_future(sess.run(made.after))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        async with time_flies(clock):
            assert await second == 2
        assert sess.recoveries == 1


async def test_nobody_waits_and_it_goes_on(counter: Make, tmp_path: Path, clock: Any) -> None:
    """Its only caller is cancelled: the next run finds the new session."""
    made, aborts = counter(), Aborts(2)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[aborts], graph=made.graph, recovery=slowly, clock=clock
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        only = asyncio.ensure_future(sess.run(made.after))
        await eventually(lambda: sess.recoveries == 1)
        only.cancel()
        await asyncio.wait([only])
        with pytest.raises(SessionClosed):
            sess.plain  # noqa: B018 (there is none at this moment)
        async with time_flies(clock):
            await eventually(lambda: sess._incarnations.current.usable)
        assert await sess.run(made.after) == 2


# ------------------------------------------------------------------ stops


async def test_a_stop_ends_the_pause(counter: Make, recorder: Make, tmp_path: Path, clock: Any) -> None:
    made, hook = counter(), recorder()
    reached = False
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook, Aborts(2)], graph=made.graph, recovery=slowly, clock=clock
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        run = asyncio.ensure_future(sess.run(made.after))
        await eventually(lambda: sess.recoveries == 1)
        sess.request_stop()
        assert sess.should_stop()
        with pytest.raises(StopRequested):
            await run
        reached = True
        await sess.run(made.after)
    assert reached
    assert sess.outcome == "stopped"
    assert hook.outcomes[0].reason == "stopped"
    assert hook.calls[-1] == "hook.finish"


async def test_a_stop_aborts_the_start_of_the_next_session(counter: Make, recorder: Make, server: Any) -> None:
    """A worker that waits for its chief's model, which does not come."""
    chief_model, made, hook = counter(), counter(), recorder()
    policy = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)
    async with MonitoredSession(ChiefSessionCreator(master=server.target, graph=chief_model.graph)):
        with made.graph.as_default():
            scaffold = tf1.train.Scaffold(ready_op=tf1.py_func(lambda: not_ready, [], tf.string))
        not_ready: Any = np.array([], object)
        creator = WorkerSessionCreator(scaffold, master=server.target, graph=made.graph)
        async with MonitoredSession(creator, hooks=[hook, Aborts(2)], recovery=policy) as worker:
            await worker.run(made.train)
            not_ready = np.array([b"w"], object)
            run = asyncio.ensure_future(worker.run(made.after))
            await eventually(lambda: worker.recoveries == 1)
            await asyncio.sleep(0.05)
            worker.request_stop()
            with pytest.raises(StopRequested):
                await run
    assert hook.calls.count("hook.after_create_session") == 1
    assert hook.outcomes[0].reason == "stopped"


async def test_after_a_stop_nothing_is_recovered(counter: Make, tmp_path: Path) -> None:
    """The error leaves: whoever asked for the stop does not want another session."""
    made = counter()
    with pytest.raises(tf.errors.AbortedError):
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[Aborts(2)], graph=made.graph, recovery=quickly
        ) as sess:
            await sess.run(made.train)
            sess.request_stop()
            await sess.run(made.train)
    assert sess.recoveries == 0
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1"), "and the final save was made"


async def test_a_hooks_stop_survives_a_recovery(counter: Make, recorder: Make, tmp_path: Path) -> None:
    """Item 49: in TensorFlow's it is forgotten when the session is made anew."""
    made, hook = counter(), recorder()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook], graph=made.graph, recovery=quickly
    ) as sess:
        hook.stops = True
        await sess.run(made.train)
        hook.coords[-1].request_stop(tf.errors.AbortedError(None, None, "lost"))

        async def step_fn(step_context: Any) -> Any:
            return await step_context.session.run(made.step)

        assert await sess.run_step_fn(step_fn) == 0, "it was restored from the first save"
        assert sess.recoveries == 1
        assert sess.should_stop()


async def test_leaving_the_block_during_a_recovery(counter: Make, recorder: Make, tmp_path: Path, clock: Any) -> None:
    made, hook = counter(), recorder()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook, Aborts(1)], graph=made.graph, recovery=slowly, clock=clock
    ) as sess:
        run = asyncio.ensure_future(sess.run(made.train))
        await eventually(lambda: sess.recoveries == 1)
    with pytest.raises((StopRequested, SessionClosed)):
        await run
    assert hook.outcomes[0].reason == "finished"


# ------------------------------------------------------------------ what it knows


async def test_a_call_whose_outcome_is_unknown(counter: Make, server: Any) -> None:
    """A worker finds the live model: what failed may have been applied, and is not run again."""
    chief_model, made = counter(), counter()
    policy = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)

    class AfterTheStep(AsyncSessionRunHook):
        armed = False

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if self.armed:
                self.armed = False
                raise tf.errors.UnavailableError(None, None, "the answer was lost")

    hook = AfterTheStep()
    async with (
        MonitoredSession(ChiefSessionCreator(master=server.target, graph=chief_model.graph)) as chief,
        MonitoredSession(
            WorkerSessionCreator(master=server.target, graph=made.graph), hooks=[hook], recovery=policy
        ) as worker,
    ):
        assert await worker.run(made.after) == 1
        hook.armed = True
        with pytest.raises(StepOutcomeUnknown) as raised:
            await worker.run(made.after)
        assert raised.value.now == 2, "it had been applied"
        assert raised.value.before == 0, "the last that the session saw: it counts no steps"
        assert "the global step is 2 now (it was last seen at 0)" in str(raised.value)
        assert isinstance(raised.value.__cause__, tf.errors.UnavailableError)
        assert await worker.run(made.after) == 3, "the session goes on"
        hook.armed = True
        assert await worker.run(made.step) == 3, "what changes nothing is simply run again"
        assert worker.recoveries == 2
        assert await chief.run(chief_model.step) == 3


async def test_like_tensorflow_it_is_run_again_all_the_same(counter: Make, server: Any) -> None:
    chief_model, made = counter(), counter()
    hook = Aborts(2)
    async with (
        MonitoredSession(ChiefSessionCreator(master=server.target, graph=chief_model.graph)),
        MonitoredSession(
            WorkerSessionCreator(master=server.target, graph=made.graph),
            hooks=[hook],
            recovery=RecoveryPolicy.like_tensorflow(),
        ) as worker,
    ):
        assert await worker.run(made.after) == 1
        assert await worker.run(made.after) == 2


async def test_no_call_no_unknown_outcome(counter: Make, recorder: Make, server: Any) -> None:
    """The coordinator told of the loss between two runs: there is no call whose outcome could be unknown."""
    chief_model, made, hook = counter(), counter(), recorder()
    async with (
        MonitoredSession(ChiefSessionCreator(master=server.target, graph=chief_model.graph)),
        MonitoredSession(
            WorkerSessionCreator(master=server.target, graph=made.graph), hooks=[hook], recovery=quickly
        ) as worker,
    ):
        assert await worker.run(made.after) == 1
        hook.coords[0].request_stop(tf.errors.UnavailableError(None, None, "lost"))
        assert await worker.run(made.after) == 2
        assert worker.recoveries == 1


@pytest.mark.parametrize(("on_restart", "recovers"), [("initialises", False), ("restores", True), ("adopts", None)])
async def test_a_creator_says_what_a_restart_finds(counter: Make, on_restart: str, recovers: Any) -> None:
    made = counter()

    class Own(SessionCreator):
        def create_session(self) -> Any:
            session = tf1.Session(graph=made.graph)
            session.run(made.init)
            return session

    with made.graph.as_default():
        made.init = tf1.global_variables_initializer()
    Own.on_restart = on_restart  # type: ignore[assignment]
    async with MonitoredSession(Own(), hooks=[Aborts(2)], graph=made.graph, recovery=quickly) as sess:
        await sess.run(made.train)
        if recovers:
            assert await sess.run(made.after) == 1
        elif recovers is None:
            with pytest.raises(StepOutcomeUnknown):
                await sess.run(made.after)
        else:
            with pytest.raises(tf.errors.AbortedError) as raised:
                await sess.run(made.after)
            assert "allow_reinit" in raised.value.__notes__[0]
            assert await sess.run(made.after) == 2, "the session lives on"


# ------------------------------------------------------------------ it fails itself


async def test_failures_on_the_way_are_recovered_from_within_the_budget(
    counter: Make, tmp_path: Path, aborted: Make
) -> None:
    made, aborts = counter(), Aborts(2)
    starts = 0

    class Unlucky(AsyncSessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            nonlocal starts
            starts += 1
            if 2 <= starts <= 4:
                raise aborted()

    policy = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=4)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[aborts, Unlucky()], graph=made.graph, recovery=policy
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        assert await sess.run(made.after) == 2
        assert sess.recoveries == 4
        assert starts == 5


async def test_a_recovery_that_fails_leaves_its_own_error_and_can_be_tried_again(counter: Make, tmp_path: Path) -> None:
    made, aborts = counter(), Aborts(2)
    fails = False

    class Unlucky(AsyncSessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            if fails:
                raise ValueError("in the start")

    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[aborts, Unlucky()], graph=made.graph, recovery=quickly
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        fails = True
        for _ in range(2):
            with pytest.raises(ValueError, match="in the start"):
                await sess.run(made.after)
        fails = False
        assert await sess.run(made.after) == 2


async def test_exhausted_stays_exhausted(counter: Make, tmp_path: Path, recorder: Make) -> None:
    made, hook = counter(), recorder()
    policy = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=1)
    with pytest.raises(RecoveryExhausted) as raised:
        async with MonitoredTrainingSession(
            checkpoint_dir=tmp_path, hooks=[hook, Aborts(2, 3, 4, 5)], graph=made.graph, recovery=policy
        ) as sess:
            await sess.run(made.train)
            await sess.save()
            await sess.run(made.train)
    assert raised.value.attempts == 1
    assert isinstance(raised.value.__cause__, tf.errors.AbortedError)
    assert hook.outcomes[0].error is raised.value


async def test_a_checkpoint_that_is_gone_is_no_silent_reset(counter: Make, tmp_path: Path) -> None:
    """It was there when it was looked for, and is not when it is restored: the model does not begin anew."""
    made = counter()

    class Gone(AsyncSessionRunHook):
        def before_run(self, run_context: Any) -> None:
            if self.armed:
                self.armed = False
                raise tf.errors.AbortedError(None, None, "lost")

        armed = False

    hook = Gone()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[hook], graph=made.graph, recovery=quickly
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        can_restore = type(sess._incarnations._blueprint.prepared).can_restore
        prepared = sess._incarnations._blueprint.prepared

        def look_and_lose() -> bool:
            found = can_restore(prepared)
            for path in tmp_path.glob("*ckpt*"):
                path.unlink()
            (tmp_path / "checkpoint").unlink()
            return found

        object.__setattr__(
            sess._incarnations, "_blueprint", _with_prepared(sess._incarnations._blueprint, look_and_lose)
        )
        hook.armed = True
        with pytest.raises(RuntimeError, match="would begin anew"):
            await sess.run(made.after)


def _with_prepared(blueprint: Any, can_restore: Callable[[], bool]) -> Any:
    import dataclasses

    class Prepared:
        def __getattr__(self, name: str) -> Any:
            return getattr(blueprint.prepared, name)

        def can_restore(self) -> bool:
            return can_restore()

    return dataclasses.replace(blueprint, prepared=Prepared())


# ------------------------------------------------------------------ around it


async def trained(made: Any, steps: int, **options: Any) -> list[int]:
    """The global step before each run of a training session; the first save is that of the beginning."""
    async with MonitoredTrainingSession(graph=made.graph, **options) as sess:
        return [int(np.ravel(await sess.run(made.after))[0]) - 1 for _ in range(steps)]


async def test_init_from_counts_until_there_is_a_checkpoint(counter: Make, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    await trained(counter(), 3, checkpoint_dir=there)
    before = sorted(path.name for path in there.iterdir())
    for place in (there, there / "model.ckpt-3"):
        made = counter()
        begun = await trained(made, 4, checkpoint_dir=here, init_from=place, hooks=[Aborts(2)], recovery=quickly)
        # What the first save of the session wrote is what its recovery finds.
        first = 3 if place is there else 6
        assert begun == [first, first, first + 1, first + 2]
    assert sorted(path.name for path in there.iterdir()) == before


async def test_a_recovery_does_not_go_back_to_an_explicit_checkpoint(counter: Make, tmp_path: Path) -> None:
    await trained(counter(), 3, checkpoint_dir=tmp_path)
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path,
        checkpoint_filename_with_path=tmp_path / "model.ckpt-0",
        hooks=[Aborts(3)],
        graph=made.graph,
        recovery=quickly,
    ) as sess:
        assert await sess.run(made.after) == 1
        await sess.save()
        assert await sess.run(made.after) == 2
        assert await sess.run(made.after) == 2  # lost, restored at 1, run again
        assert sess.recoveries == 1
    assert await trained(counter(), 1, checkpoint_dir=tmp_path) == [2]


async def test_an_explicit_checkpoint_without_a_directory(counter: Make, tmp_path: Path) -> None:
    """There is nothing newer to go on from: it is restored again."""
    await trained(counter(), 3, checkpoint_dir=tmp_path)
    explicit = tmp_path / "model.ckpt-3"
    begun = await trained(counter(), 3, checkpoint_filename_with_path=explicit, hooks=[Aborts(2)], recovery=quickly)
    assert begun == [3, 3, 4]


async def test_a_checkpoint_of_another_model_in_parts(counter: Make, model: Make, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    await trained(counter(), 3, checkpoint_dir=there)
    made = model()

    async def begin(**options: Any) -> int:
        async with MonitoredTrainingSession(checkpoint_dir=here, graph=made.graph, init_from=there, **options) as sess:
            return int(np.ravel(await sess.run(made.step, {made.x: [[1.0, 1.0]]}))[0])

    with pytest.raises(CheckpointMismatch, match="not in the checkpoint: w"):
        await begin(partial_restore=False)
    assert await begin(partial_restore=True) == 3
    with pytest.raises(ValueError, match="two places"):
        await begin(checkpoint_filename_with_path="model.ckpt-1")


async def test_services_and_feeders_begin_again(model: Make, tmp_path: Path, scalars_of: Make) -> None:
    """Summaries, step counter, checkpoints and queue feeders of the new session work as those of the first."""
    graph = tf.Graph()
    with graph.as_default():
        queue = tf1.FIFOQueue(4, tf.float32, shapes=[()])
        tf1.train.add_queue_runner(tf1.train.QueueRunner(queue, [queue.enqueue(2.0)]))
        step = tf1.train.get_or_create_global_step()
        value = queue.dequeue()
        with tf.control_dependencies([value]):
            train = tf1.assign_add(step, 1)
        tf1.summary.scalar("value", value)
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path,
        hooks=[Aborts(6)],
        graph=graph,
        recovery=quickly,
        save_summaries_steps=2,
        log_step_count_steps=2,
        save_checkpoint_steps=1000,
    ) as sess:
        for _ in range(5):
            await sess.run(train)
        await sess.save()
        for _ in range(5):
            await sess.run(train)
        assert sess.recoveries == 1
        assert sess.status().global_step is not None
        names = {service.name for service in sess.status().services}
        assert {"checkpoints", "summaries", "step_counter"} <= names
    found = scalars_of(tmp_path)
    assert {1, 3, 5} <= set(found["value"])
    assert max(found["value"]) > 6
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-10")
    assert len(list(tmp_path.glob("events.*"))) == 1, "one event file for all sessions"


async def test_a_pause_outlives_a_recovery(counter: Make, tmp_path: Path) -> None:
    made = counter()
    async with MonitoredTrainingSession(
        checkpoint_dir=tmp_path, hooks=[Aborts(2)], graph=made.graph, recovery=quickly
    ) as sess:
        await sess.run(made.train)
        await sess.save()
        sess.pause()
        held = asyncio.ensure_future(sess.run(made.after))
        await eventually(lambda: sess.plain.statistics().held == 1)
        sess._incarnations.current.coordinator.request_stop(tf.errors.AbortedError(None, None, "lost"))
        assert await sess.run(made.step) == 1
        assert not held.done()
        sess.resume()
        assert await held == 2, "it was not run on the session that was given up"


async def test_the_events_of_a_recovery(counter: Make, listening: Make, tmp_path: Path) -> None:
    made = counter()
    sess = MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[Aborts(2)], graph=made.graph, recovery=quickly)
    async with listening(sess) as events, sess:
        await sess.run(made.train)
        await sess.save()
        await sess.run(made.train)
        status = sess.status()
        assert status.restarts == 1
        assert status.state == "running"
    by_kind = {event.kind: event for event in events}
    recovering, recovered = by_kind["session.recovering"], by_kind["session.recovered"]
    assert recovering.level == recovered.level == "warning"
    assert "recovered: the model was restored, at step 1" in recovered.message
    assert "AbortedError" in recovering.data["error"]
    assert recovering.data["restarts"] == recovered.data["restarts"] == 1
    assert recovered.data["restored"] is True
    assert recovered.data["step"] == 1
    assert by_kind["session.outcome"].data["restarts"] == 1
    journal = (tmp_path / "journal.jsonl").read_text()
    assert "session.recovered" in journal
    assert sess.status().restarts == 1
    assert sess.status().state == "stopped"


async def test_the_original_manners_can_be_had_one_by_one() -> None:
    """A limit on restarts does not make the original's behaviour another one."""
    import dataclasses

    policy = dataclasses.replace(RecoveryPolicy.like_tensorflow(), max_restarts=3)
    assert policy.original
    assert policy.allow_reinit
