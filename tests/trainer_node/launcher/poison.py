"""Losses that harm the trainer's process, as a batch may."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.failures_losses import plain  # its `ends_the_process` is used too
from splice.losses import LossOutput, register_loss


@register_loss("spoils_the_step")
def spoils_the_step(log_probs_N: torch.Tensor) -> LossOutput:
    """The optimizer fails after it has updated the weights."""
    step = torch.optim.AdamW.step

    def fail(self: torch.optim.AdamW, *given: Any, **more: Any) -> None:
        step(self, *given, **more)
        raise torch.OutOfMemoryError("a test said so")

    torch.optim.AdamW.step = fail  # type: ignore[method-assign,assignment]
    return plain(log_probs_N)


@register_loss("finds_no_memory")
def finds_no_memory(log_probs_N: torch.Tensor) -> LossOutput:
    """The backward pass fails, with all activations in use."""

    def fail(_gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("a test said so")

    log_probs_N.register_hook(fail)
    return plain(log_probs_N)
