"""Strided parts of a buffer land where they belong and nowhere else; Triton's kernel does the same,
interpreted, and compiles.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.protocol.messages import Manifest, TensorSpec
from weight_transfer.copies import PreparedCopy
from weight_transfer.layout import VECTOR_BYTES, chunk_offsets, in_vectors
from weight_transfer.strides import Part, block_table, boxes_2d, tile_of


@given(
    dims=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([0, 1, 2, 5, 12, 60]),
            st.sampled_from([0, 1, 3, 6, 30]),
        ),
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_boxes_have_the_same_elements(dims: list[tuple[int, int, int]]) -> None:
    size, first, second = ([d[k] for d in dims] for k in range(3))
    places = [
        tuple(sum(i * s for i, s in zip(at, steps, strict=True)) for steps in (first, second))
        for at in itertools.product(*map(range, size))
    ]
    found = [
        tuple(b.start[k] + r * b.row[k] + c * b.column[k] for k in (0, 1))
        for b in boxes_2d(size, first, second)
        for r in range(b.rows)
        for c in range(b.columns)
    ]
    assert sorted(found) == sorted(places)


def test_what_a_shard_is_merges_to_rows_and_columns() -> None:
    rows = list(boxes_2d((4, 6), (6, 1), (6, 1)))
    assert [(b.rows, b.columns) for b in rows] == [(1, 24)]
    columns = list(boxes_2d((4, 3), (3, 1), (6, 1)))
    assert [(b.rows, b.columns, b.row, b.column) for b in columns] == [(4, 3, (3, 6), (1, 1))]


def test_tiles_cover_every_box_once() -> None:
    assert [tile_of(n, 4096)[1] for n in (1, 32, 40, 384, 768, 5000, 2**30)] == [
        32,
        32,
        64,
        128,
        256,
        1024,
        4096,
    ]
    assert tile_of(384, 4096) == (32, 128)
    rows_R, columns_R = torch.tensor([1, 40, 3]), torch.tensor([100, 40, 7])
    table_B2 = block_table(rows_R, columns_R, (32, 32))
    assert table_B2.tolist() == [
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [2, 0],
    ]


def some_parts(
    dtype: torch.dtype,
) -> tuple[torch.Tensor, list[Part], list[torch.Tensor], list[torch.Tensor]]:
    """(buffer, parts, the tensors they write into, what those must then be)."""
    values = torch.randint(0, 256, (140 * 96 * dtype.itemsize,), dtype=torch.uint8)
    sent = values.view(dtype).view(140, 96)
    lead = VECTOR_BYTES // dtype.itemsize
    buffer_B = torch.cat([torch.zeros(VECTOR_BYTES, dtype=torch.uint8), values])
    wanted, live, parts = [], [], []
    turned = (sent.t(), sent.t()[16:], sent[:136].t()[:, 8:], sent.t()[3:80, 1:90])
    for n, source in enumerate(
        (
            *(sent[8:16], sent[:, 48:], sent[3:21, 7:20], sent.t()[5:9], sent[::2, ::3]),
            *(sent[6:7, 9:10], *turned),
        )
    ):
        stored = torch.zeros(source.shape[0] + 3, source.shape[1] + 8 * (n % 2)).to(dtype)
        expected = stored.clone()
        target = stored[1 : 1 + source.shape[0], : source.shape[1]]
        expected[1 : 1 + source.shape[0], : source.shape[1]] = source
        offset = (lead + source.storage_offset()) * dtype.itemsize
        parts.append(Part(target=target, offset_bytes=offset, strides=tuple(source.stride())))
        live.append(stored)
        wanted.append(expected)
    return buffer_B, parts, live, wanted


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str
)
def test_parts_land_where_they_belong_and_nowhere_else(dtype: torch.dtype, device: str) -> None:
    buffer_B, parts, live, wanted = some_parts(dtype)
    on_device = [t.to(device) for t in live]
    moved = [
        Part(
            target=t.as_strided(p.target.shape, p.target.stride(), p.target.storage_offset()),
            offset_bytes=p.offset_bytes,
            strides=p.strides,
        )
        for t, p in zip(on_device, parts, strict=True)
    ]
    prepared = PreparedCopy(moved)
    prepared.launch(
        torch.zeros_like(buffer_B, device=device)
    )  # another buffer first: the parts are not bound to one
    prepared.launch(buffer_B.to(device))
    assert all(same(t.cpu(), w) for t, w in zip(on_device, wanted, strict=True))


def test_a_part_between_two_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="byte 2"):
        PreparedCopy([Part(target=torch.zeros(3), offset_bytes=2, strides=(1,))])


INTERPRETED = """
import torch
from tests.weight_transfer.test_copies import same, some_parts
from weight_transfer import copy_kernels
for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
    buffer_B, parts, live, wanted = some_parts(dtype)
    for launch in copy_kernels.prepare(parts):
        launch(buffer_B)
    assert all(same(t, w) for t, w in zip(live, wanted)), dtype
