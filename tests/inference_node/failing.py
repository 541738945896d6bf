"""Updates that fail: their sender stalls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import torch

from orchestrator.errors import TransferError
from orchestrator.protocol import messages as m
from tests.inference_node.harness import Node, new

ABORT = m.AbortUpdate(reason="the test says so")
SOON_S = 10.0
"""Upper bound of "at once", below deadlines of 20 s and more; two busy cores are slow."""


@contextlib.contextmanager
def stalled_send(
    node: Node, tensors: dict[str, torch.Tensor], *, after: int
) -> Iterator[threading.Event]:
    """A trainer that sends `after` chunks and then stalls."""
    go, sent = threading.Event(), threading.Event()
    assert node.layout is not None and after < len(node.layout.chunks)

    def stall(chunk: int) -> None:
        if chunk == after:
            sent.set()
            go.wait(20.0)
            raise TransferError("the trainer stood still")

    sender = node.sender_in(node.layout, node.manifest, tensors, before=stall)

    def send() -> None:
        with contextlib.suppress(Exception):
            sender.send(deadline_s=25.0)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        go.set()
        node.leave()
        thread.join(10.0)


def fail_update(
    node: Node,
    tensors: dict[str, torch.Tensor],
    *,
    after: int,
    deadline_s: float = 25.0,
    abort: m.AnyMessage | None = ABORT,
    kill: psutil.Process | None = None,
) -> tuple[m.Failed, float]:
    """An update whose sender stalls; ended by a killed process, an abort or the deadline. Returns
    the failure and how long it took to end.
    """
    version = (node.version or 0) + 1
    node.join()
    assert node.prepare(version).kind == "Completed"
    with stalled_send(node, tensors, after=after) as sent:
        request = new(m.ReceiveWeights, deadline_s, version=version)
        node.router.send(request)
        node.router.wait(
            lambda: any(
                p.phase == "applying" for p in node.router.progress.get(request.request_id, [])
            ),
            60.0,
        )
        assert sent.wait(10.0)
        time.sleep(0.3)
        began = time.monotonic()
        if kill is not None:
            kill.kill()
        elif abort is not None:
            node.router.send(abort)
        failed = node.router.outcome(request.request_id, 60.0).message
        took_s = time.monotonic() - began
    assert isinstance(failed, m.Failed), failed
    return failed, took_s
