"""Dropout on the adapters' inputs. A hash of step, adapter, token and feature decides what to drop.

A step therefore draws the same masks for every cut into calls, packs and ranks, in a recomputed
forward pass, and after a resume. Tensor ranks with the same tokens draw the same masks. Experts
receive their tokens sorted and mixed with those of other ranks. Their masks depend on the row, and
so on the cut.

Shapes: L = a micro-batch's tokens, T = rows of an adapter's input, I = its features.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.errors import ConfigError
from trainer_node.adapters.rounding import shifted, signed

_GOLDEN = 0x9E3779B97F4A7C15


def key_of(*parts: object) -> int:
    """64 bits of what names a stream of masks."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little", signed=True)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014); int64 products wrap."""
    z = (z ^ shifted(z, 30, 64)) * signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ shifted(z, 27, 64)) * signed(0x94D049BB133111EB, 64)
    return z ^ shifted(z, 31, 64)


def keep_mask(rows_T: torch.Tensor, columns_I: torch.Tensor, *, key: int, p: float) -> torch.Tensor:
    """bool [T, I]: True with probability 1 - p, a function of only the arguments.

    Rows and columns (int64) are hashed to 32 bits each, and their exclusive or goes through
    MurmurHash3's finaliser (Appleby 2011).
    """
    rows_T1 = (_mix64(rows_T * signed(_GOLDEN, 64) + key) >> 32).to(torch.int32)[:, None]
    columns_1I = (_mix64(columns_I * signed(_GOLDEN, 64) - key) >> 32).to(torch.int32)[None]
    x_TI = rows_T1 ^ columns_1I
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x_TI.bitwise_xor_(shifted(x_TI, shift, 32)).mul_(signed(factor, 32))
    x_TI.bitwise_xor_(shifted(x_TI, 16, 32))
    return x_TI >= int(p * 2**32) - 2**31


class Dropout:
    """Gives a rank's adapters their masks, within `on` only.

    Args:
        p: probability that an element is dropped; the others are divided by 1 - p.
        tensor_rank, tensor_size: this rank's part of the tokens under sequence parallelism.
    """

    def __init__(
        self, p: float, *, tensor_rank: int, tensor_size: int, sequence_parallel: bool
    ) -> None:
        self.p, self._rank = p, tensor_rank
        self._parts = tensor_size if sequence_parallel else 1
        self._step: int | None = None
        self._rows_L: torch.Tensor | None = None

    @property
    def is_on(self) -> bool:
        """Whether inputs are dropped now."""
        return self._step is not None

    @contextlib.contextmanager
    def on(self, key: int) -> Iterator[None]:
        """Within the block inputs are dropped (if p is not 0), by masks that `key` chooses."""
        self._step = key if self.p else None
        try:
            yield
        finally:
            self._step = self._rows_L = None

    def before_layer(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a transformer layer that notes which tokens the layer gets. It also
        runs before a recomputation, when other micro-batches have passed since."""
        self._rows_L = getattr(kwargs["packed_seq_params"], "rows_L", None)

    def _own_rows(self) -> torch.Tensor:
        """Keys of the tokens that this rank has between the linears."""
        if self._rows_L is None:
            raise ConfigError(
                "lora.dropout: a layer ran without its micro-batch's rows; Megatron passed no "
                "packed_seq_params"
            )
        return self._rows_L.chunk(self._parts)[self._rank] if self._parts > 1 else self._rows_L

    def dense(self, x: torch.Tensor, *, name_key: int, sharded: bool) -> torch.Tensor:
        """[s, b, I] of an adapter on a dense linear; `sharded`: it has all tokens and this rank's
        part of the features."""
        rows_T = self._rows_L if sharded and self._rows_L is not None else self._own_rows()
        first = self._rank * x.shape[-1] if sharded else 0
        return self._drop(x, rows_T, first, name_key)

    def experts(self, x: torch.Tensor, *, name_key: int) -> torch.Tensor:
        """Drop from the input [t, I] of an adapter on grouped linears. The rank's own tokens choose
        the masks, so that ranks with the same tokens agree."""
        rows_T = torch.arange(x.shape[0], device=x.device) + _mix64(self._own_rows()).sum()
        return self._drop(x, rows_T, 0, name_key)

    def _drop(
        self, x: torch.Tensor, rows_T: torch.Tensor, first: int, name_key: int
    ) -> torch.Tensor:
        assert self._step is not None
        columns_I = torch.arange(first, first + x.shape[-1], device=x.device)
        keep_TI = keep_mask(rows_T, columns_I, key=signed(self._step ^ name_key, 62), p=self.p)
        return torch.where(keep_TI.view(x.shape), x / (1.0 - self.p), 0.0)
