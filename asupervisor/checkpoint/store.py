"""`CheckpointStore`: the checkpoints of one log directory, for the process that trains in it.

Everything blocks: `snapshot` and `restorer` belong on the device thread, between two steps, `publish` on a side
thread. The way of a save: `snapshot.py` takes the state, `writer.py` publishes it, `retention.py` says what goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor import _tf
from asupervisor.checkpoint import files as fs
from asupervisor.checkpoint import restore as rs
from asupervisor.checkpoint import retention as rt
from asupervisor.checkpoint import snapshot as sn
from asupervisor.checkpoint.keeper import SnapshotKeeper
from asupervisor.checkpoint.lock import LogdirLock
from asupervisor.checkpoint.place import Place
from asupervisor.checkpoint.records import (
    CheckpointInfo,
    CheckpointRecord,
    Kind,
    NonFinitePolicy,
    RestoreInfo,
    SnapshotInfo,
)
from asupervisor.checkpoint.restorer import StoreRestorer
from asupervisor.checkpoint.taken import Snapshot as Snapshot
from asupervisor.checkpoint.taken import as_os_error, nonfinite_in_files, rename_all, written_by_saver
from asupervisor.checkpoint.verify import damage_of
from asupervisor.checkpoint.writer import Writer
from asupervisor.clock import Clock, SystemClock
from asupervisor.errors import CheckpointDamaged, CheckpointNotRestored
from asupervisor.events import EventSink, log_only

_SLACK_BYTES = 1 << 20  # index, graph and manifest


class CheckpointStore:
    """Takes, publishes, keeps and restores the checkpoints of one log directory.

    Make it before the graph is finalised: it adds the ops of snapshots. On a graph that is finalised already, those
    of an earlier store for the same saver are used, or else `saver.save` between two steps, with one warning.

    Args:
        logdir: The directory; local or mounted. It is created when something is written.
        graph: The graph.
        saver: A `tf.compat.v1.train.Saver`, or any object with its `save` and `restore`.
        basename: First part of the names of checkpoints.
        latest_filename: Name of TensorFlow's state file; None for ``checkpoint``.
        global_step: Tensor or variable with one element that names the checkpoints, or None.
        retention: What stays; by default what the saver's own arguments say.
        nonfinite: What to do with NaN and infinite values in trainable variables and their slots: ``"refuse"``
            writes the checkpoint aside, ``"mark"`` publishes it with a warning, ``"allow"`` does not look.
        fresh_start: Begin anew in a directory that holds checkpoints; they are moved aside.
        init_from: Another directory or checkpoint to begin from where this directory has none, or is begun anew.
        partial: Whether a model may be restored from a checkpoint that does not hold all of it; see `Fit.restorable`.
        init_feed_dict: Feeds for the initialisers of variables that a checkpoint did not supply.
        run_id: Stands in manifests; random by default.
        lock: Checked before something is written, where given.
        write_meta_graph: Whether each checkpoint has a ``.meta`` file.
        read_only: Only restore: nothing is written, moved or deleted in the directory, which may be another run's.
        clock: Where wall-clock time comes from.
        emit: Where events go.
        faults: Called at each named point of the commit protocol, for tests.

    Raises:
        ValueError: `logdir` is a remote address, or `latest_filename` is not a plain name or collides with the
            checkpoints' names.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        graph: tf.Graph,
        saver: Any,
        *,
        basename: str = "model.ckpt",
        latest_filename: str | None = None,
        global_step: Any = None,
        retention: rt.Retention | None = None,
        nonfinite: NonFinitePolicy = "refuse",
        fresh_start: bool = False,
        init_from: str | os.PathLike[str] | None = None,
        partial: bool | None = None,
        init_feed_dict: Any = None,
        run_id: str | None = None,
        lock: LogdirLock | None = None,
        write_meta_graph: bool = True,
        read_only: bool = False,
        clock: Clock | None = None,
        emit: EventSink = log_only,
        faults: fs.FaultPoint = fs.no_faults,
    ) -> None:
        if nonfinite not in ("refuse", "mark", "allow"):
            raise ValueError(f"nonfinite must be 'refuse', 'mark' or 'allow', not {nonfinite!r}")
        self.logdir = os.fspath(logdir).removeprefix("file://")
        if "://" in self.logdir:
            raise ValueError(
                f"logdir {self.logdir!r} is a remote address: checkpoints need a local or mounted directory, where a "
                "file can be locked, flushed and renamed"
            )
        self.basename = basename
        self.graph = graph
        self.saver = saver
        self.nonfinite: NonFinitePolicy = nonfinite
        self.fresh_start = fresh_start
        self.init_from = None if init_from is None else os.fspath(init_from)
        self.partial = partial
        self.init_feed_dict = init_feed_dict
        self.global_step = global_step
        self.run_id = run_id or secrets.token_hex(8)
        self.lock = lock
        self.write_meta_graph = write_meta_graph
        self.read_only = read_only
        self.restored: RestoreInfo | None = None
        """What the last restore did, or None."""
        self.last: CheckpointInfo | None = None
        """The newest regular checkpoint that this store published, or None."""
        self._emit = emit
        self._clock = clock or SystemClock()
        self._name_checked(latest_filename)
        self.writer = Writer(
            Path(self.logdir).absolute(),
            basename,
            latest_filename or "checkpoint",
            retention if retention is not None else rt.retention_of(saver),
            self.run_id,
            self._clock,
            emit,
            faults,
        )
        self.restorer = StoreRestorer(self)
        """What a SessionManager takes as its `restore`."""
        self._faults = faults
        self.snapshots = SnapshotKeeper(graph, saver, global_step)
        self._meta: tuple[int, bytes] | None = None
        self._mutex = threading.Lock()
        self._place = Place(self.logdir, self.writer, self.run_id)
        self._warned_fallback = False

    def _name_checked(self, latest_filename: str | None) -> None:
        if latest_filename is not None and Path(latest_filename).name != latest_filename:
            raise ValueError(f"latest_filename must not contain a directory: {latest_filename!r}")
        if self.basename == (latest_filename or "checkpoint") and self.global_step is None:
            raise ValueError(
                f"the checkpoints' name {self.basename!r} collides with that of the state file; choose another one"
            )

    # -------------------------------------------------------------------------------------- what there is

    @property
    def directory(self) -> Path:
        """The directory, absolute."""
        return self.writer.directory

    @property
    def can_save(self) -> bool:
        """Whether the saver has something to save: one without variables has not."""
        return not (isinstance(self.saver, tf.compat.v1.train.Saver) and getattr(self.saver, "saver_def", None) is None)

    @property
    def last_prefix(self) -> str | None:
        """Prefix of the newest checkpoint that is known to be good: published or restored; any thread."""
        if self.last is not None:
            return self.last.prefix
        return None if self.restored is None else self.restored.prefix

    def prefix_of(self, name: str) -> str:
        """The prefix of a name, in the form in which the directory was given."""
        return os.path.join(self.logdir, name)  # noqa: PTH118 (as TensorFlow joins it)

    def checkpoints(self) -> list[CheckpointRecord]:
        """What lies in the directory, oldest first; blocking."""
        return [entry.record() for entry in self.writer.scan().entries]

    def latest_good(self) -> CheckpointRecord | None:
        """The newest regular checkpoint that passes verification, or None; blocking, reads contents."""
        for entry in reversed(self.writer.scan().regular):
            if damage_of(entry) is None:
                return entry.record()
        return None

    def verify(self, prefix: str) -> None:
        """Check a checkpoint's files: sizes and checksums, or else every tensor; blocking.

        Args:
            prefix: The checkpoint, or the file name of its prefix.

        Raises:
            CheckpointDamaged: It is not there, or not whole.
        """
        name = Path(prefix).name
        for entry in self.writer.scan().entries:
            if entry.name == name:
                damage = damage_of(entry)
                if damage is not None:
                    raise CheckpointDamaged(entry.prefix, damage)
                return
        raise CheckpointDamaged(prefix, "there is no such checkpoint")

    def holds(self, prefix: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint lies in this directory; blocking."""
        parent = Path(prefix).absolute().parent
        try:
            return parent == self.directory or parent.samefile(self.directory)
        except OSError:  # one of them does not exist
            return False

    def check_begins_from(self, prefix: str) -> None:
        """Tell before a run begins whether it may save after one checkpoint was restored by name; blocking.

        Args:
            prefix: The checkpoint.

        Raises:
            CheckpointNotRestored: It lies elsewhere, and this directory holds checkpoints.
        """
        if self.fresh_start or self._place.claimed or self.holds(prefix) or Path(prefix).is_dir():
            return  # what is wrong with a directory, the restorer tells
        catalogue = self.writer.scan()
        if catalogue.regular:
            raise CheckpointNotRestored(
                self.logdir,
                f"the newest of {len(catalogue.regular)} is {catalogue.regular[-1].prefix!r}, and {prefix!r} was to be "
                "restored instead",
            )

    # -------------------------------------------------------------------------------------- snapshot

    def warm_up(self, raw: tf.compat.v1.Session) -> None:
        """Let TensorFlow prepare for snapshots, which costs most of a second for a thousand variables.

        On the device thread, before training begins.

        Args:
            raw: The session.
        """
        self.snapshots.warm_up(raw)

    def reserve(self, raw: tf.compat.v1.Session) -> None:
        """Have the memory of the next snapshot ready, one copy of the model; on a side thread, beside the steps.

        Optional: a snapshot without it is as good, and holds training up for longer. Does nothing while a snapshot is
        alive, and where it has been done.

        Args:
            raw: The session.
        """
        self.snapshots.reserve(raw)

    def snapshot(
        self,
        raw: tf.compat.v1.Session,
        step: int | None = None,
        *,
        kind: Kind = Kind.REGULAR,
        training_runs: int | None = None,
    ) -> Snapshot:
        """Take the state between two steps; on the device thread.

        Pass the result to `publish` on a side thread, or `discard` it. One is alive at a time: an earlier one that
        is not being published is discarded.

        Args:
            raw: The session.
            step: The step that names the checkpoint; None reads it in the same run as the variables.
            kind: What the checkpoint is for.
            training_runs: Noted in `SnapshotInfo`.

        Raises:
            RuntimeError: The earlier one is being published.
            Exception: What TensorFlow, or a saver's own `save`, raises.
        """
        begun = perf_counter()
        now_secs = self._clock.time()
        snapshot: Snapshot
        if self.snapshots.works_in(raw):
            held = self.snapshots.take(raw)
            found, size = (held.step if step is None else step), held.ops.bytes
            snapshot = Snapshot(SnapshotInfo(found, kind, size, 0.0, now_secs, training_runs), held=held)
        else:
            found = self.read_step(raw) if step is None else step
            snapshot = Snapshot(SnapshotInfo(found, kind, 0, 0.0, now_secs, training_runs))
            try:
                self._save_by_saver(raw, snapshot)
            except BaseException:
                snapshot.discard()
                raise
        info = snapshot.info
        snapshot.info = SnapshotInfo(
            info.step, kind, info.bytes, perf_counter() - begun, info.taken_at_secs, training_runs
        )
        return snapshot

    def read_step(self, raw: tf.compat.v1.Session) -> int | None:
        """The global step now, or None where the model has none; on the device thread."""
        return None if self.global_step is None else int(np.ravel(raw.run(self.global_step))[0])

    def _save_by_saver(self, raw: tf.compat.v1.Session, snapshot: Snapshot) -> None:
        self._warn_of_fallback()
        self._prepare_directory()
        temporary = snapshot.cleanup.enter_context(self.writer.temporary())
        step = snapshot.info.step
        written = written_by_saver(self.saver, raw, temporary, self.basename, step)
        if not self.write_meta_graph:
            for meta in temporary.glob("*.meta"):
                meta.unlink()
        snapshot.temporary = temporary
        snapshot.written = written or self._own_name(step)
        if raw.sess_str:  # others have gone on meanwhile
            snapshot.info = dataclasses.replace(snapshot.info, step=self._step_inside(snapshot, step))

    def _step_inside(self, snapshot: Snapshot, step: int | None) -> int | None:
        """The global step that a saver has written, which names the checkpoint."""
        variable = None if self.global_step is None else sn.variable_name(self.graph, self.global_step)
        if variable is None or snapshot.temporary is None or snapshot.written is None:
            return step
        inside = rs.value_in(str(snapshot.temporary / snapshot.written), variable)
        return step if inside is None else int(np.ravel(inside)[0])

    def _warn_of_fallback(self) -> None:
        if self._warned_fallback:
            return
        self._warned_fallback = True
        if sn.plain_save_op(self.graph, self.saver) is not None and self.snapshots.ops is None:
            self._emit(
                "checkpoint.no_snapshots",
                "the graph was finalised before it got the ops of snapshots: training stands still while the saver "
                "writes. Make the Supervisor before the graph is finalised.",
                level="warning",
            )

    # -------------------------------------------------------------------------------------- publish

    def publish(self, snapshot: Snapshot) -> CheckpointInfo:
        """Write a snapshot and make it the newest checkpoint; on a side thread, beside the steps.

        Memory and temporary files are given back, whatever happens.

        Args:
            snapshot: What `snapshot` gave.

        Raises:
            OSError: Disk full, permission denied and the like; all that was published before is untouched.
            CheckpointNotRestored: The directory holds checkpoints that this run neither restored nor was told to
                set aside; it may have become another one since.
            LogdirInUse: The directory was replaced, and somebody else holds its lock now.
        """
        begun = perf_counter()
        try:
            with self.snapshots.writing(snapshot.held), self._mutex:
                self._prepare_directory()
                return self._publish(snapshot, begun)
        except tf.errors.OpError as error:
            raise as_os_error(error) from error
        finally:
            snapshot.discard()

    def _publish(self, snapshot: Snapshot, begun: float) -> CheckpointInfo:
        with self._files_of(snapshot) as (temporary, name, nonfinite):
            kind, step = snapshot.info.kind, snapshot.info.step
            if kind is Kind.REGULAR and nonfinite and self.nonfinite == "refuse":
                kind = Kind.NONFINITE
            target = self._own_name(step) + kind.suffix
            if not any(temporary.iterdir()):
                # A saver object of the user's own that keeps its files elsewhere: they are its business.
                return CheckpointInfo(str(name), step, 0, snapshot.info.stall_secs, perf_counter() - begun)
            rename_all(temporary, name, target)
            manifest = self.writer.commit(temporary, target, step, kind, nonfinite)
        self._place.claimed = True
        self.writer.apply_retention(manifest)
        info = CheckpointInfo(
            prefix=self.prefix_of(target),
            step=step,
            bytes=sum(facts.bytes for facts in manifest.files.values()),
            stall_secs=snapshot.info.stall_secs,
            write_secs=perf_counter() - begun,
            kind=kind,
            nonfinite=manifest.nonfinite,
            time_secs=manifest.time_secs,
        )
        if nonfinite:
            self._tell_nonfinite(info)
        if kind is Kind.REGULAR:
            self.last = info
            self.tell_saver()
        return info

    @contextlib.contextmanager
    def _files_of(self, snapshot: Snapshot) -> Iterator[tuple[Path, str, list[str]]]:
        """A temporary directory with the files of a checkpoint, their present name, and what is not finite."""
        if snapshot.held is None:
            assert snapshot.temporary is not None and snapshot.written is not None
            written = snapshot.temporary / snapshot.written
            nonfinite = [] if self.nonfinite == "allow" else nonfinite_in_files(written, self.graph)
            yield snapshot.temporary, snapshot.written, nonfinite
            return
        held = snapshot.held
        fs.check_space(self.directory, snapshot.info.bytes + _SLACK_BYTES)
        with self.writer.temporary() as temporary:
            name = self._own_name(snapshot.info.step)
            self._faults("before-write")
            held.write(str(temporary / name))
            # Not before the write, which keeps one thread busy: this takes all that there are, and the step that comes
            # right after the snapshot has been held up enough.
            nonfinite = held.nonfinite() if self.nonfinite != "allow" else []
            held.release()  # the copy lives no longer than it must
            self._faults("after-write")
            if self.write_meta_graph:
                (temporary / f"{name}.meta").write_bytes(self._meta_graph())
            yield temporary, name, nonfinite

    def _own_name(self, step: int | None) -> str:
        if step is None:
            return self.basename
        return f"{self.basename}-{step:08d}" if _tf.pads_step_number(self.saver) else f"{self.basename}-{step}"

    def _meta_graph(self) -> bytes:
        # A graph that is finalised does not change: it is exported once, not with each checkpoint.
        version = self.graph.version
        if self._meta is None or self._meta[0] != version or not self.graph.finalized:
            self._meta = version, sn.export_meta_graph(self.graph, self.saver)
        return self._meta[1]

    def _prepare_directory(self) -> None:
        self._place.prepare(self.lock, may_begin=self.restored is not None or self.fresh_start)

    def _tell_nonfinite(self, info: CheckpointInfo) -> None:
        names = ", ".join(info.nonfinite[:5]) + (", ..." if len(info.nonfinite) > 5 else "")
        aside = info.kind is Kind.NONFINITE
        self._emit(
            "checkpoint.nonfinite",
            f"NaN or infinite values in {names} at step {info.step}; "
            + (f"written aside as {info.prefix}, never restored by itself" if aside else f"published as {info.prefix}"),
            level="error" if aside else "warning",
            prefix=info.prefix,
            step=info.step,
            variables=list(info.nonfinite),
        )

    def tell_saver(self) -> None:
        """Give the saver the list of checkpoints that it may delete if its user calls it himself."""
        if not hasattr(self.saver, "set_last_checkpoints_with_time"):
            return
        catalogue = self.writer.scan()
        times = {entry.name: entry.time_secs for entry in catalogue.regular}
        self.saver.set_last_checkpoints_with_time(
            [(self.prefix_of(name), times[name]) for name in catalogue.state.names if name in times]
        )

    def began_fresh(self) -> None:
        """The directory's checkpoints were set aside: from now on it is like any other."""
        self.fresh_start = False
        self._place.claimed = True

    def claim(self, restored: RestoreInfo | None) -> None:
        """This run goes on from what the directory holds; `restored` tells what was restored, if anything."""
        self.restored = restored
        self._place.claim()
        if restored is not None:  # else this may be the loop's thread, which reads no directory: the next save does
            self._place.look()
