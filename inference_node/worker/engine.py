"""The weight-transfer engine "splice": receives updates, and can repeat them after a failure.

vLLM makes one instance per worker from `--weight-transfer-config '{"backend": "splice"}'`. An
update runs

    plan_check(manifest)            no pause: what does this worker take, what can it not place?
    lay_out(reload, part)           the order in which the tensors travel; equal on all workers
    start -> receive -> finish      vLLM's own three calls; the first undoes a failed update
    digests()                       of the live tensors, through the placement plan

or, in shadow mode (`inference_node.worker.shadow`),

    open_shadow -> start_shadow ... poll_shadow     while the engine steps; nothing live changes
    start -> receive(swap) -> finish, digests       the same calls; the bytes have arrived already

A failure in `receive_weights` or `finish_weight_update` resets the reload at once. Kernel tensors
are then back in place, but hold a mixture of versions until a full update succeeds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from inference_node.shared.reports import Findings, WorkerDigests, some
from inference_node.shared.watchdog import Watchdog
from inference_node.worker import (
    derived,
    dialect,
    direct,
    fp8,
    kv_cache,
    placement,
    reload,
    shadow,
    verify,
)
from orchestrator.errors import ManifestError, TransferError
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    JoinTransferGroup,
    Manifest,
    ReceiveWeights,
    SwapWeights,
    WireChunk,
    fp8_manifest,
    fp8_places,
)
from weight_transfer.groups import TransferGroup, join_tcp

RANK_OFFSET = 1
"""The trainer is rank 0."""


@dataclass
class SpliceInitInfo(WeightTransferInitInfo):
    """How to join the trainer's group."""

    request: JoinTransferGroup


