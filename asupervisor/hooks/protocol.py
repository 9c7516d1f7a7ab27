"""What a hook is, and how its methods are told apart."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class HookOutcome:
    """How a monitored session ended; what `finish` gets.

    Attributes:
        reason: ``"finished"``: the body ended by itself, or by the end of its input. ``"stopped"``: a stop was
            requested. ``"error"``: something failed. ``"cancelled"``: the body was cancelled or interrupted.
        error: What failed, or what cancelled it; None after a clean end.
        told_by: The exception that told of the clean end, if one did: an `OutOfRangeError`, or a `StopRequested`.
    """

    reason: Literal["finished", "stopped", "error", "cancelled"]
    error: BaseException | None = None
    told_by: BaseException | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return self.reason in ("finished", "stopped")


class AsyncSessionRunHook:
    """Base class of hooks whose methods may be coroutine functions or plain ones.

    A coroutine function runs on the event loop and gets the `AsyncSession`; a plain function runs on the device
    thread with the graph entered and gets TensorFlow's session: it may call `session.run` there. Override what is
    needed. See the timeline at the top of `asupervisor.hooks`.

    Runs with their hooks do not overlap, unless all that a run does is to fill or close a queue: it has its hooks
    beside the others, and plain methods are called on a side thread then. A plain method that raises StopIteration, or
    a coroutine function that raises StopAsyncIteration, ends the block cleanly, as does `StopRequested`; any other
    exception leaves the run as it is.

    Source: `tf.compat.v1.train.SessionRunHook`.
    """

    def begin(self) -> Any:
        """Called once, before the graph is finalised; a plain function may add ops to the default graph."""

    def after_create_session(self, session: Any, coord: Any) -> Any:
        """Called when a session was created or recreated.

        Args:
            session: The session.
            coord: Its coordinator: a `Coordinator` on the event loop, a blocking view of it on the device thread. It
                is another one after a recovery.
        """

    def is_done(self, global_step: int | None) -> bool:
        """Asked once for each session, before its first run: whether there is nothing left to do.

        It is always a plain function, and runs on the device thread.

        Args:
            global_step: The global step, or None where there is none.
        """
        return False

    def before_run(self, run_context: Any) -> Any:
        """Called before each run.

        Args:
            run_context: A `tf.compat.v1.train.SessionRunContext`.

        Returns:
            A `tf.compat.v1.train.SessionRunArgs` with what to add to the run, or None.
        """

    def after_run(self, run_context: Any, run_values: Any) -> Any:
        """Called after each run that succeeded.

        With a coroutine function among the hooks of a session, a caller that is cancelled during the run has no
        `after_run`, as after a run that failed.

        Args:
            run_context: As for `before_run`; its `request_stop()` ends the session's `should_stop` loop.
            run_values: A `tf.compat.v1.train.SessionRunValues` with the results of this hook's fetches.
        """

    def end(self, session: Any) -> Any:
        """Called once, at a clean end, while the session is open."""

    def finish(self, session: Any, outcome: HookOutcome) -> Any:
        """Called exactly once for each hook whose `begin` was called, however the session ended; the last call.

        Args:
            session: The session, or None if there is none.
            outcome: How it ended.
        """


def is_async(method: Any) -> bool:
    """Whether a hook's method is a coroutine function."""
    while isinstance(method, functools.partial):
        method = method.func
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(getattr(method, "__call__", None))  # noqa: B004


def checked(result: Any, what: Any) -> Any:
    """What a plain method returned.

    Raises:
        TypeError: It is awaitable: the method was not told for a coroutine function.
    """
    if result is not None and inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{what!r} returned an awaitable: its method must be declared by `async def`")
    return result
