"""The one door to TensorFlow's less public parts.

Everything here either combines TensorFlow's classes with ours or reaches something that TensorFlow does not
promise to keep. Each function of the second kind has a fallback, and `tests/test_tf_private.py` tells when its
private part disappears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from asupervisor import errors


class SessionNotReady(errors.SessionNotReady, tf.errors.DeadlineExceededError):  # type: ignore[misc]
    """The instances of `errors.SessionNotReady` that are raised where TensorFlow is loaded.

    Also a `tf.errors.DeadlineExceededError`, which is what code written for TensorFlow's SessionManager catches.
    Its constructor is that of `errors.SessionNotReady`; there is no node and no op.
    """

    def __init__(self, variables: Sequence[str], waited_secs: float, what: str = "Session") -> None:
        self._what = what
        # Before the message is built: TensorFlow's accessors read these, and its own constructor is never called
        # because OSError's comes first.
        self._node_def = None
        self._op = None
        self._error_code = tf.errors.DEADLINE_EXCEEDED
        self._experimental_payloads: dict[str, Any] = {}
        super().__init__(variables, waited_secs, what)
        self._message = self.args[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variables, self.waited_secs, self._what)


def write_plugin_assets(graph: tf.Graph, logdir: str) -> None:
    """Write the files that TensorBoard's plugins attached to a graph, below ``logdir/plugins``; blocking.

    Without TensorFlow's private list of them, nothing is written: TensorBoard then shows the data without them.
    """
    try:
        from tensorflow.python.summary import plugin_asset
    except ImportError:
        return
    for plugin in plugin_asset.get_all_plugin_assets(graph):
        directory = f"{logdir}/plugins/{plugin.plugin_name}"
        tf.io.gfile.makedirs(directory)
        for name, content in plugin.assets().items():
            with tf.io.gfile.GFile(f"{directory}/{name}", "w") as file:
                file.write(content)
