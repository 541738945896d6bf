"""Boxes of rows and columns.

A tensor counts as a matrix, [everything else, shape[-1]]; a vector has one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
        return (
            self.first_row < other.first_row + other.rows
            and other.first_row < self.first_row + self.rows
            and self.first_column < other.first_column + other.columns
            and other.first_column < self.first_column + self.columns
        )

    def is_inside(self, height: int, width: int) -> bool:
        """Whether the box is within a matrix of this size."""
        return self.first_row + self.rows <= height and self.first_column + self.columns <= width


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(height, width) of a tensor seen as a matrix."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)
