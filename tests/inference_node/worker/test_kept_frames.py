"""What a failed receive allocated is free after `close`, without a garbage collection."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from inference_node.shared.watchdog import Watchdog
from inference_node.worker import nccl_group
from inference_node.worker.shadow import Shadow
from orchestrator.errors import TransferError
from orchestrator.protocol.messages import Manifest, Rendezvous, TensorSpec, WireChunk
from weight_transfer.groups import GroupListener, TransferGroup, join_tcp, open_listener

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_polled", [True, False])
def test_the_buffers_of_a_failed_shadow_are_free(is_polled: bool) -> None:
    """The sender leaves before the first chunk."""
    spec = TensorSpec(name="w", dtype="float32", shape=(64,))
    manifest, chunk = Manifest(tensors=(spec,)), WireChunk(kind="reload", tensors=(0,))
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
    watchdog = Watchdog(None)
    shadow = Shadow(manifest=manifest, chunks=[chunk], device=CPU, stream=None)
    buffers = [weakref.ref(buffer_B) for buffer_B in shadow.buffers]
    try:
        group = _joined(listener)
        shadow.start(group=group, watchdog=watchdog, update_id="u", deadline_s=20)
        assert shadow._thread is not None
        shadow._thread.join(20)
        if is_polled:
            with pytest.raises(TransferError):
                shadow.poll()
        assert shadow.close()
        group.close()
    finally:
        watchdog.close()
    assert [ref() for ref in buffers] == [None]


def _joined(listener: GroupListener) -> TransferGroup:
    """A worker's group, whose trainer has left."""
    joined: list[TransferGroup] = []
    join = threading.Thread(
        target=lambda: joined.append(join_tcp(listener.rendezvous, rank=1, deadline_s=20))
    )
    join.start()
    listener.join(20).close()
    join.join()
    return joined[0]


def test_a_failed_join_of_an_nccl_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU, so the join fails on its thread."""
    held: list[weakref.ref[object]] = []

    class Held:
        pass

    def fail(*_: object, **__: object) -> None:
        local = Held()
        held.append(weakref.ref(local))
        raise RuntimeError("a test said so")

    monkeypatch.setattr(torch.cuda, "device", fail)
    rendezvous = Rendezvous(
        transport="nccl",
        host="127.0.0.1",
        world_size=2,
        nccl_unique_id=bytes(nccl_group.UNIQUE_ID_BYTES),
    )
    device = torch.device("cuda", 0)
    with pytest.raises(TransferError, match="a test said so") as raised:
        nccl_group.join_nccl(rendezvous, rank=1, device=device, deadline_s=20)
    del raised
    assert [ref() for ref in held] == [None]
