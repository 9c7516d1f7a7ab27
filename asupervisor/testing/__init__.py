"""For tests: a clock that is moved by hand, fault points, and guards against stalls and leaks.

The pytest plugin is `asupervisor.testing.plugin`. Nothing here imports TensorFlow.
"""

from asupervisor.testing.clock import ManualClock
from asupervisor.testing.faults import FaultPoints
from asupervisor.testing.stalls import Stall, StallWatch

__all__ = ["FaultPoints", "ManualClock", "Stall", "StallWatch"]
