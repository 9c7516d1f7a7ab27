"""The hooks of one monitored session as one thing: order, merging, and who runs where.

Where all `before_run` and `after_run` are plain, a run with its hooks is one piece of work on the device thread
(`HookedPlans`), at the full speed of `run` and `steps`. With a coroutine among them it goes step by step from the
event loop (`HookChain.run_from_loop`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from asupervisor.errors import StopRequested
from asupervisor.events import EventSink
from asupervisor.hooks.protocol import HookOutcome, is_async
from asupervisor.runtime.blocking_view import BlockingCoordinator
from asupervisor.runtime.coordinator import Coordinator

if TYPE_CHECKING:
    from asupervisor.session.plan import PlanCache, RunPlan
    from asupervisor.session.session import AsyncSession

tf1 = tf.compat.v1

_MOST_PLANS = 256


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
        self.runs_from_loop = any(is_async(hook.before_run) or is_async(hook.after_run) for hook in self.hooks)
        self.stop_requested = False
        self.failure: BaseException | None = None
        """The last exception that a hook raised in a run, to be told apart from the run's own."""
        self._emit = emit
        self._begun: list[Any] = []
        self._ended = False

    # ------------------------------------------------------------------ begin and end

    async def begin(self, on_device: OnDevice) -> None:
        """Call every hook's `begin`."""
        for hook in self.hooks:
            self._begun.append(hook)
            if is_async(hook.begin):
                await hook.begin()
            else:
                await on_device(hook.begin)

    async def after_create_session(
        self, session: AsyncSession, coordinator: Coordinator, blocking: BlockingCoordinator, on_device: OnDevice
    ) -> None:
        """Call every hook's `after_create_session`."""
        for hook in self.hooks:
            if is_async(hook.after_create_session):
                await hook.after_create_session(session, coordinator)
            else:
                await on_device(hook.after_create_session, session.raw, blocking)

    async def end(self, session: AsyncSession | None, outcome: HookOutcome, on_device: OnDevice) -> list[Exception]:
        """Call every hook's `end`, after a clean end, and every begun hook's `finish`; once.

        Returns:
            What they raised, all of it: one hook's failure keeps no other from its last call.
        """
        if self._ended:
            return []
        self._ended = True
        errors: list[Exception] = []
        if outcome.clean and session is not None:
            for hook in self.hooks:
                await self._last_call(hook.end, session, (), on_device, errors)
        if errors:
            outcome = HookOutcome("error", errors[0])
        for hook in self._begun:
            finish = getattr(hook, "finish", None)
            if finish is not None:
                await self._last_call(finish, session, (outcome,), on_device, errors)
        return errors

    async def _last_call(
        self,
        method: Callable[..., Any],
        session: AsyncSession | None,
        args: tuple[Any, ...],
        on_device: OnDevice,
        errors: list[Exception],
    ) -> None:
        try:
            if is_async(method):
                await method(session, *args)
            else:
                await on_device(method, None if session is None else session.raw, *args)
        except Exception as error:
            errors.append(error)
            name = getattr(method, "__qualname__", repr(method))
            self._emit("hook.failed", f"{name} failed: {error!r}", level="error", hook=name, error=repr(error))

    # ------------------------------------------------------------------ one run

    def context(self, fetches: Any, feed_dict: Any, session: Any) -> Any:
        """The run context that the hooks of one run share."""
        return tf1.train.SessionRunContext(
            original_args=tf1.train.SessionRunArgs(fetches=fetches, feed_dict=feed_dict), session=session
        )

    def check_may_run(self) -> None:
        """Raise RuntimeError where a hook has requested a stop."""
        if self.stop_requested:
            raise RuntimeError("Run called even after should_stop requested.")

    def run_on_device(
        self,
        raw: tf.compat.v1.Session,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        run: Callable[[Any, Any, Any, Any], Any],
    ) -> Any:
        """One run with its hooks, all of them plain; on the device thread with the graph entered.

        Args:
            raw: TensorFlow's session, for the hooks.
            fetches: The caller's.
            feed_dict: The caller's.
            options: The caller's, or None.
            run_metadata: The caller's, or None.
            run: Runs merged fetches, feeds, options and metadata.
        """
        self.check_may_run()
        context = self.context(fetches, feed_dict, raw)
        merged = Merged(fetches, feed_dict, options, run_metadata)
        with _NotingFailure(self):
            for hook in self.hooks:
                merged.add(hook, hook.before_run(context))
        results = run(merged.fetches, merged.feed_dict, merged.options, merged.run_metadata)
        with _NotingFailure(self):
            for hook in self.hooks:
                hook.after_run(context, merged.values_for(hook, results))
        if context.stop_requested:
            self.stop_requested = True
        return results["caller"]

    async def run_from_loop(
        self,
        session: AsyncSession,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        on_device: OnDevice,
    ) -> Any:
        """One run with its hooks, some of them async; on the event loop."""
        self.check_may_run()
        contexts = {
            True: self.context(fetches, feed_dict, session),
            False: self.context(fetches, feed_dict, session.raw),
        }
        merged = Merged(fetches, feed_dict, options, run_metadata)
        with _NotingFailure(self):
            for hook in self.hooks:
                asynchronous = is_async(hook.before_run)
                context = contexts[asynchronous]
                args = await (hook.before_run(context) if asynchronous else on_device(hook.before_run, context))
                merged.add(hook, args)
        results = await session.run(merged.fetches, merged.feed_dict, merged.options, merged.run_metadata)
        with _NotingFailure(self):
            for hook in self.hooks:
                asynchronous = is_async(hook.after_run)
                context, values = contexts[asynchronous], merged.values_for(hook, results)
                await (hook.after_run(context, values) if asynchronous else on_device(hook.after_run, context, values))
        if any(context.stop_requested for context in contexts.values()):
            self.stop_requested = True
        return results["caller"]


