"""Trains one rank's model: checked batches in, gradients, optimizer steps and metrics out.

    forward_backward (sums) ... forward_backward -> optim_step (reduce once, divide once, clip,
    AdamW)

Every method is a collective: all ranks call it with the same arguments. A loss is a sum over
tokens, and `optim_step` reduces and divides gradients once. A step therefore does not depend on the
cut into micro-batches, calls and ranks. If a call fails after it has begun, all pending gradients
are dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from orchestrator.errors import ErrorCode, SpliceError
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from trainer_node.adapters.dropout import key_of
from trainer_node.files.behind import Behind, OnDisk
from trainer_node.model import trainable
from trainer_node.model.model import Model
from trainer_node.model.offload import (
    HostCopies,
    free_bytes,
    peak_memory_bytes,
    storage_bytes,
    tensors_in,
)
from trainer_node.model.whole_adapters import read_on_all_ranks
from trainer_node.ranks import heap
from trainer_node.training import bits, gap, passes, served_weights
from trainer_node.training.batch import Batch, check_accumulation, check_fits, check_text
from trainer_node.training.gradients import finalize_gradients, global_norm
from trainer_node.training.losses import bind_loss
from trainer_node.training.optimizer import ShardedAdamW
from trainer_node.training.packing import Packs
from trainer_node.training.references import References
from trainer_node.training.scorer import Scorer
from trainer_node.training.sums import Pending, StepSums


class NonFiniteGradient(SpliceError, ArithmeticError):
    """The gradient's norm is not finite; the step was skipped and the weights are untouched."""

    code = ErrorCode.NON_FINITE_GRADIENT


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"


class NothingPending(SpliceError, RuntimeError):
    """An optimizer step without a forward_backward before it."""

    code = ErrorCode.NOT_READY
    remedy = "Send ForwardBackward first."


