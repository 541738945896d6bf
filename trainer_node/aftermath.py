"""Gives back what a failed request took, and says whether the process can continue.

    a request failed -> collect, empty the cache -> measure what nothing of ours accounts for
    more than at the start, or a state that nobody knows -> the process ends and is started again

A pack's size leaves room for a publication and for fragmentation. Memory beyond that is missing in
every later pass.
"""

from __future__ import annotations

import gc
import logging

import psutil
import torch

from trainer_node.model import leftovers
from trainer_node.training import pack_size
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")


class Aftermath:
    """One rank's memory after failed requests; made once the trainer is ready."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._at_start = self._unaccounted()

    def why_not(self) -> str:
        """Free what a failed request left. Returns why the process cannot continue, or nothing."""
        if self._trainer.is_unknown:
            return "the failure came while the state changed, so nobody knows what it is"
        is_cuda = self._trainer.model.device.type == "cuda"
        try:
            if is_cuda:
                torch.cuda.synchronize()
        except RuntimeError as error:  # a CUDA fault stays with its process; see `ranks.gpu`
            first_line, _, _ = str(error).partition("\n")  # PyTorch's advice follows
            return f"the GPU cannot be used any more ({first_line})"
        leftovers.drop(self._trainer.model.modules)
        gc.collect()  # exceptions in cycles that are not ours
        if is_cuda:
            torch.cuda.empty_cache()
        left = self._unaccounted() - self._at_start
        log.info(
            "memory_after_failure: %.2f GB more than at the start, of %.2f GB that may be",
            left / 1e9,
            self._allowed() / 1e9,
        )
        if left <= self._allowed():
            return ""
        return f"{left / 1e9:.1f} GB of the failed request's memory did not come back"

    def _unaccounted(self) -> int:
        """Bytes in use that are neither weights, gradients nor the optimizer's."""
        return used_bytes(self._trainer.model.device) - self._trainer.resident_bytes()

    def _allowed(self) -> float:
        """Bytes that may be in use more than at the start."""
        if self._trainer.model.device.type == "cuda":
            return pack_size.kept_bytes()
        return float("inf")  # the allocator decides what a CPU process gives back


def used_bytes(device: torch.device) -> int:
    """Bytes of the GPU's tensors, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
