"""`examples/cluster_digits.py`: under the launcher, where a worker is killed, and then alone, from where that ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
