"""Issue 5, item 5: injected faults, seeded and deterministic; whatever happens, the outcome is the documented one.

A case is made of its number: a kind of session, a policy, a way of running, hooks, and one or two faults out of a lost
session, an error in any method of a hook, an error of the initialisation, a cancellation or a stop at any await of the
body or at any piece of work that the session gives to its threads. After each one:

* the block was left by exactly what the fault should raise, the user's errors as the same object, and in time;
* each hook that began had one last call, and its `end` after a clean end and only then;
* the step never went back without a recovery that was told, and then to the newest checkpoint, where there is one;
* what was trained is saved where it should be;
* no task, no thread and no message of asyncio's is left.

The default run has a subset. The whole is `pytest -m full`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.errors import RecoveryExhausted, StopRequested
from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.monitored import ChiefSessionCreator, MonitoredSession, MonitoredTrainingSession
from asupervisor.recovery import NO_PAUSE, RecoveryPolicy
from asupervisor.runtime.device import DeviceExecutor

tf1 = tf.compat.v1

STEPS = 6
LOST = (tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.UnknownError)
ANY = frozenset(("run", "coordinator", "hook", "step_fn", "startup"))
POLICIES = {
    "default": RecoveryPolicy(errors=LOST, backoff=NO_PAUSE),
    "any origin": RecoveryPolicy(errors=LOST, backoff=NO_PAUSE, origins=ANY),
    "tensorflow": dataclasses.replace(RecoveryPolicy.like_tensorflow(), errors=LOST),
    "never": RecoveryPolicy.never(),
    "once": RecoveryPolicy(errors=LOST, backoff=NO_PAUSE, origins=ANY, max_restarts=1, reset_on_progress=False),
}
METHODS = ("begin", "after_create_session", "is_done", "before_run", "after_run", "end", "finish")


class Model:
    """One graph for many cases: a step that a Python function may let fail, as a lost worker would."""

    def __init__(self, resource: bool) -> None:
        self.fail_at: set[int] = set()
        self.runs = self.failed = 0
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.step = tf1.get_variable(
                "global_step",
                initializer=tf.constant(0, tf.int64),
                use_resource=resource,
                trainable=False,
                collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
            )
            with tf.control_dependencies([tf1.py_func(self._run, [], tf.int64)]):
                add = tf1.assign_add(self.step, 1)
            with tf.control_dependencies([add]):
                self.after = tf.identity(self.step.read_value() if resource else self.step)

    def _run(self) -> int:
        self.runs += 1
        if self.runs in self.fail_at:
            self.failed += 1
            raise OSError("lost")
        return 0


class Hook(AsyncSessionRunHook):
    """Counts its calls; its subclass fails."""

    fired = False

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.outcomes: list[Any] = []

    def note(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1

    def begin(self) -> Any:
        self.note("begin")

    def end(self, session: Any) -> Any:
        self.note("end")

    def finish(self, session: Any, outcome: Any) -> Any:
        self.note("finish")
        self.outcomes.append(outcome)


def failing(method: str, error: BaseException, at: int, asynchronous: bool) -> Hook:
    """A hook whose method raises at its call number `at`."""
    original = getattr(Hook, method)
    calls = 0

    def fail(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(self, *args)
        if calls == at:
            self.fired = True
            raise error
        return result

    async def afail(self: Any, *args: Any) -> Any:
        return fail(self, *args)

    return type("Failing", (Hook,), {method: afail if asynchronous and method != "is_done" else fail})()


@types.coroutine
def interrupted(coroutine: Coroutine[Any, Any, Any], at: int, act: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await a coroutine, and act at its suspension number `at`."""
    count, value, error = 0, None, None
    while True:
        try:
            waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        count += 1
        if count == at:
            act()
        value = error = None
        try:
            value = yield waits_for
        except BaseException as caught:
            error = caught


