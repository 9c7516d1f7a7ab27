"""What TensorFlow's op types do to the world outside of one run: the tables that `analysis` reads.

An op type that stands in no table and takes neither a resource nor a reference only computes.
"""

from __future__ import annotations

import enum


class Kind(enum.Enum):
    """What an op does to the thing that it holds a handle of."""

    READ = "reads a variable"
    WRITE = "writes a variable"
    COUNT = "counts a variable up to a limit"
    TAKE = "takes something out: a batch, a record, a token"
    PUT = "puts something in, and waits while it is full"
    CLOSE = "closes a queue"
    WAIT = "waits for somebody else"
    ALTER = "changes some other state"
    COLLECT = "hands gradients to somebody who applies them"


#: Handle at input 0, unless `HANDLE_INDEX` says otherwise.
EFFECTS: dict[str, tuple[Kind, ...]] = {
    "QueueDequeue": (Kind.TAKE, Kind.WAIT),
    "QueueDequeueV2": (Kind.TAKE, Kind.WAIT),
    "QueueDequeueMany": (Kind.TAKE, Kind.WAIT),
    "QueueDequeueManyV2": (Kind.TAKE, Kind.WAIT),
    "QueueDequeueUpTo": (Kind.TAKE, Kind.WAIT),
    "QueueDequeueUpToV2": (Kind.TAKE, Kind.WAIT),
    "QueueEnqueue": (Kind.PUT, Kind.WAIT),
    "QueueEnqueueV2": (Kind.PUT, Kind.WAIT),
    "QueueEnqueueMany": (Kind.PUT, Kind.WAIT),
    "QueueEnqueueManyV2": (Kind.PUT, Kind.WAIT),
    "QueueClose": (Kind.CLOSE,),
    "QueueCloseV2": (Kind.CLOSE,),
    "QueueSize": (),
    "QueueSizeV2": (),
    "QueueIsClosed": (),
    "QueueIsClosedV2": (),
    "BarrierInsertMany": (Kind.PUT, Kind.WAIT),
    "BarrierTakeMany": (Kind.TAKE, Kind.WAIT),
    "BarrierClose": (Kind.CLOSE,),
    "BarrierIncompleteSize": (),
    "BarrierReadySize": (),
    "Stage": (Kind.PUT, Kind.WAIT),
    "Unstage": (Kind.TAKE, Kind.WAIT),
    "StagePeek": (Kind.WAIT,),
    "StageSize": (Kind.WAIT,),
    "StageClear": (Kind.ALTER,),
    "MapStage": (Kind.PUT, Kind.WAIT),
    "MapUnstage": (Kind.TAKE, Kind.WAIT),
    "MapUnstageNoKey": (Kind.TAKE, Kind.WAIT),
    "MapPeek": (Kind.WAIT,),
    "MapClear": (Kind.ALTER,),
    "OrderedMapStage": (Kind.PUT, Kind.WAIT),
    "OrderedMapUnstage": (Kind.TAKE, Kind.WAIT),
    "OrderedMapUnstageNoKey": (Kind.TAKE, Kind.WAIT),
    "OrderedMapPeek": (Kind.WAIT,),
    "OrderedMapClear": (Kind.ALTER,),
    "RecordInput": (Kind.TAKE, Kind.WAIT),
    "ReaderRead": (Kind.TAKE, Kind.WAIT),
    "ReaderReadV2": (Kind.TAKE, Kind.WAIT),
    "ReaderReadUpTo": (Kind.TAKE, Kind.WAIT),
    "ReaderReadUpToV2": (Kind.TAKE, Kind.WAIT),
    "ReaderReset": (Kind.ALTER,),
    "ReaderResetV2": (Kind.ALTER,),
    "ReaderRestoreState": (Kind.ALTER,),
    "ReaderRestoreStateV2": (Kind.ALTER,),
    "ReaderNumRecordsProduced": (),
    "ReaderNumRecordsProducedV2": (),
    "ReaderNumWorkUnitsCompleted": (),
    "ReaderNumWorkUnitsCompletedV2": (),
    "ReaderSerializeState": (),
    "ReaderSerializeStateV2": (),
    "IteratorGetNext": (Kind.TAKE, Kind.WAIT),
    "IteratorGetNextSync": (Kind.TAKE, Kind.WAIT),
    "IteratorGetNextAsOptional": (Kind.TAKE, Kind.WAIT),
    "IteratorGetDevice": (),
    "IteratorToStringHandle": (),
    "IteratorFromStringHandle": (),
    "IteratorFromStringHandleV2": (),
    "MultiDeviceIteratorGetNextFromShard": (Kind.TAKE, Kind.WAIT),
    "MakeIterator": (Kind.ALTER,),
    "MultiDeviceIteratorInit": (Kind.ALTER, Kind.WAIT),
    "DatasetToSingleElement": (Kind.WAIT,),
    "ReduceDataset": (Kind.WAIT,),
    "DatasetToGraph": (),
    "DatasetToGraphV2": (),
    "DatasetToTFRecord": (Kind.ALTER, Kind.WAIT),
    "ConditionalAccumulator": (),
    "AccumulatorTakeGradient": (Kind.TAKE, Kind.WAIT),
    "SparseAccumulatorTakeGradient": (Kind.TAKE, Kind.WAIT),
    "ResourceAccumulatorTakeGradient": (Kind.TAKE, Kind.WAIT),
    "AccumulatorApplyGradient": (Kind.ALTER, Kind.COLLECT),
    "SparseAccumulatorApplyGradient": (Kind.ALTER, Kind.COLLECT),
    "ResourceAccumulatorApplyGradient": (Kind.ALTER, Kind.COLLECT),
    "AccumulatorSetGlobalStep": (Kind.ALTER,),
    "ResourceAccumulatorSetGlobalStep": (Kind.ALTER,),
    "AccumulatorNumAccumulated": (),
    "ResourceAccumulatorNumAccumulated": (),
    "PyFunc": (Kind.TAKE, Kind.WAIT),
    "EagerPyFunc": (Kind.TAKE, Kind.WAIT),
    "PyFuncStateless": (Kind.WAIT,),
    "MutexLock": (Kind.WAIT,),
    "Batch": (Kind.WAIT,),
    "BatchFunction": (Kind.WAIT,),
    "Unbatch": (Kind.WAIT,),
    "UnbatchGrad": (Kind.WAIT,),
    "GetSessionTensor": (),
    "DeleteSessionTensor": (Kind.ALTER,),
    "WriteFile": (Kind.ALTER,),
    "Save": (Kind.ALTER,),
    "SaveSlices": (Kind.ALTER,),
    "SaveV2": (Kind.ALTER,),
    "MergeV2Checkpoints": (Kind.ALTER,),
    "LookupTableFind": (),
    "LookupTableFindV2": (),
    "LookupTableSize": (),
    "LookupTableSizeV2": (),
    "LookupTableExport": (),
    "LookupTableExportV2": (),
    "LookupTableInsert": (Kind.ALTER,),
    "LookupTableInsertV2": (Kind.ALTER,),
    "ReadVariableOp": (Kind.READ,),
    "ResourceGather": (Kind.READ,),
    "ResourceGatherNd": (Kind.READ,),
    "VariableShape": (),
    "VarIsInitializedOp": (),
    "IsVariableInitialized": (),
    "DisableCopyOnRead": (),
    "ResourceCountUpTo": (Kind.READ, Kind.COUNT),
    "CountUpTo": (Kind.READ, Kind.COUNT),
    "AssignVariableOp": (Kind.WRITE,),
    "Assign": (Kind.WRITE,),
    "AssignAdd": (Kind.READ, Kind.WRITE),
    "AssignSub": (Kind.READ, Kind.WRITE),
    "DestroyTemporaryVariable": (Kind.READ,),
}

