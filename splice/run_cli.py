"""The commands of `splice` around a run and its run.toml."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.hub import is_hub_id
from orchestrator.storage import layout
from splice import report, trace
from splice import watch as watching
from splice.client.run_file import (
    FILE_NAME,
    TRAINING,
    RunFile,
    find_endpoint,
    folder_of,
    load,
    load_as,
    node_file,
    read,
    stop_command,
)
from splice.cluster import machine, slurm, up
from splice.cluster.doctor import Gpu, list_gpus
from splice.cluster.elsewhere import Elsewhere, Place
from splice.cluster.environments import install
from splice.dashboard import Dashboard
from splice.rl import browse, decisions

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="Show, check or describe a run.toml.")
app.add_typer(config_app, name="config")
Run = Annotated[
    Path, typer.Argument(help="A run.toml, the folder that holds one, or the folder of a run.")
]
FileArgument = Annotated[Path, typer.Argument(help="A run.toml, or the folder that holds it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE over the file's, such as trainer.seed=7; repeat it."),
]
On = Annotated[Place, typer.Option(help="host: this one.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write script or manifest, submit nothing.")
]
GpusPerHost = Annotated[int, typer.Option(min=1, help="slurm: GPUs of one host.")]
CpusPerGpu = Annotated[int, typer.Option(min=1, help="slurm, k8s: CPUs for each GPU of a role.")]
MemoryPerGpu = Annotated[int, typer.Option(min=1, help="k8s: GiB for each GPU of a pod.")]
Sbatch = Annotated[
    str, typer.Option(help="slurm: more options of sbatch, such as '--partition=gpu'.")
]
RayAddress = Annotated[
    str, typer.Option(help="ray: the cluster's address; auto: this host's cluster.")
]
TrainerImage = Annotated[str, typer.Option(help="k8s: image of trainer, orchestrator, loop.")]
InferenceImage = Annotated[str, typer.Option(help="k8s: image of inference nodes.")]
Claim = Annotated[str, typer.Option(help="k8s: PersistentVolumeClaim for the run's folder.")]
TimeoutS = Annotated[float, typer.Option(min=1, help="Longest wait for all nodes, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_HERE = Path()
_INFERENCE = machine.inference_python()
UP_TIMEOUT_S = 1800.0
TAIL_LINES = 20
FRAME_WIDTH = 130
LOGGED = ("all", "up", "orchestrator", "trainer", "inference", "router", "loop")
"""What `splice logs` takes for a role, even where a folder has that name."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where run.toml is written.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a Hugging Face checkpoint, or a Hub id. Default: the recipe's."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Also write what to train; docs/train.md has the names.")
    ] = "",
    gpus: Annotated[
        str | None, typer.Option(help="GPUs to use, such as 0,1. Default: all; '': the CPU.")
    ] = None,
    job_gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of a job and the GB of each, such as 16x80, for a host that has none."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The served alias.")] = "policy",
    trainer_python: Annotated[
        Path, typer.Option(help="Interpreter of the trainer environment.")
    ] = Path(sys.executable),
    inference_python: Annotated[
        Path, typer.Option(help="Interpreter of the inference environment.")
    ] = _INFERENCE,
    as_json: AsJson = False,
) -> None:
    """Look at this host's GPUs and the model, and write a commented run.toml."""
    from splice.train import recipes

    if job_gpus is not None and gpus is not None:
        raise ConfigError("--gpus names GPUs of this host, --job-gpus those of a job: choose one")
    chosen_recipe = recipes.read(recipe) if recipe else None
    if model is None:
        if chosen_recipe is None:
            raise ConfigError("name --model, or a --recipe, which has one")
        model = Path(chosen_recipe.model)
    of_recipe: dict[str, Any] = {}
    if chosen_recipe is not None:
        of_recipe = {
            "lora_rank": chosen_recipe.lora_rank,
            "max_model_len": chosen_recipe.max_model_len,
            "training": chosen_recipe.head + chosen_recipe.text,
        }
    if not inference_python.exists():
        raise ConfigError(
            f"no inference interpreter at {inference_python}; run `make envs`, or pass "
            "--inference-python"
        )
    path, chosen = machine.write_run_file(
        folder,
        model=model,
        name=name,
        gpus=_chosen_gpus(gpus) if job_gpus is None else _gpus_of_job(job_gpus),
        trainer_python=Path(os.path.abspath(trainer_python)),
        inference_python=Path(os.path.abspath(inference_python)),
        **of_recipe,
    )
    try:
        load(path)
        if chosen_recipe is not None:
            chosen_recipe.copy_files(folder)
    except SpliceError:
        path.unlink()
        raise
    if as_json:
        typer.echo(json.dumps({"file": os.path.abspath(path), "chosen": chosen}))
        return
    _say(f"wrote {path}: {chosen}")
    command = chosen_recipe.command if chosen_recipe else "up"
    where = "" if job_gpus is None else " --on slurm"
    _say(f"next: splice {command} {path}{where}")


