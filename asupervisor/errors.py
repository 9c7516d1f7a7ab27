"""Every exception that asupervisor raises of its own accord.

::

    SupervisorError
    ├── StopRequested            a wait was ended by a requested stop (a clean end, not a failure)
    ├── StopGraceExceeded        something did not end within its grace          (also RuntimeError)
    ├── SessionClosed            the session is closed: you closed it            (also RuntimeError)
    ├── SessionActive            one supervisor, two sessions at once            (also RuntimeError)
    ├── WrongEventLoop           used from a loop that does not own the object   (also RuntimeError)
    ├── SessionNotReady          the model did not become ready in time          (also TimeoutError)
    ├── UnknownMaster            a master string that no session can be opened on  (also ValueError)
    ├── ClusterConfigError       TF_CONFIG or a cluster that cannot work         (also ValueError)
    ├── PortInUse                our own address in a cluster is taken           (also OSError)
    ├── PeersUnreachable         parameter servers do not answer                 (also TimeoutError)
    ├── ModelLost                nobody has the trained model any more
    ├── LogdirNotWritable        the log directory cannot be written             (also OSError)
    ├── LogdirInUse              another chief writes into this log directory
    ├── CheckpointError          something about a checkpoint
    │   ├── CheckpointDamaged    its files are truncated, altered or missing
    │   ├── CheckpointMismatch   its contents do not fit this model
    │   └── CheckpointNotRestored  the directory holds checkpoints that this run did not restore
    ├── NonFiniteError           a watched value is NaN or infinite              (also RuntimeError)
    ├── StepOutcomeUnknown       a step may or may not have been applied
    └── RecoveryExhausted        the recovery budget is used up

The facts stay on the object; the message is built from them. TensorFlow's own errors are never wrapped: they
leave as the same object with the same traceback.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

_MOST_CHARS = 600
# Lines of TensorFlow's errors that say nothing: the usual heading, and what stands around several errors in one.
_HEADING = re.compile(r"Graph execution error:|=+|\d+ root error\(s\) found\.?")


def describe(error: BaseException) -> str:
    """`repr` for messages and records: never fails, stays short, and speaks where TensorFlow's says nothing.

    The `repr` of a TensorFlow error is empty, and its text may hold whole stacks; here it is the op and what it says.
    """
    name = type(error).__name__
    try:
        text = repr(error)
        if text == f"{name}()" and (line := telling_line(error)):
            text = f"{name}({line!r})"
    except Exception:  # of somebody's __repr__; nothing may be lost for that
        text = f"{name}(...)"
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 3] + "..."


def telling_line(error: BaseException) -> str:
    """What an error says, in one line: of TensorFlow's long texts the op and its words, not the heading."""
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # as above
        return ""
    for number, line in enumerate(lines[:-1]):
        if line.startswith("Node:"):
            return f"{lines[number + 1]} ({line})"
    words = [line for line in lines if not _HEADING.fullmatch(line)] or lines
    names_its_task = len(words) > 1 and "From /job:" in words[0]
    return " ".join(words[: 2 if names_its_task else 1])


def errors_in(error: BaseException) -> list[BaseException]:
    """The errors of an exception group, such as a task group raises; of any other error, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [each for member in error.exceptions for each in errors_in(member)]


def is_only(error: BaseException | None, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Whether it is an exception of these kinds, or an exception group of nothing else."""
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, kinds) or (bool(members) and all(is_only(each, kinds) for each in members))


def not_trained_again(error: Exception) -> Exception:
    """What a session was lost by, with a note: the steps that were lost with it have not been trained again."""
    note = (
        "asupervisor: not recovered from: the training had ended, and its last steps were lost before they were saved. "
        "Start it again to train them"
    )
    if note not in getattr(error, "__notes__", ()):
        with contextlib.suppress(Exception):  # an exception that is frozen
            error.add_note(note)
    return error


class SupervisorError(Exception):
    """The root of asupervisor's own exceptions."""


class StopRequested(SupervisorError):
    """A wait ended because a stop was requested; a clean end, not a failure.

    Raised where an operation cannot go on after `request_stop()`: entering a session whose start was aborted,
    a stream or a wait that the stop ended.
    """

    def __init__(self, what: str = "the operation") -> None:
        self.what = what
        super().__init__(f"{what} ended because a stop was requested")


