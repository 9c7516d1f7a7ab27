"""The hook protocol: plain methods and coroutine functions, where they run, what they may do and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from asupervisor import AsyncSession, Coordinator
from asupervisor.errors import StopGraceExceeded, StopRequested, WrongEventLoop
from asupervisor.events import log_only
from asupervisor.hooks import AsyncSessionRunHook
from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.merging import frozen_structure, merge_run_options
from asupervisor.hooks.protocol import HookOutcome, is_async
from asupervisor.monitored import MonitoredSession
from asupervisor.runtime import blocking_view
from asupervisor.runtime.blocking_view import BlockingCoordinator

tf1 = tf.compat.v1
pytestmark = pytest.mark.modes

Make = Callable[..., Any]


def test_is_async() -> None:
    async def coroutine(*args: Any) -> None: ...

    def plain(*args: Any) -> None: ...

    class Callable_:
        async def __call__(self) -> None: ...

    assert is_async(coroutine)
    assert is_async(functools.partial(functools.partial(coroutine, 1), 2))
    assert is_async(Callable_())
    assert not is_async(plain)
    assert not is_async(functools.partial(plain))
    assert not is_async(mock.MagicMock()), "which has any attribute"


class Everywhere(AsyncSessionRunHook):
    """Notes for each call: thread, default graph, what it was given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def note(self, call: str, *given: Any) -> None:
        self.seen[call] = (threading.current_thread(), tf1.get_default_graph(), *given)


