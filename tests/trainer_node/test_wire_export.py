"""Bytes of `WireExport` against `Exporter` on real Megatron, and the kernel (interpreted, on the
CPU) against fp64.

Run as a script it is the process that imports Megatron: python -m
tests.trainer_node.test_wire_export models DENSE_TIED DENSE_UNTIED MOE
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import TensorSpec
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.wire_orders import shuffled_order, vllm_order
from trainer_node.adapters.merge import merge_tensor
from trainer_node.export import wire_export
from trainer_node.export.gather_plan import Box
from trainer_node.export.probe import probe
from trainer_node.export.wire_export import Delta, Member, Merger, Source, WireExport

SCALE = 1.7  # no power of two: the multiplication rounds


def run_self(*args: object, timeout_s: float = 150.0, **env: str) -> None:
    command = [sys.executable, "-m", "tests.trainer_node.test_wire_export", *map(str, args)]
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
        1, "test_wire_export", "models", models["dense_tied"], models["dense_untied"], models["moe"]
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
    items: Sequence[MergeItem], order: Sequence[Sequence[int]], *, scale: float = SCALE
) -> Merger:
    """Merges chunks of whole tensors, laid end to end."""
    return Merger(
        [end_to_end([items[n] for n in indices]) for indices in order], scale=scale, device="cpu"
    )


def end_to_end(items: Sequence[MergeItem]) -> tuple[int, list[Member]]:
    """A chunk's size in bytes and its tensors."""
    ends = list(itertools.accumulate((item.spec.nbytes for item in items), initial=0))
    return ends[-1], [
        Member(source=item.source, delta=item.delta, offset=offset, row_stride=item.source.columns)
        for item, offset in zip(items, ends, strict=False)
    ]


def reference(item: MergeItem, scale: float) -> torch.Tensor:
    """The tensor as `merge_tensor` makes it."""
    weight = item.source.view().reshape(item.source.shape)
    return weight if item.delta is None else merge_tensor(weight, item.delta.matrices(), scale)


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
    weight = torch.randn(out, columns).to(dtype)

    def delta(rows: int) -> Delta | None:
        return (
            Delta(lora_A=torch.randn(rank, columns), lora_B=torch.randn(rows, rank), expert=None)
            if rank
            else None
        )

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
    """gate and up of each expert out of a fused weight of its own; adapters stacked."""
    stacks = [(torch.randn(count, rank, columns), torch.randn(count, half, rank)) for _ in range(2)]
    items = []
    for e in range(count):
        weight = torch.randn(2 * half, columns).to(dtype)
        for part, (lora_A, lora_B) in enumerate(stacks):
            source = Source.whole(weight, first=part * half, rows=half)
            spec = spec_of(f"{dtype}.{half}x{columns}.{rank}.expert{e}.{part}", source)
            items.append(
                MergeItem(
                    spec=spec, source=source, delta=Delta(lora_A=lora_A, lora_B=lora_B, expert=e)
                )
            )
    return items


def transposed(out: int, columns: int, dtype: torch.dtype, *, fused: bool) -> MergeItem:
    """[in, out] of a weight [out, in]; fused: gate and up take turns in HF's columns."""
    weight = torch.randn(columns, out).to(dtype)
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
    return MergeItem(spec=spec_of(f"{dtype}.{out}x{columns}.turned.{fused}", source), source=source)


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
            items += [transposed(*size, dtype, fused=fused) for fused in (False, True)]
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


