"""Every event of a session's life in every host that it may be written in: what `test_lifecycle.py` runs.

A program of its own, not a test module: each case runs in a forked child process with a time limit, so that a hang, a
signal or a leak is that case's alone. `subject` is what is entered: a bare `Block(Host)` without TensorFlow
(`BlockSubject`), or a real session (see `lifecycle_supervisor.py`).

Nothing here waits for luck. Events order everything; the only times that pass are the graces themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import gc
import importlib.util
import json
import math
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from asupervisor.runtime import joining
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host
from asupervisor.runtime.looper import LooperTask

GRACE_SECS = 0.15
KILL_SECS = 0.15
LONG_SECS = 3600.0  # a grace that must not be used up: who does hangs, and is ended by the limit
CASE_LIMIT_SECS = 90


class EndOfInput(Exception):
    """A clean end."""


class Outcome(BaseException):
    """Like pytest's own exceptions: no `Exception`."""


def describe(error: BaseException | None) -> str:
    return "ok" if error is None else type(error).__name__


# ---------------------------------------------------------------------------------------------------- the subject


class Value:
    """What the block yields; usable until it is released."""

    def __init__(self) -> None:
        self.released = False

    def use(self) -> None:
        assert not self.released, "the value was released while it was in use"


class BlockSubject:
    """A bare hosted block."""

    name = "subject"
    kind = "block"
    counts = True  # how often it settles and releases

    def __init__(self, ctl: Ctl) -> None:
        self.ctl = ctl
        self.coordinator = Coordinator((EndOfInput,), emit=ctl.emit)
        self.host: Host[Value] | None = None

    def block(self) -> Any:
        ctl = self.ctl
        event = ctl.event

        async def startup(host: Host[Value]) -> Value:
            if event.startup is not None:
                await event.startup(ctl)
            value = Value()
            ctl.refs.append(weakref.ref(value))
            ctl.value = weakref.proxy(value)
            return value

        async def settle() -> None:
            ctl.settled += 1
            if event.settle is not None:
                await event.settle(ctl)

        async def release() -> None:
            ctl.released += 1
            if ctl.refs and (value := ctl.refs[0]()) is not None:
                value.released = True
            if event.release is not None:
                await event.release(ctl)

        def close_now() -> None:
            ctl.released += 1

        def make_host() -> Host[Value]:
            self.host = host = Host(
                self.name,
                self.coordinator,
                startup=startup,
                settle=settle,
                release=release,
                close_now=close_now,
                stop_grace_secs=event.grace_secs,
                kill_grace_secs=KILL_SECS,
                emit=ctl.emit,
            )
            ctl.refs.append(weakref.ref(host))
            return host

        return Block(make_host)

    def own_task(self, name: str) -> bool:
        return name.startswith((f"{self.name}-", f"{self.name}:"))

    def spawn(self, name: str, fn: Callable[[Ctl], Awaitable[Any]], **options: Any) -> Any:
        assert self.host is not None
        return self.host.spawn(name, fn, self.ctl, **options)

    def loop(self, target: Callable[[], Any]) -> None:
        assert self.host is not None
        looper = LooperTask(self.coordinator, 60, target)
        self.host.spawn(looper.name, looper.run)

    def request_stop(self, ex: Any = None) -> None:
        self.coordinator.request_stop(ex)

    def should_stop(self) -> bool:
        return self.coordinator.should_stop()

    async def wait_for_stop(self) -> None:
        await self.coordinator.wait_for_stop()

    async def stop(self) -> None:
        assert self.host is not None
        await self.host.stop()

    async def use(self) -> None:
        self.ctl.value.use()

    def end_of_input(self) -> BaseException:
        return EndOfInput("the end")

    def forget(self) -> None:
        self.host = None

    def excused(self, problems: list[str]) -> list[str]:
        return problems


# -------------------------------------------------------------------------------------------------- one case's state


class Ctl:
    """What one case does and sees."""

    def __init__(self, event: Event, host: HostSpec, subject_class: Any) -> None:
        self.event = event
        self.host = host
        self.began = time.monotonic()
        self.body = "not started"
        self.block = "not entered"
        self.seen = "nothing"
        self.block_error: BaseException | None = None
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.events: list[tuple[str, str, str]] = []
        self.refs: list[weakref.ref[Any]] = []
        self.value: Any = None
        self.settled = self.released = 0
        self.outer: Callable[[], Any] = self._no_outer
        self.interrupts = 0
        self.threads: list[threading.Thread] = []
        self.let_threads_go = threading.Event()
        self.scope_caught: bool | None = None
        self.host_name = ""
        self.subject = subject_class(self)
        self.on_signal: Callable[[], None] | None = None
        self.prepared = False

    def prepare(self) -> None:
        """On the loop, before anything is entered."""
        if self.prepared:
            return
        self.prepared = True
        self.loop = asyncio.get_running_loop()
        self.body_runs = asyncio.Event()
        self.elsewhere = asyncio.Event()
        self.let_go = asyncio.Event()
        self.body_task: asyncio.Task[Any] | None = None
        self.loop.set_exception_handler(self.on_loop_message)

    def on_loop_message(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problem(f"loop exception handler: {context.get('message')} {context.get('exception')!r}")

    def _no_outer(self) -> None:
        self.problem("this event has nothing around it")

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def emit(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append((kind, level, message))
        if kind == "stop.body_runs_on":
            self.elsewhere.set()

    def told(self, kind: str) -> bool:
        return any(kind == told for told, _, _ in self.events)

    def in_thread(self, fn: Callable[..., Any], *args: Any) -> None:
        thread = threading.Thread(target=fn, args=args, daemon=True)
        self.threads.append(thread)
        thread.start()

    def secs(self) -> float:
        return time.monotonic() - self.began

    def enter(self) -> Observed:
        self.prepare()
        return Observed(self)

    # what the body's side does between enter and exit
    def use(self) -> None:
        for name, fn in self.event.services:
            self.subject.spawn(name, fn)
        if self.event.use is not None:
            self.event.use(self)

    async def run_body(self) -> None:
        self.body, self.body_task = "running", asyncio.current_task()
        try:
            self.use()
            self.body_runs.set()
            await self.event.body(self)
        except BaseException as error:
            self.body = describe(error)
            raise
        else:
            self.body = "finished"

    async def run_body_elsewhere(self) -> None:
        """Where an exception of the body does not pass through the block."""
        try:
            await around(self, self.run_body)
        except (Exception, asyncio.CancelledError, Outcome) as error:
            self.seen = describe(error)
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()


class Observed:
    """The block, watched: what leaves it, and what it leaves behind. Delegates, as a user's own class would."""

    def __init__(self, ctl: Ctl) -> None:
        self.ctl = ctl
        self.inner = ctl.subject.block()

    async def __aenter__(self) -> Any:
        ctl = self.ctl
        try:
            value = await self.inner.__aenter__()
        except BaseException as error:
            self.left(error)
            raise
        ctl.block = "entered"
        return value

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> Any:
        try:
            swallowed = await self.inner.__aexit__(kind, error, trace)
        except BaseException as raised:
            self.left(raised)
            raise
        else:
            self.left(None if swallowed else error)
            return swallowed
        finally:
            del error, trace

    def left(self, error: BaseException | None) -> None:
        ctl = self.ctl
        ctl.block = describe(error)
        ctl.block_at = ctl.secs()
        ctl.block_error = error
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        pending = {task.get_name() for task in asyncio.all_tasks(loop) if not task.done()}
        left = sorted(name for name in pending if ctl.subject.own_task(name))
        stragglers = {name for name in left if name.rpartition(":")[2] in ctl.event.stragglers}
        expected = stragglers | ({f"{ctl.subject.name}-host"} if stragglers else set())
        if set(left) - expected:
            ctl.problem(f"tasks left behind: {left}")
        # What was left behind on purpose ends now.
        loop.call_later(0.02, ctl.let_go.set)
        ctl.let_threads_go.set()


# --------------------------------------------------------------------------------------------------------- the events


@dataclass(frozen=True)
class Event:
    """One thing that happens, and what must leave the block.

    `expect` is what leaves it where the body's exceptions pass through it, `split` where the body runs elsewhere.
    """

    body: Callable[[Ctl], Awaitable[Any]]
    expect: str
    split: str | None = None
    services: Sequence[tuple[str, Callable[[Ctl], Awaitable[Any]]]] = ()
    use: Callable[[Ctl], None] | None = None
    startup: Callable[[Ctl], Awaitable[None]] | None = None
    settle: Callable[[Ctl], Awaitable[None]] | None = None
    release: Callable[[Ctl], Awaitable[None]] | None = None
    wrap: str | None = None
    around: bool = False  # what is around the block must reach the enter or the exit
    attached: bool = False  # makes sense only where the body may be cancelled
    signals: bool = False  # raises KeyboardInterrupt: for hosts whose loop runs in the main thread, by asyncio.Runner
    blocks: tuple[str, ...] = ("block", "supervisor")
    stragglers: frozenset[str] = frozenset()
    grace_secs: float = LONG_SECS
    check: Callable[[Ctl], list[str]] | None = None
    skips_settle: bool = False
    freed: bool = True
    name: str = ""


EVENTS: dict[str, Event] = {}


def event(name: str, body: Callable[[Ctl], Awaitable[Any]], expect: str, **options: Any) -> None:
    EVENTS[name] = Event(body, expect, name=name, **options)


def expecting(*conditions: tuple[str, Callable[[Ctl], Any]]) -> Callable[[Ctl], list[str]]:
    return lambda ctl: [text for text, condition in conditions if not condition(ctl)]


def told(kind: str) -> tuple[str, Callable[[Ctl], bool]]:
    return (f"no event {kind}", lambda ctl: ctl.told(kind))


def noted(text: str) -> tuple[str, Callable[[Ctl], bool]]:
    return (f"not noted: {text}", lambda ctl: text in ctl.notes)


def has_note(text: str) -> tuple[str, Callable[[Ctl], bool]]:
    return (
        f"no note about {text}",
        lambda ctl: any(text in note for note in getattr(ctl.block_error, "__notes__", ())),
    )


# bodies


async def quick(c: Ctl) -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def polls(c: Ctl) -> None:
    while not c.subject.should_stop():
        await asyncio.sleep(0.005)


async def waits_elsewhere(c: Ctl) -> None:
    await c.elsewhere.wait()


async def raises(c: Ctl) -> None:
    await asyncio.sleep(0)
    raise KeyError("body")


async def raises_eof(c: Ctl) -> None:
    await asyncio.sleep(0)
    raise c.subject.end_of_input()


async def raises_outcome(c: Ctl) -> None:
    raise Outcome("body")


async def raises_stop_iteration(c: Ctl) -> None:
    await asyncio.sleep(0)
    await c.subject.wait_for_stop()


async def raises_after_stop(c: Ctl) -> None:
    await c.subject.wait_for_stop()
    raise KeyError("body")


async def outer_strikes(c: Ctl) -> None:
    c.loop.call_soon(c.outer)
    await c.elsewhere.wait()


# services


async def polite(c: Ctl) -> None:
    await c.subject.wait_for_stop()


async def forever(c: Ctl) -> None:
    await anyio.sleep_forever()


def crashes(error: Callable[[], BaseException]) -> Callable[[Ctl], Awaitable[None]]:
    async def crash(c: Ctl) -> None:
        await c.body_runs.wait()
        raise error()

    return crash


def crashes_at_stop(error: Callable[[], BaseException]) -> Callable[[Ctl], Awaitable[None]]:
    async def crash(c: Ctl) -> None:
        await c.subject.wait_for_stop()
        raise error()

    return crash


async def ends_input(c: Ctl) -> None:
    await c.body_runs.wait()
    raise c.subject.end_of_input()


async def zombie(c: Ctl) -> None:
    while not c.let_go.is_set():
        try:
            with anyio.CancelScope(shield="cancelled" in c.notes):
                await c.let_go.wait()
        except asyncio.CancelledError:
            c.note("cancelled")


async def outer_in_exit(c: Ctl) -> None:
    await c.subject.wait_for_stop()
    c.outer()
    await anyio.sleep_forever()


P = ("polite", polite)


def ValueError_() -> BaseException:
    return ValueError("service")


event("clean", quick, "ok", services=[P])
event("clean_no_services", quick, "ok")
event("clean_service_ignores_stop", quick, "ok", services=[P, ("forever", forever)], grace_secs=GRACE_SECS)
event(
    "clean_service_to_be_cancelled",
    quick,
    "ok",
    use=lambda c: c.subject.spawn("forever", forever, on_stop="cancel"),
    blocks=("block",),
)
event("body_error", raises, "KeyError", split="ok", services=[P])
event("body_end_of_input", raises_eof, "ok", services=[P])
event("body_outcome", raises_outcome, "Outcome", split="ok", services=[P])

event(
    "service_error_body_elsewhere",
    waits_elsewhere,
    "ValueError",
    services=[P, ("bad", crashes(ValueError_))],
    grace_secs=GRACE_SECS,
)
event("service_error_body_polls", polls, "ValueError", services=[P, ("bad", crashes(ValueError_))])
event("service_end_of_input", polls, "ok", services=[P, ("end", ends_input)], check=expecting(told("stop.clean")))
event("service_outcome", polls, "Outcome", services=[P, ("bad", crashes(lambda: Outcome("service")))])
event(
    "service_cancelled_error",
    polls,
    "RuntimeError",
    services=[P, ("bad", crashes(lambda: asyncio.CancelledError("of its own")))],
)
event(
    "service_stop_iteration",
    polls,
    "RuntimeError",
    services=[P, ("bad", crashes(lambda: StopIteration("service")))],
)
event(
    "two_service_errors",
    polls,
    "ValueError",
    services=[("bad", crashes(ValueError_)), ("worse", crashes_at_stop(lambda: OSError("second")))],
    check=expecting(has_note("worse failed, too"), told("stop.further_error")),
)
event(
    "service_then_body_error",
    raises_after_stop,
    "ValueError",
    services=[("bad", crashes(ValueError_))],
    check=lambda c: expecting(has_note("the body failed, too"))(c) if c.host.passes else [],
)
event(
    "body_then_service_error",
    raises,
    "KeyError",
    split="ValueError",
    services=[("bad", crashes_at_stop(ValueError_))],
    check=lambda c: expecting(has_note("bad failed, too"))(c) if c.host.passes else [],
)


def uncritical(c: Ctl) -> None:
    c.service = c.subject.spawn("bad", crashes(ValueError_), critical=False)  # type: ignore[attr-defined]


async def awaits_uncritical(c: Ctl) -> None:
    await c.service  # type: ignore[attr-defined]
    assert not c.subject.should_stop()
    await quick(c)


event(
    "uncritical_service_error",
    awaits_uncritical,
    "ok",
    services=[P],
    use=uncritical,
    blocks=("block",),
    check=expecting(told("service.failed")),
)

# requested stops
event("stop_by_body", lambda c: (c.subject.request_stop(), polls(c))[1], "ok", services=[P])
event("stop_by_body_error", lambda c: (c.subject.request_stop(OSError("x")), polls(c))[1], "OSError", services=[P])
event("stop_by_thread", polls, "ok", services=[P], use=lambda c: c.in_thread(c.subject.request_stop))
event(
    "stop_by_thread_error",
    polls,
    "OSError",
    services=[P],
    use=lambda c: c.in_thread(c.subject.request_stop, OSError("from a thread")),
)
event(
    "stop_by_thread_wait",
    lambda c: c.subject.wait_for_stop(),
    "ok",
    services=[P],
    use=lambda c: c.in_thread(c.subject.request_stop),
)


def with_exc_info(c: Ctl) -> None:
    try:
        raise OSError("raised")
    except OSError:
        c.subject.request_stop(sys.exc_info())


event("stop_by_exc_info", polls, "OSError", services=[P], use=lambda c: c.in_thread(with_exc_info, c))


def by_signal(error: BaseException | None) -> Callable[[Ctl], None]:
    def use(c: Ctl) -> None:
        c.on_signal = lambda: c.subject.request_stop(error)
        c.in_thread(os.kill, os.getpid(), signal.SIGUSR1)

    return use


event("stop_by_signal", polls, "ok", services=[P], use=by_signal(None))
event("stop_by_signal_wait", lambda c: c.subject.wait_for_stop(), "ok", services=[P], use=by_signal(None))
event("stop_by_signal_error", polls, "OSError", services=[P], use=by_signal(OSError("from a signal handler")))
event(
    "clean_stop_then_body_error",
    lambda c: (c.subject.request_stop(c.subject.end_of_input()), raises(c))[1],
    "KeyError",
    split="ok",
    services=[P],
)
event(
    "clean_stop_then_service_error",
    lambda c: (c.subject.request_stop(c.subject.end_of_input()), polls(c))[1],
    "ValueError",
    services=[("bad", crashes_at_stop(ValueError_))],
)
event(
    "plain_stop_then_service_error",
    lambda c: (c.subject.request_stop(), polls(c))[1],
    "ValueError",
    services=[("bad", crashes_at_stop(ValueError_))],
)

# bodies that do not stop
event(
    "body_ignores_stop",
    waits_elsewhere,
    "ok",
    services=[P],
    use=lambda c: c.subject.request_stop(),
    grace_secs=GRACE_SECS,
    check=lambda c: [] if (c.body == "CancelledError") == c.host.attached else [f"body: {c.body}"],
)


async def swallows_cancel(c: Ctl) -> None:
    c.subject.request_stop()
    try:
        await c.elsewhere.wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)


async def replaces_cancel(c: Ctl) -> None:
    c.subject.request_stop()
    try:
        await c.elsewhere.wait()
    except asyncio.CancelledError:
        raise KeyError("instead") from None


async def cancelled_in_groups(c: Ctl) -> None:
    c.subject.request_stop()
    async with asyncio.timeout(60), asyncio.TaskGroup() as native:
        native.create_task(asyncio.sleep(50))
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 50)
            with anyio.CancelScope():
                await asyncio.sleep(50)


