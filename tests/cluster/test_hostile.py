"""Clusters at their worst moments: what happens at the end of a job, and to a chief that is slow to come back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from asupervisor.checkpoint.catalogue import checkpoints
from asupervisor.clock import SystemClock
from asupervisor.cluster.config import layout
from asupervisor.cluster.joining import _until_others_are_gone
from asupervisor.cluster.running import exit_code
from asupervisor.errors import telling_line
from tests.cluster.harness import Cluster, Process

families = pytest.mark.parametrize("family", ["monitored", "supervised"])


def last_step(process: Process) -> int:
    return int(process.records("step")[-1]["step"])


def is_waiting_for_workers(record: dict[str, Any]) -> bool:
    return "waiting for the end of" in record["message"]


def test_a_chief_whose_local_init_is_slow_adopts_the_live_model(cluster: Callable[..., Cluster]) -> None:
    """How long a look at the model takes says nothing about the model: it must not be restored over what lives."""
    made = cluster(save_secs=3600)
    tasks = made.start_all()
    tasks["worker-0"].wait_for("step")
    tasks["chief-0"].wait_for("step")
    tasks["chief-0"].kill()
    before = last_step(tasks["worker-0"])
    chief = made.start("chief", local_init_secs=2.3)
    assert chief.wait_for("ready")["step"] >= before
    assert chief.records("cluster.adopted")
    assert not chief.records("session.restored")


@families
def test_a_signal_ends_a_chief_that_waits_for_its_workers(cluster: Callable[..., Cluster], family: str) -> None:
    """It saves, and is expected back: the job is not done."""
    made = cluster(family=family, save_secs=3600, handle_signals=family == "supervised", stop_grace_secs=120)
    server, worker, chief = made.start("ps"), made.start("worker"), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    before = worker.wait_for("step", since=time.time())["step"]
    begun = time.monotonic()
    chief.signal(signal.SIGTERM)
    assert chief.wait() == 143
    assert time.monotonic() - begun < 4
    assert (checkpoints(made.logdir)[-1].step or 0) >= before
    again = made.start("chief", steps=before + 30)
    assert again.wait_for("ready")["step"] >= before
    assert again.records("cluster.adopted")
    assert server.running
    assert worker.running


@families
def test_the_last_save_is_made_once(cluster: Callable[..., Cluster], family: str) -> None:
    made = cluster(family=family, save_secs=3600, steps=20)
    tasks = made.start_all()
    for task in tasks.values():
        assert task.wait() == 0
    last = f"model.ckpt-{checkpoints(made.logdir)[-1].step} "
    assert len([record for record in tasks["chief-0"].records("checkpoint.saved") if last in record["message"]]) == 1
    assert len(tasks["chief-0"].records("cluster.waiting")) <= 2


@pytest.mark.full
def test_a_chief_waits_on_where_the_register_is_slow_for_a_moment(cluster: Callable[..., Cluster]) -> None:
    made = cluster(save_secs=3600)
    server, worker, chief = made.start("ps"), made.start("worker", steps=120), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    server.freeze()
    time.sleep(2.6)  # longer than one question may take
    server.thaw()
    for task in (worker, chief, server):
        assert task.wait() == 0
    assert not chief.records("cluster.workers_left")
    last = checkpoints(made.logdir)[-1]
    assert last.step == int(tf.train.load_checkpoint(last.prefix).get_tensor("global_step"))
    assert (last.step or 0) >= last_step(worker)


def test_a_worker_that_is_about_to_come_in_is_waited_for(cluster: Callable[..., Cluster]) -> None:
    """Else the parameter servers would go from under it, and it would look for them for as long as an outage lasts."""
    made = cluster(steps=20)
    server, worker, chief = made.start("ps"), made.start("worker", local_init_secs=2.0), made.start("chief")
    for task in (worker, chief, server):
        assert task.wait() == 0
    assert worker.wait_for("trained")["t"] > chief.wait_for("trained")["t"] + 0.5
    assert not worker.records("session.recovering", "cluster.retrying")


@families
def test_the_end_of_the_chief_releases_replicas_that_wait_for_tokens(
    cluster: Callable[..., Cluster], family: str
) -> None:
    """It would wait for them until its grace is over, and they for tokens that nobody hands out any more."""
    made = cluster(family=family, sync=2, stop_grace_secs=60)
    server, worker, chief = made.start("ps"), made.start("worker"), made.start("chief", steps=10)
    begun = chief.wait_for("trained")["t"]
    for task in (chief, worker, server):
        assert task.wait() == 0
        assert task.ended_at - begun < 20
    assert not chief.records("cluster.workers_left")
    assert "OutOfRange" in worker.wait_for("stop.clean")["message"]


async def test_the_first_parameter_server_is_the_last_one_to_go() -> None:
    """Whoever cannot ask it any more does not know that the job is done, and would serve for ever."""
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    ours: Any = SimpleNamespace(
        layout=layout({"ps": ["127.0.0.1:1", f"127.0.0.1:{port}"], "chief": ["127.0.0.1:2"]}, "ps", 0)
    )
    going = asyncio.create_task(_until_others_are_gone(ours, SystemClock()))
    done, _ = await asyncio.wait([going], timeout=1.0)
    assert not done
    other.close()
    await other.wait_closed()
    await asyncio.wait_for(going, 2.0)


def test_a_signal_behind_a_frozen_parameter_server_is_no_error_of_the_task(cluster: Callable[..., Cluster]) -> None:
    """An exit code of 1 would mean that it must not be started again."""
    made = cluster(family="supervised", handle_signals=True, stop_grace_secs=1.0)
    server, worker, chief = made.start("ps"), made.start("worker"), made.start("chief")
    worker.wait_for("step")
    server.freeze()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 143
    assert "StopGraceExceeded: " in worker.text
    assert "Traceback" not in worker.text
    assert chief.running
    server.thaw()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "Graph execution error:\n\nFrom /job:ps/replica:0/task:0:\nrefused\nmore",
            "From /job:ps/replica:0/task:0: refused",
        ),
        (
            "Graph execution error:\n\n=====\nUNAVAILABLE: From /job:ps/task:0:\nrefused\n=====\n",
            "UNAVAILABLE: From /job:ps/task:0: refused",
        ),
        ("Graph execution error:\n\nDeadline Exceeded", "Deadline Exceeded"),
        ("Graph execution error:", "Graph execution error:"),
        ("", ""),
    ],
)
def test_the_line_that_tells_is_not_a_heading(text: str, line: str) -> None:
    assert telling_line(RuntimeError(text)) == line


def test_a_lost_cluster_is_one_line(cluster: Callable[..., Cluster]) -> None:
    """TensorFlow's own errors are many lines long."""
    made = cluster(save_secs=3600)
    server, chief = made.start("ps"), made.start("chief", steps=20)
    worker = made.start("worker")
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    server.kill()
    assert chief.wait() == exit_code(tf.errors.UnavailableError(None, None, "")) == 138
    told = [line for line in chief.text.splitlines() if not line.startswith('{"t": ')]
    (line,) = (line for line in told if "Error: " in line)
    assert "/job:ps/" in line, told
    assert worker.running


