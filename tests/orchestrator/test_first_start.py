"""What a new user meets before the first job: run folders, endpoints, addresses, mistakes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator.config import OrchestratorConfig
from orchestrator.control import waiting
from orchestrator.errors import ConfigError, JobFailed, NodeLost
from orchestrator.processes import interfaces
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages import Hello, InitialSync
from orchestrator.protocol.messages.mistakes import read_json
from orchestrator.protocol.node_link import NodeLink
from orchestrator.publication.config import PublicationConfig
from orchestrator.server import Orchestrator
from splice.client.clients import LOOK_S, SpliceClient
from splice.cluster import up
from tests import forked
from tests.orchestrator.run import TOKEN, Run
from tests.orchestrator.serving import REPO, endpoint_in, run_file, start_serve

OWN = "192.0.2.77"


def config(run_dir, **settings) -> OrchestratorConfig:
    publication = PublicationConfig(transport="tcp")
    return OrchestratorConfig(
        run_dir=run_dir, run_token=TOKEN, name="m", publication=publication, **settings
    )


def serve_briefly(config: OrchestratorConfig) -> None:
    async def go() -> None:
        orchestrator = Orchestrator(config)
        orchestrator.stop()
        await orchestrator.serve()

    asyncio.run(go())


# ---------------------------------------------------------------- the run's folder


def test_a_used_folder_is_refused_without_resume(tmp_path):
    """Also after a run without a job, and from the process that the user starts."""
    serve_briefly(config(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"holds an earlier run; .*--resume"):
        serve_briefly(config(tmp_path / "run"))
    serve_briefly(config(tmp_path / "run", resume=True))


def test_a_refused_endpoint_leaves_nothing_behind(tmp_path):
    """Neither a taken port, nor an address of another host, nor one beyond loopback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for endpoint in (f"tcp://127.0.0.1:{port}", "tcp://0.0.0.0:0", "http://127.0.0.1:1"):
            with pytest.raises(ConfigError):
                serve_briefly(config(tmp_path / "run", endpoint=endpoint))
            assert list(tmp_path.iterdir()) == [], endpoint
        (tmp_path / "mine").mkdir(0o700)
        (tmp_path / "mine" / "notes").touch()
        with pytest.raises(ConfigError, match="cannot bind"):
            serve_briefly(config(tmp_path / "mine", endpoint=f"tcp://127.0.0.1:{port}"))
        assert [f.name for f in (tmp_path / "mine").iterdir()] == ["notes"]
        serve_briefly(config(tmp_path / "used"))
        before = {f.name for f in (tmp_path / "used").iterdir()}
        used = config(tmp_path / "used", endpoint=f"tcp://127.0.0.1:{port}", resume=True)
        with pytest.raises(ConfigError, match="cannot bind"):
            serve_briefly(used)
        assert {f.name for f in (tmp_path / "used").iterdir()} == before
    serve_briefly(config(tmp_path / "mine"))


# ---------------------------------------------------------------- addresses for others


@pytest.fixture
def own_address(monkeypatch):
    """This host's address on the route to any other host; its own addresses are loopback."""

    def towards(host: str) -> str:
        return "127.0.0.1" if host in ("127.0.0.1", "localhost") else OWN

    monkeypatch.setattr(interfaces, "address_towards", towards)


@pytest.mark.usefixtures("own_address")
def test_a_wildcard_is_never_handed_out():
    assert interfaces.reachable_host("0.0.0.0", towards="head") == OWN
    assert interfaces.reachable_host("0.0.0.0", towards="127.0.0.1") == OWN, "the default route"
    assert interfaces.reachable_host("0.0.0.0", towards="0.0.0.0") == OWN
    assert interfaces.reachable_host("10.0.0.4", towards="head") == "10.0.0.4"
    assert interfaces.reachable_host("host-a") == "host-a"
    assert interfaces.reachable_url("tcp://0.0.0.0:401") == f"tcp://{OWN}:401"
    assert interfaces.reachable_url("tcp://[fe80::7]:401") == "tcp://[fe80::7]:401"


