"""The independent reference: base plus adapter merged by PEFT, scored by transformers. Shares no code with the rest of splice.

    python -m trainer_node.reference --request request.json --out answer.json [--device cuda]

Request: `{"model": folder, "dtype": "float32" | "bfloat16", "trained": {"0": folder or null, "1": folder, ...},
"sequences": [[token ids], ...], "perturb": bool, "served": {"0": [[log-prob of token t given its prefix, null first], ...]}}`;
`served` may be absent. A folder is a PEFT adapter for the model, or a whole HF checkpoint (it has a config.json); null is the model itself.

Answer: `logprobs` (per version, sequence and token; null for a sequence's first), `perturbed` (class -> largest change of a log-prob
when one weight tensor of that class gets 1 % noise, in the last numbered version), `perturbed_tensors` (class -> that tensor),
`share_changed` (bfloat16: version -> share of all elements that differ from the version before after rounding) and `served_diff` (version ->
largest |served - reference|, where `served` was given).

The base is loaded and merged in fp32. With dtype bfloat16 the base is first rounded to bf16, as a bf16 trainer holds it, and each merged
tensor is rounded once more, as it travels; the scoring itself stays in fp32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

NOISE = 1e-2


def load_base(folder: str, dtype: str, device: str) -> nn.Module:
    """The base in fp32 on `device`, through bf16 if that is the trainer's dtype."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    rope = raw.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in raw and hasattr(config, "rope_theta"):
        config.rope_theta = rope["rope_theta"]  # written by transformers 5, which transformers 4 does not read
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, torch_dtype=torch.float32)
    if dtype == "bfloat16":
        round_to_bf16(model)
    return model.to(device).eval()


@torch.no_grad()
def round_to_bf16(model: nn.Module) -> None:
    """Round every parameter, in place, and keep it in fp32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def merged(folder: str, dtype: str, trained: str | None, device: str) -> nn.Module:
    """A fresh base with the adapter merged in by PEFT, or the checkpoint itself where `trained` is a whole one."""
    if trained is not None and (Path(trained) / "config.json").is_file():
        return load_base(trained, dtype, device)
    model = load_base(folder, dtype, device)
    if trained is not None:
        model = PeftModel.from_pretrained(model, trained).merge_and_unload().eval()  # type: ignore[arg-type]
        if dtype == "bfloat16":
            round_to_bf16(model)
    return model


@torch.no_grad()
def score(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """log p(token t | tokens before t), one sequence at a time so that nothing depends on padding."""
    device = next(model.parameters()).device
    result: list[list[float | None]] = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)], device=device)
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        result.append([None, *picked.tolist()])
    return result


def max_difference(one: Sequence[Sequence[float | None]], other: Sequence[Sequence[float | None]]) -> float:
    """Largest absolute difference over all tokens that both have."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def classes(model: nn.Module) -> dict[str, list[str]]:
    """Class of weights -> its tensors, first layer first; classes that the model does not have are left out."""
    names = [name for name, _ in model.named_parameters()]
    experts = sorted({int(n.split(".experts.")[1].split(".")[0]) for n in names if ".experts." in n})
    endings = {k: f"{k}_proj.weight" for k in ("q", "k", "v", "o", "gate", "up", "down")}
    found = {k: [n for n in names if n.endswith(ending) and ".experts." not in n] for k, ending in endings.items()}
    if experts:
        # The classes gate, up and down are then those of an expert in the middle.
        middle = experts[len(experts) // 2]
        for k in ("gate", "up", "down"):
            found[k] = found[k] or [n for n in names if f".experts.{middle}.{k}_proj." in n]
        found["first_expert"] = [n for n in names if f".experts.{experts[0]}.down_proj." in n]
        found["last_expert"] = [n for n in names if f".experts.{experts[-1]}.down_proj." in n]
    found["embedding"] = [n for n in names if n.endswith("embed_tokens.weight")]
    found["head"] = [n for n in names if n == "lm_head.weight"]
    found["norm"] = [n for n in names if n.endswith("input_layernorm.weight")]
    return {k: v for k, v in found.items() if v}


@torch.no_grad()
def perturbations(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[str, str, float]]:
    """(class, tensor, largest change). An expert to which no token goes shows nothing, so the first layer that shows a change counts."""
    parameters, plain = dict(model.named_parameters()), score(model, sequences)
    for kind, names in classes(model).items():
        name, difference = names[0], 0.0
        for name in names:
            weight = parameters[name]
            kept = weight.clone()
            generator = torch.Generator(device=weight.device).manual_seed(0)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device)
            weight.mul_(1 + NOISE * noise)
            difference = max_difference(score(model, sequences), plain)
            weight.copy_(kept)
            if difference > 0:
                break
        yield kind, name, difference


def share_changed(before: dict[str, torch.Tensor], after: nn.Module) -> float:
    """Share of all elements that differ."""
    changed = sum(int((p.detach().cpu() != before[n]).sum()) for n, p in after.named_parameters())
    return changed / sum(p.numel() for p in after.parameters())


def answer(request: dict[str, Any], device: str) -> dict[str, Any]:
    """Score every version; see the module's docstring."""
    result: dict[str, Any] = {
        "logprobs": {},
        "perturbed": {},
        "perturbed_tensors": {},
        "share_changed": {},
        "served_diff": {},
        "rounded_logprobs": {},
    }
    numbered = [v for v in request["trained"] if v.isdigit()]
    before: dict[str, torch.Tensor] | None = None
    for version, trained in request["trained"].items():
        model = merged(request["model"], request["dtype"], trained, device)
        result["logprobs"][version] = score(model, request["sequences"])
        if request["dtype"] == "bfloat16":
            if before is not None:
                result["share_changed"][version] = share_changed(before, model)
            before = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
        if request.get("perturb") and numbered and version == numbered[-1]:
            for kind, name, difference in perturbations(model, request["sequences"]):
                result["perturbed"][kind], result["perturbed_tensors"][kind] = difference, name
        if request["dtype"] == "bfloat16":
            # Its weights are bf16 values already, so only the arithmetic changes.
            result["rounded_logprobs"][version] = score(model.to(torch.bfloat16), request["sequences"])
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
