"""Reserved ports: a server can listen on them, again and again, and nobody else is given them."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asupervisor.cluster.ports import CAN_HOLD, PortReservation
from tests.forks import Forks

pytestmark = pytest.mark.skipif(not CAN_HOLD, reason="this system cannot hold a port for somebody else")

#: Linux 6.3 and later: from which ports the system chooses for one socket.
IP_LOCAL_PORT_RANGE = 51

#: Linux: a user and a network of one's own.
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

TENSORFLOW_SERVER = """
import sys
import tensorflow as tf

tf.compat.v1.disable_eager_execution()
server = tf.distribute.Server({"ps": sys.argv[1:]}, job_name="ps", task_index=0)
with tf.compat.v1.Session("grpc://" + sys.argv[1]) as session:
    print("served", session.run(tf.constant(3)))
"""


def choosing_only(port: int, family: int = socket.AF_INET) -> socket.socket:
    """A socket for which the system can choose this port or none."""
    chooser = socket.socket(family, socket.SOCK_STREAM)
    try:
        chooser.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, (port | port << 16).to_bytes(4, sys.byteorder))
    except OSError as error:
        chooser.close()
        if error.errno == errno.ENOPROTOOPT:
            pytest.skip("this kernel chooses among all ports")
        raise
    return chooser


@pytest.fixture
def reservation() -> Iterator[PortReservation]:
    with PortReservation(1) as held:
        yield held


def test_ports_are_different_and_named() -> None:
    with PortReservation(20) as held:
        assert len(set(held.ports)) == 20
        assert held.addresses[0] == f"127.0.0.1:{held.ports[0]}"
        assert held.held
    assert not held.held
    held.close()


def test_no_ports_and_less_than_none() -> None:
    with PortReservation(0) as held:
        assert held.ports == ()
    with pytest.raises(ValueError, match="-1 ports"):
        PortReservation(-1)


@pytest.mark.parametrize("reuse", [0, 1], ids=["plain", "reuseaddr"])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::"])
def test_the_system_never_chooses_a_reserved_port_for_a_bind(
    reservation: PortReservation, address: str, reuse: int
) -> None:
    """A second reservation is the row of `::` with SO_REUSEADDR."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    (port,) = reservation.ports
    with choosing_only(port, family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        with pytest.raises(OSError) as caught:
            other.bind((address, 0))
        assert caught.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    reservation.close()
    with choosing_only(port, family) as other:  # otherwise the test would prove nothing
        try:
            other.bind((address, 0))
        except OSError as error:
            assert (error.errno, address) == (errno.EADDRNOTAVAIL, "::1"), "no IPv6 address here"
        else:
            assert other.getsockname()[1] == port


def test_the_system_never_chooses_a_reserved_port_for_a_connection(reservation: PortReservation) -> None:
    (port,) = reservation.ports
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with choosing_only(port) as other:
            with pytest.raises(OSError) as caught:
                other.connect(listener.getsockname())
            assert caught.value.errno == errno.EADDRNOTAVAIL
        reservation.close()
        with choosing_only(port) as other:
            other.connect(listener.getsockname())
            assert other.getsockname()[1] == port


def test_two_reservations_share_no_port() -> None:
    with PortReservation(100) as first, PortReservation(100) as second:
        assert not set(first.ports) & set(second.ports)


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_a_server_listens_on_a_reserved_port_again_and_again(reservation: PortReservation, address: str) -> None:
    if address == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    (port,) = reservation.ports
    family = socket.AF_INET6 if address == "::" else socket.AF_INET
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with (
            socket.create_server((address, port), family=family, dualstack_ipv6=address == "::") as server,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            accepted, _ = server.accept()
            accepted.close()  # first: what lingers for a while is the server's side
            client.recv(1)


def test_without_holding_the_ports_are_only_chosen() -> None:
    with PortReservation(3, hold=False) as chosen:
        assert len(set(chosen.ports)) == 3
        assert not chosen.held
        with choosing_only(chosen.ports[0]) as other:
            other.bind(("127.0.0.1", 0))


def test_a_system_without_ipv6_holds_ipv4_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with PortReservation(1) as held, choosing_only(held.ports[0]) as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", 0))


def test_child_processes_do_not_keep_the_ports(reservation: PortReservation) -> None:
    (port,) = reservation.ports
    command = [sys.executable, "-S", "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        reservation.close()
        with choosing_only(port) as other:
            other.bind(("127.0.0.1", 0))
        child.communicate(b"\n")


@pytest.mark.timeout(180)
def test_tensorflows_server_listens_on_a_reserved_port(forks: Forks, reservation: PortReservation) -> None:
    done = forks.run("-c", TENSORFLOW_SERVER, *reservation.addresses)
    assert (done.returncode, done.stdout) == (0, "served 3\n"), done.stderr


@pytest.mark.timeout(180)
def test_tensorflows_server_listens_on_a_reserved_port_without_ipv6(forks: Forks) -> None:
    """In a network of its own, where this process switches IPv6 off first."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip("no rights to make a network namespace")
    code = f"""
import ctypes, os, subprocess, sys
from pathlib import Path
from asupervisor.cluster.ports import PortReservation
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None, use_errno=True).unshare({CLONE_NEWUSER | CLONE_NEWNET}) == 0, ctypes.get_errno()
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {{user}} 1")
Path("/proc/self/gid_map").write_text(f"0 {{group}} 1")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for switch in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):
    switch.write_text("1")
with PortReservation(1) as held:
    if server := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
    sys.argv[1:] = held.addresses
    exec({TENSORFLOW_SERVER!r})
    sys.stdout.flush()
    os._exit(0)
"""
    done = forks.run("-c", code)
    assert (done.returncode, done.stdout) == (0, "served 3\n"), done.stderr
