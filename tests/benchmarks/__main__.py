"""The command: ``python -m tests.benchmarks [--quick] [--only PART] [--json FILE] [--uvloop]``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from tests.benchmarks import checkpoints, cluster, latency, monitored, steps, supervisors
from tests.benchmarks.measure import Report, say

PARTS = {
    "steps": steps.throughput,
    "feeds": steps.feeds,
    "lag": latency.lag,
    "predictions": latency.predictions,
    "stop": supervisors.start_and_stop,
    "many": supervisors.many,
    "imports": supervisors.imports,
    "saves": checkpoints.stalls,
    "monitored": monitored.steps,
    "hooks": monitored.hooks,
    "cluster": cluster.cases,
}


async def measure(report: Report, parts: list[str], repeats: int, scale: float) -> None:
    """Run the parts one after another."""
    for part in parts:
        await PARTS[part](report, repeats, scale)


def main() -> int:
    """Run the benchmarks; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only; may be repeated")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each peer")
    parser.add_argument("--quick", action="store_true", help="few and short samples: does it run at all?")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), help="where the figures go")
    parser.add_argument("--uvloop", action="store_true", help="on uvloop instead of asyncio's own loop")
    options = parser.parse_args()
    tf.compat.v1.enable_resource_variables()
    tf.compat.v1.disable_eager_execution()
    tf.get_logger().setLevel("ERROR")
    report = Report()
    work = measure(
        report,
        options.only or list(PARTS),
        3 if options.quick else options.repeats,
        0.2 if options.quick else 1.0,
    )
    if options.uvloop:
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)
    report.write(options.json)
    missed = report.missed()
    say(f"\nwritten to {options.json}; " + ("every goal is met" if not missed else "goals that are not met:"))
    for line in missed:
        say(f"  {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
