"""Each guard catches what it is there for, and lets go what is not its business."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Any

import pytest

HEAD = """
import asyncio, os, signal, socket, sys, threading, time
import pytest
"""


@pytest.fixture
def outcome(pytester: pytest.Pytester, forks: Any, plugin_arguments: list[str]):
    """Run a test file in a process of its own under all guards, and return its outcomes and its output."""

    def run(source: str, kinds: str = "all", **expected: int) -> str:
        pytester.makefile(
            ".ini",
            pytest="[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
            f"asupervisor_guards = {kinds}\nmarkers =\n  allow_nothing: unused\nfilterwarnings = error\n",
        )
        pytester.makepyfile(test_it=HEAD + textwrap.dedent(source))
        # What has been imported cannot be rewritten, and need not be.
        options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *plugin_arguments]
        done = forks.run("-m", "pytest", "--strict-markers", *options, cwd=pytester.path)
        text: str = done.stdout
        assert pytest.RunResult.parse_summary_nouns(text.splitlines()) == expected, text + done.stderr
        return text

    return run


def test_a_blocked_loop(outcome) -> None:
    text = outcome(
        """
        async def test_waits():
            time.sleep(0.2)

        async def test_computes():
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass

        async def test_waits_for_a_lock():
            lock = threading.Lock()
            lock.acquire()
            threading.Timer(0.2, lock.release).start()
            with lock:
                pass

        async def test_long_but_not_blocked():
            for _ in range(20):
                time.sleep(0.01)
                await asyncio.sleep(0)

        def test_no_loop():
            time.sleep(0.2)

        @pytest.mark.allow_stall
        async def test_on_purpose():
            time.sleep(0.2)

        async def test_after_it():
            pass
        """,
        passed=7,
        errors=3,
    )
    assert text.count("\nthe event loop stood still for") == 3
    assert "time.sleep(0.2)" in text
    assert "with lock:" in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's queueing times")
def test_a_crowded_machine_is_not_a_blocked_loop(outcome) -> None:
    """One callback takes long because other processes and another thread of this one use the processors."""
    hogs = max(4, 3 * (os.cpu_count() or 1))
    outcome(
        f"""
        import subprocess

        @pytest.fixture
        def crowd():
            hog = "import os\\nwhile os.getppid() == " + str(os.getpid()) + ": pass"
            hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range({hogs})]
            ended = threading.Event()
            def spin():
                while not ended.is_set():
                    pass
            thread = threading.Thread(target=spin)
            thread.start()
            yield
            ended.set()
            thread.join()
            for process in hogs:
                process.kill()
                process.wait()

        async def test_crowded(crowd):
            slow = 0
            for _ in range(300):
                await asyncio.sleep(0)
                began = time.perf_counter()
                end = time.thread_time() + 0.02
                while time.thread_time() < end:
                    pass
                slow += time.perf_counter() - began > 0.05
                if slow > 5:
                    break
            print("slow callbacks:", slow)
            assert slow
        """,
        passed=1,
    )


def test_a_thread(outcome) -> None:
    text = outcome(
        """
        ended = threading.Event()

        def test_leaves_it():
            threading.Thread(target=ended.wait, name="straggler", daemon=True).start()

        @pytest.mark.allow_leak
        def test_on_purpose():
            threading.Thread(target=ended.wait, name="allowed", daemon=True).start()

        def test_soon_over():
            threading.Timer(0.1, lambda: None).start()

        @pytest.fixture(scope="module")
        def helper():
            thread = threading.Thread(target=ended.wait, name="module's")
            thread.start()
            yield
            ended.set()
            thread.join()

        def test_of_a_wider_fixture(helper):
            pass
        """,
        passed=4,
        errors=1,
    )
    assert "left behind: thread 'straggler' (daemon)" in text


def test_a_task(outcome) -> None:
    text = outcome(
        """
        tasks = set()

        async def forever():
            await asyncio.Event().wait()

        async def test_leaves_it():
            tasks.add(asyncio.create_task(forever(), name="straggler"))
            await asyncio.sleep(0)

        def test_leaves_it_in_a_loop_of_its_own():
            async def main():
                tasks.add(asyncio.create_task(forever(), name="another"))
                await asyncio.sleep(0)
            asyncio.run(main())

        @pytest.mark.allow_leak("tasks")
        async def test_on_purpose():
            tasks.add(asyncio.create_task(forever()))
            await asyncio.sleep(0)
        """,
        passed=3,
        errors=2,
    )
    assert "left behind when its loop closed: task 'straggler' of forever (test_it.py" in text
    assert "left behind when its loop closed: task 'another' of forever" in text


def test_a_descriptor(outcome) -> None:
    text = outcome(
        """
        kept = []

        def test_leaves_a_file(tmp_path):
            kept.append(os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR))

        def test_leaves_a_socket():
            kept.append(socket.socket())

        def test_closes(tmp_path):
            with open(tmp_path / "file", "w"), socket.socket():
                pass

        @pytest.mark.allow_leak("files")
        def test_on_purpose(tmp_path):
            kept.append(os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR))
        """,
        passed=4,
        errors=2,
    )
    assert "/file" in text
    assert "socket:" in text


def test_the_environment_and_the_signal_handlers(outcome) -> None:
    text = outcome(
        """
        def test_changes_a_variable():
            os.environ["SOMEBODYS_VARIABLE"] = "1"

        def test_patches_a_variable(monkeypatch):
            monkeypatch.setenv("ANOTHER_VARIABLE", "1")

        def test_steals_a_signal():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        """,
        passed=3,
        errors=2,
    )
    assert "environment variable SOMEBODYS_VARIABLE: None became '1'" in text
    assert "signal handler of SIGTERM" in text


def test_a_lost_exception(outcome) -> None:
    text = outcome(
        """
        async def fails():
            raise ValueError("nobody asked")

        async def test_of_a_task():
            asyncio.create_task(fails())
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        async def test_of_a_future():
            asyncio.get_running_loop().create_future().set_exception(ValueError("nor here"))

        async def test_of_a_callback():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        @pytest.mark.allow_leak("exceptions")
        async def test_on_purpose():
            asyncio.create_task(fails())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        """,
        passed=4,
        errors=3,
    )
    assert "nobody asked" in text
    assert "nor here" in text
    assert "ZeroDivisionError" in text


def test_a_coroutine_that_nobody_awaits(outcome) -> None:
    text = outcome(
        """
        async def forgotten():
            pass

        def test_forgets_it():
            forgotten()

        def test_after_it():
            pass
        """,
        passed=1,
        failed=1,
    )
    assert "coroutine 'forgotten' was never awaited" in text
    assert "FAILED test_it.py::test_forgets_it" in text


def test_unasked_only_our_own_threads_count(outcome) -> None:
    text = outcome(
        """
        ended = threading.Event()

        class Theirs(threading.Thread):
            pass

        class Ours(threading.Thread):
            pass

        Ours.__module__ = "asupervisor.runtime.threads"

        def test_theirs():
            Theirs(target=ended.wait, name="theirs", daemon=True).start()

        def test_ours():
            Ours(target=ended.wait, name="/cpu:0", daemon=True).start()
        """,
        kinds="sessions",
        passed=2,
        errors=1,
    )
    assert "left behind: thread '/cpu:0' (daemon)" in text


def test_a_session_of_a_wider_fixture_may_start_threads(outcome) -> None:
    text = outcome(
        """
        ended = threading.Event()

        class Ours(threading.Thread):
            pass

        Ours.__module__ = "asupervisor.runtime.threads"

        @pytest.fixture(scope="module")
        def session():
            ended.clear()
            thread = Ours(target=ended.wait, name="device", daemon=True)
            thread.start()
            yield
            ended.set()
            thread.join()

        def test_first(session):
            Ours(target=ended.wait, name="side", daemon=True).start()

        def test_second(session):
            threading.Thread(target=ended.wait, name="theirs", daemon=True).start()
            Ours(target=ended.wait, name="side", daemon=True).start()

        def test_third(session):
            pass
        """,
        passed=3,
        errors=1,
    )
    assert "left behind: thread 'theirs' (daemon)" in text
    assert "thread 'side'" not in text


def test_a_guard_that_does_not_exist(pytester: pytest.Pytester, fresh_environ, plugin_arguments, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", fresh_environ["PYTHONPATH"])
    pytester.makefile(".ini", pytest="[pytest]\nasupervisor_guards = stall\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *plugin_arguments)
    result.stderr.fnmatch_lines(["*no such guard: stall; there are stalls, sessions,*"])


def test_the_plugin_does_not_import_tensorflow(
    pytester: pytest.Pytester, fresh_environ, plugin_arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", fresh_environ["PYTHONPATH"])
    pytester.makepyfile(
        """
        import sys

        def test_it(manual_clock):
            assert "asupervisor.testing.plugin" in sys.modules
            assert "tensorflow" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", *plugin_arguments).assert_outcomes(passed=1)
