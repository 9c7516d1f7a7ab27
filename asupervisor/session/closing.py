"""Closing a TensorFlow session, which can block: a side thread does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import tensorflow as tf

from asupervisor.errors import describe
from asupervisor.events import EventSink
from asupervisor.runtime.threads import SideThreads
from asupervisor.runtime.wakeup import Ending

CLOSE_SECS: Final = 10.0
"""How long `AsyncSession.close` waits for TensorFlow's own close, in seconds."""


def close_aside(
    raw: tf.compat.v1.Session,
    name: str,
    side: SideThreads,
    *,
    drop_plans: Callable[[], None],
    ending: Ending,
    emit: EventSink,
) -> None:
    """Let a side thread close the session.

    Args:
        raw: The session.
        name: The session, for people.
        side: The threads of its executor; where they will not do, it is a thread of its own.
        drop_plans: Lets go of what was compiled for the session, once it is closed.
        ending: Signalled in the end, whether it is closed or that failed.
        emit: Told of a failure.
    """

    def work() -> None:
        try:
            # In this order: to release a compiled callable under a run that is in flight crashes the process. A closed
            # session releases nothing.
            raw.close()
            drop_plans()
        except Exception as error:
            emit(
                "session.close_failed",
                f"closing {name} failed: {describe(error)}",
                level="warning",
                error=describe(error),
            )
        finally:
            ending.signal()

    # A session on a server waits in its close for peers that are gone, until its timeout: nobody waits for that,
    # and it is no straggler.
    if not raw.sess_str:
        try:
            side.submit(work, f"close of {name}")
            return
        except RuntimeError:  # the executor is closed already
            pass
    pool = SideThreads("asupervisor", idle_secs=0.0)
    pool.submit(work, f"close of {name}")
    pool.shutdown()
