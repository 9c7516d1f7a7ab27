"""Plans in which every run has its hooks: what a session and its streams see in place of a `RunPlan`.

::

    HookedPlan.execute ── before_run of each hook ── the merged RunPlan, with riders and alarms ── after_run of each

TensorFlow's own hooks fetch the global step along, and expect the step before the run. Nothing in the graph says which
one they get: it is a matter of how the ops are scheduled. So merged runs are scheduled as `Session.run` does it, never
in the calling thread.

All of it is one piece of work on the device thread. Where the caller's fetches do nothing but fill or close a queue, it
is one on the side thread that calls, hooks and all: the step that occupies the device thread may be waiting for exactly
that element.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from asupervisor.hooks.chain import HookChain
from asupervisor.hooks.merging import Merged, frozen_structure
from asupervisor.session.plan import PlanCache

if TYPE_CHECKING:
    from asupervisor.session.plan import RunPlan
    from asupervisor.session.rider import Rider, TrainingRuns

_MOST_PLANS = 256
_MOST_MERGED = 32
_LEAVES = (tf.Tensor, tf.Operation, tf.Variable)


class HookedPlans:
    """The plans of a session in which every run has its hooks; stands in for `PlanCache`.

    Args:
        chain: The hooks; none of them needs the event loop for a run.
        plans: The plans of the callers' own fetches.
        global_step: See `PlanCache`.
        runs: The training runs of the session, with their riders.
        raw: TensorFlow's session.
    """

    def __init__(
        self,
        chain: HookChain,
        plans: PlanCache,
        global_step: Any,
        runs: TrainingRuns,
        raw: tf.compat.v1.Session,
    ) -> None:
        self.chain = chain
        self.plans = plans
        self.merged = PlanCache(raw, global_step=global_step, inline=False)
        self.runs = runs
        self.raw = raw
        # By the id of the caller's own plan, which each of them holds.
        self._hooked: OrderedDict[int, HookedPlan] = OrderedDict()

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
            found = HookedPlan(self, inner, frozen_structure(fetches), None, None)
            if self.plans.peek(fetches, feed_dict) is inner:  # else it serves for one call: the fetches are wrong
                self._hooked[id(inner)] = found
                while len(self._hooked) > _MOST_PLANS:
                    self._hooked.popitem(last=False)
        return found

    def drop(self) -> None:
        """See `PlanCache.drop`."""
        self._hooked.clear()
        self.merged.drop()


class HookedPlan:
    """One run with its hooks, as a session and its streams see it.

    Args:
        of: The plans that it belongs to.
        inner: The plan of the caller's own fetches; it is never run by itself.
        fetches: The caller's.
        options: The caller's, or None.
        run_metadata: The caller's, or None.
    """

    __slots__ = (
        "__weakref__",
        "_fetches",
        "_inner",
        "_merged",
        "_of",
        "_options",
        "_run_metadata",
        "is_training",
        "may_wait",
        "side_lane",
        "writes",
    )

    def __init__(self, of: HookedPlans, inner: RunPlan, fetches: Any, options: Any, run_metadata: Any) -> None:
        self._of = of
        self._inner = inner
        self._fetches = fetches
        self._options = options
        self._run_metadata = run_metadata
        # By what the hooks fetch and feed along; each entry keeps the objects whose ids stand in its key.
        self._merged: dict[Any, tuple[RunPlan, Any]] = {}
        self.is_training = inner.is_training
        self.may_wait = inner.may_wait
        self.writes = inner.writes
        self.side_lane = inner.side_lane

    @property
    def touches(self) -> Any:
        """What the caller's own fetches do."""
        return self._inner.touches

    def convert(self, feed_dict: Any, copy: bool = False) -> Any:
        """The feeds, still as a feed dictionary, since hooks may add to them.

        With `copy` its arrays are converted and in memory of their own, as `RunPlan.convert` makes them.
        """
        if not copy or not feed_dict:
            return feed_dict
        args = self._inner.convert(feed_dict, True)
        return dict(zip(feed_dict, args, strict=True)) if isinstance(args, tuple) else args.feed_dict

    def run(self, feed_dict: Any) -> Any:
        """See `RunPlan.run`."""
        return self.execute(feed_dict)

    def execute(self, feed_dict: Any) -> Any:
        """Run it, with its hooks, on the thread that is meant for it."""
        of = self._of
        with of.raw.graph.as_default():
            context, merged = self._before(feed_dict)
            plan = self._plan(merged)
            args = plan.convert(merged.feed_dict)
            if plan.is_training and not self.side_lane:
                self.is_training = True
                results = of.runs.run(plan, args)
            else:
                results = plan.execute(args)
            of.chain.after(context, merged, results)
        return results[0]

    def _before(self, feed_dict: Any) -> tuple[Any, Merged]:
        of = self._of
        of.chain.check_may_run()
        context = of.chain.context(self._fetches, feed_dict, of.raw)
        merged = Merged(self._fetches, feed_dict, self._options, self._run_metadata)
        of.chain.before(context, merged)
        return context, merged

    def _plan(self, merged: Merged) -> RunPlan:
        plans = self._of.merged
        if merged.options is not None or merged.run_metadata is not None:
            return plans.plan(merged.fetches, merged.feed_dict, merged.options, merged.run_metadata)
        key = self._key(merged)
        if key is None:
            return plans.plan(merged.fetches, merged.feed_dict)
        found = self._merged.get(key)
        if found is None:
            if len(self._merged) >= _MOST_MERGED:
                self._merged.clear()
            kept = frozen_structure(merged.fetches[1:]), tuple(merged.feed_dict or ())
            found = self._merged[key] = plans.plan(merged.fetches, merged.feed_dict), kept
        return found[0]

    def _key(self, merged: Merged) -> Any:
        """What tells one merged run of this plan from another; None where that is not easy to tell."""
        parts: list[Any] = []
        for fetches in merged.fetches[1:]:
            kind = fetches.__class__
            if kind is dict:
                parts += (dict, len(fetches), *fetches)
                values = fetches.values()
                if not all(name.__class__ is str for name in fetches):  # 1 and True are one key
                    return None
            elif kind is list or kind is tuple:
                parts += (kind, len(fetches))
                values = fetches
            else:
                values = (fetches,)
            for value in values:
                if not isinstance(value, _LEAVES):
                    return None
                parts.append(id(value))
        feeds = merged.feed_dict
        if feeds:
            if feeds.__class__ is not dict:
                return None
            parts.append(None)
            parts.extend(map(id, feeds))
        return tuple(parts)


