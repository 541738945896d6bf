"""Tiny HF checkpoints and a way to run a check on real Megatron under torchrun."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer_node import tiny

REPO = Path(__file__).resolve().parents[2]
OWN_SERVER = "tests.trainer_node.forkserver"
FORKSERVER = "SPLICE_TEST_FORKSERVER"
"""Environment: "r,w", the pipes of a `forkserver` that runs already."""


def child_env() -> dict[str, str]:
    """Environment of the processes that tests start."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
    }


def cpu_env() -> dict[str, str]:
    """The same for processes that fork: CUDA does not survive that, and torch's optimizers ask it
    where there is a GPU.
    """
    return child_env() | {"CUDA_VISIBLE_DEVICES": ""}


def run_on_gpus(num_ranks: int, module: str, *args: object, timeout_s: float = 200.0) -> None:
    """`tests.trainer_node.<module>` under torchrun, a process for each rank, because CUDA does not
    survive a fork.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        "-m",
    ]
    command += [f"tests.trainer_node.{module}", *map(str, args)]
    ran = subprocess.run(
        command,
        cwd=REPO,
        env=child_env(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint folder: dense_tied, dense_untied, moe."""
    torch.set_num_threads(1)
    return tiny.make_all(tmp_path_factory.mktemp("models"))


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Started:
    """Ranks that run in the background, in the process group `pid`."""

    def __init__(self, exit: Path) -> None:
        self.pid, self.exit, self.store = 0, exit, _store()
        exit.unlink(missing_ok=True)

    def wait(self, timeout_s: float) -> int:
        """The first failure's exit code, or 0."""
        deadline = time.monotonic() + timeout_s
        while not self.exit.exists():
            assert time.monotonic() < deadline, f"the ranks run after {timeout_s} s"
            time.sleep(0.02)
        return int(self.exit.read_text())


class Ranks:
    """Runs `tests.trainer_node.<module>` on n ranks, as torchrun would, from a process that has
    Megatron imported already.
    """

    def __init__(self, folder: Path, *, server: str = OWN_SERVER) -> None:
        self._folder, self._count, self._module = folder, 0, server
        self._server: subprocess.Popen[str] | None = None
        self._pipes: tuple[IO[str], IO[str]] | None = None

    def _start(self) -> tuple[IO[str], IO[str]]:
        """(answers, requests) of a server."""
        if FORKSERVER in os.environ and self._module == OWN_SERVER:
            answers, requests = map(int, os.environ[FORKSERVER].split(","))
            return os.fdopen(answers), os.fdopen(requests, "w")
        self._server = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=REPO,
            env=cpu_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        return self._server.stdout, self._server.stdin

    def _ask(self, module: str, args: Sequence[object], **request: object) -> dict[str, Any]:
        if self._pipes is None:
            self._pipes = self._start()
        answers, requests = self._pipes
        request |= {"module": module, "args": list(map(str, args))}
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        answer = answers.readline()
        if not answer:
            self._pipes = None  # the next one starts another
            raise RuntimeError(f"the process that forks has ended while {module} ran")
        found: dict[str, Any] = json.loads(answer)
        return found

    def start(
        self, num_ranks: int, module: str, *args: object, folder: Path, env: dict[str, str]
    ) -> Started:
        """Run a module in the background; its output goes to `node.log` in `folder`."""
        started = Started(folder / "exit")
        started.pid = self._ask(
            module,
            args,
            num_ranks=num_ranks,
            port=started.store.port,
            log=str(folder / "node.log"),
            timeout_s=600.0,
            exit=str(started.exit),
            env=env,
        )["pid"]
        return started

    def __call__(
        self, num_ranks: int, module: str, *args: object, timeout_s: float = 120.0
    ) -> None:
        """Fails the test with the ranks' output if one of them fails or none ends within
        `timeout_s`.
        """
        store = _store()
        self._count += 1
        log = self._folder / f"{self._count}-{module}.log"
        codes = self._ask(
            f"tests.trainer_node.{module}",
            args,
            num_ranks=num_ranks,
            port=store.port,
            log=str(log),
            timeout_s=timeout_s,
        )["codes"]
        output = log.read_text()[-6000:] if log.exists() else ""
        assert codes == [0] * num_ranks, (
            f"exit codes {codes} (null: killed after {timeout_s} s, or after another "
            f"failed)\n{output}"
        )

    def close(self) -> None:
        """End the process that forks."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """See `Ranks`."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def single_parity(
    models: dict[str, Path], torchrun: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """(model, cell) -> folder with what one rank did; made once."""

    @functools.cache
    def get(model: str, cell: str) -> Path:
        out = tmp_path_factory.mktemp(f"parity_{model}_{cell}")
        torchrun(1, "training.parity", out, models[model], 1, 1, 1, *cell.split("-"))
        return out

    return get
