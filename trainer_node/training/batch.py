"""Decodes and checks a training message's buffers. No collective, no model. `packing` cuts a batch.

Shapes: S = sequences, T = tokens of all sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from orchestrator.errors import ConfigError, ErrorCode
from orchestrator.protocol.messages import (
    BATCH_TENSORS,
    FORWARD_TENSORS,
    MIN_TEMPERATURE,
    OPTIONAL_BATCH_TENSORS,
    OPTIONAL_FORWARD_TENSORS,
    LossSpec,
    TensorSpec,
)

CPU = torch.device("cpu")
_FLOATS = ("loss_mask", "advantages", "sampler_logprobs")


class BatchError(ConfigError):
    """A batch that cannot be trained on; names the sequence and the field."""


class TooLong(BatchError):
    """A sequence that does not fit into the trainer's memory."""

    code = ErrorCode.TOO_LONG


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A checked batch on the CPU; fields as in `messages.BATCH_TENSORS` and
    `OPTIONAL_BATCH_TENSORS`."""

    tokens_T: torch.Tensor
    loss_mask_T: torch.Tensor
    advantages_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    lengths: tuple[int, ...]
    old_logprobs_T: torch.Tensor | None = None
    reference_logprobs_T: torch.Tensor | None = None
    routed_experts_T: torch.Tensor | None = None
    """[T, layers, top_k]."""
    temperatures_T: torch.Tensor | None = None
    """What the sampler divided the logits by; None: 1 everywhere."""
    rewards_T: torch.Tensor | None = None
    versions_T: torch.Tensor | None = None
    """int32. Of each sampled token; see OPTIONAL_BATCH_TENSORS."""
    values_T: torch.Tensor | None = None
    """The value head's, before the job's first step; 0 where the mask is 0."""
    returns_T: torch.Tensor | None = None
    """What the values should be."""
    scored_T: torch.Tensor | None = None
    """Tokens whose log-probs are wanted, all those with loss among them; None: those with loss."""

    def scoring_all(self) -> Batch:
        """Return the same batch, which asks for the log-prob of every token that is predicted."""
        return replace(self, scored_T=predicted(self.lengths))

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.loss_mask_T.count_nonzero())

    @property
    def num_loss_sequences(self) -> int:
        """Sequences with at least one token that carries loss."""
        starts = np.cumsum(self.lengths) - np.array(
            self.lengths
        )  # each has a token at least, as `reduceat` needs
        return int(np.logical_or.reduceat(self.loss_mask_T.numpy() != 0, starts).sum())


def decode_batch(
    *,
    specs: Sequence[TensorSpec],
    buffers: Sequence[bytes],
    vocab_size: int,
    max_length: int,
    loss: LossSpec,
) -> Batch:
    """Raw buffers to a checked batch.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    arrays = _arrays(specs, buffers, BATCH_TENSORS, OPTIONAL_BATCH_TENSORS)
    check_batch(arrays, vocab_size=vocab_size, max_length=max_length, loss=loss)
    names = [n for n in (*_FLOATS, *OPTIONAL_BATCH_TENSORS) if n in arrays]
    tensors: dict[str, Any] = {f"{n}_T": torch.from_numpy(arrays[n]) for n in names}
    lengths = tuple(int(n) for n in arrays["sequence_lengths"])
    return Batch(
        tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)), lengths=lengths, **tensors
    )


def decode_forward(
    *,
    specs: Sequence[TensorSpec],
    buffers: Sequence[bytes],
    vocab_size: int,
    max_length: int,
    allowed_token_ids: Sequence[int] | None,
) -> Batch:
    """Raw buffers of a forward pass to a batch that asks for every token but the first of each
    sequence.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    arrays = _arrays(specs, buffers, FORWARD_TENSORS, OPTIONAL_FORWARD_TENSORS)
    _check_sequences(arrays, vocab_size=vocab_size, max_length=max_length)
    if allowed_token_ids is not None:
        _check_allowed(allowed_token_ids, vocab_size)
    lengths = tuple(int(n) for n in arrays["sequence_lengths"])
    mask_T, given = predicted(lengths), arrays.get("temperatures")
    return Batch(
        tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask_T=mask_T,
        advantages_T=torch.zeros_like(mask_T),
        sampler_logprobs_T=torch.zeros_like(mask_T),
        temperatures_T=torch.from_numpy(given) if given is not None else None,
        lengths=lengths,
    )


def predicted(lengths: Sequence[int]) -> torch.Tensor:
    """Return 1 for every token that the model predicts, [T]: all but each sequence's first."""
    mask_T = torch.ones(sum(lengths))
    mask_T[torch.from_numpy(np.cumsum([0, *lengths[:-1]]))] = 0
    return mask_T


