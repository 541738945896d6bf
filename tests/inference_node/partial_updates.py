"""Updates by part: what training changes, planned, sent and published; and the whole as a part."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from orchestrator.protocol import messages as m
from tests.inference_node.harness import Node, new
from weight_transfer.chunks import SendReport

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


def whole_layout(node: Node, version: int) -> m.ManifestPart:
    """The whole manifest as a part of itself, in the replica's layout."""
    answer = node.prepare(version)
    assert answer.kind == "Completed", answer
    layout = m.WireLayout.model_validate(answer.result["layout"])
    return m.ManifestPart(tensors=tuple(range(len(node.manifest.tensors))), layout=layout)


def publish_whole(
    node: Node, version: int, part: m.ManifestPart, tensors: dict[str, torch.Tensor]
) -> None:
    reports: list[SendReport] = []
    thread = send_part(node, part, tensors, reports)
    thread.start()
    envelope = node.router.request(new(m.ReceiveWeights, version=version))
    thread.join(30.0)
    assert envelope.message.kind == "Completed" and envelope.message.result["unverified"] == {}, (
        envelope.message
    )
    live_N = torch.frombuffer(bytearray(envelope.buffers[0]), dtype=torch.int64)
    assert torch.equal(live_N, reports[0].digests_N)
    assert node.commit(version).kind == "Completed"
