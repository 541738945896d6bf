"""The roles of a run: what each one runs, with which environment, on how many GPUs and hosts.

    run.toml -> roles_of -> Cluster (this host), slurm, ray_launcher, kubernetes

A launcher only places roles and keeps them alive. What only it knows, such as a host's address, it
adds to the command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import ConfigError
from orchestrator.processes.launch import NodeProcess
from orchestrator.processes.python import python_command
from orchestrator.processes.restarts import RestartBudget
from splice.client.run_file import CLIENT_KEYS, RunFile

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
CURVE = "SPLICE_CURVE_DIR"
_PORT = re.compile(r":(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run, on each of its hosts.

    Attributes:
        kind: subcommand of `splice`; for a node also its table of run.toml.
        command: arguments of `splice`. The launcher adds settings that only it knows: the numbers
            of the GPUs, and the address of a trainer's host.
        gpus: on each host.
        copies: number of times that the GPUs are listed in its table.
        keys: folder of its CURVE keys. None: it needs none.
    """

    name: str
    kind: Literal["serve", "trainer", "inference", "router", "train", "sft"]
    command: tuple[str, ...]
    gpus: int = 0
    hosts: int = 1
    copies: int = 1
    keys: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What it needs in addition to its host's environment."""
        return ENVIRONMENT | ({} if self.keys is None else {CURVE: str(self.keys)})

    def process(
        self,
        run_dir: Path,
        *more: str,
        python: str | Path = sys.executable,
        env: Mapping[str, str] = {},
        restarts: int,
    ) -> NodeProcess:
        """Return the process on this host.

        Args:
            more: more arguments.
            env: more variables.
            restarts: after crashes within an hour.
        """
        return NodeProcess(
            name=self.name,
            argv=python_command(python, "-m", "splice", *self.command, *more),
            env={**self.environment, **env},
            log_file=run_dir / "logs" / f"{self.name}.log",
            restarts=RestartBudget(restarts),
        )


def roles_of(
    run: RunFile, file: Path | str, *, is_spread: bool = False, data_folder: Path | None = None
) -> list[Role]:
    """Return the roles of a run: the orchestrator, the trainer, inference nodes, the router, and
    the loop.

    Args:
        file: what the roles read: run.toml, or JSON with the same keys.
        is_spread: roles may be on different hosts.
        data_folder: folder that the loop's data and rewards are relative to. None: the run has no
            loop.

    Raises:
        ConfigError: the settings cannot work on several hosts.
    """
    if is_spread:
        check_several_hosts(run)

    def role(name: str, kind: Any, *more: str, **needs: int) -> Role:
        keys, command = None, (kind, str(file), *more)
        if is_spread and kind != "serve":
            keys = keys_of(run, CLIENT_KEYS if kind in ("router", run.LOOP) else name)
        if is_spread and kind in ("inference", "router"):
            command += ("--set", f"{kind}.host=0.0.0.0")
        return Role(name=name, kind=kind, command=command, keys=keys, **needs)

    trainer, inference = run.trainer, run.inference
    gpus = len(trainer.gpus) if trainer.device == "cuda" else 0
    hosts = trainer.parallel.world_size // gpus if gpus else 1
    each = inference.tensor_parallel if inference.device == "cuda" else 0
    copies = inference.replicas
    return [
        role("orchestrator", "serve", "--resume"),
        role("trainer", "trainer", gpus=gpus, hosts=hosts),
        *(
            role(f"inference-{i}", "inference", "--index", str(i), gpus=each, copies=copies)
            for i in range(copies)
        ),
        *([role("router", "router")] if run.has_router else []),
        *(
            [role("loop", run.LOOP, "--join", "--data-folder", str(data_folder))]
            if data_folder is not None
            else []
        ),
    ]


def before_trainer(run: RunFile) -> list[str]:
    """Return the inference nodes on a GPU of the trainer's, which must be ready before it starts.

    vLLM measures the GPU's free memory and fails if another process releases some meanwhile, as
    the trainer's probes do. vLLM takes a fraction of the GPU, and the trainer measures the rest.
    """
    if "cuda" not in (run.trainer.device, run.inference.device):
        return []
    return [
        f"inference-{i}"
        for i in range(run.inference.replicas)
        if set(run.inference_config(i).gpus) & set(run.trainer.gpus)
    ]


def refuse_many_hosts(roles: Sequence[Role], *, launcher: str) -> None:
    """Refuse a trainer on several hosts, which only Slurm starts.

    Raises:
        ConfigError: there is one.
    """
    if any(role.hosts > 1 for role in roles):
        raise ConfigError(
            f"a trainer on several hosts cannot be started with --on {launcher} yet; use --on slurm"
        )


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
            "`splice keys` made, because the other roles' folders are next to it"
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
