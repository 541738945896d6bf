"""Waiting for CUDA events with a deadline, and the priority of NCCL's streams."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from orchestrator.errors import TransferTimeout

FIRST_POLL_S, LAST_POLL_S = 0.00002, 0.002
SHARE_OF_WAIT = 1 / 8
"""Largest delay of a poll, as a share of the wait.

A chunk takes half a millisecond on the wire. Polls that double would notice its end up to as long
afterwards, and the wire would be idle in between.
"""
QUEUED_CHUNKS = 16
"""Chunks of an update that the host queues ahead of the wire, on either side.

A chunk of 150 MB takes 0.4 ms on the wire, and Python nearly as long to queue its work. A host that
falls behind once then costs the wire nothing. More would fill CUDA's queue, in which a call waits
without a deadline.
"""
WIRE_PRIORITY = -1
"""Priority of a CUDA stream with NCCL's kernels.

These kernels wait for the other end, so they run before queued merges, copies and digests.
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
    began = time.monotonic()
    while not event.query():
        check()
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            raise TransferTimeout(late)
        time.sleep(min(max(SHARE_OF_WAIT * waited_s, FIRST_POLL_S), LAST_POLL_S))
