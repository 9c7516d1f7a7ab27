"""The half of a step stream that the device thread holds: it runs one step after another, ahead of the consumer.

`Steps` runs into `out`, at most `ahead` further than the consumer has come, and ends its turn at a step boundary when
anybody else waits. It knows nothing of the user's half, `stream.StepStream`, so a stream that is broken out of and
forgotten ends.

Who writes what:

* `out` is appended to by the stepping thread and emptied by the consumer.
* `waiter` is set by the consumer when there is nothing to take, and taken away by who wakes it.
* `parked` is set by the stepping thread before it gives up its turn for want of room. It then looks at `out` again;
  the consumer takes from `out` and then looks at `parked`. So one of the two sees the other, and gives the kick.
* `finished` is set once, under `_guard`, by the stepping thread or, while no turn is running, by anybody.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal

import tensorflow as tf

from asupervisor.errors import describe
from asupervisor.runtime.calls import Waiter, boxed
from asupervisor.runtime.mailbox import Mailbox
from asupervisor.runtime.wakeup import Doorbell
from asupervisor.session.calls import describe_fetches
from asupervisor.session.supply import END, Failure, FixedFeed, make_feed

if TYPE_CHECKING:
    from asupervisor.session.plan import RunPlan
    from asupervisor.session.session import AsyncSession

EndedBy = Literal["max_steps", "feed", "out_of_range", "stop", "stop_when", "closed", "error"]

DELIVER_SECS: Final = 0.001
"""A result that the consumer waits for is delivered at once if the last delivery is as old as this, in seconds."""


class Steps:
    """The stepping half of a stream; see the module's docstring. Methods run on the stepping thread if not said.

    Args:
        session: Whose steps they are.
        mailbox: How the consumer is woken.
        fetches: As for `run`.
        source: The user's `feeds`.
        max_steps: Most steps to run, or None.
        ahead: How many untaken results there may be; 0 runs a step only when the consumer waits for it.
        stop_when: Called with each result; the stream ends after the one for which it is true.
        copy_feeds: Whether feeds are copied when they are taken.
    """

    def __init__(
        self,
        session: AsyncSession,
        mailbox: Mailbox,
        fetches: Any,
        source: Any,
        max_steps: int | None,
        ahead: int,
        stop_when: Callable[[Any], bool] | None,
        copy_feeds: bool,
    ) -> None:
        self.session = session
        self.mailbox = mailbox
        self.fetches = fetches
        self.out: deque[Any] = deque()
        self.low = ahead // 2
        self.waiter: Waiter | None = None
        self.enders: list[Waiter] = []
        self.parked = False
        self.finished = False
        self.ended_by: EndedBy | None = None
        self.error: BaseException | None = None
        self.steps_run = 0
        self.queued = False
        self.started = 0.0
        self.plan: RunPlan | None = None
        self._ahead = ahead
        self._chunk = max(1, ahead * 3 // 4)  # delivered in good time before the steps must wait
        self._max_steps = sys.maxsize if max_steps is None else max_steps
        self._stop_when = stop_when
        self._copy_feeds = copy_feeds
        self._device = session.executor.device
        self._guard = threading.RLock()
        self._in_turn = False
        self._closing = False
        self._rung_at = 0.0
        self._aside: Doorbell | None = None
        self.feed = make_feed(
            source,
            self._prepare,
            self.kick,
            session.executor,
            mailbox,
            lock_step=ahead == 0,
            copy=copy_feeds,
        )

    # -------------------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        """Begin; on the loop."""
        session = self.session
        session._streams.add(self)
        session._watch_starvation()
        self._device.sources.add(self)
        if self._max_steps == 0 or session._stopping():
            self.finish("max_steps" if self._max_steps == 0 else "stop")
            return
        try:
            self.feed.start()
        except BaseException as error:
            self.finish("error", error)

    def kick(self) -> None:
        """See to it that a turn comes; spurious ones are harmless."""
        if self._aside is not None:
            self._aside.ring()
        else:
            self._device.kick(self)

    def close(self) -> None:
        """End at the next step boundary; at once if no step runs. An error of that step is reported, not raised."""
        self._closing = True
        self.end_between_steps("closed")

    def end_between_steps(self, why: EndedBy) -> None:
        """End at once if no step runs; if one does, the stepping thread will see for itself."""
        with self._guard:
            running = self._in_turn
        if not running:
            self.finish(why)

    def abandon(self) -> None:
        """Nobody will ask for its results any more. The garbage collector calls it, in the middle of anything."""
        self._closing = True
        if self._device.thread is not None:  # else the first turn, which is still to come, will see it
            self.kick()

    def abort(self, error: BaseException) -> None:
        """See `StepSource.abort`: end at once for the consumer, whatever the step does."""
        if self.session._stopping():
            self.finish("stop")
        else:
            self.finish("closed", error)

    def finish(self, why: EndedBy, error: BaseException | None = None) -> None:
        """It has ended; only the first end counts, but no error is lost."""
        with self._guard:
            late = self.finished or (self._closing and why == "error")
            first = not self.finished
            if first:
                self.ended_by = why
                self.error = None if late else error
                self.finished = True
            enders, self.enders = self.enders, []
        if first:
            self.feed.close()
            self.session._streams.discard(self)
            self._device.sources.discard(self)
            self._wake_consumer()
            if self._aside is not None:
                self._aside.ring()
        for ender in enders:
            self.mailbox.post(ender)
            self.mailbox.ring()
        if late and why == "error":
            self.report_dropped(error)

    def report_dropped(self, error: BaseException | None) -> None:
        """An error that nobody will be raised to."""
        told = "no error" if error is None else describe(error)
        self.session._emit(
            "stream.error_dropped",
            f"{self.describe()} was closed, and its last step has failed: {told}",
            level="warning",
            error=told,
            steps_run=self.steps_run,
        )

    def when_finished(self, waiter: Waiter) -> bool:
        """Deliver `waiter` when it has ended; False when it has already."""
        with self._guard:
            if not self.finished:
                self.enders.append(waiter)
            return not self.finished

    def describe(self) -> str:
        """See `StepSource.describe`."""
        return f"stream of {describe_fetches(self.fetches)}"

    def _prepare(self, feed_dict: Any) -> tuple[RunPlan, Any]:
        """Plan and converted feeds; on a thread without a loop."""
        session = self.session
        plan = session._plans.plan(self.fetches, feed_dict)
        if self.plan is None:
            self.plan = plan
            if plan.side_lane:
                self._go_aside()
        args = plan.convert(feed_dict, self._copy_feeds)
        return plan, args

    def _go_aside(self) -> None:
        """All that the steps do is to enqueue or close: they must not keep the device thread from dequeuing.

        Comes before the first kick, so that no turn has been given yet.
        """
        bell = self._aside = Doorbell()

        def drive() -> None:
            try:
                while not self.finished:
                    self.started = monotonic()
                    if not self.turn() and not self.finished:
                        bell.wait()
            finally:
                bell.close()

        self._device.side.submit(drive, self.describe())

    # --------------------------------------------------------------------------------- on the stepping thread

    def turn(self) -> bool:
        """See `StepSource.turn`."""
        with self._guard:
            if self.finished:
                return False
            self._in_turn = True
        try:
            more = self._turn()
        except BaseException as error:
            self._failed(error)
            more = False
        finally:
            with self._guard:
                self._in_turn = False
        # Whoever wanted the end while `_in_turn` was set has left it to us.
        if self._closing:
            self.finish("closed")
            more = False
        elif not more and self.session._stopping():
            self.finish("stop")
        if self.waiter is not None and self.out:
            self._wake_consumer()
        return more

    def _turn(self) -> bool:
        session, out, feed, device = self.session, self.out, self.feed, self._device
        runs, step_times, run_times = session._runs, session._step_times, session._run_times
        items, fixed, stop_when = feed.items, isinstance(feed, FixedFeed), self._stop_when
        ahead, chunk, max_steps = self._ahead, self._chunk, self._max_steps
        coordinator, aside = session._coordinator, self._aside is not None
        stopping = _never if coordinator is None else coordinator.should_stop
        control, interactive, streams, kicked = device.control, device.interactive, device.streams, device.kicked
        now = self.started
        feed.hungry = False
        # This loop is what a small step costs beyond TensorFlow: it calls no function that it can do without.
        while True:
            if self._closing or self.finished:
                return False
            if self.steps_run >= max_steps:
                self.finish("max_steps")
                return False
            if stopping():
                self.finish("stop")
                return False
            if runs.paused and not aside and self._park(lambda: runs.paused):
                return False
            if len(out) >= ahead and self._no_room() and self._park(self._no_room):
                return False
            if not items:
                # In lock-step the producer makes a feed only for a hungry stream: tell it, then look once more.
                feed.hungry = True
                feed.used()
                if not items:
                    return False
                feed.hungry = False
            if fixed:
                item = items[0]
            else:
                item = items.popleft()
                feed.used()
            if item.__class__ is not tuple:
                item = self._other_item(item)
                if item is None:
                    return False
            plan, args = item
            training = plan.is_training
            result = runs.run(plan, args) if training else plan.execute(args)
            begun, now = now, monotonic()
            self.started = now
            self.steps_run += 1
            session._run_count += 1
            session._write_count += plan.writes
            (step_times if training else run_times).append(now - begun)
            out.append(result)
            if stop_when is not None and stop_when(result):
                self.finish("stop_when")
                return False
            if self.waiter is not None and (len(out) >= chunk or now - self._rung_at > DELIVER_SECS):
                self._rung_at = now
                self._wake_consumer()
            if (control or interactive or streams or kicked) and not aside:
                return True

    def _other_item(self, item: Any) -> tuple[RunPlan, Any] | None:
        """What came instead of a feed that is ready; None when it is the end."""
        if item is END:
            self.finish("feed")
            return None
        if item.__class__ is Failure:
            self.finish("error", item.error)
            return None
        plan = self.session._plans.plan(self.fetches, item.feed_dict)
        return plan, plan.convert(item.feed_dict)

    def _no_room(self) -> bool:
        return len(self.out) >= self._ahead and (self.waiter is None or bool(self.out))

    def _park(self, reason: Callable[[], bool]) -> bool:
        """Give the turn up until there is a kick. False: the reason has gone in this very moment."""
        self.parked = True
        if reason():
            return True
        self.parked = False
        return False

    def _wake_consumer(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self.mailbox.post(waiter)
            self.mailbox.ring()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, tf.errors.OutOfRangeError):
            op = getattr(getattr(error, "op", None), "name", None)
            self.session._emit(
                "stream.end_of_input",
                f"{self.describe()} has come to the end of its input after {self.steps_run} steps, told by {op}",
                op=op,
                steps_run=self.steps_run,
            )
            self.finish("out_of_range")
        elif isinstance(error, tf.errors.CancelledError | RuntimeError) and self.session.closed:
            self.finish("closed")  # an echo of the close, which has told the consumer
        elif isinstance(error, tf.errors.CancelledError) and self.session._stopping():
            self.finish("stop")  # an echo of the stop: its queue was closed under the step
        else:
            # Raised as itself, StopAsyncIteration would pass for the end of the stream.
            self.finish("error", boxed(error, self.describe, StopAsyncIteration))


def _never() -> bool:
    return False
