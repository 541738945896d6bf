"""What a loop leaves for people: samples on disk, and numbers in the chosen sinks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.protocol.messages import Status
from splice.rl import samples, sinks
from splice.rl.background import Background
from splice.rl.balance import SIDES
from splice.rl.config import LoopConfig

_CLOSE_S = 10.0
_ROOT, _GIT_S = Path(__file__).parents[2], 5.0


def facts_of_run(status: Status) -> dict[str, Any]:
    """Return what trains and where: the model, each role's devices, splice's version and commit."""
    devices: dict[str, list[str]] = {}
    for node in status.nodes:
        own = list(node.gpus) or [str(node.detail.get("device", ""))]
        devices.setdefault(node.role, []).extend(filter(None, own))
    model = next((str(n.detail["model"]) for n in status.nodes if "model" in n.detail), "")
    version = ""  # of a checkout that is on the path and not installed
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("splice")
    return {"model": model, "devices": devices, "splice": version, "commit": _commit()}


def _commit() -> str:
    """Return the commit of the checkout that this code is from. Empty: it is from none."""
    if not (_ROOT / ".git").exists():
        return ""
    argv = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


class Record:
    """Takes rollouts and steps, and returns at once. No failure here ends the loop.

    Raises:
        ConfigError: a sink's package is not installed.
    """

    def __init__(self, folder: Path, config: LoopConfig, *, loop: str, alias: str) -> None:
        sinks.check(config.sinks)
        facts = sinks.LoopFacts(
            folder=folder, loop=loop, alias=alias, config=config.model_dump(mode="json")
        )
        self._sinks = [sinks.SinkThread(name, facts) for name in config.sinks]
        self._tables = [
            sink for sink, name in zip(self._sinks, config.sinks, strict=True) if name == "wandb"
        ]
        self._rows: dict[int, list[dict[str, Any]]] = {}
        """Step -> the rows of its table."""
        self._keeps_samples = config.keep_samples != 0
        self._files = samples.SampleFiles(
            folder / samples.SAMPLES, keep_steps=config.keep_samples or None
        )
        self._background = Background("samples")

    async def __aenter__(self) -> Record:
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Write what is left. Every sink has its deadline, all of them at once."""
        closing = [sink.close for sink in self._sinks]
        closing.append(lambda: self._background.close(timeout_s=_CLOSE_S))
        await asyncio.gather(*map(asyncio.to_thread, closing))

    def sample(self, step: int, rollout: Any, part: int = 0) -> None:
        """Keep a finished `Rollout` of the step."""
        if self._keeps_samples:
            self._background.call(
                lambda: self._files.append(step, samples.line_of(step, rollout, part))
            )
        if self._tables and len(rows := self._rows.setdefault(step, [])) < sinks.TABLE_ROWS:
            rows.append(samples.row_of(step, rollout))

    def step(
        self,
        number: int,
        *,
        version: int,
        train: Mapping[str, float],
        rollout: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> None:
        """Send a trained step's numbers to the sinks."""
        if self._keeps_samples:
            self._background.call(lambda: self._files.prune(number))
        groups = {"train": train, "rollout": rollout, "seconds": seconds}
        whole_s = seconds.get("step") or 1.0
        groups["balance"] = {side: seconds.get(side, 0.0) / whole_s for side in SIDES}
        found = {f"{group}/{name}": v for group, own in groups.items() for name, v in own.items()}
        self.note(number, sinks.with_trl_names({"version": version, **found}))
        rows = self._rows.pop(number, [])
        for sink in self._tables if rows else ():
            sink.table(number, rows)

    def note(self, number: int, metrics: Mapping[str, float]) -> None:
        """Send numbers under their own names."""
        for sink in self._sinks:
            sink.write(number, metrics)

    @property
    def problems(self) -> list[str]:
        """What was lost and why, for each sink that lost something."""
        found = [self._background.problem, *(sink.problem for sink in self._sinks)]
        return [problem for problem in found if problem]
