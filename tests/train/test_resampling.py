"""Which answers `splice replay --sample` repeats, and how it compares them. `test_resample.py` of
e2e runs it."""

from __future__ import annotations

import array
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec, OptimParams, RunJob, TrainMerged
from splice.client.batches import Completion
from splice.client.batches import batch_of as made_of
from splice.client.run_file import RunFile
from splice.rl.asking import Place, request_seed
from splice.rl.config import SamplingConfig
from splice.rl.rollouts import Rollout
from splice.rl.samples import line_of
from splice.train import resampling
from splice.train.resampling import Answer, batch_of, plan
from trainer_node.ranks.lockstep import packed

SAMPLING = {"max_tokens": 9, "temperature": 0.5, "seed": 3, "extra": {"top_k": 4}}
PROMPT = (5, 6)


def rollout(prompt=PROMPT, answer=(7, 8), *, made=(2, 2), sample=0, **more: Any) -> Rollout:
    place = Place(step=1, group=4, sample=sample, prompt=0)
    said = Completion(
        prompt_ids=prompt,
        answer_ids=answer,
        logprobs=tuple(-0.123456 * (at + 1) for at in range(len(answer))),
        made_by=made,
    )
    own: dict[str, Any] = {
        "row": {"prompt": "x"},
        "group": 4,
        "sample": sample,
        "attempt": 0,
        "completion": said,
        "spans": (),
        "reward": 1.0,
        "sequences": (said,),
        "seed": request_seed(SamplingConfig(seed=3), place),
    }
    return Rollout(**own | more)


def lines_of(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    return [json.loads(line_of(1, each)) for each in rollouts]


def remade(folder: Path, rollouts: list[Rollout]) -> Path:
    """A version's folder with the job that made it."""
    batch = made_of([(each.completion, 1.0) for each in rollouts])
    job = TrainMerged(tensors=batch.specs, loss=LossSpec(), optim=OptimParams(lr=1e-3))
    folder.mkdir(parents=True, exist_ok=True)
    packed(RunJob(job=job, deadline_s=1.0), batch.buffers).tofile(folder / "remake.bin")
    return folder


def planned(folder: Path, rollouts: list[Rollout], lines=None) -> resampling.Planned:
    given = lines_of(rollouts) if lines is None else lines
    return plan(batch_of(remade(folder, rollouts)), given, lambda line: SAMPLING)


@pytest.mark.parametrize("others", [[], [rollout(made=(2, -4), sample=9)]])
def test_an_answer_is_asked_for_as_the_loop_did(others, tmp_path: Path) -> None:
    """Whether the batch has versions of sequences or of tokens."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    asked = [rollout(), rollout((1, 7, 8, 9), (7, 8), row=chat, sample=1, made=(0, 0)), *others]
    first, second = planned(tmp_path, asked).answers
    fields = {"max_tokens": 9, "temperature": 0.5, "top_k": 4}
    assert first.request == ([5, 6], {**fields, "seed": asked[0].seed}, False)
    assert second.request == ([1, 7, 8, 9], {**fields, "seed": asked[1].seed}, True)
    assert (first.made, second.made, first.ids) == (2, 0, [7, 8])
    assert first.logprobs == array.array("f", asked[0].completion.logprobs)
    assert second.place == "group 4, sample 1 of @0"


def test_of_equal_answers_that_with_the_same_log_probs_is_meant(tmp_path: Path) -> None:
    """The batch has them in another order than the samples."""
    one, other = rollout(sample=0), rollout((1, 2), sample=1)
    lines = lines_of([one, other])
    lines[0]["logprobs"] = [-9.0, -9.0]
    (answer,) = planned(tmp_path, [other], lines).answers
    assert answer.place == "group 4, sample 1 of @2"
    lines[1]["logprobs"] = [-9.0, -9.0]  # then the order counts
    answers = planned(tmp_path, [one, other], lines).answers
    assert [answer.request[1]["seed"] for answer in answers] == [one.seed, other.seed]


@pytest.mark.parametrize(
    ("made", "change", "why"),
    [
        ((2, -4), {}, "an update came within it"),
        ((-3, -3), {}, "an update came within it"),
        ((2, 3), {}, "an update came within it"),
        ((), {}, "the batch does not say which version made it"),
        ((2, 2), {"seed": None}, "its request had no seed, or the seed was not recorded"),
        ((2, 2), {"turns": [[0, [5, 6], "a", []]]}, "an environment asked for it"),
        ((2, 2), {"answer_ids": [7, 9]}, "no line of the samples has it"),
    ],
)
def test_what_is_not_repeated_is_counted(made, change, why, tmp_path: Path) -> None:
    asked = [rollout(made=made), rollout(made=made, sample=1)]
    found = planned(tmp_path, asked, [line | change for line in lines_of(asked)])
    assert (found.answers, found.left) == ([], {why: 2})
    assert str(found) == f"0 of 2 answers sampled again; 2 not repeated: {why}"


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([7, 8], [-1.5, 0.0], ""),
        ([7, 9], [-1.5, 0.0], "here, token 1: 8 is 9 now"),
        ([7, 9], [-1.25, 0.0], "here, token 0: log-prob -1.5 is -1.25 now"),
        ([7, 8], [-1.5, -0.0], "here, token 1: log-prob 0.0 is -0.0 now"),
        ([7], [-1.5], "here: 2 tokens are 1 now"),
        ([7, 8, 9], [-1.5, 0.0, 0.0], "here: 2 tokens are 3 now"),
    ],
)
def test_the_first_difference_is_named(ids, logprobs, said) -> None:
    answer = Answer(
        made=2,
        place="here",
        ids=[7, 8],
        logprobs=array.array("f", [-1.5, 0.0]),
        request=([5], {}, False),
    )
    assert answer.difference(ids, logprobs) == said


@pytest.mark.parametrize(
    ("numerics", "seed", "steps", "made", "why"),
    [
        ("served", 3, (1, 2), 1, 'numerics is "served"'),
        ("exact", None, (1, 2), 1, "no sampling.seed"),
        ("exact", 3, (1,), 1, "no samples of the step that made version 2.*keep_samples"),
        ("exact", 3, (1, 2), 9, "version 9, which sampled answers of these steps, is not on disk"),
    ],
)
def test_what_cannot_be_repeated_is_refused(
    numerics, seed, steps, made, why, tmp_path: Path
) -> None:
    for number in range(3):
        folder = remade(tmp_path / "versions" / str(number), [rollout(made=(made, made))])
        remake = {"remake": {"base": f"../{number - 1}"}} if number else {}
        (folder / "meta.json").write_text(json.dumps(remake))
        (folder / "COMPLETE").touch()
    loop = tmp_path / "loop"
    (loop / "samples").mkdir(parents=True)
    start = {"event": "start", "at": 1.0, "config": {"sampling": {**SAMPLING, "seed": seed}}}
    trained = [{"event": "trained", "at": 2.0, "step": n, "version": n} for n in (1, 2)]
    log = "".join(json.dumps(line) + "\n" for line in (start, *trained))
    (loop / "decisions.jsonl").write_text(log)
    for step in steps:
        (loop / "samples" / f"{step:06d}.jsonl").write_text(line_of(step, rollout()))
    run = RunFile(
        name="tiny",
        model=tmp_path,
        run_dir=tmp_path,
        trainer={"numerics": numerics},
        inference={},
    )
    with pytest.raises(ConfigError, match=why):
        resampling.repeat(run, 0, 2, on_version=lambda version, count: pytest.fail("started"))
