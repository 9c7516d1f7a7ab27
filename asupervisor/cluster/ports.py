"""Ports that stay ours until the run is over, although nobody listens on them yet.

The usual way, to ask the system for a free port, close the socket and hand the number to a server, has a race: until
the server listens, and each time that it is started again, any process may be given the same port, as a listener or
for an outgoing connection. Here each port is held by a socket that is bound, never listens, and has ``SO_REUSEADDR``.
On Linux such a socket

* lets a server that sets ``SO_REUSEADDR`` itself, as gRPC's and nearly all others do, bind the same port and listen,
  again and again;
* is passed over whenever the system chooses a port by itself, for a bind to port 0 (with ``SO_REUSEADDR`` too, unless
  the administrator has set ``net.ipv4.ip_autobind_reuse``) and for an outgoing connection;
* answers nobody: connections to the port are refused until the server is there.

It is bound to the wildcard address, IPv4 and IPv6 at once where there is IPv6, because TensorFlow's servers listen
there: held on 127.0.0.1 only, the number could be given away on another address.

Elsewhere two sockets cannot share an address in this manner (on macOS both would need ``SO_REUSEPORT``, which gRPC is
told not to set). There the ports are chosen, all different, and let go at once: the race remains, and a task that
loses it ends with an error that names the port.
"""

from __future__ import annotations

import errno
import socket
import sys
from types import TracebackType
from typing import Self

#: Whether this system lets a server listen on a port that another socket holds.
CAN_HOLD = sys.platform == "linux"


class PortReservation:
    """Free ports on this machine, held until `close`; a context manager. Any thread, blocks on nothing.

    The sockets are not inherited by child processes: the ports are free as soon as this process is gone.

    Args:
        count: How many ports.
        host: The address that `addresses` names; the port is held on all of them.
        hold: Whether to hold them, or only to choose them; by default wherever that works, see the module.

    Attributes:
        ports: The ports, all different.

    Raises:
        OSError: There are not so many free ports.
        ValueError: `count` is negative.
    """

    def __init__(self, count: int, *, host: str = "127.0.0.1", hold: bool = CAN_HOLD) -> None:
        if count < 0:
            raise ValueError(f"{count} ports cannot be reserved")
        self.host = host
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                self._sockets.append(_bound_socket())
            self.ports: tuple[int, ...] = tuple(each.getsockname()[1] for each in self._sockets)
        except BaseException:
            self.close()
            raise
        if not hold:
            self.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The ports as ``host:port``, as cluster specifications have them."""
        return tuple(f"{self.host}:{port}" for port in self.ports)

    @property
    def held(self) -> bool:
        """Whether the ports are held at this moment."""
        return bool(self._sockets)

    def close(self) -> None:
        """Let the ports go; a second call does nothing. Servers that listen on them are not affected."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bound_socket() -> socket.socket:
    """A socket on a free port of the wildcard address, IPv6 included where there is any."""
    if socket.has_dualstack_ipv6():
        try:
            return _bind(socket.AF_INET6, "::")
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPERM):
                raise
    return _bind(socket.AF_INET, "0.0.0.0")


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Before the bind: the system remembers whether all sockets of a port allow others beside them.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, 0))
    except BaseException:
        bound.close()
        raise
    return bound
