"""Hashes of large files, made and checked by several threads at once.

    file -> spans of `SPAN_BYTES` from its beginning -> SHA-256 of each -> SHA-256 of these, end to
    end: the file's hash

Who writes a file in spans hashes each one as it writes it. hashlib lets other threads run
meanwhile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SPAN_BYTES = 16 << 20
NUM_THREADS = 6


def span_hash(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of one span."""
    return hashlib.sha256(data).digest()


def hash_of_spans(spans: Iterable[bytes]) -> str:
    """The file's hash, from its spans' in their order."""
    return hashlib.sha256(b"".join(spans)).hexdigest()


def hashes(files: Mapping[str, Path], *, span_bytes: int = SPAN_BYTES) -> dict[str, str]:
    """Name -> hash of a file, read from the disk.

    Raises:
        OSError: one cannot be read.
    """
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hashing") as pool:
        asked = {
            name: [
                pool.submit(_read_span, path, begin, span_bytes)
                for begin in range(0, path.stat().st_size, span_bytes)
            ]
            for name, path in files.items()
        }
        return {
            name: hash_of_spans(span.result() for span in spans) for name, spans in asked.items()
        }


def _read_span(path: Path, begin: int, nbytes: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        data, done = memoryview(bytearray(nbytes)), 0
        while read := os.preadv(handle, [data[done:]], begin + done):
            done += read
        return span_hash(data[:done])
    finally:
        os.close(handle)
