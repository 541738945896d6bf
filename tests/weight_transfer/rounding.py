"""Triton's interpreter with conversions that round as GPUs do."""

from __future__ import annotations

from typing import Any

import torch


def round_to_nearest() -> None:
    """Have fp32 rounded to nearest even where it becomes bf16 or e4m3.

    Triton's interpreter (3.9) cuts bits off instead, and shifts subnormal ones.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float
    kinds = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        kind = kinds.get(target)
        if kind is None or source != tl.float32:
            return convert(data, source, target, mode)
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.float32).to(kind)
        bits = values.view(torch.int16 if kind.itemsize == 2 else torch.uint8).numpy()
        return bits.view("uint16" if kind.itemsize == 2 else "uint8").reshape(data.shape)

    interpreter._convert_float = rounded
