"""Processes that end with us, whatever happens to us.

Each one leads a session and a process group of its own: a terminal's Ctrl-C reaches only the launcher, and whatever a
task has started can be killed together with it. Such processes would survive a launcher that is killed by SIGKILL.
Against that stands the `Guard`, a tiny process that holds the read end of a pipe whose write end the launcher alone
has, and knows the groups: at the end of the file it kills what is left. It needs no help of the kernel's beyond
pipes, so it works on macOS too, and it reaches grandchildren, as Linux's ``PR_SET_PDEATHSIG`` would not.

Nothing can fall between the two, because a process begins as a *gate*, a small program that waits for one byte and
then becomes the task's program under the same process id. The byte is sent after the guard has been told. If the
launcher dies before that, the gate reads the end of the file, and ends.

No code of ours runs between fork and exec, so threads of this process are no danger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_GATE = """
import os, sys
if os.read(0, 1):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(sys.argv[1], sys.argv[1:])
"""

_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin.buffer:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_POLL_SECS = 0.05


def _interpreter() -> list[str]:
    """Starts in about 10 ms: no site, nothing from the environment."""
    return [sys.executable, "-I", "-S", "-c"]


class Guard:
    """Kills the groups that it watches when this process is gone.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process = self._start()

    def watch(self, group: int) -> None:
        """Kill this process group when this process is gone."""
        self._groups.add(group)
        self._tell(group)

    def forget(self, group: int) -> None:
        """Leave this group alone."""
        self._groups.discard(group)
        self._tell(-group)

    def close(self) -> None:
        """End the guard. What it still watches is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()  # it has nothing else to do

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_interpreter(), _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % number)
        except BrokenPipeError:  # somebody has killed it
            self.close()
            self._process = self._start()
            for group in self._groups:
                self._tell(group)


class Process:
    """A child process that leads a group of its own; belongs to the event loop it is started on.

    Starting blocks for the millisecond that a fork takes.

    Args:
        command: The program, by its path, and its arguments.
        guard: Told of the process before its program begins.
        stdout: File descriptor for its standard output. Standard input is empty.
        stderr: The same for its error output.
        environ: Its whole environment.

    Attributes:
        pid: Its process id, and the id of its group.
        returncode: How it ended, as `subprocess.Popen.returncode`; None before `wait` has returned.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], guard: Guard, *, stdout: int, stderr: int, environ: Mapping[str, str]
    ) -> None:
        self._guard = guard
        self._popen = subprocess.Popen(
            [*_interpreter(), _GATE, *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            env=dict(environ),
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.returncode: int | None = None
        gate = self._popen.stdin
        assert gate is not None
        with gate:
            try:
                guard.watch(self.pid)
            except BaseException:
                self._popen.kill()
                self._popen.wait()
                raise
            with contextlib.suppress(BrokenPipeError):  # killed meanwhile
                gate.write(b"\n")

    def terminate(self) -> None:
        """SIGTERM to the process itself, for its orderly end; one that is stopped goes on, to take notice."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the process and to everything in its group."""
        # The number is ours while the process is not reaped, and `wait` and this run on the same thread.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM where all have ended
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the end of the process, kill what is left in its group, and return how it ended.

        Cancelled, it changes nothing: call it again, or `kill` and `reap`.
        """
        await _ended(self._popen)
        return self.reap()

    def reap(self) -> int:
        """The same for a process that has ended, or was just killed: blocks until it is gone."""
        if self.returncode is None:
            self.kill()
            self._guard.forget(self.pid)
            self.returncode = self._popen.wait()
        return self.returncode


async def _ended(popen: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process; where the system allows, without reaping it."""
    try:
        number = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):  # not on Linux, or forbidden
        while popen.poll() is None:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(_POLL_SECS)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(number, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(number)
        os.close(number)
