"""`examples/cluster_digits.py`: under the launcher, where a worker is killed, and then alone, from where that ended."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forks import Forks


def last_json(text: str) -> dict[str, Any]:
    found = re.findall(r"\{.*\}$", text, re.MULTILINE)
    return dict(json.loads(found[-1]))


def test_the_example_trains_as_a_cluster_and_alone(
    pytestconfig: pytest.Config, tmp_path: Path, forks: Forks, python: str, fresh_environ: dict[str, str]
) -> None:
    program = str(pytestconfig.rootpath / "examples" / "cluster_digits.py")
    logdir = str(tmp_path / "logdir")
    launched = subprocess.Popen(
        [
            python,
            "-m",
            "asupervisor",
            "launch",
            "--ps",
            "1",
            "--workers",
            "1",
            program,
            "--logdir",
            logdir,
            "--steps",
            "400",
        ],
        env=fresh_environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launched.stdout is not None
    lines: list[str] = []
    worker = 0
    for line in launched.stdout:
        lines.append(line)
        if found := re.search(r"worker/0 is process (\d+)", line):
            worker = worker or int(found[1])
        if re.search(r"^\[worker/0\].* begins at step", line) and worker > 0:
            os.kill(worker, signal.SIGKILL)
            worker = -1
    launched.stdout.close()
    output = "".join(lines)
    assert launched.wait() == 0, output
    assert worker == -1, output
    result = last_json(output)
    assert result["global_step"] >= 400
    assert result["test_accuracy"] >= 0.9

    steps = str(result["global_step"] + 20)
    alone = forks.run(program, "--logdir", logdir, "--steps", steps)
    assert alone.returncode == 0, alone.stderr
    again = last_json(alone.stdout)
    assert again["start_step"] == result["global_step"]
    assert again["global_step"] >= result["global_step"] + 20

    cluster = {"ps": ["a:1"], "chief": ["b:1"], "worker": ["c:1"]}
    evaluator = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    environ = {**forks.environ, "TF_CONFIG": evaluator}
    evaluated = forks.run(program, "--logdir", logdir, "--steps", steps, environ=environ)
    assert evaluated.returncode == 0, evaluated.stderr
    found = re.search(r"model\.ckpt-(\d+): ([\d.]+)% of the held-out digits", evaluated.stdout)
    assert found is not None, evaluated.stdout
    assert int(found[1]) == again["global_step"]
    assert float(found[2]) / 100 == pytest.approx(again["test_accuracy"], abs=0.001)


def test_the_manifest_of_the_example_lets_the_chief_save_and_starts_lost_tasks_again(
    pytestconfig: pytest.Config,
) -> None:
    program = (pytestconfig.rootpath / "examples" / "cluster_digits.py").read_text()
    docstring = ast.get_docstring(ast.parse(program)) or ""
    manifest = yaml.safe_load(textwrap.dedent(docstring[docstring.index("    apiVersion") :]))
    assert (manifest["kind"], manifest["apiVersion"]) == ("TFJob", "kubeflow.org/v1")
    tasks = manifest["spec"]["tfReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in tasks.items()} == {"PS": 1, "Chief": 1, "Worker": 2}
    grace = re.search(r"stop_grace_period_secs=(\d+)", program)
    assert grace is not None
    for spec in tasks.values():
        assert spec["restartPolicy"] == "ExitCode"
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > int(grace[1])
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["command"][:2] == ["python", "examples/cluster_digits.py"]
