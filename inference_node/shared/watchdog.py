"""A thread in the worker that can end a transfer in which the worker is stuck.

A worker inside a collective hears neither HTTP nor RPC. This thread has its own socket, a SUB on
loopback, so only the node can send to it. It also has its own deadline. On either it aborts the
group, and the worker gets `TransferAborted`. An abort that arrives before its update ends that
update as it begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import zmq

from inference_node.shared.names import WATCHDOG
from orchestrator.errors import TransferAborted

POLL_MS = 50
REMEMBERED = 32


class Abortable(Protocol):
    """An object with `abort`, which any thread may call."""

    def abort(self, reason: str) -> None:
        """End it."""


class AbortSender:
    """The node's end: publishes aborts to every worker. Usable from any thread."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Address to which the workers subscribe."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode()

    def abort(self, *, update_id: str, reason: str) -> None:
        """Tell every worker to end the update at once."""
        with self._lock, contextlib.suppress(zmq.ZMQError):
            self._socket.send(json.dumps({"update_id": update_id, "reason": reason}).encode())

    def close(self) -> None:
        """Free the socket."""
        with self._lock:
            self._socket.close(linger=0)
            self._context.term()


class Watchdog:
    """The worker's end. Start it once; `guard` each update; `close` it.

    Args:
        endpoint: the node's socket. None: deadlines only, in a worker without our node.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._guarded: tuple[str, Abortable, float, float] | None = None
        self._aborted: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splice-watchdog", daemon=True)
        self._thread.start()

    @staticmethod
    def from_environment() -> Watchdog:
        """Make one with the endpoint that the node put into the environment."""
        return Watchdog(os.environ.get(WATCHDOG))

    @contextlib.contextmanager
    def guard(self, *, update_id: str, group: Abortable, deadline_s: float) -> Iterator[None]:
        """Within the block, an abort of `update_id` or the deadline aborts the group.

        Raises:
            TransferAborted: the abort arrived first.
        """
        with self._lock:  # either the abort sees this update, or this update sees the abort
            self._raise_if_aborted(update_id)
            self._guarded = (update_id, group, time.monotonic() + deadline_s, deadline_s)
        try:
            yield
        finally:
            with self._lock:
                self._guarded = None

    def raise_if_aborted(self, update_id: str) -> None:
        """Raise `TransferAborted` if this update was aborted."""
        with self._lock:
            self._raise_if_aborted(update_id)

    def _raise_if_aborted(self, update_id: str) -> None:
        reason = next((why for aborted_id, why in self._aborted if aborted_id == update_id), None)
        if reason is not None:
            raise TransferAborted(f"transfer aborted before it began: {reason}")

    def close(self) -> None:
        """End the thread and its socket. Safe to call twice."""
        self._closing.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        try:
            if self._endpoint is not None:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                socket.connect(self._endpoint)
            while not self._closing.is_set():
                if socket.poll(POLL_MS):
                    self._on_message(socket.recv())
                self._check_deadline()
        finally:
            socket.close(linger=0)
            context.term()

    def _on_message(self, raw: bytes) -> None:
        try:
            message = json.loads(raw)
            update_id, reason = str(message["update_id"]), str(message["reason"])
        except (ValueError, KeyError, TypeError):
            return
        with self._lock:
            self._aborted.append((update_id, reason))
            guarded = self._guarded
        if guarded is not None and guarded[0] == update_id:
            guarded[1].abort(reason)

    def _check_deadline(self) -> None:
        with self._lock:
            guarded = self._guarded
        if guarded is not None and time.monotonic() > guarded[2]:
            guarded[1].abort(f"the worker's watchdog: {guarded[3]:.1f} s have passed")
