"""The local launcher: real processes, toy programs, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asupervisor.cluster.launched import RestartBudget, describe_end, exit_status
from asupervisor.cluster.launcher import Launcher

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
config = json.loads(os.environ.get("TF_CONFIG", "null"))
role = config["task"]["type"] if config else "chief"
index = config["task"]["index"] if config else 0

def say(*words):
    print(*words, flush=True)

def until_sigterm(text="ready"):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    say(text)
    signal.sigwait([signal.SIGTERM])

def stubborn(text="ready"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(text)
    while True:
        time.sleep(60)

def grandchild(**options):
    '''A process that lives on; its id is told.'''
    code = "print(1, flush=True); import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    say("grandchild", child.pid)

def first_time(path=__file__ + "." + role + str(index)):
    if os.path.exists(path):
        return False
    open(path, "x").close()
    return True
"""


class Console:
    """What the launcher writes, line by line, as it comes."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self._changed = asyncio.Event()
        self.text = ""
        os.set_blocking(self._read, False)
        self.start()

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._read, self._readable)

    def stop(self) -> None:
        """Nobody takes what is written from now on."""
        asyncio.get_running_loop().remove_reader(self._read)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, 1 << 20):
                self.text += data.decode(errors="backslashreplace")
                self._changed.set()
        self._changed.set()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    async def seen(self, start: str, times: int = 1) -> str:
        """The last of so many lines that begin so, when it has come."""
        async with asyncio.timeout(30):
            while len(found := [line for line in self.text.split("\n")[:-1] if line.startswith(start)]) < times:
                self._changed.clear()
                await self._changed.wait()
        return found[times - 1]

    async def grandchild(self, name: str) -> psutil.Process:
        return psutil.Process(int((await self.seen(f"[{name}] grandchild ")).split()[-1]))

    def close(self) -> None:
        self.stop()
        os.close(self._read)
        os.close(self.write)


@pytest.fixture
async def console() -> AsyncIterator[Console]:
    console = Console()
    yield console
    console.close()


@pytest.fixture
def events() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., list[str]]:
    """A program that does something else in each role."""

    def write(**codes: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(f"{PRELUDE}\nexec({codes!r}.get(role, 'pass'))\n")
        return [str(path)]

    return write


@pytest.fixture
def launcher(
    program: Callable[..., list[str]], console: Console, events: list[tuple[str, dict[str, Any]]]
) -> Callable[..., Launcher]:
    """A launcher of a program made of pieces of code by role; everything else as it is called with."""

    def make(codes: dict[str, str], **options: Any) -> Launcher:
        def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
            events.append((kind, data))

        return Launcher(program(**codes), **{"stdout": console.write, "stderr": console.write, "emit": emit} | options)

    return make


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


def ends(process: psutil.Process) -> bool:
    """Whether it is gone, or goes within a moment: SIGKILL takes effect when it is scheduled.

    What nobody reaps has ended as well; that is the business of process 1.
    """
    deadline = time.monotonic() + 10
    while not gone(process) and time.monotonic() < deadline:
        time.sleep(0.005)
    return gone(process)


def names(events: list[tuple[str, dict[str, Any]]], kind: str) -> list[str]:
    return [data["task"] for seen, data in events if seen == kind]


# ------------------------------------------------------------------------------------------------ pure parts


def test_the_budget_counts_within_its_window() -> None:
    budget = RestartBudget(3, 60.0, first_secs=0.25, longest_secs=0.75)
    assert [budget.spend(at) for at in (0.0, 10.0, 20.0, 30.0)] == [0.25, 0.5, 0.75, None]
    assert budget.spent == 3
    assert budget.spend(59.9) is None
    assert budget.spend(60.0) == 0.75, "the first one does not count any more"
    assert budget.spend(61.0) is None
    assert budget.spend(1000.0) == 0.25
    assert RestartBudget(0, 60.0).spend(0.0) is None


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (0, "is done", 0),
        (1, "failed with exit status 1", 1),
        (-9, "was killed by SIGKILL", 137),
        (138, "gave up for now (exit status 138)", 138),
        (143, "ended with exit status 143, as after SIGTERM", 143),
        (255, "failed with exit status 255", 255),
        (-64, "was killed by SIGRTMAX" if sys.platform == "linux" else "was killed by signal 64", 192),
    ],
)
def test_how_a_process_ended_is_told(code: int, text: str, status: int) -> None:
    assert describe_end(code) == text
    assert exit_status(code) == status


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ps": -1}, "ps is -1; it must be 0 or more"),
        ({"workers": -1}, "workers is -1"),
        ({"restarts": -1}, "restarts is -1"),
        ({"grace_secs": -0.1}, "grace_secs is -0.1"),
        ({"chief": False, "ps": 1}, "there is nobody to train"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Launcher(["program.py"], **options)
    with pytest.raises(ValueError, match="no program"):
        Launcher([])


# ------------------------------------------------------------------------------------------------ what tasks get

TELL = "say(json.dumps([role, index, config, sys.argv[1:], os.environ.get('PYTHONUNBUFFERED'), sys.stdin.read()]))"


@pytest.mark.parametrize(
    ("options", "cluster", "others"),
    [
        ({}, None, 0),
        ({"chief": False, "workers": 1}, None, 0),
        ({"evaluator": True}, {"chief": 1}, 1),
        ({"ps": 1, "workers": 2}, {"ps": 1, "chief": 1, "worker": 2}, 0),
        ({"ps": 2, "workers": 1, "chief": False, "evaluator": True}, {"ps": 2, "worker": 1}, 1),
    ],
)
async def test_each_task_gets_its_configuration(
    launcher: Callable[..., Launcher],
    console: Console,
    options: dict[str, Any],
    cluster: dict[str, int] | None,
    others: int,
) -> None:
    launched = launcher(
        dict.fromkeys(["ps", "chief", "worker", "evaluator"], TELL),
        environ=dict(os.environ) | {"TF_CONFIG": "somebody else's"},
        **options,
    )
    assert await launched.run() == 0
    await console.seen("[launch] ", len(launched.tasks) * 2 + 1)
    told = {}
    for line in console.lines:
        name, _, text = line.partition(" ")
        if name != "[launch]":
            told[name] = json.loads(text)
    if cluster is None:
        assert [text[2:] for text in told.values()] == [[None, [], "1", ""]]
        return
    assert len(told) == sum(cluster.values()) + others
    for name, (role, index, config, arguments, unbuffered, stdin) in told.items():
        assert name == f"[{role}/{index}]"
        assert config == {"cluster": launched.cluster, "task": {"type": role, "index": index}}
        assert (arguments, unbuffered, stdin) == ([], "1", "")
    assert {role: len(addresses) for role, addresses in launched.cluster.items()} == cluster
    addresses = [address for addresses in launched.cluster.values() for address in addresses]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith("127.0.0.1:") for address in addresses)


LISTEN = """
address = config["cluster"][role][index]
server = socket.create_server(("127.0.0.1", int(address.split(":")[1])))
"""


async def test_a_killed_task_comes_back_with_the_same_configuration_and_port(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]]
) -> None:
    code = LISTEN + "say(os.environ['TF_CONFIG'])\nif first_time(): until_sigterm()"
    async with launcher({"worker": code}, workers=1) as launched:
        task = launched.tasks["worker/0"]
        await console.seen("[worker/0] ready")
        with socket.create_connection(("127.0.0.1", int(task.address.split(":")[1]))):  # lingers on the port
            assert task.pid is not None
            os.kill(task.pid, signal.SIGKILL)
            assert await launched.wait() == 0
    assert (task.starts, task.returncode) == (2, 0)
    await console.seen("[launch] worker/0 was killed by SIGKILL: restart 1 of 3 in 0.25 s")
    first, second = [line for line in console.lines if line.startswith("[worker/0] {")]
    assert first == second
    assert names(events, "launch.restarting") == ["worker/0"]
    assert names(events, "launch.started") == ["chief/0", "worker/0", "worker/0"]


# ------------------------------------------------------------------------------------------------ how tasks end


@pytest.mark.parametrize("end", ["sys.exit(138)", "sys.exit(143)", "sys.exit(200)", "os.kill(os.getpid(), 11)"])
async def test_what_may_go_better_next_time_is_started_again(launcher: Callable[..., Launcher], end: str) -> None:
    launched = launcher({"chief": f"first_time() and {end}"})
    assert await launched.run() == 0
    assert launched.tasks["chief/0"].starts == 2


@pytest.mark.parametrize("code", [1, 127])
async def test_a_failure_for_good_ends_everything_with_its_status(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]], code: int
) -> None:
    waiting = "until_sigterm()"
    failing = f"if index == 1: sys.stderr.write('\\n  what went wrong'); sys.exit({code})"
    launched = launcher({"worker": f"{failing}\n{waiting}", "chief": waiting, "ps": waiting}, workers=2, ps=1)
    assert await launched.run() == code
    assert launched.exit_status == code
    ((_, data),) = [event for event in events if event[0] == "launch.failed"]
    assert (data["task"], data["returncode"], data["last_lines"]) == ("worker/1", code, ("  what went wrong",))
    await console.seen(f"[launch] worker/1 failed with exit status {code}, which is final: everything ends; the last")
    await console.seen("[launch]       what went wrong")
    assert all(task.starts <= 1 for task in launched.tasks.values())
    assert names(events, "launch.restarting") == []


@pytest.mark.parametrize(("end", "status"), [("os.kill(os.getpid(), 9)", 137), ("sys.exit(138)", 138)])
async def test_a_used_up_budget_ends_everything(
    launcher: Callable[..., Launcher],
    console: Console,
    events: list[tuple[str, dict[str, Any]]],
    end: str,
    status: int,
) -> None:
    launched = launcher({"worker": end, "chief": "until_sigterm()"}, workers=1, restarts=1)
    assert await launched.run() == status
    assert launched.tasks["worker/0"].starts == 2
    assert names(events, "launch.failed") == ["worker/0"]
    told = next(line for line in console.lines if "everything ends" in line)
    assert "and 1 restarts within 300 s are used up" in told


async def test_each_task_has_a_budget_of_its_own(launcher: Callable[..., Launcher]) -> None:
    launched = launcher({"worker": "first_time() and sys.exit(138)"}, workers=2, chief=False, restarts=1)
    assert await launched.run() == 0
    assert [task.starts for task in launched.tasks.values()] == [2, 2]


async def test_the_job_is_over_when_chief_and_workers_are_done(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]]
) -> None:
    """Not before the last worker, although the chief and a parameter server have ended."""
    codes = {
        "ps": "if index: until_sigterm()",
        "worker": "until_sigterm()\nsay('trained')",
        "evaluator": "until_sigterm()\nsay('evaluated')",
    }
    async with launcher(codes, ps=2, workers=1, evaluator=True, exit_secs=0.2) as launched:
        for name in ("ps/1", "worker/0", "evaluator/0"):
            await console.seen(f"[{name}] ready")
        for name in ("ps/0", "chief/0"):
            await console.seen(f"[launch] {name} is done")
        assert "launch.over" not in [kind for kind, _ in events]
        pid = launched.tasks["worker/0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        assert await launched.wait() == 0
    kinds = [(kind, data.get("task")) for kind, data in events]
    over = kinds.index(("launch.over", None))
    assert kinds.index(("launch.ended", "worker/0")) < over
    assert set(kinds[over + 1 :]) == {("launch.ended", "ps/1"), ("launch.ended", "evaluator/0")}
    assert kinds.index(("launch.ended", "evaluator/0")) < kinds.index(("launch.ended", "ps/1"))
    await console.seen("[evaluator/0] evaluated")


async def test_parameter_servers_may_end_by_themselves(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]]
) -> None:
    launched = launcher({"ps": "signal.signal(15, lambda *_: sys.exit(9)); say('ready'); sys.stdin.read()"}, ps=1)
    assert await launched.run() == 0
    assert launched.tasks["ps/0"].returncode == 0


async def test_a_parameter_server_that_does_not_end_is_killed(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    async with launcher({"ps": "stubborn()", "chief": wait}, ps=1, exit_secs=0.1) as launched:
        await console.seen("[ps/0] ready")
        (tmp_path / "go").touch()
        assert await launched.wait() == 0
    assert launched.tasks["ps/0"].returncode == -signal.SIGKILL
    await console.seen("[launch] ps/0 did not end within 0.1 s after SIGTERM: killed")


# ------------------------------------------------------------------------------------------------ stops


async def test_a_stop_ends_parameter_servers_last(
    launcher: Callable[..., Launcher], console: Console, events: list[tuple[str, dict[str, Any]]]
) -> None:
    codes = dict.fromkeys(["ps", "chief", "worker"], "until_sigterm()\nsay('told')\nsys.exit(143)")
    async with launcher(codes, ps=1, workers=1) as launched:
        for name in launched.tasks:
            await console.seen(f"[{name}] ready")
        launched.request_stop(7)
        assert await launched.wait() == 7
    assert names(events, "launch.ended")[-1] == "ps/0"
    assert console.lines.index("[ps/0] told") > max(
        console.lines.index("[chief/0] told"), console.lines.index("[worker/0] told")
    )
    assert names(events, "launch.restarting") == []


async def test_what_ignores_sigterm_is_killed_with_all_that_it_started(
    launcher: Callable[..., Launcher], console: Console
) -> None:
    async with launcher({"chief": "grandchild()\nstubborn()"}, grace_secs=0.1) as launched:
        await console.seen("[chief/0] ready")
        grandchild = await console.grandchild("chief/0")
        launched.request_stop()
        assert await launched.wait() == 0
    assert launched.tasks["chief/0"].returncode == -signal.SIGKILL
    assert ends(grandchild)
    await console.seen("[launch] chief/0 did not end within 0.1 s after SIGTERM: killed")


async def test_a_task_that_ends_leaves_nothing_in_its_group(
    launcher: Callable[..., Launcher], console: Console
) -> None:
    assert await launcher({"chief": "grandchild()"}).run() == 0
    assert ends(await console.grandchild("chief/0"))


async def test_a_stopped_task_is_woken_for_its_orderly_end(launcher: Callable[..., Launcher], console: Console) -> None:
    async with launcher({"chief": "until_sigterm()\nsay('saved')"}) as launched:
        await console.seen("[chief/0] ready")
        pid = launched.tasks["chief/0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert launched.tasks["chief/0"].returncode == 0
    await console.seen("[chief/0] saved")


async def test_kill_does_not_wait(launcher: Callable[..., Launcher], console: Console) -> None:
    async with launcher({"chief": "grandchild()\nstubborn()", "ps": "stubborn()"}, ps=1) as launched:
        await console.seen("[ps/0] ready")
        await console.seen("[chief/0] ready")
        launched.request_stop(143)
        launched.kill()
        assert await launched.wait() == 143
    assert [task.returncode for task in launched.tasks.values()] == [-9, -9]
    assert ends(await console.grandchild("chief/0"))


async def test_a_stop_during_the_pause_before_a_restart(launcher: Callable[..., Launcher], console: Console) -> None:
    launched = launcher({"chief": "sys.exit(138)"})
    launched._budgets["chief/0"] = RestartBudget(1, 300.0, first_secs=300.0, longest_secs=300.0)
    async with asyncio.timeout(20), launched:
        await console.seen("[launch] chief/0 gave up for now (exit status 138): restart 1 of 1 in 300 s")
        launched.request_stop()
    assert (launched.tasks["chief/0"].starts, launched.exit_status) == (1, 0)


async def test_cancelling_kills(launcher: Callable[..., Launcher], console: Console) -> None:
    launched = launcher({"chief": "stubborn()"})
    running = asyncio.create_task(launched.run())
    await console.seen("[chief/0] ready")
    running.cancel()
    await asyncio.sleep(0)
    while not running.done():
        running.cancel()  # the first one asks for the orderly end, which this program does not know
        await asyncio.wait([running], timeout=1)
    assert running.cancelled()
    assert launched.tasks["chief/0"].returncode == -signal.SIGKILL


async def test_an_error_in_the_block_ends_the_cluster(launcher: Callable[..., Launcher], console: Console) -> None:
    with pytest.raises(ZeroDivisionError):
        async with launcher({"chief": "until_sigterm()"}) as launched:
            await console.seen("[chief/0] ready")
            raise ZeroDivisionError
    assert launched.tasks["chief/0"].returncode == 0


async def test_a_launcher_is_entered_once_and_before_it_is_used(launcher: Callable[..., Launcher]) -> None:
    launched = launcher({})
    with pytest.raises(RuntimeError, match="was not entered"):
        await launched.wait()
    assert await launched.run() == 0
    with pytest.raises(RuntimeError, match="make another one"):
        await launched.run()


async def test_a_process_that_cannot_be_started_is_an_error(
    launcher: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launcher({"chief": "until_sigterm()"}, ps=1)
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    with pytest.raises(FileNotFoundError):
        await launched.run()


# ------------------------------------------------------------------------------------------------ output


async def test_lines_of_many_tasks_stay_whole(launcher: Callable[..., Launcher], console: Console) -> None:
    code = """
