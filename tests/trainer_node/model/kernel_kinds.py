"""One rank: what the start's check of attention kernels finds for heads as large as real models'.

torchrun ... -m tests.trainer_node.model.kernel_kinds FOLDER cuda
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from tests.trainer_node import families
from trainer_node.model import kernel_check, paths, rng
from trainer_node.model.kernel_check import BOUND, NAMES, differences_of, layers_of
from trainer_node.model.model import Model
from trainer_node.ranks import topology
from trainer_node.training.start import start


def _heads(heads: int, groups: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}


def _latent(heads: int, nope: int, values: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": values,
        "kv_lora_rank": 512,
    }


SIZES = {
    "llama": _heads(32, 8, 64),
    "qwen3": _heads(32, 8, 128),
    "qwen3_moe": _heads(32, 4, 128),
    "mistral": _heads(32, 8, 128) | {"sliding_window": 256},
    "gpt_oss": _heads(64, 8, 64) | {"sliding_window": 128},
    "gemma3": _heads(8, 4, 256) | {"sliding_window": 1024},
    "qwen3_5_moe": _heads(16, 2, 256),
    "glm4_moe_lite": _latent(20, 192, 256),
    "deepseek_v3": _latent(16, 128, 128),
}
"""Family -> its heads: Llama 3.2, Qwen3-8B and 30B-A3B, Mistral, gpt-oss-20b, Gemma 3 4B,
Qwen3.5-35B-A3B, GLM-4.7-Flash, DeepSeek-V3 on 8 GPUs."""


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    asked: list[Model] = []
    check, kernel_check.check = kernel_check.check, asked.append  # every kind, not the first wrong
    wrong = []
    for family, sizes in SIZES.items():
        model = families.make(family, folder / family, hidden_size=256, **sizes)
        config = {"model": model, "device": device, "dtype": "bfloat16", "micro_batch_tokens": 4096}
        trainer = start(TrainerConfig.model_validate(config))
        module, provider = trainer.model.modules[0], trainer.model.provider
        why = paths.obstacle(module, provider, trainer.model.config)
        for kind, layer in layers_of(trainer.model).items():
            for shares in (False, True)[: 1 + (why is None)]:
                found = differences_of(layer, kind, trainer.model.device, shares=shares)
                text = ", ".join(f"{n} {d:.2%}" for n, d in zip(NAMES, found, strict=True))
                print(f"{family}{' along paths' * shares}: {kind}: {text}", flush=True)
                wrong += [family] if not all(d <= BOUND for d in found) else []
        assert asked == ([trainer.model] if device == "cuda" else []), "by the start"
        asked.clear()
        check_generators(trainer.model, check)
        topology.leave()
    assert not wrong, wrong


def check_generators(model: Model, check: Callable[[Model], None]) -> None:
    """The check leaves them as they were, or training would not be what its seed says."""
    before = rng.state(model.device)
    with contextlib.suppress(ConfigError):
        check(model)
    after = rng.state(model.device)
    assert all(
        torch.equal(after[name], before[name]) for name in ("rng", "cuda_rng") if name in after
    )


if __name__ == "__main__":
    main()
