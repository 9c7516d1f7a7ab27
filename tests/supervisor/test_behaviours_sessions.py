"""BEHAVIOURS.md, section 4 (sessions and errors) and items 13 to 17, 23 and 27: what TensorFlow's Supervisor does."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import SessionManager, Supervisor

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


def lines(tmp_path: Path) -> str:
    """A text file with three lines."""
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree\n")
    return str(file)


def read_epochs(file: str, epochs: int) -> tuple[tf.Graph, Any]:
    """One queue: file names. What is read: one line at a time."""
    graph = tf.Graph()
    with graph.as_default():
        names = tf1.train.string_input_producer([file], num_epochs=epochs)
        _, record = tf1.TextLineReader().read(names)
    return graph, record


def read_shuffled(file: str, epochs: int) -> tuple[tf.Graph, Any]:
    """Two queues, one behind the other."""
    graph, record = read_epochs(file, epochs)
    with graph.as_default():
        batch = tf1.train.shuffle_batch([record], 1, capacity=10, min_after_dequeue=4)
    return graph, batch


# ------------------------------------------------------------------ section 4, sessions and errors


async def test_s4_basics(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        op = tf.constant([1.0, 2.0, 3.0])
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    sess = await sv.prepare_or_wait_for_session("")
    for _ in range(10):
        assert (await sess.run(op)).tolist() == [1.0, 2.0, 3.0]
    await sess.close()
    await sv.stop()
    assert sv.should_stop()


async def test_s4_stop_comes_before_close_just_as_well(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    sess = await sv.prepare_or_wait_for_session()
    await sv.stop()
    assert await sess.run(made.train) == 1, "stop() does not close the session"
    await sess.close()


async def test_s4_managed_session(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        op = tf.constant([1.0, 2.0, 3.0])
    sv = Supervisor(graph=graph, logdir=str(tmp_path))
    async with sv.managed_session("") as sess:
        for _ in range(10):
            await sess.run(op)
        assert not sv.should_stop()
    assert sv.should_stop()


async def test_s4_managed_session_user_error(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    error = RuntimeError("failing here")
    last = 0
    with pytest.raises(RuntimeError, match="failing here") as raised:
        async with sv.managed_session() as sess:
            for last in range(10):
                await sess.run(made.train)
                if last == 1:
                    raise error
    assert raised.value is error
    assert sv.should_stop()
    assert last == 1
    assert sess.closed


async def test_s4_managed_session_ignores_out_of_range(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    last = 0
    async with sv.managed_session():
        for last in range(10):
            if last == 3:
                raise tf.errors.OutOfRangeError(None, None, "the data is over")
    assert last == 3
    assert sv.should_stop()


async def test_s4_end_of_input_with_one_queue(tmp_path: Path) -> None:
    graph, record = read_epochs(lines(tmp_path), 3)
    sv = Supervisor(graph=graph, logdir=str(tmp_path / "log"))
    seen = []
    async with sv.managed_session() as sess:
        while not sv.should_stop():
            seen.append(await sess.run(record))
    assert seen == [b"one", b"two", b"three"] * 3


async def test_s4_end_of_input_with_two_queues(tmp_path: Path) -> None:
    graph, batch = read_shuffled(lines(tmp_path), 3)
    sv = Supervisor(graph=graph, logdir=str(tmp_path / "log"))
    seen = []
    async with sv.managed_session() as sess:
        while not sv.should_stop():
            seen += list(await sess.run(batch))
    assert sorted(seen) == sorted([b"one", b"two", b"three"] * 3)


async def test_s4_main_error_with_two_queues(tmp_path: Path) -> None:
    graph, batch = read_shuffled(lines(tmp_path), 1000)
    sv = Supervisor(graph=graph, logdir=str(tmp_path / "log"), stop_grace_secs=30)
    loop = asyncio.get_running_loop()
    with pytest.raises(RuntimeError, match="fail at step 3") as raised:
        async with sv.managed_session() as sess:
            for step in range(9):
                if step == 3:
                    failed_at = loop.time()
                    raise RuntimeError("fail at step 3")
                await sess.run(batch)
    assert loop.time() - failed_at < 10, "the feeders are freed at once, without waiting for the grace"
    assert not hasattr(raised.value, "__notes__"), "no secondary error"


async def test_s4_session_config() -> None:
    graph = tf.Graph()
    with graph.as_default(), tf.device("/cpu:1"):
        op = tf.constant([1.0, 2.0, 3.0])
    sv = Supervisor(graph=graph)
    config = tf1.ConfigProto(device_count={"CPU": 2})
    async with sv.managed_session("", config=config) as sess:
        assert (await sess.run(op)).tolist() == [1.0, 2.0, 3.0]
        names = await sess.call(lambda raw: [device.name for device in raw.list_devices()])
        assert any(name.endswith("CPU:1") for name in names), "the config reached the session"


async def test_s4_use_session_manager(counter: Callable[..., Any]) -> None:
    """A session manager that is passed in follows its own rules: no ready check, no local init; init_op is ours."""
    made = counter(5)
    with made.graph.as_default():
        local = tf1.get_variable("l", initializer=1.0, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        manager = SessionManager(graph=made.graph)
    sv = Supervisor(graph=made.graph, session_manager=manager)
    assert sv.session_manager is manager
    async with sv.managed_session() as sess:
        assert await sess.run(made.step) == 5, "initialised by the supervisor's init_op"
        with pytest.raises(tf.errors.FailedPreconditionError):
            await sess.run(local)


@pytest.mark.parametrize("is_chief", [True, False])
async def test_s4_prepare_session_after_stop(is_chief: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        op = tf.constant(7)
    sv = Supervisor(graph=graph, is_chief=is_chief)
    for _ in range(2):
        sess = await sv.prepare_or_wait_for_session()
        assert not sv.should_stop()
        assert await sess.run(op) == 7
        await sess.close()
        await sv.stop()
        assert sv.should_stop()


async def test_s4_a_stopped_but_open_session_must_be_closed_before_the_next() -> None:
    """Stricter than the original, which leaks the first session here: one active session at a time."""
    sv = Supervisor(graph=tf.Graph())
    sess = await sv.prepare_or_wait_for_session()
    await sv.stop()
    with pytest.raises(RuntimeError, match="already has an active session"):
        await sv.prepare_or_wait_for_session()
    await sess.close()
    sess = await sv.prepare_or_wait_for_session()
    assert not sv.should_stop()
    await sess.close()


# ------------------------------------------------------------------ items 13 to 17


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
async def test_13_what_is_no_exception_stops_and_passes_unchanged(
    kind: type[BaseException], counter: Callable[..., Any]
) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = kind("now")
    ended = asyncio.Event()

    async def service() -> None:
        try:
            await sv.wait_for_stop()
        finally:
            ended.set()

    caught: BaseException | None = None
    try:
        async with sv.managed_session() as sess:
            sv.start_soon(service)
            await sess.run(made.train)
            raise error
    except BaseException as same:
        caught = same
    assert caught is error
    assert sv.should_stop()
    assert ended.is_set()
    assert sess.closed
    assert sv.coord.error is None, "it was not reported as an error"


async def test_14_stop_iteration_of_the_body_is_an_error(counter: Callable[..., Any]) -> None:
    """TensorFlow lets it leave as StopIteration; a coroutine cannot, so it leaves as the RuntimeError around it.

    In the `async with` statement itself it is still the same object.
    """
    made = counter()
    sv = Supervisor(graph=made.graph)
    error = StopIteration("not clean")
    seen: list[BaseException] = []

    async def train() -> None:
        try:
            async with sv.managed_session():
                raise error
        except StopIteration as same:
            seen.append(same)
            raise

    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await train()
    assert seen == [error]
    assert raised.value.__cause__ is error


async def test_15_the_first_error_leaves(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    first, second = ValueError("service"), KeyError("body")

    async def fail() -> None:
        raise first

    with pytest.raises(ValueError, match="service") as raised:
        async with sv.managed_session():
            sv.start_soon(fail)
            await sv.wait_for_stop()
            raise second
    assert raised.value is first
    assert "KeyError('body')" in "".join(first.__notes__), "where the original has it as __context__ only"
    assert first.__context__ is None, "its history is its own"


async def test_15_an_error_of_the_body_after_a_clean_report_is_not_lost(counter: Callable[..., Any]) -> None:
    """TensorFlow raises nothing at all here (F18)."""
    made = counter()
    sv = Supervisor(graph=made.graph)
    with pytest.raises(KeyError, match="body"):
        async with sv.managed_session():
            sv.request_stop(tf.errors.OutOfRangeError(None, None, "the data is over"))
            raise KeyError("body")


async def test_15_an_error_of_the_body_after_a_requested_stop_is_not_lost(counter: Callable[..., Any]) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph)
    with pytest.raises(KeyError, match="body"):
        async with sv.managed_session():
            sv.request_stop()
            raise KeyError("body")


class Recording:
    """A FileWriter that notes the order of what happens to it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def add_summary(self, *args: Any, **kwargs: Any) -> None: ...
    def add_graph(self, *args: Any, **kwargs: Any) -> None: ...
    def add_meta_graph(self, *args: Any, **kwargs: Any) -> None: ...
    def reopen(self) -> None: ...

    def add_session_log(self, log: Any, *args: Any, **kwargs: Any) -> None:
        if log.status == tf1.SessionLog.STOP:
            self.log.append("STOP")

    def close(self) -> None:
        self.log.append("writer closed")


