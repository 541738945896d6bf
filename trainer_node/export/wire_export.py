"""Fills byte buffers with merged HF tensors, in the receiver's order.

The export is planned once. Each chunk then takes a few kernels.

    WireExport(model, manifest, order)    order: manifest indices of each chunk
        .start(limit=...)                 on every rank, before each send of all chunks
        .fill(chunk, out_B)               rank 0: queues the merge on the current stream
        .drain(), .contribute()           rank 0 after its last chunk; the other ranks

`Exporter` asks Bridge for one HF tensor after the other. Here `probe` asks once, and HF tensors
become strided views of Megatron's parameters: groups of rows of `linear_qkv`, halves of
`linear_fc1`. The manifest has the vocabulary without padding. Bridge converts the few tensors that
are no views, such as zero-centred norms, before each send (`streamed`). One launch merges equally
shaped tensors of a chunk, such as all experts' gate and up of a layer. It reads a table of
addresses on the device, which is made again when a parameter has moved.

On several ranks, each rank merges its pieces (`gather_plan` assigns them) and sends them to rank 0
(`gathering`). Rank 0 merges its own pieces into the chunk, and copies the others to their places
with the same kernel. Each piece has its own delta. A of a row-parallel linear is split by columns,
as its weight is. B of a column-parallel linear is split by rows. The other matrix is whole on every
rank. A delta is cut to its piece.

Axes: B = bytes, O = out features, I = in features, R = rank, T = tensors.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from orchestrator.errors import ManifestError, MergePlanError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.adapters.linears import stack_of
from trainer_node.adapters.lora import ExpertAdapter
from trainer_node.adapters.merge import LoraDelta, merge_kernels, plan_merge
from trainer_node.adapters.rounding import Corner, Rounding, merge_matrix
from trainer_node.export.gather_plan import ChunkPlan, Held, assign, lay_out
from trainer_node.export.gathering import Exchange
from trainer_node.export.probe import HfTensor, Probed, probe
from trainer_node.export.streamed import Streamed
from trainer_node.layout.boxes import Box, matrix
from trainer_node.layout.strides import Piece
from trainer_node.model.model import Model
from trainer_node.ranks import objects
from trainer_node.ranks.topology import tensor_group
from weight_transfer.layout import VECTOR_BYTES, torch_dtype

STREAMED_BYTES = 1 << 28
"""Bytes of a rank's parameters that Bridge may convert before each send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the elements of an HF tensor, or of a piece of it, are in a parameter.

    They are groups of rows. Columns are contiguous, or groups of equidistant ones. Strides and
    offset count elements.
    """

    param: torch.Tensor
    offset: int
    groups: int
    rows: int
    """Rows of one group."""
    columns: int
    group_stride: int
    row_stride: int
    shape: tuple[int, ...]
    """Shape of the HF tensor, or of the piece."""
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
        if param.dim() < 2:
            count = param.numel() if rows is None else rows
            return Source(
                param=param,
                offset=first,
                groups=1,
                rows=1,
                columns=count,
                group_stride=0,
                row_stride=count,
                shape=(count,) if param.dim() else (),
            )
        columns = math.prod(param.shape[1:])
        count = param.shape[0] if rows is None else rows
        return Source(
            param=param,
            offset=first * columns,
            groups=1,
            rows=count,
            columns=columns,
            group_stride=0,
            row_stride=columns,
            shape=(count, *param.shape[1:]),
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

    def entries(self, rounding: Rounding) -> list[tuple[int, ...]]:
        """Return the kernel's table with present addresses. Sets whether 16-byte steps are
        possible."""
        entries: list[tuple[int, ...]] = [
            (
                m.source.address(),
                *(m.delta.addresses() if m.delta else (0, 0)),
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
    tensors: list[torch.Tensor]
    """Every parameter and adapter matrix that the chunk reads, once each."""
    made_for: tuple[Rounding, list[int]] | None = None
    """Rounding, and addresses of `tensors`, when the table was made."""
    table_T5: torch.Tensor | None = None


class Merger:
    """Merges the members of each buffer and writes them there.

    Args:
        chunks: size in bytes and members of each buffer.
        scale: alpha / rank.
        rounding: tells how to round now.
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
        self._chunks = [_plan_chunk(nbytes, members) for nbytes, members in chunks]
        for chunk in self._chunks if self._kernels is not None else ():
            self._make_table(chunk)

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._chunks)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._chunks[chunk].nbytes

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

    # ------------------------------------------------------------ kernel

    def _make_table(self, plan: _Chunk) -> None:
        rounding = self._rounding()
        plan.made_for = (rounding, [t.data_ptr() for t in plan.tensors])
        entries = [entry for launch in plan.launches for entry in launch.entries(rounding)]
        table_T5 = torch.tensor(entries, dtype=torch.int64).view(len(entries), 5)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if plan.table_T5 is None:
                table_T5 = table_T5.to(self._device)
                stream.synchronize()  # while planning: later fills may run on another stream
            else:  # from pinned memory the host does not wait for the copy
                plan.table_T5.record_stream(stream)
                table_T5 = table_T5.pin_memory().to(self._device, non_blocking=True)
        plan.table_T5 = table_T5

    def _fill_by_kernel(self, plan: _Chunk, out_B: torch.Tensor) -> None:
        assert self._kernels is not None
        rounding = self._rounding()
        if plan.made_for != (rounding, [t.data_ptr() for t in plan.tensors]):
            self._make_table(plan)
        assert plan.table_T5 is not None
        tables = plan.table_T5.split([len(launch.members) for launch in plan.launches])
        for launch, table_T5 in zip(plan.launches, tables, strict=True):
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
                stochastic=rounding.mode == "stochastic",
            )

    # ------------------------------------------------------------ torch

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


