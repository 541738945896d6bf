"""When a publication sends only changed elements: on top of the served version, to replicas that
hold it, and never after a failure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.errors import PublicationError
from orchestrator.protocol.messages import EncodeChanges, ErrorCode, Resync
from orchestrator.publication.choice import Rates, choose, remembers
from orchestrator.publication.ledger import Ledger
from orchestrator.publication.state import State
from tests.orchestrator.changing import CHANGING, PART, start, train
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import Run
from tests.orchestrator.virtual import MemoryJournal


@pytest.fixture(params=[True, False])
def has_room(request):
    """Whether a replica has room next to its live numbers. Without it, elements come in place."""
    return request.param


@pytest.fixture
def run(has_room, tmp_path):
    with Run(tmp_path, send="elements", mode="in_place") as run:
        original = run.replica

        def replica(trainer, index=0):
            node = original(trainer, index)
            node.why_not = None if has_room else "no room"
            return node

        run.replica = replica
        yield run


def test_only_elements_travel_and_the_report_says_so(run, has_room):
    trainer, (replica,) = start(run)
    first = train(run)
    assert first.mode == ("shadow" if has_room else "in_place")
    assert (first.sent, first.bytes_sent, first.changed_elements) == ("elements", 8, 1)
    assert (first.num_tensors, first.num_verified) == (2, 2)
    assert first.why_sent == "publication.send is 'elements'" and "encode" in first.seconds
    assert train(run).sent == "elements"
    assert replica.bases == [None, 0, 1]
    assert replica.served[-1] == (2, [10, 22, 30])
    resync = run.client.run(Resync())
    assert (resync.sent, resync.changed_elements) == ("full", None)
    assert train(run).sent == "elements"
    asked = [m for m in trainer.messages if isinstance(m, EncodeChanges)]
    assert [m.base_version for m in asked] == [0, 1, 2]


def test_after_a_wrong_digest_everything_is_sent(run, has_room):
    _, (replica,) = start(run)
    replica.flip_swap, replica.flip = has_room, not has_room
    result = train(run)
    assert (result.attempts, result.sent) == (2, "full")
    assert replica.served[-1] == (1, [10, 21, 30])
    replica.flip_swap = False
    assert train(run).sent == "elements"


def test_elements_that_always_fail_are_tried_less_and_less_often(run, has_room):
    """A replica is poisoned each time."""
    _, (replica,) = start(run)
    original = replica.on_ReceiveWeights

    def flipping(message) -> None:
        wrong = message.elements
        replica.flip_swap, replica.flip = wrong and has_room, wrong and not has_room
        original(message)

    replica.on_ReceiveWeights = flipping
    tried = [train(run).attempts == 2 for _ in range(12)]
    assert tried == [n in (0, 1, 4, 9) for n in range(12)]
    assert train(run).why_sent == "changed elements failed 4 times in succession"


def test_a_failed_encoding_is_not_tried_again_for_this_version(run):
    trainer, (replica,) = start(run)
    trainer.script["EncodeChanges"] = lambda m: trainer.refuse(m, code=ErrorCode.INTERNAL)
    result = train(run)
    assert (result.attempts, result.sent) == (2, "full")
    assert replica.served[-1] == (1, [10, 21, 30])


def replaced(run, trainer, replica):
    """Another process in the trainer's place."""
    trainer.die()
    successor = run.trainer()
    successor.manifest = CHANGING
    replica.source, replica.changes = lambda: successor.weights, lambda: successor.changes
    return successor


def test_another_trainer_process_that_cannot_read_the_version_sends_everything_first(run):
    trainer, (replica,) = start(run)
    assert train(run).sent == "elements"
    replaced(run, trainer, replica)
    first = train(run)
    assert (first.sent, first.why_sent) == ("full", "version 1 is not remembered")
    assert train(run).sent == "elements"


def test_another_trainer_process_proves_what_it_read_and_sends_elements_of_all_tensors(run):
    trainer, (replica,) = start(run)
    assert train(run).sent == "elements"
    successor = replaced(run, trainer, replica)
    successor.recalls = True
    first = train(run)
    assert (first.sent, first.num_tensors, first.num_verified) == ("elements", 3, 3)
    assert replica.served[-1] == (2, [10, 22, 30])
    second = train(run)
    assert (second.sent, second.num_tensors) == ("elements", 2), "it has verified all tensors"
    asked = [m for m in successor.messages if isinstance(m, EncodeChanges)]
    assert [m.base_dir.rpartition("/")[2] for m in asked] == ["1", "2"]


