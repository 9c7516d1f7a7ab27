"""Clusters whose tasks come and go: real processes on loopback, real signals.

What is proven here is what happens; how fast it is, beside TensorFlow's own classes, is for
``python -m tests.benchmarks --only cluster``.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.checkpoint.catalogue import checkpoints
from tests.cluster.bad_day import BadDay
from tests.cluster.harness import Cluster, Process
from tests.cluster.network import Network

families = pytest.mark.parametrize("family", ["monitored", "supervised"])
full = pytest.mark.full


def steps_seen(process: Process, since: float = 0.0) -> list[int]:
    return [record["step"] for record in process.records("step", since=since)]


def wait_until_trains(process: Process, since: float = 0.0, timeout_secs: float = 30.0) -> dict[str, Any]:
    return process.wait_for("step", since=since, timeout_secs=timeout_secs)


def inside(prefix: str) -> int:
    """The global step in a checkpoint."""
    return int(tf.train.load_checkpoint(prefix).get_tensor("global_step"))


def check_never_back(observer: Process, since: float) -> None:
    """The step, seen from outside, also since a time."""
    observer.wait_for("seen", since=since)
    seen = [record["step"] for record in observer.records("seen")]
    assert seen == sorted(seen)


# ------------------------------------------------------------------------------------------ in and out


@pytest.mark.parametrize(
    ("family", "order"),
    [
        ("monitored", "worker-0 chief-0 ps-0"),
        ("supervised", "chief-0 worker-0 ps-0"),
        ("monitored", "ps-0 worker-0 chief-0"),
        pytest.param("supervised", "worker-0 chief-0 ps-0", marks=full),
        pytest.param("monitored", "chief-0 worker-0 ps-0", marks=full),
        pytest.param("supervised", "ps-0 worker-0 chief-0", marks=full),
    ],
)
def test_f22_tasks_start_in_any_order_and_the_job_ends_by_itself(
    cluster: Callable[..., Cluster], family: str, order: str
) -> None:
    """F22: who comes first waits for the others, and nobody waits for long once they are there."""
    made = cluster(family=family, steps=30)
    tasks: dict[str, Process] = {}
    for name in order.split():
        job, _, index = name.partition("-")
        tasks[name] = made.start(job, int(index))
        # It has come as far as it can without the others.
        tasks[name].wait_for("cluster.serving", "cluster.waiting", "ready")
    for task in tasks.values():
        assert task.wait() == 0
    chief, worker, server = tasks["chief-0"], tasks["worker-0"], tasks["ps-0"]
    assert worker.wait_for("ready")["t"] - chief.wait_for("ready")["t"] < 10
    assert server.wait_for("ended")["how"] == "done"
    assert worker.wait_for("trained")["step"] >= 30
    # The chief saves after the last worker: every step is in there.
    last = checkpoints(made.logdir)[-1]
    assert last.step == max(*steps_seen(chief), *steps_seen(worker), inside(last.prefix)) == inside(last.prefix)
    saved = chief.wait_for("checkpoint.saved", where=lambda record: f"model.ckpt-{last.step} " in record["message"])
    assert saved["t"] > worker.wait_for("trained")["t"]


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("monitored", signal.SIGTERM),
        ("supervised", signal.SIGTERM),
        ("monitored", signal.SIGINT),
        pytest.param("supervised", signal.SIGINT, marks=full),
    ],
)
def test_a_signal_ends_those_who_wait_for_a_parameter_server(
    cluster: Callable[..., Cluster], family: str, number: int
) -> None:
    made = cluster(family=family, handle_signals=number == signal.SIGTERM)
    chief, worker = made.start("chief"), made.start("worker")
    for task in (chief, worker):
        assert made.spec["ps"][0] in task.wait_for("cluster.waiting")["message"]
    for task in (chief, worker):
        begun = time.monotonic()
        task.signal(number)
        assert task.wait() == 128 + number
        assert time.monotonic() - begun < 5


def test_a_signal_ends_a_worker_that_waits_for_its_chief_and_a_server_that_serves(
    cluster: Callable[..., Cluster],
) -> None:
    made = cluster()
    server, worker = made.start("ps"), made.start("worker")
    assert "/job:chief/task:0" in worker.wait_for("cluster.waiting", where=lambda r: "chief" in r["message"])["message"]
    for task in (worker, server):
        task.signal(signal.SIGTERM)
        assert task.wait() == 143
    assert server.wait_for("ended")["how"] == "signal"


def test_f22_a_worker_whose_chief_never_comes_is_told_whom_it_waits_for(cluster: Callable[..., Cluster]) -> None:
    made = cluster(max_wait_secs=1.5)
    made.start("ps")
    worker = made.start("worker")
    assert worker.wait() == 138
    assert "SessionNotReady: " in worker.text
    assert f"the model, by /job:chief/task:0 at {made.spec['chief'][0]}" in worker.text


@families
def test_f22_nobody_waits_for_a_worker_that_never_starts(cluster: Callable[..., Cluster], family: str) -> None:
    """TensorFlow's sessions wait for every task of the cluster."""
    made = cluster(workers=2, family=family, steps=30)
    tasks = [made.start("ps"), made.start("chief"), made.start("worker", 1)]
    for task in tasks:
        assert task.wait() == 0


