"""Side threads: unlimited, reused, and gone when they are told to go."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from asupervisor.runtime.threads import SideThreads
from asupervisor.runtime.wakeup import Doorbell, Ending, LoopBell


async def test_work_runs_on_a_daemon_thread_that_bears_its_label() -> None:
    pool = SideThreads("side")
    seen: list[tuple[str, bool]] = []
    done = threading.Event()

    def work() -> None:
        thread = threading.current_thread()
        seen.append((thread.name, thread.daemon))
        done.set()

    pool.submit(work, "write")
    assert done.wait(10)
    assert seen == [("side: write", True)]
    assert await pool.aclose(10)


def test_pieces_of_work_never_wait_for_one_another() -> None:
    pool = SideThreads()
    barrier = threading.Barrier(51)
    for _ in range(50):
        pool.submit(lambda: barrier.wait(30))  # type: ignore[arg-type, return-value]
    barrier.wait(30)  # all fifty are running, or this breaks
    assert asyncio.run(pool.aclose(30))


async def test_an_idle_thread_is_used_again() -> None:
    pool = SideThreads()
    seen: list[int] = []

    def note(done: threading.Event) -> None:
        seen.append(threading.get_ident())
        done.set()

    for _ in range(5):
        done = threading.Event()
        pool.submit(functools.partial(note, done))
        assert done.wait(10)
        while pool.busy():  # it says that it is idle a moment after its work
            await asyncio.sleep(0)
    assert len(set(seen)) == 1
    assert await pool.aclose(10)


async def test_an_idle_thread_ends_by_itself() -> None:
    pool = SideThreads(idle_secs=0.01)
    thread: list[threading.Thread] = []
    pool.submit(lambda: thread.append(threading.current_thread()))
    while not thread:
        await asyncio.sleep(0)
    await asyncio.to_thread(thread[0].join, 10)
    assert not thread[0].is_alive()
    done = threading.Event()
    pool.submit(done.set)  # and the pool is as good as before
    assert done.wait(10)
    assert await pool.aclose(10)


def test_work_that_arrives_while_a_thread_gives_up_waiting_is_done() -> None:
    pool = SideThreads(idle_secs=0.0)
    for _ in range(500):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(10)
    assert asyncio.run(pool.aclose(10))


async def test_close_is_bounded_and_names_who_is_stuck() -> None:
    pool = SideThreads()
    release = threading.Event()
    pool.submit(release.wait, "stuck")  # type: ignore[arg-type]
    assert pool.busy() == ("stuck",)
    assert not await pool.aclose(0.01)
    assert pool.busy() == ("stuck",)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: None)
    release.set()
    assert await pool.aclose(10)
    assert pool.busy() == ()


async def test_close_without_any_thread_and_twice() -> None:
    pool = SideThreads()
    assert await pool.aclose(0)
    assert await pool.aclose(0)


async def test_an_exception_of_the_work_is_reported_and_the_thread_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    pool = SideThreads()
    error = ValueError("boom")

    def fail() -> None:
        raise error

    pool.submit(fail)
    while not reported:
        await asyncio.sleep(0)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(10)
    assert reported == [error]
    assert await pool.aclose(10)


async def test_a_ring_after_the_bell_was_closed_touches_no_descriptor() -> None:
    rung: list[None] = []
    bell = LoopBell(asyncio.get_running_loop(), lambda: rung.append(None), attached=True)
    bell.close()
    bell.close()
    assert bell.ring()  # the slow way
    await asyncio.sleep(0)
    assert rung == [None]
    door = Doorbell()
    door.close()
    door.ring()


async def test_a_doorbell_without_eventfd(monkeypatch: pytest.MonkeyPatch) -> None:
    from asupervisor.runtime import wakeup

    monkeypatch.setattr(wakeup, "_HAS_EVENTFD", False)
    bell = Doorbell()
    bell.ring()
    bell.ring()
    bell.wait()  # two rings are one
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (bell.wait(), woken.set()))
    thread.start()
    bell.ring()
    assert woken.wait(10)
    thread.join()
    bell.close()


async def test_an_ending_wakes_everybody_and_forgets_who_gave_up() -> None:
    ending = Ending()
    assert not await ending.wait(0.0)
    waiter = asyncio.create_task(ending.wait(60))
    cancelled = asyncio.create_task(ending.wait(60))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    assert len(ending._waiters) == 1
    threading.Thread(target=ending.signal).start()
    assert await waiter
    assert await ending.wait(0.0)
