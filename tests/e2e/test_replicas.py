"""Two real vLLM servers behind one alias: one is killed, the other continues, and the killed one
comes back with the same weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

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
from tests.e2e.servers import scored, server_of
from tests.e2e.tiny_run import tiny_run

pytestmark = pytest.mark.timeout(1200)


@contextmanager
def asked_all_the_time(url: str) -> Iterator[list[str]]:
    """What went wrong with short completions, one after the other."""
    problems: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
            while not stop.is_set():
                answer = http.post(
                    "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
                )
                if answer.status_code != 200:
                    problems.append(answer.text)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield problems
    stop.set()
    thread.join(60.0)


def train(cluster: Cluster) -> dict[str, Any]:
    answer = [3, 4, 5, 6]
    specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + len(answer))
    job = TrainMerged(
        loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=5e-3), tensors=specs
    )
    return cluster.client.run(job, buffers=as_batch(answer), timeout_s=300.0)


def run_of(model: Path, folder: Path, *, replicas: int, chain: bool = False) -> RunFile:
    return tiny_run(folder, model, publication={"chain": chain}, inference={"replicas": replicas})


def wait_serving(cluster: Cluster, node: str, name: str) -> None:
    until_s = time.monotonic() + 240
    while not is_serving(cluster, node, name):
        assert time.monotonic() < until_s
        time.sleep(0.5)


def test_one_of_two_servers_is_killed(models, tmp_path):
    with Cluster(run_of(models["qwen3"], tmp_path, replicas=2)) as cluster:
        cluster.client.run(InitialSync())
        first = train(cluster)
        one, other = cluster.base_urls
        assert first.replicas == ["inference-0", "inference-1"] and first.left_out == {}
        assert scored(one, "tiny@1") == pytest.approx(scored(other, "tiny@1"), abs=1e-5)
        began_as = server_of(cluster, "inference-0").pid
        server_of(cluster, "inference-1").kill()
        second = train(cluster)
        assert second.version == 2 and second.replicas == ["inference-0"]
        with asked_all_the_time(one) as problems:
            wait_serving(cluster, "inference-1", "tiny@2")
        assert not problems, "the other one's return was noticed"
        one, other = cluster.base_urls
        assert scored(one, "tiny@2") == pytest.approx(scored(other, "tiny@2"), abs=1e-5)
        assert train(cluster).replicas == ["inference-0", "inference-1"]
        assert server_of(cluster, "inference-0").pid == began_as


def test_three_servers_in_a_chain_and_one_is_killed(models, tmp_path):
    """The trainer sends to the first; the last one's weights came through the other two."""
    with Cluster(run_of(models["qwen3"], tmp_path, replicas=3, chain=True)) as cluster:
        cluster.client.run(InitialSync())
        first = train(cluster)
        assert len(first.replicas) == 3 and first.attempts == 1 and first.unverified == {}
        wanted, *others = (scored(url, "tiny@1") for url in cluster.base_urls)
        assert all(found == pytest.approx(wanted, abs=1e-5) for found in others)
        server_of(cluster, "inference-1").kill()
        second = train(cluster)
        assert second.version == 2 and second.replicas == ["inference-0", "inference-2"]
        wait_serving(cluster, "inference-1", "tiny@2")
        assert len(train(cluster).replicas) == 3
        wanted, *others = (scored(url, "tiny@3") for url in cluster.base_urls)
        assert all(found == pytest.approx(wanted, abs=1e-5) for found in others)


def is_serving(cluster: Cluster, node: str, name: str) -> bool:
    found = [n for n in cluster.client.status().nodes if n.node_id == node and n.state == "ready"]
    if not found:
        return False
    try:
        answer = httpx.get(
            f"{found[0].detail['base_url']}/v1/models", timeout=10.0, trust_env=False
        )
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["data"][0]["id"] == name
