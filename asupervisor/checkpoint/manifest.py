"""The manifest beside each checkpoint, and TensorFlow's `checkpoint` state file.

A manifest is a small JSON file, ``<name>.manifest``: which files belong to the checkpoint, their sizes and
checksums, its step, its place in the order of publication. TensorFlow does not know it and does not mind it.
The state file is TensorFlow's own; it is written with relative names, so that a directory may be moved or copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import tensorflow as tf
from google.protobuf import text_format

from asupervisor.checkpoint import files as fs
from asupervisor.checkpoint.records import Kind

SUFFIX = ".manifest"
FORMAT = 1
NO_CHECKSUM = "none"
"""Stands for the algorithm where sizes are all that is known."""
ADOPTED = "tensorflow"
"""Stands for the run of a checkpoint that TensorFlow wrote without us."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum of one file."""

    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about one checkpoint of ours.

    Attributes:
        name: File name of its prefix.
        step: The global step inside, or None.
        kind: What it is for.
        files: Its files by name.
        algorithm: Name of the checksum; a key of `files.ALGORITHMS` where it can be computed here.
        sequence: Place in the order of publication of its directory.
        time_secs: Wall-clock time of publication, seconds since the epoch.
        began_at_secs: When the first run in this directory published something: the origin of retention by hours.
        run_id: The run that wrote it.
        nonfinite: Variables with NaN or infinite values.
    """

    name: str
    step: int | None
    kind: Kind
    files: Mapping[str, FileFacts]
    algorithm: str
    sequence: int
    time_secs: float
    began_at_secs: float
    run_id: str
    nonfinite: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "step": self.step,
                "kind": self.kind.name.lower(),
                "algorithm": self.algorithm,
                "files": {
                    name: {"bytes": facts.bytes, self.algorithm: facts.checksum} for name, facts in self.files.items()
                },
                "sequence": self.sequence,
                "time_secs": self.time_secs,
                "began_at_secs": self.began_at_secs,
                "run_id": self.run_id,
                "nonfinite": list(self.nonfinite),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of the file.

        Raises:
            ValueError: It is no manifest, or of a later format, or names files outside of its directory, which what
                finishes an interrupted save or deletion would move or delete.
        """
        try:
            data: Any = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r} is not known here")
            algorithm = str(data["algorithm"])
            return cls(
                name=_plain_name(data["name"]),
                step=None if data["step"] is None else int(data["step"]),
                kind=Kind[data["kind"].upper()],
                files={
                    _plain_name(name): FileFacts(int(facts["bytes"]), str(facts[algorithm]))
                    for name, facts in data["files"].items()
                },
                algorithm=algorithm,
                sequence=int(data["sequence"]),
                time_secs=float(data["time_secs"]),
                began_at_secs=float(data["began_at_secs"]),
                run_id=str(data["run_id"]),
                nonfinite=tuple(map(str, data["nonfinite"])),
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no manifest: {error!r}") from error


def _plain_name(name: Any) -> str:
    text = str(name)
    if not text or text == ".." or "\0" in text or PurePath(text).name != text:
        raise ValueError(f"{text!r} is not the name of a file in the manifest's own directory")
    return text


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in a file, or None where there is none that can be used: missing, cut, of another format."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class StateFile:
    """What TensorFlow's state file says, reduced to names inside its own directory.

    Attributes:
        path: The file.
        exists: Whether it is there.
        names: Names of the listed prefixes, oldest first; the last one is the latest.
        problem: Why it could not be read, or None.
        relocated: Whether it holds absolute names of another directory.
    """

    path: Path
    exists: bool
    names: tuple[str, ...] = ()
    problem: str | None = None
    relocated: bool = False


def _state_proto() -> Any:
    # The message class is not exported; this public function returns an instance of it.
    return type(tf.compat.v1.train.generate_checkpoint_state_proto("", "x", ["x"]))()


def read_state_file(path: Path) -> StateFile:
    """Read a state file; never raises for what is in it.

    Absolute entries are reduced to their last part: in a moved or copied directory they name files of another
    place, which are none of ours, while the files of the same name beside the state file are.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        return StateFile(path, exists=True, problem="is not a file")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return StateFile(path, exists=False)
    except OSError as error:
        return StateFile(path, exists=True, problem=f"cannot be read: {error.strerror}")
    if not content.strip():
        return StateFile(path, exists=True, problem="is empty")
    try:
        state = text_format.Parse(content.decode("utf-8"), _state_proto())
    except (text_format.ParseError, UnicodeDecodeError, ValueError):
        return StateFile(path, exists=True, problem="is not a checkpoint state file")
    listed = [*state.all_model_checkpoint_paths, state.model_checkpoint_path]
    names: list[str] = []
    for entry in listed:
        name = _name_inside(entry)
        if name is not None:
            # The latest one usually stands twice: the last mention gives its place.
            if name in names:
                names.remove(name)
            names.append(name)
    if not state.model_checkpoint_path:
        return StateFile(path, exists=True, names=tuple(names), problem="names no latest checkpoint")
    if not names:
        return StateFile(path, exists=True, problem="names only checkpoints outside of its directory")
    home = path.parent.absolute()
    relocated = any(PurePath(entry).is_absolute() and PurePath(entry).parent != home for entry in listed)
    return StateFile(path, exists=True, names=tuple(names), relocated=relocated)


def _name_inside(entry: str) -> str | None:
    if not entry:
        return None
    parts = PurePath(entry)
    if not parts.is_absolute() and ".." in parts.parts:
        return None
    return parts.name or None


def write_state_file(path: Path, names: Sequence[str]) -> None:
    """Write a state file with relative names, atomically.

    Args:
        path: The file.
        names: Prefix names inside its directory, oldest first; the last one is the latest.
    """
    state = _state_proto()
    state.model_checkpoint_path = names[-1]
    state.all_model_checkpoint_paths.extend(names)
    fs.write_atomically(path, text_format.MessageToString(state))
