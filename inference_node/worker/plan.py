"""A worker's plan for the updates of one manifest: what it takes, how, and in which chunks.

    prepare_update(manifest)        what does this worker take, what can it not place?
    fp8_groups, use_fp8(weights)    the same, for the manifest in which weights travel as FP8
    lay_out(reload, part)           the order in which the tensors travel; equal on all workers
    keeps(), use_edges(table)       each trainer rank sends only what this worker keeps
    choose(changed_only)            the update that starts next

Nothing here changes a live tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from inference_node.shared.reports import Findings, some
from inference_node.worker import chunk_plan, derived, direct, fp8, placement, verify
from orchestrator.errors import ManifestError, TransferError
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    LayoutOrder,
    Manifest,
    WireChunk,
    fp8_manifest,
    fp8_places,
)
from weight_transfer import edges
from weight_transfer.boxes import Box, boxes_of, matrix, overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUpdate:
    """An update as this worker takes it: of the whole manifest, or of its changed part."""

    manifest: Manifest
    plan: placement.PlacementPlan
    asked: tuple[tuple[int, ...] | None, frozenset[int], LayoutOrder]
    """Arguments of the layout: the part, what is reloaded of it, and the order."""
    chunks: tuple[WireChunk, ...]
    receiver: direct.DirectReceiver
    steps: list[edges.Step] | None = None
    """What comes from each trainer rank; empty until `use_edges`. None: whole chunks by
    broadcast."""

    @property
    def nbytes(self) -> int:
        """Bytes that this worker receives."""
        return self.manifest.nbytes if self.steps is None else sum(s.nbytes for s in self.steps)

    def keeps(self) -> dict[int, list[Box]] | None:
        """What this worker needs of each tensor: its regions, or all of a tensor to reload. None: a
        region is no rows by columns."""
        by_name = self.plan.regions_by_name()
        reloaded = {i for c in self.chunks if c.kind == "reload" for i in c.tensors}
        found: dict[int, list[Box]] = {}
        for index, spec in enumerate(self.manifest.tensors):
            height, width = matrix(spec.shape)
            whole = [Box(0, height, 0, width)]
            regions = by_name.get(spec.name, ())
            boxes = whole if index in reloaded else list[Box]()
            for region in regions if index not in reloaded else ():
                kept = boxes_of(region.first_index, region.size, region.index_strides, spec.shape)
                if kept is None:
                    return None
                boxes += kept
            boxes = list(dict.fromkeys(boxes))
            if overlap(boxes) is not None:
                boxes = whole
            if boxes:
                found[index] = boxes
        return found


class WorkerPlan:
    """Plans of one worker, for its whole life; see the module."""

    def __init__(self, *, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model, self._vllm_config, self._device = model, vllm_config, device
        self._recorded: tuple[Manifest, placement.PlacementPlan] | None = None
        """The trainer's manifest and its plan."""
        self._checked: tuple[Manifest, placement.PlacementPlan] | None = None
        """The manifest that is sent, and its plan: the trainer's unless weights travel as FP8."""
        self._together: list[tuple[int, ...]] = []
        """Indices of what is sent that must share a chunk: FP8 weights with their scales."""
        self._live: chunk_plan.Live = {}
        self._whole: WorkerUpdate | None = None
        self._part: WorkerUpdate | None = None
        self.update: WorkerUpdate | None = None
        """The planned update that was chosen last."""
        self.deriving: dict[str, torch.nn.Module] = {}
        """Attention layers that make tensors of other layers' parameters."""
        self.corrected: dict[str, list[placement.Region]] = {}
        """HF name -> regions whose reader loses the sign of zero."""

    def prepare_update(self, manifest: Manifest) -> Findings:
        """Record once where a manifest's tensors land; returns what does not fit."""
        if self._recorded is None or manifest != self._recorded[0]:
            with set_current_vllm_config(self._vllm_config):
                recorded = placement.record(self._model, manifest)
            if not self.weight_refusals():
                recorded = fp8.as_bf16(recorded, self._model)
            self._recorded = (manifest, recorded)
        return self._use(*self._recorded)

    def _use(self, manifest: Manifest, plan: placement.PlacementPlan) -> Findings:
        if self._checked is None or self._checked[0] != manifest:
            lossy = verify.loses_zero_sign(self._model, plan)
            self.corrected = {}
            for region in plan.regions:
                if region.key in lossy:
                    self.corrected.setdefault(region.name, []).append(region)
            self._live = chunk_plan.live_parameters(self._model, plan)
            self.deriving = derived.deriving_layers(self._model)
            self._whole = self._part = self.update = None
            self._together = []
            self._checked = (manifest, plan)
        return placement.local_findings(plan, manifest)

    # ------------------------------------------------------------ FP8

    def weight_refusals(self) -> list[str]:
        """Why this model's weights cannot be updated and verified, each naming its layers."""
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            found = fp8.refusals(self._model)
        return [f"{why} ({some(paths)})" for why, paths in found.items()]

    def holds_static_fp8(self) -> bool:
        """Whether layers load FP8: without a proof they cannot be updated at all."""
        return any(fp8.is_static(layer) for layer in self._model.modules())

    def fp8_groups(self, *, may_be_unverified: bool) -> list[Fp8Group]:
        """The HF matrices of the planned manifest that this worker keeps together in FP8.

        Args:
            may_be_unverified: a model that cannot be verified has none, so that vLLM reloads it.
                An FP8 checkpoint's layers cannot load bf16, so this does not help them.

        Raises:
            ManifestError: the model cannot be updated and verified, or a tensor is not a bf16
                matrix.
        """
        assert self._recorded is not None
        refused = self.weight_refusals()
        if refused and may_be_unverified and not self.holds_static_fp8():
            return []
        if refused:
            raise ManifestError("; ".join(refused))
        return fp8.groups(self._recorded[1], self._recorded[0], self._model)

    def use_fp8(self, weights: Fp8Weights) -> Findings:
        """Plan what is sent if these weights of the planned manifest travel as FP8.

        Raises:
            ManifestError: blocks of a tensor do not begin where its scales do.
        """
        assert self._recorded is not None
        manifest, recorded = self._recorded
        sent = fp8_manifest(manifest, weights)
        found = self._use(sent, fp8.placed(recorded, sent, self._model))
        places = fp8_places(manifest, weights)
        self._together = [tuple(p for i in g.tensors for p in places[i]) for g in weights.groups]
        return found

    # ------------------------------------------------------------ the layout

    def obstacles(self) -> dict[int, str]:
        """Index of each tensor of the manifest that this worker cannot place -> the reason."""
        manifest, plan = self._checked_plan()
        return chunk_plan.obstacles(plan, manifest, self._live)

    def whole_layers(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The indices, with those of all tensors that share a layer with them on this worker."""
        manifest, plan = self._checked_plan()
        return placement.whole_layers(plan, manifest, indices)

    def lay_out(
        self, reload_indices: Sequence[int], part: tuple[int, ...] | None, *, order: LayoutOrder
    ) -> tuple[WireChunk, ...]:
        """Plan updates of the checked manifest, or of a part of it; returns how its tensors travel.

        Args:
            reload_indices: tensors of the whole manifest that some worker reloads, as whole layers.
            part: ascending indices of the tensors that the updates bring. None: all.
            order: "own" receives in place what this replica can, even if others cannot; "edges"
                waits for `use_edges`.

        Raises:
            ManifestError: a layer is incomplete, or an unplaceable tensor is not reloaded.
        """
        manifest, _ = self._checked_plan()
        self._check_whole_layers("a fused layer must come whole", part or ())
        self._check_whole_layers("a layer is reloaded whole", reload_indices)
        stuck = sorted(self.obstacles().keys() - set(reload_indices))
        if stuck:
            raise ManifestError(
                f"what cannot be put in place must be reloaded; left out {_names(manifest, stuck)}"
            )
        reloaded = set(reload_indices)
        everything = range(len(manifest.tensors)) if part is None else part
        reload_within = frozenset(n for n, i in enumerate(everything) if i in reloaded)
        known = self._whole if part is None else self._part
        if known is None or known.asked != (part, reload_within, order):
            known = self._lay_out(part, reload_within, order)
        if part is None:
            self._whole = known
        else:
            self._part = known
        return known.chunks

    def _lay_out(
        self, part: tuple[int, ...] | None, reload_within: frozenset[int], order: LayoutOrder
    ) -> WorkerUpdate:
        manifest, plan = self._checked_plan()
        everything = range(len(manifest.tensors)) if part is None else part
        numbers = {i: n for n, i in enumerate(everything)}
        if part is not None:
            manifest = manifest.part(part)
            plan = placement.only(plan, manifest)
        is_single = self._vllm_config.parallel_config.world_size_across_dp == 1
        together = [tuple(numbers[i] for i in g) for g in self._together if g[0] in numbers]
        elsewhere = reload_within.union(*together)
        is_own = order == "own" and is_single
        runs = chunk_plan.whole_runs(plan, manifest, elsewhere) if is_own else ()
        chunks = chunk_plan.plan_chunks(
            manifest, reload=reload_within, runs=runs, together=together
        )
        steps: list[edges.Step] | None = [] if order == "edges" else None
        return WorkerUpdate(
            manifest=manifest,
            plan=plan,
            asked=(part, reload_within, order),
            chunks=chunks,
            receiver=self._receiver(chunks, manifest, plan, steps),
            steps=steps,
        )

    def _receiver(
        self,
        chunks: Sequence[WireChunk],
        manifest: Manifest,
        plan: placement.PlacementPlan,
        steps: Sequence[edges.Step] | None,
    ) -> direct.DirectReceiver:
        return direct.DirectReceiver(
            chunks=chunks,
            manifest=manifest,
            plan=plan,
            live=self._live,
            device=self._device,
            steps=steps,
        )

    def keeps(self) -> edges.Table | None:
        """What this worker keeps of the manifest whose layout is planned. None: no boxes."""
        assert self._whole is not None
        kept = self._whole.keeps()
        return None if kept is None else edges.keeps_table(kept)

    def use_edges(self, table: edges.Table, *, changed_only: bool) -> None:
        """Receive an update from each trainer rank as the table says.

        Raises:
            ManifestError: it is not what this worker keeps, each element once.
        """
        known = self._part if changed_only else self._whole
        if known is None:
            raise ManifestError("this update was not planned here; send PrepareUpdate first")
        manifest = known.manifest
        steps = edges.steps_of_worker(table, manifest.tensors)
        edges.check_coverage(steps, known.keeps() or {}, lambda i: manifest.tensors[i].name)
        receiver = self._receiver(known.chunks, manifest, known.plan, steps)
        known = dataclasses.replace(known, receiver=receiver, steps=steps)
        if changed_only:
            self._part = known
        else:
            self._whole = known

    def _check_whole_layers(self, rule: str, indices: Sequence[int]) -> None:
        missing = sorted(set(self.whole_layers(indices)) - set(indices))
        if missing:
            raise ManifestError(f"{rule}; missing {_names(self._checked_plan()[0], missing)}")

    def _checked_plan(self) -> tuple[Manifest, placement.PlacementPlan]:
        if self._checked is None:
            raise ManifestError("no manifest is planned; send PrepareUpdate first")
        return self._checked

    @property
    def placed(self) -> placement.PlacementPlan:
        """Where everything that is sent lands."""
        return self._checked_plan()[1]

    def choose(self, *, changed_only: bool) -> None:
        """Choose the update that starts next: of the whole manifest or of the part.

        Raises:
            TransferError: the update was not planned.
        """
        self.update = self._part if changed_only else self._whole
        if self.update is None or self.update.steps == []:
            raise TransferError(
                "this update was not planned here; send PrepareUpdate, and UseEdges after the "
                'order "edges"'
            )


def _names(manifest: Manifest, indices: Sequence[int]) -> str:
    return some([manifest.tensors[i].name for i in indices])
