"""Begins the next job's batch while the present job's checkpoint is written.

    NextBatch (the link of rank 0) -> while_writing: pack after pack, while threads write
    -> take: the job with the same batch and loss continues after these packs

The weights stay as they are between the two, and a step adds up its packs in order. It is therefore
the same step. A pack begins if at least half of it fits into the rest of the write, because the
publication waits for a pack that has begun. Packs of a batch that does not follow are dropped. They
cost only time in which the trainer would have waited for the write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import NextBatch, TrainStep
from orchestrator.protocol.node_link import NodeLink
from trainer_node.model import leftovers
from trainer_node.ranks import gpu, objects
from trainer_node.ranks.lockstep import Lockstep, has_diverged
from trainer_node.training import steps
from trainer_node.training.batch import Batch
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")
LeftS = Callable[[], float | None]
"""Seconds until a write ends; None: not known yet."""
LEAST_SHARE = 0.5
"""Share of a pack that must fit into the rest of the write."""
POLL_S = 0.002
_STOP, _RUN, _BEGIN = 0, 1, 2
_REFUSALS = frozenset({"BatchError", "ConfigError", "AdapterError"})


class Ahead:
    """One rank's work on the next batch.

    Attributes:
        seconds: of the last `while_writing` that went into the next batch.
        taken_s: seconds of the packs that the last `take` gave its job.
        has_diverged: a pack failed in a way that may leave the ranks out of step. The process has
            to end after the present job, which needs no more than the control group.
    """

    def __init__(self, trainer: Trainer, lockstep: Lockstep) -> None:
        self._trainer, self._lockstep = trainer, lockstep
        self._message: TrainStep | None = None
        self._buffers: Sequence[bytes] = ()
        self._begin_s = 0.0
        """Seconds that it took to begin the last batch."""
        self._may = True
        self.seconds, self.taken_s, self.has_diverged = 0.0, 0.0, False

    # ------------------------------------------------------------ while a job saves

    def while_writing(self, link: NodeLink | None, left_s: LeftS) -> None:
        """Run packs of the next batch, if it has come, until the write is about to end. A
        collective.

        Args:
            left_s: asked only on rank 0.
        """
        self.seconds = 0.0
        if not self._all_may():
            return
        while order := self._shared(_STOP if link is None else self._order(link, left_s)):
            began = time.monotonic()
            if order == _BEGIN:
                envelope = None
                if link is not None:
                    envelope, link.next_batch = link.next_batch, None
                envelope = self._lockstep.broadcast(envelope)
                self._tried(lambda: self._begin(envelope))  # noqa: B023  - called at once
                self._begin_s = time.monotonic() - began
            else:
                self._tried(self._trainer.run_begun)
            self.seconds += time.monotonic() - began

    def _all_may(self) -> bool:
        """Pipeline stages run all packs together. In other memory modes the gradients would move
        to the host, or end with the process. Rank 0 may hold the other ranks' adapters, which the
        pack size does not know of."""
        config = self._trainer.model.config
        if not self._may or config.parallel.pipeline > 1 or config.memory != "resident":
            return False  # the same on all ranks
        everyones = objects.all_gather(
            self._trainer.has_room, group=self._trainer.model.control_group
        )
        return all(everyones)

    def _shared(self, order: int) -> int:
        """Rank 0's order."""
        if dist.get_world_size() == 1:
            return order
        return int(objects.broadcast(order, group=self._trainer.model.control_group))

    def _order(self, link: NodeLink, left_s: LeftS) -> int:
        """What all ranks do now; waits while there is nothing to do and the write continues."""
        while (left := left_s()) != 0:
            begun, told = self._trainer.begun, link.next_batch
            if begun is not None and begun.is_whole:
                return _STOP
            if begun is not None and left is not None:
                return _RUN if left >= LEAST_SHARE * self._pack_s(begun.next_tokens) else _STOP
            if begun is None and told is not None and left is not None:
                assert isinstance(told.message, NextBatch)
                if not can_begin(told.message.job):
                    return _STOP
                pack_s = self._pack_s(self._trainer.micro_batch_tokens, told.message.job)
                return _BEGIN if left >= self._begin_s + LEAST_SHARE * pack_s else _STOP
            time.sleep(POLL_S)
        return _STOP

    def _pack_s(self, tokens: int, message: TrainStep | None = None) -> float:
        """Seconds of a pack, of a batch at most, from those of the last step."""
        used, ranks = self._trainer.used, parallel_state.get_data_parallel_world_size()
        if message is not None:
            tokens = min(tokens, _shape_of(message, "tokens") // ranks)
        return used.seconds * ranks * tokens / max(1, used.num_rows - used.num_shared)

    def _begin(self, envelope: Envelope | None) -> None:
        assert envelope is not None
        assert isinstance(envelope.message, NextBatch)
        message = envelope.message.job
        batch = steps.batch_of(self._trainer, message, envelope.buffers)
        self._trainer.begin(batch, message.loss)
        self._message, self._buffers = message, envelope.buffers

    def _tried(self, function: Callable[[], None]) -> None:
        """Call it on every rank. A failure ends the work ahead, and not the present job."""
        own: Exception | None = None
        try:
            function()
        except Exception as error:  # noqa: BLE001  - the present job must not fail for the next one
            own = gpu.without_frames(error, self._trainer.model.device)
        failures = self._lockstep.compare(own)
        if not failures:
            return
        self.drop()
        leftovers.drop(self._trainer.model.modules)
        # What is refused, the next job says again. After anything else the next packs may fail too.
        is_refusal = all(failure.kind in _REFUSALS for failure in failures)
        self._may = self._may and is_refusal
        self.has_diverged = has_diverged(failures, world_size=dist.get_world_size())
        log.log(
            logging.INFO if is_refusal else logging.WARNING,
            "the next batch is not begun: %s",
            failures[0],
        )
        if self._trainer.model.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ the next job

    def take(
        self, message: TrainStep, buffers: Sequence[bytes], link: NodeLink | None
    ) -> Batch | None:
        """Return the begun batch for the job's first step, or None if it is not this job's. Any
        other begun batch is dropped."""
        if link is not None:  # announced too late
            late = link.next_batch
            if (
                late is not None
                and isinstance(late.message, NextBatch)
                and _are_same(late.message.job, late.buffers, message, buffers)
            ):
                link.next_batch = None
        begun, announced = self._trainer.begun, self._message
        self.taken_s = 0.0
        if begun is None or announced is None:
            return None
        if not _are_same(announced, self._buffers, message, buffers):
            self.drop()
            return None
        self._message, self._buffers = None, ()
        self._trainer.first_forward_s = time.monotonic()
        self.taken_s = begun.seconds
        return begun.batch

    def drop(self) -> None:
        """Forget what was begun."""
        self._message, self._buffers = None, ()
        self._trainer.drop_begun()


def can_begin(message: TrainStep) -> bool:
    """Whether a batch's packs can run before its job. The batch must make a single step, and its
    loss must need no additional passes."""
    size = message.mini_batch_sequences
    is_one_step = size is None or size >= _shape_of(message, "sequence_lengths")
    return is_one_step and not message.loss.needs_other_passes


def _shape_of(message: TrainStep, name: str) -> int:
    """Length of a tensor of the batch, which has it."""
    return next(spec.shape[0] for spec in message.tensors if spec.name == name)


def _are_same(
    announced: object, its: Sequence[bytes], message: TrainStep, buffers: Sequence[bytes]
) -> bool:
    """Whether batch, loss and cut are the same; `optim` counts only after the passes."""
    names = [name for name in TrainStep.model_fields if name != "optim"]
    return all(getattr(announced, n) == getattr(message, n) for n in names) and all(
        np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))
        for a, b in zip(its, buffers, strict=True)
    )
