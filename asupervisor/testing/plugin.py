"""The pytest plugin: fixtures, markers and, on request, guards for the suites of programs that use asupervisor.

Installing asupervisor makes it known to pytest. Unasked, it only fails a test that leaves a thread of
asupervisor's behind: of a session that was not closed, or could not be. (One that is forgotten on a loop which is
closed ends with it; "tasks" tells of that.) More guards are switched on in ``pyproject.toml``::

    [tool.pytest.ini_options]
    asupervisor_guards = ["stalls", "threads", "files", "environ", "signals", "tasks", "exceptions"]

or all of them by ``["all"]``, none by ``[]``; in ``pytest.ini`` by ``asupervisor_guards = all``. A test says what it
does on purpose: ``@pytest.mark.allow_stall``, ``@pytest.mark.allow_leak`` or
``@pytest.mark.allow_leak("threads", "tasks")``.

TensorFlow is not imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asupervisor.testing import guards
from asupervisor.testing.clock import ManualClock

if TYPE_CHECKING:
    from asupervisor.cluster.launcher import Launcher


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini(
        "asupervisor_guards",
        f"what asupervisor's pytest plugin guards: all, or some of {', '.join(guards.KINDS)}",
        type="args",
        default=["sessions"],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers and install the guards."""
    config.addinivalue_line("markers", "allow_stall: the test blocks the event loop on purpose")
    config.addinivalue_line(
        "markers", "allow_leak(*kinds): the test leaves something behind on purpose; all kinds by default"
    )
    if config.pluginmanager.get_plugin("asupervisor-guards") is None:
        kinds = config.getini("asupervisor_guards")
        guards.install(config, guards.KINDS if "all" in kinds else kinds)


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that moves only when the test says so."""
    return ManualClock()


@pytest.fixture
def cluster_launcher() -> type[Launcher]:
    """Starts a program as a cluster of real processes on this machine, which is gone at the end of the block.

    ::

        async with cluster_launcher(["train.py", "--steps", "100"], ps=1, workers=2) as launcher:
            os.kill(launcher.tasks["worker/0"].pid, signal.SIGKILL)
            assert await launcher.wait() == 0
    """
    from asupervisor.cluster.launcher import Launcher

    return Launcher
