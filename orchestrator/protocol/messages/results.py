"""What a completed job returns to its client: typed views of `Completed.result`."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, InstanceOf

from orchestrator.protocol.messages.answers import Completed
from orchestrator.protocol.messages.base import PublicationMode, Sent

Metrics = dict[str, float]
if TYPE_CHECKING:
    Floats = array.array[float]
else:  # Python 3.11 has no array.array[float]
    Floats = InstanceOf[array.array]
"""[T], float32: one value for each token, with the sequences end to end."""


class JobResult(BaseModel):
    """Base of the results. A newer orchestrator may add keys, which are ignored."""

    model_config = ConfigDict(frozen=True)

    seconds: dict[str, float] = {}
    """Wall-clock of each phase. `total`: the job; `release`: reaching the memory mode after it."""
    warnings: list[str] = []
    """Findings that somebody should look at, with remedies."""

    @classmethod
    def of(cls, completed: Completed, buffers: Sequence[bytes | memoryview]) -> Self:
        """Build the result from a job's terminal message and its float32 buffers."""
        arrays = {
            spec.name: array.array("f", bytes(buffer))
            for spec, buffer in zip(completed.tensors, buffers, strict=True)
        }
        return cls.model_validate({**completed.result, **arrays})


class PublishResult(JobResult):
    """A version that was published."""

    version: int
    alias: str
    """`name@version`."""
    mode: PublicationMode = "in_place"
    """The mode that was used."""
    why_in_place: str | None = None
    """Why the configured shadow mode was not used."""
    sent: Sent = "full"
    """full: all tensors. changed: those that training changes, with all of their layers. elements:
    those elements of them that differ from the version before."""
    why_sent: str = ""
    """Why whole tensors or changed elements were sent."""
    bytes_sent: int = 0
    """Bytes for each replica."""
    changed_elements: int | None = None
    """Number of elements sent, if only those were; of fp32, halves of elements."""
    num_tensors: int = 0
    """Number of tensors sent."""
    num_verified: int = 0
    """Number of tensors sent whose digests were compared."""
    unverified: dict[str, str] = {}
    """Tensor that could not be read back -> the reason."""
    canary: dict[str, float] = {}
    """Replica -> its median difference from the trainer, in nats; only replicas that were asked."""
    states: list[str] = []
    """The publication's states, in order."""
    attempts: int = 1
    replicas: list[str] = []
    """Those that serve the version."""
    left_out: dict[str, str] = {}
    """Replica that does not serve the version -> the reason."""
    checkpoint_dir: str = ""
    """The version's checkpoint, on the trainer's host."""


class TrainResult(JobResult):
    """Optimizer steps."""

    metrics: Metrics = {}
    """Of the whole job."""
    steps: list[Metrics] = []
    """Of each optimizer step."""


class TrainMergedResult(TrainResult, PublishResult):
    """Optimizer steps, and the version that serves them."""


class TrainLoraResult(TrainResult):
    """Optimizer steps, and where the adapter is."""

    output_dir: str
    host: str = ""


class ForwardBackwardResult(JobResult):
    """A batch whose gradient is pending."""

    metrics: Metrics = {}
    """Of this batch."""
    pending_batches: int = 0
    """Number of batches whose gradients the next optimizer step uses."""
    logprobs: Floats | None = None
    """Each token's log-prob, as this pass computed it, if the job asked for them."""


class OptimStepResult(JobResult):
    """One optimizer step."""

    metrics: Metrics = {}
    """Over all pending batches."""


class ForwardResult(JobResult):
    """Log-prob and entropy (nats) of every token, with the sequences end to end."""

    logprobs: Floats
    entropy: Floats


class SaveCheckpointResult(JobResult):
    """Where the trainer's state was written."""

    version: int
    checkpoint_dir: str
    """Absolute, on the trainer's host."""
    host: str = ""
    pending_batches: int = 0
    """Number of batches whose gradients are not part of the checkpoint."""


class AdapterResult(JobResult):
    """An adapter that replaced the trainer's."""

    adapter_dir: str = ""
    """Its folder, if it came from one."""
    rank: int | None = None
    alpha: float | None = None
    targets: list[str] = []
    trainable_parameters: int = 0
    dropped_batches: int = 0
    """Number of batches whose pending gradients were dropped."""


class LoadCheckpointResult(JobResult):
    """The state that the trainer took from a checkpoint."""

    version: int = 0
    checkpoint_dir: str = ""
    client_state: dict[str, Any] = {}
    """As it was saved."""
    dropped_batches: int = 0
    """Number of batches whose pending gradients were dropped."""
    rng_restored: bool = False
    """Whether the topology is the saved one, so that the random number generators continue."""
    adapter_changed: bool = False


class ExportHfResult(JobResult):
    """Where the merged model was written."""

    output_dir: str
    host: str = ""
    files: list[str] = []
