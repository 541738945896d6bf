"""Digests that add up: the digest of a tensor is the sum of the digests of any partition of it.

    digest(T) = sum_i term(bits(T[i]), i)  mod 2^64         i = row-major index in the HF tensor

    1 and 2 bytes    term = (bits + 1) * PLACES[i mod n] * key(i div n)     n = 8 / bytes
    4 and 8 bytes    term = mix(bits, i), splitmix64's finaliser

The trainer digests `q_proj` whole. The inference workers digest its slices in their fused, sharded
kernel tensors. The sums must be equal. A term is a bijection of the bits, so one changed element
always changes the digest. Any other change that happens by accident goes unseen with a chance of
2^-64 (4 and 8 bytes) or below 2^-32. This is not a signature: differences that cancel can be
computed, within 8 bytes too. A key serves 8 bytes, so most of the work of a mix for each element is
saved. A digest reads bits: -0.0 differs from 0.0, and NaN payloads count.

    >>> w_OI = torch.randn(8, 4)
    >>> top, bottom = w_OI[:4], w_OI[4:]
    >>> total = region_digest(top, first_index=0, index_strides=(4, 1))
    >>> total += region_digest(bottom, first_index=16, index_strides=(4, 1))
    >>> bool(total == tensor_digest(w_OI))
    True

uint64 arithmetic runs in int64, which wraps around the same way. On CUDA a Triton kernel returns
exactly the numbers of the torch path. No call waits for the GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from weight_transfer.launches import kernels
from weight_transfer.splitmix import GOLDEN, MUL_1, MUL_2, PLACES, SPREAD
from weight_transfer.strides import boxes_2d

WORD_BYTES = 8
CHUNK_ELEMENTS = 1 << 20
"""Elements that the torch path holds as int64 at a time: some 20 MiB of scratch, or 70 MiB where
elements of 1 and 2 bytes are in no whole words."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_INT_VIEW: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digest(t: torch.Tensor) -> torch.Tensor:
    """Digest of a whole HF tensor of any shape, strides and dtype.

    Returns an int64 0-dim tensor on `t`'s device.
    """
    if t.is_contiguous():
        return region_digest(t.reshape(-1), first_index=0, index_strides=(1,))
    return region_digest(t, first_index=0, index_strides=row_major_strides(t.shape))


def region_digest(
    region: torch.Tensor, *, first_index: int, index_strides: Sequence[int]
) -> torch.Tensor:
    """Digest of a part of an HF tensor, as an int64 0-dim tensor on the region's device.

    Args:
        region: any rank, strides and dtype.
        first_index: row-major index, in the HF tensor, of the region's element (0, ..., 0).
        index_strides: one per dimension. Element j of the region has index
            first_index + sum_d j_d * index_strides[d] in the HF tensor.

    Raises:
        ValueError: `index_strides` does not have one entry per dimension.
    """
    if len(index_strides) != region.dim():
        raise ValueError(
            f"a region of shape {tuple(region.shape)} needs {region.dim()} index strides, "
            f"got {tuple(index_strides)}"
        )
    bits = region.detach().view(_int_dtype(region.dtype))
    strides = tuple(int(s) for s in index_strides)
    if bits.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=region.device)
    made = kernels("digest_kernels") if bits.is_cuda else None
    flat = None if made is None else _as_2d(bits, strides)
    if made is not None and flat is not None:
        out = torch.zeros(1, dtype=torch.int64, device=bits.device)
        bits_RC, strides_2d = flat
        made.launch_region(
            bits_RC=bits_RC, first_index=first_index, index_strides=strides_2d, out=out
        )
        return out[0]
    return _sum_of_terms(bits, first_index, strides)