def _arrays(
    specs: Sequence[TensorSpec],
    buffers: Sequence[bytes],
    required: dict[str, str],
    optional: dict[str, str],
) -> dict[str, np.ndarray]:
    found = [(s.name, s.dtype) for s in specs]
    wanted = required | {n: d for n, d in optional.items() if any(s.name == n for s in specs)}
    if found != list(wanted.items()) or len(buffers) != len(specs):
        raise BatchError(
            f"a batch has the tensors {list(wanted.items())} in this order; got {found}"
        )
    arrays = {
        s.name: np.frombuffer(b, dtype=s.dtype).copy() for s, b in zip(specs, buffers, strict=True)
    }
    for spec in specs:
        if arrays[spec.name].size != spec.numel or len(spec.shape) != (
            3 if spec.name == "routed_experts" else 1
        ):
            raise BatchError(
                f"{spec.name} holds {arrays[spec.name].shape} elements but its spec says "
                f"{spec.shape}"
            )
    return {s.name: arrays[s.name].reshape(s.shape) for s in specs}


def check_fits(batch: Batch, longest: int | None, way: str) -> None:
    """Refuse a sequence for which the GPU's memory does not suffice, before anything runs.

    Args:
        longest: tokens of the longest sequence that fits. None: unknown.
        way: how that one would run.

    Raises:
        TooLong: names the sequence, its tokens and the number that fits.
    """
    for number, length in enumerate(batch.lengths):
        if longest is not None and length > longest:
            raise TooLong(
                f"sequence_lengths: sequence {number} has {length:,} tokens; this trainer holds "
                f"{longest:,} {way}; raise parallel.context"
            )


def check_text(batch: Batch, tower_tokens: Sequence[int]) -> None:
    """Refuse tokens that stand for an image, a video or a sound: no batch brings one.

    Raises:
        BatchError: names the sequence and the token.
    """
    places = torch.isin(batch.tokens_T, torch.tensor(tower_tokens, dtype=torch.int32)).nonzero()
    if tower_tokens and len(places):
        place = int(places[0])
        sequence = int(np.searchsorted(np.cumsum(batch.lengths), place, side="right"))
        raise BatchError(
            f"tokens: sequence {sequence} has token {int(batch.tokens_T[place])}, which stands for "
            "an image, a video or a sound; the trainer trains on text only"
        )


def check_routing(batch: Batch, *, num_layers: int, num_experts: int, top_k: int) -> None:
    """Refuse routed experts that are not this model's.

    Args:
        num_experts: 0 for a dense model.

    Raises:
        BatchError: names the shape, or the sequence's index and the layer.
    """
    if batch.routed_experts_T is None:
        return
    experts = batch.routed_experts_T.numpy()
    if not num_experts or experts.shape[1:] != (num_layers, top_k):
        raise BatchError(
            f"every sequence: routed_experts is {experts.shape}, but the model has {num_layers} "
            f"layers with {num_experts} experts, of which "
            f"each token takes {top_k}: it must be [tokens, layers, experts per token]"
        )
    ordered = np.sort(experts, axis=-1)
    bad = (
        (ordered[..., 0] < 0)
        | (ordered[..., -1] >= num_experts)
        | (np.diff(ordered, axis=-1) == 0).any(axis=-1)
    )
    for t, layer in np.argwhere(bad)[:1]:
        i = int(np.searchsorted(np.cumsum(batch.lengths), t, side="right"))
        raise BatchError(
            f"sequence {i}: routed_experts[{t - sum(batch.lengths[:i])}] in layer {layer} is "
            f"{experts[t, layer].tolist()}, not {top_k} "
            f"different experts below {num_experts}"
        )