print("same bytes")
"""


def test_the_cuda_kernel_moves_the_same_bytes_interpreted() -> None:
    """Triton's interpreter runs it on the CPU; it must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "same bytes", done.stderr[-2000:]


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_the_cuda_kernel_compiles(element_bytes: int) -> None:
    """For an H100 or H200, only by Triton's compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weight_transfer import copy_kernels, digest_kernels

    signature = {"table_ptr": "*i64", "block_table_ptr": "*i32", "buffer_ptr": "*u8"}
    for is_dense, turned in (
        (True, 0),
        (False, 0),
        (False, 1),
        (False, VECTOR_BYTES // element_bytes),
    ):
        constants = {
            "DTYPE": digest_kernels.UNSIGNED[element_bytes],
            "IS_DENSE": is_dense,
            "TURNED": turned,
            "BLOCK_R": 64 if turned else 16,
            "BLOCK_C": 64 if turned else 256,
        }
        source = ASTSource(
            fn=copy_kernels._copy_kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(n,): [["tt.divisibility", 16]] for n in range(len(signature))},
        )
        options = {"num_warps": 8}
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        if turned > 1:
            moved = re.findall(r"\b(ld|st)\.global((?:\.\w+)*) ", ptx)
            vectors = [kind for kind, what in moved if what.endswith((".v4.b32", ".v2.b64"))]
            assert set(vectors) == {"ld", "st"}, moved


def test_scales_do_not_shift_the_weights_of_their_chunk() -> None:
    """Whatever the order that they are given in: kernels read and write whole vectors."""
    specs = [TensorSpec(name="bias", dtype="bfloat16", shape=(3,))]
    for k in range(3):
        specs += [
            TensorSpec(name=f"{k}.scale", dtype="float32", shape=()),
            TensorSpec(name=f"{k}.weight", dtype="float8_e4m3fn", shape=(4, 8)),
            TensorSpec(name=f"{k}.norm", dtype="bfloat16", shape=(8,)),
        ]
    manifest = Manifest(tensors=tuple(specs))
    order = in_vectors([(i,) for i in range(len(specs))], manifest)
    assert sorted(order) == list(range(len(specs)))
    ordered = [specs[i] for i in order]
    for spec, offset in zip(ordered, chunk_offsets(ordered), strict=True):
        whole = spec.nbytes % VECTOR_BYTES == 0
        assert offset % (VECTOR_BYTES if whole else spec.nbytes // spec.numel) == 0, spec.name


def test_a_unit_stays_together_in_its_chunk() -> None:
    """q, k and v with one scale follow each other, though k and v are not whole vectors."""
    rows = {"q": 16, "k": 5, "v": 5}
    specs = [
        TensorSpec(name=f"{name}.weight", dtype="float8_e4m3fn", shape=(height, 24))
        for name, height in rows.items()
    ]
    specs += [TensorSpec(name=f"{name}.scale", dtype="float32", shape=()) for name in rows]
    specs += [TensorSpec(name="o.weight", dtype="float8_e4m3fn", shape=(24, 16))]
    order = in_vectors([(3, 4, 5, 0, 1, 2), (6,)], Manifest(tensors=tuple(specs)))
    assert order == (6, 3, 4, 5, 0, 1, 2)
