"""What is on disk: the checkpoints of one directory, in the order of their publication, and what is wrong with them.

A scan reads names, sizes, manifests and the state file; it writes nothing. Order of publication:

* checkpoints with a manifest carry a sequence number;
* the state file lists names in order, also of checkpoints that TensorFlow wrote without us;
* a checkpoint with a manifest that is newer than everything listed was published just before a crash, under a name of
  its own or once more under one that the list holds already;
* for the rest, the step in the name decides.

TensorFlow's own readers go by the state file alone; a lost or damaged one (FAULTS F01) is therefore not the end of
anything here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asupervisor.checkpoint import files as fs
from asupervisor.checkpoint import manifest as mf
from asupervisor.checkpoint.records import CheckpointRecord, Kind

QUARANTINE = "quarantine"
_PART = re.compile(r"^(?P<name>.+)\.(?:index|meta|manifest|data-(?P<shard>\d{5,})-of-(?P<shards>\d{5,}))$")
_TEMPSTATE = re.compile(r"\.tempstate\d+$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint in the directory.

    Attributes:
        directory: Where it lies.
        name: File name of its prefix.
        step: The global step by manifest or name, or None.
        kind: What it is for.
        files: Names and sizes of the files that are there, without the manifest.
        manifest: Its manifest, or None.
        listed: Its place in the state file, or None.
        time_secs: Publication by the manifest, or modification of the index; seconds since the epoch.
        own: Whether its name is one of this run's kind, not one of another saver's (a "best-30" of the user's).
    """

    directory: Path
    name: str
    step: int | None
    kind: Kind
    files: Mapping[str, int]
    manifest: mf.Manifest | None
    listed: int | None
    time_secs: float
    own: bool = True

    @property
    def prefix(self) -> str:
        """What a saver restores."""
        return str(self.directory / self.name)

    @property
    def bytes(self) -> int:
        """Size of all files that are there."""
        return sum(self.files.values())

    @property
    def managed(self) -> bool:
        """Whether this directory's runs wrote it, so that retention may delete it."""
        return self.manifest is not None or (self.own and self.listed is not None)

    def paths(self) -> list[Path]:
        """All its files, the index first (without it no reader takes the rest for a checkpoint)."""
        names = sorted(self.files, key=lambda name: (not name.endswith(".index"), name))
        return [self.directory / name for name in names]

    def evident_damage(self) -> str | None:
        """What names and sizes tell: missing or cut files; contents are not read."""
        if self.manifest is not None:
            for name, facts in self.manifest.files.items():
                if name not in self.files:
                    return f"{name} is missing"
                if self.files[name] != facts.bytes:
                    return f"{name} has {self.files[name]} bytes instead of {facts.bytes}"
            return None
        return self.incomplete()

    def incomplete(self) -> str | None:
        """What names alone tell, without the manifest."""
        if self.name in self.files:
            return None if self.files[self.name] else f"{self.name} is empty"  # TensorFlow's V1 format
        if f"{self.name}.index" not in self.files:
            return f"{self.name}.index is missing"
        shards = [match for match in map(_PART.match, self.files) if match and match["shard"]]
        if not shards:
            return f"{self.name}.data-00000-of-00001 is missing"
        for shard in range(int(shards[0]["shards"])):
            name = f"{self.name}.data-{shard:05d}-of-{int(shards[0]['shards']):05d}"
            if name not in self.files:
                return f"{name} is missing"
        empty = [name for name, size in self.files.items() if not size and name.endswith(".index")]
        return f"{empty[0]} is empty" if empty else None

    def altered(self) -> str | None:
        """What the manifest's checksums tell, or None; reads every byte. None as well where there is no manifest."""
        if self.manifest is None or self.manifest.algorithm not in fs.ALGORITHMS:
            return None
        for name, facts in self.manifest.files.items():
            try:
                found = fs.checksum(self.directory / name, self.manifest.algorithm)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if found != facts.checksum:
                return f"{name} was altered: {self.manifest.algorithm} is {found} instead of {facts.checksum}"
        return None

    @property
    def checksummed(self) -> bool:
        """Whether `altered` can tell anything."""
        return self.manifest is not None and self.manifest.algorithm in fs.ALGORITHMS

    def record(self) -> CheckpointRecord:
        """The public form."""
        return CheckpointRecord(
            prefix=self.prefix,
            step=self.step,
            bytes=self.bytes,
            kind=self.kind,
            time_secs=self.time_secs,
            run_id=self.manifest.run_id if self.manifest and self.manifest.run_id != mf.ADOPTED else None,
            managed=self.managed,
            nonfinite=self.manifest.nonfinite if self.manifest else (),
            damage=self.evident_damage(),
        )


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A scan of one directory.

    Attributes:
        directory: The directory.
        state: Its state file.
        entries: Its checkpoints of all kinds, oldest first.
        quarantined: Names of what lies in quarantine.
    """

    directory: Path
    state: mf.StateFile
    entries: tuple[Entry, ...]
    quarantined: tuple[str, ...]

    def of(self, kind: Kind) -> list[Entry]:
        """The checkpoints of one kind, oldest first."""
        return [entry for entry in self.entries if entry.kind is kind]

    @property
    def regular(self) -> list[Entry]:
        """The checkpoints that may be restored without being named, oldest first."""
        return self.of(Kind.REGULAR)

    @property
    def unadopted(self) -> list[Entry]:
        """Those that TensorFlow wrote and its state file lists, oldest first: ours by name, and without a manifest."""
        return [entry for entry in self.regular if entry.managed and entry.manifest is None]

    @property
    def next_sequence(self) -> int:
        """The next place in the order of publication."""
        return 1 + max((e.manifest.sequence for e in self.entries if e.manifest), default=0)

    def began_at_secs(self, now_secs: float) -> float:
        """When the first run in this directory published something, seconds since the epoch."""
        begins = [e.manifest.began_at_secs for e in self.entries if e.manifest]
        return min(begins, default=min((e.time_secs for e in self.entries), default=now_secs))

    def evidence(self) -> str | None:
        """Why a run must not begin at step 0 here although nothing was restored, or None for a clean directory."""
        if self.regular:
            return f"{len(self.regular)} checkpoints are there"
        if self.state.problem:
            return f"the state file {str(self.state.path)!r} {self.state.problem}, and there are no checkpoint files"
        if self.state.names:
            return f"the state file {str(self.state.path)!r} names {self.state.names[-1]!r}, and its files are gone"
        if self.entries:
            return (
                f"only checkpoints that are never restored by themselves are there, such as {self.entries[-1].prefix!r}"
            )
        if self.quarantined:
            return f"damaged checkpoints were quarantined there: {', '.join(self.quarantined)}"
        return None


def parse_name(name: str, basename: str) -> tuple[int | None, Kind] | None:
    """Step and kind by a prefix's file name, or None if it is not one of `basename`'s."""
    if not name.startswith(basename):
        return None
    rest = name[len(basename) :]
    kind = Kind.REGULAR
    for candidate in (Kind.NONFINITE, Kind.EMERGENCY):
        if rest.endswith(candidate.suffix):
            kind, rest = candidate, rest.removesuffix(candidate.suffix)
            break
    if not rest:
        return None, kind
    if rest.startswith("-") and rest[1:].isascii() and rest[1:].isdigit():
        return int(rest[1:]), kind
    return None


def stem_of(name: str) -> str | None:
    """The prefix's file name by that of one file of a checkpoint; None where it cannot be one."""
    match = _PART.match(name)
    return match["name"] if match else None


