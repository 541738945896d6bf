"""The parity matrix: topologies x dense, MoE x RL, SFT x LoRA, full parameters, against one rank;
and one rank against transformers, PEFT and torch.optim; each topology once with a value head. See
`parity.py`.

Tolerances (fp32) are those of `bounds`: the same sums in another order. Trained and exported
tensors: `bounds.two_steps`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from orchestrator.protocol.messages import ValueSpec
from tests.trainer_node import bounds
from tests.trainer_node.data import LENGTHS
from tests.trainer_node.references import paper_gae
from tests.trainer_node.tiny import hf_model
from tests.trainer_node.topologies import DENSE, MOE, load, options

LAUNCHES = (
    [("dense_tied", t) for t in DENSE] + [("dense_untied", "tp2pp2")] + [("moe", t) for t in MOE]
)
CELLS = [f"{t}-{k}" for t in ("lora", "full") for k in ("rl", "sft")]
FEWER = {"tp2ep2-cp2", "tp2-no-sequence-etp2", "dp2ep2-etp2"}
"""Topologies of what other ones have each alone: the two cells that have most in them."""
MATRIX = [
    (m, t, c) for m, t in LAUNCHES for c in CELLS if t not in FEWER or c in ("lora-rl", "full-sft")
]
GAE = {"dense_tied": "lora-gae", "dense_untied": "full-gae", "moe": "full-gae"}
"""The cell with a value head, of each model."""
GAE_MATRIX = [(m, t, GAE[m]) for m, t in LAUNCHES] + [("moe", "tp2ep2", "lora-gae")]


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two cells, by every tolerance."""
    from tests.trainer_node.training.parity import OPTIM

    assert (ours["scores"] - theirs["scores"]).abs().max() <= bounds.scores()
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        for key in (
            "loss",
            "tokens",
            "num_sequences",
            "clip_fraction",
            "grad_norm",
            "entropy_mean",
        ):
            assert (key in mine) == (key in other)
            count, norm = int(other["tokens"]), other.get("grad_norm", 0.0)
            slack = {
                "loss": bounds.loss(count=count) / count,
                "entropy_mean": bounds.scores(),
                "grad_norm": bounds.gradients() * norm,
            }.get(key, 0.0)
            assert abs(mine.get(key, 0.0) - other.get(key, 0.0)) <= slack, key
    compare_values(ours, theirs)
    error = bounds.gradients() * largest(theirs["gradients"])
    near(ours["gradients"], theirs["gradients"], error)
    step_error = bounds.two_steps(OPTIM, gradient=error, norm=theirs["metrics"][1]["grad_norm"])
    near(ours["trained"], theirs["trained"], step_error)
    near(ours["exported"], theirs["exported"], step_error)


