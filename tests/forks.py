"""Python programs in processes of their own, forked from one that has imported what is heavy: see `forking.py`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import asupervisor


def environ_of_children() -> dict[str, str]:
    """The environment for a Python process that imports this asupervisor."""
    root = str(Path(asupervisor.__file__).parent.parent)
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    environ["PYTHONUNBUFFERED"] = "1"
    environ.pop("ASUPERVISOR_TEST_TF_MODE", None)
    environ.pop("PYTEST_CURRENT_TEST", None)
    return environ


class Forked:
    """A Python program in a process of its own; looks like `subprocess.Popen`.

    It is killed when nobody can ask for its end any more, since this object or this process is gone.

    Args:
        control: The socket of `forking.py`.
        arguments: What to give to the interpreter: a script, ``-c`` or ``-m``, and their arguments.
        cwd: Its directory.
        environ: Its environment.
        stdin: A descriptor, `subprocess.PIPE` or `subprocess.DEVNULL`.
        stdout: Likewise.
        stderr: Likewise.
    """

    def __init__(
        self,
        control: socket.socket,
        arguments: Sequence[Any],
        cwd: Any,
        environ: dict[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        #: When it ended, as `time.time` tells it.
        self.ended_at: float | None = None
        theirs: list[int] = []
        self.stdin = self._stream(stdin, theirs, "w")
        self.stdout = self._stream(stdout, theirs, "r")
        self.stderr = self._stream(stderr, theirs, "r")
        answer, write = os.pipe()
        self._answer = open(answer)  # noqa: SIM115
        request = {"arguments": self.args, "cwd": str(cwd), "environ": environ}
        socket.send_fds(control, [json.dumps(request).encode() + b"\n"], [*theirs, write])
        for descriptor in (*theirs, write):
            os.close(descriptor)
        self.pid = int(self._answer.readline())

    @staticmethod
    def _stream(which: int, theirs: list[int], mode: str) -> IO[str] | None:
        if which == subprocess.DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        elif which != subprocess.PIPE:
            theirs.append(os.dup(which))
        else:
            read, write = os.pipe()
            theirs.append(write if mode == "r" else read)
            return open(read if mode == "r" else write, mode)
        return None

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answer], [], [], timeout)[0]:
            status, ended_at = self._answer.readline().split()
            self.returncode, self.ended_at = int(status), float(ended_at)
            self._answer.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self.stdin is not None:
            self.stdin.close()
        texts = {stream: "" for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed}
        readers = [threading.Thread(target=lambda s=stream: texts.update({s: s.read()})) for stream in texts]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
            for stream in texts:
                stream.close()
        return texts.get(self.stdout, ""), texts.get(self.stderr, "")  # type: ignore[arg-type]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Runs Python programs as `subprocess` does, in forks of a process that has imported what is heavy.

    Args:
        environ: The environment of programs that are given none of their own; by default that of this process.
    """

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.environ = environ_of_children() if environ is None else environ
        self._control, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__).with_name("forking.py"))]
        with theirs:
            self._process = subprocess.Popen(command, env=self.environ, stdin=theirs, stdout=subprocess.DEVNULL)

    def start(
        self,
        *arguments: Any,
        cwd: Any = ".",
        environ: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> Forked:
        """Start a program; the test waits for its end."""
        cwd = os.path.abspath(cwd)
        return Forked(self._control, arguments, cwd, environ or self.environ, stdin, stdout, stderr)

    def run(self, *arguments: Any, timeout: float = 110, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        """End the process that forks; the programs go on."""
        self._control.close()
        self._process.kill()  # to end by itself would take it seconds
        self._process.wait()
