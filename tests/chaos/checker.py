"""What must hold of every history. Pure: events in, violations out; knows the formats of
`tests.chaos.history`, not the program.

one outcome       a job has exactly one outcome, whoever is told it and however often, and the
                  journal says the same
runs once         no process of the trainer runs a job's request twice; no batch is in a state
                  twice; a cancelled job never ran
nothing lost      the trainer is where the completed jobs have brought it, unless a failed job
                  has said that something is lost
one content       a version has one content, the trainer's for that version
committed         what is served was committed, or was given up at once
by one            versions are made one after the other, and completed ones go up
in time           every job ends within the limit after it was submitted or the last fault was
                  healed; at the end all serve the same
nothing left      no process, file, lock or shared memory
no growth         memory, descriptors and threads of one orchestrator
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.chaos.history import Event

State = tuple[str, ...]
"""(state, pending batches...) of the trainer."""
BASE: State = ("0" * 16,)
EFFECTS = ("TrainMerged", "TrainLora", "ForwardBackward", "OptimStep")
MADE_BY = ("InitialSync", "TrainMerged", "Publish")
GROWTH_BYTES, GROWTH_DESCRIPTORS, GROWTH_THREADS = 48 * 2**20, 12, 4
WARM_JOBS = 20
"""Jobs after which an orchestrator has everything that it needs."""
SELF_COMMIT_GIVEN_UP_S = 60.0
LOST_WORDS = "are lost"


def check(events: Sequence[Event], *, job_within_s: float = 60.0) -> list[str]:
    """Every violation, in words that name the invariant."""
    found = [
        f"{name}: {what}" for name, invariant in INVARIANTS.items() for what in invariant(events)
    ]
    return [*found, *(f"in time: {what}" for what in in_time(events, job_within_s))]


def of(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [e for e in events if e["what"] in kinds]


def by_job(events: Iterable[Event], kind: str) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in of(events, kind):
        if event.get("job"):
            found[event["job"]].append(event)
    return found


# ------------------------------------------------------------ jobs


def one_outcome(events: Sequence[Event]) -> Iterable[str]:
    told, journaled = by_job(events, "outcome"), by_job(events, "journaled")
    for job, outcomes in told.items():
        if len({o["outcome"] for o in outcomes}) > 1:
            yield f"{job} was told {[o['outcome'] for o in outcomes]}"
        if journaled and [o["outcome"] for o in outcomes[:1]] != [
            j["outcome"] for j in journaled.get(job, ())
        ]:
            yield f"{job} was told {outcomes[0]['outcome']}, the journal says {[j['outcome'] for j in journaled.get(job, ())]}"  # noqa: E501
    for job, rows in journaled.items():
        if len(rows) > 1 or rows[0]["outcome"] not in ("completed", "failed", "cancelled"):
            yield f"{job} stands in the journal as {[r['outcome'] for r in rows]}"


def runs_once(events: Sequence[Event]) -> Iterable[str]:
    outcomes = {e["job"]: e["outcome"] for e in of(events, "outcome")}
    seen: set[tuple[str, str, str]] = set()
    for event in of(events, "ran"):
        if event["kind"] not in EFFECTS or event["ended"] != "Completed" or event["job"] is None:
            continue
        key = (event["job"], event["life"], event["kind"])
        if key in seen:
            yield f"{event['job']} ran twice in the trainer's process {event['life']}"
        seen.add(key)
        if outcomes.get(event["job"]) == "cancelled":
            yield f"{event['job']} was cancelled, and ran"
    yield from _batches_once(events)


def _batches_once(events: Sequence[Event]) -> Iterable[str]:
    """No state has a batch twice, however it came about."""
    submitted = {e["job"]: e.get("batch") for e in of(events, "submit")}
    within: dict[str, frozenset[str]] = {BASE[0]: frozenset()}
    for event in of(events, "ran"):
        if event["kind"] not in EFFECTS or event["before"][0] == event["after"][0]:
            continue
        fresh = [b for b in (*event["before"][1:], submitted.get(event["job"])) if b]
        had = within.get(event["before"][0], frozenset())
        if len(set(fresh)) != len(fresh) or had & set(fresh):
            yield f"{event['job']} put a batch into the state for the second time: {fresh}"
        within[event["after"][0]] = had | set(fresh)


def nothing_lost(events: Sequence[Event]) -> Iterable[str]:
    """Follows the jobs in the journal's order with all states that the trainer may be in."""
    alias = {e["is_now"]: e["was"] for e in of(events, "rotted")}
    saved = (
        {BASE}
        | {(e["state"],) for e in of(events, "made")}
        | {(e["is_now"],) for e in of(events, "rotted")}
    )
    ran, submitted = by_job(events, "ran"), {e["job"]: e for e in of(events, "submit")}
    now: set[State] = {BASE}
    for row in sorted(of(events, "journaled"), key=lambda e: e["number"]):
        job, did = (
            row["job"],
            [
                r
                for r in ran[row["job"]]
                if r["kind"] != "LoadCheckpoint" or row["kind"] == "LoadCheckpoint"
            ],
        )
        if row["outcome"] == "cancelled":
            continue
        own = [r for r in did if r["kind"] in _OWN_REQUEST.get(row["kind"], ())]
        possible = {_unrotted(s, alias) for s in now}
        for run in own:
            if row["kind"] != "LoadCheckpoint" and _unrotted(
                tuple(run["before"]), alias
            ) not in possible | _dropped(possible, row):
                yield (
                    f"{job} ({row['kind']}) found the trainer at {_short(run['before'])}; by the "
                    "jobs before it is at one of "
                    f"{[_short(s) for s in sorted(possible)[:4]]}, and nobody was told of a loss"
                )
        now = _after(row, own, now, saved, submitted.get(job, {}))


