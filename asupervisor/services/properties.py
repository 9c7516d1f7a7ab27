"""What can be read of a supervisor at any time, with a session or without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from asupervisor.runtime.coordinator import Coordinator
from asupervisor.services.parts import Parts
from asupervisor.services.peers import Peers


class SupervisorProperties:
    """The read-only properties of a `Supervisor`: those of the original, and what it is in a cluster.

    Source: the properties of `tf.compat.v1.train.Supervisor`.
    """

    _parts: Parts

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self._parts.settings.elements.graph

    @property
    def is_chief(self) -> bool:
        """Whether this is a chief supervisor."""
        return self._parts.settings.is_chief

    @property
    def session_manager(self) -> Any:
        """The SessionManager that prepares the sessions."""
        return self._parts.session_manager

    @property
    def coord(self) -> Coordinator:
        """The Coordinator."""
        return self._parts.coordinator

    @property
    def peers(self) -> Peers | None:
        """The other tasks of the cluster; None without one."""
        return self._parts.settings.peers

    @property
    def init_op(self) -> Any:
        """The op that initialises the model, or None."""
        return self._parts.settings.elements.init_op

    @property
    def init_feed_dict(self) -> Mapping[Any, Any] | None:
        """What is fed to `init_op`, or None."""
        return self._parts.settings.init_feed_dict

    @property
    def ready_op(self) -> Any:
        """The op that tells whether the model is ready, or None."""
        return self._parts.settings.elements.ready_op

    @property
    def ready_for_local_init_op(self) -> Any:
        """The op that tells whether the model is ready for `local_init_op`, or None."""
        return self._parts.settings.elements.ready_for_local_init_op

    @property
    def local_init_op(self) -> Any:
        """The op that initialises what is local to this process, or None."""
        return self._parts.settings.elements.local_init_op

    @property
    def summary_writer(self) -> Any:
        """The writer of the event file, or None."""
        return self._parts.writer

    @property
    def summary_op(self) -> Any:
        """The summary op, or None."""
        return self._parts.settings.elements.summary_op

    @property
    def save_summaries_secs(self) -> float | None:
        """Seconds between summaries; None for a non-chief."""
        return self._parts.save_summaries_secs

    @property
    def global_step(self) -> Any:
        """The global step tensor, or None."""
        return self._parts.settings.elements.global_step

    @property
    def saver(self) -> Any:
        """The saver, or None."""
        return self._parts.settings.elements.saver

    @property
    def save_model_secs(self) -> float | None:
        """Seconds between checkpoints; None for a non-chief."""
        return self._parts.save_model_secs

    @property
    def save_path(self) -> str | None:
        """First part of the paths of checkpoints; None without a logdir and for a non-chief."""
        if self._parts.given_dir is None:
            return None
        return os.path.join(self._parts.given_dir, self._parts.settings.checkpoint_basename)  # noqa: PTH118 (as TensorFlow's)
