"""The trainer node: requests in over the control socket, training steps and publications out.

    rank 0    NodeLink (a thread) -> next request -> shared with the other ranks -> handled by all -> outcome compared -> terminal message
    others    wait in the control group's broadcast -> handle the same request -> compare

A batch that comes ahead of its job goes from the link's thread to `staging`, which has a thread and a group of its own on every rank.

The control group is gloo on the CPU; while nothing comes, rank 0 broadcasts a keepalive every few seconds, so an idle rank's wait never nears
its deadline. Every request ends in one terminal message, and the node goes on serving after a failed one, unless the ranks no
longer stand at the same point: then all exit with `EXIT_DIVERGED` and whoever launched them starts them again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError

from orchestrator.errors import (
    ConfigError,
    ManifestError,
    NodeLost,
    PublicationError,
    SpliceError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.frames import Envelope, decode, encode
from orchestrator.protocol.interfaces import gloo_variables
from orchestrator.protocol.messages import (
    FORWARD_RESULTS,
    AbortSend,
    AnyMessage,
    ErrorCode,
    ExportHf,
    Forward,
    ForwardBackward,
    Hello,
    LoadAdapter,
    LoadCheckpoint,
    LossSpec,
    Manifest,
    OpenTransferGroup,
    OptimStep,
    PlanPublication,
    Ready,
    ReleaseMemory,
    SaveCheckpoint,
    SendWeights,
    StageBatch,
    TensorSpec,
    TrainLora,
    TrainMerged,
    TrainStep,
    UseLayout,
)
from orchestrator.protocol.node_link import NodeLink
from orchestrator.protocol.restarts import EXIT_LINK_LOST
from trainer_node import objects
from trainer_node.staging import KEEPALIVE_S, Staging

if TYPE_CHECKING:
    from trainer_node.batch import Batch
    from trainer_node.sums import StepSums
    from trainer_node.wire_export import WireExport

log = logging.getLogger("splice.trainer")

DEADLINE_GRACE_S = 30.0
"""A request that is still running this long after its deadline is stuck; the node says so and ends."""
STAGED_ARRIVES_S = 30.0
"""How long a rank waits for a staged batch that rank 0 has; after that the job is to be sent with its batch."""
EXIT_CONFIG, EXIT_DIVERGED, EXIT_STUCK = 2, 3, 4
_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "cupy-cuda13x", "splice")
_KEEPALIVE, _STOP = 0, -1
"""In the place of a request's size. `_STOP` and less: stop with exit code 0 and more."""
OUT_OF_STEP_S = 20.0
"""How long past an update's deadline the ranks still wait for each other, to reach the end of a failed send together; less than
`DEADLINE_GRACE_S`."""
STREAM_SHARE = 0.8
"""Of the collectives' timeout: the longest that a stream of several ranks may take."""
T = TypeVar("T")


class NotReady(SpliceError, RuntimeError):
    """The request needs something that is not there yet; says what."""


class NotStaged(SpliceError, RuntimeError):
    """The request names a batch that is not here; nothing has changed."""


class SendFailed(TransferError):
    """A send in which some rank failed, on a rank that has reached its end: all ranks are in step, whichever failed."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What `Completed` carries."""

    result: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorSpec, ...] = ()
    buffers: tuple[bytes, ...] = ()


def classify(error: BaseException, *, phase: str) -> tuple[ErrorCode, str]:
    """An exception's code and what to do about it."""
    from trainer_node.checkpoint import CheckpointError
    from trainer_node.gap import LogprobGapError
    from trainer_node.runtime import NonFiniteGradient, NothingPending

    table: list[tuple[type[BaseException], ErrorCode, str]] = [
        (NonFiniteGradient, ErrorCode.NON_FINITE_GRADIENT, "Look at the batch's advantages and the learning rate; send the next batch."),
        (LogprobGapError, ErrorCode.LOGPROB_GAP, "Find the cause; no step was taken. To train on it all the same, raise loss.max_logprob_gap."),
        (CheckpointError, ErrorCode.CHECKPOINT_FAILED, "Mend the disk or folder named; LoadCheckpoint the last durable version before "
         "training again, because the state in memory may be a step ahead of it."),
        (NothingPending, ErrorCode.NOT_READY, "Send ForwardBackward first."),
        (NotReady, ErrorCode.NOT_READY, "Send the request named first."),
        (NotStaged, ErrorCode.NOT_STAGED, "Send the request with its batch."),
        (PublicationError, ErrorCode.PLAN_REFUSED, "The adapters or the export do not fit the manifest; plan the publication again."),
        (TransferTimeout, ErrorCode.TRANSFER_TIMEOUT, "Open a new transfer group and resend the version."),
        (TransferAborted, ErrorCode.TRANSFER_ABORTED, "Open a new transfer group and resend the version."),
        (TransferError, ErrorCode.TRANSFER_FAILED, "Open a new transfer group and resend the version."),
        (ConfigError, ErrorCode.BAD_INPUT, "Correct the field named and submit again."),
    ]  # fmt: skip
    for kind, code, remedy in table:
        if isinstance(error, kind):
            return code, remedy
    if phase == "training":
        return ErrorCode.TRAINING_FAILED, "See the trainer's log; LoadCheckpoint the last durable version and submit again."
    return ErrorCode.INTERNAL, "See the trainer's log; restart the trainer if it happens again."


