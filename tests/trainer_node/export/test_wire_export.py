"""Bytes of `WireExport` against `Exporter` on real Megatron, and of the kernel (interpreted, on the
CPU) against `merge_tensor`.

Synthetic adapters are small multiples of powers of two: their products are exact in any order,
which Triton's interpreter does not keep. Every byte is then decided by the two roundings of scale
and W, and by the last one.

Run as a script it is the process that imports Megatron: python -m
tests.trainer_node.export.test_wire_export models DENSE_TIED DENSE_UNTIED MOE
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import TensorSpec
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.export.wire_orders import shuffled_order, vllm_order
from tests.weight_transfer.rounding import round_to_nearest
from trainer_node.adapters.merge import merge_kernels, merge_tensor
from trainer_node.adapters.rounding import NEAREST, Corner, Rounding
from trainer_node.export import wire_export
from trainer_node.export.merger import Merger
from trainer_node.export.probe import probe
from trainer_node.export.sources import Delta, Member, Source
from trainer_node.export.wire_export import WireExport
from weight_transfer.boxes import Box

SCALE = 1.7  # no power of two: the multiplication rounds
STOCHASTIC = Rounding(seed=7)


def run_self(*args: object, timeout_s: float = 150.0, **env: str) -> None:
    # This file imports Megatron, which the stand-ins for CPUs must precede.
    script = (
        "import runpy; from trainer_node.backends import cpu_shims; cpu_shims.apply(); "
        "runpy.run_module('tests.trainer_node.export.test_wire_export', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, *map(str, args)]
    ran = subprocess.run(
        command,
        cwd=REPO,
        env={**child_env(), **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


def test_bytes_equal_the_export(models, torchrun) -> None:
    torchrun(
        1,
        "export.test_wire_export",
        "models",
        models["dense_tied"],
        models["dense_untied"],
        models["moe"],
    )


def test_the_kernel_interpreted() -> None:
    """Triton's interpreter must be chosen before Triton is imported."""
    run_self("kernel", TRITON_INTERPRET="1")


def test_the_kernel_interpreted_on_a_real_model(models) -> None:
    run_self("kernel-model", models["moe"], TRITON_INTERPRET="1")


def test_a_chunk_that_is_one_parameter_lies_where_it_is() -> None:
    padded = Source.whole(torch.randn(70, 16), rows=64)  # a vocabulary without its padding
    plain, adapted = linear(8, 16, torch.bfloat16, rank=0), linear(8, 16, torch.bfloat16, rank=2)
    items = [
        MergeItem(spec=spec_of("padded", padded), source=padded),
        *plain,
        *adapted,
        *linear(96, 40, torch.float32, rank=0, groups=3),
    ]
    merger = merger_of(items, [[0], [1], [2], [3], [4, 5]])
    for chunk in (0, 1):
        there_B = merger.resident(chunk)
        assert there_B is not None and there_B.data_ptr() == items[chunk].source.address()
        assert torch.equal(there_B, filled(merger, chunk))
        before_B = there_B.clone()
        merger.fill(chunk, there_B)
        assert torch.equal(there_B, before_B)
    # An adapter is added; rows of a fused weight interleave; two are two.
    assert [merger.resident(chunk) for chunk in (2, 3, 4)] == [None, None, None]


# ------------------------------------------------------------ synthetic


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeItem:
    """One HF tensor: its name and shape, the source of its bytes, the adapter that is added."""

    spec: TensorSpec
    source: Source
    delta: Delta | None = None


def merger_of(
    items: Sequence[MergeItem], order: Sequence[Sequence[int]], *, rounding: Rounding = STOCHASTIC
) -> Merger:
    """Merges chunks of whole tensors, laid end to end."""
    return Merger(
        [end_to_end([items[n] for n in indices]) for indices in order],
        scale=SCALE,
        rounding=lambda: rounding,
        device="cpu",
    )


def end_to_end(items: Sequence[MergeItem]) -> tuple[int, list[Member]]:
    """A chunk's size in bytes and its tensors."""
    ends = list(itertools.accumulate((item.spec.nbytes for item in items), initial=0))
    return ends[-1], [
        Member(
            source=item.source,
            delta=item.delta,
            offset=offset,
            row_stride=item.source.columns,
            corner=Corner(item.spec.name),
        )
        for item, offset in zip(items, ends, strict=False)
    ]


