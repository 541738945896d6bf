"""The Triton kernel of `copies`: one launch copies all parts of a kind from a byte buffer.

Each program copies one tile of one part. It uses the widest elements that the part's addresses and
strides allow, up to 8 bytes: a warp then moves 256 bytes at a time. A part that is transposed on
the way is read along the buffer's runs and written along the target's. The kernel has no
annotations, because Triton would take them for globals. Axes: R = parts, B = blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weight_transfer.digest_kernels import UNSIGNED
from weight_transfer.launches import Launches
from weight_transfer.layout import VECTOR_BYTES
from weight_transfer.strides import Box, Part, block_table, boxes_2d, tile_of

BLOCK = 4096
TURN_TILE = (64, 64)
FIELDS = 8
"""Fields of a table row.

They are: target address, source offset in bytes, rows, columns, then row and column strides of the
target and of the source.
"""


@triton.jit
def _copy_kernel(
    table_ptr,
    block_table_ptr,
    buffer_ptr,
    DTYPE: tl.constexpr,
    IS_DENSE: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    entry = table_ptr + 8 * tl.load(block_table_ptr + 2 * program).to(tl.int64)
    tile = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    target = tl.load(entry).to(tl.pointer_type(DTYPE))
    offset = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    target_row = tl.load(entry + 4)
    source_column = tl.load(entry + 7)
    if TURNED > 1:  # what the compiler must know to move that many elements at a time
        target, offset = tl.multiple_of(target, 16), tl.multiple_of(offset, 16)
        rows, columns = tl.multiple_of(rows, TURNED), tl.multiple_of(columns, TURNED)
        target_row = tl.multiple_of(target_row, TURNED)
        source_column = tl.multiple_of(source_column, TURNED)
    source = (buffer_ptr + offset).to(tl.pointer_type(DTYPE))
    tiles_across = (columns + BLOCK_C - 1) // BLOCK_C
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    if TURNED:
        targets = target + r * target_row + c
        sources = source + c * source_column + r
    elif IS_DENSE:
        targets = target + r * target_row + c
        sources = source + r * tl.load(entry + 6) + c
    else:
        targets = target + r * target_row + c * tl.load(entry + 5)
        sources = source + r * tl.load(entry + 6) + c * source_column
    tl.store(targets, tl.load(sources, mask=inside, other=0), mask=inside)


_copies = Launches(_copy_kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Properties that all boxes of one launch share."""

    width: int
    """Bytes of an element."""
    is_dense: bool
    """Columns are runs on both sides."""
    turned: int
    """The buffer's runs are the target's columns: how many elements move at a time; else 0."""
    tile: tuple[int, int]


def prepare(parts: Sequence[Part]) -> list[Callable[[torch.Tensor], None]]:
    """Launches that copy every part from a buffer. Their tables are made and uploaded here."""
    kinds: dict[_Kind, list[list[int]]] = {}
    for part in parts:
        size = part.target.element_size()
        for box in boxes_2d(part.target.shape, part.target.stride(), part.strides):
            kind, entry = _entry(box, part.target.data_ptr(), part.offset_bytes, size)
            kinds.setdefault(kind, []).append(entry)
    device = parts[0].target.device
    return [_launch(table, kind, device) for kind, table in kinds.items()]


def _entry(box: Box, address: int, offset: int, size: int) -> tuple[_Kind, list[int]]:
    """A box's kind and table row. Dense columns are copied as the widest integers."""
    target, source = address + box.start[0] * size, offset + box.start[1] * size
    is_dense, width, turned = box.column == (1, 1), size, 0
    if is_dense:
        every = target | source | box.columns * size | box.row[0] * size | box.row[1] * size
        width = max(size, min(8, every & -every))
    elif box.column[0] == box.row[1] == 1 and min(box.rows, box.columns) >= TURN_TILE[0]:
        every = box.rows | box.columns | box.row[0] | box.column[1]
        whole = (every * size | target | source) % VECTOR_BYTES == 0
        turned = VECTOR_BYTES // size if whole else 1
    row = [step * size // width for step in box.row]
    columns = box.columns * size // width
    strides = [row[0], box.column[0], row[1], box.column[1]]
    tile = TURN_TILE if turned else tile_of(columns, BLOCK)
    kind = _Kind(width=width, is_dense=is_dense, turned=turned, tile=tile)
    return kind, [target, source, box.rows, columns, *strides]


def _launch(
    table: list[list[int]], kind: _Kind, device: torch.device
) -> Callable[[torch.Tensor], None]:
    table_R8 = torch.tensor(table, dtype=torch.int64).view(len(table), FIELDS)
    blocks_B2 = block_table(table_R8[:, 2], table_R8[:, 3], kind.tile)
    on_device, grid = (table_R8.to(device), blocks_B2.to(device)), len(blocks_B2)
    constants = {
        "DTYPE": UNSIGNED[kind.width],
        "IS_DENSE": kind.is_dense,
        "TURNED": kind.turned,
        "BLOCK_R": kind.tile[0],
        "BLOCK_C": kind.tile[1],
    }

    def launch(buffer_B: torch.Tensor) -> None:
        with torch.cuda.device_of(buffer_B):
            _copies(kind, grid, (*on_device, buffer_B), constants, num_warps=8)

    return launch
