"""Clusters at their worst moments: what happens at the end of a job, and to a chief that is slow to come back."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import tensorflow as tf

from asupervisor.checkpoint.catalogue import checkpoints
from asupervisor.checkpoint.records import Kind
from asupervisor.clock import Clock, SystemClock
from asupervisor.cluster.config import layout
from asupervisor.cluster.joining import _until_others_are_gone
from asupervisor.cluster.membership import Membership
from asupervisor.cluster.ports import PortReservation
from asupervisor.cluster.register import Reading, Register, TaskState, hang_up
from asupervisor.cluster.running import exit_code
from asupervisor.errors import PeersUnreachable, SessionNotReady, telling_line
from asupervisor.events import log_only
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.peers import Around
from asupervisor.session.waiting import Patience
from asupervisor.testing import ManualClock
from tests.cluster.harness import Cluster, Process

families = pytest.mark.parametrize("family", ["monitored", "supervised"])


def last_step(process: Process) -> int:
    return int(process.records("step")[-1]["step"])


def is_waiting_for_workers(record: dict[str, Any]) -> bool:
    return "waiting for the end of" in record["message"]


def around_with(clock: Clock, max_wait_secs: float, emit: Any = log_only) -> Around:
    return Around(
        executor=DeviceExecutor(),
        patience=Patience(clock, emit, None),
        emit=emit,
        logdir=None,
        afresh=False,
        max_wait_secs=max_wait_secs,
        coordinator=Coordinator(),
    )


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


@pytest.mark.parametrize("end", ["trains", "joins", "never ends"])
@families
def test_a_signal_ends_a_chief_that_waits_for_its_workers(
    cluster: Callable[..., Cluster], family: str, end: str
) -> None:
    """It saves, and is expected back, also if it trains itself: the job is not done, and its grace does not begin."""
    made = cluster(
        family=family,
        save_secs=3600,
        handle_signals=family == "supervised",
        stop_grace_secs=120,
        chief_grace_secs=0.0,
        chief=end,
    )
    server, worker = made.start("ps"), made.start("worker")
    if end == "never ends":
        chief = made.start("chief")
        chief.wait_for("step")
    else:
        chief = made.start("chief", steps=20)
        chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    before = worker.wait_for("step", since=time.time())["step"]
    begun = time.monotonic()
    chief.signal(signal.SIGTERM)
    assert chief.wait() == 143
    assert time.monotonic() - begun < 4
    assert (checkpoints(made.logdir)[-1].step or 0) >= before
    # Longer than a server needs to see that the job is done, or that it has failed.
    worker.wait_for("step", since=chief.ended_at + 1.0)
    again = made.start("chief", steps=before + 30)
    assert again.wait_for("ready")["step"] >= before
    assert again.records("cluster.adopted")
    assert server.running
    assert worker.running


@pytest.mark.parametrize("end", ["exits", "cancels"])
@families
def test_a_chief_that_leaves_by_itself_is_not_expected_back(
    cluster: Callable[..., Cluster], family: str, end: str
) -> None:
    """No signal has ended it, so that nobody starts it again: the servers do not serve for ever."""
    made = cluster(family=family, chief_grace_secs=0.5, chief=end)
    server, chief = made.start("ps"), made.start("chief", steps=20)
    assert chief.wait() == (0 if end == "exits" else 1)
    assert server.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("monitored", "exits"),
        ("supervised", "idles"),
        pytest.param("supervised", "exits", marks=pytest.mark.full),
        pytest.param("monitored", "idles", marks=pytest.mark.full),
    ],
)
def test_a_chief_whose_last_save_fails_has_not_done_its_part(
    cluster: Callable[..., Cluster], family: str, end: str
) -> None:
    """Whatever it says itself: it calls sys.exit(0), or its own time limit has ended the session."""
    made = cluster(family=family, save_secs=3600, chief_grace_secs=0.5, fails_saves="disk", chief=end, relents=True)
    server, worker = made.start("ps"), made.start("worker", steps=20)
    over = made.logdir.with_name("over")
    chief = made.start("chief", steps=20, gives_up=str(over))
    assert worker.wait() == 0
    over.touch()
    assert chief.wait() == 1
    assert ("OSError" if end == "exits" else "is not saved") in chief.text
    assert server.wait() == 0


def test_a_chief_that_fails_behind_a_loss_tells_a_server_that_has_begun_anew(cluster: Callable[..., Cluster]) -> None:
    """It makes an error of its own of the loss, so that nobody starts it again."""
    made = cluster(family="managed", workers=0, chief_grace_secs=0.5, chief="wraps", steps=10**6)
    until = made.logdir.with_name("until")
    server = made.start("ps")
    chief = made.start("chief", until=str(until))
    chief.wait_for("step")
    server.kill()
    server = made.start("ps")
    server.wait_for("cluster.serving")
    until.touch()
    assert chief.wait() == 1
    assert "it cannot go on" in chief.text
    assert server.wait() == 0


@pytest.mark.parametrize("how", ["fails at once", "wraps"])
def test_a_chief_that_fails_before_its_session_leaves_the_job_of_another_one_alone(
    cluster: Callable[..., Cluster], how: str
) -> None:
    """Started by mistake: on another machine, where it has an address of its own, or on the same one."""
    made = cluster(steps=400, chief_grace_secs=0.5)
    tasks = made.start_all()
    for name in ("chief-0", "worker-0"):
        tasks[name].wait_for("step")
    with PortReservation(1) as ports:
        right = made.spec["chief"]
        if how == "fails at once":
            made.spec["chief"] = list(ports.addresses)
        other = made.start("chief", chief=how, logdir=str(made.logdir.with_name("another")))
        assert other.wait() == 1
        made.spec["chief"] = right
    for name, task in tasks.items():
        assert task.wait() == 0, name
    assert not tasks["chief-0"].records("session.recovering", "unknown")


@families
def test_a_chief_whose_time_is_over_while_it_waits_is_not_expected_back(
    cluster: Callable[..., Cluster], family: str
) -> None:
    made = cluster(family=family, chief_grace_secs=0.5, outage_secs=1.0)
    server, worker, chief = made.start("ps"), made.start("worker"), made.start("chief", steps=20, limit_secs=3.0)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    seen = worker.wait_for("step", since=time.time())["step"]
    for task, status in ((chief, 0), (server, 0), (worker, 138)):
        assert task.wait() == status
    assert (checkpoints(made.logdir)[-1].step or 0) >= seen


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
    end = made.logdir.with_name("end")
    server, worker, chief = made.start("ps"), made.start("worker", until=str(end)), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    server.freeze()
    time.sleep(2.6)  # longer than one question may take
    server.thaw()
    end.touch()
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


def chief_of_replicas_at_its_end(
    cluster: Callable[..., Cluster], family: str, **arguments: Any
) -> tuple[Cluster, Process, Process, Process]:
    """A chief that waits for its worker, which is frozen, so that it does not end; with its server."""
    made = cluster(family=family, sync=1, save_secs=3600, **arguments)
    end = made.logdir.with_name("end")
    server, worker, chief = made.start("ps"), made.start("worker"), made.start("chief", until=str(end))
    for task in (worker, chief):
        task.wait_for("step")
    worker.freeze()
    end.touch()
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    return made, server, worker, chief


@families
def test_a_chief_of_replicas_that_is_lost_at_its_end_comes_back(cluster: Callable[..., Cluster], family: str) -> None:
    """It has ended the queue of the tokens by then, and adopts the model with it."""
    made, server, worker, chief = chief_of_replicas_at_its_end(cluster, family)
    chief.kill()
    chief = made.start("chief", steps=last_step(chief) + 20)
    chief.wait_for("cluster.adopted")
    chief.wait_for("trained")
    worker.thaw()
    for task in (worker, chief, server):
        assert task.wait() == 0


@pytest.mark.parametrize("save", ["is due", "would take too long"])
def test_replicas_do_not_train_again_what_is_lost_at_the_end(cluster: Callable[..., Cluster], save: str) -> None:
    """They are at work, but cannot without their chief, whose training has ended: it is expected back."""
    slow: dict[str, Any] = {} if save == "is due" else {"slow_save_secs": 3.0, "stop_grace_secs": 6.0}
    made, server, worker, chief = chief_of_replicas_at_its_end(cluster, "supervised", **slow)
    if slow:  # one that was made meanwhile has told how long they take
        chief.wait_for("checkpoint.saved", since=chief.wait_for("saving")["t"])
    server.kill()
    server = made.start("ps")
    assert chief.wait() == 138
    assert server.running
    worker.thaw()
    chief = made.start("chief", steps=20)
    for task in (worker, chief, server):
        assert task.wait() == 0


@families
def test_a_signal_during_the_last_save_is_no_end_of_the_job(cluster: Callable[..., Cluster], family: str) -> None:
    """Who is ended by SIGTERM is started again, and needs the servers for that."""
    made = cluster(family=family, workers=0, save_secs=3600, chief_grace_secs=0.0, slow_save_secs=1.0)
    server, chief = made.start("ps"), made.start("chief", steps=20)
    chief.wait_for("saving")
    chief.signal(signal.SIGTERM)
    assert chief.wait() == 143
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20
    with pytest.raises(AssertionError, match="did not end"):
        server.wait(2.0)  # longer than it needs to see that the job is done
    chief = made.start("chief", steps=20, slow_save_secs=0.0)
    chief.wait_for("cluster.adopted")
    for task in (chief, server):
        assert task.wait() == 0


@families
def test_a_signal_after_the_end_of_the_job_is_no_failure(cluster: Callable[..., Cluster], family: str) -> None:
    """The servers end: whoever was started again because of the exit status would wait for them."""
    made = cluster(family=family, workers=0, chief="lingers")
    server, chief = made.start("ps"), made.start("chief", steps=20)
    chief.wait_for("closed")
    assert server.wait() == 0
    chief.signal(signal.SIGTERM)
    assert chief.wait() == 0


@families
def test_a_last_save_for_which_there_is_no_time_is_no_end_of_the_job(
    cluster: Callable[..., Cluster], family: str
) -> None:
    """Otherwise the servers would take the only copy of the model with them."""
    made = cluster(family=family, save_secs=0.2, stop_grace_secs=2.0, chief_grace_secs=30.0, slow_save_secs=2.5)
    server, chief = made.start("ps"), made.start("chief", until=str(made.logdir.with_name("end")))
    chief.wait_for("checkpoint.saved", since=chief.wait_for("saving")["t"])
    made.logdir.with_name("end").touch()
    assert chief.wait() == 1
    assert "StopGraceExceeded" in chief.text
    again = made.start("chief", steps=20, slow_save_secs=0.0)
    assert again.wait_for("ready")["step"] >= last_step(chief)
    for task in (again, server):
        assert task.wait() == 0


@pytest.mark.full
@families
def test_a_last_save_that_a_lost_peer_has_cancelled_is_no_end_of_the_job(
    cluster: Callable[..., Cluster], family: str
) -> None:
    """TensorFlow's CancelledError is no echo of a stop there; the chief is expected back."""
    made = cluster(family=family, workers=0, save_secs=3600, fails_saves="peer")
    server, chief = made.start("ps"), made.start("chief", steps=20)
    # Under train_loop it has begun again eleven times, with pauses of 5 s at most.
    assert chief.wait(90) == 138
    assert server.running
    chief = made.start("chief", steps=20, fails_saves="")
    for task in (chief, server):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@families
