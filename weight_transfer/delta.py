"""Codec of the elements that differ between two buffers of one size. Lossless for any bits.

    encode(old_B, new_B, word_bytes=2)  -> code, number of changed words
    compare(old_B, new_B, parts, word_bytes=2)       -> the changes of parts
    encode_changes(changes of buffers)               -> the same of each part
    apply(code, buffer_B)               turns old_B into new_B, in place
    begin_applying(code, nbytes)        the same, while threads read the code

A buffer is a row of words: bf16 elements, FP8 elements, or the halves of fp32 ones. The code has
the gap before each changed word, and the step from the old word to the new one. A step counts
neighbouring floats: the next larger value is one step away, whatever its exponent. Most steps of a
small update are -1 or 1. A step or a gap takes a symbol, and Huffman's code shortens the symbols
(`deflate.py`). Where gaps are long, their lower bytes are apart, because no code can shorten those.

Symbols are made and shortened on the buffer's device, and read on the host by several threads, with
zlib. `encode_changes` and `begin_applying` return while threads work.

Axes: B = bytes, C = changed words, D = parts that changed, S = symbols, W = words.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from orchestrator.errors import TransferError
from weight_transfer import deflate
from weight_transfer.deflate import Table

ESCAPE = 255
"""In gaps: add this, and the next symbol. In steps: the value is in another stream."""
LONG_GAP, VERY_LONG_GAP = 384, 384 * 256
"""Mean gaps from which one, or two, lower bytes of each gap are apart."""
SEGMENT = 1 << 20
"""Symbols of one stream, which one thread reads."""
MAX_THREADS = 16
MOST_AT_ONCE = 1 << 23
"""Changes of several parts that a device encodes together. Each takes some 60 bytes meanwhile. A
trainer collects half as many of its buffers."""
SAMPLE = 1 << 16
"""Symbols from which a code is made."""
_HEAD = struct.Struct("<4sBB6Q")
"""Magic, bytes of a word, lower bytes of a gap, changed words, symbols of the gaps, and the size of
each stream."""
_MAGIC = b"spd1"
_WORDS = {1: torch.int8, 2: torch.int16}
_NO_CODE = (ValueError, IndexError, KeyError, struct.error, zlib.error)
Symbols: TypeAlias = npt.NDArray[np.uint8]
Key: TypeAlias = tuple[int, int, int, int]
"""0 for gaps or 1 for steps, bytes of a word, lower bytes of a gap, and half octaves of the part's
mean gap."""
Tables: TypeAlias = dict[Key, Table]
"""The code of symbols of each kind."""


def encode(old_B: torch.Tensor, new_B: torch.Tensor, *, word_bytes: int) -> tuple[bytes, int]:
    """Return the code and the number of changed words; an empty code if none changed.

    Args:
        old_B, new_B: contiguous uint8 of one size, a multiple of `word_bytes`, on one device.
        word_bytes: 1 or 2.
    """
    changes = compare(old_B, new_B, [(0, old_B.numel())], word_bytes=word_bytes)
    ((only,),) = encode_changes([changes])
    return bytes(only.arrived()[0]), only.changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """A code that is on its way to host memory."""

    changed: int
    """Number of changed words."""
    nbytes: int = 0
    arriving: Future[tuple[Symbols, int]] | None = None
    """The code and its CRC-32. None: nothing changed, so it is empty."""

    def arrived(self) -> tuple[Symbols, int]:
        """Wait for the code and its CRC-32."""
        return (np.empty(0, np.uint8), 0) if self.arriving is None else self.arriving.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs between two buffers, whose memory may be used again."""

    word_bytes: int
    ends: Sequence[tuple[int, int]]
    """First word of each part, and the one after its last. The first part begins at 0."""
    at_C: torch.Tensor
    """Places of the changed words, also of those between parts."""
    old_C: torch.Tensor
    new_C: torch.Tensor


