"""The tasks of a launched cluster: how each one stands, what its end means, and how often it is started again."""

from __future__ import annotations

import collections
import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asupervisor.cluster.processes import Process

Role = Literal["chief", "worker", "ps", "evaluator"]

#: From this exit status on a failure is worth another try: 128 + n stands for signal n. A task of asupervisor's that
#: gives up on lost peers, or on what is not free, ends with 138, one that was told to end by SIGTERM with 143.
RETRYABLE_STATUS = 128


@dataclass(slots=True, eq=False)
class LaunchedTask:
    """One task, and how it stands.

    Attributes:
        role: What it is in the cluster.
        index: Its number among those of its role.
        address: ``127.0.0.1:port``, the same for the whole run; empty for an evaluator and for a program alone.
        pid: Process id of its latest start, or None before the first one.
        returncode: How it last ended, as `subprocess.Popen.returncode`; None while it runs.
        starts: How often it was started.
        ended: Whether it has ended and will not be started again.
    """

    role: Role
    index: int
    address: str = ""
    pid: int | None = None
    returncode: int | None = None
    starts: int = 0
    ended: bool = False
    process: Process | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """For example ``worker/0``."""
        return f"{self.role}/{self.index}"

    @property
    def trains(self) -> bool:
        """Whether the job is over only when this task has ended."""
        return self.role in ("chief", "worker")

    def environment(self, environ: Mapping[str, str], cluster: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """What its program is started with.

        Args:
            environ: The environment of all tasks.
            cluster: The addresses by role; empty for a program alone, which gets no ``TF_CONFIG``.
        """
        result = {name: value for name, value in environ.items() if name != "TF_CONFIG"} | {"PYTHONUNBUFFERED": "1"}
        if cluster:
            config = {"cluster": cluster, "task": {"type": self.role, "index": self.index}}
            result["TF_CONFIG"] = json.dumps(config)
        return result


def members(*, ps: int, workers: int, chief: bool, evaluator: bool) -> list[LaunchedTask]:
    """The tasks in the order in which they are started, parameter servers first."""
    tasks = [LaunchedTask("ps", index) for index in range(ps)]
    tasks += [LaunchedTask("chief", 0)] if chief else []
    tasks += [LaunchedTask("worker", index) for index in range(workers)]
    return tasks + ([LaunchedTask("evaluator", 0)] if evaluator else [])


def all_ended(tasks: Iterable[LaunchedTask]) -> bool:
    """Whether none of them runs, or will."""
    return all(task.ended for task in tasks)


class RestartBudget:
    """How often one task may be started again; pure, asked with times.

    Args:
        restarts: Most restarts within the window.
        window_secs: Restarts longer ago do not count, in seconds.
        first_secs: Pause before the first restart, in seconds; it doubles with each one that counts.
        longest_secs: Longest pause, in seconds.
    """

    def __init__(
        self, restarts: int, window_secs: float, *, first_secs: float = 0.25, longest_secs: float = 5.0
    ) -> None:
        self.restarts = restarts
        self.window_secs = window_secs
        self._first_secs = first_secs
        self._longest_secs = longest_secs
        self._spent: collections.deque[float] = collections.deque()

    @property
    def spent(self) -> int:
        """Restarts that counted when `spend` was last called, its own included."""
        return len(self._spent)

    def spend(self, now_secs: float) -> float | None:
        """Take one restart.

        Args:
            now_secs: Monotonic time, in seconds.

        Returns:
            The pause before it in seconds, or None where the budget is used up.
        """
        while self._spent and now_secs - self._spent[0] >= self.window_secs:
            self._spent.popleft()
        count = len(self._spent)
        if count >= self.restarts:
            return None
        self._spent.append(now_secs)
        return min(self._longest_secs, self._first_secs * 2.0 ** min(count, 30))


def describe_end(returncode: int) -> str:
    """How a process ended, in words that follow its name.

    Args:
        returncode: As `subprocess.Popen.returncode`.
    """
    if returncode < 0:
        return f"was killed by {_signal_name(-returncode)}"
    if returncode == 0:
        return "is done"
    if returncode == 138:
        return "gave up for now (exit status 138)"
    if returncode > 128 and (name := _signal_name(returncode - 128)).startswith("SIG"):
        return f"ended with exit status {returncode}, as after {name}"
    return f"failed with exit status {returncode}"


def exit_status(returncode: int) -> int:
    """What a shell would say: 128 + n for a process that was killed by signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
