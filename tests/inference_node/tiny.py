"""Tiny Qwen3 checkpoints (dense, MoE, tied), random and reproducible; and the same weights moved,
for a second version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(kind: str, **changes: Any) -> Any:
    """HF config of "dense", "tied" or "moe"."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    if kind == "moe":
        return Qwen3MoeConfig(**(COMMON | MOE | {"tie_word_embeddings": False} | changes))
    return Qwen3Config(**(COMMON | {"tie_word_embeddings": kind == "tied"} | changes))


def state_dict(kind: str, *, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """HF-named fp32 tensors in checkpoint order, with the per-expert names that Qwen3-MoE
    checkpoints have.
    """
    cfg = config(kind, **changes)
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (0.35 if len(shape) > 1 else 0.1) + (
            1.0 if len(shape) == 1 else 0.0
        )

    h, d, q, kv = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads
    tensors = {"model.embed_tokens.weight": rand(cfg.vocab_size, h)}
    for n in range(cfg.num_hidden_layers):
        p = f"model.layers.{n}."
        tensors |= {
            p + "self_attn.q_proj.weight": rand(q * d, h),
            p + "self_attn.k_proj.weight": rand(kv * d, h),
            p + "self_attn.v_proj.weight": rand(kv * d, h),
            p + "self_attn.o_proj.weight": rand(h, q * d),
            p + "self_attn.q_norm.weight": rand(d),
            p + "self_attn.k_norm.weight": rand(d),
            p + "input_layernorm.weight": rand(h),
            p + "post_attention_layernorm.weight": rand(h),
        }
        if kind == "moe":
            tensors[p + "mlp.gate.weight"] = rand(cfg.num_experts, h)
        inner = cfg.moe_intermediate_size if kind == "moe" else cfg.intermediate_size
        for prefix in (
            [f"mlp.experts.{e}." for e in range(cfg.num_experts)] if kind == "moe" else ["mlp."]
        ):
            tensors[p + prefix + "gate_proj.weight"] = rand(inner, h)
            tensors[p + prefix + "up_proj.weight"] = rand(inner, h)
            tensors[p + prefix + "down_proj.weight"] = rand(h, inner)
    tensors["model.norm.weight"] = rand(h)
    if kind != "tied":
        tensors["lm_head.weight"] = rand(cfg.vocab_size, h)
    return tensors


def write_checkpoint(
    folder: Path, kind: str, *, seed: int = 0, **changes: Any
) -> dict[str, torch.Tensor]:
    """config.json, tokenizer and model.safetensors in `folder`; returns the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = state_dict(kind, seed=seed, **changes)
    architecture = "Qwen3MoeForCausalLM" if kind == "moe" else "Qwen3ForCausalLM"
    values = config(kind, **changes).to_dict() | {
        "architectures": [architecture],
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values, indent=1, default=str))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return tensors


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 320)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def manifest_of(tensors: dict[str, torch.Tensor]) -> Any:
    """The Manifest of these tensors, in order."""
    from orchestrator.protocol.messages import Manifest, TensorSpec

    return Manifest(
        tensors=tuple(
            TensorSpec(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
            for n, t in tensors.items()  # type: ignore[arg-type]
        )
    )


def reference_logprobs(
    kind: str, tensors: dict[str, torch.Tensor], prompt: list[int], **changes: Any
) -> torch.Tensor:
    """Log-probs by transformers in fp32: row t is the distribution after prompt[: t + 1]. [T, V]"""
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

    cls = Qwen3MoeForCausalLM if kind == "moe" else Qwen3ForCausalLM
    model = cls(config(kind, **changes)).float().eval()
    missing = model.load_state_dict(_fuse_experts(dict(tensors), model), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _fuse_experts(
    tensors: dict[str, torch.Tensor], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """transformers 5 keeps a layer's experts in two fused parameters; older ones take the
    checkpoint's names.
    """
    for name in [n for n in model.state_dict() if n.endswith("mlp.experts.gate_up_proj")]:
        base = name.removesuffix("gate_up_proj")
        experts = sorted(
            {int(n.removeprefix(base).split(".")[0]) for n in tensors if n.startswith(base)}
        )
        pop = tensors.pop
        gate_up = [
            torch.cat([pop(f"{base}{e}.gate_proj.weight"), pop(f"{base}{e}.up_proj.weight")])
            for e in experts
        ]
        tensors[name] = torch.stack(gate_up)
        tensors[base + "down_proj"] = torch.stack(
            [pop(f"{base}{e}.down_proj.weight") for e in experts]
        )
    return tensors
