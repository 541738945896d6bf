"""What needs no Megatron: merge plan, merge, losses, batch refusals, checkpoint folders."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from orchestrator.errors import ConfigError, MergePlanError
from orchestrator.protocol.messages import KlSpec, LossSpec, Manifest, TensorSpec, forward_specs
from tests.numerics import sum_error_bound
from tests.trainer_node.data import LENGTHS, arrays, make_batch
from trainer_node.adapters.merge import LoraDelta, MergeOp, merge_tensor, plan_merge
from trainer_node.adapters.rounding import NEAREST
from trainer_node.export.hf_export import plan_files
from trainer_node.hf.names import decoder_name, strip_wrappers
from trainer_node.training import gap
from trainer_node.training.batch import (
    BatchError,
    check_accumulation,
    decode_forward,
    micro_batches,
)
from trainer_node.training.losses import bind_loss, cross_entropy, grpo, linear_statistics
from trainer_node.training.sums import Pending, StepSums


def delta(rank: int = 1, rows: int = 2, columns: int = 3) -> LoraDelta:
    return LoraDelta(lora_A_RI=torch.ones(rank, columns), lora_B_OR=torch.ones(rows, rank))


def merged(weight: torch.Tensor, d: LoraDelta, scale: float) -> torch.Tensor:
    return merge_tensor(weight, d, scale=scale, rounding=NEAREST, name="w")


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


class TestMerge:
    def test_by_hand(self) -> None:
        weight = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
        kept = weight.clone()
        d = LoraDelta(
            lora_A_RI=torch.tensor([[1.0, 0, 2]]), lora_B_OR=torch.tensor([[10.0], [100]])
        )
        assert merged(weight, d, 0.5).tolist() == [[6, 2, 13], [54, 5, 106]]
        assert torch.equal(weight, kept)

    def test_a_square_matrix_is_not_transposed(self) -> None:
        d = LoraDelta(lora_A_RI=torch.tensor([[0.0, 1]]), lora_B_OR=torch.tensor([[1.0], [0]]))
        assert merged(torch.zeros(2, 2), d, 1.0).tolist() == [[0, 1], [0, 0]]

    def test_rounds_once(self) -> None:
        """1 + 2^-9 + 2^-9 is representable in bf16 only if the sum is rounded at the end: 2^-9
        alone would vanish beside 1.
        """
        weight = torch.ones(1, 1, dtype=torch.bfloat16)
        d = LoraDelta(lora_A_RI=torch.full((2, 1), 2.0**-9), lora_B_OR=torch.ones(1, 2) * 2)
        found = merged(weight, d, 1.0)
        assert found.dtype is torch.bfloat16
        assert found.item() == 1 + 2.0**-7

    def test_plan_in_target_order(self) -> None:
        targets = {n: spec(n, 2, 3) for n in ("b.weight", "norm.weight", "a.weight")}
        ops = plan_merge(deltas={"a": delta(), "b": delta()}, targets=targets)
        assert ops == [
            MergeOp(target="b.weight", adapter="b"),
            MergeOp(target="a.weight", adapter="a"),
        ]

    def test_every_adapter_needs_a_target(self) -> None:
        with pytest.raises(MergePlanError, match=r"adapter a has no target.*a\.weight"):
            plan_merge(deltas={"a": delta()}, targets={"b.weight": spec("b.weight", 2, 3)})

    def test_no_target_is_hit_twice(self) -> None:
        deltas = {"m.a": delta(), "module.m.a": delta()}
        with pytest.raises(
            MergePlanError, match=r"m\.a\.weight is hit by two adapters: m\.a and module\.m\.a"
        ):
            plan_merge(deltas=deltas, targets={"m.a.weight": spec("m.a.weight", 2, 3)})

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(
            MergePlanError, match=r"adapter a has A \(1, 3\) and B \(2, 1\).*\(3, 2\)"
        ):
            plan_merge(deltas={"a": delta()}, targets={"a.weight": spec("a.weight", 3, 2)})

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.layers.0.mlp.linear_fc1.weight",
            "module.module.decoder.layers.0.mlp.linear_fc1.weight",
            "_orig_mod.module.decoder.layers.0._orig_mod.mlp.linear_fc1.weight",
            "module.language_model.decoder.layers.0.mlp.linear_fc1.weight",
        ],
    )
    def test_wrappers_and_prefixes(self, name: str) -> None:
        assert decoder_name(name) == "decoder.layers.0.mlp.linear_fc1.weight"

    def test_names_that_only_look_wrapped(self) -> None:
        assert strip_wrappers("decoder.submodule.weight") == "decoder.submodule.weight"
        assert decoder_name("vision_model.decoder.layers.0.weight") is None
        assert decoder_name("embedding.word_embeddings.weight") is None


ROUNDING = sum_error_bound(torch.float32, count=12, magnitude=1.0)
"""Of a softmax over 12 logits or less."""


def log_probs_of(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    allowed_K: torch.Tensor | None = None,
):
    """Log-probs of given logits: those of a head that is the identity."""
    weight = torch.eye(logits.shape[1])
    return linear_statistics(logits, weight, targets, vocab_size=vocab_size, allowed_K=allowed_K)[0]


class TestLosses:
    def test_log_probs_ignore_padding(self) -> None:
        logits, targets = torch.randn(5, 12), torch.tensor([0, 3, 9, 1, 2])
        logits[:, 10:] = 50.0
        ours = log_probs_of(logits, targets, vocab_size=10)
        assert torch.allclose(
            ours, logits[:, :10].log_softmax(-1).gather(1, targets[:, None])[:, 0], atol=ROUNDING
        )
        counted = log_probs_of(logits, targets, vocab_size=12)
        assert (counted < ours - 30).all(), "the mutant that counts the padding is told apart"

    def test_log_probs_over_allowed_ids(self) -> None:
        logits, allowed = torch.randn(3, 10, requires_grad=True), torch.tensor([2, 5, 7])
        ours = log_probs_of(logits, torch.tensor([5, 2, 7]), vocab_size=10, allowed_K=allowed)
        theirs = logits[:, allowed].log_softmax(-1)[torch.arange(3), torch.tensor([1, 0, 2])]
        assert torch.allclose(ours, theirs, atol=ROUNDING)
        gradient = torch.autograd.grad(ours.sum(), logits, retain_graph=True)[0]
        assert torch.allclose(gradient, torch.autograd.grad(theirs.sum(), logits)[0], atol=ROUNDING)
        assert gradient[:, 0].abs().max() == 0

    def test_grpo_by_hand(self) -> None:
        """Ratios 2, 2, 0.5, 0.5 with advantages 1, -1, 1, -1 and clip 0.2/0.3: -(1.3 - 2 + 0.5 -
        0.8) = 1.0; two are clipped.
        """
        old = torch.zeros(4)
        new = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
        out = grpo(
            new,
            sampler_logprobs_N=old,
            advantages_N=torch.tensor([1.0, -1, 1, -1]),
            clip_low=0.2,
            clip_high=0.3,
        )
        assert out.loss.item() == pytest.approx(1.0)
        assert out.num_clipped.item() == 2

    def test_cross_entropy_is_a_sum(self) -> None:
        assert cross_entropy(torch.tensor([-1.0, -2.5])).loss.item() == 3.5


class TestBatch:
    @pytest.mark.parametrize(
        ("field", "index", "value", "message"),
        [
            ("tokens", 10, 300, r"sequence 1: tokens\[1\] = 300 is outside the vocabulary of 300"),
            ("tokens", 0, -1, r"sequence 0: tokens\[0\] = -1 is outside"),
            ("advantages", 35, np.nan, r"sequence 4: advantages\[2\] = nan is not finite"),
            (
                "sampler_logprobs",
                20,
                -np.inf,
                r"sequence 2: sampler_logprobs\[6\] = -inf is not finite",
            ),
            ("loss_mask", 14, 1, r"sequence 2: loss_mask\[0\] = 1.0 marks the first token"),
            ("loss_mask", 17, 0.5, r"sequence 2: loss_mask\[3\] = 0.5 is neither 0 nor 1"),
            ("sequence_lengths", 1, 0, r"sequence 1: sequence_lengths is 0"),
            (
                "sequence_lengths",
                3,
                65,
                r"sequence 3: sequence_lengths is 65, longer than the model's 64",
            ),
            ("sequence_lengths", 4, 4, r"tokens has 36 elements but sequence_lengths sum to 37"),
        ],
    )
    def test_refusals(self, field: str, index: int, value: float, message: str) -> None:
        values = arrays()
        values[field][index] = value
        with pytest.raises(BatchError, match=message):
            make_batch(values)

    def test_all_masked(self) -> None:
        values = arrays()
        values["loss_mask"][:] = 0
        assert make_batch(values).num_loss_tokens == 0

    def test_empty(self) -> None:
        with pytest.raises(BatchError, match="the batch is empty"):
            make_batch({k: v[:0] for k, v in arrays().items()})

    def test_a_token_that_was_not_allowed(self) -> None:
        with pytest.raises(
            BatchError, match=r"sequence 0: tokens\[2\] = \d+ carries loss but is not among"
        ):
            make_batch(loss=LossSpec(allowed_token_ids=(1, 2)))
        with pytest.raises(BatchError, match="ids below 300"):
            make_batch(loss=LossSpec(allowed_token_ids=(1, 300)))

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("old_logprobs", np.nan, r"sequence 1: old_logprobs\[2\] = nan is not finite"),
            (
                "reference_logprobs",
                np.inf,
                r"sequence 1: reference_logprobs\[2\] = inf is not finite",
            ),
        ],
    )
    def test_optional_tensors_are_checked(self, field: str, value: float, message: str) -> None:
        values = arrays() | {field: np.zeros(sum(LENGTHS), np.float32)}
        batch = make_batch(values)
        assert getattr(batch, f"{field}_T") is not None
        micro = micro_batches(batch, budget=99)[0]
        assert getattr(micro, f"{field}_N").shape == micro.targets_N.shape
        values[field][11] = value
        with pytest.raises(BatchError, match=message):
            make_batch(values)
        with pytest.raises(
            BatchError, match=rf"{field} has 35 elements but sequence_lengths sum to 36"
        ):
            make_batch(values | {field: np.zeros(35, np.float32)})

    def test_one_temperature_for_each_sequence_is_one_for_each_of_its_tokens(self) -> None:
        each = np.arange(1, len(LENGTHS) + 1, dtype=np.float32)
        whole = (
            make_batch(arrays() | {"temperatures": each}),
            make_batch(arrays() | {"temperatures": each.repeat(LENGTHS)}),
        )
        assert [b.temperatures_T.tolist() for b in whole] == [each.repeat(LENGTHS).tolist()] * 2
        assert make_batch().temperatures_T is None

    @pytest.mark.parametrize(
        ("temperature", "message"),
        [
            (0.0, r"sequence 1: temperatures\[2\] = 0.0 is greedy decoding, .*; sample to train"),
            (
                -1.0,
                r"sequence 1: temperatures\[2\] = -1.0 is below 0.01, the lowest temperature that vLLM samples at",  # noqa: E501
            ),
            (0.009, r"sequence 1: temperatures\[2\] = 0.008\d* is below 0.01"),
            (np.nan, r"sequence 1: temperatures\[2\] = nan is not finite"),
            (np.inf, r"sequence 1: temperatures\[2\] = inf is not finite"),
        ],
    )
    def test_temperatures_that_nothing_is_sampled_at(
        self, temperature: float, message: str
    ) -> None:
        each = np.full(sum(LENGTHS), 0.01, np.float32)
        make_batch(arrays() | {"temperatures": each})
        each[11] = temperature
        with pytest.raises(BatchError, match=message):
            make_batch(arrays() | {"temperatures": each})
        with pytest.raises(
            BatchError, match="temperatures has 7 elements but sequence_lengths sum to 36"
        ):
            make_batch(arrays() | {"temperatures": each[:7]})

    def test_a_given_reference_must_be_given(self) -> None:
        with pytest.raises(BatchError, match="no reference_logprobs"):
            make_batch(loss=LossSpec(kl=KlSpec(reference="given")))

    def test_lengths_that_overflow_do_not_pass(self) -> None:
        values = arrays()
        values["sequence_lengths"] = np.array([2**31 - 1, 2**31 - 1, 38, 1, 1], np.int32)
        with pytest.raises(BatchError, match="sequence 0: sequence_lengths is 2147483647, longer"):
            make_batch(values)


def forward_batch(
    tokens: list[int],
    lengths: list[int],
    allowed: tuple[int, ...] | None = None,
    temperatures: list[float] | None = None,
):
    buffers = [np.array(tokens, np.int32).tobytes(), np.array(lengths, np.int32).tobytes()]
    specs = forward_specs(
        num_sequences=len(lengths),
        num_tokens=len(tokens),
        optional=["temperatures"] if temperatures else (),
        token_temperatures=len(temperatures or ()) == len(tokens),
    )
    if temperatures:
        buffers.append(np.array(temperatures, np.float32).tobytes())
    return decode_forward(
        specs=specs, buffers=buffers, vocab_size=300, max_length=64, allowed_token_ids=allowed
    )


class TestForward:
    def test_all_but_the_first_tokens_are_asked_for(self) -> None:
        assert forward_batch([1, 2, 3, 4, 5], [2, 3]).loss_mask_T.tolist() == [0, 1, 0, 1, 1]

    @pytest.mark.parametrize("temperatures", [[0.5, 2.0], [0.5, 0.5, 2.0, 2.0, 2.0]])
    def test_temperatures(self, temperatures: list[float]) -> None:
        assert forward_batch(
            [1, 2, 3, 4, 5], [2, 3], None, temperatures
        ).temperatures_T.tolist() == [0.5, 0.5, 2, 2, 2]
        assert forward_batch([1, 2], [2]).temperatures_T is None
        with pytest.raises(BatchError, match=r"sequence 1: temperatures\[0\] = 0.0 is greedy"):
            forward_batch([1, 2, 3, 4, 5], [2, 3], None, [0.5, 0.0])

    @pytest.mark.parametrize(
        ("tokens", "lengths", "allowed", "message"),
        [
            ([1, 300, 3], [3], None, r"sequence 0: tokens\[1\] = 300 is outside"),
            ([1, 2, 3], [2], None, "tokens has 3 elements but sequence_lengths sum to 2"),
            ([1] * 65, [65], None, "longer than the model's 64"),
            ([], [], None, "empty"),
            ([1], [1], (300,), "ids below 300"),
        ],
    )
    def test_refusals(
        self, tokens: list[int], lengths: list[int], allowed: tuple[int, ...] | None, message: str
    ) -> None:
        with pytest.raises(BatchError, match=message):
            forward_batch(tokens, lengths, allowed)


class TestAccumulation:
    def test_none_is_the_data_parallel_size(self) -> None:
        check_accumulation(None, dp_size=4)
        check_accumulation(12, dp_size=4)

    @pytest.mark.parametrize(("wanted", "choices"), [(6, "4 or 8"), (3, "4$"), (9, "8 or 12")])
    def test_a_number_that_does_not_divide(self, wanted: int, choices: str) -> None:
        with pytest.raises(
            BatchError,
            match=f"= {wanted} is not a multiple of the data-parallel size 4; choose {choices}",
        ):
            check_accumulation(wanted, dp_size=4)


class TestSums:
    def test_denominators(self) -> None:
        sums = StepSums(loss=12.0, num_tokens=6, num_loss_sequences=3, num_sequences=4)
        assert [sums.metrics(by)["loss"] for by in ("tokens", "sequences", 24.0)] == [2.0, 4.0, 0.5]
        assert "kl_mean" not in sums.metrics("tokens")

    def test_batches_add_up_and_are_divided_once(self) -> None:
        """A mean of means would be (1 + 5) / 2 = 3."""
        a = StepSums(
            loss=3.0,
            num_tokens=3,
            num_loss_sequences=1,
            num_sequences=1,
            logprob_gap_max=0.5,
            gap_tokens=3,
            kl=6.0,
            kl_tokens=3,
        )
        b = StepSums(
            loss=5.0, num_tokens=1, num_loss_sequences=1, num_sequences=2, logprob_gap_max=0.25
        )
        pending = Pending().plus(a, normalize_by="tokens").plus(b, normalize_by="tokens")
        assert (pending.num_batches, pending.denominator) == (2, 4)
        metrics = pending.sums.metrics("tokens")
        assert (
            metrics["loss"],
            metrics["num_sequences"],
            metrics["logprob_gap_max"],
            metrics["kl_mean"],
        ) == (
            2.0,
            3.0,
            0.5,
            2.0,
        )
        with pytest.raises(
            ConfigError, match=r"normalize_by = 3\.0, but the 2 pending batches came with 'tokens'"
        ):
            pending.check(3.0)
        Pending().check(3.0)

    def test_sequences_without_loss_do_not_count(self) -> None:
        values = arrays()
        values["loss_mask"][: LENGTHS[0]] = 0
        assert make_batch(values).num_loss_sequences == 4


class TestGap:
    def sums(self, mean: float, count: int = 4) -> StepSums:
        return StepSums(
            logprob_gap=mean * count,
            logprob_gap_max=2 * mean,
            gap_tokens=count,
            num_tokens=count,
            num_clipped=1,
        )

    def test_only_losses_that_take_the_samplers_log_probs_count(self) -> None:
        both = self.sums(0.5) + StepSums(num_tokens=12, loss=1.0)
        assert both.metrics("tokens")["logprob_gap_mean"] == both.logprob_gap_mean == 0.5
        without = StepSums(num_tokens=3)
        assert without.logprob_gap_mean == 0.0
        assert not {"logprob_gap_mean", "logprob_gap_max", "kl_sampler_mean"} & set(
            without.metrics("tokens")
        ), "a gap that nobody measured is no gap of 0"

    @pytest.mark.parametrize(
        ("dtype", "mean", "coldest", "warns"),
        [
            ("float32", 1e-6, 1.0, False),
            ("float32", 2e-3, 1.0, True),
            ("float32", 2e-3, 0.4, False),
            ("bfloat16", 0.031, 1.0, False),
            ("bfloat16", 0.031, 0.25, False),
            ("bfloat16", 0.47, 0.7, True),
            ("bfloat16", 0.15, 2.0, True),
            ("float32", math.nan, 1.0, True),
        ],
    )
    def test_what_rounding_explains_is_not_said(
        self, dtype: str, mean: float, coldest: float, warns: bool
    ) -> None:
        temperatures_T = torch.tensor([3.0, coldest])
        said = gap.warnings(self.sums(mean), LossSpec(), dtype=dtype, temperatures_T=temperatures_T)
        assert bool(said) == warns
        if warns:
            assert re.search(
                rf"differ.* by .* nats in the mean and .* at most, 25.0% of .*; {dtype} explains .*temperature",  # noqa: E501
                said[0],
            )
        assert (
            gap.warnings(
                self.sums(mean), LossSpec(max_logprob_gap=5.0), dtype=dtype, temperatures_T=None
            )
            == []
        )

    @pytest.mark.parametrize(("mean", "warns"), [(0.02, False), (0.68, True)])
    def test_older_samples_explain_more_than_rounding(self, mean: float, warns: bool) -> None:
        said = gap.warnings(
            self.sums(mean), LossSpec(off_policy=True), dtype="float32", temperatures_T=None
        )
        assert bool(said) == warns and all("samples of an older version" in text for text in said)

    def test_a_jobs_own_bound(self) -> None:
        gap.check(self.sums(0.5), LossSpec())
        gap.check(self.sums(0.5), LossSpec(max_logprob_gap=0.5))
        for mean in (0.51, math.nan):
            with pytest.raises(
                gap.LogprobGapError,
                match=r"loss.max_logprob_gap is 0.5. Usual causes: a temperature",
            ):
                gap.check(self.sums(mean), LossSpec(max_logprob_gap=0.5))
        with pytest.raises(ConfigError, match="cross_entropy takes no sampler_logprobs"):
            bind_loss(LossSpec(name="cross_entropy", max_logprob_gap=0.5))


class TestExportPlan:
    def test_files(self) -> None:
        manifest = Manifest(tensors=(*(spec(n, 10) for n in "abcd"), spec("big", 100)))
        assert plan_files(manifest, shard_bytes=80) == {
            "model-00001-of-00003.safetensors": ("a", "b"),
            "model-00002-of-00003.safetensors": ("c", "d"),
            "model-00003-of-00003.safetensors": ("big",),
        }
        assert plan_files(manifest, shard_bytes=10**9) == {
            "model.safetensors": ("a", "b", "c", "d", "big")
        }
