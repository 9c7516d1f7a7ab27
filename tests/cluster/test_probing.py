"""Whether somebody listens at an address, by number and by name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asupervisor.cluster import probing
from asupervisor.cluster.config import Member
from asupervisor.cluster.probing import answers, silent_ones


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody listens here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_who_listens_answers(port: int, host: str) -> None:
    assert await answers(Member("ps", 0, host, port))


async def test_the_silent_ones_are_told_in_their_order(port: int) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        members = [Member("ps", index, "127.0.0.1", bound.getsockname()[1]) for index in range(3)]
    members[1] = Member("ps", 1, "127.0.0.1", port)
    assert await silent_ones(members) == [members[0], members[2]]


async def test_an_unknown_name_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert not await answers(Member("ps", 0, "ps.example", 1))


def test_a_slow_resolver_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the end of asyncio.run, which waits for the threads of its loop."""
    name_server_answers = threading.Event()
    look_up = socket.getaddrinfo

    def slow(*args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            name_server_answers.wait()
        return look_up(*args, flags=flags | socket.AI_NUMERICHOST, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(probing, "PROBE_SECS", 0.05)
    assert not asyncio.run(answers(Member("ps", 0, "ps.example", 1)))
    thread = next(each for each in threading.enumerate() if "look-up of ps.example" in each.name)
    name_server_answers.set()
    thread.join(10.0)
    assert not thread.is_alive()
