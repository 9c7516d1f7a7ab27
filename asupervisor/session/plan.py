"""RunPlan: one fetch structure with one set of feed keys, prepared once; and the cache of them.

`Session.run` takes its fetches and feeds apart anew for each call. A plan does that once and then calls a compiled
callable, with results and errors equal to those of `Session.run`, whose place it takes.

What a plan cannot do as `Session.run` does, it leaves to it: options and run metadata, feeds that are no plain
tensors, tensors that are both fed and fetched, sessions with a `run` of their own, remote sessions, and whatever is
wrong.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import analysis, feeds, keys
from asupervisor.session.analysis import Touches
from asupervisor.session.engine import LARGEST_TRIAL_OPS, Engine
from asupervisor.session.feeds import Args, Convert
from asupervisor.session.runs import AsItIs, Extension, Run

Inline = bool | Literal["auto"]

#: Plans for carrying the same extra tensors that one plan keeps.
_MOST_EXTENSIONS = 8


class RunPlan:
    """A prepared run. Made by `PlanCache.plan`.

    Attributes:
        convert: ``convert(feed_dict, copy=False)`` checks and converts a feed_dict as `Session.run` does and gives
            the arguments for `execute`, with `copy` in memory of their own: a generator of batches may then write
            to its arrays. It runs nothing. Any thread on which no event loop runs. Raises what `Session.run` raises
            for this feed.
        execute: ``execute(args)`` runs and gives what `Session.run` returns, or raises what it raises. On the thread
            that is to run it. A run in flight cannot be interrupted; closing the session ends one that waits.
        touches: What the run does.
        is_training: It changes the global step or, without one, any variable.
        may_wait: What it may have to wait for: names of queues and iterators, and of ops of other kinds.
        side_lane: It only fills or closes queues, so it may wait long and must not hold up the device thread.
        feed_tensors: The tensors that are fed.
        writes: It writes a variable, whichever.
    """

    __slots__ = (
        "__weakref__",
        "_engine",
        "_extend",
        "_extensions",
        "_keep",
        "_keys",
        "_shared",
        "_used",
        "convert",
        "execute",
        "feed_tensors",
        "is_training",
        "may_wait",
        "side_lane",
        "touches",
        "writes",
    )

    convert: Convert
    execute: Callable[[Args], Any]

    def __init__(
        self,
        shared: _Shared,
        engine: Engine | None,
        convert: Convert,
        execute: Callable[[Args], Any],
        extend: Callable[[Sequence[Any]], Extension],
        feed_tensors: Sequence[tf.Tensor],
        touches: Touches,
    ) -> None:
        self._shared = shared
        self._engine = engine
        self._extend = extend
        self._extensions: OrderedDict[tuple[int, ...], Extension] = OrderedDict()
        self._keep: Sequence[Any] = ()
        self._keys: tuple[Any, ...] = ()
        self._used = False
        self.convert = convert
        self.execute = execute
        self.feed_tensors = tuple(feed_tensors)
        self.touches = touches
        self.may_wait = touches.may_wait
        self.writes = bool(touches.variables_written)
        self.side_lane = touches.only_fills
        self.is_training = touches.trains(shared.global_step)

    def run(self, feed_dict: Any = None) -> Any:
        """``execute(convert(feed_dict))``: what `tf.compat.v1.Session.run` returns or raises."""
        return self.execute(self.convert(feed_dict))

    def run_with(self, feed_dict: Any, extra: Sequence[tf.Tensor]) -> tuple[Any, list[Any]]:
        """The same run, which fetches `extra` along: ``(result, [values of extra])``."""
        return self.execute_with(self.convert(feed_dict), extra)

    def execute_with(self, args: Args, extra: Sequence[tf.Tensor]) -> tuple[Any, list[Any]]:
        """As `execute`, fetching `extra` along in the same run.

        Args:
            args: From `convert`.
            extra: Tensors of the graph; fed ones may be among them. If one of them cannot be computed, the run
                fails.

        Returns:
            What `execute` returns, and the list of the values of `extra`.
        """
        key = tuple(map(id, extra))
        found = self._extensions.get(key)
        if found is None:
            found = self._extend(tuple(extra))
            with self._shared.lock:
                while len(self._extensions) >= _MOST_EXTENSIONS:
                    self._extensions.popitem(last=False)[1].drop()
                self._extensions[key] = found
        return found.execute(args)

    def touches_with(self, extra: Sequence[Any]) -> Touches:
        """What fetching `extra` does by itself under this plan's feeds: may this plan carry it along?"""
        return analysis.analyse(self._shared.graph, extra, self.feed_tensors)

    def drop(self) -> None:
        """Releases the compiled callables; later runs go by `Session.run`."""
        if self._engine is not None:
            self._engine.drop()
        with self._shared.lock:
            extensions = list(self._extensions.values())
            self._extensions.clear()
        for extension in extensions:
            extension.drop()


