"""Masters: which strings open a session, and what the others are told."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest
import tensorflow as tf

from asupervisor.errors import SupervisorError, UnknownMaster
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.masters import check_master, local_target, resolve_master

WORKING = ["", "grpc://localhost:2222", "grpc://10.0.0.7:1", "grpc://worker-0.job.svc:65535", "grpc://[::1]:2222"]

BROKEN = [
    ("http://localhost:2222", "grpc://localhost:2222"),
    ("localhost:2222", "grpc://localhost:2222"),
    ("localhost", ""),
    ("worker-0", ""),
    ("grpc://", ""),
    ("grpc://localhost", ""),
    ("grpc://localhost:", ""),
    ("grpc://localhost:0", ""),
    ("grpc://localhost:65536", ""),
    ("grpc://localhost:2222/path", ""),
    ("grpc://user@localhost:2222", ""),
    ("grpc://a:1,b:2", ""),
    ("Local", ""),
    (" ", ""),
    ("local ", ""),
    ("GRPC://localhost:2222", "grpc://localhost:2222"),
    ("tpu://worker", ""),
    (b"grpc://localhost:2222", ""),
    (None, ""),
    (2222, ""),
    (True, ""),
]


@pytest.mark.parametrize("master", WORKING)
async def test_what_works_is_returned_as_it_is(master):
    assert check_master(master) == master
    assert await resolve_master(master) == master


@pytest.mark.parametrize(("master", "hint"), BROKEN)
async def test_anything_else_is_an_error_that_lists_what_works(master, hint):
    with pytest.raises(UnknownMaster) as caught:
        await resolve_master(master)
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, SupervisorError)
    assert error.master is master
    assert error.hint == hint
    text = str(error)
    assert repr(master) in text
    for working in ("''", "'local'", "server.target", "'grpc://host:port'"):
        assert working in text
    assert (f"Did you mean '{hint}'?" in text) == bool(hint)


def test_a_server_object_is_told_about_its_target():
    class Server:
        target = "grpc://localhost:1234"

    with pytest.raises(UnknownMaster, match="Did you mean 'grpc://localhost:1234'") as caught:
        check_master(Server())
    assert caught.value.hint == "grpc://localhost:1234"


@pytest.mark.allow_leak("files")  # the in-process server lives as long as the process
async def test_local_is_one_server_of_this_process_and_shares_its_variables(variables):
    first, second = await asyncio.gather(resolve_master("local"), resolve_master("local"))
    assert first == second == local_target()
    assert first.startswith("grpc://localhost:")
    assert check_master(first) == first
    graph = tf.Graph()
    with graph.as_default():
        v = tf.compat.v1.get_variable(f"masters_{variables}", initializer=7.0)
        assign = v.assign(8.0).op
        read = v.read_value()

    def use() -> float:
        with tf.compat.v1.Session(first, graph=graph) as one, tf.compat.v1.Session(second, graph=graph) as other:
            one.run(v.initializer)
            one.run(assign)
            return float(other.run(read))

    assert await asyncio.to_thread(use) == 8.0


@pytest.fixture
def local_server(monkeypatch):
    """A stand-in for TensorFlow's server class that waits to be let go on; and no server yet."""

    class Server:
        target = "grpc://localhost:1"
        started_on: ClassVar[list[threading.Thread]] = []
        asked = threading.Event()
        go_on = threading.Event()

        @classmethod
        def create_local_server(cls):
            cls.asked.set()
            cls.go_on.wait(30)
            cls.started_on.append(threading.current_thread())
            return cls()

    monkeypatch.setattr(tf.distribute, "Server", Server)
    monkeypatch.setattr("asupervisor.session.masters._local_servers", {})
    yield Server
    Server.go_on.set()


async def test_local_does_not_start_its_server_on_the_loop(local_server):
    local_server.go_on.set()
    assert await resolve_master("local") == local_server.target
    executor = DeviceExecutor("masters")
    try:
        assert await resolve_master("local", executor=executor) == local_server.target
    finally:
        await executor.aclose(5)
    assert len(local_server.started_on) == 1
    assert local_server.started_on[0] is not threading.main_thread()


async def test_another_process_gets_a_server_of_its_own(local_server, monkeypatch):
    local_server.go_on.set()
    monkeypatch.setattr("asupervisor.session.masters._local_servers", {-1: object()})
    assert await resolve_master("local") == local_server.target
    assert len(local_server.started_on) == 1


async def test_cancelled_while_the_server_starts_it_leaves_nothing_and_works_again(local_server):
    executor = DeviceExecutor("masters")
    try:
        task = asyncio.create_task(resolve_master("local", executor=executor))
        await asyncio.to_thread(local_server.asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        local_server.go_on.set()
        assert await resolve_master("local", executor=executor) == local_server.target
        assert len(local_server.started_on) == 1
    finally:
        local_server.go_on.set()
        await executor.aclose(5)
