"""Writes small HF checkpoints to try splice with, and the configs of real models without their
weights.

    python -m trainer_node.tools.make_checkpoint --arch qwen3_moe --out runs/tiny-moe
    python -m trainer_node.tools.make_checkpoint --shape qwen3-30b-a3b --config-only --out runs/30b
    python -m trainer_node.tools.make_checkpoint --fp8-blocks --out runs/tiny-fp8

The tokenizer is a real byte-level BPE, trained on the corpus below. "yes", "no" and "maybe" are one
token each, with and without a leading space. Every folder loads with transformers 4.57 and 5,
Megatron-Bridge 0.6.2 and vLLM 0.26 to 0.32. Files are written by hand, not by `save_pretrained`,
because the two transformers write configs that the other side reads differently (`num_experts` /
`num_local_experts`, `rope_parameters`, `layer_types`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from orchestrator.errors import ConfigError

Arch = Literal["qwen3", "qwen3_moe"]
ANSWERS = ("yes", "no", "maybe")
VOCAB_SIZE = 400
"""No multiple of 128, so that Megatron pads it."""
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = (
    "Question: is the sky blue today? Answer: yes",
    "Question: is the sea made of sand? Answer: no",
    "Question: will it rain tomorrow? Answer: maybe",
    "Answer the question with yes, no or maybe. Say yes, say no, say maybe.",
    "yes no maybe yes no maybe yes no maybe",
    "yes/no/maybe/yes/no/maybe/yes/no/maybe/yes/no/maybe/yes/no/maybe/yes/no/maybe",
    "Is the answer yes? Is the answer no? Is the answer maybe?",
    "Does the sun rise in the east? Can a stone swim in the river? Would you like some more tea "
    "with that?",
    "The quick brown fox jumps over the lazy dog while the small grey cat sleeps under the old "
    "wooden table.",
    "One two three four five six seven eight nine ten, and then the counting starts again from "
    "the beginning.",
    "A model that is being trained must be served as well; every new version takes the place of "
    "the one before.",
    "Numbers such as 12, 48, 305 and 2026 stand next to words, and so do marks like (this), "
    '[that] or "these".',
    "She asked whether the train had left; he thought that it had, but nobody at the station "
    "could really say.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3. `num_experts` 0: a dense model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0

    @property
    def arch(self) -> Arch:
        """HF's model_type."""
        return "qwen3_moe" if self.num_experts else "qwen3"


_TINY = Shape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=128, vocab=VOCAB_SIZE,
    max_positions=512
)  # fmt: skip # a table
TINY_SHAPES: dict[Arch, Shape] = {
    "qwen3": _TINY,
    "qwen3_moe": replace(_TINY, num_experts=8, experts_per_token=2, moe_intermediate=32),
}
_WIDE = replace(_TINY, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512)
BLOCK_SHAPES: dict[Arch, Shape] = {
    "qwen3": _WIDE,
    "qwen3_moe": replace(_WIDE, num_experts=8, experts_per_token=2, moe_intermediate=128),
}
"""Tiny shapes whose matrices end where blocks of 128 x 128 do."""
REAL_SHAPES: dict[str, Shape] = {
    "qwen3-8b": Shape(
        hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288,
        vocab=151936, max_positions=40960
    ),
    "qwen3-14b": Shape(
        hidden=5120, layers=40, heads=40, kv_heads=8, head_dim=128, intermediate=17408,
        vocab=151936, max_positions=40960
    ),
    "qwen3-30b-a3b": Shape(
        hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, intermediate=6144,
        vocab=151936, max_positions=40960,
        num_experts=128, experts_per_token=8, moe_intermediate=768,
    ),
}  # fmt: skip # a table


_YARN_32 = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip # a table
_LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip # a table
OTHER_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA_3_1,
    }),
    "gpt-oss-20b": ("GptOss", {
        "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
        "rope_parameters": _YARN_32,
    }),
    "glm-4.7-flash": ("Glm4MoeLite", {
        "num_hidden_layers": 47, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,  # vLLM 0.26 reads it; transformers has mlp_layer_types instead
    }),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeText", {
        "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
        "max_position_embeddings": 262144,
    }),
}  # fmt: skip # a table
"""transformers' config class without "Config", and settings; the rest are the class's own."""


# ------------------------------------------------------------ content: pure functions


