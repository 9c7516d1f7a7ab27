"""Guards and fixtures of the whole suite. Test modules cannot import one another: helpers are fixtures here."""

from __future__ import annotations

import os
import sys
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

pytest_plugins = ["pytester"]

#: The kind of TensorFlow that this run tests: its default, or with v2 behaviour off (eager mode and resource
#: variables with it), which is how most graph programs still run. `tests/test_modes.py` starts the second kind.
MODE = os.environ.get("ASUPERVISOR_TEST_TF_MODE", "v2")
if MODE == "v1":
    tf.compat.v1.disable_v2_behavior()

tf.get_logger().setLevel("ERROR")

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
def fresh_environ() -> dict[str, str]:
    """The environment for a Python process that imports this asupervisor."""
    root = str(Path(asupervisor.__file__).parent.parent)
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    environ["PYTHONUNBUFFERED"] = "1"
    environ.pop("ASUPERVISOR_TEST_TF_MODE", None)
    return environ


@pytest.fixture
def plugin_arguments() -> list[str]:
    """What makes pytest load asupervisor's plugin: nothing, where asupervisor is installed."""
    installed = any(entry.value == "asupervisor.testing.plugin" for entry in entry_points(group="pytest11"))
    return [] if installed else ["-p", "asupervisor.testing.plugin"]


@pytest.fixture
def python() -> str:
    """The interpreter that runs this suite."""
    return sys.executable
