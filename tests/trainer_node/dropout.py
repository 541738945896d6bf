"""One rank of a check of dropout on adapters' inputs.

    torchrun ... -m tests.trainer_node.dropout OUT MODEL TENSOR PIPELINE EXPERT {sequence,no-sequence,checks} [FLAG ...]

Rank 0 leaves OUT/result.pt: the loss and the gradients of the first step. `checks`, on one rank, does everything else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_node.runtime
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.trainer_node import bounds
from tests.trainer_node.data import make_batch
from tests.trainer_node.operations import close, part, take_gradients
from tests.trainer_node.worker import make_runtime, random_adapters
from trainer_node import checkpoint
from trainer_node.lora import DenseAdapter
from trainer_node.runtime import TrainerRuntime

P = 0.3
LOSS, OPTIM = LossSpec(name="cross_entropy"), OptimParams(lr=1e-2)


def start(model: Path, sizes: list[int], p: float, **options: object) -> TrainerRuntime:
    """With random adapters."""
    runtime = make_runtime(model, *sizes, lora=LoraConfig(rank=4, alpha=8, dropout=p), **options)
    random_adapters(runtime)
    return runtime


def first_step(runtime: TrainerRuntime) -> dict:
    loss = runtime.forward_backward(make_batch(), LOSS).loss
    return {"loss": loss, "gradients": take_gradients(runtime)}


def check_steps(runtime: TrainerRuntime, result: dict, out: Path) -> None:
    """The same step draws the same masks, another step others, and so does the same one after a resume."""
    again = first_step(runtime)
    assert again["loss"] == result["loss"]
    assert all(torch.equal(t, result["gradients"][n]) for n, t in again["gradients"].items())
    batch = make_batch()
    runtime.train_step(batch, LOSS, OptimParams(lr=1e-12, weight_decay=0.0))
    other = runtime.forward_backward(batch, LOSS).loss
    assert abs(other - result["loss"]) > 1e-3, "the second step drew the first one's masks"
    runtime.drop_pending()
    checkpoint.save(runtime, out / "saved", version=1)
    steps = [runtime.train_step(batch, LOSS, OPTIM) for _ in range(2)]
    checkpoint.load(runtime, out / "saved")
    for step in steps:
        resumed = runtime.train_step(batch, LOSS, OPTIM)
        assert (resumed["loss"], resumed["grad_norm"]) == (step["loss"], step["grad_norm"])
    checkpoint.load(runtime, out / "saved")


def check_cuts(runtime: TrainerRuntime) -> None:
    """Other packs, and several calls, draw the same masks for each token."""
    batch, loss = make_batch(), runtime.forward_backward(make_batch(), LOSS).loss
    gradients = take_gradients(runtime)
    usual = runtime.micro_batch_tokens
    for budget, pieces in ((7, [batch]), (200, [batch]), (16, [part(batch, 0, 2), part(batch, 2, 5)])):
        runtime.micro_batch_tokens = budget
        total = sum(runtime.forward_backward(piece, LOSS).loss for piece in pieces)
        assert abs(total - loss) <= bounds.loss(count=batch.num_loss_tokens), budget
        close(take_gradients(runtime), gradients, relative=bounds.gradients())
    runtime.micro_batch_tokens = usual


def check_expectation(runtime: TrainerRuntime) -> None:
    """The mean delta over many steps approaches the one without dropout."""
    adapter = next(a for a in runtime.adapters.adapters if isinstance(a, DenseAdapter))
    x = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(0))
    plain, dropout, deltas = adapter(x), runtime.adapters.dropout, []
    for key in range(400):
        with dropout.on(key):
            dropout._rows_L = torch.arange(6)
            deltas.append(adapter(x))
    one = (deltas[0] - plain).norm() / plain.norm()
    mean = (torch.stack(deltas).mean(0) - plain).norm() / plain.norm()
    assert one > 0.2
    assert mean < one / 10, (mean, one)


def check_one_rank(runtime: TrainerRuntime, result: dict, model: Path, out: Path) -> None:
    """What needs no second topology."""
    batch = make_batch()
    scores = runtime.forward(batch)
    check_steps(runtime, result, out)
    if "dense" in model.name:
        check_cuts(runtime)
        check_expectation(runtime)
    runtime.close()
    plain = start(model, [1, 1, 1], 0.0)
    # With dropout Megatron's own experts run instead of the stacked ones, which sum in another order; a pass that drops moves nats.
    tolerance = 0.0 if "dense" in model.name else bounds.scores()
    for a, b in zip(scores, plain.forward(batch), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"a forward pass dropped: {m}")
    assert abs(plain.forward_backward(batch, LOSS).loss - result["loss"]) > 1e-3
    plain.close()
    trainer_node.runtime.COMPILE_BACKEND = "eager"
    for options in ({"recompute": "full"}, {"compile": True, "micro_batch_tokens": 200})[: 1 + ("dense" in model.name)]:
        again = start(model, [1, 1, 1], P, **options)
        found = first_step(again)
        assert abs(found["loss"] - result["loss"]) <= bounds.loss(count=batch.num_loss_tokens), options
        close(found["gradients"], result["gradients"], relative=bounds.gradients())
        again.close()


def main() -> None:
    """See the module's docstring."""
    out, model, sizes = Path(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:6]))
    recompute = "full" if sizes[1] > 1 else "none"
    runtime = start(model, sizes, P, sequence=sys.argv[6] != "no-sequence", recompute=recompute)
    checkpoint.save_adapter(runtime, out / "adapter")
    result = first_step(runtime)
    if dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    if sys.argv[6] == "checks":
        check_one_rank(runtime, result, model, out)
    runtime.close()


if __name__ == "__main__":
    main()