class PreparedDigest:
    """A reusable `region_digest` of fixed tensors. A launch costs microseconds of host time.

    Args:
        tensors: all on one device. Their storage must neither move nor be freed while in use.
        rows: index in the output to which each tensor's digest is added.
        origins: each tensor's (first_index, index_strides), as `region_digest` takes them. None:
            the tensors are whole HF tensors, contiguous.

    Raises:
        ValueError: without `origins` a tensor is not contiguous.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        rows: Sequence[int],
        origins: Sequence[tuple[int, Sequence[int]]] | None = None,
    ) -> None:
        if origins is None and any(not t.is_contiguous() for t in tensors):
            raise ValueError("a prepared digest of whole tensors reads contiguous ones only")
        self._tensors, self._rows = list(tensors), list(rows)
        self._origins = (
            [(0, row_major_strides(t.shape)) for t in tensors] if origins is None else list(origins)
        )
        made = kernels("digest_kernels") if tensors and tensors[0].is_cuda else None
        self._launches = (
            [] if made is None else made.prepare(self._tensors, self._rows, self._origins)
        )

    def launch(self, out_N: torch.Tensor) -> None:
        """Queue the digests on the current stream; each is added to its row of out_N.

        out_N is int64; the caller zeroes it.
        """
        if self._launches:
            for launch in self._launches:
                launch(out_N)
            return
        for row, tensor, (first, strides) in zip(
            self._rows, self._tensors, self._origins, strict=True
        ):
            out_N[row] += region_digest(tensor, first_index=first, index_strides=strides)

    @property
    def moves(self) -> bool:
        """Whether it can follow its tensors."""
        return bool(self._launches)

    def move(self, nbytes: int) -> None:
        """The tensors are so much further in memory now, a multiple of 16 bytes. Queued on the
        current stream. From the first such call on it does not keep their storage."""
        self._tensors = []
        for launch in self._launches if nbytes else ():
            launch.move(nbytes)


def _int_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        raise ValueError(f"no digest for dtype {dtype}")
    return _INT_VIEW[dtype.itemsize]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# ------------------------------------------------------------ torch path


def _sum_of_terms(
    bits: torch.Tensor, first_index: int, index_strides: tuple[int, ...]
) -> torch.Tensor:
    """Sum of terms over an integer tensor of any rank.

    Cuts the longest dimension until a piece has at most CHUNK_ELEMENTS.
    """
    if bits.numel() <= CHUNK_ELEMENTS:
        return _chunk_digest(bits, first_index, index_strides)
    dim = max(range(bits.dim()), key=lambda d: bits.shape[d])
    pieces = min(bits.shape[dim], -(-bits.numel() // CHUNK_ELEMENTS))
    step = -(-bits.shape[dim] // pieces)
    step = max(step - step % WORD_BYTES, 1)  # whole words, where it can be
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.shape[dim], step):
        piece = bits.narrow(dim, start, min(step, bits.shape[dim] - start))
        total += _sum_of_terms(piece, first_index + start * index_strides[dim], index_strides)
    return total


def _chunk_digest(
    bits: torch.Tensor, first_index: int, index_strides: tuple[int, ...]
) -> torch.Tensor:
    x = bits.to(torch.int64, copy=True)  # always a copy, since the rest works in place
    if bits.element_size() < 8:
        x &= (1 << (8 * bits.element_size())) - 1  # int16/int32 views are sign-extended
    if bits.element_size() > 2:
        x *= _signed(SPREAD)
        x ^= _indices(bits, first_index + 1, index_strides) * _signed(GOLDEN)
        return _finalised(x).sum(dtype=torch.int64)
    in_word = WORD_BYTES // bits.element_size()
    places = _places(in_word, bits.device)
    x += 1
    if _is_whole_words(bits.shape, first_index, index_strides, in_word):
        x = (x.view(*bits.shape[:-1], -1, in_word) * places).sum(-1)
        words = _indices(
            x, first_index // in_word, (*(s // in_word for s in index_strides[:-1]), 1)
        )
    else:
        i = _indices(bits, first_index, index_strides)
        x *= places[i % in_word]
        words = i // in_word
    return (x * _keys(words)).sum(dtype=torch.int64)


@functools.cache
def _places(in_word: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # it is used in any mode
        return torch.tensor([_signed(p) for p in PLACES[:in_word]], device=device)


def _is_whole_words(
    shape: Sequence[int], first_index: int, index_strides: Sequence[int], in_word: int
) -> bool:
    """Whether the last dimension of a region consists of whole words of `in_word` elements. Pure.

    A word is elements n * in_word, ..., (n + 1) * in_word - 1 of the HF tensor.
    """
    *outer, last = index_strides or (0,)
    return last == 1 and not any(n % in_word for n in (first_index, shape[-1], *outer))


def _indices(like: torch.Tensor, first: int, strides: Sequence[int]) -> torch.Tensor:
    """int64, of a region of `like`'s rank and device: first + sum_d j_d * strides[d]."""
    i = torch.full((1,) * like.dim(), first, dtype=torch.int64, device=like.device)
    for d, stride in enumerate(strides):
        steps = torch.arange(like.shape[d], dtype=torch.int64, device=like.device) * stride
        i = i + steps.view([-1 if e == d else 1 for e in range(like.dim())])
    return i


def _keys(words: torch.Tensor) -> torch.Tensor:
    """Odd factors of words' contents, from their indices."""
    return _finalised((words + 1) * _signed(GOLDEN)) | 1


def _finalised(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, in place."""
    _xor_shift(x, 30)
    x *= _signed(MUL_1)
    _xor_shift(x, 27)
    x *= _signed(MUL_2)
    _xor_shift(x, 31)
    return x


def _xor_shift(x: torch.Tensor, shift: int) -> None:
    """x ^= x >> shift, in place and logical (torch's int64 shift is arithmetic)."""
    x ^= (x >> shift) & ((1 << (64 - shift)) - 1)


# ------------------------------------------------------------ CUDA


def _as_2d(
    bits: torch.Tensor, index_strides: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, int]] | None:
    """The same elements as a two-dimensional view, or None if the dimensions do not merge."""
    box, *more = itertools.islice(boxes_2d(bits.shape, bits.stride(), index_strides), 2)
    if more:
        return None
    memory, index = zip(box.row, box.column, strict=True)
    return bits.as_strided((box.rows, box.columns), memory), (index[0], index[1])
