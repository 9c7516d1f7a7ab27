"""What one run fetches and feeds: the caller's and each hook's, merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

tf1 = tf.compat.v1


class Merged:
    """The merged fetches, feeds and options of one run, and what each hook gets of its results.

    The fetches are a list: the caller's, then those of each hook that fetches anything. What the caller gave is
    never changed.

    Args:
        fetches: The caller's.
        feed_dict: The caller's.
        options: The caller's, or None.
        run_metadata: The caller's, or None.
    """

    __slots__ = (
        "_fed",
        "_places",
        "_seen_metadata",
        "_seen_options",
        "feed_dict",
        "fetches",
        "options",
        "run_metadata",
    )

    def __init__(self, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> None:
        self.fetches: list[Any] = [fetches]
        self.feed_dict = feed_dict
        self.options = options
        # TensorFlow's always asks for it; only with options is there anything in it.
        self.run_metadata = tf1.RunMetadata() if run_metadata is None and options is not None else run_metadata
        self._places: dict[int, int] = {}  # by number of the hook
        self._fed: dict[Any, Any] | None = None  # by hooks
        self._seen_options: Any = None
        self._seen_metadata: Any = None

    def add(self, number: int, args: Any) -> None:
        """Add what the `before_run` of a hook returned.

        Raises:
            RuntimeError: It feeds a tensor that the caller or another hook feeds as well.
        """
        if args.fetches is not None:
            self._places[number] = len(self.fetches)
            self.fetches.append(args.fetches)
        if args.feed_dict:
            self._feed(args.feed_dict)
        if args.options is not None:
            self.options = merge_run_options(self.options or tf1.RunOptions(), args.options)
            if self.run_metadata is None:
                self.run_metadata = tf1.RunMetadata()

    def _feed(self, feeds: Any) -> None:
        if self._fed is None:
            self._fed = {}
            by_caller = self.feed_dict or {}
            self.feed_dict = dict(by_caller)
        conflicts = _common(self._fed, feeds)
        if conflicts:
            raise RuntimeError(f"Same tensor is fed by two hooks. Conflict(s): {conflicts}")
        conflicts = _common((key for key in self.feed_dict if key not in (self._fed or ())), feeds)
        if conflicts:
            raise RuntimeError(f"Same tensor is fed by a SessionRunHook and user. Conflict(s): {conflicts}")
        self._fed.update(feeds)
        self.feed_dict.update(feeds)

    def values_for(self, number: int, results: list[Any]) -> Any:
        """The `SessionRunValues` of one hook."""
        place = self._places.get(number)
        if self._seen_options is None:
            self._seen_options = self.options if self.options is not None else tf1.RunOptions()
            self._seen_metadata = self.run_metadata if self.run_metadata is not None else tf1.RunMetadata()
        return tf1.train.SessionRunValues(
            None if place is None else results[place], self._seen_options, self._seen_metadata
        )


def _common(fed: Iterable[Any], feeds: Iterable[Any]) -> list[Any]:
    known = {_identity(key) for key in fed}
    return [key for key in feeds if _identity(key) in known]


def _identity(key: Any) -> Any:
    """What a key of a feed_dict means: a tensor by its name, as a name may be given for it."""
    if isinstance(key, tf.Tensor):
        return key.name
    return key if isinstance(key, str) else id(key)


def merge_run_options(options: Any, more: Any) -> Any:
    """`RunOptions` that ask for all that either asks for: the larger numbers, any flag, all debug watches.

    Source: `_merge_run_options` of TensorFlow's monitored session, which changes the caller's object.
    """
    merged = tf1.RunOptions()
    merged.CopyFrom(options)
    for name in ("trace_level", "timeout_in_ms", "inter_op_thread_pool"):
        setattr(merged, name, max(getattr(options, name), getattr(more, name)))
    for name in ("output_partition_graphs", "report_tensor_allocations_upon_oom"):
        setattr(merged, name, getattr(options, name) or getattr(more, name))
    debug = merged.debug_options
    debug.debug_tensor_watch_opts.extend(more.debug_options.debug_tensor_watch_opts)
    debug.reset_disk_byte_usage = debug.reset_disk_byte_usage or more.debug_options.reset_disk_byte_usage
    return merged


def frozen_structure(fetches: Any) -> Any:
    """The same fetches in lists and dicts of our own, since the caller may change theirs."""
    kind = type(fetches)
    if kind is list:
        return [frozen_structure(part) for part in fetches]
    if kind is dict:
        return {key: frozen_structure(part) for key, part in fetches.items()}
    if kind is tuple:
        return tuple(frozen_structure(part) for part in fetches)
    if isinstance(fetches, dict):
        copied = fetches.copy()
        for key, part in fetches.items():
            copied[key] = frozen_structure(part)
        return copied
    return fetches
