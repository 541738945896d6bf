"""`splice check --bits`: real vLLM against real Megatron, and against one with an ordinary
operation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.conftest import INFERENCE_PYTHON, ROOT

TIMEOUT_S = 400.0
pytestmark = pytest.mark.timeout(900)
MUTANT = """
import sys
from torch.nn import functional
from weight_transfer.exact import kernels
kernels.{name} = {ordinary}
from trainer_node.tools import bits
sys.exit(bits.main())
"""


def ran(argv: list[Any]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [str(a) for a in argv],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def sampler(request, models, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The arguments of the trainer's side, after vLLM has run."""
    file = tmp_path_factory.mktemp("bits") / "sampler.safetensors"
    model = models[getattr(request, "param", "qwen3")]
    common = ["--model", model, "--device", "cpu", "--dtype", "float32", "--exact"]
    done = ran([INFERENCE_PYTHON, "-m", "inference_node.bits", *common, "--out", file])
    assert done.returncode == 0, done.stderr[-3000:]
    return [*common, "--sampler", file]


@pytest.mark.parametrize(
    ("sampler", "operations"), [("qwen3", 17), ("qwen3_moe", 16)], indirect=["sampler"]
)
def test_every_operation_is_equal(sampler, operations, tmp_path) -> None:
    report = tmp_path / "report.json"
    done = ran([sys.executable, "-m", "trainer_node.tools.bits", *sampler, "--out", report])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["first"] == "" and len(found["rows"]) == operations
    assert {row["differing"] for row in found["rows"]} == {0}
    assert found["rows"][-1]["operation"] == "sampled_log_probs"


@pytest.mark.parametrize(
    ("name", "ordinary", "first"),
    [
        ("silu", "functional.silu", "SwiGLU of layer 0"),
        (
            "rms_norm",
            "lambda x, g, eps: functional.rms_norm(x, (x.shape[-1],), g, eps)",
            "RMSNorm before attention of layer 0",
        ),
    ],
)
def test_an_ordinary_operation_is_named(sampler, name, ordinary, first) -> None:
    done = ran([sys.executable, "-c", MUTANT.format(name=name, ordinary=ordinary), *sampler])
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert f"the first operation that differs: {first}" in done.stdout
