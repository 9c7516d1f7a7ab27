"""The checkpoint directory as a database: snapshot, writer, catalogue, retention.

The records can be imported from here; they need no TensorFlow.
"""

from asupervisor.checkpoint.records import CheckpointInfo as CheckpointInfo
from asupervisor.checkpoint.records import CheckpointRecord as CheckpointRecord
from asupervisor.checkpoint.records import Kind as Kind
from asupervisor.checkpoint.records import Outcome as Outcome
from asupervisor.checkpoint.records import RestoreInfo as RestoreInfo
from asupervisor.checkpoint.records import SnapshotInfo as SnapshotInfo
