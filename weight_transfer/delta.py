"""Codec of the elements that differ between two buffers of one size. Lossless for any bits.

    encode(old_B, new_B, word_bytes=2)  -> code, number of changed words
    apply(code, buffer_B)               turns old_B into new_B, in place

A buffer is a row of words: bf16 elements, FP8 elements, or the halves of fp32 ones. The code has
the gap before each changed word, and the step from the old word to the new one. A step counts
neighbouring floats: the next larger value is one step away, whatever its exponent. Most steps of a
small update are -1 or 1. A step or a gap takes a symbol, and Huffman's code (zlib's) shortens the
symbols. Where gaps are long, their lower bytes are apart, because no code can shorten those.

Symbols are made and read on the buffer's device, and shortened on the host by several threads.

Axes: B = bytes, C = changed words, S = symbols, W = words.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from orchestrator.errors import TransferError

ESCAPE = 255
"""In gaps: add this, and the next symbol. In steps: the value is in another stream."""
LONG_GAP, VERY_LONG_GAP = 384, 384 * 256
"""Mean gaps from which one, or two, lower bytes of each gap are apart."""
SEGMENT = 1 << 20
"""Symbols that one thread compresses at a time."""
MAX_THREADS = 16
_HEAD = struct.Struct("<4sBB6Q")
"""Magic, bytes of a word, lower bytes of a gap, changed words, symbols of the gaps, and the size of
each stream."""
_MAGIC = b"spd1"
_WORDS = {1: torch.int8, 2: torch.int16}


def encode(old_B: torch.Tensor, new_B: torch.Tensor, *, word_bytes: int) -> tuple[bytes, int]:
    """Return the code and the number of changed words; an empty code if none changed.

    Args:
        old_B, new_B: contiguous uint8 of one size, a multiple of `word_bytes`, on one device.
        word_bytes: 1 or 2.
    """
    old_W, new_W = old_B.view(_WORDS[word_bytes]), new_B.view(_WORDS[word_bytes])
    at_C = (old_W != new_W).nonzero().view(-1)
    count = at_C.numel()
    if not count:
        return b"", 0
    mean = old_W.numel() / count
    low_bytes = 0 if mean < LONG_GAP else 1 if mean < VERY_LONG_GAP else 2
    gaps_C = torch.diff(at_C, prepend=at_C.new_tensor([-1])) - 1
    low = [(gaps_C >> 8 * n & 255).to(torch.uint8) for n in range(low_bytes)]
    gaps_S = _runs(gaps_C >> 8 * low_bytes)
    steps_C = (_ordered(new_W[at_C]) - _ordered(old_W[at_C])).to(_WORDS[word_bytes]).int()
    codes_C = torch.where(steps_C > 0, 2 * steps_C - 2, -2 * steps_C - 1)  # 1, -1, 2, -2, ...
    long_steps = codes_C[codes_C >= ESCAPE].cpu().numpy().astype("<u2")
    streams = (
        _pack(gaps_S),
        torch.stack(low, 1).cpu().numpy().tobytes() if low else b"",
        _pack(codes_C.clamp(max=ESCAPE).to(torch.uint8)),
        long_steps.tobytes(),
    )
    head = _HEAD.pack(_MAGIC, word_bytes, low_bytes, count, len(gaps_S), *map(len, streams))
    return b"".join((head, *streams)), count


def apply(code: bytes | memoryview, buffer_B: torch.Tensor) -> int:
    """Change the words that the code names; returns their number.

    Raises:
        TransferError: it is no code for a buffer of this size. The buffer is unchanged.
    """
    try:
        return _apply(memoryview(code), buffer_B)
    except (ValueError, IndexError, KeyError, struct.error, zlib.error) as error:
        raise TransferError(
            f"the changed elements of a buffer of {buffer_B.numel():,} bytes cannot be decoded: "
            f"{error}; the next update brings everything"
        ) from None


def _apply(code: memoryview, buffer_B: torch.Tensor) -> int:
    if not code:
        return 0
    magic, word_bytes, low_bytes, count, num_gaps, *sizes = _HEAD.unpack_from(code)
    if magic != _MAGIC or low_bytes > 2 or len(code) != _HEAD.size + sum(sizes):
        raise ValueError("its head does not fit its streams")
    words_W, device = buffer_B.view(_WORDS[word_bytes]), buffer_B.device
    most = words_W.numel()
    if not 0 < count <= most or not count <= num_gaps <= count + most // ESCAPE:
        raise ValueError(f"it has {count:,} changes for {most:,} words")
    ends = itertools.accumulate(sizes, initial=_HEAD.size)
    gaps, low, steps, long_steps = (code[b:e] for b, e in itertools.pairwise(ends))
    gaps_C = _lengths(_unpack(gaps, num_gaps).to(device), count)
    low_bytes_C = np.frombuffer(low, np.uint8).reshape(count, low_bytes)
    for n in reversed(range(low_bytes)):
        gaps_C = gaps_C << 8 | torch.from_numpy(low_bytes_C[:, n].copy()).to(device)
    at_C = torch.cumsum(gaps_C + 1, 0) - 1
    if int(at_C[-1]) >= most:
        raise ValueError("a change is outside the buffer")
    codes_C = _unpack(steps, count).to(device).int()
    escaped = codes_C == ESCAPE
    long_codes = torch.from_numpy(np.frombuffer(long_steps, "<u2").astype(np.int32)).to(device)
    if int(escaped.sum()) != len(long_codes):
        raise ValueError("its escaped steps are not as many as its escapes")
    codes_C[escaped] = long_codes
    steps_C = torch.where(codes_C & 1 > 0, -(codes_C + 1 >> 1), (codes_C >> 1) + 1)
    moved_C = (_ordered(words_W[at_C]) + steps_C).to(words_W.dtype)
    words_W[at_C] = _ordered(moved_C).to(words_W.dtype)
    return int(count)


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """Floats' bits as int32 in the order of their values, and back: its own inverse."""
    top = 8 * words.element_size() - 1
    return (words ^ ((words >> top) & (1 << top) - 1)).int()


