"""Clusters of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, Zygote, cluster_of


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks for each task."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def cluster(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster of which no process runs yet; whatever runs at the end is ended."""
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(cluster_of(zygote, tmp_path, **arguments))
