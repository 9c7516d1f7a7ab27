"""`handle_signals=True`, in real processes: saved, and ended with the status that a shell expects."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import Supervisor, WrongEventLoop

# ------------------------------------------------------------------ in a process of its own


def test_sigterm_saves_and_the_process_ends_by_it(child: Any, tmp_path: Path) -> None:
    process = child("train", logdir=str(tmp_path), handle_signals=True)
    process.wait_for("step 10\n")
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM, process.output
    assert process.secs < 5
    last = int(process.output.split("step ")[-1].split()[0])
    assert tf.train.load_variable(str(tmp_path), "global_step") == last
    assert '"session.ended"' in (tmp_path / "journal.jsonl").read_text(), "it was left in order"


def test_sigterm_without_it_just_kills(child: Any, tmp_path: Path) -> None:
    """Opt-in means opt-in."""
    process = child("train", logdir=str(tmp_path))
    process.wait_for("step 10\n")
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    assert '"session.ended"' not in (tmp_path / "journal.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_the_grace(number: int, child: Any, tmp_path: Path) -> None:
    """A service is deaf, the grace is 20 s."""
    process = child("stubborn", logdir=str(tmp_path), handle_signals=True)
    process.wait_for("running")
    process.signal(number)
    process.wait_for("stopping")
    process.signal(number)
    assert process.wait() == -number, process.output
    assert process.secs < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_insisting_skips_the_final_save(number: int, child: Any, tmp_path: Path) -> None:
    """The save would take 15 s. A second SIGTERM ends the process; a second Ctrl-C is passed on, a third one does."""
    process = child("slow_save", logdir=str(tmp_path), handle_signals=True)
    process.wait_for("running")
    process.signal(number)
    process.wait_for("saving")
    process.signal(number)
    if number == signal.SIGINT:
        process.wait_for("told", times=2)  # two signals at once may be one
        process.signal(number)
    assert process.wait() == -number, process.output
    assert process.secs < 10


# ------------------------------------------------------------------ in this process


async def test_a_handler_that_was_there_is_called_and_comes_back(counter: Callable[..., Any]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    there = signal.getsignal(signal.SIGTERM)
    try:
        sv = Supervisor(graph=counter().graph, handle_signals=True)
        async with sv.managed_session():
            signal.raise_signal(signal.SIGTERM)
            await sv.wait_for_stop()
        await asyncio.sleep(0)
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is there
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_one_set_of_handlers_for_all_sessions(counter: Callable[..., Any]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        sv, other = (Supervisor(graph=counter().graph, handle_signals=True) for _ in range(2))
        async with sv.managed_session(), other.managed_session():
            signal.raise_signal(signal.SIGTERM)
            await sv.wait_for_stop()
            assert sv.should_stop()
            assert other.should_stop()
        assert seen == [signal.SIGTERM]
    finally:
        await asyncio.sleep(0)
        signal.signal(signal.SIGTERM, before)


async def test_without_it_the_handlers_are_left_alone(counter: Callable[..., Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with Supervisor(graph=counter().graph).managed_session():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_off_the_main_thread_it_is_refused(counter: Callable[..., Any], tmp_path: Path) -> None:
    sv = Supervisor(graph=counter().graph, handle_signals=True, logdir=str(tmp_path))
    caught: list[BaseException] = []

    async def main() -> None:
        with pytest.raises(WrongEventLoop, match="main thread") as raised:
            async with sv.managed_session():
                pytest.fail("must not be entered")
        caught.append(raised.value)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    assert caught
