"""What a run does: which variables, queues, iterators and placeholders it touches.

TensorFlow runs what the fetches need: the analysis follows inputs and control inputs from the fetched ops, stops at
fed tensors, and looks into the bodies of functions (cond, while loops, `tf.function`, datasets). Each op of a graph
is looked at once and then remembered as a row of integers, so that the second plan of a graph with a hundred
thousand ops takes milliseconds. The index holds no reference to an op or a graph; a graph that grows is fine.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from asupervisor.session import effects
from asupervisor.session.bodies import ANY, FunctionBodies, Touch
from asupervisor.session.effects import Kind

_NONE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Touches:
    """What running some fetches does, given what is fed.

    Variables go by the name of their op (``variable.op.name``), queues and iterators by the name of the op that
    makes them, tensors by their names.

    Attributes:
        feeds: The tensors that are fed, used or not.
        placeholders: Placeholders that the run needs and that are not fed: it fails without them.
        variables_read: Variables that are read.
        variables_written: Variables that are written, `variables_initialised` and `counters` among them.
        variables_initialised: Variables that are written by their initialisers or from a checkpoint, and not
            otherwise.
        counters: Variables that are counted up to a limit, and not written otherwise.
        sources: Ops that take something which is then gone: dequeues, iterators, readers, stateful Python
            functions. Two ops that take from the same queue are two sources.
        enqueues: Queues (barriers, staging areas) that something is put into.
        closes: Queues that are closed.
        gradients: Accumulators that gradients are handed to, for somebody else to apply: synchronised replicas.
        alters: Other state that is changed: tables, files, iterators that are started again.
        may_wait: What the run may have to wait for: names of queues, iterators and of ops of other kinds.
        calls: Functions are called, whose bodies TensorFlow may run on threads of its own.
        size: How many ops of the graph take part.
    """

    feeds: frozenset[str] = _NONE
    placeholders: frozenset[str] = _NONE
    variables_read: frozenset[str] = _NONE
    variables_written: frozenset[str] = _NONE
    variables_initialised: frozenset[str] = _NONE
    counters: frozenset[str] = _NONE
    sources: frozenset[str] = _NONE
    enqueues: frozenset[str] = _NONE
    closes: frozenset[str] = _NONE
    gradients: frozenset[str] = _NONE
    alters: frozenset[str] = _NONE
    may_wait: frozenset[str] = _NONE
    calls: bool = False
    size: int = 0

    @property
    def only_fills(self) -> bool:
        """Its only effects are that queues are filled or closed, so it may wait for long and must wait elsewhere."""
        return bool(self.enqueues or self.closes) and not self.variables_changed and not self.alters

    @property
    def variables_changed(self) -> frozenset[str]:
        """Variables that are written in another way than by initialising, restoring or counting."""
        return self.variables_written - self.variables_initialised - self.counters

    def trains(self, global_step: str | None) -> bool:
        """Whether this is a training run: it changes the global step or, without one, any variable.

        Initialising and restoring is no training, nor is counting the epochs of a queue that is filled. Handing
        gradients to an accumulator is: with synchronised replicas another run moves the global step.
        """
        if self.only_fills:
            return False
        written = self.variables_written - self.variables_initialised
        if self.gradients:
            return True
        return bool(written) if global_step is None else global_step in written


def analyse(graph: tf.Graph, fetches: Iterable[Any], fed_tensors: Iterable[tf.Tensor] = ()) -> Touches:
    """Tells what running `fetches` does when `fed_tensors` are fed. Any thread.

    Args:
        graph: The graph.
        fetches: Operations and tensors of the graph. A tensor that is both fetched and fed runs nothing.
        fed_tensors: Tensors of the graph that are fed.
    """
    with _indices_lock:
        index = _indices.get(graph)
        if index is None:
            index = _indices[graph] = GraphIndex()
    return index.touches(graph, fetches, fed_tensors)


def computes_floats(fetches: Iterable[Any], fed_tensors: Iterable[tf.Tensor] = ()) -> bool:
    """Whether floating-point numbers take part in a run; for small closures. Function bodies are not looked into."""
    fed = {id(tensor) for tensor in fed_tensors}
    todo = [fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in fetches]
    seen = set()
    while todo:
        op = todo.pop()
        if id(op) in seen:
            continue
        seen.add(id(op))
        if any(tensor.dtype.base_dtype.is_floating or tensor.dtype.is_complex for tensor in op.outputs):
            return True
        todo += op.control_inputs
        for tensor in op.inputs:
            if tensor.dtype.base_dtype.is_floating or tensor.dtype.is_complex:
                return True
            if id(tensor) not in fed:
                todo.append(tensor.op)
    return False


def variable_name(variable: Any) -> str | None:
    """The name under which `Touches` lists a variable, given as a variable or as one of its tensors."""
    if variable is None:
        return None
    handle = getattr(variable, "handle", None)
    tensor = handle if handle is not None else variable
    op = tensor.op
    while op.type not in effects.VARIABLES and op.inputs:
        op = op.inputs[0].op
    return _name_of(op)


def _name_of(op: tf.Operation) -> str:
    """Several handle ops can mean one variable, by its shared name; anything else goes by its op's name."""
    if op.type == "VarHandleOp":
        shared: str = tf.compat.as_str(op.get_attr("shared_name"))
        if shared and shared not in _ANONYMOUS:
            return shared
    name: str = op.name
    return name


