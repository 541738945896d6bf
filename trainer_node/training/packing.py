"""Cuts a checked batch into packs, this rank's micro-batches. No collective, no model.

Shapes: S = sequences, T = tokens of all sequences laid end to end; L = tokens of a micro-batch,
padding included (under context parallelism: this rank's), N = those of its tokens that are scored
(that carry loss, unless the batch asks for more), M = those of the N whose predictor this rank has.

Context parallelism splits every sequence of a pack into twice as many chunks as ranks. Rank r has
chunks r and 2 * size - 1 - r, as Megatron's rotary positions and TransformerEngine's attention
require. Late tokens attend to more tokens than early ones, so this gives every rank equal work. A
sequence is padded at its end to a multiple of that number; causal attention never looks there.
Targets and whatever else the losses need are cut from the whole sequence, so nothing depends on
where the borders are.

Sequences that share a prefix (`prefixes`) have it once in a pack. A sequence's own tokens follow
its predecessor's, and its path says where all its tokens are.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trainer_node.layout.context import context_places
from trainer_node.training.batch import CPU, Batch
from trainer_node.training.prefixes import Bundle, bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How shared prefixes are computed once."""

    most: int
    """Load of a bundle of sequences that are longer than the pack size: what fits at most."""
    copy_load: float
    """Memory of a token's keys and values, of what the whole token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole sequences laid end to end, then padding, or this rank's chunks of all that. The losses'
    inputs exist only for the N scored tokens, but for all of those on every context-parallel rank.

    Padding consists of separate sequences, so that nothing attends to it. None of them is longer
    than the batch's longest sequence.
    """

    tokens_L: torch.Tensor
    positions_L: torch.Tensor
    """From 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32: where each sequence of the whole pack begins (its own tokens, if it shares a prefix),
    and the pack's length at the end."""
    max_seqlen: int
    """Longest piece of this micro-batch. Never more: Megatron (0.19) takes rotary tables of length
    L to be a whole pack's."""
    predictors_N: torch.Tensor
    """Index in L at which the model predicts the token: that of the token before it. Negative: on
    another context-parallel rank."""
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
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None
    routed_experts_L: torch.Tensor | None = None
    """[L, layers, top_k]: the experts that each token of the pack goes to."""
    loss_N: torch.Tensor | None = None
    """Index of the tokens with loss among the N; None: all of them have it."""
    loss_M: torch.Tensor | None = None
    """The same among the M."""
    paths: tuple[tuple[int, int], ...] | None = None
    """(place in L, count) of the tokens of each sequence that has tokens of its own, one after the
    other: all its tokens. None: nothing is shared."""
    cu_paths: torch.Tensor | None = None
    """int32: where each sequence's tokens begin among those."""
    max_path: int = 0
    load: int = 0
    """Tokens of the whole pack, with what copies of shared keys and values take of the memory. One
    for all packs that have one L: ranks that gather tokens must recompute the same layers."""

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


