"""The CUDA locks and the containers, as far as a machine without GPU and docker can check them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"trainer": ("trainer", "trainer-cuda"), "inference": ("inference",)}
SHARED = {
    "trainer": ("megatron-core", "megatron-bridge", "transformers", "pyzmq", "pydantic", "msgpack"),
    "inference": ("pyzmq", "pydantic", "msgpack"),
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]


def pins(*names: str) -> dict[str, str]:
    """Canonical package name -> version, over the lock files `requirements/NAME.lock`."""
    found: dict[str, str] = {}
    for name in names:
        for line in (LOCKS / f"{name}.lock").read_text(encoding="utf-8").splitlines():
            if not line or line.startswith("#"):
                continue
            package, equals, version = line.partition("==")
            assert equals and re.fullmatch(r"[\w.+]+", version), f"{name}.lock: not a pin: {line}"
            key = canonicalize_name(package)
            assert key not in found, f"{name}.lock names {package} twice"
            found[key] = version
    return found


def cuda_pins(role: str) -> dict[str, str]:
    return pins("trainer-cuda", "trainer-cuda-build") if role == "trainer" else pins(f"{role}-cuda")


@pytest.mark.parametrize("role", list(EXTRAS))
def test_a_cuda_lock_pins_what_pyproject_declares(role: str) -> None:
    declared = list(PROJECT["dependencies"])
    for extra in EXTRAS[role]:
        declared += PROJECT["optional-dependencies"][extra]
    locked = cuda_pins(role)
    for requirement in map(Requirement, declared):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{role}-cuda.lock does not pin {requirement.name}"
        assert Version(version) in requirement.specifier, f"{requirement}, locked at {version}"


@pytest.mark.parametrize("role", list(SHARED))
def test_cpu_and_cuda_locks_agree(role: str) -> None:
    cpu, cuda = pins(role), cuda_pins(role)
    assert {n: cpu[n] for n in SHARED[role]} == {n: cuda[n] for n in SHARED[role]}


def test_both_sides_have_one_torch_for_cuda() -> None:
    trainer, inference = cuda_pins("trainer"), cuda_pins("inference")
    for name in ("torch", "triton", "nvidia-nccl-cu13"):
        assert trainer[name] == inference[name]


@pytest.mark.parametrize("lock", ["trainer-cuda", "inference-cuda", "trainer-cuda-build"])
def test_every_pin_can_be_installed(lock: str, tmp_path: Path) -> None:
    """pip resolves the lock for x86-64 and Python 3.12 and installs nothing.

    Without a package index this test fails. The build lock holds source distributions, whose
    metadata needs a build: pip must list the version.
    """
    if lock.endswith("-build"):
        for name, version in pins(lock).items():
            done = _pip("index", "versions", name)
            assert re.search(rf"[ ,(]{re.escape(version)}[,)\n]", done.stdout), done.stdout
        return
    wheels = [argument for p in PLATFORMS for argument in ("--platform", p)]
    wheels += ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    dry = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--target", str(tmp_path)]
    _pip("install", *dry, *wheels, "-r", str(LOCKS / f"{lock}.lock"))


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"pip {arguments[0]}: {done.stderr[-2000:]}"
    return done


@pytest.mark.parametrize("role", list(EXTRAS))
def test_a_dockerfile_names_files_that_exist(role: str) -> None:
    text = (DOCKER / f"{role}.Dockerfile").read_text(encoding="utf-8")
    named = re.findall(r"requirements/[\w.-]+", text)
    assert f"requirements/{role}-cuda.lock" in named
    for name in named:
        assert (ROOT / name).is_file(), name
    assert os.access(ROOT / "requirements/make_env.sh", os.X_OK)


def test_compose_runs_commands_that_splice_has() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"orchestrator", "trainer", "inference"}
    for service in services.values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve().is_file()
        command, *rest = service["command"]
        options = [word for word in rest if word.startswith("--")]
        done = subprocess.run(
            [sys.executable, "-m", "splice", command, *rest, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        assert all(option in done.stdout for option in options), done.stdout