def _gpus_of_job(text: str) -> list[Gpu]:
    count, times, memory_gb = text.partition("x")
    if not (times and count.isdecimal() and memory_gb.isdecimal() and int(count) > 0):
        raise ConfigError(f"--job-gpus is GPUs and the GB of each, such as 16x80; got {text!r}")
    memory_mib = int(memory_gb) * 10**9 // 2**20
    return [Gpu(index=i, name="", memory_mib=memory_mib, driver="") for i in range(int(count))]


def _chosen_gpus(text: str | None) -> list[Gpu]:
    found = list(list_gpus())
    if text is None and not found and slurm.answers():
        raise ConfigError(
            "this host has no GPU but reaches Slurm, as a login node does. Name the job's GPUs "
            "and the GB of each, such as --job-gpus 16x80; for this host's CPU, --gpus ''"
        )
    if text is None:
        return found
    try:
        wanted = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--gpus is a list of numbers like 0,1; got {text!r}") from None
    by_index = {gpu.index: gpu for gpu in found}
    absent = [number for number in wanted if number not in by_index]
    if absent:
        raise ConfigError(f"this host has no GPU {absent}; it has {sorted(by_index)}")
    return [by_index[number] for number in wanted]


@app.command("up")
def bring_up(
    file: FileArgument = _HERE,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the file's run_dir.")
    ] = False,
    publish: Annotated[
        bool, typer.Option(help="Publish @0, so that the alias answers. Else submit InitialSync.")
    ] = True,
    timeout_s: TimeoutS = UP_TIMEOUT_S,
    on: On = "host",
    dry_run: DryRun = False,
    gpus_per_host: GpusPerHost = 8,
    cpus_per_gpu: CpusPerGpu = 8,
    memory_per_gpu: MemoryPerGpu = 64,
    sbatch: Sbatch = "",
    ray_address: RayAddress = "auto",
    trainer_image: TrainerImage = "",
    inference_image: InferenceImage = "",
    claim: Claim = "splice-run",
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Return when the run ends; for systemd.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start orchestrator, trainer and inference nodes, here in the background or on a cluster.

    Returns once the run serves its alias. Slurm and Kubernetes start it later.
    """
    said, pid = "", 0

    def on_wait(text: str) -> None:
        nonlocal said
        if text != said:
            said = text
            _say(text)

    run = load(file, overrides or ())
    elsewhere = Elsewhere(
        on=on,
        dry_run=dry_run,
        gpus_per_host=gpus_per_host,
        cpus_per_gpu=cpus_per_gpu,
        memory_per_gpu=memory_per_gpu,
        sbatch=sbatch,
        ray_address=ray_address,
        trainer_image=trainer_image,
        inference_image=inference_image,
        claim=claim,
    )
    if foreground and on != "host":
        raise ConfigError("--foreground is for a run on this host; leave --on out")
    try:
        if on != "host" or dry_run:
            state = elsewhere.start(
                run, resume=resume, publish=publish, timeout_s=timeout_s, on_wait=on_wait
            )
            if on != "ray":
                say_submitted(state, as_json=as_json)
                return
        else:
            pid = up.start(run, resume=resume, publish=publish)
            state = up.wait_until_up(run.run_dir, pid, timeout_s=timeout_s, on_wait=on_wait)
        facts = {
            "openai_urls": [f"{url}/v1" for url in state["base_urls"]],
            "replica_urls": [f"{url}/v1" for url in state["replica_urls"]],
            "alias": run.name,
            "endpoint": find_endpoint(run.run_dir),
            "run_dir": str(run.run_dir),
            "token_file": str(run.run_dir / "token"),
            "logs": str(run.run_dir / "logs"),
        }
    except KeyboardInterrupt:
        _say(f"interrupted; `{stop_command(run.run_dir)}` ends what has started")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        typer.echo(f"up: {run.name} on {', '.join(facts['openai_urls'])}")
        typer.echo(f"client: SpliceClient.of_run({facts['run_dir']!r})")
        typer.echo(f"endpoint: {facts['endpoint']}   token: in {facts['token_file']}")
        typer.echo(f"logs: {facts['logs']}   end the run: {stop_command(run.run_dir)}")
    if foreground:
        sys.stdout.flush()
        code = up.follow(run.run_dir, pid)
        raise typer.Exit(code)


def say_submitted(state: dict[str, Any], *, as_json: bool) -> None:
    """Print what Slurm or Kubernetes got."""
    if as_json:
        typer.echo(json.dumps(state))
    elif "manifest" in state:
        typer.echo(state["manifest"])
    else:
        said, path = state["submitted"], state["script"]
        typer.echo(path if said is None else f"{said}: {path}")


@app.command()
def status(run: Run = _HERE, as_json: AsJson = False) -> None:
    """Say whether the run is up, what it serves, and the state of each node."""
    found = up.status(_run_dir(run))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _console().print(watching.render(found), soft_wrap=True)


@app.command()
def watch(
    run: Run = _HERE,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval_s: Annotated[float, typer.Option(min=1, help="Seconds between frames.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print each frame as a line.")] = False,
) -> None:
    """Show nodes, memory, versions, queue, publications and training as they change."""
    console = _console()
    run_dir = _run_dir(run)
    if as_json or once:
        while True:
            found = watching.frame(run_dir)
            if as_json:
                typer.echo(json.dumps(found))
            else:
                console.print(watching.render(found))
            if once:
                return
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(watching.render(watching.frame(run_dir)), refresh=True)
            time.sleep(interval_s)


@app.command()
def logs(
    role: Annotated[
        str,
        typer.Argument(
            help="up, orchestrator, trainer, inference, loop, or all; or the run, for all."
        ),
    ] = "all",
    run: Annotated[
        Path, typer.Option(help="A run.toml, its folder, or the folder of a run.")
    ] = _HERE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as lines come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of each file.")] = TAIL_LINES,
) -> None:
    """Print the last lines of the roles' logs."""
    if role not in LOGGED and ("/" in role or Path(role).exists()):
        role, run = "all", Path(role)
    folder = _run_dir(run) / "logs"
    prefix = "" if role == "all" else role
    files = sorted(folder.glob(f"{prefix}*.log"))
    if not files:
        known = sorted({p.name.split(".")[0] for p in folder.glob("*.log")})
        raise ConfigError(f"no log of {role!r} in {folder}; there are {', '.join(known) or 'none'}")
    for line in _lines(files, last=lines, follow=follow):
        typer.echo(line)


