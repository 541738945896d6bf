"""Updates of the changed tensors alone, on a real vLLM: what is served is what transformers
computes, and the rest stays what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from orchestrator.protocol import messages as m
from tests.inference_node.harness import Node, moved, new
from tests.inference_node.test_failures import fail_update
from weight_transfer.chunks import SendReport

TAU = 1e-4
LAYER = "model.layers.1."


def plan(node: Node, version: int, is_changed: Callable[[str], bool]) -> m.ManifestPart:
    """Declare what training changes; what the replica makes of it."""
    indices = tuple(i for i, t in enumerate(node.manifest.tensors) if is_changed(t.name))
    answer = node.prepare(version, m.Manifest(tensors=node.manifest.tensors, changed=indices))
    assert answer.kind == "Completed", answer
    return m.ManifestPart.model_validate(answer.result["changed"])


def names_of(node: Node, part: m.ManifestPart) -> set[str]:
    return {node.manifest.tensors[i].name for i in part.tensors}


def send_part(
    node: Node, part: m.ManifestPart, tensors: dict[str, torch.Tensor], reports: list[SendReport]
) -> threading.Thread:
    """Sends the part in the replica's layout; node.sender is the part's from here on."""
    sender = node.sender_in(part.layout, node.manifest.part(part.tensors), tensors)
    return threading.Thread(target=lambda: reports.append(sender.send(deadline_s=30.0)))


def publish_part(
    node: Node, version: int, part: m.ManifestPart, tensors: dict[str, torch.Tensor]
) -> None:
    """On top of the version before; digests of what was sent must agree."""
    reports: list[SendReport] = []
    thread = send_part(node, part, tensors, reports)
    thread.start()
    request = new(m.ReceiveWeights, version=version, base_version=version - 1)
    envelope = node.router.request(request)
    thread.join(30.0)
    assert envelope.message.kind == "Completed", envelope.message
    assert envelope.message.result["unverified"] == {} and envelope.message.tensors[0].shape == (
        len(part.tensors),
    )
    live_N = torch.frombuffer(bytearray(envelope.buffers[0]), dtype=torch.int64)
    assert torch.equal(live_N, reports[0].digests_N)
    assert reports[0].nbytes == sum(node.manifest.tensors[i].nbytes for i in part.tensors)
    assert node.commit(version).kind == "Completed"


def with_part(
    old: dict[str, torch.Tensor], new_: dict[str, torch.Tensor], names: set[str]
) -> dict[str, torch.Tensor]:
    return {n: new_[n] if n in names else t for n, t in old.items()}


def is_attention(name: str) -> bool:
    return name.split(".")[-2] in ("q_proj", "o_proj")


def is_norm_and_query(name: str) -> bool:
    return name.startswith(LAYER) and name.split(".")[-2] in ("input_layernorm", "q_proj")


def is_one_expert(name: str) -> bool:
    return name == LAYER + "mlp.experts.2.gate_proj.weight"


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


def test_in_manifest_order_everything_is_reloaded(moe: Node) -> None:
    """Whole and part: what replicas and trainers share that agree on no other layout."""
    version = 0 if moe.version is None else moe.version + 1
    served = moved(moe.base, 35)
    indices = tuple(i for i, t in enumerate(moe.manifest.tensors) if is_norm_and_query(t.name))
    moe.join()
    answer = moe.prepare(
        version, m.Manifest(tensors=moe.manifest.tensors, changed=indices), in_manifest_order=True
    )
    part = m.ManifestPart.model_validate(answer.result["changed"])
    for layout, count in (
        (moe.layout, len(moe.manifest.tensors)),
        (part.layout, len(part.tensors)),
    ):
        assert layout is not None and {c.kind for c in layout.chunks} == {"reload"}
        assert [i for c in layout.chunks for i in c.tensors] == list(range(count))
        assert list(layout.why_not_live) == ["manifest order was asked for"]
    assert moe.receive(version, served)[0].message.kind == "Completed"
    assert moe.commit(version).kind == "Completed"
    assert (moe.prompt_logprobs(f"tiny@{version}") - moe.expected(served)).abs().max() < TAU
    served = with_part(served, moved(moe.base, 36), names_of(moe, part))
    publish_part(moe, version + 1, part, served)
    assert (moe.prompt_logprobs(f"tiny@{version + 1}") - moe.expected(served)).abs().max() < TAU


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
