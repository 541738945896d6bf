"""Losses, optimizer parameters, and the buffers of a batch.

Shapes: S = sequences, T = tokens of all sequences, laid end to end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from orchestrator.protocol.messages.base import TensorSpec
from orchestrator.protocol.messages.mistakes import UserInput

ParamValue = bool | int | float | str
TokenIds = Annotated[tuple[int, ...], Field(max_length=2**20, fail_fast=True)]
BatchSpecs = Annotated[tuple[TensorSpec, ...], Field(max_length=16, fail_fast=True)]
NormalizeBy = Literal["tokens", "sequences"] | Annotated[float, Field(gt=0, allow_inf_nan=False)]

LOSS_PARAMETERS: dict[str, dict[str, float | None]] = {
    "cross_entropy": {},
    "linear": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "truncated_importance_sampling": {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 2.0},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "masked_importance_sampling": {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 2.0},
    "icepop": {"clip_low": 0.2, "clip_high": 0.2, "ratio_low": 0.5, "ratio_cap": 5.0},
    "token_rejection": {"clip_low": 0.2, "clip_high": 0.2, "ratio_low": 0.5, "ratio_cap": 2.0},
    "sequence_rejection": {"clip_low": 0.2, "clip_high": 0.2, "ratio_low": 0.98, "ratio_cap": 1.02},
    "dppo": {"clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 20.0},
}
"""Built-in loss -> its parameters and their defaults. `trainer_node/training/losses.py` defines
each."""

_ALL_PARAMETERS = ("clip_low", "clip_high", "dual_clip", "ratio_low", "ratio_cap")


class KlSpec(UserInput):
    """A penalty on the distance to a reference policy, in the loss or in the reward.

    The term is `coefficient * sum_t estimator(log p_t, log p_t(reference))`. In the loss, the
    gradients of `k2` and `k3` pull towards the reference. That of `k1` has mean 0, so `k1` is for
    logging there.
    """

    coefficient: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """0: the trainer logs the divergence only."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With r = p(reference) / p: k1 is -log r, k2 is (log r)^2 / 2, k3 is r - 1 - log r (Schulman,
    joschu.net/blog/kl-approx.html). With `in_reward` it is k1 unless given."""
    reference: Literal["base", "given", "adapter"] = "base"
    """base: the model with its adapters off. given: the batch's `reference_logprobs`.
    adapter: the model with the adapter in `adapter_dir`."""
    adapter_dir: str | None = Field(default=None, min_length=1)
    """adapter: a PEFT folder on the trainer's hosts, with the trainer's LoRA settings. The trainer
    reads it once."""
    in_reward: bool = False
    """Whether the penalty is taken from the rewards, not added to the loss. p is then the policy
    before the step: the batch's `old_logprobs`, or else the sampler's log-probs. With a value head
    each token's reward has its own penalty. Otherwise the loop takes an answer's sum from its
    reward."""

    @model_validator(mode="before")
    @classmethod
    def _estimator_of_rewards(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("in_reward") is True:
            return {"estimator": "k1", **data}
        return data

    @model_validator(mode="after")
    def _adapter_is_named(self) -> KlSpec:
        if (self.reference == "adapter") != (self.adapter_dir is not None):
            raise ValueError(
                "kl.adapter_dir names the PEFT folder of kl.reference = 'adapter'; "
                "give both or neither"
            )
        return self


class ValueSpec(UserInput):
    """A value head (a critic), and the advantages that it gives.

    The batch brings `rewards`. Before a job's first step the trainer computes each token's value,
    and from both the advantages: generalised advantage estimation. The loss gets
    `coefficient / 2 * sum_t (value_t - return_t)^2`, clipped. `trainer.value_head` makes the head.
    """

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a later token's reward."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda. 1: advantage = discounted rewards - value. Lower: less variance, and more bias
    by the values of later tokens. Below 1, the reward at an answer's end hardly reaches the
    beginning of a long answer."""
    coefficient: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Weight of the value loss next to the policy's. 0: only measure it."""
    clip: float | None = Field(default=0.2, gt=0, allow_inf_nan=False)
    """A value counts as at most this far from the one before the job's first step. None: off."""
    whiten: bool = True
    """Whether the job's advantages are shifted and scaled to mean 0 and standard deviation 1."""
    trains_model: bool = True
    """Whether the value loss also trains the model below the head. False: only the head."""


