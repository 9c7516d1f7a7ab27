"""The one door to TensorFlow's less public parts.

Everything here either combines TensorFlow's classes with ours or reaches something that TensorFlow does not
promise to keep. Each function of the second kind has a fallback, and `tests/test_tf_private.py` tells when its
private part disappears.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from asupervisor import errors


class SessionNotReady(errors.SessionNotReady, tf.errors.DeadlineExceededError):  # type: ignore[misc]
    """The instances of `errors.SessionNotReady` that are raised where TensorFlow is loaded.

    Also a `tf.errors.DeadlineExceededError`, which is what code written for TensorFlow's SessionManager catches.
    Its constructor is that of `errors.SessionNotReady`; there is no node and no op.
    """

    def __init__(self, variables: Sequence[str], waited_secs: float, what: str = "Session") -> None:
        self._what = what
        # Before the message is built: TensorFlow's accessors read these, and its own constructor is never called
        # because OSError's comes first.
        self._node_def = None
        self._op = None
        self._error_code = tf.errors.DEADLINE_EXCEEDED
        self._experimental_payloads: dict[str, Any] = {}
        super().__init__(variables, waited_secs, what)
        self._message = self.args[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variables, self.waited_secs, self._what)


class NonFiniteError(errors.NonFiniteError, tf.compat.v1.train.NanLossDuringTrainingError):  # type: ignore[misc]
    """The instances of `errors.NonFiniteError`: also what code written for TensorFlow's `NanTensorHook` catches."""


def write_plugin_assets(graph: tf.Graph, logdir: str) -> None:
    """Write the files that TensorBoard's plugins attached to a graph, below ``logdir/plugins``; blocking.

    Without TensorFlow's private list of them, nothing is written: TensorBoard then shows the data without them.
    """
    try:
        from tensorflow.python.summary import plugin_asset
    except ImportError:
        return
    for plugin in plugin_asset.get_all_plugin_assets(graph):
        directory = f"{logdir}/plugins/{plugin.plugin_name}"
        tf.io.gfile.makedirs(directory)
        for name, content in plugin.assets().items():
            with tf.io.gfile.GFile(f"{directory}/{name}", "w") as file:
                file.write(content)


# ------------------------------------------------------------------------------- Session.run, taken apart

try:
    from tensorflow.core.protobuf import config_pb2 as _config_pb2
    from tensorflow.python.client import pywrap_tf_session as _pywrap
    from tensorflow.python.client import session as _session

    #: Runs a compiled callable: ``(C session, handle, feeds, None)`` gives the list of fetched values.
    run_compiled: Callable[..., list[Any]] | None = _pywrap.TF_SessionRunCallable
except (ImportError, AttributeError):
    _config_pb2 = _pywrap = _session = None
    run_compiled = None


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A place in a result that one fetched object fills.

    Attributes:
        positions: Where its values stand among the unique elements; more than one for a SparseTensor.
        contract: Makes the one result of the list of values; None where the only value is the result.
    """

    positions: tuple[int, ...]
    contract: Callable[[list[Any]], Any] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A place in a result that holds others.

    Attributes:
        kind: `list`, `tuple` or `dict`: exactly that; None: what `make` makes.
        parts: The places inside.
        keys: Of a mapping; None for a sequence.
        make: Called with the parts as arguments or, for a mapping, with an iterable of pairs.
    """

    kind: type | None
    parts: tuple[Leaf | Node, ...]
    keys: tuple[Any, ...] | None = None
    make: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FetchStructure:
    """What `Session.run` makes of its `fetches`: the tensors and operations that it runs, and the result's shape.

    Attributes:
        elements: The unique tensors and operations, in TensorFlow's order.
        root: The shape of the result.
        handles: The elements that give a `TensorHandle`, with the type of what it stands for.
    """

    elements: tuple[Any, ...]
    root: Leaf | Node
    handles: dict[int, Any]