_ANONYMOUS = {"cd2c89b7-88b7-44c8-ad83-06c2a9158347"}  # what TensorFlow calls a handle that is not shared


@dataclasses.dataclass(frozen=True, slots=True)
class _Info:
    """What one op does by itself: the same for each run that reaches it."""

    name: str
    type: str
    touches: tuple[Touch, ...] = ()
    calls: bool = False
    initialises: bool = False
    takes_references: bool = False


#: One op: ids of its input tensors, ids of the ops that make them, ids of its control inputs, what it does.
_Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], "_Info | None"]


class GraphIndex:
    """All that was found out about one graph so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # By id(op). TensorFlow's graph keeps one Python object per op and per tensor for as long as it lives,
        # so ids are stable; holding the objects here would keep the graph alive for ever.
        self._rows: dict[int, _Row] = {}
        self._plain: dict[str, bool] = {}
        # Ops whose output is a reference to a variable: who takes it as an ordinary input reads the variable.
        self._references: dict[int, frozenset[str]] = {}
        self._bodies = FunctionBodies()
        self._initialisers: frozenset[str] = _NONE
        self._collected: Any = None
        self._known: dict[Any, Touches] = {}

    def touches(self, graph: tf.Graph, fetches: Iterable[Any], fed_tensors: Iterable[tf.Tensor] = ()) -> Touches:
        """See `analyse`."""
        fed_list = list(fed_tensors)
        fed = {id(tensor) for tensor in fed_list}
        roots = {}
        for fetch in fetches:
            if id(fetch) not in fed:
                op = fetch if isinstance(fetch, tf.Operation) else fetch.op
                roots[id(op)] = op
        with self._lock:
            key = (frozenset(roots), frozenset(fed))
            known = self._known.get(key)
            if known is None:
                self._collect_initialisers(graph)
                for root in roots.values():
                    self._learn(graph, root)
                if len(self._known) >= 512:
                    self._known.clear()
                feeds = frozenset(tensor.name for tensor in fed_list)
                known = self._known[key] = self._summarise(self._reach(roots, fed), feeds)
            return known

    def _reach(self, roots: Iterable[int], fed: set[int]) -> set[int]:
        rows = self._rows
        seen = set(roots)
        todo = list(seen)
        pop, push = todo.pop, todo.append
        while todo:
            tensors, ops, controls, _ = rows[pop()]
            if fed and not fed.isdisjoint(tensors):
                ops = tuple(op for op, tensor in zip(ops, tensors, strict=True) if tensor not in fed)
            for op in ops:
                if op not in seen:
                    seen.add(op)
                    push(op)
            for op in controls:
                if op not in seen:
                    seen.add(op)
                    push(op)
        return seen

    def _summarise(self, reached: set[int], feeds: frozenset[str]) -> Touches:
        found: dict[Kind, set[str]] = {kind: set() for kind in Kind}
        placeholders: set[str] = set()
        sources: set[str] = set()
        initialised: set[str] = set()
        changed: set[str] = set()
        calls = False
        rows = self._rows
        references = self._references
        for number in reached:
            _, ops, _, info = rows[number]
            reads = info is None or not info.takes_references
            if reads and references and not references.keys().isdisjoint(ops):
                for op in ops:
                    found[Kind.READ].update(references.get(op, ()))
            if info is None:
                continue
            calls = calls or info.calls
            if info.type in effects.PLACEHOLDERS:
                placeholders.add(f"{info.name}:0")
            for touch in info.touches:
                found[touch.kind].add(str(touch.target))
                if touch.kind is Kind.TAKE:
                    sources.add(touch.label)
                elif touch.kind is Kind.WRITE:
                    (initialised if info.initialises else changed).add(str(touch.target))
        counters = found[Kind.COUNT] - changed
        return Touches(
            feeds=feeds,
            placeholders=frozenset(placeholders),
            variables_read=frozenset(found[Kind.READ]),
            variables_written=frozenset(found[Kind.WRITE] | found[Kind.COUNT]),
            variables_initialised=frozenset(initialised - changed - found[Kind.COUNT]),
            counters=frozenset(counters),
            sources=frozenset(sources),
            enqueues=frozenset(found[Kind.PUT]),
            closes=frozenset(found[Kind.CLOSE]),
            gradients=frozenset(found[Kind.COLLECT]),
            alters=frozenset(found[Kind.ALTER]),
            may_wait=frozenset(found[Kind.WAIT]),
            calls=calls,
            size=len(reached),
        )

    # ------------------------------------------------------------------------------------------ learning

    def _learn(self, graph: tf.Graph, root: tf.Operation) -> None:
        """Makes the rows of an op and of all that it depends on, whatever is fed."""
        rows = self._rows
        if id(root) in rows:
            return
        todo = [root]
        while todo:
            op = todo.pop()
            if id(op) in rows:
                continue
            inputs = op.inputs
            info = self._info(graph, op)
            sources = [tensor.op for tensor in inputs]
            controls = op.control_inputs
            rows[id(op)] = (
                tuple(map(id, inputs)),
                tuple(map(id, sources)),
                tuple(map(id, controls)),
                info,
            )
            if info is not None and info.type in effects.REFERENCES and op.outputs[0].dtype.name.endswith("_ref"):
                self._references[id(op)] = frozenset(self._origins(op.outputs[0]))
            todo.extend(source for source in sources if id(source) not in rows)
            todo.extend(control for control in controls if id(control) not in rows)

    def _info(self, graph: tf.Graph, op: tf.Operation) -> _Info | None:
        op_type: str = op.type
        plain = self._plain.get(op_type)
        if plain is None:
            plain = self._plain[op_type] = self._is_plain(graph, op)
        if plain:
            return None
        touches: list[Touch] = []
        listed = effects.effects_of(op_type)
        calls = False
        if listed is not None:
            touches += self._listed(op, listed)
        elif (functions := self._bodies.called_by(graph, op)) is not None:
            calls = True
            touches += self._called(graph, op, functions)
        elif op_type not in effects.PASSES_ON and op_type not in effects.PLACEHOLDERS:
            touches += self._unlisted(op)
        references = any(argument.is_ref for argument in op.op_def.input_arg)
        return _Info(op.name, op_type, tuple(touches), calls, self._initialises(op), references)

    def _is_plain(self, graph: tf.Graph, op: tf.Operation) -> bool:
        op_type = op.type
        if effects.effects_of(op_type) is not None:
            return False
        if op_type in effects.PLACEHOLDERS or op_type in effects.REFERENCES:
            return False
        if self._bodies.called_by(graph, op) is not None:
            return False
        return not any(
            argument.is_ref or argument.type == tf.resource.as_datatype_enum or argument.type_list_attr
            for argument in op.op_def.input_arg
        )

    def _listed(self, op: tf.Operation, listed: Sequence[Kind]) -> list[Touch]:
        name = op.name
        at = effects.HANDLE_INDEX.get(op.type, 0)
        handles = [at, 1] if op.type in effects.SECOND_HANDLE else [at]
        targets = set()
        for position in handles:
            if position < len(op.inputs) and _is_handle(op.inputs[position]):
                targets |= self._origins(op.inputs[position])
        if not targets:
            shared = _shared_name(op)
            targets = {shared or name}
        return [Touch(kind, target, name) for kind in listed for target in targets]

    def _unlisted(self, op: tf.Operation) -> list[Touch]:
        touches = []
        name = op.name
        for tensor in op.inputs:
            reference = tensor.dtype.name.endswith("_ref")
            if not reference and tensor.dtype != tf.resource:
                continue
            for origin, kind in self._typed_origins(tensor):
                if kind in effects.VARIABLES:
                    # An optimiser's own ops, scatters, random number generators: they read and they write.
                    touches += [Touch(Kind.READ, origin, name), Touch(Kind.WRITE, origin, name)]
                elif kind not in effects.EPHEMERAL:
                    touches.append(Touch(Kind.ALTER, origin, name))
        return touches

    def _called(self, graph: tf.Graph, op: tf.Operation, functions: Sequence[str]) -> list[Touch]:
        name = op.name
        first = effects.FIRST_ARGUMENT.get(op.type, 0 if op.type in functions else None)
        inputs = op.inputs
        handles = [tensor for tensor in inputs if tensor.dtype == tf.resource]
        touches = []
        for function in functions:
            for touch in self._bodies.touches(graph, function):
                label = f"{name}/{touch.label}"
                if isinstance(touch.target, str) and touch.target is not ANY:
                    touches.append(Touch(touch.kind, touch.target, label))
                    continue
                if touch.target is ANY or first is None or not isinstance(touch.target, int):
                    meant = handles
                elif touch.target + first < len(inputs):
                    meant = [inputs[touch.target + first]]
                else:
                    meant = []
                for tensor in meant:
                    for origin, kind in self._typed_origins(tensor):
                        is_variable = kind in effects.VARIABLES
                        if touch.kind in _ABOUT_VARIABLES and not is_variable:
                            if touch.kind is Kind.WRITE and kind not in effects.EPHEMERAL:
                                touches.append(Touch(Kind.ALTER, origin, label))
                            continue
                        touches.append(Touch(touch.kind, origin, label))
        return touches

    def _origins(self, tensor: tf.Tensor) -> set[str]:
        return {name for name, _ in self._typed_origins(tensor)}

    def _typed_origins(self, tensor: tf.Tensor) -> set[tuple[str, str]]:
        """Names and types of the ops that made the handles which may arrive in `tensor`."""
        found: set[tuple[str, str]] = set()
        seen: set[int] = set()
        todo = [tensor.op]
        while todo:
            op = todo.pop()
            if id(op) in seen:
                continue
            seen.add(id(op))
            if op.type in effects.PASSES_ON or op.type in effects.FIRST_ARGUMENT:
                todo += [source.op for source in op.inputs if _is_handle(source)]
            else:
                found.add((_name_of(op), op.type))
        return found

    # -------------------------------------------------------------------------------------- initialisers

    def _collect_initialisers(self, graph: tf.Graph) -> None:
        """Which ops of the graph are initialisers of variables, as far as its collections tell."""
        sizes = tuple((key, len(graph.get_collection_ref(key))) for key in graph.get_all_collection_keys())
        if sizes == self._collected:
            return
        self._collected = sizes
        names = set()
        for key, _ in sizes:
            for item in graph.get_collection_ref(key):
                if isinstance(item, tf.Variable):
                    try:
                        names.add(item.initializer.name)
                    except (AttributeError, ValueError):
                        continue
        self._initialisers = frozenset(names)

    def _initialises(self, op: tf.Operation) -> bool:
        if op.type not in effects.ASSIGNS:
            return False
        if op.name in self._initialisers:
            return True
        source = op.inputs[1].op
        while source.type in ("Identity", "Reshape", "Cast") and source.inputs:
            source = source.inputs[0].op
        return source.type in effects.RESTORES


_ABOUT_VARIABLES = (Kind.READ, Kind.WRITE, Kind.COUNT)


def _is_handle(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype == tf.resource) or bool(tensor.dtype.name.endswith("_ref"))


def _shared_name(op: tf.Operation) -> str:
    try:
        return str(tf.compat.as_str(op.get_attr("shared_name")))
    except ValueError:
        return ""


_indices: weakref.WeakKeyDictionary[tf.Graph, GraphIndex] = weakref.WeakKeyDictionary()
_indices_lock = threading.Lock()
