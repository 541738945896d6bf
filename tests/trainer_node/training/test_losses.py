"""Every loss: values by hand, gradients against the plain formula in fp64, the registry, and the
spec's manners.
"""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LOSS_PARAMETERS, KlSpec, LossSpec, ValueSpec
from tests.trainer_node.conftest import child_env
from trainer_node.training import registry
from trainer_node.training.head import linear_statistics
from trainer_node.training.losses import (
    LossInputs,
    ValueInputs,
    bind_loss,
    kl_to_reference,
    total_loss,
)
from trainer_node.training.registry import (
    LossOutput,
    import_losses,
    register_loss,
    registered,
)

RATIOS = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.0, 8.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, -1.0], dtype=torch.float64)
OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -4.0], dtype=torch.float64)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 3])


def inputs(*, log_probs: torch.Tensor | None = None, old: torch.Tensor | None = None) -> LossInputs:
    return LossInputs(
        log_probs_N=OLD + RATIOS.log() if log_probs is None else log_probs,
        sampler_logprobs_N=OLD,
        advantages_N=ADVANTAGES,
        old_logprobs_N=old,
        sequence_N=SEQUENCES,
        num_sequences=5,
    )


def value(
    name: str, *, old: torch.Tensor | None = None, **parameters: float | None
) -> tuple[float, float]:
    out = bind_loss(LossSpec(name=name, **parameters))(inputs(old=old))
    return out.loss.item(), out.num_clipped.item()


