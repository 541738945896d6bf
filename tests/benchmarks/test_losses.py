"""The arms of the benchmark of losses, and its result. The whole is `python -m benchmarks losses
--small`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from benchmarks.harness import Result
from benchmarks.learning import Curve
from benchmarks.losses import ARMS, BASE, SMALL, cases_of, plot
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LOSS_PARAMETERS
from splice.client.advantages import GAE, AdvantageName
from splice.client.batches import Completion


def test_every_loss_and_every_advantage_has_an_arm():
    assert {arm.loss.name for arm in ARMS.values()} == set(LOSS_PARAMETERS)
    assert {arm.advantages for arm in ARMS.values()} == set(get_args(AdvantageName)) - {GAE}


def answer(token: int) -> Completion:
    return Completion(prompt_ids=(1,), answer_ids=(token, 2), logprobs=(-1.0, -1.0))


GROUPS = [[(answer(5), 1.0), (answer(6), 0.0), (answer(7), 0.0)], [(answer(8), 1.0)]]


def tokens_of(batch) -> list[int]:
    return np.frombuffer(batch.buffers[0], np.int32).tolist()


def test_cross_entropy_trains_on_what_is_right():
    assert tokens_of(ARMS["cross_entropy"].make_batch(None, GROUPS)) == [1, 5, 2, 1, 8, 2]
    wrong = [[(answer(6), 0.0)]]
    assert tokens_of(ARMS["cross_entropy"].make_batch(None, wrong)) == [1, 6, 2]


def test_dpo_pairs_answers_to_one_problem():
    client = SimpleNamespace(
        forward=lambda batch, adapters=True: SimpleNamespace(logprobs=[0.0] * 6)
    )
    batch = ARMS["dpo"].make_batch(client, GROUPS)
    assert tokens_of(batch) == [1, 5, 2, 1, 6, 2]
    weights = np.frombuffer(batch.buffers[3], np.float32)
    assert weights == pytest.approx([0, 0.05, 0.05, 0, -0.05, -0.05])
    with pytest.raises(ConfigError, match="no problem has a right and a wrong answer"):
        ARMS["dpo"].make_batch(client, GROUPS[1:])


def test_cases_are_of_whole_curves_and_are_drawn(tmp_path):
    for arm, is_whole in ((BASE, True), ("linear", True), ("ppo", False)):
        curve = Curve(tmp_path / f"{arm}.json")
        curve.add("evaluations", step=0, accuracy=0.1)
        for step in (1, 2):
            curve.add("steps", step=step, reward=0.2 * step)
        curve.add("evaluations", step=2, accuracy=0.5)
        curve.found["done"] = is_whole
        curve.write()
    cases = tuple(cases_of(tmp_path, SMALL))
    assert [c.name for c in cases[::3]] == [BASE, "linear"]
    assert cases[3].samples == cases[3].peer_samples == (0.5,)
    result = Result(benchmark="losses", device="cpu", commit="0", packages={}, cases=cases)
    plot(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
