"""vLLM's engine or worker dies while its API server waits for it; the node notices within seconds.

vLLM leaves a call without an answer if its engine ends meanwhile, and its API server waits for the
connections that are open. Found by `python -m tests.chaos --real`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.inference_node.failing import SOON_S, fail_update
from tests.inference_node.harness import TAU, Node, ensure_published, moved
from tests.inference_node.partial_updates import plan
from tests.inference_node.shadow_updates import Transfer, open_shadow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # Fewer than the tests need in all: a version between two crashes begins a new row.
    node = Node(tmp_path_factory.mktemp("dead_engine"), "dense", max_restarts=2)
    try:
        node.wait_ready()
        yield node
    finally:
        node.close()


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_dead_engine_ends_an_update_at_once(node: Node, mode: str, victim: str) -> None:
    version = ensure_published(node)
    restarts = _restarts(node)
    tensors = moved(node.base, 64)
    dying = next(p for p in node.family if f"VLLM::{victim}" in " ".join(p.cmdline()))
    if mode == "shadow":
        part = plan(node, version + 1, lambda name: "self_attn" in name)
        receive = open_shadow(node, part, version + 1).model_copy(update={"deadline_s": 60.0})
        with Transfer(node, part, tensors) as transfer:
            node.router.send(receive)
            assert transfer.stalled.wait(20.0)
            began = time.monotonic()
            dying.kill()
            failed = node.router.outcome(receive.request_id, 60.0).message
            took_s = time.monotonic() - began
        node.leave()
    else:
        failed, took_s = fail_update(node, tensors, after=1, deadline_s=60.0, kill=dying)
    assert failed.code == "node_lost" and took_s < SOON_S, (failed, took_s)
    node.router.wait(lambda: _restarts(node) > restarts, node.startup_s)
    node.wait_ready()
    node.join()
    node.publish(version + 1, node.base)
    assert (
        node.prompt_logprobs(f"tiny@{version + 1}") - node.expected(node.base)
    ).abs().max() < TAU


def _restarts(node: Node) -> int:
    """How often vLLM was started again; the node may say `Ready` more often than that."""
    return int(node.router.ready[-1].detail.get("restarted", 0))
