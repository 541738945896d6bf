"""A GPU after a CUDA fault, such as an index beyond the end of a tensor.

No CUDA call of the process works afterwards. To free a tensor that was used on a second stream, or
pinned memory, is such a call too, and ends the process with SIGABRT. What could hold one is
therefore kept until the process leaves by `os._exit`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from orchestrator import errors

E = TypeVar("E", bound=BaseException)
_kept: list[Any] = []


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
