"""Fills steps with pieces of e4m3 weights and with scales, where every rank sends by edges.

    Fp8Steps(export, ...)    has the methods of `WireExport`
        .prepare()           ahead of a send: the largest magnitudes of what this rank sends
        .start(limit=...)    the same before a send, if it was not prepared
        .exchange()          on every rank: the largest of all ranks, hence the scales
        .fill(step, out_B)   merges the step's pieces into a bf16 scratch and quantises each

A scale needs the largest magnitude of a whole group, row or block. Its elements may be on several
ranks, or travel in several steps. All ranks know all scales after `exchange`, so any rank may
send one. The bytes are those of `Fp8Export`.

Axes: B = bytes, K = scales in a step, N = groups, rows or pieces of a run, S = slots: one for each
group (per_tensor), row (per_channel) or block (per_block) of the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import (
    FP8_BLOCK,
    Fp8Weights,
    Manifest,
    TensorSpec,
    fp8_places,
)
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.wire_export import Sent, WireExport
from trainer_node.ranks.lockstep import OutOfStep
from weight_transfer import fp8
from weight_transfer.boxes import Box, matrix
from weight_transfer.edges import PIECE_BYTES, Placed, Step, Table
from weight_transfer.layout import torch_dtype

WIDENED = 2
"""Bytes of a bf16 element for one of e4m3."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """An e4m3 weight, and the slot of its first scale."""

    kind: str
    slot: int
    width: int

    def slots_of(self, box: Box) -> tuple[Numbers, Numbers]:
        """Slots of a box's rows [N], and what its columns [I] add to them. Each has a single entry
        if all entries are equal."""
        rows = np.arange(box.first_row, box.first_row + box.rows)
        if self.kind == "per_tensor":
            return np.array([self.slot]), np.array([0])
        if self.kind == "per_channel":
            return self.slot + rows, np.array([0])
        across = -(-self.width // FP8_BLOCK)
        columns = np.arange(box.first_column, box.first_column + box.columns)
        return self.slot + rows // FP8_BLOCK * across, columns // FP8_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Where the scales of all FP8 weights are. Indices count in what is sent."""

    weights: dict[int, Weight]
    first_slot: dict[int, int]
    """Index of a tensor of scales -> its first slot."""
    of_kind: dict[str, list[tuple[int, int]]]
    """Kind -> slots [first, end) that have it."""
    total: int


def plan(
    manifest: Manifest,
    sent: Manifest,
    weights: Fp8Weights,
    order: Sequence[Sequence[int]],
    part: Sequence[int] | None,
) -> tuple[tuple[int, ...], Sent, Scales]:
    """Plan what the ranks merge and what is made of it. Pure.

    Args:
        manifest: the trainer's; `sent` is its `fp8_manifest`.
        order: the chunks of `sent`; they count in the part, if there is one.

    Returns: ascending indices of the trainer's tensors that are needed, and the rest.

    Raises:
        ManifestError: a group is not bf16, or is only partly in the part.
    """
    places = fp8_places(manifest, weights)
    chosen = list(range(len(sent.tensors))) if part is None else list(part)
    number = {index: n for n, index in enumerate(chosen)}
    own = tuple(b for b, found in enumerate(places) if any(i in number for i in found))
    base_of: list[int | None] = [None] * len(chosen)
    for n, base in enumerate(own):
        base_of[number[places[base][0]]] = n
    found, first_slot, total = dict[int, Weight](), dict[int, int](), 0
    of_kind: dict[str, list[tuple[int, int]]] = {}
    for group in weights.groups:
        if not any(places[b][0] in number for b in group.tensors):
            continue
        first = total
        for base in group.tensors:
            spec = manifest.tensors[base]
            if spec.dtype != "bfloat16":
                raise ManifestError(f"only bf16 is sent as FP8; {spec.name} is {spec.dtype}")
            if any(i not in number for i in places[base]):
                raise ManifestError(f"{spec.name} is not sent with what shares its scale")
            weight, scale = (number[i] for i in places[base])
            found[weight] = Weight(kind=group.kind, slot=total, width=spec.shape[1])
            first_slot[scale] = total
            if group.kind != "per_tensor":
                total += math.prod(sent.tensors[places[base][1]].shape)
        total += group.kind == "per_tensor"
        of_kind.setdefault(group.kind, []).append((first, total))
    made = Sent(
        specs=[sent.tensors[i] for i in chosen],
        order=[i for chunk in order for i in chunk],
        base_of=base_of,
        widened=WIDENED,
    )
    return own, made, Scales(weights=found, first_slot=first_slot, of_kind=of_kind, total=total)


