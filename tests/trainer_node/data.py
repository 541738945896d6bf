"""A batch that every check uses, and the fields of a job that trains on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.protocol.messages import (
    OPTIONAL_BATCH_TENSORS,
    LossSpec,
    OptimParams,
    Request,
    RunJob,
    batch_specs,
)
from tests.trainer_node.tiny import VOCAB
from trainer_node.training.batch import Batch, decode_batch

LENGTHS = (9, 5, 12, 7, 3)
TEMPERATURES = (0.7, 1.3)
"""The lowest and the highest that `temperatures` gives."""


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Five sequences of different lengths; prompts of two tokens carry no loss."""
    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    mask = np.concatenate([np.r_[np.zeros(2), np.ones(n - 2)] for n in LENGTHS]).astype(np.float32)
    return {
        "tokens": rng.integers(0, VOCAB, total, dtype=np.int32),
        "sequence_lengths": np.array(LENGTHS, dtype=np.int32),
        "loss_mask": mask,
        "advantages": (rng.standard_normal(total) * mask).astype(np.float32),
        "sampler_logprobs": ((-5.7 + 0.3 * rng.standard_normal(total)) * mask).astype(np.float32),
    }


def temperatures(seed: int = 0) -> np.ndarray:
    """One for each token of `arrays`, each another."""
    return (
        np.random.default_rng(seed + 1000).uniform(*TEMPERATURES, sum(LENGTHS)).astype(np.float32)
    )


def training(values: dict[str, np.ndarray] | None = None, **loss) -> tuple[dict, list[bytes]]:
    """Fields and buffers of a job that trains on these arrays."""
    values = values or arrays()
    specs = batch_specs(
        num_sequences=len(values["sequence_lengths"]),
        num_tokens=len(values["tokens"]),
        optional=[name for name in OPTIONAL_BATCH_TENSORS if name in values],
    )
    fields = {"loss": LossSpec(**loss), "optim": OptimParams(lr=1e-2), "tensors": specs}
    return fields, [values[s.name].tobytes() for s in specs]


def asked(kind: type, *, request_id: str = "r", deadline_s: float = 60, **fields: Any) -> Any:
    """A request of this kind; for a job a `RunJob`, with the fields that the job lacks."""
    if issubclass(kind, Request):
        return kind(request_id=request_id, deadline_s=deadline_s, **fields)
    own = {name: fields.pop(name) for name in fields.keys() - kind.model_fields.keys()}
    return RunJob(request_id=request_id, deadline_s=deadline_s, job=kind(**fields), **own)


def make_batch(
    values: dict[str, np.ndarray] | None = None,
    *,
    loss: LossSpec | None = None,
    max_length: int = 64,
) -> Batch:
    """The arrays through the same door as a message's buffers."""
    values = values or arrays()
    sizes = {"num_sequences": len(values["sequence_lengths"]), "num_tokens": len(values["tokens"])}
    optional = [n for n in OPTIONAL_BATCH_TENSORS if n in values]
    specs = tuple(
        s.model_copy(update={"shape": (len(values[s.name]),)}) if s.name in optional else s
        for s in batch_specs(**sizes, optional=optional)
    )
    buffers = [values[s.name].tobytes() for s in specs]
    return decode_batch(
        specs=specs,
        buffers=buffers,
        vocab_size=VOCAB,
        max_length=max_length,
        loss=loss or LossSpec(),
    )
