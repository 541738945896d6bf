"""Versions served from base and adapter by vLLM's LoRA kernels: real Megatron, real vLLM."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import InitialSync, Resync
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from tests.e2e.batches import PROMPT, trained
from tests.e2e.servers import scored
from tests.e2e.tiny_run import tiny_run

pytestmark = pytest.mark.timeout(900)
TAU = 1e-4
"""How far a served log-prob may be from transformers' in fp32."""


def run_file(folder: Path, model: Path, **more: Any) -> RunFile:
    publication = {"rollout_weights": "lora", **more.pop("publication", {})}
    return tiny_run(folder, model, publication=publication, **more)


train = partial(trained, lr=1e-2)


def expected(model: Path, version: Path) -> list[float]:
    """Log-probs of the prompt by transformers and PEFT, from a version's adapter."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, version / "adapter").eval()
        logprobs_TV = adapted(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("mode", "parallel", "workers", "replicas"),
    [
        pytest.param("in_place", {}, 1, 1, id="1-1"),
        pytest.param("shadow", {"tensor": 2}, 2, 1, id="tp2-tp2-shadow"),
    ],
)
def test_a_version_is_the_base_and_its_adapter(
    models: dict[str, Path],
    tmp_path: Path,
    mode: str,
    parallel: dict[str, int],
    workers: int,
    replicas: int,
) -> None:
    run = run_file(
        tmp_path,
        models["qwen3"],
        publication={"mode": mode},
        trainer={"parallel": parallel},
        inference={"tensor_parallel": workers, "replicas": replicas},
    )
    with Cluster(run) as cluster:
        first = cluster.client.run(InitialSync(), timeout_s=300.0)
        url = cluster.base_urls[0]
        served = [scored(url, "tiny@0")]
        steps = []
        for version in (1, 2, 3):
            steps.append(train(cluster))
            served.append(scored(url, f"tiny@{version}"))
            assert scored(url, "tiny") == served[-1]
            folder = run.run_dir / "versions" / str(version)
            assert difference(served[-1], expected(models["qwen3"], folder)) < TAU
        again = cluster.client.run(Resync(), timeout_s=300.0)
        assert scored(url, "tiny@3") == served[-1]
    assert (first.sent, again.sent) == ("full", "full")
    assert again.num_tensors == first.num_tensors
    for result in steps:
        assert result.sent == "changed" and result.mode == mode and result.attempts == 1
        assert result.num_verified == result.num_tensors and not result.unverified
        assert result.bytes_sent < 0.5 * first.bytes_sent
    assert min(difference(a, b) for a, b in itertools.pairwise(served)) > 10 * TAU


def test_a_trainer_that_dies_and_a_run_that_is_resumed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both publish the base again, with the adapter of the version."""
    marker, run = tmp_path / "killed", run_file(tmp_path, models["qwen3"])
    monkeypatch.setenv("SPLICE_TEST_KILL_MARKER", str(marker))
    monkeypatch.setenv("SPLICE_TEST_KILL_PIECE", "1")  # an adapter is one piece
    token, versions = "a-token-of-this-run", run.run_dir / "versions"
    with Cluster(run, run_token=token, trainer_module="tests.e2e.faulty_trainer") as cluster:
        cluster.client.run(InitialSync(), timeout_s=300.0)
        result = train(cluster)
        assert marker.exists() and result.attempts == 2 and result.sent == "full"
        assert result.num_verified == result.num_tensors
        served = scored(cluster.base_urls[0], "tiny@1")
        assert difference(served, expected(models["qwen3"], versions / "1")) < TAU
    with Cluster(run, file=run.run_dir / "run.json", run_token=token) as cluster:
        assert cluster.client.run(Resync(), timeout_s=300.0).sent == "full"
        assert scored(cluster.base_urls[0], "tiny@1") == served
        assert train(cluster).sent == "changed"
        served = scored(cluster.base_urls[0], "tiny@2")
        assert difference(served, expected(models["qwen3"], versions / "2")) < TAU


def test_another_adapter_takes_the_room_of_the_first(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """With fewer linears and ranks, and as a part. The version is then sent whole. One that needs
    more room is refused, and what is served stays."""
    run = run_file(tmp_path, models["qwen3"])
    with Cluster(run) as cluster:
        client, url = cluster.client, cluster.base_urls[0]
        client.run(InitialSync(), timeout_s=300.0)
        base = scored(url, "tiny@0")
        assert difference(base, scored(url, "tiny@0")) == 0 and train(cluster).sent == "changed"
        assert difference(base, scored(url, "tiny@1")) > 10 * TAU
        client.new_adapter(rank=4, targets=["q_proj"], timeout_s=300.0)
        assert client.publish(timeout_s=300.0).sent == "changed"
        assert difference(base, scored(url, "tiny@2")) < TAU  # its B is 0
        train(cluster)
        served = scored(url, "tiny@3")
        folder = run.run_dir / "versions" / "3"
        assert difference(served, expected(models["qwen3"], folder)) < TAU
        assert client.run(Resync(), timeout_s=300.0).sent == "full"
        assert scored(url, "tiny@3") == served
        client.new_adapter(rank=16, timeout_s=300.0)
        with pytest.raises(JobFailed, match="its rank is 16, and vLLM has room for 8"):
            client.publish(timeout_s=300.0)
        assert scored(url, "tiny@3") == served
