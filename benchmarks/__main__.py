"""`python -m benchmarks NAME`: run one benchmark; `compare A B`, `show A`, `plot A OUT.png` work on
result files. Without a name: a list.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import harness

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
BENCHMARKS = {
    "control": "round trips of an empty job: client, orchestrator, journal, node",
    "arrival": "a training job's way from the socket to its first micro-batch on the device",
    "wire": "bandwidth of the transfer group alone",
    "edges": "the plan of which rank sends what to which worker: its time, and its busiest link",
    "links": "the plan of edges over throttled links of network namespaces, against its arithmetic",
    "merge": "adapters merged into a MoE's experts, bytes per second",
    "experts": "a MoE layer's experts, against TransformerEngine's GroupedLinear",
    "export": "the trainer's merged tensors, against Megatron-Bridge's export",
    "logits": "memory and time of the language-model head",
    "save": "a durable checkpoint, against torch.save of the same tensors",
    "sync": "whole publications, against vLLM's nccl engine",
    "delta": "publications of changed elements over slow links: bytes against entropy, seconds",
    "pause": "gaps between tokens of many streams during a publication",
    "train": "tokens per second of a LoRA step, against a bare Megatron-Bridge loop and PEFT",
    "long": "tokens per second of long sequences, and of prefixes that sequences share",
    "tinker": "a training cycle through the Tinker server, against SpliceClient",
    "loop": "whole RL steps: seconds by phase, share of idle time",
    "replay": "a MoE's log-prob gap with and without router replay",
    "soak": "hundreds of jobs with crashes of the trainer: what grows, what is lost",
    "failures": "jobs that fail, each followed by ordinary ones: seconds until all is whole again",
    "convergence": "reward, KL and log-prob gap, against a control in one process",
    "learning": "a pretrained model learns, against a control in one process",
    "losses": "a pretrained model learns by every loss and every way to make advantages",
    "exact": "numerics = exact against served: log-prob difference, tokens per second, operations",
    "fidelity": "what a served version has of a LoRA update, for each way of rounding",
}
WITH_INFERENCE = (
    "sync",
    "delta",
    "pause",
    "tinker",
    "loop",
    "replay",
    "soak",
    "failures",
    "convergence",
    "learning",
    "losses",
    "exact",
)
"""Those that start a cluster; they need an inference environment (SPLICE_INFERENCE_PYTHON or
.venv-inference).
"""


def _add(name: str) -> None:
    @app.command(name=name, help=_docstring(name), short_help=BENCHMARKS[name])
    def run(
        out: Annotated[Path | None, typer.Option(help="Write the result there as JSON.")] = None,
        png: Annotated[Path | None, typer.Option(help="Draw the result there.")] = None,
        small: Annotated[bool, typer.Option(help="A size that runs on a CPU in seconds.")] = False,
        device: str = "cpu",
    ) -> None:
        result = harness.make_result(name, (), device=device, with_inference=name in WITH_INFERENCE)
        for case in importlib.import_module(f"benchmarks.{name}").run(device=device, small=small):
            # Some benchmarks hand their cases over one by one: what is there survives whatever ends
            # the next.
            result = harness.with_case(result, case)
            if out is not None:
                result.write(out)
        harness.print_table(result, _console())
        if png is not None:
            _draw(result, png)


def _docstring(name: str) -> str:
    """A benchmark's own words, read without importing it and all that it needs."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    return ast.get_docstring(ast.parse(source)) or ""


for _name in BENCHMARKS:
    _add(_name)


@app.command()
def suite(
    out: Annotated[Path, typer.Option(help="Folder for logs and results.")],
    gpus: Annotated[str, typer.Option(help="Which GPUs, comma-separated.")] = "0,1",
    only: Annotated[
        str, typer.Option(help="Tasks whose names begin with one of these, comma-separated.")
    ] = "",
    limit_s: Annotated[float, typer.Option(help="Seconds for all together.")] = 7200.0,
) -> None:
    """All GPU tests and benchmarks, on free GPUs as they come, each within a time limit."""
    from benchmarks import suite as plan

    tasks = [t for t in plan.TASKS if any(t.name.startswith(word) for word in only.split(","))]
    console = _console()
    outcomes = plan.run_all(
        tasks, gpus=[int(g) for g in gpus.split(",")], out=out, limit_s=limit_s, console=console
    )
    plan.print_outcomes(outcomes, console)
    if any(o.code != 0 for o in outcomes):
        raise typer.Exit(1)


@app.command()
def show(path: Path) -> None:
    """Print a result's table."""
    harness.print_table(harness.load(path), _console())


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two results of one benchmark."""
    harness.print_comparison(harness.load(before), harness.load(after), _console())


@app.command()
def plot(path: Path, out: Path) -> None:
    """Draw a result as PNG, in the benchmark's own way if it has one."""
    _draw(harness.load(path), out)


def _console() -> Console:
    """A file or a pipe gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 220)


def _draw(result: harness.Result, out: Path) -> None:
    module = importlib.import_module(f"benchmarks.{result.benchmark}")
    getattr(module, "plot", harness.plot)(result, out)


if __name__ == "__main__":
    app()
