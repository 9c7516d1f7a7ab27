"""ManualClock: time moves only when the test says so, and wakes sleepers in order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asupervisor.clock import Clock
from asupervisor.testing import ManualClock


async def sleeper(clock: Clock, secs: float, woken: list[tuple[float, float]]) -> None:
    await clock.sleep(secs)
    woken.append((secs, clock.monotonic()))


async def test_time_stands_still() -> None:
    clock = ManualClock(start=5.0, epoch=100.0)
    assert (clock.monotonic(), clock.time()) == (5.0, 100.0)
    await asyncio.sleep(0.01)
    assert (clock.monotonic(), clock.time()) == (5.0, 100.0)
    await clock.advance(2.5)
    assert (clock.monotonic(), clock.time()) == (7.5, 102.5)


async def test_sleepers_wake_in_order_and_read_their_own_deadline() -> None:
    clock, woken = ManualClock(start=0.0), []
    async with asyncio.TaskGroup() as group:
        for secs in (3.0, 1.0, 2.0):
            group.create_task(sleeper(clock, secs, woken))
        assert await clock.sleepers(3) == (1.0, 2.0, 3.0)
        await clock.advance(2.5)
        assert woken == [(1.0, 1.0), (2.0, 2.0)]
        assert clock.remaining() == (0.5,)
        await clock.advance(0.5)
    assert woken[-1] == (3.0, 3.0)


async def test_one_advance_serves_a_periodic_sleeper_many_times() -> None:
    clock, ticks = ManualClock(start=0.0), []

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(tick())
    await clock.sleepers(1)
    await clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.remaining() == ()


async def test_jump_misses_the_ticks_on_the_way() -> None:
    clock, woken = ManualClock(start=0.0), []
    task = asyncio.create_task(sleeper(clock, 1.0, woken))
    await clock.sleepers(1)
    thread = threading.Thread(target=clock.jump, args=(10.0,))
    thread.start()
    await task
    thread.join()
    assert woken == [(1.0, 10.0)]


async def test_sleepers_waits_for_a_late_one() -> None:
    clock, woken = ManualClock(), []
    waiting = asyncio.create_task(clock.sleepers(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    task = asyncio.create_task(sleeper(clock, 1.0, woken))
    assert await waiting == (1.0,)
    await clock.advance(1.0)
    await task


async def test_sleepers_gives_up() -> None:
    with pytest.raises(TimeoutError, match=r"2 tasks should sleep .* there are 0"):
        await ManualClock().sleepers(2, timeout_secs=0.01)


async def test_no_sleep_at_all_gives_the_loop_a_turn() -> None:
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "turn")
    await ManualClock().sleep(0)
    assert turns == ["turn"]


async def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="time does not go back"):
        await ManualClock().advance(-1.0)


@pytest.mark.allow_leak("exceptions")  # the sleeper is destroyed while it sleeps
def test_sleepers_of_a_closed_loop_do_not_matter() -> None:
    clock = ManualClock()

    async def begin() -> None:
        asyncio.get_running_loop().create_task(sleeper(clock, 1.0, []))
        await clock.sleepers(1)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    clock.jump(2.0)
    assert clock.remaining() == ()
