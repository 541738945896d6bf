"""One rank of a check that base and adapter are sent as the checkpoint and PEFT's file have them.

torchrun ... -m tests.trainer_node.export.rollout_lora MODEL FOLDER TENSOR PIPELINE EXPERT
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import Manifest
from tests.trainer_node.export.gather import LIMIT_S, collect, is_root
from tests.trainer_node.export.wire_orders import shuffled_order
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.export import adapter_tensors
from trainer_node.export.changes import Published
from trainer_node.export.merged import Exporter
from trainer_node.export.wire_export import WireExport
from trainer_node.state import checkpoint
from trainer_node.training.trainer import Trainer
from weight_transfer.layout import views_of

ALPHA, RANK = 6, 4
PREFIX = "base_model.model."


def main() -> None:
    model, folder = map(Path, sys.argv[1:3])
    lora, sizes = LoraConfig(rank=RANK, alpha=ALPHA), list(map(int, sys.argv[3:6]))
    if sizes[2] > 1:  # experts have none
        lora = lora.model_copy(update={"targets": ("q_proj", "k_proj", "v_proj", "o_proj")})
    trainer = make_trainer(model, *sizes, dtype="bfloat16", lora=lora, rollout_weights="lora")
    manifest = adapter_tensors.manifest(trainer.model, Exporter(trainer.model).manifest())
    assert manifest.changed is not None
    part = manifest.part(manifest.changed)
    order = shuffled_order(len(manifest.tensors), 4, seed=1)
    whole = WireExport(trainer.model, manifest, order)
    own_order = shuffled_order(len(part.tensors), 3, seed=2)
    own = WireExport(trainer.model, part, own_order)
    random_adapters(trainer)  # after the plan: adapters are read before each send
    checkpoint.save_adapter(trainer.model, folder / "adapter")
    base = {n: t.bfloat16() for f in model.glob("*.safetensors") for n, t in load_file(f).items()}
    check(whole, order, manifest, base, folder)
    check(own, own_order, part, {}, folder)
    own.release()
    trainer.offload()
    assert all(t.untyped_storage().nbytes() == 0 for t in own._adapters.buffers.values())
    trainer.reload()
    check(own, own_order, part, {}, folder)
    check_that_nothing_is_encoded(trainer, own)


def check(
    export: WireExport,
    order: list[list[int]],
    manifest: Manifest,
    base: dict[str, torch.Tensor],
    folder: Path,
) -> None:
    chunks = collect(export)
    if not is_root():
        return
    expected = dict(base)
    for name, tensor in load_file(folder / "adapter" / "adapter_model.safetensors").items():
        scale = ALPHA / RANK if ".lora_B." in name else 1.0
        expected[name] = (tensor * scale).bfloat16()
    assert {t.name for t in manifest.tensors} == set(expected)
    for indices, chunk_B in zip(order, chunks, strict=True):
        specs = [manifest.tensors[i] for i in indices]
        for spec, tensor in zip(specs, views_of(chunk_B, specs), strict=True):
            assert torch.equal(tensor.cpu(), expected[spec.name]), spec.name


def check_that_nothing_is_encoded(trainer: Trainer, export: WireExport) -> None:
    """The adapters that were kept do not make what was sent."""
    assert not Published(trainer.model, most_bytes=0)._merges(export)
    export.start(limit=time.monotonic() + LIMIT_S)
    if is_root():
        export.drain()
    else:
        export.contribute()


if __name__ == "__main__":
    main()
