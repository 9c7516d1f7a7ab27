"""What crosses a wall: frozen records of what happened and of how things stand.

An `Event` is one line of the journal, one item of `Supervisor.events()` and one log record. `Status` is what
`Supervisor.status()` returns. Units stand in the field names.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from asupervisor.clock import Clock, SystemClock

Level = Literal["debug", "info", "warning", "error"]
logger = logging.getLogger("asupervisor")

_LEVELS: Mapping[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one supervisor.

    Attributes:
        kind: What happened, as a dotted name: ``"checkpoint.saved"``, ``"service.failed"``.
        message: The same for a person.
        level: How loud it is.
        source: Name of the supervisor.
        time_secs: Wall-clock time, seconds since the epoch.
        data: The facts, as JSON-ready values.
    """

    kind: str
    message: str
    level: Level
    source: str
    time_secs: float
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class EventSink(Protocol):
    """How a room tells what happened; called from any thread, never blocks, never raises."""

    def __call__(self, kind: str, message: str, *, level: Level = "info", **data: Any) -> None:
        """Record one event."""


def log_only(kind: str, message: str, *, level: Level = "info", **data: Any) -> None:
    """The sink of an object that is used without a supervisor: events become log records."""
    logger.log(_LEVELS[level], "%s", message)


class EventHub:
    """Distributes events to the log and to any number of subscribers on one event loop.

    The log records have the kind of the event as `event_kind`.

    `emit` may be called from any thread. Subscribers hold at most `backlog` events: one that does not keep up
    loses the oldest and is told how many.

    Args:
        source: Name of the supervisor, stamped on each event.
        clock: Where the wall-clock time comes from.
        backlog: Most events that wait for one subscriber.
    """

    def __init__(self, source: str, clock: Clock | None = None, backlog: int = 1000) -> None:
        self.source = source
        self._clock = clock or SystemClock()
        self._backlog = backlog
        self._lock = threading.Lock()
        self._subscribers: list[_Subscriber] = []
        self._ended = False

    def open(self) -> None:
        """A session begins: who subscribes from now on gets its events; any thread."""
        with self._lock:
            self._ended = False

    def emit(self, kind: str, message: str, *, level: Level = "info", **data: Any) -> None:
        """Record one event; see `EventSink`."""
        logger.log(_LEVELS[level], "%s: %s", self.source, message, extra={"event_kind": kind})
        event = Event(kind, message, level, self.source, self._clock.time(), MappingProxyType(data))
        with self._lock:
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            subscriber.put(event)

    def subscribe(self, *, wait: bool = True) -> AsyncIterator[Event]:
        """An iterator over the events from now on; it ends with `close` and belongs to the running loop.

        Args:
            wait: Whether to wait for the next `open` where `close` was called last. Otherwise it has ended.
        """
        subscriber = _Subscriber(asyncio.get_running_loop(), self._backlog, self._discard)
        with self._lock:
            if wait or not self._ended:
                self._subscribers.append(subscriber)
                return subscriber
        subscriber.end()
        return subscriber

    def _discard(self, subscriber: _Subscriber) -> None:
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    def close(self) -> None:
        """End every subscriber's iteration after the events that it has not yet taken; any thread."""
        with self._lock:
            self._ended = True
            subscribers, self._subscribers = self._subscribers, []
        for subscriber in subscribers:
            subscriber.end()


class _Subscriber(AsyncIterator[Event]):
    def __init__(self, loop: asyncio.AbstractEventLoop, backlog: int, discard: Any) -> None:
        self._loop = loop
        self._events: collections.deque[Event] = collections.deque(maxlen=backlog)
        self._lost = 0
        self._ended = False
        self._wake = asyncio.Event()
        self._discard = discard

    def put(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self._lost += 1
        self._events.append(event)
        self._ring()

    def end(self) -> None:
        self._ended = True
        self._ring()

    def _ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop is closed: nobody listens any more
            pass

    async def __anext__(self) -> Event:
        while not self._events:
            if self._ended:
                await asyncio.sleep(0)  # whoever asks again and again keeps nobody else from his turn
                raise StopAsyncIteration
            self._wake.clear()
            if not self._events and not self._ended:
                await self._wake.wait()
        event = self._events.popleft()
        if self._lost:
            lost, self._lost = self._lost, 0
            return Event(
                "events.lost",
                f"{lost} events were lost: this subscriber did not keep up",
                "warning",
                event.source,
                event.time_secs,
                MappingProxyType({"lost": lost}),
            )
        return event

    async def aclose(self) -> None:
        """Stop listening."""
        self._discard(self)
        self.end()


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """How one service stands.

    Attributes:
        name: The service's name.
        state: ``starting``, ``running``, ``done`` or ``failed``.
        critical: Whether its failure stops the supervisor.
        last_error: `repr` of its last error, or None.
    """

    name: str
    state: Literal["starting", "running", "done", "failed"]
    critical: bool
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How a supervisor stands; what `Supervisor.status()` returns.

    Attributes:
        name: The supervisor's name.
        state: ``idle``, ``starting``, ``running``, ``stopping`` or ``stopped``.
        is_chief: Whether it initialises, saves and writes summaries.
        logdir: Its directory, or None.
        uptime_secs: Seconds since the session was entered, or None.
        global_step: The last global step that was seen, or None.
        start_step: The global step at which this session began, or None.
        steps_per_sec: Training speed as last measured, or None.
        scalars: The latest scalar summaries, by tag.
        services: Every service of the session.
        last_checkpoint: Prefix of the newest published checkpoint, or None.
        summary_failures: Summaries that could not be computed.
        session: Statistics of the session, by name; see `AsyncSession.statistics`.
        error: `repr` of the error that stopped it, or None.
        restarts: How often a monitored session was made anew after an error.
        outcome: How a monitored session ended: ``finished``, ``stopped``, ``error`` or ``cancelled``; None before that.
    """

    name: str
    state: Literal["idle", "starting", "running", "stopping", "stopped"]
    is_chief: bool
    logdir: str | None
    uptime_secs: float | None = None
    global_step: int | None = None
    start_step: int | None = None
    steps_per_sec: float | None = None
    scalars: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    services: tuple[ServiceStatus, ...] = ()
    last_checkpoint: str | None = None
    summary_failures: int = 0
    session: Any = None
    error: str | None = None
    restarts: int = 0
    outcome: str | None = None
