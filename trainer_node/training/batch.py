"""Turns a training message's buffers into micro-batches: decode, check, pack. No collective, no
model.

Shapes: S = sequences, T = tokens of all sequences laid end to end; L = tokens of a micro-batch,
padding included (under context parallelism: this rank's), N = those of its tokens that are scored
(that carry loss, unless the batch asks for more), M = those of the N whose predictor this rank has.

Context parallelism splits every sequence of a pack into twice as many chunks as ranks. Rank r has
chunks r and 2 * size - 1 - r, as Megatron's rotary positions and TransformerEngine's attention
require. Late tokens attend to more tokens than early ones, so this gives every rank equal work. A
sequence is padded at its end to a multiple of that number; causal attention never looks there.
Targets and whatever else the losses need are cut from the whole sequence, so nothing depends on
where the borders are.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
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
from trainer_node.layout.context import context_places

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences laid end to end, then padding, or this rank's chunks of all that; what the
    losses need is there for the N scored tokens only, on every context-parallel rank for all of
    them.

    Padding is sequences of its own, so that nothing attends to it, and no longer ones than the
    batch's longest.
    """

    tokens_L: torch.Tensor
    positions_L: torch.Tensor
    """From 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32: where each sequence of the whole pack begins, and the pack's length at the end."""
    max_seqlen: int
    """Longest piece of this micro-batch. Never more: Megatron (0.19) takes rotary tables of length
    L to be a whole pack's."""
    predictors_N: torch.Tensor
    """Index in L at which the model predicts the token: one before it. Negative: on another
    context-parallel rank."""
    here_M: torch.Tensor | None
    """Which of the N this rank predicts; None: all."""
    rows_L: torch.Tensor
    """Each token's row in the batch; negative: padding."""
    rows_N: torch.Tensor
    """The token's row in the batch."""
    sequence_N: torch.Tensor
    """The token's sequence, below `num_sequences`."""
    num_sequences: int
    targets_N: torch.Tensor
    advantages_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor | None = None
    reference_logprobs_N: torch.Tensor | None = None
    temperatures_N: torch.Tensor | None = None
    routed_experts_L: torch.Tensor | None = None
    """[L, layers, top_k]: the experts that each token of the pack goes to."""
    loss_N: torch.Tensor | None = None
    """Index of the tokens with loss among the N; None: all of them have it."""
    loss_M: torch.Tensor | None = None
    """The same among the M."""

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.rows_N if self.loss_N is None else self.loss_N)

    def with_loss(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens with loss."""
        return values_N if self.loss_N is None else values_N.index_select(0, self.loss_N)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on `device`; a GPU gets one asynchronous copy from pinned memory."""
        if device.type != "cuda":
            return self
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        tensors = {n: t for n, t in fields.items() if isinstance(t, torch.Tensor)}
        return MicroBatch(**fields | move_in_one_copy(tensors, device, pinned=True))


_ALIGNMENT = 256
"""Alignment in bytes, as in the GPU's own allocations."""


def move_in_one_copy(
    tensors: Mapping[str, torch.Tensor], device: torch.device, *, pinned: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors on `device`, as views of one buffer that one copy moves."""
    places, end = {}, 0
    for name, t in tensors.items():
        places[name] = end
        end += -(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)

    def view(buffer: torch.Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.numel() * like.element_size()
        return buffer[places[name] : places[name] + nbytes].view(like.dtype).view(like.shape)

    for name, t in tensors.items():
        view(staging, name, t).copy_(t)
    moved = staging.to(device, non_blocking=True)
    return {name: view(moved, name, t) for name, t in tensors.items()}


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
    optional = {n: d for n, d in OPTIONAL_BATCH_TENSORS.items() if any(s.name == n for s in specs)}
    arrays = _arrays(specs, buffers, wanted=BATCH_TENSORS | optional)
    check_batch(arrays, vocab_size=vocab_size, max_length=max_length, loss=loss)
    tensors: dict[str, Any] = {f"{n}_T": torch.from_numpy(arrays[n]) for n in (*_FLOATS, *optional)}
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
    optional = {
        n: d for n, d in OPTIONAL_FORWARD_TENSORS.items() if any(s.name == n for s in specs)
    }
    arrays = _arrays(specs, buffers, wanted=FORWARD_TENSORS | optional)
    _check_sequences(arrays, vocab_size=vocab_size, max_length=max_length)
    if allowed_token_ids is not None:
        _check_allowed(allowed_token_ids, vocab_size)
    lengths = tuple(int(n) for n in arrays["sequence_lengths"])
    mask_T = predicted(lengths)
    return Batch(
        tokens_T=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        loss_mask_T=mask_T,
        advantages_T=torch.zeros_like(mask_T),
        sampler_logprobs_T=torch.zeros_like(mask_T),
        temperatures_T=torch.from_numpy(arrays["temperatures"]) if optional else None,
        lengths=lengths,
    )


def predicted(lengths: Sequence[int]) -> torch.Tensor:
    """Return 1 for every token that the model predicts, [T]: all but each sequence's first."""
    mask_T = torch.ones(sum(lengths))
    mask_T[torch.from_numpy(np.cumsum([0, *lengths[:-1]]))] = 0
    return mask_T


def _arrays(
    specs: Sequence[TensorSpec], buffers: Sequence[bytes], *, wanted: dict[str, str]
) -> dict[str, np.ndarray]:
    found = [(s.name, s.dtype) for s in specs]
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


def check_fits(batch: Batch, longest: int | None) -> None:
    """Refuse a sequence for which the GPU's memory does not suffice, before anything runs.

    Args:
        longest: tokens of the longest sequence that fits. None: nobody knows.

    Raises:
        TooLong: names the sequence, its tokens and the number that fits.
    """
    for number, length in enumerate(batch.lengths):
        if longest is not None and length > longest:
            raise TooLong(
                f"sequence_lengths: sequence {number} has {length} tokens, and the GPU's memory "
                f"suffices for {longest}"
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
    row, [S]. One temperature for each sequence becomes one for each token."""
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
    for name in arrays:
        sizes = {"sequence_lengths": (len(lengths),), "temperatures": (len(lengths), total)}.get(
            name, (total,)
        )
        if len(arrays[name]) not in sizes:
            raise BatchError(
                f"sequence {len(lengths) - 1}: {name} has {len(arrays[name])} elements but "
                f"sequence_lengths sum to {total}"
            )
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
    """Refuse temperatures that nothing is sampled at; [S] becomes [T]."""
    lengths, given = arrays["sequence_lengths"], arrays["temperatures"]
    if len(given) == len(lengths):
        arrays["temperatures"] = given = np.repeat(given, lengths)
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


def pack(
    lengths: Sequence[int], *, budget: int, dp_size: int = 1, least: int = 1
) -> list[list[tuple[int, ...]]]:
    """Cut sequences into packs: [data-parallel rank][micro-batch] -> ascending indices.

    All ranks get the same number of packs, and some may be empty. First-fit decreasing (Johnson
    1973) finds the number of packs. Then each sequence, longest first, goes to the emptiest pack
    (Graham 1969, LPT), if that keeps the budget. Packs, and so ranks, are about equal. A sequence
    longer than the budget sets the budget of its batch.

    Args:
        budget: most tokens of a pack.
        least: smallest number of packs for each rank, given enough sequences: a pipeline needs
            several.
    """
    capacity = max(budget, *lengths)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fitted: list[list[int]] = []
    fills: list[int] = []
    for i in longest_first:
        place = next((p for p, fill in enumerate(fills) if fill + lengths[i] <= capacity), None)
        if place is None:
            fitted, fills, place = [*fitted, []], [*fills, 0], len(fitted)
        fitted[place].append(i)
        fills[place] += lengths[i]
    count = max(len(fitted), min(least * dp_size, len(lengths)))
    count = -(-count // dp_size) * dp_size
    packs = _spread(lengths, longest_first, count)
    if max(sum(lengths[i] for i in p) for p in packs) > capacity:
        packs = fitted + [[] for _ in range(count - len(fitted))]
    packs.sort(key=lambda p: -sum(lengths[i] for i in p))
    return [[tuple(sorted(p)) for p in packs[rank::dp_size]] for rank in range(dp_size)]


def _spread(lengths: Sequence[int], longest_first: Sequence[int], count: int) -> list[list[int]]:
    """Each to the pack with the fewest tokens so far."""
    packs: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, p) for p in range(count)]
    for i in longest_first:
        fill, p = heapq.heappop(heap)
        packs[p].append(i)
        heapq.heappush(heap, (fill + lengths[i], p))
    return packs


class Packs(Sequence[MicroBatch]):
    """A rank's micro-batches on its device, each laid out when it is first asked for: the first
    one's forward pass waits for itself alone, and the rest is laid out while the device computes.
    """

    def __init__(
        self,
        batch: Batch,
        sequences: Sequence[tuple[int, ...]],
        lengths: Sequence[int],
        *,
        sequence_tokens: Sequence[int],
        context: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._batch, self._sequences, self._device = batch, sequences, device
        self._sequence_tokens, self._context = sequence_tokens, context
        self.lengths = tuple(lengths)
        """Tokens of each over all its context-parallel ranks, padding included."""
        self._made: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def rest(self, first: int, last: int | None = None) -> Packs:
        """The packs from `first` on, up to `last`."""
        return Packs(
            self._batch,
            self._sequences[first:last],
            self.lengths[first:last],
            sequence_tokens=self._sequence_tokens,
            context=self._context,
            device=self._device,
        )

    def __getitem__(self, index: int) -> MicroBatch:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._made:
            whole = _lay_out(
                self._batch, self._sequences[index], self.lengths[index], self._sequence_tokens
            )
            rank, size = self._context
            self._made[index] = (whole if size == 1 else _part(whole, rank, size)).to(self._device)
        return self._made[index]


def micro_batches(
    batch: Batch,
    *,
    budget: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    least: int = 1,
    same_length: bool = False,
    multiple: int = 1,
    context_rank: int = 0,
    context_size: int = 1,
    device: torch.device = CPU,
) -> Packs:
    """This data-parallel rank's micro-batches, as `pack` cuts them.

    Args:
        same_length: whether all micro-batches of all ranks have one L. Pipeline stages exchange
            tensors of one shape, and expert-parallel ranks gather equal token counts.
        multiple: L is a multiple of it (sequence parallelism: the tensor-parallel size).
        context_rank, context_size: which chunks of every sequence are this rank's.
    """
    chunks = 2 * context_size if context_size > 1 else 1
    lengths = [-(-n // chunks) * chunks for n in batch.lengths]
    ranks = pack(lengths, budget=budget, dp_size=dp_size, least=least)
    fills = [[sum(lengths[i] for i in p) for p in packs] for packs in ranks]
    most = max(max(f) for f in fills)
    padded = [most if same_length else max(fill, 1) for fill in fills[dp_rank]]
    step = chunks * multiple
    tokens = [-(-n // step) * step for n in padded]
    return Packs(
        batch,
        ranks[dp_rank],
        tokens,
        sequence_tokens=lengths,
        context=(context_rank, context_size),
        device=device,
    )


def _lay_out(
    batch: Batch, sequences: tuple[int, ...], length: int, lengths: Sequence[int]
) -> MicroBatch:
    """A whole pack; `lengths`: of the batch's sequences, each with its padding."""
    starts = np.cumsum([0, *batch.lengths])
    pieces = [lengths[i] for i in sequences]
    sizes = [batch.lengths[i] for i in sequences]
    rows_R = np.concatenate(
        [np.arange(starts[i], starts[i + 1]) for i in sequences] or [np.arange(0)]
    )
    left, longest = length - sum(pieces), max(lengths)
    whole, rest = divmod(left, longest)
    begins_S = np.cumsum([0, *pieces])[: len(sequences)]
    # Places of the tokens in the pack: a sequence's padding follows it.
    places_R = np.concatenate(
        [b + np.arange(n) for b, n in zip(begins_S, sizes, strict=True)] or [np.arange(0)]
    )
    pieces += [longest] * whole + [rest] * (rest > 0)
    tokens_L = torch.zeros(length, dtype=torch.int64)
    # numpy's indexing: torch's wakes its thread pool, which takes longer than the work.
    tokens_L.numpy()[places_R] = batch.tokens_T.numpy()[rows_R]
    rows_L = torch.from_numpy(_spread_out(rows_R, places_R, length))
    scored_T = batch.loss_mask_T if batch.scored_T is None else batch.scored_T
    scored_R = np.flatnonzero(scored_T.numpy()[rows_R])
    places_N, rows_N = places_R[scored_R], rows_R[scored_R]
    owners_R = np.repeat(np.arange(len(sequences)), np.array(sizes, dtype=np.int64))
    loss_N = None
    if batch.scored_T is not None:
        loss_N = torch.from_numpy(np.flatnonzero(batch.loss_mask_T.numpy()[rows_N]))

    def of(flat_T: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(flat_T.numpy()[rows_N])

    return MicroBatch(
        tokens_L=tokens_L,
        positions_L=torch.from_numpy(np.concatenate([np.arange(n) for n in pieces])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *pieces], dtype=np.int32)),
        max_seqlen=max(pieces),
        predictors_N=torch.from_numpy(places_N - 1),
        here_M=None,
        rows_L=rows_L,
        rows_N=torch.from_numpy(rows_N),
        sequence_N=torch.from_numpy(owners_R[scored_R]),
        num_sequences=len(sequences),
        targets_N=of(batch.tokens_T),
        advantages_N=of(batch.advantages_T),
        sampler_logprobs_N=of(batch.sampler_logprobs_T),
        old_logprobs_N=None if batch.old_logprobs_T is None else of(batch.old_logprobs_T),
        reference_logprobs_N=None
        if batch.reference_logprobs_T is None
        else of(batch.reference_logprobs_T),
        temperatures_N=None if batch.temperatures_T is None else of(batch.temperatures_T),
        routed_experts_L=_routing(batch.routed_experts_T, rows_R, places_R, length),
        loss_N=loss_N,
        loss_M=loss_N,
    )


def _spread_out(rows_R: np.ndarray, places_R: np.ndarray, length: int) -> np.ndarray:
    """The tokens' rows at their places, and -1, -2, ... for padding."""
    rows_L = np.empty(length, dtype=np.int64)
    is_padding_L = np.ones(length, dtype=bool)
    is_padding_L[places_R] = False
    rows_L[places_R] = rows_R
    rows_L[is_padding_L] = -1 - np.arange(length - len(rows_R))
    return rows_L


def _routing(
    routed_experts_T: torch.Tensor | None, rows_R: np.ndarray, places_R: np.ndarray, length: int
) -> torch.Tensor | None:
    """The rows' experts; padding goes to the first ones."""
    if routed_experts_T is None:
        return None
    _, layers, top_k = routed_experts_T.shape
    experts_L = torch.arange(top_k).repeat(length, layers, 1)
    experts_L[torch.from_numpy(places_R)] = routed_experts_T[torch.from_numpy(rows_R)].long()
    return experts_L


def _part(pack: MicroBatch, rank: int, size: int) -> MicroBatch:
    """A context-parallel rank's part of a pack."""
    places_L = context_places(pack.cu_seqlens.tolist(), rank=rank, size=size)
    local = np.full(len(pack.tokens_L), -1)
    local[places_L] = np.arange(len(places_L))
    predictors_N = local[pack.predictors_N.numpy()]
    here_M = np.flatnonzero(predictors_N >= 0)
    loss_M = None
    if pack.loss_N is not None:
        loss_M = torch.from_numpy(np.flatnonzero(np.isin(here_M, pack.loss_N.numpy())))
    places = torch.from_numpy(places_L)
    return replace(
        pack,
        tokens_L=pack.tokens_L[places],
        positions_L=pack.positions_L[places],
        rows_L=pack.rows_L[places],
        predictors_N=torch.from_numpy(predictors_N),
        here_M=torch.from_numpy(here_M),
        loss_M=loss_M,
        routed_experts_L=None if pack.routed_experts_L is None else pack.routed_experts_L[places],
    )
