"""Streams that zlib reads, of any symbols, in any number of pieces."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_transfer import deflate
from weight_transfer.deflate import Table


def read(packed: bytes) -> bytes:
    """What zlib reads; the stream ends where its bytes end."""
    reader = zlib.decompressobj(-15)
    symbols = reader.decompress(packed)
    assert reader.eof and not reader.unused_data
    return symbols


def drawn(count: int, spread: float, seed: int) -> torch.Tensor:
    """Symbols of which small ones are the more frequent, the smaller `spread` is."""
    dice = np.random.default_rng(seed)
    return torch.from_numpy(np.minimum(dice.exponential(spread, count), 255).astype(np.uint8))


@pytest.mark.parametrize("most_at_once", [1 << 22, 300])
@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    spreads=st.tuples(st.sampled_from([0.1, 3.0, 200.0]), st.sampled_from([0.1, 30.0])),
    samples=st.tuples(st.sampled_from([0, 500]), st.sampled_from([0, 3000])),
    seed=st.integers(0, 2**30),
)
def test_zlib_reads_each_piece(
    most_at_once: int,
    counts: list[int],
    spreads: tuple[float, float],
    samples: tuple[int, int],
    seed: int,
) -> None:
    """Also with a code made for other symbols, or for none."""
    tables = [
        Table.of(drawn(count, spread, seed)) for count, spread in zip(samples, spreads, strict=True)
    ]
    wanted = [drawn(count, spreads[n % 2], seed + n + 1) for n, count in enumerate(counts)]
    symbols_S = torch.cat(wanted).int()
    ends = np.cumsum([0, *counts]).tolist()
    pieces = [(ends[n], ends[n + 1], n % 2) for n in range(len(counts))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deflate, "MOST_AT_ONCE", most_at_once)
        packed = deflate.pack(symbols_S, pieces, tables)
    found = [memory[b:e].numpy().tobytes() for memory, spans in packed for b, e in spans]
    assert [read(one) for one in found] == [one.numpy().tobytes() for one in wanted]


def test_a_code_is_as_short_as_zlibs() -> None:
    symbols = drawn(1 << 18, 20.0, 1)
    ((memory, [(begin, end)]),) = deflate.pack(
        symbols.int(), [(0, len(symbols), 0)], [Table.of(symbols)]
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    peer = packer.compress(symbols.numpy().data) + packer.flush()
    assert read(memory[begin:end].numpy().tobytes()) == symbols.numpy().tobytes()
    assert end - begin < 1.01 * len(peer)


def test_rare_symbols_have_codes_of_15_bits_at_most() -> None:
    """Counts like Fibonacci's numbers would give Huffman's code 30 bits."""
    counts = [1, 1]
    while len(counts) < 30:
        counts.append(counts[-1] + counts[-2])
    sample = torch.arange(30, dtype=torch.uint8).repeat_interleave(torch.tensor(counts))
    table = Table.of(sample)
    lengths = table.entries & 15
    assert lengths.min() > 0 and lengths.max() <= deflate.LONGEST
    assert sum(2.0**-length for length in lengths.tolist()) == 1.0


@pytest.mark.gpu1
def test_a_gpu_writes_the_same_bits() -> None:
    symbols = drawn(3 << 20, 20.0, 1)
    pieces, tables = [(0, 1000, 0), (1000, len(symbols), 0)], [Table.of(symbols)]
    here = deflate.pack(symbols.int(), pieces, tables)
    there = deflate.pack(symbols.int().cuda(), pieces, tables)
    for (memory, spans), (other, others) in zip(here, there, strict=True):
        assert spans == others and torch.equal(memory, other.cpu())