def pack(
    lengths: Sequence[int],
    *,
    budget: int,
    dp_size: int = 1,
    least: int = 1,
    same_length: bool = False,
) -> list[list[tuple[int, ...]]]:
    """Cut sequences into packs: [data-parallel rank][micro-batch] -> ascending indices.

    All ranks get the same number of packs, and some may be empty. First-fit decreasing (Johnson
    1973) finds the number of packs. Then each sequence, longest first, goes to the emptiest pack
    (Graham 1969, LPT), if that keeps the budget. Packs, and so ranks, are about equal. A sequence
    longer than the budget has its own pack.

    Args:
        budget: most tokens of a pack.
        least: smallest number of packs for each rank, given enough sequences: a pipeline needs
            several.
        same_length: whether every pack is padded to the largest one. The longest sequence is then
            the budget of its batch.
    """
    capacity = max(budget, *lengths) if same_length else budget
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
    if max((sum(lengths[i] for i in p) for p in packs if len(p) > 1), default=0) > capacity:
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
    one's forward pass waits only for itself, and the rest is laid out while the device computes.
    """

    def __init__(
        self,
        batch: Batch,
        bundles: Sequence[tuple[Bundle, ...]],
        lengths: Sequence[int],
        loads: Sequence[int],
        *,
        sequence_tokens: Sequence[int],
        context: tuple[int, int],
        num_shared: int,
        device: torch.device,
    ) -> None:
        self._batch, self._bundles, self._device = batch, bundles, device
        self._sequence_tokens, self._context = sequence_tokens, context
        self.lengths = tuple(lengths)
        """Tokens of each over all its context-parallel ranks, padding included."""
        self.loads = tuple(loads)
        """The same, as `MicroBatch.load`."""
        self.num_shared = num_shared
        """Tokens of the whole batch, on all ranks, that are not computed, because another sequence
        has them too."""
        self._made: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def rest(self, first: int, last: int | None = None) -> Packs:
        """The packs from `first` on, up to `last`."""
        return Packs(
            self._batch,
            self._bundles[first:last],
            self.lengths[first:last],
            self.loads[first:last],
            sequence_tokens=self._sequence_tokens,
            context=self._context,
            num_shared=self.num_shared,
            device=self._device,
        )

    def __getitem__(self, index: int) -> MicroBatch:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._made:
            whole = _lay_out(
                self._batch, self._bundles[index], self.lengths[index], self._sequence_tokens
            )
            whole = replace(whole, load=self.loads[index])
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
    sharing: Sharing | None = None,
    device: torch.device = CPU,
) -> Packs:
    """This data-parallel rank's micro-batches, as `pack` cuts them.

    Args:
        same_length: whether all micro-batches of all ranks have one L. Pipeline stages exchange
            tensors of one shape, and expert-parallel ranks gather equal token counts.
        multiple: L is a multiple of it (sequence parallelism: the tensor-parallel size).
        context_rank, context_size: which chunks of every sequence are this rank's.
        sharing: how shared prefixes are computed once; None: they are computed for each sequence.
    """
    chunks = 2 * context_size if context_size > 1 else 1
    lengths = [-(-n // chunks) * chunks for n in batch.lengths]
    items = [Bundle.of_one(i, n) for i, n in enumerate(lengths)]
    if sharing is not None:
        items = bundles(
            batch,
            budget=budget,
            most=sharing.most,
            copy_load=sharing.copy_load,
            parts=dp_size * least,
        )
    loads = [item.load for item in items]
    ranks = pack(loads, budget=budget, dp_size=dp_size, least=least, same_length=same_length)
    fills = [[sum(items[i].tokens for i in p) for p in packs] for packs in ranks]
    most = max(max(f) for f in fills)
    padded = [most if same_length else max(fill, 1) for fill in fills[dp_rank]]
    step = chunks * multiple
    tokens = [-(-n // step) * step for n in padded]
    copies = [[sum(items[i].load - items[i].tokens for i in p) for p in packs] for packs in ranks]
    copied = max(max(c) for c in copies)
    own = [copied] * len(tokens) if same_length else copies[dp_rank]
    return Packs(
        batch,
        [tuple(items[i] for i in p) for p in ranks[dp_rank]],
        tokens,
        [n + more for n, more in zip(tokens, own, strict=True)],
        sequence_tokens=lengths,
        context=(context_rank, context_size),
        num_shared=sum(lengths) - sum(item.tokens for item in items),
        device=device,
    )


def _lay_out(
    batch: Batch, bundles: tuple[Bundle, ...], length: int, lengths: Sequence[int]
) -> MicroBatch:
    """A whole pack; `lengths`: of the batch's sequences, each with its padding."""
    starts = np.cumsum([0, *batch.lengths])
    sequences = [i for bundle in bundles for i in bundle.sequences]
    shared = [n for bundle in bundles for n in bundle.shared]
    sizes = [batch.lengths[i] for i in sequences]
    rows_R = _joined([np.arange(starts[i], starts[i + 1]) for i in sequences])
    # Tokens that are computed: those that a sequence does not share with its predecessor, then its
    # padding.
    pieces = [lengths[i] - n for i, n in zip(sequences, shared, strict=True)]
    left, longest = length - sum(pieces), max(lengths)
    whole, rest = divmod(left, longest)
    begins = np.cumsum([0, *pieces])
    # Places of the tokens in the pack: a sequence's padding follows it.
    places: list[np.ndarray] = []
    for begin, size, common in zip(begins[:-1], sizes, shared, strict=True):
        own = begin + np.arange(size - common)
        places.append(np.concatenate([places[-1][:common], own]) if common else own)
    places_R = _joined(places)
    before_R = _joined([np.concatenate([[-1], p[:-1]]) for p in places])
    own_pieces = pieces
    pieces = [*pieces, *[longest] * whole, *[rest] * (rest > 0)]
    shares = _paths(places, own_pieces, pieces) if any(shared) else {}
    froms = [*shared, *[0] * (len(pieces) - len(shared))]
    tokens_L = torch.zeros(length, dtype=torch.int64)
    # numpy's indexing: torch's wakes its thread pool, which takes longer than the work.
    tokens_L.numpy()[places_R] = batch.tokens_T.numpy()[rows_R]  # shared ones are equal
    rows_L = torch.from_numpy(_spread_out(rows_R, places_R, length))
    scored_T = batch.loss_mask_T if batch.scored_T is None else batch.scored_T
    scored_R = np.flatnonzero(scored_T.numpy()[rows_R])
    rows_N = rows_R[scored_R]
    owners_R = np.repeat(np.arange(len(sequences)), np.array(sizes, dtype=np.int64))
    loss_N = None
    if batch.scored_T is not None:
        loss_N = torch.from_numpy(np.flatnonzero(batch.loss_mask_T.numpy()[rows_N]))

    def of(flat_T: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(flat_T.numpy()[rows_N])

    def of_given(flat_T: torch.Tensor | None) -> torch.Tensor | None:
        return None if flat_T is None else of(flat_T)

    return MicroBatch(
        tokens_L=tokens_L,
        positions_L=torch.from_numpy(
            _joined([np.arange(a, a + n) for a, n in zip(froms, pieces, strict=True)])
        ),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *filter(None, pieces)], dtype=np.int32)),
        max_seqlen=max(pieces),
        predictors_N=torch.from_numpy(before_R[scored_R]),
        here_M=None,
        rows_L=rows_L,
        rows_N=torch.from_numpy(rows_N),
        sequence_N=torch.from_numpy(owners_R[scored_R]),
        num_sequences=len(sequences),
        targets_N=of(batch.tokens_T),
        advantages_N=of(batch.advantages_T),
        sampler_logprobs_N=of(batch.sampler_logprobs_T),
        old_logprobs_N=of_given(batch.old_logprobs_T),
        reference_logprobs_N=of_given(batch.reference_logprobs_T),
        temperatures_N=of_given(batch.temperatures_T),
        values_N=of_given(batch.values_T),
        returns_N=of_given(batch.returns_T),
        routed_experts_L=_routing(batch.routed_experts_T, rows_R, places_R, length),
        loss_N=loss_N,
        loss_M=loss_N,
        **shares,
    )


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.arange(0)


