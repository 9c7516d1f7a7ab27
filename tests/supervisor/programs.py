"""Programs that the tests start in processes of their own, to interrupt them; see `child` in conftest.py.

The first argument is which one, the second one its arguments, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

import asupervisor
from asupervisor.runtime import signals

tf1 = tf.compat.v1


def counting(secs: float = 0.0) -> SimpleNamespace:
    """A model whose step takes a while."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        w = tf1.get_variable("w", [2], initializer=tf1.zeros_initializer())
        pause = tf.numpy_function(lambda: (time.sleep(secs), np.float32(1.0))[1], [], tf.float32)
        with tf.control_dependencies([tf1.assign_add(w, tf.ones([2]) * pause)]):
            train = tf1.assign_add(step, 1)
    return SimpleNamespace(graph=graph, step=step, train=train, w=w)


def train(logdir: str, secs: float = 0.01, steps: int = 1_000_000, **options: Any) -> None:
    """Train until the given number of steps; tell where it began, and each step."""
    made = counting(secs)

    async def main() -> None:
        sv = asupervisor.Supervisor(graph=made.graph, logdir=logdir, **options)
        async with sv.managed_session() as sess:
            print("begun", int(await sess.run(made.step)), flush=True)
            for _ in range(steps):
                if sv.should_stop():
                    break
                print("step", int(await sess.run(made.train)), flush=True)
        print("left", flush=True)

    asyncio.run(main())


def blocked(logdir: str, **options: Any) -> None:
    """Train a little, then wait for an element that never comes."""
    graph = tf.Graph()
    with graph.as_default():
        step = tf1.train.get_or_create_global_step()
        train = tf1.assign_add(step, 1)
        element = tf1.FIFOQueue(1, tf.float32, shapes=[()]).dequeue()

    async def main() -> None:
        sv = asupervisor.Supervisor(graph=graph, logdir=logdir, stop_grace_secs=1, **options)
        async with sv.managed_session() as sess:
            for _ in range(3):
                await sess.run(train)
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1
                    if ticks == 10:
                        print("blocked", flush=True)

            sv.start_soon(tick)
            await sess.run(element)

    asyncio.run(main())


def stubborn(logdir: str, **options: Any) -> None:
    """A service that does not heed the stop."""
    made = counting()

    async def main() -> None:
        sv = asupervisor.Supervisor(graph=made.graph, logdir=logdir, stop_grace_secs=20, **options)

        async def deaf() -> None:
            while True:
                await asyncio.sleep(0.05)

        async with sv.managed_session() as sess:
            sv.start_soon(deaf)
            await sess.run(made.train)
            print("running", flush=True)
            await sv.wait_for_stop()
            print("stopping", flush=True)
        print("left", flush=True)

    asyncio.run(main())


def slow_save(logdir: str, **options: Any) -> None:
    """A final save that takes longer than anybody has patience for."""
    made = counting()
    with made.graph.as_default():

        class Slow(tf1.train.Saver):
            def save(self, *args: Any, **kwargs: Any) -> Any:
                if sv.should_stop():
                    print("saving", flush=True)
                    time.sleep(15)
                return super().save(*args, **kwargs)

        saver = Slow()

    sv = asupervisor.Supervisor(graph=made.graph, logdir=logdir, saver=saver, **options)

    async def main() -> None:
        async with sv.managed_session() as sess:
            await sv.save()
            await sess.run(made.train)  # so there is something to save in the end
            signals.subscribe(lambda number: os.write(1, b"told\n"))
            print("running", flush=True)
            await sv.wait_for_stop()

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
