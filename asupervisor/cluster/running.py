"""A task's main coroutine and its exit code, as restart policies understand it.

======  ==========================================================================================================
0       the task has done its part
1       an error of its own: starting it again would not help
2       the configuration cannot work
138     a peer was lost, or did not come, for longer than allowed; or the port or the log directory is not free yet:
        start it again
130     ended by SIGINT, before its part was done
143     ended by SIGTERM, likewise
======  ==========================================================================================================

Kubernetes' TFJob with the restart policy ``ExitCode`` takes 1 to 127 for permanent and anything above for retryable.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from asupervisor.cluster.membership import Membership
from asupervisor.cluster.register import TaskState
from asupervisor.errors import (
    ClusterConfigError,
    StopGraceExceeded,
    StopRequested,
    errors_in,
    is_only,
    telling_line,
)
from asupervisor.runtime import signals
from asupervisor.services.peers import is_worth_another_start

EXIT_LOST: Final = 138
"""The exit code of a task that has lost its peers: start it again."""

EXIT_CONFIG: Final = 2

#: What becomes of a chief that has no error to end with, but whose last session is unfinished.
_UNFINISHED: Final = {
    "done": (
        EXIT_LOST,
        "The first parameter server could not be told: it does not know that the job is done, and serves on. Start "
        "this task again to tell it.",
    ),
    "lost": (
        EXIT_LOST,
        "The last session has ended without its model, which is lost or was not ready. Start this task again to go on.",
    ),
    "failed": (1, "The end of the last session is not saved, as its log tells: the job has failed."),
}


def exit_code(error: BaseException | None) -> int:
    """The exit code for what ended a task; None for a clean end. For a group it is that of all its errors, or 1."""
    if error is None:
        return 0
    if isinstance(error, BaseExceptionGroup):
        codes = {exit_code(each) for each in error.exceptions}
        return codes.pop() if len(codes) == 1 else 1
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, ClusterConfigError):
        return EXIT_CONFIG
    return EXIT_LOST if is_worth_another_start(error) else 1


def run(main: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> NoReturn:
    """Run a task's main coroutine function, and end the process with the exit code that tells how it went.

    ::

        if __name__ == "__main__":
            cluster.run(main)

    SIGTERM and SIGINT cancel the coroutine: a session in it saves and ends in order. Where something else in it handles
    signals (`Task.join`, ``Supervisor(handle_signals=True)``), the first one is its business. A second one acts at
    once. Errors of the configuration, and a lost cluster, are one line on stderr; any other error is a traceback.

    A task has one session, which may be recovered: the end of the chief's is the end of the job. A chief that fails
    before it has one ends with 1, and leaves the parameter servers to whoever started them.

    The process ends in here, after its exit functions and, unless there was a signal, its threads: write nothing behind
    it. Only in the main thread.

    Args:
        main: The coroutine function.
        *args: Its arguments.

    Raises:
        RuntimeError: Called in another thread.
        SystemExit: Where the process could not be ended; see the table at the top of `asupervisor.cluster.running`.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("cluster.run() handles signals, which needs the main thread")
    received: list[int] = []
    error: BaseException | None = None
    try:
        asyncio.run(_main(main, args, received))
    except BaseException as caught:
        error = caught
    code = exit_code(error)
    ours = Membership.latest
    # The servers are about to end: who is started again now would wait for them.
    done = ours is not None and ours.told is TaskState.DONE
    told_to_end = code == 0 or is_only(error, (asyncio.CancelledError, KeyboardInterrupt, StopRequested))
    overdue = isinstance(error, StopGraceExceeded)
    if code == 0 and not received and ours is not None and ours.unfinished is not None:
        code, line = _UNFINISHED[ours.unfinished]
        print(line, file=sys.stderr, flush=True)
    if received and told_to_end and done:
        code = 0
    elif received and (told_to_end or overdue or code == EXIT_LOST):
        code = 128 + received[0]
        if overdue and error is not None:  # behind a frozen peer, say: that is told, and no reason not to come back
            _print_lines(error)
    elif error is not None:
        _tell(error, code)
    if ours is not None and 0 < code < 128:
        ours.tell_failure()
    _end_at_once(code, join_threads=not received)
    sys.exit(code)


def _tell(error: BaseException, code: int) -> None:
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr, flush=True)
    elif code == 1:
        traceback.print_exception(error)
    elif not isinstance(error, KeyboardInterrupt):
        _print_lines(error)


def _print_lines(error: BaseException) -> None:
    for each in errors_in(error):
        lines = [f"{type(each).__name__}: {telling_line(each)}", *getattr(each, "__notes__", ())]
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _end_at_once(code: int, *, join_threads: bool) -> None:
    """Leave as the interpreter does, but for its tidying up.

    That takes a second with TensorFlow, and now and then for ever: its servers cannot be stopped, and go on beside the
    destructors.
    """
    join_all = getattr(threading, "_shutdown", None)  # it ends idle pools, too, which would wait for ever
    run_exit_functions = getattr(atexit, "_run_exitfuncs", None)
    if join_all is None or run_exit_functions is None:
        return
    if join_threads:
        join_all()
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


async def _main(main: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...], received: list[int]) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(*args), name="main")

    def on_signal(number: int) -> None:
        received.append(number)
        if signals.subscribed() == 1:  # nobody but us
            loop.call_soon_threadsafe(task.cancel)

    signals.subscribe(on_signal)
    try:
        await task
    finally:
        signals.unsubscribe(on_signal, resend=False)
