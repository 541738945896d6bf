"""Jobs: what a client submits.

`RunJob` asks the trainer to run one. `InitialSync`, `Publish` and `Resync` take other requests, and
exist between client and orchestrator only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field

from orchestrator.protocol.messages.base import Message, Request
from orchestrator.protocol.messages.batches import BatchSpecs, LossSpec, OptimParams, TokenIds
from orchestrator.protocol.messages.json_fields import ClientState
from orchestrator.protocol.messages.results import (
    AdapterResult,
    ExportHfResult,
    ForwardBackwardResult,
    ForwardResult,
    LoadCheckpointResult,
    OptimStepResult,
    PublishResult,
    SaveCheckpointResult,
    TrainLoraResult,
    TrainMergedResult,
)

R_co = TypeVar("R_co", covariant=True)


class JobOf(Protocol[R_co]):
    """A job whose result is an `R_co`."""

    @property
    def result_type(self) -> type[R_co]:
        """The model of the job's `Completed.result`."""
        ...


class _Batch(Message):
    """Fields of everything that takes a batch and a loss."""

    loss: LossSpec = LossSpec()
    tensors: BatchSpecs
    """Specs of the batch's buffers: `batch_specs(...)`."""
    grad_accumulation_sequences: int | None = Field(default=None, ge=1)
    """Sequences of weight zero pad the batch to a multiple of this number, shared evenly by the
    data-parallel ranks. It must be a multiple of the data-parallel size, which is the default. The
    number changes the distribution over ranks, not the result."""


class TrainStep(_Batch):
    """`ForwardBackward` and `OptimStep` for each mini-batch of each epoch.

    The first step includes the pending gradients. The result's `steps` has each step's
    metrics, `metrics` those of all together. A step with a gradient that is not finite is
    skipped, as in `OptimStep`: its metrics are `skipped` = 1. The request fails only if all steps
    were skipped.
    """

    mini_batch_sequences: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step; the last step takes the remainder. None: the whole batch is one
    step.

    Sequences keep their order. A mini-batch without a loss token refuses the job before the first
    step.
    """
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the batch."""
    optim: OptimParams = OptimParams()


class InitialSync(Message):
    """Join the transfer group and publish the trainer's weights as `name@0`.

    In a run that follows another one they have that one's number.
    """

    kind: Literal["InitialSync"] = "InitialSync"
    result_type: ClassVar[type[PublishResult]] = PublishResult
    replicas: int | None = Field(default=None, ge=1)
    """Number of replicas to wait for. None: all of the run. Others receive it once they are ready.
    """


class TrainMerged(TrainStep):
    """Train, then publish the merged weights as the next version."""

    kind: Literal["TrainMerged"] = "TrainMerged"
    result_type: ClassVar[type[TrainMergedResult]] = TrainMergedResult


class TrainLora(TrainStep):
    """Train, then write the adapter in PEFT format to `output_dir`. Nothing is published."""

    kind: Literal["TrainLora"] = "TrainLora"
    result_type: ClassVar[type[TrainLoraResult]] = TrainLoraResult
    output_dir: str


class Resync(Message):
    """Send the whole served version to every replica again and verify every live tensor.

    The alias stays. After a failed publication that left nothing served, send the newest version
    that was.
    """

    kind: Literal["Resync"] = "Resync"
    result_type: ClassVar[type[PublishResult]] = PublishResult


class Forward(Message):
    """Log-prob and entropy of every token: `Completed` carries the buffers of FORWARD_RESULTS."""

    kind: Literal["Forward"] = "Forward"
    result_type: ClassVar[type[ForwardResult]] = ForwardResult
    tensors: BatchSpecs
    """Specs of the buffers: `forward_specs(...)`."""
    allowed_token_ids: TokenIds | None = None
    """Log-probs and entropy over these ids only; any other token has log-prob -inf."""
    adapters: bool = True
    """False: use the base model, which is the reference policy."""


class ForwardBackward(_Batch):
    """Add the batch's gradient to the pending ones, which the next `OptimStep` uses.

    The result's metrics are the batch's own, over all ranks. A refused batch leaves the
    pending gradients as they are. A later failure drops all of them, and its message says so.
    """

    kind: Literal["ForwardBackward"] = "ForwardBackward"
    result_type: ClassVar[type[ForwardBackwardResult]] = ForwardBackwardResult
    loss_weight: float = Field(default=1.0, allow_inf_nan=False)
    """Multiplies this batch's loss, but not its share of the divisor."""
    returns_logprobs: bool = False
    """`Completed` carries the buffer `logprobs` of FORWARD_RESULTS: those that this pass computed,
    with the adapters' dropout, of every token, with loss or without."""


class OptimStep(Message):
    """Reduce the pending gradients over the ranks, divide once, and step. Nothing is published or
    saved.

    A gradient that is not finite skips the step: the state stays, the pending gradients are
    dropped, and the trainer counts the skip.
    """

    kind: Literal["OptimStep"] = "OptimStep"
    result_type: ClassVar[type[OptimStepResult]] = OptimStepResult
    optim: OptimParams = OptimParams()