@dataclass
class SpliceUpdateInfo(WeightTransferUpdateInfo):
    """One update of the manifest that was planned last."""

    request: ReceiveWeights | SwapWeights
    """`SwapWeights`: the bytes are beside the live tensors already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerUpdate:
    """An update as this worker takes it: of the whole manifest, or of its changed part."""

    manifest: Manifest
    plan: placement.PlacementPlan
    part: tuple[int, ...] | None
    """Indices of its tensors in the whole manifest. None: all."""
    reload: frozenset[int]
    """Indices, within the update, of the tensors that take the reload path."""
    is_own: bool
    """Whether it has `live` chunks where this replica can take them."""
    chunks: tuple[WireChunk, ...]
    receiver: direct.DirectReceiver


@dataclass
class _Applied:
    """What the last receive did."""

    nbytes: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class SpliceEngine(WeightTransferEngine[SpliceInitInfo, SpliceUpdateInfo]):
    """See the module."""

    init_info_cls = SpliceInitInfo
    update_info_cls = SpliceUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._watchdog: Watchdog | None = Watchdog.from_environment()
        self._group: TransferGroup | None = None
        self._recorded: tuple[Manifest, placement.PlacementPlan] | None = None
        """The trainer's manifest and its plan."""
        self._checked: tuple[Manifest, placement.PlacementPlan] | None = None
        """What is sent, and its plan. They are the trainer's unless weights travel as FP8."""
        self._together: list[tuple[int, ...]] = []
        """Indices of what is sent that must share a chunk: FP8 weights with their scales."""
        self._live: direct.Live = {}
        self._deriving: dict[str, torch.nn.Module] = {}
        self._whole: _WorkerUpdate | None = None
        self._part: _WorkerUpdate | None = None
        self._update: _WorkerUpdate | None = None
        """The planned update that was started last."""
        self._corrected: dict[str, list[placement.Region]] = {}
        self._corrections: dict[placement.Region, int] = {}
        self._is_reloading = False
        self._cache_layers: dict[str, torch.nn.Module] | None = None
        """Layers whose FP8 cache has scales that every update proves; None: not looked up yet. None
        of a cache that was refused at the start, which `allow_unverified` lets run.
        """
        self.applied = _Applied()
        self._shadow: shadow.Shadow | None = None
        self._shadow_stream: torch.cuda.Stream | None = None

    # ------------------------------------------------------------ the group

    @property
    def rank(self) -> int:
        """This worker's rank in the transfer group."""
        parallel = self.vllm_config.parallel_config
        data_parallel_rank = getattr(parallel, "data_parallel_index", None)
        if data_parallel_rank is None:
            data_parallel_rank = parallel.data_parallel_rank
        return int(RANK_OFFSET + data_parallel_rank * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: SpliceInitInfo) -> None:
        """Leave the old group and join the new one.

        Raises:
            TransferTimeout, TransferError: the group did not form; this worker is in no group.
        """
        self.leave()
        if self._watchdog is None:
            self._watchdog = Watchdog.from_environment()
        rendezvous, deadline_s = init_info.request.rendezvous, init_info.request.deadline_s
        if rendezvous.transport == "tcp":
            self._group = join_tcp(rendezvous, rank=self.rank, deadline_s=deadline_s)
        else:
            from inference_node.worker.nccl_group import join_nccl

            self._group = join_nccl(
                rendezvous, rank=self.rank, device=self.device, deadline_s=deadline_s
            )

    def leave(self) -> None:
        """Abort and free the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def shutdown(self) -> None:
        """Leave the group and end the watchdog. vLLM calls this when the worker ends."""
        self.drop_shadow()
        self.leave()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()

    # ------------------------------------------------------------ the plan

    def plan_check(self, manifest: Manifest) -> Findings:
        """Record once where a manifest's tensors land; returns what does not fit."""
        if self._recorded is None or manifest != self._recorded[0]:
            with set_current_vllm_config(self.vllm_config):
                recorded = placement.record(self.model, manifest)
            if not self._weight_refusals():
                recorded = fp8.as_bf16(recorded, self.model)
            self._recorded = (manifest, recorded)
        plan = self._recorded[1]
        self._use_plan(manifest, plan)
        return placement.local_findings(plan, manifest)

    def _use_plan(self, manifest: Manifest, plan: placement.PlacementPlan) -> None:
        if self._checked is not None and self._checked[0] == manifest:
            return
        lossy = verify.loses_zero_sign(self.model, plan)
        self._corrected = {}
        for region in plan.regions:
            if (region.module, region.param) in lossy:
                self._corrected.setdefault(region.name, []).append(region)
        self._live = direct.live_parameters(self.model, plan)
        self._deriving = derived.deriving_layers(self.model)
        self._whole = self._part = self._update = None
        self._together = []
        self._checked = (manifest, plan)

    # ------------------------------------------------------------ FP8

    def refusals(self) -> list[str]:
        """Why this model cannot be updated and verified, each naming its layers."""
        refused = kv_cache.refusals(self.model, self.vllm_config.cache_config)
        self._cache_layers = {} if refused else self._scaled_layers()
        return [*self._weight_refusals(), *refused]

    def _scaled_layers(self) -> dict[str, torch.nn.Module]:
        return kv_cache.scaled_layers(self.model, self.vllm_config.cache_config)

    def holds_static_fp8(self) -> bool:
        """Whether layers load FP8: without a proof they cannot be updated at all."""
        return any(fp8.is_static(layer) for layer in self.model.modules())

    def _weight_refusals(self) -> list[str]:
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            found = fp8.refusals(self.model)
        return [f"{why} ({some(paths)})" for why, paths in found.items()]

    def fp8_groups(self, *, may_be_unverified: bool) -> list[Fp8Group]:
        """The HF matrices of the planned manifest that this worker keeps together in FP8.

        Args:
            may_be_unverified: a model that cannot be verified has none, so that vLLM reloads it.
                An FP8 checkpoint's layers cannot load bf16, so this does not help them.

        Raises:
            ManifestError: the model cannot be updated and verified, or a tensor is no bf16 matrix.
        """
        assert self._recorded is not None
        refused = self._weight_refusals()
        if refused and may_be_unverified and not self.holds_static_fp8():
            return []
        if refused:
            raise ManifestError("; ".join(refused))
        return fp8.groups(self._recorded[1], self._recorded[0], self.model)

    def use_fp8(self, weights: Fp8Weights) -> Findings:
        """Plan what is sent if these weights of the planned manifest travel as FP8.

        Raises:
            ManifestError: blocks of a tensor do not begin where its scales do.
        """
        assert self._recorded is not None
        manifest, recorded = self._recorded
        sent = fp8_manifest(manifest, weights)
        plan = fp8.placed(recorded, sent, self.model)
        self._use_plan(sent, plan)
        places = fp8_places(manifest, weights)
        self._together = [tuple(p for i in g.tensors for p in places[i]) for g in weights.groups]
        return placement.local_findings(plan, sent)

    def obstacles(self) -> dict[int, str]:
        """Index of each tensor of the manifest that this worker cannot place -> the reason."""
        manifest, plan = self._checked_plan()
        return direct.obstacles(plan, manifest, self._live)

    def whole_layers(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The indices, with those of all tensors that share a layer with them on this worker."""
        manifest, plan = self._checked_plan()
        return placement.whole_layers(plan, manifest, indices)

    def lay_out(
        self, reload_indices: Sequence[int], part: tuple[int, ...] | None, *, is_own: bool
    ) -> tuple[WireChunk, ...]:
        """Plan updates of the checked manifest, or of a part of it; returns how its tensors travel.

        Args:
            reload_indices: tensors of the whole manifest that some worker reloads, as whole layers.
            part: ascending indices of the tensors that the updates bring. None: all.
            is_own: receive in place what this replica can, whatever others can.

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
        known = self._part if part is not None else self._whole
        if known is None or (known.part, known.reload, known.is_own) != (
            part,
            reload_within,
            is_own,
        ):
            known = self._lay_out(part, reload_within, is_own=is_own)
            if part is None:
                self._whole = known
            else:
                self._part = known
        return known.chunks

    def _lay_out(
        self, part: tuple[int, ...] | None, reload_within: frozenset[int], *, is_own: bool
    ) -> _WorkerUpdate:
        manifest, plan = self._checked_plan()
        if part is not None:
            manifest = manifest.part(part)
            plan = placement.only(plan, manifest)
        is_alone = self.vllm_config.parallel_config.world_size_across_dp == 1
        numbers = {
            i: n for n, i in enumerate(range(len(manifest.tensors)) if part is None else part)
        }
        together = [tuple(numbers[i] for i in g) for g in self._together if g[0] in numbers]
        elsewhere = reload_within.union(*together)
        runs = direct.whole_runs(plan, manifest, elsewhere) if is_alone and is_own else ()
        chunks = direct.plan_chunks(manifest, reload=reload_within, runs=runs, together=together)
        receiver = direct.DirectReceiver(
            chunks=chunks, manifest=manifest, plan=plan, live=self._live, device=self.device
        )
        return _WorkerUpdate(
            manifest=manifest,
            plan=plan,
            part=part,
            reload=reload_within,
            is_own=is_own,
            chunks=chunks,
            receiver=receiver,
        )

    def _check_whole_layers(self, rule: str, indices: Sequence[int]) -> None:
        missing = sorted(set(self.whole_layers(indices)) - set(indices))
        if missing:
            raise ManifestError(f"{rule}; missing {_names(self._checked_plan()[0], missing)}")

    def _checked_plan(self) -> tuple[Manifest, placement.PlacementPlan]:
        if self._checked is None:
            raise ManifestError("no manifest is planned; send PrepareUpdate first")
        return self._checked

    # ------------------------------------------------------------ the update

    def choose(self, *, changed_only: bool) -> None:
        """Choose the update that starts next: of the whole manifest or of the part.

        Raises:
            TransferError: the update was not planned.
        """
        self._update = self._part if changed_only else self._whole
        if self._update is None:
            raise TransferError("this update was not planned here; send PrepareUpdate first")

    def start_weight_update(self) -> None:
        """Undo what a failed update left behind; begin a reload if some tensors need one.

        Tensors that arrive in place stay where they are.
        """
        self._is_reloading = self._update is not None and self._update.receiver.needs_reload
        if self._is_reloading:
            reload.start(self.model)
        self.applied = _Applied()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its accelerator call if there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SpliceUpdateInfo) -> None:
        """Receive the chosen update and load it.

        Raises:
            TransferError and its kin: the wire, an abort, the deadline.
            RuntimeError: no group, or no plan.
        """
        began, request = time.monotonic(), update_info.request
        if isinstance(request, SwapWeights):
            self._apply_shadow(request.request_id)
            self.applied.seconds["apply"] = time.monotonic() - began
            return
        if self._group is None or self._update is None or self._watchdog is None:
            raise TransferError(
                "no transfer group or no plan; send JoinTransferGroup and PrepareUpdate first"
            )
        try:
            with (
                self._watchdog.guard(
                    update_id=request.request_id, group=self._group, deadline_s=request.deadline_s
                ),
                dialect.partial_load(),
            ):
                self.applied.seconds = self._update.receiver.receive(
                    group=self._group,
                    deadline_s=request.deadline_s,
                    load=self._load,
                    on_written=self._note_written,
                )
        except BaseException:
            self.reset()
            self.leave()
            raise
        self.applied.nbytes = self._update.manifest.nbytes
        self.applied.seconds["receive"] = time.monotonic() - began

    # ------------------------------------------------------------ shadow mode

    def open_shadow(self, *, budget_bytes: int) -> str | None:
        """Allocate room for the chosen update beside the live tensors; returns why it does not fit.

        Raises:
            TransferError: no update was chosen, no group was joined, or an earlier receive runs.
        """
        self.drop_shadow()
        if self._update is None or self._group is None:
            raise TransferError(
                "no transfer group or no plan; send JoinTransferGroup and PrepareUpdate first"
            )
        manifest = self._update.manifest
        refusal = shadow.why_not(
            manifest.nbytes, free_bytes=shadow.free_bytes(self.device), budget_bytes=budget_bytes
        )
        if refusal is not None:
            return refusal
        if self.device.type == "cuda" and self._shadow_stream is None:
            self._shadow_stream = torch.cuda.Stream(self.device)
        try:
            self._shadow = shadow.Shadow(
                manifest=manifest,
                chunks=self._update.chunks,
                device=self.device,
                stream=self._shadow_stream,
            )
        except torch.OutOfMemoryError as error:
            why = f"its {manifest.nbytes:,} bytes could not be allocated beside the live tensors"
            return f"{why}: {error}"[:500]
        return None

    def start_shadow(self, request: ReceiveWeights) -> None:
        """Receive into the open shadow on a thread; returns at once.

        Raises:
            TransferError: no shadow is open.
        """
        if self._shadow is None or self._group is None or self._watchdog is None:
            raise TransferError("no shadow is open; send PrepareShadow first")
        self._shadow.start(
            group=self._group,
            watchdog=self._watchdog,
            update_id=request.request_id,
            deadline_s=request.deadline_s,
        )

    def poll_shadow(self) -> shadow.Arrived | None:
        """What has arrived beside the live tensors; None while bytes arrive.

        Raises:
            TransferError and its kin: the receive failed. The shadow is dropped and the group left;
                the live tensors are unchanged.
        """
        if self._shadow is None:
            raise TransferError("no shadow is open; send PrepareShadow first")
        try:
            return self._shadow.poll()
        except BaseException:
            self.drop_shadow()
            self.leave()
            raise

    def drop_shadow(self) -> None:
        """End a receive beside the live tensors and free its memory; safe at any time.

        Raises:
            TransferError: its thread did not end; it still holds memory, but no live tensor.
        """
        dropped, self._shadow = self._shadow, None
        if dropped is not None and not dropped.close():
            self.leave()
            raise TransferError(
                "the thread that receives beside the live tensors did not end; "
                "restart vLLM if this happens again"
            )

    def _apply_shadow(self, update_id: str) -> None:
        """Copy what arrived into the live tensors; a failure may leave a mixture."""
        update, arrived = self._update, self._shadow
        if self._watchdog is not None:
            self._watchdog.raise_if_aborted(update_id)
        if update is None or arrived is None or not arrived.is_whole:
            raise TransferError("no complete update has been received; send ReceiveWeights first")
        try:
            with dialect.partial_load(), torch.no_grad():
                update.receiver.apply(
                    arrived.buffers, load=self._load, on_written=self._note_written
                )
        except BaseException:
            self.reset()
            raise
        self.applied.nbytes = update.manifest.nbytes

    def _note_written(self, count: int) -> None:
        self.applied.tensors += count

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            for region in self._corrected.get(name, ()):
                self._corrections[region] = verify.zero_sign_correction(tensor, region)
        reload.load(self.model, tensors)

    def finish_weight_update(self) -> None:
        """Finish a reload, or make anew what depends on parameters that were written in place.

        Kernel tensors are in place afterwards.
        """
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                if self._is_reloading:
                    reload.finish(self.model, self.model_config)
                else:
                    derived.refresh(self._deriving, self.model_config.dtype)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> int:
        """Put the kernel tensors back; returns the number of layers that were half loaded."""
        return reload.reset(self.model)

    def digests(self) -> WorkerDigests:
        """Digests of the live tensors that the last update brought.

        Raises:
            VerificationError: tensors that vLLM derives from them are not theirs.
        """
        if self._update is None:
            raise RuntimeError("no update was started; send PrepareUpdate and ReceiveWeights first")
        with torch.no_grad():
            derived.check(self._deriving)
            if self._cache_layers is None:
                self._cache_layers = self._scaled_layers()
            kv_cache.check(self._cache_layers)
        plan, receiver = self._update.plan, self._update.receiver
        arrived = receiver.digests()
        if arrived is not None and not receiver.needs_reload:
            return WorkerDigests(parts={}, arrived=arrived)
        skip = frozenset[str]() if arrived is None else receiver.direct_names
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            found = verify.read_back(self.model, plan, self._corrections, skip=skip)
        return dataclasses.replace(found, arrived=arrived)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 expects a trainer half here; ours is `weight_transfer.chunks`."""
        raise NotImplementedError("the trainer sends with weight_transfer.chunks.ChunkSender")


def _names(manifest: Manifest, indices: Sequence[int]) -> str:
    return some([manifest.tensors[i].name for i in indices])
