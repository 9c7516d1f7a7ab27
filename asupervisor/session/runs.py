"""Executing a plan: from converted feeds to the result, also with other tensors fetched along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from asupervisor import _tf
from asupervisor.session import denormals, results
from asupervisor.session.engine import Engine
from asupervisor.session.feeds import Args, RawFeed


class Extension(Protocol):
    """A run that fetches other tensors along."""

    def execute(self, args: Args) -> tuple[Any, list[Any]]:
        """The result, and the values of the other tensors."""

    def drop(self) -> None:
        """Releases what was compiled."""


class Run:
    """Executes by an engine, with results and errors as those of `Session.run`."""

    __slots__ = ("_engine", "_raw", "_structure")

    def __init__(self, raw: tf.compat.v1.Session, engine: Engine, structure: _tf.FetchStructure) -> None:
        self._raw = raw
        self._engine = engine
        self._structure = structure

    def execute(self) -> Callable[[Args], Any]:
        """The function that executes."""
        raw, engine, structure = self._raw, self._engine, self._structure
        run = _tf.run_compiled
        build_all = results.from_session(structure)
        if run is None or not engine.compiles:
            return lambda args: build_all(engine.session_run(engine.feed_dict(args)))
        build = results.from_compiled(structure, raw)
        is_closed, op_error = _tf.is_closed, tf.errors.OpError
        set_mode, flushing, usual = denormals.set_mode, denormals.FLUSHING, denormals.USUAL

        # After a run of TensorFlow the interpreter starts with cold caches: each line here costs more than it seems.
        def execute(args: Args) -> Any:
            handle = engine.fast
            if handle is None or args.__class__ is not tuple or is_closed(raw):
                return slowly(args)
            try:
                if engine.flushing:
                    engine.left = left = engine.left - 1
                    if left < 0:
                        return slowly(args)
                    set_mode(flushing)
                    try:
                        values = run(engine.session, handle, args, None)
                    finally:
                        set_mode(usual)
                else:
                    values = run(engine.session, handle, args, None)
            except op_error as error:
                if engine.was_released(error):
                    return slowly(args)
                _tf.raise_as_session_run(raw, error)
            return build(values)

        def slowly(args: Args) -> Any:
            if is_closed(raw):
                raw.run([])  # raises what it raises for a closed session
            try:
                values = engine.values(args)
            except op_error as error:
                if not engine.was_released(error):
                    _tf.raise_as_session_run(raw, error)
                values = None
            if values is not None:
                return build(values)
            return build_all(engine.session_run(engine.feed_dict(args)))

        return execute

    def extend(self, extra: Sequence[Any]) -> Extension:
        """The same run with the tensors `extra` fetched along."""
        return _Along(self._raw, self._engine, self._structure, extra)


class _Along:
    def __init__(
        self, raw: tf.compat.v1.Session, base: Engine, structure: _tf.FetchStructure, extra: Sequence[Any]
    ) -> None:
        self._raw = raw
        self._keep = tuple(extra)
        self._elements = structure.elements
        self._tensors = [raw.graph.as_graph_element(item, allow_operation=False) for item in extra]
        # A compiled callable cannot fetch what it is fed: that is among the arguments.
        fed = {id(tensor): number for number, tensor in enumerate(base.feeds)}
        fetched = {id(element): element for element in structure.elements}
        fetched |= {id(tensor): tensor for tensor in self._tensors if id(tensor) not in fed}
        self._engine = Engine(
            raw,
            base.feeds,
            tuple(fetched.values()),
            compiled=base.compiles,
            inline=False,
            flushes=lambda: True,
        )
        self._build_all = results.from_session(structure)
        self._build = results.from_compiled(structure, raw)
        order = [number for number, element in fetched.items() if isinstance(element, tf.Tensor)]
        self._from_args = [fed.get(id(tensor)) for tensor in self._tensors]
        self._from_values = [None if id(tensor) in fed else order.index(id(tensor)) for tensor in self._tensors]

    def execute(self, args: Args) -> tuple[Any, list[Any]]:
        raw, engine = self._raw, self._engine
        if engine.compiles and _tf.is_closed(raw):
            raw.run([])  # raises what it raises for a closed session
        try:
            values = engine.values(args)
        except tf.errors.OpError as error:
            _tf.raise_as_session_run(raw, error)
        if values is None or isinstance(args, RawFeed):
            with raw.graph.as_default():
                fetched, extra = raw.run([list(self._elements), self._tensors], engine.feed_dict(args))
            return self._build_all(fetched), extra
        extra = [
            _own(values[place] if place is not None else args[fed or 0])
            for place, fed in zip(self._from_values, self._from_args, strict=True)
        ]
        return self._build(values), extra

    def drop(self) -> None:
        self._engine.drop()


def _own(value: Any) -> Any:
    """The value in memory of its own; also if the result of the run holds it, too."""
    return value.copy() if isinstance(value, np.ndarray) else value


class AsItIs:
    """Executes one call by `Session.run`, with whatever it was given."""

    __slots__ = ("_arguments", "_raw")

    def __init__(self, raw: tf.compat.v1.Session, fetches: Any, options: Any, run_metadata: Any) -> None:
        self._raw = raw
        self._arguments = (fetches, options, run_metadata)

    def execute(self, args: Args) -> Any:
        """The result."""
        fetches, options, run_metadata = self._arguments
        with self._raw.graph.as_default():
            return self._raw.run(fetches, _feed_dict(args), options, run_metadata)

    def extend(self, extra: Sequence[Any]) -> Extension:
        """The same call with the tensors `extra` fetched along."""
        return _AlongAsItIs(self._raw, *self._arguments, extra)


class _AlongAsItIs:
    def __init__(self, raw: tf.compat.v1.Session, fetches: Any, options: Any, metadata: Any, extra: Any) -> None:
        self._raw = raw
        self._arguments = (fetches, list(extra)), options, metadata

    def execute(self, args: Args) -> tuple[Any, list[Any]]:
        both, options, run_metadata = self._arguments
        with self._raw.graph.as_default():
            result, extra = self._raw.run(both, _feed_dict(args), options, run_metadata)
        return result, extra

    def drop(self) -> None:
        pass


def _feed_dict(args: Args) -> Any:
    return args.feed_dict if isinstance(args, RawFeed) else None
