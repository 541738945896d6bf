"""The `splice` command."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from orchestrator.config import OrchestratorConfig
from orchestrator.errors import ConfigError, JournalError, SpliceError
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.config import (
    ALL_LINEAR,
    InferenceConfig,
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
)
from orchestrator.protocol.config_errors import mistakes
from orchestrator.protocol.curve import make_keys
from orchestrator.protocol.messages import check_node_id
from orchestrator.publication.config import PublicationConfig
from orchestrator.server import Orchestrator
from splice import doctor as doctoring
from splice import run_cli
from splice.cluster import trainer_variables
from splice.machine import inference_python, local_model
from splice.run_cli import AsJson, Overrides, node_file
from splice.run_file import load
from splice.smoke.config import SmokeConfig
from splice.smoke.interrupts import Interrupts
from splice.smoke.run import run_smoke
from splice.up import some_token
from trainer_node.launcher import host as trainer_host

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(run_cli.app)
TABLE_WIDTH = 130
MODELS = Path("runs/models")
TINY = {"qwen3": MODELS / "tiny-qwen3", "qwen3_moe": MODELS / "tiny-qwen3-moe"}
TrainerPython = Annotated[Path, typer.Option(help="Interpreter of the trainer environment.")]
InferencePython = Annotated[Path, typer.Option(help="Interpreter of the inference environment.")]
PublicationModeOption = Annotated[
    str,
    typer.Option(
        help="in_place, or shadow: receive beside the live weights during generation, then swap."
    ),
]
ShadowBytes = Annotated[
    int, typer.Option(help="Most bytes shadow mode may use beside the model, on each worker.")
]
_PUBLICATION = PublicationConfig()
_ORCHESTRATOR = OrchestratorConfig(
    run_dir=Path(), run_token="", name="defaults", publication=_PUBLICATION
)
_HERE = Path(sys.executable)
_INFERENCE = inference_python()
_CHECKED = {m.__name__: m for m in (LoraConfig, ParallelConfig, TrainerConfig, InferenceConfig)}
"""Models that options fill, by the title of their errors."""


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
    model: Annotated[
        Path | None,
        typer.Option(
            help="HF checkpoint folder, or a Hub id. Default: a tiny Qwen3-MoE, made on first use."
        ),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Which tiny model to make: qwen3 or qwen3_moe.")
    ] = "qwen3_moe",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on the CPU) or bfloat16 (default on GPUs).")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="TrainMerged jobs, so the last version is name@STEPS.")
    ] = 2,
    report: Annotated[Path | None, typer.Option(help="Write the report there as JSON.")] = None,
    name: Annotated[str, typer.Option(help="The served alias.")] = "tiny",
    finetuning_type: Annotated[
        str,
        typer.Option(
            help="lora: adapters are trained and merged; full: every parameter is trained."
        ),
    ] = "lora",
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: Annotated[
        float, typer.Option(help="Of the adapters' inputs, in training passes only.")
    ] = 0.0,
    lora_targets: Annotated[
        str,
        typer.Option(help="Comma-separated ends of HF module names; all-linear, or with lm_head."),
    ] = ALL_LINEAR,
    lr: float = 5e-3,
    random_init: Annotated[
        bool, typer.Option(help="Random weights; the model folder needs no safetensors.")
    ] = False,
    proof: Annotated[
        bool, typer.Option(help="Compare served log-probs with PEFT + transformers.")
    ] = True,
    trainer_gpus: str = "0",
    inference_gpus: str = "1",
    trainer_tp: int = 1,
    trainer_pp: int = 1,
    trainer_ep: int = 1,
    trainer_cp: Annotated[
        int, typer.Option(help="Ranks that share each sequence (context parallelism).")
    ] = 1,
    trainer_etp: Annotated[
        int, typer.Option(help="Ranks that share each expert (expert tensor parallelism).")
    ] = 1,
    trainer_ranks: Annotated[
        int, typer.Option(help="Trainer processes; 0: as many as the sizes need.")
    ] = 0,
    inference_tp: int = 1,
    port: Annotated[int, typer.Option(help="Port of the OpenAI API; 0: any.")] = 0,
    mode: PublicationModeOption = _PUBLICATION.mode,
    shadow_bytes: ShadowBytes = _PUBLICATION.shadow_bytes,
    gpu_memory_utilization: float = 0.85,
    cuda_graphs: bool = False,
    trainer_python: TrainerPython = _HERE,
    inference_python: InferencePython = _INFERENCE,
    run_dir: Annotated[
        Path | None, typer.Option(help="A new folder for this run; default runs/smoke/<time>.")
    ] = None,
    trainer_module: Annotated[
        str, typer.Option(hidden=True, help="For tests that inject failures.")
    ] = "trainer_node",
) -> None:
    """From checkpoint to name@STEPS: train, merge, publish, prove. Exit code 0 only if every check
    held.
    """
    console = _console()
    cuda = device == "cuda"
    try:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"--device is cpu or cuda, got {device!r}")
        if finetuning_type not in ("lora", "full"):
            raise ConfigError(f"--finetuning-type is lora or full, got {finetuning_type!r}")
        config = SmokeConfig(
            run_dir=run_dir or Path("runs/smoke") / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"),
            model=_tiny_model(arch, trainer_python, console)
            if model is None
            else local_model(model, python=trainer_python),
            trainer_python=trainer_python,
            inference_python=inference_python,
            report=report,
            name=name,
            device="cuda" if cuda else "cpu",
            dtype=_dtype(dtype, cuda=cuda),
            steps=steps,
            random_init=random_init,
            proof=proof,
            finetuning_type="full" if finetuning_type == "full" else "lora",
            lora=LoraConfig(
                rank=lora_rank,
                alpha=lora_alpha,
                dropout=lora_dropout,
                targets=tuple(t for t in lora_targets.split(",") if t),
            ),
            lr=lr,
            trainer_parallel=_parallel(
                trainer_ranks,
                tensor=trainer_tp,
                pipeline=trainer_pp,
                expert=trainer_ep,
                context=trainer_cp,
                expert_tensor=trainer_etp,
            ),
            inference_tensor_parallel=inference_tp,
            trainer_gpus=_numbers(trainer_gpus) if cuda else (),
            inference_gpus=_numbers(inference_gpus) if cuda else (),
            port=port,
            publication=PublicationConfig(
                mode=mode,  # type: ignore[arg-type]  # PublicationConfig checks it
                shadow_bytes=shadow_bytes,
            ),
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=not cuda_graphs,
            trainer_module=trainer_module,
        )
        interrupts = Interrupts()
        interrupts.install()
        result = run_smoke(config, console=console, check_interrupts=interrupts.check)
    except (SpliceError, ValidationError) as error:
        _die(console, error)
    except KeyboardInterrupt:
        console.print("interrupted; every process of the run was ended")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def serve(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run.toml. Then only --set and --resume apply of the options."),
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of this run: journal, endpoint, versions.")
    ] = None,
    name: Annotated[str, typer.Option(help="The served alias.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="Where to bind; port 0: any, written to RUN_DIR/endpoint.")
    ] = "tcp://127.0.0.1:0",
    transport: Annotated[str, typer.Option(help="tcp or nccl.")] = _PUBLICATION.transport,
    replicas: Annotated[int, typer.Option(help="Inference nodes to wait for.")] = 1,
    pause_mode: Annotated[
        str, typer.Option(help="keep, keep_kv, wait or abort.")
    ] = _PUBLICATION.pause_mode,
    drain_s: Annotated[
        float,
        typer.Option(help="How long a request for name@N may go on before a swap ends it."),
    ] = _PUBLICATION.drain_s,
    mode: PublicationModeOption = _PUBLICATION.mode,
    shadow_bytes: ShadowBytes = _PUBLICATION.shadow_bytes,
    canary: Annotated[
        bool,
        typer.Option(
            help="Before @0 and after a failure, compare a prompt's log-probs with the trainer's."
        ),
    ] = _PUBLICATION.canary,
    curve_dir: Annotated[
        Path | None, typer.Option(help="CURVE keys from `splice keys`; mandatory off loopback.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in RUN_DIR, if there is one, at its endpoint.",
        ),
    ] = False,
    keep_versions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Versions whose checkpoints stay on disk, at least 2 and the served one. 0: all.",
        ),
    ] = 2,
    full_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Every FULL_EVERY-th publication sends all tensors. Default: only where needed.",
        ),
    ] = _PUBLICATION.full_every,
    ready_timeout_s: Annotated[
        float, typer.Option(min=1, help="Longest wait of a job for missing nodes, in seconds.")
    ] = _ORCHESTRATOR.ready_timeout_s,
    train_timeout_s: Annotated[
        float,
        typer.Option(min=1, help="Longest training, forward, save or load request, in seconds."),
    ] = _ORCHESTRATOR.train_timeout_s,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve numbers for Prometheus there; 0: any, written to RUN_DIR/metrics.",
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address of --metrics-port.")
    ] = _ORCHESTRATOR.metrics_host,
    stop_on_term: Annotated[
        bool,
        typer.Option(
            "--stop-on-term",
            help="SIGTERM ends the run. By default it ends only the orchestrator, for --resume.",
        ),
    ] = False,
) -> None:
    """Run the orchestrator until a client stops it. SPLICE_RUN_TOKEN holds the run's token."""
    log_to_stderr()
    token = os.environ.get("SPLICE_RUN_TOKEN", "")
    console = Console(stderr=True)
    try:
        if file is not None:
            run = load(file, overrides or ())
            kept = some_token(run.run_dir)
            found = run.orchestrator_config(run_token=kept, resume=resume)
            bound = _old_endpoint(run.run_dir, found.endpoint, resume=resume)
            asyncio.run(_serve(replace(found, endpoint=bound)))
            return
        if run_dir is None or not name:
            raise ConfigError("give a run.toml, or --run-dir and --name")
        if len(token) < 16:
            raise ConfigError("set SPLICE_RUN_TOKEN to the run's secret (at least 16 characters)")
        publication = PublicationConfig(
            transport=transport,  # type: ignore[arg-type]  # PublicationConfig checks it
            pause_mode=pause_mode,  # type: ignore[arg-type]
            drain_s=drain_s,
            full_every=full_every,
            mode=mode,  # type: ignore[arg-type]
            shadow_bytes=shadow_bytes,
            canary=canary,
        )
        config = OrchestratorConfig(
            run_dir=run_dir,
            run_token=token,
            name=name,
            endpoint=_old_endpoint(run_dir, endpoint, resume=resume),
            publication=publication,
            replicas=replicas,
            curve_dir=curve_dir,
            keep_versions=keep_versions or None,
            ready_timeout_s=ready_timeout_s,
            train_timeout_s=train_timeout_s,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            resume=resume,
            stop_on_term=stop_on_term,
        )
        asyncio.run(_serve(config))
    except (SpliceError, JournalError, OSError) as error:
        _die(console, error)


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
    file: Annotated[
        Path | None, typer.Argument(help="A run.toml, instead of --endpoint and --config.")
    ] = None,
    overrides: Overrides = None,
    endpoint: Annotated[
        str, typer.Option(help="The orchestrator's address, tcp://host:port.")
    ] = "",
    config: Annotated[Path | None, typer.Option(help="TrainerConfig as JSON.")] = None,
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
            help="Prefix of the command line, such as 'docker run --rm --init -i ... IMAGE'."
        ),
    ] = "",
    python: Annotated[
        str,
        typer.Option(
            help="Interpreter of the trainer environment, as the prefix's command sees it."
        ),
    ] = "",
    node_id: str = "trainer",
    max_restarts: Annotated[
        int,
        typer.Option(help="Restarts of a trainer that crashes without training, within an hour."),
    ] = 2,
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
    """Launch the trainer on this host and restart it after crashes. Token as for `serve`."""
    log_to_stderr()
    token = os.environ.get("SPLICE_RUN_TOKEN", "")
    try:
        if file is not None:
            run = load(file, overrides or ())
            config = node_file(run, node_id, run.trainer_config().model_dump_json(indent=1))
            endpoint, token = run.endpoint(), run.token()
            python = python or str(run.trainer.python)
            os.environ.update(trainer_variables(run.trainer, gpus=run.trainer.gpus))
        if config is None or not endpoint:
            raise ConfigError("give a run.toml, or --endpoint and --config")
        launch = trainer_host.TrainerLaunch(
            endpoint=endpoint,
            config=config,
            python=python or sys.executable,
            module=module,
            node_id=node_id,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            prefix=tuple(trainer_host.split_prefix(prefix)),
            max_restarts=max_restarts,
            template=template,
        )
        os.environ["SPLICE_RUN_TOKEN"] = token  # the ranks read it
        code = trainer_host.run(launch, run_token=token)
    except (SpliceError, ValidationError, OSError) as error:
        _die(Console(stderr=True), error)
    raise typer.Exit(code)


