"""A network between the tasks of a cluster that breaks and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from asupervisor.cluster.ports import PortReservation


class Network:
    """Relays before some ports of this machine; a context manager.

    Args:
        ports: Where the tasks listen.
    """

    def __init__(self, ports: list[int]) -> None:
        self._reservation = PortReservation(len(ports))
        self._relayed = dict(zip(ports, self._reservation.ports, strict=True))
        self._passes = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")

    def relayed_address(self, address: str) -> str:
        """Where others reach who listens at an address."""
        host, _, port = address.rpartition(":")
        return f"{host}:{self._relayed[int(port)]}"

    def come_back(self) -> None:
        """Connections can be made, and whatever was held up arrives."""
        self._call(self._come_back())

    def go_silent(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def be_cut(self) -> None:
        """All connections are reset, and new ones are refused."""
        self._call(self._be_cut())

    def __enter__(self) -> Self:
        self._thread.start()
        self.come_back()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reservation.close()

    # ------------------------------------------------------------------ on the thread

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10.0)

    async def _come_back(self) -> None:
        self._passes.set()
        if not self._servers:
            for port, relayed in self._relayed.items():
                self._servers.append(await asyncio.start_server(self._relay_to(port), "127.0.0.1", relayed))

    async def _be_cut(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()

    async def _close(self) -> None:
        self._passes.set()
        await self._be_cut()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5.0)

    def _relay_to(self, port: int) -> Any:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers = {writer}
            self._writers.add(writer)
            try:
                with contextlib.suppress(OSError):
                    there, back = await asyncio.open_connection("127.0.0.1", port)
                    writers.add(back)
                    self._writers.add(back)
                    await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
            finally:
                for each in writers:
                    each.transport.abort()
                self._writers -= writers

        return relay

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # one side has ended: so does the other one