def compare_values(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """A value is about as large as a logit. A return sums up to `max(LENGTHS)` errors of two
    values, and so does an advantage, which is less its mean and divided by a deviation above 1.
    """
    assert ("values" in ours) == ("values" in theirs)
    if "values" not in ours:
        return
    of_sum = 2 * max(LENGTHS) * bounds.scores()
    for mine, other, slack in zip(
        ours["values"], theirs["values"], (bounds.scores(), of_sum, 2 * of_sum), strict=True
    ):
        assert (mine - other).abs().max() <= slack
        assert other.abs().max() > 0.1
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        for key, slack in (
            ("value_mean", bounds.scores()),
            ("return_mean", of_sum),
            ("explained_variance", of_sum),
            ("value_loss", bounds.SLOPE * bounds.scores()),
            ("value_clip_fraction", 0.0),
        ):
            assert abs(mine[key] - other[key]) <= slack, key
    assert [m["value_clip_fraction"] > 0 for m in theirs["metrics"]] == [False, False, True]


def largest(tensors: dict[str, torch.Tensor]) -> float:
    return max(t.abs().max().item() for t in tensors.values())


def near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    difference, name = max(((ours[n] - theirs[n]).abs().max().item(), n) for n in ours)
    assert difference <= bound, f"{name} differs by {difference:.1e}, {bound:.1e} allowed"


@pytest.mark.parametrize(("model", "topology", "cell"), MATRIX + GAE_MATRIX)
def test_topology_changes_nothing(
    model: str, topology: str, cell: str, models, single_parity, torchrun, tmp_path: Path
) -> None:
    ranks, sizes = MOE[topology]
    torchrun(
        ranks,
        "training.parity",
        tmp_path,
        models[model],
        *sizes,
        *cell.split("-"),
        *options(topology),
    )
    compare(load(tmp_path), load(single_parity(model, cell)))


@pytest.mark.parametrize(
    ("model", "cell"),
    [(m, c) for m in ("dense_tied", "dense_untied", "moe") for c in CELLS]
    + [("dense_tied", "lora-gae"), ("moe", "full-gae")],
)
def test_one_rank_equals_the_reference(model: str, cell: str, models, single_parity) -> None:
    """Two steps by transformers, PEFT and torch.optim, one sequence at a time."""
    folder, kind, is_lora = (
        single_parity(model, cell),
        cell.partition("-")[2],
        cell.startswith("lora"),
    )
    policy: Any = hf_model(models[model])
    if is_lora:
        policy = PeftModel.from_pretrained(policy, folder / "adapter", is_trainable=True)
    compare(reference_cell(policy, kind, is_lora=is_lora), load(folder))


def reference_cell(model: Any, kind: str, *, is_lora: bool) -> dict[str, Any]:
    """What `parity.cell` returns, by none of its code."""
    from tests.trainer_node.training.parity import LOSSES, OPTIM, batches, head

    named = {hf_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    is_valued = LOSSES[kind].value is not None
    weight_H = torch.nn.Parameter(head(model.config.hidden_size))
    values = [weight_H] * is_valued
    decays = [p for p in named.values() if p.dim() > 1]
    others = [p for p in named.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decays, "weight_decay": OPTIM.weight_decay},
            {"params": others, "weight_decay": 0.0},
            *({"params": [p], "weight_decay": 0.0, "lr": OPTIM.value_lr} for p in values),
        ],
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    named |= {"value_head.weight": weight_H} if is_valued else {}
    first, second = batches(LOSSES[kind])
    if is_valued:
        first, second = (valued(model, weight_H, b, LOSSES[kind].value) for b in (first, second))
    with torch.no_grad():
        pieces = zip(
            first.tokens_T.split(LENGTHS), temperatures_of(first).split(LENGTHS), strict=True
        )
        rows = [
            torch.nn.functional.pad(torch.stack(score(model, *piece)), (1, 0)) for piece in pieces
        ]
    result: dict[str, Any] = {"scores": torch.cat(rows, dim=1), "metrics": []}
    if is_valued:
        result["values"] = torch.stack([first.values_T, first.returns_T, first.advantages_T])
    for step, batch in enumerate((first, second)):
        optimizer.zero_grad()
        metrics, loss = reference_loss(model, batch, kind)
        if is_valued:
            more, value_loss = reference_value_loss(model, weight_H, batch, LOSSES[kind].value)
            loss = loss + LOSSES[kind].value.coefficient * value_loss
            metrics |= more | {"loss": loss.item()}
        loss.backward()
        for p in named.values():
            # An expert without tokens has no gradient in transformers.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            result["gradients"] = {n: p.grad.clone() for n, p in named.items()}
            result["metrics"].append(metrics)
        norm = torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.max_grad_norm)
        optimizer.step()
        result["metrics"].append(metrics | {"grad_norm": norm.item()})
    result["trained"] = {n: p.detach().clone() for n, p in named.items()}
    whole = model.merge_and_unload() if is_lora else model
    tied = whole.config.tie_word_embeddings
    result["exported"] = {
        n: t for n, t in whole.state_dict().items() if not (tied and n == "lm_head.weight")
    }
    return result


def hf_name(name: str) -> str:
    """PEFT's parameter names to those of `gradients.take_gradients`."""
    bare = name.removeprefix("base_model.model.").replace(".default", "")
    return bare.removesuffix(".weight") if ".lora_" in bare else bare