def test_another_trainer_process_that_makes_other_weights_of_the_version_sends_everything(run):
    trainer, (replica,) = start(run)
    successor = replaced(run, trainer, replica)
    successor.recalls = True
    original = successor.on_TrainMerged

    def changed_on_disk(message) -> None:
        before = Path(message.checkpoint_dir).with_name("0") / "weights"
        before.write_text("10 20 31")
        original(message)

    successor.on_TrainMerged = changed_on_disk
    result = train(run)
    assert (result.sent, result.attempts) == ("full", 1)
    assert "the trainer's adapters of version 0 do not make what is served" in result.why_sent
    assert replica.served[-1] == (1, [10, 21, 30])
    assert train(run).sent == "elements"


# ------------------------------------------------------------ another orchestrator


def test_a_resumed_orchestrator_proves_what_is_served_with_no_bytes(run):
    """Nobody knows what the replica heard last. It says that it serves the version, the trainer
    proves that it has it, and the replica's digests of all tensors show that it holds it."""
    trainer, (replica,) = start(run)
    assert train(run).sent == "elements"
    before = run.orchestrator._publisher._elements.rates.kept()
    run.resume()
    assert soon(lambda: len(replica.served) == 3)
    found = run.orchestrator._publisher._elements.rates.kept()
    assert found == before, "what has no bytes says nothing of an update"
    assert replica.served[2] == (1, [10, 21, 30]) and replica.bases[-1] == 1
    (asked,) = [m for m in trainer.messages if isinstance(m, EncodeChanges)][1:]
    assert (asked.version, asked.base_version, asked.prove, asked.changed_only) == (
        1,
        1,
        True,
        False,
    )
    second = train(run)
    assert (second.sent, second.num_tensors) == ("elements", 2), "it has verified all tensors"
    assert not trainer.messages[-2].prove and replica.served[-1] == (2, [10, 22, 30])


def test_a_replica_that_a_resumed_orchestrator_hears_later_proves_it_too(tmp_path):
    with Run(tmp_path, send="elements", replicas=2) as run:
        trainer, (one, other) = start(run, replicas=2)
        assert train(run).sent == "elements"
        run.resume()
        ledger = run.orchestrator._publisher._ledger
        assert soon(lambda: len(ledger.holding) == 2)
        seen = len(one.served)
        run.loop.call_soon_threadsafe(ledger.holding.pop, "inference-1")
        assert soon(lambda: len(other.served) == 4)
        assert other.bases == [None, 0, 1, 1] and len(one.served) == seen
        assert [m.prove for m in trainer.messages if isinstance(m, EncodeChanges)][1:] == [True] * 2
        # Else the restart comes before the commit of what it has just received.
        assert soon(lambda: "inference-1" in ledger.holding)
        other.restarted()
        assert soon(lambda: len(other.served) == 5) and other.bases[-1] is None
        assert train(run).sent == "elements"


def test_a_job_that_waits_for_a_resumed_orchestrator_sends_elements_of_all_tensors(run):
    trainer, (replica,) = start(run)
    assert train(run).sent == "elements"

    def train_after_a_resume(message) -> None:
        run.resume()
        trainer.on_TrainMerged(message)

    trainer.script["TrainMerged"] = train_after_a_resume
    result = train(run)
    assert (result.sent, result.num_tensors, result.num_verified) == ("elements", 3, 3)
    assert replica.bases[-1] == 1 and len(replica.served) == 3
    assert replica.served[-1] == (2, [10, 22, 30])


@pytest.mark.parametrize("lost", ["replica", "journal", "trainer"])
def test_a_resumed_orchestrator_sends_everything_where_something_is_not_known(run, lost):
    """The replica was started again, an earlier release wrote the journal, or the trainer has
    other weights than were served."""
    trainer, (replica,) = start(run)
    assert train(run).sent == "elements"
    if lost == "replica":
        replica.restarted()
        replica.serves = None
        assert soon(lambda: len(replica.served) == 3)
        replica.serves = None
    elif lost == "journal":
        journal = run.orchestrator._journal
        run.loop.call_soon_threadsafe(journal.set_facts, {"publications": None})
    else:
        trainer.remembered = (1, [10, 21, 31])
    count, asked = len(replica.served), len(replica.bases)
    run.resume()
    assert soon(lambda: len(replica.served) > count)
    assert replica.bases[asked:] == [None] and replica.served[-1] == (1, [10, 21, 30])
    assert train(run).sent == "elements"


