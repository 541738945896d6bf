"""Which tensors travel together: vLLM's packed cut rule, as a pure function.

Tensors are appended, in manifest order, until their sum *exceeds* `bucket_bytes`; the one that crosses is included. What is left
is the last bucket. Both ends compute the same cut from the same manifest, so the wire carries no headers.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.protocol.messages import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors `first` up to but not including `last` of the manifest, laid end to end without padding."""

    first: int
    last: int
    nbytes: int


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut a manifest into buckets.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    buckets: list[Bucket] = []
    first = nbytes = 0
    for n, spec in enumerate(manifest.tensors):
        nbytes += spec.nbytes
        if nbytes > bucket_bytes:
            buckets.append(Bucket(first=first, last=n + 1, nbytes=nbytes))
            first, nbytes = n + 1, 0
    if first < len(manifest.tensors):
        buckets.append(Bucket(first=first, last=len(manifest.tensors), nbytes=nbytes))
    return tuple(buckets)
