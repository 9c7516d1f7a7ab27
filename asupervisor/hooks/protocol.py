"""What a hook is, and how its methods are told apart."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class HookOutcome:
    """How a monitored session ended; what `finish` gets.

    Attributes:
        reason: ``"finished"``: the body ended by itself, or by the end of its input. ``"stopped"``: a stop was
            requested. ``"error"``: something failed. ``"cancelled"``: the body was cancelled.
        error: What failed, or None.
    """

    reason: Literal["finished", "stopped", "error", "cancelled"]
    error: BaseException | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return self.reason in ("finished", "stopped")


class AsyncSessionRunHook:
    """Base class of hooks whose methods may be coroutine functions or plain ones.

    A coroutine function runs on the event loop and gets the `AsyncSession`; a plain function runs on the device
    thread with the graph entered and gets TensorFlow's session: it may call `session.run` there. Override what is
    needed. See the timeline at the top of `asupervisor.hooks`.

    Source: `tf.compat.v1.train.SessionRunHook`.
    """

    def begin(self) -> Any:
        """Called once, before the graph is finalised; a plain function may add ops to the default graph."""

    def after_create_session(self, session: Any, coord: Any) -> Any:
        """Called when a session was created or recreated.

        Args:
            session: The session.
            coord: Its coordinator: a `Coordinator` on the event loop, a blocking view of it on the device thread.
        """

    def before_run(self, run_context: Any) -> Any:
        """Called before each run.

        Args:
            run_context: A `tf.compat.v1.train.SessionRunContext`.

        Returns:
            A `tf.compat.v1.train.SessionRunArgs` with what to add to the run, or None.
        """

    def after_run(self, run_context: Any, run_values: Any) -> Any:
        """Called after each run that succeeded.

        Args:
            run_context: As for `before_run`; its `request_stop()` ends the session's `should_stop` loop.
            run_values: A `tf.compat.v1.train.SessionRunValues` with the results of this hook's fetches.
        """

    def end(self, session: Any) -> Any:
        """Called once, at a clean end, while the session is open."""

    def finish(self, session: Any, outcome: HookOutcome) -> Any:
        """Called exactly once for each hook that began, however the session ended; the last call.

        Args:
            session: The session, or None if there is none.
            outcome: How it ended.
        """


def is_async(method: Any) -> bool:
    """Whether a hook's method is a coroutine function."""
    while hasattr(method, "func"):  # functools.partial
        method = method.func
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(getattr(method, "__call__", None))  # noqa: B004
