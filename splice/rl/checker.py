"""Proves what a loop promises, from its log only.

python -m splice.rl.checker RUN/loop/decisions.jsonl

bound        no token was older than max_staleness when a step trained on it; in an environment,
             no token of any turn that trains
every token  the answers' spans have as many tokens as the step trains on, each with a version that
             was served by then
versions     an answer's versions never decrease, and none is older than its admission
every prompt each step has the next prompts, in order, with every sample of each; a prompt is
             replaced (dynamic_sampling) by the next one of its group, once its samples are whole
once         no sample is trained twice, none without an answer
nothing      whatever was admitted was trained, unless it was dropped (on_error), asked again,
discarded    or belongs to a step that an ended start of the loop had not trained; an environment
             may leave turns of a rollout out, but not the rollout
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.run_file import run_folder
from splice.rl import decisions

Place = tuple[int, int]
"""Group and sample."""


@dataclass(slots=True)
class Found:
    """What the log shows."""

    violations: list[str] = field(default_factory=list)
    starts: int = 0
    steps: int = 0
    trained: int = 0
    dropped: int = 0
    replaced: int = 0
    """Groups whose prompt was replaced."""
    aside: int = 0
    """Rollouts of batches that were set aside."""
    asked_again: int = 0
    pending: int = 0
    tokens: int = 0
    turns_left_out: int = 0
    max_staleness: int = 0

    def text(self) -> str:
        """One line."""
        return (
            f"{self.steps} steps trained {self.trained} rollouts ({self.tokens} tokens, at most "
            f"{self.max_staleness} versions old); {self.asked_again} asked again, {self.dropped} "
            f"dropped, {self.replaced} groups replaced, {self.aside} set aside, {self.pending} "
            f"pending; {len(self.violations)} violations"
        )


@dataclass(slots=True)
class _Turn:
    attempt: int
    version: int
    spans: list[tuple[int, int]] | None = None


@dataclass(slots=True)
class _Sample:
    step: int
    prompt: int
    turns: dict[int, _Turn] = field(default_factory=dict)
    trained: list[int] | None = None
    """The turns that train, as an environment says. None: the only one."""
    dropped: bool = False

    @property
    def attempt(self) -> int:
        return sum(turn.attempt for turn in self.trained_turns() if turn is not None)

    def trained_turns(self) -> list[_Turn | None]:
        return [self.turns.get(turn) for turn in ([0] if self.trained is None else self.trained)]


def _is_whole(sample: _Sample) -> bool:
    return all(turn is not None and turn.spans is not None for turn in sample.trained_turns())


class Checker:
    """Reads decisions in order. Memory is bounded by the steps that are open at once."""

    def __init__(self) -> None:
        self.found = Found()
        self._made = decisions.Made()
        self._config: dict[str, Any] = {}
        self._samples: dict[Place, _Sample] = {}
        self._replaced: dict[int, int] = {}
        """Group -> how often its prompt was replaced, until its step ends."""
        self._sent: dict[str, Any] | None = None
        self._next_group = 0
        self._served_at_start = -1
        self._order: decisions.Order | None = None
        self._ended: dict[str, Any] | None = None
        """The `train` decision of the newest step that ended."""
        self._was_open = False
        """Whether the open step was sent by an earlier start."""
        self._tokens = 0
        """Of the newest batch."""
        self._newest_token = -1
        """The newest version among them."""
        self._run = ""

    def take(self, line: dict[str, Any]) -> None:
        """Check one decision."""
        getattr(self, f"_on_{line['event']}")(line)

    def _wrong(self, text: str) -> None:
        self.found.violations.append(text)

    def _on_start(self, line: dict[str, Any]) -> None:
        self._config, self._served_at_start = line["config"], line["version"]
        self.found.starts += 1
        self._made.add(line["version"])
        run, self._run = self._run, line.get("run", self._run)
        if run and run != self._run:
            self._wrong(f"the loop continues in another run ({self._run}, before {run})")
        self._was_open = self._sent is not None
        if count := line.get("prompts"):
            self._order = decisions.Order(
                count,
                seed=self._config.get("shuffle_seed"),
                replacements=self._config.get("dynamic_sampling", 0),
            )
        sent = set() if self._sent is None else set(self._sent["groups"])
        lost = [place for place in self._samples if place[0] not in sent]
        for place in lost:
            self.found.asked_again += 1
            del self._samples[place]
        self._replaced = {group: n for group, n in self._replaced.items() if group in sent}

    def _on_admit(self, line: dict[str, Any]) -> None:
        place, number = (line["group"], line["sample"]), line.get("turn", 0)
        sample = self._samples.setdefault(place, _Sample(step=line["step"], prompt=line["prompt"]))
        known = sample.turns.get(number)
        if known is not None and line["attempt"] != known.attempt + 1:
            self._wrong(f"{place} was admitted twice as attempt {line['attempt']}")
        if (sample.step, sample.prompt) != (line["step"], line["prompt"]):
            self._wrong(f"{place} lost its place: asked again for another step or prompt")
        replaced = self._replaced.get(line["group"], 0)
        if self._order is not None and sample.prompt != self._order.prompt(line["group"], replaced):
            self._wrong(f"{place} has prompt {sample.prompt}, which is not the next one")
        to_come = line["step"] - 1 - self.found.steps
        age = self._made.age(line["version"]) + max(0, to_come)
        if age > self._config["max_staleness"]:
            self._wrong(
                f"{place} was admitted {age} versions before step {line['step']} can use it"
            )
        sample.turns[number] = _Turn(attempt=line["attempt"], version=line["version"])

    def _on_finish(self, line: dict[str, Any]) -> None:
        place = (line["group"], line["sample"])
        sample = self._samples.get(place)
        turn = None if sample is None else sample.turns.get(line.get("turn", 0))
        if turn is None or turn.attempt != line["attempt"]:
            self._wrong(f"{place} finished, but its attempt {line['attempt']} was not admitted")
            return
        turn.spans = [(version, count) for version, count in line["spans"]]
        versions = [turn.version, *(version for version, _ in turn.spans)]
        if versions != sorted(versions):
            self._wrong(f"{place}: versions {versions[1:]} after an admission at {versions[0]}")

    def _on_turns(self, line: dict[str, Any]) -> None:
        sample = self._samples.get((line["group"], line["sample"]))
        if sample is None or len(set(line["trained"])) != len(line["trained"]):
            self._wrong(f"group {line['group']} trains turns {line['trained']} of no rollout")
            return
        sample.trained = line["trained"]
        self.found.turns_left_out += len(sample.turns.keys() - set(line["trained"]))

    def _on_lost(self, line: dict[str, Any]) -> None:
        self.found.asked_again += 1

    def _on_drop(self, line: dict[str, Any]) -> None:
        place = (line["group"], line["sample"])
        if self._config["on_error"] != "drop":
            self._wrong(f"group {line['group']} lost a sample although on_error is not drop")
        if "step" in line:  # it may have failed before it asked for anything
            self._samples.setdefault(place, _Sample(step=line["step"], prompt=line["prompt"]))
        if place in self._samples:
            self._samples[place].dropped = True
            self.found.dropped += 1

    def _on_replaced(self, line: dict[str, Any]) -> None:
        group = line["group"]
        samples = {place: s for place, s in self._samples.items() if place[0] == group}
        if sorted(sample for _, sample in samples) != list(range(self._config["group_size"])):
            self._wrong(f"group {group} was replaced before all of its samples were asked for")
        for place, sample in samples.items():
            if not (sample.dropped or _is_whole(sample)):
                self._wrong(f"group {group} was replaced, and {place} had no answer")
            del self._samples[place]
        self._replaced[group] = self._replaced.get(group, 0) + 1
        self.found.replaced += 1
        if self._replaced[group] > self._config.get("dynamic_sampling", 0):
            self._wrong(f"group {group} was replaced more often than dynamic_sampling allows")

    def _on_train(self, line: dict[str, Any]) -> None:
        if self._sent is not None and self._sent["step"] == line["step"]:
            if line["rollouts"] != self._sent["rollouts"]:
                self._wrong(f"step {line['step']} was sent again with other rollouts")
            if line["version"] != self._sent["version"]:
                self._wrong(f"step {line['step']} was sent again for version {line['version']}")
            # A new start sends the same attempt: its job may have an outcome.
            if line["attempt"] < self._sent["attempt"] + (not self._was_open):
                self._wrong(f"step {line['step']} was sent twice as attempt {line['attempt']}")
            self._sent["attempt"] = line["attempt"]
            return
        if line["step"] != self.found.steps + 1:
            self._wrong(f"step {line['step']} was sent after step {self.found.steps}")
        if line["version"] != self._made.newest:
            self._wrong(f"step {line['step']} trains on version {line['version']}, not the newest")
        self._sent = dict(line)
        self._check_batch(line)

    def _check_batch(self, line: dict[str, Any]) -> None:
        step, number = line["step"], self._config["groups_per_step"]
        own = {place: s for place, s in self._samples.items() if s.step == step}
        groups = line["groups"]
        if groups != list(range(self._next_group, self._next_group + number)):
            self._wrong(f"step {step} has groups {groups}, not the next {number}")
        for group in groups:
            samples = sorted(sample for g, sample in own if g == group)
            if samples != list(range(self._config["group_size"])):
                self._wrong(f"group {group} was asked for samples {samples}")
            if len({own[group, sample].prompt for sample in samples}) > 1:
                self._wrong(f"group {group} has answers to several prompts")
        trained = [(group, sample) for group, sample, _ in line["rollouts"]]
        if len(set(trained)) != len(trained):
            self._wrong(f"step {step} trains twice on a rollout")
        wanted = {place for place, sample in own.items() if not sample.dropped}
        if missing := sorted(wanted - set(trained)):
            self._wrong(f"step {step} discarded {missing}")
        self._tokens, self._newest_token = 0, -1
        for group, sample, attempt in line["rollouts"]:
            self._check_rollout(step, own.get((group, sample)), (group, sample), attempt)
        if line.get("tokens", self._tokens) != self._tokens:  # older logs do not say
            self._wrong(
                f"step {step} trains on {line['tokens']} sampled tokens, but its answers' spans "
                f"have {self._tokens}"
            )

    def _check_rollout(self, step: int, sample: _Sample | None, place: Place, attempt: int) -> None:
        turns = [] if sample is None or sample.dropped else sample.trained_turns()
        spans = [turn.spans for turn in turns if turn is not None and turn.spans is not None]
        if sample is None or sample.attempt != attempt or not turns or len(spans) != len(turns):
            self._wrong(f"step {step} trains on {place}, of which it has no answer")
            return
        for version, count in (span for turn in spans for span in turn):
            age = self._made.age(version)
            self._tokens += count
            self._newest_token = max(self._newest_token, version)
            self.found.max_staleness = max(self.found.max_staleness, age)
            if age > self._config["max_staleness"]:
                self._wrong(
                    f"step {step} trains on {count} tokens of {place}, {age} versions old; "
                    f"max_staleness is {self._config['max_staleness']}"
                )

    def _on_failed(self, line: dict[str, Any]) -> None:
        if "aside" in line:
            self._end_step(line["step"], is_trained=False)
        elif line["steps_taken"]:
            self._end_step(line["step"])
        elif line["code"] not in decisions.PASSING and self._sent is not None:
            self._sent = None  # sampled again, which counts at the next start

    def _on_trained(self, line: dict[str, Any]) -> None:
        was_open, self._was_open = self._was_open, False
        if self._sent is not None:
            self._end_step(line["step"])
        elif line["step"] != self.found.steps:
            self._wrong(f"step {line['step']} was trained without a batch")
        if self._newest_token >= line["version"]:
            self._wrong(
                f"step {line['step']} trained on tokens of version {self._newest_token} and made "
                f"version {line['version']}"
            )
        # Its job ended, and somebody may have published, before the new start.
        lag = self._served_at_start - line["version"]
        was_seen = lag >= 0 if was_open else lag == 0
        if line["version"] <= self._made.newest and not was_seen:
            self._wrong(f"step {line['step']} made version {line['version']} again")
        self._made.add(line["version"])

    def _end_step(self, step: int, *, is_trained: bool = True) -> None:
        if self._sent is None or self._sent["step"] != step:
            self._wrong(f"step {step} ended, but was not sent")
            return
        self.found.steps = step
        if is_trained:
            self.found.trained += len(self._sent["rollouts"])
            self.found.tokens += self._tokens
        else:
            self.found.aside += len(self._sent["rollouts"])
        self._next_group = self._sent["groups"][-1] + 1
        self._samples = {place: s for place, s in self._samples.items() if s.step != step}
        for group in self._sent["groups"]:
            self._replaced.pop(group, None)
        self._sent, self._ended = None, self._sent

    def _on_reopened(self, line: dict[str, Any]) -> None:
        if self._ended is None or self._ended["step"] != line["step"]:
            self._wrong(f"step {line['step']} was reopened, but is not the last one")
            return
        self.found.steps -= 1
        self.found.trained -= len(self._ended["rollouts"])
        self.found.tokens -= self._tokens
        self._next_group = self._ended["groups"][0]
        self._sent, self._ended = self._ended, None

    def _on_note(self, line: dict[str, Any]) -> None:
        """The user's own numbers."""

    def end(self) -> Found:
        """Return what was found, after the last decision."""
        self.found.pending = len(self._samples)
        return self.found


def check(lines: Iterable[dict[str, Any]]) -> Found:
    """Check a whole log."""
    checker = Checker()
    for line in lines:
        checker.take(line)
    return checker.end()


def main(argv: list[str]) -> int:
    """Print what the log shows. Returns 1 if it breaks a promise, 2 without a log."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m splice.rl.checker RUN/loop/decisions.jsonl, or RUN\n")
        return 2
    path = Path(argv[0])
    try:
        if path.is_dir():
            path = run_folder(path) / decisions.LOOP_DIR / decisions.LOG
        if not path.is_file():
            raise ConfigError(
                f"there is no {path}; a loop writes it into loop/ in the run's folder"
            )
        found = check(decisions.read(path))
        if not found.starts:
            raise ConfigError(f"{path} holds no decision")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for violation in found.violations:
        sys.stdout.write(f"violation: {violation}\n")
    sys.stdout.write(found.text() + "\n")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
