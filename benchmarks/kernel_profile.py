"""Which kinds of kernels a step's time goes into, by their names, and how long none of
them runs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import wait

KINDS = {
    "attention": ("flash", "fmha", "cudnn", "sdpa", "attn"),
    "grouped products": ("groupproblemshape", "group_mm", "grouped_mm"),
    "experts' own": ("_swiglu_", "_add_product_", "_combine_"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm"),
    "norm": ("norm",),
    "rope": ("rope", "rotary"),
    "gather, sort": ("index", "gather", "scatter", "sort", "permute"),
    "copy": ("copy", "memcpy", "memset", "cat"),
    "elementwise": ("elementwise", "triton", "vectorized", "multi_tensor"),
}
"""Kind -> what is in its kernels' names, in lower case; the first that fits counts."""
MOST = 30
"""Kernels listed one by one."""


def kind_of(kernel: str) -> str:
    """One of KINDS, or "other"."""
    name = kernel.lower()
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other"
    )


def busy_us(spans: Sequence[tuple[float, float]]) -> float:
    """Microseconds covered by at least one of the (start, end)."""
    covered, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered


def table_of(step: Callable[[], object], device: str) -> str:
    """One step under torch's profiler (which slows the host): lines of text. On a CPU operators
    take the kernels' place.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    wait(device)
    with profile(activities=activities) as profiled:
        started = time.perf_counter()
        step()
        wait(device)
        wall_s = time.perf_counter() - started
    kernels: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in profiled.events():
        if event.device_type == wanted:
            kernels[event.name].append((event.time_range.start, event.time_range.end))
    seconds = {
        name: sum(end - start for start, end in spans) / 1e6 for name, spans in kernels.items()
    }
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name in kernels:
        by_kind[kind_of(name)].append(name)
    busy_s = busy_us([span for spans in kernels.values() for span in spans]) / 1e6
    lines = [
        f"wall {wall_s:.4f} s, some kernel runs {busy_s:.4f} s, {sum(map(len, kernels.values()))} "
        "launches"
    ]
    for kind, names in sorted(by_kind.items(), key=lambda item: -sum(seconds[n] for n in item[1])):
        lines.append(
            f"{sum(seconds[n] for n in names):10.4f} s {sum(len(kernels[n]) for n in names):8d}  "
            f"{kind}"
        )
    slowest = sorted(kernels, key=lambda n: -seconds[n])[:MOST]
    lines += [
        f"{seconds[name]:10.4f} s {len(kernels[name]):8d}    {name[:120]}" for name in slowest
    ]
    if device == "cuda":
        on_host = sorted(profiled.key_averages(), key=lambda e: -e.self_cpu_time_total)[:MOST]
        lines.append("the host's time, without what is called")
        lines += [
            f"{e.self_cpu_time_total / 1e6:10.4f} s {e.count:8d}    {e.key[:120]}" for e in on_host
        ]
    return "\n".join(lines) + "\n"
