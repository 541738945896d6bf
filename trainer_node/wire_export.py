"""Merged HF tensors straight into byte buffers, in whatever order the receiver wants them: planned once, then a few kernels a chunk.

    WireExport(runtime, manifest, order)    order [[0, 5, 6], [1, 2], ...]: manifest indices whose bytes, end to end, make each chunk
        .start(limit=...)                   on every rank, before each send of all chunks
        .fill(chunk, out_B)                 rank 0: queues the merge on the current stream; no wait, no Python loop over tensors on CUDA
        .drain(), .contribute()             rank 0 after its last chunk; the other ranks' part

`Exporter` asks Bridge for one HF tensor after the other; here the same mappings are read once as strided views of Megatron's parameters:
q, k and v are groups of rows of `linear_qkv`, gate and up halves of `linear_fc1`, the vocabulary loses its padding, a tied head is the
embedding. Equally shaped tensors of a chunk (all experts' gate and up of a layer, say) are merged by one launch over a table of
addresses, which lies on the device and is made again when a parameter has moved.

On several ranks each merges the pieces that it holds (`gather_plan` decides who sends which) and sends them to rank 0 (`gathering`), which merges its own
right into the chunk and puts the others' in their places with the same kernel, as copies. A piece's delta is its own: A of a row-parallel
linear is split by columns as its weight is, B of a column-parallel one by rows, and the other one is whole on every rank.

Axes: B = bytes, O = out features, I = in features, R = rank, T = tensors.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.errors import ConfigError, ManifestError, MergePlanError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node import objects
from trainer_node.gather_plan import Box, ChunkPlan, Held, assign, lay_out, matrix
from trainer_node.gathering import Exchange
from trainer_node.hf import VOCAB_TENSORS
from trainer_node.merge import LoraDelta, merge_tensor, plan_merge
from weight_transfer.layout import torch_dtype

if TYPE_CHECKING:
    from trainer_node.runtime import TrainerRuntime

VECTOR_BYTES = 16
BATCH_ELEMENTS = 1 << 26
"""Elements that the torch path merges at a time (256 MiB of fp32 scratch)."""


class _NotUnderstoodError(ConfigError):
    """The model has something whose HF tensors this module would get wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an HF tensor's elements, or those of a piece of it, lie in a parameter: groups of rows of contiguous columns. Strides and
    offset in elements."""

    param: torch.Tensor
    offset: int
    groups: int
    rows: int
    """Of one group."""
    columns: int
    group_stride: int
    row_stride: int
    shape: tuple[int, ...]
    """Of the HF tensor, or the piece."""

    @staticmethod
    def whole(param: torch.Tensor, *, first: int = 0, rows: int | None = None) -> Source:
        """Rows [first, first + rows) of a contiguous parameter; a vector is one row."""
        if param.dim() < 2:
            count = param.numel() if rows is None else rows
            return Source(
                param=param, offset=first, groups=1, rows=1, columns=count, group_stride=0, row_stride=count,
                shape=(count,) if param.dim() else (),
            )  # fmt: skip
        columns = math.prod(param.shape[1:])
        count = param.shape[0] if rows is None else rows
        return Source(
            param=param, offset=first * columns, groups=1, rows=count, columns=columns, group_stride=0, row_stride=columns,
            shape=(count, *param.shape[1:]),
        )  # fmt: skip

    @property
    def numel(self) -> int:
        """Elements."""
        return self.groups * self.rows * self.columns

    @property
    def contiguous(self) -> bool:
        """One run of elements."""
        return self.groups == 1 and (self.rows == 1 or self.row_stride == self.columns)

    def address(self) -> int:
        """Of the first element, now."""
        return self.param.data_ptr() + self.offset * self.param.element_size()

    def view(self) -> torch.Tensor:
        """[groups, rows, columns], now."""
        data = self.param.detach()
        strides = (self.group_stride, self.row_stride, 1)
        return data.as_strided((self.groups, self.rows, self.columns), strides, data.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """An adapter in place: A [R, I] and B [O, R], or expert `expert` of A [E, R, I] and B [E, O, R]; fp32, contiguous."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    expert: int | None

    @property
    def rank(self) -> int:
        """R."""
        return self.lora_B.shape[-1]

    def addresses(self) -> tuple[int, int]:
        """Of A and B, now."""
        e = self.expert or 0
        a, b = self.lora_A, self.lora_B
        return a.data_ptr() + 4 * e * a.shape[-2] * a.shape[-1], b.data_ptr() + 4 * e * b.shape[-2] * b.shape[-1]

    def matrices(self) -> LoraDelta:
        """Views of this one."""
        a, b = self.lora_A.detach(), self.lora_B.detach()
        return LoraDelta(
            lora_A_RI=a if self.expert is None else a[self.expert], lora_B_OR=b if self.expert is None else b[self.expert]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeItem:
    """One HF tensor: what it is called, where it comes from, what is added."""

    spec: TensorSpec
    source: Source
    delta: Delta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a chunk's buffer has at some place."""

    source: Source
    delta: Delta | None
    offset: int
    """Byte of the buffer at which it begins."""
    row_stride: int
    """Elements from one of its rows to the next, in the buffer."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all tensors of one launch have in common."""

    dtype: torch.dtype
    rank: int
    rows: int
    columns: int
    rows_per_group: int
    group_stride: int
    row_stride: int
    out_stride: int
    aligned: bool
    """Each tensor's offset in the chunk is a multiple of its element size."""

    @staticmethod
    def of(member: Member) -> _Kind:
        s, dtype = member.source, member.source.param.dtype
        aligned, rows = member.offset % dtype.itemsize == 0, s.groups * s.rows
        out_stride = s.columns if rows == 1 else member.row_stride
        if member.delta is None and s.contiguous and out_stride == s.columns:
            return _Kind(dtype, 0, 1, s.numel, 1, 0, s.numel, s.numel, aligned)
        rank = 0 if member.delta is None else member.delta.rank
        return _Kind(dtype, rank, rows, s.columns, s.rows, s.group_stride, s.row_stride, out_stride, aligned)


@dataclass(slots=True)
class _Launch:
    kind: _Kind
    members: list[Member]
    vectors: bool = False

    def entries(self) -> list[tuple[int, int, int, int]]:
        """Rows of the kernel's table, with today's addresses; also finds whether 16-byte pieces are possible."""
        entries = [(m.source.address(), *(m.delta.addresses() if m.delta else (0, 0)), m.offset) for m in self.members]
        k, size = self.kind, self.kind.dtype.itemsize
        every = functools.reduce(lambda bits, entry: bits | entry[0] | entry[1] | entry[2] | entry[3], entries, 0)
        every |= k.columns * size
        if k.rows > 1:
            every |= k.row_stride * size | k.out_stride * size
        if k.rows_per_group < k.rows:
            every |= k.group_stride * size
        self.vectors = every % VECTOR_BYTES == 0
        return entries


@dataclass(slots=True)
class _Chunk:
    nbytes: int
    launches: list[_Launch]
    tensors: list[torch.Tensor]
    """Every parameter and adapter matrix that the chunk reads, once."""
    addresses: list[int] = field(default_factory=list)
    """Of `tensors`, when the table was made."""
    table_T4: torch.Tensor | None = None


class Merger:
    """Merges what buffers consist of, and writes nothing else of them.

    Args:
        chunks: for each buffer its size in bytes and what it has where.
        scale: alpha / rank.
        device: where parameters and buffers lie.
    """

    def __init__(self, chunks: Iterable[tuple[int, Iterable[Member]]], *, scale: float, device: torch.device | str) -> None:
        self._scale, self._device = scale, torch.device(device)
        self._kernels = _kernels() if self._device.type == "cuda" else None
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

    def lies_at(self, chunk: int) -> torch.Tensor | None:
        """The chunk's bytes [B], if they are one run of a parameter that nothing is added to: nothing needs to be written then. None: they are not."""
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
        """Write a chunk's merged tensors; nothing where `out_B` is what `lies_at` says.

        On CUDA queued on the current stream, and the host does not wait: adapters must not change before that work is done.

        Raises:
            ValueError: `out_B` is not a contiguous uint8 vector of exactly the chunk's bytes on the plan's device.
        """
        plan = self._chunks[chunk]
        wanted = (torch.uint8, (plan.nbytes,), self._device.type)
        if (out_B.dtype, tuple(out_B.shape), out_B.device.type) != wanted or not out_B.is_contiguous():
            raise ValueError(
                f"chunk {chunk} wants a contiguous buffer {wanted}, got {out_B.dtype} {tuple(out_B.shape)} {out_B.device}"
            )
        there_B = self.lies_at(chunk)
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
        plan.addresses = [t.data_ptr() for t in plan.tensors]
        entries = [entry for launch in plan.launches for entry in launch.entries()]
        table_T4 = torch.tensor(entries, dtype=torch.int64).view(len(entries), 4)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if plan.table_T4 is None:
                table_T4 = table_T4.to(self._device)
                stream.synchronize()  # while planning: later fills may run on another stream
            else:  # from pinned memory the host does not wait for the copy
                plan.table_T4.record_stream(stream)
                table_T4 = table_T4.pin_memory().to(self._device, non_blocking=True)
        plan.table_T4 = table_T4

    def _fill_by_kernel(self, plan: _Chunk, out_B: torch.Tensor) -> None:
        assert self._kernels is not None
        if plan.table_T4 is None or [t.data_ptr() for t in plan.tensors] != plan.addresses:
            self._make_table(plan)
        assert plan.table_T4 is not None
        tables = plan.table_T4.split([len(launch.members) for launch in plan.launches])
        for launch, table_T4 in zip(plan.launches, tables, strict=True):
            kind = launch.kind
            if not kind.aligned:
                self._fill_by_torch(launch, out_B)
                continue
            self._kernels.launch(
                table_T4=table_T4,
                out_B=out_B,
                shape=(kind.rows, kind.columns),
                groups=(kind.rows_per_group, kind.group_stride, kind.row_stride),
                out_stride=kind.out_stride,
                dtype=kind.dtype,
                rank=kind.rank,
                scale=self._scale,
                vectors=launch.vectors,
            )

    # ------------------------------------------------------------ torch

    def _fill_by_torch(self, launch: _Launch, out_B: torch.Tensor) -> None:
        if launch.kind.rank == 0:
            for member in launch.members:
                _put(out_B, member, member.source.view())
            return
        for batch in _batches(launch.members):
            products_TOI = _products(batch).mul_(self._scale)
            for member, product_OI in zip(batch, products_TOI, strict=True):
                weight = member.source.view()
                _put(out_B, member, product_OI.view(weight.shape).add_(weight).to(weight.dtype))


class ChunkMerger(Merger):
    """Chunks of whole tensors, end to end, row-major.

    Args:
        items: what the order's indices mean.
        order: for each chunk the indices of its tensors; every index exactly once.
        scale: alpha / rank.
        device: where parameters and buffers lie.

    Raises:
        ManifestError: an index is missing, there twice, or unknown; names the tensor.
    """

    def __init__(
        self, items: Sequence[MergeItem], order: Sequence[Sequence[int]], *, scale: float, device: torch.device | str
    ) -> None:
        _check_order([item.spec.name for item in items], order)
        super().__init__((_end_to_end([items[n] for n in indices]) for indices in order), scale=scale, device=device)


def _end_to_end(items: Sequence[MergeItem]) -> tuple[int, list[Member]]:
    ends = list(accumulate((item.spec.nbytes for item in items), initial=0))
    members = [
        Member(source=item.source, delta=item.delta, offset=offset, row_stride=item.source.columns)
        for item, offset in zip(items, ends, strict=False)
    ]
    return ends[-1], members


# ------------------------------------------------------------ over the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of an HF tensor on this rank."""

    source: Source
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""

    def held(self, name: str) -> Held:
        """What the other ranks hear of it."""
        return Held(name, _dtype_name(self.source.param), self.shape, self.box)


class WireExport:
    """The merged tensors of a runtime, chunk by chunk on rank 0, in the receiver's order. Making one is a collective, for where `supports` says
    None.

    Args:
        manifest: the names and shapes; `Exporter.manifest()` or a part of it.
        order: chunks of manifest indices; every index exactly once.

    Raises (on every rank alike):
        PartitionError: the ranks' pieces are not whole tensors.
        ManifestError: the manifest has a tensor that the model has not, or in another shape or dtype; the order is not whole.
        MergePlanError: an adapter has no target, or two, or does not fit.
    """

    def __init__(self, runtime: TrainerRuntime, manifest: Manifest, order: Sequence[Sequence[int]]) -> None:
        specs, rank = manifest.tensors, torch.distributed.get_rank()
        _check_order([spec.name for spec in specs], order)
        pieces = _pieces(runtime)
        adapter_of, problem = _plan_adapters(runtime, pieces, [spec.name for spec in specs])
        held = [asdict(piece.held(name)) for name, piece in pieces.items()]
        said = objects.all_gather((problem, held), group=runtime.control_group)
        for text, _ in said:
            if text is not None:
                raise MergePlanError(text)
        plans = lay_out(specs, order, assign([map(_held, theirs) for _, theirs in said], specs), ranks=len(said))
        self._nbytes = [plan.nbytes for plan in plans]
        self._exchange = Exchange([p.messages for p in plans], group=runtime.gather_group, device=runtime.device)
        mine = [_own_members(plan, rank, specs, pieces, adapter_of) for plan in plans]
        self._own = Merger(mine, scale=runtime.scale, device=runtime.device)
        theirs = [_placed_members(self._exchange, k, plan, specs) for k, plan in enumerate(plans if rank == 0 else ())]
        self._placed = Merger(theirs, scale=1.0, device=runtime.device)

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._nbytes)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._nbytes[chunk]

    def start(self, *, limit: float) -> None:
        """Every rank, before rank 0's first `fill` and the others' `contribute`. Only one rank: not needed.

        Args:
            limit: `time.monotonic()` up to which a rank waits for another.
        """
        self._exchange.start(limit=limit)

    def lies_at(self, chunk: int) -> torch.Tensor | None:
        """Rank 0: the chunk's bytes, if they are one run of a parameter of this rank; see `Merger.lies_at`. `fill` is called all the same."""
        return self._own.lies_at(chunk)

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Rank 0: write a chunk, its merged tensors end to end, row-major; chunks in their order, each once.

        On CUDA queued on the current stream, and the host does not wait: adapters must not change before that work is done.

        Raises:
            ValueError: `out_B` does not fit; as `Merger.fill`.
            OutOfStep: a rank is gone, or did not send its pieces before the limit.
        """
        self._exchange.post(chunk)
        self._own.fill(chunk, out_B)
        self._exchange.wait(chunk)
        self._placed.fill(chunk, out_B)

    def drain(self) -> None:
        """Rank 0, behind the last `fill` or a failure: take what the others still send. Raises OutOfStep as `fill`."""
        self._exchange.drain()

    def contribute(self) -> None:
        """The other ranks: merge this rank's pieces of every chunk and send them.

        Raises:
            OutOfStep: rank 0 is gone, or did not take them before the limit.
            Exception: of the merge; what has left since is no weights, and the ranks are in step.
        """
        self._exchange.send(self._own.fill)

    def release(self) -> None:
        """Free the buffers between the ranks; `start` makes them again."""
        self._exchange.release()


def supports(runtime: TrainerRuntime) -> str | None:
    """None if `WireExport` can export this runtime, else the reason that it cannot. A collective, with one answer on all ranks."""
    reason = None
    try:
        _pieces(runtime)
    except _NotUnderstoodError as error:
        reason = str(error)
    reasons = objects.all_gather(reason, group=runtime.control_group)
    for rank, text in enumerate(reasons):
        if text is not None:
            return text if len(reasons) == 1 else f"rank {rank}: {text}"
    return None


def _held(fields: dict[str, Any]) -> Held:
    """Undo `asdict`."""
    return Held(**{**fields, "box": Box(**fields["box"])})


def _plan_adapters(
    runtime: TrainerRuntime, pieces: Mapping[str, Piece], names: Sequence[str]
) -> tuple[dict[str, Delta], str | None]:
    """HF tensor -> the adapter of this rank's piece of it; or what is wrong."""
    deltas = _deltas(runtime)
    targets = {
        name: TensorSpec(name=name, dtype=_dtype_name(pieces[name].source.param), shape=pieces[name].source.shape)  # type: ignore[arg-type]
        for name in names
        if name in pieces
    }
    try:
        plan = plan_merge(deltas={name: d.matrices() for name, d in deltas.items()}, targets=targets)
    except MergePlanError as error:
        return {}, str(error)
    return {op.target: deltas[op.adapter] for op in plan}, None


