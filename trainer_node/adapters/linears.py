"""Finds the HF linears that Megatron's linears are made of, and which of them get an adapter.

    Place.of(layout)       where a rank's part of an HF matrix is, by the probe's layout
    Targets(names)         PEFT's rule for `lora.targets`; refuses a target that matches nothing

No mapping class and no family is known here. A linear is split by rows if the tensor ranks have
different rows of it, by columns if they have different columns, and a copy if one rank has all.

Shapes: N = this rank's rows of an HF matrix.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ALL_LINEAR, LM_HEAD
from trainer_node.hf.names import decoder_name
from trainer_node.layout.strides import Layout, NotStridedError

Split = Literal["rows", "columns"] | None
"""How tensor ranks share a linear; None: each has a copy, or there is only one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank's part of an HF linear is in its Megatron parameter."""

    shape: tuple[int, int]
    """(out features, in features) of the HF linear."""
    split: Split
    rows_N: torch.Tensor
    """Row of the parameter, and so element of the linear's output, of each row of the part."""
    runs: tuple[tuple[int, int], ...]
    """(first row, rows) of the HF linear that the part has, ascending."""
    columns: tuple[int, int]
    """(first column, columns) of the HF linear that the part has."""
    transposed: bool = False
    """HF stores [in, out], as some stacked experts."""

    @staticmethod
    def of(layout: Layout, *, part: int, columns: int) -> Place:
        """A rank's part of a linear, or of an expert in a stacked tensor.

        Args:
            part: the rank in its tensor-parallel group.
            columns: of the parameter.

        Raises:
            NotStridedError: the ranks' parts are not rows or columns of the HF matrix.
        """
        one = layout.one_of_stack() if len(layout.shape) == 3 else layout
        try:
            return _placed(one, part=part, columns=columns)
        except NotStridedError:
            if len(layout.shape) != 3:
                raise
            return replace(_placed(one.transposed(), part=part, columns=columns), transposed=True)

    @staticmethod
    def of_vocab(local: tuple[int, int], vocab_size: int, *, part: int, parts: int) -> Place:
        """A rank's part of the output layer, without Megatron's padding at the vocabulary's end.

        Args:
            local: shape of the rank's parameter.
            part: the rank in its tensor-parallel group of `parts` ranks.
        """
        first = min(part * local[0], vocab_size)
        rows = min(local[0], vocab_size - first)
        return Place(
            shape=(vocab_size, local[1]),
            split="rows" if parts > 1 else None,
            rows_N=torch.arange(rows),
            runs=((first, rows),),
            columns=(0, local[1]),
        )


def _placed(layout: Layout, *, part: int, columns: int) -> Place:
    height, width = layout.shape
    parts = sorted({piece.part for piece in layout.pieces})
    boxes = [[p.box for p in layout.of_part(n)] for n in parts]
    across = [{(b.first_column, b.columns) for b in own} for own in boxes]
    heights = {sum(b.rows for b in own) for own in boxes}
    if any(len(own) != 1 for own in across) or len(heights) != 1:
        raise NotStridedError("its ranks' parts are neither rows nor columns of it")
    split: Split = None
    if len(parts) > 1:
        split = "rows" if across[0] == across[-1] else "columns"
    part = part if split else parts[0]
    own = sorted(layout.of_part(part), key=lambda p: p.box.first_row)
    if heights != {height // len(parts) if split == "rows" else height}:
        raise NotStridedError("several tensor ranks have the same rows of it")
    runs: list[tuple[int, int]] = []
    for box in (p.box for p in own):
        if runs and sum(runs[-1]) == box.first_row:
            runs[-1] = (runs[-1][0], runs[-1][1] + box.rows)
        else:
            runs.append((box.first_row, box.rows))
    return Place(
        shape=(height, width),
        split=split,
        rows_N=layout.fused_rows(part, columns),
        runs=tuple(runs),
        columns=next(iter(across[parts.index(part)])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An HF linear, or one expert of a stacked tensor, in a Megatron linear of this rank."""

    name: str
    """HF module name; (tensor, expert) of `a.experts.t` is `a.experts.3.t`."""
    place: Place


def initial_lora_a(name: str, *, rank: int, in_features: int, seed: int) -> torch.Tensor:
    """PEFT's kaiming_uniform(a=sqrt(5)) for the whole A [R, I] on the CPU; depends on seed and name
    only, not on the topology."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    # kaiming_uniform with a = sqrt(5): sqrt(6 / ((1 + 5) * fan_in)).
    bound = 1 / math.sqrt(in_features)
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


def is_linear(module: Any) -> bool:
    """Whether a hook on the module sees a linear's input and output: Megatron's and
    TransformerEngine's classes, and what inherits from them."""
    return any(base.__name__.endswith("Linear") for base in type(module).__mro__)


def is_matrix(task: Any) -> bool:
    """Whether a conversion task is a decoder layer's weight matrix."""
    name = decoder_name(task.global_param_name)
    return name is not None and "weight" in name.rpartition(".")[2] and task.param_weight.dim() == 2


class Targets:
    """Which HF linears get an adapter, as PEFT has it.

    A target is the end of a module's name. `all-linear` is every linear of the decoder layers but
    the routers; `lm_head` is the output layer. A stacked tensor is not a module. Its target has a
    dot and is the end of its name, as in PEFT's `target_parameters` (`experts.gate_up_proj`).

    Args:
        targets: `LoraConfig.targets`.
        hf_names: every tensor of the decoder layers, on all ranks, and of an output layer apart.

    Raises:
        ConfigError: a target matches nothing; names it, and what is nearest.
    """

    def __init__(self, targets: Sequence[str], hf_names: Iterable[str]) -> None:
        self.all_linear = ALL_LINEAR in targets
        self._targets = targets
        names = list(hf_names)
        if LM_HEAD in targets and not any(map(self.is_head, names)):
            raise ConfigError(
                "lora.targets: this model's lm_head is its embedding, which can have no adapter"
            )
        for target in () if self.all_linear else targets:
            if not any(_ends(module_of(n), target) for n in names if self._is_meant(n, target)):
                raise ConfigError(f"lora.targets: {target!r} {_nearest(target, names)}")

    @staticmethod
    def _is_meant(hf_name: str, target: str) -> bool:
        return hf_name.endswith(".weight") or "." in target

    @staticmethod
    def is_head(hf_name: str) -> bool:
        """Whether an HF tensor is the output layer's weight."""
        return _ends(module_of(hf_name), LM_HEAD)

    def wants(self, hf_name: str) -> bool:
        """Whether an HF tensor's linear gets an adapter."""
        if self.is_head(hf_name):
            return LM_HEAD in self._targets
        if self.all_linear:
            return hf_name.endswith(".weight")
        return any(
            _ends(module_of(hf_name), t) for t in self._targets if self._is_meant(hf_name, t)
        )


def module_of(hf_name: str) -> str:
    """The HF module of a weight; a stacked tensor's own name."""
    return hf_name.removesuffix(".weight")


def expert_name(tensor: str, expert: int) -> str:
    """The name of one expert of a stacked tensor."""
    before, _, linear = tensor.partition(".experts.")
    return f"{before}.experts.{expert}.{linear}"


def stack_of(name: str) -> tuple[str, int]:
    """Undo `expert_name`."""
    before, _, rest = name.rpartition(".experts.")
    expert, _, linear = rest.partition(".")
    return f"{before}.experts.{linear}", int(expert)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _nearest(target: str, hf_names: Iterable[str]) -> str:
    names = list(hf_names)
    stacked = [n for n in names if not n.endswith((".weight", "bias")) and _ends(n, target)]
    if stacked:
        own = ".".join(stacked[0].split(".")[-2:])
        return f"is a stacked tensor, no module; to give its experts adapters, name {own!r}"
    leaves = sorted({module_of(n).rpartition(".")[2] for n in names if n.endswith(".weight")})
    near = difflib.get_close_matches(target.rpartition(".")[2], leaves, n=4, cutoff=0.3) or leaves
    return f"matches nothing in the model's layers; the nearest names are {', '.join(near)}"
