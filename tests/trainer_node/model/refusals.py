"""What no family may do silently: a rank's check of `trainer_node.model.providers` on Bridge's own
providers.

    python -m tests.trainer_node.model.refusals
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from megatron.bridge import AutoBridge
from megatron.core.transformer.enums import AttnBackend

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import Device, ParallelConfig, TrainerConfig
from tests.trainer_node.families import FAMILIES
from trainer_node.backends import cpu_te
from trainer_node.model import providers


def provider(
    family: str,
    device: Device = "cpu",
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 - frozen
    **settings: Any,
) -> Any:
    """Bridge's provider for a config of the family with other settings, prepared."""
    name, text = FAMILIES[family].name, FAMILIES[family].text
    config_class = getattr(transformers, name + ("TextConfig" if text else "Config"))
    hf_config = config_class(**FAMILIES[family].settings | settings)
    hf_config.architectures = [f"{name}ForCausalLM"]
    auto = AutoBridge.from_hf_config(hf_config)
    made = auto.to_megatron_provider(load_weights=False)
    config = TrainerConfig(model=Path("nowhere"), device=device, parallel=parallel)
    providers.prepare(made, auto._model_bridge, config, hf_config)
    return made


def rope(**settings: Any) -> dict[str, Any]:
    """Parameters of rotary embeddings."""
    return {"rope_theta": 10000.0, **settings}


def check_rope() -> None:
    """What Megatron would compute with other numbers, or not at all."""
    llama3 = FAMILIES["llama3_rope"].settings["rope_parameters"]
    for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        with pytest.raises(ConfigError, match=r"llama3's rope scaling"):
            provider("llama", rope_parameters=llama3 | {name: llama3[name] * 2})
    with pytest.raises(ConfigError, match=r"does not read llama3's rope scaling in a qwen3"):
        provider("qwen3", rope_parameters=llama3)
    with pytest.raises(ConfigError, match=r"rope scaling 'linear' is not supported"):
        provider("llama", rope_parameters=rope(rope_type="linear", factor=2.0))
    with pytest.raises(ConfigError, match=r"attention_factor"):
        provider("llama", rope_parameters=rope(rope_type="yarn", factor=2.0, attention_factor=1.5))
    made = provider("llama", rope_parameters=rope(rope_type="yarn", factor=2.0))
    assert (made.yarn_beta_fast, made.yarn_original_max_position_embeddings) == (32.0, 128)
    by_layer = {
        "full_attention": rope(rope_type="yarn", factor=2.0),
        "sliding_attention": rope(rope_type="default"),
    }
    with pytest.raises(ConfigError, match=r"rope scaling by layer {'yarn'}"):
        provider("gemma3", rope_parameters=by_layer)


def check_windows() -> None:
    """Windows that Bridge's provider does not read, or cannot express."""
    with pytest.raises(ConfigError, match=r"knows no window"):
        provider("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match=r"layer_types has no period"):
        provider("gemma3", num_hidden_layers=3, layer_types=kinds)
    made = provider("gpt_oss", num_hidden_layers=3, layer_types=kinds)
    assert made.window_attn_skip_freq == [0, 1, 1]


def check_fusions() -> None:
    """Megatron checks the GPU tier's activation first; what it then misses here are
    TransformerEngine's rotary and permutation kernels alone.
    """
    for family in FAMILIES:
        if family == "llama_yarn":  # needs neither
            assert not provider(family, "cuda").apply_rope_fusion
            continue
        with pytest.raises(ValueError, match=r"is not available. Please install TE"):
            provider(family, "cuda")


def main() -> None:
    """See the module's docstring."""
    check_rope()
    check_windows()
    with pytest.raises(ConfigError, match=r"Megatron normalises sigmoid scores"):
        provider("deepseek_v3", norm_topk_prob=False)
    with pytest.raises(ConfigError, match=r"parallel\.sequence = False"):
        provider("deepseek_v2", parallel=ParallelConfig(tensor=2, sequence=False, world_size=2))
    check_fusions()
    assert provider("gemma").attention_backend is AttnBackend.auto
    sys.meta_path.remove(cpu_te._Finder)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"before Megatron is imported"):
        cpu_te.install()


if __name__ == "__main__":
    main()