# ------------------------------------------------------------------------------------------ losses


def test_a_worker_that_is_killed_comes_back_and_the_others_notice_nothing(cluster: Callable[..., Cluster]) -> None:
    made = cluster(workers=2)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0", "worker-1"):
        wait_until_trains(tasks[name])
    tasks["worker-0"].kill()
    again = made.start("worker", 0)
    wait_until_trains(again)
    for name in ("chief-0", "worker-1"):
        wait_until_trains(tasks[name], since=again.begun_at)
        assert not tasks[name].records("session.recovering", "unknown")


@families
@pytest.mark.modes
def test_a_chief_that_is_killed_adopts_the_live_model(cluster: Callable[..., Cluster], family: str) -> None:
    """TensorFlow's chief restores its last checkpoint over what the workers have done since."""
    made = cluster(family=family, save_secs=3600)
    tasks = made.start_all()
    observer = made.observe()
    wait_until_trains(tasks["worker-0"])
    tasks["chief-0"].kill()
    killed_at = time.time()
    worked_on = tasks["worker-0"].wait_for("step", since=killed_at + 0.3)
    chief = made.start("chief", steps=worked_on["step"] + 100)
    ready = chief.wait_for("ready")
    assert ready["step"] >= worked_on["step"]
    assert chief.records("cluster.adopted")
    wait_until_trains(tasks["worker-0"], since=ready["t"])
    assert not tasks["worker-0"].records("session.recovering")
    check_never_back(observer, since=ready["t"])


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("monitored", "resource"),
        ("supervised", "ref"),
        pytest.param("supervised", "resource", marks=full),
        pytest.param("monitored", "ref", marks=full),
    ],
)
@pytest.mark.modes
def test_a_parameter_server_that_is_killed_gets_its_model_back(
    cluster: Callable[..., Cluster], family: str, kind: str
) -> None:
    made = cluster(family=family, save_secs=0.4, variables=kind)
    tasks = made.start_all()
    tasks["chief-0"].wait_for("checkpoint.saved", where=lambda r: "ckpt-0 " not in r["message"])
    wait_until_trains(tasks["worker-0"], since=time.time() + 0.5)
    tasks["ps-0"].kill()
    published = checkpoints(made.logdir)[-1]
    made.start("ps")
    restored = tasks["chief-0"].wait_for("session.restored", since=tasks["ps-0"].killed_at)
    back = checkpoints(made.logdir)
    assert published.step in [record.step for record in back]
    for name in ("chief-0", "worker-0"):
        first = wait_until_trains(tasks[name], since=restored["t"])
        assert published.step is not None
        assert first["step"] >= published.step
    # One line of steps: from the checkpoint on, never from 0.
    after = [step for name in ("chief-0", "worker-0") for step in steps_seen(tasks[name], since=restored["t"])]
    assert min(after) >= (published.step or 0) > 0


