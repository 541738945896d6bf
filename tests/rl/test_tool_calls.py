"""Tool calls of an answer: from vLLM's events to the turn, its sequence, samples and tables."""

from __future__ import annotations

import json

from splice import completions_of
from splice.rl import browse, samples, trl_reward
from splice.rl.rollouts import Rollout
from splice.rl.sampler import SamplingConfig, _Made, _request
from splice.rl.turns import Turn, sequences_of

CALLS = [
    {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "call-2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]
PARTS = [
    {"content": "Let me see."},
    {"tool_calls": [{"index": 0, "id": "call-1", "type": "function",
                     "function": {"name": "add", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
    {},
    {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}},
                    {"index": 1, "id": "call-2", "type": "function",
                     "function": {"name": "stop", "arguments": "{}"}}]},
]  # fmt: skip # one event in each line
"""Deltas of vLLM 0.32's stream. A token that its parser keeps back has an empty one."""


def turn(number: int = 0, prompt: tuple[int, ...] = (7,)) -> Turn:
    made = _Made(name="m", replica="inference-0")
    made.add({"model": "m@3", "prompt_token_ids": list(prompt), "choices": [{"delta": {}}]})
    for token, delta in enumerate(PARTS):
        choice = {"delta": delta, "token_ids": [token], "logprobs": {"content": [{"logprob": -1}]}}
        made.add({"model": "m@3", "choices": [choice]})
    made.add({"model": "m@3", "choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    answer = made.answer(temperature=1.0)
    return Turn(number=number, attempt=0, completion=answer.completion, spans=answer.spans)


def test_pieces_of_a_stream_become_calls() -> None:
    found = turn()
    assert list(found.tool_calls) == CALLS and found.text == "Let me see."
    assert found.completion.answer_ids == tuple(range(5)), "with the tokens that a parser kept back"
    assert found.message == {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS}
    assert hash(found.completion) == hash(found.completion)


def test_a_whole_reply_has_them_too() -> None:
    message = {"content": None, "tool_calls": CALLS}
    choice = {"message": message, "token_ids": [1], "logprobs": {"content": [{"logprob": -1}]}}
    (found,) = completions_of({"choices": [choice | {"prompt_token_ids": [7]}]})
    assert list(found.tool_calls) == CALLS and found.text == ""


def test_nothing_is_lost_on_the_way_to_samples_and_tables() -> None:
    first = turn()
    second = turn(1, (*first.token_ids, 9))
    (sequence,) = sequences_of([first, second])
    assert list(sequence.tool_calls) == [*CALLS, *CALLS]
    rollout = Rollout(
        row={"messages": [{"role": "user", "content": "?"}, first.message]},
        group=0,
        sample=0,
        attempt=0,
        completion=sequence,
        spans=((3, 10),),
        reward=1.0,
        sequences=(sequence,),
        turns=(first, second),
    )
    line = json.loads(samples.line_of(1, rollout))
    assert line["tool_calls"] == [*CALLS, *CALLS]
    assert [calls for *_, calls in line["turns"]] == [CALLS, CALLS]
    (none, ids, *_), (shared, rest, *_) = line["turns"]
    assert none == 0 and ids == list(first.completion.prompt_ids)
    assert ids[:shared] + rest == list(second.completion.prompt_ids)
    assert shared == len(ids), "a prompt has the earlier one, which is not written again"
    assert line["prompt"][1]["tool_calls"] == CALLS
    assert json.loads(samples.row_of(1, rollout)["tool_calls"]) == [*CALLS, *CALLS]
    shown = browse.answer_of(line)
    assert shown.count('add({"a": 1})') == 2 and "Let me see." in shown
    assert 'assistant: Let me see.\nadd({"a": 1})' in browse.text_of(line["prompt"])
    assert browse.answer_of({"answer": "of an older sample"}) == "of an older sample"


def test_a_reward_sees_them() -> None:
    def calls(completions, **_):
        return [len(completion[0]["tool_calls"]) for completion in completions]

    row = {"messages": [{"role": "user", "content": "?"}]}
    assert trl_reward(calls)(row, turn().completion) == 2.0


def test_with_tools_each_token_has_its_event() -> None:
    """Some of vLLM's parsers lose text where an event has several tokens."""
    row = {"messages": [{"role": "user", "content": "?"}]}

    def interval(extra: dict, **more) -> int:
        return _request(row, SamplingConfig(extra=extra), None, more)[1]["stream_interval"]

    tools = [{"type": "function", "function": {"name": "add"}}]
    assert interval({"tools": tools}) == interval({}, tools=tools) == 1
    assert interval({}) > 1 and interval({"tools": tools, "stream_interval": 9}) == 9
