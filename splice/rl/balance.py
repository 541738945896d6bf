"""Which side of a loop waits, and what would help.

trainer waits    no job runs while the batch is not complete, or it waits for nodes
sampler waits    no request is with a replica, because no rollout may be admitted or none is ready
rewards          neither works, because rewards are being computed
body             neither works on the next step, because the user's loop body runs
outage           a side waits because nodes are away, or were a moment ago
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

BALANCED = 0.05
"""Share of a step that a side may wait before anything is said."""
SIDES = ("trainer_waits", "sampler_waits", "rewards", "body")
"""What `Balance` has shares of."""
_STATES = ("sampling", "scoring", "training", "body", "no_replica", "no_node")


@dataclass(slots=True)
class Meter:
    """Adds up the seconds of one step: how long each of the activities had work."""

    _open: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STATES, 0))
    _seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.monotonic)

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        passed, self._since_s = now_s - self._since_s, now_s
        working = {state for state in _STATES[:4] if self._open[state]}
        has_no_node = self._open["no_node"] > 0
        has_no_replica = self._open["no_replica"] > 0 and "sampling" not in working
        if has_no_node:
            working.discard("training")
        spent = {
            "step": True,
            "requests": self._open["sampling"],  # times seconds: divided by "step" their mean
            **{state: state in working for state in _STATES[:4]},
            "outage": has_no_node or has_no_replica,
            "trainer_waits": not working & {"training", "body"},
            "sampler_waits": "sampling" not in working,
            "rewards": working == {"scoring"} and not (has_no_node or has_no_replica),
        }
        for name, weight in spent.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + passed * float(weight)

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Count the block's time; blocks of the same activity may overlap."""
        self._pass_time()
        self._open[state] += 1
        try:
            yield
        finally:
            self._pass_time()
            self._open[state] -= 1

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, and begin again."""
        self._pass_time()
        taken, self._seconds = self._seconds, {}
        return {name: round(seconds, 6) for name, seconds in taken.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Shares of the time of some steps, each from 0 to 1."""

    trainer_waits: float
    sampler_waits: float
    rewards: float
    body: float
    outage: float
    max_staleness: int

    @classmethod
    def of(cls, steps: Sequence[dict[str, float]], *, max_staleness: int) -> Balance:
        """From what `Meter.take` returned for each step."""
        total = sum(step["step"] for step in steps) or 1.0
        shares = {
            name: sum(step.get(name, 0.0) for step in steps) / total for name in (*SIDES, "outage")
        }
        return cls(**shares, max_staleness=max_staleness)

    def advice(self) -> str:
        """What would help, in a sentence."""
        trainer, sampler = self.trainer_waits, self.sampler_waits
        matters = max(BALANCED, max(trainer, sampler) / 2)  # explains most of the waiting
        if self.outage > matters:
            return "nodes were away: `splice status` names those that are, `splice logs` says why"
        if self.rewards > matters:
            return (
                "rewards hold up both sides: make them faster, async, or raise reward_threads or "
                "reward_processes"
            )
        if self.body > matters:
            return "the loop's body holds up the trainer: evaluate and save less often"
        if self.max_staleness == 0 and min(trainer, sampler) > BALANCED:
            return "strictly on-policy, the sides take turns: max_staleness = 1 lets them overlap"
        if trainer > max(BALANCED, 2 * sampler):
            return (
                "the trainer waits: take more answers a step (vLLM decodes them together), give "
                "inference more GPUs, or shorten answers"
            )
        if sampler > max(BALANCED, 2 * trainer):
            return "the sampler waits: give the trainer more GPUs"
        if max(trainer, sampler) > BALANCED:
            return (
                "both sides wait: a few long answers end each batch; raise max_staleness or "
                "groups_per_step"
            )
        return "balanced"

    def text(self) -> str:
        """One line for logs and `splice status`."""
        return (
            f"trainer waits {self.trainer_waits:.0%}, sampler waits {self.sampler_waits:.0%} of "
            f"the time: {self.advice()}"
        )
