"""Huffman-coded streams of bytes, written where the bytes are: on a GPU or a CPU.

    Table.of(sample_S)                  a code that is short for symbols like those of the sample
    pack(symbols_S, pieces, tables)     each piece as a stream, in host memory

A stream is raw deflate (RFC 1951): one last block with only literals. So zlib reads it. Every bit's
place follows from a sum over the lengths before it, so all symbols are written at once.

Axes: P = pieces, S = symbols, W = words of 32 bits.
"""

from __future__ import annotations

import heapq
import itertools
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
"""Symbols that a device writes together. Each takes some 50 bytes meanwhile."""
_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
"""Of the lengths of the code that the table itself is written in (RFC 1951, 3.2.7)."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Table:
    """The code of each symbol, and the bits before the first one."""

    entries: Ints
    """Of each symbol: its code, lowest bit first, times 16, plus the code's length."""
    head: int
    """The bits, lowest first."""
    head_bits: int
    _on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

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
            return Table(_entries(fixed)[:SYMBOLS], head=0b011, head_bits=3)
        # The lengths are written in a code of 16 symbols with 4 bits each. No distance has a code.
        kind = [1, 0, 1, *_bits(0, 10), *_bits(len(_ORDER) - 4, 4)]
        kind += [bit for n in _ORDER for bit in _bits(4 if n <= LONGEST else 0, 3)]
        written = np.append(lengths, 0)[:, None] >> np.array([3, 2, 1, 0]) & 1
        bits = np.concatenate((kind, written.reshape(-1)))
        head = int.from_bytes(np.packbits(bits.astype(np.uint8), bitorder="little"), "little")
        return Table(_entries(lengths), head=head, head_bits=HEAD_BITS)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """There: the entries, int32, and the bits before the first symbol in words, int64."""
        if device not in self._on:
            words = [self.head >> at & 0xFFFFFFFF for at in range(0, self.head_bits, 32)]
            entries = torch.from_numpy(self.entries).int()
            self._on[device] = on(entries, device), on(torch.tensor(words), device)
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
    least = 1
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
"""Its first symbol, the one after its last, and the number of its table."""


def pack(
    symbols_S: torch.Tensor, pieces: Sequence[Piece], tables: Sequence[Table]
) -> list[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Write pieces, which follow one another and are not empty.

    The host waits for a GPU once for every MOST_AT_ONCE symbols.

    Args:
        symbols_S: int32; the symbol, plus SYMBOLS times the number of its piece's table.

    Returns: memory on the symbols' device, uint8, and where in it successive pieces begin and end.
    """
    entries = torch.cat([table.on(symbols_S.device)[0] for table in tables])
    groups = list[list[Piece]]()
    for piece in pieces:
        if not groups or piece[1] - groups[-1][0][0] > MOST_AT_ONCE:
            groups.append([])
        groups[-1].append(piece)
    return [_packed(symbols_S[g[0][0] : g[-1][1]], g, tables, entries) for g in groups]


def _packed(
    symbols_S: torch.Tensor, pieces: Sequence[Piece], tables: Sequence[Table], entries: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    device, first = symbols_S.device, pieces[0][0]
    of = [tables[table] for _, _, table in pieces]
    ends = [int(one.entries[END]) for one in of]
    rows = [
        (end - first - 1, one.head_bits, code & 15, code >> 4)
        for (_, end, _), one, code in zip(pieces, of, ends, strict=True)
    ]
    heads = [one.on(device)[1] for one in of]
    places = [(n, 32 * i) for n, head in enumerate(heads) for i in range(len(head))]
    numbers = on(torch.tensor([*itertools.chain(*rows, *places)]), device)
    last_P, head_P, end_length_P, end_P = numbers[: 4 * len(rows)].view(-1, 4).unbind(1)
    piece_H, offset_H = numbers[4 * len(rows) :].view(-1, 2).unbind(1)
    entry_S = entries.index_select(0, symbols_S)
    length_S = entry_S & 15
    until_S = length_S.cumsum(0)
    until_P = until_S[last_P]
    before_P = torch.cat((until_P.new_zeros(1), until_P[:-1]))
    bits_P = head_P + until_P - before_P + end_length_P
    words_P = (bits_P + 31) // 32
    base_P = 32 * (words_P.cumsum(0) - words_P)
    moved_P = base_P + head_P - before_P
    at_S = until_S - length_S
    number_S = torch.arange(symbols_S.numel(), device=device)
    at_S += moved_P[torch.bucketize(number_S, last_P.contiguous())]
    at = torch.cat((at_S, base_P + bits_P - end_length_P, base_P[piece_H] + offset_H))
    value = torch.cat(((entry_S >> 4).long(), end_P, *heads))
    sizes = torch.stack((base_P, bits_P), 1).tolist()
    count = (sizes[-1][0] + sizes[-1][1] + 31) // 32
    # The bits of a word are disjoint, so their sum is their union; it wraps as int32.
    words_W = torch.zeros(count + 1, dtype=torch.int32, device=device)
    word, value = at >> 5, value << (at & 31)
    words_W.index_add_(0, word, value.int())
    words_W.index_add_(0, word + 1, (value >> 32).int())
    spans = [(base // 8, (base + bits + 7) // 8) for base, bits in sizes]
    return words_W.view(torch.uint8), spans
