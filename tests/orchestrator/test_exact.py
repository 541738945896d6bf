"""What `numerics = "exact"` refuses, by name, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    InferenceConfig,
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
)
from orchestrator.protocol.exact import model_obstacle
from splice.client.run_file import RunFile
from splice.cluster.preflight import check_exact

MODEL = Path("org/name")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"device": "cuda", "dtype": "float32"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"parallel": ParallelConfig(tensor=2, world_size=2)}, "parallel.tensor"),
        ({"parallel": ParallelConfig(pipeline=2, world_size=2)}, "parallel.pipeline"),
        ({"parallel": ParallelConfig(context=2, world_size=2)}, "parallel.context"),
        ({"parallel": ParallelConfig(expert=2, world_size=2)}, "parallel.expert"),
        ({"lora": LoraConfig(dropout=0.1)}, "lora.dropout"),
        ({"compile": True}, "compile"),
        ({"finetuning_type": "full"}, "finetuning_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trainer_setting_is_refused(options, name) -> None:
    with pytest.raises(ValidationError, match=f"'exact' does not go with {name}"):
        TrainerConfig(model=MODEL, numerics="exact", **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"device": "cuda", "dtype": "float32"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"extra_args": ("--quantization", "fp8")}, "extra_args --quantization"),
        ({"extra_args": ("--kv_cache_dtype=fp8",)}, "extra_args --kv-cache-dtype"),
        ({"extra_args": ("--speculative-config", "{}")}, "extra_args --speculative-config"),
        ({"extra_args": ("-q", "fp8")}, "extra_args -q"),
        ({"extra_args": ("--quant=fp8",)}, "extra_args --quant"),
        ({"extra_args": ("-sc", "{}")}, "extra_args -sc"),
        ({"extra_args": ("--spec-method", "ngram")}, "extra_args --spec-method"),
        ({"extra_args": ("--enable-lora",)}, "extra_args --enable-lora"),
        ({"extra_args": ("-cc.mode=3",)}, "extra_args -cc"),
        ({"extra_args": ("-ac", "{}")}, "extra_args -ac"),
        ({"extra_args": ("--hf-overrides.head_dtype", "float32")}, "extra_args --hf-overrides"),
        ({"extra_args": ("--model-impl", "transformers")}, "extra_args --model-impl"),
        ({"extra_args": ("--config", "vllm.yaml")}, "extra_args --config"),
        ({"extra_args": ("-tp", "2")}, "extra_args -tp"),
        ({"extra_args": ("--tensor-parallel-size=2",)}, "extra_args --tensor-parallel-size"),
        ({"extra_args": ("-dcp", "2")}, "extra_args -dcp"),
        (
            {"extra_args": ("--decode-context-parallel-size", "2")},
            "extra_args --decode-context-parallel-size",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_of_the_sampler_is_refused(options, name) -> None:
    with pytest.raises(ValidationError, match=f"'exact' does not go with {name}"):
        InferenceConfig(model=MODEL, name="tiny", exact=True, **options)


def test_other_options_of_vllm_are_not_refused() -> None:
    options = ("--max-num-batched-tokens", "512", "--kv-cache-memory-bytes=9", "-O0", "--seed", "1")
    InferenceConfig(model=MODEL, name="tiny", exact=True, extra_args=options)


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True}
QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6, "attention_bias": False}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "olmoe", "num_experts": 8, "norm_topk_prob": True}, "experts"),
        (MIXTURE | {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-latent attention"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "the gated delta rule",
        ),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding windows"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"model_type": "llama", "attention_bias": True}, "biases of a llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "olmo2"}, "model_type 'olmo2'"),
        ({"head_dtype": "float32"}, "head_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_refused(changes, what) -> None:
    assert model_obstacle(QWEN3, "cpu") is model_obstacle(QWEN3 | MIXTURE, "cuda") is None
    found = model_obstacle(QWEN3 | changes, "cpu")
    assert found is not None and found[0].startswith(what) and found[1]


def test_experts_of_a_tensor_parallel_sampler_are_refused() -> None:
    found = model_obstacle(QWEN3 | MIXTURE, "cpu", parts=2)
    assert found is not None and found[0] == "experts with inference.tensor_parallel"
    few = QWEN3 | {"num_attention_heads": 8, "num_key_value_heads": 2}
    assert model_obstacle(few, "cpu", parts=2) is None
    found = model_obstacle(few, "cpu", parts=4)
    assert found is not None and found[0] == "inference.tensor_parallel = 4 of 2 key heads"


def test_many_heads_of_one_key_are_refused_on_a_gpu() -> None:
    many = QWEN3 | {"num_attention_heads": 128, "num_key_value_heads": 1}
    assert model_obstacle(many, "cpu") is None
    assert model_obstacle(many | {"num_key_value_heads": 2}, "cuda") is None
    found = model_obstacle(many, "cuda")
    assert found is not None and found[0] == "128 query heads for one key on a GPU"


def test_a_vocabulary_is_refused_on_a_gpu() -> None:
    odd = QWEN3 | {"vocab_size": 50257}
    assert model_obstacle(odd, "cpu") is None
    assert model_obstacle(QWEN3 | {"vocab_size": 49152}, "cuda") is None
    found = model_obstacle(odd, "cuda")
    assert found is not None and found[0] == "a vocabulary of 50257 on a GPU"


def test_the_run_file_tells_the_sampler() -> None:
    def run(**inference):
        tables = {"trainer": {"numerics": "exact"}, "inference": inference}
        return RunFile(name="tiny", model=MODEL, **tables)

    assert run().inference_config(0).exact
    assert run().trainer_config().numerics == "exact"
    assert run().trainer_config().sampler_parallel == 1
    assert run(tensor_parallel=2).trainer_config().sampler_parallel == 2
    with pytest.raises(ConfigError, match=r"experts with inference\.tensor_parallel"):
        check_exact(run(tensor_parallel=2).trainer_config(), QWEN3 | MIXTURE)
    assert not RunFile(name="tiny", model=MODEL, trainer={}, inference={}).inference.exact
    with pytest.raises(ValidationError, match=r"give only trainer\.numerics"):
        run(exact=False)


def test_both_roles_must_have_one_kind_of_device() -> None:
    """A GPU's bits in bf16 are not a CPU's in fp32."""
    trainer = {"numerics": "exact", "device": "cuda", "dtype": "bfloat16"}
    inference = {"device": "cpu", "dtype": "float32", "enforce_eager": True}
    match = "trainer.device = 'cuda' and inference.device = 'cpu'"
    with pytest.raises(ValidationError, match=match):
        RunFile(name="tiny", model=MODEL, trainer=trainer, inference=inference)
    served = trainer | {"numerics": "served"}
    RunFile(name="tiny", model=MODEL, trainer=served, inference=inference)