class Control:
    """Rank 0's requests on every rank."""

    def __init__(self, group: Any) -> None:
        self._group, self._is_root = group, dist.get_rank() == 0

    def share(self, envelope: Envelope | None, *, stop: int | None = None) -> Envelope | None:
        """Rank 0 gives a request, None (keepalive) or an exit code to stop with; the others get it. None: keepalive.

        Raises:
            StopIteration: rank 0 said stop; its value is the exit code.
        """
        if dist.get_world_size() == 1:
            if stop is not None:
                raise StopIteration(stop)
            return envelope
        payload = np.empty(0, np.uint8)
        if self._is_root and envelope is not None:
            frames = encode(envelope.message, envelope.buffers)
            head = msgpack.packb([memoryview(f).nbytes for f in frames])
            parts = [len(head).to_bytes(8, "little"), head, *frames]
            payload = np.concatenate([np.frombuffer(p, np.uint8) for p in parts])  # other threads run meanwhile
        size = torch.tensor([len(payload) if stop is None else _STOP - stop], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        if int(size) <= _STOP:
            raise StopIteration(_STOP - int(size))
        if int(size) == _KEEPALIVE:
            return None
        data = torch.from_numpy(payload) if self._is_root else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return envelope if self._is_root else _unframe(data.numpy())

    def together(self, act: Callable[[], T]) -> T:
        """Run it and hear how it ended on every rank. It must not leave any rank waiting, however it ends. A collective.

        Raises:
            OutOfStep: on every rank, if it was raised on one.
            SendFailed: a rank failed; on rank 0 its own error is raised instead where it is one of ours and no other rank failed.
        """
        from trainer_node.gathering import OutOfStep

        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001  - whatever it is, the other ranks hear of it before it goes on
            error = caught
        errors = self.compare(error) if dist.get_world_size() > 1 else [None]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if len(errors) == 1 or not failed:
            if error is not None:
                raise error
            return result  # type: ignore[return-value]
        if any(text is not None and text.startswith(f"{OutOfStep.__name__}:") for text in errors):
            raise OutOfStep("; ".join(failed)) from error
        if isinstance(error, SpliceError) and len(failed) == 1 and self._is_root:
            raise error
        raise SendFailed("; ".join(failed)) from error

    def compare(self, error: BaseException | None) -> list[str | None]:
        """Every rank's error with its notes, as text starting with the type's name, or None."""
        mine = None
        if error is not None:
            mine = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        return objects.all_gather(mine, group=self._group)


def _unframe(data: np.ndarray) -> Envelope:
    """What rank 0 shared: the frames' sizes, then the frames. Buffers are views of it."""
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    frames: list[Any] = []
    for size in msgpack.unpackb(data[8:begin].tobytes()):
        frames.append(memoryview(data)[begin : begin + size])  # type: ignore[arg-type]
        begin += size
    return decode([bytes(f) for f in frames[:3]] + frames[3:])


class Node:
    """One rank of the trainer node; rank 0 has the link."""

    def __init__(self, config: TrainerConfig, link: NodeLink | None) -> None:
        from trainer_node.export import Exporter
        from trainer_node.runtime import TrainerRuntime

        self.config, self.link = config, link
        self.runtime = TrainerRuntime(config)
        self.exporter = Exporter(self.runtime)
        self.control = Control(self.runtime.control_group)
        self.staging = Staging(
            self._check_staged, share=Control(self.runtime.staging_group).share, is_root=dist.get_rank() == 0
        )
        self._steps_taken = 0
        """Optimizer steps of the request under way."""
        self._staged: Future[Batch] | None = None
        """The batch of the request under way, if it came ahead."""
        self.phase = "idle"
        self._request_id = ""
        self._aborted: dict[str, str] = {}
        """Request -> reason, of open requests that are to be aborted. Written on the link's thread, before it looks which request runs."""
        self._received_s = 0.0
        self._transfer = Transfer(config, self.runtime.device)
        self._part: tuple[Sequence[int], Manifest] | None = None
        """Of updates of the changed tensors alone: indices into the manifest, and their manifest."""
        self._handlers: dict[type, Callable[..., Outcome]] = {
            TrainMerged: self._train_merged,
            TrainLora: self._train_lora,
            Forward: self._forward,
            ForwardBackward: self._forward_backward,
            OptimStep: self._optim_step,
            ExportHf: self._export_hf,
            SaveCheckpoint: self._save_checkpoint,
            LoadCheckpoint: self._load_checkpoint,
            LoadAdapter: self._load_adapter,
            ReleaseMemory: self._release_memory,
            PlanPublication: self._plan_publication,
            UseLayout: self._use_layout,
            OpenTransferGroup: self._open_transfer_group,
            SendWeights: self._send_weights,
        }

    # ------------------------------------------------------------ the loop

    def serve(self) -> int:
        """Handle requests until told to stop, or until the link is lost; returns the exit code, the same on every rank."""
        if self.link is not None:
            detail = {
                "model": str(self.config.model),
                "parallel": self.config.parallel.model_dump(),
                "trainable_parameters": self.runtime.num_parameters,
                "dtype": self.config.dtype,
                "device": self.config.device,
                "memory": self.config.memory,
                "micro_batch_tokens": self.runtime.micro_batch_tokens,
            }
            self.link.send(Ready(node_id=self.link.node_id, detail=detail))
        while True:
            try:
                envelope, received_s = self._next()
            except StopIteration as stop:
                return int(stop.value)
            if envelope is not None and not self._handle(envelope, received_s):
                return EXIT_DIVERGED

    def _next(self) -> tuple[Envelope | None, float]:
        """The next request, and when it was this process's turn to see it."""
        if self.link is None:
            return self.control.share(None), time.monotonic()
        try:
            envelope = self.link.recv(timeout_s=KEEPALIVE_S)
        except NodeLost as error:
            log.warning("%s; the trainer ends", error)
            return self.control.share(None, stop=EXIT_LINK_LOST), time.monotonic()
        received_s = time.monotonic()
        if envelope is not None and envelope.message.kind == "Shutdown":
            return self.control.share(None, stop=0), received_s
        if envelope is not None and not self._can_run(envelope.message):
            envelope = None
        return self.control.share(envelope), received_s

    def _can_run(self, message: Any) -> bool:
        """Whether the batch that a request names is here; if not, the request is answered and the other ranks never hear of it."""
        assert self.link is not None
        staged = getattr(message, "staged", None)
        if staged is None or self.staging.holds(staged):
            return True
        code, remedy = classify(NotStaged(), phase="idle")
        said = f"the batch of {staged} is not staged here"
        self.link.fail(message.request_id, code=code, phase="idle", message=said, remedy=remedy)
        return False

    def _handle(self, envelope: Envelope, received_s: float) -> bool:
        """Run one request, received then, to its terminal message. False: the ranks have diverged and must end."""
        message: Any = envelope.message
        self._request_id, self.phase = message.request_id, message.kind
        self._received_s, self.runtime.first_forward_s = received_s, 0.0
        outcome, error = Outcome(), None
        with self._watch(message):
            try:
                outcome = self._dispatch(message, envelope.buffers)
            except Exception as caught:  # the boundary: it ends the request, not the node
                error = caught
                log.exception("%s failed while %s", message.kind, self.phase)
            errors = self.control.compare(error)
        self._staged = None
        diverged = _diverged(errors)
        if self.link is not None:
            self._answer(outcome, error, errors, diverged=diverged)
        self._aborted.pop(self._request_id, None)
        self._steps_taken = 0
        self.phase = "idle"
        return not diverged

    def _dispatch(self, message: Any, buffers: Sequence[bytes]) -> Outcome:
        if message.kind == "LeaveTransferGroup":
            self._transfer.close()
            return Outcome()
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ConfigError(f"the trainer does not know {message.kind}")
        if isinstance(message, TrainStep | Forward | ForwardBackward) and message.staged is not None:
            self._claim(message.staged)
        if self.runtime.is_offloaded and not isinstance(message, ReleaseMemory | OpenTransferGroup):
            self._progress("reloading")
            self.runtime.reload()
        return handler(message, buffers) if isinstance(message, TrainStep | Forward | ForwardBackward) else handler(message)

    def _claim(self, job_id: str) -> None:
        """Take the staged batch, on every rank or on none.

        Raises:
            NotStaged: on all ranks, if one of them lacks it.
        """
        self._staged = self.staging.claim(job_id, timeout_s=STAGED_ARRIVES_S)
        has = torch.tensor([self._staged is not None], dtype=torch.int32)
        dist.all_reduce(has, op=dist.ReduceOp.MIN, group=self.runtime.control_group)
        if not has.item():
            raise NotStaged(f"the batch of {job_id} is not staged on every rank")

    def _answer(self, outcome: Outcome, error: BaseException | None, errors: list[str | None], *, diverged: bool) -> None:
        assert self.link is not None
        failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
        if not failed:
            self.link.complete(self._request_id, result=outcome.result, tensors=outcome.tensors, buffers=outcome.buffers)
            return
        rank, text = failed[0]
        code, remedy = (
            classify(error, phase=self.phase) if error is not None else (ErrorCode.INTERNAL, "See the trainer's log.")
        )
        if diverged:
            remedy = "The ranks are no longer in step, so the trainer ends and is started again; LoadCheckpoint the last durable version."
        where = f"rank {rank}: " if len(errors) > 1 else ""
        self.link.fail(
            self._request_id, code=code, phase=self.phase, message=where + text, remedy=remedy, steps_taken=self._steps_taken
        )

    def _to_first_forward(self) -> dict[str, float]:
        """Seconds from the request's receipt to the first forward pass: shared, decoded, checked, its first micro-batch laid out."""
        return {"to_first_forward": self.runtime.first_forward_s - self._received_s}

    def _progress(self, phase: str, **detail: object) -> None:
        self.phase = phase
        if self.link is not None:
            self.link.progress(self._request_id, phase, **detail)

    @contextlib.contextmanager
    def _watch(self, message: Any) -> Iterator[None]:
        """End the process if a request is stuck far beyond its deadline: a hung kernel or collective cannot be interrupted."""

        def stuck() -> None:
            log.error(
                "%s is stuck while %s, %.0f s after its receipt",
                message.kind,
                self.phase,
                message.deadline_s + DEADLINE_GRACE_S,
            )
            if self.link is not None:
                self.link.fail(
                    message.request_id,
                    code=ErrorCode.INTERNAL,
                    phase=self.phase,
                    message=f"stuck: no end within {message.deadline_s + DEADLINE_GRACE_S:.0f} s",
                    remedy="The trainer ends and is started again; LoadCheckpoint the last durable version.",
                )
                self.link.close()
            os._exit(EXIT_STUCK)

        timer = threading.Timer(message.deadline_s + DEADLINE_GRACE_S, stuck)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # ------------------------------------------------------------ requests

    def _batch(self, message: TrainStep | ForwardBackward | Forward, buffers: Sequence[bytes]) -> Batch:
        """The request's batch, checked: the staged one, or what came with the request.

        Raises:
            BatchError: it is refused.
        """
        if self._staged is not None:
            return self._staged.result(message.deadline_s)
        if isinstance(message, Forward):
            return self._decode(message.tensors, buffers, loss=None, allowed_token_ids=message.allowed_token_ids)
        return self._decode(message.tensors, buffers, loss=message.loss, allowed_token_ids=None)

    def _check_staged(self, message: StageBatch, buffers: Sequence[bytes]) -> Batch:
        """On the staging's thread: all that can be checked before the job's turn."""
        batch = self._decode(message.tensors, buffers, loss=message.loss, allowed_token_ids=message.allowed_token_ids)
        return self.runtime.check_routing_early(batch)

    def _decode(
        self,
        specs: Sequence[TensorSpec],
        buffers: Sequence[bytes],
        *,
        loss: LossSpec | None,
        allowed_token_ids: Sequence[int] | None,
    ) -> Batch:
        from trainer_node.batch import decode_batch, decode_forward

        limits = {"vocab_size": self.runtime.vocab_size, "max_length": self.runtime.max_length}
        if loss is None:
            return decode_forward(specs=specs, buffers=buffers, allowed_token_ids=allowed_token_ids, **limits)
        return decode_batch(specs=specs, buffers=buffers, loss=loss, **limits)

    def _forward(self, message: Forward, buffers: Sequence[bytes]) -> Outcome:
        self._progress("forward", **self._ahead())
        started = time.monotonic()
        batch = self._batch(message, buffers)
        results = self.runtime.forward(batch, allowed_token_ids=message.allowed_token_ids, adapters=message.adapters)
        return Outcome(
            result={"seconds": {"forward": time.monotonic() - started, **self._to_first_forward()}},
            tensors=tuple(
                TensorSpec(name=n, dtype=d, shape=tuple(t.shape))  # type: ignore[arg-type]
                for (n, d), t in zip(FORWARD_RESULTS.items(), results, strict=True)
            ),
            buffers=tuple(t.contiguous().numpy().tobytes() for t in results),
        )

    def _ahead(self) -> dict[str, bool]:
        """For a request's `Progress`: whether its batch came ahead."""
        return {"staged": True} if self._staged is not None else {}

    def _forward_backward(self, message: ForwardBackward, buffers: Sequence[bytes]) -> Outcome:
        self._progress("training", **self._ahead())
        started, batch = time.monotonic(), self._batch(message, buffers)
        sums = self.runtime.forward_backward(
            batch,
            message.loss,
            loss_weight=message.loss_weight,
            grad_accumulation_sequences=message.grad_accumulation_sequences,
        )
        return Outcome(
            result={
                "metrics": sums.metrics(message.loss.normalize_by),
                "warnings": self._warnings(sums, batch, message.loss) if self.runtime.steps_since_sent == 0 else [],
                "pending_batches": self.runtime.pending.num_batches,
                "seconds": {"forward_backward": time.monotonic() - started, **self._to_first_forward()},
            }
        )

    def _optim_step(self, message: OptimStep) -> Outcome:
        self._progress("training")
        metrics = self.runtime.optim_step(message.optim)
        return Outcome(result={"metrics": metrics, "seconds": {"optim": metrics["seconds_optim"]}})

    def _export_hf(self, message: ExportHf) -> Outcome:
        from trainer_node.hf_export import export_hf

        self._progress("exporting")
        started = time.monotonic()
        files = export_hf(self.runtime, self.exporter, Path(message.output_dir), shard_bytes=message.shard_bytes)
        seconds = {"export": time.monotonic() - started}
        return Outcome(result={"output_dir": message.output_dir, "files": files, "seconds": seconds})

    def _train(self, message: TrainStep, buffers: Sequence[bytes]) -> tuple[dict[str, Any], float]:
        """The job's steps: what the result says of them, and their seconds."""
        from trainer_node import steps

        self._progress("training", **self._ahead())
        started, batch = time.monotonic(), self._batch(message, buffers)
        is_on_policy = self.runtime.steps_since_sent == 0

        def on_step(step: steps.Step, count: int) -> None:
            self._steps_taken += step.is_taken
            if count > 1:
                self._progress("training", metrics=step.metrics)

        done = steps.train(self.runtime, batch, message, on_step=on_step)
        said = {"metrics": steps.together(done), "steps": [s.metrics for s in done]}
        said["warnings"] = self._warnings(done[0].used.sums, batch, message.loss) if is_on_policy else []
        return said, time.monotonic() - started

    def _warnings(self, sums: StepSums, batch: Batch, loss: LossSpec) -> list[str]:
        """Of the gap between trainer and sampler, also in rank 0's log."""
        from trainer_node import gap

        said = gap.warnings(sums, loss, dtype=self.config.dtype, temperatures_T=batch.temperatures_T)
        for text in said if self.link is not None else ():
            log.warning("%s: %s", self._request_id, text)
        return said

    def _train_merged(self, message: TrainMerged, buffers: Sequence[bytes]) -> Outcome:
        from trainer_node import checkpoint

        said, train_s = self._train(message, buffers)
        self._progress("saving", metrics=said["metrics"])
        started = time.monotonic()
        checkpoint.save(self.runtime, Path(message.checkpoint_dir), version=message.version)
        seconds = {"train": train_s, "save": time.monotonic() - started, **self._to_first_forward()}
        result = {"version": message.version, "seconds": seconds} | said
        return Outcome(result=result | self._delete(message.delete_after))

    def _train_lora(self, message: TrainLora, buffers: Sequence[bytes]) -> Outcome:
        from trainer_node import checkpoint

        self.runtime.need_adapters("TrainLora (use TrainMerged)")
        said, train_s = self._train(message, buffers)
        self._progress("saving", metrics=said["metrics"])
        started = time.monotonic()
        checkpoint.save_adapter(self.runtime, Path(message.output_dir))
        seconds = {"train": train_s, "save": time.monotonic() - started, **self._to_first_forward()}
        return Outcome(result={"output_dir": message.output_dir, "seconds": seconds} | said)

    def _save_checkpoint(self, message: SaveCheckpoint) -> Outcome:
        from trainer_node import checkpoint

        self._progress("saving")
        started = time.monotonic()
        folder = Path(message.checkpoint_dir)
        checkpoint.save(self.runtime, folder, version=message.version, client_state=message.client_state)
        result = {
            "version": message.version,
            "checkpoint_dir": message.checkpoint_dir,
            "pending_batches": self.runtime.pending.num_batches,
            "seconds": {"save": time.monotonic() - started},
        }
        return Outcome(result=result | self._delete(message.delete_after))

    def _delete(self, folders: Sequence[str]) -> dict[str, Any]:
        """Retention, after the new checkpoint is whole; rank 0's part."""
        from trainer_node import checkpoint

        not_deleted = checkpoint.delete(map(Path, folders)) if self.link is not None else {}
        for folder, why in not_deleted.items():
            log.warning("%s was to be deleted and is still there: %s", folder, why)
        return {"not_deleted": not_deleted} if not_deleted else {}

    def _load_checkpoint(self, message: LoadCheckpoint) -> Outcome:
        from trainer_node import checkpoint

        self._progress("loading")
        started = time.monotonic()
        loaded = checkpoint.load(self.runtime, Path(message.checkpoint_dir))
        return Outcome(
            result={
                "version": loaded.version,
                "client_state": loaded.client_state,
                "dropped_batches": loaded.dropped_batches,
                "rng_restored": loaded.rng_restored,
                "seconds": {"load": time.monotonic() - started},
            }
        )

    def _load_adapter(self, message: LoadAdapter) -> Outcome:
        self._progress("loading")
        started = time.monotonic()
        dropped = self.runtime.load_adapter(Path(message.adapter_dir))
        seconds = {"load": time.monotonic() - started}
        return Outcome(result={"adapter_dir": message.adapter_dir, "dropped_batches": dropped, "seconds": seconds})

    def _release_memory(self, message: ReleaseMemory) -> Outcome:
        self._progress("offloading")
        started = time.monotonic()
        self._transfer.free_buffers()
        moved = self.runtime.offload()
        seconds = {"offload": time.monotonic() - started}
        result = {"offloaded_bytes": moved, "resident_bytes": self.runtime.resident_bytes(), "seconds": seconds}
        return Outcome(result=result)

    def _plan_publication(self, message: PlanPublication) -> Outcome:
        self._progress("planning")
        manifest = self.exporter.manifest()
        return Outcome(result=manifest.model_dump(mode="python"))

    def _open_transfer_group(self, message: OpenTransferGroup) -> Outcome:
        def listening(where: dict[str, Any]) -> None:
            if self._request_id in self._aborted:  # before there was anything to abort
                raise TransferAborted(self._aborted[self._request_id])
            self._progress("listening", rendezvous=where)

        if self.link is not None:
            self._transfer.open(message, on_listening=listening)
        return Outcome()

    def _use_layout(self, message: UseLayout) -> Outcome:
        """Plan the merge in the receiver's order, where this trainer can; else keep the manifest's."""
        from trainer_node import wire_export
        from trainer_node.gather_plan import PartitionError

        self._progress("planning the layout")
        manifest, changed_only = self.exporter.manifest(), message.part is not None
        if message.part is not None:
            self._check_part(manifest, message.part)
            manifest = manifest.part(message.part)
            self._part = (message.part, manifest)
        else:
            self._part = None
            self._transfer.use_chunks(None, changed_only=True)
        reason = wire_export.supports(self.runtime) if message.layout is not None else "manifest order was asked for"
        if reason is not None or message.layout is None:
            self._transfer.use_chunks(None, changed_only=changed_only)
            return Outcome(result={"direct": False, "reason": reason})
        order = [chunk.tensors for chunk in message.layout.chunks]
        try:
            export = wire_export.WireExport(self.runtime, manifest, order)
        except PartitionError as error:  # the same on every rank
            self._transfer.use_chunks(None, changed_only=changed_only)
            return Outcome(result={"direct": False, "reason": str(error)})
        self._transfer.use_chunks(Chunks(order=order, export=export), changed_only=changed_only)
        return Outcome(result={"direct": True})

    def _check_part(self, manifest: Manifest, tensors: Sequence[int]) -> None:
        """A part that lacks what training changes would leave old weights on the replicas."""
        count, names = len(manifest.tensors), manifest.tensors
        if list(tensors) != sorted(set(tensors)) or not tensors or not 0 <= tensors[0] <= tensors[-1] < count:
            raise ManifestError(f"a part is ascending indices into the manifest's {count} tensors, got {list(tensors[:5])}...")
        missing = sorted(set(manifest.changed or ()) - set(tensors))
        if missing:
            raise ManifestError(f"the part lacks {len(missing)} tensors with adapters: {[names[i].name for i in missing[:3]]}")

    def _send_weights(self, message: SendWeights) -> Outcome:
        deadline = time.monotonic() + message.deadline_s
        self.runtime.steps_since_sent = 0
        manifest, indices, changed_only = self.exporter.manifest(), None, message.changed_only
        if changed_only:
            if self._part is None:
                raise NotReady("no part of the manifest is planned; send UseLayout with a part first")
            indices, manifest = self._part
        self._transfer.choose(changed_only=changed_only)
        if self._transfer.has_chunks:
            return self._send_chunks(message, manifest, deadline=deadline)
        # If nothing can be sent, every rank still runs the export, and they stay in step.
        problem = self._problem()
        self._progress("sending", version=message.version)
        stream = self.exporter.merged_tensors(indices)
        if self.link is None or problem is not None:
            _exhaust(stream)
            if problem is not None:
                raise problem
            return Outcome()
        wire_s = deadline - time.monotonic()
        if self.config.parallel.splits_the_model:
            # As long as this rank waits for the wire, the others wait in the export's collectives: they must not give up first.
            wire_s = min(wire_s, STREAM_SHARE * self.config.collective_timeout_s)
        try:
            report = self._transfer.send(manifest, stream, deadline_s=wire_s)
        except Exception:
            # The other ranks are in the export's collectives: finish it without sending.
            _exhaust(stream)
            raise
        report.seconds["merge"] = self.exporter.merge_s
        report.seconds["export"] = max(0.0, report.seconds.get("export", 0.0) - self.exporter.merge_s)
        return self._sent(message, report)

    def _send_chunks(self, message: SendWeights, manifest: Manifest, *, deadline: float) -> Outcome:
        """Rank 0 sends what it and the others merge. Whatever fails, every rank reaches the end, and the failure is known to all."""
        transfer, export, is_root = self._transfer, self._transfer.chunks.export, self.link is not None

        def ready() -> None:
            problem = self._problem()
            if problem is not None:
                raise problem
            export.start(limit=deadline + OUT_OF_STEP_S)

        self.control.together(ready)
        self._progress("sending", version=message.version)
        if not is_root:
            self.control.together(export.contribute)
            return Outcome()
        report = transfer.send_chunks(manifest, deadline=deadline, together=self.control.together)
        # Export and merge are one pass here, queued under the wire.
        report.seconds.update(export=0.0, merge=report.seconds.pop("fill"))
        return self._sent(message, report)

    def _sent(self, message: SendWeights, report: Any) -> Outcome:
        digests = report.digests_N
        if self.runtime.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            log.info(
                "sent version %d; bytes on the GPU: %d in use, %d of them held by torch, at most %d by tensors so far",
                message.version, total - free, torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated(),
            )  # fmt: skip
        spec = TensorSpec(name="digests", dtype="int64", shape=tuple(digests.shape))
        return Outcome(
            result={"version": message.version, "nbytes": report.nbytes, "seconds": report.seconds},
            tensors=(spec,),
            buffers=(digests.contiguous().numpy().tobytes(),),
        )

    def abort_send(self, message: AbortSend) -> None:
        """Abort a join or send under way, or the one that the message names when its turn comes; called on the link's thread."""
        assert self.link is not None
        if message.request_id is not None:
            if not self.link.is_open(message.request_id):
                log.info("%s is to be aborted (%s), but has ended or never came", message.request_id, message.reason)
                return
            self._aborted[message.request_id] = message.reason
            if message.request_id != self._request_id:
                return
        self._transfer.abort(message.reason)

    def _problem(self) -> SpliceError | None:
        """Why rank 0 can send nothing; None if it can, and on other ranks."""
        if self.link is None:
            return None
        if self._request_id in self._aborted:
            return TransferAborted(self._aborted[self._request_id])
        why = self._transfer.problem()
        return None if why is None else NotReady(why)

    def close(self) -> None:
        """End communicators and process groups."""
        self._transfer.close()
        self.staging.close()
        self.runtime.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A layout ready to be sent: manifest indices of each chunk, and what merges them."""

    order: Sequence[Sequence[int]]
    export: WireExport


class Transfer:
    """Rank 0's transfer groups and sender; the layouts are every rank's. A failed send closes the groups: the next send refuses and says
    what to do."""

    def __init__(self, config: TrainerConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._lock = threading.Lock()
        self._listeners: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._sender: Any = None
        self._chunks: dict[bool, Chunks] = {}  # changed_only -> how such an update is sent, where not as a stream
        self._changed_only = False
        self._bucket_bytes = 0
        self._why_not = "no transfer group is open; send OpenTransferGroup first"

    def open(self, message: OpenTransferGroup, *, on_listening: Callable[[dict[str, Any]], None]) -> None:
        """Listen, say where, and join every replica before the deadline; all or none.

        Raises:
            TransferError, ConfigError: as `weight_transfer.groups` does.
        """
        from weight_transfer.groups import open_listener

        self.close()
        deadline = time.monotonic() + message.deadline_s
        joined: dict[str, Any] = {}
        listeners: dict[str, Any] = {}  # an abort empties the other
        try:
            for replica, workers in message.replicas.items():
                listener = open_listener(
                    transport=message.transport,
                    host=self._config.host,
                    world_size=1 + workers,
                    bucket_bytes=message.bucket_bytes,
                    device=self._device,
                )
                listeners[replica] = listener
                with self._lock:
                    self._listeners[replica] = listener
            on_listening({r: x.rendezvous.model_dump(mode="python") for r, x in listeners.items()})
            for replica, listener in listeners.items():
                joined[replica] = listener.join(max(0.001, deadline - time.monotonic()))
        except BaseException as error:
            for group in joined.values():
                group.close()
            self._why_not = f"opening the transfer group failed ({error}); send OpenTransferGroup again"
            raise
        finally:
            self._close_listeners()
        with self._lock:
            self._groups, self._bucket_bytes = joined, message.bucket_bytes

    def problem(self) -> str | None:
        """Why nothing can be sent now; None if it can."""
        return None if self._groups or self._sender is not None else self._why_not

    def send(self, manifest: Any, stream: Iterator[tuple[str, torch.Tensor]], *, deadline_s: float) -> Any:
        """Send the stream to every group; on failure the groups are gone."""
        from weight_transfer.sender import WeightSender

        with self._lock:
            if self._sender is None:
                self._sender = WeightSender(
                    groups=self._groups, manifest=manifest, bucket_bytes=self._bucket_bytes, device=self._device
                )
        return self._or_close(lambda: self._sender.send(stream, deadline_s=deadline_s))

    def use_chunks(self, chunks: Chunks | None, *, changed_only: bool) -> None:
        """From the next send on, of the whole manifest or of the part that changes: these chunks, or (None) a stream in manifest order."""
        self.free_buffers()
        self._chunks.pop(changed_only, None)
        if chunks is not None:
            self._chunks[changed_only] = chunks

    def choose(self, *, changed_only: bool) -> None:
        """What the next send brings; the buffers of the other kind are freed."""
        if changed_only != self._changed_only:
            self.free_buffers()
        self._changed_only = changed_only

    def free_buffers(self) -> None:
        """Free the sender's buffers, and those between the ranks; groups stay joined, and the next send makes new ones."""
        for chunks in self._chunks.values():
            chunks.export.release()
        with self._lock:
            if self._sender is not None:
                self._sender.release()
            self._sender = None

    @property
    def has_chunks(self) -> bool:
        """Whether `send_chunks` is the way to send."""
        return self._changed_only in self._chunks

    @property
    def chunks(self) -> Chunks:
        """What `send_chunks` sends; only where `has_chunks`."""
        return self._chunks[self._changed_only]

    def send_chunks(self, manifest: Any, *, deadline: float, together: Callable[[Callable[[], Any]], Any]) -> Any:
        """Send the chunks to every group and take all that the other ranks have of them; on failure, also theirs, the groups are gone.

        Args:
            deadline: `time.monotonic()` at which the last chunk must have left.
            together: `Control.together`.
        """
        from weight_transfer.chunks import ChunkSender

        chunks = self.chunks

        def send() -> Any:
            try:
                with self._lock:
                    if self._sender is None:
                        self._sender = ChunkSender(
                            groups=self._groups,
                            manifest=manifest,
                            chunks=chunks.order,
                            fill=chunks.export.fill,
                            lies_at=chunks.export.lies_at,
                            device=self._device,
                        )
                return self._sender.send(deadline_s=deadline - time.monotonic())
            finally:
                chunks.export.drain()

        return self._or_close(lambda: together(send))

    def _or_close(self, send: Callable[[], Any]) -> Any:
        try:
            return send()
        except BaseException as error:
            self.close()
            self._why_not = f"the last transfer failed ({error}); send OpenTransferGroup first"
            raise

    def abort(self, reason: str) -> None:
        """From any thread."""
        self._close_listeners()
        with self._lock:
            sender, groups = self._sender, list(self._groups.values())
        if sender is not None:
            sender.abort(reason)
        else:
            for group in groups:
                group.abort(reason)

    def close(self) -> None:
        """Leave every group. Safe to call twice."""
        self._close_listeners()
        with self._lock:
            sender, self._sender = self._sender, None
            groups, self._groups = self._groups, {}
        if sender is not None:
            sender.close()  # closes the groups too
        else:
            for group in groups.values():
                group.close()
        self._why_not = "no transfer group is open; send OpenTransferGroup first"

    def _close_listeners(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()


def _exhaust(stream: Iterator[object]) -> None:
    for _ in stream:
        pass


def _diverged(errors: Sequence[str | None]) -> bool:
    """Whether the ranks may stand at different points.

    They do not where all ended alike, or where only rank 0 failed, outside a collective, and the rest finished. A type of torch's own
    on several ranks means a broken process group. `SendFailed` is what a rank that is in step says of another's failure.
    """
    errors = [None if e is not None and e.startswith(f"{SendFailed.__name__}:") else e for e in errors]
    if len(errors) == 1 or all(e is None for e in errors):
        return False
    kinds = {e and e.partition(":")[0] for e in errors}
    if kinds & {"RuntimeError", "OutOfStep", "DistBackendError", "DistNetworkError", "DistStoreError", "OutOfMemoryError"}:
        return True
    return len(kinds) > 1 and any(e is not None for e in errors[1:])


# ---------------------------------------------------------------- the process


def hello(node_id: str, token: str, device: str) -> Hello:
    """Who we are."""
    packages = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    gpus: tuple[str, ...] = ()
    if device == "cuda":
        packages["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Hello(
        role="trainer",
        node_id=node_id,
        incarnation=uuid.uuid4().hex,
        run_token=token,
        packages=packages,
        gpus=gpus,
        pid=os.getpid(),
    )


def run(*, endpoint: str, node_id: str, config: TrainerConfig, token: str) -> int:
    """One rank's life; returns the exit code."""
    if int(os.environ.get("RANK", "0")) != 0:
        return _serve(config, None, {})
    nodes: dict[str, Node] = {}

    def on_abort(message: AnyMessage) -> None:
        if "node" in nodes and isinstance(message, AbortSend):
            nodes["node"].abort_send(message)

    def on_staged(envelope: Envelope) -> None:
        if "node" in nodes:
            nodes["node"].staging.receive(envelope)

    link = NodeLink(
        endpoint=endpoint,
        hello=hello(node_id, token, config.device),
        urgent={"AbortSend": on_abort},
        aside={"StageBatch": on_staged, "DropBatch": on_staged},
    )
    with link.start():
        return _serve(config, link, nodes)


def _serve(config: TrainerConfig, link: NodeLink | None, nodes: dict[str, Node]) -> int:
    from trainer_node.hub import with_local_model

    os.environ.update(gloo_variables(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    node = nodes["node"] = Node(with_local_model(config), link)
    code = EXIT_DIVERGED
    try:
        code = node.serve()
    finally:
        if code in (0, EXIT_LINK_LOST):
            node.close()
        else:
            # Process groups that are out of step block when they are destroyed.
            node._transfer.close()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the run's token comes from SPLICE_RUN_TOKEN."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node", description="splice's trainer node; one process per rank, started by trainer_node.ranks."
    )
    parser.add_argument("--endpoint", required=True, help="the orchestrator's address, tcp://host:port")
    parser.add_argument("--node-id", default="trainer")
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    arguments = parser.parse_args(argv)
    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(OSError):  # what ps and top show: a rank that was forked has its template's command line
        Path("/proc/self/comm").write_text(f"splice-rank-{rank}"[:15])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    try:
        config = TrainerConfig.model_validate_json(arguments.config.read_text())
        code = run(
            endpoint=arguments.endpoint, node_id=arguments.node_id, config=config, token=os.environ.get("SPLICE_RUN_TOKEN", "")
        )
    except NodeLost as error:
        log.error("%s; this trainer can be started again", error)
        code = EXIT_LINK_LOST
    except (ConfigError, ValidationError, OSError) as error:
        log.error("%s", error)
        code = EXIT_CONFIG
    except Exception:
        log.exception("the trainer ends")
        code = EXIT_DIVERGED
    if code != 0:
        # Not through the interpreter's shutdown: process groups out of step can hang there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
