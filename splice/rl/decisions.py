"""The log of a loop's decisions, as JSON lines, and what a restarted loop reads from it.

    start    loop, run, version, config, prompts    a loop begins, or goes on, with so many prompts
    admit    step, group, prompt, sample, turn, attempt, version     turn 0 without an environment
    finish   group, sample, turn, attempt, spans, replica      all tokens, [version, number]
    lost     group, sample, turn, attempt, why       it is asked again, with its place in the group
    turns    group, sample, trained            an environment returned; these turns of it train
    drop     step, group, prompt, sample, why  it leaves its group (on_error = "drop")
    train    step, attempt, version, groups, rollouts, tokens, metrics
             sent to the trainer, which holds `version`; `tokens` counts the sampled ones
    failed   step, attempt, code, steps_taken, why
             `aside`, if the trainer's process ended in the batch twice: its prompts
    reopened step, why                         its optimizer steps are lost, and made again
    trained  step, version, seconds, metrics   `version` is served
    note     step, metrics                     yours, from `Loop.note`

Whatever was admitted and not trained is lost at the next `start`. `at` is seconds since the epoch.
"""

from __future__ import annotations

import bisect
import fcntl
import json
import os
import random
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgpack

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import TensorSpec
from splice.batches import Batch

LOG, BATCH, STATUS = "decisions.jsonl", "batch.msgpack", "status.json"
ASIDE = "aside"
"""Folder of batches that ended the trainer, within the loop's."""
LOOP_DIR = "loop"
"""Folder of a loop within its run's."""
PASSING = ("node_lost", "work_lost", "stopped", "cancelled")
"""Codes of a job that failed through no fault of its batch, before its step."""
LOCK_S = 0.5
"""Time for another's look at the lock."""
_STEPS = tuple(f'{{"event": "{e}"' for e in ("start", "train", "trained", "failed", "reopened"))
_LOGS: weakref.WeakSet[DecisionLog] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child, such as a reward's worker, must not hold the lock when the loop is gone."""
    for log in list(_LOGS):
        log.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class DecisionLog:
    """Appends decisions. A line that a crash cut off is removed first.

    Raises:
        ConfigError: another loop writes into this file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        deadline_s = time.monotonic() + LOCK_S  # `splice status` holds the lock for a moment
        while not _lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                self._file.close()
                raise ConfigError(
                    f"another loop runs in {path.parent}; end it, or give this one a folder of its "
                    "own: Loop(client, folder, ...)"
                )
            time.sleep(0.02)
        cut_torn_line(path)
        _LOGS.add(self)

    def close(self) -> None:
        """Close the file, which ends the lock unless another process has it open."""
        self._file.close()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Append a decision; `durable`: it is on disk when the call returns."""
        self._file.write(json.dumps({"event": event, "at": round(time.time(), 6), **fields}) + "\n")
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())


