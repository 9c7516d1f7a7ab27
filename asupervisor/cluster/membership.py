"""How a chief or a worker comes in, stays and leaves.

::

    in:    parameter servers answer ── our own server runs ── chief: adopt the live model, or close the epoch, restore
           or initialise, open the epoch ── worker: an epoch, a model that is ready, and still the same epoch
    leave: worker: done ── chief: all workers are done or gone, final save, done ── parameter servers end by themselves

Whatever a peer's loss breaks on the way in is tried again, until the model's deadline: `outage_secs`, once there has
been a session; from then on the chief has as long. On the event loop; what blocks is on side threads.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import anyio
import tensorflow as tf

from asupervisor import _tf
from asupervisor.checkpoint import files as fs
from asupervisor.clock import Clock
from asupervisor.cluster.config import Layout, Member
from asupervisor.cluster.probing import answers, silent_ones
from asupervisor.cluster.register import Reading, Register, TaskState, hang_up
from asupervisor.errors import PeersUnreachable, SessionClosed, SessionNotReady, describe, telling_line
from asupervisor.services.peers import Around, How, Ways, is_loss
from asupervisor.session.session import AsyncSession
from asupervisor.session.waiting import Polls

T = TypeVar("T")

RUN_NAME = "cluster_run.json"
"""The file in the chief's log directory that holds its run."""

#: Longest pause between two looks at peers that do not answer, in seconds.
LOOK_EVERY_SECS = 0.25
WATCH_EVERY_SECS = 1.0
#: A worker that is at work, and at whose address nobody listens for so long, will not be waited for, in seconds.
REJOIN_SECS = 10.0
TELL_EVERY_SECS = 10.0
#: How long the end of a task waits until the register knows of it, in seconds: a part of what a release has.
LEAVE_SECS = 2.4


class Server(Protocol):
    """Our own task, as far as it is needed here."""

    layout: Layout
    outage_secs: float

    @property
    def target(self) -> str:
        """The master for sessions."""

    def configured(self, config: Any = None) -> Any:
        """See `Task.configured`."""

    def start_server(self) -> None:
        """Start our server, once; blocks."""


