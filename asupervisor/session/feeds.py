"""From a feed_dict to the arrays that a compiled callable takes, checked as `Session.run` checks them.

A compiled callable checks little: a wrong shape passes, a big-endian array is read as garbage. What passes quickly
here is what needs no conversion: an array of the very dtype and of a fitting shape. What may be wrong is given to
`Session.run` with nothing to fetch: it runs nothing, checks every feed and raises its own errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from asupervisor import _tf


class RawFeed:
    """A feed_dict that `Session.run` must take as it is."""

    __slots__ = ("feed_dict",)

    def __init__(self, feed_dict: Any) -> None:
        # The dict may be filled with the next batch while this one waits; its values are the caller's affair.
        self.feed_dict = dict(feed_dict) if type(feed_dict) is dict else feed_dict


def as_it_is(raw: tf.compat.v1.Session) -> Convert:
    """A conversion that leaves everything to `Session.run`."""

    def convert(feed_dict: Any, copy: bool = False) -> RawFeed:
        feed = RawFeed(feed_dict)
        if copy and isinstance(feed.feed_dict, Mapping):
            with raw.graph.as_default():
                feed.feed_dict = {key: _owned(value) for key, value in feed.feed_dict.items()}
        return feed

    return convert


Args = tuple[Any, ...] | RawFeed


class Convert(Protocol):
    """Checks and converts a feed_dict; with `copy`, into memory of its own."""

    def __call__(self, feed_dict: Any, copy: bool = False) -> Args:
        """What a plan's `execute` takes."""


def plain_tensors(graph: tf.Graph, feed_dict: Any) -> tuple[tf.Tensor, ...] | None:
    """The tensors that the keys of a feed_dict mean; None where a compiled callable cannot take them."""
    if not isinstance(feed_dict, Mapping):
        return None
    tensors = []
    for key in feed_dict:
        if not _tf.is_plain_feed(key):
            return None
        try:
            tensor = graph.as_graph_element(key, allow_tensor=True, allow_operation=False)
            dtype = tensor.dtype.as_numpy_dtype
        except Exception:
            return None  # Session.run says it better
        if tensor.dtype.name.endswith("_ref") or dtype is None or not graph.is_feedable(tensor):
            return None
        tensors.append(tensor)
    return tuple(tensors) if len({id(tensor) for tensor in tensors}) == len(tensors) else None


def any_tensors(graph: tf.Graph, feed_dict: Any) -> tuple[tf.Tensor, ...]:
    """The tensors that a feed_dict of any kind feeds, as far as that can be told; for the analysis."""
    tensors = []
    for key in feed_dict if isinstance(feed_dict, Mapping) else ():
        for part in tf.nest.flatten(key, expand_composites=True):
            try:
                tensors.append(graph.as_graph_element(part, allow_tensor=True, allow_operation=False))
            except Exception:
                continue
    return tuple(tensors)


def converter(raw: tf.compat.v1.Session, keys: Sequence[Any], tensors: Sequence[tf.Tensor]) -> Convert:
    """A function that converts feed_dicts with these keys; other ones it leaves to `Session.run`."""
    slow = _Slow(raw, keys, tensors)
    if not tensors:
        return lambda feed_dict, copy=False: slow(feed_dict, copy) if feed_dict else ()
    names: dict[str, Any] = {"ndarray": np.ndarray, "slow": slow, "size": len(keys)}
    checks = []
    for number, (key, tensor) in enumerate(zip(keys, tensors, strict=True)):
        names[f"key{number}"] = key
        # One object per dtype, as far as arrays are concerned that NumPy made itself; others take the slow way.
        names[f"dtype{number}"] = np.dtype(tensor.dtype.as_numpy_dtype)
        same = "==" if type(key) in (str, bytes) else "is"
        checks.append(f"k{number} {same} key{number}")
        checks.append(f"a{number}.__class__ is ndarray and a{number}.dtype is dtype{number}")
        checks += _shape_checks(f"a{number}", tensor.shape)
    count = range(len(keys))
    text = (
        "def convert(feed_dict, copy=False):\n"
        "    if feed_dict.__class__ is dict and len(feed_dict) == size and not copy:\n"
        f"        {''.join(f'k{n}, ' for n in count)} = feed_dict\n"
        f"        {''.join(f'a{n}, ' for n in count)} = feed_dict.values()\n"
        f"        if {' and '.join(checks)}:\n"
        f"            return ({''.join(f'a{n}, ' for n in count)})\n"
        "    return slow(feed_dict, copy)\n"
    )
    exec(compile(text, "<feeds of a plan>", "exec"), names)
    convert: Convert = names.pop("convert")
    return convert