@app.command()
def doctor(
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="trainer, inference or orchestrator; repeat it. Default: what is installed."
        ),
    ] = None,
    python: Annotated[Path, typer.Option(help="Interpreter of the environment to judge.")] = _HERE,
    device: Annotated[
        str, typer.Option(help="cpu or cuda. Default: cuda where the host has GPUs.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check this host's GPUs and one environment's package versions for a role.

    Exit code 1 if a version does not fit or a package is missing.
    """
    console = _console()
    gpus = doctoring.list_gpus()
    try:
        if device not in ("", "cpu", "cuda"):
            raise ConfigError(f"--device is cpu or cuda, got {device!r}")
        roles = [_role(text) for text in role or ()]
        on_gpus = device == "cuda" or (not device and bool(gpus))
        findings = doctoring.diagnose(python=python, roles=roles, on_gpus=on_gpus)
    except ConfigError as error:
        _die(console, error)
    fits = all(f.ok for f in findings) and (device != "cuda" or bool(gpus))
    if as_json:
        rows = {"packages": list(map(asdict, findings)), "gpus": list(map(asdict, gpus))}
        typer.echo(json.dumps({"ok": fits, **rows}, indent=1))
    else:
        _print_findings(console, findings, gpus)
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
        console.print("no GPUs: nvidia-smi lists none", highlight=False)


def _role(text: str) -> doctoring.NodeRole:
    for role in doctoring.ROLES:
        if text == role:
            return role
    raise ConfigError(f"--role is {', '.join(doctoring.ROLES)}; got {text!r}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="HF checkpoint folder, or a hub id.")],
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
    """Check that the trainer computes a model as transformers does.

    Exit code 1 if it does not, 2 if the model cannot be checked.
    """
    if whole and serve:
        text = (
            f"--serve publishes the small model; for its own weights: splice smoke --model {model}"
        )
        _die(_console(), ConfigError(text))
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
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            _die(_console(), ConfigError(f"--trainer-python {trainer_python}: {error.strerror}"))
        if code or not serve:
            raise typer.Exit(code)
        try:
            config = SmokeConfig(
                run_dir=Path(folder) / "run",
                model=small,
                trainer_python=trainer_python,
                inference_python=inference_python,
            )
            result = run_smoke(config, console=_console())
        except SpliceError as error:
            _die(_console(), error)
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
    trainer = [
        ("trainer", "trainer"),
        *(("launcher", f"trainer-launcher-{rank}") for rank in range(trainer_hosts)),
    ]
    hosts = {
        "trainer": trainer,
        **{i: [("inference", i)] for i in inference},
        **{c: [("client", c)] for c in client},
    }
    taken = ["orchestrator", *(node_id for _, node_id in trainer)]
    try:
        for name in map(check_node_id, (*inference, *client)):
            if name in taken:
                raise ConfigError(f"the name {name} is taken; every node and client needs its own")
            taken.append(name)
        make_keys(directory, hosts=hosts)
    except (ConfigError, OSError) as error:
        _die(Console(stderr=True), error)
    typer.echo(f"Start the orchestrator with --curve-dir {directory / 'orchestrator'}.")
    for host in hosts:
        typer.echo(
            f"Copy {directory / host} to the host of {host}, and set SPLICE_CURVE_DIR to it there."
        )


def _console() -> Console:
    """A console wide enough for the table, even without a terminal."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _die(console: Console, error: Exception) -> NoReturn:
    text = str(error)
    if isinstance(error, ValidationError):
        text = "; ".join(mistakes(error, model=_CHECKED[error.title]))
    console.print(f"splice: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None


def _tiny_model(arch: str, python: Path, console: Console) -> Path:
    if arch not in TINY:
        raise ConfigError(f"--arch is one of {', '.join(TINY)}, got {arch!r}")
    path = TINY[arch]
    if not (path / "config.json").exists():
        console.print(f"making the tiny {arch} checkpoint in {path}")
        argv = python_command(
            python, "-m", "trainer_node.tools.make_checkpoint", "--arch", arch, "--out", path
        )
        env = python_environment(os.environ)
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode != 0:
            raise ConfigError(f"could not make {path}: {(done.stdout + done.stderr)[-2000:]}")
    return path


def _dtype(dtype: str | None, *, cuda: bool):  # type: ignore[no-untyped-def]
    chosen = dtype or ("bfloat16" if cuda else "float32")
    if chosen not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    return chosen


def _parallel(
    ranks: int, *, tensor: int, pipeline: int, expert: int, context: int, expert_tensor: int
) -> ParallelConfig:
    return ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        context=context,
        expert_tensor=expert_tensor,
        world_size=ranks or pipeline * math.lcm(tensor * context, expert * expert_tensor),
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(t) for t in text.split(",") if t.strip())
    except ValueError:
        raise ConfigError(f"expected GPU numbers like 0,1, got {text!r}") from None
