"""Guards and fixtures of the whole suite. Test modules cannot import one another: helpers are fixtures here."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import hypothesis
import pytest
import tensorflow as tf

import asupervisor
from asupervisor.testing import guards
from asupervisor.testing.clock import ManualClock
from asupervisor.testing.stalls import blame_package
from tests.forks import Forks, environ_of_children

pytest_plugins = ["pytester"]

#: The kind of TensorFlow that this run tests: its default, or with v2 behaviour off (eager mode and resource
#: variables with it), which is how most graph programs still run. `tests/test_modes.py` starts the second kind.
MODE = os.environ.get("ASUPERVISOR_TEST_TF_MODE", "v2")
if MODE == "v1":
    tf.compat.v1.disable_v2_behavior()

tf.get_logger().setLevel("ERROR")

# A shell starts what runs in the background with SIGINT ignored, and children inherit that: those that tests interrupt
# would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run: a red run can be run again. A seed of one's own: `--hypothesis-seed`.
hypothesis.settings.register_profile(
    "asupervisor",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("asupervisor")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Whether or not the plugin is installed, this suite has every guard. Only asupervisor's own code is charged
    # with a stall: what a test itself does on the loop, building a graph for instance, is the test's business.
    blame = blame_package(str(Path(asupervisor.__file__).parent))
    guards.install(config, guards.KINDS, blame=blame)


#: One test in so many of those marked `modes` runs with v2 behaviour off by default, the same ones each time; all of
#: them with `-m full`.
SHARE = int(os.environ.get("ASUPERVISOR_TEST_SHARE", "1"))
#: Counts the tests that have run.
ENDED = itertools.count(1)
FROZEN_AFTER = (20, 100, 300, 600, 1000, 1500, 2000)
OTHER_MODE = pytest.StashKey[tuple[subprocess.Popen[bytes], Any]]()


#: Here a test runs with one value of this parameter by default, with `-m full` also with the other ones. The two kinds
#: of variables differ in plans, results, snapshots and restores, which are tested with both where they are made; the
#: two families come into a cluster by the same way.
ONE_VALUE = {
    "variables": (
        "tests/checkpoint/test_catalogue.py",
        "tests/checkpoint/test_places.py",
        "tests/checkpoint/test_supervised.py",
        "tests/checkpoint/test_writer.py",
        "tests/monitored/",
        "tests/session/test_manager.py",
        "tests/session/test_session.py",
        "tests/session/test_stream.py",
        "tests/supervisor/",
    ),
    "family": ("tests/cluster/",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = MODE == "v1" and SHARE == 1  # part of `-m full`, but what is marked so is run in the default mode only
    tests: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        left: list[Any] = []
        for parameter, places in ONE_VALUE.items():
            if name.startswith(places) and not (whole and parameter == "family"):
                left += left_with_one_value([case for case in cases if case not in left], name, parameter)
        if cases[0].get_closest_marker("thin") is not None and not whole:
            left += left_with_each_value([case for case in cases if case not in left])
        for case in left:
            case.add_marker(pytest.mark.full)
    if SHARE > 1:
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % SHARE == 0]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def left_with_one_value(cases: list[Any], name: str, parameter: str) -> list[Any]:
    """What is left over when each case runs with one of its values of a parameter: the same one each time."""
    same: dict[str, list[Any]] = {}
    for case in cases:
        if parameter in case.callspec.params:
            rest = case.callspec.id.split("-")
            rest.remove(case.callspec.params[parameter])
            same.setdefault("-".join([name, *rest]), []).append(case)
    left: list[Any] = []
    for key, group in same.items():
        left += [case for n, case in enumerate(group) if n != zlib.crc32(key.encode()) % len(group)]
    return left


def left_with_each_value(cases: list[Any]) -> list[Any]:
    """What is left over when each value of each parameter occurs in some case: the same ones each time."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    while missing:
        best = max(left, key=lambda case: len(missing & values[case]))
        left.remove(best)
        missing -= values[best]
    return left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """TensorFlow imports much of itself late; once that is over, the collection after each test need not look at it."""
    result = yield
    if next(ENDED) in FROZEN_AFTER:
        gc.collect()
        gc.freeze()
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the run in the other mode, beside this one: a machine with two cores has room for both."""
    wanted = {item.name: item for item in session.items if item.path.name == "test_modes.py"}
    whole = "test_with_v2_behaviour_off_whole" in wanted
    if not whole and "test_with_v2_behaviour_off" not in wanted:
        return
    if session.config.getoption("collectonly"):
        return
    environ = dict(os.environ) | {"ASUPERVISOR_TEST_TF_MODE": "v1", "ASUPERVISOR_TEST_SHARE": "1" if whole else "5"}
    output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the run)
    command = [sys.executable, "-m", "pytest", "-m", "modes and not full", "-p", "no:cacheprovider", "-q", "tests"]
    process = subprocess.Popen(
        command,
        cwd=session.config.rootpath,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    session.config.stash[OTHER_MODE] = (process, output)


def pytest_unconfigure(config: pytest.Config) -> None:
    if OTHER_MODE in config.stash:
        process, output = config.stash[OTHER_MODE]
        if process.poll() is None:  # this run ended early
            process.terminate()
            process.wait()
        output.close()


@pytest.fixture
def other_mode(pytestconfig: pytest.Config) -> tuple[subprocess.Popen[bytes], Any]:
    """The run in the other mode, under way, and the file that its output goes to."""
    return pytestconfig.stash[OTHER_MODE]


@pytest.fixture(autouse=True)
def tensorflow_state() -> Any:
    """No test leaves a default graph, a default session or another mode behind on the main thread."""
    graph, eager = tf.compat.v1.get_default_graph(), tf.executing_eagerly()
    yield
    assert tf.compat.v1.get_default_session() is None, "the test left a default session behind"
    assert tf.executing_eagerly() == eager, "the test left another execution mode behind"
    assert tf.compat.v1.get_default_graph() is graph, "the test left another default graph behind"


@pytest.fixture
def tf_mode() -> str:
    """``v2`` or ``v1``: see `MODE`."""
    return MODE


@pytest.fixture(params=["resource", "ref"])
def variables(request: pytest.FixtureRequest) -> str:
    """Both kinds of variables. `tf.compat.v1.get_variable` makes this kind for the length of the test."""
    before = tf.compat.v1.resource_variables_enabled()
    kind: str = request.param
    (tf.compat.v1.enable_resource_variables if kind == "resource" else tf.compat.v1.disable_resource_variables)()
    yield kind
    (tf.compat.v1.enable_resource_variables if before else tf.compat.v1.disable_resource_variables)()


@pytest.fixture
def graph() -> tf.Graph:
    """An empty graph: fill it in `with graph.as_default():`."""
    return tf.Graph()


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves only when the test says so."""
    return ManualClock()


@pytest.fixture
def heard() -> Callable[..., Awaitable[Any]]:
    """Waits for an event of one of the given kinds."""

    async def wait(events: AsyncIterator[Any], *kinds: str, timeout_secs: float = 30.0) -> Any:
        async with asyncio.timeout(timeout_secs):
            async for event in events:
                if event.kind in kinds:
                    return event
        raise AssertionError(f"the events ended without {' or '.join(kinds)}")

    return wait


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """Like `fresh_environ`, for fixtures of a wider scope."""
    return environ_of_children()


@pytest.fixture
def fresh_environ() -> dict[str, str]:
    """The environment for a Python process that imports this asupervisor."""
    return environ_of_children()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """See `Forks`. One such process for the whole run, from the first test on that asks for it."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def plugin_arguments() -> list[str]:
    """What makes pytest load asupervisor's plugin: nothing, where asupervisor is installed."""
    installed = any(entry.value == "asupervisor.testing.plugin" for entry in entry_points(group="pytest11"))
    return [] if installed else ["-p", "asupervisor.testing.plugin"]


@pytest.fixture
def python() -> str:
    """The interpreter that runs this suite."""
    return sys.executable