async def test_16_order_of_the_exit(counter: Callable[..., Any]) -> None:
    """Stop requested, services joined, session closed, STOP record, writer closed.

    In TensorFlow the writer is closed before the session; here after it, so that nothing that still runs there finds
    a closed writer.
    """
    made = counter()
    log: list[str] = []
    sv = Supervisor(graph=made.graph, summary_writer=Recording(log))

    async def service() -> None:
        await sv.wait_for_stop()
        log.append("told")
        assert await sess.run(made.train) == 1, "the session is still open"
        log.append("service ended")

    async with sv.managed_session() as sess:
        sv.start_soon(service)
        await asyncio.sleep(0)
        log.append("body ended")
    assert log == ["body ended", "told", "service ended", "STOP", "writer closed"]
    assert sess.closed


async def test_16_each_step_of_the_exit_is_made_whatever_fails(
    counter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counter()
    log: list[str] = []

    class Failing(Recording):
        def add_session_log(self, *args: Any, **kwargs: Any) -> None:
            log.append("STOP failed")
            raise OSError("disk")

        def close(self) -> None:
            super().close()
            raise OSError("disk")

    sv = Supervisor(graph=made.graph, summary_writer=Failing(log))
    with pytest.raises(ValueError, match="service"):
        async with sv.managed_session() as sess:

            async def fail() -> None:
                raise ValueError("service")

            sv.start_soon(fail)
            monkeypatch.setattr(sess.raw, "close", _raise)
    assert log == ["STOP failed", "writer closed"]
    assert sess.closed
    monkeypatch.undo()
    sess.raw.close()


def _raise() -> None:
    raise RuntimeError("close failed")


async def test_17_an_error_of_the_start_leaves_as_itself() -> None:
    """TensorFlow's generator says "generator didn't yield" or the like where it goes wrong; nothing hides it here."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", [2])
    error = LookupError("no such weights")

    def init_fn(sess: Any) -> None:
        raise error

    sv = Supervisor(graph=graph, init_op=None, init_fn=init_fn)
    with pytest.raises(LookupError) as raised:
        async with sv.managed_session():
            pytest.fail("must not be entered")
    assert raised.value is error
    assert any(frame.name == "init_fn" for frame in traceback.extract_tb(error.__traceback__))
    assert error.__context__ is None


async def test_17_out_of_range_during_the_start_is_no_clean_end() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.get_variable("v", [2])

    def init_fn(sess: Any) -> None:
        raise tf.errors.OutOfRangeError(None, None, "truncated weights")

    sv = Supervisor(graph=graph, init_op=None, init_fn=init_fn)
    with pytest.raises(tf.errors.OutOfRangeError, match="truncated weights"):
        async with sv.managed_session():
            pytest.fail("must not be entered")


# ------------------------------------------------------------------ items 23 and 27


async def test_23_prepare_clears_the_stop_the_error_and_the_join(counter: Callable[..., Any], tmp_path: Path) -> None:
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    with pytest.raises(ValueError, match="first run"):
        async with sv.managed_session():
            raise ValueError("first run")
    assert sv.should_stop()
    assert sv.coord.joined
    sess = await sv.prepare_or_wait_for_session()
    assert not sv.should_stop()
    assert not sv.coord.joined
    await sess.close()
    await sv.stop()  # raises nothing: the error belongs to the first run
    assert len(list(tmp_path.glob("events.out*"))) == 2, "the writer was closed, so it was opened again: a new file"


async def test_27_retry_on_aborted_with_a_new_managed_session(
    counter: Callable[..., Any], tmp_path: Path, variables: str
) -> None:
    """The retry loop of the reference, as `basic_train_loop` has it: only AbortedError is retried."""
    made = counter()
    sv = Supervisor(graph=made.graph, logdir=str(tmp_path))
    starts: list[int] = []

    async def train() -> None:
        async with sv.managed_session() as sess:
            starts.append(int(await sess.run(made.step)))
            for _ in range(3):
                await sess.run(made.train)
            if len(starts) < 3:
                raise tf.errors.AbortedError(None, None, "preempted")

    while True:
        try:
            await train()
        except tf.errors.AbortedError:
            continue
        break
    assert starts == [0, 3, 6], "each one goes on where the last one ended"
