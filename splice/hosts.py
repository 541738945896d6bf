"""What a run on several hosts needs, whether Slurm, Ray or Kubernetes places its roles."""

from __future__ import annotations

import json
import re
from pathlib import Path

from orchestrator.errors import ConfigError
from splice.run_file import RunFile

CLIENT = "client"
"""The folder of `splice keys` that clients and the router take."""
_PORT = re.compile(r":(\d+)$")


def check_several_hosts(run: RunFile) -> int:
    """Check that other hosts can reach the orchestrator; returns its port.

    Raises:
        ConfigError: it is on loopback, has no fixed port, or has no keys.
    """
    endpoint, curve_dir = run.orchestrator.endpoint, run.orchestrator.curve_dir
    port = _PORT.search(endpoint)
    if port is None or port[1] == "0" or "127.0.0.1" in endpoint or "localhost" in endpoint:
        raise ConfigError(
            f"orchestrator.endpoint is {endpoint}: on loopback, or without a fixed port, where "
            'other hosts do not find it; set orchestrator.endpoint = "tcp://0.0.0.0:40001" and '
            "orchestrator.curve_dir"
        )
    if curve_dir is None:
        raise ConfigError("orchestrator.curve_dir is not set; `splice keys` makes the folder")
    if curve_dir.name != "orchestrator":
        raise ConfigError(
            f"orchestrator.curve_dir is {curve_dir}; it must be the folder `orchestrator` that "
            "`splice keys` made, because the other roles' folders are beside it"
        )
    return int(port[1])


def keys_of(run: RunFile, name: str) -> Path:
    """Return the folder of `splice keys` for a role: trainer, inference-K or client."""
    assert run.orchestrator.curve_dir is not None
    return run.orchestrator.curve_dir.parent / name


def numbered_from_0(run: RunFile) -> str:
    """Return the file, as JSON, for roles that each see only their own GPUs, from 0."""
    values = json.loads(run.model_dump_json())
    each = run.inference.tensor_parallel if run.inference.device == "cuda" else 0
    values["trainer"]["gpus"] = list(range(len(run.trainer.gpus)))
    values["inference"]["gpus"] = list(range(each)) * run.inference.replicas
    return json.dumps(values, indent=1)
