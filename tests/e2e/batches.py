"""The prompt that real clusters are asked, a batch of it with an answer, and a step on that."""

from __future__ import annotations

import array
from typing import Any

from orchestrator.protocol.messages import LossSpec, OptimParams, TrainMerged, batch_specs
from splice.cluster import Cluster

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


def trained(cluster: Cluster, *, lr: float) -> Any:
    """Train on an answer, and publish; returns the job's result."""
    answer = [3, 4, 5, 6]
    specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + len(answer))
    job = TrainMerged(loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=lr), tensors=specs)
    return cluster.client.run(job, buffers=as_batch(answer), timeout_s=300.0)
