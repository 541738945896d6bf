"""What a failed start of NCCL held is free, without a garbage collection."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from orchestrator.errors import TransferError
from weight_transfer import nccl_group


def test_a_failed_start_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU, so it fails on its thread."""
    held: list[weakref.ref[object]] = []

    class Held:
        pass

    def fail(*_: object) -> None:
        local = Held()
        held.append(weakref.ref(local))
        raise RuntimeError("a test said so")

    monkeypatch.setattr(nccl_group, "_cupy_nccl", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "device", fail)
    gc.disable()
    try:
        init = nccl_group._Init(unique_id=b"", world_size=2, device=torch.device("cpu"))
        with pytest.raises(TransferError, match="a test said so") as raised:
            init.wait(time.monotonic() + 20, threading.Event())
        del raised
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()
