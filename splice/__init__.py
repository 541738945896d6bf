"""The public interface of splice: clients, jobs, losses and errors.

    from splice import LossSpec, OptimParams, SpliceClient

The command line is `splice` (`splice.cli`). `splice.cluster.Cluster` runs all roles on one host.
"""

from orchestrator.errors import (
    ConfigError,
    ContentChanged,
    JobFailed,
    LinkLost,
    NodeLost,
    ProtocolError,
    SpliceError,
    VerificationError,
)
from orchestrator.protocol.messages import (
    ExportHfJob,
    ForwardBackwardJob,
    ForwardJob,
    InitialSyncJob,
    LoadAdapterJob,
    LoadCheckpointJob,
    LossSpec,
    NewAdapterJob,
    OptimParams,
    OptimStepJob,
    PublishJob,
    ResyncJob,
    SaveCheckpointJob,
    Status,
    TensorSpec,
    TrainLoraJob,
    TrainMergedJob,
    batch_specs,
)
from splice.batches import (
    ASK,
    ASK_CHAT,
    Batch,
    Completion,
    completions_of,
    group_advantages,
    grpo_batch,
    sft_batch,
)
from splice.client import AsyncSpliceClient, BatchBuffers, ForwardResult, SpliceClient

__all__ = [
    "ASK",
    "ASK_CHAT",
    "AsyncSpliceClient",
    "Batch",
    "BatchBuffers",
    "Completion",
    "ConfigError",
    "ContentChanged",
    "ExportHfJob",
    "ForwardBackwardJob",
    "ForwardJob",
    "ForwardResult",
    "InitialSyncJob",
    "JobFailed",
    "LinkLost",
    "LoadAdapterJob",
    "LoadCheckpointJob",
    "LossSpec",
    "NewAdapterJob",
    "NodeLost",
    "OptimParams",
    "OptimStepJob",
    "ProtocolError",
    "PublishJob",
    "ResyncJob",
    "SaveCheckpointJob",
    "SpliceClient",
    "SpliceError",
    "Status",
    "TensorSpec",
    "TrainLoraJob",
    "TrainMergedJob",
    "VerificationError",
    "batch_specs",
    "completions_of",
    "group_advantages",
    "grpo_batch",
    "sft_batch",
]