def test_without_a_route_it_is_loopback(monkeypatch):
    def no_route(host: str) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(interfaces, "address_towards", no_route)
    assert interfaces.reachable_host("0.0.0.0", towards="head") == "127.0.0.1"
    assert interfaces.reachable_host("::", towards="head") == "::1"


def test_the_endpoint_of_a_wildcard_is_one_that_others_reach(tmp_path):
    """And the resumed orchestrator binds the wildcard again, at the same port."""
    keys, run = tmp_path / "keys", tmp_path / "run"
    assert forked.run("keys", keys).returncode == 0
    options = ["--set", "orchestrator.endpoint=tcp://0.0.0.0:0"]
    options += ["--set", f"orchestrator.curve_dir={keys / 'orchestrator'}"]
    process = start_serve(run, *options)
    try:
        endpoint = endpoint_in(run)
        assert "0.0.0.0" not in endpoint
        process.terminate()
        assert process.wait(20) == 0
        process = start_serve(run, *options, "--stop-on-term")
        port = int(endpoint.rpartition(":")[2])
        bound = f"tcp://0.0.0.0:{port}"
        assert (run / "bound").read_text() == bound and endpoint_in(run) == endpoint
    finally:
        process.kill()
        process.wait(10)


def test_a_trainer_listens_at_one_address():
    with pytest.raises(ValidationError, match="give the one at which the inference workers"):
        TrainerConfig(model="m", host="0.0.0.0")


# ---------------------------------------------------------------- whom a wait is for


def test_a_wait_names_whom_it_is_for_and_how_to_start_them(run, caplog):
    """In the client too, which asked for no progress; then every 30 s."""
    job_id = run.client.submit(InitialSync())
    with pytest.raises(TimeoutError):
        run.client.wait(job_id, timeout_s=1.0)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "splice.client"]
    assert "trainer is not connected: start it with `splice trainer run.toml`" in said
    assert "`splice inference run.toml --index 0`" in said
    assert f"SPLICE_ENDPOINT={run.endpoint}" in said
    run.replica(run.trainer())
    assert run.client.wait(job_id, timeout_s=20).alias == "m@0"


