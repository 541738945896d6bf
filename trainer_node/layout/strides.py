"""Turns an array of indices into strided pieces. Pure functions.

    index_HW[h, w]   which element of the ranks' parameters, end to end, stands at (h, w)
    derive(...)      -> Layout: boxes of the HF tensor, each with strides into one rank's parameter
    check(...)       creates the array again from the pieces and compares

Every rank's parameter has equally many elements, so `index // numel` is the rank. A piece has two
strides for its rows and two for its columns: q's heads in a fused weight, a transposed expert.

Axes: H = rows and W = columns of an HF tensor, seen as a matrix (`boxes.matrix`); N =
elements of a sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weight_transfer.boxes import Box, matrix

MAX_PIECES = 4096
"""Pieces of one HF tensor. A tensor with more is as good as unordered."""
BLOCK_ELEMENTS = 1 << 22
"""Elements that are compared at a time, which bounds the memory."""


class NotStridedError(Exception):
    """An HF tensor is not just a rearrangement of the parameter's elements. The text says why."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`outer` runs of `inner` equidistant elements, the runs' beginnings equidistant too."""

    outer: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def count(self) -> int:
        """Positions on the axis."""
        return self.outer * self.inner

    def offset(self, position: int) -> int:
        """Distance of a position from position 0."""
        run, within = divmod(position, self.inner)
        return run * self.outer_stride + within * self.inner_stride

    def offsets(self, first: int, count: int) -> torch.Tensor:
        """Distances [N] of positions [first, first + count) from position 0."""
        n = torch.arange(first, first + count)
        return (n // self.inner) * self.outer_stride + (n % self.inner) * self.inner_stride

    def cut(self, first: int, count: int) -> Iterator[tuple[int, Axis]]:
        """Yield positions [first, first + count) as (first position, axis): the rest of a run,
        whole runs, and the beginning of one."""
        end = first + count
        while first < end:
            within = first % self.inner
            runs = 0 if within else (end - first) // self.inner
            if runs:
                yield (
                    first,
                    replace(self, outer=runs, outer_stride=self.outer_stride if runs > 1 else 0),
                )
                first += runs * self.inner
            else:
                some = min(self.inner - within, end - first)
                yield first, Axis(1, some, 0, self.inner_stride if some > 1 else 0)
                first += some


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an HF tensor that is a strided part of one rank's parameter."""

    part: int
    """The rank, in the group that the parameter is split over."""
    box: Box
    offset: int
    """First element in the parameter. Strides count elements."""
    rows: Axis
    columns: Axis

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of the box in a contiguous parameter: [row runs, rows, column runs, columns]."""
        sizes = (self.rows.outer, self.rows.inner, self.columns.outer, self.columns.inner)
        by = (
            self.rows.outer_stride,
            self.rows.inner_stride,
            self.columns.outer_stride,
            self.columns.inner_stride,
        )
        return tensor.as_strided(sizes, by, tensor.storage_offset() + self.offset)

    def clipped(self, height: int) -> Iterator[Piece]:
        """Yield the piece's rows above row `height` of the HF tensor, as one or two pieces."""
        rows = min(self.box.rows, max(0, height - self.box.first_row))
        return self.cut(replace(self.box, rows=rows))

    def cut(self, box: Box) -> Iterator[Piece]:
        """Yield a box of the piece's own box, in pieces."""
        first_row, first_column = self.box.first_row, self.box.first_column
        for row, rows in self.rows.cut(box.first_row - first_row, box.rows):
            for column, columns in self.columns.cut(box.first_column - first_column, box.columns):
                offset = self.rows.offset(row) + self.columns.offset(column)
                yield Piece(
                    part=self.part,
                    box=Box(first_row + row, rows.count, first_column + column, columns.count),
                    offset=self.offset + offset,
                    rows=rows,
                    columns=columns,
                )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an HF tensor's elements are in the ranks' parameters."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def of_part(self, part: int) -> Iterator[Piece]:
        """Yield the pieces of one rank."""
        return (piece for piece in self.pieces if piece.part == part)

    def stacked(self, index: int, count: int) -> Layout:
        """This layout as entry `index` of `count` equal ones along a new first dimension."""
        height, _ = matrix(self.shape)
        if len(self.shape) < 2:  # a vector becomes a row
            pieces = (
                replace(p, box=Box(index, 1, p.box.first_row, p.box.rows), rows=ONE, columns=p.rows)
                for p in self.pieces
            )
        else:
            pieces = (
                replace(p, box=replace(p.box, first_row=p.box.first_row + index * height))
                for p in self.pieces
            )
        return Layout((count, *self.shape), tuple(pieces))

    def one_of_stack(self) -> Layout:
        """The layout that `stacked` made this one of."""
        height = math.prod(self.shape[1:-1])
        first = min(p.box.first_row for p in self.pieces) // height * height
        pieces = (
            replace(p, box=replace(p.box, first_row=p.box.first_row - first)) for p in self.pieces
        )
        return Layout(self.shape[1:], tuple(pieces))

    def transposed(self) -> Layout:
        """The layout of a matrix' transpose."""
        pieces = (
            replace(
                p,
                box=Box(p.box.first_column, p.box.columns, p.box.first_row, p.box.rows),
                rows=p.columns,
                columns=p.rows,
            )
            for p in self.pieces
        )
        return Layout(self.shape[::-1], tuple(pieces))

    def fused_rows(self, part: int, columns: int) -> torch.Tensor:
        """For each row of this HF matrix that a rank has, its row [N] in the rank's parameter.

        An adapter's B has these rows, so this is their place in the fused linear's output.

        Args:
            columns: of the parameter.

        Raises:
            NotStridedError: the HF matrix's rows are not rows of the parameter.
        """
        rows = []
        for piece in sorted(self.of_part(part), key=lambda p: p.box.first_row):
            first = piece.offset + piece.rows.offsets(0, piece.box.rows)
            straight = piece.columns.count == columns and _is_run(piece.columns)
            if not straight or (first % columns).any():
                raise NotStridedError("its rows are not rows of the parameter")
            rows.append(first // columns)
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


ONE = Axis(1, 1, 0, 0)


def _is_run(axis: Axis) -> bool:
    return axis.outer == 1 and (axis.inner == 1 or axis.inner_stride == 1)


def derive(index: torch.Tensor, numel: int) -> Layout:
    """Derive the layout of an HF tensor from the indices at its places.

    Args:
        index: of any shape, integers.
        numel: elements of each rank's parameter.

    Raises:
        NotStridedError: there would be more than `MAX_PIECES` pieces.
    """
    index_HW = index.reshape(matrix(index.shape))
    pieces: list[Piece] = []
    for first, end in _bands(index_HW, numel) if index.numel() else ():
        rows = list(_axes(index_HW[first:end, 0].long()))
        parts = index_HW[first] // numel
        cuts = [0, *((parts[1:] != parts[:-1]).nonzero()[:, 0] + 1).tolist(), index_HW.shape[1]]
        for begin, stop in itertools.pairwise(cuts):
            columns = list(_axes(index_HW[first, begin:stop].long()))
            if len(pieces) + len(rows) * len(columns) > MAX_PIECES:
                raise NotStridedError("its elements have no order")
            part = int(parts[begin])
            pieces += [
                Piece(
                    part=part,
                    box=Box(first + row, down.count, begin + column, across.count),
                    offset=int(index_HW[first + row, begin + column]) - part * numel,
                    rows=down,
                    columns=across,
                )
                for row, down in rows
                for column, across in columns
            ]
    return Layout(tuple(index.shape), tuple(pieces))


def _bands(index_HW: torch.Tensor, numel: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of rows that differ from each other by a constant, on the same ranks."""
    height, width = index_HW.shape
    first, found, step = 0, 0, max(1, BLOCK_ELEMENTS // width)
    on_one = int(index_HW.max()) < numel
    for begin in range(1, height, step):
        these, before = index_HW[begin : begin + step], index_HW[begin - 1 : begin + step - 1]
        before = before[: len(these)]
        apart = these - before
        same = (apart == apart[:, :1]).all(1)
        if not on_one:
            same &= (these // numel == before // numel).all(1)
        for row in ((~same).nonzero()[:, 0] + begin).tolist():
            yield first, row
            first, found = row, found + 1
            if found > MAX_PIECES:
                raise NotStridedError("its elements have no order")
    yield first, height


def _axes(sequence_N: torch.Tensor) -> Iterator[tuple[int, Axis]]:
    """Cut a sequence into axes, greedily: (first position, axis)."""
    first, found = 0, 0
    while first < len(sequence_N):
        axis = _longest(sequence_N[first:])
        yield first, axis
        first, found = first + axis.count, found + 1
        if found > MAX_PIECES:
            raise NotStridedError("its elements have no order")


def _longest(sequence_N: torch.Tensor) -> Axis:
    """The axis that a sequence begins with. A view's strides cannot be negative."""
    count = len(sequence_N)
    apart = sequence_N[1:] - sequence_N[:-1]
    if count == 1 or apart[0] < 0:
        return ONE
    inner = _prefix(apart == apart[0]) + 1
    axis = Axis(1, inner, 0, int(apart[0]))
    if inner == count or sequence_N[inner] < sequence_N[0]:
        return axis
    runs = replace(axis, outer=2, outer_stride=int(sequence_N[inner] - sequence_N[0]))
    outer = _prefix(sequence_N - sequence_N[0] == runs.offsets(0, count)) // inner
    return replace(runs, outer=outer) if outer > 1 else axis


def _prefix(ok_N: torch.Tensor) -> int:
    """How many are true before the first false."""
    return len(ok_N) if bool(ok_N.all()) else int(ok_N.to(torch.uint8).argmin())


def check(layout: Layout, index: torch.Tensor, numel: int) -> None:
    """Compare the indices with those that the pieces stand for.

    Raises:
        NotStridedError: they differ.
    """
    if tuple(index.shape) != layout.shape:
        raise NotStridedError("its shape depends on the values")
    index_HW = index.reshape(matrix(index.shape))
    if sum(piece.box.numel for piece in layout.pieces) != index.numel():
        raise NotStridedError("its pieces are not the whole")
    for piece in layout.pieces:
        box = piece.box
        across_W = piece.columns.offsets(0, box.columns) + piece.offset + piece.part * numel
        step = max(1, BLOCK_ELEMENTS // max(1, box.columns))
        for row in range(0, box.rows, step):
            down_H = piece.rows.offsets(row, min(step, box.rows - row))
            here_HW = index_HW[box.first_row + row :, box.first_column :]
            if not torch.equal(
                here_HW[: len(down_H), : box.columns].long(), down_H[:, None] + across_W
            ):
                raise NotStridedError("its values are not the parameter's")


def widened(layout: Layout, columns: int, to: int) -> Layout | None:
    """Extend a layout that was found with a few columns to a parameter of `to` columns. None: the
    columns are rearranged too."""
    if len(layout.shape) < 2 or layout.shape[-1] % columns:
        return None
    pieces = []
    for p in layout.pieces:
        strides = (p.offset, p.rows.outer_stride, p.rows.inner_stride, p.box.first_column)
        if (
            p.columns.count != columns
            or not _is_run(p.columns)
            or any(n % columns for n in strides)
        ):
            return None
        offset, outer, inner, column = (n // columns * to for n in strides)
        pieces.append(
            replace(
                p,
                box=replace(p.box, first_column=column, columns=to),
                offset=offset,
                rows=replace(p.rows, outer_stride=outer, inner_stride=inner),
                columns=Axis(1, to, 0, 1 if to > 1 else 0),
            )
        )
    return Layout((*layout.shape[:-1], layout.shape[-1] // columns * to), tuple(pieces))
