"""Hooks: code that takes part in each run of a monitored session.

When each method is called::

    async with MonitoredSession(hooks=[...]) as sess:
        │   begin()                            once per hook, before the graph is finalised: may add ops
        │   (scaffold finalised, session created, model initialised or restored, queue feeders started)
        │   after_create_session(session, coord)        again after each recovery
        │   is_done(global_step)               "is there anything left to do?", before the first run of each session
        │
        ├── await sess.run(...), each step of sess.steps(...)
        │       before_run(run_context)        may return SessionRunArgs: fetches, feeds and options to add
        │       (one run with everything merged)
        │       after_run(run_context, run_values)      gets the results of its own fetches
        │
    end of the block
        │   end(session)                       only after a clean end, while the session is open
        │   finish(session, outcome)           always, exactly once for each hook that began
        │   (final save, queue feeders ended, session closed)

TensorFlow's own hooks (`tf.compat.v1.train.SessionRunHook` and subclasses) run unchanged: their methods are called on
the device thread, with the graph entered and TensorFlow's session. A hook of ours (`AsyncSessionRunHook`) may have
plain methods, which are treated the same, or coroutine functions, which run on the event loop and get the
`AsyncSession`. Hooks are called in the order of the list, plain and async ones alike.

Ready-made ones, where TensorFlow's have known faults: `StopAtStepHook`, `EarlyStoppingHook`, `NonFiniteHook`,
`LoggingTensorHook`, `StepProfileHook`, `FeedScheduleHook`, `EvaluationHook`.
"""

from asupervisor.hooks.evaluating import EvaluationHook as EvaluationHook
from asupervisor.hooks.feeding import FeedScheduleHook as FeedScheduleHook
from asupervisor.hooks.guarding import NonFiniteHook as NonFiniteHook
from asupervisor.hooks.protocol import AsyncSessionRunHook as AsyncSessionRunHook
from asupervisor.hooks.protocol import HookOutcome as HookOutcome
from asupervisor.hooks.stopping import EarlyStoppingHook as EarlyStoppingHook
from asupervisor.hooks.stopping import StopAtStepHook as StopAtStepHook
from asupervisor.hooks.telling import LoggingTensorHook as LoggingTensorHook
from asupervisor.hooks.telling import StepProfileHook as StepProfileHook
