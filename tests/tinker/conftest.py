"""The SDK in its own environment, and the server as a process in front of a real run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, models
from tests.rl.conftest import tiny_cluster

__all__ = ["models"]
SDK = "tinker==0.38.0"
USER = Path(__file__).parent / "sdk_user.py"


@pytest.fixture(scope="session")
def sdk_python(tmp_path_factory) -> Path:
    """An interpreter with the SDK from the index, and torch, which custom losses need."""
    folder = tmp_path_factory.mktemp("sdk")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = folder / "bin/python"
    argv = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", SDK]
    subprocess.run(argv, check=True, timeout=600)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Behind its own packages, so that only what it lacks comes from there.
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (Path(site) / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    return python


@pytest.fixture(scope="session")
def cluster(models, tmp_path_factory) -> Iterator:
    run_dir = tmp_path_factory.mktemp("tinker") / "run"
    with tiny_cluster(models["qwen3"], run_dir) as running:
        yield running


class Server:
    """`splice tinker` as a process, which may be killed and started again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.port, self.url = run_dir, 0, ""
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> None:
        argv = [sys.executable, "-m", "splice", "tinker", str(self.run_dir), *options]
        self.process = subprocess.Popen(
            [*argv, "--port", str(self.port)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("TINKER_BASE_URL="), line
        self.url = line.strip().partition("=")[2]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

    def user(self, python: Path, *argv: str) -> subprocess.Popen[str]:
        """A program that uses the SDK: a part of `sdk_user.py`, or Python's own arguments."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        key = (self.run_dir / "tinker" / "api_key").read_text().strip()
        return subprocess.Popen(
            [str(python), *(argv if len(argv) > 1 else (str(USER), *argv))],
            env={**env, "TINKER_BASE_URL": self.url, "TINKER_API_KEY": key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="session")
def server(cluster) -> Iterator[Server]:
    server = Server(cluster.run.run_dir)
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop()
        server.kill()
