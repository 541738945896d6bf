"""One rank of a check on real Megatron: trains, exports, saves, and leaves what it saw in a folder.

    torchrun ... -m tests.trainer_node.worker OUT MODEL TENSOR PIPELINE EXPERT [CHECKPOINT OF
    ANOTHER TOPOLOGY ...] [FLAG ...]

Several checks share a launch, because a launch costs seconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    ALL_LINEAR,
    LM_HEAD,
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
)
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.trainer_node.data import make_batch
from trainer_node.export.merged import Exporter
from trainer_node.state import checkpoint, loading
from trainer_node.training.start import start
from trainer_node.training.trainer import Trainer

LOSS, OPTIM = LossSpec(name="grpo"), OptimParams(lr=1e-2, weight_decay=0.01, max_grad_norm=0.5)
SEED_RANDOM_B = 77
FLAGS: dict[str, dict[str, int]] = {"cp2": {"context": 2}, "etp2": {"expert_tensor": 2}}
"""What a launch's arguments may say of the topology next to the three sizes."""
HEAD = "head"
"""The flag for an adapter on the output layer too."""


def make_trainer(
    model: Path,
    tensor: int,
    pipeline: int,
    expert: int,
    *,
    sequence: bool = True,
    **options: object,
) -> Trainer:
    """A trainer on however many ranks torchrun started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    more = {k: v for flag, sizes in FLAGS.items() if flag in sys.argv for k, v in sizes.items()}
    parallel = ParallelConfig(
        tensor=tensor, pipeline=pipeline, expert=expert, sequence=sequence, world_size=world, **more
    )
    lora = LoraConfig(rank=4, alpha=8)
    if HEAD in sys.argv:
        lora = lora.model_copy(update={"targets": (ALL_LINEAR, LM_HEAD)})
    config = TrainerConfig(
        model=model,
        parallel=parallel,
        collective_timeout_s=60,
        **{"lora": lora, "micro_batch_tokens": 16, **options},
    )
    return start(config)


def random_adapters(trainer: Trainer) -> None:
    """Nonzero A and B that depend on the HF name only."""
    full = {}
    for local in trainer.model.adapters.local_matrices():
        seed = SEED_RANDOM_B + sum(
            ord(c) * (i + 1) for i, c in enumerate(local.module + local.matrix)
        )
        full[local.module, local.matrix] = 0.1 * torch.randn(
            local.whole_shape, generator=torch.Generator().manual_seed(seed)
        )
    trainer.model.adapters.load(full)


def main() -> None:
    """Train two steps from PEFT's initial adapters, then put random ones in and export; then a
    checkpoint round trip.
    """
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = make_trainer(model, *map(int, sys.argv[3:6]))
    root = dist.get_rank() == 0
    exporter, batch = Exporter(trainer.model), make_batch()
    initial = dict(exporter.base_tensors())
    steps = [trainer.train_step(batch, LOSS, OPTIM) for _ in range(2)]
    checkpoint.save(trainer, out / "trained", version=2)
    steps.append(trainer.train_step(batch, LOSS, OPTIM))
    assert loading.load(trainer, out / "trained").version == 2
    again = trainer.train_step(batch, LOSS, OPTIM)
    assert again["loss"] == steps[2]["loss"] and again["grad_norm"] == steps[2]["grad_norm"], (
        again,
        steps[2],
    )
    for folder in (a for a in sys.argv[6:] if a not in (*FLAGS, HEAD)):
        assert not loading.load(trainer, Path(folder)).rng_restored
        steps.append(trainer.train_step(batch, LOSS, OPTIM))
    random_adapters(trainer)
    checkpoint.save_adapter(trainer.model, out / "random")
    merged = {n: t.clone() for n, t in exporter.merged_tensors()}
    for name, tensor in exporter.base_tensors():
        assert torch.equal(tensor, initial[name]), f"the base was written: {name}"
    check_part(exporter, merged, root=root)
    if root:
        assert list(merged) == [s.name for s in exporter.manifest().tensors]
        save_file({n: t.contiguous() for n, t in merged.items()}, out / "merged.safetensors")
        facts = {
            "steps": steps,
            "num_parameters": trainer.model.num_parameters,
            "padded": _padded_rows(trainer),
        }
        (out / "facts.json").write_text(json.dumps(facts))
    else:
        _padded_rows(trainer)
    trainer.model.close()
    if trainer.model.config.parallel.expert_tensor > 1:
        with pytest.raises(
            ConfigError, match=r"lora.dropout on experts needs parallel.expert_tensor = 1"
        ):
            make_trainer(model, *map(int, sys.argv[3:6]), lora=LoraConfig(dropout=0.1))
        assert not dist.is_initialized()


def check_part(exporter: Exporter, merged: dict[str, torch.Tensor], *, root: bool) -> None:
    """The tensors with an adapter are known to every rank, and of a part only the parameters that
    it comes from are exported.
    """
    names = [s.name for s in exporter.manifest().tensors]
    changed = exporter.manifest().changed
    ends = ("_proj.", "lm_head.") if HEAD in sys.argv else ("_proj.",)
    assert {names[i] for i in changed} == {n for n in names if any(e in n for e in ends)}
    part = [i for i in changed if "self_attn" in names[i]]
    tasks: set[int] = set()
    got = {}
    for name, tensor in exporter.merged_tensors(part):
        tasks.add(exporter._task)
        got[name] = tensor.clone()
    assert len(part) == 8 and len(tasks) == 4, (part, tasks)  # of two layers: fused qkv and o
    assert list(got) == [names[i] for i in part]
    if root:
        assert all(torch.equal(got[n], merged[n]) for n in got)


def _padded_rows(trainer: Trainer) -> int:
    """Rows of Megatron's embedding over all tensor ranks."""
    rows = [
        p.shape[0] for n, p in trainer.model.modules[0].named_parameters() if "word_embeddings" in n
    ]
    return sum(rows) * trainer.model.config.parallel.tensor


if __name__ == "__main__":
    main()
