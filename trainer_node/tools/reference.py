"""The independent reference: PEFT merges base and adapter, and transformers scores them. It shares
no code with the rest of splice.

    python -m trainer_node.tools.reference --request request.json --out answer.json [--device cuda]

Request: `{"model": folder, "dtype": "float32" | "bfloat16", "trained": {"0": folder or null, "1":
folder, ...}, "sequences": [[token ids], ...], "perturb": bool, "served": {"0": [[log-prob of token
t given its prefix, null first], ...]}, "tau": nats, "rounding_seed": int}`; `served`, `tau` and
`rounding_seed` may be absent. A
folder is a PEFT adapter for the model, or a whole HF checkpoint (it has a config.json); null is the
model itself.

Answer: `logprobs` (per version, sequence and token; null for a sequence's first), `perturbed`
(class -> largest change of a log-prob when one weight tensor of that class gets relative noise, in
the last numbered version), `perturbed_tensors` (class -> that tensor), `perturbed_noise` (class ->
that noise: the first of NOISES that moves a log-prob by more than `visible`), `share_changed`
(bfloat16: version -> share of all elements that differ from the version before after rounding) and
`served_diff` (version -> largest |served - reference|, where `served` was given).

The base is loaded and merged in fp32. With dtype bfloat16 the base is first rounded to bf16, as a
bf16 trainer holds it, and each merged tensor is rounded once more, as it travels: by the thresholds
of `rounding_seed`, in numpy's integers, or to nearest without one. The scoring itself stays in
fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

NOISES = (0.01, 0.1, 1.0)
"""Relative; 1: the tensor is another one. How much a tensor matters depends on the model, so a
check of what can be seen tries more and more."""
ROUNDED_SEQUENCES = 4
"""Sequences that are scored in fp64 as well; fp64 is slow."""
TIMES_ROUNDING = 100
"""Served fp32 differed by some 40 times transformers' rounding on SmolLM2-135M (splice smoke). One
model on one processor: derive it."""


class _Expert(nn.Module):
    """SwiGLU, from views of the stacked weights."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj = _linear(gate), _linear(up)
        self.down_proj, self.act_fn = _linear(down), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[t, H] -> [t, H]"""
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: torch.Tensor = self.down_proj(hidden)
        return out


def _are_swiglu(experts: object) -> bool:
    return hasattr(experts, "gate_up_proj") and hasattr(experts, "act_fn")


def _linear(weight_OI: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI)
    return linear


class _SingleExperts(nn.ModuleList):
    """A layer's experts, as transformers 4 had them."""

    def forward(
        self, x: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H], the sum over each token's experts."""
        out = torch.zeros_like(x)
        for e, expert in enumerate(self):
            token, choice = torch.where(experts_TK == e)
            if len(token):  # an expert without tokens has no gradient
                weighted = expert(x[token]) * weights_TK[token, choice, None]
                out.index_add_(0, token, weighted.to(out.dtype))
        return out


def with_single_experts(model: Any) -> Any:
    """A model with one module for each expert, named as in checkpoints and adapters. Dense models,
    and models whose experts are not plain SwiGLU (gpt-oss), stay as they are.

    transformers 5 stacks a layer's experts in two tensors. PEFT 0.21 then fuses the adapters of
    gate and up, with trainable zeros between them, where it knows the model's type.
    """
    blocks = [m for m in model.modules() if _are_swiglu(getattr(m, "experts", None))]
    for block in blocks:
        old = block.experts
        pairs = zip(old.gate_up_proj.data, old.down_proj.data, strict=True)
        block.experts = _SingleExperts(_Expert(*pair, old.act_fn) for pair in pairs)
    if blocks:
        model.config.model_type += "_single_experts"
    return model


def load_base(folder: str, dtype: str, device: str) -> nn.Module:
    """The base in fp32 on `device`, through bf16 if that is the trainer's dtype."""
    model = with_single_experts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    if dtype == "bfloat16":
        round_to_bf16(model)
    return model.to(device).eval()


