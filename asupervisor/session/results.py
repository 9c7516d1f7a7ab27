"""From the values that a run fetched to the structure that was asked for.

A compiled callable hands out TensorFlow's own buffers: an array fetched from a variable changes with the next step,
writing into a fetched constant changes it for all later runs, ``identity(feed)`` is the fed array itself.
`Session.run` copies what is shared at that instant. From here that instant cannot be seen, so whatever does not own
its memory is copied, except where the graph shows that nobody else can hold the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from asupervisor import _tf

#: Kernels that write their result into a buffer of their own, or into that of an input which nobody else holds.
_FRESH = {
    "AddV2",
    "AvgPool",
    "BatchMatMulV2",
    "BiasAdd",
    "Conv2D",
    "Conv2DBackpropFilter",
    "Conv2DBackpropInput",
    "DepthwiseConv2dNative",
    "Elu",
    "Exp",
    "FusedBatchNormV3",
    "LogSoftmax",
    "MatMul",
    "MaxPool",
    "Mul",
    "Relu",
    "Relu6",
    "Selu",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
}
#: Ops that compute from their inputs and keep none of them: taking a fresh buffer, they do not share it.
_KEEPS_NOTHING = _FRESH | {
    "ArgMax",
    "BiasAddGrad",
    "EluGrad",
    "Equal",
    "FusedBatchNormGradV3",
    "InTopKV2",
    "MaxPoolGrad",
    "Relu6Grad",
    "ReluGrad",
    "Shape",
    "SigmoidGrad",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SquaredDifference",
    "TanhGrad",
}
_SOURCES = {"Placeholder", "ReadVariableOp"}
_DEPTH = 64


def may_share(tensor: tf.Tensor) -> bool:
    """Whether a fetched array of this tensor may be somebody else's memory as well.

    No only where its op always writes a new buffer (also after TensorFlow's graph rewriting, which replaces what
    is constant by a constant and ``x * 1`` by ``x``: so nothing that comes from a constant counts) and where no
    other op keeps it.
    """
    if tensor.dtype == tf.string:
        return False
    if tensor.shape.rank == 0 and tensor.dtype not in (tf.resource, tf.variant):
        return False  # a NumPy scalar
    if tensor.op.type not in _FRESH or tensor.value_index:
        return True
    if any(op.type not in _KEEPS_NOTHING for op in tensor.consumers()):
        return True
    return not _computed(tensor, _DEPTH, {})


def _computed(tensor: tf.Tensor, depth: int, known: dict[int, bool]) -> bool:
    """Whether the tensor is computed from placeholders and variables alone, by ops of the list."""
    found = known.get(id(tensor))
    if found is None:
        op = tensor.op
        if op.type in _SOURCES:
            found = True
        elif op.type in _FRESH and depth:
            found = all(_computed(source, depth - 1, known) for source in op.inputs)
        else:
            found = False
        known[id(tensor)] = found
    return found


Build = Callable[[Sequence[Any]], Any]


def from_compiled(structure: _tf.FetchStructure, raw: tf.compat.v1.Session) -> Build:
    """Builds results from a compiled callable's values: those of the fetched tensors, without the operations."""
    source = _Source()
    names: list[str] = []
    taken = 0
    for number, element in enumerate(structure.elements):
        if isinstance(element, tf.Operation):
            names.append("None")
            continue
        name = f"a{number}"
        source.line(f"{name} = v[{taken}]")
        taken += 1
        if may_share(element):
            source.line(f"if {name}.base is not None: {name} = {name}.copy()")
        if number in structure.handles:
            wrap = source.constant(_tf.tensor_handle)
            dtype, session = source.constant(structure.handles[number]), source.constant(raw)
            source.line(f"{name} = {wrap}({name}, {dtype}, {session})")
        names.append(name)
    return source.build(structure.root, names)


def from_session(structure: _tf.FetchStructure) -> Build:
    """Builds results from what `Session.run` gives for the list of the unique elements."""
    return _Source().build(structure.root, [f"v[{number}]" for number in range(len(structure.elements))])


class _Source:
    """Python source of one build function: one line per place of the result, however deep it is nested."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {}

    def line(self, text: str) -> None:
        self._lines.append(text)

    def constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def build(self, root: _tf.Leaf | _tf.Node, names: Sequence[str]) -> Build:
        self._lines.append(f"return {self._place(root, names)}")
        text = "def build(v):\n" + "".join(f"    {line}\n" for line in self._lines)
        exec(compile(text, "<results of a plan>", "exec"), self._constants)
        build: Build = self._constants.pop("build")
        return build

    def _place(self, place: _tf.Leaf | _tf.Node, names: Sequence[str]) -> str:
        if isinstance(place, _tf.Leaf):
            if place.contract is None:
                return names[place.positions[0]]
            values = ", ".join(names[position] for position in place.positions)
            return f"{self.constant(place.contract)}([{values}])"
        parts = [self._place(part, names) for part in place.parts]
        name = f"p{len(self._lines)}"
        self.line(f"{name} = {self._node(place, parts)}")
        return name

    def _node(self, place: _tf.Node, parts: Iterable[str]) -> str:
        if place.keys is not None:
            pairs = [(self.constant(key), part) for key, part in zip(place.keys, parts, strict=True)]
            if place.kind is dict:
                return "{" + ", ".join(f"{key}: {part}" for key, part in pairs) + "}"
            items = "".join(f"({key}, {part}), " for key, part in pairs)
            return f"{self.constant(place.make)}(iter(({items})))"
        if place.kind is list:
            return f"[{', '.join(parts)}]"
        if place.kind is tuple:
            return "(" + "".join(f"{part}, " for part in parts) + ")"
        return f"{self.constant(place.make)}({', '.join(parts)})"
