"""How many tokens go into a pack: the memory model by hand, and on a GPU the real one. What a probe
leaves behind (nothing) is in `packing.py`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from trainer_node.training import memory_model, pack_size
from trainer_node.training.memory_model import MemoryModel, RankMemory, choose, fit

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
    assert tokens == 23_040 and tokens % memory_model.STEP == 0
    assert model.peak_bytes(tokens) <= 60 * GB < model.peak_bytes(tokens + memory_model.STEP)
    assert choose(model, room_bytes=1000 * GB) == memory_model.MOST_TOKENS
    assert (
        choose(model, room_bytes=int(model.peak_bytes(memory_model.LEAST_TOKENS)))
        == memory_model.LEAST_TOKENS
    )
    assert choose(model, room_bytes=int(model.peak_bytes(memory_model.LEAST_TOKENS)) - 1) == 0
    assert choose(model, room_bytes=0) == choose(model, room_bytes=-GB) == 0


def test_the_longest_sequence_fits_and_one_token_more_does_not() -> None:
    model = MemoryModel(fixed_bytes=2.0 * GB, bytes_per_token=2.5e6)
    tokens = memory_model.longest(model, room_bytes=300 * GB)
    assert tokens == 119_200 > memory_model.MOST_TOKENS, "a sequence may be longer than a pack"
    assert model.peak_bytes(tokens) <= 300 * GB < model.peak_bytes(tokens + 1)
    assert memory_model.longest(model, room_bytes=GB) == 0


def memory(room_gb: float, **ends: MemoryModel | None) -> RankMemory:
    """A pack of n thousand tokens takes 2 + 2.5 n GB, or 3 + 0.5 n with every layer run again."""
    lines: dict[str, MemoryModel | None] = {
        "kept": MemoryModel(fixed_bytes=2.0 * GB, bytes_per_token=2.5e6),
        "recomputed": MemoryModel(fixed_bytes=3.0 * GB, bytes_per_token=0.5e6),
    }
    scored = MemoryModel(fixed_bytes=1.0 * GB, bytes_per_token=0.1e6)
    room = {"room_bytes": room_gb * GB, "margin_bytes": 5.0 * GB}
    return RankMemory(**{**lines, **ends}, scored=scored, **room)  # type: ignore[arg-type]


def test_a_pack_recomputes_as_few_layers_as_it_needs() -> None:
    """40,000 tokens take 102 GB or 23: of 79 that recomputation saves, 42 are missing."""
    found = memory(60)
    assert found.share(23_200) == 0.0 < found.share(23_201)
    assert found.share(40_000) == pytest.approx(42 / 79)
    assert found.share(114_000) == found.share(200_000) == 1.0
    assert found.pack_tokens == 23_040, "what fits without recomputation"
    assert found.longest_trained == 124_000, "(65 - 3) / 0.5"
    assert found.bundle_tokens == 114_000, "several sequences leave the margin"
    assert found.longest_scored == 640_000


def test_recomputation_that_saves_nothing_is_left_out() -> None:
    """A small model's peaks are mostly workspaces: 1,000 tokens take 4.5 GB or 3.5, and 400 take
    3.0 or 3.2.
    """
    assert memory(2.5).share(400) == 0.0 and memory(4.0).share(1000) == 0.5


def test_a_pack_fills_the_gpu_even_if_it_must_recompute() -> None:
    """In 6 GB there is room for 1,600 tokens, or 6,000 with recomputation: the pack takes 4,096."""
    assert memory(6).pack_tokens == memory_model.FILLING_TOKENS
    assert memory(4).pack_tokens == 1792, "800 without, and 2,000 with, in steps of 256"
    assert memory(3).pack_tokens == 256 and memory(2).pack_tokens == 0


def test_one_way_may_be_ruled_out() -> None:
    none, full = memory(60, recomputed=None), memory(60, kept=None)
    assert (none.share(10**6), none.pack_tokens, none.longest_trained) == (0.0, 23_040, 25_200)
    assert (full.share(1), full.pack_tokens, full.longest_trained) == (1.0, 65_536, 124_000)


def offloading(host_tokens: int, **ends: MemoryModel | None) -> RankMemory:
    """With layers' inputs on the host, a pack of n thousand tokens takes 3 + 0.2 n GB."""
    line = MemoryModel(fixed_bytes=3.0 * GB, bytes_per_token=0.2e6)
    return dataclasses.replace(memory(60, **ends), offloaded=line, host_tokens=host_tokens)


