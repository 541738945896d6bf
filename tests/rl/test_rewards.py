"""TRL's reward functions."""

from __future__ import annotations

import asyncio

import pytest

from splice import Completion
from splice.rl import trl_reward

ROW = {"prompt": "2 + 3 =", "answer": "5"}
SAID = Completion(prompt_ids=(1,), answer_ids=(7, 8), logprobs=(0.0, 0.0), text=" 5")


def lists(prompts, completions, answer, **kwargs):
    assert prompts == ["2 + 3 ="] and kwargs["completion_ids"] == [[7, 8]]
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def single(prompt, completion, answer, **row):
    return float(completion.strip() == answer and prompt == "2 + 3 =")


def bare(completions):
    return [len(completions[0])]


def no_opinion(completions, **kwargs):
    return [None]


def test_lists_and_single_ones_with_weights():
    assert trl_reward(lists)(ROW, SAID) == 1.0
    assert trl_reward(single)(ROW, SAID) == 1.0
    assert trl_reward(lists, bare, no_opinion, weights=[2.0, 0.5, 9.0])(ROW, SAID) == 3.0


def test_a_conversation_is_a_list_of_messages():
    def chat(prompts, completions, **kwargs):
        assert prompts[0][-1]["content"] == "2 + 3"
        return [float(completions[0][0] == {"role": "assistant", "content": " 5"})]

    assert trl_reward(chat)({"messages": [{"role": "user", "content": "2 + 3"}]}, SAID) == 1.0


def test_coroutines():
    async def slow(completions, **kwargs):
        await asyncio.sleep(0)
        return [0.25]

    assert asyncio.run(trl_reward(slow, lists)(ROW, SAID)) == 1.25


def test_plain_functions_come_before_coroutines():
    """The loop calls the whole on a thread, and awaits what it returns."""
    called = []

    class Judge:
        async def __call__(self, completion):
            called.append("judge")
            return 0.5

    def plain(completions):
        called.append("plain")
        return [1.0]

    rest = trl_reward(Judge(), plain)(ROW, SAID)
    assert called == ["plain"]
    assert asyncio.run(rest) == 1.5


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="neither `completions` nor `completion`"):
        trl_reward(lambda answer: 1.0)
    with pytest.raises(ValueError, match="1 reward functions and 2 weights"):
        trl_reward(lists, weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="returned None"):
        trl_reward(no_opinion)(ROW, SAID)
