"""SessionManager: what TensorFlow's own tests check, and what has to be better here."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import pickle
import socket
import threading
import uuid

import numpy as np
import pytest
import tensorflow as tf

from asupervisor import _tf, errors
from asupervisor.clock import SystemClock
from asupervisor.errors import SessionClosed, SessionNotReady, StopRequested, UnknownMaster
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.manager import SessionManager
from asupervisor.session.opening import Opening
from asupervisor.session.readiness import maybe_name, uninitialised_in
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import LAST_POLL_SECS, LOOK_SECS, SILENT_SECS, Polls

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes


class HastyClock:
    """Pauses between two looks pass at once; alarms (which are longer) never ring."""

    def __init__(self):
        self.now = 1000.0
        self.pauses = []

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    async def sleep(self, secs):
        if secs > LAST_POLL_SECS:
            await asyncio.get_running_loop().create_future()
        self.pauses.append(secs)
        self.now += secs
        await asyncio.sleep(0)


class Events:
    """An event sink that remembers."""

    def __init__(self):
        self.all = []

    def __call__(self, kind, message, *, level="info", **data):
        self.all.append((kind, message, level, data))

    def of(self, kind):
        return [(message, level, data) for k, message, level, data in self.all if k == kind]


@pytest.fixture
def hasty():
    return HastyClock()


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def raw_sessions(monkeypatch):
    """Every raw session that is opened during the test; `open_ones()` are those that nobody closed."""

    class Opened(list):
        def open_ones(self):
            return [raw for raw in self if not raw.was_closed]

    opened = Opened()

    class Recorded(tf1.Session):
        was_closed = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            opened.append(self)

        def close(self):
            super().close()
            self.was_closed = True

    monkeypatch.setattr(tf1, "Session", Recorded)
    return opened


@pytest.fixture
async def use(raw_sessions):
    """`await use(coroutine)` is its session (or its pair with one), which is closed after the test."""
    sessions = []

    async def use(work):
        result = await work
        session = result[0] if isinstance(result, tuple) else result
        assert isinstance(session, AsyncSession)
        sessions.append(session)
        return result

    yield use
    for session in sessions:
        await session.close()
    assert raw_sessions.open_ones() == []


class Model:
    """A global variable v (initial value 1), in a graph of its own."""

    def __init__(self, value=1, name="v"):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.v = tf1.get_variable(name, initializer=value)
            self.read = self.v.read_value()
            self.ready_op = tf1.report_uninitialized_variables()
            self.saver = tf1.train.Saver({name: self.v})

    def manager(self, **kwargs):
        kwargs.setdefault("ready_op", self.ready_op)
        return SessionManager(graph=self.graph, **kwargs)

    def checkpoint(self, directory, value=None):
        """Let TensorFlow alone write a checkpoint of the model."""
        with tf1.Session(graph=self.graph) as raw:
            raw.run(self.v.initializer)
            if value is not None:
                self.v.load(value, raw)
            return self.saver.save(raw, os.path.join(directory, "model.ckpt"), global_step=7)


class LocalModel:
    """A global variable v, and local w := v and x := 3 v, with the ops that supervisors make of them."""

    def __init__(self, value=1, names=("v", "w", "x"), listed=False):
        self.graph = tf.Graph()
        with self.graph.as_default():
            local = [tf1.GraphKeys.LOCAL_VARIABLES]
            self.v = tf1.get_variable(names[0], initializer=value)
            self.w = tf1.get_variable(names[1], initializer=0, trainable=False, collections=local)
            self.x = tf1.get_variable(names[2], initializer=0, trainable=False, collections=local)
            # An explicit read: the initial value of w is what v is then, not what v begins with.
            assign_w, assign_x = self.w.assign(self.v.read_value()), self.x.assign(3 * self.v.read_value())
            self.local_init_op = [assign_w.op, assign_x.op] if listed else tf.group(assign_w, assign_x)
            self.reads = [self.v.read_value(), self.w.read_value(), self.x.read_value()]
            self.initialised = [tf1.is_variable_initialized(variable) for variable in (self.v, self.w, self.x)]
            self.all_ready = tf1.report_uninitialized_variables([self.v, self.w, self.x])
            self.global_ready = tf1.report_uninitialized_variables([self.v])
            self.saver = tf1.train.Saver({names[0]: self.v})


# ---------------------------------------------------------------------------------- prepare_session


async def test_prepare_session_succeeds(use, variables):
    model = Model()
    session = await use(model.manager().prepare_session("", init_op=model.v.initializer))
    assert await session.run(model.read) == 1
    assert session.graph is model.graph


async def test_prepare_session_succeeds_with_init_feed_dict(use, variables):
    graph = tf.Graph()
    with graph.as_default():
        p = tf1.placeholder(tf.float32, shape=())
        v = tf1.get_variable("v", initializer=p)
        ready, read = tf1.report_uninitialized_variables(), v.read_value()
    manager = SessionManager(ready_op=ready, graph=graph)
    session = await use(manager.prepare_session("", init_op=v.initializer, init_feed_dict={p: 2.5}))
    assert await session.run(read) == 2.5


@pytest.mark.parametrize("listed", [False, True])
async def test_prepare_session_takes_a_list_of_init_ops(use, variables, listed):
    model = Model()
    op = [model.v.initializer, [model.v.initializer]] if listed else model.v.initializer
    session = await use(model.manager().prepare_session("", op))
    assert await session.run(model.read) == 1


async def test_prepare_session_succeeds_with_init_fn(use, variables):
    model = Model()
    session = await use(model.manager().prepare_session("", init_fn=lambda raw: raw.run(model.v.initializer)))
    assert await session.run(model.read) == 1


async def test_f24_a_plain_init_fn_runs_on_the_device_thread_with_the_graph_entered(use, variables):
    model = Model()
    executor = DeviceExecutor()
    seen = {}

    def init_fn(raw):
        seen.update(
            raw=raw,
            graph=tf1.get_default_graph(),
            device_thread=executor.on_device_thread(),
            eager=tf.executing_eagerly(),
        )
        raw.run(model.v.initializer)

    before = tf1.get_default_graph()
    try:
        session = await use(model.manager(executor=executor).prepare_session("", init_fn=init_fn))
        assert isinstance(seen["raw"], tf1.Session)
        assert seen["raw"] is session.raw
        assert seen["graph"] is model.graph
        assert seen["device_thread"]
        assert not seen["eager"]
        assert tf1.get_default_graph() is before
        await session.close()
        assert not executor.closed, "a passed executor is never closed"
    finally:
        await executor.aclose(5)


@pytest.mark.parametrize("shape", ["function", "partial", "object", "method"])
async def test_an_async_init_fn_runs_on_the_loop_with_the_async_session(use, variables, shape):
    model = Model()
    seen = []

    async def init_fn(session):
        seen.append((session, asyncio.get_running_loop()))
        await session.run(model.v.initializer)

    class Initialiser:
        async def __call__(self, session):
            await init_fn(session)

        async def init(self, session):
            await init_fn(session)

    async def with_more(more, session):
        await init_fn(session)

    fn = {
        "function": init_fn,
        "partial": functools.partial(with_more, 1),
        "object": Initialiser(),
        "method": Initialiser().init,
    }[shape]
    session = await use(model.manager().prepare_session("", init_fn=fn))
    assert seen == [(session, asyncio.get_running_loop())]
    assert await session.run(model.read) == 1


async def test_init_fn_comes_after_init_op(use, variables):
    model = Model()
    seen = []
    session = await use(
        model.manager().prepare_session("", model.v.initializer, init_fn=lambda raw: seen.append(raw.run(model.read)))
    )
    assert seen == [1]
    assert await session.run(model.read) == 1


async def test_prepare_session_succeeds_with_local_init_feed_dict(use, variables):
    graph = tf.Graph()
    with graph.as_default():
        p = tf1.placeholder(tf.float32, shape=())
        v = tf1.get_variable("v", initializer=p, collections=[tf1.GraphKeys.LOCAL_VARIABLES])
        ready, read = tf1.report_uninitialized_variables([v]), v.read_value()
    manager = SessionManager(local_init_op=v.initializer, ready_op=ready, graph=graph, local_init_feed_dict={p: 4.5})
    session = await use(manager.prepare_session(""))
    assert await session.run(read) == 4.5


async def test_local_init_run_options_reach_the_run(use, variables):
    model = LocalModel()
    # One microsecond is not enough for anything: proof that the options were used.
    options = tf1.RunOptions(timeout_in_ms=1)
    with model.graph.as_default():
        stuck = tf1.FIFOQueue(1, tf.int32).dequeue()
    manager = SessionManager(local_init_op=stuck, graph=model.graph, local_init_run_options=options)
    with pytest.raises(tf.errors.DeadlineExceededError):
        await manager.prepare_session("", model.v.initializer)


@pytest.mark.parametrize("listed", [False, True])
async def test_prepare_session_with_ready_for_local_init_op(use, variables, listed):
    model = LocalModel(listed=listed)
    manager = SessionManager(
        local_init_op=model.local_init_op,
        ready_op=model.all_ready,
        ready_for_local_init_op=model.global_ready,
        graph=model.graph,
    )
    session = await use(manager.prepare_session("", init_op=model.v.initializer))
    assert await session.run(model.initialised) == [True, True, True]
    assert await session.run(model.reads) == [1, 1, 3]


async def test_prepare_session_with_partial_init_op(use, variables):
    # No ready_op: no check. The initial values of local variables are computed from those of the globals.
    graph = tf.Graph()
    with graph.as_default():
        local = [tf1.GraphKeys.LOCAL_VARIABLES]
        v = tf1.get_variable("v", initializer=1)
        w = tf1.Variable(v.initial_value, trainable=False, collections=local, name="w")
        x = tf1.Variable(3 * v.initial_value, trainable=False, collections=local, name="x")
        initialised = [tf1.is_variable_initialized(variable) for variable in (v, w, x)]
        reads = [w.read_value(), x.read_value()]
    manager = SessionManager(local_init_op=[w.initializer, x.initializer], graph=graph)
    session = await use(manager.prepare_session("", init_op=None))
    assert await session.run(initialised) == [False, True, True]
    assert await session.run(reads) == [1, 3]


async def test_prepare_session_with_cyclic_initializer(use, variables):
    graph = tf.Graph()
    with graph.as_default():
        i = tf1.while_loop(lambda i: i < 1, lambda i: i + 1, [0])
        v = tf1.get_variable("v", initializer=tf.identity(i), use_resource=variables == "resource")
        ready, read = tf1.report_uninitialized_variables(), v.read_value()
    session = await use(SessionManager(ready_op=ready, graph=graph).prepare_session("", v.initializer))
    assert await session.run(read) == 1


@pytest.mark.parametrize("listed", [False, True])
async def test_prepare_session_did_not_init_local_variable(variables, raw_sessions, listed):
    model = LocalModel()
    manager = SessionManager(ready_op=model.all_ready, graph=model.graph)
    init_op = [model.v.initializer] if listed else model.v.initializer
    with pytest.raises(RuntimeError, match="Init operations did not make model ready") as caught:
        await manager.prepare_session("", init_op=init_op)
    text = str(caught.value)
    assert "error: Variables not initialized: w, x" in text
    assert ("<no name for <class 'list'>>" if listed else model.v.initializer.name) in text
    assert raw_sessions.open_ones() == []


async def test_prepare_session_with_ready_not_ready_for_local(variables, raw_sessions):
    model = LocalModel()
    manager = SessionManager(
        local_init_op=model.local_init_op,
        ready_op=model.all_ready,
        ready_for_local_init_op=model.global_ready,
        graph=model.graph,
    )
    with pytest.raises(RuntimeError, match="Init operations did not make model ready for local_init") as caught:
        await manager.prepare_session("", init_op=None)
    assert "Variables not initialized: v" in str(caught.value)
    assert raw_sessions.open_ones() == []


async def test_prepare_session_with_insufficient_ready_for_local_init_check(variables, raw_sessions):
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1)
        w = tf1.Variable(v.initial_value, trainable=False, collections=[tf1.GraphKeys.LOCAL_VARIABLES], name="w")
        ready = tf1.report_uninitialized_variables([v, w])
    manager = SessionManager(local_init_op=w.initializer, ready_op=ready, graph=graph)
    with pytest.raises(RuntimeError, match=r"did not make model ready\.") as caught:
        await manager.prepare_session("", init_op=None)
    assert "Variables not initialized: v" in str(caught.value)
    assert raw_sessions.open_ones() == []


async def test_prepare_session_fails_then_restores(use, variables, tmp_path, hasty):
    model = Model()
    there, away = tmp_path / "there", tmp_path / "away"
    there.mkdir()
    away.mkdir()
    path = model.checkpoint(str(there), value=5)
    manager = model.manager(clock=hasty)
    with pytest.raises(RuntimeError, match="no init_op or init_fn or local_init_op was given"):
        await manager.prepare_session(
            "",
            init_op=None,
            saver=model.saver,
            checkpoint_dir=str(away),
            wait_for_checkpoint=True,
            max_wait_secs=2,
        )
    # TensorFlow would have slept for one whole recovery_wait_secs, 30 s.
    assert sum(hasty.pauses) == pytest.approx(2)
    assert manager.restored_from is None
    hasty.pauses.clear()
    session = await use(
        manager.prepare_session(
            "",
            init_op=None,
            saver=model.saver,
            checkpoint_dir=str(there),
            wait_for_checkpoint=True,
            max_wait_secs=2,
        )
    )
    assert hasty.pauses == []
    assert manager.restored_from == path
    assert await session.run(model.read) == 5


async def test_nothing_to_initialise_with_is_told_before_a_session_is_opened(variables, raw_sessions):
    model = Model()
    with pytest.raises(RuntimeError, match="no init_op or init_fn or local_init_op was given"):
        await model.manager().prepare_session("")
    assert raw_sessions == []


# ---------------------------------------------------------------------------------- recover_session


async def test_recover_session(use, variables, tmp_path):
    # What TensorFlow does by itself comes first: it would block the loop later.
    model, by_directory, by_file = Model(), Model(value=2), Model(value=3)
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    path = model.checkpoint(str(full), value=6)
    manager = model.manager()
    session, recovered = await use(manager.recover_session("", model.saver, str(empty)))
    assert not recovered
    assert manager.restored_from is None
    await session.run(model.v.initializer)
    assert await session.run(model.read) == 1
    for again, place in (
        (by_directory, {"checkpoint_dir": str(full)}),
        (by_file, {"checkpoint_filename_with_path": path}),
    ):
        fresh = again.manager()
        session, recovered = await use(fresh.recover_session("", saver=again.saver, **place))
        assert recovered
        assert fresh.restored_from == path
        assert await session.run(again.read) == 6


@pytest.mark.parametrize("method", ["prepare_session", "recover_session"])
@pytest.mark.parametrize("saver", [True, False])
async def test_both_checkpoint_places_are_an_error_before_a_session_is_opened(variables, raw_sessions, method, saver):
    model = Model()
    with pytest.raises(ValueError, match="Can not provide both checkpoint_dir and checkpoint_filename_with_path"):
        await getattr(model.manager(), method)(
            "",
            saver=model.saver if saver else None,
            checkpoint_dir="here",
            checkpoint_filename_with_path="there",
        )
    assert raw_sessions == []


@pytest.mark.parametrize("gate", ["right", "too strict"])
async def test_recover_session_with_ready_for_local_init_op(use, variables, tmp_path, gate, events):
    Model().checkpoint(str(tmp_path))
    model = LocalModel(value=2)
    manager = SessionManager(
        local_init_op=model.local_init_op,
        ready_op=model.all_ready,
        ready_for_local_init_op=model.global_ready if gate == "right" else model.all_ready,
        graph=model.graph,
        emit=events,
    )
    session, recovered = await use(manager.recover_session("", saver=model.saver, checkpoint_dir=str(tmp_path)))
    assert recovered == (gate == "right")
    assert await session.run(model.initialised) == [True, gate == "right", gate == "right"]
    assert await session.run(model.reads[0]) == 1
    if gate == "right":
        assert await session.run(model.reads) == [1, 1, 3], "local init sees restored values"
    else:
        ((message, level, data),) = events.of("session.not_ready")
        assert "did not make the model ready for local init" in message
        assert level == "warning"
        assert data["missing"] == ["w", "x"]


async def test_recover_session_that_leaves_something_uninitialised_says_so(use, variables, tmp_path, events):
    Model().checkpoint(str(tmp_path))
    model = LocalModel(value=2)
    manager = SessionManager(ready_op=model.all_ready, graph=model.graph, emit=events)
    _, recovered = await use(manager.recover_session("", model.saver, str(tmp_path)))
    assert not recovered
    ((message, _, data),) = events.of("session.not_ready")
    assert "did not make the model ready:" in message
    assert data["missing"] == ["w", "x"]


async def test_recover_session_without_checkpoint_still_runs_local_init_op(use, variables):
    model = LocalModel()
    with model.graph.as_default():
        local_init = model.w.initializer
    manager = SessionManager(local_init_op=local_init, ready_op=model.all_ready, graph=model.graph)
    session, recovered = await use(manager.recover_session("", saver=None, checkpoint_dir=None))
    assert not recovered
    assert await session.run(model.initialised) == [False, True, False]


async def test_recover_session_from_empty_directory_still_runs_local_init_op(use, variables, tmp_path, hasty):
    model = LocalModel()
    manager = SessionManager(
        local_init_op=model.w.initializer, ready_op=model.all_ready, graph=model.graph, clock=hasty
    )
    session, recovered = await use(manager.recover_session("", model.saver, str(tmp_path), wait_for_checkpoint=False))
    assert not recovered
    assert hasty.pauses == []
    assert await session.run(model.initialised) == [False, True, False]


async def test_f22_a_checkpoint_that_comes_is_found_soon(use, variables, tmp_path):
    # TensorFlow looks again after a whole recovery_wait_secs, 30 s.
    model = Model()

    class Clock(HastyClock):
        async def sleep(self, secs):
            await super().sleep(secs)
            if len(self.pauses) == 12:
                await asyncio.to_thread(model.checkpoint, str(tmp_path), 9)

    clock, events = Clock(), Events()
    manager = model.manager(clock=clock, emit=events)
    session, recovered = await use(manager.recover_session("", model.saver, str(tmp_path), wait_for_checkpoint=True))
    assert recovered
    assert await session.run(model.read) == 9
    assert len(clock.pauses) == 12
    assert max(clock.pauses) <= 1.0
    assert clock.pauses == sorted(clock.pauses)
    assert any(str(tmp_path) in message for message, _, _ in events.of("session.waiting"))


@pytest.mark.parametrize("max_wait_secs", [0, 0.1, 0.5, 3])
async def test_waiting_for_a_checkpoint_ends_when_the_time_is_over(variables, tmp_path, hasty, max_wait_secs, use):
    # Item 30: in TensorFlow 0.1 with recovery_wait_secs=1 takes 1.0 s.
    model = Model()
    manager = model.manager(clock=hasty, recovery_wait_secs=1)
    started = hasty.now
    _, recovered = await use(
        manager.recover_session("", model.saver, str(tmp_path), wait_for_checkpoint=True, max_wait_secs=max_wait_secs)
    )
    assert not recovered
    assert hasty.now - started == pytest.approx(max_wait_secs)


# ---------------------------------------------------------------------------------- wait_for_session


@pytest.mark.parametrize(
    ("recovery_wait_secs", "max_wait_secs", "text"),
    [(1, 3, "3"), (30, 3, "3"), (0.2, 0.5, "0.5"), (30, 0, "0"), (1, 90, "90")],
)
async def test_wait_for_session_raises_after_its_time(
    variables, hasty, raw_sessions, recovery_wait_secs, max_wait_secs, text
):
    model = Model()
    manager = model.manager(clock=hasty, recovery_wait_secs=recovery_wait_secs)
    started = hasty.now
    with pytest.raises(tf.errors.DeadlineExceededError) as caught:
        await manager.wait_for_session("", max_wait_secs=max_wait_secs)
    assert hasty.now - started == pytest.approx(max_wait_secs)
    error = caught.value
    assert isinstance(error, SessionNotReady)
    assert isinstance(error, TimeoutError)
    assert f"Session was not ready after waiting {text} secs." in str(error)
    assert "Not ready: v." in str(error)
    assert error.variables == ("v",)
    assert error.waited_secs == max_wait_secs
    assert len(raw_sessions) == 1, "one session serves all looks"
    assert raw_sessions.open_ones() == []


async def test_wait_for_session_with_too_strict_gate(variables, hasty):
    model = LocalModel()
    manager = SessionManager(
        local_init_op=model.local_init_op,
        ready_op=model.all_ready,
        ready_for_local_init_op=model.all_ready,
        graph=model.graph,
        clock=hasty,
        recovery_wait_secs=1,
    )
    with pytest.raises(tf.errors.DeadlineExceededError) as caught:
        await manager.wait_for_session("", max_wait_secs=3)
    assert caught.value.variables == ("v", "w", "x")


async def test_wait_for_session_with_insufficient_gate(variables, hasty):
    # No gate at all: local init runs, and falls back on the initial value of v; the model is still not ready.
    graph = tf.Graph()
    with graph.as_default():
        v = tf1.get_variable("v", initializer=1)
        w = tf1.Variable(v.initial_value, trainable=False, collections=[tf1.GraphKeys.LOCAL_VARIABLES], name="w")
        ready = tf1.report_uninitialized_variables([v, w])
    manager = SessionManager(local_init_op=w.initializer, ready_op=ready, graph=graph, clock=hasty)
    with pytest.raises(
        tf.errors.DeadlineExceededError, match=r"Session was not ready after waiting 3 secs\."
    ) as caught:
        await manager.wait_for_session("", max_wait_secs=3)
    assert caught.value.variables == ("v",)


@pytest.fixture
def unique():
    """Names that no other test uses on the server that all of them share."""
    prefix = f"t{uuid.uuid4().hex[:8]}_"
    return [prefix + name for name in ("v", "w", "x")]


@pytest.mark.allow_leak("files")  # the in-process server lives as long as the process
async def test_f22_a_worker_notices_at_once_that_its_chief_has_initialised_and_runs_local_init(use, variables, unique):
    # The chief initialises while the worker waits; the worker notices at once, not 30 s later.
    model = LocalModel(names=unique)
    with model.graph.as_default():
        assert model.global_ready is not None

    class Clock(HastyClock):
        async def sleep(self, secs):
            await super().sleep(secs)
            if len(self.pauses) == 3:
                await chief.run(model.v.initializer)

    chief, _ = await use(SessionManager(graph=model.graph).recover_session("local"))
    clock, events = Clock(), Events()
    manager = SessionManager(
        local_init_op=model.local_init_op,
        ready_op=model.all_ready,
        ready_for_local_init_op=model.global_ready,
        graph=model.graph,
        clock=clock,
        emit=events,
    )
    worker = await use(manager.wait_for_session("local", max_wait_secs=30))
    assert len(clock.pauses) == 3
    assert await worker.run(model.initialised) == [True, True, True]
    assert await worker.run(model.reads) == [1, 1, 3]
    assert events.of("session.waiting")[0][2]["missing"] == [unique[0]]


async def test_waiting_is_told_once_and_again_when_the_reason_changes_or_time_goes_by(variables):
    polls = Polls(30)
    assert polls.tell("v", 0.0)
    assert not polls.tell("v", 1.0)
    assert polls.tell("w", 2.0)
    assert not polls.tell("w", 2.0 + SILENT_SECS - 0.1)
    assert polls.tell("w", 2.0 + SILENT_SECS)


@pytest.mark.parametrize("longest", [0, 0.01, 0.3, 30])
def test_pauses_grow_and_are_never_longer_than_wanted(longest):
    polls = Polls(longest)
    pauses = [polls.next() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert all(0 < pause <= max(0.01, min(1.0, longest)) for pause in pauses)
    assert pauses[-1] == max(0.01, min(1.0, longest))


# ---------------------------------------------------------------------------------- ready ops that raise


class ObsoleteModel:
    """A model whose ready op is an assertion: it raises instead of returning names."""

    def __init__(self, value=1):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.v = tf1.get_variable("v", initializer=value)
            self.read = self.v.read_value()
            if isinstance(self.v, tf1.Variable) and not tf1.resource_variables_enabled():
                self.ready_op = tf1.assert_variables_initialized()
            else:
                self.ready_op = self.v.read_value().op
            self.saver = tf1.train.Saver({"v": self.v})

    def manager(self, **kwargs):
        return SessionManager(ready_op=self.ready_op, graph=self.graph, **kwargs)


async def test_obsolete_prepare_session(use, variables):
    model = ObsoleteModel()
    session = await use(model.manager().prepare_session("", init_op=model.v.initializer))
    assert await session.run(model.read) == 1


async def test_obsolete_prepare_session_with_init_feed_dict(use, variables):
    graph = tf.Graph()
    with graph.as_default():
        p = tf1.placeholder(tf.float32, shape=())
        v = tf1.get_variable("v", initializer=p)
        read = v.read_value()
    manager = SessionManager(ready_op=read.op, graph=graph)
    session = await use(manager.prepare_session("", init_op=v.initializer, init_feed_dict={p: 1.5}))
    assert await session.run(read) == 1.5


async def test_obsolete_prepare_session_with_init_fn(use, variables):
    model = ObsoleteModel()
    session = await use(model.manager().prepare_session("", init_fn=lambda raw: raw.run(model.v.initializer)))
    assert await session.run(model.read) == 1


async def test_obsolete_prepare_session_fails(variables):
    model = ObsoleteModel()
    with pytest.raises(RuntimeError, match="did not make model ready") as caught:
        await model.manager().prepare_session("", init_fn=lambda raw: None)
    assert "uninitialized" in str(caught.value)


async def test_obsolete_recover_session(use, variables, tmp_path):
    model, again = ObsoleteModel(), ObsoleteModel(value=2)
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    Model().checkpoint(str(full), value=3)
    _, recovered = await use(model.manager().recover_session("", model.saver, str(empty)))
    assert not recovered
    session, recovered = await use(again.manager().recover_session("", again.saver, str(full)))
    assert recovered
    assert await session.run(again.read) == 3


async def test_obsolete_wait_for_session(variables, hasty):
    model = ObsoleteModel()
    with pytest.raises(tf.errors.DeadlineExceededError) as caught:
        await model.manager(clock=hasty, recovery_wait_secs=1).wait_for_session("", max_wait_secs=3)
    assert caught.value.variables == ("v",)


# ---------------------------------------------------------------------------------- readiness, item 35


READY_VALUES = {
    "an operation": lambda: tf.no_op(),
    "int32 scalar": lambda: tf.constant(3, tf.int32),
    "int32 array": lambda: tf.constant([1, 2], tf.int32),
    "no names": lambda: tf.constant([], tf.string),
    "no floats": lambda: tf.constant([], tf.float32),
}


@pytest.mark.parametrize("kind", READY_VALUES)
async def test_values_that_mean_ready(use, kind):
    graph = tf.Graph()
    with graph.as_default():
        ready, init = READY_VALUES[kind](), tf.no_op()
    session = await use(SessionManager(ready_op=ready, graph=graph).prepare_session("", init))
    assert not session.closed


@pytest.mark.parametrize(
    ("names", "text"),
    [(["a"], "a"), (["a", "b/c"], "a, b/c"), ("alone", "alone"), ([["a"], ["b"]], "a, b"), ([b"\xff"], "\ufffd")],
)
async def test_names_mean_not_ready(names, text):
    graph = tf.Graph()
    with graph.as_default():
        ready, init = tf.constant(names, tf.string), tf.no_op()
    with pytest.raises(RuntimeError, match="did not make model ready") as caught:
        await SessionManager(ready_op=ready, graph=graph).prepare_session("", init)
    assert str(caught.value).endswith(f"error: Variables not initialized: {text}")


@pytest.mark.parametrize("value", [True, 1.0, np.int64(0)])
async def test_values_that_mean_nothing_are_an_error_that_names_the_op(value, raw_sessions):
    graph = tf.Graph()
    with graph.as_default():
        ready, init = tf.constant(value, name="odd_check"), tf.no_op()
    with pytest.raises(TypeError, match="odd_check") as caught:
        await SessionManager(ready_op=ready, graph=graph).prepare_session("", init)
    assert "report_uninitialized_variables" in str(caught.value)
    assert raw_sessions.open_ones() == []


@pytest.mark.parametrize("method", ["prepare_session", "wait_for_session"])
async def test_another_failed_precondition_is_raised_as_it_is(raw_sessions, method):
    graph = tf.Graph()
    with graph.as_default():
        content = tf.lookup.KeyValueTensorInitializer(["a"], ["b"])
        ready = tf.lookup.StaticHashTable(content, "").lookup(tf.constant(["a"]))
        init = tf.no_op()
    manager = SessionManager(ready_op=ready, graph=graph)
    kwargs = {"init_op": init} if method == "prepare_session" else {"max_wait_secs": 60}
    with pytest.raises(tf.errors.FailedPreconditionError, match="Table not initialized"):
        await getattr(manager, method)("", **kwargs)
    assert len(raw_sessions) == 1
    assert raw_sessions.open_ones() == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Attempting to use uninitialized value w\n\t [[{{node w/read}}]]", ("w",)),
        ("Could not find variable a/b. This could mean that ... the variable is uninitialized.", ("a/b",)),
        ("Error while reading resource variable v_1 from Container: localhost.", ("v_1",)),
        ("something else is uninitialized", ()),
    ],
)
def test_variables_are_found_in_tensorflows_words(text, names):
    assert uninitialised_in(text) == names


def test_names_of_what_has_none():
    assert maybe_name(None) == "None"
    assert maybe_name([]) == "<no name for <class 'list'>>"


# ---------------------------------------------------------------------------------- the error


def test_session_not_ready_is_both_kinds_of_error():
    error = _tf.SessionNotReady(("v", "w"), 2.5)
    assert isinstance(error, errors.SupervisorError)
    assert isinstance(error, TimeoutError)
    assert isinstance(error, tf.errors.OpError)
    assert str(error).startswith("Session was not ready after waiting 2.5 secs. Not ready: v, w.")
    assert error.message == str(error)
    assert error.error_code == tf.errors.DEADLINE_EXCEEDED
    assert error.op is None
    assert error.node_def is None
    assert error.experimental_payloads == {}
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.variables, again.waited_secs) == (str(error), ("v", "w"), 2.5)
    assert "Peer was not ready" in str(_tf.SessionNotReady((), 1, "Peer"))


# ---------------------------------------------------------------------------------- arguments


def test_ready_for_local_init_op_needs_local_init_op():
    graph = tf.Graph()
    with graph.as_default():
        gate = tf.no_op(name="gate")
    with pytest.raises(ValueError, match="ready_for_local_init_op") as caught:
        SessionManager(ready_for_local_init_op=gate, graph=graph)
    assert "gate" in str(caught.value)


def test_signature_is_tensorflows():
    def shape(fn):
        parameters = inspect.signature(fn).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]

    theirs = tf1.train.SessionManager
    for name in ("__init__", "prepare_session", "recover_session", "wait_for_session"):
        assert shape(getattr(SessionManager, name)) == shape(getattr(theirs, name)), name


async def test_default_graph_is_the_callers(use, variables):
    model = Model()
    with model.graph.as_default():
        manager = SessionManager(ready_op=model.ready_op)
    assert manager.graph is model.graph
    session = await use(manager.prepare_session("", model.v.initializer))
    assert await session.run(model.read) == 1


def test_eager_mode_without_a_graph_is_an_error(tf_mode):
    if tf_mode == "v2":
        with pytest.raises(RuntimeError, match="eager mode is on"):
            SessionManager()
    else:
        assert SessionManager().graph is tf1.get_default_graph()


@pytest.mark.parametrize("master", ["http://localhost:1", "localhost", None, 5])
@pytest.mark.parametrize("method", ["prepare_session", "recover_session", "wait_for_session"])
async def test_a_master_that_cannot_work_is_an_error_before_a_session_is_opened(raw_sessions, master, method):
    model = Model()
    kwargs = {"init_op": model.v.initializer} if method == "prepare_session" else {}
    with pytest.raises(UnknownMaster, match="'local'"):
        await getattr(model.manager(), method)(master, **kwargs)
    assert raw_sessions == []


@pytest.mark.parametrize("init_fn", [5, lambda: None, lambda a, b: None])
async def test_an_init_fn_that_cannot_be_called_is_an_error_before_a_session_is_opened(raw_sessions, init_fn):
    with pytest.raises(TypeError, match="one argument"):
        await Model().manager().prepare_session("", init_fn=init_fn)
    assert raw_sessions == []


async def test_a_plain_init_fn_that_returns_an_awaitable_is_told_what_to_do(raw_sessions):
    async def later(raw):
        raise AssertionError("never runs")

    with pytest.raises(TypeError, match="async def"):
        await Model().manager().prepare_session("", init_fn=lambda raw: later(raw))
    assert raw_sessions.open_ones() == []


async def test_config_reaches_the_session(use):
    graph = tf.Graph()
    with graph.as_default(), tf.device("/cpu:1"):
        seven = tf.constant(7) + 0
        init = tf.no_op()
    config = tf1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=False)
    session = await use(SessionManager(graph=graph).prepare_session("", init, config=config))
    assert await session.run(seven) == 7
    assert sum("CPU" in device.name for device in session.raw.list_devices()) == 2


# ---------------------------------------------------------------------------------- order, items 29, 33-37


@pytest.mark.parametrize("restored", [True, False])
async def test_order_of_the_steps(use, variables, tmp_path, restored):
    order = []

    def note(name):
        def body():
            order.append(name)
            return np.int32(0)

        return body

    if restored:
        Model().checkpoint(str(tmp_path), value=5)
    model = Model(value=2)
    with model.graph.as_default():
        with tf1.control_dependencies([model.v.initializer]):
            init_op = tf1.py_func(note("init_op"), [], tf.int32)
        local_init_op = tf1.py_func(note("local_init_op"), [], tf.int32)
        gate = tf1.py_func(note("gate"), [], tf.int32)
        ready = tf1.py_func(note("ready_op"), [], tf.int32)
    manager = SessionManager(
        local_init_op=local_init_op, ready_op=ready, ready_for_local_init_op=gate, graph=model.graph
    )
    session = await use(
        manager.prepare_session("", init_op, model.saver, str(tmp_path), init_fn=lambda raw: order.append("init_fn"))
    )
    first = [] if restored else ["init_op", "init_fn"]
    assert order == [*first, "gate", "local_init_op", "ready_op"]
    assert await session.run(model.read) == (5 if restored else 2)


async def test_a_state_file_that_names_a_vanished_checkpoint_raises_as_tensorflow_does(
    variables, tmp_path, raw_sessions
):
    model = Model()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gone"\nall_model_checkpoint_paths: "gone"\n')
    with pytest.raises(ValueError, match="not a valid checkpoint"):
        await model.manager().prepare_session("", model.v.initializer, model.saver, str(tmp_path))
    assert raw_sessions.open_ones() == []
    assert tf.train.latest_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize("by", ["directory", "file"])
async def test_rotation_goes_on_after_restoring_a_directory(use, variables, tmp_path, by):
    path = Model().checkpoint(str(tmp_path))
    model = Model()
    place = {"checkpoint_dir": str(tmp_path)} if by == "directory" else {"checkpoint_filename_with_path": path}
    await use(model.manager().recover_session("", model.saver, **place))
    assert model.saver.last_checkpoints == ([path] if by == "directory" else [])


async def test_saved_model_initialisers_run_before_the_restore(use, variables, tmp_path):
    Model().checkpoint(str(tmp_path), value=5)
    model = Model(value=2)
    with model.graph.as_default():
        table = tf1.get_variable("table", initializer=8, trainable=False)
        read = table.read_value()
        tf1.add_to_collection("saved_model_initializers", tf.group(table.initializer, model.v.initializer))
    session, recovered = await use(model.manager().recover_session("", model.saver, str(tmp_path)))
    assert recovered
    assert await session.run([model.read, read]) == [5, 8]


async def test_prepare_raises_where_recover_says_no(use, variables, tmp_path):
    Model().checkpoint(str(tmp_path))
    model = LocalModel()
    manager = SessionManager(ready_op=model.all_ready, graph=model.graph)
    _, recovered = await use(manager.recover_session("", model.saver, str(tmp_path)))
    assert not recovered
    with pytest.raises(RuntimeError, match="Variables not initialized: w, x"):
        await manager.prepare_session("", model.v.initializer, model.saver, str(tmp_path))


# ---------------------------------------------------------------------------------- the restorer


async def test_a_restorer_takes_the_place_of_tensorflows_way(use, variables, tmp_path, events):
    model = Model()
    executor = DeviceExecutor()
    calls = []

    class Restorer:
        restored_from = "newest-good"

        def __call__(self, raw, saver, checkpoint_dir, checkpoint_filename_with_path):
            calls.append((saver, checkpoint_dir, checkpoint_filename_with_path))
            assert executor.on_device_thread()
            assert tf1.get_default_graph() is model.graph
            model.v.load(11, raw)
            return True

    try:
        manager = model.manager(restore=Restorer(), emit=events, executor=executor)
        session = await use(manager.prepare_session("", None, model.saver, str(tmp_path)))
        assert calls == [(model.saver, str(tmp_path), None)]
        assert manager.restored_from == "newest-good"
        assert events.of("session.restored")[0][2]["path"] == "newest-good"
        assert await session.run(model.read) == 11
        await session.close()
    finally:
        await executor.aclose(5)


async def test_an_error_of_the_restorer_leaves_as_the_same_object(variables, tmp_path, raw_sessions):
    model = Model()
    error = errors.CheckpointDamaged("model.ckpt-7", "truncated")

    def restore(*_):
        raise error

    with pytest.raises(errors.CheckpointDamaged) as caught:
        await model.manager(restore=restore).prepare_session("", model.v.initializer, model.saver, str(tmp_path))
    assert caught.value is error
    assert raw_sessions.open_ones() == []


@pytest.mark.parametrize("saver", [None, False])
async def test_without_a_saver_nothing_is_restored(use, variables, tmp_path, saver):
    Model().checkpoint(str(tmp_path), value=5)
    model = Model()

    def restore(*_):
        raise AssertionError("not asked")

    manager = model.manager(restore=restore)
    session = await use(manager.prepare_session("", model.v.initializer, saver, str(tmp_path)))
    assert await session.run(model.read) == 1
    assert manager.restored_from is None


def test_bound_fills_in_what_was_not_given():
    graph = tf.Graph()
    clock, other = SystemClock(), SystemClock()
    manager = SessionManager(graph=graph, clock=clock)
    coordinator = Coordinator()
    bound = manager.bound(clock=other, coordinator=coordinator)
    assert bound is not manager
    assert bound._clock is clock
    assert bound._coordinator is coordinator
    assert manager._coordinator is None
    assert bound.graph is graph

    class Mine(SessionManager):
        pass

    assert type(Mine(graph=graph).bound()) is Mine


# ---------------------------------------------------------------------------------- errors, stop, cancellation


class Boom(Exception):
    pass


@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("error", [Boom("no"), tf.errors.OutOfRangeError(None, None, "truncated")])
async def test_an_error_of_init_fn_leaves_as_the_same_object_and_closes_the_session(raw_sessions, style, error):
    def init(session):
        raise error

    async def init_async(session):
        raise error

    with pytest.raises(type(error)) as caught:
        await Model().manager().prepare_session("", init_fn=init if style == "sync" else init_async)
    assert caught.value is error
    assert len(raw_sessions) == 1
    assert raw_sessions.open_ones() == []


async def test_an_op_of_another_graph_is_tensorflows_own_error(raw_sessions):
    model, other = Model(), Model()
    with pytest.raises(ValueError, match="is not an element of this graph"):
        await model.manager().prepare_session("", other.v.initializer)
    assert raw_sessions.open_ones() == []


@pytest.fixture
def stuck(monkeypatch, raw_sessions):
    """Opening a session waits on `go_on`; `asked` tells that a thread is in there."""

    class Stuck:
        asked = threading.Event()
        go_on = threading.Event()

    recorded = tf1.Session

    class Slow(recorded):
        def __init__(self, *args, **kwargs):
            Stuck.asked.set()
            Stuck.go_on.wait(30)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(tf1, "Session", Slow)
    yield Stuck
    Stuck.go_on.set()


@pytest.mark.parametrize("own_executor", [True, False])
async def test_f22_cancelled_while_opening_releases_the_caller_and_the_thread_closes_the_session(
    stuck, raw_sessions, own_executor
):
    executor = None if own_executor else DeviceExecutor()
    model = Model()
    task = asyncio.create_task(model.manager(executor=executor).prepare_session("", model.v.initializer))
    await asyncio.to_thread(stuck.asked.wait, 30)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert raw_sessions == []
    stuck.go_on.set()
    if executor is not None:
        assert not executor.closed
        await executor.aclose(10)
    while len(raw_sessions) < 1 or raw_sessions.open_ones():
        await asyncio.sleep(0.001)


async def test_f22_a_deadline_names_the_master_that_does_not_answer(stuck, clock):
    model = Model()
    task = asyncio.create_task(model.manager(clock=clock).wait_for_session("", max_wait_secs=5))
    await asyncio.to_thread(stuck.asked.wait, 30)
    await clock.advance(4.9)
    assert not task.done()
    await clock.advance(0.2)
    stuck.go_on.set()
    with pytest.raises(SessionNotReady, match=r"after waiting 5 secs\. Not ready: an answer of master ''"):
        await task


async def test_f22_a_silent_master_is_an_event_that_names_it(stuck, clock, events, use):
    model = Model()
    task = asyncio.create_task(use(model.manager(clock=clock, emit=events).prepare_session("", model.v.initializer)))
    await asyncio.to_thread(stuck.asked.wait, 30)
    await clock.advance(2 * SILENT_SECS + 1)
    stuck.go_on.set()
    await task
    assert [data["waited_secs"] for _, _, data in events.of("session.master_silent")] == [10.0, 20.0]
    message, level, _ = events.of("session.master_silent")[0]
    assert "master ''" in message
    assert level == "warning"


ABSENT_PEER = """
import asyncio, sys, time
import tensorflow as tf
from asupervisor.session.manager import SessionManager

