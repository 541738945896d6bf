"""A training message's buffers to micro-batches: decode, refuse what is wrong, pad. No collective, no model.

Shapes: S = sequences, T = tokens of all sequences laid end to end; B = rows of a micro-batch, L = its padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import BATCH_TENSORS, LossSpec, TensorSpec

_FLOATS = ("loss_mask", "advantages", "sampler_logprobs")


class BatchError(ConfigError):
    """A batch that cannot be trained on; names the sequence and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A checked batch on the CPU; fields as in `messages.BATCH_TENSORS`."""

    tokens_T: torch.Tensor
    loss_mask_T: torch.Tensor
    advantages_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss; what every sum is divided by, once."""
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded rows. Position l of the last four speaks of token l + 1, which the model predicts at l."""

    tokens_BL: torch.Tensor
    targets_BL: torch.Tensor
    loss_mask_BL: torch.Tensor
    advantages_BL: torch.Tensor
    sampler_logprobs_BL: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return MicroBatch(**{name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__})


def decode_batch(
    *, specs: Sequence[TensorSpec], buffers: Sequence[bytes], vocab_size: int, max_length: int, loss: LossSpec
) -> Batch:
    """Raw buffers to a checked batch.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    found = [(s.name, s.dtype) for s in specs]
    if found != list(BATCH_TENSORS.items()) or len(buffers) != len(specs):
        raise BatchError(f"a batch has the tensors {list(BATCH_TENSORS.items())} in this order; got {found}")
    arrays = {s.name: np.frombuffer(b, dtype=s.dtype).copy() for s, b in zip(specs, buffers, strict=True)}
    for spec in specs:
        if arrays[spec.name].shape != spec.shape:
            raise BatchError(f"{spec.name} holds {arrays[spec.name].shape} elements but its spec says {spec.shape}")
    check_batch(arrays, vocab_size=vocab_size, max_length=max_length, loss=loss)
    tensors = {f"{n}_T": torch.from_numpy(arrays[n]) for n in _FLOATS}
    lengths = tuple(int(n) for n in arrays["sequence_lengths"])
    return Batch(tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)), lengths=lengths, **tensors)


def check_batch(arrays: dict[str, np.ndarray], *, vocab_size: int, max_length: int, loss: LossSpec) -> None:
    """Every refusal in one place.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    lengths, tokens, mask = arrays["sequence_lengths"], arrays["tokens"], arrays["loss_mask"]
    if len(lengths) == 0 or len(tokens) == 0:
        raise BatchError("the batch is empty: sequence_lengths and tokens need at least one element")
    for i in np.flatnonzero(lengths < 1)[:1]:
        raise BatchError(f"sequence {i}: sequence_lengths is {lengths[i]}; a sequence has at least one token")
    for i in np.flatnonzero(lengths > max_length)[:1]:
        raise BatchError(f"sequence {i}: sequence_lengths is {lengths[i]}, longer than the model's {max_length}")
    for name in ("tokens", *_FLOATS):
        if len(arrays[name]) != lengths.sum():
            raise BatchError(
                f"sequence {len(lengths) - 1}: {name} has {len(arrays[name])} elements but sequence_lengths sum to {lengths.sum()}"
            )
    ends = np.cumsum(lengths)
    starts = ends - lengths

    def refuse(bad: np.ndarray, field: str, why: str) -> None:
        for t in np.flatnonzero(bad)[:1]:
            i = int(np.searchsorted(ends, t, side="right"))
            value = arrays[field][t]
            raise BatchError(f"sequence {i}: {field}[{t - starts[i]}] = {value} {why}")

    for name in _FLOATS:
        refuse(~np.isfinite(arrays[name]), name, "is not finite")
    refuse((tokens < 0) | (tokens >= vocab_size), "tokens", f"is outside the vocabulary of {vocab_size}")
    refuse((mask != 0) & (mask != 1), "loss_mask", "is neither 0 nor 1")
    first = np.zeros(len(tokens), dtype=bool)
    first[starts] = True
    refuse(first & (mask != 0), "loss_mask", "marks the first token, which nothing predicts")
    if loss.allowed_token_ids is not None:
        _check_allowed(loss.allowed_token_ids, vocab_size)
        outside = (mask == 1) & ~np.isin(tokens, loss.allowed_token_ids)
        refuse(outside, "tokens", "carries loss but is not among the loss's allowed_token_ids")
    if not mask.any():
        raise BatchError("every sequence: loss_mask is 0 everywhere, so there is nothing to learn from")


def _check_allowed(allowed: Sequence[int], vocab_size: int) -> None:
    wrong = [i for i in allowed if not 0 <= i < vocab_size]
    if wrong or not allowed:
        raise BatchError(f"allowed_token_ids must be a non-empty set of ids below {vocab_size}; got {wrong[:5] or 'none'}")


def micro_batches(batch: Batch, *, max_rows: int, dp_rank: int, dp_size: int) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches.

    All ranks get the same number, of the same [B, L]: pipeline stages exchange tensors of one shape, and expert-parallel ranks
    gather equal token counts. Rows without a sequence carry no loss.
    """
    num_sequences = len(batch.lengths)
    rows = min(max_rows, -(-num_sequences // dp_size))
    count = -(-num_sequences // (rows * dp_size))
    padded = max(max(batch.lengths), 2)
    starts = np.cumsum([0, *batch.lengths])
    result = []
    for m in range(count):
        first = (m * dp_size + dp_rank) * rows
        spans = [(int(starts[i]), batch.lengths[i]) if i < num_sequences else (0, 0) for i in range(first, first + rows)]
        result.append(_pad(batch, spans, padded))
    return result


def _pad(batch: Batch, spans: list[tuple[int, int]], padded: int) -> MicroBatch:
    def rows(flat_T: torch.Tensor, shift: int) -> torch.Tensor:
        out = flat_T.new_zeros((len(spans), padded))
        for row, (start, length) in enumerate(spans):
            kept = max(length - shift, 0)
            out[row, :kept] = flat_T[start + shift : start + shift + kept]
        return out

    return MicroBatch(
        tokens_BL=rows(batch.tokens_T, 0),
        targets_BL=rows(batch.tokens_T, 1),
        loss_mask_BL=rows(batch.loss_mask_T, 1),
        advantages_BL=rows(batch.advantages_T, 1),
        sampler_logprobs_BL=rows(batch.sampler_logprobs_T, 1),
    )