class LossSpec(UserInput):
    """A loss and its parameters.

    A loss is a sum over tokens. The optimizer step divides it once, as `normalize_by` says. The
    parameters left out take the defaults of `LOSS_PARAMETERS`; those that the loss does not have
    are refused. A loss of the user's (`splice.losses.register_loss`) takes its parameters in
    `params`.
    """

    name: str = Field(default="grpo", pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """A loss of `LOSS_PARAMETERS`, or one of your own. `splice train` takes
    truncated_importance_sampling unless the file names one."""
    clip_low: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]. dppo: bounds of the
    change of a token's probability."""
    clip_high: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """See `clip_low`."""
    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """ppo: lower bound, times the advantage, of a token with a negative advantage. None: off."""
    ratio_low: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """icepop and the rejections: a token or sequence with a smaller ratio of trainer against
    sampler is left out."""
    ratio_cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest ratio of trainer against sampler. truncated_importance_sampling and dppo cut larger
    ones to it; the others leave out what has a larger one."""
    params: dict[str, ParamValue] = Field(default={}, max_length=64)
    """Parameters of a registered loss."""
    kl: KlSpec | None = None
    value: ValueSpec | None = None
    entropy_bonus: float = Field(default=0.0, allow_inf_nan=False)
    """The loss gets `- entropy_bonus * sum_t entropy_t`."""
    normalize_by: NormalizeBy = "tokens"
    """Divisor: the number of loss tokens, of sequences with loss tokens (gspo), or this
    constant."""
    allowed_token_ids: TokenIds | None = None
    """The ids that the sampler could draw, over which log-probs are normalised. None: all ids."""
    max_logprob_gap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest mean |log p(trainer) - log p(sampler)| of the job's first step, in nats a token.

    Above it the job fails before the step with code logprob_gap. Weights and optimizer keep their
    state; pending gradients are dropped. None: no bound. On the first step after a publication or
    load, the result's `warnings` name a gap that the trainer's dtype cannot explain.
    """
    off_policy: bool = False
    """Some samples are of an older version: only a large gap gives a warning."""

    @property
    def needs_reference_passes(self) -> bool:
        """Whether the trainer computes the reference's log-probs in separate passes."""
        return self.kl is not None and self.kl.reference != "given"

    @property
    def needs_other_passes(self) -> bool:
        """Whether the trainer runs passes over the batch before those that train."""
        return self.needs_reference_passes or self.value is not None

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
        foreign = [
            p for p in _ALL_PARAMETERS if getattr(self, p) is not None and p not in (known or {})
        ]
        if foreign:
            where = (
                f"it takes {sorted(known) or 'none'}" if known is not None else "put them in params"
            )
            raise ValueError(f"{foreign} are no parameters of the loss {self.name}; {where}")
        if known is not None and self.params:
            raise ValueError(
                f"params is for losses of your own; {self.name} is built in "
                f"and takes {sorted(known) or 'none'}"
            )
        missing = [p for p in known or {} if p != "dual_clip" and getattr(self, p) is None]
        if missing:
            raise ValueError(f"{missing} of the loss {self.name} must be numbers, not None")
        return self


class OptimParams(UserInput):
    """Parameters of one AdamW step."""

    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Learning rate."""
    value_lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate of the value head. None: `lr`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of their squares."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the mean of squares."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of a weight, times `lr`, that each step takes off."""
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The gradient's largest norm; a longer one is scaled down. None: no limit."""


BATCH_TENSORS: dict[str, str] = {
    "tokens": "int32",
    "sequence_lengths": "int32",
    "loss_mask": "float32",
    "advantages": "float32",
    "sampler_logprobs": "float32",
}
"""Buffer of a batch -> dtype, in wire order. `sequence_lengths` is [S], the others are [T].

Row t describes the *prediction of* token t. loss_mask[t] = 1 where the policy sampled token t, so
the first token of a sequence has mask 0. advantages and sampler_logprobs are 0 where the mask is 0.
"""

