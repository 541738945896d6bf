"""Each invariant finds a hand-made history that violates it, and says nothing of one
that does not.
"""

from __future__ import annotations

import itertools

import pytest

from tests.chaos import checker

BASE = "0" * 16


class Story:
    """A history, one event a second."""

    def __init__(self):
        self.events, self.clock, self.jobs = [], itertools.count(), 0

    def note(self, what, **facts):
        self.events.append({"t": float(facts.pop("t", next(self.clock))), "what": what, **facts})
        return self

    def job(
        self,
        kind="ForwardBackward",
        outcome="completed",
        *,
        runs=(),
        version=None,
        message="",
        batch=None,
        told=None,
        **facts,
    ):
        """Submitted, run (pairs of before and after), told and journaled."""
        self.jobs += 1
        job = f"job-{self.jobs}"
        self.note("submit", job=job, kind=kind, batch=batch, **facts)
        for before, after in runs:
            ran = checker._OWN_REQUEST[kind][0]
            self.note(
                "ran",
                job=job,
                kind=ran,
                life="a",
                ended="Completed",
                before=list(before),
                after=list(after),
            )
        self.note("outcome", job=job, outcome=told or outcome, version=version, message=message)
        return self.note(
            "journaled", job=job, kind=kind, outcome=outcome, number=self.jobs, message=message
        )

    def made(self, version, content, state="s"):
        return self.note(
            "made", version=version, content=content, state=state, folder=f"/run/versions/{version}"
        )

    def serves(self, version, content, node="inference-0"):
        return self.note("serves", node=node, version=version, content=content)

    def says(self, **limits):
        return checker.check(self.events, **limits)


def good() -> Story:
    """@0, a batch, a step with it, @1."""
    story = Story().made(0, "c0", BASE)
    story.job("InitialSync", runs=[([BASE], [BASE])], version=0).note(
        "committed", version=0
    ).serves(0, "c0")
    story.job(runs=[([BASE], [BASE, "b1"])], batch="b1")
    story.job("TrainMerged", runs=[([BASE, "b1"], ["x"])], batch="b2", version=1)
    return (
        story.made(1, "c1", "x")
        .note("committed", version=1)
        .serves(1, "c1")
        .note("healed")
        .note("final", healthy_s=1.0)
    )


def test_a_good_history_violates_nothing():
    assert good().says() == []


def probes(**last):
    story, first = good(), {"rss": 10**8, "descriptors": 30, "threads": 8}
    for number in range(20):
        story.note(
            "probe",
            life=1,
            jobs=20 * number,
            **{k: v if number < 10 else last.get(k, v) for k, v in first.items()},
        )
    return story


BAD = {
    "one outcome: job-3 was told": good().note("outcome", job="job-3", outcome="failed", code="x"),
    "one outcome: job-4 was told completed, the journal says": good().job(
        "Forward", outcome="failed", told="completed"
    ),
    "one outcome: job-3 stands in the journal": good().note(
        "journaled", job="job-3", kind="Forward", number=9, outcome="failed"
    ),
    "one outcome: job-9 stands": good().note(
        "journaled", job="job-9", kind="Forward", number=9, outcome="open"
    ),
    "runs once: job-4 ran twice": good().job(
        runs=[(["x"], ["x", "b3"]), (["x", "b3"], ["x", "b3", "b3"])], batch="b3"
    ),
    "runs once: job-4 was cancelled, and ran": good().job(
        outcome="cancelled", runs=[(["x"], ["x", "b3"])]
    ),
    "runs once: job-4 put a batch": good()
    .job("TrainMerged", runs=[(["x"], ["y"])], batch="b1", version=2)
    .made(2, "c2", "y"),
    "nothing lost: job-4": good().job(runs=[([BASE], [BASE, "b3"])], batch="b3"),
    "nothing lost: job-5": good()
    .job(runs=[(["x"], ["x", "b3"])], batch="b3")
    .job("OptimStep", runs=[(["x"], ["z"])]),
    "one content: @1 was c1 and is c9": good().serves(1, "c9"),
    "one content: inference-0 serves c7 as @2": good()
    .note("committed", version=2)
    .made(2, "c2")
    .serves(2, "c7"),
    "committed: inference-0 serves @2": good().made(2, "c2").serves(2, "c2"),
    "by one: job-4 made @1 after @1": good().job("Publish", runs=[(["x"], ["x"])], version=1),
    "by one: job-4 made @3 after @1": good()
    .made(2, "c")
    .made(3, "c")
    .job("Publish", runs=[(["x"], ["x"])], version=3),
    "by one: versions were made with gaps: [2]": good().made(3, "c3"),
    "in time: job-9 (Forward) has no outcome": good().note("submit", job="job-9", kind="Forward"),
    "in time: job-9 (Forward) took 70 s": good()
    .note("submit", job="job-9", kind="Forward", t=50)
    .note("outcome", job="job-9", outcome="failed", t=120),
    "in time: not all replicas": good().note("final", healthy_s=None),
    "nothing left: the process trainer": good().note("left", kind="process", name="trainer"),
    "nothing left: a second orchestrator": good().note("twin", code=0),
    "nothing left: the orchestrator ended by itself with 1": good().note(
        "ended", process="orchestrator", code=1
    ),
    "no growth: rss": probes(rss=10**9),
    "no growth: descriptors": probes(descriptors=60),
    "no growth: threads": probes(threads=20),
}


@pytest.mark.parametrize("found", BAD)
def test_each_violation_is_found(found):
    said = BAD[found].says()
    assert any(violation.startswith(found) for violation in said), said


def test_every_invariant_has_a_history_that_violates_it():
    assert {name.partition(":")[0] for name in BAD} == {*checker.INVARIANTS, "in time"}


@pytest.mark.parametrize(
    "story",
    [
        probes(),
        # What was said to be lost may be lost, and a checkpoint that is loaded is where the trainer
        # stands.
        good()
        .job("OptimStep", "failed", message="1 optimizer steps are lost with it")
        .job(runs=[([BASE], [BASE, "b4"])], batch="b4"),
        good()
        .job("LoadCheckpoint", runs=[(["x"], ["s"])])
        .job(runs=[(["s"], ["s", "b4"])], batch="b4"),
        # A batch whose job failed may be trained on again under another job.
        good()
        .job("ForwardBackward", "failed", runs=[(["x"], ["x", "b4"])], batch="b4")
        .job(runs=[(["x"], ["x", "b5"])], batch="b5"),
        # A replica that committed by itself and was told to give it up.
        good().made(2, "c2").serves(2, "c2").note("silent", node="inference-0", why="poisoned"),
        # A version that failed is not made again.
        good()
        .made(2, "c2", "y")
        .job("TrainMerged", "failed", runs=[(["x"], ["y"])], batch="b3")
        .made(3, "c3", "z")
        .job("TrainMerged", runs=[(["y"], ["z"])], batch="b4", version=3),
    ],
    ids=[
        "grows not",
        "said to be lost",
        "loaded",
        "failed",
        "self-commit",
        "a version that failed",
    ],
)
def test_what_is_allowed_is_not_found(story):
    assert story.says() == []
