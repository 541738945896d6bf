"""One rank of a check of models that see: the language part trains, the tower comes out as it was.

    torchrun ... -m tests.trainer_node.hf.sees FOLDER FAMILY

Log-probs of text equal those of transformers' whole model; every tensor of the checkpoint but heads
of further tokens is exported; a step changes tensors of the language part only; a token of an image
is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.numerics import chain_error_bound
from tests.trainer_node.families import VOCAB
from tests.trainer_node.towers import FURTHER, IMAGE
from trainer_node.export.merged import Exporter
from trainer_node.tools.check_model import batch_of
from trainer_node.training.batch import BatchError
from trainer_node.training.start import start

LENGTHS = (21, 34)
ROUNDINGS = 20_000
"""Of a log-prob, as in `test_families`."""


@torch.no_grad()
def reference(folder: Path, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Log-probs by transformers' whole model."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = [model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for ids in tokens]
    return torch.cat(
        [row.gather(-1, ids[1:, None])[:, 0] for row, ids in zip(rows, tokens, strict=True)]
    )


def main() -> None:
    """See the module's docstring."""
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    further = FURTHER.get(folder.name, ())
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor=world, world_size=world)
    trainer = start(TrainerConfig(model=folder, finetuning_type="full", parallel=parallel))
    state = trainer.model.checkpoint.state
    assert set(further) <= set(state)
    stored = {name: state[name] for name in state if name not in further}
    vocabulary = trainer.model.checkpoint.vocab_tensors
    stored |= {name: stored[name][:VOCAB] for name in vocabulary if name in stored}
    exporter = Exporter(trainer.model)
    before = {name: tensor.clone() for name, tensor in exporter.base_tensors()}
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name], stored[name]) for name in stored)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, IMAGE, (n,), generator=generator) for n in LENGTHS]
    given = batch_of(tokens)
    ours_T, _ = trainer.forward(given)
    if dist.get_rank() == 0:
        theirs = reference(folder, tokens)
        magnitude = theirs.std().item()
        bound = chain_error_bound(torch.float32, roundings=ROUNDINGS, magnitude=magnitude)
        assert (ours_T[given.loss_mask_T > 0] - theirs).abs().max() <= bound
    with pytest.raises(
        BatchError, match=rf"sequence 1 has token {IMAGE}, which stands for an image"
    ):
        trainer.check(
            batch_of([tokens[0], torch.full((4,), IMAGE)]), LossSpec(name="cross_entropy")
        )
    trainer.train_step(given, LossSpec(name="cross_entropy"), OptimParams(lr=1e-3))
    after = dict(exporter.base_tensors())
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    part = {name for name in after if "language_model." in name or name.startswith("lm_head.")}
    assert changed == part and part < after.keys()


if __name__ == "__main__":
    main()