#: Types of which every member that is not listed waits for another process or another thread.
WAITING_PREFIXES = (
    "Collective",
    "DataService",
    "Nccl",
    "Recv",
    "Rpc",
    "Send",
    "Xla",
    "_Recv",
    "_Send",
    "_XlaRecv",
    "_XlaSend",
)

HANDLE_INDEX = {"MakeIterator": 1, "MultiDeviceIteratorInit": 1}

#: The second handle of a reader op is the queue of work that it takes its file names from.
SECOND_HANDLE = {"ReaderRead", "ReaderReadV2", "ReaderReadUpTo", "ReaderReadUpToV2"}

#: What hands a resource or a reference on: the handle that comes out is one of those that went in.
PASSES_ON = {
    "Enter",
    "Exit",
    "Identity",
    "IdentityN",
    "Merge",
    "NextIteration",
    "RefEnter",
    "RefExit",
    "RefIdentity",
    "RefMerge",
    "RefNextIteration",
    "RefSelect",
    "RefSwitch",
    "Switch",
    # These give back the reference that they were given.
    "Assign",
    "AssignAdd",
    "AssignSub",
}

VARIABLES = {"TemporaryVariable", "VarHandleOp", "Variable", "VariableV2"}
REFERENCES = {"Assign", "AssignAdd", "AssignSub", "RefEnter", "RefIdentity", "Variable", "VariableV2"}
PLACEHOLDERS = {"Placeholder", "PlaceholderV2"}
RESTORES = {"Restore", "RestoreSlice", "RestoreV2"}
ASSIGNS = {"Assign", "AssignVariableOp"}

#: State that lives no longer than the run itself.
EPHEMERAL = {
    "Stack",
    "StackV2",
    "TensorArray",
    "TensorArrayV2",
    "TensorArrayV3",
    "TensorArrayGrad",
    "TensorArrayGradV2",
    "TensorArrayGradV3",
    "TensorArrayGradWithShape",
}

#: Function-calling types: index of the input that is the function's first argument.
FIRST_ARGUMENT = {
    "Case": 1,
    "If": 1,
    "PartitionedCall": 0,
    "RemoteCall": 1,
    "StatefulPartitionedCall": 0,
    "StatelessCase": 1,
    "StatelessIf": 1,
    "StatelessWhile": 0,
    "SymbolicGradient": 0,
    "TPUPartitionedCall": 0,
    "While": 0,
}


def effects_of(op_type: str) -> tuple[Kind, ...] | None:
    """The listed effects of a type, or None where it is not listed."""
    listed = EFFECTS.get(op_type)
    if listed is None and op_type.startswith(WAITING_PREFIXES):
        return (Kind.WAIT,)
    return listed
