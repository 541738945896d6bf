"""Shadow mode over real sockets: nobody swaps before all have verified, and what fails before that
has changed nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from functools import partial

import pytest
from pydantic import ValidationError

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import ErrorCode, Resync
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.state import State, after_restart
from orchestrator.storage.journal import Journal
from tests.orchestrator.changing import start, train
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run

WAY = ["durable", "shadowed", "paused", "applying", "finished", "verified", "committed"]


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path, replicas=2, mode="shadow") as r:
        yield r


def failures(run):
    """Train once: the result, and what the failed attempts left behind."""
    seen = []
    result = run.client.run(
        JOB, buffers=BUFFERS, on_progress=lambda p: seen.append((p.phase, p.detail))
    )
    return result, [detail for phase, detail in seen if phase == "failed"]


def test_received_beside_by_all_then_swapped_by_all(run):
    _, nodes = start(run, replicas=2)
    result = train(run)
    assert (result.mode, result.why_in_place, result.sent, result.states) == (
        "shadow",
        None,
        "changed",
        WAY,
    )
    assert {"shadow", "apply", "pause", "receive_wire", "wire"} <= set(result.seconds)
    for node in nodes:
        assert node.served == [(0, [10, 20, 30]), (1, [10, 21, 30])]
        assert node.log[-4:] == ["PrepareShadow", "ReceiveWeights", "SwapWeights", "CommitUpdate"]
    whole = run.client.run(Resync())  # everything fits as well
    assert (whole.mode, whole.sent) == ("shadow", "full") and nodes[0].served[-1] == (
        1,
        [10, 21, 30],
    )
    journal = Journal(run.dir / "journal.sqlite", run_token=TOKEN, name="m")
    steps = [state for version, state in journal.publication_steps() if version == 1]
    assert steps[:8] == ["planned", *WAY]
    journal.close()


def test_a_single_replica_commits_with_its_swap_and_only_what_verifies(tmp_path):
    with Run(tmp_path, replicas=1, mode="shadow") as run:
        _, (node,) = start(run)
        result = train(run)
        assert (result.mode, result.states) == (
            "shadow",
            WAY,
        ) and run.client.status().version == 1
        assert node.committed_by_itself == [1] and node.served == [
            (0, [10, 20, 30]),
            (1, [10, 21, 30]),
        ]
        node.flip_swap = True
        result, failed = failures(run)
        assert [f["left"] for f in failed] == ["poisoned"] and (
            result.attempts,
            result.sent,
        ) == (2, "full")
        assert node.committed_by_itself == [1] and node.served[-1] == (2, [10, 22, 30])


@pytest.mark.parametrize(("answers", "left"), [(True, "idle"), (False, "poisoned")])
def test_a_single_replica_that_may_have_committed_is_not_said_to_serve_the_old_version(
    answers, left, tmp_path
):
    with Run(tmp_path, replicas=1, mode="shadow") as run:
        trainer, (node,) = start(run)
        back = threading.Timer(1.0, run.replica, (trainer, 0))

        def vanish(_):
            node.link.close()
            back.start()

        node.script["SwapWeights"] = (
            partial(node.refuse, code=ErrorCode.TRANSFER_FAILED) if answers else vanish
        )
        result, failed = failures(run)
        assert [f["left"] for f in failed] == [left] and failed[0]["state"] == (
            "paused" if answers else "applying"
        )
        assert (result.attempts, result.sent) == (2, "full")
        if not answers:
            back.join()


def test_what_a_single_replica_may_commit_is_journaled_before_it_may(tmp_path):
    with Run(tmp_path, replicas=1, mode="shadow") as run:
        _, (node,) = start(run)
        on_swap, seen = node.on_SwapWeights, []

        def look_first(message):
            with contextlib.closing(sqlite3.connect(run.dir / "journal.sqlite")) as journal:
                seen.extend(journal.execute("SELECT digest FROM digests WHERE version = 1"))
            on_swap(message)

        node.script["SwapWeights"] = look_first
        train(run)
        assert node.committed_by_itself == [1] and len(seen) == 1


def test_what_a_canary_or_a_second_replica_must_agree_to_is_not_committed_with_the_swap(tmp_path):
    with Run(tmp_path, replicas=2, mode="shadow") as run:
        _, nodes = start(run, replicas=2)
        train(run)
        assert [n.committed_by_itself for n in nodes] == [[], []] and [
            n.served[-1][0] for n in nodes
        ] == [1, 1]
    with Run(tmp_path / "canary", replicas=1, mode="shadow") as run:
        _, (node,) = start(run)
        assert run.client.run(Resync()).mode == "shadow"  # everything: the canary is due
        assert node.committed_by_itself == [] and node.log[-2:] == ["CheckCanary", "CommitUpdate"]


def test_nothing_served_yet_or_no_room_on_one_goes_in_place_and_says_why(run):
    _, nodes = start(run, replicas=2)
    assert [n.log.count("SwapWeights") for n in nodes] == [0, 0]  # @0
    nodes[1].why_not = "it brings too much"
    result = train(run)
    assert (result.mode, result.why_in_place) == (
        "in_place",
        "inference-1: it brings too much",
    )
    assert "shadowed" not in result.states and [n.log.count("SwapWeights") for n in nodes] == [
        0,
        0,
    ]


def test_a_digest_that_differs_beside_swaps_nobody_and_poisons_nobody(run):
    _, (good, bad) = start(run, replicas=2)
    bad.flip = True
    result, failed = failures(run)
    assert (
        [f["left"] for f in failed] == ["idle"]
        and "w1" in failed[0]["error"]
        and "none of it is used" in failed[0]["error"]
    )
    assert bad.aborted.is_set() and good.aborted.is_set()  # the second copy is dropped
    assert result.attempts == 2 and (result.mode, result.sent) == (
        "shadow",
        "changed",
    )  # they hold @0 as before
    assert good.log.count("SwapWeights") == bad.log.count("SwapWeights") == 1
    assert good.served == bad.served == [(0, [10, 20, 30]), (1, [10, 21, 30])]


def breaking(node):
    """It refuses every update from now on."""

    def broken(message):
        node.script["ReceiveWeights"] = broken
        node.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    node.script["ReceiveWeights"] = broken


def test_a_transfer_that_breaks_leaves_the_version_served_for_good(run):
    _, nodes = start(run, replicas=2)
    for node in nodes:
        breaking(node)
    with pytest.raises(JobFailed, match="m@0 is still served"):
        train(run)
    assert run.client.status().publication == "idle" and run.client.status().version == 0
    assert all(n.log.count("SwapWeights") == 0 and n.served == [(0, [10, 20, 30])] for n in nodes)
    for node in nodes:
        node.script.clear()
    assert train(run).version == 2


def test_a_replica_whose_transfers_break_does_not_keep_the_alias_back(run):
    _, (good, bad) = start(run, replicas=2)
    breaking(bad)
    result, failed = failures(run)
    assert [f["left"] for f in failed] == ["idle", "idle"] and set(result.left_out) == {
        "inference-1"
    }
    assert (
        good.served[-1] == (1, [10, 21, 30])
        and bad.left_alias
        and bad.log.count("SwapWeights") == 0
    )


def test_a_swap_that_fails_on_one_is_left_out_and_on_all_heals_whole(run):
    _, (good, bad) = start(run, replicas=2)
    bad.flip_swap = True
    result, failed = failures(run)
    assert (
        not failed
        and "live tensors" in result.left_out["inference-1"]
        and good.served[-1] == (1, [10, 21, 30])
    )
    assert soon(lambda: bad.served[-1] == (1, [10, 21, 30]))
    good.flip_swap = bad.flip_swap = True
    result, failed = failures(run)
    assert [f["left"] for f in failed] == ["poisoned"] and result.left_out == {}
    assert (result.attempts, result.sent) == (2, "full")
    assert good.served[-1] == bad.served[-1] == (2, [10, 22, 30])


def test_an_orchestrator_that_dies_while_it_lies_beside_still_serves_the_version():
    begun = [
        (0, s)
        for s in ("planned", "durable", "paused", "applying", "finished", "verified", "committed")
    ]
    shadowed = [(1, s) for s in ("planned", "durable", "shadowed")]
    assert after_restart([*begun, *shadowed]) == (0, State.IDLE)
    assert after_restart([*begun, *shadowed, (1, "failed:shadowed")]) == (0, State.IDLE)
    assert after_restart([*begun, *shadowed, (1, "paused")]) == (None, State.POISONED)


@pytest.mark.parametrize("mode", ["in_place", "shadow"])
def test_a_replica_is_told_how_long_pinned_requests_may_go_on(tmp_path, mode):
    with Run(tmp_path, mode=mode, drain_s=7.5) as run:
        _, (node,) = start(run, replicas=1)
        train(run)
        assert node.drains == [7.5, 7.5]


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "behind"},
        {"mode": "shadow", "shadow_bytes": 0},
        {"transport": "udp"},
        {"pause_mode": "never"},
        {"drain_s": -1.0},
        {"drain_s": 76.0, "transfer_timeout_s": 300.0},
    ],
)
def test_bad_options_are_refused(bad):
    with pytest.raises(ValidationError, match=list(bad)[-1] if "drain_s" not in bad else "drain_s"):
        PublicationConfig(**bad)