event("body_swallows_cancel", swallows_cancel, "ok", services=[P], grace_secs=GRACE_SECS)
event("body_replaces_cancel", replaces_cancel, "KeyError", services=[P], grace_secs=GRACE_SECS, attached=True)
event("body_cancelled_in_groups", cancelled_in_groups, "ok", services=[P], grace_secs=GRACE_SECS, attached=True)

# what is around the block
for wrap in ("cancel", "timeout", "anyio", "fail_after"):
    event(f"outer_{wrap}", outer_strikes, "CancelledError", split="ok", services=[P], wrap=wrap)
    event(
        f"outer_{wrap}_service_ignores",
        outer_strikes,
        "CancelledError",
        services=[P, ("forever", forever)],
        wrap=wrap,
        around=True,
    )
    event(
        f"outer_{wrap}_stuck_service",
        outer_strikes,
        "CancelledError",
        services=[P, ("zombie", zombie)],
        wrap=wrap,
        around=True,
        stragglers=frozenset({"zombie"}),
    )

    async def strikes_in_startup(c: Ctl) -> None:
        c.loop.call_soon(c.outer)
        await anyio.sleep_forever()

    event(f"enter_{wrap}", quick, "CancelledError", startup=strikes_in_startup, wrap=wrap, around=True)
    event(f"exit_{wrap}", quick, "CancelledError", services=[P, ("strikes", outer_in_exit)], wrap=wrap, around=True)
    event(
        f"body_error_exit_{wrap}",
        raises,
        "KeyError",
        services=[P, ("strikes", outer_in_exit)],
        wrap=wrap,
        around=True,
    )
    event(
        f"end_of_input_exit_{wrap}",
        raises_eof,
        "CancelledError",
        services=[P, ("strikes", outer_in_exit)],
        wrap=wrap,
        around=True,
    )

    async def strikes_after_service(c: Ctl) -> None:
        await c.subject.wait_for_stop()
        c.loop.call_soon(c.outer)
        await c.elsewhere.wait()

    event(
        f"service_error_then_{wrap}",
        strikes_after_service,
        "ValueError",
        services=[("bad", crashes(ValueError_))],
        wrap=wrap,
    )

    async def fails_when_cancelled(c: Ctl) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("service")

    event(
        f"{wrap}_then_service_error",
        outer_strikes,
        "CancelledError",
        split="ValueError",
        services=[("bad", fails_when_cancelled)],
        grace_secs=LONG_SECS if wrap else 0,
        wrap=wrap,
        around=True,
        check=expecting(told("stop.error_not_raised")),
    )


async def same_tick(c: Ctl) -> None:
    """Our own cancellation and the outer one fall into one turn of the loop."""
    inner = c.subject.host.on_body_overdue

    def both() -> None:
        inner()
        c.outer()

    c.subject.host.on_body_overdue = both
    c.subject.request_stop()
    await c.elsewhere.wait()


async def same_tick_outer_first(c: Ctl) -> None:
    inner = c.subject.host.on_body_overdue

    def both() -> None:
        c.outer()
        inner()

    c.subject.host.on_body_overdue = both
    c.subject.request_stop()
    await c.elsewhere.wait()


for wrap in ("cancel", "timeout", "anyio"):
    for body in (same_tick, same_tick_outer_first):
        event(
            f"{body.__name__}_{wrap}",
            body,
            "CancelledError",
            services=[P],
            wrap=wrap,
            around=True,
            attached=True,
            grace_secs=GRACE_SECS,
        )


async def many_cancels(c: Ctl) -> None:
    """Forty cancellations of the exit, and a service that heeds none."""
    await c.subject.wait_for_stop()
    for n in range(40):
        c.loop.call_later(0.004 * n, c.outer)
    await zombie(c)


event(
    "forty_cancels_in_exit",
    quick,
    "CancelledError",
    services=[("zombie", many_cancels)],
    wrap="cancel",
    around=True,
    stragglers=frozenset({"zombie"}),
    skips_settle=True,
)


async def two_strikes(c: Ctl) -> None:
    c.loop.call_soon(c.outer)
    try:
        await anyio.sleep_forever()
    finally:
        c.outer()


event("enter_two_cancels", quick, "CancelledError", startup=two_strikes, wrap="cancel", around=True)


# the startup
async def bad_startup(c: Ctl) -> None:
    await asyncio.sleep(0)
    raise LookupError("startup")


