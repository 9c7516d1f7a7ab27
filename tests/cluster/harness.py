"""Real clusters of processes on loopback, for the tests and the benchmarks; see `programs.py`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asupervisor
from asupervisor.cluster.ports import PortReservation


class Zygote:
    """The process that forks for each task."""

    def __init__(self) -> None:
        root = str(Path(asupervisor.__file__).parent.parent)
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "programs.py")],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self._started: queue.Queue[tuple[int, int]] = queue.Queue()
        self._ended: dict[int, tuple[int, float]] = {}
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            if "started" in news:
                self._started.put((news["started"], news["pid"]))
            else:
                with self._news:
                    self._ended[news["ended"]] = (news["status"], time.time())
                    self._news.notify_all()

    def fork(self, program: str, output: Path, environ: dict[str, str], arguments: dict[str, Any]) -> tuple[int, int]:
        """Start a program; its number, and its process id."""
        assert self._process.stdin is not None
        request = {"program": program, "output": str(output), "environ": environ, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._started.get(timeout=30)

    def status_of(self, number: int, timeout_secs: float) -> tuple[int, float] | None:
        """Exit status and time of the end, or None where it does not end in time."""
        with self._news:
            self._news.wait_for(lambda: number in self._ended, timeout_secs)
            return self._ended.get(number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends its children
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Process:
    """One task, or who looks on."""

    def __init__(self, zygote: Zygote, name: str, forked: tuple[int, int], output: Path, begun_at: float) -> None:
        self._zygote = zygote
        self._output = output
        self._number, self.pid = forked
        self.name = name
        self.begun_at = begun_at
        self.killed_at = 0.0

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def records(self, *kinds: str, since: float = 0.0) -> list[dict[str, Any]]:
        """What it has told, of some kinds."""
        found = []
        for line in self.text.splitlines():
            if line.startswith('{"t": '):
                with contextlib.suppress(ValueError):  # written only in part
                    record = json.loads(line)
                    if (not kinds or record["kind"] in kinds) and record["t"] >= since:
                        found.append(record)
        return found

    def wait_for(
        self,
        *kinds: str,
        since: float = 0.0,
        timeout_secs: float = 30.0,
        where: Callable[[dict[str, Any]], bool] = lambda record: True,
    ) -> dict[str, Any]:
        """The first record of some kinds since a time."""
        deadline = time.monotonic() + timeout_secs
        while True:
            for record in self.records(*kinds, since=since):
                if where(record):
                    return record
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: no {kinds} within {timeout_secs:g} s:\n{self.text[-6000:]}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.killed_at = time.time()
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def running(self) -> bool:
        return self._zygote.status_of(self._number, 0.0) is None

    def wait(self, timeout_secs: float = 30.0) -> int:
        """The exit status: negative for a signal."""
        ended = self._zygote.status_of(self._number, timeout_secs)
        assert ended is not None, f"{self.name} did not end within {timeout_secs:g} s:\n{self.text[-6000:]}"
        return ended[0]

    @property
    def ended_at(self) -> float:
        ended = self._zygote.status_of(self._number, 0.0)
        assert ended is not None
        return ended[1]


class Cluster:
    """A cluster whose tasks are started, killed and frozen one by one.

    Args:
        zygote: Who forks.
        directory: For outputs and checkpoints.
        ps: How many parameter servers.
        workers: How many workers, beside the chief.
        program: What the tasks are: ``"replica"`` or ``"tf_replica"``.
        **arguments: Its arguments.
    """

    def __init__(
        self,
        zygote: Zygote,
        directory: Path,
        *,
        ps: int = 1,
        workers: int = 1,
        program: str = "replica",
        **arguments: Any,
    ) -> None:
        self._zygote = zygote
        self._directory = directory
        self._program = program
        self._arguments = {"logdir": str(directory / "logdir"), **arguments}
        self._reservation = PortReservation(ps + 1 + workers)
        ports = list(self._reservation.ports)
        self.spec: dict[str, list[str]] = {
            "ps": [f"127.0.0.1:{ports.pop()}" for _ in range(ps)],
            "chief": [f"127.0.0.1:{ports.pop()}"],
            "worker": [f"127.0.0.1:{ports.pop()}" for _ in range(workers)],
        }
        if not workers:
            del self.spec["worker"]
        self.processes: list[Process] = []

    @property
    def logdir(self) -> Path:
        return Path(self._arguments["logdir"])

    def start(self, job: str, index: int = 0, **arguments: Any) -> Process:
        """Start a task."""
        config = json.dumps({"cluster": self.spec, "task": {"type": job, "index": index}})
        return self._start(f"{job}-{index}", self._program, {"TF_CONFIG": config}, {**self._arguments, **arguments})

    def start_all(self) -> dict[str, Process]:
        """Start every task; by ``job-index``."""
        return {
            f"{job}-{index}": self.start(job, index)
            for job, addresses in self.spec.items()
            for index in range(len(addresses))
        }

    def observe(self, **arguments: Any) -> Process:
        """Somebody who reads the global step."""
        return self._start("observer", "observer", {}, {"address": self.spec["ps"][0], **arguments})

    def _start(self, name: str, program: str, environ: dict[str, str], arguments: dict[str, Any]) -> Process:
        output = self._directory / f"{name}.{len(self.processes)}.txt"
        begun_at = time.time()
        process = Process(self._zygote, name, self._zygote.fork(program, output, environ, arguments), output, begun_at)
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End every process that still runs."""
        for process in self.processes:
            if process.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)
        self._reservation.close()

    def report(self) -> str:
        """What everybody has written last, for a failure."""
        return "\n".join(f"---- {process.name} ({process.pid})\n{process.text[-3000:]}" for process in self.processes)


@contextlib.contextmanager
def cluster_of(zygote: Zygote, directory: Path, **arguments: Any) -> Iterator[Cluster]:
    """A cluster, which is ended with the block."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Cluster(zygote, directory, **arguments)
    try:
        yield made
    except AssertionError as error:
        error.add_note(made.report())
        raise
    finally:
        made.close()
