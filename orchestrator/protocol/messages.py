"""Every message of the control protocol, as frozen pydantic models told apart by `kind`.

A *request* (orchestrator to node) carries `request_id`; the node answers with `Progress` messages numbered from 0
without gaps and then exactly one terminal message: `Completed`, `Failed` or `Cancelled`. A *job* (client to
orchestrator) works the same way with `job_id` as the request id; the same id sent twice gets the first one's outcome.

Tensors never stand in a body. A body's `tensors` lists dtype and shape of the raw buffers that follow it as frames, in order.
Shapes in field docs: S = sequences, T = tokens of all sequences laid end to end, N = tensors of a manifest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

PROTOCOL_VERSION = 4
"""Peers of another version are answered `Rejected`."""

Transport = Literal["tcp", "nccl"]
Role = Literal["trainer", "inference", "client", "launcher"]
PauseMode = Literal["keep", "keep_kv", "wait", "abort"]
PublicationMode = Literal["in_place", "shadow"]
Dtype = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8", "float64"]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1,
}  # fmt: skip


class ErrorCode(StrEnum):
    """Why a job or request failed. `Failed.remedy` says what to do about it."""

    BAD_INPUT = "bad_input"
    NOT_READY = "not_ready"
    NOT_STAGED = "not_staged"
    PLAN_REFUSED = "plan_refused"
    TRAINING_FAILED = "training_failed"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    LOGPROB_GAP = "logprob_gap"
    CHECKPOINT_FAILED = "checkpoint_failed"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_ABORTED = "transfer_aborted"
    APPLY_FAILED = "apply_failed"
    VERIFICATION_FAILED = "verification_failed"
    POISONED = "poisoned"
    NODE_LOST = "node_lost"
    BASE_MISSING = "base_missing"
    PROTOCOL = "protocol"
    TOO_MANY_JOBS = "too_many_jobs"
    STOPPED = "stopped"
    INTERNAL = "internal"


class Message(BaseModel):
    """Base of every body: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class TensorSpec(Message):
    """One tensor of a manifest, or one raw buffer behind a body. `shape` in elements, row-major."""

    name: str = Field(max_length=1024)
    dtype: Dtype
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**48)], ...], Field(max_length=8, fail_fast=True)]

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


MAX_DEPTH = 32
"""How deep dicts and lists may be nested in a field that takes any JSON."""
NodeId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Letters, digits, '.', '_' and '-', at most 64."""


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """The same.

    Raises:
        ValueError: nested deeper than MAX_DEPTH, which functions that call themselves would not survive.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [one for held in level for one in (held.values() if isinstance(held, dict) else held)]
        level = [one for one in level if isinstance(one, dict | list | tuple)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


Json = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""Any JSON object, nested at most MAX_DEPTH levels deep."""


def _plain_json(value: Any, where: str = "client_state") -> Any:
    """The same, tuples as lists.

    Raises:
        ValueError: JSON would not give it back; names the place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain_json(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r:.40}; keys must be text, or they would come back as text")
        return {key: _plain_json(one, f"{where}.{key}") for key, one in value.items()}
    raise ValueError(f"{where} is {type(value).__name__}, which JSON does not hold; give it as text or numbers")


ClientState = Annotated[dict[str, Any], AfterValidator(_shallow), AfterValidator(_plain_json)]
"""What JSON holds, because it is written as JSON with the trainer's state."""


class Manifest(Message):
    """What one publication sends: HF-named tensors in wire order. Computed once per model structure."""

    tensors: Annotated[tuple[TensorSpec, ...], Field(fail_fast=True)] = Field(min_length=1)
    changed: Annotated[tuple[int, ...], Field(fail_fast=True)] | None = None
    """Indices, ascending, of the tensors that training can change: those with an adapter. None: all of them."""

    @model_validator(mode="after")
    def _changed_are_there(self) -> Manifest:
        if self.changed is not None:
            _check_indices(self.changed, count=len(self.tensors), field="changed")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Manifest:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})[:3] if len(names) < 10_000 else "several"
            raise ValueError(f"tensor names must be unique in a manifest; twice: {twice}")
        return self

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes on the wire. Of 19,000 tensors this takes 5 ms, and it is asked for while generation stands still."""
        return sum(t.nbytes for t in self.tensors)

    def part(self, indices: Sequence[int]) -> Manifest:
        """The manifest of these tensors alone, in this order."""
        return Manifest(tensors=tuple(self.tensors[i] for i in indices))


def _check_indices(indices: Sequence[int], *, count: int | None, field: str) -> None:
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0:
        raise ValueError(
            f"{field} must be ascending indices into the manifest's tensors, at least one; got {list(indices[:5])}..."
        )
    if count is not None and indices[-1] >= count:
        raise ValueError(f"{field} has index {indices[-1]}, but the manifest has {count} tensors")


class WireChunk(Message):
    """Bytes that travel in one piece: tensors (indices into the manifest) laid end to end."""

    kind: Literal["live", "staged", "reload"]
    """live: received in place, the tensors lie side by side in one live kernel tensor of the only worker. staged: received beside, then each worker
    copies the parts that land on it. reload: handed to the model's own loaders."""
    tensors: tuple[int, ...] = Field(min_length=1)


