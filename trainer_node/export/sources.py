"""Where the elements of a merged tensor come from: a parameter, and an adapter's matrices.

A `Member` is one tensor, or a piece of one, and its place in a chunk's buffer.

Axes: O = out features, I = in features, R = rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from trainer_node.adapters.merge import LoraDelta
from trainer_node.adapters.rounding import Corner
from trainer_node.layout.strides import Piece
from weight_transfer.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the elements of an HF tensor, or of a piece of it, are in a parameter.

    They are groups of rows. Columns are contiguous, or groups of equidistant ones. Strides and
    offset count elements.
    """

    param: torch.Tensor
    offset: int
    rows: int
    """Rows of one group."""
    columns: int
    row_stride: int
    shape: tuple[int, ...]
    """Shape of the HF tensor, or of the piece."""
    groups: int = 1
    group_stride: int = 0
    column_groups: int = 1
    column_group_stride: int = 0
    column_stride: int = 1

    @staticmethod
    def of(param: torch.Tensor, piece: Piece, *, is_vector: bool) -> Source:
        """A probed piece; of a vector, one run becomes one row."""
        box, down, across = piece.box, piece.rows, piece.columns
        is_row = is_vector and down.outer == 1 and (down.inner == 1 or down.inner_stride == 1)
        columns = box.rows if is_row else box.columns
        return Source(
            param=param,
            offset=piece.offset,
            groups=down.outer,
            rows=1 if is_row else down.inner,
            columns=columns,
            group_stride=down.outer_stride,
            row_stride=columns if is_row or down.inner == 1 else down.inner_stride,
            shape=(box.rows,) if is_vector else (box.rows, box.columns),
            column_groups=across.outer,
            column_group_stride=across.outer_stride,
            column_stride=across.inner_stride if across.inner > 1 else 1,
        )

    @staticmethod
    def whole(param: torch.Tensor, *, first: int = 0, rows: int | None = None) -> Source:
        """Rows [first, first + rows) of a contiguous parameter; a vector is one row."""
        is_row = param.dim() < 2
        width = 1 if is_row else math.prod(param.shape[1:])
        if rows is None:
            rows = param.numel() if is_row else param.shape[0]
        columns = rows if is_row else width
        return Source(
            param=param,
            offset=first * width,
            rows=1 if is_row else rows,
            columns=columns,
            row_stride=columns,
            shape=(rows, *param.shape[1:]) if param.dim() else (),
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.groups * self.rows * self.columns

    @property
    def contiguous(self) -> bool:
        """Whether the elements are one run."""
        return (
            self.in_rows
            and self.groups == 1
            and (self.rows == 1 or self.row_stride == self.columns)
        )

    @property
    def in_rows(self) -> bool:
        """Whether the columns of a row are one run."""
        return self.column_groups == 1 and self.column_stride == 1

    @property
    def turned(self) -> bool:
        """Whether the rows of a column are one run, and the columns of a row are not."""
        return not self.in_rows and self.groups == 1 and (self.rows == 1 or self.row_stride == 1)

    def address(self) -> int:
        """Present address of the first element."""
        return self.param.data_ptr() + self.offset * self.param.element_size()

    def view(self) -> torch.Tensor:
        """Return [groups, rows, column groups, columns of one], a view."""
        data = self.param.detach()
        sizes = (self.groups, self.rows, self.column_groups, self.columns // self.column_groups)
        strides = (
            self.group_stride,
            self.row_stride,
            self.column_group_stride,
            self.column_stride,
        )
        return data.as_strided(sizes, strides, data.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """An adapter in place: A [R, I] and B [O, R], or expert `expert` of A [E, R, I] and B [E, O,
    R]; fp32, contiguous. `box` cuts B's rows and A's columns; of a transposed tensor, A's columns
    and B's rows."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    expert: int | None
    box: Box | None = None
    transposed: bool = False
    """HF has [in, out]."""
    first_expert: int | None = None
    """Of a stacked HF tensor: the model's number of expert 0 here."""

    @property
    def rank(self) -> int:
        """R."""
        return self.lora_B.shape[-1]

    @property
    def in_rows(self) -> bool:
        """Whether A's rows follow each other without a gap."""
        if self.transposed:
            return False
        return self.box is None or self.box.columns == self.lora_A.shape[-1]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from a row of A to the next, from a column to the next, and likewise of B."""
        rank, width = self.rank, self.lora_A.shape[-1]
        return (1, rank, 1, width) if self.transposed else (width, 1, rank, 1)

    def addresses(self) -> tuple[int, int]:
        """Present addresses of the first elements of A and B."""
        e, box = self.expert or 0, self.box or Box(0, 0, 0, 0)
        a, b = (self.lora_B, self.lora_A) if self.transposed else (self.lora_A, self.lora_B)
        _, a_column, b_row, _ = self.strides
        first_a = e * a.shape[-2] * a.shape[-1] + box.first_column * a_column
        first_b = e * b.shape[-2] * b.shape[-1] + box.first_row * b_row
        return a.data_ptr() + 4 * first_a, b.data_ptr() + 4 * first_b

    def stacks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B, cut, of all experts if there are several."""
        a, b = self.lora_A.detach(), self.lora_B.detach()
        if self.transposed:
            a, b = b.transpose(-1, -2), a.transpose(-1, -2)
        if self.box is None:
            return a, b
        box = self.box
        return (
            a.narrow(-1, box.first_column, box.columns),
            b.narrow(-2, box.first_row, box.rows),
        )

    def of_stack(self, box: Box, shape: tuple[int, ...]) -> Delta:
        """The expert whose part of a stacked tensor of a shape the box is."""
        assert self.first_expert is not None
        expert, row = divmod(box.first_row, shape[1])
        here = replace(box, first_row=row)
        return replace(self, expert=expert - self.first_expert, box=here)

    def matrices(self) -> LoraDelta:
        """Return A and B of this adapter, as views."""
        a, b = self.stacks()
        return LoraDelta(
            lora_A_RI=a if self.expert is None else a[self.expert],
            lora_B_OR=b if self.expert is None else b[self.expert],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A tensor, or a piece of one, in a chunk's buffer."""

    source: Source
    delta: Delta | None
    offset: int
    """First byte in the buffer."""
    row_stride: int
    """Elements from one row to the next, in the buffer."""
    corner: Corner
    """Where it begins in its HF tensor."""

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        """The parameter and the adapter's matrices."""
        d = self.delta
        return (self.source.param,) if d is None else (self.source.param, d.lora_A, d.lora_B)

    def addresses(self) -> tuple[int, int, int]:
        """Present addresses of the weight, A and B; 0 without an adapter."""
        return self.source.address(), *(self.delta.addresses() if self.delta else (0, 0))
