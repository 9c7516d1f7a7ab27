"""A bad day: one task after the other is killed and started again, and somebody looks on from outside."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.cluster.harness import Cluster, Process


class BadDay:
    """A cluster and what becomes of it.

    Args:
        made: The cluster; none of its tasks runs yet.
        seed: Who is killed when.

    Attributes:
        tasks: The tasks that run now, by ``job-index``.
        losses: When a parameter server was killed.
    """

    def __init__(self, made: Cluster, seed: int) -> None:
        self._made = made
        self._rng = random.Random(seed)
        self.tasks = made.start_all()
        self._observer = made.observe()
        self.losses: list[float] = []
        for task in self.trainers:
            task.wait_for("step", timeout_secs=60)

    @property
    def trainers(self) -> list[Process]:
        """Chief and workers."""
        return [task for name, task in self.tasks.items() if not name.startswith("ps")]

    def live(self, secs: float, ended: Callable[[Process], Any]) -> None:
        """Kill a task every few seconds, and start it again.

        Args:
            secs: How long, in seconds.
            ended: Called for each task that has ended by itself; it is started again, too.
        """
        end = time.monotonic() + secs
        while time.monotonic() < end:
            time.sleep(self._rng.uniform(0.5, 3.0))
            self.look_for_ended(ended)
            name = self._rng.choice(sorted(self.tasks))
            self.tasks[name].kill()
            if name.startswith("ps"):
                self.losses.append(self.tasks[name].killed_at)
            time.sleep(self._rng.choice([0.0, 0.2, 1.0]))
            self._start(name)

    def look_for_ended(self, ended: Callable[[Process], Any]) -> None:
        """Tell of each task that has ended by itself, and start it again."""
        for name, task in list(self.tasks.items()):
            if not task.running:
                ended(task)
                self._start(name)

    def ways_back(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], float | None]]:
        """Where the step went back: before and after, and when a parameter server was killed just then, if one was."""
        seen = self._observer.records("seen")
        assert len(seen) > 1, f"nothing was seen:\n{self._observer.text[-2000:]}"
        for earlier, later in itertools.pairwise(seen):
            if later["step"] < earlier["step"]:
                losses = (at for at in self.losses if earlier["t"] - 1.0 <= at <= later["t"])
                yield earlier, later, next(losses, None)

    def wait_until_seen(self, since: float) -> None:
        """Wait until the step was seen from outside since a time."""
        self._observer.wait_for("seen", since=since, timeout_secs=60)

    def _start(self, name: str) -> None:
        job, _, index = name.partition("-")
        self.tasks[name] = self._made.start(job, int(index))
