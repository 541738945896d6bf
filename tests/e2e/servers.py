"""The vLLM processes of a cluster, and what they serve."""

from __future__ import annotations

import httpx
import psutil

from orchestrator.processes.child import descendants
from splice.cluster import Cluster
from tests.e2e.batches import PROMPT


def server_of(cluster: Cluster, node: str) -> psutil.Process:
    """The node's vLLM."""
    pid = cluster.launcher.nodes[node].pid
    assert pid is not None
    return next(p for p in descendants(pid) if "inference_node.server" in p.cmdline())


def rank_of_trainer(cluster: Cluster) -> psutil.Process:
    """The process of the trainer's first rank."""
    pid = cluster.launcher.nodes["trainer"].pid
    assert pid is not None
    return next(p for p in descendants(pid) if p.name() == "splice-rank-0")


def scored(url: str, model: str) -> list[float]:
    """Log-probs of a fixed prompt."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return [next(iter(row.values()))["logprob"] for row in rows]
