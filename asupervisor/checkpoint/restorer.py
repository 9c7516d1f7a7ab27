"""How a session gets its model: from the newest good checkpoint or with an error, never from step 0 by accident."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from asupervisor.checkpoint import catalogue as cat
from asupervisor.checkpoint import restore as rs
from asupervisor.checkpoint.records import RestoreInfo
from asupervisor.checkpoint.verify import damage_of
from asupervisor.errors import CheckpointDamaged, CheckpointNotRestored

if TYPE_CHECKING:
    from asupervisor.checkpoint.store import CheckpointStore


class StoreRestorer:
    """What a SessionManager calls to restore; blocking, on the device thread with the graph entered.

    Args:
        store: Whose directory it is.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    @property
    def restored_from(self) -> str | None:
        """The prefix that was restored last, or None."""
        return None if self._store.restored is None else self._store.restored.prefix

    def __call__(
        self,
        raw: tf.compat.v1.Session,
        saver: Any,
        checkpoint_dir: str | None,
        checkpoint_filename_with_path: str | None,
        /,
    ) -> bool:
        """Restore one checkpoint, or the newest good one of a directory.

        One checkpoint means that one: there is no other instead of it, and the directory of the store is not looked at.
        With a fresh start, what lies in that is set aside once the model has been restored, or is to be made anew.

        Damaged checkpoints that are newer than the one restored are quarantined, in the store's own directory only.
        Global variables that the checkpoint did not supply are initialised, and named in the event
        ``checkpoint.restored``.

        Args:
            raw: The session.
            saver: What restores; None restores nothing.
            checkpoint_dir: A directory.
            checkpoint_filename_with_path: One checkpoint, instead.

        Returns:
            Whether something was restored. False means a directory without any trace of a checkpoint, or a fresh
            start.

        Raises:
            CheckpointMismatch: The checkpoint is of another model; nothing was changed, on disk or in the session.
            CheckpointDamaged: The one checkpoint that was named is not whole.
            CheckpointNotRestored: The directory holds checkpoints, or traces of them, and none can be restored.
        """
        store = self._store
        if saver is None:
            return False
        with raw.graph.as_default():
            if checkpoint_filename_with_path is not None:
                self._explicit(raw, saver, checkpoint_filename_with_path)
                if store.fresh_start and not store.read_only:
                    self._set_aside()
                return True
            if checkpoint_dir is None:
                return False
            directory = Path(checkpoint_dir).absolute()
            if store.read_only or directory != store.directory:
                if self._from_elsewhere(raw, saver, directory, store.basename):
                    return True
                return directory == store.directory and self._init_from(raw, saver)
            if store.fresh_start:
                begun = self._init_from(raw, saver)
                self._set_aside()
                return begun
            return self._from_own(raw, saver) or self._init_from(raw, saver)

    # -------------------------------------------------------------------------------------- the places

    def _from_own(self, raw: tf.compat.v1.Session, saver: Any) -> bool:
        store = self._store
        writer = store.writer
        writer.recover()
        catalogue = writer.scan()
        if not catalogue.regular and catalogue.evidence() is None:
            store.claim(None)
            return False
        entry, damaged, restored = self._newest_good(raw, saver, catalogue)
        if entry is None:
            raise CheckpointNotRestored(store.logdir, _why_none(catalogue, damaged))
        for bad, reason in damaged:
            writer.quarantine(bad, reason)
        self._tidy_state(entry, catalogue, bool(damaged))
        store.claim(restored)
        store.tell_saver()
        return True

    def _set_aside(self) -> None:
        store = self._store
        store.writer.recover()
        catalogue = store.writer.scan()
        target = store.writer.set_aside(catalogue)
        if target is not None:
            store._emit(
                "checkpoint.set_aside",
                f"fresh start: {len(catalogue.entries)} checkpoints were moved to {target}",
                level="warning",
                target=str(target),
                checkpoints=[entry.name for entry in catalogue.entries],
            )
        store.began_fresh()

    def _tidy_state(self, entry: cat.Entry, catalogue: cat.Catalogue, moved: bool) -> None:
        state = catalogue.state
        if (
            state.exists
            and not state.problem
            and not state.relocated
            and state.names[-1:] == (entry.name,)
            and not moved
        ):
            return
        store = self._store
        try:
            store.writer.write_state(entry.name)
        except OSError as error:
            store._emit(
                "checkpoint.state_not_written",
                f"the state file {state.path} could not be written: {error}",
                level="warning",
                reason=str(error),
            )
            return
        why = state.problem or ("was missing" if not state.exists else "did not name the newest good checkpoint")
        store._emit(
            "checkpoint.state_rebuilt",
            f"the state file {state.path} {why}; it was written anew and names {entry.name}",
            level="warning",
            path=str(state.path),
            latest=entry.name,
        )

    def _init_from(self, raw: tf.compat.v1.Session, saver: Any) -> bool:
        place = self._store.init_from
        if place is None:
            return False
        path = Path(place).absolute()
        if not path.is_dir():
            self._explicit(raw, saver, place)
            return True
        try:
            if self._from_elsewhere(raw, saver, path, self._store.basename):
                return True
            reason = "it is a directory without checkpoints"
        except CheckpointNotRestored as error:
            reason = error.reason
        raise CheckpointNotRestored(
            place,
            reason,
            f"init_from {place!r} cannot be restored: {reason}. Name a directory with checkpoints named "
            f"{self._store.basename!r}, or the prefix of one checkpoint.",
        )

    def _from_elsewhere(self, raw: tf.compat.v1.Session, saver: Any, directory: Path, basename: str) -> bool:
        catalogue = cat.scan(directory, basename)
        if not catalogue.entries and catalogue.evidence() is None:
            return False
        entry, damaged, restored = self._newest_good(raw, saver, catalogue)
        if entry is None:
            raise CheckpointNotRestored(str(directory), _why_none(catalogue, damaged))
        self._store.restored = restored
        if directory == self._store.directory:  # it is read only for us, and somebody saves there by the saver itself
            self._store.tell_saver()
        return True

    def _explicit(self, raw: tf.compat.v1.Session, saver: Any, prefix: str) -> None:
        store, path = self._store, Path(prefix).absolute()
        if path.is_dir():
            raise CheckpointDamaged(prefix, "it is a directory, not the prefix of a checkpoint in one")
        entries = cat.scan(path.parent, path.name).entries if path.parent.is_dir() else ()
        entry = next((entry for entry in entries if entry.name == path.name), None)
        if entry is not None:
            damage = damage_of(entry)
            if damage is not None:
                raise CheckpointDamaged(prefix, damage)
        elif "://" not in prefix and rs.actions_of(raw.graph, saver) is not None:
            _check_prefix(prefix, path)
        restored = self._restore(raw, saver, prefix, None if entry is None else entry.step, ())
        if not store.read_only and store.holds(path):
            store.claim(restored)
        elif store.read_only or store.fresh_start or not store.writer.scan().regular:
            store.restored = restored
        else:
            store.restored = None  # it is no reason to write over what lies in the directory

    # -------------------------------------------------------------------------------------- the work

    def _newest_good(
        self, raw: tf.compat.v1.Session, saver: Any, catalogue: cat.Catalogue
    ) -> tuple[cat.Entry | None, list[tuple[cat.Entry, str]], RestoreInfo | None]:
        damaged: list[tuple[cat.Entry, str]] = []
        for entry in reversed(catalogue.regular):
            reason = damage_of(entry)
            if reason is None:
                try:
                    passed_over = tuple((bad.prefix, why) for bad, why in damaged)
                    prefix = str(catalogue.directory / entry.name)
                    return entry, damaged, self._restore(raw, saver, prefix, entry.step, passed_over)
                except CheckpointDamaged as error:
                    reason = error.reason
            damaged.append((entry, reason))
        return None, damaged, None

    def _restore(
        self,
        raw: tf.compat.v1.Session,
        saver: Any,
        prefix: str,
        step: int | None,
        damaged: Sequence[tuple[str, str]],
    ) -> RestoreInfo:
        store = self._store
        begun = perf_counter()
        actions = rs.actions_of(raw.graph, saver)
        index = rs.contents(prefix) if actions is not None else None
        part = False
        if actions is not None and index is not None:
            found = rs.fit(actions, index)
            if rs.OBJECT_GRAPH in index.shapes:
                # The saver would add ops to restore it by its objects.
                if raw.graph.finalized and not found.whole:
                    raise rs.object_based(prefix, found)
            elif not found.restorable(store.partial):
                raise rs.mismatch(prefix, found)
            else:
                part = not found.whole
        # Variables and tables of a SavedModel have initialisers of their own; the checkpoint has the last word.
        if initializers := raw.graph.get_collection("saved_model_initializers"):
            raw.run(initializers)
        if part:
            assert actions is not None and index is not None
            rs.restore_part(raw, prefix, actions, index)
        else:
            try:
                rs.restore_all(raw, saver, prefix)
            except (tf.errors.OutOfRangeError, tf.errors.DataLossError, IndexError) as error:
                # Damaged between verification and now. Never to be taken for "end of data".
                raise CheckpointDamaged(prefix, f"{type(error).__name__}: {error}") from error
        missing = rs.uninitialized(raw, raw.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES))
        if missing:
            rs.initialize(raw, missing, store.init_feed_dict)
        names = tuple(variable.op.name for variable in missing)
        restored = RestoreInfo(prefix, step, names, tuple(damaged), perf_counter() - begun)
        store._emit(
            "checkpoint.restored",
            f"restored {prefix}"
            + (f" after passing over {len(damaged)} damaged ones" if damaged else "")
            + (f"; it did not supply, and these were initialised: {', '.join(names)}" if names else ""),
            level="warning" if names or damaged else "info",
            prefix=prefix,
            step=step,
            initialized=list(names),
            damaged=[{"prefix": bad, "reason": reason} for bad, reason in damaged],
        )
        return restored


def _check_prefix(prefix: str, path: Path) -> None:
    """Raise where no checkpoint has this prefix, with the prefix that was meant if it is one of its files."""
    whole = cat.stem_of(path.name)
    if whole is not None and path.is_file():
        raise CheckpointDamaged(
            prefix,
            "it is one file of a checkpoint",
            f"{prefix!r} is one file of a checkpoint: pass the prefix of all of them, {str(path.with_name(whole))!r}",
        )
    if not path.exists() and not set("*?") & set(path.name):  # a pattern names the shards of the V1 format
        raise CheckpointDamaged(
            prefix,
            "it is not there",
            f"checkpoint {prefix!r} is not there: {str(path.parent)!r} has neither index nor data of it. Pass "
            "the prefix of a checkpoint, as tf.compat.v1.train.latest_checkpoint gives it",
        )


def _why_none(catalogue: cat.Catalogue, damaged: Sequence[tuple[cat.Entry, str]]) -> str:
    if not damaged:
        return catalogue.evidence() or "nothing is there"
    listed = "; ".join(f"{entry.name}: {reason}" for entry, reason in damaged)
    return f"all {len(damaged)} are damaged ({listed})"