for number in range(300):
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{role}{index} ")
        stream.flush()
        stream.write(f"{number:03} " + "x" * 100 + "\\n")
        stream.flush()
"""
    launched = launcher({"worker": code}, workers=3)
    assert await launched.run() == 0
    await console.seen("[launch] the job is over")
    for index in range(3):
        wanted = [f"[worker/{index}] worker{index} {number:03} " + "x" * 100 for number in range(300)]
        found = [line for line in console.lines if line.startswith(f"[worker/{index}]")]
        assert sorted(found) == sorted(wanted * 2)
    assert all(line.startswith("[") for line in console.lines)


async def test_the_last_words_arrive(launcher: Callable[..., Launcher], console: Console) -> None:
    code = r"""
os.write(1, b"bad \xff\xfe bytes\n" + b"5%\r10%\r" + b"100%\nno end")
os.write(2, b"y" * 100_000)
os.kill(os.getpid(), 9)
"""
    launched = launcher({"chief": code}, restarts=0)
    assert await launched.run() == 137
    await console.seen("[launch] chief/0 was killed")
    lines = [line.removeprefix("[chief/0] ") for line in console.lines if line.startswith("[chief/0] ")]
    assert [line for line in lines if "y" not in line or "b" in line] == [
        r"bad \xff\xfe bytes",
        "5%",
        "100%",
        "no end",
    ]
    assert "".join(line for line in lines if set(line) == {"y"}) == "y" * 100_000


async def test_log_files_hold_every_byte_of_every_start(
    launcher: Callable[..., Launcher], console: Console, tmp_path: Path
) -> None:
    code = r"""