def fetch_structure(graph: tf.Graph, fetches: Any) -> FetchStructure | None:
    """Takes `fetches` apart with `Session.run`'s own code, so that nothing that it knows is missed.

    Returns:
        The structure, or None where TensorFlow's code is not what it was.

    Raises:
        Exception: What `Session.run` raises for these fetches.
    """
    handler_class = getattr(_session, "_FetchHandler", None)
    if handler_class is None:
        return None
    handler = handler_class(graph, fetches, {})
    try:
        mapper = handler._fetch_mapper
        elements = tuple(mapper.unique_fetches())
        positions = {id(element): number for number, element in enumerate(elements)}
        root = _place(mapper, positions)
        kept = handler._fetch_handles
        handles = {
            number: kept[element.ref()]
            for number, element in enumerate(elements)
            if kept and isinstance(element, tf.Tensor) and element.ref() in kept
        }
    except (AttributeError, KeyError, TypeError):
        return None
    if root is None or (handles and not hasattr(_session, "session_ops")):
        return None
    return FetchStructure(elements, root, handles)


def _place(mapper: Any, positions: dict[int, int]) -> Leaf | Node | None:
    kind = type(mapper).__name__
    if kind == "_ElementFetchMapper":
        found = tuple(positions[id(element)] for element in mapper.unique_fetches())
        contract = mapper._contraction_fn
        plain = len(found) == 1 and _PLAIN_CODE is not None and getattr(contract, "__code__", None) is _PLAIN_CODE
        return Leaf(found, None if plain else contract)
    parts = tuple(_place(part, positions) for part in mapper._mappers)
    if None in parts:
        return None
    fetch_type = mapper._fetch_type
    if kind == "_ListFetchMapper":
        if issubclass(fetch_type, list):
            return Node(list, parts)  # type: ignore[arg-type]
        if fetch_type is tuple:
            return Node(tuple, parts)  # type: ignore[arg-type]
        return Node(None, parts, make=fetch_type)  # type: ignore[arg-type]
    if kind == "_DictFetchMapper":
        keys = tuple(mapper._keys)
        exact = dict if fetch_type is dict else None
        return Node(exact, parts, keys=keys, make=mapper._type_ctor)  # type: ignore[arg-type]
    if kind == "_AttrsFetchMapper":
        return Node(None, parts, make=fetch_type)  # type: ignore[arg-type]
    return None


def _plain_code() -> Any:
    try:
        registered = _session._REGISTERED_EXPANSIONS
        return next(fetch for kind, fetch, *_ in registered if kind is object)(object())[1].__code__
    except (AttributeError, StopIteration, TypeError):
        return None


_PLAIN_CODE = _plain_code()


def is_plain_feed(key: Any) -> bool:
    """Whether a key of a feed_dict stands for one tensor: it, its name, or a variable."""
    if not isinstance(key, (tf.Tensor, tf.Variable, str, bytes)):
        return False
    registered = getattr(_session, "_REGISTERED_EXPANSIONS", ())
    return next((kind is object for kind, *_ in registered if isinstance(key, kind)), False)


def is_tensor_handle(value: Any) -> bool:
    """Whether a fed value is a handle of a tensor that the session keeps."""
    module = getattr(_session, "session_ops", None)
    return module is not None and isinstance(value, module.TensorHandle)


def tensor_handle(value: Any, dtype: Any, raw: tf.compat.v1.Session) -> Any:
    """The `TensorHandle` that `Session.run` gives for a fetched session handle."""
    return _session.session_ops.TensorHandle(value, dtype, raw)


class Compiled:
    """One compiled callable of a session: `run_compiled(session, handle, feeds, None)` runs it."""

    __slots__ = ("_owner", "handle", "session")

    def __init__(self, owner: Any, session: Any, handle: int) -> None:
        self._owner = owner  # releases the callable when it goes
        self.session = session
        self.handle = handle