class Plain(Everywhere):
    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session", session, coord)

    def before_run(self, run_context: Any) -> None:
        self.note("before_run", run_context.session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run", run_context.session)

    def end(self, session: Any) -> None:
        self.note("end", session)

    def finish(self, session: Any, outcome: Any) -> None:
        self.note("finish", session)


class Async(Everywhere):
    async def begin(self) -> None:
        self.note("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session", session, coord)

    async def before_run(self, run_context: Any) -> None:
        self.note("before_run", run_context.session)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run", run_context.session)

    async def end(self, session: Any) -> None:
        self.note("end", session)

    async def finish(self, session: Any, outcome: Any) -> None:
        self.note("finish", session)


@pytest.mark.parametrize("others", [[], [Async]], ids=["plain only", "with async ones"])
async def test_plain_methods_run_on_the_device_thread_with_the_graph(counter: Make, others: Any) -> None:
    made, hook = counter(), Plain()
    async with MonitoredSession(hooks=[hook, *(kind() for kind in others)], graph=made.graph) as sess:
        await sess.run(made.train)
        device = await sess.plain.call(lambda raw: threading.current_thread())
        raw = sess.plain.raw
    assert set(hook.seen) == {"begin", "after_create_session", "before_run", "after_run", "end", "finish"}
    for thread, graph, *given in hook.seen.values():
        assert thread is device
        assert graph is made.graph
        assert all(g is raw or isinstance(g, BlockingCoordinator) for g in given)
    assert isinstance(hook.seen["after_create_session"][3], BlockingCoordinator)


async def test_coroutine_functions_run_on_the_loop(counter: Make) -> None:
    made, hook = counter(), Async()
    async with MonitoredSession(hooks=[Plain(), hook], graph=made.graph) as sess:
        await sess.run(made.train)
        plain = sess.plain
    for thread, graph, *given in hook.seen.values():
        assert thread is threading.current_thread()
        assert graph is not made.graph, "no graph is left entered over an await"
        assert all(g is plain or isinstance(g, Coordinator) for g in given)
    assert isinstance(hook.seen["before_run"][2], AsyncSession)


async def test_both_kinds_in_the_order_of_the_list(counter: Make, recorder: Make) -> None:
    made = counter()
    calls: list[str] = []

    class Slow(AsyncSessionRunHook):
        def __init__(self, name: str) -> None:
            self.name = name

        async def before_run(self, run_context: Any) -> None:
            await asyncio.sleep(0.001)
            calls.append(f"{self.name}.before_run")

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await asyncio.sleep(0.001)
            calls.append(f"{self.name}.after_run")

    hooks = [Slow("a"), recorder("b", calls), Slow("c"), recorder("d", calls)]
    async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
        del calls[:]
        await asyncio.gather(*(sess.run(made.train) for _ in range(5)))
        assert calls == [f"{name}.{call}" for call in ("before_run", "after_run") for name in "abcd"] * 5


async def test_async_hooks_fetch_feed_and_stop(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        x = tf1.placeholder(tf.float32, [])
        double = x * 2

    class Hook(AsyncSessionRunHook):
        seen: Any = None

        async def before_run(self, run_context: Any) -> Any:
            assert run_context.original_args.fetches is made.train
            return tf1.train.SessionRunArgs({"double": double}, {x: 4.0})

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.seen = run_values.results
            run_context.request_stop()

    hook = Hook()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train)
        assert hook.seen == {"double": 8.0}
        assert sess.should_stop()
        with pytest.raises(RuntimeError, match="after should_stop"):
            await sess.run(made.train)


async def test_a_hook_may_use_its_session(counter: Make) -> None:
    made = counter()

    class Looks(AsyncSessionRunHook):
        seen: Any = None

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.seen = await run_context.session.run(made.step)

    hook = Looks()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        await sess.run(made.train)
    assert hook.seen == 1


async def test_a_hook_that_runs_its_own_monitored_session_is_told(counter: Make) -> None:
    """It would call itself, and wait for itself."""
    made = counter()

    class Plain_(AsyncSessionRunHook):
        def before_run(self, run_context: Any) -> None:
            sess.run(made.step)

    class Async_(AsyncSessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            await sess.run(made.step)

    for hook, error in ((Plain_(), WrongEventLoop), (Async_(), RuntimeError)):
        async with asyncio.timeout(20), MonitoredSession(hooks=[hook], graph=made.graph) as sess:
            with pytest.raises(error):
                await sess.run(made.train)


async def test_a_plain_method_that_returns_a_coroutine_is_refused(counter: Make) -> None:
    made = counter()

    async def later() -> None:
        raise AssertionError

    for method in ("begin", "after_create_session", "before_run", "end", "finish"):
        hook = type("Hook", (AsyncSessionRunHook,), {method: lambda self, *args: later()})()
        with pytest.raises(TypeError, match="async def"):
            async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
                await sess.run(made.train)


async def test_hooks_that_are_equal_or_cannot_be_hashed(counter: Make) -> None:
    import dataclasses

    made = counter()

    @dataclasses.dataclass
    class Hook(tf1.train.SessionRunHook):
        fetch: Any
        seen: list[Any] = dataclasses.field(default_factory=list, compare=False)

        def before_run(self, run_context: Any) -> Any:
            return tf1.train.SessionRunArgs(self.fetch)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.seen.append(run_values.results)

    hooks = [Hook(made.after), Hook(made.after)]
    async with MonitoredSession(hooks=hooks, graph=made.graph) as sess:
        await sess.run(made.train)
    assert [hook.seen for hook in hooks] == [[1], [1]]


async def test_a_list_of_fetches_that_is_changed_later_is_another_one(counter: Make, recorder: Make) -> None:
    made = counter()
    with made.graph.as_default():
        other = tf.constant(7)
    async with MonitoredSession(hooks=[recorder()], graph=made.graph) as sess:
        fetches = [made.after]
        assert await sess.run(fetches) == [1]
        fetches.append(other)
        assert await sess.run(fetches) == [2, 7]
        assert await sess.run([made.after]) == [3]
        nested = {"a": [made.after]}
        assert await sess.run(nested) == {"a": [4]}
        nested["a"].append(other)
        assert await sess.run(nested) == {"a": [5, 7]}
        assert await sess.run({"a": [made.after]}) == {"a": [6]}


async def test_what_hooks_fetch_may_change_from_run_to_run(counter: Make) -> None:
    made = counter()
    with made.graph.as_default():
        parts = [tf.constant(number) for number in range(5)]

    class Changes(tf1.train.SessionRunHook):
        def __init__(self) -> None:
            self.runs = 0
            self.seen: list[Any] = []

        def before_run(self, run_context: Any) -> Any:
            self.runs += 1
            asks = [
                parts[0],
                [parts[1]],
                {"k": parts[2]},
                {"l": parts[2]},
                None,
                (parts[3], {"m": [parts[4]]}),
                "after:0",
            ]
            return tf1.train.SessionRunArgs(asks[self.runs % len(asks)])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.seen.append(run_values.results)

    hook = Changes()
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        for _ in range(14):
            await sess.run(made.train)
    first, second = hook.seen[:7], hook.seen[7:]
    assert first == [[1], {"k": 2}, {"l": 2}, None, (3, {"m": [4]}), 6, 0]
    assert second == [[1], {"k": 2}, {"l": 2}, None, (3, {"m": [4]}), 13, 0]


def test_frozen_structures() -> None:
    from collections import OrderedDict

    a, b = object(), object()
    fetches = {"x": [a, (b, [a])], "y": OrderedDict(z=[b])}
    frozen = frozen_structure(fetches)
    assert frozen == fetches
    assert type(frozen["y"]) is OrderedDict
    fetches["x"].append(b)
    fetches["y"]["z"].append(a)
    fetches["x"][1][1].append(b)
    assert frozen == {"x": [a, (b, [a])], "y": OrderedDict(z=[b])}


def test_merged_options_ask_for_all_that_either_asks_for() -> None:
    a, b = tf1.RunOptions(), tf1.RunOptions()
    a.trace_level, b.trace_level = 1, 3
    a.timeout_in_ms, b.timeout_in_ms = 10, 5
    a.inter_op_thread_pool = 2
    b.output_partition_graphs = True
    a.report_tensor_allocations_upon_oom = True
    b.debug_options.reset_disk_byte_usage = True
    merged = merge_run_options(a, b)
    assert (merged.trace_level, merged.timeout_in_ms, merged.inter_op_thread_pool) == (3, 10, 2)
    assert merged.output_partition_graphs
    assert merged.report_tensor_allocations_upon_oom
    assert merged.debug_options.reset_disk_byte_usage
    assert a.trace_level == 1
    assert not a.debug_options.reset_disk_byte_usage


async def test_cancelled_in_flight_the_step_and_its_plain_hooks_end(counter: Make, recorder: Make) -> None:
    made, hook = counter(), recorder()
    gate, inside = threading.Event(), threading.Event()
    with made.graph.as_default():
        slow = tf1.py_func(lambda: (inside.set(), gate.wait(20), 1)[2], [], tf.int64)
        with tf.control_dependencies([slow]):
            step = tf1.assign_add(made.step, 1)
    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        run = asyncio.ensure_future(sess.run(step))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        gate.set()
        assert await sess.plain.run(made.step) == 1
        assert hook.calls[-1] == "hook.after_run"


@pytest.mark.parametrize("given_up", ["begin", "finish"])
@pytest.mark.parametrize("first", ["the stop", "the thread"])
async def test_a_call_that_is_given_up_while_a_thread_takes_it(recorder: Make, given_up: str, first: str) -> None:
    """Whoever comes first, what has begun has one last call, and what has not has none."""
    hook = recorder()
    late: list[Callable[[], Any]] = []

    async def on_device(fn: Callable[..., Any], method: Callable[..., Any], args: Any) -> Any:
        call = functools.partial(fn, method, args)
        if late or method.__name__ != given_up:
            return call()
        if first == "the thread":
            call()
        late.append(call)
        raise StopRequested(given_up)

    chain = HookChain([hook], log_only)
    with contextlib.suppress(StopRequested):
        await chain.begin(on_device)
    for _ in range(2):
        assert await chain.end(None, HookOutcome("error"), on_device) == []
        late[0]()
    assert hook.calls == ([] if (first, given_up) == ("the stop", "begin") else ["hook.begin", "hook.finish"])


async def test_a_hook_whose_turn_did_not_come_is_finished_later(recorder: Make) -> None:
    """Another one has had the device thread all the time; nobody says of it that it took long."""
    calls: list[str] = []
    told: list[str] = []
    free = asyncio.Event()

    async def on_device(fn: Callable[..., Any], method: Callable[..., Any], args: Any) -> Any:
        if method.__name__ == "end" and "slow.end" not in calls:
            fn(method, args)
        await free.wait()
        return fn(method, args)

    chain = HookChain([recorder("slow", calls), recorder("other", calls)], lambda kind, *_, **data: told.append(kind))
    free.set()
    await chain.begin(on_device)
    free.clear()
    session: Any = SimpleNamespace(raw=None)
    errors = await chain.end(session, HookOutcome("finished"), on_device, 0.05)
    assert calls == ["slow.begin", "other.begin", "slow.end"]
    assert {type(error) for error in errors} == {StopGraceExceeded}
    assert "hook.no_last_call" in told
    free.set()
    assert await chain.end(None, HookOutcome("error"), on_device) == []
    assert calls[3:] == ["slow.finish", "other.finish"]


async def test_the_blocking_view_of_a_coordinator(
    counter: Make, recorder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TensorFlow's own code asks of a coordinator works in a thread; and its wait ends at once with the stop."""
    monkeypatch.setattr(blocking_view, "_MISSED_SECS", 3600.0)  # it does not end because it looks by itself
    made, hook = counter(), recorder()
    woken = threading.Event()
    results: list[Any] = []

    def work() -> None:
        coord = hook.coords[0]
        results.append(coord.wait_for_stop(0.001))
        results.append(coord.should_stop())
        with coord.stop_on_exception():
            pass
        results.append(coord.wait_for_stop())
        coord.raise_requested_exception()
        woken.set()

    async with MonitoredSession(hooks=[hook], graph=made.graph) as sess:
        thread = threading.Thread(target=work)
        hook.coords[0].register_thread(thread)
        thread.start()
        await sess.run(made.train)
        while len(results) < 2:
            await asyncio.sleep(0.001)
        sess.request_stop()
        async with asyncio.timeout(30):
            while not woken.is_set():
                await asyncio.sleep(0.001)
        await asyncio.to_thread(hook.coords[0].join, [thread])
    assert results == [False, False, True]
    assert hook.coords[0].threads == (thread,)
