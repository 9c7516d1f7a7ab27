"""Train a classifier of handwritten digits, with checkpoints, summaries, a progress line and resumption.

Needs: ``pip install -e '.[examples]'``

Run::

    python examples/train_digits.py --logdir runs/digits
    python examples/train_digits.py --logdir runs/digits --steps 2000     # goes on from step 1000
    python examples/train_digits.py --logdir runs/queue --input queue     # fed by the graph's own queues

You see a progress line (on a terminal only) and at the end one line of JSON. Interrupt it with Ctrl-C: it saves the
step it has reached and ends, and the same command goes on from there. ``tensorboard --logdir runs`` shows the curves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up chatter

import digits
import tensorflow as tf
from tqdm import tqdm

from asupervisor import AsyncSession, Supervisor


async def train(
    logdir: str, steps: int, source: str = "feed", master: str = "", save_secs: float = 30
) -> dict[str, Any]:
    """Train until the global step is `steps`.

    Args:
        logdir: Directory of the checkpoints and the event file; a run that finds some goes on from the newest.
        steps: The global step to reach, counted from the very first run in `logdir`.
        source: ``feed`` or ``queue``; see `digits.build`.
        master: TensorFlow's master: ``""``, ``"local"`` or ``"grpc://host:port"``.
        save_secs: Seconds between two checkpoints; the last step is saved in any case.

    Returns:
        What the last line of output says.
    """
    data = digits.load()
    model = digits.build(data, "queue" if source == "queue" else "feed")
    supervisor = Supervisor(
        graph=model.graph,
        logdir=logdir,
        global_step=model.global_step,
        save_model_secs=save_secs,
        save_summaries_secs=2,
        stop_grace_secs=10,
        handle_signals=True,  # SIGTERM ends it in good order, too
    )
    step = start_step = 0
    try:
        async with supervisor.managed_session(master) as session:
            step = start_step = int(await session.run(model.global_step))
            if start_step:
                print(f"Resuming at step {start_step} of {logdir}", flush=True)
            fetches = [model.train_op, model.loss, model.accuracy]
            with tqdm(total=steps, initial=start_step, unit=" steps", disable=None) as progress:
                while step < steps and not supervisor.should_stop():
                    feeds = None
                    if source == "feed":
                        images, labels = data.batch(step)
                        feeds = {model.images: images, model.labels: labels}
                    _, loss, accuracy = await session.run(fetches, feeds)
                    step += 1
                    progress.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.3f}", refresh=False)
                    progress.update()
            test_accuracy = await test(session, model, data)
    finally:
        saved = supervisor.status().last_checkpoint
        if step < steps and saved is not None:
            print(f"Stopped; the last checkpoint is {saved}", file=sys.stderr)
    return {"global_step": step, "start_step": start_step, "test_accuracy": test_accuracy}


async def test(session: AsyncSession, model: digits.Model, data: digits.Data) -> float:
    """The share of the held-out images that are recognised."""
    seen = await session.run(model.digits, {model.asked_images: data.test_images})
    return float((seen == data.test_labels).mean())


def main() -> None:
    """Read the command line, train, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logdir", required=True, help="directory of checkpoints and summaries")
    parser.add_argument("--steps", type=int, default=1000, help="global step to reach (default: %(default)s)")
    parser.add_argument("--input", choices=["feed", "queue"], default="feed", help="where batches come from")
    parser.add_argument("--master", default="", help="'' (default), local, or grpc://host:port")
    options = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    tqdm.monitor_interval = 0  # no thread that only watches the progress line
    try:
        result = asyncio.run(train(options.logdir, options.steps, options.input, options.master))
    except KeyboardInterrupt:
        # The step is saved. End as a shell expects of a program that was interrupted: killed by the signal.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        sys.exit(130)  # where a signal does not kill
    print(json.dumps(result))


if __name__ == "__main__":
    main()
