"""Is a checkpoint whole? By its manifest where that tells, otherwise by TensorFlow's own checksums."""

from __future__ import annotations

from asupervisor.checkpoint import restore as rs
from asupervisor.checkpoint.catalogue import Entry
from asupervisor.errors import CheckpointDamaged


def damage_of(entry: Entry) -> str | None:
    """Why a checkpoint cannot be restored, or None; reads its contents.

    A manifest whose checksums match is enough. Where they do not, TensorFlow may have written the checkpoint once
    more under its name: what decides then, as where there is no manifest, are the checksums of its tensors.

    Args:
        entry: The checkpoint.
    """
    told = entry.evident_damage() or entry.altered()
    if told is None and entry.checksummed:
        return None
    missing = entry.incomplete()
    if missing is not None:
        return missing
    try:
        rs.read_back(entry.prefix)
    except CheckpointDamaged as error:
        return f"{told}; {error.reason}" if told else error.reason
    return None
