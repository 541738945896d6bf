"""Huffman-coded streams of bytes, written where the bytes are: on a GPU or a CPU.

    Table.of(sample_S)                  a code that is short for symbols like those of the sample
    pack(symbols_S, pieces, tables)     each piece as a stream

A stream is raw deflate (RFC 1951): one last block with only literals. So zlib reads it. Every bit's
place follows from a sum over the lengths before it, so all symbols are written at once.

Axes: H = numbers before and after pieces, P = pieces, S = symbols, W = words of 16 bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

SYMBOLS = 257
"""Bytes, and the end of the block."""
END = 256
LONGEST = 15
"""Bits of the longest code (RFC 1951, 3.2.7)."""
HEAD_BITS = 1106
"""Of a table. RFC 1951's fixed code needs none."""
MOST_AT_ONCE = 1 << 22
"""Symbols that a device writes together. Each takes some 40 bytes meanwhile."""
_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
"""Of the lengths of the code that the table itself is written in (RFC 1951, 3.2.7)."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Table:
    """The code of each symbol, and the bits before the first one."""

    entries: Ints
    """Of each symbol: its code, lowest bit first, times 16, plus the code's length."""
    head_W: Ints
    """The bits, lowest first, in words."""
    head_bits: int
    _on: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(sample_S: torch.Tensor) -> Table:
        """Make a code in which every byte can be written.

        Args:
            sample_S: below 256, of one dimension.
        """
        counts = np.bincount(sample_S.cpu().numpy(), minlength=SYMBOLS)
        lengths = _lengths(256 * counts + 1)  # so a symbol that the sample lacks has a code too
        fixed = np.repeat([8, 9, 7, 8], [144, 112, 24, 8])
        if counts @ (fixed[:SYMBOLS] - lengths) <= HEAD_BITS:
            return Table(_entries(fixed)[:SYMBOLS], head_W=np.array([0b011]), head_bits=3)
        # The lengths are written in a code of 16 symbols with 4 bits each. No distance has a code.
        kind = [1, 0, 1, *_bits(0, 10), *_bits(len(_ORDER) - 4, 4)]
        kind += [bit for n in _ORDER for bit in _bits(4 if n <= LONGEST else 0, 3)]
        written = np.append(lengths, 0)[:, None] >> np.array([3, 2, 1, 0]) & 1
        bits = np.concatenate((kind, written.reshape(-1), [0] * (-HEAD_BITS % 16)))
        head_W = np.packbits(bits.astype(np.uint8), bitorder="little").view("<u2").astype(np.int64)
        return Table(_entries(lengths), head_W=head_W, head_bits=HEAD_BITS)

    def on(self, device: torch.device) -> torch.Tensor:
        """The entries there, int32."""
        if device not in self._on:
            self._on[device] = on(torch.from_numpy(self.entries).int(), device)
        return self._on[device]


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a GPU, or the tensor. A copy of pageable memory would wait for the stream."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _bits(value: int, count: int) -> list[int]:
    """Lowest first."""
    return [value >> n & 1 for n in range(count)]


def _lengths(counts: Ints) -> Ints:
    """Huffman's code lengths, none above LONGEST: rare symbols count more until that holds."""
    least = max(1, int(counts.sum()) >> LONGEST + 1)
    while True:
        heap = [(max(count, least), n) for n, count in enumerate(counts.tolist())]
        parents = [0] * (2 * len(heap) - 1)
        heapq.heapify(heap)
        for made in range(len(heap), len(parents)):
            one, two = heapq.heappop(heap), heap[0]
            parents[one[1]] = parents[two[1]] = made
            heapq.heapreplace(heap, (one[0] + two[0], made))
        depths = [0] * len(parents)
        for n in reversed(range(len(parents) - 1)):
            depths[n] = depths[parents[n]] + 1
        lengths = np.array(depths[: len(counts)], np.int64)
        if lengths.max() <= LONGEST:
            return lengths
        least *= 2


