"""Updates in shadow mode, step by step: room, a transfer that stalls, swap and commit."""

from __future__ import annotations

import contextlib
import threading

import torch

from orchestrator.protocol import messages as m
from tests.inference_node.harness import Node, new
from weight_transfer.chunks import SendReport

ROOM = 2**30


class Transfer:
    """A trainer that sends a part when told to, and stalls before its last piece
    until `go`.
    """

    def __init__(self, node: Node, part: m.ManifestPart, tensors: dict[str, torch.Tensor]) -> None:
        self.node, self.reports = node, list[SendReport]()
        self.go, self.stalled = threading.Event(), threading.Event()
        last = len(part.layout.chunks) - 1

        def stall(chunk: int) -> None:
            if chunk == last:
                self.stalled.set()
                self.go.wait(25.0)

        self._sender = node.sender_in(
            part.layout, node.manifest.part(part.tensors), tensors, before=stall
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.reports.append(self._sender.send(deadline_s=30.0))

    def __enter__(self) -> Transfer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._thread.join(30.0)


def open_shadow(
    node: Node, part: m.ManifestPart, version: int, *, budget_bytes: int = ROOM
) -> m.ReceiveWeights:
    """Make room; the request that would fill it."""
    fields = {"version": version, "base_version": version - 1}
    answer = node.router.request(new(m.PrepareShadow, budget_bytes=budget_bytes, **fields)).message
    assert answer.kind == "Completed", answer
    node.why_not = answer.result["why_not"]  # type: ignore[attr-defined]
    return new(m.ReceiveWeights, mode="shadow", **fields)  # type: ignore[no-any-return]


def phases(node: Node, request: m.ReceiveWeights | m.SwapWeights) -> list[str]:
    return [p.phase for p in node.router.progress.get(request.request_id, [])]


def swap_and_commit(
    node: Node, version: int, reports: list[SendReport], *, at_once: bool = False
) -> None:
    """`at_once`: the replica commits by itself, because the digests are those that it was given;
    else they are not.
    """
    expected_N = reports[0].digests_N.clone()
    expected_N[0] += not at_once
    swap = new(
        m.SwapWeights, version=version, pause_mode="keep_kv", commit_if=expected_N.numpy().tobytes()
    )
    envelope = node.router.request(swap)
    assert envelope.message.kind == "Completed", envelope.message
    assert (
        phases(node, swap) == ["pausing", "paused", "applying"]
        and envelope.message.result["unverified"] == {}
    )
    assert torch.equal(
        torch.frombuffer(bytearray(envelope.buffers[0]), dtype=torch.int64), reports[0].digests_N
    )
    assert envelope.message.result["committed"] is at_once
    if at_once:  # without another word
        assert node.prompt_logprobs(f"tiny@{version}").isfinite().all()
    assert node.commit(version).kind == "Completed"