def test_without_a_checkpoint_a_lost_model_is_an_error_and_not_a_new_beginning(cluster: Callable[..., Cluster]) -> None:
    made = cluster(logdir=None)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name])
    tasks["ps-0"].kill()
    made.start("ps")
    assert tasks["chief-0"].wait() == 1
    assert "ModelLost" in tasks["chief-0"].text
    assert 0 not in steps_seen(tasks["worker-0"], since=tasks["ps-0"].killed_at)


@families
def test_a_parameter_server_that_is_gone_for_good_is_named(cluster: Callable[..., Cluster], family: str) -> None:
    made = cluster(family=family, outage_secs=2.0)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name])
    tasks["ps-0"].kill()
    for name in ("chief-0", "worker-0"):
        assert tasks[name].wait() == 138
        assert f"PeersUnreachable: no answer from /job:ps/task:0 at {made.spec['ps'][0]}" in tasks[name].text


def test_f22_a_parameter_server_that_never_comes_is_named_to_the_chief(cluster: Callable[..., Cluster]) -> None:
    made = cluster(max_wait_secs=1.0)
    chief = made.start("chief")
    assert chief.wait() == 138
    assert f"PeersUnreachable: no answer from /job:ps/task:0 at {made.spec['ps'][0]}" in chief.text
    assert "or raise max_wait_secs" in chief.text


@families
def test_a_signal_during_an_outage_ends_at_once(cluster: Callable[..., Cluster], family: str) -> None:
    made = cluster(family=family, outage_secs=60)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name])
    tasks["ps-0"].kill()
    killed_at = time.time()
    for name in ("chief-0", "worker-0"):
        tasks[name].wait_for("cluster.waiting", since=killed_at)
        begun = time.monotonic()
        tasks[name].signal(signal.SIGTERM)
        assert tasks[name].wait() == 143
        assert time.monotonic() - begun < 5


def test_a_frozen_parameter_server_is_noticed_and_no_step_is_lost(cluster: Callable[..., Cluster]) -> None:
    made = cluster(step_timeout_secs=2.0, save_secs=3600)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name])
    tasks["ps-0"].freeze()
    before = max(*steps_seen(tasks["chief-0"]), *steps_seen(tasks["worker-0"]))
    for name in ("chief-0", "worker-0"):
        noticed = tasks[name].wait_for("session.recovering", since=tasks["ps-0"].killed_at)
        assert "DeadlineExceeded" in noticed["message"]
    tasks["ps-0"].thaw()
    thawed_at = time.time()
    for name in ("chief-0", "worker-0"):
        assert wait_until_trains(tasks[name], since=thawed_at)["step"] >= before
    assert tasks["chief-0"].records("cluster.adopted")
    assert not tasks["chief-0"].records("session.restored", since=thawed_at)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("monitored", "be_cut"),
        ("supervised", "go_silent"),
        pytest.param("supervised", "be_cut", marks=full),
        pytest.param("monitored", "go_silent", marks=full),
    ],
)
def test_a_network_that_comes_back_has_cost_no_step(cluster: Callable[..., Cluster], family: str, how: str) -> None:
    made = cluster(family=family, step_timeout_secs=2.0, save_secs=3600)
    with Network(made.ports) as network:
        tasks = made.start_all(through=network)
        observer = made.observe()
        for name in ("chief-0", "worker-0"):
            wait_until_trains(tasks[name])
        broken_at = time.time()
        getattr(network, how)()
        for name in ("chief-0", "worker-0"):
            tasks[name].wait_for("session.recovering", since=broken_at)
        before = max(*steps_seen(tasks["chief-0"]), *steps_seen(tasks["worker-0"]))
        network.come_back()
        back_at = time.time()
        for name in ("chief-0", "worker-0"):
            assert wait_until_trains(tasks[name], since=back_at)["step"] >= before
        assert tasks["chief-0"].records("cluster.adopted", since=broken_at)
        assert not tasks["chief-0"].records("session.restored", since=broken_at)
        check_never_back(observer, since=back_at)


# ------------------------------------------------------------------------------------------ other shapes


