"""Issue 2, item 2: names, order, kinds and defaults are those of the installed TensorFlow; extras are keyword-only."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import Coordinator, LooperTask, SessionManager, Supervisor

tf1 = tf.compat.v1
PAIRS: dict[type, type] = {
    Supervisor: tf1.train.Supervisor,
    Coordinator: tf.train.Coordinator,
    SessionManager: tf1.train.SessionManager,
}
EMPTY = inspect.Parameter.empty

#: What becomes asynchronous here; everything else keeps its colour.
ASYNC = {
    (Supervisor, "prepare_or_wait_for_session"),
    (Supervisor, "stop"),
    (Supervisor, "wait_for_stop"),
    (Supervisor, "summary_computed"),
    (Coordinator, "join"),
    (Coordinator, "wait_for_stop"),
    (SessionManager, "prepare_session"),
    (SessionManager, "recover_session"),
    (SessionManager, "wait_for_session"),
}
ALIASES = {
    "PrepareSession": "prepare_or_wait_for_session",
    "StartQueueRunners": "start_queue_runners",
    "StartStandardServices": "start_standard_services",
    "Stop": "stop",
    "RequestStop": "request_stop",
    "Loop": "loop",
    "ShouldStop": "should_stop",
    "StopOnException": "stop_on_exception",
    "WaitForStop": "wait_for_stop",
    "SummaryComputed": "summary_computed",
}


def public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def functions() -> list[tuple[type, str]]:
    """Every function of the originals, constructors too."""
    found = []
    for ours, theirs in PAIRS.items():
        found.append((ours, "__init__"))
        found += [(ours, name) for name in public(theirs) if inspect.isfunction(getattr(theirs, name))]
    return found


def plain(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def same_default(ours: Any, theirs: Any) -> bool:
    return (
        ours is theirs
        or (type(ours) in (int, float) and type(theirs) in (int, float) and ours == theirs)
        or (type(ours) is type(theirs) and ours == theirs)
    )


def compare(ours: Any, theirs: Any) -> None:
    """The original's parameters come first, in its order, with its kinds and defaults; the rest is keyword-only."""
    mine, original = plain(ours), plain(theirs)
    assert list(mine)[: len(original)] == list(original)
    for name, expected in original.items():
        assert mine[name].kind is expected.kind, name
        assert same_default(mine[name].default, expected.default), f"{name}: {mine[name]} is not {expected}"
    for name in list(mine)[len(original) :]:
        assert mine[name].kind is inspect.Parameter.KEYWORD_ONLY, f"{name} is an extra"
        assert mine[name].default is not EMPTY, f"{name} is an extra, so it must be optional"


@pytest.mark.parametrize(("cls", "name"), functions(), ids=lambda value: getattr(value, "__name__", value))
def test_each_function_has_the_originals_signature(cls: type, name: str) -> None:
    ours, theirs = getattr(cls, name), getattr(PAIRS[cls], name)
    if (cls, name) == (Coordinator, "stop_on_exception"):  # a decorated generator there, a class of ours here
        theirs = inspect.unwrap(theirs)
    compare(ours, theirs)


@pytest.mark.parametrize("cls", PAIRS, ids=lambda cls: cls.__name__)
def test_each_public_name_of_the_original_exists(cls: type) -> None:
    assert not set(public(PAIRS[cls])) - set(public(cls))


@pytest.mark.parametrize("cls", PAIRS, ids=lambda cls: cls.__name__)
def test_properties_are_properties(cls: type) -> None:
    theirs = PAIRS[cls]
    names = [name for name in public(theirs) if isinstance(getattr(theirs, name), property)]
    assert names or cls is SessionManager
    for name in names:
        assert isinstance(getattr(cls, name), property), name
        assert inspect.getdoc(getattr(cls, name)), name


@pytest.mark.parametrize(("cls", "name"), functions(), ids=lambda value: getattr(value, "__name__", value))
def test_what_waits_is_async_and_what_does_not_is_not(cls: type, name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(cls, name)) == ((cls, name) in ASYNC or _alias_of_async(cls, name))


def _alias_of_async(cls: type, name: str) -> bool:
    return cls is Supervisor and (Supervisor, ALIASES.get(name, "")) in ASYNC


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_camel_case_aliases(alias: str, name: str) -> None:
    assert getattr(Supervisor, alias) is getattr(Supervisor, name)
    assert callable(getattr(tf1.train.Supervisor, alias)), "the original has it, too"


def test_no_alias_of_the_original_is_missing() -> None:
    theirs = {name for name in public(tf1.train.Supervisor) if name[0].isupper() and name != "USE_DEFAULT"}
    assert theirs == set(ALIASES)


def test_use_default_is_the_originals() -> None:
    assert Supervisor.USE_DEFAULT == tf1.train.Supervisor.USE_DEFAULT == 0


def test_looper() -> None:
    """`LooperThread` is a `threading.Thread` there; its constructor, `loop` and the three overridable methods count."""
    original = tf1.train.LooperThread
    compare(LooperTask.__init__, original.__init__)
    for name in ("start_loop", "run_loop", "stop_loop"):
        compare(getattr(LooperTask, name), getattr(original, name))
    compare(LooperTask.loop, original.loop)
    assert isinstance(inspect.getattr_static(LooperTask, "loop"), staticmethod)
    assert isinstance(inspect.getattr_static(original, "loop"), staticmethod)


def test_documented_in_our_own_words() -> None:
    """Each public method has a docstring, and says which of TensorFlow's it stands for."""
    for ours, theirs in PAIRS.items():
        assert "Source: `tf.compat.v1.train." in (inspect.getdoc(ours) or "")
        for name in public(theirs):
            text = inspect.getdoc(getattr(ours, name))
            if name != "USE_DEFAULT":
                assert text, f"{ours.__name__}.{name}"
                assert text != inspect.getdoc(getattr(theirs, name)), f"{ours.__name__}.{name}"


def test_a_changed_default_would_be_noticed() -> None:
    """The comparison itself can fail."""

    def theirs(a: Any, b: int = 1, c: Any = None) -> None: ...

    def shuffled(b: Any, a: int = 1, c: Any = None) -> None: ...

    def other_default(a: Any, b: int = 2, c: Any = None) -> None: ...

    def bool_for_int(a: Any, b: bool = True, c: Any = None) -> None: ...

    def positional_extra(a: Any, b: int = 1, c: Any = None, d: Any = None) -> None: ...

    def keyword_extra(a: Any, b: int = 1, c: Any = None, *, d: Any = None) -> None: ...

    compare(keyword_extra, theirs)
    for wrong in (shuffled, other_default, bool_for_int, positional_extra):
        with pytest.raises(AssertionError):
            compare(wrong, theirs)
