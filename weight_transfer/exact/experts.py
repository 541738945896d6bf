"""A mixture's experts, whose bits for a token depend on nothing but the token.

    experts_TK = chosen(logits_TE, 8)                    a token's experts, ascending
    shares_TK = shares(logits_TE.gather(1, experts_TK))  softmax over their logits
    out_TH = mlp(x_TH, shares_TK, experts_TK, fc1_E2FH, fc2_EHF)

A token's rows are multiplied by their experts' weights as in `kernels.linear`, and added up in the
order of their experts. The share multiplies an expert's activation, before it is rounded.

Axes: see `weight_transfer.exact.kernels`; T = tokens, K = experts of a token, N = T * K rows,
sorted by expert, E = experts, F = an expert's inner size.
"""

from __future__ import annotations

import torch

from weight_transfer.exact import kernels


def chosen(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts with the largest logits, ascending; of equal logits that of the lower number.
    [T, E] -> [T, K], int64. torch's own choice among equal ones is free."""
    bits, count = logits_TE.float().view(torch.int32).long(), logits_TE.shape[1]
    ordered = torch.where(bits < 0, -bits - (1 << 31), bits)  # as the floats are
    places = torch.arange(count - 1, -1, -1, device=logits_TE.device)
    return (ordered * count + places).topk(top_k, dim=1).indices.sort(dim=1).values


def shares(top_TK: torch.Tensor) -> torch.Tensor:
    """Softmax of each row, in fp32."""
    top_TK = top_TK.float()
    shifted = top_TK - top_TK.amax(1, keepdim=True)
    weights = shifted.exp() if top_TK.is_cuda else kernels.exp(shifted)
    return weights / kernels.added(weights.unbind(1))[:, None]


def product(x_NI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weight, [N, O].

    Args:
        ends_E: int32; the row after each expert's last one.
    """
    if x_NI.is_cuda:
        on_gpu: torch.Tensor = kernels.on_gpu().grouped_linear(x_NI, weight_EOI, ends_E)
        return on_gpu
    parts = x_NI.tensor_split(ends_E[:-1].long())
    return torch.cat([kernels.linear(x, w) for x, w in zip(parts, weight_EOI, strict=True)])


def combined(y_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows, in fp32, rounded once. [T, H]"""
    return kernels.added(y_NH[row_T] for row_T in row_TK.unbind(1))


def mlp(
    x_TH: torch.Tensor,
    shares_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    fc1_E2FH: torch.Tensor,
    fc2_EHF: torch.Tensor,
) -> torch.Tensor:
    """The experts' part of a layer, [T, H] -> [T, H]. The host does not wait for a GPU."""
    sorted_N, choice_N = experts_TK.flatten().long().sort(stable=True)
    number_E = torch.arange(len(fc1_E2FH), device=x_TH.device)
    ends_E = torch.searchsorted(sorted_N, number_E, right=True, out_int32=True)
    row_N = torch.empty_like(choice_N)
    row_N[choice_N] = torch.arange(len(choice_N), device=x_TH.device)
    y_N2F = product(x_TH[choice_N // experts_TK.shape[1]], fc1_E2FH, ends_E)
    inner_NF = kernels.swiglu(y_N2F, shares_TK.flatten()[choice_N])
    return combined(product(inner_NF, fc2_EHF, ends_E), row_N.view_as(experts_TK))
