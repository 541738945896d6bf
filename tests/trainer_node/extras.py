"""One rank, several checks on real tensors: wrappers, partial checkpoints, bf16, restricted
vocabulary, the grouped kernel.

python -m tests.trainer_node.extras OUT DENSE MOE
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from tests.trainer_node import bounds, families
from tests.trainer_node.data import arrays, make_batch
from tests.trainer_node.tiny import hf_model
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.export.merged import Exporter
from trainer_node.files.generations import MARKER, CheckpointError
from trainer_node.hf.names import decoder_name
from trainer_node.ranks import topology
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer


def check_wrappers(model: Path) -> None:
    """A compiled layer and Megatron's bf16 wrapper change no name, no tensor and no adapter."""
    from megatron.core.transformer.module import Float16Module

    from trainer_node.model import trainable

    trainer = make_trainer(model, 1, 1, 1, dtype="bfloat16")
    random_adapters(trainer)
    plain = dict(Exporter(trainer.model).merged_tensors())
    bare = trainer.model.modules[0]
    names = [decoder_name(n) for n, _ in bare.named_parameters()]
    bare.decoder.layers[0] = torch.compile(bare.decoder.layers[0], backend="eager")
    modules = [Float16Module(trainer.model.provider, bare)]
    wrapped = [n for n, _ in modules[0].named_parameters()]
    assert any(n.startswith("module.") and "_orig_mod." in n for n in wrapped)
    assert [decoder_name(n) for n in wrapped] == names
    assert [
        decoder_name(n.replace("module.", "module.language_model.", 1)) for n in wrapped
    ] == names
    trainer.model.adapters.close()
    del trainer.model.bridge._cached_param_names
    built = trainer.model
    tasks = built.bridge.build_conversion_tasks(built.checkpoint, modules)
    adapters, params, _ = trainable.trainable(
        modules[0],
        tasks,
        config=built.config,
        bridge=built.bridge,
        checkpoint=built.checkpoint,
        provider=built.provider,
        device=built.device,
    )
    trainer = Trainer(
        replace(built, modules=modules, conversion_tasks=tasks, adapters=adapters, params=params)
    )
    random_adapters(trainer)
    again = dict(Exporter(trainer.model).merged_tensors())
    base = load_file(model / "model.safetensors")
    assert list(again) == list(plain)
    for name, tensor in again.items():
        assert tensor.dtype is torch.bfloat16
        # torch's norms are fp32 on a CPU until the wrapper rounds them.
        assert torch.equal(tensor, plain[name].bfloat16()), name
        assert torch.equal(tensor, base[name].bfloat16()) != name.endswith("_proj.weight"), name
    metrics = trainer.train_step(make_batch(), LossSpec(), OptimParams())
    assert metrics["grad_norm"] > 0
    assert {p.param.dtype for p in trainer.model.params} == {torch.float32}
    trainer.model.close()


def refuses(trainer: Trainer, folder: Path, *words: str) -> None:
    before = [p.param.clone() for p in trainer.model.params]
    with pytest.raises(CheckpointError) as caught:
        loading.load(trainer, folder)
    assert all(w in str(caught.value) for w in words), caught.value
    assert all(torch.equal(p.param, b) for p, b in zip(trainer.model.params, before, strict=True))


def check_checkpoints(model: Path, out: Path) -> None:
    """A checkpoint with something missing is refused and changes nothing; a foreign folder is not
    replaced.
    """
    trainer = make_trainer(model, 1, 1, 1)
    random_adapters(trainer)
    whole, broken = out / "whole", out / "broken"
    checkpoint.save(trainer, whole, version=3)
    checkpoint.save(trainer, whole, version=4)  # over the first
    assert not [p for p in out.iterdir() if p.name.startswith(".")]
    trainer.train_step(make_batch(), LossSpec(), OptimParams())
    for victim in (
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "state/__0_0.distcp",
        "rank_0.pt",
        MARKER,
    ):
        shutil.copytree(whole, broken)
        (broken / victim).unlink()
        refuses(trainer, broken, victim.rpartition("/")[2])
        shutil.rmtree(broken)
    shutil.copytree(whole, broken)
    path = broken / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refuses(trainer, broken, "not whole")
    assert loading.load(trainer, whole).version == 4
    foreign = out / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint of ours"):
        checkpoint.save(trainer, foreign, version=1)
    assert (foreign / "thesis.tex").exists()
    trainer.model.close()
    other = make_trainer(model, 1, 1, 1, lora=LoraConfig(rank=4, alpha=9))
    partial = out / "partial"
    shutil.copytree(whole, partial)
    (partial / "rank_0.pt").unlink()
    refuses(other, partial, "rank_0.pt")
    assert other.model.config.lora.alpha == 9, "a broken one changes no adapter"
    loaded = loading.load(other, whole)
    assert other.model.config.lora.alpha == 8 and "it was rank 4, alpha 9" in loaded.notes[0]
    other.model.close()


