"""What the matrix of one event in one host does not hold: several sessions, several loops, storms, abandonment.

Each scenario is a function that asserts; it runs in a forked child process, watched for leaks, like the matrix's cases.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

if "lifecycle_matrix" not in sys.modules:
    sys.path.insert(0, str(Path(__file__).parent))

import lifecycle_matrix as matrix

from asupervisor.errors import StopRequested, WrongEventLoop
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host

SCENARIOS: dict[str, Callable[[list[str]], None]] = {}


def scenario(fn: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    SCENARIOS[fn.__name__] = fn
    return fn


class Session:
    """A small hosted block, and what happened to it."""

    def __init__(
        self,
        name: str = "subject",
        *,
        grace_secs: float = matrix.LONG_SECS,
        settle: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self.events: list[str] = []
        events = self.events

        def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
            events.append(kind)

        self._emit = emit  # not a method: that would be a cycle
        self.coordinator = Coordinator((matrix.EndOfInput,), emit=emit)
        self.grace_secs = grace_secs
        self.released = self.closed = self.settled = 0
        self.host: Host[Session] | None = None
        self._settle = settle

    def block(self, **options: Any) -> Block[Session]:
        async def startup(host: Host[Session]) -> Session:
            await asyncio.sleep(0)
            return self

        async def settle() -> None:
            if self._settle is not None:
                await self._settle()
            self.settled += 1

        async def release() -> None:
            await asyncio.sleep(0)
            self.released += 1

        def close_now() -> None:
            self.closed += 1

        def make_host() -> Host[Session]:
            self.host = Host(
                self.name,
                self.coordinator,
                startup=startup,
                settle=settle,
                release=release,
                close_now=close_now,
                stop_grace_secs=self.grace_secs,
                kill_grace_secs=matrix.KILL_SECS,
                emit=self._emit,
            )
            return self.host

        return Block(make_host, **options)

    def spawn(self, fn: Callable[..., Any], *args: Any, name: str = "service") -> Any:
        assert self.host is not None
        return self.host.spawn(name, fn, *args)


async def fails(error: BaseException, when: asyncio.Event | None = None) -> None:
    if when is not None:
        await when.wait()
    raise error


async def fails_freshly() -> None:
    raise ValueError  # no variable refers to it: that would be a cycle


async def caught(main: Callable[[], Any]) -> BaseException | None:
    try:
        await main()
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None


def ours() -> list[str]:
    """The tasks of sessions."""
    names = ("subject", "outer", "inner", "Coordinator")
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(names))


# ------------------------------------------------------------------------------------------------------------ nested


@scenario
def nested_inner_error(problems: list[str]) -> None:
    async def main() -> None:
        outer, inner, error = Session("outer"), Session("inner"), ValueError("inner")

        async def use() -> None:
            async with outer.block(), inner.block():
                inner.spawn(fails, error)
                await inner.coordinator.wait_for_stop()

        assert await caught(use) is error
        assert (outer.released, inner.released, ours()) == (1, 1, [])

    asyncio.run(main())


@scenario
def nested_outer_error(problems: list[str]) -> None:
    """The outer session cancels the body; the inner one lets its cancellation pass."""

    async def main() -> None:
        outer, inner, error = Session("outer", grace_secs=0.1), Session("inner"), ValueError("outer")

        async def use() -> None:
            async with outer.block(), inner.block():
                outer.spawn(fails, error)
                await anyio.sleep_forever()

        assert await caught(use) is error
        assert (outer.released, inner.released, ours()) == (1, 1, [])
        assert inner.settled
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await asyncio.sleep(0)

    asyncio.run(main())


@scenario
def nested_both_errors(problems: list[str]) -> None:
    """Both graces end in one moment, and both sessions cancel the same task."""

    async def main() -> None:
        outer, inner = Session("outer", grace_secs=0.1), Session("inner", grace_secs=0.1)
        first, second = ValueError("outer"), OSError("inner")

        async def use() -> None:
            async with outer.block(), inner.block():
                outer.spawn(fails, first)
                inner.spawn(fails, second)
                await anyio.sleep_forever()

        error = await caught(use)
        assert error is first, error
        assert any("inner" in note for note in error.__notes__)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await asyncio.sleep(0)
        assert (outer.released, inner.released, ours()) == (1, 1, [])

    asyncio.run(main())


@scenario
def nested_in_services(problems: list[str]) -> None:
    """A session inside a service of another one."""

    async def main() -> None:
        outer, inner, error = Session("outer"), Session("inner"), ValueError("inner")

        async def service() -> None:
            async with inner.block():
                inner.spawn(fails, error)
                await inner.coordinator.wait_for_stop()

        async def use() -> None:
            async with outer.block():
                outer.spawn(service)
                await outer.coordinator.wait_for_stop()

        assert await caught(use) is error
        assert ours() == []

    asyncio.run(main())


@scenario
def hundred_at_once(problems: list[str]) -> None:
    async def main() -> None:
        sessions = [Session(f"subject{n}", grace_secs=0.2) for n in range(100)]

        async def use(n: int, session: Session) -> str:
            async def main() -> None:
                async with session.block():
                    if n % 4 == 1:
                        session.spawn(fails, ValueError(str(n)))
                    if n % 4 == 2:
                        threading.Thread(target=session.coordinator.request_stop).start()
                    session.spawn(session.coordinator.wait_for_stop)
                    if n % 4 == 3:
                        raise KeyError(n)
                    if n % 4:
                        await anyio.sleep_forever()
                    await asyncio.sleep(0)

            return repr(await caught(main))

        outcomes = await asyncio.gather(*(use(n, session) for n, session in enumerate(sessions)))
        expected = {0: "None", 1: "ValueError('{}')", 2: "None", 3: "KeyError({})"}
        assert outcomes == [expected[n % 4].format(n) for n in range(100)], outcomes
        assert all(session.released == 1 and session.settled for session in sessions)
        assert ours() == []

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- storms


@scenario
def storm_of_threads(problems: list[str]) -> None:
    """Four threads report errors and ask for stops as fast as they can, into sessions that come and go."""
    current: list[Session] = []
    over = threading.Event()
    counts = [0] * 4
    raised: list[BaseException] = []

    def storm(n: int) -> None:
        while not over.is_set():
            time.sleep(0.0005)  # without it, the interpreter's switch interval is all that is tested
            for session in 20 * tuple(current):
                counts[n] += 1
                try:
                    session.coordinator.request_stop(OSError(str(n)) if counts[n] % 3 == 0 else None)
                except OSError as error:  # it was joined meanwhile: we get our own error back
                    raised.append(error)

    async def main() -> None:
        threads = [threading.Thread(target=storm, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(40):
                session = Session()
                error = await caught(lambda session=session: stormed(session))  # type: ignore[misc]
                assert error is None or isinstance(error, OSError | StopRequested), error
                assert session.released == 1
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert sum(counts) > 1000, counts
        assert ours() == []

    async def stormed(session: Session) -> None:
        async with session.block():
            current[:] = [session]
            session.spawn(session.coordinator.wait_for_stop)
            await session.coordinator.wait_for_stop()

    asyncio.run(main())


@scenario
def storm_of_signals(problems: list[str]) -> None:
    current: list[Session] = []
    count = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        for session in current:
            session.coordinator.request_stop(OSError("signal") if count % 5 == 0 else None)

    signal.signal(signal.SIGUSR2, handler)
    over = threading.Event()

    def storm() -> None:
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.0001)

    async def main() -> None:
        for _ in range(150):
            session = Session()
            current[:] = [session]
            error = await caught(lambda session=session: used(session))  # type: ignore[misc]
            current.clear()
            assert error is None or isinstance(error, OSError | StopRequested), error
        assert ours() == []

    async def used(session: Session) -> None:
        async with session.block():
            session.spawn(session.coordinator.wait_for_stop)
            await session.coordinator.wait_for_stop()

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
    assert count > 100, count


def interrupted_at(line: int, body: Callable[[Session], Any]) -> bool:
    """One session, with a KeyboardInterrupt raised at its n-th line of our own code; whether it came so far."""

    class Interrupt(KeyboardInterrupt):
        pass

    left = line
    where = ""

    def trace(frame: Any, what: str, argument: Any) -> Any:
        nonlocal left, where
        if "asupervisor" not in frame.f_code.co_filename.split(os.sep):
            return None
        if what == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if text.startswith(("with ", "async with ")):
                return trace  # between a block and its exit the interpreter looks at no signals
            left -= 1
            if left == 0:
                where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise Interrupt
        return trace

    session = Session(grace_secs=0.1, settle=lambda: asyncio.sleep(0))

    async def main() -> None:
        with contextlib.suppress(KeyError):
            async with session.block():
                session.spawn(session.coordinator.wait_for_stop)
                session.spawn(session.coordinator.wait_for_stop)
                await body(session)

    runner = asyncio.Runner()
    runner.get_loop()
    coroutine = main()
    came = False
    sys.settrace(trace)
    try:
        runner.run(coroutine)
    except Interrupt:
        came = True
    except BaseException as error:
        raise AssertionError(f"the interrupt in {where} became {error!r}") from error
    finally:
        sys.settrace(None)
    runner.close()
    coroutine.close()
    assert left > 0 or came, f"the interrupt in {where} was swallowed"
    if session.host is not None and session.host._main_task is not None:
        assert session.released + session.closed >= 1, f"interrupted in {where}: nothing was released"
    return came


#: Side by side, since most of the time is that of graces.
PARTS = 4


def at_every_line(name: str, body: Callable[[Session], Any]) -> None:
    """Ctrl-C at whatever line of ours: the program ends, with the interrupt, and everything is given back."""

    def interrupted_everywhere(problems: list[str], part: int) -> None:
        line = part
        while interrupted_at(line := line + PARTS, body):
            pass
        assert line > 200, line

    for part in range(1 - PARTS, 1):
        SCENARIOS[f"{name}_{part + PARTS}"] = functools.partial(interrupted_everywhere, part=part)


async def stop_with_error(session: Session) -> None:
    session.coordinator.request_stop(KeyError("reported"))
    await session.coordinator.wait_for_stop()


at_every_line("interrupt_at_every_line_of_a_clean_end", lambda session: asyncio.sleep(0))
at_every_line("interrupt_at_every_line_of_a_stop", stop_with_error)


# -------------------------------------------------------------------------------------------------- abandoned sessions


@scenario
def never_exited(problems: list[str]) -> None:
    session = Session()

    async def main() -> None:
        await session.block().__aenter__()
        session.spawn(session.coordinator.wait_for_stop)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert session.released == 1
    assert session.settled, "the teardown of a loop is one event: the last words are said"


@scenario
def teardown_cancels_everything(problems: list[str]) -> None:
    """A session in a task that nobody awaits: asyncio.run cancels it, its services and its host all at once."""
    session = Session()
    tasks = []

    async def use() -> None:
        async with session.block():
            session.spawn(session.coordinator.wait_for_stop)
            session.spawn(anyio.sleep_forever)
            await anyio.sleep_forever()

    async def main() -> None:
        tasks.append(asyncio.create_task(use()))
        while session.host is None or session.host.state != "running":
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert session.released == 1 and session.settled
    assert tasks[0].cancelled()
    assert "stop.error" not in session.events


@scenario
def closed_outside_its_loop(problems: list[str]) -> None:
    """The coroutine is destroyed while its loop stands still."""
    session = Session()

    async def use() -> None:
        async with session.block():
            session.spawn(session.coordinator.wait_for_stop)
            session.spawn(anyio.sleep_forever)
            await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    coroutine = use()
    task = loop.create_task(coroutine)

    async def until_running() -> None:
        while session.host is None or session.host.state != "running":
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(until_running())
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):
        coroutine.close()
    assert session.coordinator.should_stop()
    assert session.closed == 1

    async def until_over() -> None:
        while ours():
            await asyncio.sleep(0)

    del task
    loop.run_until_complete(asyncio.wait_for(until_over(), 20))
    loop.close()
    assert session.released == 1


@scenario
def closed_after_its_loop(problems: list[str]) -> None:
    session = Session()

    async def use() -> None:
        async with session.block():
            await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    coroutine = use()
    task = loop.create_task(coroutine)

    async def until_running() -> None:
        while session.host is None or session.host.state != "running":
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(until_running())
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    coroutine.close()
    assert session.closed == 1
    assert session.host is not None and session.host.state == "stopped"
    matrix.joining._LIVE_TASKS.clear()  # who closes a loop under its tasks has left them behind, not we
    for other in gc.get_objects():
        if isinstance(other, asyncio.Task):
            other._log_destroy_pending = False  # type: ignore[attr-defined]
    del task, other


@scenario
def left_on_another_loop(problems: list[str]) -> None:
    session = Session()
    block = session.block()
    first = asyncio.new_event_loop()
    first.run_until_complete(block.__aenter__())
    first.run_until_complete(asyncio.sleep(0))
    error = None
    try:
        asyncio.run(block.__aexit__(None, None, None))  # type: ignore[arg-type]
    except WrongEventLoop as wrong:
        error = wrong
    assert error is not None and "one event loop" in str(error)
    assert session.closed == 1

    async def until_over() -> None:
        while ours():
            await asyncio.sleep(0)

    first.run_until_complete(asyncio.wait_for(until_over(), 20))
    first.close()
    assert session.released == 1


@scenario
def left_on_another_loop_while_it_runs(problems: list[str]) -> None:
    """Entered on a loop in another thread, which goes on: there everything comes to its end all the same."""
    session = Session()
    block = session.block()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(block.__aenter__(), loop).result(20)

    async def spawn() -> None:
        session.spawn(anyio.sleep_forever)

    asyncio.run_coroutine_threadsafe(spawn(), loop).result(20)
    error = None
    try:
        asyncio.run(block.__aexit__(None, None, None))  # type: ignore[arg-type]
    except WrongEventLoop as wrong:
        error = wrong
    assert error is not None

    async def until_over() -> None:
        while ours():
            await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(until_over(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert session.released == 1


@scenario
def no_loop_of_asyncio(problems: list[str]) -> None:
    """As under trio: somebody else drives the coroutine."""
    coroutine = Session().block().__aenter__()
    try:
        coroutine.send(None)
    except WrongEventLoop as error:
        assert "trio" in str(error)
    else:
        raise AssertionError("entered without a loop")


@scenario
def used_again(problems: list[str]) -> None:
    """One coordinator, one session after the other, also on another loop; one block at a time."""
    session = Session()

    async def main() -> None:
        for n in range(3):
            block = session.block()
            async with block:
                assert not session.coordinator.should_stop()
                error = await caught(block.__aenter__)
                assert isinstance(error, RuntimeError) and "already" in str(error)
                session.coordinator.request_stop()
            assert not await block.__aexit__(None, None, None)
            assert session.released == n + 1
        assert ours() == []

    asyncio.run(main())
    session.released = 0
    asyncio.run(main())


@scenario
def many_sessions_leave_nothing(problems: list[str]) -> None:
    """Memory: what a session leaves is freed without the collector, and does not grow."""

    async def one(n: int) -> None:
        session = Session(grace_secs=0.05)

        async def use() -> None:
            async with session.block():
                session.spawn(fails_freshly if n % 2 else session.coordinator.wait_for_stop)
                await asyncio.sleep(0)

        await caught(use)
        session.host = None

    async def main() -> None:
        await one(0)
        await one(1)
        gc.collect()
        gc.disable()
        for n in range(40):
            await one(n)
        left = sum(isinstance(found, Host | Block | Session) for found in gc.get_objects())
        gc.enable()
        assert left == 0, left

    asyncio.run(main())


@scenario
def coordinator_in_a_fixture(problems: list[str]) -> None:
    """`async with Coordinator()` in a generator: the task that entered minds its own business."""

    async def main() -> None:
        overdue = asyncio.Event()

        def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
            if kind == "stop.body_runs_on":
                overdue.set()

        coordinator = Coordinator(emit=emit)

        async def fixture() -> Any:
            async with coordinator as group:
                yield group

        generator = fixture()
        entered, left = asyncio.Event(), asyncio.Event()

        async def manager() -> None:
            await anext(generator)
            entered.set()
            await left.wait()  # not cancelled here
            with contextlib.suppress(StopAsyncIteration):
                await anext(generator)

        task = asyncio.create_task(manager())
        await entered.wait()
        coordinator._group._running.stop_grace_secs = 0.05
        coordinator.request_stop()
        async with asyncio.timeout(30):
            await overdue.wait()  # its grace is over
        left.set()
        await task
        assert ours() == []

    asyncio.run(main())


def run(name: str) -> dict[str, Any]:
    problems: list[str] = []
    began = time.monotonic()
    with matrix.watched(problems):
        try:
            SCENARIOS[name](problems)
        except BaseException as error:
            problems.append("".join(traceback.format_exception(error))[-3000:])
            del error
    return {"host": "scenario", "event": name, "problems": problems, "secs": round(time.monotonic() - began, 2)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", default="*")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    chosen = [name for name in SCENARIOS if matrix.matches(name, options.events)]
    matrix.CASE_LIMIT_SECS = 110
    wrong = 0
    for result in matrix.run_forked(
        [("scenario", name, lambda name=name: run(name)) for name in chosen],  # type: ignore[misc]
        options.at_once,
    ):
        wrong += bool(result["problems"])
        print(json.dumps(result), flush=True)
    print(json.dumps({"cases": len(chosen), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONASYNCIODEBUG", None)
    sys.exit(main())
