"""Real Megatron on gloo, against PEFT, transformers and torch, and against itself on other
topologies.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.trainer_node import bounds
from tests.trainer_node.data import make_batch
from tests.trainer_node.references import peft_merged, reference_loss
from tests.trainer_node.tiny import VOCAB, hf_model
from tests.trainer_node.worker import HEAD

TOPOLOGIES = {
    "tp2": ("dense_tied", 2, (2, 1, 1)),
    "tp2pp2": ("dense_untied", 4, (2, 2, 1)),
    "tp2pp2_head": ("dense_untied", 4, (2, 2, 1), HEAD),
    "dp2": ("dense_tied", 2, (1, 1, 1)),
    "moe_ep2": ("moe", 2, (1, 1, 2)),
    "moe_tp2pp2ep2": ("moe", 4, (2, 2, 2)),
    "dp2cp2": ("dense_tied", 4, (1, 1, 1), "cp2"),
    "moe_dp2etp2": ("moe", 2, (1, 1, 1), "etp2"),
}


@pytest.fixture(scope="session")
def single(models, torchrun, tmp_path_factory):
    """Model name and flags -> folder with what one rank did; made once."""

    @functools.cache
    def get(name: str, *flags: str) -> Path:
        out = tmp_path_factory.mktemp(name)
        torchrun(1, "worker", out, models[name], 1, 1, 1, *flags)
        return out

    return get


def facts(folder: Path) -> dict:
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("name", ["dense_tied", "dense_untied", "moe"])
def test_export_equals_peft_merge(name: str, models, single) -> None:
    """Bit for bit: PEFT computes the same product of the same shapes in fp32, and adds it once."""
    out = single(name)
    ours, theirs = load_file(out / "merged.safetensors"), peft_merged(models[name], out / "random")
    base = load_file(models[name] / "model.safetensors")
    assert set(ours) == set(base)
    assert ("lm_head.weight" in ours) == (name != "dense_tied")
    assert ours["model.embed_tokens.weight"].shape[0] == VOCAB < facts(out)["padded"]
    for tensor_name, tensor in ours.items():
        assert torch.equal(tensor, theirs[tensor_name]), tensor_name
        adapted = "_proj." in tensor_name
        assert torch.equal(tensor, base[tensor_name]) != adapted, tensor_name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_topology_changes_nothing(topology: str, models, single, torchrun, tmp_path: Path) -> None:
    """Merged export bit for bit; loss and gradient norm of three steps within `bounds`, and of the
    third once more, from one rank's checkpoint of two steps (adapters and moments).
    """
    name, ranks, sizes, *flags = TOPOLOGIES[topology]
    alone = single(name, *(f for f in flags if f == HEAD))
    torchrun(ranks, "worker", tmp_path, models[name], *sizes, alone / "trained", *flags)
    one, other = facts(alone), facts(tmp_path)
    assert one["num_parameters"] == other["num_parameters"]
    for a, b in zip([*one["steps"], one["steps"][2]], other["steps"], strict=True):
        for key in (
            "loss",
            "grad_norm",
            "logprob_gap_mean",
            "logprob_gap_max",
            "clip_fraction",
            "tokens",
        ):
            assert b[key] == pytest.approx(
                a[key], rel=bounds.gradients(), abs=bounds.SLOPE * bounds.scores()
            ), key
    ours, theirs = (
        load_file(tmp_path / "merged.safetensors"),
        load_file(alone / "merged.safetensors"),
    )
    assert set(ours) == set(theirs)
    for tensor_name, tensor in ours.items():
        assert torch.equal(tensor, theirs[tensor_name]), tensor_name


@pytest.mark.parametrize(
    ("name", "flags"),
    [("dense_tied", ()), ("moe", ()), ("dense_untied", (HEAD,))],
    ids=["dense_tied", "moe", "dense_untied_head"],
)
def test_two_steps_equal_transformers_and_peft(
    name: str, flags: tuple[str, ...], models, single
) -> None:
    """Loss, norm and the adapters after two AdamW steps, against a plain loop over transformers +
    PEFT from the same initial A.
    """
    from tests.trainer_node.worker import LOSS, OPTIM
    from trainer_node.adapters.linears import initial_lora_a

    base = hf_model(models[name])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets += ["lm_head"] if HEAD in flags else []
    out = single(name, *flags)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    )
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for n, p in trainable.items():
        if "lora_A" in n:
            hf_name = n.removeprefix("base_model.model.").split(".lora_A")[0]
            p.data.copy_(initial_lora_a(hf_name, rank=4, in_features=p.shape[1], seed=1234))
    optimizer = torch.optim.AdamW(
        trainable.values(),
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
        weight_decay=OPTIM.weight_decay,
    )
    steps = facts(out)["steps"]
    for step in range(2):
        optimizer.zero_grad()
        loss = reference_loss(model, LOSS.clip_low, LOSS.clip_high)
        loss.backward()
        for p in trainable.values():
            # An expert without tokens has no gradient in transformers and a zero one in a batched
            # adapter.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), OPTIM.max_grad_norm)
        optimizer.step()
        assert steps[step]["loss"] == pytest.approx(loss.item(), abs=bounds.SLOPE * bounds.scores())
        assert steps[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours = load_file(out / "trained" / "adapter" / "adapter_model.safetensors")
    assert len(ours) == len(trainable)
    for n, p in trainable.items():
        # Adam divides by the square root of a gradient's square: where a gradient is near eps, its
        # rounding shows.
        difference = (ours[n.replace(".default", "")] - p).abs().max().item()
        assert difference < 1e-4, (n, difference)


@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_peft_scores_what_we_export(name: str, models, single, tmp_path: Path) -> None:
    """The reference tool on the adapter, against transformers on our merged tensors; and it notices
    every class of weights.
    """
    from trainer_node.tools.reference import answer

    out = single(name)
    sequences = [[5, 17, 200, 3, 44, 120], list(range(30))]
    request = {
        "model": str(models[name]),
        "dtype": "float32",
        "sequences": sequences,
        "perturb": True,
    }
    result = answer({**request, "trained": {"0": None, "1": str(out / "random")}}, "cpu")
    ours = hf_model(models[name])
    ours.load_state_dict(load_file(out / "merged.safetensors"))
    from trainer_node.tools.reference import max_difference, score

    assert max_difference(score(ours, sequences), result["logprobs"]["1"]) == 0.0
    assert max_difference(result["logprobs"]["0"], result["logprobs"]["1"]) > 1e-2
    classes = {"q", "k", "v", "o", "gate", "up", "down", "embedding", "head", "norm"}
    assert set(result["perturbed"]) == classes | (
        {"first_expert", "last_expert"} if name == "moe" else set()
    )
    assert min(result["perturbed"].values()) > 2e-4, result["perturbed"]


def test_batch_order_does_not_matter() -> None:
    """The shared batch has loss tokens in every sequence, or the checks above would prove less than
    they say.
    """
    assert make_batch().num_loss_tokens == sum(n - 2 for n in make_batch().lengths)
