"""Tinker's protobuf messages from and to arrays. Pure; every refusal names the datum and field.

Shapes: L = tokens of a datum's model input. Row i of a loss input describes the *target* of token
i, which splice calls token i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from splice.tinker.refused import TOO_LARGE, Refused, malformed, unsupported

Array = np.ndarray[Any, Any]
_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence: int32 tokens [L] and the loss's inputs, [L] each."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A decoded `forward_backward` request."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    data: tuple[Datum, ...]
    is_forward_only: bool


def decompressed(body: bytes, *, encoding: str, max_bytes: int) -> bytes:
    """Return the body without its Content-Encoding; never makes more than `max_bytes`.

    Raises:
        Refused: an encoding other than zstd, a broken frame, or too large.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise unsupported(f"content-encoding {encoding!r}: send zstd, or nothing")
    try:
        size = zstandard.frame_content_size(body)
        if size < 0:
            raise malformed("the zstd frame does not say its size; compress the body at once")
        if size > max_bytes:
            raise Refused(TOO_LARGE, f"the body has {size:,} bytes; the most is {max_bytes:,}")
        return zstandard.ZstdDecompressor().decompress(
            body, max_output_size=max(size, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise malformed(f"the body is not a whole zstd frame: {error}") from error


def parsed_pass(body: bytes) -> Any:
    """Return the message of a `forward_backward`, unchecked.

    Raises:
        Refused: it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise malformed(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def read_pass(message: Any) -> PassRequest:
    """Check and convert a `ForwardBackwardRequest`.

    Raises:
        Refused: images, sparse or two-dimensional inputs; sizes that do not fit.
    """
    if message.seq_id < 1:
        raise malformed(f"seq_id is {message.seq_id}; a model's requests count from 1")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    if not message.data:
        raise malformed("data is empty; send one datum at least")
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        config=config,
        data=tuple(_datum(i, datum) for i, datum in enumerate(message.data)),
        is_forward_only=message.forward_only,
    )


def _datum(index: int, message: Any) -> Datum:
    tokens = _tokens(index, message.model_input)
    inputs = {
        name: _tensor(f"datum {index}: {name}", tensor, length=len(tokens))
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(tokens=tokens, inputs=inputs)


def _tokens(index: int, chunks: Sequence[Any]) -> Array:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise unsupported(
                f"datum {index}: model_input has a chunk of {kind or 'no kind'}; the trainer "
                "trains on text only (encoded_text)"
            )
        if len(chunk.encoded_text.tokens) % 4:
            raise malformed(f"datum {index}: the tokens of a chunk are not int32 values")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, "<i4")
    if not len(tokens):
        raise malformed(f"datum {index}: model_input has no tokens")
    return tokens


def _tensor(where: str, message: Any, *, length: int) -> Array:
    if message.WhichOneof("encoding") == "sparse_csr" or len(message.shape) > 1:
        raise unsupported(
            f"{where} has the shape {list(message.shape)}; several targets for one position (top-k "
            "distillation) are not supported, send one value for each token"
        )
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise malformed(f"{where} has dtype {message.dtype}; send float32 or int64")
    if len(message.dense) % dtype.itemsize:
        raise malformed(f"{where} has {len(message.dense)} bytes, which are not {dtype} values")
    values = np.frombuffer(message.dense, dtype)
    if math.prod(message.shape) != len(values) or len(values) != length:
        raise malformed(
            f"{where} has {len(values)} values and the shape {list(message.shape)}; model_input "
            f"has {length} tokens"
        )
    if not np.isfinite(values).all():
        raise malformed(f"{where} has values that are not finite")
    return values


def pass_output(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Encode a `ForwardBackwardOutput` with each datum's log-probs."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    tensor = record.fields["logprobs"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.data = b"".join(part.astype("<f4").tobytes() for part in logprobs)
    ends = np.cumsum([0, *(4 * len(part) for part in logprobs)])
    tensor.offsets = ends.astype("<i8").tobytes()
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The likeliest tokens of some positions, each (token id, log-prob)."""

    k: int
    rows: Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled sequence. `spans`: (version, number of tokens), in order."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    spans: tuple[tuple[int, int], ...] = ()
    top: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The answer to a sample request. `prompt_logprobs` has NaN where none was asked for."""

    sequences: tuple[Sampled, ...]
    prompt_logprobs: Sequence[float] | None = None
    prompt_top: TopK | None = field(default=None)


def sample_output(samples: Samples) -> bytes:
    """Encode a `SampleResponse`."""
    message = pb.SampleResponse()
    for sampled in samples.sequences:
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_LENGTH if sampled.is_cut else pb.STOP_REASON_STOP
        sequence.tokens = np.asarray(sampled.tokens, "<i4").tobytes()
        sequence.logprobs = np.asarray(sampled.logprobs, "<f4").tobytes()
        if sampled.top is not None:
            _write_top(sequence.topk_sampled_logprobs, sampled.top)
    if samples.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(samples.prompt_logprobs, "<f4").tobytes()
    if samples.prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, samples.prompt_top)
    return bytes(message.SerializeToString())


NO_LOGPROB = -99999.0
"""Fills the cells that have no token."""


def _write_top(message: Any, top: TopK) -> None:
    ids = np.zeros((len(top.rows), top.k), "<i4")
    logprobs = np.full((len(top.rows), top.k), NO_LOGPROB, "<f4")
    for i, row in enumerate(top.rows):
        for j, (token, logprob) in enumerate(row[: top.k]):
            ids[i, j], logprobs[i, j] = token, logprob
    message.k, message.length = top.k, len(top.rows)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
