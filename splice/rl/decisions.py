"""The log of a loop's decisions, as JSON lines, and what a restarted loop reads from it.

    start    loop, run, version, config, prompts, lr, facts    a loop begins, or continues
    admit    step, group, prompt, sample, turn, attempt, version     turn 0 without an environment
    finish   group, sample, turn, attempt, spans, replica      all tokens, [version, number]
    lost     group, sample, turn, attempt, why       it is asked again, with its place in the group
    turns    group, sample, trained            an environment returned; these turns of it train
    drop     step, group, prompt, sample, why  it leaves its group (on_error = "drop")
    replaced step, group, prompt               its rewards were all equal: the next prompt takes its
             place (dynamic_sampling), with samples from 0
    train    step, attempt, version, groups, prompts, rollouts, tokens, metrics
             sent to the trainer, which holds `version`; `tokens` counts the sampled ones, and each
             group has its prompt
    failed   step, attempt, code, steps_taken, why
             `aside`, if the trainer's process ended in the batch twice: its prompts
    reopened step, why                         its optimizer steps are lost, and made again
    trained  step, version, seconds, metrics   `version` is served
    note     step, metrics                     yours, from `Loop.note`
    segment  number, past                      the file began again, with what was done so far

After a step, a file of `SEGMENT_BYTES` becomes a compressed segment next to it. A start reads
only the present file.

Whatever was admitted and not trained is lost at the next `start`. `at` is seconds since the epoch.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import random
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgpack

from orchestrator.errors import ConfigError
from orchestrator.processes import locks
from orchestrator.protocol.messages import TensorSpec
from orchestrator.storage import layout
from orchestrator.storage.files import replace_file, sync_folder
from splice.client.batches import Batch

LOG, BATCH, STATUS = "decisions.jsonl", "batch.msgpack", "status.json"
SEGMENT_BYTES = 2**26
"""Size from which the log begins again: some hours of a large run."""
RUN_LOCK = "loop.lock"
ASIDE = "aside"
"""Folder of batches that ended the trainer, within the loop's."""
LOOP_DIR = "loop"
"""Folder of a loop within its run's."""
PASSING = ("node_lost", "work_lost", "stopped", "cancelled")
"""Codes of a job that failed through no fault of its batch, before its step."""
_STEPS = tuple(
    f'{{"event": "{e}"' for e in ("start", "train", "trained", "failed", "reopened", "segment")
)
_LOCKED: weakref.WeakSet[_Locked] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child, such as a reward's worker, must not hold the lock when the loop is gone."""
    for locked in list(_LOCKED):
        locked.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class _Locked:
    """A file that only one process has for writing."""

    def __init__(self, path: Path, *, refusal: Callable[[], str]) -> None:
        self._file = path.open("a", encoding="utf-8")
        if not locks.soon(lambda: locks.try_lock(self._file.fileno())):
            self._file.close()
            raise ConfigError(refusal())
        _LOCKED.add(self)

    def close(self) -> None:
        """Close the file, which ends the lock unless another process has it open."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RunLock(_Locked):
    """Held by the one loop that trains a run, in whatever folder it is. Names that folder.

    Raises:
        ConfigError: another loop trains the run.
    """

    def __init__(self, run_dir: Path, folder: Path) -> None:
        path = run_dir / RUN_LOCK
        super().__init__(
            path,
            refusal=lambda: (
                f"another loop trains the run in {run_dir} ({path.read_text().strip()}); two would "
                "train the same weights. End it, or start this loop on its own run"
            ),
        )
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()}, folder {folder.absolute()}\n")
        self._file.flush()


class DecisionLog(_Locked):
    """Appends decisions. A line that a crash cut off is removed first.

    Raises:
        ConfigError: another loop writes into this file, or its folder has another layout.
    """

    def __init__(self, path: Path) -> None:
        layout.check(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(
            path,
            refusal=lambda: (
                f"another loop runs in {path.parent}; end it. A loop of another run needs a folder "
                "of its own"
            ),
        )
        layout.claim(path.parent)
        cut_torn_line(path)
        self._path = path
        if (number := len(segments(path))) > _number(path):  # a crash came between copy and cut
            self._begin_again(number)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Append a decision; `durable`: it is on disk when the call returns."""
        self._file.write(json.dumps({"event": event, "at": round(time.time(), 6), **fields}) + "\n")
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def rotate(self) -> None:
        """Make the file a segment if it is large enough. Call it after a step."""
        if self._path.stat().st_size < SEGMENT_BYTES:
            return
        number = len(segments(self._path)) + 1
        segment = self._path.with_name(f"{self._path.stem}.{number:06d}.jsonl.gz")
        part = segment.with_suffix(".part")
        with self._path.open("rb") as file, part.open("wb") as out:
            with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=3) as packed:
                shutil.copyfileobj(file, packed)
            out.flush()
            os.fsync(out.fileno())
        part.replace(segment)
        sync_folder(segment.parent)  # before the lines are cut off
        self._begin_again(number)

    def _begin_again(self, number: int) -> None:
        found = asdict(_past(segments(self._path)[-1]))
        self._file.truncate(0)
        self.write("segment", durable=True, number=number, past=found)


