"""The order of a start where trainer and vLLM share a GPU: real processes, on the CPU."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from splice.cluster import Cluster, one_host
from tests.e2e.tiny_run import tiny_run

pytestmark = pytest.mark.timeout(600)


def test_the_trainer_starts_after_vllm_is_ready(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here to share, so the test says what shares one. All else is real."""
    monkeypatch.setattr(one_host, "before_trainer", lambda _: ["inference-0"])
    waits: list[tuple[str, bool]] = []

    def on_wait(text: str) -> None:
        waits.append((text, "trainer" in cluster.launcher.nodes))

    cluster = Cluster(tiny_run(tmp_path, models["qwen3"]), on_wait=on_wait)
    with cluster:
        nodes = cluster.launcher.nodes
        born = {name: psutil.Process(node.pid).create_time() for name, node in nodes.items()}
    first = "waiting for inference-0 before the trainer starts on the same GPU"
    assert (first, False) in waits and (first, True) not in waits
    assert ("waiting for trainer", True) in waits
    assert born["inference-0"] < born["trainer"]
