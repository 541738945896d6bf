"""Splits strided boxes into two-dimensional ones and makes the tables that a kernel walks. Pure.

A box is a size and, for each of two sides, one stride per dimension. The sides are memory and HF
index, or target and source. Axes: R = boxes, B = blocks.

    >>> [(b.rows, b.columns, b.row, b.column) for b in boxes_2d((2, 3, 4), (12, 4, 1), (48, 4, 1))]
    [(2, 12, (12, 48), (1, 1))]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Pair = tuple[int, int]
SMALLEST_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Rows and columns. `start`, `row`, `column`: offset and strides on each side."""

    rows: int
    columns: int
    start: Pair
    row: Pair
    column: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of a buffer and the view that they are copied to.

    Element j of `target` comes from offset + sum_d j_d * strides[d].
    """

    target: torch.Tensor
    offset_bytes: int
    """Offset of the first element in the buffer."""
    strides: tuple[int, ...]
    """Strides in the buffer, in elements of what was sent."""

    def source_in(self, flat: torch.Tensor) -> torch.Tensor:
        """The part within a buffer's elements, in the target's shape."""
        first = flat.storage_offset() + self.offset_bytes // flat.element_size()
        return flat.as_strided(self.target.shape, self.strides, first)


def boxes_2d(size: Sequence[int], first: Sequence[int], second: Sequence[int]) -> Iterator[Box]:
    """The same elements in two-dimensional boxes; none for an empty box.

    The dimension that is denser on the first side comes last.
    """
    if 0 in size:
        return
    dims = _merged(size, first, second) or [(1, 1, 1)]
    dims = [(1, 0, 0)] * (2 - len(dims)) + dims
    (rows, *row), (columns, *column) = dims[-2:]
    outer = dims[:-2]
    for place in itertools.product(*(range(n) for n, _, _ in outer)):
        start = tuple(
            sum(i * dim[side] for i, dim in zip(place, outer, strict=True)) for side in (1, 2)
        )
        yield Box(
            rows=rows,
            columns=columns,
            start=(start[0], start[1]),
            row=(row[0], row[1]),
            column=(column[0], column[1]),
        )


def _merged(
    size: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(size, stride, stride) of each dimension, from the outermost on the first side.

    Neighbours are merged where both sides allow it.
    """
    dims: list[tuple[int, int, int]] = []
    for n, a, b in sorted(zip(size, first, second, strict=True), key=lambda dim: -dim[1]):
        if n == 1:
            continue
        if dims and dims[-1][1:] == (n * a, n * b):
            dims[-1] = (dims[-1][0] * n, a, b)
        else:
            dims.append((n, a, b))
    return dims


def tile_of(columns: int, block: int) -> Pair:
    """(rows, columns) of a tile of `block` elements, both powers of two.

    The widest tile whose columns exceed the box's by at most a sixteenth.
    """
    widths = [SMALLEST_WIDTH]
    while widths[-1] < min(block, columns):
        widths.append(2 * widths[-1])
    covered = {w: -(-columns // w) * w for w in widths}
    least = max(min(covered.values()), columns * 17 // 16)
    width = max(w for w in widths if covered[w] <= least)
    return block // width, width


def block_table(rows_R: torch.Tensor, columns_R: torch.Tensor, tile: Pair) -> torch.Tensor:
    """int32 [B, 2]: each block's box, and the index of its tile in that box.

    In numpy: with many threads torch takes milliseconds for a few hundred boxes.
    """
    rows, columns = rows_R.numpy(), columns_R.numpy()
    tiles_R = (rows + tile[0] - 1) // tile[0] * ((columns + tile[1] - 1) // tile[1])
    boxes_B = np.repeat(np.arange(len(tiles_R)), tiles_R)
    first_R = np.cumsum(tiles_R) - tiles_R
    table_B2 = np.stack([boxes_B, np.arange(len(boxes_B)) - first_R[boxes_B]], axis=1)
    return torch.from_numpy(table_B2.astype(np.int32))