def rounded(exact: torch.Tensor, dtype: torch.dtype, *, interpreted: bool) -> torch.Tensor:
    """As the hardware rounds; Triton's interpreter (3.9) cuts bf16 off instead. Both are monotone.
    The PTX is checked below.
    """
    if interpreted and dtype is torch.bfloat16:
        return (exact.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return exact.to(dtype)


def check_near(item: MergeItem, got: torch.Tensor, *, interpreted: bool = False) -> None:
    """The fp32 value before the rounding is within the bound of a sum of R + 2 terms in any order,
    whatever rounding made of it.
    """
    weight = item.source.view().reshape(item.source.shape)
    if item.delta is None:
        assert torch.equal(got.view(torch.uint8), weight.contiguous().view(torch.uint8)), (
            item.spec.name
        )
        return
    a, b = item.delta.matrices().lora_A_RI.double(), item.delta.matrices().lora_B_OR.double()
    exact = weight.double() + SCALE * (b @ a)
    bound = (item.delta.rank + 2) * 2.0**-23 * (weight.double().abs() + SCALE * (b.abs() @ a.abs()))
    low, middle, high = (
        rounded(x, weight.dtype, interpreted=interpreted)
        for x in (exact - bound, exact, exact + bound)
    )
    assert bool(((low <= got) & (got <= high)).all()), item.spec.name
    off = float((got != middle).double().mean())
    assert weight.dtype is torch.float32 or off < 0.01, (item.spec.name, off)


def check_synthetic(*, by_kernel: bool) -> None:
    torch.manual_seed(0)
    items = many_items()
    for order in ([list(range(len(items)))], shuffled_order(len(items), 3, seed=1)):
        merger = merger_of(items, order)
        if by_kernel:
            merger._kernels = wire_export._kernels()
            assert merger._kernels is not None
        for chunk, indices in enumerate(order):
            chosen = [items[n] for n in indices]
            cut = zip(
                chosen, pieces(chosen, filled(merger, chunk)), by_kernel_here(chosen), strict=True
            )
            for item, got, aligned in cut:
                check_near(item, got, interpreted=by_kernel and aligned)
                if not by_kernel:
                    assert torch.equal(got, reference(item, SCALE)), item.spec.name
    moved = items[0].source.param
    moved.data = moved.data * 2  # another storage, found at the next fill
    where = next(c for c, indices in enumerate(order) if 0 in indices)
    chosen = [items[n] for n in order[where]]
    for item, got, aligned in zip(
        chosen, pieces(chosen, filled(merger, where)), by_kernel_here(chosen), strict=True
    ):
        check_near(item, got, interpreted=by_kernel and aligned)


def test_the_torch_path_equals_merge_tensor() -> None:
    check_synthetic(by_kernel=False)


def check_pieces(*, by_kernel: bool) -> None:
    """A weight of which the left columns are merged in place and the right ones copied from
    elsewhere: each writes its own alone.
    """
    torch.manual_seed(0)
    for dtype, (out, columns, left), offset in (
        (torch.float32, (70, 136, 40), 64),
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
        copied = Source.whole(reference(item, SCALE)[:, left:].contiguous())
        members = [
            Member(source=own, delta=own_delta, offset=offset, row_stride=columns),
            Member(source=copied, delta=None, offset=offset + left * size, row_stride=columns),
        ]
        mergers = [
            Merger([(offset + item.spec.nbytes + 48, [m])], scale=SCALE, device="cpu")
            for m in members
        ]
        whole_B = torch.full((offset + item.spec.nbytes + 48,), 0xA5, dtype=torch.uint8)
        for merger in mergers:
            merger._kernels = wire_export._kernels() if by_kernel else None
            merger.fill(0, whole_B)
        got = whole_B[offset:-48].clone().view(dtype).view(out, columns)
        assert bool((whole_B[:offset] == 0xA5).all() and (whole_B[-48:] == 0xA5).all())
        assert torch.equal(got[:, left:], copied.param)
        check_near(item, got, interpreted=by_kernel)


def test_pieces_by_the_torch_path() -> None:
    check_pieces(by_kernel=False)


def check_cut_adapters(*, by_kernel: bool) -> None:
    """Rows of one adapter, and columns, which the kernel leaves to torch; alone and of experts."""
    torch.manual_seed(0)
    lora_A, lora_B = torch.randn(3, 5, 40), torch.randn(3, 24, 5)
    for expert in (None, 1):
        stacks = (lora_A, lora_B) if expert is not None else (lora_A[0], lora_B[0])
        for box in (Box(8, 16, 0, 40), Box(0, 24, 8, 16), Box(3, 7, 11, 13)):
            weight = torch.randn(box.rows, box.columns)
            source = Source.whole(weight)
            delta = Delta(lora_A=stacks[0], lora_B=stacks[1], expert=expert, box=box)
            item = MergeItem(spec=spec_of(f"{expert} {box}", source), source=source, delta=delta)
            merger = merger_of([item], [[0]])
            merger._kernels = wire_export._kernels() if by_kernel else None
            (got,) = pieces([item], filled(merger, 0))
            check_near(item, got)
            whole = lora_B[expert or 0] @ lora_A[expert or 0]
            part = whole[box.first_row :, box.first_column :][: box.rows, : box.columns]
            torch.testing.assert_close(got, weight + SCALE * part, rtol=1e-5, atol=1e-5)


def test_cut_adapters_by_the_torch_path() -> None:
    check_cut_adapters(by_kernel=False)


def test_the_bound_sees_a_wrong_scale() -> None:
    item = linear(64, 128, torch.float32, rank=16)[0]
    check_near(item, reference(item, SCALE))
    with pytest.raises(AssertionError):
        check_near(item, reference(item, SCALE * (1 + 2.0**-12)))


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
    **options: Any,
) -> str:
    """What Triton's compiler alone makes for an H200 of a kernel with these i32 arguments. All but
    the `ragged` ones are multiples of 16.
    """
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"table_ptr": "*i64", "out_ptr": "*u8", **dict.fromkeys(numbers, "i32")}
    if "scale" in kernel.arg_names:
        signature["scale"] = "fp32"
    signature |= dict.fromkeys(constants, "constexpr")
    place = {name: (n,) for n, name in enumerate(signature)}
    divisible = [name for name in ("table_ptr", "out_ptr", *numbers) if name not in ragged]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    target = GPUTarget("cuda", 90, 32)
    return str(triton_compile(source, target=target, options=options).asm["ptx"])


