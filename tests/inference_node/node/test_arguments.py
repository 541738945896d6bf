"""vLLM's own parser reads the command line that a node makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from inference_node.node.vllm_process import arguments
from inference_node.server import dialect
from orchestrator.protocol.config import InferenceConfig
from tests.inference_node import tiny


def parsed(**settings: Any) -> Any:
    """What vLLM reads from a GPU node's configuration."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, make_arg_parser, *_ = dialect.server_parts()
    config = InferenceConfig(**{"model": Path("m"), "name": "n", "device": "cuda", **settings})
    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments(config))


@pytest.mark.parametrize(("length", "read"), [("auto", -1), (777, 777)])
def test_the_longest_sequence(length, read):
    """-1: vLLM takes the model's own length, or what the KV cache holds."""
    found = parsed(max_model_len=length)
    assert (found.max_model_len, found.served_model_name) == (read, ["n"])


OTHER = ("--gdn-prefill-backend", "cutedsl")
AS_CONFIG = ("--additional-config", '{"gdn_prefill_backend": "cutedsl"}')


@pytest.mark.parametrize(
    ("installed", "programs", "given", "read"),
    [
        (False, "nvcc ninja", (), "triton"),
        (True, "nvcc ninja", (), None),
        (True, "ninja", (), "triton"),
        (True, "nvcc", (), "triton"),
        (False, "", OTHER, "cutedsl"),
        (False, "", AS_CONFIG, None),
    ],
)
def test_gated_delta_nets_need_no_flashinfer(
    installed, programs, given, read, monkeypatch, tmp_path
):
    """It compiles its kernels with nvcc and ninja: without them, vLLM must not choose it."""
    (tmp_path / "bin").mkdir()
    for program in programs.split():
        (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "")
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return found(name) if name != "flashinfer" else installed or None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert parsed(extra_args=given).gdn_prefill_backend == read


@pytest.mark.parametrize("given", [(), ("--generation-config", "auto")])
def test_requests_have_no_settings_of_the_models_own(given, tmp_path):
    """Nobody trains on the distribution after a published model's top_p. Its end tokens stay."""
    tiny.config("dense").save_pretrained(tmp_path)
    published = {"top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "eos_token_id": [2, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    found = parsed(model=tmp_path, extra_args=given)
    config = AsyncEngineArgs.from_cli_args(found).create_model_config()
    own = {name: published[name] for name in ("top_k", "top_p", "repetition_penalty")}
    assert config.get_diff_sampling_param() == (own if given else {})
    assert config.try_get_generation_config()["eos_token_id"] == [2, 7]
