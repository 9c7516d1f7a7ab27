"""Whether somebody listens at an address, asked from the event loop in a millisecond."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import anyio

from asupervisor.cluster.config import Member

PROBE_SECS = 1.0
"""The longest that one attempt to connect may take, in seconds."""


async def answers(member: Member) -> bool:
    """Whether a task accepts connections: its server runs, or the kernel has not noticed yet that it is frozen."""
    writer = None
    try:
        with anyio.fail_after(PROBE_SECS):
            _, writer = await asyncio.open_connection(member.host.strip("[]"), member.port)
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return True


async def silent_ones(members: Iterable[Member]) -> list[Member]:
    """Which of some tasks do not answer."""
    members = list(members)
    found = await asyncio.gather(*(answers(member) for member in members))
    return [member for member, there in zip(members, found, strict=True) if not there]
