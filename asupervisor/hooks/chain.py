"""The hooks of one monitored session as one thing: order, last calls, and who runs where.

Where all `before_run` and `after_run` are plain, a run with its hooks is one piece of work on the device thread
(`plans.HookedPlans`), at the full speed of `run` and `steps`. With a coroutine function among them it goes step by step
from the event loop (`HookChain.run_from_loop`).
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import tensorflow as tf

from asupervisor import _tf
from asupervisor.errors import StopGraceExceeded, StopRequested, describe, is_only
from asupervisor.events import EventSink
from asupervisor.hooks.merging import Merged
from asupervisor.hooks.protocol import AsyncSessionRunHook, HookOutcome, checked, is_async
from asupervisor.runtime.blocking_view import BlockingCoordinator
from asupervisor.runtime.coordinator import Coordinator

if TYPE_CHECKING:
    from asupervisor.session.session import AsyncSession

tf1 = tf.compat.v1

_BY_A_HOOK = "_asupervisor_raised_by_a_hook"
_A_RUN = "a run with hooks"


class OnDevice(Protocol):
    """Runs a function on the device thread with the graph entered."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run `fn(*args)` there."""


class HookChain:
    """All hooks of one session, in order.

    Args:
        hooks: The hooks: TensorFlow's, ours, or anything with the methods.
        emit: Told of what fails where nobody can be told otherwise.
    """

    def __init__(self, hooks: Sequence[Any], emit: EventSink) -> None:
        self.hooks = tuple(hooks)
        self.stop_requested = False
        self.under_way: str | None = None
        """The last call that is being made, for messages."""
        self._emit = emit
        self._begun: list[Any] = []  # and without their last call
        self._ending = False
        self._asynchronous = [(is_async(hook.before_run), is_async(hook.after_run)) for hook in self.hooks]
        self.runs_from_loop = any(before or after for before, after in self._asynchronous)
        self._turn = anyio.Lock()

    # ------------------------------------------------------------------ begin and end

    async def begin(self, on_device: OnDevice) -> None:
        """Call every hook's `begin`."""
        for hook in self.hooks:
            begin = _Claimed(hook.begin)
            self._begun.append(hook)
            try:
                await _call(begin.method, (), on_device)
            except BaseException as error:
                _mark(error)
                if begin.give_up():  # cancelled in the queue of the device thread: it has not begun
                    self._begun.remove(hook)
                raise

    async def after_create_session(
        self,
        hooks: slice,
        session: AsyncSession,
        coordinator: Coordinator,
        blocking: BlockingCoordinator,
        on_device: OnDevice,
    ) -> None:
        """Call the `after_create_session` of some of the hooks."""
        for hook in self.hooks[hooks]:
            method = hook.after_create_session
            args = (session, coordinator) if is_async(method) else (session.raw, blocking)
            try:
                await _call(method, args, on_device)
            except Exception as error:
                _mark(error)
                raise

    @property
    def asks_whether_done(self) -> bool:
        """Whether a hook knows before the first run that there is nothing left to do."""
        return any(_can_tell(hook) or _tf.last_step_of(hook) is not None for hook in self.hooks)

    def look_whether_done(self, global_step: int | None) -> None:
        """Ask the hooks whether there is anything left to do; on the device thread, before the first run."""
        for hook in self.hooks:
            last_step = _tf.last_step_of(hook)
            reached = last_step is not None and global_step is not None and global_step >= last_step
            if reached or (_can_tell(hook) and _says_done(hook, global_step)):
                self.stop_requested = True
                self._emit(
                    "session.nothing_to_do",
                    f"{type(hook).__name__} says that there is nothing left to do at step {global_step}",
                    hook=type(hook).__name__,
                    global_step=global_step,
                )

    async def end(
        self,
        session: AsyncSession | None,
        outcome: HookOutcome,
        on_device: OnDevice,
        limit_secs: float | None = None,
    ) -> list[Exception]:
        """Call every hook's `end`, after a clean end, and every begun hook's `finish`.

        Whatever was interrupted goes on where it was when it is called again: each hook has one last call.

        Args:
            session: The session, or None if there is none.
            outcome: How it ends.
            on_device: Where plain methods run.
            limit_secs: What all of them have together, in seconds; one call may take four fifths of what is left, so
                that one which hangs keeps no other from its last call.

        Returns:
            What they raised, all of it: one hook's failure keeps no other from its last call.
        """
        loop = asyncio.get_running_loop()
        deadline = None if limit_secs is None else loop.time() + limit_secs

        async def last_call(call: _Claimed, *args: Any) -> Exception | None:
            secs = None if deadline is None else 0.8 * max(0.0, deadline - loop.time())
            return await self._last_call(call.method, session, args, on_device, secs)

        errors: list[Exception | None] = []
        if not self._ending and outcome.clean and session is not None:
            self._ending = True
            left_out: list[str] = []
            for hook in self.hooks:
                end = _Claimed(hook.end)
                errors.append(await last_call(end))
                if end.give_up():
                    left_out.append(type(hook).__name__)
            if left_out:
                self._emit(
                    "hook.no_last_call",
                    f"hooks whose `end` was not called, since their thread is stuck: {' '.join(left_out)}",
                    level="error",
                    hooks=left_out,
                )
        self._ending = True
        first = next(filter(None, errors), None)
        if first is not None:
            outcome = HookOutcome("error", first)
        waiting: list[Any] = []
        try:
            while self._begun:
                hook = self._begun.pop(0)
                method = getattr(hook, "finish", None)
                if method is None:
                    continue
                finish = _Claimed(method)
                error: Exception | None = None
                try:
                    error = await last_call(finish, outcome)
                finally:
                    if finish.give_up():  # it has waited for the device thread: it was not called
                        waiting.append(hook)
                        error = None
                errors.append(error)
                del error  # its traceback leads here
        finally:
            self._begun[:0] = waiting
        return [error for error in errors if error is not None]

    def tell_of_missing_calls(self) -> None:
        """Name the hooks whose last call could not be made."""
        if self._begun:
            names = [type(hook).__name__ for hook in self._begun]
            self._begun.clear()
            self._emit(
                "hook.no_last_call",
                f"hooks that had no last call, since their thread is stuck: {' '.join(names)}",
                level="error",
                hooks=names,
            )

    async def _last_call(
        self,
        method: Callable[..., Any],
        session: AsyncSession | None,
        args: tuple[Any, ...],
        on_device: OnDevice,
        secs: float | None,
    ) -> Exception | None:
        for_whom = session if session is None or is_async(method) else session.raw
        self.under_way = name = getattr(method, "__qualname__", repr(method))
        began = asyncio.get_running_loop().time()
        limit = asyncio.timeout(secs)
        try:
            async with limit:
                await _call(method, (for_whom, *args), on_device)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # A task that the hook has cancelled and awaited: nobody has cancelled us. The same as a plain hook's.
            return self._failed(name, _own_cancellation(name, error))
        except Exception as error:
            if is_only(error, StopRequested):
                return None
            if not limit.expired() or not isinstance(error, TimeoutError):
                return self._failed(name, error)  # not into a list of the caller's: its traceback leads here
        finally:
            self.under_way = None
        if not limit.expired():
            return None
        return self._failed(name, StopGraceExceeded.of_a_hook(name, asyncio.get_running_loop().time() - began))

    def _failed(self, name: str, error: Exception) -> Exception:
        self._emit("hook.failed", f"{name} failed: {describe(error)}", level="error", hook=name, error=describe(error))
        return error

    # ------------------------------------------------------------------ one run on a thread

    def context(self, fetches: Any, feed_dict: Any, session: Any) -> Any:
        """The run context that the hooks of one run share."""
        return tf1.train.SessionRunContext(tf1.train.SessionRunArgs(fetches, feed_dict), session)

    def check_may_run(self) -> None:
        """Raise RuntimeError where a hook has requested a stop."""
        if self.stop_requested:
            raise RuntimeError("Run called even after should_stop requested.")

    def before(self, context: Any, merged: Merged) -> None:
        """Call every `before_run`, plain ones all; on the device thread with the graph entered."""
        try:
            for number, hook in enumerate(self.hooks):
                args = hook.before_run(context)
                if args is not None:
                    merged.add(number, checked(args, hook))
        except StopIteration as error:
            raise StopRequested(_A_RUN) from error
        except BaseException as error:
            _mark(error)
            raise

    def after(self, context: Any, merged: Merged, results: list[Any]) -> None:
        """Call every `after_run`, plain ones all; on the device thread with the graph entered."""
        try:
            for number, hook in enumerate(self.hooks):
                hook.after_run(context, merged.values_for(number, results))
        except StopIteration as error:
            raise StopRequested(_A_RUN) from error
        except BaseException as error:
            _mark(error)
            raise
        if context.stop_requested:
            self.stop_requested = True

    # ------------------------------------------------------------------ one run from the event loop

    async def run_from_loop(
        self,
        session: AsyncSession,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        on_device: OnDevice,
        *,
        fills_only: bool,
    ) -> Any:
        """One run with its hooks, some of them async; on the event loop.

        Args:
            session: The session without hooks.
            fetches: The caller's.
            feed_dict: The caller's.
            options: The caller's, or None.
            run_metadata: The caller's, or None.
            on_device: Where plain methods run.
            fills_only: All that the caller's fetches do is to fill or close a queue. Another run may wait for it, so it
                waits for none, and `on_device` is a side thread.
        """
        if fills_only:
            return await self._run_from_loop(session, fetches, feed_dict, options, run_metadata, on_device, "side")
        # Hooks keep notes between `before_run` and `after_run`. The lock also tells a hook that runs the session that
        # it is a hook of, and would wait for itself.
        async with self._turn:
            return await self._run_from_loop(session, fetches, feed_dict, options, run_metadata, on_device, "device")

    async def _run_from_loop(
        self,
        session: AsyncSession,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        on_device: OnDevice,
        lane: Any,
    ) -> Any:
        self.check_may_run()
        of_loop, of_thread = (self.context(fetches, feed_dict, whose) for whose in (session, session.raw))
        merged = Merged(fetches, feed_dict, options, run_metadata)
        try:
            for number, (hook, (asynchronous, _)) in enumerate(zip(self.hooks, self._asynchronous, strict=True)):
                context = of_loop if asynchronous else of_thread
                args = await _call(hook.before_run, (context,), on_device)
                if args is not None:
                    merged.add(number, checked(args, hook))
        except Exception as error:
            _mark(error)
            raise
        results = await session.run(merged.fetches, merged.feed_dict, merged.options, merged.run_metadata, lane=lane)
        try:
            for number, (hook, (_, asynchronous)) in enumerate(zip(self.hooks, self._asynchronous, strict=True)):
                context, values = of_loop if asynchronous else of_thread, merged.values_for(number, results)
                await _call(hook.after_run, (context, values), on_device)
        except Exception as error:
            _mark(error)
            raise
        if of_loop.stop_requested or of_thread.stop_requested:
            self.stop_requested = True
        return results[0]


