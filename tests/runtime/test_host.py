"""The host of a session: spawning, records, stop and join, deadlines; what the lifecycle matrix does not look at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asupervisor.errors import StopGraceExceeded, StopRequested, WrongEventLoop
from asupervisor.runtime import service as service_module
from asupervisor.runtime.block import Block
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.host import Host
from asupervisor.runtime.service import Service


class Told:
    """An event sink."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        self.events.append((kind, level, message))

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def message(self, kind: str) -> str:
        return next(message for told, _, message in self.events if told == kind)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def make(told: Told) -> Callable[..., Host[str]]:
    """Makes a host whose value is its name."""

    def make(startup: Callable[[Host[str]], Awaitable[str]] | None = None, **options: Any) -> Host[str]:
        async def default(host: Host[str]) -> str:
            return host.name

        options.setdefault("stop_grace_secs", 0.05)
        options.setdefault("kill_grace_secs", 0.1)
        return Host("here", options.pop("coordinator", Coordinator()), startup=startup or default, emit=told, **options)

    return make


async def until_stop(host: Host[Any]) -> None:
    await host.coordinator.wait_for_stop()


async def end(host: Host[Any]) -> None:
    host.close()
    await host.join()


# ------------------------------------------------------------------------------------------------------ its services


async def test_records(make: Callable[..., Host[str]]) -> None:
    host = make()
    assert host.state == "starting"
    assert await host.start() == "here"
    assert host.state == "running"
    go = asyncio.Event()
    service = host.spawn("waits", go.wait)
    assert isinstance(service, Service)
    assert service.state == "starting"
    with pytest.raises(RuntimeError, match="not started"):
        _ = service.task
    await asyncio.sleep(0)
    assert (service.state, service.done()) == ("running", False)
    assert service.task.get_name() == "here:waits"
    go.set()
    await service
    assert service.done()
    status = service.status()
    assert (status.name, status.state, status.critical, status.last_error) == ("waits", "done", True, None)
    await end(host)
    assert host.state == "stopped"
    assert host.finished


async def test_a_failed_record(make: Callable[..., Host[str]], told: Told) -> None:
    host = make()
    await host.start()

    async def fails() -> None:
        raise ValueError("x")

    uncritical = host.spawn("uncritical", fails, critical=False)
    await uncritical
    assert not host.coordinator.should_stop()
    assert (uncritical.state, uncritical.status().last_error) == ("failed", "ValueError('x')")
    assert told.kinds() == ["service.failed"]
    critical = host.spawn("critical", fails)
    await critical
    assert host.coordinator.should_stop()
    assert critical.state == "failed"
    assert isinstance(host.coordinator.error, ValueError)
    await end(host)


