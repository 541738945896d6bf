"""One rank of a check of training on the served weights.

    torchrun ... -m tests.trainer_node.training.served_numerics MODEL TENSOR EXPERT [head] [cuda]

After some steps the trainer's log-probs are those of a cold load of the export, bit for bit. In
fp32, where a merge loses next to nothing, the same steps with adapters and with served weights make
the same adapters.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.protocol.config import ALL_LINEAR, LM_HEAD, LoraConfig
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import HEAD, make_trainer, random_adapters
from trainer_node.export.hf_export import export_hf
from trainer_node.export.merged import Exporter
from trainer_node.state import checkpoint
from trainer_node.training import gap_split, served_weights
from trainer_node.training.trainer import Trainer

STEPS = 3
OPTIM = OptimParams(lr=1e-3)
LOSS = LossSpec(name="importance_sampling")


def trainer_on(folder: Path, **options: object) -> Trainer:
    flags = sys.argv[4:]
    targets = (ALL_LINEAR, LM_HEAD) if HEAD in flags else (ALL_LINEAR,)
    return make_trainer(
        folder,
        int(sys.argv[2]),
        1,
        int(sys.argv[3]),
        device="cuda" if "cuda" in flags else "cpu",
        lora=LoraConfig(rank=4, alpha=8, targets=targets),
        **options,
    )


def trained(trainer: Trainer, numerics: str, reference: Path) -> list[torch.Tensor]:
    """The adapters after some steps, each of two batches, one with a KL term to an adapter."""
    model = trainer.model
    model.config = model.config.model_copy(update={"numerics": numerics})
    random_adapters(trainer)
    trainer.optimizer.state.clear()
    kl = KlSpec(coefficient=0.1, estimator="k2", reference="adapter", adapter_dir=str(reference))
    for _ in range(STEPS):
        for loss in (LOSS, LOSS.model_copy(update={"kl": kl})):
            batch = make_batch(loss=loss)
            trainer.check(batch, loss)
            trainer.forward_backward(batch, loss)
        trainer.optim_step(OPTIM)
    return [p.param.detach().clone() for p in model.params]


def check_gradients(folder: Path) -> None:
    dtype = "bfloat16" if "cuda" in sys.argv else "float32"
    trainer = trainer_on(folder, dtype=dtype)
    with tempfile.TemporaryDirectory() as temp:
        shared = [temp]
        dist.broadcast_object_list(shared)
        reference = Path(shared[0]) / "reference"
        random_adapters(trainer)
        for p in trainer.model.params:
            p.param.data.mul_(0.5)
        checkpoint.save_adapter(trainer.model, reference)
        dist.barrier()
        random_adapters(trainer)
        before = [p.param.detach().clone() for p in trainer.model.params]
        ours, theirs = (trained(trainer, n, reference) for n in ("served", "adapters"))
        dist.barrier()
    for one, other, start in zip(ours, theirs, before, strict=True):
        moved = float((other - start).abs().max())
        assert moved > 0.5 * OPTIM.lr
        # AdamW takes a step of lr by each gradient's sign, however small that gradient is.
        assert dtype == "bfloat16" or float((one - other).abs().mean()) < 0.01 * moved
    check_split(trainer)
    trainer.model.close()


def check_split(trainer: Trainer) -> None:
    """Of a sampler with the served weights all of the gap comes from them."""
    model, batch = trainer.model, make_batch()
    model.config = model.config.model_copy(update={"numerics": "adapters"})
    random_adapters(trainer)
    trainer.micro_batch_tokens = 4096  # all in one pack, which adds up in the same order
    adapters_T, served_T = trainer.forward(batch)[0], trainer.forward(batch, mode="served")[0]
    mask_T = batch.loss_mask_T != 0
    gap = float((adapters_T - served_T)[mask_T].abs().mean())
    found = gap_split.metrics(trainer, replace(batch, sampler_logprobs_T=served_T), LOSS)
    assert found == {"gap_weights_mean": gap, "gap_arithmetic_mean": 0.0}, (found, gap)
    found = gap_split.metrics(trainer, replace(batch, sampler_logprobs_T=served_T + 1), LOSS)
    assert abs(found["gap_arithmetic_mean"] - 1) < 1e-5
    for p in model.params:
        p.param.data.zero_()
    assert gap_split.metrics(trainer, batch, LOSS)["gap_weights_mean"] == 0.0
    trainer.steps_since_sent, split = 0, []
    for trainer.num_steps in range(20, 60, 3):  # three steps a job
        if gap_split.is_due(trainer, LOSS):
            split.append(trainer.num_steps)
            gap_split.metrics(trainer, batch, LOSS)
    assert split == [20, 32, 44, 56]
    trainer.steps_since_sent = 1
    trainer.num_steps += 100
    assert not gap_split.is_due(trainer, LOSS)


def check_cold_load(folder: Path) -> None:
    trainer = trainer_on(folder, dtype="bfloat16", numerics="served")
    random_adapters(trainer)
    for _ in range(2):
        trainer.train_step(make_batch(), LOSS, OPTIM)
    batch = make_batch()
    want_T, _ = trainer.forward(batch)
    resident, held = trainer.resident_bytes(), served_weights.nbytes(trainer.model)
    assert 0 < held < resident
    trainer.offload()
    assert served_weights.nbytes(trainer.model) == 0
    trainer.reload()
    assert torch.equal(trainer.forward(batch)[0], want_T)
    with tempfile.TemporaryDirectory() as temp:
        export_hf(trainer.model, Exporter(trainer.model), Path(temp) / "hf", shard_bytes=1 << 30)
        trainer.model.close()
        cold = trainer_on(Path(temp) / "hf", dtype="bfloat16")
        found_T, _ = cold.forward(batch, mode="base")
        assert torch.equal(found_T, want_T), float((found_T - want_T).abs().max())
        adapters_T, _ = cold.forward(batch)
        assert torch.equal(adapters_T, want_T)  # B is zero
        cold.model.close()


def main() -> None:
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    if int(sys.argv[2]) * int(sys.argv[3]) == 1:
        check_cold_load(folder)
    check_gradients(folder)


if __name__ == "__main__":
    main()
