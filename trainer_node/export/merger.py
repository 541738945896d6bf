"""Merges the tensors of a chunk and writes them there, with a few kernels.

One launch merges equally shaped tensors, such as all experts' gate and up of a layer. It reads a
table of addresses on the device, which is made again when a parameter has moved. On a CPU, and
where the kernels cannot, torch merges one tensor after the other, to the same bits.

Axes: B = bytes, O = out features, T = tensors.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer_node.adapters.merge import merge_kernels
from trainer_node.adapters.rounding import Rounding, merge_matrix
from trainer_node.export.sources import Member
from weight_transfer.layout import VECTOR_BYTES

Entries = list[tuple[int, ...]]
"""Rows of a launch's table."""


class Launch(Protocol):
    """Equally shaped tensors that one kernel handles."""

    members: list[Member]

    def entries(self, rounding: Rounding) -> Entries:
        """The kernel's table with present addresses: a row for each member."""
        ...


class AddressTable:
    """The launches' tables on the device, made again when a tensor has moved or rounding changed.

    The caller synchronises once after the constructor, because later fills may run on another
    stream.
    """

    def __init__(
        self, launches: Sequence[Launch], rounding: Callable[[], Rounding], device: torch.device
    ) -> None:
        self._launches, self._rounding, self._device = launches, rounding, device
        self._tensors = list(
            {id(t): t for one in launches for m in one.members for t in m.reads}.values()
        )
        self._made_for: tuple[Rounding, list[int]] | None = None
        self._tables: tuple[torch.Tensor, ...] = ()

    def versions(self) -> list[tuple[int, int]]:
        """Address and number of changes of each tensor that is read: other values, another one."""
        return [(t.data_ptr(), t._version) for t in self._tensors]

    def tables(self) -> tuple[torch.Tensor, ...]:
        """For each launch its table [members, columns], on the current stream."""
        rounding = self._rounding()
        made_for = (rounding, [t.data_ptr() for t in self._tensors])
        if self._launches and made_for != self._made_for:
            entries = [one.entries(rounding) for one in self._launches]
            # An even number of rows, so that each launch's begin at a multiple of 16 bytes: kernels
            # are compiled again for another alignment, and generation would wait for that.
            even = [rows + rows[:1] * (len(rows) % 2) for rows in entries]
            table = torch.tensor([row for rows in even for row in rows], dtype=torch.int64)
            if self._device.type == "cuda":
                if self._tables:
                    self._tables[0].record_stream(torch.cuda.current_stream(self._device))
                # From pinned memory the host does not wait for the copy.
                table = table.pin_memory().to(self._device, non_blocking=True)
            parts = table.split([len(rows) for rows in even])
            self._tables = tuple(
                part[: len(rows)] for part, rows in zip(parts, entries, strict=True)
            )
            self._made_for = made_for
        return self._tables


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties that all tensors of one launch share."""

    dtype: torch.dtype
    rank: int
    rows: int
    columns: int
    rows_per_group: int
    group_stride: int
    row_stride: int
    out_stride: int
    by_kernel: bool
    """Rows of the source are runs, or the source is turned, and each tensor's offset in the chunk
    is a multiple of its element size. Else torch does it."""
    turned: tuple[int, int, int] | None = None
    """The source is transposed, its columns runs: columns of a group, elements from a group to the
    next, from a column to the next."""
    adapter: tuple[int, int, int, int] = (0, 1, 0, 1)
    """`Delta.strides`."""

    @property
    def nbytes(self) -> int:
        """Bytes of each tensor."""
        return self.rows * self.columns * self.dtype.itemsize

    @staticmethod
    def of(member: Member) -> _Kind:
        s, d, dtype = member.source, member.delta, member.source.param.dtype
        aligned, rows = member.offset % dtype.itemsize == 0, s.groups * s.rows
        out_stride = s.columns if rows == 1 else member.row_stride
        if d is None and s.contiguous and out_stride == s.columns:
            return _Kind(dtype, 0, 1, s.numel, 1, 0, s.numel, s.numel, aligned)
        rank, adapter = (0, (0, 1, 0, 1)) if d is None else (d.rank, d.strides)
        if s.turned:
            columns = (s.columns // s.column_groups, s.column_group_stride, s.column_stride)
            strides = (rows, 0, 1, out_stride)
            return _Kind(dtype, rank, rows, s.columns, *strides, aligned, columns, adapter)
        strides = (s.rows, s.group_stride, s.row_stride, out_stride)
        by_kernel = aligned and s.in_rows
        return _Kind(dtype, rank, rows, s.columns, *strides, by_kernel, None, adapter)


@dataclass(slots=True)
class _Launch:
    kind: _Kind
    members: list[Member]
    vectors: bool = False

    def entries(self, rounding: Rounding) -> Entries:
        """See `Launch`. Sets whether 16-byte steps are possible."""
        entries: Entries = [
            (
                *m.addresses(),
                m.offset,
                m.corner.word(rounding) if m.delta else 0,
            )
            for m in self.members
        ]
        k, size = self.kind, self.kind.dtype.itemsize
        every = functools.reduce(
            lambda bits, entry: bits | entry[0] | entry[1] | entry[2] | entry[3], entries, 0
        )
        if k.rank:
            every |= 4 * k.adapter[0]
        if k.turned is not None:
            every |= (k.turned[1] | k.turned[2] | k.out_stride) * size
            if k.rank:
                every |= k.columns * size
        else:
            every |= k.columns * size
            if k.rows > 1:
                every |= (k.row_stride | k.out_stride) * size
            if k.rows_per_group < k.rows:
                every |= k.group_stride * size
        self.vectors = every % VECTOR_BYTES == 0
        return entries


@dataclass(slots=True)
class _Chunk:
    nbytes: int
    launches: list[_Launch]
    table: AddressTable
    merged_nbytes: int
    """Bytes that its tensors fill."""


def _plan_chunk(
    nbytes: int,
    members: Iterable[Member],
    rounding: Callable[[], Rounding],
    device: torch.device,
) -> _Chunk:
    by_kind: dict[_Kind, list[Member]] = defaultdict(list)
    for member in members:
        if member.source.numel:
            by_kind[_Kind.of(member)].append(member)
    launches = [_Launch(kind, same) for kind, same in by_kind.items()]
    merged = sum(len(one.members) * one.kind.nbytes for one in launches)
    return _Chunk(nbytes, launches, AddressTable(launches, rounding, device), merged)


class Merger:
    """Merges the members of each buffer and writes them there.

    Args:
        chunks: size in bytes and members of each buffer.
        scale: alpha / rank.
        rounding: returns the present rounding.
        device: device of parameters and buffers.
    """

    def __init__(
        self,
        chunks: Iterable[tuple[int, Iterable[Member]]],
        *,
        scale: float,
        rounding: Callable[[], Rounding],
        device: torch.device | str,
    ) -> None:
        self._scale, self._rounding, self._device = scale, rounding, torch.device(device)
        self._kernels = merge_kernels() if self._device.type == "cuda" else None
        self._chunks = [
            _plan_chunk(nbytes, members, rounding, self._device) for nbytes, members in chunks
        ]
        if self._kernels is not None:
            for chunk in self._chunks:
                chunk.table.tables()
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._chunks)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._chunks[chunk].nbytes

    def merged_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk that `fill` writes."""
        return self._chunks[chunk].merged_nbytes

    def members(self, chunk: int) -> list[Member]:
        """The tensors of a chunk, or the pieces of them."""
        return [m for launch in self._chunks[chunk].launches for m in launch.members]

    def resident(self, chunk: int) -> torch.Tensor | None:
        """Return the chunk's bytes [B] if they are one run of a parameter without an adapter, else
        None.

        Such a chunk needs no `fill`.
        """
        plan = self._chunks[chunk]
        if len(plan.launches) != 1 or len(plan.launches[0].members) != 1:
            return None
        kind, member = plan.launches[0].kind, plan.launches[0].members[0]
        is_all = member.offset == 0 and member.source.numel * kind.dtype.itemsize == plan.nbytes
        if member.delta is not None or not member.source.contiguous or not is_all:
            return None
        return member.source.view().view(-1).view(torch.uint8)

    @torch.no_grad()
    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Write a chunk's merged tensors, unless `out_B` is the memory that `resident` returns.

        On CUDA the work is queued on the current stream. Adapters must not change before it is
        done.

        Raises:
            ValueError: `out_B` is not a contiguous uint8 vector of exactly the chunk's bytes on the
                plan's device.
        """
        plan = self._chunks[chunk]
        wanted = (torch.uint8, (plan.nbytes,), self._device.type)
        if (
            out_B.dtype,
            tuple(out_B.shape),
            out_B.device.type,
        ) != wanted or not out_B.is_contiguous():
            raise ValueError(
                f"chunk {chunk} wants a contiguous buffer {wanted}, got {out_B.dtype} "
                f"{tuple(out_B.shape)} {out_B.device}"
            )
        there_B = self.resident(chunk)
        if there_B is not None and there_B.data_ptr() == out_B.data_ptr():
            return
        if self._kernels is None:
            for launch in plan.launches:
                self._fill_by_torch(launch, out_B)
        elif out_B.data_ptr() % VECTOR_BYTES:
            whole_B = out_B.clone()  # a fresh allocation is aligned
            self._fill_by_kernel(plan, whole_B)
            out_B.copy_(whole_B)
        else:
            self._fill_by_kernel(plan, out_B)

    def _fill_by_kernel(self, plan: _Chunk, out_B: torch.Tensor) -> None:
        assert self._kernels is not None
        stochastic = self._rounding().mode == "stochastic"
        for launch, table_T5 in zip(plan.launches, plan.table.tables(), strict=True):
            kind = launch.kind
            if not kind.by_kernel:
                self._fill_by_torch(launch, out_B)
                continue
            if kind.turned is not None and not kind.rank:
                self._kernels.turn(
                    table_T5=table_T5,
                    out_B=out_B,
                    shape=(kind.rows, kind.columns),
                    columns=kind.turned,
                    out_stride=kind.out_stride,
                    dtype=kind.dtype,
                    vectors=launch.vectors,
                )
                continue
            self._kernels.launch(
                table_T5=table_T5,
                out_B=out_B,
                shape=(kind.rows, kind.columns),
                groups=(kind.rows_per_group, kind.group_stride, kind.row_stride),
                out_stride=kind.out_stride,
                dtype=kind.dtype,
                rank=kind.rank,
                scale=self._scale,
                vectors=launch.vectors,
                columns=kind.turned,
                adapter=kind.adapter,
                stochastic=stochastic,
            )

    def _fill_by_torch(self, launch: _Launch, out_B: torch.Tensor) -> None:
        for member in launch.members:
            weight = member.source.view()
            if member.delta is not None:
                delta = member.delta.matrices()
                weight = merge_matrix(
                    weight.reshape(-1, member.source.columns),
                    delta.lora_B_OR,
                    delta.lora_A_RI,
                    scale=self._scale,
                    rounding=self._rounding(),
                    corner=member.corner,
                )
            _put(out_B, member, weight)


def _put(out_B: torch.Tensor, member: Member, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place row by row, as bytes: the place need not be aligned."""
    columns, size = member.source.columns, tensor.element_size()
    bytes_OB = tensor.contiguous().view(-1, columns).view(torch.uint8)
    places = out_B[member.offset :].as_strided(bytes_OB.shape, (member.row_stride * size, 1))
    places.copy_(bytes_OB)
