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

#: Offset, format and bits of the control word in the C library's fenv_t.
_LAYOUTS = {
    ("Linux", "x86_64"): (28, "I", 0x8040),
    ("Linux", "aarch64"): (0, "I", 1 << 24),
    ("Darwin", "x86_64"): (4, "I", 0x8040),
    ("Darwin", "arm64"): (8, "Q", 1 << 24),
}


def _switches() -> tuple[Callable[[], object], Callable[[], object]] | None:
    layout = _LAYOUTS.get((platform.system(), platform.machine()))
    if layout is None:
        return None
    offset, code, bits = layout
    try:
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
    set_flushing = _bind(put, flushing)
    set_usual = _bind(put, usual)
    smallest, half = sys.float_info.min, 0.5
    set_flushing()
    flushed = smallest * half == 0.0
    set_usual()
    # Believe only what was seen to work, both ways.
    return (set_flushing, set_usual) if flushed and smallest * half != 0.0 else None


def _bind(put: Callable[..., int], environment: ctypes.Array[ctypes.c_char]) -> Callable[[], object]:
    reference = ctypes.byref(environment)
    return lambda: put(reference)


_found = _switches()
#: Whether the mode can be set on this machine.
SUPPORTED = _found is not None


def _nothing() -> None:
    return None


#: Sets the mode for the calling thread, and sets it back to the usual one; nothing where it is not supported.
flush: Callable[[], object] = _found[0] if _found is not None else _nothing
unflush: Callable[[], object] = _found[1] if _found is not None else _nothing


def thread_init() -> None:
    """Sets the mode for the rest of the calling thread's life: for threads that do nothing but run TensorFlow."""
    flush()
