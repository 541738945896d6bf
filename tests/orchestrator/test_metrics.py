"""The orchestrator's numbers for Prometheus, scraped over HTTP."""

from __future__ import annotations

import json
import re
import socket
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.errors import JobFailed
from orchestrator.metrics import Metrics
from orchestrator.protocol.messages import InitialSync
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import BUFFERS, JOB, Run
from tests.readme import ROOT


class Measured(Run):
    def __init__(self, tmp_path, *, port=0, **more):
        super().__init__(tmp_path, **more)
        self.config = self.config.model_copy(update={"metrics_port": port})


@pytest.fixture
def run(tmp_path):
    with Measured(tmp_path) as r:
        yield r


def scrape(run) -> dict:
    """Name and labels -> value."""
    assert soon((run.dir / "metrics").exists)
    reply = httpx.get((run.dir / "metrics").read_text(), trust_env=False, timeout=20)
    assert reply.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_jobs_publications_nodes_and_the_loop(run):
    first = scrape(run)
    assert first["splice_orchestrator_answers",] == 1
    assert ("splice_served_version",) not in first, "nothing is served"
    run.replica(run.trainer())
    run.client.run(InitialSync())
    result = run.client.run(JOB, buffers=BUFFERS)
    with pytest.raises(JobFailed):
        run.client.run(InitialSync())
    (run.dir / "loop").mkdir()
    said = {"step": 7, "at": 5.0, "trainer_waits": 0.25, "sampler_waits": 0.5}
    said |= {"staleness_mean": 0.75, "staleness_max": 1.0}
    (run.dir / "loop" / "status.json").write_text(json.dumps(said))

    found = scrape(run)
    assert found["splice_served_version",] == result.version == 1
    assert found["splice_jobs_total", "InitialSync", "completed"] == 1
    assert found["splice_jobs_total", "InitialSync", "bad_input"] == 1
    assert found["splice_jobs_total", "TrainMerged", "completed"] == 1
    assert found["splice_publications_total", "served"] == 2
    assert found["splice_publication_pause_seconds_count",] == 2
    assert 0 < result.seconds["pause"] <= found["splice_publication_pause_seconds_sum",]
    assert found["splice_publication_bytes_total",] >= result.bytes_sent
    assert found["splice_nodes", "inference", "ready"] == 1
    assert found["splice_node_ready", "trainer", "trainer"] == 1
    assert found["splice_jobs_waiting",] == 0
    assert found["splice_loop_idle_ratio", "trainer"] == 0.25
    assert found["splice_loop_idle_ratio", "sampler"] == 0.5
    assert found["splice_loop_staleness_versions", "max"] == 1.0

    run.lose("inference-0")
    assert scrape(run)["splice_nodes", "inference", "lost"] == 1
    (run.dir / "loop" / "status.json").write_text("{")
    assert ("splice_loop_step",) not in scrape(run), "a broken file ends no scrape"


def test_the_grafana_file_asks_for_what_there_is(run):
    """Every metric of the exporter is in the dashboard, and no other one."""
    run.replica(run.trainer())
    run.client.run(InitialSync())
    (run.dir / "loop").mkdir()
    said = {"step": 7, "at": 5.0, "trainer_waits": 0.25, "sampler_waits": 0.5}
    said |= {"staleness_mean": 0.75, "staleness_max": 1.0}
    (run.dir / "loop" / "status.json").write_text(json.dumps(said))
    assert soon((run.dir / "metrics").exists)
    text = httpx.get((run.dir / "metrics").read_text(), trust_env=False, timeout=20).text
    families = [
        {sample.name for sample in family.samples}
        for family in text_string_to_metric_families(text)
    ]
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"splice_\w+", target["expr"])
    }
    # A node of this test says nothing of its memory; `test_memory_of_a_node` does.
    memory = {f"splice_node_memory_{what}_bytes" for what in ("used", "total")}
    assert asked - memory <= set().union(*families) and memory <= asked
    # A counter's time of creation is a family of its own.
    lacking = [names for names in families if not names & asked]
    assert all(name.endswith("_created") for names in lacking for name in names)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_memory_of_a_node(run):
    from orchestrator.protocol.messages import MemoryUse

    run.trainer()
    assert soon(lambda: "trainer" in run.states())
    use = MemoryUse(device="GPU 3", used_bytes=5, total_bytes=9)
    peer = run.orchestrator._router.peers["trainer"]
    assert soon(
        lambda: (
            setattr(peer, "memory", (use,))
            or ("splice_node_memory_used_bytes", "GPU 3", "trainer") in scrape(run)
        )
    )


def test_it_is_off_by_default_and_ends_with_the_run(tmp_path):
    with Run(tmp_path / "a") as off:
        off.client.status()
        assert not (off.dir / "metrics").exists()
    with Measured(tmp_path / "b") as on:
        scrape(on)
        url = (on.dir / "metrics").read_text()
        assert url.startswith("http://127.0.0.1:")
    assert not (on.dir / "metrics").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_taken_port_ends_nothing(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Measured(tmp_path, port=port) as run:
            assert run.client.status().name == "m"
    assert f"no metrics at http://127.0.0.1:{port}" in caplog.text


def test_what_is_in_the_way_of_its_file_ends_nothing(tmp_path):
    (tmp_path / "metrics").mkdir()
    metrics = Metrics(lambda: None, tmp_path)
    metrics.serve("127.0.0.1", 0)
    metrics.close()


def test_a_silent_client_holds_up_neither_jobs_nor_scrapes(run):
    scrape(run)
    host, port = (run.dir / "metrics").read_text()[7:].split("/")[0].split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        assert scrape(run)["splice_orchestrator_answers",] == 1
        run.replica(run.trainer())
        assert run.client.run(InitialSync()).version == 0
    finally:
        for connection in silent:
            connection.close()


def test_a_busy_event_loop_is_said(run, monkeypatch):
    monkeypatch.setattr("orchestrator.server.STATUS_S", 0.2)
    scrape(run)
    busy = threading.Event()
    run.loop.call_soon_threadsafe(lambda: (busy.set(), time.sleep(1.5)))
    assert busy.wait(5)
    assert scrape(run)["splice_orchestrator_answers",] == 0
    assert soon(lambda: scrape(run)["splice_orchestrator_answers",] == 1)
