"""Real Megatron in bf16, real vLLM with FP8 weights or an FP8 KV cache, on the CPU: versions, and a
killed trainer.

`fp8_per_channel` is the kind that vLLM's CPU build serves without help.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    OptimParams,
    Resync,
    TrainMerged,
    batch_specs,
)
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.servers import scored
from tests.e2e.tiny_run import tiny_run

pytestmark = pytest.mark.timeout(600)
FP8 = ("--quantization", "fp8_per_channel")


def config(
    model: Path, folder: Path, *vllm: str, mode: Any = "in_place", **trainer: Any
) -> RunFile:
    workers = trainer.pop("workers", 1)
    lora = {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
    return tiny_run(
        folder,
        model,
        dtype="bfloat16",
        publication={"mode": mode},
        trainer={"lora": lora, **trainer},
        inference={"extra_args": vllm, "tensor_parallel": workers},
    )


def train(cluster: Cluster) -> dict[str, Any]:
    answer = [3, 4, 5, 6]
    job = TrainMerged(
        loss=LossSpec(name="cross_entropy"),
        optim=OptimParams(lr=1e-2),
        tensors=batch_specs(num_sequences=1, num_tokens=len(PROMPT) + len(answer)),
    )
    return cluster.client.run(job, buffers=as_batch(answer), timeout_s=300.0)


def follow(cluster: Cluster, mode: str) -> list[dict[str, Any]]:
    """Two versions; each is verified, and moves the log-probs."""
    results = []
    before = scored(cluster.base_urls[0], "tiny")
    for version in (1, 2):
        result = train(cluster)
        assert (result.version, result.mode, result.unverified) == (version, mode, {})
        assert result.num_verified == result.num_tensors
        after = scored(cluster.base_urls[0], f"tiny@{version}")
        assert statistics.median(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
        before = after
        results.append(result)
    return results


@pytest.mark.parametrize(
    ("mode", "workers", "parallel"),
    [
        ("in_place", 1, {}),
        ("shadow", 1, {}),
        ("in_place", 2, {}),
        ("in_place", 2, {"tensor": 2}),
    ],
    ids=["in-place", "shadow", "1-tp2", "tp2-tp2"],
)
def test_versions_reach_an_fp8_server(
    models: Any, tmp_path: Path, mode: str, workers: int, parallel: dict[str, int]
) -> None:
    """Where there are several ranks or workers, each piece is quantised by the rank that has it."""
    plan = config(models["qwen3"], tmp_path, *FP8, mode=mode, workers=workers, parallel=parallel)
    with Cluster(plan) as cluster:
        first = cluster.client.run(InitialSync())
        assert first.unverified == {} and first.canary is not None
        for result in follow(cluster, mode):
            assert result.sent == "changed" and result.num_tensors < first.num_tensors
    log = (plan.run_dir / "logs" / "orchestrator.log").read_text()
    assert ("every rank sends each worker its own" in log) == (workers > 1)


def test_a_trainer_killed_in_the_middle_of_an_fp8_transfer(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "killed"
    monkeypatch.setenv("SPLICE_TEST_KILL_MARKER", str(marker))
    plan = config(models["qwen3"], tmp_path, *FP8, finetuning_type="full")
    with Cluster(plan, trainer_module="tests.e2e.faulty_trainer") as cluster:
        cluster.client.run(InitialSync())
        first, second = follow(cluster, "in_place")
        assert marker.exists(), "the failure was not injected"
        assert (first.attempts, second.attempts) == (2, 1)
    log = (tmp_path / "run/logs/orchestrator.log").read_text()
    assert "failed while applying, now poisoned" in log


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's FP8 KV cache on a CPU needs AVX-512",
)
def test_an_fp8_kv_cache_keeps_nothing_of_an_old_version(models: Any, tmp_path: Path) -> None:
    """Log-probs right after a swap are those after a second one: no old entry is used."""
    vllm = ("--kv-cache-dtype", "fp8")
    with Cluster(config(models["qwen3"], tmp_path, *vllm)) as cluster:
        cluster.client.run(InitialSync())
        follow(cluster, "in_place")
        before = scored(cluster.base_urls[0], "tiny@2")
        assert cluster.client.run(Resync()).unverified == {}
        assert scored(cluster.base_urls[0], "tiny@2") == before
