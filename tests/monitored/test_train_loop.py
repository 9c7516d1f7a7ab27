"""`train_loop`: BEHAVIOURS.md, section 7 (basic_loops_test) and what recovery means for the Supervisor."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import Supervisor, train_loop
from asupervisor.errors import RecoveryExhausted
from asupervisor.recovery import NO_PAUSE, Backoff, RecoveryPolicy
from asupervisor.runtime import signals

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
quickly = RecoveryPolicy(backoff=NO_PAUSE, origins=ANY)


async def test_s7_basic_train_loop(tmp_path: Path) -> None:
    sv = Supervisor(graph=tf.Graph(), logdir=str(tmp_path))
    calls: list[Any] = []

    async def step(sess: Any, number: int, *, key: str) -> None:
        calls.append((sess, number, key))
        if len(calls) == 3:
            sv.request_stop()

    await train_loop(sv, step, (1,), {"key": "two"})
    assert [(number, key) for _, number, key in calls] == [(1, "two")] * 3
    assert len({id(sess) for sess, *_ in calls}) == 1
    assert sv.should_stop()


async def test_s7_a_plain_function_and_what_it_returns(counter: Make) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    calls = 0

    def step(sess: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            sv.request_stop()
        return sess.run(made.train) if calls % 2 else None

    await train_loop(sv, step)
    assert calls == 5


async def test_s7_exception_aborts(tmp_path: Path) -> None:
    sv = Supervisor(graph=tf.Graph(), logdir=str(tmp_path))
    error = RuntimeError("Failed")
    calls = 0

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error

    with pytest.raises(RuntimeError) as raised:
        await train_loop(sv, step)
    assert raised.value is error
    assert calls == 3


@pytest.mark.parametrize("policy", [None, RecoveryPolicy.like_tensorflow()], ids=["default", "like_tensorflow"])
async def test_s7_retry_on_aborted(tmp_path: Path, policy: Any) -> None:
    """A whole new managed session; the coordinator is cleared."""
    sv = Supervisor(graph=tf.Graph(), logdir=str(tmp_path))
    sessions: list[Any] = []

    async def step(sess: Any) -> None:
        sessions.append(sess)
        if len(sessions) == 2:
            raise tf.errors.AbortedError(None, None, "mock")
        if len(sessions) == 4:
            sv.request_stop()

    if policy is None:
        policy = RecoveryPolicy(backoff=Backoff(0.01), origins=ANY)
    await train_loop(sv, step, recovery=policy)
    assert len(sessions) == 4
    assert sessions[0] is sessions[1]
    assert sessions[1] is not sessions[2]
    assert sessions[2] is sessions[3]


async def test_s7_only_what_the_policy_says_is_recovered_from(tmp_path: Path) -> None:
    for error in (tf.errors.UnavailableError(None, None, ""), tf.errors.UnknownError(None, None, "")):
        sv = Supervisor(graph=tf.Graph(), logdir=str(tmp_path / type(error).__name__))
        calls = 0

        async def step(sess: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise error  # noqa: B023
            sv.request_stop()  # noqa: B023

        if isinstance(error, tf.errors.UnavailableError):
            await train_loop(sv, step, recovery=quickly)
            assert calls == 2
        else:
            with pytest.raises(tf.errors.UnknownError):
                await train_loop(sv, step, recovery=quickly)


async def test_a_loss_in_a_task_group_is_recovered_from(counter: Make, tmp_path: Path) -> None:
    """Its error is a group then, and older Pythons leave the group's own cancellation with our task."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    calls = 0

    async def lost(sess: Any) -> None:
        await sess.run(made.train)
        raise tf.errors.AbortedError(None, None, "lost")

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            async with asyncio.TaskGroup() as group:
                group.create_task(lost(sess))
        await sess.run(made.train)
        sv.request_stop()

    await train_loop(sv, step, recovery=quickly)
    assert calls == 3
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-3")


