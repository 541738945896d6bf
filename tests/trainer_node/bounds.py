"""What rounding may do to the tiny models' numbers, by `tests.numerics`."""

from __future__ import annotations

import torch

from orchestrator.protocol.messages import OptimParams
from tests.numerics import chain_error_bound, decoder_roundings, sum_error_bound
from tests.trainer_node.data import LENGTHS, TEMPERATURES
from tests.trainer_node.tiny import VOCAB

LOGIT = 1.0
"""Size of the tiny models' logits: weights of standard deviation 0.1 times 64 hidden numbers behind
a norm of root mean square 1.04 give 0.83.
"""
LOG_PROB = 12.0
"""Largest |log p| of a token of these batches, at the lowest temperature too."""
SLOPE = 3.0
"""How fast a token's loss changes with its log-prob, root mean square: at most the dual clip's 3
times an advantage of size 1.
"""


def roundings(dtype: torch.dtype = torch.float32) -> int:
    """Of a log-prob of a tiny model."""
    return decoder_roundings(
        dtype,
        layers=2,
        hidden=64,
        inner=128,
        head_dim=16,
        attention=64,
        length=max(LENGTHS),
        vocab=VOCAB,
    )


def scores(dtype: torch.dtype = torch.float32) -> float:
    """Between two computations of a log-prob or entropy, in nats."""
    return chain_error_bound(dtype, roundings=roundings(dtype), magnitude=LOGIT / min(TEMPERATURES))


def loss(dtype: torch.dtype = torch.float32, *, count: int, magnitude: float = LOG_PROB) -> float:
    """Between two sums of `count` tokens' losses of this magnitude: the tokens' own errors, and the
    sum's.
    """
    return SLOPE * scores(dtype) * count**0.5 + sum_error_bound(
        torch.float32, count=count, magnitude=magnitude
    )


def gradients(dtype: torch.dtype = torch.float32) -> float:
    """Between two computations of a gradient, relative to the largest element: there and back, and
    summed over the tokens.
    """
    return chain_error_bound(dtype, roundings=2 * roundings(dtype) + sum(LENGTHS), magnitude=1.0)


def two_steps(optim: OptimParams, *, gradient: float, norm: float) -> float:
    """Between the weights after two steps of AdamW from gradients that differ by `gradient`. The
    first step is lr g / (|g| + eps), which changes by lr / eps where g is near 0, so by that times
    the clipped gradient's error; the second no more.
    """
    clip = min(1.0, (optim.max_grad_norm or norm) / norm)
    return 2 * optim.lr * gradient * clip / optim.eps
