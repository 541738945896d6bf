"""The optimizer steps of one job: a batch cut into mini-batches, gone over several times.

Each step is `forward_backward`, then `optim_step`, as if a client had sent them; what they need is checked for all mini-batches before the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from orchestrator.protocol.messages import TrainStep
from trainer_node.batch import Batch, BatchError
from trainer_node.sums import Pending, StepSums

if TYPE_CHECKING:
    from trainer_node.runtime import TrainerRuntime

log = logging.getLogger("splice.trainer")
Metrics = dict[str, float]
_ADDED_UP = ("num_batches", "seconds_optim", "seconds_forward_backward")


def mini_batches(batch: Batch, size: int | None) -> list[Batch]:
    """Of so many sequences each, in order, the last one of what is left; None: all in one.

    Raises:
        BatchError: one of them carries no loss.
    """
    count = len(batch.lengths)
    if size is None or size >= count:  # checked when it was decoded
        return [batch]
    ends = [0, *accumulate(batch.lengths)]
    pieces: list[Batch] = []
    for first in range(0, count, size):
        last = min(first + size, count)
        piece = _part(batch, batch.lengths[first:last], slice(ends[first], ends[last]))
        if not piece.num_loss_tokens:
            raise BatchError(
                f"sequences {first} to {last - 1}: loss_mask is 0 everywhere, so mini-batch {len(pieces)} has nothing to learn from"
            )
        pieces.append(piece)
    return pieces


def _part(batch: Batch, lengths: tuple[int, ...], rows: slice) -> Batch:
    """The sequences of these rows."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name.endswith("_T")}
    changed: dict[str, Any] = {name: None if t is None else t[rows] for name, t in tensors.items()}
    return replace(batch, lengths=lengths, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was taken or skipped."""

    metrics: Metrics
    """`TrainerRuntime.train_step`'s; of a skipped one `skipped` = 1 and skipped_steps."""
    used: Pending
    """What it was made of."""

    @property
    def is_taken(self) -> bool:
        """Whether weights and optimizer went on."""
        return "skipped" not in self.metrics


def train(runtime: TrainerRuntime, batch: Batch, message: TrainStep, *, on_step: Callable[[Step, int], None]) -> list[Step]:
    """All steps of a job. One whose gradient is not finite is skipped, as always, and the others go on. `max_logprob_gap` holds for the first
    step alone, because later ones are off policy.

    Args:
        on_step: called after each step, with the number of all.

    Raises:
        ConfigError: something is refused; nothing has changed.
        LogprobGapError: the first step's gap is too large; no step was taken.
        NonFiniteGradient: not a single step was taken.
        Exception: anything later. The steps before it stand; a note says how many.
    """
    from trainer_node.runtime import NonFiniteGradient

    accumulation = message.grad_accumulation_sequences
    batch = runtime.check(batch, message.loss, grad_accumulation_sequences=accumulation)
    pieces = mini_batches(batch, message.mini_batch_sequences) * message.epochs
    steps: list[Step] = []
    loss = message.loss
    for piece in pieces:
        try:
            metrics = runtime.train_step(piece, loss, message.optim, grad_accumulation_sequences=accumulation)
        except NonFiniteGradient as error:
            if len(steps) == len(pieces) - 1 and not any(s.is_taken for s in steps):
                raise
            log.warning("step %d of %d was skipped: %s", len(steps) + 1, len(pieces), error)
            metrics = {"skipped": 1.0, "skipped_steps": float(runtime.num_skipped_steps)}
        except BaseException as error:
            taken = sum(s.is_taken for s in steps)
            if taken:
                error.add_note(
                    f"Of the job's {len(pieces)} optimizer steps {taken} had been taken and stand; nothing was saved."
                )
            raise
        steps.append(Step(metrics=metrics, used=runtime.used))
        on_step(steps[-1], len(pieces))
        loss = message.loss.model_copy(update={"max_logprob_gap": None})
    return steps


def together(steps: Sequence[Step]) -> Metrics:
    """The metrics of the steps that were taken, as of one: loss and means over all their tokens, the mean of grad_norm, seconds added up."""
    taken = [s for s in steps if s.is_taken]
    if len(steps) == 1:
        return taken[0].metrics
    sums = sum((s.used.sums for s in taken), StepSums())
    loss = sums.loss / sum(s.used.denominator for s in taken)
    return sums.metrics(taken[0].used.normalize_by) | {
        "loss": loss,
        "grad_norm": sum(s.metrics["grad_norm"] for s in taken) / len(taken),
        **{name: sum(s.metrics[name] for s in taken) for name in _ADDED_UP},
        "skipped_steps": steps[-1].metrics["skipped_steps"],
    }
