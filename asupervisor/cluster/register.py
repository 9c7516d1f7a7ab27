"""What the tasks of a cluster tell one another: a few variables on the first parameter server.

* the **epoch**: ``"<run>/<number>"`` once the chief has initialised or restored the model, empty while it is at it. The
  run is that of the chief's log directory; the number is another one each time. A model without an epoch is not ready,
  whatever its variables look like: half of them may come from a checkpoint that is still being read. The other
  parameter servers have copies of it, which tell the chief whether they have begun anew since;
* the **states**: for each task that trains, whether it is at work or has ended.

They live in a container and a graph of their own: the user's graph, its savers and its ready ops never see them. The
first parameter server loses them together with its part of the model, which is what makes them trustworthy.

Everything here blocks, up to `CALL_SECS` where a peer is frozen; on side threads only.
"""

from __future__ import annotations

import enum
import secrets
import threading
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from asupervisor.cluster.config import Layout, Member
from asupervisor.runtime.threads import on_a_thread_of_its_own
from asupervisor.session.opening import close_quietly

tf1 = tf.compat.v1

CALL_SECS = 2.0
"""The longest that one question to the parameter server takes, in seconds."""

_CONTAINER = "asupervisor"


class TaskState(enum.IntEnum):
    """What is known of a task that trains."""

    UNSEEN = 0
    WORKING = 1
    DONE = 2
    FAILED = 3

    @property
    def ended(self) -> bool:
        """Whether it will not come back."""
        return self >= TaskState.DONE


@dataclass(frozen=True, slots=True)
class Reading:
    """What the register says.

    Attributes:
        epoch: The epoch, or an empty string.
        states: The states of `Layout.trainers`, in their order.
    """

    epoch: str
    states: tuple[TaskState, ...]

    @property
    def run(self) -> str:
        """The run whose model is on the parameter servers, or an empty string."""
        return self.epoch.rpartition("/")[0]