def _own_members(
    plan: ChunkPlan, rank: int, specs: Sequence[TensorSpec], pieces: Mapping[str, Piece], adapter_of: Mapping[str, Delta]
) -> tuple[int, list[Member]]:
    """This rank's part of a chunk: on rank 0 of the chunk itself, on another one of its message."""
    members = []
    for share in plan.shares[rank]:
        name = specs[share.index].name
        offset, row_stride = (share.offset, share.row_stride) if rank == 0 else (share.packed, share.box.columns)
        members.append(Member(source=pieces[name].source, delta=adapter_of.get(name), offset=offset, row_stride=row_stride))
    return (plan.nbytes if rank == 0 else plan.messages[rank]), members


def _placed_members(exchange: Exchange, k: int, plan: ChunkPlan, specs: Sequence[TensorSpec]) -> tuple[int, list[Member]]:
    """The other ranks' part of a chunk: copies out of their messages."""
    members = []
    for rank, shares in enumerate(plan.shares):
        for share in shares if rank else ():
            dtype, box = torch_dtype(specs[share.index].dtype), share.box
            buffer, begin = exchange.place(k, rank, dtype)
            source = Source(
                param=buffer, offset=(begin + share.packed) // dtype.itemsize, groups=1, rows=box.rows, columns=box.columns,
                group_stride=0, row_stride=box.columns, shape=(box.rows, box.columns),
            )  # fmt: skip
            members.append(Member(source=source, delta=None, offset=share.offset, row_stride=share.row_stride))
    return plan.nbytes, members