def _lock(file: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_running(path: Path) -> bool:
    """Whether a loop has this log open."""
    try:
        with path.open("rb") as file:
            return not _lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def cut_torn_line(path: Path) -> None:
    """Remove a last line that a crash cut off."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        kept = end
        while kept:
            start = max(0, kept - 2**16)
            file.seek(start)
            newline = file.read(kept - start).rfind(b"\n")
            if newline >= 0:
                kept = start + newline + 1
                break
            kept = start
        if kept != end:
            file.truncate(kept)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every decision in the log. A torn last line is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"line {number} of {path} is no decision: {error}") from error


@dataclass(slots=True)
class Made:
    """The versions between which tokens age: the first one served, and that of each step."""

    versions: list[int] = field(default_factory=list)

    def add(self, version: int) -> None:
        """`version` is served from now on."""
        if not self.versions or version > self.versions[-1]:
            self.versions.append(version)

    @property
    def newest(self) -> int:
        """The newest version."""
        return self.versions[-1]

    def age(self, version: int) -> int:
        """How many versions were made after this one."""
        return len(self.versions) - bisect.bisect_right(self.versions, version)


@dataclass(slots=True)
class Past:
    """Where a log ends.

    Attributes:
        done: steps that were trained or set aside.
        groups: groups of these steps.
        open: the `train` decision without an outcome, or with one that may be repeated.
        published: False: the last step was taken, but its version could not be published.
        attempt: of the next step's job; those before it have their outcome.
        last: the newest `train` decision.
        run: identity of the run that the loop belongs to.
        config: of the last start.
        prompts: their number at the last start.
    """

    loop: str = ""
    run: str = ""
    done: int = 0
    groups: int = 0
    made: Made = field(default_factory=Made)
    open: dict[str, Any] | None = None
    published: bool = True
    attempt: int = 0
    last: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    prompts: int | None = None

    def reopen(self) -> None:
        """The last step's optimizer steps are lost: its batch is sent again."""
        assert self.last is not None
        self.open = {**self.last, "attempt": self.last["attempt"] + 1}
        self.done, self.groups = self.last["step"] - 1, self.last["groups"][0]
        self.published, self.attempt = True, self.open["attempt"]


def past(path: Path) -> Past:
    """Read what a loop has done so far."""
    found = Past()
    if not path.exists():
        return found
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and line.startswith(_STEPS):
                _take(found, json.loads(line))
    return found


def _take(found: Past, line: dict[str, Any]) -> None:
    event = line["event"]
    if event == "start":
        found.loop, found.config = line["loop"], line["config"]
        found.prompts, found.run = line.get("prompts"), line.get("run", found.run)
        found.made.add(line["version"])
    elif event == "train":
        found.open = found.last = line
    elif event == "reopened":
        found.reopen()
    elif event == "failed" and "aside" in line:
        if found.open is not None:
            found.done, found.groups = line["step"], found.open["groups"][-1] + 1
        found.open, found.attempt = None, 0
    elif event == "trained" or line["steps_taken"]:
        if found.open is not None:
            found.done, found.groups = line["step"], found.open["groups"][-1] + 1
        found.open, found.attempt = None, 0
        found.published = event == "trained"
        if found.published:
            found.made.add(line["version"])
    elif line["code"] in PASSING and found.open is not None:
        found.open["attempt"] += 1  # this id has its outcome
    else:  # the same batch would fail again
        found.open, found.attempt = None, line["attempt"] + 1


def status(run_dir: Path) -> dict[str, Any] | None:
    """Return what the run's loop said after its last step, or None."""
    folder = run_dir / LOOP_DIR
    try:
        found: dict[str, Any] = json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return None
    found["is_running"] = is_running(folder / LOG)
    ago_s = max(0.0, time.time() - found.get("at", 0.0))
    state = "" if found["is_running"] else "no loop runs in this folder; "
    found["text"] = f"{state}{ago_s:.0f} s ago: {found['text']}"
    return found


class Order:
    """Which prompt a group has: all of them in each pass, in their order or shuffled anew."""

    def __init__(self, count: int, *, seed: int | None) -> None:
        self._count, self._seed = count, seed
        self._orders: dict[int, list[int]] = {}

    def prompt(self, group: int) -> int:
        """Index of a group's prompt."""
        turn, place = divmod(group, self._count)
        if self._seed is None:
            return place
        if turn not in self._orders:
            order = list(range(self._count))
            random.Random(f"{self._seed}/{turn}").shuffle(order)
            self._orders = {t: o for t, o in self._orders.items() if t >= turn - 1} | {turn: order}
        return self._orders[turn][place]


# ---------------------------------------------------------------- the batch of the open step


def keep_batch(path: Path, batch: Batch) -> None:
    """Make a step's batch durable, in place of the one before."""
    part = path.with_suffix(".part")
    specs = [spec.model_dump(mode="json") for spec in batch.specs]
    with part.open("wb") as file:
        file.write(msgpack.packb({"specs": specs, "buffers": list(map(bytes, batch.buffers))}))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def set_aside(folder: Path, step: int) -> Path:
    """Move the batch of the open step where nobody sends it again. Returns its file."""
    aside = folder / ASIDE / f"step-{step}.msgpack"
    aside.parent.mkdir(exist_ok=True)
    (folder / BATCH).replace(aside)
    return aside


def kept_batch(path: Path) -> Batch:
    """Return the batch of the open step.

    Raises:
        ConfigError: its file is gone, or not whole.
    """
    try:
        found = msgpack.unpackb(path.read_bytes())
        specs = tuple(TensorSpec.model_validate_json(json.dumps(spec)) for spec in found["specs"])
        return Batch(specs=specs, buffers=tuple(found["buffers"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the log beside {path} has a step without an outcome, but its batch cannot be read "
            f"({error}); restore the file, or start a loop in a new folder"
        ) from error
