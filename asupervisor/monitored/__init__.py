"""Monitored sessions: hooks around each run, and recovery, as async context managers.

`session.py` is the session, `lifetime.py` how it is opened and how it ends, `creators.py` where TensorFlow's sessions
come from, `incarnation.py` one of them with its services, from a creation or recovery to the next, `recovering.py` when
one follows another, `streams.py` the streams of steps, `training.py` the usual set-up for training.
"""

from asupervisor.monitored.creators import ChiefSessionCreator as ChiefSessionCreator
from asupervisor.monitored.creators import SessionCreator as SessionCreator
from asupervisor.monitored.creators import WorkerSessionCreator as WorkerSessionCreator
from asupervisor.monitored.session import MonitoredSession as MonitoredSession
from asupervisor.monitored.session import SingularMonitoredSession as SingularMonitoredSession
from asupervisor.monitored.training import MonitoredTrainingSession as MonitoredTrainingSession
