"""`splice smoke`, as a user runs it: dense and MoE to @2 with the proof; a trainer killed in a
transfer; Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from orchestrator.processes.python import python_command
from tests.e2e.conftest import INFERENCE_PYTHON, TRAINER_PYTHON

pytestmark = pytest.mark.timeout(900)


def argv(*more):
    pythons = (f"trainer.python={TRAINER_PYTHON}", f"inference.python={INFERENCE_PYTHON}")
    return python_command(sys.executable, "-m", "splice", "smoke", *sets(*pythons), *map(str, more))


def sets(*overrides):
    return [word for override in overrides for word in ("--set", override)]


def smoke(tmp_path, *more, timeout=400):
    """Run it; returns (exit code, output, report)."""
    report = tmp_path / "report.json"
    command = argv("--report", report, *sets(f"run_dir={tmp_path / 'run'}"), *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(report.read_text()) if report.exists() else None,
    )


ATTENTION = 'trainer.lora.targets=["q_proj", "k_proj", "v_proj", "o_proj"]'


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("qwen3_moe", ()),
        ("qwen3", sets(ATTENTION, "publication.mode=shadow", "trainer.parallel.tensor=2")),
    ],
)
def test_from_checkpoint_to_version_two(arch, more, models, tmp_path):
    code, output, report = smoke(tmp_path, "--model", models[arch], *more)
    assert code == 0, output
    assert report["ok"] and report["failures"] == []
    rows = report["versions"]
    assert [r["alias"] for r in rows] == ["tiny@0", "tiny@1", "tiny@2"]
    for row in rows:
        assert row["max_logprob_diff"] < 1e-4 and row["unverified"] == {} and row["attempts"] == 1
        assert row["states"][-2:] == ["verified", "committed"]
        assert {"export", "merge", "wire", "apply", "verify", "pause", "total"} <= set(
            row["seconds"]
        )
    whole = rows[0]
    assert (
        whole["mode"] == "in_place"
        and [r["mode"] for r in rows[1:]] == [("shadow" if more else "in_place")] * 2
    )
    assert 0 <= whole["canary"]["inference-0"] < 1e-4 and not any(r["canary"] for r in rows[1:])
    assert not more or "serves nothing" in whole["why_in_place"]
    assert whole["sent"] == "full" and whole["num_verified"] == whole["num_tensors"]
    for row in rows[1:]:
        assert (
            row["sent"] == "changed"
            and row["num_verified"] == row["num_tensors"] < whole["num_tensors"]
        )
        assert row["bytes_sent"] < (0.5 if more else 1) * whole["bytes_sent"]
        assert (
            row["diff_to_previous"] > 1e-3 and row["metrics"]["grad_norm"] > 0 and row["reward"] > 0
        )
        assert row["metrics"]["lr"] == 5e-3 and row["metrics"]["tokens_per_s"] > 0
        assert row["metrics"]["staleness_steps"] == 0
    classes = {"q", "k", "v", "o", "gate", "up", "down", "embedding", "head", "norm"}
    if arch == "qwen3_moe":
        classes |= {"first_expert", "last_expert"}
    assert classes - set(report["proof"]["perturbed"]) <= {
        "head"
    }  # a tied model has no separate head
    assert (
        report["packages"]["trainer"]["megatron-core"] and report["packages"]["inference-0"]["vllm"]
    )
    assert "tiny@2" in output
    log = (tmp_path / "run/logs/orchestrator.log").read_text()  # of two trainer ranks as well
    assert "the layout is not used" not in log and re.search(
        r"layout: \d+ chunks, .*'(live|staged)': [1-9]", log
    )


def test_full_parameters_to_version_one(models, tmp_path):
    """Served is what the trainer exports as an HF checkpoint, scored by transformers; and it is not
    @0.
    """
    code, output, report = smoke(
        tmp_path,
        "--model",
        models["qwen3"],
        *sets("trainer.finetuning_type=full"),
        "--lr",
        "1e-3",
        "--steps",
        "1",
    )
    assert code == 0, output
    assert report["ok"] and [r["alias"] for r in report["versions"]] == ["tiny@0", "tiny@1"]
    assert all(r["max_logprob_diff"] < 1e-4 for r in report["versions"])
    assert report["versions"][1]["diff_to_previous"] > 1e-3


def test_a_trainer_killed_in_the_middle_of_a_transfer(models, tmp_path):
    """The faulty trainer kills itself with SIGKILL between the two chunks of @1, once. vLLM's
    process must be the same one throughout.

    All parameters are trained: the tensors that an adapter changes would fit into one chunk, and
    nothing be loaded when it dies.
    """
    marker = tmp_path / "killed"
    os.environ["SPLICE_TEST_KILL_MARKER"] = str(marker)
    try:
        code, output, report = smoke(
            tmp_path,
            "--model",
            models["qwen3_moe"],
            *sets("trainer.finetuning_type=full"),
            "--trainer-module",
            "tests.e2e.faulty_trainer",
        )
    finally:
        del os.environ["SPLICE_TEST_KILL_MARKER"]
    assert marker.exists(), "the failure was not injected"
    assert code == 0, output
    rows = {r["alias"]: r for r in report["versions"]}
    assert rows["tiny@1"]["attempts"] == 2 and rows["tiny@2"]["attempts"] == 1
    assert all(r["max_logprob_diff"] < 1e-4 for r in rows.values())
    log = (tmp_path / "run/logs/inference-0.vllm.log").read_text()
    assert log.count("Application startup complete") == 1, "vLLM was restarted"
    poisoned = (tmp_path / "run/logs/orchestrator.log").read_text()
    assert "failed while applying, now poisoned" in poisoned


def test_ctrl_c_leaves_nothing_behind(models, tmp_path):
    command = argv(
        "--model", models["qwen3"], *sets(f"run_dir={tmp_path / 'run'}"), "--steps", "50"
    )
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "is served" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 4, "".join(seen)
    ports = {c.laddr.port for p in family for c in _listening(p)}
    assert ports
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(seen) + rest
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and any(_alive(p) for p in family):
        time.sleep(0.1)
    assert [p for p in family if _alive(p)] == []
    assert not ports & {
        c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }


def _listening(process):
    try:
        return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def _alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model", "/nowhere"], "model /nowhere does not exist"),
        (sets("trainer.parallel.tensor=3"), "attention heads"),
        (["--steps", "0"], "--steps"),
        (sets('trainer.lora.targets=["embed_tokens"]'), "targets"),
        (sets("inference.python=/nowhere/python"), "inference.python: no interpreter"),
        (sets("trainer.init=random"), "--no-proof"),
        (sets("trainer.lora.rnk=3"), "did you mean 'rank'?"),
    ],
)
def test_bad_input_starts_nothing(more, says, models, tmp_path):
    base = ["--model", models["qwen3"]] if "--model" not in more else []
    started = time.monotonic()
    code, output, _ = smoke(tmp_path, *base, *more, timeout=60)
    assert code == 2 and says in output.replace("\n", " ")
    assert time.monotonic() - started < 30 and not (tmp_path / "run/logs").exists()