@dataclass(slots=True, kw_only=True)
class Begun:
    """A batch whose first packs ran before its job came."""

    batch: Batch
    loss: LossSpec
    packs: Packs
    reports: list[Any] = field(default_factory=list)
    """Reports of the packs that have run."""
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every pack has run."""
        return len(self.reports) == len(self.packs)

    @property
    def next_tokens(self) -> int:
        """Tokens of the next pack."""
        return self.packs.lengths[len(self.reports)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAdapter:
    """A fresh adapter that fits the model, with its optimizer."""

    adapter: trainable.Planned
    optimizer: ShardedAdamW


class Trainer(Scorer):
    """One rank's model, its optimizer, and the gradients that wait for a step."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.optimizer = ShardedAdamW(model.params)
        self.references = References(model)
        self.pending = self.used = Pending()
        """`used`: the gradients of the last optimizer step, taken or skipped."""
        self._resident = self._largest_peak = 0
        """Bytes of the GPU's tensors after the last step, and at most before the present job."""
        self.begun: Begun | None = None
        """The next job's batch. Nothing is pending meanwhile."""
        self.num_steps, self.num_skipped_steps = 0, 0
        self.steps_since_sent = 0
        """Optimizer steps since the weights were sent or loaded. 0: the next step should be on
        policy."""
        self.sent = bits.Sent(is_exact=model.config.numerics == "exact")
        self.split_at: int | None = None
        """`num_steps` at the last `gap_split`."""
        self._host_copies: HostCopies | None = None
        self.behind = Behind()
        self.on_disk: OnDisk | None = None
        """The last checkpoint that was saved or loaded. It may still be written."""
        self.is_unknown = False
        """Whether a change failed in the middle. After a whole load the state is known again."""
        self.notes: list[str] = []
        """What the next result must tell the client."""
        self.when_adapted: Callable[[], None] = lambda: None
        """Called after the model got other adapters."""
        self.before_save: Callable[[], None] = lambda: None
        """Called before a version is saved, with its weights in place."""

    # ------------------------------------------------------------ a step

    def train_step(self, batch: Batch, loss: LossSpec, optim: OptimParams) -> dict[str, float]:
        """`forward_backward`, then `optim_step` with all that is pending. Returns the latter's
        metrics."""
        self.forward_backward(batch, loss)
        return self.optim_step(optim)

    def forward_backward(
        self, batch: Batch, loss: LossSpec, *, loss_weight: float = 1.0
    ) -> tuple[StepSums, torch.Tensor]:
        """Add the gradient of `loss_weight` times the summed loss to the pending one.

        Nothing is reduced or divided yet. The caller runs `check` on the batch first.

        Returns the batch's own sums, and the log-probs that the pass computed: [T] on the CPU of
        every rank, with the adapters' dropout, and 0 where `scored_T` is. A batch that names no
        `scored_T` gets none.

        Raises:
            LogprobGapError: trainer and sampler are further apart than the loss allows.
            Exception: any later failure. Both drop pending gradients, and a note says so.
        """
        started = time.monotonic()
        try:
            batch = self.valued(batch, loss)
            if loss.kl is not None and not loss.kl.in_reward:
                batch = self.references.compared(batch, loss, self.forward)
            begun = self._take_begun(batch)
            packs = self._cut(batch) if begun is None else begun.packs
            reports = [] if begun is None else begun.reports
            left = packs.rest(len(reports)) if reports else packs
            reports = reports + self._losses(left, loss, loss_weight)
            sums = passes.reduce_sums(self.model, reports, batch, loss)
            gap.check(sums, loss)
            logprobs_T = torch.zeros(0)
            if batch.scored_T is not None:
                values = [report.log_probs_N[None] for report in reports]
                (logprobs_T,) = passes.gather_scores(self.model, batch, packs, values, rows=1)
            self.sent.compare(batch, loss, logprobs_T, steps=self.steps_since_sent)
        except BaseException as error:
            if dropped := self.drop_pending():
                error.add_note(
                    f"Gradients pending from {_batches(dropped)} before it were dropped with it."
                )
            raise
        self.pending = self.pending.plus(
            sums,
            normalize_by=loss.normalize_by,
            rows=len(batch.tokens_T),
            num_shared=packs.num_shared,
            recomputed_share=self.recomputed_share(packs),
            seconds=time.monotonic() - started + (0.0 if begun is None else begun.seconds),
        )
        return sums, logprobs_T

    def valued(self, batch: Batch, loss: LossSpec) -> Batch:
        """As the scorer's. With a KL term in the reward also with its reference's log-probs."""
        if loss.kl is not None and loss.kl.in_reward and batch.returns_T is None:
            batch = self.references.compared(batch, loss, self.forward)
        return super().valued(batch, loss)

    def _losses(self, packs: Packs, loss: LossSpec, weight: float) -> list[Any]:
        """Run packs forward and backward."""
        allowed_K = self._allowed(loss.allowed_token_ids)
        of_pack = partial(passes.loss, self.model, loss, allowed_K, weight)
        if not len(packs):
            return []
        with self._learning(), self.model.adapters.dropout.on(self._dropout_key()):
            return self._run(packs, of_pack, first_row=self.pending.num_rows)

    def _learning(self) -> contextlib.AbstractContextManager[None]:
        """What a forward and backward pass computes with."""
        if self.model.config.numerics == "adapters":
            return contextlib.nullcontext()
        has_merged = self.begun is not None and bool(self.begun.reports)
        return served_weights.of(self.model).all(merges=not has_merged)

    # ------------------------------------------------------------ ahead of a job

    def begin(self, batch: Batch, loss: LossSpec) -> None:
        """Cut a batch that was checked, so that `run_begun` runs its packs. No gradients are
        pending."""
        assert not self.pending.num_batches, "gradients are pending"
        self.begin_peak()
        self.begun = Begun(batch=batch, loss=loss, packs=self._cut(batch))

    def run_begun(self) -> None:
        """Run the next pack of the begun batch, and wait for the device."""
        begun, started = self.begun, time.monotonic()
        assert begun is not None
        at = len(begun.reports)
        begun.reports += self._losses(begun.packs.rest(at, at + 1), begun.loss, 1.0)
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
        begun.seconds += time.monotonic() - started

    def _take_begun(self, batch: Batch) -> Begun | None:
        """Return what was begun, if it is this batch."""
        begun = self.begun
        if begun is not None and begun.batch is not batch:
            self.drop_begun()
            return None
        self.begun = None
        return begun

    @property
    def has_room(self) -> bool:
        """Whether a pack fits into the GPU's free memory, judged by the largest pack so far."""
        if self.model.device.type != "cuda":
            return True
        largest = max(self._largest_peak, torch.cuda.max_memory_allocated())
        return free_bytes() >= largest - self._resident

    def drop_begun(self) -> None:
        """Forget the gradients of the begun batch; no others are pending."""
        if self.begun is not None:
            self.drop_pending()

    def drop_pending(self) -> int:
        """Forget accumulated gradients. Returns how many batches they came from."""
        dropped = self.pending.num_batches
        self.pending, self.begun = Pending(), None
        for p in self.model.params:
            p.drop_grad()
        return dropped

    def _dropout_key(self) -> int:
        """Another key for each optimizer step; the counters are in checkpoints."""
        return key_of(self.model.config.seed, self.num_steps, self.num_skipped_steps)

    # ------------------------------------------------------------ what is refused

    def check(
        self, batch: Batch, loss: LossSpec, *, grad_accumulation_sequences: int | None = None
    ) -> None:
        """Refuse what this model cannot train on, and read the KL term's reference adapter.

        Raises:
            ConfigError: the loss or the cut is refused. Nothing has changed.
        """
        bind_loss(loss)
        if loss.value is not None:
            self.model.need_value_head()
        self.pending.check(loss.normalize_by)
        if loss.kl is not None and loss.needs_reference_passes:
            self.model.need_adapters(
                f"a KL term with reference {loss.kl.reference!r} (send reference log-probs and "
                "use 'given')"
            )
        if loss.kl is not None and loss.kl.adapter_dir is not None:
            self.references.read(Path(loss.kl.adapter_dir))
        check_accumulation(
            grad_accumulation_sequences, dp_size=parallel_state.get_data_parallel_world_size()
        )
        check_fits(batch, self.longest_trained, self.longest_way)
        largest = max(self.micro_batch_tokens, *batch.lengths)
        passes.check_routing(self.model, batch, recomputes=self.share_of(largest) > 0)
        check_text(batch, getattr(self.model.hf_config, "tower_tokens", ()))

    # ------------------------------------------------------------ the optimizer

    def optim_step(self, optim: OptimParams) -> dict[str, float]:
        """Reduce the pending gradients, divide once, clip, step. Nothing is pending afterwards.

        Returns:
            The metrics that docs/training.md lists for a step.

        Raises:
            NothingPending: no forward_backward since the last step.
            NonFiniteGradient: the step was skipped; weights and optimizer are untouched.
        """
        started, pending = time.monotonic(), self.pending
        if not pending.num_batches:
            raise NothingPending("no gradients are pending: send ForwardBackward before OptimStep")
        self.used = pending
        try:
            grad_norm = self._step(optim, denominator=pending.denominator)
        except NonFiniteGradient as error:
            self.num_skipped_steps += 1
            error.add_note(
                "The step was skipped: weights and optimizer are untouched, the gradients of "
                f"{_batches(pending.num_batches)} "
                f"were dropped. Steps skipped so far: {self.num_skipped_steps}."
            )
            raise
        except BaseException as error:
            error.add_note(f"The gradients of {_batches(pending.num_batches)} were dropped.")
            raise
        finally:
            self.drop_pending()
        seconds_optim = time.monotonic() - started
        metrics = pending.sums.metrics(pending.normalize_by) | {
            "grad_norm": grad_norm,
            "lr": optim.lr,
            "num_batches": float(pending.num_batches),
            "skipped_steps": float(self.num_skipped_steps),
            "shared_tokens": float(pending.num_shared),
            "recomputed_share": pending.num_recomputed / max(1, pending.num_rows),
            "seconds_forward_backward": pending.seconds,
            "seconds_optim": seconds_optim,
        }
        metrics |= self.usage(pending.num_rows, seconds=pending.seconds + seconds_optim)
        self._round_as_configured()
        self.num_steps += 1
        self.steps_since_sent += bool(grad_norm)
        self.is_unknown = False
        if self.model.device.type == "cuda":
            self._resident = torch.cuda.memory_allocated()
        return metrics

    def _round_as_configured(self) -> None:
        """Round as the config says from now on. Loaded weights keep their version's rounding, but
        new weights have no version yet. The thresholds stay the run's."""
        adapters, mode = self.model.adapters, self.model.config.rounding
        adapters.rounding = replace(adapters.rounding, mode=mode)

    def begin_peak(self) -> None:
        """Let the metric `peak_memory_bytes` be that of the work that begins now."""
        if self.model.device.type == "cuda":
            self._largest_peak = max(self._largest_peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def usage(self, num_rows: int, *, seconds: float) -> dict[str, float]:
        """Metrics of speed, staleness and memory of work on `num_rows` tokens."""
        return {
            "tokens_per_s": num_rows / seconds,
            "staleness_steps": float(self.steps_since_sent),
            "peak_memory_bytes": float(peak_memory_bytes(self.model.device)),
        }

    @torch.no_grad()
    def _step(self, optim: OptimParams, *, denominator: float) -> float:
        """Returns the norm before clipping. A gradient of zeros changes nothing, although AdamW's
        moments would move the weights."""
        params, sequence_parallel = self.model.params, bool(self.model.provider.sequence_parallel)
        finalize_gradients(
            params, denominator=denominator or 1.0, sequence_parallel=sequence_parallel
        )
        norm = global_norm(params, self.model.device)
        if not torch.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {float(norm)}")
        if not norm:
            return 0.0
        # torch.nn.utils.clip_grad_norm_'s formula.
        factor = (
            None
            if optim.max_grad_norm is None
            else (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        )
        self.behind.may_step()
        self.optimizer.make_moments()
        self.is_unknown = True  # until `optim_step` has counted the step
        self.optimizer.step(optim, factor=factor)
        return float(norm)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change weights or optimizer in the block. If it fails, the state is unknown."""
        try:
            yield
        except BaseException:
            self.is_unknown = True
            raise

    def load_adapter(self, folder: Path) -> int:
        """Put a PEFT adapter in the place of the present one; the optimizer starts afresh.

        Returns the batches whose gradients were dropped.

        Raises:
            AdapterError: on every rank, it does not fit or is not whole; nothing changed.
        """
        self.model.need_adapters(f"loading the adapter {folder}")
        whole = read_on_all_ranks(self.model, folder)
        with self.changing():
            self.model.adapters.load(whole)
        self._round_as_configured()
        self.optimizer.state.clear()
        self.on_disk = None
        self.steps_since_sent, self.sent.version = 0, None
        return self.drop_pending()

    def plan_adapter(self, lora: LoraConfig, *, seed: int | None = None) -> PlannedAdapter:
        """Make a fresh adapter, and its optimizer. Nothing changes.

        Raises:
            ConfigError: it does not fit the model.
        """
        seed = self.model.config.seed if seed is None else seed
        planned = trainable.plan(self.model, lora, seed=seed)
        return PlannedAdapter(adapter=planned, optimizer=ShardedAdamW(planned.params))

    def use_adapter(self, planned: PlannedAdapter) -> int:
        """Put a planned adapter in the place of the present one; the optimizer starts afresh.

        The caller has settled the save in the background, which reads the moments, and finds the
        pack size again, all within `changing`.

        Returns the batches whose gradients were dropped.
        """
        model = self.model
        trainable.adapt(model, planned.adapter)
        self._round_as_configured()
        dropped = self.pending.num_batches
        self.pending, self.begun = Pending(), None
        self.optimizer = planned.optimizer
        self.references = References(model)
        self._host_copies = None
        self.on_disk = None
        self.steps_since_sent, self.sent.version = 0, None
        self.when_adapted()
        heap.free_replaced()  # modules and hooks refer to each other in cycles
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        return dropped

    # ------------------------------------------------------------ memory between jobs

    @property
    def is_offloaded(self) -> bool:
        """Whether `offload` was called after the last `reload`."""
        return self._host_copies is not None and self._host_copies.holds_data

    def offload(self) -> int:
        """Move every tensor of the model, adapters, optimizer and pending gradients to host memory;
        free the device's.

        The caller has settled the save in the background, which reads the moments.

        Returns the bytes that this rank holds on the host. A second call changes nothing.
        """
        is_cuda = self.model.device.type == "cuda"
        served_weights.release(self.model)
        if self._host_copies is None:
            self._host_copies = HostCopies(pinned=is_cuda)
        self._host_copies.take(self._held_tensors())
        if is_cuda:
            torch.cuda.empty_cache()
        return self._host_copies.nbytes

    def reload(self) -> None:
        """Undo `offload`: every tensor has its bytes again, and views stay views."""
        if self._host_copies is not None:
            self._host_copies.give_back()

    def resident_bytes(self) -> int:
        """Bytes of the model, adapters, optimizer, pending gradients and served weights where they
        compute."""
        return storage_bytes(self._held_tensors()) + served_weights.nbytes(self.model)

    def _held_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that is kept from one request to the next: weights, buffers, adapters,
        gradients, optimizer state."""
        for module in (*self.model.modules, *self.model.adapters.adapters):
            for param in module.parameters():
                yield param
                if param.grad is not None:
                    yield param.grad
            yield from module.buffers()
        yield from self.references.tensors()
        yield from (p.main_grad for p in self.model.params if p.main_grad is not None)
        yield from tensors_in([[p.param, p.param.grad] for p in self.model.params if p.is_value])
        yield from tensors_in(
            [[master for _, master in self.optimizer.masters], self.optimizer.state]
        )
