"""The CPU's attention."""

from __future__ import annotations


def test_queries_are_the_last_of_their_keys(torchrun) -> None:
    torchrun(1, "backends.key_bounds")
