"""Measures how much of the adapters' update the merged weights have, from a sample.

    metrics(model)            after a job's steps, on every rank -> its metrics
    warnings(metrics, ...)    what the client must know of them

A version's weights are W' = round(W + delta). Let d = delta and e = W' - W. Rounding keeps the
share <e, d> / <d, d> of the update, which is 1 for an unbiased rounding and nearly 0 where nearly
all of d is below half a unit in W's last place.

The sample is blocks of rows of all adapted HF tensors, the same ones in every job. On a GPU
`Merger` merges them as publications do, so the sample also sees an error of its kernels. Each
element of the model is in one rank's runs, so copies do not count twice.

Axes: H = rows and W = columns of a block as HF has it; N = their elements.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from orchestrator.protocol.config import RoundingMode
from trainer_node.adapters.rounding import Rounding, rounded, thresholds
from trainer_node.export.merger import Merger
from trainer_node.export.runs import Run, runs_of
from trainer_node.export.sources import Member
from trainer_node.model.model import Model

BUDGET_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of a rank's sample, about."""
BLOCK_ELEMENTS = {"cpu": 1 << 12, "cuda": 1 << 16}
"""Elements of a block, about."""
STEP_ROWS = {"cpu": 1, "cuda": 32}
"""Rows of a block are a multiple of it: whole tiles, so publications have compiled the kernel."""
CHUNK_ELEMENTS = 1 << 20
"""Elements to merge and add up at a time. This bounds the memory."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The fractions of its multiples spread evenly, and never in step with the layers."""
LEAST_SHARE = 0.95
"""Share of the update below which a job warns."""
ERRORS = 4
"""Standard errors that the sample's share may be too small by."""


# ---------------------------------------------------------------- numbers


class Sums(NamedTuple):
    """Sums over sampled elements. Those of several blocks or ranks add up."""

    numel: float = 0.0
    weight_squared: float = 0.0
    """W^2."""
    delta_squared: float = 0.0
    """d^2."""
    served: float = 0.0
    """e d."""
    noise: float = 0.0
    """The variance of `served`: d^2 (e - d)^2."""
    expected_noise: float = 0.0
    """The same as a stochastic rounding should make it: d^2 |d| (u - |d|), with the unit u in the
    last place of W. Where few elements have crossed their threshold, it is the better one."""
    changed: float = 0.0
    """Elements in which W' differs from W."""
    whole_delta_squared: float = 0.0
    """d^2 of all elements, estimated."""


def sums_of(
    weight_N: torch.Tensor,
    merged_N: torch.Tensor,
    delta_N: torch.Tensor,
    *,
    is_stochastic: bool = False,
) -> torch.Tensor:
    """The first seven fields of `Sums`, in fp64 on the tensors' device; does not wait for it."""
    w_N, merged, d_N = (t.reshape(-1).double() for t in (weight_N, merged_N, delta_N))
    e_N = merged - w_N
    found = (
        torch.dot(w_N, w_N),
        torch.dot(d_N, d_N),
        torch.dot(e_N, d_N),
        (d_N * (e_N - d_N)).square_().sum(),
        _expected(w_N, d_N) if is_stochastic else torch.zeros_like(d_N[:1]).sum(),
        (e_N != 0).sum(dtype=torch.float64),
    )
    return torch.stack([torch.full_like(found[0], len(w_N)), *found])


def _expected(w_N: torch.Tensor, d_N: torch.Tensor) -> torch.Tensor:
    """`Sums.expected_noise` in bf16, which has 8 bits."""
    size_N = d_N.abs()
    unit_N = torch.exp2(torch.frexp(torch.maximum(w_N.abs(), size_N))[1].double() - 8)
    return (d_N.square() * size_N * (unit_N - size_N).clamp_(min=0.0)).sum()


