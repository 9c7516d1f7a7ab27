"""The points at which a save can be struck, in the order in which it passes them."""

from __future__ import annotations

POINTS = [
    "temporary",
    "before-write",
    "after-write",
    "before-fsync",
    "after-fsync",
    "before-record",
    "after-record",
    "before-rename.data-00000-of-00001",
    "before-rename.meta",
    "before-rename.index",
    "before-manifest",
    "after-manifest",
    "before-state",
    "after-state",
    "before-delete",
    "after-tombstone",
    "within-delete",
    "after-delete",
]
