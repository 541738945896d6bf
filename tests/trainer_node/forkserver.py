"""Starts the ranks of a check on real Megatron by forking a process that has imported everything,
because the imports take longer than the checks.

    python -m tests.trainer_node.forkserver

One JSON request a line on stdin: {"module", "args", "num_ranks", "port", "log", "timeout_s"}; one
JSON answer a line: {"codes": [exit code of each rank]}, null where a rank had to be killed. The
environment of each rank is torchrun's; the store is the caller's, at `port`. `mutantserver.py`
forks such a process with another copy of this project's packages in it.

A request with "exit", a file, is answered at once: {"pid"}, of a process that leads a session with
the ranks. It writes the ranks' exit code into the file when they have ended.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

POLL_S = 0.02


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Until the requests end."""
    from trainer_node.backends import cpu_shims

    cpu_shims.apply()
    import megatron.bridge
    import peft
    import transformers  # noqa: F401

    import trainer_node.model.build
    import trainer_node.node
    import trainer_node.training.trainer  # noqa: F401

    del megatron, peft
    for line in requests:
        request = json.loads(line)
        answer = {"pid": _start(request)} if "exit" in request else {"codes": _run(request)}
        print(json.dumps(answer), file=answers, flush=True)


def _start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.environ.update(request["env"])
    code = next((c for c in _run(request) if c != 0), 0)
    temp = Path(f"{request['exit']}.new")
    temp.write_text(str(-signal.SIGKILL if code is None else code))
    temp.replace(request["exit"])
    os._exit(0)


def _run(request: dict[str, Any]) -> list[int | None]:
    children = [_fork(request, rank) for rank in range(request["num_ranks"])]
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + request["timeout_s"]
    while len(codes) < len(children):
        for pid in children:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            # The others would wait for the dead one until their own deadline.
            for pid in set(children) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(POLL_S)
    return [codes[pid] for pid in children]


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["num_ranks"] > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(request["num_ranks"]),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(request["port"]),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
            )
        sys.argv = [request["module"], *request["args"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        logging.exception("rank %d", rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
