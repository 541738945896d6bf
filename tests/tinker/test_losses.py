"""Protobuf to batches: values predicted by hand, and every refusal by name."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from orchestrator.errors import ConfigError
from splice.tinker import losses, wire
from splice.tinker.refused import Refused
from tests.tinker.messages import TARGETS, TOKENS, datum, passing, sft, tensor

RL = {"target_tokens": [0, 0, 101, 7], "logprobs": [0.0, 0.0, -1.5, -2.0]}


def planned(body: bytes, *, temperature: float = 1.0) -> losses.Pass:
    return losses.plan(wire.read_pass(wire.parsed_pass(body)), temperature=temperature)


def buffers(done: losses.Pass) -> dict[str, list[float]]:
    batch = done.batch()
    pairs = zip(batch.specs, batch.buffers, strict=True)
    return {s.name: np.frombuffer(b, s.dtype).tolist() for s, b in pairs}


def test_tokens_are_the_input_and_the_last_target():
    rows = buffers(planned(sft()))
    assert rows["tokens"] == [*TOKENS, 7] and rows["sequence_lengths"] == [5]
    assert rows["loss_mask"] == [0, 0, 0, 1, 1], "row t describes the prediction of token t"
    assert rows["advantages"] == [0, 0, 0, 1, 0.5] and rows["sampler_logprobs"] == [0.0] * 5


def test_two_data_lie_end_to_end():
    body = passing(
        datum(**RL, advantages=[0.0, 0.0, 1.0, -1.0]),
        datum([5, 6], target_tokens=[6, 9], logprobs=[0.0, -3.0], advantages=[0.0, 2.0]),
        loss="importance_sampling",
    )
    rows = buffers(planned(body))
    assert rows["tokens"] == [5, 17, 33, 101, 7, 5, 6, 9]
    assert rows["loss_mask"] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert rows["advantages"] == [0, 0, 0, 1, -1, 0, 0, 2]
    assert rows["sampler_logprobs"] == [0, 0, 0, -1.5, -2, 0, 0, -3]


def test_an_answer_without_advantage_still_counts():
    """Its tokens carry no gradient, but the step happens and the metrics are the sampler's."""
    rows = buffers(planned(passing(datum(**RL, advantages=[0.0] * 4), loss="ppo")))
    assert rows["loss_mask"] == [0, 0, 0, 1, 1]


def test_weights_of_zeros_are_a_loss_of_0():
    """A satisfied hinge, for example: a refusal would end the SDK's client."""
    rows = buffers(planned(passing(datum(target_tokens=TARGETS, weights=[0.0] * 4))))
    assert rows["loss_mask"] == [0.0] * 5


def test_logprobs_come_back_at_their_targets():
    done = planned(passing(datum(**RL, advantages=[0.0, 0.0, 1.0, 1.0]), loss="cispo"))
    (found,) = done.by_datum(np.array([0.0, -1, -2, -3, -4], "f4"))
    assert found.tolist() == [0, 0, -3, -4], "0 where the target is not the next token"


def test_a_linear_loss_is_minus_the_sum_of_weight_times_logprob():
    body = passing(datum(target_tokens=TARGETS, weights=[0.0, 0.0, 1.0, -0.5]), forward_only=True)
    done = planned(body)
    logprobs = done.by_datum(np.array([0.0, -1, -2, -3, -4], "f4"))
    assert losses.forward_metrics(done, logprobs) == {"loss:sum": 3.0 - 2.0}
    rows = buffers(done)
    assert done.loss.name == "linear" and rows["advantages"] == [0, 0, 0, 1, -0.5]
    assert rows["loss_mask"] == [0, 0, 0, 1, 1] and "temperatures" not in rows


def test_a_policy_has_the_servers_temperature_and_a_linear_loss_has_1():
    body = passing(datum(**RL, advantages=[0.0, 0.0, 1.0, -1.0]), loss="ppo")
    done = planned(body, temperature=0.7)
    assert buffers(done)["temperatures"] == [pytest.approx(0.7)], "one for each sequence"
    assert "temperatures" not in buffers(planned(sft(), temperature=0.7))


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_every_loss_is_a_sum(loss):
    assert losses.loss_spec(loss, {}).normalize_by == 1.0


