"""Denormal floats are zero while TensorFlow runs in the caller's thread, as they are in its own threads.

Arithmetic on denormal numbers can be a hundred times slower, so TensorFlow switches its threads to flush them. A
thread of Python's is not switched, and should not be: what runs in it besides TensorFlow (the conversion of feeds,
hooks) would lose its denormals. So the mode is set for the length of one call. The calls go through `ctypes`
without giving up the interpreter's lock, and cost a quarter of a microsecond each.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any

#: Offset, format and bits of the control word in the C library's fenv_t.
_LAYOUTS = {
    ("Linux", "x86_64"): (28, "I", 0x8040),
    ("Linux", "aarch64"): (0, "I", 1 << 24),
    ("Darwin", "x86_64"): (4, "I", 0x8040),
    ("Darwin", "arm64"): (8, "Q", 1 << 24),
}


def _find() -> tuple[Callable[[Any], object], Any, Any] | None:
    """The C library's fesetenv, and arguments for it: an environment that flushes, and the usual one."""
    layout = _LAYOUTS.get((platform.system(), platform.machine()))
    if layout is None:
        return None
    offset, code, bits = layout
    try:
        # PyDLL keeps the interpreter's lock: giving it up here could cost a switch interval.
        library = ctypes.PyDLL(ctypes.util.find_library("m") or "libm.so.6")
        get, put = library.fegetenv, library.fesetenv
    except (OSError, AttributeError):
        return None
    usual = ctypes.create_string_buffer(64)
    if get(usual):
        return None
    changed = bytearray(usual.raw)
    (word,) = struct.unpack_from(code, changed, offset)
    struct.pack_into(code, changed, offset, word | bits)
    flushing = ctypes.create_string_buffer(bytes(changed), 64)
    smallest, half = sys.float_info.min, 0.5
    put(flushing)
    flushed = smallest * half == 0.0
    put(usual)
    # Believe only what was seen to work, both ways.
    return (put, flushing, usual) if flushed and smallest * half != 0.0 else None


_found = _find()
#: Whether the mode can be set on this machine.
SUPPORTED = _found is not None

#: ``set_mode(FLUSHING)`` makes denormals zero in the calling thread, ``set_mode(USUAL)`` ends that. Where it is not
#: supported they do nothing.
set_mode, FLUSHING, USUAL = _found if _found is not None else (bool, None, None)
