"""The digest adds up over partitions and sees every change of a bit, a place or a sign of zero."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_transfer import digest, splitmix
from weight_transfer.digest import region_digest, tensor_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.float8_e4m3fn,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


def by_definition(t: torch.Tensor) -> int:
    """The digest in plain Python integers."""
    mask, size = (1 << 64) - 1, t.element_size()

    def finalised(x: int) -> int:
        x = ((x & mask) ^ ((x & mask) >> 30)) * splitmix.MUL_1 & mask
        x = (x ^ (x >> 27)) * splitmix.MUL_2 & mask
        return x ^ (x >> 31)

    total = 0
    for i, value in enumerate(t.contiguous().view(digest._int_dtype(t.dtype)).reshape(-1).tolist()):
        bits = value & ((1 << (8 * size)) - 1)
        if size > 2:
            total += finalised((bits * splitmix.SPREAD & mask) ^ ((i + 1) * splitmix.GOLDEN & mask))
            continue
        word, place = divmod(i, 8 // size)
        total += (bits + 1) * splitmix.PLACES[place] * (finalised((word + 1) * splitmix.GOLDEN) | 1)
    return digest._signed(total & mask)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return digest.row_major_strides(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 9), (3, 4, 5), (0, 4)], ids=str)
def test_is_what_the_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t = random_bits(shape, dtype)
    before = t.clone()
    got = tensor_digest(t)
    assert got.dtype == torch.int64 and got.dim() == 0
    assert int(got) == by_definition(t)
    same_bits = t.reshape(-1).view(torch.uint8).equal(before.reshape(-1).view(torch.uint8))
    assert same_bits, "the digest must not touch the tensor"


def test_known_number() -> None:
    """Both ends of a wire may run different releases: the numbers are part of the protocol."""
    numbers = torch.arange(10, dtype=torch.float32)
    assert int(tensor_digest(numbers)) == -4927695213749056428
    assert int(tensor_digest(numbers.bfloat16())) == 8610182501064584054
    assert int(tensor_digest(numbers.to(torch.float8_e4m3fn))) == 2648776874290872667


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    cut_points=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=3, max_size=3),
    chunk=st.sampled_from([1, 2, 3, 7, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
@settings(max_examples=60, deadline=None)
def test_regions_of_a_partition_add_up(
    shape: list[int], cut_points: list[list[int]], chunk: int, dtype: torch.dtype
) -> None:
    """Any grid of boxes, and any chunk size."""
    t = random_bits(tuple(shape), dtype, seed=sum(shape))
    strides = row_major(tuple(shape))
    edges = [
        sorted({0, size, *(c for c in cuts if c < size)})
        for size, cuts in zip(shape, cut_points, strict=False)
    ]
    total = torch.zeros((), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "CHUNK_ELEMENTS", chunk)
        for box in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
            region = t[tuple(slice(a, b) for a, b in box)]
            first = sum(a * s for (a, _), s in zip(box, strides, strict=True))
            total += region_digest(region, first_index=first, index_strides=strides)
        assert int(tensor_digest(t)) == int(total)
    assert int(total) == int(tensor_digest(t))


def test_qkv_slices_in_a_fused_kernel_tensor_add_up() -> None:
    """What the receiver does: q, k and v lie as row ranges of one tensor, two shards of it on two
    workers.
    """
    q, k = random_bits((8, 6), torch.bfloat16, 1), random_bits((4, 6), torch.bfloat16, 2)
    shards = [torch.cat([q[s * 4 : s * 4 + 4], k[s * 2 : s * 2 + 2]]) for s in range(2)]
    total_q = sum(
        region_digest(sh[:4], first_index=s * 24, index_strides=(6, 1))
        for s, sh in enumerate(shards)
    )
    total_k = sum(
        region_digest(sh[4:], first_index=s * 12, index_strides=(6, 1))
        for s, sh in enumerate(shards)
    )
    assert int(total_q) == int(tensor_digest(q)) and int(total_k) == int(tensor_digest(k))
    swapped = sum(
        region_digest(sh[:4], first_index=(1 - s) * 24, index_strides=(6, 1))
        for s, sh in enumerate(shards)
    )
    assert int(swapped) != int(tensor_digest(q))


def test_strided_and_transposed_regions() -> None:
    t = random_bits((12, 10), torch.float32)
    assert int(tensor_digest(t.t().contiguous().t())) == int(tensor_digest(t))
    even, odd = t[::2], t[1::2]
    parts = region_digest(even, first_index=0, index_strides=(20, 1)) + region_digest(
        odd, first_index=10, index_strides=(20, 1)
    )
    assert int(parts) == int(tensor_digest(t))
    stored_transposed = t.t().contiguous()
    assert int(region_digest(stored_transposed, first_index=0, index_strides=(1, 10))) == int(
        tensor_digest(t)
    )
    assert int(region_digest(stored_transposed, first_index=0, index_strides=(12, 1))) != int(
        tensor_digest(t)
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str
)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    t = random_bits((6, 5), dtype)
    raw = t.reshape(-1).view(torch.uint8)
    seen = {int(tensor_digest(t))}
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(int(tensor_digest(t)))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()


def test_a_swap_of_two_elements_counts() -> None:
    t = torch.arange(40, dtype=torch.float32).to(torch.bfloat16)
    whole = int(tensor_digest(t))
    for a, b in itertools.combinations(range(40), 2):
        swapped = t.clone()
        swapped[a], swapped[b] = t[b], t[a]
        assert int(tensor_digest(swapped)) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_two_changes_do_not_cancel(dtype: torch.dtype) -> None:
    """Two signs flip, within a word of 8 bytes or far apart; so do those of whole words."""
    t = random_bits((40,), dtype)
    whole, raw, size = int(tensor_digest(t)), t.view(torch.uint8), dtype.itemsize
    for a, b in itertools.combinations(range(40), 2):
        for last in ((a, b), (a // 4 * 4, b // 4 * 4)):
            changed = raw.clone()
            for element in last:
                changed[element * size + size - 1] ^= 0x80
            same = changed.equal(raw)
            assert (int(tensor_digest(changed.view(dtype))) == whole) == same
    words = raw.view(-1, 8)
    for a, b in itertools.combinations(range(len(words)), 2):
        flipped = words.clone()
        flipped[[a, b]] ^= 0x80
        assert int(tensor_digest(flipped.view(-1).view(dtype))) != whole


def test_zeros_have_signs_and_places() -> None:
    zeros, minus = torch.zeros(5), torch.tensor([0.0, 0.0, -0.0, 0.0, 0.0])
    assert zeros.equal(minus) and int(tensor_digest(zeros)) != int(tensor_digest(minus))
    for dtype in DTYPES:
        assert int(tensor_digest(torch.zeros(5, dtype=dtype))) != 0
        five, six = (tensor_digest(torch.zeros(n, dtype=dtype)) for n in (5, 6))
        assert int(five) != int(six)


def test_nan_payloads_count() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert int(tensor_digest(quiet)) != int(tensor_digest(other))


@pytest.mark.parametrize(
    "numel",
    [
        digest.CHUNK_ELEMENTS - 1,
        digest.CHUNK_ELEMENTS,
        digest.CHUNK_ELEMENTS + 1,
        2 * digest.CHUNK_ELEMENTS + 3,
    ],
)
def test_chunk_boundaries(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    t = random_bits((numel,), torch.uint8)
    chunked = int(tensor_digest(t))
    monkeypatch.setattr(digest, "CHUNK_ELEMENTS", 1 << 40)
    assert int(tensor_digest(t)) == chunked


def test_indices_beyond_32_bits() -> None:
    t = random_bits((4, 3), torch.float32)
    low, high = (int(region_digest(t, first_index=f, index_strides=(3, 1))) for f in (5, 5 + 2**32))
    assert low != high


def test_wrong_number_of_strides_is_refused() -> None:
    with pytest.raises(ValueError, match="2 index strides"):
        region_digest(torch.zeros(2, 2), first_index=0, index_strides=(1,))


INTERPRETED = """
import torch
from weight_transfer import digest, digest_kernels
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
    t = (torch.randn(37, 300) * 50).to(dtype)
    for rows, columns, strides in ((slice(0, 37), slice(0, 300), (300, 1)), (slice(3, 20), slice(5, 280, 2), (300, 2))):
        region, out = t[rows, columns], torch.zeros(1, dtype=torch.int64)
        bits = region.view(digest._int_dtype(dtype))
        digest_kernels.launch_region(bits_RC=bits, first_index=905, index_strides=strides, out=out)
        assert int(out) == int(digest.region_digest(region, first_index=905, index_strides=strides)), (dtype, strides)
    # What a tensor-parallel worker holds: rows, columns, a transposed part, a part of a three-dimensional tensor; and whole ones.
    cube = t[:, :288].reshape(37, 12, 24)
    views = [t, t[3:20], t[:, 32:96], t[:, 5:280], t[1:30:3, 4:200:2], t.t()[7:9], cube[2:30, 1:9, 3:19], t[5], t[2, 3]]
    origins = [(7 * n + 2**40 * (n % 2), tuple(3 * s + 1 for s in v.stride())) for n, v in enumerate(views)]
    out_N = torch.zeros(len(views), dtype=torch.int64)
    for launch in digest_kernels.prepare(views, range(len(views)), origins):
        launch(out_N)
    wanted = [int(digest.region_digest(v, first_index=f, index_strides=s)) for v, (f, s) in zip(views, origins)]
    assert out_N.tolist() == wanted, dtype
    # Words of 8 bytes in rows that are apart in memory, and at another index.
    wide = torch.cat([t, t[:, :4]], dim=1)
    views, origins = [wide[:, :256], wide[3:20, 8:264]], [(16, (304, 1)), (3 * 304 + 8, (304, 1))]
    out_N = torch.zeros(2, dtype=torch.int64)
    for launch in digest_kernels.prepare(views, range(2), origins):
        launch(out_N)
    assert out_N.tolist() == [int(digest.region_digest(v, first_index=f, index_strides=s)) for v, (f, s) in zip(views, origins)], dtype
    tensors = [t[:n].clone() for n in (1, 37, 5)]
    whole = [(0, digest.row_major_strides(x.shape)) for x in (*tensors, t)]
    out_N = torch.zeros(4, dtype=torch.int64)
    for launch in digest_kernels.prepare([*tensors, t], range(4), whole):
        launch(out_N)
    assert out_N.tolist() == [int(digest.tensor_digest(x)) for x in (*tensors, t)], dtype
    # Tensors that are somewhere else now, of which nothing else may be kept.
    two = torch.stack([wide[:32], wide[5:37]])
    moved = digest.PreparedDigest([two[0]], rows=[0])
    moved._launches = digest_kernels.prepare([two[0]], [0], moved._origins)
    for n in (0, 1, 1, 0):
        moved.move(two[n].data_ptr() - moved._launches[0].table_R9[0, 0].item())
        out_N = torch.zeros(1, dtype=torch.int64)
        moved.launch(out_N)
        assert moved.moves and not moved._tensors and int(out_N) == int(digest.tensor_digest(two[n])), (dtype, n)
