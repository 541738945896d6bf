"""A real vLLM with --enable-lora: base and adapter arrive, are verified, and are what it serves."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

from inference_node.worker.lora import _unwrap_head
from tests.inference_node import lora_engine
from tests.inference_node.adapters import PREFIX
from tests.inference_node.conftest import ENGINE_S, Run

TAU = 0.25 if torch.cuda.is_available() else 1e-4
"""How far a served log-prob may be from transformers' in fp32; on a GPU the kernels take bf16."""
pytestmark = pytest.mark.timeout(ENGINE_S + 60.0)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_what_vllm_computes_is_the_base_with_the_adapter(forked: Run, name: str) -> None:
    """Also after another adapter had more linears and a larger rank."""
    found = forked(lora_engine.run, name)
    assert found.refused == "" and found.wrong == [] and found.unverified == {}
    assert "reload" not in found.kinds  # in place, although the base on a CPU is reloaded
    assert max(found.differences) < TAU, found.differences
    assert min(found.moved) > 0.5, found.moved
    # A bit of what vLLM holds is another one. On a GPU digests are taken before it changes.
    if not torch.cuda.is_available():
        assert found.broken == [f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"]


def test_a_linear_that_vllm_has_no_adapter_for_is_refused_by_name(forked: Run) -> None:
    wrapped = ("q_proj", "k_proj", "v_proj")
    found = forked(lora_engine.run, "qwen3", ("q_proj", "o_proj"), wrapped)
    assert f"{PREFIX}model.layers.0.self_attn.o_proj.lora_A.weight" in found.refused
    assert "trainer.lora.targets" in found.refused


def test_the_wrapper_of_a_tied_head_comes_off_and_the_embeddings_stays() -> None:
    """vLLM 0.26 wraps a tied embedding twice; the compiled layers know only the first wrapper."""
    table, model, layers = torch.nn.Embedding(4, 2), torch.nn.Module(), torch.nn.Module()
    layers.embed_tokens = VocabParallelEmbeddingWithLoRA(table)
    model.model, model.lm_head = layers, VocabParallelEmbeddingWithLoRA(table)
    _unwrap_head(model)
    assert model.lm_head is table
    assert isinstance(layers.embed_tokens, VocabParallelEmbeddingWithLoRA)
