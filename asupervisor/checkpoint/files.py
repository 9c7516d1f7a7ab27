"""The few file operations on which the commit protocol stands: flush, rename, check, measure.

Everything here blocks and takes plain local paths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

FaultPoint = Callable[[str], None]
"""Called with the name of each point of the commit protocol; tests make it kill the process or raise."""

_CHUNK_BYTES = 1 << 20


def no_faults(point: str) -> None:
    """The fault point of real life."""


def _native_crc32c() -> Callable[[int, bytes], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    # Its pure Python fallback would take minutes for what the C library does in milliseconds.
    return google_crc32c.extend if google_crc32c.implementation == "c" else None


_crc32c = _native_crc32c()
ALGORITHMS: dict[str, Callable[[int, bytes], int]] = {"crc32": lambda crc, data: zlib.crc32(data, crc)}
if _crc32c is not None:
    ALGORITHMS["crc32c"] = _crc32c
PREFERRED_ALGORITHM = "crc32c" if "crc32c" in ALGORITHMS else "crc32"


def checksum(path: Path, algorithm: str = PREFERRED_ALGORITHM) -> str:
    """The checksum of a file's contents, as eight hexadecimal digits.

    Args:
        path: The file.
        algorithm: A key of `ALGORITHMS`.
    """
    extend = ALGORITHMS[algorithm]
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = extend(crc, chunk)
    return f"{crc & 0xFFFFFFFF:08x}"


def fsync_file(path: Path) -> None:
    """Force a file's contents to the disk."""
    # Some systems refuse to flush a descriptor that was opened for reading only.
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Force a directory's entries to the disk, where the system can do that."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_atomically(path: Path, content: str) -> None:
    """Replace a small text file: a reader sees the old or the new one, and after a crash one of both is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, where they still are."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a temporary directory with everything in it; what cannot be removed now is removed another time."""
    shutil.rmtree(path, ignore_errors=True)


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise before a write that cannot fit, so that it does not fill the disk first.

    Args:
        directory: Where it is going to be written.
        needed_bytes: How much is going to be written.

    Raises:
        OSError: ENOSPC, with both figures, if the file system has less space than that.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        reason = f"{os.strerror(errno.ENOSPC)}: the checkpoint needs {needed_bytes} bytes, {free_bytes} are free"
        raise OSError(errno.ENOSPC, reason, str(directory))