# ------------------------------------------------------------ plan


def _check_order(names: Sequence[str], order: Sequence[Sequence[int]]) -> None:
    seen: set[int] = set()
    for index in (i for chunk in order for i in chunk):
        if not 0 <= index < len(names):
            raise ManifestError(f"the order has index {index}, but the manifest ends at {len(names) - 1} ({names[-1]})")
        if index in seen:
            raise ManifestError(f"the order has {names[index]} (index {index}) twice")
        seen.add(index)
    if len(seen) != len(names):
        missing = [names[i] for i in range(len(names)) if i not in seen]
        raise ManifestError(f"the order lacks {len(missing)} tensors of the manifest: {missing[:3]}")


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


def _deltas(runtime: TrainerRuntime) -> dict[str, Delta]:
    """HF module name -> adapter."""
    from trainer_node.lora import ExpertAdapter

    deltas = {}
    for adapter in runtime.adapters.adapters:
        for i, names in enumerate(adapter.names):
            if names is None:
                continue
            lora_A, lora_B = adapter.lora_A[str(i)], adapter.lora_B[str(i)]
            each: Iterable[tuple[str, int | None]]
            each = ((name, e) for e, name in enumerate(names)) if isinstance(adapter, ExpertAdapter) else ((str(names), None),)
            for name, expert in each:
                deltas[name] = Delta(lora_A=lora_A, lora_B=lora_B, expert=expert)
    return deltas


