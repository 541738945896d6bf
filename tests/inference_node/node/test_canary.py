"""The canary on a real vLLM: what the engine computes from weights that nobody is served yet; never
while something is served.
"""

from __future__ import annotations

import torch

from orchestrator.protocol import messages as m
from tests.inference_node.failing import fail_update
from tests.inference_node.harness import PROMPT, TAU, Node, ensure_published, moved, new


def test_a_poisoned_replica_scores_the_prompt_before_it_is_served(dense: Node) -> None:
    version = ensure_published(dense)
    early = dense.router.request(
        new(m.CheckCanary, version=version + 1, tokens=tuple(PROMPT))
    ).message
    assert early.kind == "Failed" and early.code == "not_ready"  # nothing was received

    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    assert dense.receive(version + 1, moved(dense.base, 70))[0].message.kind == "Completed"
    serving = dense.router.request(new(m.CheckCanary, version=version + 1, tokens=tuple(PROMPT)))
    assert (
        serving.message.kind == "Completed"
        and not serving.buffers
        and f"tiny@{version}" in serving.message.result["skipped"]
    )
    assert dense.commit(version + 1).kind == "Completed"

    fail_update(dense, moved(dense.base, 71), after=6)  # poisoned
    tensors, version = moved(dense.base, 72), version + 2
    dense.join()
    assert dense.prepare(version).kind == "Completed"
    assert dense.receive(version, tensors)[0].message.kind == "Completed"
    for _ in range(2):  # and stops again after it
        check = new(m.CheckCanary, 60.0, version=version, tokens=tuple(PROMPT))
        scored = dense.router.request(check, timeout_s=70.0)
        assert scored.buffers, scored.message
        logprobs_T = torch.frombuffer(bytearray(scored.buffers[0]), dtype=torch.float32)
        assert logprobs_T[0] == 0 and (logprobs_T[1:] - dense.expected(tensors)).abs().max() < TAU
        assert (
            dense.post(
                "/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1}
            ).status_code
            == 503
        )
    assert dense.commit(version).kind == "Completed"
    assert (dense.prompt_logprobs(f"tiny@{version}") - dense.expected(tensors)).abs().max() < TAU