def check_restricted_and_partial_targets(model: Path) -> None:
    """Log-probs over allowed ids are higher than over all; adapters on some parts of fused linears
    train and export.
    """
    trainer = make_trainer(
        model, 1, 1, 1, lora=LoraConfig(rank=4, alpha=8, targets=("k_proj", "up_proj", "o_proj"))
    )
    base = dict(Exporter(trainer.model).base_tensors())
    values = arrays()
    allowed = (3, 5, 11)
    picked = values["loss_mask"] == 1
    values["tokens"][picked] = [allowed[i % 3] for i in range(picked.sum())]
    free = trainer.forward_backward(make_batch(values), LossSpec(name="cross_entropy"))[0].loss
    assert trainer.drop_pending() == 1
    loss = LossSpec(name="cross_entropy", allowed_token_ids=allowed)
    losses = [
        trainer.train_step(make_batch(values), loss, OptimParams(lr=1e-2))["loss"] for _ in range(3)
    ]
    count = int(picked.sum())
    assert losses[0] < free / count - 2
    assert losses[2] < losses[0]
    changed = {
        n.split(".")[-2]
        for n, t in Exporter(trainer.model).merged_tensors()
        if not torch.equal(t, base[n])
    }
    assert changed == {"k_proj", "up_proj", "o_proj"}
    trainer.model.close()


def check_grouped_kernel(moe: Path) -> None:
    """The padded, grouped product that CUDA takes equals the loop, forward and backward, with empty
    experts too.
    """
    from trainer_node.adapters.lora import ExpertAdapter, _Groups

    trainer = make_trainer(moe, 1, 1, 1, lora=LoraConfig(rank=3, alpha=8))
    random_adapters(trainer)
    adapter = next(a for a in trainer.model.adapters.adapters if isinstance(a, ExpertAdapter))
    original, results = _Groups.__init__, []

    class Fused:
        """A CUDA bf16 tensor as `_Groups` sees it."""

        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cpu")

        def __init__(self, x: torch.Tensor) -> None:
            self.shape = x.shape

    for fused in (False, True):
        if fused:
            _Groups.__init__ = lambda self, splits, x: original(self, splits, Fused(x))  # type: ignore[method-assign]
        torch.manual_seed(0)
        x = torch.randn(14, 64, requires_grad=True)
        out = adapter(x, [5, 0, 8, 1])
        (out * torch.randn_like(out)).sum().backward()
        results.append([out.detach(), x.grad, *[p.grad.clone() for p in adapter.parameters()]])
        adapter.zero_grad()
    _Groups.__init__ = original  # type: ignore[method-assign]
    for loop, grouped in zip(*results, strict=True):
        assert loop.abs().max() > 0
        assert torch.allclose(loop, grouped, rtol=1e-5, atol=1e-5)
    trainer.model.close()


def check_random_init(moe: Path, out: Path) -> None:
    """Only config.json is needed; weights have the config's spread; the same seed gives the same
    model.
    """
    folder = out / "config_only"
    folder.mkdir()
    shutil.copy(moe / "config.json", folder)
    exports = []
    for seed in (1, 1, 2):
        trainer = make_trainer(folder, 1, 1, 1, init="random", seed=seed)
        exports.append({n: t.clone() for n, t in Exporter(trainer.model).merged_tensors()})
        trainer.model.close()
    first, same, other = exports
    assert set(first) == set(load_file(moe / "model.safetensors"))
    assert all(torch.equal(first[n], same[n]) for n in first)
    for name, tensor in first.items():
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name])
            assert abs(tensor.std().item() - 0.1) < 0.02, name
        else:
            assert torch.equal(tensor, torch.ones_like(tensor)), name


def check_random_values(out: Path) -> None:
    """No family keeps what was in memory: here every new tensor is NaN until somebody fills it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for family in ("gpt_oss", "qwen2", "nemotron", "deepseek_v3", "qwen3_5_moe"):
        trainer = make_trainer(families.make(family, out / family), 1, 1, 1, init="random")
        for name, tensor in Exporter(trainer.model).merged_tensors():
            assert tensor.abs().max() < 20, name  # NaN is not
        trainer.model.close()
    torch.use_deterministic_algorithms(False)


def check_incomplete(dense: Path, out: Path) -> None:
    """A checkpoint without one of the model's tensors is refused. Bridge would only warn."""
    folder, missing = out / "incomplete", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 of the model's tensors, e.g. {missing}"):
        make_trainer(folder, 1, 1, 1)
    topology.leave()


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 1e4,
}


def check_yarn(dense: Path, out: Path) -> None:
    """Long-context positions, with what Qwen3's model card writes and with all settings."""
    for n, more in enumerate(({}, {"beta_fast": 16, "beta_slow": 2, "truncate": False})):
        folder = out / f"yarn_{n}"
        shutil.copytree(dense, folder)
        raw = json.loads((folder / "config.json").read_text()) | {"rope_parameters": YARN | more}
        (folder / "config.json").write_text(json.dumps(raw))
        trainer, batch = make_trainer(folder, 1, 1, 1, finetuning_type="full"), make_batch()
        starts = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)
        ours = trainer.forward(
            replace(batch, loss_mask_T=torch.ones(len(batch.tokens_T)).index_fill(0, starts, 0))
        )[0]
        model, begin = hf_model(folder), 0
        for ids in batch.tokens_T.long().split(list(batch.lengths)):
            with torch.no_grad():
                table = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            theirs = table.gather(-1, ids[1:, None])[:, 0]
            mine = ours[begin + 1 : begin + len(ids)]
            assert (mine - theirs).abs().max() <= bounds.scores(), more
            begin += len(ids)
        trainer.model.close()


if __name__ == "__main__":
    folder, dense_model, moe_model = map(Path, sys.argv[1:4])
    assert not logging.getLogger().handlers, "an import has configured the root logger"
    check_checkpoints(dense_model, folder)
    check_restricted_and_partial_targets(dense_model)
    check_random_init(moe_model, folder)
    check_random_values(folder)
    check_grouped_kernel(moe_model)
    check_wrappers(dense_model)
    check_incomplete(dense_model, folder)
    check_yarn(dense_model, folder)
