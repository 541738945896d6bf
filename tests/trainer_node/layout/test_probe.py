"""Where HF tensors' elements are in Megatron's parameters: strides out of indices, by hand and at
random; Bridge's mappings on 1, 2 and 4 tensor-parallel ranks; adapters on a tensor of several
pieces.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.protocol.messages import TensorSpec
from trainer_node.adapters.merge import LoraDelta, merge_kernels, merge_tensor
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.gather_plan import assign, lay_out
from trainer_node.export.merger import Merger
from trainer_node.export.probe import HfTensor
from trainer_node.export.sources import Delta, Source
from trainer_node.export.wire_export import LocalTensor, _own_members
from trainer_node.layout import strides
from trainer_node.layout.strides import Axis, Layout, NotStridedError, Piece, check, derive, widened
from weight_transfer.boxes import Box, matrix


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bridges_mappings(ranks: int, torchrun) -> None:
    torchrun(ranks, "layout.mappings", 10 * ranks)


# ------------------------------------------------------------ indices to strides


def rebuilt(layout: Layout, params: list[torch.Tensor]) -> torch.Tensor:
    """The HF tensor out of the ranks' parameters; -1 where no piece is."""
    height, width = matrix(layout.shape)
    out = torch.full((height, width), -1)
    for piece in layout.pieces:
        box = piece.box
        rows = out[box.first_row : box.first_row + box.rows]
        place = rows[:, box.first_column : box.first_column + box.columns]
        assert bool((place == -1).all()), "two pieces have an element"
        source = Source.of(params[piece.part], piece, is_vector=width == 1)
        place.copy_(source.view().reshape(place.shape))
    return out.view(layout.shape)


def rearranged(r: random.Random, index: torch.Tensor) -> torch.Tensor:
    """A view of indices as mappings make it: cut, permuted, concatenated, chosen."""
    for _ in range(r.randint(1, 4)):
        kind = r.choice(["permute", "reshape", "choose", "swap", "flip"])
        if kind == "permute":
            index = index.permute(r.sample(range(index.dim()), index.dim()))
        elif kind == "reshape":
            index = index.reshape(r.choice([(-1,), (index.shape[0], -1), (-1, index.shape[-1])]))
        elif kind == "choose":
            index = index[:: r.choice([1, 2])]
        elif kind == "swap":
            index = torch.cat(list(reversed(index.chunk(r.choice([2, 3])))))
        else:
            index = index.flip(0) if index.shape[0] < 5 else index
    return index


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_any_arrangement_is_found_again(seed: int) -> None:
    """The pieces give back what they were derived from, and each element is in one of them."""
    r = random.Random(seed)
    shape, parts = [r.randint(1, 6) for _ in range(r.randint(1, 4))], r.choice([1, 2, 4])
    numel = math.prod(shape)
    shards = [torch.arange(numel).view(shape) + part * numel for part in range(parts)]
    index = rearranged(r, torch.cat(shards, dim=r.randrange(len(shape))))
    layout = derive(index, numel)
    check(layout, index, numel)
    assert torch.equal(rebuilt(layout, shards), index)
    height = r.randint(0, matrix(index.shape)[0])
    kept = [cut for piece in layout.pieces for cut in piece.clipped(height)]
    clipped = rebuilt(replace(layout, pieces=tuple(kept)), shards).view(matrix(index.shape))
    whole = index.reshape(matrix(index.shape))
    assert torch.equal(clipped[:height], whole[:height]) and bool((clipped[height:] == -1).all())


def test_pieces_by_hand() -> None:
    """q of two groups of [q, q, k, v], heads of 3 rows of 5 columns, is one piece; its halves on
    two ranks are two.
    """
    fused = torch.arange(2 * 4 * 3 * 5).view(2, 4, 3, 5)
    q = fused[:, :2].reshape(12, 5)
    assert derive(q, 120).pieces == (
        Piece(0, Box(0, 12, 0, 5), 0, Axis(2, 6, 60, 5), Axis(1, 5, 0, 1)),
    )
    assert derive(q, 60).pieces == (
        Piece(0, Box(0, 6, 0, 5), 0, Axis(1, 6, 0, 5), Axis(1, 5, 0, 1)),
        Piece(1, Box(6, 6, 0, 5), 0, Axis(1, 6, 0, 5), Axis(1, 5, 0, 1)),
    )
    turned = torch.arange(12).view(3, 4).t()
    assert derive(turned, 12).pieces == (
        Piece(0, Box(0, 4, 0, 3), 0, Axis(1, 4, 0, 1), Axis(1, 3, 0, 4)),
    )


def test_what_the_pieces_are_not() -> None:
    index = torch.arange(24).view(4, 6)
    layout = derive(index, 24)
    swapped = index.clone()
    swapped[3, 4], swapped[3, 5] = 23, 22
    for other, why in (
        (swapped, "values"),
        (index + 1, "values"),
        (index.view(6, 4), "shape"),
        (index[:3], "shape"),
    ):
        with pytest.raises(NotStridedError, match=why):
            check(layout, other, 24)
    with pytest.raises(NotStridedError, match="whole"):
        check(replace(layout, pieces=()), index, 24)
    order = torch.randperm(1 << 14, generator=torch.Generator().manual_seed(0))
    for shape in ((1 << 14,), (128, 128), (1 << 13, 2)):
        with pytest.raises(NotStridedError, match="order"):
            derive(order.view(shape), 1 << 14)


