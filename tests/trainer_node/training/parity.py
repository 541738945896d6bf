"""One rank of one cell of the parity matrix: the same batches on whatever topology it is started
with.

    ... -m tests.trainer_node.training.parity OUT MODEL TENSOR PIPELINE EXPERT {lora,full}
    {rl,sft,gae} [no-sequence] [bfloat16] [cuda] [FLAG ...]

Each token of an rl batch has its own temperature, those of sft none. gae is rl with a value head,
which begins with weights other than 0.

Rank 0 leaves OUT/cell.pt: log-probs and entropies of every token, the metrics of two optimizer
steps, the first step's gradients, and after the second the trained tensors and the exported ones;
with LoRA also the adapter that it began with, in OUT/adapter. The tokens are also cut otherwise
(`CUTS`), which must change nothing. Tensor ranks share the sequence unless told `no-sequence`;
`bfloat16` has bf16 weights with fp32 masters; `cuda` is for GPUs, through TransformerEngine's THD
kernels and NCCL.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.protocol.messages import LossSpec, OptimParams, ValueSpec
from tests.trainer_node import bounds
from tests.trainer_node.data import arrays, make_batch, temperatures
from tests.trainer_node.gradients import take_gradients, trained_tensors
from tests.trainer_node.training.operations import close, part
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.export.merged import Exporter
from trainer_node.state import checkpoint
from trainer_node.training.batch import Batch
from trainer_node.training.trainer import Trainer

LOSSES = {
    "rl": LossSpec(name="ppo", clip_low=0.2, clip_high=0.28, dual_clip=3.0, entropy_bonus=0.02),
    "sft": LossSpec(name="cross_entropy"),
    "gae": LossSpec(
        name="ppo",
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        entropy_bonus=0.02,
        value=ValueSpec(gamma=0.95, lam=0.9, coefficient=0.7, clip=0.01),
    ),
}
OPTIM = OptimParams(lr=1e-3, value_lr=5e-4, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4)
"""AdamW's step is g / (|g| + eps) at first: with the usual 1e-8 it would blow the rounding of
gradients near 0 up to steps of lr.
"""
CUTS = (7, 200)
"""Other budgets of tokens for a micro-batch: less than the longest sequence, and more than all of
them.
"""


def batches(loss: LossSpec) -> tuple[Batch, Batch]:
    """One for each step; the second's last sequence carries no loss."""
    first, second = (make_batch(arrays(n) | _more(loss, n), loss=loss) for n in range(2))
    mask_T = second.loss_mask_T.clone()
    mask_T[-second.lengths[-1] :] = 0
    return first, replace(second, loss_mask_T=mask_T)


def _more(loss: LossSpec, seed: int) -> dict[str, np.ndarray]:
    found = {} if loss.name == "cross_entropy" else {"temperatures": temperatures(seed)}
    if loss.value is not None:
        given = arrays(seed)
        noise = np.random.default_rng(seed + 2000).standard_normal(len(given["tokens"]))
        found["rewards"] = (2 * noise * given["loss_mask"]).astype(np.float32)
    return found


def head(hidden: int) -> torch.Tensor:
    """The value head's first weights: values are about as large as logits."""
    return 0.1 * torch.randn(hidden, generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def set_head(trainer: Trainer) -> None:
    """Give each rank its features of `head`."""
    for p in trainer.model.params:
        if p.is_value:
            (piece,) = p.pieces
            piece.write(p.param, head(*piece.shape)[piece.offsets[0] :][: piece.rows])


def everything_scored(loss: LossSpec) -> Batch:
    """The first batch, with every token but the first of each sequence marked."""
    batch = batches(loss)[0]
    ones_T = torch.ones(len(batch.tokens_T))
    ones_T[torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)] = 0
    return replace(batch, loss_mask_T=ones_T)


def cell(trainer: Trainer, loss: LossSpec) -> dict[str, Any]:
    """What one cell of the matrix is compared by. Two optimizer steps, both with the values of the
    policy before the first.
    """
    first, second = (trainer.valued(batch, loss) for batch in batches(loss))
    exporter = Exporter(trainer.model)
    for _ in exporter.merged_tensors():
        """An export before training, as of a first publication: nothing of it may be in
        the last.
        """
    result: dict[str, Any] = {"scores": torch.stack(trainer.forward(everything_scored(loss)))}
    sums, _ = trainer.forward_backward(first, loss)
    result["metrics"] = [sums.metrics(loss.normalize_by)]
    result["gradients"] = take_gradients(trainer)
    if first.returns_T is not None:
        result["values"] = torch.stack([first.values_T, first.returns_T, first.advantages_T])
    check_cuts(trainer, loss, first, result["gradients"], sums.loss)
    for batch in (first, second):
        result["metrics"].append(trainer.train_step(batch, loss, OPTIM))
    result["trained"] = trained_tensors(trainer)
    result["exported"] = {n: t.detach().clone() for n, t in exporter.merged_tensors()}
    return result


def check_cuts(
    trainer: Trainer,
    loss: LossSpec,
    batch: Batch,
    gradients: dict[str, torch.Tensor],
    total: float,
) -> None:
    """Other packs, and several calls instead of one, change a gradient and the loss's sum by
    rounding only.
    """
    budget = trainer.micro_batch_tokens
    calls = [[batch]] * len(CUTS) + [[part(batch, 0, 2), part(batch, 2, 5)]]
    for tokens, pieces in zip((*CUTS, budget), calls, strict=True):
        trainer.micro_batch_tokens = tokens
        if batch.values_T is not None:
            values_T = trainer.valued(batches(loss)[0], loss).values_T
            assert (values_T - batch.values_T).abs().max() <= bounds.scores(trainer.model.dtype)
        sums = [trainer.forward_backward(piece, loss)[0] for piece in pieces]
        assert abs(sum(s.loss for s in sums) - total) <= bounds.loss(
            trainer.model.dtype, count=batch.num_loss_tokens
        ), tokens
        again = take_gradients(trainer)
        if dist.get_rank() == 0:
            close(again, gradients, relative=bounds.gradients(trainer.model.dtype))


def main() -> None:
    """See the module's docstring."""
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    finetuning_type, kind = sys.argv[6:8]
    trainer = make_trainer(
        model,
        *map(int, sys.argv[3:6]),
        finetuning_type=finetuning_type,
        sequence="no-sequence" not in sys.argv,
        value_head=LOSSES[kind].value is not None,
        dtype="bfloat16" if "bfloat16" in sys.argv else "float32",
        device="cuda" if "cuda" in sys.argv else "cpu",
    )
    set_head(trainer)
    if finetuning_type == "lora":
        random_adapters(trainer)
        checkpoint.save_adapter(trainer.model, out / "adapter")
    result = cell(trainer, LOSSES[kind])
    if dist.get_rank() == 0:
        torch.save(result, out / "cell.pt")
    trainer.model.close()


if __name__ == "__main__":
    main()