async def test_it_goes_on_from_what_was_saved(counter: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each restart begins with the state that the last session has saved at its end: no step is lost."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    seen: list[int] = []

    async def step(sess: Any) -> None:
        seen.append(int(await sess.run(made.after)))
        if len(seen) in (3, 5):
            raise tf.errors.AbortedError(None, None, "lost")
        if len(seen) == 8:
            sv.request_stop()

    await train_loop(sv, step, recovery=quickly)
    told = [record.getMessage() for record in caplog.records if "recovered: " in record.getMessage()]
    assert [message.partition("recovered: ")[2] for message in told] == [
        "the model was restored, at step 3 (the last step that a service had seen was 3)",
        "the model was restored, at step 5 (the last step that a service had seen was 5)",
    ]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-8")


async def test_f23_without_a_save_it_does_not_begin_anew(counter: Make) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = tf.errors.AbortedError(None, None, "lost")

    async def step(sess: Any) -> None:
        await sess.run(made.train)
        raise error

    with pytest.raises(tf.errors.AbortedError) as raised:
        await train_loop(sv, step, recovery=quickly)
    assert raised.value is error
    assert any("allow_reinit" in note for note in raised.value.__notes__)


async def test_f23_it_is_bounded(counter: Make, tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    calls = 0

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        raise tf.errors.AbortedError(None, None, "again")

    with pytest.raises(RecoveryExhausted) as raised:
        await train_loop(sv, step, recovery=RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=3))
    assert calls == 4
    assert raised.value.attempts == 3


async def test_errors_of_services_are_recovered_from(counter: Make, tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    calls = 0

    async def fails() -> None:
        raise tf.errors.UnavailableError(None, None, "a service lost its peer")

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            sv.start_soon(fails)
            await asyncio.sleep(0.01)
        elif calls > 1:
            sv.request_stop()

    await train_loop(sv, step, recovery=RecoveryPolicy(backoff=NO_PAUSE))
    assert calls == 2


@pytest.mark.parametrize("when", ["before the error", "in the pause"])
async def test_a_requested_stop_is_heeded(counter: Make, tmp_path: Path, when: str) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    calls = 0

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        if when == "before the error":
            sv.request_stop()
        else:
            asyncio.get_running_loop().call_later(0.3, sv.request_stop)
        raise tf.errors.AbortedError(None, None, "lost")

    policy = RecoveryPolicy(backoff=Backoff(60.0), origins=ANY)
    async with asyncio.timeout(30):
        if when == "before the error":
            with pytest.raises(tf.errors.AbortedError):
                await train_loop(sv, step, recovery=policy)
        else:
            await train_loop(sv, step, recovery=policy)
    assert calls == 1
    assert sv.should_stop()


async def test_after_a_stop_a_loss_at_the_end_takes_no_further_step(counter: Make, tmp_path: Path) -> None:
    """The training has ended; the next session is there for what was lost: the waits of the end, and the save."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    calls = 0

    async def lost_at_the_end() -> None:
        await sv.wait_for_stop()
        raise tf.errors.AbortedError(None, None, "lost")

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        sv.start_soon(lost_at_the_end)
        await sess.run(made.train)
        sv.request_stop()

    await train_loop(sv, step, recovery=RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=3))
    assert calls == 1
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1")


@pytest.mark.parametrize("saved", [True, False])
async def test_an_end_of_the_data_has_ended_the_training(counter: Make, tmp_path: Path, saved: bool) -> None:
    """A loss after it does not begin it again; and it is no clean end where the last steps are lost with it."""
    made = counter()
    with made.graph.as_default():
        saver = LosesTheLastSave(saved)
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), saver=saver, save_model_secs=0, save_model_steps=1000)
    calls = 0

    async def lost_at_the_end() -> None:
        await sv.wait_for_stop()
        saver.at_the_end = True
        if saved:
            raise tf.errors.AbortedError(None, None, "lost")

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        await sv.save()
        await sess.run(made.train)
        sv.start_soon(lost_at_the_end)
        raise tf.errors.OutOfRangeError(None, None, "end of data")

    training = train_loop(sv, step, recovery=RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=3))
    if saved:
        await training
    else:
        with pytest.raises(tf.errors.AbortedError, match="in the last save") as raised:
            await training
        assert "Start it again to train them" in raised.value.__notes__[-1]
    assert calls == 1
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1" if saved else "-0")


class LosesTheLastSave(tf1.train.Saver):  # type: ignore[misc]
    def __init__(self, saves: bool) -> None:
        super().__init__(allow_empty=True)
        self.saves = saves
        self.at_the_end = False

    def save(self, *args: Any, **kwargs: Any) -> Any:
        if self.at_the_end and not self.saves:
            raise tf.errors.AbortedError(None, None, "lost in the last save")
        return super().save(*args, **kwargs)


@pytest.mark.parametrize("ends", ["by the loss", "after the stop"])
@pytest.mark.parametrize("how", ["by a call", "by the coordinator", "by an end of data", "by stop()", "by a signal"])
async def test_a_stop_beside_a_loss_is_heeded(counter: Make, tmp_path: Path, how: str, ends: str) -> None:
    """The coordinator stops because of the loss then. The step ends by it, so that the session is closed already."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path), handle_signals=True)
    calls = 0
    numbers: list[int] = []
    asked = asyncio.Event()

    async def loses() -> None:
        raise tf.errors.AbortedError(None, None, "lost")

    async def asks() -> None:
        await sv.wait_for_stop()
        asked.set()
        if how == "by a call":
            sv.request_stop()
        elif how == "by the coordinator":
            sv.coord.request_stop()
        elif how == "by an end of data":
            sv.request_stop(tf.errors.OutOfRangeError(None, None, "end of data"))
        elif how == "by stop()":
            await sv.stop()
        else:
            signal.raise_signal(signal.SIGTERM)

    async def step(sess: Any) -> None:
        nonlocal calls
        calls += 1
        sv.start_soon(asks)
        if ends == "by the loss":
            raise tf.errors.AbortedError(None, None, "lost")
        sv.start_soon(loses)
        await asked.wait()

    signals.subscribe(numbers.append)  # so that the signal does not end this process, as `cluster.run` sees to
    try:
        with pytest.raises(tf.errors.AbortedError, match="lost"):
            await train_loop(sv, step, recovery=RecoveryPolicy(backoff=NO_PAUSE, origins=ANY, max_restarts=3))
    finally:
        signals.unsubscribe(numbers.append, resend=False)
    assert calls == 1
    assert sv.signalled == bool(numbers) == (how == "by a signal")


async def test_cancellation(counter: Make, tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    entered = asyncio.Event()

    async def step(sess: Any) -> None:
        await sess.run(made.train)
        entered.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(train_loop(sv, step))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-1")


async def test_wrong_functions(counter: Make) -> None:
    sv = Supervisor(graph=counter().graph)
    for function, args in ((7, None), (lambda: None, None), (lambda sess: None, (1,))):
        with pytest.raises(TypeError):
            await train_loop(sv, function, args)  # type: ignore[arg-type]
