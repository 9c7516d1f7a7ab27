"""What timed services have in common."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import anyio

from asupervisor.runtime.coordinator import Coordinator


async def unless_stopped(coordinator: Coordinator, work: Awaitable[Any]) -> bool:
    """Wait for `work`, but no longer than until a stop is requested: then it is cancelled.

    So a service ends at once when it waits its turn behind a step that may never end. `work` begins before this
    function awaits anything.

    Returns:
        Whether it was done. What it raised, is raised.
    """
    with anyio.CancelScope() as scope:
        coordinator.add_stop_callback(scope.cancel)
        try:
            await work
        finally:
            coordinator.remove_stop_callback(scope.cancel)
    return not scope.cancelled_caught