def _pieces(runtime: TrainerRuntime) -> dict[str, Piece]:
    """HF name -> this rank's piece.

    Raises:
        _NotUnderstoodError: a mapping or a parameter of a kind that this module does not know.
    """
    # Late, because on a CPU Bridge can be imported only after `cpu_shims.apply`.
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    if type(runtime.bridge).maybe_modify_converted_hf_weight is not MegatronModelBridge.maybe_modify_converted_hf_weight:
        raise _NotUnderstoodError(f"{type(runtime.bridge).__name__} changes tensors after its mappings")
    pieces: dict[str, Piece] = {}
    for task in runtime.conversion_tasks:
        if task is None:
            raise _NotUnderstoodError("a parameter of the model has no HF name")
        if task.param_weight is None:  # another pipeline stage's
            continue
        _check_param(task)
        for name, source in _task_sources(task).items():
            pieces[name] = _vocab_piece(task, source, runtime.vocab_size) if name in VOCAB_TENSORS else _piece(task, source)
    embedding, head = VOCAB_TENSORS
    if runtime.hf_config.tie_word_embeddings and embedding in pieces:
        pieces.setdefault(head, pieces[embedding])
    return {name: piece for name, piece in pieces.items() if piece.source.numel}


def _split(task: Any) -> tuple[int | None, int, int]:
    """The dimension that a parameter is split in (None: copies), into how many parts, and which one is this rank's."""
    from trainer_node.parameters import split_dim, tensor_group

    group = tensor_group(expert=task.mapping.is_expert)
    if group.size() == 1:
        return None, 1, 0
    try:
        dim = split_dim(task)
    except ValueError as error:
        raise _NotUnderstoodError(f"{task.global_param_name}: {error}") from error
    # Behind a row-parallel linear a bias is a copy.
    return (None, 1, 0) if dim is None or dim >= task.param_weight.dim() else (dim, group.size(), group.rank())


