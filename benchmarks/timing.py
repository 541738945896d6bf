"""Seconds of work on a device, from an idle device to an idle device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: str) -> float:
    """Until the work is done, not only queued."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: str) -> None:
    """Until the GPU has done all that is queued; nothing to wait for on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