def _lines(files: list[Path], *, last: int, follow: bool) -> Iterator[str]:
    """Lines with the file's name before them, if there are several files."""
    open_files = {path.stem: path.open(errors="replace") for path in files}
    width = max(map(len, open_files)) if len(open_files) > 1 else 0
    pending = {name: _last(_whole_lines(file), last) for name, file in open_files.items()}
    while True:
        for name, found in pending.items():
            for line in found:
                yield f"{name:<{width}} | {line}" if width else line
        if not follow:
            return
        time.sleep(0.2)
        pending = {name: _whole_lines(file) for name, file in open_files.items()}


def _whole_lines(file: IO[str]) -> list[str]:
    """Read the lines since the last call; one that is still being written waits for the next."""
    began = file.tell()
    if os.fstat(file.fileno()).st_size < began:  # it began again
        began = file.seek(0)
    text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.seek(began)
        file.read(len(whole))
    return whole.splitlines()


def _last(lines: list[str], count: int) -> list[str]:
    return lines[max(0, len(lines) - count) :]


@app.command()
def samples(
    run: Run = _HERE,
    step: Annotated[int | None, typer.Option(help="Only of this step. Default: of all.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    contains: Annotated[
        str | None, typer.Option(help="Text in prompt or answer, in any case.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most samples.")] = 20,
    whole: Annotated[
        bool, typer.Option("--whole", help="Whole texts, in a pager on a terminal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print samples as JSON lines, with log-probs.")
    ] = False,
) -> None:
    """Show rollouts of the run's loop, those of its newest step first."""
    console = _console()
    if best and worst:
        raise ConfigError("choose one of --best and --worst")
    order: browse.Order = "best" if best else "worst" if worst else "newest"
    found = browse.choose(_loop_dir(run), step=step, order=order, contains=contains, limit=limit)
    if as_json:
        for sample in found:
            typer.echo(json.dumps(sample))
    elif whole and console.is_terminal:
        with console.pager(styles=True):
            console.print(browse.whole(found))
    else:
        console.print(browse.whole(found) if whole else browse.table(found))


@app.command("report")
def make_report(
    run: Run = _HERE,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one HTML page about the run's loop: plots, a timeline of both sides, samples."""
    out.write_text(report.page(_loop_dir(run)), encoding="utf-8")
    typer.echo(str(out))


@app.command()
def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs, to compare if several.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8420,
    host: Annotated[
        str, typer.Option(help="Address. Whoever reaches it sees the samples.")
    ] = "127.0.0.1",
) -> None:
    """Serve a live page: curves, evaluations, both sides, samples; of several runs, comparisons."""
    loops = [_loop_dir(run) for run in runs or [_HERE]]
    try:
        board = Dashboard(loops, host=host, port=port)
    except OSError as error:
        raise ConfigError(f"cannot serve on {host}:{port} ({error}); set another --port") from error
    with board:
        typer.echo(f"{board.url} (Ctrl-C ends it)")
        while True:
            time.sleep(1.0)


@app.command("trace")
def write_trace(
    run: Run = _HERE,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Only the newest steps.")] = 50,
) -> None:
    """Write both sides over time, to open in ui.perfetto.dev: steps, publications, requests.

    `trainer.profile_versions` records kernels; this command names their files.
    """
    loop_dir = _loop_dir(run)
    out.write_text(json.dumps(trace.trace(loop_dir, steps=steps)), encoding="utf-8")
    typer.echo(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing")
    for path in sorted((loop_dir.parent / "profiles").glob("*.json.gz")):
        typer.echo(f"{path}: kernels of one step's training")


@app.command()
def stop(run: Run = _HERE, as_json: AsJson = False) -> None:
    """End the run: its orchestrator, and every role that `splice up` started here."""
    run_dir = _run_dir(run)
    was_up = up.stop(run_dir)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(run_dir), "was_up": was_up}))
        return
    typer.echo(f"the run in {run_dir} has ended" if was_up else f"nothing runs in {run_dir}")


