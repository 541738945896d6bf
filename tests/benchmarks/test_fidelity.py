"""The fidelity benchmark's merges, samples and numbers; `test_benchmarks` runs all of it, small."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import clusters
from benchmarks.fidelity import (
    PREFIX,
    WAYS,
    _of_weights,
    gain_of,
    models_of,
    plan_of,
    summary,
)
from benchmarks.fidelity_policy import Policy, Rows, golden, jittered, merged
from benchmarks.harness import Case, Result
from orchestrator.errors import ConfigError
from trainer_node.adapters.rounding import Corner, Rounding, delta_of, merge_matrix, thresholds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return clusters.make_model("tiny-dense", tmp_path_factory.mktemp("fidelity") / "model")


@pytest.fixture
def policy(model):
    made = Policy(model, dtype=torch.float32, device="cpu")
    made.adapt(rank=8, alpha=16.0, seed=1)
    generator = torch.Generator().manual_seed(0)
    for layer in made.layers.values():
        layer.lora_B_OR.data.normal_(0.0, 1e-3, generator=generator)
    return made


def matrices():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).bfloat16()
    b, a = (torch.randn(*shape, generator=generator) * 0.05 for shape in ((64, 8), (8, 96)))
    b[3] = 0.0
    return weight, b, a


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_a_merge_has_the_bytes_of_a_publication(mode):
    weight, b, a = matrices()
    expected = merge_matrix(
        weight, b, a, scale=2.0, rounding=Rounding(mode=mode), corner=Corner("x")
    )
    found = merged(weight, delta_of(b, a, 2.0), way=mode, name="x", version=7)
    assert found.dtype is torch.float32 and torch.equal(found.bfloat16(), expected)
    assert torch.equal(found.bfloat16().float(), found)


def test_only_new_thresholds_depend_on_the_version():
    weight, b, a = matrices()
    delta = delta_of(b, a, 2.0)
    for way in WAYS:
        first, second = (merged(weight, delta, way=way, name="x", version=v) for v in (1, 2))
        assert torch.equal(first, second) == (way != "stochastic_new"), way
        if not way.startswith("fp8_"):
            assert torch.equal(first[3], weight[3].float()), way


def test_the_golden_dither_is_the_fraction_of_its_ratios_and_even():
    found = golden(48, 512)
    row, column = torch.arange(48.0).double()[:, None], torch.arange(512.0).double()
    exact = (column * 0.6180339887498949 + row * 0.7548776662466927 + 0.37) % 1 * 65536
    apart = (found - exact.floor()).abs()
    assert int(torch.minimum(apart, 65536 - apart).max()) <= 1
    counts = torch.histc(found.float(), bins=16, min=0, max=65536)
    assert (counts / counts.mean() - 1).abs().max() < 0.02
    hashed = thresholds(Corner("x").word(Rounding()), 48, 512)
    assert hashed.dtype is found.dtype and hashed.shape == found.shape


def test_jitter_moves_a_weight_less_than_its_grid():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (32, 64), generator=generator) * 0.25
    weight[:, ::16] = 2.0
    assert jittered(weight, "none", generator) is weight
    sigma = jittered(weight, "sigma", generator) - weight
    assert 0 < sigma.abs().max() <= 4.0001e-4 * weight.std()
    block = (jittered(weight, "block", generator) - weight).abs()
    assert (block > 0).float().mean() > 0.99 and block.max() <= 0.25 + 1e-6


def test_a_sample_s_logprobs_are_those_of_its_rescoring(policy):
    """Prompts of different lengths: padding on the left must not count."""
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13]]
    samples = policy.sample(prompts, tokens=5, generator=torch.Generator().manual_seed(0))
    rows = Rows.of([(p, ids) for p, (ids, _) in zip(prompts, samples, strict=True)], "cpu")
    logps = torch.tensor([logp for _, logps in samples for logp in logps])
    torch.testing.assert_close(policy.logprobs(rows), logps, rtol=0, atol=2e-5)


def gradients(policy, rows, mode):
    policy.use(mode)
    parameters = policy.parameters()
    return torch.autograd.grad(policy.logprobs(rows).sum(), parameters)


def test_exactly_served_bits_give_the_adapter_s_values_and_gradients(policy):
    rows = Rows.of([([3, 4, 5], [6, 7]), ([8], [9, 10, 11])], "cpu")
    for name, delta in policy.deltas().items():
        policy.layers[name].served_OI = policy.layers[name].weight_OI + delta
    expected = gradients(policy, rows, "native")
    for mode in ("fused", "served"):
        for found, wanted in zip(gradients(policy, rows, mode), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.std()))


def test_bf16_computes_with_the_same_base_and_an_fp32_head(model, policy):
    half = Policy(model, dtype=torch.bfloat16, device="cpu")
    half.adapt(rank=8, alpha=16.0, seed=1)
    for name, layer in half.layers.items():
        assert torch.equal(layer.weight_OI.float(), policy.layers[name].weight_OI)
        assert torch.equal(layer.lora_A_RI, policy.layers[name].lora_A_RI)
    rows = Rows.of([([3, 4, 5], [6, 7])], "cpu")
    for mode in ("native", "fused", "served"):
        half.use(mode)
        assert half.logprobs(rows).dtype is torch.float32


def test_what_nearest_drops_stochastic_keeps(policy):
    """rho is some 1e-4, where nearest keeps a few per cent of delta."""
    for layer in policy.layers.values():
        layer.lora_B_OR.data *= 0.05
    deltas, zeros = policy.deltas(), {n: 0 * d for n, d in policy.deltas().items()}
    found = {}
    for way in ("nearest", "stochastic"):
        policy.serve(way, deltas, version=1)
        found[way] = _of_weights(policy, deltas, zeros, way=way, version=1)
        assert found[way]["differs"] == found[way]["changed_share"] > 0
    assert 1e-5 < found["nearest"]["rho"] < 1e-3
    assert found["nearest"]["served_share"] < 0.3
    # An element's variance is at most ulp |delta|. With ulp / |delta| below 100, N elements give a
    # share a standard error of sqrt(100 / N).
    elements = sum(delta.numel() for delta in deltas.values())
    assert abs(found["stochastic"]["served_share"] - 1) < 5 * math.sqrt(100 / elements)


def test_gain_and_its_noise_by_hand():
    gained, moved = torch.tensor([1.0, 3.0]).double(), torch.tensor([2.0, 2.0]).double()
    gain, noise = gain_of(gained, moved)
    # Residuals -1 and 1: standard deviation sqrt(2), standard error 1, over a mean move of 2.
    assert gain == 1.0 and math.isclose(noise, 0.5)
    assert gain_of(0.25 * moved, moved)[1] == 0.0


def test_the_environment_selects_cells():
    models = models_of("a=/x:sigma,b=/y")
    assert models == {"a": (Path("/x"), "sigma"), "b": (Path("/y"), "none")}
    plan = plan_of({f"{PREFIX}LR": "1e-4", f"{PREFIX}PARTS": "matrix", f"{PREFIX}SEEDS": "2,3"})
    assert plan["LR"] == [1e-4] and plan["PARTS"] == ["matrix"] and plan["SEEDS"] == [2, 3]
    assert plan["LOOP_LR"] == [1e-5, 1e-4] and plan["LOOP_STEPS"] == [30]


def test_a_wrong_selection_names_what_to_set():
    for words in ("", "a=/x:q4"):
        with pytest.raises(ConfigError, match=r"MODELS.*none, sigma, block"):
            models_of(words)
    with pytest.raises(ConfigError, match=r"PARTS has {'loop'}.*loop-bf16"):
        plan_of({f"{PREFIX}PARTS": "loop"})


def test_tables_are_means_over_the_seeds():
    cell = {"part": "matrix", "model": "m", "lr": 1e-4, "rank": 8, "step": 1}
    names = ("gain_noise", "gain_own_base", "gain_own_base_noise", "kl", "gap", "rho", "J_base")
    numbers = dict.fromkeys((*names, "served_share", "changed_share", "differs"), 0.01)
    curve = [{"step": s, "J": 0.2, "J_trained": 0.3, "gap": 0.1} for s in range(14)]

    def case(name, **settings):
        return Case(
            name=name, metric="J", unit="probability", samples=(0.2,), peer="trained",
            peer_samples=(0.3,), settings=settings,
        )  # fmt: skip # a list

    cases = [
        case(f"{seed}/{way}", **cell, **numbers, way=way, gain=gain)
        for way in WAYS
        for seed, gain in ((1, 0.2), (2, 0.4))
    ]
    loop = {"part": "loop-fp32", "model": "m", "lr": 1e-4, "mode": "nearest/native"}
    cases += [case(f"loop/{seed}", **loop, curve=curve) for seed in (1, 2)]
    text = summary(
        [Result(benchmark="fidelity", device="cpu", commit="0", packages={}, cases=tuple(cases))]
    )
    assert "| m | 0.0001 | 8 | 1 | 1.0e-02 | 0.01 | 0.3 | 30.0% ± 1.0% |" in text
    for step in (12, 13):
        line = (
            f"| loop-fp32 | m | 0.0001 | nearest/native | {step} | 0.2, 0.2 | 0.3, 0.3 | 1.0e-01 |"
        )
        assert line in text
    assert len(text.split("\n\n")) == 10