async def eof_startup(c: Ctl) -> None:
    await asyncio.sleep(0)
    raise c.subject.end_of_input()


async def stopped_startup(c: Ctl) -> None:
    c.subject.request_stop()
    await anyio.sleep_forever()


async def stopped_by_thread_startup(c: Ctl) -> None:
    c.in_thread(c.subject.request_stop)
    await anyio.sleep_forever()


async def stopped_with_error_startup(c: Ctl) -> None:
    c.in_thread(c.subject.request_stop, OSError("from a thread"))
    await anyio.sleep_forever()


async def stopped_startup_fails(c: Ctl) -> None:
    c.subject.request_stop(OSError("first"))
    try:
        await anyio.sleep_forever()
    finally:
        raise LookupError("startup")


async def deaf_startup(c: Ctl) -> None:
    c.subject.request_stop()
    with anyio.CancelScope(shield=True):
        await c.let_go.wait()


async def startup_service_fails(c: Ctl) -> None:
    c.subject.spawn("bad", crashes(ValueError_))
    c.body_runs.set()
    await anyio.sleep_forever()


event("startup_error", quick, "LookupError", startup=bad_startup)
event("startup_end_of_input", quick, "EndOfInput", startup=eof_startup)
event("startup_stopped", quick, "StopRequested", startup=stopped_startup)
event("startup_stopped_by_thread", quick, "StopRequested", startup=stopped_by_thread_startup)
event("startup_stopped_with_error", quick, "OSError", startup=stopped_with_error_startup)
event(
    "startup_stopped_with_end_of_input",
    quick,
    "StopRequested",
    startup=lambda c: (c.subject.request_stop(c.subject.end_of_input()), anyio.sleep_forever())[1],
)
event(
    "startup_stopped_and_failing",
    quick,
    "OSError",
    startup=stopped_startup_fails,
    blocks=("block",),
    check=expecting(has_note("start of")),
)
event(
    "startup_deaf",
    quick,
    "StopGraceExceeded",
    startup=deaf_startup,
    stragglers=frozenset({"subject-host"}),
    blocks=("block",),
)
event("startup_service_error", quick, "ValueError", startup=startup_service_fails, blocks=("block",))

# services that do not stop
event(
    "zombie_after_success",
    quick,
    "ok",
    services=[P, ("zombie", zombie)],
    grace_secs=GRACE_SECS,
    stragglers=frozenset({"zombie"}),
    check=expecting(told("stop.left_running")),
)
event(
    "zombie_after_stop",
    lambda c: (c.subject.request_stop(), polls(c))[1],
    "StopGraceExceeded",
    services=[P, ("zombie", zombie)],
    grace_secs=GRACE_SECS,
    stragglers=frozenset({"zombie"}),
    check=expecting(("zombie is not named", lambda c: "zombie" in getattr(c.block_error, "services", ()))),
)
event(
    "zombie_and_body_error",
    raises,
    "KeyError",
    split="ok",
    services=[P, ("zombie", zombie)],
    grace_secs=GRACE_SECS,
    stragglers=frozenset({"zombie"}),
    check=expecting(told("stop.left_running")),
)


def stuck_loop(c: Ctl) -> None:
    entered = threading.Event()

    def stuck() -> None:
        entered.set()
        c.let_threads_go.wait()

    c.thread_entered = entered  # type: ignore[attr-defined]
    c.subject.loop(stuck)


async def until_thread_is_stuck(c: Ctl) -> None:
    while not c.thread_entered.is_set():  # type: ignore[attr-defined]
        await asyncio.sleep(0.002)


async def stops_with_stuck_thread(c: Ctl) -> None:
    await until_thread_is_stuck(c)
    c.subject.request_stop()


event(
    "thread_stuck_after_success",
    until_thread_is_stuck,
    "ok",
    services=[P],
    use=stuck_loop,
    grace_secs=GRACE_SECS,
    stragglers=frozenset({"loop-stuck"}),
    check=expecting(told("stop.left_running")),
)
event(
    "thread_stuck_after_stop",
    stops_with_stuck_thread,
    "StopGraceExceeded",
    services=[P],
    use=stuck_loop,
    grace_secs=GRACE_SECS,
    stragglers=frozenset({"loop-stuck"}),
    check=expecting(("the loop is not named", lambda c: "stuck" in str(c.block_error))),
)


def short_loop(c: Ctl) -> None:
    c.subject.loop(lambda: c.note("called"))


event("loop_in_thread", lambda c: until_noted(c, "called"), "ok", services=[P], use=short_loop)


async def until_noted(c: Ctl, text: str) -> None:
    while text not in c.notes:
        await asyncio.sleep(0.002)


# stop()
async def stops_from_body(c: Ctl) -> None:
    await c.subject.stop()
    assert c.settled == 1 or not c.subject.counts
    await c.subject.use()
    await asyncio.sleep(2 * GRACE_SECS)  # past the grace: who has called stop() knows what they do
    await c.subject.use()


async def stops_from_service(c: Ctl) -> None:
    await c.body_runs.wait()
    await c.subject.stop()
    await c.subject.use()
    c.note("stopped")
    await asyncio.sleep(0)
    c.note("service ended")


async def uses_value_after_stop(c: Ctl) -> None:
    await until_noted(c, "stopped")
    await c.subject.use()


async def slow_after_stop(c: Ctl) -> None:
    await c.body_runs.wait()
    await c.subject.stop()
    c.note("stopped")
    await asyncio.sleep(0.05)  # within its grace
    c.note("service ended")


event("stop_from_body", stops_from_body, "ok", services=[P], grace_secs=GRACE_SECS)
event(
    "stop_from_service",
    uses_value_after_stop,
    "ok",
    services=[P, ("stops", stops_from_service)],
    check=expecting(noted("service ended")),
)
event(
    "stop_from_slow_service",
    uses_value_after_stop,
    "ok",
    services=[P, ("stops", slow_after_stop)],
    check=expecting(noted("service ended")),
)
event(
    "stop_from_service_body_ignores",
    waits_elsewhere,
    "ok",
    services=[P, ("stops", stops_from_service)],
    grace_secs=GRACE_SECS,
)
event("stop_with_error", stops_from_body, "OSError", services=[("bad", crashes_at_stop(lambda: OSError("x")))])


async def fails_after_stop(c: Ctl) -> None:
    await c.subject.stop()
    raise KeyError("body")


event("stop_then_body_error", fails_after_stop, "KeyError", split="ok", services=[P])


# last words
async def failing_words(c: Ctl) -> None:
    raise OSError("disk full")


async def endless_words(c: Ctl) -> None:
    await anyio.sleep_forever()


async def struck_words(c: Ctl) -> None:
    """A second cancellation, distinctly later than the first."""
    c.loop.call_later(0.4, c.outer)
    await anyio.sleep_forever()


async def slow_words(c: Ctl) -> None:
    await asyncio.sleep(0.05)
    c.note("settled")


event("settle_fails", quick, "OSError", services=[P], settle=failing_words, blocks=("block",))
event(
    "settle_fails_after_body_error",
    raises,
    "KeyError",
    split="OSError",
    services=[P],
    settle=failing_words,
    blocks=("block",),
    check=lambda c: expecting(has_note("final save failed, too"))(c) if c.host.passes else [],
)
event("settle_fails_after_clean_stop", raises_eof, "OSError", services=[P], settle=failing_words, blocks=("block",))
event(
    "settle_endless",
    quick,
    "ok",
    services=[P],
    settle=endless_words,
    grace_secs=GRACE_SECS,
    blocks=("block",),
    check=expecting(told("stop.overrun")),
)
for wrap in ("cancel", "anyio", "timeout"):
    event(
        f"settle_after_{wrap}",
        outer_strikes,
        "CancelledError",
        split="ok",
        services=[P],
        settle=slow_words,
        wrap=wrap,
        blocks=("block",),
        check=expecting(noted("settled")),
    )
