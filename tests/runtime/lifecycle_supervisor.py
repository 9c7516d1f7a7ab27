"""The lifecycle matrix on the real thing: `Supervisor.managed_session()` with TensorFlow sessions.

A program like `lifecycle_matrix.py`, with the same events and hosts and some that need a session. TensorFlow is
imported once and the graph is built once, before the forks: a process that has not yet opened a session may be forked.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

if "lifecycle_matrix" not in sys.modules:
    sys.path.insert(0, str(Path(__file__).parent))

import lifecycle_matrix as matrix
from lifecycle_matrix import GRACE_SECS, Ctl, P, event, expecting, polite, told

from asupervisor.errors import SessionClosed
from asupervisor.events import EventHub
from asupervisor.supervisor import Supervisor

tf1 = tf.compat.v1
STUCK = threading.Event()


def stuck_in_python() -> int:
    STUCK.wait()
    return 1


class Model:
    """What every case trains."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf1.disable_resource_variables()
            self.step = tf1.train.create_global_step()
            weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
            queue = tf1.FIFOQueue(2, [tf.float32], name="empty")
            self.train = tf1.group(tf1.assign_add(self.step, 1), tf1.assign_add(weight, 1.0))
            self.dequeue = queue.dequeue()
            self.stuck = tf1.py_func(stuck_in_python, [], tf.int64)


MODEL: Model | None = None
DIRECTORY = ""


class SupervisorSubject:
    """A supervised session."""

    name = "subject"
    kind = "supervisor"
    counts = False

    def __init__(self, ctl: Ctl) -> None:
        self.ctl = ctl
        self.session: Any = None
        startup = ctl.event.startup

        async def init_fn(session: Any) -> None:
            assert startup is not None
            await startup(ctl)

        emit = EventHub.emit

        def watched(hub: EventHub, kind: str, message: str, **data: Any) -> None:
            ctl.emit(kind, message, **data)
            emit(hub, kind, message, **data)

        EventHub.emit = watched  # type: ignore[method-assign]
        assert MODEL is not None
        self.logdir = tempfile.mkdtemp(dir=DIRECTORY)
        self.supervisor = Supervisor(
            graph=MODEL.graph,
            logdir=self.logdir,
            name=self.name,
            stop_grace_secs=ctl.event.grace_secs,
            init_fn=None if startup is None else init_fn,
            save_summaries_secs=0,
            global_step=MODEL.step,
        )

    @property
    def host(self) -> Any:
        return self.supervisor._hosted.host

    @property
    def coordinator(self) -> Any:
        return self.supervisor.coord

    def block(self) -> Any:
        subject, inner = self, self.supervisor.managed_session()

        class Remembering:
            async def __aenter__(self) -> Any:
                subject.session = session = await inner.__aenter__()
                subject.ctl.refs.append(weakref.ref(session))
                return session

            async def __aexit__(self, *info: object) -> Any:
                return await inner.__aexit__(*info)

        return Remembering()

    def own_task(self, name: str) -> bool:
        return name.startswith((f"{self.name}-", f"{self.name}:"))

    def spawn(self, name: str, fn: Callable[[Ctl], Awaitable[Any]], **options: Any) -> Any:
        return self.supervisor.start_soon(fn, self.ctl, name=name)

    def loop(self, target: Callable[[], Any]) -> None:
        self.supervisor.loop(60, target)

    def request_stop(self, ex: Any = None) -> None:
        self.supervisor.request_stop(ex)

    def should_stop(self) -> bool:
        return bool(self.supervisor.should_stop())

    async def wait_for_stop(self) -> None:
        await self.supervisor.wait_for_stop()

    async def stop(self) -> None:
        await self.supervisor.stop()

    async def use(self) -> None:
        assert MODEL is not None
        await self.session.run(MODEL.train)

    def end_of_input(self) -> BaseException:
        return tf.errors.OutOfRangeError(None, None, "the end")

    def saved_step(self) -> int:
        path = tf.train.latest_checkpoint(self.logdir)
        return -1 if path is None else int(path.rpartition("-")[2])

    def forget(self) -> None:
        STUCK.set()
        self.session = None
        shutil.rmtree(self.logdir, ignore_errors=True)

    def excused(self, problems: list[str]) -> list[str]:
        if not self.ctl.host.agen:
            return problems
        # Abandoned to a loop that is being torn down: it is the collector that closes the journal's file.
        return [text for text in problems if "journal.jsonl" not in text]


