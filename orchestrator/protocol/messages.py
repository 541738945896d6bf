"""Every message of the control protocol, as frozen pydantic models told apart by `kind`.

A *request* (orchestrator to node) carries `request_id`; the node answers with `Progress` messages numbered from 0
without gaps and then exactly one terminal message: `Completed`, `Failed` or `Cancelled`. A *job* (client to
orchestrator) works the same way with `job_id` as the request id; the same id sent twice gets the first one's outcome.

Tensors never stand in a body. A body's `tensors` lists dtype and shape of the raw buffers that follow it as frames, in order.
Shapes in field docs: S = sequences, T = tokens of all sequences laid end to end, N = tensors of a manifest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

PROTOCOL_VERSION = 1
"""Peers of another version are answered `Rejected`."""

Transport = Literal["gloo", "nccl"]
Role = Literal["trainer", "inference", "client"]
PauseMode = Literal["keep", "keep_kv", "wait", "abort"]
Dtype = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8", "float64"]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1,
}  # fmt: skip


class ErrorCode(StrEnum):
    """Why a job or request failed. `Failed.remedy` says what to do about it."""

    BAD_INPUT = "bad_input"
    NOT_READY = "not_ready"
    PLAN_REFUSED = "plan_refused"
    TRAINING_FAILED = "training_failed"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    CHECKPOINT_FAILED = "checkpoint_failed"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_ABORTED = "transfer_aborted"
    APPLY_FAILED = "apply_failed"
    VERIFICATION_FAILED = "verification_failed"
    POISONED = "poisoned"
    NODE_LOST = "node_lost"
    PROTOCOL = "protocol"
    INTERNAL = "internal"


class Message(BaseModel):
    """Base of every body: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class TensorSpec(Message):
    """One tensor of a manifest, or one raw buffer behind a body. `shape` in elements, row-major."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.numel * DTYPE_BYTES[self.dtype]


class Manifest(Message):
    """What one publication sends: HF-named tensors in wire order. Computed once per model structure."""

    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Manifest:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})[:3] if len(names) < 10_000 else "several"
            raise ValueError(f"tensor names must be unique in a manifest; twice: {twice}")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(t.nbytes for t in self.tensors)


class WireChunk(Message):
    """Bytes that travel in one piece: tensors (indices into the manifest) laid end to end."""

    kind: Literal["live", "staged", "reload"]
    """live: received in place, the tensors lie side by side in one live kernel tensor. staged: received beside, then copied to their places.
    reload: handed to the model's own loaders."""
    tensors: tuple[int, ...] = Field(min_length=1)


class WireLayout(Message):
    """The order in which a replica wants a manifest's bytes; every tensor stands in exactly one chunk."""

    chunks: tuple[WireChunk, ...] = Field(min_length=1)
    why_not_live: dict[str, str] = {}
    """Reason -> an example of the tensors that take the reload path for it."""


class Rendezvous(Message):
    """How the inference workers reach the trainer's transfer group. The trainer is rank 0, workers start at 1."""

    transport: Transport
    host: str
    port: int = 0
    """gloo: port of the trainer's TCPStore. nccl: 0."""
    nccl_unique_id: bytes | None = None
    """nccl: the 128 bytes of ncclGetUniqueId. gloo: None."""
    world_size: int = Field(ge=2)
    """1 + workers of this replica."""
    bucket_bytes: int = Field(gt=0)
    """Tensors are packed, in manifest order, until a bucket exceeds this many bytes (vLLM's packed cut rule)."""


# ---------------------------------------------------------------- batches and losses


class LossSpec(Message):
    """Which loss, and its parameters. Losses are sums over tokens, divided once by the global number of loss tokens."""

    name: Literal["cross_entropy", "grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    """PPO clip: the importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.2, ge=0)
    allowed_token_ids: tuple[int, ...] | None = None
    """The sampler drew only from these ids; log-probs are normalised over them. None: the whole vocabulary."""


