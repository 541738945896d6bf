"""Compares what trainer and sampler compute for the same tokens, operation by operation.

`inference_node.bits` writes a file of vLLM's results, `trainer_node.tools.bits` compares
Megatron's with it. Both name an operation as `OPERATIONS` does, with its layer in front, and have
rows for tokens and columns in the order of HF's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

OPERATIONS = {
    "embedding": "embedding",
    "input_norm": "RMSNorm before attention",
    "qkv": "q, k, v products",
    "q_norm": "RMSNorm of q",
    "k_norm": "RMSNorm of k",
    "rope": "rotary embedding of q, k",
    "attention": "attention",
    "attention_out": "output product",
    "residual": "sum after attention",
    "mlp_norm": "RMSNorm before the MLP",
    "gate_up": "gate, up products",
    "swiglu": "SwiGLU",
    "down": "down product",
    "router": "router logits",
    "experts": "experts",
    "final_norm": "last RMSNorm",
    "logits": "output layer",
    "log_probs": "log-softmax",
}
"""Operation -> its name for people, in the order of a forward pass."""
_AFTER_LAYERS = ("final_norm", "logits", "log_probs")
SEQUENCES = (33, 7, 90, 64)
"""Lengths of the sequences of a prefill: within, at and beyond blocks."""
PROMPTS, ANSWER = (5, 17, 40), 48
"""Lengths of the prompts to answer, and of the answers."""
SAMPLED = "sampled_log_probs"
"""The log-probs of sampled tokens: of decoding."""


def sequences(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random tokens, the same ones on both sides."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An operation in all layers, or the log-probs of sampled tokens."""

    operation: str
    layers: int
    differing: int
    """Numbers that differ, of `count`."""
    count: int
    largest: float
    """Largest absolute difference."""
    ulps: int
    """The same, in units of the last place."""
    first_layer: int | None
    """The first layer with a difference."""
    first_largest: float
    """The largest absolute difference there: in layer 0, before much has added up."""


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float, int]:
    """Numbers that differ, and the largest difference: absolute, and in numbers of the dtype from
    one to the other."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0, 0.0, 0
    far = (ours.double() - theirs.double()).abs().flatten()
    at = int(far.argmax())
    steps = int((_place(ours.flatten()[at]) - _place(theirs.flatten()[at])).abs())
    return int((~same).sum()), float(far[at]), steps


def _place(x: torch.Tensor) -> torch.Tensor:
    """The position of a number among all of its dtype."""
    kind, top = (torch.int16, 1 << 15) if x.dtype is torch.bfloat16 else (torch.int32, 1 << 31)
    bits = x.reshape(1).view(kind).long()
    return torch.where(bits < 0, -(bits + top), bits)


def compare(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> tuple[list[Row], str]:
    """A row for each operation that both have, in the order of a pass, and the first operation that
    differs; empty: none does."""
    rows, firsts, order = list[Row](), [], list(OPERATIONS)
    for operation in (*OPERATIONS, SAMPLED):
        found = [
            (layer, *differing(ours[key], theirs[key]), ours[key].numel())
            for layer, key in _keys(operation, ours)
            if key in theirs
        ]
        if not found:
            continue
        bad = [layer for layer, count, *_ in found if count]
        rows.append(
            Row(
                operation=operation,
                layers=len(found),
                differing=sum(f[1] for f in found),
                count=sum(f[4] for f in found),
                largest=max(f[2] for f in found),
                ulps=max(f[3] for f in found),
                first_layer=bad[0] if bad else None,
                first_largest=next((f[2] for f in found if f[1]), 0.0),
            )
        )
    for row in rows:
        if row.first_layer is not None and row.operation in order:
            is_end = row.operation in _AFTER_LAYERS
            layer = -1 if row.operation == "embedding" else row.first_layer
            firsts.append((is_end, layer, order.index(row.operation), row))
    if not firsts:
        return rows, "decoding" if any(row.differing for row in rows) else ""
    first = min(firsts, key=lambda f: f[:3])
    where = "" if first[0] or first[1] < 0 else f" of layer {first[1]}"
    return rows, f"{OPERATIONS[first[3].operation]}{where}"


def _keys(operation: str, found: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, str]]:
    """(layer, key) of an operation, ascending. One outside the layers has layer 0."""
    if operation in found:
        yield 0, operation
    layer = 0
    while f"{layer}.input_norm" in found:
        if (key := f"{layer}.{operation}") in found:
            yield layer, key
        layer += 1
