"""Both merges of real Megatron models, and the elements that differ; see `changes`."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

from orchestrator.protocol.messages import SendWeights


def test_changed_elements_make_what_would_be_sent(models, torchrun) -> None:
    torchrun(1, "export.changes", models["dense_tied"], models["moe"])


def test_every_rank_notes_that_changed_elements_were_sent() -> None:
    """Also one that sends nothing itself: ranks that differ in it hang in the next job's
    collectives (`gap_split.is_due`)."""
    from trainer_node.publication import Publication  # loads Megatron

    publication = Publication.__new__(Publication)
    publication._trainer = SimpleNamespace(steps_since_sent=3, sent=SimpleNamespace(version=0))
    publication._lockstep = SimpleNamespace(agree=nullcontext)
    chunks = SimpleNamespace(steps=None, export=None)
    publication._transfer = SimpleNamespace(choose=lambda changed_only: chunks)
    request = SimpleNamespace(link=None, message=SendWeights(deadline_s=1, version=1))
    publication._send_changes(request, None)
    assert publication._trainer.steps_since_sent == 0
    assert publication._trainer.sent.version == 1
