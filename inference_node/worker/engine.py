"""The weight-transfer engine "splice": receives updates, and can repeat them after a failure.

vLLM makes one instance per worker from `--weight-transfer-config '{"backend": "splice"}'`. A
planned update (`plan`) runs

    start -> receive_weights -> finish      vLLM's own three calls; the first undoes a failed update
    digests()                               of the live tensors, through the placement plan

or, in shadow mode (`shadow`),

    prepare_shadow -> receive_into_shadow ... poll_shadow     while the engine steps; nothing live
                                                              changes
    start -> receive_weights(SwapWeights) -> finish, digests  the same calls; the bytes are there

A failure in `receive_weights` or `finish_weight_update` resets the reload at once. Kernel tensors
are then back in place, but hold a mixture of versions until a full update succeeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from inference_node.shared.reports import WorkerDigests
from inference_node.shared.watchdog import Watchdog
from inference_node.worker import (
    chain,
    derived,
    dialect,
    kv_cache,
    placement,
    reload,
    shadow,
    verify,
)
from inference_node.worker.lora import Slots
from inference_node.worker.plan import WorkerPlan, WorkerUpdate
from orchestrator.errors import TransferError
from orchestrator.protocol.messages import (
    JoinTransferGroup,
    OpenRelay,
    PrepareShadow,
    ReceiveWeights,
    Rendezvous,
    SwapWeights,
)
from weight_transfer.changes import Buffers, receive_changes
from weight_transfer.groups import GroupListener, TransferGroup

NOT_PLANNED = "no transfer group or no plan; send JoinTransferGroup and PrepareUpdate first"


@dataclass
class SpliceInitInfo(WeightTransferInitInfo):
    """The request to join the trainer's group."""

    request: JoinTransferGroup


@dataclass
class SpliceUpdateInfo(WeightTransferUpdateInfo):
    """One update of the manifest that was planned last."""

    request: ReceiveWeights | SwapWeights
    """`SwapWeights`: the shadow holds the bytes already."""