print("same numbers")
"""  # noqa: E501


def test_the_cuda_kernels_give_the_same_numbers_interpreted() -> None:
    """Triton's interpreter runs the kernels on the CPU; it must be chosen before Triton is
    imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "same numbers", done.stderr[-2000:]


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX for an H100 or H200, only by Triton's compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_the_cuda_kernels_compile(element_bytes: int) -> None:
    """A kernel that does not compile shows where there is no GPU, too."""
    from weight_transfer import digest_kernels

    dtype = digest_kernels.UNSIGNED[element_bytes]
    integers = dict.fromkeys(
        [
            "rows",
            "columns",
            "row_memory",
            "column_memory",
            "row_index",
            "column_index",
            "first_index",
            "tiles_across",
        ],
        "i64",
    )
    region = {"bits_ptr": f"*i{8 * element_bytes}", "out_ptr": "*i64", **integers}
    blocks = {"DTYPE": dtype, "BLOCK_R": 2, "BLOCK_C": 2048}
    assert compiled(digest_kernels._region_kernel, region, blocks)
    prepared = {"table_ptr": "*i64", "block_table_ptr": "*i32", "out_ptr": "*i64"}
    for unit, is_dense, align in (
        (element_bytes, True, 16 // element_bytes),
        (element_bytes, True, 1),
        (element_bytes, False, 1),
        *(((8, True, 2), (8, True, 1)) if element_bytes <= 2 else ()),
    ):
        constants = {
            "BYTES": element_bytes,
            "UNIT": digest_kernels.UNSIGNED[unit],
            "IS_DENSE": is_dense,
            "ALIGN": align,
            "BLOCK_R": 1,
            "BLOCK_C": 2048,
        }
        ptx = compiled(digest_kernels._prepared_kernel, prepared, constants)
        if align > 1:
            wide = re.search(r"ld\.global\.v(2\.[bu]64|4\.[bu]32)", ptx)
            assert wide, "16 bytes are to be read at once"