os.write(1, b"\xff1%\r2%\r3%\nrest")
first_time() and sys.exit(138)
"""
    launched = launcher({"chief": code}, log_dir=tmp_path / "new" / "logs")
    assert await launched.run() == 0
    assert [path.name for path in (tmp_path / "new" / "logs").iterdir()] == ["chief-0.log"]
    assert (tmp_path / "new" / "logs" / "chief-0.log").read_bytes() == b"\xff1%\r2%\r3%\nrest" * 2


async def test_a_log_directory_that_cannot_be_made(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        await launcher({}, log_dir=tmp_path / "file").run()


MANY = 40_000


async def test_a_blocked_terminal_loses_nothing(launcher: Callable[..., Launcher], console: Console) -> None:
    """The program waits in its `print` until somebody reads: there is more than all buffers on the way hold."""
    code = f"for number in range({MANY}): print(f'{{number:06}}' + 'x' * 90)"
    console.stop()
    async with launcher({"chief": code}) as launched:
        async with asyncio.timeout(30):
            while not launched._outputs.writer.full:
                await asyncio.sleep(0.01)
        assert launched.tasks["chief/0"].returncode is None, "it waits"
        console.start()
        assert await launched.wait() == 0
    await console.seen("[launch] the job is over")
    numbers = [int(line[10:16]) for line in console.lines if line.startswith("[chief/0]")]
    assert numbers == list(range(MANY))


async def test_a_blocked_terminal_does_not_hold_up_a_stop(launcher: Callable[..., Launcher], console: Console) -> None:
    code = """
