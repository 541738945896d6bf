"""The `splice` command as a user types it, and the processes it leaves."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from orchestrator.processes.python import python_command


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`splice`, which has ended."""
    return subprocess.run(
        python_command(sys.executable, "-m", "splice", *map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def splice(*arguments: object, code: int = 0) -> str:
    """stdout of `splice`, which must end with this code; stderr after a failure."""
    done = ran(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def splice_killed_at(said: str, *arguments: object) -> list[str]:
    """The lines of a `splice` that dies by SIGKILL when a line begins so."""
    argv = python_command(sys.executable, "-m", "splice", *map(str, arguments))
    lines = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(said):
                process.kill()
    return lines


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process with the folder in its command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def kill_all(folder: Path) -> None:
    """Kill every process of the folder, and those that they start meanwhile; wait until all ended.

    A killed process needs some time to return its memory, and is listed until then.
    """
    deadline_s = time.monotonic() + 60
    while left := processes_of(folder):
        assert time.monotonic() < deadline_s, left
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.2)


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
