"""From a model's folder to a trained version and back to nothing, by the commands a user types."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import pytest

from orchestrator.errors import ConfigError, NodeLost
from splice import SpliceClient, TrainMergedJob, batch_specs
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import processes_of, splice
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
        served = {m["id"] for m in httpx.get(f"{url}/models", timeout=30).json()["data"]}
        assert served == {"tiny", "tiny@0"}, "up returns once the alias answers"

        with SpliceClient.of_run(run_dir) as client:
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            job = TrainMergedJob(tensors=specs)
            result = client.run(job, buffers=as_batch([3, 4]), timeout_s=120)
            assert result["alias"] == "tiny@1"
            saved = client.save_checkpoint("saved", timeout_s=60)
            assert saved["checkpoint_dir"] == str(run_dir / "saved") and saved["host"]
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
    splice("up", folder, "--resume")
    with SpliceClient.of_run(run_dir) as client:
        assert client.status().version == 1, "the resumed run goes on where it was"
        splice("stop", folder)
        splice("up", folder, "--resume")
        assert _ready(client).version == 1, "a client follows its run to the new endpoint"
        for killed, node in (
            ("splice serve", ""),
            ("splice trainer", "trainer-launcher-0"),
            ("inference_node", "inference-0"),
        ):
            _kill(folder, killed)
            while node and _states(client).get(node) == "ready":
                time.sleep(0.2)
            _ready(client)
        (url,) = json.loads(splice("status", folder, "--json"))["base_urls"]
        served = {m["id"] for m in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]}
        assert served == {"tiny", "tiny@1"}
        assert client.run(job, buffers=as_batch([3, 4]), timeout_s=120)["alias"] == "tiny@2"
        client.stop_run()  # as a user's loop does at its end
    deadline_s = time.monotonic() + 60
    while processes_of(folder):
        assert time.monotonic() < deadline_s, processes_of(folder)
        time.sleep(0.5)
    assert json.loads(splice("status", folder, "--json"))["phase"] == "ended"


def _kill(folder, text):
    """Kill the process whose command line has the text."""
    (process,) = [p for p in processes_of(folder) if text in " ".join(p.cmdline())]
    process.kill()
    process.wait(30)


def _states(client):
    return {n.node_id: n.state for n in client.status().nodes if n.role != "client"}


def _ready(client):
    """The status once all nodes are ready; nodes that have just died may still seem so."""
    deadline_s = time.monotonic() + 180
    while time.monotonic() < deadline_s:
        time.sleep(3.0)
        with contextlib.suppress(TimeoutError, NodeLost, ConfigError):
            status = client.status(timeout_s=30)
            if _states(client) == dict.fromkeys(NODES, "ready") and client.base_url():
                return status
    raise TimeoutError(client.status())


def test_what_cannot_start_says_why_and_leaves_nothing(models, tmp_path):
    """A trainer that refuses its configuration ends `up` at once, and every role with it."""
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--gpus", "", "--inference-python", INFERENCE_PYTHON]
    splice("init", folder, *options)
    text = splice("up", folder, "--set", "trainer.loss_modules=['no_such_module']", code=2)
    assert "no_such_module" in text and "trainer ended with code 2" in text
    assert processes_of(folder) == []
    assert json.loads(splice("status", folder, "--json"))["phase"] == "failed"