def temperatures_of(batch: Any) -> torch.Tensor:
    """Those of the batch, or 1."""
    return torch.ones(len(batch.tokens_T)) if batch.temperatures_T is None else batch.temperatures_T


def score(
    model: Any, ids: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each token but the first at its temperature, [L - 1] each."""
    table = (model(input_ids=ids[None]).logits[0, :-1] / temperatures[1:, None]).log_softmax(-1)
    return table.gather(-1, ids[1:, None])[:, 0], -(table.exp() * table).sum(-1)


def values_of(model: Any, weight_H: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The value before each token but the first, [L - 1]: of the hidden states after the norm."""
    return (
        model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0, :-1] @ weight_H
    )


@torch.no_grad()
def valued(model: Any, weight_H: torch.Tensor, batch: Any, spec: ValueSpec) -> Any:
    """The batch with values, returns and advantages."""
    pieces = [values_of(model, weight_H, ids) for ids in batch.tokens_T.split(LENGTHS)]
    values_T = torch.cat([torch.nn.functional.pad(v, (1, 0)) for v in pieces]) * batch.loss_mask_T
    advantages, returns = (torch.from_numpy(a).float() for a in paper_gae(batch, values_T, spec))
    return replace(batch, values_T=values_T, returns_T=returns, advantages_T=advantages)


def reference_value_loss(
    model: Any, weight_H: torch.Tensor, batch: Any, spec: ValueSpec
) -> tuple[dict[str, float], torch.Tensor]:
    """The clipped squared error of the values, divided, and its metrics."""
    total, clipped = torch.zeros(()), 0
    fields = (batch.tokens_T, batch.loss_mask_T, batch.values_T, batch.returns_T)
    for ids, mask, old, wanted in zip(*(t.split(LENGTHS) for t in fields), strict=True):
        picked = mask[1:] == 1
        value, old, wanted = (
            t[picked] for t in (values_of(model, weight_H, ids), old[1:], wanted[1:])
        )
        near = torch.max(torch.min(value, old + spec.clip), old - spec.clip)
        plain, bounded = (value - wanted) ** 2, (near - wanted) ** 2
        total = total + torch.where(bounded > plain, bounded, plain).sum() / 2
        clipped += (bounded > plain).sum().item()
    picked, count = batch.loss_mask_T == 1, batch.num_loss_tokens
    v, r = (t[picked].double() for t in (batch.values_T, batch.returns_T))
    metrics = {
        "value_loss": total.item() / count,
        "value_clip_fraction": clipped / count,
        "value_mean": v.mean().item(),
        "return_mean": r.mean().item(),
        "explained_variance": 1 - ((r - v).var() / r.var()).item(),
    }
    return metrics, total / count


def reference_loss(model: Any, batch: Any, kind: str) -> tuple[dict[str, float], torch.Tensor]:
    """The losses of `parity.LOSSES` written again: cross-entropy, and PPO's clipped surrogate with
    dual clip and an entropy bonus.
    """
    total, entropies, clipped = torch.zeros(()), torch.zeros(()), 0.0
    fields = (
        batch.tokens_T,
        temperatures_of(batch),
        batch.loss_mask_T,
        batch.advantages_T,
        batch.sampler_logprobs_T,
    )
    for ids, temperature, mask, advantage, old in zip(
        *(t.split(LENGTHS) for t in fields), strict=True
    ):
        logp, entropy = score(model, ids, temperature)
        picked, a = mask[1:] == 1, advantage[1:]
        entropies = entropies + entropy[picked].sum()
        if kind == "sft":
            total = total - logp[picked].sum()
            continue
        ratio = (logp - old[1:]).exp()
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        dual = torch.where(a < 0, torch.maximum(surrogate, 3.0 * a), surrogate)
        total = total - dual[picked].sum() - 0.02 * entropy[picked].sum()
        binds = (dual != ratio * a)[picked]
        clipped += binds.sum().item()
    count = batch.num_loss_tokens
    metrics = {
        "loss": total.item() / count,
        "tokens": count,
        "num_sequences": len(LENGTHS),
        "clip_fraction": clipped / count,
        "entropy_mean": entropies.item() / count,
    }
    return metrics, total / count
