"""Waiting for CUDA events with a deadline, and the priority of NCCL's streams."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from orchestrator.errors import TransferTimeout

FIRST_POLL_S, LAST_POLL_S = 0.00005, 0.002
WIRE_PRIORITY = -1
"""Priority of a CUDA stream with NCCL's kernels.

These kernels wait for the other end, so they run before the merges, copies and digests queued
beside them.
"""


def wait_for_event(
    event: torch.cuda.Event, *, deadline_s: float, check: Callable[[], None], late: str
) -> None:
    """Wait for a CUDA event by polling, so that an abort or the deadline can end the wait.

    Args:
        check: called between polls; raises to end the wait.
        late: text of the TransferTimeout.

    Raises:
        TransferTimeout: not done after `deadline_s`.
    """
    deadline, poll_s = time.monotonic() + deadline_s, FIRST_POLL_S
    while not event.query():
        check()
        if time.monotonic() > deadline:
            raise TransferTimeout(late)
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, LAST_POLL_S)