class Manifests:
    """Manifests that were read before: a directory that keeps all checkpoints may hold thousands."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int, int], mf.Manifest | None]] = {}

    def read(self, files: Mapping[Path, os.stat_result]) -> dict[str, mf.Manifest | None]:
        """The manifests in these files, by file name; only what is not the same file any more is read again."""
        before, self._read = self._read, {}
        for path, stat in files.items():
            # A manifest is replaced by a rename: another inode, even within one tick of the file system's clock.
            mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = before.get(path)
            self._read[path] = known if known is not None and known[0] == mark else (mark, mf.read_manifest(path))
        return {path.name: manifest for path, (_, manifest) in self._read.items()}


def scan(
    directory: Path, basename: str, latest_filename: str = "checkpoint", manifests: Manifests | None = None
) -> Catalogue:
    """Read what is in a directory; an absent one is an empty one.

    Args:
        directory: Where to look; nothing outside of it is read.
        basename: First part of the names of this run's checkpoints.
        latest_filename: Name of the state file.
        manifests: Those that were read before.

    Raises:
        OSError: The directory cannot be read.
    """
    state = mf.read_state_file(directory / latest_filename)
    sizes: dict[str, int] = {}
    mtimes: dict[str, float] = {}
    notes: dict[Path, os.stat_result] = {}
    try:
        with os.scandir(directory) as items:
            for item in items:
                try:
                    if item.is_file():
                        stat = item.stat()
                        sizes[item.name], mtimes[item.name] = stat.st_size, stat.st_mtime
                        if item.name.endswith(mf.SUFFIX):
                            notes[directory / item.name] = stat
                except FileNotFoundError:  # removed by somebody while we look
                    continue
    except FileNotFoundError:
        return Catalogue(directory, state, (), ())
    read = (manifests or Manifests()).read(notes)
    groups: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        match = _PART.match(_TEMPSTATE.sub("", name))
        if match and not name.startswith("."):
            groups.setdefault(match["name"], {})
            if _PART.match(name) and not name.endswith(mf.SUFFIX):
                groups[match["name"]][name] = size
    for name, size in sizes.items():  # TensorFlow's V1 format is a single file under the prefix's own name
        if name in state.names or (f"{name}.index" not in sizes and _has_step(name, basename)):
            groups.setdefault(name, {})[name] = size
    entries = []
    for name, files in groups.items():
        listed = state.names.index(name) if name in state.names else None
        parsed = parse_name(name, basename)
        if parsed is None:
            if listed is None:
                continue
            parsed = _step_of_any_name(name), Kind.REGULAR
        manifest = read.get(f"{name}{mf.SUFFIX}")
        if manifest is not None:  # files of a saver's own format, too
            files.update({file: sizes[file] for file in manifest.files if file in sizes})
        if manifest is not None and (manifest.name != name or _is_stale(name, mtimes)):
            manifest = None  # it tells nothing about these files
        if not any(file.endswith(".index") or file == name or ".data-" in file for file in files):
            continue  # a lonely .meta or manifest: TensorFlow deleted the rest, or wrote a graph only
        anchor = f"{name}.index" if f"{name}.index" in mtimes else next(iter(files))
        entries.append(
            Entry(
                directory,
                name,
                manifest.step if manifest else parsed[0],
                manifest.kind if manifest else parsed[1],
                files,
                manifest,
                listed,
                manifest.time_secs if manifest else mtimes[anchor],
                parse_name(name, basename) is not None,
            )
        )
    listed_at = mtimes.get(latest_filename, 0.0)
    # A crash may have come between the two. Both times: in a copy that did not keep those of its files, any manifest
    # may be younger than the list.
    since = {name for name, manifest in read.items() if manifest and min(mtimes[name], manifest.time_secs) >= listed_at}
    return Catalogue(directory, state, tuple(_in_order(entries, since)), _quarantined(directory))


def _is_stale(name: str, mtimes: Mapping[str, float]) -> bool:
    # Our index is always written before our manifest. A younger index was put there by TensorFlow, which restored
    # this checkpoint and saved it once more under its name, or by a copy that did not keep the times: in both cases
    # the tensors' own checksums decide, not the manifest.
    return mtimes.get(f"{name}.index", 0.0) > mtimes.get(f"{name}{mf.SUFFIX}", 0.0)


def _has_step(name: str, basename: str) -> bool:
    parsed = parse_name(name, basename)
    return parsed is not None and parsed[0] is not None


def _step_of_any_name(name: str) -> int | None:
    match = re.search(r"-(\d+)$", name)
    return int(match[1]) if match else None


def _quarantined(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in (directory / QUARANTINE).iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _in_order(entries: Sequence[Entry], since: set[str]) -> list[Entry]:
    """Oldest first; `since` are the manifests that were published, and written, after the state file."""

    def step(entry: Entry) -> tuple[int, float]:
        return (-1 if entry.step is None else entry.step, entry.time_secs)

    def sequence(entry: Entry) -> int:
        return entry.manifest.sequence if entry.manifest else 0

    # Another saver's checkpoints (a "best-30" of the user's own) come first: they may be restored when nothing else
    # is left, but a state file that such a saver overwrote does not push ours aside.
    foreign = [entry for entry in entries if not entry.own]
    own = [entry for entry in entries if entry.own]
    listed = sorted((e for e in own if e.listed is not None), key=lambda e: e.listed or 0)
    unlisted = [e for e in own if e.listed is None]
    if not listed:
        ordered = sorted(own, key=sequence) if all(e.manifest for e in own) else sorted(own, key=step)
        return sorted(foreign, key=lambda e: e.listed or 0) + ordered
    # A run that began at an older checkpoint publishes names once more that the list holds already, in another place.
    # A list that its user has put in another order is younger than the manifests, and stays as it is.
    last = sequence(listed[-1])
    overtaken = [e for e in listed if sequence(e) > last and f"{e.name}{mf.SUFFIX}" in since]
    listed = [e for e in listed if e not in overtaken] + sorted(overtaken, key=sequence)
    newest_sequence = max(map(sequence, listed))
    newest_time = listed[-1].time_secs if listed[-1].manifest is None else float("-inf")
    after = [e for e in unlisted if e.manifest and e.manifest.sequence > newest_sequence and e.time_secs >= newest_time]
    before = [e for e in unlisted if e not in after]
    return (
        sorted(foreign, key=lambda e: e.listed or 0) + sorted(before, key=step) + listed + sorted(after, key=sequence)
    )


def checkpoints(
    directory: str | os.PathLike[str], *, basename: str = "model.ckpt", latest_filename: str = "checkpoint"
) -> list[CheckpointRecord]:
    """The checkpoints in a directory, oldest first; reads names, sizes and manifests, changes nothing.

    Args:
        directory: The log directory of a supervisor, or any directory with TensorFlow checkpoints.
        basename: First part of their names.
        latest_filename: Name of the state file.

    Raises:
        OSError: The directory cannot be read.
    """
    return [entry.record() for entry in scan(Path(directory), basename, latest_filename).entries]