class Membership:
    """One task's place among the others; see `services.peers.Peers`.

    Args:
        task: Our own task: a chief's or a worker's.

    Attributes:
        latest: The one whose session is the last one of this process, or None.
        told: What the others were told of the end of its session; None for nothing.
        unfinished: How a chief's last session has ended where the others do not know that it is done, the model is lost
            or something is not saved; None otherwise.
    """

    latest: ClassVar[Membership | None] = None

    def __init__(self, task: Server) -> None:
        self.told: TaskState | None = None
        self.unfinished: Literal["done", "failed", "lost"] | None = None
        self._task = task
        self._layout = task.layout
        self._around: Around | None = None
        self._register: Register | None = None
        self.allow_reinit = False
        self._was_ready = False
        self._lost_at: float | None = None  # the session before, where there was one that was lost
        self._epoch = ""  # of the model that this worker knows
        self.is_in = False
        """Whether there is a session."""

    @property
    def target(self) -> str:
        """See `Peers.target`."""
        return self._task.target

    def configured(self, config: Any = None) -> Any:
        """See `Peers.configured`."""
        return self._task.configured(config)

    @property
    def num_replicas(self) -> int:
        """See `Peers.num_replicas`."""
        return len(self._layout.trainers)

    @property
    def may_initialise(self) -> bool:
        """See `Peers.may_initialise`."""
        return self.allow_reinit or not self._was_ready

    @property
    def _limit(self) -> str:
        """What limits the wait for others, for messages."""
        return "outage_secs of the cluster's task" if self._was_ready else "max_wait_secs"

    # ------------------------------------------------------------------ in

    async def open(self, ways: Ways, around: Around) -> tuple[AsyncSession, How]:
        """See `Peers.open`.

        Raises:
            PeersUnreachable: Parameter servers did not answer in time.
            SessionNotReady: They do, but the model did not become ready in time.
            PortInUse: Our own server cannot listen.
            StopRequested: A stop came first.
        """
        Membership.latest = self
        self._around, self.told, self.unfinished = around, None, None
        patience = around.patience
        limit_secs = min(around.max_wait_secs, self._task.outage_secs) if self._was_ready else around.max_wait_secs
        begun = patience.clock.monotonic()
        deadline = begun + limit_secs
        if self._lost_at is not None:  # in an outage: to notice it, to close the session, a pause, and to end are in it
            begun, deadline = self._lost_at, self._lost_at + limit_secs - LOOK_EVERY_SECS
        polls, reason = Polls(LOOK_EVERY_SECS), ""
        while True:
            await self._reach_servers(around, begun, deadline, reason)
            try:
                await patience.first(self._side(self._task.start_server, "start of the server"))
                come_in = self._as_chief if self._layout.is_chief else self._as_worker
                # They are back from an outage: now the chief has as long to make the model ready.
                ready_by = deadline if self._lost_at is None else patience.clock.monotonic() + limit_secs
                session, how = await come_in(ways, around, begun, ready_by)
                self._was_ready = self.is_in = True
                return session, how
            except Exception as error:
                if not is_loss(error):
                    raise
                reason = telling_line(error)
                around.emit(
                    "cluster.retrying", f"a peer was lost while the session was opened: {reason}", error=describe(error)
                )
                await self._hang_up()
                if (now := patience.clock.monotonic()) >= deadline:
                    names = [str(server) for server in self._layout.servers]
                    raise PeersUnreachable(names, now - begun, reason, self._limit) from error
            await patience.pause(polls.next())

    async def _reach_servers(self, around: Around, begun: float, deadline: float, reason: str) -> None:
        """Wait until somebody listens at every parameter server's address.

        Only then may TensorFlow try: its own attempts at an address where nobody listens are far apart.
        """
        patience, polls = around.patience, Polls(LOOK_EVERY_SECS)
        while silent := await patience.first(silent_ones(self._layout.servers)):
            now = patience.clock.monotonic()
            names = [str(server) for server in silent]
            if now >= deadline:
                raise PeersUnreachable(names, now - begun, reason, self._limit)
            if polls.tell(" ".join(names), now):
                _tell_of_wait(around, names, "", now - begun)
            await patience.pause(min(polls.next(), max(0.0, deadline - now)))

    async def _as_chief(self, ways: Ways, around: Around, begun: float, ready_by: float) -> tuple[AsyncSession, How]:
        register = self._get_register()
        run = await around.patience.first(self._side(self._own_run, "read the run", around))
        reading = await around.patience.first(self._side(register.read, "read the register"))
        is_ours = reading.run == run and (self._was_ready or not around.afresh)
        if is_ours:
            # Before the look at the variables: a server that is lost after this is without the epoch again.
            await around.patience.first(self._side(register.keep_epoch, "keep the epoch", reading.epoch))
            with contextlib.suppress(SessionNotReady):
                session = await ways.adopt()
                around.emit("cluster.adopted", f"the live model was adopted, as {reading.epoch}", epoch=reading.epoch)
                await self._introduce(session)
                return session, "adopted"
        await around.patience.first(self._side(register.close_epoch, "close the epoch"))
        if reading.epoch and not is_ours and TaskState.WORKING in reading.states[1:]:
            # Those who train the live model see that it is made anew first: no step of theirs is for the new one.
            await around.patience.pause(1.5 * WATCH_EVERY_SECS)
        session = await ways.prepare()
        try:
            await around.patience.first(self._side(register.open_epoch, "open the epoch", run))
        except BaseException:
            await session.close_raw(1.0)
            raise
        await self._introduce(session)
        return session, "prepared"

    async def _as_worker(self, ways: Ways, around: Around, begun: float, ready_by: float) -> tuple[AsyncSession, How]:
        register, patience, polls = self._get_register(), around.patience, Polls(LOOK_EVERY_SECS)
        chief = str(self._layout.chief)
        while True:
            reading = await patience.first(self._side(register.read, "read the register"))
            left_secs = ready_by - patience.clock.monotonic()
            if reading.epoch:
                session = await ways.wait(max(0.0, left_secs))
                try:
                    again = await patience.first(self._side(register.read, "read the register"))
                    if again.epoch == reading.epoch:
                        await self._introduce(session)
                        known, self._epoch = self._epoch, again.epoch
                        return session, "adopted" if known == again.epoch else "prepared"
                except BaseException:
                    await session.close_raw(1.0)
                    raise
                await session.close_raw(1.0)  # the chief has begun to make the model anew meanwhile
            elif left_secs <= 0:
                waited_secs = patience.clock.monotonic() - begun
                raise _tf.SessionNotReady([f"the model, by {chief}"], round(waited_secs, 1))
            elif polls.tell(chief, patience.clock.monotonic()):
                _tell_of_wait(around, [chief], " to make the model ready", patience.clock.monotonic() - begun)
            await patience.pause(min(polls.next(), max(0.05, left_secs)))

    async def _introduce(self, session: AsyncSession) -> None:
        assert self._layout.me is not None
        try:
            await self._side(self._get_register().tell, "tell the register", self._layout.me, TaskState.WORKING)
        except BaseException:
            await session.close_raw(1.0)
            raise

    def _own_run(self, around: Around) -> str:
        """The run of the chief's log directory; blocking.

        Without a directory there is nothing that a model could be restored from, so that whatever is alive is ours.
        """
        if around.logdir is None:
            return "without-logdir"
        path = Path(around.logdir) / RUN_NAME
        if self._was_ready or not around.afresh:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return str(json.loads(path.read_text())["run"])
        run = secrets.token_hex(8)
        fs.write_atomically(path, json.dumps({"run": run}))
        return run

    # ------------------------------------------------------------------ while it lasts

    async def watch(self) -> None:
        """See `Peers.watch`: so that it is remembered who has ended, should a parameter server be lost.

        A worker notices that loss with its next run. A chief may have none, and everybody waits for it.

        Raises:
            tf.errors.AbortedError: The chief has made the model anew, under a worker that goes on with the old one; or
                the chief's model is lost.
        """
        around = self._around
        assert around is not None
        with contextlib.suppress(SessionClosed):
            while True:
                await around.patience.clock.sleep(WATCH_EVERY_SECS)
                reading = await self._look()
                if reading is not None and not self._layout.is_chief and reading.epoch != self._epoch:
                    raise tf.errors.AbortedError(None, None, f"{self._layout.chief} makes the model anew")

    async def _look(self) -> Reading | None:
        """What the register says, or None where it cannot be asked now.

        Raises:
            tf.errors.AbortedError: To the chief: a parameter server is gone, or has begun anew.
        """
        register, is_chief = self._get_register(), self._layout.is_chief
        try:
            reading = await self._side(register.read_all if is_chief else register.read, "read the register")
        except tf.errors.OpError as error:
            if is_chief:
                gone = await silent_ones(self._layout.servers)
                if gone:
                    names = ", ".join(str(server) for server in gone)
                    raise tf.errors.AbortedError(None, None, f"no answer from {names}") from error
                if isinstance(error, tf.errors.AbortedError):
                    raise
            # A session whose first question to a server has failed fails for ever, though the server is back.
            await self._hang_up()
            return None
        if is_chief and not reading.epoch:
            raise tf.errors.AbortedError(None, None, "a parameter server has begun anew, without the model")
        return reading

    # ------------------------------------------------------------------ out

    async def wait_for_workers(self) -> None:
        """Wait until no worker is at work any more, or everything stops, over recoveries of the session.

        See `Task.join`.

        Raises:
            PeersUnreachable: A parameter server has not answered for `outage_secs`.
            BaseException: Why everything stops, where that is an error: the workers may be at work.
        """
        assert self._around is not None
        coordinator, error = self._around.coordinator, None

        def stop() -> None:
            nonlocal error
            error = coordinator.error  # now: whoever closes the session forgets it
            scope.cancel()

        with anyio.CancelScope() as scope:
            coordinator.add_stop_callback(stop)
            try:
                await self._until_nobody_works(self._around.patience.clock)
            finally:
                coordinator.remove_stop_callback(stop)
        if error is not None:
            try:
                raise error
            finally:
                error = None

    async def _until_nobody_works(self, clock: Clock) -> None:
        silence_secs = self._task.outage_secs
        while True:
            with contextlib.suppress(tf.errors.AbortedError):  # the watch sees the loss, too: another session follows
                if self.is_in:
                    if await self._until_workers_end(math.inf, silence_secs):
                        return
                    names = [str(server) for server in self._layout.servers]
                    raise PeersUnreachable(names, silence_secs, "not from all of them" * (len(names) > 1), self._limit)
            await clock.sleep(LOOK_EVERY_SECS)

    async def before_last_save(self, limit_secs: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """See `Peers.before_last_save`: the chief waits for its workers, and for nobody who is gone."""
        if not self._layout.is_chief or self._around is None:
            return
        try:
            answered = await self._until_workers_end(limit_secs, REJOIN_SECS, hurried)
        except tf.errors.AbortedError:
            if self._get_register().workers_at_work:
                raise
            return
        if not answered and not hurried():  # nor would it keep a save waiting for less
            raise tf.errors.DeadlineExceededError(None, None, "a parameter server does not answer")

    async def others_at_work(self) -> bool:
        """See `Peers.others_at_work`."""
        workers = self._get_register().workers_at_work if self._layout.is_chief else ()
        return len(await silent_ones(workers)) < len(workers)

    async def _until_workers_end(
        self, limit_secs: float, silence_secs: float, hurried: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait for the workers that are at work, or about to be.

        Args:
            limit_secs: The longest wait for them, in seconds.
            silence_secs: The longest wait for a register that does not answer, in seconds.
            hurried: Whether to wait no longer.

        Returns:
            Whether there is nobody to wait for any more; False where the wait was given up.

        Raises:
            tf.errors.AbortedError: A parameter server is gone, or has begun anew.
        """
        assert self._around is not None
        clock, emit = self._around.patience.clock, self._around.emit
        deadline = clock.monotonic() + limit_secs
        gone_since: dict[Member, float] = {}
        coming_since: dict[Member, float] = {}
        told_at, heard_at = -math.inf, clock.monotonic()
        least_secs = 1.0  # for the first question, however little time there is
        while not hurried():
            reading = None
            left_secs = min(deadline, heard_at + silence_secs) - clock.monotonic()
            with anyio.move_on_after(max(left_secs, least_secs)):  # a frozen server answers when it is thawed
                reading = await self._look()
            least_secs = LOOK_EVERY_SECS
            if reading is None:  # perhaps it is only slow
                if clock.monotonic() >= min(deadline, heard_at + silence_secs):
                    return False
                await clock.sleep(LOOK_EVERY_SECS)
                continue
            heard_at = clock.monotonic()
            states = dict(zip(self._layout.trainers[1:], reading.states[1:], strict=True))
            silent = set(await silent_ones(member for member, state in states.items() if not state.ended))
            now = clock.monotonic()
            for member in states.keys() - silent:
                gone_since.pop(member, None)
            for member in silent:
                gone_since.setdefault(member, now)
            # Whose server runs is about to come in, once more where a parameter server was lost; for a while, perhaps.
            coming = [member for member, state in states.items() if state is TaskState.UNSEEN and member not in silent]
            coming = [member for member in coming if now - coming_since.setdefault(member, now) < REJOIN_SECS]
            working = [member for member, state in states.items() if state is TaskState.WORKING]
            gone = [member for member in working if now - gone_since.get(member, now) >= REJOIN_SECS]
            working = [member for member in working if member not in gone]
            awaited = [str(member) for member in states if member in working or member in coming]
            if not awaited or now >= deadline:
                left_out = awaited + [str(member) for member in gone]
                if left_out:
                    emit(
                        "cluster.workers_left",
                        f"the last save is made without waiting for {', '.join(left_out)}",
                        level="warning",
                        peers=left_out,
                    )
                return True
            if now >= told_at + TELL_EVERY_SECS:
                told_at = now
                emit("cluster.waiting", f"waiting for the end of {', '.join(awaited)}", peers=awaited)
            await clock.sleep(LOOK_EVERY_SECS)
        return False

    async def leave(self, how: Literal["done", "failed", "lost"], *, saved: bool, ended_at: float) -> None:
        """See `Peers.leave`."""
        state = {"done": TaskState.DONE, "failed": TaskState.FAILED}.get(how)
        self._lost_at = ended_at if self.is_in and how == "lost" else None
        self.is_in = False
        if self._around is None:
            return
        try:
            if state is not None:
                await self._take_leave(state)
        finally:
            await self._hang_up()
            self._around = None
            if self._layout.is_chief and self.told is not TaskState.DONE and not (how == "failed" and saved):
                self.unfinished = how

    async def _take_leave(self, state: TaskState) -> None:
        """Tell our end; once more where the parameter server was slow."""
        assert self._layout.me is not None
        with anyio.move_on_after(LEAVE_SECS):
            while True:
                try:
                    await self._side(self._get_register().tell, "tell the register", self._layout.me, state)
                    self.told = state
                    return
                except tf.errors.OpError as error:
                    # What is told to a register that has begun anew is told to nobody.
                    if not is_loss(error) or not await answers(self._layout.servers[0]):
                        return
                    await self._hang_up()
                    await anyio.sleep(LOOK_EVERY_SECS)

    def tell_failure(self) -> None:
        """Where nothing was told of the end of a chief, tell that it has failed; blocks, for `LEAVE_SECS` at most.

        At the end of the process, which nobody starts again: there is no session any more, and nobody to recover.
        A chief that has not come in tells nothing: another one may be at work.
        """
        me = self._layout.me
        if me is None or not self._layout.is_chief or not self._was_ready or self.told is not None:
            return

        def tell() -> None:
            with contextlib.suppress(Exception):  # whoever is gone need not be told
                self._get_register().tell(me, TaskState.FAILED, begin=True)

        telling = threading.Thread(target=tell, name="asupervisor: tell the register", daemon=True)
        telling.start()
        telling.join(LEAVE_SECS)

    # ------------------------------------------------------------------ threads

    def _get_register(self) -> Register:
        if self._register is None:
            self._register = Register(self._layout, self._task.target, self._task.configured())
        return self._register

    async def _hang_up(self) -> None:
        if self._register is not None:
            await hang_up(self._register)

    async def _side(self, fn: Callable[..., T], label: str, *args: Any) -> T:
        if self._around is None:
            raise tf.errors.AbortedError(None, None, "the session was closed meanwhile")
        return await self._around.executor.side(fn, *args, label=label)


def _tell_of_wait(around: Around, names: list[str], to_do: str, waited_secs: float) -> None:
    """A short wait is the rule at a start; a longer one is worth to be seen by whoever sits before it."""
    around.emit(
        "cluster.waiting",
        f"waiting for {', '.join(names)}{to_do}" + (f", since {waited_secs:.0f} s" if waited_secs >= 1.0 else ""),
        level="warning" if waited_secs >= TELL_EVERY_SECS else "info",
        peers=names,
        waited_secs=round(waited_secs, 1),
    )
