"""Samples the answers again that a run's versions were trained on, and compares them bit for bit.

    versions/N/remake.bin -> the batch that N was trained on: ids of prompts and answers, log-probs
    LOOP/samples/STEP.jsonl, decisions.jsonl -> how each answer was asked for
    the version that made an answer, as an HF model -> vLLM -> the same ids and log-probs

With `numerics = "exact"` they depend on weights, prompt and seed only, not on what else vLLM
computed at the time.
"""

from __future__ import annotations

import array
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.frames import unpacked
from orchestrator.protocol.messages import RunJob, TrainMerged
from splice.client.run_file import RunFile
from splice.rl import decisions, samples
from splice.train import export, replaying

TIMEOUT_S = 4 * 3600.0
"""Longest sampling of one version's answers."""
MODULE = "inference_node.server.resample"
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A sequence of a batch: the prompt, then the answer. `versions` is empty if not recorded."""

    ids: array.array[int]
    logprobs: array.array[float]
    versions: array.array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that is sampled again.

    Attributes:
        made: the version that sampled it.
        place: its group and its place there.
        request: what `inference_node.server.resample` takes.
    """

    made: int
    place: str
    ids: list[int]
    logprobs: array.array[float]
    request: tuple[list[int], dict[str, Any], bool]

    def difference(self, ids: list[int], logprobs: list[float]) -> str:
        """Where the answer that was sampled again differs first. Empty: nowhere."""
        again = array.array("f", logprobs)
        for at, (old, new) in enumerate(zip(self.ids, ids, strict=False)):
            if old != new:
                return f"{self.place}, token {at}: {old} is {new} now"
            if self.logprobs[at : at + 1].tobytes() != again[at : at + 1].tobytes():
                old_f, new_f = self.logprobs[at], again[at]
                return f"{self.place}, token {at}: log-prob {old_f!r} is {new_f!r} now"
        if len(ids) != len(self.ids):
            return f"{self.place}: {len(self.ids)} tokens are {len(ids)} now"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answers that a version was trained on.

    Attributes:
        left: number of those that are not sampled again, by reason.
        differ: where those that were sampled again differ.
    """

    answers: list[Answer]
    left: Counter[str]
    differ: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """What is said of the version."""
        count, of = len(self.answers), len(self.answers) + self.left.total()
        parts = [f"{count} of {of} answers sampled again"]
        if self.differ:
            parts[0] += f", {len(self.differ)} differ, first {self.differ[0]}"
        elif count:
            parts[0] += ", all equal"
        return "; ".join([*parts, *(f"{n} not repeated: {why}" for why, n in self.left.items())])


def plan(
    batch: Iterable[Trained], lines: Iterable[Line], sampling: Callable[[Line], Line]
) -> Planned:
    """Decide which sequences of a batch are sampled again, and from which version.

    Args:
        lines: the step's samples.
        sampling: of a line, `LoopConfig.sampling` when it was asked for.
    """
    found = Planned(answers=[], left=Counter())
    unused = [line for line in lines if line["answer_ids"]]
    for trained in batch:
        line = _line_of(trained, unused)
        if line is None:
            found.left["no line of the samples has it"] += 1
            continue
        unused.remove(line)
        versions = set(_tail(trained.versions, line))
        if line["turns"]:
            found.left["an environment asked for it"] += 1
        elif line.get("seed") is None:
            found.left["its request had no seed, or the seed was not recorded"] += 1
        elif not versions:
            found.left["the batch does not say which version made it"] += 1
        elif len(versions) > 1 or min(versions) < 0:
            found.left["an update came within it"] += 1
        else:
            found.answers.append(_answer(trained, line, sampling(line), *versions))
    return found


def _line_of(trained: Trained, lines: Iterable[Line]) -> Line | None:
    """The first line with the sequence's answer; rather one whose log-probs are these too."""
    found = None
    for line in lines:
        if _tail(trained.ids, line) == line["answer_ids"]:
            logprobs = [round(p, samples.DIGITS) for p in _tail(trained.logprobs, line)]
            if logprobs == line["logprobs"]:
                return line
            found = found or line
    return found


def _tail(values: array.array[Any], line: Line) -> list[Any]:
    return list(values[-len(line["answer_ids"]) :])


def _answer(trained: Trained, line: Line, sampling: Line, made: int) -> Answer:
    count, prompt = len(line["answer_ids"]), line["prompt"]
    fields = {name: sampling[name] for name in ("max_tokens", "temperature")}
    fields |= {**sampling["extra"], "seed": line["seed"]}
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return Answer(
        made=made,
        place=f"group {line['group']}, sample {line['sample']} of @{made}",
        ids=line["answer_ids"],
        logprobs=trained.logprobs[-count:],
        request=(list(trained.ids[:-count]), fields, is_chat),
    )


