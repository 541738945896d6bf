"""The prompt that real clusters are asked, and a batch of it with an answer."""

from __future__ import annotations

import array

PROMPT = [5, 17, 33, 101, 7, 9, 44, 12]


def as_batch(tokens: list[int]) -> list[bytes]:
    """One sequence, prompt and answer; the answer carries loss. In the order of `batch_specs`."""
    ids, count = PROMPT + tokens, len(PROMPT) + len(tokens)
    mask = [0.0] * len(PROMPT) + [1.0] * len(tokens)
    rows = [
        array.array("i", ids),
        array.array("i", [count]),
        array.array("f", mask),
        *(array.array("f", [0.0] * count),) * 2,
    ]
    return [row.tobytes() for row in rows]