@torch.no_grad()
def round_to_bf16(model: nn.Module, rounding_seed: int | None = None) -> None:
    """Round every parameter, in place, and keep it in fp32."""
    for name, parameter in model.named_parameters():
        if rounding_seed is None:
            parameter.copy_(parameter.to(torch.bfloat16))
        else:
            values = parameter.detach().cpu().numpy()
            parameter.copy_(torch.from_numpy(stochastic_bf16(values, name, rounding_seed)))


def stochastic_bf16(values: np.ndarray, name: str, seed: int) -> np.ndarray:
    """fp32 values on bf16's grid: each has its own threshold from 0 to 65,535, which is added to
    its bits before the lower 16 are cut off.

    Values that are bf16 numbers stay. A row's and a column's counter begin where the name's hash
    says. Both are mixed (lowbias32) and made odd; their product's upper half is the threshold.
    """

    def mixed(first: bytes, count: int) -> np.ndarray:
        x = np.arange(count, dtype=np.uint64) + np.uint64(int.from_bytes(first, "little"))
        x &= np.uint64(0xFFFFFFFF)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
        return x ^ (x >> np.uint64(16)) | np.uint64(1)

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    matrix = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)
    rows, columns = mixed(digest[:4], matrix.shape[0]), mixed(digest[4:8], matrix.shape[1])
    bits = matrix.view(np.uint32).astype(np.uint64)
    for row, hashed in enumerate(rows):
        threshold = ((hashed * columns) & np.uint64(0xFFFFFFFF)) >> np.uint64(16)
        is_below_top = (bits[row] & np.uint64(0x7FFFFFFF)) < np.uint64(0x7F7F0000)
        bits[row] = (bits[row] + np.where(is_below_top, threshold, np.uint64(0))) >> np.uint64(16)
    return (bits << np.uint64(16)).astype(np.uint32).view(np.float32).reshape(values.shape)


def merged(
    folder: str, dtype: str, trained: str | None, device: str, rounding_seed: int | None = None
) -> nn.Module:
    """A fresh base with the adapter merged in by PEFT, or the checkpoint itself where `trained` is
    a whole one."""
    if trained is not None and (Path(trained) / "config.json").is_file():
        return load_base(trained, dtype, device)
    model = load_base(folder, dtype, device)
    if trained is not None:
        model = PeftModel.from_pretrained(model, trained).merge_and_unload().eval()  # type: ignore[arg-type]
        if dtype == "bfloat16":
            round_to_bf16(model, rounding_seed)
    return model


@torch.no_grad()
def score(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """log p(token t | tokens before t), one sequence at a time, without padding."""
    device = next(model.parameters()).device
    result: list[list[float | None]] = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)], device=device)
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        result.append([None, *picked.tolist()])
    return result


