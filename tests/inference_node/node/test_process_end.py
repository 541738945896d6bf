"""However the node ends, no process is left; and it says immediately what cannot start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.protocol import messages as m
from tests.inference_node import tiny
from tests.inference_node.harness import TOKEN, Node, moved


def test_a_vllm_that_cannot_be_told_what_to_serve_is_ended_and_a_killed_node_takes_the_next_with_it(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, "dense", module="tests.inference_node.impatient")
    try:
        node.wait_ready()
        node.publish(0, node.base)
        assert node.prepare(1).kind == "Completed"
        assert node.receive(1, moved(node.base, 1))[0].message.kind == "Completed"
        stuck = next(p for p in node.family if "inference_node.server" in " ".join(p.cmdline()))
        stuck.suspend()
        node.router.send(m.AbortUpdate(reason="the digests differ"))
        node.wait_ready(2)  # it holds version 1, which nobody wants, and may wake up
        assert not stuck.is_running() and node.router.unready
        assert node.post("/tokenize", {"model": "tiny", "prompt": "w3"}).status_code == 503
        node.leave()
        family = node.family
        assert len(family) >= 2
        node.process.kill()
        _, alive = psutil.wait_procs(family, timeout=15.0)
        assert not alive, alive
    finally:
        for process in node.family:
            if process.is_running():
                process.kill()
        node.process.kill()
        node.process.wait(10.0)
        node.router.close()


def _run(
    tmp_path: Path, router: str = "tcp://127.0.0.1:9", node_id: str = "i", **changes: object
) -> subprocess.CompletedProcess[str]:
    config = {"model": str(tmp_path / "model"), "name": "tiny", **changes}
    (tmp_path / "c.json").write_text(json.dumps(config))
    argv = [
        sys.executable,
        "-m",
        "inference_node",
        "--endpoint",
        router,
        "--node-id",
        node_id,
        "--config",
        str(tmp_path / "c.json"),
    ]
    env = {**os.environ, "SPLICE_RUN_TOKEN": TOKEN}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120.0, check=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "/no/such/model"}, "config.json"),
        ({"name": "a@1"}, "'a@1' cannot be the served name"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"node_id": "a b"}, "'a b' is no id"),
    ],
)
def test_bad_configuration_is_refused_at_once(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    tiny.write_checkpoint(tmp_path / "model", "dense")
    done = _run(tmp_path, **changes)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_an_orchestrator_that_does_not_answer_is_worth_another_start(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "model", "dense")
    done = _run(tmp_path)
    assert (
        done.returncode == os.EX_TEMPFAIL
        and "no answer yet from the orchestrator at tcp://127.0.0.1:9" in done.stderr
        and "--resume` starts a stopped one" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "model", "dense")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(tmp_path, port=port)
    assert done.returncode == 2 and str(port) in done.stderr and "Traceback" not in done.stderr
