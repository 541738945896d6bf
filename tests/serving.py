"""What vLLM on a CPU wants of the tiny checkpoints of `tests.trainer_node.families`."""

from __future__ import annotations

from typing import Any

HEADS = {"num_attention_heads": 2}  # of 32: vLLM's attention on a CPU knows no 16
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
LATENT_ON_GPUS = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # what its kernels know
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # transformers writes neither
ONE_GROUP = {"n_group": 1, "topk_group": 1}  # vLLM on a CPU takes no null
EPS = {"rms_norm_eps": 1e-5}  # vLLM reads none
SERVED: dict[str, dict[str, Any]] = {
    "qwen2": HEADS | {"num_key_value_heads": 1},
    "olmoe": HEADS | {"num_key_value_heads": 2} | EPS,
    "gpt_oss": EPS,
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "glm4_moe_lite": LATENT,
    "deepseek_v2": LATENT | ONE_GROUP,
    "deepseek_v2_lite": LATENT | ONE_GROUP,
    "deepseek_v3": LATENT | NOAUX,
    "deepseek_v3_yarn": LATENT | NOAUX,
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Settings that vLLM on a CPU wants otherwise."""
BFLOAT16 = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""vLLM's gated delta rule on a CPU takes no other dtype."""
UNLISTED = ("qwen3_5", "qwen3_5_moe")
"""vLLM's module of these imports torchvision, which the CPU environment lacks; the tests of the
inference node load it without. vLLM 0.26 on a GPU serves them with their vision part only."""
UNSERVED = {"minimax_m2": 'assert self.scoring_func == "softmax"'}
"""The line of vLLM's router on a CPU that refuses a family's requests. Its weights are loaded."""