class WireLayout(Message):
    """The order in which a replica wants a manifest's bytes; every tensor stands in exactly one chunk."""

    chunks: tuple[WireChunk, ...] = Field(min_length=1)
    why_not_live: dict[str, str] = {}
    """Reason -> an example of the tensors that take the reload path for it."""


class ManifestPart(Message):
    """What an update of the changed tensors alone brings: they, and whatever shares a layer with them on the replica."""

    tensors: tuple[int, ...]
    """Indices into the manifest, ascending."""
    layout: WireLayout | None = None
    """Its indices count within the part. None: the part in manifest order."""

    @model_validator(mode="after")
    def _ascending(self) -> ManifestPart:
        _check_indices(self.tensors, count=None, field="tensors")
        return self


class Rendezvous(Message):
    """How the inference workers reach the trainer's transfer group. The trainer is rank 0, workers start at 1."""

    transport: Transport
    host: str
    port: int = 0
    """tcp: the port that the trainer listens on. nccl: 0."""
    secret: bytes = Field(default=b"", max_length=32, repr=False)
    """tcp: 32 random bytes, made for this rendezvous; both ends prove that they have them. nccl: empty."""
    nccl_unique_id: bytes | None = Field(default=None, repr=False)
    """nccl: the 128 bytes of ncclGetUniqueId. tcp: None."""
    world_size: int = Field(ge=2)
    """1 + workers of this replica."""
    bucket_bytes: int = Field(gt=0)
    """Tensors are packed, in manifest order, until a bucket exceeds this many bytes (vLLM's packed cut rule)."""


# ---------------------------------------------------------------- batches and losses

ParamValue = bool | int | float | str
TokenIds = Annotated[tuple[int, ...], Field(max_length=2**20, fail_fast=True)]
BatchSpecs = Annotated[tuple[TensorSpec, ...], Field(max_length=16, fail_fast=True)]
NormalizeBy = Literal["tokens", "sequences"] | Annotated[float, Field(gt=0, allow_inf_nan=False)]

