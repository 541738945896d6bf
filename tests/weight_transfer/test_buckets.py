"""The cut must be vLLM's, to the tensor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.protocol.messages import Manifest, TensorSpec
from weight_transfer.buckets import Bucket, plan_buckets


def manifest_of(sizes: list[int]) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=str(n), dtype="uint8", shape=(s,)) for n, s in enumerate(sizes)))


def cuts(sizes: list[int], bucket_bytes: int) -> list[tuple[int, int, int]]:
    return [(b.first, b.last, b.nbytes) for b in plan_buckets(manifest_of(sizes), bucket_bytes)]


def as_vllm_cuts(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """vLLM's loop (`pack_tensors`), on sizes."""
    chunks, rest = [], iter(sizes)
    while True:
        chunk: list[int] = []
        total = 0
        for size in rest:
            chunk.append(size)
            total += size
            if total > bucket_bytes:
                break
        if not chunk:
            return chunks
        chunks.append(chunk)


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "expected"),
    [
        ([10, 10, 10], 100, [(0, 3, 30)]),
        ([10, 10, 10], 20, [(0, 3, 30)]),  # 20 does not exceed 20: the third crosses and is included
        ([10, 10, 10], 19, [(0, 2, 20), (2, 3, 10)]),
        ([500, 10, 10], 100, [(0, 1, 500), (1, 3, 20)]),  # larger than a bucket
        ([10, 10], 19, [(0, 2, 20)]),  # the last one crosses: no empty bucket behind it
        ([0, 0], 5, [(0, 2, 0)]),
    ],
)
def test_cuts_by_hand(sizes: list[int], bucket_bytes: int, expected: list[tuple[int, int, int]]) -> None:
    assert cuts(sizes, bucket_bytes) == expected


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40), bucket_bytes=st.integers(1, 120))
def test_cuts_are_vllms(sizes: list[int], bucket_bytes: int) -> None:
    planned = plan_buckets(manifest_of(sizes), bucket_bytes)
    assert [sizes[b.first : b.last] for b in planned] == as_vllm_cuts(sizes, bucket_bytes)
    assert [b.nbytes for b in planned] == [sum(sizes[b.first : b.last]) for b in planned]


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets(manifest_of([1]), 0)


def test_bucket_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Bucket(first=0, last=1, nbytes=1).first = 3  # type: ignore[misc]
