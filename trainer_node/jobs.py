"""Handles the requests that train, score, save and load. Every rank runs every handler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import (
    FORWARD_RESULTS,
    ExportHf,
    Forward,
    ForwardBackward,
    LoadAdapter,
    LoadCheckpoint,
    LossSpec,
    NewAdapter,
    OptimStep,
    SaveCheckpoint,
    TensorSpec,
    TrainLora,
    TrainMerged,
    TrainStep,
)
from trainer_node import kernel_trace
from trainer_node.export.hf_export import export_hf
from trainer_node.export.merged import Exporter
from trainer_node.files.behind import OnDisk
from trainer_node.ranks.lockstep import Lockstep, packed
from trainer_node.request import Outcome, Request
from trainer_node.state import checkpoint, remake
from trainer_node.state.removal import Removal
from trainer_node.training import gap, gap_split, pack_size, served_share, steps
from trainer_node.training.ahead import Ahead
from trainer_node.training.batch import Batch, decode_forward
from trainer_node.training.sums import StepSums
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")


class Jobs:
    """The handlers and the trainer that they use."""

    def __init__(self, trainer: Trainer, exporter: Exporter, lockstep: Lockstep) -> None:
        self._trainer, self._model, self._exporter = trainer, trainer.model, exporter
        self._recorded = frozenset(self._model.config.profile_versions)
        self.ahead = Ahead(trainer, lockstep)
        self.removal = Removal()

    @property
    def handlers(self) -> dict[type, Callable[[Request[Any]], Outcome]]:
        """Message type -> handler."""
        handlers: dict[type, Callable[[Request[Any]], Outcome]] = {
            TrainMerged: self.train_merged,
            TrainLora: self.train_lora,
            Forward: self.forward,
            ForwardBackward: self.forward_backward,
            OptimStep: self.optim_step,
            ExportHf: self.export_hf,
            SaveCheckpoint: self.save_checkpoint,
            LoadCheckpoint: self.load_checkpoint,
            LoadAdapter: self.load_adapter,
            NewAdapter: self.new_adapter,
        }
        return {kind: partial(self._noted, handler) for kind, handler in handlers.items()}

    def _noted(self, handler: Callable[[Request[Any]], Outcome], request: Request[Any]) -> Outcome:
        """Add what the client must learn to the result's warnings."""
        outcome = handler(request)
        if notes := self._trainer.notes:
            outcome.result["warnings"] = [*outcome.result.get("warnings", ()), *notes]
            self._trainer.notes = []
        return outcome

    # ------------------------------------------------------------ training

    def train_merged(self, request: Request[TrainMerged]) -> Outcome:
        """Take the job's steps and save a checkpoint, the moments in the background if the steps
        could be made again."""
        sent, trainer = request.sent, self._trainer
        base, behind = self._base(), trainer.behind
        behind.step_waited_s = behind.save_waited_s = 0.0
        folder = Path(sent.checkpoint_dir)
        is_recorded = request.link is not None and sent.version in self._recorded
        with kernel_trace.recorded(kernel_trace.path_of(folder) if is_recorded else None):
            result, train_s = self._train(request, is_version=True)
        trainer.before_save()
        started = time.monotonic()
        step = None
        if base is not None:
            step = checkpoint.Step(base=base, request=packed(sent, request.buffers))
        self.removal.wait_for(folder)
        checkpoint.save(
            trainer,
            folder,
            version=sent.version,
            step=step,
            meanwhile=partial(self.ahead.while_writing, request.link),
        )
        seconds = self._seconds(request, train_s, started)
        seconds["wait_for_save"] = behind.step_waited_s + behind.save_waited_s
        seconds |= {"ahead": self.ahead.seconds, "begun": self.ahead.taken_s}
        result |= {"version": sent.version, "seconds": seconds}
        return Outcome(result=result | self._delete(request))

    def _delete(self, request: Request[Any]) -> dict[str, Any]:
        """Begin to delete old checkpoints, on rank 0, once the new one is complete."""
        if request.link is None:
            return {}
        not_deleted = self.removal.start([Path(folder) for folder in request.sent.delete_after])
        for folder, reason in not_deleted.items():
            log.warning("cannot delete the old checkpoint %s: %s", folder, reason)
        return {"not_deleted": not_deleted} if not_deleted else {}

    def _base(self) -> OnDisk | None:
        """Return the checkpoint from which this job's step could be made again. None: the job saves
        everything at once, as in memory mode exit, where the trainer ends with the job."""
        is_last = self._model.config.memory == "exit"
        return None if is_last else checkpoint.base_of(self._trainer)

    def train_lora(self, request: Request[TrainLora]) -> Outcome:
        """Take the job's steps and save only the adapter."""
        self._model.need_adapters("TrainLora (use TrainMerged)")
        folder = request.message.output_dir
        result, train_s = self._train(request)
        started = time.monotonic()
        checkpoint.save_adapter(self._model, Path(folder))
        seconds = self._seconds(request, train_s, started)
        return Outcome(result=result | {"output_dir": folder, "seconds": seconds})

    def _train(
        self, request: Request[Any], *, is_version: bool = False
    ) -> tuple[dict[str, Any], float]:
        """Take the job's steps. Returns their part of the result, and their seconds.

        Args:
            is_version: whether the merged weights will be served. If so, measure how much of the
                update they contain.
        """
        message: TrainStep = request.message
        request.progress("training")
        started = time.monotonic()
        batch = self.ahead.take(message, request.buffers, request.link)
        if batch is None:
            self._trainer.begin_peak()
            batch = steps.batch_of(self._trainer, message, request.buffers)
        is_on_policy = self._trainer.steps_since_sent == 0
        self._trainer.sent.compared = None
        split: dict[str, float] = {}
        if gap_split.is_due(self._trainer, message.loss):
            split = gap_split.metrics(self._trainer, batch, message.loss)

        def on_step(step: steps.Step, count: int) -> None:
            request.steps_taken += step.is_taken
            if count > 1:
                request.progress("training", metrics=step.metrics)

        done = steps.train(self._trainer, batch, message, on_step=on_step)
        result: dict[str, Any] = {
            "metrics": steps.total_metrics(done) | split,
            "steps": [s.metrics for s in done],
            "warnings": [],
        }
        if is_on_policy:
            result["metrics"] = result["metrics"] | self._compared()
            result["warnings"] = [
                *self._warnings(request, done[0].used.sums, batch, message.loss),
                *_logged(request, gap_split.warnings(split, dtype=self._model.config.dtype)),
            ]
        serves_merged = self._model.config.serves_merged
        if is_version and serves_merged and not self._model.trains_all:
            self._measure_share(request, result)
        train_s = time.monotonic() - started
        request.progress("saving", metrics=result["metrics"])
        return result, train_s

    def _warnings(
        self, request: Request[Any], sums: StepSums, batch: Batch, loss: LossSpec
    ) -> list[str]:
        """Return and log the warnings about the gap between trainer and sampler."""
        dtype = self._model.config.dtype
        texts = gap.warnings(sums, loss, dtype=dtype, temperatures_T=batch.temperatures_T)
        compared = self._trainer.sent.compared
        if compared is not None:
            texts = [*texts, *compared.warnings(self._model.config.model)]
        return _logged(request, texts)

    def _compared(self) -> dict[str, float]:
        """The metrics of exact numerics; none if nothing was compared."""
        compared = self._trainer.sent.compared
        return {} if compared is None else compared.metrics()

    def _measure_share(self, request: Request[Any], result: dict[str, Any]) -> None:
        """Add to a result the share of the update that its merged weights contain."""
        found = served_share.metrics(self._model)
        result["metrics"] = result["metrics"] | found  # a single step has the same dict
        mode, dtype = self._model.rounding.mode, self._model.config.dtype
        texts = served_share.warnings(found, mode=mode, dtype=dtype)
        result["warnings"] = [*result["warnings"], *_logged(request, texts)]

    def _seconds(
        self, request: Request[Any], train_s: float, save_began: float
    ) -> dict[str, float]:
        save_s = time.monotonic() - save_began
        return {"train": train_s, "save": save_s, **self._to_first_forward(request)}

    def _to_first_forward(self, request: Request[Any]) -> dict[str, float]:
        """Seconds from the request's receipt to its first forward pass."""
        return {"to_first_forward": self._trainer.first_forward_s - request.received_s}

    def forward_backward(self, request: Request[ForwardBackward]) -> Outcome:
        """Add a batch's gradients to the pending ones."""
        message, trainer = request.message, self._trainer
        request.progress("training")
        started = time.monotonic()
        trainer.begin_peak()
        batch = steps.batch_of(self._trainer, request.message, request.buffers)
        batch = batch.scoring_all() if message.returns_logprobs else batch
        trainer.sent.compared = None
        sums, logprobs_T = trainer.forward_backward(
            batch, message.loss, loss_weight=message.loss_weight
        )
        warnings = []
        if trainer.steps_since_sent == 0:
            warnings = self._warnings(request, sums, batch, message.loss)
        seconds = {"forward_backward": time.monotonic() - started}
        usage = trainer.usage(len(batch.tokens_T), seconds=seconds["forward_backward"])
        return Outcome(
            result={
                "metrics": sums.metrics(message.loss.normalize_by) | usage | self._compared(),
                "warnings": warnings,
                "pending_batches": trainer.pending.num_batches,
                "seconds": seconds | self._to_first_forward(request),
            },
            **(_buffers(logprobs=logprobs_T) if message.returns_logprobs else {}),
        )

    def optim_step(self, request: Request[OptimStep]) -> Outcome:
        """Take one step with the pending gradients."""
        request.progress("training")
        self._trainer.begin_peak()
        metrics = self._trainer.optim_step(request.message.optim)
        return Outcome(result={"metrics": metrics, "seconds": {"optim": metrics["seconds_optim"]}})

    # ------------------------------------------------------------ scoring

    def forward(self, request: Request[Forward]) -> Outcome:
        """Return log-prob and entropy of each marked token."""
        message = request.message
        request.progress("forward")
        started = time.monotonic()
        batch = decode_forward(
            specs=message.tensors,
            buffers=request.buffers,
            vocab_size=self._model.vocab_size,
            max_length=self._model.max_length,
            allowed_token_ids=message.allowed_token_ids,
        )
        logprobs_T, entropy_T = self._trainer.forward(
            batch,
            allowed_token_ids=message.allowed_token_ids,
            mode=None if message.adapters else "base",
        )
        seconds = {"forward": time.monotonic() - started} | self._to_first_forward(request)
        return Outcome(
            result={"seconds": seconds}, **_buffers(logprobs=logprobs_T, entropy=entropy_T)
        )

    # ------------------------------------------------------------ saving and loading

    def export_hf(self, request: Request[ExportHf]) -> Outcome:
        """Write the merged model as an HF checkpoint."""
        message = request.message
        request.progress("exporting")
        started, folder = time.monotonic(), message.output_dir
        files = export_hf(
            self._model,
            self._exporter,
            Path(folder),
            shard_bytes=message.shard_bytes,
            fp8_like=None if message.fp8_like is None else Path(message.fp8_like),
        )
        seconds = {"export": time.monotonic() - started}
        return Outcome(result={"output_dir": folder, "files": files, "seconds": seconds})

    def save_checkpoint(self, request: Request[SaveCheckpoint]) -> Outcome:
        """Save the trainer's state."""
        message, trainer = request.message, self._trainer
        request.progress("saving")
        trainer.before_save()
        started, folder = time.monotonic(), message.checkpoint_dir
        self.removal.wait_for(Path(folder))
        checkpoint.save(
            trainer, Path(folder), version=request.sent.version, client_state=message.client_state
        )
        result = {
            "version": request.sent.version,
            "checkpoint_dir": folder,
            "pending_batches": trainer.pending.num_batches,
            "seconds": {"save": time.monotonic() - started},
        }
        return Outcome(result=result | self._delete(request))

    def load_checkpoint(self, request: Request[LoadCheckpoint]) -> Outcome:
        """Load the trainer's state."""
        request.progress("loading")
        started = time.monotonic()
        self.removal.wait_for(Path(request.message.checkpoint_dir))
        loaded = remake.load(self._trainer, Path(request.message.checkpoint_dir))
        return Outcome(
            result={
                "version": loaded.version,
                "client_state": loaded.client_state,
                "dropped_batches": loaded.dropped_batches,
                "rng_restored": loaded.rng_restored,
                "adapter_changed": loaded.adapter_changed,
                "warnings": list(loaded.notes),
                "seconds": {"load": time.monotonic() - started},
            }
        )

    def load_adapter(self, request: Request[LoadAdapter]) -> Outcome:
        """Replace the adapter by one in PEFT's format."""
        request.progress("loading")
        started, folder = time.monotonic(), request.message.adapter_dir
        self.removal.wait_for(Path(folder))
        dropped = self._trainer.load_adapter(Path(folder))
        seconds = {"load": time.monotonic() - started}
        return Outcome(
            result={"adapter_dir": folder, "dropped_batches": dropped, "seconds": seconds}
        )

    def new_adapter(self, request: Request[NewAdapter]) -> Outcome:
        """Replace the adapter by a fresh one."""
        request.progress("making an adapter")
        started, trainer = time.monotonic(), self._trainer
        lora = _new_lora(request.message, trainer.model.config.lora)
        checkpoint.settle(trainer)
        planned = trainer.plan_adapter(lora, seed=request.message.seed)
        with trainer.changing():
            dropped = trainer.use_adapter(planned)
            trainer.micro_batch_tokens = pack_size.tokens_for(trainer)
        return Outcome(
            result={
                "rank": lora.rank,
                "alpha": lora.alpha,
                "targets": list(lora.targets),
                "trainable_parameters": trainer.model.num_parameters,
                "adapter_changed": True,
                "dropped_batches": dropped,
                "seconds": {"make": time.monotonic() - started},
            }
        )


def _logged(request: Request[Any], texts: list[str]) -> list[str]:
    """Log warnings about a request, on rank 0. Returns them."""
    for text in texts if request.link is not None else ():
        log.warning("%s: %s", request.id, text)
    return texts


def _buffers(**results: torch.Tensor) -> dict[str, Any]:
    """The fields of an outcome with these of FORWARD_RESULTS."""
    tensors = tuple(
        TensorSpec(name=n, dtype=FORWARD_RESULTS[n], shape=tuple(t.shape))  # type: ignore[arg-type]
        for n, t in results.items()
    )
    buffers = tuple(t.contiguous().numpy().tobytes() for t in results.values())
    return {"tensors": tensors, "buffers": buffers}


def _new_lora(message: NewAdapter, present: LoraConfig) -> LoraConfig:
    """The present settings with what the message names.

    Raises:
        ConfigError: they do not go together; names the field.
    """
    asked = message.model_dump(include={"rank", "alpha", "targets"}, exclude_none=True)
    try:
        return LoraConfig.model_validate(present.model_dump() | asked)
    except ValidationError as error:
        raise ConfigError(f"NewAdapter: {error.errors(include_url=False)[0]['msg']}") from error
