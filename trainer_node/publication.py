"""Handles the requests that move the weights to the replicas. Every rank runs every handler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import (
    EncodeChanges,
    Fp8Weights,
    LeaveTransferGroup,
    Manifest,
    OpenTransferGroup,
    PlanPublication,
    ReleaseMemory,
    SendWeights,
    TensorSpec,
    UseLayout,
    fp8_manifest,
)
from trainer_node.export import adapter_tensors, fp8_export, fp8_fused, fp8_steps, wire_export
from trainer_node.export.bridge_export import BridgeExport, is_manifest_order
from trainer_node.export.changes import Encoded, Export, Layout, Published, encode
from trainer_node.export.fp8_export import Fp8Export
from trainer_node.export.fp8_fused import FusedFp8
from trainer_node.export.fp8_steps import Fp8Steps
from trainer_node.export.gather_plan import PartitionError
from trainer_node.export.merged import Exporter
from trainer_node.files.generations import CheckpointError
from trainer_node.hf import fp8_blocks
from trainer_node.ranks import heap, objects
from trainer_node.ranks.lockstep import Lockstep
from trainer_node.request import NotReady, Outcome, Request
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer
from trainer_node.transfer import Chunks, Transfer
from weight_transfer import edges
from weight_transfer.chunks import Fill, SendReport

log = logging.getLogger("splice.trainer")
OUT_OF_STEP_S = 20.0
"""How long the ranks wait for each other past an update's deadline, in seconds.