# ------------------------------------------------------------ streams


def _runs(lengths_C: torch.Tensor) -> torch.Tensor:
    """A length as ESCAPE as often as it contains it, then the rest."""
    ends_C = torch.cumsum(torch.div(lengths_C, ESCAPE, rounding_mode="floor") + 1, 0)
    symbols_S = lengths_C.new_full((int(ends_C[-1]),), ESCAPE, dtype=torch.uint8)
    symbols_S[ends_C - 1] = (lengths_C % ESCAPE).to(torch.uint8)
    return symbols_S


def _lengths(symbols_S: torch.Tensor, count: int) -> torch.Tensor:
    """Undo `_runs`."""
    ends_C = (symbols_S != ESCAPE).nonzero().view(-1)
    if len(ends_C) != count or int(ends_C[-1]) + 1 != len(symbols_S):
        raise ValueError("its gaps are not as many as its changes")
    return ESCAPE * (torch.diff(ends_C, prepend=ends_C.new_tensor([-1])) - 1) + symbols_S[ends_C]


def _pack(symbols_S: torch.Tensor) -> bytes:
    """Compress symbols segment by segment: their sizes (uint32), then the segments."""
    segments = list(_threads().map(_compress, symbols_S.cpu().split(SEGMENT)))
    return b"".join((np.array([len(s) for s in segments], "<u4").tobytes(), *segments))


def _compress(symbols_S: torch.Tensor) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(symbols_S.numpy().data) + packer.flush()


def _unpack(packed: memoryview, count: int) -> torch.Tensor:
    """Undo `_pack` of `count` symbols."""
    num_segments = -(-count // SEGMENT)
    sizes = np.frombuffer(packed[: 4 * num_segments], "<u4").tolist()
    ends = np.cumsum([4 * num_segments, *sizes]).tolist()
    if len(sizes) != num_segments or ends[-1] != len(packed):
        raise ValueError("its segments do not fit their sizes")
    counts = [min(SEGMENT, count - n * SEGMENT) for n in range(num_segments)]
    pieces = [packed[begin:end] for begin, end in itertools.pairwise(ends)]
    return torch.cat(list(_threads().map(_decompress, pieces, counts)))


def _decompress(packed: memoryview, count: int) -> torch.Tensor:
    symbols = bytearray(zlib.decompressobj(-15).decompress(packed, count))
    if len(symbols) != count:
        raise ValueError(f"a segment has {len(symbols):,} symbols instead of {count:,}")
    return torch.frombuffer(symbols, dtype=torch.uint8)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads that compress; zlib runs without the GIL."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "splice-delta")