@dataclass
class _Applied:
    """Result of the last receive."""

    nbytes: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class SpliceEngine(WeightTransferEngine[SpliceInitInfo, SpliceUpdateInfo]):
    """vLLM's engine of this worker; see the module."""

    init_info_cls = SpliceInitInfo
    update_info_cls = SpliceUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.plan = WorkerPlan(model=model, vllm_config=vllm_config, device=device)
        self._slots: Slots | None = None
        self._cleared_for: placement.PlacementPlan | None = None
        """The plan that the adapter's room was cleared for."""
        self.applied = _Applied()
        self._watchdog: Watchdog | None = Watchdog.from_environment()
        self._group: TransferGroup | None = None
        self._relay: GroupListener | None = None
        """Where the worker after this one joins, in a chain of replicas."""
        self._corrections: dict[placement.Region, int] = {}
        self._is_reloading = False
        self.is_elements = False
        """Whether the next update brings only changed elements."""
        self._olds: dict[str, torch.Tensor] = {}
        """The tensors of the reload path before an update of changed elements."""
        self._cache_layers: dict[str, torch.nn.Module] | None = None
        """Layers whose FP8 cache has scales that every update proves; None: not looked up yet. None
        of a cache that was refused at the start, which `allow_unverified` lets run.
        """
        self._shadow: shadow.Shadow | None = None
        self._shadow_stream: torch.cuda.Stream | None = None

    def checkpoint_tree(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the model's layers have a checkpoint's names, also if vLLM has wrapped
        them for an adapter."""
        if self._slots is None:  # not before vLLM's warm-up has ended
            self._slots = Slots.of(self.model)
        return contextlib.nullcontext() if self._slots is None else self._slots.shown()

    # ------------------------------------------------------------ the group

    @property
    def position(self) -> int:
        """This worker's place among the workers of its replica, from 0."""
        parallel = self.vllm_config.parallel_config
        data_parallel_rank = getattr(parallel, "data_parallel_index", None)
        if data_parallel_rank is None:
            data_parallel_rank = parallel.data_parallel_rank
        return int(data_parallel_rank * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: SpliceInitInfo) -> None:
        """Leave the old group and join the new one.

        Raises:
            TransferTimeout, TransferError: the group did not form; this worker is in no group.
        """
        relay, self._relay = self._relay, None
        self.leave_transfer_group()
        if self._watchdog is None:
            self._watchdog = Watchdog.from_environment()
        try:
            self._group = chain.join(
                init_info.request, position=self.position, relay=relay, device=self.device
            )
        finally:
            if relay is not None:
                relay.close()

    def open_relay(self, request: OpenRelay) -> Rendezvous:
        """Listen for the worker after this one; the next join waits for it."""
        if self._relay is not None:
            self._relay.close()
        self._relay = chain.listen(request, device=self.device)
        return self._relay.rendezvous

    def leave_transfer_group(self) -> None:
        """Abort and free the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def shutdown(self) -> None:
        """Leave the group and end the watchdog. vLLM calls this when the worker ends."""
        self.drop_shadow()
        self.leave_transfer_group()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()

    # ------------------------------------------------------------ the update

    def refusals(self) -> list[str]:
        """Why this model cannot be updated and verified, each naming its layers."""
        refused = kv_cache.refusals(self.model, self.vllm_config.cache_config)
        self._cache_layers = {} if refused else self._scaled_layers()
        return [*self.plan.weight_refusals(), *refused]

    def _scaled_layers(self) -> dict[str, torch.nn.Module]:
        return kv_cache.scaled_layers(self.model, self.vllm_config.cache_config)

    def start_weight_update(self) -> None:
        """Undo what a failed update left behind; begin a reload if some tensors need one.

        Tensors that arrive in place stay where they are.
        """
        update = self.plan.update
        self._olds = {}
        if update is not None and self.is_elements:
            # Now, because a reload moves the parameters away.
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                reloaded = {i for c in update.chunks if c.kind == "reload" for i in c.tensors}
                specs = [update.manifest.tensors[i] for i in sorted(reloaded)]
                self._olds = verify.read_tensors(self.model, update.plan, specs)
        self._is_reloading = update is not None and update.receiver.needs_reload
        if self._is_reloading:
            reload.start(self.model)
        self.applied = _Applied()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive as the base class does, but synchronise only on CUDA."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SpliceUpdateInfo) -> None:
        """Receive the chosen update, or take it from the shadow, into the live tensors.

        A failure may leave a mixture of versions.

        Raises:
            TransferError or a subclass: no group, no plan, the wire, an abort, the deadline.
        """
        began, request, update = time.monotonic(), update_info.request, self.plan.update
        if isinstance(request, SwapWeights):
            nbytes = self._swap_weights(request, update)
            self.applied.seconds["apply"] = time.monotonic() - began
        else:
            nbytes = self._receive_weights(request, update)
            self.applied.seconds["receive"] = time.monotonic() - began
        self.applied.nbytes = nbytes

    def _receive_weights(self, request: ReceiveWeights, update: WorkerUpdate | None) -> int:
        if self._group is None or update is None or self._watchdog is None:
            raise TransferError(NOT_PLANNED)
        try:
            with (
                self._watchdog.guard(
                    update_id=request.request_id, group=self._group, deadline_s=request.deadline_s
                ),
                dialect.partial_load(),
            ):
                if request.elements:
                    self._receive_elements(self._group, request, update)
                else:
                    self.applied.seconds = update.receiver.receive(
                        group=self._group,
                        deadline_s=request.deadline_s,
                        load=self._load,
                        on_written=self._note_written,
                    )
        except BaseException:
            self.reset()
            self.leave_transfer_group()
            raise
        return update.nbytes

    def _receive_elements(
        self, group: TransferGroup, request: ReceiveWeights, update: WorkerUpdate
    ) -> None:
        """Receive all messages before anything changes, then apply them."""
        began = time.monotonic()
        arrived = receive_changes(
            group,
            update.receiver.deliveries(),
            device=self.device,
            deadline=began + request.deadline_s,
        )
        came = time.monotonic()
        self._apply_elements(arrived, update)
        self.applied.seconds = {"wire": came - began, "load": time.monotonic() - came}

    def _apply_elements(self, arrived: Buffers, update: WorkerUpdate) -> None:
        with torch.no_grad():
            update.receiver.apply_changes(
                arrived, self._olds, load=self._load, on_written=self._note_written
            )
        self._olds = {}

    def _swap_weights(self, request: SwapWeights, update: WorkerUpdate | None) -> int:
        if self._watchdog is not None:
            self._watchdog.raise_if_aborted(request.request_id)
        arrived = self._shadow
        if update is None or arrived is None or not arrived.is_whole:
            raise TransferError("no complete update has been received; send ReceiveWeights first")
        try:
            with dialect.partial_load(), torch.no_grad():
                if arrived.changes is not None:
                    self._apply_elements(arrived.changes, update)
                else:
                    update.receiver.apply(
                        arrived.buffers, load=self._load, on_written=self._note_written
                    )
        except BaseException:
            self.reset()
            raise
        return update.nbytes

    def _note_written(self, count: int) -> None:
        self.applied.tensors += count

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            for region in self.plan.corrected.get(name, ()):
                self._corrections[region] = verify.zero_sign_correction(tensor, region)
        reload.load(self.model, tensors)

    def finish_weight_update(self) -> None:
        """Finish a reload, or make what depends on parameters that were written in place again.

        Kernel tensors are in place afterwards.
        """
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                if self._is_reloading:
                    reload.finish(self.model, self.model_config)
                else:
                    derived.refresh(self.plan.deriving, self.model_config.dtype)
                if self._slots is not None and self._cleared_for is not self.plan.placed:
                    self._slots.clear(self.plan.placed)
                    self._cleared_for = self.plan.placed
        except BaseException:
            self.reset()
            raise

    def reset(self) -> int:
        """Put the kernel tensors back; returns the number of layers that were half loaded."""
        return reload.reset(self.model)

    def digests(self) -> WorkerDigests:
        """Digests of the live tensors that the last update brought.

        Raises:
            VerificationError: a tensor that vLLM derives from these weights does not match them.
        """
        update = self.plan.update
        if update is None:
            raise RuntimeError("no update was started; send PrepareUpdate and ReceiveWeights first")
        with torch.no_grad():
            derived.check(self.plan.deriving)
            if self._cache_layers is None:
                self._cache_layers = self._scaled_layers()
            kv_cache.check(self._cache_layers)
        receiver = update.receiver
        arrived = receiver.digests()
        if arrived is not None and not receiver.needs_reload:
            return WorkerDigests(parts={}, arrived=arrived)
        skip = frozenset[str]() if arrived is None else receiver.direct_names
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            found = verify.read_back(self.model, update.plan, self._corrections, skip=skip)
        return dataclasses.replace(found, arrived=arrived)

    # ------------------------------------------------------------ shadow mode

    def prepare_shadow(self, request: PrepareShadow) -> str | None:
        """Allocate room for the chosen update, apart from the live tensors.

        Returns: why it does not fit; None if it does.

        Raises:
            TransferError: no update was chosen, no group was joined, or an earlier receive runs.
        """
        self.drop_shadow()
        update = self.plan.update
        if update is None or self._group is None:
            raise TransferError(NOT_PLANNED)
        nbytes = update.nbytes if request.nbytes is None else request.nbytes
        refusal = shadow.why_not(
            nbytes, free_bytes=shadow.free_bytes(self.device), budget_bytes=request.budget_bytes
        )
        if refusal is not None:
            return refusal
        if self.device.type == "cuda" and self._shadow_stream is None:
            self._shadow_stream = torch.cuda.Stream(self.device)
        try:
            self._shadow = shadow.Shadow(
                manifest=update.manifest,
                chunks=update.chunks,
                steps=update.steps,
                device=self.device,
                stream=self._shadow_stream,
                elements=update.receiver.deliveries() if request.elements else None,
            )
        except torch.OutOfMemoryError as error:
            why = f"its {nbytes:,} bytes could not be allocated in addition to the model"
            return f"{why}: {error}"[:500]
        return None

    def receive_into_shadow(self, request: ReceiveWeights) -> None:
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
        """Digests of the bytes that the shadow has received; None while bytes arrive.

        Raises:
            TransferError or a subclass: the receive failed. The shadow is dropped, the group left;
                the live tensors are unchanged.
        """
        if self._shadow is None:
            raise TransferError("no shadow is open; send PrepareShadow first")
        try:
            return self._shadow.poll()
        except BaseException:
            self.drop_shadow()
            self.leave_transfer_group()
            raise

    def drop_shadow(self) -> None:
        """End a receive into the shadow and free its memory; safe at any time.

        Raises:
            TransferError: its thread did not end; it still holds memory, but no live tensor.
        """
        dropped, self._shadow = self._shadow, None
        if dropped is not None and not dropped.close():
            self.leave_transfer_group()
            raise TransferError(
                "the thread that receives into shadow memory did not end; "
                "restart vLLM if this happens again"
            )

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 expects a trainer half here; ours is `weight_transfer.chunks`."""
        raise NotImplementedError("the trainer sends with weight_transfer.chunks.ChunkSender")
