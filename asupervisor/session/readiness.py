"""Whether a model is ready: what a ready op says, in both of the styles that graph programs use, and who asks it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor._timeouts import for_long

# How TensorFlow words a read of a ref variable and of a resource variable that was never initialised.
_UNINITIALISED = re.compile(
    r"(?:uninitialized value|[Cc]ould not find variable|reading resource variable) ([^\s,]+?)\.?(?=\s|$)"
)


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of one check.

    Attributes:
        ready: Whether the model is ready.
        message: Why not, or an empty string.
        missing: Names of the uninitialised variables, as far as the check names them.
    """

    ready: bool
    message: str = ""
    missing: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """What is missing, or else what the message says first."""
        return self.missing or ((self.first_line(),) if self.message else ())

    def first_line(self) -> str:
        """The first line of the message that says something: TensorFlow's begin with a heading."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        telling = [line for line in lines if "uninitialized" in line]
        return (telling or lines or [""])[0]


READY = Readiness(True)


class ModelOps:
    """The ops that make a model ready, but for its own initialisation, and those that tell whether it is.

    Methods block; on the device thread with the graph entered.

    Args:
        local_init_op: See `SessionManager`.
        ready_op: See `SessionManager`.
        ready_for_local_init_op: See `SessionManager`.
        local_init_run_options: See `SessionManager`.
        local_init_feed_dict: See `SessionManager`.
    """

    def __init__(
        self,
        local_init_op: Any,
        ready_op: Any,
        ready_for_local_init_op: Any,
        local_init_run_options: Any,
        local_init_feed_dict: Any,
    ) -> None:
        self.local_init_op = local_init_op
        self._ready_op = ready_op
        self._ready_for_local_init_op = ready_for_local_init_op
        self._local_init_run_options = local_init_run_options
        self._local_init_feed_dict = local_init_feed_dict

    def look(self, raw: tf.compat.v1.Session) -> Readiness:
        """Whether the model is ready, after the local initialisation."""
        state = self.try_local_init(raw)
        return self.check(raw) if state.ready else state

    def try_local_init(self, raw: tf.compat.v1.Session) -> Readiness:
        """Run `local_init_op` if the model is ready for that."""
        if self.local_init_op is None:
            return READY
        state = check_ready(raw, self._ready_for_local_init_op)
        if state.ready:
            run_init_op(raw, self.local_init_op, self._local_init_feed_dict, self._local_init_run_options)
        return state

    def check(self, raw: tf.compat.v1.Session) -> Readiness:
        """Whether the model is ready."""
        return check_ready(raw, self._ready_op)


def run_init_op(raw: tf.compat.v1.Session, op: Any, feed_dict: Any, options: Any = None) -> None:
    """Run an op that initialises; it may take as long as it likes. Blocks."""
    raw.run(op, feed_dict=feed_dict, options=options if options is not None else for_long(raw))


def check_ready(raw: tf.compat.v1.Session, op: Any) -> Readiness:
    """Run a ready op and understand its answer; blocks, on the device thread with the graph entered.

    Ready is: no op at all, a result of None (an assertion that passed), an int32 array, an empty array. Anything
    else should be names of what is not ready. A check may also raise FailedPreconditionError with "uninitialized"
    in its text.

    Args:
        raw: The session.
        op: A tensor or operation, or None.

    Raises:
        TypeError: The op returned something that says neither yes nor no.
        tf.errors.FailedPreconditionError: For another reason than an uninitialised variable.
    """
    if op is None:
        return READY
    try:
        value = raw.run(op)
    except tf.errors.FailedPreconditionError as error:
        if "uninitialized" not in str(error):
            raise
        return Readiness(False, str(error), uninitialised_in(str(error)))
    if value is None:
        return READY
    answer = np.asarray(value)
    if answer.dtype == np.int32 or answer.size == 0:
        return READY
    if answer.dtype.kind not in "OSU":
        raise TypeError(
            f"ready op {maybe_name(op)} returned {answer.dtype} values, which say neither ready nor not ready. "
            "Let it return the names of what is not ready, as tf.compat.v1.report_uninitialized_variables() does, "
            "or let it raise FailedPreconditionError."
        )
    names = tuple(_text(name) for name in answer.reshape(-1))
    return Readiness(False, f"Variables not initialized: {', '.join(names)}", names)


def uninitialised_in(message: str) -> tuple[str, ...]:
    """The variables that an error message of TensorFlow's calls uninitialised."""
    return tuple(dict.fromkeys(_UNINITIALISED.findall(message)))


def maybe_name(obj: object) -> str:
    """What to call an op in a message, in TensorFlow's way: users' tests look for it."""
    if obj is None:
        return "None"
    name = getattr(obj, "name", None)
    return name if isinstance(name, str) else f"<no name for {type(obj)}>"


def _text(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