class WatchedExecutor(DeviceExecutor):
    """Acts when it is given a certain piece of work."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._act = at, act
        self.pieces = 0

    def _count(self) -> None:
        self.pieces += 1
        if self.pieces == self._at:
            self._act()

    def call(self, fn: Any, *args: Any, **options: Any) -> Any:
        self._count()
        return super().call(fn, *args, **options)

    def side(self, fn: Any, *args: Any, **options: Any) -> Any:
        self._count()
        return super().side(fn, *args, **options)


class Case:
    """One case, all of it drawn from its number."""

    def __init__(self, number: int, model: Model, directory: Path) -> None:
        rng = random.Random(number)
        self.number = number
        self.model = model
        self.policy_name = rng.choice(list(POLICIES))
        self.policy = POLICIES[self.policy_name]
        self.directory = directory / str(number) if rng.random() < 0.6 else None
        self.way = rng.choice(["run", "steps", "step_fn", "async step_fn"])
        self.save_at = rng.choice([None, 1, 2, 3]) if self.directory else None
        self.error = rng.choice([ValueError, tf.errors.AbortedError, tf.errors.UnavailableError, StopIteration])
        faults = ["lost", "hook", "init", "cancel", "stop", "none"]
        self.faults = {rng.choices(faults, [4, 5, 1, 5, 3, 0.3])[0]}
        if rng.random() < 0.3:
            self.faults |= {rng.choice(["lost", "cancel", "stop"])}
        self.hooks: list[Hook] = [Hook() for _ in range(rng.randrange(3))]
        self.raised: BaseException | None = None
        self.method = rng.choice(METHODS)
        self.asynchronous = rng.random() < 0.3
        self.hook_at = rng.randrange(1, 5) if self.method in ("before_run", "after_run") else rng.choice([1, 1, 1, 2])
        if "hook" in self.faults:
            self.raised = self._make_error()
            hook = failing(self.method, self.raised, self.hook_at, self.asynchronous)
            self.hooks.insert(rng.randrange(len(self.hooks) + 1), hook)
        if self.asynchronous and self.way == "step_fn" and self.method in ("before_run", "after_run"):
            self.way = "async step_fn"  # the other kind is refused with such hooks
        self.init_failures = rng.choice([1, 1, 2, 7]) if "init" in self.faults else 0
        self.lost_at = (
            {rng.randrange(1, STEPS + 1) for _ in range(rng.choice([1, 1, 2]))} if "lost" in self.faults else set()
        )
        self.act_at = rng.choice([rng.randrange(1, 12), rng.randrange(1, 40)])
        self.by_work = rng.random() < 0.5
        self.task: asyncio.Task[Any] | None = None
        self.executor: DeviceExecutor | None = None
        self.init_fired = 0
        self.acted = False
        self.acted_while_entering = False
        self.entered = self.body_ended = self.acted_after_body = False
        self.seen: list[tuple[int, int]] = []
        self.saved: dict[int, int] = {}  # by how many steps had been seen then
        self.sess: Any = None

    def _make_error(self) -> BaseException:
        if self.error is ValueError:
            return ValueError("of the user")
        if self.error is StopIteration:
            return StopAsyncIteration() if self.asynchronous and self.method != "is_done" else StopIteration()
        error: BaseException = self.error(None, None, "of the user")
        return error

    def __repr__(self) -> str:
        faults = ", ".join(sorted(self.faults))
        return (
            f"case {self.number}: {faults}; {self.way}; policy {self.policy_name}; directory {bool(self.directory)}; "
            f"{type(self.raised).__name__} in {self.method} at {self.hook_at} async {self.asynchronous}; "
            f"init {self.init_failures}; lost {sorted(self.lost_at)}; act at {self.act_at} by work {self.by_work}; "
            f"save at {self.save_at}; seen {self.seen}; saved {self.saved}; acted {self.acted}, while entering "
            f"{self.acted_while_entering}, after the body {self.acted_after_body}; "
            f"outcome {None if self.sess is None else self.sess.outcome}"
        )

    # ------------------------------------------------------------------ what happens

    def make_session(self) -> Any:
        failures = self.init_failures

        def init_fn(scaffold: Any, session: Any) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                self.init_fired += 1
                if self.raised is None:
                    self.raised = self._init_error()
                raise self.raised

        with self.model.graph.as_default():
            scaffold = tf1.train.Scaffold(init_fn=init_fn)
        options: dict[str, Any] = {
            "graph": self.model.graph,
            "recovery": self.policy,
            "stop_grace_period_secs": 20,
            "executor": self.executor,
        }
        if self.directory is None:
            creator = ChiefSessionCreator(scaffold, graph=self.model.graph)
            return MonitoredSession(creator, self.hooks, **options)
        return MonitoredTrainingSession(
            checkpoint_dir=self.directory, scaffold=scaffold, hooks=self.hooks, save_graph_def=False, **options
        )

    def _init_error(self) -> BaseException:
        return ValueError("init") if self.error in (ValueError, StopIteration) else self.error(None, None, "init")

    async def body(self) -> None:
        async with self.sess as sess:
            self.entered = True
            try:
                await self._train(sess)
            finally:
                self.body_ended = True

    async def _train(self, sess: Any) -> None:
        while len(self.seen) < STEPS and not sess.should_stop():
            if self.way == "steps":
                async with sess.steps(self.model.after, max_steps=STEPS - len(self.seen)) as stream:
                    async for value in stream:
                        await self._took(sess, value)
            else:
                await self._took(sess, await self._one(sess))

    async def _one(self, sess: Any) -> Any:
        if self.way == "run":
            return await sess.run(self.model.after)

        def step_fn(step_context: Any) -> Any:
            return step_context.run_with_hooks(self.model.after)

        async def async_step_fn(step_context: Any) -> Any:
            return await step_context.run_with_hooks(self.model.after)

        return await sess.run_step_fn(step_fn if self.way == "step_fn" else async_step_fn)

    async def _took(self, sess: Any, value: Any) -> None:
        self.seen.append((int(value), sess.recoveries))
        if self.save_at == len(self.seen):
            self.saved[len(self.seen)] = (await sess.save()).step or 0

    def act(self) -> None:
        self.acted = True
        self.acted_while_entering, self.acted_after_body = not self.entered, self.body_ended
        if "cancel" in self.faults:
            assert self.task is not None
            self.task.cancel()
        if "stop" in self.faults:
            self.sess.request_stop()

    async def run(self) -> BaseException | None:
        """What left the block, or None."""
        self.model.runs, self.model.failed, self.model.fail_at = 0, 0, self.lost_at
        self.task = asyncio.current_task()
        interrupts = bool(self.faults & {"cancel", "stop"})
        if interrupts and self.by_work:
            self.executor = WatchedExecutor(self.act_at, self.act)
        self.sess = self.make_session()
        work: Any = self.body()
        if interrupts and not self.by_work:
            work = interrupted(work, self.act_at, self.act)
        try:
            async with asyncio.timeout(30):
                await work
        except (Exception, asyncio.CancelledError) as error:
            return error
        finally:
            if self.executor is not None:
                assert await self.executor.aclose(10)
        return None

    # ------------------------------------------------------------------ what should have happened

    @property
    def fired(self) -> bool:
        """Whether the user's error was raised: by the hook, or by the initialisation."""
        return self.init_fired > 0 or any(hook.fired for hook in self.hooks)

    def check(self, left: BaseException | None) -> None:
        assert not isinstance(left, TimeoutError), "it hung"
        self._check_what_left(left)
        self._check_outcome(left)
        self._check_hooks(left)
        self._check_steps()
        self._check_saves(left)
        assert not self.model.graph.finalized

    def _check_what_left(self, left: BaseException | None) -> None:
        happened = [
            what
            for what, did in (
                ("act", self.acted),
                ("user", self.fired),
                ("lost", self.model.failed > 0),
            )
            if did
        ]
        if not happened:
            assert left is None, repr(left)
            assert len(self.seen) == STEPS
        elif happened == ["act"]:
            self._check_interrupted(left)
        elif happened == ["lost"]:
            self._check_lost(left)
        elif happened == ["user"] and not isinstance(self.raised, StopIteration | StopAsyncIteration):
            self._check_failed(left)
        else:
            self._check_mixed(left)

    def _check_interrupted(self, left: BaseException | None) -> None:
        if "cancel" in self.faults:
            assert isinstance(left, asyncio.CancelledError), repr(left)
        elif self.acted_while_entering:
            assert left is None or isinstance(left, StopRequested), repr(left)
        else:
            assert left is None, repr(left)

    @property
    def _keeps(self) -> bool:
        """Whether a recovery may begin: there is a checkpoint, or nothing has to be kept."""
        return self.directory is not None or self.policy.allow_reinit

    def _check_lost(self, left: BaseException | None) -> None:
        """The session was lost in runs, and nothing else happened."""
        if not self.policy.errors or not self._keeps:
            assert isinstance(left, tf.errors.UnknownError), repr(left)
            assert self.sess.recoveries == 0
        elif self.policy.max_restarts is not None and self.model.failed > self.policy.max_restarts:
            assert isinstance(left, RecoveryExhausted), repr(left)
            assert isinstance(left.__cause__, tf.errors.UnknownError)
        else:
            assert left is None, repr(left)
            assert self.sess.recoveries == self.model.failed
            assert len(self.seen) == STEPS

    def _check_failed(self, left: BaseException | None) -> None:
        """The user's error was raised, by a hook or the initialisation, and nothing else happened."""
        assert self.raised is not None
        recovers = isinstance(self.raised, self.policy.errors)
        if self.init_fired:
            pass  # nothing to lose: it is tried again
        elif self.method in ("before_run", "after_run"):
            recovers = recovers and "hook" in self.policy.origins and self._keeps
        elif self.method == "after_create_session":
            recovers = recovers and "hook" in self.policy.origins
        elif self.method in ("begin", "end", "finish"):
            recovers = False
        if not recovers:
            assert left is self.raised, repr(left)
            return
        times = self.init_fired or 1
        if self.policy.max_restarts is not None and times > self.policy.max_restarts:
            assert isinstance(left, RecoveryExhausted), repr(left)
            assert left.__cause__ is self.raised
        else:
            assert left is None, repr(left)
            assert self.sess.recoveries == times
            assert len(self.seen) == STEPS

    def _check_mixed(self, left: BaseException | None) -> None:
        """More than one thing happened, or an end of the input where it is none: one of them leaves."""
        allowed: list[Any] = []  # kinds, or the very object
        if self.acted and "cancel" in self.faults:
            allowed.append(asyncio.CancelledError)
            assert left is not None, "the cancellation was lost"
        if self.fired:
            allowed.append(self.raised)
        if self.model.failed:
            allowed.append(tf.errors.UnknownError)
        if self.policy.max_restarts is not None and self.policy.errors:
            allowed.append(RecoveryExhausted)
        if self.acted and "stop" in self.faults and self.acted_while_entering:
            allowed.append(StopRequested)
        if isinstance(self.raised, StopIteration | StopAsyncIteration):
            # In a run it means the end. Elsewhere it is an error, which may have to be put into a box.
            allowed += [StopRequested, RuntimeError]
        if left is None:
            assert not (self.fired and type(self.raised) is ValueError), "an error of the user's was lost"
            return
        assert any(left is each or (isinstance(each, type) and isinstance(left, each)) for each in allowed), repr(left)

    def _check_outcome(self, left: BaseException | None) -> None:
        outcome = self.sess.outcome
        if left is None:
            assert outcome in ("finished", "stopped"), outcome
        elif isinstance(left, StopRequested):
            assert outcome == "stopped", outcome
        elif isinstance(left, asyncio.CancelledError):
            # The outcome may stand already when the exit is cancelled.
            assert outcome in ("cancelled", "error") or self.acted_after_body, outcome
        else:
            assert outcome == "error", outcome

    def _check_hooks(self, left: BaseException | None) -> None:
        for hook in self.hooks:
            begun, finished, ended = (hook.calls.get(name, 0) for name in ("begin", "finish", "end"))
            assert begun <= 1
            assert finished == begun
            assert ended <= 1
            (outcome,) = hook.outcomes or (None,)
            if outcome is None:
                continue
            in_end = self.fired and self.method in ("end", "finish")
            if ended and not in_end:
                assert outcome.clean
            if outcome.clean and self.entered and not self.model.failed and not self.fired:
                assert ended == 1, "a clean end without `end`"
            if outcome.reason == "cancelled":
                assert self.acted

    def _check_steps(self) -> None:
        for index, ((before, earlier), (after, later)) in enumerate(zip(self.seen, self.seen[1:], strict=False)):
            if earlier == later:
                assert after == before + 1, "a step was lost, or made twice, without a recovery"
            elif self.directory is not None:
                saved = max((step for at, step in self.saved.items() if at <= index + 1), default=0)
                assert after == saved + 1, "restored from the newest checkpoint"
            else:
                assert self.policy.allow_reinit, "a recovery needs a checkpoint"
                assert after == 1
        if self.seen:
            assert self.seen[0][0] == 1

    def _check_saves(self, left: BaseException | None) -> None:
        if self.directory is None or not self.seen:
            return
        if (left is not None or self.acted or self.fired) and (self.model.failed or self.sess.recoveries):
            return  # it may have ended with a session that was lost
        latest = tf.train.latest_checkpoint(str(self.directory))
        assert latest is not None
        assert int(latest.rpartition("-")[2]) >= self.seen[-1][0], "what was trained was saved"


