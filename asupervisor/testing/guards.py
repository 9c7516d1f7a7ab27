"""The guards: hooks around each test that fail it for what it blocked or left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Any

import pytest

from asupervisor.testing.leaks import LEAK_KINDS, LossRecorder, Snapshot
from asupervisor.testing.stalls import StallWatch

KINDS = ("stalls", *LEAK_KINDS)
_NAME = "asupervisor-guards"


def install(
    config: pytest.Config,
    kinds: Iterable[str] = KINDS,
    *,
    limit_secs: float = 0.05,
    blame: Callable[[FrameType], bool] | None = None,
) -> None:
    """Guard every test of this run; a second call replaces the first one.

    Args:
        config: The run.
        kinds: What to guard, of `KINDS`.
        limit_secs: What one callback may keep the event loop from turning, in seconds.
        blame: Which stacks count as a stall; see `StallWatch`.

    Raises:
        pytest.UsageError: A kind is not known.
    """
    chosen = frozenset(kinds)
    if unknown := sorted(chosen - set(KINDS)):
        raise pytest.UsageError(f"no such guard: {', '.join(unknown)}; there are {', '.join(KINDS)}, or all")
    if (old := config.pluginmanager.get_plugin(_NAME)) is not None:
        old.stop()
        config.pluginmanager.unregister(old)
    if chosen:
        config.pluginmanager.register(Guards(chosen, limit_secs, blame), _NAME)


class Guards:
    """See `install`."""

    def __init__(self, kinds: frozenset[str], limit_secs: float, blame: Callable[[FrameType], bool] | None) -> None:
        self.kinds = kinds
        self._snapshot: Snapshot | None = None
        self._watch = StallWatch(limit_secs, blame) if "stalls" in kinds else None
        self._losses = LossRecorder() if kinds & {"tasks", "exceptions"} else None
        self._started = False

    def start(self) -> None:
        """Begin to watch; a second call does nothing."""
        if not self._started:
            self._started = True
            if self._watch is not None:
                self._watch.start()
            if self._losses is not None:
                self._losses.start()

    def stop(self) -> None:
        """Watch no more; a second call does nothing."""
        if self._started:
            self._started = False
            if self._watch is not None:
                self._watch.stop()
            if self._losses is not None:
                self._losses.stop()

    def pytest_sessionstart(self) -> None:
        """Before the first test."""
        self.start()

    def pytest_unconfigure(self) -> None:
        """After the last test."""
        self.stop()

    def pytest_collection_finish(self) -> None:
        """What the modules brought along stays: a collection after each test need not look at it again."""
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Before everything that belongs to one test."""
        self._snapshot = Snapshot(self.kinds)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """What a fixture of a wider scope brings along lives longer than the test that asked for it first."""
        if self._snapshot is None or fixturedef.scope == "function":
            return (yield)
        with self._snapshot.permitting():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """After everything that belongs to one test."""
        try:
            outcome = yield
        finally:
            complaints = self._complaints(item)
        if complaints:
            pytest.fail("\n".join(complaints), pytrace=False)
        return outcome

    def _complaints(self, item: pytest.Item) -> list[str]:
        allowed: set[str] = set()
        for marker in item.iter_markers("allow_leak"):
            allowed.update(marker.args or LEAK_KINDS)
        if item.get_closest_marker("allow_stall") is not None:
            allowed.add("stalls")
        complaints: list[str] = []
        snapshot, self._snapshot = self._snapshot, None
        if self._losses is not None:
            gc.collect()  # lost exceptions and coroutines speak up when they are freed
            tasks, exceptions = self._losses.take()
            if "tasks" in self.kinds - allowed:
                complaints += [f"left behind when its loop closed: {task}" for task in tasks]
            if "exceptions" in self.kinds - allowed:
                complaints += [f"asyncio's log: {text}" for text in exceptions]
        if snapshot is not None:
            snapshot.kinds -= allowed | ({"sessions"} if "threads" in allowed else set())
            complaints += [f"left behind: {leak}" for leak in snapshot.leaks()]
        if self._watch is not None:
            stalls = self._watch.take()
            if "stalls" not in allowed:
                complaints += [str(stall) for stall in stalls]
        return complaints
