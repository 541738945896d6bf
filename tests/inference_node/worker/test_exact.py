"""What `worker.exact` refuses of vLLM's layers."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from inference_node.worker import exact
from orchestrator.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [YARN, {"rope_type": "linear", "factor": 2.0}], ids=str)
def test_scaled_rotary_embeddings_are_refused(scaling: dict) -> None:
    """Their classes have vLLM's plain one as base, whose method is replaced."""
    places, query = torch.arange(4), torch.randn(4, 2 * 16)
    with set_current_vllm_config(VllmConfig()):
        plain, scaled = (
            get_rope(16, max_position=256, rope_parameters={"rope_theta": 1e4} | more)
            for more in ({"rope_type": "default"}, scaling)
        )
    assert exact._rotate(plain, places, query, query)[0].shape == query.shape
    with pytest.raises(ConfigError, match="scaled rotary embeddings"):
        exact._rotate(scaled, places, query, query)
