"""One host's ranks of the trainer: starts them together, ends them together, and keeps a template so that starting them is quick.

    python -m trainer_node.ranks --ranks 2 [--world 4 --first 2 --master HOST:PORT] [--template cpu] trainer_node ARG...

The template is this process itself, once it has imported what a rank needs (20 s and more): a rank is a fork of it. Without
`--template` a rank is a new interpreter. The launcher (`orchestrator.trainer_host`) speaks to it over stdin and stdout, which also works
through `docker run -i`; the ranks write to stderr.

    launcher -> here    start | end | ping    end: kill the ranks; this process stays
    here -> launcher    ready                 once, after the imports
                        started               after each start
                        ended CODE            all ranks have ended: 0, or the exit code of the first that failed
                        pong                  for a ping

If one rank fails, the others are killed. If stdin ends, or this process is killed, all of them are.

A fork takes over one thread and no device. So the template has one Python thread, no CUDA driver, no process group, no zmq context and
no tensor operation behind it when it forks; a rank makes all of these for itself. `check_can_fork` refuses the rest.
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

from orchestrator.protocol.parent import die_with_parent
from orchestrator.protocol.restarts import EXIT_LINK_LOST

POLL_S = 0.05
STORE_FD = "SPLICE_STORE_FD"
"""Environment of rank 0: descriptor of the socket that its TCPStore listens on."""
EXIT_UNFIT = 4
"""The imports left something behind that does not survive a fork."""
IMPORTED = (
    "numpy", "safetensors.torch", "transformers.models.auto.modeling_auto", "torch.distributed.checkpoint", "trainer_node.checkpoint",
    "trainer_node.export", "trainer_node.hf_export", "trainer_node.hub", "trainer_node.node", "trainer_node.rendezvous",
    "trainer_node.runtime", "trainer_node.steps", "trainer_node.wire_export", "weight_transfer.chunks", "weight_transfer.groups",
    "weight_transfer.sender",
)  # fmt: skip
"""What a rank imports on its way to its first publication; `megatron.bridge` comes before it, and brings most of the rest."""


def import_all(device: str) -> None:
    """Import everything that a rank on `device` imports."""
    # torch.cuda.is_available() would initialise the driver, and forks could not use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if device == "cpu":
        from trainer_node import cpu_shims

        cpu_shims.apply()
    for name in ("megatron.bridge", *IMPORTED):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, all that it shares with the template


def check_can_fork(device: str) -> str | None:
    """Why forks of this process would not work; None if they do."""
    if threading.active_count() != 1:
        return f"the imports started threads: {[t.name for t in threading.enumerate()]}"
    if device == "cuda" and _in_fork(_cuda_driver_works) != 0:
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


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address alone (a TCPStore's own listens on all); port 0: any."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=1024)


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
        """Until stdin ends."""
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
                    {b"start": self._start, b"end": self._kill, b"ping": lambda: self._say("pong")}[line]()
            self._look()
        self._kill()
        if not has_heard:
            sys.stderr.write("trainer_node.ranks: stdin is closed; a --prefix must pass it on (docker run -i)\n")

    def _say(self, line: str) -> None:
        os.write(self._answers, f"{line}\n".encode())

    def _start(self) -> None:
        if self._pids:
            return
        self._code = 0
        try:
            self._fork_all()
        except OSError as error:  # the address is in use, or is none of this host's; or no process can be made
            logging.error("the ranks cannot be started: %s", error)
            self._kill()
            self._code = EXIT_LINK_LOST
        self._say("started")
        if not self._pids:
            self._say(f"ended {self._code}")

    def _fork_all(self) -> None:
        given, environment = self._arguments, {}
        host, _, port = given.master.rpartition(":")
        host, store = host.strip("[]"), None
        if given.world > 1:
            if given.first == 0:
                store = listen(host, int(port))
                port = str(store.getsockname()[1])
            environment = {
                "WORLD_SIZE": str(given.world), "LOCAL_WORLD_SIZE": str(given.ranks), "GROUP_RANK": str(given.first // given.ranks),
                "MASTER_ADDR": host, "MASTER_PORT": port,
            }  # fmt: skip
        for local in range(given.ranks):
            own = {"LOCAL_RANK": str(local)} | ({"RANK": str(given.first + local)} if given.world > 1 else {})
            self._pids.add(self._fork(environment | own, store))
            if store is not None:  # rank 0, the first, has it
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
            os.environ.update(environment)
            if store is not None:
                os.environ[STORE_FD] = str(store.detach())
                os.set_inheritable(int(os.environ[STORE_FD]), True)
            code = self._become_rank()
        except BaseException:  # whatever it is, this process must never go on as the template
            logging.exception("a rank ends")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_rank(self) -> int:
        module, arguments = self._arguments.module, self._arguments.arguments
        if self._arguments.template is None:
            os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
        import numpy as np

        np.random.seed()  # else every rank that is ever forked draws the same; torch's generators are seeded from the config
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    def _look(self) -> None:
        """Note which ranks have ended; when one has failed, end the others."""
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
    """The process."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.ranks", description="One host's ranks; `splice trainer` runs it."
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this host")
    parser.add_argument("--world", type=int, default=1, help="ranks on all hosts")
    parser.add_argument("--first", type=int, default=0, help="this host's first rank")
    parser.add_argument("--master", default="127.0.0.1:0", help="HOST:PORT of rank 0's store; port 0, on one host: any")
    parser.add_argument("--template", choices=("cpu", "cuda"), help="import everything first and fork the ranks")
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
            sys.stderr.write(f"trainer_node.ranks: no template: {unfit}\n")
            return EXIT_UNFIT
    Ranks(given, requests=requests, answers=answers).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
