"""Clusters of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, cluster_of
from tests.forks import Forks


@pytest.fixture
def cluster(forks: Forks, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster of which no process runs yet; whatever runs at the end is ended."""
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(cluster_of(forks, tmp_path, **arguments))