def max_difference(
    one: Sequence[Sequence[float | None]], other: Sequence[Sequence[float | None]]
) -> float:
    """Largest absolute difference over all tokens that both have."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


@torch.no_grad()
def expert_tokens(model: nn.Module, sequences: Sequence[Sequence[int]]) -> dict[str, int]:
    """Expert's module -> tokens that go to it; empty for a dense model."""
    found = {
        n.removesuffix(".down_proj"): m
        for n, m in model.named_modules()
        if ".experts." in n and n.endswith(".down_proj")
    }
    counts = dict.fromkeys(found, 0)

    def count(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            counts[name] += args[0].shape[0]

        return hook

    hooks = [module.register_forward_pre_hook(count(name)) for name, module in found.items()]
    score(model, sequences)
    for hook in hooks:
        hook.remove()
    return counts


def classes(names: Sequence[str], tokens: Mapping[str, int]) -> dict[str, str]:
    """Class of weights -> one of its tensors; classes that the model does not have are left out.

    The tensor is from the first layer. An expert's is from the layer in which the expert gets the
    most tokens. Experts without tokens are left out.

    Args:
        tokens: as `expert_tokens`.
    """
    busiest: dict[int, str] = {}
    for name, count in sorted(tokens.items(), key=lambda item: item[1]):
        if count:
            busiest[int(name.rpartition(".")[2])] = name
    experts = sorted(busiest)
    endings = {k: f"{k}_proj.weight" for k in ("q", "k", "v", "o", "gate", "up", "down")}
    found = {
        k: [n for n in names if n.endswith(ending) and ".experts." not in n]
        for k, ending in endings.items()
    }
    if experts:
        # The classes gate, up and down are then those of an expert in the middle.
        middle = experts[len(experts) // 2]
        for k in ("gate", "up", "down"):
            found[k] = found[k] or [f"{busiest[middle]}.{k}_proj.weight"]
        found["first_expert"] = [f"{busiest[experts[0]]}.down_proj.weight"]
        found["last_expert"] = [f"{busiest[experts[-1]]}.down_proj.weight"]
    found["embedding"] = [n for n in names if n.endswith("embed_tokens.weight")]
    found["head"] = [n for n in names if n == "lm_head.weight"]
    found["norm"] = [n for n in names if n.endswith("input_layernorm.weight")]
    return {k: v[0] for k, v in found.items() if v}


@torch.no_grad()
def perturbations(
    model: nn.Module, sequences: Sequence[Sequence[int]], *, visible: float
) -> Iterator[tuple[str, str, float, float]]:
    """(class, tensor, noise, largest change): the least of NOISES that moves a log-prob by more
    than `visible` nats, or the largest."""
    parameters, plain = dict(model.named_parameters()), score(model, sequences)
    for kind, name in classes(list(parameters), expert_tokens(model, sequences)).items():
        weight = parameters[name]
        kept = weight.clone()
        generator = torch.Generator(device=weight.device).manual_seed(0)
        direction = torch.randn(weight.shape, generator=generator, device=weight.device)
        noise, difference = 0.0, 0.0
        for noise in NOISES:
            weight.copy_(kept * (1 + noise * direction))
            difference = max_difference(score(model, sequences), plain)
            if difference > visible:
                break
        weight.copy_(kept)
        yield kind, name, noise, difference


def share_changed(before: dict[str, torch.Tensor], after: nn.Module) -> float:
    """Return the fraction of all elements that differ."""
    changed = sum(int((p.detach().cpu() != before[n]).sum()) for n, p in after.named_parameters())
    return changed / sum(p.numel() for p in after.parameters())


def answer(request: dict[str, Any], device: str) -> dict[str, Any]:
    """Score every version; see the module's docstring."""
    result: dict[str, Any] = {
        "logprobs": {},
        "perturbed": {},
        "perturbed_tensors": {},
        "perturbed_noise": {},
        "share_changed": {},
        "served_diff": {},
        "rounded_logprobs": {},
        "tau": request.get("tau", 0.0),
    }
    numbered = [v for v in request["trained"] if v.isdigit()]
    before: dict[str, torch.Tensor] | None = None
    for version, trained in request["trained"].items():
        seed = request.get("rounding_seed")
        model = merged(request["model"], request["dtype"], trained, device, seed)
        result["logprobs"][version] = score(model, request["sequences"])
        if "tau" in request and version == next(iter(request["trained"])):
            exact = score(model.double(), request["sequences"][:ROUNDED_SEQUENCES])
            rounding = max_difference(result["logprobs"][version][:ROUNDED_SEQUENCES], exact)
            result["tau"] = max(request["tau"], TIMES_ROUNDING * rounding)
            model.float()  # no bit is lost
        if request["dtype"] == "bfloat16":
            if before is not None:
                result["share_changed"][version] = share_changed(before, model)
            before = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
        if request.get("perturb") and numbered and version == numbered[-1]:
            for kind, name, noise, difference in perturbations(
                model, request["sequences"], visible=2 * result["tau"]
            ):
                result["perturbed"][kind], result["perturbed_tensors"][kind] = difference, name
                result["perturbed_noise"][kind] = noise
        if request["dtype"] == "bfloat16":
            # Its weights are bf16 values already, so only the arithmetic changes.
            result["rounded_logprobs"][version] = score(
                model.to(torch.bfloat16), request["sequences"]
            )
        served = (request.get("served") or {}).get(version)
        if served is not None:
            result["served_diff"][version] = max_difference(served, result["logprobs"][version])
        del model
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    result = answer(json.loads(arguments.request.read_text()), arguments.device)
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