class TestByHand:
    def test_cross_entropy(self) -> None:
        assert value("cross_entropy")[0] == pytest.approx(12.0 - math.log(2 * 2 * 0.5 * 0.5 * 8))

    def test_linear(self) -> None:
        """Log-probs -1, -1, -0.5, -1, -1 and -2 times weights 2, -1, 0, 3, 0.5 and -4."""
        given = replace(
            inputs(log_probs=torch.tensor([-1.0, -1.0, -0.5, -1.0, -1.0, -2.0])),
            advantages_N=torch.tensor([2.0, -1.0, 0.0, 3.0, 0.5, -4.0]),
        )
        out = bind_loss(LossSpec(name="linear"))(given)
        assert (out.loss.item(), out.num_clipped.item()) == (2.0 - 1.0 + 3.0 + 0.5 - 8.0, 0)

    def test_importance_sampling(self) -> None:
        """2 - 2 + 0.5 - 0.5 + 0.5 - 8 = -7.5."""
        assert value("importance_sampling") == (pytest.approx(7.5), 0)

    def test_grpo(self) -> None:
        """Clip 0.2/0.3: 1.3 - 2 + 0.5 - 0.8 + 0.5 - 8 = -8.5; the first and fourth are clipped."""
        assert value("grpo", clip_low=0.2, clip_high=0.3) == (pytest.approx(8.5), 2)

    def test_dapo_is_clip_higher(self) -> None:
        assert value("dapo") == (pytest.approx(8.5 + 0.02), 2)
        assert value("dapo", clip_high=0.3) == value("grpo", clip_high=0.3)

    def test_ppo_with_dual_clip(self) -> None:
        """As grpo, but the last surrogate is -3 instead of -8."""
        assert value("ppo", clip_low=0.2, clip_high=0.3) == (pytest.approx(3.5), 3)
        assert value("ppo", clip_low=0.2, clip_high=0.3, dual_clip=None) == (pytest.approx(8.5), 2)
        assert value("ppo", clip_low=0.2, clip_high=0.3, dual_clip=1.5) == (
            pytest.approx(3.5 - 1.5 - 0.5),
            4,
        )

    def test_truncated_without_old(self) -> None:
        """Weights min(r, 2) = 2, 2, .5, .5, 1, 2 times the advantage: 2 - 2 + .5 - .5 + .5 - 2 =
        -1.5.
        """
        assert value("truncated_importance_sampling") == (pytest.approx(1.5), 1)

    def test_truncated_with_old(self) -> None:
        """The trainer's old policy is the sampler's times 4: weights 2 (capped), ratios r / 4,
        clipped to [0.8, 1.2]: 2 * (0.5 * 1 - 0.8 + 0.125 - 0.8 + 0.25 * 0.5 - 2).
        """
        got = value("truncated_importance_sampling", old=OLD + math.log(4))
        assert got == (pytest.approx(-2 * (0.5 - 0.8 + 0.125 - 0.8 + 0.125 - 2)), 6)

    def test_cispo(self) -> None:
        """Weights min(r, 5) times A times log p; the last one, 8, is clipped."""
        log_probs = OLD + RATIOS.log()
        weights = torch.tensor([2, 2, 0.5, 0.5, 1, 5], dtype=torch.float64)
        assert value("cispo") == (
            pytest.approx(-(weights * ADVANTAGES * log_probs).sum().item()),
            1,
        )
        assert value("cispo", clip_low=0.2)[1] == 3

    def test_gspo(self) -> None:
        """Sequence 0: ratio 2, mean advantage 0, so nothing. 1: ratio (1/4)^(1/3), advantage 0.5/3.
        3: ratio 8, advantage -1. Sequences 2 and 4 have no tokens.
        """
        s1, a1 = 0.25 ** (1 / 3), 0.5 / 3
        assert value("gspo") == (pytest.approx(-(s1 * a1 - 8)), 0)
        low = bind_loss(LossSpec(name="gspo", clip_low=0.2, clip_high=0.3))
        flipped = LossInputs(
            **{
                **{n: getattr(inputs(), n) for n in LossInputs.__slots__},
                "advantages_N": -ADVANTAGES,
            }
        )
        out = low(flipped)
        assert out.loss.item() == pytest.approx(-(max(s1, 0.8) * -a1 + 1.3))
        assert out.num_clipped.item() == 4  # all tokens of sequences 1 and 3

    def test_masked_importance_sampling(self) -> None:
        """Sequence weights 2 * 2 = 4 (left out), 0.5 * 0.5 * 1 = 0.25 and 8 (left out): 0.25 * (1 -
        1 + 0.5).
        """
        assert value("masked_importance_sampling") == (pytest.approx(-0.25 * 0.5), 3)
        assert value("masked_importance_sampling", ratio_cap=4.5)[1] == 1
        assert value("masked_importance_sampling", ratio_cap=4.5)[0] == pytest.approx(-0.125)

    def test_icepop(self) -> None:
        """Ratios 2, 2, .5, .5, 1 are weights, and 8 is left out: 2 - 2 + .5 - .5 + .5."""
        assert value("icepop", ratio_low=0.4) == (pytest.approx(-0.5), 1)
        assert value("icepop", ratio_low=0.6) == (pytest.approx(-0.5), 3)
        assert value("icepop", ratio_low=0.0, ratio_cap=9.0) == (pytest.approx(7.5), 0)

    def test_token_rejection(self) -> None:
        """Nothing is reweighted: 1 - 1 + 1 - 1 + 0.5; 8 is left out."""
        assert value("token_rejection", ratio_low=0.4, ratio_cap=2.5) == (pytest.approx(-0.5), 1)
        assert value("token_rejection", ratio_low=0.6, ratio_cap=2.5) == (pytest.approx(-0.5), 3)
        assert value("token_rejection", ratio_low=0.6, ratio_cap=9.0) == (pytest.approx(0.5), 2)

    def test_sequence_rejection(self) -> None:
        """Geometric means 2, (1/4)^(1/3) = 0.63 and 8: only the second sequence is within."""
        got = value("sequence_rejection", ratio_low=0.6, ratio_cap=1.5)
        assert got == (pytest.approx(-0.5), 3)
        assert value("sequence_rejection") == (0, 6)

    def test_dppo(self) -> None:
        """Probabilities move by e^-1, e^-2, -0.30, -0.025, 0 and 0.13: the first is more likely
        with A > 0, and left out. The others' log-probs count with their ratios times A.
        """
        log_probs = OLD + RATIOS.log()
        weights = torch.tensor([0, 2, 0.5, 0.5, 1, 8], dtype=torch.float64)
        expected = -(weights * ADVANTAGES * log_probs).sum().item()
        assert value("dppo") == (pytest.approx(expected), 1)
        capped = torch.tensor([0, 2, 0.5, 0.5, 1, 4], dtype=torch.float64)
        expected = -(capped * ADVANTAGES * log_probs).sum().item()
        assert value("dppo", ratio_cap=4.0) == (pytest.approx(expected), 2)
        assert value("dppo", clip_low=0.02)[1] == 2, "the fourth one, less likely with A < 0"

    def test_old_logprobs_replace_the_samplers(self) -> None:
        for name in ("importance_sampling", "ppo", "grpo", "dapo", "cispo", "gspo"):
            on_policy = bind_loss(LossSpec(name=name))(inputs(old=inputs().log_probs_N))
            assert on_policy.num_clipped.item() == 0
            if name != "cispo":
                expected = ADVANTAGES.sum() if name != "gspo" else 0.5 / 3 - 1
                assert on_policy.loss.item() == pytest.approx(-float(expected)), name

    @pytest.mark.parametrize(
        ("estimator", "expected"),
        [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
    )
    def test_kl(self, estimator: str, expected: float) -> None:
        p, reference = (
            torch.tensor([-1.0], dtype=torch.float64),
            torch.tensor([-1.0 - math.log(2)], dtype=torch.float64),
        )
        assert kl_to_reference(p, reference, estimator=estimator).item() == pytest.approx(expected)
        assert kl_to_reference(p, p, estimator=estimator).item() == 0

    def test_terms_add_up(self) -> None:
        spec = LossSpec(
            name="importance_sampling",
            kl=KlSpec(coefficient=0.1, estimator="k2"),
            entropy_bonus=0.5,
        )
        given = inputs()
        terms = total_loss(
            given, spec, entropy_N=torch.full((6,), 2.0), reference_logprobs_N=given.log_probs_N - 1
        )
        assert terms.kl.item() == pytest.approx(3.0)
        assert terms.entropy.item() == pytest.approx(12.0)
        assert terms.total.item() == pytest.approx(7.5 + 0.3 - 6.0)
        assert terms.logprob_gap_max.item() == pytest.approx(math.log(8))

    def test_a_measured_kl_that_is_infinite_leaves_the_loss(self) -> None:
        given = inputs()
        terms = total_loss(
            given,
            LossSpec(name="importance_sampling", kl=KlSpec(coefficient=0, estimator="k3")),
            entropy_N=torch.zeros(6),
            reference_logprobs_N=given.log_probs_N + 1000,
        )
        assert terms.kl.isinf() and terms.total.item() == pytest.approx(7.5)

    def test_a_kl_in_the_reward_is_only_measured(self) -> None:
        kl = KlSpec(estimator="k2", in_reward=True)
        spec = LossSpec(name="importance_sampling", kl=kl, value=ValueSpec())
        given = inputs()
        terms = total_loss(
            given,
            spec,
            entropy_N=torch.zeros(6),
            reference_logprobs_N=given.log_probs_N - 1,
            values=ValueInputs(
                values_N=torch.zeros(6), old_values_N=torch.zeros(6), returns_N=torch.zeros(6)
            ),
        )
        assert terms.kl.item() == pytest.approx(3.0)
        assert terms.total.item() == pytest.approx(7.5)
        with pytest.raises(ConfigError, match=r"in_reward.*kl_of.*or train with a value head"):
            bind_loss(spec.model_copy(update={"value": None}))

    def test_kl_to_the_sampler_is_k3(self) -> None:
        """Of the sampler's policy to the trainer's: r - 1 - log r, never negative."""
        entropy = torch.full((6,), 2.0, requires_grad=True)
        terms = total_loss(inputs(), LossSpec(), entropy_N=entropy, reference_logprobs_N=None)
        expected = (RATIOS - 1 - RATIOS.log()).sum().item()
        assert terms.kl_sampler.item() == pytest.approx(expected)
        assert terms.entropy.item() == 12.0 and not terms.total.requires_grad
        supervised = LossSpec(name="cross_entropy")
        terms = total_loss(inputs(), supervised, entropy_N=entropy, reference_logprobs_N=None)
        assert terms.kl_sampler.item() == 0.0


def plain(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The formula once more, one token or sequence at a time, as its paper writes it; `old` is the
    ratio's denominator.
    """
    bounds = LOSS_PARAMETERS[name]
    low, high = 1 - (bounds.get("clip_low") or 0), 1 + (bounds.get("clip_high") or 0)

    def clipped(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        inside = torch.clip(ratio, low, high) * advantage
        return inside if inside < ratio * advantage else ratio * advantage

    def loss(log_probs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if name == "gspo":
            total = log_probs.new_zeros(())
            for i in range(5):
                rows = torch.eq(SEQUENCES, i)
                if rows.any():
                    total = total - clipped(
                        (log_probs[rows] - old[rows]).mean().exp(), ADVANTAGES[rows].mean()
                    )
            return total
        terms = []
        for lp, o, mu, a in zip(log_probs, old, OLD, ADVANTAGES, strict=True):
            r = (lp - o).exp()
            if name == "cross_entropy":
                terms.append(-lp)
            elif name == "linear":
                terms.append(-a * lp)
            elif name == "importance_sampling":
                terms.append(-r * a)
            elif name in ("grpo", "dapo"):
                terms.append(-clipped(r, a))
            elif name == "ppo":
                bounded = clipped(r, a)
                terms.append(-(torch.max(bounded, 3.0 * a) if a < 0 else bounded))
            elif name == "cispo":
                terms.append(-torch.clip(r, low, high).detach() * a * lp)
            elif name == "truncated_importance_sampling":
                terms.append(-min(math.exp(o - mu), 2.0) * clipped(r, a))
            elif name == "icepop":
                k = math.exp(o - mu)
                terms.append(-k * clipped(r, a) if 0.5 <= k <= 5 else 0 * lp)
            elif name == "token_rejection":
                terms.append(-clipped(r, a) if 0.5 <= math.exp(o - mu) <= 2 else 0 * lp)
            elif name == "dppo":
                p, q = lp.exp().item(), mu.exp().item()
                leaves = p - q > 0.15 if a > 0 else q - p > 0.15
                terms.append(0 * lp if leaves else -min(p / q, 20.0) * a * lp)
            elif name in ("masked_importance_sampling", "sequence_rejection"):
                terms.append(-_sequence_weight(name, old, len(terms)) * clipped(r, a))
        return torch.stack(terms).sum()

    return loss


def _sequence_weight(name: str, old: torch.Tensor, at: int) -> float:
    """The weight of the sequence that token `at` is in."""
    own = [i for i in range(6) if SEQUENCES[i] == SEQUENCES[at]]
    ratios = [math.exp(old[i] - OLD[i]) for i in own]
    if name == "sequence_rejection":
        return float(0.98 <= math.prod(ratios) ** (1 / len(own)) <= 1.02)
    return math.prod(ratios) if math.prod(ratios) <= 2 else 0.0


OWN_OLD = (
    "truncated_importance_sampling",
    "masked_importance_sampling",
    "icepop",
    "token_rejection",
    "sequence_rejection",
)
"""Losses whose old policy is the trainer's, where the batch has none."""


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("name", list(LOSS_PARAMETERS))
def test_gradients_equal_autograd_of_the_plain_formula(name: str, with_old: bool) -> None:
    """In fp64, to 1e-12, at random points that lie inside and outside the clip range."""
    generator = torch.Generator().manual_seed(3)
    clipped, unclipped = 0, 0
    for _ in range(20):
        near = {"gspo": 1e-3, "sequence_rejection": 0.04 if not with_old else 0.4}.get(name, 0.6)
        log_probs = (
            OLD + near * torch.randn(6, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        old = (
            OLD + 0.1 * near * torch.randn(6, generator=generator, dtype=torch.float64)
            if with_old
            else None
        )
        out = bind_loss(LossSpec(name=name))(inputs(log_probs=log_probs, old=old))
        default = log_probs.detach() if name in OWN_OLD else OLD
        expected = plain(name)(log_probs, default if old is None else old)
        assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
        ours, theirs = (
            torch.autograd.grad(out.loss, log_probs)[0],
            torch.autograd.grad(expected, log_probs)[0],
        )
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
        clipped, unclipped = (
            clipped + int(out.num_clipped > 0),
            unclipped + int(out.num_clipped < 6),
        )
    assert unclipped
    assert (
        clipped
        or name in ("cross_entropy", "linear", "importance_sampling")
        or (name, with_old) == ("cispo", False)
        or name == "cispo"
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients(estimator: str) -> None:
    p = OLD.clone().requires_grad_()
    reference = OLD + torch.linspace(-1, 1, 6, dtype=torch.float64)
    ours = torch.autograd.grad(kl_to_reference(p, reference, estimator=estimator).sum(), p)[0]
    d = reference - OLD
    expected = {"k1": torch.ones_like(d), "k2": -d, "k3": 1 - d.exp()}[estimator]
    assert torch.allclose(ours, expected, rtol=1e-12)


@pytest.mark.parametrize("temperatures", [None, (0.1, 0.7, 1.0, 1.5, 3.0)])
@pytest.mark.parametrize("logits_per_chunk", [1, 24, 1000])
@pytest.mark.parametrize("allowed", [None, (2, 5, 7)])
def test_log_probs_and_entropy_with_gradients(
    allowed: tuple[int, ...] | None, logits_per_chunk: int, temperatures: tuple[float, ...] | None
) -> None:
    """Against log_softmax over the rows that count, in fp64, whatever the chunk; the padding's rows
    get no gradient.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, 6, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([5, 2, 7, 7, 5])
    kept = list(allowed or range(10))
    divisors = torch.tensor(temperatures or [1.0] * 5)
    log_probs, entropy = linear_statistics(
        hidden,
        weight,
        targets,
        vocab_size=10,
        allowed_K=None if allowed is None else torch.tensor(allowed),
        temperatures_N=None if temperatures is None else divisors,
        logits_per_chunk=logits_per_chunk,
    )
    reference = ((hidden @ weight.T)[:, kept] / divisors[:, None]).log_softmax(-1)
    place = torch.tensor([kept.index(int(t)) for t in targets])
    plain = (reference[torch.arange(5), place], -(reference.exp() * reference).sum(-1))
    some = torch.randn(5, generator=generator, dtype=torch.float64)
    for ours, theirs in (
        (log_probs, plain[0]),
        (entropy, plain[1]),
        (log_probs * some - entropy, plain[0] * some - plain[1]),
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12)
        gradients = torch.autograd.grad((ours * some).sum(), (hidden, weight), retain_graph=True)
        expected = torch.autograd.grad((theirs * some).sum(), (hidden, weight), retain_graph=True)
        for gradient, other in zip(gradients, expected, strict=True):
            assert torch.allclose(gradient, other, rtol=1e-10, atol=1e-13)
        assert gradients[1][10:].abs().max() == 0


@pytest.mark.parametrize("logits_per_chunk", [1, 24, 1000])
def test_the_backward_pass_leaves_out_what_is_not_learned(logits_per_chunk: int) -> None:
    """The results are those of all positions, the gradient that of the learned ones, whatever
    comes back for the others."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, 6, generator=generator, dtype=torch.float64).requires_grad_()
    temperatures = torch.tensor((0.1, 0.7, 1.0, 1.5, 3.0))
    some = torch.randn(5, generator=generator, dtype=torch.float64)
    learned = torch.tensor([1, 3, 4])
    found = []
    for only in (None, learned):
        log_probs, entropy = linear_statistics(
            hidden,
            weight,
            torch.tensor([5, 2, 7, 7, 5]),
            vocab_size=10,
            temperatures_N=temperatures,
            learned_N=only,
            logits_per_chunk=logits_per_chunk,
        )
        values = log_probs * some - entropy
        loss = values[learned].sum() if only is None else values.sum()
        found.append((values, torch.autograd.grad(loss, (hidden, weight))))
    (plain, expected), (ours, gradients) = found
    assert torch.equal(ours, plain)
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-10, atol=1e-13)
    assert gradients[0][[0, 2]].count_nonzero() == 0


def test_saved_memory_does_not_grow_with_the_vocabulary() -> None:
    """What autograd keeps between forward and backward is the hidden states, the weight and a few
    numbers for each position.
    """
    saved: list[torch.Tensor] = []
    hidden, weight = (
        torch.randn(64, 8, requires_grad=True),
        torch.randn(1000, 8, requires_grad=True),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        log_probs, _ = linear_statistics(hidden, weight, torch.arange(64), vocab_size=1000)
    assert sum(t.numel() for t in saved) <= hidden.numel() + weight.numel() + 3 * 64
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (hidden @ weight.T).log_softmax(-1)[torch.arange(64), torch.arange(64)].sum()
    assert sum(t.numel() for t in saved) >= 64 * 1000, "the accounting sees full logits"
    log_probs.sum().backward()


class TestRegistry:
    def test_every_built_in_is_registered_with_the_specs_parameters(self) -> None:
        for name, parameters in LOSS_PARAMETERS.items():
            assert set(registered(name).parameters) == set(parameters), name

    def test_every_loss_names_its_paper(self) -> None:
        for name in LOSS_PARAMETERS:
            assert re.search(
                r"arXiv:\d{4}\.\d{5}", inspect.getdoc(registered(name).function) or ""
            ), name

    def test_one_of_the_users_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_losses_for_a_test.py").write_text(
            "from splice.losses import LossOutput, register_loss\n"
            "@register_loss('squared_for_a_test')\n"
            "def squared(log_probs_N, *, advantages_N, sharpness: float = 2.0, offset: float):\n"
            "    return LossOutput(loss=(sharpness * advantages_N * log_probs_N ** 2).sum() + "
            "offset,\n"
            "                      num_clipped=log_probs_N.new_zeros(()))\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import_losses(["my_losses_for_a_test"])
        import_losses(["my_losses_for_a_test"])
        out = bind_loss(LossSpec(name="squared_for_a_test", params={"offset": 1.0}))(inputs())
        assert out.loss.item() == pytest.approx(
            (2 * ADVANTAGES * inputs().log_probs_N ** 2).sum().item() + 1
        )
        with pytest.raises(
            ConfigError,
            match=r"\['sharp'\] are no parameters of squared_for_a_test, which takes \['offset', 'sharpness'\]",  # noqa: E501
        ):
            bind_loss(LossSpec(name="squared_for_a_test", params={"sharp": 1.0}))
        with pytest.raises(ConfigError, match=r"squared_for_a_test needs \['offset'\]"):
            bind_loss(LossSpec(name="squared_for_a_test"))
        del sys.modules["my_losses_for_a_test"], registry._LOSSES["squared_for_a_test"]

    def test_a_users_module_takes_no_built_in_name(self, tmp_path: Path) -> None:
        """As in a starting trainer, where nothing has loaded the built-in losses yet."""
        (tmp_path / "my_grpo_for_a_test.py").write_text(
            "from splice.losses import register_loss\n"
            "register_loss('grpo')(lambda log_probs_N: None)\n"
        )
        code = (
            "from trainer_node.training import registry; "
            "registry.import_losses(['my_grpo_for_a_test'])"
        )
        env = child_env()
        env["PYTHONPATH"] += f":{tmp_path}"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert "'grpo' is taken by trainer_node.training.losses.grpo" in done.stderr

    def test_names_are_not_taken_twice_and_shapes_are_checked(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"the loss name 'grpo' is taken by trainer_node\.training\.losses\.grpo",
        ):
            register_loss("grpo")(
                lambda log_probs_N: LossOutput(
                    loss=log_probs_N.sum(), num_clipped=log_probs_N.sum()
                )
            )
        with pytest.raises(ConfigError, match="no loss 'nowhere'; there are"):
            bind_loss(LossSpec(name="nowhere"))
        with pytest.raises(ConfigError, match="no_such_module cannot be imported"):
            import_losses(["no_such_module"])
        with pytest.raises(ConfigError, match="must be called as"):
            register_loss("positional")(lambda log_probs_N, advantages_N: None)  # type: ignore[arg-type,return-value]
        register_loss("vector_for_a_test")(_vector)
        with pytest.raises(ConfigError, match=r"returned shape \(6,\)"):
            bind_loss(LossSpec(name="vector_for_a_test"))(inputs())
        del registry._LOSSES["vector_for_a_test"]


def _vector(log_probs_N: torch.Tensor) -> LossOutput:
    return LossOutput(loss=log_probs_N, num_clipped=log_probs_N.new_zeros(()))


class TestSpec:
    @pytest.mark.parametrize("name", list(LOSS_PARAMETERS))
    def test_defaults_and_round_trip(self, name: str) -> None:
        spec = LossSpec(name=name)
        assert {p: getattr(spec, p) for p in LOSS_PARAMETERS[name]} == LOSS_PARAMETERS[name]
        assert LossSpec.model_validate(spec.model_dump()) == spec
        assert LossSpec.model_validate_json(spec.model_dump_json()) == spec
        assert spec.normalize_by == ("sequences" if name == "gspo" else "tokens")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"name": "grpo", "dual_clip": 2.0},
                r"\['dual_clip'\] are no parameters of the loss grpo; it takes \['clip_high', 'clip_low'\]",  # noqa: E501
            ),
            ({"name": "cross_entropy", "clip_low": 0.1}, "it takes none"),
            ({"name": "mine", "clip_low": 0.1}, "put them in params"),
            ({"name": "ppo", "params": {"clip_low": 0.1}}, "params is for losses of your own"),
            ({"name": "ppo", "clip_low": None}, r"\['clip_low'\] of the loss ppo must be numbers"),
            ({"normalize_by": 0}, "greater than 0"),
            ({"normalize_by": "batches"}, "tokens"),
            ({"clip_low": math.nan}, "finite"),
            ({"entropy_bonus": math.inf}, "finite"),
            ({"kl": {"coefficient": math.nan}}, "finite"),
            ({"kl": {"estimator": "k4"}}, "k1"),
        ],
    )
    def test_refusals(self, fields: dict, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LossSpec(**fields)
