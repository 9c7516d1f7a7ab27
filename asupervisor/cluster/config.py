"""`TF_CONFIG` and cluster specifications: who there is, and who we are. Pure; no TensorFlow.

What Kubernetes' TFJob operator, and everybody after it, puts into the environment variable ``TF_CONFIG``::

    {"cluster": {"ps": ["host:port", ...], "chief": ["host:port"], "worker": ["host:port", ...]},
     "task": {"type": "worker", "index": 0}}

Whoever is ``chief`` (or ``master``, its older name) is the chief; where there is none, worker 0 is. An evaluator is not
in the cluster. A job of one task may have no ``TF_CONFIG`` at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from asupervisor.errors import ClusterConfigError

Role = Literal["ps", "chief", "worker", "evaluator"]

VARIABLE: Final = "TF_CONFIG"
_JOBS: Final = ("ps", "chief", "master", "worker", "evaluator")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:,\[\]@]+):(?P<port>\d{1,5})")
_EXAMPLE: Final = (
    '{"cluster": {"ps": ["host:port"], "chief": ["host:port"], "worker": ["host:port"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a cluster.

    Attributes:
        job: Its job, as the cluster names it.
        index: Its number in the job.
        host: Where it listens.
        port: Likewise.
    """

    job: str
    index: int
    host: str
    port: int

    @property
    def name(self) -> str:
        """What TensorFlow calls it."""
        return f"/job:{self.job}/task:{self.index}"

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A cluster as one of its tasks sees it.

    Attributes:
        jobs: The tasks of each job, in order; empty where there is one task alone.
        job: Our job, as the cluster names it.
        index: Our number in it.
    """

    jobs: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)
    job: str = "chief"
    index: int = 0

    @property
    def role(self) -> Role:
        """What we are here for; ``"master"`` is the older name of ``"chief"``."""
        return "chief" if self.job == "master" else self.job  # type: ignore[return-value]

    @property
    def is_chief(self) -> bool:
        """Whether we are the chief; worker 0 is, where no other task is."""
        return self.role == "chief" or (self.role == "worker" and self.chief == self.me)

    @property
    def me(self) -> Member | None:
        """Our own entry; None for an evaluator, and where there is no cluster."""
        members = self.jobs.get(self.job, ())
        return members[self.index] if self.index < len(members) else None

    @property
    def servers(self) -> tuple[Member, ...]:
        """The parameter servers."""
        return self.jobs.get("ps", ())

    @property
    def chief(self) -> Member | None:
        """The chief's entry."""
        for job in ("chief", "master", "worker"):
            if self.jobs.get(job):
                return self.jobs[job][0]
        return None

    @property
    def trainers(self) -> tuple[Member, ...]:
        """Chief and workers, the chief first."""
        chief = self.chief
        others = (member for job, members in self.jobs.items() if job != "ps" for member in members)
        return () if chief is None else (chief, *(member for member in others if member != chief))

    def addresses(self) -> dict[str, list[str]]:
        """The cluster as `tf.train.ClusterSpec` takes it."""
        return {job: [f"{member.host}:{member.port}" for member in members] for job, members in self.jobs.items()}


def parse(text: str | None, *, source: str = VARIABLE) -> Layout:
    """Understand the value of ``TF_CONFIG``.

    Args:
        text: The value; None or blank where there is none: one task alone.
        source: What to call it in errors.

    Raises:
        ClusterConfigError: It cannot work; the message says what to write instead.
    """
    if text is None or not text.strip():
        return Layout()
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterConfigError(f"{source} is not JSON ({error}): write {_EXAMPLE}") from None
    if not isinstance(config, dict):
        raise ClusterConfigError(f"{source} is a JSON {_kind(config)}, not an object: write {_EXAMPLE}")
    if "sparseCluster" in config or "sparse_cluster" in config:
        raise ClusterConfigError(
            f"{source} has a sparse cluster, which leaves out the addresses of other tasks: switch "
            'enableDynamicWorker off and write a full "cluster"'
        )
    task = config.get("task")
    if "cluster" not in config and task is None:
        return Layout()
    if not isinstance(task, dict) or "type" not in task:
        raise ClusterConfigError(
            f'{source} does not say which task this is: add "task": {{"type": "worker", "index": 0}}'
        )
    cluster = config.get("cluster")
    return layout({} if cluster is None else cluster, task["type"], task.get("index"), source=source)


