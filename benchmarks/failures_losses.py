"""Losses that fail as a batch may: loss modules of the benchmark `failures`."""

from __future__ import annotations

import os
import signal
import threading

import torch

from splice.losses import LossOutput, register_loss

SPARE_BYTES = 16 << 20
LIMIT_S = 0.3
"""Long enough for the optimizer step. The benchmark sends its next job later."""


def plain(log_probs_N: torch.Tensor) -> LossOutput:
    """Cross-entropy."""
    return LossOutput(loss=-log_probs_N.sum(), num_clipped=log_probs_N.new_zeros(()))


@register_loss("ends_the_process")
def ends_the_process(log_probs_N: torch.Tensor) -> LossOutput:
    """As the kernel does when the host's memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)
    return plain(log_probs_N)


@register_loss("indexes_beyond_the_end")
def indexes_beyond_the_end(log_probs_N: torch.Tensor) -> LossOutput:
    """A device-side assert: no CUDA call of this process works afterwards."""
    index = torch.full((1,), log_probs_N.numel() + 7, device=log_probs_N.device)
    return plain(log_probs_N + log_probs_N.detach()[index])


@register_loss("leaves_no_memory_for_moments")
def leaves_no_memory_for_moments(log_probs_N: torch.Tensor) -> LossOutput:
    """From the end of this backward pass on, `LIMIT_S` long, the allocator gets nothing more. On a
    CPU, which has no such limit, the pass itself fails."""

    def limit() -> None:
        torch.cuda.empty_cache()
        whole = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + SPARE_BYTES) / whole
        )
        threading.Timer(LIMIT_S, torch.cuda.set_per_process_memory_fraction, (1.0,)).start()

    def at_the_start(_gradient: torch.Tensor) -> None:
        if not log_probs_N.is_cuda:
            raise torch.OutOfMemoryError("the benchmark said so")
        torch.autograd.Variable._execution_engine.queue_callback(limit)

    log_probs_N.register_hook(at_the_start)
    return plain(log_probs_N)
