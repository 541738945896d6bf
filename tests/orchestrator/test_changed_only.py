"""When a publication sends everything, and when only what training changes: after every kind of
loss, everything.
"""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.protocol.messages import (
    ErrorCode,
    InitialSync,
    Manifest,
    Publish,
    Resync,
)
from orchestrator.publication.config import PublicationConfig
from tests.orchestrator.changing import CHANGING, PART, start, train
from tests.orchestrator.fake_nodes import MANIFEST, soon
from tests.orchestrator.run import Run


def test_only_what_changes_is_sent_and_the_report_says_so(run):
    trainer, (replica,) = start(run)
    result = train(run)
    assert (
        result.sent,
        result.num_tensors,
        result.num_verified,
        result.bytes_sent,
    ) == ("changed", 2, 2, 64)
    assert train(run).sent == "changed" and run.client.run(Publish()).sent == "changed"
    assert replica.bases == [None, 0, 1, 2]
    assert replica.served[:2] == [(0, [10, 20, 30]), (1, [10, 21, 30])]  # w0 stayed what @0 brought
    assert trainer.part == PART and trainer.log.count("UseLayout") == 2
    assert run.client.run(Resync()).sent == "full"
    assert train(run).sent == "changed"


def test_after_a_poisoned_publication_everything_is_sent(run):
    _, (replica,) = start(run)
    replica.flip = True
    result = train(run)
    assert result.attempts == 2 and result.sent == "full" and replica.bases == [None, 0, None]
    assert replica.served[-1] == (1, [10, 21, 30])
    assert train(run).sent == "changed"


def test_a_replica_that_lacks_the_base_gets_everything(run):
    _, (replica,) = start(run)
    replica.script["ReceiveWeights"] = lambda m: replica.refuse(m, code=ErrorCode.BASE_MISSING)
    result = train(run)
    assert (
        result.attempts == 2 and result.sent == "full" and replica.served[-1] == (1, [10, 21, 30])
    )


def test_one_replica_started_anew_gets_everything_and_the_other_goes_on(tmp_path):
    with Run(tmp_path, replicas=2) as run:
        _, (one, other) = start(run, replicas=2)
        assert train(run).sent == "changed"
        other.restarted()
        assert soon(lambda: len(other.served) >= 3)
        assert one.bases == [None, 0] and other.bases == [None, 0, None]
        assert train(run).sent == "changed" and one.bases[-1] == other.bases[-1] == 1


def test_replicas_with_other_layers_get_everything(tmp_path):
    with Run(tmp_path, replicas=2) as run:
        trainer = run.trainer()
        trainer.manifest = CHANGING
        for index, part in enumerate([PART, (0, 1)]):
            run.replica(trainer, index).part = part
        run.client.run(InitialSync())
        assert train(run).sent == "full"


def test_another_trainer_process_sends_everything_first(run):
    trainer, (replica,) = start(run)
    assert train(run).sent == "changed"
    trainer.die()
    successor = run.trainer()
    successor.manifest = CHANGING
    replica.source = lambda: successor.weights
    assert train(run).sent == "full" and train(run).sent == "changed"


def test_a_full_refresh_every_third(tmp_path):
    with Run(tmp_path, full_every=3) as run:
        start(run)
        assert [train(run).sent for _ in range(4)] == ["changed", "changed", "full", "changed"]


def test_full_every_one_is_always_full_and_zero_is_refused(tmp_path):
    with Run(tmp_path, full_every=1) as run:
        start(run)
        assert train(run).sent == "full"
    with pytest.raises(ValidationError, match="full_every"):
        PublicationConfig(transport="tcp", full_every=0)


@pytest.mark.parametrize("changed", [(), (2, 1), (1, 1), (3,), (-1,)])
def test_a_manifest_refuses_indices_that_are_not_its_own(changed):
    with pytest.raises(ValueError, match="changed"):
        Manifest(tensors=MANIFEST.tensors, changed=changed)