class _NotingFailure:
    """Remembers what a hook raised; a StopIteration of it means a clean end, and cannot leave a coroutine."""

    __slots__ = ("_chain",)

    def __init__(self, chain: HookChain) -> None:
        self._chain = chain

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None:
            return
        self._chain.failure = exc
        cause = exc.__cause__ if isinstance(exc, RuntimeError) else exc
        if isinstance(cause, StopIteration | StopAsyncIteration):
            stop = StopRequested("the run of a hook")
            self._chain.failure = stop
            raise stop from cause


class Merged:
    """What one run fetches and feeds: the caller's and each hook's.

    Raises:
        RuntimeError: Two of them feed the same tensor.
    """

    __slots__ = ("_asked", "feed_dict", "fetches", "options", "run_metadata")

    def __init__(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> None:
        self.fetches: dict[Any, Any] = {"caller": fetches}
        self.feed_dict = feed_dict
        self.options = options
        self.run_metadata = run_metadata
        self._asked = False

    def add(self, hook: Any, args: Any) -> None:
        """Add what a hook's `before_run` returned."""
        if args is None:
            return
        if args.fetches is not None:
            self.fetches[hook] = args.fetches
        if args.feed_dict:
            mine = dict(self.feed_dict or {})
            known = {_key(key) for key in mine}
            for key, value in args.feed_dict.items():
                if _key(key) in known:
                    raise RuntimeError(f"Same tensor is fed by two hooks, or by a hook and the caller: {key!r}")
                mine[key] = value
            self.feed_dict = mine
        if args.options is not None:
            self._asked = True
            self.options = args.options if self.options is None else merge_run_options(self.options, args.options)
        if self._asked and self.run_metadata is None:
            self.run_metadata = tf1.RunMetadata()

    def values_for(self, hook: Any, results: dict[Any, Any]) -> Any:
        """The `SessionRunValues` of one hook."""
        return tf1.train.SessionRunValues(
            results=results.get(hook),
            options=self.options if self.options is not None else tf1.RunOptions(),
            run_metadata=self.run_metadata if self.run_metadata is not None else tf1.RunMetadata(),
        )


def merge_run_options(options: Any, more: Any) -> Any:
    """`RunOptions` that ask for all that either asks for: the larger numbers, any flag, all debug watches.

    Source: `_merge_run_options` of TensorFlow's monitored session.
    """
    merged = tf1.RunOptions()
    merged.CopyFrom(options)
    for name in ("trace_level", "timeout_in_ms", "inter_op_thread_pool"):
        setattr(merged, name, max(getattr(options, name), getattr(more, name)))
    for name in ("output_partition_graphs", "report_tensor_allocations_upon_oom"):
        setattr(merged, name, getattr(options, name) or getattr(more, name))
    merged.debug_options.debug_tensor_watch_opts.extend(more.debug_options.debug_tensor_watch_opts)
    return merged


def _key(key: Any) -> Any:
    return key.ref() if hasattr(key, "ref") else key


class HookedPlans:
    """The plans of a session in which every run has its hooks; stands in for `PlanCache`.

    Args:
        chain: The hooks; none of them needs the event loop for a run.
        plans: The plans of the runs themselves.
        raw: TensorFlow's session.
    """

    def __init__(self, chain: HookChain, plans: PlanCache, raw: tf.compat.v1.Session) -> None:
        self.chain = chain
        self.plans = plans
        self.raw = raw
        self._hooked: OrderedDict[int, HookedPlan] = OrderedDict()  # by id of the plan that each holds

    def peek(self, fetches: Any, feed_dict: Any = None) -> HookedPlan | None:
        """The plan, where that of the caller's own fetches is known already; on the event loop."""
        inner = self.plans.peek(fetches, feed_dict)
        return None if inner is None else self._hooked.get(id(inner))

    def plan(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> HookedPlan:
        """The plan of a run with its hooks."""
        inner = self.plans.plan(fetches, feed_dict)
        if options is not None or run_metadata is not None:
            return HookedPlan(self, inner, fetches, options, run_metadata)
        found = self._hooked.get(id(inner))
        if found is None:
            found = HookedPlan(self, inner, fetches, None, None)
            self._hooked[id(inner)] = found
            while len(self._hooked) > _MOST_PLANS:
                self._hooked.popitem(last=False)
        return found

    def drop(self) -> None:
        """See `PlanCache.drop`."""
        self._hooked.clear()
        self.plans.drop()


class HookedPlan:
    """One run with its hooks, as the session and its streams see a `RunPlan`."""

    __slots__ = (
        "__weakref__",
        "_fetches",
        "_inner",
        "_of",
        "_options",
        "_run_metadata",
        "is_training",
        "may_wait",
        "side_lane",
    )

    def __init__(self, of: HookedPlans, inner: RunPlan, fetches: Any, options: Any, run_metadata: Any) -> None:
        self._of = of
        self._inner = inner
        self._fetches = fetches
        self._options = options
        self._run_metadata = run_metadata
        self.is_training = inner.is_training
        self.may_wait = inner.may_wait
        self.side_lane = False  # hooks belong to the device thread

    @property
    def touches(self) -> Any:
        """What the caller's own fetches do."""
        return self._inner.touches

    def convert(self, feed_dict: Any, copy: bool = False) -> Any:
        """The feeds as they came, since hooks may add to them; copied where the caller reuses its buffers."""
        if copy and feed_dict:
            self._inner.convert(feed_dict)  # a wrong feed is an error of the feed, at once
            return {key: _copied(value) for key, value in feed_dict.items()}
        return feed_dict

    def execute(self, args: Any) -> Any:
        """Run it; on the device thread."""
        return self._run(args, lambda plan, converted: plan.execute(converted))

    def run(self, feed_dict: Any) -> Any:
        """See `RunPlan.run`."""
        return self.execute(feed_dict)

    def execute_with(self, args: Any, extra: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Run it and fetch `extra` along, for riders; on the device thread."""
        values: list[Any] = []

        def run(plan: RunPlan, converted: Any) -> Any:
            result, values[:] = plan.execute_with(converted, extra)
            return result

        return self._run(args, run), values

    def _run(self, feed_dict: Any, run: Callable[[RunPlan, Any], Any]) -> Any:
        of = self._of

        def run_merged(fetches: Any, feeds: Any, options: Any, run_metadata: Any) -> Any:
            plan = of.plans.plan(fetches, feeds, options, run_metadata)
            return run(plan, plan.convert(feeds))

        with of.raw.graph.as_default():
            return of.chain.run_on_device(
                of.raw, self._fetches, feed_dict, self._options, self._run_metadata, run_merged
            )


def _copied(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") else value
