"""One rank of a check of models that see: the language part trains, the tower comes out as it was.

    torchrun ... -m tests.trainer_node.sees FOLDER FAMILY

Log-probs of text equal those of transformers' whole model; every tensor of the checkpoint but heads
of further tokens is exported; a step changes tensors of the language part only; a token of an image
is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.numerics import chain_error_bound
from tests.trainer_node.families import FAMILIES, VOCAB
from trainer_node.export.merged import Exporter
from trainer_node.start import start
from trainer_node.tools.check_model import batch_of, randomize
from trainer_node.training.batch import BatchError

LENGTHS = (21, 34)
IMAGE = VOCAB - 1
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    "qwen3_5_moe": {
        "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    },
}  # fmt: skip # a table
ROUNDINGS = 20_000
"""Of a log-prob, as in `test_families`."""


def make(family: str, folder: Path) -> Path:
    """Write a tiny checkpoint with a tower."""
    name, settings = FAMILIES[family].name, FAMILIES[family].settings
    text = getattr(transformers, f"{name}TextConfig")(**settings)
    config = getattr(transformers, f"{name}Config")(
        text_config=text.to_dict(),
        vision_config=TOWERS[family],
        tie_word_embeddings=text.tie_word_embeddings,
        image_token_id=IMAGE,
        **({"mm_tokens_per_image": 4} if family == "gemma3" else {}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    randomize(model)
    model.save_pretrained(folder)
    further = {"mtp.fc.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4)}
    save_file(further, folder / "further.safetensors")  # heads of further tokens, as published
    return folder


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
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor=world, world_size=world)
    trainer = start(TrainerConfig(model=folder, finetuning_type="full", parallel=parallel))
    state = trainer.model.checkpoint.state
    stored = {name: state[name] for name in state if not name.startswith("mtp.")}
    assert len(stored) < len(state)
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
