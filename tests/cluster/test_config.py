"""`TF_CONFIG`: what works, and the one line that tells what to write where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asupervisor.cluster.config import Layout, parse
from asupervisor.errors import ClusterConfigError, SupervisorError

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "chief": ["chief:2222"], "worker": ["w0:2222", "w1:2222"]}


def config(job: str = "worker", index: Any = 0, cluster: Any = CLUSTER, **more: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}, **more})


@pytest.mark.parametrize("text", [None, "", "  ", "{}", '{"environment": "cloud"}'])
def test_without_it_there_is_one_task_alone(text: str | None) -> None:
    layout = parse(text)
    assert (layout.role, layout.index, layout.is_chief, layout.me, layout.servers) == ("chief", 0, True, None, ())


@pytest.mark.parametrize(
    ("job", "index", "role", "is_chief"),
    [
        ("ps", 0, "ps", False),
        ("ps", 1, "ps", False),
        ("chief", 0, "chief", True),
        ("worker", 0, "worker", False),
        ("worker", 1, "worker", False),
        ("worker", "1", "worker", False),
        ("evaluator", 0, "evaluator", False),
    ],
)
def test_roles(job: str, index: Any, role: str, is_chief: bool) -> None:
    layout = parse(config(job, index, environment="cloud"))
    assert (layout.role, layout.is_chief) == (role, is_chief)
    assert [member.name for member in layout.trainers] == [
        "/job:chief/task:0",
        "/job:worker/task:0",
        "/job:worker/task:1",
    ]
    if role != "evaluator":
        assert layout.me is not None
        assert f"{layout.me.host}:{layout.me.port}" == CLUSTER[job][int(index)]
    assert layout.addresses() == CLUSTER


def test_worker_0_is_chief_where_no_task_is_called_so() -> None:
    cluster = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}
    assert parse(config("worker", 0, cluster)).is_chief
    assert not parse(config("worker", 1, cluster)).is_chief
    assert parse(config("worker", 0, cluster)).role == "worker"


def test_master_is_the_older_name_of_the_chief() -> None:
    cluster = {"ps": ["a:1"], "master": ["b:1"], "worker": ["c:1"]}
    layout = parse(config("master", 0, cluster))
    assert (layout.role, layout.is_chief, layout.job) == ("chief", True, "master")
    assert not parse(config("worker", 0, cluster)).is_chief


def test_one_replica_without_parameter_servers_is_alone() -> None:
    assert parse(config("worker", 0, {"worker": ["a:1"]})) == Layout()
    assert parse(config("chief", 0, {"chief": ["a:1"]})) == Layout()


def test_the_only_one_of_its_job_needs_no_index() -> None:
    assert parse(json.dumps({"cluster": CLUSTER, "task": {"type": "chief"}})) == parse(config("chief"))


def test_a_complete_mapping_of_addresses_works() -> None:
    layout = parse(config("worker", 1, {"ps": {"0": "a:1"}, "worker": {"1": "c:1", "0": "b:1"}}))
    assert [member.host for member in layout.trainers] == ["b", "c"]
    assert layout.me is not None
    assert layout.me.host == "c"


def test_addresses_may_be_ip_version_6() -> None:
    layout = parse(config("worker", 0, {"ps": ["[::1]:2222"], "worker": ["grpc://[::1]:2223"]}))
    assert [member.port for member in (*layout.servers, *layout.trainers)] == [2222, 2223]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON list"),
        ("3", "a JSON number"),
        (json.dumps({"cluster": CLUSTER}), 'add "task"'),
        (json.dumps({"cluster": CLUSTER, "task": {"index": 0}}), 'add "task"'),
        (config("gpu"), "task type 'gpu' is unknown"),
        (config("worker", 2), "task index 2 is out of range: worker has 2 (0 to 1)"),
        (json.dumps({"cluster": CLUSTER, "task": {"type": "worker"}}), 'add "index"'),
        (config("worker", -1), "task index -1 must be a number from 0"),
        (config("worker", True), "task index True must be a number from 0"),
        (config("worker", "x"), "task index 'x' must be a number from 0"),
        (config("worker", "²"), "task index '²' must be a number from 0"),
        (config("chief", 1), "task index 1 is out of range"),
        (config("worker", 0, {"ps": ["a:1"], "worker": ["a:1"]}), "and /job:worker/task:0 have the same address a:1"),
        (config("worker", 0, {"ps": ["a:1", "a:1"], "worker": ["b:1"]}), "the same address a:1"),
        (config("worker", 0, {"worker": ["a:1", "b:1"]}), 'there is no "ps"'),
        (config("ps", 0, {"ps": ["a:1"]}), "nobody to train"),
        (config("chief", 0, {"ps": ["a:1"], "worker": ["b:1"]}), "\"cluster\" has no 'chief'"),
        (config("chief", 0, {"ps": ["a:1"], "chief": ["b:1", "c:1"]}), "one chief only"),
        (config("chief", 0, {"ps": ["a:1"], "chief": ["b:1"], "master": ["c:1"]}), "the same job"),
        (config("worker", 0, {"ps": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}), "evaluators are not part"),
        (config("worker", 0, {"ps": ["a:1"], "worker": ["b:1"], "gpu": ["c:1"]}), "remove 'gpu'"),
        (config("worker", 0, {"ps": ["a:1"], "worker": ["b"]}), "worker 0 has the address 'b': write \"host:port\""),
        (config("worker", 0, {"ps": ["a:1"], "worker": ["b:99999"]}), "the address 'b:99999'"),
        (config("worker", 0, {"ps": ["a:1"], "worker": [7]}), "the address 7"),
        (config("worker", 0, {"ps": ["a:1"], "worker": "b:1"}), 'must be a list of "host:port"'),
        (config("worker", 0, {"ps": ["a:1"], "worker": {"1": "b:1"}}), "a sparse cluster cannot work"),
        (config("worker", 0, CLUSTER, sparseCluster={}), "sparse cluster"),
        (json.dumps({"sparseCluster": {"ps": ["a:1"]}, "task": {"type": "worker", "index": 0}}), "enableDynamicWorker"),
        (config("worker", 0, "a:1"), '"cluster" must be an object'),
        (config("worker", 0, []), '"cluster" must be an object'),
        (config("worker", "9" * 5000), "must be a number from 0"),
        (config("worker", 0, {"ps": ["a:1"], "worker": {"9" * 5000: "b:1"}}), "a sparse cluster cannot work"),
        (config("worker", 0, {"ps": ["a..b:1"], "worker": ["b:1"]}), "ps 0 has the address 'a..b:1'"),
        (config("worker", 0, {"ps": ["a" * 70 + ":1"], "worker": ["b:1"]}), "ps 0 has the address"),
    ],
)  # fmt: skip
def test_what_cannot_work_gets_one_line(text: str, says: str) -> None:
    with pytest.raises(ClusterConfigError) as raised:
        parse(text)
    message = str(raised.value)
    assert says in message
    assert message.startswith("TF_CONFIG")
    assert "\n" not in message
    assert isinstance(raised.value, SupervisorError | ValueError)