def _piece(task: Any, source: Source) -> Piece:
    dim, parts, part = _split(task)
    (height, width), shape = matrix(source.shape), list(source.shape)
    if dim is not None:
        shape[dim] *= parts
    box = Box(part * height if dim == 0 else 0, height, part * width if dim == 1 else 0, width)
    return Piece(source=source, box=box, shape=tuple(shape))


def _vocab_piece(task: Any, source: Source, vocab_size: int) -> Piece:
    """Rows of real tokens; Megatron pads behind the last one. No rows: a piece without elements."""
    dim, _, part = _split(task)
    if dim == 1:
        raise _NotUnderstoodError(f"{task.global_param_name} is split by columns")
    begin = part * source.param.shape[0]
    rows = min(max(vocab_size - begin, 0), source.param.shape[0])
    source = Source.whole(source.param, rows=rows)
    return Piece(source=source, box=Box(begin, rows, 0, source.columns), shape=(vocab_size, *source.shape[1:]))


def _check_param(task: Any) -> None:
    data = task.param_weight.data
    if type(data) is not torch.Tensor or not data.is_contiguous():
        raise _NotUnderstoodError(f"{task.global_param_name} is a {type(data).__name__} of strides {tuple(data.stride())}")


def _task_sources(task: Any) -> Mapping[str, Source]:
    """What `task.mapping.megatron_to_hf` would make of this rank's part, as views. Subclasses may do more, so types are compared exactly."""
    from megatron.bridge.models.conversion import param_mapping as bridge

    mapping, param, kind = task.mapping, task.param_weight, type(task.mapping)
    names = mapping.hf_param
    plain = (bridge.DirectMapping, bridge.ColumnParallelMapping, bridge.RowParallelMapping, bridge.ReplicatedMapping)
    if kind in plain or (kind is bridge.AutoMapping and mapping.permute_dims is None):
        return {str(names): Source.whole(param)}
    if kind is bridge.GatedMLPMapping and param.shape[0] % 2 == 0:
        half = param.shape[0] // 2
        return {names["gate"]: Source.whole(param, rows=half), names["up"]: Source.whole(param, first=half, rows=half)}
    if kind is bridge.QKVMapping:
        return _qkv_sources(names, param, mapping._get_config(task.megatron_module), parts=_split(task)[1])
    raise _NotUnderstoodError(
        f"{task.global_param_name} is mapped by {kind.__name__}, which the merge in the receiver's order does not know"
    )