def test_a_last_save_of_what_is_saved_already_needs_no_time(cluster: Callable[..., Cluster], family: str) -> None:
    made = cluster(family=family, save_secs=3600, stop_grace_secs=1.0, slow_save_secs=1.5, chief="saves")
    server, chief = made.start("ps"), made.start("chief", steps=20)
    for task in (chief, server):
        assert task.wait() == 0
    assert chief.records("checkpoint.skipped")
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.parametrize("family", ["monitored", "supervised", "managed"])
def test_a_last_save_that_does_not_end_is_no_end_of_the_job(cluster: Callable[..., Cluster], family: str) -> None:
    """The servers keep the only copy of the model for as long as they wait for a chief that has failed."""
    made = cluster(
        family=family, workers=0, save_secs=3600, chief_grace_secs=30.0, slow_save_secs=10.0, stop_grace_secs=1.0
    )
    server, chief = made.start("ps"), made.start("chief", steps=20)
    assert chief.wait() == 1
    assert "StopGraceExceeded" in chief.text
    chief = made.start("chief", steps=20, slow_save_secs=0.0)
    assert chief.wait_for("ready")["step"] >= 20
    for task in (chief, server):
        assert task.wait() == 0


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
    server, worker, chief = made.start("ps"), made.start("worker", pause_secs=0.0), made.start("chief")
    worker.wait_for("step")
    server.freeze()
    while worker.records("step", "stepping")[-1]["kind"] == "step":
        time.sleep(0.01)
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
    tasks["worker-0"].wait_for("step", since=told["t"], where=lambda record: record["step"] > 0)
    before = [record["step"] for record in tasks["worker-0"].records("step") if record["t"] < told["t"]]
    assert before == sorted(before), "a step that was meant for the old model was applied to the new one"


