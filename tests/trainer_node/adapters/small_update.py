"""One rank of a check that a small update moves the trainer's own forward pass in bf16.

    torchrun ... -m tests.trainer_node.adapters.small_update MODEL TENSOR EXPERT [head] [dropout]
    [no-sequence] [cuda]

Each module with an adapter runs on the same input without it, with a small delta, and with a delta
a few thousand times as large, which rounding leaves alone. The small delta must be in the output in
the mean: <y - y0, d> / <d, d> is 1, within what rounding each element at random may move it. If the
adapter's product were added to an output that is rounded already, it would be nearly 0.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file

from orchestrator.protocol.config import ALL_LINEAR, LM_HEAD, LoraConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.numerics import SIGMAS
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import HEAD, make_trainer, random_adapters
from trainer_node.adapters.dense_lora import DenseAdapter, WeightAdapter
from trainer_node.adapters.lora import ExpertAdapter
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.hf_export import MERGE, export_hf
from trainer_node.export.merged import Exporter
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer

TOKENS = 4096
SMALL, SMALL_EXPERTS, LARGE = 2.0**-16, 2.0**-10, 4096.0
"""Factors of B, which is about 0.1, and how much larger the other one is. Experts' outputs are
rounded several times, so fewer of their elements tell."""
SHARPEST = 0.15
"""Largest standard error of a share: a share of 0 is then some 6 of them from 1."""


def share(
    run: Callable[[], torch.Tensor], scale: Callable[[float], None], factor: float
) -> tuple[float, float]:
    """Share of the small delta in the output, and its standard error."""
    found = []
    for times in (0.0, 1.0, LARGE):
        scale(factor * times)
        with torch.no_grad():
            found.append(run().double())
    scale(1.0)
    base, small, large = found
    d = (large - base) / LARGE
    error = small - base - d
    d2 = float(d.square().sum())
    return float(((small - base) * d).sum()) / d2, math.sqrt(float((d * error).square().sum())) / d2


def check(
    name: str, run: Callable[[], torch.Tensor], params: list[torch.Tensor], factor: float = SMALL
) -> None:
    kept = [p.detach().clone() for p in params]

    def scale(by: float) -> None:
        for p, whole in zip(params, kept, strict=True):
            p.data.copy_(whole * by)

    found, error = share(run, scale, factor)
    print(f"{name}: {found:.3f} +- {error:.3f} of the update")
    assert error < SHARPEST, f"{name}: standard error {error:.3f}"
    assert abs(found - 1) < SIGMAS * error, f"{name}: {found:.3f} +- {error:.3f} of the update"


def check_linears(trainer: Trainer) -> int:
    """Of each kind of dense linear one."""
    config, seen = trainer.model.provider, set[tuple[str, ...]]()
    for module, adapter in trainer.model.adapters.by_module.items():
        kind = (
            tuple(n.rpartition(".")[2] for n in adapter.names)
            if isinstance(adapter, DenseAdapter)
            else ()
        )
        if not kind or kind in seen:
            continue
        seen.add(kind)
        weight = next(p for n, p in module.named_parameters() if n == "weight")
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        tokens = TOKENS if adapter.row_parallel else TOKENS // parts
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn(tokens, 1, weight.shape[1], generator=generator, device=weight.device).to(
            weight.dtype
        )

        def run(module=module, x=x) -> torch.Tensor:
            out = module(x)[0]
            return out[0] if isinstance(out, tuple) else out

        check("+".join(kind), run, list(adapter.lora_B.values()))
    return len(seen)


def check_experts(trainer: Trainer) -> int:
    """The down projections of a layer's experts; the rest of the layer stays the same."""
    found = 0
    for layer in (m for m in trainer.model.modules[0].modules() if isinstance(m, MoELayer)):
        adapter = trainer.model.adapters.by_module.get(layer.experts.linear_fc2)
        fc1 = trainer.model.adapters.by_module.get(layer.experts.linear_fc1)
        if not isinstance(adapter, ExpertAdapter) or found:
            continue
        for p in () if fc1 is None else fc1.lora_B.values():
            p.data.zero_()
        generator = torch.Generator(trainer.model.device).manual_seed(0)
        x = torch.randn(
            TOKENS,
            1,
            trainer.model.provider.hidden_size,
            generator=generator,
            device=trainer.model.device,
        ).to(trainer.model.dtype)
        params = list(adapter.lora_B.values())
        check("experts.down_proj", lambda layer=layer, x=x: layer(x)[0], params, SMALL_EXPERTS)
        found += 1
    return found


