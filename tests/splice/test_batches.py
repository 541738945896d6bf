"""Batches from OpenAI answers: the sampler's own tokens and log-probs, and GRPO's advantages."""

from __future__ import annotations

import array
from dataclasses import replace

import pytest

from orchestrator.errors import ConfigError
from splice import Completion, completions_of, grpo_batch

COMPLETION = {
    "index": 0, "text": " maybe", "finish_reason": "length", "token_ids": [7, 8],
    "prompt_token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-0.5, -0.25]},
}  # fmt: skip  # one row
CHAT = {
    "index": 0, "finish_reason": "stop", "token_ids": [7, 8],
    "message": {"role": "assistant", "content": " maybe"},
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
}  # fmt: skip  # one row
WANTED = {"prompt_ids": (1, 2, 3), "answer_ids": (7, 8), "logprobs": (-0.5, -0.25)}


def test_both_routes_give_the_same_completion():
    (plain,) = completions_of({"choices": [COMPLETION]}, temperature=1.0)
    (chat,) = completions_of({"choices": [CHAT], "prompt_token_ids": [1, 2, 3]})
    assert plain == Completion(**WANTED, text=" maybe", finish_reason="length")
    assert chat == Completion(**WANTED, text=" maybe", finish_reason="stop")


@pytest.mark.parametrize(
    ("said", "versions", "made_by"),
    [
        ({"model": "tiny@3"}, (3,), (3, 3)),
        ({"model": "t@4", "versions": [3, 4]}, (3, 4), (-5, -5)),
        ({}, (), ()),
    ],
)
def test_an_answer_knows_its_versions(said, versions, made_by):
    (found,) = completions_of({"choices": [COMPLETION], **said})
    assert (found.versions, found.made_by) == (versions, made_by)


def test_a_batch_says_which_version_made_a_token_if_all_answers_do():
    known, other = (Completion(**WANTED, made_by=v) for v in ((0, -2), (3, 3)))
    batch = grpo_batch([[(known, 1.0), (other, 0.0)]])
    assert batch.specs[-1].name == "versions"
    found = array.array("i", batch.buffers[-1]).tolist()
    assert found == [0, 0, 0, 0, -2, 0, 0, 0, 3, 3]
    batch = grpo_batch([[(other, 1.0), (replace(other, made_by=(4, 4)), 0.0)]])
    assert (batch.specs[-1].name, batch.specs[-1].shape) == ("versions", (2,)), "one for each"
    assert array.array("i", batch.buffers[-1]).tolist() == [3, 4]
    given = Completion(**WANTED)
    cut, long = (Completion(**WANTED, made_by=v) for v in ((3,), (3, 3, 3)))  # by a user's replace
    for pair in ((known, given), (cut, long)):
        batch = grpo_batch([[(answer, float(i)) for i, answer in enumerate(pair)]])
        assert "versions" not in [spec.name for spec in batch.specs]


@pytest.mark.parametrize("lacks", ["token_ids", "prompt_token_ids", "logprobs"])
def test_a_reply_without_what_a_batch_needs_says_what_to_send(lacks):
    with pytest.raises(ConfigError, match=r"send .*'return_token_ids': True"):
        completions_of({"choices": [COMPLETION | {lacks: None}]})


@pytest.mark.parametrize(
    "reply",
    [
        {"error": {"message": "max_tokens must be at least 1", "code": 400}},
        {"object": "error", "message": "max_tokens must be at least 1", "code": 400},
        {"detail": "max_tokens must be at least 1"},
        {"error": "max_tokens must be at least 1"},
    ],
)
def test_the_body_of_an_error_says_what_it_says(reply):
    with pytest.raises(ConfigError, match=r"answered with an error.*max_tokens must be at least 1"):
        completions_of(reply)


def test_log_probs_that_do_not_match_the_tokens_are_refused():
    broken = COMPLETION | {"logprobs": {"token_logprobs": [-0.5]}}
    with pytest.raises(ConfigError, match="2 token ids and 1 log-probs"):
        completions_of({"choices": [broken]})


def completion(*answer: int) -> Completion:
    return Completion(
        prompt_ids=(1, 2),
        answer_ids=answer,
        logprobs=tuple(-0.5 for _ in answer),
        temperature=1.0 / len(answer) if answer else 1.0,
    )


def test_the_buffers_of_a_batch():
    """Two groups, worked out by hand. An answer without tokens counts in its group's mean only."""
    groups = [
        [(completion(5), 1.0), (completion(6, 7), 0.0)],
        [(completion(8), 3.0), (completion(), 1.0)],
    ]
    batch = grpo_batch(groups)
    kinds = {"int32": "i", "float32": "f"}
    found = {
        spec.name: array.array(kinds[spec.dtype], buffer).tolist()
        for spec, buffer in zip(batch.specs, batch.buffers, strict=True)
    }
    assert [len(b) for b in batch.buffers] == [spec.nbytes for spec in batch.specs]
    assert found["tokens"] == [1, 2, 5, 1, 2, 6, 7, 1, 2, 8]
    assert found["sequence_lengths"] == [3, 4, 3]
    assert found["loss_mask"] == [0, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert found["advantages"] == pytest.approx([0, 0, 1, 0, 0, -1, -1, 0, 0, 1], abs=1e-5)
    assert found["sampler_logprobs"] == [0, 0, -0.5, 0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert found["temperatures"] == [1.0, 0.5, 1.0]
    advantages = grpo_batch(groups, divides_by_std=False).buffers[3]
    assert array.array("f", advantages).tolist() == [0, 0, 0.5, 0, 0, -0.5, -0.5, 0, 0, 1]
    with pytest.raises(ConfigError, match="no answer has a token"):
        grpo_batch([[(completion(), 1.0)]])