class StopGraceExceeded(SupervisorError, RuntimeError):
    """Services were still running when their grace was over.

    Args:
        services: Names of what did not end, in alphabetical order; a call that occupies a thread is named with
            the function it is in.
        grace_secs: The grace that they were given, in seconds.
        stack: Formatted stack of the thread that is still busy, or an empty string.
        message: What happened, in other words than the usual ones.
    """

    def __init__(self, services: Sequence[str], grace_secs: float, stack: str = "", message: str = "") -> None:
        self.services = tuple(services)
        self.grace_secs = grace_secs
        self.stack = stack
        message = message or (
            f"threads still running after the stop, with {grace_secs:g} s of grace: {' '.join(self.services)}. "
            "Let them poll should_stop(), or raise stop_grace_secs."
        )
        super().__init__(f"{message}\nThe busy thread is here:\n{stack}" if stack else message)

    @classmethod
    def of_a_hook(cls, method: str, secs: float) -> StopGraceExceeded:
        """For the last call of a hook, which must leave time for the final save.

        Args:
            method: Which call.
            secs: How long it has taken, in seconds.
        """
        return cls(
            [method],
            secs,
            message=f"the hook's last call {method} did not end within {secs:.1f} s, its share of the grace. Make it "
            "shorter, or raise stop_grace_period_secs.",
        )

    @classmethod
    def of_final_save(cls, grace_secs: float, aside: str = "") -> StopGraceExceeded:
        """For a final save that was due and was not made.

        Args:
            grace_secs: The whole grace, in seconds.
            aside: The emergency checkpoint that was made instead, if one was.
        """
        if aside:
            return cls(
                ["final save"],
                grace_secs,
                message=f"there is no final save: a training run did not end, and the state beside it, {aside}, is "
                "never restored by itself. Await what runs, or end its input, before the session is left.",
            )
        return cls(
            ["final save"],
            grace_secs,
            message=f"there is no final save: the {grace_secs:g} s of grace were over before it was done. What was "
            "trained since the newest checkpoint is lost. Raise stop_grace_period_secs.",
        )


class SessionClosed(SupervisorError, RuntimeError):
    """The session was used after it was closed.

    Args:
        session: Its name.
        remedy: What to do.
    """

    def __init__(
        self, session: str = "session", remedy: str = "Enter managed_session() again to get a new one."
    ) -> None:
        self.session = session
        super().__init__(f"{session} is closed. {remedy}")


class SessionActive(SupervisorError, RuntimeError):
    """A supervisor was asked for a second session while its first one is active; or a session was entered twice.

    Args:
        supervisor: Its name.
        message: What happened, in other words than the usual ones.
    """

    def __init__(self, supervisor: str, message: str = "") -> None:
        self.supervisor = supervisor
        super().__init__(
            message
            or f"{supervisor} already has an active session. Close it first, or make a second Supervisor: "
            "several can share one graph."
        )


class WrongEventLoop(SupervisorError, RuntimeError):
    """An object that belongs to one event loop was used from another one, or from no loop at all."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}. {remedy}")


class SessionNotReady(SupervisorError, TimeoutError):
    """The model did not become ready in time.

    Where TensorFlow is loaded, the instances that are raised are `tf.errors.DeadlineExceededError` as well.

    Args:
        variables: What is missing: names of uninitialised variables, or the ready check's own words.
        waited_secs: For how long it was waited, in seconds.
        what: What was waited for.
    """

    def __init__(self, variables: Sequence[str], waited_secs: float, what: str = "Session") -> None:
        self.variables = tuple(variables)
        self.waited_secs = waited_secs
        missing = f" Not ready: {', '.join(self.variables)}." if self.variables else ""
        super().__init__(
            f"{what} was not ready after waiting {waited_secs:g} secs.{missing} "
            "A non-chief waits for its chief to initialise the model: is the chief running?"
        )


class UnknownMaster(SupervisorError, ValueError):
    """A master that no session can be opened on.

    Args:
        master: What was given.
        hint: What was probably meant, or an empty string.
    """

    def __init__(self, master: object, hint: str = "") -> None:
        self.master = master
        self.hint = hint
        meant = f" Did you mean {hint!r}?" if hint else ""
        super().__init__(
            f"no session can be opened on master {master!r}.{meant} These work: '' (this process), 'local' (a server "
            "in this process), server.target of a tf.distribute.Server, and 'grpc://host:port'."
        )


class ClusterConfigError(SupervisorError, ValueError):
    """`TF_CONFIG`, or a cluster specification, cannot work; one line that says what to write."""


class PortInUse(SupervisorError, OSError):
    """The address that a cluster gives to this task is taken.

    Args:
        task: Who we are.
        address: Where we should listen.
    """

    def __init__(self, task: str, address: str) -> None:
        self.task = task
        self.address = address
        super().__init__(
            f"{task} cannot listen at {address}: the port is in use. Is this task running already? Otherwise give it "
            "another port, in the configuration of every task."
        )


class PeersUnreachable(SupervisorError, TimeoutError):
    """Tasks of the cluster that training needs did not answer in time.

    Args:
        peers: Who: names and addresses.
        waited_secs: For how long it was waited, in seconds.
        reason: What was seen last, or an empty string.
        limit: What limits the wait.
    """

    def __init__(
        self,
        peers: Sequence[str],
        waited_secs: float,
        reason: str = "",
        limit: str = "outage_secs of the cluster's task",
    ) -> None:
        self.peers = tuple(peers)
        self.waited_secs = waited_secs
        self.reason = reason
        super().__init__(
            f"no answer from {', '.join(self.peers)} for {waited_secs:.0f} s"
            + (f" ({reason})" if reason else "")
            + f". Start it again, or raise {limit}."
        )


class ModelLost(SupervisorError):
    """A parameter server has lost its variables, and no checkpoint can bring them back.

    Args:
        variables: Which are not initialised any more, as far as is known.
    """

    def __init__(self, variables: Sequence[str] = ()) -> None:
        self.variables = tuple(variables)
        which = f" ({', '.join(self.variables[:5])})" if self.variables else ""
        super().__init__(
            f"the parameter servers have lost the model{which}, and there is no checkpoint to restore: it is not "
            "initialised again by itself. Give the chief a logdir and a saver, or allow it by "
            "RecoveryPolicy(allow_reinit=True)."
        )


class LogdirNotWritable(SupervisorError, OSError):
    """The log directory cannot be created or written."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"logdir {path!r} cannot be written: {reason}. Choose another logdir, or pass logdir=None to train "
            "without checkpoints and summaries."
        )


