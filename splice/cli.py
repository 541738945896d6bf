"""The `splice` command."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from orchestrator.config import OrchestratorConfig
from orchestrator.errors import ConfigError, JournalError, SpliceError
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.config import Device
from orchestrator.server import Orchestrator
from splice import run_cli, train_cli
from splice.bits import Sides
from splice.bits import compare as compare_bits
from splice.client.run_file import TOKEN, TrainerSection, load, node_file
from splice.cluster import doctor as doctoring
from splice.cluster import keys as keyring
from splice.cluster.machine import inference_python, local_model
from splice.cluster.up import some_token
from splice.run_cli import AsJson, FileArgument, Overrides
from splice.smoke.config import SmokeConfig, smoke_run
from splice.smoke.interrupts import Interrupts
from splice.smoke.run import run_smoke
from trainer_node.launcher import host as trainer_host


class _Commands(TyperGroup):
    """Prints what a command raises as one sentence, and ends with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (SpliceError, JournalError, OSError, sqlite3.Error) as error:
            typer.secho(f"splice: {error}", fg="red", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(run_cli.app)
app.add_typer(train_cli.app)
TABLE_WIDTH = 130
MODELS = Path("runs/models")
TrainerPython = Annotated[Path, typer.Option(help="Interpreter of the trainer environment.")]
InferencePython = Annotated[Path, typer.Option(help="Interpreter of the inference environment.")]
_HERE = Path(sys.executable)
_INFERENCE = inference_python()
_FOLDER = Path()
Arch = Literal["qwen3", "qwen3_moe"]
DType = Literal["float32", "bfloat16"]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splice {importlib.metadata.version('splice')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Reinforcement learning on split GPUs."""


@app.command()
def smoke(
    file: Annotated[
        Path | None, typer.Argument(help="A run.toml. Default: a tiny model on the CPU.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        Path | None,
        typer.Option(help="HF checkpoint folder, or a Hub id. Default: the file's, or a tiny one."),
    ] = None,
    arch: Annotated[
        Arch, typer.Option(help="Which tiny model to make, on first use.")
    ] = "qwen3_moe",
    steps: Annotated[
        int, typer.Option(min=1, help="TrainMerged jobs, so the last version is name@STEPS.")
    ] = 2,
    lr: float = 5e-3,
    report: Annotated[Path | None, typer.Option(help="Write the report there as JSON.")] = None,
    proof: Annotated[
        bool, typer.Option(help="Compare served log-probs with PEFT + transformers.")
    ] = True,
    trainer_module: Annotated[
        str, typer.Option(hidden=True, help="For tests that inject failures.")
    ] = "trainer_node",
) -> None:
    """From checkpoint to name@STEPS: train, merge, publish, prove. Exit code 0 only if every check
    held.

    `--set device=cuda` uses GPU 0 for the trainer and GPU 1 for vLLM. The run's folder is
    runs/smoke/<time>, or `--set run_dir=...`.
    """
    console = _console()
    try:
        run = smoke_run(
            file,
            overrides or (),
            model=None if model is None else local_model(model, python=_HERE),
            tiny=lambda: _tiny_model(arch, console),
            proof=proof,
        )
        config = SmokeConfig(
            run=run, steps=steps, lr=lr, report=report, proof=proof, trainer_module=trainer_module
        )
        interrupts = Interrupts()
        interrupts.install()
        result = run_smoke(config, console=console, check_interrupts=interrupts.check)
    except KeyboardInterrupt:
        console.print("interrupted; every process of the run was ended")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def serve(
    file: FileArgument = _FOLDER,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in the file's run_dir, if there is one there."
        ),
    ] = False,
    stop_on_term: Annotated[
        bool,
        typer.Option(
            "--stop-on-term",
            help="SIGTERM ends the run. By default it ends only the orchestrator, for --resume.",
        ),
    ] = False,
) -> None:
    """Run the orchestrator of a run.toml until a client stops it.

    SPLICE_RUN_TOKEN may hold the run's token; without it a new run makes one.
    """
    log_to_stderr()
    run = load(file, overrides or ())
    config = run.orchestrator_config(run_token=some_token(run.run_dir), resume=resume)
    bound = _old_endpoint(run.run_dir, config.endpoint, resume=resume)
    asyncio.run(_serve(config.model_copy(update={"endpoint": bound, "stop_on_term": stop_on_term})))


def _old_endpoint(run_dir: Path, endpoint: str, *, resume: bool) -> str:
    """The orchestrator of a run that lives on binds its earlier endpoint, where nodes and clients
    look for it."""
    path = run_dir / "bound"
    return path.read_text().strip() if resume and path.is_file() else endpoint


async def _serve(config: OrchestratorConfig) -> None:
    orchestrator = Orchestrator(config)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, orchestrator.stop)
    loop.add_signal_handler(
        signal.SIGTERM, orchestrator.stop if config.stop_on_term else orchestrator.leave
    )
    await orchestrator.serve()


@app.command()
def trainer(
    file: FileArgument = _FOLDER,
    overrides: Overrides = None,
    nodes: Annotated[
        int, typer.Option(help="Hosts that the trainer runs on; run this command on each.")
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(help="This host's rank; --rendezvous names the host with rank 0.")
    ] = 0,
    rendezvous: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of node rank 0, the same on every host. HOST must not be loopback."
        ),
    ] = "",
    prefix: Annotated[
        str,
        typer.Option(
            help="Prefix of the command line, such as 'docker run --rm --init -i ... IMAGE'. "
            "trainer.python is then the interpreter as the prefix's command sees it."
        ),
    ] = "",
    template: Annotated[
        bool,
        typer.Option(
            help="Keep a process with all imports done, so that ranks restart within seconds."
        ),
    ] = True,
    module: Annotated[
        str, typer.Option(hidden=True, help="For tests that inject failures.")
    ] = "trainer_node",
) -> None:
    """Launch the trainer of a run.toml on this host and restart it after crashes.

    Endpoint and token come from the run's folder, or from SPLICE_ENDPOINT and SPLICE_RUN_TOKEN.
    """
    log_to_stderr()
    run, node_id = load(file, overrides or ()), "trainer"
    os.environ.update(_trainer_variables(run.trainer))
    os.environ[TOKEN] = token = run.token()  # the ranks read it
    launch = trainer_host.TrainerLaunch(
        endpoint=run.endpoint(),
        config=node_file(run, node_id, run.trainer_config().model_dump_json(indent=1)),
        python=str(run.trainer.python),
        module="trainer_node.follower" if run.trainer.follow else module,
        node_id=node_id,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        prefix=tuple(trainer_host.split_prefix(prefix)),
        max_restarts=run.trainer.max_restarts,
        template=template and run.trainer.follow is None,
    )
    code = trainer_host.run(launch, run_token=token)
    raise typer.Exit(code)


def _trainer_variables(trainer: TrainerSection) -> dict[str, str]:
    """Return what the ranks on this host need in their environment, whatever the shell has."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if trainer.device == "cuda" and trainer.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, trainer.gpus))
    return own


@app.command()
def doctor(
    role: Annotated[
        list[doctoring.NodeRole] | None,
        typer.Option(help="Repeat it. Default: what is installed."),
    ] = None,
    python: Annotated[Path, typer.Option(help="Interpreter of the environment to judge.")] = _HERE,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda where the host has GPUs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this host's GPUs and one environment's package versions for a role.

    Exit code 1 if a version does not fit or a package is missing. The last lines compare the
    versions with those that ran together.
    """
    console = _console()
    gpus = doctoring.list_gpus()
    on_gpus = device == "cuda" or (device is None and bool(gpus))
    findings = doctoring.diagnose(python=python, roles=role or (), on_gpus=on_gpus)
    compared = doctoring.compare(findings, on_gpus=on_gpus)
    fits = all(f.ok for f in findings) and (device != "cuda" or bool(gpus))
    if as_json:
        rows = {
            "packages": list(map(asdict, findings)),
            "gpus": list(map(asdict, gpus)),
            "ran_together": compared,
        }
        typer.echo(json.dumps({"ok": fits, **rows}, indent=1))
    else:
        _print_findings(console, findings, gpus)
        for line in compared:
            console.print(line, highlight=False, soft_wrap=True)
        console.print(
            f"This is {python}. --python names another environment's.",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(0 if fits else 1)


def _print_findings(
    console: Console, findings: Sequence[doctoring.Finding], gpus: Sequence[doctoring.Gpu]
) -> None:
    table = Table("role", "package", "installed", "wanted", "")
    for f in findings:
        verdict = "[green]ok[/green]" if f.ok else f"[red]no[/red], {f.note}"
        if f.ok and f.installed == "-":
            verdict = "[dim]not needed here[/dim]"
        table.add_row(f.role, f.package, f.installed, f.wanted, verdict)
    console.print(table)
    for gpu in gpus:
        console.print(
            f"GPU {gpu.index}: {gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}",
            highlight=False,
        )
    if not gpus:
        console.print("no GPUs: NVML lists none", highlight=False)


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(help="HF checkpoint folder, or a hub id; with --bits also a run's folder."),
    ],
    bits: Annotated[
        bool,
        typer.Option(
            help="Compare trainer and vLLM operation by operation, with the model's own weights."
        ),
    ] = False,
    exact: Annotated[
        bool, typer.Option(help="With --bits: as under trainer.numerics = exact.")
    ] = False,
    device: Annotated[Device | None, typer.Option(help="With --bits: a run's, or cpu.")] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="With --bits: a run's, or float32 on a CPU, bfloat16 on a GPU."),
    ] = None,
    whole: Annotated[
        bool, typer.Option(help="With the model's own weights, not a small one of its kind.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(help="Publish the small model to a vLLM on the CPU as well, by `smoke`."),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="File for the report, as JSON.")] = None,
    trainer_python: TrainerPython = _HERE,
    inference_python: InferencePython = _INFERENCE,
) -> None:
    """Check that the trainer computes a model as transformers does, or with --bits as vLLM does.

    Exit code 1 if it does not, 2 if the model cannot be checked.
    """
    if bits:
        interpreters = {"trainer_python": trainer_python, "inference_python": inference_python}
        sides = Sides.of(model, is_exact=exact, device=device, dtype=dtype, **interpreters)
        raise typer.Exit(compare_bits(sides, report))
    if whole and serve:
        text = (
            f"--serve publishes the small model; for its own weights: splice smoke --model {model}"
        )
        raise ConfigError(text)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "model"
        argv = python_command(
            trainer_python, "-m", "trainer_node.tools.check_model", "--model", model
        )
        argv += ["--whole"] * whole + (["--out", str(report)] if report else [])
        argv += ["--keep", str(small)] if serve else []
        # On a CPU: transformers would take its kernels for GPUs where it sees one.
        env = python_environment({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        try:
            code = subprocess.run(argv, env=env, check=False).returncode
        except OSError as error:
            raise ConfigError(f"--trainer-python {trainer_python}: {error.strerror}") from error
        if code or not serve:
            raise typer.Exit(code)
        pythons = {"trainer": trainer_python, "inference": inference_python}
        where = [f"run_dir={folder}/run", *(f"{r}.python={p}" for r, p in pythons.items())]
        run = smoke_run(None, where, model=small, tiny=lambda: small)
        result = run_smoke(SmokeConfig(run=run), console=_console())
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def keys(
    directory: Annotated[
        Path,
        typer.Argument(
            help="A new, private folder. Copy each node's subfolder to that node's host."
        ),
    ],
    trainer_hosts: Annotated[int, typer.Option(min=1, help="Hosts that the trainer runs on.")] = 1,
    inference: Annotated[
        list[str], typer.Option(help="Node id of an inference node; repeat it.")
    ] = ["inference-0"],  # noqa: B006
    client: Annotated[
        list[str], typer.Option(help="A client; repeat it to give each its own key.")
    ] = ["client"],  # noqa: B006
) -> None:
    """Make CURVE keys for the orchestrator, each node and each client of a run off loopback."""
    hosts = keyring.make(
        directory, trainer_hosts=trainer_hosts, inference=inference, clients=client
    )
    typer.echo(f"Set orchestrator.curve_dir to {directory / 'orchestrator'}.")
    for host in hosts:
        typer.echo(
            f"Copy {directory / host} to the host of {host}, and set SPLICE_CURVE_DIR to it there."
        )


def _console() -> Console:
    """A console wide enough for the table, even without a terminal."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _tiny_model(arch: Arch, console: Console) -> Path:
    path = MODELS / f"tiny-{arch.replace('_', '-')}"
    if not (path / "config.json").exists():
        console.print(f"making the tiny {arch} checkpoint in {path}")
        argv = python_command(
            _HERE, "-m", "trainer_node.tools.make_checkpoint", "--arch", arch, "--out", path
        )
        done = subprocess.run(
            argv,
            env=python_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode != 0:
            raise ConfigError(f"could not make {path}: {(done.stdout + done.stderr)[-2000:]}")
    return path
