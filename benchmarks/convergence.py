"""Merged mode against a control in one process: yes-no-maybe from a warm start, reward, KL and
log-prob gap of every job.

`qwen3/...` and `qwen3_moe/...` are runs of the whole system (vLLM samples, Megatron trains, the
merged weights are published after each job) with a fresh adapter for each seed; their peer is
`benchmarks.convergence_control`, with the same prompts, loss and optimizer. Every case's
`settings["curves"]` has all jobs; `python -m benchmarks plot RESULT PNG` draws them. CPU only.
Needs SPLICE_INFERENCE_PYTHON or .venv-inference.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.convergence_control import Task, job_prompts
from benchmarks.harness import Case, Result, inference_python
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import (
    InitialSync,
    KlSpec,
    LossSpec,
    OptimParams,
    TrainMerged,
)
from splice.client.batches import grpo_batch
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.smoke import rollouts

ARCHS = ("qwen3", "qwen3_moe")
METRICS = {"reward": "share of the best", "kl": "nats", "logprob_gap": "nats"}
LAST = 5
PEER = "transformers + PEFT in one process"
Curve = dict[str, list[float]]


def run(*, device: str, small: bool) -> list[Case]:
    """Rewards of the last jobs and over all of them, KL and largest log-prob gap, each next to the
    control's.
    """
    if device != "cpu":
        raise ConfigError(
            "the convergence benchmark compares numbers, not speed, and runs on the CPU: leave "
            "--device out"
        )
    jobs, merged_seeds, control_seeds = (3, 1, 1) if small else (20, 3, 5)
    cases = []
    for arch in ARCHS[:1] if small else ARCHS:
        with TemporaryDirectory() as folder:
            model = _warm_model(arch, Path(folder))
            control = [
                _control(model, seed=s, jobs=jobs, work=Path(folder)) for s in range(control_seeds)
            ]
            merged = [
                merged_run(model, seed=s, jobs=jobs, work=Path(folder) / f"run-{s}")
                for s in range(merged_seeds)
            ]
        cases += _cases(arch, merged, control, jobs=jobs)
    return cases


def _cases(arch: str, merged: list[Curve], control: list[Curve], *, jobs: int) -> list[Case]:
    settings = {
        "jobs": jobs,
        "task": asdict(Task()),
        "curves": {"splice": merged, "control": control},
    }

    def case(metric: str, unit: str, measure: Any, **settings: Any) -> Case:
        ours, theirs = (tuple(measure(c) for c in curves) for curves in (merged, control))
        return Case(
            name=f"{arch}/merged",
            metric=metric,
            unit=unit,
            samples=ours,
            peer=PEER,
            peer_samples=theirs,
            settings=settings,
        )

    return [
        case(
            f"reward_last_{LAST}",
            METRICS["reward"],
            lambda c: fmean(c["reward"][-LAST:]),
            **settings,
        ),
        case("reward_all_jobs", METRICS["reward"], lambda c: fmean(c["reward"])),
        case("kl_median", METRICS["kl"], lambda c: sorted(c["kl"])[len(c["kl"]) // 2]),
        case("logprob_gap_max", METRICS["logprob_gap"], lambda c: max(c["logprob_gap"])),
    ]


def _python(*argv: object) -> None:
    subprocess.run(
        [sys.executable, "-m", *map(str, argv)],
        check=True,
        timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def _warm_model(arch: str, folder: Path) -> Path:
    _python("trainer_node.tools.make_checkpoint", "--arch", arch, "--out", folder / "base")
    _python(
        "benchmarks.convergence_control",
        "warm-start",
        "--model",
        folder / "base",
        "--out",
        folder / "warm",
    )
    return folder / "warm"


def _control(model: Path, *, seed: int, jobs: int, work: Path) -> Curve:
    out = work / f"control-{seed}.json"
    _python(
        "benchmarks.convergence_control",
        "run",
        "--model",
        model,
        "--seed",
        seed,
        "--jobs",
        jobs,
        "--out",
        out,
    )
    rows = json.loads(out.read_text())["jobs"]
    return {name: [row[name] for row in rows] for name in METRICS}


def merged_run(model: Path, *, seed: int, jobs: int, work: Path) -> Curve:
    """`jobs` rounds of rollouts from the served alias and `TrainMerged`, on a cluster
    of its own.
    """
    task = Task()
    with Cluster(_run_file(model, seed=seed, work=work, task=task)) as cluster:
        cluster.client.run(InitialSync())
        rewards = asyncio.run(_answer_ids(cluster.base_urls[0]))
        curve: Curve = {name: [] for name in METRICS}
        for job in range(1, jobs + 1):
            prompts = job_prompts(seed, job, task.num_prompts)
            groups = asyncio.run(
                _sample(cluster.base_urls[0], prompts, rewards, task, seed=1000 * seed + job)
            )
            versions = rollouts.versions_of(groups)
            if versions != {job - 1}:
                raise RuntimeError(
                    f"job {job} was sampled from versions {versions}, not from {job - 1} alone"
                )
            batch = grpo_batch(groups)
            spec = TrainMerged(loss=_loss(task), optim=_optim(task), tensors=batch.specs)
            metrics = cluster.client.run(spec, buffers=batch.buffers).metrics
            curve["reward"].append(rollouts.mean_reward(groups))
            curve["kl"].append(metrics["kl_mean"])
            curve["logprob_gap"].append(metrics["logprob_gap_max"])
    return curve


def _run_file(model: Path, *, seed: int, work: Path, task: Task) -> RunFile:
    return RunFile(
        name="tiny",
        model=model,
        run_dir=work,
        trainer={
            "admission": "skip",
            "lora": {"rank": task.rank, "alpha": task.alpha},
            "seed": seed,
        },
        inference={"python": inference_python(), "load_format": "dummy"},
    )


def _loss(task: Task) -> LossSpec:
    kl = KlSpec(coefficient=task.kl_coefficient, estimator="k3", reference="base")
    return LossSpec(name="grpo", clip_low=task.clip, clip_high=task.clip, kl=kl)


def _optim(task: Task) -> OptimParams:
    return OptimParams(
        lr=task.lr, beta1=task.beta1, beta2=task.beta2, max_grad_norm=task.max_grad_norm
    )


async def _answer_ids(base_url: str) -> dict[int, float]:
    async with httpx.AsyncClient(base_url=base_url, timeout=60.0, trust_env=False) as http:
        return await rollouts.answer_token_ids(http, model="tiny")


async def _sample(
    base_url: str, prompts: list[str], rewards: dict[int, float], task: Task, *, seed: int
) -> list[list[rollouts.Scored]]:
    async with httpx.AsyncClient(base_url=base_url, timeout=120.0, trust_env=False) as http:
        return await rollouts.sample(
            http,
            model="tiny",
            prompts=prompts,
            rewards=rewards,
            group_size=task.group_size,
            max_tokens=1,
            seed=seed,
            restrict=False,
            temperature=task.temperature,
        )


def plot(result: Result, path: Path) -> None:
    """A row for each model, a column for each metric: the control's seeds in grey, merged mode's in
    colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [c for c in result.cases if "curves" in c.settings]
    figure, axes = plt.subplots(
        len(cases), len(METRICS), figsize=(11, 3 * len(cases)), squeeze=False
    )
    for row, case in zip(axes, cases, strict=True):
        for axis, (metric, unit) in zip(row, METRICS.items(), strict=True):
            for label, colour in (("control", "tab:gray"), ("splice", "tab:blue")):
                for number, curve in enumerate(case.settings["curves"][label]):
                    values = curve[metric]
                    axis.plot(
                        range(1, len(values) + 1),
                        values,
                        color=colour,
                        alpha=0.7,
                        label=label if number == 0 else None,
                    )
            axis.set_title(f"{case.name.partition('/')[0]}: {metric.replace('_', ' ')}", fontsize=9)
            axis.set_xlabel("job", fontsize=8)
            axis.set_ylabel(unit, fontsize=8)
            if metric != "reward":
                axis.set_yscale("symlog", linthresh=1e-6 if metric == "logprob_gap" else 1e-2)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"yes-no-maybe, {result.device}, {result.commit[:9]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
