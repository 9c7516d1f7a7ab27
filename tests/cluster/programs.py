"""Tasks of real clusters, for the tests and the benchmarks: ours, and TensorFlow's own on the same model.

The first argument is which one, the second one its arguments, as JSON (`harness.py`). What a task has to tell, it
writes as lines of JSON, each with its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import anyio
import numpy as np
import tensorflow as tf

from asupervisor import MonitoredTrainingSession, StepOutcomeUnknown, Supervisor, cluster, train_loop
from asupervisor.cluster.config import parse
from asupervisor.errors import PeersUnreachable, PortInUse
from asupervisor.runtime import signals

tf1 = tf.compat.v1
if os.environ.get("ASUPERVISOR_TEST_TF_MODE") == "v1":
    tf1.disable_v2_behavior()
tf.get_logger().setLevel("ERROR")


def say(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"t": time.time(), "kind": kind, **facts}) + "\n")
    sys.stdout.flush()


def emit(kind: str, message: str, *, level: str = "info", **data: Any) -> None:
    say(kind, message=message)


class Teller(logging.Handler):
    """Tells every event."""

    def emit(self, record: logging.LogRecord) -> None:
        say(getattr(record, "event_kind", "log"), message=record.getMessage())


def build(device: Any, *, replicas: int, variables: str, partitions: int, sync: int) -> SimpleNamespace:
    """A regression whose global step counts the updates of all replicas."""
    (tf1.enable_resource_variables if variables == "resource" else tf1.disable_resource_variables)()
    graph = tf.Graph()
    with graph.as_default(), tf1.device(device):
        x = tf1.placeholder(tf.float32, [None, 8], name="x")
        partitioner = tf1.fixed_size_partitioner(partitions) if partitions else None
        w = tf1.get_variable("w", [8, 1], initializer=tf1.zeros_initializer(), partitioner=partitioner)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.convert_to_tensor(w)) - 1.0))
        step = tf1.train.get_or_create_global_step()
        optimizer: Any = tf1.train.GradientDescentOptimizer(0.01)
        if sync:
            optimizer = tf1.train.SyncReplicasOptimizer(
                optimizer, replicas_to_aggregate=sync, total_num_replicas=replicas
            )
        train = optimizer.minimize(loss, global_step=step)
    return SimpleNamespace(
        graph=graph,
        x=x,
        step=step,
        train=train,
        feed={x: np.ones([4, 8], np.float32)},
        optimizer=optimizer,
        saver=None,
    )


# ------------------------------------------------------------------------------------------ ours


def replica(
    *,
    family: str = "monitored",
    logdir: str | None = None,
    steps: int = 10**9,
    pause_secs: float = 0.01,
    save_secs: float = 0.5,
    step_timeout_secs: float = 10.0,
    outage_secs: float = 60.0,
    chief_grace_secs: float = 5.0,
    max_wait_secs: float = 120.0,
    stop_grace_secs: float = 20.0,
    variables: str = "resource",
    partitions: int = 0,
    sync: int = 0,
    handle_signals: bool = False,
    local_init_secs: float = 0.0,
    chief: str = "trains",
    until: str | None = None,
    victim: str | None = None,
    limit_secs: float = math.inf,
    slow_save_secs: float = 0.0,
    fails_saves: str = "",
    after_saves: int = signal.SIGSTOP,
    server: str | None = None,
    gives_up: str | None = None,
    relents: bool = False,
) -> None:
    """A task of ours: a parameter server, or one that trains by the one family or the other.

    Training ends at a step, or once the file `until` is there.
    A chief that does not train until the end "idles"; or, after its steps, it kills the process of the file `victim`;
    and "joins" its workers, "saves", "fails" beside a task that joins, "exits", "cancels" itself, leaves a step that
    never ends ("starves"), or "lingers" when all is done. One that "dallies" waits for the file `until`, and trains
    once more, and saves, for one with ".again" behind its name. A worker that "loses" kills that process, and hears of
    the loss just after its own training has ended.
    A task has no more time once the file `gives_up` is there, and thinks nothing of it where it `relents`.
    All saves but the first one take `slow_save_secs`, or fail for the "disk" or as runs do that a lost "peer" has
    cancelled; when they are done, the process of the file `server` gets the signal `after_saves`.
    A chief that "fails at once" has no session. One that "wraps" what it is told of a lost peer, or of a port in use,
    makes an error of its own of that, once the file `until` is there, if it is to come.
    """

    def told_to_end() -> bool:
        return until is not None and os.path.exists(until)

    def starved(task: Any, model: Any) -> Any:
        with model.graph.as_default(), tf1.device(task.name):
            started = tf1.py_func(lambda: np.int64(told_to_starve.set() or 1), [], tf.int64)
            with tf.control_dependencies([started]):
                return tf1.assign_add(model.step, tf1.FIFOQueue(1, [tf.int64], [[]]).dequeue())

    async def at_its_end(task: Any, owner: Any, sess: Any, model: Any) -> None:
        if victim is not None:
            os.kill(int(Path(victim).read_text()), signal.SIGKILL)
        if chief == "loses" and not task.is_chief:
            asyncio.get_running_loop().call_soon(owner.request_stop, tf.errors.AbortedError(None, None, "lost"))
            raise tf.errors.OutOfRangeError(None, None, "end of data")
        if not task.is_chief:
            return
        if chief == "joins":
            say("joined", how=await task.join())
        elif chief == "saves":
            await owner.save()
        elif chief == "dallies":
            while not told_to_end():
                if os.path.exists(f"{until}.again"):
                    os.remove(f"{until}.again")
                    await sess.run(model.train, model.feed)
                    await sess.save()
                    say("again")
                await asyncio.sleep(0.001)
        elif chief == "starves":
            joins.append(asyncio.ensure_future(sess.run(model.starved)))
            await asyncio.to_thread(told_to_starve.wait)
        elif chief == "fails":
            joins.append(asyncio.ensure_future(joined_in_vain(task)))
            await asyncio.sleep(0)
            raise ValueError("mine")
        elif chief == "exits":
            sys.exit(0)
        elif chief == "cancels":
            raise asyncio.CancelledError

    async def end_by(limit: asyncio.Timeout) -> None:
        while gives_up is not None:
            await asyncio.sleep(0.001)
            if os.path.exists(gives_up):
                limit.reschedule(0.0)
                return

    joins: list[asyncio.Future[Any]] = []
    told_to_starve = threading.Event()

    async def joined_in_vain(task: Any) -> None:
        try:
            await task.join()
        except ValueError as error:
            say("not joined", error=repr(error))

    async def main() -> None:
        task = cluster.Task.from_tf_config(
            step_timeout_secs=step_timeout_secs, outage_secs=outage_secs, chief_grace_secs=chief_grace_secs, emit=emit
        )
        if task.role == "ps":
            say("ended", how=await task.join())
            return
        model = build(task.device_fn, replicas=task.num_replicas, variables=variables, partitions=partitions, sync=sync)
        if local_init_secs:

            def sleep() -> Any:
                time.sleep(local_init_secs)
                return np.int32(0)

            with model.graph.as_default(), tf1.device(task.name):
                slow = tf1.py_func(sleep, [], tf.int32)
                tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, slow.op)
        if slow_save_secs or fails_saves or server:
            with model.graph.as_default():
                model.saver = SlowSaver(slow_save_secs, fails_saves, server, after_saves)
        if chief == "fails at once" and task.is_chief:
            raise FileNotFoundError("no data")
        model.starved = starved(task, model) if chief == "starves" else None
        train = {"monitored": train_monitored, "managed": train_managed}.get(family, train_supervised)
        with contextlib.suppress(*[TimeoutError] if relents else []):
            async with asyncio.timeout(None) as limit:
                joins.append(asyncio.ensure_future(end_by(limit)))
                with anyio.move_on_after(limit_secs):
                    try:
                        await train(task, model)
                    except (tf.errors.OpError, PortInUse) as error:
                        if chief != "wraps":
                            raise
                        while until is not None and not told_to_end():
                            await anyio.sleep(0.05)
                        raise RuntimeError("it cannot go on") from error
        if chief == "lingers":
            await anyio.sleep_forever()

    async def train_monitored(task: Any, model: Any) -> None:
        hooks = [cluster.SyncReplicasHook(model.optimizer, task.is_chief)] if sync else []
        async with MonitoredTrainingSession(
            checkpoint_dir=logdir,
            graph=model.graph,
            task=task,
            hooks=hooks,
            save_checkpoint_secs=save_secs,
            save_summaries_steps=None,
            log_step_count_steps=None,
            max_wait_secs=max_wait_secs,
            scaffold=tf1.train.Scaffold(saver=model.saver),
            stop_grace_period_secs=stop_grace_secs,
        ) as sess:
            step = int(await sess.run(model.step))
            say("ready", step=step)
            while chief == "idles" and task.is_chief and not sess.should_stop() and not told_to_end():
                await asyncio.sleep(0.001)  # it leaves as soon as it can
            while step < steps and (not told_to_end() or chief == "dallies") and not sess.should_stop():
                try:
                    step, _ = await sess.run([model.step, model.train], model.feed)
                    say("step", step=int(step))
                except StepOutcomeUnknown as unknown:
                    say("unknown", before=unknown.before, now=unknown.now)
                await asyncio.sleep(pause_secs)
            say("trained", step=int(step))
            await at_its_end(task, sess, sess, model)
        say("closed")

    def supervisor(task: Any, model: Any) -> Supervisor:
        return Supervisor(
            graph=model.graph,
            logdir=logdir,
            save_model_secs=save_secs,
            save_summaries_secs=0,
            stop_grace_secs=stop_grace_secs,
            task=task,
            sync_replicas=model.optimizer if sync else None,
            handle_signals=handle_signals,
            **({} if model.saver is None else {"saver": model.saver}),
        )

    async def train_managed(task: Any, model: Any) -> None:
        async with supervisor(task, model).managed_session() as sess:
            say("ready", step=int(await sess.run(model.step)))
            for _ in range(steps):
                step, _ = await sess.run([model.step, model.train], model.feed)
                say("step", step=int(step))
        say("closed")

    async def train_supervised(task: Any, model: Any) -> None:
        sv = supervisor(task, model)
        seen: set[int] = set()

        async def step_fn(sess: Any) -> None:
            if id(sess) not in seen:
                seen.add(id(sess))
                say("ready", step=int(await sess.run(model.step)))
            if chief == "idles" and task.is_chief:
                await sv.wait_for_stop()
                return
            if not pause_secs:
                say("stepping")
            step, _ = await sess.run([model.step, model.train], model.feed)
            say("step", step=int(step))
            if step >= steps or told_to_end():
                say("trained", step=int(step))
                await at_its_end(task, sv, sess, model)
                sv.request_stop()
            await asyncio.sleep(pause_secs)

        async def stop_when_told() -> None:
            while not told_to_end():
                await asyncio.sleep(0.001)
            sv.request_stop()

        if chief == "idles" and until is not None:
            joins.append(asyncio.ensure_future(stop_when_told()))
        await train_loop(sv, step_fn)
        say("closed")

    logger = logging.getLogger("asupervisor")
    logger.addHandler(Teller())
    logger.setLevel(logging.DEBUG)
    cluster.run(main)


class SlowSaver(tf1.train.Saver):  # type: ignore[misc]
    """Stands for a slow disk, or for a peer that is lost in the last save, or just after it."""

    def __init__(self, secs: float, fails: str, server: str | None, after: int) -> None:
        super().__init__()
        self._secs = secs
        self._fails = fails
        self._server = server
        self._after = after
        self._first = True

    def save(self, *args: Any, **kwargs: Any) -> Any:
        if self._first:
            self._first = False
            return super().save(*args, **kwargs)
        say("saving")
        time.sleep(self._secs)
        if self._fails == "peer":
            raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled.")
        if self._fails:
            raise OSError(errno.ENOSPC, "no space left")
        saved = super().save(*args, **kwargs)
        if self._server is not None:
            os.kill(int(Path(self._server).read_text()), self._after)
        return saved


# ------------------------------------------------------------------------------------------ TensorFlow's own


def tf_replica(
    *,
    family: str = "monitored",
    logdir: str | None = None,
    steps: int = 10**9,
    pause_secs: float = 0.01,
    save_secs: float = 0.5,
    variables: str = "resource",
    partitions: int = 0,
    sync: int = 0,
    **_: Any,
) -> None:
    """The same with `tf.distribute.Server`, and `Supervisor` or `MonitoredTrainingSession` of TensorFlow."""
    tf1.disable_v2_behavior()  # its services' threads execute eagerly otherwise, and fail
    layout = parse(os.environ["TF_CONFIG"])
    spec = tf.train.ClusterSpec(layout.addresses())
    server = tf.distribute.Server(spec, job_name=layout.job, task_index=layout.index)
    if layout.role == "ps":
        say("cluster.serving")
        server.join()
        return
    me = f"/job:{layout.job}/task:{layout.index}"
    device = tf1.train.replica_device_setter(cluster=spec, worker_device=me)
    model = build(device, replicas=len(layout.trainers), variables=variables, partitions=partitions, sync=sync)
    if family == "monitored":
        hooks = [model.optimizer.make_session_run_hook(layout.is_chief)] if sync else []
        with model.graph.as_default():
            session = tf1.train.MonitoredTrainingSession(
                server.target,
                layout.is_chief,
                logdir if layout.is_chief else None,
                hooks=hooks,
                save_checkpoint_secs=save_secs,
                save_summaries_steps=None,
                save_summaries_secs=None,
                log_step_count_steps=None,
            )
        with session as sess:
            say("ready", step=int(sess.run(model.step)))
            step = 0
            while step < steps and not sess.should_stop():
                step, _ = sess.run([model.step, model.train], model.feed)
                say("step", step=int(step))
                time.sleep(pause_secs)
            say("trained", step=int(step))
    else:
        extra: dict[str, Any] = {}
        with model.graph.as_default():
            if sync:
                optimizer = model.optimizer
                tokens, runner = optimizer.get_init_tokens_op(), optimizer.get_chief_queue_runner()
                extra = {
                    "local_init_op": optimizer.chief_init_op if layout.is_chief else optimizer.local_step_init_op,
                    "ready_for_local_init_op": optimizer.ready_for_local_init_op,
                }
            sv = tf1.train.Supervisor(
                is_chief=layout.is_chief,
                logdir=logdir,
                save_model_secs=int(save_secs + 0.5),
                save_summaries_secs=0,
                **extra,
            )
            sess = sv.prepare_or_wait_for_session(server.target)
            if sync and layout.is_chief:
                sv.start_queue_runners(sess, [runner])
                sess.run(tokens)
        say("ready", step=int(sess.run(model.step)))
        step = 0
        while step < steps and not sv.should_stop():
            step, _ = sess.run([model.step, model.train], model.feed)
            say("step", step=int(step))
            time.sleep(pause_secs)
        say("trained", step=int(step))
        sv.stop()
    say("closed")


# ------------------------------------------------------------------------------------------ who looks on


def observer(*, address: str, every_secs: float = 0.02, variables: str = "resource") -> None:
    """Reads the global step from outside, through a session of its own on the parameter server, again and again."""
    (tf1.enable_resource_variables if variables == "resource" else tf1.disable_resource_variables)()
    graph = tf.Graph()
    with graph.as_default(), tf1.device("/job:ps/task:0"):
        step = tf1.train.get_or_create_global_step()
        graph.finalize()
    config = tf1.ConfigProto(device_filters=["/job:ps/task:0"], operation_timeout_in_ms=1000)
    config.rpc_options.use_rpc_for_inprocess_master = True
    last = None
    while True:
        try:
            with tf1.Session(f"grpc://{address}", graph=graph, config=config) as sess:
                while True:
                    now = int(sess.run(step))
                    if now != last:
                        last = now
                        say("seen", step=now)
                    time.sleep(every_secs)
        except tf.errors.OpError as error:
            if last is not None:
                say("unseen", error=type(error).__name__)
            last = None
            time.sleep(0.05)


# ------------------------------------------------------------------------------------------ how tasks end


def ends(*, how: str) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        if how == "error":
            raise ValueError("mine")
        if how == "config":
            cluster.Task.from_tf_config("{")
        if how == "lost":
            raise PeersUnreachable(["/job:ps/task:0"], 3.0)
        if how == "exit":
            sys.exit(7)
        if how == "words":
            sys.exit("no data")
        if how == "pool":  # its thread waits for more work
            assert pool.submit(int).result() == 0

    pool = ThreadPoolExecutor(1)
    cluster.run(main)


def waits(*, handled: bool, exits: bool = False) -> None:
    async def main() -> None:
        if handled:
            signals.subscribe(lambda number: print("told", flush=True))
        try:
            print("waiting", flush=True)
            await asyncio.sleep(60)
        finally:
            print("cleaned up", flush=True)
            if exits:
                sys.exit()

    cluster.run(main)


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    except Exception:  # at once: TensorFlow's server has no orderly end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
