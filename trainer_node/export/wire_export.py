"""Fills byte buffers with merged HF tensors, in the receiver's order.

The export is planned once. Each chunk then takes a few kernels.

    WireExport(model, manifest, order)    order: manifest indices of each chunk
        .start(limit=...)                 on every rank, before each send of all chunks
        .fill(chunk, out_B)               rank 0: queues the merge on the current stream
        .drain(), .contribute()           rank 0 after its last chunk; the other ranks

`Exporter` asks Bridge for one HF tensor after the other. Here `probe` asks once, and HF tensors
become strided views of Megatron's parameters: groups of rows of `linear_qkv`, halves of
`linear_fc1`. The manifest has the vocabulary without padding. Bridge converts the few tensors that
are not views, such as zero-centred norms, before each send (`streamed`). `merger` merges a chunk.

On several ranks, each rank merges its pieces (`gather_plan` assigns them) and sends them to rank 0
(`gathering`). Rank 0 merges its own pieces into the chunk, and copies the others to their places
with the same kernel. Each piece has its own delta. A of a row-parallel linear is split by columns,
as its weight is. B of a column-parallel linear is split by rows. The other matrix is whole on every
rank. A delta is cut to its piece.

Axes: B = bytes, O = out features, I = in features, R = rank, T = tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from orchestrator.errors import ManifestError, MergePlanError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.adapters.linears import stack_of
from trainer_node.adapters.lora import ExpertAdapter
from trainer_node.adapters.merge import plan_merge
from trainer_node.adapters.rounding import Corner, Rounding
from trainer_node.export.adapter_tensors import AdapterTensors, is_matrix
from trainer_node.export.gather_plan import (
    ChunkPlan,
    Held,
    PartitionError,
    assign,
    holders,
    lay_out,
)
from trainer_node.export.gathering import Exchange
from trainer_node.export.merger import Merger
from trainer_node.export.probe import HfTensor, Probed, probe
from trainer_node.export.sources import Delta, Member, Source
from trainer_node.export.streamed import Streamed
from trainer_node.layout.strides import Piece
from trainer_node.model.model import Model
from trainer_node.ranks import objects
from trainer_node.ranks.topology import tensor_group
from weight_transfer import edges
from weight_transfer.boxes import Box, matrix
from weight_transfer.layout import torch_dtype

MOST_SENT = 1.2
"""Most that a rank may send to one replica by edges, in models."""
STREAMED_BYTES = 1 << 28
"""Bytes of a rank's parameters that Bridge may convert before each send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What steps hold, where that is not the manifest's tensors but is made of them.

    `fill` then writes a step's merged pieces `widened` times as far apart.
    """

    specs: Sequence[TensorSpec]
    order: Sequence[int]
    """Their indices in the order in which they travel."""
    base_of: Sequence[int | None]
    """Index in the manifest of the tensor that each is made of, box by box. None: every rank makes
    it whole."""
    widened: int

    def holders(self, of_manifest: Sequence[edges.Holders], ranks: int) -> list[edges.Holders]:
        """Who holds what of each."""
        return [
            [(tuple(range(ranks)), Box(0, height, 0, width))] if base is None else of_manifest[base]
            for base, (height, width) in zip(
                self.base_of, (matrix(spec.shape) for spec in self.specs), strict=True
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """This rank's part of an HF tensor, as boxes."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    pieces: dict[Box, tuple[torch.Tensor, Piece]]
    """Box -> the parameter, and where the box is in it."""

    @staticmethod
    def of(name: str, tensor: HfTensor, shape: tuple[int, ...]) -> LocalTensor:
        """A probed tensor. Megatron's padding after the rows of `shape` goes."""
        pieces = tensor.pieces
        if shape[1:] == tensor.shape[1:] and len(shape) > 0 and shape[0] < tensor.shape[0]:
            height = matrix(shape)[0]
            pieces = [(param, cut) for param, piece in pieces for cut in piece.clipped(height)]
        else:
            shape = tensor.shape
        return LocalTensor(name=name, shape=shape, pieces={p.box: (q, p) for q, p in pieces})

    @property
    def dtype(self) -> str:
        """As in manifests."""
        param, _ = next(iter(self.pieces.values()))
        return str(param.dtype).removeprefix("torch.")

    def held(self) -> list[Held]:
        """Return what the other ranks need to know."""
        return [Held(self.name, self.dtype, self.shape, box) for box in self.pieces]

    def within(self, box: Box) -> Box:
        """A box's place in what this rank has, rows and columns end to end: an adapter's matrix."""
        rows = {(b.first_row, b.rows) for b in self.pieces}
        columns = {(b.first_column, b.columns) for b in self.pieces}
        first_row = sum(min(n, max(0, box.first_row - first)) for first, n in rows)
        first_column = sum(min(n, max(0, box.first_column - first)) for first, n in columns)
        return Box(first_row, box.rows, first_column, box.columns)

    def members(
        self, box: Box, delta: Delta | None, *, offset: int, row_stride: int
    ) -> Iterator[Member]:
        """The members that make up a box of what this rank has.

        Args:
            offset: first byte of the box in the buffer.
            row_stride: elements from one row to the next, in the buffer.
        """
        is_vector = matrix(self.shape)[1] == 1
        held = next(b for b in self.pieces if b.contains(box))
        param, whole = self.pieces[held]
        for piece in [whole] if held == box else whole.cut(box):
            here = piece.box
            cut = delta
            if delta is not None and delta.first_expert is not None:
                cut = delta.of_stack(here, self.shape)
            elif delta is not None and (len(self.pieces) > 1 or here != held):
                cut = replace(delta, box=self.within(here))  # A and B are for all boxes
            row, column = here.first_row - box.first_row, here.first_column - box.first_column
            yield Member(
                source=Source.of(param, piece, is_vector=is_vector),
                delta=cut,
                offset=offset + (row * row_stride + column) * param.element_size(),
                row_stride=row_stride,
                corner=Corner(self.name, here.first_row, here.first_column),
            )

    def spec(self) -> TensorSpec:
        """What an adapter here must fit."""
        if len(self.shape) < 2:
            return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)  # type: ignore[arg-type]
        ends = [self.within(box) for box in self.pieces]
        height = max(box.first_row + box.rows for box in ends)
        width = max(box.first_column + box.columns for box in ends)
        if height * width != sum(box.numel for box in ends):
            height = 0  # no matrix, so no adapter fits
        return TensorSpec(name=self.name, dtype=self.dtype, shape=(height, width))  # type: ignore[arg-type]


