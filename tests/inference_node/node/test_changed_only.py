"""Updates of only the changed tensors, on a real vLLM: what is served is what transformers
computes, and the rest stays what it was.
"""

from __future__ import annotations

import pytest

from orchestrator.protocol import messages as m
from tests.inference_node.failing import fail_update
from tests.inference_node.harness import TAU, Node, moved, new
from tests.inference_node.partial_updates import (
    LAYER,
    is_attention,
    is_norm_and_query,
    is_one_expert,
    names_of,
    plan,
    publish_part,
    with_part,
)


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_a_part_on_top_of_the_version_before(kind: str, request: pytest.FixtureRequest) -> None:
    node: Node = request.getfixturevalue(kind)
    version = 0 if node.version is None else node.version + 1
    served = moved(node.base, 30)
    node.join()
    node.publish(version, served)
    ends = {
        is_attention: ("q_proj", "k_proj", "v_proj", "o_proj"),
        is_norm_and_query: ("input_layernorm", "q_proj", "k_proj", "v_proj"),
    }
    if kind == "moe":
        ends[is_one_expert] = ("gate_proj", "up_proj", "down_proj")
    for seed, (is_changed, wanted) in enumerate(ends.items(), start=31):
        version += 1
        part = plan(node, version, is_changed)
        names = names_of(node, part)
        # A fused layer is completed: k and v with q, all experts of the layer with one of them.
        layer = "model.layers." if is_changed is is_attention else LAYER
        assert names == {n for n in served if n.startswith(layer) and n.split(".")[-2] in wanted}
        # A norm is received in place, what is packed takes the reload.
        assert {c.kind for c in part.layout.chunks} == {"reload"} | (
            {"staged"} if is_changed is is_norm_and_query else set()
        )
        before, served = served, with_part(served, moved(node.base, seed), names)
        publish_part(node, version, part, served)
        logprobs = node.prompt_logprobs(f"tiny@{version}")
        assert (logprobs - node.expected(served)).abs().max() < TAU
        assert (logprobs - node.expected(before)).abs().max() > 10 * TAU, (
            "the versions cannot be told apart by this prompt"
        )
    node.join()  # the sender is the part's
    version += 1
    node.publish(version, node.base)
    assert (node.prompt_logprobs(f"tiny@{version}") - node.expected(node.base)).abs().max() < TAU


def test_in_manifest_order_everything_is_reloaded(dense: Node) -> None:
    """Whole and part: what replicas and trainers share that agree on no other layout."""
    version = 0 if dense.version is None else dense.version + 1
    served = moved(dense.base, 35)
    indices = tuple(i for i, t in enumerate(dense.manifest.tensors) if is_norm_and_query(t.name))
    dense.join()
    answer = dense.prepare(
        version, m.Manifest(tensors=dense.manifest.tensors, changed=indices), order="manifest"
    )
    part = m.ManifestPart.model_validate(answer.result["changed"])
    for layout, count in (
        (dense.layout, len(dense.manifest.tensors)),
        (part.layout, len(part.tensors)),
    ):
        assert layout is not None and {c.kind for c in layout.chunks} == {"reload"}
        assert [i for c in layout.chunks for i in c.tensors] == list(range(count))
        assert list(layout.why_not_live) == ["manifest order was asked for"]
    assert dense.receive(version, served)[0].message.kind == "Completed"
    assert dense.commit(version).kind == "Completed"
    assert (dense.prompt_logprobs(f"tiny@{version}") - dense.expected(served)).abs().max() < TAU
    served = with_part(served, moved(dense.base, 36), names_of(dense, part))
    publish_part(dense, version + 1, part, served)
    assert (dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(served)).abs().max() < TAU


def test_a_node_without_the_base_refuses_and_serves_on(dense: Node) -> None:
    version = 0 if dense.version is None else dense.version + 1
    dense.join()
    dense.publish(version, dense.base)
    plan(dense, version + 1, is_attention)
    for base in (version + 1, version + 2):
        refused = dense.router.request(
            new(m.ReceiveWeights, version=version + 1, base_version=base)
        ).message
        assert (
            refused.kind == "Failed"
            and refused.code == "base_missing"
            and f"serves {version}" in refused.message
        )
        assert not dense.router.progress.get(refused.request_id)  # nothing was paused
    assert (dense.prompt_logprobs(f"tiny@{version}") - dense.expected(dense.base)).abs().max() < TAU
    assert dense.prepare(version + 1).kind == "Completed"  # a manifest of which everything changes
    refused = dense.router.request(
        new(m.ReceiveWeights, version=version + 1, base_version=version)
    ).message
    assert refused.code == "base_missing" and "no partial update is planned" in refused.message

    fail_update(dense, moved(dense.base, 40), after=6)  # poisoned
    plan(dense, version + 1, is_attention)
    refused = dense.router.request(
        new(m.ReceiveWeights, version=version + 1, base_version=version)
    ).message
    assert refused.code == "base_missing" and "poisoned" in refused.message
    dense.join()
    dense.publish(version + 1, dense.base)
