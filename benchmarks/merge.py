"""Merging a MoE's adapters into its experts, layer by layer in the order of vLLM's fused tensors,
in bytes written per second.

Qwen3-30B-A3B's shape: 48 layers of 128 experts, gate and up [768, 2048] in one Megatron weight for
each expert, down [2048, 768]; A and B of rank 16 in fp32. Peers in the same run: a plain copy of as
many bytes, which reads and writes what a merge must at least, and `merge_tensor` in a Python loop
over the tensors. `host_s` is the time to queue a layer: it must stay below the layer's own.

Then whole models, in bf16 and FP8 (`merge_shapes`): SPLICE_BENCH_SHAPES (8b,14b,30b-a3b on cuda,
tiny else), SPLICE_BENCH_TILES=1 for other tiles, SPLICE_BENCH_RING_CHUNKS for the sender's ring.
SPLICE_BENCH_EXPERTS=0 leaves the experts above out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import merge_shapes
from benchmarks.harness import Case
from benchmarks.timing import seconds, wait
from trainer_node.adapters.merge import merge_tensor
from trainer_node.adapters.rounding import Corner, Rounding
from trainer_node.export.merger import Merger
from trainer_node.export.sources import Delta, Member, Source

SCALE = 2.0
ROUNDING = Rounding()


def run(*, device: str, small: bool) -> list[Case]:
    """The experts of a MoE, then whole models."""
    is_small = small or device == "cpu"
    shapes = "tiny" if is_small else os.environ.get("SPLICE_BENCH_SHAPES", "8b,14b,30b-a3b")
    wants_experts = small or os.environ.get("SPLICE_BENCH_EXPERTS", "1") == "1"
    found = _experts(device=device, small=small) if wants_experts else []
    for name in shapes.split(","):
        found += merge_shapes.cases(name, device, 2 if small else 5)
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _experts(*, device: str, small: bool) -> list[Case]:
    """Bytes per second of the merge and of its peers."""
    layers, experts, hidden, inner = (1, 8, 256, 96) if small else (48, 128, 2048, 768)
    repeats = 3 if small else 5
    chunks = _model(layers, experts, hidden, inner, device)
    merger = Merger(
        [(sum(map(_nbytes, chunk)), chunk) for chunk in chunks],
        scale=SCALE,
        rounding=lambda: ROUNDING,
        device=device,
    )
    total = sum(merger.chunk_nbytes(c) for c in range(merger.num_chunks))
    ring = [
        torch.empty(
            max(map(merger.chunk_nbytes, range(merger.num_chunks))),
            dtype=torch.uint8,
            device=device,
        )
        for _ in range(2)
    ]

    def merge() -> None:
        for c in range(merger.num_chunks):
            merger.fill(c, ring[c % 2][: merger.chunk_nbytes(c)])

    def copy() -> None:
        for c in range(merger.num_chunks):
            ring[c % 2].copy_(ring[(c + 1) % 2])

    def loop() -> None:
        for c, chunk in enumerate(chunks):
            for member in chunk:
                flat_B = _reference(member).reshape(-1).view(torch.uint8)
                ring[c % 2][member.offset : member.offset + flat_B.numel()].copy_(flat_B)

    copied = merger.num_chunks * ring[0].numel()
    settings = {
        "layers": layers,
        "experts": experts,
        "hidden": hidden,
        "inner": inner,
        "rank": 16,
        "bytes": total,
    }
    _check(merger, chunks[0], ring[0])
    merged_s, copied_s = _times(merge, device, repeats), _times(copy, device, repeats)
    looped_s = _times(loop, device, 1 if layers > 1 else repeats)
    return [
        _rate(
            "merge/30b-a3b-experts",
            total,
            merged_s,
            "copy_ of the same bytes",
            copied,
            copied_s,
            settings,
        ),
        _rate(
            "merge/30b-a3b-experts-loop",
            total,
            merged_s,
            "merge_tensor in a loop",
            total,
            looped_s,
            settings,
        ),
        Case(
            name="merge/30b-a3b-experts",
            metric="whole_s",
            unit="s",
            samples=tuple(merged_s),
            settings=settings,
        ),
        Case(
            name="merge/30b-a3b-experts",
            metric="host_s",
            unit="s",
            samples=tuple(_host_times(merge, device, repeats)),
            settings=settings,
        ),
    ]


def _model(layers: int, experts: int, hidden: int, inner: int, device: str) -> list[list[Member]]:
    """Experts of all layers; a chunk is a layer's gate, up, gate, up, ... and then its downs."""
    chunks: list[list[Member]] = []
    for _ in range(layers):
        parts = [
            _stack(experts, out, into, device)
            for out, into in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        fc1 = [_weight(2 * inner, hidden, device) for _ in range(experts)]
        fc2 = [_weight(hidden, inner, device) for _ in range(experts)]
        chunk: list[Member] = []
        for e in range(experts):
            _append(chunk, Source.whole(fc1[e], rows=inner), *parts[0], e)
            _append(chunk, Source.whole(fc1[e], first=inner, rows=inner), *parts[1], e)
        for e in range(experts):
            _append(chunk, Source.whole(fc2[e]), *parts[2], e)
        chunks.append(chunk)
    return chunks


def _weight(out: int, into: int, device: str) -> torch.Tensor:
    return torch.empty(out, into, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)


def _stack(experts: int, out: int, into: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(experts, 16, into, device=device) * 0.02, torch.randn(
        experts, out, 16, device=device
    ) * 0.02


def _append(
    chunk: list[Member], source: Source, lora_A: torch.Tensor, lora_B: torch.Tensor, expert: int
) -> None:
    """Put a merged tensor behind the last one."""
    delta = Delta(lora_A=lora_A, lora_B=lora_B, expert=expert)
    offset = chunk[-1].offset + _nbytes(chunk[-1]) if chunk else 0
    chunk.append(
        Member(
            source=source,
            delta=delta,
            offset=offset,
            row_stride=source.columns,
            corner=Corner(f"tensor {len(chunk)}"),
        )
    )


def _nbytes(member: Member) -> int:
    return member.source.numel * member.source.param.element_size()


def _reference(member: Member) -> torch.Tensor:
    """The tensor as `merge_tensor` makes it."""
    assert member.delta is not None
    weight = member.source.view().reshape(member.source.shape)
    return merge_tensor(
        weight,
        member.delta.matrices(),
        scale=SCALE,
        rounding=ROUNDING,
        name=member.corner.name,
    )


def _check(merger: Merger, chunk: Sequence[Member], out_B: torch.Tensor) -> None:
    """What is measured is right: every bit of the first layer is `merge_tensor`'s."""
    merger.fill(0, out_B[: merger.chunk_nbytes(0)])
    for n, member in enumerate(chunk):
        wanted, begin = _reference(member), member.offset
        got = out_B[begin : begin + _nbytes(member)].view(torch.int16).view(wanted.shape)
        different = int((got != wanted.view(torch.int16)).sum())
        if different:
            raise AssertionError(f"tensor {n} of the first layer: {different} elements differ")


def _times(work: Callable[[], None], device: str, repeats: int) -> list[float]:
    """Seconds until the work is done, after one untimed round."""
    return [seconds(work, device) for _ in range(repeats + 1)][1:]


def _host_times(work: Callable[[], None], device: str, repeats: int) -> list[float]:
    """Seconds until the work is queued (on a CPU: done)."""
    samples = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    wait(device)
    return samples


def _rate(
    name: str,
    nbytes: int,
    seconds: Sequence[float],
    peer: str,
    peer_nbytes: int,
    peer_seconds: Sequence[float],
    settings: dict[str, int],
) -> Case:
    return Case(
        name=name,
        metric="bytes_per_s",
        unit="B/s",
        samples=tuple(nbytes / s for s in seconds),
        peer=peer,
        peer_samples=tuple(peer_nbytes / s for s in peer_seconds),
        settings=settings,
    )