class WireExport:
    """The merged tensors of a model, in the receiver's order: chunk by chunk on rank 0, or step by
    step on every rank.

    The constructor is a collective. It needs a model for which `supports` returns None.

    Args:
        manifest: the names and shapes; `Exporter.manifest()` or a part of it.
        order: chunks of manifest indices; every index exactly once.
        keeps: what each worker keeps of the manifest. Every rank then sends to each worker what it
            keeps. None: rank 0 sends whole chunks.
        sent: what is sent, if not the manifest's tensors; `keeps` counts in it.

    Raises (on every rank alike):
        PartitionError: the ranks' pieces are not whole tensors.
        ManifestError: the manifest does not fit the model, or the order is incomplete.
        MergePlanError: an adapter has no target, or two, or does not fit.
    """

    def __init__(
        self,
        model: Model,
        manifest: Manifest,
        order: Sequence[Sequence[int]],
        *,
        keeps: Sequence[edges.Keeps] | None = None,
        sent: Sent | None = None,
    ) -> None:
        specs, rank = manifest.tensors, torch.distributed.get_rank()
        self._model = model
        _check_order([spec.name for spec in specs], order)
        probed = probe(model)
        mine_by_name = {
            spec.name: LocalTensor.of(spec.name, probed.held[spec.name], spec.shape)
            for spec in specs
            if spec.name in probed.held
        }
        mine_by_name = {name: tensor for name, tensor in mine_by_name.items() if tensor.pieces}
        adapter_of, problem = dict[str, Delta](), None
        if model.config.serves_merged:
            adapter_of, problem = _plan_adapters(model, mine_by_name)
        held = [asdict(piece) for tensor in mine_by_name.values() for piece in tensor.held()]
        everyones = objects.all_gather(
            (problem, held, list(probed.streamed)), group=model.control_group
        )
        # Only now, so that all ranks raise: one that left would keep the others waiting.
        for text, _, _ in everyones:
            if text is not None:
                raise MergePlanError(text)
        holdings = [[_held(fields) for fields in theirs] for _, theirs, _ in everyones]
        known = {piece.name for theirs in holdings for piece in theirs}
        self._streamed = Streamed(
            model,
            sorted({number for _, _, tasks in everyones for number in tasks}),
            [spec for spec in specs if spec.name not in known and not is_matrix(spec.name)],
        )
        self._adapters = AdapterTensors(model, specs)
        # Every rank has the whole tensor, or rank 0 has it, so rank 0's counts.
        for name, tensor in (self._streamed.buffers | self._adapters.buffers).items():
            whole = LocalTensor.of(name, HfTensor.whole(tensor), tuple(tensor.shape))
            holdings[0] += whole.held()
            mine_by_name[name] = whole
        self.longest_s = math.inf
        """Longest duration of a send, in seconds: only its deadline limits it."""
        self.steps: list[edges.Step] | None = None
        """What this rank sends to each worker. None: rank 0 sends whole chunks."""
        self.tables: list[edges.Table] = []
        """What each worker receives; on rank 0, which answers."""
        plans: list[ChunkPlan] = []
        if keeps is not None:
            sent = sent or Sent(
                specs=specs,
                order=[i for chunk in order for i in chunk],
                base_of=range(len(specs)),
                widened=1,
            )
            held_by = sent.holders(holders(holdings, specs), len(everyones))
            planned = edges.plan(sent.specs, held_by, keeps, order=sent.order, ranks=len(everyones))
            _check_sent(planned, sent.specs, ranks=len(everyones), workers=len(keeps))
            self.steps = edges.steps_of_rank(planned, rank, sent.specs)
            if rank == 0:
                self.tables = [edges.table_of(planned, worker) for worker in range(len(keeps))]
            mine = [
                _step_members(step, sent, specs, mine_by_name, adapter_of) for step in self.steps
            ]
            self._nbytes = [nbytes for nbytes, _ in mine]
        else:
            plans = lay_out(specs, order, assign(holdings, specs), ranks=len(everyones))
            self._nbytes = [plan.nbytes for plan in plans]
            mine = [_own_members(plan, rank, specs, mine_by_name, adapter_of) for plan in plans]
        self._exchange = Exchange(
            [p.messages for p in plans], group=model.gather_group, device=model.device
        )
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
                where it converts tensors, have their own timeout.

        Raises:
            OutOfStep: a collective failed.
        """
        self._streamed.take()
        self._adapters.take()
        self._exchange.start(limit=limit)

    @property
    def merger(self) -> Merger | None:
        """On rank 0: what fills every chunk without other ranks. None: other ranks have pieces."""
        chunks = range(self._placed.num_chunks)
        return None if any(self._placed.members(k) for k in chunks) else self._own

    @property
    def gathers(self) -> bool:
        """Whether rank 0 fills chunks with other ranks' pieces."""
        return self._exchange.moves

    def merged_with(
        self, other: Callable[[Delta], Delta], rounding: Callable[[], Rounding]
    ) -> Merger:
        """Merges every member of this rank that has an adapter, with another adapter and rounding.

        The rest of a buffer is left as it is.
        """
        chunks = (
            (nbytes, [replace(m, delta=other(m.delta)) for m in self._own.members(k) if m.delta])
            for k, nbytes in enumerate(self._nbytes)
        )
        model = self._model
        return Merger(chunks, scale=model.scale, rounding=rounding, device=model.device)

    def resident(self, chunk: int) -> torch.Tensor | None:
        """On rank 0: see `Merger.resident`. The caller calls `fill` for this chunk too."""
        return None if self.steps is not None else self._own.resident(chunk)

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """On rank 0: write a chunk, its merged tensors end to end, row-major. In steps, on every
        rank: write a step's pieces.

        The caller fills each chunk once, in order. On CUDA the work is queued on the current
        stream. Adapters must not change before it is done.

        Raises:
            ValueError: `out_B` does not fit; as `Merger.fill`.
            OutOfStep: a rank is gone, or did not send its pieces before the limit.
        """
        if self.steps is not None:
            self._own.fill(chunk, out_B)
            return
        self._exchange.post(chunk)  # the others' pieces travel while rank 0 merges its own
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
        """Free the buffers between the ranks, and the adapters'. `start` makes them again."""
        self._exchange.release()
        self._adapters.release()

    def seconds(self, fill_s: float) -> dict[str, float]:
        """Seconds of a send, by phase. Tensors that are not views were exported before the first
        `fill`."""
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
    members: list[Member] = []
    for placed in plan.placements[rank]:
        tensor = tensors[specs[placed.index].name]
        offset, row_stride = (
            (placed.offset, placed.row_stride) if rank == 0 else (placed.packed, placed.box.columns)
        )
        members += tensor.members(
            placed.box, adapter_of.get(tensor.name), offset=offset, row_stride=row_stride
        )
    return (plan.nbytes if rank == 0 else plan.messages[rank]), members


def _check_sent(
    planned: edges.Edges, specs: Sequence[TensorSpec], *, ranks: int, workers: int
) -> None:
    sent, _ = edges.bytes_of(planned, specs, ranks=ranks, workers=workers)
    if max(sent) > MOST_SENT * sum(spec.nbytes for spec in specs):
        raise PartitionError(
            f"a rank would send {max(sent):,} bytes to a replica, because its workers keep "
            "the same; one broadcast is faster"
        )


def _step_members(
    step: edges.Step,
    sent: Sent,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, LocalTensor],
    adapter_of: Mapping[str, Delta],
) -> tuple[int, list[Member]]:
    """This rank's members of a step."""
    members: list[Member] = []
    for placed in step.placed:
        base, box = sent.base_of[placed.piece.index], placed.piece.box
        if base is None:
            continue
        tensor, offset = tensors[specs[base].name], placed.offset * sent.widened
        members += tensor.members(
            box, adapter_of.get(tensor.name), offset=offset, row_stride=box.columns
        )
    return step.nbytes * sent.widened, members


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
                rows=box.rows,
                columns=box.columns,
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
                continue  # a copy: merging it twice would make two owners of one tensor's delta
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
