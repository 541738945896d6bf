"""The run's report, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.storage.files import replace_file

PHASES = ("rollout", "train", "export", "merge", "wire", "apply", "verify", "pause", "total")


@dataclass(slots=True, kw_only=True)
class SmokeReport:
    """The content of `--report FILE`. Seconds are wall-clock, differences are in nats."""

    model: str
    device: str
    dtype: str
    versions: list[dict[str, Any]] = field(default_factory=list)
    lora_job: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    gpus: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    is_complete: bool = False
    """Whether every step ran. An interrupted run is never ok."""

    @property
    def ok(self) -> bool:
        """Whether every check ran and held."""
        return self.is_complete and not self.failures and bool(self.versions)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return asdict(self) | {"ok": self.ok}

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(self.to_json(), indent=1) + "\n")


def print_table(report: SmokeReport, console: Console) -> None:
    """Print one row per version."""
    table = Table(
        title=f"{escape(report.model)} on {report.device} ({report.dtype}); seconds",
        title_justify="left",
        padding=(0, 1, 0, 0),
        box=SIMPLE,
    )
    for heading in ("version", "loss", "reward", "tokens", "max diff", *PHASES):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.versions:
        seconds = row["seconds"]
        table.add_row(
            row["alias"],
            _number(row.get("loss"), "{:.1e}"),
            _number(row.get("reward"), "{:.3f}"),
            "" if row.get("tokens") is None else str(row["tokens"]),
            _number(row.get("max_logprob_diff"), "{:.1e}"),
            *(_number(seconds.get(p), "{:.3f}") for p in PHASES),
        )
    console.print(table, crop=False, no_wrap=True)
    for failure in report.failures:
        console.print(f"[red]failed[/red] {escape(failure)}")
    total = report.seconds.get("total", 0.0)
    verdict = (
        "[green]every check held[/green]"
        if report.ok
        else f"[red]{len(report.failures)} checks failed[/red]"
    )
    console.print(f"{verdict}; {total:.0f} s, peak memory {report.peak_memory_bytes / 1e9:.1f} GB")


def _number(value: float | None, form: str = "{:.4f}") -> str:
    return "" if value is None else form.format(value)
