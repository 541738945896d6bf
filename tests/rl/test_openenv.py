"""OpenEnv, in its own environment: episodes on its server train through the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from splice.rl import decisions, samples
from splice.rl.checker import check
from tests.rl.conftest import in_example, tiny_cluster, user_python

pytestmark = pytest.mark.timeout(1800)
NEEDS = ("verifiers[openenv]==0.4.0", "openenv==0.4.1")


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("openenv") / "venv"
    return user_python(folder, NEEDS, variable="SPLICE_OPENENV_PYTHON")


def test_an_environment_of_openenv_trains(models, tmp_path, python):
    """Strictly on policy, so the gap to the sampler shows that tokens and masks are aligned."""
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        run_dir, more = cluster.run.run_dir, ["--max-tokens", 6, "--max-staleness", 0]
        argv = [run_dir, models["qwen3"], "--default-renderer", "--steps", 2, *more]
        said = in_example(python, "openenv", *argv)
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