class SaveCheckpoint(Message):
    """Write the trainer's state, without pending gradients, to a folder on the trainer's host."""

    kind: Literal["SaveCheckpoint"] = "SaveCheckpoint"
    result_type: ClassVar[type[SaveCheckpointResult]] = SaveCheckpointResult
    checkpoint_dir: str = Field(min_length=1)
    """On the trainer's host. As in every job, a relative path is relative to the run's folder."""
    client_state: ClientState = Field(default={})
    """The client's own state, such as its data position. `LoadCheckpoint` returns it."""


class LoadCheckpoint(Message):
    """Restore what a `SaveCheckpoint` or a `TrainMerged` wrote.

    Pending gradients are dropped; the result has the number of batches. A refused checkpoint
    changes nothing. The served version stays until the next job that publishes.
    """

    kind: Literal["LoadCheckpoint"] = "LoadCheckpoint"
    result_type: ClassVar[type[LoadCheckpointResult]] = LoadCheckpointResult
    checkpoint_dir: str = Field(min_length=1)


class LoadAdapter(Message):
    """Replace the trainer's adapter by a PEFT adapter, with a fresh optimizer.

    Pending gradients are dropped; the result has the number of batches. A refused adapter changes
    nothing. The served version stays until the next job that publishes.
    """

    kind: Literal["LoadAdapter"] = "LoadAdapter"
    result_type: ClassVar[type[AdapterResult]] = AdapterResult
    adapter_dir: str = Field(min_length=1)
    """A folder on each of the trainer's hosts."""


class NewAdapter(Message):
    """Replace the trainer's adapter by a fresh one, which changes nothing yet, of another rank or
    on other linears, with a fresh optimizer.

    What is left out stays as it is. Pending gradients are dropped; the result has the number of
    batches. A refused adapter changes nothing. The served version stays until the next job that
    publishes. Checkpoints know their adapter: `LoadCheckpoint` takes it on.
    """

    kind: Literal["NewAdapter"] = "NewAdapter"
    result_type: ClassVar[type[AdapterResult]] = AdapterResult
    rank: int | None = Field(default=None, ge=1)
    """As `lora.rank` in the trainer's settings."""
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """As `lora.alpha`."""
    targets: tuple[str, ...] | None = Field(default=None, max_length=1024)
    """As `lora.targets`."""
    seed: int | None = None
    """Of the adapter's first values. None: the trainer's `seed`."""


class ExportHf(Message):
    """Write the merged model as an HF checkpoint into a new folder, which appears whole or not at
    all."""

    kind: Literal["ExportHf"] = "ExportHf"
    result_type: ClassVar[type[ExportHfResult]] = ExportHfResult
    output_dir: str = Field(min_length=1)
    """A new folder on the trainer's host."""
    shard_bytes: int = Field(default=5 * 10**9, gt=0)
    """Largest safetensors file, unless a single tensor is larger."""
    fp8_like: str | None = Field(default=None, min_length=1)
    """A checkpoint of this model in block-scaled FP8, on the host of the trainer's rank 0. The
    export then has FP8 weights where that one has them. None: bf16, or the trainer's dtype."""


class Publish(Message):
    """Save the trainer's present state as the next version and publish it, as after `OptimStep`
    jobs.

    Pending gradients stay for the next `OptimStep`, and are no part of the version. If the trainer
    is lost meanwhile, they are lost with it, and the next job fails and says so.
    """

    kind: Literal["Publish"] = "Publish"
    result_type: ClassVar[type[PublishResult]] = PublishResult
    refuses_pending: bool = False
    """Refuse the job while gradients are pending, such as another client's."""
    version: int | None = Field(default=None, ge=1)
    """The version's number, greater than all earlier ones. None: the next one."""


Operation = (
    TrainLora
    | Forward
    | ForwardBackward
    | OptimStep
    | SaveCheckpoint
    | LoadCheckpoint
    | LoadAdapter
    | NewAdapter
    | ExportHf
)
"""Jobs that are one request to the trainer."""
JobSpec = Annotated[
    InitialSync | TrainMerged | Publish | Resync | Operation, Field(discriminator="kind")
]


class NextBatch(Message):
    """The next `TrainMerged`, ahead of time. Nothing answers, and nothing depends on it.

    The orchestrator passes one on during each training job. The trainer may begin the batch's
    passes while it writes the present job's checkpoint, and continues with them in the job with the
    same batch and loss. Any other job makes it forget them. `optim` is ignored.
    """

    kind: Literal["NextBatch"] = "NextBatch"
    job: TrainMerged
    """Its buffers follow the body."""


class RunJob(Request):
    """Run one job on the trainer. The batch's buffers, if any, follow the body.

    `Completed` has the job's result. The state that `TrainMerged` and `SaveCheckpoint` write is
    durable before it: the trainer flushes every file, writes the marker last, then renames the
    folder.
    """

    kind: Literal["RunJob"] = "RunJob"
    job: Annotated[TrainMerged | Operation, Field(discriminator="kind")]
    version: int = Field(default=0, ge=0)
    """The version of the state that `TrainMerged` or `SaveCheckpoint` writes."""
    checkpoint_dir: str = ""
    """TrainMerged: where it writes. The other jobs name their folders."""
    delete_after: tuple[str, ...] = ()
    """Checkpoints to delete once the new one is complete. The answer does not wait for that."""
