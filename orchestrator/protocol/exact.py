"""What `numerics = "exact"` does not go with, and why. Pure.

Each function returns (what, why), or None if nothing is in the way. `why` completes "does not go
with WHAT, ...".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the models whose every operation has an exact form."""
VOCAB_STEP = 4
"""Numbers of 16 bytes, which torch's log-softmax on a GPU reads at a time."""
MOST_HEADS = 64
"""Query heads that share a key in `weight_transfer.exact.gpu`."""
Obstacle = tuple[str, str] | None


def trainer_obstacle(config: Any) -> Obstacle:
    """Of a `TrainerConfig`."""
    parallel = config.parallel
    wrong, why = _dtype(config)
    order = "which adds up parts in an order that the sampler does not have"
    ranks = "for which no exact form was tested"
    return _first(
        (wrong, f"dtype = {config.dtype!r}", why),
        (parallel.tensor > 1, "parallel.tensor", order),
        (parallel.context > 1, "parallel.context", order),
        (parallel.expert > 1 or parallel.expert_tensor > 1, "parallel.expert", order),
        (parallel.pipeline > 1, "parallel.pipeline", ranks),
        (config.follow is not None, "follow", "which trains nothing"),
    )


def inference_obstacle(config: Any) -> Obstacle:
    """Of an `InferenceConfig`."""
    wrong, why = _dtype(config)
    compiles = config.device == "cpu" and not config.enforce_eager
    foreign = next(filter(_is_foreign, map(_option, " ".join(config.extra_args).split())), "")
    return _first(
        (wrong, f"dtype = {config.dtype!r}", why),
        (compiles, "enforce_eager = False", "because a compiler chooses the sums"),
        (bool(foreign), f"extra_args {foreign}", "which changes what vLLM computes"),
    )


_FOREIGN = (
    "-q", "-sc", "-cc", "-ac", "--quantization", "--speculative-config", "--spec-", "--dtype",
    "--kv-cache-dtype", "--attention-backend", "--attention-config", "--compilation-config",
    "--enable-lora", "--lora-", "--hf-overrides", "--model-impl", "--config", "-tp", "-dcp", "-pcp",
    "-pp", "--tensor-parallel", "--decode-context", "--prefill-context", "--pipeline-parallel",
)  # fmt: skip # options
"""Options of vLLM, and how some begin."""


def _option(word: str) -> str:
    """--a-b of --a_b=c or --a-b.c"""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _is_foreign(option: str) -> bool:
    """Whether it changes what vLLM computes. vLLM takes an abbreviation as well."""
    if not option.startswith("--"):
        return option in _FOREIGN
    return len(option) > 2 and any(f.startswith(option) or option.startswith(f) for f in _FOREIGN)


def model_obstacle(model: Mapping[str, Any], device: str, *, parts: int = 1) -> Obstacle:
    """Of the language part of a config.json.

    Args:
        parts: tensor parallel ranks of the sampler.
    """
    family = str(model.get("model_type"))
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    layers = set(model.get("layer_types") or ()) - {"full_attention"}
    experts, has_form = next((k for k in _EXPERTS if model.get(k)), ""), family == "qwen3_moe"
    windows = bool(layers) or bool(model.get("use_sliding_window"))
    heads = model.get("num_attention_heads", 1)
    groups = model.get("num_key_value_heads") or heads
    biases = family == "llama" and (model.get("attention_bias") or model.get("mlp_bias"))
    return _first(
        (bool(experts) and not has_form, f"experts ({experts})",
         "for which no exact form was tested"),
        (has_form and parts > 1, "experts with inference.tensor_parallel",
         "whose parts are added up in an order that the trainer does not have"),
        (has_form and not model.get("norm_topk_prob"), "norm_topk_prob = false",
         "because a sum over all experts has no exact form here"),
        (bool(model.get("kv_lora_rank")), "multi-latent attention",
         "which the decoder computes with absorbed products, and the trainer without"),
        ("linear_attention" in layers, "the gated delta rule",
         "which the trainer computes in chunks, and the decoder token by token"),
        (windows, "sliding windows", "for which no exact form was tested"),
        (bool(model.get("quantization_config")), "quantised weights", "whose products differ"),
        (kind != "default", f"rope scaling {kind!r}", "whose tables differ"),
        (bool(biases), "biases of a llama", "for which no exact form was tested"),
        (model.get("hidden_act", "silu") != "silu", f"hidden_act {model.get('hidden_act')!r}",
         "for which no exact form was written"),
        ("head_dtype" in model, "head_dtype", "which changes the output layer's product"),
        (parts > 1 and parts > groups, f"inference.tensor_parallel = {parts} of {groups} key heads",
         "for which no exact form was tested"),
        (device == "cuda" and heads // groups > MOST_HEADS,
         f"{heads // groups} query heads for one key on a GPU",
         f"whose kernel takes {MOST_HEADS} at most"),
        (device == "cuda" and model.get("vocab_size", 0) % VOCAB_STEP != 0,
         f"a vocabulary of {model.get('vocab_size')} on a GPU",
         f"which is no multiple of {VOCAB_STEP}, so that torch sums its rows in several orders"),
        (family not in FAMILIES, f"model_type {family!r}",
         f"for which no exact form was tested ({', '.join(FAMILIES)} have one)"),
    )  # fmt: skip # a table


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _dtype(config: Any) -> tuple[bool, str]:
    """Whether the device's dtype is another one, and why that matters."""
    wanted, where = ("bfloat16", "a GPU") if config.device == "cuda" else ("float32", "a CPU")
    return config.dtype != wanted, f"because on {where} it is proved in {wanted} only"


def _first(*cases: tuple[bool, str, str]) -> Obstacle:
    return next(((what, why) for applies, what, why in cases if applies), None)
