"""Checks of a supervisor's arguments: before anything is added to the graph, and in words that name the argument."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.manager import SessionManager

# TensorFlow's readers take the path of a checkpoint for a pattern, and find nothing under the name that its writers
# used: where a backslash is in it, or a bracket that something closes. A lone bracket, *, ? and braces are harmless.
_UNREADABLE = re.compile((r"\\|" if os.sep == "/" else "") + r"\[(?:.+\]|.*-/|.*\[\.)", re.DOTALL)


def check_interval(name: str, secs: Any) -> None:
    """Raise unless an interval is None or a number of seconds that is not negative.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, or no number in the other sense.
    """
    if secs is not None:
        check_secs(name, secs)


def check_secs(name: str, secs: Any) -> None:
    """The same where None stands for nothing."""
    if isinstance(secs, bool) or not isinstance(secs, Real):
        raise TypeError(f"{name} must be a number of seconds, not {secs!r}")
    if math.isnan(value := float(secs)) or value < 0:
        raise ValueError(f"{name} must not be negative, not {secs!r}")


def check_steps(name: str, steps: Any) -> None:
    """Raise unless an interval is None or a number of steps that is not negative.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"{name} must be a number of steps, not {steps!r}")
    if int(steps) < 0:
        raise ValueError(f"{name} must not be negative, not {steps!r}")


def checked_logdir(logdir: Any) -> str | None:
    """The directory as a string; None for none, which an empty string stands for, too.

    Raises:
        TypeError: It is no path.
    """
    if logdir is None:
        return None
    try:
        return os.fsdecode(logdir).removeprefix("file://") or None
    except TypeError:
        raise TypeError(f"logdir must be a path, not {logdir!r}") from None


def checked_place(name: str, place: Any) -> str | None:
    """A checkpoint or a directory as an absolute path; a remote address as it is; None for none.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, or TensorFlow cannot read checkpoints there.
    """
    if place is None:
        return None
    try:
        path = os.fsdecode(place).removeprefix("file://")
    except TypeError:
        raise TypeError(f"{name} must be a path, not {place!r}") from None
    if not path:
        raise ValueError(f"{name} must not be empty")
    path = resolved(path)
    check_readable(name, path)
    return path


def check_readable(name: str, path: str) -> None:
    """Raise ValueError where TensorFlow would write checkpoints and never find them again.

    Args:
        name: What the path was given as.
        path: A directory or a checkpoint, as `resolved` gives it: what is above it counts, too.
    """
    found = _UNREADABLE.search(path)
    if found:
        raise ValueError(
            f"{name} must not contain {found[0]!r}, as {path!r} does: TensorFlow's readers take '[...]' and '\\' for a "
            "pattern, so that a checkpoint there could be written and never be restored. Choose a path without '[' "
            "and '\\', or rename the directory."
        )


def check_saves_to(logdir: str | None, basename: str) -> None:
    """Raise ValueError where the checkpoints of a run could not be read again.

    Args:
        logdir: The directory, as `resolved` gives it; None for none.
        basename: First part of their names.
    """
    if logdir is not None:
        check_readable("logdir", logdir)
        check_readable("logdir with checkpoint_basename", os.path.join(logdir, basename))  # noqa: PTH118


def check_beginnings(logdir: Any, explicit: str | None, init_from: str | None) -> None:
    """Raise unless the places that a model is to be restored from go together.

    Raises:
        ValueError: There are two; or there is no directory that the second one belongs to.
    """
    if explicit is not None and init_from is not None:
        raise ValueError(
            f"there are two places to begin from: checkpoint_filename_with_path={explicit!r} at each start, "
            f"init_from={init_from!r} only where the directory of this run has no checkpoint"
        )
    if init_from is not None and not logdir:
        raise ValueError(
            "init_from tells where to begin as long as the directory of this run has no checkpoint, and there is no "
            "such directory: name one checkpoint by checkpoint_filename_with_path"
        )


def check_restores(saver: Any, place: str | None) -> None:
    """Raise ValueError where a place to restore from is given, and nothing that restores."""
    if saver is None and place is not None:
        raise ValueError(f"{place!r} cannot be restored: saver=None, or the graph has no variables")


def check_partial_restore(partial_restore: Any) -> None:
    """Raise TypeError unless it is None, True or False."""
    if partial_restore is not None and not isinstance(partial_restore, bool):
        raise TypeError(f"partial_restore must be None, True or False, not {partial_restore!r}")


