"""One `run` on its way to a thread and back, and which thread that is.

A plan that is not known yet is made on the device thread. Where that is busy, a side thread looks at the fetches at the
same time: if all they do is to enqueue or close, it takes the call out of the inbox and runs it, because the step that
keeps the device thread busy may be waiting for exactly that element.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from asupervisor.errors import SessionClosed
from asupervisor.runtime.calls import HELD, Call
from asupervisor.runtime.mailbox import Mailbox, Rendezvous
from asupervisor.runtime.threads import SideThreads

if TYPE_CHECKING:
    from asupervisor.runtime.device_thread import Device
    from asupervisor.session.plan import RunPlan
    from asupervisor.session.session import AsyncSession


class Plans(Protocol):
    """What a session asks of its plans; `PlanCache` answers, or what stands in for it."""

    def peek(self, fetches: Any, feed_dict: Any = None) -> Any:
        """The plan if it is known, else None; on the event loop, cheap."""

    def plan(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """The plan; on a thread."""

    def drop(self) -> None:
        """Forget all plans, when the TensorFlow session is closed."""


class RunCall(Call):
    """One `run`.

    Args:
        session: Whose run it is.
        mailbox: Where the result goes.
        fetches: As for `run`.
        feed_dict: As for `run`.
        options: As for `run`.
        run_metadata: As for `run`.
        plan: Its plan if it is known.
    """

    __slots__ = ("aside", "feed_dict", "fetches", "options", "plan", "run_metadata", "session")

    def __init__(
        self,
        session: AsyncSession,
        mailbox: Mailbox | Rendezvous,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        plan: RunPlan | None,
    ) -> None:
        super().__init__(mailbox, session._emit)
        self.session = session
        self.fetches = fetches
        self.feed_dict = feed_dict
        self.options = options
        self.run_metadata = run_metadata
        self.plan = plan
        self.aside = False

    def submit_unknown(self) -> None:
        """Send a call whose plan is not known yet; on the loop. See the module's docstring."""
        device = self.session._device
        idle = device.idle()
        device.submit(self, device.interactive)
        if not idle:
            self.session._undecided.add(self)

    def divert(self) -> None:
        """On a side thread: take the call out of the inbox if it must not wait for the device thread."""
        try:
            plan = self._make_plan()
        except Exception:  # the device thread will meet the same error, and report it in its turn
            return
        if plan.side_lane and self.withdraw():
            self.aside = True
            try:
                self.session._device.submit_side(self)
            except SessionClosed as error:
                self.fail(error)
                self.finish()

    def _make_plan(self) -> Any:
        plan = self.session._plans.plan(self.fetches, self.feed_dict, self.options, self.run_metadata)
        self.plan = plan
        return plan

    def invoke(self) -> Any:
        """See `Call.invoke`; on the device thread or, if `aside`, on a side thread."""
        session = self.session
        if session.closed:
            raise SessionClosed(session.name)
        plan = self.plan
        if plan is None:
            plan = self._make_plan()
            if plan.side_lane and not self.aside:
                self.aside = True
                session._device.submit_side(self)
                return HELD
        if self.aside:
            return run_here(session, plan, self.feed_dict)
        if plan.is_training and session._runs.paused and self._hold():
            return HELD
        return run_on_device(session, plan, self.feed_dict)

    def _hold(self) -> bool:
        """Put a training run aside until `resume`. False: the pause is over already."""
        session = self.session
        self.lane = lane = session._held.lane
        lane.append(self)
        # `resume` clears the flag and then empties the lane: if it has missed this call, we see the flag cleared.
        return session._runs.paused or not self.withdraw()

    def describe(self) -> str:
        """See `Call.describe`."""
        return f"run of {describe_fetches(self.fetches)}"

    def withdraw(self) -> bool:
        """Take it out of whichever lane it is in; `_hold` and `resume` may be moving it at this moment."""
        while True:
            lane = self.lane
            if super().withdraw():
                return True
            if lane is self.lane:
                return False


def run_here(session: AsyncSession, plan: RunPlan, feed_dict: Any) -> Any:
    """A run beside the steps; on any thread without a loop."""
    try:
        return plan.run(feed_dict)
    finally:
        session._run_count += 1
        session._write_count += plan.writes


def run_on_device(session: AsyncSession, plan: RunPlan, feed_dict: Any) -> Any:
    """A run between the steps; on the device thread."""
    begun = monotonic()
    try:
        args = plan.convert(feed_dict)
        if plan.is_training:
            return session._runs.run(plan, args)
        return plan.execute(args)
    except RuntimeError as error:
        if session.closed:  # TensorFlow's own word for it: the close came between our look and its
            raise SessionClosed(session.name) from error
        raise
    finally:
        session._run_count += 1
        session._write_count += plan.writes
        (session._step_times if plan.is_training else session._run_times).append(monotonic() - begun)


class Held:
    """Training runs that a pause has put aside until `resume`.

    Args:
        device: Where they go then.
    """

    def __init__(self, device: Device) -> None:
        self.lane: deque[RunCall] = deque()
        self._device = device

    def release(self) -> None:
        """Have them run; any thread."""
        while self.lane:
            try:
                call = self.lane.popleft()
            except IndexError:
                break
            try:
                self._device.submit(call, self._device.interactive)
            except SessionClosed as error:
                call.fail(error)
                call.finish()


class Undecided:
    """Calls that wait behind a busy device thread although nobody knows yet whether they have to.

    One side thread looks at them one after another. Appending comes before the look at `_looking`, and the side thread
    takes that down before it looks for more: so one of the two sees the other one.

    Args:
        side: The side threads.
    """

    def __init__(self, side: SideThreads) -> None:
        self._side = side
        self._calls: deque[RunCall] = deque()
        self._looking = False

    def add(self, call: RunCall) -> None:
        """Have this one looked at; on the loop."""
        self._calls.append(call)
        if not self._looking:
            self._looking = True
            try:
                self._side.submit(self._look, "plan")
            except RuntimeError:  # closed in this moment: the calls have failed already
                self._calls.clear()

    def _look(self) -> None:
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                self._looking = False
                if not self._calls:
                    return
                self._looking = True
                continue
            call.divert()
            del call


def describe_fetches(fetches: Any) -> str:
    """Names of the fetches, shortened."""
    try:
        text = repr(_names(fetches))
    except Exception:  # somebody's own repr: what we say about a run must not fail it
        text = type(fetches).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def _names(fetches: Any) -> Any:
    if isinstance(fetches, dict):
        return {key: _names(value) for key, value in fetches.items()}
    if isinstance(fetches, list | tuple):
        return [_names(value) for value in fetches]
    name = getattr(fetches, "name", None)
    return name if isinstance(name, str) else fetches
