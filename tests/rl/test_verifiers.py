"""verifiers, in an environment of its own: its episodes train through the loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splice.rl import decisions
from splice.rl.checker import check
from tests.e2e.conftest import ROOT
from tests.rl.conftest import tiny_cluster

pytestmark = pytest.mark.timeout(1800)
NEEDS = ("verifiers==0.4.0", "msgpack", "pyzmq", "typer", "psutil", "nvidia-ml-py")
"""The project's own needs are named here, so that pip writes nothing into the source tree."""


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    """A user's environment; SPLICE_VERIFIERS_PYTHON names one that exists."""
    given = os.environ.get("SPLICE_VERIFIERS_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("verifiers") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    install = [folder / "bin/pip", "install", "--quiet", *NEEDS]
    subprocess.run(install, check=True, timeout=900)
    return folder / "bin/python"


def test_an_environment_of_verifiers_trains(models, tmp_path, python):
    """Strictly on policy, so the gap to the sampler shows that tokens and masks are aligned."""
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        argv = [python, "train.py", cluster.config.run_dir, models["qwen3"], "--default-renderer"]
        done = subprocess.run(
            list(map(str, [*argv, "--steps", 3, "--max-tokens", 6, "--max-staleness", 0])),
            cwd=ROOT / "examples/verifiers",
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    gaps = [float(line.split("gap ")[1]) for line in done.stdout.splitlines() if "gap " in line]
    assert len(gaps) == 3 and max(gaps) < 1e-3
    found = check(decisions.read(tmp_path / "run" / "loop" / decisions.LOG))
    assert found.violations == [] and (found.steps, found.trained) == (3, 36)
    assert found.turns_left_out == 0 and found.tokens > 36 * 2
