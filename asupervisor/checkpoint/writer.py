"""The commit protocol: how files become a checkpoint, and how a checkpoint ceases to be one.

Publishing ``model.ckpt-7`` into ``logdir``, with what a crash right after each step leaves:

====  ====================================================================  =======================================
step  what is done                                                          after a crash here
====  ====================================================================  =======================================
1     make the temporary directory ``.model.ckpt.saving-<run>-<n>``         an empty directory, removed
2     write data and index into it, and the ``.meta``                       a directory without record, removed
3     flush every file, compute sizes and checksums                         the same
4     write the manifest into it, flush file and directory: **committed**   rolled forward: steps 5 to 7 are done again
5     rename data, then meta, then index into ``logdir``                    the same; what was moved is recognised
6     rename the manifest into ``logdir``, flush ``logdir``                 published: it is found by its manifest
7     remove the temporary directory                                        the same
8     replace TensorFlow's state file, flush ``logdir``                     the same; all readers see it
9     delete what retention gives up, oldest first                          see below
====  ====================================================================  =======================================

Step 4 and not step 6 is the point of no return, because step 5 may replace the files of a checkpoint of the same
name (a model without a step, a step that never moves): from the first rename on, the old one is gone, and only
going forward gives a whole checkpoint again. `Writer.recover` does that before anything is read.

Deleting: rename the manifest to ``.<name>.deleting`` (from here on it is no checkpoint, and `recover` goes on), remove
the index (from here on TensorFlow does not find it either), remove the rest, remove the renamed manifest. The state
file that no longer lists it was written before.

Only the process that holds the lock of the directory runs any of this.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from asupervisor.checkpoint import catalogue as cat
from asupervisor.checkpoint import files as fs
from asupervisor.checkpoint import manifest as mf
from asupervisor.checkpoint import retention as rt
from asupervisor.checkpoint.records import Kind
from asupervisor.clock import Clock
from asupervisor.events import EventSink

_RECORD = "commit" + mf.SUFFIX
_TOMBSTONE = ".deleting"


class Writer:
    """Publishes, deletes and quarantines in one directory; blocking, one thread at a time.

    Args:
        directory: The log directory, absolute.
        basename: First part of the names of its checkpoints.
        latest_filename: Name of TensorFlow's state file.
        retention: What stays.
        run_id: Stands in each manifest and in the names of temporary directories.
        clock: Where wall-clock time comes from.
        emit: Where events go.
        faults: Called at each named point of the protocol, for tests.
    """

    def __init__(
        self,
        directory: Path,
        basename: str,
        latest_filename: str,
        retention: rt.Retention,
        run_id: str,
        clock: Clock,
        emit: EventSink,
        faults: fs.FaultPoint = fs.no_faults,
    ) -> None:
        self.directory = directory
        self.basename = basename
        self.latest_filename = latest_filename
        self.retention = retention
        self._run_id = run_id
        self._clock = clock
        self._emit = emit
        self._faults = faults
        self._counter = itertools.count()
        self._manifests = cat.Manifests()
        self._interrupted = True  # perhaps: a run that begins at one checkpoint by name has not looked
        self._temporary_stem = f".{basename}.saving-"

    def scan(self) -> cat.Catalogue:
        """What is in the directory now."""
        return cat.scan(self.directory, self.basename, self.latest_filename, self._manifests)

    # -------------------------------------------------------------------------------------- publish

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """A temporary directory for one checkpoint; whatever is left in it at the end of the block is removed."""
        if self._interrupted:
            # An earlier commit failed between its record and its end (the directory became read-only, or its process
            # was killed): it is older than what comes now, so it goes first.
            self.recover()
        path = self.directory / f"{self._temporary_stem}{self._run_id[:8]}-{next(self._counter)}"
        path.mkdir()
        self._faults("temporary")
        try:
            yield path
        finally:
            if (path / _RECORD).exists():
                self._interrupted = True
            else:
                fs.remove_tree(path)

    def commit(
        self, temporary: Path, name: str, step: int | None, kind: Kind, nonfinite: Sequence[str] = ()
    ) -> mf.Manifest:
        """Make the files in a temporary directory the newest checkpoint.

        Args:
            temporary: The directory from `temporary`, with the files of exactly one checkpoint.
            name: The prefix's file name.
            step: The global step inside, or None.
            kind: What it is for; only regular ones enter the state file.
            nonfinite: Variables with NaN or infinite values.

        Returns:
            Its manifest.

        Raises:
            OSError: Disk full, permission denied and the like; what was published before is untouched.
        """
        before = self.scan()
        now_secs = self._clock.time()
        self._faults("before-fsync")
        facts = {}
        for path in sorted(temporary.iterdir()):
            fs.fsync_file(path)
            facts[path.name] = mf.FileFacts(path.stat().st_size, fs.checksum(path))
        self._faults("after-fsync")
        manifest = mf.Manifest(
            name=name,
            step=step,
            kind=kind,
            files=facts,
            algorithm=fs.PREFERRED_ALGORITHM,
            sequence=before.next_sequence + len(before.unadopted),
            time_secs=now_secs,
            began_at_secs=before.began_at_secs(now_secs),
            run_id=self._run_id,
            nonfinite=tuple(nonfinite),
        )
        self._adopt(before)
        self._faults("before-record")
        fs.write_atomically(temporary / _RECORD, manifest.to_json())
        self._faults("after-record")
        self._move_into_place(temporary, manifest)
        self._faults("before-state")
        if not self._is_there(manifest):
            raise FileNotFoundError(errno.ENOENT, "another directory took its place", str(self.directory))
        if kind is Kind.REGULAR:
            self.write_state(name)
        self._faults("after-state")
        return manifest

    def _adopt(self, catalogue: cat.Catalogue) -> None:
        """Give TensorFlow's own checkpoints, those of the state file, a manifest without checksums.

        From here on they are ours to rotate, and remain so when the state file no longer lists them: a crash between
        that and their deletion leaves nothing behind that nobody feels responsible for.
        """
        for sequence, entry in enumerate(catalogue.unadopted, catalogue.next_sequence):
            manifest = mf.Manifest(
                name=entry.name,
                step=entry.step,
                kind=entry.kind,
                files={name: mf.FileFacts(size, "") for name, size in entry.files.items()},
                algorithm=mf.NO_CHECKSUM,
                sequence=sequence,
                time_secs=entry.time_secs,
                began_at_secs=catalogue.began_at_secs(entry.time_secs),
                run_id=mf.ADOPTED,
            )
            fs.write_atomically(self.directory / f"{entry.name}{mf.SUFFIX}", manifest.to_json())

    def _move_into_place(self, temporary: Path, manifest: mf.Manifest) -> None:
        # The index comes last: without it nobody takes the other files for a checkpoint.
        for name in sorted(manifest.files, key=lambda name: (name.endswith(".index"), name)):
            self._faults(f"before-rename{Path(name).suffix}")
            source = temporary / name
            if source.exists():  # when rolled forward: unless it was moved already
                source.replace(self.directory / name)
        self._faults("before-manifest")
        (temporary / _RECORD).replace(self.directory / f"{manifest.name}{mf.SUFFIX}")
        fs.fsync_dir(self.directory)
        self._faults("after-manifest")
        fs.remove_tree(temporary)

    def _is_there(self, manifest: mf.Manifest) -> bool:
        return mf.read_manifest(self.directory / f"{manifest.name}{mf.SUFFIX}") == manifest

    def write_state(self, latest: str | None = None) -> None:
        """Write the state file anew from what is on disk; without a checkpoint there is none.

        Args:
            latest: Name of a checkpoint that is to be the latest one, whoever wrote it.
        """
        names = self._listed(self.scan())
        if latest is not None:
            names = [*(name for name in names if name != latest), latest]
        path = self.directory / self.latest_filename
        if names:
            mf.write_state_file(path, names)
        else:
            path.unlink(missing_ok=True)

    def _listed(self, catalogue: cat.Catalogue) -> list[str]:
        entries = [e for e in catalogue.regular if e.managed and e.evident_damage() is None]
        if not entries:
            return []
        if isinstance(self.retention, rt.KeepAll):
            return [entries[-1].name]  # as TensorFlow does where it deletes nothing
        # Listed is what stays for being new. What stays for its age is not: a tf.compat.v1.train.Saver that goes on
        # here takes the list for what it may delete next.
        facts = [rt.Facts(e.name, e.step, 0.0) for e in entries]
        reasons = self.retention.keep(facts, 0.0)
        recent = [fact.name for fact, reason in zip(facts, reasons, strict=True) if reason]
        return recent if recent and recent[-1] == entries[-1].name else [*recent, entries[-1].name]

    # -------------------------------------------------------------------------------------- retention

    def apply_retention(self, published: mf.Manifest) -> None:
        """Delete what the policy gives up; each deletion is an event with its reason. Failures are events, too.

        Args:
            published: What `commit` gave. Where that is not found, another directory took the place of ours, and
                nothing is deleted there.
        """
        if not self._is_there(published):
            return
        catalogue = self.scan()
        entries = {e.name: e for e in catalogue.regular if e.managed and e.evident_damage() is None}
        facts = [rt.Facts(e.name, e.step, e.time_secs) for e in entries.values()]
        doomed = rt.to_delete(self.retention, facts, catalogue.began_at_secs(self._clock.time())) if facts else []
        # Of those that are never restored by themselves the first one (next to the cause) and the newest stay.
        for kind in (Kind.NONFINITE, Kind.EMERGENCY):
            spare = [e for e in catalogue.of(kind) if e.managed]
            entries.update({e.name: e for e in spare})
            doomed += [(e.name, f"neither the first nor the newest of kind {kind.name}") for e in spare[1:-1]]
        for name, reason in doomed:
            try:
                self._delete(entries[name])
            except OSError as error:
                self._emit(
                    "checkpoint.delete_failed",
                    f"checkpoint {entries[name].prefix} could not be deleted: {error}",
                    level="warning",
                    prefix=entries[name].prefix,
                    reason=str(error),
                )
            else:
                self._emit(
                    "checkpoint.deleted",
                    f"deleted checkpoint {entries[name].prefix}: {reason}",
                    prefix=entries[name].prefix,
                    reason=reason,
                )

    def _delete(self, entry: cat.Entry) -> None:
        manifest = self.directory / f"{entry.name}{mf.SUFFIX}"
        tombstone = self.directory / f".{entry.name}{_TOMBSTONE}"
        self._faults("before-delete")
        manifest.replace(tombstone)
        self._faults("after-tombstone")
        for path in entry.paths():
            path.unlink(missing_ok=True)
            self._faults("within-delete")
        fs.fsync_dir(self.directory)
        tombstone.unlink(missing_ok=True)
        self._faults("after-delete")

    # -------------------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Finish what a crash interrupted; the first thing to be done in a directory.

        Raises:
            OSError: The directory cannot be read or written.
        """
        try:
            items = sorted(self.directory.iterdir())
        except FileNotFoundError:
            return
        published = False
        for path in items:
            if path.name.startswith(self._temporary_stem) and path.is_dir() and not path.is_symlink():
                published |= self._finish_publication(path)
            elif path.name.startswith(f".{self.basename}") and path.name.endswith(_TOMBSTONE):
                self._finish_deletion(path)
            elif path.name == f".{self.latest_filename}.tmp" or (
                path.name.startswith(f".{self.basename}") and path.name.endswith(f"{mf.SUFFIX}.tmp")
            ):
                path.unlink(missing_ok=True)
            elif path.name.endswith(mf.SUFFIX) and cat.parse_name(path.name[: -len(mf.SUFFIX)], self.basename):
                self._drop_lonely_manifest(path)
        self._interrupted = False
        if published:
            self.write_state()

    def _finish_publication(self, temporary: Path) -> bool:
        manifest = mf.read_manifest(temporary / _RECORD)
        complete = manifest is not None and all(
            _has_size(temporary / name, facts.bytes) or _has_size(self.directory / name, facts.bytes)
            for name, facts in manifest.files.items()
        )
        if manifest is None or not complete or self._overtaken(manifest, temporary / _RECORD):
            fs.remove_tree(temporary)
            return False
        self._move_into_place(temporary, manifest)
        self._emit(
            "checkpoint.recovered",
            f"finished the publication of checkpoint {self.directory / manifest.name}, which a crash interrupted",
            prefix=str(self.directory / manifest.name),
        )
        return True

    def _finish_deletion(self, tombstone: Path) -> None:
        manifest = mf.read_manifest(tombstone)
        if manifest is not None and not self._overtaken(manifest, tombstone):
            for name in sorted(manifest.files, key=lambda name: not name.endswith(".index")):
                (self.directory / name).unlink(missing_ok=True)
        tombstone.unlink(missing_ok=True)

    def _overtaken(self, manifest: mf.Manifest, record: Path) -> bool:
        """Whether somebody, TensorFlow alone say, has written a new checkpoint under this name since the record."""
        index = self.directory / f"{manifest.name}.index"
        return index.exists() and index.stat().st_mtime > record.stat().st_mtime

    def _drop_lonely_manifest(self, path: Path) -> None:
        # tf.compat.v1.train.Saver deletes its own kinds of files only: a manifest without any of them is litter.
        manifest = mf.read_manifest(path)
        if manifest is not None and not any((self.directory / name).exists() for name in manifest.files):
            path.unlink(missing_ok=True)

    # -------------------------------------------------------------------------------------- move away

    def quarantine(self, entry: cat.Entry, reason: str) -> None:
        """Move a damaged checkpoint out of the way; nothing is deleted. A failure is an event.

        Args:
            entry: The checkpoint.
            reason: What is wrong with it, for the event and for a note beside the files.
        """
        try:
            target = self._move_away([entry], Path(cat.QUARANTINE) / entry.name)
            (target / "reason.txt").write_text(reason + "\n", encoding="utf-8")
            where = f"it was moved to {target}"
        except OSError as error:
            where = f"it could not be moved away: {error}"
        self._emit(
            "checkpoint.quarantined",
            f"checkpoint {entry.prefix} is damaged: {reason}; {where}",
            level="error",
            prefix=entry.prefix,
            reason=reason,
        )

    def set_aside(self, catalogue: cat.Catalogue) -> Path | None:
        """Move all checkpoints into a directory of their own, for a fresh start; nothing is deleted.

        Returns:
            Where they are now, or None if there were none.

        Raises:
            OSError: The directory cannot be written.
        """
        state = self.directory / self.latest_filename
        if not catalogue.entries and not state.exists():
            return None
        moment = dt.datetime.fromtimestamp(self._clock.time(), dt.UTC)
        target = self._move_away(catalogue.entries, Path(f"replaced-{moment:%Y%m%dT%H%M%SZ}"))
        if state.exists():
            state.replace(target / state.name)
        fs.fsync_dir(self.directory)
        return target

    def _move_away(self, entries: Iterable[cat.Entry], relative: Path) -> Path:
        target = self.directory / relative
        for number in itertools.count(2):
            if not target.exists():
                break
            target = self.directory / relative.with_name(f"{relative.name}.{number}")
        target.mkdir(parents=True)
        for entry in entries:
            for path in [*entry.paths(), self.directory / f"{entry.name}{mf.SUFFIX}"]:
                with contextlib.suppress(FileNotFoundError):
                    path.replace(target / path.name)
        fs.fsync_dir(target)
        fs.fsync_dir(self.directory)
        return target


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
