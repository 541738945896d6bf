"""Log-probs, entropies and values out of hidden states, without the logits as a whole.

Shapes: N = positions with loss, V = vocabulary rows on this tensor-parallel rank, H = hidden size,
C = a chunk of N, K = allowed token ids, M = positions of this rank, P = values of a position, W =
this rank's features of the value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from weight_transfer.exact import kernels

LOGITS_PER_CHUNK = 2**26
"""Logits that exist at a time, in the forward and the backward pass: 256 MiB in fp32, a few times
over."""
ROWS_PER_CHUNK = 2**13
"""Positions whose hidden states exist in fp32 at a time."""


def linear_statistics(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int,
    allowed_K: torch.Tensor | None = None,
    group: Any = None,
    temperatures_N: torch.Tensor | None = None,
    learned_N: torch.Tensor | None = None,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
    is_exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and entropy of `softmax(hidden @ weight.T / temperature)`, fp32, in
    nats.

    The vocabulary is split over `group`.

    The logits exist for one chunk of positions at a time, again in the backward pass, and are never
    gathered. Memory therefore does not grow with N. (Memory-efficient linear cross entropy: Wijmans
    et al. 2024, arXiv:2411.09009; here with the entropy.)

    Rows at or beyond `vocab_size` (Megatron's padding) do not count. With `allowed_K`,
    probabilities are normalised over these ids only, as in a restricted sampler. A target outside
    them has -inf. The backward pass works for the entropy only if the caller uses its gradient.

    The gradient of `hidden_NH` is this rank's share of a sum over `group`; that of `weight_VH` is
    whole.

    Args:
        vocab_start: id of this rank's first row.
        vocab_size: the HF vocabulary's size, without padding.
        group: tensor-parallel group; None or of size 1: this rank holds all rows.
        temperatures_N: None: 1.
        learned_N: index of the positions that the caller differentiates; None: all. The backward
            pass leaves the others out.
        is_exact: whether log-probs have the bits of `weight_transfer.exact`; only with all rows.
    """
    num_rows = weight_VH.shape[0]
    head = _Head(
        local_N=targets_N - vocab_start,
        invalid_V=~_valid_rows(num_rows, vocab_start, vocab_size, allowed_K, weight_VH.device),
        group=group if group is not None and group.size() > 1 and len(targets_N) else None,
        temperatures_N1=None if temperatures_N is None else temperatures_N[:, None],
        learned_N=learned_N,
        chunk=max(1, logits_per_chunk // num_rows),
        exact_rows=vocab_size if is_exact else 0,
    )
    log_probs_N, entropy_N = _LinearStatistics.apply(hidden_NH.to(weight_VH.dtype), weight_VH, head)
    return log_probs_N, entropy_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """Values that all chunks share."""

    local_N: torch.Tensor
    """The target's row on this rank; outside [0, V) where another rank has it."""
    invalid_V: torch.Tensor
    group: Any
    temperatures_N1: torch.Tensor | None
    learned_N: torch.Tensor | None
    """Index of the positions with a gradient; None: all."""
    chunk: int
    exact_rows: int
    """Rows of the vocabulary, if log-probs must be exact; else 0."""

    def learned(self, values_N: Any) -> Any:
        """Return the values of the positions with a gradient."""
        if self.learned_N is None or values_N is None:
            return values_N
        return values_N.index_select(0, self.learned_N)

    def of_learned(self) -> _Head:
        """Return the head of only the positions with a gradient."""
        local_N, temperatures_N1 = map(self.learned, (self.local_N, self.temperatures_N1))
        return replace(self, local_N=local_N, temperatures_N1=temperatures_N1, learned_N=None)

    def chunks(self) -> list[slice]:
        """Yield the slices of positions that form a chunk."""
        size = len(self.local_N)
        return [slice(i, min(i + self.chunk, size)) for i in range(0, max(size, 1), self.chunk)]

    def logits(
        self, chunk: slice, hidden_NH: torch.Tensor, weight_VH: torch.Tensor
    ) -> torch.Tensor:
        """Divided by the temperature; fp32 (or fp64), -inf where a row does not count. [C, V], the
        caller's to overwrite."""
        product = kernels.linear if self.exact_rows else functional.linear
        logits = product(hidden_NH[chunk], weight_VH)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if self.temperatures_N1 is not None:
            logits.div_(self.temperatures_N1[chunk])
        return logits.masked_fill_(self.invalid_V, -torch.inf)

    def of_logits(self, grad_N: torch.Tensor) -> torch.Tensor:
        """The gradient of `softmax(logits / temperature)`'s input as that of the logits, [N, 1]."""
        grad_N1 = grad_N[:, None]
        return grad_N1 if self.temperatures_N1 is None else grad_N1 / self.temperatures_N1

    def here(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each target, clamped into this rank's, and whether it is this rank's. [C] each."""
        local_C = self.local_N[chunk]
        num_rows = len(self.invalid_V)
        return local_C.clamp(0, num_rows - 1), (local_C >= 0) & (local_C < num_rows)


class _LinearStatistics(torch.autograd.Function):
    """With l the logits divided by the temperature, Z = sum_v e^(l_v), p_v = e^(l_v) / Z and H =
    log Z - sum_v p_v l_v:

    d log p_t / d l_v = [v = t] - p_v        d H / d l_v = -p_v (log p_v + H)

    The gradient of the logits is the gradient of l divided by the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of each chunk against the rank's own maximum, then once over the ranks."""
        parts = [_chunk_sums(head, c, hidden_NH, weight_VH) for c in head.chunks()]
        target_N, local_top_N, sum_N, energy_N, *exact = torch.cat(parts, dim=1)
        top_N = local_top_N.clone()
        if head.group is not None:
            dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=head.group)
        # A rank without a row that counts has top -inf and sums of 0.
        shift_N = torch.where(local_top_N.isinf(), torch.zeros_like(top_N), local_top_N - top_N)
        # sum e^(l - top) (l - top), from the sums against the rank's own maximum
        energy_N = (energy_N + shift_N * sum_N) * shift_N.exp()
        sum_N = sum_N * shift_N.exp()
        if head.group is not None:
            sums_3N = torch.stack([target_N, sum_N, energy_N])
            dist.all_reduce(sums_3N, group=head.group)
            target_N, sum_N, energy_N = sums_3N
        log_sum_N = sum_N.log()
        entropy_N = log_sum_N - energy_N / sum_N
        ctx.head, ctx.shape = head, hidden_NH.shape
        ctx.set_materialize_grads(False)
        kept = map(head.learned, (hidden_NH, top_N, log_sum_N, entropy_N))
        ctx.save_for_backward(weight_VH, *kept)
        return exact[0] if exact else target_N - top_N - log_sum_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """The logits again, chunk by chunk; no collective. A gradient is None where the loss does
        not use that output."""
        weight_VH, hidden_NH, top_N, log_sum_N, entropy_N = ctx.saved_tensors
        whole: _Head = ctx.head
        head = whole.of_learned()
        grad_log_prob_N, grad_entropy_N = map(whole.learned, (grad_log_prob_N, grad_entropy_N))
        grad_hidden_NH = torch.empty_like(hidden_NH)
        sum_dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_weight = (
            torch.zeros_like(weight_VH, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        )
        if grad_log_prob_N is None:
            grad_log_prob_N = torch.zeros_like(entropy_N)
        grad_log_prob_N1 = head.of_logits(grad_log_prob_N)
        grad_entropy_N1 = None if grad_entropy_N is None else head.of_logits(grad_entropy_N)
        for c in head.chunks():
            grad_log_prob_C1 = grad_log_prob_N1[c]
            log_p_CV = head.logits(c, hidden_NH, weight_VH).sub_((top_N[c] + log_sum_N[c])[:, None])
            p_CV = log_p_CV.exp()
            grad_CV = p_CV * -grad_log_prob_C1
            if grad_entropy_N1 is not None:
                log_p_CV.masked_fill_(head.invalid_V, 0.0).add_(entropy_N[c, None]).mul_(p_CV)
                grad_CV.addcmul_(log_p_CV, grad_entropy_N1[c], value=-1.0)
            row_C, here_C = head.here(c)
            grad_CV.scatter_add_(1, row_C[:, None], grad_log_prob_C1 * here_C[:, None])
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_NH[c] = grad_CV @ weight_VH
            if grad_weight is not None:
                grad_weight += grad_CV.T @ hidden_NH[c]
        if whole.learned_N is not None:
            others_NH = grad_hidden_NH.new_zeros(ctx.shape)
            grad_hidden_NH = others_NH.index_copy_(0, whole.learned_N, grad_hidden_NH)
        return (
            grad_hidden_NH,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None,
        )


def _chunk_sums(
    head: _Head, chunk: slice, hidden_NH: torch.Tensor, weight_VH: torch.Tensor
) -> torch.Tensor:
    """Return [4, C]: the target's logit (0 on other ranks), and over this rank's rows max l, sum
    e^(l - max), and sum e^(l - max) (l - max). [5, C] if log-probs must be exact: they follow."""
    logits = head.logits(chunk, hidden_NH, weight_VH)
    row_C, here_C = head.here(chunk)
    exact = []
    if head.exact_rows:
        log_p_CV = kernels.log_softmax(logits[:, : head.exact_rows])
        exact = [log_p_CV.gather(1, row_C[:, None])[:, 0]]
    picked_C = logits.gather(1, row_C[:, None])[:, 0]
    target_C = torch.where(here_C, picked_C, torch.zeros_like(picked_C))
    top_C = logits.amax(dim=1)
    logits.sub_(top_C.masked_fill(top_C.isinf(), 0.0)[:, None])
    weights = logits.exp()
    # A row that does not count is 0 * -inf, NaN, and left out. Any other NaN is in `weights` too.
    energy_C = logits.mul_(weights).nansum(dim=1)
    return torch.stack([target_C, top_C, weights.sum(dim=1), energy_C, *exact])


def linear_values(
    hidden_NH: torch.Tensor, weight_W: torch.Tensor, *, first: int, rows: int = ROWS_PER_CHUNK
) -> torch.Tensor:
    """Return this rank's share of `hidden @ weight`, [N] in the weight's precision: that of the W
    features from `first` on. The gradients are also those of this share.

    The hidden states exist in that precision for `rows` positions at a time.
    """
    values_N: torch.Tensor = _LinearValues.apply(hidden_NH, weight_W, first, rows)
    return values_N


class _LinearValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_W: torch.Tensor, first: int, rows: int
    ) -> torch.Tensor:
        """One product for each chunk of positions."""
        ctx.save_for_backward(hidden_NH, weight_W)
        ctx.first, ctx.rows = first, rows
        own_NW = hidden_NH[:, first : first + len(weight_W)]
        return torch.cat([own.to(weight_W.dtype) @ weight_W for own in own_NW.split(rows)])

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        """No collective."""
        hidden_NH, weight_W = ctx.saved_tensors
        features = slice(ctx.first, ctx.first + len(weight_W))
        grad_hidden_NH = None
        if ctx.needs_input_grad[0]:
            grad_hidden_NH = torch.zeros_like(hidden_NH)
            grad_hidden_NH[:, features] = grad_N[:, None] * weight_W
        grad_weight_W = torch.zeros_like(weight_W)
        for own, grad in zip(
            hidden_NH[:, features].split(ctx.rows), grad_N.split(ctx.rows), strict=True
        ):
            grad_weight_W += grad @ own.to(weight_W.dtype)
        return grad_hidden_NH, grad_weight_W, None, None


def gather_positions(
    values_PM: torch.Tensor, here_M: torch.Tensor, num_positions: int, group: Any
) -> torch.Tensor:
    """Join the positions of all ranks of `group`: [P, M] each -> [P, N] on every rank.

    Every rank computes the same with the result, so the gradient of a rank's own positions flows
    back unchanged. The ranks' parts of a parameter's gradient then add up to one whole.

    Args:
        here_M: which of the positions are this rank's.
    """
    gathered: torch.Tensor = _Gather.apply(values_PM, here_M, num_positions, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_PM: torch.Tensor, here_M: torch.Tensor, num_positions: int, group: Any
    ) -> torch.Tensor:
        """A sum in which all but one term are 0, hence exact."""
        ctx.save_for_backward(here_M)
        whole_PN = values_PM.new_zeros(len(values_PM), num_positions).index_copy_(
            1, here_M, values_PM
        )
        dist.all_reduce(whole_PN, group=group)
        return whole_PN

    @staticmethod
    def backward(ctx: Any, grad_PN: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        """No collective."""
        (here_M,) = ctx.saved_tensors
        return grad_PN.index_select(1, here_M), None, None, None


def _valid_rows(
    num_rows: int,
    vocab_start: int,
    vocab_size: int,
    allowed_K: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    ids_V = torch.arange(vocab_start, vocab_start + num_rows, device=device)
    valid_V = ids_V < vocab_size
    return valid_V if allowed_K is None else valid_V & torch.isin(ids_V, allowed_K)