@app.command()
def inference(
    file: FileArgument = _HERE,
    index: Annotated[int, typer.Option(min=0, help="Which of inference.replicas.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Run one inference node of a run.toml on this host.

    Endpoint and token come from the run's folder, or from SPLICE_ENDPOINT and SPLICE_RUN_TOKEN.
    """
    run = load(file, overrides or ())
    node_id, python = f"inference-{index}", str(run.inference.python)
    own = run.inference_config(index)
    if is_hub_id(own.model):
        own = own.model_copy(update={"model": machine.local_model(own.model, python=python)})
    config = node_file(run, node_id, own.model_dump_json(indent=1))
    argv = python_command(python, "-m", "inference_node", "--endpoint", run.endpoint())
    argv += ["--node-id", node_id, "--config", str(config)]
    os.execvpe(python, argv, python_environment({**os.environ, "SPLICE_RUN_TOKEN": run.token()}))


@app.command()
def router(file: FileArgument = _HERE, overrides: Overrides = None) -> None:
    """Run one URL in front of the inference nodes of a run.toml on this host.

    `splice up` starts it where there are several. It finds the orchestrator as `splice inference`
    does.
    """
    run = load(file, overrides or ())
    config = node_file(run, "router", run.model_dump_json(indent=1))
    argv = python_command(sys.executable, "-m", "splice.replica_router", config)
    env = python_environment({**os.environ, "SPLICE_RUN_TOKEN": run.token()})
    os.execve(sys.executable, argv, env)


@app.command()
def tinker(
    run: Run = _HERE,
    host: Annotated[
        str, typer.Option(help="Address; beyond loopback set SPLICE_TINKER_API_KEY.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="A further name of the model, such as Qwen/Qwen3-8B.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature at which the recipe samples what it trains on.")
    ] = 1.0,
    old_snapshots: Annotated[
        int,
        typer.Option(min=0, help="Newest snapshots to serve again when asked for; 0: refuse them."),
    ] = 0,
) -> None:
    """Serve Tinker's API in front of a run that is up, until interrupted.

    Clients set TINKER_BASE_URL to the printed URL, and TINKER_API_KEY to the content of the file
    that is printed next to it.
    """

    def on_url(url: str) -> None:
        typer.echo(f"TINKER_BASE_URL={url}")
        typer.echo(f"TINKER_API_KEY=$(cat {run_dir / 'tinker' / 'api_key'})")

    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        from splice.tinker import server  # needs the extra

        run_dir = _run_dir(run)
        server.serve(
            run_dir,
            on_url,
            host=host,
            port=port,
            model_name=model_name,
            temperature=temperature,
            old_snapshots=old_snapshots,
        )
    except ModuleNotFoundError as error:
        text = f"{error}; `splice tinker` needs its extra: {install('tinker')}"
        raise ConfigError(text) from error


@config_app.command()
def show(file: FileArgument = _HERE, overrides: Overrides = None) -> None:
    """Print every setting of the run, defaults included, as JSON."""
    typer.echo(load(file, overrides or ()).model_dump_json(indent=1))


@config_app.command()
def check(file: FileArgument = _HERE, overrides: Overrides = None) -> None:
    """Check the file, and that model, interpreters, GPUs and ports on this host fit it."""
    from splice.train import command
    from splice.train.sections import SFT_LOSS, SftFile, TrainFile

    values = read(file)
    if not TRAINING & values.keys():
        up.check(load(file, overrides or ()))
    else:
        loop, loss = values.get("loop", {}), values.get("loss", {})
        has_reward = "reward" in loop or any("loop.reward" in o for o in overrides or ())
        is_sft = not has_reward or loss.get("name") == SFT_LOSS
        run = load_as(SftFile if is_sft else TrainFile, file, overrides or ())
        made = command.plan(run, folder_of(file))
        up.check(run)
        typer.echo(command.step_text(made))
    typer.echo("ok")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of run.toml."""
    typer.echo(json.dumps(RunFile.model_json_schema(), indent=1))


def _console() -> Console:
    """Wide enough for the tables, even without a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else FRAME_WIDTH)


def _run_dir(path: Path) -> Path:
    """Return the folder of the run that the user means."""
    if path.is_file() or (path / FILE_NAME).is_file():
        return load(path).run_dir
    if not any((path / name).exists() for name in ("journal.sqlite", "endpoint", up.STATE)):
        raise ConfigError(f"{path} is neither a {FILE_NAME}, nor holds one, nor is a run's folder")
    return path.absolute()


def _loop_dir(path: Path) -> Path:
    """Return the folder of the loop that the user means: a run's, or a separate one."""
    is_loop = (path / decisions.LOG).is_file()
    folder = path if is_loop else _run_dir(path) / decisions.LOOP_DIR
    layout.check(folder)
    return folder


def _say(text: str) -> None:
    typer.echo(text, err=True)
