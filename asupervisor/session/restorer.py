"""How a checkpoint gets into a session: the seam between this room and the one that knows checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


class Restorer(Protocol):
    """Brings a checkpoint into a session.

    An implementation may offer `restored_from`, the prefix that it restored last; it goes into the log. It is also
    the one to initialise what the checkpoint did not supply, since after a restore no `init_op` is run.
    """

    def __call__(
        self,
        raw: tf.compat.v1.Session,
        saver: Any,
        checkpoint_dir: str | None,
        checkpoint_filename_with_path: str | None,
        /,
    ) -> bool:
        """Restore, or tell that there is nothing to restore.

        Blocks; on the device thread, with the session's graph entered. Called again and again while a checkpoint
        is waited for. Exactly one of the two places is given.

        Returns:
            Whether something was restored.
        """


class PlainRestorer:
    """What TensorFlow's SessionManager does: the newest checkpoint of the state file, or an error.

    A state file that names a vanished checkpoint raises; nothing is verified, and nothing else is initialised.
    """

    def __init__(self) -> None:
        self.restored_from: str | None = None

    def __call__(
        self,
        raw: tf.compat.v1.Session,
        saver: Any,
        checkpoint_dir: str | None,
        checkpoint_filename_with_path: str | None,
        /,
    ) -> bool:
        """See `Restorer`."""
        earlier: list[str] | None = None
        path = checkpoint_filename_with_path
        if path is None:
            state = tf.compat.v1.train.get_checkpoint_state(checkpoint_dir)
            if state is None or not state.model_checkpoint_path:
                return False
            path, earlier = state.model_checkpoint_path, list(state.all_model_checkpoint_paths)
        # Variables and tables of a SavedModel have initialisers of their own; they come first, so that the
        # checkpoint has the last word.
        if initialisers := raw.graph.get_collection("saved_model_initializers"):
            raw.run(initialisers)
        saver.restore(raw, path)
        if earlier is not None:
            saver.recover_last_checkpoints(earlier)
        self.restored_from = path
        return True
