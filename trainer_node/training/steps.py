"""Takes the optimizer steps of one job: mini-batches of a batch, in one or more epochs.

Each step is `forward_backward`, then `optim_step`, as if a client had sent them. The caller has
checked the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

from orchestrator.protocol.messages import ForwardBackward, TrainStep
from trainer_node.training.batch import Batch, decode_batch
from trainer_node.training.sums import Pending, StepSums
from trainer_node.training.trainer import NonFiniteGradient, Trainer

log = logging.getLogger("splice.trainer")
Metrics = dict[str, float]
_ADDED_UP = ("num_batches", "seconds_optim", "seconds_forward_backward")


def batch_of(
    trainer: Trainer, message: TrainStep | ForwardBackward, buffers: Sequence[bytes]
) -> Batch:
    """Decode a request's batch and check it, before any part of the request runs.

    Raises:
        ConfigError: the batch or its loss is refused; nothing has changed.
    """
    batch = decode_batch(
        specs=message.tensors,
        buffers=buffers,
        vocab_size=trainer.model.vocab_size,
        max_length=trainer.model.max_length,
        loss=message.loss,
    )
    if trainer.model.config.numerics == "exact":  # each log-prob is compared
        batch = replace(batch, scored_T=batch.loss_mask_T != 0)
    accumulation = message.grad_accumulation_sequences
    trainer.check(batch, message.loss, grad_accumulation_sequences=accumulation)
    return batch


def mini_batches(batch: Batch, size: int | None) -> list[Batch]:
    """Cut a batch into mini-batches of `size` sequences, in order; None: all in one.

    The last one takes the remainder.
    """
    count = len(batch.lengths)
    if size is None or size >= count:  # checked when it was decoded
        return [batch]
    ends = [0, *accumulate(batch.lengths)]
    pieces: list[Batch] = []
    for first in range(0, count, size):
        last = min(first + size, count)
        pieces.append(part(batch, batch.lengths[first:last], slice(ends[first], ends[last])))
    return pieces


def part(batch: Batch, lengths: tuple[int, ...], rows: slice) -> Batch:
    """The sequences of these rows."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name.endswith("_T")}
    changed: dict[str, Any] = {name: None if t is None else t[rows] for name, t in tensors.items()}
    return replace(batch, lengths=lengths, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was taken or skipped."""

    metrics: Metrics
    """Metrics of `Trainer.train_step`; for a skipped step, `skipped` = 1 and skipped_steps."""
    used: Pending
    """The batches and sums of the step."""

    @property
    def is_taken(self) -> bool:
        """Whether weights and optimizer changed."""
        return "skipped" not in self.metrics


def train(
    trainer: Trainer, batch: Batch, message: TrainStep, *, on_step: Callable[[Step, int], None]
) -> list[Step]:
    """Take all steps of a job, whose batch has been checked.

    A step whose gradient is not finite is skipped, and the next one follows. `max_logprob_gap`
    applies only to the first step, because later ones are off policy.

    Args:
        on_step: called after each step, with the number of steps.

    Raises:
        LogprobGapError: the first step's gap is too large; no step was taken.
        NonFiniteGradient: not a single step was taken.
        Exception: anything later. Earlier steps are kept, and a note gives their number.
    """
    batch = trainer.valued(batch, message.loss)  # of the policy before the first step
    pieces = mini_batches(batch, message.mini_batch_sequences) * message.epochs
    steps: list[Step] = []
    loss = message.loss
    for piece in pieces:
        try:
            metrics = trainer.train_step(piece, loss, message.optim)
        except NonFiniteGradient as error:
            if len(steps) == len(pieces) - 1 and not any(s.is_taken for s in steps):
                raise
            log.warning("step %d of %d was skipped: %s", len(steps) + 1, len(pieces), error)
            metrics = {"skipped": 1.0, "skipped_steps": float(trainer.num_skipped_steps)}
        except BaseException as error:
            taken = sum(s.is_taken for s in steps)
            if taken:
                error.add_note(
                    f"Of the job's {len(pieces)} optimizer steps {taken} were taken and kept; "
                    "nothing was saved."
                )
            raise
        steps.append(Step(metrics=metrics, used=trainer.used))
        on_step(steps[-1], len(pieces))
        loss = message.loss.model_copy(update={"max_logprob_gap": None})
    return steps


def total_metrics(steps: Sequence[Step]) -> Metrics:
    """Return the metrics of all taken steps as one step's.

    Loss and means are over all tokens, grad_norm is the mean, and seconds are sums. lr and
    staleness are the first step's, peak memory and skipped steps the last one's.
    """
    taken = [s for s in steps if s.is_taken]
    if len(steps) == 1:
        return taken[0].metrics
    sums = sum((s.used.sums for s in taken), StepSums())
    loss = sums.loss / (sum(s.used.denominator for s in taken) or 1)
    return sums.metrics(taken[0].used.normalize_by) | {
        "loss": loss,
        "grad_norm": sum(s.metrics["grad_norm"] for s in taken) / len(taken),
        **{name: sum(s.metrics[name] for s in taken) for name in _ADDED_UP},
        "lr": taken[0].metrics["lr"],
        "skipped_steps": steps[-1].metrics["skipped_steps"],
        "shared_tokens": float(sum(s.used.num_shared for s in taken)),
        "recomputed_share": sum(s.used.num_recomputed for s in taken)
        / max(1, sum(s.used.num_rows for s in taken)),
        "tokens_per_s": sum(s.used.num_rows for s in taken) / sum(map(_seconds, taken)),
        "staleness_steps": taken[0].metrics["staleness_steps"],
        "peak_memory_bytes": taken[-1].metrics["peak_memory_bytes"],
    }


def _seconds(step: Step) -> float:
    return step.metrics["seconds_forward_backward"] + step.metrics["seconds_optim"]
