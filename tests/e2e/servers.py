"""The vLLM processes of a cluster."""

from __future__ import annotations

import psutil

from orchestrator.processes.child import descendants
from splice.cluster import Cluster


def server_of(cluster: Cluster, node: str) -> psutil.Process:
    """The node's vLLM."""
    pid = cluster.launcher.nodes[node].pid
    assert pid is not None
    return next(p for p in descendants(pid) if "inference_node.serve" in p.cmdline())
