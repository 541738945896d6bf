"""Large files, written by several threads at once from tensors wherever they are.

    parts (bytes or tensors at their offsets) -> spans of at most 16 MiB -> a thread gathers a span in its staging buffer (pinned, by
    a stream of its own, where tensors are on a GPU) -> one pwrite -> fdatasync, while another thread hashes the buffer

Every span is flushed by the thread that wrote it, so the disk is busy from the first span to the last instead of from the last write on: on a
disk of 2 GB/s four threads reached 1.8 to 2.6 GB/s, one thread with an fsync at the end 0.5 to 0.9. Tensors must not change until `Writing.wait`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_node import hashing

NUM_THREADS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes at an offset of a file."""

    offset: int
    nbytes: int
    source: bytes | Callable[[], torch.Tensor]
    """A tensor is asked for by the thread that writes it; if one part is in several spans, several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one thread writes at once: neighbouring pieces of parts, [part, its first byte, number of bytes]."""

    offset: int
    nbytes: int
    pieces: tuple[tuple[Part, int, int], ...]


def spans(parts: Sequence[Part], *, span_bytes: int) -> list[Span]:
    """Cut parts, which stand end to end, into spans.

    Raises:
        ValueError: the parts overlap or leave a gap; says where.
    """
    found: list[Span] = []
    pieces: list[tuple[Part, int, int]] = []
    begin = end = 0

    def close() -> None:
        if pieces:
            found.append(Span(offset=begin, nbytes=end - begin, pieces=tuple(pieces)))

    for part in sorted((p for p in parts if p.nbytes), key=lambda p: p.offset):
        if part.offset != end:
            raise ValueError(f"the file's parts end at byte {end}, but the next one begins at {part.offset}")
        done = 0
        while done < part.nbytes:
            if end - begin == span_bytes:
                close()
                begin, pieces = end, []
            size = min(part.nbytes - done, span_bytes - (end - begin))
            pieces.append((part, done, size))
            done, end = done + size, end + size
    close()
    return found


class Writing:
    """A file under way."""

    def __init__(self, handle: int, spans: Sequence[Future[bytes]]) -> None:
        self._handle, self._spans = handle, list(spans)

    def wait(self) -> str:
        """Until all of it is on the disk. Returns the hash of what was to be written (`hashing`).

        Raises:
            OSError: it could not be written.
        """
        found = hashing.together([span.result() for span in self._spans])
        os.fsync(self._handle)
        return found

    def close(self) -> None:
        """Let go of the file, whether whole or not, when nothing writes it any more."""
        for span in self._spans:
            span.cancel()
        for span in self._spans:
            if not span.cancelled():
                span.exception()
        os.close(self._handle)


class BulkWriter:
    """Threads that write; made by `bulk_writer`."""

    def __init__(self, pool: ThreadPoolExecutor, hashers: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool, self._hashers, self._device = pool, hashers, device
        self._local = threading.local()
        self._started: list[Writing] = []
        self._ready: torch.cuda.Event | None = None

    def start(self, path: Path, parts: Sequence[Part]) -> Writing:
        """Begin to write a new file; what is queued on the GPU's current stream is waited for before its tensors are read."""
        if self._device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
        cut = spans(parts, span_bytes=hashing.SPAN_BYTES)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        writing = Writing(handle, [])
        self._started.append(writing)
        os.ftruncate(handle, sum(s.nbytes for s in cut))
        writing._spans += [self._pool.submit(self._write, handle, span) for span in cut]
        return writing

    def close(self) -> None:
        """Let go of every file."""
        for writing in self._started:
            writing.close()

    @torch.no_grad()
    def _write(self, handle: int, span: Span) -> bytes:
        """Returns the span's hash."""
        staging, stream = self._buffers()
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            filled = 0
            for part, first, size in span.pieces:
                staging[filled : filled + size].copy_(_bytes_of(part)[first : first + size], non_blocking=True)
                filled += size
        if stream is not None:
            stream.synchronize()
        data = memoryview(staging.numpy())  # type: ignore[arg-type]  # numpy's stubs before 3.12 do not say that arrays are buffers
        found = self._hashers.submit(hashing.span_hash, data[: span.nbytes])
        try:
            self._put(handle, data, span)
        finally:
            digest = found.result()  # before the buffer is used again
        return digest

    @staticmethod
    def _put(handle: int, data: memoryview, span: Span) -> None:
        done = 0
        while done < span.nbytes:
            done += os.pwrite(handle, data[done : span.nbytes], span.offset + done)
        os.fdatasync(handle)

    def _buffers(self) -> tuple[torch.Tensor, torch.cuda.Stream | None]:
        """This thread's."""
        if not hasattr(self._local, "staging"):
            cuda = self._device.type == "cuda"
            if cuda:
                torch.cuda.set_device(self._device)
            self._local.staging = torch.empty(hashing.SPAN_BYTES, dtype=torch.uint8, pin_memory=cuda)
            self._local.stream = torch.cuda.Stream(self._device) if cuda else None
        return self._local.staging, self._local.stream


def _bytes_of(part: Part) -> torch.Tensor:
    """[nbytes] uint8, sharing a contiguous tensor's memory."""
    if isinstance(part.source, bytes):
        return torch.frombuffer(bytearray(part.source), dtype=torch.uint8)
    flat = part.source().detach().reshape(-1).view(torch.uint8)
    if flat.numel() != part.nbytes:
        raise ValueError(f"a part of {part.nbytes} bytes is made of a tensor of {flat.numel()}")
    return flat


@contextlib.contextmanager
def bulk_writer(device: torch.device) -> Iterator[BulkWriter]:
    """Writes files of tensors on `device` or the CPU; at the end its threads are gone and its files closed."""
    with (
        ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bulk-hasher") as hashers,
        ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bulk-writer") as pool,
    ):
        writer = BulkWriter(pool, hashers, device)
        try:
            yield writer
        finally:
            writer.close()