def metrics_of(sums: Sums) -> dict[str, float]:
    """The metrics of a job; none if the sample is empty or has a number that is not finite."""
    if not sums.numel or not all(map(math.isfinite, sums)):
        return {}
    d2 = sums.delta_squared
    return {
        "update_norm": math.sqrt(sums.whole_delta_squared),
        "update_ratio": math.sqrt(d2 / sums.weight_squared) if sums.weight_squared else 0.0,
        "served_share": sums.served / d2 if d2 else 1.0,
        "served_share_error": math.sqrt(max(sums.noise, sums.expected_noise)) / d2 if d2 else 0.0,
        "changed_share": sums.changed / sums.numel,
    }


def warnings(metrics: Mapping[str, float], *, mode: RoundingMode, dtype: str) -> list[str]:
    """Return a warning if the merged weights lack a part of the update.

    Args:
        metrics: those of `metrics_of`, maybe among others.
        mode: how the weights were rounded.
        dtype: the weights'.
    """
    if not metrics.get("update_norm"):
        return []
    share, error = metrics["served_share"], metrics["served_share_error"]
    if share + ERRORS * error >= LEAST_SHARE:
        return []
    found = (
        f"The merged weights have {share:.1%} of the adapters' update (standard error {error:.1%})"
    )
    if not metrics["changed_share"]:
        found = "The merged weights have nothing of the adapters' update"
    remedy = "Use a larger learning rate"
    if mode == "nearest" and dtype != "float32":
        remedy = 'Set publication.rounding = "stochastic", or use a larger learning rate'
    return [
        f"{found}: it is {metrics['update_ratio']:.1e} of the weights' size, and rounding to "
        f"{dtype} ({mode}) loses the rest. The served model lags behind the trained one. {remedy}."
    ]


# ---------------------------------------------------------------- which elements