OPTIONAL_BATCH_TENSORS: dict[str, str] = {
    "old_logprobs": "float32",
    "reference_logprobs": "float32",
    "routed_experts": "int32",
    "temperatures": "float32",
    "rewards": "float32",
    "versions": "int32",
}
"""Buffers that may follow BATCH_TENSORS, in this order. They are [T], and 0 where the mask is 0.

old_logprobs: the trainer's own, from `Forward` before the first step on this batch. Ratios then use
    them instead of the sampler's.
reference_logprobs: of the reference policy, for `KlSpec(reference="given")`.
routed_experts: [T, layers, top_k], the experts that the sampler's routers chose for token t
    *itself*. The trainer's routers use them, in the policy and in a reference of base weights
    (router replay, Ma et al. 2025, arXiv:2510.11370).
temperatures: [T] or [S], the divisor of the sampler's logits. The trainer then computes all
    log-probs and entropies, also a reference model's, from softmax(logits / temperature). Each must
    be finite and at least MIN_TEMPERATURE, also where the mask is 0. Without the buffer it is 1.
rewards: of each sampled token, for `LossSpec.value`, which computes the advantages.
versions: [T] or [S], the version N that sampled the token, with keys and values of N only; -1 - N
    after a swap within the sequence, or where this is not known. `numerics = "exact"` compares the
    former.
"""

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one. At 0 it is greedy: the likeliest token has
probability 1."""

FORWARD_TENSORS: dict[str, str] = {"tokens": "int32", "sequence_lengths": "int32"}
"""Buffers that a forward pass needs."""

OPTIONAL_FORWARD_TENSORS: dict[str, str] = {"temperatures": "float32"}
"""Buffers that may follow FORWARD_TENSORS, as in OPTIONAL_BATCH_TENSORS."""

FORWARD_RESULTS: dict[str, str] = {"logprobs": "float32", "entropy": "float32"}
"""Buffers that a forward pass returns, [T] each, with the rows of BATCH_TENSORS. A
`ForwardBackward` that asks returns the first.

log p(token t | tokens before it), and the entropy in nats of the distribution of token t, both at
the batch's temperatures. 0 for the first token of a sequence.
"""


def batch_specs(
    *,
    num_sequences: int,
    num_tokens: int,
    optional: Sequence[str] = (),
    routing: tuple[int, int] = (0, 0),
    by_token: Collection[str] = (),
) -> tuple[TensorSpec, ...]:
    """Return the `tensors` field of a training message for a batch of this size.

    Args:
        optional: which of OPTIONAL_BATCH_TENSORS follow.
        routing: the model's layers and experts per token, for routed_experts.
        by_token: which of temperatures and versions are [T]; the others are [S].
    """
    shapes: dict[str, tuple[int, ...]] = {
        "sequence_lengths": (num_sequences,),
        "routed_experts": (num_tokens, *routing),
    }
    shapes |= dict.fromkeys({"temperatures", "versions"} - set(by_token), (num_sequences,))
    wanted = BATCH_TENSORS | {n: d for n, d in OPTIONAL_BATCH_TENSORS.items() if n in optional}
    return tuple(
        TensorSpec(name=n, dtype=d, shape=shapes.get(n, (num_tokens,)))  # type: ignore[arg-type]
        for n, d in wanted.items()
    )


def forward_specs(
    *,
    num_sequences: int,
    num_tokens: int,
    optional: Sequence[str] = (),
    by_token: Collection[str] = (),
) -> tuple[TensorSpec, ...]:
    """Return the `tensors` field of a forward message. Arguments as in `batch_specs`."""
    known = FORWARD_TENSORS | OPTIONAL_FORWARD_TENSORS
    specs = batch_specs(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        optional=optional,
        by_token=by_token,
    )
    return tuple(spec for spec in specs if spec.name in known)