@families
def test_a_chief_that_runs_nothing_itself_gets_a_lost_model_back(cluster: Callable[..., Cluster], family: str) -> None:
    """Everybody waits for it, and it has no run that could fail; nor is it the first server that is lost."""
    made = cluster(family=family, ps=2, partitions=2, save_secs=3600, outage_secs=5.0, chief="idles")
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


async def test_a_server_whose_very_first_question_failed_is_asked_anew(cluster: Callable[..., Cluster]) -> None:
    """TensorFlow's session gives the same answer for ever; a chief that runs nothing would never see the model lost."""
    made = cluster(ps=2)
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"], operation_timeout_in_ms=10_000)
    executor, coordinator = DeviceExecutor(), Coordinator()
    server: Any = SimpleNamespace(
        layout=layout(made.spec, "chief", 0),
        target=f"grpc://{made.spec['ps'][0]}",
        configured=lambda: config,
        outage_secs=10.0,
    )
    membership = Membership(server)
    membership._around = Around(
        executor=executor,
        patience=Patience(SystemClock(), log_only, None),
        emit=log_only,
        logdir=None,
        afresh=False,
        max_wait_secs=0.0,
        coordinator=coordinator,
    )
    servers = [made.start("ps", index) for index in range(2)]
    for process in servers:
        process.wait_for("cluster.serving")
    await membership._side(membership._get_register().read, "a question to the first server only")
    await asyncio.to_thread(servers[1].kill)
    with pytest.raises(tf.errors.AbortedError, match="no answer from /job:ps/task:1"):
        await membership._look()
    made.start("ps", 1).wait_for("cluster.serving")
    with pytest.raises(tf.errors.AbortedError, match="has begun anew, without the model"):
        async with asyncio.timeout(20):
            while await membership._look() is None:
                await asyncio.sleep(0.05)
    # Nor does the wait for the workers end well because the session stops with an error.
    membership.is_in = True
    loss = tf.errors.AbortedError(None, None, "lost")
    coordinator.request_stop(loss)
    with pytest.raises(tf.errors.AbortedError) as raised:
        await membership.wait_for_workers()
    assert raised.value is loss
    await membership._hang_up()
    await executor.aclose(5.0)


