"""Merging and quantising in one go, against a merge into a scratch and `weight_transfer.fp8`.

    TRITON_INTERPRET=1 python -m tests.trainer_node.export.fused          on a CPU
    python -m tests.trainer_node.export.fused cuda                        on a GPU

Axes: B = bytes, E = experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.protocol.messages import Fp8Group, Fp8Weights, Manifest, TensorSpec, fp8_manifest
from tests.weight_transfer.rounding import round_to_nearest
from trainer_node.adapters.merge import merge_kernels, merge_tensor
from trainer_node.adapters.rounding import NEAREST, Corner, Rounding
from trainer_node.export import fp8_export, fp8_fused
from trainer_node.export.merger import Merger
from trainer_node.export.sources import Delta, Member, Source

SCALE = 1.7
STOCHASTIC = Rounding(seed=7)
KINDS = ("per_tensor", "per_channel", "per_block")
CHANGES = ("counted", "told", "rounding")
"""After them magnitudes differ from those that were found."""


def parameters(
    device: str, *, hidden: int, inner: int, experts: int, rank: int
) -> dict[str, tuple[Source, Delta | None]]:
    """A norm, q, k and v whose rows interleave in one weight, experts, and a head without FP8."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * 0.05
        return values.bfloat16().to(device)

    def delta(rows: int, columns: int, expert: int | None = None) -> Delta:
        count = () if expert is None else (experts,)
        a = torch.randn(*count, rank, columns, generator=generator) * 0.05
        b = torch.randn(*count, rows, rank, generator=generator) * 0.05
        return Delta(lora_A=a.to(device), lora_B=b.to(device), expert=expert)

    found: dict[str, tuple[Source, Delta | None]] = {"norm": (Source.whole(weight(hidden)), None)}
    groups, head = 2, hidden // 8
    qkv = weight(groups * 4 * head, hidden)
    for name, first, width in (("q", 0, 2), ("k", 2, 1), ("v", 3, 1)):
        rows = width * head
        source = Source(
            param=qkv,
            offset=first * head * hidden,
            groups=groups,
            rows=rows,
            columns=hidden,
            group_stride=4 * head * hidden,
            row_stride=hidden,
            shape=(groups * rows, hidden),
        )
        found[f"{name}.weight"] = (source, delta(groups * rows, hidden) if name != "v" else None)
    stack = delta(inner, hidden, 0)
    for e in range(experts):
        fused = weight(2 * inner, hidden)
        for n, name in enumerate(("gate", "up")):
            source = Source.whole(fused, first=n * inner, rows=inner)
            adapter = Delta(lora_A=stack.lora_A, lora_B=stack.lora_B, expert=e)
            found[f"{e}.{name}.weight"] = (source, adapter if n == 0 else None)
        found[f"{e}.down.weight"] = (Source.whole(weight(hidden, inner)), delta(hidden, inner))
    found["head.weight"] = (Source.whole(weight(10, hidden)), None)
    found["zeros.weight"] = (Source.whole(weight(inner, hidden).zero_()), None)
    return found


def groups_of(names: list[str], kind: Any, experts: int) -> Fp8Weights:
    index = {name: i for i, name in enumerate(names)}
    together = [("q", "k", "v"), ("zeros",)]
    together += [(f"{e}.gate", f"{e}.up") for e in range(experts)]
    together += [(f"{e}.down",) for e in range(experts)]
    tensors = [tuple(sorted(index[f"{n}.weight"] for n in group)) for group in together]
    return Fp8Weights(groups=tuple(Fp8Group(kind=kind, tensors=t) for t in tensors))


