"""A child process with its own session: starts, dies with its parent, stops within a deadline.

The usual leak is a child that outlives its parent. The kernel therefore signals every child when
its parent dies (Linux), and one signal reaches the child's whole process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestrator.processes.parent import die_with_parent
from orchestrator.processes.python import python_environment

TERM_GRACE_S = 15.0
KILL_GRACE_S = 10.0
STOP_POLL_S = 0.05
LOG_TAIL_BYTES = 2**18
LOG_BYTES, LOGS_KEPT = 2**26, 3
"""Size at which a new log begins, and number of older parts: NAME.1 is the newest."""


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """A process and all of its descendants.

    Attributes:
        argv: command line.
        env: environment of the child, added to ours if `inherits_env`.
        log_file: stdout and stderr are appended here; None: they go to our stderr.
        is_piped: stdin and stdout are pipes to this process, and stderr is ours.
        pass_fds: file descriptors that the child inherits.
        dies_with_parent: set the parent-death signal between fork and exec. False where this
            process has threads that may hold a lock then; the child sets the signal itself.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    log_file: Path | None
    inherits_env: bool = True
    is_piped: bool = False
    pass_fds: Collection[int] = ()
    dies_with_parent: bool = True
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process."""
        with contextlib.ExitStack() as stack:
            out: int = sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL
            if self.log_file is not None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(self.log_file.open("ab")).fileno()
            self.process = subprocess.Popen(
                list(self.argv),
                env=python_environment({**(os.environ if self.inherits_env else {}), **self.env}),
                stdin=subprocess.PIPE if self.is_piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.is_piped else out,
                stderr=out,
                pass_fds=self.pass_fds,
                start_new_session=True,
                preexec_fn=_die_with_parent if self.dies_with_parent else None,
            )

    @property
    def pid(self) -> int | None:
        """Process id, or None before the start."""
        return None if self.process is None else self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or None while the process runs and before its start."""
        return None if self.process is None else self.process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the log, for an error message."""
        if self.log_file is None:
            return "(its output went to this process's stderr)"
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError as error:
            return f"(no log: {error})"
        return f"Last lines of {self.log_file}:\n" + "\n".join(tail)

    def rotate_log(self) -> None:
        """Begin a new log if this one is too large. What is written between copy and cut is lost;
        that is some microseconds.

        Raises:
            OSError: the disk is full.
        """
        path = self.log_file
        if path is None or not path.exists() or path.stat().st_size < LOG_BYTES:
            return
        parts = [path.with_name(f"{path.name}.{n}") for n in range(1, LOGS_KEPT + 1)]
        for older, newer in zip(parts[:0:-1], parts[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)
        shutil.copyfile(path, parts[0])
        os.truncate(path, 0)  # the child appends

    def stop(self, *, grace_s: float = TERM_GRACE_S) -> None:
        """SIGTERM, a deadline, SIGKILL, for every descendant and the group. Safe to call twice."""
        if self.process is None:
            return
        family = descendants(self.process.pid) or _group(self.process.pid)
        _signal_group(self.process.pid, signal.SIGTERM)
        self._wait(family, grace_s)
        kill_family(self.process.pid, family)
        self._wait(family, KILL_GRACE_S)

    def kill(self) -> None:
        """SIGKILL to every descendant and the group, as in a crash."""
        if self.process is not None:
            kill_family(self.process.pid)

    def _wait(self, family: Sequence[psutil.Process], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.is_running or any(map(_lives, family)):
            if time.monotonic() > deadline_s:
                return
            time.sleep(STOP_POLL_S)


def _die_with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def kill_family(pid: int, family: Sequence[psutil.Process] | None = None) -> None:
    """SIGKILL to the group that a process leads and to its descendants, or to those given."""
    family = descendants(pid, and_self=True) if family is None else family
    _signal_group(pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


def descendants(pid: int, *, and_self: bool = False) -> list[psutil.Process]:
    """Return the processes below `pid`, all the way down."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [*([root] if and_self else []), *root.children(recursive=True)]
    return []


def _group(number: int) -> list[psutil.Process]:
    """Return the other members of a process group, whose leader may have ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if process.pid != number and os.getpgid(process.pid) == number:
                members.append(process)
    return members


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
