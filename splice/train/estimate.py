"""What a step will be, before anything starts: tokens, the trainer's memory, minutes.

Memory is arithmetic on the model's config.json, for decoders of the usual kind. Minutes are given
only for models whose speed was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.protocol.config import ALL_LINEAR, TrainerConfig
from orchestrator.protocol.topology import language_part
from splice.cluster.preflight import read_model_config

MEASURED = {
    (4096, 36, 0): (15_531, "train-8b-again-1xh200.json"),
    (4096, 32, 0): (15_878, "train-llama-8b-1xh200.json"),
    (2048, 48, 128): (19_397, "train-30b-a3b-again-1xh200.json"),
    (2880, 24, 32): (11_924, "train-gpt-oss-20b-1xh200.json"),
}
"""Hidden size, layers and experts -> tokens that one H200 trains in a second, with adapters of rank
16 on all linears (`python -m benchmarks train --device cuda`), and the file that says so."""
_UNUSUAL = (
    "kv_lora_rank", "layer_types", "n_shared_experts", "shared_expert_intermediate_size",
    "first_k_dense_replace", "mlp_only_layers", "num_nextn_predict_layers",
)  # fmt: skip # a list of names
_USUAL_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linears of one name: of all layers, and of all experts."""

    name: str
    rows: int
    columns: int
    count: int
    is_expert: bool = False


def linears_of(config: Mapping[str, Any]) -> list[Linear] | None:
    """Return a model's matrices, the embeddings last. None: it is not of the usual kind."""
    model = language_part(config)
    experts = _experts(model)
    odd = [name for name in _UNUSUAL if model.get(name)]
    if set(odd) - {"layer_types"} or set(model.get("layer_types") or ()) - _USUAL_LAYERS:
        return None
    try:
        hidden, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
        heads, vocab = int(model["num_attention_heads"]), int(model["vocab_size"])
        inner = int((experts and model.get("moe_intermediate_size")) or model["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    head = int(model.get("head_dim") or hidden // heads)
    keys = int(model.get("num_key_value_heads") or heads) * head
    is_expert, copies = bool(experts), layers * max(1, experts)
    return [
        Linear(name="q_proj", rows=heads * head, columns=hidden, count=layers),
        *(Linear(name=n, rows=keys, columns=hidden, count=layers) for n in ("k_proj", "v_proj")),
        Linear(name="o_proj", rows=hidden, columns=heads * head, count=layers),
        *(
            Linear(name=n, rows=inner, columns=hidden, count=copies, is_expert=is_expert)
            for n in ("gate_proj", "up_proj")
        ),
        Linear(name="down_proj", rows=hidden, columns=inner, count=copies, is_expert=is_expert),
        *([Linear(name="router", rows=experts, columns=hidden, count=layers)] if experts else []),
        Linear(
            name="embeddings",
            rows=vocab,
            columns=hidden,
            count=1 if model.get("tie_word_embeddings") else 2,
        ),
    ]


def trainer_bytes(linears: Sequence[Linear], trainer: TrainerConfig) -> tuple[float, float]:
    """Return what a rank holds of the weights, and of what trains: fp32 gradients, moments, and the
    adapters or masters."""
    parallel, is_lora = trainer.parallel, trainer.finetuning_type == "lora"
    each = 2 if trainer.dtype == "bfloat16" else 4
    targets = trainer.lora.targets
    weights = trained = 0.0
    for linear in linears:
        ranks = parallel.expert * parallel.expert_tensor if linear.is_expert else parallel.tensor
        share = linear.count / (ranks * parallel.pipeline)
        size = linear.rows * linear.columns * share
        weights += size * each
        spread = ranks * parallel.pipeline / parallel.world_size  # over data-parallel ranks
        if not is_lora:
            trained += size * (4 + (12 if each == 2 else 8) * spread)
        elif linear.name in targets or (ALL_LINEAR in targets and linear.name.endswith("_proj")):
            trained += trainer.lora.rank * (linear.rows + linear.columns) * share * (8 + 8 * spread)
    return weights, trained


def _experts(model: Mapping[str, Any]) -> int:
    return int(model.get("num_experts") or model.get("num_local_experts") or 0)


def text_of(trainer: TrainerConfig, *, step_tokens: int, steps: int) -> list[str]:
    """Describe what is known of the trainer's memory and time. Empty for a model that is not here
    yet.

    Args:
        step_tokens: of the longest answers. 0: unknown.
    """
    if not (trainer.model / "config.json").is_file():
        return []
    config = read_model_config(trainer.model)
    if (linears := linears_of(config)) is None:
        return []
    weights, trained = trainer_bytes(linears, trainer)
    kind = "adapters" if trainer.finetuning_type == "lora" else "masters"
    lines = [
        f"estimate: a trainer's rank holds {_size(weights)} of weights and {_size(trained)} of "
        f"{kind}, gradients and moments; activations take more"
    ]
    model = language_part(config)
    shape = (model["hidden_size"], model["num_hidden_layers"], _experts(model))
    is_lora_on_gpus = trainer.device == "cuda" and trainer.finetuning_type == "lora"
    if is_lora_on_gpus and step_tokens and shape in MEASURED:
        speed, file = MEASURED[shape]
        seconds = step_tokens / (speed * trainer.parallel.world_size)
        lines.append(
            f"estimate: {math.ceil(seconds)} s of training for {step_tokens:,} answer tokens, "
            f"{math.ceil(seconds * steps / 60):,} min for all steps, if each GPU trains "
            f"{speed:,} tokens a second as one H200 did ({file}); prompts add to it"
        )
    return lines


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