class Register:
    """The register of one cluster, as one task sees it.

    Args:
        layout: The cluster.
        target: The server to open sessions on: our own.
        config: The `ConfigProto` of its sessions.
    """

    def __init__(self, layout: Layout, target: str, config: Any) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._known: dict[int, TaskState] = {}  # survives the loss of the parameter server
        self._first = _Line(target, config, "/job:ps/task:0")
        self._all = _Line(target, config, "/job:ps")
        self._build()

    def _build(self) -> None:
        raw, count = tf.raw_ops, len(self._layout.trainers)

        def epoch_of(server: str) -> Any:
            with tf1.device(f"{server}/device:CPU:0"):
                return raw.VarHandleOp(dtype=tf.string, shape=[], container=_CONTAINER, shared_name="epoch")

        with self._first.graph.as_default(), self._first.graph.container(_CONTAINER):
            epoch = epoch_of("/job:ps/task:0")
            with tf1.device("/job:ps/task:0/device:CPU:0"):
                states = raw.VarHandleOp(dtype=tf.int32, shape=[count], container=_CONTAINER, shared_name="states")
                self._is_there = tf.logical_and(
                    raw.VarIsInitializedOp(resource=epoch), raw.VarIsInitializedOp(resource=states)
                )
                self._read = (
                    raw.ReadVariableOp(resource=epoch, dtype=tf.string),
                    raw.ReadVariableOp(resource=states, dtype=tf.int32),
                )
                self._begin = (
                    raw.AssignVariableOp(resource=epoch, value=""),
                    raw.AssignVariableOp(resource=states, value=[int(TaskState.UNSEEN)] * count),
                )
                self._new_states = tf1.placeholder(tf.int32, [count])
                self._set_states = raw.AssignVariableOp(resource=states, value=self._new_states)
                self._index = tf1.placeholder(tf.int32, [])
                self._state = tf1.placeholder(tf.int32, [])
                self._set_state = raw.ResourceScatterUpdate(resource=states, indices=self._index, updates=self._state)
        with self._all.graph.as_default(), self._all.graph.container(_CONTAINER):
            self._new_epoch = tf1.placeholder(tf.string, [])
            self._set_epoch, self._has_epoch, self._copies = [], [], []
            for copy in [epoch_of(server.name) for server in self._layout.servers]:
                with self._all.graph.colocate_with(copy, ignore_existing=True):
                    self._set_epoch.append(raw.AssignVariableOp(resource=copy, value=self._new_epoch))
                    self._has_epoch.append(raw.VarIsInitializedOp(resource=copy))
                    self._copies.append(raw.ReadVariableOp(resource=copy, dtype=tf.string))
        for line in (self._first, self._all):
            line.graph.finalize()

    @property
    def workers_at_work(self) -> tuple[Member, ...]:
        """Who was at work when last seen, also by a parameter server that is lost; any thread."""
        known = dict(self._known)
        return tuple(
            member
            for index, member in enumerate(self._layout.trainers)
            if index and known.get(index) is TaskState.WORKING
        )

    # ------------------------------------------------------------------ questions and news

    def read(self) -> Reading:
        """What it says; empty where the parameter server has just begun.

        Raises:
            tf.errors.OpError: The parameter server cannot be asked now.
        """
        with self._lock:
            if not self._first.run(self._is_there):
                reading = Reading("", (TaskState.UNSEEN,) * len(self._layout.trainers))
            else:
                epoch, states = self._first.run(self._read)
                reading = Reading(epoch.decode(), tuple(TaskState(int(state)) for state in states))
            self._known.update((index, state) for index, state in enumerate(reading.states) if state)
            return reading

    def read_all(self) -> Reading:
        """`read`, with an epoch only where every parameter server has it: one that has begun anew has not.

        Raises:
            tf.errors.OpError: One of them cannot be asked now.
        """
        reading = self.read()
        with self._lock:
            whole = all(self._all.run(self._has_epoch)) and {*self._all.run(self._copies)} == {reading.epoch.encode()}
        return reading if whole else replace(reading, epoch="")

    def keep_epoch(self, epoch: str) -> None:
        """The model is alive: a parameter server that has begun anew without any part of it counts again.

        Raises:
            tf.errors.OpError: One of them cannot be told now.
        """
        with self._lock:
            self._all.run(self._set_epoch, {self._new_epoch: epoch})

    def close_epoch(self) -> None:
        """The model is about to be made anew: until `open_epoch`, nobody shall take it for ready. The chief's to say.

        Raises:
            tf.errors.OpError: The parameter server cannot be told now.
        """
        with self._lock:
            there = self._first.run(self._is_there)
            self._all.run(self._set_epoch, {self._new_epoch: ""})
            if not there:
                # It has begun anew: who was at work, or has ended, is known here only. We ourselves come in.
                known = [self._known.get(index, TaskState.UNSEEN) for index in range(len(self._layout.trainers))]
                states = [TaskState.UNSEEN, *known[1:]]
                self._first.run(self._set_states, {self._new_states: states})

    def open_epoch(self, run: str) -> None:
        """The model is ready. The chief's to say.

        Raises:
            tf.errors.OpError: The parameter server cannot be told now.
        """
        with self._lock:
            self._all.run(self._set_epoch, {self._new_epoch: f"{run}/{secrets.token_hex(4)}"})

    def tell(self, member: Member, state: TaskState, *, begin: bool = False) -> None:
        """What a task is at.

        Args:
            member: The task.
            state: Its state.
            begin: Whether a register in which nobody has written yet is begun with it; an error otherwise.

        Raises:
            tf.errors.OpError: The parameter server cannot be told now.
        """
        index = self._layout.trainers.index(member)
        with self._lock:
            self._known[index] = state
            if begin and not self._first.run(self._is_there):
                self._first.run(self._begin)
            self._first.run(self._set_state, {self._index: index, self._state: int(state)})

    # ------------------------------------------------------------------ its sessions

    def hang_up(self) -> None:
        """Close its sessions, which may take a while where a server is gone; the next question opens one."""
        with self._lock:
            sessions = [line.let_go() for line in (self._first, self._all)]
        for session in sessions:
            if session is not None:
                close_quietly(session)


class _Line:
    """A graph, and a session with some of the parameter servers, opened at the first question; one thread at a time.

    The opening of a session waits for all of its servers, whatever it is asked. Whoever asks the first one only must
    not wait for another.

    Args:
        target: See `Register`.
        config: See `Register`.
        servers: The device filter that stands for the servers.
    """

    def __init__(self, target: str, config: Any, servers: str) -> None:
        self.graph = tf.Graph()
        self._target = target
        self._config = tf1.ConfigProto()
        self._config.CopyFrom(config)
        self._config.device_filters[:] = [servers if each == "/job:ps" else each for each in config.device_filters]
        self._options = tf1.RunOptions(timeout_in_ms=int(CALL_SECS * 1000))
        self._session: tf.compat.v1.Session | None = None

    def run(self, fetches: Any, feeds: Any = None) -> Any:
        """Like `tf.compat.v1.Session.run`."""
        if self._session is None:
            self._session = tf1.Session(self._target, graph=self.graph, config=self._config)
        return self._session.run(fetches, feeds, options=self._options)

    def let_go(self) -> tf.compat.v1.Session | None:
        """The session, which is ours no more."""
        session, self._session = self._session, None
        return session


async def hang_up(register: Register) -> None:
    """Close the register's sessions, where that is quick; else a thread goes on with it alone, and is no straggler."""
    await on_a_thread_of_its_own(register.hang_up, "close of the register", 0.5)
