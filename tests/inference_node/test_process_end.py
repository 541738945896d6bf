"""However the supervisor ends, nobody is left behind; and it says at once what cannot start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.inference_node import tiny
from tests.inference_node.harness import TOKEN, Node


def test_a_killed_supervisor_takes_vllm_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path, "dense")
    try:
        node.wait_ready()
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


def _run(tmp_path: Path, router: str = "tcp://127.0.0.1:9", **changes: object) -> subprocess.CompletedProcess[str]:
    config = {"model": str(tmp_path / "model"), "name": "tiny", **changes}
    (tmp_path / "c.json").write_text(json.dumps(config))
    argv = [
        sys.executable,
        "-m",
        "inference_node",
        "--endpoint",
        router,
        "--node-id",
        "i",
        "--config",
        str(tmp_path / "c.json"),
    ]
    env = {**os.environ, "SPLICE_RUN_TOKEN": TOKEN}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60.0, check=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"model": "/no/such/model"}, "config.json"), ({"name": "a@b"}, "name"), ({"tensor_parallel": 0}, "tensor_parallel")],
)
def test_bad_configuration_is_refused_at_once(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    tiny.write_checkpoint(tmp_path / "model", "dense")
    done = _run(tmp_path, **changes)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "model", "dense")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(tmp_path, port=port)
    assert done.returncode == 2 and str(port) in done.stderr and "Traceback" not in done.stderr
