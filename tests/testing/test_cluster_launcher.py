"""The fixture with which suites start clusters."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
started = os.path.exists(sys.argv[1])
if task["type"] == "worker" and not started:
    open(sys.argv[1], "x").close()
    time.sleep(60)  # until it is killed
"""


async def test_a_cluster_of_real_processes(cluster_launcher: Any, tmp_path: Path) -> None:
    program, mark = tmp_path / "program.py", tmp_path / "mark"
    program.write_text(PROGRAM)
    async with cluster_launcher([str(program), str(mark)], ps=1, workers=1) as launcher:
        while not mark.exists():
            await asyncio.sleep(0.01)
        os.kill(launcher.tasks["worker/0"].pid, signal.SIGKILL)
        assert await launcher.wait() == 0
    assert launcher.tasks["worker/0"].starts == 2
    assert launcher.tasks["chief/0"].starts == 1
