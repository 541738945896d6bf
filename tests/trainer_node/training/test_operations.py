"""Operations on real Megatron: against transformers and PEFT on one rank, and one rank against
other topologies. See `operations.py`.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from tests.trainer_node import bounds
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.tiny import hf_model, make_peft_adapter
from trainer_node.tools.identity_adapter import write_identity_adapter

TOPOLOGIES = {
    "tp2pp2": ("dense_untied", 4, (2, 2, 1)),
    "dp2": ("dense_untied", 2, (1, 1, 1)),
    "moe_tp2pp2ep2": ("moe", 4, (2, 2, 2)),
    "pp2cp2": ("dense_untied", 4, (1, 2, 1), "cp2"),
}


@pytest.fixture(scope="session")
def peft_adapters(models, tmp_path_factory):
    """Model name -> an adapter that the PEFT library made and saved."""
    folder = tmp_path_factory.mktemp("peft")
    return {
        name: make_peft_adapter(models[name], folder / name) for name in ("dense_untied", "moe")
    }


@pytest.fixture(scope="session")
def single_operations(models, peft_adapters, torchrun, tmp_path_factory):
    """Model name -> folder with what one rank did; made once."""

    @functools.cache
    def get(name: str) -> Path:
        out = tmp_path_factory.mktemp(f"operations_{name}")
        torchrun(1, "training.operations", out, models[name], 1, 1, 1, peft_adapters[name])
        return out

    return get


def result(folder: Path) -> dict:
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_topology_changes_nothing(
    topology: str, models, peft_adapters, single_operations, torchrun, tmp_path: Path
) -> None:
    """Log-probs, entropies, losses and gradients within `bounds`: the same sums in
    another order.
    """
    from tests.trainer_node.training.operations import SPECS, close

    name, ranks, sizes, *flags = TOPOLOGIES[topology]
    torchrun(
        ranks, "training.operations", tmp_path, models[name], *sizes, peft_adapters[name], *flags
    )
    one, other = result(single_operations(name)), result(tmp_path)
    for key in ("policy", "base", "allowed", "peft"):
        assert torch.equal(one[key].isinf(), other[key].isinf())
        finite = one[key].isfinite()
        assert (one[key] - other[key])[finite].abs().max() <= bounds.scores(), key
    for loss, ours in other["losses"].items():
        theirs = one["losses"][loss]
        tokens = theirs["metrics"]["tokens"]
        divisor = {"tokens": tokens, "sequences": 4}.get(SPECS[loss].normalize_by, 7)
        assert ours["metrics"].keys() == theirs["metrics"].keys()
        for key, value in theirs["metrics"].items():
            slack = (
                bounds.loss(count=int(tokens)) / divisor
                if key == "loss"
                else bounds.SLOPE * bounds.scores()
            )
            assert abs(ours["metrics"][key] - value) <= slack, (loss, key)
        close(ours["gradients"], theirs["gradients"], relative=bounds.gradients())
    for key, value in one["kl_metrics"].items():
        assert abs(other["kl_metrics"][key] - value) <= bounds.loss(count=1), key
    close(other["kl_gradients"], one["kl_gradients"], relative=bounds.gradients())


def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """What a sequence's tokens but the first are drawn from, [L - 1, V]."""
    return model(input_ids=ids[None]).logits[0, :-1] / temperatures[:, None]


