"""What the bodies of a graph's functions do: `tf.function`, cond and while branches, dataset functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import effects
from asupervisor.session.effects import Kind

#: The target of a touch of which only this much is known: it is one of the handles that the call was given.
ANY: Final = "<any>"


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """One thing that one op does.

    Attributes:
        kind: What is done.
        target: To what, by name. In a function's body also the number of the argument that is the handle, or
            `ANY`.
        label: The op that does it, with the calls that lead there.
    """

    kind: Kind
    target: str | int
    label: str


class FunctionBodies:
    """The functions of one graph; each body is read once. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._touches: dict[str, frozenset[Touch]] = {}
        self._callers: dict[str, bool] = {}

    def called_by(self, graph: tf.Graph, op: tf.Operation) -> tuple[str, ...] | None:
        """Names of the functions that an op calls; None where its type cannot call any."""
        op_type = op.type
        calls = self._callers.get(op_type)
        if calls is None:
            calls = any(attr.type in ("func", "list(func)") for attr in op.op_def.attr)
            if not calls and _tf.function_def(graph, op_type) is not None:
                calls = True
            self._callers[op_type] = calls
        if not calls:
            return None
        return _functions_in(op_type, op.node_def.attr) or (op_type,)

    def touches(self, graph: tf.Graph, function: str) -> frozenset[Touch]:
        """What the body of a function does, the functions that it calls included."""
        known = self._touches.get(function)
        if known is None:
            self._touches[function] = frozenset()  # a function that calls itself adds nothing new
            known = self._touches[function] = frozenset(self._read(graph, function))
        return known

    def _read(self, graph: tf.Graph, function: str) -> list[Touch]:
        definition = _tf.function_def(graph, function)
        if definition is None:
            # Not in the graph's library: then it may do anything to the handles that it is given.
            return [
                Touch(Kind.READ, ANY, function),
                Touch(Kind.WRITE, ANY, function),
                Touch(Kind.WAIT, function, function),
            ]
        body = _Body(definition)
        touches: list[Touch] = []
        for node in definition.node_def:
            listed = effects.effects_of(node.op)
            if listed is not None:
                targets = body.listed_targets(node)
                touches += [Touch(kind, target, node.name) for kind in listed for target in targets]
                continue
            called = _functions_in(node.op, node.attr)
            if not called and _tf.function_def(graph, node.op) is not None:
                called = (node.op,)
            if called:
                touches += self._through_call(graph, body, node, called)
            elif node.op not in effects.PASSES_ON:
                for position in range(len(node.input)):
                    for target in body.handles(node, position):
                        touches += [Touch(Kind.READ, target, node.name), Touch(Kind.WRITE, target, node.name)]
        return touches

    def _through_call(self, graph: tf.Graph, body: _Body, node: Any, functions: Sequence[str]) -> list[Touch]:
        first = effects.FIRST_ARGUMENT.get(node.op, 0 if node.op in functions else None)
        everything = {target for at in range(len(node.input)) for target in body.handles(node, at)}
        touches = []
        for function in functions:
            for touch in self.touches(graph, function):
                label = f"{node.name}/{touch.label}"
                if isinstance(touch.target, str) and touch.target is not ANY:
                    touches.append(Touch(touch.kind, touch.target, label))
                elif touch.target is ANY or first is None or not isinstance(touch.target, int):
                    touches += [Touch(touch.kind, target, label) for target in everything]
                else:
                    touches += [Touch(touch.kind, target, label) for target in body.handles(node, touch.target + first)]
        return touches


class _Body:
    """Finds the handles in one function's body."""

    def __init__(self, definition: Any) -> None:
        self._nodes = {node.name: node for node in definition.node_def}
        self._arguments = {
            argument.name: (number, argument.type == tf.resource.as_datatype_enum)
            for number, argument in enumerate(definition.signature.input_arg)
        }

    def handles(self, node: Any, position: int) -> set[str | int]:
        """What may arrive at an input, if that is a handle: numbers of arguments, or names of variables."""
        if position >= len(node.input):
            return set()
        found: set[str | int] = set()
        seen = set()
        todo = [node.input[position]]
        while todo:
            text = todo.pop()
            source = text.split(":")[0]
            if text.startswith("^") or source in seen:
                continue
            seen.add(source)
            if source in self._arguments:
                number, is_resource = self._arguments[source]
                if is_resource:
                    found.add(number)
                continue
            origin = self._nodes.get(source)
            if origin is None:
                continue
            if origin.op in effects.PASSES_ON or origin.op in effects.FIRST_ARGUMENT:
                todo += origin.input
            elif origin.op in effects.VARIABLES:
                found.add(_shared(origin) or origin.name)
        return found

    def listed_targets(self, node: Any) -> set[str | int]:
        at = effects.HANDLE_INDEX.get(node.op, 0)
        targets = self.handles(node, at)
        if node.op in effects.SECOND_HANDLE:
            targets |= self.handles(node, 1)
        if targets:
            return targets
        # A queue, a table or a reader that lives in the body, or an op that needs no handle.
        made_by = node.input[at].split(":")[0] if at < len(node.input) else ""
        origin = self._nodes.get(made_by)
        return {(_shared(origin) if origin is not None else _shared(node)) or made_by or node.name}


def _shared(node: Any) -> str:
    return str(tf.compat.as_str(node.attr["shared_name"].s)) if "shared_name" in node.attr else ""


def _functions_in(op_type: str, attrs: Any) -> tuple[str, ...]:
    names: list[str] = []
    for attr in attrs.values():
        if attr.HasField("func"):
            names.append(attr.func.name)
        elif attr.HasField("list"):
            names += [function.name for function in attr.list.func]
    return tuple(names)
