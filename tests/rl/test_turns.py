"""From turns to sequences and a batch: predicted by hand."""

from __future__ import annotations

import array

import pytest

from splice import Completion, grpo_batch
from splice.client.batches import Routing
from splice.rl import Scored, Turn
from splice.rl.sampler import _Made
from splice.rl.turns import scored, sequences_of


def turn(number, prompt, answer, *, version=0, **more) -> Turn:
    completion = Completion(
        prompt_ids=tuple(prompt),
        answer_ids=tuple(answer),
        logprobs=tuple(-0.125 * token for token in answer),
        text=str(answer),
        finish_reason="stop",
        versions=(version,),
        **more,
    )
    return Turn(number=number, attempt=0, completion=completion, spans=((version, len(answer)),))


def test_a_conversation_is_one_sequence():
    """Three turns whose prompts begin with everything before, and what a tool gave between."""
    first = turn(0, [1, 2], [3, 4], version=4)
    second = turn(1, [1, 2, 3, 4, 50, 51], [5], version=4)
    third = turn(2, [1, 2, 3, 4, 50, 51, 5], [6, 7], version=5)
    (sequence,) = sequences_of([third, first, second])
    assert sequence.prompt_ids == (1, 2)
    assert sequence.answer_ids == (3, 4, 50, 51, 5, 6, 7)
    assert sequence.sampled == (True, True, False, False, True, True, True)
    assert sequence.logprobs == (-0.375, -0.5, 0.0, 0.0, -0.625, -0.75, -0.875)
    assert sequence.versions == (4, 5) and sequence.text == "[3, 4]\n[5]\n[6, 7]"


def test_a_sequence_knows_which_version_made_each_token():
    """A later turn's prompt is computed again, so another version there mixes nothing."""
    first = turn(0, [1, 2], [3, 4], version=4, made_by=(4, -6))
    second = turn(1, [1, 2, 3, 4, 50], [5], version=5, made_by=(5,))
    (sequence,) = sequences_of([first, second])
    assert sequence.made_by == (4, -6, 0, 5)
    (unknown,) = sequences_of([first, turn(1, [1, 2, 3, 4, 50], [5])])
    assert unknown.made_by == ()


def test_tokens_after_an_update_are_mixed_also_if_it_came_within_the_prompt():
    def made_by(*events):
        made = _Made(name="m", replica="inference-0")
        made.add({"model": "m@3", "prompt_token_ids": [1], "choices": [{"text": ""}]})
        for said in events:
            choice = {"text": "a", "token_ids": [7, 8], "logprobs": {"token_logprobs": [-1, -1]}}
            made.add({**said, "choices": [choice]})
        made.add({"model": "m@3", "choices": [{"finish_reason": "stop"}]})
        return made.answer(temperature=1.0).completion.made_by

    assert made_by({"model": "m@3"}, {"model": "m@3"}) == (3, 3, 3, 3)
    assert made_by({"model": "m@3"}, {"model": "m@4"}) == (3, 3, -5, -5)
    assert made_by({"model": "m@4", "versions": [3, 4]}) == (-5, -5)


def test_another_encoding_of_the_history_is_another_sequence():
    """The template gives 34 where the model said 3, 4."""
    made = sequences_of([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 34, 50], [5])])
    assert [(s.prompt_ids, s.answer_ids, s.sampled) for s in made] == [
        ((1, 2), (3, 4), ()),
        ((1, 2, 34, 50), (5,), ()),
    ]


def test_a_prefix_that_two_branches_share_trains_once():
    root = turn(0, [1], [2, 3])
    left, right = turn(1, [1, 2, 3, 8], [4]), turn(2, [1, 2, 3, 9], [5])
    made = sequences_of([root, left, right])
    assert [(s.prompt_ids, s.answer_ids, s.sampled) for s in made] == [
        ((1,), (2, 3, 8, 4), (True, True, False, True)),
        ((1, 2, 3, 9), (5,), ()),
    ]


def test_equal_prompts_and_other_temperatures_stay_apart():
    same = [turn(0, [1], [2]), turn(1, [1], [2])]
    assert len(sequences_of(same)) == 2
    warmer = turn(1, [1, 2], [3], temperature=0.5)
    assert [s.temperature for s in sequences_of([turn(0, [1], [2]), warmer])] == [1.0, 0.5]


def test_an_earlier_token_keeps_the_experts_that_sampled_it():
    def routed(*experts):
        return Routing(experts=array.array("i", experts), layers=1, top_k=1)

    first = turn(0, [1], [2, 3], routing=routed(10, 11))
    second = turn(1, [1, 2, 3, 9], [4], routing=routed(20, 21, 22, 23))
    (sequence,) = sequences_of([first, second])
    assert list(sequence.routing.experts) == [10, 11, 22, 23]


def test_the_batch_of_a_conversation():
    """Two rollouts: one of two sequences with reward 1, one with reward 0."""
    several = sequences_of([turn(0, [1], [2]), turn(1, [1, 2, 9], [3]), turn(2, [7], [8])])
    other = turn(0, [1], [4]).completion
    batch = grpo_batch([[(several, 1.0), (other, 0.0)]])
    values = {
        spec.name: list(array.array("i" if spec.dtype == "int32" else "f", buffer))
        for spec, buffer in zip(batch.specs, batch.buffers, strict=True)
    }
    assert values["tokens"] == [1, 2, 9, 3, 7, 8, 1, 4]
    assert values["sequence_lengths"] == [4, 2, 2]
    assert values["loss_mask"] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert values["advantages"] == pytest.approx([0, 1, 0, 1, 0, 1, 0, -1], abs=1e-5)
    assert values["sampler_logprobs"] == [0, -0.25, 0, -0.375, 0, -1.0, 0, -0.5]


def test_what_an_environment_may_return():
    turns = [turn(0, [1], [2]), turn(1, [3], [4])]
    assert scored(1, turns) == (Scored(reward=1.0, turns=tuple(turns)),)
    parts = [Scored(reward=1.0, turns=turns[:1], name="a"), Scored(reward=0.0, turns=turns[1:])]
    assert scored(parts, turns) == tuple(parts)
    greedy = [turn(0, [1], [2], temperature=0.0)]
    assert scored(1.0, greedy, trains=False)
    for result, own, said in (
        (1.0, [], "without a turn"),
        ([], turns, "without a turn"),
        (float("nan"), turns, "the reward is nan"),
        (Scored(reward=1.0, turns=[turn(0, [1], [2])]), turns, "did not sample"),
        ([parts[0], parts[0]], turns, "a turn twice"),
        (1.0, greedy, "temperature 0.0"),
    ):
        with pytest.raises(ValueError, match=said):
            scored(result, own)
