"""Whether somebody listens at an address, asked from the event loop in a millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from typing import Any

import anyio

from asupervisor.cluster.config import Member
from asupervisor.runtime.threads import on_a_thread_of_its_own

PROBE_SECS = 1.0
"""The longest that one attempt to connect may take, in seconds."""


async def answers(member: Member) -> bool:
    """Whether a task accepts connections: its server runs, or the kernel has not noticed yet that it is frozen."""
    with anyio.move_on_after(PROBE_SECS):
        for family, address in await _addresses(member):
            if await _accepts(family, address):
                return True
    return False


async def _addresses(member: Member) -> list[tuple[socket.AddressFamily, Any]]:
    host = member.host.strip("[]")
    found: list[tuple[socket.AddressFamily, Any]] = []

    def look_up(flags: int = 0) -> None:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(host, member.port, type=socket.SOCK_STREAM, flags=flags)
            found.extend((family, address) for family, *_, address in infos)

    look_up(socket.AI_NUMERICHOST)  # asks nobody
    if not found:  # a resolver takes its time, and asyncio.run waits for the loop's own threads at its end
        await on_a_thread_of_its_own(look_up, f"look-up of {host}", PROBE_SECS)
    return found


async def _accepts(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, address)
        except OSError:
            return False
    return True


async def silent_ones(members: Iterable[Member]) -> list[Member]:
    """Which of some tasks do not answer."""
    members = list(members)
    found = await asyncio.gather(*(answers(member) for member in members))
    return [member for member, there in zip(members, found, strict=True) if not there]
