"""Merged HF tensors straight into byte buffers, in whatever order the receiver wants them: planned once, then a few kernels a chunk.

    WireExport(runtime, manifest, order)    order [[0, 5, 6], [1, 2], ...]: manifest indices whose bytes, end to end, make each chunk
        .fill(chunk, out_B)                 queues the merge on the current stream; no wait, no Python loop over tensors on CUDA

`Exporter` asks Bridge for one HF tensor after the other; here the same mappings are read once as strided views of Megatron's parameters:
q, k and v are groups of rows of `linear_qkv`, gate and up halves of `linear_fc1`, the vocabulary loses its padding, a tied head is the
embedding. Equally shaped tensors of a chunk (all experts' gate and up of a layer, say) are merged by one launch over a table of
addresses, which lies on the device and is made again when a parameter has moved.

One trainer rank only (`supports` says why not otherwise). Axes: B = bytes, O = out features, I = in features, R = rank, T = tensors.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.errors import ConfigError, ManifestError
from orchestrator.protocol.messages import Manifest, TensorSpec
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
    """Where an HF tensor's elements lie in a parameter: groups of rows of contiguous columns. Strides and offset in elements."""

    param: torch.Tensor
    offset: int
    groups: int
    rows: int
    """Of one group."""
    columns: int
    group_stride: int
    row_stride: int
    shape: tuple[int, ...]
    """Of the HF tensor."""

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
    aligned: bool
    """Each tensor's offset in the chunk is a multiple of its element size."""

    @staticmethod
    def of(item: MergeItem, offset: int) -> _Kind:
        s, dtype = item.source, item.source.param.dtype
        aligned = offset % dtype.itemsize == 0
        if item.delta is None and s.contiguous:
            count = s.rows * s.columns
            return _Kind(dtype, 0, 1, count, 1, 0, count, aligned)
        rank = 0 if item.delta is None else item.delta.rank
        return _Kind(dtype, rank, s.groups * s.rows, s.columns, s.rows, s.group_stride, s.row_stride, aligned)


@dataclass(slots=True)
class _Launch:
    kind: _Kind
    members: list[tuple[MergeItem, int]]
    """Items and their offsets in the chunk."""
    vectors: bool = False

    def entries(self) -> list[tuple[int, int, int, int]]:
        """Rows of the kernel's table, with today's addresses; also finds whether 16-byte pieces are possible."""
        entries = [
            (item.source.address(), *(item.delta.addresses() if item.delta else (0, 0)), offset)
            for item, offset in self.members
        ]
        k, size = self.kind, self.kind.dtype.itemsize
        every = functools.reduce(lambda bits, entry: bits | entry[0] | entry[1] | entry[2] | entry[3], entries, 0)
        every |= k.columns * size
        if k.rows > 1:
            every |= k.row_stride * size
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


