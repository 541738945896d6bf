"""`splice trace`: both sides of a run over time, for ui.perfetto.dev or chrome://tracing.

    decisions.jsonl -> trainer: steps; sampler: requests and their number; loop: its events
    journal.sqlite  -> orchestrator: jobs, and each publication from planned to committed

Nothing is measured for it: these are the files that every run writes. The format is Chrome's trace
events: X a span, C a counter, i an instant, M a name; times in microseconds since the first event.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.rl import decisions

TRAINER, SAMPLER, LOOP, ORCHESTRATOR = 1, 2, 3, 4
_NAMES = {TRAINER: "trainer", SAMPLER: "sampler", LOOP: "loop", ORCHESTRATOR: "orchestrator"}
_INSTANTS = ("start", "lost", "drop", "replaced", "reopened", "note")
JOBS, PUBLICATIONS = 1, 1000
"""First lanes of the orchestrator's spans."""
COMMITTED = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took from `began` to `ended`, in seconds since the epoch."""

    process: int
    name: str
    began: float
    ended: float
    args: dict[str, Any] = field(default_factory=dict)
    lane: int = 0
    """0: the first one that is free."""


def trace(loop_dir: Path, *, steps: int) -> dict[str, Any]:
    """Return the newest steps as one JSON object. The journal is that of the folder above.

    Raises:
        ConfigError: there is neither a loop's log nor a journal.
    """
    log, journal = loop_dir / decisions.LOG, loop_dir.parent / "journal.sqlite"
    if not log.exists() and not journal.exists():
        raise ConfigError(f"nothing has run here: there is neither {log} nor {journal}")
    lines = list(decisions.read(log)) if log.exists() else []
    sent = [line["at"] for line in lines if line["event"] == "train"]
    cut = sent[-steps] if len(sent) > steps else 0.0
    lines = [line for line in lines if line.get("at", 0.0) >= cut]
    spans = [*_trained(lines), *_sampled(lines), *_journaled(journal)]
    return _events([span for span in spans if span.ended >= cut], lines)


# ---------------------------------------------------------------- what there is


def _trained(lines: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """The steps, from sending the batch to the version's being served."""
    sent: dict[str, Any] | None = None
    for line in lines:
        event = line["event"]
        if event == "train":
            sent = line
        elif event in ("trained", "failed") and sent is not None:
            args = {"tokens": sent["tokens"], "metrics": line.get("metrics", {})}
            args |= {"seconds": line.get("seconds", {})} | (
                {"version": line["version"]} if event == "trained" else {"why": line["why"]}
            )
            name = f"step {sent['step']}" + (" failed" if event == "failed" else "")
            yield Span(
                process=TRAINER, name=name, began=sent["at"], ended=line["at"], args=args, lane=1
            )
            sent = None


def _sampled(lines: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """The requests. One that the end of the loop cut off ends with the next start."""
    began: dict[tuple[int, ...], dict[str, Any]] = {}
    for line in lines:
        event = line["event"]
        if event == "admit":
            began[_place(line)] = line
        elif event in ("finish", "lost"):
            if (admitted := began.pop(_place(line), None)) is not None:
                yield _request(admitted, line)
        elif event == "start":
            for admitted in began.values():
                yield _request(admitted, line)
            began.clear()


def _place(line: dict[str, Any]) -> tuple[int, ...]:
    return tuple(line.get(name, 0) for name in ("group", "sample", "turn", "attempt"))


def _request(admitted: dict[str, Any], ended: dict[str, Any]) -> Span:
    spans = ended.get("spans", [])
    return Span(
        process=SAMPLER,
        name=f"{admitted['group']}.{admitted['sample']}",
        began=admitted["at"],
        ended=ended["at"],
        args={
            "step": admitted.get("step"),
            "prompt": admitted.get("prompt"),
            "replica": ended.get("replica"),
            "versions": spans,
            "tokens": sum(count for _, count in spans),
            "end": ended["event"],
        },
    )


def _journaled(path: Path) -> Iterator[Span]:
    """The jobs, and the steps of each publication."""
    if not path.exists():
        return
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
        jobs = db.execute(
            "SELECT job_id, kind, submitted, ended, state FROM jobs WHERE ended IS NOT NULL"
        ).fetchall()
        states = db.execute(
            "SELECT version, state, detail, at FROM publications ORDER BY id"
        ).fetchall()
    for job_id, kind, submitted, ended, state in jobs:
        args = {"job_id": job_id, "state": state}
        yield Span(process=ORCHESTRATOR, name=kind, began=submitted, ended=ended, args=args)
    for (version, state, _, at), (after, to, detail, until) in itertools.pairwise(states):
        if version == after and state != COMMITTED and not state.startswith("failed"):
            args = {"version": version, "to": to, "detail": detail}
            yield Span(
                process=ORCHESTRATOR,
                name=f"@{version} {state} to {to}",
                began=at,
                ended=until,
                args=args,
                lane=PUBLICATIONS,
            )


# ---------------------------------------------------------------- the format


def _events(spans: Sequence[Span], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [span.began for span in spans] + [line["at"] for line in lines if "at" in line]
    zero = min(times, default=0.0)

    def us(at: float) -> float:
        return round((at - zero) * 1e6, 1)

    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in _NAMES.items()
    ]
    lanes = {"name": "publications"}
    found.append(
        {"ph": "M", "name": "thread_name", "pid": ORCHESTRATOR, "tid": PUBLICATIONS, "args": lanes}
    )
    for lane, span in _in_lanes(spans):
        found.append(
            {
                "ph": "X",
                "cat": _NAMES[span.process],
                "name": span.name,
                "pid": span.process,
                "tid": lane,
                "ts": us(span.began),
                "dur": round(max(0.0, span.ended - span.began) * 1e6, 1),
                "args": span.args,
            }
        )
    for at, count in _in_flight(spans):
        args = {"requests": count}
        counter = {"ph": "C", "name": "requests in flight", "pid": SAMPLER, "tid": 0}
        found.append({**counter, "ts": us(at), "args": args})
    for line in lines:
        if line["event"] in _INSTANTS and "at" in line:
            args = {name: v for name, v in line.items() if name not in ("event", "at", "config")}
            instant = {"ph": "i", "s": "p", "name": line["event"], "pid": LOOP, "tid": 1}
            found.append({**instant, "ts": us(line["at"]), "args": args})
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"began": zero}}


def _in_lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with its lane. Spans of a lane do not overlap, as the format wants of a thread."""
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    for span in sorted(spans, key=lambda span: (span.began, span.ended)):
        if span.lane:
            yield span.lane, span
            continue
        idle, running = free.setdefault(span.process, []), busy.setdefault(span.process, [])
        while running and running[0][0] <= span.began:
            heapq.heappush(idle, heapq.heappop(running)[1])
        lane = heapq.heappop(idle) if idle else JOBS + len(running)
        heapq.heappush(running, (span.ended, lane))
        yield lane, span


def _in_flight(spans: Iterable[Span]) -> Iterator[tuple[float, int]]:
    """(time, requests at vLLM) at each change."""
    own = [span for span in spans if span.process == SAMPLER]
    changes = sorted([(s.began, 1) for s in own] + [(s.ended, -1) for s in own])
    count = 0
    for at, change in changes:
        count += change
        yield at, count
