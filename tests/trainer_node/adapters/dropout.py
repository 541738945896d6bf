"""One rank of a check of dropout on adapters' inputs.

    torchrun ... -m tests.trainer_node.adapters.dropout OUT MODEL TENSOR PIPELINE EXPERT
    {sequence,no-sequence,checks} [FLAG ...]

Rank 0 leaves OUT/result.pt: the loss and the gradients of the first step. `checks`, on one rank,
does everything else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.trainer_node import bounds
from tests.trainer_node.data import make_batch
from tests.trainer_node.training.operations import close, part, take_gradients
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.adapters.dense_lora import DenseAdapter
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer

P = 0.3
LOSS, OPTIM = LossSpec(name="cross_entropy"), OptimParams(lr=1e-2)


def start(model: Path, sizes: list[int], p: float, **options: object) -> Trainer:
    """With random adapters."""
    trainer = make_trainer(model, *sizes, lora=LoraConfig(rank=4, alpha=8, dropout=p), **options)
    random_adapters(trainer)
    return trainer


def first_step(trainer: Trainer) -> dict:
    loss = trainer.forward_backward(make_batch(), LOSS)[0].loss
    return {"loss": loss, "gradients": take_gradients(trainer)}


def check_steps(trainer: Trainer, result: dict, out: Path) -> None:
    """The same step draws the same masks, another step others, and so does the same one after a
    resume.
    """
    again = first_step(trainer)
    assert again["loss"] == result["loss"]
    assert all(torch.equal(t, result["gradients"][n]) for n, t in again["gradients"].items())
    batch = make_batch()
    trainer.train_step(batch, LOSS, OptimParams(lr=1e-12, weight_decay=0.0))
    other = trainer.forward_backward(batch, LOSS)[0].loss
    assert abs(other - result["loss"]) > 1e-3, "the second step drew the first one's masks"
    trainer.drop_pending()
    checkpoint.save(trainer, out / "saved", version=1)
    steps = [trainer.train_step(batch, LOSS, OPTIM) for _ in range(2)]
    loading.load(trainer, out / "saved")
    for step in steps:
        resumed = trainer.train_step(batch, LOSS, OPTIM)
        assert (resumed["loss"], resumed["grad_norm"]) == (step["loss"], step["grad_norm"])
    loading.load(trainer, out / "saved")


def check_cuts(trainer: Trainer) -> None:
    """Other packs, and several calls, draw the same masks for each token."""
    batch, loss = make_batch(), trainer.forward_backward(make_batch(), LOSS)[0].loss
    gradients = take_gradients(trainer)
    usual = trainer.micro_batch_tokens
    for budget, pieces in (
        (7, [batch]),
        (200, [batch]),
        (16, [part(batch, 0, 2), part(batch, 2, 5)]),
    ):
        trainer.micro_batch_tokens = budget
        total = sum(trainer.forward_backward(piece, LOSS)[0].loss for piece in pieces)
        assert abs(total - loss) <= bounds.loss(count=batch.num_loss_tokens), budget
        close(take_gradients(trainer), gradients, relative=bounds.gradients())
    trainer.micro_batch_tokens = usual


def check_expectation(trainer: Trainer) -> None:
    """The mean delta over many steps approaches the one without dropout."""
    adapter = next(a for a in trainer.model.adapters.adapters if isinstance(a, DenseAdapter))
    x = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(0))
    plain, dropout, deltas = adapter(x), trainer.model.adapters.dropout, []
    for key in range(400):
        with dropout.on(key):
            dropout._rows_L = torch.arange(6)
            deltas.append(adapter(x))
    one = (deltas[0] - plain).norm() / plain.norm()
    mean = (torch.stack(deltas).mean(0) - plain).norm() / plain.norm()
    assert one > 0.2
    assert mean < one / 10, (mean, one)


def check_one_rank(trainer: Trainer, result: dict, model: Path, out: Path) -> None:
    """What needs no second topology."""
    from trainer_node.model import (
        build,  # late: other checks import this module without Megatron's shims
    )

    batch = make_batch()
    scores = trainer.forward(batch)
    check_steps(trainer, result, out)
    if "dense" in model.name:
        check_cuts(trainer)
        check_expectation(trainer)
    trainer.model.close()
    plain = start(model, [1, 1, 1], 0.0)
    # With dropout Megatron's own experts run instead of the stacked ones, which sum in another
    # order; a pass that drops moves nats.
    tolerance = 0.0 if "dense" in model.name else bounds.scores()
    for a, b in zip(scores, plain.forward(batch), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"a forward pass dropped: {m}"
        )
    assert abs(plain.forward_backward(batch, LOSS)[0].loss - result["loss"]) > 1e-3
    plain.model.close()
    build.COMPILE_BACKEND = "eager"
    for options in ({"recompute": "full"}, {"compile": True, "micro_batch_tokens": 200})[
        : 1 + ("dense" in model.name)
    ]:
        again = start(model, [1, 1, 1], P, **options)
        found = first_step(again)
        assert abs(found["loss"] - result["loss"]) <= bounds.loss(count=batch.num_loss_tokens), (
            options
        )
        close(found["gradients"], result["gradients"], relative=bounds.gradients())
        again.model.close()


def main() -> None:
    """See the module's docstring."""
    out, model, sizes = Path(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:6]))
    recompute = "full" if sizes[1] > 1 else "none"
    trainer = start(model, sizes, P, sequence=sys.argv[6] != "no-sequence", recompute=recompute)
    checkpoint.save_adapter(trainer.model, out / "adapter")
    result = first_step(trainer)
    if dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    if sys.argv[6] == "checks":
        check_one_rank(trainer, result, model, out)
    trainer.model.close()


if __name__ == "__main__":
    main()