class OptimParams(Message):
    """One AdamW step."""

    lr: float = Field(default=1e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)


BATCH_TENSORS: dict[str, str] = {
    "tokens": "int32",
    "sequence_lengths": "int32",
    "loss_mask": "float32",
    "advantages": "float32",
    "sampler_logprobs": "float32",
}
"""Name -> dtype of a batch's buffers, in this order. `sequence_lengths` is [S], the rest are [T].

Row t speaks of the *prediction of* token t (not from it): loss_mask[t] = 1 where token t was sampled by the policy, so the
first token of a sequence has mask 0. advantages and sampler_logprobs are 0 where the mask is 0.
"""


def batch_specs(*, num_sequences: int, num_tokens: int) -> tuple[TensorSpec, ...]:
    """The `tensors` field of a training message for a batch of this size."""
    return tuple(
        TensorSpec(name=n, dtype=d, shape=(num_sequences if n == "sequence_lengths" else num_tokens,))  # type: ignore[arg-type]
        for n, d in BATCH_TENSORS.items()
    )


# ---------------------------------------------------------------- job specs (client -> orchestrator)


class _Training(Message):
    loss: LossSpec = LossSpec()
    optim: OptimParams = OptimParams()
    tensors: tuple[TensorSpec, ...]
    """Specs of the batch's buffers: `batch_specs(...)`."""


class InitialSyncJob(Message):
    """Join the transfer group and publish the trainer's current weights as `name@0`."""

    kind: Literal["InitialSyncJob"] = "InitialSyncJob"


class TrainMergedJob(_Training):
    """One optimizer step, then publish the merged weights as the next version."""

    kind: Literal["TrainMergedJob"] = "TrainMergedJob"


class TrainLoraJob(_Training):
    """One optimizer step, then write the adapter in PEFT format; nothing is published."""

    kind: Literal["TrainLoraJob"] = "TrainLoraJob"
    output_dir: str


class ResyncJob(Message):
    """Send the served version whole again to every replica: the alias stays, every live tensor is verified anew."""

    kind: Literal["ResyncJob"] = "ResyncJob"


JobSpec = Annotated[InitialSyncJob | TrainMergedJob | TrainLoraJob | ResyncJob, Field(discriminator="kind")]


class SubmitJob(Message):
    """Run one job. The batch's buffers, if any, follow the body."""

    kind: Literal["SubmitJob"] = "SubmitJob"
    job_id: str = Field(min_length=1, max_length=128)
    job: JobSpec


class CancelJob(Message):
    """Cancel a job that has not started; one that runs is let finish (after the first byte there is no way back)."""

    kind: Literal["CancelJob"] = "CancelJob"
    job_id: str


class GetStatus(Message):
    """Answered with `Status`."""

    kind: Literal["GetStatus"] = "GetStatus"


class Subscribe(Message):
    """Receive every `Progress` and terminal message of every job from now on."""

    kind: Literal["Subscribe"] = "Subscribe"


class StopRun(Message):
    """Send `Shutdown` to every node, then end the orchestrator."""

    kind: Literal["StopRun"] = "StopRun"


# ---------------------------------------------------------------- requests (orchestrator -> trainer)


class _Request(Message):
    request_id: str
    deadline_s: float = Field(gt=0)
    """Seconds from receipt after which the node must have ended the request, one way or the other."""


class TrainStep(_Request):
    """Forward, backward and one optimizer step on the batch whose buffers follow; base of the two training requests."""

    loss: LossSpec
    optim: OptimParams
    tensors: tuple[TensorSpec, ...]


class TrainMerged(TrainStep):
    """A training step towards `version`; the new state is durable in `checkpoint_dir` before `Completed`."""

    kind: Literal["TrainMerged"] = "TrainMerged"
    version: int = Field(ge=1)
    checkpoint_dir: str


class TrainLora(TrainStep):
    """A training step, then the adapter in PEFT format in `output_dir`."""

    kind: Literal["TrainLora"] = "TrainLora"
    output_dir: str