class _Shared:
    """What the plans of one cache share."""

    __slots__ = ("_one_device", "compiles", "global_step", "graph", "inline", "lock", "raw")

    def __init__(self, raw: tf.compat.v1.Session, global_step: Any, inline: Inline) -> None:
        self.raw = raw
        self.graph: tf.Graph = raw.graph
        self.global_step = analysis.variable_name(global_step)
        self.compiles = _tf.can_compile(raw) and not raw.sess_str
        self.inline: bool | None = None if inline == "auto" else inline
        self.lock = threading.RLock()
        self._one_device: bool | None = None

    def has_one_device(self) -> bool:
        """Whether all ops run on one device, so that none waits for a tensor from another."""
        if self._one_device is None:
            try:
                self._one_device = len(self.raw.list_devices()) == 1
            except (tf.errors.OpError, RuntimeError):
                return False
        return self._one_device


class PlanCache:
    """The plans of one session. Any thread, several at a time.

    Args:
        raw: The session.
        global_step: The graph's global step, by which training runs are told.
        maxsize: How many plans are kept; those that were not used lately go first.
        inline: True lets runs that wait for nothing run in the caller's thread, False never, ``"auto"`` where
            trying showed that it pays.
    """

    def __init__(
        self,
        raw: tf.compat.v1.Session,
        *,
        global_step: tf.Variable | tf.Tensor | None = None,
        maxsize: int = 256,
        inline: Inline = "auto",
    ) -> None:
        self._shared = _Shared(raw, global_step, inline)
        self._maxsize = maxsize
        # By what a call looks like and by what it means. Keys hold ids: each entry keeps the objects alive whose
        # ids stand in its keys, and it leaves the tables before it lets go of them. So an id in a table never
        # means another object.
        self._fast: dict[Any, RunPlan] = {}
        self._plans: OrderedDict[Any, RunPlan] = OrderedDict()
        self._dropped = False

    def plan(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> RunPlan:
        """The plan for a call of `Session.run`.

        Wrong fetches and feeds give a plan, too, which raises TensorFlow's error when it runs.

        Args:
            fetches: As `Session.run` takes them. A list that was changed is another one.
            feed_dict: Only its keys matter here.
            options: A `tf.compat.v1.RunOptions`; the plan then serves for one call.
            run_metadata: A `tf.compat.v1.RunMetadata`, likewise.
        """
        if options is None and run_metadata is None:
            key = keys.fast_key(fetches, feed_dict)
            found = self._fast.get(key)
            if found is not None:
                found._used = True
                return found
            return self._look_up(key, fetches, feed_dict)
        return self._unprepared(fetches, feed_dict, options, run_metadata)

    def peek(self, fetches: Any, feed_dict: Any = None) -> RunPlan | None:
        """The plan for such a call if there is one already: no lock, no TensorFlow, for the loop's thread."""
        found = self._fast.get(keys.fast_key(fetches, feed_dict))
        if found is None:
            found = self._plans.get(keys.key_of(fetches, feed_dict, []))
        if found is not None:
            found._used = True
        return found

    def drop(self) -> None:
        """Releases all compiled callables, after the session's close: a run in flight still uses them until then.

        Runs that come after it go by `Session.run`.
        """
        with self._shared.lock:
            self._dropped = True
            plans = list(self._plans.values())
            self._fast.clear()
            self._plans.clear()
        for plan in plans:
            plan.drop()

    def __len__(self) -> int:
        return len(self._plans)

    # -------------------------------------------------------------------------------------------- looking

    def _look_up(self, fast: Any, fetches: Any, feed_dict: Any) -> RunPlan:
        keep: list[Any] = []
        key = keys.key_of(fetches, feed_dict, keep)
        if key is None:
            return self._unprepared(fetches, feed_dict, None, None)
        with self._shared.lock:
            plan = self._plans.get(key)
            if plan is not None:
                plan._used = True
            else:
                plan = self._prepare(fetches, feed_dict)
                if self._dropped or plan._engine is None:
                    return plan
                plan._keep = keep
                self._make_room()
                self._plans[key] = plan
                plan._keys = (key,)
                if fast is not None and keys.is_flat(fetches, feed_dict):
                    self._fast[fast] = plan
                    plan._keys = (key, fast)
            return plan

    def _make_room(self) -> None:
        while len(self._plans) >= self._maxsize:
            key, plan = next(iter(self._plans.items()))
            if plan._used:  # a second chance
                plan._used = False
                self._plans.move_to_end(key)
                continue
            del self._plans[key]
            for alias in plan._keys[1:]:
                self._fast.pop(alias, None)

    # ------------------------------------------------------------------------------------------ preparing

    def _prepare(self, fetches: Any, feed_dict: Any) -> RunPlan:
        shared = self._shared
        raw, graph = shared.raw, shared.graph
        try:
            structure = _tf.fetch_structure(graph, fetches)
        except Exception:
            structure = None  # wrong fetches: Session.run says so, after it looked at the feeds
        if structure is None or not structure.elements:
            return self._unprepared(fetches, feed_dict, None, None)
        elements = structure.elements
        plain = feeds.plain_tensors(graph, feed_dict) if feed_dict else ()
        tensors = plain if plain is not None else feeds.any_tensors(graph, feed_dict)
        fed = {id(tensor) for tensor in tensors}
        touches = analysis.analyse(graph, elements, tensors)
        compiled = (
            shared.compiles
            and not self._dropped
            and plain is not None
            and not any(id(element) in fed for element in elements)
        )
        engine = Engine(
            raw,
            tensors,
            elements,
            compiled=compiled,
            inline=self._inline(touches),
            flushes=lambda: analysis.computes_floats(elements, tensors),
        )
        run = Run(raw, engine, structure)
        if plain is None:
            convert: Convert = feeds.as_it_is(raw)
        else:
            convert = feeds.converter(raw, tuple(feed_dict or ()), tensors)
        return RunPlan(shared, engine, convert, run.execute(), run.extend, tensors, touches)

    def _inline(self, touches: Touches) -> bool | None:
        shared = self._shared
        may = (
            not touches.may_wait
            and not touches.calls
            and touches.size <= LARGEST_TRIAL_OPS
            and shared.inline is not False
            and not _tf.has_operation_timeout(shared.raw)
            and shared.has_one_device()
        )
        return shared.inline if may else False

    def _unprepared(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> RunPlan:
        """A plan for one call: `Session.run` as it is."""
        raw, graph = self._shared.raw, self._shared.graph
        tensors = feeds.any_tensors(graph, feed_dict) if feed_dict else ()
        run = AsItIs(raw, fetches, options, run_metadata)
        touches = analysis.analyse(graph, keys.elements_of(graph, fetches), tensors)
        return RunPlan(self._shared, None, feeds.as_it_is(raw), run.execute, run.extend, tensors, touches)
