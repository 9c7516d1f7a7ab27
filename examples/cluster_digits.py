"""Train the digits with a chief, workers and parameter servers; or, unchanged, alone.

Needs: ``pip install -e '.[examples,cli]'``

Run::

    asupervisor launch --ps 1 --workers 2 examples/cluster_digits.py --logdir runs/cluster
    python examples/cluster_digits.py --logdir runs/alone

Kill any of the processes: it is started again, and the training goes on. Ctrl-C ends all of them in order; the same
command goes on from the last step. On Kubernetes, TFJob's operator sets ``TF_CONFIG`` as the launcher does::

    apiVersion: kubeflow.org/v1
    kind: TFJob
    metadata: {name: digits}
    spec:
      runPolicy: {cleanPodPolicy: Running}
      tfReplicaSpecs:
        PS: &task
          replicas: 1
          restartPolicy: ExitCode            # 1 to 127 are permanent, 138 and 143 are started again
          template:
            spec:
              terminationGracePeriodSeconds: 60   # more than stop_grace_period_secs, so that the chief can save
              containers:
              - name: tensorflow             # the name that the operator looks for
                image: digits:latest
                command: [python, examples/cluster_digits.py, --logdir, /models/digits]
                ports: [{name: tfjob-port, containerPort: 2222}]
                volumeMounts: [{name: models, mountPath: /models}]   # the chief's alone
              volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
        Chief: {<<: *task}
        Worker: {<<: *task, replicas: 2}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up chatter

import digits
import tensorflow as tf

from asupervisor import (
    ChiefSessionCreator,
    MonitoredSession,
    MonitoredTrainingSession,
    StepOutcomeUnknown,
    checkpoints,
    cluster,
)


async def train(task: cluster.Task, options: argparse.Namespace) -> None:
    """What the chief and each worker do; and whoever is alone."""
    data = digits.load()
    model = digits.build(data, device=task.device_fn)
    step = 0
    async with MonitoredTrainingSession(
        checkpoint_dir=options.logdir,
        graph=model.graph,
        task=task,
        save_checkpoint_secs=options.save_secs,
        stop_grace_period_secs=30,
    ) as session:
        start_step = step = int(await session.run(model.global_step))
        print(f"{task.name} begins at step {start_step}", flush=True)
        while step < options.steps and not session.should_stop():
            # Each replica has batches of its own, whoever counts the steps.
            images, labels = data.batch(step * task.num_replicas + task.replica)
            try:
                step, _ = await session.run(
                    [model.global_step, model.train_op], {model.images: images, model.labels: labels}
                )
            except StepOutcomeUnknown as unknown:  # one step more or less is no matter here
                print(f"{task.name}: {unknown}", flush=True)
        if task.is_chief:
            await task.join()  # its workers end, too
            seen = await session.plain.run(model.digits, {model.asked_images: data.test_images})
            step = int(await session.plain.run(model.global_step))
            accuracy = float((seen == data.test_labels).mean())
            print(json.dumps({"global_step": step, "start_step": start_step, "test_accuracy": accuracy}), flush=True)


async def evaluate(options: argparse.Namespace) -> None:
    """What an evaluator does: each new checkpoint is tried out, in a session that sees nobody."""
    data = digits.load()
    model = digits.build(data)
    seen = -1
    while seen < options.steps:
        await asyncio.sleep(1)
        found = [record for record in checkpoints(options.logdir) if record.step is not None and record.step > seen]
        if not found:
            continue
        seen = max(seen, found[-1].step or 0)
        creator = ChiefSessionCreator(graph=model.graph, checkpoint_filename_with_path=found[-1].prefix)
        async with MonitoredSession(creator) as session:
            right = await session.run(model.digits, {model.asked_images: data.test_images}) == data.test_labels
        print(f"{found[-1].prefix}: {right.mean():.1%} of the held-out digits are recognised", flush=True)


async def main() -> None:
    """Read the command line and the cluster, and do our part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logdir", required=True, help="directory of the chief's checkpoints and summaries")
    parser.add_argument("--steps", type=int, default=1000, help="global step to reach (default: %(default)s)")
    parser.add_argument("--save-secs", type=float, default=10, help="seconds between two checkpoints")
    options = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    task = cluster.Task.from_tf_config()
    if task.role == "ps":
        await task.join()
    elif task.role == "evaluator":
        await evaluate(options)
    else:
        await train(task, options)


if __name__ == "__main__":
    cluster.run(main)
