"""Reading checkpoints: is it whole, does it fit this model, and putting it into a session.

Everything here blocks. `read_back` opens a small session of its own; the rest uses the session that is restored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor._timeouts import for_long
from asupervisor.errors import CheckpointDamaged, CheckpointMismatch, telling_line

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # the mark of tf.train.Checkpoint's format
_BATCH_BYTES = 64 << 20
# What a damaged file makes TensorFlow raise: a cut one OutOfRange or (its reader) IndexError, an altered one
# DataLoss, an index of garbage several others.
_READ_ERRORS = (tf.errors.OpError, IndexError, ValueError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class Contents:
    """Names, shapes and dtypes in a checkpoint."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, tf.DType]


def contents(prefix: str) -> Contents:
    """What a checkpoint's index lists.

    Raises:
        CheckpointDamaged: The index cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        return Contents(reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map())
    except _READ_ERRORS as error:
        raise CheckpointDamaged(prefix, _in_one_line(error)) from error


def value_in(prefix: str, name: str) -> Any:
    """The value of one variable in a checkpoint; None where it does not hold it."""
    try:
        reader = tf.train.load_checkpoint(prefix)
        return reader.get_tensor(name) if reader.has_tensor(name) else None
    except _READ_ERRORS:
        return None


def read_back(prefix: str) -> None:
    """Read every tensor, so that TensorFlow checks each one's own checksum; about as fast as a checksum of the files.

    Args:
        prefix: The checkpoint.

    Raises:
        CheckpointDamaged: It cannot be read.
    """
    for op, session in _batches(prefix, contents(prefix)):
        try:
            session.run(op)  # an op, not its outputs: nothing is copied to Python
        except _READ_ERRORS as error:
            raise CheckpointDamaged(prefix, _in_one_line(error)) from error


def nonfinite_in(prefix: str, names: Iterable[str]) -> list[str]:
    """Which of the named tensors hold NaN or infinite values.

    Args:
        prefix: The checkpoint.
        names: Names of trainable variables; slots (whatever is named below one of them) count as well.

    Raises:
        CheckpointDamaged: It cannot be read.
    """
    stems = set(names)
    index = contents(prefix)
    found = []
    for name, dtype in sorted(index.dtypes.items()):
        parts = name.split("/")
        below = any("/".join(parts[:depth]) in stems for depth in range(1, len(parts) + 1))
        if not below or not (dtype.is_floating or dtype.is_complex):
            continue
        for value in read_tensors(prefix, [(name, "", dtype)]):
            if not np.all(np.isfinite(np.asarray(value, np.complex128 if dtype.is_complex else np.float64))):
                found.append(name)
    return found


def read_tensors(prefix: str, specs: Sequence[tuple[str, str, tf.DType]]) -> list[Any]:
    """Values from a checkpoint: name, slice and dtype of each.

    Raises:
        CheckpointDamaged: It cannot be read.
    """
    if not specs:
        return []
    graph = tf.Graph()
    with graph.as_default():
        names, slices, dtypes = zip(*specs, strict=True)
        tensors = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=list(names), shape_and_slices=list(slices), dtypes=list(dtypes)
        )
        try:
            with tf.compat.v1.Session(graph=graph) as session:
                return list(session.run(tensors))
        except _READ_ERRORS as error:
            raise CheckpointDamaged(prefix, _in_one_line(error)) from error


def _batches(prefix: str, index: Contents) -> Iterable[tuple[tf.Operation, tf.compat.v1.Session]]:
    """Ops that read a part of the tensors each: not the whole model is in memory once more."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(index.shapes):
        size += math.prod(index.shapes[name]) * max(1, index.dtypes[name].size or 1)
        groups[-1].append(name)
        if size >= _BATCH_BYTES:
            groups.append([])
            size = 0
    graph = tf.Graph()
    with graph.as_default():
        ops = [
            tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=group,
                shape_and_slices=[""] * len(group),
                dtypes=[index.dtypes[name] for name in group],
            )[0].op
            for group in groups
            if group
        ]
    with tf.compat.v1.Session(graph=graph) as session:
        for op in ops:
            yield op, session


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {telling_line(error)[:300]}"


# ------------------------------------------------------------------------------------------ does it fit?


@dataclass(slots=True)
class Action:
    """One op that gives a variable (or a table) its value from a checkpoint.

    Attributes:
        op: The op.
        needs: Outputs of RestoreV2 ops that it uses.
        reshapes: Whether values are brought into another shape.
        target: Static shape of the variable that it assigns, where there is one.
    """

    op: tf.Operation
    needs: list[Spec] = field(default_factory=list)
    reshapes: bool = False
    target: tf.TensorShape | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """What a model reads from a checkpoint into one tensor.

    Attributes:
        name: The tensor's name in the checkpoint.
        slice: Which part of it, in TensorFlow's notation, or an empty string.
        dtype: The dtype that the model has.
        tensor: The output of the RestoreV2 op.
    """

    name: str
    slice: str
    dtype: tf.DType
    tensor: tf.Tensor


