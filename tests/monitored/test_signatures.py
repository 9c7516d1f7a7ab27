"""Names, order, kinds and defaults of the second family are those of the installed TensorFlow; extras need a name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf

import asupervisor
from asupervisor.monitored import training

tf1 = tf.compat.v1
EMPTY = inspect.Parameter.empty

#: What is called with the same arguments; with what may be added by keyword.
PAIRS = {
    "MonitoredTrainingSession": {
        "graph",
        "recovery",
        "recovery_wait_secs",
        "clock",
        "executor",
        "task",
        "init_from",
        "partial_restore",
        "checkpoint_filename_with_path",
    },
    "MonitoredSession": {"graph", "recovery", "recovery_wait_secs", "clock", "executor"},
    "SingularMonitoredSession": {"graph", "recovery_wait_secs", "clock", "executor"},
    "ChiefSessionCreator": {"graph", "task", "init_from", "partial_restore", "max_wait_secs"},
    "WorkerSessionCreator": {"graph", "task"},
    "StopAtStepHook": set(),
    "LoggingTensorHook": set(),
}
ASYNC = {"run", "run_step_fn", "close", "create_session"}


def plain(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if not name.startswith("_")}


@pytest.mark.parametrize("name", PAIRS)
def test_constructors(name: str) -> None:
    ours, theirs = plain(getattr(asupervisor, name)), plain(getattr(tf1.train, name))
    extras = {key for key, parameter in ours.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    assert extras == PAIRS[name]
    assert [key for key in ours if key not in extras] == list(theirs)
    for key, parameter in theirs.items():
        default = parameter.default
        if type(default) is object:  # "not given"
            assert ours[key].default is training.USE_DEFAULT
        else:
            assert ours[key].default == default, key


@pytest.mark.parametrize("name", ["MonitoredSession", "SingularMonitoredSession"])
def test_methods_and_attributes(name: str) -> None:
    ours, theirs = getattr(asupervisor, name), getattr(tf1.train, name)
    for member in dir(theirs):
        if member.startswith("_"):
            continue
        assert hasattr(ours, member), member
        original, here = inspect.getattr_static(theirs, member), inspect.getattr_static(ours, member)
        if inspect.isfunction(original):
            expected = [(p.name, p.default) for p in inspect.signature(original).parameters.values()]
            found = [(p.name, p.default) for p in inspect.signature(here).parameters.values()]
            assert found == expected, member
            awaited = inspect.iscoroutinefunction(here) or "Awaitable" in str(inspect.signature(here).return_annotation)
            assert awaited is (member in ASYNC), member
        elif isinstance(original, property):
            assert isinstance(here, property)


def test_step_context() -> None:
    for member in ("session", "run_with_hooks", "request_stop"):
        assert hasattr(asupervisor.MonitoredSession.StepContext, member)
        assert hasattr(tf1.train.MonitoredSession.StepContext, member)


def test_hooks_have_the_same_methods() -> None:
    for member in ("begin", "after_create_session", "before_run", "after_run", "end"):
        ours = inspect.signature(getattr(asupervisor.AsyncSessionRunHook, member))
        theirs = inspect.signature(getattr(tf1.train.SessionRunHook, member))
        assert list(ours.parameters) == list(theirs.parameters)


def test_session_creators_are_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        asupervisor.SessionCreator()  # type: ignore[abstract]


def test_train_loop() -> None:
    ours, theirs = plain(asupervisor.train_loop), plain(tf1.train.basic_train_loop)
    positional = [p for p in ours.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.default for p in positional] == [p.default for p in theirs.values()]
    assert [p.name for p in positional][2:] == list(theirs)[2:] == ["args", "kwargs", "master"]


def test_everything_tells_its_source() -> None:
    for name in (*PAIRS, "SessionCreator", "AsyncSessionRunHook", "NonFiniteHook", "StepProfileHook", "train_loop"):
        assert "Source: `tf.compat.v1.train." in str(inspect.getdoc(getattr(asupervisor, name))), name
