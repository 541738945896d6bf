"""One rank of a check that `probe` finds what Bridge's mappings do, with real shards and gloo.

    torchrun ... -m tests.trainer_node.layout.mappings SEED

Every rank has a shard of each parameter. The HF tensors out of all ranks' pieces must equal
Bridge's own conversion.
"""

from __future__ import annotations

import math
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_node.backends import cpu_shims
from trainer_node.export.sources import Source
from trainer_node.layout import layouts
from trainer_node.layout.strides import Layout
from weight_transfer.boxes import matrix

cpu_shims.apply()

from megatron.bridge.models.conversion import param_mapping as bridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402


class Module(nn.Module):
    """A Megatron module as a mapping sees it."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config


class ColumnParallelLinear(Module):
    """Split by rows."""


class RowParallelLinear(Module):
    """Split by columns."""


class RMSNorm(Module):
    """A copy on every rank."""


class Bridge:
    """What answers are kept for."""


# ------------------------------------------------------------ mappings of other kinds


class Unzipped(bridge.AutoMapping):
    """Gate and up alternate in the HF tensor, which is transposed: GPT-OSS's experts."""

    def megatron_to_hf(self, weights, module):
        out = torch.empty_like(weights)
        out[::2], out[1::2] = weights.chunk(2)
        return super().megatron_to_hf(out.t().contiguous(), module)


class Repeated(bridge.AutoMapping):
    """Each row twice: key-value heads for every query head."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        return {self.hf_param: whole.repeat_interleave(2, dim=0)}


class Grouped(bridge.AutoMapping):
    """The HF tensor has all experts, as with Bridge 0.6; transposed."""

    is_grouped_export = True

    def megatron_to_hf(self, weights, module):
        found = super().megatron_to_hf(weights, module)
        return {name: tensor.transpose(-1, -2).contiguous() for name, tensor in found.items()}


class Next(bridge.AutoMapping):
    """1 is added; indices stay within the parameter, because the last row is dropped."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        return {self.hf_param: whole[:-1] + 1}


class Mean(bridge.AutoMapping):
    """Two rows become one."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        return {self.hf_param: (whole[::2] + whole[1::2]) // 2}


class Widened(bridge.AutoMapping):
    """Another dtype."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        return {self.hf_param: whole.double()}


class Sorted(bridge.AutoMapping):
    """An arrangement that depends on the values."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        return {self.hf_param: whole.flatten().sort().values.view(whole.shape)}


class Talks(bridge.AutoMapping):
    """Collectives of its own."""

    def megatron_to_hf(self, weights, module):
        dist.all_reduce(torch.zeros(1))
        return super().megatron_to_hf(weights, module)


class Late(bridge.ReplicatedMapping):
    """Moves columns that the tries with a few columns do not have."""

    def megatron_to_hf(self, weights: Any, module: Any) -> dict[str, torch.Tensor]:
        return {"l.7.x": torch.cat([weights[:, 30:], weights[:, :30]], 1)}


class Shuffled(bridge.AutoMapping):
    """No order that views could have."""

    def megatron_to_hf(self, weights, module):
        (whole,) = super().megatron_to_hf(weights, module).values()
        order = torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(0))
        return {self.hf_param: whole.flatten()[order].view(whole.shape)}


# ------------------------------------------------------------ cases


@dataclass(frozen=True, slots=True)
class Case:
    mapping: Any
    module: nn.Module
    shape: tuple[int, ...]
    """Of each rank's shard."""
    why: str | None = None
    """Part of the reason for which only Bridge can convert it."""

    @property
    def name(self) -> str:
        return f"{type(self.mapping).__name__} {self.shape}"