signal.signal(15, lambda *_: (os.write(1, b"saved\\n"), sys.exit(0)))
say("ready")
while True: os.write(1, b"x" * 90 + b"\\n")
"""
    async with launcher({"chief": code}) as launched:
        await console.seen("[chief/0] ready")
        console.stop()
        async with asyncio.timeout(30):
            while not launched._outputs.writer.full:
                await asyncio.sleep(0.01)
        launched.request_stop()
        async with asyncio.timeout(10):
            while launched.tasks["chief/0"].returncode is None:
                await asyncio.sleep(0.01)
        assert launched.tasks["chief/0"].returncode == 0
        console.start()
    await console.seen("[chief/0] saved")


async def test_a_terminal_that_is_gone_does_not_end_the_job(
    launcher: Callable[..., Launcher], console: Console
) -> None:
    read, write = os.pipe()
    os.close(read)
    assert await launcher({"chief": "say('nobody reads this')"}, stdout=write).run() == 0
    await console.seen("[launch] cannot write to standard output any more: Broken pipe; what comes for it is dropped")
    os.close(write)


async def test_who_keeps_a_pipe_open_does_not_hold_up_the_end(
    launcher: Callable[..., Launcher], console: Console
) -> None:
    """A daemon in a session of its own, which is its right."""
    code = "grandchild(start_new_session=True, stderr=None)\nsay('last')"
    launched = launcher({"chief": code})
    async with asyncio.timeout(20):
        assert await launched.run() == 0
    await console.seen("[chief/0] last")
    daemon = await console.grandchild("chief/0")
    assert not gone(daemon)
    daemon.kill()


# ------------------------------------------------------------------------------------------ the launcher as a process


class Launched:
    """A real launcher in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def seen(self, start: str) -> str:
        assert self.process.stdout is not None
        while True:
            for line in self.lines:
                if line.startswith(start):
                    return line
            line = self.process.stdout.readline()
            assert line, f"no {start!r} in {self.lines}"
            self.lines.append(line.rstrip("\n"))

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(30)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def launch(
    program: Callable[..., list[str]], python: str, fresh_environ: dict[str, str]
) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(codes: dict[str, str], *options: str, **popen: Any) -> Launched:
        process = subprocess.Popen(
            [python, "-m", "asupervisor", "launch", *options, *program(**codes)],
            env=fresh_environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **popen,
        )
        started.append(Launched(process))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()