class Log(logging.Handler):
    """What asyncio complains about."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _borrowed(thread: threading.Thread) -> bool:
    """TensorFlow's own, in which Python functions have run."""
    return isinstance(thread, threading._DummyThread)


async def settled(before: set[threading.Thread]) -> None:
    """No task and no thread is left."""
    me = asyncio.current_task()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        tasks = {task for task in asyncio.all_tasks() if task is not me}
        threads = {t for t in threading.enumerate() if t not in before and not _borrowed(t)}
        if not tasks and not threads:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"left behind: {tasks} {threads}")


async def inject(numbers: range, directory: Path) -> None:
    models = [Model(True), Model(False)]
    log = Log()
    logging.getLogger("asyncio").addHandler(log)
    quiet = logging.getLogger("asupervisor")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    try:
        for number in numbers:
            case = Case(number, models[number % 2], directory)
            before = set(threading.enumerate())
            try:
                left = await asyncio.create_task(case.run(), name=f"case {number}")
                case.check(left)
                await settled(before)
                assert not log.lines, log.lines
            except BaseException as error:
                error.add_note(repr(case))
                raise
    finally:
        quiet.setLevel(level)
        logging.getLogger("asyncio").removeHandler(log)


@pytest.mark.parametrize("chunk", range(2))
async def test_injected_faults(chunk: int, tmp_path: Path) -> None:
    await inject(range(chunk * 40, (chunk + 1) * 40), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(100))
async def test_ten_thousand_injected_faults(chunk: int, tmp_path: Path) -> None:
    await inject(range(chunk * 100, (chunk + 1) * 100), tmp_path)