_OWN_REQUEST = {
    "TrainMerged": ("TrainMerged",),
    "TrainLora": ("TrainLora",),
    "ForwardBackward": ("ForwardBackward",),
    "OptimStep": ("OptimStep",),
    "Publish": ("SaveCheckpoint",),
    "SaveCheckpoint": ("SaveCheckpoint",),
    "LoadCheckpoint": ("LoadCheckpoint",),
    "Forward": ("Forward",),
    "InitialSync": ("SaveCheckpoint",),
}
"""Kind of job -> the request that is its work."""


def _dropped(possible: set[State], row: Event) -> set[State]:
    """A job that says that something is lost may have looked before it said so."""
    return {s[:1] for s in possible} if LOST_WORDS in (row.get("message") or "") else set()


def _after(
    row: Event, own: Sequence[Event], now: set[State], saved: set[State], submit: Event
) -> set[State]:
    ends = {tuple(r["after"]) for r in own}
    if row["outcome"] == "completed":
        last = [tuple(r["after"]) for r in own if r["ended"] == "Completed"]
        return {last[-1]} if last else now
    if LOST_WORDS in (row.get("message") or ""):
        return now | ends | saved
    return now | ends | {s[:1] for s in now}


def _unrotted(state: Sequence[str], alias: dict[str, str]) -> State:
    content = state[0]
    for _ in alias:  # a folder may rot more than once
        content = alias.get(content, content)
    return (content, *state[1:])


def _short(state: Sequence[str]) -> str:
    return "+".join([state[0][:6], *state[1:]])


# ------------------------------------------------------------ versions


def one_content(events: Sequence[Event]) -> Iterable[str]:
    made: dict[int, set[str]] = defaultdict(set)
    for event in of(events, "made"):
        made[event["version"]].add(event["content"])
    served: dict[int, str] = {}
    for event in of(events, "serves"):
        version, content = event["version"], event["content"]
        if served.setdefault(version, content) != content:
            yield f"@{version} was {served[version]} and is {content} on {event['node']}"
        if content not in made[version]:
            yield f"{event['node']} serves {content} as @{version}, which the trainer made as {sorted(made[version])}"  # noqa: E501


