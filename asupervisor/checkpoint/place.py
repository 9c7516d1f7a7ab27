"""Whether a directory is a run's own to save in: made, locked, and without checkpoints that it would overwrite."""

from __future__ import annotations

from asupervisor.checkpoint.lock import LogdirLock
from asupervisor.checkpoint.writer import Writer
from asupervisor.errors import CheckpointNotRestored


class Place:
    """The directory of one run, looked at before each save; blocking, except `claim`.

    Args:
        logdir: Its name, for messages.
        writer: Who writes there.
        run_id: The run, as its manifests name it.
    """

    def __init__(self, logdir: str, writer: Writer, run_id: str) -> None:
        self.claimed = False
        """Whether the run goes on from what the directory holds, or has saved there."""
        self._logdir = logdir
        self._writer = writer
        self._run_id = run_id
        self._found: frozenset[tuple[str, float]] | None = None  # when it was claimed: names and times
        self._moved = False
        self._made = False

    def claim(self) -> None:
        """The run goes on from what the directory holds, or begins anew in it; the next save looks what that is."""
        self.claimed = True
        self._found = None

    def look(self) -> None:
        """Remember what a claimed directory holds: another one that takes its place holds other checkpoints."""
        self._found = frozenset((entry.name, entry.time_secs) for entry in self._writer.scan().entries)

    def prepare(self, lock: LogdirLock | None, *, may_begin: bool) -> None:
        """Make the directory, and make sure that it is ours.

        Args:
            lock: Its lock, where there is one.
            may_begin: Whether the run may save beside checkpoints that it has not claimed.

        Raises:
            CheckpointNotRestored: It holds checkpoints that are not this run's.
            LogdirInUse: It was replaced, and somebody else holds its lock now.
            OSError: It cannot be written.
        """
        # Where somebody removed the directory, or its place came back empty, saving goes on; but only the first time
        # what is above it is made, too.
        self._writer.directory.mkdir(parents=not self._made, exist_ok=True)
        self._made = True
        if lock is not None and lock.ensure():
            self._moved = True
        if self._moved:
            # What is refused stays refused: the lock tells only once that it moved.
            self._check_still_ours()
            self._moved = False
        if self.claimed:
            if self._found is None:
                self.look()
        elif not may_begin:
            regular = self._writer.scan().regular
            if regular:
                raise CheckpointNotRestored(self._logdir, f"the newest of {len(regular)} is {regular[-1].prefix!r}")

    def _check_still_ours(self) -> None:
        """Raise where the path leads to another run's directory now, whose checkpoints retention would delete."""
        catalogue = self._writer.scan()
        entries = catalogue.regular or catalogue.entries
        if not entries:
            return
        newest = entries[-1]
        written = newest.manifest is not None and newest.manifest.run_id == self._run_id
        if not written and (newest.name, newest.time_secs) not in (self._found or ()):
            reason = f"another directory took its place during this run, with {newest.prefix!r} of another one"
            raise CheckpointNotRestored(
                self._logdir,
                reason,
                f"logdir {self._logdir!r}: {reason}, which this one must not delete. Put its own directory back, or "
                "begin again in one of its own.",
            )
