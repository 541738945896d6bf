"""This process's GPU: how torch takes its memory, and what is left after a CUDA fault.

After a fault, such as an index beyond the end of a tensor, no CUDA call of the process works. To
free a tensor that was used on a second stream, or pinned memory, is such a call too, and ends the
process with SIGABRT. What could hold one is therefore kept until the process leaves by `os._exit`.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch

from orchestrator import errors

E = TypeVar("E", bound=BaseException)
_kept: list[Any] = []


def use_expandable_segments() -> None:
    """Let torch extend its segments of GPU memory, unless the user has configured its allocator.

    Packs differ in length. Without it, torch keeps memory in pieces that are too small for the next
    one. Must run before the process initialises CUDA.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def works(device: torch.device) -> bool:
    """Whether this process can use the device. Waits for nothing."""
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()
    except RuntimeError:
        return False
    return True


def keep_if_lost(value: object, device: torch.device) -> None:
    """Never free this, if the device cannot be used."""
    if not works(device):
        _kept.append(value)


def without_frames(error: E, device: torch.device) -> E:
    """See `orchestrator.errors.without_frames`. If the device cannot be used, the frames stay."""
    if works(device):
        return errors.without_frames(error)
    _kept.append(error)
    return error
