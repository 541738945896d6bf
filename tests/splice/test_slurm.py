"""The sbatch script of a run. Slurm itself does not run here: stand-ins record their arguments."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.processes.identity import identity
from orchestrator.protocol.topology import check_topology
from splice.client.run_file import find_run, load, load_as
from splice.cluster import keys, slurm, up
from splice.train.sections import SftFile, TrainFile
from tests import forked
from tests.splice.hosts_file import FILE

STAND_IN = """#!/bin/bash
name=$(basename "$0")
printf '%s\\n' "$name $*" >> "$CALLS"
case "$*" in
  *orchestrator*) touch "$RUN/endpoint"; sleep 2;;
esac
[ "$name" = scontrol ] && echo host0
[ "$name" = sbatch ] && echo "Submitted batch job 7"
exit 0
"""


ROOT = Path(__file__).parents[2]
MOE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
}
"""Qwen3-30B-A3B's sizes."""
TRAINING = """
[data]
path = "rows.jsonl"
[loop]
reward = "rewards.py:right"
[eval]
path = "rows.jsonl"
rows = 2
"""


@pytest.fixture
def path(tmp_path):
    """A run.toml for two hosts of the trainer and three replicas, whose folder has a space."""
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "run.toml").write_text(FILE)
    return folder / "run.toml"


@pytest.fixture
def environment(tmp_path):
    """Variables with stand-ins for Slurm's commands on PATH."""
    for name in ("srun", "sbatch", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    own = {"CALLS": str(tmp_path / "calls"), "RUN": "", "SLURM_JOB_NODELIST": "host[0-3]"}
    return {**os.environ, **own, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_each_role_is_a_step_with_its_gpus_and_log(path, environment, tmp_path):
    run = load(path)
    script = slurm.write_script(run, gpus_per_host=4, options="--partition=gpu")
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "#SBATCH --nodes=4" in text and "#SBATCH --partition=gpu" in text
    subprocess.run(["bash", script], env=environment, check=True, timeout=30)
    calls = [c for c in (tmp_path / "calls").read_text().splitlines() if c.startswith("srun")]
    by_role = {c.split("--job-name=")[1].split()[0]: c for c in calls}
    assert sorted(by_role) == [
        "inference-0",
        "inference-1",
        "inference-2",
        "orchestrator",
        "router",
        "trainer",
    ]
    assert " serve " in by_role["orchestrator"] and "--overlap" in by_role["orchestrator"]
    assert "--nodes=2 " in by_role["trainer"] and "--gpus-per-node=2" in by_role["trainer"]
    assert "--exact" in by_role["trainer"] and "--cpus-per-task=16" in by_role["trainer"]
    assert "#SBATCH --cpus-per-task=32" in text, "of a whole host"
    assert "--node-rank $SLURM_NODEID" in by_role["trainer"]
    assert "--set trainer.host=$HEAD" in by_role["trainer"], "that of rank 0, on each host"
    for index, host in enumerate((2, 2, 3)):
        call = by_role[f"inference-{index}"]
        assert f"--relative={host} " in call and f"--index {index}" in call
        assert "--gpus-per-node=2" in call
    for role, folder in (
        ("trainer", "trainer"),
        ("inference-1", "inference-1"),
        ("router", "client"),
    ):
        assert f"SPLICE_CURVE_DIR='{path.parent}/keys/{folder}'" in by_role[role]
    for role, call in by_role.items():
        assert f"--output={run.run_dir}/logs/{role}.log" in call
    read = load(run.run_dir / slurm.FILE)
    assert read.trainer.gpus == (0, 1) and read.inference_config(2).gpus == (0, 1)


def test_a_living_run_keeps_its_endpoint(path, environment, tmp_path):
    """The script's own orchestrator is refused by the folder's lock, and ends."""
    run = load(path)
    script = slurm.write_script(run, gpus_per_host=4)
    script.write_text(script.read_text().replace("sleep 1", "sleep 0.1"))
    for name in ("endpoint", "router"):
        (run.run_dir / name).write_text(f"the living run's {name}")
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$*" >> "$CALLS"\nexit 2\n')
    done = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and "did not bind; read" in done.stderr
    for name in ("endpoint", "router"):
        assert (run.run_dir / name).read_text() == f"the living run's {name}"
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "no node was started"


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (2, 2)])
def test_the_job_ends_with_its_loop(code, ends_with, path, environment, tmp_path):
    """Whose file has what it trains; its data stays relative to where it was."""
    path.write_text(path.read_text() + TRAINING)
    run = load_as(TrainFile, path)
    script = slurm.write_script(run, gpus_per_host=4, data_folder=path.parent)
    stand_in = (tmp_path / "srun").read_text().replace("exit 0", f"exit {code}")
    (tmp_path / "srun").write_text(stand_in.replace("sleep 2", f"sleep {2 if code == 0 else 20}"))
    began_s = time.monotonic()
    done = subprocess.run(["bash", script], env=environment, check=False, timeout=30)
    assert done.returncode == ends_with
    assert time.monotonic() - began_s < 15, "without waiting for the orchestrator"
    (loop,) = [c for c in (tmp_path / "calls").read_text().splitlines() if "--job-name=loop" in c]
    assert " train " in loop
    assert "--overlap" in loop and "--join --data-folder" in loop
    assert f"SPLICE_CURVE_DIR='{path.parent}/keys/client'" in loop
    again = load_as(TrainFile, run.run_dir / slurm.FILE)
    assert (again.data, again.loop, again.eval) == (run.data, run.loop, run.eval)


