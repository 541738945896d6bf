"""`python -m splice` and other modules, forked from a process that has imported them: the imports
take longer than most commands. The template starts with the first command and ends with the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TEMPLATE = multiprocessing.get_context("forkserver")
TEMPLATE.set_forkserver_preload(
    ["pytest.__main__", "splice.cli", "tests.weight_transfer.peer", __name__]
)


class Forked:
    """What tests use of a `subprocess.Popen`. Both outputs are appended to `out`; the errors go to
    `err` if it is given, and `stdio` is the input and the output then."""

    def __init__(
        self,
        *argv: object,
        module: str = "splice",
        env: dict[str, str] | None = None,
        out: str | Path = os.devnull,
        err: str | Path | None = None,
        stdio: socket.socket | None = None,
    ) -> None:
        self._process = TEMPLATE.Process(
            target=_run,
            args=(module, list(map(str, argv)), dict(env or os.environ), os.getcwd()),
            kwargs={"out": out, "err": err, "stdio": stdio},
        )
        self._process.start()
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("splice", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    *argv: object, env: dict[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured outputs."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = Forked(*argv, env=env, out=out, err=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def _run(
    module: str,
    argv: list[str],
    env: dict[str, str],
    folder: str,
    *,
    out: str | Path,
    err: str | Path | None,
    stdio: socket.socket | None,
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for path, fd in ((out, 1), (err or out, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    if stdio is not None:
        os.dup2(stdio.fileno(), 1)
        sys.stdin = stdio.makefile()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
