"""The codec of changed elements: exact for any bits, and close to the entropy."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import TransferError
from tests.trainer_node.conftest import REPO
from tests.weight_transfer.random_bits import random_bytes, seeded
from weight_transfer import delta
from weight_transfer.deflate import Table


def check(old_B: torch.Tensor, new_B: torch.Tensor, word_bytes: int) -> bytes:
    code, changed = delta.encode(old_B, new_B, word_bytes=word_bytes)
    dtype = {1: torch.int8, 2: torch.int16}[word_bytes]
    assert changed == int((old_B.view(dtype) != new_B.view(dtype)).sum())
    there_B = old_B.clone()
    assert delta.apply(code, there_B) == changed
    assert torch.equal(there_B, new_B)
    return code


@settings(max_examples=200, deadline=None)
@given(
    words=st.integers(0, 3000),
    word_bytes=st.sampled_from([1, 2]),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**30),
)
def test_any_bits_come_back(words: int, word_bytes: int, share: float, seed: int) -> None:
    """Random bits have NaNs, infinities, -0.0, and steps of every size."""
    count = words * word_bytes
    old_B, other_B = random_bytes(count, seed), random_bytes(count, seed + 1)
    changes = (torch.rand(words, generator=seeded(seed)) < share).repeat_interleave(word_bytes)
    check(old_B, torch.where(changes, other_B, old_B), word_bytes)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 509, 510, 511, 40_000, 200_000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gaps_of_every_length(gap: int, count: int) -> None:
    old = torch.zeros(gap * count + 7, dtype=torch.int16)
    new = old.clone()
    new[gap - 1 :: gap] = 1
    check(old.view(torch.uint8), new.view(torch.uint8), 2)


def test_long_gaps_next_to_short_ones() -> None:
    old = torch.zeros(1 << 20, dtype=torch.int16)
    new = old.clone()
    new[5000:9000] = 3
    new[-1] = -4
    check(old.view(torch.uint8), new.view(torch.uint8), 2)


@pytest.mark.parametrize("step", [1, -1, 127, 128, -128, 129, 254, 255, 256, 32767, -32768])
def test_steps_of_every_size(step: int) -> None:
    old = torch.arange(300, dtype=torch.int16)
    new = (old.int() + step).to(torch.int16)
    check(old.view(torch.uint8), new.view(torch.uint8), 2)


def test_neighbouring_floats_are_one_step_apart() -> None:
    """Across zero and from one exponent to the next: one symbol for each step."""
    tiny = torch.finfo(torch.bfloat16).smallest_normal
    old = torch.tensor([1.0, -1.0, tiny, -2.0, 0.5], dtype=torch.bfloat16)
    bits = torch.tensor([1, 1, -1, -1, -1], dtype=torch.int16)
    new = (old.view(torch.int16) + bits).view(torch.bfloat16)
    code = check(old.view(torch.uint8), new.view(torch.uint8), 2)
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    other = check(zeros.view(torch.uint8), zeros.flip(0).contiguous().view(torch.uint8), 2)
    assert code[:4] == other[:4]


@pytest.mark.parametrize("most_at_once", [1 << 23, 10])
@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 4000), min_size=2, max_size=9, unique=True),
    word_bytes=st.sampled_from([1, 2]),
    shares=st.lists(st.sampled_from([0.0, 0.0005, 0.02, 1.0]), min_size=9, max_size=9),
    seed=st.integers(0, 2**30),
)
def test_parts_are_coded_apart(
    most_at_once: int, cuts: list[int], word_bytes: int, shares: list[float], seed: int
) -> None:
    """With bytes between them that belong to none, and in buffers that change meanwhile."""
    ends = sorted(cut * word_bytes for cut in cuts)
    parts = list(zip(ends[::2], ends[1::2], strict=False))
    old_B, new_B = random_bytes(ends[-1] + 8, seed), random_bytes(ends[-1] + 8, seed + 1)
    for share, (begin, end) in zip(shares, parts, strict=False):
        stays = torch.rand((end - begin) // word_bytes, generator=seeded(seed)) >= share
        stays_B = stays.repeat_interleave(word_bytes)
        new_B[begin:end] = torch.where(stays_B, old_B[begin:end], new_B[begin:end])
    there = [old_B[b:e].clone() for b, e in parts]
    wanted = [new_B[b:e].clone() for b, e in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "MOST_AT_ONCE", most_at_once)
        found = delta.compare(old_B, new_B, parts, word_bytes=word_bytes)
        (codings,) = delta.encode_changes([found])
    old_B.zero_()
    new_B.zero_()
    for coding, there_B, wanted_B in zip(codings, there, wanted, strict=True):
        code, crc = coding.arrived()
        assert (len(code), zlib.crc32(code)) == (coding.nbytes, crc)
        assert delta.apply(bytes(code), there_B) == coding.changed
        assert torch.equal(there_B, wanted_B)


@pytest.mark.parametrize("most_at_once", [1 << 23, 500])
@settings(max_examples=100, deadline=None)
@given(
    buffers=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 2]),
            st.sampled_from([0, 1, 300, 20_000, 150_000]),
            st.sampled_from([0.0, 1e-5, 0.001, 0.02, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    num_parts=st.integers(1, 3),
    seed=st.integers(0, 2**30),
)
def test_buffers_are_coded_together(
    most_at_once: int, buffers: list[tuple[int, int, float]], num_parts: int, seed: int
) -> None:
    """Of words of both sizes, and with short and long gaps. Each has its own codes."""
    found, wanted, tables = [], [], dict[delta.Key, Table]()
    for n, (word_bytes, words, share) in enumerate(buffers):
        size = words * word_bytes
        old_B, new_B = random_bytes(size, seed + n), random_bytes(size, seed + n + 1)
        changes = torch.rand(words, generator=seeded(seed + n)) < share
        new_B = torch.where(changes.repeat_interleave(word_bytes), new_B, old_B)
        cuts = [word_bytes * (words * i // num_parts) for i in range(num_parts + 1)]
        parts = list(itertools.pairwise(cuts))
        found.append(delta.compare(old_B, new_B, parts, word_bytes=word_bytes))
        wanted.append([(old_B[b:e].clone(), new_B[b:e].clone()) for b, e in parts])
        old_B.zero_()
        new_B.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "MOST_AT_ONCE", most_at_once)
        patch.setattr(delta, "SAMPLE", 100)  # so tables serve several encodings
        coded = [delta.encode_changes(found[:2], tables=tables)]
        coded += [delta.encode_changes(found[2:], tables=tables)]
    for codings, parts in zip(itertools.chain(*coded), wanted, strict=True):
        for coding, (there_B, wanted_B) in zip(codings, parts, strict=True):
            assert delta.apply(bytes(coding.arrived()[0]), there_B) == coding.changed
            assert torch.equal(there_B, wanted_B)


def test_segments_are_compressed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With escaped steps in several of them."""
    old_B, new_B = random_bytes(6000, 1), random_bytes(6000, 2)
    monkeypatch.setattr(delta, "SEGMENT", 700)
    check(old_B, new_B, 2)