class ChunkMerger:
    """Chunks of tensors, merged into byte buffers. What `WireExport` is above the model.

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
        self._scale, self._device = scale, torch.device(device)
        self._kernels = _kernels() if self._device.type == "cuda" else None
        self._chunks = [_plan_chunk([items[n] for n in indices]) for indices in order]
        for chunk in self._chunks if self._kernels is not None else ():
            self._make_table(chunk)

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._chunks)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._chunks[chunk].nbytes

    @torch.no_grad()
    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Write a chunk's merged tensors, end to end, row-major.

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
        if self._kernels is None:
            for launch in plan.launches:
                self._fill_by_torch(launch, out_B)
        elif out_B.data_ptr() % VECTOR_BYTES:
            whole_B = torch.empty_like(out_B)  # a fresh allocation is aligned
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
                dtype=kind.dtype,
                rank=kind.rank,
                scale=self._scale,
                vectors=launch.vectors,
            )

    # ------------------------------------------------------------ torch

    def _fill_by_torch(self, launch: _Launch, out_B: torch.Tensor) -> None:
        if launch.kind.rank == 0:
            for item, offset in launch.members:
                _put(out_B, offset, item.source.view())
            return
        for batch in _batches(launch.members):
            products_TOI = _products(batch).mul_(self._scale)
            for (item, offset), product_OI in zip(batch, products_TOI, strict=True):
                weight = item.source.view()
                _put(out_B, offset, product_OI.view(weight.shape).add_(weight).to(weight.dtype))


class WireExport(ChunkMerger):
    """The merged tensors of a one-rank runtime, chunk by chunk, in the receiver's order.

    Args:
        manifest: the names and shapes; `Exporter.manifest()` or a part of it.
        order: chunks of manifest indices; every index exactly once.

    Raises:
        ConfigError: `supports(runtime)` says why.
        ManifestError: the manifest has a tensor that the model has not, or in another shape or dtype; the order is not whole.
        MergePlanError: an adapter has no target, or two, or does not fit.
    """

    def __init__(self, runtime: TrainerRuntime, manifest: Manifest, order: Sequence[Sequence[int]]) -> None:
        _refuse_ranks()
        sources, deltas = _sources(runtime), _deltas(runtime)
        specs = {s.name: s for s in manifest.tensors}
        for spec in manifest.tensors:
            _check_source(spec, sources.get(spec.name))
        plan = plan_merge(deltas={name: d.matrices() for name, d in deltas.items()}, targets=specs)
        adapter_of = {op.target: deltas[op.adapter] for op in plan}
        items = [MergeItem(spec=s, source=sources[s.name], delta=adapter_of.get(s.name)) for s in manifest.tensors]
        super().__init__(items, order, scale=runtime.scale, device=runtime.device)


def supports(runtime: TrainerRuntime) -> str | None:
    """None if `WireExport` can export this runtime, else the reason that it cannot."""
    try:
        _refuse_ranks()
        _sources(runtime)
    except _NotUnderstoodError as error:
        return str(error)
    return None


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


def _plan_chunk(items: Sequence[MergeItem]) -> _Chunk:
    ends = list(accumulate((item.spec.nbytes for item in items), initial=0))
    by_kind: dict[_Kind, list[tuple[MergeItem, int]]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for item, offset in zip(items, ends, strict=False):
        if item.spec.numel:
            by_kind[_Kind.of(item, offset)].append((item, offset))
        read = (item.source.param,) if item.delta is None else (item.source.param, item.delta.lora_A, item.delta.lora_B)
        tensors.update((id(t), t) for t in read)
    launches = [_Launch(kind, members) for kind, members in by_kind.items()]
    return _Chunk(nbytes=ends[-1], launches=launches, tensors=list(tensors.values()))


def _check_source(spec: TensorSpec, source: Source | None) -> None:
    if source is None:
        raise ManifestError(f"the manifest has {spec.name}, which the model has not; plan the publication again")
    if source.shape != spec.shape or source.param.dtype != torch_dtype(spec.dtype):
        found = f"{source.param.dtype} {list(source.shape)}"
        raise ManifestError(
            f"{spec.name} is {spec.dtype} {list(spec.shape)} in the manifest and {found} in the model; plan again"
        )


def _refuse_ranks() -> None:
    ranks = torch.distributed.get_world_size()
    if ranks != 1:
        raise _NotUnderstoodError(
            f"the trainer has {ranks} ranks; the merge in the receiver's order needs the whole model on one"
        )


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


def _sources(runtime: TrainerRuntime) -> dict[str, Source]:
    """HF name -> where its elements lie.

    Raises:
        _NotUnderstoodError: a mapping or a parameter of a kind that this module does not know.
    """
    # Late, because on a CPU Bridge can be imported only after `cpu_shims.apply`.
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    if type(runtime.bridge).maybe_modify_converted_hf_weight is not MegatronModelBridge.maybe_modify_converted_hf_weight:
        raise _NotUnderstoodError(f"{type(runtime.bridge).__name__} changes tensors after its mappings")
    sources: dict[str, Source] = {}
    for task in runtime.conversion_tasks:
        if task is None or task.param_weight is None:
            raise _NotUnderstoodError("a parameter of the model is not on this rank")
        _check_param(task)
        for name, source in _task_sources(task).items():
            if name in VOCAB_TENSORS:
                source = Source.whole(source.param, rows=runtime.vocab_size)
            sources[name] = source
    embedding, head = VOCAB_TENSORS
    if runtime.hf_config.tie_word_embeddings and embedding in sources:
        sources.setdefault(head, sources[embedding])
    return sources


def _check_param(task: Any) -> None:
    data = task.param_weight.data
    if type(data) is not torch.Tensor or not data.is_contiguous():
        raise _NotUnderstoodError(f"{task.global_param_name} is a {type(data).__name__} of strides {tuple(data.stride())}")


def _task_sources(task: Any) -> Mapping[str, Source]:
    """What `task.mapping.megatron_to_hf` would make on one rank, as views. Subclasses may do more, so types are compared exactly."""
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
        return _qkv_sources(names, param, mapping._get_config(task.megatron_module))
    raise _NotUnderstoodError(
        f"{task.global_param_name} is mapped by {kind.__name__}, which the merge in the receiver's order does not know"
    )


def _qkv_sources(names: Mapping[str, str], param: torch.Tensor, config: Any) -> dict[str, Source]:
    """q, k and v of the interleaved rows [group: its query heads, its key head, its value head]; a bias is a matrix of one column."""
    if getattr(config, "attention_output_gate", False):
        raise _NotUnderstoodError(f"{names['q']} carries an output gate")
    groups = config.num_query_groups
    heads, size = config.num_attention_heads // groups, config.kv_channels or config.hidden_size // config.num_attention_heads
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


def _put(out_B: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    flat_B = tensor.contiguous().reshape(-1).view(torch.uint8)
    out_B[offset : offset + flat_B.numel()].copy_(flat_B)


def _batches(members: Sequence[tuple[MergeItem, int]]) -> Iterator[list[tuple[MergeItem, int]]]:
    """Members that share stacked adapter matrices, at most `BATCH_ELEMENTS` elements at a time."""
    by_matrix: dict[int, list[tuple[MergeItem, int]]] = defaultdict(list)
    for member in members:
        by_matrix[id(member[0].delta.lora_A)].append(member)  # type: ignore[union-attr]
    for group in by_matrix.values():
        step = max(1, BATCH_ELEMENTS // group[0][0].spec.numel)
        for first in range(0, len(group), step):
            yield group[first : first + step]


def _products(batch: Sequence[tuple[MergeItem, int]]) -> torch.Tensor:
    """B @ A of each, [T, O, I] in fp32."""
    deltas = [item.delta for item, _ in batch]
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
