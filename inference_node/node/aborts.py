"""The update that an `AbortUpdate` ends: the running one, the uncommitted one, or a later one.

Aborts arrive on the link's thread, because the main thread is inside a call then. The main thread
takes the reason when its call returns.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict

from inference_node.shared.watchdog import AbortSender
from orchestrator.errors import TransferAborted
from orchestrator.protocol.messages import AbortUpdate

ABORTS_KEPT = 32


class Aborts:
    """All methods may be called from any thread."""

    def __init__(self, sender: AbortSender) -> None:
        self._sender = sender
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uncommitted: str | None = None
        """Request of the update that is not committed yet."""
        self._early: OrderedDict[str, str] = OrderedDict()
        """Request that has not arrived yet -> why it is aborted."""
        self.running: str | None = None
        """Request of the update under way."""

    def begin(self, request_id: str) -> None:
        """An update begins; its abort may have arrived already."""
        with self._lock:
            self.running = self._uncommitted = request_id
            why = self._early.pop(request_id, None)
        if why is not None:
            self._reasons.put(why)

    def settle(self) -> None:
        """No update is left that a named abort could end."""
        self._uncommitted = None

    def take_message(self, message: AbortUpdate) -> None:
        """End the update that the message names; None names any. Keeps an abort that is early."""
        with self._lock:
            if message.request_id not in (None, self._uncommitted):
                self._early[message.request_id] = message.reason
                while len(self._early) > ABORTS_KEPT:
                    self._early.popitem(last=False)
                return
        self.abort(message.reason)

    def abort(self, reason: str) -> None:
        """End the running update at once, through the workers' watchdogs."""
        self._reasons.put(reason)
        running = self.running
        if running is not None:
            self._sender.abort(update_id=running, reason=reason)

    @property
    def is_empty(self) -> bool:
        """Whether no abort waits to be taken."""
        return self._reasons.empty()

    def raise_if_any(self) -> None:
        """Take one abort.

        Raises:
            TransferAborted: there is one.
        """
        with contextlib.suppress(queue.Empty):
            raise TransferAborted(f"aborted: {self._reasons.get_nowait()}")

    def take_all(self) -> str | None:
        """Take all aborts; the newest reason."""
        reason = None
        with contextlib.suppress(queue.Empty):
            while True:
                reason = self._reasons.get_nowait()
        return reason