# ------------------------------------------------------------ over the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """This rank's part of an HF tensor, as boxes."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sources: dict[Box, Source]

    @staticmethod
    def of(name: str, tensor: HfTensor, shape: tuple[int, ...]) -> LocalTensor:
        """A probed tensor. Megatron's padding after the rows of `shape` goes."""
        pieces = tensor.pieces
        if shape[1:] == tensor.shape[1:] and len(shape) > 0 and shape[0] < tensor.shape[0]:
            height = matrix(shape)[0]
            pieces = [(param, cut) for param, piece in pieces for cut in piece.clipped(height)]
        else:
            shape = tensor.shape
        is_vector = matrix(shape)[1] == 1
        sources = {p.box: Source.of(param, p, is_vector=is_vector) for param, p in pieces}
        return LocalTensor(name=name, shape=shape, sources=sources)

    @property
    def dtype(self) -> str:
        """As in manifests."""
        return _dtype_name(next(iter(self.sources.values())).param)

    def held(self) -> list[Held]:
        """Return what the other ranks need to know."""
        return [Held(self.name, self.dtype, self.shape, box) for box in self.sources]

    def within(self, box: Box) -> Box:
        """A box's place in what this rank has, rows and columns end to end: an adapter's matrix."""
        rows = {(b.first_row, b.rows) for b in self.sources}
        columns = {(b.first_column, b.columns) for b in self.sources}
        first_row = sum(size for first, size in rows if first < box.first_row)
        first_column = sum(size for first, size in columns if first < box.first_column)
        return Box(first_row, box.rows, first_column, box.columns)

    def spec(self) -> TensorSpec:
        """What an adapter here must fit."""
        if len(self.shape) < 2:
            return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)  # type: ignore[arg-type]
        ends = [self.within(box) for box in self.sources]
        height = max(box.first_row + box.rows for box in ends)
        width = max(box.first_column + box.columns for box in ends)
        if height * width != sum(box.numel for box in ends):
            height = 0  # no matrix, so no adapter fits
        return TensorSpec(name=self.name, dtype=self.dtype, shape=(height, width))  # type: ignore[arg-type]