def compile_callable(
    raw: tf.compat.v1.Session,
    feeds: Iterable[tf.Tensor],
    fetches: Iterable[tf.Tensor],
    targets: Iterable[tf.Operation],
    *,
    in_callers_thread: bool = False,
) -> Compiled | None:
    """Compiles a run; None where TensorFlow has no such thing (any more).

    Args:
        raw: The session.
        feeds: The tensors that are fed, in the order in which their values will be given.
        fetches: The tensors that are fetched.
        targets: The operations that are run.
        in_callers_thread: The ops run one after the other in the thread that calls.

    Raises:
        tf.errors.OpError: The runtime refuses the graph, as it would in a run.
    """
    make = getattr(raw, "_make_callable_from_options", None)
    if make is None or run_compiled is None:
        return None
    options = _config_pb2.CallableOptions()
    options.feed.extend(tensor.name for tensor in feeds)
    options.fetch.extend(tensor.name for tensor in fetches)
    options.target.extend(op.name for op in targets)
    if in_callers_thread:
        options.run_options.inter_op_thread_pool = -1
    owner = make(options)
    handle, session = getattr(owner, "_handle", None), getattr(raw, "_session", None)
    if handle is None or session is None:
        return None
    return Compiled(owner, session, handle)


def can_compile(raw: tf.compat.v1.Session) -> bool:
    """Whether compiled callables do the same as this session's `run`: not if a subclass has its own `run`."""
    expected = (
        hasattr(raw, "_closed")
        and hasattr(raw, "_do_call")
        and hasattr(raw, "_session")
        and hasattr(raw, "_make_callable_from_options")
    )
    return expected and run_compiled is not None and type(raw).run is tf.compat.v1.Session.run


#: Whether a session was closed; for sessions that `can_compile`.
is_closed: Callable[[tf.compat.v1.Session], bool] = operator.attrgetter("_closed")


def has_operation_timeout(raw: tf.compat.v1.Session) -> bool:
    """Whether the session's configuration limits the time of a run."""
    return bool(getattr(getattr(raw, "_config", None), "operation_timeout_in_ms", 0))


def raise_as_session_run(raw: tf.compat.v1.Session, error: tf.errors.OpError) -> NoReturn:
    """Raises the error of a compiled callable as `Session.run` does: op, node and the place that made it."""
    reformat = getattr(raw, "_do_call", None)
    if reformat is None:
        raise error

    # Handed over in a list that is empty afterwards: a frame of the error's traceback that referred to the error would
    # keep it, and the session that stands in other frames, alive until the garbage collector comes.
    def fail(box: list[tf.errors.OpError]) -> NoReturn:
        raise box.pop()

    box = [error]
    del error
    reformat(fail, box)
    raise AssertionError("TensorFlow did not raise what it was given")


def was_released(error: tf.errors.OpError) -> bool:
    """Whether a compiled callable was run after its release."""
    return isinstance(error, tf.errors.InvalidArgumentError) and "handle was released" in str(error)


def function_def(graph: tf.Graph, name: str) -> Any:
    """The FunctionDef of a function of the graph's library, or None."""
    get = getattr(graph, "_get_function", None)
    if get is not None:
        function = get(name)
        if function is None:
            return None
        definition = getattr(function, "cached_definition", None) or getattr(function, "definition", None)
        if definition is not None:
            return definition
    library = graph.as_graph_def().library.function
    return next((found for found in library if found.signature.name == name), None)


def pads_step_number(saver: Any) -> bool:
    """Whether a Saver pads the step in the names of its checkpoints to eight digits; without its private note: no."""
    return bool(getattr(saver, "_pad_step_number", False))


# ------------------------------------------------------------------------------------------- SessionManager


def session_manager_settings(manager: Any) -> dict[str, Any] | None:
    """The constructor's arguments of a `tf.compat.v1.train.SessionManager`, which keeps them privately.

    Returns:
        The arguments by name, or None where it is not exactly one of these, or does not keep them any more.
    """
    if type(manager) is not tf.compat.v1.train.SessionManager:
        return None
    names = (
        "local_init_op",
        "ready_op",
        "ready_for_local_init_op",
        "graph",
        "recovery_wait_secs",
        "local_init_run_options",
        "local_init_feed_dict",
    )
    try:
        return {name: getattr(manager, f"_{name}") for name in names}
    except AttributeError:
        return None


