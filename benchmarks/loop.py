"""Whole RL steps on a cluster, one after the other: rollouts from the served alias, `TrainMerged`,
publication. Seconds and idle shares.

    step_s          from the first prompt to the new alias. Peer: rollouts and optimizer step of the
                    same steps alone, which is what two sides that take turns need at least; the
                    rest is what splice adds (saving, publishing, messages)
    trainer_idle    share of the step in which the trainer neither trains, saves nor sends. Peer:
                    the rollouts' share, which no alternating loop can avoid
    inference_idle  share in which vLLM neither samples nor receives. Peer: the optimizer step's
                    share, likewise
    rollout_s, train_s, save_s, pause_s, rest_s   the step's phases; they add up to it

The loop is strictly on-policy: rollouts of a step wait for the version before it, so the two sides
never work at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks import clusters
from benchmarks.harness import Case
from orchestrator.protocol.messages import InitialSyncJob, LossSpec, OptimParams, TrainMergedJob
from splice.cluster import Cluster
from splice.smoke import rollouts

Step = dict[str, float]
NUM_PROMPTS, GROUP_SIZE, LR = 8, 8, 1e-4
MAX_TOKENS = {"cpu": 32, "cuda": 512}
PHASES = ("rollout", "train", "save", "pause")


def run(*, device: str, small: bool) -> list[Case]:
    """Shapes from SPLICE_BENCH_SHAPES (8b on cuda, tiny else)."""
    usual = "tiny" if small or device == "cpu" else "8b"
    shapes = usual if small else os.environ.get("SPLICE_BENCH_SHAPES", usual)
    cases: list[Case] = []
    for shape in shapes.split(","):
        with TemporaryDirectory(prefix="splice-bench-") as folder:
            steps, settings = _steps(shape, Path(folder), device=device, count=3 if small else 7)
        cases += _cases(shape, steps, settings)
    return cases


def _steps(
    shape: str, folder: Path, *, device: str, count: int
) -> tuple[list[Step], dict[str, object]]:
    """`count` steps after one that is not counted."""
    max_tokens = MAX_TOKENS[device]
    steps, tokens = [], 0
    with Cluster(clusters.cluster_config(shape, folder, device=device)) as cluster:
        cluster.client.run(InitialSyncJob())
        url = cluster.base_urls[0]
        rewards = asyncio.run(_rewards(url))
        for number in range(1, count + 2):
            began = time.monotonic()
            groups = asyncio.run(_sample(url, rewards, seed=number, max_tokens=max_tokens))
            batch = rollouts.build_batch(groups)
            sampled = time.monotonic()
            loss = LossSpec(name="grpo", allowed_token_ids=tuple(sorted(rewards)))
            job = TrainMergedJob(loss=loss, optim=OptimParams(lr=LR), tensors=batch.specs)
            seconds = cluster.client.run(job, buffers=batch.buffers)["seconds"]
            ended = time.monotonic()
            step = {
                "step": ended - began,
                "rollout": sampled - began,
                **{k: float(v) for k, v in seconds.items() if k != "rollout"},
            }
            steps.append(step)
            tokens = batch.num_tokens
    settings = {
        "prompts": NUM_PROMPTS,
        "group_size": GROUP_SIZE,
        "max_tokens": max_tokens,
        "tokens_in_last_batch": tokens,
        "steps": [{k: round(v, 5) for k, v in s.items()} for s in steps[1:]],
    }
    return steps[1:], settings


def _cases(shape: str, steps: list[Step], settings: dict[str, object]) -> list[Case]:
    def case(
        metric: str,
        unit: str,
        value: Callable[[Step], float],
        peer: str | None = None,
        than: Callable[[Step], float] | None = None,
    ) -> Case:
        return Case(
            name=f"{shape}/lora-all/1to1",
            metric=metric,
            unit=unit,
            samples=tuple(map(value, steps)),
            peer=peer,
            peer_samples=tuple(map(than, steps)) if than else (),
            settings=settings if metric == "step_s" else {},
        )

    def idle(step: Step, *busy: str) -> float:
        return max(0.0, 1.0 - sum(step[name] for name in busy) / step["step"])

    return [
        case(
            "step_s",
            "s",
            lambda s: s["step"],
            "rollout and train alone",
            lambda s: s["rollout"] + s["train"],
        ),
        case(
            "trainer_idle",
            "share",
            lambda s: idle(s, "train", "save", "send"),
            "rollout's share",
            lambda s: s["rollout"] / s["step"],
        ),
        case(
            "inference_idle",
            "share",
            lambda s: idle(s, "rollout", "pause"),
            "train's share",
            lambda s: s["train"] / s["step"],
        ),
        *(case(f"{name}_s", "s", itemgetter(name)) for name in PHASES),
        case("rest_s", "s", lambda s: s["step"] - sum(s[name] for name in PHASES)),
    ]


async def _rewards(base_url: str) -> dict[int, float]:
    async with httpx.AsyncClient(base_url=base_url, timeout=60.0) as http:
        return await rollouts.answer_token_ids(http, model=clusters.NAME)


async def _sample(
    base_url: str, rewards: dict[int, float], *, seed: int, max_tokens: int
) -> list[list[rollouts.Rollout]]:
    prompts = rollouts.choose_prompts(count=NUM_PROMPTS, seed=seed)
    async with httpx.AsyncClient(base_url=base_url, timeout=600.0) as http:
        return await rollouts.sample(
            http,
            model=clusters.NAME,
            prompts=prompts,
            rewards=rewards,
            group_size=GROUP_SIZE,
            max_tokens=max_tokens,
            seed=seed,
        )