# ------------------------------------------------------------------------------------ events that need a real session


async def trains(c: Ctl) -> None:
    for _ in range(5):
        await c.subject.use()


async def trains_and_fails(c: Ctl) -> None:
    await trains(c)
    raise KeyError("body")


async def trains_until_stop(c: Ctl) -> None:
    while not c.subject.should_stop():
        await c.subject.use()


async def closes(c: Ctl) -> None:
    await c.subject.session.close()
    try:
        await c.subject.use()
    except SessionClosed:
        c.note("closed")


async def closes_from_service(c: Ctl) -> None:
    await c.body_runs.wait()
    await c.subject.session.close()
    c.note("closed by a service")


async def waits_for_queue(c: Ctl) -> None:
    assert MODEL is not None
    c.in_thread(c.subject.request_stop)
    await c.subject.session.run(MODEL.dequeue)


async def service_waits_for_queue(c: Ctl) -> None:
    assert MODEL is not None
    await c.subject.session.run(MODEL.dequeue)


async def stuck_run(c: Ctl) -> None:
    assert MODEL is not None
    await c.subject.session.run(MODEL.stuck)


async def stops_with_stuck_run(c: Ctl) -> None:
    while c.subject.session.statistics() is None or not c.subject.supervisor._hosted.around.executor.busy():
        await asyncio.sleep(0.005)
    c.subject.request_stop()


saved = ("the last step was not saved", lambda c: c.notes.append(f"{c.subject.saved_step()}") or c.notes[-1] == "5")

event("trains", trains, "ok", blocks=("supervisor",), check=expecting(saved))
event("trains_then_error", trains_and_fails, "KeyError", split="ok", blocks=("supervisor",), check=expecting(saved))
event(
    "trains_until_stop",
    trains_until_stop,
    "ok",
    blocks=("supervisor",),
    use=lambda c: c.in_thread(c.subject.request_stop),
)
event(
    "closed_in_body",
    closes,
    "ok",
    services=[P],
    blocks=("supervisor",),
    check=expecting(("it was usable after the close", lambda c: "closed" in c.notes)),
)
event(
    "closed_by_service",
    polite,
    "ok",
    services=[P, ("closes", closes_from_service)],
    blocks=("supervisor",),
    check=expecting(("not closed", lambda c: "closed by a service" in c.notes)),
)
event(
    "waits_for_queue",
    waits_for_queue,
    "ok",
    services=[P],
    grace_secs=GRACE_SECS,
    blocks=("supervisor",),
    attached=True,
    freed=False,
)
event(
    "service_waits_for_queue",
    matrix.quick,
    "ok",
    services=[("waits", service_waits_for_queue)],
    grace_secs=GRACE_SECS,
    blocks=("supervisor",),
    freed=False,
)
event(
    "run_stuck_in_python",
    stops_with_stuck_run,
    "StopGraceExceeded",
    services=[("runs", stuck_run)],
    grace_secs=GRACE_SECS,
    blocks=("supervisor",),
    freed=False,
    stragglers=frozenset({"runs"}),
    check=expecting(("its stack is not shown", lambda c: "run" in str(c.block_error)), told("stop.left_running")),
)


def main() -> int:
    global MODEL, DIRECTORY
    DIRECTORY = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, DIRECTORY, ignore_errors=True)
    MODEL = Model()
    matrix.CASE_LIMIT_SECS = 110
    return matrix.main(SupervisorSubject)


if __name__ == "__main__":
    sys.exit(main())