class LogdirInUse(SupervisorError):
    """Another chief holds the lock on this log directory."""

    def __init__(self, path: str, host: str, pid: int | None) -> None:
        self.path = path
        self.host = host
        self.pid = pid
        holder = f"process {pid} on {host}" if pid is not None else "another process"
        super().__init__(
            f"logdir {path!r} is in use by {holder}. Two chiefs would delete each other's checkpoints: stop the "
            "other one, run a single worker process, or give each its own logdir."
        )


class CheckpointError(SupervisorError):
    """The root of errors about checkpoints."""


class CheckpointDamaged(CheckpointError):
    """The files of a checkpoint are truncated, altered or missing."""

    def __init__(self, path: str, reason: str, message: str | None = None) -> None:
        self.path = path
        self.reason = reason
        super().__init__(message or f"checkpoint {path!r} is damaged: {reason}")


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit this model: other variables, shapes or dtypes.

    Args:
        path: The checkpoint's prefix.
        missing: Variables of the model that the checkpoint does not hold.
        unexpected: Variables of the checkpoint that the model does not have.
        different: Variables whose shape or dtype differs, in words, both sides named.
    """

    def __init__(self, path: str, missing: Sequence[str], unexpected: Sequence[str], different: Sequence[str]) -> None:
        self.path = path
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)
        lines = [f"checkpoint {path!r} does not fit this model"]
        lines += [f"  not in the checkpoint: {name}" for name in self.missing]
        lines += [f"  not in the model: {name}" for name in self.unexpected]
        lines += [f"  different: {name}" for name in self.different]
        lines.append("Give this model a logdir of its own, or restore a checkpoint of the same model.")
        super().__init__("\n".join(lines))


class CheckpointNotRestored(CheckpointError):
    """A directory holds checkpoints that this run did not restore, so saving there would overwrite them."""

    def __init__(self, path: str, reason: str, message: str | None = None) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            message
            or f"logdir {path!r} holds checkpoints that were not restored: {reason}. Pass fresh_start=True to set them "
            "aside and begin all the same, or give this run its own logdir."
        )


class NonFiniteError(SupervisorError, RuntimeError):
    """A value that a hook watches is NaN or infinite.

    The instances that are raised are `tf.compat.v1.train.NanLossDuringTrainingError` as well.

    Args:
        tensor: What was watched.
        count: How many of its numbers are not finite.
        step: The global step about then, or None.
    """

    def __init__(self, tensor: str, count: int, step: int | None = None) -> None:
        self.tensor = tensor
        self.count = count
        self.step = step
        when = "" if step is None else f" at about step {step}"
        super().__init__(f"{tensor!r} has {count} NaN or infinite values{when}: the model diverged.")

    def __str__(self) -> str:
        return str(self.args[0])


class StepOutcomeUnknown(SupervisorError):
    """A step failed in a way that leaves open whether it was applied.

    Args:
        before: The global step as it was last seen before the failed call, at the start of the session, at a save or by
            the step counter: it may be many steps behind. None if it was not seen.
        now: The global step after the recovery, or None if it is not known. Others may have a part in it.
    """

    def __init__(self, before: int | None, now: int | None) -> None:
        self.before = before
        self.now = now
        last_seen = "" if before is None else f" (it was last seen at {before})"
        super().__init__(
            f"the step may already have been applied, or not: the global step is {now} now{last_seen}. Run it again "
            "where one step more is no matter; else compare with the step that you have counted."
        )


class RecoveryExhausted(SupervisorError):
    """The session was restarted as often as its recovery policy allows."""

    def __init__(self, attempts: int, last: BaseException) -> None:
        self.attempts = attempts
        self.last = last
        super().__init__(f"gave up after {attempts} restarts; the last error was {describe(last)}")