def cases(seed: int, parts: int) -> Iterator[Case]:
    """Random head counts and sizes, of which the number of ranks is a divisor."""
    r = random.Random(seed)
    hidden = parts * r.choice([4, 6, 8])
    groups, heads, size = parts * r.randint(1, 3), r.randint(1, 4), r.choice([2, 4, 6])
    config = SimpleNamespace(
        hidden_size=hidden,
        num_attention_heads=groups * heads,
        num_query_groups=groups,
        kv_channels=size,
        attention_output_gate=False,
        num_moe_experts=5,
        linear_key_head_dim=r.choice([2, 4]),
        linear_value_head_dim=r.choice([2, 6]),
        linear_num_key_heads=(keys := parts * r.randint(1, 3)),
        linear_num_value_heads=keys * r.randint(1, 3),
        mamba_num_heads=parts * r.randint(1, 4),
        mamba_head_dim=r.choice([2, 4]),
        mamba_state_dim=r.choice([3, 5]),
        mamba_num_groups=parts * r.randint(1, 2),
    )
    gated = SimpleNamespace(**{**vars(config), "attention_output_gate": True})
    column, row, norm = ColumnParallelLinear(config), RowParallelLinear(config), RMSNorm(config)
    name = "decoder.layers.7.linear.weight"
    rows, columns = 2 * r.randint(1, 9), r.randint(2, 9)

    fused = (heads + 2) * groups * size // parts
    qkv = (name, "l.7.q", "l.7.k", "l.7.v")
    yield Case(bridge.QKVMapping(*qkv), column, (fused, hidden))
    yield Case(bridge.QKVMapping(*qkv), column, (fused,))
    yield Case(bridge.ConcatenatedQKVMapping(name, "l.7.qkv"), column, (fused, hidden))
    more = (2 * heads + 2) * groups * size // parts
    yield Case(bridge.QKVMapping(*qkv), ColumnParallelLinear(gated), (more, hidden))
    yield Case(bridge.QKVMapping(*qkv), ColumnParallelLinear(gated), (more,))
    fused_kv = 2 * groups * size // parts
    yield Case(bridge.KVMapping(name, "l.7.k", "l.7.v"), column, (fused_kv, hidden))

    for shape in ((rows, columns), (rows,)):
        yield Case(bridge.GatedMLPMapping(name, "l.7.gate", "l.7.up"), column, shape)
        for module in (column, row, norm):
            yield Case(bridge.AutoMapping(name, "l.7.x"), module, shape)
    for module in (column, row, norm):
        yield Case(bridge.AutoMapping(name, "l.7.t", permute_dims=(1, 0)), module, (rows, columns))
    yield Case(
        bridge.AutoMapping(name, "l.7.t", permute_dims=(2, 0, 1)), column, (rows, columns, 3)
    )

    keys_dim = config.linear_key_head_dim * config.linear_num_key_heads
    values_dim = config.linear_value_head_dim * config.linear_num_value_heads
    gdn = (2 * keys_dim + 2 * values_dim + 2 * config.linear_num_value_heads) // parts
    yield Case(bridge.GDNLinearMapping(name, "l.7.qkvz", "l.7.ba"), column, (gdn, hidden))
    if hasattr(bridge, "GDNLinearMappingSeparate"):
        separate = bridge.GDNLinearMappingSeparate(name, "l.7.qkv", "l.7.z", "l.7.b", "l.7.a")
        yield Case(separate, column, (gdn, hidden))
    conv = (2 * keys_dim + values_dim) // parts
    yield Case(bridge.GDNConv1dMapping(name, "l.7.conv"), column, (conv, 1, 4))
    inner = config.mamba_num_heads * config.mamba_head_dim
    states = config.mamba_state_dim * config.mamba_num_groups
    mamba = (2 * inner + 2 * states + config.mamba_num_heads) // parts
    yield Case(bridge.MambaInProjMapping(name, "l.7.in"), column, (mamba, hidden))
    conv = (inner + 2 * states) // parts
    yield Case(bridge.MambaConv1dMapping(name, "l.7.conv"), column, (conv, 1, 4))

    yield Case(Unzipped(name, "l.7.x"), column, (rows, columns))
    yield Case(Repeated(name, "l.7.x"), column, (rows, columns))
    expert = "decoder.layers.7.mlp.experts.linear_fc2.weight3"
    yield Case(Grouped(expert, "l.7.e.3"), row, (rows, columns))
    yield Case(Grouped(expert, "l.7.e.3"), column, (rows, columns))

    if hasattr(bridge, "FusedGatedExpertMapping"):
        fc1 = expert.replace("fc2", "fc1")
        yield Case(bridge.FusedGatedExpertMapping(fc1, "l.7.e.3"), column, (rows, columns))
        for turned in (False, True):
            mapping = bridge.FusedExpertMapping(expert, "l.7.e.3", transpose_on_export=turned)
            yield Case(mapping, row, (rows, columns))
    if hasattr(bridge, "QKVGMapping"):
        with_gate = bridge.QKVGMapping(*qkv, "l.7.g")
        yield Case(with_gate, column, (fused + groups * heads // parts, hidden))
        yield Case(with_gate, ColumnParallelLinear(gated), (more, hidden))

    square = (8, 8)
    for kind, why in (
        (bridge.RMSNorm2ZeroCenteredRMSNormMapping, "values"),
        (Next, "values"),
        (Mean, "values"),
        (Widened, "float64"),
        (Sorted, "values"),
        (Talks, "talks to other ranks"),
    ):
        yield Case(kind(name, "l.7.x"), column, square, why)
    yield Case(Shuffled(name, "l.7.x"), column, (160, 80), "order")
    yield Case(Late(name, "l.7.x"), RMSNorm(config), (40, 64))


def task_of(case: Case, param: torch.Tensor) -> Any:
    name = case.mapping.megatron_param
    return SimpleNamespace(
        mapping=case.mapping,
        megatron_module=case.module,
        param_weight=param,
        param_name=name,
        global_param_name=name,
    )


def check(case: Case) -> None:
    rank = dist.get_rank()
    numel = math.prod(case.shape)
    param = (torch.randperm(numel) + rank * numel).view(case.shape)
    kept = dict(vars(case.mapping))
    answers = layouts.layouts(task_of(case, param), Bridge(), {})
    assert vars(case.mapping) == kept, "the probe left something in Bridge's mapping"
    expected = case.mapping.megatron_to_hf(param, case.module)
    assert list(answers) == list(expected), case.name
    for name, wanted in expected.items():
        answer = answers[name]
        if case.why is not None:
            assert isinstance(answer, str) and case.why in answer, (case.name, str(answer)[:200])
            continue
        assert isinstance(answer, Layout), (case.name, str(answer)[:200])
        got = torch.full(matrix(answer.shape), -1)
        for piece in answer.of_part(rank):
            source = Source.of(param, piece, is_vector=got.shape[1] == 1)
            box = piece.box
            rows = got[box.first_row : box.first_row + box.rows]
            place = rows[:, box.first_column : box.first_column + box.columns]
            assert place.shape == (box.rows, box.columns) and bool((place == -1).all())
            place.copy_(source.view().reshape(box.rows, box.columns))
        dist.all_reduce(got, op=dist.ReduceOp.MAX)
        if getattr(case.mapping, "transpose_on_export", False):
            wanted = wanted.t()
        wanted = wanted.contiguous()
        dist.broadcast(wanted, 0)  # of copies, Bridge's export on rank 0 has this rank's
        got = got.view(answer.shape)
        if getattr(case.mapping, "is_grouped_export", False):
            assert bool((got[[0, 1, 2, 4]] == -1).all()), "another expert's"
            got = got[3]
        assert torch.equal(got, wanted), case.name


def check_kept_answers(parts: int) -> None:
    """Other numbers in the names share a probe; another shape, config or class do not."""
    (first, *_), (other, *_) = cases(0, parts), cases(0, parts)
    bridge_, param = Bridge(), torch.empty(first.shape, device="meta")

    def ask(case: Case, *, layer: int, param: torch.Tensor = param) -> list[str]:
        case.mapping.megatron_param = f"decoder.layers.{layer}.linear.weight"
        for role, name in case.mapping.hf_param.items():
            case.mapping.hf_param[role] = re.sub(r"\d+", str(layer), name)
        return list(layouts.layouts(task_of(case, param), bridge_, {}))

    assert ask(first, layer=7) == ["l.7.q", "l.7.k", "l.7.v"]
    assert ask(first, layer=12) == ["l.12.q", "l.12.k", "l.12.v"]
    assert len(layouts._KNOWN[bridge_]) == 1
    ask(other, layer=7)  # another config
    assert len(layouts._KNOWN[bridge_]) == 2
    ask(first, layer=7, param=torch.empty(first.shape[:1], device="meta"))
    assert len(layouts._KNOWN[bridge_]) == 3


def check_few_columns(seed: int, parts: int) -> None:
    """Where a few columns tell enough, they tell the same as all."""
    before = layouts.LARGE
    for case in cases(seed, parts):
        task = task_of(case, torch.empty(case.shape, device="meta"))
        layouts.LARGE = before
        whole = layouts.layouts(task, Bridge(), {})
        layouts.LARGE = 0
        few = layouts.layouts(task, Bridge(), {})
        assert few == whole or case.why, case.name
    layouts.LARGE = before


def main() -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.HashStore() if world == 1 else None
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ.get("RANK", "0")), world_size=world
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world, create_gloo_process_groups=False
    )
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + 5):
        for case in cases(seed, world):
            check(case)
        if seed % world == dist.get_rank():  # it asks no other rank
            check_few_columns(seed, world)
    check_kept_answers(world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
