"""CUDA graphs stay valid across updates: vLLM with graphs on serves, in decoding too, what each new
version's weights compute.

Needs two GPUs (SPLICE_BENCH_GPUS, default 0,1) and both environments (SPLICE_INFERENCE_PYTHON names
vLLM's): `pytest -m gpu2 tests/e2e/test_cuda_graphs.py`. Prefill's log-probs are compared with
transformers by `splice smoke`; decode's, which run in full graphs, are compared here with prefill's
of the same tokens, and with those of the version before.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import httpx
import pytest

from benchmarks.clusters import gpus
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    OptimParams,
    TrainMerged,
    batch_specs,
)
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.conftest import INFERENCE_PYTHON, TRAINER_PYTHON

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(900)]
LENGTH = 48
KV_CACHE = ("--kv-cache-memory-bytes", str(2**30))
"""With a size given vLLM does not insist that nobody else's use of the GPU changes while it
measures.
"""
ROUNDING = 0.05
"""Nats that bf16 may make in the median between decode's kernels and prefill's (rounding by itself
was 0.013 on the tiny MoE).
"""


def config(model: Path, folder: Path, *, mode: str, device: str) -> RunFile:
    cuda, (trainer_gpu, inference_gpu) = device == "cuda", gpus()
    return RunFile(
        name="tiny",
        model=model,
        run_dir=folder / "run",
        device=device,
        publication={"mode": mode},
        trainer={
            "python": TRAINER_PYTHON,
            "lora": {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
            "gpus": (trainer_gpu,) if cuda else (),
        },
        inference={
            "python": INFERENCE_PYTHON,
            "load_format": "dummy",
            "gpus": (inference_gpu,) if cuda else (),
            "max_model_len": 512,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.2,
            "extra_args": KV_CACHE if cuda else (),
        },
    )


def completion(url: str, **more: object) -> dict:
    body = {
        "model": "tiny",
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def decoded(url: str) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs, token by token through the decode graphs."""
    choice = completion(url, prompt=PROMPT, max_tokens=LENGTH, logprobs=0)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def prefilled(url: str, tokens: list[int]) -> list[float]:
    """Log-probs of the same tokens in one prefill."""
    rows = completion(url, prompt=PROMPT + tokens, max_tokens=1, prompt_logprobs=0)[
        "prompt_logprobs"
    ][len(PROMPT) :]
    return [float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens, strict=True)]


def apart(a: list[float], b: list[float]) -> float:
    return statistics.median(abs(x - y) for x, y in zip(a, b, strict=True))


def follow(model: Path, folder: Path, *, mode: str, device: str, steps: int = 3) -> None:
    """Each version is trained to say what the one before said: the log-probs of that must rise, in
    decoding as in prefill.
    """
    batch = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + LENGTH)
    with Cluster(config(model, folder, mode=mode, device=device)) as cluster:
        cluster.client.run(InitialSync())
        url = cluster.base_urls[0]
        for version in range(1, steps + 1):
            tokens, logprobs = decoded(url)
            before = prefilled(url, tokens)
            assert apart(logprobs, before) < ROUNDING, (
                f"decoding computes something else than prefill before @{version}"
            )
            job = TrainMerged(
                tensors=batch, loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=2e-2)
            )
            result = cluster.client.run(job, buffers=as_batch(tokens))
            assert (result.version, result.mode, result.unverified) == (
                version,
                mode,
                {},
            ), result.why_in_place
            after = prefilled(url, tokens)
            moved = apart(after, before)
            assert moved > 4 * ROUNDING and statistics.median(after) > statistics.median(before), (
                before,
                after,
            )
        tokens, logprobs = decoded(url)
        assert apart(logprobs, prefilled(url, tokens)) < ROUNDING


@pytest.mark.parametrize("mode", ["in_place", "shadow"])
def test_decoding_in_graphs_follows_every_version(
    mode: str, models: dict[str, Path], tmp_path: Path
) -> None:
    follow(models["qwen3"], tmp_path, mode=mode, device="cuda")
