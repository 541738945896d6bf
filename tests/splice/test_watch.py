"""`splice watch`: what a frame holds, as lines and as tables."""

from __future__ import annotations

import collections
import io
import json
import logging
import re
import time
from typing import ClassVar

import pytest
from rich.console import Console

from orchestrator.protocol import memory
from orchestrator.protocol.messages import Hello, InitialSync
from orchestrator.protocol.node_link import NodeLink
from splice.rl import decisions
from splice.watch import render
from tests import forked
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN

GIB = 2**30


def watch(run, *options):
    done = forked.run("watch", run.dir, "--once", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_frame_has_nodes_versions_and_the_last_publication(run, caplog):
    run.replica(run.trainer())
    assert "serves nothing yet" in watch(run)
    run.client.run(InitialSync())
    caplog.set_level(logging.INFO, "splice.orchestrator")
    result = run.client.run(JOB, buffers=BUFFERS)
    lines = [r.message for r in caplog.records if " is served: " in r.message]
    assert len(lines) == 1 and result.alias in lines[0], "one line for each publication"
    found = json.loads(watch(run, "--json"))
    row, first = found["publications"]
    assert first["version"] == 0 and found["alias"] == result.alias
    assert row["version"] == result.version and row["mode"] == result.mode
    assert row["bytes_sent"] == result.bytes_sent
    assert row["pause_s"] == result.seconds["pause"]
    assert (row["num_verified"], row["num_tensors"]) == (
        result.num_verified,
        result.num_tensors,
    )
    assert found["training"] == result.metrics and found["job"] is None
    assert {n["node_id"]: n["state"] for n in found["nodes"]} == {
        "trainer": "ready",
        "inference-0": "ready",
    }
    text = watch(run)
    assert f"serves {result.alias}" in text and "no job runs" in text
    assert f"@{result.version}" in text and "inference-0" in text


class Nvml:
    """A driver with two GPUs, as far as `pynvml` tells."""

    class NVMLError(Exception):
        pass

    Info = collections.namedtuple("Info", "used total")
    uses: ClassVar = {0: Info(5 * GIB, 141 * GIB), "GPU-b": Info(7 * GIB, 141 * GIB)}

    def __init__(self, *, is_there: bool) -> None:
        self.is_there = is_there

    def nvmlInit(self):
        if not self.is_there:
            raise self.NVMLError

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self.uses[handle]


def test_the_memory_of_gpus(monkeypatch):
    monkeypatch.setattr(memory, "pynvml", Nvml(is_there=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b")
    found = memory.of_gpus(memory.visible_gpus())
    assert [(m.device, m.used_bytes // GIB) for m in found] == [("GPU 0", 5), ("GPU GPU-b", 7)]
    assert memory.visible_gpus([3]) == ("3",), "a node's own GPUs first"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [m.device for m in memory.of_gpus(memory.visible_gpus())] == ["GPU 0"], "all"
    monkeypatch.setattr(memory, "pynvml", Nvml(is_there=False))
    assert memory.of_gpus(()) == ()


@pytest.mark.gpu1
def test_the_memory_of_a_real_gpu():
    (found, *_) = memory.of_gpus(())
    assert 0 < found.used_bytes < found.total_bytes and found.total_bytes > GIB


def test_heartbeats_bring_the_memory(run):
    uses = (memory.MemoryUse(device="GPU 3", used_bytes=5 * GIB, total_bytes=141 * GIB),)
    meter = memory.Meter(lambda: uses)
    hello = Hello(role="inference", node_id="r", incarnation="i", run_token=TOKEN)
    with NodeLink(endpoint=run.endpoint, hello=hello, meter=meter):
        assert soon(lambda: run.client.status().nodes[0].memory == uses, 30)
        assert "GPU 3: 5.0 of 141.0 GiB" in watch(run)
    meter.close()


def test_the_memory_of_processes():
    (use,) = memory.of_processes()
    assert use.device == "host" and 2**20 < use.used_bytes < use.total_bytes


def test_the_loop_says_who_waits(run):
    run.replica(run.trainer())
    assert "loop:" not in watch(run)
    status = run.dir / decisions.LOOP_DIR / decisions.STATUS
    status.parent.mkdir()
    said = {"step": 3, "text": "trainer waits 40%", "at": time.time()}
    status.write_text(json.dumps(said))
    assert "loop: no loop runs in this folder; " in watch(run)
    log = decisions.DecisionLog(status.with_name(decisions.LOG))
    assert re.search(r"loop: \d+ s ago: trainer waits 40%", watch(run))
    assert json.loads(watch(run, "--json"))["loop"]["step"] == 3
    done = forked.run("status", run.dir)
    assert "s ago: trainer waits 40%" in done.stdout
    log.close()


def test_names_and_urls_of_nodes_are_whole_on_a_narrow_terminal():
    memory_use = {"device": "2", "used_bytes": 70 * GIB, "total_bytes": 80 * GIB}
    node = {"node_id": "inference-0", "state": "ready", "host": "gpu-host-0001", "gpus": ["2", "3"]}
    url = "http://192.168.100.101:41001"
    node |= {"memory": [memory_use], "detail": {"base_url": url}}
    found = {"run_dir": "/run", "endpoint": "tcp://127.0.0.1:40001", "alias": "tiny@2"}
    found |= {"publication": "idle", "queued_jobs": 0, "apart": "", "trouble": "", "nodes": [node]}
    console = Console(width=80, file=io.StringIO())
    console.print(render(found), soft_wrap=True)
    said = console.file.getvalue()
    assert "inference-0" in said and url in said