def check_head(trainer: Trainer) -> None:
    """What the trainer multiplies with has the bits of a publication."""
    exporter = Exporter(trainer.model)
    want = dict(exporter.merged_tensors())["lm_head.weight"]
    weight = trainer.model.head.output_layer.weight
    found = trainer.model.adapters.of_head(weight)
    assert torch.equal(found[: len(want)].view(torch.int16), want.view(torch.int16))
    assert not torch.equal(found, weight)
    heads = [a for a in trainer.model.adapters.adapters if isinstance(a, WeightAdapter)]
    found.float().square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for a in heads for p in a.parameters())


def check_packs(trainer: Trainer) -> None:
    """A token's log-prob does not depend on the cut into packs."""
    batch, found = make_batch(), []
    for trainer.micro_batch_tokens in (16, 4096):
        found.append(trainer.forward(batch)[0])
    assert torch.equal(*found), float((found[0] - found[1]).abs().max())


def check_checkpoint(trainer: Trainer, folder: Path) -> None:
    """A loaded version is merged again as it was, with the seed that it had; the next step's as the
    config says, with the same seed."""
    adapters, exporter = trainer.model.adapters, Exporter(trainer.model)

    def merged() -> dict[str, torch.Tensor]:
        return {n: t.clone().view(torch.int16) for n, t in exporter.merged_tensors()}

    configured = adapters.rounding
    adapters.rounding = Rounding(mode="nearest", seed=5)
    want = merged()
    checkpoint.save(trainer, folder / "saved", version=1)
    export_hf(trainer.model, exporter, folder / "hf", shard_bytes=1 << 30)
    assert json.loads((folder / "hf" / MERGE).read_text()) == {"mode": "nearest", "seed": 5}
    exported = load_file(folder / "hf" / "model.safetensors")
    assert all(torch.equal(exported[n].view(torch.int16), t.cpu()) for n, t in want.items())
    adapters.rounding = configured
    found = merged()
    assert any(not torch.equal(found[name], want[name]) for name in want)
    loading.load(trainer, folder / "saved")
    assert adapters.rounding == Rounding(mode="nearest", seed=5)
    found = merged()
    assert all(torch.equal(found[name], want[name]) for name in want)
    trainer.model.checkpoint.fingerprint = "f" * 32
    with pytest.raises(CheckpointError, match=r"trained on other base weights .* now ffff"):
        loading.load(trainer, folder / "saved")
    trainer.train_step(make_batch(), LossSpec(name="grpo"), OptimParams(lr=1e-3))
    assert adapters.rounding == Rounding(mode="stochastic", seed=5)


def main() -> None:
    torch.manual_seed(0)
    flags = sys.argv[4:]
    targets = (ALL_LINEAR, LM_HEAD) if HEAD in flags else (ALL_LINEAR,)
    trainer = make_trainer(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        1,
        int(sys.argv[3]),
        sequence="no-sequence" not in flags,
        dtype="bfloat16",
        device="cuda" if "cuda" in flags else "cpu",
        lora=LoraConfig(
            rank=4, alpha=8, targets=targets, dropout=0.5 if "dropout" in flags else 0.0
        ),
    )
    random_adapters(trainer)
    assert check_linears(trainer) >= 2
    is_moe = bool(trainer.model.routers)
    if HEAD in flags:
        check_head(trainer)
    assert check_experts(trainer) == int(is_moe)
    random_adapters(trainer)
    if torch.distributed.get_world_size() == 1:
        if trainer.model.device.type == "cpu" and not is_moe:
            check_packs(trainer)
        with tempfile.TemporaryDirectory() as folder:
            check_checkpoint(trainer, Path(folder))
    trainer.model.close()


if __name__ == "__main__":
    main()
