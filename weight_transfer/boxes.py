"""Boxes of rows and columns, and the parts of strided regions that lie in them. Pure.

A tensor counts as a matrix, [everything else, shape[-1]]; a vector has one column.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_BOXES = 4096
Dim = tuple[int, int, int]
"""Size, stride in the HF tensor, stride in memory; in elements, or in rows and columns."""


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [first_row, first_row + rows) and columns likewise."""

    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def overlaps(self, other: Box) -> bool:
        """Whether the two boxes share an element."""
        return self.within(other) is not None

    def within(self, other: Box) -> Box | None:
        """The elements that the two boxes share; None: they share none."""
        top, left = max(self.first_row, other.first_row), max(self.first_column, other.first_column)
        bottom = min(self.first_row + self.rows, other.first_row + other.rows)
        right = min(self.first_column + self.columns, other.first_column + other.columns)
        if top >= bottom or left >= right:
            return None
        return Box(top, bottom - top, left, right - left)

    def is_inside(self, height: int, width: int) -> bool:
        """Whether the box is within a matrix of this size."""
        return self.first_row + self.rows <= height and self.first_column + self.columns <= width

    def contains(self, other: Box) -> bool:
        """Whether every element of the other box is in this one."""
        return self.within(other) == other


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(height, width) of a tensor seen as a matrix."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element; None: there are none. Pure."""
    above: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.first_row):
        above = [one for one in above if one.first_row + one.rows > box.first_row]
        for one in above:
            if one.overlaps(box):
                return one, box
        above.append(box)
    return None


# ------------------------------------------------------------ regions


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Elements of an HF tensor: element j has index first_index + sum_d j_d * index_strides[d]
    there, and is sum_d j_d * strides[d] elements after `offset` in memory."""

    first_index: int
    offset: int
    size: tuple[int, ...]
    index_strides: tuple[int, ...]
    strides: tuple[int, ...]


def boxes_of(
    first_index: int, size: Sequence[int], index_strides: Sequence[int], shape: Sequence[int]
) -> list[Box] | None:
    """A region of an HF tensor as boxes of it, which share no element. Pure.

    Returns: None if the region is not a block of rows and columns, or needs more than `MOST_BOXES`.
    """
    _, width = matrix(shape)
    axes = _axes(first_index, size, index_strides, [0] * len(size), width)
    if axes is None:
        return None
    (row, rows), (column, columns) = axes
    if math.prod(n for n, _, _ in [*rows[:-1], *columns[:-1]]) > MOST_BOXES:
        return None
    down, across = _spans(row, rows), _spans(column, columns)
    if len(down) * len(across) > MOST_BOXES:
        return None
    return [Box(r, n, c, m) for r, n in down for c, m in across]


def _spans(first: int, dims: Sequence[Dim]) -> list[tuple[int, int]]:
    """Runs of consecutive positions on one axis: (first, count)."""
    dims = sorted(dims, key=lambda dim: dim[1])
    count = 1
    while dims and dims[0][1] == count:
        count *= dims.pop(0)[0]
    steps = itertools.product(*(range(0, n * step, step) for n, step, _ in dims))
    return [(first + sum(step), count) for step in steps]


def cut(region: Strided, box: Box, shape: Sequence[int]) -> Iterator[Strided]:
    """Yield the region's elements that lie in a box of its HF tensor. Pure.

    Raises:
        ValueError: the region is not a block of rows and columns.
    """
    _, width = matrix(shape)
    axes = _axes(region.first_index, region.size, region.index_strides, region.strides, width)
    if axes is None:
        raise ValueError(
            f"a region of strides {region.index_strides} is not a box of {tuple(shape)}"
        )
    (row, rows), (column, columns) = axes
    for r, row_offset, down in _within(row, rows, box.first_row, box.rows):
        for c, column_offset, across in _within(column, columns, box.first_column, box.columns):
            dims = [(n, s * width, t) for n, s, t in down] + list(across)
            yield Strided(
                first_index=r * width + c,
                offset=region.offset + row_offset + column_offset,
                size=tuple(n for n, _, _ in dims),
                index_strides=tuple(s for _, s, _ in dims),
                strides=tuple(t for _, _, t in dims),
            )


def _axes(
    first_index: int,
    size: Sequence[int],
    index_strides: Sequence[int],
    strides: Sequence[int],
    width: int,
) -> tuple[tuple[int, list[Dim]], tuple[int, list[Dim]]] | None:
    """The region's first row and its dimensions along rows, and likewise of columns. None: a
    dimension is neither."""
    if not width:
        return None
    row, column = divmod(first_index, width)
    rows: list[Dim] = []
    columns: list[Dim] = []
    for n, step, stride in zip(size, index_strides, strides, strict=True):
        if n == 1:
            continue
        if step % width == 0 and step:
            rows.append((n, step // width, stride))
        elif step and width % step == 0 and column < step and n * step > width:
            if (n * step) % width:  # it ends within a row
                return None
            per_row = width // step  # a run over several rows
            rows.append((n // per_row, 1, stride * per_row))
            columns.append((per_row, step, stride))
        else:
            columns.append((n, step, stride))
    if column + sum((n - 1) * step for n, step, _ in columns) >= width:
        return None
    rows.sort(key=lambda dim: -dim[1])
    columns.sort(key=lambda dim: -dim[1])
    if any(step == 0 for _, step, _ in columns):
        return None
    return (row, rows), (column, columns)


def _within(
    first: int, dims: Sequence[Dim], begin: int, count: int
) -> Iterator[tuple[int, int, tuple[Dim, ...]]]:
    """Yield what of an axis lies in [begin, begin + count): (first position, offset in memory,
    dimensions). The first dimension has the longest steps."""
    end, last = begin + count, first + sum((n - 1) * step for n, step, _ in dims)
    if last < begin or first >= end:
        return
    if begin <= first and last < end:
        yield first, 0, tuple(dims)
        return
    (n, step, stride), inner = dims[0], dims[1:]
    reach = sum((m - 1) * s for m, s, _ in inner)
    whole_from = min(n, max(0, -(-(begin - first) // step)))
    whole_to = max(whole_from, min(n, (end - 1 - first - reach) // step + 1))
    for i in range(whole_from):
        yield from _moved(i, step, stride, _within(first + i * step, inner, begin, count))
    if whole_to > whole_from:
        kept = whole_to - whole_from
        head = ((kept, step, stride),) if kept > 1 else ()
        yield first + whole_from * step, whole_from * stride, (*head, *inner)
    for i in range(whole_to, n):
        yield from _moved(i, step, stride, _within(first + i * step, inner, begin, count))


def _moved(
    i: int, step: int, stride: int, found: Iterator[tuple[int, int, tuple[Dim, ...]]]
) -> Iterator[tuple[int, int, tuple[Dim, ...]]]:
    return ((first, offset + i * stride, dims) for first, offset, dims in found)
