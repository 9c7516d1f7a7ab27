"""Takes a summary op apart: what must be fetched along with a training step, and what can be computed after it.

A summary op is a small tree: merges, below them the ops that make the protos, below those the tensors that are
shown. Tensors that depend on data (placeholders, queues, iterators), on random numbers or on something that the step
changes have to come from the step itself: they are the *inputs*. Everything above them, and tensors that depend on
nothing but variables and constants, is computed in a second run after the step, into which the inputs are fed. So a
histogram of NaN fails there, and not in the step.

Where the tree cannot be cut (a summary with a control dependency on the train op, a tensor that cannot be fed) the
nearest summary above it is an input itself. Nothing here adds an op: the graph may be finalised.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import effects
from asupervisor.session.analysis import analyse, variable_name

#: Ops that make protos, or write them into a `tf.summary` writer of the graph's own.
MAKERS = frozenset(
    {
        "AudioSummary",
        "AudioSummaryV2",
        "FlushSummaryWriter",
        "HistogramSummary",
        "ImageSummary",
        "ScalarSummary",
        "TensorSummary",
        "TensorSummaryV2",
        "WriteAudioSummary",
        "WriteGraphSummary",
        "WriteHistogramSummary",
        "WriteImageSummary",
        "WriteRawProtoSummary",
        "WriteScalarSummary",
        "WriteSummary",
    }
)
_MERGE = "MergeSummary"
_GLUE = frozenset({"NoOp", "Const"})  # with control inputs: groups, and what `tf.summary.scalar` returns
_BRANCHES = frozenset({"Case", "If", "StatelessCase", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall"})
_LOOPS = frozenset({"Enter", "Exit", "LoopCond", "NextIteration", "RefEnter", "RefExit", "RefNextIteration"})


class Taint(enum.IntFlag):
    """Why something must be computed in the very step."""

    NONE = 0
    CHANCE = 1  # random numbers, and state of a kind that we do not know
    DATA = 2  # placeholders, things that are taken or changed


class SummaryParts:
    """A summary op, taken apart.

    Attributes:
        roots: The ops and tensors that the summary op consists of: usually the one tensor.
        inputs: Tensors to fetch along with the training step and to feed into the second run.
        parts: The summaries of which the merged one consists, each of which can be computed by itself.
        whole: Names of the summaries that are computed in the step, because they cannot be cut off from it.
        taint: What the whole depends on. Without any, it may run by itself at any time.

    Args:
        graph: The graph.
        fetch: The summary op, or a nested structure of ops and tensors.

    Raises:
        ValueError: It does something that can be neither fetched along nor done after the step.
    """

    def __init__(self, graph: tf.Graph, fetch: Any) -> None:
        self._graph = graph
        self.roots = tuple(graph.as_graph_element(item) for item in tf.nest.flatten(fetch))
        self._taints = _taints(graph, self.roots)
        self.taint = Taint.NONE
        inputs: dict[int, tf.Tensor] = {}
        for root in self.roots:
            self.taint |= self._taints[_op(root)]
            found = self._inputs_of(root)
            if found is None:
                if not isinstance(root, tf.Tensor):
                    raise ValueError(
                        f"{root.name!r} cannot ride on a training step: it is an operation that depends on the "
                        "step's data in a way that cannot be cut. Pass a summary tensor as summary_op."
                    )
                found = [root]  # need not be fed, only fetched
            inputs.update((id(tensor), tensor) for tensor in found)
        self.inputs: tuple[tf.Tensor, ...] = tuple(inputs.values())
        self.parts: tuple[Any, ...] = tuple(_parts_of(self.roots))
        self.whole: tuple[str, ...] = tuple(
            sorted(tensor.name for tensor in self.inputs if tensor.op.type in MAKERS | {_MERGE})
        )

    def feeds(self, values: Sequence[Any]) -> dict[tf.Tensor, Any]:
        """The feed_dict of the second run, from the values of the inputs."""
        pairs = zip(self.inputs, values, strict=True)
        return {tensor: value for tensor, value in pairs if self._graph.is_feedable(tensor)}

    def _inputs_of(self, element: Any) -> list[tf.Tensor] | None:
        """The tensors that cut a tensor or an op off from the step; None where that cannot be done."""
        op = _op(element)
        if not self._taints[op]:
            return []
        inside: list[tf.Tensor] | None = None
        if self._can_wait(op):
            inside = self._all_inputs_of([*op.inputs, *op.control_inputs])
        elif op.type == "Merge" and isinstance(element, tf.Tensor) and element.dtype == tf.string:
            outside = self._around_cond(element)
            inside = None if outside is None else self._all_inputs_of(outside)
        if inside is not None:
            return inside
        if isinstance(element, tf.Tensor) and self._graph.is_feedable(element) and _is_data(element):
            return [element]
        return None

    def _can_wait(self, op: tf.Operation) -> bool:
        """Whether an op belongs to the tree above the inputs."""
        if op.type in MAKERS or op.type == _MERGE or op.type in _GLUE:
            return True
        if op.type == "Identity":
            return bool(op.outputs[0].dtype == tf.string)
        return op.type in _BRANCHES and _makes_summaries(self._graph, op) and not _own_taint(self._graph, op)

    def _all_inputs_of(self, elements: Iterable[Any]) -> list[tf.Tensor] | None:
        found: list[tf.Tensor] = []
        for element in elements:
            inputs = self._inputs_of(element)
            if inputs is None:
                return None
            found += inputs
        return found

    def _around_cond(self, merge: tf.Tensor) -> list[Any] | None:
        """What goes into a `tf.cond` of the old kind; None where it makes no summary or does more than that."""
        outside: list[Any] = []
        depths: dict[tf.Operation, int] = {}
        todo: list[tuple[Any, int]] = [(tensor, 1) for tensor in merge.op.inputs]
        makes_summaries = False
        while todo:
            element, depth = todo.pop()
            op = _op(element)
            if depths.setdefault(op, depth) != depth:
                return None
            if op.type in _LOOPS or _own_taint(self._graph, op):
                return None
            makes_summaries = makes_summaries or op.type in MAKERS
            inner = depth + {"Switch": -1, "RefSwitch": -1, "Merge": 1}.get(op.type, 0)
            for source in (*op.inputs, *op.control_inputs):
                if inner == 0:
                    outside.append(source)
                elif _op(source) not in depths:
                    todo.append((source, inner))
        return outside if makes_summaries else None


_FED = effects.PLACEHOLDERS | {"PlaceholderWithDefault"}


def _op(element: Any) -> Any:
    return element if isinstance(element, tf.Operation) else element.op


def _is_data(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.base_dtype not in (tf.resource, tf.variant))


def _parts_of(elements: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for element in elements:
        op = _op(element)
        if op.type == _MERGE:
            found += _parts_of(list(op.inputs))
        elif op.type in _GLUE and op.control_inputs:
            found += _parts_of(op.control_inputs)
        else:
            found.append(element)
    return found


def _taints(graph: tf.Graph, roots: Sequence[Any]) -> dict[tf.Operation, Taint]:
    """The taint of every op that the roots depend on: its own, and that of all that it depends on."""
    users: dict[tf.Operation, list[tf.Operation]] = {}
    todo = list(dict.fromkeys(_op(root) for root in roots))
    taints = dict.fromkeys(todo, Taint.NONE)
    spreading = []
    plain: dict[str, bool] = {}
    while todo:
        op = todo.pop()
        op_type = op.type
        is_plain = plain.get(op_type)
        if is_plain is None:
            is_plain = plain[op_type] = _only_computes(op)
        if not is_plain and (own := _own_taint(graph, op)):
            spreading.append((op, own))
        for source in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            users.setdefault(source, []).append(op)
            if source not in taints:
                taints[source] = Taint.NONE
                todo.append(source)
    while spreading:
        op, taint = spreading.pop()
        if taint & ~taints[op]:
            taints[op] |= taint
            spreading += [(user, taint) for user in users.get(op, ())]
    return taints


def _only_computes(op: tf.Operation) -> bool:
    """Whether no op of this type adds anything of its own; asked once for each type, not for each op."""
    if op.type in _FED or effects.effects_of(op.type) is not None or _functions_of(op):
        return False
    definition = op.op_def
    return not definition.is_stateful and not _takes_handles(definition)


def _takes_handles(definition: Any) -> bool:
    return any(argument.is_ref or argument.type == tf.resource.as_datatype_enum for argument in definition.input_arg)


def _own_taint(graph: tf.Graph, op: tf.Operation) -> Taint:
    """What an op adds of its own."""
    op_type = op.type
    if op_type in MAKERS:
        return Taint.NONE
    if op_type in _FED:
        return Taint.DATA
    listed = effects.effects_of(op_type)
    if listed is not None:
        return Taint.DATA if any(kind is not effects.Kind.READ for kind in listed) else Taint.NONE
    if op_type in effects.VARIABLES or op_type in effects.PASSES_ON:
        return Taint.NONE
    if _functions_of(op):
        # Its control inputs come along: they taint it anyway.
        touches = analyse(graph, [op], list(op.inputs))
        effect = (
            touches.sources
            or touches.variables_written
            or touches.enqueues
            or touches.closes
            or touches.alters
            or touches.placeholders
            or touches.may_wait
        )
        return Taint.DATA if effect else Taint.NONE
    if _takes_handles(op.op_def):
        if all(_op(tensor).type in effects.EPHEMERAL for tensor in op.inputs if not _is_data(tensor)):
            return Taint.NONE
        return Taint.DATA
    if op.op_def.is_stateful and all(_is_data(tensor) for tensor in op.outputs):
        return Taint.CHANCE
    return Taint.NONE


def _functions_of(op: tf.Operation) -> list[str]:
    names: list[str] = []
    for attr in op.op_def.attr:
        if attr.type == "func":
            names.append(op.node_def.attr[attr.name].func.name)
        elif attr.type == "list(func)":
            names += [function.name for function in op.node_def.attr[attr.name].list.func]
    return names


def _makes_summaries(graph: tf.Graph, op: tf.Operation) -> bool:
    """Whether a branch, or a function that it calls, makes summaries."""
    todo, seen = _functions_of(op), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        definition = _tf.function_def(graph, name)
        for node in () if definition is None else definition.node_def:
            if node.op in MAKERS:
                return True
            todo += [attr.func.name for attr in node.attr.values() if attr.HasField("func")]
            todo += [function.name for attr in node.attr.values() for function in attr.list.func]
    return False


def step_writers(graph: tf.Graph, step_name: str) -> int:
    """How many ops of a graph advance its global step; initialisers and restores do not count."""
    found = 0
    for op in graph.get_operations():
        if not op.type.startswith(("Assign", "CountUpTo", "ResourceCountUpTo")) or not op.inputs:
            continue
        target = op.inputs[0]
        if _is_data(target) and target.dtype == target.dtype.base_dtype:  # neither a handle nor a reference
            continue
        if variable_name(target) == step_name:
            adds = op.type not in ("Assign", "AssignVariableOp")
            found += adds or step_name in analyse(graph, [op.inputs[1]]).variables_read
    return found
