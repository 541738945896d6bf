"""One rank of a check of full-parameter training: gradients, two steps, exports, and whatever else
shares the launch.

    ... -m tests.trainer_node.training.full OUT MODEL TENSOR PIPELINE EXPERT [FOLDER OF ANOTHER
    TOPOLOGY ...]

Leaves OUT/gradients.safetensors (first step, HF names), OUT/weights_<n>.safetensors (exported after
n steps), the checkpoint OUT/one_step and OUT/facts.json; of each other folder its checkpoint as
loaded (loaded_<n>) and one step later (resumed_<n>).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams, TrainLora
from tests.trainer_node.data import asked, make_batch
from tests.trainer_node.gradients import finalize, take_gradients
from tests.trainer_node.training.operations import part
from tests.trainer_node.worker import make_trainer
from trainer_node.export.hf_export import export_hf
from trainer_node.export.merged import Exporter
from trainer_node.export.wire_export import WireExport
from trainer_node.jobs import Jobs
from trainer_node.node import Node
from trainer_node.ranks.lockstep import Lockstep
from trainer_node.request import Request
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer
from weight_transfer.digest import tensor_digest

LOSS = LossSpec(name="grpo")
OPTIM = OptimParams(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4)
"""`eps` as in `parity.OPTIM`."""
BUNDLE = 1000


def exported(exporter: Exporter) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone().contiguous() for name, tensor in exporter.merged_tensors()
    }


def check_sharded_equals_whole(trainer: Trainer) -> None:
    """Two steps of AdamW over everything, with the same gradients, give the same bits on every
    rank; state exists once.
    """
    trainer.forward_backward(make_batch(), LOSS)
    finalize(trainer)
    trainer.optimizer.state.clear()
    whole = [torch.nn.Parameter(p.param.detach().clone()) for p in trainer.model.params]
    groups = [
        {"params": [w for w in whole if w.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [w for w in whole if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps
    )
    for w, p in zip(whole, trainer.model.params, strict=True):
        w.grad = p.grad.clone()
    for _ in range(2):
        optimizer.step()
        trainer.optimizer.step(OPTIM, factor=None)
    assert all(torch.equal(w, p.param) for w, p in zip(whole, trainer.model.params, strict=True))
    trainer.drop_pending()
    owned = {id(p) for p, _ in trainer.optimizer.tensors()}
    dense = [p for p in trainer.model.params if not p.expert]
    mine, total = (
        sum(p.param.numel() for p in dense if not only or id(p) in owned) for only in (True, False)
    )
    size = dense[0].group.size()
    assert mine == total if size == 1 else 0.3 * total < mine < 0.7 * total, (mine, total)


def check_refusals(trainer: Trainer, out: Path) -> None:
    """What needs adapters says so, and leaves what is pending."""
    trainer.forward_backward(make_batch(), LOSS)
    with pytest.raises(ConfigError, match=r"needs adapters.*finetuning_type = 'full'"):
        trainer.forward(make_batch(), mode="base")
    with pytest.raises(ConfigError, match="reference 'base'"):
        trainer.check(make_batch(), LossSpec(kl=KlSpec(coefficient=0.1, reference="base")))
    with pytest.raises(ConfigError, match="adapter"):
        checkpoint.save_adapter(trainer.model, out / "adapter")
    assert trainer.drop_pending() == 1


def check_exports(trainer: Trainer, exporter: Exporter, out: Path) -> None:
    """All three ways out give the parameters as they are now: nothing is kept from the publication
    before.
    """
    manifest = exporter.manifest()
    order = [list(range(0, len(manifest.tensors), 2)), list(range(1, len(manifest.tensors), 2))]
    wire = WireExport(trainer.model, manifest, order)
    digests: list[list[int]] = []
    for n in range(2):
        now = exported(exporter)
        digests.append([])
        for k, indices in enumerate(order):
            out_B = torch.empty(wire.chunk_nbytes(k), dtype=torch.uint8)
            wire.fill(k, out_B)
            specs = [manifest.tensors[i] for i in indices]
            for spec, bytes_B in zip(
                specs, out_B.split([spec.nbytes for spec in specs]), strict=True
            ):
                tensor = bytes_B.view(trainer.model.dtype).view(spec.shape)
                assert torch.equal(tensor, now[spec.name]), spec.name
                digests[n].append(tensor_digest(tensor))
        export_hf(trainer.model, exporter, out / f"hf_{n}", shard_bytes=1 << 18)
        files = [load_file(path) for path in sorted((out / f"hf_{n}").glob("*.safetensors"))]
        written = {name: tensor for file in files for name, tensor in file.items()}
        assert written.keys() == now.keys()
        assert all(torch.equal(tensor, now[name]) for name, tensor in written.items())
        trainer.train_step(make_batch(), LOSS, OptimParams(lr=1e-2))
    assert all(a != b for a, b in zip(*digests, strict=True))


def check_bfloat16(model: Path, out: Path) -> None:
    """bf16 weights are the rounding of fp32 masters, which step as fp32 weights do; micro-batches
    add up in fp32; a reload continues to the bit. The node refuses what needs adapters before it
    trains.
    """
    parallel, folder = ParallelConfig(), out / "bf16"
    config = TrainerConfig(
        model=model,
        finetuning_type="full",
        dtype="bfloat16",
        parallel=parallel,
        micro_batch_tokens=16,
    )
    node = Node(config, None)
    assert len(gc.get_objects()) < gc.get_freeze_count() // 10, "collections leave the start's out"
    trainer, exporter, batch = node.trainer, Exporter(node.trainer.model), make_batch()
    sent = asked(TrainLora, output_dir=str(out), tensors=(), loss=LOSS, optim=OPTIM)
    with pytest.raises(ConfigError, match=r"TrainLora \(use TrainMerged\) needs adapters"):
        Jobs(trainer, exporter, Lockstep(trainer.model.control_group)).train_lora(
            Request(sent=sent, buffers=(), received_s=0.0, link=None, aborts={})
        )
    start = exported(exporter)
    assert {t.dtype for n, t in start.items() if n.endswith("_proj.weight")} == {
        torch.bfloat16
    }  # torch's norms are fp32 on a CPU
    parts = [part(batch, i, i + 1) for i in range(len(batch.lengths))]
    alone = []
    for one in parts:
        trainer.forward_backward(one, LOSS)
        trainer.pending = replace(trainer.pending, normalize_by=1.0)
        alone.append(take_gradients(trainer))
    for one in parts:
        trainer.forward_backward(one, LOSS)
    together = take_gradients(trainer)
    for name, tensor in together.items():
        total = torch.zeros_like(tensor)
        for gradients in alone:
            total += gradients[name]
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, total * (1 / batch.num_loss_tokens)), name
    masters = {n: torch.nn.Parameter(t.float()) for n, t in start.items()}
    small = OptimParams(lr=1e-5, weight_decay=0.0, max_grad_norm=None)
    optimizer = torch.optim.AdamW(
        masters.values(),
        lr=small.lr,
        betas=(small.beta1, small.beta2),
        eps=small.eps,
        weight_decay=0.0,
    )
    for step in range(4):
        trainer.forward_backward(batch, LOSS)
        for name, gradient in take_gradients(trainer).items():
            masters[name].grad = gradient
        optimizer.step()
        if step == 2:
            checkpoint.save(trainer, folder, version=3)
        trainer.train_step(batch, LOSS, small)
        last = exported(exporter)
        assert all(torch.equal(t, masters[n].detach().to(t.dtype)) for n, t in last.items())
    # Steps of 1e-5 are far below bf16's distance between most weights: without masters they would
    # have been lost.
    changed = sum(int((last[n] != start[n]).sum()) for n in last) / sum(
        t.numel() for t in last.values()
    )
    assert 0.001 < changed < 0.5, changed
    loading.load(trainer, folder)
    for _ in range(2):
        trainer.train_step(batch, LOSS, small)
    assert all(torch.equal(t, last[n]) for n, t in exported(exporter).items())
    node.close()


def remembers_its_packs(trainer: Trainer, folder: Path) -> None:
    """Measured again after a restart, a pack's size may differ a little; the checkpoint's counts
    then, but not one of another kind of machine.
    """
    model, saved = trainer.model, trainer.micro_batch_tokens
    for wanted, measured, taken in (
        ("auto", saved * 1.03, saved),
        ("auto", saved * 2, saved * 2),
        (saved * 1.03, saved * 1.03, saved * 1.03),
    ):
        config = model.config.model_copy(update={"micro_batch_tokens": wanted})
        trainer.model = replace(model, config=config)
        trainer.micro_batch_tokens = measured
        loading.load(trainer, folder)
        assert trainer.micro_batch_tokens == taken
    trainer.model, trainer.micro_batch_tokens = model, saved
    for bundle, taken in ((BUNDLE * 1.03, BUNDLE), (BUNDLE * 2, BUNDLE * 2)):
        trainer.bundle_tokens = bundle
        loading.load(trainer, folder)
        assert trainer.bundle_tokens == taken
    trainer.bundle_tokens = None


def main() -> None:
    """See the module's docstring."""
    out, model, foreign = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[6:]
    trainer = make_trainer(model, *map(int, sys.argv[3:6]), finetuning_type="full")
    root, exporter, batch = dist.get_rank() == 0, Exporter(trainer.model), make_batch()
    trainer.forward_backward(batch, LOSS)
    gradients = take_gradients(trainer)
    checkpoint.save(trainer, out / "initial", version=0)
    exports, steps = [exported(exporter)], []
    for n in (1, 2):
        steps.append(trainer.train_step(batch, LOSS, OPTIM))
        exports.append(exported(exporter))
        if n == 1:
            trainer.bundle_tokens = BUNDLE
            checkpoint.save(trainer, out / "one_step", version=1, client_state={"row": 7})
            noise = torch.rand(3)
    check_sharded_equals_whole(trainer)
    remembers_its_packs(trainer, out / "one_step")
    loaded = loading.load(trainer, out / "one_step")
    assert (loaded.version, loaded.client_state, loaded.rng_restored) == (1, {"row": 7}, True)
    assert torch.equal(torch.rand(3), noise)
    again = trainer.train_step(batch, LOSS, OPTIM)
    assert all(again[k] == steps[1][k] for k in ("loss", "grad_norm")), (again, steps[1])
    assert all(torch.equal(t, exports[2][n]) for n, t in exported(exporter).items())
    loading.load(trainer, out / "initial")
    assert all(torch.equal(t, exports[0][n]) for n, t in exported(exporter).items())
    assert trainer.optimizer.num_steps(trainer.model.control_group) == 0
    resumed = []
    for folder in foreign:
        assert not loading.load(trainer, Path(folder) / "one_step").rng_restored
        assert trainer.num_steps == 1
        before = exported(exporter)
        resumed.append(trainer.train_step(batch, LOSS, OPTIM))
        if root:
            save_file(before, out / f"loaded_{len(resumed)}.safetensors")
            save_file(exported(exporter), out / f"resumed_{len(resumed)}.safetensors")
        else:
            exported(exporter)
    check_refusals(trainer, out)
    if dist.get_world_size() == 1:
        check_exports(trainer, exporter, out)
    if root:
        save_file(gradients, out / "gradients.safetensors")
        for n, tensors in enumerate(exports):
            save_file(tensors, out / f"weights_{n}.safetensors")
        (out / "facts.json").write_text(
            json.dumps(
                {"steps": steps, "num_parameters": trainer.model.num_parameters, "resumed": resumed}
            )
        )
    trainer.model.close()
    if "RANK" not in os.environ:
        check_bfloat16(model, out)


if __name__ == "__main__":
    main()
