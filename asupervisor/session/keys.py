"""What makes two calls of `Session.run` the same call: the key of a plan."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

#: What stands for a fixed set of tensors and operations for as long as it lives.
_LEAVES = (tf.Tensor, tf.Operation, tf.Variable, tf.SparseTensor, tf.IndexedSlices, tf.RaggedTensor)


def fast_key(fetches: Any, feed_dict: Any) -> Any:
    """The key of a flat call: ids of its fetches and of its feed keys, with None between them.

    Only calls that are `is_flat` may be stored under it; no other call has the key of one of those while its objects
    live. None, which is never stored, for feeds that are no dict.
    """
    kind = fetches.__class__
    if kind is list or kind is tuple:
        if not feed_dict:
            return (kind, *map(id, fetches))
        return (kind, *map(id, fetches), None, *map(id, feed_dict)) if feed_dict.__class__ is dict else None
    if not feed_dict:
        return id(fetches)
    return (id(fetches), *map(id, feed_dict)) if feed_dict.__class__ is dict else None


def key_of(fetches: Any, feed_dict: Any, keep: list[Any]) -> Any:
    """A key that is equal for calls that mean the same, or None where that cannot be told.

    Args:
        fetches: As `Session.run` takes them.
        feed_dict: Only its keys count, in their order.
        keep: Receives the objects whose ids stand in the key: they must live as long as it is used.
    """
    fetch_key = _key(fetches, keep)
    if fetch_key is None:
        return None
    if not feed_dict:
        return (fetch_key,)
    if not isinstance(feed_dict, Mapping):
        return None
    parts: list[Any] = []
    for key in feed_dict:
        part = _key(key, keep)
        if part is None:
            return None
        parts.append(part)
    return (fetch_key, *parts)


def _key(item: Any, keep: list[Any]) -> Any:
    kind = type(item)
    if kind is str or kind is bytes:
        return item
    if isinstance(item, _LEAVES):
        keep.append(item)
        return id(item)
    if kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        parts = [_key(part, keep) for part in item]
        return None if None in parts else (kind, *parts)
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        parts = [_key(part, keep) for part in item.values()]
        if None in parts:
            return None
        names = tuple(_name(name, keep) for name in item)
        factory = item.default_factory if kind is defaultdict else None
        keep.append(factory)
        return (kind, id(factory), names, *parts)
    fields = getattr(kind, "__attrs_attrs__", None)
    if fields is not None:
        parts = [_key(getattr(item, field.name), keep) for field in fields]
        return None if None in parts else (kind, *parts)
    return None


def _name(name: Any, keep: list[Any]) -> Any:
    """A key of a dict of fetches; by identity unless it is a string, since ``1 == True == 1.0``."""
    if type(name) is str:
        return name
    keep.append(name)
    return id(name)


def is_flat(fetches: Any, feed_dict: Any) -> bool:
    """Whether the ids of the fetches and feed keys alone tell the call."""
    items = fetches if type(fetches) in (list, tuple) else (fetches,)
    return all(isinstance(item, _LEAVES) for item in (*items, *(feed_dict or ())))


def elements_of(graph: tf.Graph, fetches: Any) -> list[Any]:
    """The tensors and operations in any structure of fetches, as far as they can be told; for the analysis."""
    found: list[Any] = []
    todo = [fetches]
    while todo:
        item = todo.pop()
        kind = type(item)
        if isinstance(item, (list, tuple)):
            todo += item
        elif isinstance(item, Mapping):
            todo += item.values()
        elif hasattr(kind, "__attrs_attrs__"):
            todo += [getattr(item, field.name) for field in kind.__attrs_attrs__]
        else:
            for part in tf.nest.flatten(item, expand_composites=True):
                try:
                    found.append(graph.as_graph_element(part))
                except Exception:
                    continue
    return found
