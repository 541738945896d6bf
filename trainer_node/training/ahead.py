"""Begins the next job's batch while the present job's checkpoint is written.

    NextBatch (the link of rank 0) -> while_writing: pack after pack, beside the threads that write
    -> take: the job with the same batch and loss goes on behind these packs

The weights stay as they are between the two, and a step adds up its packs in order. It is therefore
the same step. A pack begins if at least half of it fits into the rest of the write, because the
publication waits for a pack that has begun. What is not wanted is dropped, and costs nothing but
the time of the write.
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
from trainer_node import objects
from trainer_node.lockstep import Lockstep, has_diverged
from trainer_node.training import steps
from trainer_node.training.batch import Batch
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")
LeftS = Callable[[], float | None]
"""Seconds until a write ends; None: not known yet."""
LEAST_SHARE = 0.5
"""Of a pack, that must fit into the rest of the write."""
POLL_S = 0.002
_STOP, _RUN, _BEGIN = 0, 1, 2


class Ahead:
    """One rank's work on the next batch."""

    def __init__(self, trainer: Trainer, lockstep: Lockstep) -> None:
        self._trainer, self._lockstep = trainer, lockstep
        self._message: NextBatch | None = None
        self._buffers: Sequence[bytes] = ()
        self.seconds = 0.0
        """Of the last `while_writing` that went into packs."""

    # ------------------------------------------------------------ while a job saves

    def while_writing(self, link: NodeLink | None, left_s: LeftS) -> None:
        """Run packs of the next batch, if it has come, until the write is about to end. A
        collective.

        Args:
            left_s: asked on rank 0 alone.
        """
        self.seconds = 0.0
        if not self._may:
            return
        while order := self._shared(_STOP if link is None else self._order(link, left_s)):
            began = time.monotonic()
            if order == _BEGIN:
                envelope = None
                if link is not None:
                    envelope, link.next_batch = link.next_batch, None
                self._begin(self._lockstep.broadcast(envelope))
            else:
                self._run()
            self.seconds += time.monotonic() - began

    @property
    def _may(self) -> bool:
        """Pipeline stages run all packs together. In other memory modes the gradients would move
        to the host, or end with the process."""
        config = self._trainer.model.config
        return config.parallel.pipeline == 1 and config.memory == "resident"

    def _shared(self, order: int) -> int:
        """Rank 0's order."""
        if dist.get_world_size() == 1:
            return order
        return int(objects.broadcast(order, group=self._trainer.model.control_group))

    def _order(self, link: NodeLink, left_s: LeftS) -> int:
        """What all ranks do now; waits while there is nothing to do and the write goes on."""
        while (left := left_s()) != 0:
            begun = self._trainer.begun
            if begun is None and link.next_batch is not None:
                return _BEGIN
            if begun is not None and begun.is_whole:
                return _STOP
            if begun is not None and left is not None:
                fits = left >= LEAST_SHARE * self._pack_s(begun.next_tokens)
                return _RUN if fits else _STOP
            time.sleep(POLL_S)
        return _STOP

    def _pack_s(self, tokens: int) -> float:
        """Seconds of a pack, from those of the last step."""
        used = self._trainer.used
        data_ranks = parallel_state.get_data_parallel_world_size()
        return used.seconds * data_ranks * tokens / max(1, used.num_rows)

    def _begin(self, envelope: Envelope | None) -> None:
        assert envelope is not None
        message = envelope.message
        assert isinstance(message, NextBatch)
        try:
            batch = steps.batch_of(self._trainer, message, envelope.buffers)
        except Exception as error:  # noqa: BLE001  - the job with this batch says it to its client
            log.info("the next batch is not begun: %s", error)
            return
        size = message.mini_batch_sequences
        is_one_step = size is None or size >= len(batch.lengths)
        needs_more_passes = message.loss.kl is not None and message.loss.kl.reference != "given"
        if is_one_step and not needs_more_passes:
            self._message, self._buffers = message, envelope.buffers
            self._trainer.begin(batch, message.loss)

    def _run(self) -> None:
        own: Exception | None = None
        try:
            self._trainer.run_begun()
        except Exception as error:  # noqa: BLE001  - the present job must not fail for the next one
            own = error
        failures = self._lockstep.compare(own)
        if not failures:
            return
        self.drop()
        if has_diverged(failures, world_size=dist.get_world_size()):
            raise own or RuntimeError(f"rank {failures[0].rank}: {failures[0]}")
        log.warning("the next batch could not be begun: %s", failures[0])
        if self._trainer.model.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ the next job

    def take(
        self, message: TrainStep, buffers: Sequence[bytes], link: NodeLink | None
    ) -> Batch | None:
        """Return the batch if it is this job's and was begun, for the job's first step. Drops
        another one."""
        if link is not None:  # announced too late
            late = link.next_batch
            if late is not None and _are_same(late.message, late.buffers, message, buffers):
                link.next_batch = None
        begun, announced = self._trainer.begun, self._message
        if begun is None or announced is None:
            return None
        if not _are_same(announced, self._buffers, message, buffers):
            self.drop()
            return None
        self._message, self._buffers = None, ()
        self._trainer.first_forward_s = time.monotonic()
        return begun.batch

    def drop(self) -> None:
        """Forget what was begun."""
        self._message, self._buffers = None, ()
        self._trainer.drop_begun()


def _are_same(
    announced: object, its: Sequence[bytes], message: TrainStep, buffers: Sequence[bytes]
) -> bool:
    """Whether batch, loss and cut are the same; `optim` counts only after the passes."""
    names = [name for name in TrainStep.model_fields if name != "optim"]
    return all(getattr(announced, n) == getattr(message, n) for n in names) and all(
        np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))
        for a, b in zip(its, buffers, strict=True)
    )
