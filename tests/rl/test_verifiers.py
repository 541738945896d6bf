"""verifiers, in its own environment: its episodes train through the loop."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from splice.rl import decisions
from splice.rl.checker import check
from tests.rl.conftest import ROOT, in_example, tiny_cluster, user_python

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verifiers") / "venv"
    return user_python(folder, ("verifiers==0.4.0",), variable="SPLICE_VERIFIERS_PYTHON")


def test_an_environment_of_verifiers_trains(models, tmp_path, python):
    """Strictly on policy, so the gap to the sampler shows that tokens and masks are aligned."""
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        argv = [cluster.run.run_dir, models["qwen3"], "--default-renderer"]
        more = ["--steps", 3, "--max-tokens", 6, "--max-staleness", 0]
        said = in_example(python, "verifiers", *argv, *more)
    gaps = [float(line.split("gap ")[1]) for line in said.splitlines() if "gap " in line]
    assert len(gaps) == 3 and max(gaps) < 1e-3
    found = check(decisions.read(tmp_path / "run" / "loop" / decisions.LOG))
    assert found.violations == [] and (found.steps, found.trained) == (3, 36)
    assert found.turns_left_out == 0 and found.tokens > 36 * 2


def test_verifiers_evaluates_what_is_served(models, tmp_path, python):
    """As the example's README says."""
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        client = {
            "type": "eval",
            "base-url": cluster.base_urls[0] + "/v1",
            "api-key-var": "KEY",
        }
        argv = ["echo_taskset", "-m", "tiny", "-r", "2", "--no-push", "-o", str(tmp_path / "found")]
        argv += [
            word for key, value in client.items() for word in (f"--env.agent.client.{key}", value)
        ]
        argv += ["--env.agent.runtime.type", "subprocess", "--env.agent.sampling.max-tokens", "8"]
        subprocess.run(
            [str(python.parent / "vf-eval"), *argv],
            cwd=ROOT / "examples/verifiers",
            env={**os.environ, "PYTHONPATH": ".", "KEY": "unused"},
            check=True,
            timeout=300,
        )
    (file,) = tmp_path.glob("found/*/traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(episodes) == 6 and all(episode["ok"] for episode in episodes)
