"""Against a loop written by hand, and answers that span updates, on a real cluster."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from splice import ASK, LossSpec, OptimParams, completions_of, grpo_batch
from splice.rl import Loop, LoopConfig, SamplingConfig, decisions
from splice.rl.asking import Place, request_seed
from splice.rl.checker import check
from tests.rl.conftest import NAME, tiny_cluster
from tests.rl.weights import digest

pytestmark = pytest.mark.timeout(900)
ROWS = [{"prompt": [5 + k, 17, 33, 101, 7]} for k in range(4)]
SAMPLING = SamplingConfig(max_tokens=10, seed=11, extra={"ignore_eos": True})
LOSS, OPTIM = LossSpec(name="grpo"), OptimParams(lr=5e-3)
STEPS, GROUPS, SIZE = 2, 2, 4


def even(row, completion) -> float:
    return sum(t % 2 == 0 for t in completion.answer_ids) / len(completion.answer_ids)


def plain_loop(client, url) -> None:
    """Train, publish, sample, one request after the other."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for step in range(STEPS):
            groups = []
            for group in range(step * GROUPS, (step + 1) * GROUPS):
                row, answers = ROWS[group % len(ROWS)], []
                for sample in range(SIZE):
                    body = {"model": NAME, "max_tokens": 10, "temperature": 1.0, **SAMPLING.extra}
                    place = Place(step=step, group=group, sample=sample, prompt=group % len(ROWS))
                    body["seed"] = request_seed(SAMPLING, place)
                    reply = http.post("/v1/completions", json={**body, **row, **ASK})
                    (answer,) = completions_of(reply.raise_for_status().json())
                    answers.append((answer, even(row, answer)))
                groups.append(answers)
            client.train_merged(grpo_batch(groups), LOSS, OPTIM)


async def strict_loop(client, folder) -> list:
    config = LoopConfig(
        max_staleness=0,
        groups_per_step=GROUPS,
        group_size=SIZE,
        steps=STEPS,
        sampling=SAMPLING,
        max_in_flight=1,  # as the plain one, so that vLLM computes the same batches
    )
    options = {"prompts": ROWS, "reward": even, "config": config, "loss": LOSS, "optim": OPTIM}
    async with Loop(client, folder, **options) as loop:
        return [step async for step in loop]


def test_staleness_zero_is_the_plain_loop_bit_for_bit(cluster, tmp_path):
    client = cluster.client
    client.save_checkpoint(str(tmp_path / "start"))
    client.export_hf(str(tmp_path / "before"))
    plain_loop(client, cluster.base_urls[0])
    client.export_hf(str(tmp_path / "plain"))
    client.load_checkpoint(str(tmp_path / "start"))
    client.publish()
    steps = asyncio.run(strict_loop(client, tmp_path / "loop"))
    client.export_hf(str(tmp_path / "ours"))
    assert digest(tmp_path / "ours") == digest(tmp_path / "plain") != digest(tmp_path / "before")
    assert [step.metrics["staleness_max"] for step in steps] == [0.0] * STEPS
    found = check(decisions.read(tmp_path / "loop" / decisions.LOG))
    assert found.violations == [] and found.max_staleness == 0


async def spanning(client, folder) -> list:
    """Answers much longer than a step, so that updates come in the middle of them."""
    config = LoopConfig(
        max_staleness=1,
        groups_per_step=1,
        group_size=4,
        steps=4,
        sampling=SamplingConfig(max_tokens=120, extra={"ignore_eos": True}),
    )
    options = {"prompts": ROWS, "reward": even, "config": config}
    loss = LossSpec(name="truncated_importance_sampling")
    async with Loop(client, folder, loss=loss, optim=OPTIM, **options) as loop:
        return [step async for step in loop]


def check_spans(steps, folder) -> None:
    rollouts = [r for step in steps for group in step.groups for r in group]
    assert all(sum(n for _, n in r.spans) == len(r.completion.answer_ids) == 120 for r in rollouts)
    assert any(len(r.spans) == 2 for r in rollouts), "no answer spans an update"
    found = check(decisions.read(folder / decisions.LOG))
    assert found.violations == [] and found.max_staleness == 1


def test_answers_span_updates_and_say_so(cluster, tmp_path):
    check_spans(asyncio.run(spanning(cluster.client, tmp_path)), tmp_path)


@pytest.mark.whole
def test_answers_span_updates_with_kept_keys_and_values(models, tmp_path):
    with tiny_cluster(
        models["qwen3"], tmp_path / "run", publication={"pause_mode": "keep_kv"}
    ) as cluster:
        check_spans(asyncio.run(spanning(cluster.client, tmp_path / "loop")), tmp_path / "loop")
