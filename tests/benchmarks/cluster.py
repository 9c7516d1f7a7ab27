"""Clusters that lose and regain their tasks, beside TensorFlow's own Supervisor and MonitoredTrainingSession.

Every case is run by real processes on loopback, each family in turn. What did not come within `PATIENCE_SECS` is told
as infinite: with TensorFlow's own classes that is the answer of several cases.
"""

from __future__ import annotations

import itertools
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asupervisor.checkpoint.catalogue import checkpoints
from tests.benchmarks.measure import Report
from tests.cluster.bad_day import BadDay
from tests.cluster.harness import Cluster, Process, cluster_of
from tests.forks import Forks

PATIENCE_SECS = 45.0
FREEZE_SECS = 12.0
PEERS = {
    "monitored session": ("replica", "monitored"),
    "supervisor": ("replica", "supervised"),
    "tf MonitoredTrainingSession": ("tf_replica", "monitored"),
    "tf Supervisor": ("tf_replica", "supervised"),
}
Case = Callable[[Callable[..., Cluster]], dict[str, float]]


async def cases(report: Report, repeats: int, scale: float) -> None:
    """Every case with every peer; few repeats, and of TensorFlow's one, since those take their time."""
    forks = Forks()
    try:
        for case, goals in CASES.items():
            samples: dict[str, list[float]] = {}
            for repeat in range(max(1, min(3, repeats // 5))):
                for name, (program, family) in PEERS.items():
                    if repeat and program == "tf_replica":
                        continue
                    with _made(forks, program, family) as make:
                        for what, secs in case(make).items():
                            samples.setdefault(f"{name}: {what}", []).append(secs)
            title = f"cluster: {(case.__doc__ or '').strip().rstrip('.')}"
            report.add(title, samples, unit="s ")
            for what, limit in goals.items():
                for name in list(PEERS)[:2]:
                    key = f"{name}: {what}"
                    if key in samples:
                        report.add_check(title, f"{key}, longest", max(samples[key]), limit)
    finally:
        forks.close()


@contextmanager
def _made(forks: Forks, program: str, family: str) -> Iterator[Callable[..., Cluster]]:
    with tempfile.TemporaryDirectory() as directory:
        made: list[Cluster] = []

        def make(**arguments: object) -> Cluster:
            context = cluster_of(forks, Path(directory), program=program, family=family, **arguments)
            contexts.append(context)
            made.append(context.__enter__())
            return made[-1]

        contexts: list[object] = []
        try:
            yield make
        finally:
            for context in contexts:
                context.__exit__(None, None, None)  # type: ignore[attr-defined]


def _came(process: Process, *kinds: str, since: float = 0.0, at_least: int = 0) -> float:
    """When something was told; infinite where it was not."""
    try:
        record = process.wait_for(
            *kinds, since=since, timeout_secs=PATIENCE_SECS, where=lambda told: int(told.get("step", 0)) >= at_least
        )
    except AssertionError:
        return math.inf
    return float(record["t"])


def _trains(*processes: Process, since: float = 0.0) -> float:
    return max(_came(process, "step", since=since) for process in processes)


def _ends(*processes: Process) -> float:
    """When all of them had ended; infinite where one had not."""
    deadline = time.monotonic() + PATIENCE_SECS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except AssertionError:
            return math.inf
    return max(process.ended_at for process in processes)


# ------------------------------------------------------------------------------------------ the cases


def server_last(make: Callable[..., Cluster]) -> dict[str, float]:
    """Worker, chief, and the parameter server last."""
    made = make()
    worker = made.start("worker")
    time.sleep(1.0)
    chief = made.start("chief")
    time.sleep(1.0)
    made.start("ps")
    ready = _came(chief, "ready")
    return {"worker after chief": _came(worker, "ready") - ready if ready < math.inf else math.inf}


def chief_last(make: Callable[..., Cluster]) -> dict[str, float]:
    """Parameter server, worker, and the chief last."""
    made = make()
    made.start("ps")
    worker = made.start("worker")
    time.sleep(2.0)
    ready = _came(made.start("chief"), "ready")
    return {"worker after chief": _came(worker, "ready") - ready if ready < math.inf else math.inf}


def signal_while_waiting(make: Callable[..., Cluster]) -> dict[str, float]:
    """Chief and worker wait for a parameter server; SIGTERM after 4 s."""
    made = make()
    tasks = made.start("chief"), made.start("worker")
    time.sleep(4.0)
    begun = time.time()
    for task in tasks:
        task.signal(signal.SIGTERM)
    return {"ended after": _ends(*tasks) - begun}


def missing_worker(make: Callable[..., Cluster]) -> dict[str, float]:
    """One of two workers never starts."""
    made = make(workers=2)
    begun = time.time()
    made.start("ps")
    return {"the others train after": _trains(made.start("chief"), made.start("worker", 1)) - begun}


def worker_killed(make: Callable[..., Cluster]) -> dict[str, float]:
    """A worker is killed and started again."""
    made = make(workers=2)
    tasks = made.start_all()
    _trains(tasks["chief-0"], tasks["worker-0"], tasks["worker-1"])
    tasks["worker-0"].kill()
    again = made.start("worker", 0)
    back = _trains(again) - again.begun_at
    steps = [record["t"] for record in tasks["worker-1"].records("step", since=tasks["worker-0"].killed_at)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    return {"at work after": back, "longest pause of the other worker": max(gaps, default=math.inf)}


def chief_killed(make: Callable[..., Cluster]) -> dict[str, float]:
    """The chief is killed and started again."""
    made = make(save_secs=30)
    tasks = made.start_all()
    observer = made.observe()
    _trains(tasks["chief-0"], tasks["worker-0"])
    time.sleep(2.0)
    tasks["chief-0"].kill()
    time.sleep(1.0)
    chief = made.start("chief")
    back = _trains(chief) - chief.begun_at
    time.sleep(0.5)
    seen = [record["step"] for record in observer.records("seen")]
    lost = max((earlier - later for earlier, later in itertools.pairwise(seen)), default=math.inf)
    return {"at work after": back, "steps lost": max(0.0, lost)}


def server_killed(make: Callable[..., Cluster]) -> dict[str, float]:
    """The parameter server is killed, and started again after 3 s."""
    made = make(save_secs=1)
    tasks = made.start_all()
    _trains(tasks["chief-0"], tasks["worker-0"])
    time.sleep(3.0)
    tasks["ps-0"].kill()
    published = max((record.step or 0 for record in checkpoints(made.logdir)), default=0)
    time.sleep(3.0)
    server = made.start("ps")
    serves = _came(server, "cluster.serving")
    result = {}
    for name in ("chief-0", "worker-0"):
        result[f"{name[:-2]} at work after"] = _came(tasks[name], "step", since=serves) - serves
    after = [record["step"] for name in ("chief-0", "worker-0") for record in tasks[name].records("step", since=serves)]
    result["steps behind the newest checkpoint"] = float(max(0, published - min(after))) if after else math.inf
    return result


def server_gone(make: Callable[..., Cluster]) -> dict[str, float]:
    """The parameter server is gone for good; SIGTERM after 3 s."""
    made = make(outage_secs=30)
    tasks = made.start_all()
    _trains(tasks["chief-0"], tasks["worker-0"])
    tasks["ps-0"].kill()
    time.sleep(3.0)
    begun = time.time()
    for name in ("chief-0", "worker-0"):
        if tasks[name].running:
            tasks[name].signal(signal.SIGTERM)
    return {"ended after": _ends(tasks["chief-0"], tasks["worker-0"]) - begun}


def server_never_back(make: Callable[..., Cluster]) -> dict[str, float]:
    """The parameter server is gone for good; the budget for an outage is 5 s."""
    made = make(outage_secs=5)
    tasks = made.start_all()
    _trains(tasks["chief-0"], tasks["worker-0"])
    tasks["ps-0"].kill()
    return {"ended after": _ends(tasks["chief-0"], tasks["worker-0"]) - tasks["ps-0"].killed_at}


def server_frozen(make: Callable[..., Cluster]) -> dict[str, float]:
    """The parameter server is frozen for 12 s."""
    made = make(save_secs=30)
    tasks = made.start_all()
    _trains(tasks["chief-0"], tasks["worker-0"])
    time.sleep(1.0)
    tasks["ps-0"].freeze()
    frozen_at = time.time()
    before = max(record["step"] for name in ("chief-0", "worker-0") for record in tasks[name].records("step"))
    noticed = math.inf
    while time.time() < frozen_at + FREEZE_SECS:
        told = tasks["chief-0"].records("session.recovering", "stop.error", since=frozen_at)
        if told and noticed == math.inf:
            noticed = told[0]["t"] - frozen_at
        time.sleep(0.05)
    tasks["ps-0"].thaw()
    thawed_at = time.time()
    back = _trains(tasks["chief-0"], tasks["worker-0"], since=thawed_at) - thawed_at
    after = [
        record["step"] for name in ("chief-0", "worker-0") for record in tasks[name].records("step", since=thawed_at)
    ]
    lost = float(max(0, before - max(after))) if after else math.inf
    return {"noticed after": noticed, "at work after the thaw": back, "steps lost": lost}


def end_of_job(make: Callable[..., Cluster]) -> dict[str, float]:
    """The job ends, the chief three seconds before its worker."""
    made = make()
    server, chief = made.start("ps"), made.start("chief", steps=50)
    worker = made.start("worker", steps=400)
    trained = _came(worker, "trained")
    _ends(chief, worker)
    newest = max((record.step or 0 for record in checkpoints(made.logdir)), default=0)
    ended = _ends(server)
    last = max(record["step"] for record in worker.records("step")) if worker.records("step") else 0
    return {
        "steps that the last checkpoint lacks": float(max(0, last - newest)),
        "everybody has ended, after the last step": max(ended, chief.ended_at) - trained
        if ended < math.inf
        else math.inf,
        "the parameter server, after the chief": ended - chief.ended_at,
    }


def sync_replicas(make: Callable[..., Cluster]) -> dict[str, float]:
    """Synchronous replicas, two of three: one is killed and back, then the end."""
    made = make(workers=2, sync=2, stop_grace_secs=120)
    tasks = {
        name: made.start(name[:-2], int(name[-1]), steps=1500) for name in ("ps-0", "chief-0", "worker-0", "worker-1")
    }
    _trains(tasks["chief-0"], tasks["worker-0"], tasks["worker-1"])
    tasks["worker-0"].kill()
    again = made.start("worker", 0, steps=1500)
    back = _trains(again) - again.begun_at
    trained = _came(tasks["chief-0"], "trained")
    return {
        "at work after": back,
        "ended after the chief's last step": _ends(tasks["chief-0"], again, tasks["worker-1"]) - trained,
    }


def random_kills(make: Callable[..., Cluster]) -> dict[str, float]:
    """For 20 s, any task is killed every few seconds and started again."""
    day = BadDay(make(workers=2, save_secs=1), seed=4)
    ended: list[Process] = []
    day.live(20.0, ended.append)
    begun = time.time()
    back = _trains(*day.trainers, since=begun) - begun
    lost = sum(earlier["step"] - later["step"] for earlier, later, loss in day.ways_back() if loss is None)
    return {
        "steps lost without the loss of a parameter server": float(lost),
        "tasks that ended by themselves": float(len(ended)),
        "all at work after the last kill": back,
    }


CASES: dict[Case, dict[str, float]] = {
    server_last: {"worker after chief": 1.0},
    chief_last: {"worker after chief": 1.0},
    signal_while_waiting: {"ended after": 2.0},
    missing_worker: {"the others train after": 10.0},
    worker_killed: {"at work after": 1.0, "longest pause of the other worker": 1.0},
    chief_killed: {"at work after": 5.0, "steps lost": 0.0},
    server_killed: {
        "chief at work after": 2.0,
        "worker at work after": 2.0,
        "steps behind the newest checkpoint": 0.0,
    },
    server_gone: {"ended after": 2.0},
    server_never_back: {"ended after": 5.0},  # the budget, to notice it and to end included
    server_frozen: {"noticed after": 12.0, "at work after the thaw": 5.0, "steps lost": 0.0},
    end_of_job: {"steps that the last checkpoint lacks": 0.0, "the parameter server, after the chief": 1.0},
    sync_replicas: {"at work after": 5.0, "ended after the chief's last step": 10.0},
    random_kills: {
        "steps lost without the loss of a parameter server": 0.0,
        "tasks that ended by themselves": 0.0,
        "all at work after the last kill": 10.0,
    },
}
