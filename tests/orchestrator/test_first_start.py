"""What a new user meets before the first job: run folders, endpoints, addresses, mistakes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError

from orchestrator.config import OrchestratorConfig
from orchestrator.errors import ConfigError
from orchestrator.processes import interfaces
from orchestrator.protocol.config import TrainerConfig
from orchestrator.publication.config import PublicationConfig
from orchestrator.server import Orchestrator
from tests.orchestrator.run import TOKEN
from tests.orchestrator.serving import endpoint_in, start_serve

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
    argv = [sys.executable, "-m", "splice", "keys", str(keys)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    options = ["--endpoint", "tcp://0.0.0.0:0", "--curve-dir", str(keys / "orchestrator")]
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