def layout(cluster: Mapping[str, Any], job: Any, index: Any, *, source: str = "the cluster") -> Layout:
    """Check a cluster specification and our place in it.

    Args:
        cluster: The addresses of each job: a list, or a mapping from their numbers where that is complete.
        job: Our job.
        index: Our number in it; None where it has one task only.
        source: What to call the specification in errors.

    Raises:
        ClusterConfigError: It cannot work; the message says what to write instead.
    """
    if not isinstance(cluster, Mapping):
        raise ClusterConfigError(f'{source}: "cluster" must be an object with one list of "host:port" for each job')
    jobs = {str(name): _members(str(name), found, source) for name, found in cluster.items() if found}
    if job not in _JOBS:
        raise ClusterConfigError(f"{source}: task type {job!r} is unknown: write one of {', '.join(_JOBS)}")
    for name in jobs:
        if name not in _JOBS or name == "evaluator":
            hint = "evaluators are not part of it" if name == "evaluator" else f"jobs are {', '.join(_JOBS[:-1])}"
            raise ClusterConfigError(f'{source}: remove {name!r} from "cluster": {hint}')
    if "chief" in jobs and "master" in jobs:
        raise ClusterConfigError(f'{source}: "chief" and "master" are the same job: keep "chief"')
    for name in ("chief", "master"):
        if len(jobs.get(name, ())) > 1:
            raise ClusterConfigError(f"{source}: there can be one {name} only: make the others workers")
    if index is None:
        if len(jobs.get(job, ())) > 1:
            raise ClusterConfigError(f'{source} does not say which {job} this is: add "index" to "task", from 0')
        index = 0
    if isinstance(index, str) and _is_number(index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ClusterConfigError(f"{source}: task index {index!r} must be a number from 0")
    _check_distinct(jobs, source)
    ours = Layout(jobs, str(job), index)
    if ours.role == "evaluator":
        return ours
    if not jobs and index == 0 and job in ("chief", "master", "worker"):
        return Layout()
    if job not in jobs:
        raise ClusterConfigError(f'{source}: "cluster" has no {job!r}, which this task is: add its "host:port"')
    if index >= len(jobs[job]):
        raise ClusterConfigError(
            f"{source}: task index {index} is out of range: {job} has {len(jobs[job])} (0 to {len(jobs[job]) - 1})"
        )
    if not ours.trainers:
        raise ClusterConfigError(f'{source}: there is nobody to train: add a "chief" or a "worker"')
    if not ours.servers:
        if len(ours.trainers) == 1:
            return Layout()
        raise ClusterConfigError(
            f'{source}: {len(ours.trainers)} tasks train and there is no "ps" to keep their variables: add one'
        )
    return ours


def _members(job: str, found: Any, source: str) -> tuple[Member, ...]:
    if isinstance(found, Mapping):
        numbers = sorted(int(number) for number in found if _is_number(str(number)))
        if numbers != list(range(len(found))):
            raise ClusterConfigError(
                f"{source}: {job} has addresses for {', '.join(map(str, found))} only: a sparse cluster cannot work, "
                "write all of them"
            )
        by_number = {int(number): address for number, address in found.items()}
        found = [by_number[number] for number in numbers]
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise ClusterConfigError(f'{source}: {job} must be a list of "host:port", not {found!r}')
    return tuple(_member(job, index, address, source) for index, address in enumerate(found))


def _member(job: str, index: int, address: Any, source: str) -> Member:
    match = _ADDRESS.fullmatch(address.removeprefix("grpc://")) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65536 or not _can_be_a_host(match["host"]):
        raise ClusterConfigError(f'{source}: {job} {index} has the address {address!r}: write "host:port"')
    return Member(job, index, match["host"], int(match["port"]))


def _can_be_a_host(name: str) -> bool:
    try:
        name.encode("idna")
    except UnicodeError:  # an empty part, or one that is too long
        return False
    return True


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _check_distinct(jobs: Mapping[str, tuple[Member, ...]], source: str) -> None:
    seen: dict[tuple[str, int], Member] = {}
    for members in jobs.values():
        for member in members:
            other = seen.setdefault((member.host, member.port), member)
            if other is not member:
                raise ClusterConfigError(
                    f"{source}: {other.name} and {member.name} have the same address {member.host}:{member.port}: "
                    "give each a port of its own"
                )


def _kind(value: Any) -> str:
    return {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}.get(type(value), "null")
