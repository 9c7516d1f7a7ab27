"""Runs children that train and save in a directory, and kills them; a script, for `test_crash.py`.

Each child is a fork that starts TensorFlow's runtime for itself. So a case costs a fraction of a second, and the
children are real processes that die by a real SIGKILL.

Reads one JSON object per line: a case. Writes one JSON object per line: what the next run found.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from asupervisor.checkpoint.retention import LatestN
from asupervisor.checkpoint.store import CheckpointStore
from asupervisor.runtime.coordinator import Coordinator
from asupervisor.runtime.device import DeviceExecutor
from asupervisor.services.checkpointing import CheckpointService
from asupervisor.session.session import AsyncSession
from asupervisor.testing.faults import FaultPoints

tf1 = tf.compat.v1
STEPS_PER_SAVE = 3


def quiet(kind: str, message: str, **data: Any) -> None:
    """Events are not what is looked at here."""


class Model:
    """Its step changes its variables one after another; each element is the step."""

    def __init__(self, case: dict[str, Any]) -> None:
        resource = case["variables"] == "resource"
        (tf1.enable_resource_variables if resource else tf1.disable_resource_variables)()
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.step = tf1.train.get_or_create_global_step()
            last = None
            self.variables = []
            for index in range(3):
                variable = tf1.get_variable(f"v{index}", [case["size"]], initializer=tf1.zeros_initializer())
                with tf1.control_dependencies([] if last is None else [last]):
                    last = variable.assign_add(tf.ones([case["size"]])).op
                self.variables.append(variable)
            with tf1.control_dependencies([last]):
                self.train = tf1.assign_add(self.step, 1).op
            self.saver = tf1.train.Saver(sharded=case.get("saver") == "sharded")
            self.init = tf1.global_variables_initializer()

    def store(self, case: dict[str, Any], faults: Any = None) -> CheckpointStore:
        named = case["name"] == "step"
        return CheckpointStore(
            case["logdir"],
            self.graph,
            self.saver,
            global_step=self.step if named else None,
            retention=LatestN(case["keep"]),
            emit=quiet,
            **({} if faults is None else {"faults": faults}),
        )

    def begin(self, raw: tf1.Session, store: CheckpointStore) -> int | None:
        if store.restorer(raw, self.saver, store.logdir, None):
            return self.value(raw)
        raw.run(self.init)
        return None

    def value(self, raw: tf1.Session) -> int:
        values = {float(value) for v in self.variables for value in np.unique(raw.run(v))}
        values.add(float(raw.run(self.step)))
        if len(values) > 1:
            raise AssertionError(f"several steps in one model: {values}")
        return int(values.pop())


def acknowledge(case: dict[str, Any], step: int) -> None:
    """A save of this step was reported as done; what is written here survives the kill."""
    fd = os.open(case["acknowledged"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{step}\n".encode())
    os.close(fd)


def acknowledged(case: dict[str, Any]) -> int | None:
    try:
        return int(Path(case["acknowledged"]).read_text().split()[-1])
    except (FileNotFoundError, IndexError):
        return None


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train and save, in the way of a plain loop: the snapshot between two steps, the write beside them."""
    hits = 0

    def strike(point: str) -> None:
        nonlocal hits
        if point == case.get("point"):
            hits += 1
            if hits == case["hit"]:
                os.kill(os.getpid(), signal.SIGKILL)

    model = Model(case)
    store = model.store(case, strike)
    operations = FaultPoints(case["logdir"], case.get("operation"))
    with tf1.Session(graph=model.graph) as raw:
        began = model.begin(raw, store)
        operations.arm()
        for _ in range(case["saves"]):
            for _ in range(STEPS_PER_SAVE):
                raw.run(model.train)
            inside = model.value(raw)
            snapshot = store.snapshot(raw)
            writer = threading.Thread(target=store.publish, args=[snapshot])
            writer.start()
            while writer.is_alive():
                raw.run(model.train)
            writer.join()
            acknowledge(case, inside)
    operations.disarm()
    return {"began": began, "operations": operations.operations}


def serve(case: dict[str, Any]) -> dict[str, Any]:
    """Train and save with the service, until killed."""

    async def main() -> None:
        model = Model(case)
        store = model.store(case)
        executor, coordinator = DeviceExecutor(), Coordinator()
        raw = tf1.Session(graph=model.graph)
        session = AsyncSession(raw, executor, coordinator=coordinator, global_step=model.step)
        await session.control(model.begin, store)
        os.write(case["ready"], b"\n")
        service = CheckpointService(
            session,
            store,
            coordinator,
            save_model_steps=STEPS_PER_SAVE,
            emit=quiet,
            on_saved=lambda info: acknowledge(case, info.step or 0),
        )
        running = asyncio.ensure_future(service.run())
        while not running.done():
            await session.run(model.train)
        running.result()

    asyncio.run(main())
    return {}


def look(case: dict[str, Any]) -> dict[str, Any]:
    """What a new run finds: the step that it restores, what lies about, whether all that is listed is whole."""
    model = Model(case)
    store = model.store(case)
    with tf1.Session(graph=model.graph) as raw:
        restored = model.begin(raw, store)
    directory = store.directory
    damaged = []
    for record in store.checkpoints():
        try:
            store.verify(record.prefix)
        except Exception as error:
            damaged.append(str(error))
    latest = tf.train.latest_checkpoint(case["logdir"])
    inside = None
    if latest is not None:
        inside = sorted({float(x) for i in range(3) for x in np.unique(tf.train.load_variable(latest, f"v{i}"))})
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    known = {record.prefix.rsplit("/", 1)[1] for record in store.checkpoints()}
    stray = [
        name
        for name in names
        if name != "checkpoint" and name.rsplit(".", 1)[0] not in known and name.split(".data-")[0] not in known
    ]
    return {
        "restored": restored,
        "acknowledged": acknowledged(case),
        "damaged": damaged,
        "latest": latest,
        "inside": inside,
        "stray": stray,
        "steps": [record.step for record in store.checkpoints()],
    }


def in_child(function: Any, case: dict[str, Any], kill_after_secs: float | None = None) -> dict[str, Any]:
    """Run a function in a fork; its result, or by what signal it died."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        case["ready"] = writing
        try:
            result = function(case)
        except BaseException as error:
            result = {"error": repr(error)}
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    if kill_after_secs is not None:
        if not case["while_it_begins"]:
            os.read(reading, 1)
        time.sleep(kill_after_secs)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    result = json.loads(text)
    assert isinstance(result, dict)
    return result


def main() -> None:
    """One case per line."""
    for line in sys.stdin:
        case = json.loads(line)
        Path(case["logdir"]).mkdir(exist_ok=True)
        died = in_child(serve, case, case["after_secs"]) if "after_secs" in case else in_child(train, case)
        print(json.dumps({"died": died, "found": in_child(look, case)}), flush=True)


if __name__ == "__main__":
    main()
