"""The learning benchmark's task and control. The whole benchmark is `python -m benchmarks learning
--small`.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import clusters
from benchmarks.harness import Result
from benchmarks.learning import ARMS, Curve, cases_of, plot
from benchmarks.learning_control import Control
from benchmarks.learning_task import SMALL, read, reward, row
from orchestrator.errors import ConfigError

ROWS = [row(f"{a} + 1 =", str(a + 1)) for a in range(140)]


@pytest.mark.parametrize(
    ("text", "earned"),
    [
        ("3 + 4 = 7\nAnswer: 7", 1.0),
        ("first 6, then \\boxed{7}.", 1.0),
        ("7\nor 8", 0.0),
        ("77", 0.0),
        ("-7", 0.0),
        ("seven", 0.0),
    ],
)
def test_reward(text, earned):
    assert reward(row("3 + 4 =", "7"), text) == earned


def test_reward_of_thousands_and_of_less_than_nothing():
    assert reward(row("900 + 900 =", "1800"), "It is 1,800.") == 1.0
    assert reward(row("3 - 10 =", "-7"), "3 - 10 = -7") == 1.0


def test_a_seed_shuffles_the_training_rows_alone(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    (first, held_out), (second, same) = read(path, 0), read(path, 1)
    assert held_out == same and first != second
    assert sorted(r["answer"] for r in first) == sorted(r["answer"] for r in second)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return clusters.make_model("tiny-dense", tmp_path_factory.mktemp("learning") / "model")


@pytest.mark.parametrize("full", [False, True])
def test_the_control_learns_what_has_advantage(model, full):
    control = Control(model, SMALL, seed=0, full=full, device="cpu")
    rows = ROWS[:2]
    answers = control.sample(rows, temperature=1.0)
    assert [len(a) for _, a in answers] == [SMALL.max_tokens] * 2 or all(a for _, a in answers)

    def logprobs():
        with torch.no_grad():
            return [
                float(
                    control.model(input_ids=torch.tensor([p + a]))
                    .logits[0, len(p) - 1 : -1]
                    .log_softmax(-1)
                    .gather(-1, torch.tensor(a)[:, None])
                    .sum()
                )
                for p, a in answers
            ]

    before = logprobs()
    for _ in range(8):
        control.train(answers, [1.0, -1.0])
    better, worse = logprobs()
    assert better > before[0] and worse < before[1]


def test_the_control_samples_from_merged_weights_and_puts_the_base_back(model):
    control = Control(model, SMALL, seed=0, full=False, device="cpu")
    control.train(control.sample(ROWS[:2], temperature=1.0), [1.0, -1.0])
    ids = torch.tensor([[3, 4, 5]])
    weights = {n: p.clone() for n, p in control.model.named_parameters()}
    with torch.no_grad():
        adapted = control.model(input_ids=ids).logits
        control.merge()
        merged = control.sampler(input_ids=ids).logits
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)
    base = {
        n.replace(".base_layer", "").removeprefix("base_model.model."): p
        for n, p in weights.items()
    }
    assert any(not torch.equal(p, base[n]) for n, p in control.sampler.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in control.model.named_parameters())


def written(folder, key, rewards):
    curve = Curve(folder / f"{key}.json")
    for step, value in enumerate(rewards, start=1):
        curve.add("steps", step=step, reward=value, logprob_gap_mean=0.01)
    curve.add("evaluations", step=len(rewards), accuracy=rewards[-1])


def test_an_arm_has_its_control_as_peer(tmp_path):
    for seed in range(2):
        written(tmp_path, f"control-{seed}", [0.1, 0.3])
        written(tmp_path, f"async-{seed}", [0.2, 0.4])
        written(tmp_path, f"fp8-uncorrected-{seed}", [0.2, 0.2])
    found = {(c.name, c.metric): c for c in cases_of(tmp_path, SMALL)}
    case = found["async", "accuracy"]
    assert case.peer == ARMS["async"].control and case.samples == (0.4, 0.4)
    assert case.peer_samples == (0.3, 0.3)
    assert found["fp8-uncorrected", "accuracy"].samples == (0.2, 0.2)
    result = Result(
        benchmark="learning", device="cpu", commit="0", packages={}, cases=tuple(found.values())
    )
    plot(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_names_its_log(tmp_path):
    (tmp_path / "async-0.log").write_text("no GPU")
    with pytest.raises(ConfigError, match=r"async:0 made no step.*async-0\.log"):
        cases_of(tmp_path, SMALL)
