"""A state of all saved variables, taken between two steps and written while training goes on.

How a snapshot is consistent. It is one `Session.run` on the device thread, and that thread runs every training step
as well: nothing that writes a variable runs beside it (a feeder on a side thread only enqueues). It reads exactly
the tensors that the Saver's own SaveV2 op reads, and the global step in the same run: the name of the checkpoint is
the step inside.

Why nothing is torn afterwards. A ref variable is written in place, a table's export may hand out its live buffer, and a
resource variable that somebody else holds is copied by the very step that writes it. So everything is copied at once:

* **Large tensors of known shape** into *holders*, variables of our own. The copy is one pass over memory if the
  holder has its memory already; `reserve`, on a side thread, gives it to the holders beforehand. Fresh memory costs
  more than ten such passes where the system is slow to hand out pages (400 ms for 256 MB on the machine that this was
  measured on, against 30 ms to copy into pages that are there), which is why no session handle is used that would
  share the buffers of resource variables: the next step would pay that price. Without `reserve` a snapshot is as
  consistent, and slower.
* **The rest** (small tensors, strings, tables) is fetched, which copies, and fed when it is written.

There is one set of holders, so one snapshot lives at a time: `keeper.py` sees to that. After the write `release`
empties them: the memory is given back until the next `reserve`.

`tests/checkpoint/test_snapshot.py` takes snapshots beside a step that changes variables one after another, and of
every kind of saveable; it breaks as soon as one of them shares memory with the model.

The ops live in a name scope of their own, in no collection, and are left out of what is exported. They are found by
name, so that a second supervisor on a graph that is finalised uses those of the first; a graph that was finalised
without them is saved by `saver.save` between two steps.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

_SCOPE = "asupervisor_snapshot"
_SCOPED = re.compile(rf"^{_SCOPE}(_\d+)?/")
_CHECKED_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)
_FIXED_DTYPES = (
    *_CHECKED_DTYPES, tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
)  # fmt: skip
# A holder takes ten ops, and a fetch a copy in one thread: this is where the one begins to cost less than the other.
_HOLDER_BYTES = 256 << 10
_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[str, str | None], SnapshotOps]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SnapshotOps:
    """Names of what `add_snapshot_ops` added for one saver. Names only: the cache must not keep a graph alive.

    Attributes:
        scope: Name scope of all of them, with its slash.
        fetched: Tensors of the model that are fetched.
        fed: Placeholders for their values, in the same order.
        copy: Op that copies the large tensors into their holders.
        reserve: Op that gives the holders their memory, or None where there are none.
        origin: Placeholder that `reserve` is fed: zero.
        step: Tensor with the global step, or None.
        prefix: Placeholder for the prefix to write to.
        write: Op that writes holders and fed values.
        release: Op that gives the holders' memory back.
        watched: Trainable variables and their slots, by op name: where their value is. A number is an index into
            `fetched`; a name is a holder, and the next one a tensor that is not finite if anything in it is not.
        bytes: Size of all tensors, as far as their static shapes tell.
    """

    scope: str
    fetched: tuple[str, ...]
    fed: tuple[str, ...]
    copy: str
    reserve: str | None
    origin: str
    step: str | None
    prefix: str
    write: str
    release: str
    watched: tuple[tuple[str, int | tuple[str, str]], ...]
    bytes: int


def add_snapshot_ops(graph: tf.Graph, saver: Any, global_step: Any = None) -> SnapshotOps | None:
    """Add the ops of a snapshot to a graph, before it is finalised.

    They enter no collection and are not exported (see `user_graph_def`). Called again for the same saver it gives
    the ops that are there. Call it last: what is added to the graph afterwards is not affected, but a global step
    is only looked for now.

    Args:
        graph: The graph.
        saver: A `tf.compat.v1.train.Saver`. One that does more than a plain Saver does (a subclass, a sharded one,
            one with a builder or a format of its own) gets no ops and is called as ``saver.save(...)``.
        global_step: The tensor or variable whose value names the checkpoints, or None.

    Returns:
        Their names, or None where `saver.save` has to be used.
    """
    ops = snapshot_ops_of(graph, saver, global_step)
    if ops is not None or graph.finalized:
        return ops
    save = plain_save_op(graph, saver)
    if save is None:
        return None
    with graph.as_default():
        ops = _build(graph, save, _as_tensor(graph, global_step))
    with _lock:
        _known.setdefault(graph, {})[_key(graph, saver, global_step)] = ops
    return ops


def snapshot_ops_of(graph: tf.Graph, saver: Any, global_step: Any = None) -> SnapshotOps | None:
    """The ops that `add_snapshot_ops` added earlier for this saver, or None."""
    if getattr(saver, "saver_def", None) is None:
        return None
    with _lock:
        return _known.get(graph, {}).get(_key(graph, saver, global_step))


def _key(graph: tf.Graph, saver: Any, global_step: Any) -> tuple[str, str | None]:
    step = _as_tensor(graph, global_step)
    return saver.saver_def.save_tensor_name, None if step is None else step.name


def _as_tensor(graph: tf.Graph, global_step: Any) -> tf.Tensor | None:
    # Not `value()` or `read_value()`, which would add an op: this is the read that the variable came with.
    return None if global_step is None else graph.as_graph_element(global_step, allow_operation=False)


def plain_save_op(graph: tf.Graph, saver: Any) -> tf.Operation | None:
    """The one SaveV2 op of a plain Saver, or None if saving with this saver means more than running that op."""
    if type(saver) is not tf.compat.v1.train.Saver or "save" in vars(saver):
        return None
    saver_def = saver.saver_def
    if saver_def is None or saver_def.version != tf.compat.v1.train.SaverDef.V2:
        return None
    try:
        todo = [graph.get_tensor_by_name(saver_def.save_tensor_name).op]
    except (KeyError, ValueError):
        return None
    found: list[tf.Operation] = []
    seen: set[tf.Operation] = set()
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "SaveV2":
            found.append(op)
            todo.extend(tensor.op for tensor in op.inputs[:3])
            todo.extend(op.control_inputs)
        elif op.type in ("Identity", "Placeholder", "PlaceholderWithDefault", "Const", "NoOp"):
            todo.extend(tensor.op for tensor in op.inputs)
            todo.extend(op.control_inputs)
        else:  # a sharded saver, or a builder that does something of its own
            return None
    return found[0] if len(found) == 1 else None


def _variable_op(tensor: tf.Tensor) -> tf.Operation | None:
    op = tensor.op
    while op.type in ("Identity", "ReadVariableOp") and op.inputs:
        op = op.inputs[0].op
    return op if op.type in ("VarHandleOp", "Variable", "VariableV2") else None


def variable_name(graph: tf.Graph, global_step: Any) -> str | None:
    """The name of the variable that a global step is, or is read from; None for any other tensor."""
    tensor = _as_tensor(graph, global_step)
    op = None if tensor is None else _variable_op(tensor)
    return None if op is None else str(op.name)


def _watched(graph: tf.Graph, sources: Sequence[tf.Tensor]) -> list[tuple[int, str]]:
    """Which saved tensors are trainable variables or slots of such (those named below one), with their names."""
    trainable = {v.op.name for v in graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)}
    chosen = []
    for index, tensor in enumerate(sources):
        variable = _variable_op(tensor)
        if variable is None or tensor.dtype.base_dtype not in _CHECKED_DTYPES:
            continue
        parts = variable.name.split("/")
        if any("/".join(parts[:depth]) in trainable for depth in range(1, len(parts) + 1)):
            chosen.append((index, variable.name))
    return chosen


def _build(graph: tf.Graph, save: tf.Operation, step: tf.Tensor | None) -> SnapshotOps:
    raw_ops = tf.raw_ops
    scope = graph.unique_name(_SCOPE) + "/"
    sources = list(save.inputs[3:])
    # Whatever the caller is in the middle of (a device, a scope, control dependencies, a colocation) is not meant. And
    # the memory of an accelerator, where the variables may be, is not there for a second copy of them.
    with (
        tf.compat.v1.name_scope(scope),
        graph.device(None),
        graph.device("/device:CPU:0"),
        graph.control_dependencies(None),
    ):
        origin = tf.compat.v1.placeholder(tf.int64, [], name="origin")
        prefix = tf.compat.v1.placeholder(tf.string, [], name="prefix")
        large: dict[int, tf.Tensor] = {}
        small: dict[int, tf.Tensor] = {}
        copies: list[tf.Operation] = []
        reserves: list[tf.Operation] = []
        releases: list[tf.Operation] = []
        for index, source in enumerate(sources):
            dtype, shape = source.dtype.base_dtype, source.shape
            if _static_bytes(source) < _HOLDER_BYTES:
                small[index] = tf.compat.v1.placeholder(dtype, shape)
                continue
            large[index] = raw_ops.VariableV2(shape=shape, dtype=dtype, container="", shared_name="")
            copies.append(_assign(large[index], source))
            releases.append(_assign(large[index], tf.zeros([0], dtype)))
            with graph.control_dependencies(reserves[-1:]):
                reserves.append(_assign(large[index], _fresh(shape, dtype, origin)))
        step_copy = None if step is None else raw_ops.DeepCopy(x=step)
        with graph.device(save.device):
            write = raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=save.inputs[1],
                shape_and_slices=save.inputs[2],
                tensors=[large.get(index, small.get(index)) for index in range(len(sources))],
            )
        watched: list[tuple[str, int | tuple[str, str]]] = []
        place = {index: number for number, index in enumerate(small)}
        for index, name in _watched(graph, sources):
            if index in small:
                watched.append((name, place[index]))
            else:
                watched.append((name, (large[index].name, _sum_of_squares(large[index]).name)))
        copy = tf.group(*copies, name="copy")
        reserve = tf.group(*reserves, name="reserve") if reserves else None
        release = tf.group(*releases, name="release")
    return SnapshotOps(
        scope=scope,
        fetched=tuple(sources[index].name for index in small),
        fed=tuple(placeholder.name for placeholder in small.values()),
        copy=copy.name,
        reserve=None if reserve is None else reserve.name,
        origin=origin.name,
        step=None if step_copy is None else step_copy.name,
        prefix=prefix.name,
        write=write.name,
        release=release.name,
        watched=tuple(watched),
        bytes=sum(_static_bytes(source) for source in sources),
    )


def _assign(holder: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    # Without a check of the shape, since the holder changes between empty and full; where it has the right one, the
    # value is copied into the memory that is there.
    return tf.raw_ops.Assign(ref=holder, value=value, validate_shape=False, use_locking=False).op


def _fresh(shape: tf.TensorShape, dtype: tf.DType, origin: tf.Tensor) -> tf.Tensor:
    """A tensor in memory of its own, every page of it touched.

    Range writes in one thread, one variable after another: Fill would occupy all threads that the steps compute with.
    And it depends on something that is fed, or TensorFlow would fold it into a constant that stays.
    """
    bytes_ = math.prod(shape.as_list()) * dtype.size
    if dtype == tf.bool or dtype.size > 8 or bytes_ % 8:
        return tf.raw_ops.Fill(dims=shape.as_list() + origin, value=tf.zeros([], dtype))
    words = tf.raw_ops.Range(start=origin, limit=tf.constant(bytes_ // 8, tf.int64), delta=tf.constant(1, tf.int64))
    return tf.reshape(tf.raw_ops.Bitcast(input=words, type=dtype), shape)


def _sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    # Finite only if every element is; not finite, too, where they are finite and very large, which is then looked at.
    # One pass, and no memory, where flags for each element would take a quarter of the variable's size.
    return tf.raw_ops.L2Loss(t=tf.abs(tensor) if tensor.dtype.is_complex else tensor)


def _static_bytes(tensor: tf.Tensor) -> int:
    shape = tensor.shape
    if not shape.is_fully_defined() or tensor.dtype.base_dtype not in _FIXED_DTYPES:
        return 0
    return int(math.prod(shape.as_list()) * tensor.dtype.base_dtype.size)


# ------------------------------------------------------------------------------------------ taking and writing


@dataclass(slots=True)
class Held:
    """A snapshot, most of it inside TensorFlow's session; give it back with `release`.

    Attributes:
        raw: The session that holds it; None when it was given back.
        ops: The ops that took it.
        values: What was fetched.
        step: The global step inside, or None.
    """

    raw: tf.compat.v1.Session | None
    ops: SnapshotOps
    values: list[Any]
    step: int | None
    _mutex: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self.raw is None

    def nonfinite(self) -> list[str]:
        """Trainable variables and slots with NaN or infinite values; blocking, on a side thread."""
        raw = self._session()
        held = [place for _, place in self.ops.watched if not isinstance(place, int)]
        sums = dict(zip(held, raw.run([total for _, total in held]), strict=True))
        found = []
        for name, place in self.ops.watched:
            if isinstance(place, int):
                finite = np.all(np.isfinite(self.values[place]))
            else:
                finite = np.isfinite(sums[place]) or np.all(np.isfinite(raw.run(place[0])))
            if not finite:
                found.append(name)
        return found

    def write(self, prefix: str) -> None:
        """Write index and data under a prefix; blocking, on a side thread."""
        raw = self._session()
        feeds = {**dict(zip(self.ops.fed, self.values, strict=True)), self.ops.prefix: prefix}
        raw.run(raw.graph.get_operation_by_name(self.ops.write), feeds)

    def _session(self) -> tf.compat.v1.Session:
        if self.raw is None:
            raise RuntimeError("the snapshot was given back")
        return self.raw

    def release(self) -> None:
        """Give the memory back; blocking, any thread, idempotent: when it returns, the holders are free.

        After the session's close nothing is left to give back.
        """
        # Not a flag alone: who comes second must not go on to fill the holders while the first one empties them.
        with self._mutex:
            raw, self.raw = self.raw, None
            self.values = []
            if raw is None:
                return
            try:
                raw.run(raw.graph.get_operation_by_name(self.ops.release))
            except (RuntimeError, tf.errors.OpError):  # closed: its memory went with it
                pass


def reserve(raw: tf.compat.v1.Session, ops: SnapshotOps) -> None:
    """Give the holders their memory, so that the snapshot only has to copy; on a side thread, beside the steps.

    Args:
        raw: The session.
        ops: What `add_snapshot_ops` gave for its graph; no snapshot of it is alive.
    """
    if ops.reserve is not None:
        raw.run(raw.graph.get_operation_by_name(ops.reserve), {ops.origin: 0})


def hold(raw: tf.compat.v1.Session, ops: SnapshotOps) -> Held:
    """Take a snapshot; on the device thread, between two steps.

    Args:
        raw: The session.
        ops: What `add_snapshot_ops` gave for its graph; no other snapshot of it is alive.
    """
    copy = raw.graph.get_operation_by_name(ops.copy)
    values, step, _ = raw.run((list(ops.fetched), ops.step if ops.step is not None else (), copy))
    return Held(raw, ops, values, None if ops.step is None else int(np.ravel(step)[0]))


def can_hold(raw: tf.compat.v1.Session) -> bool:
    """Whether snapshots are taken in a session: in one of this process.

    On a server, the holders would be on its machines, and written there; the saver knows how to do that.
    """
    return not raw.sess_str


# ------------------------------------------------------------------------------------------ export


def user_graph_def(graph: tf.Graph, *, add_shapes: bool = False) -> Any:
    """The graph as its owner built it: without the ops of snapshots.

    Args:
        graph: The graph.
        add_shapes: As in `tf.Graph.as_graph_def`.
    """
    graph_def = graph.as_graph_def(add_shapes=add_shapes)
    # They were added together, so they stand together: a few slices instead of a copy of every node.
    ours = [index for index, node in enumerate(graph_def.node) if _SCOPED.match(node.name)]
    while ours:
        end = ours.pop()
        start = end
        while ours and ours[-1] == start - 1:
            start = ours.pop()
        del graph_def.node[start : end + 1]
    return graph_def


def export_meta_graph(graph: tf.Graph, saver: Any) -> bytes:
    """The contents of a checkpoint's ``.meta`` file, as the saver would write it, without the ops of snapshots.

    Args:
        graph: The graph.
        saver: The saver that the file shall describe, or None. An object that cannot tell is left out.
    """
    describe = getattr(saver, "as_saver_def", None)
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph(
            graph_def=user_graph_def(graph, add_shapes=True),
            saver_def=None if describe is None else describe(),
            graph=graph,
        )
    return bytes(meta.SerializeToString())
