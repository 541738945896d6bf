"""The Triton kernel of `copies`: one launch copies all parts of a kind from a byte buffer.

Each program copies one tile of one part. It uses the widest elements that the part's addresses and
strides allow, up to 8 bytes: a warp then moves 256 bytes at a time. The kernel has no annotations,
because Triton would take them for globals. Axes: R = parts, B = blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from weight_transfer.digest_kernels import UNSIGNED
from weight_transfer.launches import Launches
from weight_transfer.strides import Box, Part, block_table, boxes_2d, tile_of

BLOCK = 4096
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
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    entry = table_ptr + 8 * tl.load(block_table_ptr + 2 * program).to(tl.int64)
    tile = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    target = tl.load(entry).to(tl.pointer_type(DTYPE))
    source = (buffer_ptr + tl.load(entry + 1)).to(tl.pointer_type(DTYPE))
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    tiles_across = (columns + BLOCK_C - 1) // BLOCK_C
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    targets = target + r * tl.load(entry + 4)
    sources = source + r * tl.load(entry + 6)
    if IS_DENSE:
        targets += c
        sources += c
    else:
        targets += c * tl.load(entry + 5)
        sources += c * tl.load(entry + 7)
    tl.store(targets, tl.load(sources, mask=inside, other=0), mask=inside)


_copies = Launches(_copy_kernel)


def prepare(parts: Sequence[Part]) -> list[Callable[[torch.Tensor], None]]:
    """Launches that copy every part from a buffer. Their tables are made and uploaded here."""
    kinds: dict[tuple[int, bool, tuple[int, int]], list[list[int]]] = {}
    for part in parts:
        size = part.target.element_size()
        for box in boxes_2d(part.target.shape, part.target.stride(), part.strides):
            width, entry = _entry(box, part.target.data_ptr(), part.offset_bytes, size)
            kinds.setdefault((width, box.column == (1, 1), tile_of(entry[3], BLOCK)), []).append(
                entry
            )
    device = parts[0].target.device
    return [
        _launch(table, width, is_dense, tile, device)
        for (width, is_dense, tile), table in kinds.items()
    ]


def _entry(box: Box, address: int, offset: int, size: int) -> tuple[int, list[int]]:
    """(bytes per copied element, table row). Dense columns are copied as the widest integers."""
    target, source = address + box.start[0] * size, offset + box.start[1] * size
    width = size
    if box.column == (1, 1):
        every = target | source | box.columns * size | box.row[0] * size | box.row[1] * size
        width = max(size, min(8, every & -every))
    row = [step * size // width for step in box.row]
    columns = box.columns * size // width
    strides = [row[0], box.column[0], row[1], box.column[1]]
    return width, [target, source, box.rows, columns, *strides]


def _launch(
    table: list[list[int]], width: int, is_dense: bool, tile: tuple[int, int], device: torch.device
) -> Callable[[torch.Tensor], None]:
    table_R8 = torch.tensor(table, dtype=torch.int64).view(len(table), FIELDS)
    blocks_B2 = block_table(table_R8[:, 2], table_R8[:, 3], tile)
    on_device, grid = (table_R8.to(device), blocks_B2.to(device)), len(blocks_B2)
    constants = {
        "DTYPE": UNSIGNED[width],
        "IS_DENSE": is_dense,
        "BLOCK_R": tile[0],
        "BLOCK_C": tile[1],
    }

    def launch(buffer_B: torch.Tensor) -> None:
        with torch.cuda.device_of(buffer_B):
            _copies((width, is_dense, tile), grid, (*on_device, buffer_B), constants, num_warps=8)

    return launch