class SaveCheckpoint(_Request):
    """Write adapters (PEFT format in `<dir>/adapter`), optimizer and version; fsync; marker last."""

    kind: Literal["SaveCheckpoint"] = "SaveCheckpoint"
    version: int = Field(ge=0)
    checkpoint_dir: str


class LoadCheckpoint(_Request):
    """Restore what `SaveCheckpoint` or `TrainMerged` wrote."""

    kind: Literal["LoadCheckpoint"] = "LoadCheckpoint"
    checkpoint_dir: str


class PlanPublication(_Request):
    """Declare the manifest. `Completed.result` is a `Manifest` as a dict; no data moves."""

    kind: Literal["PlanPublication"] = "PlanPublication"


class OpenTransferGroup(_Request):
    """Trainer: open one group per replica, report `Progress(phase="listening", detail={"rendezvous": {node_id: ...}})`,
    then join all of them before the deadline. Existing groups are closed first."""

    kind: Literal["OpenTransferGroup"] = "OpenTransferGroup"
    transport: Transport
    replicas: dict[str, int]
    """Inference node id -> its number of workers."""
    bucket_bytes: int = Field(gt=0)


class UseLayout(_Request):
    """From now on send the manifest in this order and these pieces; None: in manifest order, in buckets. Plans, moves nothing.

    `Completed.result["direct"]` says whether the trainer will: one that cannot answers False with `"reason"` and keeps manifest order.
    """

    kind: Literal["UseLayout"] = "UseLayout"
    layout: WireLayout | None


class SendWeights(_Request):
    """Export, merge and send every tensor of the manifest to every group, in manifest order or in that of `UseLayout`.

    `Completed` carries one int64 buffer [N]: the digest of each tensor sent, in manifest order.
    """

    kind: Literal["SendWeights"] = "SendWeights"
    version: int = Field(ge=0)


class AbortSend(Message):
    """Abort the transfer in flight at once (answered by the SendWeights' own `Failed`). Not a request."""

    kind: Literal["AbortSend"] = "AbortSend"
    reason: str


# ---------------------------------------------------------------- requests (orchestrator -> inference)


class JoinTransferGroup(_Request):
    """Inference: all workers join the trainer's group. An existing group is left first."""

    kind: Literal["JoinTransferGroup"] = "JoinTransferGroup"
    rendezvous: Rendezvous


class LeaveTransferGroup(_Request):
    """Both sides: abort and destroy the communicators."""

    kind: Literal["LeaveTransferGroup"] = "LeaveTransferGroup"


class PrepareUpdate(_Request):
    """Check the manifest against the model's placement plan; nothing pauses, nothing changes.

    `Completed.result["layout"]` is the `WireLayout` that this replica would like (absent if it takes manifest order only).
    Ends in `Failed(code="plan_refused")` naming the tensors where a name, dtype or shape does not fit, or a weight of the model
    would get no data.
    """

    kind: Literal["PrepareUpdate"] = "PrepareUpdate"
    version: int = Field(ge=0)
    manifest: Manifest


class ReceiveWeights(_Request):
    """Pause, start, receive, finish, then digest the live tensors. Generation stays paused.

    `Progress(phase="paused")` once paused; `Progress(phase="applying")` just before the first receive: until then a failure
    leaves @N serving. `Completed` carries one int64 buffer [N] of digests in manifest order, and
    `result = {"seconds": {...}, "unverified": {name: reason}, "spans": ...}`.
    """

    kind: Literal["ReceiveWeights"] = "ReceiveWeights"
    version: int = Field(ge=0)
    pause_mode: PauseMode = "keep"
    direct: bool = False
    """The trainer sends in the layout that this replica asked for in its answer to `PrepareUpdate`."""


class CommitUpdate(_Request):
    """Move the alias to `version` and resume."""

    kind: Literal["CommitUpdate"] = "CommitUpdate"
    version: int = Field(ge=0)


