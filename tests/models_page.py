"""docs/models.md, made from the lists of the tests that it speaks of.

python -m tests.models_page > docs/models.md
"""

# ruff: noqa: E501  # tables

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tests.serving import BFLOAT16, UNLISTED, UNSERVED
from tests.trainer_node.families import FAMILIES
from tests.trainer_node.family_cases import (
    ONE_RANK,
    PIPELINES,
    SEVERAL,
    SLOW_EXPERTS,
    TOPOLOGIES,
)
from tests.trainer_node.topologies import DENSE, MOE

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
MEASURED = {
    "gpt_oss": ("gpt-oss-20b", "train-gpt-oss-20b-1xh200.json"),
    "glm4_moe_lite": ("GLM-4.7-Flash", "train-glm-4.7-flash-1xh200.json"),
    "llama": ("Llama-3.1-8B", "train-llama-8b-1xh200.json"),
    "qwen3": ("Qwen3-8B", "train-8b-again-1xh200.json"),
    "qwen3_moe": ("Qwen3-30B-A3B", "train-30b-a3b-again-1xh200.json"),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B", "train-qwen3.5-35b-a3b-1xh200.json"),
}
"""Family -> the shape that was measured, and the file with its tokens per second."""
HEAD = """\
# Models

splice has no list of models. Megatron-Bridge builds a model, and a check decides whether splice
trains it. The first start on a model makes the check, and so does this command:

```
splice check MODEL       # a checkpoint's folder or a hub id; exit code 0: yes, 1: no, 2: not checked
```

It takes half a minute on a CPU, and a yes is kept for the next starts. A small model of the same
kind, with random values in every tensor, is trained and exported. Each byte of the export, the
log-probs of packed sequences and the gradient must be those of transformers. The allowed difference
is ten times transformers' own rounding in fp32, which is measured, and at least 2e-5 nats.

- The table names the numbers of `config.json` that moved the log-probs, and so were compared. A limit
  that small random models never reach (OLMoE's `clip_qkv`) is lowered until it has an effect. The table
  also names the numbers of your config that were not seen to change transformers' log-probs.
- No weight of the model itself is read. `--whole` compares the model's own weights.
- `--serve` publishes the small model to a vLLM on the CPU as well. `splice smoke --model MODEL` does it with
  the model itself.
- It trains all parameters on one CPU. Of adapters, several ranks and a GPU's kernels it says nothing. The
  tests below and [the start on a GPU](installation.md#on-gpus) do.
- `trainer.admission = "skip"` starts without the check. `splice smoke` proves more than the check does, and
  leaves it out. `splice smoke --no-proof` makes the check.

The start reads the weights. It refuses files that are cut short, missing or wrongly shaped tensors,
NaN, and a tied head with other values, by name. Tensors that nobody reads are named in the
trainer's log.

## Families under test

Every row is a tiny checkpoint of transformers' own class. `tests/trainer_node/model/test_families.py`
compares names, bytes, log-probs and gradients with transformers, in full-parameter training.
`tests/trainer_node/adapters/test_adapters_families.py` compares adapters with PEFT.
`tests/inference_node/worker/test_families.py` publishes three versions to a real vLLM. Every live tensor
is verified there, and in fp32 served log-probs are transformers'. `tests/e2e/test_families.py` joins both
sides, apart from Qwen3.5. `make test` runs a few of the rows, `make test-all` every one. Training speed is
that of LoRA on one H200, with [its commands](performance.md#training-one-h200).

"""
MORE = """
Rows are tiny variants: DeepSeek-V2, V2-Lite and MiniMax-M2 as published are refused, [see
below](#refused-with-the-reason).

LoRA: `-`: adapters go only through `tests/e2e`. `all`: every linear of the decoder layers, experts included, routers not. `attention`: linears
outside the experts; the experts of this family are one tensor, and a target names it
(`experts.down_proj`). Slower part: what takes the [other path](#fused-and-other-paths) on a CPU, as
the tests of adapters see it. Over ranks: tp tensor, pp pipeline, cp context, ep expert, etp expert
tensor, dp data parallelism.

On a CPU, vLLM runs the gated delta rule only in bf16. Those log-probs are compared with a fresh
vLLM's, which loaded the same weights, and are equal to the bit. MiniMax-M2's live tensors are verified, but
no log-probs.

Two pretrained models went through `splice smoke --model FOLDER --lr 1e-4` on a CPU, every check
included: SmolLM2-135M-Instruct (169 s) and Qwen2.5-Coder-0.5B-Instruct (516 s). With `--lr 1e-3` they
did so in bf16 on two H200s (112 and 151 s, `smoke-smollm2-135m-2xh200.json` and
`smoke-qwen2.5-coder-0.5b-2xh200.json`). There, two steps with 1e-4 change less than bf16 rounds, and the
proof says so. The 0.5B learned in [loops](convergence.md) on GPUs.

Models that see (Gemma 3, Qwen3.5) train their language part on text. The towers stay as they are
and are published with it. A token of an image is refused (`tests/trainer_node/hf/sees.py`). A tiny Gemma 3 with
its tower goes to a real vLLM (`tests/inference_node/worker/test_families.py`). Qwen3.5 went there only as its text
class, on GPUs too: vLLM's class with its tower wants torchvision.

## Fused and other paths

| what | when | else |
| --- | --- | --- |
| experts and their adapters in a few grouped products | SwiGLU without bias, experts whole on a rank, no adapter dropout | Megatron's grouped linears |
| each HF tensor sent from its place in Megatron's parameters | it is an arrangement of a parameter's elements | Bridge's export of that tensor (the norm of gated delta rules) |
| attention with sinks (gpt-oss) fused, on GPUs | cuDNN 9.18 or newer; the trainer's lock has 9.19 | TransformerEngine's unfused attention, slow and in much memory |
| gated delta rules (Qwen3-Next, Qwen3.5) in Triton, on GPUs | flash-linear-attention's kernels have a backward pass: on Hopper with tilelang and `nvcc` (both in the trainer's lock), or Triton 3.7.1 | chunks in torch, slower |
| a received tensor placed directly in vLLM's parameter | vLLM's loader only copies | vLLM's reload of that layer |

No path is chosen by a model's name. The trainer's log, and `fallbacks` in `splice status --json`, name
each slower path of the trainer and its reason. The inference node's log names tensors that it
reloads.

## Refused, with the reason

| what | why |
| --- | --- |
| attention whose kernels are wrong on this GPU | the start compares each kind of attention layer with torch ([which](installation.md#on-gpus)). cuDNN 9.14 is wrong for heads wider than 128 (Qwen3.5, Gemma, latent attention) |
| an architecture without a bridge (Qwen2-MoE, Mixtral, GLM-4 dense, Phi-3, OLMo 2) | Megatron-Bridge 0.6.2 has no mapping for it |
| OLMoE with fewer key-value heads than heads | Megatron normalises all heads at once; "the tensors do not fit" |
| Ernie 4.5 MoE, OLMoE with `clip_qkv` | the check finds other log-probs than transformers' |
| a bias or head that Bridge's mapping lacks (Llama's `attention_bias`, Gemma 3 untied) | its tensors would not be published |
| layers without experts in other places than the first (`mlp_layer_types`) | Bridge builds another pattern |
| weights in GPTQ, AWQ, bitsandbytes or another quantisation than [block-scaled FP8](fp8.md) | the trainer reads bf16 |
| Gemma 2 | its logits have a softcap, and its attention takes no packs |
| images and sound, and a model whose language part is not an architecture by itself (Qwen2.5-VL) | the trainer trains [language parts](#families-under-test), on text |
| heads that predict further tokens | they are neither trained nor exported |
| DeepSeek-V2 with YaRN's `mscale` (as published), MiniMax-M2 with `rotary_dim` (as published), Gemma 1 with `hidden_act: "gelu"` | transformers 5.12.1 computes these differently from Megatron, and the check goes by transformers |
| expert groups that are not ranked by the best 2 scores (DeepSeek-V3) or the best 1 (V2, with softmax) | Megatron ranks them by `num_experts_per_tok / topk_group` scores: 8 / 4 in V3; 6 / 3 in a V2 is refused |
| a class in `architectures` that is not the kind's causal language model | the trainer builds no other |
| rope scaling other than YaRN and Llama 3's, or Llama 3's with other constants than 1, 4 and 8,192 (`low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`) | Megatron-Core 0.19.2 has only these, with fixed constants |
| YaRN's `attention_factor` | Megatron computes its own |
| windows where Bridge's provider knows none, or a pattern of them without a period | Megatron would attend to the whole sequence |
| `norm_topk_prob` off with sigmoid scores | Megatron always normalises them |
| dense layers among those of Qwen3-MoE (`mlp_only_layers`) | Bridge builds experts in every layer |
| LoRA on a router; dropout on stacked experts' adapters | PEFT has neither |
"""


