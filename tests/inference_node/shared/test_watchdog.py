"""The worker's watchdog on real sockets and a real TCP group: whoever is stuck is freed by an abort
or the deadline.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from inference_node.shared.watchdog import AbortSender, Watchdog
from orchestrator.errors import TransferAborted
from weight_transfer.groups import join_tcp, open_listener


@pytest.mark.parametrize("by", ["message", "deadline"])
def test_a_worker_stuck_in_a_broadcast_is_freed(by: str) -> None:
    sender = AbortSender()
    watchdog = Watchdog(sender.endpoint)
    listener = open_listener(
        transport="tcp", host="127.0.0.1", world_size=2, device=torch.device("cpu")
    )
    joined: list[object] = []
    thread = threading.Thread(target=lambda: joined.append(listener.join(20.0)))
    thread.start()
    group = join_tcp(listener.rendezvous, rank=1, deadline_s=20.0)
    thread.join(20.0)
    try:
        timer = threading.Timer(
            0.3, lambda: sender.abort(update_id="u1", reason="the trainer died")
        )
        if by == "message":
            abort_until_heard(sender, watchdog, update_id="u0", reason="of an update before")
            timer.start()
        began = time.monotonic()
        with (
            pytest.raises(TransferAborted, match="trainer died" if by == "message" else "watchdog"),
            watchdog.guard(
                update_id="u1", group=group, deadline_s=30.0 if by == "message" else 0.4
            ),
        ):
            group.broadcast(torch.empty(8, dtype=torch.uint8), deadline_s=30.0)
        assert time.monotonic() - began < 10.0
    finally:
        watchdog.close()
        sender.close()
        group.close()
        for other in joined:
            other.close()  # type: ignore[attr-defined]


def abort_until_heard(
    sender: AbortSender, watchdog: Watchdog, *, update_id: str, reason: str
) -> None:
    """A SUB socket hears nothing before it has connected; in a run that is minutes earlier."""
    until = time.monotonic() + 20.0
    while update_id not in dict(watchdog._aborted):
        assert time.monotonic() < until, "the watchdog hears nothing"
        sender.abort(update_id=update_id, reason=reason)
        time.sleep(0.05)


class Nothing:
    """A group that notes its abort."""

    reason: str | None = None

    def abort(self, reason: str) -> None:
        self.reason = reason


def test_an_abort_that_comes_first_ends_its_update_only() -> None:
    sender = AbortSender()
    watchdog = Watchdog(sender.endpoint)
    try:
        abort_until_heard(sender, watchdog, update_id="u1", reason="too late")
        with watchdog.guard(update_id="u2", group=Nothing(), deadline_s=5.0):
            pass
        with (
            pytest.raises(TransferAborted, match="before it began"),
            watchdog.guard(update_id="u1", group=Nothing(), deadline_s=5.0),
        ):
            pass
    finally:
        watchdog.close()
        sender.close()


def test_a_finished_update_is_not_aborted_afterwards() -> None:
    watchdog, group = Watchdog(None), Nothing()
    with watchdog.guard(update_id="u", group=group, deadline_s=0.1):
        pass
    time.sleep(0.3)
    watchdog.close()
    assert group.reason is None
