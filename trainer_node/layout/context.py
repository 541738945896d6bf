"""Where a sequence's tokens are on context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def context_places(bounds: Sequence[int], *, rank: int, size: int) -> np.ndarray:
    """Return the places of a context-parallel rank's tokens in a pack, in its order.

    Each sequence gives chunk `rank`, then `2 * size - 1 - rank`.

    Args:
        bounds: where each sequence begins, and the pack's length; all differences are multiples of
            2 * size.
    """
    places = []
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * size)
        places += [
            start + first * chunk + np.arange(chunk) for first in (rank, 2 * size - 1 - rank)
        ]
    return np.concatenate(places)
