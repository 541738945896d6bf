"""Requests as the SDK sends them, made by hand."""

from __future__ import annotations

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

TOKENS = [5, 17, 33, 101]
TARGETS = [17, 33, 101, 7]


def tensor(values, *, dtype=None, shape=None) -> pb.Tensor:
    """A dense tensor of float32 or int64."""
    array = np.asarray(values)
    is_whole = array.dtype.kind == "i" if dtype is None else dtype == pb.DTYPE_INT64
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if is_whole else pb.DTYPE_FLOAT32)
    message.dense = array.astype("<i8" if is_whole else "<f4").tobytes()
    message.shape.extend(array.shape if shape is None else shape)
    return message


def datum(tokens=TOKENS, **inputs) -> pb.Datum:
    """A datum of text."""
    message = pb.Datum()
    message.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    for name, values in inputs.items():
        found = values if isinstance(values, pb.Tensor) else tensor(values)
        message.loss_fn_inputs[name].CopyFrom(found)
    return message


def passing(
    *data: pb.Datum, model_id="m", seq_id=1, loss="cross_entropy", forward_only=False, **config
) -> bytes:
    """A `ForwardBackwardRequest`."""
    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    message.data.extend(data)
    for name, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
    return message.SerializeToString()


def sft(**more) -> bytes:
    """One datum with loss on its last two targets."""
    return passing(datum(target_tokens=TARGETS, weights=[0.0, 0.0, 1.0, 0.5]), **more)