@dataclass(slots=True, kw_only=True)
class _Run:
    """Pieces of one kind that follow each other in a step, seen as a matrix [N, I]."""

    kind: str
    begin: int
    rows: int
    columns: int
    slots: list[Numbers]
    """Of the rows, piece by piece."""
    added: Numbers
    """What columns add to a row's slot: [1], or [I] of blocks."""
    slots_N1: torch.Tensor = field(default_factory=torch.Tensor)
    added_I: torch.Tensor = field(default_factory=torch.Tensor)

    @property
    def end(self) -> int:
        """The byte after the last one of the run in its step."""
        return self.begin + self.rows * self.columns

    def place(self, device: torch.device) -> _Run:
        """Take the slots to the device."""
        self.slots_N1 = torch.from_numpy(np.concatenate(self.slots))[:, None].to(device)
        self.added_I = torch.from_numpy(self.added).to(device)
        return self

    def slots_of_all(self) -> torch.Tensor:
        """[N, 1], or [N, I] of blocks."""
        return self.slots_N1 + self.added_I

    def merged(self, scratch_B: torch.Tensor) -> torch.Tensor:
        """bf16 [N, I]."""
        flat = scratch_B[WIDENED * self.begin : WIDENED * self.end].view(torch.bfloat16)
        return flat.view(self.rows, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    runs: tuple[_Run, ...]
    copies: tuple[tuple[int, int], ...]
    """First byte and size of what is sent as it is merged."""
    words_K: torch.Tensor
    """Where scales go, in words of 4 bytes."""
    slots_K: torch.Tensor


def _plan_step(
    step: Step, specs: Sequence[TensorSpec], scales: Scales, device: torch.device
) -> _Step:
    runs: list[_Run] = []
    copies: list[tuple[int, int]] = []
    words, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for placed in step.placed:
        index, box = placed.piece.index, placed.piece.box
        if index in scales.first_slot:
            _, width = matrix(specs[index].shape)
            rows = np.arange(box.first_row, box.first_row + box.rows)
            columns = np.arange(box.first_column, box.first_column + box.columns)
            slots.append((scales.first_slot[index] + rows[:, None] * width + columns).ravel())
            words.append(placed.offset // 4 + np.arange(box.numel))
        elif index in scales.weights:
            _add(runs, placed, scales.weights[index])
        else:
            copies.append((placed.offset, box.numel * torch_dtype(specs[index].dtype).itemsize))
    return _Step(
        runs=tuple(run.place(device) for run in runs),
        copies=tuple(copies),
        words_K=torch.from_numpy(np.concatenate(words)).to(device),
        slots_K=torch.from_numpy(np.concatenate(slots)).to(device),
    )


def _add(runs: list[_Run], placed: Placed, weight: Weight) -> None:
    """Add a piece to the last run if it continues that, else as a new one."""
    box, (slots, added) = placed.piece.box, weight.slots_of(placed.piece.box)
    rows, columns = (1, box.numel) if weight.kind == "per_tensor" else (box.rows, box.columns)
    last = runs[-1] if runs else None
    if (
        last is not None
        and (last.kind, last.columns, last.end) == (weight.kind, columns, placed.offset)
        and np.array_equal(last.added, added)
        and (weight.kind != "per_block" or (last.rows + rows) * columns <= PIECE_BYTES)
    ):
        last.rows += rows
        last.slots.append(slots)
    else:
        runs.append(
            _Run(
                kind=weight.kind,
                begin=placed.offset,
                rows=rows,
                columns=columns,
                slots=[slots],
                added=added,
            )
        )


class Fp8Steps:
    """See the module. The constructor is a collective.

    Args:
        export: merges the pieces; made with `sent`.
        group: of all ranks, on the device.
        rounding: returns the present rounding.
    """

    longest_s = math.inf

    def __init__(
        self,
        export: WireExport,
        sent: Sent,
        scales: Scales,
        *,
        group: Any,
        rounding: Callable[[], Rounding],
        device: torch.device,
    ) -> None:
        assert export.steps is not None
        self._export, self._scales, self._group = export, scales, group
        self._rounding, self._device = rounding, device
        self.steps: list[Step] = export.steps
        self.tables: list[Table] = export.tables
        self._planned = [_plan_step(step, sent.specs, scales, device) for step in self.steps]
        self._largest_S = torch.zeros(scales.total, dtype=torch.int32, device=device)
        """Bits of the largest magnitudes, which sort like them."""
        self._scales_S = torch.zeros(scales.total, device=device)
        self._factors_S = torch.zeros(scales.total, device=device)
        self._measured_for: Rounding | None = None
        self._scratch_B = torch.empty(0, dtype=torch.uint8, device=device)
        self.exchange()  # NCCL connects in a group's first operation

    @property
    def num_chunks(self) -> int:
        """Steps."""
        return len(self.steps)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a step."""
        return self.steps[chunk].nbytes

    def resident(self, chunk: int) -> torch.Tensor | None:
        """See `WireExport.resident`."""
        return None

    # ------------------------------------------------------------ before a send

    @torch.no_grad()
    def prepare(self) -> None:
        """Find the largest magnitudes of what this rank sends. On CUDA the work is queued on the
        current stream."""
        if self._measured_for == self._rounding():
            return
        self._measured_for = None
        self._largest_S.zero_()
        for k, step in enumerate(self._planned):
            scratch_B = self._merged(k)
            for run in step.runs:
                merged = run.merged(scratch_B)
                bits = (
                    merged.abs().float() if run.kind == "per_block" else fp8.largest(merged)
                ).view(torch.int32)
                slots = run.slots_of_all().flatten()
                self._largest_S.scatter_reduce_(0, slots, bits.flatten(), "amax")
        self._measured_for = self._rounding()

    def forget_prepared(self) -> None:
        """Called before the weights may change."""
        self._measured_for = None

    def start(self, *, limit: float) -> None:
        """See `WireExport.start`."""
        self._export.start(limit=limit)
        self.prepare()

    @torch.no_grad()
    def exchange(self) -> None:
        """Make the scales of the largest magnitudes of all ranks. A collective, for which every
        rank has started.

        Raises:
            OutOfStep: a rank did not take part.
        """
        try:
            if dist.get_world_size() > 1:
                dist.all_reduce(self._largest_S, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise OutOfStep(
                f"rank {dist.get_rank()}: the ranks did not exchange the largest magnitudes of "
                f"FP8 weights: {error}"
            ) from error
        for kind, spans in self._scales.of_kind.items():
            for first, end in _joined(spans):
                largest = self._largest_S[first:end].view(torch.float32)
                self._scales_S[first:end], self._factors_S[first:end] = fp8.scales_of(kind, largest)

    # ------------------------------------------------------------ a send

    @torch.no_grad()
    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Write a step. On CUDA the work is queued on the current stream."""
        scratch_B, step = self._merged(chunk), self._planned[chunk]
        for run in step.runs:
            out = out_B[run.begin : run.end].view(torch.float8_e4m3fn).view(run.rows, run.columns)
            fp8.rounded(run.kind, run.merged(scratch_B), self._factors_S[run.slots_of_all()], out)
        for begin, nbytes in step.copies:
            out_B[begin : begin + nbytes].copy_(scratch_B[WIDENED * begin :][:nbytes])
        if len(step.words_K):
            words = out_B[: len(out_B) // 4 * 4].view(torch.float32)
            words[step.words_K] = self._scales_S[step.slots_K]

    def _merged(self, chunk: int) -> torch.Tensor:
        """The step's pieces in bf16."""
        if not len(self._scratch_B):
            size = max(self._export.chunk_nbytes(k) for k in range(self.num_chunks))
            self._scratch_B = torch.empty(size, dtype=torch.uint8, device=self._device)
        scratch_B = self._scratch_B[: self._export.chunk_nbytes(chunk)]
        self._export.fill(chunk, scratch_B)
        return scratch_B

    def drain(self) -> None:
        """See `WireExport.drain`."""
        self._export.drain()

    def contribute(self) -> None:
        """See `WireExport.contribute`: every rank sends."""

    def release(self) -> None:
        """Free the scratch, and what the other export holds."""
        self._scratch_B = self._scratch_B.new_empty(0)
        self._export.release()

    def seconds(self, fill_s: float) -> dict[str, float]:
        """See `WireExport.seconds`; the quantiser's are in `merge`."""
        return self._export.seconds(fill_s)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that follow each other as one."""
    joined: list[tuple[int, int]] = []
    for first, end in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined
