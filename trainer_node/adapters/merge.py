"""Merges adapters into weights: a plan that touches no data, then one tensor at a time.

Shapes: O = out features, I = in features, R = rank. The merge is `W + (alpha / rank) * B @ A`,
computed in fp32 from the base and rounded once to its dtype (`rounding`). The base is never
written.

    targets {"model.layers.0.mlp.up_proj.weight": spec}
    deltas {"model.layers.0.mlp.up_proj": LoraDelta(A, B)}
        -> [MergeOp(target="model.layers.0.mlp.up_proj.weight", adapter="...up_proj")]
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from orchestrator.errors import MergePlanError
from orchestrator.protocol.messages import TensorSpec
from trainer_node.adapters.rounding import Corner, Rounding, merge_matrix
from trainer_node.hf.names import strip_wrappers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDelta:
    """One HF linear's adapter, in full (unsharded) HF layout, fp32, unscaled; or those of all
    experts in a stacked tensor, A [E, R, I] and B [E, O, R]."""

    lora_A_RI: torch.Tensor
    lora_B_OR: torch.Tensor
    transposed: bool = False
    """The stacked tensor is [E, I, O]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the HF tensor."""
        *experts, out, rank = self.lora_B_OR.shape
        *same, other, inner = self.lora_A_RI.shape
        if rank != other or experts != same:
            return ()
        return (*experts, inner, out) if self.transposed else (*experts, out, inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOp:
    """Merge adapter `adapter` into HF tensor `target`."""

    target: str
    adapter: str


def plan_merge(
    *, deltas: Mapping[str, LoraDelta], targets: Mapping[str, TensorSpec]
) -> list[MergeOp]:
    """Decide which adapter lands in which HF tensor; touches no data. Order: that of `targets`.

    Raises:
        MergePlanError: an adapter without a target, a target hit twice, or a shape mismatch; names
            the tensors and shapes.
    """
    wanted: dict[str, str] = {}
    for name, delta in deltas.items():
        bare = strip_wrappers(name)
        target = bare if delta.lora_A_RI.dim() == 3 else f"{bare}.weight"
        if target in wanted:
            raise MergePlanError(f"{target} is hit by two adapters: {wanted[target]} and {name}")
        if target not in targets:
            raise MergePlanError(
                f"adapter {name} has no target: the model exports no tensor {target}"
            )
        _check_shapes(name=name, delta=delta, target=targets[target])
        wanted[target] = name
    return [MergeOp(target=name, adapter=wanted[name]) for name in targets if name in wanted]


def _check_shapes(*, name: str, delta: LoraDelta, target: TensorSpec) -> None:
    a, b = tuple(delta.lora_A_RI.shape), tuple(delta.lora_B_OR.shape)
    if delta.shape != target.shape:
        raise MergePlanError(
            f"adapter {name} has A {a} and B {b}, which do not make {target.name} of shape "
            f"{target.shape}"
        )


@torch.no_grad()
def merged(
    weight_OI: torch.Tensor,
    lora_B_OR: torch.Tensor,
    lora_A_RI: torch.Tensor,
    *,
    scale: float,
    rounding: Rounding,
    corner: Corner,
) -> torch.Tensor:
    """`rounding.merge_matrix`, by a kernel on a GPU: the same bits."""
    kernels = merge_kernels() if weight_OI.is_cuda else None
    merge = merge_matrix if kernels is None else kernels.merge
    found: torch.Tensor = merge(
        weight_OI.contiguous(), lora_B_OR, lora_A_RI, scale=scale, rounding=rounding, corner=corner
    )
    return found


@functools.cache
def merge_kernels() -> ModuleType | None:
    """Return the Triton kernels, or None without Triton. torch does the same."""
    try:
        import triton  # noqa: F401  - only to see whether it is there
    except ImportError:
        return None
    from trainer_node.adapters import merge_kernels

    return merge_kernels


def merge_tensor(
    weight: torch.Tensor, delta: LoraDelta, *, scale: float, rounding: Rounding, name: str
) -> torch.Tensor:
    """The HF tensor `name` with its adapter, as `rounding` defines it; a new tensor."""
    a, b = delta.lora_A_RI.float(), delta.lora_B_OR.float()
    if delta.transposed:
        a, b = b.transpose(-1, -2), a.transpose(-1, -2)
    stack = weight if weight.dim() == 3 else weight[None]
    height = stack.shape[1]
    matrices = zip(stack, b.view(-1, *b.shape[-2:]), a.view(-1, *a.shape[-2:]), strict=True)
    found = []
    for e, (matrix, one_B, one_A) in enumerate(matrices):
        corner = Corner(name, e * height)
        found.append(merged(matrix, one_B, one_A, scale=scale, rounding=rounding, corner=corner))
    return torch.stack(found) if weight.dim() == 3 else found[0]