class AbortUpdate(Message):
    """Abort the update in flight at once: before the first byte @N goes on; after it the replica is poisoned and serves
    nothing until a full resync. Not a request; answered by the ReceiveWeights' own terminal message, if one is in flight."""

    kind: Literal["AbortUpdate"] = "AbortUpdate"
    reason: str


class Shutdown(Message):
    """End the node in order. Not a request."""

    kind: Literal["Shutdown"] = "Shutdown"
    reason: str = "the run is over"


# ---------------------------------------------------------------- nodes -> orchestrator


class Hello(Message):
    """First message of every peer."""

    kind: Literal["Hello"] = "Hello"
    role: Role
    node_id: str
    incarnation: str
    """New for every process; tells a reconnect from a restart."""
    run_token: str
    """The run's token; a peer of another run is rejected."""
    packages: dict[str, str] = {}
    """Versions: torch, nccl, vllm and its dialect, megatron-core, ..."""
    gpus: tuple[str, ...] = ()
    pid: int = 0


class Welcome(Message):
    """The orchestrator took the peer in."""

    kind: Literal["Welcome"] = "Welcome"
    heartbeat_s: float


class Rejected(Message):
    """The orchestrator did not take the peer in."""

    kind: Literal["Rejected"] = "Rejected"
    reason: str


class Ready(Message):
    """The node's model is loaded and it takes requests; inference nodes say where they serve."""

    kind: Literal["Ready"] = "Ready"
    node_id: str
    detail: dict[str, Any] = {}
    """trainer: {"model", "parallel": {...}, "trainable_parameters"}; inference: {"base_url", "workers", "model", "model_dtype"}"""


class Heartbeat(Message):
    """A node is alive."""

    kind: Literal["Heartbeat"] = "Heartbeat"
    node_id: str


class Progress(Message):
    """A step of a request or job; `sequence` counts from 0 without gaps."""

    kind: Literal["Progress"] = "Progress"
    request_id: str
    sequence: int = Field(ge=0)
    phase: str
    detail: dict[str, Any] = {}


class Completed(Message):
    """Terminal: done. Buffers may follow, as `tensors` says."""

    kind: Literal["Completed"] = "Completed"
    request_id: str
    result: dict[str, Any] = {}
    tensors: tuple[TensorSpec, ...] = ()


class Failed(Message):
    """Terminal: not done. `remedy` says what to do next."""

    kind: Literal["Failed"] = "Failed"
    request_id: str
    code: ErrorCode
    node: str
    phase: str
    message: str
    remedy: str


class Cancelled(Message):
    """Terminal: cancelled before it started."""

    kind: Literal["Cancelled"] = "Cancelled"
    request_id: str
    reason: str


class NodeStatus(Message):
    """One node in `Status`."""

    node_id: str
    role: Role
    state: Literal["connected", "ready", "lost", "poisoned"]
    packages: dict[str, str] = {}
    gpus: tuple[str, ...] = ()
    detail: dict[str, Any] = {}


class Status(Message):
    """Answer to `GetStatus`."""

    kind: Literal["Status"] = "Status"
    name: str
    version: int | None
    publication: str
    """State of the publication machine."""
    nodes: tuple[NodeStatus, ...]
    queued_jobs: int


AnyMessage = (
    SubmitJob | CancelJob | GetStatus | Subscribe | StopRun
    | TrainMerged | TrainLora | SaveCheckpoint | LoadCheckpoint | PlanPublication | OpenTransferGroup | UseLayout | SendWeights | AbortSend
    | JoinTransferGroup | LeaveTransferGroup | PrepareUpdate | ReceiveWeights | CommitUpdate | AbortUpdate | Shutdown
    | Hello | Welcome | Rejected | Ready | Heartbeat | Progress | Completed | Failed | Cancelled | Status
)  # fmt: skip
Terminal = Completed | Failed | Cancelled

ANY_MESSAGE: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="kind")])
