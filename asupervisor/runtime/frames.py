"""What another thread is doing."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()


def frame_of(thread_ident: int) -> FrameType | None:
    """The Python frame that a thread is in, None where it has ended; any thread.

    The interpreter holds its list of threads while it makes the answer. A collection in that moment may run a finalizer
    that lets other threads in, as that of TensorFlow's sessions does: one that starts a thread then waits for the list,
    with the interpreter's lock, for ever (Python 3.11). So there is none.
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_ident)
        finally:
            if collects:
                gc.enable()
