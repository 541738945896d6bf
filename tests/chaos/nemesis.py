"""What goes wrong, when, and how it is made right again.

A fault comes at a random moment, or at a point where a process waits for it: before or after a
request of each kind, at each state of a publication, before or after the Nth commit of the journal.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.nodes import BASE, MODEL
from tests.chaos.run import Run

STATES = (
    "planned",
    "durable",
    "shadowed",
    "paused",
    "applying",
    "finished",
    "verified",
    "committed",
)
TRAINER_KINDS = (
    "TrainMerged",
    "SaveCheckpoint",
    "LoadCheckpoint",
    "PlanPublication",
    "OpenTransferGroup",
    "UseLayout",
    "SendWeights",
    "ForwardBackward",
    "OptimStep",
    "Forward",
    "TrainLora",
)
REPLICA_KINDS = (
    "JoinTransferGroup",
    "PrepareUpdate",
    "PrepareShadow",
    "ReceiveWeights",
    "SwapWeights",
    "CheckCanary",
    "CommitUpdate",
    "LeaveAlias",
)
FAULTS = (
    *6 * ("kill",),
    *4 * ("stop", "reset", "data cut", "server restart"),
    *3 * ("clock", "starve"),
    *2 * ("black hole", "one way", "slow", "cut", "data hole", "rot"),
    "gone",
    "full disk",
    "twins",
    "moved",
    "other base",
)


class Nemesis:
    """Draws everything from the run's seed."""

    def __init__(self, run: Run) -> None:
        self.run, self.dice = run, random.Random(f"{run.settings.seed} nemesis")
        self._heals: list[tuple[float, Callable[[], None]]] = []
        self.count = 0

    def rage(self, until_s: float) -> None:
        """Faults, one after the other and some at once, until then; at the end all is healed."""
        while time.monotonic() < until_s:
            self.heal_due()
            where = self._at_a_point() if self.dice.random() < 0.7 else None
            if where is not None and self.dice.random() < 0.5:
                self.strike("kill", self.dice.choice(("orchestrator", "orchestrator", where)))
            else:
                time.sleep(0.0 if where is not None else self.dice.uniform(0.05, 1.0))
                self.strike()
            if self.dice.random() < 0.2:
                self.strike()  # a second one, before the first is over
        self.heal()

    # ------------------------------------------------------------ where

    def _at_a_point(self) -> str | None:
        """Wait until a process reaches a point, where it stays for a moment; which process, or None
        if it did not come there.
        """
        names = list(self.run.processes)
        name = self.dice.choice(["orchestrator", "orchestrator", *names])
        if name == "orchestrator":
            point = self.dice.choice(
                [*(f"state {s}" for s in STATES), "commit before", "commit after"]
            )
        else:
            kinds = TRAINER_KINDS if name == "trainer" else REPLICA_KINDS
            point = f"{self.dice.choice(kinds)} {self.dice.choice(('before', 'after'))}"
        count = self.dice.randrange(1, 12) if point.startswith("commit") else 1
        return name if self.wait_at(name, point, count=count, within_s=2.0) else None

    def wait_at(self, name: str, point: str, *, count: int = 1, within_s: float) -> bool:
        """Whether the process reached it in time."""
        process = self.run.processes[name]
        while not process.reached.empty():
            process.reached.get()
        process.tell(f"arm {count} {point}")
        try:
            process.reached.get(timeout=within_s)
        except queue.Empty:
            process.tell("disarm")
            return False
        self.run.history.note("fault", kind="at", target=name, point=point)
        self._later(self.dice.uniform(0.0, 0.3), lambda: process.tell("go"))
        return True

    # ------------------------------------------------------------ what

    def strike(
        self, kind: str | None = None, target: str | None = None, lasts_s: float | None = None
    ) -> None:
        """One fault."""
        kind = kind or self.dice.choice(FAULTS)
        replicas = [n for n in self.run.processes if n.startswith("inference")]
        target = target or self._target(kind, replicas)
        lasts_s = (
            self.dice.choice((0.05, 0.1, 0.3, 0.3, 1.0, 1.0, 5.0)) if lasts_s is None else lasts_s
        )
        self.count += 1
        self.run.history.note("fault", kind=kind, target=target, lasts_s=lasts_s)
        getattr(self, "_" + kind.replace(" ", "_"))(target, lasts_s)

    def _target(self, kind: str, replicas: list[str]) -> str:
        if kind == "starve":
            return self.dice.choice(["trainer", *replicas])
        if kind == "other base":
            return "trainer"
        if kind in ("kill", "stop", "clock"):
            return self.dice.choice(["orchestrator", "trainer", *replicas])
        if kind in ("gone", "server restart"):
            return self.dice.choice(replicas)
        if kind in ("data cut", "data hole"):
            return f"data {self.dice.choice(replicas)}"
        if kind in ("reset", "black hole", "one way", "slow", "cut"):
            return self.dice.choice([n for n in self.run.links.by_name if not n.startswith("data")])
        return "orchestrator"

    def _kill(self, target: str, lasts_s: float) -> None:
        self.run.processes[target].kill(back_after_s=min(lasts_s, 2.0))

    def _gone(self, target: str, lasts_s: float) -> None:
        """A replica that comes back much later: replicas come and go."""
        self.run.processes[target].kill(back_after_s=min(2 * lasts_s, 6.0))

    def _stop(self, target: str, lasts_s: float) -> None:
        process = self.run.processes[target]
        process.signal(signal.SIGSTOP)
        self._later(lasts_s, lambda: process.signal(signal.SIGCONT))

    def _server_restart(self, target: str, _: float) -> None:
        self.run.processes[target].tell("restart")

    def _reset(self, target: str, _: float) -> None:
        self.run.links.by_name[target].reset()

    def _black_hole(self, target: str, lasts_s: float) -> None:
        link = self.run.links.by_name[target]
        link.hold("up", "down")
        self._later(lasts_s, link.heal)

    def _one_way(self, target: str, lasts_s: float) -> None:
        link = self.run.links.by_name[target]
        link.hold(self.dice.choice(("up", "down")))
        self._later(lasts_s, link.heal)

    def _slow(self, target: str, lasts_s: float) -> None:
        link = self.run.links.by_name[target]
        link.slow()
        self._later(lasts_s, link.heal)

    def _cut(self, target: str, _: float) -> None:
        self.run.links.by_name[target].cut_after(self.dice.randrange(1, 20_000))

    def _data_cut(self, target: str, _: float) -> None:
        """Anywhere in the next update's bytes."""
        self.run.links.by_name[target].cut_after(self.dice.randrange(1, 100_000))

    _data_hole = _black_hole

    def _clock(self, target: str, _: float) -> None:
        """The wall clock by days, either way; the monotonic one, as after a suspended machine,
        forward.
        """
        wall_s, monotonic_s = self.dice.uniform(-1e6, 1e6), self.dice.choice((0.0, 0.0, 3.0, 30.0))
        self.run.processes[target].tell(f"clock {wall_s} {monotonic_s}")

    def _starve(self, target: str, _: float) -> None:
        """One of the next allocations finds no memory."""
        self.run.processes[target].tell(f"starve {self.dice.randrange(12)}")

    def _moved(self, target: str, _: float) -> None:
        self.run.move()

    def _other_base(self, target: str, lasts_s: float) -> None:
        """Somebody puts other base weights into the model's folder, and then the right ones."""
        model, trainer = self.run.folder / MODEL, self.run.processes[target]

        def swap(content: str) -> None:
            model.write_text(content)
            trainer.kill()

        swap("f" * len(BASE))
        self._later(lasts_s, lambda: swap(BASE))

    def _full_disk(self, target: str, lasts_s: float) -> None:
        if not self.run.is_mounted:
            return
        file = self.run.run_dir / "fill"
        with contextlib.suppress(OSError), file.open("ab", buffering=0) as fill:
            while True:
                fill.write(b"x" * 4096)
        self._later(min(lasts_s, 2.0), lambda: file.unlink(missing_ok=True))

    def _rot(self, target: str, _: float) -> None:
        """One bit of a version's checkpoint, of one that was served: what rots before its digest is
        known is not survived (docs/reliability.md).
        """
        versions = self.run.run_dir / "versions"
        served = max((v for v in self.run.served().values() if v is not None), default=-1)
        with contextlib.suppress(OSError):
            there = [f for f in versions.iterdir() if f.name.isdigit() and int(f.name) <= served]
            if not there:
                return
            file = self.dice.choice(sorted(there, key=lambda f: int(f.name))) / "state"
            was = file.read_text()
            at = self.dice.randrange(len(was))
            is_now = was[:at] + format(int(was[at], 16) ^ 1, "x") + was[at + 1 :]
            self.run.history.note("rotted", was=was, is_now=is_now, folder=str(file.parent))
            _overwrite(file, is_now)

    def _twins(self, target: str, _: float) -> None:
        """Somebody starts a second orchestrator in the same run folder: it must refuse."""
        name = "orchestrator"
        process = self.run.processes[name]
        if not process.is_running:
            return
        twin = self.run.start_twin()
        self._later(2.0, twin)

    # ------------------------------------------------------------ and over

    def _later(self, after_s: float, heal: Callable[[], None]) -> None:
        self._heals.append((time.monotonic() + after_s, heal))

    def heal_due(self) -> None:
        """What has lasted long enough ends."""
        due = [heal for at, heal in self._heals if at <= time.monotonic()]
        self._heals = [(at, heal) for at, heal in self._heals if at > time.monotonic()]
        for heal in due:
            heal()

    def heal(self) -> None:
        """Everything works again from here on."""
        for _, heal in self._heals:
            heal()
        self._heals = []
        self.run.links.heal()
        for process in self.run.processes.values():
            process.tell("disarm")
            process.tell("go")
            process.signal(signal.SIGCONT)
            process.back_s = 0.0
        (self.run.run_dir / "fill").unlink(missing_ok=True)
        self.run.note_healed()


def _overwrite(file: Path, text: str) -> None:
    """In place, as a bad disk does; never a file of a checkpoint that is just being replaced."""
    fd = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(fd, text.encode(), 0)
    finally:
        os.close(fd)