def test_several_parameter_servers_and_partitioned_variables(cluster: Callable[..., Cluster]) -> None:
    made = cluster(ps=2, partitions=2, save_secs=0.4)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name])
    tasks["chief-0"].wait_for("checkpoint.saved", where=lambda r: "ckpt-0 " not in r["message"])
    # The second one holds a part of the model only: all of it is restored.
    tasks["ps-1"].kill()
    made.start("ps", 1)
    restored = tasks["chief-0"].wait_for("session.restored", since=tasks["ps-1"].killed_at)
    for name in ("chief-0", "worker-0"):
        wait_until_trains(tasks[name], since=restored["t"])


def test_worker_0_is_the_chief_where_there_is_none(cluster: Callable[..., Cluster]) -> None:
    made = cluster(workers=2, steps=30)
    del made.spec["chief"]
    tasks = made.start_all()
    for task in tasks.values():
        assert task.wait() == 0
    assert tasks["worker-0"].records("checkpoint.saved")
    assert not tasks["worker-1"].records("checkpoint.saved")


@families
@pytest.mark.modes
def test_synchronous_replicas_with_a_backup(cluster: Callable[..., Cluster], family: str) -> None:
    """Three replicas, two gradients a step: one may be killed and come back; the end waits out no grace."""
    made = cluster(workers=2, family=family, sync=2, stop_grace_secs=60)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0", "worker-1"):
        wait_until_trains(tasks[name])
    tasks["worker-0"].kill()
    wait_until_trains(tasks["chief-0"], since=tasks["worker-0"].killed_at + 0.3)
    last = steps_seen(tasks["chief-0"])[-1]
    again = made.start("worker", 0, steps=last + 40)
    wait_until_trains(again)
    tasks["chief-0"].kill()
    chief = made.start("chief", 0, steps=last + 80)
    wait_until_trains(chief)
    tasks["worker-1"].kill()
    one_more = made.start("worker", 1, steps=last + 80)
    begun = time.monotonic()
    for task in (again, one_more, chief, tasks["ps-0"]):
        assert task.wait(40) == 0
    assert time.monotonic() - begun < 40


# ------------------------------------------------------------------------------------------ a bad day


def bad_day(made: Cluster, secs: float, seed: int) -> None:
    """Kill one task every few seconds, and look from outside: the step goes back to published checkpoints only."""
    day = BadDay(made, seed)
    day.live(secs, fail)
    begun = time.time()
    for task in day.trainers:
        wait_until_trains(task, since=begun, timeout_secs=60)
    day.wait_until_seen(since=begun)
    day.look_for_ended(fail)
    assert day.losses, "no parameter server was killed: choose another seed"
    saved, restored = steps_told(made, "checkpoint.saved"), steps_told(made, "session.restored")
    for earlier, later, loss in day.ways_back():
        told = f"the step went from {earlier} to {later}"
        assert loss is not None, f"{told} without a loss of a parameter server"
        # From a checkpoint that was published: the newest one, or one whose publication nobody has lived to tell.
        since = [step for at, step in restored if loss <= at <= later["t"] + 5.0]
        newest = max((step for at, step in saved if at < loss), default=0)
        assert any(newest <= step <= later["step"] for step in since), f"{told}: {newest} was saved, {since} restored"


def fail(task: Process) -> None:
    raise AssertionError(f"{task.name} ended by itself with {task.wait()}:\n{task.text[-4000:]}")


def steps_told(made: Cluster, kind: str) -> list[tuple[float, int]]:
    """When the chiefs have saved or restored which step."""
    chiefs = [process for process in made.processes if process.name.startswith("chief")]
    return [
        (record["t"], int(found[1]))
        for chief in chiefs
        for record in chief.records(kind)
        if (found := re.search(r"ckpt-(\d+)", record["message"]))
    ]


def test_a_bad_minute(cluster: Callable[..., Cluster]) -> None:
    bad_day(cluster(workers=2, save_secs=0.3), secs=6.0, seed=4)


@pytest.mark.full
@pytest.mark.timeout(2100)
@pytest.mark.parametrize("family", ["monitored", "supervised"])
def test_a_bad_half_hour(cluster: Callable[..., Cluster], family: str) -> None:
    bad_day(cluster(workers=2, save_secs=0.3, family=family), secs=1800.0, seed=2)