class WireExport:
    """The merged tensors of a model, chunk by chunk on rank 0, in the receiver's order.

    The constructor is a collective. It needs a model for which `supports` returns None.

    Args:
        manifest: the names and shapes; `Exporter.manifest()` or a part of it.
        order: chunks of manifest indices; every index exactly once.

    Raises (on every rank alike):
        PartitionError: the ranks' pieces are not whole tensors.
        ManifestError: the manifest does not fit the model, or the order is incomplete.
        MergePlanError: an adapter has no target, or two, or does not fit.
    """

    def __init__(self, model: Model, manifest: Manifest, order: Sequence[Sequence[int]]) -> None:
        specs, rank = manifest.tensors, torch.distributed.get_rank()
        _check_order([spec.name for spec in specs], order)
        probed = probe(model)
        mine_by_name = {
            spec.name: LocalTensor.of(spec.name, probed.held[spec.name], spec.shape)
            for spec in specs
            if spec.name in probed.held
        }
        mine_by_name = {name: tensor for name, tensor in mine_by_name.items() if tensor.sources}
        adapter_of, problem = _plan_adapters(model, mine_by_name)
        held = [asdict(piece) for tensor in mine_by_name.values() for piece in tensor.held()]
        everyones = objects.all_gather(
            (problem, held, list(probed.streamed)), group=model.control_group
        )
        for text, _, _ in everyones:
            if text is not None:
                raise MergePlanError(text)
        holdings = [[_held(fields) for fields in theirs] for _, theirs, _ in everyones]
        known = {piece.name for theirs in holdings for piece in theirs}
        self._streamed = Streamed(
            model,
            sorted({number for _, _, tasks in everyones for number in tasks}),
            [spec for spec in specs if spec.name not in known],
        )
        for name, tensor in self._streamed.buffers.items():
            whole = LocalTensor.of(name, HfTensor.whole(tensor), tuple(tensor.shape))
            holdings[0] += whole.held()
            mine_by_name[name] = whole
        plans = lay_out(specs, order, assign(holdings, specs), ranks=len(everyones))
        self._nbytes = [plan.nbytes for plan in plans]
        self.longest_s = math.inf
        """Longest duration of a send, in seconds: only its deadline limits it."""
        self._exchange = Exchange(
            [p.messages for p in plans], group=model.gather_group, device=model.device
        )
        mine = [_own_members(plan, rank, specs, mine_by_name, adapter_of) for plan in plans]
        self._own = Merger(
            mine, scale=model.scale, rounding=lambda: model.rounding, device=model.device
        )
        theirs = [
            _placed_members(self._exchange, k, plan, specs)
            for k, plan in enumerate(plans if rank == 0 else ())
        ]
        self._placed = Merger(
            theirs, scale=1.0, rounding=lambda: model.rounding, device=model.device
        )

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._nbytes)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._nbytes[chunk]

    def start(self, *, limit: float) -> None:
        """Prepare a send, on every rank, before rank 0's `fill` and the others' `contribute`.

        Args:
            limit: `time.monotonic()` up to which a rank waits for another. Bridge's collectives,
                where it converts tensors, have a timeout of their own.

        Raises:
            OutOfStep: a collective failed.
        """
        self._streamed.take()
        self._exchange.start(limit=limit)

    @property
    def merger(self) -> Merger | None:
        """On rank 0: what fills every chunk alone. None: other ranks have pieces."""
        chunks = range(self._placed.num_chunks)
        return None if any(self._placed.members(k) for k in chunks) else self._own

    def resident(self, chunk: int) -> torch.Tensor | None:
        """On rank 0: see `Merger.resident`. The caller calls `fill` for this chunk too."""
        return self._own.resident(chunk)

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """On rank 0: write a chunk, its merged tensors end to end, row-major.

        The caller fills each chunk once, in order. On CUDA the work is queued on the current
        stream. Adapters must not change before it is done.

        Raises:
            ValueError: `out_B` does not fit; as `Merger.fill`.
            OutOfStep: a rank is gone, or did not send its pieces before the limit.
        """
        self._exchange.post(chunk)
        self._own.fill(chunk, out_B)
        self._exchange.wait(chunk)
        self._placed.fill(chunk, out_B)

    def drain(self) -> None:
        """On rank 0, after the last `fill` or a failure: receive what the others still send."""
        self._exchange.drain()

    def contribute(self) -> None:
        """On the other ranks: merge this rank's pieces of every chunk and send them.

        Raises:
            OutOfStep: rank 0 is gone, or did not receive them before the limit.
            Exception: the merge failed. The ranks are in step; later messages hold no weights.
        """
        self._exchange.send(self._own.fill)

    def release(self) -> None:
        """Free the buffers between the ranks. `start` makes them again."""
        self._exchange.release()

    def seconds(self, fill_s: float) -> dict[str, float]:
        """Seconds of a send, by phase. What is no view was exported before the first `fill`."""
        return {"export": self._streamed.take_s, "merge": fill_s}


