"""Runs tests of other copies of this repository in forks of a process that has torch, transformers,
PEFT and Megatron imported, none of our packages.

    python -m tests.trainer_node.mutantserver

One JSON request a line on stdin: {"name", "folder", "tests", "log", "timeout_s"}; when a run has
ended, one JSON answer a line: {"name", "code", "seconds"}, in any order; the code is pytest's, null
after the deadline. `WORKERS` at a time. In each run pytest has the copy's packages, and its
`torchrun` fixture forks ranks of them (`conftest.FORKSERVER`).
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from typing import Any

WORKERS = 2
OURS = ("splice", "orchestrator", "weight_transfer", "trainer_node", "tests")


def preload() -> None:
    """Import what no mutant changes. The shims are applied once more, from the copy, in each run:
    that changes nothing but whose they are.
    """
    import hypothesis
    import peft
    import pytest
    import transformers
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

    from trainer_node.backends import cpu_shims

    cpu_shims.apply()
    import trainer_node.node

    del hypothesis, peft, pytest, transformers, Qwen3ForCausalLM, Qwen3MoeForCausalLM, trainer_node
    for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
        del sys.modules[name]


def serve() -> None:
    """Until stdin has ended and every run too, or SIGTERM, which ends the runs."""
    preload()
    running: dict[int, dict[str, Any]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _serve(running)
    finally:
        for pid in running:
            _kill_group(pid)


def _serve(running: dict[int, dict[str, Any]]) -> None:
    waiting: list[dict[str, Any]] = []
    pending, is_open = b"", True
    while is_open or waiting or running:
        if is_open and select.select([0], [], [], 0.02 if waiting or running else None)[0]:
            read = os.read(0, 1 << 16)
            is_open = bool(read)
            *lines, pending = (pending + read).split(b"\n")
            waiting += map(json.loads, lines)
        while waiting and len(running) < WORKERS:
            request = waiting.pop(0) | {"started": time.monotonic()}
            running[_fork(request)] = request
        for pid in _ended(running):
            request = running.pop(pid)
            answer = {
                "name": request["name"],
                "code": request["code"],
                "seconds": time.monotonic() - request["started"],
            }
            print(json.dumps(answer), flush=True)


def _ended(running: dict[int, dict[str, Any]]) -> list[int]:
    """Process groups that have ended, or have been ended because their time was over; their "code"
    is set.
    """
    ended = []
    for pid, request in running.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        late = time.monotonic() - request["started"] > request["timeout_s"]
        if not done and not late:
            continue
        request["code"] = os.waitstatus_to_exitcode(status) if done else None
        _kill_group(pid)
        if not done:
            os.waitpid(pid, 0)
        ended.append(pid)
    return ended


def _kill_group(pid: int) -> None:
    """What is left of a run: its fork server, and ranks that hang."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(request["folder"])
        sys.path[:] = [
            request["folder"],
            *(
                p
                for p in sys.path
                if p and not os.path.isfile(os.path.join(p, "trainer_node/__main__.py"))
            ),
        ]
        os.environ["PYTHONPATH"] = request["folder"]
        _fork_server()
        import pytest

        arguments = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m=",  # a killer may be one of the tests that `make test` leaves out
            f"--basetemp={request['log']}.tmp",
            *request["tests"],
        ]
        code = int(pytest.main(arguments))
    except BaseException:
        logging.exception("a run of tests")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_server() -> None:
    """A `forkserver` for the run, before anything computes: torch's autograd does not survive a
    fork.
    """
    requests, answers = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests[0]), os.close(answers[1])
        os.environ["SPLICE_TEST_FORKSERVER"] = f"{answers[0]},{requests[1]}"
        return
    try:
        os.close(requests[1]), os.close(answers[0])
        from tests.trainer_node import forkserver

        forkserver.serve(os.fdopen(requests[0]), os.fdopen(answers[1], "w"))
    except BaseException:
        logging.exception("a run of tests")
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve()
