"""The masters that a session can be opened on, sorted out before anything is opened.

TensorFlow takes any string and fails late: a bare host name or ``'local'`` is a NotFoundError that speaks of
session factories, and a port that nobody serves blocks the first run for ever. Here ``'local'`` works, and what
cannot work is an error that lists what does.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import tensorflow as tf

from asupervisor.errors import UnknownMaster
from asupervisor.runtime.device import DeviceExecutor

_GRPC = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:,\[\]@]+):(?P<port>\d{1,5})")
_HOST_PORT = re.compile(r"(?:\w+://)?(?P<rest>(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5})/?")

# One server for each process: it cannot be stopped, so it lives as long as the process does. Keyed by process,
# since a forked child inherits the record but not the server's threads.
_lock = threading.Lock()
_local_servers: dict[int, Any] = {}


def check_master(master: object) -> str:
    """Tell whether a session can be opened on `master`, without opening anything; pure, any thread.

    Args:
        master: ``''``, ``'local'``, or ``'grpc://host:port'``, which is also what `server.target` holds.

    Returns:
        `master` itself.

    Raises:
        UnknownMaster: It is none of these. The error lists what works, and what was probably meant.
    """
    if not isinstance(master, str):
        target = getattr(master, "target", None)
        raise UnknownMaster(master, target if isinstance(target, str) else "")
    if master in ("", "local"):
        return master
    found = _GRPC.fullmatch(master)
    if found is not None and 0 < int(found["port"]) < 65536:
        return master
    meant = _HOST_PORT.fullmatch(master)
    hint = f"grpc://{meant['rest']}" if meant is not None and not master.startswith("grpc://") else ""
    raise UnknownMaster(master, hint if _GRPC.fullmatch(hint) else "")


def local_target() -> str:
    """The target of this process's own in-process server, which is started at the first call.

    Blocks for the time that the start takes (some ten milliseconds); any thread but the event loop's.
    """
    with _lock:
        server = _local_servers.get(os.getpid())
        if server is None:
            server = tf.distribute.Server.create_local_server()
            _local_servers[os.getpid()] = server
        return str(server.target)


async def resolve_master(master: object, *, executor: DeviceExecutor | None = None) -> str:
    """The target to open a session on.

    ``''`` and ``'grpc://host:port'`` are returned as they are; ``'local'`` becomes the target of an in-process
    `tf.distribute.Server` (`create_local_server`, one for each process, kept until the process ends), on a side
    thread. Variables live on that server: all sessions on ``'local'`` share them, as those on any server do.

    Cancelling it leaves the server, once begun, for the next caller.

    Args:
        master: What the user gave.
        executor: Whose side threads to use; a thread of its own where there is none.

    Raises:
        UnknownMaster: A ValueError that lists what works.
    """
    if check_master(master) != "local":
        return str(master)
    if executor is not None:
        return await executor.side(local_target, label="start of the in-process server")
    own = DeviceExecutor("local master")
    try:
        return await own.side(local_target, label="start of the in-process server")
    finally:
        await own.aclose(1.0)
