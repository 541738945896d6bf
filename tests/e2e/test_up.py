"""From a model's folder to a trained version and back to nothing, by the commands a user types."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import httpx
import pytest
from safetensors.torch import load_file, save_file

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.processes.python import python_command
from splice import LossSpec, OptimParams, SpliceClient, TrainMerged, batch_specs
from splice.cluster import up
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import kill_all, processes_of, splice
from tests.e2e.conftest import INFERENCE_PYTHON

pytestmark = pytest.mark.timeout(1800)
NODES = ("trainer", "trainer-launcher-0", "inference-0")


def test_init_up_a_step_status_and_stop(models, tmp_path):
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    assert splice("config", "check", folder) == "ok\n"
    assert "exists; edit it" in splice("init", folder, *options, code=2)

    facts = json.loads(splice("up", folder, "--set", "trainer.lora.rank=4", "--json"))
    try:
        assert json.loads((run_dir / "trainer.json").read_text())["lora"]["rank"] == 4
        assert "is up already" in splice("up", folder, code=2)
        (url,) = facts["openai_urls"]
        assert _served(url) == {"tiny", "tiny@0"}, "up returns once the alias answers"

        with SpliceClient.of_run(run_dir) as client:
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            job = TrainMerged(tensors=specs)
            result = client.run(job, buffers=as_batch([3, 4]), timeout_s=120)
            assert result.alias == "tiny@1"
            saved = client.save_checkpoint("saved", timeout_s=60)
            assert saved.checkpoint_dir == str(run_dir / "saved") and saved.host
            assert (run_dir / "saved").is_dir()

        status = json.loads(splice("status", folder, "--json"))
        assert (status["phase"], status["alias"]) == ("up", "tiny@1")
        states = {node["node_id"]: node["state"] for node in status["nodes"]}
        assert states == dict.fromkeys(NODES, "ready")
        assert "tiny@1" in splice("status", run_dir), "the run's folder will do as well"
        assert "run tiny listens" in splice("logs", "orchestrator", "--run", folder, "-n", 1000)
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []
    assert json.loads(splice("status", folder, "--json"))["phase"] == "ended"
    assert "nothing runs" in splice("stop", folder)

    assert "continue it with `splice up --resume`" in splice("up", folder, code=2)
    # The state is that of `saved`, whose copy is versions/1, and the folder gets another name.
    shutil.rmtree(run_dir / "saved")
    folder = folder.rename(tmp_path / "moved")
    run_dir = folder / "run"
    splice("up", folder, "--resume")
    with SpliceClient.of_run(run_dir) as client:
        assert client.status().version == 1, "the resumed run continues where it was"
        client.stop_run()  # as a user's loop does at its end
    deadline_s = time.monotonic() + 60
    while processes_of(folder):
        assert time.monotonic() < deadline_s, processes_of(folder)
        time.sleep(0.5)
    assert json.loads(splice("status", folder, "--json"))["phase"] == "ended"


def test_a_resume_on_other_base_weights_is_refused(models, tmp_path):
    """As after a new revision on a hub. The reason comes with the command's end."""
    folder, model = tmp_path / "mine", shutil.copytree(models["qwen3"], tmp_path / "model")
    options = ["--model", model, "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    splice("up", folder)
    splice("stop", folder)
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t * 1.01 for n, t in tensors.items()}, file, metadata={"format": "pt"})
    try:
        said = splice("up", folder, "--resume", code=2)
        assert "tiny@0 cannot be served again" in said and "other base weights" in said
        assert processes_of(folder) == []
        save_file(tensors, file, metadata={"format": "pt"})
        splice("up", folder, "--resume")
        with SpliceClient.of_run(folder / "run") as client:
            assert _ready(client).version == 0
    finally:
        splice("stop", folder)


def test_a_run_continues_on_another_number_of_ranks(models, tmp_path):
    """As a user does who gets other GPUs: stop, edit run.toml, `--resume`."""
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file, sizes = folder / "run.toml", "parallel = { tensor = 1, world_size = 1 }"
    specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
    text, losses = file.read_text(), []
    job = TrainMerged(
        tensors=specs, loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=0.01)
    )
    assert sizes in text
    for step, (tensor, ranks) in enumerate([(2, 2), (1, 1), (1, 2)]):
        now = f"parallel = {{ tensor = {tensor}, world_size = {ranks} }}"
        file.write_text(text.replace(sizes, now))
        splice("up", folder, *["--resume"] * bool(step))
        try:
            with SpliceClient.of_run(run_dir) as client:
                assert _ready(client).version == step
                result = client.run(job, buffers=as_batch([3, 4]), timeout_s=120)
        finally:
            splice("stop", folder)
        assert result.alias == f"tiny@{step + 1}"
        losses.append(result.metrics["loss"])
    assert losses == sorted(losses, reverse=True) and losses[2] < losses[0], losses
    assert processes_of(folder) == []


def test_every_role_comes_back_and_clients_find_the_run_again(models, tmp_path):
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    splice("up", folder)
    try:
        with SpliceClient.of_run(run_dir) as client:
            splice("stop", folder)
            splice("up", folder, "--resume")
            assert _ready(client).version == 0, "a client follows its run to the new endpoint"
            for role, says in (
                ("splice serve", "run tiny listens"),
                ("splice trainer", "launcher trainer-launcher-0 joined"),
                ("inference_node", "inference inference-0 joined"),
            ):
                url = client.base_url()
                _kill(folder, role, until=(run_dir / "logs" / "orchestrator.log", says))
                while role == "inference_node" and _served(f"{url}/v1"):
                    time.sleep(0.2)  # its vLLM ends with it
                _ready(client)
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            job = TrainMerged(tensors=specs)
            assert client.run(job, buffers=as_batch([3, 4]), timeout_s=120).alias == "tiny@1"
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []


def test_a_run_comes_back_after_power_loss_by_the_command_of_its_unit(models, tmp_path):
    """Everything ends at once, with files half written, and the next boot has other processes."""
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    argv = python_command(
        sys.executable, "-m", "splice", "up", str(folder), "--resume", "--foreground"
    )
    with subprocess.Popen(argv) as unit:
        _wait_up(run_dir, unit)
        with SpliceClient.of_run(run_dir) as client:
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            job = TrainMerged(tensors=specs)
            client.run(job, buffers=as_batch([3, 4]), timeout_s=120)
        kill_all(folder)
        assert unit.wait(30) == -9

    state = json.loads((run_dir / "up.json").read_text())
    dead_boot = "00000000-0000-0000-0000-000000000000 1"
    lives = {"pid": os.getpid(), "identity": dead_boot}  # its pid is another process now
    (run_dir / "up.json").write_text(json.dumps({**state, **lives}))
    for name in ("token", "endpoint", "bound", "inference-0.json"):
        (run_dir / name).write_text("")
    for name in ("trainer.json", "run.json"):
        os.truncate(run_dir / name, 10)
    for name in ("up.part", "token.part", "endpoint.part"):
        (run_dir / name).write_text('{"half')
    (run_dir / "versions" / "2").mkdir()  # a save that had begun

    with subprocess.Popen(argv) as unit:
        _wait_up(run_dir, unit)
        with SpliceClient.of_run(run_dir) as client:
            assert _ready(client).version == 1
            assert client.run(job, buffers=as_batch([3, 4]), timeout_s=120).alias == "tiny@2"
        unit.terminate()  # as `systemctl stop` does
        assert unit.wait(90) == 0
    assert processes_of(folder) == []


def _wait_up(run_dir, unit):
    deadline_s = time.monotonic() + 300
    while up.read_state(run_dir).get("phase") != "up" or not up.is_alive(up.read_state(run_dir)):
        assert unit.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.2)


def _kill(folder, text, *, until):
    """Kill the process whose command line has the text; wait until the log says that it is back."""
    path, says = until
    before = path.read_text().count(says)
    (process,) = [p for p in processes_of(folder) if text in " ".join(p.cmdline())]
    process.kill()
    deadline_s = time.monotonic() + 120
    while path.read_text().count(says) == before:
        assert time.monotonic() < deadline_s, f"{text} did not come back"
        time.sleep(0.2)


def _served(url):
    """The names that a replica serves; none if it is not there."""
    try:
        answer = httpx.get(f"{url}/models", timeout=30, trust_env=False)
        return {m["id"] for m in answer.json()["data"]}
    except httpx.HTTPError:
        return set()


def _ready(client):
    """The status once all nodes are ready and the replica serves."""
    deadline_s = time.monotonic() + 180
    while time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError, NodeLost, ConfigError):
            status = client.status(timeout_s=30)
            states = {n.node_id: n.state for n in status.nodes if n.role != "client"}
            wanted = {"tiny", f"tiny@{status.version}"}
            if (
                states == dict.fromkeys(NODES, "ready")
                and _served(f"{client.base_url()}/v1") == wanted
            ):
                return status
        time.sleep(0.5)
    raise TimeoutError(client.status())


def test_what_cannot_start_says_why_and_leaves_nothing(models, tmp_path, monkeypatch):
    """A trainer that refuses its configuration ends `up` at once, and every role with it."""
    folder = tmp_path / "mine"
    (tmp_path / "own_losses.py").write_text("import no_such_library")  # found, but of no use
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    options = ["--model", models["qwen3"], "--gpus", "", "--inference-python", INFERENCE_PYTHON]
    splice("init", folder, *options)
    text = splice("up", folder, "--set", "trainer.loss_modules=['own_losses']", code=2)
    assert "no_such_library" in text and "trainer ended with code 2" in text
    assert processes_of(folder) == []
    assert json.loads(splice("status", folder, "--json"))["phase"] == "failed"


def test_a_run_starts_without_a_replica_that_gives_up(models, tmp_path):
    """And continues without it, which `splice status` says."""
    folder, python = tmp_path / "mine", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *inference-1*) exit 3;; esac\nexec {INFERENCE_PYTHON} "$@"\n'
    )
    python.chmod(0o755)
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", python)
    sets = ["--set", "inference.replicas=2", "--set", "inference.cpu_kv_cache_gb=0.1"]
    facts = json.loads(splice("up", folder, *sets, "--json"))
    try:
        assert len(facts["replica_urls"]) == 1
        with SpliceClient.of_run(folder / "run") as client:
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            job = TrainMerged(tensors=specs)
            result = client.run(job, buffers=as_batch([3, 4]), timeout_s=120)
        assert (result.alias, list(result.replicas)) == ("tiny@1", ["inference-0"])
        status = json.loads(splice("status", folder, "--json"))
        assert status["phase"] == "up"
        assert "inference-1 ended with code 3 and was given up" in status["warning"]
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []
