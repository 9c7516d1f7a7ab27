"""A process that has imported what is heavy and forks for each program that a test runs: that saves seconds each time.

Started by `Forks` (forks.py), with a socket as its standard input; it ends when that is closed. A request is a line of
JSON (arguments of the interpreter, directory, environment) with four descriptors: the program's streams, and where to
write the number of its process and, at its end, its status and the time. Where nobody reads that any more, the program
is killed. What a program sees is what the interpreter would give it: its own main module, arguments, streams, signal
handlers, and the real exit of an interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any

HEAVY = (
    "tensorflow",
    "asupervisor.supervisor",
    "asupervisor.monitored",
    "asupervisor.loops",
    "asupervisor.cluster",
    "asupervisor.summary.journal",
    "asupervisor.testing.plugin",
    "sklearn.datasets",
    "tqdm",
    "fastapi",
    "uvicorn",
    "pytest",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "anyio.pytest_plugin",
    "hypothesis.strategies",
    "_hypothesis_pytestplugin",
)


def main() -> list[str] | None:
    """Serve until the other side is closed; in a program, return what it is to run."""
    control = socket.socket(fileno=os.dup(0))
    for name in (*HEAVY, *builtin_plugins_of_pytest()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what a program collects is its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        request, descriptors = receive(control)
        if not request:
            return None
        if os.fork() == 0:
            control.close()
            return keep(descriptors, json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)


def builtin_plugins_of_pytest() -> list[str]:
    try:
        from _pytest.config import default_plugins
    except ImportError:
        return []
    return [f"_pytest.{name}" for name in default_plugins]


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(control, 65536, 4)
    while data and not data.endswith(b"\n"):
        data += control.recv(65536)
    return data, descriptors


def keep(descriptors: list[int], request: dict[str, Any]) -> list[str]:
    """Fork the program, tell its number, and its status when it has ended. Returns in the program only."""
    *streams, answer = descriptors
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (answer, woken, wake):
            os.close(descriptor)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return become(request)
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # as long as the control is open here, the other end sees no end
        for descriptor in streams:
            os.close(descriptor)
        os.write(answer, f"{pid}\n".encode())
        status = outlive(pid, woken, answer)
        os.write(answer, f"{os.waitstatus_to_exitcode(status)} {time.time()}\n".encode())
    finally:
        os._exit(0)


def outlive(pid: int, woken: int, answer: int) -> int:
    """Wait until the program ends, or end it where nobody waits for it any more; its status."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(answer, 0)  # told is only that nobody reads
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 64)
            else:
                os.kill(pid, signal.SIGKILL)
                poll.unregister(answer)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status


def become(request: dict[str, Any]) -> list[str]:
    """Make this process look as if the interpreter had just been started."""
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", 0, closefd=False)  # noqa: SIM115 (lives as long as the process)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    arguments: list[str] = request["arguments"]
    return arguments


def run(arguments: list[str]) -> None:
    """What ``python`` does with these arguments: a script, ``-c`` or ``-m``."""
    kind, *rest = arguments
    if kind == "-c":
        code, *sys.argv[1:] = rest
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(code, "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        name, *sys.argv[1:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this file's directory
    program = main()
    if program is not None:
        run(program)  # what it raises is the interpreter's business