def test_nothing_changed_is_empty() -> None:
    same = random_bytes(1000, 0)
    assert delta.encode(same, same.clone(), word_bytes=2) == (b"", 0)
    assert delta.apply(b"", same) == 0


def test_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT", 100)
    old_B, new_B = random_bytes(5000, 1), random_bytes(5000, 2)
    check(old_B, new_B, 2)


@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.01, 0.05, 0.2])
def test_bytes_are_near_the_entropy(share: float) -> None:
    """Of positions that are independent, and steps of one unit up or down."""
    count = 1 << 22
    old = (torch.randn(count, generator=seeded(0)) * 0.02).bfloat16().view(torch.int16)
    changes = torch.rand(count, generator=seeded(1)) < share
    steps = torch.where(torch.rand(count, generator=seeded(2)) < 0.5, 1, -1).short()
    new = torch.where(changes, old + steps, old)
    code = check(old.view(torch.uint8), new.view(torch.uint8), 2)
    p = int(changes.sum()) / count
    floor = count * (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / 8 + p * count / 8
    assert floor < len(code) < 1.15 * floor + 200


# ------------------------------------------------------------ damage


def a_code() -> tuple[bytes, torch.Tensor]:
    old_B, new_B = random_bytes(40_000, 3), random_bytes(40_000, 4)
    changes = (torch.rand(20_000, generator=seeded(5)) < 0.01).repeat_interleave(2)
    new_B = torch.where(changes, new_B, old_B)
    return delta.encode(old_B, new_B, word_bytes=2)[0], old_B


@pytest.mark.parametrize("keep", [1, 20, 57, 60, 100, -1])
def test_a_cut_code_is_refused_and_changes_nothing(keep: int) -> None:
    code, old_B = a_code()
    there_B = old_B.clone()
    with pytest.raises(TransferError, match=r"40,000 bytes cannot be decoded.*brings everything"):
        delta.apply(code[:keep], there_B)
    assert torch.equal(there_B, old_B)


def test_a_code_for_a_larger_buffer_is_refused() -> None:
    code, old_B = a_code()
    there_B = old_B[:20_000].clone()
    with pytest.raises(TransferError, match="cannot be decoded"):
        delta.apply(code, there_B)
    assert torch.equal(there_B, old_B[:20_000])


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_never_leaves_the_buffer(place: int, bit: int) -> None:
    """It is refused, or it gives other elements, which the checksum and the digests show."""
    code, old_B = a_code()
    damaged = bytearray(code)
    damaged[place % len(code)] ^= 1 << bit
    there_B = old_B.clone()
    try:
        delta.apply(bytes(damaged), there_B)
    except TransferError:
        assert torch.equal(there_B, old_B)


ON_GPU_1 = """
import torch
from weight_transfer import delta
torch.cuda.set_device(1)
old_B = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:1")
code, changed = delta.encode(old_B, old_B + 1, word_bytes=2)
assert changed == 1 << 19 and torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.gpu2
def test_the_threads_take_no_memory_of_another_gpu() -> None:
    """A thread that waits begins with GPU 0 as its device."""
    argv = [sys.executable, "-c", ON_GPU_1]
    ran = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120.0, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
