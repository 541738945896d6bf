"""Real publications over TCP into a real vLLM: what is served is what transformers computes from
what was sent.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.inference_node.harness import TAU, Node, moved


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_published_versions_are_served_exactly(kind: str, request: pytest.FixtureRequest) -> None:
    node: Node = request.getfixturevalue(kind)
    first = node.version or 0
    versions: list[dict[str, Any]] = [node.base, moved(node.base, 1), moved(node.base, 2)]
    for k, tensors in enumerate(versions, start=first):
        completed = node.publish(k, tensors)
        assert set(completed.result["seconds"]) >= {"pause", "start", "apply", "finish", "verify"}
        served, expected = node.prompt_logprobs(f"tiny@{k}"), node.expected(tensors)
        assert (served - expected).abs().max() < TAU
        if k > first:
            before = node.expected(versions[k - first - 1])
            assert (served - before).abs().max() > 10 * TAU, (
                "the versions cannot be told apart by this prompt"
            )
