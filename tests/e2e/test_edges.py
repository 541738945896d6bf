"""Several trainer ranks send straight to several workers: real Megatron, real vLLM, every version
verified."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.protocol.messages import InitialSync, Resync
from splice.cluster import Cluster
from tests.e2e.batches import trained
from tests.e2e.tiny_run import tiny_run

pytestmark = pytest.mark.timeout(900)
train = partial(trained, lr=5e-3)
IN_PLACE, SHADOW, CHAIN = {"mode": "in_place"}, {"mode": "shadow"}, {"chain": True}


@pytest.mark.parametrize(
    ("arch", "parallel", "workers", "replicas", "publication"),
    [
        pytest.param("qwen3_moe", {"expert": 2}, 2, 1, IN_PLACE, id="ep2-tp2"),
        pytest.param("qwen3", {"tensor": 2}, 1, 2, SHADOW, id="tp2-rep2-shadow"),
        pytest.param("qwen3", {}, 2, 1, SHADOW, id="1-tp2-shadow", marks=pytest.mark.whole),
        pytest.param("qwen3_moe", {"world_size": 3}, 1, 1, IN_PLACE, id="dp3-1",
                     marks=pytest.mark.whole),
        pytest.param("qwen3", {"pipeline": 2}, 2, 1, IN_PLACE, id="pp2-tp2",
                     marks=pytest.mark.whole),
        pytest.param("qwen3_moe", {"expert": 2}, 2, 2, IN_PLACE | CHAIN, id="ep2-tp2-chain2",
                     marks=pytest.mark.whole),
        pytest.param("qwen3", {"tensor": 2}, 1, 2, SHADOW | CHAIN | {"send": "elements"},
                     id="tp2-chain2-elements", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_every_rank_sends_and_all_tensors_verify(
    models: dict[str, Path],
    tmp_path: Path,
    arch: str,
    parallel: dict[str, int],
    workers: int,
    replicas: int,
    publication: dict[str, Any],
) -> None:
    run = tiny_run(
        tmp_path,
        models[arch],
        publication=publication,
        trainer={"parallel": parallel},
        inference={"tensor_parallel": workers, "replicas": replicas},
    )
    with Cluster(run) as cluster:
        results = [cluster.client.run(InitialSync(), timeout_s=300.0)]
        results += [train(cluster), train(cluster)]
        results.append(cluster.client.run(Resync(), timeout_s=300.0))
    assert [r.alias for r in results] == ["tiny@0", "tiny@1", "tiny@2", "tiny@2"]
    for result in results:
        assert result.num_verified == result.num_tensors and not result.unverified
        assert len(result.replicas) == replicas
    assert {r.mode for r in results[1:3]} == {publication["mode"]}
    if "send" in publication:
        assert {r.sent for r in results[1:3]} == {publication["send"]}
    log = (run.run_dir / "logs" / "orchestrator.log").read_text()
    assert "every rank sends each worker its own" in log
