"""Opt-in signal handling: an orderly stop first, then the handler that was there before, which is never stolen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asupervisor.errors import WrongEventLoop
from asupervisor.runtime import signals

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def received() -> Iterator[list[str]]:
    """What the handlers that were there before the test's session have received."""
    texts: list[str] = []
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    for number in signals.STOP_SIGNALS:
        signal.signal(number, lambda number, frame: texts.append(f"host {signal.Signals(number).name}"))
    yield texts
    for number, handler in before.items():
        signal.signal(number, handler)
    assert signals._subscribers == ()
    assert not any(signals._previous.values())
    assert signals._held_back is None


@pytest.fixture
def program(python: str, fresh_environ: dict[str, str]) -> Run:
    """Runs a program in a process of its own; `stop(number)` in it sends a signal to itself."""

    def run(text: str, **options: Any) -> subprocess.CompletedProcess[str]:
        prelude = """
        import asyncio, os, signal, sys
        from asupervisor.runtime import signals
        from asupervisor.runtime.block import Block
        from asupervisor.runtime.coordinator import Coordinator
        from asupervisor.runtime.host import Host

        coordinator = Coordinator()

        def send(number):
            os.kill(os.getpid(), number)

        def session(settle_secs=0.0, **options):
            on_signal = lambda number: coordinator.request_stop()
            async def startup(host):
                signals.subscribe(on_signal)
                return coordinator
            settled = []
            async def settle():
                await asyncio.sleep(settle_secs)
                if not settled:  # it is asked once more before the release
                    print("settled", flush=True)
                settled.append(1)
            async def release():
                asyncio.get_running_loop().call_soon(signals.unsubscribe, on_signal)
            return Block(lambda: Host("session", coordinator, startup=startup, settle=settle, release=release,
                                      stop_grace_secs=30))
        """
        return subprocess.run(
            [python, "-c", textwrap.dedent(prelude) + textwrap.dedent(text)],
            env=fresh_environ,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    return run


# ---------------------------------------------------------------------------------------------------------- chaining


def test_chains_and_restores(received: list[str]) -> None:
    handlers = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    seen: list[int] = []
    signals.subscribe(seen.append)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGTERM, signal.SIGINT]
    assert received == ["host SIGTERM", "host SIGINT"], "the host's own handlers act at once, never instead"
    signals.unsubscribe(seen.append)
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == handlers
    signal.raise_signal(signal.SIGTERM)
    assert len(seen) == 2
    assert len(received) == 3


def test_several_sessions_share_the_handlers(received: list[str]) -> None:
    first: list[int] = []
    second: list[int] = []
    on_first, on_second = first.append, second.append
    signals.subscribe(on_first)
    signals.subscribe(on_second)
    signal.raise_signal(signal.SIGINT)
    signals.unsubscribe(on_first)
    signals.unsubscribe(on_first)
    signal.raise_signal(signal.SIGINT)
    signals.unsubscribe(on_second)
    assert (len(first), len(second), len(received)) == (1, 2, 2)


def test_ignored_signals_stay_ignored(received: list[str]) -> None:
    seen: list[int] = []
    on_signal = seen.append
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.subscribe(on_signal)
    signal.raise_signal(signal.SIGINT)
    signals.unsubscribe(on_signal)
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_somebody_chains_to_ours(received: list[str]) -> None:
    """They stay above; ours, below, passes on; and a later session goes on top without going round in circles."""
    order: list[str] = []
    seen: list[int] = []
    on_signal = seen.append
    signals.subscribe(on_signal)
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)

    def theirs(number: int, frame: Any) -> None:
        order.append("theirs")
        ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    signal.raise_signal(signal.SIGTERM)
    signals.unsubscribe(on_signal)
    assert signal.getsignal(signal.SIGTERM) is theirs
    signal.raise_signal(signal.SIGTERM)
    assert (order, received, len(seen)) == (["theirs"] * 2, ["host SIGTERM"] * 2, 1)

    signals.subscribe(on_signal)
    signal.raise_signal(signal.SIGTERM)
    signals.unsubscribe(on_signal)
    assert signal.getsignal(signal.SIGTERM) is theirs
    assert (order, received, len(seen)) == (["theirs"] * 3, ["host SIGTERM"] * 3, 2)
    signals._previous[signal.SIGTERM].clear()  # theirs goes with this test