@families
def test_a_worker_is_told_when_the_chief_makes_the_model_anew(cluster: Callable[..., Cluster], family: str) -> None:
    """Else it would go on with what it knew of the old one, and its updates would mix into the new one unseen."""
    made = cluster(family=family, save_secs=3600)
    tasks = made.start_all()
    tasks["worker-0"].wait_for("step", where=lambda record: record["step"] > 50)
    tasks["chief-0"].kill()
    chief = made.start("chief", logdir=f"{made.logdir}-of-another-run")
    assert chief.wait_for("ready")["step"] < 50
    told = tasks["worker-0"].wait_for("session.recovering")
    assert "/job:chief/task:0" in told["message"]
    assert "makes the model anew" in told["message"]
    assert tasks["worker-0"].wait_for("step", since=told["t"])["step"] > 0
    before = [record["step"] for record in tasks["worker-0"].records("step") if record["t"] < told["t"]]
    assert before == sorted(before), "a step that was meant for the old model was applied to the new one"


@families
def test_a_chief_that_runs_nothing_itself_gets_a_lost_model_back(cluster: Callable[..., Cluster], family: str) -> None:
    """Everybody waits for it, and it has no run that could fail; nor is it the first server that is lost."""
    made = cluster(family=family, ps=2, partitions=2, save_secs=3600, outage_secs=2.0, chief="idles")
    tasks = made.start_all()
    tasks["chief-0"].wait_for("checkpoint.saved")
    tasks["worker-0"].wait_for("step")
    tasks["ps-1"].kill()
    server = made.start("ps", 1)
    restored = tasks["chief-0"].wait_for("session.restored", since=tasks["ps-1"].killed_at)
    tasks["worker-0"].wait_for("step", since=restored["t"])
    server.kill()
    assert tasks["chief-0"].wait() == 138
    assert "PeersUnreachable: no answer from /job:ps/task:1" in tasks["chief-0"].text


def test_a_chief_that_waits_for_its_workers_ends_when_a_part_of_the_model_is_lost(
    cluster: Callable[..., Cluster],
) -> None:
    """They wait for it; and it is expected back, so that the parameter servers serve on."""
    made = cluster(ps=2, partitions=2, chief_grace_secs=0.0, chief="joins")
    servers = [made.start("ps", 0), made.start("ps", 1)]
    worker, chief = made.start("worker"), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    worker.wait_for("step", since=time.time())
    servers[1].kill()
    servers[1] = made.start("ps", 1)
    assert chief.wait(10) == 138
    again = made.start("chief", steps=last_step(worker) + 30)
    worker.wait_for("step", since=again.wait_for("ready")["t"])
    assert all(server.running for server in servers)


@families
def test_a_parameter_server_without_a_part_of_the_model_is_lost_once(
    cluster: Callable[..., Cluster], family: str
) -> None:
    """The model lives and is adopted; the new server counts from then on."""
    made = cluster(family=family, ps=3)
    tasks = made.start_all()
    tasks["chief-0"].wait_for("step")
    tasks["ps-2"].kill()
    made.start("ps", 2)
    adopted = tasks["chief-0"].wait_for("cluster.adopted", since=tasks["ps-2"].killed_at)
    # For some looks of its own: it would begin again after each.
    tasks["chief-0"].wait_for("step", since=adopted["t"] + 3.5)
    assert len(tasks["chief-0"].records("cluster.adopted")) == 1
    steps = [record["step"] for record in tasks["chief-0"].records("step")]
    assert steps == sorted(steps), "the model was not made anew"
