"""``journal.jsonl``."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiofiles
import numpy as np
import pytest

from asupervisor.events import Event, EventHub
from asupervisor.summary.journal import Journal, line_of


def lines(logdir: Path) -> list[dict[str, Any]]:
    data = (logdir / "journal.jsonl").read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]


async def journal_of(hub: EventHub, logdir: Path, **kwargs: Any) -> tuple[Journal, asyncio.Task[None]]:
    journal = Journal(logdir, hub.subscribe(), **kwargs)
    return journal, asyncio.create_task(journal.run())


async def test_one_line_per_event_across_runs(tmp_path: Path) -> None:
    for run in range(2):
        hub = EventHub(f"run{run}")
        journal, task = await journal_of(hub, tmp_path / "new", emit=hub.emit)
        for number in range(500):
            hub.emit("step.done", f"step {number}", number=number, level="debug")
        hub.close()
        await task
        assert (journal.written_lines, journal.lost_lines) == (500, 0)
    assert asyncio.get_running_loop()._default_executor is None, "its threads would keep the process"  # type: ignore[attr-defined]
    written = lines(tmp_path / "new")
    assert [(line["source"], line["data"]["number"]) for line in written] == [
        (f"run{run}", number) for run in range(2) for number in range(500)
    ]
    assert set(written[0]) == {"time_secs", "kind", "level", "source", "message", "data"}
    assert (written[0]["kind"], written[0]["level"], written[0]["message"]) == ("step.done", "debug", "step 0")


async def test_events_are_in_the_file_before_the_end(tmp_path: Path) -> None:
    hub = EventHub("sv")
    _, task = await journal_of(hub, tmp_path)
    hub.emit("a", "first")
    async with asyncio.timeout(20):
        while not (tmp_path / "journal.jsonl").exists() or not (tmp_path / "journal.jsonl").stat().st_size:
            await asyncio.sleep(0.005)
    assert [line["message"] for line in lines(tmp_path)] == ["first"]
    hub.close()
    await task


def test_a_line_is_strict_json_whatever_the_data_are() -> None:
    data = {
        "nan": math.nan, "inf": np.float32("inf"), "int": np.int64(3), "path": Path("a/b"), "bytes": b"\xff\n",
        "nested": {1: (2, {3.5})}, "error": ValueError("x\ny"), "text": "ünï\ncode \ud800", "flag": np.bool_(True),
        "array": np.arange(2),
    }  # fmt: skip
    loop: list[Any] = []
    loop.append(loop)
    line = line_of(Event("k", "m\nm", "info", "s", 1.0, MappingProxyType({**data, "loop": loop})))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    read = json.loads(line, parse_constant=pytest.fail)["data"]
    assert (read["nan"], read["inf"], read["int"], read["path"], read["flag"]) == ("nan", "inf", 3, "a/b", True)
    assert read["nested"] == {"1": [2, [3.5]]}


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", 0),
        (b'{"a":1}\n', 1),
        (b'{"a":1}\n{"a":2', 1),
        (b'{"a":1}\n{"a":2}', 2),
        (b'{"to', 0),
        (b'{"a":1}\n' + b'{"a":"' + b"x" * 200_000, 1),
        (b"x" * 200_000, 0),
    ],
)
async def test_a_torn_last_line_is_mended_at_the_next_start(tmp_path: Path, before: bytes, kept: int) -> None:
    (tmp_path / "journal.jsonl").write_bytes(before)
    hub = EventHub("sv")
    _, task = await journal_of(hub, tmp_path)
    hub.emit("a", "new")
    hub.close()
    await task
    written = lines(tmp_path)
    assert len(written) == kept + 1
    assert written[-1]["message"] == "new"


class Disk:
    """Makes aiofiles' writes fail, block, or stop half-way, in the directory of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = False
        self.tear_bytes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        original = aiofiles.open

        def open_file(path: Any, mode: str, **kwargs: Any) -> Any:
            disk = self

            class Opened:
                async def __aenter__(self) -> Any:
                    self.file = await original(path, mode, **kwargs)
                    return self

                async def __aexit__(self, *exc: object) -> None:
                    await self.file.close()

                def __getattr__(self, name: str) -> Any:
                    return getattr(self.file, name)

                async def write(self, data: bytes) -> None:
                    disk.writing.set()
                    await asyncio.get_running_loop().run_in_executor(kwargs["executor"], disk.gate.wait)
                    if disk.failing:
                        await self.file.write(data[: disk.tear_bytes])
                        raise OSError(28, "No space left on device")
                    await self.file.write(data)

            return Opened()

        monkeypatch.setattr(aiofiles, "open", open_file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_full_disk_loses_nothing_that_fits_and_tears_nothing(tmp_path: Path, disk: Disk) -> None:
    hub = EventHub("sv")
    journal, task = await journal_of(hub, tmp_path, emit=hub.emit, retry_secs=(0.0, 0.0))
    hub.emit("a", "0")
    await until(lambda: journal.written_lines == 1)
    disk.failing, disk.tear_bytes = True, 20
    for number in range(1, 4):
        hub.emit("a", str(number))
        await until(lambda: journal.last_error is not None)
    disk.failing = False
    hub.emit("a", "4")
    hub.close()
    await task
    written = [line["message"] for line in lines(tmp_path) if line["kind"] == "a"]
    assert written == ["0", "1", "2", "3", "4"]
    kinds = [line["kind"] for line in lines(tmp_path)]
    assert kinds.count("journal.write_failed") == 1
    assert "No space left" in str(journal.last_error)


async def test_a_long_outage_is_bounded_and_its_gap_is_marked(tmp_path: Path, disk: Disk, recorder: Any) -> None:
    hub = EventHub("sv")
    disk.failing = True
    journal, task = await journal_of(hub, tmp_path, emit=recorder, max_lines=5, retry_secs=(60.0, 60.0))
    for number in range(20):
        hub.emit("a", str(number))
        await until(lambda: journal.last_error is not None)
    await until(lambda: journal.lost_lines == 15)
    disk.failing = False
    hub.close()
    await task
    written = lines(tmp_path)
    assert written[0]["kind"] == "journal.lost"
    assert written[0]["data"]["lost"] == 15
    assert [line["message"] for line in written[1:]] == [str(number) for number in range(15, 20)]
    assert len(recorder.of("journal.write_failed")) == 1


async def test_what_cannot_be_written_at_the_end_is_reported(tmp_path: Path, disk: Disk, recorder: Any) -> None:
    hub = EventHub("sv")
    disk.failing = True
    journal, task = await journal_of(hub, tmp_path, emit=recorder)
    hub.emit("a", "0")
    hub.emit("a", "1")
    hub.close()
    await task
    (lost,) = recorder.of("journal.lost")
    assert (lost.level, lost.data["lost"]) == ("error", 2)
    assert journal.lost_lines == 2


async def test_cancelled_it_still_writes_what_has_happened(tmp_path: Path) -> None:
    hub = EventHub("sv")
    _, task = await journal_of(hub, tmp_path)
    await asyncio.sleep(0)
    for number in range(3):
        hub.emit("a", str(number))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [line["message"] for line in lines(tmp_path)] == ["0", "1", "2"]


@pytest.mark.allow_leak("threads")
async def test_a_stuck_disk_stalls_nothing_and_a_cancel_is_bounded(tmp_path: Path, disk: Disk, recorder: Any) -> None:
    hub = EventHub("sv")
    disk.gate.clear()
    _, task = await journal_of(hub, tmp_path, emit=recorder)
    hub.emit("a", "0")
    await until(disk.writing.is_set)
    for number in range(1, 4):
        hub.emit("a", str(number))
    started = asyncio.get_running_loop().time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - started < 10
    (lost,) = recorder.of("journal.lost")
    assert lost.data["lost"] >= 3
    disk.gate.set()


@pytest.mark.parametrize("how", ["told", "dropped"])
@pytest.mark.parametrize("when", ["opening", "open"])
def test_a_loop_that_is_torn_down_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Nobody awaits the file any more: the journal closes it, not the garbage collector, which warns."""
    opened, go_on = threading.Event(), threading.Event()
    files: list[Any] = []

    def slow_open(*args: Any, **kwargs: Any) -> Any:
        files.append(open(*args, **kwargs))  # noqa: SIM115
        opened.set()
        assert go_on.wait(10)
        return files[-1]

    monkeypatch.setattr("aiofiles.threadpool.sync_open", slow_open)
    warned: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", warned.append)
    loop = asyncio.new_event_loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)

        async def begin(hub: EventHub) -> Journal:
            journal, _ = await journal_of(hub, tmp_path)
            hub.emit("a", "first")
            return journal

        journal = loop.run_until_complete(begin(EventHub("sv")))
        loop.run_until_complete(loop.run_in_executor(None, opened.wait, 10))
        if when == "open":
            go_on.set()
            while not journal._executor._files:
                time.sleep(0.001)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        threads = journal._threads
        if how == "told":
            journal.close_now()
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task, journal
        gc.collect()
        go_on.set()
        deadline = time.monotonic() + 10
        while (threads._workers or not files[0].closed) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        closed = files[0].closed
        files.clear()
        gc.collect()
    assert closed
    assert warned == []


async def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    hub = EventHub("sv")
    journal, task = await journal_of(hub, logdir)
    hub.emit("a", "0")
    await until(lambda: journal.written_lines == 1)
    shutil.rmtree(logdir)
    hub.emit("a", "1")
    hub.close()
    await task
    assert [line["message"] for line in lines(logdir)] == ["1"]


def test_a_killed_process_leaves_whole_lines(tmp_path: Path, fresh_environ: dict[str, str]) -> None:
    script = """
import asyncio, math, os, sys
from asupervisor.events import EventHub
from asupervisor.summary.journal import Journal

async def main():
    path = os.path.join(sys.argv[1], "journal.jsonl")
    begun = os.path.getsize(path) if os.path.exists(path) else 0
    hub = EventHub("sv")
    journal = Journal(sys.argv[1], hub.subscribe())
    task = asyncio.create_task(journal.run())
    number = 0
    while True:
        hub.emit("a", "x" * (number * 37 % 5000), number=number)
        number += 1
        await asyncio.sleep(0)
        if os.path.exists(path) and os.path.getsize(path) > begun + 100_000:
            print("running", flush=True)
            begun = math.inf

asyncio.run(main())
"""
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], env=fresh_environ, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
            os.kill(process.pid, signal.SIGKILL)
    data = (tmp_path / "journal.jsonl").read_bytes()
    *whole, last = data.split(b"\n")
    numbers = [json.loads(line)["data"]["number"] for line in whole]
    starts = [index for index, number in enumerate(numbers) if number == 0]
    assert len(starts) == 2  # both runs, one after the other, and no torn line in between
    assert numbers[: starts[1]] == list(range(starts[1]))
    assert not last or not last.startswith(b"\0")
