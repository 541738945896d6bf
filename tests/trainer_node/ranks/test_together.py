"""All ranks join the workers, or none; and one rank's abort reaches the others. Real gloo ranks."""

from __future__ import annotations

from trainer_node.ranks.abort_signal import AbortSignal


def test_an_abort_reaches_the_other_rank(torchrun):
    torchrun(2, "ranks.abort_signal")


def test_a_lone_rank_has_no_signal():
    signal = AbortSignal()
    signal.raise_("nobody hears it")
    with signal.watching(lambda reason: None):
        signal.raise_("nor this")
    assert signal._store is None


def test_all_ranks_join_or_none(torchrun):
    torchrun(2, "ranks.joins")
