"""How a task ends: `run` and its exit codes, as restart policies understand them."""

from __future__ import annotations

import asyncio
import atexit
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import _tf
from asupervisor.cluster import EXIT_LOST, exit_code, run
from asupervisor.errors import (
    ClusterConfigError,
    LogdirInUse,
    ModelLost,
    PeersUnreachable,
    PortInUse,
    RecoveryExhausted,
)
from asupervisor.services.peers import is_worth_another_start
from tests.cluster.harness import Process
from tests.forks import Forks

LOST = tf.errors.UnavailableError(None, None, "gone")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("mine"), 1),
        (ModelLost(), 1),
        (ClusterConfigError("TF_CONFIG is not JSON"), 2),
        (PeersUnreachable(["/job:ps/task:0"], 3.0), EXIT_LOST),
        (PortInUse("/job:ps/task:0", "127.0.0.1:1"), EXIT_LOST),
        (LogdirInUse("logdir", "host", 1), EXIT_LOST),
        (LOST, EXIT_LOST),
        (ExceptionGroup("of tasks", [LOST]), EXIT_LOST),
        (ExceptionGroup("of tasks", [LOST, ExceptionGroup("", [ModelLost("")])]), 1),
        (ExceptionGroup("of tasks", [ClusterConfigError("TF_CONFIG is not JSON")]), 2),
        (RecoveryExhausted(3, ExceptionGroup("of a step", [LOST, LogdirInUse("logdir", "host", 1)])), EXIT_LOST),
        (tf.errors.AbortedError(None, None, "restarted"), EXIT_LOST),
        (tf.errors.DeadlineExceededError(None, None, "frozen"), EXIT_LOST),
        (tf.errors.FailedPreconditionError(None, None, "Attempting to use uninitialized value w"), EXIT_LOST),
        (tf.errors.FailedPreconditionError(None, None, "Iterator is not initialised"), 1),
        (RecoveryExhausted(3, LOST), EXIT_LOST),
        (RecoveryExhausted(3, ValueError("mine")), 1),
        (ExceptionGroup("of tasks", [RecoveryExhausted(3, LOST)]), EXIT_LOST),
        (SystemExit(7), 7),
        (SystemExit(), 0),
        (SystemExit("words"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException | None, code: int) -> None:
    assert exit_code(error) == code
    if error is not None:  # what the others are told says the same
        assert is_worth_another_start(error) == (code == EXIT_LOST)


def test_a_model_that_did_not_become_ready_is_worth_another_start() -> None:
    assert exit_code(_tf.SessionNotReady(["w"], 3.0)) == EXIT_LOST


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("clean", 0, ""),
        ("error", 1, "Traceback"),
        ("config", 2, "ClusterConfigError: TF_CONFIG is not JSON"),
        ("lost", 138, "PeersUnreachable: no answer from"),
        ("exit", 7, ""),
        ("words", 1, "no data"),
        ("pool", 0, ""),
    ],
)
def test_a_process_ends_with_its_code(forks: Forks, tmp_path: Path, how: str, code: int, says: str) -> None:
    process = Process(forks, "it", "ends", tmp_path / "output", {}, {"how": how})
    assert process.wait() == code
    assert says in process.text
    assert ("Traceback" in process.text) == (says == "Traceback")


def test_python_still_has_what_a_quick_end_needs() -> None:
    assert callable(threading._shutdown)  # type: ignore[attr-defined]
    assert callable(atexit._run_exitfuncs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handled", [False, True])
def test_a_signal_cancels_what_nobody_else_ends(forks: Forks, tmp_path: Path, number: int, handled: bool) -> None:
    process = Process(forks, "it", "waits", tmp_path / "output", {}, {"handled": handled})
    process.wait_for_text("waiting")
    process.signal(number)
    if handled:  # the first one is somebody else's business
        process.wait_for_text("told")
        with pytest.raises(AssertionError, match="did not end"):
            process.wait(0.2)
        process.signal(number)
    if handled and number == signal.SIGTERM:  # the second one acts as if there were nobody
        assert process.wait() == -signal.SIGTERM
    else:
        assert process.wait() == 128 + number
        assert "cleaned up" in process.text


def test_a_program_that_exits_after_a_signal_has_not_done_its_part(forks: Forks, tmp_path: Path) -> None:
    process = Process(forks, "it", "waits", tmp_path / "output", {}, {"handled": False, "exits": True})
    process.wait_for_text("waiting")
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_signals_need_the_main_thread() -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        await asyncio.sleep(0)

    def call() -> None:
        try:
            run(main)
        except BaseException as error:
            errors.append(error)

    thread: Any = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(errors[0], RuntimeError)
    assert "main thread" in str(errors[0])
