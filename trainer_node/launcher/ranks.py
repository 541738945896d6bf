"""Starts and ends one host's ranks together, and keeps a template so that starts are quick.

    python -m trainer_node.launcher.ranks --ranks 2 [--world 4 --first 2 --master HOST:PORT]
    [--template cpu] trainer_node ARG...

The template is this process, once it has imported what a rank needs (20 s and more). A rank is a
fork of it. Without `--template` a rank is a new interpreter. The launcher
(`trainer_node.launcher.host`) speaks to it over stdin and stdout, also through `docker run -i`. The
ranks write to stderr.

    launcher -> here    start ID | end | ping    rank 0's Hello has the ID; end kills the ranks
    here -> launcher    ready                    once, after the imports
                        started                  after each start
                        ended CODE               all ranks have ended; the first failure's code
                        pong                     for a ping

If one rank fails, the others are killed. If stdin ends, or this process is killed, all of them are.

A fork keeps one thread and no device. Before it forks, the template therefore has one Python
thread, no CUDA driver, no process group, no zmq context and no tensor operation. `check_can_fork`
checks this.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import get_args

from orchestrator.processes.parent import die_with_parent
from orchestrator.processes.python import python_command, python_environment
from orchestrator.processes.restarts import EXIT_LINK_LOST, START_ID
from orchestrator.protocol.config import Tier
from trainer_node.ranks.store import STORE_FD, listen

POLL_S = 0.05
RANK_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip # a list of names
"""Environment variables that are set here, or must not be there."""
EXIT_UNFIT = 4
"""Exit code if the imports made something that does not survive a fork."""
IMPORTED = (
    "numpy", "safetensors.torch", "transformers.models.auto.modeling_auto",
    "torch.distributed.checkpoint",
    "trainer_node.aftermath", "trainer_node.state.checkpoint", "trainer_node.export.bridge_export",
    "trainer_node.export.merged",
    "trainer_node.export.hf_export", "trainer_node.hf.hub", "trainer_node.node",
    "trainer_node.jobs",
    "trainer_node.publication", "trainer_node.ranks.rendezvous",
    "trainer_node.training.start", "trainer_node.model.build", "trainer_node.training.steps",
    "trainer_node.export.wire_export",
    "weight_transfer.chunks", "weight_transfer.groups",
)  # fmt: skip # a list of names
"""Modules that a rank imports before its first publication. `megatron.bridge` comes first and
imports most of the rest."""


def import_all(tier: Tier) -> None:
    """Import everything that a rank of this tier imports."""
    # torch.cuda.is_available() would initialise the driver, and forks could not use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from trainer_node.backends import loading

    loading.load(tier)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy all memory that it shares with the template


def check_can_fork(tier: Tier) -> str | None:
    """Return why forks of this process would fail; None if they work."""
    if threading.active_count() != 1:
        return f"the imports started threads: {[t.name for t in threading.enumerate()]}"
    if tier != "cpu" and _in_fork(_cuda_driver_works) != 0:
        return "the imports initialised the CUDA driver"
    return None


def _cuda_driver_works() -> int:
    """0, or CUDA's error code: 3 in the fork of a process that has initialised the driver."""
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def _in_fork(call) -> int:  # type: ignore[no-untyped-def]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Ranks:
    """The ranks, and the launcher's pipes.

    Args:
        arguments: of the command line.
        requests, answers: file descriptors.
    """

    def __init__(self, arguments: argparse.Namespace, *, requests: int, answers: int) -> None:
        self._arguments, self._requests, self._answers = arguments, requests, answers
        self._pids: set[int] = set()
        self._code = 0

    def serve(self) -> None:
        """Handle requests until stdin ends."""
        self._say("ready")
        pending, has_heard = b"", False
        while True:
            if select.select([self._requests], [], [], POLL_S if self._pids else None)[0]:
                read = os.read(self._requests, 1 << 12)
                if not read:
                    break
                has_heard = True
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    word, _, start_id = line.decode().partition(" ")
                    if word == "start":
                        self._start(start_id)
                    elif word == "end":
                        self._kill()
                    elif word == "ping":
                        self._say("pong")
                    else:
                        raise ValueError(f"the launcher sent {line!r}, which is not a request")
            self._look()
        self._kill()
        if not has_heard:
            sys.stderr.write(
                "trainer_node.launcher.ranks: stdin is closed; a --prefix must pass it on (docker "
                "run -i)\n"
            )

    def _say(self, line: str) -> None:
        os.write(self._answers, f"{line}\n".encode())

    def _start(self, start_id: str) -> None:
        if self._pids:
            return
        self._code = 0
        try:
            self._fork_all(start_id)
        except OSError as error:  # a bad address, or no more processes
            logging.error("the ranks cannot be started: %s", error)
            self._kill()
            self._code = EXIT_LINK_LOST
        self._say("started")
        if not self._pids:
            self._say(f"ended {self._code}")

    def _fork_all(self, start_id: str) -> None:
        given, environment = self._arguments, {START_ID: start_id}
        host, _, port = given.master.rpartition(":")
        host, store = host.strip("[]"), None
        if given.world > 1:
            if given.first == 0:
                store = listen(host, int(port))
                port = str(store.getsockname()[1])
            environment |= {
                "WORLD_SIZE": str(given.world),
                "LOCAL_WORLD_SIZE": str(given.ranks),
                "GROUP_RANK": str(given.first // given.ranks),
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
            }
        for local in range(given.ranks):
            own = {"LOCAL_RANK": str(local)} | (
                {"RANK": str(given.first + local)} if given.world > 1 else {}
            )
            self._pids.add(self._fork(environment | own, store))
            if store is not None:  # only rank 0, the first, keeps it
                store.close()
                store = None

    def _fork(self, environment: dict[str, str], store: socket.socket | None) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            die_with_parent(parent=parent)
            for pipe in (self._requests, self._answers):
                os.close(pipe)
            for name in RANK_NAMES:  # a caller's own would make a lone rank one of several
                os.environ.pop(name, None)
            os.environ.update(environment)
            if store is not None:
                os.environ[STORE_FD] = str(store.detach())
                os.set_inheritable(int(os.environ[STORE_FD]), True)
            code = self._become_rank()
        except BaseException:  # this process must never continue as the template
            logging.exception("a rank ends")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_rank(self) -> int:
        module, arguments = self._arguments.module, self._arguments.arguments
        if self._arguments.template is None:
            argv = python_command(sys.executable, "-m", module, *arguments)
            os.execve(sys.executable, argv, python_environment(os.environ))
        import numpy as np

        np.random.seed()  # else all forked ranks draw the same; the config seeds torch's generators
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    def _look(self) -> None:
        """Note which ranks have ended. If one has failed, kill the others."""
        before = len(self._pids)
        for pid in [*self._pids]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._pids.discard(pid)
                self._code = self._code or os.waitstatus_to_exitcode(status)
        if self._code and self._pids:
            self._kill()
        if before and not self._pids:
            self._say(f"ended {self._code}")

    def _kill(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.launcher.ranks",
        description="One host's ranks; `splice trainer` runs it.",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this host")
    parser.add_argument("--world", type=int, default=1, help="ranks on all hosts")
    parser.add_argument("--first", type=int, default=0, help="this host's first rank")
    parser.add_argument(
        "--master",
        default="127.0.0.1:0",
        help="HOST:PORT of rank 0's store; port 0, on one host: any",
    )
    parser.add_argument(
        "--template", choices=get_args(Tier), help="import everything first and fork the ranks"
    )
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if given.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as under torchrun
    if given.template is not None:
        import_all(given.template)
        unfit = check_can_fork(given.template)
        if unfit is not None:
            sys.stderr.write(f"trainer_node.launcher.ranks: no template: {unfit}\n")
            return EXIT_UNFIT
    Ranks(given, requests=requests, answers=answers).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