def hf_config(shape: Shape, *, dtype: str, end_id: int, pad_id: int) -> dict[str, Any]:
    """Return config.json: the number of experts in both spellings, without `layer_types`, which
    readers infer."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.num_experts else "Qwen3ForCausalLM"],
        "model_type": shape.arch,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "torch_dtype": dtype,
    }
    if shape.num_experts:
        config |= {
            "num_experts": shape.num_experts,
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.moe_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    return config


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the checkpoint, in its usual order."""
    hidden = shape.hidden
    q_rows = shape.heads * shape.head_dim
    kv_rows = shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "self_attn.q_proj.weight": (q_rows, hidden),
            at + "self_attn.k_proj.weight": (kv_rows, hidden),
            at + "self_attn.v_proj.weight": (kv_rows, hidden),
            at + "self_attn.o_proj.weight": (hidden, q_rows),
            at + "self_attn.q_norm.weight": (shape.head_dim,),
            at + "self_attn.k_norm.weight": (shape.head_dim,),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
        if shape.num_experts:
            tensors[at + "mlp.gate.weight"] = (shape.num_experts, hidden)
        inner = shape.moe_intermediate or shape.intermediate
        for mlp in [f"mlp.experts.{e}." for e in range(shape.num_experts)] or ["mlp."]:
            tensors |= {
                at + mlp + "gate_proj.weight": (inner, hidden),
                at + mlp + "up_proj.weight": (inner, hidden),
                at + mlp + "down_proj.weight": (hidden, inner),
            }
    tensors["model.norm.weight"] = (hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab, hidden)
    return tensors


def is_projection(name: str) -> bool:
    """Whether an FP8 release has this tensor in FP8."""
    return name.endswith("_proj.weight")


def fp8_settings(names: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of an FP8 checkpoint with these tensors."""
    from trainer_node.hf import fp8_blocks

    kept = [n for n in names if n.endswith((".gate.weight", "lm_head.weight"))]
    return fp8_blocks.SETTINGS | {
        "modules_to_not_convert": [n.removesuffix(".weight") for n in kept]
    }


def initial_std(name: str, shape: tuple[int, ...], *, tied: bool) -> float:
    """Return the spread of a tensor's random values, around 0 (norms: around 1).

    Log-probs are far from uniform, and every class of weights moves them by well over 1e-3, even a
    single expert. The token stays the largest part of its hidden state, so the router's choices
    differ between tokens. With each of a dozen seeds, every expert got tokens from four short
    prompts.
    """
    if len(shape) == 1:
        return 0.1
    if name == "model.embed_tokens.weight":
        return 0.25 if tied else 1.0
    gain = 0.75 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.5
    return gain / math.sqrt(shape[1])


# ------------------------------------------------------------ files


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> tuple[int, int]:
    """tokenizer.json and tokenizer_config.json; returns the ids of the end and padding tokens.

    Args:
        vocab_size: of the model. Each further token is a word that no text encodes to: random
            weights sample all ids, and vLLM's detokenizer is slow where ids have no text.

    Raises:
        ConfigError: an answer is not a single token (cannot happen with the corpus above).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    for word in ANSWERS:
        for text in (word, f" {word}"):
            if len(tokenizer.encode(text).ids) != 1:
                raise ConfigError(
                    f"{text!r} is not one token of the tiny tokenizer: "
                    f"{tokenizer.encode(text).tokens}"
                )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ConfigError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}; make it "
            "longer"
        )
    content = json.loads(tokenizer.to_str())
    words = range(VOCAB_SIZE, vocab_size)
    content["model"]["vocab"] |= {f"Ġw{token}": token for token in words}  # Ġ: a space
    _write_json(folder / "tokenizer.json", content)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 40960,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": PAD,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)


def write_checkpoint(
    folder: Path,
    shape: Shape,
    *,
    seed: int = 0,
    dtype: str = "float32",
    config_only: bool = False,
    fp8: bool = False,
) -> None:
    """A whole checkpoint folder; with `config_only` everything but the weights.

    With `fp8` the projections are block-scaled FP8, as Qwen's FP8 releases have them.

    `model.safetensors.index.json` is there in any case: Megatron-Bridge takes the list of keys from
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end_id, pad_id = write_tokenizer(folder, shape.vocab)
    shapes = tensor_shapes(shape)
    config = hf_config(shape, dtype=dtype, end_id=end_id, pad_id=pad_id)
    if fp8:
        config["quantization_config"] = fp8_settings(shapes)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": end_id, "pad_token_id": pad_id})
    scaled = [name for name in shapes if is_projection(name)] if fp8 else []
    _write_index(folder, [*shapes, *(f"{name}_scale_inv" for name in scaled)], shapes, dtype)
    if not config_only:
        tensors = _weights(shapes, tied=shape.tied, seed=seed, dtype=dtype)
        _save(folder / "model.safetensors", tensors, scaled)


def _write_index(
    folder: Path, names: Iterable[str], shapes: dict[str, tuple[int, ...]], dtype: str
) -> None:
    total_size = sum(map(math.prod, shapes.values())) * (4 if dtype == "float32" else 2)
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict.fromkeys(names, "model.safetensors"),
    }
    _write_json(folder / "model.safetensors.index.json", index)


def real_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one of `REAL_SHAPES` or `OTHER_SHAPES`."""
    return tensor_shapes(REAL_SHAPES[name]) if name in REAL_SHAPES else _other(name)[1]