def check(kind: str, device: str, *, changes: Sequence[str] = CHANGES, **sizes: int) -> None:
    """Every byte of a chunk is that of a merge, then of the quantiser, at first and after each
    change."""
    found = parameters(device, **sizes)
    names = list(found)
    specs = tuple(
        TensorSpec(name=n, dtype="bfloat16", shape=source.shape) for n, (source, _) in found.items()
    )
    manifest = Manifest(tensors=specs)
    weights = groups_of(names, kind, sizes["experts"])
    sent = fp8_manifest(manifest, weights)
    order = chunk_order(manifest, weights)
    base = fp8_export.plan(manifest, sent, weights, order, None)
    chunks, target, rounding = [], torch.device(device), STOCHASTIC
    for of_chunk in base.order:
        members, offset = [], 0
        for i in of_chunk:
            source, delta = found[names[i]]
            members.append(
                Member(
                    source=source,
                    delta=delta,
                    offset=offset,
                    row_stride=source.columns,
                    corner=Corner(names[i]),
                )
            )
            offset += specs[i].nbytes
        chunks.append((offset, members))
    common_merge: Any = {"scale": SCALE, "rounding": lambda: rounding, "device": target}
    merger = Merger(chunks, **common_merge)
    if device == "cpu":
        merger._kernels = merge_kernels()  # interpreted
    nbytes = [sum(sent.tensors[i].nbytes for i in chunk) for chunk in order]
    fused = fp8_fused.plan(merger, base.batches, nbytes, **common_merge)
    assert fused is not None and all(fused.takes(k) for k in range(len(order)))
    if device == "cpu":
        fused._plain._kernels = merge_kernels()
    common: Any = {"specs": specs, "sent": sent, "order": order, "device": target}
    plain = fp8_export.Fp8Export(Filling(merger), base, **common)  # type: ignore[arg-type]
    quick = fp8_export.Fp8Export(Filling(None), base, **common, fused=fused)  # type: ignore[arg-type]
    quick.prepare()
    for change in (None, *changes):
        if change == "rounding":
            rounding = NEAREST
        for source, delta in found.values() if change in ("counted", "told") else ():
            changed = source.param if delta is None else delta.lora_B
            # torch counts changes of a tensor, not those of its `data`.
            (changed.detach() if change == "counted" else changed.data).mul_(0.375)
        if change == "told":
            quick.forget_prepared()
        for k, size in enumerate(nbytes):
            want_B, got_B = (
                torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for _ in "ab"
            )
            for _ in range(2 if change is None else 1):  # what a fill leaves must not show
                quick.fill(k, got_B)
            plain.fill(k, want_B)
            wrong = (want_B != got_B).nonzero()
            text = f"{kind}: {len(wrong)} of {size} bytes"
            assert len(wrong) == 0, f"{text}, first at {int(wrong[0])}"


def check_export(device: str) -> None:
    """An exported tensor has the bytes of a publication, from wherever it comes in a parameter."""
    for name, (source, delta) in parameters(
        device, hidden=2048, inner=768, experts=2, rank=16
    ).items():
        if delta is None:
            continue
        member = Member(
            source=source, delta=delta, offset=0, row_stride=source.columns, corner=Corner(name)
        )
        merger = Merger(
            [(2 * source.numel, [member])],
            scale=SCALE,
            rounding=lambda: STOCHASTIC,
            device=device,
        )
        sent = torch.empty(source.shape, dtype=torch.bfloat16, device=device)
        merger.fill(0, sent.view(-1).view(torch.uint8))
        weight = source.view().reshape(source.shape)
        found = merge_tensor(weight, delta.matrices(), scale=SCALE, rounding=STOCHASTIC, name=name)
        assert torch.equal(found.view(torch.int16), sent.view(torch.int16)), name


def chunk_order(manifest: Manifest, weights: Fp8Weights) -> list[list[int]]:
    """Two chunks; scales of a group lie before its weights."""
    places = fp8_export.fp8_places(manifest, weights)
    quantised = {i for group in weights.groups for i in group.tensors}
    plain = [places[i][0] for i in range(len(places)) if i not in quantised]
    half = len(weights.groups) // 2
    order = []
    for groups, others in ((weights.groups[:half], plain[:1]), (weights.groups[half:], plain[1:])):
        indices = [i for group in groups for i in group.tensors]
        scales = [places[i][1] for i in indices]
        order.append([*scales, *(places[i][0] for i in indices), *others])
    return order


class Filling:
    """Only the merge, as `WireExport` makes it."""

    longest_s = 1.0

    def __init__(self, merger: Merger | None) -> None:
        self._merger = merger

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        assert self._merger is not None, "a fused chunk is merged by nobody else"
        self._merger.fill(chunk, out_B)


def main(device: str) -> None:
    if device == "cpu":
        round_to_nearest()
    for kind in KINDS:
        hidden = 256 if kind == "per_tensor" else 128
        check(kind, device, hidden=hidden, inner=128, experts=2, rank=4, changes=["rounding"])
        # Blocks that end outside.
        check(kind, device, hidden=136, inner=72, experts=1, rank=3, changes=["counted", "told"])
    check_export(device)
    if device == "cuda":
        for kind in KINDS:
            check(kind, device, hidden=2048, inner=768, experts=16, rank=16)
            check(kind, device, hidden=5120, inner=17408, experts=1, rank=16)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