def unfinalize(graph: tf.Graph) -> bool:
    """Let ops be added to a finalised graph again, as a monitored session of TensorFlow's does at its end.

    Returns:
        Whether it worked; without it the graph stays finalised.
    """
    undo = getattr(graph, "_unsafe_unfinalize", None)
    if undo is None:
        return False
    undo()
    return True


# ------------------------------------------------------------------------------- monitored sessions and hooks


def last_step_of(hook: Any) -> int | None:
    """The step at which a hook of TensorFlow's stops the training, which it keeps privately.

    Returns:
        The step; None for another hook, before the hook knows it, or where it does not keep it any more.
    """
    kinds: list[Any] = [tf.compat.v1.train.StopAtStepHook]
    try:
        from tensorflow.python.training import basic_session_run_hooks

        kinds.append(basic_session_run_hooks._MultiStepStopAtStepHook)
    except (ImportError, AttributeError):
        pass
    if not isinstance(hook, tuple(kinds)):
        return None
    last_step = getattr(hook, "_last_step", None)
    return None if last_step is None else int(last_step)


def save_path_of(hook: Any) -> str | None:
    """Where TensorFlow's own hook saves checkpoints, without the step; it keeps that privately.

    Returns:
        The path; None for another hook, or where it does not keep it any more.
    """
    path = getattr(hook, "_save_path", None) if isinstance(hook, tf.compat.v1.train.CheckpointSaverHook) else None
    return None if path is None else os.fspath(path)


def raised_by_session(error: BaseException) -> bool:
    """Whether a run of TensorFlow's session raised this error, wherever the run was made.

    Told by the innermost frame of its traceback; without the session's private module: no.
    """
    where = getattr(_session, "__file__", None)
    traceback = error.__traceback__
    if where is None or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return bool(traceback.tb_frame.f_code.co_filename == where)


LOST_PEER = {
    tf.errors.CancelledError: "RecvFromRemoteAsync is cancelled",
    tf.errors.UnimplementedError: "No message returned for unary request",
}
"""What errors say with which TensorFlow tells now and then of a peer that is lost, though their types do not."""


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Whether it was a lost peer, and neither a cancelled run nor an op that is missing; without the words: it was not.

    The second is what its transport says of an answer that ends before it has begun.
    """
    return any(isinstance(error, kind) and words in str(error) for kind, words in LOST_PEER.items())


def init_fn_of(scaffold: Any) -> Callable[..., Any] | None:
    """The `init_fn` that a `Scaffold` was given; None where there is none, or it does not keep it any more.

    Its public `init_fn` is a function around it, which hides whether it is a coroutine function.
    """
    return getattr(scaffold, "_user_init_fn", None)


def session_creator_settings(creator: Any) -> dict[str, Any] | None:
    """The constructor's arguments of TensorFlow's session creators, which keep them privately.

    Returns:
        The arguments by name, and ``is_chief``; None where it is not exactly one of these, or does not keep them.
    """
    names = {
        tf.compat.v1.train.ChiefSessionCreator: (
            "scaffold",
            "master",
            "config",
            "checkpoint_dir",
            "checkpoint_filename_with_path",
        ),
        tf.compat.v1.train.WorkerSessionCreator: ("scaffold", "master", "config", "max_wait_secs"),
    }.get(type(creator))
    if names is None:
        return None
    try:
        settings: dict[str, Any] = {name: getattr(creator, f"_{name}") for name in names}
    except AttributeError:
        return None
    settings["is_chief"] = type(creator) is tf.compat.v1.train.ChiefSessionCreator
    return settings


def chrome_trace(step_stats: Any) -> str | None:
    """The `StepStats` of a run as a trace for Chrome's viewer (JSON); None where TensorFlow cannot make one."""
    try:
        from tensorflow.python.client import timeline

        trace: str = timeline.Timeline(step_stats).generate_chrome_trace_format()
    except (ImportError, AttributeError):
        return None
    return trace


def sync_token_queue_of(optimizer: Any) -> Any:
    """The token queue of a `SyncReplicasOptimizer`, which keeps it privately; None where it does not."""
    return getattr(optimizer, "_sync_token_queue", None)