def actions_of(graph: tf.Graph, saver: Any) -> list[Action] | None:
    """What `saver.restore` does, op by op, or None if it cannot be told from the graph.

    Args:
        graph: The graph.
        saver: Any saver object.
    """
    saver_def = getattr(saver, "saver_def", None)
    if saver_def is None or not saver_def.restore_op_name:
        return None
    try:
        todo = [graph.get_operation_by_name(saver_def.restore_op_name)]
    except (KeyError, ValueError):
        return None
    actions = []
    seen: set[tf.Operation] = set()
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "NoOp":  # groups
            todo.extend(op.control_inputs)
        else:
            actions.append(_action(op))
    if any(not action.needs for action in actions):
        return None  # restored by other means: a builder of the user's own
    return sorted(actions, key=lambda action: action.op.name)


def _action(op: tf.Operation) -> Action:
    action = Action(op)
    if op.type in ("Assign", "AssignVariableOp") and op.inputs:
        variable = op.inputs[0]
        action.target = variable.shape if op.type == "Assign" else _handle_shape(variable)
    todo = list(op.inputs)
    seen: set[str] = set()
    while todo:
        tensor = todo.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        if tensor.op.type == "RestoreV2":
            spec = _spec(tensor)
            if spec is not None:
                action.needs.append(spec)
        elif tensor.op.type not in ("VarHandleOp", "Variable", "VariableV2"):
            action.reshapes |= tensor.op.type == "Reshape"
            todo.extend(tensor.op.inputs)
    return action


def _handle_shape(handle: tf.Tensor) -> tf.TensorShape | None:
    try:
        return tf.TensorShape(handle.op.get_attr("shape"))
    except ValueError:
        return None


def _spec(tensor: tf.Tensor) -> Spec | None:
    names, slices = (_constant(source) for source in tensor.op.inputs[1:3])
    if names is None or slices is None:
        return None
    index = tensor.value_index
    return Spec(names[index], slices[index], tensor.dtype.base_dtype, tensor)


def _constant(tensor: tf.Tensor) -> list[str] | None:
    if tensor.op.type != "Const":
        return None
    values = tf.make_ndarray(tensor.op.get_attr("value"))
    return [bytes(value).decode() for value in np.ravel(values)]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a checkpoint and a model go together.

    Attributes:
        missing: What the model reads and the checkpoint does not hold.
        unexpected: What the checkpoint holds and the model does not read.
        different: Other shape or dtype, in words.
        common: How many names both have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]
    common: int

    @property
    def whole(self) -> bool:
        """Whether the model gets all that it reads."""
        return not self.missing and not self.different

    def restorable(self, partial: bool | None) -> bool:
        """Whether it may be restored.

        Args:
            partial: True: what fits is enough. False: the model must get all that it reads. None: a model that grew
                is fine (it reads more than the checkpoint holds, and the checkpoint holds nothing else), a
                different model is not.
        """
        if self.whole:
            return True
        if partial is None:
            return not self.different and not self.unexpected and self.common > 0
        return partial and self.common > 0


def fit(actions: Sequence[Action], index: Contents) -> Fit:
    """Compare what a model reads with what a checkpoint holds."""
    read: set[str] = set()
    missing: dict[str, str] = {}
    different: dict[str, str] = {}
    for action in actions:
        for spec in action.needs:
            read.add(spec.name)
            if spec.name not in index.shapes:
                missing[spec.name] = f"{spec.name} {_words(spec.dtype, _model_shape(action, spec))}"
                continue
            shape, dtype = index.shapes[spec.name], index.dtypes[spec.name]
            wanted = _model_shape(action, spec)
            if dtype != spec.dtype or not _compatible(wanted, shape, action.reshapes):
                different[spec.name] = (
                    f"{spec.name} is {_words(dtype, shape)} in the checkpoint and "
                    f"{_words(spec.dtype, wanted)} in the model"
                )
    unexpected = {
        name: f"{name} {_words(index.dtypes[name], shape)}" for name, shape in index.shapes.items() if name not in read
    }
    return Fit(
        tuple(missing[name] for name in sorted(missing)),
        tuple(unexpected[name] for name in sorted(unexpected)),
        tuple(different[name] for name in sorted(different)),
        len(read & index.shapes.keys()),
    )


def _model_shape(action: Action, spec: Spec) -> list[int | None] | None:
    if spec.slice:
        # "4 10 0,2:-": the whole tensor's shape, then the slice of each dimension.
        return [int(size) for size in spec.slice.split()[:-1]]
    if action.target is None or action.target.rank is None or len(action.needs) != 1:
        return None
    return list(action.target.as_list())


