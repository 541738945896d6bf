"""`python -m benchmarks NAME`: run one benchmark; `compare A B`, `show A`, `plot A OUT.png` work on result files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import harness

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
BENCHMARKS = ("control", "logits", "merge", "sync", "convergence")


def _add(name: str) -> None:
    @app.command(name=name, help=(importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0])
    def run(
        out: Annotated[Path | None, typer.Option(help="Write the result there as JSON.")] = None,
        small: Annotated[bool, typer.Option(help="A size that runs on a CPU in seconds.")] = False,
        device: str = "cpu",
    ) -> None:
        module = importlib.import_module(f"benchmarks.{name}")
        result = harness.make_result(name, module.run(device=device, small=small))
        if out is not None:
            result.write(out)
        harness.print_table(result, Console(soft_wrap=True))


for _name in BENCHMARKS:
    _add(_name)


@app.command()
def show(path: Path) -> None:
    """Print a result's table."""
    harness.print_table(harness.load(path), Console(soft_wrap=True))


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two results of one benchmark."""
    harness.print_comparison(harness.load(before), harness.load(after), Console(soft_wrap=True))


@app.command()
def plot(path: Path, out: Path) -> None:
    """Draw a result as PNG, in the benchmark's own way if it has one."""
    result = harness.load(path)
    module = importlib.import_module(f"benchmarks.{result.benchmark}")
    getattr(module, "plot", harness.plot)(result, out)


app()
