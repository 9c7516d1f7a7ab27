"""Models, hooks and sessions that fail, for the tests of monitored sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import SessionCreator
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def writers_of_tensorflow() -> Iterator[None]:
    """TensorFlow's own hooks leave their event files open in a cache of the process."""
    yield
    tf1.summary.FileWriterCache.clear()


@pytest.fixture(scope="session")
def server() -> Any:
    """A real server in this process. It cannot be stopped; each test has a container of its own in it."""
    return tf.distribute.Server.create_local_server()


@pytest.fixture
def counter(variables: str) -> Callable[..., SimpleNamespace]:
    """Makes the smallest model, of either kind of variable: a global step and the op that advances it."""

    def make(start: int = 0, by: int = 1) -> SimpleNamespace:
        graph = tf.Graph()
        with graph.as_default():
            step = tf1.get_variable(
                "global_step",
                initializer=tf.constant(start, tf.int64),
                trainable=False,
                collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
            )
            train = tf1.assign_add(step, by).op if variables == "ref" else step.assign_add(by).op
            with tf.control_dependencies([train]):
                after = tf.identity(step.read_value() if variables == "resource" else step.value(), name="after")
        return SimpleNamespace(graph=graph, step=step, train=train, after=after)

    return make


@pytest.fixture
def model(variables: str) -> Callable[..., SimpleNamespace]:
    """Makes a small regression: one placeholder, one weight, a global step, one summary."""

    def make(dim: int = 2) -> SimpleNamespace:
        graph = tf.Graph()
        with graph.as_default():
            x = tf1.placeholder(tf.float32, [None, dim], name="x")
            w = tf1.get_variable("w", [dim, 1], initializer=tf1.zeros_initializer())
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0), name="loss")
            step = tf1.train.get_or_create_global_step()
            train = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
            tf1.summary.scalar("train_loss", loss)
        return SimpleNamespace(graph=graph, x=x, w=w, loss=loss, step=step, train=train, feed={x: [[1.0] * dim]})

    return make


class Recorder(AsyncSessionRunHook):
    """A hook that notes its calls in a list that several hooks may share."""

    def __init__(
        self, name: str = "hook", calls: list[str] | None = None, fetches: Any = None, feed: Any = None
    ) -> None:
        self.name = name
        self.calls: list[str] = [] if calls is None else calls
        self.fetches = fetches
        self.feed = feed
        self.values: list[Any] = []
        self.contexts: list[Any] = []
        self.outcomes: list[Any] = []
        self.stops = False
        self.coords: list[Any] = []
        self.sessions: list[Any] = []

    def note(self, call: str) -> None:
        self.calls.append(f"{self.name}.{call}" if self.name else call)

    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session")
        self.sessions.append(session)
        self.coords.append(coord)

    def before_run(self, run_context: Any) -> Any:
        self.note("before_run")
        self.contexts.append(run_context)
        if self.fetches is None and self.feed is None:
            return None
        return tf1.train.SessionRunArgs(self.fetches, self.feed)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run")
        self.values.append(run_values)
        if self.stops:
            run_context.request_stop()

    def end(self, session: Any) -> None:
        self.note("end")

    def finish(self, session: Any, outcome: Any) -> None:
        self.note("finish")
        self.outcomes.append(outcome)


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


class Raiser(AsyncSessionRunHook):
    """A hook that raises something in the given method, at the given call of it."""

    def __init__(self, method: str, error: BaseException, at: int = 1) -> None:
        self.calls = 0

        def fail(*args: Any) -> None:
            self.calls += 1
            if self.calls == at:
                raise error

        setattr(self, method, fail)


@pytest.fixture
def raiser() -> type[Raiser]:
    return Raiser


@pytest.fixture
def aborted() -> Callable[..., Exception]:
    """Makes the error of a lost session, as a hook or step function of the user's would raise it."""

    def make(kind: type[Exception] = tf.errors.AbortedError) -> Exception:
        return kind(None, None, "the worker was restarted")  # type: ignore[call-arg]

    return make


class FailingSession(tf1.Session):
    """A session of which one run fails: the first error's number counts the runs of the ops that are watched."""

    def __init__(self, graph: tf.Graph, watched: Any, fail_at: int | None, error: Callable[[], Exception]) -> None:
        super().__init__(graph=graph)
        self._watched = watched
        self._fail_at = fail_at
        self._error = error
        self.runs = 0

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        if any(part is self._watched for part in tf.nest.flatten(fetches)):
            self.runs += 1
            if self.runs == self._fail_at:
                raise self._error()
        return super().run(fetches, feed_dict, options, run_metadata)


class Factory(SessionCreator):
    """Makes one failing session after another, then fails itself as a list does."""

    def __init__(
        self, graph: tf.Graph, watched: Any, fail_at: list[int | None], error: Callable[[], Exception]
    ) -> None:
        self.graph = graph
        self.made = 0
        self.sessions: list[FailingSession] = []
        self._rest = list(fail_at)
        self._watched = watched
        self._error = error

    def create_session(self) -> Any:
        self.made += 1
        session = FailingSession(self.graph, self._watched, self._rest.pop(0), self._error)
        self.sessions.append(session)
        return session


@pytest.fixture
def factory() -> type[Factory]:
    return Factory


@pytest.fixture
def quick() -> RecoveryPolicy:
    """The default policy, without pauses."""
    return RecoveryPolicy(backoff=NO_PAUSE)


@pytest.fixture
def like_tensorflow() -> RecoveryPolicy:
    return RecoveryPolicy.like_tensorflow()


@pytest.fixture
def events_of() -> Callable[[Any], list[Any]]:
    """Reads all event files of a directory, in the order of their names."""

    def read(logdir: Any) -> list[Any]:
        files = sorted(Path(logdir).glob("events.out.tfevents*"))
        return [event for file in files for event in tf1.train.summary_iterator(str(file))]

    return read


@pytest.fixture
def scalars_of(events_of: Callable[[Any], list[Any]]) -> Callable[[Any], dict[str, list[int]]]:
    """The steps at which each tag of a directory was recorded."""

    def read(logdir: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for event in events_of(logdir):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
        return found

    return read


@pytest.fixture
def listening() -> Callable[[Any], AbstractAsyncContextManager[list[Any]]]:
    """Collects what a session that is entered in the block tells, until its events end."""

    @asynccontextmanager
    async def listen(sess: Any) -> AsyncIterator[list[Any]]:
        events: list[Any] = []

        async def collect() -> None:
            async for event in sess.events():
                events.append(event)

        collecting = asyncio.create_task(collect())
        await asyncio.sleep(0)
        yield events
        await collecting

    return listen