async def test_a_long_wait_for_others_is_a_warning(cluster: Callable[..., Cluster]) -> None:
    """By default a program shows warnings only, and whoever sits before it would see nothing for two hours."""
    made, clock, told = cluster(ps=2), ManualClock(), []

    def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
        told.append((level, data["waited_secs"], message))

    server: Any = SimpleNamespace(layout=layout(made.spec, "chief", 0), outage_secs=60.0)
    around = around_with(clock, max_wait_secs=30.0, emit=emit)
    begun = clock.monotonic()
    waiting = asyncio.ensure_future(Membership(server)._reach_servers(around, begun, begun + 30.0, ""))
    while clock.monotonic() < begun + 30.0:
        await clock.sleepers(1)
        await clock.advance(0.25)
    with pytest.raises(PeersUnreachable, match=r"no answer from /job:ps/task:0 .*, /job:ps/task:1 .* for 30 s"):
        await waiting
    assert [level for level, _, _ in told] == ["info", "warning", "warning"]
    assert told[0][1] == 0.0
    assert 10 <= told[1][1] < 12 <= 20 <= told[2][1] < 24
    assert told[0][2].endswith(made.spec["ps"][1])
    assert told[1][2].endswith(", since 10 s")
    await around.executor.aclose(1.0)


@pytest.mark.parametrize(
    ("how", "was_in", "since_secs", "waits_secs"),
    [
        ("lost", True, 3.0, 56.75),
        ("lost", True, 80.0, 0.0),
        ("lost", False, 3.0, 60.0),
        ("done", True, 3.0, 60.0),
        ("failed", True, 3.0, 60.0),
    ],
)
async def test_an_outage_begins_with_the_loss_and_its_error_comes_within_the_budget(
    cluster: Callable[..., Cluster],
    how: Literal["done", "failed", "lost"],
    was_in: bool,
    since_secs: float,
    waits_secs: float,
) -> None:
    """However long a pause is. But a session that is begun after another end, or after none, is one that waits."""
    made, clock = cluster(), ManualClock()
    around = around_with(clock, max_wait_secs=300.0)
    membership = Membership(SimpleNamespace(layout=layout(made.spec, "chief", 0), outage_secs=60.0))  # type: ignore[arg-type]
    membership._was_ready, membership.is_in = True, was_in
    await membership.leave(how, saved=False, ended_at=clock.monotonic() - since_secs)
    begun = clock.monotonic()
    waiting = asyncio.ensure_future(membership.open(None, around))  # type: ignore[arg-type]
    while clock.monotonic() < begun + waits_secs:
        await clock.sleepers(1)
        await clock.advance(0.25)
    with pytest.raises(PeersUnreachable, match=r"for [68]0 s.*outage_secs"):
        await waiting
    assert clock.monotonic() == begun + waits_secs
    await around.executor.aclose(1.0)


@pytest.mark.parametrize("was_in", [True, False])
async def test_the_chief_has_as_long_once_its_servers_are_back(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, was_in: bool
) -> None:
    """They are back 56 s after the loss, just before the end of the outage."""
    made, clock = cluster(), ManualClock()
    around = around_with(clock, max_wait_secs=60.0)
    task = SimpleNamespace(layout=layout(made.spec, "worker", 0), outage_secs=60.0, start_server=lambda: None)
    membership = Membership(task)  # type: ignore[arg-type]
    membership._was_ready = membership.is_in = was_in
    await membership.leave("lost", saved=False, ended_at=clock.monotonic() - 56.0)
    register = SimpleNamespace(read=lambda: Reading("", ()))
    monkeypatch.setattr(membership, "_get_register", lambda: register)
    monkeypatch.setattr("asupervisor.cluster.membership.silent_ones", mock.AsyncMock(return_value=[]))
    begun = clock.monotonic()
    waiting = asyncio.ensure_future(membership.open(None, around))  # type: ignore[arg-type]
    while clock.monotonic() < begun + 60.0:
        await clock.sleepers(1)
        await clock.advance(0.25)
    with pytest.raises(SessionNotReady, match="chief"):
        await waiting
    assert clock.monotonic() == begun + 60.0
    await around.executor.aclose(1.0)


