"""Real orchestrator, real Megatron, real vLLM, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.processes.python import python_command
from tests.hiding import hiding_folder

ROOT = Path(__file__).resolve().parents[2]
INFERENCE_PYTHON = Path(
    os.environ.get("SPLICE_INFERENCE_PYTHON", ROOT / ".venv-inference/bin/python")
)
TRAINER_PYTHON = Path(sys.executable)


class Models(dict):
    """Arch -> tiny checkpoint, made by the repo's script when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, arch: str) -> Path:
        self[arch] = self._folder / arch
        argv = ["-m", "trainer_node.tools.make_checkpoint", "--arch", arch, "--out", self[arch]]
        subprocess.run(python_command(sys.executable, *argv), check=True, timeout=120)
        return self[arch]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _behind_a_proxy(monkeypatch):
    """A user's variables for the world outside. Nobody listens there."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _where_packages_are_hidden(monkeypatch, tmp_path_factory):
    """Start everything in a folder with packages of the same names."""
    monkeypatch.chdir(hiding_folder(tmp_path_factory.mktemp("cwd")))


@pytest.fixture(autouse=True)
def _has_both_environments():
    assert INFERENCE_PYTHON.exists(), (
        f"no inference environment at {INFERENCE_PYTHON}; run `make envs` or set "
        "SPLICE_INFERENCE_PYTHON"
    )