def test_only_in_the_main_thread() -> None:
    errors: list[BaseException] = []

    def subscribe() -> None:
        try:
            signals.subscribe(print)
        except WrongEventLoop as error:
            errors.append(error)

    thread = threading.Thread(target=subscribe)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in str(errors[0])


async def test_handlers_of_the_loop_still_act(received: list[str]) -> None:
    """`loop.add_signal_handler` is fed by a descriptor, whatever Python's handler is."""
    told = asyncio.Event()
    seen: list[int] = []
    on_signal = seen.append
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    try:
        signals.subscribe(on_signal)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await told.wait()
        signals.unsubscribe(on_signal)
        assert seen == [signal.SIGTERM]
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


# ------------------------------------------------------------------------------------------------- whole processes


def test_nothing_happens_at_import(program: Run) -> None:
    done = program("""
        import asupervisor
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_orderly_end_with_the_status_that_a_shell_expects(program: Run, name: str) -> None:
    """The body is not interrupted, the last words are said, and then the signal does what it would have done."""
    done = program(f"""
        async def main():
            async with session():
                send(signal.{name})
                await coordinator.wait_for_stop()
                print("the body ended by itself", flush=True)
            await asyncio.sleep(30)
            print("never", flush=True)

        asyncio.run(main())
    """)
    assert done.stdout.splitlines() == ["the body ended by itself", "settled"]
    # Python itself ends by SIGINT after a KeyboardInterrupt that nobody caught.
    assert done.returncode == -signal.Signals[name], done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (name == "SIGINT")


def test_a_second_ctrl_c_cancels_the_body(program: Run) -> None:
    done = program("""
        async def main():
            async with session():
                send(signal.SIGINT)
                await coordinator.wait_for_stop()
                send(signal.SIGINT)
                await asyncio.sleep(30)
                print("never", flush=True)

        asyncio.run(main())
    """)
    assert done.stdout.splitlines() == ["settled"]
    assert done.returncode == -signal.SIGINT, done.stderr


def test_a_third_ctrl_c_skips_the_last_words(program: Run) -> None:
    done = program("""
        async def main():
            async with session(settle_secs=30):
                send(signal.SIGINT)
                await coordinator.wait_for_stop()
                asyncio.get_running_loop().call_later(0.5, send, signal.SIGINT)
                send(signal.SIGINT)
                await asyncio.sleep(30)
                print("never", flush=True)

        asyncio.run(main())
    """)
    assert done.stdout.splitlines() == []
    assert done.returncode == -signal.SIGINT, done.stderr


def test_a_second_sigterm_ends_the_process(program: Run) -> None:
    done = program("""
        async def main():
            async with session():
                send(signal.SIGTERM)
                await coordinator.wait_for_stop()
                send(signal.SIGTERM)
                print("never", flush=True)

        asyncio.run(main())
    """)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_uvicorn_keeps_its_shutdown(program: Run) -> None:
    """The server is told by its own handler, shuts down in order, and the lifespan leaves the session cleanly."""
    pytest.importorskip("uvicorn")
    done = program("""
        import contextlib, socket
        import uvicorn

        @contextlib.asynccontextmanager
        async def lifespan(app):
            async with session():
                async def stop():
                    await asyncio.sleep(0.05)
                    send(signal.SIGTERM)
                task = asyncio.create_task(stop())
                yield
            print("left the session", flush=True)

        async def app(scope, receive, send):
            assert scope["type"] == "lifespan"
            await receive()
            async with lifespan(app):
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        uvicorn.Server(uvicorn.Config(app, port=port, log_level="error")).run()
        print("the server came back", flush=True)
    """)
    assert done.stdout.splitlines()[:2] == ["settled", "left the session"], done.stderr
    assert done.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has no wheel there")
def test_under_uvloop(program: Run) -> None:
    pytest.importorskip("uvloop")
    done = program("""
        import uvloop

        async def main():
            async with session():
                send(signal.SIGINT)
                await coordinator.wait_for_stop()
                print("the body ended by itself", flush=True)
            await asyncio.sleep(30)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    """)
    assert done.stdout.splitlines() == ["the body ended by itself", "settled"], done.stderr
    assert done.returncode == -signal.SIGINT, done.stderr
