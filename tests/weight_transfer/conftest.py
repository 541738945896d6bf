"""Starts and surely ends the processes at the other end of a transfer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.forked import Forked


class Peer:
    """A running peer; its JSON lines arrive on a thread, so that no wait is without a deadline."""

    def __init__(
        self,
        role: str,
        *,
        manifest_json: str,
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        flags = [
            f"--{k.replace('_', '-')}={v}" if v is not True else f"--{k}"
            for k, v in options.items()
        ]
        self.stdin, theirs = socket.socketpair()
        self.process: Forked | subprocess.Popen[bytes]
        if command is None:
            module = "tests.weight_transfer.peer"
            self.process = Forked(role, *flags, module=module, err="/dev/stderr", stdio=theirs)
        else:  # CUDA does not survive a fork
            self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=env)
        theirs.close()
        self._said = self.stdin.makefile()
        self.stdin.sendall(f"{manifest_json}\n".encode())
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._said:
            self._events.put(json.loads(line))
        self._events.put(None)

    def wait_for(self, event: str, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """The next event of that kind; others are skipped."""
        until = time.monotonic() + timeout_s
        while True:
            got = self._events.get(timeout=max(0.01, until - time.monotonic()))
            assert got is not None, (
                f"the peer ended (exit code {self.process.wait(5)}) before it said {event!r}"
            )
            if got["event"] == event:
                return got
            assert got["event"] != "failed" or event == "failed", got

    def exit_code(self, *, timeout_s: float) -> int:
        """Wait for the process to end by itself."""
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self._thread.join(5)
        self._said.close()
        self.stdin.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(role: str, **options: Any) -> Peer:
        peers.append(Peer(role, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
