"""Losses that harm the trainer's process, as a batch may."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from splice.losses import LossOutput, register_loss


def _plain(log_probs_N: torch.Tensor) -> LossOutput:
    return LossOutput(loss=-log_probs_N.sum(), num_clipped=log_probs_N.new_zeros(()))


@register_loss("ends_the_process")
def ends_the_process(log_probs_N: torch.Tensor) -> LossOutput:
    """As the kernel does for want of host memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return _plain(log_probs_N)


@register_loss("spoils_the_step")
def spoils_the_step(log_probs_N: torch.Tensor) -> LossOutput:
    """The optimizer fails after it has updated the weights."""
    step = torch.optim.AdamW.step

    def fail(self: torch.optim.AdamW, *given: Any, **more: Any) -> None:
        step(self, *given, **more)
        raise torch.OutOfMemoryError("a test said so")

    torch.optim.AdamW.step = fail  # type: ignore[method-assign,assignment]
    return _plain(log_probs_N)


@register_loss("finds_no_memory")
def finds_no_memory(log_probs_N: torch.Tensor) -> LossOutput:
    """The backward pass fails, with all activations in use."""

    def fail(_gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("a test said so")

    log_probs_N.register_hook(fail)
    return _plain(log_probs_N)
