"""The weight-transfer engine "splice": vLLM's layerwise reload, fed by our receiver, guarded by a watchdog, and repeatable after a failure.

One instance per worker, made by vLLM from `--weight-transfer-config '{"backend": "splice"}'`. An update runs

    plan_check(manifest)            no pause: what of it does this worker take, and what can it not put in place? Kept for the update.
    lay_out(reload, part)           the order in which it, or a part of it, travels: on all workers of the replica the same
    start -> receive -> finish      vLLM's own three calls, with `start_weight_update` resetting what a failed update left behind
    digests()                       of the live tensors, through the placement plan

or, in shadow mode (`inference_node.shadow`),

    open_shadow -> start_shadow ... poll_shadow     while the engine steps; nothing live changes
    start -> receive(shadow) -> finish, digests     the swap: the same calls, but the bytes are here already

A failure in `receive_weights` or `finish_weight_update` resets the reload at once: kernel tensors are back in place, a mixture of
versions until a full update succeeds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from inference_node import dialect, direct, placement, reload, shadow, verify
from inference_node.watchdog import Watchdog
from orchestrator.errors import ManifestError, TransferError
from orchestrator.protocol.messages import Manifest, Rendezvous, WireChunk
from weight_transfer.groups import TransferGroup, join_tcp
from weight_transfer.receiver import receive_weights

RANK_OFFSET = 1
"""The trainer is rank 0."""


@dataclass
class SpliceInitInfo(WeightTransferInitInfo):
    """How to join the trainer's group; `rendezvous` is a `Rendezvous` as JSON."""

    rendezvous: str
    deadline_s: float


