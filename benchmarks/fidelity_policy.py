"""A decoder with LoRA on its linears: as a trainer computes it, and as a server has it.

    native   x W^T + s (x A^T) B^T; in bf16 each of the two terms is rounded before the addition
    fused    the same as one fp32 sum, rounded once
    served   x W'^T with a version's weights; in training, A and B get the gradient of `native`

`WAYS` are the ways to make W' of W and delta = s B A. The base holds exact bf16 numbers in either
compute dtype, and the language-model head computes in fp32. Only transformers and torch take part.

Axes: O = out features, I = in features, R = rank, N = sequences, L = tokens of a padded sequence,
T = predicted tokens of all sequences, V = vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, DynamicCache

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LORA_TARGETS
from trainer_node.adapters.rounding import Corner, Rounding, delta_of, rounded, thresholds
from weight_transfer.fp8 import per_channel

Forward = Literal["native", "fused", "served"]
Jitter = Literal["none", "sigma", "block"]
WAYS = (
    "nearest", "stochastic", "stochastic_new", "golden", "fp8_nearest", "fp8_stochastic", "fp8_fp32"
)  # fmt: skip # a list
"""Ways of serving. `stochastic_new` draws its thresholds from the version's number; `golden` is a
plain dither; `fp8_X` is X in e4m3 with a scale for each row, and `fp8_fp32` skips bf16."""
COLUMN_STEP, ROW_STEP, FIRST = 2654435769, 3242174889, 1589137900
"""Golden's thresholds in units of 2^-32: 1 / golden ratio, 1 / plastic ratio, and 0.37."""
GRID_BLOCK = 16


