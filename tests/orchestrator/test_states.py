"""Pure parts: publication states, liveness, digests, a trainer's sizes."""

from __future__ import annotations

import array

import pytest

from orchestrator.control.liveness import lost_peers, stalled
from orchestrator.errors import PublicationError, VerificationError
from orchestrator.protocol.config import LoraConfig, ParallelConfig
from orchestrator.protocol.messages import Manifest, TensorSpec
from orchestrator.publication.state import REVERSIBLE, State, advance, after_failure
from orchestrator.publication.verification import digest_mismatches


@pytest.mark.parametrize("more", [(), (State.SHADOWED,)])
def test_the_two_ways_through_a_publication(more):
    way = [
        State.PLANNED,
        State.DURABLE,
        *more,
        State.PAUSED,
        State.APPLYING,
        State.FINISHED,
        State.VERIFIED,
        State.COMMITTED,
        State.IDLE,
    ]
    state = State.IDLE
    for to in way:
        for other in (
            set(State)
            - {to}
            - ({State.SHADOWED, State.PAUSED} if state is State.DURABLE else set())
        ):
            with pytest.raises(PublicationError):
                advance(state, other)
        state = advance(state, to)
    assert advance(State.POISONED, State.PLANNED) is State.PLANNED


@pytest.mark.parametrize("state", list(State))
def test_failures_before_the_first_byte_change_nothing_and_later_ones_poison(state):
    assert after_failure(state, was_poisoned=True) is State.POISONED
    expected = State.IDLE if state in REVERSIBLE else State.POISONED
    assert after_failure(state, was_poisoned=False) is expected
    assert (state in REVERSIBLE) == (state in {"idle", "planned", "durable", "shadowed", "paused"})


def test_liveness_is_a_function_of_clock_and_last_seen():
    seen = {"a": 0.0, "b": 9.0, "c": 4.0}
    assert lost_peers(last_seen_s=seen, now_s=10.0, lost_after_s=5.0) == ("a", "c")
    assert lost_peers(last_seen_s=seen, now_s=5.0, lost_after_s=5.0) == ()
    assert stalled(started_s=0, last_progress_s=9, now_s=10, deadline_s=20, stall_after_s=5) is None
    assert "deadline" in stalled(
        started_s=0, last_progress_s=9, now_s=21, deadline_s=20, stall_after_s=50
    )
    assert "progress" in stalled(
        started_s=0, last_progress_s=1, now_s=10, deadline_s=20, stall_after_s=5
    )


def test_digest_mismatches_names_the_tensor():
    manifest = Manifest(
        tensors=tuple(TensorSpec(name=n, dtype="float32", shape=(1,)) for n in "abc")
    )
    sent = array.array("q", [1, -2, 3]).tobytes()
    assert digest_mismatches(manifest=manifest, sent=sent, live=sent) == []
    live = array.array("q", [1, 2, 3]).tobytes()
    assert digest_mismatches(manifest=manifest, sent=sent, live=live) == ["b"]
    assert digest_mismatches(manifest=manifest, sent=sent, live=live, unverified=["b"]) == []
    with pytest.raises(VerificationError):
        digest_mismatches(manifest=manifest, sent=sent, live=live[:8])


def test_lora_and_parallel_configs_refuse_nonsense():
    with pytest.raises(ValueError, match="targets"):
        LoraConfig(targets=("q_proj", "embed_tokens"))
    with pytest.raises(ValueError, match="multiple"):
        ParallelConfig(tensor=2, world_size=3)