def batch_of(version: Path) -> Iterator[Trained]:
    """The sequences that a version was trained on, from its `remake.bin`."""
    request = unpacked(memoryview((version / "remake.bin").read_bytes()))
    assert isinstance(request.message, RunJob)
    assert isinstance(request.message.job, TrainMerged)
    names = (spec.name for spec in request.message.job.tensors)
    buffers = dict(zip(names, request.buffers, strict=True))

    def values(name: str, code: str = "i") -> array.array[Any]:
        return array.array(code, bytes(buffers.get(name, b"")))

    ids, lengths, versions = map(values, ("tokens", "sequence_lengths", "versions"))
    logprobs, begin = values("sampler_logprobs", "f"), 0
    if len(versions) == len(lengths):
        pairs = zip(versions, lengths, strict=True)
        versions = array.array("i", (v for v, length in pairs for _ in range(length)))
    for length in lengths:
        own = slice(begin, begin := begin + length)
        yield Trained(ids=ids[own], logprobs=logprobs[own], versions=versions[own])


def repeat(
    run: RunFile, first: int, last: int, *, on_version: Callable[[int, int], None]
) -> dict[int, Planned]:
    """Sample the answers again that each version after `first` was trained on.

    Args:
        on_version: called before a version samples, with its number and that of the answers.

    Raises:
        ConfigError: as `replaying.numbers_of`; or the answers of this run cannot be sampled again;
            says why.
    """
    numbers = replaying.numbers_of(run, first, last)
    if run.trainer.numerics != "exact":
        raise ConfigError(
            f'trainer.numerics is "{run.trainer.numerics}", under which log-probs depend on what '
            'else vLLM computes; only answers of runs with "exact" can be sampled again'
        )
    planned = _plan_all(run.run_dir, numbers[1:])
    by_version: dict[int, list[tuple[Planned, Answer]]] = {}
    for own in planned.values():
        for answer in own.answers:
            by_version.setdefault(answer.made, []).append((own, answer))
    for version in by_version:
        if not (run.run_dir / "versions" / str(version) / "COMPLETE").exists():
            raise ConfigError(
                f"version {version}, which sampled answers of these steps, is not on disk; begin "
                "with a later --from. orchestrator.keep_versions = 0 keeps all"
            )
    for version, found in sorted(by_version.items()):
        on_version(version, len(found))
        made = _sampled(run, version, [answer.request for _, answer in found])
        for (own, answer), (ids, logprobs) in zip(found, made, strict=True):
            if said := answer.difference(ids, logprobs):
                own.differ.append(said)
    return planned


def _plan_all(run_dir: Path, numbers: Sequence[int]) -> dict[int, Planned]:
    loop = run_dir / decisions.LOOP_DIR
    if not (loop / decisions.LOG).exists():
        raise ConfigError(f"{loop} has no {decisions.LOG}: no loop of this run is on disk")
    events = list(decisions.read(loop / decisions.LOG))
    steps = {e["version"]: e["step"] for e in events if e["event"] == "trained"}
    starts = [(e["at"], e["config"]["sampling"]) for e in events if e["event"] == "start"]
    if all(sampling["seed"] is None for _, sampling in starts):
        raise ConfigError(
            "the loop had no sampling.seed, so its answers cannot be sampled again; set one for "
            "the next run"
        )

    def sampling(line: Line) -> Line:
        return next((own for at, own in reversed(starts) if at <= line["at"]), starts[0][1])

    found = {}
    for number in numbers:
        folder = loop / samples.SAMPLES
        if number not in steps or not samples.path_of(folder, steps[number]).exists():
            raise ConfigError(
                f"{folder} has no samples of the step that made version {number}; "
                "loop.keep_samples says how many steps stay on disk, and who makes steps without "
                "the loop has none"
            )
        batch = batch_of(run_dir / "versions" / str(number))
        found[number] = plan(batch, samples.read(folder, steps[number]), sampling)
    return found


def _sampled(run: RunFile, version: int, requests: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Have vLLM answer with a version's weights. Returns ids and log-probs."""
    with tempfile.TemporaryDirectory(prefix="splice-resample-") as name:
        folder = Path(name)
        export.model(run, version, folder / "model", device="cpu")
        changed = {"model": folder / "model", "load_format": "auto"}
        config = run.inference_config(0).model_copy(update=changed)
        (folder / "config.json").write_text(config.model_dump_json())
        (folder / "requests.json").write_text(json.dumps(requests))
        try:
            done = subprocess.run(
                python_command(
                    run.inference.python, "-m", "inference_node.server.resample", folder
                ),
                env=python_environment(os.environ),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            text = f"version {version} samples for {TIMEOUT_S:.0f} s already; take fewer versions"
            raise ConfigError(text) from None
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-30:])
            raise ConfigError(f"vLLM cannot sample with version {version}:\n{said}")
        found: list[tuple[list[int], Any]] = json.loads((folder / "answers.json").read_text())
        return found