def resolved(logdir: str) -> str:
    """The directory as an absolute path; a remote address as it is."""
    return logdir if "://" in logdir else os.path.abspath(logdir)  # noqa: PTH100 (links are not to be followed)


def check_basename(basename: Any) -> None:
    """Raise unless it can be the first part of the names of checkpoints.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, begins with a dot, contains a directory, which belongs into the logdir, or what
            TensorFlow's readers take for a pattern.
    """
    if not isinstance(basename, str):
        raise TypeError(f"checkpoint_basename must be a string, not {basename!r}")
    if not basename or os.path.basename(basename) != basename:  # noqa: PTH119 (of a name, not a path)
        raise ValueError(f"checkpoint_basename must be a plain name, not {basename!r}: directories belong into logdir")
    if basename.startswith("."):
        raise ValueError(
            f"checkpoint_basename must not begin with a dot, not {basename!r}: names like that are kept for files in "
            "the making, and such checkpoints would not be found again"
        )
    check_readable("checkpoint_basename", basename)


def check_saver(saver: Any) -> None:
    """Raise TypeError unless it is None or has a Saver's `save` and `restore`."""
    if saver is None:
        return
    missing = [name for name in ("save", "restore") if not callable(getattr(saver, name, None))]
    if missing:
        raise TypeError(
            f"saver must offer {' and '.join(missing)} as tf.compat.v1.train.Saver does, {saver!r} does not. Pass "
            "saver=None to train without checkpoints."
        )


def check_summary_op(summary_op: Any) -> None:
    """Raise TypeError where it is a tensor, or holds one, that cannot be a serialized `Summary`."""
    if isinstance(summary_op, list | tuple):
        for item in summary_op:
            check_summary_op(item)
    elif getattr(summary_op, "dtype", tf.string) != tf.string:
        raise TypeError(
            "summary_op must give serialized summaries, as tf.compat.v1.summary.merge_all() does: "
            f"{summary_op!r} gives {summary_op.dtype.name}. Pass summary_op=None to train without summaries."
        )


def check_global_step(global_step: Any) -> None:
    """Raise unless it is None or an integer with one element.

    Raises:
        TypeError: It is no integer.
        ValueError: It has another number of elements.
    """
    dtype = getattr(global_step, "dtype", None)
    if dtype is not None and not dtype.base_dtype.is_integer:
        raise TypeError(f"global_step must be an integer, {global_step!r} is {dtype.base_dtype.name}")
    shape = getattr(global_step, "shape", None)
    if shape is not None and shape.num_elements() not in (None, 1):
        raise ValueError(f"global_step must have one element, {global_step!r} has the shape {shape}")


def check_executor(executor: Any) -> None:
    """Raise TypeError unless it is None or a DeviceExecutor."""
    if executor is not None and not isinstance(executor, DeviceExecutor):
        raise TypeError(f"executor must be a DeviceExecutor, not {executor!r}")


def checked_clean_types(types: Iterable[type[BaseException]] | None) -> tuple[type[BaseException], ...] | None:
    """The classes of exceptions that mean a clean end; None for the usual ones.

    Raises:
        TypeError: Something among them is no class of exceptions.
    """
    if types is None:
        return None
    given: tuple[Any, ...] = tuple(types) if isinstance(types, Iterable) else (types,)
    for kind in given:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"clean_stop_exception_types must hold classes of exceptions, not {kind!r}")
    return given


def adapted_session_manager(manager: Any, graph: tf.Graph) -> SessionManager:
    """The user's session manager; TensorFlow's own is replaced by one of ours with the same settings.

    Raises:
        TypeError: It is neither, or a subclass of TensorFlow's, whose own ways would be passed over.
        ValueError: It is for another graph.
    """
    if isinstance(manager, SessionManager):
        ours = manager
    else:
        settings = _tf.session_manager_settings(manager)
        if settings is None:
            raise TypeError(
                "session_manager must be an asupervisor.SessionManager, or exactly a "
                f"tf.compat.v1.train.SessionManager, whose settings are then taken over; not {manager!r}"
            )
        ours = SessionManager(**settings)
    if ours.graph is not graph:
        raise ValueError("session_manager was made for another graph than the supervisor's: pass it graph=graph")
    return ours