@pytest.mark.parametrize(("family", "end"), [("monitored", "joins"), ("supervised", "joins"), ("supervised", "trains")])
def test_a_chief_that_waits_for_its_workers_gets_a_lost_model_back(
    cluster: Callable[..., Cluster], family: str, end: str
) -> None:
    """And waits on: what they train until their end is in the last checkpoint."""
    made = cluster(family=family, ps=2, partitions=2, save_secs=0.4, chief_grace_secs=0.0, chief=end)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    end = made.logdir.with_name("end")
    worker, chief = made.start("worker", until=str(end)), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    worker.wait_for("step", since=time.time())
    servers[1].kill()
    killed_at = servers[1].killed_at
    servers[1] = made.start("ps", 1)
    restored = chief.wait_for("session.restored", since=killed_at)
    seen = max(record["step"] for task in (worker, chief) for record in task.records("step") if record["t"] < killed_at)
    worker.wait_for("step", since=restored["t"], where=lambda record: record["step"] > seen)
    assert chief.running
    end.touch()
    assert worker.wait() == 0
    assert chief.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= last_step(worker)


def test_a_chief_whose_body_has_ended_is_expected_back_when_a_server_is_lost(cluster: Callable[..., Cluster]) -> None:
    """Though that server held no part of the model: the worker trains on, and its steps are not to be given up."""
    made = cluster(ps=3, save_secs=3600, chief_grace_secs=0.0)
    servers = [made.start("ps", index) for index in range(3)]
    end = made.logdir.with_name("end")
    worker, chief = made.start("worker", until=str(end)), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    servers[2].kill()
    servers[2] = made.start("ps", 2)
    assert chief.wait() == 138
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20, "what there was is saved"
    assert worker.running
    again = made.start("chief", steps=20)
    again.wait_for("cluster.waiting", where=is_waiting_for_workers)
    end.touch()
    assert worker.wait() == 0
    assert again.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= last_step(worker)
    assert [server.wait() for server in servers] == [0, 0, 0]


def test_a_training_that_has_ended_takes_no_step_after_a_loss(cluster: Callable[..., Cluster]) -> None:
    """The same under `train_loop`, which begins again by itself: to wait for the worker, and to save."""
    made = cluster(family="supervised", ps=3, save_secs=3600, chief_grace_secs=0.0)
    servers = [made.start("ps", index) for index in range(3)]
    end = made.logdir.with_name("end")
    worker, chief = made.start("worker", until=str(end)), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    servers[2].kill()
    lost_at = time.time()
    made.start("ps", 2)
    adopted = chief.wait_for("cluster.adopted", since=lost_at)
    chief.wait_for("cluster.waiting", since=adopted["t"], where=is_waiting_for_workers)
    end.touch()
    assert worker.wait() == 0
    assert chief.wait() == 0
    assert not chief.records("step", since=lost_at)
    assert (checkpoints(made.logdir)[-1].step or 0) >= last_step(worker)


@pytest.mark.full
@pytest.mark.parametrize("stop_grace_secs", [60.0, 5.0])
@families
def test_a_frozen_server_does_not_end_the_wait_for_the_workers(
    cluster: Callable[..., Cluster], family: str, stop_grace_secs: float
) -> None:
    """Though it holds no part of the model, the chief cannot ask who is at work, and the worker trains on."""
    made = cluster(family=family, ps=3, save_secs=3600, chief_grace_secs=0.0, stop_grace_secs=stop_grace_secs)
    servers = [made.start("ps", index) for index in range(3)]
    end = made.logdir.with_name("end")
    worker, chief = made.start("worker", until=str(end)), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    servers[2].freeze()
    frozen_at = time.time()
    if family == "supervised":
        chief.wait_for("session.recovering", since=frozen_at)
        servers[2].thaw()
    else:
        assert chief.wait() == 138
        servers[2].thaw()
        chief = made.start("chief", steps=20)
    adopted = chief.wait_for("cluster.adopted", since=frozen_at)
    chief.wait_for("cluster.waiting", since=adopted["t"], where=is_waiting_for_workers)
    end.touch()
    for task in (worker, chief, *servers):
        assert task.wait() == 0
    if family == "supervised":
        assert not chief.records("step", since=frozen_at)
    assert (checkpoints(made.logdir)[-1].step or 0) >= last_step(worker)


@families
def test_a_chief_that_waits_for_its_workers_saves_what_they_train(cluster: Callable[..., Cluster], family: str) -> None:
    """The timer has ended with its stop; so long a wait must not cost more than one interval."""
    made = cluster(family=family, save_secs=0.5)
    end = made.logdir.with_name("end")
    server, worker, chief = made.start("ps"), made.start("worker", until=str(end)), made.start("chief", steps=20)
    waiting = chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    seen = worker.wait_for("step", since=waiting["t"] + 1.0)["step"]
    while (checkpoints(made.logdir)[-1].step or 0) < seen:
        assert chief.running
        time.sleep(0.05)
    assert worker.running
    end.touch()
    for task in (worker, chief, server):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= last_step(worker)


def test_training_that_is_lost_with_all_who_train_is_no_clean_end(cluster: Callable[..., Cluster]) -> None:
    """As where a machine is lost: the worker would not train again what the chief has done."""
    made = cluster(family="supervised", ps=2, partitions=2, save_secs=3600)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    worker, chief = made.start("worker"), made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    worker.kill()
    servers[1].kill()
    servers[1] = made.start("ps", 1)
    assert chief.wait() == 138
    assert chief.ended_at - servers[1].begun_at < 10, "nobody is waited for"
    assert all(server.running for server in servers)


@pytest.mark.parametrize("end", ["fails", pytest.param("cancels", marks=pytest.mark.full)])
@families
def test_a_chief_that_fails_tells_so_also_where_a_server_is_lost(
    cluster: Callable[..., Cluster], family: str, end: str
) -> None:
    """The last save fails as well, but that is not what the task ends by: nobody starts it again."""
    made = cluster(family=family, ps=2, workers=0, partitions=2, save_secs=3600, chief_grace_secs=0.5, outage_secs=2.0)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    victim = made.logdir.with_name("victim")
    victim.write_text(str(servers[1].pid))
    chief = made.start("chief", steps=20, chief=end, victim=str(victim))
    assert chief.wait() == 1
    assert servers[0].wait() == 0


@families
def test_a_chief_that_ends_while_it_recovers_is_expected_back(cluster: Callable[..., Cluster], family: str) -> None:
    """It has lost the model, and has not waited for its workers: that is no clean end."""
    made = cluster(family=family, ps=2, partitions=2, chief_grace_secs=0.0)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    end, end_of_chief = made.logdir.with_name("end"), made.logdir.with_name("end of chief")
    worker, chief = made.start("worker", until=str(end)), made.start("chief", chief="idles", until=str(end_of_chief))
    chief.wait_for("ready")
    worker.wait_for("step")
    servers[1].kill()
    chief.wait_for("session.recovering", since=servers[1].killed_at)
    end_of_chief.touch()
    assert chief.wait() == 138
    servers[1] = made.start("ps", 1)
    chief = made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    end.touch()
    for task in (worker, chief, *servers):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.parametrize("end", ["model lost", pytest.param("out of time", marks=pytest.mark.full)])
@families
def test_a_chief_that_ends_without_a_session_tells_so(cluster: Callable[..., Cluster], family: str, end: str) -> None:
    """Its process ends for good, so that nobody starts it again: the server that is left does not serve for ever."""
    made = cluster(family=family, ps=2, workers=0, partitions=2, chief="idles", chief_grace_secs=0.5)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    end_of_chief = made.logdir.with_name("end of chief")
    changes = {"logdir": None} if end == "model lost" else {"gives_up": str(end_of_chief)}
    chief = made.start("chief", **changes)
    chief.wait_for("ready")
    servers[1].kill()
    chief.wait_for("session.recovering", since=servers[1].killed_at)
    if end == "model lost":
        servers[1] = made.start("ps", 1)
    else:
        end_of_chief.touch()
    assert chief.wait() == 1
    assert ("ModelLost" if end == "model lost" else "TimeoutError") in chief.text
    assert servers[0].wait() == 0


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("monitored", signal.SIGSTOP),
        ("supervised", signal.SIGKILL),
        pytest.param("supervised", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("monitored", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_a_chief_that_cannot_tell_the_end_is_expected_back(
    cluster: Callable[..., Cluster], family: str, number: int
) -> None:
    """Everything is saved, but the servers would serve for ever: the first one is frozen or killed just then."""
    made = cluster(family=family, ps=2, partitions=2, workers=0, save_secs=3600)
    pid = made.logdir.with_name("pid")
    servers = [made.start("ps", 0), made.start("ps", 1)]
    pid.write_text(str(servers[0].pid))
    chief = made.start("chief", steps=20, server=str(pid), after_saves=number)
    assert chief.wait() == 138
    assert "it does not know that the job is done" in chief.text
    if number == signal.SIGKILL:
        assert servers[0].wait() == -number
        servers[0] = made.start("ps", 0)
    else:
        servers[0].thaw()
    chief = made.start("chief", steps=20)
    for task in (chief, *servers):
        assert task.wait() == 0
    assert bool(chief.records("cluster.adopted")) == (number == signal.SIGSTOP)
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_chief_that_has_trained_and_lost_it_and_trains_no_more_is_expected_back(
    cluster: Callable[..., Cluster], losses: int
) -> None:
    """Its session is recovered for others, but they do not train again what was lost with it."""
    made = cluster(ps=2, workers=0, partitions=2, save_secs=3600, chief="dallies")
    servers = [made.start("ps", 0), made.start("ps", 1)]
    end = made.logdir.with_name("end")
    chief = made.start("chief", steps=20, until=str(end))
    chief.wait_for("trained")
    for _ in range(losses):
        servers[1].kill()
        servers[1] = made.start("ps", 1)
        chief.wait_for("session.recovered", since=servers[1].begun_at)
    end.touch()
    assert chief.wait() == 138
    assert "Start it again to train them" in chief.text
    chief = made.start("chief", steps=20, chief="trains")
    for task in (chief, *servers):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.full
def test_a_chief_that_has_trained_since_owes_nothing(cluster: Callable[..., Cluster]) -> None:
    """A second loss, which takes nothing: what the first one took was known when the training went on."""
    made = cluster(ps=2, workers=0, partitions=2, save_secs=3600, chief="dallies")
    servers = [made.start("ps", 0), made.start("ps", 1)]
    end = made.logdir.with_name("end")
    chief = made.start("chief", steps=20, until=str(end))
    chief.wait_for("trained")
    for again in (True, False):
        servers[1].kill()
        servers[1] = made.start("ps", 1)
        chief.wait_for("session.recovered", since=servers[1].begun_at)
        if again:
            end.with_name("end.again").touch()
            chief.wait_for("again")
    end.touch()
    for task in (chief, *servers):
        assert task.wait() == 0
    assert checkpoints(made.logdir)[-1].step == 1


@pytest.mark.full
@families
def test_a_model_that_is_saved_beside_an_unfinished_step_only_is_no_clean_end(
    cluster: Callable[..., Cluster], family: str
) -> None:
    """Nobody restores that checkpoint by itself, and the servers would take the model with them."""
    made = cluster(family=family, workers=0, save_secs=3600, chief_grace_secs=0.5)
    server, chief = made.start("ps"), made.start("chief", steps=20, chief="starves")
    assert chief.wait() == 1
    assert "a training run did not end, and the state beside it" in chief.text
    assert server.wait() == 0
    assert checkpoints(made.logdir)[-1].kind is Kind.EMERGENCY


def test_training_that_is_lost_in_the_last_save_is_no_clean_end(cluster: Callable[..., Cluster]) -> None:
    """Nobody else is at work, so that nobody would train it again: the chief is expected back."""
    made = cluster(family="supervised", ps=2, workers=0, partitions=2, save_secs=3600)
    servers = [made.start("ps", 0), made.start("ps", 1)]
    victim = made.logdir.with_name("victim")
    victim.write_text(str(servers[1].pid))
    chief = made.start("chief", steps=20, victim=str(victim))
    assert servers[1].wait() == -signal.SIGKILL
    servers[1] = made.start("ps", 1)
    assert chief.wait() == 138
    assert [record["step"] for record in chief.records("step")][-2:] == [19, 20], "and none after it"
    assert checkpoints(made.logdir)[-1].step == 0
    chief = made.start("chief", steps=20)
    for task in (chief, *servers):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 20


@pytest.mark.full
@pytest.mark.parametrize("losses", [1, 2])
def test_training_that_is_lost_and_not_made_good_is_no_clean_end(cluster: Callable[..., Cluster], losses: int) -> None:
    """The worker was there to train it again, but has ended before."""
    made = cluster(family="supervised", save_secs=3600, slow_save_secs=3.0)
    end = made.logdir.with_name("end")
    server, worker = made.start("ps"), made.start("worker", pause_secs=0.5, until=str(end))
    chief = made.start("chief", steps=60)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    for _ in range(losses):
        server.kill()
        began_at = time.time()
        server = made.start("ps")
        chief.wait_for("cluster.waiting", since=began_at, where=is_waiting_for_workers)
        worker.wait_for("step", since=began_at)
    end.touch()
    assert worker.wait() == 0
    assert chief.wait() == 138
    assert server.running
    chief = made.start("chief", steps=60)
    for task in (chief, server):
        assert task.wait() == 0
    assert (checkpoints(made.logdir)[-1].step or 0) >= 60


@pytest.mark.full
def test_training_that_is_lost_is_no_clean_end_where_there_is_no_time_to_save(
    cluster: Callable[..., Cluster],
) -> None:
    """What is there is saved already, but it is not what was trained; the worker is at work, but does not train."""
    made = cluster(family="supervised", save_secs=3600, slow_save_secs=2.0, stop_grace_secs=5.0)
    server, worker = made.start("ps"), made.start("worker", pause_secs=3600)
    chief = made.start("chief", steps=20)
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    server.kill()
    server = made.start("ps")
    assert chief.wait() == 138
    assert "Start it again to train them" in chief.text
    assert server.running
    assert worker.running


@pytest.mark.full
def test_training_that_is_lost_and_made_good_is_a_clean_end(cluster: Callable[..., Cluster]) -> None:
    """All train until the same step; each may go one beyond it, so that fewer of them do not come as far."""
    made = cluster(family="supervised", workers=2, save_secs=3600, slow_save_secs=3.0, steps=60)
    server, worker = made.start("ps"), made.start("worker")
    other, chief = made.start("worker", 1), made.start("chief")
    worker.wait_for("step")
    worker.freeze()
    assert other.wait() == 0
    chief.wait_for("cluster.waiting", where=is_waiting_for_workers)
    server.kill()
    server = made.start("ps")
    worker.thaw()
    for task in (worker, chief, server):
        assert task.wait() == 0


def test_a_worker_whose_training_has_ended_has_nothing_to_lose(cluster: Callable[..., Cluster]) -> None:
    """What was trained is the chief's to save: a worker is done, whatever becomes of the model then."""
    made = cluster(family="supervised")
    victim = made.logdir.with_name("victim")
    server, chief = made.start("ps"), made.start("chief")
    victim.write_text(str(server.pid))
    worker = made.start("worker", steps=20, chief="loses", victim=str(victim))
    assert server.wait() == -signal.SIGKILL
    server = made.start("ps")
    assert worker.wait() == 0
    again = worker.wait_for("session.recovered")
    assert "the chief has made the model anew" in again["message"]
    assert not worker.records("step", since=again["t"]), "its training has ended"
    assert server.running
    assert chief.running


@families
def test_a_join_in_a_task_of_its_own_tells_of_the_error(cluster: Callable[..., Cluster], family: str) -> None:
    made = cluster(family=family, chief="fails")
    made.start("ps")
    made.start("worker")
    chief = made.start("chief", steps=20)
    assert chief.wait() == 1
    assert chief.wait_for("not joined")["error"] == "ValueError('mine')"


def test_the_chief_remembers_who_was_at_work(cluster: Callable[..., Cluster]) -> None:
    """A worker that waits for its data does not come in again, and has not ended: it is waited for."""
    made = cluster(workers=2)
    parts = layout(made.spec, "chief", 0)
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"], operation_timeout_in_ms=10_000)
    register = Register(parts, f"grpc://{made.spec['ps'][0]}", config)
    server = made.start("ps")
    server.wait_for("cluster.serving")
    register.close_epoch()
    register.open_epoch("run")
    chief, first, second = parts.trainers
    for member, state in ((chief, TaskState.WORKING), (first, TaskState.WORKING), (second, TaskState.DONE)):
        register.tell(member, state)
    seen = register.read().states
    register.hang_up()
    server.kill()
    made.start("ps").wait_for("cluster.serving")
    assert register.read().epoch == ""
    register.close_epoch()
    assert register.read().states[1:] == seen[1:] == (TaskState.WORKING, TaskState.DONE)
    assert register.read().states[0] is TaskState.UNSEEN, "it comes in, whatever it was"
    assert register.workers_at_work == (first,)
    register.tell(first, TaskState.DONE)
    assert register.workers_at_work == ()
    register.hang_up()


def test_the_register_is_asked_whatever_has_become_of_the_other_servers(cluster: Callable[..., Cluster]) -> None:
    """A parameter server must read of the end of the job, though another one has ended, or never comes."""
    made = cluster(ps=2)
    parts = layout(made.spec, "ps", 0)
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"], operation_timeout_in_ms=10_000)
    register = Register(parts, f"grpc://{made.spec['ps'][0]}", config)
    made.start("ps").wait_for("cluster.serving")
    assert register.read().states == (TaskState.UNSEEN, TaskState.UNSEEN)
    register.hang_up()


async def test_who_is_done_does_not_wait_for_the_close_of_its_session_with_the_register() -> None:
    """Where its peers are gone, TensorFlow takes its time."""
    peers_answer = threading.Event()
    register = mock.create_autospec(Register, instance=True)
    register.hang_up.side_effect = peers_answer.wait
    await hang_up(register)
    register.hang_up.assert_called_once_with()
    thread = next(each for each in threading.enumerate() if "close of the register" in each.name)
    peers_answer.set()
    thread.join(10.0)


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
