"""Conversations on a real cluster: the trainer computes what the server sampled, turn by turn."""

from __future__ import annotations

import asyncio

import pytest

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, RequestRefused, SamplingConfig, decisions, samples
from splice.rl.checker import check

pytestmark = pytest.mark.timeout(600)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROWS = [{"prompt": [5 + k, 17, 33, 101, 7]} for k in range(3)]
TOOL = [40, 41, 42]


def loop_of(cluster, folder, environment, *, rows=ROWS, **more) -> Loop:
    config = LoopConfig(
        group_size=3,
        groups_per_step=2,
        sampling=SamplingConfig(max_tokens=8, extra={"ignore_eos": True}),
        **{"steps": 3, **more},
    )
    return Loop(
        cluster.client,
        folder,
        prompts=rows,
        environment=environment,
        config=config,
        loss=LossSpec(name="truncated_importance_sampling"),
        optim=OptimParams(lr=1e-3),
    )


def even(turn) -> float:
    return sum(t % 2 == 0 for t in turn.completion.answer_ids) / len(turn.completion.answer_ids)


async def all_steps(loop: Loop) -> list:
    async with loop:
        return [step async for step in loop]


def test_three_turns_train_as_one_sequence(cluster, tmp_path):
    """On policy, the gap to the sampler is rounding: mask, tokens and log-probs are aligned."""

    async def play(row, sample) -> float:
        first = await sample(row["prompt"])
        second = await sample([*first.token_ids, *TOOL], max_tokens=5)
        third = await sample([*second.token_ids, *TOOL], max_tokens=3)
        return even(third)

    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, play, max_staleness=0)))
    for step in steps:
        assert step.metrics["num_sequences"] == 6 and step.metrics["tokens"] == 6 * 16
        assert step.metrics["logprob_gap_max"] < 1e-3
    found = check(decisions.read(tmp_path / decisions.LOG))
    assert found.violations == [] and found.tokens == 3 * 6 * 16 and found.max_staleness == 0


def test_messages_train_as_the_template_encodes_them(cluster, tmp_path):
    """Byte tokens of a random model seldom come back as they were, so turns stay apart or join;
    either way the gap is rounding."""
    rows = [{"messages": [{"role": "user", "content": "Answer with yes or no:"}]}]

    async def play(row, sample) -> float:
        messages = list(row["messages"])
        first = await sample(messages=messages)
        messages += [{"role": "assistant", "content": first.text}]
        messages += [{"role": "user", "content": " Again:"}]
        return even(await sample(messages=messages))

    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, play, rows=rows, max_staleness=0)))
    for step in steps:
        assert step.metrics["logprob_gap_max"] < 1e-3 and step.metrics["tokens"] == 6 * 16
        sequences = [len(r.sequences) for group in step.groups for r in group]
        assert step.metrics["num_sequences"] == sum(sequences)
    assert check(decisions.read(tmp_path / decisions.LOG)).violations == []


def test_an_environment_may_handle_a_prompt_that_is_too_long(cluster, tmp_path):
    async def play(row, sample) -> float:
        first = await sample(row["prompt"])
        try:
            await sample([*first.token_ids, *range(5, 350), *range(5, 350)])
        except RequestRefused:
            return 0.5 + even(first)
        raise AssertionError("it was not refused")

    asyncio.run(all_steps(loop_of(cluster, tmp_path, play, steps=1)))
    found = check(decisions.read(tmp_path / decisions.LOG))
    assert found.violations == [] and (found.trained, found.turns_left_out) == (6, 6)


def test_tool_calls_keep_their_structure(cluster, tmp_path):
    """vLLM must call the tool, and parses what the model says; ids, names and arguments arrive in
    the turn, in the next request and in the samples."""
    rows = [{"messages": [{"role": "user", "content": "Add one to two."}]}]
    asked, called = {"type": "function", "function": {"name": "add"}}, []

    async def play(row, sample) -> float:
        messages = list(row["messages"])
        fields = {"tools": [ADD], "tool_choice": asked, "max_tokens": 60, "ignore_eos": False}
        turn = await sample(messages=messages, **fields)
        (call,) = turn.tool_calls
        assert call["id"] and call["function"]["arguments"]  # of a random model
        assert turn.message["tool_calls"] == [call]
        called.append(call)
        messages += [turn.message]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": " three"}]
        return even(await sample(messages=messages))

    asyncio.run(all_steps(loop_of(cluster, tmp_path, play, rows=rows, steps=1)))
    kept = samples.read(tmp_path / samples.SAMPLES, 1)
    found = [call for sample in kept for *_, calls in sample["turns"] for call in calls]
    assert len(found) == 6 and sorted(c["id"] for c in found) == sorted(c["id"] for c in called)
    assert all(c["type"] == "function" and c["function"]["name"] == "add" for c in found)