def test_a_resync_after_a_resume_is_whole(run):
    """A user who asks for everything gets it."""
    _, (replica,) = start(run)
    assert train(run).sent == "elements"
    run.resume()
    assert run.client.run(Resync()).sent == "full"
    assert replica.served[-1] == (1, [10, 21, 30])


def test_a_resumed_orchestrator_knows_what_it_measured(tmp_path):
    with Run(tmp_path, send="auto") as run:
        start(run)
        train(run)
        rates = run.orchestrator._publisher._elements.rates
        rates.coded(10**9, 10**6, 1.0)
        train(run)
        before = rates.kept()
        assert before["link"] and before["coding"] and before["share"]
        run.resume()
        assert soon(lambda: run.orchestrator._publisher._elements.rates.kept() == before)


def test_full_updates_stay_due_over_resumes(tmp_path):
    with Run(tmp_path, send="elements", full_every=4) as run:
        _, (replica,) = start(run)
        assert train(run).sent == "elements"
        run.resume()
        assert soon(lambda: len(replica.served) == 3) and replica.bases[-1] == 1
        assert [train(run).sent for _ in range(3)] == ["elements", "full", "elements"]


def test_a_trainer_that_sent_another_version_last_says_so(run):
    trainer, _ = start(run)
    trainer.remembered = (7, [0, 0, 0])
    result = train(run)
    assert (result.sent, result.why_sent) == ("changed", "version 0 is not remembered")


def test_a_code_that_is_hardly_smaller_is_not_sent(run):
    trainer, _ = start(run)
    trainer.code_bytes = 60
    result = train(run)
    assert (result.sent, result.why_sent) == ("changed", "too many bytes")


def test_a_replica_behind_gets_everything_and_then_elements(tmp_path):
    with Run(tmp_path, send="elements", replicas=2) as run:
        _, (one, other) = start(run, replicas=2)
        assert train(run).sent == "elements"
        other.restarted()
        assert soon(lambda: len(other.served) >= 3)
        assert one.bases == [None, 0] and other.bases == [None, 0, None]
        assert train(run).sent == "elements" and one.bases[-1] == other.bases[-1] == 1


def test_requests_that_end_first_do_not_make_a_link_slow(tmp_path):
    with Run(tmp_path, mode="in_place", send="auto", pause_mode="wait") as run:
        _, (replica,) = start(run)
        original = replica.on_ReceiveWeights

        def drained(message) -> None:
            time.sleep(0.5)
            original(message)

        replica.on_ReceiveWeights, replica.pause_s = drained, 0.5
        assert train(run).bytes_sent == 64
        assert 64 / run.orchestrator._publisher._elements.rates._link[-1] < 0.3


def test_a_full_update_that_is_due_comes_as_tensors(tmp_path):
    with Run(tmp_path, send="elements", full_every=3) as run:
        start(run)
        kinds = ["elements", "elements", "full", "elements"]
        assert [train(run).sent for _ in range(4)] == kinds


def test_elements_of_all_tensors_are_no_full_update(ledger):
    ledger.state = State.COMMITTED
    ledger.verified(1, is_full=True)
    ledger.committed(1, holding={"one": "life 1"}, trainer="trainer 2", is_full=True)
    assert not ledger.is_due(3) and ledger.is_due(2)
    is_part = {"lives": {"one": "life 1"}, "full_every": 3}
    assert ledger.may_send_part(2, trainer="trainer 2", **is_part)
    assert not ledger.may_send_part(2, trainer="trainer 1", **is_part)


def test_tensors_that_were_not_verified_travel_whole(tmp_path):
    """Their index counts in what is sent."""
    with Run(tmp_path, send="elements") as run:
        trainer, (replica,) = start(run)
        assert replica.part == PART
        run.orchestrator._publisher._ledger.unread = frozenset({"w2"})
        assert train(run).sent == "elements"
        asked = [m for m in trainer.messages if isinstance(m, EncodeChanges)]
        assert asked[0].unread == (1,)


# ------------------------------------------------------------ the arithmetic


def rates(*, link: float | None, encoding: float | None = None, share: float = 0.05) -> Rates:
    found = Rates()
    if link is not None:
        for _ in range(2):
            found.sent(10**9, 10**9 / link)
    if encoding is not None:
        travel_s = share * 10**9 / link if link else 0.0
        found.coded(10**9, int(share * 10**9), 10**9 / encoding + travel_s)
    return found


