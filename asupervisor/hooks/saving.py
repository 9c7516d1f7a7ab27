"""What TensorFlow's own hooks save by themselves: not over checkpoints of a model that was not restored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from asupervisor import _tf
from asupervisor.checkpoint.catalogue import checkpoints
from asupervisor.checkpoint.records import CheckpointRecord, Kind
from asupervisor.errors import CheckpointNotRestored


async def check_overwrites(
    hooks: Iterable[Any],
    on_side: Callable[..., Awaitable[CheckpointRecord | None]],
    step_now: Callable[[], Awaitable[int | None]],
) -> None:
    """Look where the hooks of a session that begins without a checkpoint will save.

    Args:
        hooks: The hooks.
        on_side: Runs a function on a side thread.
        step_now: Reads the global step at which the session begins.

    Raises:
        CheckpointNotRestored: One of them would save into a directory that holds checkpoints of later steps.
    """
    for hook in hooks:
        path = _tf.save_path_of(hook)
        if path is None or "://" in path:
            continue
        newest = await on_side(_newest_in, Path(path))
        if newest is None or newest.step is None:
            continue
        step = await step_now()
        if step is not None and step < newest.step:
            directory = str(Path(path).parent)
            raise CheckpointNotRestored(
                directory,
                f"the newest is {newest.prefix!r}",
                f"{type(hook).__name__} would save to {directory!r}, which holds checkpoints that were not restored: "
                f"the newest is {newest.prefix!r}, and this session begins at step {step}. Give its creator "
                f"checkpoint_dir={directory!r} to go on from there, or the hook a directory of its own.",
            )


def _newest_in(save_path: Path) -> CheckpointRecord | None:
    """The newest regular checkpoint where a hook saves; blocking."""
    try:
        found = checkpoints(save_path.parent, basename=save_path.name)
    except OSError:  # saving will tell
        return None
    return next((record for record in reversed(found) if record.kind is Kind.REGULAR), None)