def compare(
    old_B: torch.Tensor, new_B: torch.Tensor, parts: Sequence[tuple[int, int]], *, word_bytes: int
) -> Changes:
    """Find what differs. The buffers may change afterwards on the current stream.

    The host waits for a GPU once, for the number of changes.

    Args:
        old_B, new_B: as in `encode`.
        parts: [begin, end) of each in bytes, ascending and without overlap.
    """
    first, last = parts[0][0], parts[-1][1]
    old_W, new_W = (one_B[first:last].view(_WORDS[word_bytes]) for one_B in (old_B, new_B))
    at_C = (old_W != new_W).nonzero().view(-1)
    return Changes(
        word_bytes=word_bytes,
        ends=[((begin - first) // word_bytes, (end - first) // word_bytes) for begin, end in parts],
        at_C=at_C,
        old_C=old_W[at_C],
        new_C=new_W[at_C],
    )


def encode_changes(
    buffers: Sequence[Changes], *, tables: Tables | None = None
) -> list[list[Coding]]:
    """Encode the parts of buffers, each to a separate code.

    The host waits for a GPU once for the changes of each part, and twice for every MOST_AT_ONCE of
    them: for their symbols, and for the bits of these. New tables take one wait more.

    Args:
        tables: what other buffers of an update used; more are added.
    """
    if not buffers:
        return []
    tables = {} if tables is None else tables
    # All buffers are one row of words.
    bases = itertools.accumulate((one.ends[-1][1] for one in buffers), initial=0)
    placed = list(zip(bases, buffers, strict=False))
    row = (
        _cat([one.at_C + base if base else one.at_C for base, one in placed]),
        _cat([one.old_C for one in buffers]),
        _cat([one.new_C for one in buffers]),
    )
    ends = [(base + begin, base + end) for base, one in placed for begin, end in one.ends]
    found = torch.searchsorted(row[0], deflate.on(torch.tensor(ends), row[0].device)).tolist()
    word_bytes = [one.word_bytes for one in buffers for _ in one.ends]
    parts = [_Part(w, *at, *of) for w, at, of in zip(word_bytes, ends, found, strict=True)]
    codings = dict[_Part, Coding]()
    for group in _groups([part for part in parts if part.changed]):
        codings.update(zip(group, _begun(*row, group, tables), strict=True))
    rest = iter([codings.get(part, Coding(changed=0)) for part in parts])
    return [list(itertools.islice(rest, len(one.ends))) for one in buffers]


@dataclass(frozen=True, slots=True)
class _Part:
    """The words and the changes of a part, [begin, end) and [first, last)."""

    word_bytes: int
    begin: int
    end: int
    first: int
    last: int

    @property
    def changed(self) -> int:
        return self.last - self.first

    @property
    def mean_gap(self) -> float:
        return (self.end - self.begin) / self.changed

    @property
    def kind(self) -> tuple[int, int]:
        """Bytes of a word and lower bytes of a gap; parts differ in neither if coded together."""
        return self.word_bytes, (self.mean_gap >= LONG_GAP) + (self.mean_gap >= VERY_LONG_GAP)


def _groups(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts that are encoded together; each has changes. Pure."""
    groups, latest = list[list[_Part]](), dict[tuple[int, int], list[_Part]]()
    for part in parts:
        group = latest.get(part.kind)
        if group is None or sum(one.changed for one in (*group, part)) > MOST_AT_ONCE:
            group = latest[part.kind] = []
            groups.append(group)
        group.append(part)
    return groups


def _begun(
    at_C: torch.Tensor,
    old_C: torch.Tensor,
    new_C: torch.Tensor,
    parts: Sequence[_Part],
    tables: Tables,
) -> list[Coding]:
    """Make the streams of parts of one kind on the device, and have threads put them together.

    Args:
        at_C, old_C, new_C: changes of all buffers.
    """
    word_bytes, low_bytes = parts[0].kind
    is_one = all(one.last == two.first for one, two in itertools.pairwise(parts))
    runs = [(parts[0].first, parts[-1].last)] if is_one else [(p.first, p.last) for p in parts]
    at_C, old_C, new_C = (_cat([one_C[i:k] for i, k in runs]) for one_C in (at_C, old_C, new_C))
    firsts = [0, *itertools.accumulate(part.changed for part in parts)]
    codes_C = _codes(old_C.to(_WORDS[word_bytes]), new_C.to(_WORDS[word_bytes]))
    symbols_S, gap_ends, low_CN, long_S, long_ends = _symbols(at_C, codes_C, parts, firsts)
    octaves = [round(2 * math.log2(part.mean_gap)) for part in parts]
    keys = [(steps, word_bytes, low_bytes, octave) for steps in (0, 1) for octave in octaves]
    spans = list(itertools.pairwise([0, *gap_ends]))
    spans += [(gap_ends[-1] + i, gap_ends[-1] + k) for i, k in itertools.pairwise(firsts)]
    used = _tables(symbols_S, spans, keys, tables)
    numbers = {key: number for number, key in enumerate(used)}
    pieces = [_segments(*span, numbers[key]) for span, key in zip(spans, keys, strict=True)]
    packed = deflate.pack(symbols_S, list(itertools.chain(*pieces)), list(used.values()))

    tensors = [*(memory for memory, _ in packed), low_CN, long_S]
    (*copies, low, long_steps), arrived = _to_host(tensors)
    segments = iter(
        [copy[b:e] for copy, (_, here) in zip(copies, packed, strict=True) for b, e in here]
    )
    coded = [_with_sizes(list(itertools.islice(segments, len(one)))) for one in pieces]
    streams = zip(
        coded[: len(parts)],
        np.split(low, [low_bytes * k for k in firsts[1:-1]]),
        coded[len(parts) :],
        np.split(long_steps, [2 * k for k in long_ends[:-1]]),
        strict=True,
    )
    return [
        _coding((*part.kind, part.changed, e - b), (gaps, [lows], steps, [longs]), arrived)
        for part, (b, e), (gaps, lows, steps, longs) in zip(parts, spans, streams, strict=False)
    ]


def _symbols(
    at_C: torch.Tensor, codes_C: torch.Tensor, parts: Sequence[_Part], firsts: Sequence[int]
) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor, list[int]]:
    """The symbols, and what has none, of several parts.

    Args:
        firsts: first change of each part, and the number of changes.

    Returns: symbols of all gaps, then of all steps; the end of each part's gaps; lower bytes of
        the gaps; escaped steps, uint16 as int16; the end of each part's.
    """
    spans = zip(itertools.pairwise(firsts), parts, strict=True)
    rows = torch.tensor([(i, k - 1, part.begin - 1) for (i, k), part in spans])
    firsts_D, lasts_D, before_D = deflate.on(rows, at_C.device).unbind(1)
    before_C = at_C.roll(1)
    before_C[firsts_D] = before_D
    gaps_C = at_C - before_C - 1
    if max(part.end - part.begin for part in parts) < 1 << 31:
        gaps_C = gaps_C.int()
    low_bytes = parts[0].kind[1]
    low_CN = gaps_C.view(torch.uint8).view(len(at_C), -1)[:, :low_bytes].contiguous()
    gaps_C = gaps_C >> 8 * low_bytes
    ends_C = (gaps_C // ESCAPE + 1).cumsum(0)
    is_long_C = codes_C >= ESCAPE
    long_C = is_long_C.cumsum(0)
    gap_ends, long_ends = torch.stack((ends_C[lasts_D], long_C[lasts_D])).tolist()
    num_gaps, num_long = gap_ends[-1], long_ends[-1]
    symbols_S = codes_C.new_full((num_gaps + len(at_C),), ESCAPE)
    symbols_S[ends_C - 1] = (gaps_C % ESCAPE).int()
    torch.clamp(codes_C, max=ESCAPE, out=symbols_S[num_gaps:])
    # Every step has a place; those with a symbol share the last one, which is dropped.
    long_S = codes_C.new_empty(num_long + 1, dtype=torch.int16)
    if num_long:
        long_S[torch.where(is_long_C, long_C - 1, num_long)] = codes_C.to(torch.int16)
    return symbols_S, gap_ends, low_CN, long_S[:-1], long_ends


def _coding(
    numbers: tuple[int, ...], streams: Sequence[Sequence[Symbols]], arrived: torch.cuda.Event | None
) -> Coding:
    """Have a thread put a code together.

    Args:
        numbers: those in its head before the sizes of the streams.
    """
    sizes = [sum(one.nbytes for one in stream) for stream in streams]
    head = np.frombuffer(_HEAD.pack(_MAGIC, *numbers, *sizes), np.uint8)
    arriving = _threads().submit(_code, [head, *itertools.chain(*streams)], arrived)
    return Coding(changed=numbers[2], nbytes=len(head) + sum(sizes), arriving=arriving)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _codes(old_C: torch.Tensor, new_C: torch.Tensor) -> torch.Tensor:
    """Of a step up by 1, down by 1, up by 2, ...: 0, 1, 2, ...; as int32. They wrap as words do."""
    old_C, new_C = _ordered(torch.stack((old_C, new_C)))
    back_C = old_C - new_C
    bits = 8 * back_C.element_size()
    return (((back_C << 1) ^ (back_C >> bits - 1)) - 1).int() & (1 << bits) - 1


def _tables(
    symbols_S: torch.Tensor, spans: Sequence[tuple[int, int]], keys: Sequence[Key], tables: Tables
) -> Tables:
    """The code of each key, made for its spans of symbols if there is none."""
    missing = dict[Key, list[tuple[int, int]]]()
    for span, key in zip(spans, keys, strict=True):
        if key not in tables:
            missing.setdefault(key, []).append(span)
    counts = {key: sum(e - b for b, e in those) for key, those in missing.items()}
    samples = {
        key: _cat([symbols_S[b : e : -(-counts[key] // SAMPLE)] for b, e in those])
        for key, those in missing.items()
    }
    made = Tables()
    if samples:
        sampled = torch.cat([*samples.values()]).cpu().split([*map(len, samples.values())])
        made = {key: Table.of(sample) for key, sample in zip(samples, sampled, strict=True)}
    # Those of few symbols are quickly made, and serve no other.
    tables.update((key, table) for key, table in made.items() if counts[key] >= SAMPLE)
    return {key: tables.get(key) or made[key] for key in keys}


def _segments(begin: int, end: int, table: int) -> list[deflate.Piece]:
    cuts = [*range(begin, end, SEGMENT), end]
    return [(b, e, table) for b, e in itertools.pairwise(cuts)]


def _with_sizes(segments: list[Symbols]) -> list[Symbols]:
    """The segments of a stream, and before them their sizes (uint32)."""
    return [np.array([one.nbytes for one in segments], "<u4").view(np.uint8), *segments]


def _code(parts: Sequence[Symbols], arrived: torch.cuda.Event | None) -> tuple[Symbols, int]:
    """A code and its CRC-32, as soon as its parts are there. The GIL is free meanwhile."""
    if arrived is not None:
        # Without its device, CUDA would make a context on GPU 0, some 500 MB for each rank.
        torch.cuda.set_device(arrived.device)
        arrived.synchronize()
    code = np.concatenate(parts)
    return code, zlib.crc32(code.data)


def _to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[Symbols], torch.cuda.Event | None]:
    """Their bytes in host memory, and when they are there. The host does not wait for a GPU."""
    bytes_ = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    if not bytes_[0].is_cuda:
        return [one_B.numpy() for one_B in bytes_], None
    copies = [torch.empty(len(one_B), dtype=torch.uint8, pin_memory=True) for one_B in bytes_]
    for copy, one_B in zip(copies, bytes_, strict=True):
        copy.copy_(one_B, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensors[0].device))
    return [copy.numpy() for copy in copies], arrived


def apply(code: bytes | memoryview, buffer_B: torch.Tensor) -> int:
    """Change the words that the code names; returns their number.

    Raises:
        TransferError: it is no code for a buffer of this size. The buffer is unchanged.
    """
    return begin_applying(code, buffer_B.numel()).apply(buffer_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applying:
    """The changes of a code, which threads read."""

    nbytes: int
    """Size of the buffer."""
    changes: Future[_Read] | None
    """None: nothing changed."""

    def apply(self, buffer_B: torch.Tensor) -> int:
        """Change a buffer in place; returns the number of changed words. A GPU is not waited for.

        Raises:
            TransferError: as `delta.apply`.
        """
        if self.changes is None:
            return 0
        try:
            read = self.changes.result()
        except _NO_CODE as error:
            raise _not_readable(self.nbytes, error) from None
        words_W, device = buffer_B.view(_WORDS[read.word_bytes]), buffer_B.device
        at_C = deflate.on(read.at_C, device).long()
        codes_C = deflate.on(read.codes_C, device).int() & 0xFFFF
        steps_C = torch.where(codes_C & 1 > 0, -(codes_C + 1 >> 1), (codes_C >> 1) + 1)
        moved_C = (_ordered(words_W[at_C]) + steps_C).to(words_W.dtype)
        words_W[at_C] = _ordered(moved_C)
        return read.at_C.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The changes, in host memory."""

    word_bytes: int
    at_C: torch.Tensor
    """Place of each changed word, int32 where that suffices."""
    codes_C: torch.Tensor
    """Of each step; uint16 as int16."""


def begin_applying(code: bytes | memoryview, nbytes: int) -> Applying:
    """Have threads read a code for a buffer of so many bytes, which must stay until then.

    Raises:
        TransferError: its head is none of such a code.
    """
    code = memoryview(code)
    if not code:
        return Applying(nbytes=nbytes, changes=None)
    try:
        magic, word_bytes, low_bytes, count, num_gaps, *sizes = _HEAD.unpack_from(code)
        if magic != _MAGIC or low_bytes > 2 or len(code) != _HEAD.size + sum(sizes):
            raise ValueError("its head does not fit its streams")
        if word_bytes not in _WORDS or nbytes % word_bytes:
            raise ValueError(f"its words have {word_bytes} bytes")
        most = nbytes // word_bytes
        if not 0 < count <= most or not count <= num_gaps <= count + most // ESCAPE:
            raise ValueError(f"it has {count:,} changes for {most:,} words")
        ends = itertools.accumulate(sizes, initial=_HEAD.size)
        gaps, low, steps, long_steps = (code[b:e] for b, e in itertools.pairwise(ends))
        symbols = _unpacked(gaps, num_gaps), _unpacked(steps, count)
    except _NO_CODE as error:
        raise _not_readable(nbytes, error) from None

    def read() -> _Read:
        gaps_C = _lengths(_concatenated(symbols[0]), count)
        low_Cn = np.frombuffer(low, np.uint8).reshape(count, low_bytes)
        for n in reversed(range(low_bytes)):
            gaps_C = gaps_C << 8 | low_Cn[:, n]
        at_C = np.cumsum(gaps_C + 1)
        at_C -= 1
        if int(at_C[-1]) >= most:
            raise ValueError("a change is outside the buffer")
        codes_C = _concatenated(symbols[1]).astype(np.uint16)
        escaped, long_codes = codes_C == ESCAPE, np.frombuffer(long_steps, "<u2")
        if int(escaped.sum()) != len(long_codes):
            raise ValueError("its escaped steps are not as many as its escapes")
        codes_C[escaped] = long_codes
        places = at_C if most > 1 << 31 else at_C.astype(np.int32)
        return _Read(
            word_bytes=word_bytes,
            at_C=torch.from_numpy(places),
            codes_C=torch.from_numpy(codes_C.view(np.int16)),
        )

    return Applying(nbytes=nbytes, changes=_readers().submit(read))


def _not_readable(nbytes: int, error: Exception) -> TransferError:
    return TransferError(
        f"the changed elements of a buffer of {nbytes:,} bytes cannot be decoded: {error}; the "
        "next update brings everything"
    )


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """Floats' bits as integers in the order of their values, and back: its own inverse."""
    top = 8 * words.element_size() - 1
    return words ^ ((words >> top) & (1 << top) - 1)


# ------------------------------------------------------------ streams


def _lengths(symbols_S: Symbols, count: int) -> npt.NDArray[np.int64]:
    """Lengths of which each is ESCAPE as often as it contains it, then the rest."""
    ends_C = np.flatnonzero(symbols_S != ESCAPE)
    if len(ends_C) != count or int(ends_C[-1]) + 1 != len(symbols_S):
        raise ValueError("its gaps are not as many as its changes")
    gaps_C = np.diff(ends_C, prepend=-1).astype(np.int64, copy=False)
    gaps_C -= 1
    gaps_C *= ESCAPE
    gaps_C += symbols_S[ends_C]
    return gaps_C


def _unpacked(packed: memoryview, count: int) -> list[Future[Symbols]]:
    """Have threads read the segments of `_with_sizes`, with `count` symbols."""
    num_segments = -(-count // SEGMENT)
    sizes = np.frombuffer(packed[: 4 * num_segments], "<u4").tolist()
    ends = np.cumsum([4 * num_segments, *sizes]).tolist()
    if len(sizes) != num_segments or ends[-1] != len(packed):
        raise ValueError("its segments do not fit their sizes")
    counts = [min(SEGMENT, count - n * SEGMENT) for n in range(num_segments)]
    pieces = [packed[begin:end] for begin, end in itertools.pairwise(ends)]
    return [_threads().submit(_decompress, *one) for one in zip(pieces, counts, strict=True)]


def _concatenated(segments: Sequence[Future[Symbols]]) -> Symbols:
    return np.concatenate([one.result() for one in segments])


def _decompress(packed: memoryview, count: int) -> Symbols:
    symbols = zlib.decompressobj(-15).decompress(packed, count)
    if len(symbols) != count:
        raise ValueError(f"a segment has {len(symbols):,} symbols instead of {count:,}")
    return np.frombuffer(symbols, np.uint8)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads that read and copy; zlib runs without the GIL."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "splice-delta")


@functools.cache
def _readers() -> ThreadPoolExecutor:
    """Threads that wait for those which decompress."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "splice-delta-read")