def _qkv_sources(names: Mapping[str, str], param: torch.Tensor, config: Any, *, parts: int) -> dict[str, Source]:
    """q, k and v of the interleaved rows [group: its query heads, its key head, its value head]; a bias is a matrix of one column."""
    if getattr(config, "attention_output_gate", False):
        raise _NotUnderstoodError(f"{names['q']} carries an output gate")
    heads = config.num_attention_heads // config.num_query_groups
    groups, size = config.num_query_groups // parts, config.kv_channels or config.hidden_size // config.num_attention_heads
    columns = math.prod(param.shape[1:])
    if param.shape[0] != groups * (heads + 2) * size:
        raise _NotUnderstoodError(
            f"{names['q']}: {param.shape[0]} fused rows are not {groups} groups of {heads} + 2 heads of {size}"
        )
    return {
        names[part]: Source(
            param=param, offset=first * size * columns, groups=groups, rows=width * size, columns=columns,
            group_stride=(heads + 2) * size * columns, row_stride=columns, shape=(groups * width * size, *param.shape[1:]),
        )
        for part, first, width in (("q", 0, heads), ("k", heads, 1), ("v", heads + 1, 1))
    }  # fmt: skip


# ------------------------------------------------------------ torch path


def _put(out_B: torch.Tensor, member: Member, tensor: torch.Tensor) -> None:
    """Row by row at its place, as bytes: no place has to be aligned."""
    columns, size = member.source.columns, tensor.element_size()
    bytes_OB = tensor.contiguous().view(-1, columns).view(torch.uint8)
    places = out_B[member.offset :].as_strided(bytes_OB.shape, (member.row_stride * size, 1))
    places.copy_(bytes_OB)