def _check_sequences(
    arrays: dict[str, np.ndarray], *, vocab_size: int, max_length: int
) -> np.ndarray:
    """Refuse lengths, token ids and temperatures that do not fit; returns each sequence's first
    row, [S]. One temperature or version for each sequence becomes one for each token."""
    lengths, tokens = arrays["sequence_lengths"], arrays["tokens"]
    if len(lengths) == 0 or len(tokens) == 0:
        raise BatchError(
            "the batch is empty: sequence_lengths and tokens need at least one element"
        )
    for i in np.flatnonzero(lengths < 1)[:1]:
        raise BatchError(
            f"sequence {i}: sequence_lengths is {lengths[i]}; a sequence has at least one token"
        )
    for i in np.flatnonzero(lengths > max_length)[:1]:
        raise BatchError(
            f"sequence {i}: sequence_lengths is {lengths[i]}, longer than the model's {max_length}"
        )
    total = int(lengths.sum(dtype=np.int64))
    either = (len(lengths), total)
    sizes = {"sequence_lengths": either[:1], "temperatures": either, "versions": either}
    for name in arrays:
        if len(arrays[name]) not in sizes.get(name, (total,)):
            raise BatchError(
                f"sequence {len(lengths) - 1}: {name} has {len(arrays[name])} elements but "
                f"sequence_lengths sum to {total}"
            )
    for name in ("temperatures", "versions"):
        if name in arrays and len(arrays[name]) == len(lengths):
            arrays[name] = np.repeat(arrays[name], lengths)
    if "temperatures" in arrays:
        _check_temperatures(arrays)
    _refuse(
        arrays,
        (tokens < 0) | (tokens >= vocab_size),
        "tokens",
        f"is outside the vocabulary of {vocab_size}",
    )
    starts: np.ndarray = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _check_temperatures(arrays: dict[str, np.ndarray]) -> None:
    """Refuse temperatures that nothing is sampled at."""
    given = arrays["temperatures"]
    _refuse(arrays, ~np.isfinite(given), "temperatures", "is not finite")
    why = f"is below {MIN_TEMPERATURE}, the lowest temperature that vLLM samples at"
    greedy = (
        "is greedy decoding, which draws nothing: its tokens have probability 1 and no gradient; "
        "sample to train"
    )
    _refuse(arrays, given == 0, "temperatures", greedy)
    _refuse(arrays, given < np.float32(MIN_TEMPERATURE), "temperatures", why)


def _refuse(arrays: dict[str, np.ndarray], bad: np.ndarray, field: str, why: str) -> None:
    """Raise for the first bad row of `field`, with its sequence and its place in it."""
    for t in np.flatnonzero(bad)[:1]:
        lengths = arrays["sequence_lengths"]
        ends = np.cumsum(lengths, dtype=np.int64)
        i = int(np.searchsorted(ends, t, side="right"))
        raise BatchError(
            f"sequence {i}: {field}[{t - (ends[i] - lengths[i])}] = {arrays[field][t]} {why}"
        )


def check_batch(
    arrays: dict[str, np.ndarray], *, vocab_size: int, max_length: int, loss: LossSpec
) -> None:
    """Every refusal in one place.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    starts = _check_sequences(arrays, vocab_size=vocab_size, max_length=max_length)
    tokens, mask = arrays["tokens"], arrays["loss_mask"]
    for name in arrays:
        if name not in FORWARD_TENSORS:
            _refuse(arrays, ~np.isfinite(arrays[name]), name, "is not finite")
    _refuse(arrays, (mask != 0) & (mask != 1), "loss_mask", "is neither 0 nor 1")
    first = np.zeros(len(tokens), dtype=bool)
    first[starts] = True
    _refuse(
        arrays, first & (mask != 0), "loss_mask", "marks the first token, which nothing predicts"
    )
    if loss.allowed_token_ids is not None:
        _check_allowed(loss.allowed_token_ids, vocab_size)
        outside = (mask == 1) & ~np.isin(tokens, loss.allowed_token_ids)
        _refuse(
            arrays, outside, "tokens", "carries loss but is not among the loss's allowed_token_ids"
        )
    if loss.kl is not None and loss.kl.reference == "given" and "reference_logprobs" not in arrays:
        raise BatchError(
            "every sequence: the loss's kl.reference is given, but the batch has no "
            "reference_logprobs"
        )
    if ("rewards" in arrays) != (loss.value is not None):
        raise BatchError(
            "every sequence: loss.value makes advantages of the batch's rewards, and there "
            + ("are rewards, but no loss.value" if "rewards" in arrays else "are none (gae_batch)")
        )
    if "rewards" in arrays:
        why = "is on a token that the policy did not sample; give it to the last sampled one before"
        _refuse(arrays, (mask == 0) & (arrays["rewards"] != 0), "rewards", why)


def _check_allowed(allowed: Sequence[int], vocab_size: int) -> None:
    wrong = [i for i in allowed if not 0 <= i < vocab_size]
    if wrong or not allowed:
        raise BatchError(
            f"allowed_token_ids must be a non-empty set of ids below {vocab_size}; got "
            f"{wrong[:5] or 'none'}"
        )


def check_accumulation(grad_accumulation_sequences: int | None, *, dp_size: int) -> None:
    """Refuse a number that does not divide over the data-parallel ranks; None is their number.

    Raises:
        BatchError: with the numbers.
    """
    wanted = dp_size if grad_accumulation_sequences is None else grad_accumulation_sequences
    if wanted < 1 or wanted % dp_size:
        near = sorted(
            {max(dp_size, wanted // dp_size * dp_size), (wanted // dp_size + 1) * dp_size}
        )
        raise BatchError(
            f"grad_accumulation_sequences = {wanted} is not a multiple of the data-parallel size "
            f"{dp_size}; "
            f"choose {' or '.join(map(str, near))}"
        )