@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_one_rank_equals_transformers_and_peft(
    name: str, models, peft_adapters, single_operations
) -> None:
    """Log-probs (with our adapter and with one that PEFT wrote), entropy, loss and gradient of a
    loss with KL to that one; and loss and gradient of a loss with KL to the base and entropy bonus,
    written again for one sequence at a time; and of the sequence-level one.
    """
    out = single_operations(name)
    ours = result(out)
    base = hf_model(models[name]).eval()
    frozen = hf_model(models[name]).eval()
    policy = PeftModel.from_pretrained(base, out / "random", is_trainable=True)
    other = hf_model(models[name])
    theirs_too = PeftModel.from_pretrained(other, peft_adapters[name]).eval()
    from tests.trainer_node.training.operations import whole_batch

    batch = whole_batch()
    start, losses, kl_sum = (
        0,
        {"dapo_kl_entropy": 0.0, "gspo_kl_given": 0.0, "kl_adapter": 0.0},
        0.0,
    )
    scored = {"policy": [], "base": [], "allowed": [], "peft": []}
    for length in batch.lengths:
        ids = batch.tokens_T[start : start + length]
        rows = slice(start + 1, start + length)
        logits = logits_of(policy, ids, batch.temperatures_T[rows])
        full = logits.log_softmax(-1)
        with torch.no_grad():
            reference = logits_of(frozen, ids, batch.temperatures_T[rows]).log_softmax(-1)
            some = logits[:, :150].log_softmax(-1)
            by_peft = logits_of(theirs_too, ids, batch.temperatures_T[rows]).log_softmax(-1)
            for key, table in (
                ("policy", full),
                ("base", reference),
                ("allowed", some),
                ("peft", by_peft),
            ):
                entropy = -(table.exp() * table).sum(-1)
                padded = torch.nn.functional.pad(table, (0, 300 - table.shape[1]), value=-torch.inf)
                scored[key].append(torch.stack([padded.gather(-1, ids[1:, None])[:, 0], entropy]))
        entropy = -(full.exp() * full).sum(-1)
        lp, ref, ref_peft = (t.gather(-1, ids[1:, None])[:, 0] for t in (full, reference, by_peft))
        mask = batch.loss_mask_T[rows] == 1
        adv, old = batch.advantages_T[rows], batch.sampler_logprobs_T[rows]
        ratio = (lp - old).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
        kl = (ref - lp).exp() - 1 - (ref - lp)
        kl_peft = ((ref_peft - lp).exp() - 1 - (ref_peft - lp)) * mask
        losses["kl_adapter"] = losses["kl_adapter"] + (0.3 * kl_peft - lp * mask).sum()
        kl_sum += kl_peft.sum().item()
        losses["dapo_kl_entropy"] = (
            losses["dapo_kl_entropy"] - ((surrogate - 0.3 * kl + 0.05 * entropy) * mask).sum()
        )
        if mask.any():
            s = (lp - old)[mask].mean().exp()
            a = adv[mask].mean()
            k2 = (batch.reference_logprobs_T[rows] - lp)[mask].square().sum() / 2
            losses["gspo_kl_given"] = (
                losses["gspo_kl_given"] - torch.minimum(s * a, s.clamp(0.8, 1.2) * a) + 0.2 * k2
            )
        start += length
    for key, pieces in scored.items():
        zero = torch.zeros(2, 1)
        theirs = torch.cat([t for piece in pieces for t in (zero, piece)], dim=1)
        assert torch.equal(ours[key].isinf(), theirs.isinf()), key
        finite = theirs.isfinite()
        assert (ours[key] - theirs)[finite].abs().max() <= bounds.scores(), key
    trainable = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    ours["losses"]["kl_adapter"] = {
        "metrics": ours["kl_metrics"],
        "gradients": ours["kl_gradients"],
    }
    assert ours["kl_metrics"]["kl_mean"] == pytest.approx(
        kl_sum / batch.num_loss_tokens, abs=bounds.SLOPE * bounds.scores()
    )
    assert kl_sum / batch.num_loss_tokens > 1e-2
    counts = {
        "dapo_kl_entropy": batch.num_loss_tokens,
        "kl_adapter": batch.num_loss_tokens,
        "gspo_kl_given": 4,
    }
    for loss, count in counts.items():
        found = ours["losses"][loss]
        value = losses[loss] / count
        assert found["metrics"]["loss"] == pytest.approx(
            value.item(), abs=bounds.loss(count=batch.num_loss_tokens) / count
        )
        gradients = torch.autograd.grad(
            value, list(trainable.values()), retain_graph=True, allow_unused=True
        )
        largest = max(g.abs().max().item() for g in gradients if g is not None)
        assert len(found["gradients"]) == len(trainable)
        for n, gradient in zip(trainable, gradients, strict=True):
            hf_name, _, rest = n.removeprefix("base_model.model.").partition(".lora_")
            mine = found["gradients"][f"{hf_name}.{rest[0]}"]
            expected = torch.zeros_like(mine) if gradient is None else gradient
            assert (mine - expected).abs().max().item() <= bounds.gradients() * largest, (loss, n)


@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_an_identity_adapter_from_the_config_is_what_the_trainer_starts_from(
    name, models, single_operations, tmp_path
) -> None:
    """Made only from config.json; the same tensors to the bit, and PEFT loads it and changes
    nothing.
    """
    made = single_operations(name) / "identity"
    if name == "moe":
        made = tmp_path / "made"
        (tmp_path / "model").mkdir()
        shutil.copy(models[name] / "config.json", tmp_path / "model")
        command = [
            sys.executable,
            "-m",
            "trainer_node.tools.identity_adapter",
            "--model",
            str(tmp_path / "model"),
            "--out",
            str(made),
        ]
        command += ["--rank", "4", "--alpha", "8"]
        ran = subprocess.run(
            command,
            cwd=REPO,
            env=child_env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
    with pytest.raises(ConfigError, match="exists; choose a new folder"):
        write_identity_adapter(models[name], made, lora=LoraConfig(rank=4, alpha=8), seed=1234)
    ours, start = (
        load_file(f / "adapter_model.safetensors")
        for f in (made, single_operations(name) / "start")
    )
    assert ours.keys() == start.keys()
    assert all(torch.equal(ours[n], start[n]) for n in ours)
    base = hf_model(models[name]).eval()
    ids = torch.arange(9)[None]
    plain = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, made).eval()
    assert len([n for n in adapted.state_dict() if ".lora_" in n]) == len(ours)
    assert torch.equal(adapted(input_ids=ids).logits, plain)