@dataclass
class SpliceUpdateInfo(WeightTransferUpdateInfo):
    """One update of the manifest that was planned last."""

    update_id: str
    deadline_s: float
    direct: bool = False
    """The bytes come in the layout that `lay_out` gave."""
    shadow: bool = False
    """They came beside the live tensors and are taken from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """An update as this worker takes it: of the whole manifest, or of the part that training changes."""

    manifest: Manifest
    plan: placement.PlacementPlan
    part: tuple[int, ...] | None = None
    """Its indices in the whole manifest; None: all."""
    reload: frozenset[int] = frozenset()
    """Its indices (within itself) that take the reload path, where a layout is planned."""
    chunks: tuple[WireChunk, ...] | None = None
    """The layout; None: manifest order."""
    receiver: direct.DirectReceiver | None = None


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

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._watchdog: Watchdog | None = Watchdog.from_environment()
        self._group: TransferGroup | None = None
        self._bucket_bytes = 0
        self._whole: _Planned | None = None
        self._part: _Planned | None = None
        self._live: direct.Live = {}
        self._update: _Planned | None = None
        """The one of them that was started last."""
        self._corrected: dict[str, list[placement.Region]] = {}
        self._corrections: dict[placement.Region, int] = {}
        self._is_direct = False
        self._is_reloading = False
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
        """Leave the old group, join the new one.

        Raises:
            TransferTimeout, TransferError: the group did not come together; this worker is in none then.
        """
        self.leave()
        if self._watchdog is None:
            self._watchdog = Watchdog.from_environment()
        rendezvous = Rendezvous.model_validate_json(init_info.rendezvous)
        if rendezvous.transport == "tcp":
            self._group = join_tcp(rendezvous, rank=self.rank, deadline_s=init_info.deadline_s)
        else:
            from inference_node.nccl_group import join_nccl

            self._group = join_nccl(rendezvous, rank=self.rank, device=self.device, deadline_s=init_info.deadline_s)
        self._bucket_bytes = rendezvous.bucket_bytes

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

    def plan_check(self, manifest: Manifest) -> placement.Findings:
        """Record where the manifest's tensors land, once per manifest, and say what does not fit. Nothing changes."""
        if self._whole is None or manifest != self._whole.manifest:
            with set_current_vllm_config(self.vllm_config):
                plan = placement.record(self.model, manifest)
            lossy = verify.loses_zero_sign(self.model, plan)
            self._corrected = {}
            for region in plan.regions:
                if (region.module, region.param) in lossy:
                    self._corrected.setdefault(region.name, []).append(region)
            self._live = direct.live_parameters(self.model, plan)
            self._part = self._update = None
            self._whole = _Planned(manifest=manifest, plan=plan)
        return placement.local_findings(self._whole.plan, manifest)

    def obstacles(self) -> dict[int, str]:
        """Indices of the planned manifest that cannot be put in their places here, and why."""
        whole = self._planned_whole()
        return direct.obstacles(whole.plan, whole.manifest, self._live)

    def whole_layers(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The indices, and those of all tensors that share a layer with them on this worker."""
        whole = self._planned_whole()
        return placement.whole_layers(whole.plan, whole.manifest, indices)

    def lay_out(self, reload_indices: Sequence[int], part: tuple[int, ...] | None) -> tuple[WireChunk, ...] | None:
        """Plan updates of the planned manifest, or of a part of it alone; how its tensors travel, None: in manifest order.

        Args:
            reload_indices: what takes the reload path on any worker of the replica, whole layers, as indices into the whole manifest.
            part: ascending indices of the tensors that the updates bring; None: all.

        Raises:
            ManifestError: a layer would get a part of its tensors, or what cannot be put in its place would be; names them.
        """
        whole = self._planned_whole()
        self._check_whole_layers(whole, "a fused layer must come whole", part or ())
        self._check_whole_layers(whole, "a layer is reloaded whole", reload_indices)
        stuck = sorted(self.obstacles().keys() - set(reload_indices))
        if stuck:
            raise ManifestError(f"what cannot be put in place must be reloaded; left out {_names(whole.manifest, stuck)}")
        everything = range(len(whole.manifest.tensors)) if part is None else part
        reload_within = frozenset(n for n, i in enumerate(everything) if i in set(reload_indices))
        known = self._part if part is not None else self._whole
        if known is None or known.chunks is None or (known.part, known.reload) != (part, reload_within):
            known = self._lay_out(whole, part, reload_within)
            if part is None:
                self._whole = known
            else:
                self._part = known
        return known.chunks

    def _lay_out(self, whole: _Planned, part: tuple[int, ...] | None, reload_within: frozenset[int]) -> _Planned:
        manifest, plan = whole.manifest, whole.plan
        if part is not None:
            manifest = manifest.part(part)
            plan = placement.only(plan, manifest)
        if plan.refused or len(reload_within) == len(manifest.tensors):
            return _Planned(manifest=manifest, plan=plan, part=part)
        is_alone = self.vllm_config.parallel_config.world_size_across_dp == 1
        runs = direct.whole_runs(plan, manifest, reload_within) if is_alone else ()
        chunks = direct.plan_chunks(manifest, reload=reload_within, runs=runs)
        receiver = direct.DirectReceiver(chunks=chunks, manifest=manifest, plan=plan, live=self._live, device=self.device)
        return _Planned(manifest=manifest, plan=plan, part=part, reload=reload_within, chunks=chunks, receiver=receiver)

    def _check_whole_layers(self, whole: _Planned, rule: str, indices: Sequence[int]) -> None:
        missing = sorted(set(self.whole_layers(indices)) - set(indices))
        if missing:
            raise ManifestError(f"{rule}; missing {_names(whole.manifest, missing)}")

    def _planned_whole(self) -> _Planned:
        if self._whole is None:
            raise ManifestError("no manifest is planned; send PrepareUpdate first")
        return self._whole

    # ------------------------------------------------------------ the update

    def choose(self, *, is_direct: bool, changed_only: bool) -> None:
        """Which update starts next: of the whole manifest or of the part; in the layout or in manifest order.

        Raises:
            TransferError: that one was not planned.
        """
        self._update = self._part if changed_only else self._whole
        if self._update is None:
            raise TransferError("this update was not planned here; send PrepareUpdate first")
        self._is_direct = is_direct and self._update.receiver is not None

    def start_weight_update(self) -> None:
        """Checkpoint format on meta, from whatever state a former update left; live tensors stay where all bytes come in place."""
        receiver = None if self._update is None else self._update.receiver
        self._is_reloading = not self._is_direct or (receiver is not None and receiver.needs_reload)
        if self._is_reloading:
            reload.start(self.model)
        self.applied = _Applied()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its accelerator call where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SpliceUpdateInfo) -> None:
        """Receive the planned manifest and load it.

        Raises:
            TransferError and its kin: the wire, an abort, the deadline.
            RuntimeError: no group, or no plan.
        """
        began = time.monotonic()
        if update_info.shadow:
            self._apply_shadow(update_info.update_id)
            self.applied.seconds["apply"] = time.monotonic() - began
            return
        if self._group is None or self._update is None or self._watchdog is None:
            raise TransferError("no transfer group or no plan; send JoinTransferGroup and PrepareUpdate first")
        try:
            with (
                self._watchdog.guard(update_id=update_info.update_id, group=self._group, deadline_s=update_info.deadline_s),
                dialect.partial_load(),
            ):
                self._receive(self._group, self._update, update_info)
        except BaseException:
            self.reset()
            self.leave()
            raise
        self.applied.nbytes = self._update.manifest.nbytes
        self.applied.seconds["receive"] = time.monotonic() - began

    def _receive(self, group: TransferGroup, update: _Planned, update_info: SpliceUpdateInfo) -> None:
        if update_info.direct != self._is_direct:
            raise TransferError("the sender's layout is not the one this update was started with; start it again")
        if self._is_direct and update.receiver is not None:
            self.applied.seconds = update.receiver.receive(
                group=group, deadline_s=update_info.deadline_s, load=self._load_reloaded, on_written=self._note_written
            )
            return
        report = receive_weights(
            group=group, manifest=update.manifest, bucket_bytes=self._bucket_bytes, device=self.device,
            deadline_s=update_info.deadline_s, load=self._load,
        )  # fmt: skip
        self.applied.seconds = dict(report.seconds)

    # ------------------------------------------------------------ shadow mode

    def open_shadow(self, *, budget_bytes: int) -> str | None:
        """Allocate what the chosen update brings, beside the live tensors; or say why it does not fit.

        Raises:
            TransferError: no update was chosen, no group was joined, or an earlier receive has not ended.
        """
        self.drop_shadow()
        if self._update is None or self._group is None:
            raise TransferError("no transfer group or no plan; send JoinTransferGroup and PrepareUpdate first")
        manifest, layout = self._update.manifest, self._update.chunks if self._is_direct else None
        refusal = shadow.why_not(manifest.nbytes, free_bytes=shadow.free_bytes(self.device), budget_bytes=budget_bytes)
        if refusal is not None:
            return refusal
        if self.device.type == "cuda" and self._shadow_stream is None:
            self._shadow_stream = torch.cuda.Stream(self.device)
        try:
            self._shadow = shadow.Shadow(
                manifest=manifest, chunks=shadow.chunks_of(manifest, layout, self._bucket_bytes), device=self.device,
                stream=self._shadow_stream,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            return f"its {manifest.nbytes:,} bytes could not be allocated beside the live tensors: {error}"[:500]
        return None

    def start_shadow(self, *, update_id: str, deadline_s: float) -> None:
        """Receive into the open shadow on a thread; returns at once.

        Raises:
            TransferError: none is open.
        """
        if self._shadow is None or self._group is None or self._watchdog is None:
            raise TransferError("no shadow is open; send PrepareShadow first")
        self._shadow.start(group=self._group, watchdog=self._watchdog, update_id=update_id, deadline_s=deadline_s)

    def poll_shadow(self) -> shadow.Arrived | None:
        """What has come beside the live tensors; None while it comes.

        Raises:
            TransferError and its kin: it failed. The shadow is dropped and the group left; the live tensors are as they were.
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
            TransferError: its thread did not end; it holds memory still, but no live tensor.
        """
        dropped, self._shadow = self._shadow, None
        if dropped is not None and not dropped.close():
            self.leave()
            raise TransferError("the thread that receives beside the live tensors did not end; restart vLLM if this goes on")

    def _apply_shadow(self, update_id: str) -> None:
        """Put what came beside the live tensors into them. A failure leaves a mixture, unless nothing was written."""
        update, came = self._update, self._shadow
        if self._watchdog is not None:
            self._watchdog.raise_if_aborted(update_id)
        if update is None or came is None or not came.is_whole:
            raise TransferError("nothing whole lies beside the live tensors; send ReceiveWeights first")
        try:
            with dialect.partial_load(), torch.no_grad():
                if self._is_direct and update.receiver is not None:
                    update.receiver.apply(came.buffers, load=self._load_reloaded, on_written=self._note_written)
                else:
                    for k in range(len(came.buffers)):
                        self._load(came.tensors(k))
        except BaseException:
            self.reset()
            raise
        self.applied.nbytes = update.manifest.nbytes

    def _note_written(self, count: int) -> None:
        self.applied.tensors += count

    def _load_reloaded(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.applied.tensors -= len(tensors)  # counted when its chunk was announced
        self._load(tensors)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.applied.tensors += len(tensors)
        for name, tensor in tensors:
            for region in self._corrected.get(name, ()):
                self._corrections[region] = verify.zero_sign_correction(tensor, region)
        self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        """Process what is left; kernel tensors are in place afterwards."""
        if not self._is_reloading:
            return
        try:
            reload.finish(self.model, self.model_config)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> int:
        """Put the kernel tensors back and forget a half-done update; returns how many layers were in its middle."""
        return reload.reset(self.model)

    def digests(self) -> verify.WorkerDigests:
        """Digests of this worker's live tensors, of those that the last update brought."""
        if self._update is None:
            raise RuntimeError("no update was started; send PrepareUpdate and ReceiveWeights first")
        plan, receiver = self._update.plan, self._update.receiver if self._is_direct else None
        arrived = None if receiver is None else receiver.digests()
        if receiver is not None and arrived is not None and not receiver.needs_reload:
            return verify.WorkerDigests(parts={}, arrived=arrived)
        skip = frozenset[str]() if receiver is None or arrived is None else receiver.direct_names
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            found = verify.read_back(self.model, plan, self._corrections, skip=skip)
        return dataclasses.replace(found, arrived=arrived)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 asks for a trainer half here; ours is `weight_transfer.sender`."""
        raise NotImplementedError("the trainer sends with weight_transfer.sender.WeightSender")


def _names(manifest: Manifest, indices: Sequence[int]) -> str:
    return placement.some([manifest.tensors[i].name for i in indices])