def test_blocks_do_not_matter(monkeypatch) -> None:
    """The comparison runs block by block."""
    index = torch.arange(40 * 6).view(40, 6)[torch.arange(40).view(8, 5).t().reshape(-1)]
    whole = derive(index, 240)
    monkeypatch.setattr(strides, "BLOCK_ELEMENTS", 7)
    assert derive(index, 240) == whole
    check(whole, index, 240)
    index[39, 5] = 0
    with pytest.raises(NotStridedError):
        check(whole, index, 240)


def test_an_experts_tensor_among_all() -> None:
    param = torch.arange(24).view(4, 6)
    stacked = derive(param.t(), 24).stacked(2, 3)
    got = rebuilt(stacked, [param])
    assert got.shape == (3, 6, 4)
    assert torch.equal(got[2], param.t()) and bool((got[:2] == -1).all())
    bias = rebuilt(derive(torch.arange(4), 4).stacked(1, 3), [torch.arange(4)])
    assert bias.tolist() == [[-1] * 4, [0, 1, 2, 3], [-1] * 4]


def test_few_columns_tell_the_rest() -> None:
    """Rows chosen, columns passed on: the same layout as with all columns. A transposed parameter
    tells nothing.
    """

    def parted(columns: int) -> torch.Tensor:
        shards = [torch.arange(4 * columns).view(4, columns) + n * 4 * columns for n in range(2)]
        return torch.cat([shard[[2, 3, 0]] for shard in shards], dim=1)

    assert widened(derive(parted(3), 12), 3, 10) == derive(parted(10), 40)
    assert widened(derive(torch.arange(12).view(4, 3).t(), 12), 3, 10) is None
    assert widened(derive(torch.arange(12).view(4, 3)[:, :2], 12), 3, 10) is None
    assert widened(derive(torch.arange(12), 12), 3, 10) is None


def test_rows_of_a_fused_output() -> None:
    """Two groups of [q, q, k, v]: the adapter of q adds to rows 0, 1, 4 and 5."""
    fused = torch.arange(2 * 4 * 3).view(2, 4, 3)
    q = derive(fused[:, :2].reshape(4, 3), 24)
    assert q.fused_rows(0, 3).tolist() == [0, 1, 4, 5]
    assert q.fused_rows(1, 3).tolist() == []
    with pytest.raises(NotStridedError):
        derive(fused.view(8, 3).t(), 24).fused_rows(0, 3)


# ------------------------------------------------------------ adapters


def merged(hf_of, shape: tuple[int, int], *, by_kernel: bool = False) -> None:
    """`hf_of` arranges a parameter as an HF tensor; its adapter is merged piece by piece."""

    torch.manual_seed(0)
    param = torch.randn(shape).bfloat16()
    layout = derive(hf_of(torch.arange(param.numel()).view(shape)), param.numel())
    hf = hf_of(param)
    # Multiples of 1 / 16: the products are exact in any order, which the interpreter does not keep.
    delta = LoraDelta(
        lora_A_RI=torch.randint(-16, 17, (4, hf.shape[1])) / 16,
        lora_B_OR=torch.randint(-16, 17, (hf.shape[0], 4)) / 16,
    )
    spec = TensorSpec(name="w", dtype="bfloat16", shape=tuple(hf.shape))
    local = LocalTensor.of(
        "w", HfTensor(layout.shape, [(param, p) for p in layout.pieces]), hf.shape
    )
    assert local.spec() == spec
    (plan,) = lay_out([spec], [[0]], assign([local.held()], [spec]), ranks=1)
    adapter = Delta(lora_A=delta.lora_A_RI, lora_B=delta.lora_B_OR, expert=None)
    merger = Merger(
        [_own_members(plan, 0, [spec], {"w": local}, {"w": adapter})],
        scale=1.7,
        rounding=Rounding,
        device="cpu",
    )
    merger._kernels = merge_kernels() if by_kernel else None
    out_B = torch.empty(spec.nbytes, dtype=torch.uint8)
    merger.fill(0, out_B)
    got = out_B.view(hf.dtype).view(hf.shape)
    assert torch.equal(got, merge_tensor(hf, delta, scale=1.7, rounding=Rounding(), name="w"))


ARRANGEMENTS = {
    "whole": lambda w: w,
    "halves swapped": lambda w: torch.cat([w[8:], w[:8]]),
    "transposed": lambda w: w.t(),
    "columns swapped": lambda w: torch.cat([w[:, 8:], w[:, :8]], dim=1),
    "rows and columns": lambda w: torch.cat([w[5:, 8:], w[5:, :8]], dim=1),
    "alternating": lambda w: w.view(2, 8, -1).transpose(0, 1).reshape(16, -1).t(),
}


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_an_adapter_is_cut_to_the_pieces(how: str) -> None:
    merged(ARRANGEMENTS[how], (16, 24))