async def test_awaiting_a_record_does_not_cancel_it(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()
    service = host.spawn("waits", until_stop, host)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await service
    assert not service.done()
    await end(host)
    assert service.done()


async def test_cancelling_one_service_is_no_error(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()
    before_its_first_step = host.spawn("early", anyio.sleep_forever)
    before_its_first_step.cancel()
    running = host.spawn("running", anyio.sleep_forever)
    await asyncio.sleep(0)
    running.cancel()
    await before_its_first_step
    await running
    assert running.state == "done"
    assert not host.coordinator.should_stop()
    await end(host)


async def test_join_of_the_coordinator_takes_records(make: Callable[..., Host[str]]) -> None:
    """Also before they have started; and it ends stragglers in their own way, which is no error."""
    host = make(stop_grace_secs=60)
    await host.start()
    services = [host.spawn("polite", until_stop, host), host.spawn("forever", anyio.sleep_forever)]
    host.coordinator.request_stop()
    with pytest.raises(StopGraceExceeded, match="forever"):
        await host.coordinator.join(services, stop_grace_period_secs=0.01)
    assert all(service.done() for service in services)
    assert host.coordinator.error is None
    await end(host)


async def test_on_stop_cancel(make: Callable[..., Host[str]]) -> None:
    """A service that is cancelled by the stop itself does not wait for the grace, nor does anybody for it."""
    host = make(stop_grace_secs=3600)
    await host.start()
    ended = host.spawn("ended", asyncio.sleep, 0, on_stop="cancel")
    await ended
    assert len(host.coordinator._callbacks) == 1, "an ended service leaves no callback behind"
    forever = host.spawn("forever", anyio.sleep_forever, on_stop="cancel")
    async with asyncio.timeout(20):
        await end(host)
    assert forever.done()


async def test_many_short_services_leave_a_bounded_record(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()
    standing = host.spawn("standing", until_stop, host)
    for n in range(2 * service_module.MOST_RECORDS):
        await host.spawn(f"short-{n}", asyncio.sleep, 0)
    assert len(host.services) <= service_module.MOST_RECORDS
    assert standing in host.services
    await end(host)


async def test_spawn_where_it_cannot_work(make: Callable[..., Host[str]]) -> None:
    host = make()
    with pytest.raises(RuntimeError, match="Enter managed_session"):
        host.spawn("early", asyncio.sleep, 0)
    await host.start()

    def elsewhere() -> None:
        with pytest.raises(WrongEventLoop, match="another thread"):
            host.spawn("there", asyncio.sleep, 0)

    await asyncio.to_thread(elsewhere)
    await end(host)
    with pytest.raises(RuntimeError, match="late"):
        host.spawn("late", asyncio.sleep, 0)


async def test_spawn_in_the_startup_and_after_the_stop(make: Callable[..., Host[str]]) -> None:
    async def startup(host: Host[str]) -> str:
        host.spawn("early", until_stop, host)
        return "value"

    host = make(startup)
    assert await host.start() == "value"
    host.coordinator.request_stop()
    await asyncio.sleep(0)
    late = host.spawn("late", asyncio.sleep, 0)  # the grace is there to be used
    await late
    await end(host)


async def test_wrong_arguments_of_a_service(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()

    async def no_arguments() -> None:
        pass

    await host.spawn("wrong", no_arguments, 1)
    assert isinstance(host.coordinator.error, TypeError)
    await end(host)


# ----------------------------------------------------------------------------------------------------- stop and join


async def test_stop_leaves_the_value_alive(make: Callable[..., Host[str]]) -> None:
    steps: list[str] = []

    async def settle() -> None:
        steps.append("settle")

    async def release() -> None:
        steps.append("release")

    host = make(settle=settle, release=release)
    await host.start()
    service = host.spawn("polite", until_stop, host)
    await host.stop()
    assert service.done()
    assert steps == ["settle"]
    assert not host.finished
    await host.stop()  # again: nothing more to do
    await end(host)
    assert steps == ["settle", "settle", "release"], "what happened since is saved, too"


async def test_stop_names_stragglers(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            with anyio.CancelScope(shield=True):
                await let_go.wait()

    straggler = host.spawn("stubborn", stubborn)
    await asyncio.sleep(0)
    with pytest.raises(StopGraceExceeded, match="stubborn"):
        await host.stop()
    await host.stop(ignore_live_threads=True)
    await end(host)
    assert host.late == ["stubborn"]
    let_go.set()
    await asyncio.wait([straggler.task])


async def test_stop_is_as_quick_as_what_it_stops(make: Callable[..., Host[str]]) -> None:
    """F14: no grace period is waited for that nobody uses."""
    host = make(stop_grace_secs=3600)
    await host.start()
    host.spawn("polite", until_stop, host)
    async with asyncio.timeout(20):
        await host.stop()
        await end(host)


async def test_called_from_another_loop(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()

    def elsewhere(method: str) -> None:
        with pytest.raises(WrongEventLoop, match=method):
            asyncio.run(getattr(host, method)())

    for method in ("stop", "join"):
        await asyncio.to_thread(elsewhere, method)
    assert not host.coordinator.should_stop()
    await end(host)


async def test_several_wait_for_the_end(make: Callable[..., Host[str]]) -> None:
    host = make()
    await host.start()
    waiting = [asyncio.create_task(host.join()) for _ in range(3)]
    stopping = asyncio.create_task(host.stop())
    await asyncio.sleep(0)
    host.close()
    await asyncio.gather(*waiting, stopping)
    await host.join()


async def test_a_service_closes_the_session(make: Callable[..., Host[str]]) -> None:
    host = make(stop_grace_secs=3600)
    await host.start()
    steps: list[str] = []

    async def closes() -> None:
        host.close()
        await host.join()
        steps.append("closed")

    service = host.spawn("closes", closes)
    async with asyncio.timeout(20):
        await service
        await host.join()
    assert steps == ["closed"]
    assert host.late == []


async def test_the_timer_does_not_outlive_the_session(make: Callable[..., Host[str]]) -> None:
    host = make(stop_grace_secs=3600)
    await host.start()
    host.coordinator.request_stop()
    await asyncio.sleep(0)
    host.hurry()
    await end(host)
    timers = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore
    assert not [timer for timer in timers if "grace" in repr(timer)]


# --------------------------------------------------------------------------------------------------------- the start


async def test_start_forgets_an_earlier_stop_unless_told_not_to(make: Callable[..., Host[str]]) -> None:
    coordinator = Coordinator()
    coordinator.request_stop(ValueError("earlier"))
    host = make(coordinator=coordinator)
    await host.start()
    assert not coordinator.should_stop()
    await end(host)

    coordinator = Coordinator()
    coordinator.request_stop(ValueError("earlier"))
    with pytest.raises(ValueError, match="earlier"):
        await make(coordinator=coordinator).start(clear_stop=False)
    coordinator = Coordinator()
    coordinator.request_stop()
    with pytest.raises(StopRequested):
        await make(coordinator=coordinator).start(clear_stop=False)


async def test_a_failed_start_gives_everything_back(make: Callable[..., Host[str]]) -> None:
    released = []

    async def startup(host: Host[str]) -> str:
        host.spawn("service", anyio.sleep_forever)
        raise LookupError("no")

    async def release() -> None:
        released.append(1)

    async def settle() -> None:
        raise AssertionError("there is nothing to save")

    host = make(startup, release=release, settle=settle, stop_grace_secs=3600)
    with pytest.raises(LookupError):
        await host.start()
    assert released == [1]
    assert host.finished
    with pytest.raises(ValueError, match="late"):
        host.coordinator.request_stop(ValueError("late"))  # joined: nobody else would see it


async def test_a_coordinator_in_use_elsewhere_is_left_alone(make: Callable[..., Host[str]]) -> None:
    coordinator = Coordinator()
    host = make(coordinator=coordinator)
    await host.start()

    def elsewhere() -> None:
        async def use() -> None:
            async with Block(lambda: make(coordinator=coordinator)):
                pass

        with pytest.raises(WrongEventLoop):
            asyncio.run(use())

    await asyncio.to_thread(elsewhere)
    await end(host)


# -------------------------------------------------------------------------------------------------------- the block


@pytest.mark.parametrize("option", [True, False])
async def test_cancel_body_overrides(make: Callable[..., Host[str]], told: Told, option: bool) -> None:
    """True: although an exit stack entered it. False: although it is written right here."""
    ended: list[str] = []
    host: list[Host[str]] = []

    def make_host() -> Host[str]:
        host.append(make(stop_grace_secs=0.02))
        return host[-1]

    async def body() -> None:
        host[-1].coordinator.request_stop()
        try:
            async with asyncio.timeout(10):
                while "stop.body_runs_on" not in told.kinds():
                    await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("by itself")

    from contextlib import AsyncExitStack

    if option:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(Block(make_host, cancel_body=True))
            await body()
    else:
        async with Block(make_host, cancel_body=False):
            await body()
    assert ended == ["cancelled" if option else "by itself"]
    assert ("stop.body_runs_on" in told.kinds()) != option


async def test_whose_body_may_be_cancelled(make: Callable[..., Host[str]]) -> None:
    """Only where the body provably runs in the task that enters."""
    import contextlib

    seen: dict[str, bool] = {}

    class Delegate:
        def __init__(self) -> None:
            self.block = Block(make)

        async def __aenter__(self) -> Block[str]:
            await self.block.__aenter__()
            return self.block

        async def __aexit__(self, *info: object) -> None:
            await self.block.__aexit__(*info)

    async def plain() -> None:
        block = Block(make)
        async with block:
            seen["plain"] = block._attached

    async def delegated() -> None:
        async with Delegate() as block:
            seen["delegate"] = block._attached

    async def generator() -> Any:
        async with Delegate() as block:
            seen["generator"] = block._attached
            yield

    async def stack() -> None:
        async with contextlib.AsyncExitStack() as stack:
            block = Block(make)
            await stack.enter_async_context(block)
            seen["stack"] = block._attached

    async def in_a_task() -> None:
        block = Block(make)
        await asyncio.create_task(block.__aenter__())  # type: ignore[arg-type]
        seen["task"] = block._attached
        await block.__aexit__(None, None, None)

    async def waited_for() -> None:
        block = Block(make)
        await asyncio.wait_for(block.__aenter__(), 20)
        seen["wait_for"] = block._attached
        await block.__aexit__(None, None, None)

    await plain()
    await delegated()
    async for _ in generator():
        pass
    await stack()
    await in_a_task()
    await waited_for()
    assert seen == {
        "plain": True,
        "delegate": True,
        "generator": False,
        "stack": False,
        "task": False,
        "wait_for": False,
    }


async def test_stragglers_are_asked_at_the_end(make: Callable[..., Host[str]]) -> None:
    """Busy threads are named with the call they are in, and its stack."""
    hosts: list[Host[str]] = []

    def make_host() -> Host[str]:
        hosts.append(make(stragglers=lambda: [("thread /cpu:0 (in train)", 'File "model.py", line 3\n')]))
        return hosts[-1]

    with pytest.raises(StopGraceExceeded) as caught:
        async with Block(make_host):
            hosts[-1].coordinator.request_stop()
    error = caught.value
    assert error.services == ("thread /cpu:0 (in train)",)
    assert "model.py" in error.stack
    assert "model.py" in str(error)
    assert error.grace_secs == 0.05


async def test_after_success_leftovers_are_a_warning(make: Callable[..., Host[str]], told: Told) -> None:
    async with Block(lambda: make(stragglers=lambda: [("thread busy", "")])):
        pass
    assert [(kind, level) for kind, level, _ in told.events] == [("stop.left_running", "warning")]


async def test_errors_of_the_session_reach_threads_after_it(make: Callable[..., Host[str]]) -> None:
    """A thread that fails after the end gets its error back, as after TensorFlow's join."""
    coordinator = Coordinator()
    async with Block(lambda: make(coordinator=coordinator)):
        pass
    assert coordinator.joined
    got_back: list[BaseException] = []

    def late() -> None:
        try:
            coordinator.request_stop(OSError("late"))
        except OSError as error:
            got_back.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(got_back) == 1


async def test_the_loop_of_the_body_may_be_busy_elsewhere(make: Callable[..., Host[str]], told: Told) -> None:
    """The wait for the body of a stop() that a service asked for is nobody's: it returns before the body ends."""
    hosts: list[Host[str]] = []
    returned = asyncio.Event()

    def make_host() -> Host[str]:
        hosts.append(make(stop_grace_secs=3600))
        return hosts[-1]

    async def stops() -> None:
        await hosts[-1].stop()
        returned.set()

    async with Block(make_host):
        hosts[-1].spawn("stops", stops)
        async with asyncio.timeout(20):
            await returned.wait()
    assert told.kinds() == []
