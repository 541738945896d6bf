"""Publications of changed elements: real Megatron, real vLLM, every version verified."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from orchestrator.protocol.messages import InitialSync, Resync
from splice.cluster import Cluster
from tests.e2e.batches import trained
from tests.e2e.elements import run_file
from tests.e2e.servers import rank_of_trainer, scored

pytestmark = pytest.mark.timeout(900)
train = partial(trained, lr=1e-4)


@pytest.mark.parametrize(
    ("arch", "parallel", "workers", "replicas", "mode"),
    [
        pytest.param("qwen3", {}, 1, 1, "in_place", id="1-1"),
        pytest.param("qwen3", {}, 1, 1, "shadow", id="1-1-shadow"),
        pytest.param("qwen3_moe", {"expert": 2}, 2, 1, "in_place", id="ep2-tp2"),
        pytest.param("qwen3", {"tensor": 2}, 1, 2, "shadow", id="tp2-rep2-shadow",
                     marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_changed_elements_give_the_same_version_as_all_tensors(
    models: dict[str, Path],
    tmp_path: Path,
    arch: str,
    parallel: dict[str, int],
    workers: int,
    replicas: int,
    mode: str,
) -> None:
    run = run_file(
        tmp_path, models[arch], mode=mode, parallel=parallel, workers=workers, replicas=replicas
    )
    with Cluster(run) as cluster:
        first = cluster.client.run(InitialSync(), timeout_s=300.0)
        steps = [train(cluster) for _ in range(6)]
        url = cluster.base_urls[0]
        before = scored(url, "tiny@6")
        again = cluster.client.run(Resync(), timeout_s=300.0)
        after = scored(url, "tiny@6")
    assert (first.sent, again.sent) == ("full", "full")
    for result in steps:
        assert result.sent == "elements", result.why_sent
        assert result.mode == mode and result.attempts == 1
        assert result.num_verified == result.num_tensors and not result.unverified
        assert result.changed_elements > 0 and result.bytes_sent < 0.5 * first.bytes_sent
    assert before == after


@pytest.mark.parametrize(
    ("kind", "vllm", "trainer", "kinds"),
    [
        pytest.param("full", (), {"finetuning_type": "full"}, ["elements"] * 3, id="full"),
        pytest.param("fp8", ("--quantization", "fp8_per_channel"),
                     {"lora": {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}},
                     ["changed", "elements", "elements"], id="fp8", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_what_was_sent_is_kept_where_adapters_do_not_tell_what_changed(
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    vllm: tuple[str, ...],
    trainer: dict[str, object],
    kinds: list[str],
) -> None:
    """Of LoRA training, the changed part is sent once before it can be changed."""
    run = run_file(
        tmp_path, models["qwen3"], mode="in_place", vllm=vllm, remember_bytes=2**30, **trainer
    )
    lr = 1e-5 if kind == "full" else 1e-4
    with Cluster(run) as cluster:
        first = cluster.client.run(InitialSync(), timeout_s=300.0)
        steps = [train(cluster, lr=lr) for _ in kinds]
        again = cluster.client.run(Resync(), timeout_s=300.0)
    assert [r.sent for r in (first, *steps, again)] == ["full", *kinds, "full"]
    for result in steps:
        assert result.num_verified == result.num_tensors and not result.unverified
        assert result.attempts == 1
    assert steps[-1].bytes_sent < 0.5 * first.bytes_sent


@pytest.mark.parametrize(
    ("arch", "parallel", "workers"),
    [
        pytest.param("qwen3", {}, 1, id="1-1"),
        pytest.param("qwen3_moe", {"expert": 2}, 2, id="ep2-tp2", marks=pytest.mark.whole),
    ],
)
def test_changed_elements_survive_a_restart_of_the_trainer(
    models: dict[str, Path], tmp_path: Path, arch: str, parallel: dict[str, int], workers: int
) -> None:
    """The first ones after it are of all tensors, because the new process has sent none."""
    run = run_file(tmp_path, models[arch], mode="shadow", parallel=parallel, workers=workers)
    with Cluster(run) as cluster:
        first = cluster.client.run(InitialSync(), timeout_s=300.0)
        steps = [train(cluster)]
        for _ in range(2):
            killed = rank_of_trainer(cluster)
            killed.kill()
            killed.wait(60.0)
            steps += [train(cluster), train(cluster)]
        url = cluster.base_urls[0]
        before = scored(url, "tiny@5")
        again = cluster.client.run(Resync(), timeout_s=300.0)
        after = scored(url, "tiny@5")
    for n, result in enumerate(steps):
        assert result.sent == "elements", (n, result.why_sent)
        assert result.num_verified == result.num_tensors and result.attempts == 1
        assert (result.num_tensors == first.num_tensors) == (n in (1, 3))
        assert result.changed_elements > 0 and result.bytes_sent < 0.5 * first.bytes_sent
    assert again.sent == "full" and before == after


def test_changed_elements_survive_a_restart_of_the_orchestrator(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The new one first has the trainer and the replica prove the served version, with no bytes of
    it. A job that waits for it proves it too."""
    run = run_file(tmp_path, models["qwen3"], mode="in_place")
    with Cluster(run, orchestrator_restarts=2) as cluster:
        first = cluster.client.run(InitialSync(), timeout_s=300.0)
        steps = [train(cluster)]
        log = run.run_dir / "logs" / "orchestrator.log"
        proved = "inference-0 serve tiny@1: elements, 0 bytes"
        for waits in (True, False):
            seen = log.read_text().count(proved)
            pid = cluster.launcher.nodes["orchestrator"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until_s = time.monotonic() + 120.0
            while waits and log.read_text().count(proved) == seen:
                assert time.monotonic() < until_s
                time.sleep(0.2)
            steps += [train(cluster), train(cluster)]
        before = scored(cluster.base_urls[0], "tiny@5")
        again = cluster.client.run(Resync(), timeout_s=300.0)
        after = scored(cluster.base_urls[0], "tiny@5")
    for n, result in enumerate(steps):
        assert result.sent == "elements", (n, result.why_sent)
        assert result.num_verified == result.num_tensors and result.attempts == 1
        assert (result.num_tensors == first.num_tensors) == (n == 3)
        assert result.bytes_sent < 0.5 * first.bytes_sent
    assert again.sent == "full" and before == after
