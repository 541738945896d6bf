"""One rank of a check of full-parameter training: gradients, two steps, exports, and whatever else shares the launch.

    torchrun ... -m tests.trainer_node.full OUT MODEL TENSOR PIPELINE EXPERT [FOLDER OF ANOTHER TOPOLOGY ...]

Leaves OUT/gradients.safetensors (first step, HF names), OUT/weights_<n>.safetensors (exported after n steps), the checkpoint
OUT/one_step and OUT/facts.json; of each other folder its checkpoint as loaded (loaded_<n>) and one step later (resumed_<n>).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import make_runtime
from trainer_node import checkpoint
from trainer_node.export import Exporter
from trainer_node.runtime import TrainerRuntime

LOSS, OPTIM = LossSpec(name="grpo"), OptimParams(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def exported(exporter: Exporter) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in exporter.merged_tensors()}


def check_sharded_equals_whole(runtime: TrainerRuntime) -> None:
    """Two steps of AdamW over everything, with the same gradients, give the same bits on every rank; state exists once."""
    runtime.forward_backward(make_batch(), LOSS)
    runtime._finalize_gradients(runtime.pending.denominator)
    runtime.optimizer.state.clear()
    whole = [torch.nn.Parameter(p.param.detach().clone()) for p in runtime.params]
    groups = [
        {"params": [w for w in whole if w.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [w for w in whole if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    for w, p in zip(whole, runtime.params, strict=True):
        w.grad = p.grad.clone()
    for _ in range(2):
        optimizer.step()
        runtime.optimizer.step(OPTIM, factor=None)
    assert all(torch.equal(w, p.param) for w, p in zip(whole, runtime.params, strict=True))
    runtime.drop_pending()
    owned = {id(p) for p, _ in runtime.optimizer.tensors()}
    dense = [p for p in runtime.params if not p.expert]
    mine, total = (sum(p.param.numel() for p in dense if not only or id(p) in owned) for only in (True, False))
    size = dense[0].group.size()
    assert mine == total if size == 1 else 0.3 * total < mine < 0.7 * total, (mine, total)


def check_refusals(runtime: TrainerRuntime, out: Path) -> None:
    """What needs adapters says so, and leaves what is pending."""
    runtime.forward_backward(make_batch(), LOSS)
    with pytest.raises(ConfigError, match=r"needs adapters.*finetuning_type = 'full'"):
        runtime.forward(make_batch(), adapters=False)
    with pytest.raises(ConfigError, match="reference 'base'"):
        runtime.forward_backward(make_batch(), LossSpec(kl=KlSpec(coefficient=0.1, reference="base")))
    with pytest.raises(ConfigError, match="adapter"):
        checkpoint.save_adapter(runtime, out / "adapter")
    assert runtime.drop_pending() == 1


def main() -> None:
    """See the module's docstring."""
    out, model, foreign = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[6:]
    runtime = make_runtime(model, *map(int, sys.argv[3:6]), finetuning_type="full")
    root, exporter, batch = dist.get_rank() == 0, Exporter(runtime), make_batch()
    runtime.forward_backward(batch, LOSS)
    gradients = runtime.take_gradients()
    checkpoint.save(runtime, out / "initial", version=0)
    exports, steps = [exported(exporter)], []
    for n in (1, 2):
        steps.append(runtime.train_step(batch, LOSS, OPTIM))
        exports.append(exported(exporter))
        if n == 1:
            checkpoint.save(runtime, out / "one_step", version=1, client_state={"row": 7})
            noise = torch.rand(3)
    check_sharded_equals_whole(runtime)
    loaded = checkpoint.load(runtime, out / "one_step")
    assert (loaded.version, loaded.client_state, loaded.rng_restored) == (1, {"row": 7}, True)
    assert torch.equal(torch.rand(3), noise)
    again = runtime.train_step(batch, LOSS, OPTIM)
    assert all(again[k] == steps[1][k] for k in ("loss", "grad_norm")), (again, steps[1])
    assert all(torch.equal(t, exports[2][n]) for n, t in exported(exporter).items())
    checkpoint.load(runtime, out / "initial")
    assert all(torch.equal(t, exports[0][n]) for n, t in exported(exporter).items())
    assert runtime.optimizer.num_steps() == 0
    resumed = []
    for folder in foreign:
        assert not checkpoint.load(runtime, Path(folder) / "one_step").rng_restored
        assert runtime.num_steps == 1
        before = exported(exporter)
        resumed.append(runtime.train_step(batch, LOSS, OPTIM))
        if root:
            save_file(before, out / f"loaded_{len(resumed)}.safetensors")
            save_file(exported(exporter), out / f"resumed_{len(resumed)}.safetensors")
        else:
            exported(exporter)
    check_refusals(runtime, out)
    if root:
        save_file(gradients, out / "gradients.safetensors")
        for n, tensors in enumerate(exports):
            save_file(tensors, out / f"weights_{n}.safetensors")
        (out / "facts.json").write_text(
            json.dumps({"steps": steps, "num_parameters": runtime.num_parameters, "resumed": resumed})
        )
    runtime.close()


if __name__ == "__main__":
    main()