def test_clips_are_thresholds_of_the_ratio():
    spec = losses.loss_spec("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5})
    assert (spec.clip_low, spec.clip_high) == (pytest.approx(0.3), pytest.approx(0.5))
    assert spec.dual_clip is None, "Tinker's ppo has no dual clip"
    spec = losses.loss_spec("cispo", {})
    assert (spec.clip_low, spec.clip_high) == (pytest.approx(0.2), pytest.approx(0.2))


def test_an_output_is_read_by_the_sdk():
    from tinker.proto.response_conv import deserialize_forward_backward_output

    logprobs = [np.array([-1.0, -2.0], "f4"), np.array([-3.0], "f4")]
    found = deserialize_forward_backward_output(wire.pass_output(logprobs, {"loss:sum": 2.0}))
    assert [o["logprobs"].tolist() for o in found.loss_fn_outputs] == [[-1, -2], [-3]]
    assert found.metrics == {"loss:sum": 2.0}


def test_samples_are_read_by_the_sdk():
    from tinker.proto.response_conv import deserialize_sample_response

    top = wire.TopK(k=2, rows=[[], [(4, -0.5), (9, -1.0)], [(4, -0.25)]])
    sampled = wire.Sampled(tokens=[7, 9], logprobs=[-1.0, -2.0], is_cut=True)
    samples = wire.Samples(
        sequences=(sampled,), prompt_logprobs=[float("nan"), -1, -2], prompt_top=top
    )
    found = deserialize_sample_response(wire.sample_output(samples))
    assert found.sequences[0].tokens == [7, 9] and found.sequences[0].stop_reason == "length"
    assert found.prompt_logprobs == [None, -1, -2]
    assert found.topk_prompt_logprobs == [None, [(4, -0.5), (9, -1.0)], [(4, -0.25)]]


ADVANTAGES = {"advantages": [0.0, 0.0, 1.0, 1.0]}
WEIGHTS = {"target_tokens": TARGETS, "weights": [0.0, 0.0, 1.0, 1.0]}


def with_chunk(name: str) -> pb.Datum:
    message = datum(**WEIGHTS)
    getattr(message.model_input.add(), name).SetInParent()
    return message


REFUSALS = {
    "image": (passing(with_chunk("image")), "datum 0: model_input has a chunk of image"),
    "audio": (passing(with_chunk("dmel")), "a chunk of dmel"),
    "empty chunk": (passing(datum([], **WEIGHTS)), "datum 0: model_input has no tokens"),
    "no data": (passing(), "data is empty"),
    "seq_id": (sft(seq_id=0), "seq_id is 0"),
    "dro": (sft(loss="dro"), "loss_fn 'dro' is not supported; there are cispo, cross_entropy"),
    "gspo": (sft(loss="gspo"), "loss_fn 'gspo'"),
    "custom": (sft(loss="custom"), "loss_fn 'custom'"),
    "inputs of another": (
        passing(datum(**WEIGHTS), loss="ppo"),
        "datum 0: ppo needs advantages, logprobs",
    ),
    "a foreign input": (
        passing(datum(**WEIGHTS, mask=[0.0, 0.0, 1.0, 1.0])),
        "mask is not supported",
    ),
    "shift": (
        passing(datum(target_tokens=[17, 33, 102, 7], weights=WEIGHTS["weights"])),
        "datum 0: target_tokens[2] is 102, but the next token of model_input is 101",
    ),
    "shift in a forward pass": (
        passing(datum(target_tokens=[18, 33, 101, 7], weights=[0.0] * 4), forward_only=True),
        "target_tokens[0] is 18",
    ),
    "short": (
        passing(datum(target_tokens=TARGETS, weights=[1.0])),
        "datum 0: weights has 1 values and the shape [1]; model_input has 4 tokens",
    ),
    "two-dimensional": (
        passing(datum(target_tokens=tensor([TARGETS, TARGETS]), weights=[1.0] * 4)),
        "several targets for one position",
    ),
    "shape": (
        passing(datum(target_tokens=tensor(TARGETS, shape=[5]), weights=[1.0] * 4)),
        "target_tokens has 4 values and the shape [5]",
    ),
    "nan": (
        passing(datum(target_tokens=TARGETS, weights=[0.0, 0.0, float("nan"), 1.0])),
        "weights has values that are not finite",
    ),
    "float targets": (
        passing(datum(target_tokens=[1.0, 2.0, 3.0, 4.0], weights=[1.0] * 4)),
        "target_tokens is float32; send int64",
    ),
    "parameter": (sft(beta=0.1), "loss_fn_config: cross_entropy takes nothing; beta"),
    "text for a number": (
        passing(datum(**RL, **ADVANTAGES), loss="ppo", clip_low_threshold="0.8"),
        "clip_low_threshold is '0.8'; send a number",
    ),
    "thresholds": (
        passing(datum(**RL, **ADVANTAGES), loss="ppo", clip_low_threshold=1.5),
        "clip_low_threshold must be in [0, 1]",
    ),
    "garbage": (b"\xff" * 40, "no ForwardBackwardRequest"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_refused(what):
    body, why = REFUSALS[what]
    with pytest.raises(Refused) as caught:
        planned(body)
    assert why in str(caught.value) and 400 <= caught.value.status < 500
    assert isinstance(caught.value, ConfigError)


def test_a_target_under_the_prompt_may_be_anything():
    body = passing(datum(target_tokens=[-100, 0, 101, 7], weights=WEIGHTS["weights"]))
    assert buffers(planned(body))["tokens"] == [*TOKENS, 7]


# ---------------------------------------------------------------- zstd


def test_a_compressed_body_comes_back():
    body = sft()
    packed = zstandard.ZstdCompressor().compress(body)
    assert wire.decompressed(packed, encoding="zstd", max_bytes=2**20) == body
    assert wire.decompressed(body, encoding="", max_bytes=2**20) == body


def bomb() -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(2**22))


PACKED = zstandard.ZstdCompressor().compress(sft())
STREAMED = zstandard.ZstdCompressor(write_content_size=False).compress(sft())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (PACKED[:-3], 400),
        (PACKED[:6], 400),
        (PACKED + b"more", 400),
        (b"", 400),
        (b"not zstd", 400),
        (bomb(), 413),
        (STREAMED, 400),
    ],
    ids=["truncated", "head alone", "more behind", "empty", "no zstd", "bomb", "no size"],
)
def test_a_broken_frame_is_refused(body, status):
    with pytest.raises(Refused) as caught:
        wire.decompressed(body, encoding="zstd", max_bytes=2**20)
    assert caught.value.status == status


def test_another_encoding_is_refused():
    with pytest.raises(Refused, match="gzip"):
        wire.decompressed(b"", encoding="gzip", max_bytes=1)
