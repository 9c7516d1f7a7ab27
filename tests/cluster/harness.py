"""Real clusters of processes on loopback, for the tests and the benchmarks; see `programs.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asupervisor.cluster.ports import PortReservation
from tests.cluster.network import Network
from tests.forks import Forks

PROGRAMS = Path(__file__).with_name("programs.py")
MODE = "ASUPERVISOR_TEST_TF_MODE"


class Process:
    """One task, or who looks on."""

    def __init__(
        self, forks: Forks, name: str, program: str, output: Path, environ: dict[str, str], arguments: dict[str, Any]
    ) -> None:
        self._output = output
        self.name = name
        self.begun_at = time.time()
        self.killed_at = 0.0
        with output.open("a") as file:
            self._forked = forks.start(
                PROGRAMS,
                program,
                json.dumps(arguments),
                environ={**forks.environ, MODE: os.environ.get(MODE, ""), **environ},
                stdout=file.fileno(),
                stderr=file.fileno(),
            )
        self.pid = self._forked.pid

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

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

    def wait_for_text(self, text: str, timeout_secs: float = 30.0) -> None:
        """Wait until it has written something."""
        deadline = time.monotonic() + timeout_secs
        while text not in self.text:
            assert time.monotonic() < deadline, f"{self.name}: no {text!r} within {timeout_secs:g} s:\n{self.text}"
            time.sleep(0.01)

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
        return self._forked.poll() is None

    def wait(self, timeout_secs: float = 30.0) -> int:
        """The exit status: negative for a signal."""
        try:
            return self._forked.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_secs:g} s:\n{self.text[-6000:]}") from None

    @property
    def ended_at(self) -> float:
        assert self._forked.poll() is not None
        assert self._forked.ended_at is not None
        return self._forked.ended_at


class Cluster:
    """A cluster whose tasks are started, killed and frozen one by one.

    Args:
        forks: Who forks.
        directory: For outputs and checkpoints.
        ps: How many parameter servers.
        workers: How many workers, beside the chief.
        program: What the tasks are: ``"replica"`` or ``"tf_replica"``.
        **arguments: Its arguments.
    """

    def __init__(
        self,
        forks: Forks,
        directory: Path,
        *,
        ps: int = 1,
        workers: int = 1,
        program: str = "replica",
        **arguments: Any,
    ) -> None:
        self._forks = forks
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

    def start(self, job: str, index: int = 0, *, through: Network | None = None, **arguments: Any) -> Process:
        """Start a task, which reaches the others through a network of the test's own, where there is one."""
        spec = self.spec if through is None else self._seen_by(job, index, through)
        config = json.dumps({"cluster": spec, "task": {"type": job, "index": index}})
        return self._start(f"{job}-{index}", self._program, {"TF_CONFIG": config}, {**self._arguments, **arguments})

    @property
    def ports(self) -> list[int]:
        """Where the tasks listen."""
        return [int(address.rpartition(":")[2]) for addresses in self.spec.values() for address in addresses]

    def _seen_by(self, job: str, index: int, network: Network) -> dict[str, list[str]]:
        return {
            other: [
                address if (other, number) == (job, index) else network.relayed_address(address)
                for number, address in enumerate(addresses)
            ]
            for other, addresses in self.spec.items()
        }

    def start_all(self, *, through: Network | None = None) -> dict[str, Process]:
        """Start every task; by ``job-index``."""
        return {
            f"{job}-{index}": self.start(job, index, through=through)
            for job, addresses in self.spec.items()
            for index in range(len(addresses))
        }

    def observe(self, **arguments: Any) -> Process:
        """Somebody who reads the global step."""
        return self._start("observer", "observer", {}, {"address": self.spec["ps"][0], **arguments})

    def _start(self, name: str, program: str, environ: dict[str, str], arguments: dict[str, Any]) -> Process:
        output = self._directory / f"{name}.{len(self.processes)}.txt"
        process = Process(self._forks, name, program, output, environ, arguments)
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
def cluster_of(forks: Forks, directory: Path, **arguments: Any) -> Iterator[Cluster]:
    """A cluster, which is ended with the block."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Cluster(forks, directory, **arguments)
    try:
        yield made
    except AssertionError as error:
        error.add_note(made.report())
        raise
    finally:
        made.close()
