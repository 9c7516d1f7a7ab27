"""What tasks print becomes one stream of whole lines, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asupervisor.cluster.outputs import Descriptor, LineSplitter, LogFile, Prefixer, Target, Writer
from asupervisor.cluster.pipes import Outputs

pieces_of_streams = st.lists(st.one_of(st.sampled_from([b"\r", b"\n", b"\r\n", b"ab", "é€😀".encode()]), st.binary()))


def split(*data: bytes, longest: int = 1 << 16) -> list[bytes]:
    splitter = LineSplitter(longest)
    return [line for piece in data for line in splitter.feed(piece)] + splitter.flush()


@given(pieces_of_streams, st.integers(1, 9))
def test_lines_put_together_are_the_stream(pieces: list[bytes], longest: int) -> None:
    lines = split(*pieces, longest=longest)
    assert b"".join(lines) == b"".join(pieces)
    assert all(lines)
    for line in lines:
        text = line.rstrip(b"\r\n")
        assert len(text) <= longest
        assert b"\n" not in text and b"\r" not in text


@given(pieces_of_streams, st.integers(1, 9))
def test_how_a_stream_arrives_does_not_matter(pieces: list[bytes], longest: int) -> None:
    assert split(*pieces, longest=longest) == split(b"".join(pieces), longest=longest)


def test_ends_of_lines() -> None:
    assert split(b"a\nb\r\n\nc\r\r\nd\re\r", b"\nf") == [b"a\n", b"b\r\n", b"\n", b"c\r\r\n", b"d\r", b"e\r\n", b"f"]


def test_long_lines_are_cut_between_characters() -> None:
    assert split("aé€é\n".encode(), longest=3) == ["aé".encode(), "€".encode(), "é\n".encode()]
    assert split(b"\x80" * 7, longest=3) == [b"\x80" * 3, b"\x80" * 3, b"\x80"]
    assert split(b"abc\r\nabcd\n", longest=3) == [b"abc\r\n", b"abc", b"d\n"]


def test_a_stream_without_ends_takes_linear_time() -> None:
    """Megabytes in no time; a search that begins again at each byte would take minutes."""
    assert len(split(b"x" * 4_000_000, b"\n")) == 4_000_000 // (1 << 16) + 1


class Now:
    secs = 100.0

    def __call__(self) -> float:
        return self.secs


def test_each_line_has_its_prefix() -> None:
    prefixer = Prefixer(b"[ps/0] ")
    assert prefixer.show(b"hello\n") == b"[ps/0] hello\n"
    assert prefixer.show(b"windows\r\n") == b"[ps/0] windows\n"
    assert prefixer.show(b"\n") == b"[ps/0] \n"
    assert prefixer.show(b"no end") == b"[ps/0] no end\n"
    assert prefixer.show(b"\xff\xfe\n") == b"[ps/0] \xff\xfe\n"
    assert prefixer.finish() == b""


def test_a_progress_bar_is_shown_once_a_second_and_at_its_end() -> None:
    now = Now()
    prefixer = Prefixer(b"> ", 1.0, now)
    assert prefixer.show(b"\r") == b""
    assert prefixer.show(b"10%\r") == b"> 10%\n"
    assert prefixer.show(b"20%\r") == b""
    assert prefixer.show(b"30%\r") == b""
    now.secs += 1
    assert prefixer.show(b"40%\r") == b"> 40%\n"
    assert prefixer.show(b"99%\r") == b""
    assert prefixer.show(b"100%\n") == b"> 100%\n"
    assert prefixer.show(b"99%\r") == b""
    assert prefixer.show(b"\n") == b"> 99%\n", "the newline ends the line that the bar is on"
    assert prefixer.show(b"7%\r") == b""
    assert prefixer.finish() == b"> 7%\n"
    assert prefixer.finish() == b""


class Recorded:
    """A target that writes when it may."""

    name = "recorded"

    def __init__(self) -> None:
        self.data = b""
        self.error: OSError | None = None
        self.closed = False

    def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.data += data

    def close(self) -> None:
        self.closed = True


async def test_a_target_that_fails_is_told_once_and_others_go_on() -> None:
    failures: list[tuple[Target, OSError]] = []
    writer = Writer(lambda: None, lambda target, error: failures.append((target, error)))
    bad, good = Recorded(), Recorded()
    bad.error = OSError(28, "No space left on device")
    for _ in range(3):
        writer.write(bad, b"x\n")
        writer.write(good, b"y\n")
    writer.finish()
    await writer.ended
    assert [(target, error) for target, error in failures] == [(bad, bad.error)]
    assert good.data == b"y\n" * 3
    assert good.closed and bad.closed


async def test_a_blocked_target_makes_the_writer_full_and_room_is_told() -> None:
    room = asyncio.Event()
    read, write = os.pipe()
    writer = Writer(room.set, lambda target, error: None, most_bytes=1 << 20)
    target = Descriptor(write, "a pipe")
    line = b"z" * 999 + b"\n"
    count = 0
    while not writer.full:
        writer.write(target, line)
        count += 1
    assert count >= (1 << 20) // 1000
    assert not room.is_set()
    writer.finish()

    def read_all() -> bytes:
        data = b""
        while len(data) < count * len(line):
            data += os.read(read, 1 << 16)
        return data

    data = await asyncio.to_thread(read_all)
    await writer.ended
    assert data == line * count
    assert room.is_set()
    assert not writer.full
    os.close(read)
    os.close(write)


async def test_a_writer_that_was_full_stays_so_until_there_is_room() -> None:
    """Whoever stopped reading then is waiting for the news."""
    began: asyncio.Queue[None] = asyncio.Queue()
    loop, permits, room = asyncio.get_running_loop(), threading.Semaphore(0), asyncio.Event()

    class Slow(Recorded):
        def write(self, data: bytes) -> None:
            loop.call_soon_threadsafe(began.put_nowait, None)
            permits.acquire()

    writer = Writer(room.set, lambda target, error: None, most_bytes=100)
    two = Slow(), Slow()  # in turns, so that nothing is written together
    for number in range(10):
        writer.write(two[number % 2], b"ten bytes\n")
    assert writer.full
    permits.release(2)
    for _ in range(3):
        await began.get()
    assert writer.full, "80 bytes wait"
    assert not room.is_set()
    permits.release(8)
    await room.wait()
    assert not writer.full
    writer.finish()
    await writer.ended


class Taps:
    """An `Outputs` whose targets are pipes, with one task whose pipes the test fills."""

    def __init__(self) -> None:
        self.shown, self._stdout = os.pipe()
        self.outputs = Outputs(["ps/0"], stdout=self._stdout, stderr=self._stdout, log_dir=None, environ={})
        (out_read, self.stdout), (err_read, self._stderr) = os.pipe(), os.pipe()
        os.set_blocking(self.stdout, False)
        self.pipes = self.outputs.attach("ps/0", out_read, err_read)

    async def all(self) -> bytes:
        """Everything that is shown, to the end."""
        self.pipes.close()
        self.outputs.writer.finish()
        reading = asyncio.create_task(asyncio.to_thread(self._read_all))
        await self.outputs.writer.ended
        os.close(self._stdout)
        text = await reading
        for number in (self.shown, self.stdout, self._stderr):
            os.close(number)
        return text

    def _read_all(self) -> bytes:
        with open(self.shown, "rb", closefd=False) as shown:
            return shown.read()


async def test_what_is_in_the_pipe_when_it_is_closed_is_shown() -> None:
    """The last state of a progress bar and a line without an end, in a pipe that somebody else holds open."""
    taps = Taps()
    os.write(taps.stdout, b"7%\r8%\r9%\r")
    taps.pipes.close()
    assert await taps.all() == b"[ps/0] 7%\n[ps/0] 9%\n"


@pytest.mark.parametrize("limited", [True, False], ids=["running", "ending"])
async def test_a_blocked_terminal_stops_the_reading_while_the_job_runs(limited: bool) -> None:
    taps = Taps()
    if not limited:
        taps.outputs.lift_limit()
    line = b"x" * 999 + b"\n"
    total, turns_in_vain = 0, 0
    while total < 3000 and turns_in_vain < 100:
        try:
            total += os.write(taps.stdout, line) // 1000  # smaller than what a pipe takes as a whole
            turns_in_vain = 0
        except BlockingIOError:
            turns_in_vain += 1
            await asyncio.sleep(0)
    assert (total < 2000) is limited
    assert (await taps.all()).count(b"[ps/0] " + line) == total, "and nothing is lost"


async def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = Writer(lambda: None, lambda target, error: pytest.fail(str(error)))
    data = b"0123456789" * 50_000
    writer.write(Descriptor(write, "a pipe"), data)
    writer.finish()
    got = b""
    while len(got) < len(data):
        got += await asyncio.to_thread(os.read, read, 1 << 16)
    await writer.ended
    assert got == data
    os.close(read)
    os.close(write)


async def test_log_files_are_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(b"before\n")
    writer = Writer(lambda: None, lambda target, error: pytest.fail(str(error)))
    log = LogFile(path)
    writer.write(log, b"one\n")
    writer.write(log, b"two\n")
    writer.finish()
    await writer.ended
    assert path.read_bytes() == b"before\none\ntwo\n"


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)],
)
async def test_colours_on_a_terminal_only(environ: dict[str, str], coloured: bool) -> None:
    terminal, child_side = os.openpty()
    read, write = os.pipe()
    outputs = Outputs(["ps/0"], stdout=child_side, stderr=write, log_dir=None, environ=environ)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    pipes = outputs.attach("ps/0", out_read, err_read)
    os.write(out_write, b"hello\n")
    os.write(err_write, b"hello\n")
    pipes.close()
    os.close(out_write)
    os.close(err_write)
    outputs.writer.finish()
    await outputs.writer.ended
    assert (b"\x1b[" in os.read(terminal, 100)) is coloured
    assert os.read(read, 100) == b"[ps/0] hello\n", "not a terminal"
    assert outputs.last_lines("ps/0") == ("hello", "hello")
    for number in (terminal, child_side, read, write):
        os.close(number)
