"""A raw session from the moment a thread begins to open it: it can be given up at any instant without a leak."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import tensorflow as tf

from asupervisor.errors import SessionClosed, describe
from asupervisor.events import EventSink, log_only
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.session.closing import CLOSE_SECS
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import ECHOES

T = TypeVar("T")

#: How long whoever gives a session up waits for it to be closed, in seconds. Closing one takes about a
#: millisecond; where it takes longer (a running Python op, a peer that is gone), its thread goes on alone.
GIVE_UP_SECS = 1.0

# asyncio holds tasks weakly: a clean-up whose waiter was cancelled must not vanish.
_cleaning: set[asyncio.Task[Any]] = set()


class Opening:
    """One raw session, opened on a side thread and closed there if nobody wants it any more.

    The race: a caller that is cancelled while `tf.compat.v1.Session(...)` runs is released at once, and the thread
    then holds a session that nobody has seen. So the thread and the caller agree under one lock on who closes it:
    the thread, if the caller left first; the caller, if the session was there first.

    Args:
        target: The target to open the session on.
        graph: Its graph.
        config: A `ConfigProto`, or None.
        executor: Whose threads to use; None for an executor of its own, which ends with the session.
    """

    def __init__(self, target: str, graph: tf.Graph, config: Any, executor: DeviceExecutor | None) -> None:
        self.target = target
        self.graph = graph
        self.config = config
        self.executor = executor if executor is not None else DeviceExecutor()
        self.session: AsyncSession | None = None
        self._owns_executor = executor is None
        self._lock = threading.Lock()
        self._given_up = False
        self._raw: tf.compat.v1.Session | None = None

    def open(self) -> None:
        """Open the raw session; blocks, for as long as a remote master pleases. On a side thread."""
        raw = tf.compat.v1.Session(self.target, graph=self.graph, config=self.config)
        with self._lock:
            if not self._given_up:
                self._raw = raw
                return
        close_quietly(raw)

    def ask(self) -> Awaitable[None]:
        """Run `open` on a side thread; whoever stops waiting for it must `give_up`."""
        return self.executor.side(self.open, label=f"opening a session on {self.target!r}")

    def make_session(self, *, emit: EventSink = log_only, close: Any = None, **options: Any) -> AsyncSession:
        """Wrap the raw session; on the loop, after `open` has ended.

        Args:
            emit: Where events go.
            close: The `close` collaborator of the session. None makes `close()` close the raw session, and the
                executor if it is this session's own.
            **options: Passed on to `AsyncSession`.
        """
        if close is None:
            # Weak: the session holds its collaborator, and is to be freed without the garbage collector.
            close = _Closer(self.executor if self._owns_executor else None)
        session = AsyncSession(self._raw, self.executor, emit=emit, close=close, **options)
        if isinstance(close, _Closer):
            close.session = weakref.ref(session)
        self.session = session
        return session

    def on_device(self, label: str, fn: Callable[..., T], *args: Any) -> Awaitable[T]:
        """`fn(raw, *args)` on the device thread, with the graph entered there; after `open` has ended."""
        raw, graph = self._raw, self.graph

        def call() -> T:
            with graph.as_default():
                return fn(raw, *args)

        return self.executor.call(call, label=label)

    async def give_up(self, *, because: BaseException | None = None) -> None:
        """Close what was opened, or have it closed when it comes; waits `GIVE_UP_SECS` at most and never raises.

        Cancelling it leaves the clean-up running.

        Args:
            because: Why. A failure is not replaced by the cancellation.
        """
        with self._lock:
            self._given_up = True
            raw = self._raw
        task = asyncio.create_task(self._clean_up(raw), name="asupervisor-give-up-session")
        _cleaning.add(task)
        task.add_done_callback(_cleaning.discard)
        try:
            await asyncio.wait({task}, timeout=GIVE_UP_SECS)
        except asyncio.CancelledError:
            if not isinstance(because, Exception) or isinstance(because, ECHOES):
                raise

    async def _clean_up(self, raw: tf.compat.v1.Session | None) -> None:
        session, self.session = self.session, None
        try:
            if session is not None:
                await session.close_raw(GIVE_UP_SECS)
            elif raw is not None:
                with anyio.move_on_after(GIVE_UP_SECS):
                    await self.executor.side(close_quietly, raw, label="close of a session")
        except SessionClosed:  # the executor ended before us, and took its side threads along
            if raw is not None:
                threading.Thread(target=close_quietly, args=(raw,), daemon=True).start()
        except Exception as error:
            log_only("session.close_failed", f"closing an abandoned session failed: {describe(error)}", level="debug")
        finally:
            if self._owns_executor:
                await self.executor.aclose(GIVE_UP_SECS)


class _Closer:
    """The `close` collaborator of a session that nobody else owns."""

    def __init__(self, executor: DeviceExecutor | None) -> None:
        self.session: weakref.ref[AsyncSession] | None = None
        self._executor = executor

    async def __call__(self) -> None:
        session = self.session() if self.session is not None else None
        try:
            if session is not None:
                await session.close_raw(CLOSE_SECS)
        finally:
            if self._executor is not None:
                await self._executor.aclose(CLOSE_SECS)


def close_quietly(raw: tf.compat.v1.Session) -> None:
    """Close a session of which nobody wants to hear any more; blocks."""
    try:
        raw.close()
    except Exception as error:
        log_only("session.close_failed", f"closing an abandoned session failed: {describe(error)}", level="debug")
