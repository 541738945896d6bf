"""Both merges of real Megatron models, and the elements that differ; see `changes`."""

from __future__ import annotations


def test_changed_elements_make_what_would_be_sent(models, torchrun) -> None:
    torchrun(1, "export.changes", models["dense_tied"], models["moe"])
