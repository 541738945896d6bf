"""A training message's buffers to micro-batches: decode, refuse what is wrong, pad. No collective, no model.

Shapes: S = sequences, T = tokens of all sequences laid end to end; B = rows of a micro-batch, L = its padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import BATCH_TENSORS, FORWARD_TENSORS, OPTIONAL_BATCH_TENSORS, LossSpec, TensorSpec

_FLOATS = ("loss_mask", "advantages", "sampler_logprobs")
_NO_SEQUENCE = -1


class BatchError(ConfigError):
    """A batch that cannot be trained on; names the sequence and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A checked batch on the CPU; fields as in `messages.BATCH_TENSORS` and `OPTIONAL_BATCH_TENSORS`."""

    tokens_T: torch.Tensor
    loss_mask_T: torch.Tensor
    advantages_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    lengths: tuple[int, ...]
    old_logprobs_T: torch.Tensor | None = None
    reference_logprobs_T: torch.Tensor | None = None

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.loss_mask_T.count_nonzero())

    @property
    def num_loss_sequences(self) -> int:
        """Sequences with at least one token that carries loss."""
        return sum(bool(part.any()) for part in self.loss_mask_T.split(list(self.lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded rows. Position l of all but the first speaks of token l + 1, which the model predicts at l."""

    tokens_BL: torch.Tensor
    targets_BL: torch.Tensor
    loss_mask_BL: torch.Tensor
    advantages_BL: torch.Tensor
    sampler_logprobs_BL: torch.Tensor
    old_logprobs_BL: torch.Tensor | None = None
    reference_logprobs_BL: torch.Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {n: None if t is None else t.to(device, non_blocking=True) for n, t in fields.items()}
        return MicroBatch(**moved)


def decode_batch(
    *, specs: Sequence[TensorSpec], buffers: Sequence[bytes], vocab_size: int, max_length: int, loss: LossSpec
) -> Batch:
    """Raw buffers to a checked batch.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    optional = {n: d for n, d in OPTIONAL_BATCH_TENSORS.items() if any(s.name == n for s in specs)}
    arrays = _arrays(specs, buffers, wanted=BATCH_TENSORS | optional)
    check_batch(arrays, vocab_size=vocab_size, max_length=max_length, loss=loss)
    tensors = {f"{n}_T": torch.from_numpy(arrays[n]) for n in (*_FLOATS, *optional)}
    lengths = tuple(int(n) for n in arrays["sequence_lengths"])
    return Batch(tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)), lengths=lengths, **tensors)


def decode_forward(
    *,
    specs: Sequence[TensorSpec],
    buffers: Sequence[bytes],
    vocab_size: int,
    max_length: int,
    allowed_token_ids: Sequence[int] | None,
) -> Batch:
    """Raw buffers of a forward pass to a batch that asks for every token but the first of each sequence.

    Raises:
        BatchError: names the sequence's index and the field.
    """
    arrays = _arrays(specs, buffers, wanted=FORWARD_TENSORS)
    starts = _check_sequences(arrays, vocab_size=vocab_size, max_length=max_length)
    if allowed_token_ids is not None:
        _check_allowed(allowed_token_ids, vocab_size)
    mask_T = torch.ones(len(arrays["tokens"]))
    mask_T[torch.from_numpy(starts)] = 0
    return Batch(
        tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask_T=mask_T,
        advantages_T=torch.zeros_like(mask_T),
        sampler_logprobs_T=torch.zeros_like(mask_T),
        lengths=tuple(int(n) for n in arrays["sequence_lengths"]),
    )


def _arrays(specs: Sequence[TensorSpec], buffers: Sequence[bytes], *, wanted: dict[str, str]) -> dict[str, np.ndarray]:
    found = [(s.name, s.dtype) for s in specs]
    if found != list(wanted.items()) or len(buffers) != len(specs):
        raise BatchError(f"a batch has the tensors {list(wanted.items())} in this order; got {found}")
    arrays = {s.name: np.frombuffer(b, dtype=s.dtype).copy() for s, b in zip(specs, buffers, strict=True)}
    for spec in specs:
        if arrays[spec.name].shape != spec.shape:
            raise BatchError(f"{spec.name} holds {arrays[spec.name].shape} elements but its spec says {spec.shape}")
    return arrays


def _check_sequences(arrays: dict[str, np.ndarray], *, vocab_size: int, max_length: int) -> np.ndarray:
    """Refuse lengths and token ids that do not fit; returns each sequence's first row, [S]."""
    lengths, tokens = arrays["sequence_lengths"], arrays["tokens"]
    if len(lengths) == 0 or len(tokens) == 0:
        raise BatchError("the batch is empty: sequence_lengths and tokens need at least one element")
    for i in np.flatnonzero(lengths < 1)[:1]:
        raise BatchError(f"sequence {i}: sequence_lengths is {lengths[i]}; a sequence has at least one token")
    for i in np.flatnonzero(lengths > max_length)[:1]:
        raise BatchError(f"sequence {i}: sequence_lengths is {lengths[i]}, longer than the model's {max_length}")
    total = int(lengths.sum(dtype=np.int64))
    for name in arrays:
        if name != "sequence_lengths" and len(arrays[name]) != total:
            raise BatchError(
                f"sequence {len(lengths) - 1}: {name} has {len(arrays[name])} elements but sequence_lengths sum to {total}"
            )
    _refuse(arrays, (tokens < 0) | (tokens >= vocab_size), "tokens", f"is outside the vocabulary of {vocab_size}")
    starts: np.ndarray = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _refuse(arrays: dict[str, np.ndarray], bad: np.ndarray, field: str, why: str) -> None:
    """Raise for the first bad row of `field`, with its sequence and its place in it."""
    for t in np.flatnonzero(bad)[:1]:
        lengths = arrays["sequence_lengths"]
        ends = np.cumsum(lengths, dtype=np.int64)
        i = int(np.searchsorted(ends, t, side="right"))
        raise BatchError(f"sequence {i}: {field}[{t - (ends[i] - lengths[i])}] = {arrays[field][t]} {why}")