def streamed(ptx: str) -> list[str]:
    """The loads and stores of weights."""
    return re.findall(r"\b(?:ld|st)\.global\.\S*evict_first\S*", ptx)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_for_an_h200(dtype: str) -> None:
    """16-byte loads and stores of W, and each product of the sum over r is one fused multiply-add
    in registers.
    """
    from triton import language as tl

    from trainer_node.export import merge_kernels

    tile = merge_kernels.MERGE_TILE
    numbers = ("num_rows", "num_columns", "rows_per_group", "group_stride", "row_stride")
    constants = {
        "DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
        "RANK": 16,
        "GROUPED": False,
        "EVEN": True,
        "VECTOR": {"bf16": 8, "fp32": 4}[dtype],
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    ragged = ("rows_per_group", "tiles_across", "tiles")
    ptx = ptx_of(
        merge_kernels._merge_kernel,
        (*numbers, "out_stride", "tiles_across", "tiles"),
        constants,
        ragged=ragged,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    assert {access[:2] for access in streamed(ptx)} == {"ld", "st"}
    assert all(access.endswith(".v4.b32") for access in streamed(ptx)), streamed(ptx)
    assert "mma" not in ptx
    a_program = tile.rows * tile.columns * constants["RANK"]
    assert ptx.count("fma.rn.f32") == a_program // (32 * tile.num_warps)
    assert ("cvt.rn.bf16x2.f32" in ptx) == (dtype == "bf16")
    assert ptx.count("mul.rn.f32") == ptx.count("add.rn.f32") > 0  # scale, W: roundings apart


@pytest.mark.parametrize("fused", [False, True])
def test_the_kernel_of_transposed_tensors_reads_and_writes_runs(fused: bool) -> None:
    from triton import language as tl

    from trainer_node.export import merge_kernels

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
            export._own._kernels = wire_export._kernels() if by_kernel else None
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
    """The tensors with an adapter alone, in an order of the receiver's: the same bytes as out of
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
        check_synthetic(by_kernel=True)
        check_pieces(by_kernel=True)
        check_cut_adapters(by_kernel=True)


if __name__ == "__main__":
    main()
