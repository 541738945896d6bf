"""Batches: what is refused, and which tensors stand for what."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.protocol.messages import KlSpec, LossSpec, forward_specs
from tests.trainer_node.data import LENGTHS, arrays, make_batch
from trainer_node.training.batch import BatchError, check_accumulation, decode_forward
from trainer_node.training.packing import micro_batches


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

    def test_one_version_for_each_sequence_is_one_for_each_of_its_tokens(self) -> None:
        each = np.arange(3, 3 + len(LENGTHS), dtype=np.int32)
        for given in (each, each.repeat(LENGTHS)):
            batch = make_batch(arrays() | {"versions": given})
            assert batch.versions_T.tolist() == each.repeat(LENGTHS).tolist()
        assert make_batch().versions_T is None

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
        by_token=["temperatures"] if len(temperatures or ()) == len(tokens) else [],
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
