"""Which families are tested in which way; `tests.models_page` makes a page of it."""

from __future__ import annotations

PIPELINES = ["llama", "qwen3_moe", "deepseek_v3"]
"""Over two pipeline stages."""
SLOW_EXPERTS = ["gpt_oss"]
"""With experts whose grouped products the trainer does not have."""
TOPOLOGIES = [
    # family and SIZES
    ("llama", 2, 1, 1, 1),
    ("llama", 1, 2, 1, 1),
    ("mistral", 1, 2, 1, 1),
    ("gemma3", 2, 1, 1, 1),
    ("gpt_oss", 2, 1, 1, 1),
    ("gpt_oss", 1, 2, 1, 1),
    ("gpt_oss", 1, 1, 2, 1),
    ("deepseek_v3", 2, 1, 1, 1),
    ("deepseek_v3_yarn", 1, 2, 1, 1),
    ("deepseek_v3", 1, 1, 2, 1),
    ("qwen3_moe", 1, 1, 2, 1),
    ("minimax_m2", 2, 1, 1, 1),
    ("qwen3_5_moe", 2, 1, 1, 1),
    ("qwen3_5_moe", 1, 2, 1, 1),
    ("qwen3_moe", 1, 1, 1, 2),
]
ALL, PACKED = "all-linear", "_packed"
ONE_RANK = [
    # family and targets
    ("llama", ALL),
    ("llama", "q_proj,down_proj"),
    ("llama", f"{ALL},lm_head"),
    ("qwen3_moe", "lm_head"),
    ("qwen2", ALL),
    ("gemma3", ALL),
    ("olmoe", ALL),
    ("qwen3_moe", ALL),
    ("minimax_m2", ALL),
    ("deepseek_v2", ALL),
    ("glm4_moe_lite", ALL),
    ("qwen3_next", ALL),
    ("qwen3_5", ALL),
    ("qwen3_5_moe", ALL),
    ("qwen3_5_moe", "in_proj_z,in_proj_a,k_proj,shared_expert.down_proj"),
    ("gpt_oss", ALL),
    ("gpt_oss", "q_proj,experts.gate_up_proj,experts.down_proj"),
    ("gpt_oss", "experts.down_proj"),
    ("qwen3_5_moe_packed", "k_proj,experts.gate_up_proj,experts.down_proj"),
    ("nemotron", ALL),
    ("mistral", ALL),
    ("gemma", ALL),
    ("qwen3", ALL),
    ("glm4_moe", ALL),
    ("deepseek_v2_lite", ALL),
    ("deepseek_v3", ALL),
]
SEVERAL = [
    # family, targets, sequence parallelism, then (tensor, context, expert, expert_tensor)
    ("llama", ALL, 1, (2, 1, 1, 1)),
    ("llama", ALL, 0, (2, 1, 1, 1)),
    ("llama", f"{ALL},lm_head", 1, (2, 1, 1, 1)),
    ("llama", f"{ALL},lm_head", 0, (2, 1, 1, 1)),
    ("gemma3", ALL, 1, (2, 1, 1, 1)),
    ("qwen3_5", ALL, 1, (2, 1, 1, 1)),
    ("qwen3_5_moe", ALL, 1, (2, 1, 1, 1)),
    ("qwen3_5_moe", ALL, 0, (2, 1, 1, 1)),
    ("qwen3_next", ALL, 1, (2, 1, 1, 1)),
    ("minimax_m2", ALL, 1, (2, 1, 1, 1)),
    ("deepseek_v2", ALL, 1, (2, 1, 1, 1)),
    ("deepseek_v2", ALL, 1, (1, 1, 2, 1)),
    ("deepseek_v2", ALL, 1, (1, 2, 1, 1)),
    ("gpt_oss", "experts.gate_up_proj,experts.down_proj", 1, (1, 1, 2, 1)),
    ("qwen3_5_moe_packed", "experts.gate_up_proj,experts.down_proj", 1, (1, 1, 2, 1)),
    ("qwen3_moe", ALL, 1, (1, 1, 1, 2)),
]