def _batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Members that share stacked adapter matrices, at most `BATCH_ELEMENTS` elements at a time."""
    by_matrix: dict[int, list[Member]] = defaultdict(list)
    for member in members:
        by_matrix[id(member.delta.lora_A)].append(member)  # type: ignore[union-attr]
    for group in by_matrix.values():
        step = max(1, BATCH_ELEMENTS // group[0].source.numel)
        for first in range(0, len(group), step):
            yield group[first : first + step]


def _products(batch: Sequence[Member]) -> torch.Tensor:
    """B @ A of each, [T, O, I] in fp32."""
    deltas = [member.delta for member in batch]
    first = deltas[0]
    assert first is not None
    if first.expert is None:
        return torch.mm(first.lora_B.detach(), first.lora_A.detach())[None]
    experts = [d.expert for d in deltas if d is not None and d.expert is not None]
    lora_A, lora_B = first.lora_A.detach(), first.lora_B.detach()
    if experts == list(range(experts[0], experts[0] + len(experts))):
        return torch.bmm(lora_B[experts[0] : experts[-1] + 1], lora_A[experts[0] : experts[-1] + 1])
    picked = torch.tensor(experts, device=lora_A.device)
    return torch.bmm(lora_B[picked], lora_A[picked])


def _dtype_name(tensor: torch.Tensor) -> str:
    """As manifests have it."""
    return str(tensor.dtype).removeprefix("torch.")


def reference(item: MergeItem, scale: float) -> torch.Tensor:
    """The tensor as `merge.merge_tensor` makes it; for tests and benchmarks."""
    weight = item.source.view().reshape(item.source.shape)
    return weight if item.delta is None else merge_tensor(weight, item.delta.matrices(), scale)


@functools.cache
def _kernels() -> ModuleType | None:
    """The Triton kernel, or None where Triton is not installed (the torch path does the same)."""
    try:
        import triton  # noqa: F401  - only to see whether it is there
    except ImportError:
        return None
    from trainer_node import merge_kernels

    return merge_kernels