def reference(
    item: MergeItem, rounding: Rounding = STOCHASTIC, *, scale: float = SCALE
) -> torch.Tensor:
    """The tensor as `merge_tensor` makes it."""
    weight = item.source.view().reshape(item.source.shape).contiguous()
    if item.delta is None:
        return weight
    delta = item.delta.matrices()
    return merge_tensor(weight, delta, scale=scale, rounding=rounding, name=item.spec.name)


def matrix(*shape: int) -> torch.Tensor:
    """A or B: multiples of 1 / 16, at most 1. A row of zeros and a column of zeros: no delta."""
    found = torch.randint(-16, 17, shape) / 16
    found[..., 0, :] = 0
    found[..., :, 0] = 0
    return found


def weights(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Of several sizes, with signed zeros, infinities, a NaN with a payload, largest numbers."""
    weight = (torch.randn(shape) * torch.exp2(torch.randint(-12, 3, shape))).to(dtype)
    flat, top = weight.view(-1), torch.finfo(dtype).max
    special = [-0.0, 0.0, float("inf"), float("-inf"), top, -top, torch.finfo(dtype).tiny]
    places = torch.randperm(len(flat))[: 4 * len(special)]
    flat[places] = torch.tensor(special * 4)[: len(places)].to(dtype)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    flat.view(integers)[-1] = flat.new_full((1,), float("nan")).view(integers)[0] | 5
    return weight


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit. A NaN with a delta is a NaN, with a payload that the device chooses."""
    got, want = (
        t.masked_fill(t.isnan(), float("nan")) if t.is_floating_point() else t for t in (got, want)
    )
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def spec_of(name: str, source: Source) -> TensorSpec:
    return TensorSpec(
        name=name, dtype=str(source.param.dtype).removeprefix("torch."), shape=source.shape
    )  # type: ignore[arg-type]


def linear(
    out: int, columns: int, dtype: torch.dtype, *, rank: int, groups: int = 1
) -> list[MergeItem]:
    """One weight; with groups > 1 three HF tensors whose rows interleave in it: widths 2, 1 and 1
    of 4.
    """
    weight = weights(out, columns, dtype=dtype)

    def delta(rows: int) -> Delta | None:
        if not rank:
            return None
        return Delta(lora_A=matrix(rank, columns), lora_B=matrix(rows, rank), expert=None)

    name = f"{dtype}.{out}x{columns}.{rank}.{groups}"
    if groups == 1:
        source = Source.whole(weight)
        return [MergeItem(spec=spec_of(name, source), source=source, delta=delta(out))]
    quarter = out // groups // 4
    items = []
    for part, first, width in (("q", 0, 2), ("k", 2, 1), ("v", 3, 1)):
        source = Source(
            param=weight,
            offset=first * quarter * columns,
            groups=groups,
            rows=width * quarter,
            columns=columns,
            group_stride=4 * quarter * columns,
            row_stride=columns,
            shape=(groups * width * quarter, columns),
        )
        items.append(
            MergeItem(
                spec=spec_of(f"{name}.{part}", source), source=source, delta=delta(source.shape[0])
            )
        )
    return items


def experts(
    count: int, half: int, columns: int, dtype: torch.dtype, *, rank: int
) -> list[MergeItem]:
    """gate and up of each expert out of its own fused weight; adapters stacked."""
    stacks = [(matrix(count, rank, columns), matrix(count, half, rank)) for _ in range(2)]
    items = []
    for e in range(count):
        weight = weights(2 * half, columns, dtype=dtype)
        for part, (lora_A, lora_B) in enumerate(stacks):
            source = Source.whole(weight, first=part * half, rows=half)
            spec = spec_of(f"{dtype}.{half}x{columns}.{rank}.expert{e}.{part}", source)
            items.append(
                MergeItem(
                    spec=spec, source=source, delta=Delta(lora_A=lora_A, lora_B=lora_B, expert=e)
                )
            )
    return items


def transposed(
    out: int, columns: int, dtype: torch.dtype, *, fused: bool, rank: int = 0
) -> MergeItem:
    """[in, out] of a weight [out, in]; fused: gate and up take turns in HF's columns. With a rank,
    the second expert of a stack."""
    weight = weights(columns, out, dtype=dtype)
    source = Source(
        param=weight,
        offset=0,
        groups=1,
        rows=out,
        columns=columns,
        group_stride=0,
        row_stride=1,
        shape=(out, columns),
        column_groups=columns // 2 if fused else 1,
        column_group_stride=out if fused else 0,
        column_stride=columns // 2 * out if fused else out,
    )
    delta = None
    if rank:
        stacks = matrix(2, rank, out), matrix(2, columns, rank)
        delta = Delta(lora_A=stacks[0], lora_B=stacks[1], expert=1, transposed=True)
    name = f"{dtype}.{out}x{columns}.turned.{fused}.{rank}"
    return MergeItem(spec=spec_of(name, source), source=source, delta=delta)


def many_items() -> list[MergeItem]:
    """Ragged and even tiles, ranks above and below 4, groups, experts, copies flat and strided, odd
    byte offsets.
    """
    items = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        items += (
            linear(64, 128, dtype, rank=16)
            + linear(70, 136, dtype, rank=3)
            + linear(5, 7, dtype, rank=1)
        )
        items += linear(96, 40, dtype, rank=5, groups=3) + linear(96, 40, dtype, rank=0, groups=3)
        items += experts(3, 24, 16, dtype, rank=4)
        items += linear(37, 11, dtype, rank=0)
        for size in ((64, 128), (70, 36), (3, 200), (1, 90)):
            for rank in (0, 5, 16):
                fusions = (False, True)
                items += [transposed(*size, dtype, fused=fused, rank=rank) for fused in fusions]
    odd = Source.whole(torch.arange(3, dtype=torch.uint8))
    return [*items, MergeItem(spec=spec_of("odd", odd), source=odd)]


def filled(merger: Merger | WireExport, chunk: int) -> torch.Tensor:
    """The chunk in a buffer that is wrong everywhere before, with a fence on both sides."""
    whole = torch.full((merger.chunk_nbytes(chunk) + 128,), 0xA5, dtype=torch.uint8)
    merger.fill(chunk, whole[64:-64])
    assert bool((whole[:64] == 0xA5).all() and (whole[-64:] == 0xA5).all()), (
        "written beyond the chunk"
    )
    return whole[64:-64]


def by_kernel_here(items: Sequence[MergeItem]) -> list[bool]:
    """Which items of a chunk the kernel takes: those at a multiple of their element size."""
    offsets = itertools.accumulate((item.spec.nbytes for item in items), initial=0)
    return [
        offset % item.source.param.element_size() == 0
        for item, offset in zip(items, offsets, strict=False)
    ]


def pieces(items: Sequence[MergeItem], out_B: torch.Tensor) -> list[torch.Tensor]:
    sizes = [item.spec.nbytes for item in items]
    cut = zip(items, out_B.split(sizes), strict=True)
    return [
        flat.clone().view(item.source.param.dtype).view(item.source.shape) for item, flat in cut
    ]


def check_synthetic(*, by_kernel: bool) -> None:
    for rounding in (STOCHASTIC, NEAREST):
        torch.manual_seed(0)
        items = many_items()
        orders = [[list(range(len(items)))], shuffled_order(len(items), 3, seed=1)]
        for order in orders if rounding is STOCHASTIC else orders[1:]:
            merger = merger_of(items, order, rounding=rounding)
            if by_kernel:
                merger._kernels = merge_kernels()
                assert merger._kernels is not None
            for chunk, indices in enumerate(order):
                check_chunk(merger, chunk, [items[n] for n in indices], rounding)
        moved = items[0].source.param
        moved.data = moved.data * 2  # another storage, found at the next fill
        where = next(c for c, indices in enumerate(order) if 0 in indices)
        check_chunk(merger, where, [items[n] for n in order[where]], rounding)


def check_chunk(merger: Merger, chunk: int, items: Sequence[MergeItem], rounding: Rounding) -> None:
    for item, got in zip(items, pieces(items, filled(merger, chunk)), strict=True):
        assert same_bytes(got, reference(item, rounding)), (item.spec.name, rounding.mode)


def test_the_torch_path_equals_merge_tensor() -> None:
    check_synthetic(by_kernel=False)


def check_another_rounding(*, by_kernel: bool) -> None:
    """A loaded checkpoint brings another mode or seed: the next fill takes it on."""
    torch.manual_seed(0)
    items = linear(64, 128, torch.bfloat16, rank=4)
    present = [STOCHASTIC]
    merger = Merger([end_to_end(items)], scale=SCALE, rounding=lambda: present[0], device="cpu")
    merger._kernels = merge_kernels() if by_kernel else None
    found = set()
    for present[0] in (STOCHASTIC, NEAREST, Rounding(seed=8), STOCHASTIC):
        check_chunk(merger, 0, items, present[0])
        found.add(bytes(filled(merger, 0).numpy()))
    assert len(found) == 3


def test_another_rounding_by_the_torch_path() -> None:
    check_another_rounding(by_kernel=False)


def check_pieces(*, by_kernel: bool) -> None:
    """A weight of which the left columns are merged in place and the right ones copied from
    elsewhere: each writes only its own.
    """
    torch.manual_seed(0)
    for dtype, (out, columns, left), offset in (
        (torch.bfloat16, (70, 136, 40), 64),
        (torch.float16, (64, 256, 128), 16),
        (torch.float32, (5, 7, 3), 1),
    ):
        item = linear(out, columns, dtype, rank=4)[0]
        weight, delta, size = item.source.param, item.delta, dtype.itemsize
        assert delta is not None
        own = Source.whole(weight[:, :left].contiguous())
        own_delta = Delta(
            lora_A=delta.lora_A[:, :left].contiguous(), lora_B=delta.lora_B, expert=None
        )
        copied = Source.whole(reference(item)[:, left:].contiguous())
        common: dict[str, Any] = {"row_stride": columns, "corner": Corner(item.spec.name)}
        members = [
            Member(source=own, delta=own_delta, offset=offset, **common),
            Member(source=copied, delta=None, offset=offset + left * size, **common),
        ]
        nbytes = offset + item.spec.nbytes + 48
        mergers = [
            Merger([(nbytes, [m])], scale=SCALE, rounding=lambda: STOCHASTIC, device="cpu")
            for m in members
        ]
        whole_B = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        for merger in mergers:
            merger._kernels = merge_kernels() if by_kernel else None
            merger.fill(0, whole_B)
        got = whole_B[offset:-48].clone().view(dtype).view(out, columns)
        assert bool((whole_B[:offset] == 0xA5).all() and (whole_B[-48:] == 0xA5).all())
        assert same_bytes(got, reference(item))


def test_pieces_by_the_torch_path() -> None:
    check_pieces(by_kernel=False)


def check_cut_adapters(*, by_kernel: bool) -> None:
    """A box of an adapted tensor has the bytes of the whole one, wherever it is cut: rows, columns,
    both; of a matrix, an expert, a transposed expert.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16
    whole = weights(3 * 24, 40, dtype=dtype)
    for box in (Box(8, 16, 0, 40), Box(0, 24, 8, 16), Box(3, 7, 11, 13), Box(30, 40, 1, 39)):
        for expert, is_turned in ((None, False), (1, False), (1, True)):
            rows, columns = whole.shape
            a, b = matrix(3, 5, columns), matrix(3, rows, 5)
            if is_turned:
                a, b = matrix(3, 5, rows), matrix(3, columns, 5)
            stacks = (a, b) if expert is not None else (a[0], b[0])
            place = (
                slice(box.first_row, box.first_row + box.rows),
                slice(box.first_column, box.first_column + box.columns),
            )
            common: dict[str, Any] = {"lora_A": stacks[0], "lora_B": stacks[1], "expert": expert}
            delta = Delta(**common, box=box, transposed=is_turned)
            uncut = Delta(**common, transposed=is_turned).matrices()
            want = merge_tensor(whole, uncut, scale=SCALE, rounding=STOCHASTIC, name="w")[place]
            source = Source.whole(whole[place].contiguous())
            corner = Corner("w", box.first_row, box.first_column)
            member = Member(
                source=source, delta=delta, offset=0, row_stride=box.columns, corner=corner
            )
            merger = Merger(
                [(source.numel * dtype.itemsize, [member])],
                scale=SCALE,
                rounding=lambda: STOCHASTIC,
                device="cpu",
            )
            merger._kernels = merge_kernels() if by_kernel else None
            got = filled(merger, 0).clone().view(dtype).view(box.rows, box.columns)
            assert same_bytes(got, want), (box, expert, is_turned)


def test_cut_adapters_by_the_torch_path() -> None:
    check_cut_adapters(by_kernel=False)


def test_the_equality_sees_a_wrong_scale() -> None:
    item = linear(64, 128, torch.float32, rank=16)[0]
    assert not same_bytes(reference(item), reference(item, scale=SCALE * (1 + 2.0**-12)))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([[0], [1, 0]], "a.0.*twice"),
        ([[1]], "lacks 1.*a.0"),
        ([[0, 1, 2]], "index 2"),
        ([[0, -1]], "index -1"),
    ],
)
def test_orders_that_are_not_whole(order: list[list[int]], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        wire_export._check_order(["a.0", "a.1"], order)


def test_buffers_that_do_not_fit() -> None:
    source = Source.whole(torch.zeros(2, 3))
    merger = merger_of([MergeItem(spec=spec_of("a", source), source=source)], [[0]])
    assert (merger.num_chunks, merger.chunk_nbytes(0)) == (1, 24)
    for buffer in (
        torch.empty(25, dtype=torch.uint8),
        torch.empty(24),
        torch.empty(48, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="chunk 0 wants"):
            merger.fill(0, buffer)


def test_experts_share_launches() -> None:
    """gate and up of all experts in one launch, whatever the order."""
    items = experts(8, 24, 16, torch.bfloat16, rank=4)
    merger = merger_of(items, shuffled_order(16, 1, seed=0))
    assert [len(launch.members) for launch in merger._chunks[0].launches] == [16]


def ptx_of(
    kernel: Any,
    numbers: Sequence[str],
    constants: dict[str, Any],
    *,
    ragged: Sequence[str] = (),
    ones: Mapping[str, int] = MappingProxyType({}),
    **options: Any,
) -> str:
    """What Triton's compiler by itself makes for an H200 of a kernel with these i32 arguments. All
    but the `ragged` ones are multiples of 16.
    """
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"table_ptr": "*i64", "out_ptr": "*u8", **dict.fromkeys(numbers, "i32")}
    if "scale" in kernel.arg_names:
        signature["scale"] = "fp32"
    signature |= dict.fromkeys([*constants, *ones], "constexpr")
    place = {name: (n,) for n, name in enumerate(signature)}
    divisible = [name for name in ("table_ptr", "out_ptr", *numbers) if name not in ragged]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={place[name]: value for name, value in {**constants, **ones}.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible if name not in ones},
    )
    target = GPUTarget("cuda", 90, 32)
    return str(triton_compile(source, target=target, options=options).asm["ptx"])


def streamed(ptx: str) -> list[str]:
    """The loads and stores of weights."""
    return re.findall(r"\b(?:ld|st)\.global\.\S*evict_first\S*", ptx)


@pytest.mark.parametrize(
    ("dtype", "is_stochastic"), [("bf16", False), ("bf16", True), ("fp32", False)]
)
def test_the_kernel_compiles_for_an_h200(dtype: str, is_stochastic: bool) -> None:
    """16-byte loads and stores of W, and each product of the sum over r is one fused multiply-add
    in registers. Stochastic rounding multiplies once for each element, and twice for each row and
    column of a thread.
    """
    from triton import language as tl

    from trainer_node.adapters import merge_kernels

    tile = merge_kernels.MERGE_TILE
    numbers = (
        "num_rows", "num_columns", "rows_per_group", "group_stride", "row_stride",
        "columns_per_group", "column_group_stride", "column_stride", "a_row", "a_column", "b_row",
        "b_column", "out_stride", "tiles_across", "tiles",
    )  # fmt: skip # a list of names
    ones = {"column_stride": 1, "a_column": 1, "b_column": 1}  # as Triton specialises them
    constants = {
        "DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
        "RANK": 16,
        "GROUPED": False,
        "TURNED": False,
        "COLUMNS_GROUPED": False,
        "EVEN": True,
        "VECTOR": {"bf16": 8, "fp32": 4}[dtype],
        "STOCHASTIC": is_stochastic,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    ragged = ("rows_per_group", "tiles_across", "tiles")
    ptx = ptx_of(
        merge_kernels._merge_kernel,
        numbers,
        constants,
        ones=ones,
        ragged=ragged,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    assert {access[:2] for access in streamed(ptx)} == {"ld", "st"}
    assert all(access.endswith(".v4.b32") for access in streamed(ptx)), streamed(ptx)
    assert "mma" not in ptx
    a_program = tile.rows * tile.columns * constants["RANK"]
    assert ptx.count("fma.rn.f32") == a_program // (32 * tile.num_warps)
    assert ("cvt.rn.bf16" in ptx) == (dtype == "bf16" and not is_stochastic)
    each = tile.rows * tile.columns // (32 * tile.num_warps)
    hashes = len(re.findall(r"mul\.lo\.s32", ptx))
    assert not is_stochastic or each < hashes < 2 * each + 32, hashes
    assert ptx.count("mul.rn.f32") == ptx.count("add.rn.f32") > 0  # scale, W: roundings apart


@pytest.mark.parametrize("fused", [False, True])
def test_the_kernel_of_transposed_tensors_reads_and_writes_runs(fused: bool) -> None:
    from triton import language as tl

    from trainer_node.adapters import merge_kernels

    tile = merge_kernels.TURN_TILE
    numbers = ("num_rows", "num_columns", "columns_per_group", "column_group_stride")
    constants = {
        "DTYPE": tl.uint16,
        "GROUPED": fused,
        "VECTOR": 8,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    ragged = ("columns_per_group", "tiles_across", "tiles")
    ptx = ptx_of(
        merge_kernels._turn_kernel,
        (*numbers, "column_stride", "out_stride", "tiles_across", "tiles"),
        constants,
        ragged=ragged,
        num_warps=tile.num_warps,
    )
    assert {access[:2] for access in streamed(ptx)} == {"ld", "st"}
    assert all(access.endswith(".v4.b32") for access in streamed(ptx)), streamed(ptx)


# ------------------------------------------------------------ real Megatron


def check_model(
    model: Path, dtype: str, targets: Sequence[str] | None, *, by_kernel: bool = False
) -> None:
    from orchestrator.protocol.config import LORA_TARGETS, LoraConfig
    from tests.trainer_node.worker import make_trainer, random_adapters
    from trainer_node.export.merged import Exporter
    from trainer_node.export.wire_export import supports

    lora = LoraConfig(rank=4, alpha=6, **({"targets": tuple(targets)} if targets else {}))
    trainer = make_trainer(model, 1, 1, 1, dtype=dtype, lora=lora)
    assert supports(trainer.model) is None
    exporter = Exporter(trainer.model)
    manifest = exporter.manifest()
    names = [s.name for s in manifest.tensors]
    assert {names[i] for i in manifest.changed or ()} == {
        n for n in names if n.split(".")[-2] in (targets or LORA_TARGETS)
    }
    orders = [[list(range(len(names)))], vllm_order(names), shuffled_order(len(names), 5, seed=2)]
    exports = [WireExport(trainer.model, manifest, order) for order in orders]
    random_adapters(trainer)  # after the plan: adapters are read where they are
    for _ in range(2):
        expected = {n: t.clone().contiguous() for n, t in exporter.merged_tensors()}
        changed = sum(not torch.equal(expected[n], t) for n, t in exporter.base_tensors())
        assert changed >= 4
        for order, export in zip(orders, exports, strict=True):
            export._own._kernels = merge_kernels() if by_kernel else None
            for chunk, indices in enumerate(order):
                wanted_B = torch.cat(
                    [expected[names[i]].reshape(-1).view(torch.uint8) for i in indices]
                )
                got_B = filled(export, chunk)
                if by_kernel:  # fp32: only the sum order could differ
                    torch.testing.assert_close(
                        got_B.clone().view(torch.float32),
                        wanted_B.view(torch.float32),
                        rtol=1e-5,
                        atol=1e-6,
                    )
                else:
                    assert torch.equal(got_B, wanted_B), (model.name, dtype, chunk)
        # Other storage, other values: the plan must not hold on to the old.
        for p in trainer.model.modules[0].parameters():
            p.data = p.data.clone() + 0.25
    check_sources(trainer)
    check_changed_part(trainer, exporter)
    check_refusals(trainer, manifest, names)
    trainer.model.close()


def check_sources(trainer) -> None:
    """The views of a Qwen3 model, by hand: one for each HF tensor, so equal ones share launches."""
    config, held = trainer.model.hf_config, probe(trainer.model).held
    layer, hidden, size = "model.layers.1.", config.hidden_size, config.head_dim
    groups = config.num_key_value_heads
    heads = config.num_attention_heads // groups
    fused = (heads + 2) * size * hidden

    def source(name: str) -> Source:
        ((param, piece),) = held[layer + name].pieces
        return Source.of(param, piece, is_vector=len(held[layer + name].shape) == 1)

    for name, first, width in (("q", 0, heads), ("k", heads, 1), ("v", heads + 1, 1)):
        found = source(f"self_attn.{name}_proj.weight")
        rows = width * size
        assert found == Source(
            param=found.param,
            offset=first * size * hidden,
            groups=groups,
            rows=rows,
            columns=hidden,
            group_stride=fused,
            row_stride=hidden,
            shape=(groups * rows, hidden),
        )
    mlp = "mlp.experts.1." if hasattr(config, "num_experts") else "mlp."
    gate, up = source(f"{mlp}gate_proj.weight"), source(f"{mlp}up_proj.weight")
    half = gate.param.shape[0] // 2
    assert gate == Source.whole(gate.param, rows=half)
    assert up == Source.whole(gate.param, first=half, rows=half)
    for name in ("self_attn.o_proj.weight", "self_attn.q_norm.weight", f"{mlp}down_proj.weight"):
        found = source(name)
        assert found == Source.whole(found.param), name


def check_changed_part(trainer, exporter) -> None:
    """Only the tensors with an adapter, in an order of the receiver's: the same bytes as out of
    the whole.
    """
    part = exporter.manifest().part(exporter.manifest().changed)
    order = shuffled_order(len(part.tensors), 3, seed=4)
    export = WireExport(trainer.model, part, order)
    assert (
        sum(export.chunk_nbytes(k) for k in range(export.num_chunks))
        == part.nbytes
        < exporter.manifest().nbytes
    )
    merged = dict(exporter.merged_tensors(exporter.manifest().changed))
    for chunk, indices in enumerate(order):
        wanted_B = torch.cat(
            [
                merged[part.tensors[i].name].reshape(-1).contiguous().view(torch.uint8)
                for i in indices
            ]
        )
        assert torch.equal(filled(export, chunk), wanted_B)


def check_refusals(trainer, manifest, names: Sequence[str]) -> None:
    from megatron.bridge.models.conversion.param_mapping import RMSNorm2ZeroCenteredRMSNormMapping

    from orchestrator.protocol.config import ALL_LINEAR
    from trainer_node.export.wire_export import supports

    everything = [list(range(len(names)))]
    with pytest.raises(ManifestError, match=re.escape(names[3])):
        WireExport(trainer.model, manifest, [[i for i in everything[0] if i != 3]])
    with pytest.raises(ManifestError, match=re.escape(names[2])):
        WireExport(trainer.model, manifest, [[*everything[0], 2]])
    tensors = list(manifest.tensors)
    for change in ({"name": "model.nowhere"}, {"shape": (1, 2, 3)}, {"dtype": "float16"}):
        wrong = manifest.model_copy(
            update={"tensors": (tensors[0].model_copy(update=change), *tensors[1:])}
        )
        with pytest.raises(ManifestError, match=str(change.get("name", names[0]))):
            WireExport(trainer.model, wrong, everything)
    task = next(t for t in trainer.model.conversion_tasks if "linear_proj" in t.global_param_name)
    kept = task.mapping.__class__
    task.mapping.__class__ = RMSNorm2ZeroCenteredRMSNormMapping
    reason = supports(trainer.model)
    is_target = {"o_proj", ALL_LINEAR} & set(trainer.model.config.lora.targets)
    assert (reason is not None) == bool(is_target), "Bridge alone converts it: not with an adapter"
    assert reason is None or "o_proj.weight" in reason
    task.mapping.__class__ = kept
    assert supports(trainer.model) is None


def main() -> None:
    if sys.argv[1] == "models":
        for model in map(Path, sys.argv[2:]):
            for dtype in ("float32", "bfloat16"):
                check_model(model, dtype, None)
        check_model(Path(sys.argv[4]), "bfloat16", ("k_proj", "up_proj"))
        check_model(Path(sys.argv[4]), "float32", ("q_proj", "k_proj", "v_proj", "o_proj"))
    elif sys.argv[1] == "kernel-model":
        check_model(Path(sys.argv[2]), "float32", None, by_kernel=True)
    else:
        round_to_nearest()
        check_synthetic(by_kernel=True)
        check_another_rounding(by_kernel=True)
        check_pieces(by_kernel=True)
        check_cut_adapters(by_kernel=True)


if __name__ == "__main__":
    main()