@pytest.mark.parametrize(
    ("found", "nbytes", "elements", "why"),
    [
        (rates(link=None), 10**10, False, "not measured yet"),
        (rates(link=370e9), 61 * 10**9, False, "whole tensors take 0.16 s"),
        (rates(link=12.5e9), 61 * 10**9, True, "would take 4.88 s, changed elements 2.44 s"),
        (rates(link=1.25e9, encoding=1e11), 61 * 10**9, True, "48.8 s, changed elements 3.05 s"),
        (rates(link=1.25e9, encoding=1e9), 61 * 10**9, False, "48.8 s, changed elements 63.4 s"),
        (rates(link=1e8, encoding=1e11, share=0.9), 10**10, False, "100 s, changed elements 90.1"),
    ],
)
def test_the_choice_is_arithmetic(found, nbytes, elements, why):
    choice = choose("auto", nbytes, found)
    assert choice.elements is elements and why in choice.why


def test_a_forced_choice_says_so():
    assert choose("elements", 1, Rates()).elements
    assert not choose("tensors", 10**12, rates(link=1.0)).elements


def test_the_trainer_remembers_only_what_may_be_needed():
    slow, fast, first = rates(link=1e6), rates(link=1e12), Rates()
    assert remembers("auto", 10**9, slow)
    assert not remembers("auto", 10**9, first), "the next update is of whole tensors too"
    first.sent(10**9, 0.1)
    assert not remembers("auto", 10**9, first), "it was fast, even while it warmed up"
    first = Rates()
    first.sent(10**9, 10.0)
    assert remembers("auto", 10**9, first)
    assert not remembers("auto", 10**9, fast) and not remembers("tensors", 10**9, slow)
    assert remembers("elements", 10**9, fast)


def test_one_slow_transfer_decides_nothing():
    """The first one may have warmed up."""
    found = Rates()
    found.sent(10**9, 100.0)
    assert found.link is None
    found.sent(10**9, 0.01)
    found.sent(10**9, 100.0)
    assert found.link == 1e11


def test_what_the_link_takes_is_no_coding():
    found = rates(link=1e9, encoding=2e9, share=0.5)
    assert found.coding == pytest.approx(2e9) and found.share == 0.5


# ------------------------------------------------------------ the ledger


@pytest.fixture
def ledger():
    """@0 is served by two replicas, and this trainer sent it."""
    found = Ledger(MemoryJournal())
    for state in (State.PLANNED, State.DURABLE, State.PAUSED, State.APPLYING):
        found.step(state, 0)
    for state in (State.FINISHED, State.VERIFIED, State.COMMITTED):
        found.step(state, 0)
    held = {"one": "life 1", "other": "life 2"}
    found.verified(0, is_full=True, unread=["packed"])
    found.committed(0, holding=held, trainer="trainer 1", is_full=True)
    return found


def may(ledger, version=1, **lives):
    return ledger.may_send_elements(version, lives=lives, serves={})


def test_elements_need_the_same_lives_and_the_next_version(ledger):
    assert may(ledger, one="life 1", other="life 2") and may(ledger, one="life 1")
    assert not may(ledger, one="life 1", other="life 3")
    assert not may(ledger, one="life 1", third="life 1")
    assert not may(ledger, 0, one="life 1")


def test_after_any_failure_whole_tensors_travel(ledger):
    failed = PublicationError("any")
    ledger.failed(1, failed, failed_in=State.PLANNED, left=State.IDLE, lost=())
    assert ledger.version == 0 and not may(ledger, one="life 1", other="life 2")


def test_what_cannot_be_read_is_remembered_until_everything_is_sent_again(ledger):
    def committed(version, *, is_full, unread):
        ledger.state = State.COMMITTED
        ledger.verified(version, is_full=is_full, unread=unread)
        ledger.committed(version, holding={}, trainer="t", is_full=is_full)
        return ledger.unread

    assert ledger.unread == {"packed"}
    assert committed(1, is_full=False, unread=None) == {"packed"}
    assert committed(2, is_full=False, unread=["more"]) == {"packed", "more"}
    assert committed(2, is_full=True, unread=[]) == {"packed", "more"}, (
        "only a late replica took it"
    )
    assert committed(3, is_full=True, unread=[]) == set()
