"""The blocking view of a session, for threads without an event loop and for code on the device thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from asupervisor.errors import SessionClosed
from asupervisor.runtime.calls import label_of, wait_blocking
from asupervisor.runtime.device import refuse_running_loop
from asupervisor.runtime.mailbox import Rendezvous
from asupervisor.session.calls import RunCall, run_here, run_on_device

if TYPE_CHECKING:
    from asupervisor.session.session import AsyncSession


class BlockingSession:
    """`AsyncSession` for other threads: the same runs, in the same lanes, with a blocking `run`.

    `sv.loop(60, print_loss, (sess.blocking,))` hands it to a worker thread. On the device thread itself (`init_fn`, a
    hook, `sess.call`) a run happens inline.

    Args:
        session: The session that it is a view of.
    """

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    @property
    def graph(self) -> tf.Graph:
        """The session's graph."""
        return self._session.graph

    @property
    def raw(self) -> tf.compat.v1.Session:
        """The TensorFlow session; not between any steps, and on your own account."""
        return self._session.raw

    @property
    def closed(self) -> bool:
        """Whether the session is closed."""
        return self._session.closed

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
        *,
        lane: Literal["device", "side"] = "device",
    ) -> Any:
        """Like `tf.compat.v1.Session.run`, in its turn on the device thread; blocks this thread.

        Args:
            fetches: As in TensorFlow.
            feed_dict: As in TensorFlow.
            options: As in TensorFlow.
            run_metadata: As in TensorFlow.
            lane: ``"side"`` runs it in this very thread, beside the steps; so does, by itself, a run whose only
                effects are enqueues and closes of queues.

        Raises:
            WrongEventLoop: An event loop runs in this thread; await `AsyncSession.run` there.
            SessionClosed: The session is closed.
        """
        session = self._session
        device = session._device
        if session.closed or device.closed:
            raise SessionClosed(session.name)
        if lane not in ("device", "side"):
            raise ValueError(f"lane must be 'device' or 'side', not {lane!r}")
        inline = session.executor.on_device_thread()
        if not inline:
            refuse_running_loop("sess.blocking.run", "Await sess.run(...) on the event loop.")
        plan = session._plans.plan(fetches, feed_dict, options, run_metadata)
        if not inline and (lane == "side" or plan.side_lane):
            return run_here(session, plan, feed_dict)
        if inline:
            return run_on_device(session, plan, feed_dict)
        rendezvous = Rendezvous()
        call = RunCall(session, rendezvous, fetches, feed_dict, options, run_metadata, plan)
        device.submit(call, device.interactive)
        return wait_blocking(call, rendezvous)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(raw, *args)` on the device thread, with the graph entered; blocks this thread."""
        session = self._session
        if session.closed:
            raise SessionClosed(session.name)
        return session.executor.call_blocking(session._entered, fn, args, label=label_of(fn))