event(
    "settle_skipped_by_second_cancel",
    outer_strikes,
    "CancelledError",
    services=[P],
    settle=struck_words,
    wrap="cancel",
    around=True,
    blocks=("block",),
    check=expecting(told("stop.skipped")),
)
event("release_fails", quick, "OSError", services=[P], release=failing_words, blocks=("block",))
event(
    "release_endless",
    quick,
    "ok",
    services=[P],
    release=endless_words,
    blocks=("block",),
    check=expecting(told("stop.overrun")),
)


async def struck_release(c: Ctl) -> None:
    """Cancellations by the dozen: who is impatient may skip the last words, but nothing stays unreleased."""
    struck = asyncio.Event()

    def strike(left: int) -> None:
        c.outer()
        if left:
            c.loop.call_soon(strike, left - 1)
        else:
            struck.set()

    c.loop.call_later(0.25, strike, 12)  # distinctly later than the first one
    await struck.wait()
    c.note("released")


event(
    "release_is_never_skipped",
    outer_strikes,
    "CancelledError",
    services=[P],
    release=struck_release,
    wrap="cancel",
    around=True,
    blocks=("block",),
    check=expecting(noted("released")),
)


# interrupts
def press_ctrl_c(c: Ctl) -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def ctrl_c(c: Ctl) -> None:
    c.loop.call_soon(press_ctrl_c, c)
    await c.elsewhere.wait()


async def ctrl_c_zombie(c: Ctl) -> None:
    c.loop.call_later(0.5, press_ctrl_c, c)
    await zombie(c)


async def ctrl_c_words(c: Ctl) -> None:
    c.note("settling")
    c.loop.call_later(0.4, press_ctrl_c, c)
    await anyio.sleep_forever()


async def raises_keyboard_interrupt(c: Ctl) -> None:
    raise KeyboardInterrupt


async def raises_system_exit(c: Ctl) -> None:
    raise SystemExit(3)


async def interrupted_service(c: Ctl) -> None:
    await c.body_runs.wait()
    raise KeyboardInterrupt


event("ctrl_c", ctrl_c, "CancelledError", services=[P, ("forever", forever)], signals=True)
event(
    "ctrl_c_twice",
    ctrl_c,
    "CancelledError",
    services=[P, ("zombie", ctrl_c_zombie)],
    signals=True,
    stragglers=frozenset({"zombie"}),
    skips_settle=True,
)
event(
    "ctrl_c_twice_skips_settle",
    ctrl_c,
    "CancelledError",
    services=[P],
    settle=ctrl_c_words,
    signals=True,
    blocks=("block",),
    check=expecting(noted("settling"), told("stop.skipped")),
)
event(
    "ctrl_c_settles",
    ctrl_c,
    "CancelledError",
    services=[P],
    settle=slow_words,
    signals=True,
    blocks=("block",),
    check=expecting(noted("settled")),
)
event("body_keyboard_interrupt", raises_keyboard_interrupt, "KeyboardInterrupt", services=[P], signals=True)
event("body_system_exit", raises_system_exit, "SystemExit", services=[P], signals=True)
event(
    "service_keyboard_interrupt",
    waits_elsewhere,
    "CancelledError",
    services=[("bad", interrupted_service)],
    signals=True,
    blocks=("block",),
)


# cancelled from outside
async def cancels(c: Ctl, *parts: str) -> None:
    for task in asyncio.all_tasks():
        if c.subject.own_task(task.get_name()) and any(part in task.get_name() for part in parts):
            task.cancel()


async def cancels_service(c: Ctl) -> None:
    await asyncio.sleep(0)
    await cancels(c, ":polite")
    await polls(c)


async def cancels_host(c: Ctl) -> None:
    await asyncio.sleep(0)
    await cancels(c, "-host")
    await polls(c)


async def cancels_closer(c: Ctl) -> None:
    await asyncio.sleep(0)
    await cancels(c, "-closer")
    await polls(c)


async def cancels_all_of_ours(c: Ctl) -> None:
    await asyncio.sleep(0)
    await cancels(c, "")
    await polls(c)


async def cancels_service_record(c: Ctl) -> None:
    service = c.subject.spawn("one", forever)
    await asyncio.sleep(0)
    service.cancel()
    await service
    assert not c.subject.should_stop()


event("service_cancelled_outside", cancels_service, "RuntimeError", services=[P])
event("service_cancelled_by_record", cancels_service_record, "ok", services=[P])
event("host_cancelled", cancels_host, "ok", services=[P])
event("closer_cancelled", cancels_closer, "ok", services=[P, ("forever", forever)])
event("all_cancelled", cancels_all_of_ours, "ok", services=[("forever", forever)])


# a loop that stood still
async def stands_still(c: Ctl) -> None:
    await asyncio.sleep(0)
    c.subject.request_stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(GRACE_SECS + 0.5)


async def needs_time(c: Ctl) -> None:
    await c.subject.wait_for_stop()
    await asyncio.sleep(0.03)
    c.note("had its grace")


event(
    "loop_stood_still",
    stands_still,
    "ok",
    services=[P, ("slow", needs_time)],
    grace_secs=GRACE_SECS,
    check=expecting(noted("had its grace")),
)


# ---------------------------------------------------------------------------------------------------------- the hosts


async def around(c: Ctl, inner: Callable[[], Awaitable[None]]) -> None:
    """What is around the block, or around the body where the block is entered elsewhere."""
    task = asyncio.current_task()
    assert task is not None
    wrap = c.event.wrap
    try:
        if wrap == "timeout":
            async with asyncio.timeout(None) as timeout:
                c.outer = lambda: timeout.reschedule(c.loop.time())
                await inner()
        elif wrap == "anyio":
            with anyio.CancelScope() as scope:
                c.outer = scope.cancel
                await inner()
            c.scope_caught = scope.cancelled_caught
        elif wrap == "fail_after":
            with anyio.fail_after(None) as scope:
                c.outer = lambda: setattr(scope, "deadline", -math.inf)
                await inner()
        else:
            if wrap == "cancel":
                c.outer = task.cancel
            await inner()
    finally:
        strikes = task.cancelling()
        if strikes and wrap != "cancel" and not c.event.signals:
            c.problem(f"Task.cancelling() is {strikes} after the block")
        if wrap != "cancel" and not c.event.signals:
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                c.problem("a stray CancelledError after the block")


async def enter_and_use(c: Ctl) -> None:
    async with c.enter():
        await c.run_body()


@dataclass(frozen=True)
class HostSpec:
    """One place where a session is written.

    `passes`: the body's exceptions pass through the block. `attached`: the body may be cancelled. `around`: enter and
    exit can be cancelled from around. `main`: an asyncio.Runner in the main thread, so that Ctrl-C comes as it should.
    `freed`: nothing but us could keep the value alive.
    """

    run: Callable[[Ctl], None]
    passes: bool = True
    attached: bool = False
    around: bool = True
    main: bool = False
    freed: bool = False
    native_cancel: bool = True  # a plain Task.cancel() of the test does not destroy the host itself
    needs: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    agen: bool = False
    name: str = ""


HOSTS: dict[str, HostSpec] = {}


