"""Triton kernels of `digest`: the numbers of its torch path, at memory speed.

Imported only where Triton is installed. Each program sums the terms of one block of elements. It
adds the sum to the tensor's digest with one 64-bit atomic. Integer addition commutes, so the order
does not matter. Where elements of 1 or 2 bytes lie in whole words, a program of a prepared launch
reads words of 8 bytes and makes one key for each. The kernels have no annotations, because Triton
would take them for globals.
Axes: R = rows of a region, C = its columns; N = tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weight_transfer import splitmix
from weight_transfer.launches import Launches
from weight_transfer.strides import Box, block_table, boxes_2d, tile_of

GOLDEN: Any = tl.constexpr(splitmix.GOLDEN)
SPREAD: Any = tl.constexpr(splitmix.SPREAD)
MUL_1: Any = tl.constexpr(splitmix.MUL_1)
MUL_2: Any = tl.constexpr(splitmix.MUL_2)
PLACE_1: Any = tl.constexpr(splitmix.PLACE_1)
PLACE_2: Any = tl.constexpr(splitmix.PLACE_2)
PLACE_4: Any = tl.constexpr(splitmix.PLACE_4)
BLOCK = 4096
PREPARED_BLOCK = 8192
WORDS_BLOCK = 2048
UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _finalised(x):
    x = (x ^ (x >> 30)) * MUL_1
    x = (x ^ (x >> 27)) * MUL_2
    return x ^ (x >> 31)


@triton.jit
def _terms(bits, index, BYTES: tl.constexpr):
    """The terms of elements, from bits (uint64) and indices in the HF tensor (int64)."""
    index = index.to(tl.uint64, bitcast=True)
    if BYTES > 2:
        return _finalised((bits * SPREAD) ^ ((index + 1) * GOLDEN)).to(tl.int64, bitcast=True)
    IN_WORD: tl.constexpr = 8 // BYTES
    terms = (bits + 1) * _keys(index // IN_WORD)
    terms *= tl.where(index & 1 != 0, PLACE_1, tl.full([1, 1], 1, tl.uint64))
    terms *= tl.where(index & 2 != 0, PLACE_2, tl.full([1, 1], 1, tl.uint64))
    if IN_WORD == 8:
        terms *= tl.where(index & 4 != 0, PLACE_4, tl.full([1, 1], 1, tl.uint64))
    return terms.to(tl.int64, bitcast=True)


@triton.jit
def _keys(words):
    return _finalised((words + 1) * GOLDEN) | 1


@triton.jit
def _part(words, J: tl.constexpr, BYTES: tl.constexpr):
    """Bits of the words' elements in place J, and 1."""
    return ((words >> (8 * BYTES * J)) & ((1 << (8 * BYTES)) - 1)) + 1


@triton.jit
def _terms_of_words(words, index, BYTES: tl.constexpr):
    """Sums of the terms of words' elements, from the words (uint64) and their indices (int64)."""
    total = _part(words, 0, BYTES) + _part(words, 1, BYTES) * PLACE_1
    total += (_part(words, 2, BYTES) + _part(words, 3, BYTES) * PLACE_1) * PLACE_2
    if BYTES == 1:
        more = _part(words, 4, BYTES) + _part(words, 5, BYTES) * PLACE_1
        more += (_part(words, 6, BYTES) + _part(words, 7, BYTES) * PLACE_1) * PLACE_2
        total += more * PLACE_4
    return (total * _keys(index.to(tl.uint64, bitcast=True))).to(tl.int64, bitcast=True)