def golden(rows: int, columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Thresholds [O, I] from 0 to 65,535 in int32: frac(column * g + row * p), without a hash."""
    row_O = torch.arange(rows, device=device) * ROW_STEP + FIRST
    column_I = torch.arange(columns, device=device) * COLUMN_STEP
    return (((row_O[:, None] + column_I) & 0xFFFFFFFF) >> 16).int()


@torch.no_grad()
def merged(
    weight_OI: torch.Tensor, delta_OI: torch.Tensor, *, way: str, name: str, version: int
) -> torch.Tensor:
    """W' in fp32. `nearest` and `stochastic` are the bytes of `rounding.merge_matrix`.

    Args:
        weight_OI: bf16, or fp32 numbers that bf16 has.
        name: HF tensor's name, for the thresholds.
    """
    weight_OI, h16_OI = weight_OI.bfloat16(), None
    how = way.removeprefix("fp8_")
    (height, width), device = weight_OI.shape, weight_OI.device
    if how == "golden":
        h16_OI = golden(height, width, device)
    elif how in ("stochastic", "stochastic_new"):
        rounding = Rounding(seed=version) if how == "stochastic_new" else Rounding()
        h16_OI = thresholds(Corner(name).word(rounding), height, width, device=device)
    found_OI = delta_OI + weight_OI
    if how != "fp32":
        found_OI = rounded(found_OI, torch.bfloat16, h16_OI).float()
        found_OI = torch.where(delta_OI == 0, weight_OI.float(), found_OI)
    if way.startswith("fp8_"):
        e4m3_OI, scales_O1 = per_channel(found_OI)
        found_OI = e4m3_OI.float() * scales_O1
    return found_OI


def jittered(weight_OI: torch.Tensor, how: Jitter, generator: torch.Generator) -> torch.Tensor:
    """The weight without the grid of the GGUF that it was read from, in fp32.

    `sigma` is for Q4_1: uniform noise of 4e-4 standard deviations, which moves the numbers next to
    zero off their level. `block` is for Q5_0, which has a level at zero: half a step of each block.
    """
    if how == "none":
        return weight_OI
    noise_OI = torch.rand(weight_OI.shape, generator=generator) - 0.5
    if how == "sigma":
        return weight_OI + noise_OI * 8e-4 * weight_OI.std()
    blocks = weight_OI.reshape(-1, GRID_BLOCK)
    gaps = blocks.sort(-1).values.diff(dim=-1)
    # Equal levels differ by bf16's rounding only.
    is_gap = gaps > blocks.abs().amax(-1, keepdim=True) * 0.012
    step = torch.where(is_gap, gaps, math.inf).amin(-1, keepdim=True)
    step = torch.where(step.isfinite(), step, 0.0)
    return (blocks + noise_OI.reshape(-1, GRID_BLOCK) * step).view_as(weight_OI)


class LoraLinear(torch.nn.Module):
    """A frozen linear with an fp32 adapter and a version's weight; `forward` says which counts."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self.served_OI = weight_OI
        self.mode: Forward = "native"
        self.scale = 1.0
        self.lora_A_RI = self.lora_B_OR = torch.nn.Parameter(torch.empty(0))

    def adapt(self, rank: int, alpha: float, generator: torch.Generator) -> None:
        """Begin a new adapter: PEFT's A, and a B of zeros."""
        (height, width), device = self.weight_OI.shape, self.weight_OI.device
        bound = 1 / math.sqrt(width)
        lora_A_RI = torch.empty(rank, width).uniform_(-bound, bound, generator=generator)
        self.lora_A_RI = torch.nn.Parameter(lora_A_RI.to(device))
        self.lora_B_OR = torch.nn.Parameter(torch.zeros(height, rank, device=device))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        a_RI, b_OR = self.lora_A_RI.to(x.dtype), self.lora_B_OR.to(x.dtype)
        if self.mode == "served":
            y = linear(x, self.served_OI, self.bias_O)
            if not torch.is_grad_enabled():
                return y
            adapter = linear(linear(x.detach(), a_RI) * self.scale, b_OR)
            return y + (adapter - adapter.detach())
        low = linear(x, a_RI) * self.scale
        if self.mode == "native":
            return linear(x, self.weight_OI, self.bias_O) + linear(low, b_OR)
        bias_O = None if self.bias_O is None else self.bias_O.float()
        y = linear(x.float(), self.weight_OI.float(), bias_O)
        return (y + linear(low.float(), b_OR.float())).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Prompts with answers, padded on the right, and where their answers' tokens are predicted."""

    ids_NL: torch.Tensor
    at_T: torch.Tensor
    """Positions in the flat [N * L]."""
    labels_T: torch.Tensor
    row_T: torch.Tensor
    """Each token's sequence."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]], device: str) -> Rows:
        """Of (prompt ids, answer ids)."""
        width = max(len(p) + len(a) for p, a in pairs)
        ids = [p + a + [0] * (width - len(p) - len(a)) for p, a in pairs]
        at = [n * width + len(p) - 1 + i for n, (p, a) in enumerate(pairs) for i in range(len(a))]
        labels = [token for _, a in pairs for token in a]
        row = [n for n, (_, a) in enumerate(pairs) for _ in a]
        tensors = [torch.tensor(values, device=device) for values in (ids, at, labels, row)]
        return cls(ids_NL=tensors[0], at_T=tensors[1], labels_T=tensors[2], row_T=tensors[3])


class Policy:
    """A base model in a compute dtype, and one adapter at a time."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: str, jitter: Jitter = "none"
    ) -> None:
        # Eager attention is plain fp32 on a GPU, and a padded row gives no NaN.
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        model.requires_grad_(False)
        model.eval()
        self.device, self.layers = device, dict[str, LoraLinear]()
        generator = torch.Generator().manual_seed(0)
        targets = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in LORA_TARGETS}
        for module in targets.values():
            module.weight.data = jittered(module.weight.data, jitter, generator)
        for parameter in model.parameters():  # not the buffers: the angles' frequencies are fp32
            parameter.data = parameter.data.bfloat16().to(dtype)
        self.model = model.to(device)
        for name, module in targets.items():
            parent, _, last = name.rpartition(".")
            bias_O = None if module.bias is None else module.bias.data
            self.layers[f"{name}.weight"] = LoraLinear(module.weight.data, bias_O)
            setattr(model.get_submodule(parent), last, self.layers[f"{name}.weight"])
        if not self.layers:
            raise ConfigError(f"{folder} has none of the linears {', '.join(LORA_TARGETS)}")
        self.head_VI = model.lm_head.weight.data.float()

    def adapt(self, *, rank: int, alpha: float, seed: int) -> None:
        """Begin a new adapter, the same on every device."""
        generator = torch.Generator().manual_seed(1000 + seed)
        for layer in self.layers.values():
            layer.adapt(rank, alpha, generator)

    def load(self, folder: Path) -> None:
        """Take on an adapter in PEFT's format.

        Raises:
            ConfigError: it has not the linears of this policy.
        """
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors", device=self.device)
        for name, x in self.layers.items():
            before = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{before}A.weight" not in tensors:
                raise ConfigError(f"{folder} has no adapter of {name}")
            x.lora_A_RI, x.lora_B_OR = (
                torch.nn.Parameter(tensors.pop(f"{before}{m}.weight").float()) for m in "AB"
            )
            x.scale = config["lora_alpha"] / config["r"]
        if tensors:
            raise ConfigError(f"{folder} has adapters of other linears: {next(iter(tensors))}")

    def parameters(self) -> list[torch.nn.Parameter]:
        """A and B of every layer."""
        return [p for x in self.layers.values() for p in (x.lora_A_RI, x.lora_B_OR)]

    def use(self, mode: Forward) -> None:
        """Choose the forward pass."""
        for layer in self.layers.values():
            layer.mode = mode

    def deltas(self) -> dict[str, torch.Tensor]:
        """s B A of each layer, as the merge defines it."""
        return {
            name: delta_of(x.lora_B_OR.detach(), x.lora_A_RI.detach(), x.scale)
            for name, x in self.layers.items()
        }

    def serve(self, way: str, deltas: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Make a version's weights, and use them."""
        for name, x in self.layers.items():
            served = merged(x.weight_OI, deltas[name], way=way, name=name, version=version)
            x.served_OI = served.to(x.weight_OI.dtype)
        self.use("served")

    def logits(self, rows: Rows) -> torch.Tensor:
        """fp32 [T, V]."""
        hidden = self.model.model(input_ids=rows.ids_NL, use_cache=False)[0]
        return linear(hidden.flatten(0, 1)[rows.at_T].float(), self.head_VI)

    def logprobs(self, rows: Rows) -> torch.Tensor:
        """fp32 [T]."""
        logp_TV = self.logits(rows).log_softmax(-1)
        return logp_TV.gather(-1, rows.labels_T[:, None])[:, 0]

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[list[int]], *, tokens: int, generator: torch.Generator
    ) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs of an answer of `tokens` tokens to each prompt, at temperature 1.

        All prompts are one batch, padded on the left, and nothing waits for the device before the
        last token.
        """
        width = max(map(len, prompts))
        padded = [[0] * (width - len(p)) + p for p in prompts]
        present = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        ids_NL = torch.tensor(padded, device=self.device)
        mask_NL = torch.tensor(present, device=self.device)
        places_NL = (mask_NL.cumsum(-1) - 1).clamp_min(0)
        cache, found, logps = DynamicCache(), [], []
        for _ in range(tokens):
            hidden_NLI = self.model.model(
                input_ids=ids_NL,
                attention_mask=mask_NL,
                position_ids=places_NL,
                past_key_values=cache,
                use_cache=True,
            )[0]
            logp_NV = linear(hidden_NLI[:, -1].float(), self.head_VI).log_softmax(-1)
            ids_NL = torch.multinomial(logp_NV.exp(), 1, generator=generator)
            found.append(ids_NL)
            logps.append(logp_NV.gather(1, ids_NL))
            mask_NL = torch.cat([mask_NL, torch.ones_like(ids_NL)], 1)
            places_NL = places_NL[:, -1:] + 1
        pairs = zip(torch.cat(found, 1).tolist(), torch.cat(logps, 1).tolist(), strict=True)
        return list(pairs)