def _shape_checks(array: str, shape: tf.TensorShape) -> list[str]:
    if shape.rank is None:
        return []
    dims = shape.as_list()
    known = [(axis, dim) for axis, dim in enumerate(dims) if dim is not None]
    if len(known) == len(dims):
        return [f"{array}.shape == {tuple(dims)!r}"]
    return [f"{array}.ndim == {len(dims)}", *(f"{array}.shape[{axis}] == {dim}" for axis, dim in known)]


class _Slow:
    """Converts what needs converting."""

    def __init__(self, raw: tf.compat.v1.Session, keys: Sequence[Any], tensors: Sequence[tf.Tensor]) -> None:
        self._raw = raw
        self._keys = tuple(keys)
        self._tensors = tuple(tensors)

    def __call__(self, feed_dict: Any, copy: bool) -> Args:
        args = self._converted(feed_dict)
        if not copy:
            return args
        return as_it_is(self._raw)(feed_dict, True) if isinstance(args, RawFeed) else _own(args, feed_dict)

    def _converted(self, feed_dict: Any) -> Args:
        values = self._values(feed_dict)
        if values is None:
            return RawFeed(feed_dict)
        arrays = []
        for tensor, value in zip(self._tensors, values, strict=True):
            array = _convert(tensor, value)
            if array is None:
                return self._doubtful(feed_dict, values)
            arrays.append(array)
        return tuple(arrays)

    def _values(self, feed_dict: Any) -> list[Any] | None:
        """The values in the order of the plan's keys."""
        if not isinstance(feed_dict, Mapping) or len(feed_dict) != len(self._keys):
            return None
        given = {_identity(key): value for key, value in feed_dict.items()}
        try:
            return [given[_identity(key)] for key in self._keys]
        except KeyError:
            return None

    def _doubtful(self, feed_dict: Any, values: Sequence[Any]) -> Args:
        # Nothing is fetched, so nothing runs: this only checks, and raises what Session.run raises. Variables can
        # be keys only where their graph is the default one.
        with self._raw.graph.as_default():
            self._raw.run([], feed_dict)
        if any(_tf.is_tensor_handle(value) for value in values):
            return RawFeed(feed_dict)
        return tuple(
            np.asarray(value, tensor.dtype.as_numpy_dtype) for tensor, value in zip(self._tensors, values, strict=True)
        )


_KNOWN = (np.ndarray, np.generic, list, tuple, int, float, complex, str, bytes)


def as_array(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """The value as `Session.run` converts it: since NumPy 2 an array of numbers is made first and cast then."""
    if _CASTS and np.issubdtype(dtype, np.number):
        return np.asarray(value).astype(dtype, copy=False)
    return np.asarray(value, dtype)


_CASTS = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def _identity(key: Any) -> Any:
    return key if type(key) in (str, bytes) else id(key)


def _convert(tensor: tf.Tensor, value: Any) -> Any:
    """The array to feed, or None where `Session.run` might object."""
    dtype = tensor.dtype.as_numpy_dtype
    try:
        if isinstance(value, int):
            array = as_array(value, dtype)
            if dtype is object or array.item() != value:
                return None
        elif isinstance(value, _KNOWN):
            array = as_array(value, dtype)
        else:
            return None
    except Exception:
        return None
    return array if tensor.shape.is_compatible_with(array.shape) else None


def _own(args: tuple[Any, ...], feed_dict: Any) -> tuple[Any, ...]:
    """The same feeds in memory that nobody else writes to: a generator may reuse its arrays at once."""
    values = list(feed_dict.values()) if isinstance(feed_dict, Mapping) else []
    given = {id(value) for value in values}
    # An object that turns itself into an array may keep that array.
    foreign = not all(isinstance(value, _KNOWN) for value in values)
    return tuple(array.copy() if foreign or id(array) in given or array.base is not None else array for array in args)


def _owned(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        parts = [_owned(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return [_owned(part) for part in value] if type(value) is list else value
