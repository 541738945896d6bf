"""vLLM's own parser reads the command line that a node makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_node import dialect
from inference_node.vllm_process import arguments
from orchestrator.protocol.config import InferenceConfig


@pytest.mark.parametrize(("length", "parsed"), [("auto", -1), (777, 777)])
def test_the_longest_sequence(length, parsed):
    """-1: vLLM takes the model's own length, or what the KV cache holds."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, make_arg_parser, *_ = dialect.server_parts()
    config = InferenceConfig(model=Path("m"), name="n", device="cuda", max_model_len=length)
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments(config))
    assert (found.max_model_len, found.served_model_name) == (parsed, ["n"])
