"""What a loop says of its steps: to its body, in its log and to `splice status`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from orchestrator.protocol.messages import LossSpec, TrainMergedResult
from orchestrator.storage.files import replace_file
from splice.client.advantages import WITHOUT_GROUP
from splice.rl import decisions
from splice.rl.balance import SIDES, Balance
from splice.rl.config import INEXACT, LoopConfig
from splice.rl.parts import parts_of
from splice.rl.rollouts import Group

log = logging.getLogger("splice.rl")
BALANCE_STEPS = 20
"""Steps whose times `splice status` sees together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that was trained and is served.

    Attributes:
        number: counts from 1 over all starts of the loop.
        version: the version that the step made.
        metrics: those of the trainer, and of the rollouts: reward_mean, reward_std,
            rewards/NAME (a reward's part, mean over the rollouts that have it), answer_tokens,
            truncated (share of answers cut off), masked (share of answers without loss),
            mixed_masked (share of sampled tokens without loss, because `mixed` masks them),
            groups_without_signal (share of groups whose rewards are all equal), groups_replaced
            (share of all groups that were asked for), dropped (samples), staleness_mean,
            staleness_max (in versions, over tokens).
        seconds: see `splice.rl.balance`; and the job's own phases as job.*.
        groups: the rollouts. Empty if an earlier start of the loop sampled them.
        result: the training job's.
    """

    number: int
    version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    groups: tuple[Group, ...]
    result: TrainMergedResult


class Said:
    """What `splice status` and the log say of the steps.

    Args:
        loss: of batches that compare a group's rewards; None: batches are the user's.
    """

    def __init__(self, folder: Path, config: LoopConfig, loss: LossSpec | None) -> None:
        self._path, self._config, self._loss = folder / decisions.STATUS, config, loss
        self._recent: list[dict[str, float]] = []
        self._has_said_no_signal = self._has_said_others = False

    def forget(self) -> None:
        """Remove what an earlier start has said."""
        self._path.unlink(missing_ok=True)

    def step(self, step: Step, problems: Sequence[str]) -> None:
        """Write what `splice status` shows."""
        self._recent = [*self._recent[-BALANCE_STEPS:], step.seconds]
        # The first step of a start warms everything up, and says nothing of the balance.
        counted = self._recent[1:] or self._recent
        balance = Balance.of(counted, max_staleness=self._config.max_staleness)
        said = [balance.text()] if len(self._recent) > 1 else []
        text = "; ".join([f"step {step.number} made version {step.version}", *said, *problems])
        log.info("%s", text)
        shares = {name: getattr(balance, name) for name in SIDES}
        ages = {name: step.metrics[name] for name in ("staleness_mean", "staleness_max")}
        found = {"step": step.number, "version": step.version, "at": time.time(), "text": text}
        try:
            replace_file(self._path, json.dumps(found | shares | ages))
        except OSError as error:  # the step is trained and in the log
            log.warning("cannot write %s: %s", self._path, error)

    def warnings(self, step: Step, newest: int) -> None:
        """Warn of what the result names, and once of others and of rewards without signal.

        Args:
            newest: the loop's version before the step.
        """
        if step.version > newest + 1 and not self._has_said_others:
            self._has_said_others = True
            log.warning(
                "step %d made version %d, and this loop had made %d before: somebody else trains "
                "or publishes in this run, or a publication failed. Two loops in one run train the "
                "same weights",
                *(step.number, step.version, newest),
            )
        for text in step.result.warnings:
            log.warning("step %d: %s", step.number, text)
        has_none = step.metrics.get("groups_without_signal") == 1.0
        learns = self._loss is None or self._loss.entropy_bonus or self._loss.kl is not None
        learns = learns or self._config.advantages in WITHOUT_GROUP
        if has_none and not learns and not self._has_said_no_signal:
            self._has_said_no_signal = True  # the metric says it from here on
            log.warning(
                "step %d: in no group do the rewards differ, so all advantages are 0 and nothing "
                "is learnt (group_size %d)",
                *(step.number, self._config.group_size),
            )


def warn_of_changes(
    found: decisions.Past, config: LoopConfig, loss: LossSpec, *, prompts: int, lr: float | None
) -> None:
    """Warn of settings that do not fit to the trainer, or to the loop's earlier starts."""
    extra = config.sampling.extra
    if inexact := sorted(
        {n for n in INEXACT.keys() & extra.keys() if extra[n] not in INEXACT[n]}
        | ({"allowed_token_ids"} & extra.keys() if not loss.allowed_token_ids else set())
    ):
        log.warning(
            "sampling.extra: %s change the distribution that vLLM samples from, and the "
            "trainer does not compute that one; docs/sampling.md has two ways around it",
            inexact,
        )
    before, now = (
        (found.prompts or prompts, found.config.get("shuffle_seed")),
        (prompts, config.shuffle_seed),
    )
    if found.config and before != now:
        log.warning(
            "prompts or shuffle_seed have changed (%s and %s, now %s and %s): within this "
            "pass, some prompts may come twice or not at all",
            *(*before, *now),
        )
    if found.lr is not None and lr is not None and found.lr != lr:
        log.warning(
            "the learning rate was %g and is %g now, with AdamW's moments of before: the next "
            "steps are as large as that",
            *(found.lr, lr),
        )


def line_of(
    number: int,
    asked: Mapping[int, Sequence[int]],
    groups: Sequence[Group],
    *,
    made: decisions.Made,
    config: LoopConfig,
) -> dict[str, Any]:
    """Return a step's `train` decision.

    Args:
        asked: number of each group -> its prompts, of which the last one trains.
    """
    rollouts = [rollout for group in groups for rollout in group]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    return {
        "step": number,
        "version": made.newest,
        "groups": list(asked),
        "prompts": [prompts[-1] for prompts in asked.values()],
        "rollouts": [
            list(place) for place in dict.fromkeys((r.group, r.sample, r.attempt) for r in rollouts)
        ],
        # An answer without versions was given, not sampled.
        "tokens": sum(
            sum(s.sampled) if s.sampled else len(s.answer_ids) for s in sequences if s.versions
        ),
        "metrics": _metrics(groups, made, config)
        | {"groups_replaced": 1 - len(asked) / sum(map(len, asked.values()))},
    }


def _metrics(groups: Sequence[Group], made: decisions.Made, config: LoopConfig) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    ages = [(made.age(version), count) for rollout in rollouts for version, count in rollout.spans]
    tokens = sum(count for _, count in ages)
    cut = [rollout.is_cut for rollout in rollouts]
    mixed = sum(made < 0 for r in rollouts for s in r.sequences for made in s.made_by)
    compared = [
        {part.reward for part in group if part.name == name}
        for group in groups
        for name in {part.name for part in group}
    ]
    asked = config.group_size * config.groups_per_step
    parts = [(name, value) for reward in rewards for name, value in parts_of(reward).items()]
    named = {name: [v for n, v in parts if n == name] for name, _ in parts}
    return {
        **{f"rewards/{name}": fmean(values) for name, values in named.items()},
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "answer_tokens": tokens / len(rollouts),
        "truncated": fmean(cut),
        "masked": fmean(cut) if config.overlong == "mask" else 0.0,
        "mixed_masked": mixed / max(1, tokens) if config.mixed == "mask" else 0.0,
        "groups_without_signal": fmean(len(rewards) == 1 for rewards in compared),
        "dropped": float(asked - len({(r.group, r.sample) for r in rollouts})),
        "staleness_mean": sum(age * count for age, count in ages) / max(1, tokens),
        "staleness_max": float(max((age for age, _ in ages), default=0)),
    }
