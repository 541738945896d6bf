"""How far rounding may move a number: bounds from what is computed, not from what one processor
gave.

u is a dtype's unit roundoff, half the distance from 1 to the next number. Two kinds of bound:

- One sum, whatever the order: an error of at most `gamma(n - 1) * sum |x|`, `gamma(n) = n u / (1 -
  n u)` (Higham 2002, Accuracy and Stability of Numerical Algorithms, lemma 3.1 and equation 4.4).
  Two orders differ by at most twice that.
- Many sums one after the other, as in a network, where the worst case says nothing: each rounding
  is taken as uniform in [-u, u] and independent of the others, and partial sums as growing like a
  random walk (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5), on the square root of n). A sum of
  n terms then has a relative error of standard deviation `u sqrt(n / 6)`, and two computations
  differ by `u sqrt(n / 3)`. SIGMAS of that are allowed.
"""

from __future__ import annotations

import math

import torch

SIGMAS = 6.0
"""A normal variable is further off once in 5e8 times; a run of the suite compares some
1e7 numbers.
"""


def unit_roundoff(dtype: torch.dtype) -> float:
    """2^-24 for float32, 2^-8 for bfloat16, 2^-53 for float64."""
    return torch.finfo(dtype).eps / 2


def gamma(dtype: torch.dtype, count: int) -> float:
    """Relative error of `count` roundings at worst."""
    return count * unit_roundoff(dtype) / (1 - count * unit_roundoff(dtype))


def sum_error_bound(dtype: torch.dtype, *, count: int, magnitude: float) -> float:
    """Largest difference of two sums of the same `count` numbers, none larger than `magnitude`,
    added in any orders.
    """
    return 2 * gamma(dtype, max(count - 1, 1)) * count * magnitude


def chain_error_bound(dtype: torch.dtype, *, roundings: int, magnitude: float) -> float:
    """Likely largest difference of two computations of a number of this magnitude that passes
    through this many roundings.
    """
    return SIGMAS * unit_roundoff(dtype) * math.sqrt(roundings / 3) * magnitude


def decoder_roundings(
    dtype: torch.dtype,
    *,
    layers: int,
    hidden: int,
    inner: int,
    head_dim: int,
    attention: int,
    length: int,
    vocab: int,
) -> int:
    """Roundings on the longest path from a token to a log-prob in a decoder.

    In float32 each term of each sum is one: two norms, q, k or v, scores, values, o, up and down in
    every layer, then the last norm, the head and the softmax. In bfloat16 sums are kept in float32,
    and each of their results is one.

    Args:
        inner: of the feed-forward layer.
        attention: heads times head_dim.
        length: of the longest sequence.
    """
    if dtype is torch.bfloat16:
        return 12 * layers + 4
    return (
        layers * (2 * hidden + hidden + head_dim + length + attention + hidden + inner)
        + 2 * hidden
        + vocab
    )