def host(**traits: Any) -> Callable[[Callable[[Ctl], None]], Callable[[Ctl], None]]:
    def register(run: Callable[[Ctl], None]) -> Callable[[Ctl], None]:
        name = run.__name__.removeprefix("host_")
        HOSTS[name] = HostSpec(run, name=name, **traits)
        return run

    return register


def run(c: Ctl, main: Callable[[], Awaitable[None]], **options: Any) -> None:
    failed: list[Exception] = []

    async def prepared() -> None:
        c.prepare()
        try:
            await main()
        except Exception as error:
            failed.append(error)  # not through the Runner: its frame refers to the task, and the task to the error

    with asyncio.Runner(**options) as runner:
        runner.run(prepared())
    try:
        if failed:
            raise failed.pop()
    finally:
        failed.clear()


INLINE = {"attached": True, "main": True, "freed": True}


@host(**INLINE)
def host_plain(c: Ctl) -> None:
    run(c, lambda: around(c, lambda: enter_and_use(c)))


@host(**INLINE)
def host_debug(c: Ctl) -> None:
    run(c, lambda: around(c, lambda: enter_and_use(c)), debug=True)


@host(**INLINE, needs=("uvloop",))
def host_uvloop(c: Ctl) -> None:
    import uvloop

    run(c, lambda: around(c, lambda: enter_and_use(c)), loop_factory=uvloop.new_event_loop)


@host(attached=True, main=True, python=(3, 12))
def host_eager(c: Ctl) -> None:
    def factory() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)
        return loop

    run(c, lambda: around(c, lambda: enter_and_use(c)), loop_factory=factory)


@host(**INLINE)
def host_in_timeout(c: Ctl) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            await around(c, lambda: enter_and_use(c))

    run(c, main)


@host(**INLINE)
def host_by_hand(c: Ctl) -> None:
    async def inner() -> None:
        cm = c.enter()
        await cm.__aenter__()
        try:
            await c.run_body()
        except BaseException as error:
            if not await cm.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await cm.__aexit__(None, None, None)

    run(c, lambda: around(c, inner))


@host(attached=True, main=True)
def host_child_task(c: Ctl) -> None:
    async def main() -> None:
        await asyncio.create_task(around(c, lambda: enter_and_use(c)), name="child")

    run(c, main)


@host(attached=True, main=True)
def host_anyio_child(c: Ctl) -> None:
    async def main() -> None:
        errors: list[BaseException] = []

        async def child() -> None:
            try:
                await around(c, lambda: enter_and_use(c))
            except BaseException as error:
                errors.append(error)
                raise

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(child)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        if errors:
            raise errors[0]

    run(c, main)


@host(attached=True, main=True)
def host_asyncio_child(c: Ctl) -> None:
    async def main() -> None:
        errors: list[BaseException] = []

        async def child() -> None:
            try:
                await around(c, lambda: enter_and_use(c))
            except BaseException as error:
                errors.append(error)
                raise

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        if errors:
            raise errors[0]

    run(c, main)


@host()
def host_stack_same_task(c: Ctl) -> None:
    async def inner() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(c.enter())
            await c.run_body()

    run(c, lambda: around(c, inner))


@host()
def host_context_manager(c: Ctl) -> None:
    @contextlib.asynccontextmanager
    async def wrapped() -> Any:
        async with c.enter() as value:
            yield value

    async def inner() -> None:
        async with wrapped():
            await c.run_body()

    run(c, lambda: around(c, inner))


@host()
def host_wait_for(c: Ctl) -> None:
    async def inner() -> None:
        cm = c.enter()
        await asyncio.wait_for(cm.__aenter__(), 100)
        try:
            await c.run_body()
        except BaseException as error:
            if not await cm.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await cm.__aexit__(None, None, None)

    run(c, lambda: around(c, inner))


@host()
def host_gather(c: Ctl) -> None:
    async def inner() -> None:
        cm = c.enter()
        await asyncio.gather(cm.__aenter__())
        try:
            await c.run_body()
        except BaseException as error:
            if not await cm.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await asyncio.create_task(cm.__aexit__(None, None, None))

    run(c, lambda: around(c, inner))


@host(passes=False, around=False)
def host_stack_elsewhere(c: Ctl) -> None:
    """Entered in a task that has ended, closed in a third one."""

    async def main() -> None:
        stack = contextlib.AsyncExitStack()
        await asyncio.create_task(stack.enter_async_context(c.enter()))
        await c.run_body_elsewhere()
        await asyncio.create_task(stack.aclose())

    run(c, main)


@host(passes=False, around=False)
def host_stack_manager(c: Ctl) -> None:
    """Entered and closed by a task that lives on and minds its own business meanwhile."""

    async def main() -> None:
        stack = contextlib.AsyncExitStack()
        business: asyncio.Queue[None] = asyncio.Queue()
        entered = asyncio.get_running_loop().create_future()

        async def manager() -> None:
            try:
                await stack.enter_async_context(c.enter())
            except Exception as error:
                entered.set_exception(error)
                return
            entered.set_result(None)
            try:
                await business.get()
            except asyncio.CancelledError:
                c.problem("an innocent task was cancelled")
            await stack.aclose()

        task = asyncio.create_task(manager())
        try:
            await entered
            await c.run_body_elsewhere()
            business.put_nowait(None)
        finally:
            await task

    run(c, main)


async def lifespan_of(c: Ctl, app: Any) -> None:
    """What a server does."""
    receive: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()

    async def serve() -> None:
        try:
            await app({"type": "lifespan", "state": {}}, receive.get, sent.put)
        except Exception:
            pass  # a server logs it; what left the block is known already
        finally:
            sent.put_nowait({"type": "end"})

    task = asyncio.create_task(serve())
    receive.put_nowait({"type": "lifespan.startup"})
    message = await sent.get()
    if message["type"] == "lifespan.startup.complete":
        await c.run_body_elsewhere()
        receive.put_nowait({"type": "lifespan.shutdown"})
    await task


def lifespan(c: Ctl) -> Any:
    @contextlib.asynccontextmanager
    async def enter(app: Any) -> Any:
        async with c.enter():
            yield

    return enter


@host(passes=False, around=False, needs=("starlette",))
def host_starlette_lifespan(c: Ctl) -> None:
    from starlette.applications import Starlette

    run(c, lambda: lifespan_of(c, Starlette(lifespan=lifespan(c))))


@host(passes=False, around=False, needs=("fastapi",))
def host_fastapi_lifespan(c: Ctl) -> None:
    from fastapi import FastAPI

    run(c, lambda: lifespan_of(c, FastAPI(lifespan=lifespan(c))))


@host(passes=False, around=False, needs=("fastapi", "asgi_lifespan"))
def host_lifespan_manager(c: Ctl) -> None:
    from asgi_lifespan import LifespanManager
    from fastapi import FastAPI

    async def main() -> None:
        try:
            async with LifespanManager(FastAPI(lifespan=lifespan(c)), startup_timeout=100, shutdown_timeout=100):
                await c.run_body_elsewhere()
        except Exception as error:
            c.seen = describe(error)

    run(c, main)


@host(passes=False, around=False, needs=("fastapi", "httpx"))
def host_test_client(c: Ctl) -> None:
    """Starlette's TestClient: the lifespan in one task of another thread's loop, the request in another one."""
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    app = FastAPI(lifespan=lifespan(c))

    @app.get("/")
    async def root() -> dict[str, str]:
        await c.run_body_elsewhere()
        return {}

    try:
        with TestClient(app) as client:
            client.get("/")
    except Exception as error:
        c.seen = describe(error)