def supports(model: Model) -> str | None:
    """Return why `WireExport` cannot export this model; None if it can.

    A collective, with one answer on all ranks.
    """
    reason = _refusal(model, probe(model))
    reasons = objects.all_gather(reason, group=model.control_group)
    for rank, text in enumerate(reasons):
        if text is not None:
            return text if len(reasons) == 1 else f"rank {rank}: {text}"
    return None


def _held(fields: dict[str, Any]) -> Held:
    """Undo `asdict`."""
    return Held(**{**fields, "box": Box(**fields["box"])})


def _refusal(model: Model, probed: Probed) -> str | None:
    """Why this rank's part cannot be exported."""
    if probed.refused is not None:
        return probed.refused
    if model.adapters.stacked and model.config.parallel.expert_tensor > 1:
        return f"split experts of a stacked tensor have adapters: {model.adapters.stacked[0]}"
    whys = list(probed.streamed.values())
    params = [model.conversion_tasks[number].param_weight for number in probed.streamed]
    if sum(param.nbytes for param in params) > STREAMED_BYTES:
        return f"too much has to go through Bridge's export: {whys[0]}"
    named = [n if d.first_expert is not None else f"{n}.weight" for n, d in _deltas(model).items()]
    if whys and any(name not in probed.held for name in named):
        return f"a tensor with an adapter has to go through Bridge's export: {whys[0]}"
    return None


def _plan_adapters(
    model: Model, tensors: Mapping[str, LocalTensor]
) -> tuple[dict[str, Delta], str | None]:
    """Map each HF tensor to the adapter of this rank's part; or return what is wrong."""
    deltas = _deltas(model)
    stacks = {name: d for name, d in deltas.items() if d.first_expert is not None}
    for name, delta in stacks.items():
        a, b = (t.shape[1:] for t in delta.stacks())
        shape = tensors[name].shape[1:] if name in tensors else None
        if shape != (b[0], a[1]):
            return {}, f"adapters of {name} are for experts {(b[0], a[1])}; the model has {shape}"
    try:
        plan = plan_merge(
            deltas={name: d.matrices() for name, d in deltas.items() if name not in stacks},
            targets={name: tensor.spec() for name, tensor in tensors.items()},
        )
    except MergePlanError as error:
        return {}, str(error)
    return stacks | {op.target: deltas[op.adapter] for op in plan}, None


def _own_members(
    plan: ChunkPlan,
    rank: int,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, LocalTensor],
    adapter_of: Mapping[str, Delta],
) -> tuple[int, list[Member]]:
    """This rank's members: of the chunk itself on rank 0, of the message on others."""
    members = []
    for placed in plan.placements[rank]:
        tensor = tensors[specs[placed.index].name]
        delta = adapter_of.get(tensor.name)
        if delta is not None and delta.first_expert is not None:
            delta = delta.of_stack(placed.box, tensor.shape)
        elif delta is not None and len(tensor.sources) > 1:
            delta = replace(delta, box=tensor.within(placed.box))
        offset, row_stride = (
            (placed.offset, placed.row_stride) if rank == 0 else (placed.packed, placed.box.columns)
        )
        members.append(
            Member(
                source=tensor.sources[placed.box],
                delta=delta,
                offset=offset,
                row_stride=row_stride,
                corner=Corner(tensor.name, placed.box.first_row, placed.box.first_column),
            )
        )
    return (plan.nbytes if rank == 0 else plan.messages[rank]), members


