"""The frames of other threads."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest

from asupervisor.runtime.frames import frame_of


def test_where_a_thread_is_and_that_it_has_ended() -> None:
    inside, gate = threading.Event(), threading.Event()

    def waits_here() -> None:
        inside.set()
        gate.wait(10)

    thread = threading.Thread(target=waits_here)
    thread.start()
    assert inside.wait(10)
    assert thread.ident is not None
    frame = frame_of(thread.ident)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "waits_here" in names
    gate.set()
    thread.join()
    assert frame_of(thread.ident) is None


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_the_interpreter_holds_its_threads(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """A finalizer in that moment has locked a whole process for ever: in one that takes its session with it."""
    seen: list[bool] = []
    frames = sys._current_frames

    def looked_at() -> Any:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", looked_at)
    if not collects:
        gc.disable()
    try:
        assert frame_of(threading.get_ident()) is not None
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert seen == [False]