def _compatible(wanted: list[int | None] | None, found: list[int], reshapes: bool) -> bool:
    if wanted is None:
        return True
    if reshapes:
        return None in wanted or math.prod(n for n in wanted if n is not None) == math.prod(found)
    return bool(tf.TensorShape(wanted).is_compatible_with(found))


def _words(dtype: tf.DType, shape: Sequence[int | None] | None) -> str:
    sizes = "of unknown shape" if shape is None else str([("?" if n is None else n) for n in shape]).replace("'", "")
    return f"{dtype.name} {sizes}"


def mismatch(prefix: str, found: Fit) -> CheckpointMismatch:
    """The error that tells all of it."""
    return CheckpointMismatch(prefix, found.missing, found.unexpected, found.different)


def object_based(prefix: str, found: Fit) -> CheckpointMismatch:
    """The error where a checkpoint of objects, not of variables by their names, meets a graph that is finalised."""
    return CheckpointMismatch(
        prefix,
        found.missing,
        (),
        (
            "the format: tf.train.Checkpoint or a CheckpointManager wrote it, which name values by the objects that "
            "hold them, and a saver can restore that only while the graph is not finalised. Convert it once: build "
            "the model, restore it by tf.compat.v1.train.Saver().restore(session, path) in a plain session, save it "
            "by that saver's save() into another directory, and begin from there by init_from",
        ),
    )


# ------------------------------------------------------------------------------------------ restoring


def restore_all(raw: tf.compat.v1.Session, saver: Any, prefix: str) -> None:
    """What `saver.restore` does, for as long as it takes; on the device thread.

    Args:
        raw: The session.
        saver: The saver.
        prefix: The checkpoint.
    """
    options, saver_def = for_long(raw), getattr(saver, "saver_def", None)
    if options is None or saver_def is None or type(saver) is not tf.compat.v1.train.Saver:
        saver.restore(raw, prefix)
    else:
        raw.run(saver_def.restore_op_name, {saver_def.filename_tensor_name: prefix}, options=options)


def restore_part(raw: tf.compat.v1.Session, prefix: str, actions: Sequence[Action], index: Contents) -> None:
    """Restore what fits, through the saver's own ops: values are read here and fed to them; on the device thread.

    Works on a finalised graph. A variable whose value is missing or of another shape or dtype is not touched.

    Args:
        raw: The session.
        prefix: The checkpoint.
        actions: What `actions_of` gave.
        index: What `contents` gave.
    """
    fitting = [action for action in actions if fit([action], index).whole]
    for action in fitting:  # one at a time: never two copies of the model in memory
        values = read_tensors(prefix, [(spec.name, spec.slice, spec.dtype) for spec in action.needs])
        feeds = {spec.tensor: value for spec, value in zip(action.needs, values, strict=True)}
        # The op may be placed behind a RestoreV2 of many outputs; feeding its own ones means that it does not run.
        raw.run(action.op, feeds, options=for_long(raw))


def uninitialized(raw: tf.compat.v1.Session, variables: Sequence[Any]) -> list[Any]:
    """Which variables have no value; on the device thread, without adding ops to the graph.

    Args:
        raw: The session.
        variables: Variables of its graph.
    """
    by_op = {_read_op(raw.graph, variable): variable for variable in variables}
    missing: list[Any] = []
    # One run tells that all of them have a value, which is the rule. Otherwise halves are searched: a run of its own
    # for each of a thousand variables would take seconds.
    todo = [list(by_op)] if by_op else []
    while todo:
        ops = todo.pop()
        try:
            raw.run(ops)  # ops, not values: nothing is copied to Python
        except tf.errors.FailedPreconditionError:
            if len(ops) == 1:
                missing.append(by_op[ops[0]])
            else:
                todo += [ops[len(ops) // 2 :], ops[: len(ops) // 2]]
    return missing


def _read_op(graph: tf.Graph, variable: Any) -> tf.Operation:
    op = graph.as_graph_element(variable, allow_operation=False).op
    if op.type in ("Variable", "VariableV2"):
        # The op of a ref variable may run without a value; its read, made with the variable, may not.
        return graph.get_operation_by_name(f"{op.name}/read")
    return op


def initialize(raw: tf.compat.v1.Session, variables: Sequence[Any], feed_dict: dict[Any, Any] | None = None) -> None:
    """Run the initialisers of exactly these variables; on the device thread.

    One whose initial value reads another one of them is run after it.

    Args:
        raw: The session.
        variables: Variables of its graph.
        feed_dict: What their initial values need.
    """
    waiting = list(variables)
    while waiting:
        again = []
        failure: tf.errors.OpError | None = None
        for variable in waiting:
            try:
                raw.run(variable.initializer, feed_dict)
            except tf.errors.FailedPreconditionError as error:
                again.append(variable)
                failure = error
        if failure is not None and len(again) == len(waiting):
            raise failure
        waiting = again