def blocks_of(runs: Sequence[Run], *, budget: int, block: int, step: int) -> list[Run]:
    """The sample: blocks of about `block` elements and a multiple of `step` rows, `budget` elements
    in all, spread evenly over the elements of all runs. All of them if that is not more."""
    rows = [max(step, block // run.columns // step * step) for run in runs]
    counts = (math.ceil(run.rows / n) for run, n in zip(runs, rows, strict=True))
    ends = list(itertools.accumulate(counts, initial=0))
    count, numel = ends[-1], sum(run.numel for run in runs)
    chosen: Sequence[int] = range(count)
    if numel > budget:
        wanted = max(1, budget * count // numel)
        chosen = sorted({int(k * GOLDEN % 1.0 * count) for k in range(wanted)})
    found = []
    for number in chosen:
        at = bisect.bisect_right(ends, number) - 1
        found.append(runs[at].cut((number - ends[at]) * rows[at], rows[at]))
    return found


# ---------------------------------------------------------------- the sample


class _Sample:
    """A rank's blocks, in chunks of one dtype."""

    def __init__(self, model: Model) -> None:
        kind = model.device.type
        runs = list(runs_of(model.adapters))
        blocks = blocks_of(
            runs, budget=BUDGET_ELEMENTS[kind], block=BLOCK_ELEMENTS[kind], step=STEP_ROWS[kind]
        )
        self._model = model
        self._numel = sum(run.numel for run in runs)
        self._chunks = list(_chunks(blocks))
        self._merger = merger_of(model, self._chunks) if kind == "cuda" else None

    @torch.no_grad()
    def sums(self) -> Sums:
        """This rank's sums. Waits for the device once."""
        scale, rounding = self._model.scale, self._model.rounding
        total = torch.zeros(7, dtype=torch.float64, device=self._model.device)
        for number, chunk in enumerate(self._chunks):
            weight_N = torch.cat([run.weights().flatten() for run in chunk])
            delta_N = deltas_of(chunk, scale)
            if self._merger is None:
                merged_N = merged_by_torch(chunk, delta_N, rounding)
            else:
                merged_N = merged_as_sent(self._merger, number, chunk)
            is_stochastic = rounding.mode == "stochastic" and weight_N.dtype is torch.bfloat16
            total += sums_of(weight_N, merged_N, delta_N, is_stochastic=is_stochastic)
        found = Sums(*total.tolist())
        whole = found.delta_squared * self._numel / found.numel if found.numel else 0.0
        return found._replace(whole_delta_squared=whole)


def deltas_of(chunk: Sequence[Run], scale: float) -> torch.Tensor:
    """The blocks' deltas [N] in fp32, end to end: a product for those of one shape.

    They differ from the sums of `rounding.chain` in the last place only. The chain takes 20 times
    longer on a CPU.
    """
    found = []
    for _, same in itertools.groupby(chunk, key=_kind):
        pairs = [run.cut_delta.matrices() for run in same]
        lora_B = torch.stack([pair.lora_B_OR for pair in pairs])
        lora_A = torch.stack([pair.lora_A_RI for pair in pairs])
        found.append((lora_B @ lora_A).mul_(scale).flatten())
    return torch.cat(found)


def merged_by_torch(
    chunk: Sequence[Run], delta_N: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """The blocks' merged weights [N]. One element in some 100,000 may cross its threshold, because
    of its delta's last place."""
    found = []
    for run, delta in zip(chunk, delta_N.split([run.numel for run in chunk]), strict=True):
        weight_HW = run.weights()
        delta_HW, h16_HW = delta.view(weight_HW.shape), None
        if rounding.mode == "stochastic" and weight_HW.dtype is not torch.float32:
            word = run.corner.word(rounding)
            h16_HW = thresholds(word, *weight_HW.shape, device=weight_HW.device)
        merged_HW = rounded(delta_HW + weight_HW, weight_HW.dtype, h16_HW)
        found.append(torch.where(delta_HW == 0, weight_HW, merged_HW).flatten())
    return torch.cat(found)


def merged_as_sent(merger: Merger, number: int, chunk: Sequence[Run]) -> torch.Tensor:
    """The same [N] of chunk `number`, by `merger_of`."""
    weight, nbytes = chunk[0].weight, merger.chunk_nbytes(number)
    out_B = torch.empty(nbytes, dtype=torch.uint8, device=weight.device)
    merger.fill(number, out_B)
    return out_B.view(weight.dtype)


def merger_of(model: Model, chunks: Sequence[Sequence[Run]]) -> Merger:
    """Merges chunks as publications do, in a few launches each: their blocks end to end."""
    return Merger(
        map(_members, chunks),
        scale=model.scale,
        rounding=lambda: model.rounding,
        device=model.device,
    )


def _members(chunk: Sequence[Run]) -> tuple[int, list[Member]]:
    sizes = [run.numel * run.weight.element_size() for run in chunk]
    *offsets, nbytes = itertools.accumulate(sizes, initial=0)
    return nbytes, [run.member(offset) for run, offset in zip(chunk, offsets, strict=True)]


def _chunks(blocks: Sequence[Run]) -> Iterator[list[Run]]:
    """Blocks of one dtype, of equal shapes where possible: one launch merges those."""
    chunk: list[Run] = []
    filled = 0
    for run in sorted(blocks, key=_kind):
        if chunk and (
            run.weight.dtype is not chunk[0].weight.dtype or filled + run.numel > CHUNK_ELEMENTS
        ):
            yield chunk
            chunk, filled = [], 0
        chunk.append(run)
        filled += run.numel
    if chunk:
        yield chunk


def _kind(run: Run) -> tuple[str, bool, int, int]:
    return str(run.weight.dtype), run.delta.transposed, run.columns, run.rows


def metrics(model: Model) -> dict[str, float]:
    """Return `metrics_of` all ranks' samples, the same on every rank. A collective. The blocks are
    chosen once for each set of adapters."""
    adapters = model.adapters
    if adapters.sample is None:
        adapters.sample = _Sample(model)
    total = torch.tensor(adapters.sample.sums(), dtype=torch.float64)
    dist.all_reduce(total, group=model.control_group)
    return metrics_of(Sums(*total.tolist()))