In this time they reach the end of a failed send. It is less than `node.DEADLINE_GRACE_S`.
"""


class Publication:
    """The handlers, and what they plan and send with."""

    def __init__(
        self, trainer: Trainer, exporter: Exporter, transfer: Transfer, lockstep: Lockstep
    ) -> None:
        self._trainer, self._model, self._exporter = trainer, trainer.model, exporter
        self._transfer, self._lockstep = transfer, lockstep
        self._has_said_lost = False
        self._planned: Manifest | None = None
        self._published = Published(self._model, most_bytes=self._model.config.remember_bytes)

    @property
    def handlers(self) -> dict[type, Callable[[Request[Any]], Outcome]]:
        """Message type -> handler."""
        return {
            PlanPublication: self.plan,
            UseLayout: self.use_layout,
            OpenTransferGroup: self.open_group,
            EncodeChanges: self.encode,
            SendWeights: self.send,
            LeaveTransferGroup: self.leave_group,
            ReleaseMemory: self.release_memory,
        }

    def plan(self, request: Request[PlanPublication]) -> Outcome:
        """Return the manifest: every merged tensor's name, dtype and shape."""
        request.progress("planning")
        return Outcome(result=self._manifest().model_dump(mode="python"))

    def _manifest(self) -> Manifest:
        """What is sent if the replicas hold no FP8. The first call is a collective."""
        if self._planned is None:
            merged, model = self._exporter.manifest(), self._model
            is_merged = model.config.serves_merged
            self._planned = merged if is_merged else adapter_tensors.manifest(model, merged)
        return self._planned

    def forget_plans(self) -> None:
        """Send nothing before the next plan, because the model has other adapters."""
        self._exporter.forget()
        self._planned = None
        self._published.free()
        for changed_only in (False, True):
            self._transfer.use_chunks(None, changed_only=changed_only)

    # ------------------------------------------------------------ groups

    def open_group(self, request: Request[OpenTransferGroup]) -> Outcome:
        """Join the replicas' workers in transfer groups."""

        def on_listening(addresses: dict[str, Any]) -> None:
            request.check_abort()  # it may have come before there was anything to abort
            request.progress("listening", rendezvous=addresses)

        self._transfer.open(
            request.message, on_listening=on_listening, group=self._model.control_group
        )
        return Outcome()

    def leave_group(self, _: Request[LeaveTransferGroup]) -> Outcome:
        """Close every transfer group."""
        self._transfer.close()
        return Outcome()

    def release_memory(self, request: Request[ReleaseMemory]) -> Outcome:
        """Wait for the save in the background, move all state to host memory, and free the buffers
        of the transfer."""
        request.progress("offloading")
        started = time.monotonic()
        checkpoint.settle(self._trainer)
        self._transfer.free_buffers()
        moved = self._trainer.offload()
        seconds = {"offload": time.monotonic() - started}
        resident = self._trainer.resident_bytes()
        return Outcome(
            result={"offloaded_bytes": moved, "resident_bytes": resident, "seconds": seconds}
        )

    # ------------------------------------------------------------ the layout

    def use_layout(self, request: Request[UseLayout]) -> Outcome:
        """Plan the export in the receivers' order, if this trainer can fill it."""
        request.progress("planning the layout")
        part, fp8, texts = request.message.part, request.message.fp8, request.message.keeps
        base = self._manifest()
        manifest = fp8_manifest(base, fp8)
        changed_only = part is not None
        if part is not None:
            _check_part(manifest, part)
        else:
            self._transfer.use_chunks(None, changed_only=True)
        order = [chunk.tensors for chunk in request.message.layout.chunks]
        sent = manifest if part is None else manifest.part(part)
        export: Export | str
        keeps = None if texts is None else [_keeps_of(text, part) for text in texts]
        if fp8 is not None:
            self._note_loss(fp8)
        if fp8 is not None and not self._model.config.serves_merged:
            export = 'rollout_weights = "lora" has no FP8 weights; serve this model in bf16'
        elif fp8 is not None and keeps is not None:
            export = self._plan_fp8_steps(base, manifest, order, part, fp8, keeps)
        elif fp8 is not None:
            export = self._plan_fp8(base, manifest, order, part, fp8)
        else:
            export = self._plan_export(sent, order, part, keeps)
        if isinstance(export, str):
            self._transfer.use_chunks(None, changed_only=changed_only)
            return Outcome(result={"why_not": export})
        reloaded = [c.tensors for c in request.message.layout.chunks if c.kind == "reload"]
        chunks = Chunks(
            manifest=sent,
            order=order,
            export=export,
            reloaded=frozenset(index for tensors in reloaded for index in tensors),
        )
        self._transfer.use_chunks(chunks, changed_only=changed_only)
        heap.free_replaced()  # a plan has some 100,000 objects
        result: dict[str, Any] = {"why_not": None}
        if texts is not None:
            result["tables"] = [edges.to_text(table) for table in chunks.tables]
        return Outcome(result=result)

    def _plan_export(
        self,
        manifest: Manifest,
        order: Sequence[Sequence[int]],
        part: Sequence[int] | None,
        keeps: Sequence[edges.Keeps] | None = None,
        made: wire_export.Sent | None = None,
    ) -> wire_export.WireExport | BridgeExport | str:
        """Return the export that fills the chunks, or why none can; the same on every rank."""
        reason = wire_export.supports(self._model)
        if reason is None:
            try:
                return wire_export.WireExport(self._model, manifest, order, keeps=keeps, sent=made)
            except PartitionError as error:
                reason = str(error)
        config, is_in_order = self._model.config, is_manifest_order(order, manifest)
        if keeps is not None or not config.serves_merged or not is_in_order:
            return reason
        timeout_s = config.collective_timeout_s if config.parallel.splits_the_model else None
        return BridgeExport(self._exporter, manifest, order, part=part, timeout_s=timeout_s)

    def _note_loss(self, weights: Fp8Weights) -> None:
        """Say once what a server of block scales loses."""
        lost = fp8_blocks.loss_of(self._model.config.model, {g.kind for g in weights.groups})
        if lost and not self._has_said_lost and not self._model.trains_all:
            self._has_said_lost = True
            self._trainer.notes.append(lost)

    def _plan_fp8_steps(
        self,
        base: Manifest,
        sent: Manifest,
        order: Sequence[Sequence[int]],
        part: Sequence[int] | None,
        weights: Fp8Weights,
        keeps: Sequence[edges.Keeps],
    ) -> Fp8Steps | str:
        """Return the export that quantises what each rank merges, or why none can."""
        own, made, scales = fp8_steps.plan(base, sent, weights, order, part)
        merged = base if len(own) == len(base.tensors) else base.part(own)
        everything = [list(range(len(merged.tensors)))]
        export = self._plan_export(merged, everything, None, keeps, made)
        if not isinstance(export, wire_export.WireExport):
            return str(export)
        return Fp8Steps(
            export,
            made,
            scales,
            group=self._model.gather_group,
            rounding=lambda: self._model.rounding,
            device=self._model.device,
        )

    def _plan_fp8(
        self,
        base: Manifest,
        sent: Manifest,
        order: Sequence[Sequence[int]],
        part: Sequence[int] | None,
        weights: Fp8Weights,
    ) -> Fp8Export | str:
        """Return the export that quantises what another export merges, or why none can."""
        planned = fp8_export.plan(base, sent, weights, order, part)
        whole = len(planned.part) == len(base.tensors)
        merged = base if whole else base.part(planned.part)
        export = self._plan_export(merged, planned.order, None if whole else planned.part)
        if isinstance(export, str):
            return export
        sent = sent if part is None else sent.part(part)
        nbytes = [sum(sent.tensors[i].nbytes for i in chunk) for chunk in order]
        return Fp8Export(
            export,
            planned,
            specs=merged.tensors,
            sent=sent,
            order=order,
            device=self._model.device,
            fused=self._plan_fused(export, planned, nbytes),
        )

    def _plan_fused(
        self,
        export: wire_export.WireExport | BridgeExport,
        planned: fp8_export.Base,
        nbytes: Sequence[int],
    ) -> FusedFp8 | None:
        """What merges and quantises in one go; on a GPU, if one rank has every tensor whole."""
        device = self._model.device
        if device.type != "cuda" or not isinstance(export, wire_export.WireExport):
            return None
        if torch.distributed.get_rank() != 0 or export.merger is None:
            return None
        return fp8_fused.plan(
            export.merger,
            planned.batches,
            nbytes,
            scale=self._model.scale,
            rounding=lambda: self._model.rounding,
            device=device,
        )

    # ------------------------------------------------------------ a send

    def send(self, request: Request[SendWeights]) -> Outcome:
        """Send the merged weights from rank 0. The other ranks contribute their pieces.

        After any failure every rank still reaches the end and learns of it.
        """
        with self._trainer.behind.held():
            return self._send(request)

    def _send(self, request: Request[SendWeights]) -> Outcome:
        message, encoded = request.message, self._transfer.encoded
        self._transfer.encoded = None
        self._published.forget()
        layout = self._layout(self._chunks(message))
        # After a full update, the next one is expected to be of the changed part.
        is_next = message.changed_only or not self._transfer.has_part
        keeps = message.remember and is_next and self._published.keeps(layout)
        if message.elements:
            outcome = self._send_changes(request, encoded)
        else:
            outcome = self._send_tensors(request, self._published.keep if keeps else None)
        if message.remember:
            self._published.remember(message.version, layout.export if keeps else None)
        else:
            self._published.free()
        return outcome

    def _chunks(self, message: SendWeights | EncodeChanges) -> Chunks:
        chunks = self._transfer.choose(changed_only=message.changed_only)
        if chunks is None:
            what = "a part of the manifest" if message.changed_only else "the manifest"
            raise NotReady(f"no layout of {what} is planned; send UseLayout first")
        return chunks

    def _layout(self, chunks: Chunks, unread: Sequence[int] = ()) -> Layout:
        return Layout(
            export=chunks.export,
            steps=chunks.steps,
            manifest=chunks.manifest,
            order=chunks.order,
            unsigned=chunks.reloaded,
            unread=frozenset(unread),
            device=self._model.device,
        )

    def _send_tensors(self, request: Request[SendWeights], on_filled: Fill | None) -> Outcome:
        message, transfer = request.message, self._transfer
        deadline = time.monotonic() + message.deadline_s
        chunks = self._chunks(message)
        export = chunks.export
        with self._lockstep.agree():
            self._check_ready(request)
            export.start(limit=deadline + OUT_OF_STEP_S)
        if isinstance(export, Fp8Steps):
            with self._lockstep.agree():
                export.exchange()
        request.progress("sending", version=message.version)
        if request.link is None and chunks.steps is None:
            with self._lockstep.agree():
                export.contribute()
            self._trainer.steps_since_sent, self._trainer.sent.version = 0, message.version
            return Outcome()
        deadline = min(deadline, time.monotonic() + export.longest_s)
        report = transfer.send(
            chunks, deadline=deadline, agreement=self._lockstep.agree(), on_filled=on_filled
        )
        self._trainer.steps_since_sent, self._trainer.sent.version = 0, message.version
        if chunks.steps is not None:  # the ranks' digests add up, modulo 2^64
            torch.distributed.all_reduce(report.digests_N, group=self._model.control_group)
        if request.link is None:
            return Outcome()
        report.seconds.update(export.seconds(report.seconds.pop("fill")))
        return self._sent(message, report)

    # ------------------------------------------------------------ changed elements

    def encode(self, request: Request[EncodeChanges]) -> Outcome:
        """Encode what differs from the version that was sent last, on every rank that sends."""
        message, began = request.message, time.monotonic()
        self._transfer.encoded = None
        chunks = self._chunks(message)
        layout, export = self._layout(chunks, message.unread), chunks.export
        sends = request.link is not None or chunks.steps is not None
        why = self._recall(message, layout)
        if why is None and sends:
            why = self._published.why_not(message.base_version, layout)
        whys = objects.all_gather(why, group=self._model.control_group)
        found = next((text for text in whys if text is not None), None)
        if found is not None:
            return Outcome(result={"why_not": found})
        request.progress("encoding changed elements", version=message.version)
        with self._lockstep.agree():
            export.start(limit=time.monotonic() + message.deadline_s + OUT_OF_STEP_S)
        if isinstance(export, Fp8Steps):
            with self._lockstep.agree():
                export.exchange()
        encoded: Encoded | None = None
        with self._lockstep.agree():
            if not sends:
                export.contribute()
            else:
                try:
                    encoded = encode(
                        layout,
                        self._published,
                        version=message.version,
                        most_bytes=message.most_bytes,
                        proves=message.prove,
                    )
                finally:
                    export.drain()
        own = (0, 0) if encoded is None else (encoded.nbytes, encoded.elements)
        totals = objects.all_gather(own, group=self._model.control_group)
        nbytes, elements = (sum(column) for column in zip(*totals, strict=True))
        result: dict[str, Any] = {"why_not": None, "nbytes": nbytes, "elements": elements}
        result["seconds"] = {"encode": time.monotonic() - began}
        if nbytes > message.most_bytes:
            most = f"at most {message.most_bytes:,} are worth it"
            result["why_not"] = f"changed elements take {nbytes:,} bytes or more; {most}"
            return Outcome(result=result)
        self._transfer.encoded = encoded
        if encoded is None or encoded.old_digests_N is None:
            return Outcome(result=result)
        if chunks.steps is not None:
            group = self._model.control_group
            torch.distributed.all_reduce(encoded.old_digests_N, group=group)
        return Outcome(result=result, **_digests(encoded.old_digests_N))

    def _recall(self, message: EncodeChanges, layout: Layout) -> str | None:
        """Read the base version's adapters from its checkpoint, if a rank lacks them. Returns why
        that is impossible. A collective."""
        lacks = self._published.lacks(message.base_version, layout)
        everyones = objects.all_gather(lacks, group=self._model.control_group)
        if message.base_dir is None or not any(everyones):
            return None
        try:
            found = loading.read_adapters(self._model, Path(message.base_dir))
        except CheckpointError as error:
            return str(error)
        self._published.recall(message.base_version, *found)
        return None

    def _send_changes(self, request: Request[SendWeights], encoded: Encoded | None) -> Outcome:
        message = request.message
        deadline = time.monotonic() + message.deadline_s
        chunks = self._chunks(message)
        sends = request.link is not None or chunks.steps is not None
        with self._lockstep.agree():
            self._check_ready(request)
            is_this = encoded is not None and (
                encoded.version == message.version and encoded.layout.export is chunks.export
            )
            if sends and not is_this:
                raise NotReady(
                    f"version {message.version} is not encoded; send EncodeChanges first"
                )
        if encoded is None:
            with self._lockstep.agree():
                pass
            self._trainer.steps_since_sent, self._trainer.sent.version = 0, message.version
            return Outcome()
        request.progress("sending", version=message.version)
        report = self._transfer.send_changes(
            chunks, encoded, deadline=deadline, agreement=self._lockstep.agree()
        )
        self._trainer.steps_since_sent, self._trainer.sent.version = 0, message.version
        if chunks.steps is not None:
            torch.distributed.all_reduce(report.digests_N, group=self._model.control_group)
        return Outcome() if request.link is None else self._sent(message, report)

    def _check_ready(self, request: Request[SendWeights]) -> None:
        """On rank 0: whether the request may send, and has groups to send to."""
        if request.link is None:
            return
        request.check_abort()
        problem = self._transfer.problem()
        if problem is not None:
            raise NotReady(problem)

    def _sent(self, message: SendWeights, report: SendReport) -> Outcome:
        if self._model.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            log.info(
                "sent version %d; GPU bytes: %d used, %d reserved by torch, %d at most in tensors "
                "since the last job began",
                message.version,
                total - free,
                torch.cuda.memory_reserved(),
                torch.cuda.max_memory_allocated(),
            )
        return Outcome(
            result={"version": message.version, "nbytes": report.nbytes, "seconds": report.seconds},
            **_digests(report.digests_N),
        )