ORDERLY = dict.fromkeys(["ps", "chief", "worker"], "grandchild()\nuntil_sigterm()\nsay('told')\nsys.exit(143)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_ends_all_in_order(launch: Callable[..., Launched], number: signal.Signals) -> None:
    launched = launch(ORDERLY, "--ps", "1", "--workers", "1")
    for name in ("ps/0", "chief/0", "worker/0"):
        launched.seen(f"[{name}] ready")
    children = launched.children()
    assert len(children) == 7, "three tasks, their children, and the guard"
    launched.process.send_signal(number)
    assert launched.end() == 128 + number
    assert launched.lines.index("[ps/0] told") > launched.lines.index("[chief/0] told")
    assert all(ends(child) for child in children)
    assert f"[launch] {number.name}: everything ends in order; a second one kills" in launched.lines


def test_a_terminals_ctrl_c_reaches_the_launcher_alone(launch: Callable[..., Launched]) -> None:
    """It goes to the whole process group of the launcher."""
    launched = launch({"chief": "until_sigterm()\nsay('told')"}, start_new_session=True)
    launched.seen("[chief/0] ready")
    os.killpg(launched.process.pid, signal.SIGINT)
    assert launched.end() == 130
    assert "[chief/0] told" in launched.lines
    assert "[launch] chief/0 is done" in launched.lines


def test_a_second_ctrl_c_kills_at_once(launch: Callable[..., Launched]) -> None:
    launched = launch({"chief": "stubborn()", "ps": "grandchild()\nstubborn()"}, "--ps", "1", "--grace-secs", "100")
    launched.seen("[ps/0] ready")
    launched.seen("[chief/0] ready")
    children = launched.children()
    launched.process.send_signal(signal.SIGINT)
    launched.seen("[launch] SIGINT")
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == 130
    assert "[launch] killing ps/0, chief/0" in launched.lines
    assert all(ends(child) for child in children)


def test_an_ignored_signal_stays_ignored(launch: Callable[..., Launched]) -> None:
    """As under nohup: the program goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch({"chief": "until_sigterm()"})
    finally:
        signal.signal(signal.SIGHUP, before)
    launched.seen("[chief/0] ready")
    launched.process.send_signal(signal.SIGHUP)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 143
    assert not any("SIGHUP" in line for line in launched.lines)


def test_no_child_survives_a_launcher_that_was_killed(launch: Callable[..., Launched]) -> None:
    launched = launch(
        {"chief": "grandchild()\nstubborn()", "ps": "stubborn()", "worker": "stubborn()"}, "--ps", "1", "--workers", "1"
    )
    for name in ("ps/0", "chief/0", "worker/0"):
        launched.seen(f"[{name}] ready")
    children = launched.children()
    assert len(children) == 5
    launched.process.kill()
    assert all(ends(child) for child in children)


def test_a_program_does_not_begin_before_the_guard_knows_of_it(
    python: str, fresh_environ: dict[str, str], tmp_path: Path
) -> None:
    """The launcher is killed in between."""
    code = f"""
import os, signal, sys
from asupervisor.cluster.processes import Guard, Process

class Late(Guard):
    def watch(self, group):
        print(group, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

program = "import pathlib, time; pathlib.Path({str(tmp_path / "begun")!r}).touch(); time.sleep(600)"
Process([sys.executable, "-S", "-c", program], Late(), stdout=1, stderr=2, environ=os.environ)
"""
    with subprocess.Popen([python, "-c", code], env=fresh_environ, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert killed.stdout.read() == "", "nobody holds it open any more"
    with contextlib.suppress(psutil.NoSuchProcess):  # already
        assert ends(psutil.Process(pid))
    assert not (tmp_path / "begun").exists()


def test_a_guard_that_was_killed_is_replaced(launch: Callable[..., Launched]) -> None:
    launched = launch(
        {"chief": "stubborn()", "worker": "if first_time(): until_sigterm()\nstubborn('back')"}, "--workers", "1"
    )
    launched.seen("[chief/0] ready")
    worker = psutil.Process(int(launched.seen("[launch] worker/0 is process ").split()[-1]))
    launched.seen("[worker/0] ready")
    (guard,) = [child for child in launched.children() if "killpg" in " ".join(child.cmdline())]
    guard.kill()
    assert ends(guard)
    worker.kill()  # the news of its restart reaches nobody: a new guard is told about all
    launched.seen("[worker/0] back")
    children = launched.children()
    assert len(children) == 3
    launched.process.kill()
    assert all(ends(child) for child in children)


def test_a_launcher_killed_while_it_starts_leaves_nothing(launch: Callable[..., Launched]) -> None:
    """At a different moment each time."""
    for moment in ("[launch] ps/0 is", "[launch] chief/0 is", "[launch] worker/0 is", "[launch] worker/2 is"):
        launched = launch(dict.fromkeys(["ps", "chief", "worker"], "stubborn()"), "--ps", "1", "--workers", "3")
        launched.seen(moment)
        launched.process.send_signal(signal.SIGSTOP)
        children = launched.children()
        launched.process.kill()
        assert all(ends(child) for child in children)


def test_nobody_takes_the_output_and_a_second_signal_ends_it_all(launch: Callable[..., Launched]) -> None:
    launched = launch({"chief": "say('ready')\nwhile True: print('x' * 1000)"})
    launched.seen("[launch] chief/0 is process")
    chief = psutil.Process(int(launched.lines[-1].split()[-1]))
    launched.process.send_signal(signal.SIGTERM)
    assert ends(chief)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(30) == 143
