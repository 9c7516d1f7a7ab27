"""Runs that may take longer than the session allows.

A session of a cluster has a timeout for every operation, which is how a frozen peer is noticed. What takes long by its
nature (a save, a restore, an enqueue on a full queue) says so with each run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

LONG_SECS = 600
"""What a save or a restore may take in a session with a timeout, in seconds."""

SHORTEST_SAVE_SECS = 30
SLOWEST_SAVE_BYTES_PER_SEC = 5_000_000
"""What a save of a model of known size may take: so much, and its bytes at this speed. It holds up the steps, so that
nobody would notice a frozen peer before."""

_FOREVER_MS = 2**31 - 1


def for_long(raw: tf.compat.v1.Session) -> Any:
    """`RunOptions` for what moves the whole model; None where the session has no timeout."""
    return _options(raw, LONG_SECS * 1000)


def for_save(raw: tf.compat.v1.Session, saved: Iterable[tf.Tensor]) -> Any:
    """`RunOptions` for a save of tensors, by their size; None where the session has no timeout."""
    size = 0
    for tensor in saved:
        count = tensor.shape.num_elements()
        if count is None or tensor.dtype.base_dtype == tf.string:
            return for_long(raw)
        size += count * tensor.dtype.size
    secs = min(LONG_SECS, SHORTEST_SAVE_SECS + size / SLOWEST_SAVE_BYTES_PER_SEC)
    return _options(raw, int(secs * 1000))


def without_timeout(raw: tf.compat.v1.Session) -> Any:
    """`RunOptions` for what waits for somebody else; None where the session has no timeout."""
    return _options(raw, _FOREVER_MS)


def _options(raw: tf.compat.v1.Session, timeout_ms: int) -> Any:
    # Sessions in this process have no peers, and as a rule no timeout; one that the user has set is meant.
    return tf.compat.v1.RunOptions(timeout_in_ms=timeout_ms) if raw.sess_str else None
