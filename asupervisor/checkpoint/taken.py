"""A state that was taken and is not yet published: by `snapshot.py`, or written by a saver of the user's own kind."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from asupervisor._timeouts import for_save
from asupervisor.checkpoint import restore as rs
from asupervisor.checkpoint import snapshot as sn
from asupervisor.checkpoint.records import SnapshotInfo
from asupervisor.errors import CheckpointDamaged


@dataclass(slots=True)
class Snapshot:
    """What `CheckpointStore.snapshot` took and `CheckpointStore.publish` consumes.

    Attributes:
        info: What is known about it.
        held: The tensors inside TensorFlow's session, or None where the saver wrote files itself.
        temporary: Where it wrote them, or None.
        written: The name under which it did.
    """

    info: SnapshotInfo
    held: sn.Held | None = None
    temporary: Path | None = None
    written: str | None = None
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def discard(self) -> None:
        """Give memory and temporary files back; any thread, idempotent."""
        if self.held is not None:
            self.held.release()
        self.cleanup.close()


def written_by_saver(
    saver: Any, raw: tf.compat.v1.Session, temporary: Path, basename: str, step: int | None
) -> str | None:
    """Call ``saver.save(...)`` as TensorFlow's Supervisor does, into a temporary directory; on the device thread.

    Args:
        saver: Any object with such a method.
        raw: The session.
        temporary: Where to write.
        basename: First part of the name.
        step: The global step, or None.

    Returns:
        The name that it gave the files, if it told.
    """
    # A Saver deletes by a list of its own. With an empty one it cannot delete what is good before the new one is
    # published.
    if hasattr(saver, "set_last_checkpoints_with_time"):
        saver.set_last_checkpoints_with_time([])
    op = sn.plain_save_op(raw.graph, saver) if raw.sess_str else None
    if op is not None:  # what its `save` does, with another timeout
        prefix = str(temporary / basename)
        options = for_save(raw, list(op.inputs)[3:])
        raw.run(saver.saver_def.save_tensor_name, {saver.saver_def.filename_tensor_name: prefix}, options=options)
        return basename
    with raw.graph.as_default():
        returned = saver.save(raw, str(temporary / basename), global_step=step)
    (temporary / "checkpoint").unlink(missing_ok=True)
    return Path(os.fsdecode(returned)).name if isinstance(returned, str | bytes) else None


def nonfinite_in_files(prefix: Path, graph: tf.Graph) -> list[str]:
    """Which trainable variables and slots are not finite in files that a saver wrote; blocking.

    Args:
        prefix: The files.
        graph: Whose variables are trained.
    """
    trainable = graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    try:
        return rs.nonfinite_in(str(prefix), [variable.op.name for variable in trainable])
    except CheckpointDamaged:  # a saver with a format of its own
        return []


def rename_all(directory: Path, name: str, target: str) -> None:
    """Give the files of a prefix another one."""
    if name == target:
        return
    for path in sorted(directory.iterdir()):
        if path.name == name or path.name.startswith(f"{name}."):
            path.rename(directory / f"{target}{path.name[len(name) :]}")


def as_os_error(error: tf.errors.OpError) -> Exception:
    """The operating system's error behind one of TensorFlow's file errors, where there is one; else the same object."""
    codes = {
        tf.errors.ResourceExhaustedError: errno.ENOSPC,
        tf.errors.PermissionDeniedError: errno.EACCES,
        tf.errors.NotFoundError: errno.ENOENT,
    }
    code = codes.get(type(error))
    if code is None:
        same: Exception = error
        return same
    return OSError(code, f"{os.strerror(code)} ({' '.join(str(error.message).split())[:200]})")
