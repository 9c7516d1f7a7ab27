"""Chief, workers and parameter servers that come and go, on TensorFlow's own distributed engine.

::

    config       TF_CONFIG and cluster specifications: who there is, and who we are
    task         `Task`: our part: server, target, configuration, the end of the job
    membership   how a chief or a worker comes in, stays and leaves
    register     what the tasks tell one another, on the first parameter server
    probing      whether somebody listens
    joining      waits for the end of a job
    sync         `SyncReplicasHook`
    running      `run`: a program's main coroutine, and its exit code
    launcher     local processes; `ports` keeps their ports
"""

from asupervisor.cluster.running import EXIT_LOST as EXIT_LOST
from asupervisor.cluster.running import exit_code as exit_code
from asupervisor.cluster.running import run as run
from asupervisor.cluster.sync import SyncReplicasHook as SyncReplicasHook
from asupervisor.cluster.task import Task as Task

__all__ = ["EXIT_LOST", "SyncReplicasHook", "Task", "exit_code", "run"]