def committed(events: Sequence[Event]) -> Iterable[str]:
    """A single replica in shadow mode commits by itself; what then fails is taken from
    it at once.
    """
    known = {e["version"] for e in of(events, "committed")}
    if not of(events, "journaled"):
        return
    for node, shown in itertools.groupby(
        sorted(of(events, "serves", "silent"), key=lambda e: (e["node"], e["t"])),
        key=lambda e: e["node"],
    ):
        rows = list(shown)
        for event, after in itertools.zip_longest(rows, rows[1:]):
            is_given_up = after is not None and after["t"] - event["t"] <= SELF_COMMIT_GIVEN_UP_S
            if event["what"] == "serves" and event["version"] not in known and not is_given_up:
                yield f"{node} serves @{event['version']}, which was never committed"


def by_one(events: Sequence[Event]) -> Iterable[str]:
    versions = {
        e["job"]: e["version"]
        for e in of(events, "outcome")
        if e["outcome"] == "completed" and e.get("version") is not None
    }
    rows = sorted(
        (e for e in of(events, "journaled") if e["kind"] in MADE_BY), key=lambda e: e["number"]
    )
    before = -1
    for row in rows:
        version = versions.get(row["job"])
        if version is None:
            continue
        if version <= before:
            yield f"{row['job']} made @{version} after @{before}"
        failed = sum(r["outcome"] == "failed" for r in rows if r["number"] < row["number"])
        if version > before + 1 + failed:
            yield f"{row['job']} made @{version} after @{before}: versions are missing between them"
        before = version
    made = {e["version"] for e in of(events, "made") if "/versions/" in e.get("folder", "")}
    if made and made != set(range(max(made) + 1)):
        yield f"versions were made with gaps: {sorted(set(range(max(made))) - made)[:5]} are missing"  # noqa: E501


# ------------------------------------------------------------ time, and what is left


def in_time(events: Sequence[Event], within_s: float) -> Iterable[str]:
    ended = {job: outcomes[0]["t"] for job, outcomes in by_job(events, "outcome").items()}
    healed = max((e["t"] for e in of(events, "healed")), default=0.0)
    last = events[-1]["t"] if events else 0.0
    for event in of(events, "submit"):
        since = max(event["t"], healed) if ended.get(event["job"], last) > healed else event["t"]
        limit = within_s if since >= healed else within_s + healed - event["t"]
        if event["job"] not in ended:
            yield f"{event['job']} ({event['kind']}) has no outcome"
        elif ended[event["job"]] - since > limit:
            yield f"{event['job']} ({event['kind']}) took {ended[event['job']] - since:.0f} s after the last fault, {limit:.0f} are allowed"  # noqa: E501
    for event in of(events, "final"):
        if event["healthy_s"] is None:
            yield "not all replicas served a new version in time after the last fault"


def nothing_left(events: Sequence[Event]) -> Iterable[str]:
    for event in of(events, "left"):
        yield f"the {event['kind']} {event['name']}"
    for event in of(events, "twin"):
        if event["code"] != 2:
            yield f"a second orchestrator in the run folder ended with {event['code']}; it has to refuse with 2"  # noqa: E501
    for event in of(events, "ended"):
        if event["process"] == "orchestrator" and event["code"] not in (0, 2, -9):
            yield f"the orchestrator ended by itself with {event['code']}"


def no_growth(events: Sequence[Event]) -> Iterable[str]:
    for life, probes in itertools.groupby(of(events, "probe"), key=lambda e: e["life"]):
        seen = list(probes)
        warm = [p for p in seen if p["jobs"] - seen[0]["jobs"] >= WARM_JOBS]
        if len(warm) < 6:
            continue
        early, late = warm[: len(warm) // 3], warm[-len(warm) // 3 :]
        for what, most in (
            ("rss", GROWTH_BYTES),
            ("descriptors", GROWTH_DESCRIPTORS),
            ("threads", GROWTH_THREADS),
        ):
            grown = min(p[what] for p in late) - max(p[what] for p in early)
            if grown > most:
                yield f"{what} of the orchestrator's life {life} grew by {grown} in {late[-1]['jobs'] - early[0]['jobs']} jobs"  # noqa: E501


INVARIANTS: dict[str, Callable[[Sequence[Event]], Iterable[Any]]] = {
    "one outcome": one_outcome,
    "runs once": runs_once,
    "nothing lost": nothing_lost,
    "one content": one_content,
    "committed": committed,
    "by one": by_one,
    "nothing left": nothing_left,
    "no growth": no_growth,
}