def test_inputs_go_to_the_host_only_where_recomputation_does_not_suffice() -> None:
    """In 60 GB there is room for 114,000 tokens with recomputation, or 285,000 with offload."""
    found = offloading(400_000)
    assert not found.offloads(114_000) and found.offloads(114_001)
    assert found.share(114_001) == 1.0, "every layer runs again"
    assert (found.pack_tokens, found.bundle_tokens) == (23_040, 285_000)
    assert found.longest_trained == 310_000, "(65 - 3) / 0.2"
    assert found.longest_scored == memory(60).longest_scored


def test_the_hosts_memory_is_a_limit_too() -> None:
    found = offloading(200_000)
    assert found.longest_trained == found.bundle_tokens == 200_000
    assert found.offloads(200_000) and not found.offloads(200_001)
    assert found.longest_without_offload == 124_000
    less = offloading(100_000)
    assert less.longest_trained == 124_000 and not less.offloads(120_000), (
        "in the margin, as before"
    )


def test_offload_may_be_the_only_way() -> None:
    only = offloading(50_000, kept=None, recomputed=None)
    assert only.offloads(1) and only.share(1) == 1.0
    assert (only.pack_tokens, only.longest_trained) == (49_920, 50_000)


def test_a_gpu_that_others_have_filled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one probe has room."""
    monkeypatch.setattr(pack_size, "_room", lambda _: -2_500_000_000)
    monkeypatch.setattr(pack_size, "_same_on_all", lambda value, _: value)
    monkeypatch.setattr(pack_size, "free_bytes", lambda: 1_000_000_000)
    with pytest.raises(ConfigError, match=r"1\.0 GB of the GPU are free.* 2\.5 GB more than that"):
        pack_size._model(None, lambda _: pytest.fail("a probe ran"))  # type: ignore[arg-type]


def test_ranks_exchange_what_they_measured() -> None:
    for one in (memory(60), memory(60, kept=None), offloading(7)):
        assert RankMemory.of(dataclasses.asdict(one)) == one


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
@pytest.mark.parametrize("recompute", ["auto", "offload"])
def test_the_chosen_pack_fits_on_a_gpu(models: dict[str, Path], recompute: str) -> None:
    """The model's prediction for a pack of the chosen size is within a tenth of what that pack
    takes.
    """
    from trainer_node.training.start import start

    trainer = start(
        TrainerConfig(
            model=models["moe"],
            device="cuda",
            dtype="bfloat16",
            lora=LoraConfig(rank=8, alpha=16),
            recompute=recompute,  # type: ignore[arg-type]
        )
    )
    try:
        tokens = trainer.micro_batch_tokens
        assert memory_model.LEAST_TOKENS <= tokens <= memory_model.MOST_TOKENS
        (found,) = trainer.memory
        ways = [(0.0, False, found.kept), (1.0, False, found.recomputed)]
        if recompute == "offload":
            ways = [(1.0, True, found.offloaded)]
        for share, offload, line in ways:
            assert line is not None
            run = partial(pack_size.probe, trainer, share=share, offload=offload)
            predicted, measured = line.peak_bytes(16_384), pack_size._peak(trainer, 16_384, run)
            assert abs(predicted / measured - 1) < 0.1, (share, line, predicted, measured)
    finally:
        trainer.model.close()