def _placed_members(
    exchange: Exchange, k: int, plan: ChunkPlan, specs: Sequence[TensorSpec]
) -> tuple[int, list[Member]]:
    """The other ranks' members of a chunk: copies out of their messages."""
    members = []
    for rank, placements in enumerate(plan.placements):
        for placed in placements if rank else ():
            dtype, box = torch_dtype(specs[placed.index].dtype), placed.box
            buffer, begin = exchange.place(k, rank, dtype)
            source = Source(
                param=buffer,
                offset=(begin + placed.packed) // dtype.itemsize,
                groups=1,
                rows=box.rows,
                columns=box.columns,
                group_stride=0,
                row_stride=box.columns,
                shape=(box.rows, box.columns),
            )
            members.append(
                Member(
                    source=source,
                    delta=None,
                    offset=placed.offset,
                    row_stride=placed.row_stride,
                    corner=Corner(specs[placed.index].name, box.first_row, box.first_column),
                )
            )
    return plan.nbytes, members


# ------------------------------------------------------------ plan


def _check_order(names: Sequence[str], order: Sequence[Sequence[int]]) -> None:
    seen: set[int] = set()
    for index in (i for chunk in order for i in chunk):
        if not 0 <= index < len(names):
            raise ManifestError(
                f"the order has index {index}, but the manifest ends at {len(names) - 1} "
                f"({names[-1]})"
            )
        if index in seen:
            raise ManifestError(f"the order has {names[index]} (index {index}) twice")
        seen.add(index)
    if len(seen) != len(names):
        missing = [names[i] for i in range(len(names)) if i not in seen]
        raise ManifestError(
            f"the order lacks {len(missing)} tensors of the manifest: {missing[:3]}"
        )


def _plan_chunk(nbytes: int, members: Iterable[Member]) -> _Chunk:
    by_kind: dict[_Kind, list[Member]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for member in members:
        source, delta = member.source, member.delta
        if source.numel:
            by_kind[_Kind.of(member)].append(member)
        read = (source.param,) if delta is None else (source.param, delta.lora_A, delta.lora_B)
        tensors.update((id(t), t) for t in read)
    launches = [_Launch(kind, same) for kind, same in by_kind.items()]
    return _Chunk(nbytes=nbytes, launches=launches, tensors=list(tensors.values()))


def _deltas(model: Model) -> dict[str, Delta]:
    """HF module name, or stacked tensor -> adapter. Of copies, the first tensor rank's count."""
    deltas = {}
    for adapter in model.adapters.adapters:
        for i, names in enumerate(adapter.names):
            if names is None:
                continue
            lora_A, lora_B = adapter.lora_A[str(i)], adapter.lora_B[str(i)]
            group = tensor_group(expert=isinstance(adapter, ExpertAdapter))
            if adapter.places[i].split is None and group.rank() > 0:
                continue
            if isinstance(adapter, ExpertAdapter):
                tensor, first = stack_of(names[0])
                if tensor in model.adapters.stacked:
                    deltas[tensor] = Delta(
                        lora_A=lora_A,
                        lora_B=lora_B,
                        expert=None,
                        transposed=tensor in model.adapters.transposed,
                        first_expert=first,
                    )
                    continue
            each: Iterable[tuple[str, int | None]]
            each = (
                ((name, e) for e, name in enumerate(names))
                if isinstance(adapter, ExpertAdapter)
                else ((str(names), None),)
            )
            for name, expert in each:
                deltas[name] = Delta(lora_A=lora_A, lora_B=lora_B, expert=expert)
    return deltas


# ------------------------------------------------------------ torch path


def _put(out_B: torch.Tensor, member: Member, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place row by row, as bytes: the place need not be aligned."""
    columns, size = member.source.columns, tensor.element_size()
    bytes_OB = tensor.contiguous().view(-1, columns).view(torch.uint8)
    places = out_B[member.offset :].as_strided(bytes_OB.shape, (member.row_stride * size, 1))
    places.copy_(bytes_OB)


def _dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype's name in manifests."""
    return str(tensor.dtype).removeprefix("torch.")