def _paths(
    places: Sequence[np.ndarray], own_pieces: Sequence[int], pieces: Sequence[int]
) -> dict[str, Any]:
    """The fields of a `MicroBatch` that describe paths: those of sequences that have their own
    tokens, and those of padding.

    Args:
        places: of each sequence's tokens.
        own_pieces: number of tokens that are computed for each sequence; `pieces`: for each piece
            of the padding after them.
    """
    paths = [p for p, n in zip(places, own_pieces, strict=True) if n]
    end = sum(own_pieces)
    for n in pieces[len(own_pieces) :]:
        paths.append(np.arange(end, end + n))
        end += n
    places_K = np.concatenate(paths)
    ends = [*np.flatnonzero(np.diff(places_K) != 1) + 1, len(places_K)]
    return {
        "paths": tuple((int(places_K[a]), int(b - a)) for a, b in pairwise([0, *ends])),
        "cu_paths": torch.from_numpy(np.cumsum([0, *map(len, paths)], dtype=np.int32)),
        "max_path": max(map(len, paths)),
    }


def _spread_out(rows_R: np.ndarray, places_R: np.ndarray, length: int) -> np.ndarray:
    """The tokens' rows at their places, and -1, -2, ... for padding."""
    rows_L = np.empty(length, dtype=np.int64)
    is_padding_L = np.ones(length, dtype=bool)
    is_padding_L[places_R] = False
    rows_L[places_R] = rows_R
    rows_L[is_padding_L] = -1 - np.arange(int(is_padding_L.sum()))
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