@host(needs=("fastapi", "httpx"))
def host_fastapi_dependency(c: Ctl) -> None:
    import httpx
    from fastapi import Depends, FastAPI

    app = FastAPI()

    async def session() -> Any:
        async with c.enter() as value:
            yield value

    @app.get("/")
    async def root(value: Any = Depends(session)) -> dict[str, str]:  # noqa: B008
        await c.run_body()
        return {}

    async def inner() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            try:
                await client.get("/")
            except Exception as error:
                if type(error).__name__ != "FastAPIError":
                    raise
                # "Response not awaited": a clean end that the block swallowed ended the endpoint

    run(c, lambda: around(c, inner))


@host(passes=False, around=False)
def host_unittest(c: Ctl) -> None:
    import unittest

    class Case(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self) -> None:
            c.prepare()
            await self.enterAsyncContext(c.enter())

        async def test(self) -> None:
            await c.run_body_elsewhere()

    result = unittest.TestResult()
    Case("test").run(result)
    c.seen = (result.errors or [(0, "ok")])[0][1].strip().splitlines()[-1].partition(":")[0].rpartition(".")[2]


@host(passes=False, around=False)
def host_portal(c: Ctl) -> None:
    """A loop in another thread."""
    from anyio.from_thread import start_blocking_portal

    async def make() -> Observed:
        return c.enter()

    try:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(portal.call(make)):
            portal.call(c.run_body_elsewhere)
    except Exception as error:
        c.seen = describe(error)
        if error is not c.block_error:
            raise


def pytest_host(c: Ctl, flavour: str, scope: str) -> None:
    import pytest

    sys.modules["lifecycle_case"] = types.SimpleNamespace(c=c)  # type: ignore[assignment]
    asyncio_marks = f'pytest.mark.asyncio(loop_scope="{scope}")'
    asyncio_fixture = f'pytest_asyncio.fixture(scope="{scope}", loop_scope="{scope}")'
    text = f"""
import pytest, pytest_asyncio
from lifecycle_case import c

@{asyncio_fixture if flavour == "asyncio" else f'pytest.fixture(scope="{scope}")'}
async def session():
    async with c.enter() as value:
        yield value

@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"

@{asyncio_marks if flavour == "asyncio" else "pytest.mark.anyio"}
async def test_body(session):
    await c.run_body_elsewhere()

@{asyncio_marks if flavour == "asyncio" else "pytest.mark.anyio"}
async def test_next():
    c.note("next test")
"""
    import tempfile

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    errors: list[str] = []

    class Watch:
        @pytest.hookimpl
        def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
            if call.excinfo is not None and not isinstance(call.excinfo.value, type(c.block_error)):
                errors.append(f"{item.name} {call.when}: {call.excinfo.value!r}")
            elif call.excinfo is not None and call.when == "call":
                errors.append(f"the test itself got {call.excinfo.value!r}")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "test_case.py")
        path.write_text(text)
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            pytest.main(
                [
                    str(path),
                    "-p",
                    "pytest_asyncio.plugin",
                    "-p",
                    "anyio",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:faulthandler",
                    "-c",
                    os.devnull,
                    f"--rootdir={directory}",
                    f"--confcutdir={directory}",  # otherwise every directory above it is looked through
                    "--assert=plain",
                    "--tb=native",
                    "-s",
                    "-q",
                    "-W",
                    "ignore",
                ],
                plugins=[Watch()],
            )
    for error in errors:
        c.problem(error)
    if "next test" not in c.notes:
        c.problem("the next test did not run")


for _flavour in ("asyncio", "anyio"):
    for _scope in ("function", "module", "session"):

        def _run(c: Ctl, flavour: str = _flavour, scope: str = _scope) -> None:
            pytest_host(c, flavour, scope)

        _name = f"pytest_{_flavour}_{_scope}"
        HOSTS[_name] = HostSpec(
            _run,
            passes=False,
            around=False,
            needs=("pytest", "pytest_asyncio"),
            native_cancel=_flavour == "asyncio",
            name=_name,
        )


@host(passes=False, around=False, agen=True)
def host_abandoned_generator(c: Ctl) -> None:
    async def main() -> None:
        async def values() -> Any:
            async with c.enter() as value:
                while True:
                    yield value

        async def consume() -> None:
            async for _ in values():
                await c.run_body_elsewhere()
                break

        await asyncio.create_task(consume())
        gc.collect()
        while c.block == "entered":
            await asyncio.sleep(0.005)

    run(c, main)


@host(passes=False, around=False, agen=True)
def host_generator_of_the_loop(c: Ctl) -> None:
    """Left to loop.shutdown_asyncgens, after every task has been cancelled."""
    kept = []

    async def main() -> None:
        async def values() -> Any:
            async with c.enter() as value:
                while True:
                    yield value

        kept.append(generator := values())
        await anext(generator)
        await c.run_body_elsewhere()

    run(c, main)
    kept.clear()


# ---------------------------------------------------------------------------------------------- which cases make sense


def makes_sense(event: Event, spec: HostSpec, subject: str) -> bool:
    if subject not in event.blocks or sys.version_info < spec.python:
        return False
    if (event.around and not spec.around) or (event.attached and not spec.attached):
        return False
    if event.signals and not spec.main:
        return False
    if event.wrap == "cancel" and not spec.native_cancel:
        return False
    if any(importlib.util.find_spec(module) is None for module in spec.needs):
        return False
    if spec.name == "fastapi_dependency" and "exit_" in event.name and event.wrap in ("anyio", "fail_after"):
        return False  # FastAPI shields the cleanup of its dependencies from anyio's scopes: only the grace bounds it
    if spec.name == "pytest_asyncio_session" and "Outcome" in (event.expect, event.split):
        return False  # pytest then forgets to close the loop
    # There the loop waits for its tasks before it ends its generators, and so for a task that never ends.
    return not (spec.name == "generator_of_the_loop" and event.stragglers)


def expected_block(c: Ctl) -> str:
    event, spec = c.event, c.host
    expect = event.expect if spec.passes or event.split is None else event.split
    if event.startup is not None:
        return event.expect
    if spec.agen:
        return "GeneratorExit"
    if not spec.passes and event.expect == "Outcome" and event.split is None:
        return "Outcome"
    return expect


def expected_seen(c: Ctl, block: str) -> str | None:
    """What the program around the block sees; None where the host decides."""
    event, spec = c.event, c.host
    if not spec.passes or spec.agen or spec.name in ("portal", "fastapi_dependency"):
        return None
    if event.signals:
        return "SystemExit" if block == "SystemExit" else "KeyboardInterrupt"
    if block == "CancelledError":
        return {"timeout": "TimeoutError", "fail_after": "TimeoutError", "anyio": "ok"}.get(event.wrap or "", block)
    return block


# ---------------------------------------------------------------------------------------------------------- one child


def open_descriptors() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
    return {text for text in found if "/proc/" not in text}


def live_threads() -> list[str]:
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    )