def _digests(digests_N: torch.Tensor) -> dict[str, Any]:
    """The fields of an outcome with these digests."""
    spec = TensorSpec(name="digests", dtype="int64", shape=tuple(digests_N.shape))
    return {"tensors": (spec,), "buffers": (digests_N.contiguous().numpy().tobytes(),)}


def _keeps_of(text: str, part: Sequence[int] | None) -> edges.Keeps:
    """What a worker keeps of the whole manifest, or of its part."""
    keeps = edges.keeps_of(edges.from_text(text, columns=edges.KEEPS_COLUMNS))
    return keeps if part is None else {n: keeps[i] for n, i in enumerate(part) if i in keeps}


def _check_part(manifest: Manifest, tensors: Sequence[int]) -> None:
    """Refuse a part that lacks a changed tensor: replicas would keep its old weights."""
    specs = manifest.tensors
    is_ascending = list(tensors) == sorted(set(tensors))
    if not is_ascending or not tensors or not 0 <= tensors[0] <= tensors[-1] < len(specs):
        raise ManifestError(
            f"a part is ascending indices into the manifest's {len(specs)} tensors, "
            f"got {list(tensors[:5])}..."
        )
    missing = [specs[i].name for i in sorted(set(manifest.changed or ()) - set(tensors))]
    if missing:
        raise ManifestError(f"the part lacks {len(missing)} tensors with adapters: {missing[:3]}")