class _Claimed:
    """A call that either is made or is given up, never both, whichever thread comes first.

    Args:
        method: What is to be called.

    Attributes:
        method: The same, of the same kind; it does nothing once it was given up.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._claim = threading.Lock()

        @functools.wraps(method)
        def call(*args: Any) -> Any:
            return method(*args) if self._claim.acquire(blocking=False) else None

        @functools.wraps(method)
        async def acall(*args: Any) -> Any:
            return await method(*args) if self._claim.acquire(blocking=False) else None

        self.method: Callable[..., Any] = acall if is_async(method) else call

    def give_up(self) -> bool:
        """Whether it was not called: then it will not be, either."""
        return self._claim.acquire(blocking=False)


def raised_by_a_hook(error: BaseException) -> bool:
    """Whether a hook raised this error by itself: not a run of the session that it made."""
    return getattr(error, _BY_A_HOOK, False) and not _tf.raised_by_session(error)


def _mark(error: BaseException) -> None:
    with suppress(Exception):  # an exception that is frozen
        setattr(error, _BY_A_HOOK, True)


async def _call(method: Callable[..., Any], args: tuple[Any, ...], on_device: OnDevice) -> Any:
    """Call a method of a hook where it belongs."""
    if not is_async(method):
        return await on_device(_unboxed, method, args)
    try:
        return await method(*args)
    except StopAsyncIteration as error:
        raise StopRequested(_A_RUN) from error


def _unboxed(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """On the device thread; StopIteration would be put into a box on its way to the loop."""
    try:
        result = method(*args)
    except StopIteration as error:
        raise StopRequested(_A_RUN) from error
    return checked(result, method)


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs here."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _own_cancellation(name: str, cause: asyncio.CancelledError) -> RuntimeError:
    error = RuntimeError(f"{name} raised CancelledError, but nobody had cancelled it: catch that of a task it awaits")
    error.__cause__ = cause
    return error


def _says_done(hook: Any, global_step: int | None) -> bool:
    try:
        return bool(hook.is_done(global_step))
    except StopIteration:  # it asks for the end, as any method of a hook may
        return True


def _can_tell(hook: Any) -> bool:
    own = getattr(type(hook), "is_done", None)
    return own is not None and own is not AsyncSessionRunHook.is_done