@contextlib.contextmanager
def watched(problems: list[str]) -> Iterator[None]:
    """What this process says and leaves behind."""
    import logging

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "asyncio" and record.levelno >= logging.ERROR:
                problems.append(f"asyncio's log: {record.getMessage()[:300]}")

    logging.getLogger().addHandler(Records())
    sys.unraisablehook = lambda u: problems.append(f"unraisable: {u.exc_value!r} in {u.object!r}"[:300])
    threading.excepthook = lambda a: problems.append(f"in a thread: {a.exc_value!r}")
    warnings.simplefilter("always")
    warnings.showwarning = (
        lambda message, category, *a, **k: problems.append(  # type: ignore[assignment]
            f"warning: {category.__name__}: {message}"[:300]
        )
    )
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    threads, descriptors = live_threads(), open_descriptors()
    yield
    gc.collect()
    deadline = time.monotonic() + 3
    while (
        left := [name for name in live_threads() if name not in threads] + sorted(open_descriptors() - descriptors)
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        problems.append(f"left behind: {left}")
    live = sorted(task.get_name() for task in joining._LIVE_TASKS)
    if live:
        problems.append(f"tasks that never ended: {live}")


def run_case(subject_class: Any, event: Event, spec: HostSpec) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctl = Ctl(event, spec, subject_class)
    # Here, since only the main thread may; the loop may run in another one.
    signal.signal(signal.SIGUSR1, lambda *_: ctl.on_signal and ctl.on_signal())
    problems = ctl.problems
    if spec.name == "uvloop":
        import uvloop

        uvloop.new_event_loop().close()  # the first one opens a pipe for the life of the process
    with watched(problems):
        gc.collect()
        gc.disable()
        ctl.began = time.monotonic()
        raised = "ok"
        try:
            spec.run(ctl)
        except BaseException as error:
            raised = describe(error)
            if not spec.passes and ctl.block_error is not error:
                problems.append("the host failed: " + "".join(traceback.format_exception(error))[-1500:])
        for thread in ctl.threads:
            thread.join(5)
        took = ctl.secs()
        block = expected_block(ctl).replace("EndOfInput", type(ctl.subject.end_of_input()).__name__)
        if ctl.block != block:
            trace = "" if ctl.block_error is None else "".join(traceback.format_exception(ctl.block_error))[-1500:]
            problems.append(f"{ctl.block} left the block, not {block}; body: {ctl.body}\n{trace}")
        elif event.check is not None and not spec.agen:
            problems.extend(event.check(ctl))
        seen = expected_seen(ctl, ctl.block)
        # Since 3.13 a cancellation that an error outranks is delivered again: here, at the end of the task.
        again = sys.version_info >= (3, 13) and event.wrap == "cancel" and raised == "CancelledError"
        if seen is not None and raised != seen and not again:
            problems.append(f"{raised} was seen around the block, not {seen}")
        entered = ctl.body != "not started"
        if ctl.released != 1 + (event.name == "release_endless") and ctl.subject.counts:
            problems.append(f"released {ctl.released} times")
        if ctl.subject.counts and entered and not ctl.settled and not spec.agen and not event.skips_settle:
            problems.append("the last words were never said")
        ctl.block_error = None
        ctl.value = None
        ctl.subject.forget()
        # An error that nobody awaited any more has a traceback that leads to the session.
        dropped = any(
            (kind == "run.dropped" and "failed" in message) or kind in ("stop.overrun", "checkpoint.failed")
            for kind, _, message in ctl.events
        )
        if spec.freed and not event.stragglers and event.freed and not dropped:
            kept = [ref for ref in ctl.refs if ref() is not None]
            if kept:
                problems.append(f"kept alive without the garbage collector: {[ref() for ref in kept]}")
        gc.enable()
    problems[:] = ctl.subject.excused(problems)
    return {
        "host": spec.name,
        "event": event.name,
        "secs": round(took, 2),
        "cpu": round(time.process_time(), 3),
        "block": ctl.block,
        "body": ctl.body,
        "problems": problems,
        "events": [f"{kind}: {message}"[:160] for kind, _, message in ctl.events],
        "notes": ctl.notes,
    }


def fork(work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """Run `work` in a child; its pid and the descriptor of its answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        signal.alarm(CASE_LIMIT_SECS)
        started = time.process_time()
        answer = work()
        answer["cpu"] = round(time.process_time() - started, 3)
        with open(writing, "w") as pipe:
            pipe.write(json.dumps(answer, default=repr))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_forked(jobs: Sequence[tuple[str, str, Callable[[], dict[str, Any]]]], at_once: int) -> Iterator[dict[str, Any]]:
    waiting = list(jobs)[::-1]
    running: dict[int, tuple[int, str, str, list[bytes]]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            host_name, event_name, work = waiting.pop()
            pid, descriptor = fork(work)
            running[descriptor] = (pid, host_name, event_name, [])
        ready, _, _ = select.select(list(running), [], [])
        for descriptor in ready:
            pid, host_name, event_name, chunks = running[descriptor]
            if chunk := os.read(descriptor, 65536):
                chunks.append(chunk)
                continue
            del running[descriptor]
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            if chunks:
                yield json.loads(b"".join(chunks))
            else:
                how = "hangs" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "died"
                yield {"host": host_name, "event": event_name, "problems": [f"{how} (status {status})"]}


def cases(subject: str, hosts: str = "*", events: str = "*") -> list[tuple[str, str]]:
    """The names of all cases that make sense for a subject."""
    return [
        (spec.name, event.name)
        for spec in HOSTS.values()
        if matches(spec.name, hosts)
        for event in EVENTS.values()
        if matches(event.name, events) and makes_sense(event, spec, subject)
    ]


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def subset(all_cases: Sequence[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """A seeded subset that holds every host and every event at least once, as far as `count` goes."""
    chooser = random.Random(seed)
    shuffled = list(all_cases)
    chooser.shuffle(shuffled)
    chosen: list[tuple[str, str]] = []
    hosts: set[str] = set()
    events: set[str] = set()
    for case in shuffled:
        if case[0] not in hosts or case[1] not in events:
            chosen.append(case)
            hosts.add(case[0])
            events.add(case[1])
    rest = [case for case in shuffled if case not in set(chosen)]
    return (chosen + rest)[:count]


def few_of_each(all_cases: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """All events in a plain coroutine, and a seeded few in each of the other hosts, the same ones each time."""
    chosen: list[tuple[str, str]] = []
    for name in dict.fromkeys(host for host, _ in all_cases):
        of_host = [case for case in all_cases if case[0] == name]
        chosen += of_host if name == "plain" else subset(of_host, count, zlib.crc32(name.encode()))
    return chosen


def preload(all_cases: Sequence[tuple[str, str]]) -> None:
    """Import once, before the forks, what the chosen hosts need."""
    for name in {module for host_name, _ in all_cases for module in HOSTS[host_name].needs}:
        importlib.import_module(name)
        if name == "pytest_asyncio":
            from _pytest.config import default_plugins

            for plugin in (
                "anyio.pytest_plugin",
                "pytest_asyncio.plugin",
                *(f"_pytest.{one}" for one in default_plugins),
            ):
                importlib.import_module(plugin)
        if name == "fastapi":
            import starlette.testclient  # noqa: F401


def main(subject_class: Any = BlockSubject) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="*")
    parser.add_argument("--events", default="*")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--few", type=int, default=0, help="so many of each host; see `few_of_each`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    chosen = cases(subject_class.kind, options.hosts, options.events)
    if options.count:
        chosen = subset(chosen, options.count, options.seed)
    if options.few:
        chosen = few_of_each(chosen, options.few)
    preload(chosen)
    gc.collect()
    gc.freeze()
    jobs = [
        (h, e, lambda e=e, h=h: run_case(subject_class, EVENTS[e], HOSTS[h]))  # type: ignore[misc]
        for h, e in chosen
    ]
    wrong = 0
    for result in run_forked(jobs, options.at_once):
        wrong += bool(result["problems"])
        if result["problems"] or options.verbose:
            print(json.dumps(result), flush=True)
    print(json.dumps({"cases": len(chosen), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
