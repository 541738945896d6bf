"""One rank of a check of exact numerics.

    torchrun ... -m tests.trainer_node.training.exact_gradients MODEL

Log-probs and gradients are those of the served weights, but for rounding. Log-probs do not depend
on the pack. The same batch gives the same gradients twice, to the last bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import make_trainer, random_adapters

LOSS = LossSpec(name="importance_sampling", entropy_bonus=0.01)


def computed(folder: Path, numerics: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs, and the gradients of two passes, which must be equal."""
    trainer = make_trainer(folder, 1, 1, 1, numerics=numerics, micro_batch_tokens=64)
    random_adapters(trainer)
    batch = make_batch(loss=LOSS)
    logprobs_T, _ = trainer.forward(batch)
    if numerics == "exact":
        trainer.micro_batch_tokens = 9  # a pack for each sequence or two
        assert torch.equal(trainer.forward(batch)[0], logprobs_T)
        trainer.micro_batch_tokens = 64
    found = []
    for _ in range(2):
        trainer.forward_backward(batch, LOSS)
        found.append([p.grad.clone() for p in trainer.model.params])
        trainer.drop_pending()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    trainer.model.close()
    return logprobs_T, found[0]


def main() -> None:
    folder = Path(sys.argv[1])
    (exact_T, exact), (served_T, served) = (computed(folder, n) for n in ("exact", "served"))
    assert not torch.equal(exact_T, served_T)
    assert (exact_T - served_T).abs().max() < 1e-5
    for one, other in zip(exact, served, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() < 1e-4 * other.norm(), (one - other).norm() / other.norm()


if __name__ == "__main__":
    main()
