"""Multiplies rows, sorted by expert, by each expert's matrix. On CUDA the row counts stay on the
device. On a CPU the same functions loop over the experts.

Axes: N = rows, E = experts, I = in features, O = out features, F = an expert's inner size, R =
columns of an adapter's hidden layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUp:
    """[gate | up] = y + h B' of each row, and the steps that follow."""

    y_N2F: torch.Tensor
    """The base's part."""
    h_N2R: torch.Tensor | None
    """The adapters' hidden layer; None, like B, where nothing of fc1 has an adapter."""
    lora_B_E2F2R: torch.Tensor | None
    probs_N: torch.Tensor
    """Routing weights."""
    ends_E: torch.Tensor
    """int32: the row after each expert's last one."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate and up, [N, F] each, in fp32 or wider."""
        wide = torch.promote_types(self.y_N2F.dtype, torch.float32)
        y = self.y_N2F.to(wide)
        if self.h_N2R is not None and self.lora_B_E2F2R is not None:
            y = y + grouped_matmul(
                self.h_N2R.to(wide), self.lora_B_E2F2R.transpose(1, 2).to(wide), self.ends_E
            )
        gate, up = y.chunk(2, dim=1)
        return gate, up


def grouped_matmul(x_NI: torch.Tensor, w_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Row n of expert e times w[e]: [N, O]."""
    if x_NI.is_cuda:
        return functional.grouped_mm(x_NI, w_EIO, offs=ends_E)
    return torch.cat([x @ w for x, w in zip(_split(x_NI, ends_E), w_EIO, strict=True)])


def grouped_outer(x_NO: torch.Tensor, y_NI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """x' y over each expert's rows: [E, O, I]."""
    if x_NO.is_cuda:
        return functional.grouped_mm(x_NO.t(), y_NI, offs=ends_E)
    return torch.stack(
        [x.T @ y for x, y in zip(_split(x_NO, ends_E), _split(y_NI, ends_E), strict=True)]
    )


def _split(x: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.tensor_split(ends_E[:-1].long().cpu())
