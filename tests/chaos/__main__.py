"""`python -m tests.chaos --seed N --minutes M [--runs K]`: exit code 0 only if no run violated an
invariant.

A seed fixes the settings, every fault, its target, point and length, and every client's jobs. It
does not fix how the kernel schedules: a replay meets the same faults in the same order, at moments
that differ by milliseconds. Faults at named points are the exactly repeatable ones.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import threading
import time
from pathlib import Path

from orchestrator.errors import NodeLost
from tests.chaos import checker, history
from tests.chaos.matrix import Matrix, as_table, write
from tests.chaos.nemesis import Nemesis
from tests.chaos.real import TOPOLOGIES, run_real
from tests.chaos.run import FIRST_JOB_S, JOB_WITHIN_S, Run, Settings, scratch, settings_of

LONG_MINUTES = 5.0


def one_run(settings: Settings, folder: Path) -> list[str]:
    """What the checker says of it."""
    with Run(settings, folder) as run:
        dice, began = random.Random(f"{settings.seed} first"), time.monotonic()
        while run.do("first", "InitialSync", dice) is None:
            if time.monotonic() - began > FIRST_JOB_S:
                raise TimeoutError(f"no @0 within {FIRST_JOB_S} s; see {folder}")
        until_s = time.monotonic() + 60 * settings.minutes
        workers = [
            threading.Thread(target=run.work, args=(f"client-{i}", until_s), daemon=True)
            for i in range(settings.clients)
        ]
        for worker in workers:
            worker.start()
        nemesis = Nemesis(run)
        nemesis.rage(until_s)
        for worker in workers:
            worker.join(JOB_WITHIN_S / settings.pace)
        healthy_s = run.wait_healthy()
        run.history.note("final", healthy_s=healthy_s)
        run.end()
        print(
            f"  {nemesis.count} faults, {run.jobs_done} jobs, healthy {_seconds(healthy_s)} after "
            "the last fault",
            flush=True,
        )
    return checker.check(
        history.read(folder / "history"), job_within_s=JOB_WITHIN_S / settings.pace
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="default: a fresh one, which is printed"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults, for each run")
    parser.add_argument("--runs", type=int, default=1, help="with seeds SEED, SEED + 1, ...")
    parser.add_argument(
        "--hours",
        type=float,
        default=0.0,
        help="runs of five minutes until then, with fake and with real nodes in turn",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that held")
    parser.add_argument(
        "--matrix", action="store_true", help="every fault at every phase, into docs/reliability.md"
    )
    parser.add_argument(
        "--real", action="store_true", help="real Megatron and vLLM with the tiny model, on the CPU"
    )
    parser.add_argument(
        "--topology",
        choices=sorted(TOPOLOGIES),
        help="of real nodes: trainer's ranks, workers, replicas; default: the seed draws one",
    )
    given = parser.parse_args()
    first = given.seed if given.seed is not None else random.SystemRandom().randrange(10**9)
    if given.matrix:
        return _matrix(str(first))
    until_s, seed, failed = time.monotonic() + 3600 * given.hours, first, 0
    while seed < first + given.runs or time.monotonic() < until_s:
        is_real = given.real or (given.hours > 0 and (seed - first) % 2 == 1)
        failed += not _held(
            seed,
            LONG_MINUTES if given.hours else given.minutes,
            is_real=is_real,
            keep=given.keep,
            topology=given.topology,
        )
        seed += 1
    print(f"{seed - first - failed} of {seed - first} runs held every invariant")
    return 1 if failed else 0


def _held(
    seed: int, minutes: float, *, is_real: bool, keep: bool, topology: str | None = None
) -> bool:
    """One run; whether it violated nothing."""
    settings = settings_of(str(seed), minutes)
    print(f"seed {seed}: {'real nodes' if is_real else settings}", flush=True)
    folder = scratch() / "chaos"
    try:
        violations = (
            run_real(str(seed), minutes, folder, topology) if is_real else one_run(settings, folder)
        )
    except (TimeoutError, NodeLost) as error:
        violations = [f"the run itself did not come to its end: {error}"]
    if violations:
        shape = f" --topology {topology}" if topology else ""
        again = f"--seed {seed} --minutes {minutes:g}{f' --real{shape}' if is_real else ''}"
        print(f"  {len(violations)} violations; everything is in {folder}; again: {again}")
        for violation in violations[:20]:
            print(f"  VIOLATED {violation}")
    elif not keep:
        shutil.rmtree(folder.parent)
    return not violations


def _matrix(seed: str) -> int:
    folder = scratch() / "chaos"
    matrix = Matrix(folder, seed)
    rows, violations = matrix.fill()
    write(as_table(rows, matrix.settings.pace))
    for violation in violations:
        print(f"  VIOLATED {violation}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
