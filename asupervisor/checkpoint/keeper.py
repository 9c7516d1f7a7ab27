"""One snapshot at a time: who may use the holders of `snapshot.py`, and when.

A snapshot is taken on the device thread; memory is reserved, and snapshots are written and given up, on side threads.
They use one set of holders, so they must not overlap: emptying the holders for an old snapshot while a new one fills
them would publish garbage. One lock covers taking, reserving and giving up; a write, which may take seconds, is not
under it but marked, and taking another snapshot meanwhile is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import tensorflow as tf

from asupervisor.checkpoint import snapshot as sn


class SnapshotKeeper:
    """The snapshots of one saver on one graph; made before the graph is finalised.

    Args:
        graph: The graph; gets the ops, unless it is finalised.
        saver: The saver.
        global_step: What names the checkpoints, or None.
    """

    def __init__(self, graph: tf.Graph, saver: Any, global_step: Any) -> None:
        self.ops = sn.add_snapshot_ops(graph, saver, global_step)
        self.reserve_secs = 0.0
        """How long the last reservation took, in seconds."""
        self._lock = threading.Lock()
        self._alive: sn.Held | None = None
        self._being_written: sn.Held | None = None
        self._reserved_in: weakref.ref[tf.compat.v1.Session] | None = None

    @property
    def wants_memory(self) -> bool:
        """Whether there is anything to reserve."""
        return self.ops is not None and self.ops.reserve is not None

    def works_in(self, raw: tf.compat.v1.Session) -> bool:
        """Whether snapshots can be taken in a session; otherwise its saver has to write between two steps."""
        return self.ops is not None and sn.can_hold(raw)

    def warm_up(self, raw: tf.compat.v1.Session) -> None:
        """Let TensorFlow prepare the run of a snapshot; on the device thread, before training begins."""
        if not self.works_in(raw):
            return
        assert self.ops is not None
        with self._lock:
            if self._being_written is not None:  # of an earlier session, on a slow disk: the warmth is not worth a wait
                return
            self._give_up()
            try:
                sn.hold(raw, self.ops).release()
            except tf.errors.FailedPreconditionError:  # not initialised: it is prepared all the same
                pass

    def reserve(self, raw: tf.compat.v1.Session) -> None:
        """Have the memory of the next snapshot ready; on a side thread. Nothing while one is alive, or if it is."""
        if not self.works_in(raw):
            return
        assert self.ops is not None
        with self._lock:
            reserved = None if self._reserved_in is None else self._reserved_in()
            if reserved is raw or (self._alive is not None and not self._alive.released):
                return
            begun = perf_counter()
            try:
                sn.reserve(raw, self.ops)
            except tf.errors.ResourceExhaustedError:  # the snapshot will tell, if it is still so
                return
            self._reserved_in = weakref.ref(raw)
            self.reserve_secs = perf_counter() - begun

    def take(self, raw: tf.compat.v1.Session) -> sn.Held:
        """Take a snapshot; on the device thread. It waits for a reservation that is under way.

        Raises:
            RuntimeError: One is being written.
        """
        assert self.ops is not None
        with self._lock:
            self._give_up()
            self._alive = held = sn.hold(raw, self.ops)
            self._reserved_in = None
            return held

    def _give_up(self) -> None:
        if self._alive is None:
            return
        if self._alive is self._being_written:
            raise RuntimeError("a snapshot is being written: one at a time")
        self._alive.release()
        self._alive = None

    @contextmanager
    def writing(self, held: sn.Held | None) -> Iterator[None]:
        """Nobody gives the snapshot up while the block runs; at its end it is given back. Blocking, any thread.

        Args:
            held: The snapshot; None does nothing.

        Raises:
            RuntimeError: A later one took its place.
        """
        if held is None:
            yield
            return
        with self._lock:
            if held is not self._alive:
                raise RuntimeError("the snapshot was given up: a later one took its place")
            self._being_written = held
        try:
            yield
        finally:
            held.release()
            with self._lock:
                self._alive = self._being_written = None  # they refer to the session
