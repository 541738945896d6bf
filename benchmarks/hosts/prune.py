"""Zero every CUDA image in a shared object that one GPU architecture would never load.

A wheel's libraries have cubins for many architectures. With the others zeroed a file keeps its
layout and still loads, and the zeros compress away.
"""

from __future__ import annotations

import struct
from pathlib import Path

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
CUBIN = 2
KINDS = (1, CUBIN, 4, 8, 16, 32, 64)


def prune_file(path: Path, arch: int) -> int:
    """Prune a file in place; returns the number of bytes that were zeroed."""
    data = bytearray(path.read_bytes())
    zeroed = prune(data, arch)
    if zeroed:
        path.write_bytes(data)
    return zeroed


def prune(data: bytearray, arch: int) -> int:
    """Zero the images of other architectures in place; returns the number of bytes zeroed.

    Where no image is for the architecture, the newest PTX that it can compile stays.
    """
    zeroed = pos = 0
    while (pos := data.find(FATBIN_MAGIC, pos)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, pos + 4)
        end = pos + header + size
        if version != 1 or header != 16 or end > len(data):
            pos += 4
            continue
        images = _images(data, pos + header, end)
        keep = {start for kind, a, start, _ in images if kind == CUBIN and a == arch}
        if not keep:
            ptx = [image for image in images if image[0] != CUBIN and image[1] <= arch]
            keep = {max(ptx, key=lambda image: image[1])[2]} if ptx else set()
        for _, _, start, nbytes in images:
            if start not in keep:
                data[start : start + nbytes] = bytes(nbytes)
                zeroed += nbytes
        pos = end if images else pos + 4
    return zeroed


def _images(data: bytearray, cursor: int, end: int) -> list[tuple[int, int, int, int]]:
    """(kind, architecture, start, bytes) of each image in a fat binary."""
    images = []
    while cursor + 64 <= end:
        kind, _, header, size, _, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", data, cursor)
        if kind not in KINDS or not 32 <= header <= 4096 or cursor + header + size > end:
            break
        images.append((kind, arch, cursor + header, size))
        cursor += header + size
    return images
