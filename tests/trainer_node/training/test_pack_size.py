"""How many tokens go into a pack: the memory model by hand, and on a GPU the real one. What a probe
leaves behind (nothing) is in `packing.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.protocol.config import LoraConfig, TrainerConfig
from trainer_node.training import pack_size
from trainer_node.training.pack_size import MemoryModel, choose, fit

GB = 10**9


def test_the_model_goes_through_the_probes() -> None:
    assert fit([(512, 700), (1024, 1212)]) == MemoryModel(fixed_bytes=188.0, bytes_per_token=1.0)
    model = fit([(100, 1000), (200, 2100), (300, 2900)])  # by hand: slope 9.5, mean (200, 2000)
    assert (model.bytes_per_token, model.fixed_bytes) == (9.5, 100.0)
    assert model.peak_bytes(400) == 3900


def test_a_negative_fixed_part_covers_every_probe() -> None:
    """More than linear: the line through the probes would promise too much for small packs, and
    nothing is free.
    """
    model = fit([(512, 500), (1024, 1300)])
    assert model.fixed_bytes == 0 and model.bytes_per_token == pytest.approx(1300 / 1024)


@pytest.mark.parametrize("samples", [[(512, 100)], [(512, 100), (512, 200)]])
def test_two_sizes_are_needed(samples: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="two sizes at least"):
        fit(samples)


@pytest.mark.parametrize("second", [100, 40])
def test_peaks_that_do_not_grow_cover_every_probe(second: int) -> None:
    """A tiny model's, whose workspaces are larger than its activations."""
    model = fit([(512, 100), (1024, second)])
    assert (model.fixed_bytes, model.bytes_per_token) == (0.0, 100 / 512)


def test_the_choice_fits_and_the_next_does_not() -> None:
    """23,040 tokens take 59.6 GB, 256 more 60.2."""
    model = MemoryModel(fixed_bytes=2.0 * GB, bytes_per_token=2.5e6)
    tokens = choose(model, room_bytes=60 * GB)
    assert tokens == 23_040 and tokens % pack_size.STEP == 0
    assert model.peak_bytes(tokens) <= 60 * GB < model.peak_bytes(tokens + pack_size.STEP)
    assert choose(model, room_bytes=1000 * GB) == pack_size.MOST_TOKENS
    assert (
        choose(model, room_bytes=int(model.peak_bytes(pack_size.LEAST_TOKENS)))
        == pack_size.LEAST_TOKENS
    )
    assert choose(model, room_bytes=int(model.peak_bytes(pack_size.LEAST_TOKENS)) - 1) == 0
    assert choose(model, room_bytes=0) == choose(model, room_bytes=-GB) == 0


def test_the_longest_sequence_fits_and_one_token_more_does_not() -> None:
    model = MemoryModel(fixed_bytes=2.0 * GB, bytes_per_token=2.5e6)
    tokens = pack_size.longest(model, room_bytes=300 * GB)
    assert tokens == 119_200 > pack_size.MOST_TOKENS, "a sequence may be longer than a pack"
    assert model.peak_bytes(tokens) <= 300 * GB < model.peak_bytes(tokens + 1)
    assert pack_size.longest(model, room_bytes=GB) == 0


def test_the_config_takes_a_number_or_auto() -> None:
    assert TrainerConfig(model=Path("m")).micro_batch_tokens == "auto"
    assert (
        TrainerConfig.model_validate_json(
            '{"model": "m", "micro_batch_tokens": 16}'
        ).micro_batch_tokens
        == 16
    )
    for wrong in (0, "most"):
        with pytest.raises(ValueError, match="micro_batch_tokens"):
            TrainerConfig(model=Path("m"), micro_batch_tokens=wrong)


@pytest.mark.gpu1
def test_the_chosen_pack_fits_on_a_gpu(models: dict[str, Path]) -> None:
    """The model's prediction for a pack of the chosen size is within a tenth of what that pack
    takes.
    """
    from trainer_node.training.start import start

    trainer = start(
        TrainerConfig(
            model=models["moe"], device="cuda", dtype="bfloat16", lora=LoraConfig(rank=8, alpha=16)
        )
    )
    try:
        tokens = trainer.micro_batch_tokens
        assert pack_size.LEAST_TOKENS <= tokens <= pack_size.MOST_TOKENS
        samples = [(n, pack_size._peak(trainer, n)) for n in (1024, 4096)]
        predicted, measured = fit(samples).peak_bytes(16_384), pack_size._peak(trainer, 16_384)
        assert abs(predicted / measured - 1) < 0.1, (samples, predicted, measured)
    finally:
        trainer.model.close()