def topologies() -> dict[str, list[str]]:
    """Family -> the topologies under test, without repetition."""
    found: dict[str, list[str]] = defaultdict(list)
    cases = [(family, sizes) for family, *sizes in TOPOLOGIES]
    cases += [(family, list(sizes)) for family, _, _, sizes in SEVERAL]
    for family, sizes in cases:
        pairs = zip(("tp", "cp", "ep", "etp"), sizes, strict=True)
        text = "".join(f"{name}{size}" for name, size in pairs if size > 1)
        if text not in found[family]:
            found[family].append(text)
    for family in PIPELINES:
        found[family].append("pp2")
    for family, matrix in (("qwen3", DENSE), ("qwen3_moe", MOE)):
        names = [name for name in matrix if "no-sequence" not in name]
        found[family] = list(dict.fromkeys([*found[family], *names]))
    return found


def speed(family: str) -> str:
    """The median step's tokens per second, where a result file has it."""
    if family not in MEASURED:
        return "-"
    shape, name = MEASURED[family]
    cases = json.loads((RESULTS / name).read_text())["cases"]
    value = next(case["value"] for case in cases if case["metric"] == "tokens_per_s")
    return f"{shape}: {value:,.0f} tokens/s"


def markdown() -> str:
    """The page."""
    over, adapted = topologies(), defaultdict(list)
    for family, targets in ONE_RANK:
        adapted[family].append(targets)
    lines = [
        "| family | class | LoRA | slower part | over ranks | vLLM on a CPU | training speed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, family in FAMILIES.items():
        lora = "-"
        if "all-linear" in adapted[name]:
            stacked = any(t.startswith("experts.") for t in adapted[name])
            lora = "attention; experts by name" if stacked else "all"
        served = "verified, bf16" if name in BFLOAT16 else "verified"
        if name in UNLISTED:
            served += "; vLLM's module wants torchvision"
        if name in UNSERVED:
            served = f"refuses requests: `{UNSERVED[name]}`"
        ranks = ", ".join(over[name]) or "-"
        slow = "experts" if name in SLOW_EXPERTS else "-"
        row = (name, f"`{family.name}ForCausalLM`", lora, slow, ranks, served, speed(name))
        lines.append(f"| {' | '.join(row)} |")
    return HEAD + "\n".join(lines) + "\n" + MORE


if __name__ == "__main__":
    print(markdown(), end="")
