"""Finds the prefixes that sequences of a batch share, and bundles the sequences along them.

    tokens -> sequences in lexicographic order -> neighbours that share enough -> bundles

A pack computes a shared token once. Of each sequence of a bundle it computes only the *run*: the
tokens that its predecessor does not have at the same places. A sequence's *path* is all its tokens,
wherever in the pack they are. No collective, no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from trainer_node.training.batch import Batch

LEAST_SHARE = 1 / 16
"""Of a sequence, that it has in common with its predecessor. For less, it is not worth the copies
of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Sequences that one pack computes."""

    sequences: tuple[int, ...]
    """In their order in the pack."""
    shared: tuple[int, ...]
    """First tokens that each has in common with the one before it."""
    tokens: int
    """Tokens that are computed."""
    load: int
    """The same, with what the copies of shared keys and values take of the memory."""

    @staticmethod
    def of_one(sequence: int, tokens: int) -> Bundle:
        """A sequence without others."""
        return Bundle(sequences=(sequence,), shared=(0,), tokens=tokens, load=tokens)


def bundles(
    batch: Batch, *, budget: int, most: int, copy_load: float, parts: int = 1
) -> list[Bundle]:
    """Bundle all sequences of the batch, by the lowest number in each bundle.

    Shared tokens are equal, and so are their routed experts, where the batch has these.

    Args:
        budget: largest load of a bundle of several sequences, each of which fits into it.
        most: largest load of a bundle of longer sequences, which need more memory anyway.
        copy_load: memory of a token's keys and values, as a share of the whole token's.
        parts: smallest number of packs, which must have about equal work.
    """
    starts = list(accumulate(batch.lengths, initial=0))
    tokens_T = batch.tokens_T.numpy().astype(">u4")
    keys = [tokens_T[a:b].tobytes() for a, b in pairwise(starts)]
    order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
    shared = [0] + [_common(batch, starts, a, b) for a, b in pairwise(order)]
    limits = (budget, max(budget, most))
    found = _cut(batch.lengths, order, shared, limits, copy_load)
    share = math.ceil(sum(bundle.load for bundle in found) / parts)
    if parts > 1:
        limits = (min(limits[0], share), min(limits[1], share))
        found = _cut(batch.lengths, order, shared, limits, copy_load)
    return sorted(found, key=lambda bundle: min(bundle.sequences))


def _common(batch: Batch, starts: Sequence[int], first: int, second: int) -> int:
    """First tokens that two sequences share; 0 where they are too few."""
    length = min(batch.lengths[first], batch.lengths[second])
    needed = math.ceil(LEAST_SHARE * batch.lengths[second])
    tokens_T = batch.tokens_T.numpy()
    last = [tokens_T[starts[i] + needed - 1] for i in (first, second) if needed <= length]
    if len(last) < 2 or last[0] != last[1]:  # most neighbours, at once
        return 0
    ours, theirs = (slice(starts[i], starts[i] + length) for i in (first, second))
    differs = tokens_T[ours] != tokens_T[theirs]
    if batch.routed_experts_T is not None:
        experts_T = batch.routed_experts_T.numpy()
        differs |= (experts_T[ours] != experts_T[theirs]).any(axis=(1, 2))
    common = int(differs.argmax()) if differs.any() else length
    return common if common >= needed else 0


def _cut(
    lengths: Sequence[int],
    order: Sequence[int],
    shared: Sequence[int],
    limits: tuple[int, int],
    copy_load: float,
) -> list[Bundle]:
    """Neighbours that share tokens, as long as they keep to the limits `budget` and `most`."""
    budget, most = limits
    found: list[Bundle] = []
    for sequence, common in zip(order, shared, strict=True):
        length = lengths[sequence]
        if common:
            last, run = found[-1], length - common
            load = last.load + run + math.ceil(copy_load * common)
            is_long = max(length, lengths[last.sequences[0]]) > budget
            if load <= (most if is_long else budget):
                found[-1] = Bundle(
                    sequences=(*last.sequences, sequence),
                    shared=(*last.shared, common),
                    tokens=last.tokens + run,
                    load=load,
                )
                continue
        found.append(Bundle.of_one(sequence, length))
    return found