class HookedRuns:
    """The training runs of a session, as the session with hooks sees them.

    Its plans run and count the training run in their midst, so that what hooks raise is not taken for a step that
    failed, and a step whose hook failed is counted.

    Args:
        runs: The training runs themselves.
    """

    def __init__(self, runs: TrainingRuns) -> None:
        self._runs = runs

    def run(self, plan: HookedPlan, args: Any) -> Any:
        """See `TrainingRuns.run`; it happens in the plan."""
        return plan.execute(args)

    @property
    def count(self) -> int:
        """See `TrainingRuns.count`."""
        return self._runs.count

    @property
    def paused(self) -> bool:
        """See `TrainingRuns.paused`."""
        return self._runs.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._runs.paused = paused

    @property
    def failure(self) -> BaseException | None:
        """See `TrainingRuns.failure`."""
        return self._runs.failure

    def let_go(self) -> None:
        """See `TrainingRuns.let_go`."""
        self._runs.let_go()

    def board(self, rider: Rider) -> None:
        """See `TrainingRuns.board`."""
        self._runs.board(rider)

    def disembark(self, rider: Rider) -> None:
        """See `TrainingRuns.disembark`."""
        self._runs.disembark(rider)

    def set_alarm(self, at: int, fn: Callable[[], None]) -> None:
        """See `TrainingRuns.set_alarm`."""
        self._runs.set_alarm(at, fn)
