"""Chunks of e4m3 weights and scales, made of bf16 that another export fills. Without Megatron."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    Manifest,
    OptimStep,
    SendWeights,
    TensorSpec,
    fp8_manifest,
)
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.export import fused
from trainer_node.export import fp8_export
from trainer_node.node import Node
from trainer_node.request import Outcome
from trainer_node.transfer import Chunks, Transfer
from weight_transfer import fp8
from weight_transfer.layout import as_bytes, chunk_offsets, view_of

SHAPES: dict[str, tuple[int, ...]] = {
    "norm": (7,),
    **{f"{e}.{n}.weight": (128, 256) for e in range(3) for n in ("gate", "up")},
    "q.weight": (256, 256),
    "k.weight": (128, 256),
    "head.weight": (10, 256),
}
NAMES = list(SHAPES)
EXPERTS = ((1, 2), (3, 4), (5, 6))
ATTENTION = (7, 8)


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def manifest(dtype: Any = "bfloat16") -> Manifest:
    return Manifest(
        tensors=tuple(TensorSpec(name=n, dtype=dtype, shape=s) for n, s in SHAPES.items())
    )


def weights(kind: Any) -> Fp8Weights:
    groups = tuple(Fp8Group(kind=kind, tensors=t) for t in (*EXPERTS, ATTENTION))
    return Fp8Weights(groups=groups)


class Filled:
    """The other export: what it filled counts in `order`."""

    longest_s = 1.0

    def __init__(self, values: dict[str, torch.Tensor], order: Sequence[Sequence[int]]) -> None:
        self._values, self._order, self.released = list(values.values()), order, False

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        out_B.copy_(torch.cat([as_bytes(self._values[i]) for i in self._order[chunk]]))

    def release(self) -> None:
        self.released = True


def sent_of(
    kind: str, order: Sequence[Sequence[str]], part: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """What the chunks of these names hold."""
    base, fp8_weights, values = manifest(), weights(kind), tensors()
    sent = fp8_manifest(base, fp8_weights)
    here = sent if part is None else sent.part(part)
    index = {spec.name: i for i, spec in enumerate(here.tensors)}
    chunks = [[index[n] for n in names] for names in order]
    planned = fp8_export.plan(base, sent, fp8_weights, chunks, part)
    specs = [base.tensors[i] for i in planned.part]
    filled: Any = Filled({s.name: values[s.name] for s in specs}, planned.order)
    export = fp8_export.Fp8Export(
        filled, planned, specs=specs, sent=here, order=chunks, device=torch.device("cpu")
    )
    found = {}
    for k, names in enumerate(order):
        out_B = torch.empty(export.chunk_nbytes(k) + 3, dtype=torch.uint8)[3:]  # misaligned
        export.fill(k, out_B)
        some = [here.tensors[index[n]] for n in names]
        found |= {
            s.name: view_of(out_B, s, at) for s, at in zip(some, chunk_offsets(some), strict=True)
        }
    export.release()
    assert filled.released
    return found


def scales(kind: str, names: Sequence[str]) -> list[str]:
    return [n + ("_scale_inv" if kind == "per_block" else "_scale") for n in names]


def expected(kind: str) -> dict[str, torch.Tensor]:
    """By the definition, tensor by tensor."""
    found = tensors()
    for group in (*EXPERTS, ATTENTION):
        names = [NAMES[i] for i in group]
        largest = max(found[n].float().abs().max() for n in names)
        for name, scale in zip(names, scales(kind, names), strict=True):
            weight = found[name]
            if kind == "per_tensor":
                found[scale] = (largest / torch.tensor(448.0)).reshape(1)
                values = weight.float() * (1.0 / found[scale])
                found[name] = values.to(torch.float8_e4m3fn)
            elif kind == "per_channel":
                found[name], found[scale] = fp8.per_channel(weight)
            else:
                found[name], blocks = fp8.per_block(weight[None])
                found[name], found[scale] = found[name][0], blocks[0]
    return found


@pytest.mark.parametrize("kind", ["per_tensor", "per_channel", "per_block"])
def test_chunks_hold_what_each_tensor_quantises_to(kind: str) -> None:
    experts, attention = ([NAMES[i] for g in gs for i in g] for gs in (EXPERTS, (ATTENTION,)))
    order = [
        [*scales(kind, experts), "norm", *experts],
        [*scales(kind, attention), "head.weight", *attention],
    ]
    want, found = expected(kind), sent_of(kind, order)
    assert found.keys() == want.keys()
    wrong = [n for n in want if not torch.equal(as_bytes(found[n]), as_bytes(want[n]))]
    assert wrong == []


def test_a_part_has_its_own_indices() -> None:
    kind = "per_tensor"
    sent = fp8_manifest(manifest(), weights(kind))
    names = [NAMES[i] for i in ATTENTION]
    part = [i for i, s in enumerate(sent.tensors) if s.name in {*names, *scales(kind, names)}]
    want, found = expected(kind), sent_of(kind, [[*scales(kind, names), *names]], part)
    assert found.keys() == {*names, *scales(kind, names)}
    assert all(torch.equal(as_bytes(t), as_bytes(want[n])) for n, t in found.items())


def test_groups_that_are_split_are_refused() -> None:
    kind, (one, two) = "per_tensor", [NAMES[i] for i in ATTENTION]
    scale_one, scale_two = scales(kind, (one, two))
    rest = [
        n for g in EXPERTS for n in (*scales(kind, [NAMES[i] for i in g]), *(NAMES[i] for i in g))
    ]
    others = [[n] for n in ("norm", "head.weight")]
    ordered = [n for n in rest if "scale" in n] + [n for n in rest if "scale" not in n]
    with pytest.raises(ManifestError, match="share a chunk"):
        sent_of(kind, [[scale_one, one], [scale_two, two], ordered, *others])
    with pytest.raises(ManifestError, match="follow each other"):
        sent_of(kind, [[scale_one, scale_two, one, "head.weight", two], ordered, others[0]])


def test_other_dtypes_are_refused() -> None:
    base = manifest("float32")
    sent = fp8_manifest(base, weights("per_tensor"))
    order = [list(range(len(sent.tensors)))]
    with pytest.raises(ManifestError, match="only bf16"):
        fp8_export.plan(base, sent, weights("per_tensor"), order, None)


# ---------------------------------------------------------------- merged and quantised in one go


def test_the_fused_kernels_interpreted() -> None:
    """Triton's interpreter must be chosen before Triton is imported."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.trainer_node.export.fused"],
        cwd=REPO,
        env={**child_env(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200.0,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


@pytest.mark.gpu1
def test_the_fused_kernels_on_a_gpu() -> None:
    fused.main("cuda")


@pytest.mark.parametrize("step", ["block", "largest", "round-rows", "round-group"])
def test_the_fused_kernels_compile_for_an_h200(step: str) -> None:
    """Only by Triton's compiler: 16-byte loads of W, e4m3 by the hardware, divisions as meant."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer_node.export import fp8_fused_kernels as kernels

    name, _, scales = step.partition("-")
    tile = kernels.BLOCK_TILE if name == "block" else kernels.MERGE_TILE
    signature = {"table_ptr": "*i64", "out_ptr": "*u8", "largest_ptr": "*i32"}
    numbers = ("num_rows", "num_columns", "rows_per_group", "group_stride", "row_stride")
    signature |= dict.fromkeys((*numbers, "tiles_across", "tiles"), "i32") | {"scale": "fp32"}
    constants = {
        "RANK": 16,
        "GROUPED": False,
        "EVEN": True,
        "VECTOR": 8,
        "STOCHASTIC": True,
        "ALIGN": 16,
        "ROWS": scales == "rows",
        "RECIPROCAL": True,
        "FAST": True,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    signature |= dict.fromkeys(constants, "constexpr")
    place = {n: (i,) for i, n in enumerate(signature)}
    divisible = ("table_ptr", "out_ptr", "num_columns", "row_stride")
    source = ASTSource(
        fn=getattr(kernels, f"_{name}_kernel"),
        signature=signature,
        constexprs={place[n]: value for n, value in constants.items()},
        attrs={place[n]: [["tt.divisibility", 16]] for n in divisible},
    )
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    loads = re.findall(r"\bld\.global\.\S*evict_first\S*", ptx)
    assert loads and all(access.endswith(".v4.b32") for access in loads), loads
    assert ("e4m3x2" in ptx) == (name != "largest")
    assert ("div.full.f32" in ptx) == (name == "block")
    assert ("div.rn.f32" in ptx) == (name == "round")
    assert bool(re.search(r"\b(?:atom|red)\.\S*global", ptx)) == (name == "largest")
    assert ptx.count("mul.rn.f32") >= ptx.count("add.rn.f32") > 0  # W and the delta: no fusion


# ---------------------------------------------------------------- prepared before the pause


class Recorded:
    """Stand-in for `FusedFp8`: what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def measure(self) -> None:
        self.told.append("measure")

    def forget(self) -> None:
        self.told.append("forget")

    def takes(self, chunk: int) -> bool:
        return True

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        self.told.append("fill")


def planned(kind: str) -> tuple[Chunks, Recorded]:
    base, recorded = manifest("bfloat16"), Recorded()
    sent = fp8_manifest(base, weights(kind))
    order = fused.chunk_order(base, weights(kind))
    export = fp8_export.Fp8Export(
        SimpleNamespace(longest_s=1.0, release=lambda: None),  # type: ignore[arg-type]
        fp8_export.plan(base, sent, weights(kind), order, None),
        specs=base.tensors,
        sent=sent,
        order=order,
        device=torch.device("cpu"),
        fused=recorded,
    )
    return Chunks(manifest=sent, order=order, export=export), recorded


def test_what_is_prepared_is_forgotten_by_whatever_may_change_weights() -> None:
    transfer = Transfer(host="127.0.0.1", device=torch.device("cpu"))
    (whole, of_whole), (part, of_part) = planned("per_tensor"), planned("per_tensor")
    transfer.use_chunks(whole, changed_only=False)
    transfer.use_chunks(part, changed_only=True)
    transfer.choose(changed_only=True)
    transfer.prepare()
    assert (of_whole.told, of_part.told) == ([], ["measure"])

    node = Node.__new__(Node)
    node.transfer, node.trainer = transfer, SimpleNamespace(is_offloaded=False)  # type: ignore[assignment]
    node._may_change_weights = frozenset([OptimStep])
    node._handlers = dict.fromkeys([OptimStep, SendWeights], lambda _: Outcome())
    node._dispatch(SimpleNamespace(message=SendWeights.model_construct()))  # type: ignore[arg-type]
    assert of_part.told == ["measure"], "sending changes no weights"
    node._dispatch(SimpleNamespace(message=OptimStep.model_construct()))  # type: ignore[arg-type]
    assert (of_whole.told, of_part.told) == (["forget"], ["measure", "forget"])