def segments(path: Path) -> list[Path]:
    """The compressed parts before the present file, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9]*.jsonl.gz"))


def _number(path: Path) -> int:
    """How many segments are before the file, as it says itself."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return int(json.loads(first)["number"]) if first.startswith('{"event": "segment"') else 0


def _open(path: Path) -> IO[str]:
    return (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open("r", encoding="utf-8")
    )


def is_running(path: Path) -> bool:
    """Whether a loop has this log open."""
    try:
        with path.open("rb") as file:
            return not locks.try_lock(file.fileno(), shared=True)
    except OSError:
        return False


def cut_torn_line(path: Path) -> None:
    """Remove a last line that a crash cut off, or lines that a power loss turned into zeros."""
    with path.open("rb+") as file:
        end = kept = file.seek(0, os.SEEK_END)
        while kept:
            last, begins = _last_line(file, kept)
            if last.endswith(b"\n") and b"\0" not in last:
                break
            kept = begins
        if kept != end:
            file.truncate(kept)


def _last_line(file: IO[bytes], end: int) -> tuple[bytes, int]:
    """The last line of the file's first `end` bytes, and where it begins."""
    parts: list[bytes] = []
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        part = file.read(end - start)
        cut = part.rfind(b"\n", 0, len(part) - (not parts)) + 1  # not the line's own end
        parts.append(part[cut:])
        end = start + cut
        if cut:
            break
    return b"".join(reversed(parts)), end


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every decision in the log and its segments. A torn last line is left out.

    Raises:
        ConfigError: the folder has another layout.
    """
    layout.check(path.parent)
    older = segments(path)
    # Before a crash came between copy and cut, the newest segment has all that is in the file.
    for part in older if len(older) > _number(path) else [*older, path]:
        with _open(part) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    continue
                try:
                    found = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"line {number} of {part} is no decision: {error}") from error
                if found["event"] != "segment":
                    yield found


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
        lr: the learning rate at the last start.
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
    lr: float | None = None

    def ended(self, step: int) -> None:
        """The open step was trained or set aside."""
        self.done, self.open, self.attempt = step, None, 0

    def reopen(self) -> None:
        """The last step's optimizer steps are lost: its batch is sent again."""
        assert self.last is not None
        self.open = {**self.last, "attempt": self.last["attempt"] + 1}
        self.done, self.groups = self.last["step"] - 1, self.last["groups"][0]
        self.published, self.attempt = True, self.open["attempt"]


def past(path: Path) -> Past:
    """Read what a loop has done so far."""
    return _past(path) if path.exists() else Past()


def _past(path: Path) -> Past:
    found = Past()
    with _open(path) as file:
        for line in file:
            if line.endswith("\n") and line.startswith(_STEPS):
                _take(found, json.loads(line))
    return found


def _take(found: Past, line: dict[str, Any]) -> None:
    event = line["event"]
    if event == "segment":
        for name, value in line["past"].items():
            setattr(found, name, Made(**value) if name == "made" else value)
    elif event == "start":
        found.loop, found.config = line["loop"], line["config"]
        found.prompts, found.run = line.get("prompts"), line.get("run", found.run)
        found.lr = line.get("lr")
        found.made.add(line["version"])
    elif event == "train":
        found.open = found.last = line
    elif event == "reopened":
        found.reopen()
    elif event == "trained" or "aside" in line or line["steps_taken"]:
        if found.open is not None:
            found.done, found.groups = line["step"], found.open["groups"][-1] + 1
        found.open, found.attempt = None, 0
        if "aside" not in line:
            found.published = event == "trained"
        if event == "trained":
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
    """Which prompt a group has: all of them in each pass, in their order or shuffled again.

    Args:
        replacements: most prompts that take another one's place in a group (dynamic_sampling).
    """

    def __init__(self, count: int, *, seed: int | None, replacements: int = 0) -> None:
        self._count, self._seed = count, seed
        self._stride = max(1, count // (replacements + 1))
        self._orders: dict[int, list[int]] = {}

    def prompt(self, group: int, replaced: int = 0) -> int:
        """Index of a group's prompt, after `replaced` others had its place. They come from the same
        pass, far from each other, so that neither they nor a step's groups meet."""
        turn, place = divmod(group, self._count)
        place = (place + replaced * self._stride) % self._count
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
    specs = [spec.model_dump(mode="json") for spec in batch.specs]
    kept = msgpack.packb({"specs": specs, "buffers": list(map(bytes, batch.buffers))})
    replace_file(path, kept, durable=True)


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
            f"the log next to {path} has a step without an outcome, but its batch cannot be read "
            f"({error}); restore the file, or start a loop in a new folder"
        ) from error
