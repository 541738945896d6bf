"""OpenEnv, in an environment of its own: episodes on its server train through the loop."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from splice.rl import decisions, samples
from splice.rl.checker import check
from tests.e2e.conftest import ROOT
from tests.rl.conftest import tiny_cluster

pytestmark = pytest.mark.timeout(1800)
FOLDER = ROOT / "examples/openenv"
NEEDS = ("verifiers[openenv]==0.4.0", "openenv==0.4.1")


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    """A user's environment; SPLICE_OPENENV_PYTHON names one that exists."""
    given = os.environ.get("SPLICE_OPENENV_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("openenv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    # By name, not with the project: pip writes nothing into the source tree.
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    install = [folder / "bin/pip", "install", "--quiet", *NEEDS, *own]
    subprocess.run(install, check=True, timeout=900)
    return folder / "bin/python"


def in_example(python, *argv: object) -> str:
    """What a program in the example's folder says."""
    done = subprocess.run(
        list(map(str, [python, *argv])),
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_an_environment_of_openenv_trains(models, tmp_path, python):
    """Strictly on policy, so the gap to the sampler shows that tokens and masks are aligned."""
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        run_dir, more = cluster.config.run_dir, ["--max-tokens", 6, "--max-staleness", 0]
        argv = [run_dir, models["qwen3"], "--default-renderer", "--steps", 2, *more]
        said = in_example(python, "train.py", *argv)
    gaps = [float(line.split("gap ")[1]) for line in said.splitlines() if "gap " in line]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    loop = tmp_path / "run" / "loop"
    found = check(decisions.read(loop / decisions.LOG))
    assert found.violations == [] and (found.steps, found.turns_left_out) == (2, 0)
    assert found.trained + found.dropped == 24 and found.dropped <= 2
    rollouts = [line for step in (1, 2) for line in samples.read(loop / samples.SAMPLES, step)]
    assert {len(line["turns"]) for line in rollouts} <= {1, 2}
    twice = [line for line in rollouts if len(line["turns"]) == 2]
    assert twice, "the server's answer to a wrong guess begins the second turn"