def check_batch(arrays: dict[str, np.ndarray], *, vocab_size: int, max_length: int, loss: LossSpec) -> None:
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
    _refuse(arrays, first & (mask != 0), "loss_mask", "marks the first token, which nothing predicts")
    if loss.allowed_token_ids is not None:
        _check_allowed(loss.allowed_token_ids, vocab_size)
        outside = (mask == 1) & ~np.isin(tokens, loss.allowed_token_ids)
        _refuse(arrays, outside, "tokens", "carries loss but is not among the loss's allowed_token_ids")
    if not mask.any():
        raise BatchError("every sequence: loss_mask is 0 everywhere, so there is nothing to learn from")
    if loss.kl is not None and loss.kl.reference == "given" and "reference_logprobs" not in arrays:
        raise BatchError("every sequence: the loss's kl.reference is given, but the batch has no reference_logprobs")


def _check_allowed(allowed: Sequence[int], vocab_size: int) -> None:
    wrong = [i for i in allowed if not 0 <= i < vocab_size]
    if wrong or not allowed:
        raise BatchError(f"allowed_token_ids must be a non-empty set of ids below {vocab_size}; got {wrong[:5] or 'none'}")


def rows_per_rank(grad_accumulation_sequences: int | None, *, dp_size: int) -> int:
    """A data-parallel rank's share of every `grad_accumulation_sequences` sequences; None: the data-parallel size, so 1.

    Raises:
        BatchError: it does not divide; with the numbers.
    """
    wanted = dp_size if grad_accumulation_sequences is None else grad_accumulation_sequences
    if wanted < 1 or wanted % dp_size:
        near = sorted({max(dp_size, wanted // dp_size * dp_size), (wanted // dp_size + 1) * dp_size})
        raise BatchError(
            f"grad_accumulation_sequences = {wanted} is not a multiple of the data-parallel size {dp_size}; "
            f"choose {' or '.join(map(str, near))}"
        )
    return wanted // dp_size


def cut(num_sequences: int, *, max_rows: int, dp_rank: int, dp_size: int, share: int = 1) -> list[tuple[int, ...]]:
    """Which sequences stand in which row of which micro-batch of this rank; -1: a row without a sequence, of weight zero.

    All ranks get the same number of micro-batches with the same number of rows: as many rows as `max_rows` allows, the whole a
    multiple of `share`.
    """
    rounds = -(-num_sequences // (share * dp_size))
    total = rounds * share
    rows = min(max_rows, total)
    while share > 1 and total % rows:
        rows -= 1
    count = -(-total // rows)
    result = []
    for m in range(count):
        first = (m * dp_size + dp_rank) * rows
        result.append(tuple(i if i < num_sequences else _NO_SEQUENCE for i in range(first, first + rows)))
    return result


def micro_batches(
    batch: Batch, *, max_rows: int, dp_rank: int, dp_size: int, grad_accumulation_sequences: int | None = None
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches.

    All ranks get the same number, of the same [B, L]: pipeline stages exchange tensors of one shape, and expert-parallel ranks
    gather equal token counts. Rows without a sequence carry no loss.

    Raises:
        BatchError: `grad_accumulation_sequences` is no multiple of `dp_size`.
    """
    share = rows_per_rank(grad_accumulation_sequences, dp_size=dp_size)
    padded = max(max(batch.lengths), 2)
    plan = cut(len(batch.lengths), max_rows=max_rows, dp_rank=dp_rank, dp_size=dp_size, share=share)
    return [_pad(batch, rows, padded) for rows in plan]


def _pad(batch: Batch, sequences: tuple[int, ...], padded: int) -> MicroBatch:
    starts = np.cumsum([0, *batch.lengths])
    spans = [(0, 0) if i == _NO_SEQUENCE else (int(starts[i]), batch.lengths[i]) for i in sequences]

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
        old_logprobs_BL=None if batch.old_logprobs_T is None else rows(batch.old_logprobs_T, 1),
        reference_logprobs_BL=None if batch.reference_logprobs_T is None else rows(batch.reference_logprobs_T, 1),
    )


def unpad(batch: Batch, plan: Sequence[tuple[int, ...]], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Micro-batch rows back to the batch's: [..., B, L] for each micro-batch, position l speaking of token l + 1 -> [..., T], row t
    speaking of token t. Rows of sequences that are not in `plan`, and each sequence's first, are 0."""
    starts = np.cumsum([0, *batch.lengths])
    out = values[0].new_zeros((*values[0].shape[:-2], int(starts[-1])))
    for sequences, value in zip(plan, values, strict=True):
        for row, i in enumerate(sequences):
            if i != _NO_SEQUENCE:
                out[..., starts[i] + 1 : starts[i + 1]] = value[..., row, : batch.lengths[i] - 1]
    return out
