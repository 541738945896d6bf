"""The CUDA locks and the containers, as far as a machine without GPU and docker can check them."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from tests import forked

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"trainer": ("trainer", "trainer-cuda"), "inference": ("inference",)}
STACKS = sorted(path.stem.rpartition("-")[2] for path in LOCKS.glob("inference-cuda-*.lock"))
SHARED = {
    "trainer": ("megatron-core", "megatron-bridge", "transformers", "pyzmq", "pydantic", "msgpack"),
    "inference": ("pyzmq", "pydantic", "msgpack"),
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PAGE = "application/vnd.pypi.simple.v1+json"
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


def cuda_pins(role: str, stack: str) -> dict[str, str]:
    lock = f"{role}-cuda-{stack}"
    return pins(lock, f"{lock}-build") if role == "trainer" else pins(lock)


def test_the_default_stack_has_locks() -> None:
    assert (LOCKS / "cuda-stack").read_text(encoding="utf-8").strip() in STACKS


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("role", list(EXTRAS))
def test_a_cuda_lock_pins_what_pyproject_declares(role: str, stack: str) -> None:
    declared = list(PROJECT["dependencies"])
    for extra in EXTRAS[role]:
        declared += PROJECT["optional-dependencies"][extra]
    if role == "trainer":  # installed by its own line
        page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
        declared += re.findall(r'pip install --no-deps "(megatron-bridge[^"]+)"', page)
        assert declared[-1].startswith("megatron-bridge")
    locked = cuda_pins(role, stack)
    for requirement in map(Requirement, declared):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{role}-cuda-{stack}.lock lacks {requirement.name}"
        assert Version(version) in requirement.specifier, f"{requirement}, locked at {version}"


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("role", list(SHARED))
def test_cpu_and_cuda_locks_agree(role: str, stack: str) -> None:
    cpu, cuda = pins(role), cuda_pins(role, stack)
    assert {n: cpu[n] for n in SHARED[role]} == {n: cuda[n] for n in SHARED[role]}


@pytest.mark.parametrize("stack", STACKS)
def test_both_sides_have_one_torch_for_cuda(stack: str) -> None:
    trainer, inference = cuda_pins("trainer", stack), cuda_pins("inference", stack)
    for name in ("torch", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"):
        assert trainer[name] == inference[name]


@pytest.mark.parametrize("lock", sorted(path.stem for path in LOCKS.glob("*-cuda-*.lock")))
def test_every_pin_can_be_installed(lock: str) -> None:
    """The package index has a file of each pin for x86-64 and Python 3.12; none is downloaded.

    Without a package index this test fails. The build lock holds source distributions.
    """
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    takes = {
        *cpython_tags((3, 12), platforms=PLATFORMS),
        *compatible_tags((3, 12), "cp312", PLATFORMS),
    }

    def lacks(http: httpx.Client, name: str, version: str) -> str:
        page = http.get(f"{index}/{name}/", headers={"Accept": PAGE}).raise_for_status().json()
        is_there = any(fits(f, version, takes, lock.endswith("-build")) for f in page["files"])
        return "" if is_there else f"{name}=={version}"

    with (
        httpx.Client(
            verify=ssl.create_default_context(), timeout=30, follow_redirects=True
        ) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        missing = pool.map(lambda pin: lacks(http, *pin), pins(lock).items(), timeout=240)
        assert not [name for name in missing if name]


def fits(file: dict[str, Any], version: str, takes: set[Tag], is_source: bool) -> bool:
    """Whether pip would install this version from the file."""
    name, tags = file["filename"], takes
    try:
        if is_source:
            _, own = parse_sdist_filename(name)
        else:
            _, own, _, tags = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename):  # an egg, or older than the rules
        return False
    if own != Version(version) or not tags & takes or file.get("yanked"):
        return False
    return Version("3.12") in SpecifierSet(file.get("requires-python") or "")


@pytest.mark.parametrize("role", list(EXTRAS))
def test_a_dockerfile_names_files_that_exist(role: str) -> None:
    text = (DOCKER / f"{role}.Dockerfile").read_text(encoding="utf-8")
    chosen = "$(cat requirements/cuda-stack)"
    assert f"requirements/{role}-cuda-{chosen}.lock" in text
    named = re.findall(r"requirements/[\w.-]+", text.replace(chosen, STACKS[0]))
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
        done = forked.run(command, *rest, "--help")
        assert done.returncode == 0, done.stderr
        assert all(option in done.stdout for option in options), done.stdout


def test_the_wheel_has_types_and_no_benchmarks(tmp_path: Path) -> None:
    ours = ("splice", "orchestrator", "trainer_node", "inference_node", "weight_transfer")
    for name in (*ours, "benchmarks"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=lambda folder, names: [
                n for n in names if not (Path(folder, n).is_dir() or n.endswith((".py", ".typed")))
            ],
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*argv, "--no-index", "--wheel-dir", "out", "."], cwd=tmp_path, check=True)
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if name.endswith(".py")} == set(ours)
    typed = {"splice", "orchestrator", "trainer_node"}  # where public names are from
    assert {f"{package}/py.typed" for package in typed} <= set(names)