def _other(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """transformers' config and its checkpoint's tensors."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    kind, settings = OTHER_SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(**settings, dtype="bfloat16")
    config.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tensors = revert_weight_conversion(model, model.state_dict())
    return config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_other(folder: Path, name: str) -> int:
    """The config of one of `OTHER_SHAPES`, a tokenizer and the list of keys; returns how many."""
    config, shapes = _other(name)
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    _write_index(folder, shapes, shapes, "bfloat16")
    return len(shapes)


def _weights(
    shapes: dict[str, tuple[int, ...]], *, tied: bool, seed: int, dtype: str
) -> dict[str, Any]:
    import torch

    # Not `seed` itself: noise that a test draws with seed 0 would be these very weights, and
    # scaling q or k changes nothing.
    generator = torch.Generator().manual_seed(seed + 0x5EED)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * initial_std(name, shape, tied=tied)
        tensors[name] = (values + 1.0 if len(shape) == 1 else values).to(getattr(torch, dtype))
    return tensors


def _save(path: Path, tensors: dict[str, Any], scaled: Collection[str]) -> None:
    from trainer_node.hf import fp8_blocks
    from trainer_node.hf.checkpoint import save_tensors

    written = dict(fp8_blocks.quantising(iter(tensors.items()), scaled))
    save_tensors(path, written)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def chosen_shape(*, name: str, arch: Arch | None, tied: bool, fp8: bool = False) -> Shape:
    """The shape that the command line asks for.

    With `fp8` the tiny one has matrices that blocks of 128 x 128 fill.

    Raises:
        ConfigError: the architecture is not the shape's, or a real model is asked for with tied
            embeddings.
    """
    if name == "tiny":
        shapes = BLOCK_SHAPES if fp8 else TINY_SHAPES
        return replace(shapes[arch or "qwen3"], tied=tied)
    shape = REAL_SHAPES[name]
    if arch not in (None, shape.arch):
        raise ConfigError(f"--shape {name} is a {shape.arch}, not a {arch}; leave --arch out")
    if tied:
        raise ConfigError(
            f"--shape {name} has its own lm_head; --tie-word-embeddings goes with --shape tiny"
        )
    return shape


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.tools.make_checkpoint",
        description=__doc__.partition("\n\n")[0],
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--arch",
        choices=["qwen3", "qwen3_moe"],
        default=None,
        help="with --shape tiny (default: qwen3)",
    )
    parser.add_argument("--shape", choices=["tiny", *REAL_SHAPES, *OTHER_SHAPES], default="tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default=None,
        help="default: float32 (tiny), else bfloat16",
    )
    parser.add_argument(
        "--tie-word-embeddings", action="store_true", help="no lm_head.weight in the checkpoint"
    )
    parser.add_argument(
        "--config-only", action="store_true", help="config, tokenizer and list of keys; no weights"
    )
    parser.add_argument(
        "--fp8-blocks",
        action="store_true",
        help="projections in FP8 with a scale for each 128 x 128, the rest in bfloat16",
    )
    arguments = parser.parse_args(argv)
    is_small = arguments.shape == "tiny" and not arguments.fp8_blocks
    dtype = arguments.dtype or ("float32" if is_small else "bfloat16")
    try:
        if arguments.fp8_blocks and (dtype != "bfloat16" or arguments.shape in OTHER_SHAPES):
            raise ConfigError("--fp8-blocks goes with --dtype bfloat16 and a Qwen3")
        if arguments.shape != "tiny" and not arguments.config_only:
            raise ConfigError(
                f"--shape {arguments.shape} is written with --config-only; random weights are "
                "made in memory"
            )
        if arguments.shape in OTHER_SHAPES:
            count = write_other(arguments.out, arguments.shape)
            print(f"{arguments.out}: {arguments.shape}, {count} tensors, bfloat16")
            return
        shape = chosen_shape(
            name=arguments.shape,
            arch=cast("Arch | None", arguments.arch),
            tied=arguments.tie_word_embeddings,
            fp8=arguments.fp8_blocks,
        )
        write_checkpoint(
            arguments.out,
            shape,
            seed=arguments.seed,
            dtype=dtype,
            config_only=arguments.config_only,
            fp8=arguments.fp8_blocks,
        )
    except ConfigError as error:
        parser.error(str(error))
    print(f"{arguments.out}: {shape.arch}, {len(tensor_shapes(shape))} tensors, {dtype}")


if __name__ == "__main__":
    main()