@triton.jit
def _region_kernel(
    bits_ptr,
    out_ptr,
    rows,
    columns,
    row_memory,
    column_memory,
    row_index,
    column_index,
    first_index,
    tiles_across,
    DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    tile = tl.program_id(0).to(tl.int64)
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    elements = bits_ptr.to(tl.pointer_type(DTYPE)) + r * row_memory + c * column_memory
    bits = tl.load(elements, mask=inside, other=0).to(tl.uint64)
    terms = _terms(bits, first_index + r * row_index + c * column_index, BYTES)
    terms = tl.where(inside, terms, tl.zeros_like(terms))
    tl.atomic_add(out_ptr, tl.sum(tl.sum(terms, axis=1), axis=0), sem="relaxed")


@triton.jit
def _prepared_kernel(
    table_ptr,
    block_table_ptr,
    out_ptr,
    BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    IS_DENSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """UNIT: what the table counts in, and a program reads: words (uint64), or elements."""
    program = tl.program_id(0).to(tl.int64)
    entry = table_ptr + 9 * tl.load(block_table_ptr + 2 * program).to(tl.int64)
    tile = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    pointer = tl.load(entry).to(tl.pointer_type(UNIT))
    out = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    row_memory = tl.load(entry + 4)
    if ALIGN > 1:
        # 16-byte loads: ALIGN units have 16 bytes; it divides the columns and the row's stride.
        pointer = tl.multiple_of(pointer, 16)
        columns = tl.multiple_of(columns, ALIGN)
        row_memory = tl.multiple_of(row_memory, ALIGN)
    tiles_across = (columns + BLOCK_C - 1) // BLOCK_C
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    units = pointer + r * row_memory
    if IS_DENSE:
        units += c
    else:
        units += c * tl.load(entry + 5)
    bits = tl.load(units, mask=inside, other=0).to(tl.uint64)
    index = tl.load(entry + 8) + r * tl.load(entry + 6) + c * tl.load(entry + 7)
    if UNIT.primitive_bitwidth == 8 * BYTES:
        terms = _terms(bits, index, BYTES)
    else:
        terms = _terms_of_words(bits, index, BYTES)
    terms = tl.where(inside, terms, tl.zeros_like(terms))
    tl.atomic_add(out_ptr + out, tl.sum(tl.sum(terms, axis=1), axis=0), sem="relaxed")


_prepared = Launches(_prepared_kernel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch that adds regions' digests to their rows of an output."""

    table_R9: torch.Tensor
    blocks_B2: torch.Tensor
    kind: _Kind

    def __call__(self, out_N: torch.Tensor) -> None:
        """Queue it on the current stream."""
        kind = self.kind
        constants = {
            "BYTES": kind.size,
            "UNIT": UNSIGNED[kind.unit],
            "IS_DENSE": kind.is_dense,
            "ALIGN": kind.align,
            "BLOCK_R": kind.tile[0],
            "BLOCK_C": kind.tile[1],
        }
        args = (self.table_R9, self.blocks_B2, out_N)
        with torch.cuda.device_of(out_N):
            _prepared(kind, len(self.blocks_B2), args, constants, num_warps=8)

    def move(self, nbytes: int) -> None:
        """Queue, on the current stream, that the regions are so much further in memory."""
        self.table_R9[:, 0] += nbytes


def prepare(
    tensors: Sequence[torch.Tensor],
    rows: Sequence[int],
    origins: Sequence[tuple[int, Sequence[int]]],
) -> list[Prepared]:
    """Launches that add each region's digest to its row of an output.

    Their tables are made and uploaded here.
    """
    found: dict[_Kind, list[list[int]]] = {}
    for tensor, row, (first, strides) in zip(tensors, rows, origins, strict=True):
        size = tensor.element_size()
        for box in boxes_2d(tensor.shape, tensor.stride(), strides):
            address, at = tensor.data_ptr() + size * box.start[0], first + box.start[1]
            kind = _Kind.of(box, address, at, size)
            per = kind.elements
            memory, index = zip(box.row, box.column, strict=True)
            sides = (memory[0] // per, memory[1], index[0] // per, index[1])
            entry = [address, row, box.rows, box.columns // per, *sides, at // per]
            found.setdefault(kind, []).append(entry)
    return [_launch(table, kind, tensors[0].device) for kind, table in found.items()]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties that all boxes of one launch share."""

    size: int
    unit: int
    """Bytes of one read: a word's, or an element's."""
    is_dense: bool
    align: int
    tile: tuple[int, int]

    @property
    def elements(self) -> int:
        """Number of elements in a unit."""
        return self.unit // self.size

    @staticmethod
    def of(box: Box, address: int, at: int, size: int) -> _Kind:
        """The kind of a box at an address, whose first element has index `at`."""
        is_dense, per = box.column[0] == 1, 8 // size
        places = (box.columns, at, *box.row)
        is_whole = box.column == (1, 1) and not any(n % per for n in places)
        if size > 2 or not is_whole or address % 8:
            per = 1
        unit, block = size * per, PREPARED_BLOCK if per == 1 else WORDS_BLOCK
        align = max(1, 16 // unit)
        is_aligned = (box.columns // per | box.row[0] // per) % align == 0 and address % 16 == 0
        align = align if is_dense and is_aligned else 1
        return _Kind(size, unit, is_dense, align, tile_of(box.columns // per, block))


def _launch(table: list[list[int]], kind: _Kind, device: torch.device) -> Prepared:
    table_R9 = torch.tensor(table, dtype=torch.int64)
    blocks_B2 = block_table(table_R9[:, 2], table_R9[:, 3], kind.tile)
    return Prepared(table_R9.to(device), blocks_B2.to(device), kind)


def launch_region(
    *, bits_RC: torch.Tensor, first_index: int, index_strides: tuple[int, int], out: torch.Tensor
) -> None:
    """Queue, on the current stream, adding an integer [R, C] region's digest to out[0].

    out is int64; the caller zeroes it.
    """
    rows, columns = bits_RC.shape
    block_c = min(BLOCK, triton.next_power_of_2(columns))
    block_r = BLOCK // block_c
    tiles_across = triton.cdiv(columns, block_c)
    with torch.cuda.device_of(bits_RC):
        _region_kernel[(triton.cdiv(rows, block_r) * tiles_across,)](
            bits_RC,
            out,
            rows,
            columns,
            *bits_RC.stride(),
            *index_strides,
            first_index,
            tiles_across,
            DTYPE=UNSIGNED[bits_RC.element_size()],
            BLOCK_R=block_r,
            BLOCK_C=block_c,
        )
