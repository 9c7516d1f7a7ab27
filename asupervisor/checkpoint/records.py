"""What the checkpoint room tells others: frozen records, units in the field names."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

NonFinitePolicy = Literal["refuse", "mark", "allow"]


class Kind(enum.Enum):
    """What a checkpoint is for.

    Only `REGULAR` checkpoints are listed in TensorFlow's state file and restored without being asked for by name.
    """

    REGULAR = ""
    NONFINITE = "-nonfinite"
    EMERGENCY = "-emergency"

    @property
    def suffix(self) -> str:
        """What is appended to the name of such a checkpoint."""
        return self.value


class Outcome(enum.Enum):
    """How a session ended, as far as the final save cares."""

    CLEAN = "clean end"
    STOPPED = "requested stop"
    ERROR = "error"
    STEP_ERROR = "error of a training run"
    CANCELLED = "cancellation"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A state of all saved variables, taken between two steps.

    Attributes:
        step: The global step inside the snapshot, or None where the model has none.
        kind: What it is for.
        bytes: Size of its tensors, as far as their shapes are known before they are written.
        stall_secs: For how long the device thread was busy with it, in seconds.
        taken_at_secs: Wall-clock time, seconds since the epoch.
        training_runs: How many training runs the session had made, or None if nobody counts them.
    """

    step: int | None
    kind: Kind
    bytes: int
    stall_secs: float
    taken_at_secs: float
    training_runs: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that has been published; what `Supervisor.save()` returns.

    Attributes:
        prefix: What `tf.compat.v1.train.Saver.restore` takes.
        step: The global step inside it, or None where the model has none.
        bytes: Size of its files.
        stall_secs: For how long training stood still for it, in seconds.
        write_secs: For how long it was written while training went on, in seconds.
        kind: What it is for.
        nonfinite: Trainable variables and slots that hold NaN or infinite values.
        time_secs: Wall-clock time of its publication, seconds since the epoch.
    """

    prefix: str
    step: int | None
    bytes: int
    stall_secs: float
    write_secs: float
    kind: Kind = Kind.REGULAR
    nonfinite: tuple[str, ...] = ()
    time_secs: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint as it lies in a directory; what `checkpoints(directory)` lists, oldest first.

    Attributes:
        prefix: What `tf.compat.v1.train.Saver.restore` takes.
        step: The global step by its manifest or its name, or None.
        bytes: Size of its files.
        kind: What it is for.
        time_secs: Wall-clock time of its publication, or the modification time of its index; seconds since the epoch.
        run_id: The run that wrote it, or None if TensorFlow wrote it alone.
        managed: Whether retention may delete it: written by this directory's runs.
        nonfinite: Variables that hold NaN or infinite values, as its manifest tells.
        damage: What is evidently wrong with it (missing files, wrong sizes), or None. Contents are not read.
    """

    prefix: str
    step: int | None
    bytes: int
    kind: Kind
    time_secs: float
    run_id: str | None
    managed: bool
    nonfinite: tuple[str, ...] = ()
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """What a restore did.

    Attributes:
        prefix: The checkpoint that was restored.
        step: The global step of that checkpoint, by its manifest or name, or None.
        initialized: Variables that the checkpoint did not supply and that were initialised instead.
        damaged: Newer checkpoints that were passed over, each with its reason.
        secs: For how long it took, verification included, in seconds.
    """

    prefix: str
    step: int | None
    initialized: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = field(default=())
    secs: float = 0.0
