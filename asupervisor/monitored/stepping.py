"""Step functions of a monitored session."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asupervisor.errors import StopRequested


class StepContext:
    """What a step function gets: the session without hooks, a run with hooks, and a way to stop.

    In a coroutine function both are awaited; in a plain function, which runs on the device thread, both block.

    Source: `tf.compat.v1.train.MonitoredSession.StepContext`.

    Args:
        session: The session for runs without hooks.
        run_with_hooks: Runs with hooks.
        asynchronous: Whether the step function is a coroutine function.
    """

    def __init__(self, session: Any, run_with_hooks: Callable[..., Any], asynchronous: bool) -> None:
        self._session = session
        self._run_with_hooks = run_with_hooks
        self._asynchronous = asynchronous

    @property
    def session(self) -> Any:
        """The session for runs without hooks: an `AsyncSession`, or TensorFlow's own in a plain function."""
        return self._session

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Like `MonitoredSession.run`; an awaitable in a coroutine function."""
        return self._run_with_hooks(*args, **kwargs)

    def request_stop(self) -> None:
        """End the step and the loop around it.

        Raises:
            StopRequested: In a coroutine function.
            StopIteration: In a plain function.
        """
        if self._asynchronous:
            raise StopRequested("the step")
        raise StopIteration("step_fn has requested the iterations to stop.")


def check_step_fn(step_fn: Any) -> None:
    """Raise where a step function does not take exactly one argument named `step_context`, after `self` if any.

    Source: `run_step_fn` of `tf.compat.v1.train.MonitoredSession`.
    """
    if not callable(step_fn):
        raise TypeError(f"`step_fn` must be callable, not {step_fn!r}")
    names = tuple(inspect.signature(inspect.unwrap(step_fn)).parameters)
    if inspect.ismethod(step_fn):
        names = ("self", *names)
    if names not in (("step_context",), ("self", "step_context")):
        raise ValueError(
            "`step_fn` may either have one `step_context` argument, or `self` and `step_context` arguments if it is "
            f"an instance method. Got {names} instead."
        )