master = sys.argv[1]
graph = tf.Graph()
with graph.as_default():
    v = tf.compat.v1.get_variable("v", initializer=1.0)
    ready = tf.compat.v1.report_uninitialized_variables()


async def main():
    manager = SessionManager(graph=graph, ready_op=ready)
    started = time.monotonic()
    try:
        await manager.wait_for_session(master, max_wait_secs=0.5)
    except tf.errors.DeadlineExceededError as error:
        print("deadline", error)
    try:
        async with asyncio.timeout(0.5):
            await manager.prepare_session(master, v.initializer)
    except TimeoutError:
        print("cancelled")
    print("took", time.monotonic() - started)


asyncio.run(main())
"""


async def test_f22_an_absent_peer_holds_neither_the_caller_nor_the_process(forks):
    # TensorFlow's own blocks for ever in the first run, and again in close().
    with socket.socket() as nobody:  # bound and not listening: connections are refused for as long as we hold it
        nobody.bind(("127.0.0.1", 0))
        master = f"grpc://127.0.0.1:{nobody.getsockname()[1]}"
        done = await asyncio.to_thread(forks.run, "-c", ABSENT_PEER, master, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("deadline Session was not ready after waiting 0.5 secs. Not ready: an answer of master")
    assert master in lines[0]
    assert lines[1] == "cancelled"
    # Two seconds for a look that has begun, one each for giving up; the rest is a crowded machine.
    assert float(lines[2].removeprefix("took ")) < 15


@pytest.mark.parametrize("phase", ["init_op", "local_init_op", "ready_op", "restore"])
@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_hanging_step_of_the_startup_is_left_at_once_and_its_session_closed(raw_sessions, tmp_path, phase, how):
    model = Model()
    with model.graph.as_default():
        stuck = tf1.FIFOQueue(1, tf.string).dequeue()
    running = threading.Event()
    coordinator = Coordinator()

    def restore(raw, *_):
        if phase != "restore":
            return False
        running.set()
        return raw.run(stuck)

    executor = DeviceExecutor()
    manager = model.manager(
        executor=executor,
        restore=restore,
        coordinator=coordinator,
        local_init_op=stuck if phase == "local_init_op" else None,
        ready_op=stuck if phase == "ready_op" else None,
    )
    init_op = stuck if phase == "init_op" else model.v.initializer
    task = asyncio.create_task(manager.prepare_session("", init_op, model.saver, str(tmp_path)))
    try:
        # A blocked run cannot be seen from outside but by what the device thread is busy with.
        while (busy := executor.busy()) is None or busy.label != phase:
            await asyncio.sleep(0.001)
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            threading.Thread(target=coordinator.request_stop).start()
            with pytest.raises(StopRequested):
                await task
        assert len(raw_sessions) == 1
        assert raw_sessions.open_ones() == []
    finally:
        assert await executor.aclose(10), "closing the session has freed the device thread"


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_an_async_init_fn_is_cancelled_when_the_startup_ends(raw_sessions, how):
    coordinator, entered, ended = Coordinator(), asyncio.Event(), []

    async def init_fn(session):
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    task = asyncio.create_task(Model().manager(coordinator=coordinator).prepare_session("", init_fn=init_fn))
    await entered.wait()
    if how == "cancel":
        task.cancel()
    else:
        coordinator.request_stop()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else StopRequested):
        await task
    assert ended == [True]
    assert raw_sessions.open_ones() == []


@pytest.mark.parametrize("how", ["cancel", "stop"])
@pytest.mark.parametrize("kind", ["error", "echo"])
async def test_what_an_async_init_fn_raises_when_it_is_cancelled_is_not_lost(raw_sessions, how, kind):
    """It takes the place of the cancellation, as with a plain await; but not where it only tells of that."""
    coordinator, entered = Coordinator(), asyncio.Event()
    error = ValueError("half done") if kind == "error" else SessionClosed("session")

    async def init_fn(session):
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise error

    task = asyncio.create_task(Model().manager(coordinator=coordinator).prepare_session("", init_fn=init_fn))
    await entered.wait()
    if how == "cancel":
        task.cancel()
    else:
        coordinator.request_stop()
    instead = asyncio.CancelledError if how == "cancel" else StopRequested
    with pytest.raises(ValueError if kind == "error" else instead) as raised:
        await task
    if kind == "error":
        assert raised.value is error
    assert raw_sessions.open_ones() == []


@pytest.mark.parametrize("method", ["wait_for_session", "recover_session"])
async def test_a_requested_stop_ends_a_wait(raw_sessions, tmp_path, clock, method):
    model = Model()
    coordinator = Coordinator()
    manager = model.manager(coordinator=coordinator, clock=clock)
    if method == "wait_for_session":
        work = manager.wait_for_session("")
    else:
        work = manager.recover_session("", model.saver, str(tmp_path), wait_for_checkpoint=True)
    task = asyncio.create_task(work)
    while clock.remaining() == () or clock.remaining()[0] > LAST_POLL_SECS:
        await asyncio.sleep(0.001)
    coordinator.request_stop()
    with pytest.raises(StopRequested, match="start of a session"):
        await task
    assert clock.remaining() == ()
    assert len(raw_sessions) == 1
    assert raw_sessions.open_ones() == []


async def test_a_stop_that_was_requested_before_is_told_before_a_session_is_opened(raw_sessions):
    coordinator = Coordinator()
    coordinator.request_stop()
    model = Model()
    with pytest.raises(StopRequested):
        await model.manager(coordinator=coordinator).prepare_session("", model.v.initializer)
    assert raw_sessions == []


async def test_f22_a_hanging_look_is_covered_by_the_deadline(raw_sessions, clock):
    graph = tf.Graph()
    with graph.as_default():
        stuck = tf1.FIFOQueue(1, tf.string).dequeue()
    executor = DeviceExecutor()
    manager = SessionManager(ready_op=stuck, graph=graph, clock=clock, executor=executor)
    task = asyncio.create_task(manager.wait_for_session("", max_wait_secs=7))
    try:
        while (busy := executor.busy()) is None or busy.label != "readiness":
            await asyncio.sleep(0.001)
        await clock.advance(6.9)
        assert not task.done()
        await clock.advance(0.2)
        with pytest.raises(SessionNotReady, match="after waiting 7 secs"):
            await task
        assert raw_sessions.open_ones() == []
    finally:
        assert await executor.aclose(10)


async def test_a_look_that_has_begun_has_a_little_time_whatever_is_left(clock, use):
    # max_wait_secs=0 asks "is it ready now?"; an opening takes some time all the same.
    graph = tf.Graph()
    with graph.as_default():
        ready = tf.constant([], tf.string)
    session = await use(SessionManager(ready_op=ready, graph=graph, clock=clock).wait_for_session("", None, 0))
    assert not session.closed
    assert LOOK_SECS < SILENT_SECS


@pytest.mark.parametrize("at", range(12))
async def test_cancelled_at_any_turn_of_the_loop_nothing_is_left_open(raw_sessions, at):
    model = Model()
    task = asyncio.create_task(model.manager().prepare_session("", model.v.initializer))
    for _ in range(at):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while raw_sessions.open_ones():
        await asyncio.sleep(0.001)


@pytest.mark.full
@pytest.mark.parametrize("at", range(400))
async def test_cancelled_after_any_time_nothing_is_left_open(raw_sessions, at):
    model = Model()
    task = asyncio.create_task(model.manager().prepare_session("", model.v.initializer))
    done, _ = await asyncio.wait({task}, timeout=at * 0.00025)
    task.cancel()
    try:
        session = await task
        await session.close()
    except asyncio.CancelledError:
        assert not done
    while raw_sessions.open_ones():
        await asyncio.sleep(0.001)


async def test_giving_up_that_is_cancelled_still_closes(raw_sessions):
    graph = tf.Graph()
    opening = Opening("", graph, None, None)
    await opening.ask()
    task = asyncio.create_task(opening.give_up())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while raw_sessions.open_ones():
        await asyncio.sleep(0.001)
    while len(asyncio.all_tasks()) > 1:  # the clean-up goes on by itself, to its end
        await asyncio.sleep(0.001)
    assert opening.executor.closed


async def test_closing_a_session_ends_the_executor_that_is_its_own(raw_sessions):
    model = Model()
    session = await model.manager().prepare_session("", model.v.initializer)
    executor = session.executor
    await session.close()
    await session.close()
    assert session.closed
    assert executor.closed
    assert raw_sessions.open_ones() == []


async def test_the_close_that_was_handed_in_is_the_sessions(use):
    model = Model()
    closed = []
    executor = DeviceExecutor()

    async def close():
        closed.append(True)
        await session.close_raw(5)

    try:
        session = await use(model.manager(close=close, executor=executor).prepare_session("", model.v.initializer))
        await session.close()
        assert closed == [True]
    finally:
        await executor.aclose(5)


async def test_many_preparations_at_once_share_a_manager(use, variables):
    model = Model()
    manager = model.manager()
    sessions = await asyncio.gather(*(use(manager.prepare_session("", model.v.initializer)) for _ in range(8)))
    assert await asyncio.gather(*(session.run(model.read) for session in sessions)) == [1] * 8


async def test_infinite_and_absent_limits_are_the_same(use):
    graph = tf.Graph()
    with graph.as_default():
        ready = tf.constant([], tf.string)
    for limit in (None, math.inf):
        session = await use(SessionManager(ready_op=ready, graph=graph).wait_for_session("", None, limit))
        assert not session.closed
