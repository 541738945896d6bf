"""The processes of a run: started, watched, brought back."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.chaos.history import History

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """One that is started again whenever it has ended, unless it is held down."""

    def __init__(self, name: str, *, history: History, log: Path, token: str) -> None:
        self.name, self._history, self._token = name, history, token
        self._log = log.open("ab")
        self.argv: list[str] = []
        self.env: dict[str, str] = {}
        self.life, self.back_s = 0, 0.0
        self.reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.popen: subprocess.Popen[bytes] | None = None
        self.is_down = True
        """Nobody is to start it."""
        self._lock = threading.RLock()
        self.unasked: list[int] = []
        """Codes of its own ends."""

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> None:
        self.life += 1
        self.is_down = False
        argv = [sys.executable, *(word.replace("LIFE", str(self.life)) for word in self.argv)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SPLICE_RUN_TOKEN": self._token, **self.env}
        self.popen = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._history.note("started", process=self.name, life=self.life, pid=self.popen.pid)
        threading.Thread(target=self._listen, args=(self.popen,), daemon=True).start()

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            word, _, point = line.decode(errors="replace").strip().partition(" ")
            if word == "reached":
                self.reached.put(point)

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def pid(self) -> int:
        return self.popen.pid if self.popen is not None else 0

    def tell(self, words: str) -> None:
        """A line to its traps."""
        if self.popen is not None and self.popen.stdin is not None:
            try:
                self.popen.stdin.write(f"{words}\n".encode())
            except OSError:
                pass  # it has ended

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self.popen is not None
            self.popen.send_signal(number)

    def kill(self, *, back_after_s: float = 0.0) -> None:
        """SIGKILL; it is back after so long."""
        self.is_down, self.back_s = False, time.monotonic() + back_after_s
        self.signal(signal.SIGKILL)

    def hold_down(self) -> None:
        """End it, and leave it ended."""
        with self._lock:
            self.is_down = True
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            if self.popen is not None:
                self.popen.wait(10)
                self.note_end()

    def note_end(self) -> None:
        if self.popen is not None and self.popen.returncode is not None:
            self._history.note(
                "ended", process=self.name, life=self.life, code=self.popen.returncode
            )
            for pipe in (self.popen.stdin, self.popen.stdout):
                if pipe is not None:
                    pipe.close()
            self.popen = None

    def look_after(self) -> None:
        """Start it again if it has ended and its time has come."""
        with self._lock:
            self._look_after()

    def _look_after(self) -> None:
        if self.popen is not None and self.popen.poll() is not None:
            if self.popen.returncode != -signal.SIGKILL:
                self.unasked.append(self.popen.returncode)
            self.note_end()
        if self.popen is None and not self.is_down and time.monotonic() >= self.back_s:
            self.start()
