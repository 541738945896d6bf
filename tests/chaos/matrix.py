"""The fault matrix: every fault at every phase of a publication, once each, and what became of the
job. Writes the table into docs/reliability.md.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from tests.chaos import checker, history
from tests.chaos.nemesis import Nemesis
from tests.chaos.processes import ROOT
from tests.chaos.run import JOB_WITHIN_S, Run, Settings

PHASES = (
    "training",
    "planned",
    "durable",
    "paused",
    "applying",
    "finished",
    "verified",
    "committed",
)
FAULTS = (
    ("orchestrator", "kill", "SIGKILL"),
    ("orchestrator", "stop", "stopped for 1 s"),
    ("orchestrator", "full disk", "disk full for 1 s"),
    ("trainer", "kill", "SIGKILL"),
    ("trainer", "stop", "stopped for 1 s"),
    ("trainer", "reset", "link reset"),
    ("trainer", "black hole", "link silent for 1.5 times the limit"),
    ("inference-0", "kill", "SIGKILL"),
    ("inference-0", "stop", "stopped for 1 s"),
    ("inference-0", "reset", "link reset"),
    ("inference-0", "black hole", "link silent for 1.5 times the limit"),
    ("inference-0", "data cut", "transfer cut in the middle"),
)
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
LIMIT_S = 15.0


class Matrix:
    """One run for all cells."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.settings = Settings(
            seed=seed,
            minutes=0,
            replicas=2,
            clients=1,
            mode="in_place",
            changed_only=False,
            send="tensors",
            noise=0.0,
            small_disk=True,
        )
        self.folder, self.dice = folder, random.Random(seed)

    def fill(self) -> tuple[list[list[str]], list[str]]:
        """(rows of the table, what the checker says)."""
        with Run(self.settings, self.folder) as run:
            self.run, self.nemesis = run, Nemesis(run)
            run.do("matrix", "InitialSync", self.dice)
            rows = [self.row(*fault) for fault in FAULTS]
            run.note_healed()
            run.history.note("final", healthy_s=run.wait_healthy())
            run.end()
        return rows, checker.check(
            history.read(self.folder / "history"), job_within_s=JOB_WITHIN_S / self.settings.pace
        )

    def row(self, process: str, fault: str, words: str) -> list[str]:
        cells = [self.cell(process, fault, phase) for phase in PHASES]
        print(process, words, cells, flush=True)
        return [process.removesuffix("-0").replace("inference", "replica"), words, *cells]

    def cell(self, process: str, fault: str, phase: str) -> str:
        """How the job ended, and how long it took from the fault until both replicas served a new
        version.
        """
        ended: list[Any] = []
        at = (
            ("trainer", "TrainMerged before")
            if phase == "training"
            else ("orchestrator", f"state {phase}")
        )
        job = threading.Thread(
            target=lambda: ended.append(self.run.do("matrix", "TrainMerged", self.dice))
        )
        self._healthy(time.monotonic(), None)  # everybody is back from the fault before
        self.run.processes[at[0]].tell("disarm")
        arm = threading.Timer(0.05, job.start)
        arm.start()
        is_there = self.nemesis.wait_at(*at, within_s=20.0)
        began = time.monotonic()
        target = {
            "reset": f"control {process}",
            "black hole": f"control {process}",
            "data cut": f"data {process}",
        }.get(fault, process)
        lasts_s = {"kill": 0.0, "black hole": 1.5 * LIMIT_S / self.settings.pace}.get(fault, 1.0)
        self.nemesis.strike(fault, target, lasts_s)
        self.run.processes[at[0]].tell("go")
        until = time.monotonic() + 60
        while job.is_alive() and time.monotonic() < until:
            self.nemesis.heal_due()
            job.join(0.02)
        result = ended[0] if ended else None
        healthy_s = self._healthy(began, result)
        self.nemesis.heal()
        if not is_there:
            return "not reached"
        took = "never healthy" if healthy_s is None else f"{healthy_s:.1f} s"
        if result is None:
            return f"failed, {took}"
        return took if result.attempts == 1 else f"{took} ({result.attempts})"

    def _healthy(self, began: float, result: Any) -> float | None:
        want, until = None if result is None else result.version, time.monotonic() + 60
        while time.monotonic() < until:
            self.nemesis.heal_due()
            if want is None:  # a job that failed: the next one shows that the run continues
                done = self.run.do("matrix", "TrainMerged", self.dice)
                want = None if done is None else done.version
            elif all(version == want for version in self.run.served().values()):
                return time.monotonic() - began
            time.sleep(0.02)
        return None


def as_table(rows: list[list[str]], pace: float) -> str:
    """Markdown."""
    head = ["process", "fault", *PHASES]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    note = (
        "Seconds from the fault until both replicas serve a new version; in brackets the attempts, "
        "if it took\n"
        f"more than one. Every wait of the orchestrator was divided by {pace:g} for this run. A "
        "node that\n"
        f"falls silent is therefore lost after {LIMIT_S / pace:.2f} s instead of {LIMIT_S:.0f}."
    )
    return f"{note}\n\n" + "\n".join(lines)


def write(table: str) -> None:
    """Between the two markers."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
