"""Learning rates, against transformers' schedulers."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from orchestrator.errors import ConfigError
from splice.train.schedules import factor
from splice.train.sections import OptimSection

STEPS = 12


def of_transformers(name: str, warmup: int) -> list[float]:
    """Its shares of the learning rate, for steps from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS)
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_shares_are_those_of_transformers(name: str, warmup: int) -> None:
    plain = "constant_with_warmup" if name == "constant" else name
    expected = of_transformers(plain, warmup)
    ours = [factor(name, n, steps=STEPS, warmup=warmup, least=0.0) for n in range(1, STEPS + 1)]
    assert ours[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    # Its warm-up begins at 0, which no optimizer step takes.
    assert ours[:warmup] == pytest.approx([*expected[1:warmup], 1.0][:warmup], abs=1e-12)
    assert min(ours) > 0


def test_a_section_is_the_parameters_of_each_step() -> None:
    section = OptimSection(lr=2.0, schedule="linear", min_lr_ratio=0.5, weight_decay=0.1)
    of_step = section.of_step(4)
    assert [of_step(n).lr for n in range(1, 5)] == pytest.approx([2.0, 1.75, 1.5, 1.25])
    assert of_step(9) == of_step(4)
    assert of_step(1).weight_decay == 0.1


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule.*cosine"):
        OptimSection(schedule="cosin")