def test_given_answers_train_on_hosts_too(path, environment, tmp_path):
    rows = [{"prompt": "1 + 1 =", "completion": " 2"}] * 3
    (path.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path.write_text(path.read_text() + '[data]\npath = "rows.jsonl"\n[loop]\nsteps = 2\n')
    done = forked.run("sft", path, "--on", "slurm", env=environment)
    assert done.returncode == 0, done.stderr
    assert "Submitted batch job 7" in done.stdout and "splice logs loop" in done.stdout
    run = load_as(SftFile, path)
    text = (run.run_dir / slurm.SCRIPT).read_text()
    assert f"splice sft '{run.run_dir / slurm.FILE}'" in text.replace("'\"'\"'", "'")
    assert "--join --data-folder" in text and " train " not in text
    assert load_as(SftFile, run.run_dir / slurm.FILE).loop == run.loop


def test_a_dry_run_does_not_submit(path, environment, tmp_path):
    argv = ["up", path, "--on", "slurm", "--json"]
    done = forked.run(*argv, "--dry-run", env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["script"].endswith("my run/run/slurm.sh")
    assert not (tmp_path / "calls").exists()
    done = forked.run(*argv, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["submitted"] == "Submitted batch job 7"
    assert (tmp_path / "calls").read_text().startswith("sbatch ")
    assert (path.parent / "keys" / "inference-2" / "server.key").is_file(), "made before"
    shutil.rmtree(path.parent / "keys" / "inference-2")
    done = forked.run(*argv, "--dry-run", env=environment)
    assert done.returncode == 2 and "inference-2 has no key inference.inference-2" in done.stderr


def test_nothing_is_made_for_a_run_that_is_up_here(path, environment):
    """Its clients would take the new keys, which its orchestrator does not know."""
    run_dir = path.parent / "run"
    run_dir.mkdir(parents=True)
    here = {"pid": os.getpid(), "identity": identity(os.getpid()), "phase": "up", "text": "up"}
    (run_dir / up.STATE).write_text(json.dumps(here))
    before = sorted(path.parent.rglob("*"))
    done = forked.run("up", path, "--on", "slurm", "--dry-run", "--resume", env=environment)
    assert done.returncode == 2 and "is up on this host; end it with" in done.stderr
    assert sorted(path.parent.rglob("*")) == before


def test_a_file_for_one_host_gets_an_endpoint_and_keys(path):
    text = path.read_text()
    path.write_text(text.replace('endpoint = "tcp://0.0.0.0:40001"', "").replace("curve_dir", "#"))
    run = keys.provide(load(path))
    assert run.orchestrator.endpoint == "tcp://0.0.0.0:40001"
    assert run.orchestrator.curve_dir == run.run_dir / "keys" / "orchestrator"
    names = {folder.name for folder in (run.run_dir / "keys").iterdir()}
    assert names == {"orchestrator", "trainer", "client", *(f"inference-{i}" for i in range(3))}
    assert keys.provide(load(path)) == run, "the same keys again"
    (run.run_dir / "endpoint").write_text("tcp://127.0.0.1:1")
    (run.run_dir / "token").write_text("t" * 16)
    assert "curve" in find_run(run.run_dir), "clients find theirs"


def test_the_file_for_eight_hosts_in_the_docs(tmp_path):
    page = (ROOT / "docs/hosts.md").read_text()
    (block,) = [b for b in re.findall(r"```toml\n(.*?)```", page, re.S) if "[data]" in b]
    (tmp_path / "run.toml").write_text(block)
    run = keys.spread(load_as(TrainFile, tmp_path / "run.toml"))
    text = slurm.script(run, gpus_per_host=8, data_folder=tmp_path)
    assert "#SBATCH --nodes=8" in text and "#SBATCH --cpus-per-task=64" in text
    assert "--nodes=4 --ntasks=4" in text and "--relative=7" in text
    check_topology(run.trainer_config(), MOE)


@pytest.mark.parametrize(
    ("trainer", "inference", "expected"),
    [
        ("8", "8", (tuple(range(8)), tuple(range(8, 16)))),
        ("[1]", "2", ((1,), (0, 2))),
        ("2", "[4, 5]", ((0, 1), (4, 5))),
    ],
)
def test_gpus_as_a_number(trainer, inference, expected, tmp_path):
    path = tmp_path / "run.toml"
    tensor = len(expected[1])
    path.write_text(
        f'name = "t"\nmodel = "m"\n[trainer]\ngpus = {trainer}\n'
        f"parallel.world_size = {len(expected[0])}\n"
        f"[inference]\ntensor_parallel = {tensor}\ngpus = {inference}\n"
    )
    run = load(path)
    assert (run.trainer.gpus, run.inference.gpus) == expected and run.device == "cuda"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("orchestrator.endpoint=tcp://127.0.0.1:0", "loopback"),
        ("orchestrator.endpoint=tcp://0.0.0.0:0", "without a fixed port"),
        ("orchestrator.curve_dir=keys", "the folder `orchestrator`"),
        ("trainer.gpus=[0]", "ok"),
    ],
)
def test_what_cannot_work_on_several_hosts_is_refused(override, said, path):
    run = load(path, [override])
    if said == "ok":
        with pytest.raises(ConfigError, match="2 GPUs on one host, which has 1"):
            slurm.script(run, gpus_per_host=1)
        return
    with pytest.raises(ConfigError, match=said):
        slurm.script(run, gpus_per_host=8)
