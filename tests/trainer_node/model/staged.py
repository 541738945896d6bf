"""One rank of a check of a family over two pipeline stages.

    torchrun ... -m tests.trainer_node.model.staged FOLDER

Every tensor of the checkpoint is exported, and log-probs and the gradient's norm are transformers'.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.model.family import saved
from trainer_node.export.merged import Exporter
from trainer_node.tools.check_model import FLOOR, Reference, batch_of
from trainer_node.training.gradients import finalize_gradients, global_norm
from trainer_node.training.start import start


def main() -> None:
    """See the module's docstring."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    parallel = ParallelConfig(pipeline=2, world_size=2)
    trainer = start(TrainerConfig(model=folder, finetuning_type="full", parallel=parallel))
    wanted = saved(folder)
    found = {name: tensor.clone() for name, tensor in Exporter(trainer.model).base_tensors()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    reference = Reference(folder)
    batch = batch_of(reference.tokens)
    log_probs_T, _ = trainer.forward(batch)
    trainer.forward_backward(batch, LossSpec(name="cross_entropy"))
    finalize_gradients(trainer.model.params, denominator=1.0, sequence_parallel=False)
    norm = float(global_norm(trainer.model.params, trainer.model.device))
    if dist.get_rank() == 0:
        with torch.no_grad():
            theirs = reference.log_probs()
        assert (log_probs_T[batch.loss_mask_T > 0] - theirs).abs().max() <= FLOOR
        exact = reference.gradient_norm(torch.float64)
        assert abs(norm - exact) <= FLOOR * exact


if __name__ == "__main__":
    main()
