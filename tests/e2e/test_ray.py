"""A run on a real Ray cluster of two or eight nodes on this machine; its roles are killed. Of the
eight nodes, six have stand-ins for replicas."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from splice import SpliceClient, TrainMerged, batch_specs
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import free_port, processes_of, splice
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT
from tests.e2e.stand_in_replica import wrapper

pytestmark = pytest.mark.timeout(1800)
BACK_S = 600
TRAINING = """
[data]
path = "rows.jsonl"
[loop]
reward = "rewards.py:short"
steps = 2
group_size = 2
groups_per_step = 2
[sampling]
max_tokens = 8
[eval]
path = "rows.jsonl"
"""
REWARD = "def short(row, completion): return len(completion.text) % 7 / 7"
ROLES = ("serve", "trainer", "inference_node")
"""A word of each role's command line."""


@pytest.fixture
def cluster(request, monkeypatch) -> Iterator[str]:
    """The address of a cluster of two nodes, with room for two roles each, or of as many nodes as
    the parameter has numbers of roles."""
    cpus = getattr(request, "param", (2, 2))
    utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    found = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **small})
    for count in cpus[1:]:
        found.add_node(num_cpus=count, **small)
    yield str(found.address)
    found.shutdown()


def test_roles_are_placed_killed_and_started_again(models, tmp_path, cluster, monkeypatch):
    folder, run_dir, keys = tmp_path / "mine", tmp_path / "mine" / "run", tmp_path / "keys"
    splice("keys", keys)
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    sets = ["--set", f"orchestrator.endpoint=tcp://0.0.0.0:{free_port()}"]
    sets += ["--set", f"orchestrator.curve_dir={keys}/orchestrator"]
    on = ["--on", "ray", "--ray-address", cluster]
    monkeypatch.setenv("SPLICE_CURVE_DIR", str(keys / "client"))
    facts = json.loads(splice("up", folder, *sets, *on, "--json"))
    try:
        assert "is up on Ray already" in splice("up", folder, *sets, *on, "--resume", code=2)
        (url,) = facts["openai_urls"]
        assert "127.0.0.1" not in url and served(url) == {"tiny", "tiny@0"}
        raylets = {raylet_of(role_of(run_dir, role)) for role in ROLES}
        assert len(raylets) == 2, "both of Ray's nodes have roles"

        kill_and_wait(run_dir, "serve")
        kill_and_wait(run_dir, "trainer")
        train(run_dir, version=1)
        actor = role_of(run_dir, "inference_node").parent()
        assert actor is not None and "RoleActor" in " ".join(actor.cmdline()), actor
        kill_and_wait(run_dir, "inference_node", victim=actor)
        deadline_s = time.monotonic() + BACK_S
        while states(folder).get("inference-0") != "ready":
            assert time.monotonic() < deadline_s
            time.sleep(1)
        train(run_dir, version=2)
    finally:
        splice("stop", folder)
        deadline_s = time.monotonic() + 90
        while left := [p for p in processes_of(run_dir) if p.pid != os.getpid()]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.5)


def test_a_run_trains_there_and_ends(models, tmp_path, cluster):
    """By the file that one host takes, without keys or an endpoint in it."""
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file, run_dir = folder / "run.toml", folder / "run"
    file.write_text(file.read_text() + TRAINING)
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n' * 4)
    (folder / "rewards.py").write_text(REWARD)
    port = ["--set", f"orchestrator.endpoint=tcp://0.0.0.0:{free_port()}"]
    said = splice("train", file, *port, "--on", "ray", "--ray-address", cluster)
    assert "splice logs loop" in said
    log, deadline_s = run_dir / "logs" / "loop.log", time.monotonic() + BACK_S
    while "2 steps are made: tiny@2" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline_s, log.read_text() if log.exists() else said
        time.sleep(1)
    assert (run_dir / "versions" / "2" / "adapter" / "adapter_model.safetensors").is_file()
    assert "2 steps are made: tiny@2" in splice("train", file, *port, "--on", "ray")
    deadline_s = time.monotonic() + 90
    while left := [p for p in processes_of(run_dir) if p.pid != os.getpid()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.5)


@pytest.mark.parametrize("cluster", [(4, *(1,) * 7)], indirect=True, ids=["eight nodes"])
def test_a_run_on_eight_nodes_is_stopped_and_continues(models, tmp_path, cluster):
    """By the same command, at once: it waits until Ray has ended what is left. Two nodes have real
    roles, six a stand-in for a replica each."""
    folder = tmp_path / "mine"
    python = wrapper(tmp_path / "python")
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", python)
    file, run_dir = folder / "run.toml", folder / "run"
    text = file.read_text().replace("replicas = 1", "replicas = 7")
    file.write_text(text + TRAINING.replace("steps = 2", "steps = 4"))
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n' * 4)
    (folder / "rewards.py").write_text(REWARD)
    port = ["--set", f"orchestrator.endpoint=tcp://0.0.0.0:{free_port()}"]
    command = ["train", file, *port, "--on", "ray", "--ray-address", cluster]
    log = run_dir / "logs" / "loop.log"
    for said in ("step 2 of 4", "4 steps are made: tiny@4"):
        splice(*command)
        deadline_s = time.monotonic() + BACK_S
        while said not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline_s, log.read_text() if log.exists() else said
            time.sleep(0.5)
        if said.startswith("step"):
            stand_ins = [p for p in processes_of(run_dir) if "stand_in" in str(p.info["cmdline"])]
            assert len({raylet_of(process) for process in stand_ins}) == 6
            splice("stop", folder)
    deadline_s = time.monotonic() + 90
    while left := [p for p in processes_of(run_dir) if p.pid != os.getpid()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.5)
    assert log.read_text().count("step 1 of 4") == 1
    for k in range(1, 7):
        assert (run_dir / "logs" / f"inference-{k}.log").read_text().count("serves 4") == 1


def states(folder: Path) -> dict[str, str]:
    found = json.loads(splice("status", folder, "--json"))
    return {node["node_id"]: node["state"] for node in found["nodes"]}


def role_of(run_dir: Path, name: str) -> psutil.Process:
    """The process of a role that an actor started."""
    # As it was when listed: it may have ended since.
    found = [p for p in processes_of(run_dir) if {name, "-m"} <= {*p.info["cmdline"]}]
    return min(found, key=lambda process: process.create_time())


def raylet_of(process: psutil.Process) -> int:
    """The pid of the Ray node on which the process runs."""
    return next(p.pid for p in process.parents() if p.name() == "raylet")


def kill_and_wait(run_dir: Path, name: str, victim: psutil.Process | None = None) -> None:
    """Kill a role, or its actor, and wait until another process has its part."""
    old = role_of(run_dir, name)
    (victim or old).send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + BACK_S
    while True:
        try:
            if role_of(run_dir, name).pid != old.pid:
                return
        except ValueError:  # none at the moment
            pass
        assert time.monotonic() < deadline_s, f"{name} was not started again"
        time.sleep(0.2)


def train(run_dir: Path, *, version: int) -> None:
    with SpliceClient.of_run(run_dir) as client:
        specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
        job = TrainMerged(tensors=specs)
        result = client.run(job, buffers=as_batch([3, 4]), timeout_s=BACK_S)
    assert result.alias == f"tiny@{version}"


def served(url: str) -> set[str]:
    answer = httpx.get(f"{url}/models", timeout=30, trust_env=False)
    return {model["id"] for model in answer.json()["data"]}