def _entries(lengths: Ints) -> Ints:
    """The canonical codes of these lengths (RFC 1951, 3.2.2), as in `Table`."""
    order = np.argsort(lengths, kind="stable")
    widths = 1 << LONGEST - lengths[order]
    highest_first = np.cumsum(widths) - widths  # of LONGEST bits, of which the first ones count
    reversed_ = np.zeros_like(lengths)
    for n in range(LONGEST):
        reversed_[order] |= (highest_first >> LONGEST - 1 - n & 1) << n
    return reversed_ << 4 | lengths


Piece = tuple[int, int, int]
"""Its first symbol, the one after its last, and the number of its table. At most 2^27 symbols."""


def pack(
    symbols_S: torch.Tensor, pieces: Sequence[Piece], tables: Sequence[Table]
) -> list[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Write pieces, which follow one another and are not empty.

    The host waits for a GPU once, for the bits of each piece.

    Args:
        symbols_S: int32.

    Returns: memory on the symbols' device, uint8, and where in it successive pieces begin and end.
    """
    device = symbols_S.device
    entries = torch.cat([table.on(device) for table in tables])
    groups = list[list[Piece]]()
    for piece in pieces:
        if not groups or piece[1] - groups[-1][0][0] > MOST_AT_ONCE:
            groups.append([])
        groups[-1].append(piece)
    rows = [[end - g[0][0] - 1, SYMBOLS * table] for g in groups for _, end, table in g]
    there = on(torch.tensor(rows).int().T.contiguous(), device)
    read, ends = [], []
    for g, (last_P, first_P) in zip(groups, there.split([len(g) for g in groups], 1), strict=True):
        here_S = symbols_S[g[0][0] : g[-1][1]]
        number_S = torch.arange(len(here_S), dtype=torch.int32, device=device)
        piece_S = torch.bucketize(number_S, last_P, out_int32=True)
        entry_S = entries.index_select(0, here_S + first_P.index_select(0, piece_S))
        until_S = (entry_S & 15).cumsum(0, dtype=torch.int32)
        read.append((entry_S, piece_S, until_S))
        ends.append(until_S.index_select(0, last_P))
    until = iter(torch.cat(ends).tolist())
    return [
        _written(*each_S, np.array([next(until) for _ in g]), [tables[table] for *_, table in g])
        for each_S, g in zip(read, groups, strict=True)
    ]


def _written(
    entry_S: torch.Tensor,
    piece_S: torch.Tensor,
    until_S: torch.Tensor,
    until_P: Ints,
    of: Sequence[Table],
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Args:
    piece_S: number of each symbol's piece.
    until_S: bits of the symbols as far as each.
    until_P: the same as far as each piece's end.
    of: table of each piece.
    """
    # Each piece begins in a new word. The words begin after one that stays empty.
    code_P, length_P = np.divmod([table.entries[END] for table in of], 16)
    head_P, before_P = np.array([table.head_bits for table in of]), np.append(0, until_P[:-1])
    bits_P = head_P + until_P - before_P + length_P
    words_P = -(-bits_P // 16)
    base_P = 16 * (words_P.cumsum() - words_P + 1)
    end_P = base_P + bits_P
    spans = list(zip((base_P // 8 - 2).tolist(), ((end_P + 7) // 8 - 2).tolist(), strict=True))
    head_words = [len(table.head_W) for table in of]
    offset_H = 16 * np.concatenate([np.arange(count) for count in head_words])
    numbers = (
        base_P + head_P - before_P,
        np.append(np.repeat(base_P, head_words) + offset_H, end_P - length_P),
        np.append(np.concatenate([table.head_W for table in of]), code_P),
    )
    there = on(torch.from_numpy(np.concatenate(numbers)).int(), entry_S.device)
    moved_P, at_H, value_H = there.split([len(one) for one in numbers])
    at_S = until_S - (entry_S & 15) + moved_P.index_select(0, piece_S)
    at = torch.cat((at_S, at_H))
    value = torch.cat((entry_S >> 4, value_H)) << (at & 15)
    # Bits of one place are disjoint, so their sum is their union. No value has more than 31 bits:
    # those above 16 belong to the next word.
    sums_W = at.new_zeros(int(words_P.sum()) + 1).index_add_(0, at >> 4, value)
    words_W = (sums_W[1:] + (sums_W[:-1] >> 16)).to(torch.int16)
    return words_W.view(torch.uint8), spans