LOSS_PARAMETERS: dict[str, dict[str, float | None]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "truncated_importance_sampling": {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 2.0},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
"""The built-in losses: name -> its parameters and their defaults. What each computes stands in `trainer_node/losses.py`."""

_ALL_PARAMETERS = ("clip_low", "clip_high", "dual_clip", "ratio_cap")


class KlSpec(Message):
    """A penalty on the distance to a reference policy: `coefficient * sum_t estimator(log p_t, log p_t(reference))`, in the loss.

    `k2`'s and `k3`'s gradients pull towards the reference; `k1`'s has mean 0 as a loss term, so it is of use for logging.
    """

    coefficient: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """0: the divergence is logged and pulls nothing."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: Literal["base", "given", "adapter"] = "base"
    """base: the model with its adapters off. given: the batch's `reference_logprobs`. adapter: the model with `adapter_dir` in its place."""
    adapter_dir: str | None = Field(default=None, min_length=1)
    """adapter: a PEFT adapter folder on the trainer's hosts, of the trainer's LoRA settings; read once and kept."""

    @model_validator(mode="after")
    def _adapter_is_named(self) -> KlSpec:
        if (self.reference == "adapter") != (self.adapter_dir is not None):
            raise ValueError("kl.adapter_dir names the PEFT folder of kl.reference = 'adapter', and goes with nothing else")
        return self


class LossSpec(Message):
    """Which loss, and its parameters. Losses are sums over tokens, divided once, at the optimizer step, by what `normalize_by` says.

    A parameter that the named loss does not have is refused; one left out gets the default of `LOSS_PARAMETERS`. A loss of
    the user's own (`trainer_node.losses.register_loss`) takes its parameters in `params`.
    """

    name: str = Field(default="grpo", pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    clip_low: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """ppo: the surrogate of a token with a negative advantage is at least dual_clip * advantage. None: off."""
    ratio_cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """truncated_importance_sampling: largest weight of trainer against sampler."""
    params: dict[str, ParamValue] = Field(default={}, max_length=64)
    """Parameters of a registered loss."""
    kl: KlSpec | None = None
    entropy_bonus: float = Field(default=0.0, allow_inf_nan=False)
    """The loss gets `- entropy_bonus * sum_t entropy_t`."""
    normalize_by: NormalizeBy = "tokens"
    """What the sums are divided by: the number of loss tokens, of sequences with loss tokens (gspo's default), or this constant."""
    allowed_token_ids: TokenIds | None = None
    """The sampler drew only from these ids; log-probs are normalised over them. None: the whole vocabulary."""
    max_logprob_gap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest mean |log p(trainer) - log p(sampler)| of the job's first step, in nats a token. Above it the job fails with the code logprob_gap
    before the step: weights and optimizer stay as they are, pending gradients are dropped. None: no bound, but the result's `warnings` name
    a gap that the trainer's dtype does not explain, on the first step after a publication or load."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "grpo")
        filled = dict(LOSS_PARAMETERS.get(name, {})) if isinstance(name, str) else {}
        if name == "gspo":
            filled["normalize_by"] = "sequences"  # type: ignore[assignment]
        return {**filled, **data}

    @model_validator(mode="after")
    def _only_its_own(self) -> LossSpec:
        known = LOSS_PARAMETERS.get(self.name)
        foreign = [p for p in _ALL_PARAMETERS if getattr(self, p) is not None and p not in (known or {})]
        if foreign:
            where = f"it takes {sorted(known) or 'none'}" if known is not None else "put them in params"
            raise ValueError(f"{foreign} are no parameters of the loss {self.name}; {where}")
        if known is not None and self.params:
            raise ValueError(f"params is for losses of your own; {self.name} is built in and takes {sorted(known) or 'none'}")
        missing = [p for p in known or {} if p != "dual_clip" and getattr(self, p) is None]
        if missing:
            raise ValueError(f"{missing} of the loss {self.name} must be numbers, not None")
        return self


class OptimParams(Message):
    """One AdamW step."""

    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)


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

OPTIONAL_BATCH_TENSORS: dict[str, str] = {
    "old_logprobs": "float32",
    "reference_logprobs": "float32",
    "routed_experts": "int32",
    "temperatures": "float32",
}
"""May follow BATCH_TENSORS, in this order; [T], the same rows, 0 where the mask is 0 (but for temperatures, which may also be [S]).

old_logprobs: the trainer's own before the first step on this batch (from `Forward`); ratios are then taken against them instead of
the sampler's. reference_logprobs: of the reference policy, for `KlSpec(reference="given")`. routed_experts: [T, layers, top_k], the experts
that the sampler's routers sent token t *itself* to; the trainer's routers take them instead of choosing (router replay, Ma et al. 2025,
arXiv:2510.11370), in the policy and in a reference of base weights alike. temperatures: what the sampler divided the logits by before it
drew token t; [S] gives one to all tokens of a sequence, [T] one to each token. Every log-prob and entropy that the trainer computes, of
the policy and of a reference model, is then of softmax(logits / temperature). Each is finite and at least MIN_TEMPERATURE, also where the
mask is 0. Absent: 1.
"""

MIN_TEMPERATURE = 0.01
"""vLLM draws at this temperature where a request asks for a lower one. At 0 it draws nothing: the likeliest token has probability 1."""

FORWARD_TENSORS: dict[str, str] = {"tokens": "int32", "sequence_lengths": "int32"}
"""What a forward pass needs of a batch."""

OPTIONAL_FORWARD_TENSORS: dict[str, str] = {"temperatures": "float32"}
"""May follow FORWARD_TENSORS; as in OPTIONAL_BATCH_TENSORS."""

FORWARD_RESULTS: dict[str, str] = {"logprobs": "float32", "entropy": "float32"}
"""Buffers of a forward pass, [T] each, in BATCH_TENSORS' rows: log p(token t | tokens before it), and the entropy (nats) of the
distribution that token t was drawn from, both at the batch's temperatures. 0 for the first token of a sequence."""


def batch_specs(
    *,
    num_sequences: int,
    num_tokens: int,
    optional: Sequence[str] = (),
    routing: tuple[int, int] = (0, 0),
    token_temperatures: bool = False,
) -> tuple[TensorSpec, ...]:
    """The `tensors` field of a training message for a batch of this size, with these of OPTIONAL_BATCH_TENSORS.

    Args:
        routing: the model's layers and experts per token, where routed_experts is among `optional`.
        token_temperatures: temperatures are [T]; else [S].
    """
    wanted = BATCH_TENSORS | {n: d for n, d in OPTIONAL_BATCH_TENSORS.items() if n in optional}
    return _specs(
        wanted, num_sequences=num_sequences, num_tokens=num_tokens, routing=routing, token_temperatures=token_temperatures
    )


def forward_specs(
    *, num_sequences: int, num_tokens: int, optional: Sequence[str] = (), token_temperatures: bool = False
) -> tuple[TensorSpec, ...]:
    """The `tensors` field of a forward message, with these of OPTIONAL_FORWARD_TENSORS; temperatures as in `batch_specs`."""
    wanted = FORWARD_TENSORS | {n: d for n, d in OPTIONAL_FORWARD_TENSORS.items() if n in optional}
    return _specs(wanted, num_sequences=num_sequences, num_tokens=num_tokens, token_temperatures=token_temperatures)


def _specs(
    wanted: dict[str, str],
    *,
    num_sequences: int,
    num_tokens: int,
    routing: tuple[int, int] = (0, 0),
    token_temperatures: bool,
) -> tuple[TensorSpec, ...]:
    shapes: dict[str, tuple[int, ...]] = {"sequence_lengths": (num_sequences,), "routed_experts": (num_tokens, *routing)}
    if not token_temperatures:
        shapes["temperatures"] = (num_sequences,)
    return tuple(TensorSpec(name=n, dtype=d, shape=shapes.get(n, (num_tokens,))) for n, d in wanted.items())  # type: ignore[arg-type]


# ---------------------------------------------------------------- job specs (client -> orchestrator)


class _Forward(Message):
    """Fields of a forward pass, for job and request alike."""

    tensors: BatchSpecs
    """Specs of the buffers: `forward_specs(...)`."""
    allowed_token_ids: TokenIds | None = None
    """Log-probs and entropy over these ids only; a token outside them has log-prob -inf."""
    adapters: bool = True
    """False: the base model, that is the reference policy."""


class _Batch(Message):
    """Fields of everything that takes a batch and a loss."""

    loss: LossSpec = LossSpec()
    tensors: BatchSpecs
    """Specs of the batch's buffers: `batch_specs(...)`."""
    grad_accumulation_sequences: int | None = Field(default=None, ge=1)
    """The batch is padded with sequences of weight zero to a multiple of this many, and every data-parallel rank takes the same share
    of them; so it must be a multiple of the data-parallel size. None: the data-parallel size. It changes the cut, not the result."""


class _Steps(_Batch):
    mini_batch_sequences: int | None = Field(default=None, ge=1)
    """The batch's sequences are taken in order, so many for each optimizer step, the last one of what is left. None: the whole batch is one
    step. A mini-batch without any loss token is refused with the job, before anything has changed."""
    epochs: int = Field(default=1, ge=1)
    """How often the batch is gone over, in the same order."""


class _ForwardBackward(_Batch):
    loss_weight: float = Field(default=1.0, allow_inf_nan=False)
    """Multiplies this batch's loss, but not the count that the step's sum is divided by."""


class _Training(_Steps):
    optim: OptimParams = OptimParams()


class InitialSyncJob(Message):
    """Join the transfer group and publish the trainer's current weights as `name@0`."""

    kind: Literal["InitialSyncJob"] = "InitialSyncJob"


class TrainMergedJob(_Training):
    """`ForwardBackward` and `OptimStep`, then publish the merged weights as the next version.

    Gradients pending from `ForwardBackwardJob`s before it are part of the step.
    """

    kind: Literal["TrainMergedJob"] = "TrainMergedJob"


class TrainLoraJob(_Training):
    """`ForwardBackward` and `OptimStep`, then write the adapter in PEFT format; nothing is published.

    Gradients pending from `ForwardBackwardJob`s before it are part of the step.
    """

    kind: Literal["TrainLoraJob"] = "TrainLoraJob"
    output_dir: str


class ResyncJob(Message):
    """Send the served version whole again to every replica: the alias stays, every live tensor is verified anew. Where a publication failed and
    left nothing served, the newest version that was."""

    kind: Literal["ResyncJob"] = "ResyncJob"


class ForwardJob(_Forward):
    """Log-probs and entropy of every token: `Completed` carries the buffers of FORWARD_RESULTS. Changes nothing."""

    kind: Literal["ForwardJob"] = "ForwardJob"


class ForwardBackwardJob(_ForwardBackward):
    """Add the batch's gradient to what is pending; the next `OptimStepJob` divides the sum once and steps."""

    kind: Literal["ForwardBackwardJob"] = "ForwardBackwardJob"


class OptimStepJob(Message):
    """One optimizer step with everything pending. Nothing is published or saved."""

    kind: Literal["OptimStepJob"] = "OptimStepJob"
    optim: OptimParams = OptimParams()


class SaveCheckpointJob(Message):
    """Write the trainer's state to `checkpoint_dir`, a folder on the trainer's host. Pending gradients are not part of it."""

    kind: Literal["SaveCheckpointJob"] = "SaveCheckpointJob"
    checkpoint_dir: str = Field(min_length=1)
    client_state: ClientState = {}
    """The client's own (data position, say); `LoadCheckpointJob` gives it back."""


class LoadCheckpointJob(Message):
    """Restore what `SaveCheckpointJob` or a `TrainMergedJob` wrote. Pending gradients are dropped and the result says how many batches
    were; a checkpoint that is refused changes nothing. What is served does not change: train or publish to do that."""

    kind: Literal["LoadCheckpointJob"] = "LoadCheckpointJob"
    checkpoint_dir: str = Field(min_length=1)


class LoadAdapterJob(Message):
    """Put a PEFT adapter in the place of the trainer's. The optimizer starts afresh, pending gradients are dropped and the result says of how
    many batches; an adapter that is refused changes nothing. What is served does not change: train or publish to do that."""

    kind: Literal["LoadAdapterJob"] = "LoadAdapterJob"
    adapter_dir: str = Field(min_length=1)
    """On each of the trainer's hosts."""


class ExportHfJob(Message):
    """Write the merged model as an HF checkpoint into `output_dir`, a new folder on the trainer's host."""

    kind: Literal["ExportHfJob"] = "ExportHfJob"
    output_dir: str = Field(min_length=1)
    shard_bytes: int = Field(default=5 * 10**9, gt=0)
    """A safetensors file is closed before the tensor that would make it larger than this."""


class PublishJob(Message):
    """Save the trainer's present state as the next version and publish it: what follows `OptimStepJob`s in merged mode."""

    kind: Literal["PublishJob"] = "PublishJob"


JobSpec = Annotated[
    InitialSyncJob
    | TrainMergedJob
    | TrainLoraJob
    | ForwardJob
    | ForwardBackwardJob
    | OptimStepJob
    | SaveCheckpointJob
    | LoadCheckpointJob
    | LoadAdapterJob
    | ExportHfJob
    | PublishJob
    | ResyncJob,
    Field(discriminator="kind"),
]


class SubmitJob(Message):
    """Run one job. The batch's buffers, if any, follow the body."""

    kind: Literal["SubmitJob"] = "SubmitJob"
    job_id: str = Field(min_length=1, max_length=128)
    job: JobSpec
    progress: bool = True
    """Whether the client wants the job's `Progress`; without it only the outcome is sent."""


class CancelJob(Message):
    """Cancel a job that has not started; one that runs is let finish (after the first byte there is no way back)."""

    kind: Literal["CancelJob"] = "CancelJob"
    job_id: str = Field(min_length=1, max_length=128)


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


class _BatchRequest(_Request):
    staged: str | None = None
    """The `StageBatch.job_id` of the batch that came ahead: then no buffers follow, and `tensors` says what they were. A trainer that does not
    have it answers `Failed(code="not_staged")`, and nothing has changed. None: the buffers follow."""


class Forward(_BatchRequest, _Forward):
    """Log-probs and entropy of every token; `Completed` carries the buffers of FORWARD_RESULTS."""

    kind: Literal["Forward"] = "Forward"


class ForwardBackward(_BatchRequest, _ForwardBackward):
    """Add the batch's gradient to what is pending. `Completed.result["metrics"]` are the batch's own, over all ranks.

    A batch that is refused leaves what is pending; a failure later than that drops all of it, and says so.
    """

    kind: Literal["ForwardBackward"] = "ForwardBackward"


class OptimStep(_Request):
    """Reduce and divide what is pending, once, and step. A gradient that is not finite skips the step: nothing changes, what was
    pending is dropped, and the skip is counted."""

    kind: Literal["OptimStep"] = "OptimStep"
    optim: OptimParams = OptimParams()


class TrainStep(_BatchRequest, _Steps):
    """`ForwardBackward`, then `OptimStep` with all that is pending, for each mini-batch of each epoch; base of the two training requests.

    `Completed.result["steps"]` has each step's metrics, `["metrics"]` all of them together. A step whose gradient is not finite is skipped, as in
    `OptimStep`: its metrics are `skipped` = 1, the others go on, and the request fails only if all were.
    """

    optim: OptimParams


class TrainMerged(TrainStep):
    """A training step towards `version`; the new state is durable in `checkpoint_dir` before `Completed`."""

    kind: Literal["TrainMerged"] = "TrainMerged"
    version: int = Field(ge=1)
    checkpoint_dir: str
    delete_after: tuple[str, ...] = ()
    """Checkpoints that are deleted once this one is whole."""


class TrainLora(TrainStep):
    """A training step, then the adapter in PEFT format in `output_dir`."""

    kind: Literal["TrainLora"] = "TrainLora"
    output_dir: str


class SaveCheckpoint(_Request):
    """Write adapters (PEFT format in `<dir>/adapter`) or full weights, optimizer and version; fsync; marker last, then the rename."""

    kind: Literal["SaveCheckpoint"] = "SaveCheckpoint"
    version: int = Field(ge=0)
    checkpoint_dir: str
    client_state: ClientState = {}
    delete_after: tuple[str, ...] = ()
    """Checkpoints that are deleted once this one is whole."""


class LoadCheckpoint(_Request):
    """Restore what `SaveCheckpoint` or `TrainMerged` wrote. Pending gradients are dropped; the result says of how many batches."""

    kind: Literal["LoadCheckpoint"] = "LoadCheckpoint"
    checkpoint_dir: str


class LoadAdapter(_Request):
    """Put a PEFT adapter in the place of the trainer's; the optimizer starts afresh, pending gradients are dropped."""

    kind: Literal["LoadAdapter"] = "LoadAdapter"
    adapter_dir: str


class ExportHf(_Request):
    """Write the merged model as an HF checkpoint; the folder appears whole or not at all."""

    kind: Literal["ExportHf"] = "ExportHf"
    output_dir: str
    shard_bytes: int = Field(gt=0)


class ReleaseMemory(_Request):
    """Move weights, adapters, optimizer state and pending gradients to host memory and free the device's; transfer groups stay joined.

    The next request that needs them brings them back. `Completed.result` has `offloaded_bytes` and `resident_bytes` (what is left: 0)
    of rank 0.
    """

    kind: Literal["ReleaseMemory"] = "ReleaseMemory"


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
    part: tuple[int, ...] | None = None
    """Indices of the tensors that updates of the changed ones alone bring, to which `layout` then refers. None: the whole manifest; what
    was said of a part no longer counts."""


class SendWeights(_Request):
    """Export, merge and send every tensor of the manifest to every group, in manifest order or in that of `UseLayout`.

    `Completed` carries one int64 buffer [N]: the digest of each tensor sent, in manifest order.
    """

    kind: Literal["SendWeights"] = "SendWeights"
    version: int = Field(ge=0)
    changed_only: bool = False
    """Send the part that `UseLayout.part` named."""


class StageBatch(Message):
    """The batch of a job that waits behind a running one: receive and check it meanwhile. Not a request: it is never answered, and what is wrong
    with the batch is said when its job comes, which names it (`staged`)."""

    kind: Literal["StageBatch"] = "StageBatch"
    job_id: str
    tensors: BatchSpecs
    """Specs of the buffers, as in the job."""
    loss: LossSpec | None
    """The job's, which decides what is refused. None: a forward pass."""
    allowed_token_ids: TokenIds | None = None
    """The forward pass's."""


class DropBatch(Message):
    """Nobody will ask for this staged batch. Not a request."""

    kind: Literal["DropBatch"] = "DropBatch"
    job_id: str


class AbortSend(Message):
    """Abort the transfer in flight at once (answered by the SendWeights' own `Failed`). Not a request."""

    kind: Literal["AbortSend"] = "AbortSend"
    reason: str
    request_id: str | None = None
    """The request that it ends: an `OpenTransferGroup` or a `SendWeights`. Another one goes on. None: whichever is under way."""


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

    `Completed.result["layout"]` is the `WireLayout` that this replica would like (absent if it takes manifest order only),
    `["changed"]` the `ManifestPart` that brings `manifest.changed` (absent if that is everything).
    Ends in `Failed(code="plan_refused")` naming the tensors where a name, dtype or shape does not fit, or a weight of the model
    would get no data.
    """

    kind: Literal["PrepareUpdate"] = "PrepareUpdate"
    version: int = Field(ge=0)
    manifest: Manifest


class ReceiveWeights(_Request):
    """Pause, start, receive, finish, then digest the live tensors. Generation stays paused. In mode "shadow": receive beside the live tensors
    and digest what came, while generation goes on; nothing changes, whatever fails. `SwapWeights` comes next.

    `Progress(phase="paused")` once paused, and with it `Progress(phase="applying")`, before the first receive: until then a failure
    leaves @N serving. `Completed` carries one int64 buffer [N] of digests in manifest order, and
    `result = {"seconds": {...}, "unverified": {name: reason}, "spans": ...}`.
    """

    kind: Literal["ReceiveWeights"] = "ReceiveWeights"
    version: int = Field(ge=0)
    pause_mode: PauseMode = "keep"
    mode: PublicationMode = "in_place"
    """"shadow": into the room that `PrepareShadow` made."""
    direct: bool = False
    """The trainer sends in the layout that this replica asked for in its answer to `PrepareUpdate`."""
    base_version: int | None = Field(default=None, ge=0)
    """None: the whole manifest comes. Else only the part of the changed tensors, on top of this version; a replica that does not serve
    exactly that answers `Failed(code="base_missing")`, and nothing pauses."""


class PrepareShadow(_Request):
    """Make room beside the live tensors for the update that `ReceiveWeights(mode="shadow")` will bring. Generation goes on.

    `Completed.result["why_not"]` is None, or says why it must be received in place: it does not fit, or nothing is served here that would be
    worth keeping.
    """

    kind: Literal["PrepareShadow"] = "PrepareShadow"
    version: int = Field(ge=0)
    direct: bool = False
    base_version: int | None = Field(default=None, ge=0)
    """As in `ReceiveWeights`."""
    budget_bytes: int = Field(ge=0)
    """Most bytes that each worker may use beside its model."""


class SwapWeights(_Request):
    """Pause, put what came beside the live tensors into them, then digest those. Generation stays paused, but see `commit_if`.

    `Progress` as of `ReceiveWeights(mode="in_place")`: before "applying" a failure leaves @N serving, after it the replica is poisoned. "paused" may
    come as soon as vLLM is told to schedule nothing more: the swap waits behind the step that it had queued.
    `Completed` carries the digests of the live tensors, as there, and `result["committed"]`.
    """

    kind: Literal["SwapWeights"] = "SwapWeights"
    version: int = Field(ge=0)
    pause_mode: PauseMode = "keep"
    commit_if: bytes | None = None
    """For the only replica: the trainer's digests, int64 in manifest order. If the live tensors have exactly these it moves its alias and resumes at
    once, and `CommitUpdate` finds that done."""


class CheckCanary(_Request):
    """Score these tokens with the weights that were just received, before anybody is served them.

    `Completed` carries one float32 buffer [T], the log-prob of each token given those before it (0 for the first). None where this replica was
    serving: its engine is not let run between two versions, and `result["skipped"]` says so.
    """

    kind: Literal["CheckCanary"] = "CheckCanary"
    version: int = Field(ge=0)
    tokens: tuple[int, ...] = Field(min_length=2)


class CommitUpdate(_Request):
    """Move the alias to `version` and resume."""

    kind: Literal["CommitUpdate"] = "CommitUpdate"
    version: int = Field(ge=0)


class AbortUpdate(Message):
    """Abort the update in flight at once: before the first byte @N goes on; after it the replica is poisoned and serves
    nothing until a full resync. Not a request; answered by the ReceiveWeights' own terminal message, if one is in flight."""

    kind: Literal["AbortUpdate"] = "AbortUpdate"
    reason: str
    request_id: str | None = None
    """The replica's latest `ReceiveWeights` or `SwapWeights`, which is meant; any other update goes on. If it has not come yet, it fails when it
    does. None: whichever update is in flight."""


class LeaveAlias(_Request):
    """Serve nothing (503) until the next commit: the other replicas go on without this one, so it would show another version than they."""

    kind: Literal["LeaveAlias"] = "LeaveAlias"
    reason: str


class StartTrainer(_Request):
    """Launcher: start the trainer's processes of this host unless they run. `Completed` once they are started, not once they are ready."""

    kind: Literal["StartTrainer"] = "StartTrainer"


class StopTrainer(_Request):
    """Launcher: `Completed` once no process of the trainer is left on this host."""

    kind: Literal["StopTrainer"] = "StopTrainer"
    grace_s: float = Field(ge=0)
    """How long they get to end by themselves, having been sent `Shutdown`, before they are ended by signals."""


class Shutdown(Message):
    """End the node in order. Not a request."""

    kind: Literal["Shutdown"] = "Shutdown"
    reason: str = "the run is over"


# ---------------------------------------------------------------- nodes -> orchestrator


class Hello(Message):
    """First message of every peer, and of every new connection of its."""

    kind: Literal["Hello"] = "Hello"
    role: Role
    node_id: NodeId
    incarnation: str = Field(max_length=64)
    """Random, new for every process, and told to nobody else: it proves that a new connection is the same process's."""
    run_token: str = Field(max_length=1024)
    """The run's token; a peer of another run is rejected."""
    packages: dict[str, str] = Field(default={}, max_length=64)
    """Versions: torch, nccl, vllm and its dialect, megatron-core, ..."""
    gpus: tuple[str, ...] = Field(default=(), max_length=64)
    pid: int = 0


class Welcome(Message):
    """The orchestrator took the peer in."""

    kind: Literal["Welcome"] = "Welcome"
    heartbeat_s: float
    incarnation: str = ""
    """The orchestrator's process. Another one than before has given up what was under way; empty: not said."""


class Rejected(Message):
    """The orchestrator did not take the peer in."""

    kind: Literal["Rejected"] = "Rejected"
    reason: str
    retry: bool = False
    """The reason may pass by itself: say Hello again."""


class Ready(Message):
    """The node's model is loaded and it takes requests; inference nodes say where they serve."""

    kind: Literal["Ready"] = "Ready"
    node_id: str
    detail: Json = {}
    """trainer: {"model", "parallel": {...}, "trainable_parameters", "memory"}; launcher: {"memory", "node_rank", "num_nodes"}; inference: {"base_url", "name", "workers", "model", "model_dtype"}"""


class InferenceDetail(BaseModel):
    """What the orchestrator uses of an inference node's `Ready.detail`."""

    base_url: str = Field(max_length=1024)
    workers: int = Field(default=1, ge=1, le=4096)
    name: str | None = None
    """The alias that it serves."""
    restarted: int = Field(default=0, ge=0)


class TrainerDetail(BaseModel):
    """What the orchestrator uses of a trainer's `Ready.detail`."""

    memory: Literal["resident", "offload", "exit"] = "resident"


class LauncherDetail(TrainerDetail):
    """What the orchestrator uses of a launcher's `Ready.detail`."""

    num_nodes: int = Field(default=1, ge=1, le=65536)


READY_DETAILS: dict[str, type[BaseModel]] = {
    "inference": InferenceDetail, "trainer": TrainerDetail, "launcher": LauncherDetail,
}  # fmt: skip
"""Role -> what its `Ready.detail` must hold."""


class Unready(Message):
    """The node lives, but what it needs does not (vLLM ended); it takes no requests until its next `Ready`."""

    kind: Literal["Unready"] = "Unready"
    node_id: str
    reason: str


class NodeEnded(Message):
    """A launcher's: no process of the node is left, and nobody had asked for that. It need not be waited for until its silence tells."""

    kind: Literal["NodeEnded"] = "NodeEnded"
    node_id: str
    """The node's, not the launcher's."""
    code: int
    """Exit code; negative: the signal."""


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
    detail: Json = {}


class Completed(Message):
    """Terminal: done. Buffers may follow, as `tensors` says."""

    kind: Literal["Completed"] = "Completed"
    request_id: str
    result: Json = {}
    tensors: BatchSpecs = ()


class Failed(Message):
    """Terminal: not done. `remedy` says what to do next."""

    kind: Literal["Failed"] = "Failed"
    request_id: str
    code: ErrorCode
    node: str
    phase: str
    message: str
    remedy: str
    steps_taken: int = Field(default=0, ge=0)
    """Training: optimizer steps of this request that were taken before and stand."""


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
    detail: Json = {}


class Status(Message):
    """Answer to `GetStatus`."""

    kind: Literal["Status"] = "Status"
    name: str
    version: int | None
    publication: str
    """State of the publication machine."""
    nodes: tuple[NodeStatus, ...]
    queued_jobs: int
    dropped: dict[str, int] = {}
    """Peer -> how many of its messages were dropped as malformed or not allowed; "strangers": of connections that have not said Hello."""


AnyMessage = (
    SubmitJob | CancelJob | GetStatus | Subscribe | StopRun
    | Forward | ForwardBackward | OptimStep | ExportHf
    | TrainMerged | TrainLora | SaveCheckpoint | LoadCheckpoint | PlanPublication | OpenTransferGroup | UseLayout | SendWeights | AbortSend
    | StageBatch | DropBatch
    | LoadAdapter | ReleaseMemory | StartTrainer | StopTrainer
    | JoinTransferGroup | LeaveTransferGroup | PrepareUpdate | PrepareShadow | ReceiveWeights | SwapWeights | CheckCanary | CommitUpdate | AbortUpdate | LeaveAlias | Shutdown
    | Hello | Welcome | Rejected | Ready | Unready | NodeEnded | Heartbeat | Progress | Completed | Failed | Cancelled | Status
)  # fmt: skip
Terminal = Completed | Failed | Cancelled

ANY_MESSAGE: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="kind")])