def test_a_wait_speaks_at_once_and_every_30_s(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    speaker = waiting.Waiting(
        lambda phase, detail: said.append(detail["text"]), endpoint="tcp://h:1", timeout_s=600
    )
    for second in range(100, 162):
        now[0] = float(second)
        speaker.say({"inference-1": "connected"})
    assert [text.rpartition(" in ")[2] for text in said] == ["600 s", "570 s", "540 s"]
    assert said[0].startswith("inference-1 is connected, but not ready yet")


def test_what_was_missing_is_in_the_failure(tmp_path):
    with Run(tmp_path) as run:
        run.orchestrator._versions._config = run.config.model_copy(update={"ready_timeout_s": 0.3})
        with pytest.raises(JobFailed, match=r"inference-0 \(not connected\)"):
            run.client.run(InitialSync(), timeout_s=20)


# ---------------------------------------------------------------- wrong token, port, name, model


def test_a_wrong_token_is_said_within_seconds(run):
    began_s = time.monotonic()
    with pytest.raises(NodeLost, match="start both sides with the same SPLICE_RUN_TOKEN"):
        SpliceClient(endpoint=run.endpoint, run_token="x" * 32).__enter__()
    assert time.monotonic() - began_s < 8


def test_a_wrong_port_is_said_during_the_wait(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hello = Hello(role="client", node_id="c", incarnation="i", run_token=TOKEN)
    link = NodeLink(endpoint=f"tcp://127.0.0.1:{port}", hello=hello)
    with pytest.raises(NodeLost, match="within 4 s; check that the run is up"):
        link.start(timeout_s=4.0)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "splice.link"]
    assert f"no answer yet from the orchestrator at tcp://127.0.0.1:{port}" in said
    assert "RUN_DIR/endpoint" in said


def test_another_served_name_is_refused_at_the_first_word(run):
    """Before vLLM starts, which takes minutes."""
    hello = Hello(
        role="inference", node_id="inference-0", incarnation="i", run_token=TOKEN, serves="other"
    )
    with pytest.raises(ConfigError, match="it serves 'other', this run publishes 'm'"):
        NodeLink(endpoint=run.endpoint, hello=hello).start(timeout_s=10)
    assert run.states() == {}


OTHER_SPLICE = """
import sys
from orchestrator.protocol import frames
frames.VERSION_FRAME = b"splice/999"
from orchestrator.protocol.messages import Hello
from orchestrator.protocol.node_link import NodeLink
hello = Hello(role="client", node_id="other", incarnation="i", run_token=sys.argv[2])
NodeLink(endpoint=sys.argv[1], hello=hello).start(timeout_s=30)
"""


def test_another_version_of_splice_is_refused_at_once(run):
    argv = [sys.executable, "-c", OTHER_SPLICE, run.endpoint, TOKEN]
    began_s = time.monotonic()
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError" in done.stderr and "this side 'splice/999'" in done.stderr
    assert time.monotonic() - began_s < 20, "it does not wait out its 30 s"


def start_trainer(config: dict[str, object], folder: Path) -> subprocess.CompletedProcess[str]:
    """`splice trainer` against an orchestrator that is not there."""
    file = run_file(folder / "run", trainer=config)
    address = {"SPLICE_ENDPOINT": "tcp://127.0.0.1:9", "SPLICE_RUN_TOKEN": TOKEN}
    return forked.run("trainer", file, env={**os.environ, **address})


def test_a_missing_model_is_said_before_the_orchestrator_is_looked_for(tmp_path):
    done = start_trainer({"model": str(tmp_path / "nowhere")}, tmp_path)
    assert done.returncode == 2 and "does not exist on this host" in done.stderr
    assert "orchestrator" not in done.stderr
    done = start_trainer({"model": str(tmp_path)}, tmp_path)
    assert done.returncode == 2 and "has no config.json" in done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model": "m", "lora": {"rnk": 4}}, "lora.rnk: unknown key; did you mean 'rank'?"),
        ({"model": "m", "dtype": "bf16"}, "dtype: got 'bf16'; allowed: float32, bfloat16; did you"),
        ({}, "model: missing"),
        ({"model": "m", "parallel": {"tensor": 2, "world_size": 1}}, "parallel: world_size 1 is"),
        ({"model": "m", "micro_batch_tokens": "max"}, "micro_batch_tokens: "),
    ],
)
def test_a_mistake_in_a_file_names_file_key_and_remedy(config, said, tmp_path):
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        read_json(file, TrainerConfig)
    text = str(caught.value)
    assert f"trainer.json: {said}" in text
    assert "pydantic" not in text and "http" not in text and "[type=" not in text


def test_a_mistake_in_an_option_is_one_sentence():
    sizes = ("trainer.parallel.tensor=2", "trainer.parallel.world_size=3")
    done = forked.run("smoke", "--set", "model=m", "--set", sizes[0], "--set", sizes[1])
    assert done.returncode == 2 and "world_size 3 is not a multiple of tensor 2" in done.stderr
    assert "pydantic" not in done.stderr


def test_the_smoke_run_takes_a_hub_id(tmp_path):
    """It finds the snapshot in the cache, and says what that snapshot lacks."""
    repo = tmp_path / "models--tiny--dense"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"vocab_size": 8, "num_attention_heads": 1}')
    hub = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = {}
    for model in ("tiny/dense", "tiny/other"):
        done = forked.run("smoke", "--model", model, env=hub)
        assert done.returncode == 2, done.stderr
        said[model] = done.stderr
    assert f"{snapshot} has no *.safetensors" in said["tiny/dense"]
    assert "tiny/other is not a local folder, and the Hub download failed" in said["tiny/other"]


def test_the_version():
    argv = [sys.executable, "-m", "splice", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"splice {importlib.metadata.version('splice')}\n"


def test_a_start_looks_at_the_roles_while_it_publishes(run):
    """A trainer that is given up does not come; the publication would wait for it for minutes."""
    said: list[str] = []

    def wait(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            raise NodeLost("trainer ended with code 3")

    began_s = time.monotonic()
    with pytest.raises(NodeLost, match="trainer ended with code 3"):
        up.publish_first(run.client, wait)
    assert time.monotonic() - began_s < 3 * LOOK_S
    assert set(said) == {"publishing m@0"}
