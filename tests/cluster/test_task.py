"""`Task`: what it tells graphs and sessions, without any server running."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from asupervisor import ChiefSessionCreator, MonitoredTrainingSession, Supervisor, WorkerSessionCreator
from asupervisor.cluster import Task
from asupervisor.cluster.ports import PortReservation
from asupervisor.errors import ClusterConfigError
from tests.cluster.harness import Cluster
from tests.forks import Forks

tf1 = tf.compat.v1
CLUSTER = {"ps": ["127.0.0.1:2221", "127.0.0.1:2222"], "chief": ["127.0.0.1:2223"], "worker": ["127.0.0.1:2224"]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return Task.from_tf_config()


def test_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}))
    task = Task.from_tf_config(step_timeout_secs=3)
    assert (task.role, task.index, task.is_chief, task.name) == ("worker", 0, False, "/job:worker/task:0")
    assert (task.num_replicas, task.replica, task.is_distributed) == (2, 1, True)
    assert task.target == "grpc://127.0.0.1:2224"
    assert task.cluster_spec is not None
    assert task.cluster_spec.as_dict() == CLUSTER
    assert task.peers is not None


def test_an_explicit_cluster() -> None:
    for spec in (CLUSTER, tf.train.ClusterSpec(CLUSTER)):
        task = Task(spec, "chief", 0)
        assert (task.role, task.is_chief, task.replica) == ("chief", True, 0)
    assert (
        Task.from_tf_config({"cluster": CLUSTER, "task": {"type": "ps", "index": 1}}).target == "grpc://127.0.0.1:2222"
    )
    with pytest.raises(ClusterConfigError, match="out of range"):
        Task(CLUSTER, "worker", 1)


def test_its_server_is_started_once(forks: Forks) -> None:
    """In a process of its own: TensorFlow's servers have no orderly end."""
    with PortReservation(2) as ports:
        cluster = json.dumps({"ps": [ports.addresses[0]], "worker": [ports.addresses[1]]})
        done = forks.run("-c", SERVES, cluster)
    assert done.stdout == f"ps 0 {ports.addresses[0]}\n", done.stderr


SERVES = """
import json, os, socket, sys
from asupervisor.cluster import Task
task = Task(json.loads(sys.argv[1]), "ps", 0)
server = task.server
host, port = task.target.removeprefix("grpc://").split(":")
socket.create_connection((host, int(port))).close()
assert task.server is server
print(server.server_def.job_name, server.server_def.task_index, f"{host}:{port}", flush=True)
os._exit(0)
"""


async def test_alone_it_means_nothing(alone: Task) -> None:
    assert (alone.role, alone.is_chief, alone.target, alone.peers) == ("chief", True, "", None)
    assert (alone.session_config, alone.device_fn, alone.cluster_spec, alone.server) == (None, None, None, None)
    assert (alone.num_replicas, alone.replica, alone.is_distributed) == (1, 0, False)
    config = tf1.ConfigProto(allow_soft_placement=True)
    assert alone.configured(config) is config
    assert await alone.join() == "done"


async def test_an_evaluator_is_not_in_the_cluster() -> None:
    task = Task(CLUSTER, "evaluator", 0)
    assert (task.role, task.is_chief, task.target, task.peers, task.device_fn) == ("evaluator", False, "", None, None)
    assert task.session_config is None
    assert await task.join() == "done"


def test_sessions_see_the_parameter_servers_and_their_own_task_only() -> None:
    task = Task(CLUSTER, "worker", 0, step_timeout_secs=3)
    config = task.session_config
    assert list(config.device_filters) == ["/job:ps", "/job:worker/task:0"]
    assert config.rpc_options.use_rpc_for_inprocess_master
    assert config.operation_timeout_in_ms == 3000


def test_what_the_user_configures_is_kept() -> None:
    task = Task(CLUSTER, "worker", 0)
    mine = tf1.ConfigProto(operation_timeout_in_ms=7, device_filters=["/job:ps/task:0"], allow_soft_placement=True)
    config = task.configured(mine)
    assert (config.operation_timeout_in_ms, list(config.device_filters)) == (7, ["/job:ps/task:0"])
    assert config.allow_soft_placement
    assert not mine.rpc_options.use_rpc_for_inprocess_master  # not changed


def test_variables_go_to_the_parameter_servers_in_turn(graph: tf.Graph, variables: str) -> None:
    task = Task(CLUSTER, "worker", 0)
    with graph.as_default(), tf1.device(task.device_fn):
        made = [tf1.get_variable(f"w{number}", [1]) for number in range(3)]
        product = made[0] * 2.0
    assert [variable.op.device for variable in made] == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"]
    assert product.op.device == "/job:worker/task:0"


@pytest.mark.parametrize("job", ["ps", "evaluator"])
def test_who_does_not_train_has_no_session(graph: tf.Graph, job: str) -> None:
    task = Task(CLUSTER, job, 0)
    with graph.as_default():
        tf1.get_variable("w", [1])
    makers: list[Callable[[], Any]] = [
        lambda: Supervisor(graph=graph, task=task),
        lambda: MonitoredTrainingSession(graph=graph, task=task),
        lambda: ChiefSessionCreator(graph=graph, task=task),
        lambda: WorkerSessionCreator(graph=graph, task=task),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"has no session: let it|is not in the cluster: restore"):
            make()


def test_sessions_take_what_they_need_from_the_task() -> None:
    for job, is_chief in (("chief", True), ("worker", False)):
        task = Task(CLUSTER, job, 0)
        graph = tf.Graph()
        with graph.as_default(), tf1.device(task.device_fn):
            tf1.get_variable("w", [1])
        creator = (ChiefSessionCreator if is_chief else WorkerSessionCreator)(graph=graph, task=task)
        assert creator.master == task.target
        assert creator.config == task.session_config
        assert creator.peers is task.peers
        sv = Supervisor(graph=graph, task=task)
        assert (sv.is_chief, sv.peers) == (is_chief, task.peers)


@pytest.mark.parametrize("no_proxy", ["", "example.org"])
def test_a_proxy_is_not_asked_for_the_tasks_of_the_cluster(monkeypatch: pytest.MonkeyPatch, no_proxy: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    Task({"ps": ["a:1"], "worker": ["b:1"]}, "worker", 0)._bypass_proxies()

    assert os.environ["no_proxy"].split(",") == [*filter(None, [no_proxy]), "127.0.0.1", "a", "b", "localhost"]
    assert "no_grpc_proxy" not in os.environ


def test_without_a_proxy_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    Task(CLUSTER, "worker", 0)._bypass_proxies()

    assert "no_proxy" not in os.environ


@pytest.mark.parametrize("job", ["ps", "chief"])
def test_a_port_in_use_is_one_line(cluster: Callable[..., Cluster], job: str) -> None:
    made = cluster()
    if job == "chief":
        made.start("ps")
    host, _, port = made.spec[job][0].partition(":")
    with socket.socket() as somebody:
        somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        somebody.bind((host, int(port)))
        somebody.listen()
        task = made.start(job)
        assert task.wait() == 138
    said = [line for line in task.text.splitlines() if line.startswith("PortInUse: ")]
    assert said == [
        f"PortInUse: /job:{job}/task:0 cannot listen at {host}:{port}: the port is in use. Is this task running "
        "already? Otherwise give it another port, in the configuration of every task."
    ]
    assert "Traceback" not in task.text
